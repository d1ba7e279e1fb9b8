"""Daemons in processes of their own, for the tests over the stores behind them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def daemon(address: str, *options: str) -> Iterator[str]:
    """The socket of a daemon over the store at ``address``; it must end well and leave no socket behind."""
    folder = Path(tempfile.mkdtemp())  # a socket's path must be short
    command = [sys.executable, "-m", "skymemory", "store", "serve", address, "--listen", f"unix://{folder}/s", *options]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None and "is served at" in process.stdout.readline()
                yield f"{folder}/s"
            finally:
                process.terminate()
            assert process.wait(20) == 0 and not (folder / "s").exists()
    finally:
        shutil.rmtree(folder)
