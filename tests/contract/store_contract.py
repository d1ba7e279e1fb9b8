"""The contract suite of every tier: subclass ``StoreContract``, name what can be asked of it, give a ``tier`` fixture.

class TestMemory(StoreContract):
    can = BUDGETED
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        yield Tier(MemoryStore(1 << 20), budget_bytes=1 << 20)
"""

from __future__ import annotations

import gc
import math
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest
from tests.contract.forked import in_child

from skymemory.errors import InvalidInput, ValueTooLarge, WrongProcess
from skymemory.kv.block import Place, places_in
from skymemory.store.base import ABANDONED_S, LEASE_S, Presence, Store

Case = TypeVar("Case", bound=Callable[..., object])


def needs(*what: str) -> Callable[[Case], Case]:
    """The case can be asked only of a store of which all of this ``can`` be asked; others do not have it."""

    def marked(case: Case) -> Case:
        vars(case)["needs"] = frozenset(what)
        return case

    return marked


BUDGETED = frozenset({"limit", "budget", "flood", "leases", "pins"})
"""A store in this process with an account of its bytes."""


@dataclass
class Tier:
    """A store under test, empty, and what it promises beyond the least."""

    store: Store
    budget_bytes: int | None = None
    """Exact byte budget, if the store has one: eviction is then checked."""
    most_bytes: int | None = None
    """The largest value that can fit, where the store has no exact budget and knows all the same."""
    pins: bool = True
    leases: bool = True
    """Loads and stores that are open hold off eviction."""
    flood_bytes: int | None = None
    """This many bytes of small values displace all that was there, where the store has no exact budget."""
    knows_absence: bool = True
    """It knows without a request that a key is absent."""
    sizes: tuple[int, ...] = (0, 1, 100, 6144, 6145, 40_000)
    """Value sizes to try."""
    supplied_by: tuple[str, ...] = ()
    """What a hit may be attributed to; empty: the store itself."""
    later: Callable[[float], object] | None = None
    """Lets this many seconds pass by the store's clock. None: it cannot be made to."""
    outage: Callable[[], AbstractContextManager[object]] | None = None
    """Within it the store gets no answers, and all is well again after it. None: its values are here."""
    another: Callable[[], Store] | None = None
    """Opens the same values once more, as another process would; it may close ``store``, which is then not used any
    more. None: no other client can have them.
    """
    settle: Callable[[], object] = lambda: None
    """Waits for what the store does after a put has returned: evictions, and that other processes see the value."""

    @property
    def can(self) -> set[str]:
        """What can be asked of it."""
        having = {
            "budget": self.budget_bytes is not None,
            "limit": self.limit_bytes is not None,
            "flood": (self.flood_bytes or self.budget_bytes) is not None,
            "leases": self.leases,
            "pins": self.pins,
            "clock": self.later is not None,
            "outage": self.outage is not None,
        }
        return {name for name, has in having.items() if has}

    @property
    def limit_bytes(self) -> int | None:
        return self.budget_bytes if self.most_bytes is None else self.most_bytes

    @contextmanager
    def asked_by_another(self) -> Iterator[Store]:
        """Another object over the same values, or where there can be none this one."""
        if self.another is None:
            yield self.store
            return
        self.settle()
        other = self.another()
        yield other
        other.close()


