"""What the engine itself rests on in a request. Ranges of parameters were checked where it came in."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from pelton.errors import ContextLengthExceeded, InvalidRequest
from pelton.request import EngineRequest


def check_request(request: EngineRequest, vocab_size: int, max_sequences: int, context: int) -> None:
    """Raise `InvalidRequest` or `ContextLengthExceeded` for what no step could make."""
    _check_ids(request, vocab_size)
    n = request.sampling.n
    if not 1 <= n <= max_sequences:
        raise InvalidRequest(f"n (or best_of) is {n}, must be from 1 to {max_sequences}", param="n")
    if request.pooling is not None and (n, request.sampling.max_tokens) != (1, 0):
        raise InvalidRequest("what is embedded is not continued: n must be 1 and max_tokens 0", param="pooling")
    if request.sampling.use_beam_search:
        _check_beams(request, vocab_size, max_sequences)
    _check_length(request, context)


def _check_ids(request: EngineRequest, vocab_size: int) -> None:
    sampling = request.sampling
    if not request.prompt_ids:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
        raise InvalidRequest(f"prompt token ids must be from 0 to {vocab_size - 1}", param="prompt")
    named: dict[str, Iterable[int]] = {
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "bad_words": chain.from_iterable(request.bad_words_ids),
    }
    for name, ids in named.items():
        if outside := [id for id in ids if not 0 <= id < vocab_size]:
            raise InvalidRequest(f"{name} names token {outside[0]}; ids are from 0 to {vocab_size - 1}", param=name)


def _check_beams(request: EngineRequest, vocab_size: int, max_sequences: int) -> None:
    width = request.sampling.beam_width or request.sampling.n
    num_ends = len({*request.end_ids, *request.sampling.stop_token_ids})
    most = min(max_sequences, vocab_size - num_ends)
    if not request.sampling.n <= width <= most:
        raise InvalidRequest(
            f"beam_width is {width}, must be from n, which is {request.sampling.n}, to {most}", param="beam_width"
        )


def _check_length(request: EngineRequest, context: int) -> None:
    num_prompt, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
    if max_tokens is None or max_tokens < 0:
        raise InvalidRequest(f"max_tokens is {max_tokens}, must be at least 0", param="max_tokens")
    if num_prompt + max_tokens > context:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens, which with max_tokens {max_tokens} exceeds the context of "
            f"{context} tokens",
            param="max_tokens" if num_prompt < context else "prompt",
        )
