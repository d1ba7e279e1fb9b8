"""docs/reference/wire.md against the code: every offset, number and limit it states, and its worked example."""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from pathlib import Path

import pytest

from skymemory.constellation.presets import PRESETS
from skymemory.constellation.visibility import GroundHost, overhead_cell
from skymemory.protocol import messages, wire
from skymemory.protocol import messages as selection
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.protocol.messages import HOUSEKEEPING_FIELDS, ChunkPresence
from skymemory.protocol.satellite import checks, gossip, memory, routing
from skymemory.protocol.wire import (
    COMMAND_BYTES,
    CREDIT_UNIT_BYTES,
    MAX_PACKET_BYTES,
    TELEMETRY_BYTES,
    Address,
    ChunkRef,
    Op,
    PlacementTag,
    SkyHeader,
    Status,
    pack_command,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/wire.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^#+ ([^\n]*)\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL))
VECTORS = {entry["name"]: entry["hex"] for entry in json.loads((ROOT / "tests/vectors/wire.json").read_text("utf-8"))}


def table(section: str, first_column: str) -> list[list[str]]:
    """Rows of the table of a section whose first column is headed so."""
    lines = SECTIONS[section].splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"| {first_column} "))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def number(text: str) -> int:
    return int(text.replace(",", ""), 0)


def fields_of(layout: struct.Struct) -> list[tuple[int, int]]:
    """Offset and size of each item of a big-endian struct."""
    found, at = [], 0
    for count, kind in re.findall(r"(\d*)([a-zA-Z])", layout.format):
        size = struct.calcsize(f">{count}{kind}")
        found.append((at, size))
        at += size
    return found


STRUCTS = {
    "SKY header": wire.SKY,
    "Chunk reference": wire.CHUNK_REF,
    "Selection": selection._SELECTION,
    "Key list": messages._KEYS,
    "Presences": messages._PRESENCE,
    "List": messages._LIST,
    "Moves": messages._MOVES,
    "Notice": gossip._NOTICE,
    "Retain": messages._RETAIN,
    "Check": checks._CHECK,
    "Links": routing._LINKS,
    "Unsupported": messages._UNSUPPORTED,
    "Primary header": struct.Struct(">HHH"),
}


@pytest.mark.parametrize("section", STRUCTS)
def test_offsets_and_sizes(section):
    rows = table(section, "offset")
    assert [(int(row[0]), int(row[1])) for row in rows] == fields_of(STRUCTS[section])


def at(packed: bytes, rows: list[list[str]], name: str) -> bytes:
    ((offset, size),) = [(int(row[0]), int(row[1])) for row in rows if row[2] == name]
    return packed[offset : offset + size]


def test_the_names_of_the_sky_header_are_at_their_places():
    values = {
        "flags": 0x11,
        "hop_limit": 0x12,
        "hop_count": 0x13,
        "congestion": 0x1415,
        "timestamp_us": 0x16171819,
        "slot_moves": -5,
        "plane_moves": -6,
        "credit": 0x1A1B,
        "key_id": 0x1C1D,
        "ground": 0x1E1F2021,
        "request_id": 0x22232425,
    }
    header = SkyHeader(Op.LISTED, Address(0xABC, 0xDEF, 0x12), Address(1, 2, 0xFF), status=Status.NO_ROUTE, **values)
    packed, rows = header.pack(0xCAFEBABE), table("SKY header", "offset")
    for name, value in values.items():
        assert int.from_bytes(at(packed, rows, name), "big", signed=value < 0) == value, name
    assert at(packed, rows, "version") == bytes([wire.VERSION]) and at(packed, rows, "op") == bytes([Op.LISTED])
    assert at(packed, rows, "status") == bytes([Status.NO_ROUTE])
    assert at(packed, rows, "destination").hex() == "12abcdef" and at(packed, rows, "source").hex() == "ff001002"
    assert at(packed, rows, "crc").hex() == "cafebabe"
    assert {row[2] for row in rows if "changed by forwarders" in row[3]} == {"hop_limit", "hop_count", "congestion"}
    mutable = [int(row[0]) for row in rows if "changed by forwarders" in row[3]]
    assert (min(mutable), max(mutable) + 2) == (wire.MUTABLE_OFFSET, wire.MUTABLE_OFFSET + wire.MUTABLE_BYTES)


def test_the_names_of_the_chunk_reference_and_the_presence_are_at_their_places():
    tag = PlacementTag(strategy=0x21, servers=0x2223, server=0x0405, slot_moves=-7, plane_moves=-8)
    ref = ChunkRef(bytes(range(32)), 0x31, 0x32333435, 0x363738, 0x393A3B3C, 0x3D3E3F40, 0x41424344, tag).pack()
    presence = ChunkPresence(0x31, 0x32333435, 0x363738, 0x3D3E3F40, 0x41424344, 0x4546, tag).pack()
    for packed, section in ((ref, "Chunk reference"), (presence, "Presences")):
        rows = table(section, "offset")
        expected = {
            "number": 0x32,
            "chunks": 0x32333435,
            "length": 0x363738,
            "crc": 0x393A3B3C,
            "value_bytes": 0x3D3E3F40,
            "value_crc": 0x41424344,
            "servers": 0x2223,
            "server": 0x0406,
            "strategy": 0x21,
            "flags": 0,
            "spare": 0,
            "replica": 0,
            "slot_moves": -7,
            "plane_moves": -8,
            "held": 0x4546,
            "key": int.from_bytes(bytes(range(32)), "big"),
        }
        for row in rows:
            value = expected[row[2]]
            assert int.from_bytes(at(packed, rows, row[2]), "big", signed=value < 0) == value, row
    assert (wire.TAG_OFFSET, wire.TAG_OFFSET + wire.TAG_BYTES) == (56, 72)
    assert ref[memory._VERSION] == struct.pack(">II", 0x3D3E3F40, 0x41424344)


