"""Gets and sets packet by packet: every link and every server a queue, first in first out. A twin without numpy."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from skymemory.protocol.client.transfer import WRITE_BURST_CHUNKS
from skymemory_lab.sim.sky.physical import (
    ACK_BYTES,
    DATA_BYTES,
    REQUEST_BYTES,
    SET_BYTES,
    LinkRates,
    Operation,
    TransferSetting,
)

Then = Callable[[], None]
Hops = list[tuple[object, float, float]]
"""Queue, seconds of service, seconds of light after it."""


class Server(NamedTuple):
    """``beam``: the satellite whose beam its packets take, None on board. Links by their two ends."""

    beam: object
    beam_s: float
    links_out: list[tuple[object, float]]
    links_in: list[tuple[object, float]]


class Queues:
    """All queues, in virtual time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._free_s: dict[object, float] = defaultdict(float)
        self._events: list[tuple[float, int, Then]] = []
        self._order = count()

    def travel(self, hops: Hops, then: Then) -> None:
        """A packet joins the first queue now."""
        if not hops:
            return then()
        queue, service_s, after_s = hops[0]
        done_s = self._free_s[queue] = max(self.now_s, self._free_s[queue]) + service_s
        heapq.heappush(self._events, (done_s + after_s, next(self._order), lambda: self.travel(hops[1:], then)))
        return None

    def run(self) -> float:
        while self._events:
            self.now_s, _, then = heapq.heappop(self._events)
            then()
        return self.now_s


def finished_s(servers: list[Server], setting: TransferSetting, rates: LinkRates, operation: Operation) -> float:
    """When the last packet is back."""
    queues, tau_s = Queues(), setting.server_s
    counts = setting.counts(len(servers))
    left = [int(held) for held in counts]
    waiting = deque(range(setting.chunks))

    def way(server: Server, size_bytes: int, out: bool) -> Hops:
        beam_rate = rates.up_bit_s if out else rates.down_bit_s
        links = server.links_out if out else server.links_in
        hops: Hops = [(("link", name), seconds(size_bytes, rates.isl_bit_s), light_s) for name, light_s in links]
        beam: Hops = [(("beam", server.beam, out), seconds(size_bytes, beam_rate), server.beam_s)]
        if server.beam is None:
            return hops
        return beam + hops if out else hops + beam

    def ask(number: int, chunks: int) -> None:
        queues.travel(way(servers[number], REQUEST_BYTES, True), lambda: answer(number, chunks))

    def answer(number: int, chunks: int) -> None:
        back = way(servers[number], setting.chunk_bytes + DATA_BYTES, False)
        for _ in range(chunks):
            queues.travel([(("server", number), tau_s, 0.0), *back], arrived)

    def arrived() -> None:
        if waiting:
            ask(waiting.popleft() % len(servers), 1)

    def stored(number: int) -> None:
        left[number] -= 1
        if not left[number]:
            queues.travel(way(servers[number], ACK_BYTES, False), lambda: None)

    if operation == "get":
        first = [waiting.popleft() % len(servers) for _ in range(int(min(setting.window_chunks, setting.chunks)))]
        for number in range(min(len(servers), len(first))):
            ask(number, first.count(number))
    else:
        for number in send_order(servers, left, setting):
            out = way(servers[number], setting.chunk_bytes + SET_BYTES, True)
            queues.travel([*out, (("server", number), tau_s, 0.0)], lambda number=number: stored(number))  # type: ignore[misc]
    return queues.run()


def seconds(size_bytes: int, rate_bit_s: float | None) -> float:
    return 0.0 if rate_bit_s is None else size_bytes * 8 / rate_bit_s


def send_order(servers: list[Server], counts: list[int], setting: TransferSetting) -> list[int]:
    """The server of each chunk of a set, in the order of sending."""
    if setting.order == "farthest":

        def light_s(number: int) -> float:
            server = servers[number]
            return server.beam_s + sum(s for _, s in server.links_out + server.links_in) / 2

        numbers = sorted(range(len(counts)), key=light_s, reverse=True)
        return [number for number in numbers for _ in range(counts[number])]
    return [
        number
        for begun in range(0, max(counts), WRITE_BURST_CHUNKS)
        for number, held in enumerate(counts)
        for _ in range(max(0, min(WRITE_BURST_CHUNKS, held - begun)))
    ]
