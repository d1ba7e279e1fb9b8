"""The servers behind a router: their reports and our count of their requests in flight.

A server has a *slot*, a small number that it keeps while it is in the fleet; indices store sets of servers as bits of
an integer by it. A slot is reused only after ``Picker.remove`` made the scorer forget the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from skymemory.errors import InvalidInput

_KEPT = 0.95
"""Decay of earlier prompts per new one, in the ratio of our tokens to the engine's."""


@dataclass(frozen=True, slots=True)
class PrefillTotals:
    """Counters of an engine over all requests since its start. Tokens are by its tokenizer, not ours."""

    requests: float
    tokens: float
    """Prompt tokens."""
    computed: float
    """Prompt tokens that were not cached."""
    seconds: float
    """Sum over requests, from the start of the prefill to the first token."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """An engine's metrics as of ``at_s``."""

    at_s: float
    waiting: int = 0
    """Requests queued for their prefill."""
    running: int = 0
    kv_usage: float = 0.0
    """Share of its KV cache in use, 0 to 1."""
    cache_blocks: int | None = None
    """Capacity of its KV cache in blocks, if reported."""
    block_tokens: int | None = None
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that are loaded or loading."""
    max_adapters: int | None = None
    prefills: PrefillTotals | None = None
    """Totals of its prefills, if reported."""


class Server:
    """One server. ``reported`` is its last report, None before the first."""

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
        """Requests sent to it that have not ended."""
        self.prefilling = 0
        """Those of them without their first byte."""
        self.prefill_tokens = 0.0
        """Estimated prefill backlog of those: prompt tokens less matched ones."""
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
        """Finishes its requests and gets no new ones."""
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
        """Records that a prompt of ``read`` tokens by our count had ``reported`` by the engine's usage."""
        if read and reported:
            self._read_tokens = self._read_tokens * _KEPT + read
            self._engine_tokens = self._engine_tokens * _KEPT + reported

    @property
    def read_per_token(self) -> float:
        """Our tokens per token of the engine; 1 before it reported any."""
        return self._read_tokens / self._engine_tokens if self._engine_tokens else 1.0

    def fresh_report(self, now_s: float, stale_s: float) -> LoadReport | None:
        """The last report, or None if it is older than ``stale_s``."""
        report = self.reported
        return report if report is not None and now_s - report.at_s <= stale_s else None


class Fleet:
    """Servers by name."""

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        """In the order of their addition."""
        self._free_slots: list[int] = []
        self._slots = 0
        self._available: tuple[Server, ...] | None = None

    @property
    def available(self) -> tuple[Server, ...]:
        """Servers that take requests, in the order of their addition; cached until a server changes."""
        available = self._available
        if available is None:
            available = self._available = tuple(server for server in self.servers.values() if server.takes_requests)
        return available

    def changed(self) -> None:
        """Drops the cached ``available``."""
        self._available = None

    def __iter__(self) -> Iterator[Server]:
        return iter(self.servers.values())

    def __len__(self) -> int:
        return len(self.servers)

    def add(self, name: str) -> Server:
        """Adds a server, which counts as healthy.

        Raises:
            InvalidInput: the name is taken.
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
        """Removes a server. Its slot goes to the next one added: scorers must have forgotten it by then."""
        server = self.servers.pop(name, None)
        if server is not None:
            self._free_slots.append(server.slot)
            self.changed()
        return server
