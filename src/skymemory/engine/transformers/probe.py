"""Probes that refuse models whose output a cache would change, or for which it would save nothing."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Sequence

import torch
import transformers
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from skymemory.engine.transformers.computed_tokens import ComputedTokens
from skymemory.engine.transformers.forward import at_positions, cache_option, forward_options
from skymemory.engine.transformers.kv_cache import (
    LAYERS,
    CacheSource,
    Guarding,
    LayerKind,
    RoomPool,
    SkyCache,
    groups_of,
)
from skymemory.engine.transformers.prompts import media_tokens
from skymemory.engine.transformers.releases import TRIED_TRANSFORMERS
from skymemory.engine.transformers.states import States
from skymemory.errors import InvalidInput, UnsupportedModel
from skymemory.kv.block import ITEM_BYTES, KVLayout
from skymemory.kv.context import CacheContext

_SERVED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_supported(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel unless block i of the cache depends on tokens 0..i only and is kept completely."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config") or not hasattr(model, "can_generate"):
        raise InvalidInput(
            f"expected a loaded transformers model, got {type(model).__name__}"
            + (f": AutoModelForCausalLM.from_pretrained({model!r}) loads one" if isinstance(model, str) else "")
        )
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or not model.can_generate():
        raise UnsupportedModel(f"{name} is not a decoder-only language model: its cache is not a token prefix")
    odd = sorted({type(layer).__name__ for layer in DynamicCache(config=config).layers if type(layer) not in LAYERS})
    if odd or not model._supports_default_dynamic_cache():
        raise UnsupportedModel(
            f"{name} caches something other than tokens' keys and values, or recurrent states "
            f"({', '.join(odd) or 'no standard cache'})"
        )
    implementation = getattr(model.generation_config, "cache_implementation", None)
    if implementation not in (None, "dynamic"):
        raise UnsupportedModel(
            f"{name} generates with cache_implementation={implementation!r}: set it to None, since a cache is passed in"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)  # before 5
    if rope_type := next((kind for kind in _rope_types(rope) if kind in _LENGTH_DEPENDENT_ROPE), ""):
        raise UnsupportedModel(
            f"{name} scales its positions with the length of the text (rope type {rope_type!r}): a block then has no "
            "single value that could be cached"
        )
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        raise UnsupportedModel(f"{name} looks ahead: a block then depends on the tokens behind it")
    if len(set(map(str, (getattr(model, "hf_device_map", None) or {"": model.device}).values()))) > 1:
        raise UnsupportedModel(f"{name} is spread over several devices: only one is supported")
    if any(_drops_out(part) for part in model.modules()):
        raise InvalidInput(f"{name} is in training mode and drops out at random: call model.eval() first")
    if any(weights.is_meta for weights in model.parameters()):
        raise UnsupportedModel(f"{name} has weights that are not in memory (offloaded): they cannot be hashed")


def _rope_types(parameters: object) -> list[str]:
    if not isinstance(parameters, dict):
        return []
    own = str(parameters.get("rope_type", parameters.get("type", "default")))
    return [own, *(kind for part in parameters.values() for kind in _rope_types(part))]


def _drops_out(module: torch.nn.Module) -> bool:
    # Such layers make the results random.
    if not module.training:
        return False
    if isinstance(module, _DropoutNd):
        return bool(module.p > 0)
    return any(
        isinstance(value, float) and value > 0 and ("drop" in name or "jitter" in name)
        for name, value in vars(module).items()
    )


def probe_layout(model: PreTrainedModel, block_tokens: int) -> tuple[KVLayout, States]:
    """Run the model over two tokens; return the layout of its blocks and its recurrent states."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            model(input_ids=ids, use_cache=True, **cache_option(model, cache))
    except FAILURES as error:
        raise UnsupportedModel(f"{type(model).__name__} cannot be run over two tokens and a cache: {error}") from error
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    shapes = {
        (tuple(layer.keys.shape), tuple(layer.values.shape), str(layer.keys.dtype).removeprefix("torch."))
        for layer in layers
        if layer.keys is not None
    }
    if len(shapes) != 1 or any(layer.keys is None for layer in layers):
        raise UnsupportedModel(
            f"{type(model).__name__} writes tensors of several shapes {sorted(shapes)}: all layers with attention must "
            "be alike, and there must be one"
        )
    (keys, values, dtype) = shapes.pop()
    if len(keys) != 4 or keys[:3] != (1, keys[1], 2) or keys[:3] != values[:3] or dtype not in ITEM_BYTES:
        raise UnsupportedModel(
            f"{type(model).__name__} writes {dtype} tensors of shapes {keys} and {values} for two tokens: expected "
            f"(1, kv_heads, 2, width) in {', '.join(ITEM_BYTES)}"
        )
    return KVLayout(len(layers), keys[1], keys[3], block_tokens, dtype, values[3]), States(cache.layers)


def kinds_of(model: PreTrainedModel) -> tuple[LayerKind, ...]:
    return tuple(
        LayerKind(
            isinstance(layer, DynamicLayer),
            layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None,
            getattr(layer, "number_of_states", 0),
        )
        for layer in DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    )


