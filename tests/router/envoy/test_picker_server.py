"""The picker as it runs: endpoints that come and go, what they report of themselves, and its page of metrics."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.router.engines.test_events import BLOCK_TOKENS, a_publisher
from tests.router.envoy.exchanges import a_completion, a_service
from tests.router.envoy.test_ext_proc_server import LOOP
from tests.store.real_redis import RedisServer

from skymemory.conductor.picker import Fleet, Picker, ReportedLoad
from skymemory.conductor.request import Decision
from skymemory.conductor.strategies.simple import RoundRobin
from skymemory.engine.inputs import small_model_folder
from skymemory.errors import InvalidInput
from skymemory.keys import first_ring
from skymemory.router.backends import Backends
from skymemory.router.envoy.endpoints import endpoint
from skymemory.router.envoy.ext_proc import PickerService
from skymemory.router.envoy.picker_server import EndpointPicker, endpoint_picker, needs_restart, reload
from skymemory.router.prompts.reader import PromptReader
from skymemory.router.request_account import RequestAccount
from skymemory.router.settings import Backend, Settings, settings_from

TOKENIZER = str(small_model_folder() / "tokenizer.json")
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

    async def endpoints(self) -> tuple[Backend, ...] | None:
        return None if self.now is None else tuple(map(endpoint, self.now))


def some_settings(**picker: Any) -> Settings:
    return settings_from({"picker": {"listen": "127.0.0.1:0", "refresh": 0.02, **picker}})


def with_picker(picker: EndpointPicker, test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        stop, started = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(picker.run(stop, started.set))
        try:
            await asyncio.wait_for(started.wait(), 60)
            await asyncio.wait_for(test(), 60)
        finally:
            stop.set()
            await asyncio.wait_for(task, 60)

    LOOP.run_until_complete(run())


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.01)


async def page(picker: EndpointPicker) -> str:
    assert picker.metrics is not None
    url = f"http://127.0.0.1:{picker.metrics.port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return await answer.text()


def test_endpoints_report_their_load_and_come_and_go() -> None:
    service, said = a_service(servers=0), list[str]()
    pool = Pool()
    picker = EndpointPicker(service, pool, some_settings(metrics_listen="127.0.0.1:0"), said.append)

    async def test() -> None:
        app = web.Application()
        app.router.add_get("/metrics", lambda _: _answer())
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        name = f"127.0.0.1:{runner.addresses[0][1]}"
        pool.now = (name,)
        await until(
            lambda: name in service.picker.fleet.servers and service.picker.fleet.servers[name].reported is not None
        )
        report = service.picker.fleet.servers[name].reported
        assert report is not None and (report.waiting, report.running, report.cache_blocks) == (5, 2, 1000)
        text = await page(picker)
        assert f'skymemory_epp_server_healthy{{server="{name}"}} 1.0' in text and "skymemory_epp_streams 0.0" in text
        pool.now = None  # not to be learnt: the last word stands
        await asyncio.sleep(0.1)
        assert name in service.picker.fleet.servers
        service.counters.add("picks_total", label=name)
        pool.now = ()
        await until(lambda: not len(service.picker.fleet))
        assert name not in await page(picker), "nothing gathers of those that come and go"
        await runner.cleanup()

    async def _answer() -> web.Response:
        return web.Response(text=METRICS)

    with_picker(picker, test)
    assert said == [
        "0 endpoints: 0 added, 0 removed",
        "1 endpoints: 1 added, 0 removed",
        "0 endpoints: 0 added, 1 removed",
    ]


def test_events_of_each_engines_cache_reach_a_strategy_that_goes_by_them() -> None:
    with a_publisher(seed=0, capacity=100) as first, a_publisher(seed=1, capacity=100) as second:
        table = {
            "strategy": "precise",
            "prompts": {"tokenizer": TOKENIZER, "block_tokens": BLOCK_TOKENS},
            "health": {"metrics_path": ""},
            "picker": {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0", "refresh": 0.05, "model": "small"},
            "backends": [
                {"url": "http://127.0.0.1:8000", "events": first.endpoint, "replay": first.replay_endpoint},
                {"url": "http://127.0.0.1:8001", "events": second.endpoint, "replay": second.replay_endpoint},
            ],
        }
        picker = endpoint_picker(settings_from(table), print)
        fleet, index = picker.service.picker.fleet, picker.service.picker.scorer.index  # type: ignore[attr-defined]

        async def test() -> None:
            await until(lambda: len(fleet) == 2)
            for publisher, name in ((first, "127.0.0.1:8000"), (second, "127.0.0.1:8001")):
                held = await asyncio.to_thread(publisher.order, publish=30)
                slot = fleet.servers[name].slot
                await until(lambda slot=slot, held=held: index.blocks_of(slot) == len(held))
            text = await page(picker)
            assert 'skymemory_router_server_events_whole{server="127.0.0.1:8001"} 1.0' in text
            picker.reset(settings_from({**table, "backends": table["backends"][1:]}))  # type: ignore[index]
            await until(lambda: len(fleet) == 1)
            assert not index.blocks_of(slot_of_first), "who left is forgotten, and not heard"

        slot_of_first = 0
        with_picker(picker, test)


def settings_with(tmp_path: Path | None, **more: Any) -> Settings:
    state = {} if tmp_path is None else {"state": str(tmp_path / "state")}
    backends = ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]
    picker = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0", "refresh": 0.05}
    table = {"backends": backends, "health": {"metrics_path": ""}, "picker": picker, "strategy": "radix"}
    return settings_from({**table, **state, **more})


PROMPT = a_completion("who is asked about what was asked before " * 50)
HEADERS = {":path": "/v1/completions", ":method": "POST"}


def served(service: PickerService, among: list[str] | None = None) -> Decision:
    """One request as the picker has them, from its headers to its end."""
    placement = service.choose(service.read(HEADERS, PROMPT), among, time.monotonic())
    account = RequestAccount(service.scheduler, placement, time.monotonic())
    account.on_request_end(time.monotonic(), None)
    return account.decision


def test_what_was_learnt_is_kept_over_a_restart(tmp_path: Path) -> None:
    async def learn() -> None:
        await until(lambda: len(first.service.picker.fleet) == 2)
        assert served(first.service, ["127.0.0.1:8001"]).matched_tokens == 0

    async def know() -> None:
        await until(lambda: second._begun)
        decision = served(second.service)
        assert decision.server == "127.0.0.1:8001" and decision.matched_tokens > 300

    first = endpoint_picker(settings_with(tmp_path), print)
    with_picker(first, learn)
    second = endpoint_picker(settings_with(tmp_path), print)
    with_picker(second, know)


def test_a_picker_that_never_knew_its_endpoints_keeps_what_an_earlier_one_knew(tmp_path: Path) -> None:
    settings = settings_with(tmp_path)
    settings.state.write_bytes(b"what was known")  # type: ignore[union-attr]
    picker = endpoint_picker(settings, print)

    async def never() -> tuple[Backend, ...] | None:
        return None

    picker._source.endpoints = never  # type: ignore[method-assign]

    async def test() -> None:
        await asyncio.sleep(0.05)

    with_picker(picker, test)
    assert settings.state is not None and settings.state.read_bytes() == b"what was known"


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    directory = Path(tempfile.mkdtemp())  # a socket's path must be short
    server = RedisServer(directory)
    yield server
    server.stop()
    shutil.rmtree(directory)


def test_pickers_with_the_same_keys_share_what_they_learn(redis: RedisServer) -> None:
    settings, ring = settings_with(None, replicas={"redis": redis.url}), first_ring(bytes(range(32)))
    first, second = (endpoint_picker(settings, print, ring) for _ in range(2))
    stranger = endpoint_picker(settings, print)

    async def test() -> None:
        stop = asyncio.Event()
        running = [asyncio.create_task(picker.run(stop)) for picker in (second, stranger)]
        await until(lambda: first._begun and second._begun and stranger._begun)
        served(first.service, ["127.0.0.1:8001"])
        await until(lambda: second._prefix_state.replicas().received > 0)  # type: ignore[union-attr]
        decision = served(second.service)
        assert decision.server == "127.0.0.1:8001" and decision.matched_tokens > 300
        assert "skymemory_router_replicas_degraded" in await page(second)
        served(stranger.service, ["127.0.0.1:8000"])
        await until(lambda: second._prefix_state.replicas().refused > 0)  # type: ignore[union-attr]
        assert served(second.service).server == "127.0.0.1:8001"
        stop.set()
        await asyncio.gather(*running)

    with_picker(first, test)


def test_settings_are_taken_up_and_those_that_cannot_be_meant_are_not() -> None:
    now: list[Settings | InvalidInput] = [settings_with(None)]
    picker = endpoint_picker(settings_with(None), print)
    service = picker.service

    def read() -> Settings:
        if isinstance(now[-1], InvalidInput):
            raise now[-1]
        return now[-1]

    async def test() -> None:
        await until(lambda: len(service.picker.fleet) == 2)
        more = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0", "fallbacks": 1, "max_requests": 7}
        backends = [{"url": "http://127.0.0.1:8001", "drain": True}, "http://127.0.0.1:8002", "http://127.0.0.1:8003"]
        now.append(settings_with(None, backends=backends, picker=more, strategy="random"))
        reload(picker, read)
        assert (service.settings.fallbacks, service.settings.max_requests) == (1, 7)
        await until(lambda: set(service.picker.fleet.servers) == {f"127.0.0.1:800{number}" for number in (1, 2, 3)})
        assert service.picker.fleet.servers["127.0.0.1:8001"].draining
        now.append(settings_with(None, backends=["http://engines:8000"]))
        reload(picker, read)
        now.append(InvalidInput("not TOML"))
        reload(picker, read)
        await asyncio.sleep(0.1)
        assert len(service.picker.fleet) == 3 and service.picker.scorer.name == "radix"
        text = await page(picker)
        assert 'skymemory_epp_reloads_total{outcome="refused"} 2.0' in text
        assert 'skymemory_epp_reloads_total{outcome="taken"} 1.0' in text
        later = settings_with(None, strategy="random", picker={"listen": "127.0.0.1:1"})
        assert needs_restart(later, picker.at_start) == ["strategy", "picker: listen", "picker: metrics_listen"]

    with_picker(picker, test)


def test_a_source_that_breaks_ends_the_picker_and_is_not_passed_over() -> None:
    class Broken:
        async def endpoints(self) -> tuple[Backend, ...] | None:
            raise InvalidInput("broken")

    picker = EndpointPicker(a_service(), Broken(), some_settings(), print)
    with pytest.raises(InvalidInput, match="broken"):
        LOOP.run_until_complete(picker.run(asyncio.Event()))


def test_adapters_that_engines_report_are_read_as_adapters() -> None:
    backends = Backends(Picker(Fleet(), RoundRobin()), are_checked=False)
    backends.set([Backend("http://1.1.1.1:1", "a"), Backend("http://1.1.1.2:1", "b", adapters=("danish",))])
    reader = PromptReader(adapters=backends.adapters)
    body = b'{"model": "french", "prompt": "bonjour"}'
    read = reader.read("/v1/completions", {}, body)
    assert (read.model, read.adapter) == ("french", "")
    backends.known["a"].server.reported = ReportedLoad(at_s=0.0, adapters=frozenset({"french", "german"}))
    backends.reported("a")
    assert reader.read("/v1/completions", {}, body).adapter == "french"
    assert sorted(reader.adapters) == ["danish", "french", "german"]
