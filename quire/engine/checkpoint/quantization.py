"""Weight formats of linears: GPTQ (Frantar et al., 2023), AWQ (Lin et al., 2024), compressed-tensors
(https://github.com/vllm-project/compressed-tensors), FP8 as in DeepSeek-V3 (2024) and AutoFP8, bitsandbytes 8-bit
(Dettmers et al., 2022) and 4-bit (Dettmers et al., 2023), MXFP4 (Rouhani et al., 2023) as in gpt-oss. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.engine.common.errors import ModelError
from quire.engine.families.base.schema.quantization_schema import QuantizationConfig, WeightQuantizationArgs
from quire.engine.text.tokenizer_safety import is_suspicious_regex

_FIELD_PREFIX = "model: config.json: quantization_config"
_REGEX_PREFIX = "re:"
_ALL_LINEARS = "Linear"
_FLOAT4_GROUP_SIZES = {"mxfp4-pack-quantized": 32, "nvfp4-pack-quantized": 16}
"""Inputs per scale."""
_UNNEEDED_SCALES = re.compile(
    r"\.(?:input_scale|input_scale_inv|input_zero_point|input_global_scale|input_scale_ub|activation_scale"
    r"|output_scale|output_zero_point|[kvq]_scale|[kv]_zero_point|prob_output_scale|weight_format|weight_g_idx_static)$"
)
"""Scales of activations and KV cache. Kernels compute activation scales per row; the KV cache has the served dtype."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    kind: str
    """gptq, awq, packed (integers of compressed-tensors), int8, float8, float4, bnb8 or bnb4."""
    bits: int = 8
    group_size: int = 0
    """Inputs per scale; 0: all inputs."""
    zero_point_offset: int = 0
    """Added to stored zero points: GPTQ's first version stores one less."""
    is_symmetric: bool = True
    """True: there are no zero points."""
    scale_strategy: str = "channel"
    """What an 8-bit scale covers: tensor, channel (an output), group or block. tensor_group: 4-bit groups, with one
    more scale.
    """
    block_shape: tuple[int, int] = (0, 0)
    """(outputs, inputs), for strategy block."""
    scale_name: str = "weight_scale"


FormatGroups = Sequence[tuple[tuple[str, ...], WeightFormat]]
"""Targets and formats; the first match counts."""


@dataclass(frozen=True, slots=True)
class WeightFormatRules:
    method: str
    format_groups: FormatGroups
    ignored_patterns: tuple[str, ...]

    def find_format(self, linear: str) -> WeightFormat | None:
        """None: unquantized."""
        if any(_matches_pattern(linear, pattern) for pattern in self.ignored_patterns):
            return None
        for targets, weight_format in self.format_groups:
            if any(target == _ALL_LINEARS or _matches_pattern(linear, target) for target in targets):
                return weight_format
        return None

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
    }
    if method not in readers:
        raise _field_error("quant_method", f"{method or 'none'!r} is not served ({', '.join(readers)})")
    groups = readers[method](config)
    names = ("modules_to_not_convert", "ignored_layers", "ignore", "llm_int8_skip_modules")
    ignored = tuple(pattern for name in names for pattern in config.get(name) or ())  # type: ignore[attr-defined]
    for pattern in (*ignored, *(target for targets, _ in groups for target in targets)):
        _check_pattern(pattern)
    return WeightFormatRules(method, tuple(groups), ignored)


def explain_unsupported_quantization(config: Mapping[str, Any], *, is_encoder: bool) -> str | None:
    """None if supported."""
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
    """gpt-oss' experts only, named as in engine/worker/loading/stacked_experts.py."""
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
        if bits != 8 or storage_format not in ("float-quantized", "naive-quantized"):
            raise _field_error(
                f"{field_path}.weights", f"floats of {bits} bits stored {storage_format!r} are not served"
            )
        return WeightFormat("float8", 8, group_size, scale_strategy=strategy, block_shape=block_shape)
    if kind != "int" or strategy == "block":
        raise _field_error(f"{field_path}.weights", f"type {kind!r} with strategy {strategy!r} is not served")
    if storage_format == "pack-quantized" and 2 <= bits <= 8:
        return WeightFormat("packed", bits, group_size, is_symmetric=symmetric, scale_strategy=strategy)
    if storage_format in ("int-quantized", "naive-quantized") and bits == 8:
        return WeightFormat("int8", 8, group_size, is_symmetric=symmetric, scale_strategy=strategy)
    raise _field_error(f"{field_path}.weights.num_bits", f"{bits} bits stored {storage_format!r} are not served")


def _format_all_linears(weight_format: WeightFormat) -> FormatGroups:
    return [((_ALL_LINEARS,), weight_format)]


def _parse_bits(config: QuantizationConfig, supported_bits: tuple[int, ...]) -> int:
    bits = config.get("bits") or config.get("w_bit") or 4
    if bits not in supported_bits:
        raise _field_error("bits", f"{bits:g} are not served ({', '.join(map(str, supported_bits))})")
    return int(bits)


def _parse_group_size(group_size: int | None, default: int) -> int:
    """-1: one group of all inputs."""
    size = default if group_size is None else group_size
    return max(size, 0)


def _check_pattern(pattern: str) -> None:
    """Raise ModelError for an invalid or possibly slow regular expression."""
    if not pattern.startswith(_REGEX_PREFIX):
        return
    expression = pattern.removeprefix(_REGEX_PREFIX)
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError):
        raise ModelError(f"{_FIELD_PREFIX}: {pattern[:80]!r} is not a regular expression") from None
    if is_suspicious_regex(expression.removeprefix(".*").removesuffix("$").removesuffix(".*")):
        raise ModelError(f"{_FIELD_PREFIX}: {pattern[:80]!r} could take too long to match")


def _matches_pattern(linear: str, pattern: str) -> bool:
    """A regular expression matches the checkpoint's name from its start. A plain name matches parts between dots,
    without the text model's prefix.
    """
    if pattern.startswith(_REGEX_PREFIX):
        return re.match(pattern.removeprefix(_REGEX_PREFIX), linear) is not None
    return f".{pattern.replace('language_model.', '')}." in f".{linear.replace('language_model.', '')}."


def _field_error(field: str, problem: str) -> ModelError:
    return ModelError(f"{_FIELD_PREFIX}.{field}: {problem}")
