"""What sampling parameters may be: checked once, where a request enters."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence, Sized

import msgspec

from pelton.errors import InvalidRequest
from pelton.request import IDLE, ProcessorCall, Request, SamplingParams

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STRINGS = 64
"""Of `stop` and of `dry_sequence_breakers`."""
MAX_PROMPTS = 256
"""Prompts of one request."""
MAX_INPUTS = 2048
"""Texts of one request that are embedded."""
MAX_BAD_WORDS = 1024
MAX_STRING_LENGTH = 1024
MAX_LOGIT_BIAS = 4096
MAX_PROCESSORS = 64
MAX_TOOLS = 128
MAX_PRIORITY = IDLE
MIN_TIMEOUT = 0.001
"""Seconds."""
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")

RANGES: dict[str, tuple[float, float]] = {
    "n": (1, MAX_CHOICES),
    "length_penalty": (-10, 10),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "top_n_sigma": (-1, 1000),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "mirostat_tau": (0.01, 100),
    "mirostat_eta": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "dry_multiplier": (0, 100),
    "dry_base": (1, 100),
    "dry_allowed_length": (1, 2**31 - 1),
    "dry_penalty_last_n": (-1, 2**31 - 1),
}
"""The least and the most that a parameter may be."""
OPTIONAL_RANGES: dict[str, tuple[float, float]] = {
    "best_of": (1, MAX_CHOICES),
    "beam_width": (1, MAX_CHOICES),
    "max_tokens": (0, math.inf),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
"""Of parameters that may also be None."""


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise `InvalidRequest`, with `param` set, for the first parameter that is out of its range."""
    for name, (low, high) in RANGES.items():
        check_range(name, getattr(sampling, name), low, high)
    for name, (low, high) in OPTIONAL_RANGES.items():
        if getattr(sampling, name) is not None:
            check_range(name, getattr(sampling, name), low, high)
    check_range("min_tokens", sampling.min_tokens, 0, math.inf if sampling.max_tokens is None else sampling.max_tokens)
    if sampling.best_of is not None and sampling.best_of < sampling.n:
        raise InvalidRequest(f"best_of is {sampling.best_of}, less than n, which is {sampling.n}", param="best_of")
    if sampling.use_beam_search:
        _check_beams(sampling)
    elif sampling.beam_width is not None:
        raise InvalidRequest("beam_width needs use_beam_search", param="beam_width")
    if sampling.mirostat_mode not in (0, 2):
        raise InvalidRequest(f"mirostat_mode is {sampling.mirostat_mode}, must be 0 or 2", param="mirostat_mode")
    _check_strings("stop", sampling.stop, MAX_STRINGS)
    _check_strings("dry_sequence_breakers", sampling.dry_sequence_breakers, MAX_STRINGS)
    _check_strings("bad_words", sampling.bad_words, MAX_BAD_WORDS)
    check_ids(sampling.stop_token_ids, vocab_size, "stop_token_ids")
    check_count("logit_bias", sampling.logit_bias, MAX_LOGIT_BIAS)
    check_ids(tuple(sampling.logit_bias), vocab_size, "logit_bias")
    if sampling.allowed_token_ids is not None:
        if not sampling.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids is empty: no token could be drawn", param="allowed_token_ids")
        check_ids(sampling.allowed_token_ids, vocab_size, "allowed_token_ids")
    for bias in sampling.logit_bias.values():
        check_range("logit_bias", bias, -100, 100)
    _check_processors(sampling.logits_processors)


def check_policy(request: Request) -> None:
    """Raise `InvalidRequest` for a priority or a time that cannot be."""
    check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    for name, seconds in (("timeout", request.timeout), ("queue_timeout", request.queue_timeout)):
        if seconds is not None:
            check_range(name, seconds, MIN_TIMEOUT, math.inf)


def check_tools(request: Request) -> None:
    """Raise `InvalidRequest` for tools or thinking that no chat could have."""
    tools, choice, budget = request.tools, request.tool_choice, request.reasoning_budget
    if budget is not None:
        check_range("reasoning_budget", budget, 0, math.inf)
    if tools and request.messages is None:
        raise InvalidRequest("tools need messages", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} tools, over {MAX_TOOLS}", param="tools")
    for i, tool in enumerate(tools):
        if not _TOOL_NAME.fullmatch(tool.name):
            message = f"tools[{i}]: the name {tool.name[:64]!r} is not 1 to 128 of letters, digits, _ . : / -"
            raise InvalidRequest(message, param="tools")
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"tools has two tools with the name {twice!r}", param="tools")
    if unknown := sorted(set(choice.names) - set(names)):
        raise InvalidRequest(f"tool_choice names {unknown[0][:64]!r}, which is not one of tools", param="tool_choice")
    if choice.mode == "required" and not tools:
        raise InvalidRequest("tool_choice asks for a call, but there are no tools", param="tool_choice")


def check_count(name: str, entries: Sized, most: int) -> None:
    """Raise `InvalidRequest` for more entries than there may be."""
    if len(entries) > most:
        raise InvalidRequest(f"{name} has {len(entries)} entries, over {most}", param=name)


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise `InvalidRequest` unless low <= value <= high."""
    if not low <= value <= high:  # Not a number is in no range.
        limits = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        raise InvalidRequest(f"{name} is {value}, must be {limits}", param=name)


def check_ids(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Raise `InvalidRequest` unless all ids are of the vocabulary."""
    for id in ids:
        if not 0 <= id < vocab_size:
            raise InvalidRequest(f"{name}: token id {id} is not from 0 to {vocab_size - 1}", param=name)


NO_BEAMS = (
    "best_of", "top_p", "top_k", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "mirostat_mode",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "dry_multiplier", "logit_bias", "allowed_token_ids",
    "bad_words", "logits_processors", "stop",
)  # fmt: skip
"""Parameters that mean nothing to a beam search."""


def _check_beams(sampling: SamplingParams) -> None:
    for name in NO_BEAMS:
        if getattr(sampling, name) != getattr(SamplingParams(), name):
            raise InvalidRequest(f"{name} cannot be used with use_beam_search", param=name)
    if sampling.temperature not in (0, 1):
        raise InvalidRequest("temperature changes nothing for use_beam_search: leave it out", param="temperature")
    if sampling.max_tokens == 0:
        raise InvalidRequest("max_tokens must be at least 1 with use_beam_search", param="max_tokens")


def _check_strings(name: str, strings: Sequence[str], most: int) -> None:
    check_count(name, strings, most)
    for string in strings:
        if not 1 <= len(string) <= MAX_STRING_LENGTH:
            message = f"a string of {name} has {len(string)} characters, must have 1 to {MAX_STRING_LENGTH}"
            raise InvalidRequest(message, param=name)


def _check_processors(calls: Sequence[str | ProcessorCall]) -> None:
    if len(calls) > MAX_PROCESSORS:
        message = f"logits_processors has {len(calls)} calls, over {MAX_PROCESSORS}"
        raise InvalidRequest(message, param="logits_processors")
    try:
        msgspec.msgpack.encode(calls)
    except (OverflowError, RecursionError, TypeError, UnicodeError) as error:  # an integer over 64 bits, for example
        message = f"logits_processors: the arguments cannot be handed over: {error}"
        raise InvalidRequest(message, param="logits_processors") from None
