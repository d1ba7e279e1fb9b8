"""The contract of the simulated KV pool, and its parts: links and an LRU cache of prefixes.

Nodes have the numbers of the cluster's instances: prefill (or coupled) instances first, so that a caching node has the
number of its slot in their fleet, then decode instances. Blocks are a trace's ids, of ``block_tokens`` tokens each; a
chain of them is a prompt from its beginning.

Times are seconds of the simulation; calls come in the order of ``now_s``. A pool is a ``PrefixIndex`` too: schedulers
see the true state of the caches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from skymemory.conductor.cost_model.model import Medium
from skymemory.conductor.prefix_index.base import Blocks, PrefixIndex
from skymemory.conductor.request import Plan
from skymemory.errors import InvalidInput

LOCAL = "dram"
"""Source of tokens in the node's own memory."""
NODES = "node"
"""Source of tokens in another node's memory."""
SSD_TIER = "ssd"
SKY_TIER = "sky"


class Far(NamedTuple):
    """A tier that every node can load from, for one prompt at this time."""

    tier: str
    """The ``Plan.source`` to load from it."""
    blocks: int
    """Leading blocks of the prompt that it holds."""
    medium: Medium
    """Its latency includes the current queue."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The part of a prompt that a node has, or will have by ``done_s``.

    It is reserved for the request until its prefill ends, whatever the cache evicts meanwhile.
    """

    held_tokens: int
    """Prefix on the node: in memory, on the SSD, or already loading."""
    split_tokens: int
    """Start of the loaded part; ``held_tokens`` unless the plan computes a part meanwhile."""
    loaded_tokens: int
    done_s: float
    """Time at which all of it is available."""
    sources: Mapping[str, int] = field(default_factory=dict)
    """Tokens by source: ``LOCAL``, ``SSD_TIER``, ``SKY_TIER``, ``NODES``."""
    held_s: float = 0.0
    """Time at which the held part is available: later if some is on the SSD or loading."""

    @property
    def cached_tokens(self) -> int:
        """Tokens that are not computed."""
        return self.held_tokens + self.loaded_tokens


class Pool(PrefixIndex, Protocol):
    """Caches of all nodes, tiers behind them, and the links between."""

    block_tokens: int

    def at(self, now_s: float) -> None:
        """Sets the time of the following queries (``match``, ``far``)."""
        ...

    # Queries of schedulers; none changes state.

    def match(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        """Leading blocks that each node has in memory or on its SSD (PrefixIndex)."""
        ...

    def far(self, blocks: Blocks) -> list[Far]:
        """Tiers behind the nodes that hold part of it."""
        ...

    def media(self) -> Mapping[str, Medium]:
        """Idle media: ``dram`` (a node's memory to its accelerators), ``network``, ``ssd``, tiers."""
        ...

    def waits_out_s(self, slots: Sequence[int], now_s: float) -> Sequence[float]:
        """Seconds until each node's outgoing link is free (``scheduling.prefill.LinkWaits``)."""
        ...

    def waits_in_s(self, slots: Sequence[int], now_s: float) -> Sequence[float]:
        """Seconds until each node's incoming link is free."""
        ...

    def leading(self, node: int, ids: Sequence[int]) -> int:
        """As ``match``, for one node."""
        ...

    # Events.

    def load(self, node: int, ids: Sequence[int], plan: Plan | None, now_s: float) -> Loaded:
        """A request with the full blocks ``ids`` goes to ``node``: uses what it has, loads what the plan says.

        Loads less if the node holds more by now, or the source has lost some. Without a plan, or a source in it, only
        the node's own SSD is read. ``node`` caches what it loads, so hot prefixes replicate.
        """
        ...

    def stream(
        self, source: int, target: int, tokens: int, now_s: float, over_s: float = 0.0, layers: int = 1
    ) -> float:
        """Transfers KV of ``tokens`` between nodes while it is computed, layer by layer, for ``over_s``. Returns the
        end."""
        ...

    def stored(self, node: int, ids: Sequence[int], now_s: float) -> None:
        """``node`` has computed this chain: it caches what fits, and tiers behind it get copies."""
        ...

    def lost(self, node: int, now_s: float) -> None:
        """``node`` failed and lost its cache. Transfers from it complete: they count as read already."""
        ...

    def figures(self) -> Mapping[str, float]:
        """Counters: bytes by medium, blocks evicted and resident."""
        ...


class Link:
    """One direction of a network interface, served in order of request.

    A transfer takes all links of its path at once: at each it waits for earlier transfers, and it ends when the slowest
    has carried it, plus the path's latency. Each link is occupied for the bytes over its own rate, so a slow link does
    not hold up a fast one. The end is known at the start and never changes. (Fair sharing, closer to real networks,
    would move the ends of others with each newcomer; the bytes carried by busy links are the same.)"""

    __slots__ = ("bytes_per_s", "carried_bytes", "free_s", "name")

    def __init__(self, name: str, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise InvalidInput(f"link {name!r} has a rate of {bytes_per_s:g} B/s; expected above 0")
        self.name = name
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0
        """Time at which it is free."""
        self.carried_bytes = 0.0
        """Total so far."""

    def queue_s(self, now_s: float) -> float:
        """Wait of a new transfer."""
        return max(0.0, self.free_s - now_s)

    def take(self, size_bytes: float, now_s: float) -> float:
        """Books ``size_bytes``; returns the end."""
        self.free_s = max(self.free_s, now_s) + size_bytes / self.bytes_per_s
        self.carried_bytes += size_bytes
        return self.free_s


def transfer_s(path: Sequence[Link], size_bytes: float, now_s: float, latency_s: float = 0.0) -> float:
    """End of a transfer over all links of ``path``; of 0 bytes immediately."""
    if size_bytes <= 0:
        return now_s
    return latency_s + max(link.take(size_bytes, now_s) for link in path)


def streamed_s(
    path: Sequence[Link], size_bytes: float, now_s: float, latency_s: float, over_s: float, parts: int
) -> float:
    """As ``transfer_s``, of bytes that become available in ``parts`` equal parts, the last ``over_s`` from now.

    The links are booked for all of them now: later transfers wait behind the whole stream.
    """
    if size_bytes <= 0:
        return now_s + over_s
    last_s = now_s + over_s
    end_s = transfer_s(path, size_bytes, now_s)
    return latency_s + max(end_s, *(last_s + size_bytes / parts / link.bytes_per_s for link in path))


class PrefixCache:
    """An LRU cache of blocks that never evicts a parent before its child.

    A prompt's blocks are touched from the last to the first, so the deepest of a chain is the oldest, and the cache is
    closed under prefixes.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity`` in blocks. Raises InvalidInput for none."""
        if capacity < 1:
            raise InvalidInput(f"a cache of {capacity} blocks; expected at least 1")
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def leading(self, chain: Sequence[int]) -> int:
        """Leading blocks of ``chain`` that are resident."""
        here = self._blocks
        for at, block in enumerate(chain):
            if block not in here:
                return at
        return len(chain)

    def use(self, chain: Sequence[int]) -> list[int]:
        """Accesses ``chain`` and makes its first ``capacity`` blocks resident. Returns the evicted blocks."""
        here = self._blocks
        for block in reversed(chain[: self.capacity]):
            here[block] = None
            here.move_to_end(block)
        gone = []
        while len(here) > self.capacity:
            gone.append(here.popitem(last=False)[0])
        return gone
