"""Which servers get no requests, decided from checks and from what becomes of requests.

1. ``on_sent``, ``on_answer``, ``on_fault``, ``on_dropped`` report each attempt; ``on_check`` each health check.
2. ``avoided`` names servers that a client's next request should not go to: those that rest after failures
   (``evidence``), those that say nothing (``silence``) or take ten times as long as the others, and those that refuse
   connections.
3. ``take_decisions`` gives what has changed since: servers that are ejected or return, checks that are wanted at once,
   requests that move on.

A failed request only asks for a check. A server is ejected by ``failures`` failed checks in a row; by one check if
requests have failed there, too; or by failures of several requests and clients. It returns after ``successes`` good
checks, and what was ejected by requests alone, after its rest. Then one request at a time tries it until it has
answered.

At most ``max_ejected`` of a fleet's servers are out. Beyond, all are used (Envoy's panic threshold), but for those that
no check can connect to. Where there is no other, those are used that refuse connections: an attempt costs nothing, and
they may have started again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from skymemory.router.failure.evidence import REST_S, Attempts, Evidence, Failure
from skymemory.router.failure.faults import RULES, Fault
from skymemory.router.failure.silence import (
    KINDS,
    LEAST_SILENT_S,
    LEAST_WHOLE_SILENT_S,
    WHOLE,
    Sent,
    UsualWait,
    expected_s,
    lost_after_s,
    quiet_after_s,
    silent_after_s,
    stalled_after_s,
)

REFUSED_S = 1.0
"""How long a server that refused a connection is passed over."""
CLIENTS_S = 60.0
"""Two clients within this time: then two of them have to fail at a server before others stay away from it."""
SWEEP_S = 0.02
"""Servers are looked at for silence at most this often."""
NEW_S = 5.0
"""A server that has answered nothing since it joined or returned gets one request at a time, for this long."""
CHECK_S = 0.1
"""Least time between two checks that requests ask for."""
QUIET_CHECK_S = 1.0
"""Time between two checks of a server that stays quiet."""
SLOW, SLOW_ANSWERS, SLOW_SERVERS, SLOW_EVERY_S = 10.0, 8, 3, 2.0
"""A server is slow that takes ten times the median of three servers or more, over eight answers of each at least."""
LEAST_USUAL_S = 0.001
"""Differences between shorter waits say nothing of a server."""
BEGIN_S = 0.001
"""Pieces that come within this time are the beginning of an answer."""
MOST_AGE_S = 120.0
"""Older failures are forgotten."""
NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of the policy."""

    failures: int = 3
    successes: int = 2
    max_ejected: float = 0.5


class Decision(NamedTuple):
    """``kind``: "eject", "return", "use" or "leave" (whether it gets requests), "check" (now) or "move"."""

    kind: str
    server: str
    why: str = ""
    attempts: tuple[Attempts, ...] = ()


class _Record:
    """What is known of one server."""

    __slots__ = (
        "alive_s",
        "answers",
        "asked_s",
        "checked_s",
        "evidence",
        "failed_checks",
        "flowing_s",
        "good_checks",
        "group",
        "has_metrics",
        "is_bad",
        "is_check_due",
        "is_ejected",
        "is_gone",
        "is_last_resort",
        "is_new",
        "is_quiet",
        "is_refusing",
        "is_unreachable",
        "is_used",
        "name",
        "probe",
        "refused_until_s",
        "slow_until_s",
        "slowness",
        "streams",
        "unanswered",
        "why",
        "working_s",
    )

    def __init__(self, name: str, group: object) -> None:
        self.name, self.group = name, group
        self.evidence = Evidence()
        self.unanswered: dict[Attempts, Sent] = {}
        """The oldest first."""
        self.streams: dict[Attempts, tuple[float, float]] = {}
        """Answers that have begun and not ended: when each request was sent, and when its answer began."""
        self.flowing_s = -math.inf
        """When such an answer last ended well."""
        self.alive_s = self.checked_s = -math.inf
        """When it last answered; when a check that found it well began."""
        self.has_metrics, self.working_s = False, -math.inf
        """Whether its metrics are read, and when they last showed that it works."""
        self.is_new = self.is_last_resort = True
        self.is_quiet = False
        self.probe: Attempts | None = None
        """The one request that tries it after a rest."""
        self.refused_until_s = self.slow_until_s = self.asked_s = -math.inf
        self.answers, self.slowness = 0, 0.0
        """Answers since it was last compared with others, and the sum of their waits in expected ones."""
        self.is_check_due = False
        """A check is wanted, but the last one was too short ago."""
        self.failed_checks = self.good_checks = 0
        self.is_bad = self.is_gone = self.is_unreachable = self.is_refusing = self.is_ejected = False
        """By the checks: it is ill, refused a connection since; gave none at the last, and refused it. By all: it is
        ejected.
        """
        self.is_used = True
        self.why = ""


