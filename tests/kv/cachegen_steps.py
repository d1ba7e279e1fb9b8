"""The steps by which a payload of the cachegen codec was rounded, and how far rounding may move a number."""

from __future__ import annotations

import numpy as np

from skymemory.kv.block import Buffer, KVLayout
from skymemory.kv.codec.cachegen import CacheGen, Steps, _codes, _sections, steps_of
from skymemory.kv.codec.entropy import MAX_PULL

CACHEGEN = CacheGen()

PULL_LIMIT = MAX_PULL / 64
"""Of a step: beyond the half of rounding no number moves by more on its account."""
BOUND = (0.5 + PULL_LIMIT) * 2**0.5
"""Of a step: half of one by rounding, a quarter by the pull; where a pair was turned, both of a pair's in one."""


def steps_in(payload: Buffer, layout: KVLayout) -> Steps:
    """The steps (layers, 2, kv_heads) of a payload: no decoded number is farther than ``BOUND`` of its head's steps
    from the original, but for the rounding to the layout's dtype. MalformedPacket as ``decode`` raises it."""
    sections = _sections(memoryview(payload).cast("B"), layout)
    steps = [steps_of(_codes(section, layout)) for section in sections]
    return np.stack(steps).reshape(layout.layers, 2, layout.kv_heads)
