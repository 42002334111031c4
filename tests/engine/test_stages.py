"""Pipeline parallelism equals a single process bit for bit, for every family and feature."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replace_struct
from safetensors.torch import load_file, save_file

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.kv_cache_spec import attention_kv_cache_spec
from quire.engine.checkpoint.kv_cache_groups import KVCacheGroups, build_kv_cache_groups
from quire.engine.checkpoint.layer_placement import (
    layers_per_block_by_stage,
    split_layers_into_stages,
    stage_kv_cache_groups,
)
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import DEMO_MODEL, EngineConfig, SpeculativeConfig
from quire.engine.common.errors import ConfigError
from quire.engine.common.request_params import PoolingParams
from quire.engine.common.scheduler_output import SchedulerOutput
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.drafter import Drafter
from quire.engine.engine_core import EngineCore, free_engine_memory
from quire.engine.processes.heartbeat import NullHeartbeat
from quire.engine.spec_decode.drafter_factory import choose_drafter
from quire.engine.text.grammar_compiler import json_grammar
from quire.engine.worker import device_plan
from quire.engine.worker.device_plan import choose_device_plan
from quire.engine.worker.loading.model.loaded_model import ModelPart
from quire.engine.worker.loading.model_loader import load_model
from quire.engine.worker.ranks.pipeline import LastStageRunner
from quire.engine.worker.startup_steps.started_worker import StartedWorker
from tests.engine.harness import Answer, request, run
from tests.engine.ranks import thread_ranks
from tests.engine.test_ranks import (
    MISSING,
    SMALL,
    WAYS,
    WIDE,
    asked,
    asked_with_adapters,
    one_thread,
    prompts,
    quantized_model,
)
from tests.engine.test_windows import FOUR
from tests.gguf_models import write_gguf
from tests.tiers import pair_in_rotation
from tests.tiny_encoders import save_tiny_encoder
from tests.tiny_models import save_tiny_model

__all__ = ["one_thread", "thread_ranks"]
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.usefixtures("thread_ranks", "one_thread"),
]
BASE = {"dtype": "float32", "attention_backend": "cpu", "threads": 3}
SHAPES = ["llama", "llama-tied-biased", "qwen3", "gemma2", "gemma3", "mixtral", "gpt_oss", "lfm2", "qwen3_5"]
SHAPES += ["mamba2", "granite-hybrid", "nemotron_h", "nemotron_h-latent", "falcon_mamba", "jamba", "lfm3"]


def engine(path: Path | str, stages: int, make_drafter: Any = None, **settings: Any) -> EngineCore:
    config = EngineConfig(model=str(path), pipeline_parallel_size=stages, **BASE | settings)
    return EngineCore(config, make_drafter=make_drafter)


def comparable_answers(answers: dict[str, Answer]) -> dict[str, object]:
    return {name: (each.ids, each.logprobs, each.prompt_logprobs, each.finish_reason) for name, each in answers.items()}


@pytest.mark.few(2)
@pytest.mark.parametrize(("family", "stages"), pair_in_rotation(SHAPES, [2, 3]))
def test_pipeline_parallel_tokens_equal_single_process(family: str, stages: int, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, family)
    expected = comparable_answers(run(engine(path, 1, **SMALL), asked()))
    divided = engine(path, stages, **SMALL)
    assert comparable_answers(run(divided, asked())) == expected
    assert divided.engine_stats.preemptions > 0
    for each in asked():  # alone, after a reset of the prefix cache
        divided.reset_prefix_cache()
        assert comparable_answers(run(divided, [each])) == {each.id: expected[each.id]}


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
def test_pipeline_parallel_quantized_weights_equal_single_process(way: str, tmp_path: Path) -> None:
    path, settings = quantized_model(way, tmp_path)
    one, divided = engine(path, 1, **settings), engine(path, 2, **settings)
    assert comparable_answers(run(divided, asked())) == comparable_answers(run(one, asked()))
    assert (divided.info.weight_bytes, divided.info.quantization) == (one.info.weight_bytes, one.info.quantization)


def test_stages_use_chosen_kv_cache_dtype(tmp_path: Path) -> None:
    """By default a quantized GGUF file is computed in float32 with bfloat16 keys and values."""
    path = write_gguf(save_tiny_model(tmp_path / "m", "llama", **WIDE), tmp_path / "m.gguf", lambda _: "Q8_0")
    settings: dict[str, Any] = {"dtype": "auto", "attention_backend": "auto", "num_kv_blocks": 64, "max_model_len": 256}
    one, divided = engine(path, 1, **settings), engine(path, 2, **settings)
    assert comparable_answers(run(divided, asked())) == comparable_answers(run(one, asked()))
    assert (divided.info.dtype, divided.info.kv_cache_dtype) == ("float32", "bfloat16")


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv", ["auto", "int8", "fp8"])
def test_pipeline_parallel_grammars_equal_single_process(dtype: str, kv: str) -> None:
    params: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "logprobs": 1, "ignore_eos": False}
    texts = [[435, 1029, 261], [2497, 16, 371, 2661], list(range(300, 340))]
    requests = [request(str(i), ids, seed=i, **params) for i, ids in enumerate(texts)]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    requests += [request(f"json {i}", texts[0], seed=i, **params, grammar=json_grammar(schema)) for i in range(3)]
    settings: dict[str, Any] = {"dtype": dtype, "kv_cache_dtype": kv, "max_model_len": 256, "num_kv_blocks": 64}
    one, divided = engine(DEMO_MODEL, 1, **settings), engine(DEMO_MODEL, 2, make_grammar_drafter, **settings)
    assert comparable_answers(run(divided, requests)) == comparable_answers(run(one, requests))
    assert divided.info.kv_bytes == one.info.kv_bytes
    assert divided.info.weight_bytes == one.info.weight_bytes + read_head_bytes(DEMO_MODEL, dtype)
    assert divided.engine_stats.drafts > 0, "what grammars force is not guessed"


def make_grammar_drafter(worker: StartedWorker, _: EngineConfig) -> Drafter | None:
    """Drafts the tokens that grammars force, whatever the cost."""
    costs = [(1, 1.0), (64, 1.001)]
    return choose_drafter(SpeculativeConfig(method="grammar"), costs, None, worker.get_grammar_compiler)


def read_head_bytes(path: str, dtype: str) -> int:
    """Bytes of a tied head, which the first and the last stage both hold."""
    config = read_model_config(Path(path))
    return config.tie_embeddings * config.vocab_size * config.hidden_size * {"float32": 4, "bfloat16": 2}[dtype]


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_pipeline_parallel_sliding_windows_equal_single_process(
    kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage has layers of only some KV cache groups."""
    plain = device_plan.decoder_spec
    monkeypatch.setattr(
        device_plan,
        "decoder_spec",
        lambda config: plain(config).replace_sublayer_fields(AttentionLayerSpec, window=[*FOUR]),
    )
    path = save_tiny_model(tmp_path, "gemma2")
    settings: dict[str, Any] = {"kv_cache_dtype": kv, "num_kv_blocks": 20, "max_model_len": 280}
    settings |= {"max_num_batched_tokens": 16}
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 300, (240,), generator=generator).tolist()
    requests = [request(str(length), ids[:length], max_tokens=30, logprobs=0) for length in (1, 20, 130, 240)]
    one, divided = engine(path, 1, **settings), engine(path, 2, **settings)
    assert one.info.page_groups == divided.info.page_groups == 4
    assert comparable_answers(run(divided, requests)) == comparable_answers(run(one, requests))


