"""Processes of the routing demo: engines and the router."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO

from skymemory.testbed.liveness import StartWait

_LOOK_S = 0.5
GRACE_S = 5.0
_ADDRESS = re.compile(r"http://[^\s/]+:\d+")
# Four engines share the cores. With a thread pool each, they would slow each other down, and unevenly.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@asynccontextmanager
async def service(name: str, addresses: int, *words: str) -> AsyncIterator[list[str]]:
    """Run ``skymemory WORDS``, and yield its first ``addresses`` printed addresses.

    It ends with this process, by its standard input.

    Raises:
        SkyMemoryError: the command ended, or made no progress (``testbed.liveness``).
    """
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "skymemory.cli.main",
            "--end-with-stdin",
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, **_ONE_THREAD},
            # Ctrl-C goes to every process of the terminal's group; the demo ends its children itself, in order.
            start_new_session=True,
        )
        try:
            yield await _addresses(name, addresses, process, log)
        finally:
            await _end(process)


async def _addresses(name: str, addresses: int, process: asyncio.subprocess.Process, log: IO[bytes]) -> list[str]:
    assert process.stdout is not None
    urls: list[str] = []
    wait = StartWait(name, process.pid, lambda: _read(log))
    reading = asyncio.ensure_future(process.stdout.readline())
    try:
        while len(urls) < addresses:
            if not (await asyncio.wait([reading], timeout=_LOOK_S))[0]:
                wait.check()
                continue
            if not (line := reading.result()):
                raise wait.on_exit(await asyncio.wait_for(process.wait(), GRACE_S))
            urls += _ADDRESS.findall(line.decode(errors="replace"))
            reading = asyncio.ensure_future(process.stdout.readline())
    finally:
        reading.cancel()
    return urls


def _read(log: IO[bytes]) -> str:
    # With an offset, because the child writes at the file position that it shares with this process.
    return os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), GRACE_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
