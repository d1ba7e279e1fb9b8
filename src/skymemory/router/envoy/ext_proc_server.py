"""The gRPC server around ``ext_proc``: streams, health, TLS, and a stop that lets requests finish."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import logging
import ssl
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from skymemory.conductor.request import Request
from skymemory.errors import InvalidInput, MissingExtra, SkyMemoryError, cannot_listen, os_reason
from skymemory.files import read_bounded

try:
    from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
    from google.protobuf.message import DecodeError

    from skymemory.router.envoy.grpc.health import NOT_SERVING, SERVING, HealthBook
    from skymemory.router.envoy.grpc.server import INTERNAL, UNKNOWN, Answers, Call, GrpcServer
except ImportError as error:
    raise MissingExtra("the endpoint picker needs the extra `envoy`: pip install 'skymemory[envoy,router]'") from error

from skymemory.router.api_error import ApiError
from skymemory.router.envoy.ext_proc import Exchange
from skymemory.router.envoy.messages import LIVENESS, READINESS, SERVICE
from skymemory.router.envoy.picker_service import PickerService
from skymemory.router.settings import host_and_port

log = logging.getLogger("skymemory.router")
HEALTH_STREAMS, HEALTH_BYTES = 1_000, 64 << 10
LONG_BODY_BYTES = 1 << 20
"""Longer bodies are read one at a time: reading takes some five times their length of memory."""
SPARE_STREAMS = 1_000
"""Calls of a connection beyond ``most_streams``, so that those get a 429, and health checks an answer."""
CERTIFICATE_DAYS = 365
"""Validity of a self-signed certificate."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM. With ``clients_ca`` only clients with a certificate of that authority may connect."""

    chain: bytes
    key: bytes
    clients_ca: bytes | None = None


class PickerServer:
    """``start``, then ``ready`` once endpoints are known, then ``stop``."""

    def __init__(
        self,
        service: PickerService,
        listen: str,
        certificate: Certificate | None = None,
        health_listen: str | None = None,
    ) -> None:
        """
        Args:
            listen: ``ip:port``; port 0 takes a free one, then in ``port``.
            health_listen: serves health checks without TLS: Kubernetes' own probes have none.
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
        """
        Raises:
            SkyMemoryError: an address cannot be bound, or the certificate is invalid.
        """
        most = self._service.settings
        self._set_ready(False)
        self._health.set(LIVENESS, SERVING)
        self._service.open(asyncio.get_running_loop())
        long_bodies = asyncio.Lock()
        methods = {
            **self._health.methods(),
            f"/{SERVICE}/Process": lambda answers: _Stream(self._service, answers, long_bodies),
        }
        # Envoy's pieces are at most its buffer, by default 1 MiB.
        server = self._grpc_server(methods, most.most_body_bytes + (1 << 16), most.most_streams + SPARE_STREAMS)
        context = None if self._certificate is None else _context(self._certificate)
        self.port = await self._serve(server, self._listen, context)
        if self._health_listen is not None:
            server = self._grpc_server(self._health.methods(), HEALTH_BYTES, HEALTH_STREAMS)
            self.health_port = await self._serve(server, self._health_listen, None)

    async def ready(self) -> None:
        """Report readiness: endpoints are known."""
        self._set_ready(True)

    async def stop(self, grace_s: float) -> None:
        """Report that it is not ready, then give requests in flight ``grace_s`` to end."""
        self._set_ready(False)
        self._health.close()
        for listener in self._listeners:
            listener.close()
        await asyncio.gather(*(server.close(grace_s) for server in self._servers))
        self._service.close()

    def _grpc_server(
        self, methods: Mapping[str, Callable[[Answers], Call]], most_bytes: int, most_streams: int
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
        """Under the protocol's names, and under the empty one, for probes that send none."""
        for name in ("", READINESS, SERVICE):
            self._health.set(name, SERVING if ready else NOT_SERVING)


class _Stream(Call):
    """An exchange, as a gRPC call."""

    def __init__(self, service: PickerService, answers: Answers, long_bodies: asyncio.Lock | None = None) -> None:
        """``long_bodies``: held while a body of ``LONG_BODY_BYTES`` or more is read."""
        self._service, self._answers, self._long_bodies = service, answers, long_bodies
        self._exchange: Exchange | None = Exchange(service, self._send)
        self._reading: asyncio.Task[None] | None = None

    def message(self, data: bytes) -> None:
        try:
            message = ProcessingRequest.FromString(data)
        except DecodeError:
            self._answers.finish(INTERNAL, "expected a ProcessingRequest")
            return
        least = self._service.thread_bytes
        if least is None or self._exchange is None or not self._exchange.ends_request(message, least):
            self._receive(message, None)
            return
        self._answers.hold()
        self._reading = asyncio.create_task(self._read_in_thread(self._exchange, message))

    def ended(self) -> None:
        self._answers.finish()

    def held_bytes(self) -> int:
        return 0 if self._exchange is None else self._exchange.held_bytes()

    def too_much(self) -> None:
        if self._exchange is not None:
            self._send(self._exchange.too_much())

    def gone(self) -> None:
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

    async def _read_in_thread(self, exchange: Exchange, message: ProcessingRequest) -> None:
        """Read a long prompt while the event loop serves other requests."""
        many = self._long_bodies is not None and exchange.held_bytes() >= LONG_BODY_BYTES
        try:
            async with self._long_bodies if many and self._long_bodies is not None else nullcontext():
                read = await asyncio.to_thread(lambda: self._service.outcome(*exchange.whole_request(message)))
                self._receive(message, read)
        except Exception:
            log.exception("reading a prompt failed")
            self._service.counters.add("faults_total")
            self._answers.finish(UNKNOWN, "internal error of the endpoint picker; see its log")
            return
        self._reading = None
        self._answers.go_on()


def _context(certificate: Certificate) -> ssl.SSLContext:
    """
    Raises:
        InvalidInput: chain and key do not match, or are no PEM.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    try:
        # Python's ssl reads chain and key from files only; this one is private, and deleted at once.
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


def self_signed(names: tuple[str, ...] = ("localhost", "127.0.0.1")) -> Certificate:
    """A self-signed certificate for ``names``, host names or addresses, that lasts as long as the process.

    Enough for gateways of the inference extension: they encrypt, and do not verify the picker's name.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise MissingExtra(
            "a self-signed certificate needs the extra `secure`: pip install 'skymemory[secure]'"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "skymemory endpoint picker")])
    now = datetime.datetime.now(datetime.UTC)
    alternatives: list[x509.GeneralName] = []
    for name in names:
        try:
            alternatives.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            alternatives.append(x509.DNSName(name))
    signed = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=CERTIFICATE_DAYS))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Certificate(signed.public_bytes(serialization.Encoding.PEM), secret)


def from_files(chain: Path, key: Path, clients_ca: Path | None = None) -> Certificate:
    """
    Raises:
        InvalidInput: an unreadable file, or no PEM.
    """
    parts = []
    for path, word in ((chain, b"CERTIFICATE"), (key, b"PRIVATE KEY"), (clients_ca, b"CERTIFICATE")):
        if path is None:
            continue
        try:
            parts.append(read_bounded(path))
        except OSError as error:
            raise InvalidInput(f"{str(path)!r} cannot be read: {os_reason(error)}") from error
        if b"-----BEGIN " not in parts[-1] or word not in parts[-1]:
            raise InvalidInput(f"{str(path)!r}: expected PEM with a {word.decode().lower()}")
    return Certificate(*parts)
