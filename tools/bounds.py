"""What ``pyproject.toml`` allows of dependencies: ``python -m tools.bounds lowest|newest EXTRA ...``.

One requirement a line, for ``pip install -r``: ``aiohttp>=3.11.18`` becomes ``aiohttp==3.11.18``, or stays as it is
said. The package's own dependencies are among them. ``make test-bounds`` runs the router's tests with both, ``make
test-bounds-hf`` the engine's.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lowest(said: str) -> str:
    """
    Raises:
        ValueError: it has no lower end, or more than one.
    """
    requirement = Requirement(said)
    ends = [each.version for each in requirement.specifier if each.operator in (">=", "==", "~=")]
    if len(ends) != 1:
        raise ValueError(f"{said!r} says no lower end")
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    marker = f"; {requirement.marker}" if requirement.marker else ""
    return f"{requirement.name}{extras}=={ends[0]}{marker}"


def bounds(project: Path, end: str, extras: list[str]) -> list[str]:
    """``end``: lowest or newest.

    Raises:
        KeyError: there is no such extra.
    """
    table = tomllib.loads(project.read_text("utf-8"))["project"]
    said = [*table["dependencies"], *(each for extra in extras for each in table["optional-dependencies"][extra])]
    return sorted({lowest(each) if end == "lowest" else each for each in said})


if __name__ == "__main__":
    print("\n".join(bounds(PROJECT, sys.argv[1], sys.argv[2:])))
