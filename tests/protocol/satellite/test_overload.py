"""A host that is late: its satellites take none for dead, defer background work, and make up for it later."""

from __future__ import annotations

import random
import zlib

import pytest
from tests.protocol.conftest import World, key_of
from tests.protocol.datagrams import receive_datagram

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.protocol import messages
from skymemory.protocol.clock import MOST_PUSHED, MOST_PUSHED_AT_ONCE, MoveClock, SkyMap
from skymemory.protocol.congestion import LONG_HOLD_S, SHORT_HOLD_S, Throttle
from skymemory.protocol.satellite.handover import ChunkHandover
from skymemory.protocol.satellite.links import Neighbours
from skymemory.protocol.satellite.machine import SatelliteConfig, SatelliteMachine
from skymemory.protocol.satellite.overload import MOST_AGE_S, MOST_BYTES, Lateness, Postponed
from skymemory.protocol.satellite.routing import Declaration, LinksBody, LinkState
from skymemory.protocol.satellite.state import SatelliteState
from skymemory.protocol.wire import (
    GROUND_SHELL,
    Address,
    ChunkRef,
    Op,
    PlacementTag,
    SkyHeader,
    Status,
    build_packet,
    bulk_batch,
    parse_packet,
)

TORUS, HERE, CENTRE = Torus(5, 19), SatelliteId(2, 8), SatelliteId(2, 9)
EAST, EAST_OF_CENTRE = SatelliteId(2, 9), SatelliteId(2, 10)
KEY, THERE = bytes(32), SatelliteId(0, 1)


class Links:
    """One satellite's neighbours, and all that it says."""

    def __init__(self) -> None:
        self.lateness = Lateness()
        self.said: list[tuple[float, SatelliteId, LinksBody]] = []
        state = SatelliteState(SatelliteConfig(HERE, 1 << 20), SkyMap(TORUS, CENTRE), MoveClock(), 0.0, self.lateness)
        state.outbox.send_links = self.record
        self.links = state.links
        self.it = Neighbours(state)

    def record(self, neighbour: SatelliteId, body: bytes, now_s: float) -> None:
        self.said.append((now_s, neighbour, LinksBody.unpack(body)))

    def run(self, until_s: float) -> None:
        while (due_s := self.it.next_timer_s()) is not None and due_s <= until_s:
            self.it.handle_timer(due_s)

    def hear(self, body: LinksBody, source: SatelliteId, now_s: float) -> None:
        header = SkyHeader(Op.LINKS, Address(*HERE), Address(*source), 0, 0)
        packet = parse_packet(build_packet(header, body.pack(), 0, now_s))
        self.it.receive([packet], source, now_s)


# --- a late satellite takes no other for dead ---


def test_a_silence_while_we_were_stopped_is_no_death():
    """All deadlines have passed when we wake: nothing was heard, but nothing was read either."""
    links = Links()
    links.it.on_packet_sent(EAST, 0.0)
    links.lateness.measured(15.0, 15.0)
    for now_s in (15.0, 15.0, 15.0, 15.0, 15.0):
        links.it.handle_timer(now_s)
    assert links.links.is_up(HERE, EAST)
    links.it.on_packet_received(EAST, 15.1)
    links.run(40.0)
    assert links.links.is_up(HERE, EAST)


def test_a_last_question_that_could_not_be_answered_in_time_is_asked_again():
    """Three questions were unanswered and the fourth had just been asked when we were stopped."""
    links = Links()
    links.it.on_packet_sent(EAST, 0.0)
    links.run(0.19)
    links.lateness.measured(15.0, 15.0)
    links.it.handle_timer(15.0)
    assert links.links.is_up(HERE, EAST)


def test_who_is_dead_is_found_out_all_the_same_once_we_are_on_time():
    links = Links()
    links.it.on_packet_sent(EAST, 0.0)
    links.lateness.measured(15.0, 15.0)
    links.it.handle_timer(15.0)
    links.run(30.0)
    assert not links.links.is_up(HERE, EAST)


def test_on_time_the_dead_are_found_out_as_fast_as_ever():
    links = Links()
    links.it.on_packet_sent(EAST, 0.0)
    links.run(0.21)
    assert not links.links.is_up(HERE, EAST)


