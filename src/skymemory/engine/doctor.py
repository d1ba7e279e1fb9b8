"""Checks of a user's own set-up: why is the hit rate 0 (``examine``), and does the cache change what the model says
(``measure_logit_distance``: equal logits in float32, within rounding in 16 bits)?
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skymemory.cache.blocks import FAILING_REASONS
from skymemory.engine.huggingface import KVCManager
from skymemory.engine.prompts import TokenIds, flat_ids
from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.store.base import Store
from skymemory.units import format_duration, format_size

_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was tried, whether it passed, and an explanation."""

    what: str
    well: bool
    words: str


@dataclass(frozen=True, slots=True)
class Examination:
    findings: tuple[Finding, ...]
    context: dict[str, str | int | bool]
    """``CacheContext.describe``: what two computers must agree on to share blocks. Empty if there is none."""

    @property
    def well(self) -> bool:
        return all(finding.well for finding in self.findings)


def examine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    store: Store,
    text: str,
    other: Mapping[str, object] | None = None,
    **options: Any,
) -> Examination:
    """Serve the first blocks of ``text`` twice, computed and then from ``store``.

    ``other``: the context of an examination on another computer. ``options``: of ``KVCManager``.
    """
    try:
        kvc = KVCManager(model, tokenizer, store, **options)
    except (SkyMemoryError, ValueError) as error:
        return Examination((Finding("model", False, str(error)),), {})
    with kvc:
        block, size = kvc.layout.block_tokens, format_size(kvc.layout.block_bytes)
        words = f"{type(model).__name__}: a block of {block} tokens is {size}; a shorter prompt is not cached"
        found = [Finding("model", True, words)]
        if tokenizer is not None:
            found.append(Finding("tokenizer", *_tokenizer(tokenizer, text)))
        longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        blocks = _BLOCKS if longest is None else min(_BLOCKS, (longest - 1) // block)
        if blocks:
            try:
                found.append(Finding("store", *_store(kvc, _prompt(model, tokenizer, text, blocks * block + 1))))
            except SkyMemoryError as error:
                found.append(Finding("store", False, str(error)))
        else:
            words = (
                f"the longest of {longest} tokens is no longer than a block of {block}: none is cached. Choose smaller "
                "blocks (block_tokens)"
            )
            found.append(Finding("prompts", False, words))
        context = kvc.context.describe()
    if other is not None:
        found.append(Finding("contexts", *_compared(context, other)))
    return Examination(tuple(found), context)


def _prompt(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, text: str, tokens: int) -> torch.Tensor:
    if tokenizer is None:
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        return torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1))
    ids = tokenizer(text)["input_ids"]
    return torch.tensor([(ids * (1 + tokens // max(1, len(ids))))[:tokens]])


def _tokenizer(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[bool, str]:
    if tokenizer(text[:200])["input_ids"] != tokenizer(text[:200])["input_ids"]:
        return False, "it gives other ids for the same text each time: no prompt is found again"
    bos = getattr(tokenizer, "bos_token", None)
    ids = tokenizer((bos or "") + text[:50])["input_ids"]
    if bos and len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        return True, (
            f"it puts {bos!r} in front of every text: for a chat pass the messages or the ids of "
            "apply_chat_template, not the template's text, which already begins with it"
        )
    return True, f"{type(tokenizer).__name__}: the same text becomes the same ids"


def _store(kvc: KVCManager, ids: torch.Tensor) -> tuple[bool, str]:
    name, began_s = kvc.store.name, time.perf_counter()
    before = kvc.get_cache_ids(ids).result
    if before.not_found in FAILING_REASONS:
        return False, (
            f"{name} is {before.not_found}: every prompt is computed. Is it running, and is its address right?"
        )
    stored = kvc.add_blocks_ids(ids)
    if stored.refused_blocks:
        return False, (
            f"{name} refused {stored.refused_blocks} of {stored.blocks} blocks of "
            f"{format_size(kvc.layout.block_bytes)}: it is full of pinned values, too small, or does not answer"
        )
    after = kvc.get_cache_ids(ids).result
    took = format_duration(time.perf_counter() - began_s)
    if after.loaded_blocks < after.blocks:
        why = ", ".join(after.failed_blocks) or after.not_found
        return False, f"{name} took {stored.blocks} blocks, and {after.loaded_blocks} came back: {why}"
    tiers = ", ".join(f"{tokens} tokens from {tier}" for tier, tokens in after.hit_tokens.items())
    return True, f"{stored.blocks} blocks stored and loaded ({tiers}) in {took}"


def _compared(ours: Mapping[str, object], theirs: Mapping[str, object]) -> tuple[bool, str]:
    if not isinstance(theirs, Mapping) or "digest" not in theirs:
        raise InvalidInput("the other examination has no context: save one there with --save")
    if ours["digest"] == theirs["digest"]:
        return True, "both are the same: each finds what the other stores"
    differing = [name for name in ours if name != "digest" and ours[name] != theirs.get(name)]
    if not differing:
        return False, "they differ in the tenant's salt alone, which is not shown"
    words = "; ".join(f"{name}: {ours[name]} here, {theirs.get(name)} there" for name in differing)
    return False, f"nothing is shared, for they differ in {words}"


# --- does the cache change what the model says? ---


@dataclass(frozen=True, slots=True)
class LogitDistance:
    """Next-token logits with the cache against those without, in the units of the logits."""

    max_abs: float
    rms: float
    spread: float
    """Standard deviation of the logits, for comparison with ``rms``."""
    same_choice: bool
    """Whether greedy decoding would choose the same next token."""
    choice_margin: float
    """Lead of the best token over the second without the cache."""

    def describe(self) -> str:
        """One line for people and logs."""
        choice = "same" if self.same_choice else "another"
        return (
            f"logits differ by {self.rms:.2g} rms, {self.max_abs:.2g} at most (their spread is {self.spread:.2g}); "
            f"{choice} next token, which led by {self.choice_margin:.2g}"
        )


def logit_distance(without: torch.Tensor, with_cache: torch.Tensor) -> LogitDistance:
    """Distance between two rows of logits of one vocabulary."""
    reference, other = without.detach().float().flatten(), with_cache.detach().float().flatten()
    difference = (reference - other).abs()
    best = reference.topk(2).values
    return LogitDistance(
        max_abs=float(difference.max()),
        rms=float(difference.square().mean().sqrt()),
        spread=float(reference.std()),
        same_choice=bool(reference.argmax() == other.argmax()),
        choice_margin=float(best[0] - best[1]),
    )


def next_token_logits(model: PreTrainedModel, ids: TokenIds, kvc: KVCManager | None = None) -> torch.Tensor:
    """Logits of the token after ``ids``; with ``kvc``, from the prefix it has and the rest computed."""
    tokens = torch.from_numpy(flat_ids(ids)).to(model.device)[None]
    cache = kvc.get_cache_ids(ids) if kvc is not None else None
    start = cache.begin() if cache is not None else 0
    with torch.inference_mode():
        return model(input_ids=tokens[:, start:], past_key_values=cache, use_cache=cache is not None).logits[0, -1]


def measure_logit_distance(kvc: KVCManager, ids: TokenIds) -> LogitDistance:
    """Runs the model of ``kvc`` over ``ids`` without and with its cache, and compares the next-token logits."""
    return logit_distance(next_token_logits(kvc.model, ids), next_token_logits(kvc.model, ids, kvc))
