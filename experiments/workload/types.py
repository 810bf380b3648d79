"""A workload: the requests of one run, made once, stored in one file named by its content.

Storage is columnar. Prompts are one flat int32 array with offsets, so a million requests cost the tokens
themselves and a few numbers each; `Request` objects are made when they are asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tessa.errors import UserError

FORMAT_VERSION = 1
NO_ADAPTER = -1  # in the integer column; `Request.adapter` says None
_META_KEY = b"tessa.workload"
_HASH_KEY = b"tessa.workload.hash"
_ROWS_PER_GROUP = 1 << 16


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `arrival_s` counts from the start; `adapter` None means the base model alone."""

    request_id: int
    arrival_s: float
    prompt_token_ids: tuple[int, ...]
    output_tokens: int
    adapter: int | None


class Requests(Sequence[Request]):
    """The requests of a workload in order of arrival; each is built on access."""

    def __init__(self, workload: Workload) -> None:
        self._w = workload

    def __len__(self) -> int:
        return len(self._w.arrival_s)

    @overload
    def __getitem__(self, i: int) -> Request: ...
    @overload
    def __getitem__(self, i: slice) -> list[Request]: ...
    def __getitem__(self, i: int | slice) -> Request | list[Request]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        n = len(self)
        if not -n <= i < n:
            raise IndexError(f"request {i} of {n}")
        i %= n
        w = self._w
        adapter = int(w.adapter[i])
        return Request(
            request_id=i,
            arrival_s=float(w.arrival_s[i]),
            prompt_token_ids=tuple(w.prompt(i).tolist()),
            output_tokens=int(w.output_tokens[i]),
            adapter=None if adapter == NO_ADAPTER else adapter,
        )

    def __iter__(self) -> Iterator[Request]:
        return (self[i] for i in range(len(self)))


