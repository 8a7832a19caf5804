"""The dialect of llama.cpp's server, by what is on the wire."""

from __future__ import annotations

import json

import httpx2 as httpx
import pytest

from pelton.errors import ContextLengthExceeded
from pelton.pool import Preset
from pelton.request import Grammar, TextDelta, TextFinish
from tests.server.scripted import ScriptedPool, ScriptedService, serving_pool


def post(url: str, path: str, **body: object) -> httpx.Response:
    return httpx.post(url + path, json=body)


def test_a_completion(url):
    whole = post(url, "/completion", prompt="Hi\n<end>", n_predict=9, return_tokens=True, model="scripted").json()
    timings = whole.pop("timings")
    settings = whole.pop("generation_settings")
    assert whole == {
        "index": 0, "content": "Hello 🦙", "tokens": [7, 7, 7], "id_slot": -1, "stop": True, "model": "scripted",
        "tokens_predicted": 3, "tokens_evaluated": 5, "tokens_cached": 2, "prompt": "<s>Hi\n<end>",
        "has_new_line": False, "truncated": False, "stop_type": "word", "stopping_word": "END",
    }  # fmt: skip
    assert (settings["n_predict"], settings["temperature"], settings["n_ctx"]) == (9, 0.8, 99)
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (2, 3, 3)
    assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 3)
    assert timings["prompt_per_second"] == pytest.approx(3000 / timings["prompt_ms"])


def test_a_stream(url):
    response = post(url, "/completions", prompt="Hi", stream=True, n_probs=2, timings_per_token=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = [json.loads(piece.removeprefix("data: ")) for piece in response.text.strip().split("\n\n")]
    assert [(each["content"], each["stop"], each["tokens_predicted"]) for each in chunks] == [
        ("Hel", False, 1), ("lo", False, 2), (" 🦙", False, 3), ("", True, 3),
    ]  # fmt: skip
    (prob,) = chunks[0]["completion_probabilities"]
    assert (prob["id"], prob["token"], prob["bytes"]) == (7, "Hel", [72, 101, 108])
    assert [each["token"] for each in prob["top_logprobs"]] == ["Hel", "x"]
    assert chunks[1]["timings"]["predicted_n"] == 2
    assert chunks[-1]["stop_type"] == "word"
    assert chunks[-1]["timings"]["cache_n"] == 2


def test_what_was_asked_reaches_the_service(url, service):
    post(
        url, "/completion", prompt="Hi", n_predict=4, temperature=-1, top_k=5, top_p=0.5, min_p=0.2, typical_p=0.9,
        repeat_penalty=1.2, mirostat=2, seed=7, stop=["a", "b"], ignore_eos=True, n_probs=3, cache_salt="s",
        logit_bias=[[5, -1.5], [6, False]], grammar='root ::= "a"', dry_multiplier=0.5,
    )  # fmt: skip
    (request,) = service.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 5, 0.5, 0.2)
    assert (sampling.typical_p, sampling.repetition_penalty, sampling.mirostat_mode) == (0.9, 1.2, 2)
    assert (sampling.max_tokens, sampling.seed, sampling.stop, sampling.ignore_eos) == (4, 7, ("a", "b"), True)
    assert (sampling.logprobs, sampling.logit_bias, sampling.dry_multiplier) == (3, {5: -1.5, 6: -100}, 0.5)
    assert request.grammar == Grammar(kind="gbnf", text='root ::= "a"', param="grammar")
    assert (request.cache_salt, request.prompt_ids) == ("s", (256, *b"Hi"))


def test_defaults_are_llama_cpps(url, service):
    post(url, "/completion", prompt="Hi")
    sampling = service.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.8, 40, 0.95, 0.05)
    assert (sampling.max_tokens, sampling.seed, sampling.logprobs) == (None, None, None)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 2], [(1, 2)]),
        ([1, "a<end>", 2], [(1, 97, 257, 2)]),
        (["a", 2], [(256, 97, 2)]),
        (["a", "<s>b"], [(256, 97), (256, 98)]),
        ([[1, "a"], [2], "b"], [(1, 97), (2,), (256, 98)]),
    ],
)
def test_prompts_of_texts_and_tokens(url, service, prompt, expected):
    answer = post(url, "/completion", prompt=prompt, n_cmpl=2).json()
    assert sorted(request.prompt_ids for request in service.requests) == sorted(expected)
    assert [each["index"] for each in answer] == list(range(2 * len(expected)))


@pytest.mark.parametrize(
    ("finish", "asked", "expected"),
    [
        (TextFinish(choice=0, reason="stop"), 9, ("eos", "", False)),
        (TextFinish(choice=0, reason="length"), 1, ("limit", "", False)),
        (TextFinish(choice=0, reason="length"), 9, ("limit", "", True)),
    ],
)
def test_how_it_stopped(url, service, finish, asked, expected):
    service.events = (TextDelta(choice=0, text="x\n", token_ids=(1,)), finish)
    answer = post(url, "/completion", prompt="Hi", n_predict=asked).json()
    assert (answer["stop_type"], answer["stopping_word"], answer["truncated"]) == expected
    assert answer["has_new_line"]


def test_nothing_to_say_computes_the_prompt(url, service):
    assert post(url, "/completion", prompt="Hi", n_predict=0).status_code == 200
    assert (service.requests[0].sampling.max_tokens, service.requests[0].echo) == (0, True)


