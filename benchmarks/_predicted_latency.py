"""llm-d's predicted latency, for the arena: a router whose sidecar learns to predict each server's TTFT.

Sources: ``latencypredictor/training_server.py`` of kubernetes-sigs/gateway-api-inference-extension at 0074568
(features, parameters of the trees) and llm-d/llm-d-inference-scheduler at 520af47: ``config/charts/epplib`` (plugins in
their order, the learner's settings: mean objective, trained every 10 s on at least 100 samples) and its plugins
``dataproducer/predictedlatency`` (what is measured when), ``filter/prefixcacheaffinity``, ``scorer/latency``,
``picker/weightedrandom``. No request has an objective here, as theirs do by default: then every server's headroom is
negative, servers with no request of ours go first, and the least predicted time wins, by a weighted draw.

Done otherwise, in its favour: prompts are counted in tokens (the original counts words), a prompt counts as held from
when it is sent, and a trained model is there at once (the original's sidecars fetch it within 30 s).
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence

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
"""The prefix cache affinity filters of the published profile, one after the other."""
EXPLORES = 0.01
MOST_PENALTY_S = 5.0
Features = tuple[float, ...]


class PredictedLatency(Indexed):
    """``picks_best``: the least predicted time wins, instead of a weighted draw."""

    name = "predicted-latency"

    def __init__(self, index: PrefixIndex, seed: int, picks_best: bool = False) -> None:
        super().__init__(index)
        self._dice = random.Random(seed)
        self._picks_best = picks_best
        self._sent: RequestNotes[tuple[float, Features]] = RequestNotes()
        self._samples: dict[tuple[int, int, int], deque[tuple[Features, float]]] = defaultdict(
            lambda: deque(maxlen=OF_A_BUCKET)
        )
        self._model: object | None = None
        self._trained_s = 0.0
        self._open: dict[int, int] = defaultdict(int)

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        self._train(now_s)
        held = self.matched_blocks(request.prompt, servers)
        rows = [_features(request, server, blocks) for server, blocks in zip(servers, held, strict=True)]
        matched = self.matched_tokens(request.prompt, held)
        if self._model is None:  # their composite: use, queue and prefix, weighted alike
            longest = max(1.0, *(row[2] for row in rows))
            return Ranking([(1 - row[0]) + (1 - row[2] / longest) + row[4] for row in rows], matched)
        predicted = self._model.inplace_predict(np.array(rows, dtype=np.float32)).tolist()  # type: ignore[attr-defined]
        left = list(range(len(servers)))
        for least in AFFINITIES:
            left = self._sticky(left, [row[4] for row in rows], predicted, least)
        if idle := [at for at in left if not self._open[servers[at].slot]]:
            left = idle
        shortest, longest = min(predicted[at] for at in left), max(predicted[at] for at in left)
        spread = longest - shortest
        shares = [int((1.0 - ((predicted[at] - shortest) / spread if spread > 1e-9 else 0.5)) * 100) + 1 for at in left]
        if self._picks_best:
            return Ranking([dict(zip(left, shares, strict=True)).get(at, 0) for at in range(len(servers))], matched)
        chosen = self._dice.choices(left, shares)[0]
        return Ranking([float(at == chosen) for at in range(len(servers))], matched, predicted)

    def _sticky(self, left: list[int], shares: list[float], predicted: list[float], least: float) -> list[int]:
        sticky = [at for at in left if shares[at] >= least]
        others = [at for at in left if shares[at] < least]
        if not sticky or self._dice.random() < EXPLORES:
            return left
        if others and min(predicted[at] for at in sticky) > min(predicted[at] for at in others) + MOST_PENALTY_S:
            return left
        return sticky

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        row = _features(request, server, self.matched_blocks(request.prompt, (server,))[0])
        super().routed(request, server, now_s)
        self._sent.add(request, server, (now_s, row))
        self._open[server.slot] += 1

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        super().succeeded(request, server, now_s, cached_tokens)
        if (sent := self._sent.take(request, server)) is not None:
            at_s, row = sent
            waiting = sum(row[2] > most for most in (0, 2, 5, 10))
            self._samples[waiting, min(19, int(row[0] * 20)), min(3, int(row[4] * 4))].append((row, now_s - at_s))

    def on_request_end(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        super().on_request_end(request, server, now_s, output_tokens)
        self._open[server.slot] -= 1

    def _train(self, now_s: float) -> None:
        if now_s - self._trained_s < TRAINED_EVERY_S:
            return
        self._trained_s = now_s
        samples = [sample for bucket in self._samples.values() for sample in bucket]
        if len(samples) < LEAST_SAMPLES:
            return
        import xgboost

        rows = np.array([row for row, _ in samples], dtype=np.float32)
        known = xgboost.DMatrix(rows, label=np.array([seconds for _, seconds in samples]))
        self._model = xgboost.train(PARAMETERS, known, TREES)


def _features(request: Request, server: Server, held_blocks: int) -> Features:
    """KV use, prompt, waiting, running, part of the prompt held, tokens without it, its quarter, tokens under way."""
    report, tokens, blocks = server.reported, request.prompt.tokens, len(request.prompt.blocks)
    share = held_blocks / blocks if blocks else 0.0
    use, waiting, running = (report.kv_usage, report.waiting, report.running) if report is not None else (0.0, 0, 0)
    quarter = min(3, int(share * 4))
    return use, float(tokens), waiting, running, share, (1 - share) * tokens, quarter, float(server.prefill_tokens)
