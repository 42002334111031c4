"""Weight formats of linears: GPTQ (Frantar et al., 2023), AWQ (Lin et al., 2024), compressed-tensors
(https://github.com/vllm-project/compressed-tensors), FP8 as in DeepSeek-V3 (2024) and AutoFP8, bitsandbytes 8-bit
(Dettmers et al., 2022) and 4-bit (Dettmers et al., 2023), MXFP4 and MXFP8 (Rouhani et al., 2023), ModelOpt
(https://github.com/NVIDIA/Model-Optimizer).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from quire.engine.common.errors import ModelError
from quire.engine.families.base.schema.quantization_schema import (
    ModelOptLayer,
    QuantizationConfig,
    WeightQuantizationArgs,
)
from quire.engine.text.tokenizer_safety import is_suspicious_regex

_FIELD_PREFIX = "model: config.json: quantization_config"
_REGEX_PREFIX = "re:"
_ALL_LINEARS = "Linear"
_DOT = re.compile(r"\.")
HF_QUANT_CONFIG_FILE = "hf_quant_config.json"
"""ModelOpt writes this file next to config.json."""
_FLOAT4_GROUP_SIZES = {"mxfp4-pack-quantized": 32, "nvfp4-pack-quantized": 16}
_UNNEEDED_SCALES = re.compile(
    r"\.(?:input_scale|input_scale_inv|input_zero_point|input_global_scale|input_scale_ub|activation_scale"
    r"|output_scale|output_zero_point|[kvq]_scale|[kv]_zero_point|prob_output_scale|weight_format|weight_g_idx_static)$"
)
"""Kernels compute activation scales per row, and ignore stored scales of the KV cache."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    kind: str
    """gptq, awq, packed (integers of compressed-tensors), int8, float8, float4, bnb8 or bnb4."""
    bits: int = 8
    group_size: int = 0
    """Inputs per scale; 0 for all."""
    zero_point_offset: int = 0
    """Added to stored zero points: 1 for GPTQ's first version, which stores them minus one."""
    is_symmetric: bool = True
    scale_strategy: str = "channel"
    """What an 8-bit scale covers: tensor, channel (an output), group or block. tensor_group means 4-bit groups, with
    another scale per tensor.
    """
    block_shape: tuple[int, int] = (0, 0)
    """(outputs, inputs) of a block."""
    scale_name: str = "weight_scale"
    has_exponent_scales: bool = False
    """Scales are powers of two, stored as exponents (e8m0)."""
    is_modelopt: bool = False
    """NVFP4's global scale then is a factor, not a divisor."""

    @property
    def stored_bits(self) -> float:
        if self.group_size < 1:
            return self.bits
        if self.kind == "float4" or self.has_exponent_scales:
            return self.bits + 8 / self.group_size
        return self.bits + (16 + self.bits) / self.group_size if self.bits < 8 else self.bits


