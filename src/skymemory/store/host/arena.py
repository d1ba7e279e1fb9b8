"""Folder of a host arena: files that its owner makes and its clients map.

The owner locks ``directory``, a client the ``pages/N`` by which it holds values: the kernel frees both locks however a
process ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import mmap
import os
import secrets
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path

from skymemory import native
from skymemory.errors import InvalidInput, os_reason
from skymemory.store.host.layout import PAGE_BYTES, ArenaShape, instance_of, is_of_boot, write_page_head
from skymemory.units import format_size

_PIECE_BYTES = 256 << 20


def default_folder() -> Path:
    return Path("/dev/shm") / f"skymemory-{os.getuid()}" / "host"


SOCKET, _LOCK = "socket", "lock"
_LONGEST_SOCKET = 107
"""Bytes of a Unix socket's path, by Linux."""


def own_folder(folder: Path, *, make: bool = True) -> None:
    """Make the folder if absent; refuse a folder in which another user may write, or may have put it, and one with
    another program's files.
    """
    if (too_long := len(os.fsencode(folder / SOCKET)) - _LONGEST_SOCKET) > 0:
        raise InvalidInput(f"host arena {folder}: a path {too_long} bytes too long for the socket in it")
    ours = [folder.parent, folder] if folder == default_folder() else [folder]
    try:
        if make:
            ours[0].parent.mkdir(parents=True, exist_ok=True)
            for path in ours:
                path.mkdir(mode=0o700, exist_ok=True)
        states = [path.stat() for path in ours if make or path.exists()]
        # An arena's owner makes the lock first.
        has_files = any((folder / name).exists() for name in ("directory", "values", "pages", SOCKET))
        is_foreign = make and has_files and not (folder / _LOCK).exists()
    except (FileExistsError, NotADirectoryError) as error:
        raise InvalidInput(f"host arena {folder}: expected a folder, and this is none") from error
    except OSError as error:
        raise InvalidInput(f"host arena {folder}: {os_reason(error)}") from error
    if any(state.st_uid != os.getuid() or state.st_mode & (stat.S_IWOTH | stat.S_IWGRP) for state in states):
        raise InvalidInput(f"host arena {folder}: expected a folder of this user's that no other user may write in")
    if is_foreign:
        raise InvalidInput(f"host arena {folder}: another program's files are there: expected an empty folder")


