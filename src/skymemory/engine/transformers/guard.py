"""Hooks on a user's model: the guard, which checks every call with a SkyCache, and the clock that times passes.

A call (``Guard.__call__``): find the cache, check that the model is unchanged, make the common prefix of input and
loaded tokens contents, cut it from the input, and record the tokens that the model appends. Skipped tokens count as
used (``on_pass_end``), the others as unused, by reason (``settle``).
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from skymemory.cache.patience import ComputeRate
from skymemory.engine.transformers.forward import (
    at_positions,
    cache_argument,
    cache_option,
    find_cache,
    forward_options,
)
from skymemory.engine.transformers.identity import Care
from skymemory.engine.transformers.kv_cache import SkyCache, Tokens
from skymemory.engine.transformers.releases import TRIED_TRANSFORMERS
from skymemory.errors import CacheMisuse
from skymemory.kv.context import CacheContext
from skymemory.metrics import Counters

_log = logging.getLogger(__name__)

_ALONG_THE_PROMPT = ("input_ids", "position_ids", "cache_position")
# Arguments that request an output for each token.
_ALL_ALONG = ("labels", "output_hidden_states", "output_attentions", "output_router_logits")
# Arguments with a type per token; in most models zeros have no effect.
_TYPES = ("token_type_ids", "mm_token_type_ids")

UNSEEN = "a forward pass that the guard did not see"
DROPPED = "the cache was dropped before use"
BEYOND = "the input ended before them"
_OTHER_TOKENS = "other tokens than it was made for"
_ADVICE = {
    _OTHER_TOKENS: "get one for the prompt that is passed, past_key_values=kvc.get_cache(prompt)",
    "more asked for than its last logits": "pass logits_to_keep=1, and request hidden states or a loss without a cache",
    "padding and no positions": "pass position_ids, as generate does",
}
_WAYS = "what is served, and what is computed whole, is in the table 'Ways to generate' of the guide"


class Guard:
    """Guard of ``model``: checks every call with one of its caches.

    A used cache, or another prompt's, costs computing only; no block is stored under a wrong hash.
    """

    def __init__(
        self, model: PreTrainedModel, counters: Counters, same: Callable[[CacheContext | None, Care], bool]
    ) -> None:
        self._model = model
        self._parameters = list(inspect.signature(model.forward).parameters)
        self._argument = cache_argument(model)
        self._last_logits = forward_options(model)
        self._counters = counters
        self._same = same
        self._ignored_types = {name for name in _TYPES if name in self._parameters and _zeros_are_ignored(model, name)}
        self._keeps_positions = any("rope_deltas" in vars(part) for part in model.modules())
        for hook in (
            model.register_forward_pre_hook(GuardHook(self), with_kwargs=True),
            model.register_forward_hook(GuardHook(self), with_kwargs=True),
        ):
            weakref.finalize(self, hook.remove).atexit = False

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # Find the cache, check that the model is unchanged, make the common prefix of input and loaded tokens contents,
        # cut it from the input, and record the tokens that the model appends.
        passed_cache = find_cache(args, kwargs)
        if passed_cache is None or module is not self._model:
            return None
        if passed_cache.guard is not self:
            self._check_model(passed_cache)
            return None
        cache: SkyCache = passed_cache
        arguments = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        if arguments.get(self._argument) is not cache:  # under the name of another release
            arguments = {name: value for name, value in arguments.items() if value is not cache}
            arguments[self._argument] = cache
        cache.result.usage.is_in_use = True
        unused = arguments.get("use_cache") is False  # then every call has all tokens
        if unused and cache._is_user_defined:
            cache.rewind()  # generate passes the cache with each call all the same
        if cache.has_failed:
            _check_whole(cache)
        if cache.padding:
            arguments = _without_padding(arguments, cache.padding)
        start = cache.get_seq_length()
        if unused and not start and not cache._is_user_defined:
            return (), {**arguments, self._argument: None}
        ids = arguments.get("input_ids")
        step = start and isinstance(ids, torch.Tensor) and ids.shape[-1] == 1
        first = not start or start == cache.taken
        is_same = self.check_unchanged(cache, Care.USE if first else Care.STEP if step else Care.CALL)
        if cache.taken:
            if first and not is_same:
                raise CacheMisuse(
                    f"the model has changed since begin() made {start} loaded tokens contents, which are of the model "
                    "as it was: get another cache, kvc.get_cache(tokens), and pass the tokens behind its begin()"
                )
            _check_follows(cache, start, arguments)
            if first:
                _check_sees(start, arguments)
        cache.enter()
        try:
            return (), self._prepare(cache, start, arguments)
        except CacheMisuse:
            cache.on_pass_end()  # nothing was computed
            raise

    def _prepare(self, cache: SkyCache, start: int, arguments: dict[str, Any]) -> dict[str, Any]:
        # Return the arguments without the tokens that the cache supplies, and record the others.
        if start and not cache.suffices(start):
            self._compute_again(cache, start)
        if not cache.has_recorded(start):  # the loaded tokens do not continue contents from unseen passes
            cache.loaded = cache.loaded[:start]
        if len(cache.loaded) > start or (not start and (cache.states or cache.used_before)):
            arguments = self._advance(cache, start, arguments)
        elif start:
            _check_goes_on(start, arguments)
            cache.stop(decoding=True)
        ids, length = arguments.get("input_ids"), cache.get_seq_length()
        cache.record_input(ids, is_plain=self._is_plain(length, ids, arguments))
        if cache.has_known_tokens and ids is not None and arguments.get("position_ids") is None:
            arguments = {**arguments, **at_positions(self._model, length, ids.shape[1], ids.shape[0])}
        return arguments

    def _check_model(self, cache: SkyCache) -> None:
        other = cache.guard._model if isinstance(cache.guard, Guard) and cache.held_tokens else self._model
        if other not in self._model.modules() and self._model not in other.modules():
            raise CacheMisuse(
                f"a model is given a cache whose {cache.held_tokens} tokens are of another one: get one from a "
                "KVCManager of the model that you call"
            )

    def check_unchanged(self, cache: SkyCache, care: Care = Care.USE) -> bool:
        """Check that the model is unchanged; if not, drop the loaded tokens and store nothing."""
        if cache.context is not None and self._same(cache.context, care):
            return True
        if (more := len(cache.loaded) - cache.get_seq_length()) > 0:
            self._refuse(cache, "a model that has changed since", more, 0)
        cache.context = None
        return False

    def on_pass_end(self, cache: SkyCache, output: object = None) -> None:
        """End a pass: refuse gradients through loaded tokens, and count the tokens that it did not compute."""
        cache.on_pass_end()
        if cache.filled and torch.is_grad_enabled():
            _refuse_gradients(output, cache.filled)
        if cache.skipping is not None and cache.guard is self:
            (start, stop), cache.skipping = cache.skipping, None
            self._count("used_tokens_total", cache.result.usage.use(start, stop))

    def settle(self, cache: SkyCache) -> None:
        """Count as unused what no pass needed of a dropped cache."""
        usage = cache.result.usage
        self.settle_unseen(cache)
        reason = BEYOND if usage.is_in_use else DROPPED
        self._count("unused_tokens_total", usage.refuse(usage.first, usage.end, reason), reason)

    def settle_unseen(self, cache: SkyCache) -> None:
        """Count and warn if passes without the guard (``model.forward``) computed loaded tokens again."""
        usage = cache.result.usage
        if not cache.passed_unseen or cache.skipping is not None:
            return
        if new := usage.refuse(usage.first, usage.end, UNSEEN):
            self._count("unused_tokens_total", new, UNSEEN)
            self._warn(
                cache,
                f"{new} tokens were loaded for nothing: {type(self._model).__name__} computed them again, in {UNSEEN}. "
                "Call the model itself, model(…), not model.forward(…) or a part of it. If you did: transformers "
                f"{transformers.__version__} hands its cache over in a way that is not known here; tried are "
                f"{TRIED_TRANSFORMERS}. `skymemory doctor --model DIR` shows whether a hit is served",
            )

    def _count(self, name: str, tokens: int, reason: str = "") -> None:
        if tokens:
            self._counters.add(name, tokens, reason)

    def _warn(self, cache: SkyCache, words: str) -> None:
        level = logging.DEBUG if cache.result.usage.has_warned else logging.WARNING
        cache.result.usage.has_warned = True
        _log.log(level, "%s", words)

    def __deepcopy__(self, memo: object) -> Guard:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def _advance(self, cache: SkyCache, start: int, arguments: dict[str, Any]) -> dict[str, Any]:
        # Make the loaded tokens that the input begins with contents of the cache; return the arguments of the others.
        loaded = cache.loaded[start:]
        if not start:
            _check_begins(cache, arguments)
        call = self._read(start, arguments)
        if not isinstance(call, str) and call.shifts and not cache.can_shift:
            call = "rows of different lengths"
        usable, why = 0, ""
        if isinstance(call, str):
            why = call
            if cache.used_before and not start and self._keeps_positions:
                raise CacheMisuse(
                    f"a cache that has served another call is used with {why}, whose positions were counted as behind "
                    "that call: get one for each call: past_key_values=kvc.get_cache(prompt)"
                )
        else:
            same = call.shared(loaded)
            usable = cache.usable(max(0, min(same, call.tokens - call.kept)))
            if same < min(len(loaded), call.tokens):
                why = _OTHER_TOKENS
        if why and start:
            cache.loaded = cache.loaded[: start + usable]  # the prompt ended before the loaded tokens, or was cut
        elif why:
            self._refuse(cache, why, len(loaded), usable)
        if isinstance(call, str):
            return arguments
        if usable:
            cache.advance(usable)
        if cache.states and not torch.is_grad_enabled():
            usable += self._compute_to_stops(cache, call, usable)
        if not usable:
            return arguments
        if call.rows > 1:
            cache.batch_repeat_interleave(call.rows)
        if call.shifts:
            cache.shift_rows(call.shifts)
        cache.padding = call.padding
        return _rest_of(arguments, call.padding + usable, call.padding)

    def _compute_to_stops(self, cache: SkyCache, call: _ForwardCall, advanced_tokens: int) -> int:
        """Run the model to the last position of kept states, where a pass must end; returns the tokens computed."""
        start = cache.get_seq_length() - advanced_tokens
        end = min(call.tokens - call.kept, call.same_in_all_rows())
        ids = call.ids[:1].to(self._model.device)
        cache.guard = None  # the guard must not check its own passes
        try:
            for stop in cache.stops_before(start + end):
                piece = ids[:, cache.get_seq_length() - start : stop - start]
                cache.record_input(piece, is_plain=True)
                options = {**self._last_logits, **at_positions(self._model, cache.held_tokens, piece.shape[1])}
                self._model(input_ids=piece, use_cache=True, **cache_option(self._model, cache), **options)
                cache.stop()
        finally:
            cache.guard = self
        computed: int = cache.held_tokens - start - advanced_tokens
        return computed

    def _compute_again(self, cache: SkyCache, start: int) -> None:
        # Compute all ``start`` tokens again after a crop to fewer than a sliding window needs.
        known, padding, rows = cache.tokens(), cache.padding, cache.rows
        if len(known) != start:
            raise CacheMisuse(
                f"a cache was cut to {start} tokens, some of which its windows did not hold, and what they were is not "
                "known: get one for the shorter prompt, past_key_values=kvc.get_cache(prompt)"
            )
        why = "a cut that its windows do not reach"
        self._count("unused_tokens_total", cache.result.usage.refuse(0, start, why), why)
        cache.reset()
        cache.filled = start
        ids = torch.from_numpy(known).to(self._model.device)[None]
        cache.guard = None  # the guard must not check its own pass
        try:
            cache.record_input(ids, is_plain=True)
            with torch.no_grad():
                options = {**self._last_logits, **at_positions(self._model, 0, start)}
                self._model(input_ids=ids, use_cache=True, **cache_option(self._model, cache), **options)
        finally:
            cache.guard = self
        if rows > 1:
            cache.batch_repeat_interleave(rows)
        cache.padding = padding

    def _refuse(self, cache: SkyCache, why: str, loaded: int, usable: int) -> None:
        # Count and drop the loaded tokens beyond ``usable``; warn of the reason ``why``.
        start = int(cache.get_seq_length())
        unused = cache.result.usage.refuse(start + usable, start + loaded, why)
        self._count("unused_tokens_total", unused, why)
        self._warn(
            cache,
            f"a cache was used with {why}: of its {loaded} loaded tokens {usable} are of use. "
            f"{_ADVICE.get(why, _WAYS)}",
        )
        cache.loaded = cache.loaded[: cache.get_seq_length() + usable]

    def _read(self, start: int, arguments: dict[str, Any]) -> _ForwardCall | str:
        """Return the input, if it is tokens at consecutive positions; else the reason why the cache cannot serve it."""
        ids = arguments.get("input_ids")
        if ids is None or ids.dim() != 2:
            return "embeddings instead of tokens"
        # A caller that does not request only the last logits wants all, if the model can return fewer.
        last_logits = arguments.get("logits_to_keep", 0 if "logits_to_keep" in self._parameters else 1)
        if (
            not isinstance(last_logits, int)
            or last_logits < 1
            or any(self._is_requested(name, arguments) for name in _ALL_ALONG)
        ):
            return "more asked for than its last logits"
        if other := next((name for name, value in arguments.items() if self._is_other_input(name, value)), ""):
            return f"other inputs ({other})"
        width, paddings, mask = int(ids.shape[1]), [0] * len(ids), arguments.get("attention_mask")
        if mask is not None:
            if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape != (len(ids), start + width):
                return "an attention mask of its own"
            left_paddings = (mask != 0).int().argmax(dim=1) if not start else torch.zeros_like(mask[:, 0])
            if not torch.equal(mask != 0, torch.arange(mask.shape[1], device=mask.device) >= left_paddings[:, None]):
                return "an attention mask of its own"
            paddings = left_paddings.tolist()
        positions = arguments.get("position_ids")
        if positions is None:
            if any(paddings):
                return "padding and no positions"
        elif positions.shape[-1] != width or not _count_on(positions, start, paddings):
            return "positions of its own"
        places = arguments.get("cache_position")
        if places is not None and not bool((places == torch.arange(start, start + width, device=places.device)).all()):
            return "positions of its own"
        padding = min(paddings)
        shifts = tuple(row_padding - padding for row_padding in paddings) if len(set(paddings)) > 1 else ()
        return _ForwardCall(ids[:, padding:], padding, last_logits, shifts)

    def _is_requested(self, name: str, arguments: dict[str, Any]) -> bool:
        value = arguments.get(name)
        return (getattr(self._model.config, name, None) if value is None else value) not in (None, False)

    def _is_plain(self, start: int, ids: torch.Tensor | None, options: dict[str, Any]) -> bool:
        # Return True if all rows are the same tokens at consecutive positions: only such contents are stored.
        if ids is None or options.get("inputs_embeds") is not None or ids.dim() != 2:
            return False
        rows, width = ids.shape
        if width == 1 and ids.device.type != "cpu":  # a decoding step: checking would stall the device, and the
            return bool(rows == 1)  # prefill was checked
        if any(self._is_other_input(name, value) for name, value in options.items()):
            return False
        if rows > 1 and not bool((ids == ids[:1]).all()):
            return False
        end = start + width
        mask, positions = options.get("attention_mask"), options.get("position_ids")
        if mask is not None and (
            not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[1] != end or not bool(mask.all())
        ):
            return False
        places = options.get("cache_position")
        return (places is None or _is_range(places, start, end)) and (
            positions is None or _is_range(positions, start, end)
        )

    def _is_other_input(self, name: str, value: object) -> bool:
        if name in _ALONG_THE_PROMPT or name == "attention_mask" or not _has_tensors(value):
            return False
        return not (name in self._ignored_types and isinstance(value, torch.Tensor) and not bool(value.any()))


class GuardHook:
    """Hook before and after the model's passes; a copy of the model gets one without guard."""

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = None if guard is None else weakref.ref(guard)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *output: object
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # torch calls it before a pass with (args, kwargs), and after it with the output, too.
        guard = self._guard() if self._guard is not None else None
        if kwargs is None:  # removed after this pass began: torch no longer passes kwargs
            return None
        if output:  # the pass has ended
            if (cache := find_cache(args, kwargs)) is not None:
                cache.on_pass_end() if guard is None else guard.on_pass_end(cache, output[0])
            return None
        return None if guard is None else guard(module, args, kwargs)

    def __reduce__(self) -> tuple[type[GuardHook], tuple[()]]:
        return GuardHook, ()