class Workload:
    """Columns of n requests and what they were made from.

    arrival_s: float64 [n], seconds, never decreasing. prompt_tokens: int32 [total], prompt i is
    `prompt_tokens[offsets[i]:offsets[i + 1]]`. offsets: int64 [n + 1]. output_tokens: int32 [n].
    adapter: int32 [n], -1 for none. meta: `spec` (the resolved spec, part of the hash), `load` (how the
    arrivals are to be offered) and what was observed while drawing (realised shares, counts of clipped and
    skipped rows). Everything is read-only; `hash` is over the columns, `spec` and `load`, so two files that
    hold the same work have the same name whatever wrote them.
    """

    def __init__(
        self,
        arrival_s: np.ndarray,
        prompt_tokens: np.ndarray,
        offsets: np.ndarray,
        output_tokens: np.ndarray,
        adapter: np.ndarray,
        meta: dict[str, Any],
    ) -> None:
        self.arrival_s = _column(arrival_s, "<f8")
        self.prompt_tokens = _column(prompt_tokens, "<i4")
        self.offsets = _column(offsets, "<i8")
        self.output_tokens = _column(output_tokens, "<i4")
        self.adapter = _column(adapter, "<i4")
        self.meta = meta
        self._check()
        self.hash = self._content_hash()

    @property
    def requests(self) -> Requests:
        return Requests(self)

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def prompt_lengths(self) -> np.ndarray:
        """int64 [n]."""
        return np.diff(self.offsets)

    @property
    def num_adapters(self) -> int:
        """Adapters that the engine must know (ids 0..num_adapters-1), used by a request or not."""
        return int(self.meta["spec"]["num_adapters"])

    @property
    def load_mode(self) -> dict[str, Any]:
        """{"mode": "open_loop"|"closed_loop"|"all_at_once", "concurrency": int | None}."""
        return self.meta["load"]

    def prompt(self, i: int) -> np.ndarray:
        """Token ids of prompt i: int32 view [length]."""
        return self.prompt_tokens[self.offsets[i] : self.offsets[i + 1]]

    def frame(self) -> pd.DataFrame:
        """One row per request, without the token ids."""
        return pd.DataFrame(
            {
                "request_id": np.arange(len(self)),
                "arrival_s": self.arrival_s,
                "prompt_tokens": self.prompt_lengths,
                "output_tokens": self.output_tokens,
                "adapter": self.adapter,
            }
        )

    def save(self, directory: str | Path) -> Path:
        """Write `<first 16 hex digits of the hash>.parquet` and return its path.

        The file appears complete or not at all; one that is already there with the same hash is kept.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.hash[:16]}.parquet"
        if path.exists():
            try:
                if Workload.load(path).hash == self.hash:
                    return path
            except UserError:
                pass  # damaged: written again below
        prompts = pa.LargeListArray.from_arrays(pa.array(self.offsets), pa.array(self.prompt_tokens))
        table = pa.table(
            {
                "arrival_s": self.arrival_s,
                "prompt_token_ids": prompts,
                "output_tokens": self.output_tokens,
                "adapter": self.adapter,
            }
        )
        table = table.replace_schema_metadata({_META_KEY: json.dumps(self.meta), _HASH_KEY: self.hash})
        fd, tmp = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=".tmp", dir=directory)
        try:
            with os.fdopen(fd, "wb") as out:
                pq.write_table(table, out, compression="zstd", row_group_size=_ROWS_PER_GROUP)
                out.flush()
                os.fsync(out.fileno())
            os.chmod(tmp, 0o644)
            os.replace(tmp, path)
        except BaseException:
            Path(tmp).unlink(missing_ok=True)
            raise
        return path

    @staticmethod
    def load(path: str | Path) -> Workload:
        """Read a file that `save` wrote and verify its hash. UserError if it is not what it says."""
        return _read(path)

    def _check(self) -> None:
        n = len(self.arrival_s)
        if n == 0:
            raise UserError(
                "a workload needs at least one request; raise num_requests, the duration or the window"
            )
        if not (len(self.offsets) == n + 1 and len(self.output_tokens) == n and len(self.adapter) == n):
            raise UserError("workload columns have different lengths; the file is damaged, build it again")
        if (
            self.offsets[0] != 0
            or self.offsets[-1] != len(self.prompt_tokens)
            or (np.diff(self.offsets) < 1).any()
        ):
            raise UserError(
                "workload prompts must have at least one token each; the file is damaged or a length is 0"
            )
        if (
            not np.isfinite(self.arrival_s).all()
            or (self.arrival_s < 0).any()
            or (np.diff(self.arrival_s) < 0).any()
        ):
            raise UserError("workload arrivals must be finite, not negative, and in order")
        if (self.output_tokens < 1).any():
            raise UserError("every request must ask for at least one output token")
        if (self.adapter < NO_ADAPTER).any() or (self.adapter >= self.num_adapters).any():
            raise UserError(
                f"adapter ids must lie in 0..{self.num_adapters - 1}, or be -1 for the base model"
            )

    def _content_hash(self) -> str:
        digest = hashlib.sha256(b"tessa workload %d\n" % FORMAT_VERSION)
        head = {"spec": self.meta["spec"], "load": self.meta["load"]}
        digest.update(json.dumps(head, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
        for name in ("arrival_s", "offsets", "prompt_tokens", "output_tokens", "adapter"):
            column = getattr(self, name)
            digest.update(f"\n{name} {column.dtype.str} {len(column)}\n".encode())
            digest.update(column.data)
        return digest.hexdigest()


def _read(path: str | Path) -> Workload:
    path = Path(path)
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise UserError(f"workload file {path} does not exist; build it first") from None
    except (pa.ArrowInvalid, OSError) as exc:
        raise UserError(
            f"workload file {path} cannot be read ({_first_line(exc)}); delete it and build it again"
        ) from exc
    meta = table.schema.metadata or {}
    if _META_KEY not in meta or _HASH_KEY not in meta:
        raise UserError(
            f"{path} is a parquet file but not a workload (no workload metadata); build one with `build`"
        )
    prompts = table["prompt_token_ids"].combine_chunks()
    if isinstance(prompts, pa.ChunkedArray):
        prompts = prompts.chunk(0) if prompts.num_chunks else pa.array([], prompts.type)
    offsets = np.asarray(prompts.offsets, dtype="<i8")
    workload = Workload(
        arrival_s=table["arrival_s"].to_numpy(),
        prompt_tokens=np.asarray(prompts.flatten(), dtype="<i4"),
        offsets=offsets - offsets[0],
        output_tokens=table["output_tokens"].to_numpy(),
        adapter=table["adapter"].to_numpy(),
        meta=json.loads(meta[_META_KEY]),
    )
    stored = meta[_HASH_KEY].decode()
    if workload.hash != stored:
        raise UserError(
            f"workload file {path} says its hash is {stored[:16]} but its content has {workload.hash[:16]}; "
            "delete it and build it again"
        )
    return workload


def _column(values: np.ndarray, dtype: str) -> np.ndarray:
    out = np.ascontiguousarray(values, dtype=dtype)
    if out is values or out.base is not None:
        out = out.view()
    out.flags.writeable = False
    return out


def _first_line(exc: BaseException) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0]
