"""What is packed is unpacked the same; bodies of garbage are malformed or sound."""

from __future__ import annotations

import struct

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties.wire_traffic import (
    KEY,
    i32,
    u8,
    u16,
    u32,
)

from skymemory import native
from skymemory.errors import MalformedPacket
from skymemory.protocol import messages
from skymemory.protocol.messages import HOUSEKEEPING_FIELDS, MAX_SELECTION_BITS, ChunkPresence, Selection
from skymemory.protocol.wire import (
    MAX_CHUNK_BYTES,
    MAX_MOVES,
    Address,
    ChunkRef,
    Op,
    PlacementTag,
    SkyHeader,
    Status,
    build_packet,
    parse_header,
    parse_packet,
)

keys = st.binary(min_size=32, max_size=32)
tags = st.integers(1, 0xFFFF).flatmap(
    lambda servers: st.builds(
        PlacementTag, st.integers(0, 255), st.just(servers), st.integers(0, servers - 1), i32, i32
    )
)


@given(
    op=st.sampled_from(Op),
    status=st.sampled_from(Status),
    ground=u32,
    request_id=u32,
    body=st.binary(max_size=50),
    numbers=st.tuples(u8, u8, u16, u32, u16, u16, u8),
    moves=st.tuples(*[st.integers(-MAX_MOVES, MAX_MOVES)] * 2),
    places=st.lists(st.builds(Address, *[st.integers(0, 4095)] * 2, u8), min_size=2, max_size=2),
    count=u16,
    time_s=st.floats(0, 2**32 - 1),
)
def test_every_header_round_trips(op, status, ground, request_id, body, numbers, moves, places, count, time_s):
    hop_limit, hop_count, congestion, timestamp_us, credit, key_id, flags = numbers
    said = SkyHeader(
        op,
        *places,
        ground,
        request_id,
        status,
        hop_limit,
        hop_count,
        congestion,
        timestamp_us,
        *moves,
        credit,
        key_id,
        flags & 0xFE,  # what is authenticated is not built here
    )
    packet = build_packet(said, body, count, time_s)
    if op not in (Op.SET, Op.MIGRATE, Op.DATA):
        assert native.verify_segments(packet, len(packet)) == b"\0"
    read = parse_packet(packet)
    assert read.header == said and bytes(read.body) == body
    outer = parse_header(packet)
    assert outer.sequence_count == count % 16384 and outer.total_bytes == len(packet)


@given(key=keys, tag=tags, data=st.data(), value_crc=u32, crc=u32)
def test_chunk_references_round_trip(key, tag, data, value_crc, crc):
    value_bytes = data.draw(st.integers(0, 2**32 - 1))
    chunks = data.draw(st.integers(1, max(1, value_bytes)))
    index = data.draw(st.integers(0, chunks - 1))
    length = data.draw(st.integers(0, min(value_bytes, MAX_CHUNK_BYTES)))
    tag = PlacementTag(tag.strategy, tag.servers, index % tag.servers, tag.slot_moves, tag.plane_moves)
    ref = ChunkRef(key, index, chunks, length, crc, value_bytes, value_crc, tag)
    assert ChunkRef.unpack(ref.pack()) == ref


@given(key=keys, indices=st.sets(st.integers(0, 2**32 - 2), min_size=1, max_size=40), data=st.data())
def test_selections_cover_exactly(key, indices, data):
    selections = Selection.cover(key, indices)
    assert sorted(index for selection in selections for index in selection.indices()) == sorted(indices)
    for selection in selections:
        assert selection.count <= MAX_SELECTION_BITS
        assert Selection.unpack(selection.pack()) == selection
    body = bytearray(selections[0].pack())
    body[data.draw(st.integers(32, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        read = Selection.unpack(body)
    except MalformedPacket:
        return
    assert min(read.indices()) >= 0 and max(read.indices()) < 2**32 - 1


@given(first=st.integers(0, 1000), stride=st.integers(1, 5000), steps=st.sets(st.integers(0, 300), min_size=1))
def test_a_grid_is_one_selection(first, stride, steps):
    indices = sorted(first + stride * step for step in steps)
    assert Selection.of(KEY, indices, stride).indices() == indices
    (selection,) = Selection.cover(KEY, reversed(indices))
    assert selection.indices() == indices


@given(
    entries=st.lists(
        st.tuples(keys, st.builds(ChunkPresence, st.integers(0, 99), st.just(100), u32, u32, u32, u16, tags)),
        max_size=5,
    ),
    values=st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * len(HOUSEKEEPING_FIELDS)),
    moves=st.tuples(*[st.integers(-MAX_MOVES, MAX_MOVES)] * 2),
    limit=st.integers(0, 90),
)
def test_bodies_round_trip(entries, values, moves, limit):
    presences = [presence for _, presence in entries] + [None]
    assert messages.unpack_presences(messages.pack_presences(presences)) == presences
    assert messages.unpack_listed(messages.pack_listed(entries)) == entries
    named = dict(zip(HOUSEKEEPING_FIELDS, values, strict=True))
    assert messages.unpack_housekeeping(messages.pack_housekeeping(named)) == named
    assert messages.unpack_moves(messages.pack_moves(*moves)) == moves
    assert messages.unpack_list(messages.pack_list(KEY, limit)) == (KEY, limit)
    if entries:
        body = [key for key, _ in entries]
        assert messages.unpack_keys(messages.pack_keys(body)) == body


@settings(max_examples=300)
@given(body=st.binary(max_size=200), count=st.integers(0, 200))
def test_bodies_of_garbage_are_malformed_or_sound(body, count):
    for garbage in (body, struct.pack(">HH", count, 0) + body):
        for unpack in (
            messages.unpack_keys,
            messages.unpack_presences,
            messages.unpack_listed,
            messages.unpack_list,
            messages.unpack_moves,
            messages.unpack_count,
            messages.unpack_housekeeping,
            Selection.unpack,
            ChunkRef.unpack,
            SkyHeader.unpack,
            parse_packet,
        ):
            try:
                unpack(garbage)
            except MalformedPacket:
                continue
