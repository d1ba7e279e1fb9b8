"""What a ground host is told about itself, and what it tells of an operation that has ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from skymemory.protocol.authentication import Authority
from skymemory.protocol.pointing import Access
from skymemory.protocol.transfer import TransferReport, ValueInfo


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """``window_bytes``: what may be on its way to us (our receive buffer's real size bounds it); ``credit_bytes``:
    what a satellite is taken to hold before it has said so; ``expected_rtt_s``: round trip by geometry.
    """

    ground: int
    access: Access = "los"
    window_bytes: int = 3 << 20
    credit_bytes: int = 1 << 20
    expected_rtt_s: float = 0.0
    give_up_s: float = 0.8
    read_burst_chunks: int = 64
    hedge_round_trips: float = 1.5
    """Of values with copies: after so many round trips without an answer the next copy is asked too; 0: at once."""
    authority: Authority | None = field(default=None, repr=False)
    """Signs what we ask; None where the satellites ask for no MACs."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of operation ``number``. For ``ask``, ``body`` is the answer's; for transfers, ``report`` says all."""

    number: int
    ok: bool
    report: TransferReport
    body: bytes = b""
    info: ValueInfo | None = None