def test_a_neighbour_that_says_that_it_is_late_gets_so_much_longer():
    links = Links()
    links.hear(LinksBody(False, (0, 0), 0, late_s=0.5), EAST, 0.0)
    links.it.on_packet_sent(EAST, 0.3)
    links.run(1.3)
    assert links.links.is_up(HERE, EAST)
    links.run(10.0)
    assert not links.links.is_up(HERE, EAST)
    said = {body.late_s for _, _, body in links.said}
    links.lateness.measured(0.42, 10.0)
    links.it.greet(10.0)
    assert said == {0.0} and links.said[-1][2].late_s == pytest.approx(0.42)


def test_when_overload_ends_the_lost_are_asked_at_once():
    links = Links()
    links.it.on_packet_sent(EAST, 0.0)
    links.run(30.0)
    asked = len(links.said)
    links.it.probe_down(30.1)
    links.it.handle_timer(30.1)
    assert [(when_s, to) for when_s, to, body in links.said[asked:] if body.answer_me] == [(30.1, EAST)]


# --- floods and routes ---


@pytest.mark.brief()
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_news_without_end_costs_a_steady_rate(seed):
    """A storm of declarations, new ones from all sides: what is passed on is bounded by time, not by how many come."""
    links, dice = Links(), random.Random(seed)
    everyone = [satellite for satellite in TORUS.satellites() if satellite != HERE]
    for number in range(20_000):
        now_s = 100.0 + number * 0.001
        for neighbour in TORUS.neighbours(HERE):
            links.it.on_packet_received(neighbour, now_s)
        links.run(now_s)
        declaration = Declaration(dice.choice(everyone), dice.randrange(16), int(now_s * 1e3))
        links.hear(LinksBody(False, (0, 0), 0, [declaration]), dice.choice(TORUS.neighbours(HERE)), now_s)
        links.links.onward(HERE, dice.choice(everyone), EAST)
    for neighbour in set(TORUS.neighbours(HERE)):
        floods = sum(to == neighbour and bool(body.declarations) for _, to, body in links.said)
        assert 20 <= floods <= 64 + 20 + 1
    assert links.links.trees_grown <= 64 + 20 + 1 + 95, "one tree a change of the topology that counts"
    links.run(200.0)
    known = {declaration.origin: declaration for declaration in links.links.declared()}
    passed_on: dict[SatelliteId, int] = {}
    for _, _, body in links.said:
        for declaration in body.declarations:
            passed_on[declaration.origin] = max(passed_on.get(declaration.origin, 0), declaration.made_ms)
    others = known.keys() - {HERE}
    assert {origin: known[origin].made_ms for origin in others} == {origin: passed_on[origin] for origin in others}


def test_the_first_news_is_passed_on_at_once():
    links = Links()
    links.hear(LinksBody(False, (0, 0), 0, [Declaration(SatelliteId(0, 0), 1, 1)]), EAST, 0.5)
    reported = [to for when_s, to, body in links.said if body.declarations and when_s == 0.5]
    assert sorted(reported) == sorted(set(TORUS.neighbours(HERE)) - {EAST})


def test_what_we_are_said_to_have_declared_in_the_future_holds_back_no_news():
    """A clock that was ahead before a restart, or a forgery: it is contradicted, and the next news goes out now."""
    links = Links()
    links.hear(LinksBody(False, (0, 0), 0, [Declaration(HERE, 1, 1_055_000)]), EAST, 1_000.0)
    links.said.clear()
    links.hear(LinksBody(False, (0, 0), 0, [Declaration(SatelliteId(0, 0), 1, 1_001_000)]), EAST, 1_001.0)
    links.it.on_packet_sent(EAST, 1_001.0)
    links.run(1_003.0)
    reported = [(body.declarations, to) for _, to, body in links.said if body.declarations]
    others = set(TORUS.neighbours(HERE)) - {EAST}
    assert {to for declared, to in reported if declared[0].origin == SatelliteId(0, 0)} == others
    assert {to for declared, to in reported if declared[0].origin == HERE} == others, "and that EAST is silent"


def test_all_ways_from_here_cost_one_search():
    state = LinkState(TORUS)
    state.learn(Declaration(SatelliteId(2, 10), 0b1010, 1), 0.0)
    for there in TORUS.satellites():
        if there != HERE:
            state.onward(HERE, there, TORUS.next_hop(HERE, there))
    assert state.trees_grown == 1 and state.satellites_searched == TORUS.size


