"""A Redis or Valkey server of a test's own, on a Unix socket, with nothing kept on disk."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from skymemory.store.redis import RedisStore

_SERVER = shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer:
    """Skips the test, visibly, where no server (or no client) is installed."""

    def __init__(self, directory: Path, *options: str) -> None:
        if _SERVER is None:
            pytest.skip("neither redis-server nor valkey-server is installed")
        pytest.importorskip("redis")
        self.socket = directory / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._command = [_SERVER, "--port", "0", "--unixsocket", str(self.socket), "--save", "", *options]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        probe = RedisStore(self.url)
        ends_s = time.monotonic() + 20
        while probe.put_many([(bytes(32), b"")]) != [True]:
            if time.monotonic() > ends_s or self.process.poll() is not None:
                self.stop()
                raise AssertionError("the server does not come up")
            time.sleep(0.02)
        probe.delete([bytes(32)])
        probe.close()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
