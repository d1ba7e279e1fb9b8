"""The helper refuses absurd arguments, and outlives code that changes them while it uses them."""

from __future__ import annotations

import gc
import hashlib
import hmac
import os
import random
import socket
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from shutil import which
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tests.native import absurd
from tests.native.test_runs import packets

import skymemory.native
from skymemory.native.twin import backend
from skymemory.protocol.wire import Op

SOURCES = Path(skymemory.native.__file__).parent
SHORT, LONG = 10_000, int(os.environ.get("ABSURD_CALLS", "1000000"))


class Number:
    """Runs code when the helper reads it."""

    def __init__(self, number: int, harm: Callable[[], object]) -> None:
        self.number, self.harm = number, harm

    def __index__(self) -> int:
        self.harm()
        return self.number


def survives(*arguments: str) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.native.absurd", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, f"{command}: {ran.returncode}, {ran.stderr[-3000:]}"


def test_all_that_is_exported_is_called(fast: ModuleType, tmp_path: Path) -> None:
    assert absurd.exported(fast) == set(absurd.Scene(fast, random.Random(1), tmp_path).makes)


@pytest.mark.brief()
def test_absurd_calls_end_no_interpreter(fast: ModuleType) -> None:
    survives("--calls", str(SHORT))


@pytest.mark.slow
def test_a_million_absurd_calls_end_no_interpreter(fast: ModuleType) -> None:
    """ABSURD_CALLS=10000000 for more."""
    survives("--calls", str(LONG), "--seed", "2")


@pytest.mark.parametrize("first", [1, 5, 2**62, 2**63 - 101, 2**63 - 100, 2**63 - 1])
@pytest.mark.parametrize("row_bytes", [100, 2**63 - 1])
def test_rows_beyond_the_room_are_refused(impl: ModuleType, first: int, row_bytes: int) -> None:
    out = (bytearray(), bytearray(10), first, 1, row_bytes, row_bytes)
    with pytest.raises(ValueError, match="rows that are not its"):
        impl.place_segments(b"", 1, (bytes(32), 1, 100, 100, 0, out, bytearray(1), bytearray(4)))


def test_a_value_larger_than_any_memory_is_refused(impl: ModuleType) -> None:
    one, other = socket.socketpair()
    with one, other, pytest.raises((MemoryError, OverflowError)):
        impl.receive_all(one.fileno(), b"head", sys.maxsize, 0.0, bytearray())


def test_numbers_that_empty_the_list_of_runs_change_nothing(impl: ModuleType) -> None:
    sets = packets(Op.SET, [0, 3])
    expected = impl.open_runs([(sets[0], len(sets[0])), (sets[1], len(sets[1]))], 0)
    assert expected[3] == 2
    runs: list[Any] = []
    runs += [(bytearray(packet), Number(len(packet), runs.clear)) for packet in sets]
    if impl is backend:  # reads no such numbers
        runs = [(data, number.number) for data, number in runs]
    assert impl.open_runs(runs, 0) == expected


def test_a_guard_that_empties_the_list_of_runs_changes_nothing(impl: ModuleType) -> None:
    key = hmac.new(bytes(32), b"absurd", hashlib.sha256).digest()
    get = bytearray(packets(Op.SET, [0])[0][:52]) + bytes(32) + struct.pack(">III", 1, 1, 1) + b"\1"
    struct.pack_into(">HHH", get, 0, 0x18C0, 0xC000, len(get) - 7)
    get[9] = 2
    signed = impl.sign_packets(bytes(get), len(get), 8, key, 1, 5)
    size = len(signed)
    runs = [(0, size, size), (size, size, size), (2 * size, size, size)]
    shares = {bytes(32): {0: (bytes(72), b"payload")}}

    def is_first(*_: object) -> bool:
        runs.clear()
        return True

    source = ("127.0.0.1", 9)
    kept, served, _, _ = impl.serve_runs(
        -1,
        bytearray(3 * signed),
        runs,
        source,
        (bytes(get[12:20]), shares, set(), 0, (0,) * 6, ({1: key}, 5, 9, is_first, 0)),
    )
    assert (kept, len(served)) == ([], 3)


