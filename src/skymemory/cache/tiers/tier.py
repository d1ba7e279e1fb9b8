"""One tier of a hierarchy: a store whose every call has a deadline, whose failures are misses, and that may be skipped.

Nothing here raises what a broken tier raises (``TIER_FAILURES``): that becomes a count, a step of the breaker and a
miss. Programming errors still surface.

Who could do without the tier (``cache.patience``) waits for it no longer than its word is worth: a share of that time,
or twice what such calls usually take. While a call that was given up is not answered the tier is left alone, so that a
tier that hangs is waited for once; if the answer comes the tier is used again, and what it took is usual from then on:
so a tier that is slow but sound is learnt, by one call that was given up. If none comes within the deadline of the
settings, or only that it failed, the breaker opens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal, TypeVar

from skymemory.cache.blocks import FAILING_REASONS, TIER_FAILURES
from skymemory.cache.patience import Usual, worth_s
from skymemory.cache.tiers.breaker import BreakerConfig, TierBreaker
from skymemory.cache.tiers.dirty_keys import Doubts, Owed
from skymemory.cache.tiers.workers import Call, KeyGuard, TierWorkers
from skymemory.metrics import Counters
from skymemory.store.base import Presence, Store, keeps

_log = logging.getLogger(__name__)

WORTH_SHARE = 0.1
"""Of what the caller would need without the tier, the part that may be lost by waiting for it in vain."""
TIMES_USUAL = 2.0
LEAST_PATIENCE_S = 0.02
"""A call is handed to a thread, from there to the tier, and back twice; and each time another thread may hold the
interpreter for a switch interval (5 ms). Less would measure the computer, not the tier.
"""

_SETTLED_AT_ONCE = 1024
_AGAIN_S, _AGAIN_LAST_S = 0.1, 30.0
_DOUBTS_LIMIT = 1 << 18
"""About 30 MB of keys."""
_OWED_LIMIT = 1 << 16
"""About 15 MB of keys; with blocks of 3 MB, 190 GB stored past a tier that is down."""

Result = TypeVar("Result")
Kind = Literal["ask", "load", "store"]


@dataclass(slots=True)
class Again:
    """When background work at a tier is tried again: at once where it went well, else each time after twice as long."""

    _wait_s: float = 0.0
    _at_s: float = -math.inf

    def due(self, now_s: float) -> bool:
        return now_s >= self._at_s

    def went(self, well: bool, now_s: float) -> None:
        self._wait_s = 0.0 if well else min(max(2 * self._wait_s, _AGAIN_S), _AGAIN_LAST_S)
        self._at_s = now_s + self._wait_s


@dataclass(frozen=True, slots=True)
class TierSettings:
    """How one tier is called. Deadlines are the longest: a prompt waits less where that is worth less."""

    local: bool = False
    """Called in the caller's own thread, without a deadline: for a tier in this process's memory."""
    ask_deadline_s: float = 0.5
    """For look-ups, leases, pins and deletions."""
    load_deadline_s: float = 5.0
    store_deadline_s: float = 10.0
    threads: int = 2
    """Calls to this tier at once. One that has been given up holds its thread until it ends."""
    verify: Callable[[bytes, memoryview], bool] | None = None
    """Whether these bytes are a value of this key (for blocks: ``cache.blocks.is_sound_block``). One that is not is
    deleted, and asked of the next tier; without this it might be promoted before anybody looks at it.
    """
    breaker: BreakerConfig = field(default_factory=BreakerConfig)


class Tier:
    """``store`` at place ``number`` (0 is the nearest) of the hierarchy that ``guard`` and ``counters`` belong to."""

    def __init__(
        self,
        store: Store,
        settings: TierSettings,
        number: int,
        guard: KeyGuard,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self.name = store.name
        self.settings = settings
        self.number = number
        self.clock = clock
        self.doubts = Doubts(_DOUBTS_LIMIT)
        self.owed = Owed(_OWED_LIMIT)
        self.counters = counters
        self._guard = guard
        self._workers = TierWorkers(store.name, settings.threads)
        self.breaker = TierBreaker(settings.breaker)
        self._lock = Lock()
        self._told_closed = True
        self._probe_key: bytes | None = None
        self._settling = Again()
        self.paying = Again()
        """When ``owed`` is stored."""
        self._overdue: dict[Call[object], float] = {}
        """Calls that were given up and are not answered, with the time at which they count as hanging."""
        self._usual: dict[Kind, Usual] = {"ask": Usual(), "load": Usual(), "store": Usual()}
        self.mean_value_bytes = 1e6
        """Of the values it has lately supplied: what the next ones are expected to be."""

    # --- calls ---

    def usable(self, keys: Sequence[bytes]) -> bool:
        """Whether to call it, about ``keys``. While not, it is probed now and then, and nobody waits."""
        if keys and self._probe_key is None:
            self._probe_key = keys[0]
        if self._overdue:
            now_s = self.clock()
            with self._lock:
                hanging = [call for call, until_s in self._overdue.items() if until_s <= now_s]
                for call in hanging:
                    del self._overdue[call]
                if hanging:
                    self.breaker.hung(now_s)
            self._tell()
        if not self.breaker.closed:
            self.probe_if_due()
        return self.breaker.closed and not self._overdue

    def deadline_s(self, kind: Kind, size_bytes: int = 0) -> float:
        """How long the present caller waits for a call of this kind that moves so many bytes."""
        return min(
            self._longest_s(kind), patience_s(self._usual[kind].p99_s(size_bytes) if worth_s() is not None else None)
        )

    def probe_if_due(self) -> None:
        """In the background, with a key of the last load that went wrong: its index may still say of others that they
        are absent, and only of those that it has what hangs must answer.
        """
        key = self._probe_key
        with self._lock:
            due = key is not None and self.breaker.probe_due(self.clock())
        if due and key is not None:
            self.counters.add("tier_probes_total", label=self.name)
            if not self._workers.submit(Call(lambda: self._probe(key))):
                self._probed(False)

    def start(self, work: Callable[[], Result]) -> Call[Result] | None:
        """Have ``work`` done; here and now by a local tier. None: all of its threads are held up."""
        call = Call(work)
        call.started_s = self.clock()
        if self.settings.local:
            call.run()
        elif not self._workers.submit(call):  # type: ignore[arg-type]
            self.failed()
            return None
        return call

    def end(
        self,
        call: Call[Result] | None,
        until_s: float,
        on_late: Callable[[Result | None], object] = lambda result: None,
        *,
        sound: Callable[[Result], bool] = lambda result: True,
        changes: Sequence[bytes] = (),
        outdates: Sequence[bytes] = (),
        came_right: Callable[[Result | None], Iterable[bytes]] = lambda result: (),
        kind: Kind = "ask",
        moved: Callable[[Result], int] = lambda result: 0,
        held: Sequence[bytes] = (),
    ) -> Result | None:
        """The result, if it comes by ``until_s`` and without failure; else None.

        ``on_late`` is called with what comes of a call that was given up. ``sound``: whether the tier answered at all.
        ``changes``: the keys that the call changes, now or when it lands. ``outdates``: those of them that are in doubt
        once it has been given up, until it lands with a result by which they ``came_right``. ``moved``: how many bytes
        such a result has moved. ``held``: keys that the call is about and that the tier has, by its own word.
        """
        if call is None:
            return None
        if not self._workers.wait(call, until_s - self.clock()):
            mark = self.doubts.add(outdates)  # before it can land
            self.doubts.give_up(changes)
            self._await(call, kind, held)

            def landed(result: Result | None) -> None:
                try:
                    on_late(result)
                except TIER_FAILURES:
                    self.counters.add("tier_failures_total", label=self.name)
                self.doubts.landed(changes)
                self.doubts.end(came_right(result), mark)
                with self._lock:
                    self._overdue.pop(call, None)  # type: ignore[arg-type]
                if call.dropped:
                    return  # by our own threads, not by the tier
                if result is None or not sound(result):
                    with self._lock:
                        self.breaker.hung(self.clock())
                    self._tell()
                else:
                    self._usual[kind].took(self.clock() - call.started_s, moved(result))

            if call.give_up(landed):
                self.counters.add("tier_deadlines_total", label=self.name)
                return None
            self.doubts.landed(changes)
            self.doubts.end(outdates, mark)
            with self._lock:
                self._overdue.pop(call, None)  # type: ignore[arg-type]
        if call.error is not None:
            if not isinstance(call.error, TIER_FAILURES):
                raise call.error
            self.counters.add("tier_failures_total", label=self.name)
            self._remember(held)
            self.failed()
            return None
        result = call.result
        if result is None or not sound(result):
            self._remember(held)
            self.failed()
        else:
            self._usual[kind].took(self.clock() - call.started_s, moved(result))
            with self._lock:
                self.breaker.succeeded()
        return result

    def _remember(self, held: Sequence[bytes]) -> None:
        if held:
            self._probe_key = held[0]

    def _await(self, call: Call[Result], kind: Kind, held: Sequence[bytes]) -> None:
        """Nobody waits for it any more, but the tier is left alone until it is answered, or hangs."""
        self._remember(held)
        with self._lock:
            self._overdue[call] = call.started_s + self._longest_s(kind)  # type: ignore[index]

    def _longest_s(self, kind: Kind) -> float:
        if kind == "ask":
            return self.settings.ask_deadline_s
        return self.settings.load_deadline_s if kind == "load" else self.settings.store_deadline_s

    def ask(
        self,
        work: Callable[[], Result],
        on_late: Callable[[Result | None], object] = lambda result: None,
        *,
        changes: Sequence[bytes] = (),
    ) -> Result | None:
        """``work`` within the deadline of questions."""
        until_s = self.clock() + self.deadline_s("ask")
        return self.end(self.start(work), until_s, on_late, changes=changes)

    def post(self, work: Callable[[], object]) -> None:
        """Have ``work`` done some time; nobody waits for it."""

        def counted() -> None:
            try:
                work()
            except TIER_FAILURES:
                self.counters.add("tier_failures_total", label=self.name)

        self.start(counted)

    def failed(self) -> None:
        with self._lock:
            self.breaker.failed(self.clock())
        self._tell()

    def _probe(self, key: bytes) -> None:
        """A look-up and a load of one key, whose results are not used: what is absent is an answer, too."""
        started_s = self.clock()
        try:
            self.store.lookup([key])
            ticket = self.store.prepare_load([key])
            self.store.complete_load(ticket)
            report = ticket.report
            self.store.release(ticket)
        except TIER_FAILURES:
            self._probed(False)
            return
        answered = report is None or all(told.reason not in FAILING_REASONS for told in report.keys)
        self._probed(answered and self.clock() - started_s <= self.settings.load_deadline_s)

    def _probed(self, answered: bool) -> None:
        with self._lock:
            self.breaker.probed(answered, self.clock())
        self._tell()

    def _tell(self) -> None:
        """A log has a line for each time that the tier goes or comes back."""
        if self._told_closed is not self.breaker.closed:
            self._told_closed = self.breaker.closed
            if self._told_closed:
                _log.warning("the tier %s answers again", self.name)
            else:
                _log.warning("the tier %s does not answer: it is left out, and asked again now and then", self.name)

    # --- what is there ---

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        """As the store says, but for copies in doubt; all missing where it does not answer."""
        missing = [Presence.MISS] * len(keys)
        if not keys or not self.usable(keys):
            return missing
        told = self.ask(lambda: self.store.lookup(keys))
        if told is None or len(told) != len(keys):
            return missing
        return [Presence.MISS if key in self.doubts else one for key, one in zip(keys, told, strict=True)]

    def prefix(self, keys: Sequence[bytes]) -> int:
        trusted = len(keys)
        if self.doubts:
            trusted = next((at for at, key in enumerate(keys) if key in self.doubts), trusted)
        if not trusted or not self.usable(keys):
            return 0
        told = self.ask(lambda: self.store.prefix(keys[:trusted]))
        return min(max(told or 0, 0), trusted)

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        """What it did not hear of, or did not confirm, is in doubt from now on; so is what a put that was given up may
        bring back.
        """
        told = self.ask(lambda: self.store.delete(keys), changes=keys) if self.usable(keys) else None
        if told is None or len(told) != len(keys):
            self.doubts.add(keys, deleted=True)
            return [None] * len(keys)
        unknown = {key for key, gone in zip(keys, told, strict=True) if gone is None or self.doubts.unsettled(key)}
        self.doubts.add(unknown, deleted=True)
        return [None if key in unknown else gone for key, gone in zip(keys, told, strict=True)]

    def settle_doubts(self) -> bool:
        """Delete copies in doubt; whether there is more to do that can be done now. What cannot be deleted is tried
        again after a while, and each time after twice that. What the tier keeps for a later release stays, unless
        a caller's deletion of it is outstanding.
        """
        if not self._settling.due(self.clock()):
            return False
        if not (keys := self.doubts.to_delete(_SETTLED_AT_ONCE)) or not self.usable(keys):
            return False
        with self._guard.moving(keys) as held:
            mine = list(held)
            if not mine:
                return False
            told = self.ask(lambda: self._delete_outdated(mine), changes=mine)
            settled = [key for key, gone in zip(mine, told or (), strict=False) if gone is not None]
            self.doubts.settle(settled)
            self.counters.add("tier_doubts_settled_total", len(settled), self.name)
        if told is None or len(settled) == len(mine):
            self._settling.went(True, self.clock())
            return told is not None and bool(self.doubts)
        self._settling.went(False, self.clock())
        return False

    def _delete_outdated(self, keys: Sequence[bytes]) -> list[bool | None]:
        kept = {
            key for key, yes in zip(keys, keeps(self.store, keys), strict=True) if yes and not self.doubts.deleted(key)
        }
        outdated = [key for key in keys if key not in kept]
        told = dict(zip(outdated, self.store.delete(outdated) if outdated else (), strict=False))
        return [False if key in kept else told.get(key) for key in keys]

    def close(self) -> None:
        self._workers.close()
        try:
            self.store.close()
        except TIER_FAILURES:
            self.counters.add("tier_failures_total", label=self.name)


def patience_s(usual_s: float | None) -> float:
    """How long the present caller waits for what usually takes so long; infinite where it has not said what for."""
    needs_s = worth_s()
    if needs_s is None:
        return math.inf
    return max(WORTH_SHARE * needs_s, TIMES_USUAL * (usual_s or 0.0), LEAST_PATIENCE_S)
