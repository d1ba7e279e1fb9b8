"""Processes of the vLLM demos: a constellation, its store daemon, and engines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import skymemory
import skymemory_lab
from skymemory.engine.vllm.settings import transfer_config
from skymemory.errors import InvalidInput, os_reason
from skymemory.installation import make_command
from skymemory.progress import Progress
from skymemory.testbed.liveness import StartWait, guard
from skymemory.testbed.open_store import host_address
from skymemory.units import format_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_GRACE_S = 15.0
_SKYMEMORY = (sys.executable, "-m", "skymemory.cli.main", "--end-with-stdin")
_FIND = """
import importlib.util
print(*(name for name in ("vllm", "openai") if importlib.util.find_spec(name) is None), sep=" and no ", end="")
"""
_LEAST_SHARED_BYTES, _MOST_SHARED_BYTES = 36 << 20, 256 << 20
"""Size of a demo's store in shared memory: its own model's prompts fill two thirds of the least."""
_VLLM_SHARED_BYTES = 256 << 20
"""Shared memory that stays free: vLLM 0.32 for the CPU starts only where 240 MiB are."""
_OTHER_STORES = "or give --store 'host://256MiB?at=FOLDER' with a folder in another file system in memory"
_FIND_S = 120.0  # timeout for finding packages, on a busy computer with a cold disk
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def random_model(folder: Path, progress: Progress, *, windows: bool = False) -> Path:
    """Make a model of 280 million parameters: a prefill takes seconds on two cores.

    With ``windows``, five of six layers have a sliding window of 512 tokens.
    """
    from transformers.utils import logging as transformers_logging

    from skymemory.engine.transformers.models import TINYLLAMA_SHAPE, build_llama, train_tokenizer

    shape = "Gemma 3's shape, 6 of the 1B's 26 layers" if windows else "TinyLlama's shape, 6 of its 22 layers"
    progress.say(f"a model of {shape}, with random weights")
    transformers_logging.disable_progress_bar()
    tokenizer = train_tokenizer()
    common = {"num_hidden_layers": 6, "vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    if windows:
        model = _gemma(common, tokenizer)
    else:
        model = build_llama({**TINYLLAMA_SHAPE, **common}, dtype="bfloat16")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _gemma(common: Mapping[str, int], tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **common,
        hidden_size=1152,
        intermediate_size=6912,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return made


@contextmanager
def constellation(folder: Path) -> Iterator[None]:
    command = [*_SKYMEMORY, "constellation", "up", "--foreground", "--base-port", "auto", "--delay", "real"]
    log = folder / "constellation.log"
    with _process([*command, "--run-dir", str(folder / "run")], log) as process:
        _until(lambda: " is up: " in log.read_text("utf-8"), process, "the constellation", log)
        yield


@contextmanager
def _process(
    command: Sequence[str], log: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in its own group, ended with its children, also when this process is killed.

    `skymemory` commands notice that by their standard input, others by a guard.
    """
    ours = command[: len(_SKYMEMORY)] == [*_SKYMEMORY]
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if ours else subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    guarded = None if ours else guard(process.pid)
    try:
        yield process
    finally:
        if guarded is not None:
            guarded.kill()
            guarded.communicate()
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _until(ready: Callable[[], bool], started: subprocess.Popen[bytes], name: str, log: Path) -> None:
    wait = StartWait(name, started.pid, lambda: log.read_text("utf-8", "replace"))
    while not ready():
        if (code := started.poll()) is not None:
            raise wait.on_exit(code)
        wait.check()
        time.sleep(0.2)


@contextmanager
def store_daemon(folder: Path, store: str = "") -> Iterator[str]:
    """Yield the address by which engines use a daemon for ``store``; empty: the folder's constellation."""
    store = store or f"constellation://{folder / 'run'}"
    log, path = folder / "daemon.log", folder / "sky.sock"
    with _process([*_SKYMEMORY, "store", "serve", store, "--listen", f"unix://{path}"], log) as process:
        _until(path.is_socket, process, "the store daemon", log)
        yield host_address(store) or f"unix://{path}"


