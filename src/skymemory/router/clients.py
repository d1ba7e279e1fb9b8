"""Who sends a request, how urgent it is, and what it wants to be promised: for rules that share out what there is too
little of.

Beside headers that the operator names, those of the Kubernetes world are understood. The Gateway API inference
extension (its docs on InferenceObjective and on flow control, v1) says a tenant in ``x-gateway-inference-fairness-id``
and an objective by name in ``x-gateway-inference-objective``; its picker looks up the objective's priority, the higher
the more urgent, 0 where there is none of that name. llm-d (its guide on predicted latency) says promises in
milliseconds in ``x-slo-ttft-ms`` and ``x-slo-tpot-ms``. Later releases of llm-d spell all four with ``x-llm-d-``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from skymemory.conductor.admission.base import Slo
from skymemory.router.bad_request import BadRequest

MOST_PRIORITY = 10
"""Above it and below its negative there are no further levels."""
FAIRNESS_HEADERS = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")
OBJECTIVE_HEADERS = ("x-gateway-inference-objective", "x-llm-d-inference-objective")
TTFT_HEADERS = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")
TPOT_HEADERS = ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms")
_KEY_LETTERS = 16
_NAME_LETTERS = 256

_number = msgspec.json.Decoder(int | None)


@dataclass(frozen=True, slots=True)
class Clients:
    """Where it is said. Lower-case names of headers; empty: nothing of the kind is read."""

    tenant_header: str = ""
    priority_header: str = ""
    objectives: Mapping[str, int] | None = None
    """Priorities of objectives by their names. None: the inference extension's headers are not read."""

    def tenant(self, headers: Mapping[str, str], user: str) -> str:
        """What its header names, else a digest of its API key, else the ``user`` of its body."""
        if self.tenant_header and (named := headers.get(self.tenant_header)):
            return named[:_NAME_LETTERS]
        if self.objectives is not None and (named := _first(headers, FAIRNESS_HEADERS)):
            return named[:_NAME_LETTERS]
        if key := headers.get("authorization"):
            return _digest(key)
        return user[:_NAME_LETTERS]

    def priority(self, headers: Mapping[str, str], field: bytes) -> int:
        """Higher goes first. The header says it so, or an objective by its name; the body's ``priority`` is vLLM's, of
        which the lower goes first.

        Raises:
            BadRequest: 400, the header is no whole number. Of the field the engine will say so.
        """
        if self.priority_header and (said := headers.get(self.priority_header)) is not None:
            try:
                return _within(int(said))
            except ValueError as error:
                raise BadRequest(400, f"{self.priority_header} is {said[:40]!r}; expected a whole number") from error
        if self.objectives is not None and (named := _first(headers, OBJECTIVE_HEADERS)) is not None:
            return self.objectives.get(named, 0)
        try:
            return _within(-(_number.decode(field) or 0)) if self.priority_header and field else 0
        except (ValueError, msgspec.MsgspecError):  # before msgspec 0.22 that is no ValueError
            return 0

    def says_priority(self, headers: Mapping[str, str]) -> bool:
        """Whether a header does."""
        if self.priority_header and self.priority_header in headers:
            return True
        return self.objectives is not None and _first(headers, OBJECTIVE_HEADERS) is not None


def promised(headers: Mapping[str, str], default: Slo | None = None) -> Slo | None:
    """What this request is promised: by its headers, and for what they do not say (or say 0 for) by ``default``.

    Raises:
        BadRequest: 400, a header is no number of milliseconds.
    """
    ttft_s, tbt_s = _seconds(headers, TTFT_HEADERS), _seconds(headers, TPOT_HEADERS)
    if not ttft_s and not tbt_s:
        return default
    if default is not None:
        return Slo(ttft_s or default.ttft_s, tbt_s or default.tbt_s)
    return Slo(ttft_s or math.inf, tbt_s or math.inf)


def _seconds(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    said = _first(headers, names)
    if said is None:
        return None
    try:
        milliseconds = float(said)
    except ValueError:
        milliseconds = -1.0
    if not 0 <= milliseconds < math.inf:
        raise BadRequest(400, f"{names[0]} is {said[:40]!r}; expected milliseconds, such as 500")
    return milliseconds / 1000 or None


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((said for name in names if (said := headers.get(name)) is not None), None)


def _within(level: int) -> int:
    return max(-MOST_PRIORITY, min(MOST_PRIORITY, level))


@lru_cache(maxsize=4096)
def _digest(key: str) -> str:
    """Keys are secrets: what is kept, compared and shown is not one."""
    return "key-" + hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()[:_KEY_LETTERS]
