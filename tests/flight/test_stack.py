"""How deep the stack of the core can get, by GCC's own account of its call graph: no recursion, and a known bound."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.flight.machine import CORE

ENTRIES = (
    "sky_receive",
    "sky_handle_timer",
    "sky_work",
    "sky_gather",
    "sky_next_run",
    "sky_next_timer",
    "sky_greet",
    "sky_satellite_begin",
    "sky_satellite_bytes",
)
MOST_BYTES = 8192
"""Of any call: measured 4,500 with packets, 6,200 at the start, compiled by GCC 12 with -O2 for x86-64."""
_INDIRECT = {"__indirect_call"}
"""Calls by pointer: the clock of the configuration, and what the gate refuses (``sky_send_refusal``)."""


def _graph(folder: Path) -> tuple[dict[str, int], dict[str, set[str]]]:
    """Bytes of stack and callees of every function."""
    sizes: dict[str, int] = {}
    calls: dict[str, set[str]] = {}
    for graph in folder.glob("*.ci"):
        for line in graph.read_text().splitlines():
            names = re.findall(r'(?:title|sourcename|targetname): "([^"]+)"', line)
            if line.startswith("node:") and (size := re.search(r"\\n(\d+) bytes", line)):
                sizes[names[0]] = int(size[1])
            elif line.startswith("edge:"):
                calls.setdefault(names[0], set()).add(names[1])
    return sizes, calls


@pytest.mark.slow
def test_the_stack_is_bounded(tmp_path: Path) -> None:
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no GCC: the depth of the stack is not measured")
    for source in CORE.glob("**/*.c"):
        flags = ("-std=c99", "-O2", "-fcallgraph-info=su", f"-I{CORE}", "-c", str(source), "-o", f"{source.stem}.o")
        subprocess.run((gcc, *flags), cwd=tmp_path, check=True)
    sizes, calls = _graph(tmp_path)
    deepest: dict[str, int] = {}

    def depth(name: str, way: tuple[str, ...]) -> int:
        assert name not in way, f"recursion: {way}"
        if name not in deepest:
            callees = calls.get(name, set()) - _INDIRECT
            deepest[name] = sizes.get(name, 0) + 8 + max((depth(each, (*way, name)) for each in callees), default=0)
        return deepest[name]

    assert {name for name in ENTRIES if name not in sizes} == set()
    assert max(depth(name, ()) for name in ENTRIES) < MOST_BYTES
