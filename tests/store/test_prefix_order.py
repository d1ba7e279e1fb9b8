"""Which keys may go without leaving any behind them, as far as calls have said: whatever they name, no key is stuck."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.key_tree import CHAINS, key

from skymemory.store.accounting import PrefixOrder


class Watcher:
    def __init__(self, remembered: int = 100) -> None:
        self.may: dict[bytes, bool] = {}
        self.order = PrefixOrder(self.may.__setitem__, remembered)


calls = st.tuples(
    st.sampled_from(["learn", "learn", "came", "came", "left", "hold", "free"]),
    st.lists(st.sampled_from([key(number) for number in range(6)]), min_size=1, max_size=4),
)


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(calls, max_size=60), remembered=st.sampled_from([1, 3, 100]))
def test_calls_that_are_no_chains_never_make_a_key_immortal(
    steps: list[tuple[str, list[bytes]]], remembered: int
) -> None:
    """Whatever was named after whatever: in the end all can go, one after the other, and nothing is left of them."""
    watcher = Watcher(remembered)
    chains, here, held = watcher.order, set[bytes](), Counter[bytes]()
    for verb, keys in steps:
        one = keys[0]
        if verb == "learn":
            chains.learn(keys)
        elif verb == "came" and one not in here:
            here.add(one)
            watcher.may[one] = True
            chains.added(one)
        elif verb == "left":
            here.discard(one)
            watcher.may.pop(one, None)
            chains.removed(one)
        elif verb == "hold":
            held[one] += 1
            chains.hold(one)
        elif verb == "free" and held[one]:
            held[one] -= 1
            chains.free(one)
        assert set(watcher.may) == here
        assert not any(watcher.may[one] for one in here if held[one])
    for one in held.elements():
        chains.free(one)
    while here:
        free = [one for one in here if watcher.may[one]]
        assert free, "every key waits for another"
        here.discard(free[0])
        del watcher.may[free[0]]
        chains.removed(free[0])
    assert len(chains) == 0


def test_what_was_deleted_still_joins_what_is_before_it_and_behind_it() -> None:
    watcher = Watcher()
    chains = watcher.order
    chains.learn(CHAINS[3])
    for one in CHAINS[3]:
        watcher.may[one] = True
        chains.added(one)
    chains.removed(key(2))
    chains.removed(key(1))
    assert not watcher.may[key(0)], "3 is behind it"
    chains.removed(key(3))
    assert watcher.may[key(0)]


def test_keys_named_in_a_circle_hold_no_key() -> None:
    """Where both have something behind them already, nothing else would end it."""
    watcher = Watcher()
    chains, (one, other) = watcher.order, (key(1), key(2))
    for each in (one, other):
        watcher.may[each] = True
        chains.added(each)
        chains.hold(each)
    chains.learn([one, other])
    chains.learn([other, one])
    for each in (one, other):
        chains.free(each)
    assert watcher.may[other], "it stands behind the first, and nothing behind it"
    chains.removed(other)
    assert watcher.may[one]


def test_neighbours_of_keys_that_are_not_here_are_remembered_within_bounds() -> None:
    chains = Watcher(remembered=10).order
    keys = [bytes([number]) * 32 for number in range(200)]
    for at in range(0, 200, 2):
        chains.learn(keys[at : at + 2])
    assert sum(chains.before(one) is not None for one in keys) == 10 and chains.before(keys[199]) == keys[198]


def test_a_neighbour_learnt_late_counts() -> None:
    watcher = Watcher()
    for number in (0, 1, 2):
        watcher.may[key(number)] = True
        watcher.order.added(key(number))
    watcher.order.learn([key(1), key(2)])
    watcher.order.learn([key(0), key(1), key(2)])
    assert [watcher.may[key(number)] for number in (0, 1, 2)] == [False, False, True]
    assert watcher.order.depth(key(1)) == 1 and watcher.order.before(key(2)) == key(1)
