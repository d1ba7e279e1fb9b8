"""Memories that are full, over real processes: every way to evict dead blocks, with satellites in C alone and mixed."""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable

import pytest
from tests.flight.test_daemon import daemon, ledger_balances, up

from skymemory.protocol.messages import WRITING_S
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed import control
from skymemory.testbed.connect import open_constellation
from skymemory.testbed.flight import Choice
from skymemory.testbed.plan import ConstellationPlan, MemoryPolicy
from skymemory.testbed.run_directory import RunDirectory

__all__ = ["daemon", "up"]

MEMORY_BYTES = 96 << 10
CHUNK_BYTES = 6144
CLEANED_S = 120.0
PAUSE_S = 2.0
SPARED_S = 2 * WRITING_S
"""A client that finds a hole spares what was set shortly before: it may be another's, who is writing it."""
_LATER = {"timeout", "unreachable", "under way", "uncertain"}
"""Reasons of a read that says nothing of what is there."""
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
    """The keys that are found, none with a wrong byte; read again where it came too late on a busy machine."""
    hits: set[bytes] = set()
    until_s, left = time.monotonic() + CLEANED_S, list(values)
    while left:
        ticket = store.prepare_load(left)
        for key, data in zip(left, store.complete_load(ticket), strict=True):
            if data is not None:
                assert bytes(data) == values[key]
                hits.add(key)
        reasons = [one.reason for one in ticket.report.keys] if ticket.report else []
        left = [key for key, reason in zip(left, reasons, strict=True) if reason in _LATER]
        store.release(ticket)
        assert not left or time.monotonic() < until_s, set(reasons)
        if left:
            time.sleep(0.2)
    return hits


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
    with open_constellation(directory.path) as store:
        for pair in values.items():
            store.put_many([pair])
        if "lazy" in policy:
            time.sleep(SPARED_S)
        hits = read(store, values)
        assert 0 < len(hits) < len(values) and total(plan, "chunks_evicted") > 0
        if policy == "migration":
            assert control.rotate(plan, 1, 0).complete
            hits = read(store, values)  # the new satellites of the box have full memories, too
        until_s = time.monotonic() + CLEANED_S

        def dead() -> int:
            """Chunks of values that cannot be read."""
            return total(plan, "chunks_held") - chunks(values, hits)

        works: dict[str, Callable[[], bool]] = {
            "none": lambda: dead() > 0,
            "lazy": lambda: dead() == 0,
            "gossip": lambda: total(plan, "notices_sent") > 0,
            "gossip-plane": lambda: total(plan, "notices_sent") > 0,
            "periodic": lambda: dead() == 0,
            "migration": lambda: total(plan, "chunks_purged") > 0,
        }
        if "," in policy:
            del works["migration"]  # the box rests
        for name in works.keys() & policy.split(","):
            while not works[name]():
                assert time.monotonic() < until_s, f"{name}: {dead()} chunks of no use are kept"
                time.sleep(PAUSE_S)
        assert read(store, values) == hits
        assert dead() >= 0
        assert (total(plan, "notices_sent") > 0) == ("gossip" in policy)
        assert total(plan, "chunks_purged") == 0 or policy not in ("none", "lazy")
        assert total(plan, "chunks_deleted") == 0 or "lazy" in policy


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
