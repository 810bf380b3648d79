"""How much an adapter adds to a model, counted from the shapes in a cell's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def shares(config: Mapping[str, Any] | None) -> dict[str, float]:
    """Columns of a cell: `model_parameters` (norms left out), `lora_parameters` (one LoRA adapter of the
    cell's rank-equivalent, its largest where ranks are mixed: rank (d_in + d_out) per projection) and
    `lora_compute_share` (its multiply-adds per token over those of all projections and the output head), `layers`.

    Empty where the configuration or the model's shape is not known.
    """
    try:
        assert config is not None
        model, adapters = config["model"], config["adapters"]
        shape = model["architecture"]
        hidden, inner, layers = (
            int(shape[k]) for k in ("hidden_size", "intermediate_size", "num_hidden_layers")
        )
        heads, keys = int(shape["num_attention_heads"]), int(shape["num_key_value_heads"])
        dim = int(shape.get("head_dim") or hidden // heads)
        head = int(model["vocab_size"]) * hidden
        rank = max(adapters.get("ranks") or [adapters["rank_equivalent"]])
        targets = set(adapters["target_modules"])
    except (AssertionError, KeyError, TypeError, ValueError):
        return {}
    queries, values = heads * dim, keys * dim
    sizes = {
        "q_proj": (queries, hidden),
        "k_proj": (values, hidden),
        "v_proj": (values, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    linear = layers * sum(a * b for a, b in sizes.values())
    lora = layers * sum(rank * (a + b) for name, (a, b) in sizes.items() if name in targets)
    embeddings = head * (1 if shape.get("tie_word_embeddings") else 2)
    return {
        "model_parameters": float(linear + embeddings),
        "lora_parameters": float(lora),
        "lora_compute_share": lora / (linear + head),
        "layers": float(layers),
    }