def test_pipeline_parallel_lora_equals_single_process(tmp_path: Path) -> None:
    path, requests = asked_with_adapters(tmp_path)
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64, **SMALL}
    expected = comparable_answers(run(engine(path, 1, **lora), requests))
    for stages in (2, 3):
        assert comparable_answers(run(engine(path, stages, **lora), requests)) == expected


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_pipeline_parallel_drafts_do_not_change_tokens(method: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "llama")
    settings: dict[str, Any] = {"num_kv_blocks": 96, "max_model_len": 128}
    repeating = [request(f"again {i}", [5, 6, 7, 8] * (4 + i), max_tokens=40, logprobs=0) for i in range(4)]
    expected = comparable_answers(run(engine(path, 1, **settings), asked() + repeating))
    guessing = engine(path, 2, **settings, speculative_config=method)
    assert comparable_answers(run(guessing, asked() + repeating)) == expected


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_pipeline_parallel_vectors_equal_single_process(kind: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "qwen3")
    requests = [
        EngineCoreRequest(id=str(i), prompt_ids=ids, params=PoolingParams(), seed=0) for i, ids in enumerate(prompts())
    ]

    def vectors(stages: int) -> dict[str, list[float]]:
        made, found = engine(path, stages, runner="pooling", pooling_type=kind), {}
        for each in requests:
            made.add_request(each)
        while made.has_work:
            outputs = [each for each in made.step() if each.vector is not None]
            found |= {each.id: np.frombuffer(each.vector, "<f4").tolist() for each in outputs}
        return found

    assert vectors(2) == vectors(1)


