"""Ollama's operations on models over a real store, by the unmodified `ollama` client."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import ollama
import pytest

from pelton import config
from pelton.pool import Pool
from tests.server import mock_hub
from tests.server.scripted import serving_pool
from tests.unit.scripted_engine import Client
from tests.unit.test_pool_store import put
from tests.unit.vocabularies import write_model


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    Client.stand_in(monkeypatch)
    put(tmp_path, "base")
    pool = Pool(config.load(home=tmp_path, offline=True), is_open=True)
    with serving_pool(pool, max_body=50_000) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[ollama.Client]:
    each = ollama.Client(host=url)
    yield each
    each.close()


def names(client: ollama.Client) -> list[str]:
    return [each.model for each in client.list().models]


def said(engine: Client) -> str:
    """The prompt of an engine's last request."""
    from pelton.formats import checkpoint
    from pelton.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(checkpoint.open(engine.arguments[0]).metadata)
    return tokenizer.decode(engine.requests[-1].prompt_ids, skip_special=False)


def test_models_are_listed_copied_and_deleted(client):
    (model,) = client.list().models
    assert (model.model, model.details.family, len(model.digest)) == ("base:latest", "llama", 64)
    assert model.size > 1000
    client.copy("base:latest", "twin")
    assert names(client) == ["base:latest", "twin:latest"]
    client.delete("twin:latest")
    assert names(client) == ["base:latest"]
    with pytest.raises(ollama.ResponseError) as caught:
        client.delete("twin")
    assert caught.value.status_code == 404


