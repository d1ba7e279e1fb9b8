"""Write admission and quotas: the contract behind them, and what they refuse; pins and expiry of the constellation."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.store_contract import BUDGETED, Clock, StoreContract, Tier
from tests.store.conftest import cut_off, simulated, store_over, udp_store

from skymemory.errors import InvalidInput, ValueTooLarge
from skymemory.store.base import LEASE_S, Presence
from skymemory.store.memory import MemoryStore
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.wrappers import AdmittingStore, Sketch, TenantStore
from skymemory.testbed.open_store import open_store

KEYS = [random.Random(number).randbytes(32) for number in range(40)]


class Everything(Sketch):
    def check_and_add(self, key: bytes) -> bool:
        return True


class TestBehindAdmission(StoreContract):
    can = BUDGETED | {"clock"}

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        clock = Clock()
        store = AdmittingStore(MemoryStore(256_000, clock=clock), Everything())
        yield Tier(store, budget_bytes=256_000, later=clock.later)
        store.close()


class TestBehindAQuota(StoreContract):
    can = BUDGETED | {"clock"}

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        clock = Clock()
        store = TenantStore(MemoryStore(256_000, clock=clock), "a", 1 << 30, clock=clock)
        yield Tier(store, budget_bytes=256_000, later=clock.later)
        store.close()


def test_what_a_tenant_has_leased_or_pinned_does_not_go_for_its_quota() -> None:
    clock = Clock()
    tenant = TenantStore(MemoryStore(clock=clock), "a", 10_000, clock=clock)
    keys, others = KEYS[:4], KEYS[10:40]
    assert tenant.put_many([(key, bytes(1000)) for key in keys]) == [True] * 4
    assert tenant.pin(keys[:1], 100.0) == [True]
    leased, given_up = tenant.prepare_load(keys[1:2]), tenant.prepare_load(keys[2:3])
    tenant.release(given_up)
    assert all(tenant.put_many([(key, bytes(1000))]) == [True] for key in others)
    assert tenant.lookup(keys) == [Presence.HIT] * 2 + [Presence.MISS] * 2 and tenant.used_bytes == 10_000
    assert tenant.put_many([(KEYS[5], bytes(8500))]) == [False], "there is room for 8,000 beside them"
    assert tenant.lookup(others[-8:]) == [Presence.HIT] * 8
    assert tenant.complete_load(leased) == [bytes(1000)]
    assert tenant.put_many([(KEYS[5], bytes(8500))]) == [True]
    assert tenant.lookup(keys[:2]) == [Presence.HIT, Presence.MISS] and tenant.used_bytes == 9500
    assert tenant.put_many([(keys[0], bytes(500))]) == [True], "a pin is gone with the value that it was of"
    assert tenant.put_many([(KEYS[6], bytes(10_000))]) == [True] and tenant.used_bytes == 10_000


def test_a_tenants_leases_and_pins_end_by_themselves() -> None:
    clock = Clock()
    tenant = TenantStore(MemoryStore(clock=clock), "a", 10_000, clock=clock)
    assert tenant.put_many([(key, bytes(5000)) for key in KEYS[:2]]) == [True] * 2
    assert tenant.pin(KEYS[:1], 20.0) == [True]
    tenant.prepare_load(KEYS[1:2])  # by a client that died
    assert tenant.put_many([(KEYS[5], bytes(5000))]) == [False]
    clock.later(21.0)
    assert tenant.put_many([(KEYS[5], bytes(5000))]) == [True]
    assert tenant.lookup(KEYS[:2]) == [Presence.MISS, Presence.HIT]
    clock.later(LEASE_S)
    assert tenant.put_many([(KEYS[6], bytes(10_000))]) == [True] and tenant.used_bytes == 10_000


def test_uncompleted_loads_of_a_tenant_are_not_kept() -> None:
    clock = Clock()
    tenant = TenantStore(MemoryStore(clock=clock), "a", 10_000, clock=clock)
    for _ in range(20):
        tenant.prepare_load(KEYS[:2])
        clock.later(LEASE_S / 2)
    assert len(tenant._leases) <= 3, "by one that only reads"


def test_the_second_sighting_stores() -> None:
    store = AdmittingStore(MemoryStore())
    shared, once = KEYS[:3], KEYS[3:6]
    assert store.put_many([(key, b"v") for key in shared + once[:1]]) == [False] * 4
    assert store.put_many([(key, b"v") for key in shared + once[1:2]]) == [True] * 3 + [False]
    assert store.lookup([*shared, *once]) == [Presence.HIT] * 3 + [Presence.MISS] * 3
    assert store.stats()["writes_not_admitted"] == 5
    assert store.put_many([(shared[0], b"new")]) == [True] and bytes(store.get_many(shared[:1])[0] or b"") == b"new"


def test_what_is_there_already_is_written_over_at_its_first_offer() -> None:
    """Else the old value would be what is read."""
    behind, one = MemoryStore(), bytes(range(32))
    behind.put_many([(one, b"old")])
    assert AdmittingStore(behind).put_many([(one, b"new")]) == [True] and behind.get_many([one]) == [b"new"]


def test_a_sketch_forgets_in_time_and_seldom_errs() -> None:
    sketch = Sketch(1000)
    fresh = [random.Random(number).randbytes(32) for number in range(10_000, 14_000)]
    assert sum(sketch.check_and_add(key) for key in fresh[:1000]) < 10
    assert all(sketch.check_and_add(key) for key in fresh[:1000])
    wrong = sum(sketch.check_and_add(key) for key in fresh[1000:3500])
    assert wrong < 40
    assert sum(sketch.check_and_add(key) for key in fresh[:500]) < 40, "2,500 later they are forgotten"


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "get", "delete"]),
            st.sampled_from("ab"),
            st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
            st.integers(1, 60),
        ),
        max_size=40,
    )
)
def test_a_tenant_over_its_quota_evicts_only_its_own_oldest(steps) -> None:
    """Against a naive twin: an ordered dictionary of sizes per tenant."""
    memory = MemoryStore(1 << 20)
    tenants = {name: TenantStore(memory, name, 100) for name in "ab"}
    naive: dict[str, OrderedDict[bytes, int]] = {name: OrderedDict() for name in "ab"}
    for verb, name, numbers, size in steps:
        keys = [KEYS[number + (20 if name == "b" else 0)] for number in numbers]
        own = naive[name]
        if verb == "put":
            fits = min(len(keys), 100 // size)
            chosen = keys[:fits]
            while own and sum(s for k, s in own.items() if k not in chosen) + fits * size > 100:
                del own[next(k for k in own if k not in chosen)]
            assert tenants[name].put_many([(key, bytes(size)) for key in keys]) == [True] * fits + [False] * (
                len(keys) - fits
            )
            for key in reversed(chosen):
                own.pop(key, None)
                own[key] = size
        elif verb == "get":
            got = tenants[name].get_many(keys)
            assert [value is not None for value in got] == [key in own for key in keys]
            for key in reversed(keys):
                if key in own:
                    own.move_to_end(key)
        else:
            tenants[name].delete(keys)
            for key in keys:
                own.pop(key, None)
        for who, store in tenants.items():
            assert store.used_bytes == sum(naive[who].values()) <= 100
        held = {key for key, there in zip(KEYS, memory.lookup(KEYS), strict=True) if there is Presence.HIT}
        assert held == naive["a"].keys() | naive["b"].keys()


def test_a_quota_holds_over_the_constellation_and_other_tenants_do_not_notice() -> None:
    sky = simulated()
    store = store_over(sky, index=SharedIndex())
    noisy, quiet = TenantStore(store, "noisy", 50_000), TenantStore(store, "quiet", 50_000)
    assert quiet.put_many([(KEYS[30], bytes(20_000))]) == [True]
    for key in KEYS[:20]:
        assert noisy.put_many([(key, bytes(10_000))]) == [True]
    assert noisy.lookup(KEYS[:20]) == [Presence.MISS] * 15 + [Presence.HIT] * 5
    assert quiet.lookup([KEYS[30]]) == [Presence.HIT] and quiet.get_many([KEYS[30]]) == [bytes(20_000)]
    used = sum(machine.store.used_bytes for machine in sky.satellites.values())
    assert 70_000 <= used <= 72_000 + 72 * 20
    assert noisy.stats()["evicted_for_quota{noisy}"] == 15


def test_stores_are_opened_with_rules() -> None:
    store = open_store("memory://1MiB?admit=second&tenant=a&quota=1KiB")
    assert isinstance(store, AdmittingStore) and isinstance(store.store, TenantStore)
    assert store.store.quota_bytes == 1024
    for wrong in ("admit=third", "quota=1KiB", "tenant=a", "tenant=a&quota=none", "admitt=second"):
        with pytest.raises(InvalidInput):
            open_store(f"memory://1MiB?{wrong}")


def crowd(store, first: int, count: int, size: int) -> None:  # type: ignore[no-untyped-def]
    """Each is read once, as what it is to displace was: else a policy that counts uses spares the latter."""
    for number in range(count):
        key = random.Random(first + number).randbytes(32)
        store.put_many([(key, bytes(size))])
        store.get_many([key])


@pytest.mark.brief("udp")
@pytest.mark.parametrize("kind", ["simulated", "udp"])
def test_pin_and_expire_report_the_truth(kind: str) -> None:
    """Over virtual time, and over real sockets and processes' clocks."""
    with udp_store(SharedIndex()) if kind == "udp" else _simulated_store() as store:
        keys, value = KEYS[:4], bytes(400_000)
        assert store.put_many([(key, value) for key in keys]) == [True] * 4
        assert store.pin([keys[0], KEYS[9]], 1000.0) == [True, False]
        assert store.expire(keys[1:2], 0.3) == [True]
        crowd(store, 1000, 40, 3_000_000)
        got = store.get_many(keys)
        assert [None if one is None else bytes(one) for one in got] == [value, None, None, None]
        assert store.pin(keys[:1], 0.0) == [True]
        crowd(store, 2000, 40, 3_000_000)
        assert store.get_many(keys[:1]) == [None]


