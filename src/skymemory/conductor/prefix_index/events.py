"""Engines' KV cache events, decoded, as input of ``precise.PreciseIndex``.

The fields are vLLM's (``vllm/distributed/kv_events.py``), which SGLang publishes too: a batch has a sequence number
and events. ``router.engines`` decodes messages into these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

# Names of media differ: vLLM says ``GPU``, ``CPU`` and ``STORAGE``, its Mooncake connector and LMCache ``cpu``, SGLang
# ``CPU_TIER1``. They are grouped as in Dynamo's router (``StorageTier::from_kv_medium``), ignoring case. An unknown
# name is ``OTHER`` and counts as the slowest.
GPU, CPU, DISK, REMOTE, OTHER = MEDIA = ("GPU", "CPU", "DISK", "REMOTE", "OTHER")
"""The fastest first."""
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
    """The medium that an engine calls ``name``; an empty name is the GPU's memory."""
    found = _NAMES.get(name)
    return _NAMES.get(name.upper(), OTHER) if found is None else found


EngineHash = int | bytes
"""The engine's hash of a block; comparable between engines only if they share a hash seed."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A chain of blocks is now in ``medium``, after ``parent`` (None: the beginning of a prompt).

    Without tokens the event says that blocks which were reported with tokens before are in this medium too, and
    ``parent`` has no meaning: vLLM's offloading connector reports host memory and disks so.
    """

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    tokens: Sequence[int]
    """Tokens of all blocks in order, ``len(hashes) * block_tokens`` of them; or none."""
    block_tokens: int
    """May be larger than the engine's blocks outside the GPU's memory (LMCache: 256 tokens)."""
    medium: str = GPU
    """The engine's name of it; see ``medium_of``."""
    adapter: str = ""
    """``lora_name``, or ``"#" + str(lora_id)`` where only the id is reported."""
    extra_keys: Sequence[Sequence[object] | None] | None = None
    """Per block, further input of its hash: the adapter's name, images, and for the first block the cache salt."""
    group: int = 0
    """KV cache group, for models with several kinds of layers."""
    goes_on: bool = False
    """Whether this is a further part of the previous event."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks were removed from ``medium``. Other media may still hold them."""

    hashes: Sequence[EngineHash]
    medium: str = GPU
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllCleared:
    """The engine cleared its whole cache."""


Event = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class Batch:
    """Events published together. An engine numbers its batches from 0 without gaps."""

    sequence: int
    events: Sequence[Event]
