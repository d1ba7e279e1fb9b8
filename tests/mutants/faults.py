"""The seeded faults as data: which text of which file becomes what, and which tests must notice.

One TOML file an area, in ``faults/``, each a list of ``[[fault]]`` with

- ``name``: what goes wrong, in a few words; no two alike;
- ``file``: below ``src/skymemory``, or below ``flight`` or ``lab`` if it begins so;
- ``was``: text that stands there exactly once; ``becomes``: what a developer might have written instead;
- ``tests``: what is run, as pytest's arguments below ``tests`` (a file, or ``file::test``).

``tests`` at the head of a file are those of its faults that name none.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

FAULTS = Path(__file__).parent / "faults"
SOURCE = Path("src/skymemory")


class BadList(Exception):
    """The list and the tree do not fit each other; the message says where."""


@dataclass(frozen=True, slots=True)
class Fault:
    area: str
    name: str
    file: Path
    """Relative to the tree."""
    was: str
    becomes: str
    tests: tuple[str, ...]
    """Relative to the tree."""

    def applied_to(self, text: str) -> str:
        """Raises BadList where the text to be replaced is not there exactly once."""
        count = text.count(self.was)
        if count != 1:
            raise BadList(
                f"{self.area}: {self.name!r}: its text stands {count} times in {self.file}, not once: the code has "
                f"changed, or the text is too short. Write the fault again in tests/mutants/faults/{self.area}.toml:\n"
                f"{self.was}"
            )
        return text.replace(self.was, self.becomes)


def load(folder: Path = FAULTS) -> list[Fault]:
    """All faults, area by area in the order of their files' names."""
    found: list[Fault] = []
    for path in sorted(folder.glob("*.toml")):
        read = tomllib.loads(path.read_text("utf-8"))
        for entry in read["fault"]:
            tests = tuple(f"tests/{test}" for test in entry.get("tests", read.get("tests", [])))
            file = Path(entry["file"])
            file = file if file.parts[0] in ("flight", "lab") else SOURCE / file
            found.append(Fault(path.stem, entry["name"], file, entry["was"], entry["becomes"], tests))
    return found


def check(faults: Sequence[Fault], tree: Path) -> None:
    """Raises BadList, with all that is wrong, unless every fault can be made in ``tree`` and names tests that exist."""
    wrong: list[str] = list(_twice(fault.name for fault in faults))
    for fault in faults:
        path = tree / fault.file
        if not path.is_file():
            wrong.append(f"{fault.area}: {fault.name!r}: there is no {fault.file}")
            continue
        try:
            fault.applied_to(path.read_text("utf-8"))
        except BadList as error:
            wrong.append(str(error))
        missing = [test for test in fault.tests if not (tree / test.partition("::")[0]).exists()]
        if missing or not fault.tests:
            wrong.append(f"{fault.area}: {fault.name!r}: no tests {', '.join(missing) or 'named'}")
        if fault.was == fault.becomes:
            wrong.append(f"{fault.area}: {fault.name!r} changes nothing")
    if wrong:
        raise BadList("\n".join(wrong))


def _twice(names: Iterable[str]) -> Iterable[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield f"two faults are called {name!r}"
        seen.add(name)
