"""Training cost of TESSA beside LoRA at equal budget: step time and peak memory.

    python -m experiments.bench_training --rank 16 --placement across along

Every round runs one optimizer step of each method on the same batch, in rotating order; time ratios are formed
within a round, and their median and quartiles are reported. The step's peak memory is the most that the
allocator had handed out at once during a step (profiled on the CPU, counted by CUDA's allocator on a GPU), on top
of the weights and the optimizer's state.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from experiments import provenance
from experiments.bench_rows import check_least, store, user_errors_in_a_line
from experiments.disk import check_writable
from experiments.measure.memory import step_peak_bytes
from tessa.errors import UserError
from tessa.slices import ALL_MODULES

if TYPE_CHECKING:
    import torch

HEAD_DIM = 64


@dataclass
class Measured:
    """One method: parameters it trains, and per round the step's wall time and this process's CPU time, in seconds.

    CPU time is the steadier of the two on a machine that others use; on a GPU it is the host's share only.
    ``step_peak_bytes`` counts activations, gradients and temporaries of a step; ``resident_bytes`` what stays between
    steps: base weights, adapter, and the optimizer's moments.
    """

    method: str
    parameters: int
    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    step_peak_bytes: int = 0
    resident_bytes: int = 0


class Trainee:
    """A model in training: one `step` is forward, backward and AdamW on a batch."""

    def __init__(self, method: str, model: torch.nn.Module, autocast: torch.dtype | None) -> None:
        import torch

        self.model, self.autocast = model.train(), autocast
        trainable = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=1e-4, foreach=True)
        self.measured = Measured(method, sum(p.numel() for p in trainable))

    def step(self, ids: torch.Tensor) -> None:
        import torch

        with torch.autocast(ids.device.type, self.autocast, enabled=self.autocast is not None):
            loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def timed_step(self, ids: torch.Tensor) -> None:
        import torch

        if ids.is_cuda:
            torch.cuda.synchronize()
        start, cpu_start = time.perf_counter(), time.process_time()
        self.step(ids)
        if ids.is_cuda:
            torch.cuda.synchronize()
        self.measured.step_s.append(time.perf_counter() - start)
        self.measured.cpu_s.append(time.process_time() - cpu_start)

    def measure_memory(self, ids: torch.Tensor) -> None:
        self.measured.step_peak_bytes = step_peak_bytes(lambda: self.step(ids), ids.is_cuda)
        state = [t for s in self.optimizer.state.values() for t in s.values() if hasattr(t, "nbytes")]
        self.measured.resident_bytes = sum(t.nbytes for t in (*self.model.parameters(), *state))


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def build(args: argparse.Namespace) -> list[Trainee]:
    """LoRA first, then TESSA in each placement, on copies of one base model."""
    import peft
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tessa.budget import budget_of
    from tessa.peft import TessaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // HEAD_DIM,
        num_key_value_heads=max(args.hidden // HEAD_DIM // args.gqa, 1),
        head_dim=HEAD_DIM,
        vocab_size=args.vocab,
        max_position_embeddings=args.tokens,
        use_cache=False,
    )
    base: torch.nn.Module = LlamaForCausalLM(config)
    base = base.to(device=device(), dtype=getattr(torch, args.dtype))
    autocast = getattr(torch, args.autocast) if args.autocast else None
    configs: list[tuple[str, Any]] = [
        ("lora", peft.LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=list(ALL_MODULES)))
    ]
    for placement in args.placement:
        tessa = TessaConfig(
            rank_equivalent=args.rank,
            placement=placement,
            shards=args.shards,
            target_modules=list(ALL_MODULES),
        )
        configs.append((f"tessa-{placement}", tessa))
    trainees = []
    for method, peft_config in configs:
        model = peft.get_peft_model(copy.deepcopy(base), peft_config)
        if args.checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        trainees.append(Trainee(method, model, autocast))
        if method != "lora":
            print(f"{method}\n{budget_of(peft_config.get_slices(), args.rank).render()}\n")
    return trainees


def run(args: argparse.Namespace) -> list[Measured]:
    import torch

    trainees = build(args)
    batches = torch.randint(args.vocab, (args.rounds, args.batch, args.tokens)).to(device())
    for trainee in trainees:
        for _ in range(args.warmup):
            trainee.step(batches[0])
        trainee.measure_memory(batches[0])
    for i, ids in enumerate(batches):
        shift = i % len(trainees)
        for trainee in trainees[shift:] + trainees[:shift]:
            trainee.timed_step(ids)
    return [trainee.measured for trainee in trainees]


def ratios(values: list[float], reference: list[float]) -> tuple[float, float, float]:
    """Quartiles of the ratios formed within each round: (lower, median, upper)."""
    low, middle, high = statistics.quantiles(
        [v / r for v, r in zip(values, reference, strict=True)], n=4, method="inclusive"
    )
    return low, middle, high


def rows(results: list[Measured]) -> pd.DataFrame:
    """One row per method; LoRA, the first, is what the others are held against.

    ``time_over_lora`` and ``cpu_over_lora`` (``_low``, ``_high``: quartiles) over rounds; ``step_peak_over_lora`` and
    ``memory_over_lora``, the latter with what stays between steps.
    """
    lora, out = results[0], []
    for m in results:
        row: dict[str, Any] = {"method": m.method, "parameters": m.parameters, "rounds": len(m.step_s)}
        row |= {"step_s": statistics.median(m.step_s), "cpu_s": statistics.median(m.cpu_s)}
        for name, own, reference in (("time", m.step_s, lora.step_s), ("cpu", m.cpu_s, lora.cpu_s)):
            ends = zip(("_low", "", "_high"), ratios(own, reference), strict=True)
            row |= {f"{name}_over_lora{end}": value for end, value in ends}
        total, lora_total = (x.step_peak_bytes + x.resident_bytes for x in (m, lora))
        row |= {"step_peak_bytes": m.step_peak_bytes, "resident_bytes": m.resident_bytes}
        row |= {"step_peak_over_lora": m.step_peak_bytes / lora.step_peak_bytes}
        out.append(row | {"memory_over_lora": total / lora_total})
    return pd.DataFrame(out)


def table(found: pd.DataFrame) -> str:
    mib = 2**20
    lines = [
        f"{'method':<14} {'parameters':>11} {'step ms':>9} {'time/LoRA (quartiles)':>24} "
        f"{'CPU/LoRA (quartiles)':>24} {'step peak MiB':>14} {'/LoRA':>6} {'total MiB':>10} {'/LoRA':>6}"
    ]
    for m in found.to_dict("records"):
        times = [
            f"{m[name]:.3f} ({m[f'{name}_low']:.3f}-{m[f'{name}_high']:.3f})"
            for name in ("time_over_lora", "cpu_over_lora")
        ]
        lines.append(
            f"{m['method']:<14} {m['parameters']:>11} {m['step_s'] * 1e3:>9.1f} {times[0]:>24} {times[1]:>24} "
            f"{m['step_peak_bytes'] / mib:>14.1f} {m['step_peak_over_lora']:>6.3f} "
            f"{(m['step_peak_bytes'] + m['resident_bytes']) / mib:>10.1f} {m['memory_over_lora']:>6.3f}"
        )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The settings, complete.

    Raises:
        UserError: for one that no model or benchmark can have.
    """
    parser = argparse.ArgumentParser(prog="python -m experiments.bench_training", description=__doc__)
    parser.add_argument(
        "--hidden", type=int, default=512, help="hidden size of the model (default %(default)s)"
    )
    parser.add_argument("--intermediate", type=int, help="default: 11/4 of hidden")
    parser.add_argument("--layers", type=int, default=4, help="its layers (default %(default)s)")
    parser.add_argument("--gqa", type=int, default=2, help="query heads per KV head")
    parser.add_argument("--vocab", type=int, default=4096, help="its vocabulary (default %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a sequence (default %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="LoRA's rank and TESSA's rank-equivalent")
    parser.add_argument(
        "--placement",
        nargs="+",
        default=["across", "along"],
        choices=["across", "along"],
        help="of TESSA (default: both)",
    )
    parser.add_argument(
        "--shards", type=int, default=8, help="segments of placement along (default %(default)s)"
    )
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="of the base weights"
    )
    parser.add_argument(
        "--autocast", default=None, choices=["bfloat16"], help="mixed precision of the step (default: none)"
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="recompute activations in the backward pass"
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="timed steps of each method (default %(default)s)"
    )
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (default %(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/training"),
        help="folder of rows.csv, a row per method (default %(default)s)",
    )
    args = parser.parse_args(argv)
    if args.intermediate is None:
        args.intermediate = args.hidden * 11 // 4
    sizes = ("intermediate", "layers", "gqa", "vocab", "batch", "rank", "shards")
    check_least(args, hidden=HEAD_DIM, tokens=2, rounds=2, warmup=0, **dict.fromkeys(sizes, 1))
    heads = args.hidden // HEAD_DIM
    if args.hidden % HEAD_DIM or heads % max(heads // args.gqa, 1):
        raise UserError(
            f"--hidden is {args.hidden}; give a multiple of {HEAD_DIM}, the size of a head, with a number of heads "
            f"that --gqa {args.gqa} divides"
        )
    return args


@user_errors_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    out, git = check_writable(args.out, "--out"), provenance.git_state()
    found = rows(run(args))
    print(table(found))
    sizes = ("hidden", "intermediate", "layers", "gqa", "vocab", "batch", "tokens", "rank", "shards")
    setting = (*sizes, "dtype", "autocast", "checkpointing")
    found = found.assign(**{name: getattr(args, name) for name in setting})
    store(found, "training", out, git, device())
    return 0


if __name__ == "__main__":
    sys.exit(main())
