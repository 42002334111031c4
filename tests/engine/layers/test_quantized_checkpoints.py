"""Quantized checkpoints give the tokens and logprobs of float32 checkpoints that hold the dequantized numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ModelError
from quire.engine.engine_core import EngineCore
from tests import quantized_models as q
from tests.engine.harness import Answer, request, run
from tests.tiny_models import VOCAB, save_tiny_model

PROMPTS = [[3 + (7 * i + j * j) % (VOCAB - 3) for j in range(length)] for i, length in enumerate((1, 17, 40))]


def answers(path: Path) -> tuple[dict[str, Answer], str]:
    config = EngineConfig(model=str(path), attention_backend="reference", num_kv_blocks=64, dtype="float32")
    requests = [request(str(i), prompt, max_tokens=4, logprobs=2) for i, prompt in enumerate(PROMPTS)]
    engine = EngineCore(config)
    return run(engine, requests), engine.info.quantization


def assert_close(actual: dict[str, Answer], expected: dict[str, Answer]) -> None:
    for key, answer in expected.items():
        assert actual[key].ids == answer.ids
        logprobs = [each.logprob for each in actual[key].logprobs]
        assert logprobs == pytest.approx([each.logprob for each in answer.logprobs], abs=1e-5)


def gptq(bits: int, group: int, *, symmetric: bool, ordered: bool = False, version: int = 1) -> tuple[q.Packer, dict]:
    config: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered}
    config |= {"sym": symmetric} | ({"checkpoint_format": "gptq_v2"} if version == 2 else {})
    return q.gptq(bits, group, symmetric=symmetric, ordered=ordered, version=version), config


def compressed(bits: int, group: int, *, symmetric: bool, ordered: bool = False) -> tuple[q.Packer, dict]:
    strategy = {"strategy": "group" if group else "channel", "symmetric": symmetric}
    config = q.compressed_config("pack-quantized", bits, group, **strategy, actorder="group" if ordered else None)
    return q.compressed(bits, group, symmetric=symmetric, ordered=ordered), config


def floats(stored: str, strategy: str, block: tuple[int, int] = (128, 128)) -> tuple[q.Packer, dict]:
    config = q.compressed_config(stored, 8, 0, kind="float", strategy=strategy, block_structure=list(block))
    return q.float8(strategy, block=block), config


CASES: dict[str, tuple[q.Packer, dict[str, Any]]] = {
    **{f"gptq-{bits}-sym": gptq(bits, 32, symmetric=True) for bits in (2, 3, 4, 8)},
    **{f"gptq-{bits}-asym": gptq(bits, 32, symmetric=False) for bits in (2, 3, 4, 8)},
    **{f"gptq-4-group{group}": gptq(4, group, symmetric=False) for group in (16, 64, 128, -1)},
    "gptq-4-ordered": gptq(4, 32, symmetric=False, ordered=True),
    "gptq-8-ordered": gptq(8, 32, symmetric=True, ordered=True),
    "gptq-4-second-version": gptq(4, 32, symmetric=False, version=2),
    **{
        f"awq-{group}": (q.awq(group), {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"})
        for group in (32, 64, -1)
    },
    **{f"packed-{bits}-group{g}": compressed(bits, g, symmetric=True) for bits in (4, 8) for g in (0, 32, 128)},
    "packed-4-asym": compressed(4, 32, symmetric=False),
    "packed-8-asym": compressed(8, 0, symmetric=False),
    "packed-4-ordered": compressed(4, 32, symmetric=False, ordered=True),
    **{f"packed-{bits}": compressed(bits, 32, symmetric=bits % 2 == 0) for bits in (2, 3, 5, 6, 7)},
    "int8-channel": (q.int8("channel"), q.compressed_config("int-quantized", 8, 0, strategy="channel")),
    "int8-tensor": (q.int8("tensor"), q.compressed_config("int-quantized", 8, 0, strategy="tensor")),
    "int8-asym": (
        q.int8("channel", symmetric=False),
        q.compressed_config("int-quantized", 8, 0, strategy="channel", symmetric=False),
    ),
    "float-tensor": floats("float-quantized", "tensor"),
    "float-channel": floats("float-quantized", "channel"),
    "float-block": floats("float-quantized", "block", (48, 32)),
    "naive-float": floats("naive-quantized", "channel"),
    "fp8-tensor": (q.float8("tensor"), {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-block": (
        q.float8("block", "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
    ),
    "fbgemm": (q.float8("channel"), {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}),
    "mxfp4": (q.float4(32), q.compressed_config("mxfp4-pack-quantized", 4, 32, kind="float")),
    "nvfp4": (
        q.float4(16),
        q.compressed_config("nvfp4-pack-quantized", 4, 16, kind="float", strategy="tensor_group"),
    ),
    "bnb8": (q.bnb8, {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}),
    "nf4": (q.nf4(64, nested=False), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "nf4-nested": (q.nf4(64, nested=True), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("family", "name"),
    [*(("llama", name) for name in CASES), *(("llama-tied-biased", name) for name in list(CASES)[::4])],
)
def test_quantized_checkpoint_equals_dequantized_float32(name: str, family: str, tmp_path: Path) -> None:
    pack, config = CASES[name]
    folder = save_tiny_model(tmp_path / "dense", family, num_hidden_layers=2)
    packed = q.quantize_checkpoint(folder, tmp_path / "packed", pack, config)
    (expected, dense_quantization), (actual, quantization) = answers(folder), answers(packed)
    assert dense_quantization == ""
    assert quantization.startswith(config["quant_method"])
    assert_close(actual, expected)


JOINED = {
    "phi3": ("gptq-4-asym", "gptq-4-ordered", "awq-32", "packed-4-asym", "int8-tensor", "float-channel", "mxfp4"),
    "gpt_neox": ("packed-4-group32", "int8-channel", "fp8-tensor", "bnb8"),
    "cohere": ("packed-8-group0", "float-tensor"),
    "qwen3_5": ("packed-4-group32", "fp8-tensor", "bnb8"),
    "bamba": ("packed-4-group32", "fp8-tensor", "bnb8"),
    "lfm2": ("gptq-4-asym", "awq-32", "packed-4-group32", "fp8-tensor", "bnb8"),
    "deepseek_v2-dense": ("packed-4-group0", "int8-channel", "fp8-tensor", "fp8-block", "bnb8"),
}
"""By family: formats whose fused tensors can be split as the family's linears require."""


