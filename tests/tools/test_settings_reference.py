"""docs/reference/settings.md is generated, and current."""

from __future__ import annotations

import pytest

pytest.importorskip("skymemory_lab", reason="the laboratory is not installed")

from tools.settings_reference import PAGE, page


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m tools.settings_reference"
