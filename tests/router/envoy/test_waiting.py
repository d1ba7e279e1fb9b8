"""The endpoint picker's queue and its rule of admission: over a real socket, as Envoy asks."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from tests.router.envoy.exchanges import (
    POST,
    a_completion,
    a_service,
    header_destination,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from tests.router.envoy.test_ext_proc_server import a_call, with_server

from skymemory.conductor.scheduler import Admission, Refusal, ScheduledRequest, Scheduler
from skymemory.router.envoy.ext_proc import PickerService
from skymemory.router.envoy.ext_proc_server import PickerServer
from skymemory.router.envoy.picker_server import endpoint_picker
from skymemory.router.queue import QueueSettings
from skymemory.router.settings import settings_from


def a_full_picker(**queue: Any) -> PickerService:
    """One server, which takes one request at a time."""
    service = a_service(1, max_requests=1)
    service.queue.configure(QueueSettings(**{"most_requests": 10, **queue}))
    return service


async def asked(channel: Any, subset: Any = None) -> Any:
    call = a_call(channel)
    await call.write(request_headers(subset=subset))
    await call.write(request_body(a_completion()))
    return call


async def until(true: Any) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.005)


async def answered(call: Any) -> ProcessingResponse:
    answer: ProcessingResponse = await asyncio.wait_for(call.read(), 60)
    return answer


async def end(call: Any) -> None:
    """Its response comes whole."""
    await call.write(response_headers())
    await call.write(response_body(b"{}"))
    await call.done_writing()


def test_a_request_waits_for_a_server_with_room_and_is_answered_late() -> None:
    service = a_full_picker()

    async def test(server: PickerServer) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            first, second, third = [await asked(channel) for _ in range(3)]
            assert header_destination(await answered(first))
            await until(lambda: len(service.queue) == 2)
            await end(first)
            assert header_destination(await answered(second)) and len(service.queue) == 1
            second.cancel()  # Envoy's client went away: that makes room, too
            assert header_destination(await answered(third))
            await end(third)
            await until(lambda: service.streams == 0)

    with_server(test, service)
    assert [server.in_flight for server in service.picker.fleet] == [0] and not len(service.queue)


def test_who_hangs_up_while_he_waits_leaves_the_queue() -> None:
    service = a_full_picker()

    async def test(server: PickerServer) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            first, second = await asked(channel), await asked(channel)
            await until(lambda: len(service.queue) == 1)
            second.cancel()
            await until(lambda: len(service.queue) == 0)
            await end(first)
            await until(lambda: service.streams == 0)

    with_server(test, service)
    assert service.counters.get("picks_total", "10.0.0.0:8000") == 1


def test_time_in_the_queue_ends_with_429_and_when_to_come_again() -> None:
    service = a_full_picker(most_wait_s=0.1)

    async def test(server: PickerServer) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            first = await asked(channel)
            await until(lambda: service.counters.get("picks_total", "10.0.0.0:8000") == 1)
            began_s = time.monotonic()
            refused = (await answered(await asked(channel))).immediate_response
            assert refused.status.code == 429 and time.monotonic() - began_s < 5
            assert [each.header.key.lower() for each in refused.headers.set_headers].count("retry-after") == 1
            first.cancel()

    with_server(test, service)


def test_a_queue_that_is_full_refuses_and_a_subset_that_is_full_delays_no_other() -> None:
    service = a_service(2, max_requests=1)
    service.queue.configure(QueueSettings(most_requests=1))

    async def test(server: PickerServer) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            first = await asked(channel, ["10.0.0.0:8000"])
            assert header_destination(await answered(first)) == "10.0.0.0:8000"
            waits = await asked(channel, ["10.0.0.0:8000"])
            await until(lambda: len(service.queue) == 1)
            refused = await answered(await asked(channel, ["10.0.0.0:8000"]))
            assert refused.immediate_response.status.code == 429
            service.queue.configure(QueueSettings(most_requests=2))
            other = await asked(channel, ["10.0.0.1:8000"])
            assert header_destination(await answered(other)) == "10.0.0.1:8000"
            await end(first)
            assert header_destination(await answered(waits)) == "10.0.0.0:8000"
            for call in (waits, other):
                call.cancel()

    with_server(test, service)


def test_a_rule_of_admission_is_asked_and_notified() -> None:
    notified: list[str] = []

    class OneInTwo(Admission):
        name = "one in two"

        def on_arrival(self, case: ScheduledRequest, now_s: float) -> Refusal | None:
            notified.append("asked")
            return Refusal("it is the second", 7.2, kind="ttft") if notified.count("asked") == 2 else None

        def before_decode(self, case: ScheduledRequest, now_s: float) -> Refusal | None:
            return None

        def accepted(self, case: ScheduledRequest, now_s: float) -> None:
            notified.append("accepted")

        def refused(self, case: ScheduledRequest, refusal: Refusal, now_s: float) -> None:
            notified.append("refused")

        def on_request_end(self, case: ScheduledRequest, now_s: float, met: bool | None) -> None:
            notified.append(f"ended {met}")

    service = a_service(1)
    service.scheduler = Scheduler(service.picker, admission=OneInTwo())

    async def test(server: PickerServer) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            first = await asked(channel)
            assert header_destination(await answered(first))
            refused = (await answered(await asked(channel))).immediate_response
            assert refused.status.code == 429 and b"it is the second" in refused.body
            await end(first)
            await until(lambda: "ended None" in notified)

    with_server(test, service)
    assert notified == ["asked", "accepted", "asked", "refused", "ended None"]


def test_settings_give_the_picker_a_rule_and_a_queue() -> None:
    table = {
        "backends": ["http://127.0.0.1:8000"],
        "admission": {"rule": "early", "ttft": "2s", "fair": True},
        "queue": {"max_requests": 5},
        "picker": {"max_requests": 3},
    }
    picker = endpoint_picker(settings_from(table), print)
    assert "early" in picker.service.scheduler.admission.name and picker.service.queue.settings.most_requests == 5
    read = picker.service.read({**POST, "x-slo-ttft-ms": "300", "x-skymemory-priority": "2"}, a_completion())
    assert read.slo is not None and (read.slo.ttft_s, read.priority) == (0.3, 2)
