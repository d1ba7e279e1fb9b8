"""Numbers of one publisher: in order whatever way they come, with gaps, doubles and new lives distinguished."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory.router.engines.feed import Offer, Order


def taken(order: Order) -> list[int]:
    numbers = []
    while (message := order.take()) is not None:
        numbers.append(message[0])
    return numbers


def test_it_begins_with_what_comes_first() -> None:
    order = Order()
    assert order.offer(7, b"7") is Offer.TAKEN and taken(order) == [7] and not order.gap
    assert order.offer(8, b"8") is Offer.TAKEN and taken(order) == [8]


def test_a_gap_holds_what_follows_until_it_is_filled_or_given_up() -> None:
    order = Order(most_held=3)
    order.offer(0, b"0")
    taken(order)
    order.offer(2, b"2")
    order.offer(3, b"3")
    assert order.gap and taken(order) == [] and not order.crowded
    order.offer(6, b"6")
    assert order.crowded
    order.offer(1, b"1")
    assert taken(order) == [1, 2, 3] and order.gap
    order.skip()
    assert taken(order) == [6] and not order.gap
    assert order.offer(7, b"7") is Offer.TAKEN


def test_what_was_had_is_old_and_other_bytes_are_another_life() -> None:
    order = Order(remembered=3)
    for number in range(6):
        order.offer(number, b"%d" % number)
    taken(order)
    assert order.offer(5, b"5") is Offer.OLD and order.offer(4, b"4") is Offer.OLD
    assert order.offer(4, b"another") is Offer.RESTARTED
    # Longer ago than is remembered: no publisher sends that again, but a restarted one does.
    assert order.offer(0, b"0") is Offer.RESTARTED
    order.offer(9, b"9")
    assert order.offer(9, b"9") is Offer.OLD and order.offer(9, b"x") is Offer.RESTARTED
    order.restart(0)
    assert order.offer(0, b"0") is Offer.TAKEN and taken(order) == [0] and order.had(0, b"0")


@settings(max_examples=100, deadline=None)
@given(st.permutations(list(range(12))), st.lists(st.integers(0, 11), max_size=12))
def test_any_order_with_any_doubles_comes_out_in_order(numbers: list[int], doubles: list[int]) -> None:
    order = Order()
    order.restart(0)
    got = []
    for number in numbers:
        for again in (number, *doubles):
            if again == number or again in got:
                assert order.offer(again, b"%d" % again) is not Offer.RESTARTED
        got += taken(order)
    assert got == list(range(12)) and not order.gap
