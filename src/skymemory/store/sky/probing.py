"""Questions to the satellites of the box: values (HAS), names (LIST), time (PING).

Binary search for a prefix (paper §3.8) fails if eviction has punched holes. So ``PrefixSearch``

1. narrows down the first absent block, with several probes per round;
2. then (``verify``) probes every earlier block; an absent block moves the boundary back, and the search continues.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Protocol, TypeVar

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import CommandsRefused, InvalidInput, MalformedPacket
from skymemory.native import Rows
from skymemory.placement.locate import Moves
from skymemory.protocol import messages
from skymemory.protocol.client.machine import ClientMachine, Finished
from skymemory.protocol.client.transfer import Striping, ValueInfo
from skymemory.protocol.clock import SkyMap
from skymemory.protocol.messages import KEY_BYTES, MAX_KEYS_PER_PACKET, ChunkPresence, Selection
from skymemory.protocol.wire import CHUNK_REF_BYTES, Buffer, Op
from skymemory.reasons import Miss
from skymemory.store.named_values import NamedValue, named_value
from skymemory.store.sky.shared_index import SharedIndex

_UNANSWERED, _PRESENT, _ABSENT = 0, 1, 2


class PrefixSearch:
    """Search over ``count`` blocks, without I/O: take ``next_probe()``, feed ``answer()``, until ``done``.

    A narrowing round asks ``batch`` positions, a verifying round ``verify_batch``; none twice. For prefix-closed
    presence: at most ``floor(log(count) / log(batch)) + 1`` narrowing rounds (batch 1 or 2: ``ceil(log2(count)) + 1``),
    and ``ceil(result / verify_batch)`` verifying rounds.
    """

    def __init__(self, count: int, batch: int = 16, verify_batch: int = 256, verify: bool = True) -> None:
        if count < 0 or batch < 1 or verify_batch < 1:
            raise InvalidInput(
                f"cannot search {count} blocks by {batch} and {verify_batch}: batches are 1 or more, count 0 or more"
            )
        self._state = bytearray(count)  # answer for each block
        self._boundary = count  # first block known to be absent
        self._batch = batch
        self._verify_batch = verify_batch
        self._verify = verify
        self._asked: set[int] = set()
        self.rounds = 0

    @property
    def probes(self) -> int:
        return len(self._asked)

    @property
    def done(self) -> bool:
        return not self._next()

    @property
    def result(self) -> int:
        """Number of leading blocks present; InvalidInput before ``done``."""
        if not self.done:
            raise InvalidInput("the search is not done: feed the answers of next_probe() first")
        return self._boundary

    def next_probe(self) -> list[int]:
        """Return positions to probe, the same until an answer; none when done."""
        positions = self._next()
        if positions and not self._asked.issuperset(positions):
            self._asked.update(positions)
            self.rounds += 1
        return positions

    def answer(self, presence: Mapping[int, bool]) -> None:
        """Feed answers; an absent block stays absent."""
        for position, present in presence.items():
            if not 0 <= position < len(self._state):
                raise InvalidInput(f"an answer for block {position} of a search over {len(self._state)}")
            if not present:
                self._state[position] = _ABSENT
                self._boundary = min(self._boundary, position)
            elif self._state[position] == _UNANSWERED:
                self._state[position] = _PRESENT

    def _next(self) -> list[int]:
        low = self._state.rfind(_PRESENT, 0, self._boundary) + 1
        width = self._boundary - low
        if width > 0:
            return self._spread(low, width)
        return self._unverified() if self._verify else []

    def _spread(self, low: int, width: int) -> list[int]:
        """Return up to ``batch`` unknown positions, with the last, as full hits are common."""
        if width <= self._batch:
            return list(range(low, low + width))
        # One probe per round: plain bisection, after a first probe of the end, because a full hit is common.
        if self._batch == 1:
            first_question = not self._asked
            return [low + width - 1 if first_question else low + width // 2]
        step = width / self._batch
        return [low + int((part + 1) * step) - 1 for part in range(self._batch - 1)] + [low + width - 1]

    def _unverified(self) -> list[int]:
        positions: list[int] = []
        at = self._state.find(_UNANSWERED, 0, self._boundary)
        while at >= 0 and len(positions) < self._verify_batch:
            positions.append(at)
            at = self._state.find(_UNANSWERED, at + 1, self._boundary)
        return positions


class ClientDriver(Protocol):
    """Driver of a client: ``UdpClient``, or ``SimulatedClient`` in virtual time."""

    @property
    def machine(self) -> ClientMachine: ...

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Return the lock for beginning operations."""

    def now_s(self) -> float: ...

    def read(self, info: ValueInfo, out: memoryview | Rows, replicas: int = 1) -> Finished: ...

    def write(
        self,
        key: bytes,
        value: Buffer,
        striping: Striping,
        meanwhile: Callable[[ValueInfo], object] = lambda info: None,
    ) -> Finished:
        """Write a value. ``meanwhile`` is called once before its end, with the lock held."""

    def run(self, numbers: Iterable[int]) -> dict[int, Finished]:
        """Send and receive until these operations have ended."""

    def close(self) -> None: ...


