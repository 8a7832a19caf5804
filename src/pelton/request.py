"""What crosses the house: requests on the way in, events on the way out. Frozen data, no logic.

A dialect makes a `Request` (text side). The service renders and encodes it into an `EngineRequest` (ids only)
and the engine answers with `Event`s; the service turns those into `TextEvent`s for the dialect. Everything that
crosses the border to the engine process is a typed struct, sent as msgpack.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why the engine ended a choice."""
AnswerReason = Literal["stop", "length", "tool_calls", "abort", "error"]
"""Why a choice ended, as clients are told: `tool_calls`, where the model's turn ended and it has called tools."""


IDLE = 1 << 31
"""The priority of what runs on what nobody else needs: the worst that there is."""

Pooling = Literal["last", "mean", "cls"]
"""How the hidden states of a text become its one vector: that of its last token, the mean of all, that of its first."""


class ProcessorCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A logits processor, by its entry point's name, and what is handed to it."""

    name: str
    args: dict[str, Any] = {}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. Field names are those of OpenAI's API, of vLLM and of llama.cpp (docs/sampling.md).

    `None` for `max_tokens` means: until the context is full; 0: no answer, only what is asked about the prompt. `seed`
    None means: one is drawn at the border.
    Ranges are checked at the border (`checks`), not here.
    """

    n: int = 1
    best_of: int | None = None
    """Choices that are made, of which the `n` likeliest are shown; None: as many as are shown."""
    use_beam_search: bool = False
    """Seek the likeliest answers instead of drawing them."""
    beam_width: int | None = None
    """Hypotheses that are kept at each length, of which the `n` best are shown; None: `n`."""
    length_penalty: float = 1.0
    """A hypothesis' sum of logprobs is divided by its length to this power."""
    early_stopping: bool | Literal["never"] = False
    """True: end as soon as there are `beam_width` answers; False: as soon as none that is under way is better now;
    "never": as soon as none can become better."""
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    typical_p: float = 1.0
    """1: all."""
    top_n_sigma: float = 0.0
    """0 or less: all."""
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat_mode: Literal[0, 2] = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    dry_multiplier: float = 0.0
    """0: no DRY penalty."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    """Tokens that it looks back at; -1: all."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logits_processors: tuple[str | ProcessorCall, ...] = ()
    """In their order, before all else; a name alone is a call without arguments."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    """None: no logprobs; k: that of the chosen token and of the k likeliest ones."""
    prompt_logprobs: int | None = None
    """The same of each token of the prompt but the first."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a chat, in the form that chat templates expect: plain data only."""

    role: str
    content: str | tuple[dict[str, Any], ...] | None = None
    """A string, or parts as OpenAI writes them ({"type": "text", "text": ...}); texts are joined with a line feed."""
    reasoning_content: str | None = None
    """What the model thought before an earlier answer; its template decides whether that is shown again."""
    name: str | None = None
    tool_calls: tuple[dict[str, Any], ...] | None = None
    tool_call_id: str | None = None


JSON_WHITE_SPACE = r" |\n {0,40}"
"""What may stand once between two tokens of JSON under a grammar: enough for every usual layout, and no room to run
away. A regular expression."""


