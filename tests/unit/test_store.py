"""The store of local models: names, manifests, blobs."""

import hashlib
import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton.config import HubConfig
from pelton.errors import FormatError, HubError, ModelNotFound
from pelton.hub import catalogue, store
from pelton.hub.store import Store


@pytest.fixture
def models(tmp_path) -> Store:
    return Store(HubConfig(home=tmp_path / "home"))


def quiet(done, total):
    pass


def put(models: Store, name: str, *contents: bytes) -> list[str]:
    """Stores files under a name; returns their digests."""
    digests = [hashlib.sha256(data).hexdigest() for data in contents]
    with models.lock(digests):
        for sha256, data in zip(digests, contents, strict=True):
            models.partial(sha256).write_bytes(data)
            models.take_in(sha256, quiet)
        models.add(name, "test", [(f"part-{i}.gguf", sha256) for i, sha256 in enumerate(digests)])
    return digests


def test_what_is_put_is_listed_shown_and_resolved(models, tmp_path):
    (first,) = put(models, "owner/repo:Q4_0", b"one")
    put(models, "another/repo", b"two!")
    assert [entry.name for entry in models.list()] == ["another/repo", "owner/repo:Q4_0"]
    entry = models.show("hf.co/owner/repo:q4_0")
    assert (entry.size, entry.source, entry.files[0].sha256) == (3, "test", first)
    assert models.resolve("owner/repo:Q4_0") == tmp_path / "home" / "blobs" / f"sha256-{first}"
    assert models.resolve("owner/repo:Q4_0").read_bytes() == b"one"


def test_aliases_of_the_catalogue_mean_the_same(models):
    put(models, "smollm2", b"x")
    assert models.resolve("smollm2:135m") == models.resolve("SmolLM2")


def test_an_empty_store(models):
    assert models.list() == ()
    for ask in (models.show, models.resolve, models.remove):
        with pytest.raises(ModelNotFound, match="pelton pull owner/repo"):
            ask("owner/repo")


def test_a_blob_goes_with_its_last_name(models):
    (digest,) = put(models, "owner/one", b"same")
    put(models, "owner/two", b"same")
    models.remove("owner/one")
    assert models.blob(digest).exists()
    models.remove("owner/two")
    assert not models.blob(digest).exists()
    assert models.list() == ()


def test_a_split_model_resolves_to_its_first_part_beside_the_others(models):
    put(models, "owner/repo", b"1", b"22", b"333")
    first = models.resolve("owner/repo")
    assert [first.with_name(f"part-{i}.gguf").read_bytes() for i in range(3)] == [b"1", b"22", b"333"]


def test_a_file_with_another_digest_is_not_taken_in(models, tmp_path):
    sha256 = hashlib.sha256(b"right").hexdigest()
    models.partial(sha256).write_bytes(b"wrong")
    with pytest.raises(HubError, match=sha256):
        models.take_in(sha256, quiet)
    assert not models.blob(sha256).exists()
    assert not models.partial(sha256).exists()


def test_a_half_file_is_no_model(models):
    models.partial(hashlib.sha256(b"whole").hexdigest()).write_bytes(b"who")
    assert models.list() == ()


def test_the_digest_is_computed_again_only_for_a_touched_file(models, monkeypatch):
    (digest,) = put(models, "owner/repo", b"data")
    computed = []
    real = store.digest_of
    monkeypatch.setattr(store, "digest_of", lambda path, *args: computed.append(path) or real(path, *args))
    models.resolve("owner/repo")
    assert computed == []
    os.utime(models.blob(digest), ns=(1, 1))
    models.resolve("owner/repo")
    models.resolve("owner/repo")
    assert computed == [models.blob(digest)]


@pytest.mark.parametrize("change", [b"DATA", b"data and more", None])
def test_a_changed_blob_is_refused(models, change):
    (digest,) = put(models, "owner/repo", b"data")
    if change is None:
        models.blob(digest).unlink()
    else:
        models.blob(digest).write_bytes(change)
        os.utime(models.blob(digest), ns=(1, 1))
    with pytest.raises(FormatError, match=r"sha256-.*owner/repo.*pelton pull owner/repo"):
        models.resolve("owner/repo")


