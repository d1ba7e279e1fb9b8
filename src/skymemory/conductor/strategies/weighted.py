from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.conductor.picker import Ranking, Server
from skymemory.conductor.prefix_index.approximate import PrefixIndex
from skymemory.conductor.prefix_index.events import CPU, DISK, GPU, REMOTE
from skymemory.conductor.prefix_index.precise import WEIGHTS, PreciseIndex
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.strategies.strategy_base import MOST_UNDER_WAY, STALE_S, GainThreshold, Indexed, under_way
from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class WeightedSettings:
    """Weights of a short queue, a free KV cache and a matched prefix in a server's score, and the least
    useful match.
    """

    queue_weight: float = 2.0
    kv_weight: float = 2.0
    prefix_weight: float = 3.0
    min_match_tokens: int = 0
    min_match_ratio: float = 0.0

    def __post_init__(self) -> None:
        if min(self.queue_weight, self.kv_weight, self.prefix_weight) < 0:
            raise InvalidInput("a weight is negative; expected 0 or more, such as 2, 2 and 3")


@dataclass(frozen=True, slots=True)
class ApproximateSettings(WeightedSettings):
    blocks_per_server: int = 31_250
    max_match_blocks: int = 2_048
    """Limit of matched blocks per prompt, unless ``max_match_tokens`` sets it; 0: all."""
    max_match_tokens: int = 131_072
    """Limit of matched tokens per prompt, and of those that the matched part is a part of; 0: none."""

    def __post_init__(self) -> None:
        WeightedSettings.__post_init__(self)
        if min(self.max_match_blocks, self.max_match_tokens) < 0:
            raise InvalidInput("max_match_blocks or max_match_tokens is negative; expected 0 or more, such as 131072")

    @property
    def most_blocks(self) -> int | None:
        """Limit of blocks per prompt, for the index; None: all."""
        return None if self.max_match_tokens else self.max_match_blocks or None


class Approximate(Indexed):
    """Strategy by a weighted sum of queue, KV cache usage and matched prefix.

    Source: llm-d's endpoint picker (once the Gateway API inference extension's), with weights 2, 2 and 3. Differences:
    the index counts contiguous matches, evicts a prefix's head last, undoes failed requests and uses reported
    capacities; blocks may be shorter than 64 tokens; requests sent since a report count; a server without a report
    counts as average.
    """

    name = "approximate"

    def __init__(
        self, index: PrefixIndex, settings: WeightedSettings | None = None, under_way_blocks: int = MOST_UNDER_WAY
    ) -> None:
        super().__init__(index, under_way_blocks)
        self.settings = settings = settings or ApproximateSettings()
        self._most_tokens = settings.max_match_tokens if isinstance(settings, ApproximateSettings) else 0
        # Requests sent to a server since its report at this time.
        self._since: dict[int, tuple[float, int]] = {}
        self._gain = GainThreshold(self.settings.min_match_tokens, self.settings.min_match_ratio)

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        tokens, settings = request.prompt.tokens, self.settings
        matched, shares = self.get_held_tokens(request.prompt, servers)
        reasons: tuple[str, ...] = ()
        if not any(self._gain.worth(share * tokens, tokens) for share in shares):
            reasons = (self._gain.why_not(max(shares) * tokens, tokens),)
            shares = [0.0] * len(servers)
        queues, room = self._loads(servers, now_s)
        # As in the endpoint picker, queues count relative to each other, KV use and prefix absolutely. If all other
        # queues are equal, a single additional request costs the whole weight.
        shortest, longest = min(queues), max(queues)
        per_waiting = settings.queue_weight / (longest - shortest) if longest > shortest else 0.0
        scores = [
            settings.queue_weight
            - per_waiting * (queue - shortest)
            + settings.kv_weight * free
            + settings.prefix_weight * share
            for queue, free, share in zip(queues, room, shares, strict=True)
        ]
        weights = (("requests waiting", queues), ("KV cache free", room), ("share of the prompt held", shares))
        return Ranking(scores, matched, reasons=reasons, weights=weights)

    def get_held_tokens(self, prompt: Prompt, servers: Sequence[Server]) -> tuple[list[int], list[float]]:
        """Return the tokens that each server holds, and their weighted share, 0 to 1."""
        counted = min(prompt.tokens, self._most_tokens or prompt.tokens)
        held = self.matched_tokens(prompt, self.matched_blocks(prompt, servers))
        matched = [min(tokens, counted) for tokens in held]
        return matched, [tokens / counted if tokens else 0.0 for tokens in matched]

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        """Count the requests sent since the server's last report."""
        super().routed(request, server, now_s)
        if (report := server.reported) is not None:
            at_s, sent = self._since.get(server.slot, (report.at_s, 0))
            self._since[server.slot] = report.at_s, sent + 1 if at_s == report.at_s else 1

    def forget(self, server: Server) -> None:
        super().forget(server)
        self._since.pop(server.slot, None)

    def _loads(self, servers: Sequence[Server], now_s: float) -> tuple[list[float], list[float]]:
        # Return, per server, the requests that wait and the free share of the KV cache.
        queues: list[float] = []
        free: list[float | None] = []
        for server in servers:
            report = server.reported
            if report is None or now_s - report.at_s > STALE_S:
                queues.append(float(server.prefilling + server.elsewhere_prefilling))
                free.append(None)
            else:
                # Without the requests sent since the report, all requests until the next report would go to the same
                # server. Only sent requests without a first byte can still be waiting.
                at_s, sent = self._since.get(server.slot, (report.at_s, 0))
                queues.append(float(report.waiting + (min(sent, server.prefilling) if at_s == report.at_s else 0)))
                free.append(1.0 - report.kv_usage)
        known = [share for share in free if share is not None]
        # A server without a report counts as average: as empty it would get everything, as full nothing.
        usual = sum(known) / len(known) if known else 1.0
        return queues, [usual if share is None else share for share in free]


