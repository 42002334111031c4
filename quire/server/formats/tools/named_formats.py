from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.server.formats.tools import known_forms
from quire.server.formats.tools.llama import LlamaJsonFormat, PythonicFormat
from quire.server.formats.tools.tool_parser import ToolFormat


def _has_non_hermes_call_format(text: str) -> bool:
    """True for GLM 4.5 and Apriel 1.5, which use Hermes' marker for other formats."""
    return "<arg_key>" in text or "<tool_calls>[" in text


PYTHONIC_MARKS = (
    "func_name1(params_name1=",
    "<|tool_call_start|>",
    "List of tools: [",
    "List of tools: <|tool_list_start|>[",
)
"""LFM2's template shows tools but no calls."""


@dataclass(frozen=True, slots=True)
class NamedToolFormat:
    """`name` is a value of --tool-call-parser, the same as in vLLM if possible."""

    name: str
    format: ToolFormat
    matches_template: Callable[[str], bool]


TOOL_FORMATS = (
    NamedToolFormat(
        "deepseek_v3", known_forms.DEEPSEEK, lambda text: known_forms.CALLS_BEGIN in text and "```json" in text
    ),
    NamedToolFormat("deepseek_v31", known_forms.DEEPSEEK_31, lambda text: known_forms.CALLS_BEGIN in text),
    NamedToolFormat(
        "mistral_args", known_forms.MISTRAL_NAMED, lambda text: "[TOOL_CALLS]" in text and "[ARGS]" in text
    ),
    NamedToolFormat("mistral", known_forms.MISTRAL, lambda text: "[TOOL_CALLS]" in text),
    NamedToolFormat("seed_oss", known_forms.SEED_OSS, lambda text: "seed:tool_call" in text),
    NamedToolFormat("qwen3_coder", known_forms.QWEN_XML, lambda text: "<function=" in text and "<parameter=" in text),
    NamedToolFormat(
        "hermes",
        known_forms.HERMES,
        lambda text: "<tool_call>" in text and '"arguments"' in text and not _has_non_hermes_call_format(text),
    ),
    NamedToolFormat(
        "openai", known_forms.HARMONY, lambda text: "<|channel|>commentary" in text and "functions." in text
    ),
    NamedToolFormat("granite", known_forms.GRANITE, lambda text: "<|tool_call|>" in text and "available_tools" in text),
    NamedToolFormat("pythonic", PythonicFormat(), lambda text: any(one in text for one in PYTHONIC_MARKS)),
    NamedToolFormat("llama3_json", LlamaJsonFormat(), lambda text: '{"name": function name, "parameters":' in text),
)
""""auto" selects the first format that matches, so specific formats come before general ones."""


def find_tool_format(choice: str, template: str) -> ToolFormat | None:
    for row in TOOL_FORMATS:
        if row.matches_template(template) if choice == "auto" else row.name == choice:
            return row.format
    return None
