"""Whatever a cache is handed to the model with, the tokens are those of no cache; and where it can serve, it does."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import logging
import math
import sys
import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.engine.transformers.families import build, known  # noqa: E402
from tests.engine.transformers.generation import BLOCK, manager  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from skymemory import KVCManager  # noqa: E402
from skymemory.engine.transformers.kv_cache import CacheSource, SkyCache  # noqa: E402
from skymemory.engine.transformers.models import SMALL_SHAPE, build_llama, build_small  # noqa: E402
from skymemory.engine.transformers.prompts import flat_ids, shared_prefix  # noqa: E402
from skymemory.errors import CacheMisuse, InvalidInput  # noqa: E402

pytestmark = pytest.mark.engine

PAD = 0
_RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
ANNOUNCED = _RELEASE >= (5, 17)
"""Whether ``generate`` announces to a cache that it begins."""
FIVE = _RELEASE >= (5, 0)


@pytest.fixture(scope="module")
def uneven() -> Any:
    """A model whose choices turn on single tokens, so that a wrong one shows."""
    return watched(build_small(seed=7))


@pytest.fixture
def kvc(uneven: Any, ids: Any) -> Any:
    with manager(uneven, None, weights="w") as kvc:
        kvc.add_blocks_ids(ids)
        yield kvc


def generate(model: Any, ids: Any, cache: Any = None, **options: Any) -> list[list[int]]:
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "do_sample": False, **options}
    return model.generate(ids, past_key_values=cache, pad_token_id=PAD, **options).tolist()


def unused(kvc: KVCManager) -> dict[str, int]:
    return {name: value for name, value in kvc.counters.as_dict().items() if name.startswith("unused_tokens_total")}


def computed(model: Any, call: Any) -> list[int]:
    """How many tokens each forward pass of ``call`` was given."""
    model.passes.clear()
    call()
    return list(model.passes)


def watched(model: Any) -> Any:
    """``model``, with the tokens of each of its forward passes in ``passes``."""
    model.passes = []
    kind = type(model.model)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("input_ids", args[0] if args else None)
            model.passes.append((given if given is not None else kwargs["inputs_embeds"]).shape[1])
            return super().forward(*args, **kwargs)

    model.model.__class__ = Watched
    return model


def test_generate_computes_only_what_is_behind_the_loaded_tokens(uneven: Any, ids: Any, kvc: KVCManager) -> None:
    plain = generate(uneven, ids)
    cache = kvc.get_cache_ids(ids)
    got: list[Any] = []
    assert computed(uneven, lambda: got.append(generate(uneven, ids, cache))) == [5] + [1] * 9
    assert got == [plain] and unused(kvc) == {}


CALLED = pytest.mark.skipif(not FIVE, reason="this transformers runs chunks past hooks: all of the prompt is computed")
END = pytest.mark.skipif(not ANNOUNCED, reason="prompt lookup of this transformers fails without an end token")


@pytest.mark.brief(
    "{'do_sample': True}", "{'num_beams': 2, 'num_return_sequences': 2}", "{'prompt_lookup_num_tokens': 3}"
)
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True},
        pytest.param({"prompt_lookup_num_tokens": 3}, marks=END),
        pytest.param({"prefill_chunk_size": 50}, marks=CALLED),
        pytest.param({"prefill_chunk_size": 16}, marks=CALLED),
        {"repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_every_way_of_decoding(uneven: Any, ids: Any, kvc: KVCManager, options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    plain = generate(uneven, ids, **options)
    torch.manual_seed(3)
    cache = kvc.get_cache_ids(ids)
    got: list[Any] = []
    passes = computed(uneven, lambda: got.append(generate(uneven, ids, cache, **options)))
    assert got == [plain] and unused(kvc) == {}
    assert sum(passes[: -(-ids.shape[1] // options.get("prefill_chunk_size", 1 << 20))]) <= 5 + 3 + 20


def test_an_assistant(uneven: Any, ids: Any, kvc: KVCManager) -> None:
    assistant = build_small(seed=7)
    plain = generate(uneven, ids)
    got: list[Any] = []
    cache = kvc.get_cache_ids(ids)
    passes = computed(uneven, lambda: got.append(generate(uneven, ids, cache, assistant_model=assistant)))
    assert got == [plain] and passes[0] < 5 + BLOCK + 10


@pytest.mark.parametrize("rows", [2, 3])
def test_a_batch_of_equal_prompts(uneven: Any, ids: Any, kvc: KVCManager, rows: int) -> None:
    batch = ids.repeat(rows, 1)
    got: list[Any] = []
    assert computed(uneven, lambda: got.append(generate(uneven, batch, kvc.get_cache_ids(ids))))[0] == 5
    assert got == [generate(uneven, batch)]


def test_a_batch_of_different_prompts_shares_what_they_share(uneven: Any, ids: Any, kvc: KVCManager) -> None:
    batch = ids.repeat(2, 1)
    batch[1, 100:] = (batch[1, 100:] + 1) % 1000 + 3
    got: list[Any] = []
    assert computed(uneven, lambda: got.append(generate(uneven, batch, kvc.get_cache_ids(ids))))[0] == 325 - 100
    assert got == [generate(uneven, batch)]
    padded = batch.clone()
    padded[1, :9] = PAD
    mask = (padded != PAD).int()
    assert generate(uneven, padded, kvc.get_cache_ids(ids), attention_mask=mask) == generate(
        uneven, padded, attention_mask=mask
    )


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("padding", [1, 7, 400])
@pytest.mark.parametrize("rows", [1, 2])
def test_padding_on_the_left(uneven: Any, ids: Any, kvc: KVCManager, padding: int, rows: int) -> None:
    padded = torch.cat([torch.full((1, padding), PAD), ids], dim=1).repeat(rows, 1)
    mask = torch.cat([torch.zeros((1, padding), dtype=torch.long), torch.ones_like(ids)], dim=1).repeat(rows, 1)
    plain = generate(uneven, padded, attention_mask=mask)
    got: list[Any] = []
    cache = kvc.get_cache_ids(ids)
    passes = computed(uneven, lambda: got.append(generate(uneven, padded, cache, attention_mask=mask)))
    assert got == [plain] and passes[0] == 5


@pytest.mark.brief()
def test_a_cache_of_another_prompt(uneven: Any, ids: Any, kvc: KVCManager, caplog: pytest.LogCaptureFixture) -> None:
    """Also where only tokens differ that are loaded, and what is behind them is the same."""
    caplog.set_level(logging.WARNING, "skymemory")
    for at in (0, 1, 40, 319):
        other = ids.clone()
        other[0, at] = (other[0, at] + 1) % 1000 + 3
        got: list[Any] = []
        passes = computed(
            uneven, lambda other=other, got=got: got.append(generate(uneven, other, kvc.get_cache_ids(ids)))
        )  # type: ignore[misc]
        assert got == [generate(uneven, other)] and passes[0] == 325 - at
        assert "other tokens than it was made for" in caplog.text
        caplog.clear()
        added = kvc.add_blocks_ids(other)
        assert added.prefilled_tokens == 0, "what the model was seen to compute is what is stored"
        assert generate(uneven, other, kvc.get_cache_ids(other)) == generate(uneven, other)


@pytest.mark.brief()
def test_a_shorter_and_a_longer_prompt(
    uneven: Any, ids: Any, kvc: KVCManager, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "skymemory")
    for length in (1, 2, 100, 319, 320, 321):
        assert generate(uneven, ids[:, :length], kvc.get_cache_ids(ids)) == generate(uneven, ids[:, :length])
    longer = torch.cat([ids, ids], dim=1)
    got: list[Any] = []
    assert computed(uneven, lambda: got.append(generate(uneven, longer, kvc.get_cache_ids(ids))))[0] == 325 + 5
    assert got == [generate(uneven, longer)] and not caplog.text


@pytest.mark.skipif(not ANNOUNCED, reason="this transformers does not announce to a cache that generate begins")
def test_a_cache_used_a_second_time(uneven: Any, ids: Any, kvc: KVCManager) -> None:
    cache = kvc.get_cache_ids(ids)
    plain = generate(uneven, ids)
    for _ in range(3):
        assert generate(uneven, ids, cache) == plain
    other = ids.flip(1)
    assert generate(uneven, other, cache) == generate(uneven, other)
    assert generate(uneven, ids, cache, num_beams=2) == generate(uneven, ids, num_beams=2)
    assert generate(uneven, ids, cache) == plain


@pytest.mark.brief()
@pytest.mark.skipif(not ANNOUNCED, reason="this transformers does not announce to a cache that generate begins")
def test_a_chat_goes_on_with_the_cache_of_its_last_turn(uneven: Any, ids: Any, kvc: KVCManager) -> None:
    cache, turn = kvc.get_cache_ids(ids), ids
    for _ in range(4):
        answer = generate(uneven, turn, cache)
        assert answer == generate(uneven, turn)
        turn = torch.cat([torch.tensor(answer), ids[:, :7]], dim=1)
        got: list[Any] = []
        again = computed(uneven, lambda turn=turn, got=got: got.append(generate(uneven, turn, cache)))  # type: ignore[misc]
        assert again[0] == 8 and got == [generate(uneven, turn)], "the answer's last token, and what came behind it"


@pytest.mark.brief("False-{}")
@pytest.mark.skipif(not ANNOUNCED, reason="this transformers does not announce to a cache that generate begins")
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("masked", [True, False])
def test_generate_without_use_cache(
    uneven: Any, ids: Any, kvc: KVCManager, options: dict[str, Any], masked: bool
) -> None:
    """It passes the whole sequence at each step, as the configuration of MPT has it by default."""
    options = {**options, "use_cache": False, "max_new_tokens": 10, "pad_token_id": PAD}
    for prompt in (ids, ids.flip(1)):
        if masked:
            options["attention_mask"] = torch.ones_like(prompt)
        said = []
        for cache in ({}, {"past_key_values": kvc.get_cache_ids(prompt)}):
            torch.manual_seed(3)
            said.append(uneven.generate(prompt, **options, **cache).tolist())
        assert said[0] == said[1]


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}"
    "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def chatty() -> Any:
    """A tokenizer that begins every text with BOS, and has a chat template that does so, too."""
    from tokenizers.processors import TemplateProcessing

    from skymemory.engine.transformers.models import train_tokenizer

    tokenizer = train_tokenizer(1024)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def talker(chatty: Any) -> Any:
    return watched(build_small(seed=7, vocab_size=len(chatty)))


def asked(chatty: Any, messages: list[dict[str, str]]) -> Any:
    return chatty.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


@pytest.mark.slow
@pytest.mark.seeded
def test_a_chat_of_five_turns_computes_what_is_new(talker: Any, chatty: Any, document: str) -> None:
    """A second turn computes its own tokens and at most one block."""
    with manager(talker, chatty) as kvc:
        messages: list[dict[str, str]] = [{"role": "system", "content": document[:700]}]
        before = 0
        for turn in range(5):
            messages.append({"role": "user", "content": f"And what of the {turn}th desk? {document[turn * 90 :][:80]}"})
            inputs = asked(chatty, messages)
            cache = kvc.get_cache(messages)
            got: list[Any] = []
            options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": PAD}
            passes = computed(talker, lambda: got.append(talker.generate(**inputs, past_key_values=cache, **options)))  # noqa: B023
            assert got[0].tolist() == talker.generate(**inputs, **options).tolist()
            assert passes[0] <= inputs["input_ids"].shape[1] - before + BLOCK
            added = kvc.add_blocks(messages) if turn % 2 else kvc.add_blocks(got[0])
            assert added.prefilled_tokens == 0 and unused(kvc) == {}
            answer = chatty.decode(got[0][0, inputs["input_ids"].shape[1] :])
            messages.append({"role": "assistant", "content": answer})
            again = chatty.apply_chat_template(messages, return_dict=True)["input_ids"]
            before = shared_prefix(np.array(again), flat_ids(got[0]))  # text may become other tokens than generated


def test_all_forms_of_a_prompt_are_one(talker: Any, chatty: Any, document: str) -> None:
    messages = [{"role": "user", "content": document[:600]}]
    inputs = asked(chatty, messages)
    with manager(talker, chatty) as kvc:
        kvc.add_blocks(messages)
        blocks = kvc.last_stored.blocks
        padded = {name: torch.nn.functional.pad(value, (5, 0)) for name, value in inputs.items()}
        forms = [messages, tuple(messages), inputs, inputs["input_ids"], inputs["input_ids"][0].tolist(), padded]
        for form in [*forms, dict(inputs), {"sequences": inputs["input_ids"]}]:
            assert kvc.get_cache(form).result.loaded_blocks == blocks
        outcome = kvc.get_cache(messages, add_generation_prompt=False).result
        assert outcome.prompt_tokens < inputs["input_ids"].shape[1]
        answered = [*messages, {"role": "assistant", "content": "Yes."}]
        ids = chatty.apply_chat_template(answered, return_dict=True)["input_ids"]
        assert kvc.get_cache(answered).result.prompt_tokens == len(ids)


@pytest.mark.slow
@pytest.mark.seeded
def test_the_text_of_a_template_costs_a_miss_and_says_so(
    talker: Any, chatty: Any, document: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its BOS comes twice, and the ids of the template have one."""
    caplog.set_level(logging.WARNING, "skymemory")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD}
    with manager(talker, chatty) as kvc:
        for start in range(0, 1200, 100):
            messages = [{"role": "user", "content": document[start : start + 500]}]
            text = chatty.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            inputs = asked(chatty, messages)
            plain = talker.generate(**inputs, **options).tolist()
            for _ in range(2):
                assert talker.generate(**inputs, past_key_values=kvc.get_cache(text), **options).tolist() == plain
                kvc.add_blocks(text)
    assert "two BOS tokens" in caplog.text and "messages" in caplog.text