Tag = TypeVar("Tag")
Item = TypeVar("Item")


def ask_all(
    driver: ClientDriver, op: Op, questions: Iterable[tuple[SatelliteId, bytes, Tag]]
) -> list[tuple[Tag, Finished]]:
    """Ask many satellites at once: satellite, body, and a tag to return with the answer."""
    now_s = driver.now_s()
    with driver.lock:
        tags = {driver.machine.ask(op, body, satellite, now_s): tag for satellite, body, tag in questions}
    answers = driver.run(tags)
    return [(tag, answers[number]) for number, tag in tags.items()]


def read_answer(driver: ClientDriver, answer: Finished, unpack: Callable[[bytes], list[Item]]) -> list[Item]:
    try:
        return unpack(answer.body) if answer.ok else []
    except MalformedPacket:
        driver.machine.counters.add("packets_malformed")
        return []


_PREVIOUS_BOX_S = 1.0
_EARLIER_BOXES = 8


def prefix_by(find: Callable[[list[bytes]], set[bytes]], keys: Sequence[bytes]) -> int:
    """Count the leading keys present, also with holes; ``find`` returns those present. Its first call has the first
    key: enough for an unknown prompt.
    """
    search = PrefixSearch(len(keys), verify_batch=MAX_KEYS_PER_PACKET)
    first = True
    while not search.done:
        positions = sorted({0, *search.next_probe()}) if first else search.next_probe()
        first = False
        present = find([keys[position] for position in positions])
        search.answer({position: keys[position] in present for position in positions})
    return search.result


