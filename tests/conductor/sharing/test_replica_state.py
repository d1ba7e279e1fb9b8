"""Replicas know what the others have sent, whatever is lost, repeated or late; and how long they have not heard."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from tests.conductor.sharing.replica_fleets import SERVERS, Replica, booked, request

from skymemory.conductor.picker import Fleet, Picker
from skymemory.conductor.request import Decision
from skymemory.conductor.sharing import elsewhere, own_requests, replica_state
from skymemory.conductor.sharing.messages import (
    MAX_MESSAGE_BYTES,
    VERSION,
    Booking,
    Changes,
    Snapshot,
    pack_message,
    unpack_message,
)
from skymemory.conductor.sharing.replica_state import Cursor, ReplicaState
from skymemory.conductor.strategies.registry import named
from skymemory.errors import InvalidInput


def notify(sender: Replica, receiver: Replica, cursor: Cursor, now_s: float) -> int:
    """Exchange all that the receiver lacks; return the number of messages."""
    messages = sender.state.next_messages(cursor, now_s)
    for message in messages:
        receiver.state.receive(message, now_s)
    return len(messages)


def test_a_request_sent_elsewhere_counts_until_its_end() -> None:
    one, other, cursor = Replica.of(1), Replica.of(2, ("c", "b", "a")), Cursor()
    notify(one, other, cursor, 0.0)
    decision = one.send(1, 1.0, ("b",))
    assert other.wait_s("b", 1.01) == 0
    notify(one, other, cursor, 1.01)
    assert other.elsewhere() == {"a": (0, 0, 0), "b": (1, 1, 320), "c": (0, 0, 0)}
    assert other.wait_s("b", 1.01) == pytest.approx(one.wait_s("b", 1.01)) and other.wait_s("b", 1.01) > 0.03
    # The same prompt follows it, as that server will hold its blocks.
    assert other.picker.pick(request(1), 1.1).server == "b"
    assert other.picker.pick(request(1), 1.1).matched_tokens == 320
    one.picker.succeeded(decision, 1.2)
    notify(one, other, cursor, 1.25)
    assert other.elsewhere()["b"] == (1, 0, 0) and other.wait_s("b", 1.3) == 0
    assert other.picker.pick(request(1), 1.3).matched_tokens == 320, "learnt with the first byte"
    one.picker.on_request_end(decision, 2.0)
    notify(one, other, cursor, 2.1)
    assert other.elsewhere()["b"] == (0, 0, 0)


def test_a_failed_request_is_not_learnt() -> None:
    one, other, cursor = Replica.of(1), Replica.of(2), Cursor()
    notify(one, other, cursor, 0.0)
    decision = one.send(1, 1.0, ("b",))
    notify(one, other, cursor, 1.0)
    one.picker.failed(decision, 1.1)
    notify(one, other, cursor, 1.2)
    assert other.elsewhere()["b"] == (0, 0, 0) and other.wait_s("b", 1.2) == 0
    assert other.picker.pick(request(1), 1.2).matched_tokens == 0


@pytest.mark.parametrize("strategy", ["least-load", "radix", "lmetric", "block-cost", "approximate"])
def test_every_strategy_by_load_counts_requests_elsewhere(strategy: str) -> None:
    one, other, cursor = Replica.of(1, strategy=strategy), Replica.of(2, strategy=strategy), Cursor()
    for number in range(200):
        one.send(number, 1.0, ("a", "b"))
    notify(one, other, cursor, 1.0)
    assert other.picker.pick(request(1000), 1.0).server == "c"


def test_measured_prefills_teach_the_others() -> None:
    one, other, late, cursor = Replica.of(1), Replica.of(2), Replica.of(3), Cursor()
    notify(one, other, cursor, 0.0)
    for number in range(8):
        decision = one.send(number, 10.0 * number, ("b",))
        one.picker.succeeded(decision, 10.0 * number + 3.0)
    notify(one, other, cursor, 90.0)
    notify(one, late, Cursor(), 90.0)
    # Neither has sent anything itself; a prefill of 3 s is expected of another prompt of the same length.
    for replica in (one, other, late):
        expected_s = replica.picker.pick(request(99), 91.0, ("b",)).estimated_ttft_s
        assert expected_s == pytest.approx(3.0, rel=0.2)


def test_state_follows_through_loss_repetition_and_reordering() -> None:
    """Against the sender's own books: after the last snapshot or change arrives, both hold the same requests."""
    for seed in range(60):
        dice = random.Random(seed)
        one, other, cursor = Replica.of(1), Replica.of(2, SERVERS[: dice.randint(1, 3)]), Cursor()
        open_ones: list[Decision] = []
        answered: set[int] = set()
        flying: list[bytes] = []
        now_s = 0.0
        for step in range(120):
            now_s += dice.expovariate(20.0)
            match dice.choice(("send", "send", "first", "end", "fail", "pack", "pack", "arrive", "lose", "repeat")):
                case "send":
                    open_ones.append(one.send(dice.randrange(9), now_s))
                case "first" if open_ones:
                    decision = dice.choice(open_ones)
                    if id(decision) not in answered:
                        answered.add(id(decision))
                        one.picker.succeeded(decision, now_s)
                case "end" if answered:
                    decision = next(each for each in open_ones if id(each) in answered)
                    open_ones.remove(decision)
                    answered.discard(id(decision))
                    one.picker.on_request_end(decision, now_s)
                case "fail" if len(open_ones) > len(answered):
                    decision = next(each for each in open_ones if id(each) not in answered)
                    open_ones.remove(decision)
                    one.picker.failed(decision, now_s)
                case "pack":
                    flying += one.state.next_messages(cursor, now_s, dice.randint(1, 3))
                case "arrive" if flying:
                    _, answer = other.state.receive(flying.pop(dice.randrange(len(flying))), now_s)
                    if answer is not None and dice.random() < 0.7:
                        assert one.state.is_wanted(answer)
                        cursor.change = None
                case "lose" if flying:
                    flying.pop(dice.randrange(len(flying)))
                case "repeat" if flying:
                    flying.append(dice.choice(flying))
            if step % 10 == 0:
                other.state.review(now_s)
        for message in flying:
            other.state.receive(message, now_s)
        for _ in range(3):
            for message in one.state.next_messages(cursor, now_s + 1.5):
                _, answer = other.state.receive(message, now_s + 1.5)
                if answer is not None:
                    cursor.change = None
            now_s += 1.5
        numbers = {id(each): number for number, each in enumerate(open_ones)}
        expected = sorted((each.server, id(each) not in answered) for each in open_ones)
        assert sorted(booked(other.state.elsewhere, one.state.own_id).values()) == expected, seed
        counts = other.elsewhere()
        for server in other.picker.fleet:
            there = [each for each in open_ones if each.server == server.name]
            waiting = [each for each in there if id(each) not in answered]
            missing = sum(each.request.prompt.tokens - each.matched_tokens for each in waiting)
            assert counts[server.name] == (len(there), len(waiting), missing), (seed, numbers)
        other.state.elsewhere.remove(one.state.own_id, now_s)
        assert set(other.elsewhere().values()) == {(0, 0, 0)}
        assert all(other.wait_s(server.name, now_s) == 0 for server in other.picker.fleet)
        assert not len(other.picker.scorer._under_way)  # type: ignore[attr-defined]


