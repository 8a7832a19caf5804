from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton import LLM, SamplingParams
from pelton.errors import InvalidRequest, ModelNotFound, Unavailable
from pelton.llm import Result
from pelton.request import EngineRequest, Event, Finish, Logprob, Message, TokenEvent
from pelton.text.tokenizer import Tokenizer
from tests.unit.scripted_engine import Client
from tests.unit.vocabularies import byte_level, write_model


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


def echo(request: EngineRequest) -> list[Event]:
    """Every choice says the prompt's text again."""
    events: list[Event] = []
    wants = request.sampling.logprobs is not None
    for choice in range(request.sampling.n):
        for id in request.prompt_ids:
            events.append(TokenEvent(request.id, choice, id, -1.0 if wants else None, (Logprob(id, -1.0),) * wants))
        events.append(Finish(request.id, choice, "stop", 2))
    return events


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    Client.stand_in(monkeypatch, echo)
    return write_model(tmp_path / "m.gguf")


def texts(results: list[Result]) -> list[str]:
    return [result.text for result in results]


def test_generate(model: str) -> None:
    with LLM(model) as llm:
        assert texts(llm.generate("Hello there")) == ["Hello there"]
        prompts = [f"prompt number {i}" for i in range(200)]
        assert texts(llm.generate(prompts)) == prompts
        ids = tokenizer().encode("as ids", add_special=False)
        assert texts(llm.generate(ids)) == texts(llm.generate([ids])) == ["as ids"]
        assert llm.generate([]) == []
        each = [SamplingParams(n=1), SamplingParams(n=2, logprobs=1, stop=("two",))]
        one, two = llm.generate(["one", "two two"], each)
        assert (len(one.outputs), one.logprobs, one.finish_reason) == (1, None, "stop")
        assert one.token_ids == tuple(tokenizer().encode("one", add_special=False))
        assert [(output.index, output.text, output.stop) for output in two.outputs] == [(0, "", "two"), (1, "", "two")]
        assert two.logprobs is not None
        assert two.logprobs[0].top[0].id == two.logprobs[0].id == two.token_ids[0]
        assert one.usage.completion_tokens == len(one.token_ids) + 1
    assert Client.made[0].is_closed


def test_only_where_no_parameters_are_given_the_models_own_hold(model: str) -> None:
    with LLM(model) as llm:
        (free,) = llm._requests([{"prompt": "Hi"}], None)
        (given,) = llm._requests([{"prompt": "Hi"}], SamplingParams())
    assert {"temperature", "stop"} <= set(free.left_open)
    assert given.left_open == ()


def test_sampling_parameters_are_what_their_types_say(model: str) -> None:
    """A lone stop string is one string, not as many as it has letters."""
    alone: Any = "END"
    with LLM(model) as llm:
        [answer] = llm.generate(["NOT AN END of it"], SamplingParams(stop=alone))
        assert (answer.text, answer.outputs[0].stop) == ("NOT AN ", "END")
        assert llm.generate(["NOT AN END of it"], SamplingParams(stop=["END"])) == [answer]  # type: ignore[arg-type]
        wrong: list[Any] = [{"n": 1}, "x", SamplingParams(n="2"), SamplingParams(temperature=None)]  # type: ignore[arg-type]
        wrong += [SamplingParams(stop=(5,)), SamplingParams(stop_token_ids=(1.5,))]  # type: ignore[arg-type]
        for params in wrong:
            with pytest.raises(InvalidRequest, match="sampling_params"):
                llm.generate(["x"], params if isinstance(params, SamplingParams) else [params])


def test_prompts_of_wrong_types_never_reach_the_engine(model: str) -> None:
    ids: Any = np.array(tokenizer().encode("as ids", add_special=False))
    with LLM(model) as llm:
        assert texts(llm.generate([ids])) == ["as ids"]
        wrong: list[Any] = [[1.5], 5, None, ["a", [2]]]
        for prompt in wrong:
            with pytest.raises(InvalidRequest, match="a text or a sequence of token ids"):
                llm.generate(["fine", prompt])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_is_told_that_the_model_is_not_its_own(model: str) -> None:
    with LLM(model) as llm:
        child = os.fork()
        if child == 0:
            said = b""
            with suppress(BaseException):
                try:
                    llm.generate("x")
                except Unavailable as error:
                    said = str(error).encode()
                llm.close()
            os._exit(b"forked" in said)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        assert texts(llm.generate("still here")) == ["still here"]


