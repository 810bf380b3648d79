"""lm-eval's command line with TESSA known to PEFT: ``python -m tessa.lm_eval run --model hf --model_args
...``.

PEFT has no entry point through which an installed package could announce a method, and lm-eval none for
code to import before it loads an adapter; so ``lm_eval --model_args peft=FOLDER`` alone cannot know the
type. This module imports `tessa.peft` and then hands over, with all arguments unchanged.

``--model vllm`` needs no registering: vLLM's plugin reads the adapter that ``lora_local_path`` names, where
``additional_config`` asks for it: ``{"adapter_backend": "tessa"}``, in a ``--model_args`` given as JSON.
"""

from __future__ import annotations

import tessa.peft  # noqa: F401  (registers the adapter type)


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
