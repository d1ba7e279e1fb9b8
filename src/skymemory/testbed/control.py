"""Operator commands to running satellites: ping, rotate, disable and enable; and the survey that sends them.

A survey limits retransmissions, which would keep an overloaded host from answering, and accepts late answers.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import CommandsRefused, ConstellationError, InvalidInput, NoConstellation
from skymemory.files import read_bounded, write_private
from skymemory.protocol.auth import MAX_SKEW_S
from skymemory.protocol.client.machine import Finished
from skymemory.protocol.clock import MOST_PUSHED, MOST_PUSHED_AT_ONCE
from skymemory.protocol.messages import pack_moves, unpack_housekeeping
from skymemory.protocol.wire import Op
from skymemory.reasons import Miss
from skymemory.testbed.connect import control_client, worst_round_trip_s
from skymemory.testbed.plan import ConstellationPlan
from skymemory.testbed.run_directory import RunDirectory
from skymemory.transport.udp_client import UdpClient

PATIENCE_S = 1.0
MOST_PATIENCES = 10
_START_PATIENCE_S = 5.0
_MOST_START_S = 300.0
_LOOK_S = 0.5
_CLOCKS_OF = 3
_OFF = ""
MAX_MOVES = MOST_PUSHED_AT_ONCE
_SETTLE_POLL_S = 0.05
_QUIET_S = 0.3

Housekeeping = dict[str, int]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Result of a ``rotate``; moves are (slot, plane)."""

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
    """Timeouts for silent satellites in a survey: ``patience_s`` plus the round trip.

    They restart when a satellite's host answers or is ``busy``, up to ``most_s``; ``off`` satellites are expected to be
    silent.
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
        """Return the schedule of requests to ``satellites``."""
        hosts = {
            host.name: [satellite for satellite, _ in plan.addresses_of(host) if satellite in satellites]
            for host in plan.hosts
        }
        expected = {
            host: [satellite for satellite in satellites_of_host if satellite not in self.off]
            for host, satellites_of_host in hosts.items()
        }
        expected[_OFF] = [
            satellite
            for satellites_of_host in hosts.values()
            for satellite in satellites_of_host
            if satellite in self.off
        ]
        return Survey(expected, self.patience_s, self.most_s, worst_round_trip_s(plan, satellites))


def _ask_all(
    client: UdpClient, plan: ConstellationPlan, op: Op, body: bytes, satellites: Iterable[SatelliteId], silence: Silence
) -> dict[SatelliteId, Finished | None]:
    """Send a request to each satellite until it answers or ``silence`` gives its host up. Return the answers."""
    # ``survey`` decides which satellite to ask when. Each packet is sent once, so that only the survey repeats it.
    # Answers to earlier packets count too: their operations stay in flight until the end.
    refused = False
    answers: dict[SatelliteId, Finished | None] = dict.fromkeys(satellites)
    if not answers:
        return answers
    survey = silence.survey(plan, answers.keys())
    in_flight: dict[int, SatelliteId] = {}
    with client.lock:
        every_s = min(_LOOK_S, silence.patience_s / 2)
        look_s = client.now_s() + every_s
        while True:
            now_s = client.now_s()
            if now_s >= look_s:
                survey.busy(silence.busy(), now_s)
                look_s = now_s + every_s
            for satellite in survey.to_ask(now_s):
                in_flight[client.machine.ask(op, body, satellite, now_s, once=True)] = satellite
            if not survey.waiting:
                break
            for number, answer in client.run_any(in_flight, min(survey.next_s(now_s), look_s)).items():
                satellite = in_flight.pop(number)
                # An ADVANCE may be refused for its range.
                refused |= op is Op.PING and answer.report.failure is Miss.REFUSED
                if answer.ok:
                    answers[satellite] = answers[satellite] or answer
                    survey.answered(satellite, client.now_s())
        for number in in_flight:
            client.machine.cancel(number)
    refused |= op is Op.PING and client.machine.counters.get("refusals_unproved") > 0
    if refused and not any(answers.values()):
        raise CommandsRefused()
    return answers


def _ping(
    client: UdpClient, plan: ConstellationPlan, satellites: Iterable[SatelliteId], silence: Silence
) -> dict[SatelliteId, Housekeeping | None]:
    answers = _ask_all(client, plan, Op.PING, b"", satellites, silence)
    return {satellite: None if answer is None else _housekeeping(answer) for satellite, answer in answers.items()}


def _housekeeping(answer: Finished) -> Housekeeping:
    off_s = max(0.0, abs(answer.report.clock_ahead_s) - answer.report.seconds / 2)
    return {**unpack_housekeeping(answer.body), "clock_off_us": round(off_s * 1e6)}


def ping_all(
    plan: ConstellationPlan, silence: Silence | float = PATIENCE_S, satellites: Iterable[SatelliteId] | None = None
) -> dict[SatelliteId, Housekeeping | None]:
    """Return each satellite's housekeeping and ``clock_off_us`` (lower bound of the clock difference); None without an
    answer.
    """
    silence = silence if isinstance(silence, Silence) else Silence(silence)
    client = control_client(plan, 2 * silence.most_s)
    try:
        return _ping(client, plan, plan.torus.satellites() if satellites is None else satellites, silence)
    finally:
        client.close()


def host_clocks_s(plan: ConstellationPlan, patience_s: float = PATIENCE_S) -> dict[str, float]:
    """Return the seconds that each host's clock is ahead, if it answers or refuses."""
    client = control_client(plan, 2 * patience_s)
    ahead_s: dict[str, float] = {}
    try:
        with client.lock:
            end_s = client.now_s() + patience_s + worst_round_trip_s(plan, plan.torus.satellites())
            host_of_request = {
                client.machine.ask(Op.PING, b"", satellite, client.now_s()): host.name
                for host in plan.hosts
                for satellite, _ in islice(plan.addresses_of(host), _CLOCKS_OF)
            }
            while (silent := [number for number, host in host_of_request.items() if host not in ahead_s]) and (
                client.now_s() < end_s
            ):
                for number, answer in client.run_any(silent, end_s).items():
                    host = host_of_request.pop(number)
                    if answer.ok or answer.report.failure is Miss.REFUSED:
                        ahead_s[host] = answer.report.clock_ahead_s
            for number in host_of_request:
                client.machine.cancel(number)
    finally:
        client.close()
    return ahead_s


