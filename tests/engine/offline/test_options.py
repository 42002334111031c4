"""Tests that `LLM`, `AsyncLLM` and `EngineArgs` show type checkers, `help()` and completion the options of
`EngineConfig`.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from quire import LLM, AsyncLLM, EngineArgs
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.offline.options import EngineOptions, make_engine_config
from tests.tree import ROOT

PROGRAM = """
from quire import LLM, SamplingParams

llm = LLM("m", dtype="float32", max_model_len=512, speculative_config={"method": "ngram"})
LLM(max_modellen=512)
LLM(dtype="float33")
SamplingParams(temprature=1)
SamplingParams(stop=["."], stop_token_ids=[2], logit_bias={5: 1})
text: int = llm.generate("a")[0].outputs[0].text
"""


def type_names(annotation: Any) -> set[Any]:
    """The types of a union; a list counts as the type of its items."""
    if get_origin(annotation) in (Union, UnionType):
        return {kind for part in get_args(annotation) for kind in type_names(part)}
    return {get_args(annotation)[0] if get_origin(annotation) is list else annotation}


def test_engine_options_accept_values_of_every_config_field() -> None:
    options, fields = get_type_hints(EngineOptions), get_type_hints(EngineConfig)
    assert options.keys() == EngineConfig.model_fields.keys() - {"model"}
    for name, option in options.items():
        accepted = type_names(option) | {get_args(each)[0] for each in type_names(option) if get_args(each)}
        assert type_names(fields[name]) <= accepted, name
        assert (NoneType in type_names(option)) == (NoneType in type_names(fields[name])), name


@pytest.mark.parametrize("made", [LLM, AsyncLLM, EngineArgs])
def test_signature_and_help_show_options_with_defaults(made: type[Any]) -> None:
    parameters = dict(inspect.signature(made).parameters)
    assert (parameters.pop("multiprocessing", None) is not None) == (made is LLM), "an LLM's own"
    assert list(parameters) == ["model", *(name for name in EngineConfig.model_fields if name != "model")]
    assert parameters["max_num_seqs"].default == 256
    assert "max_num_seqs: Maximum number of sequences in one step\n" in made.__init__.__doc__


def test_engine_args_constructor_rejects_unknown_option() -> None:
    with pytest.raises(ConfigError, match="middleware: no such setting, a proxy in front"):
        EngineArgs("m", middleware=4)  # type: ignore[call-arg]


def test_options_without_effect_are_logged_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    options = {"distributed_executor_backend": "mp", "trust_remote_code": False, "enable_chunked_prefill": None}
    assert make_engine_config("m", {**options, "max_num_seqs": 3}).max_num_seqs == 3  # type: ignore[typeddict-item]
    (message,) = caplog.messages
    assert message.startswith("changes nothing: distributed_executor_backend (")


def test_engine_args_store_options_without_model() -> None:
    assert EngineArgs(Path("m"), dtype="float32").options == {"dtype": "float32"}


@pytest.mark.slow
def test_mypy_finds_wrong_options_and_outputs(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary", str(program)]
    mypy = subprocess.run(
        command, cwd=tmp_path, env={"MYPYPATH": str(ROOT)}, capture_output=True, text=True, timeout=240
    )
    lines = PROGRAM.splitlines()
    wrong = {lines[int(line.split(":")[1]) - 1] for line in mypy.stdout.splitlines() if ": error:" in line}
    assert wrong == {*lines[4:7], lines[8]}, mypy.stdout + mypy.stderr
