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
