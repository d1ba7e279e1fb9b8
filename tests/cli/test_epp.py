"""`skymemory epp`: what it refuses before it listens anywhere, each in one line that says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skymemory.cli import _options
from skymemory.cli.main import main
from skymemory.engine.inputs import small_model_folder
from skymemory.installation import install_command
from skymemory.router.envoy.config import Entrance, bootstrap

ONE = ["--endpoint", "127.0.0.1:8001"]
TOKENIZER = small_model_folder() / "tokenizer.json"
BY_EVENTS = ["--strategy", "precise", "--tokenizer", str(TOKENIZER)]
AT = "backends = ['http://10.0.0.1:8001']"
BY_EVENTS_SET = f"strategy = 'precise'\nprompts.tokenizer = '{TOKENIZER}'"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "in one way"),
        ([*ONE, "--discover", "engines:8000"], "in one way"),
        (["--endpoint", "localhost:8001"], "expected IP:PORT"),
        (["--endpoint", "127.0.0.1"], "expected IP:PORT"),
        (["--discover", "engines"], "expected NAME:PORT"),
        ([*ONE, "--listen", "9002"], "not an address to listen at"),
        ([*ONE, "--health-listen", "127.0.0.1:99999"], "not an address to listen at"),
        ([*ONE, "--strategy", "rondom"], "rondom"),
        ([*ONE, "--option", "gain"], "expected NAME=VALUE"),
        ([*ONE, "--strategy", "chwbl", "--option", "lod_factor=2"], "lod_factor"),
        ([*ONE, "--strategy", "precise"], "--tokenizer PATH"),
        ([*ONE, *BY_EVENTS], "(picker: events_port)"),
        ([*ONE, "--option", "cost=1"], "no strategy has an option 'cost'"),
        ([*ONE, "--strategy", "precise", "--option", "block_tokens=4"], "engines' block size"),
        ([*ONE, "--tls-cert", "x"], "go together"),
        ([*ONE, "--tls-cert", "x", "--tls-key", "y"], "cannot be read"),
        ([*ONE, "--self-signed", "--tls-cert", "x", "--tls-key", "y"], "not both"),
        ([*ONE, "--tokenizer", "/nowhere/at/all"], "no tokenizer"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["epp", *words]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("picker.endpoints = '/nowhere/at/all'", "No such file"),
        (f"{AT}\n{BY_EVENTS_SET}\npicker.events_port = 5557", "picker: model"),
        (f"{AT}\nreplicas.redis = 'memcached://x'", "expected redis://"),
        (f"{AT}\nstrategy = 'random'\nstate = 'x'", "no index that can be kept"),
        (f"{AT}\nstrategy = 'random'\npicker.events_port = 5557", "leave out picker: events_port"),
        (f"{AT}\npicker.fallbacks = -1", "fallbacks: -1: expected a whole number"),
        (f"{AT}\npicker.max_requests = -1", "max_requests: -1"),
        (f"{AT}\npicker.refresh = '0s'", "refresh: expected a time above 0"),
        (f"{AT}\npicker.tls_client_ca = 'x'", "needs tls_cert"),
        ("backends = ['http://engines:8001']", "expected IP:PORT"),
        ("backends = ['https://10.0.0.1:8001']", "an endpoint for Envoy is http://IP:PORT"),
        ("backends = ['http://10.0.0.1:8001']\n[picker]\ndiscover = 'engines:8000'", "in one way"),
        ("backends = ['http://10.0.0.1:8001']\n[picker]\nfallback = 1", "did you mean 'fallbacks'?"),
        ("backends = ['http://10.0.0.1:8001']\n[picker]\nevents_port = 70000", "ports go to 65535"),
        ("backends = ['http://10.0.0.1:8001']\n[admission]\nrule = 'goodput'", "needs `ttft`"),
        ("backends = ['http://10.0.0.1:8001']\n[queue]\nmax_requests = 5", "how many requests make one full"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    assert main(["epp", "--settings", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_a_certificate_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cert.pem"
    file.write_text("-----BEGIN NOTHING-----\n")
    assert main(["epp", *ONE, "--tls-cert", str(file), "--tls-key", str(file)]) == 2
    assert "expected PEM with a certificate" in capsys.readouterr().err


def test_without_the_extra_it_says_which(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    for name in list(sys.modules):
        if name.startswith(
            (
                "skymemory.router.envoy.ext_proc",
                "skymemory.router.envoy.picker_server",
                "skymemory.router.envoy.ext_proc_server",
            )
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "envoy.service.ext_proc.v3.external_processor_pb2", None)
    assert main(["epp", *ONE]) == 1
    assert install_command("envoy", "router") in capsys.readouterr().err


def test_envoys_configuration_is_json_with_one_cluster_for_servers_and_one_for_the_picker() -> None:
    config = bootstrap([Entrance("a", "127.0.0.1:1", endpoints=("127.0.0.1:2", "[::1]:3"), retries=2, picker_tls=True)])
    servers, picker = json.loads(json.dumps(config))["static_resources"]["clusters"]
    assert [servers["name"], picker["name"]] == ["a-servers", "a-picker"]
    hosts = [
        each["endpoint"]["address"]["socket_address"]
        for each in servers["load_assignment"]["endpoints"][0]["lb_endpoints"]
    ]
    assert hosts == [{"address": "127.0.0.1", "port_value": 2}, {"address": "::1", "port_value": 3}]
    assert "transport_socket" in picker and "transport_socket" not in servers
    (limits,) = servers["circuit_breakers"]["thresholds"]
    assert limits["retry_budget"] == {"budget_percent": {"value": 20.0}, "min_retry_concurrency": 3}
    assert servers["outlier_detection"]["max_ejection_percent"] == 50


@pytest.mark.parametrize(("verb", "absent"), [("epp", "zmq"), ("route", "httptools"), ("route", "zmq")])
def test_a_missing_package_is_said_with_what_to_install(
    verb: str, absent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_options, "find_spec", lambda name: None if name == absent else object())
    assert main([verb]) == 1
    said = capsys.readouterr().err
    assert absent in said and "pip install" in said and said.count("\n") == 1
