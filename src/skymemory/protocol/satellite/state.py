"""State that the handlers of one satellite share: chunk memory, clock, links, outbox, counters."""

from __future__ import annotations

from collections.abc import Iterable

from skymemory.eviction import replacement_named
from skymemory.metrics import Counters
from skymemory.protocol.clock import Locator, MoveClock, SkyMap
from skymemory.protocol.satellite.config import SatelliteConfig
from skymemory.protocol.satellite.handover import Handover, Pacer, phase_of
from skymemory.protocol.satellite.memory import ChunkStore, KeyHistory
from skymemory.protocol.satellite.outbox import Outbox
from skymemory.protocol.satellite.overload import Lateness, Postponed
from skymemory.protocol.satellite.routing import LinkState, Router
from skymemory.protocol.wire import Address


class SatelliteState:
    """Given to every handler at construction. A handler acts on this state and sends through ``outbox``; it calls
    other handlers only if it was constructed with them.
    """

    def __init__(
        self, config: SatelliteConfig, sky: SkyMap, clock: MoveClock, now_s: float, lateness: Lateness | None = None
    ) -> None:
        self.config = config
        self.sky = sky
        self.here = config.address
        self.address = Address(config.address.plane, config.address.slot)
        self.lateness = lateness or Lateness()
        """Of the host, which may run several satellites."""
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
        self.handover = Handover(
            config.handover_window_bursts,
            config.handover_timeout_s,
            config.handover_grace_s,
            Pacer(config.handover_gap_s, phase_of(config.address)),
            self.lateness,
        )
        self.postponed = Postponed()
        self.timers_wait = False
        """Background timers have expired while the host was late; ``SatelliteMachine.work`` runs them."""

    def is_settled(self, key: bytes, indices: Iterable[int], now_s: float) -> bool:
        """Whether chunks ``indices`` of a key are neither being handed over nor still being written.

        Only then does their absence here count towards a proof that they are lost.
        """
        next_move_s = self.locator.next_move_s
        if next_move_s is not None and now_s >= next_move_s:
            return False  # the box has moved and this satellite has not followed yet
        if self.timers_wait or self.postponed or self.lateness.is_late(now_s):
            return False  # a packet that waits here may carry the very chunk
        if self.history.is_being_written(key, now_s):
            return False  # it may not have been sent yet
        return self.handover.is_settled(key, indices)
