"""Clients of the load generator that stream from HTTP servers: OpenAI's completions API, and S-LoRA's.

A request counts as done only when the stream ends as its protocol says and the server's own counts agree with
the tokens received; everything else raises `ServerError`, which the load records as the request's error.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

import aiohttp

from experiments.measure.types import TokenEvent
from experiments.workload.types import Request

CONNECT_TIMEOUT_S = 10.0
KEEPALIVE_S = 2.0
"""Less than the 5 s after which uvicorn closes an idle connection, so that no request is sent into a closing one."""
UNKNOWN_TOKEN = -1
"""Stands for a token that the server counted without naming it."""
MOST_ERROR_TEXT = 300
BROKEN = (aiohttp.ClientError, TimeoutError, OSError)
"""What aiohttp raises for a connection that cannot be made, breaks, or takes too long."""


class ServerError(RuntimeError):
    """A server refused a request, broke its stream, or contradicts itself; one line. `status`: HTTP's, of a refusal."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class HttpClient:
    """What both clients share: one connection pool and the streams that are open in it.

    Waiting for an answer has no limit here: the load generator has its own for requests and for the whole load.
    The environment's proxies are not used, and a redirect is an error, as it would be timed with each request. aiohttp
    parses in C: a client that takes long per token would take the processors from a server on the same machine.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.url, self._headers = url.rstrip("/"), {"Accept-Encoding": "identity", **(headers or {})}
        self._session: aiohttp.ClientSession | None = None
        self._open: dict[int, aiohttp.ClientResponse] = {}

    @property
    def _http(self) -> aiohttp.ClientSession:
        """The pool, made on first use as it belongs to the running event loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            )
        return self._session

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def abort(self, request_id: int) -> None:
        """Close the request's stream, which is how both protocols are told to drop a request."""
        response = self._open.pop(request_id, None)
        if response is not None:
            response.close()

    @contextlib.asynccontextmanager
    async def _stream(
        self, path: str, body: Mapping[str, Any], request_id: int, who: str
    ) -> AsyncIterator[AsyncIterator[Any]]:
        """The stream's messages, each parsed; ``None`` stands for ``[DONE]``."""
        try:
            async with self._http.post(self.url + path, json=body, allow_redirects=False) as response:
                if response.status != HTTPStatus.OK:
                    text = await response.text(errors="replace")
                    raise ServerError(
                        f"HTTP {response.status} for {who}: {error_text(text)}", response.status
                    )
                self._open[request_id] = response
                yield messages(response.content.iter_any())
        except BROKEN as error:
            raise ServerError(f"{who}: the connection failed ({_name(error)})") from error
        finally:
            self._open.pop(request_id, None)

    async def _json(self, method: str, path: str, who: str, **more: Any) -> Any:
        """The JSON answer of a request.

        Raises:
            ServerError: no answer (in time), a status other than 200, or no JSON.
        """
        try:
            async with self._http.request(method, self.url + path, allow_redirects=False, **more) as response:
                text = await response.text(errors="replace")
        except BROKEN as error:
            raise ServerError(f"{who}: the connection failed ({_name(error)})") from error
        if response.status != HTTPStatus.OK:
            raise ServerError(f"HTTP {response.status} for {who}: {error_text(text)}", response.status)
        try:
            return json.loads(text)
        except ValueError:
            raise ServerError(f"{who} does not answer with JSON: {_short(text)}") from None

    async def _get(self, path: str, timeout_s: float) -> Any:
        return await self._json(
            "GET", path, f"{self.url}{path}", timeout=aiohttp.ClientTimeout(total=timeout_s)
        )


