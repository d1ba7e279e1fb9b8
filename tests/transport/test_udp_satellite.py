"""What waits to be sent at a satellite: kept in order, sent when the kernel has room again, and bounded."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from skymemory.metrics import Counters
from skymemory.protocol.wire import SegmentBatch, single
from skymemory.transport.udp_host import UdpSatellite

THERE = ("127.0.0.1", 9)


@dataclass
class Socket:
    """Takes so many batches whole."""

    room: int = 0
    sent: list[SegmentBatch] = field(default_factory=list)

    def fileno(self) -> int:
        return 3

    def send(self, batch: SegmentBatch, endpoint: object) -> SegmentBatch | None:
        if not self.room:
            return batch
        self.room -= 1
        self.sent.append(batch)
        return None


def satellite(max_backlog_bytes: int) -> tuple[Any, Socket]:
    config = SimpleNamespace(max_backlog_bytes=max_backlog_bytes)
    machine = SimpleNamespace(config=config, backlog_bytes=0, counters=Counters())
    loop = SimpleNamespace(add_writer=lambda *_: None, remove_writer=lambda *_: None)
    sock = Socket()
    return UdpSatellite(machine, sock, loop), sock  # type: ignore[arg-type]


def test_what_waits_is_bounded_and_leaves_in_order() -> None:
    ours, sock = satellite(1000)
    batches = [single(bytes([number]) * 100) for number in range(200)]
    for batch in batches:
        ours.transmit(batch, THERE)
    kept = ours.machine.backlog_bytes // 100
    assert 40 <= kept <= 42 and ours.machine.counters.get("packets_dropped") == 200 - kept
    sock.room = 1000
    ours._writable()
    assert sock.sent == batches[:kept] and ours.machine.backlog_bytes == 0
    ours.transmit(batches[-1], THERE)
    assert sock.sent[-1] is batches[-1]
