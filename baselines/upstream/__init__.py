"""The authors' own S-LoRA and Punica, each in an environment of its own on a machine with an NVIDIA GPU.

Nothing of theirs is imported here: `baselines/upstream/slora_server.py` and `baselines/upstream/punica_runner.py`
are run by the interpreter of those environments.
"""

from __future__ import annotations

from tessa.backend import BackendSpec

SLORA = BackendSpec(
    name="slora_upstream",
    title="S-LoRA (authors')",
    adapter_format="lora",
    summary=(
        "The authors' S-LoRA server (github.com/S-LoRA/S-LoRA), driven over its /generate_stream. float16, Llama "
        "without grouped-query attention, adapters on q, k, v, o. One GPU: the sharding of its paper is on the "
        "repository's branch `tp`, which this does not start. Its front end passes on a request's newest token "
        "only, so where it falls behind, the stream lacks tokens and the cell is not complete."
    ),
    settings={"python": "", "port": "0", "max_total_tokens": "14000"},
    external=True,
    engine="experiments.engine.external:SLoraEngine",
)

PUNICA = BackendSpec(
    name="punica_upstream",
    title="Punica (authors')",
    adapter_format="lora",
    summary=(
        "The authors' Punica library (github.com/punica-ai/punica): its Llama with SGMV, under a scheduler of this "
        "project that admits at most one new request a step, as theirs does. Their text generation benchmark is not "
        "used, since its decode reads the adapter of another request. One GPU, float16, Llama, adapters of one rank "
        "on all seven projections; a request without adapter gets one that is zero."
    ),
    settings={"python": ""},
    external=True,
    engine="experiments.engine.external:PunicaEngine",
)
