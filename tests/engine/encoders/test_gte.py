"""GTE's second architecture, which transformers lacks, against its definition written out in float64."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ModelError
from quire.engine.common.request_params import PoolingParams
from quire.engine.engine_core import EngineCore
from tests.engine.vectors import pooling_module, same, vectors, write_modules
from tests.tiny_models import VOCAB

HIDDEN, WIDE, LAYERS, HEADS = 64, 96, 3, 4
SIZE = HIDDEN // HEADS
LENGTHS = (1, 2, 7, 16, 33, 64, 130, 300)
CONFIG: dict[str, Any] = {
    "model_type": "new",
    "architectures": ["NewModel"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 320,
    "hidden_act": "gelu",
    "layer_norm_type": "layer_norm",
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "rope",
    "rope_theta": 500.0,
    "rope_scaling": {"type": "ntk", "factor": 8.0},
    "type_vocab_size": 1,
    "pack_qkv": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "multilingual": {},
    "english": {"type_vocab_size": 2},
    "no-types": {"type_vocab_size": 0, "model_type": "gte"},
    "mixed": {"rope_scaling": {"type": "ntk", "factor": 4.0, "mixed_b": 0.6}},
    "unscaled": {"rope_scaling": None, "hidden_act": "silu"},
    "unpacked": {"pack_qkv": False},
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


@dataclass
class Gte:
    """A random model in float64, computed prompt by prompt from the architecture's definition."""

    config: dict[str, Any]
    labels: int = 0

    def __post_init__(self) -> None:
        config, generator = self.config, torch.Generator().manual_seed(4321)
        parts = (
            {"qkv_proj": 3 * HIDDEN} if config["pack_qkv"] else dict.fromkeys(("q_proj", "k_proj", "v_proj"), HIDDEN)
        )
        shapes = {"embeddings.word_embeddings.weight": (VOCAB, HIDDEN), **norm("embeddings.LayerNorm")}
        if config["type_vocab_size"]:
            shapes["embeddings.token_type_embeddings.weight"] = (config["type_vocab_size"], HIDDEN)
        for layer in (f"encoder.layer.{index}." for index in range(LAYERS)):
            for part, rows in parts.items():
                shapes |= linear(f"{layer}attention.{part}", rows, HIDDEN)
            shapes |= linear(f"{layer}attention.o_proj", HIDDEN, HIDDEN) | norm(f"{layer}attn_ln")
            shapes |= {f"{layer}mlp.up_gate_proj.weight": (2 * WIDE, HIDDEN)}
            shapes |= linear(f"{layer}mlp.down_proj", HIDDEN, WIDE) | norm(f"{layer}mlp_ln")
        if self.labels:
            shapes |= linear("pooler.dense", HIDDEN, HIDDEN) | linear("classifier", self.labels, HIDDEN)
        self.tensors = {name: draw_tensor(name, shape, generator) for name, shape in shapes.items()}

    def save(self, path: Path) -> Path:
        """Save it like published checkpoints: a classifier's tensors have the prefix `new.`, except its last."""
        config = dict(self.config)
        tensors = {name: tensor.float() for name, tensor in self.tensors.items()}
        if self.labels:
            config |= {"architectures": ["NewForSequenceClassification"]}
            config["id2label"] = {str(label): f"LABEL_{label}" for label in range(self.labels)}
            tensors = {name if name.startswith("classifier") else f"new.{name}": each for name, each in tensors.items()}
        (path / "config.json").write_text(json.dumps(config))
        save_file(tensors, path / "model.safetensors")
        return path

    def states(self, ids: list[int], types: list[int] | None = None) -> Tensor:
        """[T, hidden]"""
        x = self.tensors["embeddings.word_embeddings.weight"][ids]
        if self.config["type_vocab_size"]:
            x = x + self.tensors["embeddings.token_type_embeddings.weight"][types or [0] * len(ids)]
        x = self.normed("embeddings.LayerNorm", x)
        for layer in (f"encoder.layer.{index}." for index in range(LAYERS)):
            x = self.normed(f"{layer}attn_ln", x + self.attended(layer, x))
            up, gate = (x @ self.tensors[f"{layer}mlp.up_gate_proj.weight"].T).split(WIDE, dim=-1)
            if self.config["hidden_act"] == "gelu":
                gate = gate * 0.5 * (1 + torch.erf(gate / 2**0.5))
            else:
                gate = gate / (1 + torch.exp(-gate))
            x = self.normed(f"{layer}mlp_ln", x + self.linear(f"{layer}mlp.down_proj", up * gate))
        return x

    def attended(self, layer: str, x: Tensor) -> Tensor:
        if self.config["pack_qkv"]:
            q, k, v = self.linear(f"{layer}attention.qkv_proj", x).split(HIDDEN, dim=-1)
        else:
            q, k, v = (self.linear(f"{layer}attention.{name}_proj", x) for name in "qkv")
        heads = []
        for at in range(0, HIDDEN, SIZE):
            one, other = self.rotated(q[:, at : at + SIZE]), self.rotated(k[:, at : at + SIZE])
            heads.append((one @ other.T / SIZE**0.5).softmax(-1) @ v[:, at : at + SIZE])
        return self.linear(f"{layer}attention.o_proj", torch.cat(heads, dim=-1))

    def rotated(self, x: Tensor) -> Tensor:
        scaling, base, factor = self.config["rope_scaling"] or {}, self.config["rope_theta"], 1.0
        mixed = scaling.get("mixed_b")
        if scaling and mixed is None:
            base, factor = base * scaling["factor"], scaling["factor"] ** (2 / SIZE)
        stretched = []
        for pair in range(SIZE // 2):
            if mixed is not None:
                growth = np.log(scaling["factor"]) / (SIZE / 2) ** mixed
                factor = np.exp(growth * (pair + 1) ** mixed)
            stretched.append(base ** (-2 * pair / SIZE) / factor)
        angles = torch.outer(torch.arange(len(x), dtype=torch.float64), torch.tensor(stretched, dtype=torch.float64))
        turned = torch.polar(torch.ones_like(angles), angles) * torch.complex(*x.contiguous().chunk(2, dim=-1))
        return torch.cat((turned.real, turned.imag), dim=-1)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]

    def normed(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + self.config["layer_norm_eps"]).sqrt()
        return scaled * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]

    def logits(self, ids: list[int], types: list[int] | None = None) -> Tensor:
        return self.linear("classifier", self.linear("pooler.dense", self.states(ids, types)[0]).tanh())


def norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}


def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def draw_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Large enough that attention is not flat; exact in float32."""
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 2:
        scaled = noise * (0.5 if "embeddings" in name else 1.5 * shape[1] ** -0.5)
    else:
        scaled = 0.2 * noise + (0.0 if name.endswith("bias") else 1.0)
    return scaled.double()


def start(path: Path, **options: object) -> EngineCore:
    return EngineCore(EngineConfig(model=str(path), **options))


@pytest.mark.few(2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gte_embeddings_equal_float64_definition(variant: str, tmp_path: Path) -> None:
    model = Gte(CONFIG | VARIANTS[variant])
    write_modules(model.save(tmp_path), pooling_module(HIDDEN, "cls"))
    expected = [model.states(prompt)[0].numpy() for prompt in prompts()]
    for backend in ("cpu", "reference"):
        engine = start(tmp_path, attention_backend=backend)
        assert (engine.info.tasks, engine.info.max_model_len) == (("embed",), 320)
        actual = vectors(engine, prompts(), PoolingParams(activation=False))
        for i, vector in enumerate(actual):
            assert vector == pytest.approx(expected[i], abs=1e-4), f"{backend}, prompt {i}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gte_embedding_does_not_depend_on_batch(dtype: str, tmp_path: Path) -> None:
    engine = start(Gte(CONFIG).save(tmp_path), dtype=dtype)
    alone = [vectors(engine, [prompt])[0] for prompt in prompts()]
    assert same(vectors(engine, prompts() * 2), alone * 2)


@pytest.mark.parametrize("labels", [1, 3])
def test_gte_classifier_logits_equal_float64_definition(labels: int, tmp_path: Path) -> None:
    """A reranker reads a pair of texts; with two token types the model distinguishes them."""
    model = Gte(CONFIG | {"type_vocab_size": 2}, labels)
    engine = start(model.save(tmp_path))
    begins = [None if len(prompt) < 5 else len(prompt) // 3 for prompt in prompts()]
    types = [
        [int(begin is not None and at >= begin) for at in range(len(ids))]
        for ids, begin in zip(prompts(), begins, strict=True)
    ]
    expected = [model.logits(*pair).numpy() for pair in zip(prompts(), types, strict=True)]
    params = [PoolingParams(task="classify", activation=False, second_segment=begin) for begin in begins]
    assert engine.info.tasks == ("classify",)
    assert np.stack(vectors(engine, prompts(), params)) == pytest.approx(np.stack(expected), abs=1e-4)


def test_gte_token_classification_head_is_ignored(tmp_path: Path) -> None:
    """gte-multilingual-base has a head that weights its tokens."""
    model = Gte(CONFIG | {"architectures": ["NewModel", "NewForTokenClassification"]})
    expected = model.states(prompts()[3]).mean(0)
    model.tensors |= {"classifier.weight": torch.ones(1, HIDDEN), "classifier.bias": torch.ones(1)}
    (actual,) = vectors(start(model.save(tmp_path)), [prompts()[3]], PoolingParams(activation=False))
    assert actual == pytest.approx(expected.numpy(), abs=1e-4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logn_attention_scale", True),
        ("layer_norm_type", "rms_norm"),
        ("position_embedding_type", "absolute"),
        ("rope_scaling", {"type": "ntk"}),
    ],
)
def test_unsupported_gte_config_is_rejected(field: str, value: object, tmp_path: Path) -> None:
    path = Gte(CONFIG | VARIANTS["unscaled"]).save(tmp_path)
    (path / "config.json").write_text(json.dumps(CONFIG | {field: value}))
    with pytest.raises(ModelError, match="factor" if field == "rope_scaling" else field):
        start(path)