def test_an_old_snapshot_does_not_undo_what_followed() -> None:
    one, other, cursor = Replica.of(1), Replica.of(2), Cursor()
    one.send(1, 1.0)
    old = one.state.next_messages(Cursor(), 1.0)
    one.send(2, 1.1)
    notify(one, other, cursor, 1.2)
    for message in old:
        other.state.receive(message, 1.3)
    assert len(other.state.elsewhere) == 2


def test_a_gap_is_counted_and_asks_for_a_snapshot() -> None:
    one, other, cursor = Replica.of(1), Replica.of(2), Cursor()
    notify(one, other, cursor, 0.0)
    one.send(1, 1.0)
    one.state.next_messages(cursor, 1.0)  # lost
    one.send(2, 1.1)
    (message,) = one.state.next_messages(cursor, 1.1)
    _, answer = other.state.receive(message, 1.2)
    assert answer is not None and one.state.is_wanted(answer) and not other.state.is_wanted(answer)
    assert not len(other.state.elsewhere) and other.state.elsewhere.gaps == 1
    cursor.change = None
    notify(one, other, cursor, 1.3)
    assert len(other.state.elsewhere) == 2
    assert other.state.receive(one.state.next_messages(cursor, 9.0)[0], 9.0)[1] is None


def test_who_is_behind_the_log_gets_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_requests, "MAX_CHANGES", 10)
    one, other, cursor = Replica.of(1), Replica.of(2), Cursor()
    notify(one, other, cursor, 0.0)
    for number in range(11):
        one.send(number, 1.0)
    assert notify(one, other, cursor, 1.0) == 1 and one.state.counts.snapshots == 2
    assert len(other.state.elsewhere) == 11
    for number in range(10):
        one.send(number, 1.0)
    notify(one, other, cursor, 1.0)
    assert one.state.counts.snapshots == 2 and len(other.state.elsewhere) == 21


