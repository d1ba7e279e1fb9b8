"""The gRPC shell, over a real socket: health by name, TLS, a stop that lets go, streams that break off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.router.envoy.exchanges import (
    GET,
    SmallReader,
    a_completion,
    a_service,
    header_destination,
    request_body,
    request_headers,
    response_headers,
)

from skymemory.conductor.request import Request
from skymemory.errors import SkyMemoryError
from skymemory.router.envoy.ext_proc import PickerService
from skymemory.router.envoy.ext_proc_server import PickerServer
from skymemory.router.envoy.messages import SERVICE
from skymemory.router.tls import PemCertificate, self_signed

NAMES = {1: "SERVING", 2: "NOT_SERVING"}


LOOP = asyncio.new_event_loop()
"""One for all tests here: gRPC keeps one poller for a process, and it complains of loops that were closed."""


def with_server(
    test: Callable[[PickerServer], Awaitable[None]], service: PickerService | None = None, **options: Any
) -> PickerService:
    service = a_service() if service is None else service

    async def run() -> None:
        server = PickerServer(service, "127.0.0.1:0", **options)
        await server.start()
        try:
            await asyncio.wait_for(test(server), 60)
        finally:
            await server.stop(0)

    LOOP.run_until_complete(run())
    return service


def a_call(channel: Any) -> Any:
    method = channel.stream_stream(
        f"/{SERVICE}/Process",
        request_serializer=ProcessingRequest.SerializeToString,
        response_deserializer=ProcessingResponse.FromString,
    )
    return method()


async def health_of(channel: Any, name: str) -> str:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    return NAMES[answer.status]


def test_health_distinguishes_liveness_from_readiness_and_knows_the_service() -> None:
    async def test(server: PickerServer) -> None:
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.health_port}") as apart,
        ):
            for ask in (channel, apart):
                assert await health_of(ask, "liveness") == "SERVING"
                assert {await health_of(ask, name) for name in ("", "readiness", SERVICE)} == {"NOT_SERVING"}
            await server.ready()
            for ask in (channel, apart):
                assert {await health_of(ask, name) for name in ("", "liveness", "readiness", SERVICE)} == {"SERVING"}
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await health_of(channel, "absent")
            assert unknown.value.code() == grpc.StatusCode.NOT_FOUND

    with_server(test, health_listen="127.0.0.1:0")


def test_a_stream_is_an_exchange_and_one_that_breaks_off_is_closed() -> None:
    async def test(server: PickerServer) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = a_call(channel)
            await call.write(request_headers())
            await call.write(request_body(a_completion()))
            assert header_destination(await call.read())
            assert (await call.read()).request_body.response.body_mutation.streamed_response.end_of_stream
            call.cancel()
            whole = a_call(channel)
            await whole.write(request_headers(GET, end=True))
            assert header_destination(await whole.read())
            await whole.done_writing()
            assert await whole.read() is grpc.aio.EOF
            assert await whole.code() == grpc.StatusCode.OK

    service = with_server(test)
    assert service.streams == 0 and all(server.in_flight == 0 for server in service.picker.fleet)
    assert service.counters.get("requests_abandoned_total") == 2


def test_tls_with_its_own_certificate_and_clients_with_theirs() -> None:
    certificate, client = self_signed(), self_signed()

    async def one(server: PickerServer, **credentials: bytes) -> str | None:
        secure = grpc.ssl_channel_credentials(root_certificates=certificate.chain, **credentials)
        async with grpc.aio.secure_channel(f"127.0.0.1:{server.port}", secure) as channel:
            call = a_call(channel)
            await call.write(request_headers(GET, end=True))
            return header_destination(await call.read())

    async def test(server: PickerServer) -> None:
        assert await one(server)

    async def test_mutual(server: PickerServer) -> None:
        assert await one(server, private_key=client.key, certificate_chain=client.chain)
        with pytest.raises(grpc.aio.AioRpcError):
            await one(server)

    with_server(test, certificate=certificate)
    with_server(test_mutual, certificate=PemCertificate(certificate.chain, certificate.key, client.chain))


def test_a_stop_turns_new_streams_away_and_waits_for_old_ones() -> None:
    async def test(server: PickerServer) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = a_call(channel)
            await call.write(request_headers())
            await server.ready()
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="readiness"))
            assert NAMES[(await watch.read()).status] == "SERVING"
            stopping = asyncio.create_task(server.stop(5))
            assert NAMES[(await watch.read()).status] == "NOT_SERVING"
            watch.cancel()
            await asyncio.sleep(0.1)
            assert not stopping.done()
            await call.write(request_body(a_completion()))
            assert header_destination(await call.read())
            await call.done_writing()
            await asyncio.wait_for(stopping, 2)
            with pytest.raises(grpc.aio.AioRpcError):
                await health_of(channel, "readiness")

    with_server(test)


def test_long_prompts_are_read_beside_without_delaying_others() -> None:
    class Slow(SmallReader):
        def read(self, path: str, headers: Mapping[str, str], body: bytes) -> Request:
            if len(body) >= 1000:
                time.sleep(1.0)
            return super().read(path, headers, body)

    async def one(server: PickerServer, body: bytes, half: int) -> ProcessingResponse:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = a_call(channel)
            await call.write(request_headers())
            await call.write(request_body(body[:half], end=False))
            await call.write(request_body(body[half:]))
            return await call.read()

    async def test(server: PickerServer) -> None:
        slow = asyncio.create_task(one(server, a_completion("x" * 2000), 500))
        bad = asyncio.create_task(one(server, b"{" * 2000, 500))
        await asyncio.sleep(0.1)
        assert header_destination(await one(server, a_completion(), 5))
        assert not slow.done()
        assert header_destination(await slow) and (await bad).immediate_response.status.code == 400

    service = with_server(test, service=replace(a_service(), reader=Slow(), thread_bytes=1000))
    assert service.counters.get("prompt_tokens_total") == 2000 // 4 + len("Say this is a test") // 4


def test_a_body_that_does_not_end_is_not_held_at_the_cost_of_others() -> None:
    async def test(server: PickerServer) -> None:
        server._servers[0].most_held_bytes = 150_000
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            long, short = a_call(channel), a_call(channel)
            for call in (long, short):
                await call.write(request_headers())
            await short.write(request_body(a_completion()[:10], end=False))
            for _ in range(3):
                await long.write(request_body(b"x" * 60_000, end=False))
            refused = (await long.read()).immediate_response
            assert refused.status.code == 503 and b"memory for request bodies is full" in refused.body
            await short.write(request_body(a_completion()[10:]))
            assert header_destination(await short.read())

    service = with_server(test)
    assert (
        service.counters.get("door_refusals_total", "bytes")
        == service.counters.get("requests_refused_total", "503")
        == 1
    )


def test_a_long_body_comes_back_whole() -> None:
    body = a_completion("x" * 1_000_000)

    async def test(server: PickerServer) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = a_call(channel)
            await call.write(request_headers())
            for start in range(0, len(body), 60_000):
                await call.write(request_body(body[start : start + 60_000], end=start + 60_000 >= len(body)))
            assert header_destination(await call.read())
            back = b""
            while len(back) < len(body):
                back += (await call.read()).request_body.response.body_mutation.streamed_response.body
            assert back == body
            await call.write(response_headers())
            assert (await call.read()).WhichOneof("response") == "response_headers"

    with_server(test)


def test_a_taken_port_is_said() -> None:
    async def test(server: PickerServer) -> None:
        second = PickerServer(a_service(), f"127.0.0.1:{server.port}")
        with pytest.raises(SkyMemoryError, match="the port is taken by another process"):
            await second.start()

    with_server(test)
