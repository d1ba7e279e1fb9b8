"""Runs of packets: headers of bursts, chunks that a satellite stores or serves, answers that a client awaits.

A *run* is what receive offload delivers: packets of ``segment_bytes`` each. Runs whose packets do not belong together
have no effect.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable, Mapping, MutableMapping, Set
from functools import partial
from typing import TYPE_CHECKING, Final

from skymemory.native.twin.relay import GROUND_SHELL, Link, Passed, Slot, Transit, Way, next_hop, pass_on
from skymemory.native.twin.segments import (
    AUTHENTICATED,
    COMMAND_BYTES,
    CRC_AT,
    DATA,
    FLAGS_AT,
    KEY_ID_AT,
    MAC_BYTES,
    REF_BYTES,
    SET,
    SKY_APID,
    SKY_BYTES,
    TELEMETRY_BYTES,
    UNSEGMENTED,
    VERSION,
    Landing,
    check_header,
    check_macs,
    header_crc,
    place_segments,
    segments,
    sign_packets,
    strip_macs,
    verify_segments,
)
from skymemory.native.twin.sockets import Arrival, recv_batch, send_batch

if TYPE_CHECKING:
    from typing_extensions import Buffer


Run = tuple[memoryview, int]
"""Packets end to end, and the bytes of each (the last maybe shorter)."""
AnswerTerms = tuple[int, int, int, int, int, int]
"""Fields of an answer: slot and plane moves, credit in wire units, current seconds and 65,536ths, first sequence
count.
"""

_SAME_JOURNEY: Final = 20
_NUMBERS = struct.Struct(">IIIIIIHH")
_NUMBERS_AT, _COMMON_AT = 32, 48
_COUNT_AND_LENGTH = struct.Struct(">HH")
_WORD = struct.Struct(">I")
_SELECTION = struct.Struct(">32sIII")
_TELEMETRY = struct.Struct(">HHHIHI")
_OURS = struct.Struct(">iiHHI")
GET: Final = 0x02
_MOST_BITS = 1 << 16
_HOP_LIMIT = 64


def bulk_headers(prefix: Buffer, refs: Buffer, sequence: int, sky_offset: int) -> bytearray:
    """Return the sealed headers of a burst: ``prefix`` and a reference, for each of ``refs`` (72 bytes each)."""
    first, bodies = bytes(prefix), memoryview(refs).cast("B")
    if sky_offset < 6 or len(first) < sky_offset + SKY_BYTES or len(bodies) % REF_BYTES or sequence < 0:
        raise ValueError(
            f"{len(bodies)} bytes of references after a prefix of {len(first)}, SKY header at {sky_offset}, "
            f"sequence {sequence}"
        )
    headers, width = bytearray(), len(first) + REF_BYTES
    for at in range(0, len(bodies), REF_BYTES):
        length = _WORD.unpack_from(bodies, at + 40)[0] + width - 7
        if length > 0xFFFF:
            raise ValueError("a chunk that no packet carries")
        row = bytearray(first + bytes(bodies[at : at + REF_BYTES]))
        _COUNT_AND_LENGTH.pack_into(row, 2, UNSEGMENTED << 14 | (sequence & 0x3FFF), length)
        _WORD.pack_into(row, sky_offset + CRC_AT, header_crc(memoryview(row), sky_offset, width))
        headers += row
        sequence += 1
    return headers


def answer_prefix(op: int, request: memoryview, terms: AnswerTerms) -> bytes:
    """Return the headers of an answer to ``request``, unsealed."""
    slot_moves, plane_moves, credit, seconds, fraction, _ = terms
    sky = request[COMMAND_BYTES : COMMAND_BYTES + SKY_BYTES]
    return _TELEMETRY.pack(0x0800 | SKY_APID, 0, 0, seconds, fraction, 0) + b"".join(
        (
            bytes((VERSION, op, 0, 0)),
            sky[8:12],
            sky[4:8],
            sky[12:20],
            bytes((_HOP_LIMIT, 0, 0, 0)),
            sky[24:28],
            _OURS.pack(slot_moves, plane_moves, min(credit, 0xFFFF), 0, 0),
        )
    )


def answer_get(
    packet: Buffer, shares: Mapping[bytes, dict[int, tuple[bytes, bytes]]], terms: AnswerTerms
) -> tuple[bytes, bytearray, list[bytes]] | None:
    """Return the DATA packets that answer a plain GET: its key, their sealed headers, their payloads. None unless
    valid, with all chunks in ``shares``: (packed reference, payload) by key and 0-based index.
    """
    view = memoryview(packet).cast("B")
    body_at = COMMAND_BYTES + SKY_BYTES
    bitmap_at = body_at + _SELECTION.size
    if len(view) <= bitmap_at or not view[0] & 0x10 or view[COMMAND_BYTES + 1] != GET or view[COMMAND_BYTES + 3]:
        return None
    if check_header(view)[0]:
        return None
    key, first, stride, count = _SELECTION.unpack_from(view, body_at)
    if not (first and stride and 1 <= count <= _MOST_BITS and len(view) - bitmap_at == (count + 7) // 8):
        return None
    bitmap, share = view[bitmap_at:], shares.get(key, {})
    wanted = [first - 1 + stride * step for step in range(count) if bitmap[step >> 3] >> (step & 7) & 1]
    if not wanted or not all(index in share for index in wanted):
        return None
    prefix = answer_prefix(DATA, view, terms)
    chunks = [share[index] for index in wanted]
    headers = bulk_headers(prefix, b"".join(ref for ref, _ in chunks), terms[5], TELEMETRY_BYTES)
    return key, headers, [payload for _, payload in chunks]


def open_runs(runs: list[Run], first: int) -> tuple[list[int], list[tuple[bytes, bytes]], int, int] | None:
    """Parse valid SET or MIGRATE packets of the same request, value and server, ascending, in the runs from ``first``
    up to the first other. Return 0-based indices, (reference, payload) of each, their bytes, and the number of runs;
    None if 0.
    """
    if first < 0:
        raise ValueError(f"first run {first}: expected 0 or more")
    indices: list[int] = []
    chunks: list[tuple[bytes, bytes]] = []
    run_count, journey = 0, b""
    for data, segment_bytes in runs[first:]:
        if segment_bytes < 1:
            break
        opened = _open(segments(data, segment_bytes), chunks[0][0] if chunks else None, indices[-1:])
        if opened is None or (run_count and opened[0] != journey):
            break
        journey = opened[0]
        indices += opened[1]
        chunks += opened[2]
        run_count += 1
    return (indices, chunks, sum(len(ref) + len(payload) for ref, payload in chunks), run_count) if run_count else None


def _open(
    packets: list[memoryview], first_ref: bytes | None, last: list[int]
) -> tuple[bytes, list[int], list[tuple[bytes, bytes]]] | None:
    """Parse the packets of a run; None unless all are valid and of the same request, value and server. ``last``: the
    last index of the runs before.
    """
    indices: list[int] = []
    chunks: list[tuple[bytes, bytes]] = []
    ref_at, payload_at = COMMAND_BYTES + SKY_BYTES, COMMAND_BYTES + SKY_BYTES + REF_BYTES
    journey = b""
    # All or nothing: a run with a bad or foreign packet is left to the general path, which counts and answers each
    # packet.
    for packet in packets:
        code, ref_found = check_header(packet)
        if code or ref_found != ref_at or packet[COMMAND_BYTES + 1] == DATA:
            return None
        ref, payload = bytes(packet[ref_at:payload_at]), bytes(packet[payload_at:])
        number, total, length, crc, value_bytes, _, servers, server = _NUMBERS.unpack_from(ref, _NUMBERS_AT)
        packet_journey = bytes(packet[COMMAND_BYTES : COMMAND_BYTES + _SAME_JOURNEY])
        journey, first_ref = journey or packet_journey, first_ref or ref
        after = (indices or last or [-1])[-1] + 1
        if packet_journey != journey or _value(ref) != _value(first_ref):
            return None
        if not after < number <= total <= max(1, value_bytes) or length > value_bytes:
            return None
        if not servers or server != (number - 1) % servers + 1 or zlib.crc32(payload) != crc:
            return None
        indices.append(number - 1)
        chunks.append((ref, payload))
    return (journey, indices, chunks) if indices else None


def _value(ref: bytes) -> tuple[bytes, bytes, bytes]:
    return ref[:_NUMBERS_AT], ref[36:40], ref[_COMMON_AT:]


Tally = tuple[int, int, int, int, int, int, int]
"""Request id, last echoed timestamp, runs; then chunks placed, duplicates, corrupt and foreign."""

_ANSWER = slice(TELEMETRY_BYTES + 1, TELEMETRY_BYTES + 20)
_MOST_SLOTS, _MOST_PATIENCE_US = 64, 60_000_000


def place_runs(runs: list[Run], first: int, awaited: dict[int, Landing]) -> list[Tally]:
    """Place runs from ``first`` on, up to the first that is not all DATA for the same awaited request. Return a tally
    per request.
    """
    if first < 0:
        raise ValueError(f"first run {first}: expected 0 or more")
    tallies: dict[int, Tally] = {}
    for data, segment_bytes in runs[first:]:
        if not _land(data, segment_bytes, awaited, tallies):
            break
    return list(tallies.values())


def recv_runs(
    fd: int, scratch: memoryview, slots: int, calls: int, patience_us: int, awaited: dict[int, Landing]
) -> tuple[list[Tally], list[Run]]:
    """Receive like ``recv_batch`` (64 slots at most), and place like ``place_runs``.

    Ends when nothing arrives for ``patience_us`` (a minute at most), on a signal, after ``calls`` batches, with a
    complete value, or at a run not placed; returns that and later runs too, as views of ``scratch``.

    Raises:
        OSError: the socket's pending error, before anything was placed.
    """
    if calls < 1:
        raise ValueError(f"{calls} calls: expected 1 or more")
    if patience_us > _MOST_PATIENCE_US:
        raise ValueError(f"{patience_us} us of patience: expected at most {_MOST_PATIENCE_US}")
    tallies: dict[int, Tally] = {}
    unplaced: list[Run] = []
    for _ in range(calls):
        until_s = time.monotonic() + patience_us * 1e-6
        while True:
            try:
                arrivals = recv_batch(fd, scratch, min(slots, _MOST_SLOTS))
            except OSError:
                if tallies:
                    return list(tallies.values()), unplaced
                raise
            if arrivals or time.monotonic() >= until_s:
                break
        for at, size, segment_bytes, _, _ in arrivals:
            run = scratch[at : at + size], segment_bytes
            if unplaced or not _land(*run, awaited, tallies):
                unplaced.append(run)
        if not arrivals or unplaced or _any_complete(tallies, awaited):
            break
    return list(tallies.values()), unplaced


def _land(data: Buffer, segment_bytes: int, awaited: dict[int, Landing], tallies: dict[int, Tally]) -> bool:
    """Place a run of DATA for an awaited request, and add to its tally. Return False, without effect, for others."""
    view = memoryview(data).cast("B")
    if min(len(view), segment_bytes) < TELEMETRY_BYTES + SKY_BYTES or view[_ANSWER.start] != DATA:
        return False
    packets = segments(view, segment_bytes)
    answer = bytes(packets[0][_ANSWER])
    request, echo = (int(_WORD.unpack_from(packets[0], TELEMETRY_BYTES + at)[0]) for at in (16, 24))
    landing = awaited.get(request)
    if landing is None or any(packet[_ANSWER] != answer for packet in packets):
        return False
    counts = place_segments(data, segment_bytes, landing)
    _, _, runs, *before = tallies.get(request, (request, echo, 0, 0, 0, 0, 0))
    placed, duplicates, corrupt, foreign = (was + now for was, now in zip(before, counts, strict=True))
    tallies[request] = (request, echo, runs + 1, placed, duplicates, corrupt, foreign)
    return True


def _any_complete(tallies: dict[int, Tally], awaited: dict[int, Landing]) -> bool:
    return any(tally[3] and 0 not in memoryview(awaited[request][6]) for request, tally in tallies.items())


# --- A satellite's fast path: plain GETs and SETs are received, executed and answered in one call ---
#
# ``serve`` stops answering at the first packet that is not plain. Later packets may depend on it (a GET after the SET
# of the same chunk), so all of them go to the state machine, in the order of arrival. Only packets in transit depend on
# nothing: they may overtake earlier packets.

Rest = tuple[bytearray, list[bytes] | None]
"""Headers (or a packet) and payloads still to be sent."""
Served = tuple[int, bytes, int, Link, Link, int, int, int, int, Rest | None]
"""Operation, key, ground host, incoming and outgoing link, chunks; of a SET also chunks and bytes replaced, bytes
added; the part still to be sent.
"""

_ADDRESSES_BYTES = 8
_DESTINATION, _SOURCE = (slice(COMMAND_BYTES + at, COMMAND_BYTES + at + 4) for at in (4, 8))
_GROUND = slice(COMMAND_BYTES + 12, COMMAND_BYTES + 16)
_OP_AT, _KEY_AT, _KEY_BYTES = COMMAND_BYTES + 1, COMMAND_BYTES + SKY_BYTES, 32


def serve(
    fd: int,
    scratch: Buffer,
    slots: int,
    neighbours: Mapping[tuple[str, int], Link],
    requests: PlainRequests,
    transit: Transit | None = None,
) -> tuple[list[Arrival], list[Served], int, list[Passed]]:
    """Receive like ``recv_batch``, but answer the plain requests that come first, and forward runs in transit.

    A plain request is for the first of both addresses of ``requests``, from the second, our beam, or by a link of
    ``neighbours`` from a ground host to which ``transit`` knows the route: a single GET (``answer_get``), or SETs
    (``take_sets``). A guard demands MACs of it and of runs forwarded from the ground.

    Return the other arrivals, the requests served, the number of refused sends, and the runs forwarded.

    Raises:
        OSError: the socket's pending error; the next call continues.
    """
    service = _Service(fd, scratch, requests, transit)
    arrivals = recv_batch(fd, scratch, slots)
    ways: list[Way] = [((host, port), neighbours.get((host, port))) for _, _, _, host, port in arrivals]
    kept_runs = service.serve([arrival[:3] for arrival in arrivals], ways)
    return [arrivals[at] for at in kept_runs], service.served, service.send_errors, service.passed_by_way


def serve_runs(
    fd: int,
    scratch: Buffer,
    runs: list[Slot],
    source: Link,
    requests: PlainRequests,
    transit: Transit | None = None,
) -> tuple[list[Slot], list[Served], int, list[Passed]]:
    """Run ``serve`` for runs handed over by a satellite, or (a name that begins with text) a ground host, whose answers
    are returned, not sent. ``runs``: offset in writable ``scratch``, bytes, bytes of a segment.
    """
    service = _Service(fd, scratch, requests, transit)
    runs = list(runs)  # a copy: the guard may change the caller's list
    for at, size, segment_bytes in runs:
        if at < 0 or size < 1 or segment_bytes < 1 or at + size > len(service.view):
            raise ValueError(f"a run of {size} bytes at {at}, in packets of {segment_bytes}")
    service.in_memory = True
    way: Way = (source, None) if isinstance(source[0], str) else (None, source)
    kept_runs = service.serve(runs, [way] * len(runs))
    return [runs[at] for at in kept_runs], service.served, service.send_errors, service.passed_by_way


class _Service:
    def __init__(self, fd: int, scratch: Buffer, requests: PlainRequests, transit: Transit | None) -> None:
        self._addresses, self._shares, self._settled, self._room_bytes, self._terms, self._guard = requests
        addresses = self._addresses
        if len(addresses) != _ADDRESSES_BYTES:
            raise ValueError(f"addresses of {len(addresses)} bytes: expected {_ADDRESSES_BYTES}")
        self.view = memoryview(scratch).cast("B")
        if self.view.readonly:
            raise BufferError("scratch: expected a writable buffer")
        self.served: list[Served] = []
        self._passed: dict[tuple[Link, int, Link], tuple[int, list[Slot]]] = {}
        self.send_errors = 0
        self.in_memory = False
        self._fd, self._transit = fd, transit

    @property
    def passed_by_way(self) -> list[Passed]:
        return [(*way, packets, unsent) for way, (packets, unsent) in self._passed.items()]

    def serve(self, runs: list[Slot], ways: list[Way]) -> list[int]:
        """Serve or forward runs; return the positions of those left. After a run left, only packets in transit are
        handled.
        """
        kept_runs: list[int] = []
        at = 0
        while at < len(runs):
            begin, size, _ = runs[at]
            packet = self.view[begin : begin + size]
            ours = size >= _GROUND.stop and packet[0] & 0x10 and packet[_DESTINATION] == self._addresses[:4]
            messages = 0
            if not ours:
                messages = self._pass(runs[at], ways[at])
            elif not kept_runs:
                end = next((other for other in range(at, len(runs)) if ways[other] != ways[at]), len(runs))
                messages = self._execute(runs[at:end], ways[at])
            if not messages:
                kept_runs.append(at)
            at += messages or 1
        return kept_runs

    def _pass(self, run: Slot, way: Way) -> int:
        """Forward a run in transit. Return 1, or 0 if only the state machine can."""
        begin, size, segment_bytes = run
        packet = self.view[begin : begin + size]
        if self._transit is None:
            return 0
        admits = None if self._guard is None else partial(_admitted, [(packet, segment_bytes)], self._guard)
        outcome = pass_on(self._fd, (packet, segment_bytes), self._addresses, way, self._transit, admits)
        if outcome is None:
            return 0
        journey_way, sent, refused = outcome
        sent_bytes = sent * segment_bytes
        packets, unsent = self._passed.setdefault(journey_way, (0, []))
        if sent_bytes < size:
            unsent.append((begin + sent_bytes, size - sent_bytes, segment_bytes))
        self._passed[journey_way] = packets - (-size // segment_bytes), unsent
        self.send_errors += refused
        return 1

    def _execute(self, same: list[Slot], way: Way) -> int:
        """Serve the GET or SETs that begin these runs, and send or keep the answer. Return how many runs it took."""
        runs = [(self.view[begin : begin + size], segment_bytes) for begin, size, segment_bytes in same]
        packet, segment_bytes = runs[0]
        route = self._way_back(packet, way)
        if route is None:
            return 0
        link, to = route
        figures, payloads = (0, 0, 0, 0), None
        if packet[_OP_AT] == GET and segment_bytes >= len(packet):
            answer = _answer(packet, self._shares, self._terms, self._guard)
            if answer is None:
                return 0
            _, headers, payloads = answer
            messages, figures, packets = 1, (len(payloads), 0, 0, 0), len(payloads)
        elif packet[_OP_AT] == SET:
            stored = take_sets(runs, self._shares, self._settled, self._room_bytes, self._terms, self._guard)
            if stored is None:
                return 0
            messages, figures, headers, packets = stored[0], stored[1:5], stored[5], 1
            self._room_bytes -= stored[4]
        else:
            return 0
        unsent, refused = _send(self._fd, *to, headers, payloads) if to is not None else ((headers, payloads), False)
        key, ground = bytes(packet[_KEY_AT : _KEY_AT + _KEY_BYTES]), int.from_bytes(packet[_GROUND], "big")
        endpoint, source = way
        came_by = source if source is not None else endpoint
        assert came_by is not None
        self.served.append((packet[_OP_AT], key, ground, came_by, link, *figures, unsent))
        self.send_errors += refused
        self._terms = (*self._terms[:5], self._terms[5] + packets)
        return messages

    def _way_back(self, packet: memoryview, way: Way) -> tuple[Link, tuple[str, int] | None] | None:
        """Return the link and endpoint by which an answer leaves; None if unknown."""
        endpoint, source = way
        our_beam = packet[_SOURCE] == self._addresses[4:]
        if source is None:
            return (endpoint, None if self.in_memory else endpoint) if our_beam and endpoint is not None else None
        if self._transit is None or our_beam or packet[_SOURCE.start] != GROUND_SHELL:
            return None
        link, to = next_hop(self._transit, int.from_bytes(packet[_SOURCE], "big"))
        return None if link is None else (link, to)


def _answer(
    packet: memoryview, shares: Mapping[bytes, dict[int, tuple[bytes, bytes]]], terms: AnswerTerms, guard: Guard | None
) -> tuple[bytes, bytearray, list[bytes]] | None:
    """Answer a GET that the guard, if any, admits."""
    if guard is None:
        return answer_get(packet, shares, terms)
    keys, now_us, skew_us, is_first, _ = guard
    (sent_us,) = check_macs(packet, len(packet), COMMAND_BYTES, keys, now_us, skew_us)
    if sent_us is None:
        return None
    answer = answer_get(strip_macs(packet, len(packet), COMMAND_BYTES, b"\1"), shares, terms)
    if answer is None:
        return None
    # Only now: a packet that is not answered here is processed again, and must be new then.
    sequence = int.from_bytes(packet[2:4], "big") & 0x3FFF
    return answer if is_first(bytes(packet[: COMMAND_BYTES + SKY_BYTES]), sent_us, [sequence]) else None


def _send(fd: int, host: str, port: int, headers: bytearray, payloads: list[bytes] | None) -> tuple[Rest | None, bool]:
    """Send a batch. Return what the kernel did not take, and True if the network refused."""
    count = 1 if payloads is None else len(payloads)
    width = len(headers) // count
    try:
        sent = send_batch(fd, host, port, headers, width, payloads)
    except OSError:
        return None, True
    if sent == count:
        return None, False
    return (headers[sent * width :], payloads[sent:] if payloads is not None else None), False


ACK = 0x41
_SET_KEY_BYTES, _TAG = 32, slice(56, 72)
_STEPS = struct.Struct(">III")

_FLAGS, _KEY_ID = COMMAND_BYTES + FLAGS_AT, slice(COMMAND_BYTES + KEY_ID_AT, COMMAND_BYTES + KEY_ID_AT + 2)

Taken = tuple[int, int, int, int, int, bytearray]
"""Runs and chunks taken; of these, chunks replaced; bytes replaced, further bytes added; the acknowledgement."""
Guard = tuple[dict[int, bytes], int, int, Callable[[bytes, int, list[int]], bool], int]
"""Guard of a satellite that requires MACs: keys by id, time in microseconds and tolerance of ``check_macs``; a replay
check, which gets the first packet's headers, the time of sending and the sequence counts, and records them if new; key
id that signs ACKs (0: no MACs).
"""
PlainRequests = tuple[
    bytes, MutableMapping[bytes, dict[int, tuple[bytes, bytes]]], Set[bytes], int, AnswerTerms, Guard | None
]
"""Requests to serve: both addresses (packed), chunks, placement tags whose chunks may be stored, bytes of free memory,
terms of answers, MAC guard.
"""


def take_sets(
    runs: list[Run],
    shares: MutableMapping[bytes, dict[int, tuple[bytes, bytes]]],
    settled: Set[bytes],
    room_bytes: int,
    terms: AnswerTerms,
    guard: Guard | None = None,
) -> Taken | None:
    """Store the chunks of one request's first runs. None, without effect, unless valid SETs with numbers in equal
    steps, a tag in ``settled``, within ``room_bytes``, admitted by the ``guard``.
    """
    view, signed = memoryview(runs[0][0]).cast("B"), runs
    ref_at = COMMAND_BYTES + SKY_BYTES
    if len(view) < ref_at + REF_BYTES or view[COMMAND_BYTES + 1] != SET or bytes(view[ref_at:][_TAG]) not in settled:
        return None
    if guard is not None:
        runs = _strip_run_macs(runs)
    opened = open_runs(runs, 0)
    if opened is not None and not _steps(opened[0]):  # only as far as the numbers have equal steps
        shorter_runs = (open_runs(runs[:count], 0) for count in range(opened[3] - 1, 0, -1))
        opened = next((shorter for shorter in shorter_runs if shorter is not None and _steps(shorter[0])), None)
    if opened is None or opened[2] > room_bytes:
        return None
    indices, chunks, size_bytes, run_count = opened
    if guard is not None and not _admitted(signed[:run_count], guard):
        return None
    key = bytes(view[ref_at : ref_at + _SET_KEY_BYTES])
    share = shares.setdefault(key, {})
    old = [share[index] for index in indices if index in share]
    share.update(zip(indices, chunks, strict=True))
    replaced_bytes = sum(len(payload) + REF_BYTES for _, payload in old)
    added_bytes = size_bytes - replaced_bytes
    ack = _acknowledgement(view, key, indices, terms)
    if guard is not None and guard[4]:
        ack = sign_packets(ack, len(ack), TELEMETRY_BYTES, guard[0][guard[4]], guard[4], 0)
    return run_count, len(indices), len(old), replaced_bytes, added_bytes, ack


def _strip_run_macs(runs: list[Run]) -> list[Run]:
    """Return the leading intact runs of signed commands, without MACs, which are not checked."""
    bare_runs: list[Run] = []
    for data, segment_bytes in runs:
        packets = segments(data, segment_bytes) if segment_bytes > 0 else []
        is_valid = bool(packets) and not any(verify_segments(data, segment_bytes))
        if not is_valid or not all(packet[0] & 0x10 and packet[_FLAGS] & AUTHENTICATED for packet in packets):
            break
        try:
            stripped = strip_macs(data, segment_bytes, COMMAND_BYTES, b"\1" * len(packets))
        except ValueError:
            break
        bare_runs.append((memoryview(stripped), segment_bytes - MAC_BYTES))
    return bare_runs


def _admitted(runs: list[Run], guard: Guard) -> bool:
    """Return True if all packets are authentic, of a single time and key, and new."""
    keys, now_us, skew_us, is_first, _ = guard
    packets = [packet for data, segment_bytes in runs for packet in segments(data, segment_bytes)]
    sent_us = {
        when
        for data, segment_bytes in runs
        for when in check_macs(data, segment_bytes, COMMAND_BYTES, keys, now_us, skew_us)
    }
    when = sent_us.pop() if len(sent_us) == 1 else None
    if when is None or len({bytes(packet[_KEY_ID]) for packet in packets}) > 1:
        return False
    sequences = [int.from_bytes(packet[2:4], "big") & 0x3FFF for packet in packets]
    return is_first(bytes(packets[0][: COMMAND_BYTES + SKY_BYTES]), when, sequences)


def _steps(indices: list[int]) -> int:
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    regular = indices == list(range(indices[0], indices[0] + step * len(indices), step))
    return step if regular and len(indices) <= _MOST_BITS else 0


def _acknowledgement(request: memoryview, key: bytes, indices: list[int], terms: AnswerTerms) -> bytearray:
    count = len(indices)
    selection = _STEPS.pack(indices[0] + 1, _steps(indices), count)
    bitmap = ((1 << count) - 1).to_bytes((count + 7) // 8, "little")
    packet = bytearray(answer_prefix(ACK, request, terms) + key + selection + bitmap)
    _COUNT_AND_LENGTH.pack_into(packet, 2, UNSEGMENTED << 14 | (terms[5] & 0x3FFF), len(packet) - 7)
    crc = header_crc(memoryview(packet), TELEMETRY_BYTES, len(packet))
    _WORD.pack_into(packet, TELEMETRY_BYTES + CRC_AT, crc)
    return packet
