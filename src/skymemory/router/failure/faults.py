"""Faults of an attempt, their retries and their blame.

docs/reference/router.md is generated from ``RULES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Fault(StrEnum):
    """Kind of a failed attempt at a server."""

    REFUSED = "refused"  # connection refused: nothing listens
    UNCONNECTED = "unconnected"  # connect timeout, or an unknown name
    RESET = "reset"  # connection lost before any byte of the answer
    BROKEN = "broken"  # connection lost in the middle of the answer
    SILENT = "silent"  # no answer, or no more of it, for too long
    ERROR = "500"
    BUSY = "429"  # or 503 with Retry-After: the server is full
    UNAVAILABLE = "503"
    GATEWAY = "502, 504"


@dataclass(frozen=True, slots=True)
class Rule:
    """Retries and blame after a kind of fault. ``says``: its description in the reference."""

    says: str
    retries: int | None = None  # maximum attempts at other servers; None: the request's limit
    # The request may be the cause: failures are taken back if another server fails, too.
    is_of_pair: bool = True
    is_back_pressure: bool = False  # the server is full: it rests, but is never ejected
    backs_off: bool = True  # the retry waits first


RULES: Mapping[Fault, Rule] = MappingProxyType(
    {
        Fault.REFUSED: Rule("the connection is refused: nothing was sent", is_of_pair=False, backs_off=False),
        Fault.UNCONNECTED: Rule("no connection within `timeouts: connect`, or no address", is_of_pair=False),
        Fault.RESET: Rule("the connection is reset or closed before any byte of the answer, or the answer is not HTTP"),
        Fault.BROKEN: Rule("an answer that had begun broke off, or ended without its last event", retries=0),
        Fault.SILENT: Rule("the server was ejected before it had answered, or in the middle", backs_off=False),
        Fault.ERROR: Rule("500", retries=1),
        Fault.BUSY: Rule("429, or 503 with `Retry-After`", is_back_pressure=True),
        Fault.UNAVAILABLE: Rule("503 without `Retry-After`"),
        Fault.GATEWAY: Rule("502 or 504"),
    }
)


def fault_of(status: int, retry_after: bool = False) -> Fault | None:
    if status == 429 or (status == 503 and retry_after):
        return Fault.BUSY
    if status == 503:
        return Fault.UNAVAILABLE
    if status in (502, 504):
        return Fault.GATEWAY
    return Fault.ERROR if status >= 500 else None


MOST_RETRY_AFTER_S = 60.0


def retry_after_s(value: bytes) -> float | None:
    """Return the seconds of ``Retry-After``; None: no number of at most nine digits."""
    digits = value.strip()
    return min(float(digits), MOST_RETRY_AFTER_S) if digits.isdigit() and len(digits) <= 9 else None
