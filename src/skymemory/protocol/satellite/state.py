"""Configuration of a satellite, and the state that its handlers share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from skymemory.constellation.torus import RoutingMode, SatelliteId
from skymemory.errors import InvalidInput
from skymemory.eviction import DEFAULT_REPLACEMENT, replacement_named
from skymemory.metrics import Counters
from skymemory.protocol.auth import Authority
from skymemory.protocol.clock import Locator, MoveClock, SkyMap
from skymemory.protocol.satellite.handover import ChunkHandover, Pacer, phase_of
from skymemory.protocol.satellite.memory import ChunkStore, KeyHistory
from skymemory.protocol.satellite.outbox import Outbox
from skymemory.protocol.satellite.overload import Lateness, Postponed
from skymemory.protocol.satellite.routing import LinkState, Router
from skymemory.protocol.wire import Address

EVICTION_POLICIES = ("lazy", "gossip", "gossip-plane", "periodic", "migration")
"""Ways to evict the rest of a dead block, which has a missing chunk (SkyMemory paper §3.9):

- ``lazy``: the client that finds the hole evicts the rest;
- ``gossip``: the evicting satellite notifies the box (``gossip-plane``: the plane that lookups use);
- ``periodic``: satellites ask each other at intervals;
- ``migration``: they ask before a handover.
"""


@dataclass(frozen=True, slots=True)
class EvictionConfig:
    """Treatment of dead blocks (by policy), pins and copies. ``confirm_s``, from a suspicion to its proof, must exceed
    a handover; ``pin_share`` is the share of memory for pins.
    """

    gossip: bool = False
    plane_only: bool = False
    periodic: bool = False
    migration: bool = False
    sweep_s: float = 30.0
    notice_hold_s: float = 0.05
    confirm_s: float = 2.0
    pin_share: float = 0.5
    replicas: int = 1

    @classmethod
    def of(cls, policies: Sequence[str], sweep_s: float = 30.0, replicas: int = 1) -> EvictionConfig:
        plane_only = "gossip-plane" in policies
        return cls(
            plane_only or "gossip" in policies,
            plane_only,
            "periodic" in policies,
            "migration" in policies,
            sweep_s,
            replicas=replicas,
        )


def parse_policies(text: str) -> tuple[str, ...]:
    """Return the names in a list such as ``lazy,gossip``; ``none`` gives no names."""
    names = tuple(dict.fromkeys(name for part in text.lower().split(",") if (name := part.strip())))
    if names == ("none",):
        return ()
    for name in names:
        if name not in EVICTION_POLICIES:
            raise InvalidInput(f"eviction {name!r}: expected one or more of {', '.join(EVICTION_POLICIES)}, or none")
    if not names:
        raise InvalidInput(f"eviction {text!r}: expected one or more of {', '.join(EVICTION_POLICIES)}, or none")
    if "gossip" in names and "gossip-plane" in names:
        raise InvalidInput("eviction: gossip notifies the whole box, gossip-plane one plane of it; choose one of them")
    return names


@dataclass(frozen=True, slots=True)
class SatelliteConfig:
    """Configuration of a satellite. ``credit_bytes`` is its receive buffer's capacity."""

    address: SatelliteId
    memory_bytes: int
    routing: RoutingMode = "greedy"
    credit_bytes: int = 1 << 20
    max_backlog_bytes: int = 64 << 20
    handover_window_bursts: int = 32
    handover_timeout_s: float = 0.1
    handover_grace_s: float = 1.0
    handover_gap_s: float = 0.002
    """Shortest time between bursts, if all can be sent (0: no pacing)."""
    replacement: str = DEFAULT_REPLACEMENT
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    neighbour_timeout_s: float = 0.05
    """Time for an answer; depends on the links' length."""
    authority: Authority | None = field(default=None, repr=False)
    """Keys whose commands it obeys; None: any command."""
    first_request_id: int = 0
    """Start of the request ids; random, so never guessed or repeated."""


class SatelliteState:
    """State of every handler. A handler sends through ``outbox``, and calls only handlers given to it."""

    def __init__(
        self, config: SatelliteConfig, sky: SkyMap, clock: MoveClock, now_s: float, lateness: Lateness | None = None
    ) -> None:
        self.config = config
        self.sky = sky
        self.here = config.address
        self.address = Address(config.address.plane, config.address.slot)
        self.lateness = lateness or Lateness()
        self.counters = Counters()
        self.store = ChunkStore(
            config.memory_bytes,
            replacement_named(config.replacement),
            pin_share=config.eviction.pin_share,
            record_evicted=config.eviction.gossip,
            counters=self.counters,
        )
        self.history = KeyHistory()
        self.locator = Locator(config.address, sky, clock, now_s)
        self.links = LinkState(sky.torus)
        self.router = Router(config.address, sky.torus, config.routing, self.links)
        self.outbox = Outbox(
            self.address, self.locator, self.router, self.counters, config.credit_bytes, config.authority
        )
        self.handover = ChunkHandover(
            config.handover_window_bursts,
            config.handover_timeout_s,
            config.handover_grace_s,
            Pacer(config.handover_gap_s, phase_of(config.address)),
            self.lateness,
            config.first_request_id,
        )
        self.postponed = Postponed()
        self.timers_wait = False

    def is_settled(self, key: bytes, indices: Iterable[int], now_s: float) -> bool:
        """Return True if these chunks are neither being handed over nor written: only then does their absence prove a
        loss.
        """
        next_move_s = self.locator.next_move_s
        if next_move_s is not None and now_s >= next_move_s:
            return False  # the box has moved and this satellite has not followed yet
        if self.timers_wait or self.postponed or self.lateness.is_late(now_s):
            return False  # a waiting packet may carry this chunk
        if self.history.is_being_written(key, now_s):
            return False  # it may not have been sent yet
        return self.handover.is_settled(key, indices)
