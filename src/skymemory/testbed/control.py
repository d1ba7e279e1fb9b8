"""What an operator asks of running satellites: who answers, what they hold, and to move on."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import CommandsRefused, ConstellationError, InvalidInput, NoConstellation
from skymemory.files import read_bounded, write_private
from skymemory.protocol.client.machine import Finished
from skymemory.protocol.clock import MOST_PUSHED, MOST_PUSHED_AT_ONCE
from skymemory.protocol.messages import pack_moves, unpack_housekeeping
from skymemory.protocol.wire import Op
from skymemory.testbed.child import send_signal
from skymemory.testbed.connect import control_client, worst_round_trip_s
from skymemory.testbed.plan import ConstellationPlan
from skymemory.testbed.run_directory import RunDirectory
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
        self,
        patience_s: float = PATIENCE_S,
        most_s: float | None = None,
        *,
        busy: Callable[[], Collection[str]] = tuple,
        off: Collection[SatelliteId] = (),
    ) -> None:
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
            moves_before,
            moves_after,
            len(satellites),
            acknowledged,
            _migrated(now)[0] - _migrated(before)[0],
            settled,
            time.monotonic() - began_s,
        )
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


# Satellites that an operator has disabled: a file in the run directory that the hosts read when they are told to.
#
# What should be dead is written down, so a host that starts later knows it too; SIGHUP says that it has changed.


_MAX_FILE_BYTES = 1 << 22
_PATIENCE_S = 3.0
_PING_S = 0.15
"""A satellite that does not answer in this (and a round trip) is taken to be dead while we wait for it to be."""


def read_outages(directory: RunDirectory) -> frozenset[SatelliteId]:
    """The satellites that are to be dead. Raises ``InvalidInput`` for a damaged file."""
    path = directory.outages_path
    try:
        found = json.loads(read_bounded(path, _MAX_FILE_BYTES))
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: not JSON: {error}; `skymemory constellation enable --all` replaces it") from error
    match found:
        case {"disabled": list(pairs)} if all(_is_pair(pair) for pair in pairs):
            return frozenset(SatelliteId(*pair) for pair in pairs)
    raise InvalidInput(f"{path}: expected an object with a list of [plane, slot] as disabled")


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(type(part) is int and part >= 0 for part in pair)


def disable(directory: RunDirectory, satellites: Collection[SatelliteId]) -> frozenset[SatelliteId]:
    """Let these die: they neither answer nor forward, and what they hold is lost. All that are dead then.

    Raises:
        InvalidInput: a satellite that the constellation has not, or one whose host runs on another computer.
        ConstellationError: a host did not do as it was told.
    """
    return _change(directory, satellites, alive=False)


def enable(directory: RunDirectory, satellites: Collection[SatelliteId] | None) -> frozenset[SatelliteId]:
    """Let these (None: all) come back, empty. All that are still dead then. Raises as ``disable``."""
    return _change(directory, satellites, alive=True)


def _change(directory: RunDirectory, satellites: Collection[SatelliteId] | None, alive: bool) -> frozenset[SatelliteId]:
    with directory.locked():
        plan = directory.running_plan()
        if satellites is None:
            changed: Collection[SatelliteId] = plan.torus.satellites()
            before: frozenset[SatelliteId] = frozenset()
        else:
            changed, before = satellites, read_outages(directory)
        hosts = _hosts_of(plan, changed, directory, everywhere=satellites is None)
        dead = before - set(changed) if alive else before | set(changed)
        write_private(directory.outages_path, json.dumps({"disabled": sorted(dead)}) + "\n")
        living = directory.living()
        for host in hosts & living.keys():
            send_signal(living[host], signal.SIGHUP)
        _await(plan, [one for host in hosts & living.keys() for one in _mine(plan, host) if one in changed], alive)
    return frozenset(dead)


def _mine(plan: ConstellationPlan, host: str) -> Iterable[SatelliteId]:
    return [satellite for satellite, _ in plan.addresses_of(plan.host_named(host))]


def _hosts_of(
    plan: ConstellationPlan, satellites: Collection[SatelliteId], directory: RunDirectory, everywhere: bool
) -> set[str]:
    """The hosts that run these satellites, all of them on this computer."""
    unknown = [one for one in satellites if one not in plan.torus]
    if unknown:
        raise InvalidInput(
            f"no satellite {unknown[0].plane},{unknown[0].slot}: expected plane 0 to {plan.planes - 1} and slot 0 to "
            f"{plan.slots_per_plane - 1}"
        )
    hosts = {host.name for host in plan.hosts if not set(_mine(plan, host.name)).isdisjoint(satellites)}
    elsewhere = [
        host for host in hosts if directory.read_record(host) is None and not plan.host_named(host).is_loopback
    ]
    if elsewhere and not everywhere:
        raise InvalidInput(
            f"{elsewhere[0]} runs on another computer: say this there, with the run directory of its host"
        )
    return hosts - set(elsewhere)


def _await(plan: ConstellationPlan, satellites: list[SatelliteId], alive: bool) -> None:
    """Until they all answer, or none does."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while satellites:
        answers = ping_all(plan, _PING_S, satellites)
        satellites = [one for one in satellites if (answers[one] is not None) != alive]
        if satellites and time.monotonic() > deadline_s:
            first = satellites[0]
            raise ConstellationError(
                f"{len(satellites)} satellites {'do not answer' if alive else 'still answer'}, the first is plane "
                f"{first.plane}, slot {first.slot}: see the log of its host in the run directory"
            )


