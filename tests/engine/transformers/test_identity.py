"""What is in a name: digests that change when the numbers would, and models we refuse."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.engine.transformers.families import build  # noqa: E402

from skymemory import KVCManager  # noqa: E402
from skymemory.engine.transformers.identity import model_identity, tokenizer_digest, weights_digest  # noqa: E402
from skymemory.engine.transformers.models import build_small  # noqa: E402
from skymemory.engine.transformers.probe import check_supported, probe_layout  # noqa: E402
from skymemory.engine.transformers.releases import TRIED_TRANSFORMERS  # noqa: E402
from skymemory.errors import InvalidInput, UnsupportedModel  # noqa: E402

pytestmark = pytest.mark.engine

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def test_the_layout_is_what_the_model_writes(model: Any) -> None:
    layout, states = probe_layout(model, 64)
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.block_tokens) == (3, 2, 16, 64)
    assert layout.dtype == "float32" and not states
    assert probe_layout(build_small(dtype="bfloat16"), 64)[0].dtype == "bfloat16"


def test_the_weights_digest_sees_a_single_bit() -> None:
    model = build_small()
    before = weights_digest(model)
    assert before == weights_digest(build_small()) != weights_digest(build_small(seed=1))
    weight = model.model.layers[1].mlp.up_proj.weight.data
    weight.view(torch.int32)[3, 5] ^= 1
    assert weights_digest(model) != before
    weight.view(torch.int32)[3, 5] ^= 1
    assert weights_digest(model) == before


def test_the_weights_digest_sees_names_and_shapes() -> None:
    one, other = torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 4, bias=False)
    other.weight.data = one.weight.data.reshape(4, 2)
    assert weights_digest(one) != weights_digest(other)
    assert weights_digest(torch.nn.ModuleDict({"a": one})) != weights_digest(torch.nn.ModuleDict({"b": one}))


def test_the_weights_digest_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skymemory.engine.transformers.identity._PIECE_BYTES", 1000)
    assert weights_digest(build_small()) == weights_digest(build_small())


def test_the_model_identity_is_the_same_wherever_it_was_loaded_from(tmp_path: Any) -> None:
    model = build_small()
    model.save_pretrained(tmp_path / "here")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "here")
    assert model_identity(again) == model_identity(model)
    assert weights_digest(again) == weights_digest(model)
    assert model_identity(build_small(vocab_size=1030)) != model_identity(model)
    if hasattr(again.config, "rope_parameters"):
        again.config.rope_parameters["rope_theta"] = 5e5
    else:  # before transformers 5
        again.config.rope_theta = 5e5
    assert model_identity(again) != model_identity(model)


def test_experts_that_a_user_registered_are_in_the_identity() -> None:
    moe = pytest.importorskip("transformers.integrations.moe", reason="before transformers 5")
    if not hasattr(moe, "ExpertsInterface"):
        pytest.skip("this transformers has one way to compute experts")
    model = build("Qwen3 MoE")
    names = set()
    moe.ExpertsInterface.register("otherwise", moe.batched_mm_experts_forward)
    for implementation in ("eager", "grouped_mm", "batched_mm", "otherwise"):
        model.set_experts_implementation(implementation)
        names.add(model_identity(model))
    assert len(names) == 2, "what transformers brings computes the same"


def test_the_tokenizer_digest_does_not_see_what_it_was_used_for_last(tokenizer: Any) -> None:
    before = tokenizer_digest(tokenizer)
    shorter = copy.deepcopy(tokenizer)
    shorter("a text of several tokens", truncation=True, max_length=2)
    assert tokenizer_digest(shorter) == before
    padded = copy.deepcopy(tokenizer)
    padded(["one", "and another one"], padding=True)
    assert tokenizer_digest(padded) == before


def test_the_tokenizer_digest_sees_its_special_tokens(tokenizer: Any) -> None:
    from skymemory.engine.transformers.models import train_tokenizer

    again = train_tokenizer(1024)
    assert tokenizer_digest(again) == tokenizer_digest(tokenizer)
    again.add_tokens(["<sky>"])
    assert tokenizer_digest(again) != tokenizer_digest(tokenizer)
    assert tokenizer_digest(None) == "token ids"


def unsupported() -> list[tuple[str, Any]]:
    mamba = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=128)
    t5 = transformers.T5Config(d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=16, vocab_size=128)
    dynamic = transformers.LlamaConfig(
        **TINY, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    as_before_5 = transformers.LlamaConfig(**TINY, rope_scaling={"type": "dynamic", "factor": 2.0})
    return [
        ("there must be one|no standard cache", transformers.MambaForCausalLM(mamba)),
        ("decoder-only", transformers.T5ForConditionalGeneration(t5)),
        ("length of the text", transformers.LlamaForCausalLM(dynamic)),
        ("length of the text", transformers.LlamaForCausalLM(as_before_5)),
    ]


def test_models_we_cannot_serve_are_refused_loudly() -> None:
    for reason, model in unsupported():
        with pytest.raises(UnsupportedModel, match=reason):
            KVCManager(model.eval())


@pytest.mark.skipif(int(transformers.__version__[0]) < 5, reason="this transformers has one RoPE for all layers")
@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
def test_a_rope_of_some_layers_alone_is_seen(kind: str) -> None:
    of_kinds = {name: {"rope_type": "default", "rope_theta": 1e4} for name in ("sliding_attention", "full_attention")}
    of_kinds[kind] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**TINY, head_dim=8, layer_types=list(of_kinds), rope_parameters=of_kinds)
    )
    with pytest.raises(UnsupportedModel, match="length of the text"):
        check_supported(model)


@pytest.mark.parametrize("implementation", ["quantized", "static", "offloaded"])
def test_other_caches_are_refused(implementation: str) -> None:
    model = build_small()
    model.generation_config.cache_implementation = implementation
    with pytest.raises(UnsupportedModel, match="cache_implementation"):
        check_supported(model)


def test_a_model_in_training_that_drops_out_is_refused() -> None:
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=128, n_positions=64)
    ).train()
    with pytest.raises(InvalidInput, match="eval"):
        check_supported(model)


def test_models_of_other_families_are_served() -> None:
    gpt2 = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=128, n_positions=128)
    families = [
        transformers.GPT2LMHeadModel(gpt2),
        transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TINY)),
        transformers.MistralForCausalLM(transformers.MistralConfig(**TINY, sliding_window=None)),
    ]
    ids = torch.randint(3, 120, (1, 50), generator=torch.Generator().manual_seed(1))
    for model in families:
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        without = model.eval().generate(ids, **options)
        with KVCManager(model, block_tokens=8) as kvc:
            kvc.add_blocks_ids(ids)
            cache = kvc.get_cache_ids(ids)
            assert cache.result.cached_tokens == 48
            assert model.generate(ids, past_key_values=cache, **options).tolist() == without.tolist()


def test_an_adapter_must_be_named_where_the_weights_are() -> None:
    model = build_small()
    model.peft_config = {"default": object()}
    with pytest.raises(InvalidInput, match="adapter="):
        KVCManager(model, weights="v1")
    KVCManager(model).close()


def test_a_name_is_no_model() -> None:
    with pytest.raises(InvalidInput, match="from_pretrained"):
        KVCManager("gpt2")  # type: ignore[arg-type]


@pytest.mark.brief()
@pytest.mark.parametrize("version", ["4.56.2", "6.0.0"])
def test_a_transformers_that_nothing_was_tried_with(version: str) -> None:
    code = f"import transformers; transformers.__version__ = {version!r}; from skymemory import KVCManager"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    needed = f"transformers {TRIED_TRANSFORMERS} is needed"
    assert f"MissingExtra: {needed}" in done.stderr and f"found {version}" in done.stderr
