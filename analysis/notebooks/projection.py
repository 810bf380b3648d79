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
# # Projection
# An analytic model of a decode step on GPUs that were not at hand, with its errors on published and measured data.
# Nothing on this page is measured serving. `RESULTS = None` reads the reference results; set it to a folder of your
# own, such as `"results"`, or set `TESSA_RESULTS`.

# %%
from analysis import projection
from analysis.notebook import Results

RESULTS = None
results = Results(RESULTS)

# %% [markdown]
# ## How far it is off
# Held-out kernels, all-reduces and S-LoRA's published losses; entries are `None` where their data is not at hand.

# %%
projection.validation(results.folder)

# %% [markdown]
# ## Cost, speed-up and where TESSA stops winning

# %%
results.show("projection")

# %% [markdown]
# ## Claims, modelled, with bands

# %%
results.modelled_claims()

# %% [markdown]
# ## One rank's kernels, emulated
# The same products timed on one device, collectives left out.

# %%
results.show("layer_step")
