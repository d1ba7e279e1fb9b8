"""``skymemory doctor --vllm``: each reason why two engines share nothing, from what the connector writes into logs."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.store.real_redis import RedisServer
from tests.store.redis_server.daemons import daemon, serving

from skymemory.cache.tiers.store import TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.cli.main import main
from skymemory.engine import doctor
from skymemory.engine.doctor import examine_vllm
from skymemory.engine.vllm.identity import EngineReport, Seeds
from skymemory.errors import InvalidInput
from skymemory.kv.block import OpaqueLayout
from skymemory.kv.context import CacheContext
from skymemory.store.base import Store
from skymemory.store.host.server import ServedArena
from skymemory.store.memory import MemoryStore

PACKED = "vllm 0.32, 4 layers of 2 heads of 32, 4 x 32 tokens, float32, cpu default vec, NHD, tp 1"


def report(store: str = "memory://1MiB", packed: str = PACKED, **more: Any) -> EngineReport:
    layout = OpaqueLayout(packed, 128, 65536).describe()
    context = {"model": "vllm:llama:aa", "weights": "auto sha256:1", "tokenizer": "token ids", "kv_dtype": "float32"}
    context |= {name: more.pop(name) for name in context if name in more}
    described = CacheContext(**context, layout=layout, block_tokens=128).describe()
    fields: dict[str, Any] = {"vllm": "0.32.0", "skymemory": "0.1.0", "store": store, "role": "kv_both"}
    fields |= {"block_tokens": 32, "value_tokens": 128, "value_bytes": 65536, "longest_tokens": 2048}
    return EngineReport(**fields | more, context=described)


def wrong(*reports: EngineReport, store: str | None = None) -> list[str]:
    """What is not well."""
    examined = examine_vllm({f"log {at}": one for at, one in enumerate(reports, 1)}, store)
    return [f"{one.what}: {one.words}" for one in examined.findings if not one.well]


def logged(caplog: pytest.LogCaptureFixture, one: EngineReport) -> list[str]:
    """As vLLM formats it."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "vllm.skymemory"):
        one.log()
    return [
        f"(EngineCore pid=7) INFO 11-25 09:00:00 [identity.py:1] {record.getMessage()}\n" for record in caplog.records
    ]


def test_a_host_arena_is_described_and_must_hold_a_value(tmp_path: Path) -> None:
    address = f"host://{tmp_path}"
    with ServedArena(tmp_path, 1 << 20):
        examined = examine_vllm({"log": report(address)})
        assert examined.well and "an arena of 1.0 MiB with 0 other clients" in examined.findings[-1].words
        (said,) = wrong(report(address, value_bytes=2 << 20))
        assert "an arena of 1.0 MiB holds no value of 2.0 MiB: serve a larger one" in said
    (said,) = wrong(report(address))
    assert "no owner answers" in said and "skymemory store serve 'host://SIZE?at=" in said


def test_the_last_start_of_a_log_is_read(caplog: pytest.LogCaptureFixture) -> None:
    lines = ["INFO something else\n", *logged(caplog, report(role="kv_consumer")), *logged(caplog, report())]
    assert EngineReport.read(lines) == report()


def test_a_password_is_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    for store, shown in (
        ("redis://user:se:cr@et@host:1/0?timeout=1s", "redis://user:***@host:1/0?timeout=1s"),
        ("unix://:secret@/run/sky.sock", "unix://:***@/run/sky.sock"),
        ("redis://host:6379", "redis://host:6379"),
        ("unix:///run/a:b@c.sock", "unix:///run/a:b@c.sock"),
    ):
        found = EngineReport.read(logged(caplog, report(store)))
        assert found == report(shown)
    assert "--store" in wrong(report("redis://:***@host"))[0]


