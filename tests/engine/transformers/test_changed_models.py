"""A model that is changed is another model: its cache is never served from, or stored under, the old one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.engine.transformers.families import build  # noqa: E402
from tests.engine.transformers.generation import BLOCK, manager  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.masking_utils import sdpa_mask  # noqa: E402

from skymemory.engine.transformers.identity import Fingerprint  # noqa: E402
from skymemory.engine.transformers.models import build_small  # noqa: E402
from skymemory.errors import CacheMisuse, UnsupportedModel  # noqa: E402
from skymemory.store.memory import MemoryStore  # noqa: E402

pytestmark = pytest.mark.engine

ANNOUNCED = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 17)
"""Whether ``generate`` announces to a cache that it begins."""


class Adapter(torch.nn.Module):
    """A low-rank adapter around a layer, with a scaling and a switch as peft's have them."""

    def __init__(self, base: Any, seed: int) -> None:
        super().__init__()
        self.base_layer = base
        draw = torch.Generator().manual_seed(seed)
        self.lora_A = torch.nn.Parameter(torch.randn(4, base.in_features, generator=draw) / 4)
        self.lora_B = torch.nn.Parameter(torch.randn(base.out_features, 4, generator=draw) / 4)
        self.scaling = {"default": 1.0}
        self._disable_adapters = False

    def forward(self, x: Any) -> Any:
        out = self.base_layer(x)
        return out if self._disable_adapters else out + self.scaling["default"] * (x @ self.lora_A.T @ self.lora_B.T)


def adapted(seed: int = 0) -> Any:
    model = build_small()
    attention = model.model.layers[0].self_attn
    attention.k_proj = Adapter(attention.k_proj, seed)
    return model


def dropping_out() -> Any:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=1024, n_positions=512)
    return transformers.GPT2LMHeadModel(config).eval()


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0] += 0.5


def put_a_hook(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda module, args, out: out * 1.5)


