"""Keys in order against a sorted list, and what a page costs."""

from __future__ import annotations

import random

import pytest

from skymemory.protocol.satellite.memory import ChunkStore, OrderedKeys
from skymemory.protocol.wire import CHUNK_REF_BYTES


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("seed", range(4))
def test_pages_are_those_of_a_sorted_list(seed: int) -> None:
    dice = random.Random(seed)
    keys, naive = OrderedKeys(), set[bytes]()
    for _ in range(6000):
        key = dice.randrange(3000).to_bytes(32, "little" if seed % 2 else "big")
        if key in naive and dice.random() < 0.6:
            keys.remove(key)
            naive.discard(key)
        elif key not in naive:
            keys.add(key)
            naive.add(key)
        if dice.random() < 0.05:
            after, limit = dice.randrange(3000).to_bytes(32, "big"), dice.choice((0, 1, 14, 900, 9999))
            assert keys.after(after, limit) == sorted(one for one in naive if one > after)[:limit]
    assert len(keys) == len(naive)
    for key in sorted(naive, key=lambda one: dice.random()):
        keys.remove(key)
    assert keys.after(b"", 9) == [] and len(keys) == 0


def test_a_page_of_many_keys_looks_at_few_of_them() -> None:
    """Comparisons are counted, so that the machine at hand does not matter."""
    looked = 0

    class Counted(bytes):
        def __lt__(self, other: bytes) -> bool:
            nonlocal looked
            looked += 1
            return bytes.__lt__(self, other)

        def __gt__(self, other: bytes) -> bool:
            nonlocal looked
            looked += 1
            return bytes.__gt__(self, other)

    keys = OrderedKeys()
    for number in range(20_000):
        keys.add(Counted(number.to_bytes(32, "big")))
    added, looked = looked, 0
    assert len(keys.after(Counted((9_999).to_bytes(32, "big")), 14)) == 14
    assert looked < 64, "one page of a listing compares with as many keys as the depth of a search"
    assert added < 64 * 20_000


def test_keys_that_came_together_are_all_listed() -> None:
    """The native loop stores SETs of several keys and then says so, key by key, in runs: one key may be named twice
    before another is named once.
    """
    store = ChunkStore(1 << 20)
    first, second = bytes(32), bytes([1]) * 32
    ref = bytes(CHUNK_REF_BYTES)
    store.shares[first] = {0: (ref, b"a"), 1: (ref, b"b")}
    store.shares[second] = {0: (ref, b"c")}
    for key in (first, first, second):
        store.added(key, 1, CHUNK_REF_BYTES + 1)
    assert store.keys_after(b"", 10) == [first, second]
    store.remove_key(first)
    assert store.keys_after(b"", 10) == [second]
