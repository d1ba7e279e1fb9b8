"""Naive twins of the policies of eviction: lists and sums, nothing kept in order, nothing forgotten early."""

from __future__ import annotations


def depth_of(key: bytes) -> int:
    """Tests have it in the first byte."""
    return key[0]


class Naive:
    def order(self) -> list[bytes]:
        """All keys, the next victim first."""
        raise NotImplementedError

    def touched(self, key: bytes) -> None:
        raise NotImplementedError

    def arrived(self, key: bytes) -> None:
        self.touched(key)

    def victim(self, allowed: set[bytes]) -> bytes | None:
        return next((key for key in self.order() if key in allowed), None)


class NaiveLru(Naive):
    """A list, the newest last."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []

    def touched(self, key: bytes) -> None:
        self.removed(key)
        self.keys.append(key)

    used = touched

    def removed(self, key: bytes, evicted: bool = False) -> None:
        self.keys = [other for other in self.keys if other != key]

    def order(self) -> list[bytes]:
        return self.keys


class NaiveLfuda(Naive):
    """Every key's uses, the age it was last ranked at, and a place in time; sorted whenever asked."""

    def __init__(self) -> None:
        self.known: dict[bytes, tuple[int, int, int]] = {}
        self.age = self.time = 0

    def touched(self, key: bytes, more: int = 0) -> None:
        uses = self.known[key][0] + more if key in self.known else 1
        self.time += 1
        self.known[key] = (uses, self.age, self.time)

    def used(self, key: bytes) -> None:
        self.touched(key, 1)

    def removed(self, key: bytes, evicted: bool = False) -> None:
        if key in self.known:
            uses, age, _ = self.known.pop(key)
            self.age = max(self.age, uses + age) if evicted else self.age

    def order(self) -> list[bytes]:
        return sorted(self.known, key=lambda key: (self.known[key][0] + self.known[key][1], self.known[key][2]))


class NaiveLrfu(Naive):
    """Every use of every key there ever was, in half-lives; worths summed again at each call."""

    def __init__(self) -> None:
        self.uses: dict[bytes, list[float]] = {}
        self.used_at: dict[bytes, int] = {}
        self.here: dict[bytes, int] = {}
        self.events = self.time = 0
        self.half_lives, self.mean_return = 0.0, 1000.0
        self.recent: list[bytes] = []

    def came(self, key: bytes) -> None:
        self.time += 1
        self.here[key] = self.time
        self.recent = [one for one in self.recent if one != key] + [key]
        safe = max(1, len(self.here) // 4)
        self.recent = self.recent[-safe:]

    def touched(self, key: bytes) -> None:
        if key not in self.here:
            self.used(key)
        self.uses[key][-1] = self.half_lives
        self.came(key)

    def arrived(self, key: bytes) -> None:
        if key in self.here:
            self.touched(key)
        else:
            self.uses[key], self.used_at[key] = [self.half_lives], self.events
            self.came(key)

    def used(self, key: bytes) -> None:
        self.events += 1
        self.half_lives += 1 / (2 * self.mean_return)
        if key in self.uses:
            self.mean_return += (self.events - self.used_at[key] - self.mean_return) / 1000
        self.uses.setdefault(key, []).append(self.half_lives)
        self.used_at[key] = self.events
        self.came(key)

    def removed(self, key: bytes, evicted: bool = False) -> None:
        if self.here.pop(key, None) is not None and key in self.recent:
            self.recent.remove(key)

    def order(self) -> list[bytes]:
        def rank(key: bytes) -> tuple[float, int]:
            return round(sum(2**at for at in self.uses[key]), 9), self.here[key]

        return sorted(self.here.keys() - set(self.recent), key=rank) + self.recent


class NaiveLfu(NaiveLfuda):
    def removed(self, key: bytes, evicted: bool = False) -> None:
        super().removed(key)


class NaiveLength(NaiveLru):
    def order(self) -> list[bytes]:
        return sorted(self.keys, key=depth_of, reverse=True)


class NaiveArc(Naive):
    """Four lists, the newest last."""

    def __init__(self) -> None:
        self.once: list[bytes] = []
        self.again: list[bytes] = []
        self.once_gone: list[bytes] = []
        self.again_gone: list[bytes] = []
        self.target, self.capacity = 0.0, 0

    def touched(self, key: bytes) -> None:
        here = next((one for one in (self.once, self.again) if key in one), None)
        if here is not None:
            here.append(here.pop(here.index(key)))
        else:
            once, again = len(self.once_gone), len(self.again_gone)
            if key in self.once_gone:
                self.target = min(self.capacity, self.target + max(1, again / once))
                self.once_gone.remove(key)
                self.again.append(key)
            elif key in self.again_gone:
                self.target = max(0, self.target - max(1, once / again))
                self.again_gone.remove(key)
                self.again.append(key)
            else:
                self.once.append(key)
            self.capacity = max(self.capacity, len(self.once + self.again))

    def used(self, key: bytes) -> None:
        if key in self.once:
            self.once.remove(key)
            self.again.append(key)
        else:
            self.touched(key)

    def removed(self, key: bytes, evicted: bool = False) -> None:
        if key not in self.once + self.again:
            return
        for here, there in ((self.once, self.once_gone), (self.again, self.again_gone)):
            if key in here:
                here.remove(key)
                if evicted:
                    there.append(key)
        while self.once_gone and len(self.once + self.once_gone) > self.capacity:
            del self.once_gone[0]
        while self.again_gone and len(self.once + self.again + self.once_gone + self.again_gone) > 2 * self.capacity:
            del self.again_gone[0]

    def victim(self, allowed: set[bytes]) -> bytes | None:
        once, again = [key for key in self.once if key in allowed], [key for key in self.again if key in allowed]
        candidates = once + again if len(self.once) > self.target else again + once
        return candidates[0] if candidates else None

    def order(self) -> list[bytes]:
        once, again, going = list(self.once), list(self.again), []
        while once or again:
            going.append((once if not again or (once and len(once) > self.target) else again).pop(0))
        return going


TWINS: dict[str, type[Naive]] = {
    "lru": NaiveLru,
    "lfu": NaiveLfu,
    "lfuda": NaiveLfuda,
    "length": NaiveLength,
    "arc": NaiveArc,
    "lrfu": NaiveLrfu,
}
