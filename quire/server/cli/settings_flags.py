from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from quire.engine.checkpoint.hub_names import ANY_GGUF
from quire.engine.common.errors import ConfigError
from quire.engine.settings.settings_reader import (
    Settings,
    is_list_field,
    load_settings,
    parse_json_or_comma_list,
    preset_names,
)
from quire.server.cli.unknown_flags import JSON_METAVAR, parse_flags
from quire.server.config import ServerConfig

COMMON_SETTINGS = (
    "model",
    "host",
    "port",
    "api_key_file",
    "served_model_name",
    "data_dir",
    "max_model_len",
    "quantization",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "threads",
    "enable_lora",
)


class _HelpAction(argparse.Action):
    """`--help=all` also prints the uncommon flags."""

    uncommon_actions: list[argparse.Action]

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: object, flag: object = None) -> None:
        if values != "all":
            for action in self.uncommon_actions:
                action.help = argparse.SUPPRESS
        parser.print_help()
        if values != "all" and self.uncommon_actions:
            print(f"\n{len(self.uncommon_actions)} more flags: {parser.prog} --help=all")
        parser.exit()


def add_settings_flags(
    parser: argparse.ArgumentParser, model: type[BaseModel], titles: Mapping[type[BaseModel], str]
) -> None:
    """The parser must not have --help yet."""
    shown = parser.add_argument(
        "-h",
        "--help",
        action=_HelpAction,
        nargs="?",
        metavar="all",
        default=argparse.SUPPRESS,
        help="show the common flags and exit; --help=all shows all of them",
    )
    assert isinstance(shown, _HelpAction)
    parser.add_argument(
        "--config", metavar="FILE", help=f"TOML file of settings, or a preset: {', '.join(preset_names()) or 'none'}"
    )
    actions = add_flag_per_field(parser, model, titles)
    shown.uncommon_actions = [action for name, action in actions.items() if name not in COMMON_SETTINGS]


def add_flag_per_field(
    parser: argparse.ArgumentParser, model: type[BaseModel], titles: Mapping[type[BaseModel], str]
) -> dict[str, argparse.Action]:
    """Adds each field's flag to the group of the first class in `titles` that has the field."""
    actions = {}
    sections = {base: parser.add_argument_group(title) for base, title in titles.items()}
    for name, field in model.model_fields.items():
        section = next((group for base, group in sections.items() if name in base.model_fields), None)
        flag = "--" + name.replace("_", "-")
        if section is not None and flag not in parser._option_string_actions:
            actions[name] = section.add_argument(flag, **_field_argparse_kwargs(field), help=_field_help(field))
    return actions


def parse_settings(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    model: type[Settings],
    positional: str | None = None,
    gguf: str | None = None,
) -> tuple[argparse.Namespace, Settings]:
    """`positional` names an argument whose value is the model, `gguf` one whose value is a GGUF repository. Exits with
    status 2 for bad values.
    """
    args = parse_flags(parser, argv)
    if args.config is not None and Path(args.config).suffix in (".yaml", ".yml"):
        names_model = positional is not None and getattr(args, positional) is not None
        args = _parse_yaml_and_flags(parser, args.config, argv, with_model=not names_model)
    flags = {name: value for name, value in vars(args).items() if name in model.model_fields}
    for name, value in flags.items():
        if isinstance(value, list):
            flags[name] = _split_json_lists(value)
    model_argument = getattr(args, positional) if positional else None
    if model_argument is not None:
        if "model" in flags:
            parser.error("the model is given twice, as an argument and by --model")
        flags["model"] = model_argument
    repo = getattr(args, gguf) if gguf else None
    if repo is not None:
        if "model" in flags:
            parser.error("the model is given twice, by -hf too")
        flags["model"] = repo if ":" in repo.rpartition("/")[2] else f"{repo}:{ANY_GGUF}"
    _warn_of_api_keys(parser.prog, flags)
    try:
        return args, load_settings(model, flags, args.config, other_settings=ServerConfig.model_fields)
    except ConfigError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def _parse_yaml_and_flags(
    parser: argparse.ArgumentParser, file: str, argv: Sequence[str], *, with_model: bool
) -> argparse.Namespace:
    try:
        args = parse_flags(parser, [*read_yaml_flags(file, with_model=with_model), *argv])
    except ConfigError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    args.config = None
    return args


