"""Prompts that are not worth two steps: a decode server that lacks few of their tokens serves them alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from tests.router.http.pairs import PROMPT, ROLES, bodies, books_are_closed, engine, release, sent, start
from tests.router.running import Running, until

from skymemory.conductor.cost_model import PRESETS
from skymemory.errors import InvalidInput
from skymemory.router.settings import settings_from

Run = Callable[..., Running]
FROM_64 = {"disaggregation": {"split_from": 64}}
COST = "llama-70b-8xa800"
LONG = "".join(f"{number:04}" for number in range(400))
"""400 tokens, as the router counts without a tokenizer, in 25 blocks."""


def ways(running: Running) -> tuple[float, float]:
    """Prompts that took two steps, and those that a decode server served alone as it lacked few tokens."""
    return running.metric("two_steps_total"), running.metric("alone_total", reason="few-tokens")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_short_prompt_takes_one_step(run: Run, streamed: bool) -> None:
    running = start(run, **FROM_64)
    answer = running.complete(stream=streamed)
    assert answer.status == 200 and answer.headers["X-Engine"] == "d0"
    assert bodies(running, "d0") == [{"model": "small", "prompt": PROMPT, "stream": streamed}], "as the client sent it"
    assert not engine(running, "p0").seen
    until(lambda: books_are_closed(running))
    assert ways(running) == (0, 1)


@pytest.mark.parametrize(("tokens", "steps"), [(63, 1), (64, 2)])
def test_from_so_many_tokens_on_it_takes_two(run: Run, tokens: int, steps: int) -> None:
    running = start(run, **FROM_64)
    assert running.complete(prompt="abcd" * tokens).status == 200
    assert len(engine(running, "p0").seen) == steps - 1
    assert ways(running) == (steps - 1, 2 - steps)


def test_a_next_turn_goes_to_the_decode_server_that_has_the_others(run: Run) -> None:
    running = start(run, "pddd", strategy="least-load", **FROM_64)
    first = running.complete(prompt=LONG).headers["X-Engine"]
    for _ in range(3):
        assert running.complete(prompt=LONG + PROMPT).headers["X-Engine"] == first
    assert ways(running) == (1, 3)
    assert running.complete(prompt=LONG + 2 * PROMPT).headers["X-Engine"] == first
    assert ways(running) == (1, 4), "what it computed alone counts, too"
    running.complete(prompt="else" + LONG)
    assert ways(running) == (2, 4), "another beginning"
    until(lambda: books_are_closed(running))


def test_a_decode_server_has_a_prompt_only_when_it_answers(run: Run) -> None:
    running = start(run, **FROM_64)
    engine(running, "d0").mock = {"hold": True}
    body = {"model": "small", "prompt": LONG, "stream": True}
    with ExitStack() as stack:
        for count in (1, 2):
            stack.enter_context(sent(running, body))
            until(lambda count=count: engine(running, "d0").held == count)  # type: ignore[misc]
        assert ways(running) == (2, 0)
        release(running, "d0")
    until(lambda: books_are_closed(running))


def test_a_decode_server_that_died_has_nothing(run: Run) -> None:
    running = start(run, health={"every": 0.05, "failures": 1, "successes": 1}, **FROM_64)
    running.complete(prompt=LONG)
    running.complete(prompt=LONG)
    assert ways(running) == (1, 1)
    d = engine(running, "d0")
    running.loop.run(d.die())
    assert running.server is not None
    known = running.server.backends.known["d0"]
    until(lambda: not known.server.healthy and "refused" in known.why)
    running.loop.run(d.start())
    until(lambda: known.server.healthy)
    assert running.complete(prompt=LONG).status == 200
    assert ways(running) == (2, 1)


def test_what_an_answer_reports_as_computed_is_no_longer_counted_on(run: Run) -> None:
    running = start(run, **FROM_64)
    other = LONG[:1200] + "tail" * 100  # three quarters are the same
    for prompt in (LONG, other):
        running.complete(prompt=prompt)
    d = engine(running, "d0")
    d.prompt_tokens, d.cached_tokens = 400, 0  # it has evicted all of it
    running.complete(prompt=other + PROMPT)
    assert ways(running) == (2, 1)
    running.complete(prompt=LONG)
    assert ways(running) == (3, 1)


def test_a_short_prompt_needs_no_prefill_server(run: Run) -> None:
    running = start(run, limits={"max_waiting": 1}, **FROM_64)
    engine(running, "p0").mock = {"hold": True}
    with sent(running, {"model": "small", "prompt": LONG}):
        until(lambda: engine(running, "p0").held == 1)
        assert running.complete(prompt=LONG).status == 429
        assert running.complete().status == 200
    until(lambda: books_are_closed(running))


def test_another_decode_server_is_tried(run: Run) -> None:
    running = start(run, "pdd", **FROM_64)
    for _ in range(6):
        for name in ("d0", "d1"):
            engine(running, name).mock = {"die": "before"} if name == "d0" else {}
        assert running.complete().headers["X-Engine"] == "d1"
    until(lambda: books_are_closed(running))
    assert not engine(running, "p0").seen and running.metric("retries_total", server="d0") >= 1


@pytest.mark.parametrize("splits", [True, False])
def test_both_ways_count_in_the_decode_servers_batches(run: Run, splits: bool) -> None:
    """A rule that judges by the batches sees those that are served alone."""
    # Of a batch whose contexts grow while nothing comes: here it would take a minute to count as one request more.
    name = "llama-70b-8xa100"
    cost = PRESETS[name]
    step_s = (cost.decode_step_s(2, 80) + cost.decode_step_s(3, 120)) / 2
    admission = {"rule": "early", "ttft": "100s", "tbt": f"{step_s:.9f}s", "options": {"promised": True}}
    table = {"disaggregation": {"split_from": 0 if splits else 64}}
    running = start(run, cost=name, strategy="least-ttft", admission=admission, **table)
    # Their next tokens come after all is refused: no gap between tokens, longer on a busy computer, is learnt from.
    engine(running, "d0").mock = {"events": 3, "gap_s": 60.0}
    with ExitStack() as stack:
        for count in (1, 2):
            client = stack.enter_context(sent(running, {"model": "small", "prompt": PROMPT, "stream": True}))
            assert client.recv(100).startswith(b"HTTP/1.1 200"), count
        for prompt in (LONG, PROMPT):
            answer = running.complete(prompt=prompt, stream=True)
            assert answer.status == 429 and "tokens are estimated" in answer.json["error"]["message"]
    until(lambda: books_are_closed(running))


def test_a_whole_answer_says_nothing_of_the_time_of_decoding(run: Run) -> None:
    running = start(run, cost=COST, **FROM_64)
    running.complete(stream=False)
    until(lambda: books_are_closed(running))
    assert running.server is not None and running.server.scheduler.forecast is not None
    assert running.server.scheduler.forecast.decode_s == float("inf")
    engine(running, "d0").mock = {"events": 3, "gap_s": 0.03}
    running.complete(stream=True)
    until(lambda: books_are_closed(running))
    assert 0.05 < running.server.scheduler.forecast.decode_s < 5.0


def test_a_reload_changes_it(run: Run) -> None:
    running = start(run, **FROM_64)
    running.complete()
    backends = [{"url": each.url, "name": each.name, "role": ROLES[each.name[0]]} for each in running.engines]
    settings = settings_from({"backends": backends, "disaggregation": {"split_from": 0}})

    async def resetting() -> None:
        assert running.server is not None
        running.server.reset(settings)

    running.loop.run(resetting())
    running.complete()
    assert ways(running) == (1, 1)


def test_a_negative_one_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"split_from.*whole number, 0 or more"):
        settings_from({"disaggregation": {"split_from": -1}})


def test_after_any_sequence_of_faults_nothing_is_in_flight(run: Run) -> None:
    """Turns of a few conversations, and servers that fail before, in and behind their answers; clients that leave."""
    dice = random.Random(21)
    running = start(run, "ppdd", cost=COST, health={"failures": 100}, **FROM_64)
    talks = [LONG[4 * at :] for at in range(4)]
    came = 0
    for _ in range(60):
        faults: list[dict[str, Any]] = [{}, {}, {"die": "before"}, {"status": 503}, {"die": "after-headers"}]
        for each in running.engines:
            each.mock = dice.choice(faults)
        prompt = dice.choice([*talks, *(talk + dice.choice("xyz") * 200 for talk in talks), PROMPT])
        body = {"model": "small", "prompt": prompt, "stream": dice.random() < 0.5}
        came += 1
        with sent(running, body) as client:
            if dice.random() < 0.2:
                time.sleep(dice.random() * 0.004)
            else:
                client.recv(65536)
    until(lambda: books_are_closed(running))
    assert running.metric("in_flight") == 0
    two, few = ways(running)
    # A client may leave before its request was read.
    assert two > 5 and few > 5 and two + few <= came
