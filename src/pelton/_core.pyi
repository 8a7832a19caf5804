"""The compiled core."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pelton.ops.sampling import Processing, SampleArrays, Sampled

def isas() -> list[str]:
    """The instruction sets that this build and this CPU have, best last."""

class KVCache:
    """One cache group's keys and values, in blocks of 32 tokens, zero at first. `type` is a KVType."""

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
    machine: Machine,
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
    repeat: int = 1,
) -> None:
    """Attention outside of any plan, in layer `slot` of a cache, into `out`: for tests and timing. Repeats go on in the
    next layers, the first after the last."""

def sample_alone(
    *,
    machine: Machine,
    logits: npt.NDArray[np.float32],
    params: SampleArrays,
    out: Sampled,
    processing: Processing | None = None,
    repeat: int = 1,
) -> None:
    """Draw from whole logits [R, vocab] outside of any plan, into `out`, zeros before: for tests and timing."""

def kv_block_bytes(*, num_layers: int, num_kv_heads: int, head_dim: int, value_dim: int, type: str) -> int:
    """`block_bytes` of a cache that is not there yet."""

def attend_workspace(
    *,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    type: str,
    num_heads: int,
    max_context: int,
    num_threads: int,
) -> int:
    """Bytes of workspace that one attention layer wants at most."""

def row_ops() -> list[str]:
    """Names of the row ops that have a kernel."""

class Memory:
    """Zeroed anonymous memory, in huge pages where the system has them."""

    def __init__(self, bytes: int) -> None: ...
    @property
    def size(self) -> int: ...
    def write(self, offset: int, bytes: npt.NDArray[np.uint8]) -> None: ...
    def view(self, offset: int, bytes: int) -> npt.NDArray[np.uint8]:
        """The memory itself, read-only; kept for as long as the view is."""

STORED_CHUNK: int
"""Bytes of packed weights that have one checksum."""

def checksum(data: npt.NDArray[np.uint8]) -> int:
    """64 bits that change with any change of the bytes. Releases the GIL."""

class Machine:
    """The kernels of one instruction set, and threads. Raises ValueError for an instruction set that is not here."""

    def __init__(self, isa: str, num_threads: int) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    def family(self, type: int) -> int:
        """The kernel family of a weight type, by number; -1: there is no kernel."""

    def tile_bytes(self, type: int, K: int) -> int:
        """Packed bytes of 16 rows of K columns."""

    def prepared_bytes(self, family: int, M: int, K: int) -> int:
        """Bytes of M rows of K activations in a family's form."""

    def scratch_bytes(self, max_tokens: int) -> int:
        """Scratch of all threads, for steps of up to so many tokens."""

    def hand_out(self, counts: npt.NDArray[np.int32], repeat: int) -> None:
        """The threads alone, for their test and their benchmark: `repeat` jobs, each of one chunk per row of `counts`,
        which adds 1 to the row's first element."""

    def meet(self, times: int) -> None:
        """Let all threads meet, so many times: handing out work and waiting for its end, by themselves."""

    def pack(
        self,
        type: int,
        file: npt.NDArray[np.uint8],
        num_rows: int,
        K: int,
        row_order: npt.NDArray[np.int32] | None,
        memory: Memory,
        offset: int,
    ) -> None:
        """Pack file bytes into tiles at `offset`, with all threads. Row i is file row row_order[i], or i."""

    def read_stored(
        self,
        fd: int,
        file_offset: int,
        memory: Memory,
        offset: int,
        bytes: int,
        checksums: npt.NDArray[np.uint64],
    ) -> bool:
        """Read a file's bytes into memory with all threads, a checksum for each STORED_CHUNK of them. False: they are
        not all there, or not those that the checksums are of; the memory then holds anything."""

_Ids = tuple[int, int, int]

class Step:
    """The arrays of one step, as `Batch` has them. They are kept, and not copied."""

    def __init__(
        self,
        ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        seq_starts: npt.NDArray[np.int32],
        tables: Sequence[npt.NDArray[np.int32]],
        logit_rows: npt.NDArray[np.int32],
        num_pooled: int,
    ) -> None:
        """The last `num_pooled` of the logit rows are not for the head."""

    @property
    def num_tokens(self) -> int:
        """Those that it computes."""

class Drawing:
    """What so many rows are drawn with, and where the results go, which are zeros before. The arrays are kept."""

    def __init__(self, params: SampleArrays, out: Sampled, num_rows: int, vocab_size: int) -> None: ...

def advance(step: Step, drawing: Drawing) -> None:
    """Make a step of one token and one row per sequence the next one, in place: each sequence has the token that it
    drew, a position on in the step and in its output."""

