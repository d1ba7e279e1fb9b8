"""From what a transfer has yet to ask for or to send to requests on their way, as far as the windows let it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from skymemory.placement.locate import Moves
from skymemory.protocol.answers import Verdict
from skymemory.protocol.in_flight import InFlight
from skymemory.protocol.links import Links
from skymemory.protocol.outbox import Operation
from skymemory.protocol.replicas import ReplicatedRead
from skymemory.protocol.transfer import CHUNK_OVERHEAD_BYTES, Burst, ReadTransfer, StandIns, ValueInfo, WriteTransfer
from skymemory.protocol.wire import Op

_LEAST_BURST_CHUNKS = 10
"""A window that admits fewer chunks is waited for, unless nothing is on its way."""


class Bursts:
    """Hands bursts to the outbox. A satellite that is taken for dead ends a write that needs it at once, and a read if
    those that had its chunks before have them no more.
    """

    def __init__(
        self, links: Links, in_flight: InFlight, everywhere: Callable[[ValueInfo, float], Sequence[Moves]]
    ) -> None:
        self._links = links
        self._everywhere = everywhere
        self._in_flight = in_flight

    def ask(self, operation: Operation, transfer: ReadTransfer, moves: Moves, now_s: float) -> Verdict | None:
        """All that the window lets us ask for, packed together. What is asked for is not cut, what is sent may be."""
        size_each = transfer.info.chunk_bytes + CHUNK_OVERHEAD_BYTES
        key, window = transfer.info.key, self._links.inbound
        suspects = self._links.suspects
        if transfer.checked_suspects != suspects.added and not isinstance(transfer, ReplicatedRead):
            silent = len(suspects) > 0 and any(
                burst.satellite in suspects and not transfer.is_one_of_many(burst.indices) for burst in transfer.pending
            )
            if silent and not transfer.avoid(suspects, self._stand_ins(transfer, now_s)):
                return Verdict(operation, "unreachable")
            transfer.checked_suspects = suspects.added
        requests = []
        while transfer.pending:
            satellite, indices, steps = transfer.pending[0]
            size_bytes = len(indices) * size_each
            if satellite in suspects:
                transfer.pending.popleft()
                if transfer.redirect(indices, satellite, "unreachable", self._stand_ins(transfer, now_s)):
                    continue
                return Verdict(operation, "unreachable")
            if not window.admits(size_bytes):
                break
            transfer.pending.popleft()
            body = key + steps if steps else b""
            requests.append(
                self._in_flight.begin(operation, satellite, Op.GET, indices, body, size_bytes, moves, now_s)
            )
        if requests:
            self._in_flight.transmit(requests, now_s)
        return None

    def _stand_ins(self, transfer: ReadTransfer, now_s: float) -> StandIns:
        return StandIns(partial(self._everywhere, transfer.info, now_s), self._links.quiet)

    def send(
        self, operation: Operation, transfer: WriteTransfer, moves: Moves, now_s: float
    ) -> Iterator[Verdict | None]:
        """Burst after burst, with a stop at each: None, or how it has ended."""
        stalled: deque[Burst] = deque()
        size_each = transfer.info.chunk_bytes + CHUNK_OVERHEAD_BYTES
        while transfer.pending:
            burst = transfer.pending.popleft()
            satellite, indices = burst.satellite, burst.indices
            if satellite in self._links.suspects:
                if not transfer.waive(indices):
                    yield Verdict(operation, "unreachable")
                    return
                if transfer.missing == 0:
                    yield Verdict(operation)
                    return
                continue
            fits = self._admitted(burst, size_each)
            if not fits:
                stalled.append(burst)
                continue
            if fits < len(indices):
                transfer.pending.appendleft(Burst(satellite, indices[fits:]))
                indices = indices[:fits]
            self._in_flight.send(operation, satellite, Op.SET, indices, b"", fits * size_each, moves, now_s)
            yield None
        transfer.pending.extendleft(reversed(stalled))

    def _admitted(self, burst: Burst, size_each: int) -> int:
        """How many chunks of the burst the window lets go now."""
        wanted = len(burst.indices)
        window = self._in_flight.window(Op.SET, burst.satellite)
        fits = min(wanted, window.open_bytes // size_each)
        if fits >= min(wanted, _LEAST_BURST_CHUNKS):
            return fits
        return 0 if window.in_flight_bytes else max(1, fits)
