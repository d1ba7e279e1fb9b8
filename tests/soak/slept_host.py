"""A host process whose computer can be put to sleep by a file.

The file holds the seconds that the computer has slept so far, as a double. They are added to the wall clock and to the
clock that counts time asleep, and not to ``CLOCK_MONOTONIC``, by which the event loop goes: so Linux has it after a
suspend. The sleep itself is a stopped process. A host in C finds the same by ``slept.c``.
"""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import time
from pathlib import Path
from typing import NoReturn

from skymemory.cli.main import main
from skymemory.testbed.flight import DAEMON_SETTING
from skymemory.transport import udp_host, unix_clock


def sleepy(file: Path) -> unix_clock.UnixClock:
    """The clock of a computer that has slept for what ``file`` says."""
    with file.open("rb") as opened:
        view = mmap.mmap(opened.fileno(), 8, access=mmap.ACCESS_READ)
    running_s, slept = unix_clock.running_s, struct.Struct("d")
    return unix_clock.UnixClock(
        lambda: time.time() + slept.unpack_from(view)[0], lambda: running_s() + slept.unpack_from(view)[0]
    )


def fall_asleep(file: Path, seconds: float) -> None:
    """Written in its place: who reads a mapped file while it is empty, as a new one is, is killed (SIGBUS)."""
    with file.open("r+b") as opened:
        opened.write(struct.pack("d", seconds))


FLIGHT = Path(__file__).parents[2] / "flight"
DYNAMIC = FLIGHT.with_name("build") / "flight" / "skymemory-flight-dynamic"
"""A daemon whose clocks can be exchanged: the installed one may be linked statically."""


def build(asleep: Path) -> None:
    """``slept.c`` beside the file, and the daemon that loads it, for hosts in C; needs a C compiler and make."""
    from tests.flight.daemon import build_lock  # not in every host, which would import pytest

    source, made = Path(__file__).with_name("slept.c"), asleep.with_suffix(".so")
    strict = ("-O2", "-Wall", "-Wextra", "-Werror")
    subprocess.run([os.environ.get("CC", "cc"), *strict, "-shared", "-fPIC", "-o", made, source], check=True)
    with build_lock():
        subprocess.run(["make", "-s", "-C", FLIGHT, "dynamic"], check=True)


def run(arguments: list[str]) -> NoReturn:
    """``FILE`` and what the command line of ``skymemory`` takes."""
    asleep = Path(arguments[0])
    if (library := asleep.with_suffix(".so")).exists():  # for the daemon that this process may become
        os.environ |= {"LD_PRELOAD": str(library), "SKYMEMORY_SLEPT": str(asleep), DAEMON_SETTING: str(DYNAMIC)}
    udp_host.UnixClock = lambda: sleepy(asleep)  # type: ignore[assignment,misc]
    raise SystemExit(main(arguments[1:]))
