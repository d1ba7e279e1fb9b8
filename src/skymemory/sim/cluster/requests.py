"""A trace's requests as the simulated cluster's scheduler is asked about them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from skymemory.conductor.request import Prompt, Request
from skymemory.sim.cluster.setup import ClusterSetup
from skymemory.sim.trace import BLOCK_TOKENS, TraceRequest, at_rate, jittered


def timed(requests: Sequence[TraceRequest], setup: ClusterSetup) -> list[TraceRequest]:
    """With the setup's jitter and at its rate."""
    moved = jittered(requests, setup.seed, setup.jitter_s) if setup.jitter_s else list(requests)
    return at_rate(moved, setup.rate) if setup.rate != 1.0 else moved


def asked(request: TraceRequest, setup: ClusterSetup, dice: random.Random) -> Request:
    """The blocks are the trace's own numbers; ``dice`` for what is said of the answer's length, if it errs."""
    blocks = np.array(request.blocks(setup.partial), dtype=np.uint64)
    prompt = Prompt(blocks, blocks, BLOCK_TOKENS, request.input_tokens)
    said: int | None = None
    if setup.tells_output:
        said = request.output_tokens
        if setup.output_error:
            said = max(1, round(said * (1 + setup.output_error * max(-3.0, min(3.0, dice.gauss(0, 1))))))
    return Request(prompt, session=str(request.session), output_tokens=said)
