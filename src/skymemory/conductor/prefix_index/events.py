"""What engines tell of their KV caches, as ``precise.PreciseIndex`` takes it.

The fields are vLLM's (``vllm/distributed/kv_events.py``), which SGLang publishes too: a batch has a sequence number
and some events. Whoever reads the socket decodes them into these; nothing here knows of messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.conductor.prefix_index.media import GPU

EngineHash = int | bytes
"""The engine's own name of a block: of this engine only, unless several were given one hash seed."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A chain of blocks is now in ``medium``, behind ``parent`` (None: it is the beginning of a prompt).

    Without tokens it says only that blocks which the engine has told before, with their tokens, are there as well: so
    vLLM's offloading connector tells of the host's memory and of disks. ``parent`` means nothing then.
    """

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    tokens: Sequence[int]
    """Of all blocks, one after the other: ``len(hashes) * block_tokens``; or none."""
    block_tokens: int
    """Media other than the GPU's memory may have larger blocks than the engine (LMCache: 256 tokens)."""
    medium: str = GPU
    """By the engine's name of it: ``media.medium_of`` says which that is."""
    adapter: str = ""
    """``lora_name``; engines that tell only ``lora_id`` are told apart by ``"#" + str(lora_id)``."""
    extra_keys: Sequence[Sequence[object] | None] | None = None
    """Per block what else is in its hash: the adapter's name, images, at the beginning the cache salt."""
    group: int = 0
    """Of models with several kinds of layers, which of their caches."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that are no longer in ``medium``. Other media may still hold them."""

    hashes: Sequence[EngineHash]
    medium: str = GPU
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllCleared:
    """The engine's whole cache is empty."""


Event = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class Batch:
    """Events that were published together. Sequence numbers of one engine grow by one per batch, from 0."""

    sequence: int
    events: Sequence[Event]
