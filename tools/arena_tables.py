"""The tables of docs/benchmarks/arena.md, from the arena's results: ``python -m tools.arena_tables``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"
PAGE, RESULTS = FOLDER / "arena.md", FOLDER / "arena.json"


def page() -> str:
    """The page as it should be."""
    results = json.loads(RESULTS.read_text("utf-8"))
    parts = {name: table(rows) for name, rows in results["tables"].items()}
    parts["summary"] = "\n".join(f"- {line}" for line in results["summary"])
    parts["seeds"] = ", ".join(map(str, results["seeds"]))
    return fill(PAGE, "arena", parts)


def fill(page: Path, mark: str, parts: Mapping[str, str]) -> str:
    """The page with what stands between ``<!-- mark: name -->`` and ``<!-- end -->`` replaced by the part named so."""
    places = re.compile(rf"<!-- {mark}: ([^\n]+) -->\n.*?<!-- end -->", re.DOTALL)
    return places.sub(
        lambda found: f"<!-- {mark}: {found[1]} -->\n\n{parts[found[1]]}\n\n<!-- end -->", page.read_text("utf-8")
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first row is the header."""
    header, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([header, "| --- |" + " ---: |" * (len(rows[0]) - 1), *body])


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