class Prober:
    """Finder of values without an index: asks the box's centre, then its other satellites."""

    def __init__(
        self,
        driver: ClientDriver,
        sky: SkyMap,
        strategy: int,
        servers: int,
        can_hold: Callable[[int, int, int], bool] = lambda chunks, chunk_bytes, value_bytes: True,
    ) -> None:
        """``can_hold(chunks, chunk_bytes, value_bytes)``: True if there can be such a value."""
        self._driver = driver
        self._sky = sky
        self._code = strategy, servers
        self._placement = sky.placement(strategy, servers)
        self._can_hold = can_hold
        self.questions = 0

    def now_s(self) -> float:
        return self._driver.now_s()

    def search(self, keys: Sequence[bytes]) -> tuple[dict[bytes, ValueInfo], bool]:
        """Return the box's values, in two or three round trips, and True if the others are certainly absent."""
        moves = self._moves()
        infos, certain = self._search_at(moves, keys)
        # Answers may have corrected our count of moves: then the wrong satellites were asked.
        if len(infos) < len(set(keys)) and self._moves() != moves:
            moves = self._moves()
            retried, certain = self._search_at(moves, [key for key in keys if key not in infos])
            infos.update(retried)
        return infos, certain and self._moves() == moves

    def settings_in_box(self, keys: Sequence[bytes]) -> dict[bytes, list[ValueInfo]]:
        return self._settings(list(dict.fromkeys(self._placement.box_satellites(self._moves()))), keys)[0]

    def _moves(self) -> Moves:
        with self._driver.lock:
            return self._driver.machine.moves(self._driver.now_s())

    def _search_at(self, moves: Moves, keys: Sequence[bytes]) -> tuple[dict[bytes, ValueInfo], bool]:
        """Search the centre, then its box and boxes of displaced values; True if the others are absent."""
        # ``moves``: slots and planes by which the box has moved; ``certain``: all satellites asked have answered.
        centre = self._sky.centre_at(moves)
        infos, certain = self._ask([centre], keys)
        unknown = [key for key in keys if key not in infos]
        if not unknown:
            return infos, certain
        previous = self._driver.machine.moves_at(self._driver.now_s() - _PREVIOUS_BOX_S)
        # Values may have been written around satellites that were dead and that others have seen return.
        boxes = [self._sky.displaced_boxes(*self._code, at) for at in dict.fromkeys((moves, previous))]
        with self._driver.lock:
            boxes.append(self._driver.machine.boxes_around_suspects(*self._code, self._driver.now_s()))
        box_satellites = [satellite for satellite in dict.fromkeys(chain.from_iterable(boxes)) if satellite != centre]
        reported, all_answered = self._ask(box_satellites, unknown)
        infos.update(reported)
        certain = certain and all_answered
        unknown = [key for key in unknown if key not in infos]
        if unknown and not certain:  # chunks to be handed over to dead satellites stayed in their old place
            with self._driver.lock:
                earlier = self._driver.machine.moves_before(self._driver.now_s(), _EARLIER_BOXES)
            boxes = [self._placement.box_satellites(at) for at in earlier]
            earlier_satellites = [
                satellite for satellite in dict.fromkeys(chain.from_iterable(boxes)) if satellite not in box_satellites
            ]
            infos.update(self._ask(earlier_satellites, unknown)[0])
        return infos, certain

    def prefix(self, keys: Sequence[bytes]) -> tuple[int, dict[bytes, ValueInfo]]:
        known: dict[bytes, ValueInfo] = {}

        def find(batch: list[bytes]) -> set[bytes]:
            known.update(self.search(batch)[0])
            return set(batch) & known.keys()

        return prefix_by(find, keys), known

    def _ask(self, satellites: Sequence[SatelliteId], keys: Sequence[bytes]) -> tuple[dict[bytes, ValueInfo], bool]:
        reported, certain = self._settings(satellites, keys)
        return {key: max(infos, key=lambda info: sum(info.set_moves)) for key, infos in reported.items()}, certain

    def _settings(
        self, satellites: Sequence[SatelliteId], keys: Sequence[bytes]
    ) -> tuple[dict[bytes, list[ValueInfo]], bool]:
        """Return what satellites report of each key, and True if all answered."""
        pages = [keys[at : at + MAX_KEYS_PER_PACKET] for at in range(0, len(keys), MAX_KEYS_PER_PACKET)]
        bodies = [(messages.pack_keys(page), page) for page in pages]
        answers = ask_all(self._driver, Op.HAS, [(at, *body) for at in satellites for body in bodies])
        reported: dict[bytes, list[ValueInfo]] = {}
        self.questions += len(answers)
        for page, answer in answers:
            # A page holds a satellite's answers in the order of its keys; a short page leaves the last keys unknown.
            for key, presence in zip(page, read_answer(self._driver, answer, messages.unpack_presences), strict=False):
                info = value_info(key, presence) if presence is not None else None
                if info is None:
                    continue
                if self._believable(info):
                    if info not in (infos := reported.setdefault(key, [])):
                        infos.append(info)
                else:
                    self._driver.machine.counters.add("presences_unbelievable")
        return reported, all(answer.ok for _, answer in answers)

    def _believable(self, info: ValueInfo) -> bool:
        """Check that such a value can exist, as readers allocate its memory."""
        if not self._can_hold(info.chunks, info.chunk_bytes, info.value_bytes):
            return False
        try:
            info.check()
            self._sky.servers_at(info.strategy, info.servers, info.set_moves, info.set_moves)
        except InvalidInput:
            return False
        return True


def value_info(key: bytes, presence: ChunkPresence) -> ValueInfo | None:
    """Return the value in an answer; None if only the last, shorter chunk is there."""
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


MAX_KNOWN = 1 << 17
"""Limit of keys remembered: about 30 MB."""
ABSENT_S = 30.0
SILENT_S = 1.0
_UNKNOWN = (0.0, False)


