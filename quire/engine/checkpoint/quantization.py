"""What config.json's quantization_config says of each linear: in which format its weights are stored. No torch.

The formats: GPTQ (Frantar et al., 2023), AWQ (Lin et al., 2024), compressed-tensors
(https://github.com/vllm-project/compressed-tensors), FP8 as DeepSeek-V3 (2024) and AutoFP8 store it, bitsandbytes'
8 bits (Dettmers et al., 2022) and 4 bits (Dettmers et al., 2023), and MXFP4 (Rouhani et al., 2023) as gpt-oss has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.engine.errors import ModelError
from quire.engine.families.base.schema.quantization_schema import Quantization, WeightsArgs
from quire.engine.text.tokenizer_safety import is_suspicious_regex

_FIELD = "model: config.json: quantization_config"
_EXPRESSION = "re:"
_ALL = "Linear"
"""A target of compressed-tensors: every linear."""
_FLOATS_OF_4 = {"mxfp4-pack-quantized": 32, "nvfp4-pack-quantized": 16}
"""How compressed-tensors stores 4-bit floats, and the inputs that share a scale."""
_SCALES_ASIDE = re.compile(
    r"\.(?:input_scale|input_scale_inv|input_zero_point|input_global_scale|input_scale_ub|activation_scale"
    r"|output_scale|output_zero_point|[kvq]_scale|[kv]_zero_point|prob_output_scale|weight_format|weight_g_idx_static)$"
)
"""Tensors for the rounding of activations and of the KV cache. Kernels take scales from each row of what they round,
and keys and values are kept in the served type: so they are not needed."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How one linear's weights are stored."""

    kind: str
    """gptq, awq, packed (integers of compressed-tensors), int8, float8, float4, bnb8 or bnb4."""
    bits: int = 8
    group: int = 0
    """Inputs that share a scale; 0: all of an output's."""
    zero_added: int = 0
    """What is added to a stored zero point: GPTQ's first version stores one less."""
    symmetric: bool = True
    """There are no zero points, where they could be."""
    strategy: str = "channel"
    """What shares a scale in 8 bits: tensor, channel (an output), group or block. Of 4-bit floats tensor_group: groups,
    whose scales share one more."""
    block: tuple[int, int] = (0, 0)
    """Of strategy block: outputs and inputs."""
    scale_name: str = "weight_scale"


Groups = Sequence[tuple[tuple[str, ...], WeightFormat]]
"""Targets and the format of what they match; the first that match count."""


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The formats of all linears of a checkpoint."""

    method: str
    groups: Groups
    ignored: tuple[str, ...]

    def of(self, linear: str) -> WeightFormat | None:
        """The format of a linear by its name; None: its weights are not quantized."""
        if any(_matches(linear, pattern) for pattern in self.ignored):
            return None
        for targets, weight_format in self.groups:
            if any(target == _ALL or _matches(linear, target) for target in targets):
                return weight_format
        return None

    @property
    def said(self) -> str:
        """For people to read."""
        kinds = dict.fromkeys(
            f"{each.bits} bits" if each.kind != "float8" else "8-bit floats" for _, each in self.groups
        )
        return f"{self.method}, {' and '.join(kinds) or 'of keys and values alone'}"


def is_aside(name: str) -> bool:
    """Whether a quantized checkpoint's tensor is one that weights do not need."""
    return _SCALES_ASIDE.search(name) is not None


def weight_formats(given: Quantization) -> WeightFormats:
    """Raises ModelError, naming the field, for what is not served."""
    method = given.get("quant_method") or ""
    readers: dict[str, Callable[[Quantization], Groups]] = {
        "gptq": _gptq,
        "awq": _awq,
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "fbgemm_fp8": _fbgemm,
        "bitsandbytes": _bitsandbytes,
        "mxfp4": _mxfp4,
    }
    if method not in readers:
        raise _wrong("quant_method", f"{method or 'none'!r} is not served ({', '.join(readers)})")
    groups = readers[method](given)
    names = ("modules_to_not_convert", "ignored_layers", "ignore", "llm_int8_skip_modules")
    ignored = tuple(pattern for name in names for pattern in given.get(name) or ())  # type: ignore[attr-defined]
    for pattern in (*ignored, *(target for targets, _ in groups for target in targets)):
        _check_expression(pattern)
    return WeightFormats(method, tuple(groups), ignored)


def why_not(given: Mapping[str, Any]) -> str | None:
    """What keeps Quire from serving weights of a quantization_config, for people to read; None where nothing does."""
    if not given or given.get("quant_method") == "gguf":
        return None
    try:
        weight_formats(given)  # type: ignore[arg-type]
    except ModelError as error:
        return f"Quire does not serve these weights yet: {str(error).removeprefix('model: config.json: ')}"
    return None


def _gptq(given: Quantization) -> Groups:
    bits, group = _bits(given, (2, 3, 4, 8)), given.get("group_size")
    if given.get("dynamic"):
        raise _wrong("dynamic", "other settings for some linears are not served")
    version = given.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise _wrong("checkpoint_format", f"{version!r} is not served (gptq, gptq_v2)")
    return _all(WeightFormat("gptq", bits, _group(group, 128), zero_added=int(version == "gptq")))


def _awq(given: Quantization) -> Groups:
    bits, version = _bits(given, (4,)), (given.get("version") or "gemm").lower()
    if version != "gemm":
        raise _wrong("version", f"{version!r} is not served (gemm)")
    if given.get("zero_point") is False:
        raise _wrong("zero_point", "AWQ without zero points is not served")
    group = given.get("group_size")
    group = given.get("q_group_size") if group is None else group
    return _all(WeightFormat("awq", bits, _group(group, 128)))


