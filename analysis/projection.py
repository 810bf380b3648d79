"""Tables and figures of the analytic projection, from the files that `experiments.projection.runner.run` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import pandas as pd

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import collectives, files, interconnect, studies, style
from analysis.load import load, summaries
from tessa.errors import UserError

FOLDER = "projection"
SHOWN = ("base_enabled", "punica", "slora", "bd_lora", "tessa")
SWEEPS = {
    "batch": "sequences in the batch",
    "rank": "budget (rank-equivalents)",
    "distinct": "distinct adapters in the batch",
    "resident": "resident adapters",
    "prefill_share": "share of prompt tokens in the step",
}
MODES = {f"tessa_{which}": which for which in style.SCHEDULES}
"""Rows of TESSA with one schedule for all steps."""
BAND = "band: 10 to 90 % of held-out errors, fast to slow adapter kernels"
BOUND = "any structure: distinct bytes / bandwidth"


def validation(
    results_dir: str | Path = "results", reference_dir: str | Path | None = None
) -> dict[str, float | int | str | None]:
    """Errors of the projection on held-out data (see `experiments.projection.validate`), measured cells included,
    on timed collectives and on added latencies.

    Entries are None where their data is absent: published data is looked for in `reference_dir`, `$TESSA_SHARED` and
    `../shared`; everything else comes from `results_dir`.
    """
    from experiments.projection.own_cells import points
    from experiments.projection.validate import validation as validate

    return {
        **validate(points(summaries(results_dir)), reference_dir),
        **collectives.errors(results_dir),
        **interconnect.errors(load(results_dir, interconnect.EXPERIMENT)),
    }


def read(results_dir: str | Path, table: str = "projection", reference: bool = False) -> pd.DataFrame:
    """One table of the projection; UserError names its command, or says that it cannot be a reference."""
    path = Path(results_dir) / FOLDER / f"{table}.parquet"
    if not path.is_file():
        raise UserError(f"no projection at {path}; make it with: python run.py experiment=projection")
    return studies.counted(pd.read_parquet(path), path.parent, reference)


def _over_tp(frame: pd.DataFrame, custom_all_reduce: bool = True) -> pd.DataFrame:
    return frame[(frame.sweep == "tp") & (frame.custom_all_reduce == custom_all_reduce)]


def _present(rows: pd.DataFrame, backends: Sequence[str]) -> list[str]:
    """Those of the backends that have rows; no curve and no entry in the legend is made for the others."""
    return [backend for backend in backends if (rows.backend == backend).any()]


def claims(frame: pd.DataFrame, custom_all_reduce: bool = True) -> pd.DataFrame:
    """C1, C2, C4 and C6 per GPU, model and TP: modelled values with their bands; NaN for a backend not projected."""
    part = _over_tp(frame, custom_all_reduce).set_index(["gpu", "model", "tp"])
    by = {backend: part[part.backend == backend] for backend in ("punica", "slora", "tessa")}
    out = pd.DataFrame(index=part.index.unique())
    for backend, rows in by.items():
        for end in ("", "_low", "_high"):
            out[f"C1_{backend}_cost{end}"] = rows[f"adapter_cost{end}"]
    out["C2_parameter_share"] = by["punica"]["parameter_share"]
    out["C4_slora_collectives"] = by["slora"]["adapter_collectives_per_step"]
    out["C4_tessa_collectives"] = by["tessa"]["adapter_collectives_per_step"]
    for end in ("", "_low", "_high"):
        out[f"C6_tessa_over_slora{end}"] = by["tessa"][f"speedup_over_slora{end}"]
    return out.reset_index().assign(provenance="modelled")


def _curve(axes: Axes, rows: pd.DataFrame, column: str, backend: str, scale: float = 1.0) -> None:
    rows = rows.sort_values("x")
    low, high = rows[f"{column}_low"] * scale, rows[f"{column}_high"] * scale
    axes.fill_between(rows.x, low, high, color=style.colour(backend), alpha=0.15, linewidth=0)
    axes.plot(rows.x, rows[column] * scale, **style.curve(backend, "modelled"), label=style.name(backend))


def _bound(axes: Axes, rows: pd.DataFrame) -> None:
    rows = rows[rows.backend == "tessa"].sort_values("x")
    if rows.empty:
        return
    axes.plot(rows.x, rows.bound_cost * 100, color="black", lw=0.9, ls="-.", label=BOUND)


def _log2(axes: Axes, values: pd.Series) -> None:
    ticks = sorted(values.unique())
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _legend(figure: Figure, axes: Axes, columns: int = 4) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def cost_over_tp(frame: pd.DataFrame, custom_all_reduce: bool = True) -> Figure | None:
    """C1 and C4: adapter cost over TP, one panel per GPU and model; the best any structure could do as a line.

    None, as from all figures here, where nothing that it shows was projected.
    """
    part = _over_tp(frame, custom_all_reduce)
    return _panels(part, "adapter_cost", "adapter cost (%)", 100.0, SHOWN, bound=True)


def speedup_over_tp(frame: pd.DataFrame, custom_all_reduce: bool = True) -> Figure | None:
    """C6: throughput over S-LoRA's over TP, one panel per GPU and model."""
    part = _over_tp(frame, custom_all_reduce)
    return _panels(
        part, "speedup_over_slora", "throughput / S-LoRA's", 1.0, ("punica", "bd_lora", "tessa"), bound=False
    )


