"""TESSA as a serving backend."""

from __future__ import annotations

from tessa.backend import BackendSpec

SPEC = BackendSpec(
    name="tessa",
    title="TESSA",
    adapter_format="tessa",
    summary=(
        "Slice deltas of the base weight, sharded as the weight is. Column- and row-parallel layers alike: one "
        "product, either wide over the weight and all resident slots or segmented by adapter, added to the base "
        "output before the layer's own all-reduce. No collective of its own."
    ),
    hook="tessa",
    options={"schedule": ("auto", "wide", "segmented")},
)
