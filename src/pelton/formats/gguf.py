"""GGUF files, versions 2 and 3, read by mmap and written.

The format is described in ggml's docs/gguf.md. A file is: magic, version, counts, metadata (key, type, value),
tensor infos (name, dimensions, type, offset), padding, tensor data. Nothing in a file is trusted: every count
and length is checked against the bytes that are left before anything is allocated for it, so memory stays
within a small multiple of the file's size. What is wrong raises FormatError, what is right but beyond Pelton
UnsupportedModel; both messages start with the path.
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pelton import _core
from pelton.errors import FormatError, ModelNotFound, UnsupportedModel
from pelton.formats import quants, strings
from pelton.formats.digest import FileStamp, ModelFile
from pelton.formats.quants import WeightType
from pelton.formats.strings import Strings
from pelton.formats.tensor import Tensor

MAGIC: Final = b"GGUF"
DEFAULT_ALIGNMENT: Final = 32
MAX_ALIGNMENT: Final = 1 << 20
MAX_NAME: Final = 65535
"""Bytes of a key (from the format's description) or of a tensor's name."""
MAX_DIMENSIONS: Final = 4
MAX_TENSORS: Final = 1 << 16
MAX_KEYS: Final = 1 << 16
MAX_STRINGS: Final = 1 << 22
"""Far above any model's; they bound the time and memory that a large hostile file can take."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING: Final = 8
_ARRAY: Final = 9
_NUMBERS: Final[dict[int, np.dtype[Any]]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")

Value = bool | int | float | str | list[str] | npt.NDArray[Any]
"""A metadata value: an array of strings is a list, an array of numbers a read-only one-dimensional ndarray."""


class Metadata(Mapping[str, "Value"]):
    """Keys and values of a file. Arrays of strings (vocabularies) are decoded when first asked for."""

    def __init__(self, values: Mapping[str, Value | Strings]) -> None:
        self._values = dict(values)
        self._encoded = {key: value for key, value in values.items() if isinstance(value, Strings)}

    def __getitem__(self, key: str) -> Value:
        """The value of `key`. Raises FormatError where a string is not UTF-8."""
        value = self._values[key]
        if isinstance(value, Strings):
            value = self._values[key] = value.decode()
        return value

    def encoded(self, key: str) -> Strings | None:
        """The strings of `key` as the file has them; None where it has no array of strings."""
        return self._encoded.get(key)

    def changed(self, without: Iterable[str], values: Mapping[str, Value]) -> Metadata:
        """The same with other values, and without some keys. Nothing is decoded for that."""
        dropped = frozenset(without)
        kept = {key: value for key, value in (self._values | self._encoded).items() if key not in dropped}
        return Metadata({**kept, **values})

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True)
class Part:
    """One file: all of a model, or one part of a split one."""

    file: ModelFile
    metadata: Metadata
    tensors: tuple[Tensor, ...]

    @property
    def path(self) -> str:
        """Where it lies."""
        return self.file.path


def read(path: str | Path) -> tuple[Part, ...]:
    """Opens a file or, given the first part of a split model, all its parts. Tensors are views of the files."""
    path = Path(path)
    first = _Reader(path).part()
    count = _split_number(first, "split.count") or 1
    if count == 1:
        return (first,)
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise FormatError(f"{path}: split.count is {count}, but the name does not end in -00001-of-{count:05d}.gguf")
    names = [f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    if _split_number(first, "split.no") != 0 or path.name != names[0]:
        raise FormatError(f"{path}: this is one of {count} parts; open the first one, {names[0]}")
    parts = [first]
    for number, name in enumerate(names[1:], start=1):
        if not path.with_name(name).exists():
            raise FormatError(f"{path}: part {number + 1} of {count} is missing: {name}")
        part = _Reader(path.with_name(name)).part()
        for key, expected in (("split.no", number), ("split.count", count)):
            if (found := _split_number(part, key)) != expected:
                raise FormatError(f"{part.path}: {key} is {found} and should be {expected}")
        parts.append(part)
    _check_whole(parts)
    return tuple(parts)


def _split_number(part: Part, key: str) -> int | None:
    value = part.metadata.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise FormatError(f"{part.path}: {key} is not a count")
    return value


def _check_whole(parts: Sequence[Part]) -> None:
    """All tensors are there and none stands in two parts."""
    seen: set[str] = set()
    for part in parts:
        for tensor in part.tensors:
            if tensor.name in seen:
                raise FormatError(f"{part.path}: tensor {_show(tensor.name)} stands in an earlier part too")
            seen.add(tensor.name)
    expected = _split_number(parts[0], "split.tensors.count")
    if expected is not None and expected != len(seen):
        raise FormatError(f"{parts[0].path}: split.tensors.count is {expected}, the parts hold {len(seen)}")


def _show(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:77] + "...")


class _Reader:
    """Walks over one file once. `what` in its methods names the field for error messages."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        try:
            if not path.exists():
                raise ModelNotFound(f"{path}: there is no such file")
            if not path.is_file():
                raise FormatError(f"{path}: this is not a file")
            with path.open("rb") as file:
                self._file = ModelFile(str(path), FileStamp.of(os.fstat(file.fileno())))
                self._size = self._file.stamp.size
                if self._size < 24:
                    raise self._error(f"a GGUF file has at least 24 bytes, this has {self._size}")
                self._data = mmap.mmap(file.fileno(), self._size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: cut short just now, or no path at all
            raise FormatError(f"{path}: cannot be read: {error}") from None

    def _error(self, message: str) -> FormatError:
        return FormatError(f"{self._path}: {message}")

    def _take(self, size: int, what: str) -> int:
        """Passes over `size` bytes and says where they start."""
        start = self._position
        if size > self._size - start:
            raise self._error(f"{what} takes {size} bytes, but only {self._size - start} are left")
        self._position = start + size
        return start

    def _u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self._data, self._take(4, what))[0]
        return value

    def _u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self._data, self._take(8, what))[0]
        return value

    def _count(self, what: str, limit: int, least_bytes: int) -> int:
        """A number of things that take at least so many bytes each."""
        count = self._u64(what)
        if count > limit:
            raise self._error(f"{what} is {count}, the most is {limit}")
        if count * least_bytes > self._size - self._position:
            raise self._error(f"{what} is {count}, more than the file can hold")
        return count

    def _string(self, what: str, limit: int | None = None) -> str:
        length = self._u64(f"the length of {what}")
        if limit is not None and length > limit:
            raise self._error(f"{what} has {length} bytes, the most is {limit}")
        start = self._take(length, what)
        try:
            return str(self._data[start : start + length], "utf-8")
        except UnicodeDecodeError:
            raise self._error(f"{what} is not UTF-8") from None

    def part(self) -> Part:
        if self._data[:4] != MAGIC:
            raise self._error("this is not a GGUF file (wrong magic)")
        self._position = 4
        version = self._u32("the version")
        if version not in (2, 3):
            if version & 0xFFFF == 0 and version:
                raise UnsupportedModel(f"{self._path}: big-endian GGUF files are not supported")
            raise UnsupportedModel(f"{self._path}: GGUF version {version} is not supported, only 2 and 3 are")
        num_tensors = self._count("the number of tensors", MAX_TENSORS, 32)
        num_keys = self._count("the number of metadata keys", MAX_KEYS, 13)
        metadata = self._metadata(num_keys)
        tensors = self._tensors(num_tensors, self._alignment(metadata))
        return Part(self._file, metadata, tensors)

    def _metadata(self, count: int) -> Metadata:
        values: dict[str, Value | Strings] = {}
        for i in range(count):
            key = self._string(f"metadata key {i}", MAX_NAME)
            if key in values:
                raise self._error(f"metadata key {_show(key)} stands twice")
            values[key] = self._value(self._u32(f"the type of {_show(key)}"), _show(key))
        return Metadata(values)

    def _value(self, type_id: int, what: str) -> Value | Strings:
        if type_id == _STRING:
            return self._string(what)
        if type_id == _ARRAY:
            element = self._u32(f"the element type of {what}")
            if element == _STRING:
                return self._strings(self._count(f"the length of {what}", MAX_STRINGS, 8), what)
            if element == _ARRAY:
                raise UnsupportedModel(f"{self._path}: {what} is an array of arrays, which is not supported")
            return self._numbers(element, self._u64(f"the length of {what}"), what)
        value: bool | int | float = self._numbers(type_id, 1, what)[0].item()
        return value

    def _numbers(self, type_id: int, count: int, what: str) -> npt.NDArray[Any]:
        dtype = _NUMBERS.get(type_id)
        if dtype is None:
            raise self._error(f"{what} has the unknown value type {type_id}")
        start = self._take(count * dtype.itemsize, what)
        numbers: npt.NDArray[Any] = np.frombuffer(self._data, dtype, count, start).copy()  # aligned
        if dtype.kind == "b" and (numbers.view(np.uint8) > 1).any():
            raise self._error(f"{what} is a bool that is neither 0 nor 1")
        numbers.flags.writeable = False
        return numbers

    def _strings(self, count: int, what: str) -> Strings:
        left = np.frombuffer(self._data, np.uint8, offset=self._position)
        num_whole, size = _core.skip_strings(left, count)
        if num_whole < count:
            raise self._error(f"{what} has {count} strings, but the file ends in number {num_whole}")
        self._take(size, what)
        return Strings(f"{self._path}: {what}", left[:size], count)

    def _alignment(self, metadata: Metadata) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        is_power = isinstance(alignment, int) and 0 < alignment <= MAX_ALIGNMENT and alignment.bit_count() == 1
        if not is_power or isinstance(alignment, bool):
            raise self._error(f"general.alignment is no power of two up to {MAX_ALIGNMENT}: {alignment!r:.80}")
        assert isinstance(alignment, int)
        return alignment

    def _tensors(self, count: int, alignment: int) -> tuple[Tensor, ...]:
        infos: dict[str, tuple[WeightType, tuple[int, ...], int, int]] = {}
        for i in range(count):
            name = self._string(f"the name of tensor {i}", MAX_NAME)
            if name in infos:
                raise self._error(f"tensor {_show(name)} stands twice")
            infos[name] = self._info(f"tensor {_show(name)}", alignment)
        base = -(-self._position // alignment) * alignment
        tensors = []
        for name, (type, shape, offset, size) in infos.items():
            if base + offset + size > self._size:
                raise self._error(
                    f"tensor {_show(name)} lies outside the file: its {size} bytes start at {base} + {offset}"
                )
            tensors.append(Tensor(name, type, shape, np.frombuffer(self._data, np.uint8, size, base + offset)))
        by_offset = sorted((offset, offset + size, name) for name, (_, _, offset, size) in infos.items())
        for (_, end, name), (start, _, other) in itertools.pairwise(by_offset):
            if start < end:
                raise self._error(f"tensors {_show(name)} and {_show(other)} overlap")
        return tuple(tensors)

    def _info(self, what: str, alignment: int) -> tuple[WeightType, tuple[int, ...], int, int]:
        """Type, shape (rows first), offset and size of a tensor."""
        num_dimensions = self._u32(f"the number of dimensions of {what}")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(f"{what} has {num_dimensions} dimensions, from 1 to {MAX_DIMENSIONS} are allowed")
        shape = tuple(self._u64(f"a dimension of {what}") for _ in range(num_dimensions))[::-1]
        if 0 in shape:
            raise self._error(f"{what} has a dimension of 0")
        type_id = self._u32(f"the type of {what}")
        try:
            type = WeightType(type_id)
        except ValueError:
            raise self._unknown_type(type_id, what) from None
        if shape[-1] % quants.block_size(type):
            block = quants.block_size(type)
            raise self._error(f"{what} has rows of {shape[-1]} values, no multiple of {type.name}'s {block}")
        offset = self._u64(f"the offset of {what}")
        if offset % alignment:
            raise self._error(f"{what} has the offset {offset}, no multiple of the alignment {alignment}")
        return type, shape, offset, prod(shape[:-1]) * quants.row_bytes(type, shape[-1])

    def _unknown_type(self, type_id: int, what: str) -> FormatError | UnsupportedModel:
        if name := quants.OTHER_TYPES.get(type_id):
            return UnsupportedModel(f"{self._path}: {what} is of type {name}, which is not supported")
        return self._error(f"{what} has the unknown type {type_id}")


def write(path: str | Path, metadata: Mapping[str, Any], tensors: Iterable[Tensor]) -> None:
    """Writes a GGUF file of version 3.

    Values of metadata: bool, int (as the first of u32, i32, u64, i64 that holds it), float (as f32), str, a NumPy
    scalar or one-dimensional array (as its dtype), or a list of strings, ints (i32), floats (f32) or bools.
    """
    tensors = list(tensors)
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    header = [MAGIC, _U32.pack(3), _U64.pack(len(tensors)), _U64.pack(len(metadata))]
    header += [strings.encode([key]) + _encode(value) for key, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        header += [strings.encode([tensor.name]), _U32.pack(len(tensor.shape))]
        header += [_U64.pack(size) for size in reversed(tensor.shape)]
        header += [_U32.pack(tensor.type), _U64.pack(offset)]
        offset += -(-tensor.data.size // alignment) * alignment
    with Path(path).open("wb") as file:
        file.write(b"".join(header))
        for tensor in tensors:
            file.write(bytes(-file.tell() % alignment))
            file.write(tensor.data.data)


def _encode(value: Any) -> bytes:
    """A value with its type in front."""
    if isinstance(value, str):
        return _U32.pack(_STRING) + strings.encode([value])
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + strings.encode(value)
    array = _typed(value)
    if array.ndim == 0:
        return _U32.pack(_number_type(array.dtype)) + array.tobytes()
    return struct.pack("<IIQ", _ARRAY, _number_type(array.dtype), array.size) + array.tobytes()


def _typed(value: Any) -> npt.NDArray[Any]:
    """Numbers with the dtype that they are written as."""
    array = np.asarray(value)
    if isinstance(value, np.generic | np.ndarray) or array.dtype == bool:
        return array
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    choices = ["u4", "i4", "u8", "i8"] if array.ndim == 0 else ["i4", "i8"]
    low, high = (int(array), int(array)) if array.ndim == 0 else (int(array.min()), int(array.max()))
    for choice in choices:
        info = np.iinfo(choice)
        if info.min <= low and high <= info.max:
            return array.astype(choice)
    raise OverflowError(f"{value!r} does not fit 64 bits")


def _number_type(dtype: np.dtype[Any]) -> int:
    for type_id, candidate in _NUMBERS.items():
        if candidate == dtype:
            return type_id
    raise TypeError(f"GGUF has no values of type {dtype}")
