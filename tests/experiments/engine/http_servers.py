"""A server of the completions API as vLLM documents it, in a thread, that can break in every way a server can.

Written on bare sockets, so that it can stop in the middle of a chunk, and so that what it sends is spelled out.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

WAIT_S = 30.0
TOKENS = 1000


def expected_tokens(prompt: list[int], model: str, count: int) -> list[int]:
    """What the server generates; the model's name matters."""
    return [(sum(prompt) + sum(model.encode()) + 31 * i) % TOKENS for i in range(count)]


class FakeServer:
    """Context manager. ``behaviour`` by model name decides how a completion goes; "" is the default.

    ``bodies``: the requests as they came. ``gone``: set when a client has closed a stream that was held open.
    ``reached``: set when a held stream has been reached. ``accepted``: connections so far.
    """

    def __init__(self, models: list[dict[str, Any]] | None = None, **behaviour: str) -> None:
        self.models = models or [{"id": "base"}, {"id": "adapter-0000", "parent": "base"}]
        self.behaviour = {name.replace("_", "-"): how for name, how in behaviour.items()}
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.gone, self.reached = threading.Event(), threading.Event()
        self.adapters_matter = True
        self.connections: set[asyncio.StreamWriter] = set()
        self.accepted = 0

    def __enter__(self) -> FakeServer:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = self.call(lambda: asyncio.start_server(self._connection, "127.0.0.1", 0))
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT_S)
        self.loop.close()

    def call(self, make: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return await make()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(WAIT_S)

    async def _close(self) -> None:
        self.server.close()
        for writer in self.connections:
            writer.transport.abort()
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(writer)
        self.accepted += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                fields = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                method, path, _ = head[0].split(" ")
                self.headers.append(fields)
                await self._answer(method, path, json.loads(body or b"null"), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.connections.discard(writer)
            writer.close()

    async def _answer(
        self,
        method: str,
        path: str,
        body: Any,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if self.behaviour.get("server") == "hang":
            await self._hold(reader)
        if (method, path) == ("GET", "/v1/models"):
            return await send_json(writer, 200, {"object": "list", "data": self.models})
        if (method, path) == ("GET", "/version"):
            return await send_json(writer, 200, {"version": "0.0.1"})
        assert (method, path) == ("POST", "/v1/completions")
        self.bodies.append(body)
        how = self.behaviour.get(body["model"], self.behaviour.get("all", ""))
        if how == "hang":
            await self._hold(reader)
        if how == "refuse" or body["model"] not in [m["id"] for m in self.models]:
            error = {"message": f"The model `{body['model']}` does not exist.", "code": 404}
            return await send_json(writer, 404, {"error": error})
        if how in ("no_logprobs", "odd"):
            said = "prompt_logprobs is not supported" if how == "no_logprobs" else "the prompt must be a text"
            return await send_json(writer, 400, {"error": {"message": said, "code": 400}})
        if how == "redirect":
            return await send_json(writer, 307, {"detail": "elsewhere"}, f"Location: {path}\r\n")
        if how == "busy":
            return await send_json(writer, 503, {"detail": "no room"})
        if not body.get("stream"):
            return await send_json(writer, 200, self._score(body, how))
        return await Stream(writer, body, how).play(lambda: self._hold(reader))

    async def _hold(self, reader: asyncio.StreamReader) -> None:
        """Wait until the client closes its side."""
        self.reached.set()
        await reader.read()
        self.gone.set()
        raise ConnectionError

    def _score(self, body: dict[str, Any], how: str) -> dict[str, Any]:
        model = body["model"] if self.adapters_matter else "base"
        level = -float(sum(model.encode()) % 97) / 10 - 0.5
        tokens = expected_tokens(body["prompt"], model, body["max_tokens"])
        choice: dict[str, Any] = {
            "index": 0,
            "text": "x",
            "finish_reason": "length",
            "logprobs": {"tokens": [str(t) for t in tokens], "token_logprobs": [level] * len(tokens)},
        }
        if "prompt_logprobs" in body and how != "plain":
            rest = [{str(t): {"logprob": level - t / 1e6, "rank": 1}} for t in body["prompt"][1:]]
            choice["prompt_logprobs"] = [None, *rest]
        return {"choices": [choice], "usage": {}}


class Stream:
    """One streamed completion, spelled out chunk by chunk."""

    def __init__(self, writer: asyncio.StreamWriter, body: dict[str, Any], how: str) -> None:
        self.writer, self.body, self.how = writer, body, how
        self.tokens = expected_tokens(body["prompt"], body["model"], body["max_tokens"])
        if how == "short":
            self.tokens = self.tokens[:-1]

    async def play(self, hold: Callable[[], Any]) -> None:
        how, half = self.how, len(self.tokens) // 2
        self.writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        size = {"bundled": 2, "text_bundled": 2}.get(how, 1)
        for start in range(0, len(self.tokens), size):
            if start == half - half % size:
                if how == "error_mid":
                    await self.event({"error": {"message": "EngineDeadError", "code": 500}})
                elif how == "not_json":
                    await self.line(b"data: {'token")
                elif how == "die_mid":
                    await self.writer.drain()
                    self.writer.transport.abort()
                elif how == "close_mid":
                    self.writer.close()
                elif how == "hang_mid":
                    await self.writer.drain()
                    await hold()
                if how in ("error_mid", "not_json", "die_mid", "close_mid", "hang_mid"):
                    raise ConnectionError
            await self.event(self.chunk(self.tokens[start : start + size], start))
        usage = {"prompt_tokens": len(self.body["prompt"]), "completion_tokens": len(self.tokens)}
        usage["completion_tokens"] += how == "wrong_usage"
        usage["prompt_tokens"] += how == "wrong_prompt"
        if how != "no_usage" and self.body["stream_options"]["include_usage"]:
            await self.event({"choices": [], "usage": usage})
        if how != "no_done":
            await self.line(b"data: [DONE]")
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def chunk(self, tokens: list[int], start: int) -> dict[str, Any]:
        text = "\u2028" if self.how == "odd_text" else "x"
        last = start + len(tokens) == len(self.tokens) and self.how != "no_finish"
        reason = ("stop" if self.how == "short" else "length") if last else None
        choice: dict[str, Any] = {"index": 0, "text": text * len(tokens), "finish_reason": reason}
        message: dict[str, Any] = {"choices": [choice]}
        text_only = self.how.startswith("text")
        if self.body.get("return_token_ids") and not text_only:
            choice["token_ids"] = tokens
        if self.body["stream_options"].get("continuous_usage_stats") and not text_only:
            message["usage"] = {
                "prompt_tokens": len(self.body["prompt"]),
                "completion_tokens": start + len(tokens),
            }
        return message

    async def event(self, message: dict[str, Any]) -> None:
        await self.line(b"data: " + json.dumps(message, ensure_ascii=False).encode())

    async def line(self, data: bytes) -> None:
        data += b"\n\n"
        step = 5 if self.how == "split" else len(data)
        for start in range(0, len(data), step):
            part = data[start : start + step]
            self.writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await self.writer.drain()


async def send_json(writer: asyncio.StreamWriter, status: int, value: Any, more: str = "") -> None:
    data = json.dumps(value).encode()
    writer.write(
        f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{more}Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    await writer.drain()
