"""Weights in memory: what is packed in which form, where it lies, and the packing itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from pelton import _core
from pelton.errors import UnsupportedModel
from pelton.formats.quants import dequantize
from pelton.ops.data import Weight

FAMILIES = ("f32", "int8", "bf16")
"""Names of the core's kernel families, by number."""
PACKED_VERSION = 1
"""Raised whenever packed bytes change their meaning: part of the numerics fingerprint."""
TILE_ROWS = 16
_ALIGN = 64


@dataclass(frozen=True)
class Slot:
    """One weight's place: a matrix in tiles of 16 rows, or a vector as float32."""

    offset: int
    bytes: int


@dataclass(frozen=True)
class Layout:
    """Places of all weights of a plan, in the order in which the plan first uses them."""

    slots: Mapping[str, Slot]
    bytes: int


def family_of(weight: Weight, machine: _core.Machine) -> str:
    """The kernel family of a matrix. Raises UnsupportedModel where the machine has no kernel for its type."""
    family = machine.family(weight.type)
    if family < 0:
        raise UnsupportedModel(f"{weight.name}: no {machine.isa} kernel for weights of type {weight.type.name}")
    return FAMILIES[family]


def lay_out(names: Iterable[str], weights: Mapping[str, Weight], machine: _core.Machine) -> Layout:
    """Where each weight will lie. Reads no weight's bytes."""
    slots: dict[str, Slot] = {}
    end = 0
    for name in names:
        size = -(-_packed_bytes(weights[name], machine) // _ALIGN) * _ALIGN
        slots[name] = Slot(end, size)
        end += size
    return Layout(slots, end)


def _packed_bytes(weight: Weight, machine: _core.Machine) -> int:
    match weight.shape:
        case (width,):
            return 4 * width
        case (rows, columns):
            family_of(weight, machine)
            return -(-rows // TILE_ROWS) * machine.tile_bytes(weight.type, columns)
    raise UnsupportedModel(f"{weight.name}: weights of shape {weight.shape} cannot be packed")


def pack(
    layout: Layout,
    weights: Mapping[str, Weight],
    machine: _core.Machine,
    progress: Callable[[float], None] | None,
) -> _core.Memory:
    """Read each weight once and put it into its place, with all threads. `progress` gets the share that is done."""
    memory = _core.Memory(layout.bytes)
    for name, slot in layout.slots.items():
        weight = weights[name]
        if len(weight.shape) == 1:
            values = dequantize(weight.type, weight.data.reshape(1, -1))[0]
            if weight.row_order is not None:
                values = values[weight.row_order]
            memory.write(slot.offset, np.ascontiguousarray(values, np.float32).view(np.uint8))
        else:
            rows, columns = weight.shape
            machine.pack(weight.type, weight.data.reshape(-1), rows, columns, weight.row_order, memory, slot.offset)
        if progress is not None:
            progress((slot.offset + slot.bytes) / layout.bytes)
    return memory


def digest(weights: Mapping[str, Weight]) -> str:
    """Tells models apart that come without a digest of their file: names, types, shapes and the ends of the bytes."""
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        weight = weights[name]
        flat = weight.data.reshape(-1)
        state.update(f"{name} {weight.type.name} {weight.shape} {prod(flat.shape)}\n".encode())
        state.update(flat[:256].tobytes() + flat[-256:].tobytes())
        if weight.row_order is not None:
            state.update(weight.row_order.tobytes())
    return state.hexdigest()
