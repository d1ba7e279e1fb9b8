"""What an operator asks of running satellites: who answers, what they hold, and to move on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import CommandsRefused, ConstellationError, InvalidInput, NoConstellation
from skymemory.protocol.client import Finished
from skymemory.protocol.messages import pack_moves, unpack_housekeeping
from skymemory.protocol.whereabouts import MOST_PUSHED, MOST_PUSHED_AT_ONCE
from skymemory.protocol.wire import Op
from skymemory.testbed.plan import ConstellationPlan
from skymemory.testbed.survey import Survey
from skymemory.testbed.wiring import control_client, worst_round_trip_s
from skymemory.transport.udp_client import UdpClient

PATIENCE_S = 1.0
MOST_PATIENCES = 10
"""A host that goes on answering, or is busy, is waited for so many times as long."""
_START_PATIENCE_S = 5.0
"""Where faults are injected, some twenty questions to the last satellites fit into it."""
_MOST_START_S = 300.0
_LOOK_S = 0.5
"""How often it is asked which hosts are busy."""
_OFF = ""
"""In a survey, the host of those who are expected to be silent."""
MAX_MOVES = MOST_PUSHED_AT_ONCE
_SETTLE_POLL_S = 0.05
_QUIET_S = 0.3
"""A handover is over when nothing has changed for so long: later than that none begins. Not a number of polls, which of
many satellites far away take longer than the box stands still.
"""

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


class Silence:
    """How long silent satellites are waited for, and who of the hosts is only busy.

    ``patience_s`` beside the round trip; as much again whenever their host has answered or been ``busy``, up to
    ``most_s``. Of the satellites that are ``off`` no answer is expected: they get ``patience_s`` and no more.
    """

    def __init__(
        self, patience_s: float = PATIENCE_S, most_s: float | None = None, *,
        busy: Callable[[], Collection[str]] = tuple, off: Collection[SatelliteId] = (),
    ) -> None:  # fmt: skip
        self.patience_s = patience_s
        self.most_s = MOST_PATIENCES * patience_s if most_s is None else most_s
        self.busy = busy
        self.off = frozenset(off)

    def survey(self, plan: ConstellationPlan, satellites: Collection[SatelliteId]) -> Survey:
        """A survey of these satellites."""
        hosts = {host.name: [one for one, _ in plan.addresses_of(host) if one in satellites] for host in plan.hosts}
        expected = {host: [one for one in mine if one not in self.off] for host, mine in hosts.items()}
        expected[_OFF] = [one for mine in hosts.values() for one in mine if one in self.off]
        return Survey(expected, self.patience_s, self.most_s, worst_round_trip_s(plan, satellites))


def _ask_all(
    client: UdpClient, plan: ConstellationPlan, op: Op, body: bytes, satellites: Iterable[SatelliteId], silence: Silence
) -> dict[SatelliteId, Finished | None]:
    """Each satellite's answer; None from one that gave none. Raises ``CommandsRefused`` where that is all that
    they say to a PING.
    """
    refused = False
    answers: dict[SatelliteId, Finished | None] = dict.fromkeys(satellites)
    if not answers:
        return answers
    survey = silence.survey(plan, answers.keys())
    under_way: dict[int, SatelliteId] = {}
    with client.lock:
        every_s = min(_LOOK_S, silence.patience_s / 2)
        look_s = client.now_s() + every_s
        while True:
            now_s = client.now_s()
            if now_s >= look_s:
                survey.busy(silence.busy(), now_s)
                look_s = now_s + every_s
            for satellite in survey.to_ask(now_s):
                under_way[client.machine.ask(op, body, satellite, now_s, once=True)] = satellite
            if not survey.waiting:
                break
            for number, answer in client.run_any(under_way, min(survey.next_s(now_s), look_s)).items():
                satellite = under_way.pop(number)
                refused |= op is Op.PING and answer.report.failure == "refused"  # an ADVANCE may be, for going far
                if answer.ok:
                    answers[satellite] = answers[satellite] or answer
                    survey.answered(satellite, client.now_s())
        for number in under_way:
            client.machine.cancel(number)
    if refused and not any(answers.values()):
        raise CommandsRefused()
    return answers


def _ping(
    client: UdpClient, plan: ConstellationPlan, satellites: Iterable[SatelliteId], silence: Silence
) -> dict[SatelliteId, Housekeeping | None]:
    answers = _ask_all(client, plan, Op.PING, b"", satellites, silence)
    return {satellite: None if answer is None else _housekeeping(answer) for satellite, answer in answers.items()}


def _housekeeping(answer: Finished) -> Housekeeping:
    """What the satellite says, and ``clock_off_us``: by how much its clock is wrong, or ours, at the very least."""
    off_s = max(0.0, abs(answer.report.clock_ahead_s) - answer.report.seconds / 2)
    return {**unpack_housekeeping(answer.body), "clock_off_us": round(off_s * 1e6)}


def ping_all(
    plan: ConstellationPlan, silence: Silence | float = PATIENCE_S, satellites: Iterable[SatelliteId] | None = None
) -> dict[SatelliteId, Housekeeping | None]:
    """The housekeeping (fields of ``HOUSEKEEPING_FIELDS``, and ``clock_off_us``) of each satellite, or of these; None
    where none came in time: ``silence``, or so many seconds beside the round trip.
    """
    silence = silence if isinstance(silence, Silence) else Silence(silence)
    client = control_client(plan, 2 * silence.most_s)
    try:
        return _ping(client, plan, plan.torus.satellites() if satellites is None else satellites, silence)
    finally:
        client.close()


def confirm_all_answer(plan: ConstellationPlan, busy: Callable[[], Collection[str]]) -> None:
    """Raise ``ConstellationError`` naming the hosts some of whose satellites do not answer, although they are not
    ``busy``.
    """
    answers = ping_all(plan, Silence(_START_PATIENCE_S, _MOST_START_S, busy=busy))
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
    silence = Silence()
    client = control_client(plan, 2 * silence.most_s)
    satellites = plan.torus.satellites()
    try:
        began_s = time.monotonic()
        before = _ping(client, plan, satellites, silence)
        moves_before = pushed_moves(before.values())
        moves_after = (moves_before[0] + slot_moves, moves_before[1] + plane_moves)
        if max(map(abs, moves_after)) > MOST_PUSHED:
            raise InvalidInput(f"pushed moves {moves_after}: satellites take {MOST_PUSHED} in all, so move back first")
        living = [satellite for satellite in satellites if before[satellite] is not None]
        answers = _ask_all(client, plan, Op.ADVANCE, pack_moves(*moves_after), living, silence)
        acknowledged = sum(answer is not None for answer in answers.values())
        now, settled = _settle(client, plan, living, began_s + patience_s)
        return Rotation(
            moves_before, moves_after, len(satellites), acknowledged,
            _migrated(now)[0] - _migrated(before)[0], settled, time.monotonic() - began_s,
        )  # fmt: skip
    finally:
        client.close()


def _settle(
    client: UdpClient, plan: ConstellationPlan, living: list[SatelliteId], deadline_s: float
) -> tuple[dict[SatelliteId, Housekeeping | None], bool]:
    """Ask until what was handed over has stopped changing and all of it has arrived."""
    last, since_s = (-1, -1), 0.0
    while True:
        asked_s = time.monotonic()
        answers = _ping(client, plan, living, Silence())
        migrated = _migrated(answers)
        if migrated != last:
            last, since_s = migrated, asked_s
        elif asked_s - since_s >= _QUIET_S:
            return answers, True
        if time.monotonic() > deadline_s:
            return answers, False
        time.sleep(_SETTLE_POLL_S)
