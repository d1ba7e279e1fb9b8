"""A request of a trace or of the generator as text: equal ids give equal words, so equal prefixes are equal text.

A block becomes as many characters as are asked for, whatever its 512 tokens would have been: lengths are scaled down
for small models, and which prompts share which part of each other stays the same.
"""

from __future__ import annotations

import random

from skymemory.errors import InvalidInput
from skymemory.sim.trace import BLOCK_TOKENS, TraceRequest

_VOCABULARY = """
a about after again all also always and another any are as ask at away back be because before better between
book both bring but by call can carry change city clear close cold come cost could country day deep did
different do door down draw each early end enough even every eye far few field find first follow food for form
found four from full garden get give glass go good great green group grow half hand hard have he head hear
help her here high him his hold home hour house how idea if in into island it just keep kind know land large
last late learn leave left letter life light like line list little live long look made make man many map mean
might mile more morning most mountain move much must name near need never new next night no north not note now
number of off often old on once one only open or other our out over own page paper part people place plan
plant play point port put question quick rain read real rest right river road room round run said same say sea
second see seem sentence set seven ship short should show side simple since small so some song soon sound
south stand star start state step still stone story street such sun sure table take talk tell than that the
their them then there they thing think this thought three through time to together told too took town travel
tree true try turn two under until up us use very voice walk want warm was watch water way we week well went
were what when where which while white who why will wind window with without word work world would write year
you young your
"""
WORDS = _VOCABULARY.split()


def render_text(request: TraceRequest, characters_per_block: int) -> str:
    """The prompt of ``request``: so many characters for each whole block, fewer in proportion for a last one not full.

    Raises:
        InvalidInput: blocks of fewer than 8 characters; such would look alike by chance.
    """
    if characters_per_block < 8:
        raise InvalidInput(f"blocks of {characters_per_block} characters look alike by chance; ask for 8 or more")
    text = "".join(_block_text(one, characters_per_block) for one in request.ids)
    rest_tokens = request.input_tokens % BLOCK_TOKENS
    if rest_tokens:
        missing = characters_per_block - max(1, rest_tokens * characters_per_block // BLOCK_TOKENS)
        text = text[: len(text) - missing]
    return text


def _block_text(number: int, characters: int) -> str:
    """Words drawn by the block's number, as long as asked for, with a space at the end."""
    dice = random.Random(number)
    text = ""
    while len(text) < characters:
        sentence = " ".join(dice.choices(WORDS, k=dice.randint(5, 14)))
        text += f"{sentence.capitalize()}. "
    return text[: characters - 1] + " "
