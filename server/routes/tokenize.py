"""GET /tokenizer_info."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.text.tokenizer import ADDED_TOKEN_FIELDS
from quire.server.access.admission import CountedRoute
from quire.server.encoding import encode_ascii
from quire.server.served_model import ServedModel, model_of

LARGEST_INTEGER = 2**53
"""Up to here every reader of JSON has integers exactly. Tokenizers without a limit write 10**30."""
router = APIRouter(route_class=CountedRoute)


@router.get("/tokenizer_info", response_model=None)
def tokenizer_info(request: Request) -> Response:
    """tokenizer_config.json as it is in effect here, as vLLM answers it: lm-eval's remote tokenizer reads it."""
    return Response(encode_ascii(told_of_tokenizer(model_of(request))), 200, media_type="application/json")


def told_of_tokenizer(model: ServedModel) -> dict[str, Any]:
    """The file's entries, but for paths on the machine that wrote it. Special tokens are strings, null where there is
    none; added_tokens_decoder and chat_template are there whatever file of the model they come from."""
    tokenizer = model.tokenizer
    found = {name: value for name, value in tokenizer.config.items() if not name.endswith(("_path", "_file"))}
    longest = found.get("model_max_length")
    known = isinstance(longest, int) and 0 < longest <= LARGEST_INTEGER
    eos = tokenizer.token(tokenizer.eos_token_ids[0]) if tokenizer.eos_token_ids else None
    added = tokenizer.backend.get_added_tokens_decoder()
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **found,
        "model_max_length": longest if known else model.context_length,
        **{"bos_token": None, "eos_token": eos, "pad_token": None},
        **tokenizer.special_tokens,
        "chat_template": tokenizer.chat_templates.get("default"),
        "added_tokens_decoder": {
            str(token_id): {name: getattr(token, name) for name in ADDED_TOKEN_FIELDS}
            for token_id, token in sorted(added.items())
        },
    }
