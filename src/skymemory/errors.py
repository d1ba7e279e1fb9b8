"""Errors that callers handle: what was wrong, what was expected, what to do. A miss is a value, corruption a
counter.
"""

from __future__ import annotations

import errno
import os
import re

from skymemory.installation import install_command


class SkyMemoryError(Exception):
    """Base of all deliberate errors."""


class InvalidInput(SkyMemoryError, ValueError):
    """Unusable argument, option or file."""


class LaterFile(InvalidInput):
    """File of a later release; it is not overwritten."""


class UnknownPreset(InvalidInput): ...


class ValueTooLarge(InvalidInput):
    """Value, chunk or packet over a limit."""


class MalformedPacket(SkyMemoryError, ValueError):
    """Bytes that are no packet. Receivers count and drop it; only parsers raise."""


class LaterVersion(MalformedPacket):
    """Data of a later release: a miss, not to be deleted or overwritten."""


class CodecUnavailable(SkyMemoryError): ...


class MissingExtra(SkyMemoryError):
    """Missing optional dependency; the message names the extra."""


class CacheMisuse(SkyMemoryError, ValueError):
    """Use of a cache with a model or input that it cannot serve."""


class UnsupportedModel(SkyMemoryError):
    """Model whose cache cannot be stored faithfully."""


class ConstellationError(SkyMemoryError):
    """Failure of the constellation's processes."""


class NoConstellation(ConstellationError): ...


class CommandsRefused(ConstellationError):
    def __init__(self, before: str = "") -> None:
        super().__init__(
            f"{before}satellites refuse this computer's commands: its keys are not theirs (copy the key file of their "
            "run directory here), or its clock differs from theirs by more than 30 s"
        )


class WrongProcess(SkyMemoryError):
    """Use of a parent's store, socket or manager in its fork."""


def quoted(value: object, most: int = 60) -> str:
    """Quote a user's input, shortened if long."""
    if isinstance(value, int) and value.bit_length() > 200:  # Python refuses to write out more than 4,300 digits
        return f"a number of about {round(value.bit_length() * 0.30103):,} digits"
    text = repr(value)
    if len(text) <= most:
        return text
    size = f"{len(value):,} characters" if isinstance(value, str) else f"{len(text):,} characters when written out"
    return f"{text[: most // 2]}…{text[-1]} ({size})"


_LONGEST_NAME = 300
_SEVERAL = re.compile(r"Multiple exceptions: ")
_NUMBER = re.compile(r"\[Errno (\d+)\]")


def refuses_connections(error: BaseException) -> bool:
    return isinstance(error, ConnectionRefusedError) or _numbers(error) == {errno.ECONNREFUSED}


def _numbers(error: BaseException) -> set[int]:
    """Return the error numbers of all addresses, which asyncio joins in a text."""
    text = str(error)
    return set(map(int, _NUMBER.findall(text))) if _SEVERAL.match(text) else set()


def os_reason(error: OSError) -> str:
    """Return the cause without the error number."""
    if numbers := _numbers(error):
        return ", ".join(sorted({os.strerror(number) for number in numbers}))
    if error.errno and (error.strerror or "").startswith("Connect call failed"):  # asyncio's words, with the address
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__


def connection_reason(error: BaseException) -> str:
    import socket
    import ssl

    # Clients wrap the system's error; the innermost error is the cause.
    cause: BaseException = error
    while (inner := getattr(cause, "certificate_error", None) or getattr(cause, "os_error", None)) is not None:
        cause = inner
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"TLS failed: its certificate is not accepted ({cause.verify_message or cause.reason})"
    if isinstance(cause, ssl.SSLError):
        is_http = cause.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
        hint = "; it may speak plain HTTP: try http://" if is_http else ""
        return f"TLS failed: {(cause.reason or str(cause)).lower().replace('_', ' ')}{hint}"
    if isinstance(cause, socket.gaierror):
        return f"its name is not known ({os_reason(cause)})"
    if refuses_connections(cause):
        return "connection refused: nothing listens there"
    if isinstance(cause, ConnectionResetError | BrokenPipeError) or type(cause).__name__ == "ServerDisconnectedError":
        return "connection closed by the other side before it answered"
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    return os_reason(cause) if isinstance(cause, OSError) else str(cause) or type(cause).__name__


def no_room_reason(folder: object, error: OSError) -> str:
    """Return why writing failed, and what to do."""
    reason = {
        errno.ENOSPC: "the disk is full: free some of it, or choose a smaller budget or another folder",
        errno.EDQUOT: "this user's disk quota is used up: free some, or choose a smaller budget or another folder",
        errno.EROFS: "the file system is read-only: mount it for writing, or choose another folder",
        errno.EACCES: "this user may not write there: give it the right, or choose another folder",
        errno.EPERM: "this user may not write there: give it the right, or choose another folder",
        errno.EIO: "the disk fails (input/output error): look at the system's log, and choose another disk",
        errno.ENOENT: "the folder is no longer there: make it again, or choose another folder",
        errno.EMFILE: "too many files are open: raise the limit (ulimit -n)",
        errno.ENFILE: "too many files are open in the system",
        errno.EFBIG: "the file system takes no file of this size: choose another folder",
    }.get(error.errno or 0) or os_reason(error)
    return f"{folder}: {reason}"


def not_utf8(what: str, error: UnicodeEncodeError) -> InvalidInput:
    """Return the error for text that is no UTF-8, usually typed in another locale."""
    return InvalidInput(
        f"{what} is not encodable as UTF-8 ({error.reason}): if it was typed in a terminal, set a UTF-8 locale there, "
        "such as LC_ALL=C.UTF-8"
    )


def cannot_read(what: object, error: OSError) -> str:
    name = str(what)
    return f"cannot read {name if len(name) <= _LONGEST_NAME else quoted(name)}: {os_reason(error)}"


def missing_extra(what: str, packages: str, *extras: str) -> MissingExtra:
    return MissingExtra(f"{what} needs {packages}, not installed here: {install_command(*extras)}")


def cannot_listen(address: str, error: OSError) -> str:
    reasons = {
        errno.EADDRINUSE: "the port is taken by another process: stop it, or choose another port",
        errno.EADDRNOTAVAIL: "this computer has no such address",
        errno.EACCES: "this port needs privileges: choose one from 1024 up",
    }
    return f"cannot listen at {address}: {reasons.get(error.errno or 0) or os_reason(error)}"