def test_more_than_tokens_is_computed_whole(uneven: Any, ids: Any, kvc: KVCManager) -> None:
    embeds = uneven.get_input_embeddings()(ids)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}
    plain = uneven.generate(inputs_embeds=embeds, **options).tolist()
    assert uneven.generate(inputs_embeds=embeds, past_key_values=kvc.get_cache_ids(ids), **options).tolist() == plain
    shifted = torch.arange(ids.shape[1])[None] + 3
    with torch.inference_mode():
        without = uneven(ids, position_ids=shifted).logits
        got = uneven(ids, position_ids=shifted, past_key_values=kvc.get_cache_ids(ids)).logits
        assert torch.equal(without, got)
        loss = uneven(ids, labels=ids, past_key_values=kvc.get_cache_ids(ids)).loss
        assert torch.equal(loss, uneven(ids, labels=ids).loss)
        bare = build_small(seed=7)  # transformers records what its own classes compute
        with manager(bare, None, kvc.store, weights="w") as bares:
            bares.add_blocks_ids(ids)
            hidden = bare(ids, output_hidden_states=True, logits_to_keep=1, past_key_values=bares.get_cache_ids(ids))
            assert bares.last.cached_tokens == 320 and hidden.hidden_states[0].shape[1] == ids.shape[1]
    assert {name.partition("{")[0] for name in unused(kvc)} == {"unused_tokens_total"}