def test_chat(model: str) -> None:
    with LLM(model) as llm:
        conversation = [{"role": "user", "content": "Hi"}]
        [answer] = llm.chat(conversation)
        assert answer.text == "user\nHi\nassistant\n"
        assert llm.chat([Message(role="user", content="Hi")]) == [answer]
        assert llm.chat([conversation, conversation]) == [answer, answer]
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
        assert llm.chat(parts, add_generation_prompt=False)[0].text == "user\nHi\n"
        for wrong in ([{"content": "x"}], [{"role": "user", "content": 5}], [{"role": "user"}], [[]]):
            with pytest.raises(InvalidRequest):
                llm.chat(wrong)


def test_one_wrong_prompt_ends_the_batch(model: str) -> None:
    with LLM(model) as llm:
        with pytest.raises(InvalidRequest, match="empty"):
            llm.generate(["fine", "", "fine"])
        with pytest.raises(InvalidRequest, match="2 prompts, but 3 sampling_params"):
            llm.generate(["a", "b"], [SamplingParams()] * 3)
        assert Client.made[0].num_open == 0
        assert texts(llm.generate("again")) == ["again"]


def test_several_threads(model: str) -> None:
    with LLM(model) as llm:
        results: dict[int, list[str]] = {}
        work = lambda i: results.update({i: texts(llm.generate([f"{i} a", f"{i} b"]))})  # noqa: E731
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {i: [f"{i} a", f"{i} b"] for i in range(8)}


def test_closing(model: str) -> None:
    llm = LLM(model, in_process=True, threads=2)
    assert Client.made[0].arguments[1:][1] is True
    assert Client.made[0].arguments[1].threads == 2
    llm.close()
    llm.close()
    with pytest.raises(Unavailable, match="closed"):
        llm.generate("x")
    with pytest.raises(ModelNotFound):
        LLM(model + "x.gguf")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pelton /")]


def test_what_is_not_closed_is_closed_when_it_is_forgotten(model: str) -> None:
    llm = LLM(model)
    assert texts(llm.generate("x")) == ["x"]
    del llm
    gc.collect()
    assert Client.made[0].is_closed
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pelton /")]


def test_closing_ends_the_calls_of_other_threads(model: str) -> None:
    llm = LLM(model)
    Client.made[0].hangs = True
    raised: list[BaseException] = []

    def call() -> None:
        try:
            llm.generate("x")
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    while not Client.made[0].num_open:
        time.sleep(0.001)
    llm.close()
    thread.join(5)
    assert not thread.is_alive()
    assert raised


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_is_shown_on_a_terminal_only(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(model) as llm:
        seen = {}
        for name, stream, flag in (
            ("tty", Terminal(), True),
            ("off", Terminal(), False),
            ("pipe", io.StringIO(), True),
        ):
            monkeypatch.setattr(sys, "stderr", stream)
            llm.generate(["a", "b"], use_tqdm=flag)
            seen[name] = stream.getvalue()
        assert "2/2 prompts" in seen["tty"]
        assert seen["off"] == seen["pipe"] == ""


def test_importing_pelton_imports_nothing_else() -> None:
    code = "import sys, pelton; print([m for m in sys.modules if m.split('.')[0] in sys.argv[1:] or 'pelton.' in m])"
    heavy = ["numpy", "msgspec", "tokenizers", "minijinja", "rich", "asyncio", "huggingface_hub"]
    result = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_library_imports_nothing_before_it_needs_it() -> None:
    code = "import sys; from pelton import LLM; print([m for m in sys.argv[1:] if m in sys.modules])"
    lazy = [
        "numpy",
        "tokenizers",
        "minijinja",
        "rich",
        "huggingface_hub",
        "pelton._core",
        "pelton.engine.engine",
    ]
    result = subprocess.run([sys.executable, "-c", code, *lazy], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
