"""Write what the demos print into docs/guide/demos.md, from runs of them: `python -m tools.demo_outputs [NAME…]`.

A block of the page stands between `<!-- demo: NAME -->` and `<!-- end -->`. Only the conductor's is the same on every
machine; a test compares it with the page. The others take minutes, and a machine that does nothing else. What was
printed is kept in docs/benchmarks/demo_outputs.json with its machine: `python -m tools.prose_figures --check` compares
the page with it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guide" / "demos.md"
OUTPUTS = ROOT / "docs" / "benchmarks" / "demo_outputs.json"


@dataclass(frozen=True, slots=True)
class Shown:
    """The lines of a demo's output that the page shows: those from the first that begins with ``first``, up to the next
    that begins with ``end``; and what prose says of the whole output, by patterns with one group.
    """

    words: tuple[str, ...]
    first: str
    end: str = "\0"
    counts: tuple[str, ...] = ()


HANDED_OVER = r"([\d,]+) chunks handed over"
DEMOS = {
    "table-3": Shown((), "Table 3, here", "TTFT: to the first", (HANDED_OVER,)),
    "motion": Shown(("motion",), "flown", "done;"),
    "route": Shown(("route",), "strategy ", "every request"),
    "conductor": Shown(("conductor", "--no-play"), "scheduler ", "took "),
    "vllm": Shown(("vllm",), "server ", "took "),
    "cells": Shown(("cells",), "the cache  ", "took "),
}


def excerpt(printed: str, shown: Shown) -> str:
    """The shown lines of what a demo printed."""
    lines = printed.splitlines()
    begin = next((at for at, line in enumerate(lines) if line.startswith(shown.first)), None)
    if begin is None:
        raise SystemExit(f"no line of the output begins with {shown.first!r}:\n{printed}")
    rest = lines[begin:]
    end = next((at for at, line in enumerate(rest) if line.startswith(shown.end)), len(rest))
    return "\n".join(rest[:end]).strip()


def run(shown: Shown) -> str:
    """Run the demo and return what it printed."""
    command = [sys.executable, "-m", "skymemory", "demo", *shown.words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def block_of(name: str, page: str) -> re.Match[str]:
    """The block of a demo in the page: before, shown lines, behind."""
    found = re.search(rf"(<!-- demo: {name} -->\n+```text\n)(.*?)(\n```\n+<!-- end -->)", page, re.DOTALL)
    if found is None:
        raise SystemExit(f"{PAGE} has no block `<!-- demo: {name} -->`")
    return found


def outputs() -> dict[str, dict[str, Any]]:
    """What each demo printed when it was last run for the page: lines, counts, versions."""
    kept: dict[str, dict[str, Any]] = json.loads(OUTPUTS.read_text("utf-8"))
    return kept


def counted(printed: str, shown: Shown) -> dict[str, str]:
    """What each pattern of ``counts`` finds in the output."""
    found = {pattern: re.search(pattern, printed) for pattern in shown.counts}
    if missing := [pattern for pattern, match in found.items() if match is None]:
        raise SystemExit(f"the output has no {', '.join(missing)}:\n{printed}")
    return {pattern: match[1] for pattern, match in found.items() if match}


def faults() -> Iterator[str]:
    """Blocks of the page that are not what was printed."""
    kept, page = outputs(), PAGE.read_text("utf-8")
    for name in DEMOS:
        if block_of(name, page).group(2) != "\n".join(kept[name]["lines"]):
            yield f"{PAGE.relative_to(ROOT)}: demo {name} did not print this: run python -m tools.demo_outputs {name}"


def main(names: list[str]) -> None:
    from benchmarks._bench import versions

    for name in names or list(DEMOS):
        if name not in DEMOS:
            raise SystemExit(f"no demo {name!r}; expected some of {', '.join(DEMOS)}")
        printed = run(DEMOS[name])
        text, counts = excerpt(printed, DEMOS[name]), counted(printed, DEMOS[name])
        kept = {**outputs(), name: {"versions": versions(), "counts": counts, "lines": text.splitlines()}}
        page = PAGE.read_text("utf-8")
        found = block_of(name, page)
        PAGE.write_text(page[: found.start(2)] + text + page[found.end(2) :], "utf-8")
        OUTPUTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
