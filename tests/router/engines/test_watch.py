"""Engines are looked at each for itself: one that hangs, lies or floods costs the others nothing."""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import Awaitable, Callable
from functools import partial

import aiohttp
import pytest
from aiohttp import web
from tests.router.engines.engine_texts import SGLANG, VLLM

from skymemory.conductor.picker import Fleet, ReportedLoad
from skymemory.router.engines.engine_metrics import MetricsWatch, UnreadableMetrics, fetch, fetch_metrics

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Engines:
    """Handlers of ``/NAME/metrics`` on one loopback port, and a client session."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.asked: dict[str, int] = {}

    async def __aenter__(self) -> Engines:
        app = web.Application()
        app.router.add_get("/{name}/metrics", self._answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.port = self.runner.addresses[0][1]
        self.session = aiohttp.ClientSession()
        self.fetch = partial(fetch, self.session)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        await self.runner.cleanup()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}/metrics"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        self.asked[name] = self.asked.get(name, 0) + 1
        return await self.handlers[name](request)


def says(text: bytes) -> Handler:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=text)

    return answer


async def hangs(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(30)
    return web.Response()


async def trickles(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b"# one more line\n")
        await asyncio.sleep(0.05)


async def floods(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b"x" * 65536)


async def fails(_: web.Request) -> web.StreamResponse:
    return web.Response(status=500)


async def moves_away(_: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("/elsewhere/metrics")


async def bombs(_: web.Request) -> web.StreamResponse:
    return web.Response(body=gzip.compress(VLLM * 1000), headers={"Content-Encoding": "gzip"})


async def until(true: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        (hangs, "did not answer within 0.3 s"),
        (trickles, "did not answer within 0.3 s"),
        (floods, "more than 4194304 B"),
        (fails, "answered 500"),
        (moves_away, "answered 302"),
        (bombs, "compressed"),
        (says(b"<html>"), "neither vllm: nor sglang:"),
    ],
)
def test_a_look_ends_and_says_what_was_wrong(handler: Handler, why: str) -> None:
    async def run() -> None:
        async with Engines() as engines:
            engines.handlers["bad"] = handler
            with pytest.raises(UnreadableMetrics, match=why):
                await fetch_metrics(engines.fetch, engines.url("bad"), timeout_s=0.3 if "0.3" in why else 20.0)
            engines.handlers["good"] = says(VLLM)
            assert (await fetch_metrics(engines.fetch, engines.url("good"))).report.waiting == 3

    asyncio.run(run())


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/metrics", "nonsense", "http://[::1/metrics", "ftp://127.0.0.1/"])
def test_an_address_without_a_listener_says_so(url: str) -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(UnreadableMetrics):
                await fetch_metrics(partial(fetch, session), url)

    asyncio.run(run())


def test_an_engine_that_hangs_delays_neither_another_nor_the_loop() -> None:
    async def run() -> None:
        fleet = Fleet()
        for name in ("good", "other", "hangs"):
            fleet.add(name)
        async with Engines() as engines:
            engines.handlers |= {"good": says(VLLM), "other": says(SGLANG), "hangs": hangs}
            watch = MetricsWatch(fleet.servers.get, engines.fetch, every_s=0.02, timeout_s=2.0)
            for name in fleet.servers:
                watch.follow(name, engines.url(name))
            await until(lambda: engines.asked.get("good", 0) > 10 and engines.asked.get("other", 0) > 10)
            assert watch.watched["hangs"].looks == 1
            good, other, hung = fleet
            assert good.reported is not None and (good.reported.waiting, good.reported.running) == (3, 8)
            assert other.reported is not None and other.reported.waiting == 2826
            assert hung.reported is None
            began = asyncio.get_running_loop().time()
            await watch.close()
            assert asyncio.get_running_loop().time() - began < 1.0

    asyncio.run(run())


def test_a_report_ages_while_the_engine_is_silent_and_is_renewed_when_it_returns() -> None:
    now_s = [100.0]

    async def run() -> None:
        fleet = Fleet()
        server = fleet.add("a")
        async with Engines() as engines:
            engines.handlers["a"] = says(VLLM)
            watch = MetricsWatch(fleet.servers.get, engines.fetch, every_s=0.01, clock=lambda: now_s[0])
            watched = watch.follow("a", engines.url("a"))
            await until(lambda: server.reported is not None)
            assert server.fresh_report(103.0, stale_s=5.0) is not None
            engines.handlers["a"] = fails
            await until(lambda: watched.failures_in_a_row >= 3)
            assert "answered 500" in watched.error
            now_s[0] = 106.0
            assert server.fresh_report(now_s[0], stale_s=5.0) is None
            engines.handlers["a"] = says(VLLM)
            await until(lambda: server.fresh_report(now_s[0], stale_s=5.0) is not None)
            assert watched.error == "" and watched.failures_in_a_row == 0
            await watch.close()

    asyncio.run(run())


def test_a_report_is_as_old_as_the_question() -> None:
    async def slowly(_: web.Request) -> web.StreamResponse:
        now_s[0] = 107.0
        return web.Response(body=VLLM)

    now_s = [100.0]

    async def run() -> ReportedLoad:
        async with Engines() as engines:
            engines.handlers["a"] = slowly
            return (await fetch_metrics(engines.fetch, engines.url("a"), clock=lambda: now_s[0])).report

    assert asyncio.run(run()).at_s == 100.0


def test_who_keeps_failing_is_asked_ever_more_rarely() -> None:
    async def run() -> None:
        async with Engines() as engines:
            engines.handlers |= {"bad": fails, "good": says(VLLM)}
            watch = MetricsWatch(Fleet().servers.get, engines.fetch, every_s=0.01)
            for name in ("bad", "good"):
                watch.follow(name, engines.url(name))
            await until(lambda: engines.asked.get("good", 0) >= 30)
            assert engines.asked["bad"] <= 8
            await watch.close()

    asyncio.run(run())


def test_what_a_dialect_lacks_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with Engines() as engines:
            engines.handlers["a"] = says(VLLM.replace(b"vllm:num_requests_waiting{", b"vllm:queue{"))
            watch = MetricsWatch(Fleet().servers.get, engines.fetch, every_s=0.005)
            watched = watch.follow("a", engines.url("a"))
            await until(lambda: watched.looks > 5)
            assert watched.missing == ("vllm:num_requests_waiting",) and watched.dialect == "vllm"
            engines.handlers["a"] = fails
            await until(lambda: watched.failures > 2)
            await watch.close()

    with caplog.at_level(logging.INFO, "skymemory.router"):
        asyncio.run(run())
    messages = [record.getMessage() for record in caplog.records]
    assert sum("lack vllm:num_requests_waiting" in message for message in messages) == 1
    assert sum("cannot be read" in message for message in messages) == 1


def test_who_left_is_asked_no_more_and_leaves_no_task() -> None:
    async def run() -> None:
        fleet = Fleet()
        fleet.add("a")
        async with Engines() as engines:
            engines.handlers |= {"a": says(VLLM), "b": hangs}
            watch = MetricsWatch(fleet.servers.get, engines.fetch, every_s=0.005)
            watch.follow("a", engines.url("a"))
            watch.follow("b", engines.url("b"))
            await until(lambda: engines.asked.get("a", 0) > 2)
            watch.unfollow("a")
            watch.unfollow("b")
            asked = engines.asked["a"]
            await asyncio.sleep(0.05)
            assert engines.asked["a"] <= asked + 1 and not watch.watched
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("metrics of")]

    asyncio.run(run())
