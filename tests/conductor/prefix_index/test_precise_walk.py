"""The precise index's walk along long chains, in runs, against walking block by block."""

from __future__ import annotations

import numpy as np

from skymemory import native
from skymemory.conductor.prefix_index.events import BlocksRemoved, BlocksStored
from skymemory.conductor.prefix_index.precise import WEIGHTS, PreciseIndex
from skymemory.conductor.request import seed

BLOCK_TOKENS = 4
MEDIA = ("CPU", "GPU")
RUN_BLOCKS = 128


def test_matches_and_weights_are_those_of_every_block_by_itself() -> None:
    dice = np.random.default_rng(2)
    for length in (1, RUN_BLOCKS - 1, RUN_BLOCKS, RUN_BLOCKS + 1, 3 * RUN_BLOCKS + 7):
        tokens = dice.integers(0, 1000, length * BLOCK_TOKENS, dtype=np.uint32)
        chain = native.chain_hashes(tokens.tobytes(), BLOCK_TOKENS * 4, seed("m", "", ""))
        index = PreciseIndex(BLOCK_TOKENS)
        held = {(slot, medium): set[int]() for slot in range(5) for medium in MEDIA}
        for slot in range(5):
            index.follow(slot, "m")
            for medium in MEDIA:
                stored = int(dice.integers(0, length + 1))
                index.take(slot, BlocksStored(list(range(stored)), None, tokens[: stored * 4].tolist(), 4, medium))
                gone = dice.choice(stored, min(stored, int(dice.integers(3))), replace=False).tolist()
                index.take(slot, BlocksRemoved(gone, medium))
                held[slot, medium] = set(range(stored)) - set(gone)
        slots = [3, 0, 4, 1, 2, 9]
        depths, sums = [], []
        for slot in slots:
            depth, total = 0, 0.0
            while slot < 5 and any(depth in held[slot, medium] for medium in MEDIA):
                total += max(WEIGHTS[medium] for medium in MEDIA if depth in held[slot, medium])
                depth += 1
            depths.append(depth)
            sums.append(total)
        assert index.match(chain, slots) == depths
        assert np.allclose(index.weighted(chain, slots), sums)
    assert index.match(chain[:0], slots) == [0] * 6
