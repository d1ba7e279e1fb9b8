"""Choice of the decode server: the one with the shortest time between tokens, with the request in its batch.

A step grows with the batch and its contexts (``CostModel.decode_step_s``). Requests that are placed on a server but
still in prefill count too: otherwise all requests would go to a server that none has reached yet. Before a request
joins the batch its own server is estimated again, from the requests in the batch only.

The forecast is Mooncake's (FAST'25 §7.4): all requests decode for one usual time; those whose prefill ends by then have
joined, those that decode longer have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from skymemory.conductor.picker import Fleet, Ranking, Scorer, Server
from skymemory.conductor.request import Request
from skymemory.errors import InvalidInput

_NO_ROOM_S = 1e9
"""Penalty on the score of a server whose KV cache has no room: it ranks after all others."""
_LEARNING_RATE = 0.02
"""Weight of an ended request in the usual time of decoding."""

Parts = tuple[float, float, float, float, float]


class DecodeCost(Protocol):
    """The part of ``cost_model.CostModel`` needed here."""

    def decode_parts(self, batch: int) -> Parts:
        """Coefficients of ``fixed + max(read + read_per_token·T, flops + flops_per_token·T)``, T tokens of context."""
        ...


@dataclass(slots=True, eq=False)
class _Booked:
    """A request in a server's batch, or placed on the server and still in prefill."""

    request: Request
    tokens: int
    """Prompt tokens."""
    joins_s: float
    """Time at which it joined the batch, or is estimated to."""
    joined: bool = False


@dataclass(slots=True)
class _Batch:
    """The requests of one server, with running sums: an estimate costs the same for any batch size."""

    booked: dict[_Booked, None] = field(default_factory=dict)
    joined: int = 0
    promised: int = 0
    joined_tokens: int = 0
    promised_tokens: int = 0
    joined_at_s: float = 0.0
    """Sum of the times at which they joined."""

    def add(self, one: _Booked, sign: int) -> None:
        if one.joined:
            self.joined += sign
            self.joined_tokens += sign * one.tokens
            self.joined_at_s = self.joined_at_s + sign * one.joins_s if self.joined else 0.0
        else:
            self.promised += sign
            self.promised_tokens += sign * one.tokens


