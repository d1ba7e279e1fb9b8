"""Whether a model goes on from a cache as if it had computed it: tried, before anybody relies on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from skymemory.engine.kv_cache import CacheSource, LayerKind, RoomPool, SkyCache, groups_of
from skymemory.engine.passes import at_positions
from skymemory.engine.prompts import media_tokens
from skymemory.engine.states import States
from skymemory.errors import UnsupportedModel
from skymemory.kv.layout import KVLayout

_BLOCK_TOKENS = 4
_FRONT_BLOCKS, _TOKENS = 4, 24
_TOLERANCE = {"float32": 0.02}
"""Of the spread of the logits; in 16 bits rounding is of that order, and a wrong position far beyond it."""
_TOLERANCE_16_BIT = 0.5
_OTHER = 100.0
"""Added to a state: seen in what comes behind, however little of it is, where the state is looked at at all."""


FAILURES = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""What models raise of inputs that they are not made for."""


def check_goes_on(model: PreTrainedModel, layout: KVLayout, kinds: Sequence[LayerKind], states: States) -> None:
    """Run over a few tokens at once, and over the same in two parts with our cache between them.

    Raises UnsupportedModel where the words behind differ by more than rounding, the second part cannot be run, or does
    not depend on the states before it: their part is often smaller than rounding in 16 bits, and grows in decoding.
    And where what a window hides makes a difference all the same.
    """
    name = type(model).__name__
    probe = _Probe(model, dataclasses.replace(layout, block_tokens=_BLOCK_TOKENS), kinds, states)
    tolerance = _TOLERANCE.get(layout.dtype, _TOLERANCE_16_BIT)
    try:
        whole, unplaced, (parts, *others) = probe.whole(), probe.without_positions(), probe.in_two_parts()
        hidden = probe.behind_windows()
    except FAILURES as error:
        raise UnsupportedModel(f"{name} cannot go on from a cache of ours: {error}") from error
    spread, differs = float(whole.std()), float((whole - parts).abs().max())
    if not differs <= tolerance * spread:
        raise UnsupportedModel(
            f"{name} goes on from a cache with other results than it has at once (its next words' logits differ by "
            f"{differs:.2g}, their spread is {spread:.2g}): it cannot be served from one"
        )
    if not float((whole - unplaced).abs().max()) <= tolerance * spread:
        raise UnsupportedModel(
            f"{name} counts positions otherwise where they are not given than generate gives them: its keys and values "
            "depend on who asks"
        )
    if hidden and float((hidden[0] - hidden[2]).abs().max()) > 2 * float((hidden[0] - hidden[1]).abs().max()):
        raise UnsupportedModel(
            f"{name} has windows by its configuration, and looks beyond them: what it computes at once is not what it "
            "computes behind a cache"
        )
    for kind, other in zip(probe.kinds_of_states, others, strict=True):
        if torch.equal(parts, other):
            raise UnsupportedModel(
                f"{name} does not look at its {kind} states where it goes on with several tokens: it cannot be served "
                "from a cache"
            )


