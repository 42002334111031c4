"""ModelOpt's checkpoints, and MXFP8, against float64 transformers with the weights that they represent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire.engine.checkpoint.model_resolver import read_model_config, read_raw_config
from quire.engine.checkpoint.quantization import parse_quantization_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, ModelError
from quire.engine.engine_core import EngineCore
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.kv_quantization import KVScales
from tests import quantized_models as q
from tests.adapters import merge, save_adapter
from tests.engine.harness import request, run
from tests.engine.lora.test_parity import asked, check, spool
from tests.tiny_models import VOCAB, save_tiny_model

MISSING = CpuBackend().missing_reason
compiled = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
PROMPT = [3 + (7 * j + j * j) % (VOCAB - 3) for j in range(40)]
PACKERS: dict[str, q.Packer] = {
    **{algo: q.modelopt_float8(algo) for algo in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")},
    **{"NVFP4": q.modelopt_nvfp4, "W4A16_NVFP4": q.modelopt_nvfp4, "MXFP8": q.mxfp8},
}
Q = "model.layers.0.self_attn.q_proj"


def modelopt(algo: str | None, **fields: Any) -> dict[str, Any]:
    """As in config.json."""
    groups = {"group_0": {"weights": {"num_bits": 8, "type": "float", "dynamic": False}, "targets": ["Linear"]}}
    producer = {"name": "modelopt", "version": "0.41.0"}
    return {
        **{"quant_method": "modelopt", "quant_algo": algo, "config_groups": groups, "ignore": ["lm_head"]},
        **{"producer": producer, **fields},
    }


def logprobs(path: Path, **settings: Any) -> list[float]:
    """Of the prompt."""
    config = EngineConfig(model=str(path), **{"num_kv_blocks": 64, "dtype": "float32"} | settings)
    answer = run(EngineCore(config), [request("a", PROMPT, max_tokens=1, prompt_logprobs=0)])["a"]
    return [each.logprob for each in answer.prompt_logprobs or () if each is not None]


def transformers_logprobs(path: Path) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    with torch.inference_mode():
        rows = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return rows[:-1].gather(1, torch.tensor(PROMPT)[1:, None])[:, 0].tolist()


def save(tmp_path: Path, algo: str, config: dict[str, Any] | None = None, family: str = "llama", **shape: Any) -> Path:
    """Beside `dense`, which has the represented weights."""
    dense = save_tiny_model(tmp_path / "dense", family, **{"num_hidden_layers": 2} | shape)
    config = modelopt(algo) if config is None else config
    return q.quantize_checkpoint(dense, tmp_path / "packed", PACKERS[algo], config, ("lm_head", ".gate."))


def write_config(path: Path, **fields: Any) -> None:
    content = json.loads((path / "config.json").read_text()) | fields
    present = {name: value for name, value in content.items() if value is not None}
    (path / "config.json").write_text(json.dumps(present))


@pytest.mark.parametrize("algo", PACKERS)
def test_modelopt_logprobs_equal_float64_transformers(algo: str, tmp_path: Path) -> None:
    path = save(tmp_path, algo)
    expected = transformers_logprobs(tmp_path / "dense")
    assert logprobs(path, attention_backend="reference") == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("algo", ["NVFP4", "FP8", "MXFP8"])
def test_modelopt_experts_equal_float64_transformers(algo: str, tmp_path: Path) -> None:
    path = save(tmp_path, algo, modelopt(algo, ignore=["lm_head", "*.gate"]), "mixtral")
    names = load_file(path / "model.safetensors").keys()
    assert sum(name.endswith("experts.3.w1.weight_scale") for name in names) == 2
    expected = transformers_logprobs(tmp_path / "dense")
    assert logprobs(path, attention_backend="reference") == pytest.approx(expected, abs=5e-5)


@compiled
@pytest.mark.parametrize("algo", ["NVFP4", "FP8_PB_WO", "MXFP8"])
def test_modelopt_in_compiled_kernels_is_close_to_transformers(algo: str, tmp_path: Path) -> None:
    """They round activations: to 8 or 16 bits, or to bfloat16 for float8."""
    path = save(tmp_path, algo)
    assert logprobs(path) == pytest.approx(transformers_logprobs(tmp_path / "dense"), abs=0.05)


def test_compressed_tensors_mxfp8_equals_modelopt_mxfp8(tmp_path: Path) -> None:
    config = q.compressed_config("mxfp8-quantized", 8, 32, kind="float", scale_dtype="torch.uint8")
    path = save(tmp_path, "MXFP8", config)
    compressed = logprobs(path)
    write_config(path, quantization_config=modelopt("MXFP8"))
    assert logprobs(path) == compressed


def test_fused_modelopt_linears_are_split(tmp_path: Path) -> None:
    path = save(tmp_path, "NVFP4", family="phi3")
    expected = transformers_logprobs(tmp_path / "dense")
    assert logprobs(path, attention_backend="reference") == pytest.approx(expected, abs=5e-5)


def test_mixed_precision_formats_equal_float64_transformers(tmp_path: Path) -> None:
    """Parts of one fused product differ; a layer's MLP is named as a whole; what is not named is unquantized."""
    dense = save_tiny_model(tmp_path / "dense", "llama", num_hidden_layers=2)
    algos = {Q: "NVFP4", Q.replace("q_", "k_"): "FP8", "model.layers.1.mlp": "MXFP8"}
    algos |= {f"model.layers.1.self_attn.{part}_proj": "FP8_PER_CHANNEL_PER_TOKEN" for part in "qkv"}
    layers = {name: {"quant_algo": algo, "group_size": 16 if algo == "NVFP4" else 0} for name, algo in algos.items()}

    def pack_of(linear: str) -> q.Packer | None:
        algo = algos.get(linear) or algos.get(linear.rpartition(".")[0])
        return algo and PACKERS[algo]

    q.quantize_linears(dense, tmp_path / "packed", pack_of)
    write_config(tmp_path / "packed", quantization_config=modelopt("MIXED_PRECISION", quantized_layers=layers))
    expected = transformers_logprobs(dense)
    assert logprobs(tmp_path / "packed", attention_backend="reference") == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("patterns", "is_unquantized"),
    [
        (["lm_head", "model.layers.0*"], lambda linear: "layers.0." in linear),
        (["model.layers.*.self_attn.o_proj"], lambda linear: "o_proj" in linear),
        (["model.layers.1.mlp", "*q_proj*"], lambda linear: "layers.1.mlp" in linear or "q_proj" in linear),
        ([], lambda linear: "o_proj" in linear),  # as before ModelOpt 0.39
    ],
)
def test_excluded_modules_are_unquantized(
    patterns: list[str], is_unquantized: Callable[[str], bool], tmp_path: Path
) -> None:
    dense = save_tiny_model(tmp_path / "dense", "llama", num_hidden_layers=2)
    q.quantize_linears(
        dense,
        tmp_path / "packed",
        lambda linear: None if linear == "lm_head" or is_unquantized(linear) else q.modelopt_nvfp4,
    )
    write_config(tmp_path / "packed", quantization_config=modelopt("NVFP4", ignore=patterns))
    expected = logprobs(dense, attention_backend="reference")
    assert logprobs(tmp_path / "packed", attention_backend="reference") == pytest.approx(expected, abs=1e-5)
    if patterns:
        rules = parse_quantization_config(read_model_config(tmp_path / "packed").raw["quantization_config"])
        linears = [f"model.layers.{i}.{name}_proj" for i in (0, 1) for name in ("self_attn.q", "self_attn.o", "mlp.up")]
        assert [rules.find_format(each) is None for each in linears] == [is_unquantized(each) for each in linears]


