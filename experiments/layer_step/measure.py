"""Measures points: builds the shard, checks every backend against float64, times them in turns, and makes rows."""

from __future__ import annotations

import math
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from experiments import provenance
from experiments.layer_step.collectives import Collectives
from experiments.layer_step.executors import Executor, make_executor
from experiments.layer_step.gate import Incorrect, check_products, check_step
from experiments.layer_step.spec import CPU_SCALE, LayerStepSpec, Point, cell_id, scaled_shape
from experiments.layer_step.stack import Stack, build_caches, build_stack, step
from experiments.layer_step.timing import capture, time_cpu, time_cuda
from tessa.errors import UserError

SCHEMA_VERSION = 3
INPUT_SETS = 4
WARM_UP_STEPS = 3
CACHE_MULTIPLE = 3
MIN_LAYERS, MAX_LAYERS = 2, 16
Inputs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Machine:
    """What a run measures on, once `auto` is resolved. name: the GPU's or "cpu"; machine: which GPU or processor."""

    device: torch.device
    dtype: torch.dtype
    scale: int
    name: str
    cache_bytes: int
    machine: str

    @staticmethod
    def of(spec: LayerStepSpec) -> Machine:
        available = torch.cuda.is_available()
        kind = ("cuda" if available else "cpu") if spec.device == "auto" else spec.device
        if kind == "cuda" and not available:
            raise UserError("device=cuda, but PyTorch finds no GPU here; use device=cpu")
        dtype = getattr(torch, "bfloat16" if kind == "cuda" else "float32") if spec.dtype == "auto" else None
        dtype = dtype or getattr(torch, spec.dtype)
        if kind == "cpu":
            return Machine(
                torch.device("cpu"), dtype, spec.scale or CPU_SCALE, "cpu", 0, provenance.machine()
            )
        properties = torch.cuda.get_device_properties(0)
        cache = int(getattr(properties, "L2_cache_size", 0)) or 64 * 2**20
        name = properties.name
        return Machine(torch.device("cuda"), dtype, spec.scale or 1, name, cache, name)

    def settings(self, spec: LayerStepSpec) -> dict[str, object]:
        """How a row is measured, beside its point and backend."""
        return {
            "schema_version": SCHEMA_VERSION,
            "device": self.name,
            "machine": self.machine,
            "dtype": str(self.dtype).removeprefix("torch."),
            "scale": self.scale,
            "layers": spec.layers,
            "base_fraction": spec.base_fraction,
            "interconnect": spec.interconnect,
            "custom_all_reduce": spec.custom_all_reduce,
            "rounds": spec.rounds,
            "repeats": spec.repeats,
            "round_s": spec.round_s,
            "seed": spec.seed,
        }


@dataclass
class Running:
    """One backend of a point, ready to be timed."""

    backend: str
    executor: Executor
    run: Callable[[], object]
    load: list[Callable[[], object]]
    repeats: int
    product_error: float
    step_error: float
    samples: list[list[float]] = field(default_factory=list)


