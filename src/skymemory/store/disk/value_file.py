"""One value as one file: a header of 64 bytes, then the value. Written once, renamed into place, never changed.

A file that is complete has been renamed, so a process that dies while it writes leaves only a ``.part`` behind. What a
power cut tore all the same (a file renamed before its bytes were on the disk) fails a checksum and is a miss.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from skymemory.errors import LaterVersion
from skymemory.native import crc32
from skymemory.store.base import KEY_BYTES

_HEADER = struct.Struct(f"<8s{KEY_BYTES}sQ8xII")
"""Magic, key, size of the value in bytes, eight bytes of nothing, CRC-32 of the value, CRC-32 of all before it."""

HEADER_BYTES = _HEADER.size
_MAGIC = b"SKYVAL\x00\x01"
"""The last byte is the version. A later one keeps the seven before it; all else is its own."""
PART = ".part"
PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""How files in the store's directory are opened: no link is followed, no pipe waited for."""

FAULTS_OF_THE_FILE = (errno.ENOENT, errno.EIO, errno.ELOOP, errno.ESPIPE, errno.ENXIO)
"""It is not there, not readable, or a link, a pipe or a socket. Of no other error does the file seem to be the cause:
there may be too many open ones, or too little memory.
"""


def file_name(key: bytes) -> str:
    return key.hex()


def key_of(name: str) -> bytes | None:
    """The key of a value's file; None for any other name."""
    if len(name) != 2 * KEY_BYTES or name != name.lower():
        return None
    try:
        return bytes.fromhex(name)
    except ValueError:
        return None


def write_part(path: Path, key: bytes, value: memoryview, *, synced: bool) -> None:
    """Header and value into a new file at ``path``; with ``synced``, on the disk itself when this returns.

    Raises:
        OSError: disk full, over a quota, … The file is then not there.
    """
    header = _HEADER.pack(_MAGIC, key, value.nbytes, crc32(value), 0)[:-4]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _write_all(fd, [memoryview(header + crc32(header).to_bytes(4, "little")), value.cast("B")])
        if synced:
            os.fdatasync(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _write_all(fd: int, parts: Sequence[memoryview]) -> None:
    """A write may stop early (a disk nearly full, more than 2 GiB): then the rest, until it is all or an error."""
    left = [part for part in parts if part.nbytes]
    while left:
        written = os.writev(fd, left)
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]


def read_value(path: str, key: bytes, out: memoryview) -> bool:
    """The value of ``key`` into ``out``, which is just as long; False if the file does not hold just that.

    Raises:
        OSError: there is no such file, it is no plain one, or it cannot be read.
    """
    header = bytearray(HEADER_BYTES)
    fd = os.open(path, os.O_RDONLY | PLAIN)
    try:
        # One call for both: the value lands where it is wanted, the header beside it.
        got = os.preadv(fd, [header, out] if out.nbytes else [header], 0)
        while HEADER_BYTES <= got < HEADER_BYTES + out.nbytes:
            more = os.preadv(fd, [out[got - HEADER_BYTES :]], got)
            if not more:
                return False
            got += more
    finally:
        os.close(fd)
    if got < HEADER_BYTES:
        return False
    found = _open_header(header)
    return found is not None and found[:2] == (key, out.nbytes) and found[2] == crc32(out)


def stored_bytes(path: Path, key: bytes) -> int | None:
    """Size of the value in the file by header and length of the file, without reading it; None if they are at odds.

    Raises:
        LaterVersion: a later release wrote it.
    """
    fd = os.open(path, os.O_RDONLY | PLAIN)
    try:
        header = os.pread(fd, HEADER_BYTES, 0)
        if header[:7] == _MAGIC[:7] and header[7:8] > _MAGIC[7:]:
            raise LaterVersion(f"{path} is of version {header[7]}, this release reads version {_MAGIC[7]}")
        found = _open_header(header) if len(header) == HEADER_BYTES else None
        if found is None or found[0] != key or os.fstat(fd).st_size != HEADER_BYTES + found[1]:
            return None
        return found[1]
    finally:
        os.close(fd)


def _open_header(header: bytes | bytearray) -> tuple[bytes, int, int] | None:
    """Key, size in bytes and CRC of the value; None where the header is not one."""
    magic, key, size_bytes, value_crc, header_crc = _HEADER.unpack(header)
    if magic != _MAGIC or crc32(header[:-4]) != header_crc:
        return None
    return key, size_bytes, value_crc
