"""Fork safety of sockets, file locks, threads and the memory between them.

A fork copies every descriptor and a single thread: two processes at a socket take each other's answers, both hold a
file lock, and a lock of another thread is never freed. So a resource belongs to the process that opened it: in any
other its calls raise ``WrongProcess``, and a child closes its copies of the descriptors at once.
"""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Any, NoReturn

from skymemory.errors import WrongProcess


class Owner:
    """Owner of ``what``: the process that opens it now. A forked child calls ``let_go``, which may only close
    descriptors: messages to a server or unlocking would affect the parent.
    """

    __slots__ = ("__weakref__", "_let_go", "_process", "_what", "elsewhere")

    def __init__(self, what: str, let_go: Callable[[], object] | None = None) -> None:
        self.elsewhere = False
        self._what = what
        self._process = os.getpid()
        self._let_go = None if let_go is None else weakref.WeakMethod(let_go)
        _owners.add(self)

    def check(self) -> None:
        if self.elsewhere:
            raise WrongProcess(
                f"{self._what} was opened by process {self._process}, and this is process {os.getpid()}, forked from "
                "it: open a new one here, after the fork"
            )

    def let_go(self) -> None:
        if self._let_go is not None and (let_go := self._let_go()) is not None:
            let_go()


_RLock: Any = type(RLock())


class OwnLock(_RLock):  # type: ignore[misc]
    """Reentrant lock; taking it in any process but the opener's raises WrongProcess, as it might never be freed."""

    __slots__ = ("owner",)

    def __init__(self, what: str, let_go: Callable[[], object] | None = None) -> None:
        self.owner = Owner(what, let_go)
        _locks.add(self)


class _ParentsLock(OwnLock):
    """Class of a parent's lock, so that the owner needs no check."""

    __slots__ = ()

    def __enter__(self) -> NoReturn:
        self.owner.check()
        raise AssertionError("a parent's lock whose owner is here")


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Block SIGINT here and in processes started in the block: an unprepared child would print a traceback, or lose
    it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_locks: weakref.WeakSet[OwnLock] = weakref.WeakSet()


def _mark_child() -> None:
    for owner in list(_owners):
        owner.elsewhere = True
    for lock in list(_locks):
        lock.__class__ = _ParentsLock
    for owner in list(_owners):
        with suppress(OSError):  # another thread was just closing it
            owner.let_go()


os.register_at_fork(after_in_child=_mark_child)
