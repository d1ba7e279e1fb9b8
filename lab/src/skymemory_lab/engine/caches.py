"""The engine's prefix cache: a memory store with a byte budget, and a ``KVCManager`` per cache salt."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skymemory.engine.transformers.huggingface import KVCManager
from skymemory.engine.transformers.identity import weights_digest
from skymemory.engine.transformers.kv_cache import SkyCache
from skymemory.kv.block import BlockHash, Place, places_in
from skymemory.store.base import Presence
from skymemory.store.memory import MemoryStore
from skymemory_lab.engine.events import MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, event_hash

KEEP_SALTS = 8

Tokens = npt.NDArray[np.int64]


@dataclass(slots=True, weakref_slot=True, eq=False)
class OpenPrompt:
    """Prompt being served; while it exists, its salt's manager stays open."""

    manager: KVCManager
    salt: str
    cache: SkyCache
    cached_tokens: int  # leading tokens found in the prefix cache


class PrefixCaches:
    """Prefix cache of all salts; used only in the engine's thread. A budget below a block caches nothing."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        budget_bytes: int,
        block_tokens: int,
        policy: str,
        on_events: Callable[[Sequence[KVEvent]], object] = lambda events: None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self.block_tokens = block_tokens
        self._weights = weights_digest(model)
        self._store = MemoryStore(max(1, budget_bytes), policy=policy)
        self._store.on_evict = self._evicted
        self.on_events = on_events
        self._events: list[KVEvent] = []
        self._held: dict[BlockHash, None] = {}  # blocks of the model's first part, reported by events
        self._windowed: set[BlockHash] = set()  # blocks of its further parts (layers with a sliding window)
        self._managers: OrderedDict[str, KVCManager] = OrderedDict()
        self._open: weakref.WeakSet[OpenPrompt] = weakref.WeakSet()
        # The size of a stored value (header and all layers), not of the tensors.
        self.value_bytes = self._manager("").parts.value_bytes
        self.capacity_blocks = budget_bytes // self.value_bytes
        self.evicted_blocks = 0

    @property
    def held_blocks(self) -> int:
        return len(self._held)

    @property
    def store(self) -> MemoryStore:
        """Values of the blocks; may be read in any thread."""
        return self._store

    @property
    def states_kept(self) -> bool:
        return self._manager("").states_kept

    def open(self, salt: str, ids: Tokens) -> OpenPrompt:
        """Return a cache with the prompt's cached prefix; at least the last token remains to be computed."""
        manager = self._manager(salt)
        cache = manager.get_cache_ids(ids)
        prompt = OpenPrompt(manager, salt, cache, cache.begin())
        self._open.add(prompt)
        return prompt

    def keep(self, prompt: OpenPrompt) -> list[list[BlockHash]]:
        """Store the full blocks; return their hashes by part, empty if nothing can be stored."""
        ids = prompt.cache.tokens()
        if ids is None or not self.capacity_blocks or len(ids) < self.block_tokens:
            return []
        chains = prompt.manager.parts.hashes(ids)
        # Subscribers of events must learn exactly what is stored, and a put may store fewer blocks than were missing.
        missing = prompt.manager.blocks.missing(chains[0])
        prompt.manager.add_blocks_ids(ids, prompt.cache)
        self._record_stored_blocks(prompt.salt, ids, chains, missing, range(len(chains[0])))
        return chains

    def find_cached_blocks(self, salt: str, ids: Tokens) -> tuple[list[list[BlockHash]], int]:
        """Return the full blocks' hashes for each part, and the number of cached leading blocks."""
        manager = self._manager(salt)
        return manager.parts.hashes(ids), manager.blocks.prefix(manager.blocks.hashes(ids))

    def admit(
        self,
        salt: str,
        ids: Tokens,
        chains: list[list[BlockHash]],
        first: int,
        values: Sequence[Sequence[bytes | None]],
    ) -> int:
        """Store another engine's values from block ``first`` on, by part; return the leading blocks now cached."""
        blocks = range(first, first + len(values[0]))
        present = self._store.lookup(chains[0][blocks.start : blocks.stop])
        missing = [index for index, status in zip(blocks, present, strict=True) if status is not Presence.HIT]
        for chain, part in reversed(list(zip(chains, values, strict=True))):
            items = [(index, value) for index, value in zip(blocks, part, strict=True) if value is not None]
            places = places_in(chain, [index for index, _ in items])
            self._store.put_many([(chain[index], value) for index, value in items], places)
        self._record_stored_blocks(salt, ids, chains, missing, blocks)
        return self._store.prefix(chains[0][blocks.start : blocks.stop])

    def _record_stored_blocks(
        self, salt: str, ids: Tokens, chains: list[list[BlockHash]], missing: Sequence[int], blocks: range
    ) -> None:
        # Publish those of the ``missing`` blocks that the store has now; record the other parts' ``blocks``.
        present = self._store.lookup(chains[0])
        added = [index for index in missing if present[index] is Presence.HIT]
        self._held.update(dict.fromkeys(chains[0][index] for index in added))
        for chain in chains[1:]:
            keys = chain[blocks.start : blocks.stop]
            statuses = zip(keys, self._store.lookup(keys), strict=True)
            self._windowed.update(key for key, presence in statuses if presence is Presence.HIT)
        self._add_stored_events(salt, ids, chains[0], added)
        self._publish()

    def clear(self) -> int:
        count = len(self._held)
        self._store.delete([*self._held, *self._windowed])
        self._held.clear()
        self._windowed.clear()
        self._events.append(AllBlocksCleared())
        self._publish()
        return count

    def close(self) -> None:
        for manager in self._managers.values():
            manager.close()
        self._managers.clear()
        self._store.close()

    def _manager(self, salt: str) -> KVCManager:
        # Return the salt's manager; make it if needed, which may close idle managers.
        manager = self._managers.get(salt)
        if manager is None:
            manager = KVCManager(
                self._model,
                self._tokenizer,
                self._store,
                block_tokens=self.block_tokens,
                weights=self._weights,
                tenant_salt=salt.encode(),
            )
            self._close_idle(KEEP_SALTS - 1)
            self._managers[salt] = manager
        self._managers.move_to_end(salt)
        return manager

    def _close_idle(self, keep: int) -> None:
        busy = {prompt.salt for prompt in self._open}
        idle = [salt for salt in self._managers if salt not in busy]
        for salt in idle[: max(0, len(self._managers) - keep)]:
            self._managers.pop(salt).close()

    def _evicted(self, key: bytes, value: bytes, place: Place | None) -> None:
        # Called by the store.
        if key in self._windowed:
            self._windowed.remove(key)
            return
        self.evicted_blocks += 1
        if key in self._held:
            del self._held[key]
            self._events.append(BlockRemoved([event_hash(key)], MEDIUM))

    def _add_stored_events(self, salt: str, ids: Tokens, hashes: Sequence[BlockHash], added: Sequence[int]) -> None:
        # Queue an event for each run of consecutive blocks in ``added`` (indices into ``hashes``).
        size = self.block_tokens
        for first, last in _runs(added):
            extra: list[tuple[str, ...] | None] | None = None
            # As in vLLM, the salt enters only the first block's hash; later blocks inherit it through the chain.
            if salt and first == 0:
                extra = [(salt,), *[None] * (last - first)]
            self._events.append(
                BlockStored(
                    block_hashes=[event_hash(key) for key in hashes[first : last + 1]],
                    parent_block_hash=event_hash(hashes[first - 1]) if first else None,
                    token_ids=ids[first * size : (last + 1) * size].tolist(),
                    block_size=size,
                    lora_id=None,
                    medium=MEDIUM,
                    lora_name=None,
                    extra_keys=extra,
                )
            )

    def _publish(self) -> None:
        events, self._events = self._events, []
        if events:
            self.on_events(events)


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    # Return the first and last of each run of consecutive numbers.
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
