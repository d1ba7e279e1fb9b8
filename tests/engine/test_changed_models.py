"""A model that is changed is another model: its cache is never served from, or stored under, the old one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.engine.generation import BLOCK, manager  # noqa: E402

from skymemory.engine.models import build_small  # noqa: E402
from skymemory.engine.substance import Substance  # noqa: E402
from skymemory.store.memory import MemoryStore  # noqa: E402

pytestmark = pytest.mark.engine


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
}  # fmt: skip


def greedy(model: Any, ids: Any, cache: Any = None) -> list[int]:
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, past_key_values=cache, **options)[0].tolist()


@pytest.mark.parametrize(("change", "named"), [*((change, False) for change in CHANGES), ("in place", True)])
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
            assert kvc.last.cached_tokens == (0 if change == "a hook" else 20 * BLOCK)
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

    with pytest.warns(DeprecationWarning):
        digests = [Substance(packed(seed)).digest() for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.slow
def test_the_digest_is_the_same_in_every_process_and_wherever_it_was_loaded_from(tmp_path: Any) -> None:
    import subprocess
    import sys

    script = (
        "from skymemory.engine.models import build_small;from skymemory.engine.substance import Substance;"
        "m = build_small();d = Substance(m).digest();import sys;m.save_pretrained(sys.argv[1]);"
        "from transformers import AutoModelForCausalLM as A;"
        "print(d, Substance(A.from_pretrained(sys.argv[1])).digest())"
    )
    told = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=120, check=True
    ).stdout.split()[-2:]
    model = build_small()
    greedy(model, torch.arange(3, 30)[None])
    assert told == [Substance(model).digest()] * 2
