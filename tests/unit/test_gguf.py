"""GGUF files both ways against the `gguf` package, and bytes that mean harm."""

import struct
import time
import tracemalloc
from pathlib import Path

import gguf as oracle
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pelton.errors import FormatError, ModelNotFound, UnsupportedModel
from pelton.formats import checkpoint, gguf, quants
from pelton.formats.checkpoint import Tensor
from pelton.formats.digest import FileStamp, ModelFile
from pelton.formats.quants import WeightType

SUPPORTED = [t for t in WeightType if quants.is_supported(t)]

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": ["<s>", "a", "ß", "🦙", ""],
    "tokenizer.ggml.scores": np.array([0.5, -1.0, 2.0, 3.0, 4.0], np.float32),
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1],
    "negative": -5,
    "wide": 1 << 40,
    "deep": -(1 << 40),
    "byte": np.uint8(200),
    "double": np.float64(0.1),
    "flags": [True, False],
}


def random_tensors() -> list[Tensor]:
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (6, 256), "experts.weight": (2, 3, 256), "norm.weight": (256,)}
    tensors = [Tensor.quantize(f"{t.name}.weight", rng.normal(size=(3, 256)), t) for t in SUPPORTED]
    return tensors + [Tensor.quantize(n, rng.normal(size=s), WeightType.F32) for n, s in shapes.items()]


def write(path: Path, metadata=METADATA, tensors=None) -> Path:
    gguf.write(path, metadata, random_tensors() if tensors is None else tensors)
    return path


