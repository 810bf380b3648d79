"""A server that speaks S-LoRA's HTTP API as its api_server.py documents it; also a program with its options.

``how``: "" answers well; "dropped", "cut", "broken", "no_id", "no_finished", "not_json", "lossy" break the stream in
the middle; "status" fails; "die" ends the whole process in the middle of a stream, "die_at_start" before serving.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKENS = 1000


class FakeSLora(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], lora_dirs: Iterable[str], how: str) -> None:
        super().__init__(address, Handler)
        self.lora_dirs, self.how = list(lora_dirs), how
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if self.how == "":
            super().handle_error(request, client_address)

    def expected(self, prompt: list[int], lora_dir: str | None, count: int) -> list[int]:
        shift = 0 if lora_dir is None else 1 + self.lora_dirs.index(lora_dir)
        return [(sum(prompt) + 17 * shift + i) % TOKENS for i in range(count)]


class Handler(BaseHTTPRequestHandler):
    server: FakeSLora
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._plain(200 if self.path in ("/health", "/healthz") else 404, b'"OK"')

    def do_POST(self) -> None:
        assert self.path == "/generate_stream"
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server, how = self.server, self.server.how
        server.bodies.append(body)
        if how == "status":
            return self._plain(500, b"Internal Server Error")
        wanted = body["parameters"]["max_new_tokens"]
        tokens = server.expected(body["inputs"], body["lora_dir"], wanted)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        level = (
            -0.25 * (0 if body["lora_dir"] is None else 1 + server.lora_dirs.index(body["lora_dir"])) - 0.5
        )
        for i, token in enumerate(tokens):
            message: dict[str, Any] = {
                "token": {"id": token, "text": "é", "logprob": level, "special": False},
                "generated_text": None,
                "finished": i + 1 == wanted,
                "details": None,
            }
            if i == wanted // 2:
                if how == "die":
                    os._exit(9)
                if how == "lossy":
                    continue
                if how == "dropped":
                    message = {"token": {"id": None, "text": "", "logprob": None}, "finished": -1}
                if how == "no_id":
                    message["token"]["id"] = None
                if how == "no_finished":
                    del message["finished"]
                if how == "broken":
                    self.close_connection = True
                    return self.wfile.write(b"ff\r\ndata:")
                if how == "not_json":
                    self._chunk(b"data:{token\n\n")
                if how == "cut":
                    break
            self._chunk(b"data:" + json.dumps(message, ensure_ascii=False).encode() + b"\n\n")
        self._chunk(b"")
        return None

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _plain(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def running(lora_dirs: Iterable[str], how: str = "") -> Iterator[FakeSLora]:
    """The server in a thread."""
    server = FakeSLora(("127.0.0.1", 0), lora_dirs, how)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--lora-dirs", action="append", default=[])
    for option in (
        *(
            "--nccl_port",
            "--model_dir",
            "--tokenizer_mode",
            "--max_total_token_num",
            "--running_max_req_size",
        ),
        *("--max_req_input_len", "--max_req_total_len"),
    ):
        parser.add_argument(option, required=True)
    parser.add_argument("--disable_log_stats", action="store_true")
    parser.add_argument("--swap", action="store_true")
    args = parser.parse_args()
    how = os.environ.get("FAKE_SLORA", "")
    print("options", json.dumps(vars(args)), flush=True)
    if how == "die_at_start":
        print("torch.cuda.OutOfMemoryError: no room for the pool", flush=True)
        return 1
    FakeSLora((args.host, args.port), args.lora_dirs, how).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
