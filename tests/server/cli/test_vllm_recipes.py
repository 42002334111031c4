"""The command lines of vLLM's published recipes are accepted with their values. vllm_recipes.json lists them by the
recipe's file, with the date of the commit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.engine.checkpoint.overrides import merge_overrides
from quire.server.cli.bench.serve import build_serve_bench_parser
from quire.server.cli.bench.vllm_flags import apply_vllm_flags
from quire.server.cli.settings_flags import parse_settings
from quire.server.cli.unknown_flags import parse_flags
from quire.server.config import ServerConfig
from tests.server.cli.test_vllm_flags import parser

TABLE = json.loads(Path(__file__).with_name("vllm_recipes.json").read_text(encoding="utf-8"))
SERVED = {file: lines["serve"] for file, lines in TABLE["files"].items() if "serve" in lines}
ASCEND = ["--quantization", "ascend"]
"""For Huawei's NPUs: the only value of a recipe that no supported device can serve."""


def parse_config(*argv: str) -> ServerConfig:
    return parse_settings(parser(), argv, ServerConfig, "model_tag")[1]


def is_runnable(argv: Sequence[str]) -> bool:
    """False if the line's config file is not here, or if its strategy gets its sizes only when it is used."""
    alone = "--decode-context-parallel-size" in argv and not {"--tensor-parallel-size", "-tp"} & set(argv)
    return "--config" not in argv and "ascend" not in argv and not alone


def test_every_serve_line_of_vllm_recipes_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for file, lines in SERVED.items():
        for argv in filter(is_runnable, lines):
            try:
                config = parse_config(*argv)
                assert config.model in argv or f"--model={config.model}" in argv or not argv[0][0].isalpha()
            except SystemExit:
                wrong.append((file, argv, capsys.readouterr().err.splitlines()[-1]))
    assert not wrong
    assert sum(map(len, SERVED.values())) > 1000


def test_every_bench_line_of_vllm_recipes_is_accepted_or_lacks_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [argv for each in TABLE["files"].values() for argv in each.get("bench", [])]
    wrong = []
    for argv in lines:
        bench_parser = build_serve_bench_parser()
        try:
            apply_vllm_flags(bench_parser, parse_flags(bench_parser, argv[2:]))
        except SystemExit:
            if "would be downloaded" not in (error := capsys.readouterr().err):
                wrong.append((argv, error))
    assert not wrong
    assert len(lines) > 50