def test_a_silent_replica_counts_by_its_estimates_and_then_no_more() -> None:
    one, other, cursor = Replica.of(1), Replica.of(2), Cursor()
    notify(one, other, cursor, 0.0)
    assert other.state.troubles(100.0) == []
    decision = one.send(1, 1.0, ("b",))
    assert decision.estimated_ttft_s is not None and decision.estimated_ttft_s < 0.5
    notify(one, other, cursor, 1.0)
    assert other.state.review(2.9) == [] and other.elsewhere()["b"][:2] == (1, 1)
    assert other.state.review(3.1) == [] and other.elsewhere()["b"] == (1, 0, 0)
    assert other.state.silences_s(4.0) == {"01010101": 3.0}
    assert other.state.review(6.0) == [] and other.elsewhere()["b"] == (1, 0, 0)
    assert other.state.review(6.1) == [one.state.own_id] and other.elsewhere()["b"] == (0, 0, 0)
    assert "01010101 was last heard 9 s ago" in other.state.troubles(10.0)[0]
    notify(one, other, cursor, 11.0)  # its sign of life: it is heard, and is asked for a snapshot
    assert other.state.troubles(11.0) == [] and other.elsewhere()["b"] == (0, 0, 0)
    cursor.change = None
    notify(one, other, cursor, 11.1)
    assert other.elsewhere()["b"] == (1, 1, 320)
    other.state.review(20.0)
    assert other.state.troubles(20.0)
    other.state.review(80.0)
    assert other.state.troubles(80.0) == [] and other.state.silences_s(80.0) == {}


def test_signs_of_life_keep_a_replica_that_sends_nothing() -> None:
    one, other, cursor = Replica.of(1), Replica.of(2), Cursor()
    one.send(1, 0.0)
    sent = 0
    for tenth in range(200):
        sent += notify(one, other, cursor, tenth / 10)
        assert other.state.review(tenth / 10) == []
    assert len(other.state.elsewhere) == 1 and 18 <= sent <= 21, "one a second"


def test_who_has_heard_nothing_says_so() -> None:
    alone = Replica.of(1).state
    assert alone.troubles(5.0) == []
    assert alone.troubles(7.0) == ["no other router was heard since the start, 7 s ago"]


def test_who_leaves_is_forgotten_at_once() -> None:
    one, other, cursor = Replica.of(1), Replica.of(2), Cursor()
    one.send(1, 1.0)
    notify(one, other, cursor, 1.0)
    other.state.receive(one.state.leaving(), 1.1)
    assert not len(other.state.elsewhere) and other.state.review(99.0) == [] and other.state.troubles(99.0) == []