FormatGroups = Sequence[tuple[tuple[str, ...], WeightFormat]]
_MXFP8 = WeightFormat("float8", 8, 32, scale_strategy="group", has_exponent_scales=True)
_NVFP4 = WeightFormat("float4", 4, 16, scale_strategy="tensor_group", is_modelopt=True)
_MODELOPT_FORMATS = {
    "FP8": WeightFormat("float8", scale_strategy="tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat("float8", scale_strategy="channel"),
    "FP8_PB_WO": WeightFormat("float8", scale_strategy="block", block_shape=(128, 128)),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "MXFP8": _MXFP8,
}


class ModulePatterns:
    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises ModelError for an invalid or possibly slow regular expression."""
        distinct = tuple(dict.fromkeys(patterns))
        self._expressions = [_compile_expression(each) for each in distinct if each.startswith(_REGEX_PREFIX)]
        names = {_text_module_name(each) for each in distinct if not each.startswith(_REGEX_PREFIX)}
        wildcards = sorted(name for name in names if "*" in name)
        self._wildcards = re.compile("|".join(map(fnmatch.translate, wildcards))) if wildcards else None
        self._names = names.difference(wildcards)
        self._count = len(distinct)

    def __len__(self) -> int:
        return self._count

    def matches(self, linear: str) -> bool:
        """A regular expression must match from the start of the checkpoint's name. Other patterns ignore the text
        model's prefix: a wildcard must match the whole name, and a plain name must equal one or more adjacent parts
        between dots.
        """
        if any(expression.match(linear) for expression in self._expressions):
            return True
        name = _text_module_name(linear)
        if self._wildcards is not None and self._wildcards.match(name):
            return True
        dots = [-1, *(match.start() for match in _DOT.finditer(name)), len(name)] if self._names else []
        return any(name[first + 1 : last] in self._names for first, last in combinations(dots, 2))


@dataclass(frozen=True, slots=True)
class WeightFormatRules:
    method: str
    format_groups: Sequence[tuple[ModulePatterns | None, WeightFormat]]
    """Targets (None for all linears) and their formats. The first match counts."""
    ignored: ModulePatterns

    def find_format(self, linear: str) -> WeightFormat | None:
        if self.ignored.matches(linear):
            return None
        matching = (each for targets, each in self.format_groups if targets is None or targets.matches(linear))
        return next(matching, None)

    @property
    def trusts_stored_dtypes(self) -> bool:
        """In files of ModelOpt before 0.39, weights with 16 or 32 bits are unquantized even if `ignored` does not match
        them.
        """
        return self.method == "modelopt"

    @property
    def mean_stored_bits(self) -> float:
        """Per quantized weight; 0 without any. Assumes linears of equal size."""
        counts = [1 if targets is None else len(targets) for targets, _ in self.format_groups]
        bits = sum(count * each.stored_bits for count, (_, each) in zip(counts, self.format_groups, strict=True))
        return bits / max(sum(counts), 1)

    @property
    def format_summary(self) -> str:
        kinds = dict.fromkeys(
            f"{each.bits} bits" if each.kind != "float8" else "8-bit floats" for _, each in self.format_groups
        )
        return f"{self.method}, {' and '.join(kinds) or 'of keys and values only'}"


def is_unneeded_scale(name: str) -> bool:
    return _UNNEEDED_SCALES.search(name) is not None


def parse_quantization_config(config: QuantizationConfig) -> WeightFormatRules:
    """Raises ModelError naming an unsupported field."""
    method = config.get("quant_method") or ""
    readers: dict[str, Callable[[QuantizationConfig], FormatGroups]] = {
        "gptq": _parse_gptq,
        "awq": _parse_awq,
        "compressed-tensors": _parse_compressed_tensors,
        "fp8": _parse_fp8,
        "fbgemm_fp8": _parse_fbgemm,
        "bitsandbytes": _parse_bitsandbytes,
        "mxfp4": _parse_mxfp4,
        "modelopt": _parse_modelopt,
    }
    if method not in readers:
        raise _field_error("quant_method", f"{method or 'none'!r} is not served ({', '.join(readers)})")
    groups = readers[method](config)
    names = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules")
    ignored = tuple(pattern for name in names for pattern in config.get(name) or ())  # type: ignore[attr-defined]
    format_groups = [
        (None if _ALL_LINEARS in targets else ModulePatterns(targets), weight_format)
        for targets, weight_format in groups
    ]
    return WeightFormatRules(method, format_groups, ModulePatterns(ignored))


def merge_modelopt_config(content: dict[str, Any], hf_quant_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fields of `content` override `hf_quant_config`. Removes a quantization_config that quantizes nothing. Raises
    ModelError.
    """
    stored = content.get("quantization_config") or {}
    if not isinstance(stored, dict):
        return content
    method, beside = stored.get("quant_method"), (hf_quant_config or {}).get("quantization")
    is_unnamed = method is None and (beside is not None or stored.get("quant_library") == "modelopt")
    if not is_unnamed and not str(method).startswith("modelopt"):
        return content
    sources = [
        (HF_QUANT_CONFIG_FILE, beside or {}),
        ("config.json: quantization_config", stored.get("quantization") or {}),
        ("config.json", stored),
    ]
    merged = dict[str, Any]()
    for file, source in sources:
        if not isinstance(source, dict):
            raise ModelError(f"model: {file}: quantization: expected object")
        merged |= source
    if not any(merged.get(name) for name in ("quant_algo", "kv_cache_quant_algo", "kv_cache_scheme")):
        return {name: value for name, value in content.items() if name != "quantization_config"}
    # Both removed fields repeat quant_algo and quantized_layers.
    merged = {name: value for name, value in merged.items() if name not in ("quantization", "config_groups")}
    return content | {"quantization_config": merged | {"quant_method": "modelopt"}}


def explain_unsupported_quantization(config: Mapping[str, Any], *, is_encoder: bool) -> str | None:
    if config and is_encoder:
        return "Quire does not serve quantized weights of an encoder"
    if not config or config.get("quant_method") == "gguf":
        return None
    try:
        parse_quantization_config(config)  # type: ignore[arg-type]
    except ModelError as error:
        return f"Quire does not serve these weights yet: {str(error).removeprefix('model: config.json: ')}"
    return None


def _parse_gptq(config: QuantizationConfig) -> FormatGroups:
    bits, group_size = _parse_bits(config, (2, 3, 4, 8)), config.get("group_size")
    if config.get("dynamic"):
        raise _field_error("dynamic", "other settings for some linears are not served")
    version = config.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise _field_error("checkpoint_format", f"{version!r} is not served (gptq, gptq_v2)")
    return _format_all_linears(
        WeightFormat("gptq", bits, _parse_group_size(group_size, 128), zero_point_offset=int(version == "gptq"))
    )


def _parse_awq(config: QuantizationConfig) -> FormatGroups:
    bits, version = _parse_bits(config, (4,)), (config.get("version") or "gemm").lower()
    if version != "gemm":
        raise _field_error("version", f"{version!r} is not served (gemm)")
    if config.get("zero_point") is False:
        raise _field_error("zero_point", "AWQ without zero points is not served")
    group_size = config.get("group_size")
    group_size = config.get("q_group_size") if group_size is None else group_size
    return _format_all_linears(WeightFormat("awq", bits, _parse_group_size(group_size, 128)))


def _parse_fp8(config: QuantizationConfig) -> FormatGroups:
    if (kind := config.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _field_error("fmt", f"{kind!r} is not served (e4m3)")
    block_size = config.get("weight_block_size")
    if block_size is None:
        return _format_all_linears(WeightFormat("float8", scale_strategy="tensor"))
    block_shape = (block_size[0], block_size[1])
    return _format_all_linears(
        WeightFormat("float8", scale_strategy="block", block_shape=block_shape, scale_name="weight_scale_inv")
    )


def _parse_fbgemm(config: QuantizationConfig) -> FormatGroups:
    return _format_all_linears(WeightFormat("float8"))


def _parse_bitsandbytes(config: QuantizationConfig) -> FormatGroups:
    if config.get("load_in_8bit"):
        return _format_all_linears(WeightFormat("bnb8"))
    if config.get("load_in_4bit"):
        return _format_all_linears(WeightFormat("bnb4", 4))
    raise _field_error("load_in_4bit", "expected true, or load_in_8bit")


def _parse_mxfp4(config: QuantizationConfig) -> FormatGroups:
    """Accepts only gpt-oss's experts."""
    return [(("mlp.experts",), WeightFormat("float4", 4, 32, scale_strategy="group"))]


def _parse_compressed_tensors(config: QuantizationConfig) -> FormatGroups:
    groups: list[tuple[tuple[str, ...], WeightFormat]] = []
    for name, group in (config.get("config_groups") or {}).items():
        field_path = f"config_groups.{name}"
        weights, targets = group.get("weights"), group.get("targets") or []
        if weights is None:
            raise _field_error(f"{field_path}.weights", "is missing: only quantized weights are served")
        storage_format = group.get("format") or config.get("format") or ""
        groups.append((tuple(targets), _parse_compressed_group(field_path, storage_format, weights)))
    if not groups and not config.get("kv_cache_scheme"):  # else only the KV cache is quantized
        raise _field_error("config_groups", "is empty")
    return groups


def _parse_compressed_group(field_path: str, storage_format: str, weights: WeightQuantizationArgs) -> WeightFormat:
    bits, kind = weights.get("num_bits") or 0, weights.get("type") or "int"
    strategy, symmetric = weights.get("strategy") or "tensor", weights.get("symmetric") is not False
    group_size = weights.get("group_size") or 0
    if (kind, bits) == ("float", 4):
        if _FLOAT4_GROUP_SIZES.get(storage_format) != group_size:
            raise _field_error(
                f"{field_path}.weights",
                f"floats of 4 bits stored {storage_format!r} with groups of {group_size} are not served",
            )
        return WeightFormat(
            "float4", 4, group_size, scale_strategy="tensor_group" if storage_format.startswith("nv") else "group"
        )
    if strategy not in ("tensor", "channel", "group", "block"):
        raise _field_error(f"{field_path}.weights.strategy", f"{strategy!r} is not served")
    if strategy == "group" and group_size < 1:
        raise _field_error(f"{field_path}.weights.group_size", f"expected 1 or more, got {group_size}")
    block_structure = weights.get("block_structure")
    if strategy == "block" and not isinstance(block_structure, list):
        raise _field_error(f"{field_path}.weights.block_structure", "expected two numbers")
    block_shape = (block_structure[0], block_structure[1]) if isinstance(block_structure, list) else (0, 0)
    if kind == "float":
        weight_format = WeightFormat("float8", bits, group_size, scale_strategy=strategy, block_shape=block_shape)
        return _check_compressed_float8(field_path, storage_format, weight_format)
    if kind != "int" or strategy == "block":
        raise _field_error(f"{field_path}.weights", f"type {kind!r} with strategy {strategy!r} is not served")
    if storage_format == "pack-quantized" and 2 <= bits <= 8:
        return WeightFormat("packed", bits, group_size, is_symmetric=symmetric, scale_strategy=strategy)
    if storage_format in ("int-quantized", "naive-quantized") and bits == 8:
        return WeightFormat("int8", 8, group_size, is_symmetric=symmetric, scale_strategy=strategy)
    raise _field_error(f"{field_path}.weights.num_bits", f"{bits} bits stored {storage_format!r} are not served")


def _parse_modelopt(config: QuantizationConfig) -> FormatGroups:
    kv_algo = _read_modelopt_kv_algo(config)
    algo = (config.get("quant_algo") or "").upper()
    if algo != "MIXED_PRECISION":
        if not algo and kv_algo:  # only the KV cache is quantized
            return []
        return _format_all_linears(_find_modelopt_format("", config))
    layers = config.get("quantized_layers")
    if not layers:
        raise _field_error("quantized_layers", "is empty, and MIXED_PRECISION needs it")
    targets_by_format = dict[WeightFormat, list[str]]()
    for name, layer in layers.items():
        weight_format = _find_modelopt_format(f"quantized_layers.{name}.", layer)
        targets_by_format.setdefault(weight_format, []).append(name)
    return [(tuple(targets), weight_format) for weight_format, targets in targets_by_format.items()]


def _read_modelopt_kv_algo(config: QuantizationConfig) -> str:
    scheme = config.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        kind = scheme.get("type"), scheme.get("num_bits")
        scheme = "FP8" if kind == ("float", 8) else " ".join(map(str, kind))
    for field, algo in (("kv_cache_quant_algo", config.get("kv_cache_quant_algo")), ("kv_cache_scheme", scheme)):
        if algo and algo.upper() != "FP8":
            raise _field_error(field, f"{algo[:80]!r} is not served (FP8)")
        if algo:
            return "FP8"
    return ""


def _find_modelopt_format(prefix: str, layer: ModelOptLayer | QuantizationConfig) -> WeightFormat:
    algo, group_size = layer.get("quant_algo") or "", layer.get("group_size")
    weight_format = _MODELOPT_FORMATS.get(algo.upper())
    if weight_format is None:
        raise _field_error(f"{prefix}quant_algo", f"{algo or 'none'!r} is not served ({', '.join(_MODELOPT_FORMATS)})")
    expected = weight_format.group_size or weight_format.block_shape[1]
    if expected and group_size and group_size != expected:
        raise _field_error(f"{prefix}group_size", f"{group_size} is not served with {algo} ({expected})")
    return weight_format


def _check_compressed_float8(field_path: str, storage_format: str, weight_format: WeightFormat) -> WeightFormat:
    if weight_format.bits != 8 or storage_format not in ("float-quantized", "naive-quantized", "mxfp8-quantized"):
        raise _field_error(
            f"{field_path}.weights", f"floats of {weight_format.bits} bits stored {storage_format!r} are not served"
        )
    if storage_format != "mxfp8-quantized":
        return weight_format
    if weight_format.group_size != _MXFP8.group_size:
        raise _field_error(
            f"{field_path}.weights.group_size",
            f"{weight_format.group_size} is not served with {storage_format} ({_MXFP8.group_size})",
        )
    return _MXFP8


def _format_all_linears(weight_format: WeightFormat) -> FormatGroups:
    return [((_ALL_LINEARS,), weight_format)]


def _parse_bits(config: QuantizationConfig, supported_bits: tuple[int, ...]) -> int:
    bits = config.get("bits") or config.get("w_bit") or 4
    if bits not in supported_bits:
        raise _field_error("bits", f"{bits:g} are not served ({', '.join(map(str, supported_bits))})")
    return int(bits)


def _parse_group_size(group_size: int | None, default: int) -> int:
    """0 means one group of all inputs, for which files have -1."""
    size = default if group_size is None else group_size
    return max(size, 0)


def _compile_expression(pattern: str) -> re.Pattern[str]:
    expression = pattern.removeprefix(_REGEX_PREFIX)
    try:
        compiled = re.compile(expression)
    except (re.error, RecursionError, OverflowError):
        raise ModelError(f"{_FIELD_PREFIX}: {pattern[:80]!r} is not a regular expression") from None
    if is_suspicious_regex(expression.removeprefix(".*").removesuffix("$").removesuffix(".*")):
        raise ModelError(f"{_FIELD_PREFIX}: {pattern[:80]!r} could take too long to match")
    return compiled


def _text_module_name(module: str) -> str:
    return module.replace("language_model.", "")


def _field_error(field: str, problem: str) -> ModelError:
    return ModelError(f"{_FIELD_PREFIX}.{field}: {problem}")