def json_options(*, is_strict: bool) -> dict[str, Any]:
    """How `llguidance` is to read a JSON schema. `is_strict`: keywords that cannot be enforced refuse it."""
    return {"whitespace_pattern": JSON_WHITE_SPACE, "lenient": not is_strict, "coerce_one_of": not is_strict}


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must look like.

    `text` is a JSON schema, a regular expression (all of the answer matches it), a list of choices in JSON, a grammar
    in Lark's notation or in llama.cpp's (GBNF), or structural tags in JSON. `param` is the request's field that it
    came from, for errors.
    """

    kind: Literal["json_schema", "regex", "choice", "lark", "gbnf", "structural_tag"]
    text: str
    param: str
    is_strict: bool = True
    """False: keywords of a schema that cannot be enforced are left out, and the answer's warnings name them."""


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """How a model thinks, as far as its engine must know: between two tags, before the answer."""

    open: str
    close: str
    is_open: bool
    """Has the prompt opened it?"""
    budget: int | None = None
    """Tokens after which it is closed; None: any number."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call. `parameters` is a JSON schema of one object; None: it takes none.

    `strict`: its arguments are held to the schema, and a schema that cannot be enforced is refused. Otherwise they are
    where a call is required, as far as the schema can be enforced.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model calls tools. A named tool is `ToolChoice(mode="required", names=(name,))`."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] = ()
    """Only these may be called; empty: any."""


class Truncation(msgspec.Struct, frozen=True, kw_only=True):
    """How a text that is too long is cut."""

    limit: int | None = None
    """Tokens that it may have; None: as many as the context."""
    keeps: Literal["start", "end"] = "start"


class EmbeddingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How a text is embedded."""

    pooling: Pooling | None = None
    """None: as the model's file or the settings say. Where the file says, nothing else will do."""
    dimensions: int | None = None
    """Keep so many of the vector's first values, as models allow that were trained for it; None: all."""
    is_normalized: bool = True
    """Bring the vector, where cut after that, to a Euclidean length of 1."""
    truncation: Truncation | None = None
    """None: a text that is too long is refused."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asked, in no dialect. Exactly one of `messages`, `prompt` and `prompt_ids` is given."""

    id: str
    model: str
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = SamplingParams()
    left_open: tuple[str, ...] = ()
    """Fields of `sampling` that the client has not set: parameters that the model's name brings along stand in for
    them."""
    chat_template: str | None = None
    """In place of the model's own, in Jinja."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: tuple[Tool, ...] = ()
    """Only with `messages`, as is all about tools and reasoning."""
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    """False: an answer ends with its first call."""
    thinking: bool | None = None
    """Shall the model think before it answers? None: as its template has it."""
    reasoning_effort: str | None = None
    """A word for the model's template (low, medium, high); "none" is `thinking=False`."""
    reasoning_budget: int | None = None
    """Tokens after which its thoughts are brought to their end; None: any number."""
    template_kwargs: dict[str, Any] = {}
    grammar: Grammar | None = None
    priority: int = 0
    """The lower, the sooner, as in vLLM."""
    user: str | None = None
    """Whose request it is, as the client says."""
    tenant: str | None = None
    """Those who wait share the engine by tokens; None: `user`."""
    timeout: float | None = None
    """Seconds that the request may take in all; None: the server's setting."""
    queue_timeout: float | None = None
    """Seconds that it may wait for its turn; None: the server's setting."""
    cache_salt: str = ""
    """Only requests of the same salt share what is cached of their prompts."""
    echo: bool = False
    """Is the prompt part of the answer?"""
    suffix: str | None = None
    """What follows the answer, which stands between `prompt` and this. Only with `prompt`."""
    embedding: EmbeddingParams | None = None
    """Set: the answer is not text, but one vector of `prompt` or `prompt_ids`."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A request as the engine sees it: ids only. `sampling.seed` is set; `sampling.stop` is the service's matter.

    `end_ids` end a choice with finish reason "stop" (unless `sampling.ignore_eos`); so do
    `sampling.stop_token_ids`. `sampling.max_tokens` is set and fits the context.
    """

    id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    end_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """The token sequences of `sampling.bad_words`."""
    dry_breaker_ids: tuple[int, ...] = ()
    """The tokens of `sampling.dry_sequence_breakers`."""
    pooling: Pooling | None = None
    """Set: what is asked for is one vector of the prompt. Only with `max_tokens` 0 and one choice."""
    grammar: Grammar | None = None
    """Of a kind that the engine knows: `json_schema`, `regex` or `lark`."""
    thinking: Thinking | None = None
    """Set where the answer has a grammar, which does not hold for thoughts, or these have a budget."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    pin_ttl: float = 0.0
    """Seconds from its end for which what its prompt has in KV memory stays there; 0: it is cached like any. Only with
    `max_tokens` 0."""
    priority: int = 0
    """The lower, the sooner."""
    tenant: str = ""
    """Those who wait at one priority share the engine by tokens."""
    timeout: float | None = None
    """Seconds from its arrival to its end; None: as configured."""
    queue_timeout: float | None = None
    """Seconds from its arrival to its first step; None: as configured."""

    @property
    def is_constrained(self) -> bool:
        """Is what may be drawn decided step by step?"""
        return self.grammar is not None or self.thinking is not None


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """The natural logarithm of a token's probability, before temperature and truncation."""

    id: int
    logprob: float


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts over all choices of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    """Of the completion's tokens, those that the model thought with."""


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The engine has taken the request: errors of validation can no longer come. `warnings`: what of its grammar is not
    enforced."""

    request_id: str
    warnings: tuple[str, ...] = ()


class PromptEvent(msgspec.Struct, frozen=True, array_like=True, tag="prompt"):
    """The prompt's next token, from the second one on, where their logprobs were asked for. `rank`: 1 and the number of
    likelier tokens."""

    request_id: str
    token_id: int
    logprob: float
    rank: int
    top: tuple[Logprob, ...]


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, tag="token"):
    """One token of one choice. `top` holds the likeliest tokens where logprobs were asked for."""

    request_id: str
    choice: int
    token_id: int
    logprob: float | None = None
    top: tuple[Logprob, ...] = ()


class Embedding(msgspec.Struct, frozen=True, array_like=True, tag="embedding"):
    """The prompt's vector, pooled and not normalised: float32, little-endian. Its choice ends behind it."""

    request_id: str
    vector: bytes


