"""Strategies that hash prompts: SimHash, and consistent hashing with bounded loads (CHWBL)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import cos, pi

import numpy as np
from numpy.typing import NDArray

from skymemory.conductor.picker import Ranking, Scorer, Server
from skymemory.conductor.request import HEAD_BYTES, Request
from skymemory.conductor.strategies.strategy_base import (
    GainThreshold,
    check_factor,
    hash_words,
    load_bound,
    loads_of,
    mix,
    ranked_by_load,
    scope_of,
)
from skymemory.errors import InvalidInput

BITS = 64
_SET_BITS = (
    np.unpackbits(np.arange(1 << 16, dtype=np.uint16).view(np.uint8)).reshape(-1, 16).sum(axis=1, dtype=np.uint8)
)


@dataclass(frozen=True, slots=True)
class SimHashSettings:
    near_bits: int = 12
    """Largest distance of similar prompts; unrelated ones differ in 32 ± 4 bits."""
    remembered: int = 256
    """Signatures kept per server."""
    load_factor: float = 1.25
    """Limit of a server's load, relative to the mean."""
    min_match_tokens: int = 0
    min_match_ratio: float = 0.0

    def __post_init__(self) -> None:
        check_factor(self.load_factor)
        if not 0 <= self.near_bits < BITS // 2:
            raise InvalidInput(f"near_bits is {self.near_bits}; expected 0 to {BITS // 2 - 1}")
        if not 1 <= self.remembered <= 65_536:
            raise InvalidInput(f"remembered is {self.remembered}; expected 1 to 65536")


def signature_of(pieces: NDArray[np.uint64]) -> int:
    """Return the SimHash: bits set in more than half of ``pieces`` (Charikar, equal weights)."""
    # A row of 64 bits per piece; the sum of a column counts the pieces with that bit.
    bits = np.unpackbits(pieces.view(np.uint8).reshape(len(pieces), 8), axis=1)
    counts = np.add.reduce(bits, axis=0, dtype=np.uint32)
    return int.from_bytes(np.packbits(2 * counts > len(pieces)).tobytes(), "little")


