"""HTTP API of the engine: OpenAI's completions, chats and Responses, Anthropic's Messages, vLLM's /metrics, /health."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from skymemory.router.api_error import ApiError
from skymemory.router.apis.translation import (
    API_PATHS,
    COUNT_TOKENS,
    MESSAGES,
    RESPONSES,
    StreamTranslation,
    Translation,
    error_body,
)
from skymemory.router.prompts.unpacking import unpacked
from skymemory_lab.engine.generation import Generation, Step, TokenLogprob
from skymemory_lab.engine.handover import BlockFetcher
from skymemory_lab.engine.metrics import PublishedMetrics
from skymemory_lab.engine.requests import RequestReader
from skymemory_lab.engine.thread import EngineJob, EngineStopping, EngineThread, QueueFull

COMPLETIONS, CHAT_COMPLETIONS = "/v1/completions", "/v1/chat/completions"
MOST_BODY_BYTES = 8 << 20
_MAX_WORDS = 300
JSON = "application/json; charset=utf-8"
_LARGE_BODY_BYTES = 32 << 10  # size above which a body is parsed in a thread, not to delay streams
_LOG = logging.getLogger(__name__)
_NO_LOG = logging.Logger("requests", logging.CRITICAL)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Steps = asyncio.Queue[tuple[int, Step]]


class OpenAIServer:
    """HTTP handlers of an engine thread. Run with ``handler_cancellation=True``."""

    def __init__(
        self,
        reader: RequestReader,
        engine: EngineThread,
        metrics: PublishedMetrics,
        event_sources: Sequence[Mapping[str, object]] = (),
        *,
        fetcher: BlockFetcher | None = None,
        wait_s: float = 0.0,
    ) -> None:
        """``event_sources``: endpoints of the KV events by rank. ``wait_s``: time limit for a prefill's blocks to be
        stored.
        """
        self._fetcher = fetcher
        self._block_tokens = engine.block_tokens
        self._wait_s = wait_s
        self._reader = reader
        self._engine = engine
        self._metrics_registry = metrics
        self._event_sources = list(event_sources)
        self._created = int(time.time())

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MOST_BODY_BYTES, middlewares=[_errors_as_json])
        app.add_routes(
            [
                web.post(COMPLETIONS, self._serve),
                web.post(CHAT_COMPLETIONS, self._serve),
                web.post(RESPONSES, self._serve),
                web.post(MESSAGES, self._serve),
                web.post(COUNT_TOKENS, self._count_tokens),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._one_model),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.post("/reset_prefix_cache", self._reset),
                web.get("/kv_event_sources", self._sources),
            ]
        )
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model()]})

    async def _one_model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != self._reader.model:
            raise self._reader.unknown_model(name)
        return web.json_response(self._model())

    def _model(self) -> dict[str, object]:
        return {
            "id": self._reader.model,
            "object": "model",
            "created": self._created,
            "owned_by": "skymemory",
            "max_model_len": self._reader.context_tokens,
        }

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.alive else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=self._metrics_registry.text(), headers={"Content-Type": kind})

    async def _sources(self, request: web.Request) -> web.Response:
        return web.json_response(self._event_sources)

    async def _reset(self, request: web.Request) -> web.Response:
        blocks = await asyncio.wrap_future(self._engine.clear_cache())
        return web.json_response({"cleared_blocks": blocks})

    async def _read(self, request: web.Request) -> tuple[Generation, Translation | None]:
        raw = await request.read()
        packed = request.headers.get("Content-Encoding", "").encode("utf-8", "surrogateescape")
        if len(raw) > _LARGE_BODY_BYTES or packed:
            return await asyncio.to_thread(self._parse, request.path, raw, packed)
        return self._parse(request.path, raw, packed)

    def _parse(self, path: str, raw: bytes, packed: bytes) -> tuple[Generation, Translation | None]:
        body = unpacked(raw, packed, MOST_BODY_BYTES)
        if path not in API_PATHS:
            return self._reader.read(body, chat=path == CHAT_COMPLETIONS), None
        translation = Translation(path, body)
        return self._reader.read(translation.body, chat=True), translation

    async def _count_tokens(self, request: web.Request) -> web.Response:
        generation, _ = await self._read(request)
        return web.json_response({"input_tokens": len(generation.ids)})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        generation, translation = await self._read(request)
        steps: _Steps = asyncio.Queue()
        loop = asyncio.get_running_loop()
        jobs = [
            EngineJob(choice_generation, partial(_enqueue, loop, steps, choice))
            for choice, choice_generation in enumerate(generation.each())
        ]
        for job in jobs:
            job.outgoing.eager = generation.remote_decode
        try:
            await self._submit(generation, jobs)
        except QueueFull as error:
            raise ApiError(429, "the request queue is full: try again later", retry_after_s=1) from error
        try:
            # The status is sent after the prefill: until then, an error is a response with its own status.
            first = _checked(await steps.get())
            writer = ResponseBuilder(self._reader.model, generation)
            if generation.stream:
                events = _Events(None if translation is None else translation.stream())
                return await self._stream(request, generation, writer, first, steps, events)
            by_choice: list[list[Step]] = [[] for _ in jobs]
            by_choice[first[0]].append(first[1])
            while not all(choice_generation and choice_generation[-1].last for choice_generation in by_choice):
                choice, step = _checked(await steps.get())
                by_choice[choice].append(step)
            answer = writer.build_response(by_choice)
            if generation.remote_decode:
                answer["kv_transfer_params"] = {
                    "do_remote_prefill": True,
                    "sky_tokens": await self._stored_tokens(generation, jobs[0]),
                }
            return web.json_response(answer if translation is None else translation.answer_object(answer))
        finally:
            self._engine.cancel(*jobs)

    async def _submit(self, generation: Generation, jobs: Sequence[EngineJob]) -> None:
        # Queue the jobs, after loading the prompt's stored blocks into the prefix cache.
        if self._fetcher is None:
            self._engine.submit(*jobs)
            return
        # Waiting takes place in the event loop, so that the engine's thread goes on with other requests.
        with self._engine.place():
            await self._fetcher.load_blocks(generation)
            self._engine.submit(*jobs, has_place=True)

    async def _stored_tokens(self, generation: Generation, job: EngineJob) -> int:
        """Return the prompt tokens with stored blocks, after at most ``wait_s``."""
        saved = asyncio.wrap_future(job.outgoing.ended)
        await asyncio.wait([saved], timeout=self._wait_s)
        blocks = min(job.outgoing.stored, len(generation.ids) // self._block_tokens)
        return blocks * self._block_tokens

    async def _stream(
        self,
        request: web.Request,
        generation: Generation,
        writer: ResponseBuilder,
        first: tuple[int, Step],
        steps: _Steps,
        events: _Events,
    ) -> web.StreamResponse:
        # Send ``first``, then the other steps of all choices, as server-sent events.
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        newest: dict[int, Step] = {}
        # Log-probabilities of tokens whose text is held back; sent with the next chunk of their choice.
        unsent: dict[int, list[TokenLogprob]] = {choice: [] for choice in range(generation.choices)}
        choice, step = first
        while True:
            begins = choice not in newest
            newest[choice] = step
            if step.error is not None:
                await response.write(events.fail(_failure(step.error)))
                break
            if step.logprob is not None:
                unsent[choice].append(step.logprob)
            if begins or step.text or step.last:
                so_far = [newest[at] for at in sorted(newest)] if generation.usage_in_chunks else ()
                await response.write(events.chunk(writer.chunk(choice, step, unsent[choice], begins, so_far)))
                unsent[choice].clear()
            if len(newest) == generation.choices and all(latest.last for latest in newest.values()):
                if generation.include_usage:
                    await response.write(events.chunk(writer.usage_chunk([newest[at] for at in sorted(newest)])))
                break
            choice, step = await steps.get()
        await response.write(events.end())
        await response.write_eof()
        return response


def _enqueue(loop: asyncio.AbstractEventLoop, steps: _Steps, choice: int, step: Step) -> None:
    # Not awaited: a slow client must not block the engine's thread, and max_tokens bounds the queue.
    try:
        loop.call_soon_threadsafe(steps.put_nowait, (choice, step))
    except RuntimeError:
        _LOG.debug("a step after the event loop had ended")


def _checked(numbered: tuple[int, Step]) -> tuple[int, Step]:
    if numbered[1].error is not None:
        raise _failure(numbered[1].error)
    return numbered


def _failure(words: str) -> ApiError:
    return ApiError(503 if "stopping" in words else 500, words, code="engine_failed")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        refusal = error
    except EngineStopping as error:
        refusal = _failure(str(error))
    except web.HTTPRequestEntityTooLarge:
        refusal = ApiError(413, f"the body is larger than {MOST_BODY_BYTES} bytes")
    except web.RequestPayloadError as error:
        refusal = ApiError(400, f"the body did not come whole: {error}")
    except web.HTTPException as error:
        if error.status < 400:
            raise
        refusal = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
    except ConnectionResetError:
        raise  # the client has disconnected
    except Exception as error:
        _LOG.exception("%s %s", request.method, request.path)
        refusal = ApiError(500, f"{type(error).__name__}: {error}")
    headers = {"Content-Type": JSON}
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(refusal.retry_after_s)
    return web.Response(body=error_body(request.path, refusal), status=refusal.status, headers=headers)


class _RequestHandler(web.RequestHandler):
    """Handler that answers malformed HTTP in JSON, without a log."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        _LOG.debug("malformed request from %s", request.remote, exc_info=exc)
        words = " ".join((message or "").split())[:_MAX_WORDS] or "it cannot be read"
        refusal = ApiError(status, f"malformed HTTP request: {words}")
        answer = web.Response(body=error_body(request.path, refusal), status=status, headers={"Content-Type": JSON})
        answer.force_close()
        return answer


