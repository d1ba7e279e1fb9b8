"""Seconds per output token at each server, learnt from the answers that end there."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np

from skymemory.conductor.picker import DecodeTotals, Server

WINDOW_S = 60.0
"""Time over which a server's share of prefilling is measured, with exponential weights."""
LEAST_TOKENS = 8
"""Output tokens below which an answer says little of a token's time."""
MOST_BUSY = 0.8


class Mark(NamedTuple):
    """Counters of a server when an answer began there."""

    at_s: float
    answers_s: float
    prefilled_s: float


class Step(NamedTuple):
    """Seconds per output token: ``base_s + each_s · answers under way + stall · seconds of prefill meanwhile``."""

    base_s: float = 0.0
    each_s: float = 0.0
    stall: float = 0.0

    def token_s(self, answers: float, prefilled_s: float) -> float:
        return self.base_s + self.each_s * answers + self.stall * prefilled_s


Seen = tuple[float, float, float]
"""Mean answers under way, seconds of prefill per token, and seconds per token."""
KEPT = 16
"""Observations per server."""


@dataclass(slots=True)
class _Decoding:
    """Answers under way at a server. ``answers_s`` and ``prefilled_s`` only grow: sums over time since the start."""

    answers: int = 0
    answers_s: float = 0.0
    prefilled_s: float = 0.0
    at_s: float = 0.0
    recent_s: float = 0.0
    """Seconds of prefill, with exponential weights over ``WINDOW_S``."""
    seen: deque[Seen] = field(default_factory=lambda: deque(maxlen=KEPT))
    factor: float = 1.0
    totals: DecodeTotals | None = None

    def advance(self, now_s: float) -> None:
        passed_s = now_s - self.at_s
        if passed_s > 0:
            self.answers_s += passed_s * self.answers
            self.recent_s *= math.exp(-passed_s / WINDOW_S)
            self.at_s = now_s


class DecodeCosts:
    """Model of a server's steps, common to all but for a factor of those that differ.

    A token takes longer the more answers are under way, and if prefills share its steps (chunked prefill) or hold them
    up. Without evidence nothing takes longer.
    """

    EVERY, ENOUGH = 8, 4
    ALIKE = 0.15
    """Deviation from the common model within which a server follows it."""

    def __init__(self) -> None:
        self.step = Step()
        self._servers: dict[int, _Decoding] = {}
        self._count = 0
        self._is_streamed = False
        self.usual_tokens = 0.0
        """Recent mean of an answer's tokens; 0: none has ended."""
        self.usual_s = 0.0
        """Recent mean of a token's time."""

    def began(self, slot: int, now_s: float) -> Mark:
        server = self._servers.setdefault(slot, _Decoding(at_s=now_s))
        server.advance(now_s)
        server.answers += 1
        return Mark(now_s, server.answers_s, server.prefilled_s)

    def ended(
        self, slot: int, mark: Mark, output_tokens: int | None, now_s: float, unseen_s: float | None = None
    ) -> None:
        """Learn from an answer. ``unseen_s``: estimated time to the first token, of one that was not streamed; such
        answers count until a streamed one has ended.
        """
        server = self._servers.get(slot)
        if server is None:
            return
        server.advance(now_s)
        server.answers = max(0, server.answers - 1)
        if output_tokens is None:
            return
        self.usual_tokens += (output_tokens - self.usual_tokens) * (0.05 if self.usual_tokens else 1.0)
        whole_s = now_s - mark.at_s
        seconds = whole_s - (unseen_s or 0.0)
        if output_tokens < LEAST_TOKENS or seconds <= 0:
            return
        if unseen_s is None and not self._is_streamed:
            self._is_streamed = True
            for other in self._servers.values():
                other.seen.clear()
        if unseen_s is None or not self._is_streamed:
            answers = (server.answers_s - mark.answers_s) / whole_s
            steps = output_tokens - 1
            prefilled_s = server.prefilled_s - mark.prefilled_s if unseen_s is None else 0.0
            self._observe(server, answers, prefilled_s / steps, seconds / steps)

    def prefilled(self, slot: int, seconds: float, now_s: float) -> None:
        """Record seconds of prefill at a server."""
        server = self._servers.setdefault(slot, _Decoding(at_s=now_s))
        server.advance(now_s)
        server.prefilled_s += seconds
        server.recent_s += seconds

    def read_report(self, server: Server) -> None:
        """Learn from the time between tokens that an engine reports, while no stream has shown it."""
        report = server.reported
        if report is None or report.decodes is None:
            return
        state = self._servers.setdefault(server.slot, _Decoding(at_s=report.at_s))
        before, state.totals = state.totals, report.decodes
        if before is None or self._is_streamed:
            return
        tokens, seconds = report.decodes.tokens - before.tokens, report.decodes.seconds - before.seconds
        if tokens >= LEAST_TOKENS and seconds > 0:  # else it has restarted
            self._observe(state, float(max(1, report.running)), 0.0, seconds / tokens)

    def token_s(self, slot: int, answers: float, now_s: float) -> tuple[float, float]:
        """Return the seconds per token of one more answer beside ``answers``, and those by which it delays them all."""
        server = self._servers.get(slot)
        step, factor, busy = self.step, 1.0, 0.0
        if server is not None:
            server.advance(now_s)
            factor, busy = server.factor, min(MOST_BUSY, step.stall * server.recent_s / WINDOW_S)
        # While prefilling takes a share of the time, steps stretch.
        stretch = factor / (1.0 - busy)
        return step.token_s(answers + 1.0, 0.0) * stretch, step.each_s * answers * stretch

    def forget(self, slot: int) -> None:
        self._servers.pop(slot, None)

    def _observe(self, server: _Decoding, answers: float, prefilled_s: float, token_s: float) -> None:
        server.seen.append((answers, prefilled_s, token_s))
        self._count += 1
        self.usual_s += (token_s - self.usual_s) * (0.05 if self.usual_s else 1.0)
        if self._count <= self.EVERY or not self._count % max(self.EVERY, len(self._servers)):
            # As many observations of each server: one that is slow ends few answers.
            self.step = fit_steps([seen for one in self._servers.values() for seen in one.seen])
        if len(server.seen) >= self.ENOUGH:
            step = self.step
            factor = median(taken_s / max(1e-9, step.token_s(*terms)) for *terms, taken_s in server.seen)
            server.factor = 1.0 if abs(factor - 1.0) <= self.ALIKE else factor


def fit_steps(seen: Sequence[Seen]) -> Step:
    """Fit a ``Step`` with no negative part by least squares. What the observations do not tell apart is ``base_s``."""
    rows = np.array(seen, dtype=np.float64)
    columns = np.column_stack([np.ones(len(rows)), rows[:, :2]])
    scales = np.maximum(columns.std(axis=0), 1e-12)
    # One observation's weight against each dependence.
    doubts = np.diag([0.0, scales[1], scales[2]])
    left, right = np.vstack([columns, doubts]), np.concatenate([rows[:, 2], np.zeros(3)])
    used = [0, *(at for at in (1, 2) if columns[:, at].std() > 1e-9)]
    while True:
        parts, *_ = np.linalg.lstsq(left[:, used], right, rcond=None)
        worst = int(np.argmin(parts))
        if parts[worst] >= 0 or len(used) == 1:
            break
        del used[worst]
    found = [0.0, 0.0, 0.0]
    for at, part in zip(used, parts.tolist(), strict=True):
        found[at] = max(0.0, part)
    return Step(*found)
