"""How byte-level BPE vocabularies cut text into words before merging: one row per `tokenizer.ggml.pre`.

The expressions are those of each model's own `tokenizer.json`, in Oniguruma's syntax. The expressions of a set are
applied one after another: each cuts every piece so far into its matches and what lies between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pelton.errors import UnsupportedModel

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def _llama3_like(digits: str) -> str:
    return rf"{_CONTRACTIONS}|{_WORD}|{digits}|{_PUNCTUATION}|{_SPACES}"


_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(digits: str, suffix: str) -> str:
    """Words split where lower case turns to upper case: tekken and o200k."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3 = (_llama3_like(r"\p{N}{1,3}"),)
_QWEN2 = (_llama3_like(r"\p{N}"),)
_DIGITS_GPT2 = (_DIGIT, _GPT2)
_ONLY_GPT2 = (_GPT2,)
_O200K = (_cased(r"\p{N}{1,3}", _CONTRACTIONS + "?"),)
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CASED_LETTERS = (  # The letters of cased alphabets, as DeepSeek's first tokenizer lists them.
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽ"
    "ᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-"
    "Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_WITHOUT_PUNCTUATION = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True)
class PreTokenizer:
    """A set of expressions and two habits that go with it."""

    expressions: tuple[str, ...]
    ignores_merges: bool = False
    """A word that is itself in the vocabulary is taken whole, whatever the merges say."""
    adds_bos: bool = False
    """Whether a file that does not say puts a begin token before the text."""


def _rows() -> dict[str, PreTokenizer]:
    rows: dict[str, PreTokenizer] = {}

    def row(names: str, expressions: tuple[str, ...], *, whole: bool = False, bos: bool = False) -> None:
        for name in names.split():
            rows[name] = PreTokenizer(expressions, whole, bos)

    row("gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4", _ONLY_GPT2)
    row("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", _DIGITS_GPT2)
    row("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", _LLAMA3, whole=True, bos=True)
    row("glm4 glm5", _LLAMA3, whole=True)
    row("chatglm-bpe dbrx smaug-bpe", _LLAMA3)
    row("qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan grok-2 solar-open", _QWEN2)
    row(
        "qwen35",
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
    )
    row("gpt-4o llama4 kanana2 minimax-m2", _O200K)
    row("tekken", (_cased(r"\p{N}", ""),), whole=True, bos=True)
    row("deepseek-v3 hunyuan-dense joyai-llm", _DEEPSEEK_V3)
    row("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT))
    row(
        "deepseek-llm",
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        ),
    )
    row("falcon", (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))
    row("default", (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
    row("bloom poro-chat gpt3-finnish", (_WITHOUT_PUNCTUATION,))
    row("viking", (_WITHOUT_PUNCTUATION, _DIGIT))
    row(
        "seed-coder",
        (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    )
    row(
        "bailingmoe bailingmoe2 llada-moe",
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    )
    return rows


TABLE = _rows()
"""`tokenizer.ggml.pre` -> how to cut."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """The row of `name`. A name that is not in the table raises: a wrong cut would still look like text."""
    if name not in TABLE:
        raise UnsupportedModel(
            f"tokenizer.ggml.pre is {name!r}, a pre-tokenizer that Pelton does not know"
            if name
            else "tokenizer.ggml.pre is missing: the file does not say how its vocabulary cuts text into words; "
            "convert the model again with a current converter"
        )
    return TABLE[name]
