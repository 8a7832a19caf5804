"""One peer of `compare.py`: Hugging Face Transformers on the CPU, from the same GGUF file dequantised to float32.

Reads one JSON job per line and answers {"seconds": s, "tokens": n}.
"""

import json
import sys
import time
from pathlib import Path

import torch
import transformers


class Worker:
    def __init__(self, path: str, threads: int) -> None:
        torch.set_num_threads(threads)
        file = Path(path)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
        ).eval()

    @torch.inference_mode()
    def run(self, job: dict) -> dict:
        ids = torch.tensor(job["prompts"])
        start = time.perf_counter()
        out = self.model(ids, use_cache=True, logits_to_keep=1)
        last = out.logits[:, -1].argmax(-1)
        if job["work"] == "prompt":
            return {"seconds": time.perf_counter() - start, "tokens": ids.numel()}
        start = time.perf_counter()
        for _ in range(job["tokens"]):
            out = self.model(last[:, None], past_key_values=out.past_key_values, use_cache=True)
            last = out.logits[:, -1].argmax(-1)
        return {"seconds": time.perf_counter() - start, "tokens": job["tokens"] * len(job["prompts"])}


def main() -> None:
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"ready": f"transformers {transformers.__version__}, torch {torch.__version__}"}), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
