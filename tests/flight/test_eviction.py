"""Memories that are full, over real processes: every way to evict dead blocks, with satellites in C alone and mixed."""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable

import pytest
from tests.flight.test_daemon import daemon, ledger_balances, up

from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed import control
from skymemory.testbed.connect import open_constellation
from skymemory.testbed.flight import Choice
from skymemory.testbed.plan import ConstellationPlan, MemoryPolicy
from skymemory.testbed.run_directory import RunDirectory

__all__ = ["daemon", "up"]

MEMORY_BYTES = 96 << 10
CHUNK_BYTES = 6144
CLEANED_S = 90.0
PAUSE_S = 2.0
"""Between reads: what a client has evicted it clears up when it has nothing else to do."""
POLICIES = {
    "none": "lrfu",
    "lazy": "lru",
    "gossip": "lrfu",
    "gossip-plane": "lfuda",
    "periodic": "lru",
    "migration": "lfuda",
    "lazy,gossip,periodic,migration": "lrfu",
}
"""Each with one of the orders of replacement."""


def uneven_values(count: int, seed: int) -> dict[bytes, bytes]:
    """Of 1 to 30 chunks: the first servers hold more of them than the last, and evict what others keep."""
    draw = random.Random(seed)
    return {
        hashlib.sha256(b"%d %d" % (seed, one)).digest(): draw.randbytes(draw.randrange(1, 30 * CHUNK_BYTES))
        for one in range(count)
    }


def read(store: ConstellationStore, values: dict[bytes, bytes]) -> set[bytes]:
    """The keys that are found; none with a wrong byte."""
    found = dict(zip(values, store.get_many(list(values)), strict=True))
    assert all(bytes(data) == values[key] for key, data in found.items() if data is not None)
    return {key for key, data in found.items() if data is not None}


def await_values(store: ConstellationStore, values: dict[bytes, bytes], these: set[bytes]) -> set[bytes]:
    """The keys that are found, once these are among them: a single read may come too late on a busy machine."""
    until_s = time.monotonic() + CLEANED_S
    while not (found := read(store, values)) >= these:
        assert time.monotonic() < until_s, "a value that was whole is gone"
        time.sleep(PAUSE_S)
    return found


def total(plan: ConstellationPlan, name: str) -> int:
    answers = [found for found in control.ping_all(plan, 3.0).values() if found]
    assert len(answers) == 95 and all(ledger_balances(found) for found in answers)
    assert all(found["memory_used_bytes"] <= found["memory_limit_bytes"] for found in answers)
    return sum(found[name] for found in answers)


def chunks(values: dict[bytes, bytes], keys: set[bytes]) -> int:
    return sum(math.ceil(len(values[key]) / CHUNK_BYTES) for key in keys)


def filled(
    up: Callable[..., RunDirectory], satellite: Choice, policy: str, replacement: str
) -> tuple[RunDirectory, dict[bytes, bytes]]:
    directory = up(
        satellite,
        memory_per_satellite_bytes=MEMORY_BYTES,
        chunk_bytes=CHUNK_BYTES,
        memory_policy=MemoryPolicy(policy, replacement, 1.0),
    )
    return directory, uneven_values(60, len(policy))


@pytest.mark.slow
@pytest.mark.parametrize("satellite", ["c", "mixed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_dead_chunks_go_and_no_others(up: Callable[..., RunDirectory], policy: str, satellite: Choice) -> None:
    """No value that was whole is lost by cleaning up, and where cleaning up reaches all, only whole values are left."""
    directory, values = filled(up, satellite, policy, POLICIES[policy])
    plan = directory.read_plan()
    all_of_it = any(name in policy for name in ("lazy", "periodic"))
    with open_constellation(directory.path) as store:
        for pair in values.items():
            store.put_many([pair])
        hits = await_values(store, values, set())
        assert 0 < len(hits) < len(values) and total(plan, "chunks_evicted") > 0
        if policy == "migration":
            assert control.rotate(plan, 1, 0).complete
            hits = await_values(store, values, set())  # the new satellites of the box have full memories, too
        until_s = time.monotonic() + CLEANED_S
        while (dead := total(plan, "chunks_held") - chunks(values, hits)) and all_of_it:
            assert time.monotonic() < until_s, f"{dead} chunks of no use are kept"
            time.sleep(PAUSE_S)
            assert hits == await_values(store, values, hits)
        assert dead >= 0 and (dead > 0 or policy != "none")
        assert (total(plan, "notices_sent") > 0) == ("gossip" in policy)
        while policy in ("periodic", "migration") and total(plan, "chunks_purged") == 0:
            assert time.monotonic() < until_s, "nothing is purged"
            time.sleep(PAUSE_S)
        assert total(plan, "chunks_purged") == 0 or "periodic" in policy or "migration" in policy


@pytest.mark.slow
@pytest.mark.parametrize("satellite", ["c", "mixed"])
@pytest.mark.parametrize("replacement", ["lru", "lfuda", "lrfu"])
def test_what_is_used_stays(up: Callable[..., RunDirectory], replacement: str, satellite: Choice) -> None:
    """A few values are read again and again while others come in by once their memory."""
    directory, values = filled(up, satellite, "lazy", replacement)
    used = dict(list(values.items())[:3])
    rest = dict(list(values.items())[3:])
    with open_constellation(directory.path) as store:
        assert store.put_many(list(used.items())) == [True] * len(used)
        for pair in rest.items():
            store.put_many([pair])
            assert read(store, used) == used.keys()
        assert len(read(store, rest)) < len(rest)
