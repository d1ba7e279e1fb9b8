"""Parsing of /v1/completions and /v1/chat/completions bodies into ``Generation``; errors are ``ApiError``."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta
from transformers import PreTrainedTokenizerBase

from skymemory.router.api_error import ApiError
from skymemory_lab.engine.generation import Generation, RemotePrefill, Sampling

COMPLETION_TOKENS = 16
"""OpenAI's default; a chat may fill the context."""
MOST_STOPS = 16
MOST_CHOICES = 128
MOST_LOGPROBS = 20
MOST_WAIT_MS = 600_000
_MOST_BIAS = 100.0
_Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Body(msgspec.Struct, kw_only=True):
    """OpenAI's fields, then vLLM's."""

    model: str | None = None
    max_tokens: _Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1 - MOST_CHOICES)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, float] | None = None

    top_k: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    request_id: Annotated[str, Meta(max_length=256)] | None = None


class CompletionBody(_Body, kw_only=True):
    prompt: Any
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None


class ChatBody(_Body, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: _Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


# Unsupported fields that would change the answer, with the accepted values (no effect).
_AS_IF_ABSENT: dict[str, tuple[object, ...]] = {
    # OpenAI's
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "use_beam_search": (False,),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "prompt_embeds": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structural_tag": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "priority": (0,),
    "spaces_between_special_tokens": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "return_mm_kwargs": (False,),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "watermarking": (False,),
    "stream_interval": (1,),
}


class _TransferParams(msgspec.Struct):
    """Request field by which a proxy has an engine prefill and another decode: vLLM's, but ``sky_…`` are ours."""

    do_remote_decode: bool = False
    """True to prefill only."""
    do_remote_prefill: bool = False  # fetch the blocks of another engine
    sky_tokens: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """Stored tokens; absent: not known yet."""
    sky_wait_ms: Annotated[float, Meta(ge=0, le=MOST_WAIT_MS)] | None = None  # time limit for the next block


_TRANSFER = "kv_transfer_params"
_TRANSFER_EXPECTED = (
    "expected {'do_remote_decode': true}, or {'do_remote_prefill': true} with 'sky_tokens' and 'sky_wait_ms' "
    f"(0 to {MOST_WAIT_MS}) as an option"
)


class RequestReader:
    """Parser of request bodies for one model; thread-safe."""

    def __init__(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: int,
        context_tokens: int,
        *,
        saves: bool = False,
        loads: bool = False,
    ) -> None:
        """``saves``, ``loads``: True if the engine saves blocks for other engines, or loads theirs."""
        self._saves = saves
        self._loads = loads
        self.model = model
        self.context_tokens = context_tokens
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._lock = threading.Lock()

    def read(self, raw: bytes, chat: bool) -> Generation:
        try:
            fields = msgspec.json.decode(raw)
            body: ChatBody | CompletionBody
            body = msgspec.convert(fields, ChatBody) if chat else msgspec.convert(fields, CompletionBody)
        except msgspec.ValidationError as error:
            words, _, path = str(error).partition(" - at `$.")
            raise ApiError(400, f"the body is not as expected: {words}", path.rstrip("`") or None) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from error
        if body.model is not None and body.model != self.model:
            raise self.unknown_model(body.model)
        choices = body.n or 1
        for name, harmless in _AS_IF_ABSENT.items():
            value = fields.get(name)
            if value is None or value in harmless or (name == "best_of" and value == choices):
                continue
            raise ApiError(400, f"{name!r} is not supported by this engine; leave it out", name)
        if isinstance(body, ChatBody):
            ids, requested = self._chat_ids(body), body.max_completion_tokens or body.max_tokens
        else:
            ids, requested = self._completion_ids(body), body.max_tokens or COMPLETION_TOKENS
        max_tokens = self._room(len(ids), requested, "messages" if chat else "prompt")
        remote_decode, remote_prefill = self._transfer(fields.get(_TRANSFER), bool(body.stream))
        min_tokens = body.min_tokens or 0
        if remote_decode:  # the client's value is for the whole answer; this engine computes its first token
            min_tokens = min(min_tokens, max_tokens)
        if min_tokens > max_tokens:
            words = f"'min_tokens' is {body.min_tokens}, and the answer has at most {max_tokens}"
            raise ApiError(400, words, "min_tokens")
        options = body.stream_options
        if options is not None and not body.stream:
            raise ApiError(400, "'stream_options' is for streams: set 'stream', or leave it out", "stream_options")
        return Generation(
            ids=ids,
            max_tokens=max_tokens,
            sampling=self._sampling(body),
            choices=choices,
            min_tokens=min_tokens,
            stops=_stops(body.stop),
            stop_ids=frozenset(self._known("stop_token_ids", body.stop_token_ids or ())),
            keep_stop=bool(body.include_stop_str_in_output),
            ignore_eos=bool(body.ignore_eos),
            skip_special=body.skip_special_tokens is not False,
            logprobs=_logprobs(body),
            salt=body.cache_salt or "",
            stream=bool(body.stream),
            include_usage=options is not None and bool(options.include_usage),
            usage_in_chunks=options is not None and bool(options.include_usage and options.continuous_usage_stats),
            chat=chat,
            request_id=body.request_id or "",
            remote_decode=remote_decode,
            remote_prefill=remote_prefill,
        )

    def _transfer(self, transfer_params: Any, stream: bool) -> tuple[bool, RemotePrefill | None]:
        # Parse ``kv_transfer_params``; return True if another engine decodes, and the prefill by another engine.
        if transfer_params is None:
            return False, None
        # vLLM's proxies send fields of other connectors as null: treat these as absent.
        fields = transfer_params
        if isinstance(transfer_params, dict):
            fields = {name: value for name, value in transfer_params.items() if value is not None}
        try:
            params = msgspec.convert(fields, _TransferParams)
        except msgspec.ValidationError as error:
            words = f"{_TRANSFER!r} is not as expected: {error}: {_TRANSFER_EXPECTED}"
            raise ApiError(400, words, _TRANSFER) from error
        if unknown := sorted({*dict(fields)} - {*_TransferParams.__struct_fields__}):
            words = f"{_TRANSFER!r} has an unknown field {unknown[0]!r}: {_TRANSFER_EXPECTED}"
            raise ApiError(400, words, _TRANSFER)
        decode, prefill = params.do_remote_decode, params.do_remote_prefill
        if decode and prefill:
            raise ApiError(400, f"{_TRANSFER!r} asks for both steps at once: {_TRANSFER_EXPECTED}", _TRANSFER)
        if not prefill and (params.sky_tokens is not None or params.sky_wait_ms is not None):
            words = f"'sky_tokens' and 'sky_wait_ms' go with 'do_remote_prefill': {_TRANSFER_EXPECTED}"
            raise ApiError(400, words, _TRANSFER)
        if decode and stream:
            raise ApiError(400, "'do_remote_decode' is answered whole: leave out 'stream'", _TRANSFER)
        if (decode and not self._saves) or (prefill and not self._loads):
            step, roles = ("prefills", "producer or both") if decode else ("decodes", "consumer or both")
            raise ApiError(
                400,
                f"{_TRANSFER!r} asks for an engine that {step} with a store: start this one with --store ADDRESS and "
                f"--role {roles}, or leave the field out",
                _TRANSFER,
            )
        wait_s = None if params.sky_wait_ms is None else params.sky_wait_ms / 1000
        return decode, RemotePrefill(params.sky_tokens, wait_s) if prefill else None

    def unknown_model(self, named: str) -> ApiError:
        return ApiError(
            404,
            f"the model {named!r} does not exist; this engine serves {self.model!r}",
            param="model",
            code="model_not_found",
        )

    def _sampling(self, body: _Body) -> Sampling:
        allowed = None
        if body.allowed_token_ids is not None:
            allowed = frozenset(self._known("allowed_token_ids", body.allowed_token_ids))
            if not allowed:
                raise ApiError(
                    400, "'allowed_token_ids' allows nothing: name a token, or leave it out", "allowed_token_ids"
                )
        return Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(0, body.top_k or 0),
            min_p=body.min_p or 0.0,
            seed=body.seed,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            logit_bias=self._bias(body.logit_bias or {}),
            allowed=allowed,
        )

    def _bias(self, by_token: dict[str, float]) -> dict[int, float]:
        try:
            tokens = self._known("logit_bias", [int(token) for token in by_token])
        except ValueError as error:
            raise ApiError(400, "'logit_bias' names tokens by their ids, in quotes", "logit_bias") from error
        biases = (max(-_MOST_BIAS, min(_MOST_BIAS, bias)) for bias in by_token.values())
        return dict(zip(tokens, biases, strict=True))

    def _known(self, name: str, tokens: Collection[int]) -> Collection[int]:
        if not all(0 <= token < self._vocabulary for token in tokens):
            raise ApiError(400, f"{name!r} has token ids outside 0 to {self._vocabulary - 1}", name)
        return tokens

    def _completion_ids(self, body: CompletionBody) -> npt.NDArray[np.int64]:
        prompt = body.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._tokens(prompt, special=body.add_special_tokens is not False)
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise ApiError(400, "'prompt' must be a text or a list of token ids; one prompt a request", "prompt")
        if not prompt:
            raise ApiError(400, "'prompt' is empty: at least one token is needed", "prompt")
        if not all(0 <= token < self._vocabulary for token in prompt):
            raise ApiError(400, f"'prompt' has token ids outside 0 to {self._vocabulary - 1}", "prompt")
        return np.asarray(prompt, dtype=np.int64)

    def _chat_ids(self, body: ChatBody) -> npt.NDArray[np.int64]:
        continues = bool(body.continue_final_message)
        begins = body.add_generation_prompt is not False
        if continues == begins:
            raise ApiError(
                400,
                "the answer begins a turn, or continues the last one: set 'continue_final_message' to true and "
                "'add_generation_prompt' to false, or leave both out",
                "continue_final_message" if continues else "add_generation_prompt",
            )
        with self._lock:
            text, special = render_chat(self._tokenizer, body.messages, continues)
        return self._tokens(text, special if body.add_special_tokens is None else body.add_special_tokens)

    def _tokens(self, text: str, special: bool) -> npt.NDArray[np.int64]:
        with self._lock:  # tokenizers need not be thread-safe
            try:
                ids = self._tokenizer(text, add_special_tokens=special)["input_ids"]
            except (UnicodeError, TypeError) as error:  # half of a surrogate pair
                raise ApiError(400, f"the prompt is not text that can be encoded: {error}", "prompt") from error
        if not ids:
            raise ApiError(400, "the prompt is empty: at least one token is needed", "prompt")
        return np.asarray(ids, dtype=np.int64)

    def _room(self, prompt_tokens: int, requested_tokens: int | None, param: str) -> int:
        available = self.context_tokens - prompt_tokens
        if available < (requested_tokens or 1):
            more = (
                f" and the {requested_tokens} asked for in the answer"
                if requested_tokens
                else ", with no room for an answer"
            )
            # The first words are OpenAI's and vLLM's: litellm and other clients recognise the error by them.
            raise ApiError(
                400,
                f"This model's maximum context length is {self.context_tokens} tokens; "
                f"the prompt has {prompt_tokens}{more}: shorten the prompt or ask for less",
                param=param,
                code="context_length_exceeded",
            )
        return requested_tokens or available


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MOST_STOPS:
        raise ApiError(400, f"'stop' has {len(stops)} texts: at most {MOST_STOPS}", "stop")
    if "" in stops:
        raise ApiError(400, "'stop' has an empty text, which every answer contains", "stop")
    return stops


