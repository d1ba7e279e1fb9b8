"""Loaded tokens save computing: what goes through the embedding on a hit is the prompt without them, in each use; and
where it is not, the result, the counters, the log and the doctor say so.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.engine.transformers.families import build, known  # noqa: E402
from tests.engine.transformers.generation import BLOCK, cake, manager  # noqa: E402

from skymemory import KVCManager  # noqa: E402
from skymemory.engine.doctor import examine  # noqa: E402
from skymemory.engine.transformers.computed_tokens import ComputedTokens  # noqa: E402
from skymemory.engine.transformers.forward import cache_argument, cache_option  # noqa: E402
from skymemory.engine.transformers.guard import BEYOND, DROPPED, UNSEEN, GuardHook  # noqa: E402
from skymemory.engine.transformers.models import build_small, train_tokenizer  # noqa: E402
from skymemory.errors import CacheMisuse, UnsupportedModel  # noqa: E402
from skymemory.store.memory import MemoryStore  # noqa: E402

pytestmark = pytest.mark.engine

Use = Callable[[KVCManager, Any, Any], None]
PROMPT, LOADED = 20 * BLOCK + 5, 20 * BLOCK
_RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
ANNOUNCED = pytest.mark.skipif(_RELEASE < (5, 17), reason="before 5.17 a cache serves one generate")
HAS_END = pytest.mark.skipif(_RELEASE < (5, 17), reason="prompt lookup of this transformers fails without an end token")


@pytest.fixture(scope="module")
def small() -> Any:
    return build_small(seed=7)


@pytest.fixture
def kvc(small: Any, ids: Any) -> Any:
    with manager(small, None, weights="w") as kvc:
        kvc.add_blocks_ids(ids)
        yield kvc


def generate(kvc: KVCManager, ids: Any, cache: Any, **options: Any) -> Any:
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "do_sample": False, **options}
    return kvc.model.generate(ids, past_key_values=cache, pad_token_id=0, **options)


def counted(kvc: KVCManager) -> tuple[int, int, dict[str, int]]:
    """Loaded, used, and unused by reason, when no cache is left."""
    kvc._kept.clear()
    gc.collect()
    counts = kvc.counters.as_dict()
    unused = {
        name.partition("{")[2].rstrip("}"): tokens
        for name, tokens in counts.items()
        if name.startswith("unused_tokens_total")
    }
    return kvc.counters.total("hit_tokens_total"), kvc.counters.total("used_tokens_total"), unused


def two_rows(ids: Any) -> Any:
    both = ids.repeat(2, 1)
    both[1, 100:] = (both[1, 100:] + 1) % 1000 + 3
    return both


def begin_and_rest(kvc: KVCManager, ids: Any, cache: Any) -> None:
    kvc.model(ids[:, cache.begin() :], past_key_values=cache)


def directly(name: str) -> Use:
    """A forward pass of the whole prompt, with the cache under this name."""

    def call(kvc: KVCManager, ids: Any, cache: Any) -> None:
        kvc.model(ids, logits_to_keep=1, **{name or cache_argument(kvc.model): cache})

    return call


def by_position(kvc: KVCManager, ids: Any, cache: Any) -> None:
    kvc.model(ids, torch.ones_like(ids), torch.arange(PROMPT)[None], cache, logits_to_keep=1)


def generating(prepare: Callable[[Any], Any] = lambda ids: ids, **options: Any) -> Use:
    def call(kvc: KVCManager, ids: Any, cache: Any) -> None:
        if "assistant" in options:
            generate(kvc, ids, cache, assistant_model=build_small(seed=7))
        else:
            generate(kvc, prepare(ids), cache, **options)

    return call


@pytest.mark.brief("a batch of equal prompts", "by position")
@pytest.mark.parametrize(
    ("call", "used"),
    [
        pytest.param(generating(), LOADED, id="generate"),
        pytest.param(generating(lambda ids: ids.repeat(3, 1)), LOADED, id="a batch of equal prompts"),
        pytest.param(generating(two_rows), 100, id="a batch of different prompts"),
        pytest.param(generating(num_beams=3), LOADED, id="beams"),
        pytest.param(generating(do_sample=True, num_return_sequences=2), LOADED, id="sampling"),
        pytest.param(generating(assistant=True), LOADED, id="an assistant"),
        pytest.param(generating(prompt_lookup_num_tokens=3), LOADED, id="prompt lookup", marks=HAS_END),
        pytest.param(directly(""), LOADED, id="a pass of the whole prompt"),
        pytest.param(directly("past_key_values"), LOADED, id="the older name"),
        pytest.param(directly("cache"), LOADED, id="the newer name"),
        pytest.param(by_position, LOADED, id="by position"),
        pytest.param(begin_and_rest, LOADED, id="begin() and the rest"),
    ],
)
def test_on_a_hit_only_the_rest_is_computed(kvc: KVCManager, ids: Any, call: Any, used: int) -> None:
    cache = kvc.get_cache_ids(ids)
    assert cache.result.cached_tokens == LOADED and cache.result.used_tokens == 0
    with ComputedTokens(kvc.model) as computed, torch.inference_mode():
        call(kvc, ids, cache)
    assert computed.passes == [PROMPT - used] and cache.get_seq_length() == PROMPT
    assert cache.result.used_tokens == used and f"({used} used" in kvc.last.describe()
    with ComputedTokens(kvc.model) as again:
        assert kvc.add_blocks_ids(ids).prefilled_tokens == again.tokens == 0
    del cache
    unused = {"other tokens than it was made for": LOADED - used} if used < LOADED else {}
    assert counted(kvc) == (LOADED, used, unused)


@ANNOUNCED
def test_a_chat_goes_on_with_its_cache_and_each_loaded_token_counts_once(kvc: KVCManager, ids: Any) -> None:
    cache = kvc.get_cache_ids(ids)
    turn = torch.cat([generate(kvc, ids, cache, max_new_tokens=4), ids[:, :7]], dim=1)
    with ComputedTokens(kvc.model) as computed:
        generate(kvc, turn, cache)
    assert computed.passes == [8], "the answer's last token, and what follows it"
    del cache
    assert counted(kvc) == (LOADED, LOADED, {})


@pytest.mark.parametrize("loading", ["cake", "load"])
def test_with_cake_only_what_it_did_not_load_is_computed(small: Any, ids: Any, loading: str) -> None:
    store = MemoryStore()
    with manager(small, None, store, weights="w") as kvc:
        kvc.add_blocks_ids(ids)
    with cake(small, store, loading) as kvc, ComputedTokens(small) as computed:
        cache = kvc.get_cache_ids(ids)
        generate(kvc, ids, cache)
        assert cache.result.used_tokens == cache.result.cached_tokens == PROMPT - computed.tokens
        assert loading == "cake" or computed.tokens == 5
        del cache
        loaded, used, unused = counted(kvc)
    assert loaded == used and not unused


def test_the_serving_engine_computes_only_the_rest(small: Any, ids: Any) -> None:
    pytest.importorskip("skymemory_lab", reason="the laboratory is not installed")
    from skymemory_lab.engine.caches import PrefixCaches
    from skymemory_lab.engine.generation import Generation
    from skymemory_lab.engine.thread import Sequence

    tokenizer, prompt = train_tokenizer(1024), ids[0].numpy().astype(np.int64)
    caches = PrefixCaches(small, tokenizer, 64 << 20, BLOCK, "lru")
    passes = []
    for _ in range(2):
        opened = caches.open("", prompt)
        sequence = Sequence(Generation(prompt, 1), opened, small, tokenizer, frozenset())
        with ComputedTokens(small) as computed:
            while sequence.prefill(256) is None:
                pass
        caches.keep(opened)
        passes.append(computed.passes)
    assert passes == [[256, PROMPT - 256], [5]]
    assert caches._manager("").counters.total("used_tokens_total") == LOADED
    caches.close()


# --- what was loaded and not used ---


@pytest.mark.brief()
def test_a_cache_that_is_dropped_before_use_is_counted_and_not_warned_of(
    kvc: KVCManager, ids: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kvc.get_cache_ids(ids)
    begun = kvc.get_cache_ids(ids)
    begun.begin()
    copy.deepcopy(begun), pickle.loads(pickle.dumps(begun))  # noqa: S301
    del begun
    assert counted(kvc) == (2 * LOADED, 0, {DROPPED: 2 * LOADED}) and not caplog.records


def test_a_shorter_prompt_leaves_loaded_tokens_unused(
    kvc: KVCManager, ids: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache = kvc.get_cache_ids(ids)
    generate(kvc, ids[:, :100], cache)
    assert cache.result.used_tokens == 99
    del cache
    assert counted(kvc) == (LOADED, 99, {BEYOND: LOADED - 99}) and not caplog.records


def test_a_pass_that_failed_has_used_nothing(kvc: KVCManager, ids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kvc.get_cache_ids(ids)
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(torch.nn.functional, "silu", lambda *args, **kwargs: 1 / 0)
        broken.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *args, **kwargs: 1 / 0)
        kvc.model(ids, logits_to_keep=1, **cache_option(kvc.model, cache))
    assert cache.result.used_tokens == 0


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("then", ["add_blocks", "get_cache", "close", "drop"])
def test_a_pass_around_the_guard_is_warned_of_once(
    kvc: KVCManager, ids: Any, then: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = kvc.get_cache_ids(ids)
    with torch.inference_mode():
        kvc.model.forward(ids, **cache_option(kvc.model, cache))
    if then == "add_blocks":
        kvc.add_blocks_ids(ids)
    elif then == "get_cache":
        kvc.get_cache_ids(ids + 1)
    elif then == "close":
        kvc.close()
    described = "" if then == "drop" else cache.result.describe()
    del cache
    assert counted(kvc) == (LOADED, 0, {UNSEEN: LOADED})
    (record,) = caplog.records
    assert "320 tokens were loaded for nothing" in record.getMessage() and "doctor" in record.getMessage()
    assert then == "drop" or f"(0 used, 320 not: {UNSEEN}), 325 to compute" in described


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if transformers handed its caches over in a way that the guard does not know."""
    monkeypatch.setattr(GuardHook, "__call__", lambda *args, **kwargs: None)


