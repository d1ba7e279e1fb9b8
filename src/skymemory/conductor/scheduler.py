"""Where a request is prefilled, where it decodes, and whether it is let in at all.

Mooncake's conductor (FAST'25, algorithm 1) in three parts that can be changed one by one: a ``Picker`` over the servers
that prefill, a ``Picker`` over those that decode, and an ``Admission``. Servers that do both are one picker alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from skymemory.conductor.admission.base import Admission, AdmitAll, Case, Outlook, Refusal
from skymemory.conductor.picker import Picker
from skymemory.conductor.request import Decision, Request


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where a request goes. Each belongs to one request and is told what becomes of it."""

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
    """Places requests, and keeps the account of what became of them. Not for several threads at once.

    A request's way: ``place``, ``begin``, ``prefilled``, ``decoding``, ``ended``; or ``failed`` from anywhere behind
    ``begin``. Where prefill and decoding are on one server, ``prefilled`` is its first token and ``decoding`` is left
    out.
    """

    def __init__(
        self,
        prefill: Picker,
        decode: Picker | None = None,
        admission: Admission | None = None,
        outlook: Outlook | None = None,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.admission: Admission = admission or AdmitAll()
        self.outlook = outlook

    def place(self, request: Request, now_s: float, among: Collection[str] | None = None) -> Placement | Refusal:
        """Where it should go, or why it is refused. Nothing is booked; a refusal is told to the rule, and is final.

        Raises:
            NoServer: no server takes requests.
        """
        prefill = self.prefill.pick(request, now_s, among)
        decode = None if self.decode is None else self.decode.pick(request, now_s)
        case = Case(request, prefill, decode, self.outlook)
        refusal = self.admission.on_arrival(case, now_s)
        if refusal is not None:
            self.admission.refused(case, refusal, now_s)
            return refusal
        return Placement(case)

    def place_again(self, placement: Placement, now_s: float, among: Collection[str] | None = None) -> Placement:
        """Where else, once a server ``failed`` it: it was let in, and is not asked for that again.

        Raises:
            NoServer: no server takes requests.
        """
        prefill = self.prefill.pick(placement.request, now_s, among)
        decode = None if self.decode is None else self.decode.pick(placement.request, now_s)
        return Placement(replace(placement.case, prefill=prefill, decode=decode))

    def begin(self, placement: Placement, now_s: float) -> None:
        """It is sent on its way. The decoding server expects it from now on."""
        case = placement.case
        self.prefill.routed(case.prefill, now_s)
        if self.decode is not None and placement.decode is not None:
            self.decode.routed(placement.decode, now_s)
            if self.outlook is not None:
                self.outlook.expected(placement.request, now_s + (placement.prefill.estimated_ttft_s or 0.0))
        self.admission.accepted(case, now_s)

    def prefilled(self, placement: Placement, now_s: float, cached_tokens: int | None = None) -> Refusal | None:
        """Its prefill is done. A refusal: it may not decode, and all is over."""
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
        """It is in the decoding server's batch."""
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
        """Its last token came; ``met``: as early as was promised, None where that cannot be told.

        ``cached_tokens``: as for ``prefilled``, where the end of the answer says so; ``output_tokens`` likewise.
        """
        case = placement.case
        if self.decode is not None and case.decode is not None:
            self.decode.ended(case.decode, now_s, output_tokens=output_tokens)
        else:
            self.prefill.ended(case.prefill, now_s, cached_tokens, output_tokens)
        self.admission.ended(case, now_s, met)

    def failed(self, placement: Placement, now_s: float, prefilled: bool, decoding: bool = False) -> None:
        """A server that had it died, before or after the end of the prefill, before or after it joined a batch."""
        if self.decode is None or placement.decode is None:
            (self.prefill.ended if prefilled else self.prefill.failed)(placement.prefill, now_s)
        else:
            if not prefilled:
                self.prefill.failed(placement.prefill, now_s)
            (self.decode.ended if decoding else self.decode.failed)(placement.decode, now_s)
        self.admission.ended(placement.case, now_s, None)

    def _case_now(self, placement: Placement, now_s: float) -> Case:
        """The same request, with its own decoding server's estimate as it is now."""
        assert self.decode is not None and placement.decode is not None
        chosen = placement.decode.server
        server = self.decode.fleet.servers.get(chosen)
        if server is None or not server.takes_requests:
            return placement.case
        again = self.decode.pick(placement.request, now_s, (chosen,))
        return replace(placement.case, decode=again)
