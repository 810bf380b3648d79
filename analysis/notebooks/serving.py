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
# # Serving
# What adapters cost as load, adapters and budget change. `RESULTS = None` reads the reference results; set it to a
# folder of your own, such as `"results"`, or set `TESSA_RESULTS`.

# %%
from analysis.notebook import Results

RESULTS = None
results = Results(RESULTS)

# %% [markdown]
# ## Where the time goes
# S-LoRA whole, without its communication and without its products: differences are formed within rounds.

# %%
results.show("breakdown")
results.table("breakdown")

# %% [markdown]
# ## Resident adapters, and how they are drawn

# %%
results.show("adapter_count", "popularity")

# %% [markdown]
# ## Batch, lengths and budget

# %%
results.show("batch_sweep", "budget_sweep")

# %% [markdown]
# ## Latency against the request rate, and traces
# Latency counts from the scheduled arrival, so a server that falls behind shows it.

# %%
results.show("rate_sweep", "trace_replay")

# %% [markdown]
# ## A slower interconnect
# Real ranks, with a latency added to every collective.

# %%
results.show("interconnect")
