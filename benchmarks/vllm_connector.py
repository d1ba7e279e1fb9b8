"""The connector inside vLLM, beside plain vLLM and other connectors: `python benchmarks/vllm_connector.py [MODE ...]`.

Runs vLLM for the CPU (`make demo-vllm` and `make test-vllm` install it) with a model of TinyLlama-1.1B's shape, random
weights, bfloat16. Modes, all of them if none is named:

`ttft`     time to first token of a prompt with a long prefix: plain, cold with the connector (its saves are under way),
           warm (the prefix is in the store, vLLM's own cache is empty), by the store; vLLM's example connector
`cake`     the prefix behind a link as fast as computing: computing alone, loading alone, both
`steps`    how long a step of another request takes while a prefix is loaded, beside the same step alone
`prefixes` the workload of vLLM's benchmark_prefix_caching.py: the same prompts again and again

Two or three engines run at the same time and take turns, one request at a time, in an order that alternates; every
round has a prompt of its own. A ratio is that of one round; shown are medians and (least–most). The first round only
warms. An engine takes about 4 GB. On two quiet cores, estimated: 4 minutes a store, then 10, 7 and 20. On a busy
machine give `--threads 1`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from _bench import constellation, host_owner, print_table, redis_server, write_json
from skymemory.addresses import ListenAddress
from skymemory.engine.transformers.models import TINYLLAMA_SHAPE
from skymemory.store.base import Store
from skymemory.store.memory import MemoryStore
from skymemory.store.redis_server.commands import Commands
from skymemory.store.redis_server.daemon import Daemon, ServerLimits, listen_at
from skymemory.store.wrappers import RateLimited

ROOT = Path(__file__).parents[1]
TAIL_TOKENS = 48
"""More than a block: vLLM's example connector leaves the last one out of what it compares."""
WHOLE_TOKENS = 8192
"""The example connector fails on prompts that take several steps."""
GOALS = {"cold": 1.03, "memory": 0.10, "disk": 0.10, "redis": 0.10, "constellation": 0.15, "cake": 0.62, "steps": 1.02}
"""Of plain vLLM's time; for Cake of the better side's; for steps of the same step's alone."""
START_S = 420.0
ANSWER_S = 600.0
UNLIMITED = 1e12
STORES = ("memory", "host", "disk", "redis", "constellation", "example", "lmcache")
Row = dict[str, Any]
Tokens = list[int]


class Engine:
    """One vLLM in its own processes, which all end with it. It starts at once; the first order waits for it."""

    def __init__(self, args: argparse.Namespace, folder: Path, transfer: Row | None, **options: Any) -> None:
        foreign = transfer is not None and transfer["kv_connector"] == "LMCacheMPConnector"
        threads = {"OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        paths = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'benchmarks'}", "CUDA_VISIBLE_DEVICES": ""}
        self._log = folder / f"engine-{len(list(folder.glob('engine-*')))}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(args.lmcache if foreign else args.vllm), str(ROOT / "benchmarks/_vllm_side.py")],
                env={**os.environ, **quiet, **paths, **threads, "VLLM_CPU_KVCACHE_SPACE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        engine = {
            "model": str(folder / "model"),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": args.dtype,
            "block_size": 32,
            "max_model_len": 4096,
            "enforce_eager": True,
            "max_num_batched_tokens": args.step_tokens,
            **options,
        }
        self.version = ""
        self._send("load", engine=engine, transfer=transfer)

    def ready(self) -> Engine:
        """Once it serves."""
        self.version = self._answer(START_S)["vllm"]
        return self

    def do(self, order: str, **more: Any) -> Row:
        self._send(order, **more)
        return self._answer(ANSWER_S)

    def ask(self, tokens: Tokens) -> Row:
        return self.do("ask", tokens=tokens)

    def reset(self) -> None:
        """Empties vLLM's own prefix cache."""
        if not self.do("reset")["reset"]:
            raise SystemExit("vLLM did not empty its prefix cache: a request was not done")

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, order: str, **more: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": order, **more}) + "\n")
        self._process.stdin.flush()

    def _answer(self, patience_s: float) -> Row:
        assert self._process.stdout is not None
        late = threading.Timer(patience_s, self.stop)
        late.start()
        try:
            line = self._process.stdout.readline()
        finally:
            late.cancel()
        if not line:
            self.stop()
            raise SystemExit(f"vLLM ended, or took longer than {patience_s:.0f} s:\n{self._log.read_text()[-3000:]}")
        answer: Row = json.loads(line)
        return answer


