"""What can be said of requests before any of them is served: rates, lengths, popularity of blocks, hits at best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from skymemory.errors import InvalidInput
from skymemory.sim.trace import BLOCK_TOKENS, TraceRequest, ideal_hits


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """Of a trace or a generated workload. Blocks are whole ones unless it says *all*: then those not full count too."""

    requests: int
    duration_s: float
    """From the first arrival to the last."""
    rate_per_s: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    blocks: int
    distinct_blocks: int
    all_blocks: int
    all_distinct_blocks: int
    once_share: float
    """Of the distinct blocks (all), those in one prompt only: no cache can ever hit them."""
    most_uses: int
    """Of the block in most prompts."""
    ideal_block_hits: float
    """Hits of one cache that never evicts, as a part of ``blocks``."""
    ideal_all_block_hits: float
    """The same of ``all_blocks``, as published tables count."""
    ideal_token_hits: float
    """Tokens in those hits (whole blocks), as a part of the prompts' tokens."""

    def as_json(self) -> dict[str, float]:
        return {name: value if isinstance(value, int) else round(value, 6) for name, value in asdict(self).items()}


def statistics_of(requests: Sequence[TraceRequest]) -> TraceStatistics:
    """Raises InvalidInput where there is no request."""
    if not requests:
        raise InvalidInput("no requests: nothing to tell of them")
    tokens = sum(request.input_tokens for request in requests)
    hits, blocks = ideal_hits(requests)
    all_hits, all_blocks = ideal_hits(requests, partial=True)
    uses = block_uses(requests, partial=True)
    duration_s = requests[-1].at_s - requests[0].at_s
    return TraceStatistics(
        requests=len(requests),
        duration_s=duration_s,
        rate_per_s=len(requests) / duration_s if duration_s > 0 else 0.0,
        mean_prompt_tokens=tokens / len(requests),
        mean_output_tokens=sum(request.output_tokens for request in requests) / len(requests),
        blocks=blocks,
        distinct_blocks=len(block_uses(requests)),
        all_blocks=all_blocks,
        all_distinct_blocks=len(uses),
        once_share=sum(count == 1 for count in uses) / len(uses),
        most_uses=uses[0],
        ideal_block_hits=hits / max(1, blocks),
        ideal_all_block_hits=all_hits / all_blocks,
        ideal_token_hits=hits * BLOCK_TOKENS / tokens,
    )


def block_uses(requests: Iterable[TraceRequest], partial: bool = False) -> list[int]:
    """In how many prompts each block is, the most popular first; its index is the block's rank less one."""
    counts: Counter[int] = Counter()
    for request in requests:
        counts.update(request.blocks(partial))
    return sorted(counts.values(), reverse=True)


def shared_above(uses: Sequence[int], least: int) -> float:
    """Part of the distinct blocks that are in ``least`` prompts or more."""
    return sum(count >= least for count in uses) / max(1, len(uses))
