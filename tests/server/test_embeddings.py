"""Embeddings over real, tiny models on every route, with the unmodified `openai` and `ollama` clients; and the text
between two others."""

from __future__ import annotations

import math
import time
from base64 import b64decode
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import ollama
import openai
import pytest

from pelton import LLM, config
from pelton.config import EngineConfig, TextConfig
from pelton.errors import InvalidRequest, Overloaded
from pelton.formats import checkpoint, gguf
from pelton.pool import ModelSpec, Pool
from pelton.request import Request, TextEvent
from tests.e2e import tiny_model
from tests.server.scripted import ScriptedService, serving, serving_pool

WIDTH = 96
TEXTS = ["def encode(text)", "the lazy dogs", "über 12 Brücken"]
OWN: dict[str, dict[str, Any]] = {
    "plain": {},
    "mean": {
        "llama.pooling_type": 1,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.fim_pre_token_id": 10,
        "tokenizer.ggml.fim_suf_token_id": 11,
        "tokenizer.ggml.fim_mid_token_id": 12,
    },
    "ranks": {"llama.pooling_type": 4},
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    written = checkpoint.open(tiny_model.write(folder, "llama"))
    engine = EngineConfig(kv_memory=4 << 20, context=256, threads=1, max_batch_tokens=64, max_sequences=8)
    specs = []
    for name, own in OWN.items():
        gguf.write(folder / f"{name}.gguf", {**written.metadata, **own}, list(written.tensors.values()))
        text = TextConfig(pooling="mean" if name == "plain" else "auto")
        specs.append(ModelSpec(name=name, model=str(folder / f"{name}.gguf"), engine=engine, text=text))
    pool = Pool(config.load(home=folder, prefix_cache_size=0, packed_cache_size=0), specs, in_process=True)
    with serving_pool(pool) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as each:
        yield each


@pytest.fixture(scope="module")
def theirs(url: str) -> Iterator[ollama.Client]:
    each = ollama.Client(host=url)
    yield each
    each.close()


def post(url: str, path: str, **body: object) -> httpx.Response:
    return httpx.post(url + path, json=body)


def vector(url: str, **body: object) -> np.ndarray:
    answer = post(url, "/v1/embeddings", **{"model": "plain", "encoding_format": "float", **body}).json()
    (one,) = answer["data"]
    return np.array(one["embedding"], np.float32)


def test_openai(client, url):
    answer = client.embeddings.create(model="plain", input=TEXTS, user="ada")  # asks for base64 by itself
    assert (answer.object, answer.model) == ("list", "plain")
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert [len(each.embedding) for each in answer.data] == [WIDTH] * 3
    for each in answer.data:
        assert math.isclose(math.hypot(*each.embedding), 1, rel_tol=1e-6)
    floats = client.embeddings.create(model="plain", input=TEXTS, encoding_format="float")
    assert floats.data == answer.data
    assert floats.usage == answer.usage
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
    raw = post(url, "/v1/embeddings", model="plain", input=TEXTS[0], encoding_format="base64").json()
    assert np.frombuffer(b64decode(raw["data"][0]["embedding"]), "<f4").tolist() == answer.data[0].embedding


def test_ids_are_texts_as_they_are_encoded(client, url):
    ids = [post(url, "/tokenize", model="plain", content=text, add_special=True).json()["tokens"] for text in TEXTS]
    texts = client.embeddings.create(model="plain", input=TEXTS)
    assert client.embeddings.create(model="plain", input=ids) == texts
    assert client.embeddings.create(model="plain", input=ids[1]).data[0].embedding == texts.data[1].embedding
    assert texts.usage.prompt_tokens == sum(map(len, ids))


def test_dimensions_are_cut_and_normalised_again(url):
    whole = vector(url, input=TEXTS[0])
    cut = vector(url, input=TEXTS[0], dimensions=10)
    assert cut.shape == (10,)
    np.testing.assert_allclose(cut, whole[:10] / np.linalg.norm(whole[:10]), rtol=1e-6)
    unnormalised = vector(url, input=TEXTS[0], normalize=False)
    np.testing.assert_allclose(whole, unnormalised / np.linalg.norm(unnormalised), rtol=1e-6)
    assert abs(np.linalg.norm(unnormalised) - 1) > 0.1


def test_how_a_text_is_pooled(url):
    by_setting = vector(url, input=TEXTS[0])
    asked = {pooling: vector(url, input=TEXTS[0], pooling=pooling) for pooling in ("last", "mean", "cls")}
    assert (asked["mean"] == by_setting).all()
    assert len({each.tobytes() for each in asked.values()}) == 3
    refused = post(url, "/v1/embeddings", model="mean", input="x", pooling="last")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "pooling")
    assert "'mean'" in refused.json()["error"]["message"]
    cannot = post(url, "/v1/embeddings", model="ranks", input="x")
    assert (cannot.status_code, cannot.json()["error"]["param"]) == (400, "model")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [1, 2, 10**6]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": WIDTH + 1}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side"),
        ({"input": "ab " * 300}, "input"),
        ({"input": [1] * 257}, "input"),
    ],
)
def test_what_cannot_be_embedded(url, body, param):
    refused = post(url, "/v1/embeddings", **{"model": "plain", **body})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_long_text_is_cut_openly_or_refused(url):
    long = "ab " * 300
    refused = post(url, "/v1/embeddings", model="plain", input=long).json()["error"]
    assert (refused["code"], "256" in refused["message"]) == ("context_length_exceeded", True)
    ids = post(url, "/tokenize", model="plain", content=long, add_special=True).json()["tokens"]
    cut = post(url, "/v1/embeddings", model="plain", input=long, truncate_prompt_tokens=5).json()
    assert cut["usage"]["prompt_tokens"] == 5
    assert cut["warnings"] == [f"input[0]: cut to 5 of {len(ids)} tokens; the end was kept"]
    end = post(url, "/v1/embeddings", model="plain", input=ids[-5:]).json()
    assert end["data"] == cut["data"]
    assert "warnings" not in end
    whole = post(url, "/v1/embeddings", model="plain", input=long, truncate_prompt_tokens=-1, truncation_side="right")
    assert whole.json()["usage"]["prompt_tokens"] == 256


