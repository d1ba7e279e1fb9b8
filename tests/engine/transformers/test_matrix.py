"""The page of models and uses is what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.engine.transformers.families import FAMILIES, REFUSED, known  # noqa: E402
from tests.engine.transformers.matrix import USES, refused, row  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PAGE = Path(__file__).parents[3] / "docs/reference/models.md"


def of_page(name: str) -> str:
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |")]
    return line


def test_it_is_as_large_as_it_was_meant_to_be() -> None:
    assert len(FAMILIES) >= 60 and len(USES) == 9


@pytest.mark.parametrize("name", FAMILIES)
def test_each_cell_has_the_tokens_of_no_cache_and_the_share_that_the_page_says(name: str) -> None:
    if not known(name):
        pytest.skip("this transformers has no such family, or its states in another form")
    line = row(name)
    if f"transformers {transformers.__version__};" in PAGE.read_text():
        assert line == of_page(name)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_so_for_the_reason_that_the_page_says(name: str) -> None:
    if not known(name):
        pytest.skip("this transformers has no such family")
    line = refused(name)
    if f"transformers {transformers.__version__};" in PAGE.read_text():
        assert line == of_page(name)
