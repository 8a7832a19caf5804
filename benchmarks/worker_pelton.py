"""Pelton's side of `compare.py`: the engine in this process, stepped directly.

Reads one JSON job per line and answers {"seconds": s, "tokens": n, "least_seconds": s}: the last is what the work would
take if memory or arithmetic, whichever allows less, were used fully.
"""

import json
import sys
import time

import pelton
from pelton.bench.limits import READ_BYTES, Limits, Threads, measure_limits
from pelton.config import EngineConfig
from pelton.engine.engine import Engine, load
from pelton.engine.protocol import Start, Unfold
from pelton.formats import checkpoint
from pelton.request import EngineRequest, ErrorEvent, SamplingParams, TokenEvent


class Costs:
    """What a work must at least read and compute. Of the arithmetic only the products with weights are counted."""

    def __init__(self, path: str, engine: Engine, threads: int) -> None:
        info, shapes = engine.info, {name: tensor.shape for name, tensor in checkpoint.open(path).tensors.items()}
        matrices = {name: shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2}
        table = matrices.pop("token_embd.weight")
        self.head = matrices.pop("output.weight", table)
        self.layers = sum(matrices.values())
        self.weight_bytes = info.weight_bytes
        self.token_bytes = info.kv_bytes / info.kv_tokens
        self.threads = Threads(threads)

    def limits(self) -> Limits:
        """What the machine can do now, measured for a moment."""
        return measure_limits("", self.threads, READ_BYTES, 0.2)

    def prompt_seconds(self, prompts: list[list[int]], limits: Limits) -> float:
        """At least, for all prompts."""
        num_tokens = sum(map(len, prompts))
        operations = 2 * (self.layers * num_tokens + self.head * len(prompts))
        return max(self.weight_bytes / limits.read, operations / limits.int8)

    def decode_seconds(self, prompts: list[list[int]], num_steps: float, limits: Limits) -> float:
        """At least, for so many steps of all streams."""
        contexts = sum(len(ids) + num_steps / 2 for ids in prompts)
        operations = 2 * (self.layers + self.head) * len(prompts)
        read = self.weight_bytes + self.token_bytes * contexts
        return num_steps * max(read / limits.read, operations / limits.int8)


class Worker:
    def __init__(self, path: str, threads: int) -> None:
        self.engine: Engine = load(Start(path, EngineConfig(threads=threads, speculation="off")))
        self.costs = Costs(path, self.engine, threads)
        self.num_jobs = 0

    def run(self, job: dict) -> dict:
        """Times whole steps: from the submission to the last prompt's first token, then to the last token."""
        self.num_jobs += 1
        limits = self.costs.limits()
        if job["work"] == "prompt":  # not one that the prefix cache knows
            job["prompts"] = [[100 + self.num_jobs, *ids[1:]] for ids in job["prompts"]]
        start = time.perf_counter()
        sampling = SamplingParams(max_tokens=1 + job.get("tokens", 0), temperature=0, seed=0, ignore_eos=True)
        for i, ids in enumerate(job["prompts"]):
            self.engine.submit(EngineRequest(id=f"{self.num_jobs}-{i}", prompt_ids=ids, sampling=sampling))
        unfold, num_tokens, prompts_done = Unfold(), 0, 0.0
        while self.engine.has_work:
            for event in unfold(self.engine.step()):
                if isinstance(event, ErrorEvent):
                    raise RuntimeError(event.message)
                num_tokens += isinstance(event, TokenEvent)
            if not prompts_done and num_tokens >= len(job["prompts"]):
                prompts_done, before = time.perf_counter(), num_tokens
        end = time.perf_counter()
        if job["work"] == "prompt":
            least = self.costs.prompt_seconds(job["prompts"], limits)
            return {
                "seconds": prompts_done - start,
                "tokens": sum(map(len, job["prompts"])),
                "least_seconds": least,
            }
        least = self.costs.decode_seconds(job["prompts"], (num_tokens - before) / len(job["prompts"]), limits)
        return {"seconds": end - prompts_done, "tokens": num_tokens - before, "least_seconds": least}


def main() -> None:
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"ready": f"pelton {pelton.__version__}, {worker.engine.info.fingerprint}"}), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
