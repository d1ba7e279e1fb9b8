"""Standard output and standard error of the command: no character, closed pipe or full disk ends it with a
traceback.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
import unicodedata

from skymemory.errors import SkyMemoryError, os_reason
from skymemory.text import write_line

PLAIN = "skymemory.plain"

_PLAIN_FORMS = {
    "→": "->", "←": "<-", "↔": "<->", "↑": "^", "↓": "v", "⇒": "=>",
    "×": "x", "·": ".", "•": "*", "…": "...", "−": "-", "–": "-", "—": "-", "±": "+-", "÷": "/",
    "≤": "<=", "≥": ">=", "≠": "!=", "≈": "~", "∞": "inf", "√": "sqrt", "∑": "sum", "✓": "v", "✗": "x",
    "✔": "v", "✘": "x",
    "‘": "'", "’": "'", "‚": "'", "“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "°": "deg", "§": "section ",
    "µ": "u", "μ": "u", "Δ": "Delta", "Σ": "Sigma", "δ": "delta", "θ": "theta", "π": "pi", "ρ": "rho", "τ": "tau",
    "▁": "_", "▂": ".", "▃": "-", "▄": "=", "▅": "+", "▆": "*", "▇": "%", "█": "#", "░": ".", "▒": ":", "▓": "%",
    "■": "#", "□": ".", "▪": "#", "▫": ".", "●": "*", "○": "o", "◆": "*", "◇": "o",
    "╱": "/", "╲": "\\", "╳": "x", "⌈": "[", "⌉": "]", "⌊": "[", "⌋": "]",
    "²": "2", "³": "3", "⁻": "-", "½": "1/2", "¼": "1/4", "¾": "3/4",
}  # fmt: skip


def _plain_form(character: str) -> str:
    if form := _PLAIN_FORMS.get(character):
        return form
    if "\u2500" <= character <= "\u257f":  # box drawing
        name = unicodedata.name(character)
        words = set(name.split())
        if words.isdisjoint(("VERTICAL", "UP", "DOWN")):
            return "=" if "DOUBLE HORIZONTAL" in name else "-"
        return "|" if words.isdisjoint(("HORIZONTAL", "LEFT", "RIGHT")) else "+"
    if "\u2800" <= character <= "\u28ff":  # braille, as drawings use it
        return " " if character == "\u2800" else ":"
    decomposed = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode("ascii")
    return decomposed or ("" if unicodedata.combining(character) else "?")


def to_ascii(text: str) -> str:
    """Return ``text`` in ASCII: plain forms, all else as ``?``."""
    return "".join(character if character.isascii() else _plain_form(character) for character in text)


def _write_plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return to_ascii(error.object[error.start : error.end]), error.end


codecs.register_error(PLAIN, _write_plain)


def prepare_streams(*, read_by_ours: bool = False) -> None:
    """Let both streams write any text; in UTF-8 if a program of this project reads them."""
    # A stream that was closed (``>&-``) is None, which few callers expect; its text is discarded.
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    handler = os.environ.get("PYTHONIOENCODING", "").partition(":")[2]  # as in latin-1:replace
    chosen = handler not in ("", "strict")
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):  # a notebook's stream, which takes any text
            continue
        if read_by_ours:
            stream.reconfigure(encoding="utf-8", errors=PLAIN)
        elif not chosen:
            stream.reconfigure(errors=PLAIN)


class OutputLost(SkyMemoryError):
    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write to standard output: {os_reason(error)}")


def flush_output() -> None:
    """Flush standard output. Raises BrokenPipeError if the reader has closed the pipe, else OutputLost."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputLost(error) from error


def discard_unwritten() -> None:
    """Drop output that cannot be written, which the interpreter would report at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # The buffer keeps the failed text: redirect the stream to the null device, where it can be written.
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, stream.fileno())
            os.close(null)


def is_output_lost(error: OSError) -> bool:
    """Return True if a test write to standard output fails as well."""
    if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
        return False
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return True
    return False


def print_error(message: object) -> None:
    try:
        write_line(f"skymemory: {message}", sys.stderr)
    except OSError:
        discard_unwritten()
