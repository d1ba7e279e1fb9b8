"""Blame for failures: each counts against the pair of request and server until more is known.

1. Another server's answer proves the failure.
2. Failures at two servers are taken back until a third answers.
3. A client's failures keep its own requests away; all stay away if two clients failed there, or one client sends all
   requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from skymemory.router.failure.faults import RULES, Fault

REST_S = (1.0, 3.0, 9.0, 27.0, 60.0)
"""Rest after the first, second, … failure in a row."""
MOST_FAILURES = 32
EJECTING = 3
EJECTING_SILENT = 2


@dataclass(frozen=True, slots=True)
class Failure:
    """Failed attempt of a client's request at a server."""

    client: str
    fault: Fault
    at_s: float
    wait_s: float = 0.0  # rest that the server asked for by `Retry-After`
    is_proven: bool = False  # another server answered the request
    is_lost: bool = False  # silent for twice the time after which it counts
    is_final: bool = False  # the request has ended: no other server will prove or disprove it

    @property
    def accuses(self) -> bool:
        """False for a full server."""
        return not RULES[self.fault].is_back_pressure

    @property
    def is_settled(self) -> bool:
        return self.is_proven or self.is_final or self.fault is Fault.SILENT


NO_FAILURES: Mapping[str, Failure] = MappingProxyType({})
NO_RETRIES: Mapping[Fault, int] = MappingProxyType({})


class Attempts:
    """Attempts of a request, and their failures by server."""

    # Class attributes as defaults: hardly any request fails.
    heard_s: float = float("-inf")  # time of the answer's last piece
    failed: Mapping[str, Failure] = NO_FAILURES
    retries: Mapping[Fault, int] = NO_RETRIES  # number of retries after each kind of fault

    def __init__(self, client: str) -> None:
        self.client = client  # tenant or address

    def move_on(self, server: str, why: str) -> None:
        """Leave an ejected server before its answer begins."""

    def add_failure(self, server: str, failure: Failure) -> None:
        self.failed = {**self.failed, server: failure}

    def remove_failure(self, server: str) -> None:
        self.failed = {name: failure for name, failure in self.failed.items() if name != server}

    def count_retry(self, fault: Fault) -> None:
        self.retries = {**self.retries, fault: self.retries.get(fault, 0) + 1}

    @property
    def accused(self) -> list[str]:
        """Servers at which it failed, if the request may be the cause."""
        return [name for name, failure in self.failed.items() if failure.accuses and RULES[failure.fault].is_of_pair]

    @property
    def is_suspect(self) -> bool:
        return len(self.accused) > 1


class Evidence:
    """Failures at a server since its last good answer."""

    __slots__ = ("cleared_s", "failures", "last_s")

    def __init__(self) -> None:
        self.failures: dict[Attempts, Failure] = {}
        self.last_s = self.cleared_s = float("-inf")  # times of the last failure and of `clear`

    def __bool__(self) -> bool:
        return bool(self.failures)

    def add(self, attempts: Attempts, failure: Failure) -> None:
        self.failures.pop(attempts, None)
        self.failures[attempts] = failure
        self.last_s = max(self.last_s, failure.at_s)
        if len(self.failures) > MOST_FAILURES:
            del self.failures[next(iter(self.failures))]

    def take_back(self, attempts: Attempts) -> None:
        self.failures.pop(attempts, None)

    def clear(self, now_s: float) -> None:
        self.failures.clear()
        self.cleared_s = now_s

    def acquit(self, since_s: float) -> None:
        """Drop unproven broken connections before a good check begun at ``since_s``."""
        for attempts, failure in list(self.failures.items()):
            if failure.fault in (Fault.RESET, Fault.UNCONNECTED) and not failure.is_proven and failure.at_s <= since_s:
                del self.failures[attempts]

    @property
    def has_accusation(self) -> bool:
        return any(failure.accuses for failure in self.failures.values())

    @property
    def is_silent(self) -> bool:
        return any(failure.fault is Fault.SILENT for failure in self.failures.values())

    @property
    def is_proven(self) -> bool:
        return any(failure.is_proven and failure.accuses for failure in self.failures.values())

    def binding(self, client: str | None, clients: int) -> list[Failure]:
        """Return the failures that count for a client (None: for all). Those of ``clients`` clients count for all."""
        failures = list(self.failures.values())
        certain = [failure for failure in failures if not RULES[failure.fault].is_of_pair]
        if certain or len({failure.client for failure in failures}) >= clients:
            return failures
        return [failure for failure in failures if failure.client == client]

    def rests_until_s(self, client: str | None, clients: int) -> float:
        failures = self.binding(client, clients)
        if not failures:
            return float("-inf")
        rest_s = REST_S[min(len(failures), len(REST_S)) - 1]
        return max(failure.at_s + max(rest_s, failure.wait_s) for failure in failures)

    def ejects(self, clients: int) -> str:
        """Return the reason to eject the server, or nothing. ``clients`` must have failed there."""
        # A request that is still being retried elsewhere may prove to be the cause.
        settled = (failure for failure in self.binding(None, clients) if failure.is_settled)
        accusing = [failure for failure in settled if failure.accuses]
        silent = sum(failure.fault is Fault.SILENT for failure in accusing)
        if len(accusing) >= EJECTING or silent >= EJECTING_SILENT or any(failure.is_lost for failure in accusing):
            last = accusing[-1].fault
            what = "were not answered" if last is Fault.SILENT else f"failed there, the last by: {RULES[last].says}"
            return f"{len(accusing)} requests {what}"
        return ""