# --- probe: does the model continue from a cache as if it had computed it? ---

_BLOCK_TOKENS = 4
_FRONT_BLOCKS, _TOKENS = 4, 24
# Share of the logits' spread, of the order of 16-bit rounding; a wrong position differs far more.
_TOLERANCE = {"float32": 0.02}
_TOLERANCE_16_BIT = 0.5
_OTHER = 100.0
FAILURES = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""Exceptions that models raise for unsupported inputs."""


def check_goes_on(model: PreTrainedModel, layout: KVLayout, kinds: Sequence[LayerKind], states: States) -> None:
    """Raise UnsupportedModel if the model gives other logits over tokens in two parts, with a SkyCache between, than at
    once.

    Also if they do not depend on the recurrent states, or depend on tokens outside a window.
    """
    name = type(model).__name__
    probe = _Probe(model, dataclasses.replace(layout, block_tokens=_BLOCK_TOKENS), kinds, states)
    tolerance = _TOLERANCE.get(layout.dtype, _TOLERANCE_16_BIT)
    try:
        at_once, unplaced, (parts, *with_changed_states) = (
            probe.run_whole(),
            probe.without_positions(),
            probe.in_two_parts(),
        )
        hidden = probe.behind_windows()
    except FAILURES as error:
        raise UnsupportedModel(f"{name} cannot continue from a cache: {error}") from error
    spread, differs = float(at_once.std()), float((at_once - parts).abs().max())
    if not differs <= tolerance * spread:
        raise UnsupportedModel(
            f"{name} gives other results with a cache than without (its logits differ by {differs:.2g}, their spread "
            f"is {spread:.2g}): it cannot be served from a cache"
        )
    if not float((at_once - unplaced).abs().max()) <= tolerance * spread:
        raise UnsupportedModel(
            f"{name} counts positions differently without position_ids than generate does: its keys and values depend "
            "on the caller"
        )
    if hidden and float((hidden[0] - hidden[2]).abs().max()) > 2 * float((hidden[0] - hidden[1]).abs().max()):
        raise UnsupportedModel(
            f"{name} attends beyond the windows of its configuration: what it computes at once is not what it computes "
            "behind a cache"
        )
    for kind, other in zip(probe.kinds_of_states, with_changed_states, strict=True):
        if torch.equal(parts, other):
            raise UnsupportedModel(
                f"{name} ignores its {kind} states when it continues with several tokens: it cannot be served from a "
                "cache"
            )


def check_hits(
    model: PreTrainedModel,
    layout: KVLayout,
    kinds: Sequence[LayerKind],
    states: States | None,
    guard: Guarding,
    context: CacheContext,
) -> None:
    """Raise UnsupportedModel unless a forward pass and ``generate`` skip the loaded tokens; tried once per model."""
    if model in _SERVED:
        return
    probe = _Probe(model, dataclasses.replace(layout, block_tokens=_BLOCK_TOKENS), kinds, states)
    for what, call in (("a forward pass", probe.pass_whole), ("generate", probe.generate_one)):
        try:
            cache = probe.loaded(guard, context)
            with ComputedTokens(model) as computed:
                call(cache)
        except FAILURES as error:
            raise UnsupportedModel(f"{type(model).__name__} fails in {what} with a cache: {error}") from error
        loaded = _FRONT_BLOCKS * _BLOCK_TOKENS
        if computed.tokens > _TOKENS - loaded:
            raise UnsupportedModel(
                f"a hit would save nothing: in {what} {type(model).__name__} computed {computed.tokens} of {_TOKENS} "
                f"tokens, though {loaded} were loaded; expected {_TOKENS - loaded}. transformers "
                f"{transformers.__version__} is installed, and {TRIED_TRANSFORMERS} was tried: install such a release; "
                "if this is one, its model code hands the cache over in a way that is not known here"
            )
    _SERVED.add(model)


class _Probe:
    """Runs over the same tokens; each returns the logits after the front, (tokens, vocabulary)."""

    def __init__(
        self, model: PreTrainedModel, layout: KVLayout, kinds: Sequence[LayerKind], states: States | None
    ) -> None:
        self._model, self._layout, self._kinds, self._states = model, layout, kinds, states
        media = set(media_tokens(model))
        vocabulary = min(512, model.config.get_text_config(decoder=True).vocab_size)
        words = [token for token in range(vocabulary) if token not in media]
        drawn = torch.randint(0, len(words), (1, _TOKENS), generator=torch.Generator().manual_seed(1))
        self._ids = torch.tensor(words)[drawn].to(model.device)
        self._front = _FRONT_BLOCKS * _BLOCK_TOKENS
        self.kinds_of_states = states.kinds if states is not None else []

    def run_whole(self) -> torch.Tensor:
        return self._at_once(at_positions(self._model, 0, _TOKENS))

    def without_positions(self) -> torch.Tensor:
        return self._at_once({})

    def _at_once(self, options: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            return self._model(input_ids=self._ids, use_cache=True, **options).logits[0, self._front :].float()

    def in_two_parts(self) -> list[torch.Tensor]:
        with torch.inference_mode():
            first = self._cache()
            positions = at_positions(self._model, 0, self._front)
            self._pass(self._ids[:, : self._front], first, **positions)
            first.stop()
            return [self._second_part(first, kind) for kind in ("", *self.kinds_of_states)]

    def _second_part(self, first: SkyCache, changed: str) -> torch.Tensor:
        # Return logits of the second part after a cache loaded with ``first``'s blocks; ``changed``: a kind of states
        # to spoil.
        second = self._cache()
        for group, room in zip(groups_of(self._kinds), second.groups, strict=True):
            block = bytearray(group.layout(self._layout).block_bytes)
            source = CacheSource(first, group.layout(self._layout), group.layers)
            for index in range(_FRONT_BLOCKS):
                source.read(index, memoryview(block))
                room.place(index, memoryview(block))
        second.stops = first.stops
        second.fill(self._ids[0, : self._front].cpu().numpy())
        for state in self._states.of(second.layers, changed) if self._states is not None else ():
            state.add_(_OTHER)
        remaining = self._ids[:, self._front :]
        positions = at_positions(self._model, self._front, remaining.shape[1])
        return self._pass(remaining, second, **positions)

    def behind_windows(self) -> list[torch.Tensor]:
        """Return logits after a window of made-up tokens: twice, for rounding, and with another first token, which must
        not matter.
        """
        config = self._model.config.get_text_config(decoder=True)
        width = max((kind.window or 0 for kind in self._kinds), default=0)
        if not width or width + 2 > (getattr(config, "max_position_embeddings", None) or width + 2):
            return []
        return [self._behind_pretended(width, first) for first in (0.0, 0.0, 10.0)]

    def _behind_pretended(self, width: int, first: float) -> torch.Tensor:
        # The logits of two tokens after ``width`` made-up tokens, the first of them changed by ``first``.
        layout, cache = self._layout, DynamicCache(config=self._model.config.get_text_config(decoder=True))
        for index, kind in enumerate(self._kinds):
            if kind.attention and not kind.states:
                cache.layers[index] = _PretendedLayer(layout, width, first if kind.window else 0.0, self._model.device)
        with torch.inference_mode():
            options = at_positions(self._model, width, 2)
            ids = self._ids[:, :2]
            return self._pass(ids, cache, **options)

    def loaded(self, guard: Guarding, context: CacheContext) -> SkyCache:
        """Return a cache as ``get_cache`` would: with the front's tokens loaded."""
        cache, front = self._cache(), self._ids[:, : self._front]
        cache.record_input(front, is_plain=True)
        with torch.inference_mode():
            self._pass(front, cache, **at_positions(self._model, 0, self._front))
        cache.on_pass_end()
        cache.stop()
        cache.rewind()
        cache.guard, cache.context, cache.prompt = guard, context, self._ids[0].cpu().numpy()
        return cache

    def pass_whole(self, cache: SkyCache) -> None:
        options = {**forward_options(self._model), **at_positions(self._model, 0, _TOKENS)}
        with torch.inference_mode():
            self._model(input_ids=self._ids, use_cache=True, **cache_option(self._model, cache), **options)

    def generate_one(self, cache: SkyCache) -> None:
        greedy = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self._model.generate(
                self._ids,
                attention_mask=torch.ones_like(self._ids),
                past_key_values=cache,
                max_new_tokens=1,
                pad_token_id=0,
                **greedy,
            )

    def _pass(self, ids: torch.Tensor, cache: DynamicCache, **options: torch.Tensor) -> torch.Tensor:
        out = self._model(input_ids=ids, use_cache=True, **cache_option(self._model, cache), **options)
        logits: torch.Tensor = out.logits[0].float()
        return logits

    def _cache(self) -> SkyCache:
        device, pool = self._model.device, RoomPool(keep=1)
        cache = SkyCache(self._layout, _TOKENS, device, pool, self._kinds, self._states)
        cache.stop_every = self._front
        return cache


class _PretendedLayer(DynamicLayer):  # type: ignore[misc]
    """Layer of ``width`` made-up tokens, equal except the first."""

    def __init__(self, layout: KVLayout, width: int, first: float, device: torch.device) -> None:
        super().__init__()
        shape, dtype = (1, layout.kv_heads, 1, max(layout.widths)), getattr(torch, layout.dtype)
        usual = torch.full(shape, 0.1, dtype=dtype, device=device)
        keys, values = layout.widths
        self._first = (usual + first)[..., :keys], (usual + first)[..., :values]
        tokens = usual.expand(-1, -1, width, -1)
        self.keys, self.values = tokens[..., :keys], tokens[..., :values]
        self.dtype, self.device, self.is_initialized = dtype, device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = zip(self._first, (self.keys, self.values), (key_states, value_states), strict=True)
        keys, values = (torch.cat([first, made_up[:, :, 1:], new], dim=2) for first, made_up, new in pairs)
        return keys, values
