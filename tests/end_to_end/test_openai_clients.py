"""What programs use that were written for OpenAI's API, unchanged and through the whole door: TLS, keys, quotas, CORS.

The Python clients have an environment of their own and the JavaScript one a folder; `make test-clients` makes both.
The browser is Debian's Chromium, or another by the name of chromium or google-chrome. What is not there is skipped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="an engine needs skymemory[hf]")
pytest.importorskip("aiohttp", reason="the router needs skymemory[router]")
pytest.importorskip("cryptography", reason="certificates need skymemory[secure]")

from tests.end_to_end.client_scripts import HERE, assert_all_are_ok, became_in_javascript, became_in_python
from tests.end_to_end.real_door import Door, real_door, real_engines

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.clients, pytest.mark.timeout(600)]
TENANTS = "[tenants.gold]\nweight = 2.0\n\n[tenants.small]\nrequests_per_minute = 20\n"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def page_server() -> Iterator[PageServer]:
    with PageServer.running() as server:
        yield server


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, page_server: PageServer) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("door")
    with (
        real_engines(2) as engines,
        real_door(folder, engines, TENANTS, f'cors.origins = ["{page_server.origin("localhost")}"]') as door,
    ):
        yield door


@pytest.mark.parametrize(("script", "checks"), [("openai_python.py", 13), ("litellm_langchain.py", 8)])
def test_clients_in_python(door: Door, script: str, checks: int) -> None:
    assert_all_are_ok(became_in_python(door, script), checks)


def test_the_client_in_javascript(door: Door, tmp_path: Path) -> None:
    assert_all_are_ok(became_in_javascript(door, "openai_client.mjs", tmp_path), 9)


class PageServer(ThreadingHTTPServer):
    """Hands out the page, and takes what it says. Its origin is whichever name of this computer it is asked by."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Page)
        self.asks: dict[str, str] = {}
        self.reported: dict[str, Any] = {}
        self.has_reported = threading.Event()

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[PageServer]:
        with cls() as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield server
            finally:
                server.shutdown()
                thread.join()

    def origin(self, host: str) -> str:
        return f"http://{host}:{self.server_port}"


class _Page(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        if self.path == "/asks":
            self._answer("application/json", json.dumps(self.server.asks).encode())
        else:
            self._answer("text/html; charset=utf-8", (HERE / "page.html").read_bytes())

    def do_POST(self) -> None:
        self.server.reported = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer("text/plain", b"")
        self.server.has_reported.set()

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def reported_by_page(door: Door, pages: PageServer, host: str, profile: Path) -> dict[str, Any]:
    """What the page could do, asked for from a browser by this name of ours."""
    if BROWSER is None:
        pytest.skip("no browser: Debian's package is chromium")
    pages.asks = {"door": door.url, "key": door.keys["gold"], "smallKey": door.keys["small"]}
    pages.has_reported.clear()
    browser = subprocess.Popen(
        [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--ignore-certificate-errors",
            "--no-proxy-server",
            f"--user-data-dir={profile}",
            pages.origin(host),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    try:
        came = pages.has_reported.wait(120)
    finally:
        browser.terminate()
        _, errors = browser.communicate(timeout=30)
    assert came, errors.decode("utf-8", "replace")[-2000:]
    return pages.reported


def test_a_page_of_an_allowed_origin(door: Door, page_server: PageServer, tmp_path: Path) -> None:
    reported = reported_by_page(door, page_server, "localhost", tmp_path)
    assert reported["whole"]["status"] == 200 and reported["whole"]["text"], reported
    assert "server" in json.loads(reported["whole"]["decision"])
    streamed = reported["streamed"]
    assert streamed["text"] == reported["whole"]["text"] and streamed["done"] and not streamed["left"], reported
    assert streamed["reads"] > 1, "it came piece by piece"
    assert reported["left"] == {"status": 200}
    assert reported["wrongKey"] == {"status": 401, "code": "invalid_api_key"}, "a page is shown what is wrong"
    assert reported["models"] == {"status": 200, "models": ["small"]}
    assert reported["overQuota"]["status"] == 429 and int(reported["overQuota"]["retryAfter"]) >= 1
    assert reported["overQuota"]["left"] == "0" and reported["noPreflight"] == {"status": 200}


def test_a_page_of_another_origin_is_shown_nothing(door: Door, page_server: PageServer, tmp_path: Path) -> None:
    reported = reported_by_page(door, page_server, "127.0.0.1", tmp_path)
    assert set(reported) >= {"whole", "streamed", "left", "wrongKey", "models", "overQuota", "noPreflight"}
    assert all(said == "TypeError: Failed to fetch" for said in reported.values()), reported
