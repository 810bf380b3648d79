"""A server that is already running and speaks OpenAI's completions API, such as ``vllm serve``."""

from __future__ import annotations

from tessa.backend import BackendSpec

SPEC = BackendSpec(
    name="openai",
    title="Running server",
    adapter_format="server",
    summary=(
        "Whatever serves at `url`: nothing is started and nothing is stopped. Requests go to /v1/completions as token "
        "ids and choose their adapter by model name; token counts are the server's own. What the server does inside "
        "cannot be seen from here, so there are no counters, and `model`, `tp` and `dtype` are what the user says."
    ),
    options={
        "counts": ("token_ids", "usage"),
        "gate": ("prompt_logprobs", "continuation", "off"),
        "check_models": ("on", "off"),
    },
    settings={"url": "", "base_model": "", "adapters": "adapter-{index:04d}", "api_key_env": ""},
    external=True,
    engine="experiments.engine.external:OpenAIEngine",
)
