"""Ollama's options -> `SamplingParams`: what a request of that dialect and a Modelfile's PARAMETER may set.

Source: Ollama's documents of its API and of the Modelfile, and the types of its Python client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from pelton.errors import InvalidRequest


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options that mean something here. None: not given."""

    num_ctx: int | None = None
    num_predict: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_last_n: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    stop: str | list[str] | None = None
    # llama.cpp's and our own
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None


NAMES = frozenset(field.name for field in msgspec.structs.fields(Options))
NO_EFFECT = frozenset(
    {
        "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
        "use_mlock", "embedding_only", "num_thread", "num_keep", "tfs_z", "penalize_newline", "draft_num_predict",
    }
)  # fmt: skip
"""Options that Ollama knows and that change nothing here."""
_RENAMED = {"repeat_penalty": "repetition_penalty", "mirostat": "mirostat_mode", "num_predict": "max_tokens"}
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""With the values at which they do nothing."""
FILL_CONTEXT = -2
"""The least `num_predict`: like -1 it means until the context is full."""


class Meant(NamedTuple):
    """What options come to."""

    sampling: dict[str, Any]
    """Fields of `SamplingParams`."""
    ignored: tuple[str, ...]
    """Names of those that change nothing."""
    context: int | None
    """`num_ctx`: tokens that prompt and answer may need together."""


def meaning(given: Mapping[str, Any], where: str = "options", *, is_text: bool = False) -> Meant:
    """Raises `InvalidRequest` for a value of a wrong type. `where`: the field that they stand in, for errors.
    `is_text`: numbers may be written as text."""
    options = convert(given, where, is_text=is_text)
    ignored = sorted(name for name, value in given.items() if name not in NAMES and value is not None)
    if options.mirostat not in (None, 0, 2):
        raise InvalidRequest(f"{where}.mirostat is {options.mirostat}: 0 and 2 are offered", param=where)
    if options.num_predict is not None and options.num_predict < FILL_CONTEXT:
        raise InvalidRequest(f"{where}.num_predict is {options.num_predict}, the least is {FILL_CONTEXT}", param=where)
    if options.num_ctx is not None and options.num_ctx < 1:
        raise InvalidRequest(f"{where}.num_ctx is {options.num_ctx}, the least is 1", param=where)
    sampling = {
        _RENAMED.get(name, name): value
        for name, value in msgspec.structs.asdict(options).items()
        if value is not None and name not in ("num_ctx", "repeat_last_n", "stop")
    }
    if options.stop is not None:
        sampling["stop"] = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop)
    if sampling.get("max_tokens", 1) <= 0:
        sampling["max_tokens"] = None
    if sampling.get("seed", 0) < 0:
        sampling["seed"] = None
    if options.repeat_last_n == 0:
        sampling |= _PENALTIES
    elif options.repeat_last_n not in (None, -1) and any(sampling.get(n, off) != off for n, off in _PENALTIES.items()):
        ignored.append("repeat_last_n")  # penalties count all that was written
    return Meant(sampling, tuple(ignored), options.num_ctx)


def convert(given: Mapping[str, Any], where: str, *, is_text: bool = False) -> Options:
    """The options that mean something here, each of its type. Raises `InvalidRequest`, which names the first that is
    not."""
    try:
        return msgspec.convert(given, Options, strict=not is_text)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise InvalidRequest(f"{where}{path.strip('`')}: {message}", param=where) from None
