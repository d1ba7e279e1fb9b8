"""Shared parts of routing strategies, and their base ``Indexed``."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from skymemory import native
from skymemory.conductor.picker import ElsewhereRequest, Ranking, Scorer, Server
from skymemory.conductor.prefix_index.approximate import PrefixIndex
from skymemory.conductor.request import Prompt, Request
from skymemory.errors import InvalidInput

MOST_UNDER_WAY = 8192
"""Limit of blocks under way."""
ANSWERING = 4096
"""Limit of requests remembered until their answer ends."""
BELIEVABLE = 0.5
"""Share of the estimated blocks that a server must confirm.

Smaller differences come from blocks of characters and the engine's own block size.
"""
Note = TypeVar("Note")


class RequestNotes(Generic[Note]):
    """Notes on requests sent and not answered yet, by request and server; repeated sends queue their notes.

    Requests are kept alive, so that ids are not reused.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], tuple[Request, Note]] = {}
        self._further: dict[tuple[int, int], list[Note]] = {}

    def __len__(self) -> int:
        return len(self._open) + sum(map(len, self._further.values()))

    def add(self, request: Request, server: Server, note: Note) -> None:
        key, entry = (id(request), server.slot), (request, note)
        if self._open.setdefault(key, entry) is not entry:
            self._further.setdefault(key, []).append(note)

    def take(self, request: Request, server: Server) -> Note | None:
        # The first note is returned; the next, of a repeated send, takes its place.
        key = (id(request), server.slot)
        entry = self._open.pop(key, None)
        if entry is None:
            return None
        if self._further and key in self._further:
            self._open[key] = (request, self._further[key].pop(0))
            if not self._further[key]:
                del self._further[key]
        return entry[1]

    def forget(self, server: Server) -> None:
        for key in [key for key in self._open if key[1] == server.slot]:
            del self._open[key]
            self._further.pop(key, None)


Sent = tuple[int, int, Any]
"""Leading blocks by the index, ticket under way (0: none), strategy's own note."""
STALE_S = 5.0


def requests_at(server: Server, now_s: float) -> float:
    """Return the requests at a server: reported, including other clients', or ours and our replicas' if more."""
    report = server.reported
    if report is None or now_s - report.at_s > STALE_S:
        return float(server.in_flight + server.elsewhere)
    return float(max(server.in_flight + server.elsewhere, report.waiting + report.running))


def loads_of(servers: Sequence[Server], now_s: float) -> list[float]:
    return [requests_at(server, now_s) for server in servers]


def ranked_by_load(loads: Sequence[float], reason: str = "", matched: Sequence[int] | None = None) -> Ranking:
    reasons = (reason,) if reason else ()
    return Ranking([-load for load in loads], matched, reasons=reasons, weights=(("requests there", loads),))


def load_bound(loads: Sequence[float], factor: float) -> int:
    """Return the requests that a server may have, including the new request."""
    # Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016).
    return math.ceil(factor * (sum(loads) + 1.0) / len(loads))


def check_factor(factor: float) -> None:
    if not (1.0 <= factor < math.inf):
        raise InvalidInput(f"load_factor is {factor}; expected 1 or more, such as 1.25")


@dataclass(frozen=True, slots=True)
class GainThreshold:
    """Least match worth following, in tokens and as a share of the prompt: a short one is not worth
    unbalanced loads.
    """

    tokens: int = 0
    ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise InvalidInput(f"min_match_tokens is {self.tokens}; expected 0 or more")
        if not 0.0 <= self.ratio < 1.0:
            raise InvalidInput(f"min_match_ratio is {self.ratio}; expected 0 or more and less than 1")

    def worth(self, matched_tokens: float, prompt_tokens: int) -> bool:
        return matched_tokens > self.tokens and matched_tokens > self.ratio * prompt_tokens

    def why_not(self, matched_tokens: float, prompt_tokens: int) -> str:
        if not prompt_tokens:
            return "load only: the prompt is empty"
        if matched_tokens <= 0:
            return f"load only: nothing of the prompt's {prompt_tokens} tokens matches anywhere"
        limits = [f"{self.tokens} tokens"] if self.tokens else []
        limits += [f"{self.ratio:.0%} of the prompt"] if self.ratio else []
        return (
            f"load only: the best match, {matched_tokens:.0f} of {prompt_tokens} tokens,"
            f" is not over the threshold of {' and '.join(limits)}"
        )


_MASK = (1 << 64) - 1


def hash_words(*words: bytes) -> int:
    """Return a 64-bit hash, equal on every machine."""
    state = blake2b(digest_size=8)
    for word in words:
        state.update(len(word).to_bytes(8, "little"))
        state.update(word)
    return int.from_bytes(state.digest(), "little")


def scope_of(request: Request) -> tuple[bytes, bytes, bytes]:
    """Return the words that separate caches."""
    return request.model.encode(), request.adapter.encode(), request.salt.encode()


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class NameHashes:
    def __init__(self) -> None:
        self._of: dict[str, int] = {}

    def of(self, name: str) -> int:
        known = self._of.get(name)
        if known is None:
            if len(self._of) >= 4096:  # bounded: names of pods change with every restart
                self._of.clear()
            known = self._of[name] = hash_words(name.encode())
        return known


