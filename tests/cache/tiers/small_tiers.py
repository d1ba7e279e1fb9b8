"""Hierarchies of memory stores for the tests: the first is local, the others have threads."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.cache.tiers.faulty_tier import FaultyTier, sealed, whole
from tests.contract.store_contract import key, value

from skymemory.cache.tiers.store import HierarchySettings, TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.circuit_breaker import BreakerConfig
from skymemory.store.base import Store
from skymemory.store.memory import MemoryStore

LOCAL = TierSettings(local=True)
QUICK = BreakerConfig(failures=2, first_wait_s=0.01, last_wait_s=0.02)
REMOTE = TierSettings(ask_deadline_s=0.2, load_deadline_s=0.2, store_deadline_s=0.2, verify=whole, breaker=QUICK)


def over(*stores: Store, **how: object) -> TieredStore:
    """The first is local, the others have threads."""
    settings = [LOCAL] + [REMOTE] * (len(stores) - 1)
    return TieredStore(list(zip(stores, settings, strict=True)), HierarchySettings(**how))  # type: ignore[arg-type]


def near_and_far(near_bytes: int = 1 << 20, **how: object) -> tuple[TieredStore, MemoryStore, FaultyTier]:
    near, far = MemoryStore(near_bytes, name="near"), FaultyTier("far")
    return over(near, far, **how), near, far


def items(*numbers: int, size_bytes: int = 1000) -> list[tuple[bytes, bytes]]:
    return [(key(number), sealed(key(number), value(number, size_bytes - 4))) for number in numbers]


def soon(true: Callable[[], bool], within_s: float = 60.0) -> bool:
    until_s = time.monotonic() + within_s
    while not true():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.002)
    return True


def sources(store: TieredStore, *numbers: int) -> list[str]:
    ticket = store.prepare_load([key(number) for number in numbers])
    store.complete_load(ticket)
    store.release(ticket)
    assert ticket.report is not None
    return [each.tier for each in ticket.report.keys]
