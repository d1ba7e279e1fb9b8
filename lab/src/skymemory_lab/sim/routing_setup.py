"""Settings of the routing simulator: servers, what the routers learn of them, and faults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from skymemory.conductor.cost_model import CostModel, LLAMA_70B_8xA800
from skymemory.errors import InvalidInput

EngineKind = Literal["fifo", "chunk", "shared"]
FaultKind = Literal["slow", "hung", "emptied", "uncached", "liar"]


@dataclass(frozen=True, slots=True)
class ServerFault:
    """ServerFault of a server (its number) from ``from_s`` to ``until_s``.

    - ``slow``: all work takes ``factor`` times as long.
    - ``hung``: requests there at its start or sent during it get no answer, and fail by the clients' timeout; no load
      report is answered. Afterwards the server is idle, with its cache.
    - ``emptied``: at ``from_s`` the cache is emptied, without an event.
    - ``uncached``: nothing is cached; usage is honest.
    - ``liar``: nothing is cached, usage reports that all full blocks were, and load reports are zero.
    """

    kind: FaultKind
    server: int
    from_s: float = 0.0
    until_s: float = math.inf
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.from_s < self.until_s or not 0 < self.factor < math.inf:
            raise InvalidInput(f"fault {self.kind!r}: expected from_s before until_s, and a factor above 0")

    def holds(self, now_s: float) -> bool:
        return self.from_s <= now_s < self.until_s


@dataclass(frozen=True, slots=True)
class RoutingSetup:
    """Simulated servers and routers, and how late the routers learn the servers' state."""

    servers: int = 8
    engine: EngineKind = "fifo"
    """Kind of the servers' engines (``sim.engines``)."""
    cache_blocks: int = 5_000
    """Capacity of each server's cache, in blocks of 512 tokens."""
    cost: CostModel = LLAMA_70B_8xA800
    decode_token_s: float = 0.04
    """Seconds per token of an answer that decodes alone."""
    decode_more_s: float = 2e-4
    """Seconds that each further running answer adds to a step of ``chunk``; the presets fitted to published steps have
    1.1e-4 to 3.3e-4 (``CostModel.decode_request_s``)."""
    scrape_s: float = 1.0  # interval of the servers' load reports
    event_delay_s: float = 0.05  # delay of the caches' events
    reports_totals: bool = True
    """True if reports have totals of prefill and decode times, as those of vLLM do."""
    whole: float = 0.0
    """Share of answers not streamed."""
    usage: bool = False
    """True if the end of an answer reports its prompt's cached tokens."""
    routers: int = 1
    """Routers, each with its own picker and strategy; requests are given to them at random."""
    exchange_s: float | None = None
    """Interval at which routers exchange state; None: never."""
    outage: tuple[float, float] | None = None
    """Begin and end (s) of a time without exchange."""
    faults: tuple[ServerFault, ...] = ()
    timeout_s: float = 60.0
    """Time after which clients give a hung server up."""
    seed: int = 0
    """Seed of ties, and of the choice of streamed answers and routers."""

    def __post_init__(self) -> None:
        if self.servers < 1 or self.scrape_s <= 0 or self.event_delay_s < 0 or self.decode_token_s < 0:
            raise InvalidInput("expected servers ≥ 1, scrape_s > 0, event_delay_s ≥ 0, decode_token_s ≥ 0")
        if not 0 <= self.whole <= 1:
            raise InvalidInput(f"whole is {self.whole}; expected a share from 0 to 1")
        if self.engine not in ("fifo", "chunk", "shared"):
            raise InvalidInput(f"engine {self.engine!r}; expected fifo, chunk or shared")
        if self.routers < 1 or self.timeout_s <= 0 or self.decode_more_s < 0:
            raise InvalidInput("expected routers ≥ 1, timeout_s > 0, decode_more_s ≥ 0")
        if self.exchange_s is not None and not self.exchange_s > 0:
            raise InvalidInput(f"exchange_s is {self.exchange_s}; expected above 0, or None")
        if any(not 0 <= fault.server < self.servers for fault in self.faults):
            raise InvalidInput(f"a fault of a server that is not there; servers are 0 to {self.servers - 1}")

    @property
    def server_names(self) -> Sequence[str]:
        """Names of the servers in every router's fleet; slots are their positions."""
        return [f"server-{number}" for number in range(self.servers)]

    def faults_of(self, server: int) -> tuple[ServerFault, ...]:
        return tuple(fault for fault in self.faults if fault.server == server)