def test_a_link_that_is_lost_here_is_bypassed_before_routes_are_recomputed():
    state = LinkState(TORUS)
    for number in range(200):  # the throttle is at its longest
        state.learn(Declaration(SatelliteId(0, 0), number % 2 + 1, number + 1), number * 0.01)
    state.onward(HERE, SatelliteId(2, 12), EAST)
    grown = state.trees_grown
    east_of_here = 0b0010
    assert state.learn(Declaration(HERE, east_of_here, 3_000), 2.0, at_once=True)
    assert state.onward(HERE, SatelliteId(2, 12), EAST) not in (EAST, None)
    assert state.trees_grown == grown + 1
    assert state.learn(Declaration(HERE, 0, 3_001), 2.001, at_once=True)
    assert state.onward(HERE, SatelliteId(2, 12), EAST) == EAST, "and used again as soon as it is there"


def test_a_throttle_lets_some_through_at_once_and_then_one_in_its_longest_hold():
    throttle, times = Throttle(), []
    for step in range(100_000):
        now_s = 10.0 + step * 0.001
        if throttle.is_open(now_s):
            throttle.done(now_s)
            times.append(now_s)
    assert times[1] - times[0] == pytest.approx(SHORT_HOLD_S, abs=1e-3)
    assert times[-1] - times[-2] == pytest.approx(LONG_HOLD_S, abs=1e-3)
    assert len(times) <= 64 + 100


def test_a_throttle_without_a_short_hold_lets_exactly_so_many_through_at_once():
    throttle = Throttle(16, 0.0)
    for now_s in (10.0, 100.0):
        taken = 0
        while throttle.is_open(now_s):
            throttle.done(now_s)
            taken += 1
        assert taken == 16


# --- handovers ---


def test_a_window_closes_without_answers_and_opens_again():
    handover = ChunkHandover(32, 0.1, 1.0)
    for number in range(200):
        handover.enqueue(THERE, [(number.to_bytes(32, "big"), 0)])
    now_s = 0.0
    for _ in range(40):
        handover.bursts_to_send(now_s)
        now_s = handover.next_timer_s() or now_s
        if now_s > 3.0:
            break
    assert handover.window_bursts == 2
    for _ in range(400):
        for burst in list(handover._in_flight.values()):
            handover.acknowledged(burst.request_id, burst.names, now_s, now_s - 0.01)
        now_s += 0.01
        handover.bursts_to_send(now_s)
        if not handover._bursts_to_leave:
            break
    assert handover.window_bursts > 10


def test_a_lost_burst_among_answered_ones_is_no_reason_to_send_less():
    """Links lose two packets of a hundred: that is no congestion."""
    handover, dice, now_s = ChunkHandover(32, 0.1, 1.0), random.Random(1), 0.0
    for number in range(2000):
        handover.enqueue(THERE, [(number.to_bytes(32, "big"), 0)])
    on_their_way: list[tuple[float, int, list]] = []
    while handover._bursts_to_leave:
        for burst in handover.bursts_to_send(now_s):
            if dice.random() > 0.1:
                on_their_way.append((now_s + 0.03, burst.request_id, list(burst.names)))
        now_s += 0.005
        while on_their_way and on_their_way[0][0] <= now_s:
            when_s, number, names = on_their_way.pop(0)
            handover.acknowledged(number, names, now_s, when_s - 0.03)
    assert handover.window_bursts >= 30 and now_s < 5.0


def test_answers_that_wait_in_queues_make_the_window_smaller():
    handover = ChunkHandover(32, 0.1, 1.0)
    for number in range(1000):
        handover.enqueue(THERE, [(number.to_bytes(32, "big"), 0)])
    now_s = 0.0
    for round_trip_s in [0.03] * 3 + [2.5] * 20:
        sent_s = now_s
        bursts = handover.bursts_to_send(now_s)
        now_s += round_trip_s
        for burst in bursts:
            handover.acknowledged(burst.request_id, burst.names, now_s, sent_s)
    assert handover.window_bursts <= 8


def test_our_own_lateness_is_no_missing_acknowledgement():
    lateness = Lateness()
    handover = ChunkHandover(4, 0.1, 1.0, lateness=lateness)
    handover.enqueue(THERE, [(KEY, 0)])
    (burst,) = handover.bursts_to_send(0.0)
    lateness.measured(15.0, 15.0)
    assert handover.bursts_to_send(15.0) == [] and handover.retransmitted == 0
    assert handover.acknowledged(burst.request_id, [(KEY, 0)], 15.01) == 1