def test_a_pin_over_the_budget_leaves_nothing_pinned() -> None:
    with _simulated_store() as store:
        big = [(key, bytes(15_000_000)) for key in KEYS[:4]]
        assert store.put_many(big) == [True] * 4
        assert store.pin(KEYS[:4], 100.0) == [True, True, False, False]
        machines = store._driver._constellation.satellites.values()
        assert sum(machine.housekeeping()["pinned_bytes"] for machine in machines) < 31_000_000


def test_a_pin_that_one_satellite_refuses_is_taken_out_of_the_others() -> None:
    sky = simulated(memory_bytes=400_000)
    store = store_over(sky, index=SharedIndex())
    small = [(key, bytes(6144)) for key in KEYS[:32]]
    assert store.put_many([*small, (KEYS[32], bytes(20 * 6144))]) == [True] * 33
    assert store.pin(KEYS[:32], 100.0) == [True] * 32, "on the satellite of each one's only chunk"
    pinned = {here: machine.housekeeping()["pinned_bytes"] for here, machine in sky.satellites.items()}
    assert store.pin([KEYS[32]], 100.0) == [False]
    assert {here: machine.housekeeping()["pinned_bytes"] for here, machine in sky.satellites.items()} == pinned


def _simulated_store():  # type: ignore[no-untyped-def]
    from contextlib import closing

    return closing(store_over(simulated(), index=SharedIndex()))


