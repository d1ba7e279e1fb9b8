"""Values of sizes beside every boundary of the way: chunk, datagram, run of segments, short way, satellites of a value.

One host writes, others ask: one that follows the writer's index, and one that knows no index and probes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.store_contract import key, value
from tests.store.conftest import store_on, udp_sky_and_loop

from skymemory.placement.fan_out import _MOST_BYTES
from skymemory.protocol.client import machine
from skymemory.protocol.wire import MAX_CHUNK_BYTES, MAX_PACKET_BYTES
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed.connect import fan_out_of

CHUNKS = (1, 100, 6144, 65_000, MAX_CHUNK_BYTES)
NUMBERS = itertools.count()


def boundaries(chunk_bytes: int) -> list[int]:
    """Of chunks, of a datagram of segments, of the short way, and of what one satellite takes."""
    in_a_datagram = max(1, MAX_PACKET_BYTES // (chunk_bytes + 108))
    counts = 0, 1, 2, in_a_datagram - 1, in_a_datagram, 2 * in_a_datagram, 64, machine._PLAIN_CHUNKS
    found = {count * chunk_bytes for count in counts} | {servers * _MOST_BYTES for servers in (1, 2, 4)}
    return sorted(size for size in found if size <= min(5 << 20, 3000 * chunk_bytes))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, tuple[ConstellationStore, ...]]]:
    path: Path = tmp_path_factory.mktemp("sizes") / "index"
    with pytest.MonkeyPatch.context() as patch, udp_sky_and_loop() as (plan, _):
        patch.setattr(machine, "_PLAIN_ROUND_TRIP_S", 1.0)  # the satellites share this interpreter
        how = {"fan_out": fan_out_of(plan, "los")}
        made = {
            size: (
                store_on(plan, SharedIndex(path, born=True), chunk_bytes=size, **how),
                store_on(plan, SharedIndex(path), ground=10, chunk_bytes=size, **how),
                store_on(plan, None, ground=11, chunk_bytes=size, **how),
            )
            for size in CHUNKS
        }
        yield made
        for stores in made.values():
            for store in stores:
                store.close()


@pytest.mark.brief()
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_value_of_any_size_is_read_by_others(
    hosts: dict[int, tuple[ConstellationStore, ...]], data: st.DataObject
) -> None:
    chunk_bytes = data.draw(st.sampled_from(CHUNKS))
    near = st.sampled_from(boundaries(chunk_bytes))
    sizes = [max(0, data.draw(near) + data.draw(st.integers(-2, 2))) for _ in range(data.draw(st.integers(1, 3)))]
    writer, *readers = hosts[chunk_bytes]
    keys = [key(next(NUMBERS)) for _ in sizes]
    items = [(one, value(at, size)) for at, (one, size) in enumerate(zip(keys, sizes, strict=True))]
    assert writer.put_many(items) == [True] * len(items)
    for reader in readers:
        assert reader.get_many(keys) == [its for _, its in items]
        assert [reader.get_many([one]) for one in keys] == [[its] for _, its in items]
    again = [(one, value(at + 7, max(0, size - 1))) for at, (one, size) in enumerate(zip(keys, sizes, strict=True))]
    assert [writer.put_many([item]) for item in again] == [[True]] * len(again)
    for reader in readers:
        assert reader.get_many(keys) == [its for _, its in again]
    assert writer.delete(keys) == [True] * len(keys)
    assert readers[1].get_many(keys) == [None] * len(keys)