def _fp8(given: Quantization) -> Groups:
    if (kind := given.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _wrong("fmt", f"{kind!r} is not served (e4m3)")
    block = given.get("weight_block_size")
    if block is None:
        return _all(WeightFormat("float8", strategy="tensor"))
    sides = (block[0], block[1])
    return _all(WeightFormat("float8", strategy="block", block=sides, scale_name="weight_scale_inv"))


def _fbgemm(given: Quantization) -> Groups:
    return _all(WeightFormat("float8"))


def _bitsandbytes(given: Quantization) -> Groups:
    if given.get("load_in_8bit"):
        return _all(WeightFormat("bnb8"))
    if given.get("load_in_4bit"):
        return _all(WeightFormat("bnb4", 4))
    raise _wrong("load_in_4bit", "expected true, or load_in_8bit")


def _mxfp4(given: Quantization) -> Groups:
    """gpt-oss' experts alone, as engine/worker/loading/stacked_experts.py names their tensors."""
    return [(("mlp.experts",), WeightFormat("float4", 4, 32, strategy="group"))]


def _compressed_tensors(given: Quantization) -> Groups:
    found: list[tuple[tuple[str, ...], WeightFormat]] = []
    for name, group in (given.get("config_groups") or {}).items():
        where = f"config_groups.{name}"
        weights, targets = group.get("weights"), group.get("targets") or []
        if weights is None:
            raise _wrong(f"{where}.weights", "is not there: only weights that are quantized are served")
        stored = group.get("format") or given.get("format") or ""
        found.append((tuple(targets), _compressed(where, stored, weights)))
    if not found and not given.get("kv_cache_scheme"):  # with one, only keys and values are quantized
        raise _wrong("config_groups", "is empty")
    return found


def _compressed(where: str, stored: str, weights: WeightsArgs) -> WeightFormat:
    bits, kind = weights.get("num_bits") or 0, weights.get("type") or "int"
    strategy, symmetric = weights.get("strategy") or "tensor", weights.get("symmetric") is not False
    group = weights.get("group_size") or 0
    if (kind, bits) == ("float", 4):
        if _FLOATS_OF_4.get(stored) != group:
            raise _wrong(
                f"{where}.weights", f"floats of 4 bits stored {stored!r} with groups of {group} are not served"
            )
        return WeightFormat("float4", 4, group, strategy="tensor_group" if stored.startswith("nv") else "group")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise _wrong(f"{where}.weights.strategy", f"{strategy!r} is not served")
    if strategy == "group" and group < 1:
        raise _wrong(f"{where}.weights.group_size", f"expected 1 or more, got {group}")
    block = weights.get("block_structure")
    if strategy == "block" and not isinstance(block, list):
        raise _wrong(f"{where}.weights.block_structure", "expected two numbers")
    sides = (block[0], block[1]) if isinstance(block, list) else (0, 0)
    if kind == "float":
        if bits != 8 or stored not in ("float-quantized", "naive-quantized"):
            raise _wrong(f"{where}.weights", f"floats of {bits} bits stored {stored!r} are not served")
        return WeightFormat("float8", 8, group, strategy=strategy, block=sides)
    if kind != "int" or strategy == "block":
        raise _wrong(f"{where}.weights", f"type {kind!r} with strategy {strategy!r} is not served")
    if stored == "pack-quantized" and 2 <= bits <= 8:
        return WeightFormat("packed", bits, group, symmetric=symmetric, strategy=strategy)
    if stored in ("int-quantized", "naive-quantized") and bits == 8:
        return WeightFormat("int8", 8, group, symmetric=symmetric, strategy=strategy)
    raise _wrong(f"{where}.weights.num_bits", f"{bits} bits stored {stored!r} are not served")


def _all(weight_format: WeightFormat) -> Groups:
    """One format for every linear."""
    return [((_ALL,), weight_format)]


def _bits(given: Quantization, served: tuple[int, ...]) -> int:
    bits = given.get("bits") or given.get("w_bit") or 4
    if bits not in served:
        raise _wrong("bits", f"{bits:g} are not served ({', '.join(map(str, served))})")
    return int(bits)


def _group(given: int | None, default: int) -> int:
    """-1 is one group for all inputs."""
    size = default if given is None else given
    return max(size, 0)


def _check_expression(pattern: str) -> None:
    """Raise ModelError for a regular expression that is none, or that might take for ever."""
    if not pattern.startswith(_EXPRESSION):
        return
    expression = pattern.removeprefix(_EXPRESSION)
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError):
        raise ModelError(f"{_FIELD}: {pattern[:80]!r} is no regular expression") from None
    if is_suspicious_regex(expression.removeprefix(".*").removesuffix("$").removesuffix(".*")):
        raise ModelError(f"{_FIELD}: {pattern[:80]!r} might take too long to match")


def _matches(linear: str, pattern: str) -> bool:
    """An expression matches the name in the checkpoint's files from the beginning; a name is the linear's, or a part of
    it from dot to dot, with or without the part that has the text model."""
    if pattern.startswith(_EXPRESSION):
        return re.match(pattern.removeprefix(_EXPRESSION), linear) is not None
    return f".{pattern.replace('language_model.', '')}." in f".{linear.replace('language_model.', '')}."


def _wrong(field: str, what: str) -> ModelError:
    return ModelError(f"{_FIELD}.{field}: {what}")
