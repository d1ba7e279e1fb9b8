"""User-named files: regular files of bounded size, or an error that says what is wrong.

``Path.read_text`` may block on a pipe, and never ends on ``/dev/zero``.
"""

from __future__ import annotations

import codecs
import errno
import os
import select
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from skymemory.config import parse_json, parse_toml
from skymemory.errors import InvalidInput, cannot_read, quoted
from skymemory.units import format_size

_PIECE_BYTES = 2**20
PIPE_S = 10.0

MAX_SETTINGS_BYTES = 2**20
MAX_TABLE_BYTES = 64 * 2**20
MAX_TOKENIZER_BYTES = 512 * 2**20
"""The largest ``tokenizer.json`` served today has 33 MB."""


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in a write error, if the system does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_private(path: Path, data: str | bytes, *, replace: bool = True, durable: bool = False) -> None:
    """Write a private file atomically; with ``durable`` onto the disk.

    Raises:
        FileExistsError: it exists, and ``replace`` is False.
        OSError: it cannot be written.
    """
    fd, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with _naming(path), os.fdopen(fd, "wb") as file:
            file.write(data.encode("utf-8") if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if replace:
            os.replace(scratch, path)
        else:
            os.link(scratch, path)  # unlike a rename, a link fails if the name is taken
    finally:
        with suppress(OSError):
            os.unlink(scratch)
    if durable:  # the name, too: a rename is on the disk only once its folder is
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_output(path: Path, data: bytes | memoryview) -> None:
    """Write a user's output. A regular file, or a link's target, is replaced atomically.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        # Without O_NONBLOCK, opening a pipe without a reader would block.
        with _naming(path), open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            os.set_blocking(file.fileno(), True)
            file.write(data)
        return
    path = path.resolve()
    scratch = path.with_name(f".{path.name[:200]}.{os.getpid()}")
    try:
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with _naming(path), open(fd, "wb") as file:
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(data)
        os.replace(scratch, path)
    finally:
        with suppress(OSError):
            os.unlink(scratch)


def check_readable(path: Path) -> None:
    """Raise ``InvalidInput`` if ``path`` cannot be opened."""
    try:
        open_file(path).close()
    except OSError as error:
        raise InvalidInput(cannot_read(path, error)) from error


def open_file(path: Path, *, pipes: bool = False) -> BinaryIO:
    """Open a regular file, or with ``pipes`` also a pipe, for reading.

    Raises:
        OSError: it cannot be opened, is something else, or is a pipe without data within ``PIPE_S``.
    """
    # Without O_NONBLOCK, opening a pipe without a writer would block before its type can be checked.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) or (pipes and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))):
        if not stat.S_ISREG(mode) and not _has_data_within(fd, PIPE_S):
            os.close(fd)
            raise OSError(errno.ETIMEDOUT, f"it is a pipe, and no data came within {PIPE_S:g} s", str(path))
        os.set_blocking(fd, True)
        return os.fdopen(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder, expected a file", str(path))
    raise OSError(errno.EINVAL, "it is a device or a pipe, expected a regular file", str(path))


def _has_data_within(fd: int, timeout_s: float) -> bool:
    """Return True if reading would not block, also at the end of a pipe."""
    readable = select.poll()  # select() knows descriptors below 1,024 only
    readable.register(fd, select.POLLIN)
    return bool(readable.poll(timeout_s * 1000))


def read_bounded(path: Path, most_bytes: int = MAX_SETTINGS_BYTES, *, pipes: bool = False) -> bytes:
    """Read a whole file.

    Raises:
        OSError: as ``open_file``, and for more than ``most_bytes``.
    """
    data = bytearray()
    with open_file(path, pipes=pipes) as file:
        too_large = os.fstat(file.fileno()).st_size > most_bytes
        while not too_large and (piece := file.read(_PIECE_BYTES)):
            data += piece
            too_large = len(data) > most_bytes
    if too_large:
        raise OSError(errno.EFBIG, f"it is larger than {format_size(most_bytes)}, the most it may have", str(path))
    return bytes(data)


_OTHER_MARKS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32"}
_OTHER_MARKS |= {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}  # last: UTF-32's begins with it


def decode_text(data: bytes) -> str:
    """Decode UTF-8 without a byte-order mark.

    Raises:
        InvalidInput: it is not UTF-8.
    """
    for mark, name in _OTHER_MARKS.items():
        if data.startswith(mark):
            raise InvalidInput(f"it is {name}, expected UTF-8: save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"it is not UTF-8 text (byte {error.start}, 0x{data[error.start]:02x}): save it as UTF-8"
        ) from error


def read_text(path: Path, most_bytes: int = MAX_SETTINGS_BYTES) -> str:
    """Read a text file.

    Raises:
        OSError: as ``read_bounded``.
        InvalidInput: as ``decode_text``, with the file's name.
    """
    data = read_bounded(path, most_bytes)
    try:
        return decode_text(data)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from error.__cause__


def read_json(path: Path, expected: str, most_bytes: int = MAX_SETTINGS_BYTES) -> dict[str, Any]:
    """Read the object in a JSON file. ``expected`` is for errors.

    Raises:
        InvalidInput: it cannot be read, or is no JSON object.
    """
    try:
        content = decode_text(read_bounded(path, most_bytes))
        document = parse_json(content)
    except OSError as error:
        raise InvalidInput(cannot_read(path, error)) from error
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}; expected {expected}") from error
    if not isinstance(document, dict):
        raise InvalidInput(f"{path}: {quoted(document)}; expected {expected}")
    return document


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        InvalidInput: it cannot be read, or is not TOML.
    """
    try:
        content = read_text(path)
    except OSError as error:
        raise InvalidInput(cannot_read(path, error)) from error
    try:
        return parse_toml(content)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from error
