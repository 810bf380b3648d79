"""Serves a workload with the authors' Punica library, by the Python of Punica's environment.

Started by `experiments.engine.external.PunicaEngine` as ``punica_runner.py SETUP.json FD_IN FD_OUT``; commands and
answers are JSON lines as in `experiments.engine.child`. Of this project it imports only `tessa.vllm.lifetime`, which
needs nothing, so Punica's environment holds what requirements/punica_upstream.yml lists.

Requests are served first come, first served, in one continuous batch. A step takes at most one new request for its
prefill, together with one token of every running request, ordered so that requests of one adapter are neighbours
and make one SGMV segment.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

PAGE_TOKENS = 16
BASE = -1
"""Key of the requests without adapter, which run with an adapter that is zero."""
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
RECORD_COLUMNS = (
    *("request_id", "adapter", "prompt_tokens", "requested_output_tokens", "scheduled_s", "sent_s"),
    *("first_token_s", "end_s", "token_times_s", "output_tokens", "status", "error"),
)


@dataclass
class Served:
    """One request as it is served. ``adapter`` is its index, `BASE` for none. Times as in the harness's records."""

    index: int
    prompt: list[int]
    wanted: int
    adapter: int
    scheduled_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    cache: Any = None

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self.wanted


Step = Callable[["Served | None", Sequence[Served]], Sequence[tuple[int, float]]]
"""One forward pass: the new sequence or None, and the running ones; a (token, logprob) for each, the new one first."""