def _refuse_gradients(output: object, tokens: int) -> None:
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            output.register_hook(partial(_no_gradient, tokens))
    elif isinstance(output, Mapping | tuple | list):
        for part in output.values() if isinstance(output, Mapping) else output:
            _refuse_gradients(part, tokens)


def _no_gradient(tokens: int, gradient: torch.Tensor) -> None:
    raise CacheMisuse(
        f"no gradient reaches the {tokens} tokens that a cache supplied: train without a cache, past_key_values=None"
    )


@dataclass(frozen=True, slots=True)
class _ForwardCall:
    """Input of a forward pass that a cache can serve in part."""

    ids: torch.Tensor  # (rows, tokens), without the common padding
    padding: int
    kept: int  # number of last tokens to compute for their logits
    shifts: tuple[int, ...] = ()  # further left padding by row; empty if all are equally long

    @property
    def rows(self) -> int:
        return int(self.ids.shape[0])

    @property
    def tokens(self) -> int:
        return int(self.ids.shape[1])

    def same_in_all_rows(self) -> int:
        differing = (self.ids != self.ids[:1]).any(dim=0).nonzero()
        return int(differing[0]) if len(differing) else self.tokens

    def shared(self, loaded: Tokens) -> int:
        """Count the leading tokens at which all rows equal ``loaded``."""
        length = min(len(loaded), self.tokens)
        differ = self.ids[:, :length].cpu().numpy() != loaded[:length]
        for row, shift in enumerate(self.shifts):
            own = self.ids[row, shift:length].cpu().numpy()
            differ[row, :shift], differ[row, shift:length] = False, own != loaded[: len(own)]
        differing = np.flatnonzero(differ.any(axis=0))
        return int(differing[0]) if len(differing) else length


