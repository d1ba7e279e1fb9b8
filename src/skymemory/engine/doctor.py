"""Checks of a user's set-up: why the hit rate is 0, and if the cache changes the model's output.

torch is imported only for a model: vLLM's logs can be read on any computer.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from skymemory.cache.tiers.workers import WorkerCall
from skymemory.engine.plugin import PluginSettings, PluginStore
from skymemory.engine.vllm.identity import EngineReport
from skymemory.engine.vllm.settings import TESTED_VERSIONS, is_tested
from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.kv.context import CacheContext
from skymemory.reasons import UNANSWERED
from skymemory.store.base import Store
from skymemory.store.host.client import HostStore
from skymemory.store.redis import RedisStore
from skymemory.testbed.open_store import open_store
from skymemory.units import format_duration, format_size

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from skymemory.engine.transformers.huggingface import KVCManager
    from skymemory.engine.transformers.prompts import TokenIds

_BLOCKS = 3
_MOST_PROBE_BYTES = 64 << 20
OPENING_S = 20.0
"""Longest wait for a store: a network folder or a stopped daemon may never answer."""
Opened = TypeVar("Opened")


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check: its subject, success, and a sentence for the user."""

    what: str
    well: bool
    words: str


@dataclass(frozen=True, slots=True)
class Examination:
    """Result of ``examine`` or ``examine_vllm``: what is wrong in a user's set-up, if anything."""

    findings: tuple[Finding, ...]
    context: dict[str, str | int | bool]
    """``CacheContext.describe``: what two computers must agree on to share blocks."""

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
    """Serve the first blocks of ``text`` twice, computed and then from ``store``, and generate with them.

    ``other``: the context of an examination elsewhere. ``options``: of ``KVCManager``.
    """
    from skymemory.engine.transformers.huggingface import KVCManager

    try:
        kvc = KVCManager(model, tokenizer, store, **options)
    except (SkyMemoryError, ValueError) as error:
        return Examination((Finding("model", False, str(error)),), {})
    with kvc:
        block, size = kvc.layout.block_tokens, format_size(kvc.layout.block_bytes)
        words = f"{type(model).__name__}: a block of {block} tokens is {size}; a shorter prompt is not cached"
        findings = [Finding("model", True, words)]
        if tokenizer is not None:
            findings.append(Finding("tokenizer", *_tokenizer(tokenizer, text)))
        longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        blocks = _BLOCKS if longest is None else min(_BLOCKS, (longest - 1) // block)
        if blocks:
            try:
                ids = _prompt(model, tokenizer, text, blocks * block + 1)
                findings.append(Finding("store", *_store(kvc, ids)))
                if findings[-1].well:
                    findings.append(Finding("hit", *_hit(kvc, ids)))
            except SkyMemoryError as error:
                findings.append(Finding("store", False, str(error)))
        else:
            words = (
                f"the longest of {longest} tokens is no longer than a block of {block}: none is cached. Choose smaller "
                "blocks (block_tokens)"
            )
            findings.append(Finding("prompts", False, words))
        context = kvc.context.describe()
    if other is not None:
        findings.append(Finding("contexts", *_compared(context, other)))
    return Examination(tuple(findings), context)


def _prompt(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, text: str, tokens: int) -> torch.Tensor:
    # Return that many token ids: of ``text``, repeated as needed, or random without a tokenizer.
    import torch

    if tokenizer is None:
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        return torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1))
    ids = tokenizer(text)["input_ids"]
    return torch.tensor([(ids * (1 + tokens // max(1, len(ids))))[:tokens]])


def _tokenizer(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[bool, str]:
    # Check that equal texts become equal ids; return success and a sentence.
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
    # Check that the store takes blocks and returns them; return success and a sentence.
    name, started_s = kvc.store.name, time.perf_counter()
    before = kvc.get_cache_ids(ids).result
    if before.not_found in UNANSWERED:
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
    elapsed = format_duration(time.perf_counter() - started_s)
    if after.loaded_blocks < after.blocks:
        why = ", ".join(after.failed_blocks) or after.not_found
        return False, f"{name} took {stored.blocks} blocks, and {after.loaded_blocks} came back: {why}"
    tiers = ", ".join(f"{tokens} tokens from {tier}" for tier, tokens in after.hit_tokens.items())
    return True, f"{stored.blocks} blocks stored and loaded ({tiers}) in {elapsed}"


def _hit(kvc: KVCManager, ids: torch.Tensor) -> tuple[bool, str]:
    # Check that ``generate`` computes no token that was loaded; return success and a sentence.
    import torch
    import transformers

    from skymemory.engine.transformers.computed_tokens import ComputedTokens
    from skymemory.engine.transformers.forward import cache_option
    from skymemory.engine.transformers.releases import TRIED_TRANSFORMERS

    ids = ids.to(kvc.model.device)
    cache = kvc.get_cache_ids(ids)
    options = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    with ComputedTokens(kvc.model) as computed:
        kvc.model.generate(ids, attention_mask=torch.ones_like(ids), **options, **cache_option(kvc.model, cache))
    result, tokens = cache.result, int(ids.shape[-1])
    loaded, expected = result.cached_tokens, tokens - result.cached_tokens
    words = f"of {tokens} tokens {loaded} were loaded, {result.used_tokens} used, {computed.tokens} computed"
    if result.used_tokens == loaded and computed.tokens <= expected:
        return True, words
    why = ", ".join(result.unused_tokens)
    return False, (
        f"a hit saves nothing: {words}{why and f' ({why})'}; expected {expected} computed. transformers "
        f"{transformers.__version__} is installed, and {TRIED_TRANSFORMERS} was tried: install such a release"
    )


def _compared(
    ours: Mapping[str, object], theirs: Mapping[str, object], own_place: str = "here", other_place: str = "there"
) -> tuple[bool, str]:
    # Check that two contexts are equal, else nothing is shared; return success and a sentence.
    if not isinstance(theirs, Mapping) or "digest" not in theirs:
        raise InvalidInput("the other examination has no context: save one there with --save")
    if ours["digest"] == theirs["digest"]:
        return True, "both are the same: each finds what the other stores"
    differing = [name for name in ours if name != "digest" and ours[name] != theirs.get(name)]
    if not differing:
        return False, "they differ in the tenant's salt alone, which is not shown"
    words = []
    for name in differing:
        own, other = _differing_parts(ours[name], theirs.get(name))
        hint = " (config.json, or the quantization)" if str(own).startswith("vllm:") else ""
        words.append(f"{name}: {own} {own_place}, {other} {other_place}{hint}")
    return False, f"nothing is shared, for they differ in {'; '.join(words)}"


def _differing_parts(ours: object, theirs: object) -> tuple[object, object]:
    own_parts, other_parts = (re.split(r", ?|\[|\]", str(text)) for text in (ours, theirs))
    if len(own_parts) == 1 or len(own_parts) != len(other_parts):
        return ours, theirs
    differing = [(a, b) for a, b in zip(own_parts, other_parts, strict=True) if a != b]
    return ", ".join(a for a, _ in differing), ", ".join(b for _, b in differing)


# --- engines of vLLM, by what they write into their logs ---


def examine_vllm(engines: Mapping[str, EngineReport], address: str | None = None) -> Examination:
    """Check that these engines, by log name, find each other's values; store, load and delete a value. ``address``: the
    store's on this computer, if different.
    """
    findings = [Finding(f"engine {name}", *_engine(report)) for name, report in engines.items()]
    (first, ours), *other_engines = engines.items()
    for name, theirs in other_engines:
        compared = _compared(ours.context, theirs.context, f"in {first}", f"in {name}")
        findings.append(Finding(f"contexts of {first} and {name}", *compared))
        if both := sorted(ours.adapters.keys() & theirs.adapters.keys()):
            differing = [adapter for adapter in both if ours.adapters[adapter] != theirs.adapters[adapter]]
            words = f"the files of {', '.join(differing)} differ: nothing of theirs is shared" if differing else "same"
            findings.append(Finding(f"adapters of {first} and {name}", not differing, words))
    if other_engines:
        for role, what in (("kv_consumer", "saves"), ("kv_producer", "loads")):
            if all(report.role == role for report in engines.values()):
                findings.append(Finding("roles", False, f"no engine {what}: all have the kv_role {role}"))
    size_bytes = min(_MOST_PROBE_BYTES, max(report.value_bytes for report in engines.values()))
    addresses = [address] if address else list(dict.fromkeys(report.store for report in engines.values()))
    return Examination((*findings, *_stores(addresses, size_bytes)), ours.context)


def _engine(report: EngineReport) -> tuple[bool, str]:
    # Check the version and sizes in an engine's report; return success and a sentence.
    words = (
        f"vLLM {report.vllm}, {report.role}, blocks of {report.block_tokens} tokens, values of {report.value_tokens} "
        f"({format_size(report.value_bytes)}): a shorter prompt is not saved"
    )
    if not is_tested(report.vllm):
        return False, f"{words}; this version was not tested, {', '.join(TESTED_VERSIONS)} was"
    if report.value_tokens > report.longest_tokens:
        return False, f"{words}, and none is longer than {report.longest_tokens}: choose a smaller value_tokens"
    return True, words


def _stores(addresses: Sequence[str], size_bytes: int) -> list[Finding]:
    # Store a random value at the first address that works, load it at each, and delete it.
    name, value = os.urandom(16).hex(), os.urandom(size_bytes)
    findings: list[Finding] = []
    where, holder = "", None
    with ExitStack() as stack:
        for address in addresses:
            try:
                probe, server = open_in_time(partial(_opened, address, size_bytes), lambda late: late[0].close())
                stack.callback(probe.close)
                if holder is None:
                    _save(probe, name, value)
                    where, holder = address, probe
                took_s = _load(probe, name, value, where)
            except SkyMemoryError as error:
                findings.append(Finding(f"store {address}", False, str(error)))
                continue
            rate = f"{format_size(size_bytes)} loaded in {format_duration(took_s)}"
            findings.append(Finding(f"store {address}", True, f"{server}{rate}"))
        if holder is not None and holder.delete([holder.key(name)]) != [True]:
            words = "what was stored cannot be deleted everywhere: a tier behind it does not answer"
            findings.append(Finding(f"store {where}", False, words))
    return findings


def open_in_time(opening: Callable[[], Opened], close: Callable[[Opened], object]) -> Opened:
    """Open a store in a thread, or raise SkyMemoryError after ``OPENING_S``; a store that opens too late is closed."""
    call = WorkerCall(opening)
    threading.Thread(target=call.run, name="doctor", daemon=True).start()
    if not call.wait(OPENING_S) and call.give_up(lambda late: None if late is None else close(late)):
        raise SkyMemoryError(
            f"the store did not open within {OPENING_S:g} s: is it running, and does its folder or network answer?"
        )
    if call.error is not None:
        raise call.error
    assert call.result is not None
    return call.result


def _opened(address: str, value_bytes: int) -> tuple[PluginStore, str]:
    # Open a store; return it with a description of its server.
    if ":***@" in address:
        raise InvalidInput("its password is not in the log: give the whole address by --store")
    store = open_store(address)
    try:
        server = f"{_server(store.server_info())}; " if isinstance(store, RedisStore) else ""
        if isinstance(store, HostStore):
            server = f"{_arena(store.stats(), value_bytes)}; "
    except SkyMemoryError as error:
        store.close()
        hint = "is it running, and is the address right on this computer? Else give --store"
        raise SkyMemoryError(f"{str(error).rstrip('.')}: {hint}") from error
    except BaseException:
        store.close()
        raise
    context = CacheContext("doctor", "none", "none", "none", "none")
    return PluginStore(PluginSettings(store=address, weights="none"), context, value_bytes, store), server


def _server(info: Mapping[str, str]) -> str:
    # Describe a Redis server or store daemon by the answer to INFO.
    if "skymemory_version" not in info:
        full = info.get("maxmemory", "0") != "0" and info.get("maxmemory_policy") == "noeviction"
        advice = ", which stores nothing more once it is full: set maxmemory-policy allkeys-lru" if full else ""
        return f"Redis {info.get('redis_version', '')}{advice}"
    end = "breaker_open"
    breakers = {name.removesuffix(end).rstrip("_"): on for name, on in info.items() if name.endswith(end)}
    if silent := [name or info["store"] for name, on in breakers.items() if on == "1"]:
        raise SkyMemoryError(f"{', '.join(silent)} behind the daemon does not answer: see the daemon's own log")
    tiers = ", ".join(filter(None, breakers))
    return f"a daemon of skymemory {info['skymemory_version']} over {info['store']}{tiers and f' ({tiers})'}"


def _arena(figures: Mapping[str, int | float], value_bytes: int) -> str:
    # Describe a host arena by its owner's figures.
    size_bytes = int(figures.get("budget_bytes", 0))
    clients = max(0, int(figures.get("clients", 0)) - 2)  # without its owner and this process
    if size_bytes < value_bytes:
        raise SkyMemoryError(
            f"an arena of {format_size(size_bytes)} holds no value of {format_size(value_bytes)}: serve a larger one, "
            "host://SIZE, or choose smaller values"
        )
    return f"an arena of {format_size(size_bytes)} with {clients} other clients"


def _save(probe: PluginStore, name: str, value: bytes) -> None:
    # Twice: with ?admit=second a store accepts a value only when it is offered again.
    if not any(probe.save([name], lambda at: [value]).done[0] for _ in range(2)):
        raise SkyMemoryError(
            f"it took no value of {format_size(len(value))}: it is too small or full, such values are above its limit "
            "(--largest of `skymemory store serve`), or a tier does not answer"
        )


def _load(probe: PluginStore, name: str, value: bytes, where: str) -> float:
    started_s = time.perf_counter()
    (loaded,) = probe.load([name], lambda at, read: read == value)
    took_s = time.perf_counter() - started_s
    if not loaded:
        why = ", ".join(label for label in probe.counters.as_dict() if label.startswith("misses"))
        raise SkyMemoryError(f"what was stored at {where} is not found here: {why}")
    return took_s


# --- does the cache change what the model says? ---


@dataclass(frozen=True, slots=True)
class LogitDistance:
    """Distance of next-token logits with and without the cache, in their units."""

    max_abs: float
    rms: float
    spread: float
    """Standard deviation of the logits."""
    same_choice: bool
    choice_margin: float
    """Lead of the best token over the second."""

    def describe(self) -> str:
        choice = "same" if self.same_choice else "another"
        return (
            f"logits differ by {self.rms:.2g} rms, {self.max_abs:.2g} at most (their spread is {self.spread:.2g}); "
            f"{choice} next token, which led by {self.choice_margin:.2g}"
        )


def logit_distance(without: torch.Tensor, with_cache: torch.Tensor) -> LogitDistance:
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
    """Return the logits of the token after ``ids``; with ``kvc`` from a loaded prefix."""
    import torch

    from skymemory.engine.transformers.forward import cache_option
    from skymemory.engine.transformers.prompts import flat_ids

    tokens = torch.from_numpy(flat_ids(ids)).to(model.device)[None]
    cache = kvc.get_cache_ids(ids) if kvc is not None else None
    start = cache.begin() if cache is not None else 0
    with torch.inference_mode():
        cached = cache_option(model, cache) if cache is not None else {}
        return model(input_ids=tokens[:, start:], use_cache=cache is not None, **cached).logits[0, -1]


def measure_logit_distance(kvc: KVCManager, ids: TokenIds) -> LogitDistance:
    return logit_distance(next_token_logits(kvc.model, ids), next_token_logits(kvc.model, ids, kvc))
