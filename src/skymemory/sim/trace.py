"""Requests as an hour of a real service had them: Mooncake's traces, and what is done to them before they are replayed.

One JSON object a line: ``timestamp`` (ms, never falling), ``input_length`` and ``output_length`` (tokens), ``hash_ids``
(one number per 512 tokens of the prompt; equal numbers mean equal prefixes). The last number usually stands for a block
that is not full, which no engine caches; published tables count it all the same, so both countings are offered.

In the conversation trace arrivals come in batches 3 s apart: ``jittered`` spreads each over the time since the one
before. It names no clients; ``session`` is inferred: a request belongs to the session that brought the deepest of
its blocks that was seen before, and to a new one where that is only the block with which all requests begin.
"""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from skymemory.errors import InvalidInput
from skymemory.files import open_file

BLOCK_TOKENS = 512
BATCH_S = 3.0
_FIELDS = ("timestamp", "input_length", "output_length")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace, or of a generator that writes what traces hold."""

    at_s: float
    input_tokens: int
    output_tokens: int
    ids: tuple[int, ...]
    """One per begun block of the prompt: ``ceil(input_tokens / BLOCK_TOKENS)``. Equal ids mean equal prefixes."""
    session: int = 0

    def blocks(self, partial: bool = False) -> tuple[int, ...]:
        """The ids of its whole blocks; with ``partial`` also of the last that is not full."""
        return self.ids if partial else self.ids[: self.input_tokens // BLOCK_TOKENS]


def read_trace(path: Path, most: int | None = None) -> list[TraceRequest]:
    """The requests of a trace, the first ``most`` of them, in its order.

    Raises:
        InvalidInput: with the number of the line that is not a request, or when there is none at all.
        OSError: the file cannot be read.
    """
    requests: list[TraceRequest] = []
    owners: dict[int, int] = {}
    with io.TextIOWrapper(open_file(path), encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(requests) == most:
                break
            if not line.strip():
                continue
            try:
                request = _parsed(line)
            except (ValueError, TypeError) as error:
                raise InvalidInput(f"{path.name}, line {number}: {error}") from None
            if requests and request.at_s < requests[-1].at_s:
                before_ms, now_ms = round(requests[-1].at_s * 1000), round(request.at_s * 1000)
                complaint = f"timestamp {now_ms} after {before_ms}; they must not fall"
                raise InvalidInput(f"{path.name}, line {number}: {complaint}")
            requests.append(replace(request, session=_session(request.ids, owners, len(requests))))
    if not requests:
        raise InvalidInput(f"{path.name} holds no request")
    return requests


def jittered(requests: Sequence[TraceRequest], seed: int, within_s: float = BATCH_S) -> list[TraceRequest]:
    """Each arrival moved later by an even draw of up to ``within_s``, in the order that results."""
    draw = random.Random(seed)
    moved = [replace(request, at_s=request.at_s + draw.uniform(0, within_s)) for request in requests]
    return sorted(moved, key=lambda request: request.at_s)


def at_rate(requests: Iterable[TraceRequest], rate: float) -> list[TraceRequest]:
    """The same requests, arriving ``rate`` times as fast."""
    if rate <= 0:
        raise InvalidInput(f"requests cannot arrive {rate:g} times as fast; name a rate above 0")
    return [replace(request, at_s=request.at_s / rate) for request in requests]


def split_at(requests: Sequence[TraceRequest], share: float) -> float:
    """The instant (s) when ``share`` of the trace's time has gone: who tunes looks only at what came before."""
    if not 0 < share < 1:
        raise InvalidInput(f"a part of {share:g} leaves nothing on one side; name one between 0 and 1")
    first_s, last_s = requests[0].at_s, requests[-1].at_s
    return first_s + share * (last_s - first_s)


def ideal_hits(requests: Iterable[TraceRequest], partial: bool = False) -> tuple[int, int]:
    """Blocks that one cache that never evicts would hit, and all blocks."""
    seen: set[int] = set()
    hits = asked = 0
    for request in requests:
        blocks = request.blocks(partial)
        asked += len(blocks)
        hits += next((at for at, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
    return hits, asked


def _parsed(line: str) -> TraceRequest:
    """Raises ValueError or TypeError, with what is wrong."""
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg})") from None
    if not isinstance(fields, dict):
        raise TypeError("not a JSON object")
    missing = [name for name in (*_FIELDS, "hash_ids") if name not in fields]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}")
    for name in _FIELDS:
        if type(fields[name]) is not int or fields[name] < (name == "input_length"):
            raise ValueError(f"{name} is {fields[name]!r}; a whole number, not negative, is wanted")
    ids = fields["hash_ids"]
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise TypeError("hash_ids must be a list of whole numbers")
    tokens = fields["input_length"]
    begun = -(-tokens // BLOCK_TOKENS)
    if len(ids) != begun:
        raise ValueError(f"{len(ids)} hash_ids for {tokens} tokens, of {BLOCK_TOKENS} each: {begun} are wanted")
    return TraceRequest(fields["timestamp"] / 1000, tokens, fields["output_length"], tuple(ids))


def _session(ids: tuple[int, ...], owners: dict[int, int], fresh: int) -> int:
    seen = next((at for at, one in enumerate(ids) if one not in owners), len(ids))
    session = owners[ids[seen - 1]] if seen > 1 else fresh
    for one in ids[seen:]:
        owners[one] = session
    return session


# What can be said of requests before any of them is served: rates, lengths, popularity of blocks, hits at best.


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
