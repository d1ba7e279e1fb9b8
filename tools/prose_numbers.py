"""Every number in prose, as it was accepted: ``python -m tools.prose_numbers`` accepts what the pages say now.

``prose_numbers.json`` lists the numbers of each page in their order, with the word after each, and the names of marked
figures between them. ``python -m tools.prose_figures --check`` fails if a page and its list differ: a number that
changes is seen in both. A measured one is marked instead, and then written from its run.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    path
    for pattern in ("README.md", "ARCHITECTURE.md", "docs/*.md", "docs/guide/*.md", "docs/benchmarks/*.md")
    for path in sorted(ROOT.glob(pattern))
    if not path.read_text("utf-8").startswith("<!-- Generated")
]
ACCEPTED = Path(__file__).with_name("prose_numbers.json")

GENERATED = re.compile(r"<!-- (?:benchmark|arena|admission|demo): [^\n]+ -->\n.*?<!-- end -->", re.DOTALL)
"""Parts that are compared with the JSON of their runs."""
MARKED = re.compile(r"<!-- figure: ([^>]+?) -->(.*?)<!-- end -->", re.DOTALL)
_LISTING = re.compile(r"^( *)(```+)(?!text)\w+\n.*?^\1\2 *$", re.DOTALL | re.MULTILINE)
"""Code and commands; what a command printed (``text``) counts as prose."""
_UNSEEN = re.compile(r"<!--.*?-->|\]\([^)]*\)", re.DOTALL)
_MARKUP = re.compile(r"[|*]")
_FIGURE = "figure:"


def numbers_in(text: str) -> list[str]:
    """Numbers of a page and names of its figures, in their order."""
    for pattern in (GENERATED, _LISTING):
        text = pattern.sub(" ", text)
    text = MARKED.sub(lambda found: f" {_FIGURE}{found[1].replace(' ', '_')} ", text)
    words = [word.strip("`()[],.;:") for word in _MARKUP.sub(" ", _UNSEEN.sub(" ", text)).split()]
    found = []
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        if word.startswith(_FIGURE):
            found.append(word)
        elif _has_number(word):
            sign = before if re.fullmatch(r"[×≤≥<>=≈~±−+]+", before) else ""
            unit = after if re.match(r"[%×]|[^\W\d]*$", after) else ""
            found.append(" ".join(filter(None, (sign, word, unit))))
    return found


def _has_number(word: str) -> bool:
    return any(map(str.isnumeric, word))


def numbers_of_pages() -> dict[str, list[str]]:
    return {path.relative_to(ROOT).as_posix(): numbers_in(path.read_text("utf-8")) for path in PAGES}


def differences(accepted: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """What stands in one of both alone."""
    for page in sorted({*accepted, *now}):
        for line in difflib.ndiff(accepted.get(page, []), now.get(page, [])):
            if line[0] in "+-":
                verb = "says" if line[0] == "+" else "no longer says"
                advice = "mark it if it was measured, else accept it with python -m tools.prose_numbers"
                yield f"{page}: {verb} {line[2:]!r}: {advice}"


def faults() -> Iterator[str]:
    return differences(json.loads(ACCEPTED.read_text("utf-8")), numbers_of_pages())


if __name__ == "__main__":
    ACCEPTED.write_text(json.dumps(numbers_of_pages(), indent=1, ensure_ascii=False) + "\n", "utf-8")
