"""Starts the authors' S-LoRA server, by the Python of S-LoRA's environment (3.9), with S-LoRA's own options.

Two things differ from ``python -m slora.server.api_server``. ``inputs`` may be a list of token ids, so that the
server gets the workload's prompts and not a text that its tokenizer may cut otherwise. And the memory estimate that
the server prints at its start is left out, since it knows only the models of its paper by their names.
"""

from __future__ import annotations

import os


class TokenIds:
    """A tokenizer that lets prompts pass that are token ids already."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def encode(self, prompt, *args, **kwargs):
        if isinstance(prompt, list):
            return list(prompt)
        return self._tokenizer.encode(prompt, *args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


def main():
    """S-LoRA's own main, which reads the command line."""
    import torch
    from slora.server import api_server
    from slora.server.httpserver import manager

    torch.multiprocessing.set_start_method("spawn")
    original = manager.get_tokenizer
    manager.get_tokenizer = lambda *args, **kwargs: TokenIds(original(*args, **kwargs))
    api_server.print_mem_stats = lambda args: None
    api_server.main()


if os.environ.get("TESSA_DIE_WITH_PARENT") == "1":
    # Outside of main: the processes that S-LoRA spawns read this file too, and must not outlive the server.
    from tessa.vllm.lifetime import die_with_parent

    die_with_parent()

if __name__ == "__main__":
    main()
