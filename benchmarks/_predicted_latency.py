"""llm-d's predicted latency, for the arena: a router whose sidecar learns to predict each server's latency.

Sources: ``training/training_server.py`` of llm-d/llm-d-latency-predictor at 04e44cd (features, parameters of the trees)
and llm-d/llm-d-router at ebab687: ``config/charts/routerlib`` (plugins in their order, the learner's settings: mean
objective, trained every 10 s on at least 100 samples) and its plugins ``dataproducer/predictedlatency`` (what is
measured when), ``filter/prefixcacheaffinity``, ``scorer/latency``, ``picker/weightedrandom``. No request has an
objective here, as theirs do by default: then every server's headroom is negative, servers with no request of ours go
first, and the least predicted time wins, by a weighted draw.

Its chart leaves ``streamingMode`` off: then the whole answer's time is learnt and time per token counts nothing. The
arena measures first bytes, so here it is on (``streams``) unless all answers come whole: streams teach the first byte
and the time per token, whole answers teach nothing.

Done otherwise, in its favour: prompts are counted in tokens (the original counts words), a prompt counts as held from
when it is sent, failed requests are undone, and a trained model is there at once (the original's sidecars fetch it
within 30 s). Columns that never change here (type of the server, decode tokens in flight, encoder inputs, tokens
generated) are left out.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from skymemory.conductor.picker import Ranking, Server
from skymemory.conductor.prefix_index.approximate import PrefixIndex
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.strategy_base import Indexed, RequestNotes

TRAINED_EVERY_S = 10.0
LEAST_SAMPLES = 100
OF_A_BUCKET = 500
TREES = 200
PARAMETERS = {
    "max_depth": 6,
    "learning_rate": 0.05,
    "subsample": 0.8,
    "colsample_bytree": 0.8,
    "min_child_weight": 5,
    "gamma": 0.2,
    "reg_alpha": 0.01,
    "reg_lambda": 0.1,
    "objective": "reg:squarederror",
    "tree_method": "hist",
    "nthread": 1,
    "seed": 42,
    "verbosity": 0,
}
AFFINITIES = (0.99, 0.80)
"""The prefix cache affinity filters of the published profile, one after the other; they explore with probability 0."""
MOST_PENALTY_S = 5.0
TTFT_WEIGHT, TPOT_WEIGHT = 0.8, 0.2
LEAST_SPREAD = 1e-9


class Row(NamedTuple):
    """Features of a server before a request is sent; the first six predict the time per token."""

    queued: int
    use: float
    tokens: int
    waiting: int
    running: int  # our requests there, not the engine's
    under_way: float  # tokens of prompts sent there without a first byte, less what was held
    share: float
    uncached: float
    quarter: int


FOR_TPOT = 6
Predicted = list[tuple[float, float]]
"""Time to the first token and per token, by server."""


class Learner:
    """One of its two models: samples in buckets by queue, use and part held, and the trees."""

    def __init__(self) -> None:
        self._samples: dict[tuple[int, int, int], deque[tuple[tuple[float, ...], float]]] = defaultdict(
            lambda: deque(maxlen=OF_A_BUCKET)
        )
        self._model: Any = None

    def add(self, row: Row, seconds: float, width: int = len(Row._fields)) -> None:
        waiting = sum(row.waiting > most for most in (0, 2, 5, 10))
        self._samples[waiting, min(19, int(row.use * 20)), row.quarter].append((row[:width], seconds))

    def train(self) -> None:
        samples = [sample for bucket in self._samples.values() for sample in bucket]
        if len(samples) < LEAST_SAMPLES:
            return
        import xgboost

        rows = np.array([row for row, _ in samples], dtype=np.float32)
        known = xgboost.DMatrix(rows, label=np.array([seconds for _, seconds in samples]))
        self._model = xgboost.train(PARAMETERS, known, TREES)

    def predict(self, rows: Sequence[tuple[float, ...]]) -> list[float] | None:
        if self._model is None:
            return None
        predicted: list[float] = self._model.inplace_predict(np.array(rows, dtype=np.float32)).tolist()
        return predicted


class PredictedLatency(Indexed):
    """``picks_best``: the least predicted time wins, instead of a weighted draw."""

    name = "predicted-latency"

    def __init__(self, index: PrefixIndex, seed: int, picks_best: bool = False, streams: bool = True) -> None:
        super().__init__(index)
        self._dice = random.Random(seed)
        self._picks_best, self._streams = picks_best, streams
        self.ttft, self.tpot = Learner(), Learner()
        self._trained_s = 0.0
        self._ranked: tuple[Request | None, dict[int, Row]] = None, {}
        # When a request was sent, and with its first byte when that came.
        self._sent: RequestNotes[tuple[float, Row]] = RequestNotes()
        self._first_bytes: RequestNotes[tuple[float, Row]] = RequestNotes()
        self._open: dict[int, int] = defaultdict(int)

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        if now_s - self._trained_s >= TRAINED_EVERY_S:
            self._trained_s = now_s
            self.ttft.train()
            self.tpot.train()
        held = self.matched_blocks(request.prompt, servers)
        rows = [_row(request, server, blocks) for server, blocks in zip(servers, held, strict=True)]
        self._ranked = request, {server.slot: row for server, row in zip(servers, rows, strict=True)}
        matched = self.matched_tokens(request.prompt, held)
        predicted = self.predicted(rows)
        left = list(range(len(servers)))
        for least in AFFINITIES:
            left = _sticky(left, [row.share for row in rows], predicted, least)
        if predicted is None:
            weights = _composite([rows[at] for at in left])
        else:
            if idle := [at for at in left if not self._open[servers[at].slot]]:
                left = idle
            weights = _blended([predicted[at] for at in left])
        times_s = None if predicted is None else [ttft_s for ttft_s, _ in predicted]
        if self._picks_best:
            shares = dict(zip(left, weights, strict=True))
            return Ranking([shares.get(at, 0) for at in range(len(servers))], matched, times_s)
        chosen = self._dice.choices(left, weights if any(weights) else None)[0]
        return Ranking([float(at == chosen) for at in range(len(servers))], matched, times_s)

    def predicted(self, rows: Sequence[Row]) -> Predicted | None:
        """None: nothing was learnt yet."""
        ttft_s = self.ttft.predict(rows)
        if ttft_s is None:
            return None
        tpot_s = self.tpot.predict([row[:FOR_TPOT] for row in rows]) if self._streams else None
        return list(zip(ttft_s, tpot_s or [0.0] * len(rows), strict=True))

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        asked, rows = self._ranked
        # As it was ranked: the counts of the server have it by now.
        row = rows.get(server.slot) if asked is request else None
        super().routed(request, server, now_s)
        self._open[server.slot] += 1
        if row is not None:
            self._sent.add(request, server, (now_s, row))

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        super().succeeded(request, server, now_s, cached_tokens)
        if (sent := self._sent.take(request, server)) is None or (self._streams and not request.streams):
            return
        at_s, row = sent
        self.ttft.add(row, now_s - at_s)
        if self._streams:
            self._first_bytes.add(request, server, (now_s, row))

    def on_request_end(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        super().on_request_end(request, server, now_s, output_tokens)
        self._open[server.slot] -= 1
        if (first := self._first_bytes.take(request, server)) is not None and (output_tokens or 0) > 1:
            first_s, row = first
            report = server.reported
            use, waiting = (report.kv_usage, report.waiting) if report is not None else (0.0, 0)
            row = row._replace(queued=int(waiting > 0), use=use, waiting=waiting, quarter=0)
            self.tpot.add(row, (now_s - first_s) / ((output_tokens or 0) - 1), FOR_TPOT)

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        super().failed(request, server, now_s)
        self._sent.take(request, server)
        self._open[server.slot] -= 1

    def forget(self, server: Server) -> None:
        super().forget(server)
        self._sent.forget(server)
        self._first_bytes.forget(server)
        self._open.pop(server.slot, None)


def _sticky(left: list[int], shares: list[float], predicted: Predicted | None, least: float) -> list[int]:
    # Those that hold the prompt, unless the quickest of them is much slower than the quickest of the others.
    sticky = [at for at in left if shares[at] >= least]
    others = [at for at in left if shares[at] < least]
    if not sticky:
        return left
    if others and predicted is not None:
        quickest_s, other_s = (min(predicted[at][0] for at in some) for some in (sticky, others))
        if quickest_s > other_s + MOST_PENALTY_S:
            return left
    return sticky


def _blended(predicted: Predicted) -> list[int]:
    # Weights of a draw, 1 to 101: both times relative to those of the others; one that is equal everywhere counts not.
    shares, spreads = [], []
    for times in zip(*predicted, strict=True):
        least, spread = min(times), max(times) - min(times)
        spreads.append(spread)
        shares.append([(time - least) / spread if spread > LEAST_SPREAD else 0.5 for time in times])
    weight = TTFT_WEIGHT
    if spreads[0] <= LEAST_SPREAD < spreads[1]:
        weight = 0.0
    elif spreads[1] <= LEAST_SPREAD < spreads[0]:
        weight = 1.0
    return [int((1.0 - weight * ttft - (1.0 - weight) * tpot) * 100) + 1 for ttft, tpot in zip(*shares, strict=True)]


def _composite(rows: Sequence[Row]) -> list[int]:
    # Before anything was learnt: use, queue and part held, weighted alike.
    longest = max(row.waiting for row in rows)
    return [
        round(100 * (1 - row.use + ((longest - row.waiting) / longest if longest else 1.0) + row.share) / 3)
        for row in rows
    ]


def _row(request: Request, server: Server, held_blocks: int) -> Row:
    report, tokens, blocks = server.reported, request.prompt.tokens, len(request.prompt.blocks)
    share = held_blocks / blocks if blocks else 0.0
    use, waiting = (report.kv_usage, report.waiting) if report is not None else (0.0, 0)
    return Row(
        int(waiting > 0),
        use,
        tokens,
        waiting,
        server.in_flight,
        server.prefill_tokens,
        share,
        (1 - share) * tokens,
        min(3, int(share * 4)),
    )
