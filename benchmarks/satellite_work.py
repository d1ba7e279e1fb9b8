"""What a satellite's work costs its host, by kind: `python benchmarks/satellite_work.py`.

The figures behind ``WorkCosts`` of the simulator with limited processors. The machines' own code is timed by itself;
what the event loop, the delay line and the kernel add is what a real host uses per packet beyond that. Times are of
the processor, not of the clock, and the best of several rounds: other programs make work no cheaper.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

from _bench import print_table, write_json
from skymemory.constellation.presets import preset_named
from skymemory.constellation.torus import SatelliteId
from skymemory.protocol import messages
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.satellite.machine import SatelliteConfig, SatelliteMachine
from skymemory.protocol.satellite.routing import Declaration, LinksBody, LinkState
from skymemory.protocol.wire import (
    Address,
    ChunkRef,
    Op,
    PlacementTag,
    SegmentBatch,
    SkyHeader,
    build_packet,
    bulk_batch,
)
from skymemory.transport.faults import FaultInjector
from skymemory.transport.udp_host import HostSpec, UdpHost
from skymemory.transport.udp_socket import BatchSocket

PRESET = preset_named("testbed-19x5")
HERE, NEIGHBOUR = SatelliteId(2, 9), SatelliteId(2, 10)
CHUNK_BYTES = 6144
ROUNDS = 7
NOW_S = 1e9


def best_s(work: Callable[[], object], times: int, fresh: Callable[[], object] = lambda: None) -> float:
    """Processor seconds of one ``work``; ``fresh`` is done before each round and not timed."""
    found = []
    for _ in range(ROUNDS):
        fresh()
        began_s = time.process_time()
        for _ in range(times):
            work()
        found.append((time.process_time() - began_s) / times)
    return min(found)


def machine() -> SatelliteMachine:
    sky = SkyMap(PRESET.torus, HERE)
    made = SatelliteMachine(SatelliteConfig(HERE, 1 << 30), sky, MoveClock(epoch_s=NOW_S), NOW_S)
    made.datagrams_to_send(NOW_S)
    return made


def header(op: Op, there: SatelliteId = HERE) -> SkyHeader:
    return SkyHeader(op, Address(*there), Address(*NEIGHBOUR), 0, 1)


def links(declarations: int, answer_me: bool = False) -> bytes:
    known = [Declaration(here, 0, int(NOW_S * 1e3)) for here in PRESET.torus.satellites()[:declarations]]
    return build_packet(header(Op.LINKS), LinksBody(answer_me, (0, 0), 0, known).pack(), 0, NOW_S)


def chunks(count: int, there: SatelliteId = HERE) -> bytes:
    """MIGRATE of so many chunks, in one piece."""
    payloads = [random.Random(index).randbytes(CHUNK_BYTES) for index in range(count)]
    refs = b"".join(
        ChunkRef(
            bytes(32),
            index,
            1000,
            CHUNK_BYTES,
            messages.native.crc32(payload),
            1000 * CHUNK_BYTES,
            1,
            PlacementTag(5, 1, 0, 0, 0),
        ).pack()
        for index, payload in enumerate(payloads)
    )
    return b"".join(bulk_batch(header(Op.MIGRATE, there), refs, payloads, 0, NOW_S).datagrams())


def receive_s(data: bytes, count: int = 1, source: object = NEIGHBOUR, times: int = 300) -> float:
    """Taken from a neighbour, with what is said to it."""
    taker = machine()

    def work() -> None:
        taker.receive_batch(data, len(data) // count, source, NOW_S)
        taker.datagrams_to_send(NOW_S)
        taker.next_timer_s()

    return best_s(work, times)


def fill(taker: SatelliteMachine, values: int) -> None:
    """300 chunks of each of so many values."""
    for value in range(values):
        key = value.to_bytes(32, "big")
        tag = PlacementTag(3, 10, 0, 0, 0)
        for index in range(0, 3000, 10):
            ref = ChunkRef(key, index, 3000, 8, 0, 24000, 1, tag).pack()
            taker.store.put((key, index), ref, bytes(8))


def plan_s(values: int) -> float:
    taker = machine()
    fill(taker, values)
    before = taker.handover.chunks_planned
    where = iter(range(1 << 30))

    def work() -> None:
        away = SatelliteId(0, next(where) % 19)
        taker.handover.plan(taker.store, lambda tag: away, HERE)

    spent_s = best_s(work, 20)
    return spent_s * 20 * ROUNDS / (taker.handover.chunks_planned - before)


def search_s() -> float:
    """A satellite reached in a search for a way."""
    state = LinkState(PRESET.torus)
    state.learn(Declaration(HERE, 1, int(NOW_S * 1e3)), NOW_S)
    stamp = iter(range(1 << 30))
    before = state.satellites_searched

    def work() -> None:
        n = next(stamp)
        state.learn(Declaration(HERE, 1 + n % 2, int(NOW_S * 1e3) + n + 1), NOW_S)
        for there in (SatelliteId(0, 0), SatelliteId(4, 3), SatelliteId(1, 15)):
            state.onward(HERE, there, PRESET.torus.next_hop(HERE, there))

    spent_s = best_s(work, 100)
    return spent_s * 100 * ROUNDS / (state.satellites_searched - before)


def faulty_s() -> float:
    faults = FaultInjector(0.02, 0.01, 0.03, 0.005, 1)
    data = chunks(10)
    view = memoryview(data)
    size = len(data) // 10
    return best_s(lambda: [faults.apply(bytes(view[at : at + size])) for at in range(0, len(data), size)], 300) / 10


def socket_s(count: int) -> tuple[float, float]:
    """Sending and receiving one batch of so many chunks on the loopback."""
    sending_s, receiving_s = [], []
    with BatchSocket() as one, BatchSocket() as other:
        data = chunks(count) if count else links(0)
        batch = SegmentBatch(data, len(data) // max(1, count))
        for _ in range(ROUNDS):
            sent_s = got_s = 0.0
            for _ in range(100):
                began_s = time.process_time()
                one.send(batch, other.address)
                sent = time.process_time()
                other.receive()
                sent_s += sent - began_s
                got_s += time.process_time() - sent
            sending_s.append(sent_s / 100)
            receiving_s.append(got_s / 100)
    return min(sending_s), min(receiving_s)


def _ask(asked: list[tuple[tuple[str, int], bytes, socket.socket]], times: int) -> None:
    for _ in range(times):
        for to, data, sock in asked:
            sock.sendto(data, to)
        time.sleep(0.01)


def host_s(satellites: int, times: int = 300) -> float:
    """All that a real host needs for a LINKS that asks for an answer: taken by itself, answered, held, sent. So many
    satellites are asked at the same time.
    """
    mine_names = [SatelliteId(2, slot) for slot in range(satellites)]
    probes = [BatchSocket() for _ in mine_names]
    mine = {name: probe.address for name, probe in zip(mine_names, probes, strict=True)}
    for probe in probes:
        probe.close()
    askers = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in mine_names]
    everyone = dict.fromkeys(PRESET.torus.satellites(), ("127.0.0.1", 9)) | mine
    asked = []
    for name, sock in zip(mine_names, askers, strict=True):
        sock.bind(("127.0.0.1", 0))
        neighbour = SatelliteId(1, name.slot)
        everyone[neighbour] = sock.getsockname()
        question = SkyHeader(Op.LINKS, Address(*name), Address(*neighbour), 0, 1)
        asked.append((mine[name], build_packet(question, LinksBody(True, (0, 0), 0).pack(), 0, NOW_S), sock))
    spec = HostSpec(
        mine,
        everyone,
        SkyMap(PRESET.torus, HERE),
        PRESET.shell,
        MoveClock(),
        1 << 20,
        faults=FaultInjector(corrupt=1e-12),
    )

    async def serve() -> float:
        host = UdpHost(spec, asyncio.get_running_loop())
        await asyncio.sleep(0.2)
        asker = multiprocessing.get_context("fork").Process(target=_ask, args=(asked, times))
        asker.start()
        began_s = time.process_time()
        while asker.is_alive():
            await asyncio.sleep(0.25)
        spent_s = time.process_time() - began_s
        host.close()
        return spent_s / times / satellites

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    ping = build_packet(header(Op.PING), b"", 0, NOW_S)
    far = SatelliteId(2, 5)
    links0_s, links90_s = receive_s(links(0)), receive_s(links(90))
    asked_s = receive_s(links(0, answer_me=True))
    send_small_s, take_small_s = socket_s(0)
    send_ten_s, take_ten_s = socket_s(10)
    alarm = machine()
    alarm_s = best_s(lambda: (alarm.handle_timer(NOW_S), alarm.datagrams_to_send(NOW_S), alarm.next_timer_s()), 1000)
    figures = {
        "control_s": receive_s(ping),
        "links_s": links0_s,
        "declaration_s": (links90_s - links0_s) / 90,
        "links asked, with answer": asked_s,
        "chunk_s": receive_s(chunks(1)),
        "run_chunk_s": receive_s(chunks(10), 10) / 10,
        "forward_s": receive_s(chunks(1, far)),
        "forward of ten": receive_s(chunks(10, far), 10),
        "alarm_s": alarm_s,
        "searched_s": search_s(),
        "planned_s": plan_s(20),
        "faulty_s": faulty_s(),
        "send one": send_small_s,
        "send ten": send_ten_s,
        "take one": take_small_s,
        "take ten": take_ten_s,
        "host: one asked": host_s(1),
        "host: 19 asked": host_s(19),
    }
    rows = [{"work": name, "seconds": value} for name, value in figures.items()]
    table = [(name, f"{1e6 * value:.1f}") for name, value in figures.items()]
    print_table("Processor by kind of work", ("work", "µs"), table)
    write_json(options.json, "satellite_work", 1, rows)


if __name__ == "__main__":
    main()
