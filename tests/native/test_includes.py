"""The C files include downwards: no header reaches itself, no .c file is included."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

import skymemory.native

SOURCES = Path(skymemory.native.__file__).parent
INCLUDES = {
    path.name: set(re.findall(r'^#include "([^"]+)"', path.read_text("utf-8"), re.MULTILINE))
    for path in sorted(SOURCES.glob("*.[ch]"))
}


def test_headers_have_no_circles() -> None:
    assert {"packet.h", "ttft.h"} <= INCLUDES.keys()
    TopologicalSorter(INCLUDES).prepare()  # raises CycleError with the circle


def test_what_is_included_is_a_header_of_this_folder() -> None:
    assert {name for names in INCLUDES.values() for name in names} <= {n for n in INCLUDES if n.endswith(".h")}
