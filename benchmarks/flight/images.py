"""Image models: log probabilities against transformers', same tokens from graphs, cache and chunks, and speed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image as Pillow

from benchmarks.common.engines import dummy, folder_of, request
from benchmarks.flight.finding import KERNELS_ALONE, Say, close, tried
from quire.engine.common.types import EngineCoreRequest, MediaSpan
from quire.engine.families.base.vision.vision_spec import VisionSpec
from quire.engine.images.vision_config import read_vision_spec
from quire.engine.offline.llm import LLM
from quire.engine.offline.outputs import RequestOutput
from quire.engine.offline.params import SamplingParams
from tests.engine.harness import run
from tests.vision_families import expected, save_family

_FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "mistral3", "internvl", "llava_onevision")
"""Cover tower windows and 2D positions, features of early layers, image tokens that attend to each other, rows, and
tiles.
"""
_QWEN: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "vocab_size": 152064,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "image_token_id": 151655,
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                      "out_hidden_size": 2048, "patch_size": 14, "window_size": 112,
                      "fullatt_block_indexes": [7, 15, 23, 31]},
}  # fmt: skip
"""Qwen2.5-VL-3B with four text layers."""
_SMALL: dict[str, Any] = {
    **{"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "image_token_id": 7, "num_hidden_layers": 1},
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]},
}
_SMALL_TOWER = {
    **{"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 64},
    "fullatt_block_indexes": [1],
}
_PICTURES = ((90, 60), (31, 80), (48, 48))
"""Width and height."""


def images(device: torch.device, say: Say) -> None:
    """Each check runs for all families before the next."""
    torch.backends.cuda.matmul.allow_tf32 = False
    tried(say, "an image for a tower of Qwen2.5-VL's size", partial(_timed, device))
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: save_family(Path(folder, name), name) for name in _FAMILIES}
        for name, path in paths.items():
            tried(say, f"{name}, {torch.float32}", partial(_parity, path, name, torch.float32, device))
        for name, path in paths.items():
            tried(say, f"{name}: graphs, cache, chunks", partial(_same, path, device))
        for name, path in paths.items():
            tried(say, f"{name}, {torch.bfloat16}", partial(_parity, path, name, torch.bfloat16, device))


def _llm(path: Path, device: torch.device, **options: Any) -> LLM:
    given = {"num_kv_blocks": 64, "max_num_seqs": 4, "warmup_seconds": KERNELS_ALONE} | options
    llm = LLM(path, device=device.type, **given)
    if why := llm.info.no_images:
        raise ValueError(why)
    return llm


def _talk(pictures: Sequence[Pillow.Image | None]) -> list[dict[str, Any]]:
    """None leaves a picture out."""
    shown = [{"type": "image"} | ({} if each is None else {"image": each}) for each in pictures]
    first = [{"type": "text", "text": "Compare "}, shown[0], {"type": "text", "text": " with "}, shown[1]]
    answered, last = [{"type": "text", "text": "Two."}], [shown[2], {"type": "text", "text": "?"}]
    return [
        {"role": role, "content": content}
        for role, content in (("user", first), ("assistant", answered), ("user", last))
    ]


def _pictures() -> list[Pillow.Image]:
    """Colored blocks."""
    found = []
    for seed, size in enumerate(_PICTURES):
        colours = np.random.default_rng(seed).integers(0, 256, (7, 5, 3), dtype=np.uint8)
        found.append(Pillow.fromarray(colours).resize(size, Pillow.Resampling.BILINEAR))
    return found


def _answer(llm: LLM, *, of_prompt: bool = False) -> RequestOutput:
    """`of_prompt`: with the prompt's log probabilities, which recomputes it."""
    told = 0 if of_prompt else None
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0, prompt_logprobs=told)
    (found,) = llm.chat(_talk(_pictures()), params, use_tqdm=False)
    return found


def _parity(path: Path, name: str, dtype: torch.dtype, device: torch.device) -> str:
    """Compares log probabilities of prompt and answer with transformers' in float64."""
    llm = _llm(path, device, dtype=str(dtype).removeprefix("torch."))
    answer, backend = _answer(llm, of_prompt=True), llm.info.backend
    tokens = list(answer.outputs[0].token_ids)
    shown = _talk([None] * len(_PICTURES)), _pictures(), tokens
    ids, wanted = expected(path, name, *shown)
    if list(answer.prompt_token_ids or ()) != ids:
        raise ValueError("the prompt has other tokens than transformers'")
    told = torch.tensor([*ids[1:], *tokens])
    rows = [*(answer.prompt_logprobs or ())[1:], *(answer.outputs[0].logprobs or ())]
    ours = torch.tensor([row[token].logprob for row, token in zip(rows, told.tolist(), strict=True) if row])
    theirs = wanted if dtype == torch.float32 else expected(path, name, *shown, dtype)[1]
    found = [each[:-1].gather(1, told[:, None]).squeeze(1) for each in (wanted, theirs)]
    return f"{close(ours, *found, dtype)}; {backend}"


def _same(path: Path, device: torch.device) -> str:
    fixed = {"deterministic": True} if device.type == "cuda" else {}
    graphed = _llm(path, device, warmup_seconds=20.0, **fixed)  # compiles what the next engine needs
    wanted = _answer(_llm(path, device, enforce_eager=True, enable_prefix_caching=False, **fixed)).outputs[0].token_ids
    cut = _llm(path, device, max_num_batched_tokens=64, **fixed)
    for what, llm in (("graphs", graphed), ("the cache", graphed), ("chunks", cut)):
        found = _answer(llm)
        if found.outputs[0].token_ids != wanted:
            raise ValueError(f"{what}: {found.outputs[0].token_ids} and not {wanted}")
        if what == "the cache" and not found.num_cached_tokens:
            raise ValueError("nothing hit")
    return "the same tokens"


def _timed(device: torch.device) -> str:
    """Seconds to first token after a new image, best of five."""
    small = device.type == "cpu"
    config = _QWEN | (_SMALL if small else {})
    side, vision_config = 112 if small else 1024, _QWEN["vision_config"] | (_SMALL_TOWER if small else {})
    with folder_of(config | {"vision_config": vision_config}) as folder:
        vision = read_vision_spec(folder)
        assert vision is not None
        engine = dummy(folder, device=device.type, num_kv_blocks=64 if small else 512)
        times = []
        for seed in range(6):
            asked = _shown(vision, seed, side)
            began = time.perf_counter()
            run(engine, [asked])
            times.append(time.perf_counter() - began)
        tokens, work = asked.spans[0].count, asked.images[0].encoder_cost
        engine.shut_down()
    return f"{side} x {side} pixels, {tokens} tokens, {work} of a step's: {min(times[1:]):.3f} s"


def _shown(vision: VisionSpec, seed: int, side: int) -> EngineCoreRequest:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    layout = vision.make_layout(side, side)
    (content,) = layout.iter_resized_images(Pillow.fromarray(pixels))
    content = msgspec.structs.replace(content, encoder_cost=vision.encoder_cost(content))
    ids = [5, *[vision.image_token_id] * layout.num_tokens, 6]
    asked = request(str(seed), ids, 1)
    return msgspec.structs.replace(asked, spans=(MediaSpan(1, layout.num_tokens, content.digest),), images=(content,))