def test_a_booking_that_is_never_ended_expires() -> None:
    one, other, cursor = Replica.of(1), Replica.of(2), Cursor()
    one.send(1, 0.0)
    for second in range(902):
        notify(one, other, cursor, float(second))
        other.state.review(float(second))
        assert len(other.state.elsewhere) == (second < 900)


def test_any_number_of_tokens_may_be_asked_for() -> None:
    for wanted in (10**30, -5, 0, None):
        one, other = Replica.of(1), Replica.of(2)
        asked = request(1)
        asked.output_tokens = wanted
        one.picker.routed(one.picker.pick(asked, 1.0), 1.0)
        notify(one, other, Cursor(), 1.0)
        assert len(other.state.elsewhere) == 1


def test_own_messages_are_ignored() -> None:
    one, cursor = Replica.of(1), Cursor()
    one.send(1, 1.0)
    for message in one.state.next_messages(cursor, 1.0):
        assert one.state.receive(message, 1.0) == (one.state.own_id, None)
    assert not len(one.state.elsewhere) and one.state.silences_s(1.0) == {}


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_requests, "MAX_OPEN", 50)
    monkeypatch.setattr(elsewhere, "MAX_OPEN", 20)
    one, other = Replica.of(1), Replica.of(2)
    for number in range(80):
        one.send(number, 1.0)
    notify(one, other, Cursor(), 1.0)
    assert len(one.state.own) == 50 and len(other.state.elsewhere) == 20
    for number in range(200):
        sender = number.to_bytes(16, "big")
        other.state.receive(pack_message(Changes(VERSION, sender, 0, ())), 1.0)
    assert len(other.state.elsewhere.replicas) == elsewhere.MAX_REPLICAS
    other.state.review(99.0)
    assert not other.state.elsewhere.replicas and len(other.state.silences_s(99.0)) <= 64


def test_messages_stay_below_their_limit() -> None:
    one = Replica.of(1)
    for number in range(3000):
        one.send(number, 1.0, blocks=600)
    cursor = Cursor()
    messages = one.state.next_messages(cursor, 1.0)
    assert len(messages[0]) < MAX_MESSAGE_BYTES
    (snapshot,) = (unpack_message(message) for message in messages[:1])
    assert isinstance(snapshot, Snapshot) and len(snapshot.bookings) == 3000
    cursor.change = 0
    changes = one.state.next_messages(cursor, 1.0)
    assert len(changes) > 10 and max(map(len, changes)) < MAX_MESSAGE_BYTES


def test_invalid_messages_are_refused_and_change_nothing() -> None:
    one, other = Replica.of(1), Replica.of(2)
    one.send(1, 1.0)
    (good,) = one.state.next_messages(Cursor(), 1.0)
    dice = random.Random(5)
    bad = [b"", b"\x00", good[:-1], good + b"\x00", bytes(MAX_MESSAGE_BYTES + 1), b"GET / HTTP/1.1\r\n\r\n"]
    bad += [msgspec.msgpack.encode(["snapshot", version, bytes(16), 0, []]) for version in (0, VERSION + 1)]
    bad.append(msgspec.msgpack.encode(["snapshot", VERSION, bytes(15), 0, []]))
    bad.append(msgspec.msgpack.encode(["snapshot", VERSION, bytes(16), -1, []]))
    nan = Booking(1, "a", float("nan"), 1.0, 1.0, 1.0, 1, 1, 1, True, True)
    bad.append(msgspec.msgpack.encode(Snapshot(VERSION, bytes(16), 1, (nan,))))
    bad += [bytes(dice.randrange(256) for _ in range(dice.randrange(200))) for _ in range(300)]
    for message in bad:
        with pytest.raises(InvalidInput):
            other.state.receive(message, 1.0)
    assert other.state.counts.refused == len(bad) and not other.state.elsewhere.replicas
    spoilt = 0
    for _ in range(2000):  # changed bytes are refused, or are another message
        message = bytearray(good)
        message[dice.randrange(len(message))] = dice.randrange(256)
        try:
            other.state.receive(bytes(message), 1.0)
        except InvalidInput:
            spoilt += 1
    assert spoilt > 100
    for sender in list(other.state.elsewhere.replicas):
        other.state.elsewhere.remove(sender, 2.0)
    assert set(other.elsewhere().values()) == {(0, 0, 0)}


