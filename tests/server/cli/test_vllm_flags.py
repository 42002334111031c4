"""Every flag of `vllm serve` and every argument of its LLM() is honored, accepted without effect, or refused with
advice; vllm_0_33.toml lists which.
"""

from __future__ import annotations

import argparse
import logging
import tomllib
from functools import cache
from pathlib import Path

import pytest

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.offline.options import make_engine_config
from quire.engine.unsupported_options import ForeignFlag, flag_aliases, foreign_flags
from quire.server.cli.settings_flags import add_settings_flags
from quire.server.cli.unknown_flags import parse_flags
from quire.server.config import ServerConfig

TABLE = tomllib.loads(Path(__file__).with_name("vllm_0_33.toml").read_text())
FLAGS, ARGUMENTS = ({kind: text.split() for kind, text in TABLE[part].items()} for part in ("flags", "arguments"))
SWITCHES = TABLE["switches"]["flags"].split()
FIELDS = {"--" + name.replace("_", "-"): name for name in ServerConfig.model_fields}


@cache
def parser() -> argparse.ArgumentParser:
    flag_parser = argparse.ArgumentParser(prog="serve", allow_abbrev=False, add_help=False)
    flag_parser.add_argument("model_tag", nargs="?")
    add_settings_flags(flag_parser, ServerConfig, {EngineConfig: "engine", ServerConfig: "server"})
    return flag_parser


def given(flag: str) -> list[str]:
    """The flag and, if it takes one, a value that has an effect."""
    known_flag = foreign_flags().get(flag.lstrip("-"))
    return [flag, *{"": [], "=": ["7"], "+": ["7", "8"]}["" if known_flag is None else known_flag.value_kind]]


def test_vllm_flag_table_lists_every_flag_once() -> None:
    flags = [flag for kind in FLAGS.values() for flag in kind]
    assert (len(flags), len(set(flags))) == (344, 344)
    assert len({name for kind in ARGUMENTS.values() for name in kind}) == 259
    assert set(SWITCHES) <= set(flags)


def test_honored_vllm_flags_are_quire_flags_or_aliases() -> None:
    names = [FIELDS.get(f"--{flag_aliases().get(flag.lstrip('-'), flag.lstrip('-'))}") for flag in FLAGS["honoured"]]
    others = [flag for flag, name in zip(FLAGS["honoured"], names, strict=True) if not name]
    assert others == ["--config", "--data-parallel-size-local", "-dpl"]
    assert vars(parse_flags(parser(), ["-n", "2", "-asc=3", "--max-num-queued-reqs", "4"])) == {
        **{"model_tag": None, "config": None},
        **{"nnodes": "2", "api_server_count": "3", "max_queued_requests": "4"},
    }


def test_accepted_vllm_flags_are_ignored_and_listed_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [part for flag in FLAGS["accepted"] for part in given(flag)]
    assert vars(parse_flags(parser(), [*argv, "--port", "9", "mine"])) == {
        **{"model_tag": "mine", "config": None, "port": "9"},
        **{"data_parallel_size": "1"},  # flags of one rank are among them: each rank is a server of its own
    }
    notice = capsys.readouterr().err
    assert notice.count("\n") == 1
    assert notice.startswith("serve: changes nothing: --")
    assert not [flag for flag in FLAGS["accepted"] if flag not in notice]


def test_refused_vllm_flags_print_advice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_flags(parser(), [part for flag in FLAGS["refused"] for part in given(flag)])
    lines = capsys.readouterr().err.splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == FLAGS["refused"]
    assert not [line for line in lines if "--help" in line or "mean" in line]


def test_negated_vllm_switches_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = []
    for flag in SWITCHES:
        try:
            parse_flags(parser(), [flag.replace("--", "--no-", 1)])
        except SystemExit:
            if "--help" in capsys.readouterr().err:
                unknown.append(flag)
    assert not unknown