def test_relief_starts_every_back_off_from_its_shortest_but_for_who_is_full():
    handover = ChunkHandover(4, 0.1, 1.0)
    full, unreachable = (KEY, 0), (bytes([1]) * 32, 0)
    now_s = 0.0
    for _ in range(4):
        handover.enqueue(THERE, [full, unreachable])
        for burst in handover.bursts_to_send(now_s):
            handover.refused(burst.request_id, now_s, full=burst.names == [full])
        now_s = handover.next_timer_s() or 0.0
        assert sorted(handover.strays_due(now_s)) == [full, unreachable]
    handover.enqueue(THERE, [full, unreachable])
    for burst in handover.bursts_to_send(now_s):
        handover.refused(burst.request_id, now_s, full=burst.names == [full])
    assert handover.strays_due(now_s + 1.0) == []
    handover.retry_unanswered(now_s + 1.0)
    assert handover.strays_due(now_s + 1.0) == [unreachable]
    handover.enqueue(THERE, [unreachable])
    for burst in handover.bursts_to_send(now_s + 1.0):
        handover.refused(burst.request_id, now_s + 1.0)
    assert handover.next_timer_s() == pytest.approx(now_s + 11.0)


def test_relief_that_comes_too_often_is_put_off_and_not_lost():
    handover, name, now_s = ChunkHandover(4, 0.1, 1.0), (KEY, 0), 0.0
    for _ in range(80):
        handover.enqueue(THERE, [name])
        for burst in handover.bursts_to_send(now_s):
            handover.refused(burst.request_id, now_s)
        handover.retry_unanswered(now_s)
        relieved_s, due = now_s, handover.strays_due(now_s)
        while not due:
            now_s = handover.next_timer_s() or 999.0
            assert now_s <= relieved_s + LONG_HOLD_S
            due = handover.strays_due(now_s)
        assert due == [name]
        now_s += 0.05
    assert now_s > 80 * 0.05 + LONG_HOLD_S, "it came too often"


def test_a_chunk_that_was_stored_again_waits_for_a_full_satellite_like_any_other():
    """No satellite had answered for the chunk that it replaced: relief is for that one."""
    handover, name = ChunkHandover(4, 0.1, 1.0), (KEY, 0)
    for full in (False, True):
        handover.keep(KEY, [0])
        handover.enqueue(THERE, [name])
        for burst in handover.bursts_to_send(0.0):
            handover.refused(burst.request_id, 0.0, full=full)
    handover.retry_unanswered(1.0)
    assert handover.strays_due(1.0) == []


# --- background work yields ---


def packet(op: Op, body: bytes = b"", there: SatelliteId = CENTRE, ground: int = 0) -> bytes:
    source = Address(*there, GROUND_SHELL) if ground else Address(0, 0)
    return build_packet(SkyHeader(op, Address(*there), source, ground, 5), body, 0, 0.0)


def late_machine(memory_bytes: int = 1 << 20) -> SatelliteMachine:
    lateness = Lateness()
    sky = SkyMap(TORUS, CENTRE)
    machine = SatelliteMachine(SatelliteConfig(CENTRE, memory_bytes), sky, MoveClock(), 10.0, lateness)
    lateness.measured(0.4, 10.0)
    assert lateness.is_late(10.0)
    return machine


def test_a_late_satellite_answers_and_defers_background_work():
    machine = late_machine()
    neighbour = SatelliteId(2, 10)
    check = packet(Op.CHECK, b"\0\1\0\0" + bytes(56))
    receive_datagram(machine, check, neighbour, 10.0)
    assert machine.wants_work and machine.datagrams_to_send(10.0) == []
    receive_datagram(machine, packet(Op.PING, ground=7), ("ground", 7), 10.0)
    ((answer, to),) = machine.datagrams_to_send(10.0)
    assert to == ("ground", 7) and parse_packet(answer.headers).header.op is Op.PONG
    while machine.wants_work:
        machine.work(10.1)
    assert machine.counters.get("packets_received") == 2 and machine.counters.get("packets_malformed") == 1


def test_alarms_that_always_wait_do_not_keep_packets_waiting():
    """While a handover goes on an alarm is due at each of a satellite's turns."""
    machine = late_machine()
    for number in range(10):
        receive_datagram(machine, packet(Op.CHECK, number.to_bytes(2, "big")), SatelliteId(2, 10), 10.0)
    for _ in range(20):
        machine.handle_timer(10.1)
        machine.work(10.1)
    assert machine.counters.get("packets_received") == 10


