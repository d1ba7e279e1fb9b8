"""Numbers for the blocks of made-up prompts, such that equal numbers mean equal prefixes."""

from __future__ import annotations

from skymemory.sim.trace import BLOCK_TOKENS


class BlockNames:
    """Numbers for blocks, in the order in which they first appear, as traces give them.

    A block's name is fixed by the whole prompt up to its end: a prefix tree whose edges are what fills a block.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}

    def of(self, stem: tuple[tuple[str, int, int], ...], own: tuple[str, int, int]) -> tuple[int, ...]:
        """The ids of a prompt of these parts: (kind, which, tokens), of which the last is nobody else's."""
        ids = []
        begin, shared = 0, 0
        for end_of in range(1, len(stem) + 1):
            shared += stem[end_of - 1][2]
            while (begin + 1) * BLOCK_TOKENS <= shared:
                ids.append(self._number((stem[:end_of], begin)))
                begin += 1
        tokens = shared + own[2]
        while (begin + 1) * BLOCK_TOKENS <= tokens:
            ids.append(self._number((own[:2], begin)))
            begin += 1
        if begin * BLOCK_TOKENS < tokens:
            ids.append(self._number((own, begin)))  # not full: the next turn fills it, and gives it another name
        return tuple(ids)

    def _number(self, what: tuple[object, ...]) -> int:
        return self._numbers.setdefault(what, len(self._numbers))
