"""What named values the sky holds: the satellites of the box are asked, then the first chunks are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import MalformedPacket
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
    """
    first_chunks: dict[bytes, tuple[SatelliteId, Presence]] = {}
    for satellite in satellites:
        for key, presence in _held(driver, satellite):
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


def _held(driver: ClientDriver, satellite: SatelliteId) -> Iterator[tuple[bytes, Presence]]:
    """Every key of one satellite with what it has of it."""
    after = bytes(KEY_BYTES)
    while True:
        with driver.lock:
            body = messages.pack_list(after, messages.MAX_KEYS_PER_PACKET // 2)
            number = driver.machine.ask(Op.LIST, body, satellite, driver.now_s())
            answer = driver.run([number])[number]
        try:
            page = messages.unpack_listed(answer.body) if answer.ok else []
        except MalformedPacket:
            driver.machine.counters.add("packets_malformed")
            return
        if not page or page[-1][0] <= after:  # the end, or a satellite that would go on for ever
            return
        yield from page
        after = page[-1][0]


def _header(start_of_value: bytes) -> ValueHeader | None:
    try:
        return unpack_header(start_of_value)
    except MalformedPacket:
        return None
