"""Hooks on a user's model: the guard, which checks every call with one of our caches; and the clock that times passes.

A call (``Guard.__call__``): find the cache among its arguments, check that the model is unchanged, compare the input
tokens with the loaded ones, turn the common prefix into contents of the cache and cut it from the input, and note the
tokens that the model appends. When the pass has ended (``Guard.passed``), the tokens that it skipped count as used;
loaded tokens that no pass skipped count as unused, by reason (``Guard.settle``).
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
from skymemory.engine.forward import at_positions, cache_argument, cache_option, find_cache, forward_options
from skymemory.engine.identity import Care
from skymemory.engine.kv_cache import SkyCache, Tokens
from skymemory.engine.releases import TRIED_TRANSFORMERS
from skymemory.errors import CacheMisuse
from skymemory.kv.context import CacheContext
from skymemory.metrics import Counters

_log = logging.getLogger(__name__)

_ALONG_THE_PROMPT = ("input_ids", "position_ids", "cache_position")
_ALL_ALONG = ("labels", "output_hidden_states", "output_attentions", "output_router_logits")
"""Arguments that request an output for each token."""
_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Arguments with a type per token; in most models all zeros have no effect."""

UNSEEN = "a forward pass that the guard did not see"
DROPPED = "the cache was dropped before use"
BEYOND = "the input ended before them"
"""Reasons for which loaded tokens were not used."""
_OTHER_TOKENS = "other tokens than it was made for"
_ADVICE = {
    _OTHER_TOKENS: "get one for the prompt that is passed, past_key_values=kvc.get_cache(prompt)",
    "more asked for than its last logits": "pass logits_to_keep=1, and request hidden states or a loss without a cache",
    "padding and no positions": "pass position_ids, as generate does",
}
_WAYS = "what is served, and what is computed whole, is in the table 'Ways to generate' of the guide"


