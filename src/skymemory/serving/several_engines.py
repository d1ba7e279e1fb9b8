"""Several engines on this computer, each a process with a port of its own, forked from one that has imported torch.

Importing takes longer than loading a small model. Forked before torch has computed anything: its threads would not
be there in the child.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.serving.run_engine import EngineSettings, bound, run_engine


def run_engines(settings: EngineSettings, count: int, say: Callable[[str], None]) -> None:
    """``count`` engines until SIGINT or SIGTERM; with a port in ``settings``, at that one and those behind it.

    They end when this process does, whatever ends it.

    Raises:
        InvalidInput: an address that cannot be had, or one for KV events that all would share.
        SkyMemoryError: one of them ended; the others were stopped then.
    """
    for endpoint in (settings.kv_events, settings.kv_replay) if settings.kv_events is not None else ():
        if endpoint is not None and not endpoint.endswith(":*"):
            raise InvalidInput(f"{endpoint!r}: several engines cannot publish at one address; end it with :*")
    listeners: list[socket.socket] = []
    try:
        for at in range(count):
            listeners.append(bound(settings.host, settings.port + at if settings.port else 0))
        sys.stdout.flush()
        line, held = os.pipe()
        children = {_forked(settings, at, listeners, line, held, say) for at in range(count)}
    finally:
        for listener in listeners:
            listener.close()
    os.close(line)
    _wait_for(children)
    os.close(held)


def _forked(
    settings: EngineSettings,
    at: int,
    listeners: Sequence[socket.socket],
    line: int,
    held: int,
    say: Callable[[str], None],
) -> int:
    """The number of the process that serves at ``listeners[at]``."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.close(held)
        for listener in (*listeners[:at], *listeners[at + 1 :]):
            listener.close()
        threading.Thread(target=_end_with, args=(line,), name="line", daemon=True).start()
        run_engine(replace(settings, port=listeners[at].getsockname()[1]), say, listeners[at])
        code = 0
    except SkyMemoryError as error:
        print(f"skymemory: {error}", file=sys.stderr, flush=True)  # noqa: T201
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _end_with(line: int) -> None:
    """The other end is held by the process that forked us, and by no other."""
    while os.read(line, 1):
        pass
    os._exit(1)


def _wait_for(children: set[int]) -> None:
    """Until all have ended. SIGINT and SIGTERM go on to them; when one ends with an error, the others are stopped."""

    def stop(*_: object) -> None:
        for pid in children:
            os.kill(pid, signal.SIGTERM)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    failed = 0
    try:
        while children:
            pid, status = os.wait()
            children.discard(pid)
            if os.waitstatus_to_exitcode(status) and not failed:
                failed = pid
                stop()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if failed:
        raise SkyMemoryError(f"the engine with process number {failed} ended; the others were stopped")
