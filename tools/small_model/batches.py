"""Which tokens come when: pieces of the text in a seeded random order, the same after a resume."""

from __future__ import annotations

import numpy as np
import torch


class Batches:
    """Pieces of ``length`` + 1 ids cut from ``stream`` (uint16 ids), shuffled again each round, by ``seed``."""

    def __init__(self, stream: np.ndarray, length: int, seed: int) -> None:
        self._stream, self._length, self._seed = stream, length, seed
        self._pieces = (len(stream) - 1) // length
        self._round, self._order = -1, np.empty(0, dtype=np.int64)

    def batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pieces ``first`` to ``first + count`` of the endless order: inputs and targets, int64 (count, length)."""
        rows = np.stack([self._piece(number) for number in range(first, first + count)]).astype(np.int64)
        ids = torch.from_numpy(rows)
        return ids[:, :-1], ids[:, 1:]

    def _piece(self, number: int) -> np.ndarray:
        turn, place = divmod(number, self._pieces)
        if turn != self._round:
            self._round = turn
            self._order = np.random.default_rng((self._seed, self._length, turn)).permutation(self._pieces)
        start = int(self._order[place]) * self._length
        return self._stream[start : start + self._length + 1]
