"""What an answer tells of its own prompt, and tokens with their logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pelton.request import EngineRequest, Logprob, PromptEvent, Request, TextPrompt, TokenText

if TYPE_CHECKING:
    from pelton.text.tokenizer import Tokenizer


class AskedPrompt:
    """What is told of the prompt: nothing, or one event once all of it is known."""

    def __init__(self, tokenizer: Tokenizer, request: Request, engine_request: EngineRequest) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._ids = engine_request.prompt_ids
        self._tokens: list[TokenText] = []
        self._has_logprobs = request.sampling.prompt_logprobs is not None
        self._num_unknown = len(self._ids) - 1 if self._has_logprobs else 0

    def start(self) -> list[TextPrompt]:
        """The event, where there are no logprobs to wait for."""
        return [self._event()] if (self._request.echo or self._has_logprobs) and not self._num_unknown else []

    def take(self, event: PromptEvent) -> list[TextPrompt]:
        """The event, where this is the prompt's last token."""
        self._tokens.append(token_text(self._tokenizer, event.token_id, event.logprob, event.top, event.rank))
        self._num_unknown -= 1
        return [] if self._num_unknown else [self._event()]

    def _event(self) -> TextPrompt:
        text = self._request.prompt
        if text is None:
            text = self._tokenizer.decode(self._ids, skip_special=self._request.sampling.skip_special_tokens)
        texts = tuple(map(self._tokenizer.token_text, self._ids))
        return TextPrompt(text=text, texts=texts, tokens=tuple(self._tokens))


def token_text(
    tokenizer: Tokenizer, id: int, logprob: float, top: Sequence[Logprob] = (), rank: int | None = None
) -> TokenText:
    """A token with its text, and its likeliest rivals with theirs."""
    data = tokenizer.token_bytes(id)
    rivals = tuple(token_text(tokenizer, each.id, each.logprob, (), place) for place, each in enumerate(top, 1))
    return TokenText(id=id, text=data.decode("utf-8", "replace"), bytes=data, logprob=logprob, top=rivals, rank=rank)
