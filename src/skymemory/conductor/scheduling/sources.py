"""Where KV that a server lacks could be loaded from: other servers, and tiers behind them all.

Nothing here knows what a tier is made of: it has a name, holds so many of a prompt's blocks, and takes so many seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from skymemory.conductor.cost_model.transfer import Medium
from skymemory.conductor.fleet import Server
from skymemory.conductor.prefix_index.base import Blocks


class FarTiers(Protocol):
    """Tiers that every server can load from."""

    def far(self, blocks: Blocks) -> Sequence[tuple[str, int, Medium]]:
        """For each tier that holds any of a prompt: its name, how many blocks from the first on, and the way there."""
        ...


class Source(NamedTuple):
    """One place to load a prompt's beginning from."""

    name: str
    """The server's or the tier's."""
    slot: int
    """The server's; -1 for a tier."""
    blocks: int
    """How many it holds, from the first on."""
    wait_s: float
    """Until its way out has carried what it was asked for before."""
    latency_s: float
    token_s: float
    """Per token that is loaded."""

    def load_s(self, tokens: int, way_in_s: float) -> float:
        """Until ``tokens`` have come, where the receiver's way in is free in ``way_in_s``."""
        return max(self.wait_s, way_in_s) + self.latency_s + tokens * self.token_s if tokens > 0 else 0.0


def undominated(sources: Sequence[Source]) -> list[Source]:
    """Without those that another is as good as in everything; of equal ones the first is kept."""
    kept: list[Source] = []
    for one in sorted(sources, key=lambda one: (-one.blocks, one.wait_s + one.latency_s, one.token_s)):
        if not any(
            other.wait_s <= one.wait_s and other.latency_s <= one.latency_s and other.token_s <= one.token_s
            for other in kept
        ):
            kept.append(one)
    return kept


class Ways(Protocol):
    """How long each server's way out and way in are busy with what was asked of them before."""

    def waits_out_s(self, slots: Sequence[int], now_s: float) -> Sequence[float]: ...

    def waits_in_s(self, slots: Sequence[int], now_s: float) -> Sequence[float]: ...


@dataclass(slots=True)
class Links:
    """Ways of which only the loads that we planned are known, and nothing overtakes on them."""

    out_s: dict[int, float] = field(default_factory=dict)
    in_s: dict[int, float] = field(default_factory=dict)

    def waits_out_s(self, slots: Sequence[int], now_s: float) -> list[float]:
        until_s = self.out_s
        if not until_s:
            return [0.0] * len(slots)
        return [max(0.0, until_s.get(slot, now_s) - now_s) for slot in slots]

    def waits_in_s(self, slots: Sequence[int], now_s: float) -> list[float]:
        until_s = self.in_s
        if not until_s:
            return [0.0] * len(slots)
        return [max(0.0, until_s.get(slot, now_s) - now_s) for slot in slots]

    def take(self, source: int, target: int, seconds: float, now_s: float) -> None:
        """A load of ``seconds`` from ``source`` (-1: a tier) to ``target`` was asked for."""
        if source >= 0:
            self.out_s[source] = max(self.out_s.get(source, now_s), now_s) + seconds
        self.in_s[target] = max(self.in_s.get(target, now_s), now_s) + seconds

    def forget(self, slot: int) -> None:
        self.out_s.pop(slot, None)
        self.in_s.pop(slot, None)


def deepest(
    servers: Sequence[Server], depths: Sequence[int], waits_s: Sequence[float], least: int
) -> list[tuple[Server, int, float]]:
    """Of those whose way out is free the one that holds most, and the busy ones that hold more than it.

    With how many blocks each holds, more than ``least``, and seconds until its way out is free.
    """
    busy: list[tuple[Server, int, float]] = []
    free: Server | None = None
    for server, count, wait_s in zip(servers, depths, waits_s, strict=True):
        if count > least:
            if wait_s > 0.0:
                busy.append((server, count, wait_s))
            else:
                free, least = server, count
    more = [one for one in busy if one[1] > least]
    return more if free is None else [(free, least, 0.0), *more]
