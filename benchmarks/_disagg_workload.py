"""The requests of `disagg.py`: one seeded list that real engines and the cluster simulator both get.

A prompt is perhaps one of a few shared beginnings, of whole blocks of the simulator's, and text of its own. Engines get
it as token ids, made block by block from the block's id: equal ids are equal tokens, so both find the same prefixes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from skymemory.conductor.cost_model import CostModel
from skymemory_lab.sim.cluster.setup import PromptHandover
from skymemory_lab.sim.trace import BLOCK_TOKENS, TraceRequest
from skymemory_lab.sim.workload import BlockNames, LogNormal, Popularity

AFTER = 64
"""Below this are ids with a meaning of their own, such as the end of a text."""


@dataclass(frozen=True)
class Mix:
    name: str
    own: LogNormal
    """Tokens of a prompt that no other has."""
    answer: LogNormal
    shared: float = 0.0
    """Part of the requests with a shared beginning."""
    beginnings: int = 6
    blocks: int = 1
    """Of a beginning, in blocks of the simulator."""


MIXES = {
    one.name: one
    for one in (
        Mix("chat", LogNormal(300, 0.7, 48, 1400), LogNormal(32, 0.5, 8, 96), shared=0.6),
        Mix("summaries", LogNormal(1100, 0.5, 300, 2600), LogNormal(16, 0.4, 4, 48)),
        Mix("answers", LogNormal(160, 0.5, 48, 480), LogNormal(72, 0.4, 24, 160), shared=0.3),
    )
}
TURNS = Mix("turns", LogNormal(60, 1.0, 8, 800), LogNormal(32, 0.5, 8, 96), shared=0.6)
"""Short prompts, and long ones of which all but a little was asked before."""


def requests_of(mix: Mix, rate_per_s: float, seconds: float, seed: int) -> list[TraceRequest]:
    """Poisson arrivals for ``seconds``. Another rate has the same sequence of requests."""
    dice, clock = random.Random(f"{mix.name} {seed}"), random.Random(f"arrivals {seed}")
    popular, names = Popularity(mix.beginnings, 1.0), BlockNames()
    weights = popular.weights()
    made: list[TraceRequest] = []
    at_s = clock.expovariate(rate_per_s)
    while at_s < seconds:
        stem: tuple[tuple[str, int, int], ...] = ()
        if dice.random() < mix.shared:
            stem = (("beginning", popular.draw(dice, weights, at_s), mix.blocks * BLOCK_TOKENS),)
        own, answer = mix.own.draw(dice), mix.answer.draw(dice)
        ids = names.of(stem, ("own", len(made), own))
        tokens = own + sum(part[2] for part in stem)
        made.append(TraceRequest(at_s, tokens, answer, ids, session=len(made)))
        at_s += clock.expovariate(rate_per_s)
    return made


def token_ids(ids: Sequence[int], tokens: int, vocabulary: int, seed: int) -> list[int]:
    """The prompt of ``tokens`` tokens with these blocks."""
    found: list[int] = []
    for block in ids:
        dice = random.Random(f"{seed} {block}")
        found += dice.choices(range(AFTER, vocabulary), k=min(BLOCK_TOKENS, tokens - len(found)))
    return found


def busy_s(requests: Sequence[TraceRequest], cost: CostModel, handover: PromptHandover) -> tuple[float, float]:
    """Mean seconds of a request at the prefill and at the decode instance, by the model; nothing cached elsewhere than
    in an instance's own memory."""
    seen: set[int] = set()
    prefill_s = decode_s = 0.0
    for one in requests:
        held = 0
        for block in one.blocks():
            if block not in seen:
                break
            held += BLOCK_TOKENS
        seen.update(one.blocks())
        prefill_s += cost.prefill_s(one.input_tokens, held)
        decode_s += handover.take_s + handover.take_token_s * one.input_tokens
        decode_s += (one.output_tokens - 1) * cost.decode_step_s(4, 4 * one.input_tokens) / 4
    return prefill_s / len(requests), decode_s / len(requests)


def scaled(cost: CostModel, prefill: float, decode: float) -> CostModel:
    """The model with prefills and decoding steps that many times as long."""
    speeds = replace(
        cost.machine,
        flops_per_s=cost.machine.flops_per_s / prefill,
        memory_bytes_per_s=cost.machine.memory_bytes_per_s / decode,
    )
    return replace(
        cost,
        machine=speeds,
        fixed_s=cost.fixed_s * prefill,
        cached_token_s=cost.cached_token_s * prefill,
        decode_fixed_s=cost.decode_fixed_s * decode,
        decode_request_s=cost.decode_request_s * decode,
    )


def line_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """``(fixed, per unit)``, neither below 0, through points (units, seconds): the median of all slopes, then of what
    is left (Theil and Sen), so that one disturbed measurement moves nothing.

    Raises ValueError without two different numbers of units.
    """
    slopes = sorted(
        (later - earlier) / (more - fewer) for fewer, earlier in points for more, later in points if more > fewer
    )
    if not slopes:
        raise ValueError("a line needs two points")
    slope = max(0.0, slopes[len(slopes) // 2])
    left = sorted(seconds - slope * units for units, seconds in points)
    return max(0.0, left[len(left) // 2]), slope
