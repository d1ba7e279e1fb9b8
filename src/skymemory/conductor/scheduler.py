"""The scheduler: admits a request and chooses its prefill server and its decode server.

It is Mooncake's conductor (FAST'25, algorithm 1) in three exchangeable parts: a ``Picker`` of prefill servers, another
of decode servers (none if servers have both roles), and an ``Admission`` rule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean
from typing import Protocol

from skymemory.conductor.picker import Picker
from skymemory.conductor.request import Decision, Request, Slo

KINDS = ("ttft", "tbt", "cost", "share", "priority", "queue")
"""Kinds of refusals.

``ttft``, ``tbt``: the estimate exceeds the objective; ``cost``: other requests that fit cost less; ``share``: the
tenant's share is used up; ``priority``: higher priorities go first; ``queue``: it is full or its wait too long.
"""
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of a request by an admission rule. ``kind`` is one of ``KINDS``."""

    reason: str
    retry_after_s: float
    computed: bool = False
    """True: after its prefill, which was wasted."""
    kind: str = ""


class DecodeForecast(Protocol):
    """Forecast of the decode load at the end of a prefill."""

    @property
    def decode_s(self) -> float:
        """Usual duration of decoding; infinite while unknown."""
        ...

    def expected(self, request: Request, at_s: float) -> None:
        """Record that a request is estimated to join a decode batch at ``at_s``."""
        ...

    def tbt_s(self, at_s: float, now_s: float, request: Request | None = None) -> float:
        """Return the mean seconds between tokens of all servers at ``at_s``, with ``request`` added to each batch."""
        ...

    def own_tbt_s(self, decode: Decision, joins_s: float, now_s: float) -> float:
        """Return the mean seconds between tokens of a request that joins the chosen server's batch at ``joins_s``."""
        ...


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """Chosen prefill and decode server of a request. Immutable by convention."""

    request: Request
    prefill: Decision
    decode: Decision | None = None
    """Decode server; None: the prefill server decodes too."""
    forecast: DecodeForecast | None = None

    @property
    def decoder(self) -> Decision:
        return self.decode or self.prefill

    def slo(self, default: Slo) -> Slo:
        return self.request.slo or default