def connector(store: str, args: argparse.Namespace, **more: Any) -> Row:
    return {
        "kv_connector": "SkyMemoryConnector",
        "kv_connector_module_path": "skymemory.engine.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, "value_tokens": args.value_tokens},
        **more,
    }


class Bench:
    """Options, a folder for sockets and logs, prompts that differ, and words on the terminal."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.vllm = ""
        """Its version, once one has started."""
        self._dice = random.Random(args.seed)
        self._began_s = time.monotonic()
        shape = TINYLLAMA_SHAPE | ({"num_hidden_layers": args.layers} if args.layers else {})
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **shape}
        config |= {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
        config |= {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
        (folder / "model").mkdir()
        (folder / "model/config.json").write_text(json.dumps(config))

    def say(self, words: str) -> None:
        print(f"[{time.monotonic() - self._began_s:5.0f} s] {words}", file=sys.stderr, flush=True)

    def tokens(self, count: int) -> Tokens:
        return [self._dice.randrange(3, TINYLLAMA_SHAPE["vocab_size"]) for _ in range(count)]

    def settle(self) -> None:
        """Saves end meanwhile."""
        time.sleep(self.args.pause)

    @contextmanager
    def engines(self, **how: tuple[Row | None, Row]) -> Iterator[dict[str, Engine]]:
        """By name; each is given its transfer and its options. Started together."""
        self.say(f"starting vLLM: {', '.join(how)}")
        started: dict[str, Engine] = {}
        try:
            for name, (transfer, options) in how.items():
                started[name] = Engine(self.args, self.folder, transfer, **options)
            for engine in started.values():
                self.vllm = engine.ready().version
            yield started
        finally:
            for engine in started.values():
                engine.stop()


# --- stores, by the address that vLLM is given ---


@contextmanager
def daemon(folder: Path, store: str) -> Iterator[str]:
    """`skymemory store serve`, in a process of its own."""
    path = folder / "sky.sock"
    command = [sys.executable, "-m", "skymemory", "store", "serve", store, "--listen", f"unix://{path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if "is served at" not in process.stdout.readline():
                raise SystemExit(f"the store daemon did not start over {store}")
            yield f"unix://{path}"
        finally:
            process.terminate()


@contextmanager
def daemon_here(folder: Path, store: Store) -> Iterator[str]:
    """The same daemon in a thread of this process, over a store whose rate this process sets."""
    address = ListenAddress.parse(f"unix://{folder}/link.sock", unix=True)
    served = Daemon(Commands(store), ServerLimits())
    thread = threading.Thread(target=served.serve, args=([listen_at(address)],))
    thread.start()
    try:
        yield f"unix://{address.path}"
    finally:
        served.stop()
        thread.join(10)


@contextmanager
def transfer_of(kind: str, bench: Bench) -> Iterator[Row | None]:
    """What vLLM is started with, the store running; None where it is not installed."""
    args = bench.args
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sky-")))
        if kind == "example":
            where = {"shared_storage_path": str(folder)}
            yield {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": where}
        elif kind == "host":
            arena = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skymemory-", dir="/dev/shm")))
            stack.enter_context(host_owner(arena, "3GiB"))
            yield connector(f"host://{arena}", args)
        elif kind == "redis":
            port = stack.enter_context(redis_server(folder / "redis.sock"))
            yield None if port is None else connector(f"unix://{folder}/redis.sock", args)
        elif kind == "lmcache":
            yield stack.enter_context(lmcache(folder, args)) if args.lmcache.is_file() else None
        elif kind == "constellation":
            options = {"delay_scale": 1.0, "memory_per_satellite_bytes": 256 << 20}
            _, run = stack.enter_context(constellation(**options))
            yield connector(stack.enter_context(daemon(folder, f"constellation://{run}")), args)
        else:
            store = {"memory": "memory://3GiB", "disk": f"disk://{folder}/cache?budget=8GiB"}[kind]
            yield connector(stack.enter_context(daemon(folder, store)), args)


@contextmanager
def lmcache(folder: Path, args: argparse.Namespace) -> Iterator[Row | None]:
    """LMCache's server with Redis behind its memory, and its connector, the one that runs on a CPU."""
    with redis_server() as redis:
        if redis is None:
            yield None
            return
        port = free_port()
        command = [str(args.lmcache), "-m", "lmcache.v1.multiprocess.http_server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(free_port())]
        command += ["--l1-size-gb", "2", "--l1-init-size-gb", "1", "--eviction-policy", "LRU"]
        command += ["--supported-transfer-mode", "engine_driven", "--chunk-size", str(args.value_tokens)]
        command += ["--disable-observability"]
        command += ["--l2-adapter", json.dumps({"type": "resp", "host": "127.0.0.1", "port": redis})]
        quiet = {"LMCACHE_TRACK_USAGE": "false", "CUDA_VISIBLE_DEVICES": ""}
        with (folder / "lmcache.log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | quiet, start_new_session=True)
        try:
            wait_for(port, server, folder / "lmcache.log")
            yield {
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
            }
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server listens there."""
    ends_s = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < ends_s:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    raise SystemExit(f"LMCache's server did not start:\n{log.read_text(encoding='utf-8')[-2000:]}")


# --- figures ---


def spread(name: str, values: Sequence[float]) -> Row:
    return {name: statistics.median(values), f"{name}_least": min(values), f"{name}_most": max(values)}


def shown(row: Row, name: str, digits: int = 3) -> str:
    """Median (least–most)."""
    least, most = (f"{row[f'{name}_{which}']:.{digits}f}" for which in ("least", "most"))
    return f"{row[name]:.{digits}f} ({least}–{most})"


def in_turns(number: int, runs: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """All of them, each round beginning with another one."""
    names = list(runs)
    first = number % len(names)
    return {name: runs[name]() for name in names[first:] + names[:first]}


# --- time to first token ---


def ttft(bench: Bench) -> Iterator[Row]:
    """A row for each store."""
    args = bench.args
    for kind in args.stores:
        with transfer_of(kind, bench) as transfer:
            if transfer is None:
                continue
            options = {"max_num_batched_tokens": WHOLE_TOKENS} if kind == "example" else {}
            with bench.engines(plain=(None, options), **{kind: (transfer, options)}) as engines:
                rounds = [_ttft_round(bench, engines["plain"], engines[kind], n) for n in range(args.rounds + 1)][1:]
            row: Row = {"mode": "ttft", "store": kind, "tokens": args.prefix + TAIL_TOKENS, "rounds": args.rounds}
            for name in ("plain", "cold", "shared", "identical"):
                row[f"{name}_s"] = statistics.median([one[name]["ttft_s"] for one in rounds])
                row[f"{name}_cached"] = statistics.median_low([one[name]["cached"] for one in rounds])
                row |= spread(f"{name}_of_plain", [one[name]["ttft_s"] / one["plain"]["ttft_s"] for one in rounds])
            row |= {"goal": GOALS.get(kind), "goal_cold": GOALS["cold"] if kind in GOALS else None}
            bench.say("  ".join(_ttft_cells(row)))
            yield row


def _ttft_round(bench: Bench, plain: Engine, other: Engine, number: int) -> Row:
    """``shared``: the prefix with another end; ``identical``: the very prompt. A round in which the prefix did not come
    from the store says so by its cached tokens.
    """
    prefix = bench.tokens(bench.args.prefix)
    prompt, second = prefix + bench.tokens(TAIL_TOKENS), prefix + bench.tokens(TAIL_TOKENS)
    found = in_turns(number, {"plain": lambda: plain.ask(prompt), "cold": lambda: other.ask(prompt)})
    for name, tokens in (("shared", second), ("identical", prompt)):
        bench.settle()
        other.reset()
        found[name] = other.ask(tokens)
    plain.reset()
    return found


def _ttft_cells(row: Row) -> list[str]:
    cells = [row["store"], f"{row['plain_s']:.3f}", shown(row, "cold_of_plain"), shown(row, "shared_of_plain")]
    goals = ["" if row[name] is None else f"{row[name]:.2f}" for name in ("goal_cold", "goal")]
    return [*cells, str(row["shared_cached"]), shown(row, "identical_of_plain"), str(row["identical_cached"]), *goals]


TTFT = ["store", "plain s", "cold", "warm", "cached", "identical prompt", "cached", "goal cold", "goal warm"]


# --- Cake ---


@contextmanager
def linked(bench: Bench) -> Iterator[tuple[RateLimited, str]]:
    """A memory store behind a link, and its address."""
    with (
        tempfile.TemporaryDirectory(prefix="sky-") as folder,
        MemoryStore(3 << 30) as memory,
        RateLimited(memory, UNLIMITED) as link,
        daemon_here(Path(folder), link) as address,
    ):
        yield link, address


def cake(bench: Bench) -> Iterator[Row]:
    """A row for each rate of the link, in units of the one at which loading the prefix takes as long as computing."""
    args = bench.args
    with linked(bench) as (link, address):
        ours = connector(address, args)
        both = {"max_num_batched_tokens": args.cake_step_tokens}
        how = {"compute": (None, both), "load": (_loads_only(ours), both), "cake": (ours, both)}
        with bench.engines(**how) as engines:
            found: dict[float, list[Row]] = {ratio: [] for ratio in args.ratios}
            for number in range(args.rounds + 1):
                prefix, even = _stored(bench, engines["cake"], link)
                for ratio in args.ratios:
                    link.bytes_per_s = ratio * even
                    prompt = prefix + bench.tokens(TAIL_TOKENS)
                    runs = {name: partial(engine.ask, prompt) for name, engine in engines.items()}
                    found[ratio].append(in_turns(number, runs) | {"bytes_per_s": link.bytes_per_s})
                    for engine in engines.values():
                        engine.reset()
                    time.sleep(link.backlog_s)
            for ratio, (_, *rounds) in found.items():  # the first one taught the engines
                row: Row = {"mode": "cake", "ratio": ratio, "rounds": args.rounds, "step_tokens": args.cake_step_tokens}
                row |= {"bytes_per_s": statistics.median([one["bytes_per_s"] for one in rounds])}
                for name in how:
                    row[f"{name}_s"] = statistics.median([one[name]["ttft_s"] for one in rounds])
                    row[f"{name}_cached"] = statistics.median_low([one[name]["cached"] for one in rounds])
                better = [
                    one["cake"]["ttft_s"] / min(one["compute"]["ttft_s"], one["load"]["ttft_s"]) for one in rounds
                ]
                row |= spread("of_better", better) | {"goal": GOALS["cake"] if ratio == 1 else None}
                bench.say("  ".join(_cake_cells(row)))
                yield row


def _loads_only(transfer: Row) -> Row:
    return transfer | {"kv_connector": "LoadsOnly", "kv_connector_module_path": "_vllm_side"}


def _stored(bench: Bench, engine: Engine, link: RateLimited) -> tuple[Tokens, float]:
    """A prefix that is in the store, and the rate at which loading it takes as long as it took to compute."""
    prefix = bench.tokens(bench.args.prefix)
    before = link.stats()["used_bytes"]
    ttft_s = engine.ask(prefix + bench.tokens(TAIL_TOKENS))["ttft_s"]
    bench.settle()
    engine.reset()
    size_bytes = link.stats()["used_bytes"] - before
    if not size_bytes:
        raise SystemExit("nothing was stored: give a longer --pause")
    return prefix, size_bytes / ttft_s


def _cake_cells(row: Row) -> list[str]:
    seconds = [f"{row[f'{name}_s']:.3f}" for name in ("compute", "load", "cake")]
    goal = "" if row["goal"] is None else f"{row['goal']:.2f}"
    rate = f"{row['bytes_per_s'] / 1e6:.1f}"
    return [f"{row['ratio']:g}", rate, *seconds, str(row["cake_cached"]), shown(row, "of_better"), goal]


CAKE = ["link", "MB/s", "compute s", "load s", "both s", "loaded tokens", "of the better", "goal"]


# --- steps beside a load ---


def steps(bench: Bench) -> Iterator[Row]:
    """Steps of a request that generates, and of a prefill, beside a load at each rate (as for Cake)."""
    args = bench.args
    with linked(bench) as (link, address), ExitStack() as stack:
        transfer = _loads_only(connector(address, args))
        options = {"max_num_batched_tokens": args.cake_step_tokens}
        engine = stack.enter_context(bench.engines(loading=(transfer, options)))["loading"]
        _stored(bench, engine, link)
        stored = [_stored(bench, engine, link) for _ in range(args.rounds)]
        even = statistics.median([rate for _, rate in stored])
        for ratio in args.step_ratios:
            link.bytes_per_s = ratio * even
            row: Row = {"mode": "steps", "ratio": ratio, "bytes_per_s": link.bytes_per_s, "goal": GOALS["steps"]}
            yield row | {"step": "decoding"} | _decode_steps(bench, engine, [prefix for prefix, _ in stored])
            engine.reset()
            if ratio < 1:  # else it ends before the prefill does
                yield row | {"step": "prefill"} | _prefill_steps(bench, engine, [prefix for prefix, _ in stored])
                engine.reset()


def _decode_steps(bench: Bench, engine: Engine, prefixes: list[Tokens]) -> Row:
    loads = [prefix + bench.tokens(TAIL_TOKENS) for prefix in prefixes]
    found = engine.do("decode", tokens=bench.tokens(64), loads=loads, alone_steps=bench.args.alone, least_steps=2)
    rounds = found["rounds"]
    if not rounds:
        raise SystemExit("no load lasted for two steps: give a smaller --step-ratios")
    return _steps_row(bench, rounds, min(found["cached"]), sum(one["steps"] for one in rounds))


def _prefill_steps(bench: Bench, engine: Engine, prefixes: list[Tokens]) -> Row:
    rounds, cached = [], []
    for number, prefix in enumerate(prefixes):
        load = prefix + bench.tokens(TAIL_TOKENS)
        runs = {
            "alone": lambda: engine.do("prefill", tokens=bench.tokens(bench.args.prefix), load=None),
            "beside": lambda load=load: engine.do("prefill", tokens=bench.tokens(bench.args.prefix), load=load),
        }
        found = in_turns(number, runs)
        bench.settle()
        engine.reset()
        if found["beside"]["overlapped"]:
            rounds.append({f"{name}_s": one["ttft_s"] for name, one in found.items()})
            cached.append(found["beside"]["cached"])
    if not rounds:
        raise SystemExit("every load ended before the prefill beside it: give a smaller --step-ratios")
    steps_in_all = len(rounds) * -(-bench.args.prefix // bench.args.cake_step_tokens)
    return _steps_row(bench, rounds, min(cached), steps_in_all)


def _steps_row(bench: Bench, rounds: list[Row], cached: int, count: int) -> Row:
    row: Row = {"rounds": len(rounds), "steps": count, "cached": cached}
    row |= {name: statistics.median([one[name] for one in rounds]) for name in ("alone_s", "beside_s")}
    row |= spread("of_alone", [one["beside_s"] / one["alone_s"] for one in rounds])
    bench.say(f"beside a load: {row['beside_s']:.4f} s, alone {row['alone_s']:.4f} s: {shown(row, 'of_alone')}")
    return row


def _steps_cells(row: Row) -> list[str]:
    rate = f"{row['bytes_per_s'] / 1e6:.1f}"
    times = [f"{row[name] * 1e3:.1f}" for name in ("alone_s", "beside_s")]
    return [row["step"], rate, *times, str(row["steps"]), shown(row, "of_alone"), f"{row['goal']:.2f}"]


STEPS = ["step (prefill: all its steps)", "loading at MB/s", "alone ms", "beside ms", "steps", "ratio", "goal"]


# --- the same prompts again and again ---


def prefixes(bench: Bench) -> Iterator[Row]:
    """Fixed: one prompt, many times; mixed: several of different lengths, each a few times, shuffled."""
    args = bench.args
    with transfer_of("memory", bench) as transfer:
        for caching in (False, True):
            options = {"enable_prefix_caching": caching, "max_num_batched_tokens": WHOLE_TOKENS}
            with bench.engines(plain=(None, options), connector=(transfer, options)) as engines:
                for workload in ("fixed", "mixed"):
                    rounds = [_passes(bench, engines, workload, number) for number in range(args.prefixes_rounds + 1)][
                        1:
                    ]
                    for which in ("first", "again", "emptied"):
                        yield _prefixes_row(bench, caching, workload, which, rounds)


def _passes(bench: Bench, engines: dict[str, Engine], workload: str, number: int) -> Row:
    """Each engine serves all prompts, then again as vLLM's benchmark times it, then with its own cache emptied."""
    args = bench.args
    if workload == "fixed":
        prompts = [bench.tokens(args.fixed_tokens)] * args.fixed_count
    else:
        dice = random.Random(number)
        prompts = [bench.tokens(dice.randint(128, 256)) for _ in range(args.prompts)] * args.repeat_count
        dice.shuffle(prompts)
    found: Row = {}
    for which in ("first", "again", "emptied"):
        if which == "emptied":
            bench.settle()
            for engine in engines.values():
                engine.reset()
        runs = {
            name: partial(engine.do, "batch", prompts=prompts, max_tokens=args.output_tokens)
            for name, engine in engines.items()
        }
        found[which] = in_turns(number, runs)
    for engine in engines.values():
        engine.reset()
    return found | {"tokens": sum(map(len, prompts)), "requests": len(prompts)}


def _prefixes_row(bench: Bench, caching: bool, workload: str, which: str, rounds: list[Row]) -> Row:
    row: Row = {"mode": "prefixes", "prefix_caching": caching, "workload": workload, "pass": which}
    row |= {"requests": rounds[0]["requests"], "rounds": len(rounds)}
    for name in ("plain", "connector"):
        row[f"{name}_s"] = statistics.median([one[which][name]["seconds"] for one in rounds])
        row[f"{name}_cached"] = statistics.median([one[which][name]["cached"] / one["tokens"] for one in rounds])
    ratios = [one[which]["connector"]["seconds"] / one[which]["plain"]["seconds"] for one in rounds]
    row |= spread("of_plain", ratios)
    bench.say("  ".join(_prefixes_cells(row)))
    return row


def _prefixes_cells(row: Row) -> list[str]:
    own = "on" if row["prefix_caching"] else "off"
    times = [f"{row[f'{name}_s']:.2f} ({row[f'{name}_cached']:.0%})" for name in ("plain", "connector")]
    return [f"{row['workload']}, {row['requests']}", own, row["pass"], *times, shown(row, "of_plain")]


PREFIXES = ["workload, requests", "own caching", "pass", "plain s (cached)", "connector s (cached)", "ratio"]

MODES: dict[str, tuple[Callable[[Bench], Iterator[Row]], str, list[str], Callable[[Row], list[str]]]] = {
    "ttft": (ttft, "time to first token, as a share of plain vLLM's", TTFT, _ttft_cells),
    "cake": (cake, "Cake in vLLM: time to first token by the link's rate", CAKE, _cake_cells),
    "steps": (steps, "steps of another request beside a load", STEPS, _steps_cells),
    "prefixes": (prefixes, "the same prompts again and again", PREFIXES, _prefixes_cells),
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="modes that do not run keep their rows in it")
    parser.add_argument("--quick", action="store_true", help="two layers, short prompts, two rounds: to try it")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES))
    parser.add_argument("--layers", type=int, default=0, help="fewer than the shape has")
    parser.add_argument("--prefix", type=int, default=2048, metavar="TOKENS")
    parser.add_argument("--value-tokens", type=int, default=128)
    parser.add_argument("--step-tokens", type=int, default=512, help="most tokens of a step")
    parser.add_argument("--cake-step-tokens", type=int, default=256, help="the same for Cake and steps")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="rates of Cake's link")
    parser.add_argument("--step-ratios", type=float, nargs="+", default=[0.7, 4.0])
    parser.add_argument("--alone", type=int, default=20, metavar="STEPS", help="between two loads")
    parser.add_argument("--fixed-tokens", type=int, default=700)
    parser.add_argument("--fixed-count", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeat-count", type=int, default=5)
    parser.add_argument("--output-tokens", type=int, default=10)
    parser.add_argument("--prefixes-rounds", type=int, default=3, help="of `prefixes`, whose rounds are long")
    parser.add_argument("--pause", type=float, default=3.0, metavar="S", help="until saves have ended")
    parser.add_argument("--dtype", default="bfloat16")
    # By itself vLLM for the CPU gives an engine without a connector one core less than one with it.
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of vLLM (default: all)")
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm/bin/python", metavar="PYTHON")
    parser.add_argument("--lmcache", type=Path, default=ROOT / ".venv-engines/bin/python", metavar="PYTHON")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := set(args.modes) - set(MODES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected {', '.join(MODES)}")
    if args.quick:
        args.layers, args.prefix, args.rounds, args.pause = 2, 1024, 2, 1.0
        args.fixed_count, args.prompts, args.repeat_count, args.prefixes_rounds = 4, 3, 2, 1
    return args


def main() -> None:
    args = parsed()
    if not args.vllm.is_file():
        print(f"{args.vllm} is missing, nothing is measured: `make demo-vllm` installs vLLM there", file=sys.stderr)
        return
    modes = args.modes or list(MODES)
    rows: list[Row] = []
    if args.json is not None and args.json.is_file():
        rows = [row for row in json.loads(args.json.read_text("utf-8"))["rows"] if row["mode"] not in modes]
    with tempfile.TemporaryDirectory(prefix="sky-") as folder:
        bench = Bench(args, Path(folder))
        for mode in modes:
            run, title, header, cells = MODES[mode]
            found = []
            for row in run(bench):
                found.append({**row, "vllm": bench.vllm, "threads": args.threads})
                write_json(args.json, "vllm connector", args.seed, rows + found)
            print_table(f"{title}; medians (least–most)", header, [cells(row) for row in found])
            rows += found


if __name__ == "__main__":
    main()
