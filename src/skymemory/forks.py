"""What a fork must not carry over: sockets, locks on files, threads, and the memory between them.

A fork copies every descriptor and one thread. Two processes at one socket take each other's answers, two with one lock
on a file both hold it, a lock that another thread held is never freed, and the threads that a tier works with are not
there. So such a thing belongs to the process that opened it: in any other its calls raise ``WrongProcess``, and the
child's copies of its descriptors are closed as soon as it begins. The parent notices nothing.

Nothing is checked by process id on the way of a read: the interpreter calls ``_mark_child`` in each forked child, which
marks all owners and locks of the parent.
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
    """The process that opens ``what`` now. ``let_go`` is a method, called in a forked child at its very beginning: it
    closes descriptors and does nothing else (no goodbye to a server, no unlocking: both would affect the parent).
    """

    __slots__ = ("__weakref__", "_let_go", "_process", "_what", "elsewhere")

    def __init__(self, what: str, let_go: Callable[[], object] | None = None) -> None:
        self.elsewhere = False
        """Whether this is another process."""
        self._what = what
        self._process = os.getpid()
        self._let_go = None if let_go is None else weakref.WeakMethod(let_go)
        _owners.add(self)

    def check(self) -> None:
        """Raises WrongProcess in any other process."""
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
    """A reentrant lock of the process that opened ``what``. In any other, where it might never be freed, taking it
    raises WrongProcess.
    """

    __slots__ = ("owner",)

    def __init__(self, what: str, let_go: Callable[[], object] | None = None) -> None:
        self.owner = Owner(what, let_go)
        _locks.add(self)


class _ParentsLock(OwnLock):
    """What an ``OwnLock`` is in a forked child: so that taking one stays as cheap as any lock elsewhere."""

    __slots__ = ()

    def __enter__(self) -> NoReturn:
        self.owner.check()
        raise AssertionError("a parent's lock whose owner is here")


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Holds SIGINT back here, and from their start in processes that are started within: a terminal sends it to all,
    and a child that is not yet prepared for it would print where it was, or lose it.
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
