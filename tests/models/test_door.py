"""Kinds of models yet to come: written over ops, equal to Transformers on the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import models as hf

from pelton.ops import reference
from pelton.ops.data import Batch
from pelton.ops.memory import Memory
from tests import tolerances
from tests.models import replay, stepping
from tests.models.door import bart, deepseek2, jamba

VOCAB = 61
SOURCES = (11, 35, 2)
LENGTHS = (40, 21, 6)
WHOLE = [LENGTHS]
MIXED = [[17, 0, 4], [5, 20, 1], *([1, 0, 0] for _ in range(18)), [0, 1, 1]]

DEEPSEEK2 = hf.deepseek_v2.DeepseekV2Config(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=40,
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=20,
    n_routed_experts=6,
    num_experts_per_tok=2,
    n_shared_experts=2,
    routed_scaling_factor=1.7,
    first_k_dense_replace=1,
    topk_method="greedy",
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
)
JAMBA = hf.jamba.JambaConfig(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=5,
    num_attention_heads=6,
    num_key_value_heads=2,
    attn_layer_period=3,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    num_experts=4,
    num_experts_per_tok=2,
    mamba_d_state=7,
    mamba_d_conv=4,
    mamba_dt_rank=5,
    use_associative_scan=False,
)
BART = hf.bart.BartConfig(
    vocab_size=VOCAB,
    d_model=48,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=6,
    decoder_attention_heads=4,
    encoder_ffn_dim=80,
    decoder_ffn_dim=64,
    max_position_embeddings=64,
)
MODELS: dict[str, tuple[ModuleType, type, Any]] = {
    "deepseek2": (deepseek2, hf.deepseek_v2.DeepseekV2ForCausalLM, DEEPSEEK2),
    "jamba": (jamba, hf.jamba.JambaForCausalLM, JAMBA),
    "bart": (bart, hf.bart.BartForConditionalGeneration, BART),
}


@cache
def built(name: str) -> Any:
    _, model_type, config = MODELS[name]
    torch.manual_seed(11)
    config._attn_implementation = "eager"
    model = model_type(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.normal_(0.0 if parameter_name.endswith("bias") else 1.0, 0.3)
            elif parameter_name.endswith("A_log"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif parameter.ndim == 1:
                parameter.normal_(0, 0.5)
            elif "embed" in parameter_name or "shared.weight" in parameter_name:
                parameter.normal_(0, 1)
            else:
                parameter.normal_(0, 1.2 / math.sqrt(parameter.shape[-1]))
        if name == "bart":
            model.final_logits_bias.normal_()
    return model.eval()


@cache
def texts(lengths: tuple[int, ...]) -> tuple[list[int], ...]:
    rng = np.random.default_rng(5)
    return tuple(rng.integers(3, VOCAB, n).tolist() for n in lengths)


@cache
def wanted(name: str) -> tuple[stepping.Logits, ...]:
    logits = []
    for source, ids in zip(texts(SOURCES), texts(LENGTHS), strict=True):
        inputs = {"input_ids": torch.tensor([ids])}
        if name == "bart":
            inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([ids])}
        with torch.no_grad():
            logits.append(built(name)(**inputs, use_cache=False).logits[0].numpy())
    return tuple(logits)


def _encode_sources(memory: Memory, weights: dict[str, Any]) -> None:
    tables = stepping.scattered_tables(bart.groups(BART), len(LENGTHS), max(LENGTHS))
    spans = [(s, 0, length) for s, length in enumerate(SOURCES)]
    batch = stepping.make_batch(texts(SOURCES), spans, tables)
    bart.encode(reference.Ops(batch, memory), weights, batch, BART)


def _run(name: str, plan: list[Any], step: Callable[[reference.Ops, dict[str, Any], Batch], Any]) -> list[Any]:
    module, _, config = MODELS[name]
    groups = module.groups(config)
    weights = reference.bind(module.weights(built(name)))
    memory = Memory(groups, stepping.num_blocks(groups, len(LENGTHS), max(LENGTHS)), "f32")
    if name == "bart":
        _encode_sources(memory, weights)

    def run_step(batch: Batch) -> stepping.Logits:
        return step(reference.Ops(batch, memory), weights, batch)

    return stepping.run(run_step, groups, texts(LENGTHS), plan, SOURCES if name == "bart" else None)


@pytest.mark.parametrize("plan", [WHOLE, MIXED], ids=["whole", "mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_reference_equals_transformers(name: str, plan: list[list[int]]):
    module, _, config = MODELS[name]
    got = _run(name, plan, lambda ops, weights, batch: module.step(ops, weights, batch, config))
    for g, w in zip(got, wanted(name), strict=True):
        assert stepping.error(g, w) < tolerances.PARITY_REFERENCE


@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_plan_is_the_model(name: str):
    module, _, config = MODELS[name]
    plan = replay.record(lambda ops, w, batch: module.step(ops, w, batch, config), module.weights(built(name)))
    assert plan.result is not None
    assert plan.result.shape == ("R", VOCAB)
    got = _run(name, WHOLE, lambda ops, weights, batch: replay.replay(plan, ops, weights, batch))
    for g, w in zip(got, wanted(name), strict=True):
        assert stepping.error(g, w) < tolerances.PARITY_REFERENCE


@pytest.mark.parametrize("name", MODELS)
def test_the_planner_lays_a_recorded_plan_out(name: str):
    module, _, config = MODELS[name]
    weights = module.weights(built(name))
    plan = replay.record(lambda ops, w, batch: module.step(ops, w, batch, config), weights)
    program = replay.lay_out(plan, weights)
    assert program.head is not None
    assert program.weights == plan.weights
    kept = {"attend": 0, "remember": 0, "recur": 0, "expert_linear": 0, "head_linear": 0}
    for phase in program.phases:
        for step in phase.steps:
            kept[step.op] = kept.get(step.op, 0) + 1
    for op in ("attend", "remember", "recur", "expert_linear", "head_linear"):
        assert kept[op] == sum(step.op == op for step in plan.steps), op


def test_an_encoder_is_recorded_as_an_entry_point_of_its_own():
    weights = bart.weights(built("bart"))
    plan = replay.record(lambda ops, w, batch: bart.encode(ops, w, batch, BART), weights)
    assert plan.result is None
    assert sum(step.op == "remember" for step in plan.steps) == BART.decoder_layers
    assert {step.attrs["spec"].mask for step in plan.steps if step.op == "attend"} == {"full"}
    replay.lay_out(plan, weights)
