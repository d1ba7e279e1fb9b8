"""Ctrl-C during imports of libraries ends the command as quickly as at any other time.

Libraries may catch the exception. So after a first Ctrl-C every other import raises ``KeyboardInterrupt`` too, and so
does the line that started the import when control returns to it.
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
    """Import hook that refuses all imports until ``importer`` runs again."""

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
    importer = None
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT_SYSTEM):
            importer = frame.f_back
        frame = frame.f_back
    return importer


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    importer = _importer(frame)
    if importer is not None and not any(isinstance(finder, _Refusal) for finder in sys.meta_path):
        _Refusal(importer)
    raise KeyboardInterrupt


@contextmanager
def interruptible_imports() -> Iterator[None]:
    """Let Ctrl-C end the command also during imports, unless the process has its own handler."""
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
