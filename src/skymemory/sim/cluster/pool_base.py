"""The contract between the simulated cluster and its pool of KV: who holds which blocks, and when what is asked comes.

Nodes are numbered as the cluster numbers its instances: those that prefill (or are coupled) first, so that a node that
caches has the number of its slot in their fleet; those that only decode behind them. Blocks are a trace's ids, of
``block_tokens`` tokens each; a chain of them is a prompt from its beginning.

All times are of the simulation, in seconds, and calls come in the order of their ``now_s``. A pool is a
``PrefixIndex`` too: what schedulers are told of holdings is what is true at that moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from skymemory.conductor.cost_model.model import Medium
from skymemory.conductor.prefix_index.base import Blocks, PrefixIndex
from skymemory.conductor.request import Plan
from skymemory.errors import InvalidInput

LOCAL = "dram"
"""The source of what was in the node's own memory."""
NODES = "node"
"""The source of what was in another's."""
SSD_TIER = "ssd"
SKY_TIER = "sky"


class Far(NamedTuple):
    """A tier that every node can load from, as it is for one prompt at this moment."""

    tier: str
    """The ``Plan.source`` to load from it."""
    blocks: int
    """How many of the prompt's it holds, from the first on without a gap."""
    medium: Medium
    """Its latency includes what is queued there now."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a node has, or will have by ``done_s``, of a prompt.

    It is that request's until its prefill is over: what the cache evicts meanwhile is not taken from who waits.
    """

    held_tokens: int
    """The beginning of the prompt that was the node's own: in its memory, on its SSD, or on its way there already."""
    split_tokens: int
    """Where what is loaded begins; ``held_tokens``, unless the plan computes something while it loads."""
    loaded_tokens: int
    done_s: float
    """When all of it has come, what is held too; the moment of the call, if nothing is on its way."""
    sources: Mapping[str, int] = field(default_factory=dict)
    """Tokens by where they were: ``LOCAL`` and ``SSD_TIER`` (what is held), ``SKY_TIER``, or ``NODES`` for others'."""
    held_s: float = 0.0
    """When what is held can be computed on: later than the call if some is on the SSD or on its way."""

    @property
    def cached_tokens(self) -> int:
        """Tokens that are not computed."""
        return self.held_tokens + self.loaded_tokens


class Pool(PrefixIndex, Protocol):
    """Memories of all nodes, what is behind them, and the links between."""

    block_tokens: int

    def at(self, now_s: float) -> None:
        """It is ``now_s``: what schedulers ask next (``match``, ``far``) is as of then."""
        ...

    # --- what schedulers ask (none of it changes anything) ---

    def match(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        """Leading blocks that each of these nodes has by itself, in memory or on its SSD (PrefixIndex)."""
        ...

    def far(self, blocks: Blocks) -> list[Far]:
        """Tiers beyond the nodes that hold any of it."""
        ...

    def media(self) -> Mapping[str, Medium]:
        """Ways that KV takes, unloaded: ``dram`` (a node's memory to its accelerators), ``network``, ``ssd``, tiers."""
        ...

    def waits_out_s(self, slots: Sequence[int], now_s: float) -> Sequence[float]:
        """Seconds until each of these nodes' links has sent all that was asked of it (``scheduling.sources.Ways``)."""
        ...

    def waits_in_s(self, slots: Sequence[int], now_s: float) -> Sequence[float]:
        """As ``waits_out_s``, of what they receive."""
        ...

    def leading(self, node: int, ids: Sequence[int]) -> int:
        """As ``match``, for one node."""
        ...

    # --- what happens ---

    def load(self, node: int, ids: Sequence[int], plan: Plan | None, now_s: float) -> Loaded:
        """A request of whole blocks ``ids`` goes to ``node``: what it has of them is used, what it lacks is fetched.

        As ``plan`` says, so far as that is still true: where more is held by now, less is loaded, and where the source
        has lost some of it, what is left. Without a plan, or without a source in it, nothing comes from elsewhere but
        from the node's own SSD. What is loaded is cached by ``node`` from then on: so hot prefixes multiply.
        """
        ...

    def stream(
        self, source: int, target: int, tokens: int, now_s: float, over_s: float = 0.0, layers: int = 1
    ) -> float:
        """KV of ``tokens`` goes from one node to another, as it is computed layer by layer from now for ``over_s``.

        Returns when the last of it has come. Shares the links with all that is loaded.
        """
        ...

    def stored(self, node: int, ids: Sequence[int], now_s: float) -> None:
        """``node`` has computed this chain and caches it, as much as there is room for; tiers behind it get copies."""
        ...

    def lost(self, node: int, now_s: float) -> None:
        """``node`` died: its memory is empty, and nothing can be loaded from there until something is stored again.

        What is on its way from there comes all the same: it is taken to be read already.
        """
        ...

    def figures(self) -> Mapping[str, float]:
        """Counts since the beginning: bytes by way, blocks evicted, blocks resident."""
        ...


# Links that are shared: who asks first is served first, and no byte goes twice.
#
# A link carries ``bytes_per_s`` and nothing overtakes on it. A transfer takes all the links of its way at once: on
# each
# it waits for what was asked of that link before, and it is done when the slowest of them has carried it, plus the
# way's
# latency. So a slow link (to a satellite) does not hold up a fast one (a node's) that it feeds: each is charged its
# own
# time, bytes over its own rate. The end of a transfer is known when it begins and never changes.
#
# Rejected: fair sharing, where each newcomer moves the ends of all others. It is nearer to what networks do, but ends
# that were told would have to be told anew; the bytes carried until any moment when all links are busy are the same.


class Link:
    """One direction of one interface."""

    __slots__ = ("bytes_per_s", "carried_bytes", "free_s", "name")

    def __init__(self, name: str, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise InvalidInput(f"link {name!r} carries {bytes_per_s:g} B/s; a rate above 0 is needed")
        self.name = name
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0
        """When it has carried all that was asked of it."""
        self.carried_bytes = 0.0
        """All that was ever asked of it."""

    def queue_s(self, now_s: float) -> float:
        """How long a newcomer waits for its first byte."""
        return max(0.0, self.free_s - now_s)

    def take(self, size_bytes: float, now_s: float) -> float:
        """When ``size_bytes`` asked for now have passed."""
        self.free_s = max(self.free_s, now_s) + size_bytes / self.bytes_per_s
        self.carried_bytes += size_bytes
        return self.free_s


def transfer_s(way: Sequence[Link], size_bytes: float, now_s: float, latency_s: float = 0.0) -> float:
    """When ``size_bytes`` have passed all links of ``way``; nothing passes at once and without latency."""
    if size_bytes <= 0:
        return now_s
    return latency_s + max(link.take(size_bytes, now_s) for link in way)


def streamed_s(
    way: Sequence[Link], size_bytes: float, now_s: float, latency_s: float, over_s: float, parts: int
) -> float:
    """As ``transfer_s``, where the bytes come to be in ``parts`` equal parts, the last of them ``over_s`` from now.

    The links are charged with all of them now: what is asked for meanwhile waits behind the whole stream.
    """
    if size_bytes <= 0:
        return now_s + over_s
    last_s = now_s + over_s
    end_s = transfer_s(way, size_bytes, now_s)
    return latency_s + max(end_s, *(last_s + size_bytes / parts / link.bytes_per_s for link in way))
