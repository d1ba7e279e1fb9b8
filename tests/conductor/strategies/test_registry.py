"""Strategies and their options by name."""

from __future__ import annotations

from dataclasses import fields

import pytest
from tests.conductor.prefix_index.naive_index import NaivePrefixIndex

from skymemory.conductor.cost_model import LLAMA_70B_8xA800
from skymemory.conductor.strategies.estimates import GivenSpeeds, LearnedSpeeds
from skymemory.conductor.strategies.hashing import BoundedRing
from skymemory.conductor.strategies.least_ttft import LeastTtft
from skymemory.conductor.strategies.registry import DEFAULT, NAMES, STRATEGIES, named
from skymemory.errors import InvalidInput


def test_every_name_gives_the_strategy_of_that_name() -> None:
    assert {named(name).name for name in NAMES} == set(NAMES)
    assert set(NAMES) == {
        "random",
        "round-robin",
        "least-load",
        "session",
        "chwbl",
        "simhash",
        "hash-trie",
        "radix",
        "approximate",
        "precise",
        "least-ttft",
        "lmetric",
        "block-cost",
    }
    assert named().name == DEFAULT == "least-ttft"
    for entry in STRATEGIES.values():
        assert entry.description and "\n" not in entry.description and len(entry.description) < 110


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_taken_with_its_default_in_words(name: str) -> None:
    options = STRATEGIES.options_of(name)
    assert set(options) == {field.name for field in fields(STRATEGIES[name].settings)}
    assert named(name, **options).name == name
    words = {option: str(value) for option, value in options.items()}
    again = named(name, **words)
    assert getattr(again, "settings", None) == getattr(named(name), "settings", None)


def test_what_does_not_exist_is_refused_with_the_nearest_that_does() -> None:
    with pytest.raises(InvalidInput, match=r"no routing strategy 'least-tfft'; did you mean 'least-ttft'\?"):
        named("least-tfft")
    with pytest.raises(InvalidInput, match=r"'chwbl' has no option 'load_facto'; did you mean 'load_factor'\?"):
        named("chwbl", load_facto=1.5)
    with pytest.raises(InvalidInput, match="'random' has no option 'seed'; there are none"):
        named("random", seed=3)


def test_values_are_taken_from_words_and_refused_when_they_make_no_sense() -> None:
    ring = named("chwbl", load_factor="1.5", virtual_nodes="64")
    assert isinstance(ring, BoundedRing)
    assert (ring.settings.load_factor, ring.settings.virtual_nodes) == (1.5, 64)
    default = named("least-ttft", events="no", guard_limit="inf")
    assert isinstance(default, LeastTtft) and default.settings.events is False
    for options, expected in (
        ({"virtual_nodes": "1.5"}, "a whole number, such as 256"),
        ({"virtual_nodes": True}, "a whole number"),
        ({"load_factor": "much"}, "a number, such as 1.25"),
        ({"virtual_nodes": "inf"}, "a whole number"),
        ({"load_factor": "nan"}, "expected a number, such as 1.25"),
        ({"load_factor": None}, "a number"),
    ):
        with pytest.raises(InvalidInput, match=expected):
            named("chwbl", **options)
    with pytest.raises(InvalidInput, match="true or false, such as False"):
        named("least-ttft", events="perhaps")


def test_an_index_and_a_cost_can_be_handed_in() -> None:
    index = NaivePrefixIndex(100)
    for name in ("approximate", "radix", "least-ttft"):
        assert named(name, index=index).index is index  # type: ignore[attr-defined]
    with pytest.raises(InvalidInput, match="events feed"):
        named("precise", index=index)
    known, unknown = named("least-ttft", cost=LLAMA_70B_8xA800), named("least-ttft")
    assert isinstance(known, LeastTtft) and isinstance(known.speeds, GivenSpeeds)
    assert isinstance(unknown, LeastTtft) and isinstance(unknown.speeds, LearnedSpeeds)
