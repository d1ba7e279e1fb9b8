"""Definitions of housekeeping and commands for operators' tools: XTCE (OMG, CCSDS 660.0) and OpenC3 COSMOS.

`python -m tools.operator_definitions` writes docs/reference/skymemory.xtce.xml and skymemory.cosmos.txt there, from the
protocol's own tables: a test fails where they are not up to date. The app of cFS has commands and housekeeping of its
own, which flight/cfs/fsw/src/skymemory_msg.h has as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree as Xml

from skymemory.protocol.messages import HOUSEKEEPING_FIELDS
from skymemory.protocol.wire import COMMAND_BYTES, SKY, SKY_APID, SKY_BYTES, TELEMETRY_BYTES, Op

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
XTCE_NAME, COSMOS_NAME = "skymemory.xtce.xml", "skymemory.cosmos.txt"
_XTCE = "http://www.omg.org/spec/XTCE/20180204"
HOP_LIMIT = 64

Kind = Literal["unsigned", "signed", "binary"]


@dataclass(frozen=True, slots=True)
class Field:
    """``value``: what it has in every command; None: the operator's, or a figure."""

    name: str
    bits: int
    meaning: str
    kind: Kind = "unsigned"
    value: int | None = None


def primary(telemetry: bool, apid: int = SKY_APID) -> tuple[Field, ...]:
    return (
        Field("ccsds_version", 3, "packet version", value=0),
        Field("ccsds_type", 1, "1 command, 0 telemetry", value=0 if telemetry else 1),
        Field("ccsds_secondary", 1, "secondary header flag", value=1),
        Field("ccsds_apid", 11, "APID of SkyMemory; the next is the cFS app's", value=apid),
        Field("ccsds_flags", 2, "unsegmented", value=3),
        Field("ccsds_count", 14, "sequence count of the sender", value=0),
        Field("ccsds_length", 16, "bytes of the packet less 7"),
    )


def secondary(telemetry: bool, op: int) -> tuple[Field, ...]:
    if not telemetry:
        return (
            Field("function_code", 8, "the operation, as in the SKY header, or the app's command", value=op),
            Field("checksum", 8, "not used", value=0),
        )
    return (
        Field("seconds", 32, "of the Unix epoch; in HK, of the mission's clock"),
        Field("fraction", 16, "of a second, in 1/65,536"),
        Field("spare_time", 32, "reserved"),
    )


def sky_header(op: int) -> tuple[Field, ...]:
    """The SKY header, with what a command by the beam of the satellite itself has; ``SKY`` packs the same fields."""
    return (
        Field("sky_version", 8, "version of the protocol", value=1),
        Field("op", 8, "the operation", value=op),
        Field("flags", 8, "1: authenticated, 2: settled", value=0),
        Field("status", 8, "of an answer: 0 OK, 1 FULL, 2 HOP_LIMIT, 3 NO_ROUTE, 4 REFUSED", value=0),
        Field("destination", 32, "address: shell 8 bits, plane 12, slot 12"),
        Field("source", 32, "address; answers go there"),
        Field("ground", 32, "number of the ground host; 0 between satellites"),
        Field("request_id", 32, "chosen by the requester, repeated in every answer"),
        Field("hop_limit", 8, "links left between satellites", value=HOP_LIMIT),
        Field("hop_count", 8, "links passed", value=0),
        Field("congestion", 16, "reserved", value=0),
        Field("timestamp_us", 32, "the asker's clock in us, modulo 2^32", value=0),
        Field("slot_moves", 32, "of the box as the sender counts them", "signed", value=0),
        Field("plane_moves", 32, "of the box as the sender counts them", "signed", value=0),
        Field("credit", 16, "what the sender can take at once, in 4,096 bytes", value=256),
        Field("key_id", 16, "of an authenticated packet", value=0),
        Field("crc", 32, "CRC-32 of header and body; see docs/reference/wire.md"),
    )


def headers(telemetry: bool, op: int) -> tuple[Field, ...]:
    return (*primary(telemetry), *secondary(telemetry, op), *sky_header(op))


_BYTES = {True: TELEMETRY_BYTES, False: COMMAND_BYTES}
PONG_BODY = (
    Field("field_count", 16, "figures that follow; later releases append some"),
    Field("spare_count", 16, "reserved"),
    *(Field(name, 64, "housekeeping", "signed") for name in HOUSEKEEPING_FIELDS),
)
EVICT_BODY = (
    Field("key_count", 16, "keys that follow", value=1),
    Field("spare_keys", 16, "reserved", value=0),
    Field("key", 256, "names the value whose chunks here are forgotten", "binary"),
)
APP_APID = SKY_APID + 1
APP_BODY = (
    Field("command_counter", 8, "commands accepted"),
    Field("command_error_counter", 8, "commands rejected"),
    Field("satellites", 16, "in the app"),
    Field("packets_published", 32, "answers onto the software bus"),
    Field("packets_unpublished", 32, "answers that the bus had no room for"),
    Field("all_chunks_held", 64, "by all satellites of the app"),
    Field("all_memory_used_bytes", 64, "by all satellites of the app"),
    Field("all_packets_received", 64, "by all satellites of the app"),
    Field("all_packets_rejected", 64, "by all: malformed, refused, replayed, unsupported, unroutable"),
)


