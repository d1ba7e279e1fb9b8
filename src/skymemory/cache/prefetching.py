"""What is expected is brought near in time: the predictor's expectations, handed to a tier that can prefetch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.cache.manager import TIER_FAILURES
from skymemory.cache.predictor import Expectation, Predictor
from skymemory.errors import InvalidInput
from skymemory.metrics import Counters
from skymemory.store.base import Prefetching

_MOST_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class _Due:
    """An expectation by what it is about: the same one is not acted on twice."""

    root: bytes
    blocks: int
    at_s: float


class PrefetchScheduler:
    """Tell it of every prompt with ``saw`` and call ``tick`` now and then, more often than ``lead_s``.

    It has no thread and no clock: whoever owns it decides when prefetching is in nobody's way. What is expected within
    ``lead_s`` is prefetched, once, or up to three times where that fails.
    """

    def __init__(
        self, store: Prefetching, predictor: Predictor | None = None, *, lead_s: float = 600.0,
        counters: Counters | None = None,
    ) -> None:  # fmt: skip
        if lead_s <= 0:
            raise InvalidInput(f"a lead of {lead_s} s: expected more than 0")
        self.predictor = predictor if predictor is not None else Predictor()
        self.counters = counters if counters is not None else Counters()
        self._store = store
        self._lead_s = lead_s
        self._attempts: dict[_Due, int] = {}

    def saw(self, keys: Sequence[bytes], now_s: float) -> None:
        """A prompt with these blocks is asked for now."""
        self.predictor.saw(keys, now_s)

    def tick(self, now_s: float) -> int:
        """Prefetch what is due; how many values are now where they will be wanted."""
        self._attempts = {due: count for due, count in self._attempts.items() if due.at_s >= now_s}
        brought = 0
        for expectation in self.predictor.expected(now_s, self._lead_s):
            due = _Due(expectation.keys[0], len(expectation.keys), expectation.at_s)
            attempts = self._attempts.get(due, 0)
            if attempts < _MOST_ATTEMPTS:
                near = self._prefetch(expectation)
                brought += sum(near)
                self._attempts[due] = _MOST_ATTEMPTS if all(near) else attempts + 1
        return brought

    def _prefetch(self, expectation: Expectation) -> list[bool]:
        self.counters.add("prefetches_total")
        try:
            near = self._store.prefetch(expectation.keys, expectation.at_s)
        except TIER_FAILURES:
            self.counters.add("prefetch_failures_total")
            return [False] * len(expectation.keys)
        self.counters.add("prefetched_blocks_total", sum(near))
        self.counters.add("not_prefetched_blocks_total", len(near) - sum(near))
        return near
