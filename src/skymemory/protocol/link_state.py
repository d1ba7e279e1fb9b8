"""Which links between satellites are down, as those at their ends have said, and the shortest way round them.

Every satellite declares its own dead links; a declaration is newer than another of the same satellite by the time at
which it was made. A satellite is dead to the others when all its neighbours have declared their link to it down: so the
dead need not say anything. Nothing is known of a link that nobody declares: it is taken to be up.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.protocol.messages import Buffer
from skymemory.protocol.wire import MAX_MOVES, Address

LIFETIME_S = 200.0
"""A declaration that is not repeated for so long is forgotten: whoever made it may be dead, and the link up again."""
REFRESH_S = 60.0
"""A satellite with a dead link says so again this often."""
MAX_DECLARATIONS = 360
"""Of one packet, which so stays as small as one with a chunk of the default size."""
_MOST_AHEAD_MS = 60_000
"""Declarations from further in the future are not believed: no later one would ever be newer."""

_LINKS = struct.Struct(">HBBiiQ")
_DECLARATION = struct.Struct(">IBBHQ")
_ANSWER_ME = 0x01


class Declaration(NamedTuple):
    """The dead links of ``origin``: bit i of ``down`` is the link to neighbour i, in the order of ``Torus.neighbours``.

    ``made_ms`` is Unix time.
    """

    origin: SatelliteId
    down: int
    made_ms: int


class LinksBody(NamedTuple):
    """Body of LINKS: what a satellite tells a neighbour.

    ``pushed`` are the moves that operators added to the clock, ``pushed_at_ms`` when they did (0: before all began).
    """

    answer_me: bool
    pushed: tuple[int, int]
    pushed_at_ms: int
    declarations: Sequence[Declaration] = ()

    def pack(self) -> bytes:
        if len(self.declarations) > MAX_DECLARATIONS:
            raise InvalidInput(f"{len(self.declarations)} declarations: expected {MAX_DECLARATIONS} at most")
        records = [
            _DECLARATION.pack(Address(*origin).pack(), down, 0, 0, made_ms)
            for origin, down, made_ms in self.declarations
        ]
        flags = _ANSWER_ME if self.answer_me else 0
        return _LINKS.pack(len(records), flags, 0, *self.pushed, self.pushed_at_ms) + b"".join(records)

    @classmethod
    def unpack(cls, body: Buffer) -> LinksBody:
        """Raises ``MalformedPacket`` for a body that contradicts itself."""
        if len(body) < _LINKS.size:
            raise MalformedPacket(f"LINKS of {len(body)} bytes: expected {_LINKS.size} at least")
        count, flags, _, slot_moves, plane_moves, pushed_at_ms = _LINKS.unpack_from(body)
        if count > MAX_DECLARATIONS or len(body) != _LINKS.size + count * _DECLARATION.size:
            raise MalformedPacket(f"LINKS of {count} declarations in {len(body)} bytes")
        if max(abs(slot_moves), abs(plane_moves)) > MAX_MOVES:
            raise MalformedPacket(f"{slot_moves} and {plane_moves} moves: expected {MAX_MOVES} at most")
        declarations = []
        for address, down, _, _, made_ms in _DECLARATION.iter_unpack(body[_LINKS.size :]):
            origin = Address.unpack(address)
            declarations.append(Declaration(SatelliteId(origin.plane, origin.slot), down & 0xF, made_ms))
        return cls(bool(flags & _ANSWER_ME), (slot_moves, plane_moves), pushed_at_ms, declarations)


class LinkState:
    """What is known of the links of a torus. Holds one declaration a satellite at most."""

    def __init__(self, torus: Torus) -> None:
        self._torus = torus
        self._declared: dict[SatelliteId, Declaration] = {}
        self._down: set[tuple[SatelliteId, SatelliteId]] = set()
        self._onward: dict[tuple[SatelliteId, SatelliteId], SatelliteId | None] = {}
        self.satellites_searched = 0
        """Satellites looked at so far to find ways: work that nothing sent or received shows."""
        self._next_expiry_s: float | None = math.inf
        """None: to be worked out when somebody asks, which is more often than it changes."""

    @property
    def clear(self) -> bool:
        """Nothing is known to be down: the shortest way is the greedy one."""
        return not self._down

    def declared(self) -> list[Declaration]:
        """What is known, to be told to others."""
        return list(self._declared.values())

    def made_ms(self, origin: SatelliteId) -> int:
        """When its last known declaration was made; 0 if none is known."""
        found = self._declared.get(origin)
        return found.made_ms if found is not None else 0

    def learn(self, declaration: Declaration, now_s: float) -> bool:
        """Take a declaration; False if it is not of this torus, no news, too old, or from the future."""
        if declaration.origin not in self._torus or declaration.made_ms <= self.made_ms(declaration.origin):
            return False
        age_ms = now_s * 1e3 - declaration.made_ms
        if not -_MOST_AHEAD_MS <= age_ms < LIFETIME_S * 1e3:
            return False
        before = self._declared.get(declaration.origin)
        self._declared[declaration.origin] = declaration
        self._next_expiry_s = None
        if before is None or before.down != declaration.down:
            self._work_out()
        return True

    def expire(self, now_s: float) -> None:
        """Forget what nobody has repeated."""
        old = [origin for origin, declared in self._declared.items() if _end_s(declared) <= now_s]
        for origin in old:
            del self._declared[origin]
        if old:
            self._next_expiry_s = None
            self._work_out()

    @property
    def next_expiry_s(self) -> float:
        """When ``expire`` has something to forget; infinite: never."""
        if self._next_expiry_s is None:
            self._next_expiry_s = min(map(_end_s, self._declared.values()), default=math.inf)
        return self._next_expiry_s

    def is_up(self, here: SatelliteId, neighbour: SatelliteId) -> bool:
        return (here, neighbour) not in self._down

    def onward(self, here: SatelliteId, there: SatelliteId, greedy: SatelliteId) -> SatelliteId | None:
        """The neighbour of ``here`` that a packet for ``there`` goes to: ``greedy`` where that is on a shortest way.

        With no way known, what is known may be old: then ``greedy`` has to do, as long as its link is up; None if not.
        """
        wanted = (here, there)
        if wanted not in self._onward:
            if len(self._onward) > self._torus.size:
                self._onward.clear()
            self._onward[wanted] = self._search(here, there, greedy)
        found = self._onward[wanted]
        if found is None and self.is_up(here, greedy):
            return greedy
        return found

    def _search(self, here: SatelliteId, there: SatelliteId, greedy: SatelliteId) -> SatelliteId | None:
        """Breadth-first from ``there``: when ``here`` is reached, all neighbours that are nearer have been."""
        hops = {there: 0}
        queue = deque([there])
        while queue and here not in hops:
            at = queue.popleft()
            for neighbour in self._torus.neighbours(at):
                if neighbour not in hops and self.is_up(at, neighbour):
                    hops[neighbour] = hops[at] + 1
                    queue.append(neighbour)
        self.satellites_searched += len(hops)
        if here not in hops:
            return None
        nearer = [
            neighbour
            for neighbour in self._torus.neighbours(here)
            if hops.get(neighbour) == hops[here] - 1 and self.is_up(here, neighbour)
        ]
        return greedy if greedy in nearer else nearer[0]

    def _work_out(self) -> None:
        self._onward.clear()
        self._down.clear()
        self.satellites_searched += len(self._declared)
        for origin, down, _ in self._declared.values():
            for bit, neighbour in enumerate(self._torus.neighbours(origin)):
                if down >> bit & 1:
                    self._down.update(((origin, neighbour), (neighbour, origin)))


def _end_s(declaration: Declaration) -> float:
    """When it is forgotten, if its satellite does not repeat it."""
    return declaration.made_ms / 1e3 + LIFETIME_S