def test_unsupported_device_is_rejected_with_reason(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (ASCEND, ["--device", "tpu"], ["--device=xla"], ["--device", "npu"], ["--device", "hpu:0"]):
        with pytest.raises(SystemExit):
            parse_config("mine", *argv)
        message = capsys.readouterr().err
        assert "input should be" not in message
        assert any(why in message for why in ("PyTorch of their own", "for each new shape")), message


def test_recipe_flags_set_expected_config_values() -> None:
    config = parse_config(
        *("mine", "--hf-overrides", '{"max_position_embeddings": 1010000}', "--hf-overrides.rope_scaling.factor=4"),
        *("--default-chat-template-kwargs.thinking", "true", "--default-chat-template-kwargs.reasoning_effort=high"),
        *("--generation-config", "vllm", "--override-generation-config", '{"max_new_tokens": null}'),
        *("--root-path", "/llm", "--chat-template-content-format", "string", "--kv-cache-memory-bytes", "8589934592"),
        *("--speculative-config.method", "mtp", "--speculative-config.num_speculative_tokens=3"),
    )
    assert config.hf_overrides == {"max_position_embeddings": 1010000, "rope_scaling": {"factor": 4}}
    assert config.default_chat_template_kwargs == {"thinking": True, "reasoning_effort": "high"}
    assert (config.generation_config, config.override_generation_config) == ("vllm", {"max_new_tokens": None})
    assert (config.root_path, config.chat_template_content_format, config.kv_cache_memory) == ("/llm", "string", 8.0)
    assert config.speculative_config is not None
    assert (config.speculative_config.method, config.speculative_config.num_speculative_tokens) == ("mtp", 3)


def test_merge_overrides_merges_inner_configs_and_replaces_others() -> None:
    raw = {"rope_scaling": {"factor": 2, "type": "yarn"}, "text_config": {"hidden_size": 8, "rope": {"a": 1}}}
    merged = merge_overrides(raw, {"rope_scaling": {"factor": 4}, "text_config": {"rope": {"b": 2}}, "new": 1})
    assert merged == {"rope_scaling": {"factor": 4}, "text_config": {"hidden_size": 8, "rope": {"b": 2}}, "new": 1}


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        (
            "--reasoning-parser",
            "deepseek_r1 deepseek_v3 deepseek_v4 poolside_v1 cohere_command3 cohere_command4 ernie45 gemma4 glm45 "
            "glm47 openai_gptoss granite holo2 hunyuan_a13b hy_v3 kimi_k2 kimi_k3 mimo minimax_m2 "
            "minimax_m2_append_think minimax_m3 mistral nemotron_v3 olmo3 qwen3 seed_oss step3 step3p5 inkling "
            "solar_open2",
        ),
        (
            "--tool-call-parser",
            "deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 cohere_command3 cohere_command4 ernie45 glm45 glm47 "
            "granite-20b-fc granite granite4 hermes poolside_v1 hunyuan_a13b hy_v3 internlm jamba lfm2 kimi_k2 kimi_k3 "
            "llama3_json llama4_json llama4_pythonic longcat mimo minimax_m2 minimax_m3 minicpm5 mistral olmo3 openai "
            "phi4_mini_json pythonic qwen3_coder qwen3_xml seed_oss step3 step3p5 inkling xlam gigachat3 functiongemma "
            "gemma4 apertus solar_open2",
        ),
    ],
)
def test_vllm_parser_names_are_accepted_or_become_auto(
    flag: str, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    field = flag.strip("-").replace("-", "_")
    for name in names.split():
        value = getattr(parse_config("mine", flag, name), field)
        notice = capsys.readouterr().err
        assert (
            value == name if not notice else (value == "auto" and "chat template" in notice and notice.count("\n") == 1)
        )
        assert getattr(ServerConfig(**{field: name}), field) in ("auto", name)  # as from a file or a variable


def test_plugin_parser_becomes_auto_and_unknown_parser_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_config("mine", "--reasoning-parser-plugin", "nano.py", "--reasoning-parser", "nano_v3")
    assert config.reasoning_parser == "auto"
    assert "no code of others runs" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_config("mine", "--reasoning-parser", "nano_v3")


SWITCHES = [name for name, field in ServerConfig.model_fields.items() if field.annotation in (bool, bool | None)]


@pytest.mark.few(6)
@pytest.mark.parametrize("name", SWITCHES)
def test_boolean_flag_accepts_true_and_false_values(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    for on in (f"{flag}=true", f"{flag}=True", f"{flag}=1", flag, f"{flag.replace('--', '--no-', 1)}=False"):
        assert getattr(parse_config("mine", on), name) is True
    for off in (f"{flag}=False", f"{flag}=false", f"{flag}=0", flag.replace("--", "--no-", 1)):
        assert getattr(parse_config("mine", off), name) is False
    assert getattr(parse_config("mine", flag, "False"), name) is False
    assert parse_config("mine", flag, "True", "--port", "9").port == 9


@pytest.mark.parametrize(
    "between",
    [
        ["--trust-remote-code"],
        ["--swap-space", "4"],
        ["--data-parallel-size-local", "2"],
        ["--hf-overrides", "{}"],
        ["--hf-overrides.a=1"],
        ["--reasoning-parser", "qwen3"],
        ["--enable-lora", "true"],
    ],
)
def test_model_after_flag_does_not_extend_list_flag(between: list[str]) -> None:
    config = parse_config("--served-model-name", "a", "b", *between, "mine")
    assert (config.model, config.served_model_name) == ("mine", ["a", "b"])
    assert parse_config("--served-model-name", "a", *between, "--port", "9", "mine").model == "mine"


def test_boolean_flag_rejects_other_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config("mine", "--enable-lora=perhaps")
    assert "perhaps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "engines"),
    [
        (["-dp", "16", "--data-parallel-size-local", "8", "--data-parallel-hybrid-lb"], 8),
        (["--data-parallel-size-local=8", "--data-parallel-size=16", "--headless", "--data-parallel-start-rank=8"], 8),
        (["--data-parallel-size", "4", "--data-parallel-rank", "2"], 1),
        (["--data-parallel-external-lb", "--data-parallel-size", "4"], 1),
        (["--data-parallel-size", "4", "--data-parallel-address", "10.0.0.1"], 4),
    ],
)
def test_vllm_data_parallel_flags_set_local_engine_count(argv: list[str], engines: int) -> None:
    assert parse_config("mine", *argv).data_parallel_size == engines


@pytest.mark.parametrize(
    "argv",
    [
        ["--speculative-config", "ngram", "--speculative-config.num_speculative_tokens", "3"],
        ["--hf-overrides.a", "1", "--hf-overrides.a.b", "2"],
        ["--hf-overrides", "[1]"],
        ["--hf-overrides", "{"],
        ["--default-chat-template-kwargs", '{"messages": []}'],
        ["--root-path", "llm"],
    ],
)
def test_invalid_object_flags_are_rejected(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config("mine", *argv)
    assert argv[0].partition(".")[0].strip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ('{"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "num_speculative_tokens": 3}', "eagle3"),
        ('{"model": "meta-llama/Llama-3.2-1B", "draft_tensor_parallel_size": 1}', "draft_model"),
        ('{"method": "ernie_mtp", "model": "mine", "num_speculative_tokens": 1}', "mtp"),
        ('{"method": "dflash", "model": "OWNER/DRAFT", "num_speculative_tokens": 15}', "none"),
        ('{"method": "qwen3_5_mtp", "enforce_eager": true}', "mtp"),
    ],
)
def test_vllm_speculative_config_sets_expected_method(
    given: str, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parse_config("mine", "--speculative-config", given).speculative_config
    assert config is not None
    assert config.method == method
    assert config.model is None or method != "mtp"
    if "enforce_eager" in given or method == "none":
        assert "changes nothing: --speculative-config" in capsys.readouterr().err


def test_yaml_config_file_accepts_vllm_flag_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: theirs\nkv-cache-dtype: fp8\nasync-scheduling: true\nno-enable-prefix-caching: true\nmax_num_seqs: 64\n"
        "served-model-name: [a, b]\nhf-overrides: {rope_scaling: {factor: 2}}\ncompilation-config: '{\"mode\": 3}'\n"
    )
    config = parse_config("--config", str(file), "--max-num-seqs", "8")
    assert (config.model, config.kv_cache_dtype, config.max_num_seqs) == ("theirs", "fp8", 8)
    assert (config.served_model_name, config.hf_overrides) == (["a", "b"], {"rope_scaling": {"factor": 2}})
    assert not config.enable_prefix_caching
    assert parse_config("mine", "--config", str(file)).model == "mine"
    file.write_text("- a\n")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        parse_config("--config", str(file))
    assert "must be a mapping" in capsys.readouterr().err
