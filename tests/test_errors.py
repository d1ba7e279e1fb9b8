"""Messages that several verbs share."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from collections.abc import Iterator

import pytest
from tests.router.envoy.exchanges import a_service

from skymemory.errors import InvalidInput, SkyMemoryError, cannot_listen
from skymemory.router.envoy.ext_proc_server import PickerServer
from skymemory.router.envoy.picker_metrics import MetricsPage
from skymemory.router.http.proxy_server import ProxyServer
from skymemory.router.settings import settings_from

pytest.importorskip("skymemory_lab", reason="the laboratory is not installed")

from skymemory_lab.engine.run import bound


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield f"127.0.0.1:{other.getsockname()[1]}"


def test_a_taken_port_has_one_wording(taken: str) -> None:
    """`route`, `epp` (gRPC and metrics) and `serve` say the same, without an error number."""
    wording = re.escape(f"cannot listen at {taken}: the port is taken by another process")
    proxy = ProxyServer(settings_from({"backends": ["http://127.0.0.1:1"], "listen": taken}))
    for start in (proxy.start, PickerServer(a_service(), taken).start, MetricsPage(a_service(), taken).start):
        with pytest.raises(SkyMemoryError, match=wording):
            asyncio.run(start())
    with pytest.raises(InvalidInput, match=wording):
        bound(*taken.split(":")[:1], int(taken.split(":")[1]))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EADDRNOTAVAIL, "Cannot assign"), "no such address"),
        (OSError(errno.EACCES, "Permission denied"), "1024"),
        (OSError(errno.ENODEV, "No such device"), "No such device"),
    ],
)
def test_other_reasons_are_said_without_their_number(error: OSError, words: str) -> None:
    message = cannot_listen("10.0.0.1:80", error)
    assert words in message and "Errno" not in message
