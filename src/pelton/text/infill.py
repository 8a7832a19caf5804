"""A text's beginning and end -> the prompt for what is between them (fill in the middle).

Source: "Efficient Training of Language Models to Fill in the Middle" (Bavarian and others, 2022): prefix, suffix,
middle; files around it as in Qwen2.5-Coder's technical report. Names of tokens are those of the models that have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pelton.errors import InvalidRequest

if TYPE_CHECKING:
    from pelton.text.tokenizer import Tokenizer

NAMES = {
    "pre": ("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<｜fim▁begin｜>", "<|code_prefix|>", "▁<PRE>", "<PRE>"),
    "suf": ("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<｜fim▁hole｜>", "<|code_suffix|>", "▁<SUF>", "<SUF>"),
    "mid": ("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<｜fim▁end｜>", "<|code_middle|>", "▁<MID>", "<MID>"),
    "rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>", "<repo_name>"),
    "sep": ("<|file_sep|>", "<file_sep>"),
}
"""Of each token's names, by its key in a file's metadata (`tokenizer.ggml.fim_pre_token_id`)."""
PROJECT = "myproject"
"""What the repository is called where other files are shown."""


def can_infill(metadata: Mapping[str, Any]) -> bool:
    """Has a model the tokens for it, as far as its file's metadata tell?"""
    tokens = frozenset(metadata.get("tokenizer.ggml.tokens", ()))
    return all(
        f"tokenizer.ggml.fim_{key}_token_id" in metadata or not tokens.isdisjoint(NAMES[key])
        for key in ("pre", "suf", "mid")
    )


class File(NamedTuple):
    """Another file that the model is shown."""

    name: str
    text: str


class Infill:
    """The tokens of one model that lay out what is to be filled in."""

    def __init__(self, metadata: Mapping[str, Any], tokenizer: Tokenizer, param: str) -> None:
        """Raises `InvalidRequest`, for the field `param`, for a model that cannot fill in, and `FormatError` for
        a file whose ids of such tokens are none."""
        self._ids: dict[str, int] = {}
        for key, names in NAMES.items():
            found = [tokenizer.special_id(metadata, f"fim_{key}_token_id"), *map(tokenizer.control_id, names)]
            if (id := next((each for each in found if each is not None), None)) is not None:
                self._ids[key] = id
        if not {"pre", "suf", "mid"} <= self._ids.keys():
            raise InvalidRequest("this model has no tokens for filling in the middle", param=param)

    def segments(self, prefix: str, suffix: str, begun: str = "", files: Sequence[File] = ()) -> list[str | int]:
        """The prompt, as `Tokenizer.encode_segments` takes it. `begun`: what the middle begins with."""
        middle: list[str | int] = [self._ids["pre"], prefix, self._ids["suf"], suffix, self._ids["mid"], begun]
        return [*self._shown(files), *middle]

    def _shown(self, files: Sequence[File]) -> Iterator[str | int]:
        if not files:
            return
        if "rep" in self._ids:
            yield from (self._ids["rep"], f"{PROJECT}\n")
        for file in files:
            if "sep" in self._ids:
                yield from (self._ids["sep"], f"{file.name}\n")
            yield f"{file.text}\n"
        if "sep" in self._ids:
            yield from (self._ids["sep"], "filename\n")
