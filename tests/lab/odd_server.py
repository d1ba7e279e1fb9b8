"""An OpenAI endpoint that answers the first requests well, by which a replay measures it, and then misbehaves."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

PROBES = 2


class OddServer:
    """``how``: a name below. ``bodies`` has every request that came."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.how == "plain-openai" and "ignore_eos" in body:
            return web.json_response({"error": {"message": "unknown field ignore_eos"}}, status=400)
        how = self.how if len(self.bodies) > PROBES or self.how == "no-usage" else "well"
        if how == "refuses":
            headers = {"Retry-After": "7"}
            return web.json_response({"error": {"message": "too much to do"}}, status=429, headers=headers)
        if how == "breaks":
            return web.Response(text="<html>oh no</html>", status=500, content_type="text/html")
        if how == "breaks-in-a-list":
            return web.json_response(["oh no"], status=500)
        if how == "answers-whole":
            return web.json_response({"choices": []})
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        if how == "hangs":
            await asyncio.sleep(60)
        await self._say(stream, {"choices": [{"text": "a", "finish_reason": None}]})
        if how == "stalls":
            await asyncio.sleep(60)
        if how == "cuts":
            return stream
        if how == "drops":
            assert request.transport is not None
            request.transport.abort()
            return stream
        if how == "garbles":
            await stream.write(b"data: {oh no\n\n")
        await self._say(stream, {"choices": [{"text": "b", "finish_reason": "length"}]})
        if how != "no-usage" and "stream_options" in body:
            tokens = len(str(body["prompt"]).split()) + 1
            await self._say(stream, {"choices": [], "usage": {"prompt_tokens": tokens, "completion_tokens": 2}})
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def _say(self, stream: web.StreamResponse, chunk: dict[str, Any]) -> None:
        await stream.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "odd"}]})


@contextmanager
def odd_server(how: str) -> Iterator[OddServer]:
    server = OddServer(how)
    app = web.Application()
    app.add_routes([web.post("/v1/completions", server.answer), web.get("/v1/models", _models)])
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def begin() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    try:
        server.url = f"http://127.0.0.1:{asyncio.run_coroutine_threadsafe(begin(), loop).result(60)}"
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
