"""Qwen3.5's checkpoints as published: the tensors of the vision encoder and the MTP head are ignored. Also covers where
its delta nets are rejected.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, ModelError
from quire.engine.engine_core import EngineCore
from quire.engine.models import decoder_spec
from quire.engine.worker.device_plan import check_device_supports_attention
from tests.engine.harness import request, run
from tests.tiny_models import save_tiny_model


def save_published_layout(text: Path, path: Path) -> Path:
    """Save a folder's text model as the text part of a vision model, with MTP tensors."""
    path.mkdir()
    config = json.loads((text / "config.json").read_text())
    part = {"tie_word_embeddings": config["tie_word_embeddings"], "vision_config": {"depth": 1}}
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": config, **part}))
    text_tensors = load_file(text / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in text_tensors.items()}
    mtp_tensors = {name: tensor + 1 for name, tensor in text_tensors.items() if name.startswith("model.layers.0.")}
    tensors |= {f"mtp.{name.removeprefix('model.')}": tensor for name, tensor in mtp_tensors.items()}
    tensors["model.visual.blocks.0.norm1.weight"] = torch.ones(8)
    save_file(tensors, path / "model.safetensors")
    return path


def test_qwen3_5_text_model_ignores_vision_and_mtp_tensors(tmp_path: Path) -> None:
    text = save_tiny_model(tmp_path / "text", "qwen3_5")
    whole = save_published_layout(text, tmp_path / "whole")
    requests = [request(str(at), list(range(5, 30 + 9 * at)), max_tokens=12, logprobs=0) for at in range(3)]
    answers = [run(EngineCore(EngineConfig(model=str(path), num_kv_blocks=40)), requests) for path in (text, whole)]
    for name, answer in answers[0].items():
        assert (answers[1][name].ids, answers[1][name].logprobs) == (answer.ids, answer.logprobs)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5-moe", "qwen3-next"])
def test_delta_net_models_are_rejected_on_mps(family: str, tmp_path: Path) -> None:
    config = read_model_config(save_tiny_model(tmp_path, family))
    check_device_supports_attention(torch.device("cuda"), config, decoder_spec(config))
    with pytest.raises(ConfigError, match=r"delta nets, Mamba.* only on CPUs and CUDA GPUs so far"):
        check_device_supports_attention(torch.device("mps"), config, decoder_spec(config))


@pytest.mark.parametrize(
    ("name", "value"),
    [("linear_num_key_heads", 3), ("linear_key_head_dim", 7), ("linear_value_head_dim", 40)],
)
def test_contradictory_delta_net_sizes_are_named_in_error(name: str, value: int, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3_5") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ModelError, match=name):
        decoder_spec(read_model_config(tmp_path))
