"""Ranking of servers by time to first token, equal to the compiled ranking to the last digit. For each server
``TtftRanker.rank``

1. matches the prompt's blocks, held and under way (``prefix``, ``queues``);
2. estimates waiting (``queues``) and computing (``prefill_s`` by a fitted curve);
3. adds the price of delaying later requests (``DelayPrice``, ``delays_s``);
4. adds the prices of decoding and evicting (``Price``);
5. sets back servers that have had their share (``ShareGuard``).
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from skymemory.native.twin.prefix import PrefixTable
from skymemory.native.twin.queues import Blocks, PrefillQueues, Report, Server, UnderWay, check_slot

if TYPE_CHECKING:
    from typing_extensions import Buffer


CROWDED = 2.0
HOT = 2
"""Chains per server within which the longest match uses what counts as held everywhere: half of its share."""
SET_BACK_S = 1e9
FIGURES = struct.Struct("=dddqq")
"""Per server: seconds of waiting, seconds of computing, seconds of its price, tokens matched, blocks held."""
PRICE = struct.Struct("=6d")
CURVE = struct.Struct("=ddd")
"""Fixed seconds, seconds per computed token, and their rise per attended token (counted twice)."""


class Price(NamedTuple):
    """What a request costs at a server beside its own prefill (``PRICE``)."""

    token_s: float = 0.0
    """Seconds per token of the answer: its own, and those by which it delays others."""
    stall: float = 0.0
    """Delay of the answers under way, per second of prefill."""
    evict_s: float = 0.0
    """Seconds per token that is new there, to compute again what it evicts."""
    crowd_s: float = 0.0
    """Seconds for a prompt that is wholly new there, for what its next turns will evict."""
    trust: float = 1.0
    """Part of the tokens believed there that it really has."""
    due_s: float = math.inf
    """Time at which its oldest unanswered request was to be answered."""

    def of(self, work_s: float, tokens: int, new_tokens: int, answer_tokens: float) -> float:
        """Return the price of ``work_s`` of prefill of ``tokens``, of which some are new there, and of an answer."""
        share = new_tokens / tokens if tokens else 0.0
        return answer_tokens * self.token_s + work_s * self.stall + new_tokens * self.evict_s + share * self.crowd_s

    def late_s(self, now_s: float) -> float:
        return max(0.0, now_s - self.due_s)


NO_PRICE = Price()
Ranked = tuple[tuple[int, ...], tuple[int, ...], int, bytes, bytes]
"""Positions of the best; of those set back; the best match if too short to follow, else 0; scores (doubles);
``FIGURES``.
"""


class DelayPrice:
    """Rate of ``delays_s``, from recent requests and their work (exponential, over ``window_s``). Servers count as
    ``most_busy`` busy at most.
    """

    def __init__(self, weight: float = 0.3, window_s: float = 60.0, most_busy: float = 0.9) -> None:
        if weight < 0 or not window_s > 0 or not 0 <= most_busy < 1:
            raise ValueError("a price has a weight of 0 or more, a window over 0 s, and is less than 1 busy")
        self._weight, self._window_s, self._most_busy = weight, window_s, most_busy
        self._requests = self._work_s = 0.0
        self._at_s = -math.inf

    def sent(self, work_s: float, now_s: float) -> None:
        decay = self._get_decay(now_s)
        self._requests, self._work_s = self._requests * decay + 1.0, self._work_s * decay + work_s
        self._at_s = max(self._at_s, now_s)

    def rate(self, servers: int, now_s: float) -> float:
        """Return the delay of later requests (s) per second of work and second of queue, at any of ``servers``
        (1/s).
        """
        if servers < 1:
            raise ValueError("a rate at less than one server")
        share = self._get_decay(now_s) / (self._window_s * servers)
        busy = min(self._work_s * share, self._most_busy)
        return self._weight * self._requests * share / (1.0 - busy)

    def _get_decay(self, now_s: float) -> float:
        return math.exp(-max(0.0, now_s - self._at_s) / self._window_s)


class TtftRanker:
    """Ranker of servers. A match must exceed ``min_tokens`` tokens and ``min_ratio`` of the prompt to be followed."""

    def __init__(
        self, queues: PrefillQueues, guard: ShareGuard, under_way: UnderWay, min_tokens: int, min_ratio: float
    ) -> None:
        self._queues, self._guard, self._under_way = queues, guard, under_way
        self._min_tokens, self._min_ratio = min_tokens, min_ratio
        self._heard: dict[int, Report] = {}

    def rank(
        self,
        held: PrefixTable | Sequence[int],
        blocks: Blocks,
        tokens: int,
        block_tokens: float,
        servers: Sequence[Server],
        now_s: float,
        rate: float,
        curves: Buffer,
        prices: Buffer,
        answer_tokens: float,
        hear: Callable[[list[Any]], object],
    ) -> Ranked:
        """Rank ``servers`` for a prompt. ``held``: the table to match ``blocks`` in, or each server's number of them.
        ``curves``: a ``CURVE`` for all slots, then optionally for each (NaN: the first applies). ``prices``: a
        ``PRICE`` for each slot, as far as there are some. ``hear`` is called with servers that have a new report.
        """
        if not servers:
            raise ValueError("no servers to rank")
        if not 0 <= tokens <= 1 << 52 or not 0 <= block_tokens <= 1e15:
            raise ValueError(f"a prompt of {tokens} tokens in blocks of {block_tokens}")
        if new := [server for server in servers if self._is_new(server)]:
            hear(new)
        # 1. Matches: blocks held, or under way (they will be held once that prompt is computed). A match that is too
        #    short to follow counts as none for all servers: spreading the load is worth more.
        slots = [server.slot for server in servers]
        view = memoryview(cast("Buffer", blocks)).cast("B")
        count = len(view) // 8
        if not isinstance(held, PrefixTable):
            known = list(held)
            if len(known) != len(slots):
                raise ValueError(f"{len(known)} numbers of blocks for {len(slots)} servers")
            if min(known) < 0:
                raise ValueError("held: expected numbers of blocks")
        else:
            known = held.match(view, slots) if count else [0] * len(slots)
        under_way = self._under_way.depths(view, slots) if count else []
        reach = list(map(max, known, under_way)) if under_way else known
        priced = prices_of(prices, slots)
        matched = [
            min(tokens, int(blocks * block_tokens * price.trust)) if blocks else 0
            for blocks, price in zip(reach, priced, strict=True)
        ]
        # Leading tokens that are asked for so often that each server will have them: computing them once more pays.
        hot, best_at = 0, known.index(max(known))
        if isinstance(held, PrefixTable) and known[best_at]:
            blocks_held = view[: 8 * known[best_at]]
            hot = min(tokens, int(held.used_every(slots[best_at], blocks_held, HOT * len(slots)) * block_tokens))
        unworthy = 0
        best_match = max(matched)
        if best_match and not (best_match > self._min_tokens and best_match > self._min_ratio * tokens):
            unworthy = best_match
        # 2. to 4. Seconds: waiting, computing, and the price of delaying later requests. Lower is better: scores are
        # negative.
        lines = list(CURVE.iter_unpack(curves))
        prefills = [
            prefill_s(_curve(lines, slot), tokens, 0 if unworthy else cached)
            for slot, cached in zip(slots, matched, strict=True)
        ]
        waits = [
            wait_s + price.late_s(now_s)
            for wait_s, price in zip(self._queues.waits_s(servers, now_s), priced, strict=True)
        ]
        scored = prefills
        if hot and not unworthy:
            scored = [
                prefill_s(_curve(lines, slot), tokens, hot) if cached < hot else seconds
                for slot, cached, seconds in zip(slots, matched, prefills, strict=True)
            ]
        delays = delays_s(waits, scored, self._queues.usual_s, rate)
        costs = [
            price.of(work_s, tokens, tokens - (0 if unworthy else cached), answer_tokens)
            for price, work_s, cached in zip(priced, scored, matched, strict=True)
        ]
        scores = [-(waits[at] + scored[at]) - delays[at] - costs[at] for at in range(len(slots))]
        # 5. The guard may set back the best servers, repeatedly; the caller chooses among ties for the best.
        held_back = self._hold_back(scores, slots, now_s)
        best = max(scores)
        tied = tuple(at for at, score in enumerate(scores) if score == best)
        figures = b"".join(map(FIGURES.pack, waits, prefills, costs, matched, known))
        return tied, held_back, unworthy, struct.pack(f"={len(scores)}d", *scores), figures

    def forget(self, slot: int) -> None:
        self._heard.pop(slot, None)

    def _is_new(self, server: Server) -> bool:
        report = server.reported
        if report is None or self._heard.get(server.slot) is report:
            return False
        self._heard[server.slot] = report
        return True

    def _hold_back(self, scores: list[float], slots: Sequence[int], now_s: float) -> tuple[int, ...]:
        """Lower the scores of the best servers that had their share, until the best has not. Return their positions."""
        held_back: list[int] = []
        while len(held_back) < len(slots):
            best = max(scores)
            if best < -SET_BACK_S / 2:
                break
            over = [
                at
                for at, score in enumerate(scores)
                if score == best and self._guard.over(slots[at], len(slots), now_s)
            ]
            if not over:
                break
            for at in over:
                scores[at] -= SET_BACK_S
            held_back += over
        return tuple(held_back)


def prices_of(prices: Buffer, slots: Sequence[int]) -> list[Price]:
    """Return the price at each of ``slots``: a row of the buffer, or none."""
    rows = memoryview(prices).cast("B")
    if len(rows) % PRICE.size:
        raise ValueError(f"prices: {len(rows)} bytes are no rows of {PRICE.size}")
    known = len(rows) // PRICE.size
    found = [Price(*PRICE.unpack_from(rows, slot * PRICE.size)) if slot < known else NO_PRICE for slot in slots]
    if not all(0.0 <= price.trust <= 1.0 for price in found):
        raise ValueError("prices: expected a trust of 0 to 1")
    return found


def _curve(curves: Sequence[Curve], slot: int) -> Curve:
    own = curves[slot + 1] if slot + 1 < len(curves) else curves[0]
    return curves[0] if math.isnan(own[0]) else own


def delays_s(waits_s: Sequence[float], works_s: Sequence[float], usual_s: float, rate: float) -> list[float]:
    """Return the seconds that later requests wait longer, per server."""
    shortest_s = min(waits_s)
    crowded = shortest_s / (shortest_s + usual_s) if usual_s else 0.0
    rate *= 1.0 + CROWDED * crowded
    return [
        rate * work_s * (wait_s - crowded * (wait_s - shortest_s) + work_s / 2.0)
        for wait_s, work_s in zip(waits_s, works_s, strict=True)
    ]


BARS = 4


@dataclass(slots=True)
class _Bar:
    """Sliding maximum of a server's runs (time, height), for a number of servers."""

    highest: deque[tuple[float, float]] = field(default_factory=deque)
    judged: int = 0
    """Number of the server's first request not included yet."""


