"""Directory of a disk store, and the format of its files.

``format`` names the layout; the process that has the store open locks ``lock``; ``values/`` has a file per value, its
modification time the last use. Links and pipes, which others may have placed, are not opened.

A value's file is written as a ``.part``, renamed, never changed. A power cut may tear it, which its checksum shows; a
``synced`` store flushes bytes and directory entries first.

Another process may take over a directory whose ``lock`` was removed. So nothing is removed, renamed or marked unless we
hold ``lock`` (``is_ours``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import stat
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from skymemory.errors import InvalidInput, LaterFile, LaterVersion
from skymemory.forks import Owner
from skymemory.native import crc32, read_cached
from skymemory.store.base import KEY_BYTES

_log = logging.getLogger(__name__)

_FORMAT = "skymemory disk store 1\n"
_OURS = {"format", "lock", "values"}
# Bytes of ``format`` that may differ if the values prove the store ours: more is another program's file.
_MOST_FLIPPED = 4


@dataclass(frozen=True, slots=True)
class FoundValue:
    """Value found at the start: last use (Unix ns) and end of the lifetime (Unix s)."""

    key: bytes
    size_bytes: int
    used_ns: int
    until_s: float = math.inf
    later: bool = False
    """True for a later release's value; ``size_bytes`` is its file's."""


class StoreDirectory:
    """Directory at ``path``, locked until ``close``; InvalidInput if unwritable, open elsewhere, or not ours."""

    def __init__(self, path: Path, *, synced: bool = False) -> None:
        self._synced = synced
        self.path = path.absolute()
        self.values = self.path / "values"
        self._values_text = f"{self.values}/"
        self.torn = 0  # incomplete files found
        self.has_unsynced_removals = False
        self._lock_fd = -1
        self._relocking = threading.Lock()  # held while a removed lock file is restored
        self._owner = Owner(f"the disk store at {self.path}", self.close)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            if not (self.path / "format").exists():
                self._check_strangers()
            self._lock()
            self._inode = self.path.stat().st_ino
            self._check_format()
            if self.values.is_symlink():
                raise InvalidInput(f"{self.values} is a link: a disk store needs a directory of its own")
            self.values.mkdir(mode=0o700, exist_ok=True)
            _close_to_others(self.path)
            _close_to_others(self.values)
            if synced:
                self._sync_names()
        except OSError as error:
            self.close()
            raise InvalidInput(
                f"no disk store at {self.path}: {error.strerror}: it must be a directory that this user may write"
            ) from error
        except InvalidInput:
            self.close()
            raise

    def _lock(self) -> None:
        """Lock the directory against other processes; InvalidInput if another has it."""
        self._lock_fd = _open_own(self.path / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise InvalidInput(
                f"the disk store at {self.path} is open already, in process {holder}; one process at a time can "
                "use it: use another directory here"
            ) from None
        os.ftruncate(self._lock_fd, 0)
        with contextlib.suppress(OSError):  # if the disk is full, the lock holds without the process id
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    def _check_strangers(self) -> None:
        strangers = sorted(set(os.listdir(self.path)) - _OURS)
        if strangers:
            raise InvalidInput(
                f"{self.path} holds other files ({strangers[0]} …): a disk store needs a directory of its own"
            )

    def _check_format(self) -> None:
        """Check ``format``; write it if missing or damaged."""
        path = self.path / "format"
        fd = _open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            content = os.pread(fd, 2 * len(_FORMAT), 0)
            if content != _FORMAT.encode():
                self._check_torn_format(path, content)
                if content:
                    _log.warning(
                        "%s was damaged (%r), and is written again: the values are this store's", path, content
                    )
                try:
                    os.pwrite(fd, _FORMAT.encode(), 0)
                    os.ftruncate(fd, len(_FORMAT))
                except OSError as error:
                    if error.errno not in FULL:
                        raise  # if the disk is full, the next process writes it
            if self._synced:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _check_torn_format(self, path: Path, content: bytes) -> None:
        """Return if a wrong ``format`` is ours but damaged, to judge by it and the values; else raise InvalidInput."""
        text = content.decode(errors="replace")
        version = text[len(_FORMAT) - 2 :].strip()
        if text.startswith(_FORMAT[:-2]) and version.isascii() and version.isprintable() and version > _FORMAT[-2]:
            raise LaterFile(
                f"{path} says {text.strip()[:40]!r}, written by a later release, expected {_FORMAT.strip()!r}: "
                "use that release, or another directory"
            )
        try:
            ours, foreign = self._examine_values()
        except LaterVersion as error:
            raise LaterFile(f"{path} is damaged, and a later release wrote here: {error}; use that release") from error
        is_torn = all(byte in (0, expected) for byte, expected in zip(content, _FORMAT.encode(), strict=False))
        is_torn = is_torn and not any(content[len(_FORMAT) :])
        flipped = sum(byte != expected for byte, expected in zip(content, _FORMAT.encode(), strict=False))
        is_damaged = not text.strip().isprintable() or (len(content) == len(_FORMAT) and flipped <= _MOST_FLIPPED)
        if (is_torn and not foreign) or (ours and is_damaged):
            if not ours and content:
                self._check_strangers()
            return
        raise InvalidInput(f"{path} says {text.strip()[:40]!r}, expected {_FORMAT.strip()!r}: use another directory")

    def _examine_values(self) -> tuple[bool, bool]:
        """Return two flags: a header proves the values ours; none does, and a file is foreign. A torn file proves
        nothing. Raises LaterVersion.
        """
        ours = foreign = False
        for entry in os.scandir(self.values) if self.values.is_dir() else ():
            key = key_of(entry.name)
            if key is None or not entry.is_file(follow_symlinks=False):
                continue
            if stored_bytes(Path(entry.path), key) is not None:
                ours = True
            elif any(head := _head_of(entry.path)) and head[: len(_MAGIC)] != _MAGIC[: len(head)]:
                foreign = True
        return ours, foreign and not ours

    def scan(self) -> Iterator[FoundValue]:
        """Yield the values; removes parts and incomplete files."""
        with os.scandir(self.values) as entries:
            for entry in entries:
                path = self.values / entry.name
                key = key_of(entry.name)
                if entry.is_dir(follow_symlinks=False):
                    continue
                if key is None:
                    if entry.name.endswith(PART):
                        self.remove(path)
                    continue
                try:
                    size_bytes = stored_bytes(path, key)
                    if size_bytes is not None:
                        yield FoundValue(key, size_bytes, entry.stat().st_mtime_ns, lifetime_of(path))
                        continue
                except LaterVersion:
                    status = entry.stat()
                    yield FoundValue(key, status.st_size, status.st_mtime_ns, later=True)
                    continue
                except OSError as error:
                    if error.errno not in FAULTS_OF_THE_FILE:  # too many open files, for example: it can be read later
                        status = entry.stat(follow_symlinks=False)
                        yield FoundValue(key, max(0, status.st_size - HEADER_BYTES), status.st_mtime_ns)
                        continue
                self.torn += 1
                self.remove(path)

    def is_ours(self) -> bool:
        """Return True if no other process can have opened the directory. A removed ``lock`` is restored."""
        lock = self.path / "lock"
        with self._relocking:
            try:
                return os.path.samestat(os.fstat(self._lock_fd), os.lstat(lock))
            except FileNotFoundError:
                pass
            except OSError:
                return False
            fd = -1
            try:
                if self.path.lstat().st_ino != self._inode:
                    return False
                fd = _open_own(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (OSError, InvalidInput):
                if fd >= 0:
                    os.close(fd)
                return False
            os.close(self._lock_fd)
            self._lock_fd = fd
            return True

    def check_ours(self) -> None:
        if not self.is_ours():
            raise OSError(errno.ESTALE, "the directory was removed, or another process has taken it: open it again")

    def restore_values(self) -> bool:
        """Create a removed folder of values again; False if that fails."""
        try:
            if not self.is_ours():
                return False
            self.values.mkdir(mode=0o700)
            if self._synced:
                self._sync_names()
        except OSError:
            return False
        return True

    def path_of(self, key: bytes) -> Path:
        return self.values / file_name(key)

    def path_text_of(self, key: bytes) -> str:
        return self._values_text + file_name(key)  # a Path takes longer than opening the file

    def part_of(self, key: bytes, number: int) -> Path:
        return self.values / f"{file_name(key)}.{number}{PART}"

    def stamp(self, key: bytes, used_ns: int) -> None:
        with contextlib.suppress(OSError):  # then the value is evicted earlier
            os.utime(self.path_text_of(key), ns=(used_ns, used_ns), follow_symlinks=False)

    def expire(self, key: bytes, until_s: float, *, synced: bool) -> bool:
        """Record the end of a lifetime (Unix time); False if unsupported."""
        try:
            self.check_ours()
            fd = os.open(self.path_text_of(key), os.O_RDONLY | PLAIN)
        except OSError:
            return False
        try:
            if until_s < math.inf:
                os.setxattr(fd, _LIFETIME, b"%d" % (until_s * 1000))
            else:
                try:
                    os.removexattr(fd, _LIFETIME)
                except OSError as error:
                    if error.errno not in (errno.ENODATA, errno.ENOTSUP):
                        raise  # otherwise there was none to remove
            if synced:
                os.fsync(fd)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def remove(self, path: Path) -> bool:
        """Remove a file; False if that fails, or the directory is not ours."""
        try:
            self.check_ours()
            path.unlink(missing_ok=True)
        except OSError:
            return False
        self.has_unsynced_removals = True
        return True

    def free_bytes(self) -> int:
        try:
            status = os.statvfs(self.values)
        except OSError:
            return 0
        return status.f_bavail * status.f_frsize

    def sync(self) -> None:
        self.has_unsynced_removals = False
        try:
            _sync_directory(self.values)
        except OSError:
            self.has_unsynced_removals = True
            raise

    def _sync_names(self) -> None:
        """Flush the entries up to the file system's root."""
        for folder in (self.values, self.path):
            _sync_directory(folder)
        resolved = self.path.resolve()
        device = resolved.stat().st_dev
        for folder in resolved.parents:
            if folder.stat().st_dev != device:
                break
            try:
                _sync_directory(folder)
            except OSError as error:
                if error.errno not in _NO_SYNC:
                    raise

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors of a directory sync to ignore: not ours, or no sync needed.
_NO_SYNC = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _close_to_others(path: Path) -> None:
    status = path.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        path.chmod(status.st_mode & 0o700)


