"""The plug-ins through their engines' own classes: one process stores, another asks, over a store daemon."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from tests.engines.sides import PYTHON, ROOT, Side

from skymemory.native import crc32
from skymemory.store.redis import NAMESPACE, RedisStore
from skymemory.testbed.open_store import open_store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="the engines could not be installed: see make test-engines"),
]
COUNT = 6
IMPATIENT = {"ask_deadline": "200ms", "load_deadline": "500ms", "store_deadline": "500ms"}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "lmcache": ("lmcache_side", {}),
    "sglang": ("sglang_side", {}),
    "sglang layer first": ("sglang_side", {"layout": "layer_first"}),
    "sglang by pointer": ("sglang_side", {"v1": True}),
    "sglang by pointer, layer first": ("sglang_side", {"v1": True, "layout": "layer_first"}),
    "vllm tier": ("tier_side", {}),
}
OTHERS: dict[str, list[dict[str, Any]]] = {
    "lmcache_side": [{"model": "large"}, {"dtype": "float16"}, {"heads": 4}, {"ranks": 4}, {"rank": 1}, {"chunk": 32}],
    "sglang_side": [
        *({"model": "large"}, {"dtype": "float16"}, {"dtype": "bfloat16"}, {"heads": 4}, {"ranks": 4}, {"rank": 1}),
        *({"page": 8}, {"layout": "page_first_direct"}),
    ],
    "tier_side": [
        *({"model": "large"}, {"dtype": "float16"}, {"layers": ["0", "1", "2"]}, {"ranks": 2}, {"page": 32}),
        {"layout": "HND"},
    ],
}
"""Engines that must share no value with the first, though they may have the same keys and as many bytes."""

ROOM = {"lmcache_side": "15KiB", "sglang_side": "4KiB", "tier_side": "20KiB"}
"""Room for two values."""


STORES = {
    "daemon": "memory://64MiB",
    "host": "host://8MiB?at={arena}",
    "host and disk": "tiers:?tier=host://8MiB%3Fat={arena}&tier=disk://{folder}/disk?budget=64MiB",
}


@contextmanager
def daemon(address: str, folder: Path | None = None) -> Iterator[str]:
    """Where a daemon in a process of its own serves the store at ``address``, which may name an arena and a folder."""
    is_arena = "{arena}" in address
    place = tempfile.mkdtemp(prefix="skymemory-test-", dir="/dev/shm" if is_arena else None)  # short, as sockets need
    served = address.format(arena=place, folder=folder)
    command = [sys.executable, "-m", "skymemory", "store", "serve", served, "--listen", f"unix://{place}/s"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and "is served at" in process.stdout.readline()
            assert not is_arena or f"attach by host://{place}\n" in process.stdout.readline()
            yield f"host://{place}" if is_arena else f"unix://{place}/s"
        finally:
            process.terminate()
            process.wait(30)
            shutil.rmtree(place)


def socket_of(address: str) -> str:
    """Where the daemon whose store engines reach at ``address`` speaks the Redis protocol."""
    kind, _, path = address.partition("://")
    return f"{path}/s" if kind == "host" else path


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Side, Side]]]:
    """Of each engine two processes, started together."""
    logs = tmp_path_factory.mktemp("logs")
    modules = {module for module, _ in ENGINES.values()}
    started = {module: (Side(module, logs / f"{module} 1"), Side(module, logs / f"{module} 2")) for module in modules}
    try:
        yield started
    finally:
        for both in started.values():
            for one in both:
                one.close()


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with daemon(STORES[getattr(request, "param", "daemon")], tmp_path) as address:
        yield address


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, sides: dict[str, tuple[Side, Side]]) -> tuple[Side, Side, dict[str, Any]]:
    """A process that stores, one that asks, and what makes the engine."""
    module, about = ENGINES[request.param]
    return (*sides[module], about)


def misses(said: dict[str, Any], reason: str) -> int:
    return int(said["counters"].get(f"misses_total{{{reason}}}", 0))


@pytest.mark.parametrize("store", STORES, indirect=True)
def test_what_one_process_stores_another_loads(engine: tuple[Side, Side, dict[str, Any]], store: str) -> None:
    one, other, about = engine
    before = other.ask("ask", store, **about)
    assert not any(before["loaded"]) and before.get("prefix", 0) == 0 and before.get("alone") in (None, False)
    stored = one.ask("store", store, **about)
    assert stored["counters"]["stored_total"] == COUNT and stored.get("held", 0) == stored.get("leaked", 0) == 0
    found = other.ask("ask", store, **about)
    assert found["keys"] == stored["keys"] and len(set(found["keys"])) == COUNT
    assert found["loaded"] == found["equal"] == [True] * COUNT
    assert found.get("prefix", COUNT) == found.get("prefix_async", COUNT) == found.get("begun", COUNT) == COUNT
    assert (
        found.get("leaked", 0) == 0 and found.get("one", True) and found.get("alone", True) and found.get("freed", True)
    )
    assert found["counters"]["hits_total"] >= COUNT and "misses_total" not in str(found["counters"])
    assert "SkyMemory: hits_total" in other.log()
    again = one.ask("store", store, **about)
    assert again["counters"]["present_total"] >= COUNT and again["counters"].get("stored_total", 0) == 0


def test_other_engines_share_nothing(engine: tuple[Side, Side, dict[str, Any]], store: str) -> None:
    one, other, about = engine
    keys = set(one.ask("store", store, **about)["keys"])
    module = next(module for module, which in ENGINES.values() if which is about)
    for change in [*OTHERS[module], {"options": {"weights": "revision 2"}}]:
        found = other.ask("ask", store, **{**about, **change})
        assert not any(found["loaded"]) and found.get("prefix", 0) == 0, change
        assert not keys & set(found["keys"]), change


@pytest.mark.parametrize("name", ["lmcache", "sglang"])
def test_bytes_without_a_type_are_refused_and_of_two_types_do_not_meet(
    sides: dict[str, tuple[Side, Side]], name: str, store: str
) -> None:
    """Both kinds of 8-bit floats are bytes (uint8) to the engines' memory."""
    module, about = ENGINES[name]
    one, other = sides[module]
    assert "kv_dtype is missing" in one.ask("ask", store, **about, dtype="uint8")["error"]
    for kv_dtype in ("fp8_e4m3", "fp8_e5m2"):
        options = {"kv_dtype": kv_dtype}
        assert not any(other.ask("ask", store, **about, dtype="uint8", options=options)["loaded"])
        one.ask("store", store, **about, dtype="uint8", options=options)
        found = other.ask("ask", store, **about, dtype="uint8", options=options)
        assert found["loaded"] == found["equal"] == [True] * COUNT