@dataclass(slots=True)
class _Share:
    sent: deque[tuple[float, int]] = field(default_factory=deque)
    first: int = 0
    bars: dict[int, _Bar] = field(default_factory=dict)


class ShareGuard:
    """Guard that limits each server to little more than its share of requests.

    In every run of consecutive requests within ``window_s`` and of at least ``requests`` (or ``mean`` per server), none
    of ``n`` servers gets more than ``limit / n``.

    Method: a run from a server's request number ``j`` to its next, number ``k``, has ``k − j + 1`` of its requests
    among ``q − p + 1`` of all: too many if ``p − c·j > q + 1 − c·(k + 1)``, with ``c = n / limit``. The greatest left
    side is a sliding maximum over ``j``.
    """

    def __init__(self, limit: float, window_s: float, requests: float, mean: float) -> None:
        if not (limit >= 1 and window_s > 0 and requests >= 1 and mean >= 0):
            raise ValueError("a guard's limit is 1 or more, its window over 0 s, its requests 1 or more")
        self._limit, self._window_s, self._requests, self._mean = limit, window_s, requests, mean
        self._count = 0
        self._shares: dict[int, _Share] = {}

    def over(self, slot: int, servers: int, now_s: float) -> bool:
        """Return True if the server has had its share of ``servers``. No visible change."""
        check_slot(slot)
        share = self._shares.get(slot)
        if share is None or servers < 1 or self._limit >= servers:
            return False
        # A run of less than one request does not exist.
        free = max(1, math.floor(self._limit * max(self._requests / servers, self._mean) + 1e-9))
        if len(share.sent) < free:
            return False
        bar = share.bars.get(servers)
        if bar is None:
            if len(share.bars) >= BARS:
                share.bars.clear()
            bar = share.bars[servers] = _Bar()
        per_request = servers / self._limit
        upcoming = share.first + len(share.sent)
        highest = bar.highest
        bar.judged = max(bar.judged, share.first)
        # Update the sliding maximum. A run is judged once it has ``free`` requests of this server; a lower height
        # before a higher height can never be the maximum again.
        while bar.judged < upcoming + 1 - free:
            at_s, before = share.sent[bar.judged - share.first]
            height = before - per_request * bar.judged
            while highest and highest[-1][1] <= height:
                highest.pop()
            highest.append((at_s, height))
            bar.judged += 1
        while highest and highest[0][0] <= now_s - self._window_s:
            highest.popleft()
        return bool(highest) and highest[0][1] > self._count + 1 - per_request * (upcoming + 1) + 1e-6

    def sent(self, slot: int, now_s: float) -> None:
        check_slot(slot)
        share = self._shares.setdefault(slot, _Share())
        share.sent.append((now_s, self._count))
        self._count += 1
        while share.sent and share.sent[0][0] <= now_s - self._window_s:
            share.sent.popleft()
            share.first += 1

    def forget(self, slot: int) -> None:
        check_slot(slot)
        self._shares.pop(slot, None)


