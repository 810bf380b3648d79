# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Adaptation quality
# TESSA, LoRA and BD-LoRA at matched budgets, over seeds. `RESULTS = None` reads the reference results; set it to a
# folder of your own, such as `"results"`, or set `TESSA_RESULTS`.

# %%
from analysis.figures import quality
from analysis.notebook import Results

RESULTS = None
results = Results(RESULTS)

# %%
results.show("quality")

# %% [markdown]
# ## Means over seeds
# `value` is the task's metric; `trainable_params` says how well the budgets match.

# %%
rows = quality.rows(results.folder, results.frame)
keys = [key for key in ("task", "method", "placement", "rank_equivalent") if key in rows]
values = [key for key in ("value", "trainable_params") if key in rows]
rows.groupby(keys, dropna=False, sort=False)[values].agg(["mean", "std", "count"]) if len(rows) else rows

# %% [markdown]
# ## The claim

# %%
claims = results.claims()
claims[claims["id"] == "C5"]
