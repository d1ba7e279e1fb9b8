"""gRPC server around ``ext_proc``: streams, health checks, TLS, graceful stop."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

from skymemory.conductor.request import Request
from skymemory.errors import SkyMemoryError, cannot_listen, missing_extra

try:
    from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
    from google.protobuf.message import DecodeError
    from grpc_health.v1 import health_pb2

    from skymemory.router.envoy.grpc.grpc_server import (
        INTERNAL,
        NOT_FOUND,
        OK,
        UNAVAILABLE,
        UNKNOWN,
        Answers,
        GrpcCall,
        GrpcServer,
    )
except ImportError as error:
    raise missing_extra("the endpoint picker", str(error.name), "envoy", "router") from error

from skymemory.addresses import host_and_port
from skymemory.router.api_error import ApiError
from skymemory.router.envoy.ext_proc import ExtProcExchange, PickerService
from skymemory.router.envoy.messages import LIVENESS, READINESS, SERVICE
from skymemory.router.tls import PemCertificate, grpc_context

log = logging.getLogger("skymemory.router")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN_SERVICE = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
HEALTH_STREAMS, HEALTH_BYTES = 1_000, 64 << 10
LONG_BODY_BYTES = 1 << 20
"""Length from which bodies are read one at a time: reading takes about five times their length of memory."""
SPARE_STREAMS = 1_000
"""Calls beyond ``max_streams``, for 429 responses and health checks."""


class PickerServer:
    """Server of the picker. Call ``start``, ``ready``, then ``stop``."""

    def __init__(
        self,
        service: PickerService,
        listen: str,
        certificate: PemCertificate | None = None,
        health_listen: str | None = None,
    ) -> None:
        """Create the server.

        Args:
            listen: port 0 takes a free port, then in ``port``.
            health_listen: health checks without TLS, for Kubernetes' probes.
        """
        self._service = service
        self._listen = listen
        self._certificate = certificate
        self._health_listen = health_listen
        self._health = HealthBook()
        self._listeners: list[asyncio.Server] = []
        self._servers: list[GrpcServer] = []
        self.port = self.health_port = 0

    async def start(self) -> None:
        """Listen.

        Raises:
            SkyMemoryError: an address cannot be bound, or the certificate is invalid.
        """
        self._set_ready(False)
        self._health.set(LIVENESS, SERVING)
        self._service.open(asyncio.get_running_loop())
        long_bodies = asyncio.Lock()
        methods = {
            **self._health.methods(),
            f"/{SERVICE}/Process": lambda answers: _ExtProcStream(self._service, answers, long_bodies),
        }
        # Envoy's pieces are at most its buffer, by default 1 MiB.
        server = self._grpc_server(
            methods, self._service.most_body_bytes + (1 << 16), self._service.settings.max_streams + SPARE_STREAMS
        )
        context = None if self._certificate is None else grpc_context(self._certificate)
        self.port = await self._serve(server, self._listen, context)
        if self._health_listen is not None:
            server = self._grpc_server(self._health.methods(), HEALTH_BYTES, HEALTH_STREAMS)
            self.health_port = await self._serve(server, self._health_listen, None)

    async def ready(self) -> None:
        self._set_ready(True)

    async def stop(self, grace_s: float) -> None:
        self._set_ready(False)
        self._health.close()
        for listener in self._listeners:
            listener.close()
        await asyncio.gather(*(server.close(grace_s) for server in self._servers))
        self._service.close()

    def _grpc_server(
        self, methods: Mapping[str, Callable[[Answers], GrpcCall]], most_bytes: int, most_streams: int
    ) -> GrpcServer:
        server = GrpcServer(
            methods,
            most_bytes,
            most_streams,
            faults=lambda: self._service.counters.add("faults_total"),
            refused=lambda reason: self._service.counters.add("door_refusals_total", label=reason),
        )
        self._servers.append(server)
        return server

    async def _serve(self, server: GrpcServer, listen: str, context: ssl.SSLContext | None) -> int:
        host, port = host_and_port(listen)
        try:
            listener = await asyncio.get_running_loop().create_server(
                server.connect,
                host,
                port,
                ssl=context,
                ssl_handshake_timeout=None if context is None else server.preface_s,
                backlog=1024,
            )
        except OSError as error:
            raise SkyMemoryError(cannot_listen(listen, error)) from error
        self._listeners.append(listener)
        return int(listener.sockets[0].getsockname()[1])

    def _set_ready(self, ready: bool) -> None:
        for name in ("", READINESS, SERVICE):
            self._health.set(name, SERVING if ready else NOT_SERVING)


class _ExtProcStream(GrpcCall):
    def __init__(self, service: PickerService, answers: Answers, long_bodies: asyncio.Lock | None = None) -> None:
        """``long_bodies`` is held while a body of ``LONG_BODY_BYTES`` or more is read."""
        self._service, self._answers, self._long_bodies = service, answers, long_bodies
        self._exchange: ExtProcExchange | None = ExtProcExchange(service, self._send)
        self._reading: asyncio.Task[None] | None = None

    def message(self, data: bytes) -> None:
        try:
            message = ProcessingRequest.FromString(data)
        except DecodeError:
            self._answers.finish(INTERNAL, "expected a ProcessingRequest")
            return
        if self._exchange is None or not self._exchange.is_read_in_thread(message):
            self._receive(message, None)
            return
        # Later messages of this stream wait (`hold`): they must not overtake the answer to this message.
        self._answers.hold()
        self._reading = asyncio.create_task(self._read_in_thread(self._exchange, message))

    def on_messages_end(self) -> None:
        self._answers.finish()

    def held_bytes(self) -> int:
        return 0 if self._exchange is None else self._exchange.held_bytes()

    def too_much(self) -> None:
        if self._exchange is not None:
            self._send(self._exchange.too_much())

    def on_closed(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.closed(time.monotonic())
        if self._reading is not None:
            self._reading.cancel()

    def _receive(self, message: ProcessingRequest, read: Request | ApiError | None) -> None:
        if self._exchange is not None:
            self._send(self._exchange.receive(message, time.monotonic(), read))

    def _send(self, answers: Iterable[bytes]) -> None:
        if isinstance(answers, tuple):
            if answers:
                self._answers.send(*answers)
        else:
            self._answers.send_all(answers)

    async def _read_in_thread(self, exchange: ExtProcExchange, message: ProcessingRequest) -> None:
        many = self._long_bodies is not None and exchange.may_be_longer_than(LONG_BODY_BYTES)
        try:
            async with self._long_bodies if many and self._long_bodies is not None else nullcontext():
                read = await asyncio.to_thread(exchange.read_whole, message)
                self._receive(message, read)
        except Exception:
            log.exception("reading a prompt failed")
            self._service.counters.add("faults_total")
            self._answers.finish(UNKNOWN, "internal error of the endpoint picker; see its log")
            return
        self._reading = None
        self._answers.go_on()


# gRPC's health protocol (`grpc.health.v1`): Check and Watch, by service name


class HealthBook:
    """States of services, for health checks."""

    def __init__(self) -> None:
        self._states: dict[str, int] = {}
        self._watches: set[_Watch] = set()

    def methods(self) -> Mapping[str, Callable[[Answers], GrpcCall]]:
        service = "/grpc.health.v1.Health"
        return {
            f"{service}/Check": lambda answers: _Check(self, answers),
            f"{service}/Watch": lambda answers: _Watch(self, answers),
        }

    def set(self, name: str, state: int) -> None:
        if self._states.get(name) == state:
            return
        self._states[name] = state
        for watch in list(self._watches):
            if watch.name == name:
                watch.send_state()

    def state(self, name: str) -> int | None:
        return self._states.get(name)

    def close(self) -> None:
        for watch in list(self._watches):
            watch.end()

    def join(self, watch: _Watch) -> None:
        self._watches.add(watch)

    def part(self, watch: _Watch) -> None:
        self._watches.discard(watch)


class _Check(GrpcCall):
    """Health check with a single answer."""

    def __init__(self, book: HealthBook, answers: Answers) -> None:
        self._book, self._answers = book, answers

    def message(self, data: bytes) -> None:
        name = _requested(self._answers, data)
        if name is None:
            return
        state = self._book.state(name)
        if state is None:
            self._answers.finish(NOT_FOUND, "unknown service")
            return
        self._answers.send(_response(state))
        self._answers.finish(OK)

    def on_messages_end(self) -> None:
        self._answers.finish(INTERNAL, "the call had no request")

    def on_closed(self) -> None:
        pass


class _Watch(GrpcCall):
    """Health check with an answer at every change."""

    name: str | None = None

    def __init__(self, book: HealthBook, answers: Answers) -> None:
        self._book, self._answers = book, answers

    def message(self, data: bytes) -> None:
        self.name = _requested(self._answers, data)
        if self.name is not None:
            self._book.join(self)
            self.send_state()

    def send_state(self) -> None:
        state = None if self.name is None else self._book.state(self.name)
        self._answers.send(_response(UNKNOWN_SERVICE if state is None else state))

    def end(self) -> None:
        self._answers.finish(UNAVAILABLE, "the picker stops")

    def on_messages_end(self) -> None:
        if self.name is None:
            self._answers.finish(INTERNAL, "the call had no request")

    def on_closed(self) -> None:
        self._book.part(self)


def _requested(answers: Answers, data: bytes) -> str | None:
    try:
        return str(health_pb2.HealthCheckRequest.FromString(data).service)
    except DecodeError:
        answers.finish(INTERNAL, "expected a HealthCheckRequest")
        return None


def _response(state: int) -> bytes:
    return bytes(health_pb2.HealthCheckResponse(status=state).SerializeToString())
