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
# # Overview
# What is stored, and the paper's claims beside it. `RESULTS = None` reads the reference results that come with the
# project; set it to a folder of your own, such as `"results"`, or set `TESSA_RESULTS`.

# %%
from analysis.notebook import Results

RESULTS = None
results = Results(RESULTS)

# %% [markdown]
# ## What is there

# %%
results.overview()

# %% [markdown]
# ## Claims
# A verdict follows a written rule (`python -m analysis claims` prints the rules). Measured evidence comes before
# emulated, emulated before modelled.

# %%
results.claims()

# %% [markdown]
# ## Throughput and adapter cost over tensor-parallel degrees

# %%
results.show("tp_scaling")

# %% [markdown]
# ## The numbers themselves
# One row per cell and round, all columns; `status` other than `complete` is a gap with a reason.

# %%
columns = ["experiment", "variant", "tp", "repeat", "status", "output_tokens_per_s", "adapter_cost"]
results.frame[columns].head(20)