def test_a_server_that_left_meanwhile_is_no_trouble() -> None:
    one, other, cursor = Replica.of(1), Replica.of(2), Cursor()
    decision = one.send(1, 1.0, ("b",))
    notify(one, other, cursor, 1.0)
    other.picker.remove("b")
    fresh = other.picker.fleet.add("d")  # in its slot
    one.picker.succeeded(decision, 1.1)
    one.picker.on_request_end(decision, 1.2)
    one.send(2, 1.2, ("c",))
    notify(one, other, cursor, 1.3)
    assert (fresh.elsewhere, fresh.elsewhere_prefilling) == (0, 0)
    assert other.wait_s("d", 1.3) == 0 and other.elsewhere()["c"][0] == 1


def test_log_and_books_keep_no_prompts() -> None:
    one = Replica.of(1)
    decision = one.send(1, 1.0)
    one.picker.succeeded(decision, 1.0)
    one.picker.on_request_end(decision, 1.1)
    (sent, *_) = one.state.own.log.since(0) or ()
    assert sent.decision is None and sent.blocks == b""  # type: ignore[union-attr]
    assert not len(one.state.own)


def test_deltas_of_prefixes_travel_in_order_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_state, "DELTA_BYTES", 1000)
    one, other, cursor = Replica.of(1), Replica.of(2), Cursor()
    index, theirs = one.picker.scorer.index, other.picker.scorer.index  # type: ignore[attr-defined]
    chains = [request(number).prompt.blocks for number in range(40)]
    for chain in chains:
        index.learn(1, chain)
    index.correct(1, chains[7], 5)
    assert notify(one, other, cursor, 1.0) > 5
    assert [theirs.match(chain, [1]) for chain in chains] == [[5 if at == 7 else 20] for at in range(40)]
    assert theirs.log_end == 0, "what was heard is not passed on"
    assert isinstance(chains[0], np.ndarray) and notify(one, other, cursor, 1.1) == 0


def test_prefill_and_decode_servers_are_counted_apart() -> None:
    def pickers() -> list[Picker]:
        fleets = [Fleet(), Fleet()]
        for fleet, names in zip(fleets, (("p0", "p1"), ("d0", "d1")), strict=True):
            for name in names:
                fleet.add(name)
        return [Picker(fleets[0], named("least-ttft")), Picker(fleets[1], named("least-load"))]

    ours, theirs = pickers(), pickers()
    one, other, cursor = ReplicaState(bytes(16)), ReplicaState(b"\x01" * 16), Cursor()
    one.connect(ours)
    other.connect(theirs)
    asked = request(1)
    decisions = [picker.pick(asked, 1.0) for picker in ours]
    for picker, decision in zip(ours, decisions, strict=True):
        picker.routed(decision, 1.0)
    for message in one.next_messages(cursor, 1.0):
        other.receive(message, 1.0)
    for picker, decision in zip(theirs, decisions, strict=True):
        assert {server.name: server.elsewhere for server in picker.fleet if server.elsewhere} == {decision.server: 1}
        assert picker.pick(request(2), 1.0).server != decision.server
    ours[0].succeeded(decisions[0], 1.1)
    ours[0].on_request_end(decisions[0], 1.1)
    for message in one.next_messages(cursor, 1.2):
        other.receive(message, 1.2)
    assert [sum(server.elsewhere for server in picker.fleet) for picker in theirs] == [0, 1]