def test_without_metrics_sglangs_numbers_are_not_kept(sides: dict[str, tuple[Side, Side]], store: str) -> None:
    one, _ = sides["sglang_side"]
    assert one.ask("store", store)["noted"] > 0 and one.ask("ask", store, metrics=False)["noted"] == 0


def test_where_all_ranks_have_the_same_pages_one_stores_for_all(
    sides: dict[str, tuple[Side, Side]], store: str, tmp_path: Path
) -> None:
    """Of models with latent caches (MLA), other pools than keys and values, too; states are cut by rank."""
    one, other = sides["sglang_side"]
    hybrid = {"stored": {"KV": list(range(COUNT)), "SWA": list(range(COUNT))}, "mla": True}
    hybrid |= {"others": [["SWA", "all", COUNT]], "folder": str(tmp_path / "files")}
    one.ask("store", store, **hybrid)
    said = other.ask("load", store, rank=1, **hybrid)
    assert said["same"] and said["found"] == COUNT and said["equal"], said
    hybrid["stored"] |= {"MAMBA": list(range(COUNT))}
    hybrid["others"] = [["MAMBA", "last", 1]]
    one.ask("store", store, **hybrid)
    assert other.ask("load", store, **hybrid)["found"] == COUNT
    assert other.ask("load", store, rank=1, **hybrid)["found"] == 0


