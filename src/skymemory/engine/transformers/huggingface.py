"""KVCManager for Hugging Face transformers: the interface of the disclosure.

Use::

    out = model.generate(**tokenizer(prompt, return_tensors="pt"), past_key_values=kvc.get_cache(prompt))
    kvc.add_blocks(prompt)
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from skymemory.cache.blocks import BlockCache, LoadResult, Part, Parts, PhaseClock, Saved, StoreResult
from skymemory.cache.cake.cake import Cake, CakeSettings, Sides
from skymemory.cache.patience import ComputeRate
from skymemory.engine.page_locked import CudaPages, LockedMemory
from skymemory.engine.transformers.cake_prefill import CakePrefill
from skymemory.engine.transformers.computed_tokens import ComputedTokens
from skymemory.engine.transformers.forward import at_positions, cache_option, forward_options
from skymemory.engine.transformers.guard import ComputeClock, Guard, GuardHook
from skymemory.engine.transformers.identity import Identity, tokenizer_digest
from skymemory.engine.transformers.kv_cache import TORCH_DTYPES, CacheSource, RoomPool, SkyCache, Tokens
from skymemory.engine.transformers.probe import check_hits
from skymemory.engine.transformers.prompts import (
    Prompt,
    TokenIds,
    flat_ids,
    media_tokens,
    prompt_ids,
    shared_prefix,
)
from skymemory.engine.transformers.quantizers import codec_of, of_layers, readable_codecs
from skymemory.engine.transformers.states import StoredStates
from skymemory.errors import InvalidInput, UnsupportedModel
from skymemory.forks import OwnLock
from skymemory.kv.block import KVLayout
from skymemory.kv.codec.codec_base import RAW
from skymemory.kv.context import DEFAULT_BLOCK_TOKENS, CacheContext
from skymemory.metrics import Counters
from skymemory.reasons import Miss
from skymemory.store.base import InPlace, Store
from skymemory.store.memory import MemoryStore

if TYPE_CHECKING:
    from transformers import ProcessorMixin

_log = logging.getLogger(__name__)

GROW_TOKENS = 256
"""Room for generated tokens; a longer answer copies the cache once."""
KEEP_CACHES = 2
"""Handed-out caches kept until ``add_blocks``, as ``generate`` keeps none."""

# Tolerance, as a share of the mean magnitude of keys and values; 16-bit rounding is a tenth of it.
_FOREIGN_TOLERANCE = 0.1

Loading = Literal["prefix", "cake", "compute", "load"]
_SIDES: dict[str, Sides] = {"cake": "both", "compute": "compute", "load": "load"}


@dataclasses.dataclass(frozen=True, slots=True)
class _Taken:
    """Contents of a cache for storing: ``ready`` blocks by part, states by position (``stops``), and complete blocks
    (``covered``).
    """

    sources: list[CacheSource]
    ready: list[list[int]]
    stops: dict[int, bytes]
    covered: int


class KVCManager:
    """KV cache of one model in one store. Any thread may call methods, but not concurrently.

    Parameters:
        model: a decoder-only transformers model; UnsupportedModel is raised if it cannot continue from a cache.
        tokenizer: for prompts as text; a processor serves as well.
        store: any tier (``skymemory.open_store``), not closed; by default 1 GiB of memory.
        codec: "raw" (lossless), "quanto8" or "hqq8" (half the bytes, small loss; needs ``skymemory[hf]``).
        block_tokens: tokens per block.
        weights: a revision that names the weights; by default their SHA-256 (about 1 s for 2.2 GB).
        adapter: name and revision of a LoRA adapter; tenant_salt: separates tenants.
        loading: "prefix" loads, then the model computes the rest; "cake" does both concurrently; "compute" and "load"
            are one side of Cake.
        cake: Cake's settings; ``kvc.cake.beside`` shares its steps with other requests.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        store: Store | None = None,
        *,
        codec: str = "raw",
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        weights: str | None = None,
        adapter: str = "",
        tenant_salt: bytes = b"",
        counters: Counters | None = None,
        loading: Loading = "prefix",
        cake: CakeSettings | None = None,
    ) -> None:
        if loading not in get_args(Loading):
            raise InvalidInput(f"no loading {loading!r}: choose one of {', '.join(get_args(Loading))}")
        chosen = codec_of(codec)
        model = unwrap_model(model)
        if hasattr(model, "peft_config") and weights is not None and not adapter:
            raise InvalidInput("weights= names the base model, which has an adapter: name the adapter with adapter=…")
        self.model = model
        self.tokenizer = tokenizer
        self._identity = Identity(
            model,
            block_tokens,
            weights,
            (GuardHook, ComputeClock, ComputedTokens),
            lambda layout, identity, named: CacheContext(
                model=identity,
                weights=named,
                tokenizer=tokenizer_digest(tokenizer),
                kv_dtype=layout.dtype,
                layout=layout.describe(),
                lossless=chosen.lossless,
                block_tokens=block_tokens,
                adapter=adapter,
                tenant_salt=tenant_salt,
            ),
        )
        if self.layout.value_dim and chosen is not RAW:
            raise InvalidInput(f"codec {codec!r} is for keys and values of one width, this model's are {self.layout}")
        self._owns_store = store is None
        self.store: Store = store if store is not None else MemoryStore()
        self._codec = chosen
        self._counters = counters if counters is not None else Counters()
        self.parts = self._stored_parts()
        self._states = self._stored_states()
        if self._states is not None and loading != "prefix":
            raise InvalidInput(f"loading={loading!r} is not supported for models with recurrent states")
        self.last = LoadResult(prompt_tokens=0)
        self.last_stored = StoreResult(prompt_tokens=0)
        self._pool = RoomPool()
        self._kept: deque[SkyCache] = deque()
        self._handed: weakref.WeakSet[SkyCache] = weakref.WeakSet()
        self._lock = OwnLock("this KVCManager")
        self._forward_options = forward_options(model)
        self._media_tokens = media_tokens(model)
        self.loading: Loading = loading
        settings = cake or CakeSettings(step_tokens=-(-CakeSettings().step_tokens // block_tokens) * block_tokens)
        self.cake = CakePrefill(model, Cake(self.parts, settings), self._forward_options)
        self._unservable = ""
        self._guard: Guard | None = Guard(model, self.counters, self._identity.same)
        served = self._identity
        check_hits(model, served.layout, served.kinds, served.states, self._guard, served.context)
        clock = ComputeClock(model, self.blocks.compute)
        self._stop_clock = weakref.finalize(self, clock.remove)
        self._memory: LockedMemory | None = None
        if isinstance(self.store, InPlace) and model.device.type == "cuda":
            self._memory = LockedMemory(self.store, CudaPages(model.device))
        self._closed = False

    @property
    def context(self) -> CacheContext:
        return self._identity.context

    @property
    def layout(self) -> KVLayout:
        return self._identity.layout

    @property
    def blocks(self) -> BlockCache:
        """Blocks of the first part, which determines prefixes."""
        return self.parts.first

    @property
    def states_kept(self) -> bool:
        return self._states is not None

    @property
    def counters(self) -> Counters:
        """Counters of tokens and blocks. Two sums always hold:

        ``lookup_tokens_total`` = ``computed_tokens_total`` + Σ over tiers of ``hit_tokens_total``. Σ
        ``hit_tokens_total`` = ``used_tokens_total`` + Σ over reasons of ``unused_tokens_total``, once the caches are
        gone.
        """
        return self.blocks.counters

    def get_cache(self, prompt: Prompt, **template: Any) -> SkyCache:
        """Return a cache with the longest stored prefix of ``prompt``, for ``generate(…, past_key_values=…)``.

        ``prompt``: text, token ids, a tokenizer's output, or messages with arguments for ``apply_chat_template``.

        Empty on a miss; at least one token is left to compute. ``generate`` returns the same tokens as without a cache.
        """
        seconds: dict[str, float] = {}
        return self._get(self._tokenize(prompt, template, seconds), seconds)

    def get_cache_ids(self, ids: TokenIds) -> SkyCache:
        return self._get(self._before_media(flat_ids(ids)), {})

    def add_blocks(self, prompt: Prompt, **template: Any) -> StoreResult:
        """Store the missing full blocks of ``prompt`` and of its answer: from the cache of ``get_cache(prompt)``, else
        computed. ``prompt`` may be what ``generate`` returned.
        """
        seconds: dict[str, float] = {}
        return self._add(self._tokenize(prompt, template, seconds), None, seconds)

    def add_blocks_ids(self, ids: TokenIds, past_key_values: Cache | None = None) -> StoreResult:
        """Store blocks as ``add_blocks`` does, for token ids.

        ``past_key_values``: a cache of these tokens, of a single sequence. The first block of a foreign cache is
        recomputed and compared.
        """
        return self._add(self._before_media(flat_ids(ids)), past_key_values, {})

    def warm(self, tokens: int) -> None:
        """Touch the memory of a prompt in advance."""
        self._pool.warm(self._room_tokens(tokens) * self.layout.token_bytes)

    def close(self) -> None:
        """Release the model and caches; close an own store. May be called again."""
        if self._lock.owner.elsewhere:
            return
        with self._lock:
            self._settle_unseen()
            self._guard = None  # caches in use keep it alive
            self._stop_clock()
            self._kept.clear()
            self.cake.close()
            if self._memory is not None:
                self._memory.close()
            if self._owns_store and not self._closed:
                self.store.close()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tokenize(self, prompt: Prompt, template: dict[str, Any], seconds: dict[str, float]) -> Tokens:
        with PhaseClock(seconds)("tokenize"):
            return self._before_media(prompt_ids(prompt, self.tokenizer, template))

    def _before_media(self, ids: Tokens) -> Tokens:
        """Cut before the first image, video or sound: the ids do not show its content."""
        placeholders = np.flatnonzero(np.isin(ids, self._media_tokens))
        return ids[: placeholders[0]] if len(placeholders) else ids

    def _get(self, ids: Tokens, seconds: dict[str, float]) -> SkyCache:
        with self._lock:
            self._check_open()
            self._settle_unseen()
            while len(self._kept) >= KEEP_CACHES:
                self._kept.popleft()  # first, so that the new cache can use its memory
            self._refresh_identity()
            if self._unservable:
                cache = self._empty(len(ids))
                blocks = len(ids) // self.layout.block_tokens
                cache.result = LoadResult(len(ids), blocks=blocks, failed_blocks={Miss.UNSERVABLE: blocks})
            else:
                cache = self._load(ids, max(0, len(ids) - 1), seconds, account=True)
                cache.rewind()
                cache.context = self.context
            cache.guard, cache.prompt, cache.source = self._guard, ids, self.parts
            usage, loaded = cache.result.usage, len(cache.loaded)
            usage.first, usage.end = loaded - cache.result.cached_tokens, loaded
            self.last = cache.result
            if _log.isEnabledFor(logging.INFO):
                _log.info("%s", cache.result.describe())
            self._kept.append(cache)
            self._handed.add(cache)
            return cache

    def _settle_unseen(self) -> None:
        if self._guard is not None:
            for cache in list(self._handed):
                self._guard.settle_unseen(cache)

    def _empty(self, prompt_tokens: int) -> SkyCache:
        model = self._identity
        # States are kept so far apart that they take as much room as the blocks between them.
        blocks_apart = -(-model.states.size_bytes // self.layout.block_bytes) if model.states is not None else 1
        room_tokens, device = self._room_tokens(prompt_tokens), self.model.device
        cache = SkyCache(self.layout, room_tokens, device, self._pool, model.kinds, model.states, self._memory)
        cache.stop_every = max(1, blocks_apart) * self.layout.block_tokens
        return cache

    def _load(self, ids: Tokens, limit_tokens: int, seconds: dict[str, float], account: bool) -> SkyCache:
        # A new cache with the longest stored prefix of ``ids``; ``account``: count it as a user's request.
        cache = self._empty(len(ids))
        if self._states is not None:
            cache.result = self._load_with_states(self._states, cache, ids, limit_tokens, seconds, account)
            return cache
        if account and self.loading != "prefix":
            cache.result = self.cake.load(cache, ids, limit_tokens, seconds, _SIDES[self.loading])
            return cache
        result = self.parts.load(ids, cache.groups, limit_tokens=limit_tokens, seconds=seconds, account=account)
        cache.fill(ids[: result.cached_tokens])
        cache.result = result
        return cache

    def _load_with_states(
        self,
        stored: StoredStates,
        cache: SkyCache,
        ids: Tokens,
        limit_tokens: int,
        seconds: dict[str, float],
        account: bool,
    ) -> LoadResult:
        # Load the longest prefix that ends where recurrent states are stored: without them no prefix is of use.
        block = self.layout.block_tokens
        result = LoadResult(len(ids), blocks=len(ids) // block, failed_blocks={Miss.NO_STATE: len(ids) // block})
        for index in stored.find(ids, limit_tokens // block):
            stop = (index + 1) * block
            state = stored.load(ids, index)
            if not state:
                continue
            loaded = self.parts.load(ids, cache.groups, limit_tokens=stop, seconds=seconds, account=False)
            if loaded.cached_tokens == stop:
                cache.stops[stop] = state
                cache.fill(ids[:stop])
                result = loaded
                break
            result = dataclasses.replace(loaded, hit_tokens={}, loaded_blocks=0)
        if account:
            self.blocks.count_tokens(result)
        return result

    def _add(self, ids: Tokens, passed_cache: Cache | None, seconds: dict[str, float]) -> StoreResult:
        # Store what the store lacks: first from a cache that has these tokens, then by computing the remaining blocks.
        with self._lock:
            self._check_open()
            self._settle_unseen()
            self._refresh_identity()
            if self._unservable:
                blocks = len(ids) // self.layout.block_tokens
                self.last_stored = StoreResult(len(ids), blocks, refused_blocks=blocks)
                return self.last_stored
            phase = PhaseClock(seconds)
            ids = ids if passed_cache is not None else self._with_answer(ids)
            with phase("hash"):
                hashes = self.parts.hashes(ids)
            with phase("lookup"):
                missing = self.parts.missing(hashes)
            saved, prefilled = Saved(), 0
            if any(missing) or self._states is not None:
                cache, covered = self._computed(ids, passed_cache)
                with cache.read() if isinstance(cache, SkyCache) else contextlib.nullcontext():
                    offer = self._take(cache, ids, missing, covered)
                    ready, covered = offer.ready, offer.covered
                    saved = self.parts.save(hashes, ready, offer.sources, seconds) if offer.sources else saved
                    self._save_states(ids, offer.stops, covered)
                if (needed := self._to_compute(missing, covered, len(hashes[0]))) and saved.blocks == len(ready[0]):
                    cache, prefilled = self._prefill(ids[: needed * self.layout.block_tokens], phase)
                    remaining = [sorted({*part} - {*done}) for part, done in zip(missing, ready, strict=True)]
                    saved += self.parts.save(
                        hashes, self._ready(remaining, cache, needed), self._sources(cache), seconds
                    )
                    self._save_states(ids, cache.stops, needed)
            self.last_stored = StoreResult(
                prompt_tokens=len(ids),
                blocks=len(hashes[0]),
                present_blocks=len(hashes[0]) - len(missing[0]),
                stored_blocks=saved.blocks,
                refused_blocks=len(missing[0]) - saved.blocks,
                prefilled_tokens=prefilled,
                size_bytes=saved.size_bytes,
                raw_bytes=saved.raw_bytes,
                seconds=seconds,
            )
            if _log.isEnabledFor(logging.INFO):
                _log.info("%s", self.last_stored.describe())
            return self.last_stored

    def _with_answer(self, ids: Tokens) -> Tokens:
        known = [cache.tokens() for cache in self._handed if cache.context == self.context]
        least = max(1, len(ids) - 1)
        fitting = [tokens for tokens in known if shared_prefix(tokens, ids) == min(len(tokens), len(ids)) >= least]
        return max(fitting, key=len, default=ids)

    def _ready(self, missing: list[list[int]], cache: Cache | None, covered: int) -> list[list[int]]:
        has_block = cache.has_block if isinstance(cache, SkyCache) else lambda number, index: True
        return [
            [index for index in part if index < covered and has_block(number, index)]
            for number, part in enumerate(missing)
        ]

    def _to_compute(self, missing: list[list[int]], covered: int, blocks: int) -> int:
        # Return the number of leading blocks to compute, so that all missing blocks can be stored.
        first, *windowed = zip(self.parts.parts, missing, strict=True)
        wanted = [index for index in first[1] if index >= covered]
        for part, part_missing in windowed:
            visible = part.get_visible_blocks(blocks * self.layout.block_tokens)
            wanted += [index for index in part_missing if index >= covered and index in visible]
        return 1 + max(wanted, default=-1)

    def _take(self, cache: Cache | None, ids: Tokens, missing: list[list[int]], covered: int) -> _Taken:
        # Return what the cache has of these tokens; nothing if another thread resets it meanwhile.
        nothing = _Taken([], [[] for _ in missing], {}, 0)
        if not isinstance(cache, SkyCache):
            ready = self._ready(missing, cache, covered)
            return nothing if cache is None else _Taken(self._sources(cache), ready, {}, covered)
        reset_count = cache.begun
        covered = min(covered, shared_prefix(cache.tokens(), ids) // self.layout.block_tokens)
        ready, stops = self._ready(missing, cache, covered), dict(cache.stops)
        try:
            offer = _Taken(self._sources(cache) if covered else [], ready, stops, covered)
        except IndexError:  # it was just reset
            return nothing
        return offer if cache.begun == reset_count and not reset_count % 2 else nothing

    def _sources(self, cache: Cache) -> list[CacheSource]:
        return [CacheSource(cache, group.layout(self.layout), group.layers) for group in self._identity.groups]

    def _save_states(self, ids: Tokens, stops: dict[int, bytes], blocks: int) -> None:
        if self._states is not None:
            by_block = {stop // self.layout.block_tokens - 1: state for stop, state in stops.items()}
            self._states.save(ids, {index: state for index, state in by_block.items() if index < blocks})

    def _computed(self, ids: Tokens, passed_cache: Cache | None) -> tuple[Cache | None, int]:
        # Return the cache with most of these tokens, passed or handed out before, and its number of complete blocks.
        tokens = self.layout.block_tokens
        if passed_cache is not None and not isinstance(passed_cache, SkyCache):
            length = min(foreign_length(passed_cache, self.layout), len(ids))
            if length >= tokens:
                self._check_given(passed_cache, ids[:tokens])
            return passed_cache, length // tokens
        candidates = [passed_cache] if passed_cache is not None else list(self._handed)
        best: SkyCache | None = None
        most = 0
        for cache in candidates:
            if cache.context != self.context:
                continue
            shared = shared_prefix(cache.tokens(), ids)
            if shared > most:
                best, most = cache, shared
        if best is None:
            return None, 0
        if best in self._kept:  # used once; from now on only its user keeps it alive
            self._kept.remove(best)
        return best, most // tokens

    def _check_given(self, passed_cache: Cache, ids: Tokens) -> None:
        # Compute a block and raise InvalidInput if a foreign cache begins otherwise.
        ours, _ = self._prefill_into(self._empty(len(ids)), ids)
        for mine, theirs in zip(ours.layers, passed_cache.layers, strict=True):
            for own, other in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                other = other[:, :, : len(ids)].float()
                if not float((own.float() - other).abs().mean()) <= _FOREIGN_TOLERANCE * float(
                    own.float().abs().mean()
                ):
                    raise InvalidInput(
                        "the cache does not begin with what this model computes for these tokens: is it another "
                        "prompt's, padded on the left, or from before the model was changed?"
                    )

    def _prefill(self, ids: Tokens, phase: PhaseClock) -> tuple[SkyCache, int]:
        with phase("prefill"):
            return self._prefill_into(self._load(ids, len(ids), {}, account=False), ids)

    def _prefill_into(self, cache: SkyCache, ids: Tokens) -> tuple[SkyCache, int]:
        # Compute the remaining tokens; return the cache and their number. Passes end where states are kept.
        words = self.model.get_input_embeddings().weight.shape[0]
        if len(ids) and ids.max() >= words:
            raise InvalidInput(f"token id {ids.max()} is outside the model's vocabulary of {words}")
        with torch.inference_mode():
            start = done = int(cache.get_seq_length())
            prompt = torch.from_numpy(ids).to(self.model.device)[None]
            for stop in [*cache.stops_before(len(ids)), len(ids)]:
                if stop > done:
                    options = {**self._forward_options, **at_positions(self.model, done, stop - done)}
                    options |= {"use_cache": True, **cache_option(self.model, cache)}
                    self.model(input_ids=prompt[:, done:stop], **options)
                    cache.stop()
                    done = stop
        return cache, len(ids) - start

    def _room_tokens(self, prompt_tokens: int) -> int:
        return -(-(prompt_tokens + GROW_TOKENS) // self.layout.block_tokens) * self.layout.block_tokens

    def _refresh_identity(self) -> None:
        # Adopt a changed model: its blocks have another context. If it cannot be served, caches are empty.
        unservable = ""
        try:
            renewed = self._identity.renew()
        except (InvalidInput, UnsupportedModel) as error:
            unservable, renewed = str(error), False
        if unservable != self._unservable:
            self._unservable = unservable
            if unservable:
                _log.warning("the cache is disabled: %s", unservable)
        if renewed:
            _log.warning("the model has changed since the last call: earlier blocks belong to another model")
            compute = self.blocks.compute
            self.parts = self.cake.cake.parts = self._stored_parts(compute)
            self._states = self._stored_states()

    def _stored_parts(self, compute: ComputeRate | None = None) -> Parts:
        model = self._identity
        return Parts(
            [
                Part(
                    BlockCache(
                        model.context_of(group),
                        group.layout(self.layout),
                        self.store,
                        of_layers(self._codec, group.layers, self.layout.layers),
                        readable=readable_codecs(self._codec),
                        counters=self._counters,
                    ),
                    group.window,
                )
                for group in model.groups
            ],
            compute,
        )

    def _stored_states(self) -> StoredStates | None:
        states, tokens = self._identity.states, self.layout.block_tokens
        if states is None:
            return None
        blocks = BlockCache(
            self._identity.states_context(states), states.layout(tokens), self.store, counters=Counters()
        )  # not counted as prompts
        blocks.compute = self.blocks.compute
        return StoredStates(states, blocks)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInput("this KVCManager is closed: make a new one")


def unwrap_model(model: Any) -> Any:
    inner = getattr(model, "_orig_mod", model)
    config = getattr(inner, "active_peft_config", None)
    if config is not None and not config.is_prompt_learning and hasattr(inner, "get_base_model"):
        return inner.get_base_model()
    return inner


def foreign_length(cache: Cache, layout: KVLayout) -> int:
    """Return a foreign cache's length. Raises InvalidInput if it cannot be this model's, with one sequence."""
    lengths = set()
    if any(getattr(layer, "number_of_states", 0) for layer in cache.layers):
        raise InvalidInput("recurrent states can be stored only from a cache that get_cache returned")
    for layer in cache.layers:
        for tensor, width in zip((layer.keys, layer.values), layout.widths, strict=True):
            shape = tuple(tensor.shape) if tensor is not None else ()
            if (
                len(shape) != 4
                or (shape[0], shape[1], shape[3]) != (1, layout.kv_heads, width)
                or tensor.dtype != TORCH_DTYPES[layout.dtype]
            ):
                raise InvalidInput(
                    f"a cache with tensors of shape {shape}, expected (1, {layout.kv_heads}, tokens, {width})"
                    f" of {layout.dtype}: one sequence, as this model writes it"
                )
            if shape[2] < layer.get_seq_length():
                raise InvalidInput(
                    f"a cache that has dropped all but the last {shape[2]} of its {layer.get_seq_length()} tokens, as "
                    "sliding windows do: pass the one that get_cache returned"
                )
            lengths.add(shape[2])
    if len(cache.layers) != layout.layers or len(lengths) != 1:
        raise InvalidInput(
            f"a cache of {len(cache.layers)} layers with {sorted(lengths)} tokens, expected {layout.layers}"
        )
    return int(lengths.pop())
