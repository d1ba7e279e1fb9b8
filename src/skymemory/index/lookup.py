"""PrefixSearch: the longest prefix by probing the satellites, for when the index was lost (paper §3.8).

A binary search is only correct when presence is prefix-closed; eviction punches holes. So the search

1. narrows down the first absent block, several probes per round;
2. then (``verify``) probes every block before it that it has not probed yet. An absent block moves the boundary back,
   and the search continues from there.

No position is probed again once it is answered.
"""

from __future__ import annotations

from collections.abc import Mapping

from skymemory.errors import InvalidInput

_UNKNOWN, _PRESENT, _ABSENT = 0, 1, 2


class PrefixSearch:
    """A search over ``count`` blocks without I/O: take ``next_probe()``, feed ``answer()``, until ``done``.

    ``batch`` positions are asked per narrowing round, ``verify_batch`` per verifying round; at most ``count``
    in all. Where presence is prefix-closed there are at most ``floor(log(count) / log(batch)) + 1`` narrowing
    rounds (``ceil(log2(count)) + 1`` for a batch of 1 or 2) and ``ceil(result / verify_batch)`` verifying ones.
    ``verify=False`` trusts presence to be prefix-closed: only the narrowing rounds, and a result that is never
    too small but may be too large where there are holes.
    """

    def __init__(self, count: int, batch: int = 16, verify_batch: int = 256, verify: bool = True) -> None:
        if count < 0 or batch < 1 or verify_batch < 1:
            raise InvalidInput(
                f"cannot search {count} blocks by {batch} and {verify_batch}: batches are 1 or more, count 0 or more"
            )
        self._state = bytearray(count)
        self._boundary = count
        self._batch = batch
        self._verify_batch = verify_batch
        self._verify = verify
        self._asked: set[int] = set()
        self.rounds = 0
        """Batches of probes so far; one that only repeats unanswered positions does not count."""

    @property
    def probes(self) -> int:
        """Positions probed so far."""
        return len(self._asked)

    @property
    def done(self) -> bool:
        return not self._next()

    @property
    def result(self) -> int:
        """The number of leading blocks all present. Before ``done`` it is :class:`InvalidInput` to ask."""
        if not self.done:
            raise InvalidInput("the search is not done: feed the answers of next_probe() first")
        return self._boundary

    def next_probe(self) -> list[int]:
        """Positions (0-based, ascending) to probe now: the same again until an answer comes, empty when done."""
        positions = self._next()
        if positions and not self._asked.issuperset(positions):
            self._asked.update(positions)
            self.rounds += 1
        return positions

    def answer(self, presence: Mapping[int, bool]) -> None:
        """Answers to some or all positions. Once absent, a block stays absent for this search."""
        for position, present in presence.items():
            if not 0 <= position < len(self._state):
                raise InvalidInput(f"an answer for block {position} of a search over {len(self._state)}")
            if not present:
                self._state[position] = _ABSENT
                self._boundary = min(self._boundary, position)
            elif self._state[position] == _UNKNOWN:
                self._state[position] = _PRESENT

    def _next(self) -> list[int]:
        low = self._state.rfind(_PRESENT, 0, self._boundary) + 1
        width = self._boundary - low
        if width > 0:
            return self._spread(low, width)
        return self._unverified() if self._verify else []

    def _spread(self, low: int, width: int) -> list[int]:
        """Up to ``batch`` positions of the unknown stretch, evenly, with the last (a full hit is common)."""
        if width <= self._batch:
            return list(range(low, low + width))
        # One probe a round: plain bisection, after one look at the end, as a full hit is common.
        if self._batch == 1:
            first_question = not self._asked
            return [low + width - 1 if first_question else low + width // 2]
        step = width / self._batch
        return [low + int((part + 1) * step) - 1 for part in range(self._batch - 1)] + [low + width - 1]

    def _unverified(self) -> list[int]:
        """The first ``verify_batch`` unanswered positions before the boundary."""
        positions: list[int] = []
        at = self._state.find(_UNKNOWN, 0, self._boundary)
        while at >= 0 and len(positions) < self._verify_batch:
            positions.append(at)
            at = self._state.find(_UNKNOWN, at + 1, self._boundary)
        return positions
