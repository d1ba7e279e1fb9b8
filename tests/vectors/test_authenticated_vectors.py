"""Golden bytes of authenticated packets (``authenticated.json``): frozen with the wire format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.protocol.refs import pack_refs
from tests.vectors.test_wire_vectors import KEY, NOW_S, SEQUENCE, VALUE, header

from skymemory import native
from skymemory.keys import KeyRing, SecretKey
from skymemory.native.twin import backend
from skymemory.protocol import messages
from skymemory.protocol.auth import Authority
from skymemory.protocol.messages import Selection
from skymemory.protocol.wire import Op, Status, build_packet, bulk_batch, single

VECTORS = {
    entry["name"]: bytes.fromhex(entry["hex"].replace(" ", ""))
    for entry in json.loads((Path(__file__).parent / "authenticated.json").read_text("utf-8"))
}
SIGNER = Authority(KeyRing((SecretKey(0x0102, bytes(range(64, 96))),)), every_packet=True)
COVERING = Authority(SIGNER.ring, signed_answers=True)
"""Its MACs cover payloads."""
LONG = bytes(7 * number & 0xFF for number in range(1100))
"""A whole block and a part, which ends within a group."""


def chunk(op: Op, by: Authority = SIGNER, value: bytes = VALUE, index: int = 1, size: int = 16) -> bytes:
    crcs = native.crc32_chunks(value, size)
    refs = pack_refs(KEY, [index], crcs, size, len(value), native.crc32(value), 10, 3, (-2, 1))
    payload = value[index * size :][:size]
    return by.sign(bulk_batch(header(op), refs, [payload], SEQUENCE, NOW_S), NOW_S).datagrams()[0]


def control(op: Op, body: bytes, status: Status = Status.OK) -> bytes:
    plain = single(build_packet(header(op, status), body, SEQUENCE, NOW_S))
    return bytes(SIGNER.sign(plain, NOW_S).headers)


BUILT = {
    "set": chunk(Op.SET),
    "data": chunk(Op.DATA),
    "evict": control(Op.EVICT, messages.pack_keys([KEY])),
    "ack": control(Op.ACK, Selection.of(KEY, [0, 1, 2]).pack()),
    "unreachable-refused": control(Op.UNREACHABLE, b"", Status.REFUSED),
    "set-payload-covered": chunk(Op.SET, COVERING),
    "migrate-payload-covered": chunk(Op.MIGRATE, COVERING, LONG, 0, len(LONG)),
}


def test_there_is_a_vector_of_each() -> None:
    assert set(VECTORS) == set(BUILT)


def test_where_answers_are_signed_all_without_payload_are_the_same() -> None:
    signer = COVERING
    evict = single(build_packet(header(Op.EVICT), messages.pack_keys([KEY]), SEQUENCE, NOW_S))
    assert bytes(signer.sign(evict, NOW_S).headers) == VECTORS["evict"]
    ack = build_packet(header(Op.ACK), Selection.of(KEY, [0, 1, 2]).pack(), SEQUENCE, NOW_S)
    assert bytes(signer.sign(single(ack), NOW_S).headers) == VECTORS["ack"]
    between = build_packet(header(Op.ACK)._replace(destination=header(Op.ACK).source, ground=0), b"", SEQUENCE, NOW_S)
    data = build_packet(header(Op.DATA), bytes(72), SEQUENCE, NOW_S)
    for plain in (single(between), single(data)):
        assert signer.sign(plain, NOW_S) is plain


@pytest.mark.parametrize("name", BUILT)
def test_packets_are_built_byte_for_byte_and_accepted(name: str) -> None:
    packet = VECTORS[name]
    assert BUILT[name].hex() == packet.hex()
    for implementation in (native, backend):
        assert implementation.verify_segments(packet, len(packet)) == b"\0"
    sky = 8 if packet[0] & 0x10 else 16
    now_us = int(NOW_S * 1e6)
    sent_us = now_us if sky == 8 else 0
    keys, others = (by.mac_keys for by in ((COVERING, SIGNER) if name.endswith("covered") else (SIGNER, COVERING)))
    for implementation in (native, backend):
        check = implementation.check_macs
        assert check(packet, len(packet), sky, keys, now_us, 10) == [sent_us]
        assert (check(packet, len(packet), sky, others, now_us, 10) == [None]) == name.startswith(("set", "migrate"))
        late = check(packet, len(packet), sky, keys, now_us + (1 << 32), 10)
        assert late == ([None] if sky == 8 else [0]), "the high half of a command's time counts, though it is not sent"
