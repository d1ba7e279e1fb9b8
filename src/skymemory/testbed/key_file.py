"""Key files: rings of secret keys, readable by their owner only, replaced atomically, reloaded within a second."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skymemory.errors import InvalidInput, LaterFile
from skymemory.files import decode_text, open_file, write_private
from skymemory.keys import SECRET_BYTES, KeyRing, SecretKey, first_ring
from skymemory.protocol.auth import Authority

FORMAT_VERSION = 1
MAX_FILE_BYTES = 65_536
LOOK_S = 1.0


def new_secret() -> bytes:
    return os.urandom(SECRET_BYTES)


def to_json(ring: KeyRing) -> str:
    keys = [{"id": key.key_id, "key": key.secret.hex(), "from_s": key.from_s} for key in ring.keys]
    return json.dumps({"version": FORMAT_VERSION, "keys": keys}, indent=1) + "\n"


def _key(entry: Any, where: str) -> SecretKey:
    match entry:
        case {"id": int(key_id), "key": str(text), "from_s": int(from_s) | float(from_s)} if len(entry) == 3:
            try:
                return SecretKey(key_id, bytes.fromhex(text), float(from_s))
            except OverflowError:
                raise InvalidInput(f"{where}: key {key_id}: from_s is too large") from None
            except ValueError as error:  # InvalidInput is a ValueError too, but contains no secret
                reason = str(error) if isinstance(error, InvalidInput) else "its key is not hexadecimal"
                raise InvalidInput(f"{where}: {reason}") from None
    raise InvalidInput(f"{where}: each key needs id, key (64 hexadecimal digits) and from_s, and nothing else")


def from_json(text: str, where: str) -> KeyRing:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidInput(f"{where}: not JSON; expected a key file") from None
    match content:
        case {"version": int(version)} if version > FORMAT_VERSION:
            raise LaterFile(f"{where}: a key file of version {version}; a later release wrote it")
    if (
        not isinstance(content, dict)
        or content.get("version") != FORMAT_VERSION
        or not isinstance(content.get("keys"), list)
    ):
        raise InvalidInput(f"{where}: not a key file of version {FORMAT_VERSION}: `skymemory keys new FILE` makes one")
    try:
        return KeyRing(tuple(_key(key, where) for key in content["keys"]))
    except InvalidInput as error:
        raise InvalidInput(str(error) if where in str(error) else f"{where}: {error}") from None


def read_keys(path: Path) -> KeyRing:
    """Read a key file; refuse a file readable by others."""
    try:
        # Check the open file, not the path: another file cannot take its place in between.
        with open_file(path) as file:
            status = os.fstat(file.fileno())
            if stat.S_IMODE(status.st_mode) & 0o077:
                raise InvalidInput(
                    f"{path} is readable by others: make new keys, or `chmod 600 {path}` if none was read"
                )
            if status.st_size > MAX_FILE_BYTES:
                raise InvalidInput(f"{path}: larger than {MAX_FILE_BYTES} bytes; expected a key file")
            data = file.read(MAX_FILE_BYTES)
    except FileNotFoundError:
        raise InvalidInput(
            f"no key file {path}: copy the constellation's, or make one with `skymemory keys new`"
        ) from None
    except OSError as error:
        raise InvalidInput(f"cannot read the keys in {path}: {error.strerror}") from error
    try:
        text = decode_text(data)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None  # the cause would show the file's bytes
    return from_json(text, str(path))


def write_keys(ring: KeyRing, path: Path, *, replace: bool = True) -> None:
    if not path.name:
        raise InvalidInput(f"cannot write the keys to {path}: it is a folder, expected a file's name")
    try:
        write_private(path, to_json(ring), replace=replace, durable=True)  # lost keys cannot be recovered
    except FileExistsError:
        raise InvalidInput(f"{path} exists: `skymemory keys rotate` adds a key to it") from None
    except OSError as error:
        raise InvalidInput(f"cannot write the keys to {path}: {error.strerror}") from error


def new_keys(path: Path) -> KeyRing:
    ring = first_ring(new_secret())
    write_keys(ring, path, replace=False)
    return ring


class KeyFollower:
    """Follower of a key file, whose keys ``authority`` has; an unreadable file changes nothing."""

    def __init__(
        self, path: Path, auth: str = "on", say: Callable[[str], None] | None = None, look_s: float = LOOK_S
    ) -> None:
        self._path = path
        self._say = say
        self._look_s = look_s
        self._seen = self._state()
        self.authority = Authority(read_keys(path), auth == "every", auth == "answers")
        self._next_s = time.monotonic() + look_s

    def _state(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size

    def refresh(self) -> float:
        """Reload a changed file, at most every ``look_s``; return the ``time.monotonic`` of the next check."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self._look_s
            before, self._seen = self._seen, self._state()
            if self._seen != before:
                try:
                    self.authority.ring = read_keys(self._path)
                except InvalidInput as error:
                    if self._say is not None:
                        self._say(f"{error}; still using the previous keys")
        return self._next_s
