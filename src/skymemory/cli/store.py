"""``skymemory store serve``: any store as a daemon that speaks the Redis protocol."""

from __future__ import annotations

import argparse
import signal
import socket
import ssl
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from skymemory.addresses import ListenAddress
from skymemory.cli._options import add_rare_settings, size
from skymemory.config import duration, setting, whole_number
from skymemory.config import size as size_of
from skymemory.errors import InvalidInput, SkyMemoryError, cannot_listen, cannot_read, os_reason
from skymemory.files import check_readable, read_bounded
from skymemory.text import write_line

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    connections: int = setting("connections", whole_number, 1024, "limit of open connections")
    in_flight_bytes: int = setting("in_flight", size_of, 256 << 20, "bytes of values being sent and received")
    held_bytes: int = setting(
        "hold", size_of, 256 << 20, "memory for values that EXISTS has announced, of stores that lease nothing"
    )
    stall_s: float = setting(
        "stall",
        duration,
        30.0,
        "how long a client may stall in the middle of a value, and for all of it at 64 KiB/s",
    )

    def __post_init__(self) -> None:
        if self.connections < 1:
            raise InvalidInput(f"connections: {self.connections}: expected 1 or more")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("store", help="serve a store to other processes by the Redis protocol")
    actions = parser.add_subparsers(dest="action", metavar="serve", required=True)
    serve = actions.add_parser(
        "serve",
        help="serve a store until Ctrl-C",
        description="Serve a store by the Redis protocol (RESP2 and RESP3) until Ctrl-C: to vLLM, LMCache, redis-cli "
        "and all that speak it. A memory or disk store becomes one that several processes share.",
    )
    add = serve.add_argument
    add(
        "address",
        metavar="ADDRESS",
        help="the store, such as memory://4GiB, host://4GiB, disk:///directory?budget=60GiB, constellation or tiers:///FILE.toml",
    )
    add(
        "--listen",
        action="append",
        metavar="ADDRESS",
        help="unix:PATH or HOST:PORT; may be repeated (default: store.sock in this user's run directory)",
    )
    add("--password-file", type=Path, metavar="FILE", help="a file with the password that AUTH asks for")
    add("--tls-cert", type=Path, metavar="FILE", help="certificate chain (PEM) for tcp addresses")
    add("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")
    add(
        "--largest",
        type=size,
        metavar="SIZE",
        help="limit of a value, at most that of `in_flight` (default: 256MiB)",
    )
    add_rare_settings(serve, DaemonSettings)


def run(args: argparse.Namespace) -> int:
    from skymemory.store.redis_server.commands import Commands
    from skymemory.store.redis_server.daemon import Daemon, ServerLimits
    from skymemory.testbed.open_store import host_address, open_store
    from skymemory.testbed.run_directory import RunDirectory

    if args.listen is None:
        run_directory = RunDirectory()
        run_directory.create()
        args.listen = [f"unix://{run_directory.path / 'store.sock'}"]
    addresses = [_parse(text) for text in args.listen]
    password = _password(args.password_file)
    tls = _tls(args)
    for address in addresses:
        if not address.is_local and (password is None or tls is None):
            raise InvalidInput(
                f"--listen {address} is reachable from other computers: it needs --password-file, --tls-cert "
                "and --tls-key"
            )
    settings: DaemonSettings = args.settings
    most_bytes = settings.in_flight_bytes
    largest = args.largest if args.largest is not None else min(256 << 20, most_bytes)
    if not 0 < largest <= most_bytes:
        raise InvalidInput(f"--largest {largest}: expected above 0 and at most `in_flight`, {most_bytes} bytes")
    with open_store(args.address) as store:
        commands = Commands(
            store,
            password=password,
            in_flight_bytes=most_bytes,
            held_bytes=settings.held_bytes,
            wait_s=settings.stall_s,
        )
        daemon = Daemon(commands, ServerLimits(settings.connections, largest, settings.stall_s), tls)
        listeners: list[tuple[ListenAddress, socket.socket]] = []
        try:
            for address in addresses:
                listeners.append((address, _listen(address)))
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: daemon.stop())
            for address, listener in listeners:
                shown_address = address if address.path else replace(address, port=listener.getsockname()[1])
                write_line(f"the store {store.name} is served at {shown_address} until Ctrl-C")
            if arena := host_address(args.address):
                write_line(f"its memory is shared: engines of this computer attach by {arena}")
            daemon.serve([listener for _, listener in listeners])
        finally:
            for address, listener in listeners:
                if address.path:  # while it listens, the file is this process's own
                    Path(address.path).unlink(missing_ok=True)
                listener.close()
    return 0


def _parse(text: str) -> ListenAddress:
    try:
        return ListenAddress.parse(text, unix=True)
    except InvalidInput as error:
        raise InvalidInput(f"--listen {error}") from None


def _listen(address: ListenAddress) -> socket.socket:
    from skymemory.store.redis_server.daemon import listen_at

    try:
        return listen_at(address)
    except OSError as error:
        raise SkyMemoryError(cannot_listen(str(address), error)) from error


def _password(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        password = read_bounded(path).strip()
    except OSError as error:
        raise InvalidInput(cannot_read(path, error)) from error
    if not password:
        raise InvalidInput(f"--password-file {path}: the file is empty")
    return password


def _tls(args: argparse.Namespace) -> ssl.SSLContext | None:
    if (args.tls_cert is None) != (args.tls_key is None):
        raise InvalidInput("--tls-cert and --tls-key go together")
    if args.tls_cert is None:
        return None
    for path in (args.tls_cert, args.tls_key):
        check_readable(path)  # OpenSSL would wait for a pipe's writer
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(args.tls_cert, args.tls_key)
    except OSError as error:
        raise InvalidInput(f"--tls-cert {args.tls_cert}, --tls-key {args.tls_key}: {os_reason(error)}") from error
    return context
