"""Prices of a request at each server beside its own prefill: decoding, evicting, and distrust, all in seconds."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

from skymemory import native
from skymemory.conductor.picker import Server
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.strategies.beliefs import AnswersDue, HitTrust
from skymemory.conductor.strategies.decode_costs import DecodeCosts
from skymemory.conductor.strategies.eviction_price import EvictionPrice
from skymemory.native.twin.queues import STALE_S
from skymemory.native.twin.ttft import NO_PRICE, PRICE, Price

GOALS = MappingProxyType({"balanced": 3.0, "ttft": 0.5, "tpot": 12.0, "e2e": math.inf})
"""Weight of a percent of the time per token, where a percent of the time to first token weighs 1; ``e2e``: each second
weighs the same.
"""
_ROW = PRICE.size // 8
_USUAL_TOKENS = 128.0
"""Of an answer, before any has ended."""
_MOST = 3.0
"""Usual answers' tokens that one is expected to have at most, whatever its limit."""


class Due(NamedTuple):
    """Ticket of an answer due, and the seconds that it was expected to take."""

    ticket: int = 0
    expected_s: float = 0.0


STREAMED = Due()


class ServerPrices:
    """A ``Price`` for each slot, kept up to date as requests come and go. ``per_token_s``: prefill at a slot."""

    def __init__(self, goal: str, table: native.PrefixTable | None, per_token_s: Callable[[int], float]) -> None:
        self._weight = GOALS[goal]
        self._per_token_s = per_token_s
        self.decoding = DecodeCosts()
        self.eviction = None if table is None else EvictionPrice(table)
        self.trust = HitTrust()
        self.due = AnswersDue()
        self.rows = array("d")
        """A ``PRICE`` per slot (``native.TtftRanker``)."""
        self.changes = 0
        self._ttft_s = 0.0
        """Recent mean of the times to first token."""
        self._others: dict[int, tuple[float, int]] = {}
        """Time of a server's last report, and the requests of other routers and clients in it."""

    def answer_tokens(self, request: Request) -> float:
        """Return the tokens of a request's answer whose time counts."""
        return min(self._counted_tokens, self._expected_tokens(request)) * request.answers

    @property
    def _counted_tokens(self) -> float:
        token_s = self.decoding.usual_s
        if math.isinf(self._weight) or not token_s:
            return self._weight
        return self._weight * self._ttft_s / token_s

    def first_byte(self, ttft_s: float) -> None:
        """Record a time to first token."""
        self._ttft_s += (ttft_s - self._ttft_s) / 64 if self._ttft_s else ttft_s

    def _expected_tokens(self, request: Request) -> float:
        usual = self.decoding.usual_tokens or _USUAL_TOKENS
        return usual if request.output_tokens is None else min(float(request.output_tokens), _MOST * usual)

    def of(self, slot: int) -> Price:
        at = slot * _ROW
        return Price(*self.rows[at : at + _ROW]) if at < len(self.rows) else NO_PRICE

    def routed(self, request: Request, server: Server, matched: int, ttft_s: float, now_s: float) -> Due:
        """Record a request sent, whose first token is expected after ``ttft_s``; return when its answer is due."""
        if self.eviction is not None:
            prompt = request.prompt
            self.eviction.sent(server.slot, prompt.tokens, matched, new_blocks(prompt, matched))
        if request.streams:
            return STREAMED
        own_s, _ = self.decoding.token_s(server.slot, self._answers_at(server, now_s), now_s)
        expected_s = ttft_s + self._expected_tokens(request) * own_s
        return Due(self.due.add(server.slot, expected_s, now_s), expected_s)

    def arrived(self, request: Request, slot: int, matched: int) -> None:
        """Record that a prompt is computed, or has failed."""
        if self.eviction is not None:
            self.eviction.arrived(slot, new_blocks(request.prompt, matched))

    def answered(self, slot: int, due: Due, seconds: float, now_s: float) -> None:
        """Record an answer that was not streamed and took ``seconds``."""
        self.due.drop(slot, due.ticket)
        self.due.came(slot, due.expected_s, seconds, now_s)

    def read_report(self, server: Server) -> None:
        self.decoding.read_report(server)
        report = server.reported
        if report is not None:
            others = max(0, report.waiting + report.running - server.in_flight - server.elsewhere)
            self._others[server.slot] = report.at_s, others

    def _answers_at(self, server: Server, now_s: float) -> int:
        at_s, others = self._others.get(server.slot, (0.0, 0))
        return server.in_flight + server.elsewhere + (others if now_s - at_s <= STALE_S else 0)

    def update(self, server: Server, usual_s: float, now_s: float) -> None:
        """Compute a server's price again. ``usual_s``: of a prefill."""
        decoding, eviction, slot = self.decoding, self.eviction, server.slot
        answers = self._answers_at(server, now_s)
        own_s, others_s = decoding.token_s(slot, answers, now_s)
        # A second of prefill holds up each answer under way; of its seconds, as many count as of its tokens.
        usual = decoding.usual_tokens or _USUAL_TOKENS
        stall = decoding.step.stall * answers * min(1.0, self._counted_tokens / usual)
        evict_s = crowd_s = 0.0
        if eviction is not None:
            evict_s = eviction.lost_share(slot) * self._per_token_s(slot)
            crowd_s = eviction.crowding(slot) * usual_s
        missing = slot + 1 - len(self.rows) // _ROW
        if missing > 0:
            self.rows.extend(array("d", NO_PRICE) * missing)
        # Beyond what a token takes at an idle server, which a server without a row is taken for.
        token_s = own_s + others_s - decoding.step.token_s(1.0, 0.0)
        price = (token_s, stall, evict_s, crowd_s, self.trust.of(slot), self.due.first_s(slot))
        self.rows[slot * _ROW : (slot + 1) * _ROW] = array("d", price)
        self.changes += 1

    def forget(self, slot: int) -> None:
        for part in (self.decoding, self.trust, self.due):
            part.forget(slot)
        if self.eviction is not None:
            self.eviction.forget(slot)
        self._others.pop(slot, None)
        self.changes += 1
        if slot * _ROW < len(self.rows):
            self.rows[slot * _ROW : (slot + 1) * _ROW] = array("d", NO_PRICE)


def new_blocks(prompt: Prompt, matched: int) -> int:
    return max(0, len(prompt.blocks) - int(matched / prompt.block_tokens))
