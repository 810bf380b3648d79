"""Published request traces and generic CSV or JSON-lines ones, as arrivals and lengths.

`python -m experiments.workload.traces [DIR]` says where to get each published file and checks the hash of
those that lie in DIR.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.workload.trace_files import TIME_UNITS, Rows, read_rows, to_labels, to_lengths, to_seconds
from tessa.errors import UserError

ROLES = ("time", "prompt_tokens", "output_tokens", "adapter")


@dataclass(frozen=True)
class TraceFormat:
    kind: str  # "csv" or "jsonl"
    columns: dict[str, str]  # role -> column name
    time_unit: str


FORMATS: dict[str, TraceFormat] = {
    "azure": TraceFormat(
        "csv",
        {"time": "TIMESTAMP", "prompt_tokens": "ContextTokens", "output_tokens": "GeneratedTokens"},
        "iso",
    ),
    "mooncake": TraceFormat(
        "jsonl",
        {"time": "timestamp", "prompt_tokens": "input_length", "output_tokens": "output_length"},
        "ms",
    ),
    "burstgpt": TraceFormat(
        "csv",
        {
            "time": "Timestamp",
            "prompt_tokens": "Request tokens",
            "output_tokens": "Response tokens",
            "adapter": "Model",
        },
        "s",
    ),
    "csv": TraceFormat("csv", {}, "s"),
    "jsonl": TraceFormat("jsonl", {}, "s"),
}


@dataclass(frozen=True)
class Published:
    """A file its authors publish. sha256 is of the file as published (line ends included)."""

    name: str
    format: str
    url: str
    licence: str
    sha256: str


PUBLISHED = (
    Published(
        "AzureLLMInferenceTrace_conv.csv",
        "azure",
        "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data/AzureLLMInferenceTrace_conv.csv",
        "CC-BY-4.0",
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
    ),
    Published(
        "AzureLLMInferenceTrace_code.csv",
        "azure",
        "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data/AzureLLMInferenceTrace_code.csv",
        "CC-BY-4.0",
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
    ),
    Published(
        "mooncake_conversation_trace.jsonl",
        "mooncake",
        "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/conversation_trace.jsonl",
        "Apache-2.0",
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
    ),
    Published(
        "BurstGPT_without_fails_1.csv",
        "burstgpt",
        "https://github.com/HPMLL/BurstGPT/raw/main/data/BurstGPT_without_fails_1.csv",
        "licence: see its repository",
        "a4d068a7113ec0290e74063a1b3447dc6001a30e4298eb313581b71006dda1f4",
    ),
)


@dataclass(frozen=True)
class TraceSpec:
    """Which rows of which file, and how they are used.

    format: a key of FORMATS. columns: {role: column name} over the format's own (roles: time, prompt_tokens,
    output_tokens, adapter). time_unit: s, ms, us, ns or iso, over the format's own. Rows with a time in
    [window_start_s, window_start_s + window_s), counted from the first row, are used (window_s None: to the
    end) and arrive at (time - window_start_s) / speedup. over: what happens to a row longer than
    max_prompt_tokens or max_output_tokens, "clip" or "skip". zero_length: what happens to a row with a length
    of 0, "error" or "skip" (a request has at least one token each way). All counts are in meta.
    """

    format: str
    path: str
    columns: dict[str, str] = field(default_factory=dict)
    time_unit: str | None = None
    window_start_s: float = 0.0
    window_s: float | None = None
    speedup: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    over: str = "clip"
    zero_length: str = "error"

    def __post_init__(self) -> None:
        _choice("trace.format", self.format, FORMATS)
        _choice("trace.over", self.over, ("clip", "skip"))
        _choice("trace.zero_length", self.zero_length, ("error", "skip"))
        if self.time_unit is not None:
            _choice("trace.time_unit", self.time_unit, (*TIME_UNITS, "iso"))
        for role in self.columns:
            _choice("a key of trace.columns", role, ROLES)
        for name in ("max_prompt_tokens", "max_output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"trace.{name} is {value}; give at least 1, or null for no cap")
        if not (np.isfinite(self.speedup) and self.speedup > 0):
            raise UserError(
                f"trace.speedup is {self.speedup}; give a number above 0 (2 replays twice as fast)"
            )
        if not (np.isfinite(self.window_start_s) and self.window_start_s >= 0):
            raise UserError(
                f"trace.window_start_s is {self.window_start_s}; give seconds from the first row, 0 or more"
            )
        if self.window_s is not None and not self.window_s > 0:
            raise UserError(
                f"trace.window_s is {self.window_s}; give seconds above 0, or null for the rest of the trace"
            )


@dataclass
class TraceData:
    """arrival_s float64 [n] from the window's start; lengths int64 [n]; adapter int32 [n] or None."""

    arrival_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    adapter: np.ndarray | None
    meta: dict[str, Any]