def test_a_store_that_hangs_at_opening_ends_in_a_sentence_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that opens later is closed. The other store is tried all the same."""
    goes_on, closed, real = threading.Event(), threading.Event(), doctor.open_store

    def hanging(address: str) -> Store:
        store = real(address)
        if address == "memory://2MiB":
            goes_on.wait(20)
            monkeypatch.setattr(store, "close", closed.set)
        return store

    monkeypatch.setattr(doctor, "open_store", hanging)
    monkeypatch.setattr(doctor, "OPENING_S", 0.2, raising=False)
    began_s = time.monotonic()
    said = wrong(report("memory://2MiB"), report("memory://1MiB"))
    assert time.monotonic() - began_s < 15
    assert said[0].startswith("store memory://2MiB: the store did not open within 0.2 s") and len(said) == 1
    assert not closed.is_set()
    goes_on.set()
    assert closed.wait(20)


def test_adapters_are_logged_when_they_are_first_requested(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "adapter.safetensors").write_bytes(b"sql")
    lora = SimpleNamespace(lora_int_id=1, lora_name="sql", lora_path=str(tmp_path), load_inplace=False)
    request = SimpleNamespace(
        prompt_embeds=None, prompt_token_ids=[1], resumable=False, lora_request=lora, cache_salt=""
    )
    lines = logged(caplog, report())
    caplog.clear()
    seeds = Seeds(CacheContext("m", "w", "t", "float32", "l"))
    with caplog.at_level(logging.INFO, "vllm.skymemory"):
        assert seeds.of(request) == seeds.of(request)
    lines += [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    one = EngineReport.read(lines)
    assert set(one.adapters) == {"sql"}
    assert wrong(one, replace(one)) == []
    (said,) = wrong(one, replace(one, adapters={"sql": "sql sha256:2", "art": "art sha256:3"}))
    assert said == "adapters of log 1 and log 2: the files of sql differ: nothing of theirs is shared"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "VLLM_LOGGING_LEVEL"),
        (["E skymemory.errors.InvalidInput: kv_load_failure_policy is \"fail\": write …\n"], 'policy is "fail"'),
        (['SkyMemory: engine {"vllm": "0.40"}'], "another release"),
        (['SkyMemory: engine ["vllm"]'], "another release"),
        (["SkyMemory: engine {cut"], "has not started"),
    ],
)  # fmt: skip
def test_logs_without_an_engine(lines: list[str], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        EngineReport.read(lines)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"packed": PACKED.replace("vec", "amx")}, "layout: cpu default vec in log 1, cpu default amx in log 2"),
        ({"packed": PACKED.replace("tp 1", "tp 2")}, "layout: tp 1 in log 1, tp 2 in log 2"),
        ({"packed": PACKED.replace("4 x 32", "8 x 16")}, "layout: 4 x 32 tokens in log 1, 8 x 16 tokens in log 2"),
        ({"packed": "another"}, f"]{PACKED} in log 1, opaque1[tokens=128,bytes=65536]another in log 2"),
        ({"kv_dtype": "bfloat16"}, "kv_dtype: float32 in log 1, bfloat16 in log 2"),
        ({"weights": "auto sha256:2"}, "weights: auto sha256:1 in log 1, auto sha256:2 in log 2"),
        ({"model": "vllm:llama:bb"}, "config.json, or the quantization"),
    ],
)
def test_what_two_engines_differ_in(other: dict[str, Any], said: str) -> None:
    (found,) = wrong(report(), report(**other))
    assert found.startswith("contexts of log 1 and log 2: nothing is shared") and said in found


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        ([{"vllm": "0.40.1"}], "this version was not tested, 0.32 was"),
        ([{"longest_tokens": 100}], "none is longer than 100"),
        ([{"role": "kv_consumer"}, {"role": "kv_consumer"}], "no engine saves"),
        ([{"role": "kv_producer"}, {"role": "kv_producer"}], "no engine loads"),
    ],
)
def test_engines_that_never_hit(engines: list[dict[str, Any]], said: str) -> None:
    (found,) = wrong(*(report(**one) for one in engines))
    assert said in found


def test_one_that_saves_and_one_that_loads_are_well() -> None:
    assert wrong(report(role="kv_producer"), report(role="kv_consumer"), report()) == []


@pytest.fixture
def short() -> Iterator[Path]:
    """A socket's path must be short."""
    import tempfile

    folder = Path(tempfile.mkdtemp())
    yield folder
    shutil.rmtree(folder)


@pytest.mark.brief()
def test_a_daemon_and_the_tiers_behind_it(tmp_path: Path) -> None:
    with daemon(f"tiers:?tier=memory://1MiB&tier=disk://{tmp_path}?budget=8MiB") as path:
        examined = examine_vllm({"a": report(f"unix://{path}"), "b": report(f"unix:{path}")})
        assert examined.well and examined.context["weights"] == "auto sha256:1"
        assert ["(memory, disk); 64.0 KiB loaded in" in one.words for one in examined.findings[-2:]] == [True, True]


