"""Weights in memory: what is packed in which form, where it lies, and the packing itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from pelton import _core
from pelton.errors import UnsupportedModel
from pelton.formats.quants import WeightType, dequantize, row_bytes
from pelton.ops.data import Weight

FAMILIES = ("f32", "int8", "bf16")
"""Names of the core's kernel families, by number."""
PACKED_VERSION = 2
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


def layout_key(layout: Layout, weights: Mapping[str, Weight], machine: _core.Machine) -> bytes:
    """Names all that packed bytes depend on beside the model's files. Machines whose kernels pack alike share it: the
    kernels are told apart by what they make of a tile, not by their names."""
    state = hashlib.blake2b(f"{PACKED_VERSION}\n".encode(), digest_size=32)
    samples: dict[tuple[WeightType, int], bytes] = {}
    for name, slot in layout.slots.items():
        weight = weights[name]
        state.update(f"{name} {slot.offset} {slot.bytes} {weight.type.name} {weight.shape}\n".encode())
        if weight.row_order is not None:
            state.update(weight.row_order.tobytes())
        if len(weight.shape) == 2:
            kind = weight.type, weight.shape[1]
            if kind not in samples:
                samples[kind] = _packed_sample(*kind, machine)
            state.update(samples[kind])
    return state.digest()


def _packed_sample(type: WeightType, columns: int, machine: _core.Machine) -> bytes:
    """What the kernel makes of a fixed tile of any file bytes whose half floats are numbers."""
    size = TILE_ROWS * row_bytes(type, columns)
    file = (np.arange(size, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(24) & 0x3B).astype(np.uint8)
    memory = _core.Memory(machine.tile_bytes(type, columns))
    machine.pack(type, file, TILE_ROWS, columns, None, memory, 0)
    return hashlib.blake2b(memory.view(0, memory.size).data, digest_size=32).digest()
