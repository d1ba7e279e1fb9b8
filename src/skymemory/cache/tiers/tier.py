"""Tier of a hierarchy: a store whose calls have deadlines, whose failures are misses, and that can be skipped.

The life of a call:

1. ``usable``: a tier with an open breaker, or an unanswered given-up call, is skipped.
2. ``start`` passes the call to a thread of the tier.
3. ``result_by`` waits for ``deadline_s``: that of the settings, or less if computing is sooner (``cache.patience``).
   - In time: the result; its latency is recorded.
   - A failure (``TIER_FAILURES``) or an invalid answer: None; the breaker counts it.
   - Too late: None; the call is given up, and the tier skipped until the answer, whose latency is recorded. Without an
     answer by the settings' deadline the breaker opens.
4. A background probe checks a tier with an open breaker.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, TypeVar

from skymemory.cache.blocks import TIER_FAILURES
from skymemory.cache.patience import Latencies, patience_s
from skymemory.cache.tiers.workers import TierWorkers, WorkerCall
from skymemory.circuit_breaker import BreakerConfig, CircuitBreaker
from skymemory.kv.block import Place
from skymemory.metrics import Counters
from skymemory.pacing import Backoff
from skymemory.reasons import UNANSWERED
from skymemory.store.base import AtOnce, KeyLocks, LoadTicket, Presence, Store, keeps

_log = logging.getLogger(__name__)

_DELETED_AT_ONCE = 1024
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 30.0
_DIRTY_KEYS_LIMIT = 1 << 18  # limit of about 30 MB
_BACKLOG_LIMIT = 1 << 16  # limit of about 15 MB of keys, or 190 GB of 3 MB blocks

Result = TypeVar("Result")
Kind = Literal["ask", "load", "store"]


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Settings of calls to a tier; deadlines are upper bounds."""

    local: bool = False
    """True to call it in the caller's thread, without a deadline."""
    ask_deadline_s: float = 0.5
    """Deadline of lookups, leases, pins and deletions."""
    load_deadline_s: float = 5.0
    store_deadline_s: float = 10.0
    threads: int = 2
    """A given-up call occupies its thread until it ends."""
    verify: Callable[[bytes, memoryview], bool] | None = None
    """Check of a value (for blocks: ``kv.value.is_sound_block``). An invalid value is deleted."""
    breaker: BreakerConfig = field(default_factory=BreakerConfig)