def seeing() -> Any:
    """A small model that sees images: 4 patches of 8 x 8, which stand where token 99 is."""
    import transformers

    text = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=99, image_token_index=99)
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(5)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.skipif(not FIVE, reason="this transformers shows the small model no image")
def test_another_image_is_another_prompt() -> None:
    model = seeing()
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 90, (1, 100), generator=draw)
    ids[0, 40:44] = 99
    images = [10 * torch.randn(1, 3, 16, 16, generator=draw) for _ in range(2)]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD}
    with manager(model, None) as kvc:
        for _ in range(2):
            said = []
            for image in images:
                without = model.generate(ids, pixel_values=image, **options).tolist()
                cache = kvc.get_cache_ids(ids)
                assert cache.result.prompt_tokens == 40
                assert model.generate(ids, pixel_values=image, past_key_values=cache, **options).tolist() == without
                kvc.add_blocks_ids(ids)
                said.append(without)
            assert said[0] != said[1], "the images must matter"
        words = ids[:, :40]
        plain = generate(model, words)
        assert generate(model, words, kvc.get_cache_ids(words)) == plain and kvc.last.cached_tokens == 32


def counting_positions() -> Any:
    """A small Qwen2.5-VL: it remembers where the last image left its positions."""
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
        "intermediate_size": 64,
        "fullatt_block_indexes": [1],
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=99,
        video_token_id=98,
        vision_start_token_id=97,
        vision_end_token_id=96,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(4)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.skipif(not ANNOUNCED, reason="this transformers does not announce to a cache that generate begins")
