"""Prefill and decode apart: two vLLMs by plain configuration, a producer and a consumer of values in one store daemon.

Answers are those of one plain vLLM, token by token, whatever is killed and when.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import statistics
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("skymemory_lab", reason="the laboratory is not installed")

from tests.end_to_end.test_cluster import Run
from tests.store.redis_server.test_daemon import serving
from tests.vllm.server import MODEL, PYTHON, ROOT, Vllm

from skymemory.engine.vllm.settings import transfer_config
from skymemory.store.base import LoadTicket
from skymemory.store.memory import MemoryStore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm does it"),
    pytest.mark.timeout(1200),
]
VALUE, CHUNK = 128, 256
LONG = 15 * VALUE + 10
"""A prompt of eight chunks; the last one completes the last value."""
HAND_OVER = {"do_remote_decode": True}
TAKE_OVER = {"do_remote_prefill": True}
Body = dict[str, Any]


class Watched(MemoryStore):
    """Notes when values were read."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.read_at_s: list[float] = []

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        values = super().complete_load(ticket)
        self.read_at_s += [time.monotonic()] * sum(value is not None for value in values)
        return values


class Engines:
    """A plain vLLM, one that prefills and one that decodes, these two with ``more`` options."""

    def __init__(self, folder: Path, address: str, *more: str) -> None:
        def engine(name: str, role: str = "") -> Vllm:
            options = ["--num-gpu-blocks-override", "400", "--max-num-seqs", "8"]
            options += ["--max-num-batched-tokens", str(CHUNK)]
            if role:
                how = transfer_config({"store": address, "wait": "60s"}, role)
                options += ["--kv-transfer-config", json.dumps(how), *more]
            return Vllm(folder, name, *options, ours=True)

        self.folder, self.address = folder, address
        self.plain, self.prefills, self.decodes = engine("u"), engine("p", "producer"), engine("d", "consumer")

    def each(self) -> tuple[Vllm, ...]:
        return self.plain, self.prefills, self.decodes


@pytest.fixture(scope="module")
def store() -> Iterator[Watched]:
    with Watched(4 << 30) as store:
        yield store


@pytest.fixture(scope="module")
def engines(store: Watched) -> Iterator[Engines]:
    with TemporaryDirectory(prefix="sky-") as name, serving(store, Path(name)) as (path, _, _):
        engines = Engines(Path(name), f"unix://{path}")
        try:
            for each in engines.each():
                each.start()
            for each in engines.each():
                each.wait()
            yield engines
        finally:
            for each in engines.each():
                each.stop()


