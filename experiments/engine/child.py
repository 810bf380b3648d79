"""The engine's process: vLLM behind a line protocol on one pipe.

Started by `experiments.engine.parent` as ``python -m experiments.engine.child SETUP.json FD_IN FD_OUT``. Each
command is one JSON line; each answer is one JSON line with ``ok`` and, where it failed, the error's type, message
and traceback as data.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.adapters import adapter_name
from experiments.engine.gate import PROMPT_TOKENS, TOLERANCE, GateRequest, compare, not_gated
from experiments.engine.latency import slope_of_steps
from experiments.engine.load_server import LoadServer
from experiments.engine.setup import EngineSetup
from experiments.measure.types import TokenEvent
from tessa.vllm.lifetime import die_with_parent

COUNTED_STEPS = 8
COUNTED_REQUESTS = 8
CHECKED_STEPS, CHECKS = 24, 3
HEARTBEAT_S = 30.0


class VllmClient:
    """A `experiments.measure.types.Client` over an engine in this process."""

    def __init__(self, engine: Any, adapters: tuple[str, ...]) -> None:
        from vllm.lora.request import LoRARequest

        self.engine = engine
        self.requests = [LoRARequest(adapter_name(i), i + 1, path) for i, path in enumerate(adapters)]
        self._sent = 0

    def lora(self, adapter: int | None) -> Any:
        """The adapter's request object; engines without adapters serve every request with the base model."""
        return None if adapter is None or not self.requests else self.requests[adapter]

    async def generate(self, request: Any, adapter_name: str | None = None) -> AsyncIterator[TokenEvent]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=int(request.output_tokens),
            ignore_eos=True,
            temperature=0.0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        stream = self.engine.generate(
            {"prompt_token_ids": [int(t) for t in request.prompt_token_ids]},
            params,
            self.engine_id(request.request_id),
            lora_request=self.lora(request.adapter),
        )
        async for output in stream:
            part = output.outputs[0]
            yield TokenEvent(list(part.token_ids), output.finished, part.finish_reason)

    def engine_id(self, request_id: int) -> str:
        return f"{self._sent}-{request_id}"

    def next_run(self) -> None:
        """Request ids repeat between runs; the engine must not see one twice."""
        self._sent += 1

    async def abort(self, request_id: int) -> None:
        await self.engine.abort(self.engine_id(request_id))