def test_what_was_deleted_does_not_come_back_out_of_the_queue():
    """A handover waited here when its key was deleted, there and here."""
    machine, payload = late_machine(), b"chunk"
    ref = ChunkRef(KEY, 0, 1, 5, zlib.crc32(payload), 5, zlib.crc32(payload), PlacementTag(1, 1, 0, 0, 0)).pack()
    header = SkyHeader(Op.MIGRATE, Address(*CENTRE), Address(2, 10), 0, 5)
    (migrate,) = bulk_batch(header, ref, [payload], 0, 10.0).datagrams()
    receive_datagram(machine, migrate, SatelliteId(2, 10), 10.0)
    receive_datagram(machine, packet(Op.EVICT, messages.pack_keys([KEY]), ground=7), ("ground", 7), 10.1)
    while machine.wants_work:
        machine.work(10.0 + MOST_AGE_S - 0.1)
    assert len(machine.store) == 0 and machine.counters.get("packets_malformed") == 0
    receive_datagram(machine, migrate, SatelliteId(2, 10), 20.0)
    while machine.wants_work:
        machine.work(20.1)
    assert len(machine.store) == 1, "what is handed over later is not what was deleted"


def test_a_run_without_a_size_is_malformed_late_or_not():
    machine = late_machine()
    machine.receive_batch(packet(Op.CHECK, bytes(60)), 0, SatelliteId(2, 10), 10.0)
    assert machine.counters.get("packets_malformed") == 1 and not machine.wants_work


def test_an_overload_between_two_alarms_is_noticed():
    """No alarm of this satellite went off while its host was late; those it lost are asked at once all the same."""
    machine = late_machine()
    machine.lateness.measured(0.0, 11.0)
    machine.neighbours.on_packet_sent(EAST_OF_CENTRE, 11.0)
    now_s = 11.0
    while now_s < 30.0:
        machine.lateness.measured(0.0, now_s)
        machine.handle_timer(now_s)
        machine.datagrams_to_send(now_s)
        now_s = machine.next_timer_s() or 99.0
    assert now_s > 33.0, "of a link that is down the next try is far off"
    machine.lateness.measured(0.0, 30.0)
    machine.lateness.measured(1.0, 31.0)
    receive_datagram(machine, packet(Op.CHECK), SatelliteId(2, 8), 31.0)
    machine.lateness.measured(0.0, 31.1)
    while (due_s := machine.next_timer_s()) is not None and due_s < 32.0:
        machine.handle_timer(max(due_s, 31.1))
    asked = [to for batch, to in machine.datagrams_to_send(32.0) if batch.headers[9] == Op.LINKS]
    assert asked == [EAST_OF_CENTRE]


def test_what_is_put_off_is_bounded_and_the_oldest_goes_first():
    postponed = Postponed()
    for number in range(400):
        run = memoryview(packet(Op.CHECK, number.to_bytes(2, "big") + bytes(6000)))
        assert postponed.sift([(run, len(run))], THERE, 0.001 * number) == []
    kept = []
    while (found := postponed.take(0.4)) is not None:
        kept.append(int.from_bytes(found[0][-6002:-6000], "big"))
    assert kept == list(range(400 - len(kept), 400)) and postponed.dropped == 400 - len(kept) > 0
    assert sum(len(run) for _ in kept) <= MOST_BYTES
    run = memoryview(packet(Op.CHECK))
    postponed.sift([(run, len(run))], THERE, 1.0)
    assert postponed.take(1.0 + MOST_AGE_S + 0.1) is None and not postponed


@pytest.mark.parametrize(
    ("op", "ground", "put_off"),
    [
        (Op.MIGRATE, 0, True),
        (Op.CHECK, 0, True),
        (Op.NOTICE, 0, True),
        (Op.HAS, 0, True),
        (Op.RETAIN, 0, True),
        (Op.LINKS, 0, False),
        (Op.ACK, 0, False),
        (Op.HAS, 7, False),
        (Op.RETAIN, 7, False),
        (Op.GET, 7, False),
        (Op.SET, 7, False),
        (Op.PING, 7, False),
        (Op.ADVANCE, 7, False),
    ],
)
def test_signs_of_life_and_questions_of_ground_hosts_are_no_background(op, ground, put_off):
    run = memoryview(packet(op, bytes(8), ground=ground))
    assert bool(Postponed().sift([(run, len(run))], THERE, 0.0)) != put_off