@pytest.mark.few(3)
@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in JOINED.items() for name in names])
def test_fused_quantized_linears_are_split(family: str, name: str, tmp_path: Path) -> None:
    pack, config = CASES[name]
    folder = save_tiny_model(tmp_path / "dense", family)
    packed = q.quantize_checkpoint(folder, tmp_path / "packed", pack, config, leave=("lm_head", "embed_out"))
    (expected, _), (actual, _) = answers(folder), answers(packed)
    assert_close(actual, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "name"), [("cohere", "awq-32"), ("phi3", "float-block"), ("gpt_neox", "nf4")])
def test_fused_quantized_linear_that_cannot_be_split_is_rejected(family: str, name: str, tmp_path: Path) -> None:
    pack, config = CASES[name]
    folder = save_tiny_model(tmp_path / "dense", family)
    packed = q.quantize_checkpoint(folder, tmp_path / "packed", pack, config, leave=("lm_head", "embed_out"))
    with pytest.raises(ModelError, match=r"_proj\.\w+: the checkpoint fuses it with other tensors or orders its heads"):
        answers(packed)


def test_mixed_precision_groups_and_ignored_linears_equal_dense(tmp_path: Path) -> None:
    """Linears of one fused product have different formats, some by regular expression, and some are not quantized."""
    folder = save_tiny_model(tmp_path / "dense", "qwen2", num_hidden_layers=2)
    four, eight = q.compressed(4, 32, symmetric=True), q.int8("channel")
    config = q.compressed_config("mixed-precision", 4, 32)
    group = config["config_groups"]["group_0"]
    group |= {"targets": ["re:.*self_attn.(q|v)_proj$", "re:.*mlp.*"], "format": "pack-quantized"}
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    config["config_groups"]["group_1"] = {"targets": ["Linear"], "weights": weights, "format": "int-quantized"}
    config["ignore"] = ["lm_head", "model.layers.1.mlp.up_proj", "re:.*layers\\.0\\.self_attn\\.k_proj"]
    packed = tmp_path / "packed"
    unquantized = ("lm_head", "layers.1.mlp.up_proj", "layers.0.self_attn.k_proj")
    for tensors, pack in ((("q_proj", "v_proj", "mlp"), four), (("k_proj", "o_proj"), eight)):
        others = tuple(part for part in ("q_proj", "k_proj", "v_proj", "o_proj", "mlp") if part not in tensors)
        part_path = q.quantize_checkpoint(folder, tmp_path / "-".join(tensors), pack, config, (*unquantized, *others))
        content = load_file(part_path / "model.safetensors")
        stored = load_file(packed / "model.safetensors") if packed.exists() else {}
        merged = {n: t for n, t in (stored | content).items() if not any(part in n for part in others)}
        merged |= {n: t for n, t in stored.items() if any(part in n for part in others)}
        merged |= {n: t for n, t in content.items() if any(part in n for part in unquantized) or t.ndim == 1}
        part_path.rename(packed) if not packed.exists() else None
        save_file(merged, packed / "model.safetensors")
    (expected, _), (actual, quantization) = answers(folder), answers(packed)
    assert quantization == "compressed-tensors, 4 bits and 8 bits"
    for key, answer in expected.items():
        assert actual[key].ids == answer.ids


