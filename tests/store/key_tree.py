"""Keys that are prefixes of one another, for tests of what may be evicted before what."""

from __future__ import annotations

TREE = {  # each key's neighbour before it: two roots, forks, and a chain of four
    0: None,
    1: 0,
    2: 1,
    3: 2,
    4: 1,
    5: 0,
    6: None,
    7: 6,
    8: 7,
    9: 6,
}


def key(number: int) -> bytes:
    """Its depth in the first byte, which is what ``naive_policies.depth_of`` looks at."""
    return bytes([len(chain(number)) - 1, number]) * 16


def chain(number: int | None) -> list[int]:
    return [] if number is None else [*chain(TREE[number]), number]


ANCESTORS = {key(number): [key(one) for one in chain(number)[:-1]] for number in TREE}
CHAINS = {number: [key(one) for one in chain(number)] for number in TREE}
