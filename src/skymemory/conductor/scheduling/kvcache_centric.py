"""Mooncake's KVCache-centric scheduling (FAST'25, algorithm 1), and a variant with the cheapest way per server.

A split: the server computes from block ``start`` on while the blocks up to ``end`` are loaded from the back (Cake,
2024), as later tokens cost more to compute. With the split at block ``split``::

    ready  = wait + compute(start..split)         the front is computed
    rest   = compute(end..)                       held nowhere
    late   = max(0, load(split..end) - ready)     still loading then
    finish = ready + max(late, rest) + min(late, rest) / layers

If layers are loaded together, ``layers`` is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from skymemory.conductor.cost_model import Medium
from skymemory.conductor.picker import Fleet, Server
from skymemory.conductor.prefix_index.approximate import PrefixIndex
from skymemory.conductor.request import Prompt
from skymemory.conductor.scheduling.prefill import (
    OVERDUE,
    UNDER_WAY_BLOCKS,
    Estimates,
    FarTiers,
    LinkWaits,
    PlannedLinks,
    PrefillScheduler,
    PrefixSource,
    ServerLoad,
    deepest,
    tokens_of,
    undominated,
)
from skymemory.conductor.strategies.estimates import DelayPrice, GivenSpeeds, PrefillCost
from skymemory.errors import InvalidInput

VARIANTS = ("cheaper", "arxiv", "fast25")


@dataclass(frozen=True, slots=True)
class KvCacheCentricSettings:
    variant: str = "cheaper"
    """Rule to load: Mooncake's by its preprint or at FAST'25, or the fastest way (ours)."""
    balancing_threshold: float = 2.0
    """Length of the longest prefix anywhere, relative to the server's own, from which it loads."""
    cake: bool = True
    """True: load the end of a prefix while computing its beginning (``cheaper`` only)."""
    split_gain: float = 0.01
    """Minimum gain of such a split, as a share of the time to first token."""
    layers: int = 0
    """Layers loaded one by one while computing; 1: load first; 0: the model's."""
    delay_weight: float = 0.3
    """Weight of ``DelayPrice`` (``cheaper`` only)."""
    overdue: float = OVERDUE
    under_way_blocks: int = UNDER_WAY_BLOCKS

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise InvalidInput(f"no variant {self.variant!r} of kvcache-centric; there are {', '.join(VARIANTS)}")
        if not self.balancing_threshold > 0:
            raise InvalidInput(f"balancing_threshold is {self.balancing_threshold:g}; expected a ratio above 0")
        if not 0 <= self.split_gain <= 1 or self.layers < 0 or self.overdue < 0 or self.under_way_blocks < 0:
            raise InvalidInput("expected split_gain from 0 to 1; layers, overdue and under_way_blocks of 0 or more")


class _SplitCandidate(NamedTuple):
    """Server and source between which a prompt might be split: computed in front, loaded at the end."""

    floor_s: float  # lower bound of the time to first token
    at: int  # position of the server
    source: PrefixSource
    end: int
    in_wait_s: float  # wait for the server's incoming link
    load_s: float  # seconds of loading all that the source has more
    rest_s: float  # seconds of computing what the source lacks


@dataclass(frozen=True, slots=True)
class LoadSources:
    """Places from which servers load KV: over the ``network`` from ranked servers and those of ``fleet``, and from
    ``far`` tiers.
    """

    network: Medium | None = None
    far: FarTiers | None = None
    fleet: Fleet | None = None
    links: LinkWaits | None = None
    """Waits at the servers' links; None: those that the scheduler's own plans cause."""


