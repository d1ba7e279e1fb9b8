"""The gRPC shell around ``ext_proc``: streams, health, TLS, a stop that lets requests finish."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from skymemory.errors import MissingExtra, SkyMemoryError

try:
    import grpc
    from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
except ImportError as error:
    raise MissingExtra("the endpoint picker needs the extra `envoy`: pip install 'skymemory[envoy,router]'") from error

from skymemory.conductor.request import Request
from skymemory.router.desk import Desk, Refusal
from skymemory.router.ext_proc import Exchange
from skymemory.router.ext_proc_messages import LIVENESS, READINESS, SERVICE

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM. With ``clients_ca`` only clients that one of those signed may connect."""

    chain: bytes
    key: bytes
    clients_ca: bytes | None = None


class PickerServer:
    """``start``, then ``ready`` once endpoints are known, then ``stop``. ``desk`` is read between messages only."""

    def __init__(
        self, desk: Desk, listen: str, certificate: Certificate | None = None, health_listen: str | None = None
    ) -> None:
        """
        Args:
            listen: ``ip:port``; port 0 takes a free one, which ``port`` tells once it is bound.
            health_listen: where health is told without TLS too: Kubernetes' own probes cannot speak it.
        """
        self._desk = desk
        self._listen = listen
        self._certificate = certificate
        self._health_listen = health_listen
        self._health = health.aio.HealthServicer()
        self._servers: list[Any] = []
        self.port = self.health_port = 0

    async def start(self) -> None:
        """
        Raises:
            SkyMemoryError: an address cannot be bound.
        """
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                # Envoy's pieces are at most what it buffers, 1 MiB unless it is told otherwise.
                ("grpc.max_receive_message_length", self._desk.settings.most_body_bytes + (1 << 16)),
                # Envoy may ping as often as it likes, also while no request is under way.
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        )
        handler = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=ProcessingRequest.FromString,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
        await self._tell_ready(False)
        await self._health.set(LIVENESS, SERVING)
        self.port = await self._serve(server, self._listen, self._certificate)
        if self._health_listen is not None:
            server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
            self.health_port = await self._serve(server, self._health_listen, None)

    async def ready(self) -> None:
        """Endpoints are known; from now on the picker says that it can be asked."""
        await self._tell_ready(True)

    async def stop(self, grace_s: float) -> None:
        """Say first that nothing new should come, then give what is under way ``grace_s`` to end."""
        await self._tell_ready(False)
        for server in self._servers:
            await server.stop(grace_s)

    async def _serve(self, server: Any, listen: str, certificate: Certificate | None) -> int:
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            if certificate is None:
                port = server.add_insecure_port(listen)
            else:
                credentials = grpc.ssl_server_credentials(
                    [(certificate.key, certificate.chain)],
                    root_certificates=certificate.clients_ca,
                    require_client_auth=certificate.clients_ca is not None,
                )
                port = server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            raise SkyMemoryError(f"cannot listen on {listen}: is the port taken? ({error})") from error
        self._servers.append(server)
        await server.start()
        return int(port)

    async def _tell_ready(self, ready: bool) -> None:
        """Under the protocol's names, and under none, for whoever knows no name."""
        for name in ("", READINESS, SERVICE):
            await self._health.set(name, SERVING if ready else NOT_SERVING)

    async def _process(self, _: object, context: Any) -> None:
        exchange = Exchange(self._desk)
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                read = await self._read_elsewhere(exchange, message)
                for answer in exchange.receive(message, time.monotonic(), read):
                    await context.write(answer)
        finally:
            exchange.closed(time.monotonic())

    async def _read_elsewhere(self, exchange: Exchange, message: Any) -> Request | Refusal | None:
        """Of a prompt that takes long to read: others are picked for meanwhile."""
        least = self._desk.reads_elsewhere_bytes
        whole = None if least is None else exchange.whole_request(message)
        if least is None or whole is None or len(whole[1]) < least:
            return None
        return await asyncio.to_thread(self._desk.outcome, *whole)
