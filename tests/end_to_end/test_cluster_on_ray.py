"""`skymemory cluster up --on ray` and sweeps on a Ray cluster of two nodes on this computer, each with its own address.

Whatever is killed, answers are those of one plain engine, and nothing is left.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray does it")

from ray.cluster_utils import Cluster
from tests.end_to_end.test_cluster import PATIENCE_S, Run, run, until
from tests.end_to_end.test_handover import ask, ids_of, prompts, text
from tests.end_to_end.test_serve import serving

pytest.importorskip("skymemory_lab", reason="the laboratory is not installed")

from skymemory_lab.sim.cluster.cells import ClusterCell, run_cell
from skymemory_lab.sim.cluster.setup import ClusterSetup
from skymemory_lab.sim.sweeps import sweep
from skymemory_lab.sim.workload import OpenSource

__all__ = ["run"]  # a fixture
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]
HEAD, OTHER = "127.0.0.2", "127.0.0.3"
CONTENT = """
[store]
serve = "memory://256MiB"
[[instances]]
name = "both"
count = 2
options = ["--cache", "64MiB"]
[router]
listen = "127.0.0.1:0"
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "node_ip_address": HEAD})
        patched.setenv("RAY_ADDRESS", made.address)
        try:
            yield made
        finally:
            made.shutdown()


@pytest.fixture
def second(nodes: Cluster) -> Iterator[Any]:
    """A node that a test may kill."""
    node = nodes.add_node(num_cpus=3, node_ip_address=OTHER)
    nodes.wait_for_nodes()
    yield node
    if node in nodes.worker_nodes:
        nodes.remove_node(node)


def up(run: Run, nodes: Cluster, content: str = CONTENT, *words: str) -> tuple[int, str]:
    run.file.write_text(content, "utf-8")
    code, _, errors = run("up", "--on", "ray", str(run.file), *words)
    return code, errors


def engines(store: str) -> list[int]:
    """Processes of instances with this store."""
    place = store.removeprefix("rediss://")
    running = psutil.process_iter(["cmdline"])
    return [one.pid for one in running if any(place in word for word in one.info["cmdline"] or [])]


def streamed(url: str, ids: list[int]) -> str:
    """A stream's text.

    Raises:
        OSError, http.client.HTTPException: it broke off, or it was refused.
    """
    body = {"model": "small", "prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    said = ""
    with urllib.request.urlopen(f"{url}/v1/completions", json.dumps(body).encode(), timeout=PATIENCE_S) as answer:
        for line in answer:
            if line.strip() == b"data: [DONE]":
                return said
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:  # of a server that was lost in the middle
                    break
                said += "".join(one["text"] for one in event["choices"])
    raise http.client.IncompleteRead(b"")


def test_a_node_is_killed_in_the_middle_and_requests_go_on(run: Run, nodes: Cluster, second: Any) -> None:
    code, errors = up(run, nodes)
    assert code == 0, errors
    services = run.status()["services"]
    store, url = services["store"]["address"], services["router"]["address"]
    (lost,) = (name for name in ("both-1", "both-2") if OTHER in services[name]["address"])
    assert HEAD in store and sum(HEAD in services[name]["address"] for name in ("both-1", "both-2")) == 1
    some = prompts(48, seed=7)
    failed: list[int] = []

    def request(number: int) -> str:
        if number == 12:
            nodes.remove_node(second, allow_graceful=False)
        while True:
            try:
                if number % 2:
                    return streamed(url, some[number])
                return text(ask(url, some[number], 8, model="small"))
            except (OSError, http.client.HTTPException):  # clearly: a client would ask again
                failed.append(number)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(request, range(len(some))))
    with serving("--cache", "64MiB") as (_, alone):
        assert answers == [text(ask(alone, ids, 8)) for ids in some]
    assert len(failed) <= 4 and all(8 <= number <= 16 for number in failed), failed

    until(lambda: run("status")[0] == 0)
    again = run.status()["services"][lost]
    assert HEAD in again["address"] and again["restarts"] == 1 and "was lost" in again["last_end"]
    # It reaches the store by its new way, and the router reaches it.
    assert ask(again["address"], some[0], 8)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    until(lambda: f'url = "{again["address"]}"' in (run.directory / "router.toml").read_text())
    keeper = ids_of(300, seed=9)
    assert len({text(ask(url, keeper, 8, model="small")) for _ in range(4)}) == 1
    code, log, _ = run("logs", lost)
    assert code == 0 and log.count("shares blocks by rediss://:***@") == 2  # both lives, without the password
    assert run("down")[0] == 0 and engines(store) == [] and run.processes() == []
    assert sorted(path.suffix for path in run.directory.iterdir() if path.name != "lock") == [".log"] * 5


