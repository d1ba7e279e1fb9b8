"""Choice of the decode server: the shortest time between tokens, with the request in its batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from skymemory.conductor.picker import Fleet, Ranking, Scorer, Server
from skymemory.conductor.request import Decision, Request
from skymemory.errors import InvalidInput

_NO_ROOM_S = 1e9
_LEARNING_RATE = 0.02

Parts = tuple[float, float, float, float, float]


class DecodeCost(Protocol):
    def decode_parts(self, batch: int) -> Parts: ...


@dataclass(slots=True, eq=False)
class _Booked:
    """Request that was sent to a decode server, and its context in tokens."""

    request: Request
    tokens: int
    joins_s: float  # time at which it joined the batch after its prefill, or is estimated to
    joined: bool = False


@dataclass(slots=True)
class _Batch:
    """Requests of a decode server, and sums over them, so that ``rank`` need not visit each."""

    booked: dict[_Booked, None] = field(default_factory=dict)
    joined: int = 0  # number of requests that decode
    promised: int = 0  # number of requests still in prefill
    joined_tokens: int = 0
    promised_tokens: int = 0
    joined_at_s: float = 0.0  # sum of the times of joining

    def add(self, booked: _Booked, sign: int) -> None:
        """Add (``sign`` 1) or subtract (-1) a request in the sums."""
        # ``booked`` is the caller's. A request that changes is subtracted before, and added after.
        if booked.joined:
            self.joined += sign
            self.joined_tokens += sign * booked.tokens
            # 0 without requests, so that rounding errors do not last.
            self.joined_at_s = self.joined_at_s + sign * booked.joins_s if self.joined else 0.0
        else:
            self.promised += sign
            self.promised_tokens += sign * booked.tokens


class LeastTbt(Scorer):
    """Scorer of decode servers, and the ``DecodeForecast`` of Mooncake (FAST'25 §7.4): all requests decode for the same
    time.

    ``kv_tokens``: capacity of each KV cache; None: as reported. ``decode_s``: usual duration; None: learnt.
    """

    name = "least-tbt"

    def __init__(
        self, cost: DecodeCost, fleet: Fleet, kv_tokens: int | None = None, decode_s: float | None = None
    ) -> None:
        if (kv_tokens is not None and kv_tokens < 1) or (decode_s is not None and not decode_s > 0):
            raise InvalidInput("kv_tokens must be ≥ 1, decode_s > 0")
        self._cost, self.fleet, self._kv_tokens = cost, fleet, kv_tokens
        self._given_s = decode_s
        self._learnt_s, self._ended = 0.0, 0
        self._parts: dict[int, Parts] = {}
        self._batches: dict[int, _Batch] = {}
        # Booked requests by request id and slot; repeated sends append.
        self._open: dict[tuple[int, int], list[_Booked]] = {}
        # The request's last booking, whose time of joining is an estimate.
        self._expected: dict[int, _Booked] = {}

    @property
    def decode_s(self) -> float:
        if self._given_s is not None:
            return self._given_s
        return self._learnt_s if self._ended else float("inf")

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        """Prefer the shortest estimated time between tokens; servers without room for the KV come last."""
        # Two cases. A new request: the batch with all promised requests, and itself (without those in prefill, all
        # would go to a server that none has reached yet). A request that was promised to this server (``own``) and is
        # about to join: the batch as it is, and itself.
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
                if own:  # estimated again before it joins: requests in prefill are not in the batch yet
                    joined = [booked for booked in own if booked.joined]
                    count -= len(joined)
                    context -= sum(booked.tokens for booked in joined)
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
        booked = self._expected.get(id(request))
        if booked is not None:
            booked.joins_s = at_s

    def tbt_s(self, at_s: float, now_s: float, request: Request | None = None) -> float:
        """Forecast the servers' mean seconds between tokens at ``at_s``, with ``request`` in each batch."""
        # A request counts from the time of joining for the usual duration. Its context has grown by a token per step
        # since then. As steps depend on contexts in turn, this is a single step of a fixed-point iteration.
        usual_s, sums = self.decode_s, 0.0
        # A draining server gets no new requests and its batch no longer grows, so it is left out.
        servers = self.fleet.available
        for server in servers:
            count, tokens, since_s = (0, 0, 0.0) if request is None else (1, request.prompt.tokens, 0.0)
            for booked in self._batches[server.slot].booked if server.slot in self._batches else ():
                if booked.joined if at_s <= now_s else booked.joins_s <= at_s < booked.joins_s + usual_s:
                    count += 1
                    tokens += booked.tokens
                    since_s += at_s - booked.joins_s
            step_s = self._step_s(count, tokens)
            sums += self._step_s(count, tokens + since_s / step_s)
        return sums / len(servers) if servers else 0.0

    def own_tbt_s(self, decode: Decision, joins_s: float, now_s: float) -> float:
        # As halfway through the answer. Until then others end at random, for answers differ in length; those that
        # arrive later are judged when they do.
        server, tokens, count = self.fleet.servers.get(decode.server), float(decode.request.prompt.tokens), 1.0
        batch = None if server is None else self._batches.get(server.slot)
        for booked in batch.booked if batch is not None else ():
            before_s = joins_s - (now_s if booked.joined else booked.joins_s)
            share = math.exp(-max(0.0, 0.5 + before_s / max(self.decode_s, 1e-9)))
            count += share
            tokens += share * booked.tokens
        return self._step_s(round(count), tokens)

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        booked = _Booked(request, request.prompt.tokens, now_s)
        batch = self._batches.setdefault(server.slot, _Batch())
        batch.booked[booked] = None
        batch.add(booked, 1)
        self._open.setdefault((id(request), server.slot), []).append(booked)
        self._expected[id(request)] = booked

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        """Record that the request joins the batch."""
        booked = next((booked for booked in self._open.get((id(request), server.slot), ()) if not booked.joined), None)
        if booked is not None:
            batch = self._batches[server.slot]
            batch.add(booked, -1)
            booked.joined, booked.joins_s = True, now_s
            batch.add(booked, 1)
            self._drop_expected(booked)

    def on_request_end(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        booked = self._take(request, server, True)
        if booked is not None and request.streams:  # otherwise the start of its decoding is unknown
            # The plain mean of the first fifty, then exponentially weighted: answer lengths drift with the traffic.
            self._ended += 1
            share = max(_LEARNING_RATE, 1 / self._ended)
            self._learnt_s += (now_s - booked.joins_s - self._learnt_s) * share

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        self._take(request, server, False)

    def forget(self, server: Server) -> None:
        batch = self._batches.pop(server.slot, None)
        for booked in batch.booked if batch is not None else ():
            self._open.pop((id(booked.request), server.slot), None)
            self._drop_expected(booked)

    def _take(self, request: Request, server: Server, joined: bool) -> _Booked | None:
        # Remove and return a booked request, either in the batch (``joined``) or still in prefill.
        key = (id(request), server.slot)
        ours = self._open.get(key, [])
        booked = next((booked for booked in ours if booked.joined == joined), None)
        if booked is None:
            return None
        ours.remove(booked)
        if not ours:
            del self._open[key]
        batch = self._batches[server.slot]
        del batch.booked[booked]
        batch.add(booked, -1)
        self._drop_expected(booked)
        return booked

    def _drop_expected(self, booked: _Booked) -> None:
        if self._expected.get(id(booked.request)) is booked:
            del self._expected[id(booked.request)]

    def _grown(self, batch: _Batch, now_s: float) -> float:
        """Return the tokens decoded since the requests joined."""
        if not batch.joined:
            return 0.0
        return (batch.joined * now_s - batch.joined_at_s) / self._step_s(batch.joined, batch.joined_tokens)

    def _room(self, server: Server) -> int | None:
        # Return the tokens that fit the server's KV cache; None: unknown.
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
