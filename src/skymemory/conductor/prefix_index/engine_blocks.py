"""One engine's blocks by the names that it gives them, and what ours are.

An engine tells a block's tokens once, when it stores it, and from then on only its own hash. Ours follows from the
tokens and the hash of what lies before. A block whose parent is not known (its event was lost, or came before we
listened) is no beginning of a prompt: it waits *aside*, unbelieved, until its parent is told.

A block is known as long as any medium holds it. Media behind the GPU's memory have their own ways: some name blocks
without their tokens, some have blocks of many of the engine's, and some never tell what they evict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from skymemory import native
from skymemory.conductor.prefix_index.events import GPU, BlocksRemoved, BlocksStored, EngineHash, medium_of
from skymemory.conductor.request import seed
from skymemory.errors import InvalidInput
from skymemory.metrics import Counters

MAX_ASIDE = 4096
"""Blocks of an engine that may wait for their parents; beyond, the one that waited longest is given up."""
MAX_FARTHER = 1 << 19
"""Blocks of an engine that are believed to be in one medium behind the GPU's memory, which may never tell what it
evicts; beyond, the sixteenth that was announced longest ago is dropped. Of 16 tokens they are 8 million; they need 70
to 110 MB of memory."""
MAX_RECENT = 1 << 16
"""Blocks that an engine stored last in the GPU's memory, by their tokens, where another medium tells of chunks."""
TOKEN_BYTES = 4
_MASK = (1 << 64) - 1

Change = tuple[str, int]
"""A medium, of ``media.MEDIA``, and one of our hashes."""


@dataclass(frozen=True, slots=True)
class _Orphan:
    parent: int
    tokens: bytes
    keys: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """An engine's block in a farther medium that is not as long as ours."""

    blocks: int
    """Of ours that it holds, whole."""
    rest: bool
    """It ends within a block of ours, which is not held then; what follows it has no place among ours."""


