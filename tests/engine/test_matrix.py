"""The page of models and uses is what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.engine.families import FAMILIES  # noqa: E402
from tests.engine.matrix import row  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PAGE = (Path(__file__).parents[2] / "docs/reference/models.md").read_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_cell_has_the_tokens_of_no_cache_and_the_share_that_the_page_says(family: str) -> None:
    line = row(family)
    if f"transformers {transformers.__version__};" in PAGE:
        assert line in PAGE.splitlines()
