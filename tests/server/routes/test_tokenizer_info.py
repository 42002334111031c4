"""GET /tokenizer_info: transformers builds the same tokenizer from it as from the model's own files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from quire.engine.client.engine_client import EngineClient
from quire.engine.common.config import DEMO_MODEL
from quire.engine.text.tokenizer import Tokenizer
from quire.server.app import create_app
from quire.server.config import ServerConfig
from quire.server.served_model import ServedModelSpec
from tests.server.api import Api, open_http
from tests.server.fake import FakeEngine, hashed
from tests.server.forked import FORKED
from tests.texts import SHARED

MODELS = [Path(DEMO_MODEL), *sorted(file.parent for file in (SHARED / "tokenizers").glob("*/tokenizer_config.json"))]
TALK = [{"role": "user", "content": "Hé"}, {"role": "assistant", "content": "So"}, {"role": "user", "content": "x"}]


async def fetch_tokenizer_info(tokenizer: Tokenizer, **options: Any) -> dict[str, Any]:
    config = ServerConfig(**options)
    files = ServedModelSpec(config, tokenizer, tokenizer.vocab_size, {})
    app = create_app(EngineClient(FakeEngine(hashed(b"a"))), files, launch_process=FORKED)
    async with open_http(app) as http:
        answer = await http.get("/tokenizer_info")
        assert answer.status_code == 200
        return dict(json.loads(answer.content))


@pytest.mark.few(2)
@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
async def test_tokenizer_info_loads_in_transformers_like_model_files(folder: Path, tmp_path: Path) -> None:
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("its tokenizer.json is not there")
    info = await fetch_tokenizer_info(Tokenizer.from_pretrained(folder))
    shutil.copy(folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(info))
    expected, actual = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path)
    for role in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(actual, role) == getattr(expected, role)
        assert info.get(role) == getattr(expected, role), "a string, or null"
    added = {int(key): entry["content"] for key, entry in info["added_tokens_decoder"].items()}
    assert added == {key: str(token) for key, token in expected.added_tokens_decoder.items()}
    assert info["tokenizer_class"]
    assert 0 < info["model_max_length"] <= 2**53
    if expected.chat_template is not None:
        written = actual.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
        assert written == expected.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert actual("Hé <|im_end|> </s>").input_ids == expected("Hé <|im_end|> </s>").input_ids


async def test_tokenizer_info_returns_configured_chat_template(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}!")
    assert (await fetch_tokenizer_info(Tokenizer.from_pretrained(DEMO_MODEL, str(template))))[
        "chat_template"
    ] == "{{ messages[0].content }}!"


async def test_tokenizer_info_omits_paths_and_meaningless_limits(tmp_path: Path) -> None:
    shutil.copy(Path(DEMO_MODEL) / "tokenizer.json", tmp_path)
    config = {"name_or_path": "/home/x", "vocab_file": "/home/x/v", "model_max_length": 10**30}
    config["eos_token"] = "<|im_end|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    info = await fetch_tokenizer_info(Tokenizer.from_pretrained(tmp_path))
    assert not {"name_or_path", "vocab_file"} & info.keys()
    assert (info["model_max_length"], info["eos_token"], info["bos_token"]) == (512, "<|im_end|>", None)


async def test_tokenizer_info_works_without_tokenizer_config(api: Api) -> None:
    info = (await api.http.get("/tokenizer_info")).json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<|bos|>", "<|im_end|>", None)
    assert info["chat_template"]
    eos = (await api.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False}))["tokens"]
    assert eos == [258], "as lm-eval asks for the token's id"
