"""A hierarchy of hostile tiers against a dictionary: never a wrong value, a miss at worst, and well again by itself."""

from __future__ import annotations

import random
import threading
import time

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.cache.tiers.faulty_tier import TROUBLES, FaultyTier, sealed, whole
from tests.contract.store_contract import key

from skymemory.cache.tiers.store import PROMOTIONS, HierarchySettings, TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.circuit_breaker import BreakerConfig

KEYS = [key(number) for number in range(8)]
BREAKER = BreakerConfig(failures=2, first_wait_s=0.005, last_wait_s=0.02, probe_limit_s=0.1)
SOME_KEYS = st.lists(st.sampled_from(KEYS), max_size=8, unique=True)


def hierarchy(seed: int, budgets: tuple[int, ...], how: HierarchySettings) -> tuple[TieredStore, list[FaultyTier]]:
    stores = [
        FaultyTier(f"tier{number}", budget, seed=seed + number, slow_s=0.02) for number, budget in enumerate(budgets)
    ]
    remote = TierSettings(
        ask_deadline_s=0.01, load_deadline_s=0.01, store_deadline_s=0.01, verify=whole, breaker=BREAKER
    )
    local = TierSettings(local=True, verify=whole, breaker=BREAKER)
    return TieredStore([(store, local if store is stores[0] else remote) for store in stores], how), stores


def well_again(tiers: TieredStore, stores: list[FaultyTier], value: bytes) -> bool:
    """Whether all is as before once the trouble is over, without any intervention."""
    for store in stores:
        store.trouble = ""
    until_s = time.monotonic() + 30
    while time.monotonic() < until_s:
        tiers.lookup(KEYS)
        if all(tier.breaker.closed and not tier.dirty_keys for tier in tiers.tiers):
            tiers.put_many([(one, sealed(one, value)) for one in KEYS[:2]])
            if tiers.get_many(KEYS[:2]) == [sealed(one, value) for one in KEYS[:2]]:
                return True
        time.sleep(0.005)
    return False


class HostileTiers(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 1000), small=st.booleans(), write_back=st.booleans(), promote=st.sampled_from(PROMOTIONS)
    )
    def begin(self, seed: int, small: bool, write_back: bool, promote: str) -> None:
        how = HierarchySettings(
            promote, write_back=write_back, load_deadline_s=0.05, close_deadline_s=0.1, outbound_bytes=3000
        )
        self.tiers, self.stores = hierarchy(seed, (3000 if small else 1 << 20, 5000, 1 << 20), how)
        self.truth: dict[bytes, set[bytes]] = {}
        self.count = 0

    @rule(number=st.integers(0, 2), trouble=st.sampled_from(("", *TROUBLES)), rate=st.sampled_from([0.3, 1.0]))
    def befall(self, number: int, trouble: str, rate: float) -> None:
        if number == 0 and trouble == "slow":  # a local tier has no deadline
            return
        self.stores[number].trouble, self.stores[number].rate = trouble, rate

    @rule(keys=SOME_KEYS)
    def put(self, keys: list[bytes]) -> None:
        items = []
        for one in keys:
            self.count += 1
            items.append((one, sealed(one, random.Random(self.count).randbytes(900))))
        for (one, value), stored in zip(items, self.tiers.put_many(items), strict=True):
            self.truth[one] = {value} if stored else self.truth.get(one, set()) | {value}

    @rule(keys=SOME_KEYS)
    def delete(self, keys: list[bytes]) -> None:
        self.tiers.delete(keys)
        for one in keys:
            self.truth.pop(one, None)

    @rule(keys=SOME_KEYS)
    def get(self, keys: list[bytes]) -> None:
        ticket = self.tiers.prepare_load(keys)
        values = self.tiers.complete_load(ticket)
        assert ticket.report is not None and len(ticket.report.keys) == len(keys)
        for one, value, reported in zip(keys, values, ticket.report.keys, strict=True):
            assert value is None or bytes(value) in self.truth.get(one, set())
            assert (value is None) == (not reported.tier) == bool(reported.reason)
        self.tiers.release(ticket)

    @rule(keys=SOME_KEYS)
    def look(self, keys: list[bytes]) -> None:
        assert 0 <= self.tiers.prefix(keys) <= len(keys)
        assert len(self.tiers.lookup(keys)) == len(keys)
        assert self.tiers.estimate_load_s(keys, 0.0) >= 0.0
        self.tiers.touch(keys)

    def teardown(self) -> None:
        if hasattr(self, "tiers"):
            assert well_again(self.tiers, self.stores, b"after")
            self.get(KEYS[2:])
            self.tiers.close()


TestHostileTiers = HostileTiers.TestCase
TestHostileTiers.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("write_back", [False, True], ids=["through", "back"])
@pytest.mark.parametrize("seed", [1, 2])
def test_troubles_at_random_under_several_threads(seed: int, write_back: bool) -> None:
    """Each thread has keys of its own, so that it knows what it may find; tiers, queue and breakers are shared."""
    how = HierarchySettings(write_back=write_back, load_deadline_s=0.05, close_deadline_s=0.2, outbound_bytes=20_000)
    tiers, stores = hierarchy(seed, (8000, 20_000, 1 << 20), how)
    wrong: list[str] = []
    stop = threading.Event()

    def trouble() -> None:
        dice = random.Random(seed)
        while not stop.wait(0.02):
            number = dice.randrange(3)
            stores[number].rate = dice.choice([0.2, 1.0])
            stores[number].trouble = dice.choice(["", "raise", "lie", "spoil", *(["slow"] if number else [])])

    def work(worker: int) -> None:
        dice = random.Random(seed * 100 + worker)
        mine = [key(100 * worker + number) for number in range(1, 7)]
        truth: dict[bytes, set[bytes]] = {}
        try:
            for _ in range(60):
                chosen = dice.sample(mine, 3)
                match dice.choice("pgd"):
                    case "p":
                        items = [(one, sealed(one, dice.randbytes(900))) for one in chosen]
                        for (one, value), stored in zip(items, tiers.put_many(items), strict=True):
                            truth[one] = {value} if stored else truth.get(one, set()) | {value}
                    case "d":
                        tiers.delete(chosen)
                        for one in chosen:
                            truth.pop(one, None)
                    case _:
                        for one, value in zip(chosen, tiers.get_many(chosen), strict=True):
                            if value is not None and bytes(value) not in truth.get(one, set()):
                                wrong.append(f"worker {worker}, {one[:4].hex()}")
        except Exception as error:  # seen by the test, not lost with the thread
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(1, 5)]
    troubles = threading.Thread(target=trouble)
    for thread in (troubles, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    troubles.join()
    assert wrong == []
    assert well_again(tiers, stores, b"after")
    tiers.close()
