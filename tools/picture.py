"""docs/figures/processes.svg, the processes and the bytes between them: `python -m tools.picture [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

FILE = Path(__file__).parents[1] / "docs" / "figures" / "processes.svg"
WIDTH, HEIGHT = 960, 610
OURS, OTHERS = "#dbe9f6", "#f3f3f3"
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1d2733}.name{font-weight:600}.small{font-size:12px;fill:#46535f}"
    ".wire{font-size:12px;fill:#8a3b12}rect{stroke:#7b8a99;rx:6}path{fill:none;stroke:#5b6a78;stroke-width:1.4}"
)


class Box(NamedTuple):
    """A process. The first line of ``text`` is its name; ``color`` says whose program it is."""

    left: int
    top: int
    width: int
    height: int
    color: str
    text: tuple[str, ...]


class Wire(NamedTuple):
    """Bytes between processes: a path through ``points``, with arrows at its end and, if ``both``, at its beginning."""

    points: tuple[tuple[int, int], ...]
    label: str
    label_at: tuple[int, int]
    both: bool = True


BOXES = (
    Box(360, 14, 240, 44, OTHERS, ("clients", "OpenAI's and Anthropic's APIs")),
    Box(70, 122, 170, 56, OTHERS, ("Envoy", "a gateway")),
    Box(70, 238, 170, 56, OURS, ("skymemory epp", "the endpoint picker")),
    Box(360, 122, 240, 56, OURS, ("skymemory route", "the HTTP router")),
    Box(300, 238, 590, 150, OURS, ("an engine's process", "")),
    Box(316, 272, 124, 50, OTHERS, ("vLLM", "+ connector")),
    Box(446, 272, 150, 50, OTHERS, ("SGLang, LMCache", "+ plug-ins")),
    Box(602, 272, 126, 50, OTHERS, ("transformers", "+ SkyCache")),
    Box(734, 272, 142, 50, OURS, ("skymemory serve", "the small engine")),
    Box(316, 332, 560, 44, OURS, ("cache: blocks, tiers, Cake", "memory → disk → Redis → sky, nearest first")),
    Box(30, 452, 170, 56, OTHERS, ("Redis", "or a server like it")),
    Box(220, 452, 190, 56, OURS, ("skymemory store", "the daemon, over any store")),
    Box(430, 452, 170, 56, OTHERS, ("files", "disk store; index of the sky")),
    Box(
        640, 440, 290, 80, OURS, ("skymemory satellite, one per host", "satellites of a +GRID torus,", "in Python or C")
    ),
    Box(640, 546, 290, 50, OURS, ("the other hosts", "started by skymemory constellation up")),
)
WIRES = (
    Wire(((480, 58), (480, 122)), "HTTP/1.1, TLS", (488, 94)),
    Wire(((360, 36), (155, 36), (155, 122)), "HTTP", (163, 84)),
    Wire(((155, 178), (155, 238)), "gRPC (ext_proc)", (163, 212)),
    Wire(((480, 178), (480, 238)), "HTTP: prompts, answers", (488, 204)),
    Wire(((240, 150), (270, 150), (270, 255), (300, 255)), "HTTP", (276, 206)),
    Wire(((780, 238), (780, 150), (600, 150)), "metrics (HTTP), KV events (ZMQ)", (642, 142), both=False),
    Wire(((300, 278), (240, 278)), "", (0, 0), both=False),
    Wire(((340, 376), (340, 418), (115, 418), (115, 452)), "RESP", (121, 442)),
    Wire(((360, 376), (360, 452)), "RESP", (366, 442)),
    Wire(((515, 376), (515, 452)), "files", (521, 442)),
    Wire(((785, 376), (785, 440)), "CCSDS Space Packets over UDP", (592, 414)),
    Wire(((785, 520), (785, 546)), "Space Packets: links, moves", (610, 538)),
)


def drawing() -> str:
    """Return the SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>SkyMemory's processes and the bytes between them</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" style="fill:#5b6a78"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff" style="stroke:none"/>',
    ]
    for box in BOXES:
        parts.append(
            f'<rect x="{box.left}" y="{box.top}" width="{box.width}" height="{box.height}" fill="{box.color}"/>'
        )
        for number, line in enumerate(box.text):
            kind = "small" if number else "name"
            x, y = box.left + box.width // 2, box.top + 20 + 18 * number
            parts.append(f'<text class="{kind}" x="{x}" y="{y}" text-anchor="middle">{escape(line)}</text>')
    for wire in WIRES:
        path = "M" + "L".join(f"{x} {y}" for x, y in wire.points)
        start = ' marker-start="url(#a)"' if wire.both else ""
        parts.append(f'<path d="{path}"{start} marker-end="url(#a)"/>')
        x, y = wire.label_at
        parts.append(f'<text class="wire" x="{x}" y="{y}">{escape(wire.label)}</text>')
    return "\n".join((*parts, "</svg>", ""))


def main() -> None:
    if "--check" not in sys.argv:
        FILE.write_text(drawing(), "utf-8")
    elif FILE.read_text("utf-8") != drawing():
        raise SystemExit(f"{FILE.name} is not what `python -m tools.picture` draws: run it")


if __name__ == "__main__":
    main()