def _logprobs(body: CompletionBody | ChatBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "'top_logprobs' goes with 'logprobs': set that, too", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], continues: bool = False
) -> tuple[str, bool]:
    """Render the chat by the model's template or a plain format; return it and whether to add special tokens.

    Raises:
        ApiError: messages are not text with a role, or the template refuses them.
    """
    parsed = [_message(at, message) for at, message in enumerate(messages)]
    if not parsed:
        raise ApiError(400, "'messages' is empty: at least one is needed", "messages")
    if not getattr(tokenizer, "chat_template", None):
        return plain_chat(parsed, continues), True
    try:
        text = tokenizer.apply_chat_template(
            parsed, tokenize=False, add_generation_prompt=not continues, continue_final_message=continues
        )
    except Exception as error:  # a template is a program and may raise anything
        raise ApiError(400, f"the model's chat template refuses the messages: {error}", "messages") from error
    return str(text), False


def plain_chat(messages: Sequence[dict[str, str]], continues: bool = False) -> str:
    """Return ``role: text`` in paragraphs: the next turn's prompt begins with this prompt and its answer."""
    complete, last = (messages[:-1], messages[-1]) if continues else (messages, {"role": "assistant", "content": ""})
    return "".join(f"{message['role']}: {message['content']}\n\n" for message in complete) + (
        f"{last['role']}:{last['content']}"
    )


def _message(at: int, message: dict[str, Any]) -> dict[str, str]:
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) != len(content) or not all(isinstance(part, str) for part in parts):
            raise ApiError(400, f"messages[{at}] has parts that are not text, and this model reads text", "messages")
        content = "\n".join(str(part) for part in parts)
    if not isinstance(role, str) or not isinstance(content, str):
        raise ApiError(400, f"messages[{at}] must have 'role' and 'content', both texts", "messages")
    return {"role": role, "content": content}