MOST_BLOCKS = 8192


@dataclass(frozen=True, slots=True)
class PreciseSettings(WeightedSettings):
    """Settings of ``Precise``; weights of a held block by medium, as llm-d's ``kvCacheBackendConfigs``."""

    block_tokens: int = 16
    speculative_s: float = 0.0
    """Time for which a sent prompt counts as held; 0: only events count."""
    gpu_weight: float = WEIGHTS[GPU]
    cpu_weight: float = WEIGHTS[CPU]
    disk_weight: float = WEIGHTS[DISK]
    remote_weight: float = WEIGHTS[REMOTE]

    def __post_init__(self) -> None:
        WeightedSettings.__post_init__(self)
        if self.speculative_s < 0:
            raise InvalidInput(f"speculative_s is {self.speculative_s}; expected 0 or more, such as 2")
        if self.block_tokens < 1:
            raise InvalidInput(f"block_tokens is {self.block_tokens}; expected 1 or more, such as 16")
        for medium, weight in self.weights().items():
            if not 0 <= weight < math.inf:
                raise InvalidInput(f"{medium.lower()}_weight is {weight}; expected 0 or more, such as 0.8")

    def weights(self) -> dict[str, float]:
        return {GPU: self.gpu_weight, CPU: self.cpu_weight, DISK: self.disk_weight, REMOTE: self.remote_weight}


class Precise(Approximate):
    """Variant with an index fed by KV events.

    Source: llm-d's precise prefix cache producer, before its prefix cache scorer. Differences: weights 2, 2 and 3 (its
    sample has 1, 1 and 2); parts of blocks count where media weigh less; failed requests are undone.
    """

    name = "precise"

    def __init__(self, index: PreciseIndex, settings: PreciseSettings | None = None) -> None:
        settings = settings or PreciseSettings()
        super().__init__(index, settings, under_way_blocks=0)
        self._events = index
        self._speculative_s = settings.speculative_s
        self._speculative = under_way(MOST_BLOCKS, index.secret)
        # Sent prompts by request id and slot, in order of expiry.
        self._until: OrderedDict[tuple[int, int], tuple[float, Request, int]] = OrderedDict()

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        # All prompts count for the same time, so they expire in the order in which they were sent.
        while self._until and next(iter(self._until.values()))[0] <= now_s:
            _, (_, _, ticket) = self._until.popitem(last=False)
            self._speculative.drop(ticket)
        return super().rank(request, servers, now_s)

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        super().routed(request, server, now_s)
        blocks, key = request.prompt.blocks, (id(request), server.slot)
        if self._speculative_s and len(blocks) and key not in self._until:
            self._until[key] = now_s + self._speculative_s, request, self._speculative.add(server.slot, blocks)

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        super().failed(request, server, now_s)
        if (sent := self._until.pop((id(request), server.slot), None)) is not None:
            self._speculative.drop(sent[2])

    def forget(self, server: Server) -> None:
        super().forget(server)
        self._speculative.forget(server.slot)
        for key in [key for key in self._until if key[1] == server.slot]:
            del self._until[key]

    def get_held_tokens(self, prompt: Prompt, servers: Sequence[Server]) -> tuple[list[int], list[float]]:
        slots = [server.slot for server in servers]
        blocks, weighted = self._events.match_weighted(prompt.blocks, slots)
        # Sent prompts count as in the GPU's memory, since the engine is about to put them there.
        if sent := self._speculative.depths(prompt.blocks, slots):
            weighted = [max(float(blocks_sent), weight) for blocks_sent, weight in zip(sent, weighted, strict=True)]
            blocks = list(map(max, blocks, sent))
        per_block = prompt.block_tokens / prompt.tokens if prompt.tokens else 0.0
        return self.matched_tokens(prompt, blocks), [min(1.0, count * per_block) for count in weighted]