def distances(signature: int, signatures: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Count the bits in which each of ``signatures`` differs."""
    differing: NDArray[np.uint64] = np.bitwise_xor(signatures, np.uint64(signature))
    if hasattr(np, "bitwise_count"):
        bits: NDArray[np.uint8] = np.bitwise_count(differing)
        return bits
    words = _SET_BITS[np.ascontiguousarray(differing).view(np.uint16)]  # NumPy 1.26 has no bitwise_count.
    summed: NDArray[np.uint8] = words.reshape(*signatures.shape, 4).sum(axis=-1, dtype=np.uint8)
    return summed


def similarity(bits: float) -> float:
    """Return the cosine of two prompts whose signatures differ in ``bits``."""
    # A share angle/π of random hyperplanes separates two vectors (Charikar, 2002), so the angle is π · bits / 64.
    return max(0.0, cos(pi * bits / BITS))


class NearestSignature(Scorer):
    """Strategy that follows the most similar prompt by SimHash, unless its server is overloaded.

    Source: vLLM production-stack's prefix router, first of two methods; it hashes the signature again, which loses the
    similarity.
    """

    name = "simhash"

    def __init__(self, settings: SimHashSettings | None = None) -> None:
        self.settings = settings or SimHashSettings()
        self._gain = GainThreshold(self.settings.min_match_tokens, self.settings.min_match_ratio)
        # Latest signatures per slot, initially the first repeated.
        self._kept = np.zeros((0, self.settings.remembered), dtype=np.uint64)
        self._count: list[int] = []

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        """Prefer the server of the most similar recent prompt; if none is similar, or it is overloaded, the
        least load.
        """
        loads = loads_of(servers, now_s)
        prompt = request.prompt
        if not len(prompt.pieces):
            return ranked_by_load(loads, "load only: the prompt fills no block")
        bits = self._nearest(signature_of(prompt.pieces), servers)
        best = min(bits)
        if best > self.settings.near_bits:
            return ranked_by_load(loads, f"load only: no prompt within {self.settings.near_bits} bits")
        expected = similarity(best) * prompt.tokens
        if not self._gain.worth(expected, prompt.tokens):
            return ranked_by_load(loads, self._gain.why_not(expected, prompt.tokens))
        # Near servers score above 32, all others at most 0: near servers come first, then the least load.
        most = load_bound(loads, self.settings.load_factor)
        scores = [
            float(BITS - far) if far <= self.settings.near_bits and load + 1.0 <= most else -load
            for far, load in zip(bits, loads, strict=True)
        ]
        reason = f"nearest prompt differs in {best} of {BITS} bits"
        if loads[bits.index(best)] + 1.0 > most:
            reason += f"; its server has {loads[bits.index(best)]:.0f} requests, and {most} are allowed"
        return Ranking(scores, reasons=(reason,), weights=(("bits away", bits), ("requests there", loads)))

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        # Remember the prompt's signature, in the place of the server's oldest.
        pieces = request.prompt.pieces
        if not len(pieces):
            return
        self._make_room(server.slot)
        signature = np.uint64(signature_of(pieces))
        ring, count = self._kept[server.slot], self._count[server.slot]
        if not count:
            # Fill the whole ring: zeros would be a valid signature, near to some prompts.
            ring[:] = signature
        elif not (ring == signature).any():
            ring[count % len(ring)] = signature
        else:
            return
        self._count[server.slot] = count + 1

    def forget(self, server: Server) -> None:
        if server.slot < len(self._count):
            self._count[server.slot] = 0

    def _nearest(self, signature: int, servers: Sequence[Server]) -> list[int]:
        """Return each server's nearest distance; ``BITS`` without any."""
        counts = self._count
        slots = [server.slot if server.slot < len(counts) and counts[server.slot] else -1 for server in servers]
        known = [slot for slot in slots if slot >= 0]
        if not known:
            return [BITS] * len(servers)
        nearest = iter(distances(signature, self._kept[known]).min(axis=1).tolist())
        return [next(nearest) if slot >= 0 else BITS for slot in slots]

    def _make_room(self, slot: int) -> None:
        if slot >= len(self._count):
            more = slot + 1 - len(self._count)
            self._count += [0] * more
            self._kept = np.concatenate([self._kept, np.zeros((more, self.settings.remembered), dtype=np.uint64)])


BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class ChwblSettings:
    prefix_characters: int = 100
    virtual_nodes: int = 256
    load_factor: float = 1.25
    """Limit of a server's load, relative to the mean."""
    min_match_tokens: int = 0
    min_match_ratio: float = 0.0

    def __post_init__(self) -> None:
        check_factor(self.load_factor)
        if not 1 <= self.prefix_characters <= HEAD_BYTES:
            raise InvalidInput(f"prefix_characters is {self.prefix_characters}; expected 1 to {HEAD_BYTES}")
        if not 1 <= self.virtual_nodes <= 65_536:
            raise InvalidInput(f"virtual_nodes is {self.virtual_nodes}; expected 1 to 65536")


class BoundedRing(Scorer):
    """Strategy by consistent hashing of the prompt's beginning, with bounded loads.

    Source: KubeAI's load balancer (first 100 characters, 256 virtual nodes, at most 1.25 × the mean load). Differences:
    the bound is rounded up, salt and model are hashed too, and a threshold.
    """

    name = "chwbl"

    def __init__(self, settings: ChwblSettings | None = None) -> None:
        self.settings = settings or ChwblSettings()
        self._gain = GainThreshold(self.settings.min_match_tokens, self.settings.min_match_ratio)
        self._names: frozenset[str] = frozenset()
        self._points: list[int] = []
        self._owners: list[str] = []

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        """Prefer the first server after the hash of the prompt's beginning on the ring that is below the load bound."""
        loads = loads_of(servers, now_s)
        prompt = request.prompt
        head = prompt.head[: self.settings.prefix_characters]
        promised = min(prompt.tokens, len(head) / BYTES_PER_TOKEN)
        if not self._gain.worth(promised, prompt.tokens):
            empty = "load only: the prompt has no text to hash"
            return ranked_by_load(loads, self._gain.why_not(promised, prompt.tokens) if promised else empty)
        order = self._clockwise(hash_words(*scope_of(request), head), servers)
        most = load_bound(loads, self.settings.load_factor)
        scores = [0.0] * len(servers)
        for place, at in enumerate(order):
            load = loads[at]
            scores[at] = float(len(order) - place) if load + 1.0 <= most else -1.0 - load
        # The least loaded server is always within the bound, so the walk ends.
        skipped = next(place for place, at in enumerate(order) if scores[at] > 0.0)
        reason = f"by the hash of its first {len(head)} characters"
        if skipped:
            reason += f", {skipped} servers skipped for load (at most {most} requests)"
        return Ranking(scores, reasons=(reason,), weights=(("requests there", loads),))

    def forget(self, server: Server) -> None:
        self._names = frozenset()  # the ring is rebuilt without it

    def _clockwise(self, key: int, servers: Sequence[Server]) -> list[int]:
        # Return the positions of ``servers`` in the order of the ring from ``key`` on.
        at_of = {server.name: at for at, server in enumerate(servers)}
        if not self._names.issuperset(at_of):
            self._build(self._names.union(at_of))
        points, owners = self._points, self._owners
        start = bisect_left(points, key)
        order: list[int] = []
        for point in chain(range(start, len(points)), range(start)):
            at = at_of.pop(owners[point], None)
            if at is not None:
                order.append(at)
                if not at_of:
                    break
        return order

    def _build(self, names: frozenset[str]) -> None:
        """Build the ring of all servers ranked so far."""
        ordered = sorted(names)
        # Points of a server depend on its name only, so that all routers build the same ring.
        nodes = np.arange(self.settings.virtual_nodes, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        points = np.concatenate([mix(nodes + np.uint64(hash_words(name.encode()))) for name in ordered])
        owners = np.repeat(np.arange(len(ordered)), self.settings.virtual_nodes)
        order = np.argsort(points, kind="stable")
        self._names, self._points = names, points[order].tolist()
        self._owners = [ordered[owner] for owner in owners[order].tolist()]
