"""What a power cut may leave of a directory, from a record of all that was done to its files.

``Recorder`` records the calls that change files below a folder. ``Recorder.leave(at, dice, folder)`` makes a folder as
it may be after a power cut once ``at`` of them were done. A file system promises no more than this (Pillai et al.,
"All File Systems Are Not Created Equal", OSDI 2014):

- bytes are in a file, and a file has its length, once the *file* was synced. Before that each write may be there, or
  not, or some of its sectors, in any order; what is missing reads as zeros, or the file is shorter;
- a name is in a folder once the *folder* was synced. Before that each creation, renaming and removal may be there or
  not, in any order. A folder whose own name is not there is lost with all that is in it.
"""

from __future__ import annotations

import builtins
import fcntl
import io
import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SECTOR_BYTES = 512
_WRITES, _SYNCS, _NAMINGS = ("write", "writev", "pwrite"), ("fsync", "fdatasync"), ("rename", "replace")


@dataclass(slots=True)
class Change:
    """One call. ``file`` numbers files in the order of their creation; paths are relative to the recorded folder."""

    what: str
    """create, mkdir, write, truncate, sync, sync folder, rename, link, unlink"""
    file: int = -1
    path: str = ""
    to: str = ""
    at: int = 0
    data: bytes = b""


class _RawFile(io.RawIOBase):
    """Writes by ``os.write``, so that it is recorded."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return os.write(self._fd, data)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()


@dataclass
class Recorder:
    """Records what is done below ``folder`` while ``recording``."""

    folder: Path
    changes: list[Change] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.changes)

    @contextmanager
    def recording(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            self._patch(patch)
            yield

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        names: dict[int, tuple[int, str]] = {}
        """Of each descriptor: the number of its file, or -1 of a folder, and its path."""
        files: dict[int, int] = {}
        """The number of each inode."""
        numbers = itertools.count()
        real = {
            name: getattr(os, name)
            for name in (*_WRITES, *_NAMINGS, "open", "close", "ftruncate", "link", "unlink", "mkdir")
        }

        def inside(path: Any) -> str | None:
            if isinstance(path, int):
                return None
            text = os.path.abspath(os.fsdecode(path))
            root = os.fspath(self.folder)
            return os.path.relpath(text, root) if text == root or text.startswith(root + "/") else None

        def add(what: str, **how: Any) -> None:
            self.changes.append(Change(what, **how))

        def opened(path: Any, flags: int, mode: int = 0o777, **how: Any) -> int:
            name = None if how else inside(path)
            new = name is not None and not os.path.lexists(path)
            fd = real["open"](path, flags, mode, **how)
            if name is not None:
                status = os.fstat(fd)
                if new:
                    files[status.st_ino] = next(numbers)
                    add("create", file=files[status.st_ino], path=name)
                names[fd] = files.get(status.st_ino, -1), name
            return int(fd)

        def closed(fd: int) -> None:
            names.pop(fd, None)
            real["close"](fd)

        def wrote(name: str, fd: int, data: Any, *how: Any) -> int:
            if fd not in names:
                return int(real[name](fd, data, *how))
            if name == "pwrite":
                at = how[0]
            else:
                appends = os.O_APPEND & fcntl.fcntl(fd, fcntl.F_GETFL)
                at = os.fstat(fd).st_size if appends else os.lseek(fd, 0, os.SEEK_CUR)
            written = int(real[name](fd, data, *how))
            whole = b"".join(bytes(part) for part in data) if name == "writev" else bytes(data)
            add("write", file=names[fd][0], at=at, data=whole[:written])
            return written

        def synced(fd: int) -> None:  # recorded and not done: the power of the test is not cut
            if fd in names:
                number, path = names[fd]
                add("sync folder" if number < 0 else "sync", file=number, path=path)

        def truncated(fd: int, size: int) -> None:
            real["ftruncate"](fd, size)
            if fd in names:
                add("truncate", file=names[fd][0], at=size)

        def named(name: str, what: str, source: Any, target: Any, **how: Any) -> None:
            before, after = inside(source), inside(target)
            real[name](source, target, **how)
            if before is not None and after is not None:
                add(what, path=before, to=after)

        def removed(path: Any, **how: Any) -> None:
            name = None if how else inside(path)
            real["unlink"](path, **how)
            if name is not None:
                add("unlink", path=name)

        def made(path: Any, *how: Any, **more: Any) -> None:
            real["mkdir"](path, *how, **more)
            if (name := inside(path)) is not None:
                add("mkdir", path=name)

        patch.setattr(os, "open", opened)
        patch.setattr(os, "close", closed)
        for name in _WRITES:
            patch.setattr(os, name, lambda fd, data, *how, name=name: wrote(name, fd, data, *how))
        for name in _SYNCS:
            patch.setattr(os, name, synced)
        patch.setattr(os, "ftruncate", truncated)
        for name in _NAMINGS:
            patch.setattr(os, name, lambda a, b, name=name, **how: named(name, "rename", a, b, **how))
        patch.setattr(os, "link", lambda a, b, **how: named("link", "link", a, b, **how))
        patch.setattr(os, "unlink", removed)
        patch.setattr(os, "mkdir", made)
        patch.setattr(os, "fdopen", _raw_of(os.fdopen))
        patch.setattr(builtins, "open", _raw_of(builtins.open))

    def leave(self, at: int, dice: random.Random, folder: Path) -> None:
        """Make in ``folder``, which is empty, what a power cut after ``at`` changes may leave."""
        done = self.changes[:at]
        contents = self._contents(done, dice)
        folders = self._names(done, dice)
        stack = ["."]
        while stack:
            path = stack.pop()
            for name, number in folders.get(path, {}).items():
                below = name if path == "." else f"{path}/{name}"
                if number < 0:
                    (folder / below).mkdir()
                    stack.append(below)
                else:
                    (folder / below).write_bytes(contents.get(number, b""))

    def _contents(self, done: list[Change], dice: random.Random) -> dict[int, bytes]:
        pending: dict[int, list[Change]] = {}
        contents: dict[int, bytearray] = {}
        for change in done:
            if change.what in ("write", "truncate"):
                pending.setdefault(change.file, []).append(change)
            elif change.what == "sync":
                for earlier in pending.pop(change.file, ()):
                    _apply(contents.setdefault(change.file, bytearray()), earlier)
        mood = dice.choice(("none", "all", "first", "each", "torn"))
        for number, changes in pending.items():
            content = contents.setdefault(number, bytearray())
            first = {"none": 0, "all": len(changes), "first": dice.randint(0, len(changes))}.get(mood)
            for at, change in enumerate(changes):
                if at < first if first is not None else dice.random() < 0.5:
                    _apply(content, change)
                elif mood == "torn" and change.what == "write":
                    _tear(content, change, dice)
        return {number: bytes(content) for number, content in contents.items()}

    @staticmethod
    def _names(done: list[Change], dice: random.Random) -> dict[str, dict[str, int]]:
        """Per folder its names: the number of each file, -1 for a folder."""
        now: dict[str, int] = {}
        """What each path names, had all been done: to know what is renamed."""
        folders: dict[str, dict[str, int]] = {}
        pending: dict[str, list[dict[str, int | None]]] = {}
        for change in done:
            entries: dict[str, int | None] = {}
            if change.what in ("create", "mkdir"):
                now[change.path] = entries[change.path] = change.file
            elif change.what in ("rename", "link"):
                now[change.to] = entries[change.to] = now[change.path]
                if change.what == "rename":
                    del now[change.path]
                    entries[change.path] = None
            elif change.what == "unlink":
                now.pop(change.path, None)
                entries[change.path] = None
            elif change.what == "sync folder":
                for earlier in pending.pop(change.path, ()):
                    _enter(folders.setdefault(change.path, {}), earlier)
            if entries:
                pending.setdefault(os.path.dirname(change.path) or ".", []).append(entries)
        chance = dice.choice((0.0, 0.2, 0.5, 0.8, 1.0))
        for folder, changes in pending.items():
            for entries in changes:
                if dice.random() < chance:
                    _enter(folders.setdefault(folder, {}), entries)
        return folders


def _raw_of(real: Callable[..., Any]) -> Callable[..., Any]:
    def open_raw(file: Any, mode: str = "r", *how: Any, **more: Any) -> Any:
        return _RawFile(file) if isinstance(file, int) and mode == "wb" else real(file, mode, *how, **more)

    return open_raw


def _enter(folder: dict[str, int], entries: dict[str, int | None]) -> None:
    for path, number in entries.items():
        name = os.path.basename(path)
        if number is None:
            folder.pop(name, None)
        else:
            folder[name] = number


def _apply(content: bytearray, change: Change) -> None:
    if change.what == "truncate":
        del content[change.at :]
        content.extend(bytes(change.at - len(content)))
        return
    content.extend(bytes(max(0, change.at - len(content))))
    content[change.at : change.at + len(change.data)] = change.data


def _tear(content: bytearray, change: Change, dice: random.Random) -> None:
    """Some sectors of it; then the file has its new length, or not."""
    end = change.at + len(change.data)
    kept = [start for start in range(change.at, end, SECTOR_BYTES) if dice.random() < 0.5]
    if dice.random() < 0.5:
        _apply(content, Change("write", at=change.at, data=bytes(len(change.data))))
    for start in kept:
        data = change.data[start - change.at : start - change.at + dice.choice((SECTOR_BYTES, SECTOR_BYTES, 100))]
        _apply(content, Change("write", at=start, data=data))
