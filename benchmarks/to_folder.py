"""A GGUF file as a folder of bf16 safetensors, for peers that read nothing else.

    python benchmarks/to_folder.py MODEL.gguf FOLDER

Weights are dequantised and rounded to bf16; configuration, vocabulary and chat template are those of the file. Needs
transformers, gguf and torch.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    where = {"pretrained_model_name_or_path": str(args.model.parent), "gguf_file": args.model.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.to(torch.bfloat16).save_pretrained(args.folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(args.folder)


if __name__ == "__main__":
    main()
