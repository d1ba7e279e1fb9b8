"""The engine's HTTP door: OpenAI's completions and chats, streamed or whole, with vLLM's /metrics and /health."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from aiohttp import web

from skymemory.serving.api_errors import ApiError
from skymemory.serving.engine_thread import EngineThread, Full, Job
from skymemory.serving.generation import Generation, Step
from skymemory.serving.openai_answers import END_OF_STREAM, AnswerWriter, event
from skymemory.serving.request_bodies import RequestReader
from skymemory.serving.tally import Tally

MOST_BODY_BYTES = 8 << 20
_LARGE_BODY_BYTES = 32 << 10
"""Bodies above this are read in a thread: tokenizing them would hold up the answers in progress."""
_LOG = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OpenAIEngine:
    """Handlers over one engine thread. Run the application with ``handler_cancellation=True``: a request whose client
    has gone away is cancelled, and so is its computing."""

    def __init__(
        self,
        reader: RequestReader,
        engine: EngineThread,
        tally: Tally,
        event_sources: Sequence[Mapping[str, object]] = (),
    ) -> None:
        """``event_sources``: where KV events are published, by rank, in vLLM's words (``endpoint`` and so on)."""
        self._reader = reader
        self._engine = engine
        self._tally = tally
        self._event_sources = list(event_sources)
        self._created = int(time.time())

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MOST_BODY_BYTES, middlewares=[_told_as_openai_does])
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chats),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.post("/reset_prefix_cache", self._reset),
                web.get("/kv_event_sources", self._sources),
            ]
        )
        return app

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, chat=False)

    async def _chats(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, chat=True)

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._reader.model, "object": "model", "created": self._created, "owned_by": "skymemory",
            "max_model_len": self._reader.context_tokens,
        }  # fmt: skip
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.alive else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=self._tally.text(), headers={"Content-Type": kind})

    async def _sources(self, request: web.Request) -> web.Response:
        return web.json_response(self._event_sources)

    async def _reset(self, request: web.Request) -> web.Response:
        blocks = await asyncio.wrap_future(self._engine.clear_cache())
        return web.json_response({"cleared_blocks": blocks})

    async def _serve(self, request: web.Request, chat: bool) -> web.StreamResponse:
        raw = await request.read()
        if len(raw) > _LARGE_BODY_BYTES:
            generation = await asyncio.to_thread(self._reader.read, raw, chat)
        else:
            generation = self._reader.read(raw, chat)
        steps: asyncio.Queue[Step] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        job = Job(generation, lambda step: _hand_over(loop, steps, step))
        try:
            self._engine.submit(job)
        except Full as error:
            raise ApiError(
                "as many requests wait as may: try again later",
                status=429, kind="rate_limit_error", code="engine_overloaded", retry_after_s=1,
            ) from error  # fmt: skip
        try:
            # The status is sent when the prompt is computed: until then an error is an answer with a status of its own.
            first = _checked(await steps.get())
            writer = AnswerWriter(self._reader.model, generation)
            if generation.stream:
                return await self._stream(request, generation, writer, first, steps)
            text, step = first.text, first
            while not step.last:
                step = _checked(await steps.get())
                text += step.text
            return web.json_response(writer.whole(text, step))
        finally:
            self._engine.cancel(job)

    async def _stream(
        self, request: web.Request, generation: Generation, writer: AnswerWriter, step: Step, steps: asyncio.Queue[Step]
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        await response.write(event(writer.chunk(step, first=True)))
        while not step.last:
            step = await steps.get()
            if step.error is not None:
                await response.write(event(_failure(step.error).as_json()))
            elif step.text or step.last:
                await response.write(event(writer.chunk(step, first=False)))
        if generation.include_usage and step.error is None:
            await response.write(event(writer.usage_chunk(step)))
        await response.write(END_OF_STREAM)
        await response.write_eof()
        return response


def _hand_over(loop: asyncio.AbstractEventLoop, steps: asyncio.Queue[Step], step: Step) -> None:
    """From the engine's thread to the loop, which may have ended meanwhile."""
    try:
        loop.call_soon_threadsafe(steps.put_nowait, step)
    except RuntimeError:
        _LOG.debug("a step came after the end")


def _checked(step: Step) -> Step:
    if step.error is not None:
        raise _failure(step.error)
    return step


def _failure(words: str) -> ApiError:
    return ApiError(words, status=503 if "stopping" in words else 500, kind="server_error", code="engine_failed")


@web.middleware
async def _told_as_openai_does(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as OpenAI's error object."""
    try:
        return await handler(request)
    except ApiError as error:
        told = error
    except web.HTTPRequestEntityTooLarge:
        told = ApiError(f"the body is larger than {MOST_BODY_BYTES} bytes", status=413)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        told = ApiError(f"{request.method} {request.path}: {error.reason}", status=error.status)
    except ConnectionResetError:
        raise  # the client is gone: nobody to tell
    except Exception as error:
        _LOG.exception("%s %s", request.method, request.path)
        told = ApiError(f"{type(error).__name__}: {error}", status=500, kind="server_error")
    return web.json_response(told.as_json(), status=told.status, headers=told.headers)
