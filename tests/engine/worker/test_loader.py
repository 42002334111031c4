"""Tests loading weights: shards, dummy weights, and errors that name the tensor."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, ModelError
from quire.engine.engine_core import EngineCore
from quire.engine.layers.parameters import LoadableParameter
from quire.engine.worker.loading.weight_loader import checkpoint_stream, load_weights
from tests.engine.harness import request, run
from tests.tiny_models import save_tiny_model


def generate_ids(path: Path, **options: object) -> list[int]:
    engine = EngineCore(EngineConfig(model=str(path), num_kv_blocks=32, **options))
    return run(engine, [request("a", range(3, 20), max_tokens=8)])["a"].ids


def replace_tensors(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(path / "model.safetensors") | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / "model.safetensors")


def test_sharded_checkpoint_equals_single_file(tmp_path: Path) -> None:
    whole = save_tiny_model(tmp_path / "whole", "llama")
    model = AutoModelForCausalLM.from_pretrained(whole)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert generate_ids(tmp_path / "shards") == generate_ids(whole)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_checkpoint_files_are_unmapped_after_load(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    engine = EngineCore(EngineConfig(model=str(path), num_kv_blocks=32))
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert run(engine, [request("a", range(3, 20), max_tokens=8)])["a"].ids


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_checkpoint_stream_keeps_little_file_memory_resident(tmp_path: Path) -> None:
    """Pages of a mapped file stay resident once read: of 192 MiB, only a few tensors' worth may be at a time."""
    tensors = {f"t{i:02}": torch.full((8 << 20,), i % 100, dtype=torch.int8) for i in range(24)}
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    before, most, seen = resident_file_bytes(), 0, 0
    for name, tensor in checkpoint_stream(tmp_path):
        assert int(tensor.max()) == int(name[1:])  # reads the whole tensor
        most, seen = max(most, resident_file_bytes() - before), seen + 1
    assert seen == 24
    assert most < 64 << 20


def resident_file_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile")) * 1024


def test_weight_errors_name_tensor(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    norm = load_file(path / "model.safetensors")["model.norm.weight"]
    replace_tensors(path, {"model.norm.weight": None})
    with pytest.raises(ModelError, match=r"lack model\.norm\.weight"):
        generate_ids(path)
    replace_tensors(path, {"model.norm.weight": norm[:5].clone()})
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[5\].*\[64\]"):
        generate_ids(path)
    replace_tensors(path, {"model.norm.weight": norm, "model.extra.weight": norm.clone()})
    with pytest.raises(ModelError, match=r"lacks: model\.extra\.weight"):
        generate_ids(path)


def test_weight_loader_casts_only_floating_point_tensors() -> None:
    """Integers that a quantization scheme stores reach it as integers."""
    arrived: list[torch.Tensor] = []
    table = {
        "scale": LoadableParameter((3,), torch.bfloat16, arrived.append),
        "packed": LoadableParameter((2, 2), torch.int32, arrived.append),
    }
    packed = torch.tensor([[1, -2], [2**31 - 1, 0]], dtype=torch.int32)
    stream = {"scale": torch.tensor([0.5, 1.0, 2.0]), "packed": packed}
    assert load_weights(table, iter(stream.items()), device=torch.device("cpu")) == 3 * 2 + 4 * 4
    assert [tensor.dtype for tensor in arrived] == [torch.bfloat16, torch.int32]
    assert torch.equal(arrived[1], packed)
    for wrong, message in (
        ({"packed": packed.float()}, r"packed is stored as torch\.float32, not as torch\.int32"),
        ({"packed": packed.to(torch.int8)}, r"stored as torch\.int8"),
        ({"scale": torch.ones(3, dtype=torch.int32)}, r"scale is stored as torch\.int32, not as torch\.bfloat16"),
    ):
        with pytest.raises(ModelError, match=message):
            load_weights(table, iter((stream | wrong).items()), device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "rwkv"}, "Quire does not serve rwkv models: transformers' class: it keeps a state"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method: 'aqlm' is not served"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"rope_parameters": {"rope_type": "cubic", "factor": 2.0}}, "'cubic' is not supported"),
        ({"hidden_act": "relu"}, "'relu' is not supported"),
    ],
)
def test_unservable_config_raises_model_error(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        generate_ids(path)


def test_missing_or_invalid_model_files_raise_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no directory"):
        generate_ids(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        generate_ids(tmp_path)
    path = save_tiny_model(tmp_path / "m", "llama")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model\.safetensors"):
        generate_ids(path)
    assert len(generate_ids(path, load_format="dummy")) == 8
    (path / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        generate_ids(path)


def test_dummy_weights_depend_only_on_seed(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3")
    first = generate_ids(path, load_format="dummy", seed=1)
    assert first == generate_ids(path, load_format="dummy", seed=1)
    assert first != generate_ids(path, load_format="dummy", seed=2)


def test_unavailable_backend_and_device_are_rejected(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    with pytest.raises(ConfigError, match="unknown attention backend 'fast'"):
        generate_ids(path, attention_backend="fast")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no NVIDIA GPU"):
            generate_ids(path, device="cuda")
