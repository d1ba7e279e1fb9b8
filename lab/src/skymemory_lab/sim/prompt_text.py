"""Text of prompts: equal blocks have equal text."""

from __future__ import annotations

import random

from skymemory.errors import InvalidInput
from skymemory_lab.sim.trace import BLOCK_TOKENS, TraceRequest

_VOCABULARY = (
    "a about after again all also always and another any are as ask at away back be because before better between "
    "book both bring but by call can carry change city clear close cold come cost could country day deep did "
    "different do door down draw each early end enough even every eye far few field find first follow food for form "
    "found four from full garden get give glass go good great green group grow half hand hard have he head hear "
    "help her here high him his hold home hour house how idea if in into island it just keep kind know land large "
    "last late learn leave left letter life light like line list little live long look made make man many map mean "
    "might mile more morning most mountain move much must name near need never new next night no north not note now "
    "number of off often old on once one only open or other our out over own page paper part people place plan "
    "plant play point port put question quick rain read real rest right river road room round run said same say sea "
    "second see seem sentence set seven ship short should show side simple since small so some song soon sound "
    "south stand star start state step still stone story street such sun sure table take talk "
    "tell than that the "  # words: keep
    "their them then there they thing think this thought three through time to together "
    "told too took town travel "  # words: keep
    "tree true try turn two under until up us use very voice walk want warm was watch water way we week well went "
    "were what when where which while white who why will wind window with without word work world would write year "
    "you young your "
)
WORDS = _VOCABULARY.split()


def render_text(request: TraceRequest, characters_per_block: int) -> str:
    """Return a prompt's text, scaled down to ``characters_per_block``. Equal ids give equal text.

    Raises:
        InvalidInput: fewer than 8 characters per block, which could be equal by chance.
    """
    if characters_per_block < 8:
        raise InvalidInput(f"{characters_per_block} characters per block; expected 8 or more")
    text = "".join(_block_text(block_id, characters_per_block) for block_id in request.ids)
    rest_tokens = request.input_tokens % BLOCK_TOKENS
    if rest_tokens:
        missing = characters_per_block - max(1, rest_tokens * characters_per_block // BLOCK_TOKENS)
        text = text[: len(text) - missing]
    return text


def _block_text(number: int, characters: int) -> str:
    # Seeded by the id alone: equal blocks have equal text in every process.
    dice = random.Random(number)
    text = ""
    while len(text) < characters:
        sentence = " ".join(dice.choices(WORDS, k=dice.randint(5, 14)))
        text += f"{sentence.capitalize()}. "
    return text[: characters - 1] + " "
