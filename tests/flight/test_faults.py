"""Faults that the daemon injects (``flight/posix/faults.c``): as many as are asked for, and only what they say."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.flight.daemon import NEEDED_BY, ROOT

WHOLE = 1 << 32
PACKETS = 60_000
REORDER_US = 2_000


class Rates(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("loss", "duplicate", "reorder", "corrupt")),
        ("reorder_us", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
    ]


class Row(ctypes.Structure):
    _fields_ = [("state", ctypes.c_uint64)]


class Copy(ctypes.Structure):
    _fields_ = [("extra_us", ctypes.c_int64), ("damaged", ctypes.c_bool)]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip(NEEDED_BY)
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    source, core = ROOT / "flight" / "posix" / "faults.c", ROOT / "flight" / "core"
    strict = ("-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")
    subprocess.run([compiler, *strict, "-O2", "-fPIC", "-shared", f"-I{core}", "-o", library, source], check=True)
    lib = ctypes.CDLL(str(library))
    lib.faults_row.restype, lib.faults_row.argtypes = Row, (ctypes.POINTER(Rates), ctypes.c_uint64)
    lib.faults_any.restype = ctypes.c_bool
    lib.faults_apply.restype = ctypes.c_uint
    lib.faults_damage.restype, lib.faults_damage.argtypes = (
        ctypes.c_size_t,
        (ctypes.POINTER(Row), ctypes.c_void_p, ctypes.c_size_t),
    )
    return lib


def rates(seed: int = 1, **shares: float) -> Rates:
    units = {name: round(share * WHOLE) for name, share in shares.items()}
    return Rates(**units, reorder_us=REORDER_US, seed=seed)


def fates(lib: Any, its: Rates, link: int = 7, packets: int = PACKETS) -> Iterator[tuple[int, list[Copy]]]:
    """Of each packet: how many faults are counted so far, and its copies."""
    row, copies, injected = lib.faults_row(its, link), (Copy * 2)(), ctypes.c_uint64()
    for _ in range(packets):
        count = lib.faults_apply(ctypes.byref(its), ctypes.byref(row), copies, ctypes.byref(injected))
        yield injected.value, [Copy(one.extra_us, one.damaged) for one in copies[:count]]


def near(found: int, share: float, of: int) -> bool:
    """Within five standard deviations; the seeds are fixed, so that it is always or never."""
    return abs(found - share * of) <= 5 * (of * share * (1 - share)) ** 0.5


@pytest.mark.brief()
@pytest.mark.parametrize("link", [0, 7, 570])
def test_shares_are_those_asked_for(faults: Any, link: int) -> None:
    its = rates(loss=0.02, duplicate=0.1, reorder=0.05, corrupt=0.01)
    found: Counter[str] = Counter()
    injected = 0
    for counted, copies in fates(faults, its, link):
        injected = counted
        found[f"{len(copies)} copies"] += 1
        found["copies"] += len(copies)
        found["reordered"] += sum(one.extra_us > 0 for one in copies)
        found["damaged"] += sum(one.damaged for one in copies)
        found["both"] += sum(one.damaged and one.extra_us > 0 for one in copies)
    arrived = PACKETS - found["0 copies"]
    assert near(found["0 copies"], 0.02, PACKETS)
    assert near(found["2 copies"], 0.1, arrived)
    assert near(found["reordered"], 0.05, found["copies"])
    assert near(found["damaged"], 0.01, found["copies"])
    assert near(found["both"], 0.05 * 0.01, found["copies"])
    assert injected == found["0 copies"] + found["2 copies"] + found["reordered"] + found["damaged"]


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("name", ["loss", "duplicate", "reorder", "corrupt"])
def test_each_alone_always_and_never(faults: Any, name: str) -> None:
    assert not faults.faults_any(ctypes.byref(rates()))
    assert all(
        injected == 0 and [(one.extra_us, one.damaged) for one in copies] == [(0, False)]
        for injected, copies in fates(faults, rates(), packets=1000)
    )
    always = Rates(**{name: WHOLE}, reorder_us=REORDER_US, seed=3)
    assert faults.faults_any(ctypes.byref(always))
    for _, copies in fates(faults, always, packets=1000):
        assert len(copies) == {"loss": 0, "duplicate": 2}.get(name, 1)
        assert all((one.extra_us > 0, one.damaged) == (name == "reorder", name == "corrupt") for one in copies)
    some = rates(seed=3, **{name: 0.3})
    *_, (injected, _) = fates(faults, some, packets=20_000)
    assert near(injected, 0.3, 20_000)


def test_the_extra_delay_of_reordered_packets(faults: Any) -> None:
    """Evenly from 1 µs to the longest: over tenths of the range by the same share."""
    delays = [copies[0].extra_us for _, copies in fates(faults, rates(reorder=1.0), packets=20_000)]
    assert min(delays) >= 1 and max(delays) <= REORDER_US
    tenths = Counter((delay - 1) * 10 // REORDER_US for delay in delays)
    assert all(near(tenths[tenth], 0.1, len(delays)) for tenth in range(10))


def test_links_have_rows_of_their_own(faults: Any) -> None:
    """The same seed and link are the same row; what befalls one link says nothing of another."""

    def lost(seed: int, link: int) -> list[bool]:
        return [not copies for _, copies in fates(faults, rates(seed, loss=0.5), link, 10_000)]

    assert lost(1, 7) == lost(1, 7)
    first = lost(1, 7)
    for seed, link in [(1, 8), (1, 6), (2, 7), (2, 6), (1, 7 + (1 << 32))]:
        other = lost(seed, link)
        assert near(sum(a == b for a, b in zip(first, other, strict=True)), 0.5, 10_000)
        assert near(sum(a == b for a, b in zip(first[1:], other, strict=False)), 0.5, 9_999)


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("size", [1, 2, 60, 6_236])
def test_damage_is_one_to_eight_bits_or_a_cut(faults: Any, size: int) -> None:
    """Nothing beside: the bytes before a cut are those that were, and nothing beyond the packet is touched."""
    packet = random.Random(size).randbytes(size)
    row, guard, tries = faults.faults_row(rates(5), 9), b"\x5a" * 8, 8_000
    bits: Counter[int] = Counter()
    places: Counter[int] = Counter()
    cuts: Counter[int] = Counter()
    for _ in range(tries):
        room = ctypes.create_string_buffer(packet + guard, size + len(guard))
        left = faults.faults_damage(row, room, size)
        found = room.raw
        assert found[size:] == guard
        if left < size:
            assert found[:size] == packet
            cuts[left] += 1
            continue
        assert left == size
        changed = int.from_bytes(found[:size], "little") ^ int.from_bytes(packet, "little")
        bits[changed.bit_count()] += 1
        while changed:
            low = changed & -changed
            places[(low.bit_length() - 1) * 8 // (8 * size)] += 1  # by eighths of the packet
            changed ^= low
    assert near(cuts.total(), 0.25, tries)
    assert set(bits) == set(range(1, 9))
    assert all(near(bits[count], 1 / 8, tries - cuts.total()) for count in bits)
    assert all(near(places[eighth], 1 / 8, places.total()) for eighth in range(8))
    halves = Counter(left * 2 // size for left in cuts.elements())
    assert size == 1 or near(halves[0], (size + 1) // 2 / size, cuts.total())


def test_an_empty_packet_stays_empty(faults: Any) -> None:
    assert faults.faults_damage(faults.faults_row(rates(), 1), None, 0) == 0