def test_positions_of_an_earlier_image_are_nobodys() -> None:
    model = counting_positions()
    draw = torch.Generator().manual_seed(2)
    ids, words = (torch.randint(3, 90, (1, 100), generator=draw) for _ in range(2))
    ids[0, 40:44] = 99
    image = {"pixel_values": 5 * torch.randn(16, 96, generator=draw), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    with manager(model, None) as kvc, torch.inference_mode():
        kvc.add_blocks_ids(words)
        plain = model(words, logits_to_keep=1).logits
        types = (ids == 99).long()
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False, "pad_token_id": PAD}
        whole = {**options, **image, "mm_token_type_ids": types}
        without = model.generate(ids, **whole).tolist()
        cache = kvc.get_cache_ids(ids)
        assert model.generate(ids, past_key_values=cache, **whole).tolist() == without
        assert int(model.model.rope_deltas) != 0
        got = model(words, past_key_values=kvc.get_cache_ids(words), logits_to_keep=1).logits
        assert torch.allclose(got, plain, atol=1e-4)
        model.model.rope_deltas = torch.tensor([[-2]])
        begun = kvc.get_cache_ids(words)
        got = model(words[:, begun.begin() :], past_key_values=begun, logits_to_keep=1).logits
        assert torch.allclose(got, plain, atol=1e-4)
        longer = torch.cat([torch.tensor(without), words[:, :9]], dim=1)
        types = (longer == 99).long()
        types[:, 44:] = 0
        with pytest.raises(CacheMisuse, match="one for each call"):
            generate(model, longer, cache, mm_token_type_ids=types, **image)


def test_a_token_for_images_that_a_part_of_the_configuration_names() -> None:
    """Phi-4 multimodal: what is behind an image is of it, and the ids alone do not say which."""
    text = {**SMALL_SHAPE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
    part = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    vision = {**part, "num_hidden_layers": 1, "image_size": 28, "crop_size": 28, "patch_size": 14, "image_token_id": 99}
    audio = {
        **part,
        "num_blocks": 1,
        "input_size": 8,
        "ext_pw_out_channel": 32,
        "nemo_conv_channels": 32,
        "depthwise_separable_out_channel": 32,
        "audio_token_id": 98,
    }
    config = transformers.Phi4MultimodalConfig(**text, vision_config=vision, audio_config=audio)
    torch.manual_seed(0)
    with manager(transformers.Phi4MultimodalForCausalLM(config).eval(), None, weights="w") as kvc:
        for media in (98, 99):
            ids = [*range(100, 103 + 2 * BLOCK), media, *range(200, 200 + 3 * BLOCK)]
            assert kvc.add_blocks(ids).blocks == 2
            assert kvc.get_cache(ids).result.prompt_tokens == 2 * BLOCK + 3


def test_a_cache_got_in_inference_mode_serves_outside(uneven: Any, ids: Any, kvc: KVCManager) -> None:
    with torch.inference_mode():
        cache = kvc.get_cache_ids(ids)
    assert generate(uneven, ids, cache) == generate(uneven, ids)


@pytest.mark.brief("Falcon-H1")
@pytest.mark.parametrize("family", ["Qwen3-Next", "LFM2", "Falcon-H1"])
def test_states_got_in_inference_mode_serve_outside(ids: Any, family: str) -> None:
    if not known(family):
        pytest.skip("not in this release of transformers")
    model = build(family)
    plain = generate(model, ids)
    with manager(model, None, weights="w") as kvc:
        with torch.inference_mode():
            used = kvc.get_cache_ids(ids)
            assert generate(model, ids, used) == plain
            kvc.add_blocks_ids(ids)
            loaded = kvc.get_cache_ids(ids)
        assert generate(model, ids, used) == plain
        assert loaded.result.cached_tokens == 320 and generate(model, ids, loaded) == plain
        assert generate(model, ids, used, num_beams=3) == generate(model, ids, num_beams=3)
        assert generate(model, ids, used) == plain, "one row again"


def test_rows_at_other_positions_are_not_stored(uneven: Any, ids: Any) -> None:
    """Keys are stored from the first row; the last one is at the usual positions."""
    usual = torch.arange(ids.shape[1])
    with manager(uneven, None, weights="w") as kvc, torch.inference_mode():
        cache = kvc.get_cache_ids(ids)
        uneven(ids.repeat(2, 1), position_ids=torch.stack([2 * usual + 7, usual]), past_key_values=cache)
        assert kvc.add_blocks_ids(ids).prefilled_tokens == 320, "not from that cache"
        logits = uneven(ids, past_key_values=kvc.get_cache_ids(ids), logits_to_keep=1).logits
        assert torch.allclose(logits, uneven(ids, logits_to_keep=1).logits, atol=1e-4)


def test_what_another_model_put_in_is_not_gone_on_from_as_our_own(ids: Any) -> None:
    ours, other = build_small(seed=7), build_small(seed=8)
    with manager(ours, None, weights="w") as kvc, torch.inference_mode():
        kvc.add_blocks_ids(ids)
        cache, plain = kvc.get_cache_ids(ids), transformers.DynamicCache()
        for held in (cache, plain):
            other(ids[:, :10], past_key_values=held)
        got, wanted = (ours(ids[:, 10:], past_key_values=held, logits_to_keep=1).logits for held in (cache, plain))
        assert torch.allclose(got, wanted, atol=1e-4) and not len(cache.tokens())


def test_a_cache_from_elsewhere_is_for_no_model_here(uneven: Any, ids: Any, kvc: KVCManager) -> None:
    """Whose it was is not known any more, in another process least of all."""
    saved = io.BytesIO()
    torch.save(kvc.get_cache_ids(ids), saved)
    saved.seek(0)
    back = torch.load(saved, weights_only=False)
    assert back.begin() == 0 and generate(uneven, ids, back) == generate(uneven, ids)


def test_a_foreign_cache_that_holds_something_else_is_not_stored(uneven: Any, ids: Any) -> None:
    padded = torch.nn.functional.pad(ids, (7, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (7, 0))
    with manager(uneven, None, weights="w") as kvc:
        for prompt, options in ((padded, {"attention_mask": mask}), (ids.flip(1), {})):
            foreign = transformers.DynamicCache()
            generate(uneven, prompt, foreign, **options)
            with pytest.raises(InvalidInput, match="padded"):
                kvc.add_blocks_ids(ids, foreign)
        foreign = transformers.DynamicCache()
        generate(uneven, ids, foreign)
        assert kvc.add_blocks_ids(ids, foreign).stored_blocks == 20
        assert generate(uneven, ids, kvc.get_cache_ids(ids)) == generate(uneven, ids)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"text": "a prompt"}, "input_ids"),
        ([[1, 2], [3]], "one prompt at a time"),
        ([{"role": "user", "content": "a"}, "b"], "each message"),
        ([1, None], "whole numbers"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(kvc: KVCManager, prompt: Any, said: str) -> None:
    for call in (kvc.get_cache, kvc.add_blocks):
        with pytest.raises(InvalidInput, match=said):
            call(prompt)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_mask_of_any_kind_leaves_the_padding_out(ids: Any, kvc: KVCManager, kind: Any) -> None:
    padded = {
        name: torch.nn.functional.pad(value, (7, 0))
        for name, value in {"input_ids": ids, "attention_mask": torch.ones_like(ids).to(kind)}.items()
    }
    assert kvc.get_cache(padded).result.cached_tokens == 320


def test_hidden_states_that_the_configuration_asks_for_are_of_all_tokens(ids: Any) -> None:
    model = build_small(seed=7)
    with manager(model, None, weights="w") as kvc, torch.inference_mode():
        model.config.output_hidden_states = True
        kvc.add_blocks_ids(ids)
        assert kvc.get_cache_ids(ids).result.cached_tokens == 320
        got = model(ids, past_key_values=kvc.get_cache_ids(ids), logits_to_keep=1).hidden_states
        assert [one.shape[1] for one in got] == [ids.shape[1]] * len(got)


def test_a_token_that_is_none_is_named(ids: Any, kvc: KVCManager) -> None:
    with pytest.raises(InvalidInput, match="token id 5000 is outside"):
        kvc.add_blocks_ids(torch.full_like(ids, 5000))


def test_a_processor_is_as_good_as_its_tokenizer(talker: Any, chatty: Any, document: str) -> None:
    pytest.importorskip("PIL")
    if not ANNOUNCED:
        pytest.skip("processors of this transformers want messages in parts")
    words = copy.deepcopy(chatty)
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(),
        words,
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
    )
    messages = [{"role": "user", "content": document[:600]}]
    with manager(talker, words) as kvc, manager(talker, processor, kvc.store) as processing:
        assert processing.context == kvc.context
        for prompt in (document[:700], messages):
            kvc.add_blocks(prompt)
            assert processing.get_cache(prompt).result.cached_tokens == kvc.get_cache(prompt).result.cached_tokens > 100