def test_many_texts_at_once(client):
    texts = [f"{i} lazy dogs" for i in range(100)]
    alone = client.embeddings.create(model="plain", input=texts[77]).data[0].embedding
    assert client.embeddings.create(model="plain", input=texts).data[77].embedding == alone


def test_ollama(theirs, client):
    answer = theirs.embed("plain", TEXTS)
    assert [list(each) for each in answer.embeddings] == [
        each.embedding for each in client.embeddings.create(model="plain", input=TEXTS).data
    ]
    assert answer.prompt_eval_count > len(TEXTS)
    assert answer.total_duration > 0
    assert len(theirs.embed("plain", TEXTS[0], dimensions=8, options={"num_ctx": 128}).embeddings[0]) == 8
    older = np.array(theirs.embeddings("plain", TEXTS[0]).embedding)
    np.testing.assert_allclose(older / np.linalg.norm(older), answer.embeddings[0], rtol=1e-5)
    assert theirs.embed("plain", "").embeddings == []


def test_ollama_cuts_what_is_too_long_and_says_so(theirs, url):
    long = "ab " * 300
    made = post(url, "/api/embed", model="mean", input=long, options={"num_thread": 2}).json()
    assert made["prompt_eval_count"] == 256
    assert made["ignored_params"] == ["options.num_thread"]
    (warning,) = made["warnings"]
    assert "the start was kept" in warning
    ids = post(url, "/tokenize", model="mean", content=long).json()["tokens"]
    kept = post(url, "/v1/embeddings", model="mean", input=[*ids[:255], tiny_model.END]).json()  # its end token stays
    assert kept["data"][0]["embedding"] == made["embeddings"][0]
    with pytest.raises(ollama.ResponseError, match=r"input\[0\]: the input has 900 tokens, but the context"):
        theirs.embed("plain", long, truncate=False)


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
def test_llamacpp(url, client, path):
    (one,) = post(url, path, model="plain", content=TEXTS[0]).json()
    two, three = post(url, path, model="plain", input=TEXTS[1:]).json()
    wanted = client.embeddings.create(model="plain", input=TEXTS).data
    assert [each["index"] for each in (one, two, three)] == [0, 0, 1]
    assert [each["embedding"] for each in (one, two, three)] == [[each.embedding] for each in wanted]
    (raw,) = post(url, path, model="plain", input=TEXTS[0], embd_normalize=-1).json()
    assert abs(math.hypot(*raw["embedding"][0]) - 1) > 0.1
    refused = post(url, path, model="plain", input=TEXTS[0], embd_normalize=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "embd_normalize")


