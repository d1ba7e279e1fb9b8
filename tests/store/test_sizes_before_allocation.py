"""Numbers from others that lead to an allocation are bounded before it: by what is there, or by what can be."""

from __future__ import annotations

import math
import resource
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.store.conftest import simulated, store_over

from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.files import MAX_SETTINGS_BYTES
from skymemory.index.journal import decode_records
from skymemory.kv.value import unpack_header, unpack_value
from skymemory.protocol import messages
from skymemory.protocol.client.transfer import ValueInfo
from skymemory.protocol.messages import ChunkPresence, Selection
from skymemory.protocol.wire import ChunkRef, PlacementTag
from skymemory.testbed.key_file import read_keys
from skymemory.testbed.plan_file import load_plan

KEY = bytes(range(32))
MODEST_BYTES = 4 << 20
LIMIT_BYTES = 2 << 30
HEADER = b"SKYV\1\0\0\0"


@contextmanager
def modest() -> Iterator[None]:
    """What is done within never holds more than a few MiB, whatever it was promised; more than the limit cannot be had,
    so that a failure leaves the computer its memory.
    """
    most_bytes, _ = limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = Path("/proc/self/statm")
    used_bytes = int(pages.read_text().split()[0]) * resource.getpagesize() if pages.exists() else math.inf
    tracemalloc.start()
    try:
        if most_bytes == resource.RLIM_INFINITY and used_bytes < math.inf:
            resource.setrlimit(resource.RLIMIT_AS, (int(used_bytes) + LIMIT_BYTES, limits[1]))
        yield
        _, peak_bytes = tracemalloc.get_traced_memory()
        assert peak_bytes < MODEST_BYTES
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        tracemalloc.stop()


LIES = {
    "a value of 4 GiB in chunks of one byte": ChunkPresence(
        0, 2**32 - 1, 1, 2**32 - 1, 5, 1, PlacementTag(3, 10, 0, 0, 0)
    ),
    "4 GiB in ordinary chunks": ChunkPresence(0, 699_051, 6144, 2**32 - 1, 5, 1, PlacementTag(3, 10, 0, 0, 0)),
    "more chunks than bytes": ChunkPresence(0, 2**31, 6144, 10, 5, 1, PlacementTag(3, 10, 0, 0, 0)),
    "chunks that no datagram carries": ChunkPresence(0, 2, 70_000, 140_000, 5, 1, PlacementTag(3, 10, 0, 0, 0)),
    "a strategy that is none": ChunkPresence(0, 1, 10, 10, 5, 1, PlacementTag(9, 10, 0, 0, 0)),
    "a displacement that is none": ChunkPresence(0, 1, 10, 10, 5, 1, PlacementTag(0xF3, 10, 0, 0, 0)),
    "more servers than satellites": ChunkPresence(0, 1, 10, 10, 5, 1, PlacementTag(3, 60_000, 0, 0, 0)),
}


@pytest.mark.brief(every=5)
@pytest.mark.parametrize(
    ("lie", "memory_bytes"),
    [(lie, size) for lie in LIES for size in (0, 8 << 20) if size or lie != "4 GiB in ordinary chunks"],
)
def test_a_satellite_that_reports_an_impossible_value_costs_a_miss_and_no_memory(lie: str, memory_bytes: int) -> None:
    sky = simulated()
    store = store_over(sky, memory_per_satellite_bytes=memory_bytes)
    for machine in sky.satellites.values():
        machine.store.presence = lambda key: LIES[lie]  # type: ignore[method-assign]
    with modest():
        ticket = store.prepare_load([KEY])
        assert store.complete_load(ticket) == [None]
        assert store.prefix([KEY]) == 0
    assert store.stats()["client_presences_unbelievable"] > 0


def test_an_honest_value_is_believed_at_the_limit() -> None:
    sky = simulated()
    writer, reader = store_over(sky, 1, memory_per_satellite_bytes=8 << 20), store_over(sky, 2)
    value = bytes(1 << 20)
    assert writer.put_many([(KEY, value)]) == [True]
    assert reader.get_many([KEY]) == [value]


COUNTS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "keys": (messages.unpack_keys, struct.pack(">HH", 0xFFFF, 0)),
    "presences": (messages.unpack_presences, struct.pack(">HH", 0xFFFF, 0)),
    "listing": (messages.unpack_listed, struct.pack(">HH", 0xFFFF, 0)),
    "housekeeping": (messages.unpack_housekeeping, struct.pack(">HH", 0xFFFF, 0)),
    "selection": (Selection.unpack, KEY + struct.pack(">III", 1, 1, 2**32 - 1) + b"\xff"),
    "selection beyond any value": (Selection.unpack, KEY + struct.pack(">III", 2**32 - 1, 2**32 - 1, 8) + b"\xff"),
    "chunk of 4 GiB": (
        ChunkRef.unpack,
        struct.pack(">32sIIIIIIHHBBHii", KEY, 1, 1, 2**32 - 1, 0, 2**32 - 1, 0, 1, 1, 1, 0, 0, 0, 0),
    ),
    "more chunks than bytes": (
        ChunkRef.unpack,
        struct.pack(">32sIIIIIIHHBBHii", KEY, 1, 2**32 - 1, 1, 0, 10, 0, 1, 1, 1, 0, 0, 0, 0),
    ),
    "value header": (unpack_value, HEADER + struct.pack("<QQIIIIH", 2**63, 2**63, 0, 0, 0, 0, 0xFFFF) + bytes(22)),
    "value header alone": (unpack_header, HEADER + struct.pack("<QQIIIIH", 2**63, 0, 0, 0, 0, 0, 9) + bytes(22)),
}


@pytest.mark.parametrize("what", COUNTS)
def test_counts_and_lengths_are_held_against_the_bytes_at_hand(what: str) -> None:
    unpack, data = COUNTS[what]
    with modest(), pytest.raises(MalformedPacket):
        unpack(data)


def test_a_journal_record_longer_than_the_journal_is_a_torn_tail() -> None:
    with modest():
        assert decode_records(struct.pack("<BBHII", 0x5B, 1, 1, 2**32 - 1, 0)) == ([], 0)


def test_an_index_entry_that_cannot_be_is_refused_before_the_buffers_are_made() -> None:
    info = ValueInfo(KEY, 2**32 - 1, 6144, 100, 0, 3, 10, (0, 0))
    with modest(), pytest.raises(InvalidInput):
        info.check()


@pytest.mark.parametrize("read", [load_plan, read_keys])
def test_files_are_measured_before_they_are_read(read, tmp_path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(MAX_SETTINGS_BYTES * 100)
    path.chmod(0o600)
    with modest(), pytest.raises(InvalidInput, match="larger than"):
        read(path)
