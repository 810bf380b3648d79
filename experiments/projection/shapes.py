"""Layer shapes of the models that are projected, and the geometry of their matrix products on one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessa.errors import UserError

COLUMN = "column"
ROW = "row"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder with gated MLP and grouped-query attention. All counts are of the whole model."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int

    @property
    def layer_weights(self) -> int:
        """Weights of the linear layers of one transformer layer (elements, before sharding)."""
        qkv = self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim
        return qkv + self.heads * self.head_dim * self.hidden + 3 * self.hidden * self.ffn

    def kv_heads_on_rank(self, tp: int) -> int:
        """KV heads that one rank holds; they are replicated when there are fewer than ranks."""
        return max(1, self.kv_heads // tp)


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear module: `d_out` x `d_in` before sharding, and which dimension tensor parallelism splits."""

    name: str
    d_out: int
    d_in: int
    kind: str
    rank_out: int
    rank_in: int


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """Modules that one matrix product computes (q, k, v together; gate and up together)."""

    name: str
    kind: str
    parts: tuple[Linear, ...]

    @property
    def rank_out(self) -> int:
        return sum(part.rank_out for part in self.parts) if self.kind == COLUMN else self.parts[0].rank_out

    @property
    def rank_in(self) -> int:
        return self.parts[0].rank_in


# Sizes from the models' published config.json. Llama-2-7b and Llama-2-70b are those of the Vidur profiles.
# The two S-LoRA entries are assumptions: hidden 7168 and 8192 and multi-head attention as in its paper (which
# says that its 70B does not use grouped-query attention); layers and MLP width are chosen to give the named
# number of parameters.
MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.1-8b", 4096, 32, 32, 8, 128, 14336, 128256),
        ModelShape("llama-3.1-70b", 8192, 80, 64, 8, 128, 28672, 128256),
        ModelShape("qwen3-32b", 5120, 64, 64, 8, 128, 25600, 151936),
        ModelShape("llama-2-7b", 4096, 32, 32, 32, 128, 11008, 32000),
        ModelShape("llama-2-13b", 5120, 40, 40, 40, 128, 13824, 32000),
        ModelShape("llama-2-70b", 8192, 80, 64, 8, 128, 28672, 32000),
        ModelShape("slora-30b", 7168, 48, 56, 56, 128, 19200, 32000),
        ModelShape("slora-70b", 8192, 80, 64, 64, 128, 24576, 32000),
    )
}

FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def model_shape(name: str) -> ModelShape:
    """The shape named `name`; UserError lists the known ones."""
    try:
        return MODELS[name]
    except KeyError:
        raise UserError(f"unknown model shape {name!r}; known: {', '.join(MODELS)}") from None


def fused_linears(shape: ModelShape, tp: int) -> tuple[FusedLinear, ...]:
    """The four matrix products of one layer on one of `tp` ranks, in order of execution.

    Raises UserError where the query heads or the MLP do not split over `tp` ranks.
    """
    if tp < 1 or shape.heads % tp or shape.ffn % tp:
        raise UserError(
            f"tp={tp} does not divide {shape.name}'s {shape.heads} heads and MLP width {shape.ffn}; "
            f"allowed: {', '.join(str(n) for n in range(1, 65) if not (shape.heads % n or shape.ffn % n))}"
        )
    hidden, dim = shape.hidden, shape.head_dim
    q_out, kv_out = shape.heads * dim, shape.kv_heads * dim
    kv_rank = shape.kv_heads_on_rank(tp) * dim
    q = Linear("q_proj", q_out, hidden, COLUMN, q_out // tp, hidden)
    k = Linear("k_proj", kv_out, hidden, COLUMN, kv_rank, hidden)
    v = Linear("v_proj", kv_out, hidden, COLUMN, kv_rank, hidden)
    o = Linear("o_proj", hidden, q_out, ROW, hidden, q_out // tp)
    gate = Linear("gate_proj", shape.ffn, hidden, COLUMN, shape.ffn // tp, hidden)
    up = Linear("up_proj", shape.ffn, hidden, COLUMN, shape.ffn // tp, hidden)
    down = Linear("down_proj", hidden, shape.ffn, ROW, hidden, shape.ffn // tp)
    return (
        FusedLinear("qkv_proj", COLUMN, (q, k, v)),
        FusedLinear("o_proj", ROW, (o,)),
        FusedLinear("gate_up_proj", COLUMN, (gate, up)),
        FusedLinear("down_proj", ROW, (down,)),
    )


def vocab_on_rank(shape: ModelShape, tp: int) -> int:
    """Rows of the output head on one rank."""
    return math.ceil(shape.vocab / tp)