@pytest.mark.parametrize(
    "in_config_json",
    [
        None,
        {"quant_library": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        {"quant_method": "modelopt_fp4", "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
    ],
    ids=["absent", "without-method", "nested"],
)
def test_hf_quant_config_completes_config_json(in_config_json: dict[str, Any] | None, tmp_path: Path) -> None:
    path = save(tmp_path, "NVFP4")
    expected = logprobs(path)
    write_config(path, quantization_config=in_config_json)
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}
    beside = {"producer": {"name": "modelopt"}, "quantization": quantization | {"exclude_modules": ["lm_head"]}}
    (path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert logprobs(path, quantization="modelopt") == expected
    assert read_raw_config(str(path))[0]["quantization_config"]["kv_cache_quant_algo"] == "FP8"


def test_hf_quant_config_leaves_other_methods(tmp_path: Path) -> None:
    dense = save_tiny_model(tmp_path / "dense", "llama", num_hidden_layers=1)
    config = q.compressed_config("int-quantized", 8, 0, strategy="channel")
    path = q.quantize_checkpoint(dense, tmp_path / "packed", q.int8("channel"), config)
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert read_raw_config(str(path))[0]["quantization_config"] == config


def test_unquantized_modelopt_export_is_served_as_stored(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "m", "llama", num_hidden_layers=1)
    expected = logprobs(path)
    write_config(path, quantization_config=modelopt(None))
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": None}}))
    assert logprobs(path) == expected
    assert "quantization_config" not in read_raw_config(str(path))[0]


@pytest.mark.parametrize("algo", ["NVFP4", None], ids=["weights-too", "only"])
def test_modelopt_kv_scales_apply_to_layers(algo: str | None, tmp_path: Path) -> None:
    path = save(tmp_path, "NVFP4") if algo else save_tiny_model(tmp_path / "packed", "llama", num_hidden_layers=2)
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    write_config(path, quantization_config=modelopt(algo, kv_cache_scheme=scheme))
    attention = "model.layers.1.self_attn"
    scales = {f"{attention}.k_proj.k_scale": torch.tensor(0.5), f"{attention}.v_proj.v_scale": torch.tensor(2.0)}
    save_file(load_file(path / "model.safetensors") | scales, path / "model.safetensors")
    engine = EngineCore(EngineConfig(model=str(path), num_kv_blocks=16, kv_cache_dtype="fp8"))
    layers = [layer[0].rope_params.kv_scales for layer in engine.executor._model._layers]
    assert layers == [KVScales(), KVScales(0.5, 2.0)]
    assert run(engine, [request("a", PROMPT, max_tokens=4)])["a"].ids


def test_lora_on_modelopt_equals_merged_transformers(tmp_path: Path) -> None:
    path = save(tmp_path, "NVFP4")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float64)
    folder = save_adapter(tmp_path / "adapter", base, 8)
    adapter = spool(tmp_path / "spool", path).add_adapter("adapter", str(folder))
    config = EngineConfig(
        model=str(path), dtype="float32", attention_backend="reference", num_kv_blocks=64, enable_lora=True
    )
    answer = run(EngineCore(config), [asked("a", PROMPT, adapter)])["a"]
    check(merge(base, folder), PROMPT, answer)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (modelopt("NVFP4_AWQ"), "quantization_config.quant_algo: 'NVFP4_AWQ' is not served (FP8, "),
        (
            modelopt("MIXED_PRECISION", quantized_layers={Q: {"quant_algo": None}}),
            f"quantized_layers.{Q}.quant_algo: 'none' is not served",
        ),
        (modelopt("NVFP4", group_size=32), "group_size: 32 is not served with NVFP4 (16)"),
        (modelopt("FP8_PB_WO", group_size=64), "group_size: 64 is not served with FP8_PB_WO (128)"),
        (modelopt("MIXED_PRECISION"), "quantized_layers: is empty"),
        (
            modelopt("MIXED_PRECISION", quantized_layers={Q: {"quant_algo": "W8A16"}}),
            f"quantized_layers.{Q}.quant_algo: 'W8A16' is not served",
        ),
        (modelopt("MIXED_PRECISION", quantized_layers={Q: "FP8"}), "quantized_layers"),
        (modelopt("FP8", kv_cache_scheme="NVFP4"), "kv_cache_scheme: 'NVFP4' is not served (FP8)"),
        (modelopt("FP8", kv_cache_scheme={"type": "int", "num_bits": 8}), "kv_cache_scheme: 'int 8' is not served"),
        (modelopt("FP8", kv_cache_quant_algo="INT8"), "kv_cache_quant_algo: 'INT8' is not served (FP8)"),
        (modelopt("FP8") | {"quantization": "FP8"}, "quantization: expected object"),
        (q.compressed_config("mxfp8-quantized", 8, 16, kind="float"), "group_size: 16 is not served with mxfp8-"),
    ],
)
def test_unsupported_modelopt_field_is_named_in_error(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "m", "llama", num_hidden_layers=1)
    write_config(path, quantization_config=config)
    with pytest.raises(ModelError) as caught:
        read_model_config(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("algo", "alter", "says"),
    [
        ("NVFP4", lambda t: t.pop(f"{Q}.weight_scale_2"), f"lack {Q}.weight_scale_2"),
        ("NVFP4", lambda t: t.update({f"{Q}.weight_scale_2": torch.ones(2)}), f"{Q}.weight_scale_2 has shape [2]"),
        ("NVFP4", lambda t: t.update({f"{Q}.pre_quant_scale": torch.ones(64)}), f"lacks: {Q}.pre_quant_scale"),
        ("NVFP4", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].view(torch.int8)}), f"{Q}.weight is stored as"),
        ("MXFP8", lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"].float()}), f"{Q}.weight_scale is"),
        ("FP8_PB_WO", lambda t: t.update({f"{Q}.weight_scale": torch.ones(2, 1, 1, 1)}), f"{Q}.weight_scale has"),
    ],
)
def test_invalid_modelopt_tensor_is_named_in_error(algo: str, alter: Any, says: str, tmp_path: Path) -> None:
    path = save(tmp_path, algo, num_hidden_layers=1)
    tensors = load_file(path / "model.safetensors")
    alter(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        logprobs(path)
    assert says in str(caught.value)


@pytest.mark.parametrize(("name", "is_accepted"), [("modelopt_fp4", True), ("awq", False), ("int8", False)])
def test_quantization_setting_is_checked_against_modelopt(name: str, is_accepted: bool, tmp_path: Path) -> None:
    path = save(tmp_path, "NVFP4", num_hidden_layers=1)
    if is_accepted:
        assert logprobs(path, quantization=name)
        return
    with pytest.raises(ConfigError, match="weights are modelopt"):
        logprobs(path, quantization=name)


@pytest.mark.parametrize(
    ("modelopt_config", "compressed_config"),
    [
        (
            modelopt("NVFP4"),
            q.compressed_config("nvfp4-pack-quantized", 4, 16, kind="float", strategy="tensor_group"),
        ),
        (modelopt("FP8"), q.compressed_config("float-quantized", 8, 0, kind="float", strategy="tensor")),
        (modelopt("MXFP8"), q.compressed_config("mxfp8-quantized", 8, 32, kind="float")),
    ],
    ids=["NVFP4", "FP8", "MXFP8"],
)
def test_plan_counts_modelopt_as_compressed_tensors(
    modelopt_config: dict[str, Any], compressed_config: dict[str, Any], tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path / "m", "llama", num_hidden_layers=1)
    sizes = []
    for config in (modelopt_config, compressed_config):
        write_config(path, quantization_config=config)
        sizes.append(read_model_sizes(read_raw_config(str(path))[0]))
    assert sizes[0].weight_ratio == sizes[1].weight_ratio
    assert sizes[0].unsupported_reasons == sizes[1].unsupported_reasons == ()


def test_plan_bits_are_those_of_stored_tensors(tmp_path: Path) -> None:
    algos = {"NVFP4": 4 + 8 / 16, "MXFP8": 8 + 8 / 32, "FP8": 8.0}
    for algo, bits in algos.items():
        raw, _ = read_raw_config(str(save(tmp_path / algo, algo, num_hidden_layers=1)))
        assert read_model_sizes(raw).bits_per_weight == bits
    layers = {f"model.layers.0.mlp.experts.{i}": {"quant_algo": "FP8" if i == 0 else "NVFP4"} for i in range(4)}
    mixed = raw | {"quantization_config": modelopt("MIXED_PRECISION", quantized_layers=layers)}
    assert read_model_sizes(mixed).bits_per_weight == (3 * 4.5 + 8) / 4
    only_kv = raw | {"quantization_config": modelopt(None, kv_cache_quant_algo="FP8")}
    assert read_model_sizes(only_kv).quantization is None
