"""Messages -> prompt, by the model's own chat template.

The template (Jinja, run by minijinja with fuel) renders byte for byte what Hugging Face's `apply_chat_template`
renders. What comes out is cut into *segments*: control tokens that the template wrote, and text. A client's text can
hold anything and never becomes a control token (see `_Disguise`).
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pelton.errors import InvalidRequest, UnsupportedModel
from pelton.request import Message

if TYPE_CHECKING:
    import minijinja

    from pelton.text.tokenizer import Tokenizer

FUEL = 10_000_000
"""Steps that a rendering may take; minijinja also charges for the size of what it builds."""
MAX_RENDERED = 64 << 20
"""Characters that a rendering may have."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The template of a model that has none but knows ChatML's two control tokens."""

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_ROLE = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_PROBE = "probe4711"


class Prompt(NamedTuple):
    """A rendered chat: the text, and the same cut into text (str) and control tokens (their ids)."""

    text: str
    segments: list[str | int]


class ChatTemplate:
    """A model's chat template. Thread-safe."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, tool_source: str | None = None, special: Mapping[str, str] = {}
    ) -> None:
        """`tool_source` is used in place of `source` where a request has tools; `special` holds what templates
        read as `bos_token`, `eos_token`, ..."""
        self._tokenizer = tokenizer
        self._special = dict(special)
        self._plain = _Compiled(source)
        self._tools = _Compiled(tool_source) if tool_source is not None else self._plain
        self._disguises = {each: _Disguise(tokenizer, each.source) for each in (self._plain, self._tools)}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
        """The template that a GGUF file carries; else ChatML where the vocabulary has its control tokens; else
        `InvalidRequest`: such a model completes text and does not chat."""
        source = metadata.get("tokenizer.chat_template")
        if source is None:
            if tokenizer.control_id("<|im_start|>") is None or tokenizer.control_id("<|im_end|>") is None:
                raise InvalidRequest(
                    "this model has no chat template: it completes text; use completions", param="messages"
                )
            source = CHATML
        special = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            id = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if id is not None and 0 <= id < tokenizer.vocab_size:
                special[f"{name}_token"] = tokenizer.token_text(id)
        return cls(source, tokenizer, tool_source=metadata.get("tokenizer.chat_template.tool_use"), special=special)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] = {},
    ) -> Prompt:
        """Render and cut into segments. Raises `InvalidRequest` for messages that the template refuses, and for a
        template that needs more than its fuel."""
        template = self._tools if tools else self._plain
        self._check(messages, template_kwargs, add_generation_prompt and continue_final_message)
        inputs = {
            "messages": [_plain_message(message, template.shape, i) for i, message in enumerate(messages)],
            "tools": list(tools) if tools else None,
            **template_kwargs,
        }
        fixed: dict[str, Any] = {key: text for key, text in self._special.items() if key not in template_kwargs}
        fixed |= {"documents": None, "add_generation_prompt": add_generation_prompt}
        private = _private_characters("".join(_strings(inputs)) + template.source)
        tag = next(private) + " "
        if continue_final_message:
            inputs["messages"][-1] = _with_suffix(inputs["messages"][-1], tag)

        def run(inputs: dict[str, Any]) -> str:
            text = template.run(**fixed, **inputs)
            return _cut_at(text, tag) if continue_final_message else text

        return self._disguises[template].render(inputs, run, private)

    @staticmethod
    def _check(messages: Sequence[Message], kwargs: Mapping[str, Any], both: bool) -> None:
        if not messages:
            raise InvalidRequest("messages is empty", param="messages")
        if both:
            raise InvalidRequest(
                "add_generation_prompt starts a new message, continue_final_message goes on with the last one: "
                "only one of them can be set",
                param="continue_final_message",
            )
        if taken := _RESERVED & kwargs.keys():
            raise InvalidRequest(
                f"chat template argument {min(taken)!r} is already taken", param="chat_template_kwargs"
            )


class _Shape(NamedTuple):
    """What a template wants of a message, found out by rendering a small chat."""

    as_parts: bool
    """Content must be a list of parts."""
    without_content: Mapping[str, Any]
    """What stands for the content of an assistant's turn that only calls tools."""
    parsed_arguments: bool
    """A tool call's arguments are an object (not its JSON text)."""


