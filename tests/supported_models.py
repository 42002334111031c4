"""Writes docs/reference/supported-models.md from the families' files: `python -m tests.supported_models`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.mla import MLALayerSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.moe import MoELayerSpec
from quire.engine.architecture.recurrent import (
    DeltaNetSpec,
    KimiDeltaAttentionSpec,
    Mamba2LayerSpec,
    MambaLayerSpec,
    ShortConvSpec,
)
from quire.engine.architecture.shared_transformer import SharedTransformerSpec
from quire.engine.architecture.sublayer import SublayerSpec
from quire.engine.checkpoint.family_spec import read_decoder_spec
from quire.engine.families import find_multimodal_family, multimodal_model_types
from quire.engine.families.base.encoder_family import EncoderFamily
from quire.engine.families.base.family import DecoderFamily, ModelFamily
from tests import tiny_models
from tests.tree import ROOT

FILE = ROOT / "docs/reference/supported-models.md"
FOLDER = ROOT / "quire/engine/families"
SUBLAYERS: dict[type[SublayerSpec], str] = {
    AttentionLayerSpec: "attention",
    MLALayerSpec: "[latent attention](../explanations/kv-cache.md#latent-attention)",
    ShortConvSpec: "[short convolutions](../explanations/kv-cache.md#recurrent-states)",
    DeltaNetSpec: "[gated delta nets](../explanations/kv-cache.md#recurrent-states)",
    KimiDeltaAttentionSpec: "[Kimi Delta Attention](../explanations/kv-cache.md#recurrent-states)",
    Mamba2LayerSpec: "[state spaces](../explanations/kv-cache.md#recurrent-states)",
    MambaLayerSpec: "[selective scans](../explanations/kv-cache.md#recurrent-states)",
    SharedTransformerSpec: "blocks that layers share",
    MLPSpec: "MLP",
    MoELayerSpec: "[experts](../guides/models.md#families)",
}
INTRODUCTION = """# Supported models

Generated from the files in `quire/engine/families` by `python -m tests.supported_models`. For formats and names see
[models](../guides/models.md). Most other causal language models of transformers are served by transformers' own class:
[every class](models-table.md).

## Models that generate text

`model_type` is the value in config.json, GGUF the value of `general.architecture`; - means safetensors only.

| file | models | `model_type` | GGUF | with images | layers, of a small model |
|---|---|---|---|---|---|
"""
ENCODERS = """
## Models that make vectors and scores

| file | models | `model_type` | with images |
|---|---|---|---|
"""


def main() -> None:
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(content(), encoding="utf-8")


def content() -> str:
    files = [(path, list(_families(path))) for path in sorted(FOLDER.glob("*.py")) if path.name != "__init__.py"]
    decoders = [_decoder_row(path, families) for path, families in files if isinstance(families[0], DecoderFamily)]
    encoders = [_encoder_row(path, families) for path, families in files if isinstance(families[0], EncoderFamily)]
    return "".join([INTRODUCTION, *decoders, ENCODERS, *encoders])


def _families(path: Path) -> Iterator[ModelFamily]:
    """Families that a file describes, in its order."""
    module = import_module(f"quire.engine.families.{path.stem}")
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = getattr(module, node.targets[0].id)
            if isinstance(value, ModelFamily):
                yield value


def _decoder_row(path: Path, families: list[ModelFamily]) -> str:
    formats = [each.gguf for each in families if isinstance(each, DecoderFamily) and each.gguf is not None]
    architectures = dict.fromkeys(f"`{name}`" for each in formats for name in each.architectures)
    cells = [
        _models(path),
        _names(families),
        ", ".join(architectures) or "-",
        _with_images(families),
        _layers(families),
    ]
    return f"| `{path.stem}` | {' | '.join(cells)} |\n"


def _encoder_row(path: Path, families: list[ModelFamily]) -> str:
    return f"| `{path.stem}` | {' | '.join([_models(path), _names(families), _with_images(families)])} |\n"


def _models(path: Path) -> str:
    """The module docstring of a file."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split())
    return text.replace("|", r"\|")


def _names(families: list[ModelFamily]) -> str:
    return ", ".join(f"`{name}`" for each in families for name in each.model_types)


def _with_images(families: list[ModelFamily]) -> str:
    """Model types of multimodal models whose text part is one of these families."""
    texts = {name for each in families for name in each.model_types}
    outer = [(name, find_multimodal_family(name)) for name in multimodal_model_types()]
    found = [name for name, each in outer if each is not None and each.text_model_type in texts]
    served = [f"`{name}`" for name in found if (each := find_multimodal_family(name)) and each.read_vision_spec]
    return f"[{', '.join(served)}](../guides/images.md)" if served else "-"


def _layers(families: list[ModelFamily]) -> str:
    kinds: dict[str, None] = {}
    for each in families:
        assert isinstance(each, DecoderFamily)
        for spec in _tiny_specs(each):
            kinds |= dict.fromkeys(_sublayers(spec))
    return ", ".join(kinds)


def _tiny_specs(family: DecoderFamily) -> list[DecoderSpec]:
    """Specs of the first tiny test model of each model type, or of its base family's if there is none."""
    configs = {each["model_type"]: tiny_models.SHAPE | each for each in reversed(tiny_models.FAMILIES.values())}
    specs = [read_decoder_spec(configs[name]) for name in family.model_types if name in configs]
    if not specs and family.base is not None:
        return _tiny_specs(family.base)
    return [each for each in specs if each is not None]


def _sublayers(spec: DecoderSpec) -> Iterator[str]:
    sublayers = [each for layer in spec.layers for each in layer]
    yield from (name for kind, name in SUBLAYERS.items() if any(isinstance(each, kind) for each in sublayers))
    if any(isinstance(each, AttentionLayerSpec) and each.window for each in sublayers):
        yield "[sliding windows](../guides/prefix-caching.md#sliding-windows)"


if __name__ == "__main__":
    main()
