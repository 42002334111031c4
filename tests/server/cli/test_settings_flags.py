"""Flags override environment, file and defaults, in this order; invalid values are reported with key and source."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from quire.engine.common.config import PRESETS_FOLDER, EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.settings.settings_reader import load_settings, preset_names
from quire.engine.unsupported_options import flag_aliases, foreign_flags
from quire.server.cli import main as cli
from quire.server.cli.settings_flags import add_settings_flags, parse_settings
from quire.server.cli.unknown_flags import parse_flags
from quire.server.config import ServerConfig


class Small(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str = Field("demo", description="Which")
    size: int = Field(1, ge=1, description="How large, in % of all")
    names: list[str] = Field(default_factory=list, description="Names")
    fast: bool = Field(True, description="Hurry")
    kind: Literal["a", "b"] = Field("a", description="Kind")
    ratio: float | None = Field(None, gt=0, description="Ratio")


def parse_small(*argv: str) -> Small:
    parser = argparse.ArgumentParser(prog="small", allow_abbrev=False, add_help=False)
    parser.add_argument("name", nargs="?")
    add_settings_flags(parser, Small, {Small: "all"})
    return parse_settings(parser, argv, Small, "name")[1]


def usage_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse_small(*argv)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


def test_flags_override_environment_over_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "some.toml"
    file.write_text('size = 2\nratio = 0.5\nkind = "b"\nnames = ["x"]\n')
    monkeypatch.setenv("QUIRE_SIZE", "3")
    monkeypatch.setenv("QUIRE_RATIO", "0.25")
    settings = parse_small("--config", str(file), "--size", "4")
    assert (settings.size, settings.ratio, settings.kind, settings.names) == (4, 0.25, "b", ["x"])
    assert (settings.model, settings.fast) == ("demo", True)


@pytest.mark.parametrize("argv", [["x", "y", "--names", "z"], ["x", "--names", "y", "z"], ['["x","y"]', "z"]])
def test_list_flag_takes_several_values_and_repeats(argv: list[str]) -> None:
    assert parse_small("--names", *argv).names == ["x", "y", "z"]


@pytest.mark.parametrize("text", ["x,y", '["x", "y"]', " x , y,"])
def test_list_in_environment_is_json_or_comma_separated(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_NAMES", text)
    assert parse_small().names == ["x", "y"]


def test_boolean_flags_switch_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_small("--no-fast").fast is False
    monkeypatch.setenv("QUIRE_FAST", "false")
    assert parse_small().fast is False
    assert parse_small("--fast").fast is True


def test_model_is_argument_or_flag_but_not_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_small("mine").model == "mine"
    assert parse_small("--model", "mine").model == "mine"
    assert "given twice" in usage_error(capsys, "mine", "--model", "other")


def test_invalid_flag_value_is_reported_with_flag(capsys: pytest.CaptureFixture[str]) -> None:
    message = usage_error(capsys, "--size", "many")
    assert message.count("\n") == 1
    assert message.startswith("small: size: ")
    assert "'many' (flag --size)" in message


def test_invalid_environment_value_is_reported_with_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_KIND", "c")
    message = usage_error(capsys)
    assert "kind: input should be 'a' or 'b', got 'c' (environment variable QUIRE_KIND)" in message


def test_invalid_config_file_is_reported_with_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text("size = 0\nsizes = 3\n")
    message = usage_error(capsys, "--config", str(file))
    assert f"size: input should be greater than or equal to 1, got 0 (file {file})" in message
    assert f"sizes: no such setting, did you mean size? (file {file})" in message
    file.write_text("size = ")
    assert f"{file} is not TOML" in usage_error(capsys, "--config", str(file))
    missing_file_error = usage_error(capsys, "--config", "nowhere.toml")
    assert (
        f"cannot read --config nowhere.toml: No such file or directory; presets are {', '.join(preset_names())}"
        in missing_file_error
    )
    assert "; did you mean batch?" in usage_error(capsys, "--config", "bach")


def test_error_names_source_with_highest_precedence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text("size = 2")
    assert "(flag --size)" in usage_error(capsys, "--config", str(file), "--size", "0")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("QUIRE_SICE", "no such setting, did you mean QUIRE_SIZE?"),
        ("QUIRE_ZZZ", "no such setting"),
        (
            "QUIRE_SWAP_SPACE",
            "no such setting, a sequence that makes room for others is computed again; "
            "kv_offload_memory keeps what it had",
        ),
        ("QUIRE_CTX_SIZE", "no such setting, use QUIRE_MAX_MODEL_LEN"),
    ],
)
def test_unknown_environment_variable_is_rejected(
    name: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "3")
    assert usage_error(capsys) == f"small: environment variable {name}: {said}\n"


def test_kubernetes_and_foreign_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of another command, of the kernels, and those that Kubernetes sets for services."""
    links = {"QUIRE_SERVICE_HOST": "10.0.0.7", "QUIRE_SERVICE_PORT": "80", "QUIRE_SERVICE_PORT_HTTP": "80"}
    links |= {"QUIRE_PORT_80_TCP": "tcp://10.0.0.7:80", "QUIRE_PORT_80_TCP_ADDR": "10.0.0.7"}
    links |= {"QUIRE_UI_PORT": "tcp://10.0.0.8:80", "QUIRE_UI_SERVICE_HOST": "10.0.0.8"}
    for name, value in {"QUIRE_HOST": "::1", "QUIRE_CPU_ISA": "plain", **links}.items():
        monkeypatch.setenv(name, value)
    assert parse_small().size == 1
    monkeypatch.setenv("QUIRE_PORT", "tcp://10.0.0.7:80")
    assert load_settings(ServerConfig, {}).port == 8000


