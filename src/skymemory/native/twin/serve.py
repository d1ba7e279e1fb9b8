"""Python twin of a satellite's shortest way: plain requests received, answered and sent in one call."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Set
from itertools import takewhile
from typing import TYPE_CHECKING

from skymemory.native.twin_macs import check_macs, strip_macs
from skymemory.native.twin_runs import GET, AnswerTerms, Run, answer_get
from skymemory.native.twin_segments import COMMAND_BYTES, SET, SKY_BYTES
from skymemory.native.twin_take import Guard, take_sets
from skymemory.native.twin_udp import Arrival, recv_batch, send_batch

if TYPE_CHECKING:
    from typing_extensions import Buffer

Rest = tuple[bytearray, list[bytes] | None]
"""Headers (or a whole packet) and payloads that the kernel did not take."""
Served = tuple[int, bytes, int, tuple[str, int], int, int, int, int, Rest | None]
"""Operation, key, ground host, the endpoint it came from, chunks; of a SET also chunks and bytes replaced, and
bytes added beyond these; what is yet to be sent.
"""

_ADDRESSES = slice(COMMAND_BYTES + 4, COMMAND_BYTES + 12)
_GROUND = slice(COMMAND_BYTES + 12, COMMAND_BYTES + 16)
_OP_AT, _KEY_AT, _KEY_BYTES = COMMAND_BYTES + 1, COMMAND_BYTES + SKY_BYTES, 32


def serve(
    fd: int, scratch: Buffer, slots: int, addresses: Buffer, neighbours: Mapping[tuple[str, int], object],
    shares: MutableMapping[bytes, dict[int, tuple[bytes, bytes]]], settled: Set[bytes], room_bytes: int,
    terms: AnswerTerms, guard: Guard | None = None,
) -> tuple[list[Arrival], list[Served], int]:  # fmt: skip
    """``recv_batch``, but plain requests that come first are served at once.

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
    """As ``answer_get``; of a GET with a MAC, if it is authentic and new."""
    if guard is None:
        return answer_get(packet, shares, terms)
    keys, now_us, skew_us, is_first = guard
    (sent_us,) = check_macs(packet, len(packet), COMMAND_BYTES, keys, now_us, skew_us)
    if sent_us is None:
        return None
    answer = answer_get(strip_macs(packet, len(packet), COMMAND_BYTES, b"\1"), shares, terms)
    if answer is None:
        return None
    # Only now: what is not answered here is looked at once more, and must then be new.
    sequence = int.from_bytes(packet[2:4], "big") & 0x3FFF
    return answer if is_first(bytes(packet[: COMMAND_BYTES + SKY_BYTES]), sent_us, [sequence]) else None


def _runs_of_one_sender(view: memoryview, arrivals: list[Arrival]) -> list[Run]:
    """Those that the first's sender sent, up to the first of another."""
    sender = arrivals[0][3:]
    same = takewhile(lambda arrival: arrival[3:] == sender, arrivals)
    return [(view[at : at + size], segment_bytes) for at, size, segment_bytes, *_ in same]


def _send(fd: int, host: str, port: int, headers: bytearray, payloads: list[bytes] | None) -> tuple[Rest | None, bool]:
    """What was not sent, and whether the network refused it."""
    count = 1 if payloads is None else len(payloads)
    width = len(headers) // count
    try:
        sent = send_batch(fd, host, port, headers, width, payloads)
    except OSError:
        return None, True
    if sent == count:
        return None, False
    return (headers[sent * width :], payloads[sent:] if payloads is not None else None), False
