"""Bodies of a request's two steps, in the dialect of vLLM's proxy for disaggregated prefill.

1. The prefill server gets the body, limited to one token, not streamed. It answers with ``kv_transfer_params``.
2. The decode server gets the body with these, and computes every token of the answer.

Some requests cannot be split (``why_whole``): several answers or prompts would share ``kv_transfer_params``; log
probabilities and echo of the prompt need states that the decode server does not compute; a client that sends
``kv_transfer_params`` runs the steps itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from skymemory.router.prompts.reader import CHAT_PATHS, COMPLETIONS, STARTS_WITH_NUMBER
from skymemory.router.request_account import Usage, usage_in

Fields = Mapping[str, msgspec.Raw]
PARAMS = "kv_transfer_params"
ASKS_FOR_KV = msgspec.Raw(b'{"do_remote_prefill":true}')
"""Value for a decode server that is asked before the prefill has ended."""
_DECODES_ELSEWHERE = msgspec.Raw(b'{"do_remote_decode":true}')
_FALSE, _ONE = msgspec.Raw(b"false"), msgspec.Raw(b"1")
_NOT_OF_PREFILL = frozenset(("stream_options", "min_tokens"))
_UNSET = (b"", b"null")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_number = msgspec.json.Decoder(float)
_prompts = msgspec.json.Decoder(list[msgspec.Raw])


def fields_of(body: bytes) -> Fields | None:
    try:
        return _fields.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def why_whole(path: str, fields: Fields) -> str:
    """Return what prevents splitting: a field, another API's path, or nothing."""

    def is_set(name: str) -> bool:
        return _raw(fields, name) not in _UNSET

    if path not in CHAT_PATHS:
        return path
    for name in (PARAMS, "prompt_embeds", "prompt_logprobs"):
        if is_set(name):
            return name
    for name in ("echo", "use_beam_search"):
        if _raw(fields, name) not in (*_UNSET, b"false"):
            return name
    for name in ("n", "best_of"):
        if is_set(name) and _as_number(_raw(fields, name)) != 1:
            return name
    for name in ("max_tokens", "max_completion_tokens"):
        if is_set(name) and not _as_number(_raw(fields, name)) >= 1:  # nothing to decode, or not a number
            return name
    return "prompt" if path == COMPLETIONS and _has_several_prompts(_raw(fields, "prompt")) else ""


def prefill_body(fields: Fields) -> bytes:
    prefill_fields = {name: value for name, value in fields.items() if name not in _NOT_OF_PREFILL}
    prefill_fields |= {"max_tokens": _ONE, "stream": _FALSE, PARAMS: _DECODES_ELSEWHERE}
    if "max_completion_tokens" in prefill_fields:
        prefill_fields["max_completion_tokens"] = _ONE
    return msgspec.json.encode(prefill_fields)


def decode_body(fields: Fields, params: msgspec.Raw) -> bytes:
    return msgspec.json.encode({**fields, PARAMS: params})


class Prefilled(NamedTuple):
    params: msgspec.Raw | None  # parameters for the decode server; None: the prefill server holds nothing for it
    usage: Usage | None


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _Error(msgspec.Struct, frozen=True):
    param: object = None


class _ErrorAnswer(msgspec.Struct):
    error: _Error = _Error()


_answer = msgspec.json.Decoder(_Answer)
_error = msgspec.json.Decoder(_ErrorAnswer)


def read_prefilled(body: bytes) -> Prefilled | None:
    """Read the prefill server's answer; None: it is none."""
    try:
        params = bytes(_answer.decode(body).kv_transfer_params)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if params not in _UNSET and not params.startswith(b"{"):
        return None
    # Copy, since a Raw keeps the complete answer in memory.
    return Prefilled(None if params in _UNSET else msgspec.Raw(params), usage_in(body))


def refuses_params(error: bytes) -> bool:
    """Return True if an error's ``param`` is ``kv_transfer_params``. Its message may repeat the request."""
    try:
        return _error.decode(error).error.param == PARAMS
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def _raw(fields: Fields, name: str) -> bytes:
    value = fields.get(name)
    return b"" if value is None else bytes(value)


def _as_number(raw: bytes) -> float:
    try:
        return _number.decode(raw)
    except (msgspec.MsgspecError, ValueError):
        return float("nan")


def _has_several_prompts(raw: bytes) -> bool:
    if not raw.startswith(b"[") or STARTS_WITH_NUMBER.match(raw):
        return False
    try:
        return len(_prompts.decode(raw)) > 1
    except (msgspec.MsgspecError, RecursionError):
        return False