def hosts_of_another_time(clocks_s: Mapping[str, float]) -> dict[str, float]:
    """Return the hosts whose clocks make them refuse others' signatures, with the seconds ahead."""
    ordered_s = sorted([*clocks_s.values(), *([0.0] if len(clocks_s) % 2 == 0 else [])])
    usual_s = ordered_s[len(ordered_s) // 2]
    return {host: ahead_s - usual_s for host, ahead_s in clocks_s.items() if abs(ahead_s - usual_s) > MAX_SKEW_S}


def confirm_all_answer(plan: ConstellationPlan, busy: Callable[[], Collection[str]]) -> None:
    answers = ping_all(plan, Silence(_START_PATIENCE_S, _MOST_START_S, busy=busy))
    for host in plan.hosts:
        silent = [satellite for satellite, _ in plan.addresses_of(host) if answers[satellite] is None]
        if silent:
            raise ConstellationError(
                f"{len(silent)} satellites of {host.name} do not answer, the first is plane {silent[0].plane}, "
                f"slot {silent[0].slot}: all hosts were stopped"
            )


def pushed_moves(answers: Iterable[Housekeeping | None]) -> tuple[int, int]:
    """Return operators' moves, by majority."""
    reported = Counter(
        (answer.get("pushed_slot_moves", 0), answer.get("pushed_plane_moves", 0)) for answer in answers if answer
    )
    if not reported:
        raise NoConstellation("no satellite answers; see `skymemory constellation status`")
    return reported.most_common(1)[0][0]


def _migrated(answers: dict[SatelliteId, Housekeeping | None]) -> tuple[int, int]:
    alive = [answer for answer in answers.values() if answer]
    return sum(answer["chunks_migrated_out"] for answer in alive), sum(answer["chunks_migrated_in"] for answer in alive)


def rotate(plan: ConstellationPlan, slot_moves: int, plane_moves: int, patience_s: float = 10.0) -> Rotation:
    """Move the overhead satellite by hand and wait for the handovers.

    Idempotent: the command has the total of moves.
    """
    if not (abs(slot_moves) <= MAX_MOVES and abs(plane_moves) <= MAX_MOVES):
        raise InvalidInput(f"{slot_moves} slot and {plane_moves} plane moves: expected at most {MAX_MOVES} at once")
    if plan.access == "onboard":
        raise InvalidInput("cannot rotate with access onboard: the box is fixed to the host's satellite")
    silence = Silence()
    client = control_client(plan, 2 * silence.most_s)
    satellites = plan.torus.satellites()
    try:
        started_s = time.monotonic()
        before = _ping(client, plan, satellites, silence)
        moves_before = pushed_moves(before.values())
        moves_after = (moves_before[0] + slot_moves, moves_before[1] + plane_moves)
        if max(map(abs, moves_after)) > MOST_PUSHED:
            raise InvalidInput(f"total moves {moves_after}: expected at most {MOST_PUSHED}; rotate back first")
        living = [satellite for satellite in satellites if before[satellite] is not None]
        answers = _ask_all(client, plan, Op.ADVANCE, pack_moves(*moves_after), living, silence)
        acknowledged = sum(answer is not None for answer in answers.values())
        now, settled = _settle(client, plan, living, started_s + patience_s)
        return Rotation(
            moves_before,
            moves_after,
            len(satellites),
            acknowledged,
            _migrated(now)[0] - _migrated(before)[0],
            settled,
            time.monotonic() - started_s,
        )
    finally:
        client.close()


def _settle(
    client: UdpClient, plan: ConstellationPlan, living: list[SatelliteId], deadline_s: float
) -> tuple[dict[SatelliteId, Housekeeping | None], bool]:
    """Ping satellites until no more chunks migrate. Return the last answers, and False if the deadline came first."""
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


# Disabled satellites are in a file of the run directory, which hosts read at their start and on SIGHUP.


_MAX_FILE_BYTES = 1 << 22
_PATIENCE_S = 3.0
_PING_S = 0.15


def read_outages(directory: RunDirectory) -> frozenset[SatelliteId]:
    path = directory.outages_path
    try:
        content = json.loads(read_bounded(path, _MAX_FILE_BYTES))
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: not JSON: {error}; `skymemory constellation enable --all` replaces it") from error
    match content:
        case {"disabled": list(pairs)} if all(_is_pair(pair) for pair in pairs):
            return frozenset(SatelliteId(*pair) for pair in pairs)
    raise InvalidInput(f'{path}: expected {{"disabled": [[plane, slot], ...]}}')


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(type(part) is int and part >= 0 for part in pair)


def disable(directory: RunDirectory, satellites: Collection[SatelliteId]) -> frozenset[SatelliteId]:
    """Disable satellites: they neither answer nor forward, and lose their chunks. Return all disabled satellites.

    Raises:
        ConstellationError: a host did not react.
    """
    return _change(directory, satellites, alive=False)


def enable(directory: RunDirectory, satellites: Collection[SatelliteId] | None) -> frozenset[SatelliteId]:
    """Enable satellites (None: all), empty; return those still disabled. Raises like ``disable``."""
    return _change(directory, satellites, alive=True)


def _change(directory: RunDirectory, satellites: Collection[SatelliteId] | None, alive: bool) -> frozenset[SatelliteId]:
    """Set satellites alive or dead in the outages file, and wait until their hosts here show it. Return the dead."""
    # Write the file first, then signal: a host that starts meanwhile reads the file, a running host reads it on
    # SIGHUP. Then wait until pings show the change, so that scripts need not guess.
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
            living[host].send_signal(signal.SIGHUP)
        _await(
            plan,
            [satellite for host in hosts & living.keys() for satellite in _mine(plan, host) if satellite in changed],
            alive,
        )
    return frozenset(dead)


def _mine(plan: ConstellationPlan, host: str) -> Iterable[SatelliteId]:
    return [satellite for satellite, _ in plan.addresses_of(plan.host_named(host))]


def _hosts_of(
    plan: ConstellationPlan, satellites: Collection[SatelliteId], directory: RunDirectory, everywhere: bool
) -> set[str]:
    """Return the hosts of these satellites that run here; without ``everywhere``, refuse any that run elsewhere."""
    unknown = [satellite for satellite in satellites if satellite not in plan.torus]
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
        raise InvalidInput(f"{elsewhere[0]} runs on another computer: run this command there, with its --run-dir")
    return hosts - set(elsewhere)


def _await(plan: ConstellationPlan, satellites: list[SatelliteId], alive: bool) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while satellites:
        answers = ping_all(plan, _PING_S, satellites)
        satellites = [satellite for satellite in satellites if (answers[satellite] is not None) != alive]
        if satellites and time.monotonic() > deadline_s:
            first = satellites[0]
            raise ConstellationError(
                f"{len(satellites)} satellites {'do not answer' if alive else 'still answer'}, the first is plane "
                f"{first.plane}, slot {first.slot}: see the log of its host in the run directory"
            )


WINDOW = 64
OVERDUE_S = 0.25
"""Retransmission timeout beyond the round trip."""
REPEATED_PER_S = 10.0


class Survey:
    """Schedule of a request to each satellite, and of giving up, without I/O or clock.

    A host is given up if all its satellites were asked, none answered for ``patience_s``, and it was not ``busy``; at
    the latest after ``most_s``.
    """

    def __init__(
        self, hosts: Mapping[str, Sequence[SatelliteId]], patience_s: float, most_s: float, round_trip_s: float = 0.0
    ) -> None:
        self._host_of = {satellite: host for host, satellites in hosts.items() for satellite in satellites}
        # Hosts not given up, with their satellites that have not answered.
        self._open = {host: set(satellites) for host, satellites in hosts.items() if satellites}
        # Alternate between hosts, so that they answer in parallel.
        turns = chain.from_iterable(zip_longest(*hosts.values()))
        self._unasked = [satellite for satellite in turns if satellite is not None][::-1]
        self._patience_s, self._most_s = patience_s + round_trip_s, most_s + round_trip_s
        self._overdue_s = OVERDUE_S + round_trip_s
        # Requests whose answer is not overdue yet (``WINDOW`` at most), with the time when it is.
        self._fresh: dict[SatelliteId, float] = {}
        self._waits_s: dict[SatelliteId, float] = {}  # from the last request to the next, doubled each time
        self._overdue: dict[SatelliteId, float] = {}  # times of the last requests, all to be repeated
        self._began_s: dict[str, float] = {}  # times of the first requests
        self._progress_s: dict[str, float] = {}  # times of last answers, first requests to satellites, or ``busy``

    @property
    def waiting(self) -> dict[str, int]:
        return {host: len(satellites) for host, satellites in self._open.items()}

    def to_ask(self, now_s: float) -> list[SatelliteId]:
        """Return the satellites to ask now: all for the first time, then the overdue."""
        self._expire(now_s)
        again = sorted((at_s, satellite) for at_s, satellite in self._again_s() if at_s <= now_s)
        chosen: list[SatelliteId] = []
        while len(self._fresh) < WINDOW and (self._unasked or again):
            # First requests go before retransmissions.
            satellite = self._unasked.pop() if self._unasked else again.pop(0)[1]
            if satellite in self._open.get(self._host_of[satellite], ()):
                self._ask(satellite, now_s)
                chosen.append(satellite)
        return chosen

    def _ask(self, satellite: SatelliteId, now_s: float) -> None:
        host = self._host_of[satellite]
        self._overdue.pop(satellite, None)
        self._fresh[satellite] = now_s + self._overdue_s
        wait_s = self._waits_s.get(satellite)
        if wait_s is None:  # first request to it: the host's timeout starts with the last first request
            self._began_s.setdefault(host, now_s)
            self._progress_s[host] = now_s
            self._waits_s[satellite] = self._overdue_s
        else:
            self._waits_s[satellite] = 2 * wait_s

    def _max_interval_s(self, host: str) -> float:
        return max(self._overdue_s, len(self._open[host]) / REPEATED_PER_S)

    def _again_s(self) -> Iterator[tuple[float, SatelliteId]]:
        max_s = {host: self._max_interval_s(host) for host in self._open}
        for satellite, asked_s in self._overdue.items():
            yield asked_s + min(self._waits_s[satellite], max_s[self._host_of[satellite]]), satellite

    def answered(self, satellite: SatelliteId, now_s: float) -> None:
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
        for host in hosts:
            if host in self._open:
                self._progress_s[host] = max(now_s, self._progress_s.get(host, now_s))

    def _expire(self, now_s: float) -> None:
        """Mark requests without a timely answer as overdue, and give up silent hosts."""
        for satellite, until_s in list(self._fresh.items()):
            if until_s <= now_s:
                del self._fresh[satellite]
                self._overdue[satellite] = until_s - self._overdue_s  # the time of the request
        # A host is silent if all its satellites were asked and none has answered lately. Once it is given up, it is not
        # open any more, and its satellites are not asked again.
        unasked = {self._host_of[satellite] for satellite in self._unasked}
        for host in list(self._open):
            silent = host not in unasked and now_s >= self._progress_s.get(host, now_s) + self._patience_s
            if silent or now_s >= self._began_s.get(host, now_s) + self._most_s:
                for satellite in self._open.pop(host):
                    self._fresh.pop(satellite, None)
                    self._overdue.pop(satellite, None)

    def next_s(self, now_s: float) -> float:
        ends = (self._progress_s.get(host, now_s) + self._patience_s for host in self._open)
        again = (at_s for at_s, _ in self._again_s()) if len(self._fresh) < WINDOW else ()
        return min([*self._fresh.values(), *again, *ends], default=now_s)
