"""``skymemory store serve``: what it refuses; the daemon itself is tested in tests/store/redis_server."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymemory.cli.main import main


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["memory", "--listen", "tcp://0.0.0.0:0"], "needs --password-file, --tls-cert and --tls-key"),
        (["memory", "--listen", "127.0.0.1"], "or unix:PATH"),
        (["memory", "--settings", "connections = 0"], "connections: 0: expected 1 or more"),
        (["memory", "--largest", "2MiB", "--settings", "in_flight = '1MiB'"], "at most `in_flight`, 1048576 bytes"),
        (["memory", "--password-file", "/nowhere/file"], "cannot read /nowhere/file: No such file"),
        (["memory", "--tls-cert", "a.pem"], "go together"),
        (["nothing://", "--listen", "unix:///tmp/never"], "store 'nothing://'"),
    ],
)
def test_what_is_refused(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if "--settings" in words:
        (tmp_path / "daemon.toml").write_text(words[-1])
        words = [*words[:-1], str(tmp_path / "daemon.toml")]
    assert main(["store", "serve", *words]) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1


def test_a_taken_port_is_said_as_by_all_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["store", "serve", "memory", "--listen", address]) == 1
    assert "the port is taken by another process" in capsys.readouterr().err


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """Port and certificate of a daemon with TLS and a password."""
    from skymemory.router.tls import self_signed

    pair = self_signed()
    (tmp_path / "chain.pem").write_bytes(pair.chain)
    (tmp_path / "key.pem").write_bytes(pair.key)
    (tmp_path / "password").write_text("secret\n")
    command = [sys.executable, "-m", "skymemory", "store", "serve", "memory", "--listen", "tcp://127.0.0.1:0"]
    command += ["--tls-cert", str(tmp_path / "chain.pem"), "--tls-key", str(tmp_path / "key.pem")]
    (tmp_path / "daemon.toml").write_text("stall = 3")
    command += ["--settings", str(tmp_path / "daemon.toml")]
    with subprocess.Popen([*command, "--password-file", str(tmp_path / "password")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline().split(b"127.0.0.1:")[1].split()[0]), tmp_path / "chain.pem"
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.brief()
def test_over_tls_with_a_password(secured: tuple[int, Path]) -> None:
    import time

    import redis

    port, chain = secured
    how = {"port": port, "ssl": True, "ssl_ca_certs": str(chain), "ssl_check_hostname": False}
    client = redis.Redis(host="127.0.0.1", password="secret", ssl_cert_reqs="none", **how)
    value = bytes(range(256)) * 20_000
    assert client.set("large", value) and client.get("large") == value and client.set("small", b"x")
    time.sleep(3.5)  # longer than a client may stall in the middle of a value
    assert client.get("small") == b"x"
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(host="127.0.0.1", ssl_cert_reqs="none", retry=None, **how).ping()
    with pytest.raises((redis.ConnectionError, ssl.SSLError)):
        redis.Redis(host="127.0.0.1", port=port, retry=None).ping()
