"""A satellite's links to its neighbours: which are alive, told to all others (LINKS), and learnt from them.

Nothing is sent while nothing is forwarded: a neighbour is asked for a sign of life only when a packet is sent to it
and it has been silent for a while. One that stays silent is declared down, the declaration is flooded, and it is asked
again now and then until it answers. A satellite that has just started greets its neighbours, who then tell it all they
know: which links are down, and how far operators have moved the box meanwhile.

A host that is late reads signs of life late. So a silence counts only while our own host was on time (``Lateness``),
and a neighbour that says how late its host is gets so much longer to answer. A new declaration is flooded at once;
where they keep coming they are held for up to a second and leave together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import MalformedPacket
from skymemory.placement.locate import Moves
from skymemory.protocol.congestion import Throttle
from skymemory.protocol.messages import Packet
from skymemory.protocol.routing import MAX_DECLARATIONS, REFRESH_S, Declaration, LinksBody, LinkState
from skymemory.protocol.satellite.overload import LATE_S, Lateness
from skymemory.protocol.wire import Address

Tell = Callable[[SatelliteId, bytes, float], None]
"""Sends a LINKS with this body to a neighbour."""

_FRESH_S = 0.2
"""A neighbour heard so lately is not asked."""
_TRIES = 4
"""So many questions without an answer, and the link is taken to be down."""
_MOST_AHEAD_S = 60.0
"""What was made further in the future is not believed."""
_SAID_LATE_S = 2.0
"""How long a neighbour's word that its host is late counts; it comes with each of its LINKS."""
_MOST_LATE_S = 1.0
"""The most by which lateness prolongs a wait; beyond it a silence does not count at all."""
_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 8.0
"""A link that is down is tried after 1, 2, 4, 8, 8 … s."""


class _Neighbour:
    """One end of one or (on a ring of two) two links."""

    __slots__ = ("bits", "deadline_s", "down", "heard_s", "late_s", "late_until_s", "our_late_s", "retry_s", "tries")

    def __init__(self) -> None:
        self.late_s = 0.0
        self.late_until_s = -math.inf
        """How late it said that its host is, and until when we believe it."""
        self.our_late_s = 0.0
        """How late our own host was when it was last asked."""
        self.bits = 0
        self.heard_s = -math.inf
        self.deadline_s = math.inf
        """When an answer is overdue; or, of one that is down, when to ask again."""
        self.tries = 0
        self.down = False
        self.retry_s = _FIRST_RETRY_S


