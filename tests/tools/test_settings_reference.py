"""docs/reference/settings.md is generated, and current."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("skymemory_lab", reason="the laboratory is not installed")

from tools.settings_reference import PAGE, SECTIONS, VERBS, page

from skymemory.config import known_keys
from skymemory.errors import InvalidInput
from skymemory.testbed.settings import SkySettings


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m tools.settings_reference"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 20 * "9", "", [], {}], ids=range(7))
def test_every_key_refuses_values_that_are_none_or_reads_finite_ones(value: object) -> None:
    keys = [key for kind in (SkySettings, *SECTIONS.values(), *VERBS.values()) for key in known_keys(kind).items()]
    assert len(keys) > 85
    for name, key in keys:
        try:
            read = key.metadata["read"](value)
        except InvalidInput as error:
            assert len(str(error)) < 400, name
            continue
        for number in read if isinstance(read, list | tuple) else [read]:
            if isinstance(number, int | float):
                assert math.isfinite(float(number)), (name, number)
