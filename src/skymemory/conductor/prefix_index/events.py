"""What engines tell of their KV caches, as ``precise.PreciseIndex`` takes it.

The fields are vLLM's (``vllm/distributed/kv_events.py``), which SGLang publishes too: a batch has a sequence number
and some events. Whoever reads the socket decodes them into these; nothing here knows of messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

# The media in which engines say that their blocks lie: few, whatever they are called.
#
# Names differ: vLLM says ``GPU``, ``CPU`` and ``STORAGE`` (``vllm/distributed/kv_events.py``), its Mooncake connector
# and
# LMCache ``cpu``, SGLang ``CPU_TIER1``. They are grouped as Dynamo's router does (``StorageTier::from_kv_medium``),
# and
# compared in capitals. A name that is in no group is ``OTHER``: nothing is known of it, so it is taken for the
# slowest.


GPU, CPU, DISK, REMOTE, OTHER = MEDIA = ("GPU", "CPU", "DISK", "REMOTE", "OTHER")
"""The nearest first."""
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
    """Which of ``MEDIA`` an engine means by ``name``; an engine that says none means the GPU's memory."""
    found = _NAMES.get(name)
    return _NAMES.get(name.upper(), OTHER) if found is None else found


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
    goes_on: bool = False
    """The event before was the first part of this one."""


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
