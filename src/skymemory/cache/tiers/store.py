"""Hierarchy of stores with the contract of a single store: the nearest tier that holds a key supplies it.

A failing tier costs only misses (``tier``). A key that a put or delete did not reach is ignored there until deleted
(``tier.DirtyKeys``). ``mover`` writes back, demotes and repairs in a thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from skymemory.cache.patience import patience_s
from skymemory.cache.tiers.load import OUTBOUND, InFlightBudget, TieredLoad
from skymemory.cache.tiers.mover import TierMover
from skymemory.cache.tiers.outbound import Moving, Outbound
from skymemory.cache.tiers.tier import Tier, TierSettings
from skymemory.cache.tiers.write import TieredWrite, write
from skymemory.errors import InvalidInput
from skymemory.forks import Owner
from skymemory.kv.block import Place
from skymemory.metrics import SharedCounters
from skymemory.store.base import (
    LEASE_S,
    Buffer,
    Evicting,
    KeyLocks,
    LoadTicket,
    OpenTickets,
    Places,
    Presence,
    Shared,
    Store,
    StoreTicket,
    TwoPhase,
    bring_near,
    check_items,
    check_keys,
    check_places,
    check_ttl,
)
from skymemory.store.named_values import Listing, NamedValue, unwrap_store
from skymemory.store.wrappers import Sketch

PROMOTIONS = ("always", "second hit", "never")
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class HierarchySettings:
    promote: str = "always"  # or "second hit", "never"
    """Promotion of a farther tier's values to the nearest."""
    demote: bool = True
    """True to offer evicted values to the next tier."""
    write_back: bool = False
    """False: a put waits for all tiers. True: for the nearest; the others get it later, from memory."""
    load_deadline_s: float = 10.0
    close_deadline_s: float = 10.0
    """Time for write-back; the remainder counts as lost."""
    outbound_bytes: int = 256 << 20
    """Limit of moving values. At the limit a put waits for all tiers."""
    in_flight_bytes: int = 256 << 20
    """Limit of the bytes being loaded from remote tiers."""

    def __post_init__(self) -> None:
        if self.promote not in PROMOTIONS:
            raise InvalidInput(f"promote={self.promote!r}: expected one of {', '.join(map(repr, PROMOTIONS))}")
        if self.outbound_bytes < 0 or self.load_deadline_s <= 0 or self.close_deadline_s < 0:
            raise InvalidInput(f"outbound_bytes and close_deadline_s must be >= 0 and load_deadline_s > 0, got {self}")