@pytest.mark.parametrize(
    "argv",
    [
        ["--no-enable-eplb"],
        ["--enable-eplb=False"],
        ["--enable-eplb", "False"],
        ["-O3"],
        ["--compilation-config.mode", "3"],
        ["--cudagraph-capture-sizes", "1", "2", "4"],
        ["--quantization", "none"],
        ["--load-format=safetensors"],
        ["--max-model-len", "-1"],
    ],
)
def test_vllm_flag_values_without_effect_are_accepted(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_flags(parser(), ["mine", *argv, "--port", "1"]).model_tag == "mine"
    flag = argv[0].split("=")[0] if "False" not in " ".join(argv) else "--no-enable-eplb"
    assert capsys.readouterr().err.startswith(f"serve: changes nothing: {flag} (")


@pytest.mark.parametrize("argv", [["--enable-eplb=true"], ["--enable-eplb"]])
def test_vllm_flag_values_with_unsupported_effect_are_rejected(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_flags(parser(), argv)


def asked(name: str) -> object:
    return "7" if (foreign_flags().get(name.replace("_", "-")) or ForeignFlag("", False, "=")).value_kind else True


def test_vllm_llm_arguments_are_honored_accepted_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    fields = {flag_aliases().get(name.replace("_", "-"), name).replace("-", "_") for name in ARGUMENTS["honoured"]}
    assert fields <= EngineConfig.model_fields.keys()
    accepted = {name: asked(name) for name in ARGUMENTS["accepted"]}
    assert make_engine_config("m", accepted) == EngineConfig(model="m")  # type: ignore[arg-type]
    (notice,) = caplog.messages
    assert not [name for name in accepted if name not in notice]
    with pytest.raises(ConfigError) as rejection:
        make_engine_config("m", {name: asked(name) for name in ARGUMENTS["refused"]})  # type: ignore[arg-type]
    message = str(rejection.value).split(f" (argument {ARGUMENTS['refused'][-1]})")[0]
    assert not [name for name in ARGUMENTS["refused"] if f"{name}: no such setting, " not in message]


def test_unset_vllm_llm_arguments_leave_default_config(caplog: pytest.LogCaptureFixture) -> None:
    """Some programs pass on all of vLLM's arguments, most of them unset."""
    unset = dict.fromkeys([*ARGUMENTS["accepted"], *ARGUMENTS["refused"]])
    switched_off = dict.fromkeys((flag[2:].replace("-", "_") for flag in SWITCHES), False)
    for name in (*EngineConfig.model_fields, "enable_chunked_prefill", "no_enable_chunked_prefill"):
        switched_off.pop(name, None)
    usual = {"offload_num_in_group": 1, "convert": "auto"}
    arguments = {**unset, **{name: False for name in switched_off if name in unset}, **usual}
    assert make_engine_config("m", arguments) == EngineConfig(model="m")  # type: ignore[arg-type]
    assert all(text.startswith("changes nothing: ") for text in caplog.messages)
    assert make_engine_config("m", {"enable_chunked_prefill": False}) == EngineConfig(model="m")  # type: ignore[typeddict-item]
    with caplog.at_level(logging.ERROR), pytest.raises(ConfigError, match="a program's engines are all on its machine"):
        make_engine_config("m", {"data_parallel_rank": 1})  # type: ignore[typeddict-item]
    assert make_engine_config("m", {"num_gpu_blocks_override": 9}).num_kv_blocks == 9  # type: ignore[typeddict-item]


def test_vllm_ngram_speculative_config_is_accepted() -> None:
    config_json = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    speculative_config = make_engine_config("m", {"speculative_config": config_json}).speculative_config
    assert speculative_config is not None
    assert (
        speculative_config.method,
        speculative_config.num_speculative_tokens,
        speculative_config.prompt_lookup_min,
    ) == ("ngram", 5, 2)


def test_unsupported_draft_method_is_logged_and_disabled(caplog: pytest.LogCaptureFixture) -> None:
    speculative_config = make_engine_config(
        "m", {"speculative_config": {"method": "dflash", "model": "OWNER/DRAFT"}}
    ).speculative_config
    assert speculative_config is not None
    assert speculative_config.method == "none"
    assert "there is no draft method dflash" in caplog.text


def test_vllm_quantization_names_are_left_to_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    arguments = {"quantization": "none", "load_format": "safetensors", "max_model_len": -1}
    assert make_engine_config("m", arguments) == EngineConfig(model="m")  # type: ignore[arg-type]
    assert "changes nothing: quantization (what a checkpoint says" in caplog.text
    assert make_engine_config("m", {"quantization": "gptq_marlin"}).required_checkpoint_quant_method == "gptq"
    assert make_engine_config("m", {"quantization": "int4"}).quantization == "int4"
    with pytest.raises(ConfigError, match="quantization: input should be"):
        make_engine_config("m", {"quantization": "fbgemm_fp8"})  # type: ignore[typeddict-item]