class Program:
    """A plan in the core. Operands are numbered as they are added; -1 stands for one that is not given. Numbers of
    epilogues and activations are those of csrc/ops/linear.h and csrc/kernels/rows.h. Errors are ValueError."""

    def __init__(
        self,
        machine: Machine,
        caches: list[KVCache],
        arena: int,
        workspace: int,
        max_tokens: int,
        profile: bool,
    ) -> None: ...
    def add_rows(self, offset: int, width: int, stride: int) -> int: ...
    def add_prepared(self, offset: int, width: int, family: int) -> int: ...
    def add_vector(self, weights: Memory, offset: int, width: int) -> int: ...
    def add_matrix(self, type: int, weights: Memory, offset: int, N: int, K: int) -> int: ...
    def begin_rows(self, per_logit_row: bool) -> None: ...
    def begin_linears(self, per_logit_row: bool) -> None: ...
    def add_row_step(self, op: str, outs: list[int], ins: list[int], ints: list[int], floats: list[float]) -> None: ...
    def add_linear(self, epilogue: int, out: int, product: _Ids, up: _Ids, residual: int, activation: int) -> None:
        """A product is (x, weight, bias)."""

    def add_attend(
        self,
        q: int,
        k: int,
        v: int,
        out: int,
        group: int,
        slot: int,
        num_heads: int,
        scale: float,
        window: int,
        softcap: float,
    ) -> None: ...
    def set_head(self, x: int, product: _Ids, logits: int, tile_rows: int, num_valid: int, cap: float) -> None: ...
    def run(self, step: Step) -> None:
        """One step; returns when it has run."""

    def logits(self, out: npt.NDArray[np.float32]) -> None:
        """The whole logits of the last step's drawn rows, [R - num_pooled, num_valid]."""

    def states(self, out: npt.NDArray[np.float32]) -> None:
        """What the head would read of the last step's pooled rows, [num_pooled, width]."""

    def sample(self, drawing: Drawing, processing: Processing | None = None) -> None:
        """Draw for each of the last step's drawn rows."""

    def proceed(self, step: Step, drawing: Drawing, ends: npt.NDArray[np.int32]) -> bytes | None:
        """`advance`, `run` and `sample` of a step of one token and one row per sequence. The ids that were drawn; None
        where there is an error or one of `ends` among them."""

    def timings(self) -> list[tuple[list[tuple[int, int]], int]]:
        """Of steps in which each sequence has one token, then of all others: (nanoseconds, runs) of each phase, the
        head and sampling behind them; and the CPU nanoseconds of the calling thread between calls. Empty and 0 unless
        profiling is on."""

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

class Limits:
    """What this CPU can do at most on one thread. Each call releases the GIL and returns a number of no interest.

    Raises ValueError if this CPU has no such instruction set.
    """

    def __init__(self, isa: str) -> None: ...
    def read(self, data: npt.NDArray[np.uint8]) -> int:
        """Read bytes from front to end (whole runs of 256)."""

    def int8_dots(self, num_dots: int) -> int:
        """num_dots (a multiple of 64) times 16 rows x 32 columns of integer multiply-adds."""

    def float_products(self, num_columns: int) -> float:
        """num_columns times 16 x 4 fused multiply-adds."""

    @property
    def has_tiles(self) -> bool:
        """Are there tile registers, which multiply bf16 numbers?"""

    def bf16_products(self, num_steps: int) -> float:
        """num_steps (a multiple of 4) times 16 x 16 x 32 multiply-adds of tiles; ValueError where there are none."""

def skip_strings(data: npt.NDArray[np.uint8], count: int) -> tuple[int, int]:
    """How many of `count` strings are whole in `data`, of each the length in 8 bytes and then its bytes, and how many
    bytes these take."""

class Vocabulary:
    """`count` tokens, whose texts are in `data` as in a GGUF file: of each the length in 8 bytes and then its UTF-8.
    Raises ValueError with what is wrong of them, to be read behind their name."""

    def __init__(self, data: npt.NDArray[np.uint8], count: int) -> None: ...
    def __len__(self) -> int: ...
    def text(self, id: int) -> str:
        """A token's text."""

    def id_of(self, text: str) -> int:
        """The token of a text, -1 where there is none that is not hidden."""

    def hide(self, ids: npt.NDArray[np.int32]) -> None:
        """From now on no text is one of these tokens."""

    def longest(self) -> int:
        """Characters of the longest token."""

class SentencePiece:
    """`ranks`, one for each token: which is joined first, the lowest, or -1: it is only found as a single character.
    `byte_ids`: the tokens of the 256 bytes."""

    def __init__(
        self, vocabulary: Vocabulary, ranks: npt.NDArray[np.int32], byte_ids: npt.NDArray[np.int32]
    ) -> None: ...
    def encode(self, text: str) -> list[int]:
        """Its ids."""

class BytePairs:
    """`merges`: `count` strings "left right" as a GGUF file has them, the best first. `characters`: what stands for
    each byte in the tokens' texts. `takes_words`: a word that is itself a token is that token. Raises ValueError with
    what is wrong of the merges, to be read behind their name."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        merges: npt.NDArray[np.uint8],
        count: int,
        characters: Sequence[str],
        takes_words: bool,
    ) -> None: ...
    def encode(self, text: str, words: list[tuple[int, int]]) -> list[int]:
        """Its ids. `words`: the first character of each, and the one behind its last."""
