"""Gallery of all figures and tables of the documents."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.errors import InvalidInput
from skymemory_lab.reproduce.cake_figures import CAKE
from skymemory_lab.reproduce.claims import DOCS
from skymemory_lab.reproduce.mooncake.figures import kept_exhibits
from skymemory_lab.view.drawing import FORMATS, Exhibit, Numbers, draw_table
from skymemory_lab.view.figures import DISCLOSURE, FIGURES, TABLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Table 3 of the paper: seconds for 30 tokens without and with the cache.
_PUBLISHED_S = {"quanto8": ("Optimum Quanto", 6.2, 4.9), "hqq8": ("HQQ", 10.2, 7.8)}
TABLE_3_COMMAND = "skymemory demo"


def _table_3() -> Numbers:
    # Return the paper's table 3 beside the kept run of our demo.
    path = None if DOCS is None else DOCS / "benchmarks" / "table_3.json"
    if path is None or not path.is_file():
        raise InvalidInput(
            f"table 3 is drawn from a run that a checkout keeps; `{TABLE_3_COMMAND}` makes it (3 minutes)"
        )
    runs: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["rows"]
    rows: list[tuple[object, ...]] = []
    for run in runs:
        name, without_s, with_s = _PUBLISHED_S.get(run["codec"], ("none, 16 bit", None, None))
        saved = None if without_s is None or with_s is None else round(100 * (1 - with_s / without_s), 1)
        plain_s, sky_s = run["plain_total_s"], run["sky_total_s"]
        ours = (round(plain_s, 2), round(sky_s, 2), round(100 * (1 - sky_s / plain_s), 1))
        first = (round(run["plain_ttft_s"], 2), round(run["sky_ttft_s"], 2))
        rows.append((name, without_s, with_s, saved, *ours, *first))
    header = (
        "quantization",
        "paper_without_s",
        "paper_with_s",
        "paper_saved_percent",
        "ours_without_s",
        "ours_with_s",
        "ours_saved_percent",
        "ours_first_token_without_s",
        "ours_first_token_with_s",
    )
    return Numbers(header, rows)


def _draw_table_3() -> Figure:
    heads = (
        "Quantization",
        "paper:\nno KVC, s",
        "\nKVC, s",
        "\nsaved, %",
        "ours:\nno KVC, s",
        "\nKVC, s",
        "\nsaved, %",
        "first token:\nno KVC, s",
        "\nKVC, s",
    )
    return draw_table(
        "Table 3. 30 tokens without and with the cache on the testbed",
        _table_3(),
        f"Paper: TinyLlama-1.1B on a Jetson. Ours: {TABLE_3_COMMAND}, TinyLlama's shape on two cores of a CPU, 524"
        " tokens, real link delays.",
        heads=heads,
    )


@dataclass(frozen=True, slots=True)
class Document:
    title: str
    remark: str
    exhibits: dict[str, Exhibit]


def documents() -> list[Document]:
    table_3 = Exhibit("table-3", "Table 3. Testbed", _draw_table_3, _table_3, table=True)
    mooncake = kept_exhibits(Path("docs/figures") if DOCS is None else DOCS / "figures")
    return [
        Document(
            "SkyMemory paper",
            "Computed by our code; 9 and 10 are recorded from a run; table 3 is the kept run of `skymemory demo`.",
            {**{str(number): exhibit for number, exhibit in FIGURES.items()}, **TABLES, "table-3": table_3},
        ),
        Document(
            "SkyMemory disclosure",
            "Its figures 1 to 9 are 1 to 11 of the paper.",
            {f"disclosure-{name}": exhibit for name, exhibit in DISCLOSURE.items()},
        ),
        Document(
            "Cake",
            "By our loader in virtual time, on GPUs fitted to the paper; the overhead of figure 7 is measured.",
            {f"cake-{number}": exhibit for number, exhibit in CAKE.items()},
        ),
        Document(
            "Mooncake",
            "Drawn from the CSV of the full run on the conversation trace, beside the pictures.",
            {f"mooncake-{name}": exhibit for name, exhibit in mooncake.items()},
        ),
    ]


PAPER = "SkyMemory paper"


def chosen(names: Iterable[str], everything: bool) -> dict[str, Exhibit]:
    """Return the exhibits of these names; without names the SkyMemory paper's, or all."""
    shelves = documents()
    known = {name: exhibit for shelf in shelves for name, exhibit in shelf.exhibits.items()}
    wanted = list(dict.fromkeys(name.lower() for name in names))
    for name in wanted:
        if name not in known:
            listed = "; ".join(f"{shelf.title}: {', '.join(shelf.exhibits)}" for shelf in shelves)
            raise InvalidInput(f"figure {name} is not available; expected of {listed}")
    if wanted:
        return {name: known[name] for name in wanted}
    return known if everything else next(shelf.exhibits for shelf in shelves if shelf.title == PAPER)


def formats_of(text: str) -> tuple[str, ...]:
    """Parse a text such as ``png,svg``."""
    wanted = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    for name in wanted:
        if name not in FORMATS:
            raise InvalidInput(f"--format {name or text!r}: expected some of {', '.join(FORMATS)}, with commas between")
    return wanted


def gallery_page() -> str:
    """Return the page docs/figures.md."""
    lines = [
        "<!-- Generated: python -m tools.gallery -->",
        "",
        "# Every figure and table",
        "",
        "`skymemory figures all` draws them at print size, or those whose names are given, each with the CSV",
        "of its numbers. A picture leads to its SVG. What the claims amount to:",
        "[paper, model, physics, measured](reproduce/claims.md).",
    ]
    for shelf in documents():
        lines += ["", f"## {shelf.title}", "", shelf.remark, ""]
        for name, exhibit in shelf.exhibits.items():
            alt = exhibit.title.rstrip(".")
            lines += [
                f"**{alt}** (`{name}`)",
                "",
                f"[![{alt}](figures/{exhibit.stem}.png)](figures/{exhibit.stem}.svg)",
                "",
            ]
        lines.pop()
    return "\n".join(lines) + "\n"
