"""Which tokens end a turn: by the names that models give them, since files name only one or two of them."""

from __future__ import annotations

from collections.abc import Mapping

KEYS = ("eos_token_id", "eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
"""The keys (after `tokenizer.ggml.`) under which a file may name them."""

ALWAYS = frozenset(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    ]
)
"""Tokens that end a turn wherever they exist, also where the file forgot to call them control tokens."""
_IF_CONTROL = frozenset(["</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"])
"""Tokens that end a turn if the file calls them control tokens: in other vocabularies they are plain text."""
_FILE_ENDS = frozenset(
    [
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<PAD>",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
    ]
)
"""Control tokens with which code models leave the file that they were completing."""


def among(control: Mapping[str, int]) -> set[int]:
    """The ids of those control tokens (name -> id) that end a turn."""
    found = {text: id for text, id in control.items() if text in ALWAYS | _IF_CONTROL | _FILE_ENDS}
    if {"<|return|>", "<|call|>"} <= found.keys() or {"<|calls|>", "<|flush|>"} <= found.keys():
        found.pop("<|end|>", None)  # In these vocabularies it ends a message inside a turn.
    if "<|tool_response>" in found:
        found.pop("</s>", None)  # There it is a word.
    return set(found.values())
