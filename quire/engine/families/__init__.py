"""Model families, one file each, found by config.json's model_type. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from quire.engine.families import vision
from quire.engine.families.base.encoder_family import EncoderFamily
from quire.engine.families.base.family import DecoderFamily, ModelFamily
from quire.engine.families.base.vision.multimodal_family import MultimodalFamily

_T = TypeVar("_T")
_Family = TypeVar("_Family", ModelFamily, MultimodalFamily)


def find_decoder_family(model_type: object) -> DecoderFamily | None:
    family = find_any_family(model_type)
    return family if isinstance(family, DecoderFamily) else None


def find_encoder_family(model_type: object) -> EncoderFamily | None:
    family = find_any_family(model_type)
    return family if isinstance(family, EncoderFamily) else None


def find_any_family(model_type: object) -> ModelFamily | None:
    return _find_family_by_module_name(str(model_type)) or _families_by_model_type().get(str(model_type))


def find_multimodal_family(model_type: object) -> MultimodalFamily | None:
    if _find_family_by_module_name(str(model_type)) is not None:  # a text model's family
        return None
    return _multimodal_families_by_model_type().get(str(model_type))


def find_gguf_families(architecture: str) -> list[DecoderFamily]:
    return _families_by_gguf_architecture().get(architecture, [])


def gguf_architectures() -> list[str]:
    return sorted(_families_by_gguf_architecture())


def decoder_model_types() -> list[str]:
    return sorted(kind for kind, family in _families_by_model_type().items() if isinstance(family, DecoderFamily))


def encoder_model_types() -> list[str]:
    return sorted(kind for kind, family in _families_by_model_type().items() if isinstance(family, EncoderFamily))


def multimodal_model_types() -> list[str]:
    return sorted(_multimodal_families_by_model_type())


@cache
def _find_family_by_module_name(model_type: str) -> ModelFamily | None:
    """Importing all modules would take a tenth of `quire plan`'s time."""
    name = model_type.replace("-", "_")
    if name not in _module_names(__path__):
        return None
    return _by_model_type(_collect_instances(__name__, [name], ModelFamily)).get(model_type)


@cache
def _families_by_model_type() -> Mapping[str, ModelFamily]:
    return _by_model_type(_collect_instances(__name__, _module_names(__path__), ModelFamily))


@cache
def _multimodal_families_by_model_type() -> Mapping[str, MultimodalFamily]:
    return _by_model_type(_collect_instances(vision.__name__, _module_names(vision.__path__), MultimodalFamily))


def _by_model_type(families: Iterable[_Family]) -> Mapping[str, _Family]:
    by_model_type: dict[str, _Family] = {}
    for family in families:
        for model_type in family.model_types:
            if by_model_type.setdefault(model_type, family) is not family:
                raise AssertionError(f"two families describe {model_type}")
    return by_model_type


def _module_names(path: Iterable[str]) -> list[str]:
    return [each.name for each in iter_modules(path) if not each.ispkg]


def _collect_instances(package: str, module_names: Iterable[str], kind: type[_T]) -> list[_T]:
    modules = [import_module(f"{package}.{name}") for name in module_names]
    return [value for module in modules for value in vars(module).values() if isinstance(value, kind)]


@cache
def _families_by_gguf_architecture() -> Mapping[str, list[DecoderFamily]]:
    by_architecture: dict[str, list[DecoderFamily]] = {}
    for family in {id(each): each for each in _families_by_model_type().values()}.values():
        if isinstance(family, DecoderFamily) and family.gguf is not None:
            for architecture in family.gguf.architectures:
                by_architecture.setdefault(architecture, []).append(family)
    return by_architecture
