"""PrefixSearch: how many questions it takes, and answers that come late, in part or twice."""

from __future__ import annotations

import math

import pytest

from skymemory.errors import InvalidInput
from skymemory.store.sky.probing import PrefixSearch


def run(search: PrefixSearch, present: list[bool]) -> int:
    while not search.done:
        search.answer({at: present[at] for at in search.next_probe()})
    return search.result


@pytest.mark.parametrize("batch", [1, 2, 3, 16, 1000])
@pytest.mark.parametrize("verify", [True, False])
def test_bounds_when_prefix_closed(batch: int, verify: bool) -> None:
    count = 300
    base = max(2, batch)
    narrowing = math.ceil(math.log2(count)) + 1 if base == 2 else math.floor(math.log(count, base)) + 1
    for present in range(count + 1):
        search = PrefixSearch(count, batch, 64, verify)
        assert run(search, [at < present for at in range(count)]) == present
        verifying = math.ceil(present / 64) if verify else 0
        assert search.rounds <= narrowing + verifying
        assert search.probes <= (count if verify else narrowing * batch)


def test_nothing_to_search() -> None:
    search = PrefixSearch(0)
    assert (search.done, search.next_probe(), search.result, search.probes) == (True, [], 0, 0)


def test_a_complete_miss_and_a_short_prompt_take_little() -> None:
    search = PrefixSearch(10, batch=16)
    assert run(search, [False] * 10) == 0
    assert (search.rounds, search.probes) == (1, 10)
    search = PrefixSearch(1000, batch=16)
    assert run(search, [False] * 1000) == 0
    assert search.rounds == 3


def test_a_full_hit_is_found_with_the_first_questions() -> None:
    search = PrefixSearch(1000, batch=16, verify=False)
    assert run(search, [True] * 1000) == 1000 and search.rounds == 1 and search.probes == 16


def test_holes_before_the_boundary_are_found() -> None:
    for hole in range(99):
        present = [at != hole and at < 90 for at in range(100)]
        assert run(PrefixSearch(100, batch=4, verify_batch=7), present) == min(hole, 90)


def test_unanswered_positions_are_asked_again() -> None:
    search = PrefixSearch(8, batch=8)
    assert search.next_probe() == search.next_probe() == list(range(8))
    search.answer({0: True, 7: True})
    assert search.next_probe() == [1, 2, 3, 4, 5, 6]
    search.answer({})
    search.answer({3: False})
    assert search.next_probe() == [1, 2], "what lies behind a hole is useless"
    with pytest.raises(InvalidInput, match="not done"):
        _ = search.result
    search.answer({1: True, 2: True, 5: True})
    assert (search.done, search.result, search.rounds, search.probes) == (True, 3, 1, 8)


def test_an_absent_block_stays_absent() -> None:
    search = PrefixSearch(3)
    search.answer(dict.fromkeys(search.next_probe(), True))
    assert search.result == 3
    search.answer({1: False})
    search.answer({1: True})
    assert (search.done, search.result) == (True, 1)


def test_bad_input() -> None:
    for arguments in ((-1,), (1, 0), (1, 1, 0)):
        with pytest.raises(InvalidInput):
            PrefixSearch(*arguments)
    for position in (-1, 3):
        with pytest.raises(InvalidInput):
            PrefixSearch(3).answer({position: True})