def test_a_read_in_an_outage_does_not_double_a_quota() -> None:
    sky = simulated()
    tenant = TenantStore(store_over(sky, index=SharedIndex()), "a", 50_000)
    keys = KEYS[:5]
    assert tenant.put_many([(key, bytes(10_000)) for key in keys]) == [True] * 5
    with cut_off(sky):
        assert tenant.get_many(keys) == [None] * 5
    assert tenant.used_bytes == 50_000, "what did not come is there all the same"
    for key in KEYS[10:15]:
        assert tenant.put_many([(key, bytes(10_000))]) == [True]
    assert tenant.lookup(keys) == [Presence.MISS] * 5 and tenant.lookup(KEYS[10:15]) == [Presence.HIT] * 5


def test_a_quota_counts_what_it_could_not_delete() -> None:
    sky = simulated()
    store = store_over(sky, index=SharedIndex())
    tenant = TenantStore(store, "a", 50_000)
    assert tenant.put_many([(key, bytes(10_000)) for key in KEYS[:5]]) == [True] * 5
    with cut_off(sky):
        assert tenant.put_many([(KEYS[9], bytes(10_000))]) == [False]
        assert tenant.delete(KEYS[:1]) == [None] and tenant.used_bytes == 50_000
    assert tenant.delete(KEYS[:1]) == [True] and tenant.used_bytes == 40_000
    store.delete(KEYS[1:2])
    assert tenant.delete(KEYS[1:2]) == [False] and tenant.used_bytes == 30_000, "it was gone already"


