"""Satellites that die: new values are stored around them, and found by all, also after the dead are back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import pytest

from skymemory.constellation.torus import SatelliteId
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed.plan import make_plan
from skymemory.testbed.virtual import VirtualConstellation

SIZES = (100, 6144, 20_000, 60_000, 400_000)
DETECTED_S = 2.0
"""By then clients know who is dead."""
PLANES = range(5)
CENTRE = SatelliteId(2, 9)
ONE_OF_THE_BOX = [
    (access, satellite)
    for access in ("ideal", "hybrid", "gateway", "onboard")
    for satellite in (CENTRE, SatelliteId(2, 10), SatelliteId(1, 9), SatelliteId(3, 8))
    if (access, satellite) != ("onboard", CENTRE)  # which carries the client itself
]


def key(number: int, size: int) -> bytes:
    return hashlib.sha256(b"%d %d" % (number, size)).digest()


def value(number: int, size: int) -> bytes:
    return hashlib.shake_256(b"%d %d" % (number, size)).digest(size)


class Sky:
    """A constellation in virtual time, and the store of one of its hosts."""

    def __init__(self, replicas: int = 1, access: str = "ideal", **plan: object) -> None:
        self.virtual = VirtualConstellation(make_plan("testbed-19x5", access=access, replicas=replicas, **plan))  # type: ignore[arg-type]
        self.simulated = self.virtual.simulated
        self.store = self.virtual.store(index=SharedIndex())
        self.numbers = iter(range(1_000_000))

    def settle(self, seconds: float) -> None:
        self.simulated.settle(self.simulated.now_s + seconds)

    def put(self, sizes: tuple[int, ...] = SIZES) -> dict[tuple[int, int], bool]:
        """Whether a new value of each size is stored."""
        names = [(next(self.numbers), size) for size in sizes]
        return {name: self.store.put_many([(key(*name), value(*name))])[0] for name in names}

    def detect(self) -> None:
        """Writes that may fail, for as long as it takes to find out who is dead."""
        until_s = self.simulated.now_s + DETECTED_S
        while self.simulated.now_s < until_s:
            self.put()
            self.settle(0.1)


def is_read(store: ConstellationStore, name: tuple[int, int]) -> bool:
    (found,) = store.get_many([key(*name)])
    assert found is None or found == value(*name), "wrong bytes"
    return found is not None


@pytest.fixture
def sky() -> Iterator[Callable[..., Sky]]:
    made: list[Sky] = []

    def make(**how: object) -> Sky:
        made.append(Sky(**how))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.store.close()


@pytest.mark.brief("2-1-gateway-by size")
@pytest.mark.parametrize("servers", [{}, {"servers": 10}], ids=["by size", "on ten"])
@pytest.mark.parametrize("access", ["ideal", "gateway"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("plane", PLANES)
def test_with_any_plane_dead_all_new_values_are_stored_and_read(
    sky: Callable[..., Sky], plane: int, replicas: int, access: str, servers: dict[str, int]
) -> None:
    here = sky(replicas=replicas, access=access, **servers)
    before = here.put()
    assert all(before.values())
    here.simulated.kill_plane(plane)
    here.detect()
    stored = here.put() | here.put()
    assert all(stored.values())
    assert all(is_read(here.store, name) for name in stored)
    if replicas > 1:
        assert all(is_read(here.store, name) for name in before)
    another = here.virtual.store(ground=2)
    assert all(is_read(another, name) for name in stored), "another host finds them without an index"
    here.simulated.revive_plane(plane)
    here.settle(10.0)
    late = here.virtual.store(ground=3)
    assert all(is_read(store, name) for name in stored for store in (here.store, late)), "after the dead are back"
    again = here.put()
    assert all(again.values()) and all(is_read(late, name) for name in again)
    another.close()
    late.close()


@pytest.mark.brief(every=5)
@pytest.mark.parametrize(("access", "satellite"), ONE_OF_THE_BOX)
def test_with_any_satellite_dead_all_new_values_are_stored_and_read(
    sky: Callable[..., Sky], satellite: SatelliteId, access: str
) -> None:
    here = sky(access=access)
    here.simulated.kill(satellite)
    here.detect()
    stored = here.put()
    another = here.virtual.store(ground=2)
    assert all(stored.values()) and all(is_read(store, name) for name in stored for store in (here.store, another))
    another.close()


def test_what_is_stored_around_the_dead_follows_the_box(sky: Callable[..., Sky]) -> None:
    here = sky(time_scale=60.0)
    here.simulated.kill_plane(2)
    here.detect()
    stored, moves = here.put(), here.simulated.clock.moves(here.simulated.now_s)
    assert all(stored.values())
    here.settle(9.0)
    assert here.simulated.clock.moves(here.simulated.now_s) != moves
    another = here.virtual.store(ground=2)
    assert all(is_read(store, name) for name in stored for store in (here.store, another))
    here.store.delete([key(*name) for name in stored])
    late = here.virtual.store(ground=3)
    assert not any(is_read(late, name) for name in stored)
    another.close()
    late.close()


def test_another_value_under_the_same_key_replaces_what_is_around_the_dead(sky: Callable[..., Sky]) -> None:
    here, name = sky(), (1, 20_000)
    here.simulated.kill_plane(2)
    here.detect()
    assert here.store.put_many([(key(*name), b"before")]) == [True]
    here.simulated.revive_plane(2)
    here.settle(10.0)
    assert here.store.put_many([(key(*name), value(*name))]) == [True]
    another = here.virtual.store(ground=2)
    assert is_read(here.store, name) and is_read(another, name)
    another.close()


def test_a_deletion_is_not_confirmed_while_a_chunk_may_be_on_a_satellite_that_was_silent_at_its_handover() -> None:
    """Its host was stopped, the box went on, and no satellite that should have the value has it."""
    virtual = VirtualConstellation(make_plan("testbed-19x5", time_scale=60.0))
    simulated, store = virtual.simulated, virtual.store(index=SharedIndex())
    name = (1, 3000)
    assert store.put_many([(key(*name), value(*name))]) == [True]
    (holder,) = [here for here, machine in simulated.satellites.items() if key(*name) in machine.store.shares]
    others = [*set(simulated.satellites) - {holder}, ("ground", 1), ("ground", 2)]
    for other in others:
        simulated.cut(holder, other)
    moves = simulated.clock.moves(simulated.now_s)
    while abs(simulated.clock.moves(simulated.now_s)[0] - moves[0]) < 3:
        simulated.settle(simulated.now_s + 1.0)
    assert store.delete([key(*name)]) == [None]
    for other in others:
        simulated.mend(holder, other)
    simulated.settle(simulated.now_s + 60.0)
    another = virtual.store(ground=2)
    assert is_read(another, name)
    assert store.delete([key(*name)]) == [True] and not is_read(another, name)
    another.close()
    store.close()


def lose_the_centre(virtual: VirtualConstellation, store: ConstellationStore) -> None:
    """The store of ground host 1 hears no more of the centre, and takes it for dead."""
    virtual.simulated.cut(("ground", 1), CENTRE)
    for number in range(3):
        store.put_many([(key(number, 100), b"y")])
        virtual.simulated.settle(virtual.simulated.now_s + 1.0)


@pytest.mark.parametrize("size", [3000, 100_000])
@pytest.mark.parametrize("replicas", [1, 2])
def test_of_a_satellite_that_missed_an_overwrite_no_client_has_the_value_before(replicas: int, size: int) -> None:
    """It was silent for a client for a while, with the earlier value in its memory, and has answered it again since."""
    virtual = VirtualConstellation(make_plan("testbed-19x5", replicas=replicas))
    simulated, index = virtual.simulated, SharedIndex()
    store, neighbour = virtual.store(index=index), virtual.store(ground=2, index=index)
    name = (1, size)
    assert store.put_many([(key(*name), b"before")]) == [True] and store.put_many([(key(2, 2), b"x")]) == [True]
    lose_the_centre(virtual, store)
    assert store.put_many([(key(*name), value(*name))]) == [True]
    simulated.mend(("ground", 1), CENTRE)
    assert is_read(neighbour, name), "which owes it nothing: from another copy, or around it"
    simulated.settle(simulated.now_s + 30.0)
    assert is_read(store, name)
    stranger = virtual.store(ground=3)
    assert is_read(stranger, name) and is_read(neighbour, name)
    for each in (store, neighbour, stranger):
        each.close()


def test_a_deletion_is_not_confirmed_while_the_value_before_is_on_a_silent_satellite() -> None:
    virtual = VirtualConstellation(make_plan("testbed-19x5"))
    simulated, store, name = virtual.simulated, virtual.store(index=SharedIndex()), (1, 3000)
    assert store.put_many([(key(*name), value(*name))]) == [True]
    lose_the_centre(virtual, store)
    assert store.put_many([(key(*name), b"later")]) == [True] and store.delete([key(*name)]) == [None]
    simulated.mend(("ground", 1), CENTRE)
    simulated.settle(simulated.now_s + 30.0)
    assert store.delete([key(*name)]) == [True]
    stranger = virtual.store(ground=3)
    assert not is_read(stranger, name)
    store.close()
    stranger.close()


def test_a_value_that_is_stored_again_as_it_was_is_not_evicted_as_replaced() -> None:
    virtual = VirtualConstellation(make_plan("testbed-19x5", replicas=2))
    simulated, store, name = virtual.simulated, virtual.store(index=SharedIndex()), (1, 3000)
    assert store.put_many([(key(*name), value(*name))]) == [True]
    lose_the_centre(virtual, store)
    assert store.put_many([(key(*name), b"other")]) == [True]
    assert store.put_many([(key(*name), value(*name))]) == [True]
    simulated.mend(("ground", 1), CENTRE)
    for _ in range(3):
        simulated.settle(simulated.now_s + 20.0)
        assert is_read(store, name)
    assert store._evictor._owed == {}
    store.close()


@pytest.mark.brief()
@pytest.mark.parametrize("servers", [1, 2, 10])
def test_what_was_stored_around_the_dead_is_found_after_their_return_wherever_the_box_goes(
    sky: Callable[..., Sky], servers: int
) -> None:
    here = sky(time_scale=60.0, servers=servers)
    here.simulated.kill_plane(2)
    here.detect()
    stored = here.put((3000, 20_000))
    assert all(stored.values())
    here.simulated.revive_plane(2)
    for ground in range(2, 8):
        here.settle(12.0)
        another = here.virtual.store(ground=ground)
        assert all(is_read(store, name) for name in stored for store in (here.store, another))
        another.close()


@pytest.mark.brief()
def test_what_could_not_be_handed_over_to_the_dead_is_found_by_all(sky: Callable[..., Sky]) -> None:
    """The plane that the box moves onto is dead: chunks stay behind, and the box goes on."""
    here = sky(time_scale=60.0)
    stored = here.put((3000, 10_000, 100_000))
    here.settle(12.0)
    here.simulated.kill_plane(3)
    for ground in range(2, 9):
        moves = here.simulated.clock.moves(here.simulated.now_s)
        while here.simulated.clock.moves(here.simulated.now_s) == moves:
            here.settle(0.5)
        here.settle(1.5)
        another = here.virtual.store(ground=ground)
        assert all(is_read(store, name) for name in stored for store in (here.store, another))
        another.close()
