"""Memory that clients share, in virtual time: hostile schedules against a plain reading of the rules."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.router.limits.held_bytes import PROGRESS_BYTES, SLOW_S, HeldBytes

MOST = 1 << 20


class Door:
    """Bodies as the proxy holds them: each piece is counted, and the victim is dropped."""

    def __init__(self, most: int = MOST) -> None:
        self.held: HeldBytes[str] = HeldBytes(most)
        self.bodies: dict[str, tuple[str, int]] = {}
        """Holder and bytes of each incomplete body."""
        self.paid: list[tuple[str, bool]] = []
        self.now_s = 0.0

    def send(self, body: str, holder: str, size: int) -> bool:
        """Whether the body is still there afterwards."""
        has_room = self.held.limit.has_room(holder, size)
        self.held.limit.change(holder, size)
        self.bodies[body] = holder, self.bodies.get(body, (holder, 0))[1] + size
        while not has_room:
            victim = self.held.victim(holder, self.now_s)
            if victim is None or victim.item == body:
                self.drop(body)
                self.paid.append((body, victim is not None and victim.is_slow))
                return False
            self.drop(victim.item)
            self.paid.append(victim)
            has_room = self.held.limit.has_room(holder, 0)
        self.held.track(body, holder, self.bodies[body][1], self.now_s)
        return True

    def drop(self, body: str) -> None:
        holder, size = self.bodies.pop(body)
        self.held.limit.change(holder, -size)
        self.held.untrack(body, holder)

    def check(self) -> None:
        assert self.held.held_bytes == sum(size for _, size in self.bodies.values()) <= self.held.limit.most


def test_bodies_that_stopped_pay_for_those_that_move() -> None:
    """32 bodies that lack a byte, and another client of the same address."""
    door = Door()
    for number in range(32):
        for _ in range(4):
            door.send(f"held{number}", "a", 16_384)
        door.now_s += 0.01
    assert door.paid and all(not is_slow for _, is_slow in door.paid), "none has stopped for long"
    kept = [each for each in door.bodies if each.startswith("held")]
    door.now_s += SLOW_S
    door.paid.clear()
    for number in range(40):
        assert door.send("mine", "a", 8192), f"piece {number}"
        door.now_s += 0.05
    assert [body for body, _ in door.paid] == kept[: len(door.paid)] and all(is_slow for _, is_slow in door.paid)
    assert door.bodies["mine"] == ("a", 40 * 8192)


def test_a_byte_now_and_then_is_no_progress() -> None:
    door = Door()
    door.send("drips", "a", 65_536)
    for _ in range(20):
        door.now_s += SLOW_S / 10
        door.send("drips", "a", 1)
        door.send("moves", "a", PROGRESS_BYTES)
    victim = door.held.victim("a", door.now_s)
    assert victim is not None and victim.item == "drips" and victim.is_slow


def test_the_holder_of_most_pays_where_the_newcomer_holds_nothing_that_stopped() -> None:
    door, number = Door(), 0
    while door.held.limit.has_room("many", 30_000):
        door.send(f"held{number}", "many", 30_000)
        number += 1
    for _ in range(2):
        door.now_s += SLOW_S * 0.6
        door.send("few's", "few", PROGRESS_BYTES)
    while door.held.limit.has_room("few", 30_000):
        door.send("few's", "few", 30_000)
    assert not door.paid
    assert door.send("few's", "few", 60_000)
    assert [body for body, _ in door.paid] == [f"held{at}" for at in range(len(door.paid))] != []


@pytest.mark.brief()
@pytest.mark.parametrize("holders", [1, 3, 20])
def test_whatever_attackers_hold_a_small_request_passes(holders: int) -> None:
    """Attackers send bodies of any size and pace, as many as they get; another client sends 8 KB at a time."""
    dice, door, refused = random.Random(holders), Door(64 << 20), 0
    for step in range(6_000):
        door.now_s += 0.002
        attacker = f"attacker{dice.randrange(holders)}"
        door.send(f"body{dice.randrange(64 * holders)}.{attacker}", attacker, dice.choice([1, 700, 65_536, 262_144]))
        if step % 20 == 0:
            small = f"small{step}"
            if door.send(small, "client", 8192):
                door.drop(small)  # it is complete, and answered
            else:
                refused += 1
        door.check()
    assert not refused and door.paid


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(1, 400_000), st.floats(0, 2)), max_size=120)
)
def test_books_close_and_the_limit_holds_whatever_is_sent(steps: list[tuple[int, int, int, float]]) -> None:
    door = Door()
    for body, holder, size, wait_s in steps:
        door.now_s += wait_s
        door.send(f"{holder}.{body}", str(holder), size)
        door.check()
    for body in list(door.bodies):
        door.drop(body)
    assert door.held.held_bytes == 0 and door.held.victim("0", door.now_s + 9) is None
    assert not door.held._incomplete and not len(door.held._holders)
