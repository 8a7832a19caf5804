"""What grammars cost: the CPU time of masks, a token at a time, and of what is done once.

python benchmarks/masks.py MODEL.gguf ...

Each form follows a text that fulfils it; masks are made as the engine makes them, one row per token. Times are of the
thread alone, so that other programs do not show. "again" is a form that is known.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from pelton import structured
from pelton.engine.constraints import Constraint, Grammars
from pelton.engine.protocol import Vocabulary
from pelton.errors import PeltonError
from pelton.formats import checkpoint
from pelton.request import Grammar, Thinking, Tool
from pelton.text.tokenizer import Tokenizer
from pelton.text.tools.detect import DIALECTS
from pelton.text.tools.grammar import calls_grammar

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = '{"name": "Ada Lovelace", "age": 36, "tags": ["mathematics", "poetry and numbers", "engines of all kinds"]}'
GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TALK = "They want to know the weather, so I look it up before I answer.\n"
ROUNDS = 20


def forms(tokenizer: Tokenizer) -> list[tuple[str, Grammar | None, Thinking | None, str]]:
    tools = [Tool(name="get_weather", parameters=PLACE, strict=True), Tool(name="now", strict=True)]

    def calls(is_required: bool) -> Grammar:
        return calls_grammar(
            DIALECTS["hermes"],
            tools,
            tokenizer.control_id,
            is_required=is_required,
            is_parallel=True,
            answer=None,
        )

    thoughts = Thinking(open="<think>", close="</think>", is_open=True, budget=1000)
    return [
        ("JSON object", structured.json_object("p"), None, JSON),
        ("schema", structured.json_schema(PERSON, "p"), None, JSON),
        ("regex", structured.regex("[a-z]+ [a-z]+ [a-z]+", "p"), None, "one two three"),
        ("GBNF of JSON", structured.grammar(GBNF, "p"), None, JSON),
        ("required call", calls(True), None, CALL),
        ("text and strict calls", calls(False), None, TALK + CALL),
        ("budget of thoughts", None, thoughts, TALK),
    ]


def compiled(grammars: Grammars, grammar: Grammar | None, thinking: Thinking | None) -> tuple[Constraint, float]:
    """A constraint, and the milliseconds that it took (waiting for other programs included)."""
    start = time.perf_counter()
    grammars.compile("r", grammar, thinking)
    while not grammars.is_ready:
        time.sleep(1e-4)
    ((_, made),) = grammars.take()
    if isinstance(made, PeltonError):
        raise made
    return made, (time.perf_counter() - start) * 1e3


def mask_times(constraint: Constraint, ids: list[int], vocab_size: int) -> np.ndarray:
    """Microseconds of each mask."""
    masks = np.zeros((1, -(-vocab_size // 32)), np.uint32)
    times: list[float] = []
    for _ in range(ROUNDS):
        fork = constraint.fork()
        for id in ids:
            start = time.thread_time()
            fork.fill(masks, [])
            times.append(time.thread_time() - start)
            assert masks[0, id // 32] >> (id % 32) & 1
            fork.accept(id)
    return np.array(times) * 1e6


def main(path: Path) -> None:
    tokenizer = Tokenizer(checkpoint.open(path).metadata)
    ids = range(tokenizer.vocab_size)
    grammars = Grammars(tokenizer.vocab_size)
    grammars.learn(
        Vocabulary(
            [tokenizer.token_bytes(id) for id in ids],
            [id for id in ids if tokenizer.is_control(id)],
            list(tokenizer.end_ids),
        )
    )
    compiled(grammars, structured.regex("a", "p"), Thinking(open="<", close=">", is_open=True))  # the vocabulary
    sys.stdout.write(f"{path.name}, {tokenizer.vocab_size} tokens\n")
    sys.stdout.write(f"{'':24}{'compile ms':>12}{'again ms':>10}{'mask us p50':>13}{'p99':>8}{'max':>8}\n")
    for name, grammar, thinking, text in forms(tokenizer):
        constraint, first = compiled(grammars, grammar, thinking)
        _, again = compiled(grammars, grammar, thinking)
        times = mask_times(constraint, tokenizer.encode(text, add_special=False), tokenizer.vocab_size)
        p50, p99 = np.percentile(times, (50, 99))
        sys.stdout.write(f"{name:24}{first:12.1f}{again:10.1f}{p50:13.0f}{p99:8.0f}{times.max():8.0f}\n")
    grammars.close()


if __name__ == "__main__":
    for each in sys.argv[1:]:
        main(Path(each))
