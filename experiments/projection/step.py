"""Time of one engine step (decode, prefill, or both) for one backend on one tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from experiments.projection.backends import AdapterLoad, AdapterWork, bound_s, layer_work
from experiments.projection.collectives import all_gather_s, collective_s
from experiments.projection.hardware import ADAPTER_KERNELS, HOST, AdapterKernelConstants, gpu_named
from experiments.projection.ops import BYTES, attention_s, elementwise_s, matmul_s
from experiments.projection.shapes import FUSED, fused_linears, model_shape, vocab_on_rank
from tessa.errors import UserError
from tessa.slices import ALL_MODULES

# Per layer an all-reduce after o and one after down; per step one of the embeddings and the gather of the logits.
LAYER_COLLECTIVES, STEP_COLLECTIVES = 2, 2
# norm, qkv, rope, cache write, attention, o; norm, gate+up, activation, down; two residual adds.
BASE_KERNELS = 12


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of the projection.

    batch: sequences that decode one token each; context: their mean length; prefill_tokens: tokens of prompts
    in the same step, of prompts of `prefill_length`; distinct, resident, rank, modules: see `AdapterLoad`;
    graph: the step replays a CUDA graph (backends that cannot be captured run eagerly all the same); host_s:
    host time per step that is not hidden; added_latency_s: wait before every collective, of all backends alike.
    """

    model: str
    gpu: str
    tp: int
    batch: int = 32
    context: int = 512
    prefill_tokens: int = 0
    prefill_length: int = 512
    rank: int = 16
    distinct: int = 8
    resident: int | None = None
    modules: tuple[str, ...] = ALL_MODULES
    custom_all_reduce: bool = True
    graph: bool = True
    host_s: float = 0.0
    added_latency_s: float = 0.0

    @property
    def tokens(self) -> int:
        return self.batch + self.prefill_tokens

    def load(self) -> AdapterLoad:
        return AdapterLoad(self.tokens, self.distinct, self.rank, self.resident, tuple(self.modules))


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step, by part, and the counts behind them (all per rank and step)."""

    base_s: float
    base_comm_s: float
    adapter_s: float
    adapter_comm_s: float
    gap_s: float
    host_s: float
    adapter_kernels: int
    adapter_collectives: int
    adapter_collective_bytes: float
    adapter_read_bytes: float
    one_adapter_bytes: float
    bound_s: float
    mode: str

    @property
    def total_s(self) -> float:
        return (
            self.base_s + self.base_comm_s + self.adapter_s + self.adapter_comm_s + self.gap_s + self.host_s
        )


@lru_cache(maxsize=65536)
def base_times(setting: Setting) -> tuple[float, float]:
    """Seconds of the base model's own (kernels, collectives) in one step on one rank."""
    shape, gpu = model_shape(setting.model), gpu_named(setting.gpu)
    tokens, tp = setting.tokens, setting.tp
    heads, kv_heads = shape.heads // tp, shape.kv_heads_on_rank(tp)
    layer = sum(float(matmul_s(gpu, tokens, f.rank_out, f.rank_in)) for f in fused_linears(shape, tp))
    layer += 2 * float(elementwise_s(gpu, "norm", tokens, shape.hidden))
    layer += 2 * float(elementwise_s(gpu, "add", tokens, shape.hidden))
    layer += float(elementwise_s(gpu, "rope", tokens, (heads + kv_heads) * shape.head_dim))
    layer += float(elementwise_s(gpu, "act", tokens, shape.ffn // tp))
    layer += attention_s(
        gpu,
        setting.batch,
        setting.context,
        setting.prefill_tokens,
        setting.prefill_length,
        heads,
        kv_heads,
        shape.head_dim,
    )
    reduce = collective_s(gpu, tp, "all_reduce", BYTES * tokens * shape.hidden, setting.custom_all_reduce)
    rows = max(1, setting.batch + setting.prefill_tokens // setting.prefill_length)
    head = float(matmul_s(gpu, rows, vocab_on_rank(shape, tp), shape.hidden))
    gather = all_gather_s(gpu, tp, BYTES * rows * shape.vocab)
    comm = (LAYER_COLLECTIVES * shape.layers + 1) * reduce + gather
    return shape.layers * layer + head, comm + base_collectives(shape.layers, tp) * setting.added_latency_s


def base_collectives(layers: int, tp: int) -> int:
    """Collectives of the base model in one step, on one rank of `tp`."""
    return LAYER_COLLECTIVES * layers + STEP_COLLECTIVES if tp > 1 else 0


def adapter_collectives(backend: str, layers: int, tp: int, modules: tuple[str, ...] = ALL_MODULES) -> int:
    """Collectives that a backend's adapters add to a step: one for each product of a layer that they touch, if any."""
    if backend != "slora" or tp < 2:
        return 0
    touched = [f for f in FUSED if any(name in modules for name in f)]
    return layers * len(touched)


@lru_cache(maxsize=65536)
def step_time(
    backend: str, setting: Setting, constants: AdapterKernelConstants = ADAPTER_KERNELS
) -> StepTime:
    """Seconds of one step of `backend`. UserError for unknown names or sizes that do not split over tp."""
    if setting.tokens < 1:
        raise UserError("a step needs tokens: give batch or prefill_tokens")
    shape, gpu = model_shape(setting.model), gpu_named(setting.gpu)
    base, base_comm = base_times(setting)
    load = setting.load()
    work: AdapterWork = layer_work(backend, gpu, shape, setting.tp, load, constants)
    comm = len(work.collectives) * setting.added_latency_s + sum(
        collective_s(gpu, setting.tp, kind, size, setting.custom_all_reduce)
        for kind, size in work.collectives
    )
    launches = shape.layers * (
        BASE_KERNELS + work.kernels + len(work.collectives) + (2 if setting.tp > 1 else 0)
    )
    device = base + base_comm + shape.layers * (work.seconds + comm)
    if setting.graph and not work.eager:
        gap = shape.layers * HOST.graph_kernel_s * (work.kernels + BASE_KERNELS)
    else:
        gap = max(0.0, launches * HOST.launch_s - device)
    return StepTime(
        base,
        base_comm,
        shape.layers * work.seconds,
        shape.layers * comm,
        gap,
        setting.host_s,
        shape.layers * work.kernels,
        shape.layers * len(work.collectives),
        shape.layers * sum(size for _, size in work.collectives),
        shape.layers * work.read_bytes,
        shape.layers * work.one_bytes,
        shape.layers * bound_s(gpu, shape, setting.tp, load),
        work.mode,
    )


def with_prefill_share(setting: Setting, share: float) -> Setting:
    """The setting whose step has `share` of its tokens from prompts (0 <= share < 1), batch unchanged."""
    if not 0 <= share < 1:
        raise UserError(f"prefill share must lie in [0, 1), got {share}")
    return replace(setting, prefill_tokens=round(setting.batch * share / (1 - share)))
