"""Prompts for what is between two texts."""

from __future__ import annotations

import pytest

from pelton.errors import FormatError, InvalidRequest
from pelton.text.infill import File, Infill
from pelton.text.tokenizer import Tokenizer


class Names:
    """A vocabulary whose control tokens are these."""

    vocab_size = 200
    special_id = Tokenizer.special_id

    def __init__(self, *names: str) -> None:
        self._names = list(names)

    def control_id(self, text: str) -> int | None:
        return self._names.index(text) + 100 if text in self._names else None


QWEN = Names("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")


def test_prefix_suffix_middle():
    assert Infill({}, QWEN, "suffix").segments("a", "b", "c") == [100, "a", 101, "b", 102, "c"]


def test_files_stand_before():
    segments = Infill({}, QWEN, "suffix").segments("a", "b", files=[File("x.py", "X"), File("y.py", "Y")])
    head = [103, "myproject\n", 104, "x.py\n", "X\n", 104, "y.py\n", "Y\n", 104, "filename\n"]
    assert segments == [*head, 100, "a", 101, "b", 102, ""]
    plain = Infill({}, Names("<PRE>", "<SUF>", "<MID>"), "suffix").segments("a", "b", files=[File("x.py", "X")])
    assert plain == ["X\n", 100, "a", 101, "b", 102, ""]


def test_metadata_goes_first():
    metadata = {"tokenizer.ggml.fim_pre_token_id": 7}
    assert Infill(metadata, QWEN, "suffix").segments("a", "b")[0] == 7


@pytest.mark.parametrize("id", [-1, 200, [7], 7.5])
def test_an_id_that_is_none_is_refused(id):
    with pytest.raises(FormatError, match="fim_suf_token_id"):
        Infill({"tokenizer.ggml.fim_suf_token_id": id}, QWEN, "suffix")


def test_a_model_that_cannot():
    with pytest.raises(InvalidRequest, match="filling in the middle"):
        Infill({}, Names("<|fim_prefix|>", "<|fim_suffix|>"), "suffix")
