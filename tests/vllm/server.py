"""A real vLLM on the CPU, in its own environment (``make test-vllm`` prepares it), over the small trained model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("SKYMEMORY_VLLM_VENV", ROOT / ".venv-vllm")) / "bin" / "python"
MODEL = ROOT / "models/small/skymemory_small_model"
BLOCK_TOKENS = 32
BLOCKS = 96
START_S = 420.0
"""It takes 20 to 30 s on two cores that do nothing else, and ten times that where they are shared."""


class Vllm:
    """One server. ``folder`` takes its log and its sockets; a path for those has at most 107 letters. With ``ours`` it
    can import this package.
    """

    def __init__(self, folder: Path, name: str, *options: str, port: int = 0, ours: bool = False) -> None:
        self.name = name
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.metrics_url = f"{self.url}/metrics"
        # vLLM binds an ipc endpoint, and of TCP ones only those for every address, which tests do not open.
        self.endpoint = f"ipc://{folder}/{name}.events"
        self.replay_endpoint = f"ipc://{folder}/{name}.replay"
        self.log = folder / f"{name}.log"
        self._options = options
        self._ours = ours
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "topic": f"kv@127.0.0.1:{self.port}@small",
        }
        command = [
            *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)),
            *("--served-model-name", "small", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--max-model-len", "2048", "--block-size", str(BLOCK_TOKENS), "--enforce-eager"),
            *("--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "1", "--enable-prompt-tokens-details"),
            *("--enable-prefix-caching", "--kv-events-config", json.dumps(events), *self._options),
        ]
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **quiet, **cpu, "VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment.pop("PYTHONPATH", None)
        if self._ours:
            environment["PYTHONPATH"] = str(ROOT / "src")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.keeper", *command],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def wait(self) -> None:
        """Until it serves.

        Raises:
            RuntimeError: it ended, or took longer than ``START_S``; the end of its log is in the message.
        """
        assert self._process is not None
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.25)
        self.stop()
        raise RuntimeError(f"vLLM did not start:\n{self.log.read_text('utf-8', 'replace')[-4000:]}")

    def stop(self) -> None:
        """Its whole process group, at once."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(20)
            self._process = None

    def terminate(self, within_s: float) -> None:
        """As its supervisor would: SIGTERM to the process that was started, and no other; returns when that has ended.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        assert self._process is not None
        (vllm,) = psutil.Process(self._process.pid).children()
        vllm.terminate()
        self._process.wait(within_s)

    def post(self, path: str, body: Any = None, timeout_s: float = 60.0) -> Any:
        data = json.dumps(body).encode() if body is not None else b""
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            read = answer.read()
        return json.loads(read) if read else None

    def complete(self, tokens: list[int], model: str = "small", max_tokens: int = 1, **more: Any) -> int:
        """Prompt tokens that came from the cache."""
        body = {"model": model, "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, **more}
        details = self.post("/v1/completions", body)["usage"].get("prompt_tokens_details")
        return (details or {}).get("cached_tokens") or 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def an_adapter(folder: Path, rank: int = 4) -> Path:
    """A LoRA adapter of the small model, with weights of no meaning."""
    import numpy as np
    from safetensors.numpy import save_file

    config = json.loads((MODEL / "config.json").read_text())
    width, heads, size = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    dice = np.random.default_rng(5)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = dice.normal(0, 0.1, (rank, width)).astype(np.float32)
        weights[f"{name}.lora_B.weight"] = dice.normal(0, 0.1, (heads * size, rank)).astype(np.float32)
    folder.mkdir(exist_ok=True)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    peft = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none"}
    peft |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": str(MODEL), "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(peft))
    return folder
