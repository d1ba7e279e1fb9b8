"""The servers that requests can go to: what they report of themselves, and what we have sent them.

A server has a *slot*, a small number that stays its own while it is in the fleet; indices keep sets of servers as bits
of an integer by it. A slot is given again only after ``remove`` told every scorer to forget it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from skymemory.errors import InvalidInput

_KEPT = 0.95
"""What earlier prompts weigh when another comes."""


@dataclass(frozen=True, slots=True)
class PrefillTotals:
    """Of all requests that an engine has ended since it began. Tokens are its own, which may not be ours."""

    requests: float
    tokens: float
    """Of their prompts."""
    computed: float
    """Of those, tokens that were not cached."""
    seconds: float
    """From the beginning of each one's prefill to its first token."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an engine says of itself (its metrics), as of ``at_s``."""

    at_s: float
    waiting: int = 0
    """Requests that wait for their prefill."""
    running: int = 0
    kv_usage: float = 0.0
    """Part of its KV cache that is in use, 0 to 1."""
    cache_blocks: int | None = None
    """Blocks that its KV cache holds, where it tells."""
    block_tokens: int | None = None
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that are loaded or are being loaded."""
    max_adapters: int | None = None
    prefills: PrefillTotals | None = None
    """Where it tells what its prefills take."""


class Server:
    """One server. ``reported`` is None until it first reported, and where it never does."""

    __slots__ = (
        "_draining",
        "_engine_tokens",
        "_fleet",
        "_healthy",
        "_read_tokens",
        "in_flight",
        "name",
        "prefill_tokens",
        "prefilling",
        "reported",
        "slot",
    )

    def __init__(self, name: str, slot: int, fleet: Fleet | None = None) -> None:
        self.name = name
        self.slot = slot
        self.reported: LoadReport | None = None
        self.in_flight = 0
        """Requests sent to it, of which the end has not been seen."""
        self.prefilling = 0
        """Of those, the ones whose first byte has not come."""
        self.prefill_tokens = 0.0
        """Tokens those are believed to compute: prompts less what was matched."""
        self._healthy, self._draining = True, False
        self._fleet = fleet
        self._read_tokens = self._engine_tokens = 0.0

    def __repr__(self) -> str:
        state = "" if self._healthy else ", not healthy"
        return (
            f"Server({self.name!r}, slot {self.slot}, {self.in_flight} in flight{state}{', draining' * self._draining})"
        )

    @property
    def healthy(self) -> bool:
        return self._healthy

    @healthy.setter
    def healthy(self, healthy: bool) -> None:
        self._healthy = healthy
        self._changed()

    @property
    def draining(self) -> bool:
        """Serves what it has, and gets nothing new."""
        return self._draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._draining = draining
        self._changed()

    @property
    def takes_requests(self) -> bool:
        return self._healthy and not self._draining

    def _changed(self) -> None:
        if self._fleet is not None:
            self._fleet.changed()

    def reported_tokens(self, read: int, reported: int) -> None:
        """A prompt that we count as ``read`` tokens has ``reported`` by its usage."""
        if read and reported:
            self._read_tokens = self._read_tokens * _KEPT + read
            self._engine_tokens = self._engine_tokens * _KEPT + reported

    @property
    def read_per_token(self) -> float:
        """Tokens that prompts are read as, for each that it counts itself; 1 until it has said."""
        return self._read_tokens / self._engine_tokens if self._engine_tokens else 1.0

    def fresh_report(self, now_s: float, stale_s: float) -> LoadReport | None:
        """The report, unless it is older than ``stale_s``: then nothing is known."""
        report = self.reported
        return report if report is not None and now_s - report.at_s <= stale_s else None


class Fleet:
    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        """By name, in the order in which they came."""
        self._free_slots: list[int] = []
        self._slots = 0
        self._able: tuple[Server, ...] | None = None

    @property
    def able(self) -> tuple[Server, ...]:
        """Those that take requests, in the order in which they came; made anew only after a change."""
        able = self._able
        if able is None:
            able = self._able = tuple(server for server in self.servers.values() if server.takes_requests)
        return able

    def changed(self) -> None:
        """Who takes requests may be others than before."""
        self._able = None

    def __iter__(self) -> Iterator[Server]:
        return iter(self.servers.values())

    def __len__(self) -> int:
        return len(self.servers)

    def add(self, name: str) -> Server:
        """A new server, healthy until something else is said.

        Raises:
            InvalidInput: there is one of that name.
        """
        if name in self.servers:
            raise InvalidInput(f"server {name!r} is in the fleet already; names must differ")
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot, self._slots = self._slots, self._slots + 1
        server = self.servers[name] = Server(name, slot, self)
        self.changed()
        return server

    def remove(self, name: str) -> Server | None:
        """Take it out. Its slot goes to the next server that is added: scorers must have forgotten it by then."""
        server = self.servers.pop(name, None)
        if server is not None:
            self._free_slots.append(server.slot)
            self.changed()
        return server
