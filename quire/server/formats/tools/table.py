"""All tool formats that have a name, and which of them a chat template uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.server.formats.tools import known
from quire.server.formats.tools.format import ToolFormat
from quire.server.formats.tools.llama import LlamaJson, Pythonic


def _other_calls(text: str) -> bool:
    """Whether a template uses Hermes' marker for another format, as those of GLM 4.5 and Apriel 1.5 do."""
    return "<arg_key>" in text or "<tool_calls>[" in text


PYTHONIC = (
    "func_name1(params_name1=",
    "<|tool_call_start|>",
    "List of tools: [",
    "List of tools: <|tool_list_start|>[",
)
"""Texts of templates whose models write Python's calls, though LFM2's show none."""


@dataclass(frozen=True, slots=True)
class NamedFormat:
    """A format and its name for --tool-call-parser, which is vLLM's name where vLLM has one."""

    name: str
    format: ToolFormat
    spoken_by: Callable[[str], bool]
    """Whether a template's text shows the format."""


TABLE = (
    NamedFormat("deepseek_v3", known.DEEPSEEK, lambda text: known.CALLS_BEGIN in text and "```json" in text),
    NamedFormat("deepseek_v31", known.DEEPSEEK_31, lambda text: known.CALLS_BEGIN in text),
    NamedFormat("mistral_args", known.MISTRAL_NAMED, lambda text: "[TOOL_CALLS]" in text and "[ARGS]" in text),
    NamedFormat("mistral", known.MISTRAL, lambda text: "[TOOL_CALLS]" in text),
    NamedFormat("seed_oss", known.SEED_OSS, lambda text: "seed:tool_call" in text),
    NamedFormat("qwen3_coder", known.QWEN_XML, lambda text: "<function=" in text and "<parameter=" in text),
    NamedFormat(
        "hermes", known.HERMES, lambda text: "<tool_call>" in text and '"arguments"' in text and not _other_calls(text)
    ),
    NamedFormat("openai", known.HARMONY, lambda text: "<|channel|>commentary" in text and "functions." in text),
    NamedFormat("granite", known.GRANITE, lambda text: "<|tool_call|>" in text and "available_tools" in text),
    NamedFormat("pythonic", Pythonic(), lambda text: any(one in text for one in PYTHONIC)),
    NamedFormat("llama3_json", LlamaJson(), lambda text: '{"name": function name, "parameters":' in text),
)
"""A template uses the format of the first row that fits."""


def tool_format(choice: str, template: str) -> ToolFormat | None:
    """The format that --tool-call-parser names. "auto" means the template's, "none" gives None."""
    for row in TABLE:
        if row.spoken_by(template) if choice == "auto" else row.name == choice:
            return row.format
    return None
