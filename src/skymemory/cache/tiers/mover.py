"""Background thread of a hierarchy: probes, deletions of dirty keys, backlogs, and copies from the outbound queue."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from skymemory.cache.tiers.outbound import Moving, Outbound
from skymemory.cache.tiers.tier import Backlog, Tier
from skymemory.cache.tiers.write import note_missed, write
from skymemory.kv.block import Place
from skymemory.metrics import SharedCounters
from skymemory.pacing import Backoff
from skymemory.store.base import KeyLocks, Presence

_BATCH_BYTES, _BATCH_BLOCKS = 16 << 20, 256
_AGAIN_S = 0.05
_IDLE_S = 1.0


class TierMover:
    def __init__(self, tiers: Sequence[Tier], outbound: Outbound, locks: KeyLocks, counters: SharedCounters) -> None:
        self._tiers = tiers
        self._outbound = outbound
        self._locks = locks
        self._counters = counters
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tier mover", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stopping.set()
        self._outbound.wake()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        """Probe tiers, delete dirty keys, store backlogs, move queued values."""
        unmoved = Backoff(_AGAIN_S, _IDLE_S)
        while not self._stopping.is_set():
            busy = any(tier.dirty_keys or tier.backlog or not tier.breaker.closed for tier in self._tiers)
            idle_s = _AGAIN_S if busy else _IDLE_S
            filled = self._outbound.wait_filled(idle_s)
            for tier in self._tiers:
                tier.probe_if_due()
                tier.delete_dirty()
                is_due = tier.backlog and tier.clock() >= tier.backlog_retry.due_s
                if is_due and tier.usable(()) and not self._stopping.is_set():
                    self._store_backlog(tier)
            if filled and not self._stopping.is_set():
                if self.move_batch():
                    unmoved.failures = 0
                else:
                    self._stopping.wait(unmoved.next_s())

    def move_batch(self) -> bool:
        """Move some queued values to their tiers; False on failure."""
        batch = self._outbound.next_batch(_BATCH_BYTES)
        with self._locks.try_lock([moving.key for moving in batch]) as locked:
            mine = [moving for moving in self._outbound.still_queued(batch) if moving.key in locked]
            done = self._write_back(mine) if mine and mine[0].dirty else self._copy(mine)
            self._outbound.done(done)
        self._outbound.requeue(batch)
        return bool(done)

    def _write_back(self, movings: list[Moving]) -> list[Moving]:
        """Store values in all their tiers; returns those that a tier took or all refused."""
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
            outcome, tier_write = write(tier, items, list(places.values()))
            refused &= tier_write.refused
            stored[tier.number] = {key for key, ok in zip(keys, outcome, strict=True) if ok}
            pending[tier.number] = tier_write.pending
            refused_by[tier.number] = tier_write.refused
        written = set[bytes]().union(*stored.values())
        refused -= written
        for tier in tiers:
            missed = (written | refused) - stored[tier.number]
            note_missed(tier, missed, places, pending[tier.number], refused_by[tier.number])
        self._counters.add("written_back_total", len(written))
        self._counters.add("write_back_refused_total", len(refused))
        return [moving for moving in movings if moving.key in written or moving.key in refused]

    def _copy(self, movings: list[Moving]) -> list[Moving]:
        """Store values in tiers that lack them. All are done, as losing a copy loses no data."""
        for number in movings[0].to if movings else ():
            tier = self._tiers[number]
            keys = [moving.key for moving in movings]
            missing = [
                moving for moving, state in zip(movings, tier.lookup(keys), strict=True) if state is not Presence.HIT
            ]
            items = [(moving.key, moving.value) for moving in missing]
            done, _ = write(tier, items, [moving.place for moving in missing], copies=True)
            stored = sum(done)
            self._counters.add("moved_total", stored, tier.name)
            self._counters.add("not_moved_total", len(missing) - stored, tier.name)
        return movings

    def _store_backlog(self, tier: Tier) -> None:
        """Store blocks that ``tier`` missed, from other tiers. Blocks neither taken nor refused stay in its backlog."""
        backlog = self._batch_of(tier.backlog)
        done: list[bool] = []
        with self._locks.try_lock(backlog) as locked:
            keys = [key for key in backlog if key in locked]
            presence = tier.lookup(keys)
            missing = [key for key, state in zip(keys, presence, strict=True) if state is not Presence.HIT]
            values, unstored = self._copies(missing, tier)
            if values:
                done, tier_write = write(tier, list(values.items()), [backlog[key] for key in values], copies=True)
                unstored |= {key for key, ok in zip(values, done, strict=True) if not ok} - tier_write.refused
                self._counters.add("tier_paid_total", sum(done), tier.name)
            tier.backlog.discard(keys)
            tier.backlog.add({key: backlog[key] for key in keys if key in unstored})
            tier.backlog_retry.on_result(not unstored or any(done), tier.clock())
        if any(done) and tier.backlog:
            self._outbound.wake()  # go on at once

    def _batch_of(self, backlog: Backlog) -> dict[bytes, Place]:
        """Return a backlog's oldest blocks, up to ``_BATCH_BYTES`` or a single one."""
        nearest, places = self._tiers[0], backlog.first(_BATCH_BLOCKS)
        keys: list[bytes] = []
        size_bytes = 0.0
        for key, known_bytes in zip(places, nearest.sizes(list(places)), strict=True):
            size_bytes += nearest.mean_value_bytes if known_bytes is None else known_bytes
            if keys and size_bytes > _BATCH_BYTES:
                break
            keys.append(key)
        return {key: places[key] for key in keys}

    def _copies(self, keys: Sequence[bytes], target: Tier) -> tuple[dict[bytes, bytes], set[bytes]]:
        """Return values from the queue or other tiers, and the keys that a silent tier may have."""
        values = {key: moving.value for key, moving in self._outbound.get(keys).items()}
        unanswered = False
        for tier in self._tiers:
            remaining = [key for key in keys if key not in values]
            if remaining and tier is not target:
                read = _read(tier, remaining)
                unanswered = unanswered or read is None
                values.update(read or {})
        return {key: values[key] for key in keys if key in values}, {
            key for key in keys if unanswered and key not in values
        }


def _read(tier: Tier, keys: Sequence[bytes]) -> dict[bytes, bytes] | None:
    """Return copies of values in a tier, if it answers."""
    wanted = [key for key in keys if key not in tier.dirty_keys]
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
    values = tier.result_by(tier.start(work), until_s, kind="load")
    if values is None:
        return None
    verify = tier.settings.verify
    return {
        key: value
        for key, value in zip(wanted, values, strict=False)
        if value is not None and (verify is None or verify(key, memoryview(value)))
    }