def change_tensors(path: Path, alter: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    alter(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "alter", "says"),
    [
        ("gptq-4-sym", lambda t: t.pop(f"{Q}.qweight"), f"lack {Q}.qweight"),
        ("gptq-4-sym", lambda t: t.update({f"{Q}.weight": torch.ones(64, 64)}), f"lacks: {Q}.weight"),
        ("gptq-4-sym", lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:1]}), f"{Q}.scales has shape"),
        ("gptq-4-sym", lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].long()}), f"{Q}.qweight is stored as"),
        ("gptq-4-ordered", lambda t: t[f"{Q}.g_idx"].zero_(), f"{Q}.g_idx"),
        ("packed-4-group32", lambda t: t[f"{Q}.weight_shape"].fill_(2**40), f"{Q}.weight_shape"),
        ("packed-4-group32", lambda t: t.pop(f"{Q}.weight_scale"), f"lack {Q}.weight_scale"),
        ("packed-4-group32", lambda t: t.update({f"{Q}.weight_scale": torch.ones(3, 1)}), f"{Q}.weight_scale"),
        ("int8-channel", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].float()}), f"{Q}.weight is stored as"),
        ("fp8-block", lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(9, 9)}), f"{Q}.weight_scale_inv"),
        ("fp8-tensor", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].bfloat16()}), f"{Q}.weight is stored as"),
        ("nf4", lambda t: t[f"{Q}.weight.quant_state.bitsandbytes__nf4"].zero_(), f"{Q}.weight.quant_state"),
        ("nf4", lambda t: t.update({f"{Q}.weight.absmax": torch.ones(1)}), f"{Q}.weight.absmax"),
        ("nf4", lambda t: t.pop(f"{Q}.weight.quant_map"), f"lack {Q}.weight.quant_map"),
    ],
)
def test_invalid_quantized_tensor_is_named_in_error(name: str, alter: Any, says: str, tmp_path: Path) -> None:
    pack, config = CASES[name]
    folder = save_tiny_model(tmp_path / "dense", "llama", num_hidden_layers=1)
    packed = q.quantize_checkpoint(folder, tmp_path / "packed", pack, config)
    change_tensors(packed, alter)
    with pytest.raises(ModelError) as caught:
        answers(packed)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fp8_tensor_without_quantization_config_is_rejected(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", "llama", num_hidden_layers=1)
    change_tensors(folder, lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].to(torch.float8_e4m3fn)}))
    with pytest.raises(ModelError, match=rf"{Q}\.weight is stored as torch.float8_e4m3fn"):
        answers(folder)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "aqlm"}, "quant_method: 'aqlm'"),
        ({"quant_method": "gptq", "bits": 5}, "bits: 5"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:x": {}}}, "dynamic"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version: 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit"),
        ({"quant_method": "compressed-tensors"}, "config_groups: is empty"),
        (q.compressed_config("pack-quantized", 9, 32), "config_groups.group_0.weights.num_bits: 9"),
        (q.compressed_config("marlin-24", 4, 32), "marlin-24"),
        (q.compressed_config("pack-quantized", 4, 0), "group_size"),
        (q.compressed_config("float-quantized", 4, 0, kind="float", strategy="tensor"), "floats of 4 bits"),
        (
            q.compressed_config("mxfp4-pack-quantized", 4, 16, kind="float"),
            "floats of 4 bits stored 'mxfp4-pack",
        ),
        (q.compressed_config("pack-quantized", 4, 32) | {"ignore": ["re:("]}, "not a regular expression"),
        (q.compressed_config("pack-quantized", 4, 32) | {"ignore": ["re:(a+)+$"]}, "too long"),
        ({"quant_method": "gptq", "bits": "4"}, "bits: expected float"),
    ],
)
def test_unsupported_quantization_config_is_named_in_error(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", "llama", num_hidden_layers=1)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    with pytest.raises(ModelError) as caught:
        answers(folder)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
