"""How often a draft model that draws with its target's keys draws the target's token, for several ways to draw.

    PYTHON benchmarks/coupling.py MODEL.gguf SMALL.gguf TEXT --tokens 200

PYTHON has `llama-cpp-python`, which gives all logits of both models over the same text. Ways: the best there is (the
shared mass of both distributions); the largest of keyed Gumbel noise, which is how Pelton draws; the place of one keyed
number in the running sum over ids; the same over tokens by falling probability.
"""

import argparse
from functools import partial
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
SETTINGS = ((1.0, 1.0), (0.8, 1.0), (0.8, 0.95), (0.7, 0.8))
PLACES = np.linspace(0.0005, 0.9995, 1000)


def logits(path: str, text: bytes, count: int) -> Array:
    model = llama_cpp.Llama(path, n_ctx=count, logits_all=True, verbose=False, n_batch=count)
    model.eval(model.tokenize(text)[:count])
    return np.array(model.scores[:count], dtype=np.float64)


def distributions(logits: Array, temperature: float, top_p: float) -> Array:
    weights = np.exp((logits - logits.max(1, keepdims=True)) / temperature)
    weights /= weights.sum(1, keepdims=True)
    for row in weights if top_p < 1 else ():
        order = np.argsort(-row)
        row[order[np.searchsorted(np.cumsum(row[order]), top_p) + 1 :]] = 0
        row /= row.sum()
    return weights


def by_id(p: Array, q: Array) -> float:
    """The measure of places that are the same token's in both running sums."""
    ends_p, ends_q = np.cumsum(p), np.cumsum(q)
    shared = np.minimum(ends_p, ends_q) - np.maximum(ends_p - p, ends_q - q)
    return float(np.maximum(shared, 0).sum())


def by_rank(p: Array, q: Array) -> float:
    drawn = []
    for each in (p, q):
        order = np.argsort(-each, kind="stable")
        drawn.append(order[np.searchsorted(np.cumsum(each[order]), PLACES).clip(0, len(each) - 1)])
    return float(np.mean(drawn[0] == drawn[1]))


def by_noise(p: Array, q: Array, rng: np.random.Generator) -> float:
    kept = np.nonzero((p > 1e-9) | (q > 1e-9))[0]
    noise = rng.gumbel(size=(32, len(kept)))
    with np.errstate(divide="ignore"):
        drawn = [(np.log(each[kept]) + noise).argmax(1) for each in (p, q)]
    return float(np.mean(drawn[0] == drawn[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("small")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    text = args.text.read_bytes()
    target, draft = logits(args.model, text, args.tokens), logits(args.small, text, args.tokens)
    shared = min(target.shape[1], draft.shape[1])
    print("| temperature, top-p | best | Gumbel noise | running sum by id | by rank |\n| --- | --- | --- | --- | --- |")
    for temperature, top_p in SETTINGS:
        p, q = (distributions(each[:, :shared], temperature, top_p) for each in (target, draft))
        noise = partial(by_noise, rng=np.random.default_rng(0))
        ways = [float(np.minimum(p, q).sum(1).mean())]
        for way in (noise, by_id, by_rank):
            ways.append(float(np.mean([way(*row) for row in zip(p, q, strict=True)])))
        print(f"| {temperature:g}, {top_p:g} | " + " | ".join(f"{way:.3f}" for way in ways) + " |", flush=True)


if __name__ == "__main__":
    main()
