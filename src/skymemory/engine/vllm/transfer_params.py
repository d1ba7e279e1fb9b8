"""``kv_transfer_params`` of a request, with which a router prefills on one engine and decodes on another.

The first request, with ``max_tokens`` 1, has ``{"do_remote_decode": true}``; the second the answer's parameters, such
as ``{"sky_tokens": 512}``, or, if both are sent at once, ``{"do_remote_prefill": true}``. NIXL reacts to that, too.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skymemory.errors import InvalidInput

_GENERATION = re.compile(r"[0-9a-f]{32}")
_LONGEST_MS = 10**12  # limit of ``sky_wait_ms``: no float holds all of JSON's whole numbers


@dataclass(frozen=True, slots=True)
class TransferParams:
    """Parameters of a request. Keys of other connectors are ignored."""

    hands_over: bool = False
    """``do_remote_decode``: another engine will load the prompt's values."""
    takes_over: bool = False
    """``do_remote_prefill`` or ``sky_tokens``: another engine stores the prompt's values."""
    tokens: int | None = None
    """``sky_tokens``: number of stored tokens; None: all in complete values."""
    wait_s: float = math.inf
    """``sky_wait_ms``, limited by the setting ``wait``."""
    generation: str = ""
    """``sky_generation`` of the prefilling engine (``identity.Seeds``)."""

    @classmethod
    def read(cls, params: object) -> TransferParams:
        """Read and check the parameters."""
        if params is None:
            return cls()
        if not isinstance(params, Mapping):
            raise InvalidInput(f"{reprlib.repr(params)}: expected a JSON object")
        tokens, wait_ms = params.get("sky_tokens"), params.get("sky_wait_ms")
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0):
            raise InvalidInput(f"sky_tokens is {reprlib.repr(tokens)}: expected a whole number, 0 or more")
        if wait_ms is not None and (
            isinstance(wait_ms, bool) or not isinstance(wait_ms, int | float) or not 0 <= wait_ms < math.inf
        ):
            raise InvalidInput(f"sky_wait_ms is {reprlib.repr(wait_ms)}: expected milliseconds, 0 or more")
        generation = params.get("sky_generation")
        if generation is not None and not (isinstance(generation, str) and _GENERATION.fullmatch(generation)):
            raise InvalidInput(f"sky_generation is {reprlib.repr(generation)}: expected 32 hexadecimal digits")
        return cls(
            _switch(params, "do_remote_decode"),
            _switch(params, "do_remote_prefill") or tokens is not None,
            tokens,
            math.inf if wait_ms is None else min(wait_ms, _LONGEST_MS) / 1000,
            generation or "",
        )


def answer_of(tokens: int, generation: str) -> dict[str, Any]:
    return {"sky_tokens": tokens} | ({"sky_generation": generation} if generation else {})


def _switch(params: Mapping[str, object], key: str) -> bool:
    value = params.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidInput(f"{key} is {reprlib.repr(value)}: expected true or false")
    return bool(value)
