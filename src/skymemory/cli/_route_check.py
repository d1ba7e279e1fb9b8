"""``skymemory route --check``: what is behind the router, before it runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skymemory.router.check import Found
    from skymemory.router.settings import Settings


def run_check(settings: Settings, as_json: bool) -> int:
    """Prints what was found. The exit code: 0, or 1 where a server has a problem."""
    import asyncio

    from skymemory.router.check import check

    found = asyncio.run(check(settings))
    problems = sum(bool(each.problems) for each in found)
    if as_json:
        print(json.dumps({"servers": [each.as_json() for each in found], "with_problems": problems}, indent=2))
        return int(problems > 0)
    for each in found:
        print("\n".join(_lines(each)))
    print(f"{len(found) - problems} of {len(found)} servers are as they should be")
    return int(problems > 0)


def _lines(found: Found) -> list[str]:
    lines = [f"{found.name}  {found.url}" if found.name not in found.url else found.url, f"  health   {found.health}"]
    if found.metrics:
        lines.append(f"  metrics  {found.metrics}")
    if found.models:
        lines.append(f"  models   {', '.join(found.models[:8])}{' …' if len(found.models) > 8 else ''}")
    if found.events:
        lines.append(f"  events   {found.events}")
    lines += [f"  problem: {each}" for each in found.problems]
    lines += [f"  note: {each}" for each in found.notes]
    return lines