@dataclass(frozen=True, slots=True)
class Command:
    """``identity``: the field that distinguishes it from others of its APID."""

    name: str
    meaning: str
    fields: tuple[Field, ...]
    identity: str

    def fixed(self, one: Field) -> int | None:
        if one.name == "ccsds_length":
            return sum(field.bits for field in self.fields) // 8 - 7
        return one.value


def _sky_command(op: Op, meaning: str, body: tuple[Field, ...] = ()) -> Command:
    return Command(op.name, meaning, (*headers(False, op), *body), "op")


def _app_command(name: str, code: int, meaning: str) -> Command:
    return Command(name, meaning, (*primary(False, APP_APID), *secondary(False, code)), "function_code")


SKY_COMMANDS = (
    _sky_command(Op.PING, "asks for housekeeping: answered by PONG"),
    _sky_command(Op.EVICT, "forgets all chunks of a key here: answered by EVICTED", EVICT_BODY),
)
COMMANDS = (
    *SKY_COMMANDS,
    _app_command("NOOP", 0, "the cFS app: says that it is there"),
    _app_command("RESET_COUNTERS", 1, "the cFS app: command counters to 0"),
)


def check_layout() -> None:
    """Raises where these fields are not the protocol's."""
    letters = {8: "B", 16: "H", 32: "I"}
    ours = "".join("i" if one.kind == "signed" else letters[one.bits] for one in sky_header(0))
    for telemetry, size in _BYTES.items():
        if sum(one.bits for one in headers(telemetry, 0)) != 8 * (size + SKY_BYTES):
            raise AssertionError(f"headers of {size + SKY_BYTES} bytes expected")
    if SKY.format != f">{ours}":
        raise AssertionError(f"SKY header {SKY.format}: these fields are >{ours}")


# --- XTCE ---


def _type_name(one: Field) -> str:
    return f"{one.kind}_{one.bits}"


def _types(parent: Xml.Element, fields: list[Field], of: str) -> None:
    for one in {_type_name(one): one for one in fields}.values():
        name, size = _type_name(one), str(one.bits)
        if one.kind == "binary":
            kind = Xml.SubElement(parent, f"Binary{of}Type", name=name)
            bits = Xml.SubElement(Xml.SubElement(kind, "BinaryDataEncoding"), "SizeInBits")
            Xml.SubElement(bits, "FixedValue").text = size
            continue
        signed = one.kind == "signed"
        kind = Xml.SubElement(
            parent, f"Integer{of}Type", name=name, signed=str(signed).lower(), sizeInBits=str(max(32, one.bits))
        )
        Xml.SubElement(
            kind, "IntegerDataEncoding", sizeInBits=size, encoding="twosComplement" if signed else "unsigned"
        )


def _container(parent: Xml.Element, name: str, fields: tuple[Field, ...], **more: str) -> Xml.Element:
    container = Xml.SubElement(parent, "SequenceContainer", name=name, **more)
    entries = Xml.SubElement(container, "EntryList")
    for one in fields:
        Xml.SubElement(entries, "ParameterRefEntry", parameterRef=one.name)
    return container


def _extends(container: Xml.Element, base: str, **values: int) -> None:
    its = Xml.SubElement(container, "BaseContainer", containerRef=base)
    conditions = Xml.SubElement(Xml.SubElement(its, "RestrictionCriteria"), "ComparisonList")
    for name, value in values.items():
        Xml.SubElement(conditions, "Comparison", parameterRef=name, value=str(value), useCalibratedValue="false")