class _Probe:
    """The ways over a few tokens; each gives the logits of those behind the front, (tokens, words)."""

    def __init__(self, model: PreTrainedModel, layout: KVLayout, kinds: Sequence[LayerKind], states: States) -> None:
        self._model, self._layout, self._kinds, self._states = model, layout, kinds, states
        media = set(media_tokens(model))
        vocabulary = min(512, model.config.get_text_config(decoder=True).vocab_size)
        words = [one for one in range(vocabulary) if one not in media]
        drawn = torch.randint(0, len(words), (1, _TOKENS), generator=torch.Generator().manual_seed(1))
        self._ids = torch.tensor(words)[drawn].to(model.device)
        self._front = _FRONT_BLOCKS * _BLOCK_TOKENS
        self.kinds_of_states = states.kinds

    def whole(self) -> torch.Tensor:
        """As ``generate`` asks for it."""
        return self._at_once(at_positions(self._model, 0, _TOKENS))

    def without_positions(self) -> torch.Tensor:
        """As a loop of one's own may ask for it."""
        return self._at_once({})

    def _at_once(self, options: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            return self._model(input_ids=self._ids, use_cache=True, **options).logits[0, self._front :].float()

    def in_two_parts(self) -> list[torch.Tensor]:
        """As it is, and with other states of each kind before the second part."""
        with torch.inference_mode():
            first = self._cache()
            positions = at_positions(self._model, 0, self._front)
            self._model(input_ids=self._ids[:, : self._front], past_key_values=first, use_cache=True, **positions)
            first.stop()
            return [self._second_part(first, kind) for kind in ("", *self.kinds_of_states)]

    def _second_part(self, first: SkyCache, changed: str) -> torch.Tensor:
        second = self._cache()
        for group, room in zip(groups_of(self._kinds), second.groups, strict=True):
            block = bytearray(group.layout(self._layout).block_bytes)
            source = CacheSource(first, group.layout(self._layout), group.layers)
            for index in range(_FRONT_BLOCKS):
                source.read(index, memoryview(block))
                room.place(index, memoryview(block))
        second.stops = first.stops
        second.fill(self._ids[0, : self._front].cpu().numpy())
        for state in self._states.of(second.layers, changed):
            state.add_(_OTHER)
        rest = self._ids[:, self._front :]
        positions = at_positions(self._model, self._front, rest.shape[1])
        return self._model(input_ids=rest, past_key_values=second, use_cache=True, **positions).logits[0].float()

    def behind_windows(self) -> list[torch.Tensor]:
        """Of two tokens behind as many pretended ones as the widest window has: twice, for what devices err by, and
        with another token first, which layers with a window may not look at. Nothing where no prompt is longer.
        """
        config = self._model.config.get_text_config(decoder=True)
        width = max((kind.window or 0 for kind in self._kinds), default=0)
        if not width or width + 2 > (getattr(config, "max_position_embeddings", None) or width + 2):
            return []
        return [self._behind_pretended(width, first) for first in (0.0, 0.0, 10.0)]

    def _behind_pretended(self, width: int, first: float) -> torch.Tensor:
        layout, cache = self._layout, DynamicCache(config=self._model.config.get_text_config(decoder=True))
        for index, kind in enumerate(self._kinds):
            if kind.attention and not kind.states:
                cache.layers[index] = _PretendedLayer(layout, width, first if kind.window else 0.0, self._model.device)
        with torch.inference_mode():
            options = at_positions(self._model, width, 2)
            ids = self._ids[:, :2]
            return self._model(input_ids=ids, past_key_values=cache, use_cache=True, **options).logits[0].float()

    def _cache(self) -> SkyCache:
        pool = RoomPool(keep=1)
        return SkyCache(self._layout, _TOKENS, self._model.device, pool, self._kinds, self._states, self._front)


class _PretendedLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of ``width`` made-up tokens, equal but for the first; what is appended is not kept."""

    def __init__(self, layout: KVLayout, width: int, first: float, device: torch.device) -> None:
        super().__init__()
        shape, dtype = (1, layout.kv_heads, 1, max(layout.widths)), getattr(torch, layout.dtype)
        usual = torch.full(shape, 0.1, dtype=dtype, device=device)
        keys, values = layout.widths
        self._first = (usual + first)[..., :keys], (usual + first)[..., :values]
        held = usual.expand(-1, -1, width, -1)
        self.keys, self.values = held[..., :keys], held[..., :values]
        self.dtype, self.device, self.is_initialized = dtype, device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What it holds and what comes, which it does not keep."""
        pairs = zip(self._first, (self.keys, self.values), (key_states, value_states), strict=True)
        keys, values = (torch.cat([first, held[:, :, 1:], new], dim=2) for first, held, new in pairs)
        return keys, values
