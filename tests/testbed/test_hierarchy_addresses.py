"""Several tiers by one address: read from a file or an address, opened, and used by the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from skymemory import open_store
from skymemory.cache.tiers.store import TieredStore
from skymemory.cli.main import main
from skymemory.errors import InvalidInput, NoConstellation, SkyMemoryError
from skymemory.kv.value import is_sound_block
from skymemory.store.base import Presence
from skymemory.store.disk import DiskStore
from skymemory.store.wrappers import TenantStore
from skymemory.testbed.open_store import read_file

KEY = bytes(32)

WHOLE = """
promote = "second hit"
demote = false
write_back = true
load_deadline = "3s"
close_deadline = "1s"
outbound = "1MiB"
in_flight = "2MiB"

[[tier]]
store = "memory://1MiB?policy=lru"

[[tier]]
store = "disk://DISK?budget=1MiB"
ask_deadline = "100ms"
load_deadline = "200ms"
store_deadline = "300ms"
threads = 3
verify = "blocks"
breaker = { failures = 5, first_wait = "1s", last_wait = "2s" }
"""


UNVERIFIED = WHOLE.replace('verify = "blocks"', "")
"""For values that are no blocks."""


def written(folder: Path, text: str) -> Path:
    path = folder / "tiers.toml"
    path.write_text(text.replace("DISK", str(folder / "disk")), "utf-8")
    return path


def test_a_file_says_everything(tmp_path: Path) -> None:
    plan = read_file(written(tmp_path, WHOLE))
    near, far = plan.tiers
    assert near.address == "memory://1MiB?policy=lru" and near.settings.local and near.settings.verify is None
    assert far.settings.ask_deadline_s == 0.1 and far.settings.load_deadline_s == 0.2
    assert far.settings.store_deadline_s == 0.3 and far.settings.threads == 3 and not far.settings.local
    assert far.settings.verify is is_sound_block
    breaker = far.settings.breaker
    assert (breaker.failures, breaker.first_wait_s, breaker.last_wait_s) == (5, 1.0, 2.0)
    whole = plan.settings
    assert (whole.promote, whole.demote, whole.write_back) == ("second hit", False, True)
    assert (whole.load_deadline_s, whole.close_deadline_s) == (3.0, 1.0)
    assert (whole.outbound_bytes, whole.in_flight_bytes) == (1 << 20, 2 << 20)


def test_the_example_of_the_reader_is_one(tmp_path: Path) -> None:
    from skymemory.testbed.open_store import HierarchyPlan

    words = (HierarchyPlan.__doc__ or "").partition("::\n")[2]
    plan = read_file(written(tmp_path, words))
    assert [tier.address.partition(":")[0] for tier in plan.tiers] == ["memory", "disk", "constellation"]
    assert plan.settings.promote == "second hit"


def test_what_is_written_back_is_there_for_the_next_process(tmp_path: Path) -> None:
    file = written(tmp_path, UNVERIFIED)
    store = open_store(f"tiers://{file}")
    assert isinstance(store, TieredStore) and [tier.name for tier in store.tiers] == ["memory", "disk"]
    assert store.put_many([(KEY, b"kept")]) == [True]
    store.close()
    again = open_store(f"tiers://{file}")
    ticket = again.prepare_load([KEY])
    assert again.complete_load(ticket) == [b"kept"]
    assert ticket.report is not None and ticket.report.keys[0].tier == "disk"
    again.close()


def test_tiers_in_one_address(tmp_path: Path) -> None:
    store = open_store(
        f"tiers:?tier=memory://1MiB&tier=disk://{tmp_path}/fast?budget=1MiB%26name=fast"
        f"&tier=disk://{tmp_path}/slow?budget=2MiB%26name=slow%26sync=each&promote=second-hit&write_back=yes"
    )
    assert isinstance(store, TieredStore)
    assert [tier.name for tier in store.tiers] == ["memory", "fast", "slow"]
    assert [tier.settings.local for tier in store.tiers] == [True, False, False]
    assert store.settings.promote == "second hit" and store.settings.write_back
    assert store.stats()["slow_budget_bytes"] == 2 << 20
    store.close()


def test_rules_are_for_the_whole(tmp_path: Path) -> None:
    store = open_store(f"tiers:?tier=memory://1MiB&tier=disk://{tmp_path}/d?budget=1MiB&tenant=a&quota=1KiB")
    assert isinstance(store, TenantStore) and isinstance(store.store, TieredStore)
    assert store.put_many([(KEY, bytes(2000))]) == [False] and store.lookup([KEY]) == [Presence.MISS]
    store.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no tiers; expected some"),
        ("[[tier]\n", "not TOML"),
        ("tier = 3\n", "no tiers; expected some"),
        ("[[tier]]\nthreads = 2\n", "tier 1: a tier without store"),
        ('[[tier]]\nstore = "memory"\nthread = 2\n', "tier 1: unknown setting 'thread', expected ask_deadline"),
        ('[[tier]]\nstore = "memory"\nthreads = 0\n', "tier 1: threads: expected a whole number above 0, got 0"),
        ('[[tier]]\nstore = "memory"\nlocal = "perhaps"\n', "local: expected true or false"),
        ('[[tier]]\nstore = "memory"\nload_deadline = 3\n', "load_deadline: expected text in quotes, got 3"),
        ('[[tier]]\nstore = "memory"\nverify = "all"\n', "verify: expected blocks or none"),
        ('[[tier]]\nstore = "memory"\nbreaker = { failure = 1 }\n', "breaker: unknown setting 'failure'"),
        ('[[tier]]\nstore = "memory"\nbreaker = { first_wait = "9s", last_wait = "1s" }\n', "first_wait <= last_wait"),
        ('promote = "rarely"\n[[tier]]\nstore = "memory"\n', "promote='rarely'"),
        ('outbound = "much"\n[[tier]]\nstore = "memory"\n', "outbound: .*not a size"),
        ('colour = "red"\n[[tier]]\nstore = "memory"\n', "unknown setting 'colour', expected promote"),
        ('[[tier]]\nstore = "memory"\n[[tier]]\nstore = "tape://x"\n', "tier 2: store 'tape://x': expected memory"),
        ('[[tier]]\nstore = "tiers:?tier=memory"\n', "tier 1: .* is a hierarchy itself"),
        ('[[tier]]\nstore = "memory"\n[[tier]]\nstore = "memory"\n', "different names"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        open_store(f"tiers://{written(tmp_path, text)}")


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("tiers:///nowhere/at/all.toml", "cannot read /nowhere/at/all.toml: No such file"),
        ("tiers:", "expected tiers:///FILE.toml"),
        ("tiers:?promote=always", "expected tiers:///FILE.toml"),
        ("tiers:?tier=memory&write_back=perhaps", "write_back: expected true or false"),
        ("tiers:?tier=memory&threads=2", "unknown setting 'threads'"),
        ("tiers:///x.toml?promote=never", "unknown option 'promote': write it into the file"),
        ("memory://1MiB?name=a.b", "name='a.b': expected letters"),
    ],
)
def test_a_wrong_address_is_refused_with_the_reason(where: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        open_store(where)


def test_sealed_values_are_not_verified_as_blocks(tmp_path: Path) -> None:
    file = written(tmp_path, '[[tier]]\nstore = "memory"\nverify = "blocks"\n')
    with pytest.raises(InvalidInput, match="seal and verify exclude each other"):
        open_store(f"tiers://{file}?seal={tmp_path / 'keys'}")


def test_tiers_that_were_opened_are_closed_when_a_later_one_cannot_be(tmp_path: Path) -> None:
    disk = f"disk://{tmp_path}/disk?budget=1MiB"
    with pytest.raises(NoConstellation, match="tier 2: "):
        open_store(f"tiers:?tier={disk}&tier=constellation://{tmp_path}/none")
    DiskStore(tmp_path / "disk", 1 << 20).close()  # its lock is free again


def test_the_command_keeps_a_file_in_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = f"tiers://{written(tmp_path, UNVERIFIED)}"
    mine, back = tmp_path / "mine.bin", tmp_path / "back.bin"
    mine.write_bytes(bytes(range(256)) * 100)
    assert main(["kv", "put", str(mine), "--store", where]) == 0
    assert main(["kv", "get", "mine.bin", "--store", where, "--out", str(back)]) == 0
    assert back.read_bytes() == mine.read_bytes()
    assert main(["kv", "pin", "mine.bin", "--store", where]) == 0
    assert main(["kv", "delete", "mine.bin", "--store", where]) == 0
    capsys.readouterr()
    assert main(["kv", "get", "mine.bin", "--store", where, "--out", "-"]) == 1
    assert "'mine.bin' is not in the store 'tiers' (absent)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "store", "says"),
    [
        (["list"], "redis://127.0.0.1:1", "list: redis does not support it; a constellation and disk do"),
        (["put", "FILE", "--ttl", "1m"], "tiers:?tier=memory", "--ttl: tiers does not support it"),
    ],
)
def test_the_command_says_what_a_store_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], store: str, says: str
) -> None:
    file = written(tmp_path, "x")
    assert main(["kv", *(str(file) if word == "FILE" else word for word in words), "--store", store]) == 2
    assert says in capsys.readouterr().err


def test_every_failure_of_opening_is_ours(tmp_path: Path) -> None:
    with pytest.raises(SkyMemoryError):
        open_store(f"tiers:?tier=memory&seal={tmp_path / 'none'}")