class Server(LoadServer):
    """Answers the parent's commands."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self.engine: Any = None
        self.added_us: float | None = None

    async def start(self) -> dict[str, Any]:
        import vllm
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**self.setup.engine_args)
        if self.setup.fork:
            config = arguments.create_engine_config()
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM has just set its own choice
            # The plugin asks for it where it is loaded, which happens in this process alone.
            os.register_at_fork(after_in_child=die_with_parent)
            self.engine = AsyncLLM.from_vllm_config(config)
        else:
            self.engine = AsyncLLM.from_engine_args(arguments)
        self.client = VllmClient(self.engine, self.setup.adapters)
        self.names = [request.lora_name for request in self.client.requests]
        slots = self.setup.engine_args.get("max_loras", 0)
        load_s = []
        loop = asyncio.get_running_loop()
        # The last adapters loaded stay resident, so load in reverse and leave the first ones in the slots.
        for request in reversed(self.client.requests[: self.setup.engine_args.get("max_cpu_loras", slots)]):
            began = loop.time()
            await self.engine.add_lora(request)
            load_s.append(loop.time() - began)
        return {"vllm": vllm.__version__, "adapter_load_s": load_s}

    async def gate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        spec = self.setup.gate
        if spec is None:
            return not_gated("this backend has none")
        requests = [GateRequest(**r) for r in spec["requests"]]
        base = await self._probe([GateRequest(r.prompt, None) for r in requests])
        mixed = await self._probe(requests)
        tolerance = options.get("tolerance") or TOLERANCE[self.setup.engine_args["dtype"]]
        result = compare(
            requests, mixed, spec["expected"], base, tolerance, bool(self.client and self.client.requests)
        )
        if self.setup.wrong_by_design:
            result["detail"] = f"wrong by design; {result['detail']}"
            result["passed"] = True
        return result

    async def probe(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Log-probabilities of requests of one's own, in one batch."""
        return {"outputs": await self._probe([GateRequest(**r) for r in requests])}

    async def _probe(self, requests: list[GateRequest]) -> list[dict[str, Any]]:
        """Log-probabilities of prompts and greedy continuations, all in one batch."""
        from vllm import SamplingParams

        from experiments.engine.gate import NEW_TOKENS

        assert self.client is not None
        client = self.client
        client.next_run()
        params = SamplingParams(
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            temperature=0.0,
            prompt_logprobs=0,
            logprobs=0,
            detokenize=False,
        )

        async def one(i: int, request: GateRequest) -> dict[str, Any]:
            final: Any = None
            async for output in self.engine.generate(
                {"prompt_token_ids": request.prompt},
                params,
                client.engine_id(i),
                lora_request=client.lora(request.adapter),
            ):
                final = output
            part = final.outputs[0]
            return {
                "prompt_logprobs": [
                    entry[token].logprob
                    for token, entry in zip(request.prompt[1:], final.prompt_logprobs[1:], strict=True)
                ],
                "tokens": list(part.token_ids),
                "logprobs": [
                    entry[token].logprob for token, entry in zip(part.token_ids, part.logprobs, strict=True)
                ],
            }

        return await asyncio.gather(*(one(i, r) for i, r in enumerate(requests)))

    def before_load(self) -> None:
        self.client.next_run()

    async def run(self, workload: str, options: Mapping[str, Any], records: str) -> dict[str, Any]:
        """As `LoadServer.run`; with an added latency also the forward passes and collectives of the load."""
        if self.added_us is None:
            return await super().run(workload, options, records)
        await self.engine.collective_rpc("tessa_add_latency", args=(self.added_us,))  # counts begin anew
        result = await super().run(workload, options, records)
        counted = await self._latency_counts()
        return {**result, "engine_steps": counted["steps"], "engine_collectives": counted["collectives"]}

    @property
    def counted_tokens(self) -> int:
        """Tokens of a decode step of `_decode`: `COUNTED_REQUESTS`, or as many as the engine takes at once."""
        return min(COUNTED_REQUESTS, int(self.setup.engine_args["max_num_seqs"]))

    async def counters(self) -> dict[str, Any]:
        """Counts of a decode step from untimed steps (see `tessa.vllm.worker`), and the adapters' memory.

        Counts that cannot be had are left out, and `not_counted` says why.
        """
        sizes = await self.engine.collective_rpc("tessa_adapter_bytes")
        memory = {"adapter_bytes_per_rank": max(sizes)}
        reason = (await self.engine.collective_rpc("tessa_start_counting"))[0]
        if reason is not None:
            return {**memory, "not_counted": reason}
        await self._decode(COUNTED_STEPS)
        steps = (await self.engine.collective_rpc("tessa_stop_counting"))[0]
        # A decode step has one token per request; the prefill steps before it are left out.
        tokens = self.counted_tokens
        counted = [step for step in steps if step["tokens"] == tokens]
        if not counted:
            return {
                **memory,
                "not_counted": f"none of {len(steps)} steps was a decode step of {tokens} tokens",
            }
        last = counted[-1]
        counts = {
            **memory,
            "collectives_per_step": last["collectives"],
            "collective_bytes_per_step": last["collective_bytes"],
            "all_reduces_per_step": last["all_reduces"],
            "all_gathers_per_step": last["all_gathers"],
            "counted_tokens_per_step": tokens,
        }
        if self.setup.device != "cpu":
            return {**counts, "not_counted": "adapter kernels: a GPU's fused ops hide how many they launch"}
        return {
            **counts,
            "adapter_kernels_per_step": last["adapter_kernels"],
            "adapter_gemms_per_step": last["adapter_gemms"],
        }

    async def add_latency(self, microseconds: float, check: bool) -> dict[str, Any]:
        """Every collective waits so long from now on. `check`: also what that does to a decode step.

        The same batch decodes without and with the wait, in the order 0, us, us, 0, so that a drift of the machine's
        speed cancels (see `experiments.engine.latency`).
        """
        seen: dict[float, list[dict[str, Any]]] = {}
        order = (0.0, microseconds, microseconds, 0.0) if microseconds else (0.0,)
        for added in order * CHECKS if check else ():
            await self.engine.collective_rpc("tessa_add_latency", args=(added,))
            await self._decode(CHECKED_STEPS)
            seen.setdefault(added, []).append(await self._latency_counts())
        await self.engine.collective_rpc("tessa_add_latency", args=(microseconds,))
        self.added_us = microseconds
        return slope_of_steps(seen, self.counted_tokens) if check else {}

    async def _latency_counts(self) -> dict[str, Any]:
        return (await self.engine.collective_rpc("tessa_latency_counts"))[0]

    async def _decode(self, tokens: int) -> None:
        """`COUNTED_REQUESTS` requests of so many output tokens, the same for every backend."""
        from vllm import SamplingParams

        assert self.client is not None
        client = self.client
        client.next_run()
        slots = min(len(client.requests), self.setup.engine_args.get("max_loras", 0))
        # Over as many adapters as are resident.
        adapters = [i % slots if slots else None for i in range(COUNTED_REQUESTS)]
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False)

        async def one(i: int, adapter: int | None) -> None:
            async for _ in self.engine.generate(
                {"prompt_token_ids": [7 + i] * PROMPT_TOKENS},
                params,
                client.engine_id(i),
                lora_request=client.lora(adapter),
            ):
                pass

        await asyncio.gather(*(one(i, a) for i, a in enumerate(adapters)))

    async def rpc(self, method: str, arguments: list[Any]) -> dict[str, Any]:
        """Call a method of `tessa.vllm.worker.WorkerExtension` on every rank."""
        assert self.engine is not None
        return {"ranks": await self.engine.collective_rpc(method, args=tuple(arguments))}

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()


async def serve(server: Any, commands: Any, answers: Any) -> None:
    """Call the server's method that each command names, until ``stop`` or the end of the commands."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, commands.readline):
        command = json.loads(line)
        name, arguments = command["command"], command.get("arguments", {})
        if name == "stop":
            break
        beat = asyncio.create_task(_beat(answers))
        try:
            value = await getattr(server, name)(**arguments)
            answer: dict[str, Any] = {"ok": True, "value": value}
        except Exception as error:
            answer = {
                "ok": False,
                "error": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
            }
        finally:
            beat.cancel()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    await server.close()
    server.stop()


async def _beat(answers: Any) -> None:
    """Tell the parent that a long command is under way (see `experiments.engine.parent.SELF_LIMITING`)."""
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        answers.write(json.dumps({"alive": True}) + "\n")
        answers.flush()


def main(argv: list[str], server: Callable[[EngineSetup], Any] = Server) -> int:
    if os.environ.get("TESSA_DIE_WITH_PARENT") == "1":
        die_with_parent()
    setup = EngineSetup.from_json(Path(argv[0]).read_text())
    with os.fdopen(int(argv[1])) as commands, os.fdopen(int(argv[2]), "w") as answers:
        asyncio.run(serve(server(setup), commands, answers))
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    # The interpreter's own way out unloads torch and vLLM first, for seconds.
    os._exit(status)
