"""Finding values in the sky without an index: ask the nearest satellite, then the rest of the box."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.index.lookup import PrefixSearch
from skymemory.protocol import messages
from skymemory.protocol.messages import MAX_KEYS_PER_PACKET, Presence
from skymemory.protocol.motion import SkyMap
from skymemory.protocol.transfer import ValueInfo
from skymemory.protocol.wire import Op
from skymemory.store.driver import ClientDriver


class Prober:
    """Asks HAS. The centre of the box holds some chunk of every value with as many chunks as the box has cells;
    of smaller values, and when the box has empty cells, it may hold none, so the others are asked too.
    """

    def __init__(
        self, driver: ClientDriver, sky: SkyMap, strategy: int, servers: int,
        can_hold: Callable[[int, int, int], bool] = lambda chunks, chunk_bytes, value_bytes: True,
    ) -> None:  # fmt: skip
        """``can_hold``: whether the constellation has room for so many chunks of a value of so many bytes."""
        self._driver = driver
        self._sky = sky
        self._placement = sky.placement(strategy, servers)
        self._can_hold = can_hold

    def find(self, keys: Sequence[bytes]) -> dict[bytes, ValueInfo]:
        """What the box knows of each key; absent keys are absent from the answer. At most two round trips."""
        box = list(dict.fromkeys(self._placement.box_satellites(self._driver.machine.moves(self._driver.now_s()))))
        centre = self._sky.centre_at(self._driver.machine.moves(self._driver.now_s()))
        found = self._ask([centre], keys)
        unknown = [key for key in keys if key not in found]
        if unknown:
            found.update(self._ask([satellite for satellite in box if satellite != centre], unknown))
        return found

    def prefix(self, keys: Sequence[bytes]) -> tuple[int, dict[bytes, ValueInfo]]:
        """The number of leading keys all present, correct with holes, and what was learned on the way."""
        search = PrefixSearch(len(keys), verify_batch=MAX_KEYS_PER_PACKET)
        known: dict[bytes, ValueInfo] = {}
        while not search.done:
            asked = search.next_probe()
            known.update(self.find([keys[position] for position in asked]))
            search.answer({position: keys[position] in known for position in asked})
        return search.result, known

    def _ask(self, satellites: Sequence[SatelliteId], keys: Sequence[bytes]) -> dict[bytes, ValueInfo]:
        machine, now_s = self._driver.machine, self._driver.now_s()
        pages = [keys[at : at + MAX_KEYS_PER_PACKET] for at in range(0, len(keys), MAX_KEYS_PER_PACKET)]
        with self._driver.lock:
            asked = {
                machine.ask(Op.HAS, messages.pack_keys(page), satellite, now_s): page
                for satellite in satellites
                for page in pages
            }
            answers = self._driver.run(asked)
        found: dict[bytes, ValueInfo] = {}
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
                    found.setdefault(key, info)
                else:
                    machine.counters.add("presences_unbelievable")
        return found

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
        key, presence.chunks, max(presence.length_bytes, 1), presence.value_bytes, presence.value_crc, tag.strategy,
        tag.servers, (tag.slot_moves, tag.plane_moves),
    )  # fmt: skip
