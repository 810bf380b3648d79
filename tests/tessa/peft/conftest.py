"""A tiny Llama with grouped-query attention, cheap enough to build for every test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("peft")

from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 61


def _make_llama(seed: int = 0, hidden: int = 64, layers: int = 2, bias: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        attention_bias=bias,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., LlamaForCausalLM]:
    return _make_llama


@pytest.fixture
def llama() -> LlamaForCausalLM:
    return _make_llama()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, VOCAB, (3, 11), generator=torch.Generator().manual_seed(5))
