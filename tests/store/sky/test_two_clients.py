"""Two clients of one index, drawn calls in turn, beside a dict: what they say is what it says, though the box moves."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.contract.store_contract import key, value
from tests.store.conftest import simulated, store_over

from skymemory.kv.block import places_in
from skymemory.placement.fan_out import FanOut
from skymemory.protocol.clock import MoveClock
from skymemory.store.base import Presence
from skymemory.store.sky.shared_index import SharedIndex, create_journal

KEYS = [key(number) for number in range(6)]
SIZES = (0, 1, 100, 6144, 6145, 30_000)
BY_SIZE = FanOut({1: 0.004, 2: 0.008, 4: 0.009, 10: 0.02}, 0.003, 40_000)
"""Small boxes are full after a few values, so that a key is set now on few satellites and now on many."""
CALLS = ("put", "put", "get", "get", "lookup", "prefix", "delete", "touch", "pin", "later", "another")


@pytest.mark.brief(
    "1-complete-standing-fixed", "2-complete-moving-by_size", "0-incomplete-standing-fixed", "3-complete-standing-fixed"
)
@pytest.mark.parametrize("fan_out", [None, BY_SIZE], ids=["fixed", "by_size"])
@pytest.mark.parametrize("moving", [False, True], ids=["standing", "moving"])
@pytest.mark.parametrize("complete", [True, False], ids=["complete", "incomplete"])
@pytest.mark.parametrize("seed", range(4))
def test_two_clients_agree_with_a_dict(
    tmp_path: Path, seed: int, complete: bool, moving: bool, fan_out: FanOut | None
) -> None:
    dice, path = random.Random(seed), tmp_path / "index"
    sky = simulated(clock=MoveClock(slot_period_s=10.0, plane_period_s=73.0, time_scale=1.0)) if moving else simulated()
    if complete:
        create_journal(path)
    stores = [store_over(sky, ground, SharedIndex(path), fan_out=fan_out) for ground in (1, 2)]
    there: dict[bytes, bytes] = {}
    for step in range(60):
        at = dice.randrange(2)
        store, call, keys = stores[at], dice.choice(CALLS), dice.sample(KEYS, dice.randrange(1, 5))
        present = [one in there for one in keys]
        if call == "put":
            items = [(one, value(dice.randrange(1 << 20), dice.choice(SIZES))) for one in keys]
            places = places_in(KEYS, [KEYS.index(one) for one in keys]) if dice.random() < 0.5 else ()
            assert store.put_many(items, places) == [True] * len(items)
            there.update(items)
        elif call == "get":
            got = [None if one is None else bytes(one) for one in store.get_many(keys)]
            assert got == [there.get(one) for one in keys], step
        elif call == "lookup":
            assert [one is Presence.HIT for one in store.lookup(keys)] == present, step
        elif call == "prefix":
            chain = KEYS[dice.randrange(3) :]
            assert store.prefix(chain) == next((n for n, one in enumerate(chain) if one not in there), len(chain)), step
        elif call == "delete":
            assert store.delete(keys) == present, step
            for one in keys:
                there.pop(one, None)
        elif call == "touch":
            store.touch(keys)
        elif call == "pin":
            assert store.pin(keys, dice.choice([0.0, 5.0, 100.0])) == present, step
        elif call == "later":
            sky.settle(sky.now_s + dice.choice([0.1, 1.0, 5.0, 35.0]))
        else:
            store._driver.close()
            stores[at] = store_over(sky, 3 + step, SharedIndex(path), fan_out=fan_out)