Curve = tuple[float, float, float]


def prefill_s(curve: Curve, tokens: int, cached: int) -> float:
    fixed_s, per_token_s, bend = curve
    return fixed_s + per_token_s * (tokens - cached) * (1.0 + bend * (tokens + cached))


BENDS = (0.0, 5e-6, 1e-5, 2e-5, 4e-5, 8e-5)
"""Candidates for attention over weights in the cost model."""
MOST_POINTS = 4096


def fit_prefills(points: Sequence[tuple[float, float, float]], bend: float = 0.0) -> Curve:
    """Fit a curve to ``points`` (tokens, cached tokens, seconds), with ``bend`` or a neighbour in ``BENDS``, by the
    least mean error without the worst sixteenth; a larger bend must be better by a twentieth.
    """
    if not 0 < len(points) <= MOST_POINTS:
        raise ValueError(f"{len(points)} points: expected 1 to {MOST_POINTS}")
    if bend not in BENDS:
        raise ValueError(f"a bend of {bend}: expected one of {BENDS}")
    if not all(
        cached >= 0 and tokens - cached >= 1 and tokens <= 1e15 and abs(s) <= 1e15 for tokens, cached, s in points
    ):
        raise ValueError("points: expected tuples of tokens, fewer cached tokens, and seconds")
    at = BENDS.index(bend)
    seconds = [float(s) for _, _, s in points]
    kept_points = len(points) - len(points) // 16
    best: tuple[float, Curve] | None = None
    for tried in BENDS[max(0, at - 1) : at + 2]:
        work = [(tokens - cached) * (1.0 + tried * (tokens + cached)) for tokens, cached, _ in points]
        fixed_s, per_work_s = _line(work, seconds)
        errors = sorted(abs(s - fixed_s - per_work_s * done) for done, s in zip(work, seconds, strict=True))
        error = _sum(errors[:kept_points]) / kept_points
        if best is None or error < 0.95 * best[0]:
            best = error, (fixed_s, per_work_s, tried)
    assert best is not None
    return best[1]


