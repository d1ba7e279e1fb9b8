"""The scheduler: admits a request and chooses its prefill server and its decode server.

Mooncake's conductor (FAST'25, algorithm 1) in three exchangeable parts: a ``Picker`` of prefill servers, a ``Picker``
of decode servers, and an ``Admission`` rule. Servers that do both need one picker only.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from skymemory.conductor.admission.base import Admission, AdmitAll, Case, DecodeForecast, Refusal
from skymemory.conductor.picker import Picker
from skymemory.conductor.request import Decision, Request


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where one admitted request goes."""

    case: Case

    @property
    def request(self) -> Request:
        return self.case.request

    @property
    def prefill(self) -> Decision:
        return self.case.prefill

    @property
    def decode(self) -> Decision | None:
        return self.case.decode


class Scheduler:
    """Places requests and tracks them to their end. Not thread-safe.

    Calls for a request: ``place``, ``begin``, ``prefilled``, ``decoding``, ``ended``; or ``failed`` any time after
    ``begin``. If one server does both, ``prefilled`` is its first token and ``decoding`` is left out.
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

    def place(self, request: Request, now_s: float, among: Collection[str] | None = None) -> Placement | Refusal:
        """A placement, or the refusal of the admission rule, which is final. Nothing is booked yet.

        Raises:
            NoServer: no server takes requests.
        """
        prefill = self.prefill.pick(request, now_s, among)
        decode = None if self.decode is None else self.decode.pick(request, now_s)
        case = Case(request, prefill, decode, self.forecast)
        refusal = self.admission.on_arrival(case, now_s)
        if refusal is not None:
            self.admission.refused(case, refusal, now_s)
            return refusal
        return Placement(case)

    def place_again(self, placement: Placement, now_s: float, among: Collection[str] | None = None) -> Placement:
        """Another placement after a server ``failed``; admission is not repeated.

        Raises:
            NoServer: no server takes requests.
        """
        prefill = self.prefill.pick(placement.request, now_s, among)
        decode = None if self.decode is None else self.decode.pick(placement.request, now_s)
        return Placement(replace(placement.case, prefill=prefill, decode=decode))

    def begin(self, placement: Placement, now_s: float) -> None:
        """The request is sent. From now on the decode server expects it."""
        case = placement.case
        self.prefill.routed(case.prefill, now_s)
        if self.decode is not None and placement.decode is not None:
            self.decode.routed(placement.decode, now_s)
            if self.forecast is not None:
                self.forecast.expected(placement.request, now_s + (placement.prefill.estimated_ttft_s or 0.0))
        self.admission.accepted(case, now_s)

    def prefilled(self, placement: Placement, now_s: float, cached_tokens: int | None = None) -> Refusal | None:
        """The prefill is done. Returns a refusal if the request may not decode; it has ended then."""
        case = placement.case
        self.prefill.succeeded(case.prefill, now_s, cached_tokens)
        self.admission.prefilled(case, now_s)
        if self.decode is None or placement.decode is None:
            return None
        self.prefill.ended(placement.prefill, now_s)
        refusal = self.admission.before_decode(self._case_now(placement, now_s), now_s)
        if refusal is not None:
            self.decode.failed(placement.decode, now_s)
            self.admission.ended(placement.case, now_s, None)
            return replace(refusal, computed=True)
        return None

    def decoding(self, placement: Placement, now_s: float) -> None:
        """The request has joined the decode server's batch."""
        if self.decode is not None and placement.decode is not None:
            self.decode.succeeded(placement.decode, now_s)

    def ended(
        self,
        placement: Placement,
        now_s: float,
        met: bool | None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """The last token came. ``met``: whether its objectives were met, None if unknown.

        ``cached_tokens`` and ``output_tokens``: from the answer's usage, where it has them.
        """
        case = placement.case
        if self.decode is not None and case.decode is not None:
            self.decode.ended(case.decode, now_s, output_tokens=output_tokens)
        else:
            self.prefill.ended(case.prefill, now_s, cached_tokens, output_tokens)
        self.admission.ended(case, now_s, met)

    def failed(self, placement: Placement, now_s: float, prefilled: bool, decoding: bool = False) -> None:
        """Its server failed, with the prefill done or not, in a decode batch or not."""
        if self.decode is None or placement.decode is None:
            (self.prefill.ended if prefilled else self.prefill.failed)(placement.prefill, now_s)
        else:
            if not prefilled:
                self.prefill.failed(placement.prefill, now_s)
            (self.decode.ended if decoding else self.decode.failed)(placement.decode, now_s)
        self.admission.ended(placement.case, now_s, None)

    def _case_now(self, placement: Placement, now_s: float) -> Case:
        """The request's case with a current estimate of its decode server."""
        assert self.decode is not None and placement.decode is not None
        chosen = placement.decode.server
        server = self.decode.fleet.servers.get(chosen)
        if server is None or not server.takes_requests:
            return placement.case
        again = self.decode.pick(placement.request, now_s, (chosen,))
        return replace(placement.case, decode=again)
