"""The picker as it runs: endpoints that come and go, what they tell of themselves, and its page of metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from tests.router.exchanges import SmallReader, a_desk
from tests.router.test_ext_proc_server import LOOP
from tests.router.test_kv_events import BLOCK_TOKENS, a_publisher

from skymemory.conductor.fleet import Fleet, LoadReport
from skymemory.conductor.picker import Picker
from skymemory.conductor.strategies.named import named
from skymemory.errors import InvalidInput
from skymemory.router.desk import Desk
from skymemory.router.endpoints import FixedSource
from skymemory.router.epp import EndpointPicker, PickerPlan
from skymemory.router.fleet_adapters import FleetAdapters
from skymemory.router.prompts import PromptReader

METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 2.0
vllm:num_requests_waiting{model_name="m"} 5.0
vllm:kv_cache_usage_perc{model_name="m"} 0.25
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0
vllm:lora_requests_info{max_lora="2",running_lora_adapters="french",waiting_lora_adapters=""} 1.0
"""


class Pool:
    """A source whose word a test changes."""

    def __init__(self, *endpoints: str) -> None:
        self.now: tuple[str, ...] | None = endpoints

    async def endpoints(self) -> tuple[str, ...] | None:
        return self.now


def with_picker(picker: EndpointPicker, test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        stop, started = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(picker.run(stop, started.set))
        try:
            await asyncio.wait_for(started.wait(), 10)
            await asyncio.wait_for(test(), 20)
        finally:
            stop.set()
            await asyncio.wait_for(task, 10)

    LOOP.run_until_complete(run())


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.01)


def test_endpoints_tell_their_load_and_come_and_go() -> None:
    desk, said = a_desk(servers=0), list[str]()
    plan = PickerPlan(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", refresh_s=0.02)
    pool = Pool()
    picker = EndpointPicker(desk, pool, plan, said.append)

    async def test() -> None:
        app = web.Application()
        app.router.add_get("/metrics", lambda _: _answer())
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        name = f"127.0.0.1:{runner.addresses[0][1]}"
        pool.now = (name,)
        await until(lambda: name in desk.picker.fleet.servers and desk.picker.fleet.servers[name].reported is not None)
        report = desk.picker.fleet.servers[name].reported
        assert report is not None and (report.waiting, report.running, report.cache_blocks) == (5, 2, 1000)
        assert picker.metrics is not None
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{picker.metrics.port}/metrics") as page,
        ):
            text = await page.text()
        assert f'skymemory_epp_server_healthy{{server="{name}"}} 1.0' in text and "skymemory_epp_streams 0.0" in text
        pool.now = None  # not to be learnt: the last word stands
        await asyncio.sleep(0.1)
        assert name in desk.picker.fleet.servers
        pool.now = ()
        await until(lambda: not len(desk.picker.fleet))
        await runner.cleanup()

    async def _answer() -> web.Response:
        return web.Response(text=METRICS)

    with_picker(picker, test)
    assert said == ["0 endpoints: 0 came, 0 left", "1 endpoints: 1 came, 0 left", "0 endpoints: 0 came, 1 left"]


def test_events_of_an_engines_cache_reach_a_strategy_that_goes_by_them() -> None:
    with a_publisher(seed=0, capacity=100) as publisher:
        host, _, port = publisher.endpoint.removeprefix("tcp://").rpartition(":")
        name = f"{host}:8000"
        scorer = named("precise", block_tokens=BLOCK_TOKENS)
        desk = Desk(Picker(Fleet(), scorer), SmallReader())
        replay = int(publisher.replay_endpoint.rpartition(":")[2])
        plan = PickerPlan(
            listen="127.0.0.1:0", metrics_path=None, events_port=int(port), replay_port=replay, model="small"
        )

        async def test() -> None:
            await until(lambda: name in desk.picker.fleet.servers)
            held = await asyncio.to_thread(publisher.order, publish=30)
            slot = desk.picker.fleet.servers[name].slot
            await until(lambda: scorer.index.blocks_of(slot) == len(held))  # type: ignore[attr-defined]

        with_picker(EndpointPicker(desk, FixedSource([name]), plan, print), test)


def test_a_source_that_breaks_ends_the_picker_and_is_not_passed_over() -> None:
    class Broken:
        async def endpoints(self) -> tuple[str, ...] | None:
            raise InvalidInput("broken")

    picker = EndpointPicker(a_desk(), Broken(), PickerPlan(listen="127.0.0.1:0"), print)
    with pytest.raises(InvalidInput, match="broken"):
        LOOP.run_until_complete(picker.run(asyncio.Event()))


def test_adapters_that_engines_report_are_read_as_adapters() -> None:
    fleet = Fleet()
    reader = PromptReader(adapters=FleetAdapters(fleet))
    body = b'{"model": "french", "prompt": "bonjour"}'
    assert (reader.read("/v1/completions", {}, body).model, reader.read("/v1/completions", {}, body).adapter) == (
        "french",
        "",
    )
    fleet.add("a").reported = LoadReport(at_s=0.0, adapters=frozenset({"french", "german"}))
    assert reader.read("/v1/completions", {}, body).adapter == "french"
    assert sorted(reader.adapters) == ["french", "german"] and len(reader.adapters) == 2
