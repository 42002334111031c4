"""Every vision family against transformers' processor and model, and the batch invariance of its answers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from quire.engine.checkpoint.model_resolver import read_model_config, read_raw_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.checkpoint.tensor_headers import CheckpointSize, read_checkpoint_size, vision_tensor_name
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ModelError
from quire.engine.common.types import EngineCoreRequest
from quire.engine.encoders.vision.tower import TowerBuildContext, normalize_pixels
from quire.engine.encoders.vision.tower_factory import make_tower
from quire.engine.engine_core import EngineCore
from quire.engine.families.base.vision.vision_spec import InvalidImage
from quire.engine.images.multimodal_prompt import RequestImage, make_multimodal_prompt_builder
from quire.engine.images.vision_config import read_vision_spec
from quire.engine.layers.schemes import UnquantizedScheme
from quire.engine.lora.adapter_store import AdapterStore
from quire.engine.lora.target_modules import adaptable_modules
from quire.engine.offline.llm import LLM
from quire.engine.offline.params import SamplingParams
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.worker.draft_head_runner import DraftHeadRunner
from quire.kernels.reference import ReferenceBackend
from tests.adapters import merge, save_adapter
from tests.engine.harness import Answer, request, run
from tests.engine.test_speculation import always
from tests.tiny_vision import picture
from tests.vision_families import FAMILIES, config_of, expected, image_processor, save_family

SIZES = [(64, 48), (31, 90), (40, 40), (300, 20), (3, 40)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_chat_about_several_images_equals_transformers(name: str, tmp_path: Path) -> None:
    path = save_family(tmp_path, name)
    llm = LLM(path, dtype="float32", num_kv_blocks=256)
    images = [picture(1, 90, 60), picture(2, 31, 80), picture(3, 48, 48)]
    image_parts = [{"type": "image", "image": each} for each in images]
    first = [{"type": "text", "text": "Compare "}, image_parts[0], {"type": "text", "text": " with "}, image_parts[1]]
    answered = [{"type": "text", "text": "Two."}]
    messages = [("user", first), ("assistant", answered), ("user", [image_parts[2], {"type": "text", "text": "?"}])]
    (answer,) = llm.chat([{"role": role, "content": content} for role, content in messages], GREEDY, use_tqdm=False)
    template_messages = [
        {"role": role, "content": [part if part["type"] == "text" else {"type": "image"} for part in content]}
        for role, content in messages
    ]
    tokens = list(answer.outputs[0].token_ids)
    ids, logprobs = expected(path, name, template_messages, images, tokens)
    assert answer.prompt_token_ids == ids
    assert answer.prompt_logprobs is not None
    assert answer.outputs[0].logprobs is not None
    actual = [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]
    for place, (row, token) in enumerate(zip(actual, [*ids[1:], *tokens], strict=True)):
        assert row is not None
        # Recurrences magnify float32's rounding, in transformers too; the sums' order differs between processors.
        tolerance = {"qwen3_5_moe": 5e-4, "qwen3_5": 2e-4}.get(name, 1e-4)
        assert row[token].logprob == pytest.approx(logprobs[place, token].item(), abs=tolerance, rel=2e-5), place
    assert logprobs[len(ids) - 1 : -1].argmax(-1).tolist() == tokens


@pytest.mark.few(5)
@pytest.mark.parametrize("name", FAMILIES)
def test_image_pixels_equal_transformers_processor(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    (tmp_path / "config.json").write_text(json.dumps(config_of(name).to_dict()))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(family.preparing))
    vision = read_vision_spec(tmp_path)
    assert vision is not None
    processor = image_processor(name)
    for width, height in SIZES:
        image = picture(width, width, height)
        pixels_of_tiles = [
            normalize_pixels(each, vision.normalization).numpy()
            for each in vision.make_layout(width, height).iter_resized_images(image)
        ]
        expected_inputs = processor(images=[image], return_tensors="np")
        pixels = _as_squares(expected_inputs, pixels_of_tiles[0].shape, family.preparing)
        np.testing.assert_allclose(np.stack(pixels_of_tiles), pixels, atol=1e-5)


def _as_squares(wanted: Any, shape: tuple[int, ...], preparing: dict[str, Any]) -> np.ndarray:
    """transformers' pixel_values as [images, height, width, 3]."""
    pixels = wanted["pixel_values"]
    if "image_position_ids" in wanted:  # of Gemma 4
        size = preparing["patch_size"]
        rows, columns = shape[0] // size, shape[1] // size
        cut = pixels[0, : rows * columns].reshape(rows, columns, size, size, 3)
        assert wanted["num_soft_tokens_per_image"] == [rows * columns // preparing["pooling_kernel_size"] ** 2]
        return cut.transpose(0, 2, 1, 3, 4).reshape(1, *shape)
    if "image_grid_thw" not in wanted:
        return pixels.reshape(-1, *pixels.shape[-3:]).transpose(0, 2, 3, 1).reshape(-1, *shape)
    patch, merge = preparing["patch_size"], preparing["merge_size"]
    _, rows, columns = wanted["image_grid_thw"][0]
    assert (rows * patch, columns * patch, 3) == shape
    cut = pixels.reshape(rows // merge, columns // merge, merge, merge, 3, 2, patch, patch)[:, :, :, :, :, 0]
    return cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(1, *shape)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", FAMILIES)
def test_tower_spec_gives_shapes_of_saved_weights(name: str, tmp_path: Path) -> None:
    path = save_family(tmp_path, name)
    vision = read_vision_spec(path)
    assert vision is not None
    scheme = UnquantizedScheme(ReferenceBackend(), torch.float32)
    tower = make_tower(vision, TowerBuildContext(ReferenceBackend(), scheme, torch.float32, 64, int))
    saved = {
        tower_name: tuple(tensor.shape)
        for name, tensor in load_file(path / "model.safetensors").items()
        if (tower_name := vision_tensor_name(name)) is not None and not tower_name.startswith(tower.unused_prefixes)
    }
    assert vision.parameter_shapes(64) == saved
    assert {name: each.shape for name, each in tower.parameters().items()} == saved
    sizes = read_model_sizes(read_raw_config(str(path))[0])
    assert sizes.tower_parameters == sum(map(math.prod, saved.values()))
    assert read_checkpoint_size(path) == CheckpointSize(sizes.num_parameters, 0)


def test_tower_output_of_another_size_than_text_is_refused(tmp_path: Path) -> None:
    path = save_family(tmp_path, "qwen3_vl")
    raw = json.loads((path / "config.json").read_text())
    raw["vision_config"]["out_hidden_size"] = 96
    with pytest.raises(ModelError, match="out_hidden_size is 96, the text model's hidden_size 64"):
        read_model_sizes(raw)


def about(path: Path, name: str, asked: str, *pictures: int, more: str = "", **options: object) -> EngineCoreRequest:
    tokenizer = Tokenizer.from_pretrained(path)
    reader = make_multimodal_prompt_builder(path, tokenizer)
    assert reader is not None
    text = "Look: " + "".join(f"see {FAMILIES[name].written} and " for _ in pictures) + f"say what it is{more}"
    prompt = reader.make_multimodal_prompt(
        text, [RequestImage("image", picture(seed, 70, 50)) for seed in pictures], tokenizer.encode
    )
    base_request = request(
        asked, prompt.token_ids, **{"max_tokens": 12, "logprobs": 2, "prompt_logprobs": None, **options}
    )
    return msgspec.structs.replace(base_request, spans=prompt.spans, images=prompt.images)


def engine(path: Path, make_drafter: Any = None, **options: object) -> EngineCore:
    config = EngineConfig(model=str(path), **{"num_kv_blocks": 96, "dtype": "bfloat16", **options})
    return EngineCore(config, make_drafter=make_drafter)


def bits(answers: dict[str, Answer]) -> dict[str, object]:
    return {name: (each.ids, each.logprobs) for name, each in answers.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_image_logprobs_of_family_do_not_depend_on_batching(name: str, tmp_path: Path) -> None:
    """Alone, in a batch, in chunks, from the cache, after a preemption, and replayed with emitted tokens."""
    path = save_family(tmp_path, name)
    requests = [about(path, name, "a", 1), about(path, name, "b", 2, 3), about(path, name, "c", 1, 4)]
    requests.append(request("d", [5, 6, 7], logprobs=2))
    expected_answers = {each.id: run(engine(path, enable_prefix_caching=False), [each])[each.id] for each in requests}
    least, vision = max(span.count for span in requests[0].spans), read_vision_spec(path)
    assert vision is not None
    least = max(least, vision.max_bidirectional_tokens if vision.is_bidirectional else 0)
    chunked = {"long_prefill_token_threshold": least if requests[0].spans[0].is_bidirectional else 7}
    for options in ({}, {"max_num_batched_tokens": least + 3, "max_num_seqs": 3}, chunked):
        assert bits(run(engine(path, **options), requests)) == bits(expected_answers), options
    served = engine(path)
    run(served, requests[:1])
    # LLaVA-OneVision cuts an image into tiles only if it is the only one.
    follow_up = about(path, name, "a", *((1,) if name == "llava_onevision" else (1, 2)), more="? and why")
    actual = run(served, [follow_up])["a"]
    # Qwen3.5's state snapshots are farther apart than these prompts are long.
    assert actual.cached_tokens > requests[0].spans[-1].start or name.startswith("qwen3_5")
    alone = run(engine(path, enable_prefix_caching=False), [follow_up])["a"]
    assert (actual.ids, actual.logprobs) == (alone.ids, alone.logprobs)
    second_answer = run(served, [requests[1]])["b"]
    assert second_answer.cached_tokens <= requests[1].spans[0].start
    assert (second_answer.ids, second_answer.logprobs) == (expected_answers["b"].ids, expected_answers["b"].logprobs)
    many = [about(path, name, f"{index}", 1, max_tokens=100, temperature=1.0, seed=index) for index in range(3)]
    single = engine(path, enable_prefix_caching=False)
    expected_long = {each.id: run(single, [each])[each.id] for each in many}
    prompt = len(many[0].prompt_ids)
    blocks = max(2 * -(-prompt // 16), -(-(prompt + 100) // 16)) + 1
    small_engine = engine(path, num_kv_blocks=blocks, enable_prefix_caching=False)
    assert run(small_engine, many) == expected_long
    assert small_engine.engine_stats.preemptions > 0
    replayed = msgspec.structs.replace(requests[2], emitted_ids=expected_answers["c"].ids[:5])
    assert run(engine(path), [replayed])["c"].ids == expected_answers["c"].ids[5:]


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "qwen3_vl", "mistral3"])
@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"kv_cache_dtype": "int8"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=str,
)
def test_image_logprobs_with_int8_or_drafts_do_not_depend_on_batch(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path = save_family(tmp_path, name)
    requests = [about(path, name, f"{index}", index, max_tokens=40) for index in range(3)]
    plain = {} if "speculative_config" in options else options
    expected_answers = {
        each.id: run(engine(path, enable_prefix_caching=False, **plain), [each])[each.id] for each in requests
    }
    least = max(span.count for span in requests[0].spans)
    served = engine(path, long_prefill_token_threshold=least, **options)
    assert bits(run(served, requests)) == bits(expected_answers)


def test_mtp_drafts_after_images_change_no_token(tmp_path: Path) -> None:
    """Drafts change no token, and their RoPE positions are those of the tokens they predict."""
    path = save_family(tmp_path, "qwen3_5")
    tensors, layer = load_file(path / "model.safetensors"), "model.language_model.layers.1."
    mtp_layer = {
        f"mtp.layers.0.{name.removeprefix(layer)}": each.clone() for name, each in tensors.items() if layer in name
    }
    norms = {f"mtp.{name}.weight": torch.zeros(64) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    join = {"mtp.fc.weight": torch.eye(64, 128)}
    save_file({**tensors, **mtp_layer, **norms, **join}, path / "model.safetensors", {"format": "pt"})
    requests = [about(path, "qwen3_5", f"{index}", index, max_tokens=30) for index in range(3)]
    expected_answers = {each.id: run(engine(path, enable_prefix_caching=False), [each])[each.id] for each in requests}
    guessing = engine(path, always, speculative_config={"method": "mtp", "num_speculative_tokens": 3})
    heads = guessing._device_drafter
    assert isinstance(heads, DraftHeadRunner)
    assert bits(run(guessing, requests)) == bits(expected_answers)
    assert guessing.engine_stats.draft_tokens > 10
    rope_offsets = heads._input_batch._rope_offsets
    assert rope_offsets is not None
    # An image of n x m tokens takes max(n, m) positions.
    vision = read_vision_spec(path)
    assert vision is not None
    grids = [[vision.token_rows_and_columns(each) for each in request.images] for request in requests]
    expected_offsets = {sum(max(grid) - math.prod(grid) for grid in request) for request in grids}
    assert {int(each) for each in rope_offsets} | {0} == expected_offsets | {0} != {0}


@pytest.mark.parametrize(
    ("name", "tower", "outer", "preparing", "said"),
    [
        ("gemma3", {"num_attention_heads": 5}, {}, {}, "num_attention_heads: 5 do not divide hidden_size"),
        ("gemma3", {}, {"mm_tokens_per_image": 17}, {}, "mm_tokens_per_image: 17 are no square"),
        ("gemma3", {}, {}, {"do_pan_and_scan": True}, "do_pan_and_scan: true is not served"),
        ("gemma3", {}, {}, {"size": {"height": 50, "width": 50}}, "size: the tower reads 48 x 48 pixels"),
        ("qwen2_5_vl", {"window_size": 4}, {}, {}, "window_size: a window of 4 pixels"),
        ("qwen2_5_vl", {}, {}, {"patch_size": 7}, "patch_size is 4, in preprocessor_config.json 7"),
        ("qwen3_vl", {"deepstack_visual_indexes": [0, 9]}, {}, {}, "deepstack_visual_indexes"),
        ("qwen3_vl", {"num_position_embeddings": 26}, {}, {}, "num_position_embeddings: 26 are no square"),
        ("llava", {"model_type": "vit"}, {}, {}, "model_type: 'vit' is not served"),
        ("llava", {}, {"vision_feature_layer": [1, 2]}, {}, "vision_feature_layer: one layer is served"),
        ("llava", {}, {}, {"do_pad": True}, "do_pad: true is not served"),
        ("llava_next", {}, {"image_grid_pinpoints": [[25, 24]]}, {}, "image_grid_pinpoints: 25 x 24"),
        ("llava_onevision", {}, {"vision_aspect_ratio": "pad"}, {}, "vision_aspect_ratio: 'pad' is not served"),
        ("mistral3", {"hidden_size": 54}, {}, {}, "heads of 18 cannot be rotated"),
        ("internvl", {"norm_type": "x"}, {}, {}, "norm_type: 'x' is not served"),
        ("internvl", {}, {"vision_feature_layer": -2}, {}, "vision_feature_layer: -1 is served, got -2"),
    ],
)
def test_invalid_vision_config_is_rejected(
    name: str, tower: dict[str, Any], outer: dict[str, Any], preparing: dict[str, Any], said: str, tmp_path: Path
) -> None:
    content = config_of(name).to_dict()
    content = {**content, **outer, "vision_config": {**content["vision_config"], **tower}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**FAMILIES[name].preparing, **preparing}))
    with pytest.raises(ModelError, match=re.escape(said)):
        read_vision_spec(tmp_path)


@pytest.mark.parametrize(
    ("name", "size"), [("qwen2_5_vl", (900, 4)), ("llava", (900, 4)), ("llava_onevision", (9000, 2))]
)
def test_too_narrow_image_is_rejected(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(name).to_dict()))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(FAMILIES[name].preparing))
    vision = read_vision_spec(tmp_path)
    assert vision is not None
    with pytest.raises(InvalidImage, match="the image has"):
        vision.make_layout(*size, has_other_images=True)