class _Runner(web.AppRunner):
    @property
    def server(self) -> Any:
        web_server = super().server
        if web_server is None:
            return None
        # `unpacked` decompresses bodies and explains what it refuses.
        return partial(
            _RequestHandler, web_server, loop=asyncio.get_running_loop(), access_log=_NO_LOG, auto_decompress=False
        )


def make_runner(application: web.Application, shutdown_timeout_s: float) -> web.AppRunner:
    return _Runner(application, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout_s)


# --- response objects of OpenAI's API ---


END_OF_STREAM = b"data: [DONE]\n\n"


def event(content: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class _Events:
    """Encoder of server-sent events, in OpenAI's format or translated to the Responses or Messages API."""

    def __init__(self, translation: StreamTranslation | None) -> None:
        self._made = translation

    def chunk(self, content: dict[str, object]) -> bytes:
        return event(content) if self._made is None else self._made.chunk(content)

    def fail(self, error: ApiError) -> bytes:
        if self._made is None:
            return b"data: " + error.body() + b"\n\n"
        return self._made.fail(error.status, error.message)

    def end(self) -> bytes:
        return END_OF_STREAM if self._made is None else self._made.end()


class ResponseBuilder:
    """Builder of the OpenAI response objects of one request."""

    def __init__(self, model: str, generation: Generation) -> None:
        self._model = model
        self._chat = generation.chat
        self._prompt_tokens = len(generation.ids)
        self._likeliest = generation.logprobs
        self._id = f"{'chatcmpl' if generation.chat else 'cmpl'}-{generation.request_id or uuid.uuid4().hex}"
        self._created = int(time.time())
        self._offsets: dict[int, int] = {}

    def build_response(self, choices: Sequence[Sequence[Step]]) -> dict[str, object]:
        answers: list[dict[str, object]] = []
        for index, steps in enumerate(choices):
            text = "".join(step.text for step in steps)
            content: dict[str, object] = (
                {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            )
            logprobs = self._logprobs(index, [step.logprob for step in steps if step.logprob is not None])
            last = steps[-1]
            ends = {"finish_reason": last.finish, "stop_reason": last.stopped_by or None}
            answers.append({"index": index, **content, "logprobs": logprobs, **ends})
        usage = self.usage([steps[-1] for steps in choices])
        return self._object("chat.completion" if self._chat else "text_completion", answers, usage=usage)

    def chunk(
        self, index: int, step: Step, logprobs: Sequence[TokenLogprob], first: bool, so_far: Sequence[Step] = ()
    ) -> dict[str, object]:
        """Return a stream chunk of choice ``index``, with its unsent ``logprobs``.

        ``first``: its first chunk. ``so_far``: each choice's latest step, to add the usage.
        """
        content: dict[str, object]
        if self._chat:
            content = {"delta": {"role": "assistant", "content": step.text} if first else {"content": step.text}}
        else:
            content = {"text": step.text}
        ends = {"finish_reason": step.finish, "stop_reason": step.stopped_by or None}
        answer = {"index": index, **content, "logprobs": self._logprobs(index, logprobs), **ends}
        return self._object(self._chunk_kind, [answer], **({"usage": self.usage(so_far)} if so_far else {}))

    def usage_chunk(self, lasts: Sequence[Step]) -> dict[str, object]:
        return self._object(self._chunk_kind, [], usage=self.usage(lasts))

    def usage(self, lasts: Sequence[Step]) -> dict[str, object]:
        """Return the token usage from each choice's last step; the prompt counts once."""
        generated = sum(step.completion_tokens for step in lasts)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self._prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": lasts[0].cached_tokens},
        }

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, object] | None:
        if self._likeliest is None:
            return None
        if self._chat:
            return {"content": [_of_chat(token) for token in tokens]}
        offsets = []
        offset = self._offsets.get(index, 0)  # characters of this choice sent in earlier chunks
        for token in tokens:
            offsets.append(offset)
            offset += len(token.token)
        self._offsets[index] = offset
        return {
            "tokens": [token.token for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{token.token: token.logprob, **dict(token.likeliest)} for token in tokens],
            "text_offset": offsets,
        }

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _object(self, kind: str, choices: list[dict[str, object]], **more: object) -> dict[str, object]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            **more,
        }


def _of_chat(entry: TokenLogprob) -> dict[str, object]:
    likeliest = [{"token": token, "logprob": logprob, "bytes": _bytes(token)} for token, logprob in entry.likeliest]
    return {"token": entry.token, "logprob": entry.logprob, "bytes": _bytes(entry.token), "top_logprobs": likeliest}


def _bytes(token: str) -> list[int]:
    return list(token.encode("utf-8", "replace"))