def _zeros_are_ignored(model: torch.nn.Module, name: str) -> bool:
    ids = torch.zeros((1, 2), dtype=torch.long, device=next(model.parameters()).device)
    with torch.inference_mode():
        without, zeros = (model(input_ids=ids, **more).logits for more in ({}, {name: torch.zeros_like(ids)}))
    return bool(torch.equal(without, zeros))


def _is_range(positions: torch.Tensor, start: int, end: int) -> bool:
    if positions.shape[-1] != end - start:
        return False
    if positions.numel() == 1:  # a decoding step waits for this
        return bool(positions.item() == start)
    return bool((positions == torch.arange(start, end, device=positions.device)).all())


def _count_on(positions: torch.Tensor, start: int, paddings: list[int]) -> bool:
    # Return True if positions count from ``start``, in each row less its left padding.
    places = torch.arange(start, start + positions.shape[-1], device=positions.device)
    left_paddings = torch.tensor(paddings, device=positions.device)[:, None]
    return not bool(((positions != places - left_paddings) & (places - start >= left_paddings)).any())


def _has_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, torch.Tensor) or (isinstance(value, list | tuple) and any(map(_has_tensors, value)))


def _rest_of(arguments: dict[str, Any], tokens: int, padding: int) -> dict[str, Any]:
    # Cut the first ``tokens`` tokens, which the cache supplies, from a call's arguments.
    remaining = dict(arguments)
    for name in (*_ALONG_THE_PROMPT, *_TYPES):
        if (value := remaining.get(name)) is not None:
            remaining[name] = value[..., tokens:]
    return _without_padding(remaining, padding)