class Finish(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """One choice has ended. `stop_id` is the token that ended it, if one did (it is not sent as a token)."""

    request_id: str
    choice: int
    reason: FinishReason
    stop_id: int | None = None
    logprob: float | None = None
    """Of `stop_id`, where logprobs were asked for."""


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The last event of a request that went well."""

    request_id: str
    usage: Usage
    queued: float = 0.0
    """Seconds from its arrival to its first step."""
    prefill: float = 0.0
    """Seconds from that to its first token, or to its end where there is none."""


class ErrorEvent(msgspec.Struct, frozen=True, array_like=True, tag="error"):
    """The last event of a request that did not. `kind` is the name of the error's class in `errors`."""

    request_id: str
    kind: str
    message: str
    param: str | None = None
    retry_after: float | None = None
    """Seconds after which it is worth trying again, where it is."""


Event = Accepted | PromptEvent | TokenEvent | Embedding | Finish | Done | ErrorEvent
"""What the engine's client hands out. Every accepted request ends in exactly one `Done` or `ErrorEvent`, and each of
its choices in one `Finish` before that."""


class TokenText(msgspec.Struct, frozen=True, kw_only=True):
    """A token beside its own text and bytes, for answers that carry logprobs."""

    id: int
    text: str
    bytes: bytes
    logprob: float
    top: tuple[TokenText, ...] = ()
    rank: int | None = None
    """1: the likeliest. Of the chosen token of an answer it is not known."""


class TextPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt, where it is part of the answer or its logprobs were asked for: once, before anything else."""

    text: str
    texts: tuple[str, ...]
    """Of each token."""
    tokens: tuple[TokenText, ...] = ()
    """All tokens but the first, where their logprobs were asked for."""


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one choice's text: valid UTF-8, never part of a stop string. `text` may be empty while
    `token_ids` are not: the tokens are out, their text is held back or belongs to a tool call."""

    choice: int
    text: str
    kind: Literal["content", "reasoning"] = "content"
    """Part of the answer, or of what the model thinks before it."""
    token_ids: tuple[int, ...] = ()
    """The tokens since the choice's last piece."""
    tokens: tuple[TokenText, ...] = ()
    """The same tokens with text, bytes and logprobs, where those were asked for."""


class TextEmbedding(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of a text, as it was asked for: float32, little-endian. All of the one choice that it has."""

    choice: int = 0
    vector: bytes


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A whole call. `arguments` is the JSON text of one object, unless a warning says otherwise or the answer was
    cut."""

    id: str
    name: str
    arguments: str


class ToolCallBegin(msgspec.Struct, frozen=True, kw_only=True):
    """The model calls a tool: one of the request's, by its name. Calls of one choice come one after the other."""

    choice: int
    index: int
    """Of the call among the choice's calls, from 0."""
    id: str
    name: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a call's arguments. All pieces together are the JSON text of one object, unless a warning of the
    choice says that it is broken, or the answer was cut inside of it."""

    choice: int
    index: int
    arguments: str


class ToolCallEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The call's last event; every call has one, unless the request fails."""

    choice: int
    index: int


class TextFinish(msgspec.Struct, frozen=True, kw_only=True):
    """One choice has ended; `stop` is the stop string or the one of `stop_token_ids` that ended it, if one did."""

    choice: int
    reason: AnswerReason
    stop: str | int | None = None
    warnings: tuple[str, ...] = ()
    """What the client should know of this answer: sentences."""


class TextDone(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of a request that went well."""

    usage: Usage
    queued: float = 0.0
    """Seconds that the request waited for its first step."""
    prefill: float = 0.0
    """Seconds from that to its first token, or to its end where there is none."""


ChoiceEvent = TextDelta | TextEmbedding | ToolCallBegin | ToolCallDelta | ToolCallEnd | TextFinish
"""What belongs to one choice."""
TextEvent = TextPrompt | ChoiceEvent | TextDone
"""What the service yields. Errors are raised as exceptions of `errors`, also in the middle of a stream: then each
choice that was still open has ended in a `TextFinish` of reason "error"."""
