"""Selection of servers that get no requests, from health checks and requests.

1. ``on_sent``, ``on_answer``, ``on_fault``, ``on_dropped`` report attempts; ``on_check`` health checks.
2. ``avoided`` names servers that rest after failures (``evidence``), are silent (``silence``), ten times slower than
   others, or refuse connections.
3. ``take_decisions`` returns what changed since.

A server is ejected by ``failures`` failed checks in a row; by a single failed check if requests failed, too; or by
failures of several requests and clients. It returns after ``successes`` good checks or, if ejected by requests alone,
its rest. Then single requests probe it.

At most ``max_ejected`` of a fleet are out. Beyond that all are used (Envoy's panic threshold), except those that no
check can connect to. As a last resort, servers that refuse connections are tried: they may have restarted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple, Self

from skymemory.router.failure.evidence import REST_S, Attempts, Evidence, Failure
from skymemory.router.failure.faults import RULES, Fault
from skymemory.router.failure.silence import (
    KINDS,
    LEAST_SILENT_S,
    LEAST_WHOLE_SILENT_S,
    WHOLE,
    SentRequest,
    UsualWait,
    expected_s,
    lost_after_s,
    quiet_after_s,
    silent_after_s,
    stalled_after_s,
)

REFUSED_S = 1.0
CLIENTS_S = 60.0
"""Window of client activity: if two clients were active, two must fail at a server before others avoid it."""
SWEEP_S = 0.02
NEW_S = 5.0
"""Time in which an unproven server gets one request at a time."""
CHECK_S = 0.1
QUIET_CHECK_S = 1.0
SLOW, SLOW_ANSWERS, SLOW_SERVERS, SLOW_EVERY_S = 10.0, 8, 3, 2.0
"""Slow servers: factor over the median; minimum answers and servers; period."""
LEAST_USUAL_S = 0.001
BEGIN_S = 0.001
MOST_AGE_S = 120.0
NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class FailureLimits:
    """Failed and good checks in a row that eject and return a server; share of a fleet that may be ejected."""

    failures: int = 3
    successes: int = 2
    max_ejected: float = 0.5


class ServerDecision(NamedTuple):
    """``kind``: "eject", "return", "use", "leave" (no requests), "check" (now) or "move" (``attempts`` elsewhere)."""

    kind: str
    server: str
    why: str = ""
    attempts: tuple[Attempts, ...] = ()


class _ServerRecord:
    """State of a server; a time of -inf: never."""

    __slots__ = (
        "answered_s",
        "answers",
        "check_requested_s",
        "evidence",
        "failed_checks",
        "gets_requests",
        "good_check_s",
        "good_checks",
        "group",
        "has_lost_cache",
        "has_metrics",
        "is_check_due",
        "is_ejected",
        "is_last_resort",
        "is_new",
        "is_quiet",
        "is_refusing",
        "is_unhealthy",
        "is_unreachable",
        "metrics_progress_s",
        "name",
        "probe",
        "refused_until_s",
        "slow_until_s",
        "slowness",
        "stream_completed_s",
        "streams",
        "unanswered",
        "why",
    )

    def __init__(self, name: str, group: object) -> None:
        self.name, self.group = name, group
        self.evidence = Evidence()
        self.unanswered: dict[Attempts, SentRequest] = {}  # oldest first
        self.streams: dict[Attempts, tuple[float, float]] = {}  # times of sending and of the first byte
        self.stream_completed_s = -math.inf
        # Times of the last answer and of the start of the last good check.
        self.answered_s = self.good_check_s = -math.inf
        # True if metrics are read; time of their last progress.
        self.has_metrics, self.metrics_progress_s = False, -math.inf
        # No answer since it was added or recovered; it may be tried if all servers refuse.
        self.is_new = self.is_last_resort = True
        self.is_quiet = False  # answers are overdue
        self.probe: Attempts | None = None  # the single request that is sent to it after failures
        self.refused_until_s = self.slow_until_s = self.check_requested_s = -math.inf
        self.answers, self.slowness = 0, 0.0  # since the last comparison: answers; sum of waits over expected waits
        self.is_check_due = False
        self.failed_checks = self.good_checks = 0
        # By checks: unhealthy; refused a connection since then; not connected, or refused, at the last check. By checks
        # or requests: ejected.
        self.is_unhealthy = self.has_lost_cache = self.is_unreachable = self.is_refusing = self.is_ejected = False
        self.gets_requests = True  # False while it gets no requests at all
        self.why = ""  # reason of the last ejection or failed check


class AvoidedForProbe(frozenset[str]):
    """Servers to avoid so that a request probes a silent one; if it cannot, only ``failing`` are to be avoided."""

    failing: Set[str]

    def __new__(cls, names: Set[str], failing: Set[str]) -> Self:
        avoided = super().__new__(cls, names)
        avoided.failing = failing
        return avoided


class FailurePolicy:
    """Policy of a router. Not thread-safe; ``now_s`` must not decrease."""

    def __init__(self, limits: FailureLimits = FailureLimits(), *, are_checked: bool = True) -> None:
        """Without ``are_checked``, rests end by themselves."""
        self.limits = limits
        self._are_checked = are_checked
        self._records: dict[str, _ServerRecord] = {}
        self.doubted: dict[str, _ServerRecord] = {}  # servers that may have to be avoided
        self._answer_waits = tuple(UsualWait() for _ in KINDS)
        self._stream_gaps = UsualWait()
        self._usual_wait_s = [LEAST_USUAL_S for _ in KINDS]
        self._next_comparison_s = 0.0
        # Client of the last request; times of its last request and of any other client's.
        self._last_client, self._last_client_s, self._other_client_s = "", -math.inf, -math.inf
        self.next_sweep_s = 0.0
        self.decisions: list[ServerDecision] = []

    # -- membership

    def add(self, name: str, group: object = None, *, is_last_resort: bool = True) -> None:
        """Add or update a server.

        Args:
            group: fleet, of which a share may be ejected.
            is_last_resort: try it if all refuse. False: an attempt would cost another server's work.
        """
        record = self._records.get(name)
        if record is None:
            record = self._records[name] = _ServerRecord(name, group)
        record.group, record.is_last_resort = group, is_last_resort

    def remove(self, name: str) -> None:
        self._records.pop(name, None)
        self.doubted.pop(name, None)

    def is_ejected(self, name: str) -> bool:
        record = self._records.get(name)
        return record is not None and record.is_ejected

    def is_refusing(self, name: str) -> bool:
        record = self._records.get(name)
        return record is not None and record.is_ejected and record.is_refusing

    # -- from requests

    def on_request(self, client: str, now_s: float) -> None:
        if client != self._last_client:
            self._other_client_s, self._last_client = self._last_client_s, client
        self._last_client_s = now_s

    def on_sent(self, attempts: Attempts, server: str, now_s: float, estimate_s: float, kind: int) -> None:
        record = self._records.get(server)
        if record is None:
            return
        record.unanswered[attempts] = tuple.__new__(SentRequest, (now_s, estimate_s, kind))
        if record.is_new:
            self.doubted[server] = record
        if record.evidence.failures:
            record.probe = attempts  # the only request there until it is answered

    def on_answer(
        self, attempts: Attempts, server: str, now_s: float, is_good: bool = True, is_whole: bool = True
    ) -> None:
        """Record the first byte of an answer.

        Args:
            is_good: no error, not even a client error, whose time is no evidence.
            is_whole: complete; else ``on_complete`` or ``on_fault`` follows.
        """
        record = self._records.get(server)
        if record is None:
            return
        sent = record.unanswered.pop(attempts, None)
        record.answered_s, record.is_new, record.is_quiet = now_s, False, False
        sent_s = now_s
        if sent is not None:
            sent_s, estimate_s, kind = sent
            if is_good:
                wait_s, usual_s = now_s - sent_s, self._usual_wait_s[kind]
                self._answer_waits[kind].add(wait_s)
                record.answers += 1
                record.slowness += wait_s / (estimate_s if estimate_s > usual_s else usual_s)
        is_doubted = server in self.doubted
        if is_doubted:
            record.evidence.take_back(attempts)  # late, but answered
            attempts.remove_failure(server)
            record.refused_until_s = -math.inf
            self._update_ejection(record, now_s)
        if not is_whole:
            attempts.heard_s = now_s
            record.streams[attempts] = sent_s, now_s
        elif is_doubted or attempts.failed:
            self._on_answer_end(record, attempts, sent_s, now_s, is_good)

    def on_complete(self, attempts: Attempts, server: str, now_s: float, pieces: int = 0, is_good: bool = True) -> None:
        """Record the end of a stream of so many ``pieces``, which show the usual gap."""
        record = self._records.get(server)
        if record is None or (times := record.streams.pop(attempts, None)) is None:
            return
        record.stream_completed_s = now_s
        if pieces > 1:
            self._stream_gaps.add((now_s - times[1]) / (pieces - 1))
        self._on_answer_end(record, attempts, times[0], now_s, is_good)

    def _on_answer_end(
        self, record: _ServerRecord, attempts: Attempts, sent_s: float, now_s: float, is_good: bool
    ) -> None:
        """Clear the server of earlier failures, and blame the servers where this request failed."""
        if record.name in self.doubted:
            if record.probe is attempts:
                record.probe = None
            if sent_s >= record.evidence.last_s:
                record.evidence.clear(now_s)
            self._update_ejection(record, now_s)
        if attempts.failed and is_good:
            self._mark_failures_proven(attempts, now_s)

    def on_metrics(self, server: str, now_s: float, is_working: bool) -> None:
        """Record metrics. ``is_working``: they changed, so unanswered requests are long, not lost."""
        record = self._records.get(server)
        if record is None:
            return
        record.has_metrics = True
        if not is_working:
            return
        record.metrics_progress_s, record.is_quiet = max(record.metrics_progress_s, now_s), False
        silent = [
            attempts for attempts in (*record.unanswered, *record.streams) if attempts in record.evidence.failures
        ]
        for attempts in silent:
            record.evidence.take_back(attempts)
            attempts.remove_failure(server)
        if silent:
            self._update_ejection(record, now_s)

    def on_fault(self, attempts: Attempts, server: str, fault: Fault, now_s: float, wait_s: float = 0.0) -> None:
        """Record a failed attempt. ``wait_s``: rest that the server asked for."""
        record = self._records.get(server)
        if record is None:
            return
        self._remove_attempt(record, attempts)
        failure = Failure(attempts.client, fault, now_s, wait_s)
        rule = RULES[fault]
        if not rule.is_of_pair:
            record.refused_until_s = now_s + REFUSED_S
        if rule.is_of_pair or not self._are_checked:
            attempts.add_failure(server, failure)
            record.evidence.add(attempts, failure)
            if failure.accuses and attempts.is_suspect:
                self._withdraw_failures(attempts, now_s)
        if not rule.is_back_pressure:
            self._request_check(record, now_s)
        self._update_ejection(record, now_s)

    def on_dropped(self, attempts: Attempts, server: str, now_s: float) -> None:
        """Record that the client left before the answer: a fault only if the server was silent, others were not."""
        record = self._records.get(server)
        if record is None or (sent := record.unanswered.get(attempts)) is None:
            if record is not None:
                self._remove_attempt(record, attempts)
            return
        since_s = max(sent.sent_s, record.answered_s, record.metrics_progress_s)
        if now_s - since_s > self._silent_after_s(sent, record) and self._is_another_alive(record, since_s, now_s):
            self.on_fault(attempts, server, Fault.SILENT, now_s)
        else:
            self._remove_attempt(record, attempts)

    def on_end(self, attempts: Attempts, now_s: float) -> None:
        for name, failure in attempts.failed.items():
            record = self._records.get(name)
            if record is not None and attempts in record.evidence.failures and not failure.is_final:
                record.evidence.failures[attempts] = replace(record.evidence.failures[attempts], is_final=True)
                self._update_ejection(record, now_s)

    def _remove_attempt(self, record: _ServerRecord, attempts: Attempts) -> None:
        record.unanswered.pop(attempts, None)
        record.streams.pop(attempts, None)
        if record.probe is attempts:
            record.probe = None

    def _withdraw_failures(self, attempts: Attempts, now_s: float) -> None:
        """Blame no server for a request that failed at several."""
        for name in attempts.accused:
            if (record := self._records.get(name)) is not None:
                record.evidence.take_back(attempts)
                self._update_ejection(record, now_s)

    def _mark_failures_proven(self, attempts: Attempts, now_s: float) -> None:
        for name in attempts.accused:
            record, failure = self._records.get(name), attempts.failed[name]
            if record is not None and failure.at_s > record.evidence.cleared_s:
                record.evidence.add(attempts, replace(failure, is_proven=True))
                self._update_ejection(record, now_s)

    # -- from checks

    def on_check(
        self, server: str, why: str, began_s: float, now_s: float, *, is_refused: bool = False, is_reached: bool = True
    ) -> None:
        """Record a health check.

        Args:
            why: reason of a failure, or empty.
            is_refused: the process and its cache are gone.
            is_reached: it connected; else it is not used even in a panic.
        """
        record = self._records.get(server)
        if record is None:
            return
        if not why:
            record.failed_checks, record.good_check_s = 0, began_s
            record.is_unreachable = record.is_refusing = False
            record.good_checks += 1
            record.evidence.acquit(began_s)
            if record.is_unhealthy and record.good_checks >= self.limits.successes:
                record.is_unhealthy, record.is_new = False, True
                record.refused_until_s = -math.inf
                record.evidence.clear(now_s)
        else:
            record.good_checks = 0
            record.failed_checks += 1
            record.why, record.is_unreachable, record.is_refusing = why, is_refused or not is_reached, is_refused
            requests_agree = record.evidence.has_accusation or record.refused_until_s > began_s or record.is_quiet
            if is_refused and record.failed_checks > 1:
                requests_agree = True
            if record.failed_checks >= self.limits.failures or requests_agree:
                record.is_unhealthy = True
                record.has_lost_cache = record.has_lost_cache or is_refused
        self._update_ejection(record, now_s)

    # -- decisions

    def avoided(self, client: str, now_s: float, *, is_retry: bool = False) -> Set[str]:
        """Return the servers to avoid if others remain; ``is_retry``: all that failed lately, too."""
        if now_s >= self.next_sweep_s:
            self.sweep(now_s)
        if not self.doubted:
            return NONE
        clients = self._count_active_clients(now_s)
        avoided = self._get_failing_servers(client, clients, now_s, is_retry)
        if is_retry or (probed := self._get_server_to_probe(client, clients, now_s)) is None:
            return avoided
        others = {record.name for record in self._get_records(probed.group)}
        return AvoidedForProbe((others | avoided) - {probed.name}, avoided)

    def _get_failing_servers(self, client: str, clients: int, now_s: float, is_retry: bool) -> set[str]:
        resting: dict[str, _ServerRecord] = {}
        refused, doubtful = set(), set()
        for name, record in self.doubted.items():
            if record.refused_until_s > now_s:
                refused.add(name)
            elif record.is_ejected and not record.gets_requests:
                continue  # no request is sent there in any case
            elif record.evidence and (
                record.probe is not None or record.is_ejected or now_s < record.evidence.rests_until_s(client, clients)
            ):
                resting[name] = record
            elif self._is_doubtful(record, now_s):
                doubtful.add(name)
            elif record.is_ejected or (is_retry and record.evidence):
                resting[name] = record
        # Ejected servers get requests only if more are ejected than may be: then they are used. Likewise, no server of
        # a group rests if more would be out than may be ejected. A retry avoids all of these.
        if resting and not is_retry:
            for group in {record.group for record in resting.values()}:
                names = [name for name, record in resting.items() if record.group == group]
                out = sum(
                    (record.is_ejected or record.name in refused) and record.name not in resting
                    for record in self._get_records(group)
                )
                if len(names) + out > self._get_max_ejected(group):
                    for name in names:
                        del resting[name]
        avoided = refused.union(resting)
        # Prefer a new or a quiet server over a server that has just failed.
        for group in {self._records[name].group for name in doubtful}:
            if any(
                record.gets_requests and record.name not in avoided | doubtful for record in self._get_records(group)
            ):
                avoided |= {name for name in doubtful if self._records[name].group == group}
        return avoided

    @staticmethod
    def _is_doubtful(record: _ServerRecord, now_s: float) -> bool:
        """Return True if other servers should be preferred."""
        if now_s < record.slow_until_s:
            return True
        if record.is_quiet and not record.evidence and (record.unanswered or record.streams):
            return True
        return record.is_new and bool(record.unanswered)

    def _get_server_to_probe(self, client: str, clients: int, now_s: float) -> _ServerRecord | None:
        """Return a silent server to probe: its load never ends, so strategies may send it nothing."""
        for record in self.doubted.values():
            if record.is_quiet and record.gets_requests and record.unanswered and record.probe is None:
                evidence = record.evidence
                until_s = max(evidence.rests_until_s(client, clients), evidence.last_s + REST_S[0])
                if evidence.is_silent and now_s >= until_s:
                    return record
        return None

    def is_free_retry(self, server: str) -> bool:
        """Return True if a retry is exempt from the budget: this server, not the whole fleet, is faulty or full."""
        record = self._records.get(server)
        if record is None:
            return False
        if not record.gets_requests or record.evidence.is_proven:
            return True
        is_full = bool(record.evidence) and not record.evidence.has_accusation
        return is_full and any(
            other.gets_requests and other.answered_s > -math.inf and not other.evidence
            for other in self._get_records(record.group)
        )

    def is_busy(self, server: str, now_s: float) -> bool:
        record = self.doubted.get(server)
        if record is None or not record.evidence:
            return False
        has_pressure = any(not failure.accuses for failure in record.evidence.failures.values())
        return has_pressure and now_s < record.evidence.rests_until_s(None, self._count_active_clients(now_s))

    def take_decisions(self) -> list[ServerDecision]:
        decisions, self.decisions = self.decisions, []
        return decisions

    def sweep(self, now_s: float) -> None:
        """Find silent servers, slow servers and finished rests."""
        self.next_sweep_s = now_s + SWEEP_S
        if now_s >= self._next_comparison_s:
            self._next_comparison_s = now_s + SLOW_EVERY_S
            self._mark_slow_servers(now_s)
        for record in self._records.values():
            if record.unanswered:
                self._check_unanswered(record, now_s)
            if record.streams:
                self._check_streams(record, now_s)
            if record.is_check_due:
                self._request_check(record, now_s)
            if record.name in self.doubted:
                evidence = record.evidence
                if evidence and now_s - evidence.last_s > MOST_AGE_S and record.probe is None:
                    evidence.clear(now_s)
                self._update_ejection(record, now_s)

    def _mark_slow_servers(self, now_s: float) -> None:
        """Mark servers ``SLOW`` times slower than the median of their group."""
        self._usual_wait_s = [max(waits.seconds or 0.0, LEAST_USUAL_S) for waits in self._answer_waits]
        for group in {record.group for record in self._records.values()}:
            judged = [record for record in self._get_records(group) if record.answers >= SLOW_ANSWERS]
            if len(judged) >= SLOW_SERVERS:
                usual = median(record.slowness / record.answers for record in judged)
                for record in judged:
                    if record.slowness / record.answers > SLOW * usual:
                        record.slow_until_s = now_s + REST_S[2]
                        self.doubted[record.name] = record
                    record.answers, record.slowness = 0, 0.0

    def _check_unanswered(self, record: _ServerRecord, now_s: float) -> None:
        """Mark an overdue server as quiet, and count its silent requests as failures."""
        oldest = next(iter(record.unanswered.values()))
        since_s = max(oldest.sent_s, record.answered_s, record.metrics_progress_s)
        expected, silent_s = self._expected_s(oldest), now_s - since_s
        if silent_s <= quiet_after_s(expected, len(record.unanswered)):
            if record.is_new:
                record.is_new = silent_s <= NEW_S
            return
        self._mark_quiet(record, now_s)
        if not self._is_another_alive(record, since_s, now_s):
            return
        for attempts, attempt in record.unanswered.items():
            waited_s = now_s - max(attempt.sent_s, record.answered_s, record.metrics_progress_s)
            self._add_failure_if_silent(record, attempts, waited_s, self._silent_after_s(attempt, record), now_s)

    def _check_streams(self, record: _ServerRecord, now_s: float) -> None:
        """Mark a server whose streams stall as quiet, and count lost streams as failures."""
        gap_s = self._stream_gaps.seconds
        stalled_s, lost_s = stalled_after_s(gap_s), lost_after_s(gap_s)
        stalled = {
            attempts: silent_s
            for attempts in record.streams
            if (silent_s := now_s - max(attempts.heard_s, record.metrics_progress_s)) > stalled_s
        }
        # Streams that have just begun say nothing about the others.
        going_on = (
            attempts.heard_s
            for attempts, (_, started_s) in record.streams.items()
            if attempts.heard_s > started_s + BEGIN_S
        )
        flows = now_s - max(record.stream_completed_s, record.metrics_progress_s, *going_on) <= stalled_s
        if not stalled or (flows and 2 * len(stalled) < len(record.streams)):
            record.is_quiet = record.is_quiet and bool(record.unanswered)
            return
        self._mark_quiet(record, now_s)
        longest_s = max(stalled.values())
        if longest_s > lost_s and self._is_another_alive(record, now_s - longest_s, now_s):
            for attempts, silent_s in stalled.items():
                self._add_failure_if_silent(record, attempts, silent_s, lost_s, now_s)

    def _mark_quiet(self, record: _ServerRecord, now_s: float) -> None:
        if not record.is_quiet or now_s - record.check_requested_s >= QUIET_CHECK_S:
            self._request_check(record, now_s)
        record.is_quiet = True
        self.doubted[record.name] = record

    def _add_failure_if_silent(
        self, record: _ServerRecord, attempts: Attempts, silent_s: float, most_s: float, now_s: float
    ) -> None:
        """Count a failure after ``most_s`` of silence, and a lost request after twice that."""
        if silent_s <= most_s:
            return
        former, is_lost = record.evidence.failures.get(attempts), silent_s > 2.0 * most_s
        if former is None or (is_lost and not former.is_lost):
            failure = Failure(attempts.client, Fault.SILENT, now_s, is_lost=is_lost)
            attempts.add_failure(record.name, failure)
            record.evidence.add(attempts, failure)
            if record.probe is attempts:
                record.probe = None

    def _is_another_alive(self, record: _ServerRecord, since_s: float, now_s: float) -> bool:
        """Return True if another server was alive in the later half of a silence. Otherwise all stand still."""
        half_s = 0.5 * (since_s + now_s)
        return any(
            max(other.answered_s, other.metrics_progress_s) > half_s
            or (other.good_check_s > half_s and not other.unanswered)
            for other in self._get_records(record.group)
            if other is not record
        )

    def _expected_s(self, sent: SentRequest) -> float:
        return expected_s(sent, self._answer_waits[sent.kind].seconds)

    def _silent_after_s(self, sent: SentRequest, record: _ServerRecord) -> float:
        least_s = LEAST_WHOLE_SILENT_S if sent.kind == WHOLE and not record.has_metrics else LEAST_SILENT_S
        return silent_after_s(self._expected_s(sent), self._answer_waits[sent.kind].longest_s, least_s)

    def _count_active_clients(self, now_s: float) -> int:
        """Return 1, or 2 for several."""
        return 2 if now_s - self._other_client_s <= CLIENTS_S else 1

    def _request_check(self, record: _ServerRecord, now_s: float) -> None:
        """Decide on a health check now, or later if the last was just requested."""
        record.is_check_due = self._are_checked and now_s - record.check_requested_s < CHECK_S
        if self._are_checked and not record.is_check_due:
            record.check_requested_s = now_s
            self.decisions.append(ServerDecision("check", record.name))

    def _get_records(self, group: object) -> Iterable[_ServerRecord]:
        return (record for record in self._records.values() if record.group == group)

    def _get_max_ejected(self, group: object) -> int:
        servers = sum(1 for _ in self._get_records(group))
        share = self.limits.max_ejected
        return 0 if servers < 2 or not share else min(servers - 1, max(1, int(share * servers + 1e-9)))

    def _update_ejection(self, record: _ServerRecord, now_s: float) -> None:
        evidence = record.evidence
        clients = self._count_active_clients(now_s)
        why = evidence.ejects(clients) if evidence else ""
        by_requests = bool(why) and now_s < evidence.rests_until_s(None, clients)
        is_ejected = record.is_unhealthy or by_requests
        if is_ejected and not record.is_ejected:
            record.why = record.why if record.is_unhealthy else why
            record.is_ejected = True
            self.decisions.append(ServerDecision("eject", record.name, record.why))
            self._update_servers_in_use(record.group)
        elif not is_ejected and record.is_ejected:
            record.is_ejected = False
            self.decisions.append(ServerDecision("return", record.name, "gone" if record.has_lost_cache else ""))
            record.has_lost_cache = False
            self._update_servers_in_use(record.group)
        elif record.is_ejected:
            self._update_servers_in_use(record.group)
        is_new = record.is_new and record.unanswered
        rests = max(record.refused_until_s, record.slow_until_s) > now_s
        if record.is_ejected or evidence or is_new or record.is_quiet or rests:
            self.doubted[record.name] = record
        else:
            self.doubted.pop(record.name, None)

    def _update_servers_in_use(self, group: object) -> None:
        """Decide which servers get requests; if too many are ejected, all do."""
        records = list(self._get_records(group))
        is_panic = sum(record.is_ejected for record in records) > self._get_max_ejected(group)
        used = {record for record in records if not record.is_ejected or (is_panic and not record.is_unreachable)}
        used = used or {record for record in records if record.is_refusing and record.is_last_resort}
        for record in records:
            gets_requests = record in used
            if gets_requests != record.gets_requests:
                record.gets_requests = gets_requests
                self.decisions.append(ServerDecision("use" if gets_requests else "leave", record.name, record.why))
                waiting = (*record.unanswered, *record.streams)
                if not gets_requests and waiting:
                    self.decisions.append(ServerDecision("move", record.name, record.why, waiting))