def test_infill(url, service):
    extra = [{"filename": "a.py", "text": "A"}]
    post(url, "/infill", input_prefix="p", input_suffix="s", prompt="m", input_extra=extra, n_predict=3)
    assert bytes(service.requests[0].prompt_ids) == b"a.py:A|p|s|m"
    assert service.requests[0].sampling.max_tokens == 3


def test_tokens(url):
    assert post(url, "/tokenize", content="<s>é").json() == {"tokens": [256, 195, 169]}
    assert post(url, "/tokenize", content="<s>", parse_special=False).json() == {"tokens": [60, 115, 62]}
    assert post(url, "/tokenize", content="a", add_special=True).json() == {"tokens": [256, 97]}
    pieces = post(url, "/tokenize", content="<end>é", with_pieces=True, colour=1).json()
    assert pieces == {
        "tokens": [{"id": 257, "piece": "<end>"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}],
        "ignored_params": ["colour"],
    }
    assert post(url, "/detokenize", tokens=[256, 195, 169]).json() == {"content": "<s>é"}
    assert post(url, "/detokenize", tokens=[300]).json()["error"]["type"] == "invalid_request_error"


def test_templates(url):
    messages = [{"role": "user", "content": "Hi"}]
    assert post(url, "/apply-template", messages=messages).json() == {"prompt": "<user>Hi<assistant>"}
    answer = post(url, "/apply-template", messages=messages, add_generation_prompt=False)
    assert answer.json() == {"prompt": "<user>Hi"}


def test_props_and_slots(url, service):
    service.engine.counters.num_running = 1
    props = httpx.get(f"{url}/props").json()
    assert (props["total_slots"], props["model_path"], props["model_alias"]) == (3, "scripted.gguf", "scripted")
    assert (props["bos_token"], props["eos_token"], props["chat_template"]) == ("<s>", "<end>", "{{ messages }}")
    assert props["default_generation_settings"]["n_ctx"] == 99
    assert props["default_generation_settings"]["params"]["top_k"] == 40
    slots = httpx.get(f"{url}/slots").json()
    assert [(slot["id"], slot["is_processing"], slot["n_ctx"]) for slot in slots] == [
        (0, True, 99), (1, False, 99), (2, False, 99),
    ]  # fmt: skip
    service.engine.counters.num_running = 3
    response = httpx.get(f"{url}/slots", params={"fail_on_no_slot": 1})
    assert (response.status_code, response.json()["error"]["type"]) == (503, "unavailable_error")


def test_a_prompt_of_more_parts_than_the_context_has_tokens_is_not_encoded(url):
    error = post(url, "/completion", prompt=[5, "x"] * 50).json()["error"]
    assert (error["type"], error["param"]) == ("exceed_context_size_error", "prompt")
    assert "100 texts and ids" in error["message"]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [5, 258]}, "prompt"),
        ({"prompt": [5, -1]}, "prompt"),
        ({"prompt": {"prompt_string": "x"}}, "prompt"),
        ({"n_cmpl": 10**9}, "n_cmpl"),
        ({"dynatemp_range": 0.5}, "dynatemp_range"),
        ({"logit_bias": [["word", 1]]}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": [[1, True]]}, "logit_bias"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_is_wrong_is_named(url, wrong, param):
    response = post(url, "/completion", **{"prompt": "Hi", **wrong})
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (response.status_code, param)
    assert response.status_code == (404 if param == "model" else 400)
    assert error["type"] == ("not_found_error" if param == "model" else "invalid_request_error")


def test_errors(url, service):
    service.refuse = ContextLengthExceeded("too long")
    assert post(url, "/completion", prompt="Hi").json()["error"]["type"] == "exceed_context_size_error"
    service.refuse = None
    service.fail_after = 1
    pieces = post(url, "/completion", prompt="Hi", stream=True).text.strip().split("\n\n")
    assert json.loads(pieces[-1].removeprefix("data: "))["error"] == {
        "code": 500, "message": "the engine broke", "type": "server_error",
    }  # fmt: skip


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/score"])
def test_what_is_not_built_says_so(url, path):
    response = post(url, path, query="x", documents=["y"])
    assert (response.status_code, response.json()["error"]["type"]) == (501, "not_supported_error")
    assert "scores pairs" in response.json()["error"]["message"]


def test_what_only_describes_a_model_loads_none():
    pool = ScriptedPool(ScriptedService())
    pool.services = list  # type: ignore[method-assign]
    with serving_pool(pool) as url:  # type: ignore[arg-type]
        props = httpx.get(f"{url}/props?model=scripted").json()
        assert (props["is_sleeping"], props["total_slots"], props["model_path"]) == (True, 0, "a test")
        assert httpx.get(f"{url}/slots?model=scripted").json() == []
        info = httpx.get(f"{url}/info?model=scripted").json()
        assert (info["max_total_tokens"], info["model_sha"]) == (99, None)
    assert pool.kept == []


def test_the_models_own_parameters_stand_in_for_what_is_not_given(url, service):
    service.preset = Preset(parameters={"temperature": 0.1, "top_k": 3, "num_predict": 9, "stop": ["x"]})
    answer = httpx.post(url + "/completion", json={"prompt": "Hi", "top_k": 40, "seed": 1}).json()
    sampling = service.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.stop) == (0.1, 40, 9, ("x",))
    shown = answer["generation_settings"]
    assert (shown["temperature"], shown["top_k"], shown["n_predict"], shown["stop"]) == (0.1, 40, 9, ["x"])
    assert (shown["top_p"], shown["seed"], shown["repeat_penalty"]) == (0.95, 1, 1.0)