class Admission:
    """Base of admission rules, which refuse requests under overload; admits everything.

    Rules do no I/O and read no clock: equal calls give equal answers. The methods without result record the life of a
    request; ``joined``: a decode batch.
    """

    name: str
    looks_ahead = False
    """True if ``on_arrival`` judges the decode load forecast for the joining."""

    def on_arrival(self, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        """Return None to admit the request; change no state."""
        return None

    def before_decode(self, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        """Return None to let the request decode; ``placement.decode`` is a current estimate."""
        return None

    def refused(self, placement: ScheduledRequest, refusal: Refusal, now_s: float) -> None:
        """Record a refusal on arrival, by this rule or by a rule around it."""

    def accepted(self, placement: ScheduledRequest, now_s: float) -> None: ...

    def prefilled(self, placement: ScheduledRequest, now_s: float) -> None:
        """Record the end of the prefill, before ``before_decode``; without a decode server, the first token."""

    def joined(self, placement: ScheduledRequest, now_s: float) -> None: ...

    def on_request_end(self, placement: ScheduledRequest, now_s: float, met: bool | None) -> None:
        """Record the end; ``met`` is None if unknown, failed, or refused before decoding."""


class AdmitAll(Admission):
    name = "all"


class RuleAround(Admission):
    """Base of rules that wrap another rule: it passes every call on."""

    def __init__(self, rule: Admission) -> None:
        self.rule = rule
        self.name = rule.name
        self.looks_ahead = rule.looks_ahead

    def on_arrival(self, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        return self.rule.on_arrival(placement, now_s)

    def before_decode(self, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        return self.rule.before_decode(placement, now_s)

    def refused(self, placement: ScheduledRequest, refusal: Refusal, now_s: float) -> None:
        self.rule.refused(placement, refusal, now_s)

    def accepted(self, placement: ScheduledRequest, now_s: float) -> None:
        self.rule.accepted(placement, now_s)

    def prefilled(self, placement: ScheduledRequest, now_s: float) -> None:
        self.rule.prefilled(placement, now_s)

    def joined(self, placement: ScheduledRequest, now_s: float) -> None:
        self.rule.joined(placement, now_s)

    def on_request_end(self, placement: ScheduledRequest, now_s: float, met: bool | None) -> None:
        self.rule.on_request_end(placement, now_s, met)


class OnArrival(RuleAround):
    """Wrapper that checks the decode load on arrival, too, so that no prefill is wasted."""

    def on_arrival(self, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        refusal = super().on_arrival(placement, now_s)
        if refusal is None and not self.looks_ahead:
            refusal = super().before_decode(placement, now_s)
        return refusal

    def before_decode(self, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        # Contexts that grow during the prefill raise the load too little to justify a late refusal.
        return None


class Probing(RuleAround):
    """Wrapper that admits the next request if none was admitted for ``every_s``.

    If wrong estimates refuse all requests, only a probe corrects them.
    """

    def __init__(self, rule: Admission, every_s: float) -> None:
        super().__init__(rule)
        self._every_s = every_s
        self._admitted_s = -math.inf

    def on_arrival(self, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        if now_s - self._admitted_s < self._every_s:
            return super().on_arrival(placement, now_s)
        # The time between tokens is computed from the current batch, not learnt: a probe would be refused after its
        # prefill and teach nothing.
        refusal = super().on_arrival(placement, now_s)
        return refusal if refusal is not None and refusal.kind == "tbt" else None

    def accepted(self, placement: ScheduledRequest, now_s: float) -> None:
        self._admitted_s = now_s
        super().accepted(placement, now_s)


class Corrected(RuleAround):
    """Wrapper that corrects estimated times to first token by those of recent requests.

    If another server decodes, it adds the hand-over: the mean gap between first tokens of a prefill server less the
    later request's prefill.
    """

    KEPT, SHARE, OLDEST, SERVERS = 32, 0.9, 16, 1024

    def __init__(self, rule: Admission) -> None:
        super().__init__(rule)
        self._late: deque[float] = deque(maxlen=self.KEPT)
        self._handovers: deque[float] = deque(maxlen=self.KEPT)
        # Estimated first-token time and assumed hand-over, in admission order.
        self._due: dict[int, tuple[float, float]] = {}
        # Last request (0 once it ended, as ids are reused) and last first-token time per server.
        self._last: dict[str, tuple[int, float]] = {}

    def late_s(self, now_s: float) -> float:
        """Return a high quantile of recent estimation errors, or the longest wait for an overdue first token."""
        # With the mean error, a rule would break every promise close to its objective. An overdue request counts at
        # once.
        late = sorted(self._late)
        recent_s = late[min(len(late) - 1, int(self.SHARE * len(late)))] if late else 0.0
        overdue_s = max((now_s - due_s for due_s, _ in islice(self._due.values(), self.OLDEST)), default=0.0)
        return max(0.0, recent_s, overdue_s)

    def estimated_s(self, placement: ScheduledRequest, now_s: float) -> float | None:
        """Return the time to first token with the hand-over, without the correction."""
        prefill = placement.prefill
        if prefill.estimated_ttft_s is None or placement.decode is None:
            return prefill.estimated_ttft_s
        before, _ = self._last.get(prefill.server, (0, 0.0))
        wait_s = max(0.0, self._due[before][0] - now_s) if before in self._due else 0.0
        return max(prefill.estimated_ttft_s, wait_s + (prefill.estimated_compute_s or 0.0) + self._handover_s())

    def _handover_s(self) -> float:
        return fmean(self._handovers) if self._handovers else 0.0

    def on_arrival(self, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        estimated_s = self.estimated_s(placement, now_s)
        if estimated_s is not None:
            prefill = copy(placement.prefill)
            prefill.estimated_ttft_s = estimated_s + self.late_s(now_s)
            placement = replace(placement, prefill=prefill)
        return super().on_arrival(placement, now_s)

    def accepted(self, placement: ScheduledRequest, now_s: float) -> None:
        """Remember when the first token is due, per request, and the server's last request."""
        estimated_s, key, server = self.estimated_s(placement, now_s), id(placement.request), placement.prefill.server
        if estimated_s is not None:
            self._due[key] = now_s + estimated_s, self._handover_s()
            self._last[server] = key, self._last.pop(server, (0, -math.inf))[1]
            if len(self._last) > self.SERVERS:  # most have left the fleet
                del self._last[next(iter(self._last))]
        super().accepted(placement, now_s)

    def prefilled(self, placement: ScheduledRequest, now_s: float) -> None:
        if placement.decode is None:
            self._on_first_token(placement, now_s)
        super().prefilled(placement, now_s)

    def joined(self, placement: ScheduledRequest, now_s: float) -> None:
        self._on_first_token(placement, now_s)
        super().joined(placement, now_s)

    def on_request_end(self, placement: ScheduledRequest, now_s: float, met: bool | None) -> None:
        if self._due.pop(id(placement.request), None) is not None:  # it had no first token
            self._forget(placement)
        super().on_request_end(placement, now_s, met)

    def _on_first_token(self, placement: ScheduledRequest, now_s: float) -> None:
        # Learn from a first token how late it is, and the time of the hand-over to the decode server.
        estimate, prefill = self._due.pop(id(placement.request), None), placement.prefill
        if estimate is None:
            return
        self._forget(placement)
        before, before_s = self._last.get(prefill.server, (0, -math.inf))
        if placement.decode is not None and prefill.estimated_compute_s is not None:
            gap_s = now_s - max(before_s, prefill.at_s)
            self._handovers.append(max(0.0, gap_s - prefill.estimated_compute_s))
        due_s, assumed_s = estimate
        # The part that the learnt hand-over now explains is no error any more.
        self._late.append(now_s - due_s - max(0.0, self._handover_s() - assumed_s))
        self._last[prefill.server] = before, now_s

    def _forget(self, placement: ScheduledRequest) -> None:
        server = placement.prefill.server
        key, came_s = self._last.get(server, (0, -math.inf))
        if key == id(placement.request):
            self._last[server] = 0, came_s


class Scheduler:
    """Placement of requests, and their tracking to the end. Not thread-safe.

    Calls per request: ``place``, ``begin``, ``prefilled``, ``decoding``, ``on_request_end``; or ``failed`` at any time
    after ``begin``. If one server has both roles, ``decoding`` is left out.

    Of two servers, either may fail alone: ``prefill_again`` and ``decode_again`` replace it. After ``prefill_lost`` the
    decode server computes the prompt; then call ``failed`` with ``prefilled``.
    """

    def __init__(
        self,
        prefill: Picker,
        decode: Picker | None = None,
        admission: Admission | None = None,
        forecast: DecodeForecast | None = None,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.admission: Admission = admission or AdmitAll()
        self.forecast = forecast

    def place(
        self,
        request: Request,
        now_s: float,
        among: Collection[str] | None = None,
        decode_among: Collection[str] | None = None,
    ) -> ScheduledRequest | Refusal:
        """Return a placement, not booked, or the admission rule's final refusal.

        ``among`` and ``decode_among`` name the eligible servers; None: all.

        Raises:
            NoServer: no server takes requests.
        """
        # The rule's estimates are those of the servers to which the request would go.
        placement = self._picked(request, now_s, among, decode_among)
        refusal = self.admission.on_arrival(placement, now_s)
        if refusal is not None:
            self.admission.refused(placement, refusal, now_s)
            return refusal
        return placement

    def place_again(
        self, placement: ScheduledRequest, now_s: float, among: Collection[str] | None = None
    ) -> ScheduledRequest:
        """Return another placement after a server ``failed``, without admission."""
        return self._picked(placement.request, now_s, among, None)

    def _picked(
        self,
        request: Request,
        now_s: float,
        among: Collection[str] | None,
        decode_among: Collection[str] | None,
    ) -> ScheduledRequest:
        prefill = self.prefill.pick(request, now_s, among)
        decode = None if self.decode is None else self.decode.pick(request, now_s, decode_among)
        return ScheduledRequest(request, prefill, decode, self.forecast)

    def prefill_again(
        self, placement: ScheduledRequest, now_s: float, among: Collection[str] | None = None
    ) -> ScheduledRequest:
        """Replace a failed prefill server and book the new server.

        Raises:
            NoServer: nothing is changed.
        """
        prefill = self.prefill.pick(placement.request, now_s, among)
        self.prefill.failed(placement.prefill, now_s)
        self.prefill.routed(prefill, now_s)
        if self.forecast is not None:
            self.forecast.expected(placement.request, now_s + (prefill.estimated_ttft_s or 0.0))
        return replace(placement, prefill=prefill)

    def prefill_lost(self, placement: ScheduledRequest, now_s: float) -> None:
        self.prefill.failed(placement.prefill, now_s)

    def decode_again(
        self, placement: ScheduledRequest, now_s: float, decoding: bool, among: Collection[str] | None = None
    ) -> ScheduledRequest:
        """Replace a failed decode server and book the new server; ``decoding``: the request was in its batch.

        Raises:
            NoServer: nothing is changed.
        """
        assert self.decode is not None and placement.decode is not None
        decode = self.decode.pick(placement.request, now_s, among)
        (self.decode.on_request_end if decoding else self.decode.failed)(placement.decode, now_s)
        self.decode.routed(decode, now_s)
        return replace(placement, decode=decode)

    def decode_taken(self, placement: ScheduledRequest, server: str, now_s: float) -> ScheduledRequest:
        """Record that ``server`` answers instead of the chosen decode server."""
        assert self.decode is not None and placement.decode is not None
        self.decode.failed(placement.decode, now_s)
        decode = placement.decode.taken_by(server)
        self.decode.routed(decode, now_s)
        return replace(placement, decode=decode)

    def begin(self, placement: ScheduledRequest, now_s: float) -> None:
        """Book the placement: its request is sent."""
        self.prefill.routed(placement.prefill, now_s)
        if self.decode is not None and placement.decode is not None:
            self.decode.routed(placement.decode, now_s)
            if self.forecast is not None:
                self.forecast.expected(placement.request, now_s + (placement.prefill.estimated_ttft_s or 0.0))
        self.admission.accepted(placement, now_s)

    def prefilled(
        self, placement: ScheduledRequest, now_s: float, cached_tokens: int | None = None, decodes: bool = False
    ) -> Refusal | None:
        """Record the end of the prefill; return a refusal if the request may not decode, which ends it.

        ``decodes``: the decode server decodes already.
        """
        self.prefill.succeeded(placement.prefill, now_s, cached_tokens)
        self.admission.prefilled(placement, now_s)
        if self.decode is None or placement.decode is None:
            return None
        self.prefill.on_request_end(placement.prefill, now_s)
        if decodes:
            return None
        # Decide again by the current decode load, which was a forecast when the request arrived.
        refusal = self.admission.before_decode(self._current(placement, now_s), now_s)
        if refusal is not None:
            self.decode.failed(placement.decode, now_s)
            self.admission.on_request_end(placement, now_s, None)
            return replace(refusal, computed=True)
        return None

    def decoding(self, placement: ScheduledRequest, now_s: float) -> None:
        if self.decode is not None and placement.decode is not None:
            self.decode.succeeded(placement.decode, now_s)
            self.admission.joined(placement, now_s)

    def on_request_end(
        self,
        placement: ScheduledRequest,
        now_s: float,
        met: bool | None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """Record the last token; ``met`` is None if unknown."""
        if self.decode is not None and placement.decode is not None:
            self.decode.on_request_end(placement.decode, now_s, output_tokens=output_tokens)
        else:
            self.prefill.on_request_end(placement.prefill, now_s, cached_tokens, output_tokens)
        self.admission.on_request_end(placement, now_s, met)

    def failed(self, placement: ScheduledRequest, now_s: float, prefilled: bool, decoding: bool = False) -> None:
        """Record a failure, after the prefill ended (``prefilled``) or the request decodes (``decoding``)."""
        if self.decode is None or placement.decode is None:
            (self.prefill.on_request_end if prefilled else self.prefill.failed)(placement.prefill, now_s)
        else:
            if not prefilled:
                self.prefill.failed(placement.prefill, now_s)
            (self.decode.on_request_end if decoding else self.decode.failed)(placement.decode, now_s)
        self.admission.on_request_end(placement, now_s, None)

    def _current(self, placement: ScheduledRequest, now_s: float) -> ScheduledRequest:
        # Return the placement with the chosen decode server's estimates as of now.
        assert self.decode is not None and placement.decode is not None
        # The KV already streams to the chosen server, so only that server is estimated again.
        chosen = placement.decode.server
        server = self.decode.fleet.servers.get(chosen)
        if server is None or not server.takes_requests:
            return placement
        again = self.decode.pick(placement.request, now_s, (chosen,))
        return replace(placement, decode=again)
