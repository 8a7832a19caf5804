"""What a request gets from the toy engine when nothing else runs, and requests of all kinds to hold against it."""

from __future__ import annotations

import itertools

import msgspec

from tests.unit.toy_executor import VOCAB, make_engine, prompt, request, run

GROUPS = [(None,), (None, 48), (40,), (None, 40, 100)]

MIX = [
    request("greedy", prompt(70)),
    request("seeded", prompt(70), temperature=1.0, seed=7, max_tokens=20),
    request("choices", prompt(45, 3), n=3, temperature=0.8, seed=3, max_tokens=12),
    request("penalties", prompt(33), repetition_penalty=1.2, presence_penalty=0.5, max_tokens=40),
    request("frequency", prompt(64), frequency_penalty=0.5, max_tokens=40),
    request("short", prompt(1, 5), max_tokens=70),
    request("min", prompt(10), end_ids=tuple(range(0, VOCAB, 2)), min_tokens=6, max_tokens=30),
    request("logprobs", prompt(150), logprobs=3, max_tokens=10),
    request("scored", prompt(100), prompt_logprobs=2, n=2, max_tokens=5),
    request("score alone", prompt(70), prompt_logprobs=0, max_tokens=0),
    request("mirostat", prompt(30, 8), mirostat_mode=2, temperature=1.0, n=2, max_tokens=40),
    request("dry", prompt(30, 8), dry_multiplier=1e9, dry_allowed_length=1, max_tokens=40),
    request("allowed", prompt(20, 4), allowed_token_ids=(1, 3, 44), max_tokens=20),
    msgspec.structs.replace(
        request("bad words", prompt(20, 4), allowed_token_ids=(1, 3, 44, 45), bad_words=("",), max_tokens=40),
        bad_words_ids=((1, 3), (44,), (3, 3, 45), (45, 45)),
    ),
]

_ALONE = {}


def alone(one, windows=(None,)):
    key = (msgspec.json.encode(one), windows)
    if key not in _ALONE:
        settings = {"prefix_cache": False, "max_batch_tokens": 1000, "speculation": "off"}
        engine, _ = make_engine(windows=windows, num_blocks=40, **settings)
        _ALONE[key] = run(engine, [one]).answers(one.id)
    return _ALONE[key]


def even(seconds=1.0):
    """A clock by which all steps take as long, so that drafts pay."""
    return itertools.count(step=seconds).__next__
