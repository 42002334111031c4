"""Fills Triton's cache with kernels of common models, as the container image ships them. The GPU need not be present.
    TRITON_CACHE_DIR=FOLDER python -P -m quire.engine.worker.kernel_compilation.fill CAPABILITY [CONFIG.JSON ...]
The capability is a number such as 90, or an AMD architecture such as gfx942. Weights are 16-bit. Without CONFIG.JSON,
the models are those of common.toml.
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

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import EngineConfig
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.layers.schemes import UnquantizedScheme
from quire.engine.layers.sublayer import BuildContext
from quire.engine.models import decoder_spec
from quire.engine.models.decoder import Decoder
from quire.engine.worker.device_memory import allocate_kv_blocks, allocate_slot_states, kv_cache_by_layer
from quire.engine.worker.input_batch import InputBatch, SlotStateTensors
from quire.engine.worker.kernel_compilation.kernel_compiler import CompileResult, compile_variants
from quire.engine.worker.kernel_compilation.kernel_variants import launch_kernel_variants
from quire.kernels.gpu.kernel_variant import KernelVariant, dry_run_for_variants, set_compile_target
from quire.kernels.gpu.triton_backend import TritonBackend

_COMMON_MODELS = Path(__file__).with_name("common.toml")
_BLOCK_SIZES = (16, 128, 256)
"""Tokens per block of Triton, of flash-attn 4, and of the other backends."""
_CONTEXT_TOKENS = 8192
"""Longer contexts add no variants."""
_LARGE_GPU_BYTES = 40 * 2**30
_META_DEVICE = torch.device("meta")


def main() -> int:
    parser = argparse.ArgumentParser(prog="fill", description=__doc__)
    parser.add_argument("capability", type=parse_gpu_target)
    parser.add_argument("configs", nargs="*", type=Path)
    parser.add_argument("--list", action="store_true", help="Only say how many kinds there are")
    args = parser.parse_args()
    set_compile_target(args.capability)
    if args.capability.backend == "hip":  # kernels choose sizes by torch.version.hip
        torch.version.hip = torch.version.hip or "none here"
    variants: dict[KernelVariant, None] = {}
    for model in [read_model_config(each.parent) for each in args.configs] or read_common_models():
        for block_size in _BLOCK_SIZES:
            variants |= dict.fromkeys(model_kernel_variants(model, block_size))
    compiled = CompileResult() if args.list else compile_variants(list(variants), lambda: None)
    missing = sum(not kind.marker_path.exists() for kind in variants)
    why = f": {compiled.first_error}" if compiled.num_failed else ""
    print(
        f"{len(variants)} kinds for {args.capability.arch}, "
        f"{compiled.num_compiled} compiled now, {missing} not there{why}"
    )
    return 0


def parse_gpu_target(text: str) -> GPUTarget:
    """Raises ValueError."""
    if text.startswith("gfx"):
        return GPUTarget("hip", text, 64 if text.startswith("gfx9") else 32)  # threads per wave
    return GPUTarget("cuda", int(text), 32)


def read_common_models() -> list[ModelConfig]:
    models = []
    for raw in tomllib.loads(_COMMON_MODELS.read_text(encoding="utf-8")).values():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(raw | {"torch_dtype": "bfloat16"}), encoding="utf-8")
            models.append(read_model_config(Path(folder)))
    return models


def model_kernel_variants(model: ModelConfig, block_size: int) -> list[KernelVariant]:
    """Runs the model on meta tensors."""
    backend = TritonBackend()
    backend.passed_chunk_trial = True  # a start whose trial fails leaves these variants unused
    dtype = torch.bfloat16
    config = EngineConfig()
    backend.block_size = block_size
    spec = decoder_spec(replace(model, max_model_len=_CONTEXT_TOKENS))
    decoder = Decoder(
        spec,
        BuildContext(
            backend=backend,
            scheme=UnquantizedScheme(backend, dtype),
            hidden_size=spec.hidden_size,
            dtype=dtype,
            kv_dtype=dtype,
            device=_META_DEVICE,
            max_model_len=_CONTEXT_TOKENS,
        ),
        lambda: None,
    )
    for parameter in decoder.parameters().values():
        parameter.weight_loader(
            parameter.slice_tensor(torch.empty(parameter.shape, dtype=parameter.dtype, device=_META_DEVICE))
        )
    states = allocate_slot_states(decoder, config.max_num_seqs + 1, 0)
    kv_cache = kv_cache_by_layer(decoder, allocate_kv_blocks(decoder, 2), states)
    input_batch = InputBatch(
        config.max_num_seqs,
        _CONTEXT_TOKENS,
        block_size,
        _META_DEVICE,
        scratch_block=0,
        slot_states=SlotStateTensors(states),
    )
    variants: dict[KernelVariant, None] = {}
    for gpu_config in (config, config.with_gpu_default_step_tokens(_LARGE_GPU_BYTES)):
        variants |= dict.fromkeys(
            dry_run_for_variants(
                partial(launch_kernel_variants, decoder, kv_cache, input_batch, gpu_config.max_step_tokens)
            )
        )
    return list(variants)


if __name__ == "__main__":
    raise SystemExit(main())
