"""Wall clocks that can be set, of processes that have a C library and load ``wall.c`` before it."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Collection
from pathlib import Path

OTHERS = "all"
"""Every process that is not a host."""


class Walls:
    """One for each of ``hosts``, and one for all other processes that are started with ``environment``."""

    def __init__(self, folder: Path, hosts: Collection[str]) -> None:
        self._walls = folder / "walls"
        self._walls.mkdir()
        self._names = (OTHERS, *hosts)
        self.ahead_s = 0.0
        """Of the others' wall clock."""
        for name in self._names:
            (self._walls / name).write_bytes(struct.pack("d", 0.0))
        library = folder / "wall.so"
        strict = ("-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
        source = Path(__file__).with_name("wall.c")
        subprocess.run([os.environ.get("CC", "cc"), *strict, "-o", library, source], check=True)
        self.environment = {"LD_PRELOAD": str(library), "SKYMEMORY_WALL": str(self._walls)}

    def set(self, ahead_s: float, *names: str) -> None:
        """So far ahead of the right time; without names all of them."""
        for name in names or self._names:
            if name == OTHERS:
                self.ahead_s = ahead_s
            with (self._walls / name).open("r+b") as file:
                file.write(struct.pack("d", ahead_s))