class _Compiled:
    """A template's source, compiled when it is first needed."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._environment: minijinja.Environment | None = None
        self._shape: _Shape | None = None

    def run(self, **inputs: Any) -> str:
        """Render. Errors become `InvalidRequest`: they depend on the messages."""
        import minijinja

        environment = self._environment or self._compile()
        try:
            text = environment.render_template("chat", **inputs)
        except minijinja.TemplateError as error:
            kind = _OutOfFuel if error.kind == "OutOfFuel" else InvalidRequest
            raise kind(f"the model's chat template fails: {_reason(error)}", param="messages") from None
        except _Refusal as error:
            raise InvalidRequest(f"the model's chat template refuses: {error}", param="messages") from None
        if len(text) > MAX_RENDERED:
            raise InvalidRequest(f"the rendered chat has {len(text)} characters, over {MAX_RENDERED}", param="messages")
        return text

    @property
    def shape(self) -> _Shape:
        """What this template wants of messages."""
        if self._shape is None:
            self._shape = self._probe()
        return self._shape

    def _compile(self) -> minijinja.Environment:
        import minijinja

        environment = minijinja.Environment(
            fuel=FUEL, trim_blocks=True, lstrip_blocks=True, auto_escape_callback=lambda _: False
        )
        environment.add_filter("tojson", _tojson)
        environment.add_filter("indent", _indent)
        environment.add_filter("trim", _trim)
        environment.add_global("raise_exception", _raise_exception)
        environment.add_global("strftime_now", _strftime_now)
        # Hugging Face's block for the assistant's words is a scope and nothing else when text is rendered.
        source = re.sub(r"\{%([-+]?)\s*generation\s*([-+]?)%\}", r"{%\1 with \2%}", self.source)
        source = re.sub(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}", r"{%\1 endwith \2%}", source)
        try:
            environment.add_template("chat", source)
        except minijinja.TemplateError as error:
            raise UnsupportedModel(f"the model's chat template cannot be read: {_reason(error)}") from None
        self._environment = environment
        return environment

    def _probe(self) -> _Shape:
        def sees(*messages: dict[str, Any], words: Sequence[str]) -> bool:
            inputs: dict[str, Any] = {"tools": None, "documents": None, "bos_token": "", "eos_token": ""}
            try:
                text = self.run(messages=list(messages), add_generation_prompt=False, **inputs)
            except _OutOfFuel:
                raise
            except InvalidRequest:
                return False
            return all(word in text for word in words)

        def user(content: Any) -> dict[str, Any]:
            return {"role": "user", "content": content}

        parts = [{"type": "text", "text": _PROBE}]
        as_parts = not sees(user(_PROBE), words=[_PROBE]) and sees(user(parts), words=[_PROBE])
        question = user(parts if as_parts else _PROBE)
        arguments = {"city": "Oslo4711"}
        contents: list[dict[str, Any]] = [{"content": ""}, {}, {"content": None}]
        # Arguments in JSON are looked for first: a template that wants text would print an object as Python does.
        for value, parsed, content in itertools.product(('"Oslo4711"', "Oslo4711"), (True, False), contents):
            call = {"name": "weather4711", "arguments": arguments if parsed else json.dumps(arguments)}
            calls = [{"id": "call12345", "type": "function", "function": call}]
            turn = {"role": "assistant", **content, "tool_calls": calls}
            if sees(question, turn, words=["weather4711", value]):
                return _Shape(as_parts, content, parsed)
        return _Shape(as_parts, {"content": ""}, True)


class _OutOfFuel(InvalidRequest):
    """The template ran for too long."""


class _Refusal(Exception):
    """`raise_exception` was called by a template."""


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's `tojson`: plain JSON, nothing escaped for HTML."""
    if (indent if isinstance(indent, int) else len(indent or "")) > 16:
        raise _Refusal("tojson: indent over 16")
    if separators is not None:
        separators = tuple(separators)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's `indent`; minijinja's loses a line feed at the end."""
    space = width if isinstance(width, str) else " " * min(width, 1000)
    head, *rest = f"{text}\n".splitlines()
    lines = [head, *(space + line if line or blank else line for line in rest)]
    return (space if first else "") + "\n".join(lines)


def _trim(text: Any, chars: str | None = None) -> str:
    """Jinja's `trim`; minijinja takes other characters for white space."""
    return str(text).strip(chars)