def test_blocks_that_are_exchanged_during_a_visit_are_noticed(impl: ModuleType) -> None:
    table = impl.BlockTable()
    table.enter(bytes(range(64)), bytes(72), 0, None)

    def visit(*_: object) -> None:  # as many as before
        table.remove(bytes(range(32, 64)))
        table.enter(bytes(32), bytes(36), 0, None)

    with pytest.raises(RuntimeError, match="changed while its runs were visited"):
        table.runs(visit)


@pytest.mark.parametrize("asked", ["find", "group_bytes", "items", "depths"])
def test_a_collection_of_garbage_may_change_what_is_read(fast: ModuleType, asked: str) -> None:
    """Up to Python 3.11 it begins in the middle of a call."""
    table, tree, key = fast.BlockTable(), fast.UnderWay(9), bytes(range(32))
    keys, hashes, slots = (key,) * 3, bytes(8), (0, 1)
    asks = {"find": lambda: table.find(keys), "depths": lambda: tree.depths(hashes, slots)}

    def collected(phase: str, info: object) -> None:
        table.clear()
        tree.drop(ticket)

    threshold = gc.get_threshold()
    for _ in range(30):
        table.enter(key, bytes(36), 0, None)
        ticket = tree.add(0, bytes(8))
        ask = asks.get(asked) or getattr(table, asked)
        spare = [[] for _ in range(200)]  # so that a new list is none that Python kept
        gc.callbacks.append(collected)
        gc.set_threshold(1)
        try:
            found = ask()
        finally:
            gc.callbacks.remove(collected)
            gc.set_threshold(*threshold)
        assert "NULL" not in repr(found)
        assert found in ([], [0.0], [None] * 3, [bytes(36)] * 3, [(key, 0, 0)], [0, 0], [1, 0])
        tree.drop(ticket)
        del spare


# What needs no socket and keeps nothing. ``answer_get`` and ``serve_runs`` leave shares that are none to the caller.
ALIKE = "crc32 crc32_combine crc32_chunks crc32_join sign_packets check_macs strip_macs seal_headers verify_segments"
ALIKE += " place_segments bulk_headers value_refs open_runs same_journey count_hops place_runs command_packets open_ack"
ALIKE += " request_words chain_hashes piece_hashes chain_sha256 pack_tokens header_lines"


def plainly(found: object) -> object:
    if isinstance(found, np.ndarray):
        return found.tobytes()
    return [plainly(part) for part in found] if isinstance(found, (list, tuple)) else found


@pytest.mark.parametrize("name", ALIKE.split())
def test_what_the_twin_refuses_the_helper_refuses(fast: ModuleType, tmp_path: Path, name: str) -> None:
    """The helper may refuse more: numbers of more than 64 bits, and types that merely resemble the right ones."""
    scenes = [absurd.Scene(module, random.Random(), tmp_path, saboteurs=False) for module in (fast, backend)]
    answered = 0
    for seed in range(150):
        for scene in scenes:
            scene.dice.seed(seed)
        (call, given), (twins_call, twins_given) = (scene.made(name) for scene in scenes)
        try:
            found = call(*given)
        except Exception:
            continue
        assert plainly(found) == plainly(twins_call(*twins_given)), given
        assert plainly(given) == plainly(twins_given)
        answered += 1
    assert answered > 10


@pytest.mark.slow
def test_the_helper_converts_no_number_silently() -> None:
    """As the satellite in C is built (flight/Makefile)."""
    compiler, include = which("gcc"), sysconfig.get_paths()["include"]
    if compiler is None or not sys.platform.startswith("linux") or not (Path(include) / "Python.h").exists():
        pytest.skip("no gcc here, or no Python headers")
    flags = [
        "-fsyntax-only",
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-Wconversion",
        "-Wsign-conversion",
    ]
    sources = sorted(str(path) for path in SOURCES.glob("*.c"))
    checked = subprocess.run(
        [compiler, *flags, "-Werror", f"-isystem{include}", *sources], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr[-3000:]
