"""What counts as a use of a key at a satellite: a GET that it answers, by whichever of its ways."""

from __future__ import annotations

import pytest

from skymemory.protocol.satellite.memory import ChunkStore
from skymemory.protocol.wire import Op


def last_first(store: ChunkStore) -> list[bytes]:
    return list(store.order())


@pytest.mark.parametrize("access", ["los", "gateway"])
@pytest.mark.parametrize("wanted", ["all", "some that are gone"])
def test_what_is_asked_for_is_evicted_last(world, value_of, access, wanted):
    """By the gateway a GET comes from a neighbour and goes the long way; one of more than is here is answered twice."""
    sky = world(access, replacement="lru")
    infos = {name: sky.put(name, value_of(3000, at), 1000, servers=1)[1] for at, name in enumerate("abc")}
    (home,) = sky.homes(infos["a"], (0, 0))[0]
    store = sky.sim.satellites[home].store
    assert last_first(store) == [infos[name].key for name in "abc"]
    if wanted != "all":
        store.remove((infos["a"].key, 1))
    read, _ = sky.get(infos["a"])
    assert read.ok == (wanted == "all")
    assert last_first(store) == [infos[name].key for name in "bca"]
    assert sky.ask(Op.PING, b"", home).ok and last_first(store) == [infos[name].key for name in "bca"]


def test_what_the_transport_served_is_evicted_last(world, value_of):
    sky = world(replacement="lru")
    infos = {name: sky.put(name, value_of(3000, at), 1000, servers=1)[1] for at, name in enumerate("abc")}
    (home,) = sky.homes(infos["a"], (0, 0))[0]
    machine = sky.sim.satellites[home]
    client = "127.0.0.1", 1
    machine.record_served([(Op.GET, infos["a"].key, 7, client, client, 3, 0, 0, 0, None)], sky.sim.now_s)
    assert last_first(machine.store) == [infos[name].key for name in "bca"]