class Guard:
    """Checks every call of ``model`` with one of our caches before it computes, while the manager or a cache lives.

    It compares the input with the tokens loaded in the cache and skips the common prefix: so a cache of another prompt,
    or one used before, costs computing and never changes a result. It notes the tokens that the model appends, so that
    no block is stored under a wrong hash.
    """

    def __init__(
        self, model: PreTrainedModel, counters: Counters, same: Callable[[CacheContext | None, Care], bool]
    ) -> None:
        """``same``: whether the model still matches a context, checked with the given care."""
        self._model = model
        self._parameters = list(inspect.signature(model.forward).parameters)
        self._argument = cache_argument(model)
        self._last_logits = forward_options(model)
        self._counters = counters
        self._same = same
        self._ignored_types = {name for name in _TYPES if name in self._parameters and _zeros_are_ignored(model, name)}
        self._keeps_positions = any("rope_deltas" in vars(part) for part in model.modules())
        """Whether the model keeps position offsets of its last image, even for another prompt."""
        for hook in (
            model.register_forward_pre_hook(GuardHook(self), with_kwargs=True),
            model.register_forward_hook(GuardHook(self), with_kwargs=True),
        ):
            weakref.finalize(self, hook.remove).atexit = False

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        found = find_cache(args, kwargs)
        if found is None or module is not self._model:
            return None
        if found.guard is not self:
            self._check_model(found)
            return None
        cache: SkyCache = found
        given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        if given.get(self._argument) is not cache:  # under the name of another release
            given = {name: value for name, value in given.items() if value is not cache}
            given[self._argument] = cache
        cache.result.usage.is_in_use = True
        unused = given.get("use_cache") is False  # each call then has all tokens
        if unused and cache._is_user_defined:
            cache.rewind()  # generate passes the cache with each of them anyway
        if cache.has_failed:
            _check_whole(cache)
        if cache.padding:
            given = _without_padding(given, cache.padding)
        start = cache.get_seq_length()
        if unused and not start and not cache._is_user_defined:
            return (), {**given, self._argument: None}
        ids = given.get("input_ids")
        step = start and isinstance(ids, torch.Tensor) and ids.shape[-1] == 1
        first = not start or start == cache.taken
        is_same = self.look(cache, Care.USE if first else Care.STEP if step else Care.CALL)
        if cache.taken:
            if first and not is_same:
                raise CacheMisuse(
                    f"the model has changed since begin() made {start} loaded tokens contents, which are of the model "
                    "as it was: get another cache, kvc.get_cache(tokens), and pass the tokens behind its begin()"
                )
            _check_follows(cache, start, given)
            if first:
                _check_sees(start, given)
        cache.enter()
        try:
            return (), self._prepare(cache, start, given)
        except CacheMisuse:
            cache.passed()  # nothing was computed
            raise

    def _prepare(self, cache: SkyCache, start: int, given: dict[str, Any]) -> dict[str, Any]:
        """Make of the cache and the input what the pass needs; returns the input."""
        if start and not cache.suffices(start):
            self._compute_again(cache, start)
        if not cache.saw(start):  # the loaded tokens do not continue contents from unseen passes
            cache.loaded = cache.loaded[:start]
        if len(cache.loaded) > start or (not start and (cache.states or cache.used_before)):
            given = self._advance(cache, start, given)
        elif start:
            _check_goes_on(start, given)
            cache.stop(decoding=True)
        ids, held = given.get("input_ids"), cache.get_seq_length()
        cache.note(ids, plain=self._is_plain(held, ids, given))
        if cache.plain and ids is not None and given.get("position_ids") is None:
            given = {**given, **at_positions(self._model, held, ids.shape[1], ids.shape[0])}
        return given

    def _check_model(self, cache: SkyCache) -> None:
        """Raises CacheMisuse for contents of another model, unless one of the two is a part of the other."""
        other = cache.guard._model if isinstance(cache.guard, Guard) and cache.held else self._model
        if other not in self._model.modules() and self._model not in other.modules():
            raise CacheMisuse(
                f"a model is given a cache whose {cache.held} tokens are of another one: get one from a KVCManager of "
                "the model that you call"
            )

    def look(self, cache: SkyCache, care: Care = Care.USE) -> bool:
        """Check that the model is as it was when the cache was made; else drop the loaded tokens and store nothing
        from it.
        """
        if cache.context is not None and self._same(cache.context, care):
            return True
        if (more := len(cache.loaded) - cache.get_seq_length()) > 0:
            self._refuse(cache, "a model that has changed since", more, 0)
        cache.context = None
        return False

    def passed(self, cache: SkyCache, output: object = None) -> None:
        """A forward pass with ``cache`` has ended: count the loaded tokens that it skipped."""
        cache.passed()
        if cache.filled and torch.is_grad_enabled():
            _refuse_gradients(output, cache.filled)
        if cache.skipping is not None and cache.guard is self:
            (start, stop), cache.skipping = cache.skipping, None
            self._count("used_tokens_total", cache.result.usage.use(start, stop))

    def settle(self, cache: SkyCache) -> None:
        """Nothing more comes of ``cache``: count the loaded tokens that were not used, and warn if its guard was passed
        by. A cache that was never given to a model is only counted.
        """
        usage = cache.result.usage
        self.settle_unseen(cache)
        reason = BEYOND if usage.is_in_use else DROPPED
        self._count("unused_tokens_total", usage.refuse(usage.first, usage.end, reason), reason)

    def settle_unseen(self, cache: SkyCache) -> None:
        """If a forward pass has computed what was loaded, past the guard: count it, and warn."""
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
        """Once for each cache."""
        level = logging.DEBUG if cache.result.usage.has_warned else logging.WARNING
        cache.result.usage.has_warned = True
        _log.log(level, "%s", words)

    def __deepcopy__(self, memo: object) -> Guard:
        """A copied cache is for the same model."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A cache from another process belongs to no model here: its whole prompt is computed."""
        return type(None), ()

    def _advance(self, cache: SkyCache, start: int, given: dict[str, Any]) -> dict[str, Any]:
        """Turn loaded tokens into contents as far as the input matches; returns the rest of the input."""
        loaded = cache.loaded[start:]
        if not start:
            _check_begins(cache, given)
        call = self._read(start, given)
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
            cache.loaded = cache.loaded[: start + usable]  # the prompt has ended before what was loaded, or was cut
        elif why:
            self._refuse(cache, why, len(loaded), usable)
        if isinstance(call, str):
            return given
        if usable:
            cache.advance(usable)
        if cache.states and not torch.is_grad_enabled():
            usable += self._compute_to_stops(cache, call, usable)
        if not usable:
            return given
        if call.rows > 1:
            cache.batch_repeat_interleave(call.rows)
        if call.shifts:
            cache.shift_rows(call.shifts)
        cache.padding = call.padding
        return _rest_of(given, call.padding + usable, call.padding)

    def _compute_to_stops(self, cache: SkyCache, call: _Call, begun: int) -> int:
        """Run the model up to the last place where recurrent states are kept (a pass must end there), as far as all
        rows are equal; returns the number of tokens. ``begun`` of the call's tokens are contents already.
        """
        start = cache.get_seq_length() - begun
        end = min(call.tokens - call.kept, call.same_in_all_rows())
        ids = call.ids[:1].to(self._model.device)
        cache.guard = None  # these passes are our own
        try:
            for stop in cache.stops_before(start + end):
                piece = ids[:, cache.get_seq_length() - start : stop - start]
                cache.note(piece, plain=True)
                options = {**self._last_logits, **at_positions(self._model, cache.held, piece.shape[1])}
                self._model(input_ids=piece, use_cache=True, **cache_option(self._model, cache), **options)
                cache.stop()
        finally:
            cache.guard = self
        computed: int = cache.held - start - begun
        return computed

    def _compute_again(self, cache: SkyCache, start: int) -> None:
        """Recompute a cropped cache, whose windows now reach tokens that were never loaded."""
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
        cache.guard = None  # this pass is our own
        try:
            cache.note(ids, plain=True)
            with torch.no_grad():
                options = {**self._last_logits, **at_positions(self._model, 0, start)}
                self._model(input_ids=ids, use_cache=True, **cache_option(self._model, cache), **options)
        finally:
            cache.guard = self
        if rows > 1:
            cache.batch_repeat_interleave(rows)
        cache.padding = padding

    def _refuse(self, cache: SkyCache, why: str, loaded: int, usable: int) -> None:
        """Only ``usable`` of the next ``loaded`` tokens may become contents; count and log the others."""
        start = int(cache.get_seq_length())
        unused = cache.result.usage.refuse(start + usable, start + loaded, why)
        self._count("unused_tokens_total", unused, why)
        self._warn(
            cache,
            f"a cache was used with {why}: of its {loaded} loaded tokens {usable} are of use. "
            f"{_ADVICE.get(why, _WAYS)}",
        )
        cache.loaded = cache.loaded[: cache.get_seq_length() + usable]

    def _read(self, start: int, given: dict[str, Any]) -> _Call | str:
        """The input, if it is tokens at consecutive positions from ``start`` on; else a description of what it is."""
        ids = given.get("input_ids")
        if ids is None or ids.dim() != 2:
            return "embeddings instead of tokens"
        # a caller that does not request only the last logits wants all, if the model can be asked for fewer
        kept = given.get("logits_to_keep", 0 if "logits_to_keep" in self._parameters else 1)
        if not isinstance(kept, int) or kept < 1 or any(self._asked(name, given) for name in _ALL_ALONG):
            return "more asked for than its last logits"
        if other := next((name for name, value in given.items() if self._is_other_input(name, value)), ""):
            return f"other inputs ({other})"
        width, paddings, mask = int(ids.shape[1]), [0] * len(ids), given.get("attention_mask")
        if mask is not None:
            if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape != (len(ids), start + width):
                return "an attention mask of its own"
            left = (mask != 0).int().argmax(dim=1) if not start else torch.zeros_like(mask[:, 0])
            if not torch.equal(mask != 0, torch.arange(mask.shape[1], device=mask.device) >= left[:, None]):
                return "an attention mask of its own"
            paddings = left.tolist()
        positions = given.get("position_ids")
        if positions is None:
            if any(paddings):
                return "padding and no positions"
        elif positions.shape[-1] != width or not _count_on(positions, start, paddings):
            return "positions of its own"
        places = given.get("cache_position")
        if places is not None and not bool((places == torch.arange(start, start + width, device=places.device)).all()):
            return "positions of its own"
        padding = min(paddings)
        shifts = tuple(each - padding for each in paddings) if len(set(paddings)) > 1 else ()
        return _Call(ids[:, padding:], padding, kept, shifts)

    def _asked(self, name: str, given: dict[str, Any]) -> bool:
        """Whether this call or the configuration requests an output for each token."""
        value = given.get(name)
        return (getattr(self._model.config, name, None) if value is None else value) not in (None, False)

    def _is_plain(self, start: int, ids: torch.Tensor | None, options: dict[str, Any]) -> bool:
        """Whether every row is the same tokens, at consecutive positions from ``start`` on, unmasked and without other
        inputs.
        """
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
        """Whether this argument is an input other than tokens, mask and positions."""
        if name in _ALONG_THE_PROMPT or name == "attention_mask" or not _has_tensors(value):
            return False
        return not (name in self._ignored_types and isinstance(value, torch.Tensor) and not bool(value.any()))