class LeastTbt(Scorer):
    """A scorer of decode servers, and an ``scheduler.DecodeForecast``.

    ``kv_tokens``: capacity of each server's KV cache; None: as reported, without a report unlimited. ``decode_s``:
    usual time of decoding; None: learnt from ended requests, infinite before the first.
    """

    name = "least-tbt"

    def __init__(
        self, cost: DecodeCost, fleet: Fleet, kv_tokens: int | None = None, decode_s: float | None = None
    ) -> None:
        if (kv_tokens is not None and kv_tokens < 1) or (decode_s is not None and not decode_s > 0):
            raise InvalidInput("kv_tokens must be ≥ 1, decode_s > 0")
        self._cost, self._fleet, self._kv_tokens = cost, fleet, kv_tokens
        self._given_s = decode_s
        self._learnt_s, self._ended = 0.0, 0
        self._parts: dict[int, Parts] = {}
        self._batches: dict[int, _Batch] = {}
        self._open: dict[tuple[int, int], list[_Booked]] = {}
        """By id of the request (kept alive here) and slot."""
        self._expected: dict[int, _Booked] = {}
        """Requests in prefill, by id of the request."""

    @property
    def decode_s(self) -> float:
        """As ``scheduler.DecodeForecast``."""
        if self._given_s is not None:
            return self._given_s
        return self._learnt_s if self._ended else float("inf")

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        # Two questions, one method. A request that arrives: the batch with all that were promised, and itself. A
        # request that this server was promised to (``own``), before it joins: the batch as it is, and itself.
        tokens = request.prompt.tokens
        scores: list[float] = []
        tbts: list[float] = []
        contexts: list[float] = []
        for server in servers:
            batch = self._batches.get(server.slot)
            count, context = 1, float(tokens)
            if batch is not None and batch.booked:
                own = self._open.get((id(request), server.slot))
                count += batch.joined
                context += batch.joined_tokens + self._grown(batch, now_s)
                if own:  # Estimated again before it joins: requests in prefill are not in the batch yet.
                    joined = [one for one in own if one.joined]
                    count -= len(joined)
                    context -= sum(one.tokens for one in joined)
                else:
                    count += batch.promised
                    context += batch.promised_tokens
            tbt_s = self._step_s(count, context)
            room = self._room(server)
            tbts.append(tbt_s)
            contexts.append(context)
            scores.append(-tbt_s if room is None or context <= room else -tbt_s - _NO_ROOM_S)
        full = sum(score < -_NO_ROOM_S / 2 for score in scores)
        reasons = (f"no room for its KV cache at {full} of {len(scores)}",) if full else ()
        weights = (("seconds between tokens", tbts), ("tokens of context", contexts))
        return Ranking(scores, reasons=reasons, weights=weights, estimated_tbt_s=tbts)

    def expected(self, request: Request, at_s: float) -> None:
        one = self._expected.get(id(request))
        if one is not None:
            one.joins_s = at_s

    def tbt_s(self, at_s: float, now_s: float, request: Request | None = None) -> float:
        """As ``scheduler.DecodeForecast``; with ``at_s`` = ``now_s`` of the requests in batches now."""
        # A request counts from when it joined, or is expected to, for one usual decode. Its context has grown by a
        # token per step since then; steps in turn depend on contexts, so one step of that fixed point is taken.
        usual_s, sums = self.decode_s, 0.0
        # One that drains gets no new requests, and its batch grows no more: it says nothing about theirs.
        servers = self._fleet.available
        for server in servers:
            count, tokens, since_s = (0, 0, 0.0) if request is None else (1, request.prompt.tokens, 0.0)
            for one in self._batches[server.slot].booked if server.slot in self._batches else ():
                if one.joined if at_s <= now_s else one.joins_s <= at_s < one.joins_s + usual_s:
                    count += 1
                    tokens += one.tokens
                    since_s += at_s - one.joins_s
            step_s = self._step_s(count, tokens)
            sums += self._step_s(count, tokens + since_s / step_s)
        return sums / len(servers) if servers else 0.0

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        one = _Booked(request, request.prompt.tokens, now_s)
        batch = self._batches.setdefault(server.slot, _Batch())
        batch.booked[one] = None
        batch.add(one, 1)
        self._open.setdefault((id(request), server.slot), []).append(one)
        self._expected[id(request)] = one

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        one = next((one for one in self._open.get((id(request), server.slot), ()) if not one.joined), None)
        if one is not None:
            batch = self._batches[server.slot]
            batch.add(one, -1)
            one.joined, one.joins_s = True, now_s
            batch.add(one, 1)
            self._drop_expected(one)

    def ended(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        one = self._take(request, server, True)
        if one is not None and request.streams:  # else it is known when it ended, not when its decoding began
            # The plain mean of the first fifty, then exponentially weighted: lengths of answers drift with the traffic.
            self._ended += 1
            share = max(_LEARNING_RATE, 1 / self._ended)
            self._learnt_s += (now_s - one.joins_s - self._learnt_s) * share

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        self._take(request, server, False)

    def forget(self, server: Server) -> None:
        batch = self._batches.pop(server.slot, None)
        for one in batch.booked if batch is not None else ():
            self._open.pop((id(one.request), server.slot), None)
            self._drop_expected(one)

    def _take(self, request: Request, server: Server, joined: bool) -> _Booked | None:
        key = (id(request), server.slot)
        ours = self._open.get(key, [])
        one = next((one for one in ours if one.joined == joined), None)
        if one is None:
            return None
        ours.remove(one)
        if not ours:
            del self._open[key]
        batch = self._batches[server.slot]
        del batch.booked[one]
        batch.add(one, -1)
        self._drop_expected(one)
        return one

    def _drop_expected(self, one: _Booked) -> None:
        if self._expected.get(id(one.request)) is one:
            del self._expected[id(one.request)]

    def _grown(self, batch: _Batch, now_s: float) -> float:
        """Estimated tokens decoded since the batch's requests joined it, at the pace without those tokens."""
        if not batch.joined:
            return 0.0
        return (batch.joined * now_s - batch.joined_at_s) / self._step_s(batch.joined, batch.joined_tokens)

    def _room(self, server: Server) -> int | None:
        """Capacity of its KV cache in tokens, if known."""
        if self._kv_tokens is not None:
            return self._kv_tokens
        report = server.reported
        if report is None or not report.cache_blocks or not report.block_tokens:
            return None
        return report.cache_blocks * report.block_tokens

    def _step_s(self, batch: int, tokens: float) -> float:
        parts = self._parts.get(batch)
        if parts is None:
            parts = self._parts[batch] = self._cost.decode_parts(batch)
        fixed_s, read_s, read_per_token_s, flops_s, flops_per_token_s = parts
        return fixed_s + max(read_s + read_per_token_s * tokens, flops_s + flops_per_token_s * tokens)
