from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeVar, Unpack

from quire.engine.common.config import EngineConfig
from quire.engine.offline.options import EngineOptions, make_engine_config, with_config_docs
from quire.server.cli.settings_flags import add_flag_per_field

_Parser = TypeVar("_Parser", bound=argparse.ArgumentParser)


class EngineArgs:
    """Options of LLM, under vLLM's class name. Raises ConfigError."""

    @with_config_docs
    def __init__(self, model: str | Path | None = None, **options: Unpack[EngineOptions]) -> None:
        """Options:"""
        make_engine_config(model, options)
        self.model = model
        self.options = options

    @staticmethod
    def add_cli_args(parser: _Parser) -> _Parser:
        """Adds a flag per field of EngineConfig. `LLM(**vars(parser.parse_args()))` accepts their values as text."""
        add_flag_per_field(parser, EngineConfig, {EngineConfig: "engine"})
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Ignores arguments that are not fields of EngineConfig."""
        options = {name: value for name, value in vars(args).items() if name in EngineConfig.model_fields}
        return cls(options.pop("model", None), **options)