class Indexed(Scorer):
    """Base of strategies with a prefix index.

    A prompt counts as held once sent: requests queued after it will find it cached. Until its first byte it is *under
    way*, which a failure undoes.
    """

    def __init__(self, index: PrefixIndex, under_way_blocks: int = MOST_UNDER_WAY) -> None:
        self.index = index
        self._set_capacity = getattr(index, "set_capacity", None)
        # Prompts sent and not computed yet, counted as held.
        self._counts_under_way = under_way_blocks > 0
        self._under_way = under_way(under_way_blocks, getattr(index, "secret", None))
        self._notes: RequestNotes[Sent] = RequestNotes()
        # Believed blocks and last prompt block, which detects a reused id, of requests being answered.
        self._answering: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()

    def matched_tokens(self, prompt: Prompt, blocks: Sequence[int]) -> list[int]:
        per_block, tokens = prompt.block_tokens, prompt.tokens
        return [min(tokens, int(count * per_block)) if count else 0 for count in blocks]

    def held_blocks(self, prompt: Prompt, servers: Sequence[Server]) -> list[int]:
        """Return the leading blocks per server, by the index."""
        if not len(prompt.blocks):
            return [0] * len(servers)
        return self.index.match(prompt.blocks, [server.slot for server in servers])

    def matched_blocks(
        self, prompt: Prompt, servers: Sequence[Server], held_blocks: Sequence[int] | None = None
    ) -> Sequence[int]:
        """Return ``held_blocks``, with the prompts under way."""
        held_blocks = self.held_blocks(prompt, servers) if held_blocks is None else held_blocks
        if not len(prompt.blocks) or not len(self._under_way):
            return held_blocks
        return list(map(max, held_blocks, self._under_way.depths(prompt.blocks, [server.slot for server in servers])))

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        self.record_sent(request, server, self.held_blocks(request.prompt, (server,))[0])

    # Blocks of a prompt at its server, from send to answer: under way (``record_sent``), learnt by the index
    # (``arrived``, ``learn``), and dropped from it if the engine reports that it had fewer than believed
    # (``corrected``). The report describes the time before this prompt was computed, so the prompt itself is learnt
    # again afterwards.

    def record_sent(self, request: Request, server: Server, believed: int, estimated: object = None) -> None:
        """Record a request sent to a server that holds ``believed`` of its blocks."""
        blocks = request.prompt.blocks
        ticket = self._under_way.add(server.slot, blocks) if self._counts_under_way and len(blocks) else 0
        self._notes.add(request, server, (believed, ticket, estimated))

    def arrived(self, request: Request, server: Server) -> Sent | None:
        """End the prompt's time under way; return its record, if any."""
        sent = self._notes.take(request, server)
        if sent is not None:
            _, ticket, _ = sent
            if ticket:
                self._under_way.drop(ticket)
        return sent

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        self.learn(request, server, self.arrived(request, server), cached_tokens)

    def learn(self, request: Request, server: Server, sent: Sent | None, cached_tokens: int | None) -> None:
        """Record that the server, which has answered, holds the prompt; correct earlier beliefs."""
        prompt = request.prompt
        blocks = prompt.blocks
        if not len(blocks):
            return
        believed = 0 if sent is None else sent[0]
        if believed:  # otherwise there is nothing to correct
            if cached_tokens is None:
                self._answering[id(request), server.slot] = believed, blocks.item(-1)
                if len(self._answering) > ANSWERING:
                    self._answering.popitem(last=False)
            else:
                self._correct(prompt, server, believed, cached_tokens)
        report = server.reported
        if report is not None and report.cache_blocks and report.block_tokens and self._set_capacity is not None:
            # The original endpoint picker ignores the report, and matches blocks that were long evicted.
            tokens = report.cache_blocks * report.block_tokens * server.read_per_token
            self._set_capacity(server.slot, max(1, int(tokens / prompt.block_tokens)))
        self.index.learn(server.slot, blocks)

    def corrected(self, request: Request, server: Server, now_s: float, cached_tokens: int) -> None:
        """Correct the index by the cached tokens that the end of an answer reports."""
        blocks = request.prompt.blocks
        believed, last = self._answering.pop((id(request), server.slot), (0, 0))
        if not believed or not len(blocks) or blocks.item(-1) != last:
            return
        if self._correct(request.prompt, server, believed, cached_tokens):
            self.index.learn(server.slot, blocks)  # by now the server holds the prompt

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        self.arrived(request, server)

    def sent_elsewhere(self, request: ElsewhereRequest, server: Server, now_s: float) -> object:
        has_blocks = self._counts_under_way and request.computes and len(request.blocks) > 0
        return self._under_way.add(server.slot, request.blocks) if has_blocks else 0

    def prefilled_elsewhere(self, ticket: object, server: Server, at_s: float, *, is_seen: bool) -> None:
        if isinstance(ticket, int) and ticket:
            self._under_way.drop(ticket)

    def forget(self, server: Server) -> None:
        self._notes.forget(server)
        self._under_way.forget(server.slot)
        for key in [key for key in self._answering if key[1] == server.slot]:
            del self._answering[key]
        self.index.forget(server.slot)

    def _correct(self, prompt: Prompt, server: Server, believed: int, cached_tokens: int) -> bool:
        """Drop blocks that were believed to be cached and were not; return True if any were."""
        confirmed = int(cached_tokens / prompt.block_tokens)
        # One block more than reported is allowed, because engines recompute the last block of a fully cached prompt.
        return confirmed + 1 < believed * BELIEVABLE and self.index.correct(server.slot, prompt.blocks, confirmed) > 0


def under_way(most_blocks: int, secret: int | None) -> native.UnderWay:
    return native.UnderWay(most_blocks) if secret is None else native.UnderWay(most_blocks, secret)
