"""What ``pyproject.toml`` allows of dependencies: ``python -m tools.bounds lowest|newest EXTRA ...``.

One requirement a line, for ``pip install -r``: ``aiohttp>=3.11.18`` becomes ``aiohttp==3.11.18``, or stays as it is
said; of several lower ends of one package the highest counts. The package's own dependencies are among them. ``make
test-bounds`` runs the router's tests with both, ``make test-bounds-hf`` the engine's.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lower_end(requirement: Requirement) -> Version:
    """
    Raises:
        ValueError: it has no lower end, or more than one.
    """
    ends = [part.version for part in requirement.specifier if part.operator in (">=", "==", "~=")]
    if len(ends) != 1:
        raise ValueError(f"{str(requirement)!r} says no lower end")
    return Version(ends[0])


def lowest(said: Iterable[str]) -> Iterator[str]:
    """Yield each package once, at the highest of its lower ends."""
    ends: dict[tuple[str, str], Version] = {}
    extras: dict[tuple[str, str], set[str]] = {}
    for requirement in map(Requirement, said):
        package = canonicalize_name(requirement.name), f"; {requirement.marker}" if requirement.marker else ""
        ends[package] = max(lower_end(requirement), ends.get(package, Version("0")))
        extras.setdefault(package, set()).update(requirement.extras)
    for (name, marker), end in ends.items():
        bracket = f"[{','.join(sorted(extras[name, marker]))}]" if extras[name, marker] else ""
        yield f"{name}{bracket}=={end}{marker}"


def bounds(project: Path, end: str, extras: list[str]) -> list[str]:
    """``end``: lowest or newest.

    Raises:
        KeyError: there is no such extra.
    """
    table = tomllib.loads(project.read_text("utf-8"))["project"]
    said = [*table["dependencies"], *(line for extra in extras for line in table["optional-dependencies"][extra])]
    return sorted(set(lowest(said) if end == "lowest" else said))


if __name__ == "__main__":
    print("\n".join(bounds(PROJECT, sys.argv[1], sys.argv[2:])))
