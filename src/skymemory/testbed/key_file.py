"""Key files: rings of secret keys that only their owner may read, written whole or not at all, read strictly.

Who uses a ring follows its file: a key that is added or retired counts within a second, without a restart.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skymemory.errors import InvalidInput, LaterFile
from skymemory.files import open_file, write_private
from skymemory.keys import SECRET_BYTES, KeyRing, SecretKey, first_ring
from skymemory.protocol.auth import Authority

FORMAT_VERSION = 1
MAX_FILE_BYTES = 65_536
LOOK_S = 1.0
"""How often a ring's file is looked at."""


def new_secret() -> bytes:
    return os.urandom(SECRET_BYTES)


def to_json(ring: KeyRing) -> str:
    keys = [{"id": key.key_id, "key": key.secret.hex(), "from_s": key.from_s} for key in ring.keys]
    return json.dumps({"version": FORMAT_VERSION, "keys": keys}, indent=1) + "\n"


def _key(found: Any, where: str) -> SecretKey:
    match found:
        case {"id": int(key_id), "key": str(text), "from_s": int(from_s) | float(from_s)} if len(found) == 3:
            try:
                return SecretKey(key_id, bytes.fromhex(text), float(from_s))
            except OverflowError:
                raise InvalidInput(f"{where}: key {key_id} is used from a time beyond all numbers") from None
            except ValueError as error:  # its own complaints are ValueErrors too, and tell no secret
                said = str(error) if isinstance(error, InvalidInput) else "its key is not hexadecimal"
                raise InvalidInput(f"{where}: {said}") from None
    raise InvalidInput(f"{where}: each key needs id, key (64 hexadecimal digits) and from_s, and nothing else")


def from_json(text: str, where: str) -> KeyRing:
    """The ring in ``text``. Raises ``InvalidInput``, which never repeats what might be a secret."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidInput(f"{where}: not JSON, so no key file") from None
    match found:
        case {"version": int(version)} if version > FORMAT_VERSION:
            raise LaterFile(f"{where}: a key file of version {version}; a later release wrote it")
    if not isinstance(found, dict) or found.get("version") != FORMAT_VERSION or not isinstance(found.get("keys"), list):
        raise InvalidInput(f"{where}: not a key file of version {FORMAT_VERSION}: `skymemory keys new FILE` makes one")
    try:
        return KeyRing(tuple(_key(key, where) for key in found["keys"]))
    except InvalidInput as error:
        raise InvalidInput(str(error) if where in str(error) else f"{where}: {error}") from None


def read_keys(path: Path) -> KeyRing:
    """Read and check a key file; one that others may read is refused, for then it is no secret."""
    try:
        with open_file(path) as file:
            status = os.fstat(file.fileno())
            if stat.S_IMODE(status.st_mode) & 0o077:
                raise InvalidInput(f"{path} can be read by others: make new keys, or `chmod 600 {path}` if none has")
            if status.st_size > MAX_FILE_BYTES:
                raise InvalidInput(f"{path}: larger than {MAX_FILE_BYTES} bytes, which no key file is")
            text = file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        raise InvalidInput(
            f"no key file {path}: copy the constellation's, or make one with `skymemory keys new`"
        ) from None
    except OSError as error:
        raise InvalidInput(f"cannot read the keys in {path}: {error.strerror}") from error
    return from_json(text, str(path))


def write_keys(ring: KeyRing, path: Path, *, replace: bool = True) -> None:
    """Write a key file, readable by its owner only; a reader sees the old ring or the new one."""
    if not path.name:
        raise InvalidInput(f"cannot write the keys to {path}: it is a folder, expected a file's name")
    try:
        write_private(path, to_json(ring), replace=replace, durable=True)  # keys that are gone open nothing
    except FileExistsError:
        raise InvalidInput(f"{path} exists: `skymemory keys rotate` adds a key to it") from None
    except OSError as error:
        raise InvalidInput(f"cannot write the keys to {path}: {error.strerror}") from error


def new_keys(path: Path) -> KeyRing:
    """A new file with one new key. Raises ``InvalidInput`` where there is a file already."""
    ring = first_ring(new_secret())
    write_keys(ring, path, replace=False)
    return ring


class KeyFollower:
    """Keeps an ``Authority`` at what its key file says. A file that cannot be read changes nothing: ``say`` is told."""

    def __init__(
        self, path: Path, every_packet: bool = False, say: Callable[[str], None] | None = None, look_s: float = LOOK_S
    ) -> None:
        self._path = path
        self._say = say
        self._look_s = look_s
        self._seen = self._state()
        self.authority = Authority(read_keys(path), every_packet)
        self._next_s = time.monotonic() + look_s

    def _state(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size

    def refresh(self) -> None:
        """Read the file again if it has changed; costs nothing more than once every ``look_s``."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._look_s
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            self.authority.ring = read_keys(self._path)
        except InvalidInput as error:
            if self._say is not None:
                self._say(f"{error}; the keys of before go on being used")
