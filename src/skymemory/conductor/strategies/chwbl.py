"""Consistent hashing with bounded loads, on the beginning of a prompt.

Source: KubeAI's load balancer: the hash of adapter and of the prompt's first 100 characters, 256 virtual nodes per
server, clockwise until a server has at most 1.25 × the mean load. Done otherwise: the bound is rounded up
(``loads.most_allowed``), the salt and the model are hashed with the adapter, and a prefix that promises less than the
gain threshold does not weigh.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from skymemory.conductor.fleet import Server
from skymemory.conductor.request import HEAD_BYTES, Request
from skymemory.conductor.strategies.base import Forgetful, Ranking
from skymemory.conductor.strategies.gain import GainThreshold
from skymemory.conductor.strategies.hashing import hash_words, mix, scope_of
from skymemory.conductor.strategies.loads import check_factor, loads_of, most_allowed
from skymemory.errors import InvalidInput

BYTES_PER_TOKEN = 4
"""Of text, on average: what a hashed beginning promises in tokens."""


@dataclass(frozen=True, slots=True)
class ChwblSettings:
    prefix_characters: int = 100
    virtual_nodes: int = 256
    load_factor: float = 1.25
    min_match_tokens: int = 0
    min_match_ratio: float = 0.0

    def __post_init__(self) -> None:
        check_factor(self.load_factor)
        if not 1 <= self.prefix_characters <= HEAD_BYTES:
            raise InvalidInput(f"prefix_characters is {self.prefix_characters}; expected 1 to {HEAD_BYTES}")
        if not 1 <= self.virtual_nodes <= 65_536:
            raise InvalidInput(f"virtual_nodes is {self.virtual_nodes}; expected 1 to 65536")


class BoundedRing(Forgetful):
    """The first server clockwise of the prompt's hash that is not overloaded; the next are the fallbacks, in order."""

    name = "chwbl"

    def __init__(self, settings: ChwblSettings | None = None) -> None:
        self.settings = settings or ChwblSettings()
        self._gain = GainThreshold(self.settings.min_match_tokens, self.settings.min_match_ratio)
        self._names: frozenset[str] = frozenset()
        self._points: list[int] = []
        self._owners: list[str] = []

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        loads = loads_of(servers, now_s)
        weights = (("requests there", loads),)
        prompt = request.prompt
        head = prompt.head[: self.settings.prefix_characters]
        promised = min(prompt.tokens, len(head) / BYTES_PER_TOKEN)
        if not self._gain.worth(promised, prompt.tokens):
            return Ranking(
                [-load for load in loads], reasons=(self._why_not(promised, prompt.tokens),), weights=weights
            )
        order = self._clockwise(hash_words(*scope_of(request), head), servers)
        most = most_allowed(loads, self.settings.load_factor)
        scores = [0.0] * len(servers)
        for place, at in enumerate(order):
            load = loads[at]
            scores[at] = float(len(order) - place) if load + 1.0 <= most else -1.0 - load
        passed = next(place for place, at in enumerate(order) if scores[at] > 0.0)
        reason = f"by the hash of its first {len(head)} characters"
        if passed:
            reason += f", {passed} servers further because of load (at most {most} requests)"
        return Ranking(scores, reasons=(reason,), weights=weights)

    def forget(self, server: Server) -> None:
        self._names = frozenset()  # The ring is built anew, without it.

    def _why_not(self, promised: float, tokens: int) -> str:
        return self._gain.why_not(promised, tokens) if promised else "load only: the prompt has no text to hash"

    def _clockwise(self, key: int, servers: Sequence[Server]) -> list[int]:
        """Positions in ``servers``, in the order in which the walk from ``key`` meets them."""
        at_of = {server.name: at for at, server in enumerate(servers)}
        if not self._names.issuperset(at_of):
            self._build(self._names.union(at_of))
        points, owners = self._points, self._owners
        start = bisect_left(points, key)
        order: list[int] = []
        for point in chain(range(start, len(points)), range(start)):
            at = at_of.pop(owners[point], None)
            if at is not None:
                order.append(at)
                if not at_of:
                    break
        return order

    def _build(self, names: frozenset[str]) -> None:
        """All servers met so far are on the ring; who is not asked about is walked past, as if it were not there."""
        ordered = sorted(names)
        nodes = np.arange(self.settings.virtual_nodes, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        points = np.concatenate([mix(nodes + np.uint64(hash_words(name.encode()))) for name in ordered])
        owners = np.repeat(np.arange(len(ordered)), self.settings.virtual_nodes)
        order = np.argsort(points, kind="stable")
        self._names, self._points = names, points[order].tolist()
        self._owners = [ordered[owner] for owner in owners[order].tolist()]
