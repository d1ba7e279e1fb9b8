"""The gRPC shell around ``ext_proc``: streams, health, TLS, a stop that lets requests finish."""

from __future__ import annotations

import asyncio
import logging
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from skymemory.errors import InvalidInput, MissingExtra, SkyMemoryError

try:
    from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
    from google.protobuf.message import DecodeError

    from skymemory.router.grpc_door import INTERNAL, UNKNOWN, Answers, Call, Door
    from skymemory.router.grpc_health import NOT_SERVING, SERVING, HealthBook
except ImportError as error:
    raise MissingExtra("the endpoint picker needs the extra `envoy`: pip install 'skymemory[envoy,router]'") from error

from skymemory.conductor.request import Request
from skymemory.router.desk import Desk, Refusal
from skymemory.router.ext_proc import Exchange
from skymemory.router.ext_proc_messages import LIVENESS, READINESS, SERVICE
from skymemory.router.setting_values import host_and_port

HEALTH_STREAMS, HEALTH_BYTES = 1_000, 64 << 10
log = logging.getLogger("skymemory.router")
STREAMS_BEYOND = 1_000
"""Calls of one connection beyond ``most_streams``: those get their 429, and health its answer."""


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
        self._health = HealthBook()
        self._listeners: list[asyncio.Server] = []
        self._doors: list[Door] = []
        self.port = self.health_port = 0

    async def start(self) -> None:
        """
        Raises:
            SkyMemoryError: an address cannot be bound, or the certificate is none.
        """
        most = self._desk.settings
        self._tell_ready(False)
        self._health.set(LIVENESS, SERVING)
        self._desk.after.when = asyncio.get_running_loop().call_soon
        methods = {**self._health.methods(), f"/{SERVICE}/Process": lambda answers: _Stream(self._desk, answers)}
        # Envoy's pieces are at most what it buffers, 1 MiB unless it is told otherwise.
        door = self._door(methods, most.most_body_bytes + (1 << 16), most.most_streams + STREAMS_BEYOND)
        context = None if self._certificate is None else _context(self._certificate)
        self.port = await self._serve(door, self._listen, context)
        if self._health_listen is not None:
            door = self._door(self._health.methods(), HEALTH_BYTES, HEALTH_STREAMS)
            self.health_port = await self._serve(door, self._health_listen, None)

    async def ready(self) -> None:
        """Endpoints are known; from now on the picker says that it can be asked."""
        self._tell_ready(True)

    async def stop(self, grace_s: float) -> None:
        """Say first that nothing new should come, then give what is under way ``grace_s`` to end."""
        self._tell_ready(False)
        self._health.close()
        for listener in self._listeners:
            listener.close()
        await asyncio.gather(*(door.close(grace_s) for door in self._doors))
        self._desk.after.settle()
        self._desk.after.when = None

    def _door(self, methods: Mapping[str, Callable[[Answers], Call]], most_bytes: int, most_streams: int) -> Door:
        door = Door(methods, most_bytes, most_streams, lambda: self._desk.counters.add("faults_total"))
        self._doors.append(door)
        return door

    async def _serve(self, door: Door, listen: str, context: ssl.SSLContext | None) -> int:
        host, port = host_and_port(listen)
        try:
            listener = await asyncio.get_running_loop().create_server(
                door.connect,
                host,
                port,
                ssl=context,
                ssl_handshake_timeout=None if context is None else door.preface_s,
                backlog=1024,
            )
        except OSError as error:
            raise SkyMemoryError(f"cannot listen on {listen}: is the port taken? ({error})") from error
        self._listeners.append(listener)
        return int(listener.sockets[0].getsockname()[1])

    def _tell_ready(self, ready: bool) -> None:
        """Under the protocol's names, and under none, for whoever knows no name."""
        for name in ("", READINESS, SERVICE):
            self._health.set(name, SERVING if ready else NOT_SERVING)


class _Stream:
    """An exchange, as a call."""

    def __init__(self, desk: Desk, answers: Answers) -> None:
        self._desk, self._answers = desk, answers
        self._exchange: Exchange | None = Exchange(desk)
        self._reading: asyncio.Task[None] | None = None

    def message(self, data: bytes) -> None:
        try:
            message = ProcessingRequest.FromString(data)
        except DecodeError:
            self._answers.finish(INTERNAL, "this is no ProcessingRequest")
            return
        least = self._desk.reads_elsewhere_bytes
        whole = None if least is None or self._exchange is None else self._exchange.whole_request(message)
        if least is None or whole is None or len(whole[1]) < least:
            self._receive(message, None)
            return
        self._answers.hold()
        self._reading = asyncio.create_task(self._read_elsewhere(message, whole))

    def ended(self) -> None:
        self._answers.finish()

    def gone(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.closed(time.monotonic())
        if self._reading is not None:
            self._reading.cancel()

    def _receive(self, message: ProcessingRequest, read: Request | Refusal | None) -> None:
        if self._exchange is not None:
            for answer in self._exchange.receive(message, time.monotonic(), read):
                self._answers.send(answer.SerializeToString())

    async def _read_elsewhere(self, message: ProcessingRequest, whole: tuple[Mapping[str, str], bytes]) -> None:
        """Of a prompt that takes long to read: others are picked for meanwhile."""
        try:
            self._receive(message, await asyncio.to_thread(self._desk.outcome, *whole))
        except Exception:
            log.exception("a prompt could not be read")
            self._desk.counters.add("faults_total")
            self._answers.finish(UNKNOWN, "a fault of the picker's own; its log says which")
            return
        self._reading = None
        self._answers.go_on()


def _context(certificate: Certificate) -> ssl.SSLContext:
    """
    Raises:
        InvalidInput: chain and key do not go together, or are no PEM.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    try:
        # Python's ssl takes chain and key from files only. This one nobody else may read, and it is gone at once.
        with tempfile.NamedTemporaryFile(suffix=".pem") as file:
            file.write(certificate.key + b"\n" + certificate.chain)
            file.flush()
            context.load_cert_chain(file.name)
        if certificate.clients_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=certificate.clients_ca.decode("ascii", "replace"))
    except (ssl.SSLError, OSError, ValueError) as error:
        raise InvalidInput(f"the certificate and its key cannot be used: {error}") from error
    return context
