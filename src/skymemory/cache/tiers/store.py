"""A hierarchy of stores under the contract of one: the nearest tier that holds a key supplies it.

Every tier has its own threads, deadline and circuit breaker (``tier``): one that hangs or fails costs misses and
nothing else. A tier that a put or a delete did not reach is not believed about those keys until it has deleted its
copies (``doubts``). ``tier_mover`` does write-back and demotion behind the caller's back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from skymemory.cache.tiers.load import OUTBOUND, InFlightBudget, TieredLoad
from skymemory.cache.tiers.mover import TierMover
from skymemory.cache.tiers.outbound import Moving, Outbound
from skymemory.cache.tiers.tier import Tier, TierSettings, patience_s
from skymemory.cache.tiers.workers import KeyGuard
from skymemory.cache.tiers.write import TieredWrite, write
from skymemory.errors import InvalidInput
from skymemory.forks import Owner
from skymemory.kv.block import Place
from skymemory.metrics import SharedCounters
from skymemory.store.base import (
    LEASE_S,
    Buffer,
    Evicting,
    LoadTicket,
    OpenTickets,
    Places,
    Presence,
    Store,
    StoreTicket,
    TwoPhase,
    bring_near,
    check_items,
    check_keys,
    check_places,
    check_ttl,
)
from skymemory.store.wrappers import Sketch


class TieredStore(TwoPhase):
    """``tiers``, the nearest first, each with its settings. They are closed with it."""

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
            raise InvalidInput(f"a hierarchy needs tiers of different names (not {OUTBOUND!r}), got {names}")
        self.settings = settings or HierarchySettings()
        self._name = name
        self._clock = clock
        self._counters = SharedCounters()
        self._guard = KeyGuard()
        self._budget = InFlightBudget(self.settings.in_flight_bytes)
        self._outbound = Outbound(self.settings.outbound_bytes)
        self.tiers = [
            Tier(store, one, number, self._guard, self._counters, clock) for number, (store, one) in enumerate(tiers)
        ]
        self._sketch = Sketch()
        self._lock = Lock()
        self._loads: OpenTickets[LoadTicket] = OpenTickets()
        self._stores: OpenTickets[StoreTicket] = OpenTickets()
        self._closed = False
        self._owner = Owner(f"the {name} store")
        telling = [(tier, tier.store) for tier in self.tiers[:-1] if isinstance(tier.store, Evicting)]
        for tier, store in telling if self.settings.demote else ():
            if store.on_evict is not None:
                raise InvalidInput(f"the {tier.name} store tells somebody else of evictions: give each its own")
        for tier, store in telling if self.settings.demote else ():
            store.on_evict = self._demoting(tier)
        self._mover = TierMover(self.tiers, self._outbound, self._guard, self._counters)

    @property
    def name(self) -> str:
        return self._name

    def _demoting(self, tier: Tier) -> Callable[[bytes, bytes, Place | None], object]:
        def evicted(key: bytes, value: bytes, place: Place | None) -> None:
            moving = Moving(key, value, (tier.number + 1,), place=place)
            if key not in tier.doubts and not self._outbound.add(moving):
                self._counters.add("not_moved_total", label=self.tiers[tier.number + 1].name)

        return evicted

    # --- looking up ---

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        keys = self._check(keys)
        found = self._held(keys)
        pending = {key for ticket in self._stores.holding(self._clock()) for key, _ in ticket.items}
        return [Presence.HIT if key in found else Presence.PENDING if key in pending else Presence.MISS for key in keys]

    def prefix(self, keys: Sequence[bytes]) -> int:
        """A tier's own prefix first, for that is cheap; then only the tiers that stopped before are asked for more."""
        keys = self._check(keys)
        reached = [0] * len(self.tiers)
        for tier in self.tiers:
            reached[tier.number] = tier.prefix(keys)
            if reached[tier.number] == len(keys):
                return len(keys)
        count = max(reached)
        asked = [tier for tier in self.tiers if reached[tier.number] < count]
        if keys[count] not in self._held(keys[count : count + 1], asked):
            return count
        held = self._held(keys[count:])
        return next((at for at in range(count, len(keys)) if keys[at] not in held), len(keys))

    def _held(self, keys: Sequence[bytes], tiers: Sequence[Tier] | None = None) -> set[bytes]:
        """Those of ``keys`` that are in one of ``tiers`` (all), or on their way."""
        held = set(self._outbound.get(keys))
        for tier in self.tiers if tiers is None else tiers:
            rest = [key for key in keys if key not in held]
            held.update(key for key, one in zip(rest, tier.lookup(rest), strict=True) if one is Presence.HIT)
        return held

    # --- loading ---

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        keys = self._check(keys)
        versions = self._guard.versions(keys)
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
        self._counters.add("hits_total", sum(key in values for key in ticket.keys))
        self._counters.add("misses_total", sum(key not in values for key in ticket.keys))
        self._promote(load, values)
        if any(tier.doubts for tier in self.tiers):
            self._outbound.poke()
        return [values.get(key) for key in ticket.keys]

    def _promote(self, load: TieredLoad, values: dict[bytes, memoryview]) -> None:
        """Copy what farther tiers supplied to the nearest, unless somebody has changed it since it was leased."""
        top, policy = self.tiers[0], self.settings.promote
        far = [key for key in values if load.sources[key] != 0] if policy != "never" else []
        if policy == "second hit":
            with self._lock:
                far = [key for key in far if self._sketch.seen(key)]
        if not far or not top.breaker.closed:
            return
        with self._guard.moving(far, load.versions) as held:
            items = [(key, values[key]) for key in far if key in held and key not in top.doubts]
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
        with self._guard.changing([key for key, _ in ticket.items], patience_s(0.0)) as ours:
            stored = state.complete() if ours else set[bytes]()
        self._outbound.poke()
        self._counters.add("stored_total", len(stored))
        self._counters.add("refused_total", sum(key not in stored for key, _ in ticket.items))
        ticket.seconds = self._clock() - started_s
        return [key in stored for key, _ in ticket.items]

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is on its way between tiers; whether that came about."""
        return self._outbound.wait_empty(timeout_s)

    # --- the rest of the contract ---

    def touch(self, keys: Sequence[bytes]) -> None:
        keys = self._check(keys)
        for tier in self.tiers:
            if tier.usable(keys):
                tier.post(lambda tier=tier: tier.store.touch(keys))  # type: ignore[misc]

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        """Pinned in every tier that has it and promises; True where one does."""
        keys, ttl_s = self._check(keys), check_ttl(ttl_s)
        told = [self._ask(tier, lambda tier=tier: tier.store.pin(keys, ttl_s), keys) for tier in self.tiers]  # type: ignore[misc]
        return [any(answers) for answers in zip(*told, strict=True)]

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        """None where a tier has not confirmed it: its copy is not read here, and deleted once the tier answers."""
        keys = self._check(keys)
        with self._guard.changing(keys):
            told = [tier.delete(keys) for tier in self.tiers]
            moving = self._outbound.discard(keys)
        self._outbound.poke()
        return [
            None if None in answers else any(answers) or key in moving
            for key, *answers in zip(keys, *told, strict=True)
        ]

    def prefetch(self, keys: Sequence[bytes], at: float) -> list[bool]:
        """As near as each tier can have it; True where one will."""
        keys = self._check(keys)
        told = [self._ask(tier, lambda tier=tier: bring_near(tier.store, keys, at), keys) for tier in self.tiers]  # type: ignore[misc]
        return [any(answers) for answers in zip(*told, strict=True)]

    def _ask(self, tier: Tier, work: Callable[[], list[bool]], keys: Sequence[bytes]) -> list[bool]:
        told = tier.ask(work) if tier.usable(keys) else None
        if told is None or len(told) != len(keys):
            return [False] * len(keys)
        return [yes and key not in tier.doubts for key, yes in zip(keys, told, strict=True)]

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        """The nearest tiers' estimates, summed: an upper bound, for tiers load at once."""
        return estimate_load_s(self.tiers, self._outbound, self._check(keys), now_s)

    def stats(self) -> dict[str, int | float]:
        """Ours, and every tier's own after its name."""
        self._owner.check()
        figures: dict[str, int | float] = {
            **self._counters.as_dict(),
            "open_leases": len(self._loads) + len(self._stores),
            "outbound_bytes": self._outbound.used_bytes,
            "outbound_dropped_total": self._outbound.dropped,
            "in_flight_bytes": self._budget.taken_bytes,
            "in_flight_most_bytes": self._budget.most_bytes,
        }
        for tier in self.tiers:
            figures[f"{tier.name}_breaker_open"] = int(not tier.breaker.closed)
            figures[f"{tier.name}_breaker_opened_total"] = tier.breaker.times_opened
            figures[f"{tier.name}_keys_in_doubt"] = len(tier.doubts)
            figures[f"{tier.name}_keys_owed"] = len(tier.owed)
            figures[f"{tier.name}_owed_dropped_total"] = tier.owed.dropped
            told = None if self._closed or not tier.usable(()) else tier.ask(tier.store.stats)
            figures.update({f"{tier.name}_{name}": figure for name, figure in (told or {}).items()})
        return figures

    def close(self) -> None:
        """Write back what is left, as long as the settings say; what then remains is counted as lost."""
        if self._owner.elsewhere:  # its threads are not here
            return
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


