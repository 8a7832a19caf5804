"""Packed weights on disk: the file's header, and the bounded folder, without a compiled core."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from pelton.formats import bounded_folder
from pelton.formats.bounded_folder import BoundedFolder
from pelton.formats.packed import PackedFile

FILE = PackedFile(b"k" * 32, 10_000, 4096)
SUMS = bytes(range(24))


def test_a_header_gives_its_checksums_back() -> None:
    header = FILE.header(SUMS)
    assert (FILE.num_chunks, FILE.data_offset, FILE.num_bytes) == (3, 4096, 14096)
    assert len(header) == 4096
    assert FILE.checksums(header) == SUMS


def test_any_changed_byte_of_a_header_is_noticed() -> None:
    header = FILE.header(SUMS)
    for at in range(len(header)):
        assert FILE.checksums(header[:at] + bytes([header[at] ^ 1 << at % 8]) + header[at + 1 :]) is None


@pytest.mark.parametrize("length", [0, 10, 95, 96, 119, 4095])
def test_a_header_that_is_cut_short_is_noticed(length: int) -> None:
    assert FILE.checksums(FILE.header(SUMS)[:length]) is None


@pytest.mark.parametrize(
    "other",
    [PackedFile(b"K" * 32, 10_000, 4096), PackedFile(b"k" * 32, 10_001, 4096), PackedFile(b"k" * 32, 10_000, 4000)],
)
def test_a_header_of_another_file_is_noticed(other: PackedFile) -> None:
    assert FILE.checksums(other.header(SUMS)) is None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BoundedFolder:
    monkeypatch.setattr(bounded_folder, "SPARE_DISK", 0)
    return BoundedFolder(str(tmp_path / "packed"), 1000)


def put(folder: BoundedFolder, name: str, size: int = 400) -> bool:
    def fill(file: BinaryIO) -> bool:
        file.write(b"x" * size)
        return True

    return folder.write(name, size, fill)


def names(folder: BoundedFolder) -> list[str]:
    return sorted(path.name for path in Path(folder.folder).iterdir())


def test_what_is_written_is_there(folder: BoundedFolder) -> None:
    assert folder.open("a") is None
    assert put(folder, "a")
    with folder.open("a") as file:  # type: ignore[union-attr]
        assert file.read() == b"x" * 400
    assert not put(folder, "a"), "it is not written twice"
    assert names(folder) == ["a.packed"]
    folder.discard("a")
    assert folder.open("a") is None
    folder.discard("a")


def test_what_is_no_file_is_not_there(folder: BoundedFolder) -> None:
    assert put(folder, "a")
    (path,) = Path(folder.folder).glob("a*")
    path.unlink()
    os.mkfifo(path)
    assert folder.open("a") is None


def test_the_one_that_was_used_last_stays(folder: BoundedFolder) -> None:
    for age, name in enumerate("ab"):
        put(folder, name)
        os.utime(Path(folder.folder, f"{name}.packed"), (1000 + age, 1000 + age))
    folder.open("a").close()  # type: ignore[union-attr]
    assert put(folder, "c")
    assert names(folder) == ["a.packed", "c.packed"]
    assert put(folder, "d", 1000)
    assert names(folder) == ["d.packed"]


def test_what_is_over_the_limit_drives_nothing_out(folder: BoundedFolder) -> None:
    put(folder, "a")
    assert not put(folder, "b", 1001)
    assert names(folder) == ["a.packed"]


def test_a_writer_that_gives_up_or_fails_leaves_nothing(
    folder: BoundedFolder, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: BinaryIO) -> bool:
        file.write(b"x" * 100)
        raise OSError(errno.ENOSPC, "No space left on device")

    assert not folder.write("a", 400, lambda file: bool(file.write(b"x")) and False)
    assert not folder.write("a", 400, full)
    assert "No space left" in caplog.text
    assert names(folder) == []


def test_a_disk_without_room_is_left_alone(folder: BoundedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_folder, "SPARE_DISK", 1 << 60)
    assert not put(folder, "a")
    assert names(folder) == []


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = BoundedFolder(str(tmp_path / "file" / "packed"), 1000)
    assert not put(folder, "a")
    assert folder.open("a") is None


def test_a_models_files_go_with_it(folder: BoundedFolder) -> None:
    for name in ("aa-1", "aa-2", "ab-1"):
        put(folder, name, 100)
    assert (folder.model_bytes("aa"), folder.num_bytes) == (200, 300)
    folder.remove_model("aa")
    assert names(folder) == ["ab-1.packed"]


def _write_and_hang(folder: BoundedFolder, name: str) -> None:
    def fill(file: BinaryIO) -> bool:
        file.write(b"half")
        file.flush()
        time.sleep(60)
        return True

    folder.write(name, 400, fill)


@pytest.fixture
def writer(folder: BoundedFolder):
    """Another process in the middle of writing "a"."""
    process = multiprocessing.get_context("spawn").Process(target=_write_and_hang, args=(folder, "a"), daemon=True)
    process.start()
    partial = Path(folder.folder, "a.partial")
    deadline = time.monotonic() + 30
    while not (partial.exists() and partial.read_bytes().startswith(b"half")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield process
    process.kill()
    process.join()


def test_two_writers_do_not_meet(folder: BoundedFolder, writer) -> None:
    assert not put(folder, "a")
    assert put(folder, "b"), "another file may be written meanwhile"
    assert names(folder) == ["a.partial", "b.packed"]


def test_what_a_killed_writer_left_goes(folder: BoundedFolder, writer) -> None:
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    assert names(folder) == ["a.partial"]
    assert folder.open("a") is None
    assert put(folder, "b")
    assert names(folder) == ["b.packed"]
    assert put(folder, "a")


def test_a_killed_writers_file_is_written_anew(folder: BoundedFolder, writer) -> None:
    writer.kill()
    writer.join()
    assert put(folder, "a", 3)
    with folder.open("a") as file:  # type: ignore[union-attr]
        assert file.read() == b"xxx"
    assert names(folder) == ["a.packed"]
