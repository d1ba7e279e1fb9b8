"""Decoded KV cache events of an engine, and the engine's blocks that follow from them.

The fields are vLLM's (``vllm/distributed/kv_events.py``), which SGLang publishes too.

An engine reports a block's tokens once, later only its own hash. Our hash follows from the tokens and our hash of the
parent. Some media report blocks without tokens, some have larger blocks than the engine, some report no removals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType

import numpy as np

from skymemory import native
from skymemory.conductor.request import seed
from skymemory.errors import InvalidInput
from skymemory.metrics import Counters

# Names of media differ: vLLM uses ``GPU``, ``CPU`` and ``STORAGE``, its Mooncake connector and LMCache ``cpu``, SGLang
# ``CPU_TIER1``. They are grouped as in Dynamo's router (``StorageTier::from_kv_medium``), ignoring case. An unknown
# name is ``OTHER``, which counts as the slowest.
GPU, CPU, DISK, REMOTE, OTHER = MEDIA = ("GPU", "CPU", "DISK", "REMOTE", "OTHER")
"""Media, the fastest first."""
_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "": GPU,
        **dict.fromkeys(("GPU", "DEVICE"), GPU),
        **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), CPU),
        **dict.fromkeys(("CPU_TIER2", "DISK", "NVME", "STORAGE"), DISK),
        **dict.fromkeys(("EXTERNAL", "NETWORK", "REMOTE", "SHARED"), REMOTE),
    }
)


def medium_of(name: str) -> str:
    medium = _NAMES.get(name)
    return _NAMES.get(name.upper(), OTHER) if medium is None else medium


EngineHash = int | bytes
"""Engine's hash, comparable between engines only with equal hash seeds."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks now in ``medium``, after ``parent`` (None: the beginning of a prompt).

    Without tokens (vLLM's offloading connector), blocks reported earlier are now in this medium too; ``parent`` has no
    meaning.
    """

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    tokens: Sequence[int]
    """``len(hashes) * block_tokens``, or none."""
    block_tokens: int
    """Size that may be larger outside the GPU's memory (LMCache: 256)."""
    medium: str = GPU
    adapter: str = ""
    """``lora_name``, or ``"#" + str(lora_id)``."""
    extra_keys: Sequence[Sequence[object] | None] | None = None
    """Further input of the hashes: adapter, images, in the first block the cache salt."""
    group: int = 0
    """KV cache group of layers."""
    goes_on: bool = False
    """True for a further part of the previous event."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    hashes: Sequence[EngineHash]
    medium: str = GPU
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllCleared: ...


Event = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events published together, numbered from 0 without gaps."""

    sequence: int
    events: Sequence[Event]


MAX_ORPHANS = 4096
MAX_BEYOND_GPU = 1 << 19
"""Limit of blocks beyond the GPU's memory, 70 to 110 MB; then the oldest sixteenth is dropped."""
MAX_RECENT = 1 << 16
TOKEN_BYTES = 4
_MASK = (1 << 64) - 1

Change = tuple[str, int]
"""Medium and our hash."""


@dataclass(frozen=True, slots=True)
class _Orphan:
    """Block that waits until its parent is reported."""

    parent: int
    tokens: bytes
    keys: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _BlockRun:
    """Engine's block that stands for ``blocks`` complete blocks of the router's, which are of another size."""

    blocks: int
    rest: bool  # true if it ends within a further block


# Names of a block, and how they map:
#
#   engine's hash --folded--> its 64 bits, the *name* --media[medium]--> our hash, which prompts are matched by
#
# Our hash is chained(our hash of the parent, tokens, extra keys). A block whose parent has no hash of ours has
# none either: it waits as an orphan under its parent's name (``_children``), and ``_settle`` resolves whole subtrees.
#
# A block of another size (``_BlockRun``) stands for several of ours. Its parts get artificial names (``_names``); if
# both sizes end together, the last part has the engine's name, so that the next block finds its parent under that name.
#
# Invariants: a name keeps the first hash of ours that it got; it leaves a medium with the removal of its last copy; an
# orphan's name is in no medium.


@dataclass(slots=True)
class EngineBlocks:
    """Blocks that an engine holds, by its events, as hashes of the router's blocks."""

    model: str
    block_tokens: int
    media: dict[str, dict[int, int]] = field(default_factory=dict)
    """Hash of ours by the engine's name, per medium."""
    given_up: int = 0
    counters: Counters = field(default_factory=Counters)
    # Additional copies: vLLM recomputes a fully cached prompt's last block and reports both.
    _more_copies: dict[tuple[str, int], int] = field(default_factory=dict)
    _runs: dict[tuple[str, int], _BlockRun] = field(default_factory=dict)
    _recent: dict[int, int] | None = None  # our hashes last stored in the GPU's memory, by the hash of their tokens
    _with_removals: set[str] = field(default_factory=set)
    _orphans: dict[tuple[str, int], _Orphan] = field(default_factory=dict)
    _children: dict[int, list[tuple[str, int]]] = field(default_factory=dict)

    @property
    def orphans(self) -> int:
        return len(self._orphans)

    def stored(self, event: BlocksStored) -> Iterator[Change]:
        """Apply an event; yield (medium, our hash) of the blocks now there, orphans resolved by it included.

        Raises:
            InvalidInput: blocks in the GPU's memory of another size than ours, or with a wrong number of tokens. In
                other media such blocks are skipped and counted.
        """
        medium = medium_of(event.medium)
        if medium != GPU and not event.tokens:
            return self._known(medium, event.hashes)
        run: _BlockRun | None = None
        if event.block_tokens != self.block_tokens:
            if medium == GPU:
                raise InvalidInput(
                    f"the engine's blocks have {event.block_tokens} tokens, the router's {self.block_tokens}: set the "
                    "router's block_tokens to the engine's --block-size"
                )
            blocks, remainder = divmod(event.block_tokens, self.block_tokens)
            run = _BlockRun(blocks, remainder > 0)
        if len(event.tokens) != len(event.hashes) * event.block_tokens or (run is not None and run.blocks == 0):
            if medium != GPU:
                return self._left_out(len(event.hashes))
            raise InvalidInput(
                f"an event with {len(event.hashes)} blocks of {event.block_tokens} tokens, but {len(event.tokens)} "
                "tokens: events of models with mixed kinds of attention are not supported; use another strategy"
            )
        if event.extra_keys is not None and len(event.extra_keys) != len(event.hashes):
            raise InvalidInput(f"an event with {len(event.hashes)} blocks, but extra keys of {len(event.extra_keys)}")
        try:
            tokens = np.asarray(event.tokens, dtype="<u4").tobytes()
        except (OverflowError, TypeError, ValueError) as error:
            raise InvalidInput(f"an event whose tokens are not 32-bit numbers: {error}") from None
        return self._stored(event, medium, tokens, run)

    def _left_out(self, blocks: int) -> Iterator[Change]:
        self.counters.add("blocks_without_place", blocks)
        yield from ()

    def _known(self, medium: str, hashes: Sequence[EngineHash]) -> Iterator[Change]:
        """Add blocks reported without tokens, which must be known from other media."""
        for engine_hash in hashes:
            name = folded(engine_hash)
            ours = self._ours(name)
            if ours is None:
                yield from self._left_out(1)
            else:
                self._count_copy(medium, name)
                yield from self._settle(medium, name, ours)

    def _stored(self, event: BlocksStored, medium: str, tokens: bytes, run: _BlockRun | None) -> Iterator[Change]:
        # Add an event's blocks; ``run``: if they are of another size than the router's.
        names = [folded(engine_hash) for engine_hash in event.hashes]
        keys = None if event.extra_keys is None else [_own_keys(event, at) for at in range(len(names))]
        if event.parent is not None:
            # The hash of a known parent includes adapter and salt; only a prompt's first block has them in the event.
            parent = folded(event.parent)
            before = self._ours(parent)
        else:
            parent, salt = 0, ""
            if keys and len(keys[0]) == 1 and isinstance(keys[0][0], str):
                salt, keys[0] = keys[0][0], ()
            before = seed(self.model, event.adapter, salt)
        if run is None:
            yield from self._chain(medium, before, parent, names, tokens, keys)
            return
        if run.rest and event.goes_on:
            yield from self._left_out(len(names))
            return
        size = event.block_tokens * TOKEN_BYTES
        for at, name in enumerate(names):
            piece = tokens[at * size : (at + 1) * size]
            parts = _names(name, self._runs.setdefault((medium, name), run))
            # Search by tokens first: the parent of a chunk, as reported by LMCache, is unreliable.
            if recent := self._find_recent_blocks(piece, len(parts)):
                for part, before in zip(parts, recent, strict=True):
                    self._count_copy(medium, part)
                    yield from self._settle(medium, part, before)
            else:
                own = None if keys is None else [keys[at], *[()] * (len(parts) - 1)]
                before = yield from self._chain(medium, before, parent, parts, piece, own)
            parent = name
            if run.rest:
                yield from self._left_out(len(names) - at - 1)
                return

    def _chain(
        self,
        medium: str,
        before: int | None,
        parent: int,
        names: Sequence[int],
        tokens: bytes,
        keys: Sequence[tuple[object, ...]] | None,
    ) -> Generator[Change, None, int | None]:
        """Add consecutive blocks and yield them; return our last hash, if known. ``before``: our hash of the previous
        block; None: unknown.
        """
        size = self.block_tokens * TOKEN_BYTES
        for at, name in enumerate(names):
            piece = tokens[at * size : (at + 1) * size]
            own = () if keys is None else keys[at]
            ours = self._ours(name) if before is None else chained(before, piece, own)
            if ours is None:
                self._keep_orphan(medium, name, _Orphan(parent, piece, own))
            else:
                self._count_copy(medium, name)
                if medium == GPU and self._recent is not None:
                    self._recent[hash(piece)] = ours
                yield from self._settle(medium, name, ours)
            before, parent = ours, name
        return before

    def _find_recent_blocks(self, tokens: bytes, blocks: int) -> list[int]:
        """Return our blocks of a chunk, found by tokens among those last stored; empty if not found."""
        if self._recent is None:
            self._recent = {}
        # LMCache reports parent 0 within a prompt, and omits chunks that it has (``lmcache/v1/cache_engine.py``,
        # ``store`` and ``store_layer``), adapter and salt. But it stores what was just computed.
        size, hashes = self.block_tokens * TOKEN_BYTES, list[int]()
        for at in range(blocks):
            piece = tokens[at * size : (at + 1) * size]
            ours = self._recent.get(hash(piece))
            if ours is None or (hashes and ours != chained(hashes[-1], piece, ())):
                return []
            hashes.append(ours)
        return hashes

    def _count_copy(self, medium: str, name: int) -> None:
        """Count a further copy of a block: its removal then leaves another."""
        # Without reported removals the count would only grow.
        if name in self.media.get(medium, ()) and (medium == GPU or medium in self._with_removals):
            self._more_copies[medium, name] = self._more_copies.get((medium, name), 0) + 1

    def _settle(self, medium: str, name: int, ours: int) -> Iterator[Change]:
        """Add a block whose hash is known, then the orphans that waited for it; yield all."""
        # A stack instead of recursion: chains of orphans are as long as prompts.
        ready = [(medium, name, ours)]
        while ready:
            medium, name, ours = ready.pop()
            # A name reported twice keeps its first hash: otherwise that hash would never be removed.
            ours = self.media.setdefault(medium, {}).setdefault(name, ours)
            yield medium, ours
            for where, child in self._children.pop(name, ()):
                orphan = self._orphans.pop((where, child), None)
                if orphan is not None:
                    ready.append((where, child, chained(ours, orphan.tokens, orphan.keys)))

    def removed(self, event: BlocksRemoved) -> Iterator[Change]:
        """Apply a removal; yield our blocks that left a medium."""
        medium = medium_of(event.medium)
        self._with_removals.add(medium)
        hashes = self.media.get(medium, {})
        for engine_hash in event.hashes:
            engine_name = folded(engine_hash)
            run = self._runs.get((medium, engine_name))
            names = [engine_name] if run is None else _names(engine_name, run)
            for name in names:
                self._give_up(medium, name)  # removed before its parent was reported: it must not come back
                if self._another_copy(medium, name):
                    continue
                ours = hashes.pop(name, None)
                if ours is not None:
                    yield medium, ours
            if run is not None and names[-1] not in hashes:
                del self._runs[medium, engine_name]

    def surplus(self) -> Iterator[Change]:
        """Evict the oldest blocks above the limit of each medium but the GPU's memory; yield them."""
        for medium, hashes in self.media.items():
            if medium == GPU or len(hashes) <= MAX_BEYOND_GPU:
                continue
            for name in list(islice(hashes, len(hashes) - MAX_BEYOND_GPU + MAX_BEYOND_GPU // 16)):
                self._more_copies.pop((medium, name), None)
                yield medium, hashes.pop(name)
        for run in list(islice(self._runs, max(0, len(self._runs) - MAX_BEYOND_GPU))):
            del self._runs[run]
        if self._recent is not None and len(self._recent) > MAX_RECENT:
            for tokens in list(islice(self._recent, len(self._recent) - MAX_RECENT + MAX_RECENT // 16)):
                del self._recent[tokens]

    @property
    def media_without_removals(self) -> list[str]:
        return [medium for medium in self.media if medium != GPU and medium not in self._with_removals]

    def drop_copies(self, ours: Collection[int]) -> None:
        """Forget further copies of blocks that the engine turned out to lack."""
        for medium, name in [*self._more_copies]:
            if self.media.get(medium, {}).get(name) in ours:
                del self._more_copies[medium, name]

    def _another_copy(self, medium: str, name: int) -> bool:
        """Remove a copy; return True if another remains."""
        more = self._more_copies.pop((medium, name), 0)
        if more > 1:
            self._more_copies[medium, name] = more - 1
        return more > 0

    def _ours(self, name: int) -> int | None:
        for hashes in self.media.values():
            ours = hashes.get(name)
            if ours is not None:
                return ours
        return None

    def _keep_orphan(self, medium: str, name: int, orphan: _Orphan) -> None:
        self._give_up(medium, name)
        self._orphans[medium, name] = orphan
        self._children.setdefault(orphan.parent, []).append((medium, name))
        while len(self._orphans) > MAX_ORPHANS:
            self._give_up(*next(iter(self._orphans)))
            self.given_up += 1

    def _give_up(self, medium: str, name: int) -> None:
        orphan = self._orphans.pop((medium, name), None)
        if orphan is not None:
            children = self._children[orphan.parent]
            children.remove((medium, name))
            if not children:
                del self._children[orphan.parent]


def folded(engine_hash: EngineHash) -> int:
    """Return an engine's hash as 64 bits, shortened as by vLLM."""
    if isinstance(engine_hash, int):
        return engine_hash & _MASK
    return int.from_bytes(engine_hash[-8:], "big")


def _names(name: int, run: _BlockRun) -> list[int]:
    # Return names for the router's blocks within an engine's block.
    parts = [(name ^ (at + 1) * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & _MASK for at in range(run.blocks)]
    if not run.rest:
        parts[-1] = name
    return parts


def chained(before: int, tokens: bytes, keys: Sequence[object]) -> int:
    """Return our hash of a block after ``before``; ``keys`` (images, embeddings) change it."""
    if keys:
        digest = hashlib.sha256(before.to_bytes(8, "little") + repr(tuple(keys)).encode("utf-8", "surrogatepass"))
        before = int.from_bytes(digest.digest()[:8], "little")
    return int(native.chain_hashes(tokens, len(tokens), before)[0])


def _own_keys(event: BlocksStored, at: int) -> tuple[object, ...]:
    keys = event.extra_keys[at] if event.extra_keys is not None else None
    if not keys:
        return ()
    return tuple(keys[1:] if event.adapter and keys[0] == event.adapter else keys)
