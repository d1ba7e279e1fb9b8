"""SkyCache: the transformers cache for ``generate``; prefilled in place, growing in place.

DynamicCache's first step would copy all that was loaded. Here all layers share one tensor (layers, 2, kv_heads,
room_tokens, head_dim) with room to grow. Other operations on a layer (crop, beams, offloading) use DynamicLayer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import mmap
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import transformers

from skymemory.cache.blocks import BlockSink, LoadResult
from skymemory.engine.page_locked import LockedMemory
from skymemory.engine.transformers.releases import TRIED_TRANSFORMERS, is_admitted, is_tried
from skymemory.engine.transformers.states import States, forget, repeat
from skymemory.errors import CacheMisuse, MissingExtra
from skymemory.installation import install_command
from skymemory.kv.block import KVLayout
from skymemory.kv.context import CacheContext
from skymemory.native import Rows

if not is_admitted(transformers.__version__):
    raise MissingExtra(
        f"transformers {TRIED_TRANSFORMERS} is needed (the releases that were tried), found "
        f"{transformers.__version__}: {install_command('hf')}"
    )
if not is_tried(transformers.__version__):
    logging.getLogger(__name__).warning(
        "transformers %s was not tried, %s were: whether hits are served is tried with each model",
        transformers.__version__,
        TRIED_TRANSFORMERS,
    )

from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

try:
    from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

    KNOWS_STATES = "number_of_states" in inspect.signature(LinearAttentionLayer.__init__).parameters
except ImportError:
    KNOWS_STATES = False
if not KNOWS_STATES:  # transformers before about 5.16: models with states use another cache format and are refused

    class LinearAttentionLayer:  # type: ignore[no-redef]
        def __init__(self, number_of_states: int = 1) -> None:
            raise TypeError("this release of transformers has no known layers with recurrent states")

    class LinearAttentionAndFullAttentionLayer:  # type: ignore[no-redef]
        pass


try:
    from transformers.cache_utils import DummyLayer
except ImportError:  # before 5.23

    class DummyLayer:  # type: ignore[no-redef]
        pass


# Blocks are only read from these buffers, never written to them.
warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")

LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    DummyLayer,
)

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Tokens = npt.NDArray[np.int64]

_NO_TOKENS: Tokens = np.zeros(0, np.int64)


class RoomPool:
    """Pool of memory for caches: a first touch costs more than a copy.

    An array is free if only the pool refers to it; a tensor made by ``from_numpy`` holds its array.
    """

    _GRAIN_BYTES = 8 << 20

    def __init__(self, keep: int = 2) -> None:
        self._keep = keep
        self._arrays: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return at least ``size_bytes`` bytes, contents undefined."""
        with self._lock:
            counts = zip(self._arrays, _references(self._arrays), strict=True)
            free = [array for array, count in counts if count <= _FREE and len(array) >= size_bytes]
            best = min(free, key=len, default=None)
            if best is not None and len(best) <= 4 * max(size_bytes, self._GRAIN_BYTES):
                return torch.from_numpy(best)
            rounded = -(-size_bytes // self._GRAIN_BYTES) * self._GRAIN_BYTES
            array = _map_memory(rounded)
            if len(self._arrays) >= self._keep:
                self._arrays.pop(0)
            if self._keep:
                self._arrays.append(array)
            return torch.from_numpy(array)

    def warm(self, size_bytes: int) -> None:
        self.take(size_bytes).zero_()


def _references(arrays: list[npt.NDArray[np.uint8]]) -> list[int]:
    return [sys.getrefcount(array) for array in arrays]


_FREE = _references([np.empty(1, np.uint8)])[0]


def _map_memory(size_bytes: int) -> npt.NDArray[np.uint8]:
    # MAP_PRIVATE: a forked child must not write into it.
    room = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        room.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(room, np.uint8)


# True for transformers 4.
_KEYS_ALONE = "value_states" not in inspect.signature(DynamicLayer.lazy_initialization).parameters


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Layer of a cache that appends tokens in place while ``room``, keys and values (kv_heads, room_tokens, width),
    lasts.
    """

    def __init__(self, room: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        self._room: tuple[torch.Tensor, torch.Tensor] | None = room
        self._in_place: torch.Tensor | None = None
        self.dtype, self.device = room[0].dtype, room[0].device

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(*(key_states, value_states)[: 1 if _KEYS_ALONE else 2])
        self._in_place = self.keys

    def fill(self, tokens: int) -> None:
        room = self._room
        if room is None or not tokens:
            return
        self.keys, self.values = room[0][None, :, :tokens], room[1][None, :, :tokens]
        self._in_place, self.is_initialized = self.keys, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        room = self._room
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if room is not None and (room[0].shape[0], room[0].shape[2]) != (key_states.shape[1], key_states.shape[3]):
            raise CacheMisuse(
                f"a model that writes {key_states.shape[1]} heads of width {key_states.shape[3]} is given the cache of "
                f"one with {room[0].shape[0]} of {room[0].shape[2]}: get one from a KVCManager of that model"
            )
        kind = key_states.dtype
        if start and kind != self.keys.dtype and not torch.is_autocast_enabled(key_states.device.type):
            raise CacheMisuse(
                f"a model in {kind} continues a cache in {self.keys.dtype}: it was converted since. Get another "
                "cache and pass it all tokens, past_key_values=kvc.get_cache(tokens)"
            )
        # Operations that do not fit the room (crop, beams, other devices) use DynamicLayer's way from here on.
        if (
            room is None
            or self.keys is not self._in_place
            or key_states.shape[0] != 1
            or end > room[0].shape[1]
            or key_states.dtype != room[0].dtype
            or key_states.device != room[0].device
            or (torch.is_grad_enabled() and key_states.requires_grad)
        ):
            self._room = self._in_place = None
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            return keys, values
        # DynamicLayer would copy all that it has.
        room[0][:, start:end] = key_states[0]
        room[1][:, start:end] = value_states[0]
        self.fill(end)
        return self.keys, self.values

    @property
    def in_place(self) -> bool:
        return self._room is not None and (not self.is_initialized or self.keys is self._in_place)

    def get_seq_length(self, *args: Any) -> int:
        keys = self.keys if self.is_initialized else None  # read once: another thread may be resetting it
        return 0 if keys is None or not keys.numel() else int(keys.shape[-2])

    def leave_room(self) -> None:
        self._room = self._in_place = None

    def reset(self) -> None:
        self.keys = self.values = self._in_place = None
        self.is_initialized = False


class TokenMask:
    """Record of the tokens that layers with a sliding window hold, since only the last window of a prefix is loaded."""

    def __init__(self, window: int, room_tokens: int) -> None:
        self._window = window
        self._tokens = np.zeros(room_tokens, bool)

    def mark_present(self, start: int, stop: int) -> None:
        """Record tokens; those after the room always count as present."""
        self._tokens[start:stop] = True

    def has(self, start: int, stop: int) -> bool:
        return bool(self._tokens[start:stop].all())

    def has_any(self, start: int, stop: int) -> bool:
        return bool(self._tokens[start:stop].any())

    def suffices(self, tokens: int) -> bool:
        return self.has(self.first_seen(tokens), tokens)

    def first_seen(self, tokens: int) -> int:
        return max(0, tokens - self._window + 1)

    def sufficient(self, most: int) -> npt.NDArray[np.bool_]:
        """Return for each length up to ``most`` if the window at its end is complete."""
        missing = np.zeros(most + 1, np.int64)
        known = self._tokens[:most]
        missing[1 : len(known) + 1] = np.cumsum(~known)
        missing[len(known) + 1 :] = missing[len(known)]
        return np.asarray(missing == missing[np.maximum(np.arange(most + 1) - self._window + 1, 0)])


class SlidingLayer(GrowingLayer):
    """Layer with a sliding window; keeps tokens outside it, for storing blocks."""

    is_sliding = True

    def __init__(self, room: tuple[torch.Tensor, torch.Tensor], window: int) -> None:
        super().__init__(room)
        self.sliding_window = window

    @property
    def cumulative_length(self) -> int:
        return int(self.get_seq_length())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return keys[..., -visible:, :], values[..., -visible:, :]

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        length = self.get_seq_length()
        new = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return min(length, self.sliding_window - 1) + new, max(length - self.sliding_window + 1, 0)

    def get_max_length(self) -> int:
        return self.sliding_window

    def get_max_cache_shape(self) -> int:
        return self.sliding_window


class RecurrentLayer(LinearAttentionLayer):  # type: ignore[misc]
    def reset(self) -> None:
        forget(self)


class StatefulLayer(LinearAttentionAndFullAttentionLayer, GrowingLayer):  # type: ignore[misc]
    def __init__(self, room: tuple[torch.Tensor, torch.Tensor], states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=states)
        GrowingLayer.__init__(self, room)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if args:  # called for keys and values
            GrowingLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        forget(self)
        GrowingLayer.reset(self)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Kind of a model's layer: ``attention`` over all tokens or the last ``window``, recurrent ``states``, or both."""

    attention: bool = True
    window: int | None = None
    states: int = 0

    def layer(self, rooms: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        if not self.attention:
            return RecurrentLayer(number_of_states=self.states) if self.states else DummyLayer()
        if self.states:
            return StatefulLayer(next(rooms), self.states)
        return GrowingLayer(next(rooms)) if self.window is None else SlidingLayer(next(rooms), self.window)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same window (None: all tokens), whose blocks are stored together."""

    window: int | None
    layers: tuple[int, ...]

    def layout(self, model_layout: KVLayout) -> KVLayout:
        return dataclasses.replace(model_layout, layers=len(self.layers))

    def describe(self, model_layout: KVLayout) -> str:
        layers = ",".join(map(str, self.layers))
        return f"{self.layout(model_layout).describe()} of layers {layers}, window {self.window or 'none'}"


def groups_of(kinds: Sequence[LayerKind]) -> tuple[LayerGroup, ...]:
    """Group layers by window; full attention is first."""
    windows = [kind.window for kind in kinds if kind.attention]
    return tuple(
        LayerGroup(window, tuple(at for at, layer_window in enumerate(windows) if layer_window == window))
        for window in sorted(set(windows), key=lambda tokens: tokens or 0)
    )


class GroupRoom:
    """Room for the keys and values of a layer group: the sink of its ``BlockCache``."""

    def __init__(
        self,
        group: LayerGroup,
        layout: KVLayout,
        rooms: tuple[torch.Tensor, torch.Tensor],
        memory: LockedMemory | None = None,
    ) -> None:
        """``rooms``: keys and values, each (layers, kv_heads, tokens, width); ``memory``: the store's own."""
        self._layout = layout
        self._rooms = rooms
        self._staging = None if rooms[0].device.type == "cpu" else Staging(rooms, layout, memory)
        self.threads = 1 if self._staging is None else max(1, min(_DEVICE_THREADS, (os.cpu_count() or 1) // 2))
        self.presence = None if group.window is None else TokenMask(group.window, int(rooms[0].shape[2]))

    def rows(self, index: int, head: memoryview) -> Rows | None:
        """Return where the store may write block ``index`` directly (``RowSink``); None on a device, or if a token is
        present.
        """
        layout = self._layout
        start, stop = index * layout.block_tokens, (index + 1) * layout.block_tokens
        room = _laid_out_like_blocks(*self._rooms) if self._staging is None else None
        if room is None or (self.presence is not None and self.presence.has_any(start, stop)):
            return None
        token_bytes = layout.head_dim * layout.item_bytes
        count, room_tokens = 2 * layout.layers * layout.kv_heads, int(self._rooms[0].shape[2])
        row_bytes, stride = layout.block_tokens * token_bytes, room_tokens * token_bytes
        return Rows(head, room, start * token_bytes, count, row_bytes, stride)

    def on_block(self, index: int) -> None:
        tokens = self._layout.block_tokens
        if self.presence is not None:
            self.presence.mark_present(index * tokens, (index + 1) * tokens)

    def place(self, index: int, block: memoryview) -> None:
        # Copy a loaded block to its tokens.
        tokens = self._layout.block_tokens
        if self._staging is not None:
            self._staging.place(index, block)
        else:
            span = slice(index * tokens, (index + 1) * tokens)
            for target, part in zip(self._rooms, _parts(np.frombuffer(block, np.uint8), self._layout), strict=True):
                np.copyto(target.view(torch.uint8).numpy()[:, :, span], part)
        self.on_block(index)

    def flush(self) -> None:
        if self._staging is not None:
            self._staging.flush()

    def find_missing_blocks(self, tokens: int) -> list[int]:
        """Return the blocks that a token after ``tokens`` attends to and that are not loaded."""
        if self.presence is None:
            return []
        block = self._layout.block_tokens
        visible = range(self.presence.first_seen(tokens) // block, -(-tokens // block))
        return [index for index in visible if not self.has_block(index)]

    def has_block(self, index: int) -> bool:
        tokens = self._layout.block_tokens
        return self.presence is None or self.presence.has(index * tokens, (index + 1) * tokens)


class Guarding(Protocol):
    def check_unchanged(self, cache: SkyCache) -> bool: ...

    def settle(self, cache: SkyCache) -> None: ...


class Bringing(Protocol):
    def load_blocks(self, tokens: Tokens, sinks: Sequence[BlockSink], wanted: Sequence[Sequence[int]]) -> None: ...


class SkyCache(DynamicCache):  # type: ignore[misc]
    """DynamicCache that knows which tokens it holds and where they came from.

    A new SkyCache is empty: the ``loaded`` tokens are in its room, and the first forward pass makes them contents as
    far as the input equals them (``guard``). ``generate`` passes the whole prompt; a loop that passes only later tokens
    calls ``begin`` first.
    """

    def __init__(
        self,
        layout: KVLayout,
        room_tokens: int,
        device: torch.device,
        pool: RoomPool,
        kinds: Sequence[LayerKind] = (),
        states: States | None = None,
        memory: LockedMemory | None = None,
    ) -> None:
        """``kinds``: per layer; empty: full attention. ``memory``: the store's own."""
        dtype, size_bytes = TORCH_DTYPES[layout.dtype], layout.token_bytes * room_tokens
        with torch.inference_mode(False):  # writable in any mode
            if device.type == "cpu":
                self._room = pool.take(size_bytes)[:size_bytes].view(dtype)
            else:
                self._room = torch.empty(size_bytes // layout.item_bytes, dtype=dtype, device=device)
            kinds = kinds or [LayerKind()] * layout.layers
            keys, values = _rooms(self._room, layout, room_tokens)
            self.groups: list[GroupRoom] = []
            of_layer: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            for group in groups_of(kinds):  # consecutive, so that each group is one slice of the room
                rows = slice(len(of_layer), len(of_layer) + len(group.layers))
                self.groups.append(GroupRoom(group, group.layout(layout), (keys[rows], values[rows]), memory))
                of_layer.update(zip(group.layers, zip(keys[rows], values[rows], strict=True), strict=True))
        super().__init__()
        self.layer_class_to_replicate = None
        rooms = iter([of_layer[at] for at in range(layout.layers)])
        self.layers = [kind.layer(rooms) for kind in kinds]
        self._attention: list[GrowingLayer] = [layer for layer in self.layers if isinstance(layer, GrowingLayer)]
        self.states = states
        self.stop_every = 0
        """Tokens between kept states."""
        self.stops: dict[int, bytes] = {}
        """Recurrent states, by the number of tokens before."""
        self._latest_stop = 0
        self.result = LoadResult(prompt_tokens=0)
        self.guard: Guarding | None = None
        self.context: CacheContext | None = None
        """None if the contents must not be stored."""
        self.loaded: Tokens = _NO_TOKENS
        """Tokens whose blocks are in the room."""
        self.prompt: Tokens = _NO_TOKENS
        self.source: Bringing | None = None
        self._accounted = 0
        self.padding = 0
        """Left padding cut from the model's input."""
        self.taken = 0
        """Number of tokens that ``begin`` made contents."""
        self.filled = 0
        """Number of leading tokens not computed with gradients."""
        self.skipping: tuple[int, int] | None = None
        """Loaded tokens (start, stop) that became contents, until the pass ends."""
        self._layout = layout
        self._seen: list[npt.NDArray[np.integer[Any]] | torch.Tensor] = []
        self._seen_tokens = 0
        self._closed = False  # true if the tokens after ``_seen`` are unknown
        self._readers = 0
        self.begun = 0
        """Sequence lock for readers in other threads: odd during a reset."""
        self._in_a_pass = False
        self.pass_start = 0
        self._handed_to_generate = False
        self.used_before = False

    def fill(self, tokens: Tokens) -> None:
        """Make ``tokens``, whose blocks are placed, the contents. Raises RuntimeError if their window is incomplete."""
        if not self.suffices(len(tokens)):
            raise RuntimeError(f"behind {len(tokens)} tokens some in sight are not in the cache")
        for group in self.groups:
            group.flush()
        before = [dict(vars(layer)) for layer in self.layers]
        try:
            for layer in self._attention:
                layer.fill(len(tokens))
            if self.states and len(tokens):
                self.states.put(self.layers, self.stops[len(tokens)], self._room.device)
        except BaseException:  # all layers or none, so that another try finds equal lengths
            for layer, attributes in zip(self.layers, before, strict=True):
                vars(layer).clear()
                vars(layer).update(attributes)
            raise
        self._accounted = self.filled = len(tokens)
        self._seen, self._seen_tokens, self._closed = [tokens], len(tokens), False
        if len(tokens) > len(self.loaded):
            self.loaded = tokens

    def suffices(self, tokens: int) -> bool:
        self._account()
        return all(group.presence is None or group.presence.suffices(tokens) for group in self.groups)

    def has_block(self, group: int, index: int) -> bool:
        self._account()
        return self.groups[group].has_block(index)

    def _account(self) -> None:
        """Record the appended tokens. (Layers cannot: their updates are compiled.)"""
        length = self.held_tokens
        for group in self.groups:
            if group.presence is not None:
                group.presence.mark_present(self._accounted, length)
        self._accounted = length

    def rewind(self) -> None:
        """Empty the cache; its known contents stay as loaded tokens."""
        if not self.get_seq_length():
            if self.has_failed:
                self.undo()
            return
        self._empty(self.tokens())

    def _empty(self, known: Tokens) -> None:
        loaded = known if all(layer.in_place for layer in self._attention) else _NO_TOKENS
        stops = {tokens: state for tokens, state in self.stops.items() if tokens <= len(loaded)}
        self.reset()
        self.loaded, self.stops = loaded, stops

    @property
    def held_tokens(self) -> int:
        return int(self.get_seq_length())

    @property
    def rows(self) -> int:
        return next((int(layer.keys.shape[0]) for layer in self._attention if layer.is_initialized), 0)

    def begin(self) -> int:
        """Make the loaded tokens contents and return their number; then pass the tokens after them to the unchanged
        model. Returns 0 for a pickled cache.
        """
        if not self.get_seq_length():
            if self.guard is None:
                return 0
            self.guard.check_unchanged(self)
            self._handed_to_generate = self._in_a_pass = False
            self.advance(self.usable(len(self.loaded)))
            self.taken = self.held_tokens
        return int(self.get_seq_length())

    def usable(self, tokens: int) -> int:
        """Return how many of the next ``tokens`` loaded tokens can become contents: up to a complete window, at kept
        states.
        """
        length = self.held_tokens
        if not all(layer.in_place for layer in self._attention):
            return 0
        if self.source is not None and not self.suffices(length + tokens):
            self.source.load_blocks(
                self.loaded, self.groups, [group.find_missing_blocks(length + tokens) for group in self.groups]
            )
            for group in self.groups:
                group.flush()  # at once: later, tokens computed instead could be overwritten
        if not self.states and self.suffices(length + tokens):
            return tokens
        good = np.ones(length + tokens + 1, bool)
        if self.states:
            good[:] = False
            good[[stop for stop in self.stops if stop < len(good)]] = True
        for group in self.groups:
            if group.presence is not None:
                good &= group.presence.sufficient(length + tokens)
        ends = np.flatnonzero(good[length + 1 :])
        return int(ends[-1]) + 1 if len(ends) else 0

    def stops_before(self, end: int) -> list[int]:
        """Return the positions up to ``end`` at which a pass must end, so that recurrent states can be kept."""
        length, block = self.get_seq_length(), self._layout.block_tokens
        if not self.states:
            return []
        wanted = {*range(self.stop_every, end + 1, self.stop_every), end // block * block}
        return sorted(stop for stop in wanted if stop > length)

    def stop(self, decoding: bool = False) -> None:
        """Keep the states if a block ends here; while decoding, only the latest between regular stops."""
        if not self.states or self._closed:
            return
        length = int(self.get_seq_length())
        if not length or length % self._layout.block_tokens:
            return
        self.stops[length] = self.states.take(self.layers)
        if decoding and length % self.stop_every:
            self.stops.pop(self._latest_stop, None)
            self._latest_stop = length

    def advance(self, tokens: int) -> None:
        start = self.held_tokens
        self.fill(self.loaded[: start + tokens])
        self.skipping = (start, start + tokens) if tokens else None

    @property
    def _is_user_defined(self) -> bool:
        """Flag that ``generate`` sets first. It passes its whole prompt, so a used cache is rewound."""
        return self._handed_to_generate

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        self._handed_to_generate = value
        self.used_before = self.get_seq_length() > 0
        self.rewind()

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1

    def enter(self) -> None:
        self._in_a_pass, self.pass_start = True, self.held_tokens

    @property
    def has_failed(self) -> bool:
        """True if the last pass failed and changed the contents (assumed of recurrent states)."""
        if not self._in_a_pass:
            return False
        return bool(self.states) or any(layer.get_seq_length() != self.pass_start for layer in self._attention)

    def undo(self) -> None:
        self._empty(self.loaded)

    def on_pass_end(self) -> None:
        self._in_a_pass = False

    @property
    def has_known_tokens(self) -> bool:
        return not self._closed

    def record_input(self, input_ids: torch.Tensor | None, is_plain: bool) -> None:
        """Record the ``input_ids`` (rows, n) of the next pass; ``is_plain``: equal rows at consecutive positions."""
        length = self.get_seq_length()
        self._in_a_pass = True
        if self._seen_tokens > length:  # a pass failed
            self._seen_tokens, self._seen = length, [_joined(self._seen)[:length]]
        if not is_plain or input_ids is None or self._seen_tokens < length:  # a pass without the guard
            self._closed = True
        elif not self._closed:
            self._seen.append(input_ids[0].detach().clone())
            self._seen_tokens += input_ids.shape[1]

    @property
    def passed_unseen(self) -> bool:
        return not self.result.usage.is_in_use and self.held_tokens > self._seen_tokens

    def __del__(self) -> None:
        guard: Guarding | None = self.__dict__.get("guard")  # absent if the constructor failed
        if guard is not None and not sys.is_finalizing() and self.result.usage.drop():
            guard.settle(self)

    def has_recorded(self, tokens: int) -> bool:
        return self._seen_tokens >= tokens

    def tokens(self) -> Tokens:
        """Return the leading token ids, as far as known and equal in all rows; only these are stored."""
        recorded = _joined(self._seen)
        lengths = {layer.get_seq_length() for layer in self._attention}
        known = len(lengths) == 1 and (len(recorded) in lengths or (self._closed and len(recorded) < min(lengths)))
        return recorded if known else _NO_TOKENS

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx >= len(self.layers):
            raise CacheMisuse(
                f"a model of more than {layer_idx} layers is given the cache of one with {len(self.layers)}: get one "
                "from a KVCManager of that model"
            )
        if not self._in_a_pass and self.skipping is not None and self.guard is not None:
            raise CacheMisuse(
                f"behind the {self.taken} tokens that begin() returned the cache's own model is called, model(…), not "
                "another one, nor model.forward(…) or a part of it: nothing else is known to go on with them"
            )
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """Crop the contents; drop loaded tokens and kept states."""
        self._account()
        super().crop(tokens_to_remove)
        self._accounted = self.held_tokens
        self.loaded, self.stops, self.taken = _NO_TOKENS, {}, 0
        recorded = _joined(self._seen)
        self._closed = self._closed and len(recorded) < self.get_seq_length()
        self._seen = [recorded[: self.get_seq_length()]]
        self._seen_tokens = len(self._seen[0])

    def reset(self) -> None:
        # Odd during the reset: readers in other threads check this number.
        self.begun += 1
        self._account()
        super().reset()
        if self._readers:  # checked after emptying, as readers check the contents after registering
            for layer in self._attention:
                layer.leave_room()
        self._accounted = 0
        self._seen, self._seen_tokens, self._closed, self.loaded, self.padding = [], 0, False, _NO_TOKENS, 0
        self.stops, self._latest_stop, self._in_a_pass = {}, 0, False
        self.taken, self.filled, self.skipping = 0, 0, None
        self.begun += 1

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.loaded = _NO_TOKENS

    def batch_repeat_interleave(self, repeats: int) -> None:
        for layer in self.layers:
            if hasattr(layer, "batch_repeat_interleave"):
                layer.batch_repeat_interleave(repeats)
            repeat(layer, repeats)
        self.loaded = _NO_TOKENS

    @property
    def can_shift(self) -> bool:
        return not self.states and all(group.presence is None for group in self.groups)

    def shift_rows(self, shifts: Sequence[int]) -> None:
        """Move each row right by its ``shifts``, behind padding that the mask hides. Such contents are not stored."""
        for layer in self._attention:
            for name in ("keys", "values"):
                tensor: torch.Tensor = getattr(layer, name)
                moved = torch.zeros_like(tensor)
                for row, shift in enumerate(shifts):
                    moved[row, :, shift:] = tensor[row, :, : max(0, tensor.shape[2] - shift)]
                setattr(layer, name, moved)
        self._seen, self._seen_tokens, self._closed, self.loaded = [], 0, True, _NO_TOKENS

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self.loaded = _NO_TOKENS


class CacheSource:
    """Blocks of any transformers cache with a single sequence, for ``BlockCache.save``."""

    def __init__(self, cache: Cache, layout: KVLayout, layers: Sequence[int] = ()) -> None:
        pairs = _of_tokens(cache)
        self._layers = [
            (keys[0].detach(), values[0].detach()) for keys, values in ([pairs[at] for at in layers] or pairs)
        ]
        self._layout = layout
        on_device = bool(self._layers) and self._layers[0][0].device.type != "cpu"
        self._gathered = Gathered(self._layers, layout) if on_device else None

    def read(self, index: int, out: memoryview) -> None:
        if self._gathered is not None:
            self._gathered.read(index, out)
            return
        tokens = self._layout.block_tokens
        for which, target in enumerate(_parts(np.frombuffer(out, np.uint8), self._layout)):
            for layer, pair in enumerate(self._layers):
                part = pair[which][:, index * tokens : (index + 1) * tokens]
                part = part if part.stride(-1) == 1 else part.contiguous()
                np.copyto(target[layer], part.view(torch.uint8).numpy())


def _of_tokens(cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    return [(keys, values) for keys, values in pairs if keys is not None and values is not None]


def _rooms(room: torch.Tensor, layout: KVLayout, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Split a room into keys and values, each (layers, kv_heads, tokens, width).
    of_keys, of_values = layout.widths
    if of_keys == of_values:  # laid out like a block
        both = room.view(layout.layers, 2, layout.kv_heads, tokens, of_keys)
        return both[:, 0], both[:, 1]
    keys = layout.layers * layout.kv_heads * tokens * of_keys
    shape = (layout.layers, layout.kv_heads, tokens)
    return room[:keys].view(*shape, of_keys), room[keys:].view(*shape, of_values)


def _laid_out_like_blocks(keys: torch.Tensor, values: torch.Tensor) -> memoryview | None:
    # Return the memory of keys and values if a block's rows can be written there directly; else None.
    layers, heads, tokens, width = keys.shape
    layer_items = heads * tokens * width
    if keys.shape != values.shape or values.data_ptr() - keys.data_ptr() != layer_items * keys.element_size():
        return None
    if keys.stride() != (2 * layer_items, tokens * width, width, 1):
        return None
    together = keys.as_strided((2 * layers * layer_items,), (1,))
    return memoryview(together.view(torch.uint8).numpy())


def _parts(block: npt.NDArray[np.uint8], layout: KVLayout) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return views of keys and values, each (layers, kv_heads, tokens, bytes of a head)."""
    # numpy copies 20 GB/s on one thread; torch's threads may wait 15 ms for another program.
    of_keys, of_values = (width * layout.item_bytes for width in layout.widths)
    return _split_keys_values(block.reshape(layout.layers, -1), layout, of_keys, of_values)


def _split_keys_values(layers: Any, layout: KVLayout, of_keys: int, of_values: int) -> tuple[Any, Any]:
    shape = (*layers.shape[:-1], layout.kv_heads, layout.block_tokens)
    keys = layout.kv_heads * layout.block_tokens * of_keys
    return layers[..., :keys].reshape(*shape, of_keys), layers[..., keys:].reshape(*shape, of_values)


def _joined(parts: list[npt.NDArray[np.integer[Any]] | torch.Tensor]) -> Tokens:
    arrays = [part for part in parts if not isinstance(part, torch.Tensor)]
    if tensors := [part for part in parts if isinstance(part, torch.Tensor)]:
        arrays.append(torch.cat(tensors).cpu().numpy())
    return np.concatenate([np.zeros(0, np.int64), *arrays]).astype(np.int64)


# --- devices: batched copies of blocks between host and device memory ---
#
# A copy per layer and block would cost a launch and a wait each. So blocks are gathered, copied together through pinned
# memory on a separate stream, and scattered. Blocks in the store's own memory, page-locked, are copied from there. The
# same code works on CPU, for tests.

_AT_ONCE_BYTES = 64 << 20
_DEVICE_THREADS = 8  # threads: on an H100's host one copies a gigabyte in 0.2 s, eight in 0.05 s; the bus takes 0.02 s.


class Staging:
    """Copier of blocks to a device in batches, through pinned memory on a separate stream. ``place`` is thread-safe.

    ``rooms``: keys and values, each (layers, kv_heads, tokens, width), slices of one tensor.
    """

    def __init__(self, rooms: Sequence[torch.Tensor], layout: KVLayout, memory: LockedMemory | None = None) -> None:
        self._memory = memory
        self._rooms = rooms
        self._layout = layout
        self._device = rooms[0].device
        self._stream, self._made = None, None
        if self._device.type == "cuda":
            self._stream = _copies(self._device)
            # The room's memory may have belonged to another tensor whose work on the stream has not ended yet.
            self._made = torch.cuda.current_stream(self._device).record_event()
        self._changed = threading.Condition()
        self._batch: _BatchRows | None = None
        self._copying = 0
        self._sent: list[tuple[object, Any]] = []
        self._ends: list[Any] = []

    def place(self, index: int, block: memoryview) -> None:
        # Gather blocks of all threads in a batch; the thread that completes a full batch sends it to the device.
        with self._locked_parts(block) as parts:
            is_locked = bool(parts) and block.nbytes == self._layout.block_bytes
        with self._changed:
            batch = self._batch = self._batch or _BatchRows()
            slot = len(batch.indices)
            batch.indices.append(index)
            batch.copying += 1
            self._copying += 1
            if is_locked:
                batch.views[slot] = block
            elif batch.host is None:
                batch.host = _pinned(self._layout, self._device)
            if len(batch.indices) == _most_rows(self._layout):
                self._batch = None  # sent by the last thread that copies into it
        try:
            if not is_locked:
                assert batch.host is not None
                np.copyto(batch.host[slot].numpy(), np.frombuffer(block, np.uint8))
        except BaseException:
            batch.failed.add(slot)  # its tokens are computed: later copies must not overwrite them
            raise
        finally:
            with self._changed:
                batch.copying -= 1
                self._copying -= 1
                if batch is not self._batch and not batch.copying:
                    self._send(batch)
                self._changed.notify_all()

    def flush(self) -> None:
        """Copy the staged blocks; the current stream waits for all copies."""
        with self._changed:
            while self._copying:
                self._changed.wait()
            if self._batch is not None:
                self._send(self._batch)
                self._batch = None
            for end in self._ends:
                torch.cuda.current_stream(self._device).wait_event(end)
            self._ends = []
            views = [(sent, end) for sent, end in self._sent if isinstance(sent, memoryview)]
            self._sent = [(sent, end) for sent, end in self._sent if not isinstance(sent, memoryview)]
        for _, end in views:
            end.synchronize()  # they are held until then, and no longer: the store may need the memory

    def _locked_parts(self, block: memoryview) -> contextlib.AbstractContextManager[list[Any]]:
        return self._memory.parts(block) if self._memory is not None else contextlib.nullcontext([])

    def _rows_on_device(self, batch: _BatchRows, slots: Sequence[int]) -> torch.Tensor:
        """Queue the copy of a batch's rows."""
        if not batch.views and len(slots) == len(batch.indices) and batch.host is not None:
            return batch.host[: len(slots)].to(self._device, non_blocking=True)
        rows = torch.empty((len(slots), self._layout.block_bytes), dtype=torch.uint8, device=self._device)
        for row, slot in zip(rows, slots, strict=True):
            view = batch.views.get(slot)
            with self._locked_parts(view) if view is not None else contextlib.nullcontext([]) as parts:
                if parts:
                    sources = parts
                elif view is not None:  # no longer locked: copied at once
                    sources = [torch.from_numpy(np.array(view))]
                else:
                    assert batch.host is not None
                    sources = [batch.host[slot]]
                for target, part in zip(row.split([len(part) for part in sources]), sources, strict=True):
                    target.copy_(part, non_blocking=True)
        return rows

    def _send(self, batch: _BatchRows) -> None:
        # Queue the copy of a full batch to its places on the device.
        slots = [slot for slot in range(len(batch.indices)) if slot not in batch.failed]
        indices = torch.tensor([batch.indices[slot] for slot in slots], dtype=torch.int64)
        stream = self._stream
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            if stream is not None:
                stream.wait_event(self._made)
            on_device = self._rows_on_device(batch, slots)
            if stream is not None:  # a copy of pageable memory would wait for all copies before it
                indices = indices.pin_memory()
            where = indices.to(self._device, non_blocking=True)
            numbers = on_device.view(self._rooms[0].dtype).view(len(on_device), self._layout.layers, -1)
            for room, part in zip(
                self._rooms, _split_keys_values(numbers, self._layout, *self._layout.widths), strict=True
            ):
                blocks = room[:, :, : room.shape[2] // self._layout.block_tokens * self._layout.block_tokens]
                blocks.unflatten(2, (-1, self._layout.block_tokens))[:, :, where] = part.permute(1, 2, 0, 3, 4)
        if stream is not None:
            end = stream.record_event()
            self._rooms[0].record_stream(stream)  # an abandoned load must not write into memory that is reused
            self._sent = [(sent, event) for sent, event in self._sent if not event.query()]
            self._sent += [(sent, end) for sent in (batch.host, indices, *batch.views.values())]
            self._ends.append(end)


@dataclass(slots=True, eq=False)
class _BatchRows:
    """Blocks gathered in host memory, or where they lie (``views``); ``failed`` slots are not copied."""

    host: torch.Tensor | None = None
    views: dict[int, memoryview] = field(default_factory=dict)
    indices: list[int] = field(default_factory=list)
    copying: int = 0
    failed: set[int] = field(default_factory=set)


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """Return the only stream of copies: each reuses the last's memory."""
    return torch.cuda.Stream(device)


class Gathered:
    """Reader of blocks from a device: copies many at a time. ``layers``: keys and values, each (kv_heads, tokens,
    width).
    """

    def __init__(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], layout: KVLayout) -> None:
        self._layers = layers
        self._layout = layout
        self._first = 0
        self._host: np.ndarray[Any, np.dtype[np.uint8]] = np.zeros((0, layout.block_bytes), np.uint8)

    def read(self, index: int, out: memoryview) -> None:
        if not self._first <= index < self._first + len(self._host):
            self._gather(index)
        out[:] = self._host[index - self._first].data

    def _gather(self, first: int) -> None:
        layout, tokens = self._layout, self._layout.block_tokens
        count = min(int(self._layers[0][0].shape[1]) // tokens - first, max(1, _AT_ONCE_BYTES // layout.block_bytes))
        span = slice(first * tokens, (first + count) * tokens)
        parts = [
            torch.stack([pair[which][:, span] for pair in self._layers])
            .unflatten(2, (count, tokens))
            .permute(2, 0, 1, 3, 4)
            .reshape(count, layout.layers, -1)
            for which in range(2)
        ]
        block = torch.cat(parts, dim=2).contiguous().view(torch.uint8).reshape(count, layout.block_bytes)
        self._first, self._host = first, block.cpu().numpy()


def _most_rows(layout: KVLayout) -> int:
    return max(1, _AT_ONCE_BYTES // layout.block_bytes)


def _pinned(layout: KVLayout, device: torch.device) -> torch.Tensor:
    shape = (_most_rows(layout), layout.block_bytes)
    return torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
