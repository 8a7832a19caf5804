"""Grammars: which tokens may come next, as bit rows that the backend applies. A home of `llguidance`.

A grammar is compiled once, in a thread that tenants share by time; each choice then has a matcher of its own, which
advances with the tokens that are drawn. Masks are made in another thread while the step's forward pass runs.

Strictness: a schema keyword that cannot be enforced refuses the request, unless the request says that it need not be.
Then it is told. Nothing is approximated in silence.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from pelton.engine.fair_jobs import FairJobs
from pelton.engine.grammar_forms import definition_of
from pelton.engine.grammar_trial import GrammarTrial
from pelton.engine.protocol import Vocabulary
from pelton.engine.thinking import ThinkingConstraint, TokenTable
from pelton.errors import InternalError, InvalidRequest, Overloaded, PeltonError
from pelton.request import Grammar, Thinking

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from pelton.engine.batch import Row

log = logging.getLogger(__name__)

Masks = npt.NDArray[np.uint32]
"""[rows, ceil(vocab / 32)], bit i of word w: token 32 w + i is allowed."""

MAX_COMPILING = 256
"""Requests whose grammars may wait to be compiled; one more is refused."""
MAX_OF_TENANT = 64
"""Of them, those of one tenant."""
MAX_CACHED = 64
"""Compiled grammars that are kept for requests to come."""
MAX_WARNINGS = 16
"""About one grammar."""


class Constraint(Protocol):
    """Where one choice stands, and what may come next."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of its grammar is not enforced."""
        ...

    @property
    def is_finished(self) -> bool:
        """Is the text complete, with nothing that may follow?"""
        ...

    @property
    def error(self) -> PeltonError | None:
        """Why it cannot go on, if so."""
        ...

    def fork(self) -> Constraint:
        """A second one that stands where this one does."""
        ...

    def accept(self, token: int) -> None:
        """Go on by a token that was drawn under the mask."""
        ...

    def check(self, drafts: Rows[int]) -> int:
        """How many of the drafted tokens, from the first on, are allowed here."""
        ...

    def forced(self) -> Rows[int]:
        """The tokens that must come next, as far as there is no choice. Asking changes nothing."""
        ...

    def begun(self) -> bytes:
        """What the text must go on with, whichever tokens spell it. Asking changes nothing."""
        ...

    def fill(self, masks: Masks, drafts: Rows[int]) -> None:
        """Write `1 + len(drafts)` rows: what may come next, and what after each of the drafts, which are allowed."""
        ...


class GrammarConstraint:
    """Where one choice stands in its grammar."""

    def __init__(self, matcher: LLMatcher, warnings: tuple[str, ...] = ()) -> None:
        self._matcher = matcher
        self.warnings = warnings
        """What of the grammar is not enforced."""

    def fork(self) -> GrammarConstraint:
        """A second one that stands where this one does."""
        return GrammarConstraint(self._matcher.deep_copy(), self.warnings)

    @property
    def is_finished(self) -> bool:
        """Is the text complete, with nothing that may follow?"""
        return self._matcher.is_stopped()

    @property
    def error(self) -> PeltonError | None:
        """Why it cannot go on, if so: a step of the grammar was over the library's limits. Masks then allow the end
        alone, which does not mean that the text is complete."""
        if not self._matcher.is_error():
            return None
        return InvalidRequest(f"the grammar is too complex: {_first_line(self._matcher.get_error())}")

    def accept(self, token: int) -> None:
        """Go on by a token that was drawn under the mask. `error` tells whether it did."""
        self._matcher.consume_token(token)

    def check(self, drafts: Rows[int]) -> int:
        """How many of the drafted tokens, from the first on, the grammar allows here."""
        return self._matcher.validate_tokens(list(drafts)) if drafts else 0

    def forced(self) -> Rows[int]:
        """The tokens that must come next, as far as there is no choice: the masks leave only them."""
        return self._matcher.compute_ff_tokens()

    def begun(self) -> bytes:
        """What the text must go on with, whichever tokens spell it."""
        return self._matcher.compute_ff_bytes()

    def fill(self, masks: Masks, drafts: Rows[int]) -> None:
        """Write `1 + len(drafts)` rows: what may come next, and what after each of the drafts, which are allowed."""
        for row, draft in enumerate(drafts):
            self._matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks[row].nbytes)
            self._matcher.consume_token(draft)
        self._matcher.unsafe_compute_mask_ptr(masks[-1].ctypes.data, masks[-1].nbytes)
        self._matcher.rollback(len(drafts))


