"""Two prompts share a chain only where model, adapter and salt are the same."""

from __future__ import annotations

from itertools import product

from skymemory.conductor.request import seed


def test_words_do_not_run_into_each_other() -> None:
    words = ("", "a", "b", "ab", "a\0", "ä", "\ud800")
    triples = list(product(words, repeat=3))
    assert len({seed(*triple) for triple in triples}) == len(triples)


def test_a_seed_is_the_same_everywhere() -> None:
    """Replicas and snapshots compare hashes: a seed that changes with the release makes them strangers."""
    assert seed("", "", "") == 0x4DF691D7DCB4E32B
    assert seed("meta-llama/Llama-3.1-8B", "sql", "tenant-7") == 0x624B252B3E3EB731
