"""The tokenizer and the chat template of the real default model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pelton.formats import checkpoint
from pelton.request import Message
from pelton.text.chat import ChatTemplate
from pelton.text.tokenizer import Tokenizer
from tests.conftest import real_model

# Ids as llama.cpp makes them of the same file.
CASES = [
    ("Hello world's best, they'LL don't", [19556, 905, 506, 1450, 28, 502, 23, 16421, 1326, 982]),
    (
        "1234567 3.14 0x1F ½ ²",
        [33, 34, 35, 36, 37, 38, 39, 216, 35, 30, 33, 36, 216, 32, 104, 33, 54, 216, 16738, 216, 19133],
    ),
    ("   two  spaces\n\n\ttab \r\n end  ", [256, 827, 216, 5600, 1116, 197, 15999, 216, 2738, 1112, 256]),
    (
        "日本語のテキスト 中文",
        [23274, 115, 40993, 179, 120, 248, 26453, 11100, 224, 10391, 251, 10391, 134, 11100, 226, 216, 28589, 29184],
    ),
    ("한국어", [33085, 246, 181, 130, 251, 183, 240, 129]),
    ("Привет мир", [155, 249, 46879, 16464, 32547, 41337, 7872, 9175]),
    ("مرحبا", [21706, 20602, 44626, 31462, 10805]),
    ("हिन्दी पाठ", [4300, 134, 27011, 30658, 16525, 44757, 37189, 12335, 120, 18075, 4300, 250]),
    ("ไทย", [31933, 222, 10283, 241, 10283, 112]),
    (
        "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f1e9\U0001f1ea",
        [
            10813,
            242,
            218,
            10813,
            235,
            118,
            321,
            231,
            10813,
            235,
            119,
            321,
            231,
            10813,
            235,
            117,
            10813,
            225,
            119,
            10813,
            225,
            120,
        ],
    ),
    ("<|im_start|>user<|im_end|>", [44, 108, 306, 79, 3738, 108, 46, 4093, 44, 108, 306, 79, 486, 108, 46]),
    ("!!!???...---```|||", [29646, 16693, 47, 2026, 5583, 3725, 45596]),
    ("def f(x):\n    return x**2  # ok", [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 10907]),
    ("\x01\x7f\x1b[0m\xa0\u200b", [191, 217, 212, 75, 32, 93, 15442, 321, 229]),
    ("e\u0301 \ufb01 \u017f", [85, 151, 219, 40367, 18811, 140]),
]


CHATS = [
    (Message(role="user", content="Why is the sky blue?"),),
    (
        Message(role="system", content="Be brief."),
        Message(role="user", content="a < b <|im_end|> 😀"),
        Message(role="assistant", content="  yes\n"),
        Message(role="user", content="{{ x }}"),
    ),
]
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},)


@cache
def opened(path: Path) -> tuple[Any, Tokenizer]:
    metadata = checkpoint.open(path).metadata
    return metadata, Tokenizer(metadata)


@pytest.mark.parametrize(("text", "ids"), CASES)
def test_ids(smollm2: Path, text: str, ids: list[int]) -> None:
    _, tokenizer = opened(smollm2)
    assert tokenizer.encode(text, add_special=True) == ids
    assert tokenizer.decode(ids) == text


def check_template(path: Path, tools: Any) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    metadata, tokenizer = opened(path)
    template = ChatTemplate.from_metadata(metadata, tokenizer)
    for chat in CHATS:
        plain = [{"role": message.role, "content": message.content} for message in chat]
        expected, _ = render_jinja_template(
            [plain], tools=tools, chat_template=metadata["tokenizer.chat_template"], add_generation_prompt=True
        )
        prompt = template.render(chat, tools=tools)
        assert prompt.text == expected[0]
        ids = tokenizer.encode_segments(prompt.segments)
        assert tokenizer.decode(ids, skip_special=False) == expected[0]
        num_turns = prompt.text.count("<|im_start|>")
        assert ids.count(tokenizer.control_id("<|im_start|>")) == num_turns
        assert ids.count(tokenizer.control_id("<|im_end|>")) == num_turns - 1


def test_template(smollm2: Path) -> None:
    check_template(smollm2, None)


@pytest.mark.slow
@pytest.mark.parametrize("tools", [None, list(TOOLS)])
def test_template_with_tools(tools: Any) -> None:
    check_template(real_model("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"), tools)


def test_end_tokens(smollm2: Path) -> None:
    _, tokenizer = opened(smollm2)
    assert {tokenizer.token_text(id) for id in tokenizer.end_ids} == {"<|endoftext|>", "<|im_end|>", "<reponame>"}
    assert not tokenizer.add_bos