@dataclass(slots=True)
class EngineBlocks:
    """What one engine holds. ``model`` is what its prompts' chains are seeded with, beside adapter and salt."""

    model: str
    block_tokens: int
    media: dict[str, dict[int, int]] = field(default_factory=dict)
    """Per medium our hash of each block, by the engine's."""
    given_up: int = 0
    """Blocks that waited aside for a parent and were dropped."""
    counters: Counters = field(default_factory=Counters)
    _more_copies: dict[tuple[str, int], int] = field(default_factory=dict)
    """Of blocks that the engine has more than once, how many beside the first. vLLM computes the last block of a prompt
    that it holds whole anew, and keeps both; it tells of each that is stored, and of each that is evicted."""
    _runs: dict[tuple[str, int], _Run] = field(default_factory=dict)
    """By medium and the engine's hash; ours have names of their own then (``_names``)."""
    _recent: dict[int, int] | None = None
    """Our hash of a block that was last stored in the GPU's memory, by that of its tokens; None before any chunk."""
    _told_removed: set[str] = field(default_factory=set)
    """Media for which the engine publishes evictions."""
    _aside: dict[tuple[str, int], _Orphan] = field(default_factory=dict)
    _children: dict[int, list[tuple[str, int]]] = field(default_factory=dict)

    @property
    def aside(self) -> int:
        """Blocks that wait for their parents."""
        return len(self._aside)

    def stored(self, event: BlocksStored) -> Iterator[Change]:
        """Blocks of ours that are in a medium now, this event's and those that waited for them.

        Raises:
            InvalidInput: blocks of the GPU's memory of another size than ours, or tokens that are not theirs. In other
                media such blocks are left out and counted: they must not cost what is known of the GPU's.
        """
        medium = medium_of(event.medium)
        if medium != GPU and not event.tokens:
            return self._known(medium, event.hashes)
        run: _Run | None = None
        if event.block_tokens != self.block_tokens:
            if medium == GPU:
                raise InvalidInput(
                    f"the engine's blocks have {event.block_tokens} tokens and the router's {self.block_tokens}: give "
                    "the router the engine's --block-size, or none of its prompts can be found"
                )
            blocks, rest = divmod(event.block_tokens, self.block_tokens)
            run = _Run(blocks, rest > 0)
        if len(event.tokens) != len(event.hashes) * event.block_tokens or (run is not None and run.blocks == 0):
            if medium != GPU:
                return self._left_out(len(event.hashes))
            raise InvalidInput(
                f"an event with {len(event.hashes)} blocks of {event.block_tokens} tokens, and {len(event.tokens)} "
                "tokens: does the model mix kinds of attention? Its events cannot be followed: use another strategy"
            )
        if event.extra_keys is not None and len(event.extra_keys) != len(event.hashes):
            raise InvalidInput(f"an event with {len(event.hashes)} blocks and extra keys of {len(event.extra_keys)}")
        try:
            tokens = np.asarray(event.tokens, dtype="<u4").tobytes()
        except (OverflowError, TypeError, ValueError) as error:
            raise InvalidInput(f"an event whose tokens are no numbers of 32 bits: {error}") from None
        return self._stored(event, medium, tokens, run)

    def _left_out(self, blocks: int) -> Iterator[Change]:
        self.counters.add("blocks_without_place", blocks)
        yield from ()

    def _known(self, medium: str, hashes: Sequence[EngineHash]) -> Iterator[Change]:
        """Blocks that are named without their tokens: they stand for what they do elsewhere."""
        for engine_hash in hashes:
            name = folded(engine_hash)
            ours = self._ours(name)
            if ours is None:
                yield from self._left_out(1)
            else:
                self._count_copy(medium, name)
                yield from self._settle(medium, name, ours)

    def _stored(self, event: BlocksStored, medium: str, tokens: bytes, run: _Run | None) -> Iterator[Change]:
        names = [folded(engine_hash) for engine_hash in event.hashes]
        keys = None if event.extra_keys is None else [_own_keys(event, at) for at in range(len(names))]
        if event.parent is not None:
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
            if found := self._found(piece, len(parts)):
                for part, before in zip(parts, found, strict=True):
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
        """Blocks of ours behind ``before`` (None: behind ``parent``, of which nothing is known).

        Returns the hash of the last, where it is known.
        """
        size = self.block_tokens * TOKEN_BYTES
        for at, name in enumerate(names):
            piece = tokens[at * size : (at + 1) * size]
            own = () if keys is None else keys[at]
            ours = self._ours(name) if before is None else chained(before, piece, own)
            if ours is None:
                self._set_aside(medium, name, _Orphan(parent, piece, own))
            else:
                self._count_copy(medium, name)
                if medium == GPU and self._recent is not None:
                    self._recent[hash(piece)] = ours
                yield from self._settle(medium, name, ours)
            before, parent = ours, name
        return before

    def _found(self, tokens: bytes, blocks: int) -> list[int]:
        """Our blocks of a chunk, where events last placed blocks of these tokens in the GPU's memory; none if nowhere.

        LMCache's chunks have to be found so. Of a prompt that it stores on from its middle it tells parent 0, one that
        it has already it leaves out of the chain (``lmcache/v1/cache_engine.py``, ``store`` and ``store_layer``), and
        it tells neither adapter nor salt. But it stores what was just computed.
        """
        if self._recent is None:
            self._recent = {}
        size, found = self.block_tokens * TOKEN_BYTES, list[int]()
        for at in range(blocks):
            piece = tokens[at * size : (at + 1) * size]
            ours = self._recent.get(hash(piece))
            if ours is None or (found and ours != chained(found[-1], piece, ())):
                return []
            found.append(ours)
        return found

    def _count_copy(self, medium: str, name: int) -> None:
        """Another copy of what is held. A medium that tells of no removal would have ever more."""
        if name in self.media.get(medium, ()) and (medium == GPU or medium in self._told_removed):
            self._more_copies[medium, name] = self._more_copies.get((medium, name), 0) + 1

    def _settle(self, medium: str, name: int, ours: int) -> Iterator[Change]:
        """A block whose place is known; then those that waited for it, and so on."""
        ready = [(medium, name, ours)]
        while ready:
            medium, name, ours = ready.pop()
            # A name told twice keeps what it stood for first: else the first would never be taken away.
            ours = self.media.setdefault(medium, {}).setdefault(name, ours)
            yield medium, ours
            for where, child in self._children.pop(name, ()):
                orphan = self._aside.pop((where, child), None)
                if orphan is not None:
                    ready.append((where, child, chained(ours, orphan.tokens, orphan.keys)))

    def removed(self, event: BlocksRemoved) -> Iterator[Change]:
        """Blocks of ours that are no longer in a medium."""
        medium = medium_of(event.medium)
        self._told_removed.add(medium)
        held = self.media.get(medium, {})
        for engine_hash in event.hashes:
            whole = folded(engine_hash)
            run = self._runs.get((medium, whole))
            names = [whole] if run is None else _names(whole, run)
            for name in names:
                self._give_up(medium, name)
                if self._another_copy(medium, name):
                    continue
                ours = held.pop(name, None)
                if ours is not None:
                    yield medium, ours
            if run is not None and names[-1] not in held:
                del self._runs[medium, whole]

    def surplus(self) -> Iterator[Change]:
        """Blocks that are given up since there are too many in a medium behind the GPU's memory."""
        for medium, held in self.media.items():
            if medium == GPU or len(held) <= MAX_FARTHER:
                continue
            for name in list(islice(held, len(held) - MAX_FARTHER + MAX_FARTHER // 16)):
                self._more_copies.pop((medium, name), None)
                yield medium, held.pop(name)
        for each in list(islice(self._runs, max(0, len(self._runs) - MAX_FARTHER))):
            del self._runs[each]
        if self._recent is not None and len(self._recent) > MAX_RECENT:
            for tokens in list(islice(self._recent, len(self._recent) - MAX_RECENT + MAX_RECENT // 16)):
                del self._recent[tokens]

    @property
    def silent(self) -> list[str]:
        """Media behind the GPU's memory of which the engine has not told that any block left them."""
        return [medium for medium in self.media if medium != GPU and medium not in self._told_removed]

    def single(self, ours: Collection[int]) -> None:
        """The engine has been seen to lack these blocks of ours: there was no second copy, whatever was counted."""
        for medium, name in [*self._more_copies]:
            if self.media.get(medium, {}).get(name) in ours:
                del self._more_copies[medium, name]

    def _another_copy(self, medium: str, name: int) -> bool:
        """One copy of a block went; whether there is another."""
        more = self._more_copies.pop((medium, name), 0)
        if more > 1:
            self._more_copies[medium, name] = more - 1
        return more > 0

    def _ours(self, name: int) -> int | None:
        for held in self.media.values():
            ours = held.get(name)
            if ours is not None:
                return ours
        return None

    def _set_aside(self, medium: str, name: int, orphan: _Orphan) -> None:
        self._give_up(medium, name)
        self._aside[medium, name] = orphan
        self._children.setdefault(orphan.parent, []).append((medium, name))
        while len(self._aside) > MAX_ASIDE:
            self._give_up(*next(iter(self._aside)))
            self.given_up += 1

    def _give_up(self, medium: str, name: int) -> None:
        orphan = self._aside.pop((medium, name), None)
        if orphan is not None:
            children = self._children[orphan.parent]
            children.remove((medium, name))
            if not children:
                del self._children[orphan.parent]


def folded(engine_hash: EngineHash) -> int:
    """64 bits of an engine's hash; of bytes the last eight, as vLLM itself shortens them."""
    if isinstance(engine_hash, int):
        return engine_hash & _MASK
    return int.from_bytes(engine_hash[-8:], "big")


def _names(name: int, run: _Run) -> list[int]:
    """What our blocks of one of the engine's are called. Where the two end together, the last has its name, by which
    what follows it knows its parent.
    """
    parts = [(name ^ (at + 1) * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & _MASK for at in range(run.blocks)]
    if not run.rest:
        parts[-1] = name
    return parts


def chained(before: int, tokens: bytes, keys: Sequence[object]) -> int:
    """Our hash of one block behind ``before``.

    What else is in the engine's hash (images, embeddings) no text can ask for: it makes another beginning, so that
    neither the block nor what follows it is ever found for a prompt that only reads the same.
    """
    if keys:
        digest = hashlib.sha256(before.to_bytes(8, "little") + repr(tuple(keys)).encode("utf-8", "surrogatepass"))
        before = int.from_bytes(digest.digest()[:8], "little")
    return int(native.chain_hashes(tokens, len(tokens), before)[0])


def _own_keys(event: BlocksStored, at: int) -> tuple[object, ...]:
    """What is in a block's hash beside tokens and adapter."""
    keys = event.extra_keys[at] if event.extra_keys is not None else None
    if not keys:
        return ()
    return tuple(keys[1:] if event.adapter and keys[0] == event.adapter else keys)
