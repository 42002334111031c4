from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from quire.server.cli.flags import build_parser


def options(description: str | None, flags: Mapping[str, Any], program: str | None = None) -> argparse.Namespace:
    """`flags`: as in server/cli/flags.py."""
    formatter = argparse.RawDescriptionHelpFormatter
    return build_parser(program, description, flags, formatter_class=formatter, allow_abbrev=True).parse_args()
