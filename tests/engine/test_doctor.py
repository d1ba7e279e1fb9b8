"""Each answer to "why is my hit rate 0?", provoked; and that every result and log says why."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.contract.hostile_store import HostileStore  # noqa: E402
from tests.engine.transformers.generation import BLOCK, manager  # noqa: E402
from tests.store.real_redis import RedisServer  # noqa: E402

from skymemory import open_store  # noqa: E402
from skymemory.cli.main import main  # noqa: E402
from skymemory.engine.doctor import Examination, examine  # noqa: E402
from skymemory.engine.transformers.models import (  # noqa: E402
    build_small,
    train_tokenizer,
)
from skymemory.store.host.server import ServedArena  # noqa: E402
from skymemory.store.memory import MemoryStore  # noqa: E402

pytestmark = pytest.mark.engine


def wrong(examined: Examination) -> str:
    (found,) = [finding for finding in examined.findings if not finding.well]
    return f"{found.what}: {found.words}"


def test_where_all_is_well_blocks_come_back(model: Any, tokenizer: Any, document: str) -> None:
    examined = examine(model, tokenizer, MemoryStore(), document, block_tokens=BLOCK)
    assert (
        examined.well
        and "48 tokens from memory" in examined.findings[-2].words
        and examined.findings[-1].words == "of 49 tokens 48 were loaded, 48 used, 1 computed"
        and examined.context["block_tokens"] == BLOCK
    )


def test_a_store_that_is_not_there(model: Any, tokenizer: Any, document: str) -> None:
    for address in ("redis://127.0.0.1:9", "tiers:?tier=redis://127.0.0.1:9&tier=redis://127.0.0.1:10%3Fname=b"):
        with open_store(address) as store:
            assert "unreachable" in wrong(examine(model, tokenizer, store, document, block_tokens=BLOCK))


def test_a_host_arena_that_is_too_small_for_a_block(model: Any, tokenizer: Any, document: str, tmp_path: Path) -> None:
    for size_bytes, words in ((10_000, "does not fit"), (2 * 12_800, "refused 1 of 3 blocks")):
        with ServedArena(tmp_path, size_bytes), open_store(f"host://{tmp_path}") as store:
            assert words in wrong(examine(model, tokenizer, store, document, block_tokens=BLOCK))


@pytest.mark.parametrize("command", ["doctor --store", "vllm-args model --store"])
def test_a_host_arena_without_an_owner_or_of_another_release(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*command.split(), f"host://{tmp_path}"]
    assert main(words) == 1
    assert "no owner answers" in (said := capsys.readouterr().err) and "skymemory store serve 'host://SIZE?at=" in said
    with ServedArena(tmp_path, 1 << 20):
        monkeypatch.setattr("skymemory.store.host.client.VERSION", 999)
        assert main(words) == 2
    assert "use one release for both" in capsys.readouterr().err


def test_a_store_that_is_too_small(model: Any, tokenizer: Any, document: str) -> None:
    examined = examine(model, tokenizer, MemoryStore(2 * 12_500), document, block_tokens=BLOCK)
    assert "refused 1 of 3 blocks" in wrong(examined)
    examined = examine(model, tokenizer, MemoryStore(1024), document, block_tokens=BLOCK)
    assert "does not fit" in wrong(examined) and examined.context["block_tokens"] == BLOCK


def test_a_block_that_is_longer_than_any_prompt(model: Any, tokenizer: Any, document: str) -> None:
    examined = examine(model, tokenizer, MemoryStore(), document, block_tokens=model.config.max_position_embeddings)
    assert "smaller blocks" in wrong(examined)


def test_a_folder_that_is_not_there_is_said_before_anything_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--save", "/nosuch/here.json"]) == 2
    assert "no folder '/nosuch'" in capsys.readouterr().err


def test_a_model_that_is_refused(tokenizer: Any, document: str) -> None:
    model = build_small()
    model.generation_config.cache_implementation = "static"
    assert "cache_implementation" in wrong(examine(model, tokenizer, MemoryStore(), document))


def test_a_store_that_does_not_give_back_what_it_took(model: Any, tokenizer: Any, document: str) -> None:
    for fault, why in (("flip", "corrupt"), ("drop", "unreachable")):
        said = wrong(examine(model, tokenizer, HostileStore(fault), document, block_tokens=BLOCK))
        assert "hostile took 3 blocks, and 0 came back" in said and why in said


def test_a_tokenizer_that_puts_a_bos_in_front(model: Any, tokenizer: Any, document: str) -> None:
    examined = examine(model, tokenizer, MemoryStore(), document, block_tokens=BLOCK)
    assert examined.well and "apply_chat_template" in next(
        one.words for one in examined.findings if one.what == "tokenizer"
    )


def test_a_tokenizer_that_says_another_thing_each_time(model: Any, document: str) -> None:
    tokenizer = train_tokenizer(1024)
    tokenizer.backend_tokenizer.model.dropout = 0.5
    assert "no prompt is found again" in wrong(examine(model, tokenizer, MemoryStore(), document, block_tokens=BLOCK))


def test_what_two_computers_differ_in(model: Any, tokenizer: Any, document: str) -> None:
    here = examine(model, tokenizer, MemoryStore(), document, block_tokens=BLOCK).context
    assert examine(model, tokenizer, MemoryStore(), document, here, block_tokens=BLOCK).well
    for options, name in (({"weights": "v2"}, "weights"), ({"adapter": "lora@3"}, "adapter")):
        assert f"differ in {name}" in wrong(
            examine(model, tokenizer, MemoryStore(), document, here, block_tokens=BLOCK, **options)
        )
    others = [
        (model, train_tokenizer(900), {"block_tokens": BLOCK}, "tokenizer: "),
        (model, tokenizer, {"block_tokens": 2 * BLOCK}, "block_tokens: 32 here, 16 there"),
        (
            build_small(vocab_size=1030),
            tokenizer,
            {"block_tokens": BLOCK},
            "model: ",
        ),
        (
            build_small().to(torch.bfloat16),
            tokenizer,
            {"block_tokens": BLOCK},
            "kv_dtype: bfloat16 here, float32 there",
        ),
    ]
    for other, theirs, options, words in others:
        assert words in wrong(examine(other, theirs, MemoryStore(), document, here, **options))
    salted = examine(model, tokenizer, MemoryStore(), document, block_tokens=BLOCK, tenant_salt=b"one").context
    other = {"block_tokens": BLOCK, "tenant_salt": b"two"}
    assert "salt alone" in wrong(examine(model, tokenizer, MemoryStore(), document, salted, **other))


@pytest.mark.slow
@pytest.mark.seeded
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    context = tmp_path / "here.json"
    base = ["doctor", "--dtype", "float32", "--block-tokens", "32"]
    assert main([*base, "--save", str(context), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["context"] == json.loads(context.read_text())
    assert main([*base, "--compare", str(context)]) == 0
    assert main(["doctor", "--block-tokens", "32", "--compare", str(context)]) == 1
    assert "kv_dtype: bfloat16 here, float32 there" in capsys.readouterr().out
    assert main([*base, "--store", "redis://127.0.0.1:9"]) == 1
    assert "WRONG  store" in capsys.readouterr().out
    context.write_text("[]")
    assert main([*base, "--compare", str(context)]) == 2
    assert "--save" in capsys.readouterr().err


def test_results_say_why_nothing_was_found(model: Any, ids: Any) -> None:
    with manager(model, None) as kvc:
        assert kvc.get_cache_ids(ids[:, :5]).result.not_found == "shorter than a block"
        assert kvc.get_cache_ids(ids).result.not_found == "absent" and "absent" in kvc.last.describe()
        kvc.add_blocks_ids(ids[:, :64])
        assert kvc.get_cache_ids(ids).result.not_found == "absent"
        assert kvc.get_cache_ids(ids[:, :64]).result.not_found is None


def test_prompts_that_differ_early_and_what_was_evicted(model: Any, ids: Any) -> None:
    """The second and the fourth of what the guide says it may be."""
    with manager(model, None, MemoryStore(21 * 12_544)) as kvc:
        kvc.add_blocks_ids(ids)
        assert kvc.get_cache_ids(ids).result.cached_tokens == 320
        late, early = ids.clone(), ids.clone()
        late[0, 200], early[0, 0] = 3, 3
        assert kvc.get_cache_ids(late).result.cached_tokens == 192
        said = kvc.get_cache_ids(early).result
        assert (said.cached_tokens, said.not_found) == (0, "absent")
        kvc.add_blocks_ids(ids.flip(1))
        said = kvc.get_cache_ids(ids).result
        assert said.cached_tokens < 320 and said.not_found == "absent"


@pytest.mark.slow
def test_another_constellation(model: Any, ids: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fifth: ``down`` forgets all, and another run directory is another sky."""
    found = []
    for directory in ("one", "two", "one"):
        monkeypatch.setenv("SKYMEMORY_RUN_DIR", str(tmp_path / directory))
        command = [sys.executable, "-m", "skymemory", "constellation"]
        up = [*command, "up", "--base-port", "auto", "--hosts", "1", "--delay", "off"]
        subprocess.run(up, check=True, capture_output=True, timeout=240)
        try:
            with open_store("constellation") as store, manager(model, None, store) as kvc:
                found.append(kvc.get_cache_ids(ids).result.not_found)
                kvc.add_blocks_ids(ids)
                assert kvc.get_cache_ids(ids).result.cached_tokens == 320
        finally:
            subprocess.run([*command, "down"], check=True, capture_output=True, timeout=240)
    assert found == ["absent"] * 3


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("tiers", [False, True])
def test_a_redis_that_goes_and_comes_back_is_reported_once_each(
    model: Any, ids: Any, tiers: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "skymemory")
    monkeypatch.setattr("skymemory.cache.patience.MIN_PATIENCE_S", 5.0)  # on a busy computer 20 ms are an outage
    server = RedisServer(tmp_path)
    url = server.url
    try:
        address = f"tiers:?tier=memory://13KiB&tier={url.replace('?', '%3F')}" if tiers else url
        with open_store(address) as store, manager(model, None, store) as kvc:
            kvc.add_blocks_ids(ids)
            assert kvc.get_cache_ids(ids).result.cached_tokens == 320
            assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
            assert "from redis" in caplog.text
            server.stop()
            caplog.clear()
            for _ in range(6):
                assert kvc.get_cache_ids(ids).result.not_found in ("unreachable", "timeout")
            assert ["does not answer" in examined for examined in warnings(caplog)] == [True]
            server.start()
            until_s = time.monotonic() + 20
            while kvc.get_cache_ids(ids).result.not_found != "absent" and time.monotonic() < until_s:
                time.sleep(0.05)
            assert ["answers again" in examined for examined in warnings(caplog)] == [False, True]
    finally:
        server.stop()
