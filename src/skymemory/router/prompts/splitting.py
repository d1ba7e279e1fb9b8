"""The bodies of a request's two steps, in the dialect of vLLM's proxy for disaggregated prefill.

1. The prefill server gets the client's body for one token that is not streamed, with ``kv_transfer_params`` that say
   that another server decodes. It answers with the ``kv_transfer_params`` for the decode server.
2. The decode server gets the client's body with those. It computes every token of the answer, the first one too.

Other fields go to both as the client wrote them. Some requests cannot be split (``why_whole``): several answers or
prompts of one request would share one ``kv_transfer_params``; log probabilities of the prompt and its echo need the
states of all prompt tokens, which the decode server does not compute; and a client that sends ``kv_transfer_params``
takes the two steps itself.
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
"""For a decode server that is asked before the prefill server has answered."""
_DECODES_ELSEWHERE = msgspec.Raw(b'{"do_remote_decode":true}')
_FALSE, _ONE = msgspec.Raw(b"false"), msgspec.Raw(b"1")
_NOT_OF_PREFILL = frozenset(("stream_options", "min_tokens"))
_UNSET = (b"", b"null")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_number = msgspec.json.Decoder(float)
_prompts = msgspec.json.Decoder(list[msgspec.Raw])


def fields_of(body: bytes) -> Fields | None:
    """The fields of a JSON object, undecoded; None: it is no JSON object, which the prompt reader reports."""
    try:
        return _fields.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def why_whole(path: str, fields: Fields) -> str:
    """The field for which this request cannot be split; empty: it can. Of other APIs none is."""

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
    """For the prefill server."""
    own = {name: value for name, value in fields.items() if name not in _NOT_OF_PREFILL}
    own |= {"max_tokens": _ONE, "stream": _FALSE, PARAMS: _DECODES_ELSEWHERE}
    if "max_completion_tokens" in own:
        own["max_completion_tokens"] = _ONE
    return msgspec.json.encode(own)


def decode_body(fields: Fields, params: msgspec.Raw) -> bytes:
    """For the decode server."""
    return msgspec.json.encode({**fields, PARAMS: params})


class Prefilled(NamedTuple):
    """The answer of a prefill server."""

    params: msgspec.Raw | None
    """For the decode server; None: it named none, and holds nothing for it."""
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
    """A prefill server's answer; None: it is not one."""
    try:
        params = bytes(_answer.decode(body).kv_transfer_params)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if params not in _UNSET and not params.startswith(b"{"):
        return None
    # A copy, since a Raw keeps the whole answer in memory.
    return Prefilled(None if params in _UNSET else msgspec.Raw(params), usage_in(body))


def refuses_params(error: bytes) -> bool:
    """Whether an error response concerns ``kv_transfer_params``, which the router has added and no client sent. By its
    ``param``: messages may repeat the whole request.
    """
    try:
        return _error.decode(error).error.param == PARAMS
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def _raw(fields: Fields, name: str) -> bytes:
    value = fields.get(name)
    return b"" if value is None else bytes(value)


def _as_number(raw: bytes) -> float:
    """NaN: it is not one, which the engine reports."""
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
