"""A satellite's fast path: plain GETs and SETs are received, executed and answered in one call."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, MutableMapping, Set
from itertools import takewhile
from typing import TYPE_CHECKING

from skymemory.native.twin.runs import GET, AnswerTerms, Run, answer_get, answer_prefix, open_runs
from skymemory.native.twin.segments import (
    AUTHENTICATED,
    COMMAND_BYTES,
    CRC_AT,
    FLAGS_AT,
    KEY_ID_AT,
    MAC_BYTES,
    REF_BYTES,
    SET,
    SKY_BYTES,
    TELEMETRY_BYTES,
    UNSEGMENTED,
    check_macs,
    header_crc,
    segments,
    strip_macs,
    verify_segments,
)
from skymemory.native.twin.udp import Arrival, recv_batch, send_batch

if TYPE_CHECKING:
    from typing_extensions import Buffer


Rest = tuple[bytearray, list[bytes] | None]
"""Headers (or a whole packet) and payloads that the kernel did not take."""
Served = tuple[int, bytes, int, tuple[str, int], int, int, int, int, Rest | None]
"""Operation, key, ground host, the sender's endpoint, chunks; of a SET also chunks and bytes replaced, and bytes added
beyond these; what is still to be sent.
"""

_ADDRESSES = slice(COMMAND_BYTES + 4, COMMAND_BYTES + 12)
_GROUND = slice(COMMAND_BYTES + 12, COMMAND_BYTES + 16)
_OP_AT, _KEY_AT, _KEY_BYTES = COMMAND_BYTES + 1, COMMAND_BYTES + SKY_BYTES, 32


def serve(
    fd: int,
    scratch: Buffer,
    slots: int,
    addresses: Buffer,
    neighbours: Mapping[tuple[str, int], object],
    shares: MutableMapping[bytes, dict[int, tuple[bytes, bytes]]],
    settled: Set[bytes],
    room_bytes: int,
    terms: AnswerTerms,
    guard: Guard | None = None,
) -> tuple[list[Arrival], list[Served], int]:
    """``recv_batch``, but plain requests that come first are answered at once.

    Plain is what bears ``addresses`` (destination and source, packed), comes from an endpoint that is none of the
    ``neighbours``, and is a lone GET of chunks that all are in ``shares`` (answered as by ``answer_get``), or a run of
    SETs that ``take_sets`` takes. Returns what else arrived, what was served, and how often the network refused to
    send (that answer is lost). With a ``guard`` only what has a MAC that it accepts is plain.

    Raises:
        OSError: the socket's pending error; the next call reads on.
    """
    view = memoryview(scratch).cast("B")
    if len(bytes(addresses)) != _ADDRESSES.stop - _ADDRESSES.start:
        raise ValueError(f"addresses of {len(bytes(addresses))} bytes: expected {_ADDRESSES.stop - _ADDRESSES.start}")
    arrivals = recv_batch(fd, scratch, slots)
    served: list[Served] = []
    at, send_errors, sequence = 0, 0, terms[5]
    while at < len(arrivals):
        begin, size, segment_bytes, host, port = arrivals[at]
        packet = view[begin : begin + size]
        if size < _GROUND.stop or packet[_ADDRESSES] != addresses or (host, port) in neighbours:
            break
        now = (*terms[:5], sequence)
        headers, payloads, messages, chunks = bytearray(), None, 0, 0
        replaced, replaced_bytes, added_bytes = 0, 0, 0
        if packet[_OP_AT] == GET and segment_bytes >= size:
            answer = _answer(packet, shares, now, guard)
            if answer is not None:
                _, headers, payloads = answer
                messages, chunks = 1, len(payloads)
        elif packet[_OP_AT] == SET:
            runs = _runs_of_one_sender(view, arrivals[at:])
            taken = take_sets(runs, shares, settled, room_bytes, now, guard)
            if taken is not None:
                messages, chunks, replaced, replaced_bytes, added_bytes, headers = taken
        if not messages:
            break
        rest, refused = _send(fd, host, port, headers, payloads)
        key, ground = bytes(packet[_KEY_AT : _KEY_AT + _KEY_BYTES]), int.from_bytes(packet[_GROUND], "big")
        figures = chunks, replaced, replaced_bytes, added_bytes
        served.append((packet[_OP_AT], key, ground, (host, port), *figures, rest))
        send_errors += refused
        sequence += 1 if payloads is None else chunks
        room_bytes -= added_bytes
        at += messages
    return arrivals[at:], served, send_errors


def _answer(
    packet: memoryview, shares: Mapping[bytes, dict[int, tuple[bytes, bytes]]], terms: AnswerTerms, guard: Guard | None
) -> tuple[bytes, bytearray, list[bytes]] | None:
    """``answer_get``, for a GET with a MAC, too, if it is authentic and new."""
    if guard is None:
        return answer_get(packet, shares, terms)
    keys, now_us, skew_us, is_first = guard
    (sent_us,) = check_macs(packet, len(packet), COMMAND_BYTES, keys, now_us, skew_us)
    if sent_us is None:
        return None
    answer = answer_get(strip_macs(packet, len(packet), COMMAND_BYTES, b"\1"), shares, terms)
    if answer is None:
        return None
    # Only now: a packet that is not answered here is processed again, and must then be new.
    sequence = int.from_bytes(packet[2:4], "big") & 0x3FFF
    return answer if is_first(bytes(packet[: COMMAND_BYTES + SKY_BYTES]), sent_us, [sequence]) else None


def _runs_of_one_sender(view: memoryview, arrivals: list[Arrival]) -> list[Run]:
    """The first runs that have one sender."""
    sender = arrivals[0][3:]
    same = takewhile(lambda arrival: arrival[3:] == sender, arrivals)
    return [(view[at : at + size], segment_bytes) for at, size, segment_bytes, *_ in same]


def _send(fd: int, host: str, port: int, headers: bytearray, payloads: list[bytes] | None) -> tuple[Rest | None, bool]:
    """Returns what was not sent, and whether the network refused it."""
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
_MOST_BITS = 1 << 16
_COUNT_AND_LENGTH, _WORD, _STEPS = struct.Struct(">HH"), struct.Struct(">I"), struct.Struct(">III")

_FLAGS, _KEY_ID = COMMAND_BYTES + FLAGS_AT, slice(COMMAND_BYTES + KEY_ID_AT, COMMAND_BYTES + KEY_ID_AT + 2)

Taken = tuple[int, int, int, int, int, bytearray]
"""Runs and chunks taken, of these replaced, bytes replaced and (without these) added; the acknowledging packet."""
Guard = tuple[dict[int, bytes], int, int, Callable[[bytes, int, list[int]], bool]]
"""For satellites that require MACs: arguments of ``check_macs`` (keys by id, microseconds of now, tolerance), and a
replay check. That is called with the headers of the first packet up to the end of the SKY header, the time of sending,
and the sequence counts; it returns whether all are new, and then records them.
"""


def take_sets(
    runs: list[Run],
    shares: MutableMapping[bytes, dict[int, tuple[bytes, bytes]]],
    settled: Set[bytes],
    room_bytes: int,
    terms: AnswerTerms,
    guard: Guard | None = None,
) -> Taken | None:
    """Store the chunks of the first runs that are one request. None, without effect, unless they are plain: sound SETs,
    with numbers in equal steps, a tag that is ``settled``, all within ``room_bytes``. With a ``guard`` all must have
    right MACs, of one key and one moment, and be new.
    """
    view, signed = memoryview(runs[0][0]).cast("B"), runs
    ref_at = COMMAND_BYTES + SKY_BYTES
    if len(view) < ref_at + REF_BYTES or view[COMMAND_BYTES + 1] != SET or bytes(view[ref_at:][_TAG]) not in settled:
        return None
    if guard is not None:
        runs = _plain(runs)
    opened = open_runs(runs, 0)
    if opened is not None and not _steps(opened[0]):  # only as far as the numbers have equal steps
        whole = (open_runs(runs[:count], 0) for count in range(opened[3] - 1, 0, -1))
        opened = next((shorter for shorter in whole if shorter is not None and _steps(shorter[0])), None)
    if opened is None or opened[2] > room_bytes:
        return None
    indices, chunks, size_bytes, taken = opened
    if guard is not None and not _admitted(signed[:taken], guard):
        return None
    key = bytes(view[ref_at : ref_at + _SET_KEY_BYTES])
    share = shares.setdefault(key, {})
    old = [share[index] for index in indices if index in share]
    share.update(zip(indices, chunks, strict=True))
    replaced_bytes = sum(len(payload) + REF_BYTES for _, payload in old)
    added_bytes = size_bytes - replaced_bytes
    return taken, len(indices), len(old), replaced_bytes, added_bytes, _acknowledgement(view, key, indices, terms)


def _plain(runs: list[Run]) -> list[Run]:
    """The first of these runs without their MACs, as far as each packet is sound and has one."""
    plain: list[Run] = []
    for data, segment_bytes in runs:
        packets = segments(data, segment_bytes) if segment_bytes > 0 else []
        sound = bool(packets) and not any(verify_segments(data, segment_bytes))
        if not sound or not all(packet[0] & 0x10 and packet[_FLAGS] & AUTHENTICATED for packet in packets):
            break
        try:
            stripped = strip_macs(data, segment_bytes, COMMAND_BYTES, b"\1" * len(packets))
        except ValueError:
            break
        plain.append((memoryview(stripped), segment_bytes - MAC_BYTES))
    return plain


def _admitted(runs: list[Run], guard: Guard) -> bool:
    keys, now_us, skew_us, is_first = guard
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
    """The step between these; 0 if it is not constant, or they are too many for one selection."""
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
