"""Finding values in the sky without an index: ask the nearest satellite, then the rest of the box."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import CommandsRefused, InvalidInput, MalformedPacket
from skymemory.index.lookup import PrefixSearch
from skymemory.kv.value import ValueHeader, unpack_header
from skymemory.placement.locate import Moves
from skymemory.protocol import messages
from skymemory.protocol.client.transfer import ValueInfo
from skymemory.protocol.clock import SkyMap
from skymemory.protocol.messages import KEY_BYTES, MAX_KEYS_PER_PACKET, Presence, Selection
from skymemory.protocol.wire import CHUNK_REF_BYTES, Op
from skymemory.store.sky.driver import ClientDriver

_LEFT_BEHIND_S = 1.0
"""So long after a move the box of before is asked, too."""


def prefix_by(find: Callable[[list[bytes]], set[bytes]], keys: Sequence[bytes]) -> int:
    """Leading keys all present, where ``find`` tells which of some are: with few calls, and correct with holes.

    The first key is among the first that are asked for: of a prompt that nobody has stored nothing else is.
    """
    search = PrefixSearch(len(keys), verify_batch=MAX_KEYS_PER_PACKET)
    first = True
    while not search.done:
        asked = sorted({0, *search.next_probe()}) if first else search.next_probe()
        first = False
        present = find([keys[position] for position in asked])
        search.answer({position: keys[position] in present for position in asked})
    return search.result


class Prober:
    """Asks HAS. The centre of the box holds some chunk of every value with as many chunks as the box has cells;
    of smaller values, and when the box has empty cells, it may hold none, so the others are asked too.
    """

    def __init__(
        self,
        driver: ClientDriver,
        sky: SkyMap,
        strategy: int,
        servers: int,
        can_hold: Callable[[int, int, int], bool] = lambda chunks, chunk_bytes, value_bytes: True,
    ) -> None:
        """``can_hold``: whether the constellation has room for so many chunks of a value of so many bytes."""
        self._driver = driver
        self._sky = sky
        self._placement = sky.placement(strategy, servers)
        self._can_hold = can_hold
        self.questions = 0
        """HAS packets so far."""

    def now_s(self) -> float:
        return self._driver.now_s()

    def search(self, keys: Sequence[bytes]) -> tuple[dict[bytes, ValueInfo], bool]:
        """What the box knows of each key, in at most two round trips; and whether the keys that were not found are
        absent for certain: all that may hold some answered.

        Just after a move these are the satellites of the box of before, too: a chunk outlives its handover there. Where
        the answers tell that the box is elsewhere than we thought, it is searched again, once.
        """
        moves = self._moves()
        found, certain = self._search_at(moves, keys)
        if len(found) < len(set(keys)) and self._moves() != moves:
            moves = self._moves()
            more, certain = self._search_at(moves, [key for key in keys if key not in found])
            found.update(more)
        return found, certain and self._moves() == moves

    def settings_in_box(self, keys: Sequence[bytes]) -> dict[bytes, list[ValueInfo]]:
        """All different settings of each key that the satellites of the box report."""
        return self._settings(list(dict.fromkeys(self._placement.box_satellites(self._moves()))), keys)[0]

    def _moves(self) -> Moves:
        return self._driver.machine.moves(self._driver.now_s())

    def _search_at(self, moves: Moves, keys: Sequence[bytes]) -> tuple[dict[bytes, ValueInfo], bool]:
        """The centre is asked for all, the others for what it has not got."""
        centre = self._sky.centre_at(moves)
        found, certain = self._ask([centre], keys)
        unknown = [key for key in keys if key not in found]
        if unknown:
            before = self._driver.machine.moves_at(self._driver.now_s() - _LEFT_BEHIND_S)
            boxes = [self._placement.box_satellites(at) for at in dict.fromkeys((moves, before))]
            others = [here for here in dict.fromkeys(chain.from_iterable(boxes)) if here != centre]
            more, all_answered = self._ask(others, unknown)
            found.update(more)
            certain = certain and all_answered
        return found, certain

    def prefix(self, keys: Sequence[bytes]) -> tuple[int, dict[bytes, ValueInfo]]:
        """The number of leading keys all present, correct with holes, and what was learned on the way."""
        known: dict[bytes, ValueInfo] = {}

        def find(asked: list[bytes]) -> set[bytes]:
            known.update(self.search(asked)[0])
            return set(asked) & known.keys()

        return prefix_by(find, keys), known

    def _ask(self, satellites: Sequence[SatelliteId], keys: Sequence[bytes]) -> tuple[dict[bytes, ValueInfo], bool]:
        """What these know of the keys, and whether all of them answered. Of two values of one key it is the one that
        was set at more moves.
        """
        reported, certain = self._settings(satellites, keys)
        return {key: max(infos, key=lambda info: sum(info.set_moves)) for key, infos in reported.items()}, certain

    def _settings(
        self, satellites: Sequence[SatelliteId], keys: Sequence[bytes]
    ) -> tuple[dict[bytes, list[ValueInfo]], bool]:
        machine, now_s = self._driver.machine, self._driver.now_s()
        pages = [keys[at : at + MAX_KEYS_PER_PACKET] for at in range(0, len(keys), MAX_KEYS_PER_PACKET)]
        with self._driver.lock:
            asked = {
                machine.ask(Op.HAS, messages.pack_keys(page), satellite, now_s): page
                for satellite in satellites
                for page in pages
            }
            answers = self._driver.run(asked)
        found: dict[bytes, list[ValueInfo]] = {}
        self.questions += len(asked)
        for number, answer in answers.items():
            try:
                presences = messages.unpack_presences(answer.body) if answer.ok else []
            except MalformedPacket:
                machine.counters.add("packets_malformed")
                continue
            for key, presence in zip(asked[number], presences, strict=False):
                info = value_info(key, presence) if presence is not None else None
                if info is None:
                    continue
                if self._believable(info):
                    if info not in (infos := found.setdefault(key, [])):
                        infos.append(info)
                else:
                    machine.counters.add("presences_unbelievable")
        return found, all(answer.ok for answer in answers.values())

    def _believable(self, info: ValueInfo) -> bool:
        """Whether there can be such a value: whoever reads it sets aside memory for all of it before a byte comes."""
        if not self._can_hold(info.chunks, info.chunk_bytes, info.value_bytes):
            return False
        try:
            info.check()
            self._sky.servers_at(info.strategy, info.servers, info.set_moves, info.set_moves)
        except InvalidInput:
            return False
        return True


def value_info(key: bytes, presence: Presence) -> ValueInfo | None:
    """What a reader needs, from one satellite's word; None where its only chunk is the last, shorter one."""
    if presence.chunks > 1 and presence.index == presence.chunks - 1:
        return None
    tag = presence.tag
    return ValueInfo(
        key,
        presence.chunks,
        max(presence.length_bytes, 1),
        presence.value_bytes,
        presence.value_crc,
        tag.strategy,
        tag.servers,
        (tag.slot_moves, tag.plane_moves),
    )


# What named values the sky holds: the satellites of the box are asked, then the first chunks are read.


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


# A host that comes into a constellation asks around how far the box has moved, and how far the clocks are apart.


_ENOUGH = 3
"""Satellites that must have answered: one of them may have a wrong clock."""


def ask_the_clocks(driver: ClientDriver, sky: SkyMap) -> float | None:
    """Let the client hear how several satellites count the moves: an operator may have pushed the box on.

    Asked are the box's centre and its four neighbours, all at once; three answers do. Returns by how many seconds the
    clocks of those that answered are ahead of ours (their median, to within half a round trip); None if none did.
    """
    machine = driver.machine
    with driver.lock:
        centre = sky.centre_at(machine.moves(driver.now_s()))
        asked = [
            machine.ask(Op.PING, b"", satellite, driver.now_s())
            for satellite in dict.fromkeys([centre, *sky.torus.neighbours(centre)])
        ]
        ahead_s: list[float] = []
        for number in asked:
            if len(ahead_s) == _ENOUGH:
                machine.cancel(number)
            elif (finished := driver.run([number])[number]).ok:
                ahead_s.append(finished.report.clock_ahead_s)
    return statistics.median(ahead_s) if ahead_s else None