class Tier:
    """Wrapper of ``store`` as tier ``number`` (0 is the nearest)."""

    def __init__(
        self,
        store: Store,
        settings: TierSettings,
        number: int,
        locks: KeyLocks,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self.name = store.name
        self.settings = settings
        self.number = number
        self.clock = clock
        self.dirty_keys = DirtyKeys(_DIRTY_KEYS_LIMIT)  # keys whose value here may be outdated
        self.backlog = Backlog(_BACKLOG_LIMIT)  # blocks to be stored here later
        self.backlog_retry = Backoff(_FIRST_RETRY_S, _LAST_RETRY_S)
        self.counters = counters
        self.breaker = CircuitBreaker(settings.breaker)
        self.mean_value_bytes = 1e6  # moving average over the loaded values
        # The store, if it can answer without blocking.
        self.at_once = store if isinstance(store, AtOnce) and not settings.local else None
        self._locks = locks
        self._workers = TierWorkers(store.name, settings.threads)
        self._lock = threading.Lock()
        self._logged_closed = True
        self._probe_key: bytes | None = None  # to load in probes
        self._delete_retry = Backoff(_FIRST_RETRY_S, _LAST_RETRY_S)
        # Given-up calls, with the time at which each counts as hanging.
        self._overdue: dict[WorkerCall[object], float] = {}
        self._latencies: dict[Kind, Latencies] = {"ask": Latencies(), "load": Latencies(), "store": Latencies()}

    # --- calls ---

    def usable(self, keys: Sequence[bytes]) -> bool:
        """Return True if it may be called; else it is probed."""
        if keys and self._probe_key is None:
            self._probe_key = keys[0]
        if self._overdue:
            now_s = self.clock()
            with self._lock:
                hanging = [call for call, until_s in self._overdue.items() if until_s <= now_s]
                for call in hanging:
                    del self._overdue[call]
                if hanging:
                    self.breaker.timed_out(now_s)
            self._log_state()
        if not self.breaker.closed:
            self.probe_if_due()
        return self.breaker.closed and not self._overdue

    def deadline_s(self, kind: Kind, size_bytes: int = 0) -> float:
        return min(self._longest_s(kind), patience_s(self._latencies[kind], size_bytes))

    def _longest_s(self, kind: Kind) -> float:
        if kind == "ask":
            return self.settings.ask_deadline_s
        return self.settings.load_deadline_s if kind == "load" else self.settings.store_deadline_s

    def start(self, work: Callable[[], Result]) -> WorkerCall[Result] | None:
        """Pass ``work`` to a thread, or run it if local. None: too many calls wait."""
        call = WorkerCall(work)
        call.started_s = self.clock()
        if self.settings.local:
            call.run()
        elif not self._workers.submit(call):  # type: ignore[arg-type]
            self.failed()
            return None
        return call

    def result_by(
        self,
        call: WorkerCall[Result] | None,
        until_s: float,
        on_late: Callable[[Result | None], object] = lambda result: None,
        *,
        is_answer: Callable[[Result], bool] = lambda result: True,
        changes: Sequence[bytes] = (),
        overwrites: Sequence[bytes] = (),
        stored: Callable[[Result | None], Iterable[bytes]] = lambda result: (),
        kind: Kind = "ask",
        moved: Callable[[Result], int] = lambda result: 0,
        present_keys: Sequence[bytes] = (),
    ) -> Result | None:
        """Return the result of ``call``, if it arrives by ``until_s`` and without failure; else None.

        ``on_late`` releases what a late result holds. ``is_answer`` checks that a result is an answer. ``changes``:
        keys that the call writes or deletes, even late. ``overwrites``: those that are dirty from the deadline on,
        until a late result has ``stored`` them. ``moved``: bytes of a result. ``present_keys``: keys that the tier
        reported to have.
        """
        if call is None:
            return None
        if not self._workers.wait(call, until_s - self.clock()):
            mark = self.dirty_keys.add(overwrites)  # before it can end
            self.dirty_keys.call_given_up(changes)
            self._probe_with(present_keys)
            with self._lock:
                self._overdue[call] = call.started_s + self._longest_s(kind)  # type: ignore[index]

            def ended_late(result: Result | None) -> None:
                """Handle the end of a given-up call."""
                try:
                    on_late(result)
                except TIER_FAILURES:
                    self.counters.add("tier_failures_total", label=self.name)
                self.dirty_keys.call_ended(changes)
                self.dirty_keys.clear_since(stored(result), mark)
                with self._lock:
                    self._overdue.pop(call, None)  # type: ignore[arg-type]
                if call.dropped:
                    return  # by this tier's threads, not by the store
                if result is None or not is_answer(result):
                    with self._lock:
                        self.breaker.timed_out(self.clock())
                    self._log_state()
                else:
                    self._latencies[kind].record(self.clock() - call.started_s, moved(result))

            if call.give_up(ended_late):
                self.counters.add("tier_deadlines_total", label=self.name)
                return None
            # It ended in the meantime: treat it as in time.
            self.dirty_keys.call_ended(changes)
            self.dirty_keys.clear_since(overwrites, mark)
            with self._lock:
                self._overdue.pop(call, None)  # type: ignore[arg-type]
        if call.error is not None:
            if not isinstance(call.error, TIER_FAILURES):
                raise call.error
            self.counters.add("tier_failures_total", label=self.name)
            self._probe_with(present_keys)
            self.failed(kind)
            return None
        result = call.result
        if result is None or not is_answer(result):
            self._probe_with(present_keys)
            self.failed(kind)
        else:
            self._latencies[kind].record(self.clock() - call.started_s, moved(result))
            with self._lock:
                self.breaker.succeeded(loaded=kind == "load")
        return result

    def ask(
        self,
        work: Callable[[], Result],
        on_late: Callable[[Result | None], object] = lambda result: None,
        *,
        changes: Sequence[bytes] = (),
    ) -> Result | None:
        """Call ``start`` and ``result_by``, within the deadline of "ask"."""
        until_s = self.clock() + self.deadline_s("ask")
        return self.result_by(self.start(work), until_s, on_late, changes=changes)

    def ask_index(
        self, work: Callable[[], Result], on_late: Callable[[Result | None], object] = lambda result: None
    ) -> Result | None:
        """Call ``ask``, or ``work`` in this thread if the store does not block."""
        if self.at_once is not None:
            with self.at_once.at_once() as free:
                if free:
                    return work()
        return self.ask(work, on_late)

    def release(self, ticket: LoadTicket) -> None:
        if self.at_once is not None:
            with self.at_once.at_once() as free:
                if free:
                    self.store.release(ticket)
                    return
        self.post(lambda: self.store.release(ticket))

    def post(self, work: Callable[[], object]) -> None:
        def run_work() -> None:
            try:
                work()
            except TIER_FAILURES:
                self.counters.add("tier_failures_total", label=self.name)

        self.start(run_work)  # its end is not awaited

    def failed(self, kind: Kind = "ask") -> None:
        with self._lock:
            self.breaker.failed(self.clock(), load=kind == "load")
        self._log_state()

    def close(self) -> None:
        self._workers.close()
        try:
            self.store.close()
        except TIER_FAILURES:
            self.counters.add("tier_failures_total", label=self.name)

    # --- probes ---

    def _probe_with(self, keys: Sequence[bytes]) -> None:
        """Probe with a key of the failed load: the index may still answer for others."""
        if keys:
            self._probe_key = keys[0]

    def probe_if_due(self) -> None:
        key = self._probe_key
        with self._lock:
            is_due = key is not None and self.breaker.probe_due(self.clock())
        if is_due and key is not None:
            self.counters.add("tier_probes_total", label=self.name)
            if not self._workers.submit(WorkerCall(lambda: self._probe(key))):
                self._probed(False)

    def _probe(self, key: bytes) -> None:
        """Look up and load a key; ABSENT is an answer, too."""
        started_s = self.clock()
        try:
            self.store.lookup([key])
            ticket = self.store.prepare_load([key])
            try:
                self.store.complete_load(ticket)
                report = ticket.report
            finally:
                self.store.release(ticket)
        except TIER_FAILURES:
            self._probed(False)
            return
        answered = report is None or all(key_report.reason not in UNANSWERED for key_report in report.keys)
        self._probed(answered and self.clock() - started_s <= self.settings.load_deadline_s)

    def _probed(self, answered: bool) -> None:
        with self._lock:
            self.breaker.probed(answered, self.clock())
        self._log_state()

    def _log_state(self) -> None:
        if self._logged_closed is not self.breaker.closed:
            self._logged_closed = self.breaker.closed
            if self._logged_closed:
                _log.warning("tier %s answers again", self.name)
            else:
                _log.warning("tier %s does not answer: skipped, and probed in the background", self.name)

    # --- contents ---

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        """Return the store's answer; dirty keys are missing."""
        missing = [Presence.MISS] * len(keys)
        if not keys or not self.usable(keys):
            return missing
        presence = self.ask_index(lambda: self.store.lookup(keys))
        if presence is None or len(presence) != len(keys):
            return missing
        return [Presence.MISS if key in self.dirty_keys else state for key, state in zip(keys, presence, strict=True)]

    def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        sizes = self.ask_index(lambda: self.store.sizes(keys)) if keys and self.usable(keys) else None
        if sizes is None or len(sizes) != len(keys):
            return [None] * len(keys)
        return [None if key in self.dirty_keys else size for key, size in zip(keys, sizes, strict=True)]

    def prefix(self, keys: Sequence[bytes]) -> int:
        trusted = len(keys)  # keys before the first dirty key
        if self.dirty_keys:
            trusted = next((at for at, key in enumerate(keys) if key in self.dirty_keys), trusted)
        if not trusted or not self.usable(keys):
            return 0
        length = self.ask_index(lambda: self.store.prefix(keys[:trusted]))
        return min(max(length or 0, 0), trusted)

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Delete keys. None if unconfirmed, or if a late put may restore the key: it is dirty."""
        deleted = self.ask(lambda: self.store.delete(keys), changes=keys) if self.usable(keys) else None
        if deleted is None or len(deleted) != len(keys):
            self.dirty_keys.add(keys, deleted=True)
            return [None] * len(keys)
        unknown = {
            key
            for key, is_deleted in zip(keys, deleted, strict=True)
            if is_deleted is None or self.dirty_keys.uncertain(key)
        }
        self.dirty_keys.add(unknown, deleted=True)
        return [None if key in unknown else is_deleted for key, is_deleted in zip(keys, deleted, strict=True)]

    def delete_dirty(self) -> bool:
        """Delete values of dirty keys, with back-off; True if more are due. A later release's values stay, unless a
        caller deleted them.
        """
        if self.clock() < self._delete_retry.due_s:
            return False
        if not (keys := self.dirty_keys.to_delete(_DELETED_AT_ONCE)) or not self.usable(keys):
            return False
        with self._locks.try_lock(keys) as locked:
            mine = list(locked)
            if not mine:
                return False
            deleted = self.ask(lambda: self._delete_outdated(mine), changes=mine)
            clean = [key for key, is_deleted in zip(mine, deleted or (), strict=False) if is_deleted is not None]
            self.dirty_keys.clear(clean)
            self.counters.add("tier_doubts_settled_total", len(clean), self.name)
        if deleted is None or len(clean) == len(mine):
            self._delete_retry.on_result(True, self.clock())
            return deleted is not None and bool(self.dirty_keys)
        self._delete_retry.on_result(False, self.clock())
        return False

    def _delete_outdated(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Delete keys, except a later release's values that no caller has deleted."""
        kept_keys = {
            key
            for key, yes in zip(keys, keeps(self.store, keys), strict=True)
            if yes and not self.dirty_keys.delete_pending(key)
        }
        outdated = [key for key in keys if key not in kept_keys]
        deleted = dict(zip(outdated, self.store.delete(outdated) if outdated else (), strict=False))
        return [False if key in kept_keys else deleted.get(key) for key in keys]


# --- missed changes of a tier: keys whose copy there may be outdated, and blocks that it has yet to get ---
#
# A put of a value that may change, or a delete, that did not reach a tier (or may not have) makes its key dirty there:
# the copy is not read, not counted as present and not overwritten until it has been deleted, or until the late call has
# succeeded after all. While a given-up call is still running, a deletion would prove nothing.


class DirtyKeys:
    """Set of keys whose value in a tier may be outdated; writers must refuse while it is ``full``. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: dict[bytes, int] = {}
        self._count = 0
        self._delete_pending: set[bytes] = set()
        self._in_flight: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    @property
    def full(self) -> bool:
        return len(self._keys) >= self._limit

    def uncertain(self, key: bytes) -> bool:
        """Return True if the key is dirty, or a given-up call may change it."""
        return key in self._keys or key in self._in_flight

    def add(self, keys: Iterable[bytes], deleted: bool = False) -> int:
        """Mark keys as dirty; returns a mark for ``clear_since``. ``deleted``: a caller deleted them."""
        with self._lock:
            self._count += 1
            for key in keys:
                self._keys[key] = self._count
                if deleted:
                    self._delete_pending.add(key)
            return self._count

    def call_given_up(self, keys: Iterable[bytes]) -> None:
        """Record a given-up call that may change these keys."""
        with self._lock:
            for key in keys:
                self._in_flight[key] = self._in_flight.get(key, 0) + 1

    def call_ended(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                remaining = self._in_flight.pop(key, 0) - 1
                if remaining > 0:
                    self._in_flight[key] = remaining

    def clear_since(self, keys: Iterable[bytes], mark: int) -> None:
        """Clear these keys, except those added again since ``mark``."""
        with self._lock:
            self._clear(key for key in keys if self._keys.get(key) == mark)

    def to_delete(self, count: int) -> list[bytes]:
        """Return dirty keys that no given-up call may change."""
        with self._lock:
            chosen: list[bytes] = []
            for key in self._keys:
                if key not in self._in_flight:
                    chosen.append(key)
                if len(chosen) == count:
                    break
            return chosen

    def delete_pending(self, key: bytes) -> bool:
        return key in self._delete_pending

    def clear(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._clear(keys)

    def _clear(self, keys: Iterable[bytes]) -> None:
        for key in list(keys):
            if key not in self._in_flight:
                self._keys.pop(key, None)
                self._delete_pending.discard(key)


class Backlog:
    """Blocks stored while a tier was silent, to be copied later: the latest ``limit``, oldest first. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places: dict[bytes, Place] = {}
        self._lock = threading.Lock()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, places: dict[bytes, Place]) -> None:
        with self._lock:
            for key, place in places.items():
                self._places.setdefault(key, place)
            while len(self._places) > self._limit:
                del self._places[next(iter(self._places))]
                self.dropped += 1

    def first(self, count: int) -> dict[bytes, Place]:
        with self._lock:
            return dict(islice(self._places.items(), count))

    def discard(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._places.pop(key, None)