def _panels(
    part: pd.DataFrame, column: str, label: str, scale: float, backends: tuple[str, ...], bound: bool
) -> Figure | None:
    shown = _present(part, backends)
    if not shown:
        return None
    gpus, models = sorted(part.gpu.unique()), list(part.model.unique())
    with plt.rc_context(style.RC):
        figure, grid = plt.subplots(
            len(gpus),
            len(models),
            figsize=(style.TWO_COLUMNS, 1.7 * len(gpus) + 0.8),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for i, gpu in enumerate(gpus):
            for j, model in enumerate(models):
                axes, rows = grid[i][j], part[(part.gpu == gpu) & (part.model == model)]
                for backend in shown:
                    _curve(axes, rows[rows.backend == backend], column, backend, scale)
                if bound:
                    _bound(axes, rows)
                axes.set_title(f"{model}, {gpu}")
                _log2(axes, part.x)
                if i == len(gpus) - 1:
                    axes.set_xlabel("tensor-parallel ranks")
                if j == 0:
                    axes.set_ylabel(label)
        _legend(figure, grid[0][0], 3)
        reduces = "custom all-reduce" if part.custom_all_reduce.all() else "NCCL's all-reduce"
        figure.suptitle(
            f"Modelled, {reduces}; {BAND}",
            fontsize=8,
        )
    return figure


def crossovers(frame: pd.DataFrame, gpu: str = "h100", model: str = "llama-3.1-8b") -> Figure | None:
    """Where TESSA stops winning: adapter cost over batch, budget, distinct and resident adapters, prefill share."""
    part = frame[(frame.gpu == gpu) & (frame.model == model) & frame.sweep.isin(SWEEPS)]
    shown, modes = _present(part, SHOWN[1:]), _present(part, [*MODES])
    if not shown and not modes:
        return None
    with plt.rc_context(style.RC):
        figure, grid = plt.subplots(2, 3, figsize=(style.TWO_COLUMNS, 4.6), sharey=True, layout="constrained")
        panels = dict(zip(SWEEPS, grid.flat, strict=False))
        for sweep, axes in panels.items():
            rows = part[part.sweep == sweep]
            for backend in shown:
                _curve(axes, rows[rows.backend == backend], "adapter_cost", backend, 100)
            for mode in modes:
                one = rows[rows.backend == mode].sort_values("x")
                axes.plot(one.x, one.adapter_cost * 100, **style.schedule(MODES[mode], "modelled"))
            _bound(axes, rows)
            axes.set_xlabel(SWEEPS[sweep])
            if sweep != "prefill_share":
                _log2(axes, rows.x)
        for axes in grid[:, 0]:
            axes.set_ylabel("adapter cost (%)")
        last = grid.flat[-1]
        last.set_axis_off()
        last.legend(*grid.flat[0].get_legend_handles_labels(), loc="center", frameon=False)
        figure.suptitle(f"Modelled: {model}, {gpu}, TP {int(part.tp.iloc[0])}; {BAND}", fontsize=8)
    return figure


def shares_over_tp(frame: pd.DataFrame, gpu: str = "h100") -> Figure | None:
    """C2 and C4: an adapter's weights and its collectives on one rank, over TP, one column per model.

    Above: weights that a rank reads for one adapter, over the rank's weights in linear layers, which is also their
    share of its FLOPs per token; a replicated factor does not shrink with TP, and slots beside a fused product are
    padded to its widest slice. Below: share of the step that the
    adapters' collectives take.
    """
    part = _over_tp(frame[frame.gpu == gpu])
    models, shown = list(part.model.unique()), _present(part, SHOWN[1:])
    if not shown:
        return None
    with plt.rc_context(style.RC):
        figure, grid = plt.subplots(
            2,
            len(models),
            figsize=(style.TWO_COLUMNS, 4.2),
            sharex=True,
            sharey="row",
            squeeze=False,
            layout="constrained",
        )
        for j, model in enumerate(models):
            top, bottom = grid[:, j]
            for backend in shown:
                rows = part[(part.model == model) & (part.backend == backend)].sort_values("x")
                top.plot(
                    rows.x,
                    rows.rank_parameter_share * 100,
                    **style.curve(backend, "modelled"),
                    label=style.name(backend),
                )
                _curve(bottom, rows, "comm_share", backend, 100)
            top.set_title(f"{model}, {gpu}")
            top.axhline(1.0, color="black", lw=0.8, ls="-", label="1 %, the paper's bound")
            bottom.set_xlabel("tensor-parallel ranks")
            _log2(bottom, part.x)
        grid[0][0].set_ylim(0, 108 * part[part.backend.isin(shown)].rank_parameter_share.max())
        grid[0][0].set_ylabel("one adapter / weights\nof the rank (%)")
        grid[1][0].set_ylabel("adapters' collectives\n/ step (%)")
        _legend(figure, grid[0][0], 5)
        figure.suptitle("Modelled; band: 10 to 90 % of held-out errors of the collectives", fontsize=8)
    return figure


def over_latency(frame: pd.DataFrame, gpu: str = "h100", model: str = "llama-3.1-8b") -> Figure | None:
    """Throughput and adapter cost over a latency added to every collective, bands as elsewhere."""
    part = frame[(frame.gpu == gpu) & (frame.model == model) & (frame.sweep == "added_latency_us")]
    shown = _present(part, SHOWN[1:])
    if not shown:
        return None
    with plt.rc_context(style.RC):
        figure, (left, right) = plt.subplots(1, 2, figsize=(style.TWO_COLUMNS, 2.9), layout="constrained")
        for backend in (*_present(part, ["base"]), *shown):
            _curve(left, part[part.backend == backend], "output_tokens_per_s", backend)
        for backend in shown:
            _curve(right, part[part.backend == backend], "adapter_cost", backend, 100)
        left.set(ylabel="output tokens/s", yscale="log")
        right.set_ylabel("adapter cost (%)")
        for axes in (left, right):
            axes.set_xscale("symlog", linthresh=5, linscale=0.5)
            axes.set_xlim(-0.5, part.x.max() * 1.2)
            ticks = [0, 5, 20, 100, 500, 2000]
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            axes.set_xlabel("latency added to each collective (µs)")
        _legend(figure, left, 5)
        figure.suptitle(f"Modelled: {model}, {gpu}, TP {int(part.tp.iloc[0])}; {BAND}", fontsize=8)
    return figure


def validation_figure(ops: pd.DataFrame, slora: pd.DataFrame) -> Figure:
    """Predicted against measured: kernels of held-out models, and S-LoRA's losses with and without communication."""
    held = ops[ops.held_out]
    with plt.rc_context(style.RC):
        figure, (left, right) = plt.subplots(1, 2, figsize=(style.TWO_COLUMNS, 3.0), layout="constrained")
        for (gpu, kind), colour in zip(
            [(g, k) for g in sorted(held.gpu.unique()) for k in ("matmul", "other")],
            ("#0072B2", "#56B4E9", "#D55E00", "#E69F00"),
            strict=False,
        ):
            rows = held[(held.gpu == gpu) & ((held.kind == "matmul") == (kind == "matmul"))]
            label = f"{gpu.upper()}, {'products' if kind == 'matmul' else 'row-wise kernels'}"
            left.plot(rows.seconds * 1e6, rows.predicted_s * 1e6, ".", ms=3, color=colour, label=label)
        ends = [held.seconds.min() * 1e6, held.seconds.max() * 1e6]
        left.plot(ends, ends, color="black", lw=0.8)
        left.fill_between(
            ends, [e * 0.9 for e in ends], [e * 1.1 for e in ends], color="black", alpha=0.1, lw=0
        )
        left.set(xscale="log", yscale="log", xlabel="measured (µs)", ylabel="predicted (µs)")
        error = (held.ratio - 1).abs()
        left.set_title(f"kernels of held-out models: median error {100 * error.median():.1f} %")
        left.legend(frameon=False)
        pairs = (("loss", "all of S-LoRA", "o", "#D55E00"),
                 ("loss_without_communication", "without its communication", "s", "#0072B2"))  # fmt: skip
        for column, label, mark, colour in pairs:
            right.plot(
                slora[column] * 100, slora[f"predicted_{column}"] * 100, mark, color=colour, label=label
            )
        line = [10, 70]
        right.plot(line, line, color="black", lw=0.8)
        right.fill_between(line, [0, 60], [20, 80], color="black", alpha=0.1, lw=0, label="within 10 points")
        right.set(xlabel="published loss (%)", ylabel="predicted loss (%)", xlim=(10, 70), ylim=(10, 70))
        right.set_title("S-LoRA's tensor-parallel figure")
        right.legend(frameon=False)
    return figure


def draw(results_dir: str | Path, out_dir: str | Path, reference: bool = False) -> list[Path]:
    """The projection's figures as PNG and PDF and the claims table as CSV; returns the paths."""
    frame, out = read(results_dir, reference=reference), Path(out_dir)
    figures: dict[str, Figure | None] = {
        "projection_cost": cost_over_tp(frame),
        "projection_cost_nccl_only": cost_over_tp(frame, custom_all_reduce=False),
        "projection_speedup": speedup_over_tp(frame),
        "projection_crossovers": crossovers(frame, *_first(frame)),
        "projection_interconnect": over_latency(frame, *_first(frame)),
    }
    if "rank_parameter_share" in frame:
        figures["projection_shares"] = shares_over_tp(frame, _first(frame)[0])
    if (Path(results_dir) / FOLDER / "validation_layer_ops.parquet").is_file():
        ops, slora = read(results_dir, "validation_layer_ops"), read(results_dir, "validation_slora")
        figures["projection_validation"] = validation_figure(ops, slora)
    out.mkdir(parents=True, exist_ok=True)
    paths = files.write_all({stem: figure for stem, figure in figures.items() if figure is not None}, out)
    paths.append(out / "projection_claims.csv")
    claims(frame).to_csv(paths[-1], index=False)
    return paths


def _first(frame: pd.DataFrame) -> tuple[str, str]:
    """GPU and model of the crossover figure: H100 and Llama-3.1-8B where they are there, else the first of each."""
    gpus, models = sorted(frame.gpu.unique()), list(frame.model.unique())
    return ("h100" if "h100" in gpus else gpus[0], "llama-3.1-8b" if "llama-3.1-8b" in models else models[0])
