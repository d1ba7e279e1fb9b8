"""Every family that people run: the same tokens by every way of decoding, and nearly all of it from the cache."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.engine.transformers.families import REFUSED, build, known  # noqa: E402
from tests.engine.transformers.test_uses import ANNOUNCED  # noqa: E402

from skymemory import KVCManager  # noqa: E402
from skymemory.engine.transformers.kv_cache import KNOWS_STATES  # noqa: E402
from skymemory.errors import UnsupportedModel  # noqa: E402

pytestmark = pytest.mark.engine

BLOCK = 8
PROMPT_TOKENS = 75
USES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 3},
    "several answers": {"do_sample": True, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "in chunks": {"prefill_chunk_size": 32},
}


@pytest.fixture(scope="module")
def prompt() -> Any:
    return torch.randint(3, 120, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))


EACH_KIND = {
    "Llama",
    "GPT-2",
    "Bloom",
    "Qwen3 MoE",
    "Gemma 3",
    "gpt-oss",
    "Llama 4",
    "DeepSeek V3",
    "Qwen3-Next",
    "Falcon-H1",
    "LFM2",
}
"""One of every kind that differs for a cache."""
QUICK = {"Llama", "Gemma 3", "DeepSeek V3", "LFM2"}
"""Whole attention, windows, compressed keys, states: all others run with the slow tests."""
LIKE_THEM = {
    "Falcon, ALiBi",
    "GPT-BigCode",
    "OPT",
    "Mistral 0.1",
    "Mistral 0.1, a window shorter than a block",
    "Phi-3",
    "Gemma 2",
    "Gemma 3n",
    "Bamba",
    "Qwen2 with a window",
    "Cohere 2",
    "DeepSeek V2",
    "Granite 4",
    "Nemotron-H",
    "OLMo hybrid",
    "Zamba2",
}
"""The others are in the matrix alone."""


@pytest.fixture(
    scope="module",
    params=[
        *sorted(QUICK),
        *(pytest.param(name, marks=pytest.mark.slow) for name in sorted((EACH_KIND | LIKE_THEM) - QUICK)),
    ],
)
def family(request: pytest.FixtureRequest) -> Any:
    if not known(request.param):
        pytest.skip("this transformers has no such family, or its states in another form")
    return build(request.param)


def answer(model: Any, ids: Any, cache: Any = None, **options: Any) -> Any:
    torch.manual_seed(5)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "do_sample": False, **options}
    return model.generate(ids, past_key_values=cache, **options)


@pytest.mark.brief("Llama")
def test_same_tokens_by_every_use(family: Any, prompt: Any) -> None:
    with KVCManager(family, block_tokens=BLOCK) as kvc:
        kvc.add_blocks_ids(prompt)
        for name, options in USES.items():
            if name == "prompt lookup" and (kvc.states_kept or not ANNOUNCED):
                continue  # transformers refuses it: states cannot be cropped, and old releases want an end token
            without = answer(family, prompt, **options)
            cache = kvc.get_cache_ids(prompt)
            assert cache.result.cached_tokens == PROMPT_TOKENS // BLOCK * BLOCK, name
            assert torch.equal(answer(family, prompt, cache, **options), without), name
            batch = prompt.repeat(2, 1)
            assert torch.equal(answer(family, batch, kvc.get_cache_ids(prompt)), answer(family, batch))
        assert not [name for name in kvc.counters.as_dict() if name.startswith("unused_tokens")]


@pytest.mark.brief("Llama")
def test_every_length_and_a_chat_that_goes_on(family: Any, prompt: Any) -> None:
    with KVCManager(family, block_tokens=BLOCK) as kvc:
        kvc.add_blocks_ids(prompt[:, :50])
        for length in (7, 8, 9, 24, 48, 49, 50, 51, 75):
            ids = prompt[:, :length]
            cache = kvc.get_cache_ids(ids)
            whole = min(length // BLOCK * BLOCK, 48, length - 1)
            found = cache.result.cached_tokens
            assert found == whole or (kvc.states_kept and found <= whole and found % BLOCK == 0)
            assert found == 48 or length < 49
            assert torch.equal(answer(family, ids, cache), answer(family, ids))
        turn = prompt[:, :50]
        for _ in range(4):
            said = answer(family, turn, kvc.get_cache_ids(turn))
            assert torch.equal(said, answer(family, turn))
            added = kvc.add_blocks(said)
            assert added.prefilled_tokens == 0 and added.refused_blocks == 0
            turn = torch.cat([said, prompt[:, :9]], dim=1)
            found = kvc.get_cache_ids(turn).result
            assert found.computed_tokens <= 9 + BLOCK + (1 if kvc.states_kept else 0)


WHY = {
    "Jamba": "other results with a cache" if KNOWS_STATES else "cache|attention",
    "Zamba": "other results with a cache|states" if KNOWS_STATES else "cache|attention",
    "RoBERTa": "counts positions differently",
    "Moshi": "attends beyond the windows" if KNOWS_STATES else "attends beyond the windows|cache|attention",
    "RecurrentGemma": "other results with a cache|cache|attention",
    "Phi-3, LongRoPE": "length of the text",
    "Llama, dynamic RoPE": "length of the text",
    "MiMo V2 Flash": "must be alike",
}


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_and_says_why(name: str) -> None:
    if not known(name):
        pytest.skip("this transformers has no such family")
    with pytest.raises(UnsupportedModel, match=WHY.get(name, "something other than tokens' keys|there must be one")):
        KVCManager(build(name))


@pytest.mark.brief(every=3)
@pytest.mark.skipif(not KNOWS_STATES, reason="this transformers has states in another form")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["Jamba", "Zamba"])
def test_what_passes_over_its_states_is_refused_where_rounding_hides_it(name: str, dtype: str) -> None:
    with pytest.raises(UnsupportedModel, match="ignores its"):
        KVCManager(build(name).to(getattr(torch, dtype)))


def test_what_the_model_itself_raises_of_a_cache_is_a_refusal() -> None:
    config = transformers.ProphetNetConfig(
        vocab_size=128,
        hidden_size=32,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_decoder_attention_heads=4,
        decoder_ffn_dim=64,
    )
    config.is_decoder, config.is_encoder_decoder = True, False
    with pytest.raises(UnsupportedModel, match="decoder_input_ids"):
        KVCManager(transformers.ProphetNetForCausalLM(config).eval())
