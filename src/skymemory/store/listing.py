"""What named values the sky holds: the satellites of the box are asked, then the first chunks are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import CommandsRefused, MalformedPacket
from skymemory.kv.value import ValueHeader, unpack_header
from skymemory.protocol import messages
from skymemory.protocol.messages import KEY_BYTES, Presence
from skymemory.protocol.selection import Selection
from skymemory.protocol.wire import CHUNK_REF_BYTES, Op
from skymemory.store.driver import ClientDriver


@dataclass(frozen=True, slots=True)
class NamedValue:
    name: str
    key: bytes
    size_bytes: int
    chunks: int


def list_names(driver: ClientDriver, satellites: list[SatelliteId]) -> list[NamedValue]:
    """Values of the general key-value store on ``satellites``, by name; KV blocks, which have no name, are left out.

    A value is listed if its first chunk is there and readable; whether all the others are, only a read can tell.

    Raises:
        CommandsRefused: all who answered refuse to say what they hold.
    """
    first_chunks: dict[bytes, tuple[SatelliteId, Presence]] = {}
    for satellite, key, presence in _held(driver, satellites):
        if presence.index == 0:
            first_chunks[key] = (satellite, presence)
    now_s = driver.now_s()
    with driver.lock:
        asked = {
            driver.machine.ask(Op.GET, Selection.of(key, [0]).pack(), satellite, now_s): (key, presence)
            for key, (satellite, presence) in first_chunks.items()
        }
        answers = driver.run(asked)
    found = []
    for number, answer in answers.items():
        key, presence = asked[number]
        header = _header(answer.body[CHUNK_REF_BYTES:]) if answer.ok else None
        if header is not None and header.name:
            found.append(NamedValue(header.name, key, header.raw_bytes, presence.chunks))
    return sorted(found, key=lambda value: value.name)


def _held(driver: ClientDriver, satellites: list[SatelliteId]) -> Iterator[tuple[SatelliteId, bytes, Presence]]:
    """Every key of each satellite with what it has of it: page after page, of all of them at the same time."""
    after = dict.fromkeys(satellites, bytes(KEY_BYTES))
    while after:
        with driver.lock:
            asked = {
                driver.machine.ask(
                    Op.LIST, messages.pack_list(last, messages.MAX_KEYS_PER_PACKET // 2), satellite, driver.now_s()
                ): satellite
                for satellite, last in after.items()
            }
            answers = driver.run(asked)
        if not any(answer.ok for answer in answers.values()) and any(
            answer.report.failure == "refused" for answer in answers.values()
        ):
            raise CommandsRefused()
        for number, satellite in asked.items():
            last = after.pop(satellite)
            try:
                page = messages.unpack_listed(answers[number].body) if answers[number].ok else []
            except MalformedPacket:
                driver.machine.counters.add("packets_malformed")
                continue
            if page and page[-1][0] > last:  # neither the end, nor a satellite that would go on for ever
                after[satellite] = page[-1][0]
                yield from ((satellite, key, presence) for key, presence in page)


def _header(start_of_value: bytes) -> ValueHeader | None:
    try:
        return unpack_header(start_of_value)
    except MalformedPacket:
        return None
