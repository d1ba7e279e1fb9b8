"""Who is to blame: a failure counts against the pair of request and server until more is known.

1. A request that failed at one server, and was answered by another, proves the first one's fault.
2. A request that failed at two servers is suspect: its failures are taken back from both, until a third one answers it.
3. A client's failures keep its own requests away from a server. All requests stay away where two clients have failed
   there, or where one client sends all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from skymemory.router.failure.faults import RULES, Fault

REST_S = (1.0, 3.0, 9.0, 27.0, 60.0)
"""How long a server is left alone after its first, second, … failure without a good answer in between; then one request
tries it. Envoy's outlier detection begins with five failures and 30 s.
"""
MOST_FAILURES = 32
"""That are kept of one server."""
EJECTING = 3
"""Requests whose failures eject a server."""
EJECTING_SILENT = 2
"""Requests without an answer that do."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that failed at a server."""

    client: str
    fault: Fault
    at_s: float
    wait_s: float = 0.0
    """The server's own ``Retry-After``."""
    is_proven: bool = False
    """Another server has answered the request."""
    is_lost: bool = False
    """Of silence: it has lasted twice as long as it takes to be noticed."""
    is_final: bool = False
    """The request ended with it: no other server was asked."""

    @property
    def accuses(self) -> bool:
        """It speaks of a fault, not of a full server."""
        return not RULES[self.fault].is_back_pressure

    @property
    def is_settled(self) -> bool:
        return self.is_proven or self.is_final or self.fault is Fault.SILENT


NO_FAILURES: Mapping[str, Failure] = MappingProxyType({})
NO_RETRIES: Mapping[Fault, int] = MappingProxyType({})


class Attempts:
    """The attempts of one request, for the policy. Who sends it is a subclass."""

    # Of the class, until a request needs its own: nearly none fails.
    heard_s: float = float("-inf")
    """When the last piece of its answer came; who receives it keeps it."""
    failed: Mapping[str, Failure] = NO_FAILURES
    """By server, the last failure."""
    retries: Mapping[Fault, int] = NO_RETRIES
    """Attempts elsewhere that each fault has caused."""

    def __init__(self, client: str) -> None:
        self.client = client
        """Tenant or address."""

    def move_on(self, server: str, why: str) -> None:
        """The server is ejected: send the request to another one, if nothing of its answer has come."""

    def add_failure(self, server: str, failure: Failure) -> None:
        self.failed = {**self.failed, server: failure}

    def remove_failure(self, server: str) -> None:
        self.failed = {name: failure for name, failure in self.failed.items() if name != server}

    def count_retry(self, fault: Fault) -> None:
        self.retries = {**self.retries, fault: self.retries.get(fault, 0) + 1}

    @property
    def accused(self) -> list[str]:
        """Servers where it failed so that either may be the cause."""
        return [name for name, failure in self.failed.items() if failure.accuses and RULES[failure.fault].is_of_pair]

    @property
    def is_suspect(self) -> bool:
        return len(self.accused) > 1


class Evidence:
    """Failures at one server since it last answered well."""

    __slots__ = ("cleared_s", "failures", "last_s")

    def __init__(self) -> None:
        self.failures: dict[Attempts, Failure] = {}
        self.last_s = self.cleared_s = float("-inf")

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
        """A check that began at ``since_s`` found the server well: connections that broke before prove nothing, unless
        another server has answered those requests.
        """
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
        """Failures that count for a client's requests (None: for all), where as many ``clients`` have to agree."""
        failures = list(self.failures.values())
        certain = [failure for failure in failures if not RULES[failure.fault].is_of_pair]
        if certain or len({failure.client for failure in failures}) >= clients:
            return failures
        return [failure for failure in failures if failure.client == client]

    def rests_until_s(self, client: str | None, clients: int) -> float:
        """When a client's requests may try the server again; minus infinity: nothing speaks against it."""
        failures = self.binding(client, clients)
        if not failures:
            return float("-inf")
        rest_s = REST_S[min(len(failures), len(REST_S)) - 1]
        return max(failure.at_s + max(rest_s, failure.wait_s) for failure in failures)

    def ejects(self, clients: int) -> str:
        """Why these failures eject the server; empty: they do not."""
        # While a request is being tried elsewhere it may yet prove to be the cause.
        settled = (each for each in self.binding(None, clients) if each.is_settled)
        accusing = [failure for failure in settled if failure.accuses]
        silent = sum(failure.fault is Fault.SILENT for failure in accusing)
        if len(accusing) >= EJECTING or silent >= EJECTING_SILENT or any(failure.is_lost for failure in accusing):
            last = accusing[-1].fault
            what = "were not answered" if last is Fault.SILENT else f"failed there, the last by: {RULES[last].says}"
            return f"{len(accusing)} requests {what}"
        return ""
