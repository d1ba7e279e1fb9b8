"""What operators' tools read of our packets: XTCE by a parser of another project, primary headers by spacepackets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.messages import HOUSEKEEPING_FIELDS, pack_keys, unpack_housekeeping
from skymemory.protocol.satellite.machine import SatelliteConfig, SatelliteMachine
from skymemory.protocol.wire import TELEMETRY_PREFIX_BYTES, Address, Op, SkyHeader, build_packet, parse_packet
from tools import operator_definitions

spp = pytest.importorskip("space_packet_parser")
spacepackets = pytest.importorskip("spacepackets.ccsds.spacepacket")
HERE = SatelliteId(2, 9)


def answers(op: Op, body: bytes) -> list[bytes]:
    """What a satellite answers to a ground host's command."""
    torus = Torus(5, 19)
    machine = SatelliteMachine(
        SatelliteConfig(HERE, 1 << 20), SkyMap(torus, HERE), MoveClock(pushed=(3, -1)), 1_800_000_000.5
    )
    header = SkyHeader(op, Address(*HERE), Address(*HERE, 0xFF), 7, 0x01020304)
    machine.receive_batch(build_packet(header, body, 5, 0.0), 10_000, ("127.0.0.1", 5000), 1_800_000_000.5)
    sent = [bytes(data) for batch, _ in machine.datagrams_to_send(1_800_000_000.5) for data in batch.datagrams()]
    return [data for data in sent if not data[0] & 0x10]


def pong() -> bytes:
    (packet,) = answers(Op.PING, b"")
    return packet


def test_the_files_are_up_to_date():
    for name, text in operator_definitions.files().items():
        where = operator_definitions.FOLDER / name
        assert where.read_text("utf-8") == text, f"run python -m tools.operator_definitions: {name} is old"


def test_an_xtce_parser_reads_the_housekeeping_that_we_read():
    packet = pong()
    definition = spp.load_xtce(operator_definitions.FOLDER / operator_definitions.XTCE_NAME)
    theirs = definition.parse_bytes(packet, root_container_name="CCSDSPacket")
    ours, header = unpack_housekeeping(packet[TELEMETRY_PREFIX_BYTES:]), parse_packet(packet).header
    assert {name: int(theirs[name]) for name in HOUSEKEEPING_FIELDS} == ours
    assert ours["packets_received"] == 1 and ours["pushed_plane_moves"] == -1
    assert int(theirs["field_count"]) == len(HOUSEKEEPING_FIELDS)
    assert int(theirs["request_id"]) == header.request_id == 0x01020304
    assert (int(theirs["slot_moves"]), int(theirs["plane_moves"])) == (header.slot_moves, header.plane_moves) == (3, -1)
    assert int(theirs["seconds"]) + int(theirs["fraction"]) / 65_536 == 1_800_000_000.5


def test_spacepackets_reads_its_primary_header():
    packet = pong()
    theirs = spacepackets.SpacePacketHeader.unpack(packet)
    assert (theirs.packet_type, theirs.apid) == (spacepackets.PacketType.TM, 0x0C0)
    assert theirs.sec_header_flag and theirs.packet_len == len(packet)


def _command(name: str) -> dict[str, tuple[int, str]]:
    """The parameters of a command of the COSMOS definition: bits and value."""
    text = operator_definitions.cosmos()
    part = re.search(rf"^COMMAND SKYMEMORY {name} .*?(?=^COMMAND|\Z)", text, re.M | re.S)
    assert part is not None
    found = re.findall(r"^  APPEND_(?:ID_)?PARAMETER (\w+) (\d+) (?:U?INT \S+ \S+|BLOCK) (\S+)", part[0], re.M)
    return {name: (int(bits), value) for name, bits, value in found}


def _given(ours):
    """What an operator fills in, so that a command is our packet ``ours``."""
    return {
        "DESTINATION": Address(*HERE).pack(),
        "SOURCE": Address(*HERE, 0xFF).pack(),
        "GROUND": 7,
        "REQUEST_ID": 9,
        "CRC": int.from_bytes(ours[48:52], "big"),
    }