def xtce() -> str:
    """PONG and the app's HK as telemetry, and the commands. Packets of other operations are their headers."""
    check_layout()
    Xml.register_namespace("xtce", _XTCE)
    root = Xml.Element(
        "SpaceSystem",
        {
            "xmlns": _XTCE,
            "name": "SKYMEMORY",
            "shortDescription": "A KV-cache memory on satellites; generated by tools/operator_definitions.py",
        },
    )
    first, rest = primary(True), (*secondary(True, 0), *sky_header(0))
    telemetry = Xml.SubElement(root, "TelemetryMetaData")
    fields = [*first, *rest, *PONG_BODY, *APP_BODY]
    _types(Xml.SubElement(telemetry, "ParameterTypeSet"), fields, "Parameter")
    parameters = Xml.SubElement(telemetry, "ParameterSet")
    for one in fields:
        its = Xml.SubElement(parameters, "Parameter", name=one.name, parameterTypeRef=_type_name(one))
        Xml.SubElement(its, "LongDescription").text = one.meaning
    containers = Xml.SubElement(telemetry, "ContainerSet")
    _container(containers, "CCSDSPacket", first, abstract="true")
    sky = _container(containers, "SkyTelemetry", rest)
    _extends(sky, "CCSDSPacket", ccsds_apid=SKY_APID, ccsds_type=0)
    _extends(_container(containers, "PONG", PONG_BODY), "SkyTelemetry", op=Op.PONG)
    app = _container(containers, "HK", (*secondary(True, 0), *APP_BODY))
    _extends(app, "CCSDSPacket", ccsds_apid=APP_APID, ccsds_type=0)

    commands = Xml.SubElement(root, "CommandMetaData")
    every = [one for command in COMMANDS for one in command.fields]
    _types(Xml.SubElement(commands, "ArgumentTypeSet"), every, "Argument")
    every_command = Xml.SubElement(commands, "MetaCommandSet")
    for its in COMMANDS:
        command = Xml.SubElement(every_command, "MetaCommand", name=its.name, shortDescription=its.meaning)
        asked = [one for one in its.fields if its.fixed(one) is None]
        arguments = Xml.SubElement(command, "ArgumentList") if asked else command
        for one in asked:
            Xml.SubElement(
                arguments, "Argument", name=one.name, argumentTypeRef=_type_name(one), shortDescription=one.meaning
            )
        layout = Xml.SubElement(Xml.SubElement(command, "CommandContainer", name=its.name), "EntryList")
        for one in its.fields:
            value = its.fixed(one)
            if value is None:
                Xml.SubElement(layout, "ArgumentRefEntry", argumentRef=one.name)
            else:
                digits = -(-one.bits // 4)
                Xml.SubElement(
                    layout,
                    "FixedValueEntry",
                    name=one.name,
                    binaryValue=f"{value:0{digits + digits % 2}X}",
                    sizeInBits=str(one.bits),
                )
    Xml.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + Xml.tostring(root, encoding="unicode") + "\n"


# --- COSMOS ---


def cosmos() -> str:
    """Target SKYMEMORY for OpenC3 COSMOS: `cmd_tlm/skymemory.txt` of a plug-in."""
    check_layout()
    return "\n".join(_cosmos_lines()) + "\n"


def _cosmos_lines() -> Iterator[str]:
    yield "# Generated by tools/operator_definitions.py. The header CRC (item CRC) is the sender's to compute:"
    yield "# docs/reference/wire.md, Checksums; where a constellation asks for MACs, the MAC as well."
    yield ""
    pong, app = (*headers(True, Op.PONG), *PONG_BODY), (*primary(True, APP_APID), *secondary(True, 0), *APP_BODY)
    for packet, fields, meaning in (("PONG", pong, "of a satellite"), ("HK", app, "of the cFS app")):
        yield f'TELEMETRY SKYMEMORY {packet} BIG_ENDIAN "Housekeeping {meaning}"'
        for one in fields:
            kind = "INT" if one.kind == "signed" else "UINT"
            name = one.name.upper()
            if one.name in ("ccsds_apid", "ccsds_type", "op"):
                value = Op.PONG if one.name == "op" else one.value
                yield f'  APPEND_ID_ITEM {name} {one.bits} {kind} {value} "{one.meaning}"'
            else:
                yield f'  APPEND_ITEM {name} {one.bits} {kind} "{one.meaning}"'
        yield ""
    for at, command in enumerate(COMMANDS):
        if at:
            yield ""
        yield f'COMMAND SKYMEMORY {command.name} BIG_ENDIAN "{command.meaning}"'
        for one in command.fields:
            name, value = one.name.upper(), command.fixed(one)
            if one.kind == "binary":
                yield f'  APPEND_PARAMETER {name} {one.bits} BLOCK "" "{one.meaning}"'
                continue
            kind = "INT" if one.kind == "signed" else "UINT"
            low = -(1 << one.bits - 1) if one.kind == "signed" else 0
            high = (1 << one.bits - (one.kind == "signed")) - 1
            if one.name in ("ccsds_apid", "ccsds_type", command.identity):
                yield f'  APPEND_ID_PARAMETER {name} {one.bits} {kind} {low} {high} {value} "{one.meaning}"'
            else:
                yield f'  APPEND_PARAMETER {name} {one.bits} {kind} {low} {high} {value or 0} "{one.meaning}"'


def files() -> dict[str, str]:
    return {XTCE_NAME: xtce(), COSMOS_NAME: cosmos()}


def main() -> int:
    for name, text in files().items():
        (FOLDER / name).write_text(text, "utf-8")
        sys.stdout.write(f"wrote docs/reference/{name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