def test_engine_config_ignores_server_variables_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ServerConfig.model_fields.keys() - EngineConfig.model_fields.keys():
        monkeypatch.setenv(f"QUIRE_{name.upper()}", "x")
    assert load_settings(EngineConfig, {}, origin="argument {key}") == EngineConfig()
    monkeypatch.setenv("QUIRE_MAX_MODEL_LENGTH", "512")
    with pytest.raises(ConfigError, match=r"LENGTH: no such setting, did you mean QUIRE_MAX_MODEL_LEN\?"):
        load_settings(EngineConfig, {}, origin="argument {key}")


def test_config_file_keys_may_have_dashes(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text("max-model-len = 77")
    assert load_settings(EngineConfig, {}, str(file)).max_model_len == 77


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS_FOLDER.glob("*.toml")))
def test_every_preset_loads_by_name(preset: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(ServerConfig, {}, preset)
    assert settings != load_settings(ServerConfig, {})


def test_server_config_survives_json_round_trip() -> None:
    """Settings are sent to the engine process as JSON."""
    settings = load_settings(ServerConfig, {"max_model_len": "64", "served_model_name": ["x"]})
    restored = ServerConfig.model_validate(json.loads(settings.model_dump_json()))
    assert restored == settings


@pytest.mark.parametrize(("text", "tokens"), [("32k", 32_000), ("32K", 32_768), ("1M", 2**20), ("77", 77)])
def test_token_counts_accept_unit_suffix(text: str, tokens: int) -> None:
    assert load_settings(EngineConfig, {"max_model_len": text}).max_model_len == tokens
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens: .*valid integer"):
        load_settings(EngineConfig, {"max_num_batched_tokens": "8kk"})


def test_invalid_setting_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"port: .*less than or equal to 65535, got '99999' \(flag --port\)"):
        load_settings(ServerConfig, {"port": "99999"})


def test_help_shows_every_field_with_description_and_default() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_settings_flags(parser, ServerConfig, {EngineConfig: "engine", ServerConfig: "server"})
    text = " ".join(parser.format_help().split())
    for name, field in ServerConfig.model_fields.items():
        assert "--" + name.replace("_", "-") in text
        assert field.description, f"{name} has no description"
        assert field.description.split(";")[0] in text
    assert "Port to listen on; 0: any free one (default: 8000)" in text


def test_unknown_flags_are_answered_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    message = usage_error(capsys, "--middleware", "4", "-ngl=9", "--sise", "2", "--zzz")
    assert message.splitlines() == [
        "small: cannot be understood:",
        "  --middleware: a proxy in front can do it",
        "  -ngl: --cpu-offload-gb leaves a GPU's layers in the host's memory, --weights-on-disk a CPU's on a disk",
        "  --sise: did you mean --size?",
        "  --zzz: not known; see --help",
    ]
    assert "  b: one argument too many" in usage_error(capsys, "a", "b")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a --size 2 b", {"words": ["b"]}),
        ("--size=2 a b c", {"words": ["b", "c"]}),
        ("--maybe --size 2 a --two 1 2 b -5", {"words": ["b", "-5"], "maybe": "yes", "two": ["1", "2"]}),
        ("a --maybe no b --size 2", {"words": ["b"], "maybe": "no"}),
        ("a b --all 1 2 --size 2 c", {"words": ["b", "c"], "all": ["1", "2"]}),
        ("a --size 2 b -- --max_size -m c", {"words": ["b", "--max_size", "-m", "c"]}),
        ("--size 2 -- a -", {"words": ["-"]}),
    ],
)
def test_flags_may_stand_between_positional_arguments(line: str, expected: dict[str, Any]) -> None:
    unset = {"words": [], "maybe": None, "two": None, "all": None}
    assert vars(parse_flags(intermixed_parser(), line.split())) == {"name": "a", "size": 2, **unset, **expected}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a b", "required: --size"),
        ("--size 2", "required: name"),
        ("a --size", "--size: expected one argument"),
        ("a --size --maybe 2", "--size: expected one argument"),
        ("a --two 1", "--two: expected 2 arguments"),
        ("a --size 2 --zzz b", "--zzz: not known; see --help"),
    ],
)
def test_wrong_flags_between_positional_arguments_are_refused(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_flags(intermixed_parser(), line.split())
    assert said in capsys.readouterr().err


def intermixed_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="small", allow_abbrev=False)
    parser.add_argument("name")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--maybe", nargs="?", const="yes")
    parser.add_argument("--two", nargs=2)
    parser.add_argument("--all", nargs="+")
    return parser


