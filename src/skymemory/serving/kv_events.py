"""What a prefix cache gained and lost, in the form in which vLLM publishes it (``vllm/distributed/kv_events.py``)."""

from __future__ import annotations

from typing import Any

import msgspec

MEDIUM = "GPU"
"""The memory that the model computes from: vLLM calls it so on processors too, and what lies there costs no loading."""


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Consecutive blocks of one prompt. ``extra_keys``: one entry per block; a salt is in that of a first block."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, omit_defaults=True):
    """``ts``: seconds since 1970."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


def event_hash(block_hash: bytes) -> int:
    """The number that stands for a block in events: its hash's last 64 bits, as vLLM shortens its own."""
    return int.from_bytes(block_hash[-8:], "big")
