"""find_any_family returns the same family whether it imports one module of engine/families or all."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from quire.engine import families
from quire.engine.families import find_any_family, find_multimodal_family, vision
from quire.engine.families.base.family import ModelFamily
from quire.engine.families.base.vision.multimodal_family import MultimodalFamily
from tests.tree import ROOT


def import_modules(package: ModuleType) -> list[ModuleType]:
    return [import_module(f"{package.__name__}.{each.name}") for each in iter_modules(package.__path__)]


def test_lookup_finds_family_of_every_model_type() -> None:
    decoders_and_encoders = {
        model_type: family
        for module in import_modules(families)
        for family in vars(module).values()
        if isinstance(family, ModelFamily)
        for model_type in family.model_types
    }
    multimodal = {
        model_type: family
        for module in import_modules(vision)
        for family in vars(module).values()
        if isinstance(family, MultimodalFamily)
        for model_type in family.model_types
    }
    assert len(decoders_and_encoders) > 80
    assert len(multimodal) > 10
    model_types = {*decoders_and_encoders, *multimodal, "base", "vision", "no-such-type", "llama.py", ""}
    assert {name: find_any_family(name) for name in model_types} == {
        name: decoders_and_encoders.get(name) for name in model_types
    }
    assert {name: find_multimodal_family(name) for name in model_types} == {
        name: multimodal.get(name) for name in model_types
    }


def test_lookup_imports_only_the_module_that_has_the_model_type_as_name() -> None:
    code = (
        "import sys;"
        "from quire.engine.families import find_decoder_family, find_encoder_family, find_multimodal_family;"
        "assert find_decoder_family('llama') and not find_encoder_family('llama');"
        "assert find_encoder_family('modernbert') and not find_multimodal_family('llama');"
        "print(*sorted(name.rpartition('.')[2] for name, module in sys.modules.items()"
        " if name.rpartition('.')[0] in ('quire.engine.families', 'quire.engine.families.vision')))"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == ["base", "llama", "modernbert", "vision"]
