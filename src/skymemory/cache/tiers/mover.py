"""The thread that moves values between tiers: write-back and demotion downwards, promotion into a slow nearest tier.

It also probes broken tiers that nobody asks, and once their tier can be reached deletes copies in doubt and stores
blocks that the tier missed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from skymemory.cache.tiers.outbound import Moving, Outbound
from skymemory.cache.tiers.tier import Tier
from skymemory.cache.tiers.workers import KeyGuard
from skymemory.cache.tiers.write import note_missed, write
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
        wait_s = 0.0
        while not self._stopping.is_set():
            busy = any(tier.doubts or tier.owed or not tier.breaker.closed for tier in self._tiers)
            idle_s = _AGAIN_S if busy else _IDLE_S
            filled = self._outbound.wait_filled(idle_s)
            for tier in self._tiers:
                tier.probe_if_due()
                tier.settle_doubts()
                if tier.owed and tier.paying.due(tier.clock()) and tier.usable(()) and not self._stopping.is_set():
                    self._pay(tier)
            if filled and not self._stopping.is_set():
                wait_s = 0.0 if self.move_some() else min(max(2 * wait_s, _AGAIN_S), _IDLE_S)
                self._stopping.wait(wait_s)

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
        places = {moving.key: moving.place for moving in movings}
        stored = {tier.number: set[bytes]() for tier in tiers}
        pending, refused_by = dict(stored), dict(stored)
        refused = set(keys)
        for tier in tiers:
            outcome, one = write(tier, items, list(places.values()))
            refused &= one.refused
            stored[tier.number] = {key for key, ok in zip(keys, outcome, strict=True) if ok}
            pending[tier.number] = one.pending
            refused_by[tier.number] = one.refused
        taken = set[bytes]().union(*stored.values())
        refused -= taken
        for tier in tiers:
            missed = (taken | refused) - stored[tier.number]
            note_missed(tier, missed, places, pending[tier.number], refused_by[tier.number])
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
            done, _ = write(tier, items, [moving.place for moving in lacking], copies=True)
            stored = sum(done)
            self._counters.add("moved_total", stored, tier.name)
            self._counters.add("not_moved_total", len(lacking) - stored, tier.name)
        return movings

    def _pay(self, tier: Tier) -> None:
        """Some of what ``tier`` missed while it did not answer, as far as another tier still has it. What it does not
        take now, and does not refuse by its own word, goes to the end of the row.
        """
        owed = tier.owed.first(max(1, int(_BATCH_BYTES / self._tiers[0].mean_value_bytes)))
        with self._guard.moving(owed) as held:
            keys = [key for key in owed if key in held]
            there = tier.lookup(keys)
            lacking = [key for key, presence in zip(keys, there, strict=True) if presence is not Presence.HIT]
            values, left = self._copies(lacking, tier)
            done: list[bool] = []
            if values:
                done, one = write(tier, list(values.items()), [owed[key] for key in values], copies=True)
                left |= {key for key, ok in zip(values, done, strict=True) if not ok} - one.refused
                self._counters.add("tier_paid_total", sum(done), tier.name)
            tier.owed.discard(keys)
            tier.owed.add({key: owed[key] for key in keys if key in left})
            tier.paying.went(not left or any(done), tier.clock())

    def _copies(self, keys: Sequence[bytes], lacking: Tier) -> tuple[dict[bytes, bytes], set[bytes]]:
        """Those of ``keys`` that are on their way, or in another tier than the ``lacking`` one, the nearest first; and
        those of which a tier that does not answer may have a copy.
        """
        found = {key: moving.value for key, moving in self._outbound.get(keys).items()}
        silent = False
        for tier in self._tiers:
            rest = [key for key in keys if key not in found]
            if rest and tier is not lacking:
                copies = _read(tier, rest)
                silent = silent or copies is None
                found.update(copies or {})
        return {key: found[key] for key in keys if key in found}, {key for key in keys if silent and key not in found}


def _read(tier: Tier, keys: Sequence[bytes]) -> dict[bytes, bytes] | None:
    """Copies of those of ``keys`` that the tier has; None where it does not answer."""
    wanted = [key for key in keys if key not in tier.doubts]
    if not wanted:
        return {}
    if not tier.usable(wanted):
        return None

    def work() -> list[bytes | None]:
        ticket = tier.store.prepare_load(wanted)
        copies = [None if value is None else bytes(value) for value in tier.store.complete_load(ticket)]
        tier.store.release(ticket)
        return copies

    until_s = tier.clock() + tier.deadline_s("load", int(len(wanted) * tier.mean_value_bytes))
    values = tier.end(tier.start(work), until_s, kind="load")
    if values is None:
        return None
    verify = tier.settings.verify
    return {
        key: value
        for key, value in zip(wanted, values, strict=False)
        if value is not None and (verify is None or verify(key, memoryview(value)))
    }
