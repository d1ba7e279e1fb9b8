"""One prompt loaded in virtual time under a setting of the Cake paper: by computing, by loading, and by both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from skymemory.cache.pace import Pace
from skymemory.cache.prompt_chunks import PromptChunk
from skymemory.sim.loading import LinkTrace, SimulatedLoad, best_split_s, simulate_load
from skymemory.sim.prefill import PAPER_STEP_TOKENS, PAPER_TOKEN_BYTES, PrefillModel, share_tokens, with_share

MBIT_BYTES = 125_000
PAPER_MBIT = (2_000, 5_000, 10_000)
CODECS = {"raw": 1.0, "8 bit": 1.95, "CacheGen": 7.97}
"""By how much faster a codec's bytes came, as the paper measured it (section 5.4); taken over, not reproduced."""
_KNOWN = 3
"""Prompts before the one that counts, so that the loader knows the speeds, as in an engine that has been running."""


@dataclass(frozen=True, slots=True)
class CakeRun:
    """What one setting takes, in seconds until the whole prompt is there."""

    compute_s: float
    load_s: float
    cake_s: float
    hindsight_s: float
    computed_share: float
    """Of the tokens, by Cake."""

    @property
    def saved_of_compute(self) -> float:
        return 1 - self.cake_s / self.compute_s

    @property
    def saved_of_load(self) -> float:
        return 1 - self.cake_s / self.load_s


def prompt_chunks(tokens: int, chunk_tokens: int, token_bytes: float = PAPER_TOKEN_BYTES) -> tuple[PromptChunk, ...]:
    """A prompt that is stored whole, in chunks of ``chunk_tokens``."""
    sizes = [(at, min(chunk_tokens, tokens - at)) for at in range(0, tokens, chunk_tokens)]
    return tuple(PromptChunk(at, count, round(count * token_bytes), True) for at, count in sizes)


def load_with_cake(
    gpu: PrefillModel,
    tokens: int,
    trace: LinkTrace,
    *,
    budget_tokens: int = PAPER_STEP_TOKENS,
    chunk_tokens: int = PAPER_STEP_TOKENS,
    pace: Pace | None = None,
    codec: str = "raw",
    max_in_flight_bytes: int = 1,
    timer: Callable[[], float] | None = None,
) -> SimulatedLoad:
    """Our loader over one prompt; by default one fetch at a time, as in the paper."""
    chunks = prompt_chunks(tokens, chunk_tokens, PAPER_TOKEN_BYTES / CODECS[codec])
    return simulate_load(
        chunks,
        gpu.step_s,
        trace,
        budget_tokens=budget_tokens,
        max_in_flight_bytes=max_in_flight_bytes,
        pace=pace,
        others_fill=budget_tokens < PAPER_STEP_TOKENS,
        timer=timer,
    )


@lru_cache(maxsize=4096)
def cake_run(
    gpu: PrefillModel,
    share: float,
    tokens: int,
    mbit_per_s: int,
    codec: str = "raw",
    chunk_tokens: int | None = None,
) -> CakeRun:
    """All three ways under one setting. A chunk is what the budget computes in a step, as in the paper's appendix B."""
    model, budget = with_share(gpu, share), share_tokens(share)
    size, trace = chunk_tokens or budget, LinkTrace.constant(mbit_per_s * MBIT_BYTES)
    pace = Pace()
    for _ in range(_KNOWN):
        run = load_with_cake(model, tokens, trace, budget_tokens=budget, chunk_tokens=size, pace=pace, codec=codec)
    chunks = prompt_chunks(tokens, size, PAPER_TOKEN_BYTES / CODECS[codec])
    return CakeRun(
        compute_s=model.prompt_s(tokens, budget),
        load_s=trace.finish_s(0.0, sum(chunk.size_bytes for chunk in chunks)),
        cake_s=run.ttft_s,
        hindsight_s=best_split_s(chunks, model.step_s, trace, budget_tokens=budget),
        computed_share=run.result.computed_tokens / tokens,
    )


def fluid_run(gpu: PrefillModel, tokens: int, mbit_per_s: int) -> CakeRun:
    """The same of a prompt without chunks, on a whole GPU: both sides meet at a point and not at the end of a chunk."""
    load_token_s = PAPER_TOKEN_BYTES / (mbit_per_s * MBIT_BYTES)
    # token_s·x + pair_s·x² = load_token_s·(tokens − x)
    linear = gpu.token_s + load_token_s
    root = (linear * linear + 4 * gpu.pair_s * load_token_s * tokens) ** 0.5
    computed = 2 * load_token_s * tokens / (linear + root)
    cake_s = gpu.token_s * computed + gpu.pair_s * computed * computed
    return CakeRun(gpu.prompt_s(tokens), load_token_s * tokens, cake_s, cake_s, computed / tokens)
