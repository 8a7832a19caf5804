"""The dialect of text-generation-inference, by what is on the wire."""

from __future__ import annotations

import json

import httpx2 as httpx
import pytest

from pelton.errors import Overloaded
from pelton.request import TextDelta, TextFinish, TextPrompt
from tests.server.scripted import token


def post(url: str, path: str, inputs: str = "Hi", **parameters: object) -> httpx.Response:
    return httpx.post(url + path, json={"inputs": inputs, "parameters": parameters})


def test_an_answer_in_one_piece(url, service):
    assert post(url, "/generate").json() == {"generated_text": "Hello 🦙", "details": None}
    assert post(url, "/generate", return_full_text=True).json()["generated_text"] == "HiHello 🦙"
    details = post(url, "/generate", details=True, top_n_tokens=1, do_sample=True, seed=5).json()["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("stop_sequence", 3, 5)
    assert details["tokens"][0] == {"id": 7, "text": "Hel", "logprob": -0.1, "special": False}
    assert [[each["text"] for each in top] for top in details["top_tokens"]] == [["Hel"], ["lo"], [" 🦙"]]
    assert details["prefill"] == []


def test_details_of_the_prompt(url, service):
    prompt = TextPrompt(text="Hi", texts=("H", "i"), tokens=(token("i"),))
    service.events = (prompt, TextDelta(choice=0, text="x"), TextFinish(choice=0, reason="stop"))
    details = post(url, "/generate", decoder_input_details=True).json()["details"]
    assert [(each["text"], each["logprob"]) for each in details["prefill"]] == [("H", None), ("i", -0.1)]
    assert details["finish_reason"] == "eos_token"
    assert service.requests[0].sampling.prompt_logprobs == 0


def test_a_stream(url):
    response = post(url, "/generate_stream", top_n_tokens=2)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(piece.removeprefix("data: ")) for piece in response.text.strip().split("\n\n")]
    assert [(each["index"], each["token"]["text"], each["generated_text"]) for each in events] == [
        (1, "Hel", None), (2, "lo", None), (3, " 🦙", "Hello 🦙"),
    ]  # fmt: skip
    assert [each["text"] for each in events[0]["top_tokens"]] == ["Hel", "x"]
    assert events[0]["details"] is None
    assert events[-1]["details"] == {
        "finish_reason": "stop_sequence", "generated_tokens": 3, "input_length": 3, "seed": None,
    }  # fmt: skip


def test_a_stream_of_nothing_ends(url, service):
    service.events = (TextFinish(choice=0, reason="stop"),)
    (event,) = post(url, "/generate_stream").text.strip().split("\n\n")
    told = json.loads(event.removeprefix("data: "))
    assert (told["generated_text"], told["token"]["special"]) == ("", True)
    assert told["details"]["finish_reason"] == "eos_token"


def test_what_was_asked_reaches_the_service(url, service):
    post(
        url, "/generate", inputs="abc<end>", temperature=0.5, top_k=3, top_p=0.9, typical_p=0.8, seed=4, stop=["x"],
        repetition_penalty=1.1, frequency_penalty=0.2, max_new_tokens=7, best_of=2, truncate=3,
        grammar={"type": "regex", "value": "a+"},
    )  # fmt: skip
    (request,) = service.requests
    sampling = request.sampling
    assert request.prompt_ids == (98, 99, 257)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.typical_p) == (0.5, 3, 0.9, 0.8)
    assert (sampling.seed, sampling.stop, sampling.max_tokens, sampling.best_of) == (4, ("x",), 7, 2)
    assert (sampling.repetition_penalty, sampling.frequency_penalty) == (1.1, 0.2)
    assert (request.grammar.kind, request.grammar.text) == ("regex", "a+")
    assert sampling.logprobs is None


@pytest.mark.parametrize(
    ("asked", "temperature"), [({}, 0), ({"do_sample": True}, 1), ({"top_k": 5}, 1), ({"temperature": 0.7}, 0.7)]
)
def test_it_draws_only_where_that_was_asked(url, service, asked, temperature):
    post(url, "/generate", **asked)
    assert service.requests[0].sampling.temperature == temperature
    assert service.requests[0].sampling.max_tokens == 100


def test_schemas_as_text_and_as_json(url, service):
    for value in ({"type": "object"}, '{"type": "object"}'):
        post(url, "/generate", grammar={"type": "json", "value": value})
    assert {request.grammar.text for request in service.requests} == {'{"type":"object"}'}


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("/generate", {"temperature": 0}),
        ("/generate", {"max_new_tokens": 0}),
        ("/generate", {"watermark": True}),
        ("/generate", {"adapter_id": "x"}),
        ("/generate", {"grammar": {"type": "json", "value": "{"}}),
        ("/generate", {"grammar": {"type": "regex", "value": 5}}),
        ("/generate_stream", {"best_of": 2}),
        ("/generate_stream", {"decoder_input_details": True}),
    ],
)
def test_what_is_wrong_is_a_422(url, path, wrong):
    response = post(url, path, **wrong)
    assert (response.status_code, response.json()["error_type"]) == (422, "validation")


def test_errors(url, service):
    service.refuse = Overloaded("full")
    response = post(url, "/generate")
    assert (response.status_code, response.json()) == (429, {"error": "full", "error_type": "overloaded"})
    service.refuse = None
    service.fail_after = 1
    pieces = post(url, "/generate_stream").text.strip().split("\n\n")
    assert json.loads(pieces[-1].removeprefix("data: ")) == {"error": "the engine broke", "error_type": "generation"}


def test_what_is_ignored_is_listed(url):
    assert post(url, "/generate", colour=1).json()["ignored_params"] == ["parameters.colour"]


def test_info(url):
    told = httpx.get(f"{url}/info").json()
    assert (told["model_id"], told["max_total_tokens"], told["max_input_tokens"]) == ("scripted", 99, 98)
    assert told["max_concurrent_requests"] == 3


def test_what_the_models_own_parameters_may_stand_in_for(url, service):
    post(url, "/generate")
    post(url, "/generate", do_sample=True, top_k=5, max_new_tokens=7, stop=["x"])
    greedy, drawn = (set(request.left_open) for request in service.requests)
    assert {"max_tokens", "stop", "top_k"} <= greedy
    assert "temperature" not in greedy
    assert {"temperature", "top_p", "repetition_penalty"} <= drawn
    assert not {"max_tokens", "stop", "top_k"} & drawn
    assert [request.sampling.max_tokens for request in service.requests] == [100, 7]
