"""Fills Triton's folder with the kernels of common models for a GPU that need not be there, as the image ships them:
    TRITON_CACHE_DIR=FOLDER python -P -m quire.engine.worker.compiling.fill CAPABILITY [CONFIG.JSON ...]
The capability is a number such as 90, or the name of an AMD GPU's architecture, such as gfx942.
Weights are those of 16 bits; by default the models are those of common.toml.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget

from quire.engine.checkpoint.files import ModelConfig, read_model_config
from quire.engine.config import EngineConfig
from quire.engine.layers.schemes import Unquantized
from quire.engine.models import decoder_spec
from quire.engine.models.decoder import Decoder
from quire.engine.worker.compiling.processes import Compiled, compile_kinds
from quire.engine.worker.compiling.steps import launch_every_kind
from quire.engine.worker.inputs import Slots
from quire.engine.worker.memory import allocate_pages, allocate_states, layers_of
from quire.kernels.gpu.kinds import Kind, aim, recorded
from quire.kernels.gpu.triton_paged import Triton

_COMMON = Path(__file__).with_name("common.toml")
_PAGES = (16, 128, 256)
"""Tokens: Triton's, flash-attn 4's, and those of the others."""
_CONTEXT = 8192
"""Kinds do not follow from longer ones."""
_LARGE = 40 * 2**30
_META = torch.device("meta")


def main() -> int:
    parser = argparse.ArgumentParser(prog="fill", description=__doc__)
    parser.add_argument("capability", type=target_of)
    parser.add_argument("configs", nargs="*", type=Path)
    parser.add_argument("--list", action="store_true", help="Only say how many kinds there are")
    given = parser.parse_args()
    aim(given.capability)
    if given.capability.backend == "hip":  # as a PyTorch for it says, by which kernels are launched with other sizes
        torch.version.hip = torch.version.hip or "none here"
    kinds: dict[Kind, None] = {}
    for model in [read_model_config(each.parent) for each in given.configs] or common_models():
        for page in _PAGES:
            kinds |= dict.fromkeys(kinds_of(model, page))
    compiled = Compiled() if given.list else compile_kinds(list(kinds), lambda: None)
    missing = sum(not kind.mark.exists() for kind in kinds)
    why = f": {compiled.why}" if compiled.failed else ""
    print(f"{len(kinds)} kinds for {given.capability.arch}, {compiled.count} compiled now, {missing} not there{why}")
    return 0


def target_of(text: str) -> GPUTarget:
    """Raises ValueError for what is neither a number nor the name of an AMD GPU's architecture."""
    if text.startswith("gfx"):
        return GPUTarget("hip", text, 64 if text.startswith("gfx9") else 32)  # how many threads a wave has
    return GPUTarget("cuda", int(text), 32)


def common_models() -> list[ModelConfig]:
    models = []
    for raw in tomllib.loads(_COMMON.read_text(encoding="utf-8")).values():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(raw | {"torch_dtype": "bfloat16"}), encoding="utf-8")
            models.append(read_model_config(Path(folder)))
    return models


def kinds_of(model: ModelConfig, page: int) -> list[Kind]:
    """Of a model in bfloat16 whose pages have so many tokens; of tensors that are nothing but shapes."""
    backend, dtype, config = Triton(), torch.bfloat16, EngineConfig()
    backend.block_size = page
    spec = decoder_spec(replace(model, context=_CONTEXT))
    made = Decoder(
        spec,
        backend,
        Unquantized(backend, dtype),
        dtype=dtype,
        device=_META,
        max_model_len=_CONTEXT,
        progress=lambda: None,
    )
    for parameter in made.parameters().values():
        parameter.put(parameter.cut(torch.empty(parameter.shape, dtype=parameter.dtype, device=_META)))
    states = allocate_states(made, config.max_num_seqs + 1, 0)
    pages = layers_of(made, allocate_pages(made, 2), states)
    slots = Slots(config.max_num_seqs, _CONTEXT, page, _META, scratch_page=0, states=states)
    found: dict[Kind, None] = {}
    for sized in (config, config.of_card(_LARGE)):
        found |= dict.fromkeys(recorded(partial(launch_every_kind, made, pages, slots, sized.step_tokens)))
    return list(found)


if __name__ == "__main__":
    raise SystemExit(main())
