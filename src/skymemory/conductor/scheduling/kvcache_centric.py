"""Mooncake's KVCache-centric scheduling (FAST'25, algorithm 1), and the same where each server takes what is cheaper.

For each server the time to the first token is estimated, computing what it lacks or loading it from where it is. The
published rule decides by lengths: a server loads where the best prefix anywhere is so many times its own. The two
published versions write that from opposite ends and differ where the ratio is the threshold itself: ``arxiv`` computes
below it and loads from it on, ``fast25`` loads above it. ``cheaper`` needs no threshold: it loads where that is
sooner, and where a part of each is sooner still, that (``split``).

What published versions leave open is decided so: nothing held against something is an infinite ratio; all that is
loaded comes while the request waits, so the longer of the two counts and not their sum; of a prompt that is cached
wholly one token is computed; far tiers count as servers do.

Replication of hot prefixes is a by-product of all three: whoever is sent a prompt holds it when it is done, loaded or
computed, and counts as holding it for those behind from the moment it is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from skymemory.conductor.cost_model.model import Medium
from skymemory.conductor.fleet import Fleet, Server
from skymemory.conductor.prefix_index.base import PrefixIndex
from skymemory.conductor.request import Prompt
from skymemory.conductor.scheduling.prefill import (
    OVERDUE,
    UNDER_WAY_BLOCKS,
    FarTiers,
    Links,
    Load,
    Outlay,
    PrefillScheduler,
    Source,
    Ways,
    deepest,
    tokens_of,
    undominated,
)
from skymemory.conductor.strategies.estimates import DelayPrice, GivenSpeeds, PrefillCost
from skymemory.errors import InvalidInput

VARIANTS = ("cheaper", "arxiv", "fast25")
NETWORK = "network"
"""Of the media, the way from server to server."""


@dataclass(frozen=True, slots=True)
class KvCacheCentricSettings:
    variant: str = "cheaper"
    balancing_threshold: float = 2.0
    """Of the published variants: how many times its own prefix the best must be for a server to load it."""
    cake: bool = True
    """With ``cheaper``: the front may be computed while the back is loaded."""
    split_gain: float = 0.01
    """A split is looked for where it could save this part of the time to the first token."""
    layers: int = 0
    """Layers that are loaded one by one while the rest is computed; 1: all is there before the rest begins; 0: as
    many as the model has."""
    delay_weight: float = 0.3
    """With ``cheaper``: how much the delay of requests that come later counts (``delay_price``); 0: only its own."""
    overdue: float = OVERDUE
    under_way_blocks: int = UNDER_WAY_BLOCKS

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise InvalidInput(f"no variant {self.variant!r} of kvcache-centric; there are {', '.join(VARIANTS)}")
        if not self.balancing_threshold > 0:
            raise InvalidInput(f"balancing_threshold is {self.balancing_threshold:g}; a ratio above 0 is wanted")
        if not 0 <= self.split_gain <= 1 or self.layers < 0 or self.overdue < 0 or self.under_way_blocks < 0:
            raise InvalidInput("split_gain is from 0 to 1, layers, overdue and under_way_blocks are 0 or more")


class _Chance(NamedTuple):
    """A server that may be done sooner by a split."""

    floor_s: float
    """Not before this, however it is split."""
    at: int
    source: Source
    end: int
    way_in_s: float
    load_s: float
    """All that the source has more."""
    rest_s: float
    """Computing what the source has not."""


class KvCacheCentric(PrefillScheduler):
    """``kv_token_bytes``: of one token's KV, in all of the model's ``layers``.

    ``fleet``: servers that may be loaded from though nothing goes to them. ``ways``: how busy ways are; None: as
    far as the loads planned here keep them so.
    """

    name = "kvcache-centric"

    def __init__(
        self,
        index: PrefixIndex,
        cost: PrefillCost | None,
        kv_token_bytes: float,
        media: Mapping[str, Medium],
        far: FarTiers | None = None,
        fleet: Fleet | None = None,
        settings: KvCacheCentricSettings | None = None,
        layers: int = 1,
        ways: Ways | None = None,
    ) -> None:
        self.settings = settings = settings or KvCacheCentricSettings()
        super().__init__(index, cost, settings.overdue, settings.under_way_blocks)
        self._kv_token_bytes = kv_token_bytes
        self._network = media.get(NETWORK)
        self._far, self._fleet = far, fleet
        self._layers = settings.layers or layers
        self._links = Links()
        self._ways: Ways = self._links if ways is None else ways
        self._price = DelayPrice(settings.delay_weight)
        self._priced = settings.variant == "cheaper" and settings.delay_weight > 0

    def scores(self, outlay: Outlay) -> list[float]:
        rate = self._rate(outlay)
        if not rate:
            return [-ttft_s for ttft_s in outlay.ttfts_s]
        waits = zip(outlay.waits_s, outlay.ttfts_s, strict=True)
        return [-_priced(wait_s, ttft_s - wait_s, rate) for wait_s, ttft_s in waits]

    def fetch(self, outlay: Outlay) -> None:
        least = min(outlay.blocks)
        sources = self._sources(outlay, least)
        if not sources:
            return
        if self.settings.variant == "cheaper":
            self._by_seconds(outlay, sources)
        else:
            self._by_ratio(outlay, sources)

    def booked(self, outlay: Outlay, at: int, now_s: float) -> None:
        load = outlay.loads.get(at)
        if load is not None:
            self._links.take(load.source.slot, outlay.slots[at], load.link_s, now_s)
        if self._priced:
            self._price.sent(outlay.ttfts_s[at] - outlay.waits_s[at], now_s)

    def forget(self, server: Server) -> None:
        super().forget(server)
        self._links.forget(server.slot)

    def _rate(self, outlay: Outlay) -> float:
        return self._price.rate(len(outlay.slots), outlay.now_s) if self._priced else 0.0

    def _sources(self, outlay: Outlay, least: int) -> list[Source]:
        """Where more than ``least`` blocks are to be had; none of them is worse than another in every way."""
        found: list[Source] = []
        blocks, now_s = outlay.request.prompt.blocks, outlay.now_s
        network = self._network
        if network is not None and len(blocks):
            servers, depths = outlay.servers, outlay.known
            if self._fleet is not None and len(self._fleet) > len(servers):
                others = [server for server in self._fleet if server.healthy and server.slot not in outlay.slots]
                servers = [*servers, *others]
                depths = [*depths, *self.index.match(blocks, [server.slot for server in others])]
            token_s = self._kv_token_bytes / network.bytes_per_s
            waits_s = self._ways.waits_out_s([server.slot for server in servers], now_s)
            for server, count, wait_s in deepest(servers, depths, waits_s, least):
                found.append(Source(server.name, server.slot, count, wait_s, network.latency_s, token_s))
        if self._far is not None and len(blocks):
            for tier, count, medium in self._far.far(blocks):
                if count > least:
                    token_s = self._kv_token_bytes / medium.bytes_per_s
                    found.append(Source(tier, -1, count, 0.0, medium.latency_s, token_s))
        return undominated(found) if len(found) > 1 else found

    def _by_ratio(self, outlay: Outlay, sources: list[Source]) -> None:
        """The published rule: from the longest prefix, of those the nearest, if it is so many times the own."""
        prompt, threshold = outlay.request.prompt, self.settings.balancing_threshold
        best = sources[0]
        end = tokens_of(prompt, best.blocks)
        for at, held in enumerate(outlay.held):
            if end <= held:
                continue
            ratio = end / held if held else math.inf
            if ratio > threshold or (ratio == threshold and self.settings.variant == "arxiv"):
                slot = outlay.slots[at]
                load_s = best.load_s(end - held, self._ways.waits_in_s((slot,), outlay.now_s)[0])
                rest_s = self.speeds.prefills_s((slot,), prompt.tokens, (end,))[0]
                outlay.ttfts_s[at] = finish_s(outlay.waits_s[at], load_s, rest_s, self._layers)
                outlay.loads[at] = Load(best, held, end, load_s, rest_s)

    def _by_seconds(self, outlay: Outlay, sources: list[Source]) -> None:
        """Each server computes or loads, whichever is sooner; then those that may be the best look for a split."""
        prompt, ttfts, waits = outlay.request.prompt, outlay.ttfts_s, outlay.waits_s
        layers, cake, gain = self._layers, self.settings.cake, self.settings.split_gain
        ways_in_s = self._ways.waits_in_s(outlay.slots, outlay.now_s)
        could: list[_Chance] = []
        for source in sources:
            end = tokens_of(prompt, source.blocks)
            rests = self._rests_s(outlay, end)
            for at, held in enumerate(outlay.held):
                if end <= held:
                    continue
                wait_s, rest_s = waits[at], rests[at]
                load_s = source.load_s(end - held, ways_in_s[at])
                ttft_s = finish_s(wait_s, load_s, rest_s, layers)
                if ttft_s < ttfts[at]:
                    ttfts[at] = ttft_s
                    outlay.loads[at] = Load(source, held, end, load_s, rest_s)
                # Of a load that comes while the request waits, or hidden by computing, there is nothing to win.
                floor_s = wait_s + rest_s
                if cake and floor_s < (1.0 - gain) * ttfts[at] and source.blocks > outlay.blocks[at] + 1:
                    could.append(_Chance(floor_s, at, source, end, ways_in_s[at], load_s, rest_s))
        if could:
            self._split(outlay, could)

    def _rests_s(self, outlay: Outlay, end: int) -> Sequence[float]:
        """Seconds that each server computes of a prompt of which it has the first ``end`` tokens."""
        count, tokens = len(outlay.slots), outlay.request.prompt.tokens
        speeds = self.speeds
        if type(speeds) is GivenSpeeds and tokens:
            return [speeds.cost.prefill_s(tokens, end)] * count
        return speeds.prefills_s(outlay.slots, tokens, [end] * count)

    def _split(self, outlay: Outlay, could: list[_Chance]) -> None:
        """Splits, of the servers that could be the best by one."""
        waits, ttfts, gain = outlay.waits_s, outlay.ttfts_s, self.settings.split_gain
        rate = self._rate(outlay)

        def price(at: int, ttft_s: float) -> float:
            return _priced(waits[at], ttft_s - waits[at], rate) if rate else ttft_s

        best = min(ttfts) if not rate else min(price(at, ttft_s) for at, ttft_s in enumerate(ttfts))
        closer = []
        for chance in could:
            if price(chance.at, chance.floor_s) <= best:
                floor_s = self._floor_s(outlay, chance)
                if floor_s < (1.0 - gain) * ttfts[chance.at]:
                    closer.append((price(chance.at, floor_s), chance))
        known: dict[tuple[object, ...], tuple[int, float]] = {}
        for floor, chance in sorted(closer, key=itemgetter(0)):
            if floor > best:
                break
            self._split_one(outlay, chance, known)
            best = min(best, price(chance.at, ttfts[chance.at]))

    def _floor_s(self, outlay: Outlay, chance: _Chance) -> float:
        """No split is done sooner: were every token of the front as cheap as the first, the parts would meet there."""
        at, prompt = chance.at, outlay.request.prompt
        first = tokens_of(prompt, outlay.blocks[at] + 1)
        token_s = (outlay.alone_s[at] - self._seconds(outlay.slots[at], prompt)(first)) / (first - outlay.held[at])
        over_s = chance.load_s + chance.rest_s / self._layers - chance.floor_s
        if over_s <= 0.0 or token_s <= 0.0:
            return chance.floor_s
        met_s = chance.floor_s + over_s * token_s / (token_s + chance.source.token_s)
        return min(outlay.waits_s[at] + outlay.alone_s[at], met_s)

    def _split_one(self, outlay: Outlay, chance: _Chance, known: dict[tuple[object, ...], tuple[int, float]]) -> None:
        at, source, end, prompt = chance.at, chance.source, chance.end, outlay.request.prompt
        held, wait_s, alone_s = outlay.held[at], outlay.waits_s[at], outlay.alone_s[at]
        rest_s, way_in_s, layers = chance.rest_s, chance.way_in_s, self._layers
        seconds = self._seconds(outlay.slots[at], prompt)

        def finish_at(split: int) -> float:
            tokens = tokens_of(prompt, split)
            ready_s = wait_s + alone_s - seconds(tokens)
            return finish_s(ready_s, source.load_s(end - tokens, way_in_s), rest_s, layers)

        # Servers that wait and hold alike, as idle ones do, are asked once: so they tie.
        alike = (source, held, wait_s, way_in_s, alone_s, rest_s)
        if alike not in known:
            known[alike] = best_split(finish_at, outlay.blocks[at], source.blocks)
        split, ttft_s = known[alike]
        if ttft_s < outlay.ttfts_s[at]:
            begin = max(held, tokens_of(prompt, split))
            load_s = source.load_s(end - begin, way_in_s)
            compute_s = alone_s - seconds(begin) + rest_s
            outlay.ttfts_s[at] = ttft_s
            outlay.loads[at] = Load(source, begin, end, load_s, compute_s)

    def _seconds(self, slot: int, prompt: Prompt) -> Callable[[int], float]:
        """Seconds to compute the prompt at that server, by how many of its tokens it has."""
        tokens, speeds, slots = prompt.tokens, self.speeds, (slot,)
        if type(speeds) is GivenSpeeds:  # Others may say another thing for each server.
            prefill_s = speeds.cost.prefill_s
            return lambda cached: prefill_s(tokens, cached)
        return lambda cached: speeds.prefills_s(slots, tokens, (cached,))[0]


def _priced(wait_s: float, work_s: float, rate: float) -> float:
    """Seconds until it is done, and those that its work will cost others."""
    return wait_s + work_s * (1.0 + rate * (wait_s + work_s / 2.0))


# How much of a prompt a server loads, and how much of the same it computes while that is on its way.
#
# A server holds the first ``held`` blocks of a prompt; elsewhere there are the first ``end``. Loading can begin at
# once,
# computing when the server's queue has gone. So it computes from ``held`` on while the back of what is elsewhere comes
# (Cake, 2024): the later a token, the more it attends to and the dearer it is to compute, so the front is for
# computing
# and the back for loading, and all that is elsewhere is one or the other.
#
# With the prompt's blocks split at ``split``::
#
#     ready  = wait + compute(held..split)          the front is computed
#     rest   = compute(end..)                       what nobody has
#     late   = max(0, load(split..end) - ready)     what is still on its way then
#     finish = ready + max(late, rest) + min(late, rest) / layers
#
# A server that loads layer by layer computes the rest as the layers come (Mooncake §5.2, ``cost_model.loaded_s``); one
# that cannot has ``layers`` = 1. ``finish`` is the greatest of ``ready + rest``, ``(1 - 1/layers)·ready + load/layers
# +
# rest`` and ``load + rest/layers``. ``ready`` is convex in the split and ``load`` linear: so their maximum is convex,
# and
# its least value is found by halving.


def finish_s(ready_s: float, loaded_s: float, rest_s: float, layers: int) -> float:
    """When a prefill ends that has computed its front at ``ready_s``, and its load has come at ``loaded_s``."""
    late_s = loaded_s - ready_s
    if late_s <= 0.0:
        return ready_s + rest_s
    if late_s > rest_s:
        return loaded_s + rest_s / layers
    return ready_s + rest_s + late_s / layers


def best_split(finish_at: Callable[[int], float], held: int, end: int) -> tuple[int, float]:
    """The block from ``held`` to ``end - 1`` where loading best begins, and when the prefill then ends.

    ``finish_at`` gives that end for each of them; it must be convex. Of equal ones the first is taken.
    """
    low, high = held, end - 1
    while low < high:
        middle = (low + high) >> 1
        if finish_at(middle) <= finish_at(middle + 1):
            high = middle
        else:
            low = middle + 1
    return low, finish_at(low)
