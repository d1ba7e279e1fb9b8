"""Every verb in an installation without extras: it works, or says in one line which extra is missing."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymemory.cli.main import build_parser

PROBE = Path(__file__).with_name("base_install.py")

COMMANDS = {
    "breakeven": ["breakeven --tokens 512 --json"],
    "cluster down": ["cluster down --run-dir run"],
    "cluster logs": ["cluster logs router --run-dir run"],
    "cluster manifests": ["cluster manifests cluster.toml"],
    "cluster status": ["cluster status --run-dir run"],
    "cluster supervise": ["cluster supervise --run-dir run"],
    "cluster up": ["cluster up cluster.toml --run-dir run"],
    "constellation attach": ["constellation attach"],
    "constellation disable": ["constellation disable 1,1 --run-dir run"],
    "constellation down": ["constellation down --run-dir run"],
    "constellation enable": ["constellation enable 1,1 --run-dir run"],
    "constellation plan": ["constellation plan --out plan.json --host a=127.0.0.1:9000"],
    "constellation revive": ["constellation revive --run-dir run"],
    "constellation rotate": ["constellation rotate --run-dir run"],
    "constellation status": ["constellation status --run-dir run"],
    "constellation up": ["constellation up --run-dir run --satellite mixed --hosts 1"],
    "demo": ["demo", "demo --quick --model small-random"],
    "demo cake": ["demo cake --quick"],
    "demo cells": ["demo cells --settings cells.toml --json"],
    "demo conductor": ["demo conductor --quick --cost nowhere"],
    "demo disagg": ["demo disagg", "demo disagg --engine own", "demo disagg --python /bin/sh --model model"],
    "demo motion": ["demo motion --seconds 0"],
    "demo route": ["demo route --quick"],
    "demo vllm": ["demo vllm", "demo vllm --python /bin/sh", "demo vllm --python /bin/sh --model model"],
    "doctor": ["doctor", "doctor --store memory://1MiB", "doctor --compare file"],
    "epp": ["epp --endpoint 127.0.0.1:1"],
    "figures": ["figures 16"],
    "fit": ["fit --url http://127.0.0.1:1 --shape file"],
    "keys api": ["keys api keys.json tenant"],
    "keys new": ["keys new keys"],
    "keys retire": ["keys retire keys 1"],
    "keys rotate": ["keys rotate keys"],
    "keys show": ["keys show keys"],
    "kv delete": ["kv delete name --store memory://1MiB"],
    "kv get": [
        "kv get name --store memory://1MiB",
        "kv get name --store redis://127.0.0.1:1",
        "kv get name --store rediss://127.0.0.1:1",
    ],
    "kv list": ["kv list --store memory://1MiB"],
    "kv pin": ["kv pin name --store memory://1MiB"],
    "kv put": ["kv put file --store memory://1MiB"],
    "layout": ["layout", "layout --figure 6", "layout --out map.png"],
    "optimise": ["optimise --help"],
    "passes": ["passes --lat 1 --lon 1 --hours 0.1", "passes --lat 1 --lon 1 --tle file"],
    "prefetch": ["prefetch file --store memory://1MiB"],
    "replay": ["replay file --url http://127.0.0.1:1"],
    "reproduce": ["reproduce mooncake --trace nowhere"],
    "route": ["route --check --backend http://127.0.0.1:1", "route --backend http://127.0.0.1:1"],
    "satellite": ["satellite --plan nowhere --host 0"],
    "serve": ["serve", "serve --model small-random", "serve --model model"],
    "shells": ["shells file"],
    "simulate": ["simulate --list", "simulate nowhere.toml"],
    "store serve": ["store serve memory://1MiB --listen unix:///nowhere/socket"],
    "vllm-args": ["vllm-args model --store redis://127.0.0.1:1"],
}
"""Command lines of each verb that get to its heavy imports and end soon."""


def _leaves(parser: argparse.ArgumentParser) -> Iterator[str]:
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield parser.prog.removeprefix("skymemory ")
    for action in inner:
        for each in dict.fromkeys(action.choices.values()):
            yield from _leaves(each)


def test_every_verb_is_run() -> None:
    assert set(COMMANDS) == {*_leaves(build_parser()), "demo"}


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int | None, str]]:
    """Exit status and text of each command line that this run asks for."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "file").write_text("some text\n")
    (folder / "cluster.toml").write_text("[router]\n")
    (folder / "cells.toml").write_text('grid = "2x2"\nlegs = 1\nservers = 1\nvalue = "1KiB"\n')
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    here = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    lines = list(dict.fromkeys(item.callspec.params["line"] for item in here if hasattr(item, "callspec")))
    (folder / "lines.json").write_text(json.dumps([line.split() for line in lines]))
    done = subprocess.run(
        [sys.executable, str(PROBE), "lines.json"], cwd=folder, capture_output=True, text=True, check=True, timeout=300
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {line: (each["status"], each["text"]) for line, each in zip(lines, found, strict=True)}


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("line", [line for each in COMMANDS.values() for line in each])
def test_a_verb_without_its_extra_says_so(line: str, answers: dict[str, tuple[int | None, str]]) -> None:
    status, text = answers[line]
    assert "Traceback" not in text and "ModuleNotFoundError" not in text, text
    assert status in (0, 1, 2), (status, text)


@pytest.mark.parametrize(
    ("line", "extras"),
    [
        ("demo route --quick", "[hf,router]"),
        ("demo disagg --engine own", "[hf,router]"),
        ("demo vllm --python /bin/sh", "[hf]"),
        ("kv get name --store redis://127.0.0.1:1", "[redis]"),
    ],
)
def test_the_extra_is_named(line: str, extras: str, answers: dict[str, tuple[int | None, str]]) -> None:
    assert answers[line][0] == 1 and extras in answers[line][1], answers[line]
