"""A host process whose computer can be put to sleep by a file.

The file holds the seconds that the computer has slept so far, as a double. They are added to the wall clock and to the
clock that counts time asleep, and not to ``CLOCK_MONOTONIC``, by which the event loop goes: so Linux has it after a
suspend. The sleep itself is a stopped process.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import NoReturn

from skymemory.cli.main import main
from skymemory.transport import udp_host, udp_socket


def sleepy(file: Path) -> udp_socket.UnixClock:
    """The clock of a computer that has slept for what ``file`` says."""
    with file.open("rb") as opened:
        view = mmap.mmap(opened.fileno(), 8, access=mmap.ACCESS_READ)
    running_s, slept = udp_socket.running_s, struct.Struct("d")
    return udp_socket.UnixClock(
        lambda: time.time() + slept.unpack_from(view)[0], lambda: running_s() + slept.unpack_from(view)[0]
    )


def run(arguments: list[str]) -> NoReturn:
    """``FILE`` and what the command line of ``skymemory`` takes."""
    asleep = Path(arguments[0])
    udp_host.UnixClock = lambda: sleepy(asleep)  # type: ignore[assignment,misc]
    raise SystemExit(main(arguments[1:]))