class Bench:
    """Measures points one after the other; stacks are shared by the points of one model and TP degree."""

    def __init__(self, spec: LayerStepSpec) -> None:
        self.spec, self.machine = spec, Machine.of(spec)
        self.git = provenance.git_state()
        self.collectives = Collectives(spec, self.machine.name, self.machine.dtype.itemsize)
        self._stack: tuple[tuple[str, int], Stack] | None = None

    def stack(self, model: str, tp: int) -> Stack:
        if self._stack is None or self._stack[0] != (model, tp):
            self._stack = None
            shape = scaled_shape(model, self.machine.scale)
            machine, layers = self.machine, self.spec.layers
            if layers is None:
                weights = shape.layer_weights // tp * machine.dtype.itemsize
                layers = min(
                    MAX_LAYERS, max(MIN_LAYERS, math.ceil(CACHE_MULTIPLE * machine.cache_bytes / weights))
                )
            built = build_stack(shape, tp, layers, machine.dtype, machine.device, self.spec.seed)
            self._stack = ((model, tp), built)
        return self._stack[1]

    @torch.inference_mode()
    def measure(self, point: Point) -> list[dict[str, Any]]:
        """One row per backend. A backend that fails or is incorrect has a row that says so, without times."""
        stack = self.stack(point.model, point.tp)
        scaled = scaled_point(point, self.machine.scale)
        caches = build_caches(stack, scaled, self.spec.seed + 1)
        running, rows = [], []
        for backend in self.spec.backends:
            try:
                running.append(self._start(backend, stack, scaled, caches))
            except Incorrect as error:
                rows.append(self._row(point, backend, stack, "incorrect", str(error)))
            except Exception as error:  # a kernel that does not compile must not end the others' run
                if "CUDA error" in str(error):
                    raise  # the device is lost to this process
                traceback.print_exc()
                reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                rows.append(self._row(point, backend, stack, "failed", reason))
        for number in range(self.spec.rounds):
            turn = number % max(1, len(running))
            for entry in running[turn:] + running[:turn]:
                entry.samples.append(self._time(entry))
        rows += [self._timed_row(point, scaled, stack, entry, running) for entry in running]
        order = {backend: n for n, backend in enumerate(self.spec.backends)}
        return sorted(rows, key=lambda row: order[row["variant"]])

    def _start(self, backend: str, stack: Stack, point: Point, caches: list[Tensor]) -> Running:
        """Checks a backend and captures its step. Raises `Incorrect`."""
        device, seed = self.machine.device, self.spec.seed
        executor = make_executor(backend, stack, point, seed + 2)
        gen = torch.Generator().manual_seed(seed + 3)

        def some_inputs() -> Inputs:
            size = (2, point.tokens, stack.shape.hidden)
            first, second = torch.randn(*size, generator=gen).to(device=device, dtype=stack.dtype)
            return first, second

        some_without = max(self.spec.base_fraction, 0.15 if point.sequences > 1 else 0.0)
        mixed = token_slots(point, some_without, gen).to(device)
        product_error = check_products(executor, stack, point, caches, some_inputs(), mixed)

        sets = [
            (some_inputs(), token_slots(point, self.spec.base_fraction, gen).to(device))
            for _ in range(INPUT_SETS)
        ]
        static = tuple(value.clone() for value in sets[0][0])
        output: list[Inputs] = []

        def run_step() -> None:
            output[:] = [step(stack, point, caches, (static[0], static[1]), executor.linear)]

        def loader(inputs: Inputs, slots: Tensor) -> Callable[[], object]:
            def load() -> None:
                for buffer, value in zip(static, inputs, strict=True):
                    buffer.copy_(value)
                executor.prepare(slots)

            return load

        load = [loader(inputs, slots) for inputs, slots in sets]
        load[0]()
        run: Callable[[], object] = run_step
        if device.type == "cuda" and executor.graph:
            run = capture(run_step).replay
        # Another set than the one of the capture: a graph must follow its buffers.
        load[-1]()
        run()
        step_error = check_step(executor, stack, point, caches, *sets[-1], output[0])
        entry = Running(backend, executor, run, load, WARM_UP_STEPS, product_error, step_error)
        fastest = min(self._time(entry))
        entry.repeats = max(2, min(self.spec.repeats, round(self.spec.round_s / fastest)))
        return entry

    def _time(self, entry: Running) -> list[float]:
        if self.machine.device.type == "cuda":
            return time_cuda(entry.run, entry.load, entry.repeats, queued=entry.executor.graph)
        return time_cpu(entry.run, entry.load, entry.repeats)

    def _row(self, point: Point, backend: str, stack: Stack, status: str, reason: str = "") -> dict[str, Any]:
        settings = self.machine.settings(self.spec)
        name, _, _ = backend.partition(":")
        return {
            "experiment": "layer_step",
            "provenance": "emulated",
            "status": status,
            "reason": reason,
            "cell": cell_id(point, backend, settings),
            "backend": name,
            "variant": backend,
            **{key: value for key, value in asdict(point).items() if key != "sweep"},
            "sweep": point.sweep,
            "tokens": scaled_point(point, self.machine.scale).tokens,
            "num_adapters": point.resident,
            **settings,
            "interconnect": self.collectives.gpu_name,
            "layers": len(stack.layers),
            "model_layers": stack.shape.layers,
            "torch": torch.__version__,
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "git_sha": self.git["sha"],
            "git_dirty": self.git["dirty"],
        }

    def _timed_row(
        self, point: Point, scaled: Point, stack: Stack, entry: Running, all_running: list[Running]
    ) -> dict[str, Any]:
        executor, layers, total = entry.executor, len(stack.layers), stack.shape.layers
        samples = sorted(value / layers for turn in entry.samples for value in turn)
        layer_s = statistics.median(samples)
        comm = self.collectives.of(entry.backend, scaled, stack)
        executor.prepare(
            token_slots(scaled, self.spec.base_fraction, torch.Generator()).to(self.machine.device)
        )
        row = {
            **self._row(point, entry.backend, stack, "complete"),
            "kernels": executor.kernels,
            "mode": executor.mode,
            "graph": self.machine.device.type == "cuda" and executor.graph,
            "layer_s": layer_s,
            "layer_s_p10": samples[len(samples) // 10],
            "layer_s_p90": samples[-1 - len(samples) // 10],
            "samples": len(samples),
            "kernels_s": layer_s * total,
            **comm,
            "adapter_kernels_per_step": executor.launches * total,
            "adapter_bytes_per_rank": executor.stored_params
            // layers
            * total
            * point.resident
            * stack.dtype.itemsize,
            "adapter_read_bytes_per_step": executor.read_params // layers * total * stack.dtype.itemsize,
            "budget_ratio": executor.budget_ratio,
            "padding_ratio": executor.stored_params / executor.params if executor.params else math.nan,
            "product_error": entry.product_error,
            "step_error": entry.step_error,
        }
        # Without known links a step over several ranks has no time, only its kernels have.
        seconds = row["step_s"] = row["kernels_s"] + comm["base_comm_s"] + comm["adapter_comm_s"]
        row["output_tokens_per_s"] = point.sequences / seconds if point.phase == "decode" else math.nan
        base = next((other for other in all_running if other.backend == "base"), None)
        if base is not None:
            # Ratios within a round, so that a drift of the clocks cancels.
            turns = zip(base.samples, entry.samples, strict=True)
            ratios = sorted(statistics.median(a) / statistics.median(b) for a, b in turns)
            ratio = statistics.median(ratios)
            row["adapter_cost_kernels"] = 1 - ratio
            row["adapter_cost_kernels_low"], row["adapter_cost_kernels_high"] = 1 - ratios[-1], 1 - ratios[0]
            row["adapter_cost"] = 1 - (ratio * row["kernels_s"] + comm["base_comm_s"]) / seconds
        return row


def token_slots(point: Point, without: float, gen: torch.Generator) -> Tensor:
    """int32 [tokens]: the step's adapters, drawn from the resident slots, in turn over the sequences; a share of the
    sequences, rounded up, has none (-1)."""
    used = torch.randperm(point.resident, generator=gen)[: point.distinct].to(torch.int32)
    slots = used.repeat(-(-point.sequences // point.distinct))[: point.sequences].clone()
    none = min(point.sequences - 1, math.ceil(without * point.sequences))
    slots[torch.randperm(point.sequences, generator=gen)[:none]] = -1
    return slots.repeat_interleave(point.tokens // point.sequences)


def scaled_point(point: Point, scale: int) -> Point:
    """The point with its prompts as much shorter as the shape is narrower; the KV cache keeps its length."""
    return point if point.phase == "decode" else replace(point, length=max(1, point.length // scale))
