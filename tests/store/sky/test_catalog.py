"""An index that was lost is rebuilt by probing: each value is looked for once, then known; so is what is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.store.conftest import simulated, store_over

from skymemory.constellation.torus import SatelliteId
from skymemory.store.base import Presence
from skymemory.store.sky.probing import ABSENT_S, SILENT_S
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed.plan import make_plan
from skymemory.testbed.virtual import VirtualConstellation

KEYS = [bytes([number]) * 32 for number in range(1, 21)]
VALUES = [os.urandom(3000 * number + 7) for number in range(1, 21)]
ITEMS = list(zip(KEYS, VALUES, strict=True))


def same(got: list[memoryview | None], wanted: list[bytes]) -> bool:
    return [None if value is None else bytes(value) for value in got] == wanted


def probes(store: ConstellationStore) -> float:
    return store.stats()["index_probe_packets"]


def lost() -> SharedIndex:
    return SharedIndex(born=False)


def filled(sky, keys: int = 20) -> ConstellationStore:  # type: ignore[no-untyped-def]
    writer = store_over(sky, 1, SharedIndex())
    writer.prefix(KEYS)
    assert all(writer.put_many(ITEMS[:keys]))
    return writer


def test_a_lost_index_finds_everything_and_asks_once(tmp_path: Path) -> None:
    sky = simulated()
    filled(sky)
    finder = store_over(sky, 2, SharedIndex(tmp_path / "index"))
    assert finder.prefix(KEYS) == 20
    asked = probes(finder)
    assert asked > 0 and finder.stats()["index_values_adopted"] == 20
    assert finder.prefix(KEYS) == 20 and finder.lookup(KEYS) == [Presence.HIT] * 20
    assert same(finder.get_many(KEYS), VALUES)
    assert probes(finder) == asked
    sharing = store_over(sky, 3, SharedIndex(tmp_path / "index"))
    assert sharing.prefix(KEYS) == 20 and same(sharing.get_many(KEYS), VALUES)
    assert probes(sharing) == 0
    standing = SharedIndex(tmp_path / "index").journal_state
    assert not standing.complete and standing.values_adopted == 20 and standing.keys_probed >= 20


def test_adopted_blocks_stand_in_their_chain() -> None:
    sky = simulated()
    filled(sky)
    index = lost()
    finder = store_over(sky, 2, index)
    assert finder.prefix(KEYS) == 20
    assert index.longest_prefix(KEYS) == 20
    finder.delete([KEYS[7]])
    assert finder.prefix(KEYS) == index.longest_prefix(KEYS) == 7


def test_without_a_look_at_the_chain_a_read_finds_it_too() -> None:
    sky = simulated()
    filled(sky)
    finder = store_over(sky, 2, lost())
    assert finder.get_many([KEYS[4]]) == [VALUES[4]]
    assert finder.delete([KEYS[5]]) == [True]
    assert finder.prefix(KEYS) == 5


def test_a_complete_index_never_asks() -> None:
    sky = simulated()
    writer = filled(sky, 10)
    assert writer.prefix(KEYS) == 10
    assert writer.lookup([b"?" * 32]) == [Presence.MISS] and writer.get_many([b"!" * 32]) == [None]
    assert probes(writer) == 0 and writer.stats()["index_complete"] == 1


def test_what_is_not_there_is_asked_for_once_in_a_while_however_the_prompt_grows() -> None:
    sky = simulated()
    filled(sky, 4)
    finder = store_over(sky, 2, lost())
    assert finder.prefix(KEYS[:8]) == 4
    asked = probes(finder)
    for length in range(9, 21):
        assert finder.prefix(KEYS[:length]) == 4
    assert finder.lookup(KEYS[4:8]) == [Presence.MISS] * 4
    assert probes(finder) == asked
    sky.settle(sky.now_s + ABSENT_S + 1)
    assert finder.prefix(KEYS) == 4
    assert probes(finder) > asked


def test_a_prompt_not_stored_costs_two_round_trips() -> None:
    finder = store_over(simulated(one_way_s=0.01), 2, lost())
    begun_s = finder._driver.now_s()
    assert finder.prefix([number.to_bytes(32, "big") for number in range(1, 300)]) == 0
    assert finder._driver.now_s() - begun_s < 0.045


def test_what_others_store_later_is_found_and_what_we_store_is_known_at_once() -> None:
    sky = simulated()
    writer = filled(sky, 2)
    finder = store_over(sky, 2, lost())
    assert finder.lookup(KEYS) == [Presence.HIT] * 2 + [Presence.MISS] * 18
    writer.put_many(ITEMS[2:5])
    finder.put_many(ITEMS[5:6])
    asked = probes(finder)
    assert finder.lookup(KEYS[2:6]) == [Presence.MISS] * 3 + [Presence.HIT] and probes(finder) == asked
    sky.settle(sky.now_s + ABSENT_S + 1)
    assert finder.prefix(KEYS) == 6


def test_the_remains_of_an_evicted_value_are_not_found_again_and_again() -> None:
    sky = simulated()
    filled(sky)
    sky.settle(sky.now_s + 5.0)  # what has just been stored may still be on its way
    for machine in sky.satellites.values():
        machine.store.remove((KEYS[19], 3))
    finder = store_over(sky, 2, lost(), lazy_eviction=False)
    assert finder.prefix(KEYS) == 20 and finder.get_many(KEYS[19:]) == [None]
    asked = probes(finder)
    for _ in range(5):
        assert finder.prefix(KEYS) == 19 and finder.get_many(KEYS[19:]) == [None]
    assert probes(finder) == asked


def test_absence_is_uncertain_while_a_satellite_of_the_box_is_silent() -> None:
    sky = simulated()
    filled(sky)
    dead = SatelliteId(2, 9)
    sky.kill(dead)
    finder = store_over(sky, 2, lost())
    assert finder.lookup([b"?" * 32, KEYS[18]]) == [Presence.MISS, Presence.HIT]
    asked = probes(finder)
    assert finder.lookup([b"?" * 32]) == [Presence.MISS] and probes(finder) == asked
    sky.settle(sky.now_s + SILENT_S + 0.1)
    assert finder.lookup([b"?" * 32]) == [Presence.MISS] and probes(finder) > asked


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["rotation", "rotation_hop", "cost"])
def test_an_index_lost_while_the_box_moves_is_rebuilt_at_any_moment(strategy: str) -> None:
    """Ten looks with a new index each, spread over two slot moves, also in the middle of the handovers."""
    plan = make_plan("starlink-a", strategy=strategy, time_scale=60.0, memory_per_satellite_bytes=8 << 20, epoch_s=0.0)
    sky = VirtualConstellation(plan)
    writer = sky.store(index=SharedIndex())
    writer.prefix(KEYS)
    assert all(writer.put_many(ITEMS))
    before = sky.clock.moves(sky.simulated.now_s)
    for ground in range(2, 32):
        finder = sky.store(index=lost(), ground=ground)
        assert finder.prefix(KEYS) == 20
        asked = probes(finder)
        assert same(finder.get_many(KEYS), VALUES)
        assert finder.prefix(KEYS) == 20 and probes(finder) == asked
        sky.simulated.settle(sky.simulated.now_s + 0.37)
    after = sky.clock.moves(sky.simulated.now_s)
    assert after[0] - before[0] >= 2


def test_a_value_that_another_has_set_again_elsewhere_is_found_again_at_once() -> None:
    """The finder's idea of it has holes; what is there now is looked for, not taken to be gone for half a minute."""
    sky = simulated()
    filled(sky)
    finder = store_over(sky, 2, lost())
    assert finder.prefix(KEYS) == 20
    later = store_over(sky, 3, lost(), servers=4)
    assert later.delete([KEYS[19]]) == [True] and later.put_many([(KEYS[19], b"afresh" * 5000)]) == [True]
    assert finder.get_many([KEYS[19]]) == [None]
    assert finder.get_many([KEYS[19]]) == [b"afresh" * 5000]