def test_a_loop_of_ones_own(uneven: Any, ids: Any, kvc: KVCManager) -> None:
    with torch.inference_mode():
        cache = kvc.get_cache_ids(ids)
        start = cache.begin()
        assert start == 320
        step = uneven(ids[:, start:], past_key_values=cache, use_cache=True)
        said = []
        for _ in range(10):
            said.append(int(step.logits[0, -1].argmax()))
            step = uneven(torch.tensor([[said[-1]]]), past_key_values=cache, use_cache=True)
    assert ids[0].tolist() + said == generate(uneven, ids)[0]
    with pytest.raises(CacheMisuse, match="get_cache"):
        uneven(ids[:, :4], attention_mask=torch.ones((1, 4)), past_key_values=cache)


@pytest.mark.brief()
@pytest.mark.skipif(not ANNOUNCED, reason="before 5.17 a cache serves one generate")
@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_what_is_being_stored_is_not_written_over_by_the_next_generate(
    ids: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name)
    one, other = ids[:, : 6 * BLOCK + 5], torch.cat([ids[:, : 2 * BLOCK], ids[:, 9 * BLOCK :]], dim=1)
    plain = [generate(model, prompt) for prompt in (one, other)]
    with manager(model, None, weights="w") as kvc:
        cache = kvc.get_cache(one)
        generate(model, one, cache)
        read, said = CacheSource.read, []

        def meanwhile(source: CacheSource, index: int, out: memoryview) -> None:
            if not said:
                thread = threading.Thread(target=lambda: said.append(generate(model, other, cache)))
                thread.start()
                thread.join()
            read(source, index, out)

        with monkeypatch.context() as patched:
            patched.setattr(CacheSource, "read", meanwhile)
            assert kvc.add_blocks(one).stored_blocks == 6
        assert said == [plain[1]]
        assert generate(model, one, kvc.get_cache(one)) == plain[0]
        assert kvc.last.cached_tokens == 6 * BLOCK
        assert generate(model, one, cache) == plain[0]


