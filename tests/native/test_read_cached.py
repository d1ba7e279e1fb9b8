"""Reading a file that the kernel has in memory: the whole request, or None; and it waits for nothing."""

from __future__ import annotations

import os
import random
import socket
import time
from pathlib import Path
from types import ModuleType

import pytest


@pytest.mark.parametrize("size_bytes", [0, 1, 63, 64, 65, 4096, 300_001, 5_000_000])
@pytest.mark.parametrize("head_bytes", [0, 64])
def test_a_whole_file_a_short_one_or_none(impl: ModuleType, tmp_path: Path, size_bytes: int, head_bytes: int) -> None:
    path, data = tmp_path / "datei-ü", random.Random(size_bytes).randbytes(size_bytes)
    path.write_bytes(data)
    for wanted_bytes in (size_bytes, size_bytes + 10):
        head, out = bytearray(head_bytes), bytearray(max(0, wanted_bytes - head_bytes))
        got = impl.read_cached(str(path), head, out)
        assert got is None or got == min(size_bytes, len(head) + len(out))
        if got is not None:
            assert (head + out)[:got] == data[:got]


def test_it_reads_what_was_just_written(fast: ModuleType, tmp_path: Path) -> None:
    path, data = tmp_path / "file", os.urandom(100_000)
    path.write_bytes(data)
    head, out = bytearray(64), bytearray(100_000 - 64)
    if fast.read_cached(str(path), head, out) is None:
        pytest.skip("this kernel or file system cannot say what it has in memory")
    assert head + out == data


def test_what_cannot_be_read_without_waiting_is_not_read(fast: ModuleType) -> None:
    """Files of /proc cannot, whatever the kernel has in memory."""
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc here")
    with Path("/proc/self/status").open("rb") as opened:
        assert opened.read()
        assert fast.read_cached("/proc/self/status", bytearray(4), bytearray(4)) is None


def test_nothing_is_read_of_what_is_not_a_file(impl: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "sock"))
    began_s = time.monotonic()
    for name in ("absent", "link", "pipe", "sock", "."):
        assert impl.read_cached(str(tmp_path / name), bytearray(4), bytearray(4)) is None, name
    assert time.monotonic() - began_s < 5
    listener.close()


def test_descriptors_are_closed_and_wrong_calls_refused(fast: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        fast.read_cached(str(path), bytearray(10), bytearray(10))
        fast.read_cached(str(tmp_path), bytearray(10), bytearray(10))
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises((TypeError, BufferError)):
        fast.read_cached(str(path), bytes(10), bytearray(10))
    with pytest.raises(ValueError, match="null"):
        fast.read_cached("a\0b", bytearray(10), bytearray(10))