class KvCacheCentric(PrefillScheduler):
    """KVCache-centric prefill scheduler. ``kv_token_bytes``: KV of one token in all ``layers``."""

    name = "kvcache-centric"

    def __init__(
        self,
        index: PrefixIndex,
        cost: PrefillCost | None,
        kv_token_bytes: float,
        sources: LoadSources,
        settings: KvCacheCentricSettings | None = None,
        layers: int = 1,
    ) -> None:
        self.settings = settings = settings or KvCacheCentricSettings()
        super().__init__(index, cost, settings.overdue, settings.under_way_blocks)
        self._kv_token_bytes = kv_token_bytes
        self._network, self._far, self._fleet = sources.network, sources.far, sources.fleet
        self._layers = settings.layers or layers
        self._links = PlannedLinks()
        self._link_waits: LinkWaits = self._links if sources.links is None else sources.links
        self._price = DelayPrice(settings.delay_weight)
        self._priced = settings.variant == "cheaper" and settings.delay_weight > 0

    def scores(self, estimates: Estimates) -> list[float]:
        """Return the negative times to first token, with the price of delaying later requests."""
        rate = self._rate(estimates)
        if not rate:
            return [-ttft_s for ttft_s in estimates.ttfts_s]
        waits = zip(estimates.waits_s, estimates.ttfts_s, strict=True)
        return [-_priced(wait_s, ttft_s - wait_s, rate) for wait_s, ttft_s in waits]

    def fetch(self, estimates: Estimates) -> None:
        """Add the loads from other servers and tiers that make first tokens earlier."""
        # A source that holds no more than the poorest server helps no server.
        least = min(estimates.blocks)
        sources = self._sources(estimates, least)
        if not sources:
            return
        if self.settings.variant == "cheaper":
            self._by_seconds(estimates, sources)
        else:
            self._by_ratio(estimates, sources)

    def booked(self, estimates: Estimates, at: int, now_s: float) -> None:
        load = estimates.loads.get(at)
        if load is not None:
            self._links.take(load.source.slot, estimates.slots[at], load.link_s, now_s)
        if self._priced:
            self._price.sent(estimates.ttfts_s[at] - estimates.waits_s[at], now_s)

    def forget(self, server: Server) -> None:
        super().forget(server)
        self._links.forget(server.slot)

    def _rate(self, estimates: Estimates) -> float:
        return self._price.rate(len(estimates.slots), estimates.now_s) if self._priced else 0.0

    def _sources(self, estimates: Estimates, least: int) -> list[PrefixSource]:
        # Return the servers and tiers with more than ``least`` blocks of the prompt, without those worse than another.
        sources: list[PrefixSource] = []
        blocks, now_s = estimates.request.prompt.blocks, estimates.now_s
        network = self._network
        if network is not None and len(blocks):
            servers, depths = estimates.servers, estimates.known
            if self._fleet is not None and len(self._fleet) > len(servers):
                further = [server for server in self._fleet if server.healthy and server.slot not in estimates.slots]
                servers = [*servers, *further]
                depths = [*depths, *self.index.match(blocks, [server.slot for server in further])]
            token_s = self._kv_token_bytes / network.bytes_per_s
            # ``known``, not ``blocks``: blocks that are still under way to a server cannot be loaded from it.
            waits_s = self._link_waits.waits_out_s([server.slot for server in servers], now_s)
            for server, count, wait_s in deepest(servers, depths, waits_s, least):
                sources.append(PrefixSource(server.name, server.slot, count, wait_s, network.latency_s, token_s))
        if self._far is not None and len(blocks):
            for tier, count, medium in self._far.far(blocks):
                if count > least:
                    token_s = self._kv_token_bytes / medium.bytes_per_s
                    sources.append(PrefixSource(tier, -1, count, 0.0, medium.latency_s, token_s))
        return undominated(sources) if len(sources) > 1 else sources

    def _by_ratio(self, estimates: Estimates, sources: list[PrefixSource]) -> None:
        # Plan loads by Mooncake's rule: if the longest prefix is ``balancing_threshold`` times the server's own.
        prompt, threshold = estimates.request.prompt, self.settings.balancing_threshold
        # Algorithm 1 compares lengths, not load times; ``cheaper`` fixes that.
        best = sources[0]
        end = tokens_of(prompt, best.blocks)
        for at, held_tokens in enumerate(estimates.held):
            if end <= held_tokens:
                continue
            # Left open by the publications: the ratio to a server that holds nothing is infinite. At equality the
            # preprint loads, FAST'25 computes.
            ratio = end / held_tokens if held_tokens else math.inf
            if ratio > threshold or (ratio == threshold and self.settings.variant == "arxiv"):
                slot = estimates.slots[at]
                load_s = best.load_s(end - held_tokens, self._link_waits.waits_in_s((slot,), estimates.now_s)[0])
                rest_s = self.speeds.prefills_s((slot,), prompt.tokens, (end,))[0]
                estimates.ttfts_s[at] = finish_s(estimates.waits_s[at], load_s, rest_s, self._layers)
                estimates.loads[at] = ServerLoad(best, held_tokens, end, load_s, rest_s)

    def _by_seconds(self, estimates: Estimates, sources: list[PrefixSource]) -> None:
        # Plan for each server what is fastest: to compute, to load, or a split.
        prompt, ttfts, waits = estimates.request.prompt, estimates.ttfts_s, estimates.waits_s
        layers, cake, gain = self._layers, self.settings.cake, self.settings.split_gain
        # 1. For each source and server: compute all, or load all that the source has more; keep the faster.
        # 2. A split can win only if the load is visible. Its floor, wait + rest, remains if front and load cost
        #    nothing; pairs with a floor that is not below the best are dropped before any bisection.
        # 3. ``_split`` bisects the remaining pairs in the order of their floors.
        #
        # With S sources and N servers: S·N closed forms, and about ten evaluations each for a few pairs.
        in_waits_s = self._link_waits.waits_in_s(estimates.slots, estimates.now_s)
        candidates: list[_SplitCandidate] = []
        for source in sources:
            end = tokens_of(prompt, source.blocks)
            rests = self._rests_s(estimates, end)
            for at, held_tokens in enumerate(estimates.held):
                if end <= held_tokens:
                    continue
                wait_s, rest_s = waits[at], rests[at]
                load_s = source.load_s(end - held_tokens, in_waits_s[at])
                ttft_s = finish_s(wait_s, load_s, rest_s, layers)
                if ttft_s < ttfts[at]:
                    ttfts[at] = ttft_s
                    estimates.loads[at] = ServerLoad(source, held_tokens, end, load_s, rest_s)
                # A load that is hidden by the queue or the computation leaves nothing to gain.
                floor_s = wait_s + rest_s
                if cake and floor_s < (1.0 - gain) * ttfts[at] and source.blocks > estimates.blocks[at] + 1:
                    candidates.append(_SplitCandidate(floor_s, at, source, end, in_waits_s[at], load_s, rest_s))
        if candidates:
            self._split(estimates, candidates)

    def _rests_s(self, estimates: Estimates, end: int) -> Sequence[float]:
        # Return the seconds in which each server computes what follows the first ``end`` tokens.
        count, tokens = len(estimates.slots), estimates.request.prompt.tokens
        speeds = self.speeds
        if type(speeds) is GivenSpeeds and tokens:
            return [speeds.cost.prefill_s(tokens, end)] * count
        return speeds.prefills_s(estimates.slots, tokens, [end] * count)

    def _split(self, estimates: Estimates, candidates: list[_SplitCandidate]) -> None:
        # Try to split the prompts of candidates that may become the best.
        waits, ttfts, gain = estimates.waits_s, estimates.ttfts_s, self.settings.split_gain
        rate = self._rate(estimates)

        def price(at: int, ttft_s: float) -> float:
            return _priced(waits[at], ttft_s - waits[at], rate) if rate else ttft_s

        # In the unit of ``scores``: with a price on delay the soonest server need not be the best.
        best = min(ttfts) if not rate else min(price(at, ttft_s) for at, ttft_s in enumerate(ttfts))
        closer = []
        for chance in candidates:
            if price(chance.at, chance.floor_s) <= best:
                floor_s = self._floor_s(estimates, chance)
                if floor_s < (1.0 - gain) * ttfts[chance.at]:
                    closer.append((price(chance.at, floor_s), chance))
        known: dict[tuple[object, ...], tuple[int, float]] = {}
        for floor, chance in sorted(closer, key=itemgetter(0)):
            if floor > best:
                break
            self._split_one(estimates, chance, known)
            best = min(best, price(chance.at, ttfts[chance.at]))

    def _floor_s(self, estimates: Estimates, chance: _SplitCandidate) -> float:
        """Return a tighter lower bound of the finish: each token of the front costs as little as the first."""
        at, prompt = chance.at, estimates.request.prompt
        first = tokens_of(prompt, estimates.blocks[at] + 1)
        token_s = (estimates.alone_s[at] - self._seconds(estimates.slots[at], prompt)(first)) / (
            first - estimates.held[at]
        )
        # Moving the split by one token adds ``token_s`` to the front and removes ``source.token_s`` from the load.
        over_s = chance.load_s + chance.rest_s / self._layers - chance.floor_s
        if over_s <= 0.0 or token_s <= 0.0:
            return chance.floor_s
        met_s = chance.floor_s + over_s * token_s / (token_s + chance.source.token_s)
        return min(estimates.waits_s[at] + estimates.alone_s[at], met_s)

    def _split_one(
        self, estimates: Estimates, chance: _SplitCandidate, known: dict[tuple[object, ...], tuple[int, float]]
    ) -> None:
        # Find the best split of a candidate and plan it if it is faster; ``known`` has results for equal inputs.
        at, source, end, prompt = chance.at, chance.source, chance.end, estimates.request.prompt
        held_tokens, wait_s, alone_s = estimates.held[at], estimates.waits_s[at], estimates.alone_s[at]
        rest_s, in_wait_s, layers = chance.rest_s, chance.in_wait_s, self._layers
        seconds = self._seconds(estimates.slots[at], prompt)

        def finish_at(split: int) -> float:
            tokens = tokens_of(prompt, split)
            ready_s = wait_s + alone_s - seconds(tokens)
            return finish_s(ready_s, source.load_s(end - tokens, in_wait_s), rest_s, layers)

        # Servers with equal inputs, such as idle servers, share a result, so that they tie.
        alike = (source, held_tokens, wait_s, in_wait_s, alone_s, rest_s)
        if alike not in known:
            known[alike] = best_split(finish_at, estimates.blocks[at], source.blocks)
        split, ttft_s = known[alike]
        if ttft_s < estimates.ttfts_s[at]:
            begin = max(held_tokens, tokens_of(prompt, split))
            load_s = source.load_s(end - begin, in_wait_s)
            compute_s = alone_s - seconds(begin) + rest_s
            estimates.ttfts_s[at] = ttft_s
            estimates.loads[at] = ServerLoad(source, begin, end, load_s, compute_s)

    def _seconds(self, slot: int, prompt: Prompt) -> Callable[[int], float]:
        # Return the function from cached tokens to the seconds of the prompt's prefill.
        tokens, speeds, slots = prompt.tokens, self.speeds, (slot,)
        if type(speeds) is GivenSpeeds:  # Other speeds differ by server.
            prefill_s = speeds.cost.prefill_s
            return lambda cached: prefill_s(tokens, cached)
        return lambda cached: speeds.prefills_s(slots, tokens, (cached,))[0]


def _priced(wait_s: float, work_s: float, rate: float) -> float:
    """Return the seconds of the work, plus the delay of later requests."""
    return wait_s + work_s * (1.0 + rate * (wait_s + work_s / 2.0))


def finish_s(ready_s: float, loaded_s: float, rest_s: float, layers: int) -> float:
    """Return the end of a prefill whose front is computed at ``ready_s``, its load complete at ``loaded_s``, and whose
    ``rest_s`` of computing begins with the first loaded layers.
    """
    late_s = loaded_s - ready_s
    if late_s <= 0.0:
        return ready_s + rest_s
    if late_s > rest_s:
        return loaded_s + rest_s / layers
    return ready_s + rest_s + late_s / layers


def best_split(finish_at: Callable[[int], float], start: int, end: int) -> tuple[int, float]:
    """Return the first best split and its finish; ``finish_at`` must be convex."""
    # The finish is convex in the split, as the maximum of ready + rest, (1 - 1/layers)·ready + load/layers + rest and
    # load + rest/layers.
    low, high = start, end - 1
    while low < high:
        middle = (low + high) >> 1
        if finish_at(middle) <= finish_at(middle + 1):
            high = middle
        else:
            low = middle + 1
    return low, finish_at(low)
