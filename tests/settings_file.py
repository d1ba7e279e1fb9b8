"""Settings files of processes that tests start."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def settings_file(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the words ``--settings FILE`` with ``text`` in the file; none without text."""
    if not text:
        yield ()
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "settings.toml")
        file.write_text(text, "utf-8")
        yield "--settings", str(file)
