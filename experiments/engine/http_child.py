"""The process that drives a server over HTTP, behind the line protocol of `experiments.engine.child`.

It holds the load generator, so the requests' times are taken in a process that does nothing else. Where the setup
says how, it also launches the server, in its own session: the parent stops and kills both together.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from experiments.engine import child
from experiments.engine.gate import NEW_TOKENS, TOLERANCE, GateRequest, compare, not_gated
from experiments.engine.http_client import OpenAIClient, ServerError, SLoraClient
from experiments.engine.http_gate import compare_continuations
from experiments.engine.load_server import LoadServer
from experiments.engine.setup import EngineSetup
from tessa.errors import UserError
from tessa.vllm.lifetime import die_with_parent

ANSWER_TIMEOUT_S = 10.0
GATE_TIMEOUT_S = 300.0
POLL_S = 0.2
LOOPBACK = "127.0.0.1"
GONE_S = 2.0  # from a broken connection to the end of its process


class HttpServer(LoadServer):
    """Answers the parent's commands; subclasses know one protocol each.

    ``setup.adapters`` are the adapters' names at the server by index, empty where every request goes to the base
    model. ``setup.engine_args`` hold the protocol's settings.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self.setup, self.settings = setup, setup.engine_args
        self.names = list(setup.adapters)

    async def counters(self) -> dict[str, Any]:
        """Nothing: what happens inside the server cannot be counted from here."""
        return {}

    async def close(self) -> None:
        if self.client is not None:
            await self.client.aclose()

    def stop(self) -> None:
        """Called when the parent wants no more."""

    def _adapter(self, request: GateRequest) -> str | None:
        return None if request.adapter is None or not self.names else self.names[request.adapter]

    def _tolerance(self, options: Mapping[str, Any]) -> float:
        return float(options.get("tolerance") or TOLERANCE[self.settings["dtype"]])


