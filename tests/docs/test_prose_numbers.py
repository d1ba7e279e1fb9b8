"""Numbers in prose are listed with what they count; a page that differs from its list is found."""

from __future__ import annotations

import json

import pytest
from tools.prose_numbers import ACCEPTED, PAGES, ROOT, differences, numbers_in


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It hands 584 chunks over.", ["584 chunks"]),
        ("| **1,584** | ≤ 3 µs, p99 |", ["1,584", "≤ 3 µs", "p99"]),
        ("0.58, 0.76; 10⁶ packets", ["0.58", "0.76", "10⁶ packets"]),
        ("two carry × 250, `0.18 s` and `--rate 1.3`", ["× 250", "0.18 s", "1.3"]),
        ("a line\n3\nMB of it", ["3 MB"]),
        ("in <!-- figure: ttft with -->0.48 s<!-- end --> of 2 s", ["figure:ttft_with", "2 s"]),
        ("```text\ntook 3.4 s\n```\n", ["3.4 s"]),
        ("<!-- other: x -->\n4 s\n<!-- end -->", ["4 s"]),
    ],
)
def test_numbers_of_prose(text: str, found: list[str]) -> None:
    assert numbers_in(text) == found


@pytest.mark.parametrize(
    "text",
    [
        "[the page](figure-16.md#3)",
        "<!-- 4 words -->",
        "```bash\nskymemory serve --port 8001\n```\n",
        "<!-- benchmark: tiers -->\n\n| 24 ms |\n\n<!-- end -->",
        "<!-- demo: cells -->\n\n```text\n24 ms\n```\n\n<!-- end -->",
        "two cores",
    ],
)
def test_what_is_no_number_of_prose(text: str) -> None:
    assert numbers_in(text) == []


def test_a_changed_number_and_numbers_that_changed_places_are_found() -> None:
    assert list(differences({"a.md": ["3 ms", "4 s"]}, {"a.md": ["3 ms", "4 s"]})) == []
    removed, added = differences({"a.md": ["3 ms", "4 s"]}, {"a.md": ["3 ms", "5 s"]})
    assert removed.startswith("a.md: no longer says '4 s'")
    assert added.startswith("a.md: says '5 s'")
    assert len(list(differences({"a.md": ["3", "4"]}, {"a.md": ["4", "3"]}))) == 2
    assert len(list(differences({"a.md": ["3"]}, {"b.md": ["3"]}))) == 2


def test_every_page_with_figures_is_listed() -> None:
    listed = json.loads(ACCEPTED.read_text("utf-8"))
    assert list(listed) == [path.relative_to(ROOT).as_posix() for path in PAGES]
    assert {"README.md", "ARCHITECTURE.md", "docs/benchmarks.md", "docs/guide/tiers.md"} < set(listed)
