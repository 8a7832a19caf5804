"""Prompts of real words, each one token in the usual vocabularies, so that lengths can be chosen and no cache can help.

Token ids would be simpler, but not every server's /v1/completions takes them, and no chat endpoint does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_TEXT = """
about after again air all also always and animal another answer any area around ask back bank base because been
before best better between big bird black blue board boat body book both bottom box boy brown build burn business
but buy call came can car care case cat cause center change check child city class clear close cold color come
common cost could country course cover cross cut dark day deep did different do dog done door down draw dream drive
dry during each early earth easy eat end even every example eye face fact fall family far farm fast father feel few
field figure final find fine fire first fish five floor fly follow food foot for force form found four free friend
from front full game general girl give glass go gold good got government great green ground group grow half hand
hard has have head heart heat heavy help her here high hill him his hold home horse hot hour house how human idea if
in inside it just keep key kind king know land language large last late later law learn leave left less letter level
life light like line list little live local long look lost love low machine made main make man many map mark market
matter may mean measure men might mile mind minute money month moon more most mother move much music must name
nation near need never new next night no north note nothing now number object of off office often oil old on once
one only open order other our out over own page paper part party pass past pattern people person picture piece place
plan plane plant play point position possible power present press problem product public pull put question quick
rain reach read ready real reason record red rest right river road rock room round rule run said same say school
science sea second see sense sentence set seven shape she ship short should show side sign simple since sing sit six
size sky sleep slow small snow so some song soon sound south space special stand star start state stay step still
stone stop store story street strong study such summer sun surface system table take talk team tell ten test than
that the their them then there these they thing think this those though thought three through time to today too top
town train travel tree true try turn two type under unit until up us use very voice wait walk wall want war warm was
watch water way we week weight well went were west what wheel when where which while white who whole why will wind
window winter with woman wood word work world would write wrong year yes yet you young your
"""
WORDS = tuple(_TEXT.split())


def text(seed: str, num_words: int) -> str:
    """Random words, the same for the same seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


@dataclass(frozen=True)
class Counting:
    """How a server counts words as tokens, from its own usage: `per_prompt` for every prompt (its first word and the
    template of a chat included, less that word), and `per_word`."""

    per_prompt: float
    per_word: float

    @classmethod
    def fitted(cls, few: tuple[int, int], many: tuple[int, int]) -> Counting:
        """From two prompts' (words, tokens)."""
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        return cls(few[1] - few[0] * per_word, per_word)

    def num_words(self, num_tokens: int) -> int:
        """Words whose prompt comes nearest to so many tokens: one at least."""
        return max(1, round((num_tokens - self.per_prompt) / self.per_word))

    def num_words_inside(self, num_tokens: int) -> int:
        """Words of so many tokens as a part of a prompt."""
        return max(1, round(num_tokens / self.per_word))
