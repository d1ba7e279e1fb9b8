"""Rules and their options by name."""

from __future__ import annotations

import pytest

from skymemory.conductor.admission.goodput import Goodput
from skymemory.conductor.admission.registry import NAMES, RULES, admission, options_of
from skymemory.conductor.request import Slo
from skymemory.errors import InvalidInput

SLO = Slo(10.0, 0.1)


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_is_made_by_its_name_and_has_a_line_for_help(name: str) -> None:
    assert admission(name, SLO).name == name
    assert 10 < len(RULES[name].description) < 110


def test_options_are_taken_as_words_too() -> None:
    rule = admission("goodput", SLO, window_s="30")
    assert isinstance(rule, Goodput)
    assert rule.settings.window_s == 30.0


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("godput", {}, "did you mean 'goodput'"),
        ("zzz", {}, "expected one of all, baseline"),
        ("goodput", {"windows": 3}, "did you mean 'window_s'"),
        ("predicted", {"window_s": 3}, "there are none"),
        ("goodput", {"window_s": "long"}, "option 'window_s' of admission rule 'goodput' is 'long'; expected a number"),
        ("goodput", {"window_s": 0}, "above 0"),
    ],
)
def test_what_is_not_there_is_an_error_that_names_the_nearest(name: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        admission(name, SLO, **options)


def test_options_can_be_listed() -> None:
    assert options_of("all") == {}
    assert "window_s" in options_of("goodput")
    with pytest.raises(InvalidInput, match="no admission rule"):
        options_of("nothing")
