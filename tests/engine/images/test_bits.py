"""A request with images has the same logprobs alone, in a batch, in chunks, from the cache and after a preemption."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from quire.engine.checkpoint.model_resolver import read_raw_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.checkpoint.tensor_headers import vision_tensor_name
from quire.engine.client.messages import Submit, attach_images, decode_to_engine, detach_images
from quire.engine.client.replica_router import prefix_pieces
from quire.engine.common.config import EngineConfig
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.engine.images.multimodal_prompt import MultimodalPromptBuilder, RequestImage, make_multimodal_prompt_builder
from quire.engine.images.vision_config import read_vision_spec
from quire.engine.processes.utility_calls import encode
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.worker.images.encoder_cache import ImageEncoderCache
from tests.engine.harness import Answer, request, run
from tests.tiny_vision import MARK, picture, save_tiny_vision


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision(tmp_path_factory.mktemp("vision"), max_position_embeddings=2048)


def image_request(path: Path, name: str, *pictures: int, more: str = "", **options: object) -> EngineCoreRequest:
    """A question about images, each cut into several tiles."""
    tokenizer = Tokenizer.from_pretrained(path)
    reader = make_multimodal_prompt_builder(path, tokenizer)
    assert isinstance(reader, MultimodalPromptBuilder)
    text = "Look at what follows: " + "".join(f"see {MARK} and " for _ in pictures) + f"say what it is{more}"
    prompt = reader.make_multimodal_prompt(
        text, [RequestImage("image", picture(seed, 120, 70)) for seed in pictures], tokenizer.encode
    )
    base_request = request(
        name, prompt.token_ids, **{"max_tokens": 12, "logprobs": 2, "prompt_logprobs": None, **options}
    )
    return msgspec.structs.replace(base_request, spans=prompt.spans, images=prompt.images)


def engine(path: Path, **options: object) -> EngineCore:
    return EngineCore(EngineConfig(model=str(path), **{"num_kv_blocks": 64, "dtype": "bfloat16", **options}))


def tokens_and_logprobs(answers: dict[str, Answer]) -> dict[str, object]:
    return {name: (each.ids, each.logprobs) for name, each in answers.items()}


def run_alone(path: Path, asked: EngineCoreRequest) -> Answer:
    return run(engine(path, enable_prefix_caching=False), [asked])[asked.id]


def num_encoded_tiles(computed: EngineCore) -> int:
    """The number of tiles that the tower has encoded."""
    features = computed.executor._encoder_cache  # type: ignore[attr-defined]
    assert isinstance(features, ImageEncoderCache)
    return features.num_encoded


def test_image_logprobs_do_not_depend_on_batch_or_chunks(path: Path) -> None:
    requests = [
        image_request(path, "a", 1),
        image_request(path, "b", 2, 3),
        image_request(path, "c", 1, 4),
        request("d", [5, 6, 7], logprobs=2),
    ]
    expected = tokens_and_logprobs({each.id: run_alone(path, each) for each in requests})
    for options in (
        {},
        {"max_num_batched_tokens": 23, "max_num_seqs": 3},
        {"long_prefill_token_threshold": 7},
    ):
        assert tokens_and_logprobs(run(engine(path, **options), requests)) == expected, options


def test_prefix_cache_hits_same_image_and_misses_other_image(path: Path) -> None:
    served = engine(path)
    first, again = image_request(path, "a", 1, 2), image_request(path, "b", 1, 2, more="? and why")
    other = image_request(path, "c", 1, 3)
    run(served, [first])
    tiles = num_encoded_tiles(served)
    assert tiles == len(first.images)
    follow_up = run(served, [again])["b"]
    assert follow_up.cached_tokens >= (len(first.prompt_ids) - 16) // 16 * 16
    assert num_encoded_tiles(served) == tiles  # no tile is encoded again
    assert follow_up.ids == run_alone(path, again).ids
    # The prompts' tokens are equal; their images are equal up to the end of the first one.
    assert other.prompt_ids == first.prompt_ids
    other_answer = run(served, [other])["c"]
    second = first.spans[len(first.spans) // 2]
    assert 0 < other_answer.cached_tokens <= second.start
    expected = run_alone(path, other)
    assert (other_answer.ids, other_answer.logprobs) == (expected.ids, expected.logprobs)


def test_image_answers_survive_preemption(path: Path) -> None:
    requests = [image_request(path, f"{index}", 1 + index, max_tokens=40) for index in range(3)]
    expected = {each.id: run_alone(path, each) for each in requests}
    blocks = -(-(len(requests[0].prompt_ids) + 1) // 16)  # all can start, but not all have room for their answers
    served = engine(path, num_kv_blocks=3 * blocks + 1, enable_prefix_caching=False)
    assert run(served, requests) == expected
    assert served.engine_stats.preemptions > 0


def test_evicted_image_features_are_encoded_again(path: Path) -> None:
    requests = [image_request(path, "a", 1, 2), image_request(path, "b", 3)]  # these evict each other's features
    expected = {each.id: run_alone(path, each) for each in requests}
    served = engine(path, long_prefill_token_threshold=5, enable_prefix_caching=False)
    served.executor._encoder_cache.max_bytes = 0  # type: ignore[attr-defined]
    assert run(served, requests) == expected
    assert num_encoded_tiles(served) > sum(len(each.images) for each in requests)


def test_image_encoding_is_chunked_without_stalling_decodes(path: Path) -> None:
    """Encoder work is divided among steps like a long prompt's tokens, together with other requests' tokens."""
    requests = image_request(path, "a", 1)
    works = {each.encoder_cost for each in requests.images}
    assert works == {86}  # 64 patches, each of which sees 64: 64 * (1 + 64 / (4 * 48)), rounded up
    served, calm = engine(path, max_num_batched_tokens=20), request("calm", [1, 2, 3], max_tokens=200)
    served.add_request(calm)
    served.step()
    served.add_request(requests)
    looks, answered = 0, dict[str, int]()
    while served.has_work and not answered.get("a"):
        before = answered.get("calm", 0)
        for output in served.step():
            answered[output.id] = answered.get(output.id, 0) + len(output.new_ids)
        assert answered["calm"] == before + 1  # the decode does not wait for the image
        assert served.last_step_record is not None
        assert served.last_step_record.num_tokens <= 20
        looks += served.last_step_record.num_tokens == 1
    # With 19 tokens of budget per step, a tile takes four or five steps; the first and last may also compute its
    # tokens.
    assert looks >= len(requests.images) * 2
    assert num_encoded_tiles(served) == len(requests.images)


def test_encoder_cache_is_separate_per_cache_salt(path: Path) -> None:
    served = engine(path)
    run(served, [image_request(path, "a", 1)])
    before = num_encoded_tiles(served)
    requests = msgspec.structs.replace(image_request(path, "b", 1), cache_salt="x")
    assert run(served, [requests])["b"].cached_tokens == 0
    assert num_encoded_tiles(served) == 2 * before


def test_image_shared_by_requests_is_sent_to_engine_once(path: Path) -> None:
    one = image_request(path, "a", 1)
    requests = [one, msgspec.structs.replace(one, id="b"), request("c", [1])]
    message = encode(Submit(*detach_images(requests)))
    pixels = sum(len(image.pixels) for image in one.images)
    assert pixels < len(message) < 1.5 * pixels
    sent = decode_to_engine(message)
    assert isinstance(sent, Submit)
    assert attach_images(sent.requests, sent.images) == requests


def test_prefix_pieces_differ_by_image(path: Path) -> None:
    one, other = prefix_pieces(image_request(path, "a", 1)), prefix_pieces(image_request(path, "b", 2))
    assert one[0] == other[0]
    assert one[-1] != other[-1]
    assert one == prefix_pieces(image_request(path, "c", 1))


def test_model_sizes_count_tower_parameters(path: Path) -> None:
    vision = read_vision_spec(path)
    assert vision is not None
    saved = {name: tensor for name, tensor in load_file(path / "model.safetensors").items() if vision_tensor_name(name)}
    assert {vision_tensor_name(name): tuple(tensor.shape) for name, tensor in saved.items()} == (
        vision.parameter_shapes(64)
    )
    numbers = sum(tensor.numel() for tensor in saved.values())
    assert read_model_sizes(read_raw_config(str(path))[0]).tower_parameters == numbers