def watch_launches(made: EngineCore, each: Callable[[SchedulerOutput, list[SchedulerOutput]], None]) -> LastStageRunner:
    """Before every launch, call `each` with the batch and those in flight."""
    runner = made.executor
    assert isinstance(runner, LastStageRunner)
    launch = runner.launch

    def seen(batch: SchedulerOutput) -> Any:
        each(batch, [step.prepared.scheduler_output for step in runner._in_flight])
        return launch(batch)

    runner.launch = seen  # type: ignore[method-assign]
    return runner


def test_prompt_chunks_overlap_in_stages_but_decodes_do_not() -> None:
    """Two steps are in flight. Only chunks of one prompt may be in both; another sequence is in one."""
    made = engine(DEMO_MODEL, 2, max_model_len=256, num_kv_blocks=64, max_num_batched_tokens=32)
    together, widths = set(), []

    def look(batch: SchedulerOutput, before: list[SchedulerOutput]) -> None:
        assert len(before) < 2
        names = {row.request_id for row in batch.scheduled_requests}
        for row in before[0].scheduled_requests if before else ():
            if row.request_id in names:
                assert not row.should_sample, "what follows it is not known"
                together.add(row.request_id)
        widths.extend([len(names)] * len(before))

    watch_launches(made, look)
    requests = [request(str(i), [435 + i] * (90 if i == 0 else 3), max_tokens=12, logprobs=0) for i in range(8)]
    found = comparable_answers(run(made, requests))
    assert together == {"0"}
    assert widths.count(4) > 8, "all sequences are in one step"
    assert found == comparable_answers(run(engine(DEMO_MODEL, 1, max_model_len=256, num_kv_blocks=64), requests))


def test_slot_reuse_does_not_change_in_flight_tokens() -> None:
    """A sequence is preempted while its token is in flight. Its slot goes to a more urgent one before that token is
    sampled, with penalties that read the tokens before it.
    """
    kinds = {"temperature": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0, "logprobs": 0}
    long = [request(f"long {i}", [300 + i] * 30, seed=i, max_tokens=60, **kinds) for i in range(4)]
    urgent = [request(f"urgent {i}", [400 + i] * 3, seed=i, max_tokens=4, **kinds) for i in range(4)]
    one = engine(DEMO_MODEL, 1, max_model_len=256, num_kv_blocks=256)
    expected = {each.id: comparable_answers(run(one, [each]))[each.id] for each in long + urgent}
    made = engine(DEMO_MODEL, 2, max_model_len=256, num_kv_blocks=16, max_num_seqs=4)
    changed = 0

    def look(batch: SchedulerOutput, before: list[SchedulerOutput]) -> None:
        nonlocal changed
        taken = {admission.slot for admission in batch.new_requests}
        changed += any(row.slot in taken for each in before for row in each.scheduled_requests)

    watch_launches(made, look)
    found = {each.id: Answer() for each in long + urgent}
    for each in long:
        made.add_request(replace_struct(each, priority=5))
    steps = 0
    while made.has_work:
        for output in made.step():
            found[output.id].ids += output.new_ids
            found[output.id].logprobs += output.logprobs or []
            found[output.id].finish_reason = output.finish_reason
        steps += 1
        if steps == 10:
            for each in urgent:
                made.add_request(each)
    assert comparable_answers(found) == expected
    assert changed > 0