def _reason(error: minijinja.TemplateError) -> str:
    """The error's first line: what follows shows the whole template."""
    return (error.detail or error.message).partition("\n")[0]


def _plain_message(message: Message, shape: _Shape, index: int) -> dict[str, Any]:
    """A message as templates read it: plain data, absent fields left out."""
    if not _ROLE.fullmatch(message.role):
        raise InvalidRequest(f"messages[{index}].role is not a word of letters, digits, _ . -", param="messages")
    plain: dict[str, Any] = {"role": message.role}
    content = _joined(message.content, index)
    if content:
        plain["content"] = [{"type": "text", "text": content}] if shape.as_parts else content
    elif message.tool_calls:
        plain |= shape.without_content
    elif content is None:
        raise InvalidRequest(f"messages[{index}] has neither content nor tool_calls", param="messages")
    else:
        plain["content"] = [] if shape.as_parts else ""
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call, shape, index) for call in message.tool_calls]
    for field in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, field)) is not None:
            plain[field] = value
    if message.reasoning_content is not None:
        plain["thinking"] = message.reasoning_content
    return plain


def _joined(content: str | tuple[dict[str, Any], ...] | None, index: int) -> str | None:
    """Content as one string: text parts are joined with a line feed. No parts are an empty string."""
    if content is None or isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        kind, text = part.get("type", "text"), part.get("text")
        if kind not in ("text", "input_text", "output_text"):
            raise InvalidRequest(
                f"messages[{index}].content[{number}] is of type {str(kind)[:40]!r}: this model reads text only",
                param="messages",
            )
        if not isinstance(text, str):
            raise InvalidRequest(f"messages[{index}].content[{number}].text is not a string", param="messages")
        texts.append(text)
    return "\n".join(texts)


