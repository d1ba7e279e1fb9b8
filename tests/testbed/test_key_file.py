"""Key files: written for their owner only, read strictly, followed without a restart; and the verb that makes them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from skymemory.cli.main import main
from skymemory.errors import InvalidInput
from skymemory.keys import first_ring
from skymemory.testbed.key_file import (
    MAX_FILE_BYTES,
    KeyFollower,
    from_json,
    new_keys,
    new_secret,
    read_keys,
    to_json,
    write_keys,
)

GOOD = to_json(first_ring(bytes(range(32))))


def test_what_is_written_is_read_and_only_the_owner_may(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    ring = new_keys(path)
    assert read_keys(path) == ring and path.stat().st_mode & 0o777 == 0o600
    rotated = ring.with_key(new_secret(), 17.5)
    write_keys(rotated, path)
    assert read_keys(path) == rotated and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(InvalidInput, match="exists"):
        new_keys(path)
    assert read_keys(path) == rotated and list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    (tmp_path / f".keys.{os.getpid()}").write_text("half a fi")
    for secret in (bytes(32), bytes(range(32))):
        write_keys(first_ring(secret), path)
        assert read_keys(path) == first_ring(secret)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_keys_that_others_may_read_are_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    new_keys(path)
    path.chmod(mode)
    with pytest.raises(InvalidInput, match="readable by others"):
        read_keys(path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "larger than|not JSON"),
        ("[]", "not a key file"),
        (GOOD.replace('"version": 1', '"version": 2'), "version 2; a later release"),
        ('{"version": 1, "keys": []}', "0 keys"),
        (GOOD.replace('"id": 1', '"id": 0'), "expected 1 to"),
        (GOOD.replace('"id": 1', '"id": "1"'), "each key needs"),
        (GOOD.replace("00010203", "zz010203"), "not hexadecimal"),
        (GOOD.replace("00010203", ""), "28 bytes"),
        (GOOD.replace('"from_s"', '"since"'), "each key needs"),
        ("x" * (MAX_FILE_BYTES + 1), "larger than"),
    ],
)
def test_a_wrong_file_is_refused_and_no_secret_repeated(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "keys"
    new_keys(path)
    path.write_text(text, "utf-8")
    with pytest.raises(InvalidInput, match=complaint) as error:
        read_keys(path)
    assert "0405060708" not in str(error.value) and str(path) in str(error.value)


def test_numbers_beyond_floats_are_refused() -> None:
    for word in ("NaN", "Infinity", "1e999", "1" + 400 * "0"):
        with pytest.raises(InvalidInput):
            from_json(GOOD.replace('"from_s": 0.0', f'"from_s": {word}'), "keys")


def test_a_follower_takes_new_keys_and_keeps_the_old_where_the_file_is_spoilt(tmp_path: Path) -> None:
    path, said = tmp_path / "keys", list[str]()
    ring = new_keys(path)
    follower = KeyFollower(path, say=said.append, look_s=0.0)
    assert follower.authority.ring == ring
    rotated = ring.with_key(new_secret(), 0.0)
    write_keys(rotated, path)
    follower.refresh()
    assert follower.authority.ring == rotated and not said
    os.truncate(path, 10)
    follower.refresh()
    follower.refresh()
    assert follower.authority.ring == rotated and len(said) == 1 and "still using the previous keys" in said[0]
    path.unlink()
    follower.refresh()
    assert follower.authority.ring == rotated


def test_the_verb_makes_rotates_and_retires(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    assert main(["keys", "new", str(path)]) == 0
    assert main(["keys", "rotate", str(path), "--after", "30s"]) == 0
    ring = read_keys(path)
    assert [key.key_id for key in ring.keys] == [1, 2] and ring.active(time.time()).key_id == 1
    assert ring.active(time.time() + 31).key_id == 2
    assert main(["keys", "retire", str(path), "1"]) == 2
    assert "in use" in capsys.readouterr().err
    path = tmp_path / "others"
    assert main(["keys", "new", str(path)]) == 0
    assert main(["keys", "rotate", str(path), "--after", "0s"]) == 0
    assert main(["keys", "retire", str(path)]) == 0
    assert [key.key_id for key in read_keys(path).keys] == [2]
    assert main(["keys", "show", str(path)]) == 0
    said = capsys.readouterr().out
    assert "in use" in said and not any(key.secret.hex() in said for key in read_keys(path).keys)
    assert main(["keys", "show", str(tmp_path / "none")]) == 2
    capsys.readouterr()
    assert main(["keys", "new", "."]) == 2
    assert "it is a folder" in capsys.readouterr().err