# How a hierarchy of tiers behaves as a whole.


PROMOTIONS = ("always", "second hit", "never")


@dataclass(frozen=True, slots=True)
class HierarchySettings:
    """Rules for what moves, and bounds on what is held and waited for."""

    promote: str = "always"
    """When a value that a farther tier supplied goes to the nearest: "always", on its "second hit", "never"."""
    demote: bool = True
    """Whether what a tier evicts is offered to the next one (tiers that can tell, see ``store.base.Evicting``)."""
    write_back: bool = False
    """False: a put waits for all tiers. True: for the nearest; the others get it later, from memory."""
    load_deadline_s: float = 10.0
    """What has not come by then is a miss."""
    close_deadline_s: float = 10.0
    """How long ``close`` waits for what has not been written back. What is left is counted as lost."""
    outbound_bytes: int = 256 << 20
    """Values on their way between tiers. With no room for more, a put waits for all tiers again."""
    in_flight_bytes: int = 256 << 20
    """Expected bytes being loaded from tiers that are not local, over all threads."""

    def __post_init__(self) -> None:
        if self.promote not in PROMOTIONS:
            raise InvalidInput(f"promote={self.promote!r}: expected one of {', '.join(map(repr, PROMOTIONS))}")
        if self.outbound_bytes < 0 or self.load_deadline_s <= 0 or self.close_deadline_s < 0:
            raise InvalidInput(f"deadlines and budgets of a hierarchy must not be negative, got {self}")


