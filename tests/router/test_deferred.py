"""Work that no answer waits for: in order, before the next pick, and a fault of it ends nothing else."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from tests.router.envoy.exchanges import a_completion, a_service, header_destination, request_body, request_headers
from tests.router.envoy.test_ext_proc_server import a_call, with_server

from skymemory.conductor.picker import Server
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.simple import RoundRobin
from skymemory.router.envoy.ext_proc import WITHOUT_PROMPT
from skymemory.router.envoy.ext_proc_server import PickerServer
from skymemory.router.envoy.grpc.grpc_server import GrpcConnection
from skymemory.router.request_account import DeferredWork, RequestAccount


def test_it_is_done_at_once_or_when_answers_are_out_and_in_order() -> None:
    done, soon, faults = list[int](), list[Callable[[], None]](), list[int]()
    deferred = DeferredWork(lambda: faults.append(1))
    deferred.run(lambda: done.append(1))
    assert done == [1]
    deferred.schedule = soon.append
    deferred.run(lambda: done.append(2))
    deferred.run(lambda: [][0])
    deferred.run(lambda: done.append(3))
    assert done == [1] and len(soon) == 1
    soon.pop()()
    assert done == [1, 2, 3] and faults == [1]
    deferred.run(lambda: done.append(4))
    deferred.flush()
    soon.pop()()
    assert done == [1, 2, 3, 4]


def test_accounts_are_kept_before_the_next_pick_looks_at_them() -> None:
    service = a_service()
    soon: list[Callable[[], None]] = []
    service.deferred.schedule = soon.append
    first = service.choose(WITHOUT_PROMPT, None, 0.0)
    server = service.picker.fleet.servers[first.prefill.server]
    account = RequestAccount(service.scheduler, first, 0.0, service.deferred)
    assert server.in_flight == 0
    service.must_wait(WITHOUT_PROMPT, None, 0.0)
    assert server.in_flight == 1
    account.served_by("10.0.0.2:8000", 0.1)
    account.on_request_end(0.2, None)
    account.close(0.3)
    service.deferred.flush()
    assert {server.in_flight for server in service.picker.fleet} == {0}


def test_no_answer_waits_for_what_is_learnt_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    service, flush = a_service(), GrpcConnection.flush

    class Learner(RoundRobin):
        def routed(self, request: Request, server: Server, now_s: float) -> None:
            order.append("learnt")

    def watched(connection: GrpcConnection) -> None:
        if b"10.0.0." in b"".join(connection.http2._out) and not connection._inside:
            order.append("answered")
        flush(connection)

    async def test(server: PickerServer) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = a_call(channel)
            await call.write(request_headers())
            await call.write(request_body(a_completion()))
            assert header_destination(await call.read())

    monkeypatch.setattr(GrpcConnection, "flush", watched)
    service.picker.scorer = Learner()
    with_server(test, service)
    assert order == ["answered", "learnt"]
