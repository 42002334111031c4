"""Every GGUF type has the numbers that llama.cpp's package reads. A model of mixed types has transformers' logprobs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.engine.checkpoint.model_resolver import read_raw_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.checkpoint.tensor_headers import read_checkpoint_size
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ModelError
from quire.engine.engine_core import EngineCore
from quire.engine.gguf.model_files import read_gguf_header
from quire.engine.gguf.tensor_types import SUPPORTED_TYPES
from quire.engine.layers.schemes.gguf import SUPPORTED_QUANT_TYPES, blocks_to_grouped_weight
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.cpu.linears.quantized_linear import CompiledQuantizedLinear
from quire.server.cli.plan.estimate import PlanRequest
from quire.server.cli.plan.estimate_builder import estimate_model
from quire.server.cli.plan.machine import Machine
from tests.engine.harness import request, run
from tests.tiny_models import VOCAB, save_tiny_model

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
write_gguf = pytest.importorskip("tests.gguf_models").write_gguf
LOW_BIT_TYPES = (
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    *("TQ1_0", "TQ2_0", "NVFP4", "Q2_K", "Q3_K"),
)


@pytest.mark.parametrize("kind", sorted(SUPPORTED_QUANT_TYPES))
def test_ggml_type_numbers_of_random_bits_equal_gguf_package(kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    sizes = {each.name: (each.block_size, each.type_size) for each in SUPPORTED_TYPES.values()}
    assert sizes[kind] == gguf.GGML_QUANT_SIZES[type_]
    assert SUPPORTED_TYPES[type_.value].name == kind
    rows = np.random.default_rng(7).integers(0, 256, (50, 7 * sizes[kind][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales may be infinite
        expected = gguf.quants.dequantize(rows, type_)
    actual = blocks_to_grouped_weight(torch.from_numpy(rows), kind).dequantize().numpy()
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("kind", sorted(SUPPORTED_QUANT_TYPES))
def test_held_bits_of_ggml_type_equal_packed_bytes(kind: str) -> None:
    if (reason := CpuBackend().missing_reason) is not None:
        pytest.skip(reason)
    tensor_type = next(each for each in SUPPORTED_TYPES.values() if each.name == kind)
    outs, inner = 64, 512
    rows = np.zeros((outs, inner // tensor_type.block_size * tensor_type.type_size), dtype=np.uint8)
    weight = blocks_to_grouped_weight(torch.from_numpy(rows), kind)
    linear = CpuBackend().pack_quantized([weight], None, dtype=torch.float32)
    assert isinstance(linear, CompiledQuantizedLinear)
    assert tensor_type.held_form is not None
    bits = tensor_type.held_form.bits_per_weight(gpu=False)
    assert linear.nbytes - 4 * outs == bits * outs * inner / 8
    assert bits >= tensor_type.bits_per_weight
    packing = pytest.importorskip("quire.kernels.gpu.quantization.weight_packing", exc_type=ImportError)
    packed = packing.pack_group_quantized(weight)
    assert packed.nbytes - 4 * outs == tensor_type.held_form.bits_per_weight(gpu=True) * outs * inner / 8


def test_planned_weights_of_gguf_are_what_the_cpu_holds(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    folder = save_tiny_model(tmp_path / "folder", "llama", **sizes, tie_word_embeddings=False)
    file = write_gguf(folder, tmp_path / "model.gguf", lambda name: "Q3_K" if "attn" in name else "Q2_K")
    model_sizes, stored = read_model_sizes(read_raw_config(str(file))[0]), read_checkpoint_size(file)
    assert stored is not None
    bits = {"Q2_K": 2 + 8 / 16 + 32 / 256, "Q3_K": 3 + 8 / 16 + 16 / 256}
    tensors = [each for each in read_gguf_header(file).tensors.values() if each.type.name in bits]
    held = sum(each.num_elements * bits[each.type.name] / 8 for each in tensors)
    assert stored.packed_bytes + stored.cpu_expansion == held
    cpu, gpu = (
        estimate_model(model_sizes, Machine("test", 2**30, gpu=gpu), PlanRequest(EngineConfig()), stored)
        for gpu in (False, True)
    )
    assert cpu.device_weight_bytes == held + 4 * stored.num_floats
    assert gpu.device_weight_bytes > cpu.device_weight_bytes > cpu.weight_bytes


def _type_of_tensor(name: str) -> str:
    """Mixes types within every fused linear."""
    if name in ("token_embd.weight", "output.weight"):
        return "Q3_K" if "output" in name else "IQ3_S"
    _, layer, module, *_ = name.split(".")
    modules = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    return LOW_BIT_TYPES[(int(layer) * len(modules) + modules.index(module)) % len(LOW_BIT_TYPES)]


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"attention_backend": "reference"}, 5e-5),
        ({"attention_backend": "cpu", "activation_bits": "16"}, 1e-3),
    ],
    ids=["reference", "cpu"],
)
def test_mixed_low_bit_model_logprobs_equal_transformers(
    settings: dict[str, str], tolerance: float, tmp_path: Path
) -> None:
    if settings["attention_backend"] == "cpu" and (reason := CpuBackend().missing_reason) is not None:
        pytest.skip(reason)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    folder = save_tiny_model(tmp_path / "folder", "qwen3-moe", **sizes, mlp_only_layers=[], norm_topk_prob=True)
    file = write_gguf(folder, tmp_path / "model.gguf", _type_of_tensor)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    prompt = [3 + (7 * i * i) % (VOCAB - 3) for i in range(40)]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    engine = EngineCore(EngineConfig(model=str(file), num_kv_blocks=16, dtype="float32", **settings))
    answer = run(engine, [request("0", prompt, max_tokens=1, prompt_logprobs=2)])["0"]
    assert answer.prompt_logprobs is not None
    actual = [each.logprob for each in answer.prompt_logprobs[1:]]
    targets = expected[:-1].gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
    assert actual == pytest.approx(targets.tolist(), abs=tolerance)


def test_tensor_scale_of_nvfp4_with_wrong_shape_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    folder = save_tiny_model(tmp_path / "folder", "llama", hidden_size=64, intermediate_size=128)
    write_gguf(folder, file, lambda _: "NVFP4")
    content = bytearray(file.read_bytes())
    offset = content.index(b"blk.0.attn_q.scale") + len(b"blk.0.attn_q.scale") + 4
    assert int.from_bytes(content[offset : offset + 8], "little") == 1
    content[offset : offset + 8] = (2).to_bytes(8, "little")
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.scale has the shape \[2\], expected a factor"):
        EngineCore(EngineConfig(model=str(file), num_kv_blocks=16))
