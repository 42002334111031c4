"""Draft heads in their published layouts, and their outputs computed in plain PyTorch without a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
EPS = 1e-5
HEADS, KV_HEADS = 4, 2


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 0.2)
        + (1.0 if name.endswith("norm.weight") else 0.0)
        for name, shape in shapes.items()
    }


def _layer_shapes(name: str, hidden: int, read: int, inner: int) -> dict[str, tuple[int, ...]]:
    kv = hidden * KV_HEADS // HEADS
    return {
        f"{name}.self_attn.q_proj.weight": (hidden, read),
        f"{name}.self_attn.k_proj.weight": (kv, read),
        f"{name}.self_attn.v_proj.weight": (kv, read),
        f"{name}.self_attn.o_proj.weight": (hidden, hidden),
        f"{name}.mlp.gate_proj.weight": (inner, hidden),
        f"{name}.mlp.up_proj.weight": (inner, hidden),
        f"{name}.mlp.down_proj.weight": (hidden, inner),
        f"{name}.post_attention_layernorm.weight": (hidden,),
    }


def eagle_tensors(hidden: int, vocab: int, seed: int = 5) -> Tensors:
    """Layout of SafeAILab's repositories."""
    shapes = {"embed_tokens.weight": (vocab, hidden), "fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)}
    return _random(shapes | _layer_shapes("layers.0", hidden, hidden, 2 * hidden), seed)


def eagle3_tensors(hidden: int, vocab: int, taps: int, seed: int = 5, said: int | None = None) -> Tensors:
    """Layout of SafeAILab's repositories. `said`: number of tokens that the head can draft; None: every other token."""
    every = vocab // said if said else 2
    said = vocab // every
    shapes = {"fc.weight": (hidden, taps * hidden), "norm.weight": (hidden,), "lm_head.weight": (said, hidden)}
    shapes |= {"midlayer.hidden_norm.weight": (hidden,), "midlayer.input_layernorm.weight": (hidden,)}
    tensors = _random(shapes | _layer_shapes("midlayer", hidden, 2 * hidden, 2 * hidden), seed)
    offsets = torch.arange(said) * (every - 1)
    return tensors | {"d2t": offsets, "t2d": torch.arange(vocab) % every == 0}


def medusa_tensors(hidden: int, vocab: int, heads: int, seed: int = 5) -> Tensors:
    """Layout of FasterDecoding's repositories."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        shapes |= {f"{head}.0.linear.weight": (hidden, hidden), f"{head}.0.linear.bias": (hidden,)}
        shapes |= {f"{head}.1.weight": (vocab, hidden)}
    return _random(shapes, seed)


def eagle_config(hidden: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
    } | more


def save_head(path: Path, tensors: Tensors, config: dict[str, Any], file: str = "pytorch_model.bin") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, path / file)
    else:
        torch.save(tensors, path / file)
    return path


class Reference:
    """A head's states and draft tokens after a text, from the model's hidden states."""

    def __init__(self, tensors: Tensors, embedding: Tensor, head: Tensor) -> None:
        """`embedding` and `head` are the model's, [vocab, hidden]. All computation uses their dtype."""
        self.t, self.embedding, self.head = tensors, embedding, head
        self.third, self.medusa = "midlayer.hidden_norm.weight" in tensors, "0.0.linear.weight" in tensors

    def guesses(self, hidden: Tensor, tapped: list[Tensor], tokens: list[int], count: int) -> tuple[Tensor, list[int]]:
        """The state at the second last token, and the most likely draft tokens after the last one. `hidden` and
        `tapped`, [tokens - 1, hidden], cover all tokens but the last.
        """
        if self.medusa:
            return hidden[-1], [int(self.medusa_logits(hidden[-1], head).argmax()) for head in range(count)]
        read = self.read(hidden, tapped)
        following, found, first = tokens[1:], list[int](), None
        for _ in range(count):
            states = self.layer(torch.tensor(following), read)
            first = states[-1] if first is None else first
            found.append(int(self.logits(states[-1]).argmax()))
            following, read = [*following, found[-1]], torch.cat((read, states[-1:]))
        assert first is not None
        return first, found

    def read(self, hidden: Tensor, tapped: list[Tensor]) -> Tensor:
        return F.linear(torch.cat(tapped, -1), self.t["fc.weight"]) if self.third else hidden

    def medusa_logits(self, states: Tensor, head: int) -> Tensor:
        inner = F.linear(states, self.t[f"{head}.0.linear.weight"], self.t[f"{head}.0.linear.bias"])
        return F.linear(states + F.silu(inner), self.t[f"{head}.1.weight"])

    def logits(self, states: Tensor) -> Tensor:
        if not self.third:
            return F.linear(states, self.head)
        own = F.linear(self._norm(states, "norm"), self.t["lm_head.weight"])
        logits = own.new_full((*own.shape[:-1], len(self.embedding)), -torch.inf)
        logits[..., self.t["t2d"]] = own
        return logits

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.t[f"{name}.weight"], EPS)

    def layer(self, following: Tensor, read: Tensor) -> Tensor:
        """States [T, hidden] at T positions, from the hidden states read there and the following tokens."""
        embedded, name = self.embedding[following], "midlayer" if self.third else "layers.0"
        if self.third:
            x = torch.cat(
                (self._norm(embedded, f"{name}.input_layernorm"), self._norm(read, f"{name}.hidden_norm")), -1
            )
            residual = read
        else:
            x = residual = F.linear(torch.cat((embedded, read), -1), self.t["fc.weight"], self.t["fc.bias"])
        q, k, v = (F.linear(x, self.t[f"{name}.self_attn.{each}_proj.weight"]) for each in "qkv")
        q, k, v = (each.unflatten(-1, (-1, q.shape[-1] // HEADS)).transpose(0, 1) for each in (q, k, v))
        q, k = rotated(q), rotated(k)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        x = residual + F.linear(attended, self.t[f"{name}.self_attn.o_proj.weight"])
        normed = self._norm(x, f"{name}.post_attention_layernorm")
        gate, up = (F.linear(normed, self.t[f"{name}.mlp.{each}_proj.weight"]) for each in ("gate", "up"))
        return x + F.linear(F.silu(gate) * up, self.t[f"{name}.mlp.down_proj.weight"])


def rotated(x: Tensor) -> Tensor:
    """RoPE as Llama applies it to [heads, positions, size]."""
    size = x.shape[-1]
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)
    angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), frequencies)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
