"""The engine's HTTP door: OpenAI's completions and chats, streamed or whole, with vLLM's /metrics and /health."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from aiohttp import web

from skymemory.serving.engine.generation import Generation, Step, TokenLogprob
from skymemory.serving.engine.metrics import Tally
from skymemory.serving.engine.requests import ApiError, RequestReader
from skymemory.serving.engine.thread import EngineThread, Full, Job

MOST_BODY_BYTES = 8 << 20
_LARGE_BODY_BYTES = 32 << 10
"""Bodies above this are read in a thread: tokenizing them would hold up the answers in progress."""
_LOG = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Steps = asyncio.Queue[tuple[int, Step]]
"""Of all choices of a request, each with its number."""


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
                web.get("/v1/models/{model:.+}", self._one_model),
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
        return web.json_response({"object": "list", "data": [self._model()]})

    async def _one_model(self, request: web.Request) -> web.Response:
        named = request.match_info["model"]
        if named != self._reader.model:
            raise self._reader.unknown_model(named)
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
        steps: _Steps = asyncio.Queue()
        loop = asyncio.get_running_loop()
        jobs = [Job(each, partial(_hand_over, loop, steps, choice)) for choice, each in enumerate(generation.each())]
        try:
            self._engine.submit(*jobs)
        except Full as error:
            raise ApiError(
                "as many requests wait as may: try again later",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=1,
            ) from error
        try:
            # The status is sent when the prompt is computed: until then an error is an answer with a status of its own.
            first = _checked(await steps.get())
            writer = AnswerWriter(self._reader.model, generation)
            if generation.stream:
                return await self._stream(request, generation, writer, first, steps)
            told: list[list[Step]] = [[] for _ in jobs]
            told[first[0]].append(first[1])
            while not all(each and each[-1].last for each in told):
                choice, step = _checked(await steps.get())
                told[choice].append(step)
            return web.json_response(writer.whole(told))
        finally:
            self._engine.cancel(*jobs)

    async def _stream(
        self,
        request: web.Request,
        generation: Generation,
        writer: AnswerWriter,
        first: tuple[int, Step],
        steps: _Steps,
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        newest: dict[int, Step] = {}
        untold: dict[int, list[TokenLogprob]] = {choice: [] for choice in range(generation.choices)}
        """Of tokens whose text is held back: with the next chunk of their choice."""
        choice, step = first
        while True:
            begins = choice not in newest
            newest[choice] = step
            if step.error is not None:
                await response.write(event(_failure(step.error).as_json()))
                break
            if step.logprob is not None:
                untold[choice].append(step.logprob)
            if begins or step.text or step.last:
                so_far = [newest[at] for at in sorted(newest)] if generation.usage_in_chunks else ()
                await response.write(event(writer.chunk(choice, step, untold[choice], begins, so_far)))
                untold[choice].clear()
            if len(newest) == generation.choices and all(each.last for each in newest.values()):
                if generation.include_usage:
                    await response.write(event(writer.usage_chunk([newest[at] for at in sorted(newest)])))
                break
            choice, step = await steps.get()
        await response.write(END_OF_STREAM)
        await response.write_eof()
        return response


def _hand_over(loop: asyncio.AbstractEventLoop, steps: _Steps, choice: int, step: Step) -> None:
    """From the engine's thread to the loop, which may have ended meanwhile."""
    try:
        loop.call_soon_threadsafe(steps.put_nowait, (choice, step))
    except RuntimeError:
        _LOG.debug("a step came after the end")


def _checked(told: tuple[int, Step]) -> tuple[int, Step]:
    if told[1].error is not None:
        raise _failure(told[1].error)
    return told


def _failure(words: str) -> ApiError:
    return ApiError(words, status=503 if "stopping" in words else 500, code="engine_failed")


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
        code = "method_not_supported" if error.status == 405 else None
        told = ApiError(f"{request.method} {request.path}: {error.reason}", status=error.status, code=code)
    except ConnectionResetError:
        raise  # the client is gone: nobody to tell
    except Exception as error:
        _LOG.exception("%s %s", request.method, request.path)
        told = ApiError(f"{type(error).__name__}: {error}", status=500)
    return web.json_response(told.as_json(), status=told.status, headers=told.headers)


# Answers of the engine as OpenAI's protocol has them: whole, or as chunks of a stream.


END_OF_STREAM = b"data: [DONE]\n\n"


def event(content: dict[str, object]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class AnswerWriter:
    """The objects of one answer; all of them have its number and its time."""

    def __init__(self, model: str, generation: Generation) -> None:
        self._model = model
        self._chat = generation.chat
        self._prompt_tokens = len(generation.ids)
        self._likeliest = generation.logprobs
        self._id = f"{'chatcmpl' if generation.chat else 'cmpl'}-{generation.request_id or uuid.uuid4().hex}"
        self._created = int(time.time())
        self._offsets: dict[int, int] = {}
        """By choice: letters of the tokens whose log-probabilities were told."""

    def whole(self, choices: Sequence[Sequence[Step]]) -> dict[str, object]:
        """The answer in one piece: all steps of each choice."""
        told: list[dict[str, object]] = []
        for index, steps in enumerate(choices):
            text = "".join(step.text for step in steps)
            said: dict[str, object] = (
                {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            )
            logprobs = self._logprobs(index, [step.logprob for step in steps if step.logprob is not None])
            told.append({"index": index, **said, "logprobs": logprobs, "finish_reason": steps[-1].finish})
        usage = self.usage([steps[-1] for steps in choices])
        return self._object("chat.completion" if self._chat else "text_completion", told, usage=usage)

    def chunk(
        self, index: int, step: Step, logprobs: Sequence[TokenLogprob], first: bool, so_far: Sequence[Step] = ()
    ) -> dict[str, object]:
        """What a step adds to a choice, and the ``logprobs`` of tokens not told of before.

        The first chunk of a choice of a chat names the role. ``so_far``: the last step of each choice, for chunks that
        have the usage.
        """
        said: dict[str, object]
        if self._chat:
            said = {"delta": {"role": "assistant", "content": step.text} if first else {"content": step.text}}
        else:
            said = {"text": step.text}
        told = {"index": index, **said, "logprobs": self._logprobs(index, logprobs), "finish_reason": step.finish}
        return self._object(self._chunk_kind, [told], **({"usage": self.usage(so_far)} if so_far else {}))

    def usage_chunk(self, lasts: Sequence[Step]) -> dict[str, object]:
        """The chunk behind the last, where usage was asked for: without a choice."""
        return self._object(self._chunk_kind, [], usage=self.usage(lasts))

    def usage(self, lasts: Sequence[Step]) -> dict[str, object]:
        """Of the last step of each choice. The prompt counts once, and what was cached of it for the first choice."""
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
            return {"content": [_of_chat(each) for each in tokens]}
        offsets = []
        offset = self._offsets.get(index, 0)
        for each in tokens:
            offsets.append(offset)
            offset += len(each.token)
        self._offsets[index] = offset
        return {
            "tokens": [each.token for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [{each.token: each.logprob, **dict(each.likeliest)} for each in tokens],
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


def _of_chat(each: TokenLogprob) -> dict[str, object]:
    likeliest = [{"token": token, "logprob": logprob, "bytes": _bytes(token)} for token, logprob in each.likeliest]
    return {"token": each.token, "logprob": each.logprob, "bytes": _bytes(each.token), "top_logprobs": likeliest}


def _bytes(token: str) -> list[int]:
    return list(token.encode("utf-8", "replace"))