def test_each_stage_loads_only_local_layers(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama", vocab_size=3001, num_hidden_layers=7)
    config = EngineConfig(model=str(path), **BASE)
    model = read_model_config(path)
    chosen = choose_device_plan(config, model)
    whole = load_model(config, path, model, chosen, lambda: None)
    stages = split_layers_into_stages(7, 3)
    assert [len(each) for each in stages] == [3, 2, 2]
    config = EngineConfig(model=str(path), pipeline_parallel_size=3, **BASE)
    parts = [load_model(config, path, model, chosen, lambda: None, part=ModelPart(stage=stage)) for stage in range(3)]
    assert sum(each.read_bytes for each in parts) == whole.read_bytes
    names = [set(each.expected_weights.parameter_table) for each in parts]
    assert set.union(*names) == set(whole.expected_weights.parameter_table)
    assert sum(map(len, names)) == len(whole.expected_weights.parameter_table)
    assert ["model.embed_tokens.weight" in each for each in names] == [True, False, False]
    assert ["lm_head.weight" in each for each in names] == [False, False, True]
    pages = [
        sum(tensor.total_bytes for layer in each.model.block_tensor_specs(1) for tensor in layer)
        for each in (whole, *parts)
    ]
    assert [7 * each // pages[0] for each in pages] == [7, 3, 2, 2]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stage_kv_cache_groups_keep_windows_and_unique_places(stages: int) -> None:
    """Gemma has five layers with a window to one without. A stage's blocks shrink with its number of layers, except for
    remainders.
    """
    states = [(attention_kv_cache_spec(64, window=None if index % 6 == 5 else 1024),) for index in range(48)]
    groups = build_kv_cache_groups(states, 32768, 16)
    assert (groups.layers_per_block, groups.num_groups) == (8, 6)
    assert len({*zip(groups.group_of_layer, groups.layer_index_in_block, strict=True)}) == 48
    made = [stage_kv_cache_groups(groups, layers) for layers in split_layers_into_stages(48, stages)]
    for each in made:
        assert len({*zip(each.group_of_layer, each.layer_index_in_block, strict=True)}) == len(each.group_of_layer)
        assert each.windows == groups.windows
    assert layers_per_block_by_stage(groups, stages) == [each.layers_per_block for each in made]
    assert max(each.layers_per_block for each in made) <= -(-groups.layers_per_block // stages) + 1


def test_stage_without_layers_of_group_keeps_group_windows() -> None:
    groups = KVCacheGroups((16, None), (0, 0, 1, 1), (0, 1, 0, 1))
    assert stage_kv_cache_groups(groups, range(2, 4)) == KVCacheGroups((16, None), (1, 1), (0, 1))


def test_pipeline_parallel_rejects_unsupported_settings(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "llama")
    head: dict[str, Any] = {"method": "draft_model", "num_speculative_tokens": 3, "model": str(path)}
    for settings, wrong in [
        ({"pipeline_parallel_size": 4}, "the model's 3 layers cannot be divided among 4 stages"),
        ({"tensor_parallel_size": 2}, r"ranks that divide every layer \(tensor_parallel_size\) cannot be stages too"),
        ({"speculative_config": head}, "speculative_config: 'draft_model' needs all layers in one process"),
    ]:
        with pytest.raises(ConfigError, match=f"pipeline_parallel_size: {wrong}") as raised:
            engine(path, **{"stages": settings.pop("pipeline_parallel_size", 2)}, **settings)
        assert raised.value.param == "pipeline_parallel_size"
    with pytest.raises(ConfigError, match="pipeline_parallel_size: weights given as tensors"):
        EngineCore(EngineConfig(model=str(path), pipeline_parallel_size=2, **BASE), tensors=iter([]))
    with pytest.raises(ConfigError, match=r"kv_offload_memory: blocks of several ranks \(pipeline_parallel_size\)"):
        engine(path, 2, kv_offload_memory=1)
    encoder = save_tiny_encoder(tmp_path / "encoder", "bert")
    with pytest.raises(ConfigError, match="pipeline_parallel_size: encoders run in one process"):
        engine(encoder, 2)


def test_weight_unused_by_all_stages_raises_config_error(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama", num_hidden_layers=3)
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 2'))
    with pytest.raises(ConfigError, match=r"the weights have tensors that the model lacks: model.layers.2"):
        engine(path, 2)


def test_replacement_weights_are_checked_on_all_stages(tmp_path: Path) -> None:
    path, other = (save_tiny_model(tmp_path / name, "llama") for name in ("one", "other"))
    rewrite(other, lambda weights: {name: tensor * 0.9 for name, tensor in weights.items()})
    made = engine(path, 2)
    made.check_replacement_weights(EngineConfig(model=str(path), weights=str(other)))
    expected = comparable_answers(run(engine(path, 1, weights=str(other)), asked()))
    assert expected != comparable_answers(run(made, asked()))
    assert expected == comparable_answers(run(engine(path, 2, weights=str(other)), asked()))
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight", "model.embed_tokens.weight"):
        lacking = save_tiny_model(tmp_path / name, "llama")
        rewrite(lacking, lambda weights, name=name: {each: weights[each] for each in weights if each != name})
        with pytest.raises(ConfigError, match=f"the weights lack {name}"):
            made.check_replacement_weights(EngineConfig(model=str(path), weights=str(lacking)))


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors")


def test_steps_of_other_stages_count_as_progress() -> None:
    """The engine waits for other stages, and its heartbeat must show that they make progress."""
    called = set()

    class Seen(NullHeartbeat):
        def progress(self) -> None:
            called.add(threading.current_thread().name)

    made = EngineCore(EngineConfig(pipeline_parallel_size=2, max_model_len=256, num_kv_blocks=64, **BASE), Seen())
    run(made, [request("a", [435] * 100, max_tokens=2)])
    assert called == {threading.current_thread().name, "progress"}


def test_stages_end_when_engine_is_freed(tmp_path: Path) -> None:
    made = engine(save_tiny_model(tmp_path, "llama"), 3)
    assert isinstance(made.executor, LastStageRunner)
    running = [process._thread for process in made.executor._stages._processes]
    assert all(each.is_alive() for each in running)
    del made
    free_engine_memory()
    assert not any(each.is_alive() for each in running)
