"""What the documentation says is there: every relative link and anchor, every command and option, every path.

`make docs` runs this file alone.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from skymemory.cli.main import build_parser
from skymemory.errors import InvalidInput

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md"))
FENCE = re.compile(r"^( *)(```+|~~~+)(\w*).*?\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\)|<(?:img|a)\s[^>]*?(?:src|href)=\"([^\"]+)\"")
DOTTED = re.compile(r"\bskymemory(?:_lab)?(?:\.\w+)+")
PACKAGES = {"skymemory_lab": ROOT / "lab/src", "skymemory": ROOT / "src"}
HOMES = {
    path.name: package
    for package, source in PACKAGES.items()
    for path in sorted((source / package).iterdir())
    if (path / "__init__.py").is_file() and path.name != "cli"
}
SHORT = re.compile(rf"(?<![\w.])(?!cache\.result)(?:{'|'.join(HOMES)})(?:\.\w+){{2,}}")
"""Names without the package's: ``sim.cluster.cells``. With one dot they may be a variable's (``store.pin``)."""
INLINE_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
SHELL_LANGUAGES = {"", "sh", "bash", "shell", "console"}
MAKE_TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _without_code(text: str) -> str:
    return INLINE_CODE.sub("", FENCE.sub("", text))


def _slugs(page: Path) -> set[str]:
    """Anchors of a page's headings, as code hosts make them."""
    slugs: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = 1
        while (unique := slug if number == 1 else f"{slug}-{number - 1}") in slugs:
            number += 1
        slugs.add(unique)
    return slugs


def _links(page: Path) -> list[str]:
    return [first or second for first, second in LINK.findall(_without_code(page.read_text("utf-8")))]


def _commands(page: Path) -> list[str]:
    """Shell lines of the fenced blocks, and inline code that begins with a command of ours."""
    text = page.read_text("utf-8")
    lines: list[str] = []
    for _, _, language, body in FENCE.findall(text):
        if language.lower() in SHELL_LANGUAGES:
            prompted = "\n$ " in f"\n{body}"
            joined = body.replace("\\\n", " ")
            lines += [
                line.strip().removeprefix("$ ")
                for line in joined.splitlines()
                if not prompted or line.strip().startswith("$ ")
            ]
    lines += INLINE_CODE.findall(FENCE.sub("", text))
    return [part.strip() for line in lines for part in re.split(r" && |; | \| | > | #", line)[:1] if part.strip()]


def _problem_with(command: str) -> str | None:
    """What is wrong with one command line, or None; commands that are not ours are taken on trust."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[:3] == ["python", "-m", "skymemory"]:
        words = ["skymemory", *words[3:]]
    if not words:
        return None
    match words[0].removeprefix(".venv/bin/"):
        case "make":
            targets = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
            unknown = [target for target in targets if target not in MAKE_TARGETS]
            return f"no make target {unknown[0]}" if unknown else None
        case "python" if len(words) > 1 and words[1].endswith(".py"):
            return None if (ROOT / words[1]).is_file() else f"no file {words[1]}"
        case "skymemory":
            return _problem_with_verb(words[1:])
    return None


def _problem_with_verb(arguments: list[str]) -> str | None:
    if not arguments or any("…" in word or word.startswith("[") for word in arguments):
        return None
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            build_parser().parse_args(arguments)
    except InvalidInput as error:
        return None if _only_names_a_verb(str(error)) else str(error)
    return None


def _only_names_a_verb(said: str) -> bool:
    """`skymemory kv` in running text names a verb; that it would want more arguments is no fault of the
    text.
    """
    return "the following arguments are required" in said


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in _links(page):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(ROOT):
            broken.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in _slugs(target):
            broken.append(f"{link}: no such heading")
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_are_real(page: Path) -> None:
    problems = {command: problem for command in _commands(page) if (problem := _problem_with(command))}
    assert problems == {}


def _is_there(dotted: str) -> bool:
    """Whether a module of ours, or a name in one, is there; nothing is imported, for some modules bring torch."""
    *path, last = dotted.split(".")
    folder = PACKAGES[path[0]] / Path(*path)
    module = folder.with_suffix(".py") if folder.with_suffix(".py").is_file() else folder / "__init__.py"
    if (folder / f"{last}.py").is_file() or (folder / last).is_dir():
        return True
    return module.is_file() and re.search(rf"\b{last}\b", module.read_text("utf-8")) is not None


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_modules_are_where_the_page_says(page: Path) -> None:
    text = page.read_text("utf-8")
    codes = INLINE_CODE.findall(FENCE.sub("", text))
    inline = [name for code in codes for name in DOTTED.findall(code)]
    inline += [f"{HOMES[name.partition('.')[0]]}.{name}" for code in codes for name in SHORT.findall(code)]
    imported = [
        f"{module}.{name.split()[0]}"
        for _, _, language, body in FENCE.findall(text)
        if language == "python"
        for module, names in re.findall(r"^from (skymemory[\w.]*) import (.+)$", body, re.MULTILINE)
        for name in names.split(", ")
    ]
    assert [name for name in inline + imported if not _is_there(name)] == []


def test_every_page_can_be_reached_from_the_readme_or_the_index() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or not page.is_file():
            continue
        reached.add(page)
        waiting += [
            (page.parent / link.partition("#")[0]).resolve()
            for link in _links(page)
            if link.partition("#")[0].endswith(".md") and ":" not in link
        ]
    assert [_name(page) for page in PAGES if page not in reached] == []


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("make demo", None),
        ("make denmo", "no make target denmo"),
        ("skymemory constellation up --delay off", None),
        ("skymemory constellation up --dealy off", "unrecognized arguments"),
        ("skymemory constellation", None),
        ("python benchmarks/nowhere.py", "no file"),
        ("ls -l", None),
    ],
)
def test_the_checker_itself(command: str, fault: str | None) -> None:
    problem = _problem_with(command)
    assert (problem is None) if fault is None else (problem is not None and fault in problem)
