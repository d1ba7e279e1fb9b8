"""What a fork must not carry over: sockets, locks on files, threads, and the memory between them.

A fork copies every descriptor and one thread. Two processes at one socket take each other's answers, two with one lock
on a file both hold it, a lock that another thread held is never freed, and the threads that a tier works with are not
there. So such a thing belongs to the process that opened it: in any other its calls raise ``WrongProcess``, and the
child's copies of its descriptors are closed as soon as it begins. The parent notices nothing.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from threading import RLock
from types import TracebackType

from skymemory.errors import WrongProcess


class Owner:
    """The process that opens ``what`` now. ``let_go`` is a method, called in a forked child at its very beginning: it
    closes descriptors and does nothing else (no goodbye to a server, no unlocking: both would affect the parent).
    """

    __slots__ = ("__weakref__", "_let_go", "_process", "_what")

    def __init__(self, what: str, let_go: Callable[[], object] | None = None) -> None:
        self._what = what
        self._process = os.getpid()
        self._let_go = None if let_go is None else weakref.WeakMethod(let_go)
        if let_go is not None:
            _with_descriptors.add(self)

    @property
    def elsewhere(self) -> bool:
        """Whether this is another process."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Raises WrongProcess in any other process."""
        if os.getpid() != self._process:
            raise WrongProcess(
                f"{self._what} was opened by process {self._process}, and this is process {os.getpid()}, forked from "
                "it: open one of its own here, after the fork"
            )

    def let_go(self) -> None:
        if self._let_go is not None and (let_go := self._let_go()) is not None:
            let_go()


class OwnLock:
    """A reentrant lock of the process that opened ``what``. In any other, where it might never be freed, taking it
    raises WrongProcess.
    """

    __slots__ = ("_lock", "owner")

    def __init__(self, what: str, let_go: Callable[[], object] | None = None) -> None:
        self.owner = Owner(what, let_go)
        self._lock = RLock()

    def __enter__(self) -> None:
        self.owner.check()
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


_with_descriptors: weakref.WeakSet[Owner] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for owner in list(_with_descriptors):
        with suppress(OSError):  # another thread was just closing it
            owner.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)