def test_operations_statuses_strategies_and_housekeeping():
    operations = table("Operations", "op")
    assert {int(row[0], 16): row[1] for row in operations} == {op.value: op.name for op in Op}
    for row in operations:
        op = Op(int(row[0], 16))
        assert row[2] == ("command" if op.is_command else "telemetry")
        assert (row[4] == "the chunk") == (op in (Op.SET, Op.MIGRATE, Op.DATA)) == (row[3] == "chunk reference")
        assert all(answer in Op.__members__ for answer in row[5].split(", ") if answer)
    assert {int(row[0]): row[1] for row in table("Operations", "status")} == {s.value: s.name for s in Status}
    assert {row[1]: int(row[0]) for row in table("Chunk reference", "strategy")} == STRATEGY_CODES
    assert [row[1] for row in table("Housekeeping", "number")] == list(HOUSEKEEPING_FIELDS)
    assert [int(row[0]) for row in table("Housekeeping", "number")] == list(range(len(HOUSEKEEPING_FIELDS)))


def test_limits():
    assert {row[0]: number(row[1]) for row in table("Limits", "limit")} == {
        "packet": MAX_PACKET_BYTES,
        "chunk": wire.MAX_CHUNK_BYTES,
        "value": 2**32 - 1,
        "selection": selection.MAX_SELECTION_BITS,
        "keys": messages.MAX_KEYS_PER_PACKET,
        "dead values": messages.MAX_DEAD_PER_PACKET,
        "checks": checks.MAX_CHECKS_PER_PACKET,
        "listing": messages.MAX_KEYS_PER_PACKET // 2,
        "moves": wire.MAX_MOVES,
    }
    assert f"units of {CREDIT_UNIT_BYTES:,} bytes" in PAGE
    prefix = wire.SKY_BYTES + wire.CHUNK_REF_BYTES + 6144
    assert f"SET is {COMMAND_BYTES + prefix:,} and whose DATA is {TELEMETRY_BYTES + prefix:,} bytes" in PAGE
    assert f"SKY header\n\nAt offset {COMMAND_BYTES} of a command, {TELEMETRY_BYTES} of telemetry" in PAGE
    for name, size in (("Selection", 44), ("Presences", 36), ("Chunk reference", 72)):
        assert STRUCTS[name].size == size and f"{size} bytes" in SECTIONS[name]
    assert zlib.crc32(b"123456789") == 0xCBF43926 and "0xCBF43926" in PAGE


def test_secondary_headers():
    rows = table("Secondary headers", "kind")
    assert [(row[0], int(row[1]), int(row[2])) for row in rows] == [
        ("command", 6, 1),
        ("command", 7, 1),
        ("telemetry", 6, 4),
        ("telemetry", 10, 2),
        ("telemetry", 12, 4),
    ]
    assert pack_command(0x77, 0, 100)[6:] == b"\x77\0"


def test_the_worked_example_is_the_golden_set():
    (example,) = re.findall(r"```text\n(.*?)```", SECTIONS["A worked example"], re.DOTALL)
    bytes_of = "".join(line.split()[0] for line in example.splitlines())
    assert bytes_of == VECTORS["set"].replace(" ", "")


def test_what_it_says_of_the_second_versions_is_what_hosts_compute() -> None:
    """Its numbers and formulas alone give the cell over a host."""
    text = PAGE
    rows = re.findall(
        r"^\| ([a-z-]+) \| (\d+) \| ([\d.]+) m \| ([\d.]+) s \| ([\d.]+) s \| (\d+) \| (\d+) \|$", text, re.M
    )
    assert {row[0] for row in rows} == {name for name, one in PRESETS.items() if one.version == 2}
    theta = float(re.findall(r"^θ is ([\d.]+) ", text, re.M)[0])
    e2 = float(re.findall(r"e² = ([\d.]+),", text)[0])
    for name, phase, r, slot_s, plane_s, a_ps, b_ps in rows:
        preset = PRESETS[name]
        shell = preset.shell
        assert (shell.phase, round(shell.isl_one_way_s("slot") * 1e12)) == (int(phase), int(a_ps))
        assert round(shell.isl_one_way_s("plane") * 1e12) == int(b_ps)
        i = math.radians(shell.inclination_deg)
        for latitude, longitude, t in ((40.0, -75.0, 3600.0), (-33.0, 151.0, 2.6e6), (80.0, 10.0, 0.0)):
            phi = math.radians(latitude)
            nu = 6_378_137 / math.sqrt(1 - e2 * math.sin(phi) ** 2)
            x, z = nu * math.cos(phi), nu * (1 - e2) * math.sin(phi)
            k = x * math.cos(phi) + z * math.sin(phi)
            h = math.sqrt(k * k + float(r) ** 2 - x * x - z * z) - k
            u = math.asin(max(-1.0, min(1.0, (z + h * math.sin(phi)) / (float(r) * math.sin(i)))))
            n = math.radians(longitude) + theta - math.atan2(math.cos(i) * math.sin(u), math.cos(u))
            slot = u * shell.slots_per_plane / (2 * math.pi) - t / float(slot_s)
            plane = n * shell.planes / (2 * math.pi) + t / float(plane_s)
            found = overhead_cell(shell, GroundHost(latitude, longitude), preset.epoch_unix_s, t)
            assert found == pytest.approx((plane, slot), abs=1e-5)
