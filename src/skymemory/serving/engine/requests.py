"""Bodies of /v1/completions and /v1/chat/completions, read into ``Generation``; what is wrong is an ``ApiError``."""

from __future__ import annotations

import threading
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta
from transformers import PreTrainedTokenizerBase

from skymemory.serving.api_errors import ApiError
from skymemory.serving.chat_template import render_chat
from skymemory.serving.generation import Generation, Sampling

COMPLETION_TOKENS = 16
"""Generated where a completion does not say, as OpenAI has it; a chat may fill the context."""
MOST_STOPS = 16
_Positive = Annotated[int, Meta(ge=1)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct, kw_only=True):
    """What both kinds have. Fields that are not here are ignored, as other engines do."""

    model: str | None = None
    max_tokens: _Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class CompletionBody(_Body, kw_only=True):
    prompt: Any
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None


class ChatBody(_Body, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: _Positive | None = None
    logprobs: bool | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None


_AS_IF_ABSENT: dict[str, tuple[object, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,), "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,), "logit_bias": ({},), "tools": ([],), "response_format": ({"type": "text"},),
}  # fmt: skip
"""Fields that would change the answer and that this engine does not have, with the values that ask for nothing."""


class RequestReader:
    """Reads bodies for one model. ``read`` may be called from several threads."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, vocabulary: int, context_tokens: int) -> None:
        self.model = model
        self.context_tokens = context_tokens
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._completions = msgspec.json.Decoder(CompletionBody)
        self._chats = msgspec.json.Decoder(ChatBody)

    def read(self, raw: bytes, chat: bool) -> Generation:
        """``raw``: a body as it came."""
        try:
            body = self._chats.decode(raw) if chat else self._completions.decode(raw)
        except msgspec.ValidationError as error:
            words, _, where = str(error).partition(" - at `$.")
            raise ApiError(f"the body is not as expected: {words}", param=where.rstrip("`") or None) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(f"the body is not JSON: {error}") from error
        if body.model is not None and body.model != self.model:
            raise ApiError(
                f"the model {body.model!r} does not exist; this engine serves {self.model!r}",
                status=404, kind="not_found_error", param="model", code="model_not_found",
            )  # fmt: skip
        for name, harmless in _AS_IF_ABSENT.items():
            value = getattr(body, name, None)
            if value is not None and value not in harmless:
                raise ApiError(f"{name!r} is not supported by this engine; leave it out", param=name)
        if isinstance(body, ChatBody):
            ids, asked = self._chat_ids(body), body.max_completion_tokens or body.max_tokens
        else:
            ids, asked = self._completion_ids(body.prompt), body.max_tokens or COMPLETION_TOKENS
        return Generation(
            ids=ids,
            max_tokens=self._room(len(ids), asked),
            sampling=Sampling(
                1.0 if body.temperature is None else body.temperature,
                1.0 if body.top_p is None else body.top_p,
                body.seed,
            ),
            stops=_stops(body.stop),
            ignore_eos=bool(body.ignore_eos),
            salt=body.cache_salt or "",
            stream=bool(body.stream),
            include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
            chat=chat,
        )

    def _completion_ids(self, prompt: Any) -> npt.NDArray[np.int64]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._tokens(prompt, special=True)
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise ApiError("'prompt' must be a text or a list of token ids; one prompt a request", param="prompt")
        if not prompt:
            raise ApiError("'prompt' is empty: at least one token is needed", param="prompt")
        if not all(0 <= token < self._vocabulary for token in prompt):
            raise ApiError(f"'prompt' has token ids outside 0 to {self._vocabulary - 1}", param="prompt")
        return np.asarray(prompt, dtype=np.int64)

    def _chat_ids(self, body: ChatBody) -> npt.NDArray[np.int64]:
        with self._lock:
            text, special = render_chat(self._tokenizer, body.messages)
        return self._tokens(text, special)

    def _tokens(self, text: str, special: bool) -> npt.NDArray[np.int64]:
        with self._lock:  # one tokenizer, which need not bear two threads
            try:
                ids = self._tokenizer(text, add_special_tokens=special)["input_ids"]
            except (UnicodeError, TypeError) as error:  # half of a surrogate pair
                raise ApiError(f"the prompt is not text that can be encoded: {error}", param="prompt") from error
        if not ids:
            raise ApiError("the prompt is empty: at least one token is needed", param="prompt")
        return np.asarray(ids, dtype=np.int64)

    def _room(self, prompt_tokens: int, asked: int | None) -> int:
        """Tokens that may be generated."""
        left = self.context_tokens - prompt_tokens
        if left < (asked or 1):
            more = f" and the {asked} asked for in the answer" if asked else ", with no room for an answer"
            raise ApiError(
                f"this model's context has {self.context_tokens} tokens; the prompt has {prompt_tokens}{more}: "
                "shorten the prompt or ask for less",
                param="messages" if asked is None else "prompt", code="context_length_exceeded",
            )  # fmt: skip
        return asked or left


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MOST_STOPS:
        raise ApiError(f"'stop' has {len(stops)} texts: at most {MOST_STOPS}", param="stop")
    if "" in stops:
        raise ApiError("'stop' has an empty text, which every answer contains", param="stop")
    return stops
