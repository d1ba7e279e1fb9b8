"""Write docs/house.md: `python -m tools.measures` counts the source of product and laboratory.

The goals, and the counts before, at commit dfc5b2d9, are those of the rebuilding that the page is about.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from skymemory.cli.main import build_parser
from tools.files_opened import WAYS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "house.md"
PRODUCT, LABORATORY = ROOT / "src" / "skymemory", ROOT / "lab" / "src" / "skymemory_lab"
TESTS = ROOT / "tests"
MOST_LINES, MOST_PARAMETERS = 60, 6
ABOVE_GOAL = (
    "Above their goals stay modules and lines: failure and overload policies, engines' model families and the host",
    "tier came after the goals were set, the twins of the C helper serve where it is not built, and no module was",
    "joined to another for the count. Files opened count what the store's threads do at the same time.",
)
FRAGMENT = re.compile(r"(Whether|How|What|When|Where|Which|Who|Of|For|Beyond|Beside|Nor)\b")
ONES = re.compile(r"\bones?\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Counts:
    modules: int = 0
    lines: int = 0
    code_lines: int = 0
    words: int = 0
    fragments: int = 0
    ones: int = 0
    long_functions: int = 0
    many_parameters: int = 0
    folders: Counter[str] = field(default_factory=Counter)
    homes: dict[str, set[Path]] = field(default_factory=lambda: defaultdict(set))

    def add(self, path: Path, source: Path) -> None:
        text = path.read_text("utf-8")
        tree = ast.parse(text)
        self.modules += 1
        self.lines += text.count("\n")
        self.code_lines += len(_lines_of_code(text) - _lines_of_prose(tree))
        if path.name != "__init__.py":
            self.folders[path.parent.relative_to(source.parent).as_posix()] += 1
        for prose in _prose(tree):
            self.words += len(prose.split())
            self.fragments += bool(FRAGMENT.match(prose.strip()))
            self.ones += len(ONES.findall(prose))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self.homes[node.name].add(path)
            elif isinstance(node, Function):
                assert node.end_lineno is not None
                self.long_functions += node.end_lineno - node.lineno + 1 > MOST_LINES
                names = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
                self.many_parameters += len(names) - (names[:1] in (["self"], ["cls"])) > MOST_PARAMETERS

    @property
    def classes_alike(self) -> int:
        return sum(len(paths) > 1 for paths in self.homes.values())


def count(*sources: Path) -> Counts:
    counts = Counts()
    for source in sources:
        for path in sorted(source.rglob("*.py")):
            counts.add(path, source)
    return counts


def count_tests() -> tuple[int, int]:
    """Return the number of test functions and of ``assert`` statements in ``tests``."""
    nodes = [node for path in sorted(TESTS.rglob("*.py")) for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    tests = sum(isinstance(node, Function) and node.name.startswith("test_") for node in nodes)
    return tests, sum(isinstance(node, ast.Assert) for node in nodes)


def _prose(tree: ast.Module) -> Iterator[str]:
    """Yield docstrings, those of fields and constants too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def _lines_of_prose(tree: ast.Module) -> set[int]:
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _lines_of_code(text: str) -> set[int]:
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {line for token in tokens if token.type not in empty for line in range(token.start[0], token.end[0] + 1)}


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield verb and option."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                yield from _options(inner)
        elif action.option_strings and action.dest != "help":
            yield parser.prog, action.option_strings[-1]


def page() -> str:
    product, laboratory, both = count(PRODUCT), count(LABORATORY), count(PRODUCT, LABORATORY)
    options = [*_options(build_parser())]
    opened = {name: len(way().files) for name, way in WAYS.items()}
    tests, assertions = count_tests()
    folder, fullest = both.folders.most_common(1)[0]
    rows: list[tuple[str, str, str, str]] = [
        ("modules of the product", "351 in all", f"{product.modules}", "235"),
        ("lines of the product", "95,257 in all", f"{product.lines:,}", "62,000"),
        ("modules of the laboratory", "", f"{laboratory.modules}", "80"),
        ("lines of the laboratory", "", f"{laboratory.lines:,}", "22,000"),
        ("of both, lines of code", "", f"{both.code_lines:,}", ""),
        ("most modules in a folder", "", f"{fullest} (`{folder}`)", "16"),
        ("class names in more than one module", "64", f"{both.classes_alike}", "8"),
        ("words of docstrings", "126,000", f"{both.words:,}", "75,000"),
        ("of them fragments", "829", f"{both.fragments}", "80"),
        ("“one(s)” in 1,000 words", "12.2", f"{1000 * both.ones / both.words:.1f}", "2.5"),
        (f"functions of more than {MOST_LINES} lines", "", f"{both.long_functions}", ""),
        (f"functions with more than {MOST_PARAMETERS} parameters", "57", f"{both.many_parameters}", "20"),
        ("options of the command, of all verbs", "429", f"{len(options)}", "260"),
        ("files opened: a warm `get_cache`", "28", f"{opened['a warm get_cache from the constellation']}", "24"),
        ("files opened: a proxied request", "18", f"{opened['a proxied request']}", "14"),
        ("tests", "3,962", f"{tests:,}", ""),
        ("assertions in them", "11,091", f"{assertions:,}", ""),
    ]
    lines = [
        "<!-- Generated by: python -m tools.measures -->",
        "",
        "# How quickly code is found",
        "",
        "In `src` and `lab/src`; before is commit dfc5b2d9. `python -m tools.files_opened` names the files opened.",
        "",
        "| | before | now | goal, at most |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        *ABOVE_GOAL,
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(page())