def test_moves_that_were_missed_are_one_handover():
    """While the host is late the box moves on four times: chunks are looked at once, and go where they belong then."""
    world = World(clock=MoveClock(slot_period_s=1.0, time_scale=1.0))
    _, info = world.put("v", bytes(200_000))
    home = next(iter(world.spread(info)))
    machine = world.sim.satellites[home]
    before = machine.handover.chunks_planned
    machine.lateness.measured(0.4, 1.5)
    held = len(machine.store)
    for now_s in (2.0, 3.0, 4.0, 5.0):
        machine.lateness.measured(0.4, now_s)
        machine.handle_timer(now_s)
        assert machine.handover.chunks_planned == before and not machine.handover.idle
    assert machine.moves == (5, 0) and machine.wants_work and len(machine.store) == held
    machine.work(5.1)
    assert machine.handover.chunks_planned == before + held


def test_before_the_plan_is_made_nothing_is_known_to_rest():
    """A MISS then proves no loss: the chunk may be one that is to leave for here."""
    handover = ChunkHandover(4, 0.1, 1.0)
    assert handover.is_settled(KEY, [0])
    handover.moved = True
    assert not handover.is_settled(KEY, [0]) and not handover.idle


def test_on_time_again_what_waited_is_done_without_being_asked_for():
    world = World(clock=MoveClock(slot_period_s=1.0, time_scale=1.0))
    _, info = world.put("v", bytes(200_000))
    machine = world.sim.satellites[next(iter(world.spread(info)))]
    machine.lateness.measured(0.4, 1.5)
    machine.handle_timer(2.0)
    assert machine.wants_work
    machine.lateness.measured(0.0, 2.2)
    assert (machine.next_timer_s() or 99.0) <= 2.3
    machine.handle_timer(2.3)
    assert not machine.wants_work and machine.handover.chunks_planned > 0


# --- pushes ---


def advance(machine: SatelliteMachine, moves: tuple[int, int], now_s: float) -> tuple[int, int]:
    """Operation and status of the answer."""
    receive_datagram(machine, packet(Op.ADVANCE, messages.pack_moves(*moves), ground=7), ("ground", 7), now_s)
    ((answer, _),) = [one for one in machine.datagrams_to_send(now_s) if one[1] == ("ground", 7)]
    header = parse_packet(answer.headers).header
    return header.op, header.status


def test_the_clock_cannot_be_pushed_far():
    machine = SatelliteMachine(SatelliteConfig(CENTRE, 1 << 20), SkyMap(TORUS, CENTRE), MoveClock(), 0.0)
    for moves in ((1 << 30, 0), (0, -(1 << 30)), (MOST_PUSHED_AT_ONCE + 1, 0)):
        assert advance(machine, moves, 1.0) == (Op.UNREACHABLE, Status.REFUSED)
    assert machine.moves == (0, 0)
    assert advance(machine, (MOST_PUSHED_AT_ONCE, 3), 1.0) == (Op.ADVANCED, Status.OK)
    assert machine.moves == (MOST_PUSHED_AT_ONCE, 3)
    body = LinksBody(False, (MOST_PUSHED + 1, 0), 2_000)
    receive_datagram(machine, packet(Op.LINKS, body.pack()), SatelliteId(0, 0), 2.0)
    header = SkyHeader(Op.LINKS, Address(*CENTRE), Address(2, 8), 0, 0)
    receive_datagram(machine, build_packet(header, body.pack(), 0, 2.0), SatelliteId(2, 8), 2.0)
    assert machine.moves == (MOST_PUSHED_AT_ONCE, 3)


def test_nor_often_and_a_repetition_costs_nothing():
    machine = SatelliteMachine(SatelliteConfig(CENTRE, 1 << 20), SkyMap(TORUS, CENTRE), MoveClock(), 0.0)
    taken = [advance(machine, (number + 1, 0), 100.0 + 0.01 * number)[0] for number in range(500)]
    assert 16 <= taken.count(Op.ADVANCED) <= 16 + 5 + 1
    now = machine.moves
    assert all(advance(machine, now, 105.0) == (Op.ADVANCED, Status.OK) for _ in range(50))
    assert advance(machine, (0, 1), 130.0) == (Op.ADVANCED, Status.OK), "who rests may again"


def test_many_pushes_are_few_plans():
    world = World()
    _, info = world.put("v", bytes(200_000))
    machine = world.sim.satellites[next(iter(world.spread(info)))]
    before, held = machine.handover.chunks_planned, len(machine.store)
    for number in range(16):
        advance(machine, (number + 1, 0), 100.0 + 0.001 * number)
    machine.handle_timer(100.1)
    assert before < machine.handover.chunks_planned <= before + 3 * held
    assert key_of("v") == info.key