@pytest.mark.parametrize(("op", "body"), [(Op.PING, b""), (Op.EVICT, pack_keys([bytes(range(32))]))])
def test_a_command_of_the_cosmos_definition_is_ours(op, body):
    """Filled in as an operator's tool does, its bits are those of our own packet, but for the CRC, which is ours."""
    header = SkyHeader(
        op, Address(*HERE), Address(*HERE, 0xFF), 7, 9, hop_limit=operator_definitions.HOP_LIMIT, credit=256
    )
    ours = build_packet(header, body, 0, 0.0)
    given = _given(ours) | {"KEY": int.from_bytes(bytes(range(32)), "big")}
    bits = "".join(
        f"{given[name] if name in given else int(value):0{size}b}" for name, (size, value) in _command(op.name).items()
    )
    assert int(bits, 2).to_bytes(len(bits) // 8, "big") == ours
    assert len(answers(op, body)) == 1


def test_the_xtce_file_has_the_same_commands():
    text = (Path(operator_definitions.FOLDER) / operator_definitions.XTCE_NAME).read_text("utf-8")
    assert re.findall(r'<MetaCommand name="(\w+)"', text) == [one.name for one in operator_definitions.COMMANDS]


def test_the_app_of_cfs_has_housekeeping_and_commands_of_its_own():
    """As flight/cfs/fsw/src/skymemory_msg.h has them, for the software bus."""
    text = (operator_definitions.FOLDER.parent.parent / "flight/cfs/fsw/src/skymemory_msg.h").read_text("utf-8")
    fields = re.findall(r"^    uint8 (\w+)(?:\[(\d+)\])?;", text, re.M)
    theirs = [(one.name.replace("_", "").removeprefix("all"), one.bits // 8) for one in operator_definitions.APP_BODY]
    assert [(name.lower(), int(size or 1)) for name, size in fields] == theirs
    codes = {name: int(code) for name, code in re.findall(r"#define SKYMEMORY_(\w+)_CC +(\d+)", text)}
    assert list(codes) == ["NOOP", "RESET_COUNTERS"]
    for name, code in codes.items():
        assert _packet(name) == bytes.fromhex(f"18c1c0000001{code:02x}00")


def _packet(command: str) -> bytes:
    bits = "".join(f"{int(value):0{size}b}" for size, value in _command(command).values())
    return int(bits, 2).to_bytes(len(bits) // 8, "big")


@pytest.fixture(scope="module")
def cosmos():
    """The definitions as OpenC3 COSMOS' own parser reads them."""
    config = pytest.importorskip("openc3.packets.packet_config", reason="needs the package openc3").PacketConfig()
    config.process_file(str(operator_definitions.FOLDER / operator_definitions.COSMOS_NAME), "SKYMEMORY")
    assert config.warnings == []
    return config


def test_cosmos_reads_the_housekeeping_that_we_read(cosmos):
    telemetry = cosmos.telemetry["SKYMEMORY"]
    assert list(telemetry) == ["PONG", "HK"]
    data = pong()
    assert telemetry["PONG"].identify(data) and not telemetry["HK"].identify(data)
    telemetry["PONG"].buffer = data
    ours = unpack_housekeeping(data[TELEMETRY_PREFIX_BYTES:])
    assert {name: telemetry["PONG"].read(name.upper()) for name in HOUSEKEEPING_FIELDS} == ours
    assert telemetry["PONG"].read("REQUEST_ID") == 0x01020304
    app = bytes.fromhex("08c1c0000037") + bytes(10) + bytes([3, 4]) + bytes(10) + bytes(range(32))
    assert telemetry["HK"].identify(app) and not telemetry["PONG"].identify(app)
    telemetry["HK"].buffer = app
    assert telemetry["HK"].read("COMMAND_ERROR_COUNTER") == 4
    assert telemetry["HK"].read("ALL_PACKETS_REJECTED") == int.from_bytes(app[-8:], "big")


def test_cosmos_builds_commands_that_are_ours(cosmos):
    header = SkyHeader(
        Op.PING, Address(*HERE), Address(*HERE, 0xFF), 7, 9, hop_limit=operator_definitions.HOP_LIMIT, credit=256
    )
    ours = build_packet(header, b"", 0, 0.0)
    ping = cosmos.commands["SKYMEMORY"]["PING"]
    ping.restore_defaults()
    for name, value in _given(ours).items():
        ping.write(name, value)
    assert ping.buffer == ours
    for name in ("NOOP", "RESET_COUNTERS"):
        command = cosmos.commands["SKYMEMORY"][name]
        command.restore_defaults()
        assert command.buffer == _packet(name)
        assert [one for one, its in cosmos.commands["SKYMEMORY"].items() if its.identify(command.buffer)] == [name]