def _locked(path: Path, flags: int) -> int | None:
    """Open and lock a file; None if another process holds the lock, or has removed the file meanwhile."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(fd, path):
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _is_at(fd: int, path: Path) -> bool:
    """Return True if this file is still the one at the path."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _available_bytes() -> float:
    """Return the memory that can be taken without swapping, as the kernel estimates it."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return math.inf


def _boot() -> bytes:
    """Return the name of this boot of the computer; another one each time if it cannot be read."""
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()).bytes
    except (OSError, ValueError):
        return secrets.token_bytes(16)


class OwnedArena:
    """Arena of this process: an ended owner's arena of the same size, else a new arena.

    Raises InvalidInput if another process owns it, or the memory is too small.
    """

    def __init__(self, folder: Path, shape: ArenaShape) -> None:
        own_folder(folder)
        self.folder, self.shape = folder, shape
        # The lock's file stays for good: of a file that is removed, two processes could each lock one.
        fd = _locked(folder / _LOCK, os.O_RDWR | os.O_CREAT)
        if fd is None:
            raise InvalidInput(
                f"host arena {folder}: another process serves it: attach by host://{folder}, or end that one"
            )
        self.fd = fd
        try:
            (folder / "pages").mkdir(mode=0o700, exist_ok=True)
            self.is_new = not self._fits()
            if self.is_new:
                self._make()
            self.directory = map_write(folder / "directory", shape.directory_bytes)
            self.values = map_write(folder / "values", shape.values_bytes)
        except BaseException:
            os.close(fd)
            raise
        with contextlib.suppress(AttributeError, OSError):
            self.values.madvise(mmap.MADV_HUGEPAGE)
        self.instance = instance_of(self.directory)
        self.has_times = is_of_boot(self.directory, _boot())
        """Whether values expire when the directory says: its times are of this computer's clock."""

    def _fits(self) -> bool:
        """Return True if the files of an earlier owner have this shape."""
        try:
            values_bytes = (self.folder / "values").stat().st_size
            directory_bytes = (self.folder / "directory").stat().st_size
        except FileNotFoundError:
            return False
        if directory_bytes != self.shape.directory_bytes or values_bytes != self.shape.values_bytes:
            return False
        with map_read(self.folder / "directory") as directory:
            return self.shape.is_of(directory)

    def _make(self) -> None:
        # Clients of the arena before keep their mappings of it: its files are removed, and never changed.
        for path in (self.folder / "directory", self.folder / "values", *(self.folder / "pages").iterdir()):
            path.unlink(missing_ok=True)
        self._check_free()
        fd = os.open(self.folder / "values", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Memory that is missing later would end the processes that touch it (SIGBUS): all is taken now.
            for begin in range(0, self.shape.values_bytes, _PIECE_BYTES):
                os.posix_fallocate(fd, begin, min(_PIECE_BYTES, self.shape.values_bytes - begin))
            self._make_directory()
        except OSError as error:
            (self.folder / "values").unlink()
            self._check_free(error)
        finally:
            os.close(fd)

    def _check_free(self, error: OSError | None = None) -> None:
        """Refuse a size beyond what is free: taking it would end this process, or another."""
        needed_bytes = self.shape.values_bytes + self.shape.directory_bytes
        state = os.statvfs(self.folder)
        free_bytes = min(state.f_bavail * state.f_frsize, _available_bytes())
        if error is None and needed_bytes <= free_bytes:
            return
        hint = (
            ": raise its size (docker: --shm-size), or lower the budget"
            if not error or error.errno == errno.ENOSPC
            else ""
        )
        raise InvalidInput(
            f"host arena {self.folder}: {format_size(needed_bytes)} of shared memory are needed, "
            f"{format_size(free_bytes)} are free{hint}"
        ) from error

    def _make_directory(self) -> None:
        """Make the directory whole before it has its name."""
        path = self.folder / "directory.new"
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, self.shape.directory_bytes)
            with mmap.mmap(fd, self.shape.directory_bytes) as directory:
                self.shape.write_head(directory, secrets.randbits(64), secrets.token_bytes(16))
            path.rename(self.folder / "directory")
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def new_page(self, number: int) -> Path:
        """Make the page of a client, whole before it has its name; its number is new. Raises InvalidInput without
        memory for it.
        """
        path = self.folder / "pages" / f"{number}"
        made = path.with_suffix(".new")
        try:
            fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, PAGE_BYTES)
                with mmap.mmap(fd, PAGE_BYTES) as page:
                    write_page_head(page)
                made.rename(path)
            finally:
                os.close(fd)
        except OSError as error:
            made.unlink(missing_ok=True)
            raise InvalidInput(f"host arena {self.folder}: no page for a client: {os_reason(error)}") from error
        return path

    def pages(self) -> list[int]:
        """Return the numbers of pages; what a killed owner left half made is removed."""
        found = list((self.folder / "pages").iterdir())
        for path in found:
            if path.suffix == ".new":
                path.unlink()
        return sorted(int(path.name) for path in found if path.name.isdecimal())

    def give_memory_back(self, kept: Iterable[tuple[int, int]]) -> None:
        """Free the memory of ``values`` for all who map it, but for ``kept`` (begin, size), ascending."""
        begin = 0
        for kept_begin, kept_bytes in (*kept, (self.shape.values_bytes, 0)):
            end = kept_begin // mmap.PAGESIZE * mmap.PAGESIZE
            if end > begin:
                with contextlib.suppress(AttributeError, OSError):
                    self.values.madvise(mmap.MADV_REMOVE, begin, end - begin)
            begin = -(-(kept_begin + kept_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE

    def unmap(self) -> None:
        """Unmap the files; values in use are unmapped with their last view."""
        for mapped in (self.directory, self.values):
            with contextlib.suppress(BufferError):
                mapped.close()

    def let_go(self) -> None:
        """Close a forked child's copy of the locked descriptor."""
        if self.fd >= 0:
            os.close(self.fd)

    def close(self, keep: bool) -> None:
        """Give the arena up; remove the files unless ``keep``, or if the folder is another owner's by now."""
        if not keep and _is_at(self.fd, self.folder / _LOCK):
            for path in (self.folder / "values", *(self.folder / "pages").iterdir()):
                path.unlink(missing_ok=True)
            (self.folder / "directory").unlink(missing_ok=True)
        os.close(self.fd)
        self.fd = -1


def reader_of(directory: mmap.mmap, values: mmap.mmap, page: Path) -> native.HostReader:
    """Return a reader with this page, locked while the reader or a value that it holds is in use.

    Raises InvalidInput if another process has the page.
    """
    fd = _locked(page, os.O_RDWR)
    if fd is None:
        raise InvalidInput(f"host arena: page {page} is another client's")
    try:
        return native.HostReader(directory, values, fd)
    except BaseException:
        os.close(fd)
        raise


def is_held(path: Path) -> bool:
    """Return True if a living process has this page."""
    try:
        fd = _locked(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:  # no descriptor is left: nothing is known
        return True
    if fd is None:
        return path.exists()
    os.close(fd)
    return False


def map_read(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def map_write(path: Path, size_bytes: int) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), size_bytes)
