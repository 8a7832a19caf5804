"""Templates and schemas that would take all time or memory: ended, named, and nobody else waits for them."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from pelton import confined
from pelton.confined import Confined, Limits
from pelton.errors import InternalError, Unavailable
from pelton.text import enforcement
from pelton.text import template as templates
from pelton.text.enforcement import Enforcement
from pelton.text.output import Format
from pelton.text.sandbox import LIMITS, MAX_CHILDREN, Check, Made, Refused, Render, Sandbox, Validate
from pelton.text.template import Template, TooCostly


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """One whose time is soon over."""
    each = Sandbox(LIMITS._replace(cpu_seconds=0.5))
    monkeypatch.setattr(templates, "sandbox", each)
    monkeypatch.setattr(enforcement, "sandbox", each)
    yield each
    each.close()


def growing(start: str, step: str, shown: str) -> str:
    return (
        f"{{% set n = namespace(x={start}) %}}{{% for i in range(99) %}}{{% set n.x = {step} %}}{{% endfor %}}{shown}"
    )


LISTS = growing("[1, 2]", "n.x + n.x", "{{ n.x | length }}")
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (LISTS, "0.5 s of processor time"),
        (growing("[1]", "[n.x, n.x]", "{{ n.x }}"), "0.5 s of processor time"),
        ("{% macro f(x) %}{{ f([x]) }}{% endmacro %}{{ f(1) }}", "recursion limit"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "."),
    ],
)
def test_a_template_that_takes_too_much_is_ended(sandbox: Sandbox, source: str, what: str):
    with pytest.raises(templates.InvalidRequest, match=f"the request's chat template (takes over|fails).*{what}"):
        Template(source, "the request's chat template").run(messages=MESSAGES)
    assert Template("{{ messages[0].content }}").run(messages=MESSAGES) == "hi"


def test_memory_is_bounded():
    little = Sandbox(Limits(cpu_seconds=30, memory_bytes=300 << 20))
    result = little.do(Render("{{ messages[0].content * 9000000 }}" * 9, [{"messages": MESSAGES}]))
    assert result == Refused("takes over 300 MiB of memory", "too much")
    little.close()


def test_others_go_on_meanwhile():
    each = Sandbox(LIMITS._replace(cpu_seconds=2))
    second = each._take()
    each.start()
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(each.do(Render(LISTS, [{}]))))
    thread.start()
    while each._idle:
        time.sleep(0.001)
    each._give(second)
    assert each.do(Render("{{ a }}", [{"a": 1}, {"a": 2}])) == Made(["1", "2"])
    assert thread.is_alive()
    thread.join()
    assert results == [Refused("takes over 2 s of processor time", "too much")]
    each.close()


def test_so_many_work_at_once_and_no_more(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch):
    working: list[int] = []
    most = 0

    def ask(self: Confined, message: bytes) -> bytes:
        nonlocal most
        working.append(1)
        most = max(most, len(working))
        time.sleep(0.01)
        working.pop()
        return msgspec.msgpack.encode(Made())

    monkeypatch.setattr(Confined, "ask", ask)
    with ThreadPoolExecutor(3 * MAX_CHILDREN) as threads:
        assert list(threads.map(sandbox.do, [Check("")] * 3 * MAX_CHILDREN)) == [Made()] * 3 * MAX_CHILDREN
    assert most == MAX_CHILDREN


def test_a_child_that_is_killed_is_started_again_and_at_most_one_is_kept(sandbox: Sandbox):
    sandbox.start()
    (child,) = sandbox._idle
    assert sandbox.do(Check("{{ 1 }}")) == Made()
    assert sandbox._idle == [child]
    assert child._child is not None
    child._child.send_signal(signal.SIGTERM)  # as service managers do, to all of a service's processes
    child._child.send_signal(signal.SIGSTOP)
    threading.Timer(0.1, child._child.kill).start()
    with pytest.raises(InternalError, match="exit status -9"):
        sandbox.do(Check("{{ 1 }}"))
    assert sandbox.do(Check("{{ 1 }}")) == Made()
    assert sandbox._idle == [child]
    idle = child._child
    idle.kill()
    os.waitid(os.P_PID, idle.pid, os.WEXITED | os.WNOWAIT)
    assert sandbox.do(Check("{{ 1 }}")) == Made()
    first, second = sandbox._take(), sandbox._take()
    sandbox._give(first)
    sandbox._give(second)
    assert sandbox._idle == [first]


def test_what_no_template_can_be_given(sandbox: Sandbox):
    with pytest.raises(templates.InvalidRequest, match="chat template cannot be given"):
        Template("{{ x }}").run(x=1 << 70)
    deep: dict[str, Any] = {}
    for _ in range(700):
        deep = {"a": deep}
    assert Template("{{ x | length }}").run(x=deep) == "1"
    (fault,) = Enforcement(form=Format(), schema=deep).faults("1", [])
    assert fault.endswith("it cannot be checked: this cannot be given what is nested so deep")


def test_nobody_gets_the_answer_to_another(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch):
    assert sandbox.do(Render("{{ 1 }}", [{}])) == Made(["1"])

    def no_memory(source: object, count: int) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(confined, "_exactly", no_memory)
        with pytest.raises(MemoryError):
            sandbox.do(Render("{{ 2 }}", [{}]))
    assert sandbox.do(Render("{{ 3 }}", [{}])) == Made(["3"])


def test_where_no_process_can_be_started_the_request_says_so(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch):
    def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(confined.subprocess, "Popen", none_left)
        sandbox.start()
        with pytest.raises(Unavailable, match=r"cannot be started: .*Too many open files"):
            sandbox.do(Check("{{ 1 }}"))
    assert sandbox.do(Check("{{ 1 }}")) == Made()


def test_a_schema_whose_check_takes_for_ever_is_a_fault(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch):
    asked = Enforcement(form=Format(), schema={"type": "array"})
    assert asked.has_schemas
    assert asked.faults("[]", []) == []
    assert asked.faults("{}", []) == ["the answer does not fulfil its schema: at $: {} is not of type 'array'"]
    digits = "[" + "9" * 4000 + "]"  # which Python refuses to read
    assert "JSON" in asked.faults(digits + "," + digits, [])[0]
    child = Sandbox(Limits(cpu_seconds=0.05, memory_bytes=1 << 30))
    monkeypatch.setattr(enforcement, "sandbox", child)
    (fault,) = asked.faults("[" + "[]," * 5_000_000 + "[]]", [])
    assert fault.endswith("it cannot be checked: this takes over 0.05 s of processor time")
    child.close()
    assert sandbox.do(Validate("1", True)) == Made()


def test_a_closed_one_is_not_started_again():
    child = Confined("pelton.text.sandbox", LIMITS)
    child.start()
    child.close()
    with pytest.raises(InternalError, match="closed"):
        child.ask(b"")


def test_fuel_is_counted_too():
    with pytest.raises(TooCostly):
        Template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}").run()