class OpenAIClient(HttpClient):
    """``POST /v1/completions`` with token ids as the prompt and the adapter as the model's name.

    Args:
        base_model: what a request without adapter names as its model.
        counts: "token_ids" asks for the ids of the tokens (vLLM's ``return_token_ids``), "usage" for the count of
            tokens with every chunk (``continuous_usage_stats``). A server that gives neither must send one chunk
            of text per token, which its final usage has to confirm.
        api_key: sent as a bearer token.
    """

    def __init__(
        self, url: str, base_model: str, *, counts: str = "token_ids", api_key: str | None = None
    ) -> None:
        super().__init__(url, {"Authorization": f"Bearer {api_key}"} if api_key else None)
        self.base_model, self.counts = base_model, counts

    async def generate(self, request: Request, adapter_name: str | None) -> AsyncIterator[TokenEvent]:
        model = adapter_name or self.base_model
        prompt = [int(token) for token in request.prompt_token_ids]
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": int(request.output_tokens),
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.counts == "token_ids":
            body["return_token_ids"] = True
        else:
            body["stream_options"]["continuous_usage_stats"] = True
        count, finish_reason, usage, done = 0, None, None, False
        async with self._stream("/v1/completions", body, request.request_id, f"model {model!r}") as stream:
            async for message in stream:
                if message is None:
                    done = True  # read on to the stream's end: only then can the connection be used again
                    continue
                _raise_if_error(message, count)
                usage = message.get("usage") or usage
                for choice in message.get("choices") or ():
                    tokens = _tokens(choice, message.get("usage"), count)
                    count += len(tokens)
                    finish_reason = choice.get("finish_reason") or finish_reason
                    yield TokenEvent(tokens, finish_reason is not None, finish_reason)
        if finish_reason is None:
            raise ServerError(f"the stream ended after {count} tokens without a finish_reason")
        if not done:
            raise ServerError(f"the stream was cut off after {count} tokens, before its [DONE]")
        _check_usage(usage, len(prompt), count)

    async def models(self, timeout_s: float) -> list[dict[str, Any]]:
        """What ``GET /v1/models`` lists. Raises ServerError."""
        answer = await self._get("/v1/models", timeout_s)
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, list) or not all(isinstance(m, dict) and "id" in m for m in data):
            raise ServerError(f"{self.url}/v1/models does not answer with a list of models")
        return data

    async def version(self, timeout_s: float) -> str | None:
        """vLLM's version where the server tells one."""
        try:
            answer = await self._get("/version", timeout_s)
        except ServerError:
            return None
        return str(answer["version"]) if isinstance(answer, dict) and "version" in answer else None

    async def score(
        self, prompt: list[int], adapter_name: str | None, new_tokens: int, prompt_logprobs: bool
    ) -> dict[str, Any]:
        """Log-probabilities of a greedy continuation, and of the prompt from its second token on if asked for.

        Returns:
            ``prompt_logprobs`` (None where the server gave none), ``tokens`` (their texts), ``logprobs``.
        """
        model = adapter_name or self.base_model
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": new_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 1,
        }
        if prompt_logprobs:
            body["prompt_logprobs"] = 0
        answer = await self._json("POST", "/v1/completions", f"model {model!r}", json=body)
        try:
            choice = answer["choices"][0]
            scored = choice["logprobs"] or {}
            given = choice.get("prompt_logprobs")
            own = None
            if given is not None:
                own = [
                    float(entry[str(token)]["logprob"])
                    for entry, token in zip(given[1:], prompt[1:], strict=True)
                ]
            return {
                "prompt_logprobs": own,
                "tokens": list(scored.get("tokens") or ()),
                "logprobs": [float(value) for value in scored.get("token_logprobs") or ()],
            }
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(f"model {model!r}: unexpected log-probabilities ({_name(error)})") from error


