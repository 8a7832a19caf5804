"""A named tensor in the form that files store it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from pelton.errors import UnsupportedModel
from pelton.formats import quants
from pelton.formats.quants import WeightType


@dataclass(frozen=True, eq=False)
class Tensor:
    """File bytes with a name, a type and a shape.

    `shape` is rows first: (columns,), (rows, columns) or (experts, rows, columns); the last axis is contiguous and
    a multiple of the type's block (GGUF stores these dimensions in reverse order). `data` is a read-only uint8
    view of all bytes, row after row.
    """

    name: str
    type: WeightType
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    @classmethod
    def quantize(cls, name: str, values: npt.ArrayLike, type: WeightType) -> Tensor:
        """The tensor that holds `values` (finite floats of the tensor's shape) as `type`."""
        array = np.asarray(values, np.float32)
        data = quants.quantize(type, array.reshape(-1, array.shape[-1])).reshape(-1)
        data.flags.writeable = False
        return cls(name, type, array.shape, data)

    def rows(self) -> npt.NDArray[np.uint8]:
        """The bytes as [rows, bytes per row]; of a stack of matrices: all its rows. No copy."""
        return self.data.reshape(prod(self.shape[:-1]), quants.row_bytes(self.type, self.shape[-1]))

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The values as float32 of the tensor's shape. Raises UnsupportedModel for a type without codec."""
        if not quants.is_supported(self.type):
            raise UnsupportedModel(f"tensor {self.name!r}: weights of type {self.type.name} are not supported")
        return quants.dequantize(self.type, self.rows()).reshape(self.shape)