def _without_padding(arguments: dict[str, Any], padding: int) -> dict[str, Any]:
    inputs = dict(arguments)
    if padding and (mask := inputs.get("attention_mask")) is not None:
        inputs["attention_mask"] = mask[:, padding:]
    if padding and (positions := inputs.get("cache_position")) is not None:
        inputs["cache_position"] = positions - padding
    return inputs


def _check_begins(cache: SkyCache, arguments: dict[str, Any]) -> None:
    # Raise CacheMisuse if a call has only the tokens after the loaded ones, without ``begin``.
    ids, mask, loaded = arguments.get("input_ids"), arguments.get("attention_mask"), len(cache.loaded)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not loaded:
        return
    remaining = cache.prompt[loaded:]
    mask_is_longer = isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] > ids.shape[1]
    if mask_is_longer or (
        ids.shape[1] == len(remaining)
        and not np.array_equal(remaining, cache.prompt[: len(remaining)])
        and bool((ids.cpu().numpy() == remaining).all())
    ):
        raise CacheMisuse(
            f"the model is given the {ids.shape[1]} tokens behind what was loaded, and the cache reports none yet: "
            "call cache.begin() and pass the tokens behind its result, or pass the whole prompt"
        )


def _check_whole(cache: SkyCache) -> None:
    """Empty a cache whose first pass failed. Raises CacheMisuse if it had contents."""
    if cache.pass_start:
        raise CacheMisuse(
            "a forward pass with this cache failed midway, and its contents are not what they were: get another one "
            "and pass all tokens, past_key_values=kvc.get_cache(tokens)"
        )
    cache.undo()


