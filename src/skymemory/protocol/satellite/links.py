"""Handler of LINKS: which links are alive; declared to all satellites, and learned from them.

A neighbour is probed only when a packet is sent to it after a silence. After ``_TRIES`` unanswered probes, the link is
declared down, and probed at intervals. A starting satellite greets its neighbours, which answer with all they know:
dead links, and operators' moves. Timeouts are longer while either host is late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import MalformedPacket
from skymemory.placement.locate import Moves
from skymemory.protocol.clock import MOST_PUSHED
from skymemory.protocol.congestion import Throttle
from skymemory.protocol.satellite.overload import LATE_S
from skymemory.protocol.satellite.routing import MAX_DECLARATIONS, REFRESH_S, Declaration, LinksBody
from skymemory.protocol.satellite.state import SatelliteState
from skymemory.protocol.wire import Address, Packet, microseconds

_FRESH_S = 0.2
_TRIES = 4
_MOST_AHEAD_S = 60.0
_REPORTED_LATE_S = 2.0
_MOST_LATE_S = 1.0
_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 8.0


class _Neighbour:
    """Liveness of a neighbour. ``bits``: its link in a declaration, or two links on a ring of two."""

    __slots__ = ("bits", "deadline_s", "down", "heard_s", "late_s", "late_until_s", "our_late_s", "retry_s", "tries")

    def __init__(self) -> None:
        self.late_s = 0.0
        self.late_until_s = -math.inf
        """Reported lateness of its host, and its end."""
        self.our_late_s = 0.0
        self.bits = 0
        self.heard_s = -math.inf
        self.deadline_s = math.inf
        """Time at which the answer is overdue, or the next probe due."""
        self.tries = 0
        self.down = False
        self.retry_s = _FIRST_RETRY_S


class Neighbours:
    def __init__(self, state: SatelliteState) -> None:
        self.links = state.links
        self.pushed_at_ms = 0
        self._here = state.here
        self._torus = state.sky.torus
        self._timeout_s = state.config.neighbour_timeout_s
        self._locator = state.locator
        self._outbox = state.outbox
        self._lateness = state.lateness
        self._flood_throttle = Throttle()
        self._origins_to_flood: dict[SatelliteId, SatelliteId | None] = {}
        self._neighbours: dict[SatelliteId, _Neighbour] = {}
        for bit, neighbour in enumerate(self._torus.neighbours(self._here)):
            if neighbour != self._here:
                self._neighbours.setdefault(neighbour, _Neighbour()).bits |= 1 << bit
        self._next_refresh_s = math.inf

    @property
    def pushed(self) -> Moves:
        return self._locator.pushed

    # --- Traffic on the links ---

    def on_packet_received(self, neighbour: SatelliteId, now_s: float) -> None:
        peer = self._neighbours.get(neighbour)
        if peer is None:
            return
        peer.heard_s = now_s
        peer.deadline_s = math.inf
        if peer.down:
            peer.down = False
            self._declare(now_s)
            self._send_all_known(neighbour, now_s)

    def on_packet_sent(self, link: object, now_s: float) -> None:
        """Probe the neighbour on this link, unless recently heard."""
        neighbour = self._neighbours.get(link)  # type: ignore[call-overload]
        if neighbour is not None and neighbour.deadline_s == math.inf and neighbour.heard_s + _FRESH_S <= now_s:
            neighbour.tries = 0
            self._probe(link, neighbour, now_s)  # type: ignore[arg-type]

    def greet(self, now_s: float) -> None:
        """Ask all neighbours for what they know."""
        for neighbour in self._neighbours:
            self._outbox.send_links(neighbour, self._pack_body(now_s, answer_me=True), now_s)

    def receive(self, packets: Sequence[Packet], source: object, now_s: float) -> tuple[int, bool]:
        """Process LINKS of the link's neighbour. Return the number of invalid packets, and True if an operator has
        pushed the box.
        """
        bad, before = 0, self._locator.pushed
        for packet in packets:
            try:
                body = LinksBody.unpack(packet.body, self.links.records)
            except MalformedPacket:
                bad += 1
                continue
            if isinstance(source, SatelliteId) and packet.header.source == Address(*source):
                self._receive_body(body, source, now_s)
            else:
                bad += 1
        return bad, self._locator.pushed != before

    def _receive_body(self, body: LinksBody, source: SatelliteId, now_s: float) -> None:
        """Learn a neighbour's declarations and operator's moves, and flood what is new."""
        new_declarations = []
        if body.late_s and (neighbour := self._neighbours.get(source)) is not None:
            neighbour.late_s, neighbour.late_until_s = body.late_s, now_s + _REPORTED_LATE_S
        for declaration in body.declarations:
            if declaration.origin == self._here:
                self._contradict(declaration, now_s)
            elif self.links.learn(declaration, now_s):
                new_declarations.append(declaration)
                self._probe_around(declaration, now_s)
        # The latest push wins; a push that would move the box too far or too often is ignored.
        later = self.pushed_at_ms < body.pushed_at_ms <= (now_s + _MOST_AHEAD_S) * 1e3
        moved = later and body.pushed != self._locator.pushed
        if moved and not self._locator.may_push_to(body.pushed, now_s, MOST_PUSHED):
            later = moved = False
        if later:
            self.pushed_at_ms = body.pushed_at_ms
        if moved:
            self._locator.push_to(body.pushed)
            self._send_push_to_others(now_s, source)
        if new_declarations:
            self._flood([declaration.origin for declaration in new_declarations], now_s, source)
        if body.answer_me:
            self._send_all_known(source, now_s)

    def _contradict(self, declaration: Declaration, now_s: float) -> None:
        """Replace an outdated or forged declaration in this satellite's name."""
        known_ms, latest_ms = self.links.made_ms(self._here), (now_s + _MOST_AHEAD_S) * 1e3
        if declaration.down != self._get_down_bits() and known_ms < declaration.made_ms < latest_ms:
            self._declare(now_s, outdo_ms=declaration.made_ms)

    def _probe_around(self, declaration: Declaration, now_s: float) -> None:
        """Probe around silent satellites: a satellite rarely dies alone."""
        for bit, silent in enumerate(self._torus.neighbours(declaration.origin)):
            if declaration.down >> bit & 1:
                for near in (silent, *self._torus.neighbours(silent)):
                    self.on_packet_sent(near, now_s)

    # --- Timers ---

    def next_timer_s(self) -> float:
        soonest_s = min(self._next_refresh_s, self.links.next_expiry_s, self.links.next_growth_s)
        if self._origins_to_flood:
            soonest_s = min(soonest_s, self._flood_throttle.open_s)
        for neighbour in self._neighbours.values():
            if neighbour.deadline_s < soonest_s:
                soonest_s = neighbour.deadline_s
        return soonest_s

    def handle_timer(self, now_s: float) -> None:
        """Probe overdue neighbours again or declare their links down, and flood and expire declarations."""
        lost = False
        late_s = self._lateness.at(now_s)
        for name, neighbour in self._neighbours.items():
            if neighbour.deadline_s > now_s:
                continue
            if neighbour.down:
                neighbour.retry_s = min(2 * neighbour.retry_s, _LAST_RETRY_S)
                self._probe(name, neighbour, now_s)
                continue
            if late_s > neighbour.our_late_s + LATE_S:
                neighbour.tries = 0  # the own host has become late: answers may still wait here
            if neighbour.tries < _TRIES:
                self._probe(name, neighbour, now_s)
            else:
                neighbour.down = lost = True
                neighbour.retry_s = _FIRST_RETRY_S
                neighbour.deadline_s = now_s + _FIRST_RETRY_S
        if lost or self._next_refresh_s <= now_s:
            self._declare(now_s)
        if self.links.next_expiry_s <= now_s:
            self.links.expire(now_s)
        if self.links.next_growth_s <= now_s:
            self.links.discard_trees(now_s)
        self._send_declarations(now_s)

    def probe_down(self, now_s: float) -> None:
        for neighbour in self._neighbours.values():
            if neighbour.down:
                neighbour.retry_s = _FIRST_RETRY_S / 2
                neighbour.deadline_s = now_s

    # --- Messages ---

    def _probe(self, name: SatelliteId, neighbour: _Neighbour, now_s: float) -> None:
        """Send LINKS that ask for an answer, with a timeout that allows for lateness."""
        neighbour.tries += 1
        neighbour.our_late_s = min(self._lateness.at(now_s), _MOST_LATE_S)
        if neighbour.down:
            wait_s = neighbour.retry_s
        else:
            reported_late_s = min(neighbour.late_s, _MOST_LATE_S) if now_s < neighbour.late_until_s else 0.0
            wait_s = self._timeout_s + 2 * (neighbour.our_late_s + reported_late_s)
        neighbour.deadline_s = now_s + wait_s
        self._outbox.send_links(name, self._pack_body(now_s, answer_me=True), now_s)

    def _get_down_bits(self) -> int:
        return sum(neighbour.bits for neighbour in self._neighbours.values() if neighbour.down)

    def _declare(self, now_s: float, outdo_ms: int = 0) -> None:
        """Flood the own dead links, with a time later than ``outdo_ms``."""
        # Later than all its earlier declarations, even if the clock was set back.
        made_ms = max(microseconds(now_s) // 1000, self.links.made_ms(self._here) + 1, outdo_ms + 1)
        ours = Declaration(self._here, self._get_down_bits(), made_ms)
        self._next_refresh_s = now_s + REFRESH_S if ours.down else math.inf
        if self.links.learn(ours, now_s, at_once=True):
            self._flood([self._here], now_s)

    def _flood(self, origins: Sequence[SatelliteId], now_s: float, source: SatelliteId | None = None) -> None:
        for origin in origins:
            self._origins_to_flood[origin] = source
        self._send_declarations(now_s)

    def _send_declarations(self, now_s: float) -> None:
        if not self._origins_to_flood or not self._flood_throttle.is_open(now_s):
            return
        self._flood_throttle.done(now_s)
        to_flood, self._origins_to_flood = self._origins_to_flood, {}
        for name, neighbour in self._neighbours.items():
            if not neighbour.down:
                records = self.links.packed(origin for origin, source in to_flood.items() if source != name)
                for at in range(0, len(records), MAX_DECLARATIONS):
                    self._outbox.send_links(name, self._pack_body(now_s, records[at : at + MAX_DECLARATIONS]), now_s)

    def _send_push_to_others(self, now_s: float, source: SatelliteId) -> None:
        for name, neighbour in self._neighbours.items():
            if name != source and not neighbour.down:
                self._outbox.send_links(name, self._pack_body(now_s), now_s)

    def _send_all_known(self, name: SatelliteId, now_s: float) -> None:
        for records in self.links.pages():
            self._outbox.send_links(name, self._pack_body(now_s, records), now_s)

    def _pack_body(self, now_s: float, records: Sequence[bytes] = (), answer_me: bool = False) -> bytes:
        late_s = self._lateness.at(now_s)
        return LinksBody(answer_me, self._locator.pushed, self.pushed_at_ms, late_s=late_s).pack_with(records)