class OpenAIServer(HttpServer):
    """A server that is already running."""

    async def start(self) -> dict[str, Any]:
        """Look at the server: which models it lists, and whether the wanted ones are among them."""
        settings = self.settings
        key = os.environ.get(settings["api_key_env"]) if settings["api_key_env"] else None
        self.client = client = OpenAIClient(settings["url"], "", counts=settings["counts"], api_key=key)
        try:
            models = await client.models(ANSWER_TIMEOUT_S)
        except ServerError as error:
            if error.status is not None:
                raise
            raise ServerError(
                f"{error}. Is the server running? Start it, or give its address with url=..."
            ) from error
        listed = [str(model["id"]) for model in models]
        # An adapter's entry names its base model as parent.
        bases = [str(model["id"]) for model in models if not model.get("parent")]
        client.base_model = settings["base_model"] or next(iter(bases), "")
        if not client.base_model:
            raise UserError(f"{client.url} lists no base model; name it with backend.options.base_model")
        missing = [name for name in (client.base_model, *self.names) if name not in listed]
        if missing and settings["check_models"] == "on":
            shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
            raise UserError(
                f"{client.url} does not list {shown}; it lists {', '.join(listed) or 'nothing'}. Start it with these "
                "adapters, name them with backend.options.adapters=[...] (none: no adapters), or lower adapters.count"
            )
        version = await client.version(ANSWER_TIMEOUT_S)
        print(f"server {client.url} (version {version}) lists {listed}", flush=True)
        return {"version": version, "models": listed, "base_model": client.base_model}

    async def gate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Hold the server against itself: a mixed batch against the same prompts on the base model."""
        mode = self.settings["gate"]
        if mode == "off" or self.setup.gate is None:
            return not_gated("backend.options.gate=off")
        requests = [GateRequest(**r) for r in self.setup.gate["requests"]]
        with_prompt = mode == "prompt_logprobs"
        try:
            base = await self._probe([GateRequest(r.prompt, None) for r in requests], with_prompt)
            if with_prompt and any(output["prompt_logprobs"] is None for output in base):
                return not_gated("the server gives no prompt_logprobs; try backend.options.gate=continuation")
            mixed = await self._probe(requests, with_prompt)
        except ServerError as error:
            # Any other refusal, as of a model's name or a key, is a failure.
            if error.status in (400, 422) and "logprob" in str(error):
                return not_gated(f"the server refused ({error})")
            raise
        if not all(output["logprobs"] for output in base):
            return not_gated("the server gives no log-probabilities")
        tolerance = self._tolerance(options)
        if not with_prompt:
            return compare_continuations(requests, mixed, None, base, tolerance)
        result = compare(requests, mixed, None, base, tolerance, bool(self.names))
        return {**result, "max_abs_error": None, "reference": "none: the server with itself"}

    async def _probe(self, requests: list[GateRequest], with_prompt: bool) -> list[dict[str, Any]]:
        client = self.client
        assert isinstance(client, OpenAIClient)
        tasks = (client.score(r.prompt, self._adapter(r), NEW_TOKENS, with_prompt) for r in requests)
        return await asyncio.wait_for(asyncio.gather(*tasks), GATE_TIMEOUT_S)


class SLoraServer(HttpServer):
    """The authors' S-LoRA, launched here."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self.process: subprocess.Popen[bytes] | None = None
        self.served = False

    async def start(self) -> dict[str, Any]:
        """Launch the server and wait until it answers."""
        port = claim_port(int(self.settings["port"]))
        # Whole parts only: a folder's name may hold braces of its own.
        ports = {"{port}": str(port), "{nccl_port}": str(claim_port(0))}
        command = [ports.get(part, part) for part in self.settings["command"]]
        print("launching", *command, flush=True)
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
        self.client = client = SLoraClient(
            f"http://{LOOPBACK}:{port}", dict(zip(self.names, self.settings["lora_dirs"], strict=True))
        )
        while not await client.healthy(ANSWER_TIMEOUT_S):
            self._check_alive("before it served")
            await asyncio.sleep(POLL_S)
        self._check_alive("before it served")
        self.served = True
        return {"pid": self.process.pid, "port": port}

    async def gate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Greedy continuations against the merged weights."""
        if self.setup.gate is None:
            return not_gated("there is no reference")
        requests = [GateRequest(**r) for r in self.setup.gate["requests"]]
        base = await self._probe([GateRequest(r.prompt, None) for r in requests])
        mixed = await self._probe(requests)
        return compare_continuations(
            requests, mixed, self.setup.gate["expected"], base, self._tolerance(options)
        )

    async def _probe(self, requests: list[GateRequest]) -> list[dict[str, Any]]:
        client = self.client
        assert isinstance(client, SLoraClient)
        tasks = (client.score(r.prompt, self._adapter(r), NEW_TOKENS, i) for i, r in enumerate(requests))
        try:
            return await asyncio.wait_for(asyncio.gather(*tasks), GATE_TIMEOUT_S)
        except ServerError:
            self._check_alive("during the gate")
            raise

    async def warmup(self, workload: str) -> dict[str, Any]:
        try:
            return await super().warmup(workload)
        except RuntimeError:
            self._check_alive("during the warm-up")
            raise

    async def run(self, workload: str, options: Mapping[str, Any], records: str) -> dict[str, Any]:
        """As `LoadServer.run`; a death of the server's process is the load's failure, and its records are kept."""
        result = await super().run(workload, options, records)
        death = self._death(0.0 if result["status"] == "complete" else GONE_S)
        if death is None:
            return result
        return {**result, "status": "failed", "reason": f"{death} during the load"}

    def _check_alive(self, when: str) -> None:
        death = self._death(GONE_S if self.served else 0.0)
        if death is not None:
            raise ServerError(f"{death} {when}")

    def _death(self, patience_s: float) -> str | None:
        """How the server's process ended; None while it runs. A connection breaks a moment before its process is
        gone, so after an error it gets that moment."""
        assert self.process is not None
        try:
            code = self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return None
        return f"the server's process ended with {f'signal {-code}' if code < 0 else f'status {code}'}"

    def stop(self) -> None:
        # Its own processes may outlive it: the parent ends whatever is left in this session.
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()


def claim_port(wanted: int) -> int:
    """The wanted port of the loopback address if it is free, or a free one for 0.

    Raises:
        UserError: the wanted port is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, wanted))
        except OSError as error:
            raise UserError(
                f"port {wanted} of {LOOPBACK} cannot be used ({error.strerror}); end what uses it, or set "
                "backend.options.port to another one, 0 for any"
            ) from None
        return int(probe.getsockname()[1])


SERVERS = {"openai": OpenAIServer, "slora": SLoraServer}


if __name__ == "__main__":
    sys.exit(child.main(sys.argv[1:], lambda setup: SERVERS[setup.engine_args["protocol"]](setup)))
