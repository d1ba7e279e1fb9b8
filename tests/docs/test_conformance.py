"""Every test that the conformance page names is there, in the file it names, and every row names one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/conformance.md").read_text("utf-8")
ROWS = re.findall(r"^\| (\d+) \|.*$", PAGE, re.MULTILINE)
NAMED = re.findall(r"\[`(test_\w+)`\]\((?:\.\./)+([\w/.]+)\)", PAGE)


def test_every_test_that_is_named_exists() -> None:
    missing = [f"{file}::{name}" for name, file in NAMED if f"\ndef {name}(" not in (ROOT / file).read_text("utf-8")]
    assert missing == []


def test_every_row_names_a_test_and_rows_are_numbered_through() -> None:
    assert [int(number) for number in ROWS] == list(range(1, len(ROWS) + 1)) and len(ROWS) >= 20
    bare = [line for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line) and not re.search(r"\[`test_", line)]
    assert bare == []
