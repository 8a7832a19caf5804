"""The compiled core."""

import numpy as np
import numpy.typing as npt

def isas() -> list[str]:
    """The instruction sets that this build and this CPU have, best last."""

class KVCache:
    """One cache group's keys and values, in blocks of 32 tokens, zero at first. `type` is "f32" or "bf16"."""

    def __init__(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, value_dim: int, type: str, num_blocks: int
    ) -> None: ...
    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""

    def copy(self, src: int, dst: int) -> None:
        """Copy a block in all layers."""

    def read(self, blocks: npt.NDArray[np.int32]) -> bytes:
        """The opaque bytes of some blocks, in that order."""

    def write(self, blocks: npt.NDArray[np.int32], data: bytes) -> None:
        """Write back what `read` gave. Raises ValueError for another number of bytes."""

def attend_alone(
    *,
    cache: KVCache,
    slot: int,
    q: npt.NDArray[np.float32],
    k: npt.NDArray[np.float32],
    v: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
    positions: npt.NDArray[np.int32],
    seq_starts: npt.NDArray[np.int32],
    tables: npt.NDArray[np.int32],
    num_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    num_threads: int = 1,
    isa: str = "",
) -> None:
    """One layer's attention outside of any plan, into `out`: for tests and timing."""

class LinearKernel:
    """One instruction set's linear kernel of one weight type, on arrays: for tests and measurements.

    Raises ValueError if this CPU has no such instruction set, or the set no kernel for the type.
    """

    def __init__(self, isa: str, type: int) -> None: ...
    @property
    def family(self) -> int:
        """How activations are prepared: 0 float32, 1 int8, 2 bf16."""

    def tile_bytes(self, K: int) -> int:
        """Packed bytes of 16 rows."""

    def pack(self, rows: npt.NDArray[np.uint8], K: int) -> npt.NDArray[np.uint8]:
        """File bytes [N, row bytes] -> packed tiles of 16 rows."""

    def prepare(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
        """Activations [M, K] -> what `run` takes."""

    def run(
        self,
        tiles: npt.NDArray[np.uint8],
        act: npt.NDArray[np.uint8],
        K: int,
        out: npt.NDArray[np.float32],
        t0: int,
        t1: int,
    ) -> None:
        """x @ w.T for tiles t0 .. t1-1, into columns 16 t0 .. 16 t1 of `out` [M, 16 * tiles]. Releases the GIL."""

    def unpack_row(self, tiles: npt.NDArray[np.uint8], row: int, K: int) -> npt.NDArray[np.float32]:
        """One row of the weight, dequantised."""