def test_nothing_is_left_behind(short: Path) -> None:
    with MemoryStore(1 << 20) as store, serving(store, short) as (path, _, _):
        assert wrong(report(f"unix://{path}")) == []
        assert store.stats()["stored_total"] == 1 and store.stats()["used_bytes"] == 0


@pytest.mark.brief()
def test_two_daemons_share_nothing(short: Path) -> None:
    with daemon("memory://1MiB") as one, daemon("memory://1MiB") as other:
        (said,) = wrong(report(f"unix://{one}"), report(f"unix://{other}"))
        assert said.startswith(f"store unix://{other}: what was stored at unix://{one} is not found here")
        assert wrong(report(f"unix://{one}"), report("unix:///nowhere"), store=f"unix://{other}") == []


@pytest.mark.brief()
def test_a_daemon_that_takes_no_such_value() -> None:
    with daemon("memory://1MiB", "--largest", "40KiB") as path:
        (said,) = wrong(report(f"unix://{path}"))
        assert "it took no value of 64.0 KiB" in said and "--largest" in said


@pytest.mark.brief()
def test_a_tier_that_is_gone_behind_a_daemon(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    try:
        tier = server.url.replace("?", "%3F").replace("&", "%26")
        with daemon(f"tiers:?tier=memory://70KiB&tier={tier}") as path:
            assert wrong(report(f"unix://{path}")) == []
            server.stop()
            (said,) = wrong(report(f"unix://{path}"))
            assert "cannot be deleted everywhere: a tier behind it does not answer" in said
    finally:
        server.stop()


def test_a_tier_that_is_given_up_behind_a_daemon(short: Path) -> None:
    tiers = [(MemoryStore(1 << 20), TierSettings(local=True)), (MemoryStore(1 << 20, name="sky"), TierSettings())]
    with TieredStore(tiers) as store, serving(store, short) as (path, _, _):
        assert wrong(report(f"unix://{path}")) == []
        store.tiers[1].breaker.timed_out(time.monotonic() + 1000)
        (said,) = wrong(report(f"unix://{path}"))
        assert "sky behind the daemon does not answer" in said


def test_a_plain_redis_that_fills_up(tmp_path: Path) -> None:
    import redis

    server = RedisServer(tmp_path)
    try:
        (found,) = [one for one in examine_vllm({"a": report(server.url)}).findings if one.what.startswith("store")]
        assert found.well and found.words.startswith("Redis ") and "allkeys-lru" not in found.words
        client = redis.Redis.from_url(server.url)
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "100mb")
        (found,) = [one for one in examine_vllm({"a": report(server.url)}).findings if one.what.startswith("store")]
        assert "set maxmemory-policy allkeys-lru" in found.words
    finally:
        server.stop()


def test_the_command(tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "one.log", tmp_path / "other.log"
    one.write_text("".join(logged(caplog, report("unix:///nowhere.sock"))))
    other.write_text("".join(logged(caplog, report("unix:///nowhere.sock", kv_dtype="bfloat16"))))
    assert main(["doctor", "--vllm", str(one)]) == 1
    said = capsys.readouterr().out
    assert "WRONG  store unix:///nowhere.sock: redis does not answer" in said and "give --store" in said
    assert main(["doctor", "--vllm", str(one), "--store", "memory://1MiB"]) == 0
    capsys.readouterr()
    assert main(["doctor", "--vllm", str(one), "--vllm", str(other), "--store", "memory", "--json"]) == 1
    assert [each["well"] for each in json.loads(capsys.readouterr().out)["findings"]] == [True, True, False, True]
    for words, complaint in (
        (["--vllm", str(tmp_path / "no.log")], "no.log: No such file"),
        (["--vllm", str(one), "--save", "x"], "--vllm LOG --vllm LOG"),
        (["--vllm", __file__], "test_doctor.py: "),
    ):
        assert main(["doctor", *words]) == 2
        assert complaint in capsys.readouterr().err


@pytest.mark.brief()
def test_a_log_is_read_without_vllm_and_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "log").write_text("".join(logged(caplog, report())))
    probe = (
        "import sys\nfor name in ('vllm', 'torch', 'transformers'): sys.modules[name] = None\n"
        "from skymemory.cli.main import main; sys.exit(main(['doctor', '--vllm', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", probe, str(tmp_path / "log")]
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0
