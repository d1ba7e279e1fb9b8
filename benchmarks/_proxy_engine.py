"""An engine that costs nothing, for measuring what stands before it: one port, fixed answers, TCP_NODELAY.

A request for a stream gets ``EVENTS`` events, each in a write of its own.

``python benchmarks/_proxy_engine.py`` prints its port. It speaks HTTP enough for routers: GET, and POST with a length.
"""

from __future__ import annotations

import asyncio
import json

import uvloop

ANSWER = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "mock",
        "choices": [{"index": 0, "text": "word " * 40, "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 2000,
            "completion_tokens": 40,
            "total_tokens": 2040,
            "prompt_tokens_details": {"cached_tokens": 1000},
        },
    }
).encode()
MODELS = json.dumps({"object": "list", "data": [{"id": "mock", "object": "model"}]}).encode()
INFO = json.dumps(
    {"model_path": "mock", "served_model_name": "mock", "is_generation": True, "status": "ready"}
).encode()
METRICS = b'vllm:num_requests_running{model_name="mock"} 0\nvllm:num_requests_waiting{model_name="mock"} 0\n'


EVENTS = 40
EVENT = b'data: {"id":"cmpl-1","object":"text_completion","model":"mock","choices":[{"index":0,"text":" word"}]}\n\n'
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


PIECE, STREAM_END = chunk(EVENT), chunk(b"data: [DONE]\n\n") + chunk(b"")


def reply(body: bytes, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


ANSWERED = reply(ANSWER)
PAGES = {b"/v1/models": reply(MODELS), b"/metrics": reply(METRICS, "text/plain; version=0.0.4"), b"/health": reply(b"")}


class Engine(asyncio.Protocol):
    def __init__(self) -> None:
        self._came = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # uvloop sets TCP_NODELAY
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._came = self._came + data if self._came else data
        while (end := self._came.find(b"\r\n\r\n")) >= 0:
            head = self._came[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._came) < end + 4 + length:
                return
            path = self._came[: end + 4].split(b" ", 2)[1]
            post = self._came.startswith(b"POST")
            streams = post and b'"stream": true' in self._came[end + 4 : end + 4 + length]
            self._came = self._came[end + 4 + length :]
            if streams:
                self._write(STREAM_HEAD)
                self._stream(EVENTS)
            else:
                self._write(ANSWERED if post else PAGES.get(path, reply(INFO)))

    def _write(self, data: bytes) -> None:
        self._transport.write(data)  # type: ignore[attr-defined]

    def _stream(self, left: int) -> None:
        self._write(PIECE if left else STREAM_END)
        if left:
            asyncio.get_running_loop().call_soon(self._stream, left - 1)


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