def _open_own(path: Path, flags: int) -> int:
    """Open a file of the store; InvalidInput unless regular."""
    try:
        fd = os.open(path, flags | PLAIN, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise InvalidInput(f"{path} is not a regular file: remove it, or choose another directory") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidInput(f"{path} is not a regular file: remove it, or choose another directory")
    return fd


# Magic, key, bytes of the value, eight zero bytes, CRC-32 of the value, CRC-32 of the bytes before.
_HEADER = struct.Struct(f"<8s{KEY_BYTES}sQ8xII")

HEADER_BYTES = _HEADER.size
_MAGIC = b"SKYVAL\x00\x01"  # last byte: the version; later versions keep the other seven
PART = ".part"
PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Follow no links, wait for no pipes."""

FAULTS_OF_THE_FILE = (errno.ENOENT, errno.EIO, errno.ELOOP, errno.ESPIPE, errno.ENXIO)
"""Errors of the file itself, not of too many open files, for example."""


_LIFETIME = b"user.skymemory.expires_ms"  # file attribute: end of the lifetime, Unix time in milliseconds, as digits


def lifetime_of(path: Path) -> float:
    """Return the end of the lifetime (Unix time, or infinite)."""
    try:
        text = os.getxattr(path, _LIFETIME, follow_symlinks=False)
    except OSError:
        return math.inf
    return int(text) / 1000 if text.isdigit() and len(text) <= 18 else math.inf


def file_name(key: bytes) -> str:
    return key.hex()


def key_of(name: str) -> bytes | None:
    """Return the key in a file's name; None if it is no value's."""
    if len(name) != 2 * KEY_BYTES or name != name.lower():
        return None
    try:
        return bytes.fromhex(name)
    except ValueError:
        return None


def write_part(path: Path, key: bytes, value: memoryview, *, synced: bool) -> None:
    """Write header and value to a new file; an OSError removes it."""
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
    remaining = [part for part in parts if part.nbytes]
    while remaining:
        written = os.writev(fd, remaining)  # may stop early: a disk nearly full, or more than 2 GiB
        while remaining and written >= remaining[0].nbytes:
            written -= remaining.pop(0).nbytes
        if written:
            remaining[0] = remaining[0][written:]


def _head_of(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | PLAIN)
    try:
        return os.pread(fd, HEADER_BYTES, 0)
    finally:
        os.close(fd)


def beginning_of(path: str, size_bytes: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | PLAIN)
    try:
        return os.pread(fd, size_bytes, HEADER_BYTES)
    finally:
        os.close(fd)


def read_value(path: str, key: bytes, out: memoryview) -> bool:
    """Read into ``out``, of the value's size; False if damaged, or another key's."""
    header = bytearray(HEADER_BYTES)
    fd = os.open(path, os.O_RDONLY | PLAIN)
    try:
        # One call reads both: the value directly into ``out``, and the header.
        got_bytes = os.preadv(fd, [header, out] if out.nbytes else [header], 0)
        while HEADER_BYTES <= got_bytes < HEADER_BYTES + out.nbytes:
            more_bytes = os.preadv(fd, [out[got_bytes - HEADER_BYTES :]], got_bytes)
            if not more_bytes:
                return False
            got_bytes += more_bytes
    finally:
        os.close(fd)
    return _is_whole(header, got_bytes, key, out)


def read_value_now(path: str, key: bytes, out: memoryview) -> bool:
    """Read only from the page cache; also False if that would block."""
    header = bytearray(HEADER_BYTES)
    got_bytes = read_cached(path, header, out)
    return got_bytes is not None and _is_whole(header, got_bytes, key, out)


def _is_whole(header: bytearray, got_bytes: int, key: bytes, value: memoryview) -> bool:
    fields = _open_header(header) if got_bytes >= HEADER_BYTES + value.nbytes else None
    return fields is not None and fields[:2] == (key, value.nbytes) and fields[2] == crc32(value)


def stored_bytes(path: Path, key: bytes) -> int | None:
    """Return the value's size; None if damaged. Raises LaterVersion."""
    fd = os.open(path, os.O_RDONLY | PLAIN)
    try:
        header = os.pread(fd, HEADER_BYTES, 0)
        if header[:7] == _MAGIC[:7] and header[7:8] > _MAGIC[7:]:
            raise LaterVersion(f"{path} is of version {header[7]}, this release reads version {_MAGIC[7]}")
        fields = _open_header(header) if len(header) == HEADER_BYTES else None
        if fields is None or fields[0] != key or os.fstat(fd).st_size != HEADER_BYTES + fields[1]:
            return None
        return fields[1]
    finally:
        os.close(fd)


def _open_header(header: bytes | bytearray) -> tuple[bytes, int, int] | None:
    magic, key, size_bytes, value_crc, header_crc = _HEADER.unpack(header)
    if magic != _MAGIC or crc32(header[:-4]) != header_crc:
        return None
    return key, size_bytes, value_crc