class TieredStore(TwoPhase):
    """Store of ``tiers``, the nearest first, which it closes."""

    def __init__(
        self,
        tiers: Sequence[tuple[Store, TierSettings]],
        settings: HierarchySettings | None = None,
        *,
        name: str = "tiers",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        names = [store.name for store, _ in tiers]
        if not tiers or len(set(names)) < len(names) or OUTBOUND in names:
            raise InvalidInput(
                f"a hierarchy needs at least one tier, with different names (none {OUTBOUND!r}), got {names}"
            )
        self.settings = settings or HierarchySettings()
        self._name = name
        self._clock = clock
        self._counters = SharedCounters()
        self._locks = KeyLocks()
        self._budget = InFlightBudget(self.settings.in_flight_bytes)
        self._outbound = Outbound(self.settings.outbound_bytes)
        self.tiers = [
            Tier(store, tier_settings, number, self._locks, self._counters, clock)
            for number, (store, tier_settings) in enumerate(tiers)
        ]
        self._sketch = Sketch()  # keys loaded before, to promote at the second hit
        self._lock = Lock()
        self._loads: OpenTickets[LoadTicket] = OpenTickets()
        self._stores: OpenTickets[StoreTicket] = OpenTickets()
        self._closed = False
        self._owner = Owner(f"the {name} store")
        evicting = [(tier, tier.store) for tier in self.tiers[:-1] if isinstance(tier.store, Evicting)]
        for tier, store in evicting if self.settings.demote else ():
            if store.on_evict is not None:
                raise InvalidInput(
                    f"the {tier.name} store reports evictions to another hierarchy: give each hierarchy its own store"
                )
        for tier, store in evicting if self.settings.demote else ():
            store.on_evict = self._demoting(tier)
        nearest = self.tiers[0].store
        self._shared = nearest if len(self.tiers) > 1 and isinstance(nearest, Shared) else None
        self._mover = TierMover(self.tiers, self._outbound, self._locks, self._counters)
        if self._shared is not None:
            self._shared.below = self

    @property
    def name(self) -> str:
        return self._name

    def _demoting(self, tier: Tier) -> Callable[[bytes, bytes, Place | None], object]:
        def evicted(key: bytes, value: bytes, place: Place | None) -> None:
            moving = Moving(key, value, (tier.number + 1,), place=place)
            if key not in tier.dirty_keys and not self._outbound.add(moving):
                self._counters.add("not_moved_total", label=self.tiers[tier.number + 1].name)

        return evicted

    # --- lookup ---

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        keys = self._check(keys)
        held_keys = self._find_held_keys(keys)
        pending = {key for ticket in self._stores.holding(self._clock()) for key, _ in ticket.items}
        return [
            Presence.HIT if key in held_keys else Presence.PENDING if key in pending else Presence.MISS for key in keys
        ]

    def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        keys = self._check(keys)
        sizes_by_key: dict[bytes, int] = {key: len(moving.value) for key, moving in self._outbound.get(keys).items()}
        for tier in self.tiers:
            remaining = [key for key in keys if key not in sizes_by_key]
            sizes_by_key.update(
                {key: size for key, size in zip(remaining, tier.sizes(remaining), strict=True) if size is not None}
            )
        return [sizes_by_key.get(key) for key in keys]

    @property
    def leases(self) -> bool:
        """True only if all tiers lease and are never given up."""
        return all(tier.store.leases and tier.settings.local for tier in self.tiers)

    def prefix(self, keys: Sequence[bytes]) -> int:
        """Return the prefix: each tier's own first (cheap), then all tiers together."""
        keys = self._check(keys)
        reached = [0] * len(self.tiers)
        for tier in self.tiers:
            reached[tier.number] = tier.prefix(keys)
            if reached[tier.number] == len(keys):
                return len(keys)
        count = max(reached)
        shorter = [tier for tier in self.tiers if reached[tier.number] < count]
        if keys[count] not in self._find_held_keys(keys[count : count + 1], shorter):
            return count
        held_keys = self._find_held_keys(keys[count:])
        return next((at for at in range(count, len(keys)) if keys[at] not in held_keys), len(keys))

    def _find_held_keys(self, keys: Sequence[bytes], tiers: Sequence[Tier] | None = None) -> set[bytes]:
        """Return the keys that a tier has, or that are moving."""
        held_keys = set(self._outbound.get(keys))
        for tier in self.tiers if tiers is None else tiers:
            remaining = [key for key in keys if key not in held_keys]
            held_keys.update(
                key for key, state in zip(remaining, tier.lookup(remaining), strict=True) if state is Presence.HIT
            )
        return held_keys

    # --- loading ---

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        keys = self._check(keys)
        versions = self._locks.versions(keys)
        load = TieredLoad(keys, self.tiers, self._outbound, versions)
        ticket = LoadTicket(keys, self._clock() + LEASE_S, state=load)
        self._loads.add(ticket, self._clock())
        return ticket

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        self._check(())
        self._loads.take(ticket)
        load = ticket.state
        if not isinstance(load, TieredLoad):
            raise InvalidInput("this load ticket is not open: its state is gone")
        values, ticket.report = load.complete(self._budget, self.settings.load_deadline_s)
        views = [values.get(key) for key in ticket.keys]
        misses = views.count(None)
        self._counters.add("hits_total", len(views) - misses)
        self._counters.add("misses_total", misses)
        self._promote(load, values)
        if any(tier.dirty_keys for tier in self.tiers):
            self._outbound.wake()
        return views

    def fill_nearest(self, keys: Sequence[bytes]) -> None:
        """Copy farther tiers' values into the nearest, for processes that read there."""
        ticket = self.prepare_load(keys)
        try:
            self._loads.take(ticket)
            assert isinstance(ticket.state, TieredLoad)
            values, _ = ticket.state.complete(self._budget, self.settings.load_deadline_s)
            self._promote(ticket.state, values, "always")
        finally:
            self.release(ticket)

    def on_nearest_stored(self, places: Mapping[bytes, Place]) -> None:
        """Store blocks that another process has stored in the nearest tier in the farther tiers, later."""
        for tier in self.tiers[1:]:  # read from the nearest tier then; if evicted before, they are moving already
            tier.backlog.add(dict(places))
        self._outbound.wake()

    def _promote(self, load: TieredLoad, values: dict[bytes, memoryview], policy: str | None = None) -> None:
        """Copy farther tiers' values to the nearest, as ``policy`` or ``promote`` says."""
        top, policy = self.tiers[0], policy or self.settings.promote
        far = [key for key in values if load.sources[key] != 0] if policy != "never" else []
        if policy == "second hit":
            with self._lock:
                far = [key for key in far if self._sketch.check_and_add(key)]
        if not far or not top.breaker.closed:
            return
        with self._locks.try_lock(far, load.versions) as locked:
            items = [(key, values[key]) for key in far if key in locked and key not in top.dirty_keys]
            if top.settings.local:
                promoted = sum(write(top, items, copies=True)[0])
            else:
                promoted = sum(self._outbound.add(Moving(key, bytes(value), (0,))) for key, value in items)
        self._counters.add("promoted_total", promoted)

    def release(self, ticket: LoadTicket) -> None:
        self._loads.discard(ticket)
        load, ticket.state = ticket.state, None
        if isinstance(load, TieredLoad):
            load.release()

    # --- storing ---

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        items = check_items(items)
        self._check(())
        places = check_places(items, places)
        state = TieredWrite(items, places, self.tiers, self._outbound, self.settings.write_back)
        ticket = StoreTicket(items, self._clock() + LEASE_S, state=state, places=places)
        self._stores.add(ticket, self._clock())
        return ticket

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        self._check(())
        self._stores.take(ticket)
        state, ticket.state = ticket.state, None
        if not isinstance(state, TieredWrite):
            raise InvalidInput("this store ticket is not open: its state is gone")
        started_s = self._clock()
        if ticket.expires_s < started_s:
            return [False] * len(ticket.items)
        with self._locks.exclusive([key for key, _ in ticket.items], patience_s()) as ours:
            stored = state.complete() if ours else set[bytes]()
        if self._shared is not None and self.tiers[0].dirty_keys:
            self.tiers[0].delete_dirty()  # now: other processes do not know which they are
        self._outbound.wake()
        self._counters.add("stored_total", len(stored))
        self._counters.add("refused_total", sum(key not in stored for key, _ in ticket.items))
        ticket.seconds = self._clock() - started_s
        if any(key not in stored for key, _ in ticket.items):
            ticket.reason = state.reason
        return [key in stored for key, _ in ticket.items]

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is moving, or owed to a tier that answers; False on timeout."""
        until_s = time.monotonic() + timeout_s
        while self._outbound.wait_empty(until_s - time.monotonic()):
            if not any(tier.backlog and tier.usable(()) for tier in self.tiers):
                return True
            if time.monotonic() >= until_s:
                return False
            time.sleep(_LOOK_S)
        return False

    # --- pins, deletion, prefetch, figures ---

    def touch(self, keys: Sequence[bytes]) -> None:
        keys = self._check(keys)
        for tier in self.tiers:
            if tier.usable(keys):
                tier.post(lambda tier=tier: tier.store.touch(keys))  # type: ignore[misc]

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        keys, ttl_s = self._check(keys), check_ttl(ttl_s)
        pinned = [self._ask(tier, lambda tier=tier: tier.store.pin(keys, ttl_s), keys) for tier in self.tiers]  # type: ignore[misc]
        return [any(by_tier) for by_tier in zip(*pinned, strict=True)]

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Delete keys. None if a tier has not confirmed: its copy is not read, and deleted later."""
        keys = self._check(keys)
        with self._locks.exclusive(keys):
            deleted = [tier.delete(keys) for tier in self.tiers]
            moving = self._outbound.discard(keys)
        self._outbound.wake()
        return [
            None if None in by_tier else any(by_tier) or key in moving
            for key, *by_tier in zip(keys, *deleted, strict=True)
        ]

    def prefetch(self, keys: Sequence[bytes], at: float) -> list[bool]:
        keys = self._check(keys)
        near = [self._ask(tier, lambda tier=tier: bring_near(tier.store, keys, at), keys) for tier in self.tiers]  # type: ignore[misc]
        return [any(by_tier) for by_tier in zip(*near, strict=True)]

    def names(self) -> list[NamedValue]:
        """Return the names in any tier. InvalidInput if a tier cannot list them."""
        self._check(())
        by_name: dict[str, NamedValue] = {}
        for tier in self.tiers:
            if not isinstance(store := unwrap_store(tier.store), Listing):
                raise InvalidInput(f"the {tier.name} tier cannot list names: a constellation, memory and disk can")
            for value in store.names():
                if value.key not in tier.dirty_keys:
                    by_name.setdefault(value.name, value)
        return [by_name[name] for name in sorted(by_name)]

    def _ask(self, tier: Tier, work: Callable[[], list[bool]], keys: Sequence[bytes]) -> list[bool]:
        answers = tier.ask(work) if tier.usable(keys) else None
        if answers is None or len(answers) != len(keys):
            return [False] * len(keys)
        return [yes and key not in tier.dirty_keys for key, yes in zip(keys, answers, strict=True)]

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        """Estimate the sum over tiers, an upper bound; infinite if a key is in none."""
        remaining = list(dict.fromkeys(self._check(keys)))
        total_s = 0.0
        for tier in self.tiers:
            if tier.number == 1 and remaining:
                moving = self._outbound.get(remaining)
                remaining = [key for key in remaining if key not in moving]
            trusted = [key for key in remaining if key not in tier.dirty_keys]
            if not trusted or not tier.usable(trusted):
                continue
            estimate = tier.ask_index(lambda tier=tier, trusted=trusted: _estimate(tier, trusted, now_s))  # type: ignore[misc]
            if estimate is not None:
                seconds, held_keys = estimate
                total_s += seconds
                remaining = [key for key in remaining if key not in held_keys]
        return math.inf if remaining else total_s

    def stats(self) -> dict[str, int | float]:
        self._owner.check()
        figures: dict[str, int | float] = {
            **self._counters.as_dict(),
            "open_leases": len(self._loads) + len(self._stores),
            "outbound_bytes": self._outbound.used_bytes,
            "outbound_dropped_total": self._outbound.dropped,
            "in_flight_bytes": self._budget.bytes.used_bytes,
            "in_flight_most_bytes": self._budget.bytes.most_bytes,
        }
        for tier in self.tiers:
            figures[f"{tier.name}_breaker_open"] = int(not tier.breaker.closed)
            figures[f"{tier.name}_breaker_opened_total"] = tier.breaker.times_opened
            figures[f"{tier.name}_keys_in_doubt"] = len(tier.dirty_keys)
            figures[f"{tier.name}_keys_owed"] = len(tier.backlog)
            figures[f"{tier.name}_owed_dropped_total"] = tier.backlog.dropped
            stats = None if self._closed or not tier.usable(()) else tier.ask(tier.store.stats)
            figures.update({f"{tier.name}_{name}": figure for name, figure in (stats or {}).items()})
        return figures

    def close(self) -> None:
        """Write back for up to ``close_deadline_s``; the remainder counts as lost."""
        if self._owner.elsewhere:  # its threads run in the parent process
            return
        if self._shared is not None:
            self._shared.end_sharing()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.flush(self.settings.close_deadline_s)
        self._mover.stop(self.settings.close_deadline_s)
        lost = self._outbound.dirty()
        self._counters.add("write_back_lost_total", len(lost))
        self._counters.add("write_back_lost_bytes_total", sum(len(moving.value) for moving in lost))
        for tier in self.tiers:
            if isinstance(tier.store, Evicting):
                tier.store.on_evict = None
            tier.close()

    def _check(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        self._owner.check()
        if self._closed:
            raise InvalidInput(f"the {self._name} store is closed: open a new one")
        return check_keys(keys)


def _estimate(tier: Tier, keys: list[bytes], now_s: float) -> tuple[float, set[bytes]]:
    if (seconds := tier.store.estimate_load_s(keys, now_s)) < math.inf:
        return seconds, set(keys)
    held_keys = [key for key in keys if tier.store.estimate_load_s([key], now_s) < math.inf]
    return (tier.store.estimate_load_s(held_keys, now_s) if held_keys else 0.0), set(held_keys)