class Clock:
    """Seconds that pass on request."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def later(self, seconds: float) -> None:
        self.now_s += seconds


class Watched(bytearray):
    """A value that can be seen to be let go."""


def key(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


def value(number: int, size_bytes: int = 1000) -> bytes:
    return random.Random(number).randbytes(size_bytes)


def _released() -> memoryview:
    view = memoryview(b"gone")
    view.release()
    return view


def chain(blocks: int) -> tuple[list[bytes], list[Place]]:
    """The keys of a prompt, and where each stands."""
    keys = [key(number) for number in range(blocks)]
    return keys, places_in(keys, range(blocks))


class StoreContract:
    can: frozenset[str] = frozenset()
    """What of ``Tier.can`` its tier has: cases that need something else are not collected."""

    def __init_subclass__(cls) -> None:
        for name, case in vars(StoreContract).items():
            if not getattr(case, "needs", frozenset()) <= cls.can:
                setattr(cls, name, None)

    @pytest.fixture
    def tier(self) -> Tier:
        raise TypeError("a contract suite needs a tier fixture")

    @pytest.fixture
    def store(self, tier: Tier) -> Store:
        return tier.store

    def test_all_that_can_be_asked_of_it_is(self, tier: Tier) -> None:
        assert tier.can == self.can

    def test_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.name

    def test_what_was_put_is_got_in_the_order_asked(self, tier: Tier) -> None:
        items = [(key(i), value(i, size)) for i, size in enumerate(tier.sizes)]
        assert tier.store.put_many(items) == [True] * len(items)
        order = [key(i) for i in reversed(range(len(items)))]
        got = tier.store.get_many(order)
        assert [bytes(v) if v is not None else None for v in got] == [v for _, v in reversed(items)]

    def test_an_absent_key_is_a_miss_and_not_an_error(self, store: Store) -> None:
        store.put_many([(key(1), b"here")])
        got = store.get_many([key(0), key(1), key(2)])
        assert [None if v is None else bytes(v) for v in got] == [None, b"here", None]
        assert store.lookup([key(0), key(1)]) == [Presence.MISS, Presence.HIT]

    def test_nothing_asked_nothing_given(self, store: Store) -> None:
        assert store.lookup([]) == [] and store.prefix([]) == 0
        assert store.get_many([]) == [] and store.put_many([]) == [] and store.delete([]) == []

    def test_a_second_put_replaces_the_first(self, store: Store) -> None:
        store.put_many([(key(1), b"old value"), (key(2), b"other")])
        assert store.put_many([(key(1), b"new")]) == [True]
        got = store.get_many([key(1), key(2)])
        assert [bytes(v) for v in got if v is not None] == [b"new", b"other"]

    def test_a_key_may_be_asked_twice(self, store: Store) -> None:
        store.put_many([(key(1), b"twice")])
        assert [bytes(v) for v in store.get_many([key(1), key(1)]) if v is not None] == [b"twice"] * 2

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_any_bytes_may_be_put(self, store: Store, kind: type) -> None:
        assert store.put_many([(key(1), kind(b"some bytes"))]) == [True]
        assert store.get_many([key(1)]) == [b"some bytes"]

    def test_prefix_counts_the_leading_keys_with_holes_behind(self, store: Store) -> None:
        chain = [key(i) for i in range(12)]
        assert store.prefix(chain) == 0
        store.put_many([(chain[i], value(i)) for i in (0, 1, 2, 4, 5, 9)])
        assert store.prefix(chain) == 3
        assert store.prefix(chain[4:]) == 2
        assert store.prefix(chain[3:]) == 0
        store.put_many([(chain[3], value(3))])
        assert store.prefix(chain) == 6

    def test_sizes_are_known_without_loading(self, tier: Tier) -> None:
        sizes = dict(enumerate(tier.sizes))
        tier.store.put_many([(key(at), value(at, size)) for at, size in sizes.items()])
        asked = [key(at) for at in (*sizes, 1000)]
        with tier.asked_by_another() as other:
            assert other.sizes(asked) == [*sizes.values(), None]
            assert other.sizes([key(1000), key(1), key(1)]) == [None, sizes[1], sizes[1]] and other.sizes([]) == []
            with pytest.raises(InvalidInput):
                other.sizes([b"short"])

    def test_delete_says_what_was_there(self, store: Store) -> None:
        store.put_many([(key(i), value(i)) for i in range(3)])
        assert store.delete([key(1), key(7)]) == [True, False]
        assert store.lookup([key(0), key(1), key(2)]) == [Presence.HIT, Presence.MISS, Presence.HIT]
        assert store.get_many([key(1)]) == [None]
        assert store.delete([key(1)]) == [False]

    def test_the_value_put_may_change_afterwards(self, store: Store) -> None:
        mine = bytearray(value(1, 20_000))
        store.put_many([(key(1), mine)])
        mine[:] = bytes(len(mine))
        assert store.get_many([key(1)]) == [value(1, 20_000)]

    def test_a_view_is_a_snapshot(self, store: Store) -> None:
        store.put_many([(key(1), value(1, 20_000)), (key(2), value(2, 20_000))])
        (view,) = store.get_many([key(1)])
        assert view is not None and view.readonly
        store.put_many([(key(1), value(3, 20_000))])
        store.delete([key(1), key(2)])
        store.put_many([(key(n), value(n, 20_000)) for n in range(4, 8)])
        store.get_many([key(n) for n in range(4, 8)])
        assert view == value(1, 20_000)

    def test_a_load_reports_tier_bytes_and_seconds(self, tier: Tier) -> None:
        store = tier.store
        store.put_many([(key(1), value(1))])
        ticket = store.prepare_load([key(1), key(2)])
        assert ticket.report is None
        store.complete_load(ticket)
        assert ticket.report is not None
        hit, miss = ticket.report.keys
        assert hit.tier in (tier.supplied_by or (store.name,)) and hit.size_bytes == 1000 and not hit.reason
        assert not miss.tier and miss.size_bytes == 0 and miss.reason
        assert ticket.report.size_bytes == 1000 and 0 <= hit.seconds <= ticket.report.seconds + 1e-6
        store.release(ticket)
        store.release(ticket)

    def test_a_store_in_progress_is_pending(self, store: Store) -> None:
        ticket = store.prepare_store([(key(1), value(1))])
        assert store.lookup([key(1)]) == [Presence.PENDING]
        assert store.prefix([key(1)]) == 0 and store.get_many([key(1)]) == [None]
        assert store.complete_store(ticket) == [True]
        assert store.lookup([key(1)]) == [Presence.HIT]

    def test_a_ticket_is_completed_once(self, store: Store) -> None:
        load = store.prepare_load([key(1)])
        store.complete_load(load)
        with pytest.raises(InvalidInput, match="ticket"):
            store.complete_load(load)
        given_up = store.prepare_load([key(1)])
        store.release(given_up)
        with pytest.raises(InvalidInput, match="ticket"):
            store.complete_load(given_up)
        put = store.prepare_store([(key(1), b"x")])
        store.complete_store(put)
        with pytest.raises(InvalidInput, match="ticket"):
            store.complete_store(put)

    @pytest.mark.parametrize("wrong", [b"short", "text" * 8, 7, None, bytearray(32)])
    def test_a_bad_key_is_refused(self, store: Store, wrong: object) -> None:
        for call in (store.lookup, store.prefix, store.prepare_load, store.touch, store.delete):
            with pytest.raises(InvalidInput):
                call([wrong])  # type: ignore[list-item]
        with pytest.raises(InvalidInput):
            store.prepare_store([(wrong, b"")])  # type: ignore[list-item]

    def test_an_empty_view_of_any_shape_is_an_empty_value(self, store: Store) -> None:
        """As of an array without rows."""
        assert store.put_many([(key(1), memoryview(np.empty((0, 4), np.float32))), (key(2), b"2")]) == [True, True]
        assert store.get_many([key(1), key(2)]) == [b"", b"2"]

    @pytest.mark.parametrize("wrong", ["text", 5, None, memoryview(b"0123456789")[::2], _released()])
    def test_a_bad_value_is_refused(self, store: Store, wrong: object) -> None:
        with pytest.raises(InvalidInput):
            store.put_many([(key(1), wrong)])  # type: ignore[list-item]
        assert store.lookup([key(1)]) == [Presence.MISS]

    def test_estimates_are_seconds(self, tier: Tier) -> None:
        store = tier.store
        store.put_many([(key(1), value(1)), (key(2), value(2, 40_000))])
        small = store.estimate_load_s([key(1)], now_s=0.0)
        both = store.estimate_load_s([key(1), key(2)], now_s=0.0)
        assert 0 <= small <= both < math.inf
        if tier.knows_absence:
            assert store.estimate_load_s([key(1), key(3)], now_s=0.0) == math.inf

    def test_stats_are_numbers(self, store: Store) -> None:
        store.put_many([(key(1), value(1))])
        store.get_many([key(1), key(2)])
        stats = store.stats()
        assert stats and all(isinstance(name, str) and isinstance(n, int | float) for name, n in stats.items())

    def test_touch_takes_any_keys(self, store: Store) -> None:
        store.put_many([(key(1), value(1))])
        store.touch([key(1), key(9)])
        assert store.get_many([key(1)]) == [value(1)]

    def test_threads_do_not_mix_values_up(self, store: Store) -> None:
        wrong: list[object] = []

        def work(worker: int) -> None:
            try:
                for turn in range(8):
                    number = worker * 100 + turn
                    store.put_many([(key(number), value(number))])
                    if store.get_many([key(number)]) not in ([value(number)], [None]):
                        wrong.append(number)
            except Exception as error:  # an exception in a thread would go unnoticed
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_closed_is_closed(self, store: Store) -> None:
        load, put = store.prepare_load([key(1)]), store.prepare_store([(key(1), b"x")])
        with store, store:
            pass
        calls: list[Callable[[], object]] = [
            lambda: store.lookup([key(1)]),
            lambda: store.prefix([key(1)]),
            lambda: store.get_many([]),
            lambda: store.complete_load(load),
            lambda: store.put_many([]),
            lambda: store.complete_store(put),
            lambda: store.touch([key(1)]),
            lambda: store.pin([key(1)], 5.0),
            lambda: store.delete([key(1)]),
            lambda: store.estimate_load_s([key(1)], 0.0),
        ]
        for call in calls:
            with pytest.raises(InvalidInput, match="closed"):
                call()
        store.release(load)

    @pytest.mark.parametrize("look", ["lookup", "prefix", "touch", "get_many"])
    def test_what_was_looked_at_and_stored_again_is_found(self, store: Store, look: str) -> None:
        store.put_many([(key(1), b"old"), (key(2), b"other")])
        getattr(store, look)([key(1), key(2)])
        assert store.put_many([(key(1), b"newer")]) == [True]
        assert store.get_many([key(1), key(2)]) == [b"newer", b"other"]

    def test_a_key_put_or_deleted_twice_in_one_call(self, store: Store) -> None:
        assert store.put_many([(key(1), b"first"), (key(1), b"second"), (key(2), b"other")]) == [True] * 3
        assert store.get_many([key(1), key(2)]) == [b"second", b"other"]
        assert store.delete([key(1), key(1)])[0] is True
        assert store.lookup([key(1), key(1), key(2)]) == [Presence.MISS, Presence.MISS, Presence.HIT]

    def test_a_pin_is_for_a_number_of_seconds(self, store: Store) -> None:
        store.put_many([(key(1), b"x")])
        with pytest.raises(InvalidInput, match="number of seconds"):
            store.pin([key(1)], math.nan)
        assert store.pin([key(1)], math.inf) == store.pin([key(1)], -1.0) == store.pin([key(1)], 1e9)

    @needs("limit")
    def test_a_value_that_can_never_fit_is_refused_with_the_limit(self, tier: Tier) -> None:
        with pytest.raises(ValueTooLarge, match=r"budget|fit"):
            tier.store.put_many([(key(1), bytes(tier.limit_bytes + 1))])
        assert tier.store.lookup([key(1)]) == [Presence.MISS]

    @needs("budget")
    def test_the_budget_holds_and_the_oldest_goes_first(self, tier: Tier) -> None:
        size = tier.budget_bytes // 4
        for number in range(4):
            assert tier.store.put_many([(key(number), value(number, size))]) == [True]
        tier.store.get_many([key(0)])
        assert tier.store.put_many([(key(4), value(4, size))]) == [True]
        presence = tier.store.lookup([key(number) for number in range(5)])
        assert presence == [Presence.HIT, Presence.MISS, Presence.HIT, Presence.HIT, Presence.HIT]

    @needs("budget")
    def test_a_chain_loses_its_end_first(self, tier: Tier) -> None:
        size = tier.budget_bytes // 8
        chain = [key(number) for number in range(8)]
        tier.store.put_many([(k, value(i, size)) for i, k in enumerate(chain)])
        for number in range(100, 103):
            tier.store.put_many([(key(number), value(number, size))])
        tier.settle()
        left = [present is Presence.HIT for present in tier.store.lookup(chain)]
        assert left == [True] * 5 + [False] * 3
        tier.store.get_many(chain[:3])
        for number in range(103, 106):
            tier.store.put_many([(key(number), value(number, size))])
        assert tier.store.prefix(chain) == 3

    @needs("budget")
    def test_a_chain_longer_than_the_budget_keeps_its_beginning(self, tier: Tier) -> None:
        size = tier.budget_bytes // 4
        chain = [key(number) for number in range(6)]
        stored = tier.store.put_many([(k, value(i, size)) for i, k in enumerate(chain)])
        assert stored == [True] * 4 + [False] * 2
        assert tier.store.prefix(chain) == 4

    @needs("budget", "leases")
    def test_a_lease_protects_what_is_there(self, tier: Tier) -> None:
        size = tier.budget_bytes // 2
        tier.store.put_many([(key(1), value(1, size)), (key(2), value(2, size))])
        lease = tier.store.prepare_load([key(1), key(2)])
        assert tier.store.put_many([(key(3), value(3, size))]) == [False]
        assert [bytes(v) for v in tier.store.complete_load(lease) if v is not None] == [value(1, size), value(2, size)]
        assert tier.store.put_many([(key(3), value(3, size))]) == [True]

    @needs("flood", "leases")
    def test_what_a_load_has_leased_outlives_a_flood(self, tier: Tier) -> None:
        flood_bytes = tier.flood_bytes or tier.budget_bytes
        assert flood_bytes is not None
        store, size = tier.store, flood_bytes // 20
        for number in range(1, 5):
            assert store.put_many([(key(number), value(number, size))]) == [True]
        lease = store.prepare_load([key(1), key(2)])
        for number in range(10, 50):
            assert store.put_many([(key(number), value(number, size))]) == [True]
        loaded = [None if found is None else bytes(found) for found in store.complete_load(lease)]
        assert loaded == [value(1, size), value(2, size)]
        assert store.get_many([key(3), key(4)]) == [None, None], "the flood did displace what was not leased"
        store.release(lease)

    def test_a_pin_protects_until_it_is_taken_out(self, tier: Tier) -> None:
        if not tier.pins or tier.budget_bytes is None:
            assert tier.store.pin([key(9)], 10.0) == [False]
            return
        size = tier.budget_bytes // 4
        tier.store.put_many([(key(1), value(1, size))])
        assert tier.store.pin([key(1), key(9)], 1000.0) == [True, False]
        for number in range(2, 9):
            assert tier.store.put_many([(key(number), value(number, size))]) == [True]
        assert tier.store.lookup([key(1)]) == [Presence.HIT]
        assert tier.store.pin([key(1)], 0.0) == [True]
        for number in range(9, 14):
            tier.store.put_many([(key(number), value(number, size))])
        assert tier.store.lookup([key(1)]) == [Presence.MISS]

    # --- what is stored is found, whatever was asked before ---

    @pytest.mark.parametrize("placed", [True, False], ids=["placed", "unplaced"])
    def test_what_was_stored_in_several_calls_is_one_prefix_for_every_client(self, tier: Tier, placed: bool) -> None:
        """None of it has been looked up before."""
        keys, places = chain(16)
        for part in (slice(0, 5), slice(5, 11), slice(11, 16)):
            items = [(key, value(1)) for key in keys[part]]
            assert all(tier.store.put_many(items, places[part] if placed else ()))
        assert tier.store.prefix(keys) == 16 and tier.store.prefix(keys[4:]) == 12
        with tier.asked_by_another() as other:
            assert other.prefix(keys) == 16 and other.prefix(keys[4:]) == 12
            assert other.lookup(keys) == [Presence.HIT] * 16
            assert other.prefix([*keys, key(99)]) == 16

    @pytest.mark.parametrize("placed", [True, False], ids=["placed", "unplaced"])
    def test_what_goes_on_from_a_stored_prefix_is_found_with_it(self, tier: Tier, placed: bool) -> None:
        """As an engine does: it asks for what is missing, and may ask a farther tier for the end alone."""
        keys, places = chain(12)
        for blocks in (5, 12):
            missing = [at for at, one in enumerate(tier.store.lookup(keys[:blocks])) if one is Presence.MISS]
            tier.store.lookup([keys[at] for at in missing]), tier.store.prefix([keys[at] for at in missing])
            items = [(keys[at], value(at)) for at in missing]
            assert all(tier.store.put_many(items, [places[at] for at in missing] if placed else ()))
        with tier.asked_by_another() as other:
            assert other.prefix(keys) == 12

    @pytest.mark.parametrize("placed", [True, False], ids=["placed", "unplaced"])
    def test_a_tail_without_its_head_is_no_prefix_until_the_head_is_there(self, tier: Tier, placed: bool) -> None:
        keys, places = chain(10)
        for part, whole in ((slice(7, 10), 0), (slice(4, 7), 0), (slice(0, 4), 10)):
            items = [(key, value(1)) for key in keys[part]]
            assert all(tier.store.put_many(items, places[part] if placed else ()))
            assert tier.store.prefix(keys) == whole
        with tier.asked_by_another() as other:
            assert other.prefix(keys) == 10 and other.prefix(keys[7:]) == 3

    @pytest.mark.parametrize("placed", [True, False], ids=["placed", "unplaced"])
    def test_keys_in_no_order_of_a_chain_count_up_to_the_first_that_is_absent(self, tier: Tier, placed: bool) -> None:
        keys, places = chain(8)
        items = [(key, value(1)) for key in keys]
        assert all(tier.store.put_many(items, places if placed else ()))
        absent = key(99)
        for asked, whole in (
            ([absent, *keys[1:]], 0),
            ([keys[0], absent, *keys[2:]], 1),
            ([*keys[:5], absent, *keys[6:]], 5),
            ([*keys[4:], *keys[:4]], 8),
            ([keys[2], keys[1], absent, keys[3]], 2),
            ([absent] * 8, 0),
        ):
            assert tier.store.prefix(asked) == whole

    def test_to_store_again_heals_what_was_stored_without_places_or_in_others(self, tier: Tier) -> None:
        keys, places = chain(8)
        tier.store.lookup(keys[3:]), tier.store.prefix(keys[5:])
        assert all(tier.store.put_many([(key, value(1)) for key in keys[3:6]]))
        assert all(tier.store.put_many([(key, value(1)) for key in keys[6:]], places_in(keys[6:], range(2))))
        assert all(tier.store.put_many([(key, value(2)) for key in keys], places))
        assert tier.store.delete([keys[4]]) == [True]
        with tier.asked_by_another() as other:
            assert other.prefix(keys) == 4 and other.prefix(keys[5:]) == 3
            assert all(other.put_many([(keys[4], value(2))], [places[4]]))
            assert other.prefix(keys) == 8
            assert other.get_many(keys) == [value(2)] * 8

    def test_as_many_places_as_items(self, store: Store) -> None:
        keys, places = chain(2)
        with pytest.raises(InvalidInput, match="places"):
            store.put_many([(keys[0], b"x")], places)
        with pytest.raises(InvalidInput, match="place"):
            store.put_many([(keys[0], b"x")], [(0, None)])  # type: ignore[list-item]
        assert store.lookup(keys) == [Presence.MISS] * 2

    # --- a fork ---

    def test_a_forked_child_reads_right_or_must_open_its_own_and_disturbs_no_other(self, tier: Tier) -> None:
        store = tier.store
        keys, places = chain(6)
        right = [value(at) for at in range(6)]
        assert all(store.put_many(list(zip(keys, right, strict=True)), places))
        asked: list[tuple[str, Callable[[], object], object]] = [
            ("get_many", lambda: store.get_many(keys) == right, True),
            ("lookup", lambda: [one.name for one in store.lookup(keys)], ["HIT"] * 6),
            ("prefix", lambda: store.prefix(keys), 6),
            ("touch", lambda: store.touch(keys), None),
            ("put_many", lambda: store.put_many([(key(50), b"mine")]), [True]),
            ("delete", lambda: store.delete([key(51)]), [False]),
            ("stats", lambda: bool(store.stats()), True),
            ("estimate_load_s", lambda: store.estimate_load_s(keys, 0.0) >= 0, True),
        ]

        def child() -> list[str]:
            """What was neither the right answer nor the clear error."""
            wrong = []
            for turn in range(4):
                for name, ask, answer in asked:
                    try:
                        if (said := ask()) != answer:
                            wrong.append(f"{name}, turn {turn}: {said!r}")
                    except WrongProcess as error:
                        if "process" not in str(error) or "open a new one here" not in str(error):
                            wrong.append(f"{name}: {error}")
            store.close()
            return wrong

        missed: list[object] = []
        assert in_child(child, lambda: missed.extend(v is None for v in store.get_many(keys))) == []
        assert not any(missed), f"the parent missed {sum(map(bool, missed))} of {len(missed)}"
        assert store.get_many(keys) == right and store.prefix(keys) == 6
        assert store.put_many([(key(60), b"after")]) == [True] and store.delete([key(60)]) == [True]

    # --- promises ---

    def fill(self, tier: Tier, values: int) -> list[bytes]:
        """A budget full of values of one size, or where there is none as many small ones; their keys."""
        size = (tier.budget_bytes or values * 1000) // values
        for number in range(values):
            assert tier.store.put_many([(key(number), value(number, size))]) == [True]
        return [key(number) for number in range(values)]

    @needs("limit")
    def test_a_batch_with_a_value_that_can_never_fit_evicts_nothing(self, tier: Tier) -> None:
        keys = self.fill(tier, 8)
        too_large = bytes(tier.limit_bytes + 1)
        for batch in ([(key(50), b"small"), (key(51), too_large)], [(key(51), too_large), (key(50), bytes(50_000))]):
            with pytest.raises(ValueTooLarge):
                tier.store.put_many(batch)
            assert tier.store.lookup(keys) == [Presence.HIT] * 8
            assert tier.store.lookup([key(50), key(51)]) == [Presence.MISS] * 2

    @needs("budget", "pins")
    def test_a_value_that_does_not_fit_beside_pins_evicts_nothing(self, tier: Tier) -> None:
        keys = self.fill(tier, 8)
        assert tier.store.pin(keys[:4], 1000.0) == [True] * 4
        assert tier.store.put_many([(key(50), bytes(tier.budget_bytes // 8 * 5))]) == [False]
        assert tier.store.lookup(keys) == [Presence.HIT] * 8
        assert tier.store.put_many([(key(50), bytes(tier.budget_bytes // 8 * 4))]) == [True]
        assert tier.store.lookup(keys) == [Presence.HIT] * 4 + [Presence.MISS] * 4

    @needs("budget")
    def test_room_that_is_set_aside_is_not_given_twice(self, tier: Tier) -> None:
        tickets = [tier.store.prepare_store([(key(n), value(n, tier.budget_bytes // 10 * 6))]) for n in (1, 2)]
        assert [tier.store.complete_store(ticket) for ticket in tickets] == [[True], [False]]
        assert tier.store.lookup([key(1), key(2)]) == [Presence.HIT, Presence.MISS]

    @needs("budget", "pins")
    def test_a_large_value_under_a_pinned_key_pins_no_more_than_may_be_pinned(self, tier: Tier) -> None:
        tier.store.put_many([(key(1), b"small")])
        assert tier.store.pin([key(1)], 1000.0) == [True]
        assert tier.store.put_many([(key(1), bytes(tier.budget_bytes // 10 * 9))]) == [True]
        assert tier.store.put_many([(key(2), bytes(tier.budget_bytes // 2))]) == [True], "half of it cannot be pinned"

    @needs("clock")
    def test_a_store_never_completed_ends_with_its_lease(self, tier: Tier) -> None:
        size = (tier.budget_bytes or 40_000) // 2
        ticket = tier.store.prepare_store([(key(1), value(1, size))])
        assert tier.store.lookup([key(1)]) == [Presence.PENDING]
        tier.later(LEASE_S + 1)
        assert tier.store.lookup([key(1)]) == [Presence.MISS]
        assert tier.store.put_many([(key(2), value(2, size)), (key(3), value(3, size))]) == [True, True]
        (stored,) = tier.store.complete_store(ticket)
        assert tier.store.lookup([key(1)]) == [Presence.HIT if stored else Presence.MISS]

    @needs("clock")
    def test_uncompleted_tickets_are_released_in_the_end(self, tier: Tier) -> None:
        values = [Watched(value(number)) for number in range(3)]
        alive = [weakref.ref(one) for one in values]
        for number, one in enumerate(values):
            tier.store.prepare_store([(key(number), one)])
        loads = [tier.store.prepare_load([key(7), key(8)]) for _ in range(3)]
        del values, one
        tier.later(LEASE_S + ABANDONED_S + 1)
        assert tier.store.put_many([(key(9), b"another")]) == [True]
        tier.store.get_many([key(9)])
        del loads
        gc.collect()
        assert [one() for one in alive] == [None] * 3

    @needs("outage")
    def test_nothing_is_lost_by_looking_for_it_in_an_outage(self, tier: Tier) -> None:
        tier.store.put_many([(key(1), value(1)), (key(2), value(2))])
        with tier.outage():
            ticket = tier.store.prepare_load([key(1)])
            assert tier.store.complete_load(ticket) == [None]
            assert ticket.report is not None and ticket.report.keys[0].reason not in (None, "absent")
            tier.store.touch([key(1), key(2)])
            tier.store.lookup([key(2)])
        assert tier.store.get_many([key(1), key(2)]) == [value(1), value(2)]

    @needs("outage")
    def test_what_is_put_again_in_vain_is_there_as_before(self, tier: Tier) -> None:
        """Asked by another object: the one that puts has not looked any of it up."""
        items = [(key(number), value(number, 40_000)) for number in range(3)]
        assert all(tier.store.put_many(items))
        with tier.outage():
            assert not any(tier.store.put_many(items))
        with tier.asked_by_another() as other:
            assert other.get_many([key(number) for number in range(3)]) == [one for _, one in items]

    @needs("outage")
    def test_an_unconfirmed_deletion_is_not_reported_as_one(self, tier: Tier) -> None:
        tier.store.put_many([(key(1), value(1)), (key(2), value(2))])
        with tier.outage():
            assert tier.store.delete([key(1)]) == [None]
        first, second = tier.store.delete([key(1), key(2)])
        assert first is not None, "it may have been heard, though not answered"
        assert second and tier.store.get_many([key(1), key(2)]) == [None, None]