def test_they_are_counted(url):
    def value(name: str) -> float:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f'{name}{{model="plain"'))

    before = value("pelton_prompt_tokens_total"), value("pelton_completion_tokens_total")
    used = post(url, "/v1/embeddings", model="plain", input=TEXTS).json()["usage"]["prompt_tokens"]
    after = value("pelton_prompt_tokens_total"), value("pelton_completion_tokens_total")
    assert (after[0] - before[0], after[1] - before[1]) == (used, 0)


def test_the_text_between_two_others(client, theirs, url):
    asked = {"model": "mean", "prompt": "def f(", "suffix": "return 1", "temperature": 0, "max_tokens": 6}
    middle = client.completions.create(**asked)
    ids = post(url, "/tokenize", model="mean", content="def f(").json()["tokens"]
    assert middle.usage.prompt_tokens > len(ids) + 3
    infilled = post(url, "/infill", model="mean", input_prefix="def f(", input_suffix="return 1", n_predict=6, top_k=1)
    assert infilled.json()["content"] == middle.choices[0].text
    assert client.completions.create(**asked, echo=True).choices[0].text == "def f(" + middle.choices[0].text
    made = theirs.generate("mean", "def f(", suffix="return 1", options={"temperature": 0, "num_predict": 6})
    assert made.response == middle.choices[0].text
    assert client.completions.create(**asked | {"suffix": ""}).usage.prompt_tokens == len(ids) + 1  # its end token
    for changes in ({"model": "plain"}, {"prompt": [3, 4]}, {"echo": True, "logprobs": 1}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**asked | changes)
        assert caught.value.param == "suffix"


def test_what_a_model_can(theirs):
    assert "embedding" in theirs.show("mean").capabilities
    assert "embedding" not in theirs.show("plain").capabilities


def test_the_library(tmp_path: Path):
    with LLM(str(tiny_model.write(tmp_path, "llama")), in_process=True, kv_memory=4 << 20, context=256) as llm:
        vectors = llm.embed(TEXTS, pooling="mean")
        assert (vectors.shape, vectors.dtype) == ((3, WIDTH), np.float32)
        assert (llm.embed(TEXTS[1], pooling="mean")[0] == vectors[1]).all()
        assert llm.embed([5, 6, 7], dimensions=4).shape == (1, 4)
        assert llm.embed([[5, 6, 7], np.array([8, 9])]).shape == (2, WIDTH)
        assert len(llm.embed([])) == 0
        with pytest.raises(InvalidRequest, match="pooling"):
            llm.embed("x", pooling="max")  # type: ignore[arg-type]


class Busy(ScriptedService):
    """Refuses the calls of these numbers."""

    refused: range = range(0)
    num_calls = 0

    async def generate(self, request: Request) -> AsyncGenerator[TextEvent, None]:
        self.num_calls += 1
        if self.num_calls - 1 in self.refused:
            raise Overloaded("the queue is full", retry_after=0.01)
        return await super().generate(request)


def test_texts_wait_for_room_once_some_are_done():
    service = Busy()
    with serving(service) as url:
        for refused, status in ((range(4, 7), 200), (range(100), 429)):
            service.num_calls, service.refused = 0, refused
            answer = post(url, "/v1/embeddings", model="scripted", input=["a text"] * 6)
            assert answer.status_code == status
        assert service.num_open == 0


def test_who_goes_away_ends_all_texts():
    service = ScriptedService(delay=30)
    with serving(service) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/embeddings", json={"model": "scripted", "input": ["a"] * 5}, timeout=0.3)
        deadline = time.monotonic() + 10
        while service.num_open:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(service.requests) == 3  # as many as the engine runs
