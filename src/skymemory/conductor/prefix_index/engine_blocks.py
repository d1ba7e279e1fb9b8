"""One engine's blocks by the names that it gives them, and what ours are.

An engine tells a block's tokens once, when it stores it, and from then on only its own hash. Ours follows from the
tokens and the hash of what lies before. A block whose parent is not known (its event was lost, or came before we
listened) is no beginning of a prompt: it waits *aside*, unbelieved, until its parent is told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from skymemory import native
from skymemory.conductor.prefix_index.events import BlocksRemoved, BlocksStored, EngineHash
from skymemory.conductor.seeds import seed
from skymemory.errors import InvalidInput

MAX_ASIDE = 4096
"""Blocks of an engine that may wait for their parents; beyond, the one that waited longest is given up."""
TOKEN_BYTES = 4
_MASK = (1 << 64) - 1

Change = tuple[str, int]
"""A medium and one of our hashes."""


@dataclass(frozen=True, slots=True)
class _Orphan:
    parent: int
    tokens: bytes
    keys: tuple[object, ...]


@dataclass(slots=True)
class EngineBlocks:
    """What one engine holds. ``model`` is what its prompts' chains are seeded with, beside adapter and salt."""

    model: str
    block_tokens: int
    media: dict[str, dict[int, int]] = field(default_factory=dict)
    """Per medium our hash of each block, by the engine's."""
    given_up: int = 0
    """Blocks that waited aside for a parent and were dropped."""
    _more_copies: dict[tuple[str, int], int] = field(default_factory=dict)
    """Of blocks that the engine has more than once, how many beside the first. vLLM computes the last block of a prompt
    that it holds whole anew, and keeps both; it tells of each that is stored, and of each that is evicted."""
    _aside: dict[tuple[str, int], _Orphan] = field(default_factory=dict)
    _children: dict[int, list[tuple[str, int]]] = field(default_factory=dict)

    @property
    def aside(self) -> int:
        """Blocks that wait for their parents."""
        return len(self._aside)

    def stored(self, event: BlocksStored) -> Iterator[Change]:
        """Blocks of ours that are in a medium now, this event's and those that waited for them.

        Raises:
            InvalidInput: blocks of another size than ours, or tokens that are not theirs.
        """
        if event.block_tokens != self.block_tokens:
            raise InvalidInput(
                f"the engine's blocks have {event.block_tokens} tokens and the router's {self.block_tokens}: give the "
                "router the engine's --block-size, or none of its prompts can be found"
            )
        if len(event.tokens) != len(event.hashes) * event.block_tokens:
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
        return self._stored(event, tokens)

    def _stored(self, event: BlocksStored, tokens: bytes) -> Iterator[Change]:
        size = self.block_tokens * TOKEN_BYTES
        parent = None if event.parent is None else folded(event.parent)
        before: int | None = None
        for at, engine_hash in enumerate(event.hashes):
            name = folded(engine_hash)
            keys = _own_keys(event, at)
            piece = tokens[at * size : (at + 1) * size]
            if parent is None:
                salt = keys[0] if len(keys) == 1 and isinstance(keys[0], str) else ""
                before = seed(self.model, event.adapter, salt)
                keys = () if salt else keys
            elif before is None:
                before = self._ours(parent)
            if before is None:
                assert parent is not None
                self._set_aside(event.medium, name, _Orphan(parent, piece, keys))
            else:
                if name in self.media.get(event.medium, ()):
                    self._more_copies[event.medium, name] = self._more_copies.get((event.medium, name), 0) + 1
                before = chained(before, piece, keys)
                yield from self._settle(event.medium, name, before)
            parent = name

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
        held = self.media.get(event.medium, {})
        for engine_hash in event.hashes:
            name = folded(engine_hash)
            self._give_up(event.medium, name)
            if self._another_copy(event.medium, name):
                continue
            ours = held.pop(name, None)
            if ours is not None:
                yield event.medium, ours

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