class GuardHook:
    """The hook on the model; holds the guard weakly."""

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = None if guard is None else weakref.ref(guard)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *output: object
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        guard = self._guard() if self._guard is not None else None
        if kwargs is None:  # removed after this pass began: torch no longer passes kwargs
            return None
        if output:  # the pass has ended
            if (cache := find_cache(args, kwargs)) is not None:
                cache.passed() if guard is None else guard.passed(cache, output[0])
            return None
        return None if guard is None else guard(module, args, kwargs)

    def __reduce__(self) -> tuple[type[GuardHook], tuple[()]]:
        """A copied model has no guard."""
        return GuardHook, ()


def _refuse_gradients(output: object, tokens: int) -> None:
    """Let ``backward`` through an output raise CacheMisuse: no gradient reaches what was computed at another time."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            output.register_hook(partial(_no_gradient, tokens))
    elif isinstance(output, Mapping | tuple | list):
        for each in output.values() if isinstance(output, Mapping) else output:
            _refuse_gradients(each, tokens)


def _no_gradient(tokens: int, gradient: torch.Tensor) -> None:
    raise CacheMisuse(
        f"no gradient reaches the {tokens} tokens that a cache supplied: train without a cache, past_key_values=None"
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """Input tokens that continue a cache, with left ``padding``."""

    ids: torch.Tensor
    """(rows, tokens), without the padding that all rows have."""
    padding: int
    kept: int
    """Number of last tokens that must be computed for their logits."""
    shifts: tuple[int, ...] = ()
    """More left padding of each row; empty if all rows are equally long."""

    @property
    def rows(self) -> int:
        return int(self.ids.shape[0])

    @property
    def tokens(self) -> int:
        return int(self.ids.shape[1])

    def same_in_all_rows(self) -> int:
        """Number of leading tokens that all rows share."""
        differing = (self.ids != self.ids[:1]).any(dim=0).nonzero()
        return int(differing[0]) if len(differing) else self.tokens

    def shared(self, loaded: Tokens) -> int:
        """Number of leading tokens equal to ``loaded`` in all rows."""
        length = min(len(loaded), self.tokens)
        differ = self.ids[:, :length].cpu().numpy() != loaded[:length]
        for row, shift in enumerate(self.shifts):
            own = self.ids[row, shift:length].cpu().numpy()
            differ[row, :shift], differ[row, shift:length] = False, own != loaded[: len(own)]
        differing = np.flatnonzero(differ.any(axis=0))
        return int(differing[0]) if len(differing) else length


def _zeros_are_ignored(model: torch.nn.Module, name: str) -> bool:
    """Whether all zeros for ``name`` have no effect: tried with two tokens."""
    ids = torch.zeros((1, 2), dtype=torch.long, device=next(model.parameters()).device)
    with torch.inference_mode():
        without, given = (model(input_ids=ids, **more).logits for more in ({}, {name: torch.zeros_like(ids)}))
    return bool(torch.equal(without, given))


def _is_range(positions: torch.Tensor, start: int, end: int) -> bool:
    """Whether each row is ``start`` .. ``end - 1``."""
    if positions.shape[-1] != end - start:
        return False
    if positions.numel() == 1:  # a decoding step waits for this
        return bool(positions.item() == start)
    return bool((positions == torch.arange(start, end, device=positions.device)).all())


def _count_on(positions: torch.Tensor, start: int, paddings: list[int]) -> bool:
    """Whether each row counts from ``start`` on, behind its left padding."""
    places = torch.arange(start, start + positions.shape[-1], device=positions.device)
    left = torch.tensor(paddings, device=positions.device)[:, None]
    return not bool(((positions != places - left) & (places - start >= left)).any())


def _has_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, torch.Tensor) or (isinstance(value, list | tuple) and any(map(_has_tensors, value)))


def _rest_of(given: dict[str, Any], tokens: int, padding: int) -> dict[str, Any]:
    """Without the first ``tokens``, of which ``padding`` are padding."""
    left = dict(given)
    for name in (*_ALONG_THE_PROMPT, *_TYPES):
        if (value := left.get(name)) is not None:
            left[name] = value[..., tokens:]
    return _without_padding(left, padding)


def _without_padding(given: dict[str, Any], padding: int) -> dict[str, Any]:
    """The input as if the prompt had not been padded."""
    left = dict(given)
    if padding and (mask := left.get("attention_mask")) is not None:
        left["attention_mask"] = mask[:, padding:]
    if padding and (positions := left.get("cache_position")) is not None:
        left["cache_position"] = positions - padding
    return left


def _check_begins(cache: SkyCache, given: dict[str, Any]) -> None:
    """Raises CacheMisuse where the caller takes loaded tokens for contents without having called ``begin``."""
    ids, mask, loaded = given.get("input_ids"), given.get("attention_mask"), len(cache.loaded)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not loaded:
        return
    behind = cache.prompt[loaded:]
    counted = isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] > ids.shape[1]
    if counted or (
        ids.shape[1] == len(behind)
        and not np.array_equal(behind, cache.prompt[: len(behind)])
        and bool((ids.cpu().numpy() == behind).all())
    ):
        raise CacheMisuse(
            f"the model is given the {ids.shape[1]} tokens behind what was loaded, and the cache reports none yet: "
            "call cache.begin() and pass the tokens behind its result, or pass the whole prompt"
        )


def _check_whole(cache: SkyCache) -> None:
    """After a failed pass: empty a cache that had been empty; raises CacheMisuse for one with contents."""
    if cache.pass_start:
        raise CacheMisuse(
            "a forward pass with this cache failed midway, and its contents are not what they were: get another one "
            "and pass all tokens, past_key_values=kvc.get_cache(tokens)"
        )
    cache.undo()


def _check_follows(cache: SkyCache, start: int, given: dict[str, Any]) -> None:
    """Raises CacheMisuse if no row of the input goes on with the prompt whose first tokens ``begin`` made contents."""
    ids, prompt = given.get("input_ids"), cache.prompt[start:]
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


def _check_sees(start: int, given: dict[str, Any]) -> None:
    """Raises CacheMisuse where the attention mask hides tokens that ``begin`` made contents: those behind them saw
    them.
    """
    mask = given.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() in (2, 4):
        loaded = mask[..., :start]
        if not bool((loaded if mask.dim() == 2 or mask.dtype == torch.bool else loaded == 0).all()):
            raise CacheMisuse(
                f"the attention mask hides some of the {start} tokens that begin() made contents: get a cache for the "
                "prompt and pass the whole prompt with its mask, past_key_values=kvc.get_cache(prompt)"
            )


def _check_goes_on(start: int, given: dict[str, Any]) -> None:
    """Raises CacheMisuse where the attention mask counts other tokens before these than the cache holds."""
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if isinstance(ids, torch.Tensor) and isinstance(mask, torch.Tensor) and mask.dim() == 2:
        before = mask.shape[1] - ids.shape[1]
        if before != start:
            raise CacheMisuse(
                f"the model is given {ids.shape[1]} tokens behind {before}, and a cache of {start}: it has served "
                "another call. Get one for each call: past_key_values=kvc.get_cache(prompt)"
            )


# --- the compute clock: how long a prompt's tokens take, for the patience with stores ---

_ROWS = 64
_RUNS = 3


def estimated_token_s(model: torch.nn.Module) -> float | None:
    """Estimated seconds per prompt token, for use before a pass was measured: times the model's largest matrix with
    ``_ROWS`` tokens and scales by all matrices. None for a model without matrices.

    A lower bound: attention and per-layer overhead are not counted. Embedding and head are excluded, as one is a
    lookup and the other is computed for the last token only.
    """
    apart = {
        weight
        for module in (_part(model, "get_input_embeddings"), _part(model, "get_output_embeddings"))
        if (weight := getattr(module, "weight", None)) is not None
    }
    matrices = [one for one in model.parameters() if one.dim() == 2 and one.is_floating_point() and one not in apart]
    largest = max(matrices, key=torch.Tensor.numel, default=None)
    if largest is None or largest.is_meta:
        return None
    rows = torch.ones((_ROWS, largest.shape[1]), dtype=largest.dtype, device=largest.device)
    took_s = []
    with torch.inference_mode():
        for _ in range(_RUNS):
            began_s = time.perf_counter()
            _ = torch.nn.functional.linear(rows, largest)[0, 0].item()  # .item() waits for the device
            took_s.append(time.perf_counter() - began_s)
    times: float = sum(one.numel() for one in matrices) / largest.numel()
    return min(took_s) / _ROWS * times


def _part(model: torch.nn.Module, name: str) -> object:
    get = getattr(model, name, None)
    return get() if callable(get) else None


class ComputeClock:
    """Hooks on ``model`` that report the duration of its passes to ``rate``, those of other callers included.

    On CPU only: on other devices a pass returns long before its work is done, and waiting would stall the device.
    """

    _model: weakref.ref[torch.nn.Module] | None = None
    """None for the hooks of a copied or pickled model, which is not timed."""

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
        began_s: float | None = getattr(self._begun, "at_s", None)
        if began_s is None:  # the pass began before the hooks were added
            return
        self._begun.at_s = None
        given = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(given, torch.Tensor) and given.device.type == "cpu":
            self._rate.took(given.numel(), time.perf_counter() - began_s)
