"""The pages docs/figures.md and docs/reproduce/claims.md, and the pictures: ``python -m tools.gallery [NAME…]``.

With names of ``skymemory figures`` only those pictures are drawn; both pages are always written.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

from skymemory_lab.reproduce.claims import all_claims, as_markdown
from skymemory_lab.reproduce.gallery import chosen, gallery_page
from skymemory_lab.view.drawing import save

DOCS = Path(__file__).parents[1] / "docs"
THUMBNAIL_DPI = 110


def main(names: list[str]) -> None:
    (DOCS / "figures.md").write_text(gallery_page(), "utf-8")
    (DOCS / "reproduce" / "claims.md").write_text(as_markdown(all_claims()), "utf-8")
    for exhibit in chosen(names, everything=not names).values():
        figure = exhibit.draw()
        for ending in ("png", "svg"):
            path = save(figure, DOCS / "figures" / f"{exhibit.stem}.{ending}", THUMBNAIL_DPI)
            if ending == "png":  # a palette: a third of the bytes
                with Image.open(path) as picture:
                    rare = Image.Quantize.MAXCOVERAGE  # keeps colours of a single dot
                    picture.convert("RGB").quantize(256, rare, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
