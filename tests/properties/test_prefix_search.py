"""The probing search against the truth, whatever eviction left and however answers arrive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skymemory.store.sky.probing import PrefixSearch


def leading(present: list[bool]) -> int:
    return present.index(False) if False in present else len(present)


@given(st.lists(st.booleans() | st.just(True), max_size=120), st.integers(1, 9), st.integers(1, 30), st.data())
def test_right_with_holes_and_partial_answers(
    present: list[bool], batch: int, verify_batch: int, data: st.DataObject
) -> None:
    search = PrefixSearch(len(present), batch, verify_batch)
    answered: set[int] = set()
    lossy = data.draw(st.booleans())
    while not search.done:
        asked = search.next_probe()
        assert asked == sorted(set(asked))
        assert len(asked) <= max(batch, verify_batch)
        assert not answered.intersection(asked), "no position is asked for twice once answered"
        heard = asked
        if lossy:
            heard = data.draw(st.lists(st.sampled_from(asked), unique=True, min_size=1))
        answered.update(heard)
        search.answer({at: present[at] for at in heard})
    assert search.result == leading(present)
    assert search.probes <= len(present)
    assert search.next_probe() == []


@given(st.lists(st.booleans(), max_size=120), st.integers(1, 9))
def test_without_verifying_it_is_never_too_small(present: list[bool], batch: int) -> None:
    search = PrefixSearch(len(present), batch, verify=False)
    while not search.done:
        search.answer({at: present[at] for at in search.next_probe()})
    assert search.result >= leading(present)
    assert search.result == len(present) or not present[search.result]
