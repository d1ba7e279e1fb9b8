"""``skymemory vllm-args``: a command for a shell that the connector accepts; tests/vllm starts vLLM by it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from skymemory.cli.main import main
from skymemory.engine.vllm.settings import ConnectorSettings


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["vllm-args", *words]) == 0
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    return line


def test_a_shell_reads_what_the_connector_reads(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--store", "unix:///run/it's.sock", "--value-tokens", "256", "--queue", "1GiB", "--drain", "500ms"]
    options += ["--wait", "20s"]
    words = shlex.split(printed(capsys, "a model", *options))
    assert words[:3] == ["vllm", "serve", "a model"] and words[-2] == "--kv-transfer-config"
    assert words[3:-2] == ["--shutdown-timeout", "10"], "what waits to be saved when vLLM is stopped is saved first"
    transfer = json.loads(words[-1])
    assert json.loads(printed(capsys, "a model", *options, "--json")) == transfer
    settings = ConnectorSettings.read(transfer.pop("kv_connector_extra_config"))
    assert settings == ConnectorSettings("unix:///run/it's.sock", 256, 1 << 30, 0.5, 20.0)
    assert transfer == {
        "kv_connector": "SkyMemoryConnector",
        "kv_connector_module_path": "skymemory.engine.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }


def test_roles_and_the_module_of_vllm_s_cpu_package(capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(printed(capsys, "m", "--module", "--role", "consumer"))
    assert words[:5] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"]
    assert json.loads(words[6])["kv_role"] == "kv_consumer"


def test_cake_comes_with_the_scheduler_that_every_model_runner_follows(capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(printed(capsys, "m", "--cake"))
    assert words[5:8] == ["--no-async-scheduling", "--scheduler-cls", "skymemory.engine.vllm.CakeScheduler"]


def test_the_default_is_where_the_daemon_listens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYMEMORY_RUN_DIR", "/run/sky")
    extra = json.loads(printed(capsys, "m", "--json"))["kv_connector_extra_config"]
    assert extra == {"store": "unix:///run/sky/store.sock"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--store memory://1GiB", "skymemory store serve 'memory://1GiB' --listen unix:///run/sky.sock"),
        ("--store memory?policy=lru", "belongs to one process"),
        ("--store disk:///tmp/x?budget=1GiB", "belongs to one process"),
        ("--store tiers:///etc/tiers.toml", "belongs to one process"),
        ("--store /run/sky.sock", "unix:///REDIS.sock"),
        ("--store redis://host/first", "DB a number"),
        ("--store tcp://127.0.0.1:7000", "write redis://127.0.0.1:7000"),
        ("--store unix:///s?timeuot=1s", "timeuot"),
        ("--queue much", "queue"),
        ("--queue 0", "above 0"),
        ("--drain long", "drain"),
        ("--value-tokens -1", "value_tokens"),
        ("--role none", "consumer"),
    ],
)
def test_what_the_connector_would_refuse(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm-args", "m", *options.split()]) == 2
    complaint = capsys.readouterr().err
    assert said in complaint and complaint.count("\n") == 1


def test_a_constellation_that_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm-args", "m", "--store", "constellation:///nowhere"]) == 1
    assert "skymemory constellation up" in capsys.readouterr().err


@pytest.mark.brief()
def test_neither_vllm_nor_redis_is_needed() -> None:
    probe = (
        "import sys; sys.modules['redis'] = sys.modules['vllm'] = None\n"
        "from skymemory.cli.main import main; code = main(['vllm-args', 'm', '--store', 'redis://far'])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    assert subprocess.run([sys.executable, "-c", probe], stdout=subprocess.DEVNULL, check=False).returncode == 0
