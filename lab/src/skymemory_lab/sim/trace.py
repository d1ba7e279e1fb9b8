"""Request traces in Mooncake's format.

A line is a JSON object: ``timestamp`` (ms, never falling), ``input_length`` and ``output_length`` (tokens),
``hash_ids``.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from skymemory.errors import InvalidInput, quoted
from skymemory.files import decode_text, open_file
from skymemory.units import LARGEST_WHOLE

BLOCK_TOKENS = 512
BATCH_S = 3.0
_LARGEST = 2**53  # what a fraction holds exactly
_FIELDS = ("timestamp", "input_length", "output_length")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Request that arrives at ``at_s``."""

    at_s: float
    input_tokens: int
    output_tokens: int
    ids: tuple[int, ...]
    """A number per 512 prompt tokens (block); equal numbers mean equal prefixes.

    The last block is usually partial: engines do not cache it, but published tables count it.
    """
    session: int = 0

    def blocks(self, partial: bool = False) -> tuple[int, ...]:
        """Return the ids of its full blocks; with ``partial`` also of the last block."""
        return self.ids if partial else self.ids[: self.input_tokens // BLOCK_TOKENS]


def read_trace(path: Path, most: int | None = None) -> list[TraceRequest]:
    """Return the first ``most`` requests of a trace.

    Raises:
        InvalidInput: an invalid line, with its number, or no request.
        OSError: the file cannot be read.
    """
    requests: list[TraceRequest] = []
    owners: dict[int, int] = {}
    with open_file(path) as lines:
        for number, line in enumerate(lines, 1):
            if len(requests) == most:
                break
            if not line.strip():
                continue
            try:
                request = _parsed(decode_text(line))
            except (ValueError, TypeError) as error:
                raise InvalidInput(f"{path.name}, line {number}: {error}") from None
            if requests and request.at_s < requests[-1].at_s:
                before_ms, now_ms = round(requests[-1].at_s * 1000), round(request.at_s * 1000)
                complaint = f"timestamp {now_ms} after {before_ms}; expected no smaller one"
                raise InvalidInput(f"{path.name}, line {number}: {complaint}")
            requests.append(replace(request, session=_session(request.ids, owners, len(requests))))
    if not requests:
        raise InvalidInput(f"{path.name} has no requests")
    return requests


def jittered(requests: Sequence[TraceRequest], seed: int, within_s: float = BATCH_S) -> list[TraceRequest]:
    """Delay each arrival by a uniform draw up to ``within_s``, and sort again."""
    draw = random.Random(seed)
    moved = [replace(request, at_s=request.at_s + draw.uniform(0, within_s)) for request in requests]
    return sorted(moved, key=lambda request: request.at_s)


def at_rate(requests: Iterable[TraceRequest], rate: float) -> list[TraceRequest]:
    if rate <= 0:
        raise InvalidInput(f"rate {rate:g}: expected above 0")
    return [replace(request, at_s=request.at_s / rate) for request in requests]


def split_at(requests: Sequence[TraceRequest], share: float) -> float:
    """Return the time (s) at which ``share`` of the trace has passed."""
    if not 0 < share < 1:
        raise InvalidInput(f"share {share:g}: expected between 0 and 1")
    first_s, last_s = requests[0].at_s, requests[-1].at_s
    return first_s + share * (last_s - first_s)


def ideal_hits(requests: Iterable[TraceRequest], partial: bool = False) -> tuple[int, int]:
    """Return the hits of a single cache that never evicts, and the number of blocks."""
    known: set[int] = set()
    hits = blocks_total = 0
    for request in requests:
        blocks = request.blocks(partial)
        blocks_total += len(blocks)
        hits += next((at for at, block in enumerate(blocks) if block not in known), len(blocks))
        known.update(blocks)
    return hits, blocks_total


def _parsed(line: str) -> TraceRequest:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg})") from None
    except RecursionError:
        raise ValueError("not JSON (brackets within brackets, too deep)") from None
    except ValueError:  # Python's limit of digits
        raise ValueError("a whole number of more than 4,300 digits; expected at most 64 bits") from None
    if not isinstance(fields, dict):
        raise TypeError("not a JSON object")
    missing = [name for name in (*_FIELDS, "hash_ids") if name not in fields]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}")
    for name in _FIELDS:
        if type(fields[name]) is not int or not (name == "input_length") <= fields[name] <= _LARGEST:
            raise ValueError(f"{name} is {quoted(fields[name])}; expected a whole number, not negative, below 2^53")
    ids = fields["hash_ids"]
    if not isinstance(ids, list) or not all(
        type(block_id) is int and abs(block_id) <= LARGEST_WHOLE for block_id in ids
    ):
        raise TypeError("hash_ids: expected a list of whole numbers of at most 64 bits")
    tokens = fields["input_length"]
    expected = -(-tokens // BLOCK_TOKENS)
    if len(ids) != expected:
        raise ValueError(f"{len(ids)} hash_ids for {tokens} tokens, of {BLOCK_TOKENS} each: expected {expected}")
    return TraceRequest(fields["timestamp"] / 1000, tokens, fields["output_length"], tuple(ids))


def _session(ids: tuple[int, ...], owners: dict[int, int], new_session: int) -> int:
    # Return the session of the prompt's deepest known block, or ``new_session``; its new blocks get it, too.
    # All requests share the first block (a system prompt), so a session needs a second known block.
    known = next((at for at, block_id in enumerate(ids) if block_id not in owners), len(ids))
    session = owners[ids[known - 1]] if known > 1 else new_session
    for block_id in ids[known:]:
        owners[block_id] = session
    return session


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """Statistics of a trace or workload. Names with ``all`` include partial blocks."""

    requests: int
    duration_s: float
    rate_per_s: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    blocks: int
    distinct_blocks: int
    all_blocks: int
    all_distinct_blocks: int
    once_share: float
    """Share of the distinct blocks in one prompt only, which no cache can hit."""
    most_uses: int
    ideal_block_hits: float
    """Hit rate of a single cache that never evicts."""
    ideal_all_block_hits: float
    ideal_token_hits: float

    def as_json(self) -> dict[str, float]:
        return {name: value if isinstance(value, int) else round(value, 6) for name, value in asdict(self).items()}


def statistics_of(requests: Sequence[TraceRequest]) -> TraceStatistics:
    if not requests:
        raise InvalidInput("no requests: no statistics")
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
    """Return the number of prompts with each block, descending."""
    counts: Counter[int] = Counter()
    for request in requests:
        counts.update(request.blocks(partial))
    return sorted(counts.values(), reverse=True)


def shared_above(uses: Sequence[int], least: int) -> float:
    return sum(count >= least for count in uses) / max(1, len(uses))
