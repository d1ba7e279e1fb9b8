"""The satellite in C on other processors: 32 bits, big-endian, with other rules for alignment and for `char`."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.flight.fuzz import stories

FLIGHT = Path(__file__).parents[2] / "flight"
NATIVE = "cc"
PROCESSORS = {
    "sparc64-linux-gnu-gcc -m32": ("qemu-sparc32plus", "32 bits, big-endian, numbers at their own addresses only"),
    "arm-linux-gnueabihf-gcc": ("qemu-arm", "32 bits, `char` without a sign"),
}
"""By compiler: Debian's gcc and libc for them (gcc-multilib-sparc64-linux-gnu), and qemu-user. Not PowerPC: qemu
refuses an instruction of its libm.
"""


def inputs() -> Iterator[bytes]:
    """Stories of every kind of event, and each once more with bytes changed."""
    draw = random.Random(2)
    for story in stories():
        yield story
        changed = bytearray(story)
        for _ in range(4):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        yield bytes(changed)


def replayed(compiler: str, folder: Path, *runner: str) -> list[str]:
    """What each input led to."""
    program = folder / compiler.replace(" ", "")
    subprocess.run(["make", "-s", "-C", FLIGHT, f"CC={compiler}", f"REPLAY={program}", program], check=True)
    given = b"".join(len(one).to_bytes(2, "big") + one for one in inputs())
    done = subprocess.run([*runner, program], input=given, stdout=subprocess.PIPE, check=True)
    return done.stdout.decode().split()


def compiles(compiler: str, folder: Path) -> bool:
    """Also a program without dynamic libraries."""
    empty = folder / "empty.c"
    empty.write_text("int main(void) { return 0; }")
    command = [*compiler.split(), "-static", "-o", empty.with_suffix(""), empty]
    return shutil.which(command[0]) is not None and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("compiler", PROCESSORS)
def test_every_packet_and_state_is_the_same_on_another_processor(compiler: str, tmp_path: Path) -> None:
    emulator, what = PROCESSORS[compiler]
    if not compiles(NATIVE, tmp_path) or not compiles(compiler, tmp_path) or shutil.which(emulator) is None:
        pytest.skip(f"{compiler} with its libc, or {emulator}, is not here, for a processor of {what}")
    here, there = replayed(NATIVE, tmp_path), replayed(compiler, tmp_path, emulator)
    assert len(here) == len(list(inputs())) and len(set(here)) > len(here) / 2
    assert there == here
