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
from analysis import quality
from analysis.notebook import Results

RESULTS = None
results = Results(RESULTS)

# %%
results.show("quality")

# %% [markdown]
# ## Means over seeds
# One row per structure and budget; the last columns compare with LoRA at the same budget, paired over seeds.

# %%
quality.table(results.frame)

# %% [markdown]
# ## The claim

# %%
claims = results.claims()
claims[claims["id"] == "C5"]