class IndexRebuilder:
    """Rebuilder of an incomplete index: probes satellites for unknown keys when used.

    Values found enter the index. A key not found counts as absent here for ``ABSENT_S`` (``SILENT_S`` with a silent
    satellite).
    """

    def __init__(self, index: SharedIndex, prober: Prober, adopt: Callable[[Iterable[ValueInfo], float], None]) -> None:
        self._index = index
        self._prober = prober
        self._adopt = adopt
        self._absent: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()  # end of absence, and True if certain
        self.keys_probed = 0
        self.values_adopted = 0

    def search(self, keys: Sequence[bytes]) -> tuple[dict[bytes, ValueInfo], bool]:
        wanted = [key for key in dict.fromkeys(keys) if not self.absent(key)]
        infos = self._probe(wanted) if wanted else {}
        return infos, all(self._absent.get(key, _UNKNOWN)[1] for key in keys if key not in infos)

    def prefix(self, keys: Sequence[bytes], known: int) -> int:
        """Count the leading keys present; the first ``known`` are indexed."""
        if self.absent(keys[known]):
            return known
        candidates = list(keys[known:])
        end = next((at for at, key in enumerate(candidates) if self.absent(key)), len(candidates))
        candidates = candidates[:end]

        def find(batch: list[bytes]) -> set[bytes]:
            indexed = {key for key, info in zip(batch, self._index.infos(batch), strict=True) if info is not None}
            missing = [key for key in batch if key not in indexed]
            return indexed | self._probe(missing).keys() if missing else indexed

        return known + prefix_by(find, candidates)

    def absent(self, key: bytes) -> bool:
        return self._index.complete or self._absent.get(key, _UNKNOWN)[0] > self._prober.now_s()

    def record_evicted(self, keys: Iterable[bytes]) -> None:
        if not self._index.complete:
            self._remember(keys, True)

    def present(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._absent.pop(key, None)

    def _probe(self, keys: list[bytes]) -> dict[bytes, ValueInfo]:
        infos, certain = self._prober.search(keys)
        self.keys_probed += len(keys)
        self._remember((key for key in keys if key not in infos), certain)
        if infos:
            self.values_adopted += len(infos)
            self._adopt([infos[key] for key in keys if key in infos], self._prober.now_s())
            self._index.record_probes(len(keys), len(infos))
        return infos

    def _remember(self, keys: Iterable[bytes], certain: bool) -> None:
        until_s = self._prober.now_s() + (ABSENT_S if certain else SILENT_S)
        for key in keys:
            self._absent.pop(key, None)
            self._absent[key] = until_s, certain
        while len(self._absent) > MAX_KNOWN:
            self._absent.popitem(last=False)


def list_names(driver: ClientDriver, satellites: list[SatelliteId]) -> list[NamedValue]:
    """List the named values on ``satellites``, by name. Raises CommandsRefused if all that answered refuse."""
    first_chunks: dict[bytes, tuple[SatelliteId, ChunkPresence]] = {}
    for satellite, key, presence in _list_keys(driver, satellites):
        if presence.index == 0:
            first_chunks[key] = (satellite, presence)
    gets = [(at, Selection.of(key, [0]).pack(), (key, presence)) for key, (at, presence) in first_chunks.items()]
    values = []
    for (key, presence), answer in ask_all(driver, Op.GET, gets):
        named = named_value(key, answer.body[CHUNK_REF_BYTES:], presence.chunks) if answer.ok else None
        if named is not None:
            values.append(named)
    return sorted(values, key=lambda value: value.name)


def _list_keys(
    driver: ClientDriver, satellites: list[SatelliteId]
) -> Iterator[tuple[SatelliteId, bytes, ChunkPresence]]:
    """Yield satellite, key and presence of all keys, page by page."""
    after = dict.fromkeys(satellites, bytes(KEY_BYTES))
    while after:
        lists = [(at, messages.pack_list(last, MAX_KEYS_PER_PACKET // 2), at) for at, last in after.items()]
        answers = ask_all(driver, Op.LIST, lists)
        failures = [answer.report.failure for _, answer in answers if not answer.ok]
        refused = Miss.REFUSED in failures or driver.machine.counters.get("refusals_unproved") > 0
        if len(failures) == len(answers) and refused:
            raise CommandsRefused()
        for satellite, answer in answers:
            last = after.pop(satellite)
            page = read_answer(driver, answer, messages.unpack_listed)
            if page and page[-1][0] > last:  # not the end, and not a satellite that repeats itself
                after[satellite] = page[-1][0]
                yield from ((satellite, key, presence) for key, presence in page)


_ENOUGH_CLOCKS = 3  # answers to wait for: a single clock may be wrong


def synchronise_clock(driver: ClientDriver, sky: SkyMap) -> float | None:
    """PING the centre and its neighbours, to adopt their moves. Return the seconds that satellites' clocks are ahead
    (median, within half a round trip).
    """
    machine = driver.machine
    with driver.lock:
        centre = sky.centre_at(machine.moves(driver.now_s()))
        numbers = [
            machine.ask(Op.PING, b"", satellite, driver.now_s())
            for satellite in dict.fromkeys([centre, *sky.torus.neighbours(centre)])
        ]
    ahead_s: list[float] = []
    for number in numbers:
        if len(ahead_s) == _ENOUGH_CLOCKS:
            with driver.lock:
                machine.cancel(number)
        elif (finished := driver.run([number])[number]).ok:
            ahead_s.append(finished.report.clock_ahead_s)
    return statistics.median(ahead_s) if ahead_s else None
