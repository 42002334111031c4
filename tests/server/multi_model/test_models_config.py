"""Parsing of the file of `quire serve --models`."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from quire.engine.common.config import DEMO_MODEL
from quire.engine.common.errors import ConfigError, ModelNotFound
from quire.server.multi_model.model_manager import ModelManager
from quire.server.multi_model.models_config import ModelEntry, read_models_file
from quire.server.runtime.model_runtime import ModelRuntime

LORA = 'enable_lora = true\nlora_modules = ["a=/a"]\n'
ONE = f'[one]\nmodel = "{DEMO_MODEL}"\n'


def test_model_settings_merge_file_command_line_and_table(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        f'memory = 2.5\nidle_seconds = 5\n{ONE}dtype = "float32"\n\n["owner/two"]\nmodel = "{DEMO_MODEL}"\n'
        'served_model_name = ["second"]\nidle_seconds = 0\nsleep_level = 2\nnum_kv_blocks = 8\n'
    )
    models_config = read_models_file(file, {"threads": 1, "dtype": "bfloat16", "data_dir": tmp_path})
    one, two = models_config.entries
    assert (models_config.memory_limit_bytes, models_config.slice_seconds) == (int(2.5 * 2**30), 10.0)
    assert (one.idle_seconds, one.sleep_level, two.idle_seconds, two.sleep_level) == (5, 1, 0, 2)
    assert (one.config.dtype, two.config.dtype, one.config.threads) == ("float32", "bfloat16", 1)
    assert (one.config.kv_cache_memory, two.config.kv_cache_memory, two.config.num_kv_blocks) == (1.0, None, 8)
    assert two.config.model_names == ("owner/two", "second")
    assert (one.config.data_dir, two.config.data_dir) == (tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no model"),
        ("[one", "models.toml is not TOML: "),
        ('[[models]]\nmodel = "x"\n', r'models; each model is a table of its name, such as \["small"\]'),
        ('one = "/models/one"\n', "one; each model is a table of its name"),
        ("memory = 0\n" + ONE, "memory"),
        (ONE + 'lora_modules = ["a=/a"]\n', "one: lora_modules: needs --enable-lora"),
        (ONE + LORA + ONE.replace("one", "a"), "one and a are both called 'a'"),
        ("memroy = 1\n" + ONE, "memroy"),
        ("sleep_level = 3\n" + ONE, "sleep_level"),
        ("[one]\n", "one: model is missing"),
        (ONE + "port = 3\n", "one: port applies to the whole server"),
        (ONE + 'api_key = ["a"]\n', "one: api_key applies to the whole server"),
        (ONE + "dtpye = 3\n", "one: dtpye"),
        (ONE + "served_model_name = 3\n", "one: served_model_name"),
        (ONE + "idle_seconds = -1\n", "one: .*idle_seconds"),
        (ONE + ONE.replace("one", "two") + 'served_model_name = ["one"]\n', "one and two are both called 'one'"),
    ],
)
def test_invalid_models_file_is_rejected_with_reason(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_models_file(file, {})


def test_lora_names_resolve_before_model_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(ONE.replace("one", "two") + ONE + LORA)
    manager = ModelManager(read_models_file(file, {}), fail_to_load)
    assert manager.require_model("a") is manager.managed_models[1]
    with pytest.raises(ModelNotFound, match="served here: two, one, a"):
        manager.require_model("b")


def fail_to_load(entry: ModelEntry) -> AbstractAsyncContextManager[ModelRuntime]:
    raise AssertionError("nothing is loaded here")


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        (" a", {"model": DEMO_MODEL}, "model: a name"),
        ("a" * 300, {"model": DEMO_MODEL}, "model: a name"),
        ("new", {}, "settings: model is missing"),
        ("new", {"model": DEMO_MODEL, "port": 1}, "settings: port applies to the whole server"),
        ("new", {"model": DEMO_MODEL, "dtpye": 1}, "settings: dtpye"),
        (
            "new",
            {"model": DEMO_MODEL, "kv_offload_tier": "os:system"},
            "settings: kv_offload_tier can be set only in the",
        ),
        ("new", {"model": DEMO_MODEL, "scheduler_cls": "os:system"}, "settings: scheduler_cls can be set only in the"),
    ],
)
def test_added_model_settings_are_validated_like_file(
    name: str, settings: dict[str, object], said: str, tmp_path: Path
) -> None:
    (tmp_path / "models.toml").write_text(ONE)
    models_config = read_models_file(tmp_path / "models.toml", {"threads": 1})
    with pytest.raises(ConfigError, match=said):
        models_config.parse_added_entry(name, settings)
    assert models_config.parse_added_entry("new", {"model": DEMO_MODEL}).config.threads == 1


def test_missing_models_file_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_models_file(tmp_path / "none.toml", {})
