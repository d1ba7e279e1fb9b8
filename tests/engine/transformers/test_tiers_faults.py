"""A hierarchy opened by its address whose tiers break: the same tokens as without a cache, all accounted for."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.transformers.generation import BLOCK, manager, tokens_of  # noqa: E402
from tests.store.real_redis import RedisServer  # noqa: E402

from skymemory import open_store  # noqa: E402
from skymemory.cache.tiers.store import TieredStore  # noqa: E402
from skymemory.store import disk_files  # noqa: E402
from skymemory.store.base import AtOnce, LoadTicket  # noqa: E402
from skymemory.store.disk import DiskStore  # noqa: E402

pytestmark = pytest.mark.engine

BLOCKS = 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def block_bytes(model: Any) -> int:
    """Of one stored value."""
    with manager(model, None, weights="w") as kvc:
        kvc.add_blocks_ids(torch.zeros((1, BLOCK), dtype=torch.long))
        return int(kvc.store.stats()["used_bytes"])


def opened(folder: Path, *tiers: str, **settings: str) -> TieredStore:
    """By a file, the breaker of each tier quick to try again."""
    quick = 'breaker = { failures = 2, first_wait = "10ms", last_wait = "20ms" }\nask_deadline = "2s"\n'
    text = "".join(f"{name} = {value}\n" for name, value in settings.items())
    text += "".join(f'[[tier]]\nstore = "{tier}"\nverify = "blocks"\n{quick}' for tier in tiers)
    (folder / "tiers.toml").write_text(text, "utf-8")
    store = open_store(f"tiers://{folder}/tiers.toml")
    assert isinstance(store, TieredStore)
    return store


def answered(kvc: Any, model: Any, ids: Any, plain: list[int]) -> Any:
    """Where the tokens of one more answer came from; the answer is right, and they add up."""
    assert tokens_of(model, ids, kvc.get_cache_ids(ids)) == plain
    last = kvc.last
    assert last.computed_tokens + sum(last.hit_tokens.values()) == ids.shape[1]
    return last


def breaks_at_load(store: Any, number: int, breaks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``breaks`` is called when ``store`` is about to complete its load of this number."""
    loads, complete_load = [0], store.complete_load

    def complete(ticket: LoadTicket) -> Any:
        loads[0] += 1
        if loads[0] == number:
            breaks()
        return complete_load(ticket)

    monkeypatch.setattr(store, "complete_load", complete)
    if isinstance(store, AtOnce):  # what breaks is not in the kernel's memory
        monkeypatch.setattr(store, "load_now", lambda ticket: None)


def test_memory_that_holds_the_beginning_and_a_disk_that_holds_all(
    model: Any, ids: Any, plain: list[int], tmp_path: Path, block_bytes: int
) -> None:
    store = opened(tmp_path, f"memory://{6 * block_bytes}", f"disk://{tmp_path}/disk?budget=64MiB", promote='"never"')
    with manager(model, None, store, weights="w") as kvc:
        kvc.add_blocks_ids(ids)
        last = answered(kvc, model, ids, plain)
        assert last.hit_tokens == {"memory": 6 * BLOCK, "disk": (BLOCKS - 6) * BLOCK}
    store.close()


def test_files_that_were_spoiled_and_cut(
    model: Any, ids: Any, plain: list[int], tmp_path: Path, block_bytes: int
) -> None:
    store = opened(tmp_path, f"memory://{2 * block_bytes}", f"disk://{tmp_path}/disk?budget=64MiB", promote='"never"')
    with manager(model, None, store, weights="w") as kvc:
        kvc.add_blocks_ids(ids)
        names = [tmp_path / "disk/values" / disk_files.file_name(key) for key in kvc.blocks.hashes(ids[0].numpy())]
        spoiled = bytearray(names[12].read_bytes())
        spoiled[700] ^= 4
        names[12].write_bytes(spoiled)
        os.truncate(names[15], 100)
        last = answered(kvc, model, ids, plain)
        assert last.loaded_blocks == 12 and last.failed_blocks["corrupt"] == 1
        kvc.add_blocks_ids(ids)
        assert answered(kvc, model, ids, plain).loaded_blocks == BLOCKS
    store.close()


def test_a_disk_that_is_full_costs_what_did_not_fit(
    model: Any, ids: Any, plain: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    room, write_part = [9], disk_files.write_part

    def little_room(*args: Any, **options: Any) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_part(*args, **options)

    monkeypatch.setattr("skymemory.store.disk.write_part", little_room)
    store = opened(tmp_path, f"memory://{3 * block_bytes}", f"disk://{tmp_path}/disk?budget=64MiB", promote='"never"')
    with manager(model, None, store, weights="w") as kvc:
        assert kvc.add_blocks_ids(ids).stored_blocks == 9
        assert answered(kvc, model, ids, plain).loaded_blocks == 9
        room[0] = 1000  # another client has cleared it
        assert kvc.add_blocks_ids(ids).stored_blocks == BLOCKS - 9
        assert answered(kvc, model, ids, plain).loaded_blocks == BLOCKS
        assert store.stats()["disk_failed{ENOSPC}_total"] > 0
    store.close()


def test_a_disk_that_dies_in_mid_load_is_made_up_for_by_redis(
    model: Any, ids: Any, plain: list[int], tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, f"disk://{tmp_path}/disk?budget=64MiB", server.url)
    disk = store.tiers[0].store
    assert isinstance(disk, DiskStore)

    def dies() -> None:
        raise OSError(errno.EIO, "the device is gone")

    with manager(model, None, store, weights="w") as kvc:
        kvc.add_blocks_ids(ids)
        breaks_at_load(disk, 1, dies, monkeypatch)
        last = answered(kvc, model, ids, plain)
        assert last.loaded_blocks == BLOCKS and last.hit_tokens["redis"] > 0
        assert store.stats()["tier_failures_total{disk}"] >= 1
    store.close()


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_redis_killed_in_mid_load(
    model: Any,
    ids: Any,
    plain: list[int],
    tmp_path: Path,
    server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    block_bytes: int,
    comes_back: bool,
) -> None:
    store = opened(tmp_path, f"memory://{5 * block_bytes}", server.url, promote='"never"')

    def killed() -> None:
        server.stop()
        if comes_back:
            server.start()  # empty: it keeps nothing

    with manager(model, None, store, weights="w") as kvc:
        kvc.add_blocks_ids(ids)
        breaks_at_load(store.tiers[1].store, 1, killed, monkeypatch)
        last = answered(kvc, model, ids, plain)
        assert last.hit_tokens == {"memory": 5 * BLOCK}
        if comes_back:
            until_s = time.monotonic() + 20
            while not (stored := kvc.add_blocks_ids(ids).stored_blocks) and time.monotonic() < until_s:
                time.sleep(0.05)  # a tier is left alone until what was given up has come back
            assert stored == BLOCKS - 5
            assert answered(kvc, model, ids, plain).loaded_blocks == BLOCKS
    store.close()
