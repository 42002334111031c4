"""Tests SmoothQuant: the smoothed model computes the same as before, and its int8 form comes closer to it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from quire.engine.common.config import EngineConfig
from quire.engine.worker.checkpoint_writer.quantize_checkpoint import quantize_folder
from quire.engine.worker.checkpoint_writer.smoothquant import fit_smoothing
from quire.engine.worker.loading.forward_pass import ForwardPass
from quire.kernels.reference import ReferenceBackend
from tests.tiny_models import VOCAB, save_tiny_model

SAMPLES = [[3 + (7 * i + j * j) % (VOCAB - 3) for j in range(40)] for i in range(3)]
TRIED = [3 + (11 * j + j * j) % (VOCAB - 3) for j in range(48)]
NORMS = {"llama": 6, "gemma3": 8, "gpt_neox": 6, "cohere": 3, "phi3": 6, "opt": 6, "falcon_h1": 4, "deepseek_v3": 7}
NORMS |= {"deepseek_v32": 7}
"""By family, the number of norms read only by linears: those of attention and MLP; in Cohere's layers the one of both;
in the sparse layers of DeepSeek-V3 only those of attention, which are two with the norm of the queries' latents.
"""


def save(folder: Path, family: str) -> Path:
    """A model in which a few outputs of norms are many times the others, as in large language models."""
    path = save_tiny_model(folder / "model", family, dtype=torch.float32)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if "layers." in name and tensor.ndim == 1 and name.endswith("norm.weight") and len(tensor) == 64:
            tensor[[5, 40]] *= 40
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def logits(path: Path) -> Tensor:
    """transformers' logits, in float64 unless the class has experts, which do not compute in float64."""
    config = AutoConfig.from_pretrained(path)
    wide = torch.float32 if hasattr(config, "n_routed_experts") else torch.float64
    model = AutoModelForCausalLM.from_pretrained(path, dtype=wide)
    with torch.inference_mode():
        output: Tensor = model(torch.tensor([TRIED])).logits[0].double()
    return output


@pytest.mark.few(3)
@pytest.mark.parametrize(("family", "norms"), NORMS.items())
def test_smoothed_weights_keep_logits(family: str, norms: int, tmp_path: Path) -> None:
    path = save(tmp_path, family)
    smoother = fit_smoothing(path, SAMPLES, 0.5)
    assert smoother.num_norms == norms
    tensors = load_file(path / "model.safetensors")
    smoothed = {name: smoother.smooth_tensor(name, tensor) for name, tensor in tensors.items()}
    changed = [name for name, tensor in smoothed.items() if not torch.equal(tensor, tensors[name])]
    assert not any(
        name.endswith(("o_proj.weight", "down_proj.weight", "fc2.weight", "router.weight")) for name in changed
    )
    shutil.copytree(path, tmp_path / "smoothed")
    save_file(smoothed, tmp_path / "smoothed/model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(logits(tmp_path / "smoothed"), logits(path), atol=5e-4, rtol=1e-3)


def quire_logprobs(path: Path, **options: object) -> Tensor:
    settings: Mapping[str, object] = {"quantize_embedding": False, "activation_bits": "8"} | options
    config = EngineConfig(model=str(path), attention_backend="cpu", **settings)
    return ForwardPass.load_from_config(config, None).compute_logprobs(TRIED, full_vocabulary=True)


def test_smoothing_reduces_int8_error(tmp_path: Path) -> None:
    path = save(tmp_path, "llama")
    quantize_folder(path, tmp_path / "plain", "int8", ReferenceBackend())
    summary = quantize_folder(
        path, tmp_path / "out", "int8", ReferenceBackend(), partial(fit_smoothing, path, SAMPLES, 0.5)
    )
    assert summary.startswith("21 linears int-quantized, 6 norms smoothed; ")
    expected = logits(path).log_softmax(-1).float()[:-1]
    plain, smooth = ((quire_logprobs(tmp_path / name) - expected).abs().mean().item() for name in ("plain", "out"))
    assert smooth < 0.8 * plain