def _check_follows(cache: SkyCache, start: int, arguments: dict[str, Any]) -> None:
    # Raise CacheMisuse if the tokens after ``begin`` are not those of the cache's prompt.
    ids, prompt = arguments.get("input_ids"), cache.prompt[start:]
    if start < cache.taken or not len(prompt) or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return
    rows = ids[:, : len(prompt)].cpu().numpy()
    differing = (rows != prompt[: rows.shape[1]]).argmax(axis=1)
    at = int(differing[0])
    if rows.size and bool((rows != prompt[: rows.shape[1]]).any(axis=1).all()):
        raise CacheMisuse(
            f"token {start + at} is {rows[0, at]}, and {prompt[at]} in the prompt that this cache was got for: behind "
            f"the {cache.taken} tokens that begin() returned, pass the prompt's others, ids[:, cache.begin() :], or "
            "get a cache for the prompt that you pass, kvc.get_cache(ids)"
        )


def _check_sees(start: int, arguments: dict[str, Any]) -> None:
    # Raise CacheMisuse if the attention mask hides loaded tokens.
    mask = arguments.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() in (2, 4):
        loaded = mask[..., :start]
        if not bool((loaded if mask.dim() == 2 or mask.dtype == torch.bool else loaded == 0).all()):
            raise CacheMisuse(
                f"the attention mask hides some of the {start} tokens that begin() made contents: get a cache for the "
                "prompt and pass the whole prompt with its mask, past_key_values=kvc.get_cache(prompt)"
            )