class Grammars:
    """Compiles the grammars of requests, for one vocabulary of `vocab_size` logits. `on_ready` is called from another
    thread when one is ready."""

    def __init__(self, vocab_size: int, on_ready: Callable[[], None] = lambda: None) -> None:
        self._vocab_size = vocab_size
        self._on_ready = on_ready
        self._vocabulary: Vocabulary | None = None
        self._tokenizer: LLTokenizer | None = None
        self._table: TokenTable | None = None
        self._compiled: OrderedDict[Grammar, GrammarConstraint] = OrderedDict()
        self._compiling: dict[str, Future[Constraint]] = {}
        """By request id, in the order of arrival."""
        self._tenants: dict[str, str] = {}
        """Whose they are."""
        self._refused: OrderedDict[Grammar, None] = OrderedDict()
        """Those that took too long: asked for again, they cost nothing."""
        self._trial = GrammarTrial()
        self._compiler = FairJobs("compile grammars")
        self._masker = ThreadPoolExecutor(1, "mask")
        self._free: Rows[Row] | None = None
        """The last rows without a constraint: those of the next step, too, as often as not."""

    def learn(self, vocabulary: Vocabulary) -> None:
        """Take the bytes of all tokens, which must come before the first grammar does."""
        self._vocabulary = vocabulary
        self._tokenizer = self._table = None
        self._compiled.clear()

    def check_room(self, tenant: str) -> None:
        """Raise `Overloaded` where so many requests wait for their grammars that one more may not."""
        num_own = sum(other == tenant for other in self._tenants.values())
        if num_own >= MAX_OF_TENANT or self.num_compiling >= MAX_COMPILING:
            raise Overloaded(f"{self.num_compiling} requests wait for their grammars; try again later")

    def compile(
        self, request_id: str, grammar: Grammar | None, thinking: Thinking | None = None, tenant: str = ""
    ) -> None:
        """Start to compile what holds a request; `take` gives the result."""
        size = 0 if grammar is None or grammar in self._compiled else len(grammar.text)
        compiling = self._compiler.add(tenant, size, partial(self._compile, grammar, thinking))
        self._compiling[request_id], self._tenants[request_id] = compiling, tenant
        compiling.add_done_callback(lambda _: self._on_ready())

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammars."""
        return len(self._compiling)

    @property
    def is_ready(self) -> bool:
        """Is there anything to `take`?"""
        return any(compiling.done() for compiling in self._compiling.values())

    def take(self) -> list[tuple[str, Constraint | PeltonError]]:
        """The requests whose grammars are ready, each with a constraint at its beginning or with why there is none."""
        ready = [request_id for request_id, compiling in self._compiling.items() if compiling.done()]
        for request_id in ready:
            del self._tenants[request_id]
        return [(request_id, _result(self._compiling.pop(request_id))) for request_id in ready]

    def forget(self, request_id: str) -> None:
        """The request has ended. What was not begun for it is not compiled."""
        if (compiling := self._compiling.pop(request_id, None)) is not None:
            del self._tenants[request_id]
            compiling.cancel()

    def start_masks(self, rows: Rows[Row]) -> Future[Masks] | None:
        """What may come next by the constraint of each row that has one, in their order. None: no row has."""
        if rows is self._free:
            return None
        constrained: list[tuple[Constraint, list[int]]] = []
        for sequence, offset, target in rows:
            if sequence.constraint is None or target >= 0:
                continue
            if offset == 0:
                constrained.append((sequence.constraint, []))
            else:  # behind the rows of the drafted tokens before it
                constrained[-1][1].append(sequence.draft[offset - 1])
        if not constrained:
            self._free = rows
            return None
        return self._masker.submit(self._fill, constrained)

    def close(self) -> None:
        """End the threads; what is being compiled is still compiled."""
        self._compiler.close()
        self._masker.shutdown(wait=False)
        self._trial.close()

    def _compile(self, grammar: Grammar | None, thinking: Thinking | None) -> Constraint:
        """In the compiler's thread."""
        answer = None if grammar is None else self._compile_grammar(grammar)
        if thinking is None:
            assert answer is not None
            return answer
        if self._table is None:
            vocabulary = _known(self._vocabulary)
            self._table = TokenTable(_of_size(vocabulary.tokens, self._vocab_size), vocabulary.end_ids)
        if thinking.budget is not None and not self._table.can_force(thinking.close.encode()):
            message = f"this model's vocabulary cannot spell {thinking.close}, so its thoughts can have no budget"
            raise InvalidRequest(message, param="reasoning_budget")
        return ThinkingConstraint(thinking, self._table, answer)

    def _compile_grammar(self, grammar: Grammar) -> GrammarConstraint:
        if (known := self._compiled.get(grammar)) is None:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(_known(self._vocabulary), self._vocab_size)
            matcher = self._matcher(self._tokenizer, grammar)
            warnings = tuple(map(_first_line, matcher.get_grammar_warnings()[:MAX_WARNINGS]))
            known = self._compiled[grammar] = GrammarConstraint(matcher, warnings)
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return known.fork()

    def _matcher(self, tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        try:
            definition = None if grammar in self._refused else definition_of(grammar)
            if definition is None or not self._trial.ends(definition):
                self._refused[grammar] = None
                if len(self._refused) > MAX_CACHED:
                    self._refused.popitem(last=False)
                raise _refusal(grammar, "it is too complex")
            matcher = LLMatcher(tokenizer, definition, log_level=0)
        except ValueError as error:
            raise _refusal(grammar, str(error)) from None
        if not matcher.is_error():  # The first mask shows whether there is any text, and is fast from now on.
            first = np.zeros(-(-self._vocab_size // 32), np.uint32)
            matcher.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
        if matcher.is_error():
            reason = matcher.get_error()
            raise _refusal(grammar, "no text fulfils it" if reason.startswith("NoExtensionBias") else reason)
        return matcher

    def _fill(self, rows: Rows[tuple[Constraint, Rows[int]]]) -> Masks:
        """In the masks' thread."""
        masks = np.zeros((sum(1 + len(drafts) for _, drafts in rows), -(-self._vocab_size // 32)), np.uint32)
        start = 0
        for constraint, drafts in rows:
            end = start + 1 + len(drafts)
            constraint.fill(masks[start:end], drafts)
            start = end
        return masks


def _result(compiled: Future[Constraint]) -> Constraint | PeltonError:
    try:
        return compiled.result()
    except PeltonError as error:
        return error
    except Exception as error:
        log.error("a grammar could not be compiled", exc_info=error)
        return InternalError(f"the grammar could not be compiled: {error}")


def _of_size(tokens: Rows[bytes], size: int) -> list[bytes]:
    """One for each logit: those that are no tokens are empty."""
    return [*tokens[:size], *[b""] * (size - len(tokens))]


class _Bytes:
    """A vocabulary in the form that the library asks for."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        self.tokens = _of_size(vocabulary.tokens, size)
        self.special_token_ids = vocabulary.control_ids
        self.eos_token_id = vocabulary.end_ids[0]
        self.bos_token_id = None
        self.tokenizer: LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        """The tokens that make up `text`, the longest first. Asked only for what all texts of a grammar have here: the
        masks leave these tokens alone, but for the last ones, which could be joined with what follows."""
        return [] if self.tokenizer is None else self.tokenizer.greedy_tokenize(text)


def _known(vocabulary: Vocabulary | None) -> Vocabulary:
    if vocabulary is None:
        raise InternalError("a grammar came before the vocabulary")
    return vocabulary


def _tokenizer(vocabulary: Vocabulary, vocab_size: int) -> LLTokenizer:
    from llguidance import LLTokenizer

    if not vocabulary.end_ids:
        raise InvalidRequest("this model has no token that ends a text, so its output cannot be constrained")
    wrapper: Any = _Bytes(vocabulary, vocab_size)
    wrapper.tokenizer = LLTokenizer(wrapper, eos_token=list(vocabulary.end_ids))
    tokenizer: LLTokenizer = wrapper.tokenizer
    return tokenizer


def _refusal(grammar: Grammar, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{grammar.param} cannot be enforced: {_first_line(reason)}", param=grammar.param)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
