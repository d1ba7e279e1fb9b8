"""All that a satellite does about blocks that are dead, kept or to be forgotten; one thing to call for its machine."""

from __future__ import annotations

import math
from collections.abc import Callable

from skymemory.constellation.torus import SatelliteId
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves
from skymemory.protocol.clock import SkyMap
from skymemory.protocol.messages import MAX_KEYS_PER_PACKET, Packet
from skymemory.protocol.satellite.config import SatelliteConfig
from skymemory.protocol.satellite.gossip import Notices
from skymemory.protocol.satellite.handover import Burst, Handover
from skymemory.protocol.satellite.locator import Whereabouts
from skymemory.protocol.satellite.memory import ChunkStore, names_by_tag, told_by
from skymemory.protocol.satellite.outbox import Departures
from skymemory.protocol.satellite.repair import ANSWER_S, Checks, Mending, Settled
from skymemory.protocol.satellite.retention import Retention
from skymemory.protocol.satellite.sweep import Completeness, Proofs
from skymemory.protocol.satellite.tombstones import Dead, Latecomers, setting_of
from skymemory.protocol.wire import Address, Op

_SWEEP_PAGES = 8
_MOST_HELD_BACK = 1 << 14
_DISTANCES = (1, 2, 4, 8)
"""Which other servers of a key are asked before it is handed over: so many further in its ring."""


class Forgetting:
    """Gossip, sweeps, the look before a handover, pins and expiries of one satellite."""

    def __init__(
        self,
        satellite: SatelliteConfig,
        store: ChunkStore,
        whereabouts: Whereabouts,
        sky: SkyMap,
        departures: Departures,
        counters: Counters,
        handover: Handover,
        settled: Settled,
        latecomers: Latecomers,
        now_s: float,
    ) -> None:
        self._here = here = satellite.address
        self._config = config = satellite.eviction
        self._store = store
        self._whereabouts = whereabouts
        self._counters = counters
        self._handover = handover
        self.retention = Retention(store, departures, counters, config.pin_share, latecomers)
        self._checks = checks = Checks(store, whereabouts, departures, counters, settled)
        proofs = Proofs(here, config.replicas, whereabouts, sky, checks)
        self._notices = Notices(
            here,
            config,
            store,
            whereabouts,
            sky,
            departures,
            counters,
            checks,
            proofs,
            latecomers,
            lambda: 0 if handover.at_rest else 1,
            now_s,
        )
        self._completeness = Completeness(
            here, config, store, whereabouts, sky, departures, counters, checks, proofs, self._purge
        )
        self._mending = Mending(
            here, config.replicas, config.sweep_s, store, whereabouts, checks, handover, counters, now_s
        )
        self._sweep_s = now_s + config.sweep_s if config.periodic else math.inf
        self._sweeps = 0
        self._swept_to = b""
        self._swept_moves = whereabouts.moves
        self._held_back: dict[Dead, Moves] = {}
        """Settings that were held back from a handover under suspicion, and at which moves: the first to be forgotten
        first.
        """
        self.handlers: dict[Op, Callable[[Packet, float], None]] = {
            Op.NOTICE: self._notices.receive,
            Op.RETAIN: self.retention.receive,
            Op.RETAINED: self.retention.answered,
            Op.UNSUPPORTED: self.retention.unsupported,
            Op.PRESENCE: self._presence,
            Op.CHECK: checks.receive,
            Op.CHECKED: self._checked,
        }

    def next_timer_s(self) -> float | None:
        parts = self.retention, self._completeness, self._mending
        due_s = min(self._notices.due_s, self._sweep_s, *(part.next_s for part in parts))
        return due_s if due_s < math.inf else None

    def handle_timer(self, now_s: float) -> None:
        self._notices.send_due(now_s)
        self.retention.handle_timer(now_s)
        self._completeness.handle_timer(now_s)
        self._mending.handle_timer(now_s)
        if now_s >= self._sweep_s:
            self._sweep_s = now_s + self._config.sweep_s
            self._sweep(now_s)

    def gather(self, now_s: float) -> None:
        """Packets were taken: something may have been evicted for them."""
        self._notices.gather(now_s)

    def stored(self, key: bytes) -> None:
        """A writer stored the key anew: what was said of its end is void."""
        self.retention.stored(key)
        self._checks.stored(key)

    # --- around a handover ---

    def box_moved(self, now_s: float) -> None:
        """The box has moved by one step (or more): ask whether what must leave is whole, before it is handed over."""
        moves, before = self._whereabouts.moves, self._whereabouts.before
        if not self._config.migration or abs(moves[0] - before[0]) + abs(moves[1] - before[1]) != 1:
            return
        leaving = [
            name[0]
            for tag, names in names_by_tag(self._store.shares).items()
            if self._whereabouts.home_of_tag(tag) != self._here
            for name in names
        ]
        for distance in _DISTANCES:
            self._completeness.look_at(dict.fromkeys(leaving), distance, now_s, before)
        if self._completeness.asking:
            self._handover.fresh_from_s = now_s + ANSWER_S

    def _presence(self, packet: Packet, now_s: float) -> None:
        self._completeness.answered(packet, now_s)
        self._heard()

    def _checked(self, packet: Packet, now_s: float) -> None:
        self._checks.answered(packet, now_s)
        self._heard()

    def _heard(self) -> None:
        if not self._completeness.asking:
            self._handover.fresh_from_s = 0.0

    def to_send(self, burst: Burst, now_s: float) -> None:
        """Take out of a burst what looks dead: it is looked at again when that is settled, and leaves unless it has
        been proved.
        """
        if self._completeness.next_s == math.inf or not burst.names:
            return
        key = burst.names[0][0]
        share = self._store.shares.get(key)
        if share and self._completeness.suspects(key) and self._hold_back((key, setting_of(share[told_by(share)][0]))):
            waiting = list(burst.names)
            for name in waiting:
                self._handover.stray(name, now_s + 2 * self._config.confirm_s)
            self._handover.forget(burst, waiting)

    def _hold_back(self, suspected: Dead) -> bool:
        """Whether to: each setting at one count of moves only. What is held back is late at its place, so looks dead
        from there at the next move; held back again, it would never follow a box that moves as often as that.
        """
        moves = self._held_back.setdefault(suspected, self._whereabouts.moves)
        while len(self._held_back) > _MOST_HELD_BACK:
            del self._held_back[next(iter(self._held_back))]
        return moves == self._whereabouts.moves

    def handed_over(self, there: Address, key: bytes, now_s: float) -> None:
        """Chunks of this key arrived there."""
        self.retention.handed_over(SatelliteId(there.plane, there.slot), key, now_s)

    # --- sweeps ---

    def _sweep(self, now_s: float) -> None:
        """Look at the next so many keys, at a distance that doubles with each round over all of them."""
        still = self._whereabouts.moves == self._swept_moves and self._handover.at_rest
        self._swept_moves = self._whereabouts.moves
        if not still:
            return
        keys = self._store.keys_after(self._swept_to, _SWEEP_PAGES * MAX_KEYS_PER_PACKET)
        left = self._completeness.look_at(keys, 1 << self._sweeps % 10, now_s)
        done = [key for key in keys if not left or key < left[0]]
        self._swept_to = done[-1] if done and (left or len(keys) == _SWEEP_PAGES * MAX_KEYS_PER_PACKET) else b""
        self._sweeps += not self._swept_to

    def _purge(self, dead: list[Dead], now_s: float) -> None:
        self._notices.purge(dead, now_s)
        self._notices.tell_ground(dead, now_s)
