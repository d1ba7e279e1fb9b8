"""Which text the small model learns from: the documentation that named Debian packages install, as plain text.

Free documentation that one ``apt-get install`` brings to any Debian 12; nothing else is read and nothing is fetched.
"""

from __future__ import annotations

import gzip
import html
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a package that are read: those whose path matches ``pattern`` (a regular expression, anywhere)."""

    package: str
    pattern: str
    licence: str


SOURCES = (
    Source("python3.11-doc", r"/_sources/.*\.rst\.txt$", "PSF-2.0"),
    Source("cmake-doc", r"/_sources/.*\.(rst|txt)$", "BSD-3-Clause"),
    Source("sqlite3-doc", r"\.html$", "public domain"),
    Source("git-doc", r"\.txt$", "GPL-2.0"),
    Source("perl-doc", r"\.pod$", "Artistic or GPL-1.0+"),
    Source("debian-handbook", r"/html/en-US/.*\.html$", "CC-BY-SA-3.0 or GPL-2.0+"),
    Source("debian-reference-en", r"\.en\.txt\.gz$", "GPL-2.0+"),
    Source("debian-policy", r"(/_sources/.*\.rst\.txt|/debian-policy/[a-z0-9-]+\.txt\.gz)$", "GPL-2.0+"),
    Source("developers-reference", r"/_sources/.*\.rst\.txt$", "GPL-2.0+"),
    Source("doc-debian", r"\.(txt|txt\.gz)$", "public domain, GPL-2.0+ and others"),
    Source("bash-doc", r"/bashref\.html$", "GFDL-1.3"),
    Source("manpages", r"/man/man\d/.*\.gz$", "GPL, BSD and other free licences, by page"),
    Source("manpages-dev", r"/man/man\d/.*\.gz$", "GPL, BSD and other free licences, by page"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """One file's plain text; ``name`` is its package and path, the same on every machine."""

    name: str
    text: str


def missing_packages(sources: tuple[Source, ...] = SOURCES) -> list[str]:
    """Those of the packages that are not installed here (all of them where there is no dpkg)."""
    return [source.package for source in sources if not _package_files(source.package)]


def read_sources(sources: tuple[Source, ...] = SOURCES) -> Iterator[Document]:
    """Every document of ``sources``, in the order of its package and then its path."""
    for source in sources:
        wanted = re.compile(source.pattern)
        for path in sorted(path for path in _package_files(source.package) if wanted.search(path)):
            file = Path(path)
            if file.is_file() and not file.is_symlink():
                text = plain_text(path, file.read_bytes())
                if text:
                    yield Document(f"{source.package}:{path}", text)


def plain_text(path: str, data: bytes) -> str:
    """The readable text of a file whose form its name shows: html, a manual page, or plain text, gzipped or not."""
    if path.endswith(".gz"):
        path, data = path[:-3], gzip.decompress(data)
    text = data.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\ufffd", "")
    if path.endswith(".html"):
        text = _from_html(text)
    elif re.search(r"/man\d/[^/]+$", path):
        text = _from_manual(text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _package_files(package: str) -> list[str]:
    try:
        listing = subprocess.run(["dpkg", "-L", package], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return listing.stdout.splitlines() if listing.returncode == 0 else []


_DROPPED = re.compile(r"<(script|style|head|nav|svg)\b.*?</\1\s*>|<!--.*?-->", re.DOTALL | re.IGNORECASE)
_PREFORMATTED = re.compile(r"(<pre\b.*?</pre\s*>)", re.DOTALL | re.IGNORECASE)
_BLOCK = re.compile(r"</?(p|div|h\d|li|ul|ol|dl|dt|dd|tr|table|br|hr|blockquote|pre|section)\b[^>]*>", re.IGNORECASE)
_TAG = re.compile(r"<[^>]*>")


def _from_html(text: str) -> str:
    parts = _PREFORMATTED.split(_DROPPED.sub(" ", text))
    for number, part in enumerate(parts):
        if number % 2 == 0:
            part = _BLOCK.sub("\n\n", re.sub(r"\s+", " ", part))
            part = re.sub(r"\n\s+", "\n\n", re.sub(r" +", " ", _TAG.sub("", part)))
        else:
            part = "\n\n" + _TAG.sub("", part) + "\n\n"
        parts[number] = part
    return html.unescape("".join(parts)).replace("\xa0", " ")


_FONT = re.compile(r"\\f(\[[A-Z]*\]|\([A-Z]{2}|[A-Z0-9])")
_ESCAPES = {r"\-": "-", r"\(aq": "'", r"\(dq": '"', r"\e": "\\", r"\&": "", r"\ ": " ", r"\|": "", r"\^": "", r"\%": ""}
_WORD = re.compile(r'"([^"]*)"|(\S+)')
_ALTERNATING = {".BR", ".IR", ".RB", ".RI", ".BI", ".IB"}
_HEADINGS = {".SH", ".SS", ".TP", ".PP", ".P", ".IP", ".LP", ".Sh", ".Pp", ".It"}


def _from_manual(text: str) -> str:
    """The text of a page in man or mdoc macros: fonts and comments dropped, headings and paragraphs kept."""
    lines: list[str] = []
    for line in text.split("\n"):
        if line.startswith(('.\\"', "'")):
            continue
        line = _FONT.sub("", line)
        for escape, plain in _ESCAPES.items():
            line = line.replace(escape, plain)
        if line.startswith("."):
            macro, _, rest = line.partition(" ")
            if macro in _HEADINGS:
                lines.append("")
            elif len(macro) > 3 or macro in (".so", ".ie", ".if", ".el", ".de", ".ds", ".nr", ".ft", ".sp", ".in"):
                continue
            # .BR and its like set alternating fonts: their arguments are printed without the spaces between them.
            words = [quoted or bare for quoted, bare in _WORD.findall(rest)]
            line = ("" if macro in _ALTERNATING else " ").join(words)
            if not line:
                continue
        lines.append(line)
    return "\n".join(lines)