@contextmanager
def shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[str]:
    """Yield the address of a host store as large as a demo needs, in a folder of its own in ``folder``.

    Raises:
        InvalidInput: too little memory is free there; the message says what to do.
    """
    try:
        free = os.statvfs(folder)
        free_bytes = free.f_bavail * free.f_frsize
    except OSError as error:
        raise InvalidInput(f"{folder}: {os_reason(error)}: {_OTHER_STORES}") from error
    # An arena takes an eighth more than its size.
    size_bytes = min(_MOST_SHARED_BYTES, (free_bytes - _VLLM_SHARED_BYTES) * 3 // 4)
    if size_bytes < _LEAST_SHARED_BYTES:
        raise InvalidInput(
            f"{folder}: {format_size(free_bytes)} of shared memory are free; vLLM for the CPU wants "
            f"{format_size(_VLLM_SHARED_BYTES)} and the demo's store {format_size(_LEAST_SHARED_BYTES * 4 // 3)}: "
            f"raise its size (docker: --shm-size 1g, or --ipc=host), {_OTHER_STORES}"
        )
    with tempfile.TemporaryDirectory(prefix="skymemory-demo-", dir=folder) as made:
        yield f"host://{size_bytes >> 20}MiB?at={made}"


class HttpServer(NamedTuple):
    url: str
    wait: Callable[[], None]
    """Wait until its /health answers 200.

    Raises:
        SkyMemoryError: it ends or makes no progress (``testbed.liveness``).
    """


@contextmanager
def http_server(
    words: Callable[[int], Sequence[str]],
    name: str,
    log: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[HttpServer]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return True
        except OSError:
            return False

    with _process(words(port), log, environment) as process:
        yield HttpServer(url, lambda: _until(healthy, process, name, log))


def vllm_server(
    python: Path, model: Path, folder: Path, name: str, store: str, role: str = "both"
) -> AbstractContextManager[HttpServer]:
    """Run vLLM with the connector, or plain without ``store``. ``role`` is as in ``transfer_config``."""
    transfer = ["--kv-transfer-config", json.dumps(transfer_config({"store": store}, role))] if store else []
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "sky"),
        *("--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "2048"),
        *("--block-size", "32", "--enforce-eager", "--enable-prompt-tokens-details"),
        *("--gpu-memory-utilization", "0.3"),  # two servers on one GPU
        *transfer,
    ]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return http_server(
        lambda port: [*command, "--port", str(port)],
        "vLLM",
        folder / f"{name}.log",
        {"PYTHONPATH": our_package(), **quiet, **cpu},
    )


def python_of_vllm(path: Path, otherwise: str = "") -> Path:
    """Return the absolute path of ``path``, a Python with vLLM and the openai client.

    Raises:
        InvalidInput: it is no such Python; the message says how to make an environment, or ``otherwise``.
    """
    python = path.absolute()
    if not python.is_file():
        problem = "no such file"
    else:
        done = subprocess.run([str(python), "-c", _FIND], capture_output=True, text=True, timeout=_FIND_S)
        if done.returncode == 0 and done.stdout == "":
            return python
        problem = f"has no {done.stdout.strip()}" if done.returncode == 0 else "is no Python that runs"
    raise InvalidInput(
        f"--python {path}: {problem}; {make_command('demo-vllm')} makes an environment with vLLM in .venv-vllm there, "
        f"or name the Python of any other{otherwise}"
    )


def own_engine(folder: Path, name: str, store: str, role: str, *options: str) -> AbstractContextManager[HttpServer]:
    command = [*_SKYMEMORY, "serve", "--name", "sky", "--store", store, "--role", role, *options]
    return http_server(
        lambda port: [*command, "--listen", f"127.0.0.1:{port}"], "the engine", folder / f"{name}.log", _ONE_THREAD
    )


def router(folder: Path, name: str, *options: str, settings: str = "") -> AbstractContextManager[HttpServer]:
    """Run a router with ``settings``, in TOML."""
    file = folder / f"{name}.toml"
    file.write_text(settings, "utf-8")
    return http_server(
        lambda port: [*_SKYMEMORY, "route", "--listen", f"127.0.0.1:{port}", "--settings", str(file), *options],
        "the router",
        folder / f"{name}.log",
    )


def our_package() -> str:
    """Return the PYTHONPATH with which another environment's Python finds product and laboratory."""
    return os.pathsep.join(
        dict.fromkeys(str(Path(str(package.__file__)).parents[1]) for package in (skymemory, skymemory_lab))
    )