def segments(parts: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Adapters and lengths of a batch's segments from its parts (adapter, tokens) in order, neighbours joined."""
    adapters, lengths = [], []
    for adapter, run in itertools.groupby(parts, key=lambda part: part[0]):
        adapters.append(adapter)
        lengths.append(sum(tokens for _, tokens in run))
    return adapters, lengths


class Batcher:
    """Runs sequences through ``step`` and notes when each token was there.

    Args:
        mode: "open_loop" (arrivals as scheduled), "all_at_once", or "closed_loop" (``concurrency`` in flight).
        release: called with a sequence that is finished.
        clock, sleep: seconds; exchanged in tests.
        stall_s: a step that takes longer ends the load, None for no limit.
    """

    def __init__(
        self,
        sequences: Sequence[Served],
        mode: str,
        concurrency: int | None,
        max_batch: int,
        step: Step,
        release: Callable[[Served], None] = lambda sequence: None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        stall_s: float | None = None,
    ) -> None:
        self.coming, self.waiting = deque(sequences), deque[Served]()
        self.running: list[Served] = []
        self.mode, self.concurrency, self.max_batch = mode, concurrency, max_batch
        self.step, self.release, self.clock, self.sleep = step, release, clock, sleep
        self.stall_s = stall_s

    def run(self) -> tuple[float, str | None]:
        """Serve everything; (wall_s, reason), the reason None unless the load was given up."""
        start = self.clock()
        while self.coming or self.waiting or self.running:
            now = self.clock() - start
            self._arrive(now)
            if not self.waiting and not self.running:
                self.sleep(self.coming[0].scheduled_s - now)
                continue
            new = self.waiting.popleft() if self.waiting and len(self.running) < self.max_batch else None
            outputs = self.step(new, self.running)
            then = self.clock() - start
            batch = ([] if new is None else [new]) + self.running
            for sequence, (token, logprob) in zip(batch, outputs, strict=True):
                sequence.tokens.append(token)
                sequence.logprobs.append(logprob)
                sequence.times.append(then)
                if sequence.finished:
                    self.release(sequence)
            # Neighbours with one adapter share a segment; the sort keeps the order of arrival among them.
            self.running = sorted((s for s in batch if not s.finished), key=lambda s: s.adapter)
            if self.stall_s is not None and then - now > self.stall_s:
                return then, f"one step took {then - now:.1f} s"
        return self.clock() - start, None

    def _arrive(self, now: float) -> None:
        if self.mode == "closed_loop":
            while self.coming and len(self.waiting) + len(self.running) < (self.concurrency or 1):
                self.coming[0].scheduled_s = now
                self.waiting.append(self.coming.popleft())
        else:
            while self.coming and self.coming[0].scheduled_s <= now:
                self.waiting.append(self.coming.popleft())


class PunicaModel:
    """The model and the adapters on the GPU, and Punica's forward pass."""

    def __init__(self, folder: str, adapters: Sequence[str]) -> None:
        import punica
        import torch
        import transformers

        self.punica, self.torch = punica, torch
        self.device, self.dtype = torch.device("cuda:0"), torch.float16
        self.config = transformers.LlamaConfig.from_pretrained(folder)
        self.model = punica.LlamaForCausalLMWithLora.from_pretrained(
            folder, low_cpu_mem_usage=True, torch_dtype=self.dtype
        ).to(self.device)
        self.pool = punica.KvPool(
            num_layers=self.config.num_hidden_layers,
            num_heads=self.config.num_key_value_heads,
            head_dim=self.config.hidden_size // self.config.num_attention_heads,
            page_len=PAGE_TOKENS,
            dtype=self.dtype,
            device=self.device,
        )
        self.adapters = {index: self._adapter(path) for index, path in enumerate(adapters)}
        rank = self.adapters[0].q.lora_rank
        self.adapters[BASE] = punica.LlamaLoraWeight(self.config, rank, self.dtype, self.device)

    def _adapter(self, folder: str) -> Any:
        from safetensors.torch import load_file

        factors = stack_factors(
            load_file(os.path.join(folder, "adapter_model.safetensors")), self.config.num_hidden_layers
        )
        tensors = {name: self.torch.stack(layers) for name, layers in factors.items()}
        rank = tensors["q.A"].shape[1]
        with open(os.path.join(folder, "adapter_config.json"), encoding="utf-8") as file:
            scale = json.load(file)["lora_alpha"] / rank
        # The library applies no scale of its own.
        tensors = {name: t * scale if name.endswith(".B") else t for name, t in tensors.items()}
        weight = self.punica.LlamaLoraWeight(self.config, rank, self.dtype, self.device)
        weight.copy_from_tensors(tensors)
        return weight

    def step(self, new: Served | None, running: Sequence[Served]) -> list[tuple[int, float]]:
        """One forward pass; a greedy token and its log-probability per sequence, the new one first."""
        torch, punica = self.torch, self.punica
        with torch.inference_mode():
            prompt = [] if new is None else new.prompt
            if new is not None:
                new.cache = punica.KvCache(self.pool, len(prompt))
            for sequence in running:
                sequence.cache.acquire_one()
            parts = ([] if new is None else [(new.adapter, len(prompt))]) + [(s.adapter, 1) for s in running]
            adapters, lengths = segments(parts)
            logits, _ = self.model(
                torch.tensor(
                    [*prompt, *(s.tokens[-1] for s in running)], dtype=torch.long, device=self.device
                ),
                punica.BatchLenInfo([len(prompt)] if prompt else [], len(running), self.device),
                punica.BatchedKvCache([new.cache]) if new is not None else None,
                punica.BatchedKvCache([s.cache for s in running]) if running else None,
                punica.BatchedLlamaLoraWeight([self.adapters[a] for a in adapters], lengths),
            )
            rows = logits[len(prompt) - 1 :] if new is not None else logits
            best, tokens = torch.log_softmax(rows.float(), -1).max(-1)
            return list(zip(tokens.tolist(), best.tolist(), strict=True))

    def release(self, sequence: Served) -> None:
        sequence.cache.release()
        sequence.cache = None


def stack_factors(tensors: dict[str, Any], num_layers: int) -> dict[str, list[Any]]:
    """PEFT's factors by Punica's names: ``{"q.A": [layer 0, layer 1, ...], "q.B": ...}`` for all seven projections.

    Raises:
        KeyError: a layer has no factors for a projection.
    """
    found = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        layer = int(parts[parts.index("layers") + 1])
        projection = next(p for p in parts if p.endswith("_proj")).removesuffix("_proj")
        factor = next(p for p in parts if p.startswith("lora_")).removeprefix("lora_")
        found[(projection, factor, layer)] = tensor
    return {
        f"{projection}.{factor}": [found[(projection, factor, layer)] for layer in range(num_layers)]
        for projection in PROJECTIONS
        for factor in "AB"
    }


def read_workload(path: str) -> tuple[list[Served], str, int | None]:
    """Sequences and the load's mode and concurrency, from a workload file of the harness."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    load = json.loads(table.schema.metadata[b"tessa.workload"])["load"]
    columns = (table[n].to_pylist() for n in ("prompt_token_ids", "output_tokens", "adapter", "arrival_s"))
    open_loop = load["mode"] == "open_loop"
    sequences = [
        Served(i, list(prompt), wanted, BASE if adapter < 0 else adapter, arrival if open_loop else 0.0)
        for i, (prompt, wanted, adapter, arrival) in enumerate(zip(*columns, strict=True))
    ]
    return sequences, load["mode"], load["concurrency"]


def record_columns(sequences: Sequence[Served], timeout_s: float | None) -> dict[str, list[Any]]:
    """The harness's request records as columns.

    The generator is never late here: a request stands in the engine's queue from its scheduled time on. One that
    took longer than ``timeout_s`` counts as timed out, although nothing stopped it.
    """
    rows = []
    for s in sequences:
        status, error = "ok", None
        if not s.finished:
            status, error = "aborted", "the load was given up"
        elif timeout_s is not None and s.times[-1] - s.scheduled_s > timeout_s:
            status, error = "timeout", f"no end within {timeout_s} s"
        rows.append(
            (
                *(s.index, None if s.adapter == BASE else s.adapter, len(s.prompt), s.wanted),
                *(s.scheduled_s, s.scheduled_s, s.times[0] if s.times else None),
                *(s.times[-1] if status == "ok" else None, s.times, len(s.tokens), status, error),
            )
        )
    return dict(zip(RECORD_COLUMNS, map(list, zip(*rows, strict=True)), strict=True))


class Server:
    """Answers the parent's commands."""

    def __init__(self, setup: dict[str, Any], model: Any = None) -> None:
        self.setup, self.model = setup, model

    def start(self) -> dict[str, Any]:
        import punica
        import torch

        self.model = PunicaModel(self.setup["model"], self.setup["adapters"])
        return {"punica": getattr(punica, "__version__", None), "torch": torch.__version__}

    def score(self, requests: Sequence[dict[str, Any]], new_tokens: int) -> list[dict[str, Any]]:
        """Greedy continuations of one batch, for the correctness gate."""
        sequences = [
            Served(i, r["prompt"], new_tokens, BASE if r["adapter"] is None else r["adapter"])
            for i, r in enumerate(requests)
        ]
        self._serve(sequences, "all_at_once", None, {})
        return [{"tokens": s.tokens, "logprobs": s.logprobs} for s in sequences]

    def warmup(self, workload: str) -> dict[str, Any]:
        """Run a workload that uses every adapter; nothing of it is reported."""
        self._serve(*read_workload(workload), {})
        return {}

    def run(self, workload: str, options: dict[str, Any], records: str) -> dict[str, Any]:
        """Run a workload once and write one record per request to ``records``."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        sequences, mode, concurrency = read_workload(workload)
        if options.get("max_in_flight"):
            mode, concurrency = "closed_loop", options["max_in_flight"]
        wall, reason = self._serve(sequences, mode, concurrency, options)
        pq.write_table(pa.table(record_columns(sequences, options.get("request_timeout_s"))), records)
        return {"wall_s": wall, "status": "stalled" if reason else "ok", "reason": reason, "mode": mode}

    def counters(self) -> dict[str, Any]:
        """Nothing: Punica does not count."""
        return {}

    def _serve(
        self, sequences: list[Served], mode: str, concurrency: int | None, options: dict[str, Any]
    ) -> tuple[float, str | None]:
        batcher = Batcher(
            sequences,
            mode,
            concurrency,
            int(self.setup["engine_args"]["max_batch"]),
            self.model.step,
            self.model.release,
            stall_s=options.get("stall_timeout_s"),
        )
        return batcher.run()


COMMANDS = ("start", "score", "warmup", "run", "counters")


def serve(server: Server, commands: Iterable[str], answers: Any) -> None:
    """Answer JSON lines until ``stop``; an exception goes back as data."""
    for line in commands:
        command = json.loads(line)
        if command["command"] == "stop":
            return
        try:
            if command["command"] not in COMMANDS:
                raise ValueError(f"unknown command {command['command']}")
            value = getattr(server, command["command"])(**command.get("arguments", {}))
            answer = {"ok": True, "value": value}
        except Exception as error:
            answer = {
                "ok": False,
                "error": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
            }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main(argv: list[str]) -> int:
    with open(argv[0], encoding="utf-8") as file:
        setup = json.load(file)
    with os.fdopen(int(argv[1])) as commands, os.fdopen(int(argv[2]), "w") as answers:
        serve(Server(setup), commands, answers)
    return 0


if __name__ == "__main__":
    if os.environ.get("TESSA_DIE_WITH_PARENT") == "1":
        from tessa.vllm.lifetime import die_with_parent

        die_with_parent()
    sys.exit(main(sys.argv[1:]))