def read_trace(spec: TraceSpec, *, with_adapter: bool = False, limit: int | None = None) -> TraceData:
    """Read, check (the whole file), window, cap and speed up a trace. `limit` keeps the first rows.

    Raises UserError, with file and line where there is one, for anything that is not as the format says.
    """
    fmt = FORMATS[spec.format]
    columns = {**fmt.columns, **spec.columns}
    roles = ROLES if with_adapter else ROLES[:3]
    missing = [role for role in roles if role not in columns]
    if missing:
        raise UserError(
            f"format {spec.format!r} has no column for {', '.join(missing)}; "
            f"name it in trace.columns, e.g. {{{missing[0]}: name}}"
        )
    rows = read_rows(spec.path, fmt.kind, {role: columns[role] for role in roles})
    seconds = to_seconds(rows, "time", columns["time"], spec.time_unit or fmt.time_unit)
    lengths = {role: to_lengths(rows, role, columns[role]) for role in ("prompt_tokens", "output_tokens")}
    adapter, labels = to_labels(rows, "adapter") if with_adapter else (None, [])

    keep = seconds >= spec.window_start_s
    if spec.window_s is not None:
        keep &= seconds < spec.window_start_s + spec.window_s
    meta = _file_meta(spec, rows, seconds, int(keep.sum()))
    if not keep.any():
        raise UserError(
            f"no row of {spec.path} lies in the window from {spec.window_start_s} s for {spec.window_s} s; "
            f"the trace spans {seconds[-1]:.3f} s"
        )
    keep &= _nonzero(rows, lengths, columns, keep, spec, meta)
    keep &= _capped(lengths, keep, spec, meta)
    if not keep.any():
        raise UserError(
            f"every row of {spec.path} in the window was skipped; raise the caps or set trace.over=clip"
        )
    chosen = np.flatnonzero(keep)
    if limit is not None:
        if limit > len(chosen):
            raise UserError(
                f"num_requests is {limit} but the window of {spec.path} holds {len(chosen)} usable rows; "
                "lower num_requests or widen the window"
            )
        meta["rows_after_num_requests"] = len(chosen) - limit
        chosen = chosen[:limit]
    for role, cap in (("prompt_tokens", spec.max_prompt_tokens), ("output_tokens", spec.max_output_tokens)):
        if cap is not None:
            meta[f"clipped_{role}"] = int((lengths[role][chosen] > cap).sum())
            lengths[role] = np.minimum(lengths[role], cap)
    if adapter is not None:
        used = adapter[chosen]
        seen, first = np.unique(used[used >= 0], return_index=True)
        order = seen[np.argsort(first)]  # renumber by first appearance in the window
        new_id = np.full(len(labels) + 1, -1, dtype=np.int32)  # last place serves -1
        new_id[order] = np.arange(len(order))
        adapter = new_id[used]
        meta["adapter_labels"] = [labels[i] for i in order]
    return TraceData(
        arrival_s=(seconds[chosen] - spec.window_start_s) / spec.speedup,
        prompt_tokens=lengths["prompt_tokens"][chosen],
        output_tokens=lengths["output_tokens"][chosen],
        adapter=adapter,
        meta=meta,
    )


def check_published(directory: str | Path) -> list[tuple[Published, str]]:
    """Each published file with "ok", "missing", or "wrong hash <sha256>"."""
    found = []
    for item in PUBLISHED:
        path = Path(directory) / item.name
        if not path.is_file():
            found.append((item, "missing"))
            continue
        sha = hashlib.sha256(path.read_bytes()).hexdigest()
        found.append((item, "ok" if sha == item.sha256 else f"wrong hash {sha}"))
    return found


def main(argv: list[str] | None = None) -> int:
    """Exit 0 if no file that is there differs from the published one, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.workload.traces", description=__doc__.split("\n")[0]
    )
    default = Path(os.environ.get("TESSA_SHARED", "../shared")) / "traces"
    parser.add_argument("directory", nargs="?", type=Path, default=default, help="default: %(default)s")
    directory = parser.parse_args(argv).directory
    print(f"traces in {directory}")
    wrong = False
    for item, state in check_published(directory):
        wrong |= state.startswith("wrong")
        print(f"{item.name}: {state} (format {item.format}, {item.licence})")
        if state != "ok":
            print(f"    get it from {item.url}\n    expected sha256 {item.sha256}")
    return int(wrong)


def _file_meta(spec: TraceSpec, rows: Rows, seconds: np.ndarray, in_window: int) -> dict[str, Any]:
    published = [p.name for p in PUBLISHED if p.sha256 == rows.sha256]
    return {
        "file": rows.path.name,
        "sha256": rows.sha256,
        "published": published[0] if published else None,
        "byte_order_mark": rows.bom,
        "rows": len(rows.lines),
        "span_s": float(seconds[-1]),
        "rows_in_window": in_window,
        "rows_outside_window": len(rows.lines) - in_window,
        "skipped_zero_length": 0,
        "skipped_too_long": 0,
        "clipped_prompt_tokens": 0,
        "clipped_output_tokens": 0,
        "rows_after_num_requests": 0,
    }


def _nonzero(
    rows: Rows,
    lengths: dict[str, np.ndarray],
    columns: dict[str, str],
    inside: np.ndarray,
    spec: TraceSpec,
    meta: dict[str, Any],
) -> np.ndarray:
    zero = (lengths["prompt_tokens"] == 0) | (lengths["output_tokens"] == 0)
    if spec.zero_length == "error":
        for row in np.flatnonzero(zero & inside)[:1]:
            role = "prompt_tokens" if lengths["prompt_tokens"][row] == 0 else "output_tokens"
            raise rows.fail(
                row,
                f"{columns[role]} is 0 but a request needs a token; trace.zero_length=skip leaves it out",
            )
    meta["skipped_zero_length"] = int((zero & inside).sum())
    return ~zero


def _capped(
    lengths: dict[str, np.ndarray], inside: np.ndarray, spec: TraceSpec, meta: dict[str, Any]
) -> np.ndarray:
    keep = np.ones_like(inside)
    if spec.over == "skip":
        for role, cap in (
            ("prompt_tokens", spec.max_prompt_tokens),
            ("output_tokens", spec.max_output_tokens),
        ):
            if cap is not None:
                keep &= lengths[role] <= cap
        meta["skipped_too_long"] = int((~keep & inside).sum())
    return keep


def _choice(what: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise UserError(f"{what} is {value!r}; choose one of {', '.join(allowed)}")


if __name__ == "__main__":
    sys.exit(main())