def _plain_call(call: dict[str, Any], shape: _Shape, index: int) -> dict[str, Any]:
    """A tool call whose arguments are what the template expects: an object or its JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"messages[{index}].tool_calls: each needs function.name", param="messages")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str) and shape.parsed_arguments:
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise InvalidRequest(
                f"messages[{index}].tool_calls: the arguments of {function['name'][:64]!r} are not JSON",
                param="messages",
            ) from None
    elif not isinstance(arguments, str) and not shape.parsed_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _with_suffix(message: dict[str, Any], suffix: str) -> dict[str, Any]:
    content = message.get("content")
    if not content:
        raise InvalidRequest("continue_final_message: the last message has no content", param="continue_final_message")
    if isinstance(content, list):
        return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + suffix}]}
    return {**message, "content": content + suffix}


def _cut_at(text: str, tag: str) -> str:
    """What stands before `tag`. A template that trims the message has trimmed the tag's space too: then white space
    before the tag goes as well."""
    at = text.rfind(tag.rstrip())
    if at < 0:
        raise InvalidRequest(
            "continue_final_message: the model's chat template does not show the last message",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(tag, at) else text[:at].rstrip()


def _private_characters(haystack: str) -> Iterator[str]:
    """Private-use characters that are not in `haystack`."""
    used = set(haystack)
    return (chr(code) for code in range(0xF0000, 0x10FFFE) if chr(code) not in used)


class _Disguise:
    """Tells a client's text from the template's in a rendering.

    Templates trim, slice, measure and split what they are given, so the client's strings cannot be marked by anything
    that changes their length or edges. Instead the first character of every control token (mostly just `<`) is replaced
    in the client's strings, one for one, by a private character. In such a rendering every control token found was
    written by the template. Changed back, it must equal the rendering of the untouched strings. Where it does not
    (the template looks for such characters itself), the untouched rendering is taken if it has the same control
    tokens in the same order, hence none of the client's; else the request is refused.

    Strings that the template itself looks for (`</think>`) stay as they are where they are no control tokens.
    """

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        self._tokenizer = tokenizer
        self._initials = {text[0] for text in tokenizer.control_texts}
        literals = {
            literal
            for literal in _literals(source)
            if literal[0] in self._initials and not self._looks_like_control(literal)
        }
        kept = "|".join(map(re.escape, sorted(literals))) or "(?!)"
        self._kept = re.compile(kept)
        self._hideable = re.compile(f"(?!{kept})[{re.escape(''.join(sorted(self._initials)))}]")

    def render(self, inputs: dict[str, Any], run: Callable[[dict[str, Any]], str], private: Iterator[str]) -> Prompt:
        """`run` renders the inputs that it is given; `private` are characters that no input holds."""
        plain = run(inputs)
        if not any(not self._initials.isdisjoint(text) for text in _strings(inputs)):
            return Prompt(plain, self._cut(plain, {}))
        masks = dict(zip(sorted(self._initials), private, strict=False))
        back = {ord(mask): initial for initial, mask in masks.items()}
        hidden = run(self._hide(inputs, masks))
        if hidden.translate(back) == plain:
            return Prompt(plain, self._cut(hidden, back))
        segments = self._cut(plain, {})
        if _ids(segments) != _ids(self._cut(hidden, back)):
            raise InvalidRequest(
                "the messages hold the text of control tokens, and the model's chat template changes them in a way in "
                "which they cannot be kept apart from its own",
                param="messages",
            )
        return Prompt(plain, segments)

    def _hide(self, inputs: dict[str, Any], masks: Mapping[str, str]) -> dict[str, Any]:
        table = str.maketrans(dict(masks))

        def hide(text: str) -> str:
            if self._kept.search(text):
                return self._hideable.sub(lambda match: masks[match[0]], text)
            return text.translate(table)

        hidden: dict[str, Any] = _mapped(inputs, hide)
        for message, original in zip(hidden["messages"], inputs["messages"], strict=True):
            message["role"] = original["role"]  # A checked word, and templates compare it.
        return hidden

    def _looks_like_control(self, literal: str) -> bool:
        if self._tokenizer.control_pattern.search(literal):
            return True
        return any(text.startswith(literal) for text in self._tokenizer.control_texts)

    def _cut(self, text: str, back: dict[int, str]) -> list[str | int]:
        segments: list[str | int] = []
        at = 0
        for match in self._tokenizer.control_pattern.finditer(text):
            if match.start() > at:
                segments.append(text[at : match.start()].translate(back))
            id = self._tokenizer.control_id(match[0])
            assert id is not None
            segments.append(id)
            at = match.end()
        if at < len(text):
            segments.append(text[at:].translate(back))
        return segments


def _literals(source: str) -> Iterator[str]:
    """The strings of two characters or more that a template's expressions name, up to their first escape."""
    for code in re.findall(r"\{[{%].*?[%}]\}", source, re.DOTALL):
        for single, double in re.findall(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", code, re.DOTALL):
            literal = (single or double).partition("\\")[0]
            if len(literal) >= 2:
                yield literal


def _ids(segments: Sequence[str | int]) -> list[int]:
    return [segment for segment in segments if isinstance(segment, int)]


_NAME = re.compile(r"[\w.\-]*")


def _strings(value: Any) -> Iterator[str]:
    """Every string in plain data; of keys those that are not just names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (key for key in value if not _NAME.fullmatch(key))
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Plain data with `change` done to every string that `_strings` finds."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key if _NAME.fullmatch(key) else change(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