# Asking every satellite one thing without adding to the trouble of a busy host; no I/O, no clock: see ``control``.
#
# A thousand questions at once, each repeated within a second, are what keeps an overloaded host from answering; and an
# answer that comes after that second is thrown away. So few questions are under way at a time, an unanswered one is
# repeated ever more seldom where many of its host are unanswered, any answer counts whenever it comes, and a host is
# waited for as long as it makes progress.


WINDOW = 64
"""Questions under way. One that is overdue (``OVERDUE_S``) does not count: the dead would hold up the living."""
OVERDUE_S = 0.25
"""Beside the round trip. After it a question is repeated, and then each time after twice as long, while its host gets
more than ``REPEATED_PER_S``: where packets are lost, not late, a few silent satellites cost nothing to ask again.
"""
REPEATED_PER_S = 10.0
"""Repeated questions to one host: fewer than the most overloaded one that still makes progress can answer."""


class Survey:
    """Whom to ask when, and how long to wait for whom. ``hosts``: the satellites to be asked, by host.

    A host is given up when none of its satellites has answered for ``patience_s``, it has not been ``busy`` meanwhile,
    and each has been asked; at the latest ``most_s`` after it was first asked.
    """

    def __init__(
        self, hosts: Mapping[str, Sequence[SatelliteId]], patience_s: float, most_s: float, round_trip_s: float = 0.0
    ) -> None:
        self._host_of = {satellite: host for host, satellites in hosts.items() for satellite in satellites}
        self._open = {host: set(satellites) for host, satellites in hosts.items() if satellites}
        # One of each host in turn: they answer side by side.
        turns = chain.from_iterable(zip_longest(*hosts.values()))
        self._unasked = [satellite for satellite in turns if satellite is not None][::-1]
        self._patience_s, self._most_s = patience_s + round_trip_s, most_s + round_trip_s
        self._overdue_s = OVERDUE_S + round_trip_s
        self._fresh: dict[SatelliteId, float] = {}
        """Questions under way, by when they are overdue, in that order."""
        self._waits_s: dict[SatelliteId, float] = {}
        self._overdue: dict[SatelliteId, float] = {}
        """When those were asked last whose questions are overdue."""
        self._began_s: dict[str, float] = {}
        self._progress_s: dict[str, float] = {}

    @property
    def waiting(self) -> dict[str, int]:
        """How many satellites of each host have not answered, of the hosts that are still waited for."""
        return {host: len(satellites) for host, satellites in self._open.items()}

    def to_ask(self, now_s: float) -> list[SatelliteId]:
        """Ask these now; empty ``waiting`` ends the survey."""
        self._let_go(now_s)
        again = sorted((at_s, satellite) for at_s, satellite in self._again_s() if at_s <= now_s)
        asked: list[SatelliteId] = []
        while len(self._fresh) < WINDOW and (self._unasked or again):
            # Those who had no turn yet come first.
            satellite = self._unasked.pop() if self._unasked else again.pop(0)[1]
            if satellite in self._open.get(self._host_of[satellite], ()):
                self._ask(satellite, now_s)
                asked.append(satellite)
        return asked

    def _ask(self, satellite: SatelliteId, now_s: float) -> None:
        host = self._host_of[satellite]
        self._overdue.pop(satellite, None)
        self._fresh[satellite] = now_s + self._overdue_s
        wait_s = self._waits_s.get(satellite)
        if wait_s is None:  # its host's time begins with the last of its satellites
            self._began_s.setdefault(host, now_s)
            self._progress_s[host] = now_s
            self._waits_s[satellite] = self._overdue_s
        else:
            self._waits_s[satellite] = 2 * wait_s

    def _seldom_s(self, host: str) -> float:
        """The longest wait between two questions to one of its satellites, as many as are unanswered now."""
        return max(self._overdue_s, len(self._open[host]) / REPEATED_PER_S)

    def _again_s(self) -> Iterator[tuple[float, SatelliteId]]:
        """When to ask those again whose questions are overdue. A wait shrinks as others of the host answer: the last
        ones would otherwise wait for their turn among many until the host's patience is over.
        """
        seldom_s = {host: self._seldom_s(host) for host in self._open}
        for satellite, asked_s in self._overdue.items():
            yield asked_s + min(self._waits_s[satellite], seldom_s[self._host_of[satellite]]), satellite

    def answered(self, satellite: SatelliteId, now_s: float) -> None:
        """It has, however late; a second answer of one that was asked twice is progress of its host, too."""
        host = self._host_of[satellite]
        self._fresh.pop(satellite, None)
        self._overdue.pop(satellite, None)
        waiting = self._open.get(host)
        if waiting is not None:
            waiting.discard(satellite)
            self._progress_s[host] = now_s
            if not waiting:
                del self._open[host]

    def busy(self, hosts: Iterable[str], now_s: float) -> None:
        """These processes want the processor: their silence says nothing yet."""
        for host in hosts:
            if host in self._open:
                self._progress_s[host] = max(now_s, self._progress_s.get(host, now_s))

    def _let_go(self, now_s: float) -> None:
        """What is overdue, and the hosts that are given up."""
        for satellite, until_s in list(self._fresh.items()):
            if until_s <= now_s:
                del self._fresh[satellite]
                self._overdue[satellite] = until_s - self._overdue_s
        unasked = {self._host_of[satellite] for satellite in self._unasked}
        for host in list(self._open):
            silent = host not in unasked and now_s >= self._progress_s.get(host, now_s) + self._patience_s
            if silent or now_s >= self._began_s.get(host, now_s) + self._most_s:
                for satellite in self._open.pop(host):
                    self._fresh.pop(satellite, None)
                    self._overdue.pop(satellite, None)

    def next_s(self, now_s: float) -> float:
        """When to call ``to_ask`` again at the latest."""
        ends = (self._progress_s.get(host, now_s) + self._patience_s for host in self._open)
        again = (at_s for at_s, _ in self._again_s()) if len(self._fresh) < WINDOW else ()
        return min([*self._fresh.values(), *again, *ends], default=now_s)
