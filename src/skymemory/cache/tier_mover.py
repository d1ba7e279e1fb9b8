"""The thread that moves values between tiers: write-back and demotion downwards, promotion into a slow nearest tier.

It also probes broken tiers that nobody asks, and deletes copies in doubt once their tier can be reached.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from skymemory.cache.key_guard import KeyGuard
from skymemory.cache.outbound import Moving, Outbound
from skymemory.cache.tier import Tier
from skymemory.cache.tier_writes import write
from skymemory.metrics import SharedCounters
from skymemory.store.base import Presence

_BATCH_BYTES = 16 << 20
_AGAIN_S = 0.05
_IDLE_S = 1.0


class TierMover:
    """Empties ``outbound`` into ``tiers`` until stopped."""

    def __init__(self, tiers: Sequence[Tier], outbound: Outbound, guard: KeyGuard, counters: SharedCounters) -> None:
        self._tiers = tiers
        self._outbound = outbound
        self._guard = guard
        self._counters = counters
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tier mover", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """No more moves after the one under way, which is waited for no longer than ``timeout_s``."""
        self._stopping.set()
        self._outbound.poke()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            idle_s = _AGAIN_S if any(tier.doubts or not tier.breaker.closed for tier in self._tiers) else _IDLE_S
            filled = self._outbound.wait_filled(idle_s)
            for tier in self._tiers:
                tier.probe_if_due()
                tier.settle_doubts()
            if filled and not self._stopping.is_set() and not self.move_some():
                self._stopping.wait(_AGAIN_S)

    def move_some(self) -> bool:
        """Move one batch; whether any of it is done with."""
        batch = self._outbound.first(_BATCH_BYTES)
        with self._guard.moving([moving.key for moving in batch]) as held:
            mine = [moving for moving in self._outbound.still(batch) if moving.key in held]
            done = self._write_back(mine) if mine and mine[0].dirty else self._offer(mine)
            self._outbound.arrived(done)
        self._outbound.last(batch)
        return bool(done)

    def _write_back(self, movings: list[Moving]) -> list[Moving]:
        """To all of their tiers. Done: where one took it; or none could ever, which is counted."""
        if not movings:
            return []
        keys = [moving.key for moving in movings]
        tiers = [self._tiers[number] for number in movings[0].to]
        items = [(moving.key, moving.value) for moving in movings]
        stored = {tier.number: set[bytes]() for tier in tiers}
        all_certain = True
        for tier in tiers:
            outcome, certain = write(tier, items, [moving.place for moving in movings])
            all_certain = all_certain and certain
            stored[tier.number] = {key for key, ok in zip(keys, outcome, strict=True) if ok}
        taken = set[bytes]().union(*stored.values())
        refused = set(keys) - taken if all_certain else set[bytes]()
        for tier in tiers:
            tier.doubts.add((taken | refused) - stored[tier.number])
        self._counters.add("written_back_total", len(taken))
        self._counters.add("write_back_refused_total", len(refused))
        return [moving for moving in movings if moving.key in taken or moving.key in refused]

    def _offer(self, movings: list[Moving]) -> list[Moving]:
        """To their tiers, where these lack them. All are done with: they are somewhere else, or were evicted."""
        for number in movings[0].to if movings else ():
            tier = self._tiers[number]
            keys = [moving.key for moving in movings]
            lacking = [
                moving for moving, there in zip(movings, tier.lookup(keys), strict=True) if there is not Presence.HIT
            ]
            items = [(moving.key, moving.value) for moving in lacking]
            stored = sum(write(tier, items, [moving.place for moving in lacking])[0]) if lacking else 0
            self._counters.add("moved_total", stored, tier.name)
            self._counters.add("not_moved_total", len(lacking) - stored, tier.name)
        return movings
