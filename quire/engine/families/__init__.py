"""The model families: a file each says all that Quire knows of one. Whatever reads them finds them here, by what
config.json calls the model; a new file needs no entry anywhere. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from quire.engine.families import vision
from quire.engine.families.base.encoder_family import EncoderFamily
from quire.engine.families.base.family import ConfigFamily, Family
from quire.engine.families.base.vision.multimodal_family import MultimodalFamily

_T = TypeVar("_T")


def find_family(model_type: object) -> Family | None:
    """The family of decoders of this model_type; None: no file here describes it."""
    family = _families().get(str(model_type))
    return family if isinstance(family, Family) else None


def find_encoder_family(model_type: object) -> EncoderFamily | None:
    family = _families().get(str(model_type))
    return family if isinstance(family, EncoderFamily) else None


def find_any_family(model_type: object) -> ConfigFamily | None:
    return _families().get(str(model_type))


def find_multimodal_family(model_type: object) -> MultimodalFamily | None:
    """Of a model that takes images too."""
    return _multimodal_families().get(str(model_type))


def find_gguf_families(architecture: str) -> list[Family]:
    """Those whose GGUF files call themselves so."""
    return _gguf_families().get(architecture, [])


def gguf_architectures() -> list[str]:
    return sorted(_gguf_families())


def decoder_model_types() -> list[str]:
    """All that a file here describes, in alphabetical order."""
    return sorted(kind for kind, family in _families().items() if isinstance(family, Family))


def encoder_model_types() -> list[str]:
    return sorted(kind for kind, family in _families().items() if isinstance(family, EncoderFamily))


def multimodal_model_types() -> list[str]:
    return sorted(_multimodal_families())


@cache
def _families() -> Mapping[str, ConfigFamily]:
    """By model_type."""
    families = _find_all(__name__, __path__, ConfigFamily)
    return {model_type: family for family in families for model_type in family.model_types}


@cache
def _multimodal_families() -> Mapping[str, MultimodalFamily]:
    """By the model_type of whole models."""
    families = _find_all(vision.__name__, vision.__path__, MultimodalFamily)
    return {model_type: family for family in families for model_type in family.model_types}


def _find_all(package: str, path: Iterable[str], kind: type[_T]) -> list[_T]:
    """What is of this kind in a package's modules."""
    modules = [import_module(f"{package}.{each.name}") for each in iter_modules(path) if not each.ispkg]
    return [value for module in modules for value in vars(module).values() if isinstance(value, kind)]


@cache
def _gguf_families() -> Mapping[str, list[Family]]:
    """By general.architecture."""
    by_architecture: dict[str, list[Family]] = {}
    for family in {id(each): each for each in _families().values()}.values():
        if isinstance(family, Family) and family.gguf is not None:
            for architecture in family.gguf.architectures:
                by_architecture.setdefault(architecture, []).append(family)
    return by_architecture
