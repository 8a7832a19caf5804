"""Messages -> prompt, by the model's own chat template.

The template (Jinja, run in the sandbox) renders byte for byte what Hugging Face's `apply_chat_template`
renders. What comes out is cut into *segments*: control tokens that the template wrote, and text. A client's text can
hold anything and never becomes a control token (see `disguise`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pelton.errors import FormatError, InvalidRequest
from pelton.formats.gguf import Metadata
from pelton.request import Message
from pelton.text.disguise import Disguise, Prompt, private_characters, strings
from pelton.text.messages import plain_message, probe
from pelton.text.template import OWN, Template

if TYPE_CHECKING:
    from pelton.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The template of a model that has none but knows ChatML's two control tokens."""

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """A model's chat template. Thread-safe."""

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        tool_source: str | None = None,
        special: Mapping[str, str] = {},
        name: str = OWN,
    ) -> None:
        """`tool_source` is used in place of `source` where a request has tools; `special` holds what templates
        read as `bos_token`, `eos_token`, ...; `name`: as errors call it."""
        self._tokenizer = tokenizer
        self._special = dict(special)
        self._plain = Template(source, name)
        self._tools = Template(tool_source, name) if tool_source is not None else self._plain
        self._disguises = {each: Disguise(tokenizer, each.source) for each in (self._plain, self._tools)}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer, *, name: str = OWN) -> ChatTemplate:
        """The template that a GGUF file carries; else ChatML where the vocabulary has its control tokens; else
        `InvalidRequest`: such a model completes text and does not chat."""
        source = metadata.get("tokenizer.chat_template")
        if source is None:
            if tokenizer.control_id("<|im_start|>") is None or tokenizer.control_id("<|im_end|>") is None:
                raise InvalidRequest(
                    "this model has no chat template: it completes text; use completions", param="messages"
                )
            source = CHATML
        tool_source = metadata.get("tokenizer.chat_template.tool_use")
        if not isinstance(source, str) or not isinstance(tool_source, str | None):
            raise FormatError("tokenizer.chat_template is not a string")
        special = {}
        for token, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            id = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if isinstance(id, int) and 0 <= id < tokenizer.vocab_size:
                special[f"{token}_token"] = tokenizer.token_text(id)
        return cls(source, tokenizer, tool_source=tool_source, special=special, name=name)

    def source(self, *, has_tools: bool) -> str:
        """The template that is used."""
        return (self._tools if has_tools else self._plain).source

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
        template that takes too much."""
        template = self._tools if tools else self._plain
        self._check(messages, template_kwargs, add_generation_prompt and continue_final_message)
        shape = probe(template)
        if "developer" not in template.source:  # what OpenAI calls the system's role now
            messages = [
                msgspec.structs.replace(each, role="system") if each.role == "developer" else each for each in messages
            ]
        inputs = {
            "messages": [plain_message(message, shape, i) for i, message in enumerate(messages)],
            "tools": list(tools) if tools else None,
            **template_kwargs,
        }
        fixed: dict[str, Any] = {key: text for key, text in self._special.items() if key not in template_kwargs}
        fixed |= {"documents": None, "add_generation_prompt": add_generation_prompt}
        given = "".join(strings(inputs))
        _check_unicode(given)  # minijinja would replace what is not
        private = private_characters(given + template.source)
        tag = next(private) + " "
        if continue_final_message:
            inputs["messages"][-1] = _with_suffix(inputs["messages"][-1], tag)

        def run(inputs: list[dict[str, Any]]) -> list[str]:
            texts = template.run_all([fixed | each for each in inputs])
            return [_cut_at(text, tag) for text in texts] if continue_final_message else texts

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


def with_template(metadata: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """A file's metadata with another template, which is also that for tools."""
    templates = [key for key in metadata if key.startswith("tokenizer.chat_template")]
    if isinstance(metadata, Metadata):
        return metadata.changed(templates, {"tokenizer.chat_template": source})
    return {key: metadata[key] for key in metadata if key not in templates} | {"tokenizer.chat_template": source}


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"the messages are not Unicode: U+{ord(text[error.start]):04X} stands alone in them"
        raise InvalidRequest(message, param="messages") from None


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