@pytest.mark.brief()
@pytest.mark.skipif(not ANNOUNCED, reason="before 5.17 a cache serves one generate")
@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "LFM2"])
def test_what_another_thread_begins_while_storing_is_kept_apart(
    ids: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other prompt comes when it has been seen what the cache holds, and none of that has been read."""
    model = build(name)
    one, other = ids[:, : 6 * BLOCK + 5], torch.cat([ids[:, : 2 * BLOCK], ids[:, 9 * BLOCK :]], dim=1)
    plain = [generate(model, prompt) for prompt in (one, other)]
    with manager(model, None, weights="w") as kvc:
        cache = kvc.get_cache(one)
        generate(model, one, cache)
        ready, said = KVCManager._ready, []

        def meanwhile(kvc: KVCManager, *args: Any) -> Any:
            if not said:
                thread = threading.Thread(target=lambda: said.append(generate(model, other, cache)))
                thread.start()
                thread.join()
            return ready(kvc, *args)

        with monkeypatch.context() as patched:
            patched.setattr(KVCManager, "_ready", meanwhile)
            kvc.add_blocks(one)
        assert said == [plain[1]]
        kvc.add_blocks(one)
        with torch.inference_mode():
            logits = model(one, past_key_values=kvc.get_cache(one), logits_to_keep=1).logits
            assert kvc.last.cached_tokens == 6 * BLOCK
            assert torch.allclose(logits, model(one, logits_to_keep=1).logits, atol=1e-4)


class Broken(RuntimeError):
    pass


def breaking(monkeypatch: pytest.MonkeyPatch, layer: Any, call: int) -> None:
    """The first matrix of ``layer`` fails at that call, and works from then on."""
    weight = next(part.weight for part in layer.modules() if isinstance(part, torch.nn.Linear))
    linear, calls = torch.nn.functional.linear, iter(range(1, 1000))

    def failing(given: Any, by: Any, bias: Any = None) -> Any:
        if by is weight and next(calls) == call:
            raise Broken
        return linear(given, by, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", failing)


@pytest.mark.brief("Llama")
@pytest.mark.parametrize("name", ["LFM2", "Qwen3-Next", "Llama"])
def test_a_generate_that_failed_is_tried_again_with_its_cache(
    ids: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known(name):
        pytest.skip("this transformers has no such family, or its states in another form")
    model, ids = build(name), ids[:, : 5 * BLOCK + 5]
    longer: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None}
    plain = generate(model, ids, **longer)
    for call in (1, 2, 4):
        with manager(model, None, weights="w") as kvc:
            cache = kvc.get_cache(ids)
            with monkeypatch.context() as broken, pytest.raises(Broken):
                breaking(broken, model.model.layers[-1], call)
                generate(model, ids, cache, **longer)
            kvc.add_blocks(ids)
            assert not ANNOUNCED or generate(model, ids, cache, **longer) == plain
            assert generate(model, ids, kvc.get_cache(ids), **longer) == plain


@pytest.mark.parametrize("name", ["LFM2", "Qwen3-Next", "Llama"])
def test_a_step_that_failed_is_not_tried_again_with_its_cache(
    ids: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known(name):
        pytest.skip("this transformers has no such family, or its states in another form")
    model, ids = build(name), ids[:, : 5 * BLOCK]
    longer = torch.cat([ids, ids[:, :3]], dim=1)
    steps = [ids[:, : 3 * BLOCK], *(ids[:, at : at + 1] for at in range(3 * BLOCK, 5 * BLOCK))]
    with manager(model, None, weights="w") as kvc, torch.inference_mode():
        cache = kvc.get_cache(longer)
        for number, step in enumerate(steps):  # the one that fails would end a block
            with monkeypatch.context() as broken:
                breaking(broken, model.model.layers[-1], 1 if number == BLOCK + 1 else 1000)
                try:
                    model(step, past_key_values=cache, logits_to_keep=1)
                except Broken:
                    with pytest.raises(CacheMisuse, match="failed"):
                        model(step, past_key_values=cache, logits_to_keep=1)
                    break
        else:
            pytest.fail("no step failed")
        kvc.add_blocks(ids)
        assert generate(model, longer, kvc.get_cache(longer)) == generate(model, longer)
        assert kvc.last.cached_tokens == 5 * BLOCK


class FailingCall(TorchFunctionMode):  # type: ignore[misc]
    """The call of torch with this number fails; those of the clock's hook, after the pass has ended, do not count."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self._number, self.calls = number, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if sys._getframe(1).f_code.co_name != "_ends":
            self.calls += 1
            if self.calls == self._number:
                raise Broken
        return function(*args, **kwargs or {})


@pytest.mark.brief()
@pytest.mark.parametrize(
    ("how", "name"),
    [("whole", "Llama"), ("begun", "Llama"), ("two rows", "Llama"), ("begun", "Gemma 3"), ("begun", "Qwen3-Next")],
)
def test_wherever_a_first_pass_fails_another_try_with_its_cache_is_right_or_refused(how: str, name: str) -> None:
    """Each of torch's calls in it, from the guard's own to the last logits; also with windows, and with states."""
    if not known(name):
        pytest.skip(f"this transformers has no {name}")
    model, ids = build(name), torch.randint(3, 60, (1, 4 * BLOCK + 6), generator=torch.Generator().manual_seed(2))

    def ask(cache: Any = None) -> Any:
        at = cache.begin() if how == "begun" and cache is not None else 0
        given = ids[:, at:].expand(2 if how == "two rows" else 1, -1)
        return model(given, past_key_values=cache, logits_to_keep=1).logits

    with manager(model, None, weights="w") as kvc, torch.inference_mode():
        kvc.add_blocks_ids(ids)
        wanted = ask()
        ask(kvc.get_cache_ids(ids))
        with FailingCall(math.inf) as counted:
            ask(kvc.get_cache_ids(ids))
        outcomes = {True: 0, False: 0}
        for number in range(1, counted.calls + 1):
            cache = kvc.get_cache_ids(ids)
            with contextlib.suppress(Broken), FailingCall(number):
                ask(cache)
                continue  # it did not fail: asked again, the prompt would follow itself
            try:
                logits = ask(cache)
            except CacheMisuse:
                outcomes[False] += 1
            else:
                outcomes[True] += 1
                assert torch.allclose(logits, wanted, atol=1e-4), number
        assert sum(outcomes.values()) > 20 and outcomes[True] and bool(outcomes[False]) == (how == "begun")


def test_contents_of_another_model_are_refused(ids: Any) -> None:
    """Whether it has a manager of its own or not; a copy is another one."""
    model, others = build("Llama"), [build("Llama"), build("Llama")]
    with (
        manager(model, None, weights="w") as kvc,
        manager(others[0], None, weights="v"),
        torch.inference_mode(),
    ):
        kvc.add_blocks_ids(ids)
        for other in (*others, copy.deepcopy(model)):
            cache = kvc.get_cache_ids(ids)
            rest = ids[:, cache.begin() :]
            with pytest.raises(CacheMisuse, match="another one"):
                other(rest, past_key_values=cache, logits_to_keep=1)
            assert cache.result.used_tokens == 0
            logits = model(rest, past_key_values=cache, logits_to_keep=1).logits
            assert torch.allclose(logits, model(ids, logits_to_keep=1).logits, atol=1e-4)
        cache = kvc.get_cache_ids(ids)
        model(ids, past_key_values=cache, logits_to_keep=1)
        with pytest.raises(CacheMisuse, match="another one"):
            others[0](ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("kind", ["2-D", "4-D of truth values", "4-D to be added"])
def test_a_mask_that_hides_what_was_begun_is_refused(ids: Any, kind: str) -> None:
    model, width = build("Llama"), ids.shape[1]
    with manager(model, None, weights="w") as kvc, torch.inference_mode():
        kvc.add_blocks_ids(ids)
        for hidden in (0, 10):
            cache = kvc.get_cache_ids(ids)
            start = cache.begin()
            mask = torch.arange(width)[None] >= hidden
            if kind != "2-D":
                places = torch.arange(width)
                mask = (mask & (places[start:, None] >= places))[None, None]
            if kind == "4-D to be added":
                mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
            given: dict[str, Any] = {"attention_mask": mask, "past_key_values": cache, "logits_to_keep": 1}
            if hidden:
                with pytest.raises(CacheMisuse, match="hides"):
                    model(ids[:, start:], **given)
            else:
                logits = model(ids[:, start:], **given).logits
                assert torch.allclose(logits, model(ids, logits_to_keep=1).logits, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_that_do_not_reach_what_was_loaded_are_refused(ids: Any, steps: int) -> None:
    """Those of a prompt that was computed in the same graph are right."""
    model = build("Llama")
    with manager(model, None, weights="w") as kvc:
        plain = model(ids, logits_to_keep=1).logits.sum()
        plain.backward()
        wanted = model.model.layers[0].self_attn.k_proj.weight.grad.clone()
        model.zero_grad()
        model(ids, past_key_values=kvc.get_cache_ids(ids), logits_to_keep=1).logits.sum().backward()
        assert torch.allclose(model.model.layers[0].self_attn.k_proj.weight.grad, wanted, atol=1e-5)
        kvc.add_blocks_ids(ids)
        cache = kvc.get_cache_ids(ids)
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        for _ in range(steps - 1):
            logits = model(ids[:, :1], past_key_values=cache, logits_to_keep=1).logits
        with pytest.raises(CacheMisuse, match="no gradient"):
            logits.sum().backward()


@pytest.mark.parametrize("counted", ["", "attention_mask", "position_ids"])
def test_a_loop_that_has_not_begun_is_stopped(uneven: Any, ids: Any, kvc: KVCManager, counted: str) -> None:
    """It would take what was loaded for contents, and get the answer to five tokens."""
    cache = kvc.get_cache_ids(ids)
    start = cache.result.cached_tokens
    more = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(start, ids.shape[1])[None]}
    with torch.inference_mode(), pytest.raises(CacheMisuse, match="begin"):
        uneven(ids[:, start:], past_key_values=cache, **{name: more[name] for name in more if name == counted})


def test_a_model_that_keeps_no_cache_gets_none(uneven: Any, ids: Any, kvc: KVCManager) -> None:
    cache = kvc.get_cache_ids(ids)
    with torch.inference_mode():
        for _ in range(2):
            uneven(ids, past_key_values=cache, use_cache=False, logits_to_keep=1)
            assert cache.get_seq_length() == 0


def test_types_of_tokens_that_say_something_where_they_are_0(ids: Any) -> None:
    model, types = build("GPT-2"), torch.zeros_like(ids)
    with manager(model, None) as kvc, torch.inference_mode():
        kvc.add_blocks_ids(ids)
        with_types = model(ids, token_type_ids=types, logits_to_keep=1).logits
        cache = kvc.get_cache_ids(ids)
        got = model(ids, token_type_ids=types, logits_to_keep=1, past_key_values=cache).logits
        assert not torch.allclose(with_types, model(ids, logits_to_keep=1).logits, atol=1e-3)
        assert torch.equal(got, with_types)


def test_what_was_put_in_unseen_is_never_stored(uneven: Any, ids: Any, kvc: KVCManager) -> None:
    """By the inner model; then some is taken out, so that as many are left as were seen."""
    cache = kvc.get_cache_ids(ids.flip(1))
    with torch.inference_mode():
        uneven.model(ids[:, :64], past_key_values=cache)
        uneven(ids[:, 100:164], past_key_values=cache)
    cache.crop(-64)
    assert len(cache.tokens()) == 0


def test_the_cache_of_another_model_is_refused(uneven: Any, ids: Any, kvc: KVCManager) -> None:
    for other in (build("Qwen3"), build_llama({**SMALL_SHAPE, "num_hidden_layers": 4})):
        with torch.inference_mode(), pytest.raises(CacheMisuse, match="KVCManager of that model"):
            other(ids, past_key_values=kvc.get_cache_ids(ids))


def test_a_model_and_its_caches_can_be_copied_and_saved(ids: Any) -> None:
    model = build_small(seed=7)
    with manager(model, None) as kvc:
        kvc.add_blocks_ids(ids)
        plain, cache = generate(model, ids), kvc.get_cache_ids(ids)
        twin = copy.deepcopy(model)
        assert generate(twin, ids, kvc.get_cache_ids(ids)) == plain
        with manager(twin, None, kvc.store) as twins:
            assert generate(twin, ids, twins.get_cache_ids(ids)) == plain and twins.last.cached_tokens == 320
        torch.save(model, io.BytesIO())
        torch.save(cache, io.BytesIO())
        assert generate(model, ids, copy.deepcopy(cache)) == generate(model, ids, cache) == plain


def test_a_manager_that_is_gone_leaves_nothing_on_the_model(ids: Any) -> None:
    model = build_small(seed=7)
    with manager(model, None) as kvc:
        kvc.add_blocks_ids(ids)
        for _ in range(3):
            cache = manager(model, None, kvc.store).get_cache_ids(ids)
        assert generate(model, ids, cache) == generate(model, ids), "its cache does without it"
        assert len(cache.tokens()) == 334
        del cache
    gc.collect()
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_a_manager_that_goes_while_its_model_is_called(ids: Any) -> None:
    model = build_small(seed=7)
    plain = generate(model, ids)
    managers = [manager(model, None, weights="w")]

    def goes(*_: object) -> None:
        while managers:
            managers.pop().close()
            gc.collect()

    hook = torch.nn.modules.module.register_module_forward_pre_hook(goes)
    try:
        assert generate(model, ids) == plain and not managers
    finally:
        hook.remove()


def test_closing_while_a_padded_prompt_is_answered(uneven: Any, ids: Any, kvc: KVCManager) -> None:
    padded = torch.nn.functional.pad(ids, (7, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (7, 0))

    class Closing(transformers.StoppingCriteria):  # type: ignore[misc]
        def __call__(self, ids: Any, scores: Any, **options: Any) -> Any:
            if ids.shape[1] == padded.shape[1] + 3:
                kvc.close()
            return torch.zeros(len(ids), dtype=torch.bool)

    got = generate(uneven, padded, kvc.get_cache_ids(ids), attention_mask=mask, stopping_criteria=[Closing()])
    assert got == generate(uneven, padded, attention_mask=mask)


@pytest.mark.brief()
def test_a_compiled_model_is_its_model(ids: Any) -> None:
    model = build_small(seed=7)
    compiled = torch.compile(model, backend="eager")
    with manager(compiled, None) as kvc, torch.inference_mode():
        kvc.add_blocks_ids(ids)
        cache = kvc.get_cache_ids(ids)
        assert generate(compiled, ids, cache) == generate(model, ids) and len(cache.tokens()) == 334
        got = compiled(ids, logits_to_keep=1, past_key_values=kvc.get_cache_ids(ids)).logits
        assert torch.allclose(got, model(ids, logits_to_keep=1).logits, atol=1e-4)


@pytest.mark.brief()
def test_a_model_with_an_adapter_of_peft(ids: Any) -> None:
    peft = pytest.importorskip("peft")
    model = build_small(seed=7)
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**config)).eval()
    with manager(adapted, None) as kvc:
        kvc.add_blocks_ids(ids)
        plain, cache = generate(adapted, ids), kvc.get_cache_ids(ids)
        assert generate(adapted, ids, cache) == plain and len(cache.tokens()) == 334 and unused(kvc) == {}
        cache = kvc.get_cache_ids(ids)
        with adapted.disable_adapter():
            assert generate(adapted, ids, cache) == generate(adapted, ids) != plain
            assert kvc.get_cache_ids(ids).result.cached_tokens == 0
        assert generate(adapted, ids, kvc.get_cache_ids(ids)) == plain and kvc.last.cached_tokens == 320


def test_the_inner_model_is_none_of_our_business(uneven: Any, ids: Any, kvc: KVCManager) -> None:
    """Without a comparison nothing is taken from the cache."""
    with torch.inference_mode():
        without = uneven.model(ids).last_hidden_state
        assert torch.equal(uneven.model(ids, past_key_values=kvc.get_cache_ids(ids)).last_hidden_state, without)


def test_a_call_is_compared_in_a_few_steps_of_python(uneven: Any, kvc: KVCManager) -> None:
    """Every token of an answer passes here: 600 calls are some 100 us, where one layer of a real model takes more."""
    import sys

    from skymemory.engine.transformers.guard import Guard

    cache = kvc.get_cache_ids(torch.randint(3, 1000, (1, 64)))
    assert isinstance(cache, SkyCache) and isinstance(cache.guard, Guard)
    step = {"input_ids": torch.tensor([[5]]), "attention_mask": torch.ones((1, 1)), "past_key_values": cache}
    cache.guard(uneven, (), step)
    cache.reset()
    calls = 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        cache.guard(uneven, (), step)
    finally:
        sys.setprofile(None)
    assert 3 < calls < 600
