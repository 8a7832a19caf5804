"""Digests of model files: taken once, kept with the file's stamp, never used for another state of the file."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from pelton.config import HubConfig
from pelton.engine.background import known_digest, take_digests
from pelton.formats.digest import FileDigest, FileStamp, ModelFile, of_model, part_paths
from pelton.hub import digests
from pelton.hub.store import Store
from tests.unit.test_store import put


@pytest.fixture
def config(tmp_path: Path) -> HubConfig:
    return HubConfig(home=tmp_path / "home")


def old_file(path: Path, data: bytes) -> ModelFile:
    """A file that was left alone for long."""
    path.write_bytes(data)
    os.utime(path, (10**9, 10**9))
    return opened(path)


def opened(path: Path) -> ModelFile:
    return ModelFile(str(path), FileStamp.of(path.stat()))


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_digest_is_that_of_the_whole_file(tmp_path: Path) -> None:
    files = [old_file(tmp_path / "a", b"a" * 5_000_000), old_file(tmp_path / "b", b"")]
    taken = take_digests(files, lambda: True)
    assert taken == (FileDigest(files[0], sha(b"a" * 5_000_000)), FileDigest(files[1], sha(b"")))
    assert known_digest(files[:1], taken) == taken[0].sha256
    assert known_digest(files, taken) == of_model([file.sha256 for file in taken])
    assert known_digest(files[::-1], taken) != known_digest(files, taken)
    assert known_digest(files, taken[:1]) is None


def test_a_file_that_changes_while_its_digest_is_taken_has_none(tmp_path: Path) -> None:
    path = tmp_path / "a"
    file = old_file(path, b"a" * 5_000_000)
    calls = iter(range(100))

    def permit() -> bool:
        if next(calls) == 1:
            path.write_bytes(b"b" * 5_000_000)
        return True

    assert take_digests([file], permit) is None
    assert take_digests([file], lambda: True) is None, "it is another file now"
    path.unlink()
    assert take_digests([file], lambda: True) is None


def test_a_file_that_was_written_just_now_has_no_digest_yet(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    assert take_digests([opened(tmp_path / "a")], lambda: True) is None


def test_work_that_is_not_permitted_stops(tmp_path: Path) -> None:
    assert take_digests([old_file(tmp_path / "a", b"a")], lambda: False) is None


def test_parts_by_name() -> None:
    assert part_paths(Path("x/m.gguf")) == (Path("x/m.gguf"),)
    assert part_paths(Path("x/m-00001-of-00002.gguf")) == tuple(Path(f"x/m-0000{i}-of-00002.gguf") for i in (1, 2))
    assert part_paths(Path("m-00002-of-00002.gguf")) == (Path("m-00002-of-00002.gguf"),)


def test_a_remembered_digest_stands_while_the_file_does(tmp_path: Path, config: HubConfig) -> None:
    path = tmp_path / "m.gguf"
    taken = FileDigest(old_file(path, b"one"), sha(b"one"))
    assert digests.known(path, config) == ()
    digests.remember([taken], config)
    assert digests.known(path, config) == (taken,)
    path.write_bytes(b"two")
    assert digests.known(path, config) == ()
    os.utime(path, (10**9, 10**9))
    assert digests.known(path, config) == (taken,), "size, time and inode are all that is looked at"
    other = tmp_path / "other.gguf"
    other.write_bytes(b"one")
    other.replace(path)
    os.utime(path, (10**9, 10**9))
    assert digests.known(path, config) == (), "another inode"


def test_records_of_files_that_are_gone_go(tmp_path: Path, config: HubConfig) -> None:
    paths = [tmp_path / name for name in ("a.gguf", "b.gguf")]
    taken = [FileDigest(old_file(path, b"x"), sha(b"x")) for path in paths]
    digests.remember(taken, config)
    paths[0].unlink()
    (config.home / "digests" / "broken.json").write_text("{")
    digests.remember(taken[1:], config)
    assert len(list((config.home / "digests").iterdir())) == 1
    assert digests.known(paths[0], config) == ()


@pytest.mark.parametrize("harm", ["", "{}", '{"file":{"path":"x","stamp":{}},"sha256":"x"}', "\udcff"])
def test_a_record_that_is_broken_is_none(tmp_path: Path, config: HubConfig, harm: str) -> None:
    path = tmp_path / "m.gguf"
    digests.remember([FileDigest(old_file(path, b"x"), sha(b"x"))], config)
    (record,) = (config.home / "digests").iterdir()
    record.write_bytes(harm.encode(errors="surrogateescape"))
    assert digests.known(path, config) == ()


def test_a_home_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = HubConfig(home=tmp_path / "file" / "home")
    path = tmp_path / "m.gguf"
    digests.remember([FileDigest(old_file(path, b"x"), sha(b"x"))], config)
    assert digests.known(path, config) == ()


def test_a_pulled_model_brings_its_digest(config: HubConfig) -> None:
    store = Store(config)
    (digest,) = put(store, "owner/repo", b"data")
    path = store.resolve("owner/repo")
    (found,) = digests.known(path, config)
    assert found == FileDigest(opened(path), digest)
    os.utime(path, ns=(1, time.time_ns()))
    assert digests.known(path, config) == (), "it was touched: `resolve` looks again"
    assert store.resolve("owner/repo") == path
    assert len(digests.known(path, config)) == 1


def test_a_pulled_models_packed_weights_and_prefixes_go_with_it(config: HubConfig) -> None:
    store = Store(config)
    parts = put(store, "owner/split", b"one", b"two")
    (single,) = put(store, "owner/single", b"three")
    for folder, kind in (("packed", "packed"), ("prefixes", "prefix")):
        (config.home / folder).mkdir()
        for digest in (of_model(parts), single):
            (config.home / folder / f"{digest}-0123456789abcdef.{kind}").write_bytes(b"packed")
    assert store.packed.model_bytes(of_model(parts)) == store.prefixes.model_bytes(of_model(parts)) == 6
    store.remove("owner/split")
    for folder in ("packed", "prefixes"):
        assert [path.name[:64] for path in (config.home / folder).iterdir()] == [single]