def test_a_model_is_made_of_another(client):
    answer = client.create(
        "mario:small",
        from_="base",
        system="You are Mario.",
        parameters={"temperature": 0.25, "stop": ["wow", "no"], "num_ctx": 64, "num_predict": 7},
        messages=[{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}],
        license="MIT",
    )
    assert answer.status == "success"
    shown = client.show("mario:small")
    assert shown.modelfile.startswith('FROM base\nSYSTEM """You are Mario."""\nPARAMETER temperature 0.25\n')
    assert shown.parameters.splitlines()[1:3] == ['stop """wow"""', 'stop """no"""']
    assert (shown.license, shown.details.parent_model) == ("MIT", "base")
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["tokenizer.ggml.tokens"] is None
    assert "completion" in shown.capabilities

    client.chat("mario:small", [{"role": "user", "content": "2+2?"}])
    (engine,) = Client.made
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.top_k) == (0.25, 7, 40)
    assert said(engine).endswith("2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert "system\nYou are Mario.<|im_end|>\n<|im_start|>user\n1+1?" in said(engine)
    assert engine.arguments[1].context == 64
    client.chat("mario:small", [{"role": "system", "content": "Be Luigi."}], options={"temperature": 1.5})
    assert engine.requests[1].sampling.temperature == 1.5
    assert "Mario" not in said(engine)


def test_what_its_name_brings_along_holds_in_other_dialects(client, url):
    client.create("mario", from_="base", system="You are Mario.", parameters={"temperature": 0.25, "top_p": 0.5})
    body = {"model": "mario", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "top_p": 0.75}
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert httpx.post(url + path, json=body).status_code == 200
        request = Client.made[0].requests[-1]
        assert (request.sampling.temperature, request.sampling.top_p) == (0.25, 0.75)
        assert "You are Mario." in said(Client.made[0])


def test_parameters_that_change_nothing_are_listed(url):
    body = {"model": "new", "from": "base", "parameters": {"num_gpu": 1}, "stream": False}
    answer = httpx.post(url + "/api/create", json=body).json()
    assert answer == {"status": "success", "ignored_params": ["parameters.num_gpu"]}


def test_one_is_made_of_one_that_was_made(client):
    client.create("one", from_="base", system="A.", parameters={"temperature": 0.5, "top_k": 3})
    client.create("two", from_="one", parameters={"top_k": 4})
    shown = client.show("two")
    assert shown.details.parent_model == "one"
    assert '"""A."""' in shown.modelfile
    assert shown.parameters == "temperature 0.5\ntop_k 4"
    client.delete("one")
    client.delete("base")
    client.chat("two", [{"role": "user", "content": "Hi"}])


def test_a_template_of_its_own(client):
    client.create("loud", from_="base", template="{% for m in messages %}<<{{ m.content }}>>{% endfor %}")
    assert client.show("loud").template.startswith("{% for")
    client.chat("loud", [{"role": "user", "content": "Hi"}])
    assert said(Client.made[0]).endswith("<<Hi>>")
    client.generate("base", "Hi", template="{{ messages[0].content }}!")
    assert said(Client.made[1]).endswith("Hi!")


def test_a_file_is_sent_and_named(client, url, tmp_path):
    path = tmp_path / "sent.gguf"
    write_model(path, ggml__comment="sent" * 20_000)
    assert path.stat().st_size > 50_000  # over what other bodies may have
    digest = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert httpx.head(f"{url}/api/blobs/{digest}").status_code == 404
    assert client.create_blob(path) == digest
    assert httpx.head(f"{url}/api/blobs/{digest}").status_code == 200
    *_, last = client.create("sent", files={"sent.gguf": digest}, system="S.", stream=True)
    assert last.status == "success"
    client.generate("sent", "Hi")
    assert "S." in said(Client.made[0])


def test_a_file_of_another_digest_is_refused(url, tmp_path):
    digest = "sha256:" + "0" * 64
    response = httpx.post(f"{url}/api/blobs/{digest}", content=b"not it")
    assert response.status_code == 400
    assert "but 000000" in response.json()["error"]
    assert httpx.head(f"{url}/api/blobs/{digest}").status_code == 404
    assert not [each for each in (tmp_path / "partial").iterdir() if each.suffix != ".lock"]


@pytest.mark.parametrize(
    ("given", "status", "problem"),
    [
        ({"from": "nothing"}, 404, "nothing"),
        ({}, 400, "neither from nor files"),
        ({"from": "base", "quantize": "q4_0"}, 400, "does not quantize"),
        ({"from": "base", "adapters": {"a": "b"}}, 400, "adapters cannot be run"),
        ({"from": "base", "parameters": {"temperature": "hot"}}, 400, "parameters.temperature"),
        ({"from": "base", "parameters": {"colour": "red"}}, 400, "there is no parameter 'colour'"),
        ({"from": "base", "template": "{{ .Prompt }}"}, 400, "Go's syntax ('{{ .Prompt }}')"),
        ({"from": "base", "template": "{% if"}, 422, "cannot be read"),
        ({"files": {"a.gguf": "sha256:" + "0" * 64}}, 400, "send it first"),
        ({"files": {"../a": "sha256:" + "0" * 64}}, 400, "is not the name of a file"),
        ({"from": "base", "model": "../x"}, 404, "cannot be a model's name"),
        ({"from": "base", "system": 'a """ b'}, 400, "three quotes"),
    ],
)
def test_what_cannot_be_made(client, url, given, status, problem):
    response = httpx.post(url + "/api/create", json={"model": "new", **given})
    assert (response.status_code, response.json().keys()) == (status, {"error"})
    assert problem in response.json()["error"]
    assert names(client) == ["base:latest"]


def test_loaded_models_are_listed_and_unloaded(client):
    client.generate("base", keep_alive="10m")
    (model,) = client.ps().models
    assert (model.model, model.context_length, model.size_vram) == ("base:latest", 1000, 0)
    client.generate("base", keep_alive=0)
    assert client.ps().models == []


def test_what_cannot_be_pulled(client):
    with pytest.raises(ollama.ResponseError) as caught:
        client.pull("no such name")
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="offline"):
        list(client.pull("owner/repo", stream=True))
    assert client.pull("base").status == "success"


def test_a_pull_tells_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    Client.stand_in(monkeypatch)
    data = Path(write_model(tmp_path / "tiny.gguf")).read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    with mock_hub.running() as hub:
        hub.files["tiny.Q4_0.gguf"] = data
        pool = Pool(config.load(home=tmp_path / "home", hf_endpoint=hub.url), is_open=True)
        with serving_pool(pool) as url:
            client = ollama.Client(host=url)
            lines = list(client.pull("owner/repo/tiny.Q4_0.gguf", stream=True))
            assert (lines[0].status, lines[-1].status) == ("pulling manifest", "success")
            of_file = [line for line in lines if line.status.startswith("pulling tiny")]
            assert {(line.digest, line.total) for line in of_file} == {(f"sha256:{sha256}", len(data))}
            assert of_file[-1].completed == len(data)
            assert names(client) == ["owner/repo/tiny.Q4_0.gguf:latest"]
            client.generate(names(client)[0], "Hi")
            with pytest.raises(ollama.ResponseError, match="could not be fetched"):
                client.pull("owner/repo/none.Q4_0.gguf")
            client.close()