def _line(work: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit ``seconds`` to a line over ``work``, twice without outliers. Return the fixed seconds and those per work."""
    fixed_s, per_work_s = _least_squares(work, seconds, [True] * len(work))
    for _ in range(2):
        errors = []
        for done, s in zip(work, seconds, strict=True):
            expected_s = fixed_s + per_work_s * done
            errors.append(abs(s - expected_s) / expected_s)
        ordered = sorted(errors)
        usual = (ordered[len(ordered) // 2] + ordered[(len(ordered) - 1) // 2]) / 2.0
        fixed_s, per_work_s = _least_squares(work, seconds, [error <= 3.0 * usual + 1e-9 for error in errors])
    return fixed_s, per_work_s


def _least_squares(work: Sequence[float], seconds: Sequence[float], near: Sequence[bool]) -> tuple[float, float]:
    """Fit a line to ``near`` points, without negative parts: prompts of equal length show no fixed part."""
    points = [point for point, counts in zip(zip(work, seconds, strict=True), near, strict=True) if counts]
    count = float(len(points))
    work_mean = _sum([done for done, _ in points]) / count
    seconds_mean = _sum([s for _, s in points]) / count
    spread = _sum([(done - work_mean) * (done - work_mean) for done, _ in points]) / count
    lean = _sum([(done - work_mean) * (s - seconds_mean) for done, s in points]) / count
    least = 0.1 * work_mean
    if spread >= least * least and spread > 0.0:
        per_work_s = lean / spread
        fixed_s = seconds_mean - per_work_s * work_mean
        if fixed_s >= 0.0 and per_work_s > 0.0:
            return fixed_s, per_work_s
    return 0.0, max(1e-9, seconds_mean / work_mean)


def _sum(terms: Sequence[float]) -> float:
    """Add in order: ``sum`` adds differently in newer Pythons."""
    total = 0.0
    for term in terms:
        total += term
    return total


SURE = 4.0
ROUNDS = 4


def fit_whole(points: Sequence[tuple[float, float, float, float]]) -> Curve | None:
    """Fit if prefill and answer are timed together. ``points``: tokens, cached tokens, answer tokens, seconds. None if
    uncertain.
    """
    if not 3 <= len(points) <= MOST_POINTS:
        raise ValueError(f"{len(points)} points: expected 3 to {MOST_POINTS}")
    if not all(0 <= cached <= tokens - 1 and max(map(abs, figures)) <= 1e15 for tokens, cached, *figures in points):
        raise ValueError("points: expected tuples of tokens, fewer cached tokens, and seconds")
    outputs = [output for _, _, output, _ in points]
    seconds = [s for _, _, _, s in points]
    best: tuple[float, Curve] | None = None
    for bend in BENDS:
        work = [(tokens - cached) * (1.0 + bend * (tokens + cached)) for tokens, cached, _, _ in points]
        # Least squares in rounds: after each, points off by more than three median errors are left out of the next
        # round.
        errors, most, parts = [0.0] * len(points), 0.0, None
        for _ in range(ROUNDS):
            near = [at for at, error in enumerate(errors) if error <= most]
            parts = _two_parts(*([column[at] for at in near] for column in (work, outputs, seconds)))
            if parts is None:
                break
            for at, s in enumerate(seconds):
                errors[at] = abs(s - (work[at] * parts[0] + outputs[at] * parts[1]))
            ordered = sorted(errors)
            most = 3.0 * ((ordered[len(ordered) // 2] + ordered[(len(ordered) - 1) // 2]) / 2.0) + 1e-9
        if parts is None:
            continue
        per_work_s, per_output_s = parts
        kept_points = len(points) * 3 // 4
        error = _sum(sorted(errors)[:kept_points]) / kept_points
        both, sums = _product(work, outputs), (_product(work, work), _product(outputs, outputs))
        off = _product(errors, errors) / (len(points) - 2)  # including the outliers, which are part of the uncertainty
        sure = per_work_s / SURE
        shows = per_work_s > 0 and off * sums[1] <= sure * sure * (sums[0] * sums[1] - both * both)
        if shows and per_output_s >= 0 and (best is None or error < 0.95 * best[0]):
            best = error, (0.0, per_work_s, bend)
    return None if best is None else best[1]


def _two_parts(work: Sequence[float], outputs: Sequence[float], seconds: Sequence[float]) -> tuple[float, float] | None:
    """Fit seconds to work and answer tokens (least squares); None if their shares cannot be distinguished."""
    works, both, squares = _product(work, work), _product(work, outputs), _product(outputs, outputs)
    work_seconds, output_seconds = _product(work, seconds), _product(outputs, seconds)
    if squares == 0.0:
        return work_seconds / works, 0.0
    determinant = works * squares - both * both
    if not determinant > 1e-12 * works * squares:
        return None
    return (work_seconds * squares - output_seconds * both) / determinant, (
        output_seconds * works - work_seconds * both
    ) / determinant


def _product(vector: Sequence[float], other: Sequence[float]) -> float:
    return _sum([a * b for a, b in zip(vector, other, strict=True)])