# How long a load over several tiers would take: each tier says it for the keys it is the nearest for.


def estimate_load_s(tiers: Sequence[Tier], outbound: Outbound, keys: Sequence[bytes], now_s: float) -> float:
    """Seconds, summed over tiers; infinite when a key is in none. Reads no values and, as tiers do, asks nobody."""
    rest = list(dict.fromkeys(keys))
    total_s = 0.0
    for tier in tiers:
        if tier.number == 1 and rest:
            moving = outbound.get(rest)
            rest = [key for key in rest if key not in moving]
        trusted = [key for key in rest if key not in tier.doubts]
        if not trusted or not tier.usable(trusted):
            continue
        told = tier.ask(lambda tier=tier, trusted=trusted: _estimate(tier, trusted, now_s))  # type: ignore[misc]
        if told is not None:
            seconds, there = told
            total_s += seconds
            rest = [key for key in rest if key not in there]
    return math.inf if rest else total_s


def _estimate(tier: Tier, keys: list[bytes], now_s: float) -> tuple[float, set[bytes]]:
    """Of those of ``keys`` that the tier does not know to be absent."""
    if (seconds := tier.store.estimate_load_s(keys, now_s)) < math.inf:
        return seconds, set(keys)
    there = [key for key in keys if tier.store.estimate_load_s([key], now_s) < math.inf]
    return (tier.store.estimate_load_s(there, now_s) if there else 0.0), set(there)