def _check_goes_on(start: int, arguments: dict[str, Any]) -> None:
    # Raise CacheMisuse if the mask shows that the cache's contents are of another call.
    ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    if isinstance(ids, torch.Tensor) and isinstance(mask, torch.Tensor) and mask.dim() == 2:
        before = mask.shape[1] - ids.shape[1]
        if before != start:
            raise CacheMisuse(
                f"the model is given {ids.shape[1]} tokens behind {before}, and a cache of {start}: it has served "
                "another call. Get one for each call: past_key_values=kvc.get_cache(prompt)"
            )


# --- the compute clock: seconds that a prompt's tokens take, for the patience with stores ---

_ROWS = 64
_RUNS = 3


def estimated_token_s(model: torch.nn.Module) -> float | None:
    """Estimate the seconds per prompt token by the largest matrix, scaled by all matrices; None without any."""
    # A lower bound: without attention, overhead, the embedding (a lookup) and the head (for the last token only).
    excluded = {
        weight
        for module in (_part(model, "get_input_embeddings"), _part(model, "get_output_embeddings"))
        if (weight := getattr(module, "weight", None)) is not None
    }
    matrices = [
        parameter
        for parameter in model.parameters()
        if parameter.dim() == 2 and parameter.is_floating_point() and parameter not in excluded
    ]
    largest = max(matrices, key=torch.Tensor.numel, default=None)
    if largest is None or largest.is_meta:
        return None
    rows = torch.ones((_ROWS, largest.shape[1]), dtype=largest.dtype, device=largest.device)
    durations_s = []
    with torch.inference_mode():
        for _ in range(_RUNS):
            started_s = time.perf_counter()
            _ = torch.nn.functional.linear(rows, largest)[0, 0].item()  # .item() waits for the device
            durations_s.append(time.perf_counter() - started_s)
    times: float = sum(matrix.numel() for matrix in matrices) / largest.numel()
    return min(durations_s) / _ROWS * times


def _part(model: torch.nn.Module, name: str) -> object:
    get = getattr(model, name, None)
    return get() if callable(get) else None


class ComputeClock:
    """Hooks on ``model`` that report the duration of all its passes to ``rate``."""

    _model: weakref.ref[torch.nn.Module] | None = None

    def __init__(self, model: torch.nn.Module, rate: ComputeRate) -> None:
        self._rate = rate
        self._model = weakref.ref(model)
        if (token_s := estimated_token_s(model)) is not None:
            rate.assume(token_s)
        self._begun = threading.local()
        self._hooks = [
            model.register_forward_pre_hook(self._begins, with_kwargs=True),
            model.register_forward_hook(self._ends, with_kwargs=True),
        ]

    def remove(self) -> None:
        self._model = None  # a running pass still calls the hooks, without kwargs
        for hook in self._hooks:
            hook.remove()

    def __reduce__(self) -> tuple[object, tuple[type[ComputeClock]]]:
        return ComputeClock.__new__, (ComputeClock,)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begins(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: object = None) -> None:
        if self._model is not None and self._model() is module:
            self._begun.at_s = time.perf_counter()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _ends(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any, output: object = None) -> None:
        if self._model is None or self._model() is not module:
            return
        started_s: float | None = getattr(self._begun, "at_s", None)
        if started_s is None:  # the pass began before the hooks were added
            return
        self._begun.at_s = None
        # Only on CPU: elsewhere a pass returns before its work is done, and waiting would stall the device.
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, torch.Tensor) and ids.device.type == "cpu":
            self._rate.record(ids.numel(), time.perf_counter() - started_s)
