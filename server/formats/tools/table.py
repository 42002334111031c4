"""All tool formats, and which of them a chat template uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.server.formats.tools.deepseek import CALLS_BEGIN, DeepSeek, DeepSeek31
from quire.server.formats.tools.format import ToolFormat
from quire.server.formats.tools.hermes import Hermes
from quire.server.formats.tools.llama import LlamaJson, Pythonic
from quire.server.formats.tools.mistral import Mistral, MistralNamed
from quire.server.formats.tools.qwen_xml import QwenXml, SeedOss


def _other_calls(text: str) -> bool:
    """Whether a template uses Hermes' marker for another format, as those of GLM 4.5 and Apriel 1.5 do."""
    return "<arg_key>" in text or "<tool_calls>[" in text


@dataclass(frozen=True, slots=True)
class Row:
    """A format and its name for --tool-call-parser, which is vLLM's name where vLLM has one."""

    name: str
    format: ToolFormat
    spoken_by: Callable[[str], bool]
    """Whether a template's text shows the format."""


TABLE = (
    Row("deepseek_v3", DeepSeek(), lambda text: CALLS_BEGIN in text and "```json" in text),
    Row("deepseek_v31", DeepSeek31(), lambda text: CALLS_BEGIN in text),
    Row("mistral_args", MistralNamed(), lambda text: "[TOOL_CALLS]" in text and "[ARGS]" in text),
    Row("mistral", Mistral(), lambda text: "[TOOL_CALLS]" in text),
    Row("seed_oss", SeedOss(), lambda text: "seed:tool_call" in text),
    Row("qwen3_coder", QwenXml(), lambda text: "<function=" in text and "<parameter=" in text),
    Row("hermes", Hermes(), lambda text: "<tool_call>" in text and '"arguments"' in text and not _other_calls(text)),
    Row("pythonic", Pythonic(), lambda text: "func_name1(params_name1=" in text or "<|tool_call_start|>" in text),
    Row("llama3_json", LlamaJson(), lambda text: '{"name": function name, "parameters":' in text),
)
"""A template uses the format of the first row that fits."""


def tool_format(choice: str, template: str) -> ToolFormat | None:
    """The format that --tool-call-parser names. "auto" means the template's, "none" gives None."""
    for row in TABLE:
        if row.spoken_by(template) if choice == "auto" else row.name == choice:
            return row.format
    return None
