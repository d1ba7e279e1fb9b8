"""Reads a request's tenant, priority and promised times from its headers and body.

Beside headers that the operator names, those of the Kubernetes world are understood. In the Gateway API inference
extension (its docs on InferenceObjective and on flow control, v1) ``x-gateway-inference-fairness-id`` is the tenant,
and ``x-gateway-inference-objective`` names an objective, whose priority the picker looks up (higher goes first; 0 for
an unknown name). In llm-d (its guide on predicted latency) ``x-slo-ttft-ms`` and ``x-slo-tpot-ms`` are the promised
times in milliseconds. Later releases of llm-d spell all four with ``x-llm-d-``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from skymemory.conductor.request import Slo
from skymemory.router.api_error import ApiError

MOST_PRIORITY = 10
"""Priorities are limited to this and its negative."""
FAIRNESS_HEADERS = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")
OBJECTIVE_HEADERS = ("x-gateway-inference-objective", "x-llm-d-inference-objective")
TTFT_HEADERS = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")
TPOT_HEADERS = ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms")
_KEY_LETTERS = 16
_NAME_LETTERS = 256

_number = msgspec.json.Decoder(int | None)


@dataclass(frozen=True, slots=True)
class Clients:
    """The headers to read, by lower-case names; empty: none."""

    tenant_header: str = ""
    priority_header: str = ""
    objectives: Mapping[str, int] | None = None
    """Priorities of objectives by name. None: the inference extension's headers are not read."""

    def tenant(self, headers: Mapping[str, str], user: str) -> str:
        """By its header, else a digest of its API key, else the body's ``user``."""
        if self.tenant_header and (named := headers.get(self.tenant_header)):
            return named[:_NAME_LETTERS]
        if self.objectives is not None and (named := _first(headers, FAIRNESS_HEADERS)):
            return named[:_NAME_LETTERS]
        if key := headers.get("authorization"):
            return _digest(key)
        return user[:_NAME_LETTERS]

    def priority(self, headers: Mapping[str, str], field: bytes) -> int:
        """By its header or objective (higher goes first), else by the body's ``priority`` (vLLM's: lower goes first).

        Raises:
            ApiError: 400, the header is no whole number. (An invalid field is for the engine to report.)
        """
        if self.priority_header and (value := headers.get(self.priority_header)) is not None:
            try:
                return _clamped(int(value))
            except ValueError as error:
                raise ApiError(400, f"{self.priority_header} is {value[:40]!r}; expected a whole number") from error
        if self.objectives is not None and (named := _first(headers, OBJECTIVE_HEADERS)) is not None:
            return self.objectives.get(named, 0)
        try:
            return _clamped(-(_number.decode(field) or 0)) if self.priority_header and field else 0
        except (ValueError, msgspec.MsgspecError):  # a ValueError only since msgspec 0.22
            return 0

    def has_priority(self, headers: Mapping[str, str]) -> bool:
        """Whether a header sets the priority."""
        if self.priority_header and self.priority_header in headers:
            return True
        return self.objectives is not None and _first(headers, OBJECTIVE_HEADERS) is not None


def promised(headers: Mapping[str, str], default: Slo | None = None) -> Slo | None:
    """The times promised to a request: by its headers, and where they are missing (or 0), by ``default``.

    Raises:
        ApiError: 400, a header is no number of milliseconds.
    """
    ttft_s, tbt_s = _seconds(headers, TTFT_HEADERS), _seconds(headers, TPOT_HEADERS)
    if not ttft_s and not tbt_s:
        return default
    if default is not None:
        return Slo(ttft_s or default.ttft_s, tbt_s or default.tbt_s)
    return Slo(ttft_s or math.inf, tbt_s or math.inf)


def _seconds(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    value = _first(headers, names)
    if value is None:
        return None
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = -1.0
    if not 0 <= milliseconds < math.inf:
        raise ApiError(400, f"{names[0]} is {value[:40]!r}; expected milliseconds, such as 500")
    return milliseconds / 1000 or None


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((value for name in names if (value := headers.get(name)) is not None), None)


def _clamped(level: int) -> int:
    return max(-MOST_PRIORITY, min(MOST_PRIORITY, level))


@lru_cache(maxsize=4096)
def _digest(key: str) -> str:
    """A key's digest, in place of the secret, to be stored, compared and shown."""
    return "key-" + hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()[:_KEY_LETTERS]
