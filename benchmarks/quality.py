"""Pelton's nearness to float32 beside llama.cpp's: the same file, the same tokens, the same baseline.

    python benchmarks/quality.py MODEL.gguf --peer llama.cpp=PYTHON --tokens 4096 --write docs/quality.md

Prints what `pelton bench quality` prints, with the peer as one more line: its logits are held against Pelton's float32
baseline (the same dequantised weights, float32 activations, keys and values). PYTHON is the interpreter of a virtual
environment that has llama-cpp-python. The NumPy reference stands for kernel families that this machine lacks; give
OPENBLAS_NUM_THREADS=1 where other work runs beside.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
from compare import Engine, write

from pelton.bench import quality as bench
from pelton.bench.divergence import F32, I32, Quality
from pelton.cli.quality import COLUMNS, cells, read_text
from pelton.formats import checkpoint
from pelton.models.base import load
from pelton.ops.data import KVType
from pelton.text.tokenizer import Tokenizer


class Peer:
    """A peer's worker process as one more candidate."""

    def __init__(self, name: str, python: str, model: str, threads: int, vocab_size: int, folder: Path) -> None:
        self.name = name
        self.engine = Engine(name, python, model, threads)
        self.vocab_size = vocab_size
        self.file = folder / "logits"

    def logits(self, ids: I32) -> Iterator[F32]:
        for first in range(0, ids.size, bench.STEP_TOKENS):
            part = ids[first : first + bench.STEP_TOKENS].tolist()
            answer = self.engine.ask({"work": "logits", "ids": part, "first": first, "file": str(self.file)})
            yield np.fromfile(self.file, np.float32).reshape(len(part), answer["vocab"])[:, : self.vocab_size]


def table(results: list[Quality], peers: list[Peer]) -> str:
    """Markdown: the command's table, and each mean divergence as a multiple of each peer's."""
    means = {result.name: result.mean_divergence.value for result in results}
    head = ["", *COLUMNS, *(f"mean KLD / {peer.name}'s" for peer in peers)]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for i, result in enumerate(results):
        ratios = ["-" if i == 0 else f"{means[result.name] / means[peer.name]:.3g}" for peer in peers]
        lines.append("| " + " | ".join([*cells(result, is_baseline=i == 0), *ratios]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", action="append", default=[], metavar="llama.cpp=PYTHON")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--text", type=Path, metavar="FILE")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--kv-dtype", action="append", choices=get_args(KVType), default=[])
    parser.add_argument("--reference", action="append", choices=["float", "int8", "bf16", "bf16-unordered"], default=[])
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into a page that has a place for it")
    args = parser.parse_args()
    opened = checkpoint.open(Path(args.model))
    text, source = read_text(args.text)
    tokenizer = Tokenizer(opened.metadata)
    begin = tokenizer.bos_id if tokenizer.add_bos else None
    windows = bench.cut(tokenizer.encode(text, add_special=False), args.context, args.tokens, begin)
    model = load(opened, args.context)
    options = bench.Options(
        kv_types=tuple(args.kv_dtype) or ("f16", "f32"),
        references=tuple(args.reference),
        num_threads=args.threads,
        context=args.context,
    )
    with tempfile.TemporaryDirectory() as folder:
        pairs = [peer.split("=", 1) for peer in args.peer]
        peers = [
            Peer(name, python, args.model, args.threads, model.config.vocab_size, Path(folder))
            for name, python in pairs
        ]
        candidates = [*bench.load_candidates(model, options), *peers]

        def progress(known: list[Quality]) -> None:
            done = known[0].num_tokens // (args.context - 1)
            means = ", ".join(f"{one.name} {one.mean_divergence.value:.2g}" for one in known[1:])
            print(f"window {done} of {len(windows)}: {means}", file=sys.stderr, flush=True)

        results = bench.compare(bench.load_baseline(model, options), candidates, windows, progress)
        for peer in peers:
            peer.engine.close()
    title = f"{Path(args.model).name}, {results[0].num_tokens} tokens of {source}, windows of {args.context}"
    page = f"{title}\n\n{table(results, peers)}\n"
    print(page)
    if args.write is not None:
        write(args.write, f"quality {Path(args.model).stem}", page)


if __name__ == "__main__":
    main()