@pytest.mark.parametrize(
    "harm",
    [
        {"sha256": "../../../../etc/passwd"},
        {"sha256": "A" * 64},
        {"sha256": "0" * 63},
        {"name": "../evil.gguf"},
        {"name": "/evil.gguf"},
        {"name": ".."},
    ],
)
def test_a_manifest_with_a_path_for_a_digest_or_name_is_refused(models, tmp_path, harm):
    put(models, "owner/repo", b"data")
    (manifest,) = (tmp_path / "home" / "models").glob("*.json")
    content = json.loads(manifest.read_bytes())
    content["files"][0] |= harm
    manifest.write_text(json.dumps(content))
    for ask in (models.show, models.resolve):
        with pytest.raises(FormatError, match=r"\.json: not a manifest"):
            ask("owner/repo")


def test_manifests_stay_in_their_folder(models, tmp_path):
    put(models, "owner/repo/sub/folder/file.gguf", b"data")
    assert [path.parent.name for path in (tmp_path / "home").rglob("*.json")] == ["models"]


HARMFUL = ["", ".", "..", "../x", "a/../b", "/etc/passwd", "a/b/../../c.gguf", "a//b", "a/b:", "a\x00b", "a/b/c", "~"]
HARMFUL += ["a b", "a/" + "b" * 97, "/".join(["x" * 90] * 4) + ".gguf"]


@pytest.mark.parametrize("name", HARMFUL)
def test_names_that_are_none(models, name):
    for ask in (models.show, models.resolve, models.remove):
        with pytest.raises(ModelNotFound):
            ask(name)


@given(st.text(alphabet="./:~ab_-\x00 é", max_size=40))
def test_any_text_is_a_name_or_is_not_found(text):
    try:
        model = catalogue.find(text)
    except ModelNotFound as error:
        message = error.message
        assert len(message) < 2000
    else:
        assert ".." not in model.name.split("/")
        assert not model.name.startswith(("/", "~", "."))


def test_the_catalogue_is_consistent():
    names = [name for model in catalogue.CATALOGUE for name in (model.name, *model.aliases)]
    assert len(names) == len(set(names))
    for name in names:
        assert name == name.lower()
        assert name in (catalogue.find(name).name, *catalogue.find(name).aliases)


def test_a_lock_keeps_others_out_and_says_that_one_waits(models):
    events = []
    inside = threading.Event()

    def other():
        inside.wait()
        with models.lock(["a" * 64], waiting=lambda: events.append("waits")):
            events.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    with models.lock(["b" * 64, "a" * 64]):
        inside.set()
        while not events:
            inside.wait(0.01)
        events.append("first")
    thread.join()
    assert events == ["waits", "first", "other"]


def test_a_local_file_is_found_by_its_path(tmp_path, models, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert models.resolve(str(path)) == path
    assert models.resolve("m.gguf").read_bytes() == b"GGUF"
    assert models.resolve("./m.gguf").read_bytes() == b"GGUF"
    (tmp_path / "sha256-12ab").write_bytes(b"GGUF")
    for spelled in (str(tmp_path / "sha256-12ab"), "./sha256-12ab"):
        assert models.resolve(spelled).read_bytes() == b"GGUF"
    with pytest.raises(ModelNotFound):
        models.resolve("sha256-12ab")
    (tmp_path / "text").write_text("no model")
    with pytest.raises(ModelNotFound, match="text: this is no GGUF file"):
        models.resolve("./text")
    for missing in ("none.gguf", "./none.gguf", "/none.gguf", "./none", "~/none", str(tmp_path)):
        with pytest.raises(ModelNotFound, match="there is no such file"):
            models.resolve(missing)
    for wrong in ("x" * 5000 + ".gguf", "~no-such-user/m.gguf"):
        with pytest.raises(ModelNotFound, match="cannot be a path"):
            models.resolve(wrong)
