"""SkyCache: the transformers cache that is handed to ``generate``; prefilled in place, growing in place.

transformers' own DynamicCache concatenates, so that its first step would copy everything that was just loaded.
Here all layers share one tensor (layers, 2, kv_heads, room_tokens, head_dim) with room to grow: blocks are copied
into it once, and new tokens are written behind them. Whatever else is done to a layer (crop, beams, offloading)
falls back to what DynamicLayer does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import mmap
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import transformers

from skymemory.cache.blocks import BlockSink
from skymemory.cache.results import LoadResult
from skymemory.engine.staging import Gathered, Staging
from skymemory.engine.states import States, forget, repeat
from skymemory.errors import CacheMisuse, InvalidInput, MissingExtra
from skymemory.kv.context import CacheContext
from skymemory.kv.layout import KVLayout

if not (4, 57) <= tuple(map(int, transformers.__version__.split(".")[:2])) < (6, 0):
    raise MissingExtra(
        f"transformers >= 4.57, < 6 is needed, found {transformers.__version__}: pip install -U 'skymemory[hf]'"
    )

from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

try:
    from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

    KNOWS_STATES = "number_of_states" in inspect.signature(LinearAttentionLayer.__init__).parameters
except ImportError:
    KNOWS_STATES = False
if not KNOWS_STATES:  # transformers before 5.16 or so: models with states have caches of another form, and are refused

    class LinearAttentionLayer:  # type: ignore[no-redef]
        def __init__(self, number_of_states: int = 1) -> None:
            raise TypeError("this release of transformers has no layers with states that we know")

    class LinearAttentionAndFullAttentionLayer:  # type: ignore[no-redef]
        pass


try:
    from transformers.cache_utils import DummyLayer
except ImportError:  # before 5.23

    class DummyLayer:  # type: ignore[no-redef]
        pass


# Blocks are only read from these buffers, never written to.
warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")

LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    DummyLayer,
)
"""transformers' layers whose contents are known: keys and values of tokens, recurrent states, or nothing."""

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Tokens = npt.NDArray[np.int64]

_NO_TOKENS: Tokens = np.zeros(0, np.int64)


