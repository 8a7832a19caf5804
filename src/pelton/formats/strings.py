"""Arrays of strings as GGUF files have them: of each the length in 8 bytes, little-endian, and then its UTF-8."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from pelton.errors import FormatError

_U64 = struct.Struct("<Q")


def encode(texts: Iterable[str]) -> bytes:
    """The strings one behind the other."""
    encoded = [text.encode() for text in texts]
    return b"".join(part for each in encoded for part in (_U64.pack(len(each)), each))


@dataclass(frozen=True, eq=False)
class Strings:
    """`count` strings that fill `data`. Their borders have been checked, not that they are UTF-8. `where`: what they
    are, for errors."""

    where: str
    data: npt.NDArray[np.uint8]
    count: int

    @classmethod
    def of(cls, where: str, texts: Iterable[str]) -> Self:
        """Those of a list."""
        texts = list(texts)
        return cls(where, np.frombuffer(encode(texts), np.uint8), len(texts))

    def decode(self) -> list[str]:
        """The list of them. Raises `FormatError` where one is not UTF-8."""
        data, unpack, position = self.data.tobytes(), _U64.unpack_from, 0
        strings = []
        for i in range(self.count):
            end = position + 8 + unpack(data, position)[0]
            try:
                strings.append(data[position + 8 : end].decode())
            except UnicodeDecodeError:
                raise FormatError(f"{self.where}[{i}] is not UTF-8") from None
            position = end
        return strings