class SLoraClient(HttpClient):
    """``POST /generate_stream`` of the authors' S-LoRA server; the prompt goes as token ids in ``inputs``.

    The server answers one message per token, the last with ``finished``. It does not count for itself: where a
    token is lost on the way, fewer arrive than were asked for, and the load records the wrong length.

    Args:
        lora_dirs: the ``lora_dir`` of each adapter name, as given to the server at its start. The server's router
            dies of an unknown one, so it is refused here.
    """

    def __init__(self, url: str, lora_dirs: Mapping[str, str]) -> None:
        super().__init__(url)
        self.lora_dirs = dict(lora_dirs)

    async def generate(self, request: Request, adapter_name: str | None) -> AsyncIterator[TokenEvent]:
        prompt = [int(token) for token in request.prompt_token_ids]
        async for message in self._tokens(prompt, adapter_name, request.output_tokens, request.request_id):
            finished = bool(message["finished"])
            yield TokenEvent([int(message["token"]["id"])], finished, "length" if finished else None)

    async def score(
        self, prompt: list[int], adapter_name: str | None, new_tokens: int, request_id: int
    ) -> dict[str, Any]:
        """A greedy continuation: ``tokens`` (ids) and their ``logprobs``."""
        seen = [m["token"] async for m in self._tokens(prompt, adapter_name, new_tokens, request_id)]
        return {"tokens": [int(t["id"]) for t in seen], "logprobs": [float(t["logprob"]) for t in seen]}

    async def healthy(self, timeout_s: float) -> bool:
        """Whether the server answers ``GET /health``."""
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http.get(f"{self.url}/health", timeout=limit, allow_redirects=False) as response:
                return response.status == HTTPStatus.OK
        except BROKEN:
            return False

    async def _tokens(
        self, prompt: list[int], adapter_name: str | None, new_tokens: int, request_id: int
    ) -> AsyncIterator[dict[str, Any]]:
        if adapter_name is not None and adapter_name not in self.lora_dirs:
            raise ServerError(f"adapter {adapter_name!r} was not given to the server when it was started")
        body = {
            "lora_dir": None if adapter_name is None else self.lora_dirs[adapter_name],
            "inputs": prompt,
            "parameters": {"max_new_tokens": int(new_tokens), "ignore_eos": True, "do_sample": False},
        }
        count = 0
        who = "the base model" if adapter_name is None else f"adapter {adapter_name!r}"
        async with self._stream("/generate_stream", body, request_id, who) as stream:
            async for message in stream:
                if not isinstance(message, dict) or "finished" not in message:
                    raise ServerError(f"a message without 'finished' after {count} tokens: {_short(message)}")
                if message["finished"] == -1:
                    raise ServerError(f"the server dropped the request after {count} tokens")
                if not isinstance(message.get("token"), dict) or message["token"].get("id") is None:
                    raise ServerError(f"a message without a token id after {count} tokens: {_short(message)}")
                count += 1
                yield message
                if message["finished"]:
                    return
        raise ServerError(f"the stream ended after {count} tokens without 'finished'")


async def messages(parts: AsyncIterable[bytes]) -> AsyncIterator[Any]:
    """Parsed ``data:`` lines of a server-sent event stream; ``None`` for ``[DONE]``.

    Lines end at a line feed alone: text inside the JSON may hold other characters that break lines.

    Raises:
        ServerError: a line that is not JSON.
    """
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if (data := _data(line)) is not None:
                yield _parsed(data)
    if (data := _data(rest)) is not None:
        yield _parsed(data)


def _data(line: bytes) -> bytes | None:
    line = line.rstrip(b"\r")
    return line[5:].strip() if line.startswith(b"data:") else None


def _parsed(data: bytes) -> Any:
    if data == b"[DONE]":
        return None
    try:
        return json.loads(data)
    except ValueError:
        raise ServerError(
            f"the stream holds a line that is not JSON: {_short(data.decode(errors='replace'))}"
        ) from None


def _tokens(choice: Mapping[str, Any], usage: Mapping[str, Any] | None, before: int) -> list[int]:
    """The new tokens of a chunk: by their ids, else by the usage that came with it, else one for its text."""
    if choice.get("token_ids") is not None:
        return [int(token) for token in choice["token_ids"]]
    if usage is not None:
        new = int(usage["completion_tokens"]) - before
        if new < 0:
            raise ServerError(f"the usage goes back from {before} to {usage['completion_tokens']} tokens")
        return [UNKNOWN_TOKEN] * new
    return [UNKNOWN_TOKEN] if choice.get("text") else []


def _check_usage(usage: Mapping[str, Any] | None, prompt_tokens: int, tokens: int) -> None:
    if usage is None:
        raise ServerError("the server reports no usage, so the tokens cannot be checked against its count")
    for name, own in (("prompt_tokens", prompt_tokens), ("completion_tokens", tokens)):
        if int(usage.get(name, -1)) != own:
            what = "were sent" if name == "prompt_tokens" else "arrived"
            hint = "" if name == "prompt_tokens" else "; try counts=usage or counts=token_ids"
            raise ServerError(f"the server counts {usage.get(name)} {name} where {own} {what}{hint}")


def _raise_if_error(message: Any, count: int) -> None:
    if not isinstance(message, dict):
        raise ServerError(f"a message that is no object after {count} tokens: {_short(message)}")
    if message.get("error"):
        raise ServerError(f"the server failed after {count} tokens: {_message_of(message)}")


def error_text(answer: str) -> str:
    """The message of an error answer, in whichever form the server puts it."""
    try:
        return _message_of(json.loads(answer))
    except ValueError:
        return _short(answer) or "no message"


def _message_of(answer: Any) -> str:
    for key in ("error", "message", "detail"):
        if isinstance(answer, dict) and answer.get(key):
            return _message_of(answer[key])
    return _short(answer)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= MOST_ERROR_TEXT else text[:MOST_ERROR_TEXT] + "..."


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
