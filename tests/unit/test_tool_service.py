"""Tools and reasoning through the service: what the engine says as text events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from pelton.errors import InvalidRequest
from pelton.folding import Choice
from pelton.request import (
    Accepted,
    EngineRequest,
    Event,
    Finish,
    Grammar,
    Message,
    Request,
    SamplingParams,
    TextDelta,
    TextDone,
    TextEvent,
    TextFinish,
    Thinking,
    TokenEvent,
    Tool,
    ToolCallBegin,
    ToolCallEnd,
    ToolChoice,
)
from tests.unit.scripted_engine import ScriptedEngine, saying
from tests.unit.served import ids, run, service

THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{# <think>, </think>, <tool_call> #}"
)
OPENS = THINKS.replace("assistant\n", "assistant\n<think>\n").replace("{% if enable", "{% if false and enable")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "<b>"}}\n</tool_call>'
TOOLS = (Tool(name="f", parameters={"type": "object"}), Tool(name="g"))
ASKS = (Message(role="user", content="Hi"),)


def answer(engine: ScriptedEngine, template: str = THINKS, **fields: Any) -> tuple[Choice, list[TextEvent]]:
    """The first choice, and all events."""
    request = Request(id="r", model="m", messages=ASKS, **fields)

    async def all_events() -> list[TextEvent]:
        loaded = service(engine, **{"tokenizer.chat_template": template})
        return [event async for event in await loaded.generate(request)]

    events = run(all_events())
    choice = Choice()
    for event in events[:-1]:
        if event.choice == 0:
            choice.add(event)
    return choice, events


def reason(choice: Choice) -> str | None:
    return None if choice.finish is None else choice.finish.reason


def test_thoughts_answer_and_calls() -> None:
    said = f"<think>\nThey want f.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
    choice, events = answer(ScriptedEngine(saying(ids(said))), tools=TOOLS)
    assert (choice.reasoning, choice.text) == ("They want f.", "Let me see.")
    assert [(call.name, call.arguments) for call in choice.tool_calls] == [("f", '{"a": "<b>"}')] * 2
    assert len({call.id for call in choice.tool_calls}) == 2
    assert reason(choice) == "tool_calls"
    begins = [event.index for event in events if isinstance(event, ToolCallBegin)]
    ends = [event.index for event in events if isinstance(event, ToolCallEnd)]
    assert begins == ends == [0, 1]
    assert choice.token_ids == ids(said)
    assert isinstance(events[-1], TextDone)
    thought = ids("<think>\nThey want f.\n</think>")
    assert abs(events[-1].usage.reasoning_tokens - len(thought)) <= len(ids("<think>"))


def test_thoughts_that_the_prompt_has_opened() -> None:
    choice, events = answer(ScriptedEngine(saying(ids("hm\n</think>\n\nYes"))), OPENS)
    assert (choice.reasoning, choice.text, reason(choice)) == ("hm", "Yes", "stop")
    kinds = [event.kind for event in events if isinstance(event, TextDelta) and event.text]
    assert kinds == sorted(kinds, reverse=True)


def test_an_answer_that_is_cut_while_it_thinks() -> None:
    choice, _ = answer(ScriptedEngine(saying(ids("hm"), stop_id=None)), OPENS)
    assert (choice.reasoning, choice.text, reason(choice)) == ("hm", "", "length")


@pytest.mark.parametrize("cut", range(1, len(CALL), 7))
def test_a_call_that_is_cut_ends_with_length(cut: int) -> None:
    choice, events = answer(ScriptedEngine(saying(ids(CALL[:cut]), stop_id=None)), tools=TOOLS)
    assert reason(choice) == "length"
    num_ends = sum(isinstance(event, ToolCallEnd) for event in events)
    assert num_ends == len(choice.tool_calls)
    told = choice.text + "".join(call.arguments for call in choice.tool_calls)
    assert told in CALL
    assert bool(choice.finish.warnings) == (len("<tool_call>") <= cut < CALL.index("\n</tool_call>"))  # type: ignore[union-attr]


def test_a_broken_call_is_text_with_a_warning() -> None:
    said = 'So: <tool_call>{"name": "f", arguments}</tool_call> ok'
    choice, _ = answer(ScriptedEngine(saying(ids(said))), tools=TOOLS)
    assert (choice.text, choice.tool_calls, reason(choice)) == (said, (), "stop")
    assert "tool call" in choice.finish.warnings[0]  # type: ignore[union-attr]


def test_without_tools_and_with_none_the_text_stays_as_it_is() -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": ToolChoice(mode="none")}):
        engine = ScriptedEngine(saying(ids(CALL)))
        choice, _ = answer(engine, **fields)
        assert (choice.text, choice.tool_calls, reason(choice)) == (CALL, (), "stop")
        assert engine.requests[0].prompt_ids == ScriptedIds.without_tools


class ScriptedIds:
    """The prompt that shows no tools."""

    engine = ScriptedEngine(saying(ids("x")))
    answer(engine)
    without_tools = engine.requests[0].prompt_ids


def test_only_the_named_tools_are_called() -> None:
    engine = ScriptedEngine(saying(ids(CALL)))
    choice, _ = answer(engine, tools=TOOLS, tool_choice=ToolChoice(names=("g",)))
    assert (choice.text, choice.tool_calls) == (CALL, ())
    assert engine.requests[0].prompt_ids != ScriptedIds.without_tools


def test_one_call_ends_the_answer_where_only_one_may_be_made() -> None:
    engine = ScriptedEngine(saying(ids(f"{CALL}\n{CALL}")))
    choice, events = answer(engine, tools=TOOLS, parallel_tool_calls=False)
    assert (len(choice.tool_calls), choice.text, reason(choice)) == (1, "", "tool_calls")
    assert engine.aborts == [("r", 0)]
    assert isinstance(events[-2], TextFinish)
    assert events[-1].usage.completion_tokens <= len(ids(CALL))  # type: ignore[union-attr]


def test_thinking_is_switched_as_the_template_has_it() -> None:
    engines = [ScriptedEngine(saying(ids("x"))) for _ in range(3)]
    answer(engines[0], thinking=False)
    answer(engines[1], reasoning_effort="none")
    answer(engines[2], template_kwargs={"enable_thinking": False})
    assert engines[0].requests[0].prompt_ids == engines[2].requests[0].prompt_ids
    assert engines[1].requests[0].prompt_ids == engines[2].requests[0].prompt_ids
    assert engines[0].requests[0].prompt_ids != ScriptedIds.without_tools


def test_logprobs_are_those_of_all_tokens() -> None:
    said = f"<think>a b</think> c {CALL}"
    engine = ScriptedEngine(saying(ids(said), logprobs=True))
    choice, _ = answer(engine, tools=TOOLS, sampling=SamplingParams(logprobs=1))
    assert [token.id for token in choice.tokens] == choice.token_ids == ids(said)


def test_choices_have_parsers_of_their_own() -> None:
    def script(request: Any) -> list[Any]:
        texts = ids(CALL), ids("Hi")
        events: list[Any] = [TokenEvent("r", c, id) for c, text in enumerate(texts) for id in text]
        return [*events, Finish("r", 0, "stop", 2), Finish("r", 1, "stop", 2)]

    _, events = answer(ScriptedEngine(script), tools=TOOLS, sampling=SamplingParams(n=2))
    reasons = {event.choice: event.reason for event in events if isinstance(event, TextFinish)}
    assert reasons == {0: "tool_calls", 1: "stop"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": (Tool(name="f"), Tool(name="f"))}, "tools"),
        ({"tools": (Tool(name="f g"),)}, "tools"),
        ({"tools": tuple(Tool(name=f"f{i}") for i in range(129))}, "tools"),
        ({"tools": TOOLS, "tool_choice": ToolChoice(names=("h",))}, "tool_choice"),
        ({"tool_choice": ToolChoice(mode="required")}, "tool_choice"),
        ({"reasoning_budget": -1}, "reasoning_budget"),
    ],
)
def test_what_no_chat_could_have_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        answer(ScriptedEngine(saying(ids("x"))), **fields)
    assert caught.value.param == param


class Taught(ScriptedEngine):
    """An engine that knows the vocabulary, and that cannot enforce some of a grammar."""

    has_vocabulary = True
    warnings: tuple[str, ...] = ()

    async def submit(self, request: EngineRequest) -> AsyncIterator[Event]:
        async for event in super().submit(request):
            yield Accepted(request.id, self.warnings) if isinstance(event, Accepted) else event


UNIQUE = Grammar(kind="json_schema", text='{"uniqueItems": true}', param="response_format.schema", is_strict=False)


def test_what_is_enforced_reaches_the_engine() -> None:
    engine = Taught(saying(ids("x")))
    answer(engine, OPENS, reasoning_budget=9)
    answer(engine, OPENS, thinking=False)
    answer(engine, THINKS, tools=TOOLS, tool_choice=ToolChoice(mode="required"))
    answer(engine, THINKS, tools=TOOLS)
    budget, off, called, free = engine.requests
    assert budget.thinking == Thinking(open="<think>", close="</think>", is_open=True, budget=9)
    assert (budget.grammar, off.thinking and off.thinking.budget) == (None, 0)
    assert called.grammar is not None
    assert (called.grammar.kind, called.grammar.param) == ("lark", "tools")
    assert called.thinking == Thinking(open="<think>", close="</think>", is_open=False)
    assert (free.grammar, free.thinking) == (None, None)


def test_what_is_not_enforced_and_not_fulfilled_is_told() -> None:
    engine = Taught(saying(ids("[1, 1]")))
    engine.warnings = ('Unimplemented keys: ["uniqueItems"]',)
    choice, _ = answer(engine, grammar=UNIQUE)
    told, fault = choice.finish.warnings  # type: ignore[union-attr]
    assert "response_format.schema" in told
    assert "uniqueItems" in told
    assert "non-unique" in fault


def test_a_whole_answer_under_a_grammar_that_does_not_fulfil_its_schema_is_logged(caplog) -> None:
    strict = msgspec.structs.replace(UNIQUE, is_strict=True)
    choice, _ = answer(Taught(saying(ids("[1, 1]"))), grammar=strict)
    assert len(choice.finish.warnings) == 1  # type: ignore[union-attr]
    assert "request r" in caplog.text
    assert "1, 1" not in caplog.text
    caplog.clear()
    cut, _ = answer(Taught(saying(ids("[1, 1"), stop_id=None)), grammar=strict)
    assert (cut.finish.warnings, caplog.text) == ((), "")  # type: ignore[union-attr]


def test_thoughts_cannot_have_a_budget_in_a_beam_search() -> None:
    with pytest.raises(InvalidRequest, match="reasoning_budget") as caught:
        answer(Taught(saying(ids("x"))), OPENS, reasoning_budget=3, sampling=SamplingParams(use_beam_search=True))
    assert caught.value.param == "reasoning_budget"