class FailurePolicy:
    """See the module. Not thread-safe; ``now_s`` must not go back."""

    def __init__(self, limits: Limits = Limits(), *, are_checked: bool = True) -> None:
        """``are_checked``: ``on_check`` is called. Else failures alone eject, and rests end by themselves."""
        self.limits = limits
        self._are_checked = are_checked
        self._records: dict[str, _Record] = {}
        self.doubted: dict[str, _Record] = {}
        """Servers that ``avoided`` has to look at; it has nothing to do without them before ``sweep_s``."""
        self._waits = tuple(UsualWait() for _ in KINDS)
        self._gaps = UsualWait()
        """Between pieces of a stream."""
        self._usual_s = [LEAST_USUAL_S for _ in KINDS]
        """As of the last look for slow servers."""
        self._slow_s = 0.0
        self._client, self._client_s, self._other_s = "", -math.inf, -math.inf
        self.sweep_s = 0.0
        self.decisions: list[Decision] = []
        """Since they were last taken."""

    # -- membership

    def add(self, name: str, group: object = None, *, is_last_resort: bool = True) -> None:
        """
        Args:
            group: servers of one fleet, of which a share may be ejected.
            is_last_resort: where all refuse connections it is tried; False: an attempt at it costs another's work.
        """
        record = self._records.get(name)
        if record is None:
            record = self._records[name] = _Record(name, group)
        record.group, record.is_last_resort = group, is_last_resort

    def remove(self, name: str) -> None:
        self._records.pop(name, None)
        self.doubted.pop(name, None)

    def is_ejected(self, name: str) -> bool:
        record = self._records.get(name)
        return record is not None and record.is_ejected

    def is_refusing(self, name: str) -> bool:
        """Whether it is ejected, and refused the last check a connection."""
        record = self._records.get(name)
        return record is not None and record.is_ejected and record.is_refusing

    # -- from requests

    def on_request(self, client: str, now_s: float) -> None:
        """A client's request begins."""
        if client != self._client:
            self._other_s, self._client = self._client_s, client
        self._client_s = now_s

    def on_sent(self, attempts: Attempts, server: str, now_s: float, estimate_s: float, kind: int) -> None:
        record = self._records.get(server)
        if record is None:
            return
        record.unanswered[attempts] = tuple.__new__(Sent, (now_s, estimate_s, kind))
        if record.is_new:
            self.doubted[server] = record
        if record.evidence.failures:
            record.probe = attempts

    def on_answer(
        self, attempts: Attempts, server: str, now_s: float, is_good: bool = True, is_whole: bool = True
    ) -> None:
        """Its first byte came.

        Args:
            is_good: it is not an error of the client's either, whose time says nothing.
            is_whole: it has ended; False: more follows, and ``on_complete`` or ``on_fault`` at its end.
        """
        record = self._records.get(server)
        if record is None:
            return
        sent = record.unanswered.pop(attempts, None)
        record.alive_s, record.is_new, record.is_quiet = now_s, False, False
        sent_s = now_s
        if sent is not None:
            sent_s, estimate_s, kind = sent
            if is_good:
                wait_s, usual_s = now_s - sent_s, self._usual_s[kind]
                self._waits[kind].add(wait_s)
                record.answers += 1
                record.slowness += wait_s / (estimate_s if estimate_s > usual_s else usual_s)
        is_doubted = server in self.doubted
        if is_doubted:
            record.evidence.take_back(attempts)  # late, but not without an answer
            attempts.remove_failure(server)
            record.refused_until_s = -math.inf
            self._review(record, now_s)
        if not is_whole:
            attempts.heard_s = now_s
            record.streams[attempts] = sent_s, now_s
        elif is_doubted or attempts.failed:
            self._end_well(record, attempts, sent_s, now_s, is_good)

    def on_complete(self, attempts: Attempts, server: str, now_s: float, pieces: int = 0, is_good: bool = True) -> None:
        """An answer that had begun has ended as it should, in so many ``pieces``."""
        record = self._records.get(server)
        if record is None or (times := record.streams.pop(attempts, None)) is None:
            return
        record.flowing_s = now_s
        if pieces > 1:
            self._gaps.add((now_s - times[1]) / (pieces - 1))
        self._end_well(record, attempts, times[0], now_s, is_good)

    def _end_well(self, record: _Record, attempts: Attempts, sent_s: float, now_s: float, is_good: bool) -> None:
        if record.name in self.doubted:
            if record.probe is attempts:
                record.probe = None
            if sent_s >= record.evidence.last_s:
                record.evidence.clear(now_s)
            self._review(record, now_s)
        if attempts.failed and is_good:
            self._prove(attempts, now_s)

    def on_metrics(self, server: str, now_s: float, is_working: bool) -> None:
        """Its metrics were read. ``is_working``: they have changed, so what it leaves unanswered is long, not lost."""
        record = self._records.get(server)
        if record is None:
            return
        record.has_metrics = True
        if not is_working:
            return
        record.working_s, record.is_quiet = max(record.working_s, now_s), False
        silent = [each for each in (*record.unanswered, *record.streams) if each in record.evidence.failures]
        for attempts in silent:
            record.evidence.take_back(attempts)
            attempts.remove_failure(server)
        if silent:
            self._review(record, now_s)

    def on_fault(self, attempts: Attempts, server: str, fault: Fault, now_s: float, wait_s: float = 0.0) -> None:
        """It failed there. ``wait_s``: the server's ``Retry-After``."""
        record = self._records.get(server)
        if record is None:
            return
        self._forget(record, attempts)
        failure = Failure(attempts.client, fault, now_s, wait_s)
        rule = RULES[fault]
        if not rule.is_of_pair:
            record.refused_until_s = now_s + REFUSED_S
        if rule.is_of_pair or not self._are_checked:
            attempts.add_failure(server, failure)
            record.evidence.add(attempts, failure)
            if failure.accuses and attempts.is_suspect:
                self._take_back(attempts, now_s)
        if not rule.is_back_pressure:
            self._ask(record, now_s)
        self._review(record, now_s)

    def on_dropped(self, attempts: Attempts, server: str, now_s: float) -> None:
        """It is no longer waited for: its client has left, say."""
        record = self._records.get(server)
        if record is None or (sent := record.unanswered.get(attempts)) is None:
            if record is not None:
                self._forget(record, attempts)
            return
        since_s = max(sent.sent_s, record.alive_s, record.working_s)
        if now_s - since_s > self._silent_after_s(sent, record) and self._others_live(record, since_s, now_s):
            self.on_fault(attempts, server, Fault.SILENT, now_s)
        else:
            self._forget(record, attempts)

    def on_end(self, attempts: Attempts, now_s: float) -> None:
        """The request has ended with its last failure."""
        for name, failure in attempts.failed.items():
            record = self._records.get(name)
            if record is not None and attempts in record.evidence.failures and not failure.is_final:
                record.evidence.failures[attempts] = replace(record.evidence.failures[attempts], is_final=True)
                self._review(record, now_s)

    def _forget(self, record: _Record, attempts: Attempts) -> None:
        record.unanswered.pop(attempts, None)
        record.streams.pop(attempts, None)
        if record.probe is attempts:
            record.probe = None

    def _take_back(self, attempts: Attempts, now_s: float) -> None:
        for name in attempts.accused:
            if (record := self._records.get(name)) is not None:
                record.evidence.take_back(attempts)
                self._review(record, now_s)

    def _prove(self, attempts: Attempts, now_s: float) -> None:
        for name in attempts.accused:
            record, failure = self._records.get(name), attempts.failed[name]
            if record is not None and failure.at_s > record.evidence.cleared_s:
                record.evidence.add(attempts, replace(failure, is_proven=True))
                self._review(record, now_s)

    # -- from checks

    def on_check(
        self, server: str, why: str, began_s: float, now_s: float, *, is_refused: bool = False, is_reached: bool = True
    ) -> None:
        """A health check has ended.

        Args:
            why: it failed; empty: the server is well.
            is_refused: its address refused the connection: the process is gone, and its cache with it.
            is_reached: there was a connection. A server without one is not used in a panic either.
        """
        record = self._records.get(server)
        if record is None:
            return
        if not why:
            record.failed_checks, record.checked_s = 0, began_s
            record.is_unreachable = record.is_refusing = False
            record.good_checks += 1
            record.evidence.acquit(began_s)
            if record.is_bad and record.good_checks >= self.limits.successes:
                record.is_bad, record.is_new = False, True
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
                record.is_bad = True
                record.is_gone = record.is_gone or is_refused
        self._review(record, now_s)

    # -- decisions

    def avoided(self, client: str, now_s: float, *, is_retry: bool = False) -> frozenset[str] | set[str]:
        """Servers that a request of ``client`` should not go to, if there are others. ``is_retry``: it failed already,
        and rather goes to one without any doubt.
        """
        if now_s >= self.sweep_s:
            self.sweep(now_s)
        if not self.doubted:
            return NONE
        clients = self._clients(now_s)
        if not is_retry and (probed := self._to_probe(client, clients, now_s)) is not None:
            return {each.name for each in self._of(probed.group) if each is not probed}
        resting: dict[str, _Record] = {}
        refused, mild = set(), set()
        for name, record in self.doubted.items():
            if record.refused_until_s > now_s:
                refused.add(name)
            elif record.is_ejected and not record.is_used:
                continue
            elif record.evidence and (
                record.probe is not None or record.is_ejected or now_s < record.evidence.rests_until_s(client, clients)
            ):
                resting[name] = record
            elif self._is_doubtful(record, now_s):
                mild.add(name)
            elif record.is_ejected or (is_retry and record.evidence):
                resting[name] = record
        if resting and not is_retry:
            for group in {record.group for record in resting.values()}:
                here = [name for name, record in resting.items() if record.group == group]
                out = sum(record.is_ejected and record.name not in resting for record in self._of(group))
                if len(here) + out > self._most_out(group):
                    for name in here:
                        del resting[name]
        avoided = refused.union(resting)
        # A new or a quiet server is better than one that has just failed.
        for group in {self._records[name].group for name in mild}:
            if any(record.is_used and record.name not in avoided | mild for record in self._of(group)):
                avoided |= {name for name in mild if self._records[name].group == group}
        return avoided

    @staticmethod
    def _is_doubtful(record: _Record, now_s: float) -> bool:
        """It is new, silent or slow, but has not failed: it still gets requests where all others are no better."""
        if now_s < record.slow_until_s:
            return True
        if record.is_quiet and not record.evidence and (record.unanswered or record.streams):
            return True
        return record.is_new and bool(record.unanswered)

    def _to_probe(self, client: str, clients: int, now_s: float) -> _Record | None:
        """A server that leaves a request unanswered. Strategies may send it no other, as its load never ends; but one
        that is answered shows that it works, and a second without an answer that it does not.
        """
        for record in self.doubted.values():
            if record.is_quiet and record.is_used and record.unanswered and record.probe is None:
                evidence = record.evidence
                until_s = max(evidence.rests_until_s(client, clients), evidence.last_s + REST_S[0])
                if evidence.is_silent and now_s >= until_s:
                    return record
        return None

    def is_free_retry(self, server: str) -> bool:
        """Whether a retry of what failed there is allowed beyond the retry budget: the server is known to be at fault,
        or is full while another one answers. The fleet is not overloaded then.
        """
        record = self._records.get(server)
        if record is None:
            return False
        if not record.is_used or record.evidence.is_proven:
            return True
        is_full = bool(record.evidence) and not record.evidence.has_accusation
        return is_full and any(
            other.is_used and other.alive_s > -math.inf and not other.evidence for other in self._of(record.group)
        )

    def is_busy(self, server: str, now_s: float) -> bool:
        """Whether the server itself has said that it is full, and is left alone for that."""
        record = self.doubted.get(server)
        if record is None or not record.evidence:
            return False
        has_pressure = any(not failure.accuses for failure in record.evidence.failures.values())
        return has_pressure and now_s < record.evidence.rests_until_s(None, self._clients(now_s))

    def take_decisions(self) -> list[Decision]:
        decisions, self.decisions = self.decisions, []
        return decisions

    def sweep(self, now_s: float) -> None:
        """Look for silent servers and rests that have ended; ``avoided`` does it, too."""
        self.sweep_s = now_s + SWEEP_S
        if now_s >= self._slow_s:
            self._slow_s = now_s + SLOW_EVERY_S
            self._find_slow(now_s)
        for record in self._records.values():
            if record.unanswered:
                self._listen(record, now_s)
            if record.streams:
                self._listen_to_streams(record, now_s)
            if record.is_check_due:
                self._ask(record, now_s)
            if record.name in self.doubted:
                evidence = record.evidence
                if evidence and now_s - evidence.last_s > MOST_AGE_S and record.probe is None:
                    evidence.clear(now_s)
                self._review(record, now_s)

    def _find_slow(self, now_s: float) -> None:
        """Leave servers alone for a while whose answers took ``SLOW`` times as long as the median server's, in terms of
        what was expected of each request.
        """
        self._usual_s = [max(waits.seconds or 0.0, LEAST_USUAL_S) for waits in self._waits]
        for group in {record.group for record in self._records.values()}:
            judged = [record for record in self._of(group) if record.answers >= SLOW_ANSWERS]
            if len(judged) >= SLOW_SERVERS:
                usual = median(record.slowness / record.answers for record in judged)
                for record in judged:
                    if record.slowness / record.answers > SLOW * usual:
                        record.slow_until_s = now_s + REST_S[2]
                        self.doubted[record.name] = record
                    record.answers, record.slowness = 0, 0.0

    def _listen(self, record: _Record, now_s: float) -> None:
        sent = next(iter(record.unanswered.values()))
        since_s = max(sent.sent_s, record.alive_s, record.working_s)
        expected, silent_s = self._expected_s(sent), now_s - since_s
        if silent_s <= quiet_after_s(expected, len(record.unanswered)):
            if record.is_new:
                record.is_new = silent_s <= NEW_S
            return
        self._on_quiet(record, now_s)
        if not self._others_live(record, since_s, now_s):
            return
        for attempts, each in record.unanswered.items():
            waited_s = now_s - max(each.sent_s, record.alive_s, record.working_s)
            self._judge(record, attempts, waited_s, self._silent_after_s(each, record), now_s)

    def _listen_to_streams(self, record: _Record, now_s: float) -> None:
        gap_s = self._gaps.seconds
        stalled_s, lost_s = stalled_after_s(gap_s), lost_after_s(gap_s)
        stalled = {
            attempts: silent_s
            for attempts in record.streams
            if (silent_s := now_s - max(attempts.heard_s, record.working_s)) > stalled_s
        }
        # Those that have just begun say nothing of the rest.
        going_on = (each.heard_s for each, (_, began_s) in record.streams.items() if each.heard_s > began_s + BEGIN_S)
        flows = now_s - max(record.flowing_s, record.working_s, *going_on) <= stalled_s
        if not stalled or (flows and 2 * len(stalled) < len(record.streams)):
            record.is_quiet = record.is_quiet and bool(record.unanswered)
            return
        self._on_quiet(record, now_s)
        longest_s = max(stalled.values())
        if longest_s > lost_s and self._others_live(record, now_s - longest_s, now_s):
            for attempts, silent_s in stalled.items():
                self._judge(record, attempts, silent_s, lost_s, now_s)

    def _on_quiet(self, record: _Record, now_s: float) -> None:
        if not record.is_quiet or now_s - record.asked_s >= QUIET_CHECK_S:
            self._ask(record, now_s)
        record.is_quiet = True
        self.doubted[record.name] = record

    def _judge(self, record: _Record, attempts: Attempts, silent_s: float, most_s: float, now_s: float) -> None:
        """A request that has been left alone for longer than ``most_s`` is a failure of its server."""
        if silent_s <= most_s:
            return
        known, is_lost = record.evidence.failures.get(attempts), silent_s > 2.0 * most_s
        if known is None or (is_lost and not known.is_lost):
            failure = Failure(attempts.client, Fault.SILENT, now_s, is_lost=is_lost)
            attempts.add_failure(record.name, failure)
            record.evidence.add(attempts, failure)
            if record.probe is attempts:
                record.probe = None

    def _others_live(self, record: _Record, since_s: float, now_s: float) -> bool:
        """Whether another server of the fleet has answered in the later half of a silence, or, where it has nothing to
        answer, was found well: else all stand still.
        """
        half_s = 0.5 * (since_s + now_s)
        return any(
            max(other.alive_s, other.working_s) > half_s or (other.checked_s > half_s and not other.unanswered)
            for other in self._of(record.group)
            if other is not record
        )

    def _expected_s(self, sent: Sent) -> float:
        return expected_s(sent, self._waits[sent.kind].seconds)

    def _silent_after_s(self, sent: Sent, record: _Record) -> float:
        least_s = LEAST_WHOLE_SILENT_S if sent.kind == WHOLE and not record.has_metrics else LEAST_SILENT_S
        return silent_after_s(self._expected_s(sent), self._waits[sent.kind].longest_s, least_s)

    def _clients(self, now_s: float) -> int:
        """How many clients have to fail at a server before it counts for all."""
        return 2 if now_s - self._other_s <= CLIENTS_S else 1

    def _ask(self, record: _Record, now_s: float) -> None:
        record.is_check_due = self._are_checked and now_s - record.asked_s < CHECK_S
        if self._are_checked and not record.is_check_due:
            record.asked_s = now_s
            self.decisions.append(Decision("check", record.name))

    def _of(self, group: object) -> Iterable[_Record]:
        return (record for record in self._records.values() if record.group == group)

    def _most_out(self, group: object) -> int:
        servers = sum(1 for _ in self._of(group))
        share = self.limits.max_ejected
        return 0 if servers < 2 or not share else min(servers - 1, max(1, int(share * servers + 1e-9)))

    def _review(self, record: _Record, now_s: float) -> None:
        """Bring a server's standing up to date, and its fleet's."""
        evidence = record.evidence
        clients = self._clients(now_s)
        why = evidence.ejects(clients) if evidence else ""
        by_requests = bool(why) and now_s < evidence.rests_until_s(None, clients)
        is_ejected = record.is_bad or by_requests
        if is_ejected and not record.is_ejected:
            record.why = record.why if record.is_bad else why
            record.is_ejected = True
            self.decisions.append(Decision("eject", record.name, record.why))
            self._use(record.group)
        elif not is_ejected and record.is_ejected:
            record.is_ejected = False
            self.decisions.append(Decision("return", record.name, "gone" if record.is_gone else ""))
            record.is_gone = False
            self._use(record.group)
        elif record.is_ejected:
            self._use(record.group)
        is_new = record.is_new and record.unanswered
        rests = max(record.refused_until_s, record.slow_until_s) > now_s
        if record.is_ejected or evidence or is_new or record.is_quiet or rests:
            self.doubted[record.name] = record
        else:
            self.doubted.pop(record.name, None)

    def _use(self, group: object) -> None:
        """Say which servers of a fleet get requests: all that are not ejected; all where too many are."""
        records = list(self._of(group))
        is_panic = sum(record.is_ejected for record in records) > self._most_out(group)
        used = {record for record in records if not record.is_ejected or (is_panic and not record.is_unreachable)}
        used = used or {record for record in records if record.is_refusing and record.is_last_resort}
        for record in records:
            is_used = record in used
            if is_used != record.is_used:
                record.is_used = is_used
                self.decisions.append(Decision("use" if is_used else "leave", record.name, record.why))
                waiting = (*record.unanswered, *record.streams)
                if not is_used and waiting:
                    self.decisions.append(Decision("move", record.name, record.why, waiting))
