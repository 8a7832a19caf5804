"""One peer of `compare.py` and `quality.py`: llama.cpp through llama-cpp-python, in that package's own interpreter.

Reads one JSON job per line ({"work": "decode" | "prompt", ...}) and answers {"seconds": s, "tokens": n}; a job
{"work": "logits", "ids": [...], "first": position, "file": path} goes on with a sequence (or begins one, at position
0), writes the logits of all its tokens to the file as float32 and answers {"vocab": v}.
Uses the C API directly, so that no Python work but an argmax stands between two steps.
"""

import json
import sys
import time

import llama_cpp as lc
import numpy as np

MAX_BATCH = 2048


class Worker:
    def __init__(self, path: str, threads: int) -> None:
        lc.llama_backend_init()
        model_params = lc.llama_model_default_params()
        self.model = lc.llama_model_load_from_file(path.encode(), model_params)
        self.vocab_size = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self.model))
        params = lc.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 16384, MAX_BATCH, 512, 64
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self.context = lc.llama_init_from_model(self.model, params)
        self.memory = lc.llama_get_memory(self.context)
        self.prompts: list[list[int]] = []  # whose keys and values are in memory
        self.batch = lc.llama_batch_init(4096, 0, 1)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """rows: (token, position, sequence, wants logits)"""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wants) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if lc.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")

    def argmax(self, row: int) -> int:
        pointer = lc.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(pointer, (self.vocab_size,)).argmax())

    def write_logits(self, job: dict) -> dict:
        ids, first = job["ids"], job["first"]
        if first == 0:
            lc.llama_memory_clear(self.memory, True)
        self.decode([(token, first + i, 0, True) for i, token in enumerate(ids)])
        pointer = lc.llama_get_logits(self.context)
        np.ctypeslib.as_array(pointer, (len(ids), self.vocab_size)).tofile(job["file"])
        return {"vocab": self.vocab_size}

    def read_prompts(self, prompts: list[list[int]], *, is_fresh: bool) -> list[int]:
        """The likeliest next token of each. Prompts that were the last job's too are in memory: only their last tokens
        are read again."""
        is_known = prompts == self.prompts and not is_fresh
        if not is_known:
            lc.llama_memory_clear(self.memory, True)
        self.prompts = prompts
        last = []
        for sequence, ids in enumerate(prompts):
            end = len(ids) - 1
            if is_known:
                lc.llama_memory_seq_rm(self.memory, sequence, end, -1)
            for first in range(end if is_known else 0, len(ids), MAX_BATCH):
                part = range(first, min(first + MAX_BATCH, len(ids)))
                self.decode([(ids[i], i, sequence, i == end) for i in part])
            last.append(self.argmax(end - part[0]))
        return last

    def run(self, job: dict) -> dict:
        if job["work"] == "logits":
            self.prompts = []
            return self.write_logits(job)
        prompts: list[list[int]] = job["prompts"]
        start = time.perf_counter()
        last = self.read_prompts(prompts, is_fresh=job["work"] == "prompt")
        if job["work"] == "prompt":
            return {"seconds": time.perf_counter() - start, "tokens": sum(map(len, prompts))}
        start = time.perf_counter()
        for step in range(job["tokens"]):
            self.decode([(last[s], len(ids) + step, s, True) for s, ids in enumerate(prompts)])
            last = [self.argmax(s) for s in range(len(prompts))]
        return {"seconds": time.perf_counter() - start, "tokens": job["tokens"] * len(prompts)}


def main() -> None:
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    info = lc.llama_print_system_info().decode()
    print(json.dumps({"ready": f"llama-cpp-python {lc.__version__}", "info": info}), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
