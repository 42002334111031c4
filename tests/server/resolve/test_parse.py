"""Validation errors name the fields of a body as the caller wrote them."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.common.errors import InvalidRequest
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.messages import MessagesRequest
from quire.server.protocol.responses import ResponsesRequest
from quire.server.resolve.parse import validate_body

HI = [{"role": "user", "content": "hi"}]
CHOICES = "tool_choice: Input should be 'none', 'auto' or 'required'"


@pytest.mark.parametrize(
    ("model", "body", "said"),
    [
        (ChatRequest, {"tool_choice": {"type": "function"}}, "tool_choice.function: Field required"),
        (
            ChatRequest,
            {"tool_choice": {"function": {"nam": "x"}}},
            "tool_choice.function.name: Field required; got nam",
        ),
        (ChatRequest, {"tool_choice": "requird"}, f"{CHOICES}; did you mean required?"),
        (ChatRequest, {"tool_choice": 5}, CHOICES),
        (ChatRequest, {"stop": [["a"]]}, "string; stop[0]: Input should be a valid string"),
        (ChatRequest, {"messages": [{"content": "a"}]}, "messages[0].role: Field required"),
        (ChatRequest, {"messages": [{"role": None}]}, "messages[0].role: Input should be a valid string"),
        (ChatRequest, {"messages": None}, "messages: Field required"),
        (ChatRequest, {"logit_bias": {"5": "x"}}, "logit_bias: Input should be a valid number"),
        (
            MessagesRequest,
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}]},
            "messages[0].content[0].source.data: Field required",
        ),
        (ResponsesRequest, {"tool_choice": {"type": "function"}}, "tool_choice.name: Field required"),
        (ResponsesRequest, {"tools": [{"type": "custom"}]}, "tools[0].name: Field required"),
    ],
)
def test_validation_error_names_field_without_union_members(model: Any, body: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate_body({"messages": HI, "max_tokens": 5, **body}, model)
    assert said in refused.value.message
    assert "FunctionOrCustomName" not in refused.value.message


@pytest.mark.parametrize(
    ("model", "body", "said"),
    [
        (ChatRequest, {"messages": []}, "messages: must not be empty"),
        (ChatRequest, {"tools": [{"type": "web_search"}]}, "tools[0].type: tools of type web_search are not supported"),
        (ResponsesRequest, {"tools": [{"type": "mcp"}]}, "tools[0]: tools of type mcp are not supported"),
        (MessagesRequest, {"tools": [{"type": "bash_20250124"}]}, "tools[0].type: tools of type bash_20250124 are"),
    ],
)
def test_validation_error_avoids_pydantic_wording(model: Any, body: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate_body({"messages": HI, "max_tokens": 5, **body}, model)
    assert refused.value.message.startswith(said)


def test_legacy_functions_error_points_to_tools() -> None:
    with pytest.raises(InvalidRequest, match="functions is not supported: use tools"):
        validate_body({"messages": HI, "functions": [{"name": "f"}]}, ChatRequest).check_params_and_list_ignored()
