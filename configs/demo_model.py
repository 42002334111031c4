"""The network of the embedded demo model: a plain Llama for training on a CPU."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, named as in the config of a Llama."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


class Attention(nn.Module):
    """Grouped-query attention with rotary positions (rotate-half, as in transformers)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """x (rows, length, hidden); cos, sin (length, head_dim); mask (length, length), added to the scores."""
        rows, length, _ = x.shape
        heads = (rows, length, -1, self.shape.head_dim)
        q, k, v = (proj(x).view(heads).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if length <= 512:  # measured: on a CPU the plain product is up to twice as fast as the fused one here
            scores = q @ k.transpose(-1, -2) * self.shape.head_dim**-0.5 + mask
            out = scores.softmax(-1).to(v.dtype) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama with tied embeddings; its parameters are named as in transformers, less the leading `model.`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        frequency = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings), frequency).repeat(1, 2)
        self.register_buffer("cos", angles.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", angles.sin().bfloat16(), persistent=False)
        mask = torch.full((512, 512), -1e4, dtype=torch.bfloat16).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))  # of a residual branch
                scale = (2 * shape.num_hidden_layers) ** -0.5 if last else 0.5 if "embed" in name else 1.0
                nn.init.normal_(parameter, std=scale * shape.hidden_size**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (rows, length) -> logits (rows, length, vocab) in bf16."""
        length = tokens.shape[1]
        mask = self.mask[:length, :length]
        with torch.autocast("cpu", torch.bfloat16):
            x = self.embed_tokens(tokens)
            for layer in self.layers:
                x = layer(x, self.cos[:length], self.sin[:length], mask)
            return F.linear(self.norm(x), self.embed_tokens.weight)

    def loss(self, window: Tensor) -> Tensor:
        """Mean negative log-likelihood, in nats per token, of window (rows, length + 1)."""
        return F.cross_entropy(self(window[:, :-1]).float().flatten(0, 1), window[:, 1:].flatten())
