"""The page of the daemon's commands says what the code does."""

from __future__ import annotations

from tools.redis_reference import PAGE, page


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m tools.redis_reference"
