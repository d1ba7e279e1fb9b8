"""Our Space Packet headers against the spacepackets library, in both directions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.errors import MalformedPacket
from skymemory.protocol.wire import (
    MAX_APID,
    MAX_PACKET_BYTES,
    PRIMARY_BYTES,
    Address,
    Op,
    SkyHeader,
    build_packet,
    pack_command,
    pack_telemetry,
    parse_header,
)

ccsds = pytest.importorskip("spacepackets.ccsds.spacepacket")
from spacepackets.ccsds.spacepacket import PacketType, SequenceFlags, SpacePacketHeader  # noqa: E402

apids = st.integers(0, MAX_APID)
counts = st.integers(0, 1 << 20)
sizes = st.integers(17, MAX_PACKET_BYTES)


@given(apid=apids, count=counts, size=sizes, code=st.integers(0, 255))
def test_the_library_reads_our_commands(apid, count, size, code):
    packet = pack_command(code, count, size, apid)
    theirs = SpacePacketHeader.unpack(packet)
    assert (theirs.ccsds_version, theirs.packet_type, theirs.sec_header_flag) == (0, PacketType.TC, True)
    assert (theirs.apid, theirs.seq_flags, theirs.seq_count) == (apid, SequenceFlags.UNSEGMENTED, count % (1 << 14))
    assert theirs.packet_len == size and theirs.data_len == size - PRIMARY_BYTES - 1
    assert packet[6:] == bytes([code, 0])


@given(apid=apids, count=counts, size=sizes, time_s=st.floats(0, 2**32 - 1))
def test_the_library_reads_our_telemetry(apid, count, size, time_s):
    packet = pack_telemetry(time_s, count, size, apid)
    theirs = SpacePacketHeader.unpack(packet)
    assert (theirs.packet_type, theirs.sec_header_flag, theirs.apid) == (PacketType.TM, True, apid)
    assert (theirs.seq_count, theirs.packet_len) == (count % (1 << 14), size)
    assert int.from_bytes(packet[6:12], "big") == round(time_s * 1e6) * 65536 // 1_000_000, "whole microseconds"
    assert packet[12:] == bytes(4)


@given(
    kind=st.sampled_from(PacketType),
    apid=st.integers(0, 0x7FF),
    count=st.integers(0, 0x3FFF),
    flags=st.sampled_from(SequenceFlags),
    secondary=st.booleans(),
    data=st.binary(min_size=1, max_size=40),
)
def test_we_read_the_librarys_headers(kind, apid, count, flags, secondary, data):
    header = SpacePacketHeader(kind, apid, count, len(data) - 1, secondary, flags)
    packet = bytes(header.pack()) + data
    telemetry = kind is PacketType.TM
    ours = secondary and flags is SequenceFlags.UNSEGMENTED and apid <= MAX_APID
    if not ours or len(packet) < (16 if telemetry else 8):
        with pytest.raises(MalformedPacket):
            parse_header(packet)
        return
    parsed = parse_header(packet)
    assert (parsed.telemetry, parsed.apid, parsed.sequence_count) == (telemetry, apid, count)
    assert parsed.total_bytes == len(packet) == header.packet_len
    for wrong in (packet[:-1], packet + b"\0"):
        with pytest.raises(MalformedPacket):
            parse_header(wrong)


@pytest.mark.parametrize("op", Op)
def test_whole_packets_are_space_packets(op):
    header = SkyHeader(op, Address(1, 2), Address(3, 4, 0xFF), 5, 6)
    packet = build_packet(header, b"body", 16383, 0.0)
    theirs = SpacePacketHeader.unpack(packet)
    assert theirs.packet_len == len(packet)
    assert theirs.apid == 0x0C0
    assert theirs.packet_type is (PacketType.TC if op.is_command else PacketType.TM)
    # cFS takes 0x18xx and 0x08xx + APID as message ids; ours must not be one of its own (0x00-0x20, 0x80-0x85).
    assert int.from_bytes(packet[:2], "big") in (0x18C0, 0x08C0)