def test_flags_without_effect_are_ignored_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_small(
        "--trust-remote-code", "--tokenizer-mode", "slow", "mine", "--config_format=auto", "--size", "2", "--jinja"
    )
    assert (config.model, config.size) == ("mine", 2)
    assert capsys.readouterr().err == (
        "small: changes nothing: --trust-remote-code (no code of a model's is run); --tokenizer-mode, --config-format "
        "(there is one way); --jinja (tools and reasoning are read where the chat template shows them; see "
        "--tool-call-parser, --reasoning-parser)\n"
    )


def test_vllm_short_flags_and_dtype_names_are_accepted() -> None:
    parser = argparse.ArgumentParser(prog="serve", allow_abbrev=False, add_help=False)
    add_settings_flags(parser, ServerConfig, {ServerConfig: "all"})
    config = parse_settings(parser, ["-tp", "2", "--dtype", "half", "--num-gpu-blocks-override=9"], ServerConfig)[1]
    assert (config.tensor_parallel_size, config.dtype, config.num_kv_blocks) == (2, "float16", 9)


@pytest.mark.parametrize("command", ["plan", "trace", "quantize", "bench serve", "verify"])
def test_every_command_explains_unknown_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*command.split(), "a", "b", "--format=int8", "--output_", "--mode", "x"])
    assert exit_info.value.code == 2
    assert "cannot be understood:\n" in capsys.readouterr().err


def test_advice_on_foreign_flags_names_existing_flags() -> None:
    known = {"--" + name.replace("_", "-") for name in ServerConfig.model_fields}
    advice = foreign_flags()
    assert set(re.findall(r"--[a-z-]+", " ".join(each.text for each in advice.values()))) <= known
    assert {f"--{name}" for name in flag_aliases().values()} <= known
    assert not known & {f"--{flag}" for flag in advice}


def test_flags_may_have_underscores() -> None:
    assert parse_small("--ratio=0.5", "--names", "a_b").names == ["a_b"]
    parser = argparse.ArgumentParser(prog="serve", allow_abbrev=False, add_help=False)
    add_settings_flags(parser, ServerConfig, {ServerConfig: "all"})
    config = parse_settings(parser, ["--max_model_len=77", "--served_model_name", "a_b"], ServerConfig)[1]
    assert (config.max_model_len, config.served_model_name) == (77, ["a_b"])


def test_api_key_flag_warns_about_process_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser(prog="serve", add_help=False)
    add_settings_flags(parser, ServerConfig, {EngineConfig: "engine", ServerConfig: "server"})
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    assert parse_settings(parser, [], ServerConfig)[1].api_key == ["secret"]
    assert capsys.readouterr().err == ""
    parse_settings(parser, ["--admin-api-key", "other"], ServerConfig)
    warning = capsys.readouterr().err
    assert "--admin-api-key shows in the list of processes; QUIRE_ADMIN_API_KEY and --api-key-file do not" in warning
    assert "other" not in warning


def test_ignored_vllm_api_key_variable_prints_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    parse_small()
    assert capsys.readouterr().err == "small: VLLM_API_KEY is not read; QUIRE_API_KEY is\n"


def test_torchrun_variables_set_node_rank_and_master_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicit settings take precedence. Without several nodes in the settings, torchrun launched another program."""
    for name, value in {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    two_nodes = {"nnodes": "2", "tensor_parallel_size": "2"}
    config = load_settings(EngineConfig, two_nodes)
    assert (config.master_addr, config.master_port, config.node_rank) == ("10.0.0.1", 1234, 1)
    assert load_settings(EngineConfig, two_nodes | {"node_rank": "0", "master_port": "5"}).master_port == 5
    assert load_settings(EngineConfig, {}) == EngineConfig()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert load_settings(EngineConfig, two_nodes).master_port == EngineConfig().master_port
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ConfigError, match=r"node_rank: .*got 'one' \(environment variable RANK\)"):
        load_settings(EngineConfig, two_nodes)
