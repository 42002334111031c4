"""Tiny models with a multi-token prediction layer (DeepSeek-V3, 2024, 2.2) in their published layouts, and the layer's
outputs: the layer itself from transformers' class, the rest in plain PyTorch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tiny_models import save_tiny_model

NEMOTRON = ("nemotron_h", "nemotron_h-latent")
"""Families whose MTP layer consists of two layers of one sublayer each."""
BELOW = ("llama", "qwen3_5", "qwen3_5-moe", "qwen3-next")
"""Families whose MTP tensors are below `mtp.`, as Qwen's; those of other families follow the model's layers, as
DeepSeek's.
"""
_ALONE = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_only_layers": []}
_OF_QWEN = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}


def alone(path: Path) -> Path:
    """Path of the one-layer model whose layer is the MTP layer."""
    return path.with_name(f"{path.name}-mtp")


def save_tiny_mtp(path: Path, family: str, **overrides: Any) -> Path:
    """Write a random model of the family to `path`, and next to it the model `alone`."""
    kinds = {"layer_types": ["full_attention"]} if "qwen3_5" in family or family == "qwen3-next" else {}
    known = {name: value for name, value in _ALONE.items() if name == "num_hidden_layers" or family != "llama"}
    if family in NEMOTRON:
        known = {"layer_types": ["full_attention", "moe"]}
    known |= {"mlp_layer_types": ["sparse"]} if family == "glm4_moe_lite" else {}
    save_tiny_model(path, family, **overrides)
    save_tiny_model(alone(path), family, **(overrides | known | kinds))
    config = json.loads((path / "config.json").read_text())
    layers, hidden = config.get("num_hidden_layers"), config["hidden_size"]
    below, own = family in BELOW, load_file(path / "model.safetensors")
    if family in NEMOTRON:
        own |= _nemotron_tensors(path, hidden)
        (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
        save_file(own, path / "model.safetensors", {"format": "pt"})
        return path
    for name, tensor in mtp_tensors(path, hidden, below=below).items():
        stored = name
        if below:
            module, _, kind = name.rpartition(".")
            stored = f"mtp.{_OF_QWEN[module]}.{kind}" if module in _OF_QWEN else f"mtp.layers.0.{name}"
        own[stored if below else f"model.layers.{layers}.{stored}"] = tensor
    if not below:
        config["num_nextn_predict_layers"] = 1
        own[f"model.layers.{layers}.embed_tokens.weight"] = own["model.embed_tokens.weight"].clone()
        own[f"model.layers.{layers}.shared_head.head.weight"] = own["lm_head.weight"].clone()
        (path / "config.json").write_text(json.dumps(config))
    save_file(own, path / "model.safetensors", {"format": "pt"})
    return path


def mtp_tensors(path: Path, hidden: int, *, below: bool) -> dict[str, Tensor]:
    """Tensors by DeepSeek's names within a layer; the final norm is that of the model `alone`."""
    generator, donor = torch.Generator().manual_seed(9), load_file(alone(path) / "model.safetensors")
    centre = 0.0 if is_offset(alone(path)) else 1.0
    prefix = "model.layers.0."
    tensors = {name.removeprefix(prefix): each for name, each in donor.items() if name.startswith(prefix)}
    norms = {f"{name}.weight": centre + 0.2 * torch.randn(hidden, generator=generator) for name in ("enorm", "hnorm")}
    join = 1.5 * (2 * hidden) ** -0.5 * torch.randn(hidden, 2 * hidden, generator=generator)
    end = next(each for name, each in donor.items() if name.endswith((".norm_f.weight", "model.norm.weight")))
    return tensors | norms | {"eh_proj.weight": join, "shared_head.norm.weight": end}


def _nemotron_tensors(path: Path, hidden: int) -> dict[str, Tensor]:
    """Tensors by the names that vLLM's nemotron_h_mtp.py reads."""
    found, ends = mtp_tensors(path, hidden, below=True), {"shared_head.norm.weight": "1.final_layernorm.weight"}
    joins = {f"{name}.weight": f"0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj")}
    donor = load_file(alone(path) / "model.safetensors")
    layers = {name.partition("layers.")[2]: each for name, each in donor.items() if ".layers." in name}
    return {f"mtp.layers.{name}": each for name, each in layers.items()} | {
        f"mtp.layers.{own}": found[name] for name, own in (joins | ends).items()
    }


def is_offset(path: Path) -> bool:
    """True if the norm weights of a family are offsets from 1."""
    return json.loads((path / "config.json").read_text())["model_type"].startswith(("qwen3_5", "qwen3_next"))


class MtpReference:
    """States and draft tokens of the MTP layer, in float64, without a cache."""

    def __init__(self, path: Path) -> None:
        self.model = _exact(path)
        self.layer = _exact(alone(path)).model
        config = self.model.config
        self.tensors = {
            name: each.double() for name, each in mtp_tensors(path, config.hidden_size, below=False).items()
        }
        self.eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        self.offset = float(is_offset(path))

    @torch.no_grad()
    def guesses(self, tokens: list[int], count: int) -> tuple[Tensor, list[int]]:
        """The state at the second last token, and the most likely draft tokens after the last one."""
        states = self.model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        following, found, first = tokens[1:], list[int](), None
        for _ in range(count):
            last = self.states(following, states)[-1]
            first = last if first is None else first
            found.append(int(self.model.lm_head(last).argmax()))
            following, states = [*following, found[-1]], torch.cat((states, last[None]))
        assert first is not None
        return first, found

    def states(self, following: list[int], before: Tensor) -> Tensor:
        embedded = self.model.get_input_embeddings()(torch.tensor(following))
        joined = torch.cat((self._normed(embedded, "enorm"), self._normed(before, "hnorm")), -1)
        x = F.linear(joined, self.tensors["eh_proj.weight"])
        return self.layer(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]

    def _normed(self, x: Tensor, name: str) -> Tensor:
        scaled = x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return scaled * (self.tensors[f"{name}.weight"] + self.offset)


def _exact(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