class RoomPool:
    """Memory for caches, used again: first touch of fresh memory costs more than the copy into it.

    An array is free when nothing but the pool refers to it, which torch guarantees to say truly: a tensor made by
    ``from_numpy`` holds its array until the last view of its storage is gone. At most ``keep`` arrays are kept.
    """

    _GRAIN_BYTES = 8 << 20

    def __init__(self, keep: int = 2) -> None:
        self._keep = keep
        self._arrays: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> torch.Tensor:
        """At least ``size_bytes`` bytes, contents undefined."""
        with self._lock:
            counts = zip(self._arrays, _references(self._arrays), strict=True)
            free = [array for array, count in counts if count <= _FREE and len(array) >= size_bytes]
            best = min(free, key=len, default=None)
            if best is not None and len(best) <= 4 * max(size_bytes, self._GRAIN_BYTES):
                return torch.from_numpy(best)
            rounded = -(-size_bytes // self._GRAIN_BYTES) * self._GRAIN_BYTES
            array = _fresh(rounded)
            if len(self._arrays) >= self._keep:
                self._arrays.pop(0)
            if self._keep:
                self._arrays.append(array)
            return torch.from_numpy(array)

    def warm(self, size_bytes: int) -> None:
        """Touch memory for one cache of ``size_bytes`` ahead of time."""
        self.take(size_bytes).zero_()


def _references(arrays: list[npt.NDArray[np.uint8]]) -> list[int]:
    return [sys.getrefcount(array) for array in arrays]


_FREE = _references([np.empty(1, np.uint8)])[0]
"""What ``_references`` says of an array that only its list holds, in whatever Python this is."""


def _fresh(size_bytes: int) -> npt.NDArray[np.uint8]:
    room = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # else a forked child writes into it, too
    if hasattr(mmap, "MADV_HUGEPAGE"):
        room.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(room, np.uint8)


_KEYS_ALONE = "value_states" not in inspect.signature(DynamicLayer.lazy_initialization).parameters
"""transformers 4 initializes a layer by its keys."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """One layer whose keys and values live in ``room`` as long as they fit: (kv_heads, room_tokens, width) of each."""

    def __init__(self, room: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        self._room: tuple[torch.Tensor, torch.Tensor] | None = room
        self._in_place: torch.Tensor | None = None  # the keys that we made; anyone else's mean: leave the room
        self.dtype, self.device = room[0].dtype, room[0].device

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(*(key_states, value_states)[: 1 if _KEYS_ALONE else 2])
        self._in_place = self.keys

    def fill(self, tokens: int) -> None:
        """Declare the first ``tokens`` of the room to be the layer's contents."""
        room = self._room
        if room is None or not tokens:
            return
        self.keys, self.values = room[0][None, :, :tokens], room[1][None, :, :tokens]
        self._in_place, self.is_initialized = self.keys, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, in place where there is room; see DynamicLayer."""
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
                f"a model in {kind} goes on from a cache in {self.keys.dtype}: it was converted since. Get another "
                "cache and pass it all tokens, past_key_values=kvc.get_cache(tokens)"
            )
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
        room[0][:, start:end] = key_states[0]
        room[1][:, start:end] = value_states[0]
        self.fill(end)
        return self.keys, self.values

    @property
    def in_place(self) -> bool:
        """Whether its contents are in the room still, or it has none."""
        return self._room is not None and (not self.is_initialized or self.keys is self._in_place)

    def get_seq_length(self, *args: Any) -> int:
        keys = self.keys if self.is_initialized else None  # looked up once: another thread may be emptying it
        return 0 if keys is None or not keys.numel() else int(keys.shape[-2])

    def leave_room(self) -> None:
        """What comes next goes elsewhere."""
        self._room = self._in_place = None

    def reset(self) -> None:
        """Forget everything; the room is kept, with what is in it, for what comes next."""
        self.keys = self.values = self._in_place = None
        self.is_initialized = False


class Presence:
    """Which tokens' keys and values layers with a window really have: what is out of sight need not be there."""

    def __init__(self, window: int, room_tokens: int) -> None:
        self._window = window
        self._tokens = np.zeros(room_tokens, bool)

    def came(self, start: int, stop: int) -> None:
        """These are there now. Behind the room there is only what was computed, and that always is."""
        self._tokens[start:stop] = True

    def has(self, start: int, stop: int) -> bool:
        return bool(self._tokens[start:stop].all())

    def suffices(self, tokens: int) -> bool:
        """Whether all is there that is seen behind the first ``tokens``."""
        return self.has(self.first_seen(tokens), tokens)

    def first_seen(self, tokens: int) -> int:
        """The first token that the one behind ``tokens`` sees."""
        return max(0, tokens - self._window + 1)

    def sufficient(self, most: int) -> npt.NDArray[np.bool_]:
        """``suffices`` of 0 to ``most`` tokens."""
        lacking = np.zeros(most + 1, np.int64)
        known = self._tokens[:most]
        lacking[1 : len(known) + 1] = np.cumsum(~known)
        lacking[len(known) + 1 :] = lacking[len(known)]
        return np.asarray(lacking == lacking[np.maximum(np.arange(most + 1) - self._window + 1, 0)])


class SlidingLayer(GrowingLayer):
    """One layer whose tokens are seen by the ``window`` tokens from each on only.

    transformers' own layer drops what is out of sight. This one keeps it as far as it was there, for blocks are stored
    from it, and shows the model the same: what the first of the new tokens sees, and what comes behind that.
    """

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
        """Append, and return what the new tokens see."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        seen = self.sliding_window - 1 + key_states.shape[-2]
        return keys[..., -seen:, :], values[..., -seen:, :]

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Length and offset of what is shown."""
        held = self.get_seq_length()
        new = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return min(held, self.sliding_window - 1) + new, max(held - self.sliding_window + 1, 0)

    def get_max_length(self) -> int:
        return self.sliding_window

    def get_max_cache_shape(self) -> int:
        return self.sliding_window


class RecurrentLayer(LinearAttentionLayer):  # type: ignore[misc]
    """One layer with recurrent states and nothing of tokens."""

    def reset(self) -> None:
        forget(self)


class StatefulLayer(LinearAttentionAndFullAttentionLayer, GrowingLayer):  # type: ignore[misc]
    """One layer with ``states`` recurrent states beside its keys and values."""

    def __init__(self, room: tuple[torch.Tensor, torch.Tensor], states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=states)
        GrowingLayer.__init__(self, room)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if args:  # of keys and values
            GrowingLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        forget(self)
        GrowingLayer.reset(self)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What one layer of a model keeps."""

    attention: bool = True
    """Keys and values of tokens."""
    window: int | None = None
    """How far they are seen; None: by all tokens behind them."""
    states: int = 0
    """Recurrent states."""

    def layer(self, rooms: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """A layer of this kind, with the next of ``rooms`` if it needs one."""
        if not self.attention:
            return RecurrentLayer(number_of_states=self.states) if self.states else DummyLayer()
        if self.states:
            return StatefulLayer(next(rooms), self.states)
        return GrowingLayer(next(rooms)) if self.window is None else SlidingLayer(next(rooms), self.window)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that see equally far back: what is stored and loaded together."""

    window: int | None
    layers: tuple[int, ...]
    """Counted among those with attention."""

    def layout(self, whole: KVLayout) -> KVLayout:
        """Of a block of these layers, where one of all has ``whole``."""
        return dataclasses.replace(whole, layers=len(self.layers))

    def describe(self, whole: KVLayout) -> str:
        """For ``CacheContext.layout``, where there are other groups beside it."""
        layers = ",".join(map(str, self.layers))
        return f"{self.layout(whole).describe()} of layers {layers}, window {self.window or 'none'}"


def groups_of(kinds: Sequence[LayerKind]) -> tuple[LayerGroup, ...]:
    """The groups that these layers are, the one without a window first."""
    windows = [kind.window for kind in kinds if kind.attention]
    return tuple(
        LayerGroup(window, tuple(at for at, one in enumerate(windows) if one == window))
        for window in sorted(set(windows), key=lambda one: one or 0)
    )


class GroupRoom:
    """Where the blocks of a group are put: the sink of their ``BlockCache``."""

    def __init__(self, group: LayerGroup, layout: KVLayout, rooms: tuple[torch.Tensor, torch.Tensor]) -> None:
        """``rooms``: keys and values of its layers, each (layers, kv_heads, tokens, width)."""
        self._layout = layout
        self._rooms = rooms
        self._staging = None if rooms[0].device.type == "cpu" else Staging(rooms, layout)
        self.presence = None if group.window is None else Presence(group.window, int(rooms[0].shape[2]))

    def place(self, index: int, block: memoryview) -> None:
        """Copy one block's raw bytes to its place."""
        tokens = self._layout.block_tokens
        if self._staging is not None:
            self._staging.place(index, block)
        else:
            span = slice(index * tokens, (index + 1) * tokens)
            for there, part in zip(self._rooms, _parts(np.frombuffer(block, np.uint8), self._layout), strict=True):
                np.copyto(there.view(torch.uint8).numpy()[:, :, span], part)
        if self.presence is not None:
            self.presence.came(index * tokens, (index + 1) * tokens)

    def flush(self) -> None:
        if self._staging is not None:
            self._staging.flush()

    def lacking(self, tokens: int) -> list[int]:
        """The blocks of what is seen behind the first ``tokens`` that are not all there."""
        if self.presence is None:
            return []
        block = self._layout.block_tokens
        seen = range(self.presence.first_seen(tokens) // block, -(-tokens // block))
        return [index for index in seen if not self.has_block(index)]

    def has_block(self, index: int) -> bool:
        """Whether it could be stored: as far as it is contents."""
        tokens = self._layout.block_tokens
        return self.presence is None or self.presence.has(index * tokens, (index + 1) * tokens)


class Guarding(Protocol):
    """What a cache needs of the hook that looks at its model (``guard``)."""

    def look(self, cache: SkyCache) -> None: ...


class Bringing(Protocol):
    """What has the blocks of a cache's prompt (``cache.parts``)."""

    def bring(self, tokens: Tokens, sinks: Sequence[BlockSink], wanted: Sequence[Sequence[int]]) -> None: ...


class SkyCache(DynamicCache):  # type: ignore[misc]
    """A DynamicCache that knows which tokens it holds and where they came from.

    As it is handed out it is empty: ``ready`` tokens lie in its room, and are made its contents at the first forward,
    as far as the model is given the same ones (``guard``). So ``generate`` passes the whole prompt to the model, and
    whatever it is given, the result is what an empty cache leads to. A loop of one's own that passes only what is
    behind the loaded tokens calls ``begin`` first.

    ``result`` says where the prefix came from. ``tokens()`` is what the model was seen to put in, as far as that is
    known, and the same for all sequences that the cache holds; nothing else is ever stored from it.
    """

    def __init__(
        self,
        layout: KVLayout,
        room_tokens: int,
        device: torch.device,
        pool: RoomPool,
        kinds: Sequence[LayerKind] = (),
        states: States | None = None,
        stop_every: int = 0,
    ) -> None:
        """``kinds``: of each layer; empty: all of the usual one. ``states``: those of the model, if it has any;
        ``stop_every``: so many tokens apart they are kept.
        """
        dtype, size_bytes = TORCH_DTYPES[layout.dtype], layout.token_bytes * room_tokens
        with torch.inference_mode(False):  # to be written to in any mode, whatever this one is
            if device.type == "cpu":
                self._room = pool.take(size_bytes)[:size_bytes].view(dtype)
            else:
                self._room = torch.empty(size_bytes // layout.item_bytes, dtype=dtype, device=device)
            kinds = kinds or [LayerKind()] * layout.layers
            keys, values = _rooms(self._room, layout, room_tokens)
            self.groups: list[GroupRoom] = []
            """Where the blocks of each of ``groups_of(kinds)`` are put."""
            of_layer: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            for group in groups_of(kinds):  # one behind the other, so that each is one part of the room
                rows = slice(len(of_layer), len(of_layer) + len(group.layers))
                self.groups.append(GroupRoom(group, group.layout(layout), (keys[rows], values[rows])))
                of_layer.update(zip(group.layers, zip(keys[rows], values[rows], strict=True), strict=True))
        super().__init__()
        self.layer_class_to_replicate = None
        rooms = iter([of_layer[at] for at in range(layout.layers)])
        self.layers = [kind.layer(rooms) for kind in kinds]
        self._attention: list[GrowingLayer] = [layer for layer in self.layers if isinstance(layer, GrowingLayer)]
        self.states = states
        self.stop_every = stop_every
        self.stops: dict[int, bytes] = {}
        """The states behind so many tokens, where these are known."""
        self._latest_stop = 0
        """Of those that decoding has made."""
        self.result = LoadResult(prompt_tokens=0)
        self.guard: Guarding | None = None
        """The one hook that may ``advance`` it and ``note`` tokens: that of the one model this cache is for."""
        self.context: CacheContext | None = None
        """Whose cache it is; None: nobody's that could be stored."""
        self.loaded: Tokens = _NO_TOKENS
        """What the room holds from the first token on, whether it is contents already or not."""
        self.prompt: Tokens = _NO_TOKENS
        """What it was made for."""
        self.source: Bringing | None = None
        """Where more of what is loaded comes from: a use that is shorter sees tokens that were out of sight."""
        self._accounted = 0
        """Tokens that were contents when it was last noted which of them are there."""
        self.padding = 0
        """Tokens that the model's caller has left of the first one, and the model has not been given."""
        self._layout = layout
        self._seen: list[npt.NDArray[np.integer[Any]] | torch.Tensor] = []
        self._seen_tokens = 0
        self._closed = False
        """What is behind ``_seen`` is not known."""
        self._readers = 0
        self.begun = 0
        """Grows by 2 each time that it is emptied, and is odd meanwhile: another thread may be reading."""
        self._in_a_pass = False
        """A pass was seen to begin, and has not ended."""
        self._handed_to_generate = False
        self.used_before = False
        """Whether it had contents when ``generate`` took it, and prepared what it passes for these."""

    def fill(self, tokens: Tokens) -> None:
        """Declare ``tokens`` to be what the placed blocks hold, from the first on.

        Raises RuntimeError where something of what is seen behind them was not placed.
        """
        if not self.suffices(len(tokens)):
            raise RuntimeError(f"behind {len(tokens)} tokens there are some in sight that are not in the cache")
        for group in self.groups:
            group.flush()
        for layer in self._attention:
            layer.fill(len(tokens))
        if self.states and len(tokens):
            self.states.put(self.layers, self.stops[len(tokens)], self._room.device)
        self._accounted = len(tokens)
        self._seen, self._seen_tokens, self._closed, self._in_a_pass = [tokens], len(tokens), False, False
        if len(tokens) > len(self.loaded):
            self.loaded = tokens

    def suffices(self, tokens: int) -> bool:
        """Whether all layers have what is seen behind the first ``tokens``."""
        self._account()
        return all(group.presence is None or group.presence.suffices(tokens) for group in self.groups)

    def has_block(self, group: int, index: int) -> bool:
        """Whether a block of a group that is contents could be stored: all of its tokens are there."""
        self._account()
        return self.groups[group].has_block(index)

    def _account(self) -> None:
        """What has been appended since the last time was computed, and so it is there. (Layers do not note it: their
        updates are compiled.)
        """
        held = self.held
        for group in self.groups:
            if group.presence is not None:
                group.presence.came(self._accounted, held)
        self._accounted = held

    def rewind(self) -> None:
        """Empty again, with what it held at hand for the next forward, as far as that is known."""
        if not self.get_seq_length():
            if self.torn:
                loaded, stops = self.loaded, self.stops
                self.reset()
                self.loaded, self.stops = loaded, stops
            return
        held = self.tokens() if all(layer.in_place for layer in self._attention) else _NO_TOKENS
        stops = {tokens: state for tokens, state in self.stops.items() if tokens <= len(held)}
        self.reset()
        self.loaded, self.stops = held, stops

    @property
    def held(self) -> int:
        """Tokens that are contents."""
        return int(self.get_seq_length())

    @property
    def rows(self) -> int:
        """Sequences that are held."""
        return next((int(layer.keys.shape[0]) for layer in self._attention if layer.is_initialized), 0)

    def begin(self) -> int:
        """Make what is loaded the contents now, and say how many tokens that is: the first ones of the prompt that this
        cache was made for. The model is then to be given what is behind them. None of a cache that was saved and read
        again: whose it was is not known any more.
        """
        if not self.get_seq_length():
            if self.guard is None:
                return 0
            self.guard.look(self)
            self._handed_to_generate = False
            self.advance(self.usable(len(self.loaded)))
        return int(self.get_seq_length())

    def usable(self, tokens: int) -> int:
        """How many of the next ``tokens`` of what is loaded can become contents: with states, up to where one is; with
        windows, up to where what is seen is there.
        """
        held = self.held
        if not all(layer.in_place for layer in self._attention):
            return 0
        if self.source is not None and not self.suffices(held + tokens):
            self.source.bring(self.loaded, self.groups, [group.lacking(held + tokens) for group in self.groups])
            for group in self.groups:
                group.flush()  # not later: what is computed instead must not be written over
        if not self.states and self.suffices(held + tokens):
            return tokens
        good = np.ones(held + tokens + 1, bool)
        if self.states:
            good[:] = False
            good[[stop for stop in self.stops if stop < len(good)]] = True
        for group in self.groups:
            if group.presence is not None:
                good &= group.presence.sufficient(held + tokens)
        ends = np.flatnonzero(good[held + 1 :])
        return int(ends[-1]) + 1 if len(ends) else 0

    def stops_before(self, end: int) -> list[int]:
        """Where the next passes are to end, for the states there to be kept: up to ``end`` tokens, ascending."""
        held, block = self.get_seq_length(), self._layout.block_tokens
        if not self.states:
            return []
        wanted = {*range(self.stop_every, end + 1, self.stop_every), end // block * block}
        return sorted(stop for stop in wanted if stop > held)

    def stop(self, decoding: bool = False) -> None:
        """Keep the states as they are now, if this is where a block ends. Of those met in decoding between two that
        are kept anyway only the latest is.
        """
        if not self.states or self._closed:
            return
        held = int(self.get_seq_length())
        if not held or held % self._layout.block_tokens:
            return
        self.stops[held] = self.states.take(self.layers)
        if decoding and held % self.stop_every:
            self.stops.pop(self._latest_stop, None)
            self._latest_stop = held

    def advance(self, tokens: int) -> None:
        """Make the next ``tokens`` of what is loaded contents: they are what the model is given next."""
        self.fill(self.loaded[: self.get_seq_length() + tokens])

    @property
    def _is_user_defined(self) -> bool:
        """Set by ``generate``, at its beginning: it passes its whole prompt, so that a cache which has served before
        can be compared with it from the first token on.
        """
        return self._handed_to_generate

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        self._handed_to_generate = value
        self.used_before = self.get_seq_length() > 0
        self.rewind()

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Meanwhile nothing that it holds is written over, whatever another thread generates with it."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1

    @property
    def torn(self) -> bool:
        """Whether a pass that failed has left some layers further than others: states do not say how far they are."""
        return self._in_a_pass and (bool(self.states) or len({layer.get_seq_length() for layer in self._attention}) > 1)

    def passed(self) -> None:
        """The pass whose tokens were noted has ended."""
        self._in_a_pass = False

    @property
    def plain(self) -> bool:
        """Whether all that it holds are tokens that are known, at consecutive positions."""
        return not self._closed

    def note(self, input_ids: torch.Tensor | None, plain: bool) -> None:
        """The model is about to append ``input_ids`` (rows, n), all rows the same; unless ``plain`` is False."""
        held = self.get_seq_length()
        self._in_a_pass = True
        if self._seen_tokens > held:  # a pass that failed
            self._seen_tokens, self._seen = held, [_joined(self._seen)[:held]]
        if not plain or input_ids is None or self._seen_tokens < held:  # by a pass that the guard did not see
            self._closed = True
        elif not self._closed:
            self._seen.append(input_ids[0].detach().clone())
            self._seen_tokens += input_ids.shape[1]

    def saw(self, held: int) -> bool:
        """Whether each pass that has put in some of its ``held`` tokens was noted."""
        return self._seen_tokens >= held

    def tokens(self) -> Tokens:
        """The token ids whose keys and values come first in all sequences held here, as far as they are known."""
        seen = _joined(self._seen)
        lengths = {layer.get_seq_length() for layer in self._attention}
        known = len(lengths) == 1 and (len(seen) in lengths or (self._closed and len(seen) < min(lengths)))
        return seen if known else _NO_TOKENS

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx >= len(self.layers):
            raise CacheMisuse(
                f"a model of more than {layer_idx} layers is given the cache of one with {len(self.layers)}: get one "
                "from a KVCManager of that model"
            )
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        self._account()
        super().crop(tokens_to_remove)
        self._accounted = self.held
        self.loaded, self.stops = _NO_TOKENS, {}
        seen = _joined(self._seen)
        self._closed = self._closed and len(seen) < self.get_seq_length()
        self._seen = [seen[: self.get_seq_length()]]
        self._seen_tokens = len(self._seen[0])

    def reset(self) -> None:
        self.begun += 1
        self._account()
        super().reset()
        if self._readers:  # asked when it is empty, as they look at what it holds when they have begun
            for layer in self._attention:
                layer.leave_room()
        self._accounted = 0
        self._seen, self._seen_tokens, self._closed, self.loaded, self.padding = [], 0, False, _NO_TOKENS, 0
        self.stops, self._latest_stop, self._in_a_pass = {}, 0, False
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

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self.loaded = _NO_TOKENS


class CacheSource:
    """Blocks out of any transformers cache of one sequence: the source of ``BlockCache.save``."""

    def __init__(self, cache: Cache, layout: KVLayout, layers: Sequence[int] = ()) -> None:
        """``layers``: those that a block of ``layout`` has, counted among the ones with attention; empty: all."""
        there = _of_tokens(cache)
        self._layers = [
            (keys[0].detach(), values[0].detach()) for keys, values in ([there[at] for at in layers] or there)
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
    """Keys and values of the layers that have some."""
    pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    return [(keys, values) for keys, values in pairs if keys is not None and values is not None]


def _rooms(room: torch.Tensor, layout: KVLayout, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all layers in ``room``, each (layers, kv_heads, tokens, width)."""
    of_keys, of_values = layout.widths
    if of_keys == of_values:  # as a block has them
        both = room.view(layout.layers, 2, layout.kv_heads, tokens, of_keys)
        return both[:, 0], both[:, 1]
    keys = layout.layers * layout.kv_heads * tokens * of_keys
    shape = (layout.layers, layout.kv_heads, tokens)
    return room[:keys].view(*shape, of_keys), room[keys:].view(*shape, of_values)


def _parts(block: npt.NDArray[np.uint8], layout: KVLayout) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Keys and values of a block, each (layers, kv_heads, tokens, bytes of a head).

    Blocks are copied as bytes by numpy: 20 GB/s on one thread. torch's copy shares the work among threads, and waits
    15 ms for one that another program keeps from running.
    """
    layers = block.reshape(layout.layers, -1)
    shape = (layout.layers, layout.kv_heads, layout.block_tokens)
    of_keys, of_values = (width * layout.item_bytes for width in layout.widths)
    keys = layout.kv_heads * layout.block_tokens * of_keys
    return layers[:, :keys].reshape(*shape, of_keys), layers[:, keys:].reshape(*shape, of_values)


def _joined(parts: list[npt.NDArray[np.integer[Any]] | torch.Tensor]) -> Tokens:
    """Those that are on a device are behind all others, and come from there at once."""
    arrays = [part for part in parts if not isinstance(part, torch.Tensor)]
    if tensors := [part for part in parts if isinstance(part, torch.Tensor)]:
        arrays.append(torch.cat(tensors).cpu().numpy())
    return np.concatenate([np.zeros(0, np.int64), *arrays]).astype(np.int64)


def foreign_length(cache: Cache, layout: KVLayout) -> int:
    """Tokens held by a cache that is not ours; InvalidInput if it cannot be one of this model and a single sequence."""
    lengths = set()
    if any(getattr(layer, "number_of_states", 0) for layer in cache.layers):
        raise InvalidInput("a cache with recurrent states can be stored from the one that get_cache gave only")
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
                    "sliding windows do: pass the one that get_cache gave"
                )
            lengths.add(shape[2])
    if len(cache.layers) != layout.layers or len(lengths) != 1:
        raise InvalidInput(
            f"a cache of {len(cache.layers)} layers with {sorted(lengths)} tokens, expected {layout.layers}"
        )
    return int(lengths.pop())