@pytest.mark.usefixtures("unguarded")
def test_a_model_whose_hits_save_nothing_is_refused(document: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnsupportedModel, match=r"24 of 24 tokens, though 16 were loaded; expected 8.*was tried"):
        KVCManager(build_small(seed=8))
    (finding,) = examine(build_small(seed=8), train_tokenizer(1024), MemoryStore(), document).findings
    assert not finding.well and "a hit would save nothing" in finding.words


def test_hits_that_save_nothing_from_now_on_are_said_by_log_and_doctor(
    small: Any, document: str, ids: Any, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    with manager(small, None) as kvc:  # has been tried
        kvc.add_blocks_ids(ids)
        request.getfixturevalue("unguarded")
        generate(kvc, ids, kvc.get_cache_ids(ids))
        kvc.add_blocks_ids(ids)
        assert "loaded for nothing" in caplog.text and "0 used, 320 not" in kvc.last.describe()
    *_, finding = examine(small, train_tokenizer(1024), MemoryStore(), document, block_tokens=BLOCK).findings
    assert (finding.what, finding.well) == ("hit", False)
    assert "of 49 tokens 48 were loaded, 0 used, 49 computed" in finding.words and "1 computed" in finding.words


# --- begin(): what was made contents, and what follows ---


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("written", ["torch", "data"])
@pytest.mark.parametrize("tokens", [5, 1])
def test_weights_that_change_behind_begin_are_misuse(ids: Any, written: str, tokens: int) -> None:
    model = build_small(seed=9)
    prompt = ids[:, : LOADED + tokens]
    with manager(model, None) as kvc, torch.inference_mode():
        kvc.add_blocks_ids(prompt)
        cache = kvc.get_cache_ids(prompt)
        held = cache.begin()
        weight = model.model.layers[2].mlp.down_proj.weight
        if written == "torch":
            weight.mul_(1.5)
        else:
            weight.data.mul_(1.5)
        with pytest.raises(CacheMisuse, match=r"changed since begin\(\).*get_cache"):
            model(prompt[:, held:], **cache_option(model, cache))
        whole = model(prompt, logits_to_keep=1).logits
        got = model(prompt, logits_to_keep=1, **cache_option(model, kvc.get_cache_ids(prompt))).logits
        assert torch.equal(got, whole)


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("given", ["all tokens", "others", "too few left out", "too many left out"])
@pytest.mark.parametrize("rows", [1, 2])
def test_tokens_that_do_not_follow_begin_are_misuse(kvc: KVCManager, ids: Any, given: str, rows: int) -> None:
    cache = kvc.get_cache_ids(ids)
    held = cache.begin()
    passed = {
        "all tokens": ids,
        "others": (ids[:, held:] + 1) % 1000,
        "too few left out": ids[:, held - 1 :],
        "too many left out": ids[:, held + 1 :],
    }[given].repeat(rows, 1)
    if rows > 1:
        cache.batch_repeat_interleave(rows)
    with torch.inference_mode(), pytest.raises(CacheMisuse, match=r"behind the 320 tokens that begin\(\) returned"):
        kvc.model(passed, **cache_option(kvc.model, cache))


def test_the_rest_may_come_in_pieces_and_go_beyond_the_prompt(kvc: KVCManager, ids: Any) -> None:
    more = torch.cat([ids, ids[:, :9]], dim=1)
    cache = kvc.get_cache_ids(ids)
    with torch.inference_mode():
        plain = kvc.model(more, logits_to_keep=1).logits
        cache.begin()
        for first, last in ((LOADED, LOADED + 2), (LOADED + 2, PROMPT + 3), (PROMPT + 3, PROMPT + 9)):
            out = kvc.model(more[:, first:last], logits_to_keep=1, **cache_option(kvc.model, cache))
    assert torch.allclose(out.logits, plain, atol=1e-5) and cache.result.used_tokens == LOADED


def test_a_batch_may_go_on_with_other_tokens_in_some_of_its_rows(kvc: KVCManager, ids: Any) -> None:
    rows = torch.cat([ids, ids + 1])
    rows[:, :LOADED] = ids[:, :LOADED]
    cache = kvc.get_cache_ids(ids)
    with torch.inference_mode():
        held = cache.begin()
        cache.batch_repeat_interleave(2)
        got = kvc.model(rows[:, held:], logits_to_keep=1, **cache_option(kvc.model, cache)).logits
        assert torch.allclose(got, kvc.model(rows, logits_to_keep=1).logits, atol=1e-5)


# --- rows of different lengths ---


def padded_rows(ids: Any, lengths: list[int], common: int) -> tuple[Any, Any]:
    """Prompts of these lengths, padded on the left, which part behind ``common`` tokens."""
    rows = [ids[0, :length].clone() for length in lengths]
    for number, row in enumerate(rows):
        row[common:] = (row[common:] + number) % 1000 + 3
    width = max(lengths)
    padded = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    mask = torch.stack([torch.arange(width) >= width - length for length in lengths]).long()
    return padded, mask


@pytest.mark.brief("0-lengths1-325-320")
@pytest.mark.parametrize(
    ("lengths", "common", "used"),
    [
        ([PROMPT, PROMPT - 9], 200, 200),
        ([PROMPT - 9, PROMPT], 325, 320),
        ([PROMPT, PROMPT - 30, PROMPT - 1], 150, 150),
        ([PROMPT, 3], 100, 100),
        ([250, 100], 100, 100),
    ],
)
@pytest.mark.parametrize("more", [0, 6])
def test_rows_of_different_lengths_are_served_what_they_share(
    kvc: KVCManager, ids: Any, lengths: list[int], common: int, used: int, more: int
) -> None:
    padded, mask = padded_rows(ids, lengths, common)
    padded = torch.nn.functional.pad(padded, (more, 0))
    mask = torch.nn.functional.pad(mask, (more, 0))
    options = {"attention_mask": mask, "max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True}
    plain = generate(kvc, padded, None, **options)
    cache = kvc.get_cache_ids(ids)
    with ComputedTokens(kvc.model) as computed:
        got = generate(kvc, padded, cache, **options)
    assert computed.passes[0] == max(lengths) - used and cache.result.used_tokens == used
    assert torch.equal(got.sequences, plain.sequences)
    assert torch.allclose(torch.stack(got.logits), torch.stack(plain.logits), atol=1e-4)
    assert len(cache.tokens()) == 0, "its columns are other tokens in each row: none is stored"
    beams = {"attention_mask": mask, "max_new_tokens": 6, "num_beams": 2}
    assert torch.equal(generate(kvc, padded, kvc.get_cache_ids(ids), **beams), generate(kvc, padded, None, **beams))


@pytest.mark.parametrize("name", ["Gemma 3", "Falcon-H1"])
def test_with_windows_or_states_rows_of_different_lengths_are_computed_whole(name: str, ids: Any) -> None:
    if not known(name):
        pytest.skip("this transformers has no such family, or its states in another form")
    model, prompt = build(name), ids[:, : 6 * BLOCK + 5]
    padded, mask = padded_rows(prompt, [101, 92], 60)
    with manager(model, None) as kvc:
        kvc.add_blocks_ids(prompt)
        cache = kvc.get_cache_ids(prompt)
        with ComputedTokens(model) as computed:
            got = generate(kvc, padded, cache, attention_mask=mask, max_new_tokens=8)
        assert torch.equal(got, generate(kvc, padded, None, attention_mask=mask, max_new_tokens=8))
        assert computed.passes[0] == 101 and "rows of different lengths" in cache.result.unused_tokens
