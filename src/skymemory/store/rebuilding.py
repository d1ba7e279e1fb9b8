"""What an incomplete index does not know is asked of the satellites, and adopted: the index is rebuilt as it is used.

Each key costs a probe at most once in a while. What is found is in the index from then on, for all processes that
share it; what is not found is remembered as absent by this process for ``ABSENT_S``, so that a prompt nobody has stored
is not looked for again at each of its tokens. Where a satellite of the box was silent, that is only for ``SILENT_S``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from skymemory.protocol.transfer import ValueInfo
from skymemory.store.probing import Prober, prefix_by
from skymemory.store.shared_index import SharedIndex

ABSENT_S = 30.0
SILENT_S = 1.0
_MOST_REMEMBERED = 1 << 17
_UNKNOWN = (0.0, False)

Adopt = Callable[[Iterable[ValueInfo], float], None]
"""Enters values in the index, at this time."""


class Rebuilding:
    """Stands behind one index. ``adopt`` enters what was found there."""

    def __init__(self, index: SharedIndex, prober: Prober, adopt: Adopt) -> None:
        self._index = index
        self._prober = prober
        self._adopt = adopt
        self._absent: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()
        """Until when a key is taken to be nowhere, and whether that is certain."""
        self.keys_probed = 0
        self.values_adopted = 0

    def search(self, keys: Sequence[bytes]) -> tuple[dict[bytes, ValueInfo], bool]:
        """Of keys that the index does not know, what the satellites know (nothing where the index is complete); and
        whether the others are absent for certain.
        """
        if self._index.complete:
            return {}, True
        wanted = [key for key in dict.fromkeys(keys) if not self.absent(key)]
        found = self._probe(wanted) if wanted else {}
        return found, all(self._absent.get(key, _UNKNOWN)[1] for key in keys if key not in found)

    def prefix(self, keys: Sequence[bytes], known: int) -> int:
        """Leading keys that are all there; the first ``known`` are in the index. The index goes on from hole to hole,
        the satellites are asked for what is in between.
        """
        if known == len(keys) or self.absent(keys[known]):
            return known
        rest = list(keys[known:])
        end = next((at for at, key in enumerate(rest) if self.absent(key)), len(rest))
        rest = rest[:end]

        def find(asked: list[bytes]) -> set[bytes]:
            here = {key for key, info in zip(asked, self._index.infos(asked), strict=True) if info is not None}
            missing = [key for key in asked if key not in here]
            return here | self._probe(missing).keys() if missing else here

        return known + prefix_by(find, rest)

    def absent(self, key: bytes) -> bool:
        """Whether a key that the index does not know is taken to be nowhere, without asking."""
        return self._index.complete or self._absent.get(key, _UNKNOWN)[0] > self._prober.now_s()

    def gone(self, keys: Iterable[bytes]) -> None:
        """These have been evicted: what is left of them is not to be found again at once."""
        if not self._index.complete:
            self._remember(keys, True)

    def there(self, keys: Iterable[bytes]) -> None:
        """These have been stored."""
        for key in keys:
            self._absent.pop(key, None)

    def _probe(self, keys: list[bytes]) -> dict[bytes, ValueInfo]:
        found, certain = self._prober.search(keys)
        self.keys_probed += len(keys)
        self._remember((key for key in keys if key not in found), certain)
        if found:
            self.values_adopted += len(found)
            self._adopt([found[key] for key in keys if key in found], self._prober.now_s())
            self._index.note_probed(len(keys), len(found))
        return found

    def _remember(self, keys: Iterable[bytes], certain: bool) -> None:
        until_s = self._prober.now_s() + (ABSENT_S if certain else SILENT_S)
        for key in keys:
            self._absent[key] = until_s, certain
            self._absent.move_to_end(key)
        while len(self._absent) > _MOST_REMEMBERED:
            self._absent.popitem(last=False)