def test_a_put_that_is_refused_evicts_nothing_for_its_quota() -> None:
    tenant = TenantStore(MemoryStore(), "a", 50_000)
    assert tenant.put_many([(key, bytes(10_000)) for key in KEYS[:5]]) == [True] * 5
    with pytest.raises(InvalidInput, match="places"):
        tenant.put_many([(KEYS[9], bytes(30_000))], [None, None])
    assert tenant.lookup(KEYS[:5]) == [Presence.HIT] * 5 and tenant.used_bytes == 50_000


@pytest.mark.parametrize("why", ["too large", "no room beside pins", "no server answers"])
def test_what_the_store_below_refuses_costs_the_tenant_nothing(why: str) -> None:
    sky = simulated()
    below = (
        store_over(sky, index=SharedIndex()) if why == "no server answers" else MemoryStore(100_000, pin_fraction=1.0)
    )
    tenant = TenantStore(below, "a", 60_000 if why != "too large" else 120_000)
    assert tenant.put_many([(key, bytes(1000)) for key in KEYS[:20]]) == [True] * 20
    if why == "too large":
        with pytest.raises(ValueTooLarge):
            tenant.put_many([(KEYS[30], bytes(110_000))])
    elif why == "no room beside pins":
        assert below.put_many([(KEYS[31], bytes(60_000))]) == [True] and below.pin([KEYS[31]], 60.0) == [True]
        assert tenant.put_many([(KEYS[30], bytes(50_000))]) == [False]
    else:
        with cut_off(sky):
            assert tenant.put_many([(KEYS[30], bytes(50_000))]) == [False]
    assert tenant.lookup(KEYS[:20]) == [Presence.HIT] * 20 and tenant.used_bytes == 20_000


def test_while_nothing_can_be_deleted_a_tenant_has_at_most_one_put_more_than_its_quota() -> None:
    class Keeping(MemoryStore):
        """Confirms no deletion for a while, as a constellation one of whose satellites is silent."""

        silent = True

        def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
            return [None] * len(keys) if self.silent else super().delete(keys)

    below = Keeping()
    tenant = TenantStore(below, "a", 50_000)
    outcomes = [tenant.put_many([(key, bytes(10_000))])[0] for key in KEYS[:12]]
    assert outcomes == [True] * 6 + [False] * 6 and tenant.used_bytes == 60_000
    below.silent = False
    assert tenant.put_many([(KEYS[12], bytes(10_000))]) == [True] and tenant.used_bytes == 50_000


def test_two_puts_at_once_leave_no_more_than_the_quota() -> None:
    tenant = TenantStore(MemoryStore(), "a", 50_000)
    first, second = (tenant.prepare_store([(key, bytes(10_000)) for key in part]) for part in (KEYS[:4], KEYS[10:14]))
    assert tenant.complete_store(first) == [True] * 4 and tenant.complete_store(second) == [True] * 4
    assert tenant.used_bytes <= 50_000 and tenant.prefix(KEYS[10:14]) == 4