def scale(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.scaling["default"] = 3.0


def switch_off(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj._disable_adapters = True


def wrap(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.v_proj = Adapter(attention.v_proj, 3)


def data(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data * 2


class Sine(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.sin(3 * x)


class Cosine(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.cos(3 * x)


class Steered(torch.nn.Module):
    """Adds a vector that torch does not know of."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.by = inner, torch.zeros(64)

    def forward(self, x: Any) -> Any:
        return self.inner(x) + self.by


def with_mlp(part: Callable[[Any], Any]) -> Any:
    model = build_small()
    model.model.layers[0].mlp = part(model.model.layers[0].mlp)
    return model


def with_activation(kind: type) -> Callable[[Any], Any]:
    def put(model: Any) -> Any:
        model.model.layers[0].mlp.act_fn = kind()
        return model

    return put


def by_numpy(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.weight.detach().numpy()[:] *= -1


def replace_forward(model: Any) -> None:
    part = model.model.layers[0].mlp
    part.forward = lambda x: -3 * type(part).forward(part, x)


def attend_otherwise(model: Any) -> None:
    def attention(module: Any, query: Any, *args: Any, **options: Any) -> Any:
        return sdpa_attention_forward(module, -query, *args, **options)

    transformers.AttentionInterface.register("otherwise", attention)
    transformers.AttentionMaskInterface.register("otherwise", sdpa_mask)
    model.set_attn_implementation("otherwise")


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "in place": (build_small, in_place),
    "its data replaced": (build_small, data),
    "load_state_dict": (build_small, lambda model: model.load_state_dict(build_small(seed=4).state_dict())),
    "assigned": (build_small, lambda model: model.load_state_dict(build_small(seed=4).state_dict(), assign=True)),
    "half": (build_small, lambda model: model.half()),
    "an adapter scaled": (adapted, scale),
    "an adapter switched off": (adapted, switch_off),
    "an adapter added": (build_small, wrap),
    "a norm's epsilon": (build_small, lambda model: setattr(model.model.norm, "variance_epsilon", 0.3)),
    "attention's scaling": (build_small, lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.9)),
    "a hook": (build_small, put_a_hook),
    "in place through .data": (build_small, lambda model: model.model.layers[0].self_attn.v_proj.weight.data.mul_(-1)),
    "in place through numpy": (build_small, by_numpy),
    "a module of another class": (lambda: with_activation(Sine)(build_small()), with_activation(Cosine)),
    "a loose tensor": (lambda: with_mlp(Steered), lambda model: model.model.layers[0].mlp.by.fill_(2)),
    "its configuration": (lambda: build("Mistral 0.1"), lambda model: setattr(model.config, "sliding_window", 5)),
    "an attention of its own": (build_small, attend_otherwise),
    "a forward replaced": (build_small, replace_forward),
}


def greedy(model: Any, ids: Any, cache: Any = None) -> list[int]:
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, past_key_values=cache, **options)[0].tolist()


QUICK = {"in place", "half", "an adapter switched off", "in place through numpy", "a loose tensor"}
"""Weights, types, what modules hold, what no version counts, no parameters: all others run with the slow tests."""


@pytest.mark.brief("an adapter switched off-False")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        *(pytest.param(change, False, marks=() if change in QUICK else pytest.mark.slow) for change in CHANGES),
        ("in place", True),
    ],
)
def test_a_change_is_seen_wherever_it_comes(change: str, named: bool, ids: Any) -> None:
    build, changed = CHANGES[change]
    for moment in ("before asking", "before computing", "before storing"):
        model, store = build(), MemoryStore()
        with manager(model, None, store, weights="v1" if named else None) as kvc:
            kvc.add_blocks_ids(ids[:, :160])
            before = greedy(model, ids)
            if moment == "before asking":
                changed(model)
            cache = kvc.get_cache_ids(ids)
            assert kvc.last.cached_tokens == (0 if moment == "before asking" else 160)
            if moment == "before computing":
                changed(model)
            got = greedy(model, ids, cache)
            if moment == "before storing":
                assert got == before
                changed(model)
            else:
                assert got == greedy(model, ids)
            kvc.add_blocks_ids(ids)
            again = kvc.get_cache_ids(ids)
            assert greedy(model, ids, again) == greedy(model, ids)
            assert kvc.last.cached_tokens == (0 if change in ("a hook", "a forward replaced") else 20 * BLOCK)
        fresh = build()
        with manager(fresh, None, store, weights="v1" if named else None) as kvc:
            assert greedy(fresh, ids, kvc.get_cache_ids(ids)) == before
            assert kvc.last.cached_tokens == 160, "nothing was stored as another's"


def test_a_change_that_is_taken_back_is_none(ids: Any) -> None:
    model = build_small()
    with manager(model, None) as kvc:
        kvc.add_blocks_ids(ids)
        data(model)
        assert kvc.get_cache_ids(ids).result.cached_tokens == 0
        model.load_state_dict(build_small().state_dict())
        assert kvc.get_cache_ids(ids).result.cached_tokens == 20 * BLOCK


def test_a_model_put_in_training_that_drops_out_does_without(ids: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = dropping_out()
    with manager(model, None) as kvc:
        kvc.add_blocks_ids(ids)
        plain = greedy(model, ids)
        model.train()
        cache = kvc.get_cache_ids(ids)
        assert cache.result.failed_blocks == {"unservable model": 20} and "eval" in caplog.text
        greedy(model, ids, cache)
        assert kvc.add_blocks_ids(ids).refused_blocks == 20
        model.eval()
        assert greedy(model, ids, kvc.get_cache_ids(ids)) == plain and kvc.last.cached_tokens == 20 * BLOCK


def test_dropping_out_without_a_module_for_it_is_seen(ids: Any) -> None:
    model = build_small()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with manager(model, None) as kvc:
        kvc.add_blocks_ids(ids)
        model.train()
        assert kvc.get_cache_ids(ids).result.failed_blocks == {"unservable model": 20}
        assert kvc.add_blocks_ids(ids.flip(1)).stored_blocks == 0


def test_a_cache_of_the_model_as_it_was_serves_no_other(ids: Any) -> None:
    """Also where the manager has come to know the model as it is now, and where the cache was begun or used before."""
    model = build_small()
    with manager(model, None) as kvc:
        kvc.add_blocks_ids(ids)
        first, second, used = (kvc.get_cache_ids(ids) for _ in range(3))
        greedy(model, ids, used)
        data(model)
        kvc.get_cache_ids(ids)
        assert greedy(model, ids, first) == greedy(model, ids)
        assert second.begin() == 0, "nothing of it is of use"
        if ANNOUNCED:
            assert greedy(model, ids, used) == greedy(model, ids)


def test_what_two_models_have_decoded_is_stored_as_neithers(ids: Any) -> None:
    """Switched while it decodes, and back before it is stored."""
    model = adapted()
    switch = model.model.layers[0].self_attn.k_proj
    with manager(model, None) as kvc, torch.inference_mode():
        cache = kvc.get_cache_ids(ids)
        step = model(ids, past_key_values=cache)
        said = []
        for at in range(40):
            switch._disable_adapters = 5 < at < 30
            said.append(int(step.logits[0, -1].argmax()))
            step = model(torch.tensor([[said[-1]]]), past_key_values=cache)
        both = torch.cat([ids, torch.tensor([said])], dim=1)
        assert kvc.add_blocks_ids(both).prefilled_tokens >= 20 * BLOCK
        assert greedy(model, both, kvc.get_cache_ids(both)) == greedy(model, both)


def test_a_turn_with_other_weights_that_were_put_back_is_stored_as_neithers(ids: Any) -> None:
    """As averaged or merged weights are put in for one turn: the same tensors are there before and after it."""
    model = build_small()
    weight = model.model.layers[0].self_attn.v_proj.weight
    own, other = weight.data, -weight.data
    with manager(model, None) as kvc, torch.inference_mode():
        cache = kvc.get_cache_ids(ids[:, :160])
        model(ids[:, :160], past_key_values=cache)
        weight.data = other
        model(ids[:, 160:], past_key_values=cache)
        weight.data = own
        assert kvc.add_blocks_ids(ids).prefilled_tokens >= 160, "what the other weights made is not taken"
        assert greedy(model, ids, kvc.get_cache_ids(ids)) == greedy(model, ids)


def test_a_model_made_in_inference_mode_is_watched_too(ids: Any) -> None:
    with torch.inference_mode():
        model = build_small()
    with manager(model, None) as kvc:
        kvc.add_blocks_ids(ids)
        with torch.inference_mode():
            model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
        assert greedy(model, ids, kvc.get_cache_ids(ids)) == greedy(model, ids) and not kvc.last.cached_tokens


def test_a_model_whose_weights_are_gone_is_served_under_no_name(ids: Any) -> None:
    model = build_small()
    with manager(model, None) as kvc:
        kvc.add_blocks_ids(ids)
        weight = model.model.layers[0].mlp.up_proj
        weight.weight = torch.nn.Parameter(weight.weight.to("meta"))
        for _ in range(2):
            assert kvc.get_cache_ids(ids).result.failed_blocks == {"unservable model": 20}
        model.to("meta")
        assert kvc.get_cache_ids(ids).result.failed_blocks == {"unservable model": 20}
    with pytest.raises(UnsupportedModel, match="offloaded"):
        manager(model, None)


def test_autocast_makes_another_cache(ids: Any) -> None:
    model = build_small()
    with manager(model, None) as kvc:
        kvc.add_blocks_ids(ids)
        plain = greedy(model, ids)
        with torch.autocast("cpu", torch.bfloat16):
            low = greedy(model, ids)
            cache = kvc.get_cache_ids(ids)
            assert cache.result.cached_tokens == 0 and greedy(model, ids, cache) == low
        cache = kvc.get_cache_ids(ids)
        assert cache.result.cached_tokens == 20 * BLOCK
        with torch.autocast("cpu", torch.bfloat16):
            assert greedy(model, ids, cache) == low
            kvc.add_blocks_ids(ids)
        assert greedy(model, ids, kvc.get_cache_ids(ids)) == plain


def test_packed_weights_are_in_the_digest() -> None:
    def packed(seed: int) -> Any:
        return torch.ao.quantization.quantize_dynamic(build_small(seed=seed), {torch.nn.Linear}, dtype=torch.qint8)

    digests = [Fingerprint(packed(seed)).digest() for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.slow
def test_the_digest_is_the_same_in_every_process_and_wherever_it_was_loaded_from(tmp_path: Any) -> None:
    import subprocess
    import sys

    script = (
        "from skymemory.engine.transformers.models import build_small;"
        "from skymemory.engine.transformers.identity import Fingerprint;"
        "m = build_small();d = Fingerprint(m).digest();import sys;m.save_pretrained(sys.argv[1]);"
        "from transformers import AutoModelForCausalLM as A;"
        "print(d, Fingerprint(A.from_pretrained(sys.argv[1])).digest())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=280, check=True
    ).stdout.split()[-2:]
    model = build_small()
    greedy(model, torch.arange(3, 30)[None])
    assert ran == [Fingerprint(model).digest()] * 2


def test_a_loop_goes_on_with_a_model_converted_under_its_cache() -> None:
    model = build_small()
    ids = torch.randint(3, 1000, (1, 300), generator=torch.Generator().manual_seed(1))
    with manager(model, None) as kvc:
        kvc.add_blocks(ids)
        cache = kvc.get_cache(ids)
        model(input_ids=ids[:, cache.begin() :], past_key_values=cache)
        model.half()
        with pytest.raises(CacheMisuse, match=r"float16 continues a cache in torch\.float32.*get_cache"):
            model(input_ids=ids[:, :1], past_key_values=cache)
        cache = kvc.get_cache(ids)
        assert model(input_ids=ids[:, cache.begin() :], past_key_values=cache).logits.isfinite().all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_is_tried_again_once_it_has_changed() -> None:
    """Dynamic quantization rounds by the range of all tokens of a pass: what is before depends on what is behind."""
    model = build_small()
    ids = torch.randint(3, 1000, (1, 20 * BLOCK), generator=torch.Generator().manual_seed(1))
    with manager(model, None) as kvc:
        kvc.add_blocks(ids)
        torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
        assert kvc.get_cache(ids).result.failed_blocks == {"unservable model": 20}
        kvc.add_blocks(ids)
        assert greedy(model, ids, kvc.get_cache(ids)) == greedy(model, ids)


def test_an_answer_for_which_experts_were_computed_in_another_way_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``generate`` does it on a GPU, and in 5.0 everywhere."""
    model = build("Qwen3 MoE")
    if getattr(model.config, "_experts_implementation", None) != "grouped_mm":
        pytest.skip("this transformers has one way to compute experts")

    @contextlib.contextmanager
    def decoding() -> Iterator[None]:
        model.set_experts_implementation("batched_mm")
        yield
        model.set_experts_implementation("grouped_mm")

    monkeypatch.setattr(model, "_optimize_model_for_decode", decoding)
    ids = torch.randint(3, 1000, (1, 2 * BLOCK + 3), generator=torch.Generator().manual_seed(1))
    with manager(model, None) as kvc:
        out = model.generate(ids, past_key_values=kvc.get_cache(ids), max_new_tokens=2 * BLOCK, do_sample=False)
        stored = kvc.add_blocks(out)
        assert (stored.stored_blocks, stored.prefilled_tokens) == (4, 0)
        assert model.config._experts_implementation == "grouped_mm"
