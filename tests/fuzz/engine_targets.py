"""What engines send to a router: whatever comes, it is read or refused, and the index keeps its books."""

from __future__ import annotations

import contextlib
import random

import msgspec
import numpy as np
from tests.fuzz.mutations import mutate
from tests.router.engines import engine_texts

from skymemory import native
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import seed
from skymemory.router.engines.engine_metrics import UnreadableMetrics, read_metrics
from skymemory.router.engines.feed import Feed
from skymemory.router.engines.wire import MAX_EVENTS

_BLOCK_TOKENS = 2
_NAMES = [bytes([n]) * 32 for n in range(6)]
_PROMPT = native.chain_hashes(np.arange(12, dtype="<u4").tobytes(), 4 * _BLOCK_TOKENS, seed("m", "", ""))


def _stored(first: int, last: int, mapped: bool, **more: object) -> object:
    parent = _NAMES[first - 1] if first else None
    fields = {
        "block_hashes": _NAMES[first:last],
        "parent_block_hash": parent,
        "token_ids": list(range(2 * first, 2 * last)),
        "block_size": _BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * (last - first),
        "group_idx": 0,
        **more,
    }
    return {"type": "BlockStored", **fields} if mapped else ["BlockStored", *fields.values()]


_BATCHES = [
    msgspec.msgpack.encode([1.5, events, 0])
    for mapped in (False, True)
    for events in (
        [_stored(0, 3, mapped)],
        [_stored(3, 6, mapped), ["BlockRemoved", [_NAMES[4]], "GPU", 0]],
        [_stored(0, 2, mapped, lora_name="a", extra_keys=[["a", "salt"], ["a"]]), ["AllBlocksCleared"]],
        [_stored(2, 3, mapped, medium="CPU", extra_keys=[[["image", 7], "salt"]]), _stored(2, 3, mapped)],
        [_stored(0, 6, mapped, token_ids=[], block_size=0, medium="CPU"), ["BlockRemoved", [_NAMES[1]], "cpu", 0]],
        [_stored(0, 1, mapped, token_ids=[*range(12)], block_size=12, medium="disk", extra_keys=None)],
        [_stored(3, 4, mapped, token_ids=[*range(6, 11)], block_size=5, medium="tape", extra_keys=None)],
    )
]
_TEXTS = [engine_texts.VLLM, engine_texts.SGLANG, engine_texts.VLLM_TWO_ENGINES]


class EventsTarget:
    """One engine's feed, sound and damaged messages in nearly the right order."""

    def __init__(self) -> None:
        self._index = PreciseIndex(_BLOCK_TOKENS)
        self._feed = Feed("a", 0, "m", self._index)
        self._number, self._left = 0, 64

    def __call__(self, dice: random.Random) -> None:
        feed = self._feed
        payload = dice.choice(_BATCHES)
        if dice.random() < 0.7:
            payload = bytes(mutate(dice, payload, _BATCHES))
        number = self._number if dice.random() < 0.9 else max(0, self._number + dice.choice((-3, -1, 1, 2, 1 << 63)))
        feed.offer(number, payload)
        assert not feed.busy
        self._number = number % (1 << 62) + 1
        if feed.order.gap and dice.random() < 0.5:
            feed.lost()
            feed.go_on()
        if feed.wiped:
            feed.from_the_start()
        assert 0 <= self._index.match(_PROMPT, [0])[0] <= len(_PROMPT)
        self._left -= 1
        if not self._left:
            assert self._index.blocks_of(0) <= 64 * MAX_EVENTS
            self._index.forget(0)
            assert self._index.match(_PROMPT, [0]) == [0]
            self.__init__()  # type: ignore[misc]


def metrics(dice: random.Random) -> None:
    text = bytes(mutate(dice, dice.choice(_TEXTS), _TEXTS))
    with contextlib.suppress(UnreadableMetrics):
        report = read_metrics(text, 0.0).report
        assert report.waiting >= 0 and report.running >= 0 and 0.0 <= report.kv_usage <= 1.0
        assert (report.cache_blocks or 1) > 0 and (report.block_tokens or 1) > 0