def _split_json_lists(texts: Sequence[str]) -> list[Any]:
    """vLLM writes lists as JSON."""
    parts: list[Any] = []
    for text in texts:
        if text.startswith("["):
            parts += parse_json_or_comma_list(text)
        else:
            parts.append(text)
    return parts


def _warn_of_api_keys(program: str, flags: Mapping[str, Any]) -> None:
    if os.environ.get("VLLM_API_KEY"):  # a user who set it expects the server to require a key
        print(f"{program}: VLLM_API_KEY is not read; QUIRE_API_KEY is", file=sys.stderr)
    for name in ("api_key", "admin_api_key", "metrics_api_key"):
        if name in flags:
            flag = f"--{name.replace('_', '-')}"
            warning = f"{flag} shows in the list of processes; QUIRE_{name.upper()} and --api-key-file do not"
            print(f"{program}: {warning}", file=sys.stderr)


def read_yaml_flags(file: str, *, with_model: bool) -> list[str]:
    """Reads a file in the format of vLLM's --config. Raises ConfigError."""
    import yaml  # a dependency of huggingface_hub

    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read --config {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file}: must be a mapping of flags, without their dashes, to values")
    flags: list[str] = []
    for name, value in content.items():
        flag = f"--{str(name).lstrip('-')}"
        if value is None or (not with_model and flag in ("--model", "--model-tag")):
            continue
        flags.append(f"{flag}={json.dumps(value) if isinstance(value, dict | list) else value}")
    return flags


def bounded_number(
    kind: Callable[[str], Any], low: float, high: float = math.inf, *, above: bool = False
) -> Callable[[str], Any]:
    """If `above`, `low` itself is excluded."""

    def parse_number(text: str) -> Any:
        value = kind(text)
        if not (low < value if above else low <= value) or value > high or value == math.inf:
            most = "" if high == math.inf else f" and at most {high:g}"
            raise argparse.ArgumentTypeError(f"must be {'above' if above else 'at least'} {low:g}{most}, got {text}")
        return value

    parse_number.__name__ = kind.__name__  # argparse's error messages show it
    return parse_number


def _field_argparse_kwargs(field: FieldInfo) -> dict[str, Any]:
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
    options: dict[str, Any] = {"default": argparse.SUPPRESS}
    if bool in kinds:
        return options | {"action": argparse.BooleanOptionalAction}
    if any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds) or _is_dict_field(field):
        return options | {"metavar": JSON_METAVAR}
    if is_list_field(field):
        return options | {"nargs": "+", "action": "extend", "metavar": "TEXT"}
    choices = _literal_choices(field.annotation)
    if choices:
        return options | {"metavar": "{" + ",".join(choices) + "}"}
    named = {int: "N", float: "NUMBER", Path: "PATH"}
    return options | {"metavar": next((named[kind] for kind in kinds if kind in named), "TEXT")}


def _is_dict_field(field: FieldInfo) -> bool:
    kinds = (field.annotation, *get_args(field.annotation))
    return any(get_origin(get_args(kind)[0] if get_origin(kind) is Annotated else kind) is dict for kind in kinds)


def _literal_choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in _literal_choices(part)]


def _field_help(field: FieldInfo) -> str:
    text = field.description or ""
    default = field.get_default(call_default_factory=True)
    if default not in (None, [], (), "") and "default" not in text:
        shown = {True: "on", False: "off"}.get(default, default) if isinstance(default, bool) else default
        text += f" (default: {shown})"
    return text.replace("%", "%%")