def a_body(tokens: list[int], max_tokens: int = 16, **more: Any) -> Body:
    fixed = {"model": "small", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {**fixed, "prompt": tokens, "max_tokens": max_tokens, **more}


def drawn(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(5, 500) for _ in range(count)]


def mixed(count: int) -> list[Body]:
    """From one token to several chunks, with shared prefixes, tenants, streams."""
    dice = random.Random(20)
    shared = [drawn(dice, 1200) for _ in range(4)]
    bodies = []
    for number in range(count):
        prefix = dice.choice(shared)[: dice.choice([0, 0, 33, 128, 300, 600, 1200])]
        salt = dice.choice([None, None, "a", "b"])
        body = a_body(prefix + drawn(dice, dice.randrange(1, 150)), dice.choice([1, 4, 16]), stream=number % 3 == 0)
        bodies.append(body if salt is None else {**body, "cache_salt": salt})
    return bodies


def asked(server: Vllm, body: Body) -> list[int]:
    """The tokens of its answer.

    Raises:
        http.client.HTTPException, OSError: it was not answered, or not to the end.
    """
    if not body.get("stream"):
        tokens: list[int] = server.post("/v1/completions", body, 120)["choices"][0]["token_ids"]
        return tokens
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", data, {"Content-Type": "application/json"})
    said: list[int] = []
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.strip() == b"data: [DONE]":
                return said
            if line.startswith(b"data: "):
                said += json.loads(line[6:])["choices"][0]["token_ids"]
    raise http.client.IncompleteRead(b"", None)


def handed_over(server: Vllm, body: Body) -> Body:
    """The first step: what the prefilling engine answers for the second."""
    first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": HAND_OVER}
    params: Body = server.post("/v1/completions", first, 120)["kv_transfer_params"]
    return params


def in_two_steps(engines: Engines, body: Body) -> list[int]:
    return asked(engines.decodes, {**body, "kv_transfer_params": handed_over(engines.prefills, body)})


def at_once(engines: Engines, body: Body, seen: Callable[[], None] = lambda: None, **more: Any) -> list[int]:
    """Both steps together; ``seen`` is called when the first one is answered. If it fails the second goes on alone."""

    def first() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            handed_over(engines.prefills, body)
            seen()

    thread = threading.Thread(target=first)
    thread.start()
    try:
        return asked(engines.decodes, {**body, "kv_transfer_params": {**TAKE_OVER, **more}})
    finally:
        thread.join()


def metrics(server: Vllm) -> Counter[str]:
    """Sums by name."""
    with urllib.request.urlopen(server.metrics_url, timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        if match := re.match(r"(vllm:\w+)(?:\{.*\})? (\S+)$", line):
            name = match[1].removeprefix("vllm:").removeprefix("skymemory_").removesuffix("_total")
            found[name] += float(match[2])
    return found


def grown(server: Vllm, before: Counter[str]) -> Counter[str]:
    now = metrics(server)
    now.subtract(before)
    return now


def until(true: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
    end_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end_s, what
        time.sleep(0.02)


def test_two_hundred_requests_are_answered_as_by_one_engine_and_decoded_from_what_the_other_stored(
    engines: Engines,
) -> None:
    bodies = mixed(200)
    with ThreadPoolExecutor(8) as pool:
        plain = list(pool.map(lambda body: asked(engines.plain, body), bodies))
        before, before_p = metrics(engines.decodes), metrics(engines.prefills)
        answers = list(pool.map(lambda body: in_two_steps(engines, body), bodies))
    assert answers == plain
    decodes, prefills = grown(engines.decodes, before), grown(engines.prefills, before_p)
    values = sum((len(body["prompt"]) - 1) // VALUE for body in bodies)
    assert (decodes["external_prefix_cache_hits"] + decodes["prefix_cache_hits"]) / VALUE >= values
    assert decodes["waited_values"] * VALUE >= decodes["external_prefix_cache_hits"] > 100 * VALUE, decodes
    assert decodes["recomputed_tokens"] == decodes["waits_given_up"] == decodes["failed_loads"] == 0, decodes
    assert prefills["saved_values"] > 100 and decodes["saved_values"] == 0 and decodes["lookups"] == 0


def test_values_are_loaded_while_the_other_engine_still_computes(engines: Engines, store: Watched) -> None:
    """When the prompt is computed at most a chunk of it is left to move, in the median of seven prompts."""
    dice = random.Random(21)
    bodies = [a_body(drawn(dice, LONG)) for _ in range(7)]
    plain = [asked(engines.plain, body) for body in bodies]
    left, not_counted = [], []
    for body, expected in zip(bodies, plain, strict=True):
        store.read_at_s.clear()
        before = metrics(engines.decodes)
        ended: list[tuple[float, float]] = []

        def seen(ended: list[tuple[float, float]] = ended, before: Counter[str] = before) -> None:
            ended.append((time.monotonic(), grown(engines.decodes, before)["waited_values"]))

        assert at_once(engines, body, seen) == expected
        decodes = grown(engines.decodes, before)
        assert decodes["waited_values"] == 15 and decodes["external_prefix_cache_hits"] == 15 * VALUE
        assert decodes["waits_given_up"] == decodes["recomputed_tokens"] == 0
        ((ended_s, counted),) = ended
        left.append(sum(at_s > ended_s for at_s in store.read_at_s))
        not_counted.append(15 - counted)
    print(f"\nvalues of 15 left when the prefill is answered: {left}; not counted by then: {not_counted}")
    assert statistics.median(left) <= CHUNK // VALUE and statistics.median(not_counted) <= CHUNK // VALUE
    assert max(left) < 15, "none overlapped"


def test_both_steps_at_once_of_eight_requests_at_a_time(engines: Engines) -> None:
    bodies = [{**body, "cache_salt": "at once"} for body in mixed(64)]
    with ThreadPoolExecutor(8) as pool:
        plain = list(pool.map(lambda body: asked(engines.plain, body), bodies))
        before = metrics(engines.decodes)
        assert list(pool.map(lambda body: at_once(engines, body), bodies)) == plain
    decodes = grown(engines.decodes, before)
    assert decodes["waits_given_up"] == decodes["recomputed_tokens"] == 0, decodes
    assert decodes["external_prefix_cache_hits"] > 30 * VALUE


def test_requests_that_are_aborted_while_they_wait_leave_nothing_behind(engines: Engines) -> None:
    """Of prompts that no engine computes; their wait would last a minute."""
    dice = random.Random(22)
    body = a_body(drawn(dice, LONG))
    expected = asked(engines.plain, body)
    before = metrics(engines.decodes)
    sockets = []
    for number in range(6):
        waiting = {**a_body(drawn(dice, 900)), "stream": number % 2 == 0, "kv_transfer_params": TAKE_OVER}
        data = json.dumps(waiting).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: d\r\nContent-Length: {len(data)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", engines.decodes.port))
        connection.sendall(head.encode() + data)
        sockets.append(connection)
    until(lambda: grown(engines.decodes, before)["waited_loads"] == 6, "they do not wait")
    held = metrics(engines.decodes)
    assert held["num_requests_waiting"] == 6 and held["kv_cache_usage_perc"] > 0.3, held
    began_s = time.monotonic()
    assert at_once(engines, body) == expected, "those that wait hold up no other"
    for connection in sockets:
        connection.close()

    def nothing_is_left() -> bool:
        now = metrics(engines.decodes)
        return now["num_requests_waiting"] == now["num_requests_running"] == 0 and now["kv_cache_usage_perc"] < 0.01

    until(nothing_is_left, "blocks or requests are left", 30.0)
    assert time.monotonic() - began_s < 55, "only their deadline ended them"
    assert grown(engines.decodes, before)["waits_given_up"] == 0
    assert asked(engines.decodes, {**body, "kv_transfer_params": TAKE_OVER}) == expected


def test_parameters_that_make_no_sense_are_answered_all_the_same(engines: Engines) -> None:
    body = a_body(drawn(random.Random(23), 400))
    expected = asked(engines.plain, body)
    for params in (
        {"do_remote_prefill": "yes"},
        {"do_remote_prefill": True, "sky_tokens": -4},
        {"do_remote_prefill": True, "sky_tokens": [3]},
        {"do_remote_prefill": True, "sky_wait_ms": "soon"},
        {"do_remote_prefill": True, "sky_tokens": 2**60, "sky_wait_ms": 100},
        {"do_remote_decode": {"to": "me"}},
        {"remote_host": "elsewhere"},
    ):
        assert asked(engines.decodes, {**body, "kv_transfer_params": params}) == expected, params
        assert asked(engines.prefills, {**body, "kv_transfer_params": params}) == expected, params
        engines.decodes.post("/reset_prefix_cache")


def test_a_decoding_engine_that_is_killed_breaks_the_stream_and_a_second_one_answers(engines: Engines) -> None:
    body = a_body(drawn(random.Random(24), LONG), 100)
    expected = asked(engines.plain, body)
    params = handed_over(engines.prefills, body)
    data = json.dumps({**body, "stream": True, "kv_transfer_params": params}).encode()
    request = urllib.request.Request(
        f"{engines.decodes.url}/v1/completions", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.readline().startswith(b"data: ")
        engines.decodes.stop()
        with pytest.raises((http.client.HTTPException, OSError)):
            rest = answer.read()
            assert b"[DONE]" not in rest
            raise http.client.IncompleteRead(rest)
    engines.decodes.start()
    engines.decodes.wait()
    assert asked(engines.decodes, {**body, "kv_transfer_params": params}) == expected
    assert metrics(engines.decodes)["external_prefix_cache_hits"] == 15 * VALUE


def test_a_prefilling_engine_that_is_killed_costs_its_deadline_and_no_answer(engines: Engines) -> None:
    dice = random.Random(25)
    bodies = [a_body(drawn(dice, LONG)) for _ in range(4)]
    plain = [asked(engines.plain, body) for body in bodies]
    before = metrics(engines.decodes)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(at_once, engines, body, sky_wait_ms=4000) for body in bodies]
        until(lambda: grown(engines.decodes, before)["waited_values"] >= 5, "nothing was loaded before the kill")
        engines.prefills.stop()
        assert [answer.result() for answer in answers] == plain
    decodes = grown(engines.decodes, before)
    assert decodes["waits_given_up"] >= 1 and decodes["recomputed_tokens"] > 0, decodes
    assert 5 <= decodes["waited_values"] < 4 * 15, decodes
    assert asked(engines.decodes, bodies[0]) == plain[0]


def test_two_ranks_wait_each_for_their_part_of_a_value(engines: Engines) -> None:
    """Tensor parallelism of both; the last of these tests, since it takes the place of the two engines."""
    engines.prefills.stop()
    engines.decodes.stop()
    two_ranks = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
    pair = Engines(engines.folder, engines.address, *two_ranks)
    dice = random.Random(26)
    bodies = [a_body(drawn(dice, dice.randrange(200, LONG))) for _ in range(8)]
    plain = [asked(engines.plain, body) for body in bodies]
    try:
        for each in (pair.prefills, pair.decodes):
            each.start()
        for each in (pair.prefills, pair.decodes):
            each.wait()
        # Where two ranks share a processor with others, the first step takes longest.
        handed_over(pair.prefills, a_body(drawn(dice, 300)))
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda body: at_once(pair, body), bodies)) == plain
        decodes = metrics(pair.decodes)
        values = sum((len(body["prompt"]) - 1) // VALUE for body in bodies)
        counts = [decodes[name] for name in ("external_prefix_cache_hits", "waited_values", "recomputed_tokens")]
        assert counts == [values * VALUE, 2 * values, 0], decodes["waits_given_up"]
    finally:
        pair.prefills.stop()
        pair.decodes.stop()


def test_a_cluster_of_vllms_from_its_description() -> None:
    """`skymemory cluster`: what dies is started again, and nothing outlives its supervisor."""
    options = ["--served-model-name", "small", "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"]
    options += ["--block-size", "32", "--num-gpu-blocks-override", "200", "--max-num-seqs", "4"]
    environment = {"PYTHONPATH": str(ROOT / "src"), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    pairs = ", ".join(f"{name} = {json.dumps(value)}" for name, value in environment.items())
    content = '[store]\nserve = "memory://512MiB"\n[router]\nlisten = "127.0.0.1:0"\n' + "".join(
        f'[[instances]]\nrole = "{role}"\nengine = "vllm"\npython = "{PYTHON}"\nmodel = "{MODEL}"\n'
        f"options = {json.dumps(options)}\nenvironment = {{ {pairs} }}\n"
        for role in ("prefill", "decode")
    )

    def completed(url: str, body: Body) -> list[int]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return list(json.load(answer)["choices"][0]["token_ids"])

    with TemporaryDirectory(prefix="sky-") as name:
        run = Run(Path(name))
        try:
            state = run.up(content)
            services = state["services"]
            url = services["router"]["address"]
            bodies = [a_body(drawn(random.Random(seed), 700)) for seed in range(4)]
            answers = [completed(url, body) for body in bodies]
            assert answers == [completed(services["prefill-1"]["address"], body) for body in bodies]
            with urllib.request.urlopen(f"{services['decode-1']['address']}/metrics", timeout=60) as page:
                hits = re.search(r"external_prefix_cache_hits_total{[^}]*} ([0-9.]+)", page.read().decode())
            assert hits is not None and float(hits[1]) >= 4 * 5 * VALUE

            os.kill(services["decode-1"]["pid"], signal.SIGKILL)
            until(lambda: run.status()["services"]["decode-1"]["restarts"] == 1, "it is started again")
            until(lambda: run("status")[0] == 0, "it is healthy again", 300.0)
            again: list[list[int]] = []

            def answered() -> bool:  # the router looks at it a few times before it is back
                try:
                    again.append(completed(url, bodies[0]))
                except OSError:
                    return False
                return True

            until(answered, "the router asks it again")
            assert again == answers[:1]

            os.kill(state["pid"], signal.SIGKILL)
            until(lambda: not run.processes(), "all end with their supervisor")
        finally:
            assert run("down")[0] == 0 and run.processes() == []