class Neighbourhood:
    """The links of one satellite, and what it knows of all others' in ``links``."""

    def __init__(
        self,
        here: SatelliteId,
        torus: Torus,
        links: LinkState,
        pushed: Moves,
        patience_s: float,
        tell: Tell,
        lateness: Lateness | None = None,
        may_push_to: Callable[[Moves, float], bool] = lambda pushed, now_s: True,
    ) -> None:
        """``patience_s``: how long an answer from a neighbour may take. ``lateness``: our host's (default: never).
        ``may_push_to``: asked before it is believed that operators have moved the box.
        """
        self.links = links
        self.pushed = pushed
        self.pushed_at_ms = 0
        self._here = here
        self._torus = torus
        self._patience_s = patience_s
        self._tell = tell
        self._lateness = lateness or Lateness()
        self._may_push_to = may_push_to
        self._flooding = Throttle()
        self._news: dict[SatelliteId, SatelliteId | None] = {}
        """Whose declarations are still to be passed on, and the neighbour that has them already."""
        self._neighbours: dict[SatelliteId, _Neighbour] = {}
        for bit, neighbour in enumerate(torus.neighbours(here)):
            if neighbour != here:
                self._neighbours.setdefault(neighbour, _Neighbour()).bits |= 1 << bit
        self._refresh_s = math.inf

    # --- what happens on the links ---

    def heard(self, neighbour: SatelliteId, now_s: float) -> None:
        """Something came from it."""
        found = self._neighbours.get(neighbour)
        if found is None:
            return
        found.heard_s = now_s
        found.deadline_s = math.inf
        if found.down:
            found.down = False
            self._declare(now_s)
            self._tell_all_known(neighbour, now_s)

    def used(self, link: object, now_s: float) -> None:
        """Something is being sent by this link, of a neighbour or not: it had better be alive."""
        found = self._neighbours.get(link)  # type: ignore[call-overload]
        if found is not None and found.deadline_s == math.inf and found.heard_s + _FRESH_S <= now_s:
            found.tries = 0
            self._ask(link, found, now_s)  # type: ignore[arg-type]

    def greet(self, now_s: float) -> None:
        """We have just begun, and know nothing. Nobody is taken for dead who does not answer this."""
        for neighbour in self._neighbours:
            self._tell(neighbour, self._body(now_s, answer_me=True), now_s)

    def told_moves(self, pushed: Moves, now_s: float) -> None:
        """An operator has set what is added to the clock."""
        self.pushed, self.pushed_at_ms = pushed, int(now_s * 1e3)

    def receive(self, packets: Sequence[Packet], source: object, now_s: float) -> tuple[int, bool]:
        """Neighbours have told us something: how many packets are not to be believed, and whether we have learnt of a
        later push of the moves than we knew (now ``pushed``).

        Believed is only the neighbour at the other end of the link that a packet came by.
        """
        bad, before = 0, self.pushed
        for packet in packets:
            try:
                body = LinksBody.unpack(packet.body, self.links.records)
            except MalformedPacket:
                bad += 1
                continue
            if isinstance(source, SatelliteId) and packet.header.source == Address(*source):
                self._receive(body, source, now_s)
            else:
                bad += 1
        return bad, self.pushed != before

    def _receive(self, body: LinksBody, source: SatelliteId, now_s: float) -> None:
        fresh = []
        if body.late_s and (neighbour := self._neighbours.get(source)) is not None:
            neighbour.late_s, neighbour.late_until_s = body.late_s, now_s + _SAID_LATE_S
        for declaration in body.declarations:
            if declaration.origin == self._here:
                self._contradict(declaration, now_s)
            elif self.links.learn(declaration, now_s):
                fresh.append(declaration)
                self._look_around(declaration, now_s)
        later = self.pushed_at_ms < body.pushed_at_ms <= (now_s + _MOST_AHEAD_S) * 1e3
        moved = later and body.pushed != self.pushed
        if moved and not self._may_push_to(body.pushed, now_s):
            later = moved = False
        if later:
            self.pushed, self.pushed_at_ms = body.pushed, body.pushed_at_ms
        if moved:
            self._tell_all(now_s, source)
        if fresh:
            self._flood([declaration.origin for declaration in fresh], now_s, source)
        if body.answer_me:
            self._tell_all_known(source, now_s)

    def _contradict(self, declaration: Declaration, now_s: float) -> None:
        """What we said before we started anew (or what somebody made up) still goes round: outdo it, unless it is so
        far ahead that nobody believes it, and nobody would believe us.
        """
        known_ms, latest_ms = self.links.made_ms(self._here), (now_s + _MOST_AHEAD_S) * 1e3
        if declaration.down != self._bits() and known_ms < declaration.made_ms < latest_ms:
            self._declare(now_s, outdo_ms=declaration.made_ms)

    def _look_around(self, declaration: Declaration, now_s: float) -> None:
        """Who is said to be silent may be dead, and rarely alone: ask those of our neighbours that are near it."""
        for bit, silent in enumerate(self._torus.neighbours(declaration.origin)):
            if declaration.down >> bit & 1:
                for near in (silent, *self._torus.neighbours(silent)):
                    self.used(near, now_s)

    # --- time ---

    def next_timer_s(self) -> float | None:
        soonest_s = min(self._refresh_s, self.links.next_expiry_s, self.links.next_growth_s)
        if self._news:
            soonest_s = min(soonest_s, self._flooding.open_s)
        for neighbour in self._neighbours.values():
            if neighbour.deadline_s < soonest_s:
                soonest_s = neighbour.deadline_s
        return soonest_s if soonest_s < math.inf else None

    def handle_timer(self, now_s: float) -> None:
        lost = False
        late_s = self._lateness.at(now_s)
        for name, neighbour in self._neighbours.items():
            if neighbour.deadline_s > now_s:
                continue
            if neighbour.down:
                neighbour.retry_s = min(2 * neighbour.retry_s, _LAST_RETRY_S)
                self._ask(name, neighbour, now_s)
                continue
            if late_s > neighbour.our_late_s + LATE_S:
                neighbour.tries = 0  # we have become late ourselves: what was answered may still wait here
            if neighbour.tries < _TRIES:
                self._ask(name, neighbour, now_s)
            else:
                neighbour.down = lost = True
                neighbour.retry_s = _FIRST_RETRY_S
                neighbour.deadline_s = now_s + _FIRST_RETRY_S
        if lost or self._refresh_s <= now_s:
            self._declare(now_s)
        if self.links.next_expiry_s <= now_s:
            self.links.expire(now_s)
        if self.links.next_growth_s <= now_s:
            self.links.grow_anew(now_s)
        self._pass_on(now_s)

    def relieved(self, now_s: float) -> None:
        """Our host is on time again: those that are down are asked as if they had just gone."""
        for neighbour in self._neighbours.values():
            if neighbour.down:
                neighbour.retry_s = _FIRST_RETRY_S / 2
                neighbour.deadline_s = now_s

    # --- what we say ---

    def _ask(self, name: SatelliteId, neighbour: _Neighbour, now_s: float) -> None:
        neighbour.tries += 1
        neighbour.our_late_s = min(self._lateness.at(now_s), _MOST_LATE_S)
        if neighbour.down:
            wait_s = neighbour.retry_s
        else:
            its_late_s = min(neighbour.late_s, _MOST_LATE_S) if now_s < neighbour.late_until_s else 0.0
            wait_s = self._patience_s + 2 * (neighbour.our_late_s + its_late_s)
        neighbour.deadline_s = now_s + wait_s
        self._tell(name, self._body(now_s, answer_me=True), now_s)

    def _bits(self) -> int:
        return sum(neighbour.bits for neighbour in self._neighbours.values() if neighbour.down)

    def _declare(self, now_s: float, outdo_ms: int = 0) -> None:
        """Say which of our links are down now, to everybody; as later than what was made at ``outdo_ms``."""
        made_ms = max(int(now_s * 1e3), self.links.made_ms(self._here) + 1, outdo_ms + 1)
        ours = Declaration(self._here, self._bits(), made_ms)
        self._refresh_s = now_s + REFRESH_S if ours.down else math.inf
        if self.links.learn(ours, now_s, at_once=True):
            self._flood([self._here], now_s)

    def _flood(self, origins: Sequence[SatelliteId], now_s: float, source: SatelliteId | None = None) -> None:
        """What these have declared is news to our neighbours, but ``source``."""
        for origin in origins:
            self._news[origin] = source
        self._pass_on(now_s)

    def _pass_on(self, now_s: float) -> None:
        if not self._news or not self._flooding.is_open(now_s):
            return
        self._flooding.done(now_s)
        news, self._news = self._news, {}
        for name, neighbour in self._neighbours.items():
            if not neighbour.down:
                records = self.links.packed(origin for origin, source in news.items() if source != name)
                for at in range(0, len(records), MAX_DECLARATIONS):
                    self._tell(name, self._body(now_s, records[at : at + MAX_DECLARATIONS]), now_s)

    def _tell_all(self, now_s: float, source: SatelliteId) -> None:
        """How far operators have moved the box is news to our neighbours, but ``source``."""
        for name, neighbour in self._neighbours.items():
            if name != source and not neighbour.down:
                self._tell(name, self._body(now_s), now_s)

    def _tell_all_known(self, name: SatelliteId, now_s: float) -> None:
        for records in self.links.pages():
            self._tell(name, self._body(now_s, records), now_s)

    def _body(self, now_s: float, records: Sequence[bytes] = (), answer_me: bool = False) -> bytes:
        late_s = self._lateness.at(now_s)
        return LinksBody(answer_me, self.pushed, self.pushed_at_ms, late_s=late_s).pack_with(records)
