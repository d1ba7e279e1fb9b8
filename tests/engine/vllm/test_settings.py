"""What the connector's settings refuse, and what makes two engines' blocks different."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skymemory.engine.vllm import identity
from skymemory.engine.vllm.identity import Seeds, folder_digest, weights_digest
from skymemory.engine.vllm.settings import ConnectorSettings, PartOfModel, check_engine, parts_of
from skymemory.errors import InvalidInput
from skymemory.kv.context import CacheContext


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "store is missing"),
        ({"store": "memory://1GiB"}, "skymemory store serve 'memory://1GiB' --listen"),
        ({"store": "disk:///somewhere?budget=1GiB"}, "skymemory store serve 'disk:///somewhere"),
        ({"store": "tiers:?tier=memory://1GiB&tier=redis://a"}, "belongs to one process"),
        ({"store": "tiers:///etc/tiers.toml"}, "belongs to one process"),
        ({"store": "unix:///s", "queue": 0}, "queue"),
        ({"store": "unix:///s", "qeue": "1GiB"}, "queue"),
        ({"store": "unix:///s", "drain": "long"}, "drain"),
        ({"store": "unix:///s", "wait": -1}, "wait: -1: expected a duration"),
    ],
)
def test_settings_that_are_refused(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said.replace("?", r"\?")):
        ConnectorSettings.read(extra)


def test_values_are_whole_blocks() -> None:
    settings = ConnectorSettings.read({"store": "unix:///s", "value_tokens": 96})
    assert [settings.blocks_per_value(block) for block in (16, 32, 96, 128)] == [6, 3, 1, 1]
    with pytest.raises(InvalidInput, match="multiple of vLLM's block size of 64"):
        settings.blocks_per_value(64)


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


class CrossAttentionSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(SimpleNamespace):
    pass


def configuration(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {"policy": "recompute", "pipeline": 1, "speculative": None, "chunked": True}
    fields |= changes
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=fields["policy"]),
        parallel_config=SimpleNamespace(pipeline_parallel_size=fields["pipeline"], tensor_parallel_size=1),
        speculative_config=fields["speculative"],
        scheduler_config=SimpleNamespace(enable_chunked_prefill=fields["chunked"]),
        device_config=SimpleNamespace(device_type=fields.get("device", "cpu")),
        model_config=SimpleNamespace(is_prefix_caching_supported=fields.get("prefixes", True)),
    )


def group(spec: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_spec=spec, layer_names=["model.layers.3"])


def changed(spec: MambaSpec, **changes: object) -> MambaSpec:
    return MambaSpec(**vars(spec) | changes)


FULL = [group(FullAttentionSpec(block_size=32))]
LATENT = [group(MLAAttentionSpec(block_size=16))]
STATES = MambaSpec(block_size=32, mamba_cache_mode="align", num_speculative_blocks=0, num_prefill_checkpoint_blocks=0)
WINDOW = [group(SlidingWindowSpec(block_size=32, sliding_window=128, extra_retained_tokens=0))]


def test_an_engine_that_is_served() -> None:
    check_engine(configuration(), FULL)
    check_engine(configuration(speculative=SimpleNamespace(method="ngram")), FULL)
    check_engine(configuration(), WINDOW + FULL + WINDOW)
    check_engine(configuration(), LATENT)
    check_engine(configuration(chunked=False, device="cuda"), LATENT)
    check_engine(configuration(chunked=False), FULL)
    check_engine(configuration(), [group(STATES), *FULL])
    assert parts_of(WINDOW + FULL + WINDOW) == [PartOfModel((1,)), PartOfModel((0, 2), 128)]
    two_tokens = group(SlidingWindowSpec(block_size=32, sliding_window=2, extra_retained_tokens=0))
    assert parts_of([group(STATES), *FULL, two_tokens, group(STATES)]) == [
        PartOfModel((1,)),
        PartOfModel((2,), 2),
        PartOfModel((0, 3), 2, has_states=True),
    ]


@pytest.mark.parametrize(
    ("changes", "groups", "said"),
    [
        ({"policy": "fail"}, FULL, '"kv_load_failure_policy": "recompute"'),
        ({}, FULL + [group(FullAttentionSpec(block_size=16))], r"blocks of \[16, 32\] tokens"),
        (
            {},
            FULL + [group(CrossAttentionSpec(block_size=32))],
            r"model\.layers\.3 has a cache of vLLM's kind CrossAttentionSpec",
        ),
        ({}, [group(changed(STATES, mamba_cache_mode="none"))], '"none", not at the ends of blocks: write --enable-p'),
        ({}, [group(changed(STATES, num_speculative_blocks=2))], "states of drafted tokens"),
        ({}, [group(changed(STATES, num_prefill_checkpoint_blocks=1))], "checkpoints within blocks"),
        ({}, [group(SlidingWindowSpec(block_size=32, extra_retained_tokens=3))], "for drafting"),
        ({"chunked": False}, LATENT, "VLLM_MLA_DISABLE=1"),
        ({"prefixes": False}, FULL, "computed in one pass"),
        ({}, [], "keeps no keys and values"),
        ({"pipeline": 2}, FULL, "pipeline_parallel_size is 2"),
        ({"speculative": SimpleNamespace(method="eagle")}, FULL, "'eagle'"),
    ],
)
def test_engines_that_are_refused(changes: dict[str, Any], groups: list[Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        check_engine(configuration(**changes), groups)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_a_folder_is_named_by_its_contents_and_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = folder_digest(folder)
    (folder / "README.md").write_text("no weights")
    monkeypatch.setattr(identity, "_PIECE_BYTES", 0)  # a file that is read again reads as empty
    assert folder_digest(folder) == first
    monkeypatch.undo()
    (folder / "model.safetensors").write_bytes(b"other weights")
    other = folder_digest(folder)
    assert other != first
    (folder / "model.safetensors").write_bytes(b"weights")
    assert folder_digest(folder) == first


@pytest.mark.parametrize("how", ["another file in its place", "the same file"])
def test_a_checkpoint_of_the_same_size_and_time_is_another(folder: Path, how: str) -> None:
    path = folder / "model.safetensors"
    first, before = folder_digest(folder), path.stat()
    if how == "the same file":
        path.write_bytes(b"WEIGHTS")
    else:
        (folder.parent / "new").write_bytes(b"WEIGHTS")
        (folder.parent / "new").rename(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns and folder_digest(folder) != first


def test_a_spoilt_memory_of_digests_is_not_asked(folder: Path, tmp_path: Path) -> None:
    first = folder_digest(folder)
    (tmp_path / "cache" / "skymemory" / "digests.json").write_text('["not", "a", "table"]')
    assert folder_digest(folder) == first
    assert isinstance(json.loads((tmp_path / "cache" / "skymemory" / "digests.json").read_text()), dict)


def test_weights_that_are_drawn_are_named_by_their_seed(folder: Path) -> None:
    model = SimpleNamespace(model=str(folder), revision=None, seed=3, trust_remote_code=False)
    assert weights_digest(model, "dummy") == "dummy weights, seed 3"
    assert weights_digest(model, "auto") == f"auto {folder_digest(folder)}"
    assert weights_digest(model, "auto") != weights_digest(model, "bitsandbytes")


def test_a_model_s_own_code_is_part_of_it_where_it_runs(folder: Path) -> None:
    plain, trusted = (SimpleNamespace(model=str(folder), revision=None, trust_remote_code=one) for one in (False, True))
    assert weights_digest(plain, "auto") == weights_digest(trusted, "auto")
    before = weights_digest(plain, "auto")
    (folder / "modeling.py").write_text("scale = 1.0\n")
    once = weights_digest(trusted, "auto")
    (folder / "modeling.py").write_text("scale = 2.0\n")
    assert len({before, once, weights_digest(trusted, "auto")}) == 3
    assert weights_digest(plain, "auto") == before


def a_request(**fields: Any) -> SimpleNamespace:
    request: dict[str, Any] = {"prompt_embeds": None, "prompt_token_ids": [1], "resumable": False, "lora_request": None}
    return SimpleNamespace(**request | {"cache_salt": None} | fields)


def test_tenants_and_adapters_share_nothing(folder: Path) -> None:
    seeds = Seeds(CacheContext("m", "w", "t", "float32", "l"))

    def adapter(number: int = 1, name: str = "sql", inplace: bool = False) -> SimpleNamespace:
        return SimpleNamespace(lora_int_id=number, lora_name=name, lora_path=str(folder), load_inplace=inplace)

    requests = [a_request(), a_request(cache_salt="a"), a_request(cache_salt="b"), a_request(lora_request=adapter())]
    requests += [a_request(lora_request=adapter(), cache_salt="a"), a_request(lora_request=adapter(2, "art"))]
    known = [seeds.of(request) for request in requests]
    assert None not in known and len(set(known)) == len(requests)
    (folder / "model.safetensors").write_bytes(b"trained further")
    assert seeds.of(a_request(lora_request=adapter(inplace=True))) not in known
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    folder.rmdir() if not any(folder.iterdir()) else None
    assert seeds.of(a_request(lora_request=adapter(9, "gone"))) is None or folder.exists()


@pytest.mark.parametrize("fields", [{"prompt_embeds": object()}, {"prompt_token_ids": None}, {"resumable": True}])
def test_requests_whose_tokens_do_not_say_what_is_computed_take_no_part(fields: dict[str, Any]) -> None:
    assert Seeds(CacheContext("m", "w", "t", "float32", "l")).of(a_request(**fields)) is None


def test_requests_of_an_adapter_whose_files_have_changed_take_no_part_until_it_is_loaded_again(folder: Path) -> None:
    def of(name: str = "sql", inplace: bool = False) -> bytes | None:
        adapter = SimpleNamespace(lora_int_id=1, lora_name=name, lora_path=str(folder), load_inplace=inplace)
        return seeds.of(a_request(lora_request=adapter))

    seeds = Seeds(CacheContext("m", "w", "t", "float32", "l"))
    first = of()
    assert first is not None and of() == first
    times = os.stat(folder / "model.safetensors")
    (folder / "new").write_bytes(b"WEIGHTS")
    os.utime(folder / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (folder / "new").rename(folder / "model.safetensors")
    assert of() is None
    seeds.reset()
    assert of() is None, "vLLM has kept the adapter, or not"
    again = of(inplace=True)
    assert again is not None and of() == again
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    folder.rmdir()
    assert of() == again, "it is the one that vLLM has"