def test_what_ends_is_started_again_and_a_killed_supervisor_takes_all_with_it(run: Run, nodes: Cluster) -> None:
    code, errors = up(run, nodes)
    assert code == 0, errors
    state = run.status()
    before, store = state["services"]["both-1"], state["services"]["store"]["address"]

    def instance() -> dict[str, Any]:
        return dict(run.status()["services"]["both-1"])

    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: instance()["restarts"] == 1 and instance()["state"] == "healthy")
    assert instance()["address"] == before["address"] and instance()["last_end"] == "killed by SIGKILL"
    worker = psutil.Process(instance()["pid"]).parent()
    assert worker is not None and "Keeper" in worker.name() + " ".join(worker.cmdline())
    worker.kill()
    until(lambda: instance()["restarts"] == 2 and instance()["state"] == "healthy")
    assert "was lost" in instance()["last_end"]
    assert text(ask(instance()["address"], ids_of(40, seed=1), 8))

    os.kill(state["pid"], signal.SIGKILL)
    until(lambda: engines(store) == [] and run.processes() == [])
    assert "its supervisor is gone" in run("status")[1]
    assert run("down")[0] == 0 and run("status")[0] == 1


def test_a_failed_start_leaves_nothing_and_says_why(run: Run, nodes: Cluster) -> None:
    code, errors = up(run, nodes, CONTENT.replace('"64MiB"]', '"64MiB", "--running", "0"]'))
    assert code == 1 and "did not start (exit code 2)" in errors and "--running 0: expected" in errors
    assert run.processes() == [] and run("status")[0] == 1
    code, errors = up(run, nodes, "[[instances]]\nresources = { GPU = 1 }", "--timeout", "8s")
    assert code == 1 and "both-1 is waiting" in errors and "`ray status`" in errors
    assert run.processes() == [] and run("status")[0] == 1


def test_ctrl_c_while_it_starts_leaves_nothing(run: Run, nodes: Cluster) -> None:
    run.file.write_text(CONTENT, "utf-8")
    process = run.begin("up", "--on", "ray", str(run.file))
    state = run.directory / "cluster-state.json"
    until(lambda: state.exists() and '"starting"' in state.read_text().partition('"both-1"')[2])
    store = next(one["address"] for one in json.loads(state.read_text())["services"] if one["name"] == "store")
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    process.communicate()
    until(lambda: engines(store) == [])
    assert run.processes() == []


def test_a_sweep_has_the_numbers_of_processes(nodes: Cluster, second: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    setup = ClusterSetup(prefill=2, decode=2, sample_s=1.0)
    schedulers = ("random", "kvcache-centric", "load-balance")
    cells = [
        ClusterCell(OpenSource("arxiv", 1.0, 60, seed=seed), setup, scheduler, curves=True)
        for scheduler in schedulers
        for seed in (1, 2)
    ]
    log: list[tuple[int, int]] = []
    on_ray = sweep(run_cell, cells, "ray", jobs=4, progress=lambda *one: log.append(one))
    assert on_ray == sweep(run_cell, cells, "processes", jobs=2)
    assert log == [(done, len(cells)) for done in range(1, len(cells) + 1)]


REPRODUCE = [sys.executable, "-m", "skymemory", "reproduce", "mooncake", "--quick", "--json", "--fig"]


def test_the_verb_has_the_numbers_of_processes_on_ray() -> None:
    environment = {**os.environ, "RAY_ADDRESS": ""}
    on = [
        subprocess.run([*REPRODUCE, "8", "--on", where], capture_output=True, env=environment, text=True, check=True)
        for where in ("processes", "ray")
    ]
    assert json.loads(on[0].stdout) == json.loads(on[1].stdout)


def test_ctrl_c_in_a_sweep_leaves_nothing() -> None:
    sweeping = subprocess.Popen(
        [*(word for word in REPRODUCE if word != "--quick"), "11", "--on", "ray"],
        env={**os.environ, "RAY_ADDRESS": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    started: set[psutil.Process] = set()

    def working() -> bool:
        assert sweeping.poll() is None, sweeping.stderr and sweeping.stderr.read()
        started.update(psutil.Process(sweeping.pid).children(recursive=True))
        lines = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"]) if one in started]
        return any(word.startswith(("ray::run_cell", "ray::capacity")) for line in lines for word in line)

    until(working)
    time.sleep(0.5)
    started.update(psutil.Process(sweeping.pid).children(recursive=True))
    sweeping.send_signal(signal.SIGINT)
    assert sweeping.wait(60) == 130
    sweeping.communicate()
    until(lambda: not [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE])
