"""Tests checkpoints that `quire quantize` writes: Quire serves them as it serves a model quantized at load, and other
libraries read the same numbers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ModelError
from quire.engine.common.safetensors_dtypes import DTYPE_BYTES
from quire.engine.engine_core import EngineCore
from quire.engine.layers.schemes.formats import SAFETENSORS_DTYPES
from quire.engine.layers.schemes.online_quantization import quantize_float8, quantize_int8
from quire.engine.worker.checkpoint_writer.quantize_checkpoint import quantize_folder
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.reference import ReferenceBackend
from tests.engine.harness import Answer, request, run
from tests.tiny_models import VOCAB, save_tiny_model

PROMPTS = [[3 + (7 * i + j * j) % (VOCAB - 3) for j in range(length)] for i, length in enumerate((1, 17, 40))]
FORMATS = ("int8", "int4", "fp8")
Q = "model.layers.0.self_attn.q_proj"


def ids_and_logprobs(path: Path, **options: Any) -> dict[str, tuple[list[int], list[float]]]:
    config = EngineConfig(model=str(path), num_kv_blocks=64, **options)
    requests = [request(str(i), prompt, max_tokens=8, logprobs=2) for i, prompt in enumerate(PROMPTS)]
    results: dict[str, Answer] = run(EngineCore(config), requests)
    return {name: (each.ids, [one.logprob for one in each.logprobs]) for name, each in results.items()}


def save_model(folder: Path, family: str, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    layers = {} if family.startswith("gemma") else {"num_hidden_layers": 2}
    return save_tiny_model(folder / "model", family, dtype=dtype, **layers, **options)


def unpack_int4_words(packed: Tensor) -> Tensor:
    """Unpack int32 words [n, m] into 4-bit values [n, 8 m], the lowest first."""
    whole = packed.numpy().astype(np.int64)
    return torch.from_numpy(np.stack([whole >> shift & 15 for shift in range(0, 32, 4)], -1).reshape(len(whole), -1))


def dequantized_weight(tensors: dict[str, Tensor], linear: str) -> Tensor:
    """The dequantized weights [out, in] of a linear, number by number."""
    scales = tensors[f"{linear}.weight_scale"].double()
    if (packed := tensors.get(f"{linear}.weight_packed")) is None:
        return tensors[f"{linear}.weight"].double() * scales
    outs, inner = tensors[f"{linear}.weight_shape"].tolist()
    zeros = unpack_int4_words(tensors[f"{linear}.weight_zero_point"].T).T[:outs]
    codes = unpack_int4_words(packed)[:, :inner].view(outs, -1, 32)
    return ((codes - zeros[:, :, None]) * scales[:, :, None]).flatten(1)


@pytest.mark.few(2)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize(
    "family", ["llama", "llama-tied-biased", "gemma3", "qwen3", "qwen3-moe", "phi3", "gpt_neox", "lfm2", "qwen3_5"]
)
def test_written_checkpoint_equals_quantization_at_load(name: str, family: str, backend: str, tmp_path: Path) -> None:
    if backend == "cpu" and CpuBackend().missing_reason is not None:
        pytest.skip(str(CpuBackend().missing_reason))
    path = save_model(tmp_path, family)
    quantize_folder(path, tmp_path / "out", name, ReferenceBackend())
    for whole in (False, True):
        options = {"attention_backend": backend, "quantize_embedding": whole}
        assert ids_and_logprobs(tmp_path / "out", **options) == ids_and_logprobs(path, quantization=name, **options)


def test_dtypes_of_safetensors_have_same_sizes_in_both_halves() -> None:
    assert {name: dtype.itemsize for name, dtype in SAFETENSORS_DTYPES.items()} == DTYPE_BYTES


def test_quantize_folder_rejects_unsupported_family(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="checkpoints of gpt2 models are not written in few bits"):
        quantize_folder(save_model(tmp_path, "gpt2"), tmp_path / "out", "int8", ReferenceBackend())
    assert not (tmp_path / "out").exists()


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_written_tensors_dequantize_close_to_weights_that_quire_uses(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = save_model(tmp_path, "llama", dtype=dtype, intermediate_size=160)
    summary = quantize_folder(path, tmp_path / "out", name, ReferenceBackend())
    assert summary.startswith("14 linears")
    written, tensors = load_file(tmp_path / "out/model.safetensors"), load_file(path / "model.safetensors")
    dense = {}
    for stored, tensor in tensors.items():
        linear = stored.removesuffix(".weight")
        if f"{linear}.weight_scale" not in written:
            assert torch.equal(written[stored], tensor)
            dense[stored] = tensor
            continue
        dense[stored] = dequantized_weight(written, linear).float()
        change = (dense[stored] - tensor.float()).square().mean() / tensor.float().square().mean()
        assert change < {"int8": 1e-4, "fp8": 1e-3, "int4": 7e-3}[name]
    assert {key for key in dense if key not in written} == (
        set() if name != "int4" else {key for key in tensors if "_proj" in key}
    )
    shutil.copytree(path, tmp_path / "dense")
    save_file({key: tensor.float() for key, tensor in dense.items()}, tmp_path / "dense/model.safetensors")
    options = {"attention_backend": "reference", "dtype": "float32"}
    actual, expected = ids_and_logprobs(tmp_path / "out", **options), ids_and_logprobs(tmp_path / "dense", **options)
    for key, (ids, logprobs) in expected.items():
        assert actual[key][0] == ids
        assert actual[key][1] == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_transformers_reads_written_checkpoint_with_equal_weights(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="the package compressed-tensors is not installed")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    path = save_model(tmp_path, "llama", dtype=torch.float32)
    quantize_folder(path, tmp_path / "out", name, ReferenceBackend())
    # Decompressed at load: compressed-tensors 0.20 loads zero points, its own too, only this way.
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if name == "int4" else {}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, **options)
    ids = torch.tensor([PROMPTS[2]])
    with torch.inference_mode():
        loaded(ids)  # decompresses the rest
    written = load_file(tmp_path / "out/model.safetensors")
    for layer in range(2):
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
            linear = f"model.layers.{layer}.{part}"
            expected = dequantized_weight(written, linear).to(
                torch.bfloat16 if options else torch.float32
            )  # scales are bfloat16 then
            assert torch.equal(loaded.get_submodule(linear).weight, expected.float())
    assert torch.equal(loaded.lm_head.weight, written["lm_head.weight"])


def test_sharded_multimodal_checkpoint_is_quantized(tmp_path: Path) -> None:
    path = save_model(tmp_path, "gemma3-with-images")
    tensors = load_file(path / "model.safetensors")
    parts: list[dict[str, Tensor]] = [{}, {}, {}]
    for at, (name, tensor) in enumerate(tensors.items()):
        parts[at % 3][name] = tensor
    (path / "model.safetensors").unlink()
    index = {}
    for at, part in enumerate(parts):
        save_file(part, path / f"model-{at}.safetensors")
        index |= dict.fromkeys(part, f"model-{at}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (path / "tokenizer.json").write_text("{}")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling/config.json").write_text("{}")
    quantize_folder(path, tmp_path / "out", "int8", ReferenceBackend())
    shutil.rmtree(path / "1_Pooling")
    (path / "tokenizer.json").unlink()
    out = tmp_path / "out"
    assert (out / "tokenizer.json").read_text() == (out / "1_Pooling/config.json").read_text() == "{}"
    config = json.loads((out / "config.json").read_text())
    assert "re:.*vision_tower.*" in config["quantization_config"]["ignore"]
    assert config["text_config"] == json.loads((path / "config.json").read_text())["text_config"]
    written: dict[str, Tensor] = {}
    for at in range(3):
        written |= load_file(out / f"model-{at}.safetensors")
    unquantized = {name for name in tensors if "vision_tower" in name}
    assert unquantized
    assert all(torch.equal(written[name], tensors[name]) for name in unquantized)
    (out / "tokenizer.json").unlink()
    shutil.rmtree(out / "1_Pooling")
    options = {"attention_backend": "reference", "quantize_embedding": False}
    assert ids_and_logprobs(out, **options) == ids_and_logprobs(path, quantization="int8", **options)


def test_weights_not_divisible_into_groups_stay_unquantized(tmp_path: Path) -> None:
    path = save_model(tmp_path, "llama", intermediate_size=150)
    quantize_folder(path, tmp_path / "out", "int4", ReferenceBackend())
    written = load_file(tmp_path / "out/model.safetensors")
    down = "model.layers.0.mlp.down_proj"
    assert torch.equal(written[f"{down}.weight"], load_file(path / "model.safetensors")[f"{down}.weight"])
    assert f"{Q}.weight_packed" in written
    assert down in json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["ignore"]
    assert ids_and_logprobs(tmp_path / "out", attention_backend="reference")


def truncate_weights(path: Path) -> None:
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-100])


def delete_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


@pytest.mark.parametrize("spoil", [truncate_weights, delete_weights])
def test_failed_quantization_removes_output_folder(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    path = save_model(tmp_path, "llama")
    spoil(path)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        quantize_folder(path, tmp_path / "out", "int8", ReferenceBackend())
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("make", [quantize_int8, quantize_float8])
def test_quantization_scales_are_exact_in_bfloat16(make: Callable[[Tensor], Any]) -> None:
    scales = make(torch.randn((70, 96), generator=torch.Generator().manual_seed(1))).scales
    assert torch.equal(scales, scales.bfloat16().float())