@pytest.mark.parametrize("store", ["daemon", "host"], indirect=True)
def test_a_damaged_value_is_a_miss_and_is_stored_again(engine: tuple[Side, Side, dict[str, Any]], store: str) -> None:
    one, other, about = engine
    keys = [bytes.fromhex(key) for key in one.ask("store", store, **about)["keys"]]
    door = socket_of(store)
    with RedisStore(f"unix://{door}") as bytes_of, Redis(unix_socket_path=door) as client:
        (second, last) = (bytearray(value or b"") for value in bytes_of.get_many([keys[1], keys[-1]]))
        second[len(second) // 2] ^= 1
        assert bytes_of.put_many([(keys[1], bytes(second))]) == [False], "damaged before it was sent"
        trailer = b"SKV1" + crc32(second, crc32(keys[1])).to_bytes(4, "little")
        client.set(NAMESPACE + keys[1], bytes(second) + trailer)
        # An intact value under another one's key.
        assert bytes_of.put_many([(keys[4], bytes(last))]) == [True]
    found = other.ask("ask", store, **about)
    assert found["loaded"] == [True, False, True, True, False, True]
    assert all(found["equal"]) and found.get("freed", True)
    assert misses(found, "corrupt") == misses(found, "foreign") == 1
    assert one.ask("store", store, **about)["counters"]["stored_total"] == 2
    found = other.ask("ask", store, **about)
    assert found["loaded"] == [True] * COUNT and all(found["equal"])


def test_what_has_left_shared_memory_comes_from_disk(engine: tuple[Side, Side, dict[str, Any]], tmp_path: Path) -> None:
    one, other, about = engine
    with daemon(STORES["host and disk"], tmp_path) as address:
        one.ask("store", address, **about)
        with Redis(unix_socket_path=socket_of(address)) as client:
            until_s = time.monotonic() + 30
            while client.info()["disk_entries"] < COUNT:
                assert time.monotonic() < until_s, client.info()
                time.sleep(0.05)
    with daemon(STORES["host and disk"], tmp_path) as address, open_store(address) as arena:
        assert arena.stats()["entries"] == 0, "the owner that ended has removed its arena"
        found = other.ask("ask", address, **about)
        assert found["loaded"] == found["equal"] == [True] * COUNT and found.get("prefix", COUNT) == COUNT
        assert arena.stats()["entries"] == COUNT


def test_a_store_that_hangs_costs_its_deadlines_and_misses(engine: tuple[Side, Side, dict[str, Any]]) -> None:
    one, other, about = engine
    folder = Path(tempfile.mkdtemp())
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{folder}/s")
        silent.listen(64)
        for side, do in ((one, "store"), (other, "ask")):
            said = side.ask(do, f"unix://{folder}/s", options=IMPATIENT, **about)
            # A lookup, a load and a store at most before it is known to hang; these are shared machines.
            assert said["seconds"] < 8, said
            assert said.get("slowest_s", 0) < 0.15, "the scheduler's calls must not wait"
            assert not any(said.get("loaded", [])) and said.get("held", 0) == 0 and all(said.get("equal", []))
            assert said["counters"].get("hits_total", 0) == said["counters"].get("stored_total", 0) == 0
    shutil.rmtree(folder)


def test_a_load_that_lmcache_gives_up_holds_no_memory(sides: dict[str, tuple[Side, Side]], store: str) -> None:
    one, other = sides["lmcache_side"]
    one.ask("store", store)
    found = other.ask("give up", store)
    assert found["counters"]["hits_total"] == 20 * COUNT and found["leaked"] == 0
    assert "not called properly" not in other.log(), "LMCache had to give the memory back itself"


def test_a_full_store_costs_misses_alone(engine: tuple[Side, Side, dict[str, Any]]) -> None:
    """One that holds two values evicts the others; one that holds none refuses them."""
    one, other, about = engine
    module = next(module for module, which in ENGINES.values() if which is about)
    addresses = {f"memory://{ROOM[module]}": 2, "memory://1KiB": 0}
    addresses |= {f"host://{ROOM[module]}?at={{arena}}": 2, "host://1KiB?at={arena}": 0}
    for address, held in addresses.items():
        with daemon(address) as served:
            stored = one.ask("store", served, **about)
            counters = stored["counters"]
            refused = sum(count for name, count in counters.items() if name.startswith("refused_total"))
            assert stored.get("held", 0) == 0 and counters["stored_total"] + refused >= COUNT
            found = other.ask("ask", served, **about)
            assert sum(found["loaded"]) <= held and all(found["equal"])
            assert refused >= COUNT if held == 0 else counters["stored_total"] >= held


def test_wrong_options_say_what_to_do(engine: tuple[Side, Side, dict[str, Any]]) -> None:
    one, _, about = engine
    wrong = {
        "weights is missing": {"weights": ""},
        "did you mean 'weights'?": {"weigths": "1"},
        "load_deadline": {"load_deadline": "soon"},
    }
    for words, options in wrong.items():
        error = one.ask("ask", "unix:///nowhere", options=options, **about)["error"]
        assert words in error and "skymemory" in error.lower(), error
    if next(module for module, which in ENGINES.values() if which is about) == "sglang_side":
        assert "leave it out" in one.ask("ask", "unix:///nowhere", options={"queue": "1MiB"}, **about)["error"]
    error = one.ask("ask", "host:///nowhere", **about)["error"]
    assert "no owner answers" in error and "skymemory store serve 'host://SIZE" in error, error
    several = {**about, "replicas": 2, "ranks": 2}
    for address in ("memory://1GiB", "disk:///nowhere?budget=1GiB", "tiers:?tier=memory&tier=disk:///d?budget=1GiB"):
        error = one.ask("ask", address, **several)["error"]
        assert "skymemory store serve" in error and "unix:///" in error, error
    error = one.ask("ask", "tiers:?tier=host://1GiB%3Fat=/dev/shm/sky&tier=disk:///d?budget=1GiB", **several)["error"]
    if "%" not in error:  # vLLM's
        assert "skymemory store serve" in error
    else:
        assert error.endswith("and give host:///dev/shm/sky"), error


def drawn_pages(seed: int) -> dict[str, list[int]]:
    dice = random.Random(seed)
    return {
        "KV": list(range(dice.randrange(1, COUNT + 1))),
        "SWA": sorted(dice.sample(range(COUNT), dice.randrange(COUNT + 1))),
        "MAMBA": sorted(dice.sample(range(COUNT), dice.randrange(COUNT + 1))),
    }


@pytest.mark.parametrize("seed", range(12))
def test_pages_of_several_pools_are_found_as_sglangs_own_backend_finds_them(
    sides: dict[str, tuple[Side, Side]], seed: int, tmp_path: Path
) -> None:
    one, other = sides["sglang_side"]
    dice = random.Random(seed)
    others = [["SWA", dice.choice(["all", "last"]), dice.randrange(1, 4)], ["MAMBA", "last", 1]]
    stored = drawn_pages(seed) if seed else {name: list(range(COUNT)) for name in ("KV", "SWA", "MAMBA")}
    with daemon(STORES["host" if seed % 2 else "daemon"]) as address:
        hybrid = {
            "stored": stored,
            "others": others[: dice.randrange(1, 3)],
            "folder": str(tmp_path / "files"),
        }
        said = one.ask("store", address, **hybrid)
        assert all(all(done) for done in said["stored"].values()), said
        said = other.ask("load", address, **hybrid)
        assert said["same"], said
        assert said["equal"] and all(all(done) for done in said["loaded"].values()), said
        assert said["stats"] == [sum(map(len, said["loaded"].values())), 0]
        if not seed:
            assert said["found"] == COUNT
