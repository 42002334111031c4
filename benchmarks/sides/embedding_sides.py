"""One side of benchmarks/embeddings.py: `python embedding_sides.py KIND MODEL TEXTS`.

Prints a line when loaded. For each line read, it embeds all texts once and prints wall and processor seconds as JSON.
KIND: quire:DTYPE, or sentence-transformers' torch, onnx, openvino, or openvino:f32 (openvino multiplies in bfloat16 if
the processor does).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

Embed = Callable[[Sequence[str]], np.ndarray]


def quire(model: str, dtype: str) -> Embed:
    from quire import LLM

    llm = LLM(model, dtype=dtype)

    def embed(texts: Sequence[str]) -> np.ndarray:
        found = llm.embed(list(texts), truncate_prompt_tokens=-1, use_tqdm=False)
        return np.array([each.outputs.embedding for each in found])

    return embed


def sentence_transformers(model: str, backend: str, precision: str) -> Embed:
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

    options = {"ov_config": {"INFERENCE_PRECISION_HINT": precision}} if precision else {}
    encoder = SentenceTransformer(model, device="cpu", backend=backend, model_kwargs=options)
    return lambda texts: np.array(encoder.encode(list(texts), show_progress_bar=False))


def main() -> None:
    kind, model, file = sys.argv[1:]
    name, _, detail = kind.partition(":")
    texts = json.loads(Path(file).read_text(encoding="utf-8"))
    embed = quire(model, detail) if name == "quire" else sentence_transformers(model, name, detail)
    embed(texts[:8])
    vectors = embed(texts)
    print(json.dumps(vectors[0].tolist()), flush=True)
    for _ in sys.stdin:
        began, worked = time.perf_counter(), time.process_time()
        embed(texts)
        print(json.dumps([time.perf_counter() - began, time.process_time() - worked]), flush=True)


if __name__ == "__main__":
    main()
