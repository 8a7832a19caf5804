"""Pelton's side of `compare.py`: the engine in this process, stepped directly.

Reads one JSON job per line and answers {"seconds": s, "tokens": n}.
"""

import json
import sys
import time

import pelton
from pelton.config import EngineConfig
from pelton.engine.engine import Engine, load
from pelton.engine.protocol import Start
from pelton.request import EngineRequest, ErrorEvent, SamplingParams, TokenEvent


class Worker:
    def __init__(self, path: str, threads: int) -> None:
        config = EngineConfig(threads=threads, context=4096, prefix_cache=False)
        self.engine: Engine = load(Start(path, config))
        self.num_jobs = 0

    def run(self, job: dict) -> dict:
        """Times whole steps: from the submission to the last prompt's first token, then to the last token."""
        self.num_jobs += 1
        start = time.perf_counter()
        sampling = SamplingParams(max_tokens=1 + job.get("tokens", 0), temperature=0, seed=0, ignore_eos=True)
        for i, ids in enumerate(job["prompts"]):
            self.engine.submit(EngineRequest(id=f"{self.num_jobs}-{i}", prompt_ids=ids, sampling=sampling))
        num_tokens, prompts_done = 0, 0.0
        while self.engine.has_work:
            for event in self.engine.step():
                if isinstance(event, ErrorEvent):
                    raise RuntimeError(event.message)
                num_tokens += isinstance(event, TokenEvent)
            if not prompts_done and num_tokens >= len(job["prompts"]):
                prompts_done, before = time.perf_counter(), num_tokens
        end = time.perf_counter()
        if job["work"] == "prompt":
            return {"seconds": prompts_done - start, "tokens": sum(map(len, job["prompts"]))}
        return {"seconds": end - prompts_done, "tokens": num_tokens - before}


def main() -> None:
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"ready": f"pelton {pelton.__version__}, {worker.engine.info.fingerprint}"}), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
