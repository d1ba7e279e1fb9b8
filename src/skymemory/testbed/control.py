"""What an operator asks of running satellites: who answers, what they hold, and to move on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import ConstellationError, InvalidInput, NoConstellation
from skymemory.protocol.client import Finished
from skymemory.protocol.messages import pack_moves, unpack_housekeeping
from skymemory.protocol.whereabouts import MOST_PUSHED, MOST_PUSHED_AT_ONCE
from skymemory.protocol.wire import Op
from skymemory.testbed.plan import ConstellationPlan
from skymemory.testbed.wiring import control_client, worst_round_trip_s
from skymemory.transport.udp_client import UdpClient

PATIENCE_S = 1.0
FAULTY_ROUNDS = 5
MAX_MOVES = MOST_PUSHED_AT_ONCE
_SETTLE_POLL_S = 0.05
_SETTLED_POLLS = 3

Housekeeping = dict[str, int]


@dataclass(frozen=True, slots=True)
class Rotation:
    """What one ``rotate`` did. Moves are (slot, plane); chunks and satellites are counts."""

    moves_before: tuple[int, int]
    moves_after: tuple[int, int]
    satellites: int
    acknowledged: int
    chunks_migrated: int
    settled: bool
    seconds: float

    @property
    def complete(self) -> bool:
        return self.acknowledged == self.satellites and self.settled


def _ask_all(
    client: UdpClient, op: Op, body: bytes, satellites: Iterable[SatelliteId]
) -> dict[SatelliteId, Finished | None]:
    """Each satellite's answer; None from one that gave none."""
    with client.lock:
        numbers = {client.machine.ask(op, body, satellite, client.now_s()): satellite for satellite in satellites}
        finished = client.run(numbers)
    return {satellite: finished[number] if finished[number].ok else None for number, satellite in numbers.items()}


def _ping(client: UdpClient, satellites: Iterable[SatelliteId]) -> dict[SatelliteId, Housekeeping | None]:
    answers = _ask_all(client, Op.PING, b"", satellites)
    return {satellite: None if answer is None else _housekeeping(answer) for satellite, answer in answers.items()}


def _housekeeping(answer: Finished) -> Housekeeping:
    """What the satellite says, and ``clock_off_us``: by how much its clock is wrong, or ours, at the very least."""
    off_s = max(0.0, abs(answer.report.clock_ahead_s) - answer.report.seconds / 2)
    return {**unpack_housekeeping(answer.body), "clock_off_us": round(off_s * 1e6)}


def ping_all(
    plan: ConstellationPlan, patience_s: float = PATIENCE_S, satellites: Iterable[SatelliteId] | None = None
) -> dict[SatelliteId, Housekeeping | None]:
    """The housekeeping (fields of ``HOUSEKEEPING_FIELDS``, and ``clock_off_us``) of each satellite, or of these; None
    where none came in time.
    """
    client = control_client(plan, patience_s)
    try:
        return _ping(client, plan.torus.satellites() if satellites is None else satellites)
    finally:
        client.close()


def ping_these(
    plan: ConstellationPlan, satellites: Iterable[SatelliteId], patience_s: float
) -> dict[SatelliteId, Housekeeping | None]:
    """``ping_all`` of some; ``patience_s`` comes on top of the round trip."""
    asked = list(satellites)
    client = control_client(plan, patience_s + worst_round_trip_s(plan, asked))
    try:
        return _ping(client, asked)
    finally:
        client.close()


def confirm_all_answer(plan: ConstellationPlan) -> None:
    """Raise ``ConstellationError`` naming the hosts some of whose satellites do not answer.

    Who is silent is asked again: where the plan injects faults, some of 95 lose every packet of a second, and on a busy
    computer a thousand do not all get their turn in one. Where nobody new answers and there are no faults, that is all.
    """
    patience_s = PATIENCE_S + worst_round_trip_s(plan, plan.torus.satellites())
    answers = ping_all(plan, patience_s)
    for _ in range(FAULTY_ROUNDS):
        silent = [satellite for satellite, answer in answers.items() if answer is None]
        if not silent:
            break
        again = ping_all(plan, patience_s, silent)
        answers |= again
        if not (plan.faults.any or any(again.values())):
            break
    for host in plan.hosts:
        silent = [satellite for satellite, _ in plan.addresses_of(host) if answers[satellite] is None]
        if silent:
            raise ConstellationError(
                f"{len(silent)} satellites of {host.name} do not answer, the first is plane {silent[0].plane}, "
                f"slot {silent[0].slot}: all hosts were stopped"
            )


def pushed_moves(answers: Iterable[Housekeeping | None]) -> tuple[int, int]:
    """How far operators have moved the box by hand, as most satellites that answered have it."""
    told = Counter(
        (found.get("pushed_slot_moves", 0), found.get("pushed_plane_moves", 0)) for found in answers if found
    )
    if not told:
        raise NoConstellation("no satellite answers: see `skymemory constellation status`")
    return told.most_common(1)[0][0]


def _migrated(answers: dict[SatelliteId, Housekeeping | None]) -> tuple[int, int]:
    """Chunks handed over so far: (by those who gave, by those who took)."""
    alive = [found for found in answers.values() if found]
    return sum(f["chunks_migrated_out"] for f in alive), sum(f["chunks_migrated_in"] for f in alive)


def rotate(plan: ConstellationPlan, slot_moves: int, plane_moves: int, patience_s: float = 10.0) -> Rotation:
    """Advance the overhead point by hand and wait until the satellites have handed their chunks over.

    Satellites are told the total of pushed moves, so that asking again changes nothing. Those that do not
    answer keep their old view until their next packet tells them.
    """
    if not (abs(slot_moves) <= MAX_MOVES and abs(plane_moves) <= MAX_MOVES):
        raise InvalidInput(f"{slot_moves} slot and {plane_moves} plane moves: at most {MAX_MOVES} at once")
    if plan.access == "onboard":
        raise InvalidInput("the host flies with its satellite and its box with both: there is nothing to rotate")
    client = control_client(plan, PATIENCE_S)
    satellites = plan.torus.satellites()
    try:
        began_s = time.monotonic()
        before = _ping(client, satellites)
        moves_before = pushed_moves(before.values())
        moves_after = (moves_before[0] + slot_moves, moves_before[1] + plane_moves)
        if max(map(abs, moves_after)) > MOST_PUSHED:
            raise InvalidInput(f"pushed moves {moves_after}: satellites take {MOST_PUSHED} in all, so move back first")
        living = [satellite for satellite in satellites if before[satellite] is not None]
        answers = _ask_all(client, Op.ADVANCE, pack_moves(*moves_after), living)
        acknowledged = sum(answer is not None for answer in answers.values())
        now, settled = _settle(client, living, began_s + patience_s)
        return Rotation(
            moves_before, moves_after, len(satellites), acknowledged,
            _migrated(now)[0] - _migrated(before)[0], settled, time.monotonic() - began_s,
        )  # fmt: skip
    finally:
        client.close()


def _settle(
    client: UdpClient, living: list[SatelliteId], deadline_s: float
) -> tuple[dict[SatelliteId, Housekeeping | None], bool]:
    """Ask until what was handed over has stopped changing and all of it has arrived."""
    quiet_polls, last = 0, (-1, -1)
    while True:
        answers = _ping(client, living)
        migrated = _migrated(answers)
        quiet_polls = quiet_polls + 1 if migrated == last else 0
        last = migrated
        if quiet_polls >= _SETTLED_POLLS:
            return answers, True
        if time.monotonic() > deadline_s:
            return answers, False
        time.sleep(_SETTLE_POLL_S)