def test_images_are_disabled_if_token_budget_is_under_one_image(tmp_path: Path) -> None:
    served = engine(save_family(tmp_path, "gemma3"), max_num_batched_tokens=12)
    assert served.info.no_images == "max_num_batched_tokens is 12, and an image's 16 tokens are computed in one step"


def test_lora_on_language_model_of_vision_model_equals_merged_model(tmp_path: Path) -> None:
    """In one batch with a request without an adapter."""
    path = save_family(tmp_path / "model", "qwen2_5_vl")
    folder = save_adapter(
        tmp_path / "a", AutoModelForImageTextToText.from_pretrained(path), 8, targets=("q_proj", "o_proj"), seed=3
    )
    (tmp_path / "spool").mkdir()
    adapter = AdapterStore(tmp_path / "spool", adaptable_modules(read_model_config(path)), 64).add_adapter(
        "a", str(folder)
    )
    requests = [about(path, "qwen2_5_vl", "a", 1), about(path, "qwen2_5_vl", "b", 1)]
    served = engine(path, dtype="float32", enable_lora=True, max_lora_rank=64)
    actual = run(served, [msgspec.structs.replace(requests[0], adapter=adapter), requests[1]])
    merge(AutoModelForImageTextToText.from_pretrained(path), folder).save_pretrained(tmp_path / "merged")
    expected_answer = run(engine(tmp_path / "merged", dtype="float32"), requests[:1])["a"]
    assert actual["a"].ids == expected_answer.ids != actual["b"].ids
    assert [each.logprob for each in actual["a"].logprobs] == pytest.approx(
        [each.logprob for each in expected_answer.logprobs], abs=1e-4, rel=2e-5
    )
