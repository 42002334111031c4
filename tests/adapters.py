"""Random adapters in PEFT's format, written without PEFT, and models with merged adapters."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    path: Path, model: Any, rank: int, *, targets: Sequence[str] = ALL, seed: int = 0, size: float = 1.0, **config: Any
) -> Path:
    """Write an adapter for a transformers model. `size`: rough ratio of what it adds to the base weights."""
    generator = torch.Generator().manual_seed(seed)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    fields |= config
    tensors = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last not in targets:
            continue
        weight = module.weight
        scale = scale_of(fields)
        embedding = isinstance(module, torch.nn.Embedding)
        outs, inner = reversed(weight.shape) if embedding or is_transposed(module) else weight.shape
        shapes = (rank, inner), (outs, rank)
        down = torch.randn(shapes[0], generator=generator) * shapes[0][1] ** -0.5
        up = torch.randn(shapes[1], generator=generator) * size / (scale * rank**0.5)
        if embedding:
            down *= shapes[0][1] ** 0.5 * 0.5
        ends = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        tensors |= {f"base_model.model.{name}.{ends[0]}": down, f"base_model.model.{name}.{ends[1]}": up}
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(fields))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
    return path


def is_transposed(module: Any) -> bool:
    """True for GPT-2, whose weights are [in, out]."""
    return type(module).__name__ == "Conv1D"


def scale_of(fields: dict[str, Any]) -> float:
    rank = fields["r"]
    return float(fields["lora_alpha"] / (math.sqrt(rank) if fields.get("use_rslora") else rank))


def merge(model: Any, path: Path) -> Any:
    """Add an adapter's delta to the weights, in float64. A tied head stays unchanged, as in PEFT, and so do other uses
    of weights that several modules share.
    """
    from safetensors.torch import load_file

    fields = json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    for name, down in tensors.items():
        for first, second in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
            if f".{first}" in name:
                module = modules[name.removeprefix("base_model.model.").partition(f".{first}")[0]]
                product: Tensor = tensors[name.replace(first, second)].double() @ down.double() * scale_of(fields)
                module.weight = torch.nn.Parameter(module.weight.detach().clone())
                with torch.no_grad():
                    module.weight += product.t() if "embedding" in first or is_transposed(module) else product
    return model