def equal(a, b) -> bool:
    return np.array_equal(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else a == b


# --- both ways


def test_what_is_written_is_read(tmp_path):
    file = checkpoint.open(write(tmp_path / "m.gguf"))
    assert list(file.metadata) == list(METADATA)
    for key, value in METADATA.items():
        expected = np.float32(value) if key.endswith("epsilon") else value
        assert equal(file.metadata[key], expected), key
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    assert list(file.tensors) == [t.name for t in random_tensors()]
    for tensor in random_tensors():
        read = file.tensors[tensor.name]
        assert (read.type, read.shape) == (tensor.type, tensor.shape)
        assert np.array_equal(read.data, tensor.data)
        assert np.array_equal(read.dequantize(), tensor.dequantize())
        assert not read.data.flags.writeable
    assert file.files == (ModelFile(str(tmp_path / "m.gguf"), FileStamp.of((tmp_path / "m.gguf").stat())),)
    assert file.tensors["experts.weight"].rows().shape == (6, 1024)


def test_our_files_are_read_by_the_gguf_package(tmp_path):
    reader = oracle.GGUFReader(write(tmp_path / "m.gguf"))
    for key, value in METADATA.items():
        contents = reader.fields[key].contents()
        expected = np.float32(value) if key.endswith("epsilon") else value
        assert np.array_equal(contents, expected), key
    tensors = {t.name: t for t in reader.tensors}
    for ours in random_tensors():
        theirs = tensors[ours.name]
        assert theirs.tensor_type == int(ours.type)
        assert tuple(theirs.shape)[::-1] == ours.shape
        assert np.array_equal(theirs.data.view(np.uint8).reshape(-1), ours.data)


@pytest.mark.parametrize("alignment", [32, 64])
def test_files_of_the_gguf_package_are_read(tmp_path, alignment):
    path = tmp_path / "m.gguf"
    writer = oracle.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for name, value in (("u8", 1), ("i8", -1), ("u16", 2), ("i16", -2), ("u32", 3), ("i32", -3), ("u64", 4)):
        getattr(writer, {"u": "add_uint", "i": "add_int"}[name[0]] + name[1:])(name, value)
    writer.add_float32("f32", 0.25)
    writer.add_float64("f64", 0.1)
    writer.add_bool("bool", False)
    writer.add_array("words", ["x", "yz", "ü"])
    writer.add_array("ints", [1, 2, 3])
    rng = np.random.default_rng(3)
    values = {t: rng.normal(size=(5, 256)).astype(np.float32) for t in SUPPORTED}
    for t, x in values.items():
        writer.add_tensor(t.name, quants.quantize(t, x), raw_dtype=oracle.GGMLQuantizationType(int(t)))
    writer.add_tensor("cube", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = checkpoint.open(path)
    expected = {"u8": 1, "i8": -1, "u16": 2, "i16": -2, "u32": 3, "i32": -3, "u64": 4}
    expected |= {"f32": 0.25, "f64": 0.1, "bool": False, "words": ["x", "yz", "ü"]}
    assert {key: file.metadata[key] for key in expected} == expected
    assert file.metadata["ints"].tolist() == [1, 2, 3]
    for t, x in values.items():
        tensor = file.tensors[t.name]
        assert (tensor.type, tensor.shape) == (t, (5, 256))
        assert np.array_equal(tensor.rows(), quants.quantize(t, x))
    assert file.tensors["cube"].dequantize().tolist() == np.arange(24.0).reshape(2, 3, 4).tolist()


def test_version_2_is_read(tmp_path):
    path = write(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    path.write_bytes(data)
    assert checkpoint.open(path).metadata["general.architecture"] == "llama"


def test_a_type_without_codec_opens_and_says_so_when_used(tmp_path):
    data = np.zeros(32, np.uint8)
    path = write(tmp_path / "m.gguf", {}, [Tensor("blk.0", WeightType.I8, (1, 32), data)])
    tensor = checkpoint.open(path).tensors["blk.0"]
    with pytest.raises(UnsupportedModel, match=r"blk\.0.*I8"):
        tensor.dequantize()


# --- split models


def split(folder: Path, count: int = 3, stem: str = "m", **changes) -> list[Path]:
    """A model of `count` parts; `changes` map "<part>:<key>" to a value (None: leave it out)."""
    tensors = random_tensors()
    paths = []
    for i in range(count):
        metadata = dict(METADATA) if i == 0 else {}
        metadata |= {"split.no": np.uint16(i), "split.count": np.uint16(count)}
        metadata["split.tensors.count"] = np.int32(len(tensors))
        for change, value in changes.items():
            part, key = change.split(":")
            if int(part) == i:
                metadata[key] = value
        path = folder / f"{stem}-{i + 1:05d}-of-{count:05d}.gguf"
        paths.append(write(path, metadata, tensors[i::count]))
    return paths


def test_all_parts_of_a_split_model_are_opened(tmp_path):
    paths = split(tmp_path)
    file = checkpoint.open(paths[0])
    assert [each.path for each in file.files] == list(map(str, paths))
    assert [each.stamp.size for each in file.files] == [path.stat().st_size for path in paths]
    assert set(file.tensors) == {t.name for t in random_tensors()}
    for tensor in random_tensors():
        assert np.array_equal(file.tensors[tensor.name].data, tensor.data)
    assert file.metadata["general.architecture"] == "llama"


def test_another_part_names_the_first(tmp_path):
    with pytest.raises(FormatError, match=r"open the first one, m-00001-of-00003\.gguf"):
        checkpoint.open(split(tmp_path)[1])


def test_a_missing_part_is_named(tmp_path):
    paths = split(tmp_path)
    paths[2].unlink()
    with pytest.raises(FormatError, match=r"part 3 of 3 is missing: m-00003"):
        checkpoint.open(paths[0])


@pytest.mark.parametrize(
    ("change", "value", "message"),
    [
        ("1:split.no", np.uint16(2), r"00002-of-00003\.gguf: split\.no is 2 and should be 1"),
        ("1:split.count", np.uint16(4), r"split\.count is 4 and should be 3"),
        ("0:split.count", np.uint16(60000), r"split\.count is 60000, but the name"),
        ("0:split.count", "three", r"split\.count is not a count"),
        ("0:split.tensors.count", np.int32(99), r"split\.tensors\.count is 99"),
    ],
)
def test_parts_that_do_not_fit_each_other(tmp_path, change, value, message):
    with pytest.raises(FormatError, match=message):
        checkpoint.open(split(tmp_path, **{change: value})[0])


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    paths = split(tmp_path)
    metadata = {"split.no": np.uint16(1), "split.count": np.uint16(3)}
    write(paths[1], metadata, random_tensors()[:1])
    with pytest.raises(FormatError, match="stands in an earlier part too"):
        checkpoint.open(paths[0])


# --- hostile bytes


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key(name: str, type_id: int, payload: bytes) -> bytes:
    return string(name) + struct.pack("<I", type_id) + payload


def array(element: int, count: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", element, count) + payload


def info(name: str, shape: tuple[int, ...], type_id: int = 0, offset: int = 0, dims: int | None = None) -> bytes:
    dims = len(shape) if dims is None else dims
    packed = b"".join(struct.pack("<Q", n) for n in shape)
    return string(name) + struct.pack("<I", dims) + packed + struct.pack("<IQ", type_id, offset)


def raw(keys=(), infos=(), data: bytes = bytes(256), version=3, num_keys=None, num_tensors=None, magic=b"GGUF"):
    num_keys = len(keys) if num_keys is None else num_keys
    num_tensors = len(infos) if num_tensors is None else num_tensors
    header = magic + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(keys) + b"".join(infos)
    return header + bytes(-len(header) % 32) + data


def nested(depth: int) -> bytes:
    return array(9, 1, nested(depth - 1)) if depth else array(4, 1, bytes(4))


BAD = {
    "empty": (b"", "at least 24 bytes"),
    "short": (b"GGUF", "at least 24 bytes"),
    "magic": (raw(magic=b"GGML"), "wrong magic"),
    "version 1": (raw(version=1), "version 1 is not supported"),
    "big-endian": (raw(version=0x03000000), "big-endian"),
    "many keys": (raw(num_keys=1 << 62), r"the number of metadata keys is \d+"),
    "many tensors": (raw(num_tensors=(1 << 64) - 1), r"the number of tensors is \d+"),
    "keys past the end": (raw(num_keys=1000), r"the number of metadata keys is 1000, more than"),
    "tensors past the end": (raw(num_tensors=1000), r"the number of tensors is 1000, more than"),
    "more keys than there are": (raw(num_keys=2), "key"),
    "long key": (raw([struct.pack("<Q", 1 << 63)], num_keys=1), "metadata key 0 has 9223372036854775808 bytes"),
    "key past the end": (raw([struct.pack("<Q", 60000)], num_keys=1), "metadata key 0 takes 60000 bytes"),
    "key no text": (raw([key("", 4, bytes(4)).replace(string(""), string(b"\xff\xfe"))]), "key 0 is not UTF-8"),
    "key twice": (raw([key("a.b", 4, bytes(4))] * 2), "'a.b' stands twice"),
    "long string": (raw([key("k", 8, struct.pack("<Q", 1 << 63))]), "'k' takes 9223372036854775808 bytes"),
    "string no text": (raw([key("k", 8, string(b"\xc3("))]), "'k' is not UTF-8"),
    "value type": (raw([key("k", 13, bytes(8))]), "'k' has the unknown value type 13"),
    "element type": (raw([key("k", 9, array(77, 1, bytes(8)))]), "'k' has the unknown value type 77"),
    "bool": (raw([key("k", 7, b"\x02")]), "neither 0 nor 1"),
    "long array": (raw([key("k", 9, array(12, 1 << 61))]), r"'k' takes \d+ bytes"),
    "array past the end": (raw([key("k", 9, array(4, 1000))]), "'k' takes 4000 bytes"),
    "many strings": (raw([key("k", 9, array(8, 1 << 40))]), "the length of 'k' is 1099511627776"),
    "long strings": (raw([key("k", 9, array(8, 1 << 20))]), "'k' is 1048576, more than the file can hold"),
    "strings past the end": (raw([key("k", 9, array(8, 3, struct.pack("<Q", 1 << 63)))]), "the file ends in number 0"),
    "last string too long": (raw([key("k", 9, array(8, 1, struct.pack("<Q", 500)))]), "'k' has 1 strings, but"),
    "nested": (raw([key("k", 9, nested(1))]), "array of arrays"),
    "nested deeply": (raw([key("k", 9, nested(300))]), "array of arrays"),
    "alignment 0": (raw([key("general.alignment", 4, struct.pack("<I", 0))]), "no power of two"),
    "alignment 3": (raw([key("general.alignment", 4, struct.pack("<I", 3))]), "no power of two"),
    "alignment huge": (raw([key("general.alignment", 4, struct.pack("<I", 1 << 31))]), "no power of two"),
    "alignment text": (raw([key("general.alignment", 8, string("x" * 5000))]), "no power of two"),
    "alignment bool": (raw([key("general.alignment", 7, b"\x01")]), "no power of two"),
    "dims huge": (raw(infos=[info("t", (8,), dims=1 << 31)]), "'t' has 2147483648 dimensions"),
    "dims 5": (raw(infos=[info("t", (1, 1, 1, 1, 1))]), "'t' has 5 dimensions"),
    "dims 0": (raw(infos=[info("t", ())]), "'t' has 0 dimensions"),
    "dimension 0": (raw(infos=[info("t", (8, 0))]), "'t' has a dimension of 0"),
    "size wraps 64 bits": (raw(infos=[info("t", (1 << 32, 1 << 30))]), "'t' lies outside the file"),
    "size wraps to small": (raw(infos=[info("t", (1 << 62, 1 << 62, 1 << 62, 1 << 62))]), "'t' lies outside"),
    "row": (raw(infos=[info("t", (33,), type_id=2)]), "rows of 33 values, no multiple of Q4_0's 32"),
    "type": (raw(infos=[info("t", (8,), type_id=4711)]), "'t' has the unknown type 4711"),
    "type removed": (raw(infos=[info("t", (8,), type_id=4)]), "'t' has the unknown type 4"),
    "type of others": (raw(infos=[info("t", (256,), type_id=34)]), "'t' is of type TQ1_0"),
    "offset odd": (raw(infos=[info("t", (8,), offset=5)]), "'t' has the offset 5"),
    "offset past the end": (raw(infos=[info("t", (8,), offset=256)]), "'t' lies outside the file"),
    "offset huge": (raw(infos=[info("t", (8,), offset=(1 << 64) - 32)]), "'t' lies outside the file"),
    "tensor twice": (raw(infos=[info("t", (8,)), info("t", (8,), offset=32)]), "tensor 't' stands twice"),
    "overlap": (raw(infos=[info("a", (16,)), info("b", (8,), offset=32)]), "'a' and 'b' overlap"),
    "same place": (raw(infos=[info("a", (8,)), info("b", (8,))]), "'a' and 'b' overlap"),
    "name past the end": (raw(infos=[struct.pack("<Q", 9999) + bytes(24)]), "the name of tensor 0 takes 9999"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_bytes_get_an_error_that_names_them(tmp_path, case):
    data, message = BAD[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises((FormatError, UnsupportedModel), match=message) as caught:
        checkpoint.open(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 600
    assert peak < 1 << 20


def test_a_valid_raw_file_is_read(tmp_path):
    """So that the cases above fail for their own reason."""
    path = tmp_path / "good.gguf"
    path.write_bytes(raw([key("k", 9, array(4, 2, bytes(8)))], [info("a", (8,)), info("b", (8, 2), offset=32)]))
    file = checkpoint.open(path)
    assert {name: t.shape for name, t in file.tensors.items()} == {"a": (8,), "b": (2, 8)}


def test_a_vocabulary_that_is_no_text_is_refused_when_it_is_read(tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw([key("words", 9, array(8, 2, string("fine") + string(b"\xff")))]))
    with pytest.raises(FormatError, match=r"bad\.gguf: 'words'\[1\] is not UTF-8"):
        checkpoint.open(path).metadata["words"]


def test_paths_that_are_no_files(tmp_path):
    with pytest.raises(ModelNotFound, match="there is no such file"):
        checkpoint.open(tmp_path / "none.gguf")
    with pytest.raises(FormatError, match="this is not a file"):
        checkpoint.open(tmp_path)


def test_a_large_vocabulary_opens_fast(tmp_path):
    words = [f"word-{i}" for i in range(262_144)]
    path = write(tmp_path / "m.gguf", {"tokenizer.ggml.tokens": words, "after": 7}, [])
    started = time.process_time()
    file = checkpoint.open(path)
    opened = time.process_time() - started
    assert file.metadata["after"] == 7
    assert file.metadata["tokenizer.ggml.tokens"] == words
    assert opened < 0.4  # 0.06 when it was written; a reader that makes an object per string takes seconds


def test_a_path_that_is_too_long():
    with pytest.raises(FormatError, match="cannot be read"):
        checkpoint.open("x" * 5000 + ".gguf")


def read_all(path: Path) -> None:
    file = checkpoint.open(path)
    for name in file.metadata:
        file.metadata[name]
    for tensor in file.tensors.values():
        tensor.dequantize()


@pytest.fixture(scope="module")
def valid(tmp_path_factory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    return path, write(path).read_bytes()


HEADER = 1500
"""Bytes of the valid file that hold its metadata and tensor infos."""

mutation = st.tuples(
    st.integers(0, HEADER), st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFF]) | st.integers(0, 255), st.integers(1, 8)
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutations=st.lists(mutation, max_size=4), keep=st.none() | st.integers(0, HEADER + 4000))
def test_any_damage_gives_a_clear_error_or_a_model(valid, mutations, keep):
    path, data = valid
    damaged = bytearray(data[:keep])
    for position, byte, run in mutations:
        if position + run <= len(damaged):
            damaged[position : position + run] = bytes([byte]) * run
    path.write_bytes(damaged)
    message = f"{path}: read"
    tracemalloc.start()
    try:
        read_all(path)
    except (FormatError, UnsupportedModel) as error:
        message = str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message.startswith((f"{path}: ", "tensor "))
    assert peak < 2 << 20
