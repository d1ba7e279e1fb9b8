"""Amounts by holder against sums over a dictionary; a holder's part of a limit; which addresses are one holder."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skymemory.router.limits.shares import SharedLimit, Shares, holder_of

CHANGES = st.lists(st.tuples(st.integers(0, 7), st.integers(-5_000, 20_000)), max_size=200)


@given(CHANGES)
def test_the_heaviest_has_at_least_half_of_the_most(changes: list[tuple[int, int]]) -> None:
    shares: Shares[int] = Shares()
    model: dict[int, int] = {}
    for key, by in changes:
        by = max(by, -model.get(key, 0))
        shares.change(key, by)
        model[key] = model.get(key, 0) + by
        if not model[key]:
            del model[key]
        assert len(shares) == len(model) and all(shares.of(each) == amount for each, amount in model.items())
        heaviest = shares.heaviest()
        if not model:
            assert heaviest is None
        else:
            assert heaviest is not None and 2 * model[heaviest] > max(model.values())


@given(st.integers(1, 5_000), st.lists(st.integers(0, 9), max_size=300))
def test_no_holder_takes_all_and_the_limit_holds(most: int, holders: list[int]) -> None:
    """Holders take one after the other as much as they get; what has room is never more than the limit."""
    limit = SharedLimit(most)
    for holder in holders:
        while limit.has_room(holder):
            assert limit.take(holder)
        assert not limit.take(holder)
        assert limit.held <= most
        assert limit.of(holder) >= SharedLimit.PART * (most - limit.held)
        others = [each for each in range(10) if not limit.of(each)]
        if most - limit.held:
            assert all(limit.has_room(each) for each in others), "a newcomer has room, as long as some is free"
    if most >= 500 and holders:
        assert limit.of(holders[0]) <= most * 4 // 5 + 1
        assert limit.held < most or len(set(holders)) > 3, "three holders leave some free"
    for holder in range(10):
        limit.change(holder, -limit.of(holder))
    assert limit.held == 0 and limit.has_room(0, most)


def test_small_limits_are_given_whole() -> None:
    """So that a limit of one to four requests is not three."""
    for most in range(1, 5):
        limit = SharedLimit(most)
        for _ in range(most):
            assert limit.has_room("a")
            limit.change("a", 1)
        assert not limit.has_room("a")


def test_a_network_of_ipv6_is_one_holder_and_an_address_of_ipv4_another() -> None:
    assert holder_of("2001:db8::1") == holder_of("2001:db8::ffff:2%eth0") != holder_of("2001:db8:0:1::1")
    assert holder_of("::ffff:10.0.0.1") == holder_of("10.0.0.1") != holder_of("10.0.0.2")
    assert holder_of("") == "" and holder_of("/run/x:y") == "/run/x:y"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=40))
def test_to_add_is_to_ask_for_room_and_to_change(amounts: list[tuple[str, int]]) -> None:
    one, two = SharedLimit(50), SharedLimit(50)
    for holder, amount in amounts:
        has_room = two.has_room(holder, amount)
        two.change(holder, amount)
        assert one.add(holder, amount) == has_room
        assert one.held == two.held and one.of(holder) == two.of(holder)
    for holder, _ in amounts:
        one.add(holder, -one.of(holder))
    assert one.held == 0 and not one._by_holder, "no holder of nothing is kept"
