"""The clients against servers that speak the documented protocols, and that break them."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_slora_server import running
from http_servers import WAIT_S, FakeServer, expected_tokens

from experiments.engine.http_client import UNKNOWN_TOKEN, OpenAIClient, ServerError, SLoraClient
from experiments.measure.load import LoadOptions, run_load
from experiments.measure.types import LoadResult, TokenEvent
from experiments.workload import build
from experiments.workload.types import Request, Workload

PROMPT = (5, 6, 7)


def request(tokens: int = 6, request_id: int = 0) -> Request:
    return Request(request_id, 0.0, PROMPT, tokens, None)


def collect(client: Any, adapter: str | None = None, tokens: int = 6) -> list[TokenEvent]:
    async def run() -> list[TokenEvent]:
        try:
            return [event async for event in client.generate(request(tokens), adapter)]
        finally:
            await client.aclose()

    return asyncio.run(asyncio.wait_for(run(), WAIT_S))


def ids(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def workload(n: int = 6, output_tokens: int = 4, **more: Any) -> Workload:
    return build(
        {
            "num_requests": n,
            "num_adapters": 2,
            "arrivals": {"kind": "all_at_once"},
            "prompt_tokens": {"kind": "fixed", "value": 5},
            "output_tokens": {"kind": "fixed", "value": output_tokens},
            "popularity": {"kind": "distinct"},
            **more,
        },
        vocab_size=500,
    )


def load(client: Any, work: Workload, **options: Any) -> LoadResult:
    async def run() -> LoadResult:
        settings = {"adapter_names": ["adapter-0000", "adapter-0001"], "request_timeout_s": WAIT_S, **options}
        try:
            return await run_load(client, work, LoadOptions(**settings))
        finally:
            await client.aclose()

    return asyncio.run(run())


MODELS = [{"id": "base"}, {"id": "adapter-0000"}, {"id": "adapter-0001"}]


def test_a_load_gets_the_tokens_of_the_adapter_it_asked_for() -> None:
    work = workload(base_fraction=0.4)
    with FakeServer(MODELS) as server:
        result = load(OpenAIClient(server.url, "base", api_key="k"), work)
    assert result.status == "ok"
    assert [r.status for r in result.records] == ["ok"] * 6
    assert all(r.output_tokens == len(r.token_times_s) == 4 for r in result.records)
    names = [None if r.adapter is None else f"adapter-{r.adapter:04d}" for r in work.requests]
    assert None in names
    assert set(names) > {"adapter-0000"}
    sent = {tuple(body["prompt"]): body for body in server.bodies}
    for r, name in zip(work.requests, names, strict=True):
        body = sent[r.prompt_token_ids]
        assert body["model"] == (name or "base")
        assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (4, True, 0.0)
    assert {fields.get("authorization") for fields in server.headers} == {"Bearer k"}


@pytest.mark.parametrize("how", ["", "bundled", "split", "odd_text"])
def test_tokens_come_by_their_ids(how: str) -> None:
    with FakeServer(base=how) as server:
        events = collect(OpenAIClient(server.url, "base"))
    assert ids(events) == expected_tokens(list(PROMPT), "base", 6)
    assert [len(e.token_ids) for e in events] == ([2, 2, 2] if how == "bundled" else [1] * 6)
    assert [e.finished for e in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].finish_reason == "length"


@pytest.mark.parametrize(("how", "sizes"), [("", [1] * 6), ("bundled", [2, 2, 2])])
def test_tokens_come_by_the_usage_of_every_chunk(how: str, sizes: list[int]) -> None:
    with FakeServer(base=how) as server:
        events = collect(OpenAIClient(server.url, "base", counts="usage"))
    assert [len(e.token_ids) for e in events] == sizes
    assert set(ids(events)) == {UNKNOWN_TOKEN}


def test_chunks_of_text_count_only_where_the_final_usage_agrees() -> None:
    with FakeServer(base="text", adapter_0000="text_bundled") as server:
        assert len(ids(collect(OpenAIClient(server.url, "base")))) == 6
        with pytest.raises(ServerError, match=r"counts 6 completion_tokens where 3 arrived; try counts="):
            collect(OpenAIClient(server.url, "base"), "adapter-0000")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("refuse", r"HTTP 404 for model 'adapter-0000': The model `adapter-0000` does not exist"),
        ("busy", r"HTTP 503 for model 'adapter-0000': no room"),
        ("redirect", r"HTTP 307 for model 'adapter-0000': elsewhere"),
        ("no_usage", r"reports no usage"),
        ("wrong_usage", r"counts 7 completion_tokens where 6 arrived"),
        ("wrong_prompt", r"counts 4 prompt_tokens where 3 were sent"),
        ("no_finish", r"ended after 6 tokens without a finish_reason"),
        ("no_done", r"cut off after 6 tokens, before its \[DONE\]"),
        ("not_json", r"not JSON: \{'token"),
        ("error_mid", r"failed after 3 tokens: EngineDeadError"),
        ("die_mid", r"model 'adapter-0000': the connection failed"),
        ("close_mid", r"model 'adapter-0000': the connection failed"),
    ],
)
def test_a_broken_completion_is_an_error_and_never_a_shorter_answer(how: str, message: str) -> None:
    with FakeServer(adapter_0000=how) as server, pytest.raises(ServerError, match=message):
        collect(OpenAIClient(server.url, "base"), "adapter-0000")


def test_one_connection_serves_requests_one_after_another() -> None:
    with FakeServer(MODELS) as server:
        result = load(OpenAIClient(server.url, "base"), workload(), mode="closed_loop", concurrency=1)
    assert [r.status for r in result.records] == ["ok"] * 6
    assert server.accepted == 1


def test_a_stream_that_stops_early_has_the_wrong_length() -> None:
    with FakeServer(MODELS, all="short") as server:
        result = load(OpenAIClient(server.url, "base"), workload())
    assert {r.status for r in result.records} == {"wrong_length"}
    assert result.records[0].error == "3 tokens instead of 4"


def test_errors_of_one_adapter_stay_with_its_requests() -> None:
    with FakeServer(MODELS, adapter_0001="error_mid") as server:
        result = load(OpenAIClient(server.url, "base"), workload())
    by_adapter = {(r.adapter, r.status) for r in result.records}
    assert by_adapter == {(0, "ok"), (1, "error")}


@pytest.mark.parametrize("how", ["hang", "hang_mid"])
def test_a_server_that_goes_silent_times_out_and_its_stream_is_closed(how: str) -> None:
    with FakeServer(all=how) as server:
        result = load(OpenAIClient(server.url, "base"), workload(n=1), base_only=True, request_timeout_s=0.2)
        assert result.records[0].status == "timeout"
        assert result.records[0].output_tokens == (2 if how == "hang_mid" else 0)
        assert server.reached.is_set()
        assert server.gone.wait(WAIT_S), "the stream must be closed, so that the server drops the request"


def test_a_load_over_a_silent_server_stalls() -> None:
    with FakeServer(all="hang") as server:
        result = load(OpenAIClient(server.url, "base"), workload(n=2), base_only=True, stall_timeout_s=0.2)
    assert result.status == "stalled"
    assert {r.status for r in result.records} == {"aborted"}


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound but not listening: nobody else gets the port
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ServerError, match="the connection failed"):
            collect(OpenAIClient(url, "base"))
        result = load(OpenAIClient(url, "base"), workload(n=30), base_only=True)
    assert result.status == "failed"
    assert "20 requests failed in a row" in str(result.reason)


def test_an_environment_proxy_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with FakeServer() as server:
        assert len(ids(collect(OpenAIClient(server.url, "base")))) == 6


# S-LoRA's /generate_stream


DIRS = {"adapter-0000": "/a/zero", "adapter-0001": "/a/one"}


def test_slora_load_names_the_folder_of_each_adapter() -> None:
    work = workload(base_fraction=0.4)
    with running(DIRS.values()) as server:
        result = load(SLoraClient(server.url, DIRS), work)
    assert [r.status for r in result.records] == ["ok"] * 6, [r.error for r in result.records]
    sent = {tuple(body["inputs"]): body for body in server.bodies}
    for r in work.requests:
        body = sent[r.prompt_token_ids]
        assert body["lora_dir"] == (None if r.adapter is None else list(DIRS.values())[r.adapter])
        assert body["parameters"] == {"max_new_tokens": 4, "ignore_eos": True, "do_sample": False}


def test_slora_tokens_and_end() -> None:
    with running(DIRS.values()) as server:
        events = collect(SLoraClient(server.url, DIRS), "adapter-0001")
    assert ids(events) == server.expected(list(PROMPT), "/a/one", 6)
    assert [e.finished for e in events] == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dropped", r"dropped the request after 3 tokens"),
        ("cut", r"ended after 3 tokens without 'finished'"),
        ("broken", r"the connection failed"),
        ("no_id", r"without a token id after 3 tokens"),
        ("no_finished", r"without 'finished' after 3 tokens"),
        ("not_json", r"not JSON"),
        ("status", r"HTTP 500 for adapter 'adapter-0000': Internal Server Error"),
    ],
)
def test_a_broken_slora_stream_is_an_error(how: str, message: str) -> None:
    with running(DIRS.values(), how) as server, pytest.raises(ServerError, match=message):
        collect(SLoraClient(server.url, DIRS), "adapter-0000")


def test_slora_never_hears_of_an_adapter_that_it_was_not_given() -> None:
    with running(DIRS.values()) as server:
        with pytest.raises(ServerError, match="adapter 'adapter-0009' was not given to the server"):
            collect(SLoraClient(server.url, DIRS), "adapter-0009")
        assert server.bodies == []


def test_a_token_that_slora_loses_on_the_way_shows_as_the_wrong_length() -> None:
    with running(DIRS.values(), "lossy") as server:
        result = load(SLoraClient(server.url, DIRS), workload(n=2))
    assert [r.status for r in result.records] == ["wrong_length"] * 2
