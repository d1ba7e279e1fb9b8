"""Ctrl-C while libraries are imported ends the command as soon as at any other time.

Large libraries catch what is raised in the middle of an import, or fail by another error later: numpy's lazy names
recurse, transformers names a class that it cannot import. So the first Ctrl-C within an import raises
``KeyboardInterrupt`` as ever, and until control is back in the line that began the import:

1. every other import fails by ``KeyboardInterrupt`` too, so that no library goes on loading for seconds;
2. whatever that line then sees, an end of the import or another error, becomes ``KeyboardInterrupt``.

So the stack unwinds, and what the verb has started before is ended.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from types import FrameType
from typing import Any, NoReturn

_IMPORT_SYSTEM = "<frozen importlib"


class _Refusal(MetaPathFinder):
    """Lets no module be imported in the main thread until ``importer`` runs again."""

    def __init__(self, importer: FrameType) -> None:
        sys.meta_path.insert(0, self)
        importer.f_trace = self._resume
        sys.settrace(lambda frame, event, arg: None)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    def _resume(self, frame: FrameType, event: str, arg: Any) -> NoReturn:
        sys.settrace(None)
        frame.f_trace = None
        sys.meta_path.remove(self)
        raise KeyboardInterrupt


def _importer(frame: FrameType | None) -> FrameType | None:
    """The frame that began the outermost import below ``frame``; None if nothing is being imported."""
    found = None
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT_SYSTEM):
            found = frame.f_back
        frame = frame.f_back
    return found


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    importer = _importer(frame)
    if importer is not None and not any(isinstance(finder, _Refusal) for finder in sys.meta_path):
        _Refusal(importer)
    raise KeyboardInterrupt


@contextmanager
def interruptible_imports() -> Iterator[None]:
    """Treats SIGINT in this way, unless the process ignores it or has a handler of its own."""
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        if ours and signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
