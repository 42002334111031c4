"""Tests that outputs constrained by a grammar are valid and end where the grammar ends, whatever else is requested or
runs.
"""

from __future__ import annotations

import json
import random
import re
import threading
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import InvalidRequest, ModelError
from quire.engine.common.request_params import Grammar, SamplingParams
from quire.engine.common.scheduler_output import NewRequestData, ScheduledRequest
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.engine.text import grammar_compiler as grammar_module
from quire.engine.text.grammar_compiler import (
    MAX_FORCED_BYTES,
    GrammarCompiler,
    GrammarVocabulary,
    choice_grammar,
    json_grammar,
    lark_json_rule,
    make_grammar_vocabulary,
)
from quire.engine.worker.sampling.device_sampler import DeviceLogitsProcessor
from quire.engine.worker.sampling.sampler import HostLogitsProcessor
from quire.engine.worker.sampling.sampling_rules import LogitsProcessor
from quire.engine.worker.sampling.slot_grammars import GrammarBitmask, SlotGrammars
from tests.engine.harness import Answer, request, run
from tests.texts import Named, byte_level_tokenizer, real_tokenizers, sentence_piece_tokenizer
from tests.tiers import slow
from tests.tiny_models import save_tiny_model

EOS = [258, 256]
"""The tokenizer's `<|im_end|>`, and a second id that only the model configuration names."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None, 3]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CHECK_FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
DATE = Grammar("regex", r"[0-9]{4}-[01][0-9]")


def save_model(path: Path, named: Named, eos: list[int], **overrides: Any) -> Path:
    save_tiny_model(path, "qwen3", num_hidden_layers=1, max_position_embeddings=1024, eos_token_id=eos, **overrides)
    named.tokenizer.backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer(), EOS)


def start_engine(model: Path, **options: Any) -> EngineCore:
    return EngineCore(EngineConfig(**{"model": str(model), "num_kv_blocks": 2000, "threads": 1, **options}))


def text(answer: Answer, tokenizer: Named | None = None) -> str:
    return (tokenizer or byte_level_tokenizer()).tokenizer.decode(answer.ids)


class RandomSchema:
    """Generates a JSON schema from a seed, with only the keywords that llguidance supports."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def schema(self) -> dict[str, Any]:
        defs = {"leaf": self.value(0), "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/leaf"}}}}
        return {**self.object(3), "$defs": defs}

    def value(self, depth: int) -> dict[str, Any]:
        leaves = [self.string, self.number, self.enum, self.format]
        nodes = [self.object, self.array, self.any_of, self.ref]
        kind = self.random.randrange(len(leaves) + len(nodes) * (depth > 0))
        return leaves[kind]() if kind < len(leaves) else nodes[kind - len(leaves)](depth - 1)

    def object(self, depth: int) -> dict[str, Any]:
        names = self.random.sample(["a", "b c", "größe", 'q"uote', "x_1"], self.random.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: self.value(depth) for name in names},
            "required": self.random.sample(names, self.random.randint(0, len(names))),
            "additionalProperties": False,
        }

    def array(self, depth: int) -> dict[str, Any]:
        least = self.random.randint(0, 2)
        return {"type": "array", "items": self.value(depth), "minItems": least, "maxItems": least + 2}

    def any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.value(depth), {"type": "null"}, self.value(0)]}

    def ref(self, depth: int) -> dict[str, Any]:
        return {"$ref": f"#/$defs/{self.random.choice(['leaf', 'node'])}"}

    def string(self) -> dict[str, Any]:
        least = self.random.randint(0, 3)
        patterns = [{"minLength": least, "maxLength": least + 5}, {"pattern": "^[a-c]{2,4}(-[0-9]+)?$", "maxLength": 9}]
        return {"type": "string", **self.random.choice(patterns)}

    def number(self) -> dict[str, Any]:
        low = self.random.randint(-50, 50)
        bounds = {self.random.choice(["minimum", "exclusiveMinimum"]): low, "maximum": low + self.random.randint(2, 99)}
        return {"type": self.random.choice(["integer", "number"]), **bounds}

    def enum(self) -> dict[str, Any]:
        return {"enum": self.random.sample(["red", "grün", "", 1, 2.5, True, None, [1], {"k": "v"}], 3)}

    def format(self) -> dict[str, Any]:
        return {"type": "string", "format": self.random.choice(["date", "time", "date-time", "ipv4", "uuid"])}


@pytest.mark.parametrize("count", [20, *slow(200)])
def test_output_matches_random_json_schemas(count: int, model: Path) -> None:
    schemas = {str(seed): RandomSchema(seed).schema() for seed in range(count)}
    settings = ({"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 1.5, "frequency_penalty": 1.0})
    answers = run(
        start_engine(model),
        [
            request(name, [65, 66], seed=i, grammar=json_grammar(schema), max_tokens=400, **settings[i % 3])
            for i, (name, schema) in enumerate(schemas.items())
        ],
    )
    finished = [name for name, answer in answers.items() if answer.finish_reason == "stop"]
    assert len(finished) > count * 3 // 4
    for name in finished:
        jsonschema.validate(json.loads(text(answers[name])), schemas[name], format_checker=CHECK_FORMATS)
    assert {answers[name].finish_reason for name in answers.keys() - finished} <= {"length"}


@pytest.mark.few(1)
@pytest.mark.parametrize("named", [sentence_piece_tokenizer(), *real_tokenizers()], ids=lambda named: named.name)
def test_json_grammar_works_with_every_tokenizer(named: Named, tmp_path: Path) -> None:
    vocab = named.tokenizer.vocab_size + 7  # models pad their vocabulary
    path = save_model(tmp_path, named, list(named.tokenizer.eos_token_ids), vocab_size=vocab)
    schema = {"type": "object", "properties": {"ä": {"type": "string", "maxLength": 9}}, "required": ["ä"]}
    schema["additionalProperties"] = False  # type: ignore[assignment]
    answers = run(
        start_engine(path, num_kv_blocks=200),
        [request(str(i), [5], seed=i, temperature=1.0, max_tokens=90, grammar=json_grammar(schema)) for i in range(4)],
    )
    for answer in answers.values():
        assert answer.finish_reason == "stop"
        assert answer.ids[-1] in named.tokenizer.eos_token_ids
        jsonschema.validate(json.loads(text(answer, named)), schema)


def test_output_matches_regex_choice_and_lark_grammars(model: Path) -> None:
    rule = Grammar("lark", f'start: "<tool>" call "</tool>"\ncall: {lark_json_rule(PERSON)}')
    choices = ["yes", "no", 'a "quoted" one', "né\n"]
    answers = run(
        start_engine(model),
        [
            request("date", [65], grammar=DATE),
            *(request(f"c{i}", [65], grammar=choice_grammar(choices), temperature=2.0, seed=i) for i in range(20)),
            request("tool", [65], grammar=rule, temperature=1.0, max_tokens=300),
        ],
    )
    assert {answer.finish_reason for answer in answers.values()} == {"stop"}
    assert re.fullmatch(DATE.text, text(answers.pop("date")))
    tool = text(answers.pop("tool"))
    jsonschema.validate(json.loads(tool.removeprefix("<tool>").removesuffix("</tool>")), PERSON)
    chosen = {text(answer) for answer in answers.values()}
    assert len(chosen) > 1
    assert chosen <= set(choices)


def test_json_grammar_allows_no_endless_whitespace(model: Path) -> None:
    spaces = dict.fromkeys(b" \n\t\r", 100.0)
    wide = request("a", [65], grammar=json_grammar(PERSON | {"required": []}), logit_bias=spaces, max_tokens=300)
    answer = run(start_engine(model), [wide])["a"]
    assert answer.finish_reason == "stop"
    assert not re.search(r"\s\s", re.sub(r'"[^"]*"', "", text(answer)))


def test_grammar_ends_output_despite_other_parameters(model: Path) -> None:
    date = {"grammar": DATE, "temperature": 1.0}
    answers = run(
        start_engine(model),
        [
            request("ignore_eos", [65], ignore_eos=True, **date),
            request("min_tokens", [65], min_tokens=20, max_tokens=30, **date),
            request("banned", [65], allowed_token_ids=tuple(b"xyz"), **date),
            request("biased", [65], logit_bias=dict.fromkeys(EOS, -100.0), **date),
            request("cut", [65], max_tokens=3, **date),
            # The text may end after every letter, so min_tokens decides when it ends.
            request("longer", [65], grammar=Grammar("regex", "[a-z]*"), min_tokens=9, logit_bias={EOS[0]: 100.0}),
        ],
    )
    cut = answers.pop("cut")
    assert (cut.finish_reason, len(cut.ids)) == ("length", 3)
    longer = answers.pop("longer")
    assert (longer.finish_reason, len(longer.ids), longer.ids[-1]) == ("stop", 10, EOS[0])
    for name, answer in answers.items():
        assert answer.finish_reason == "stop", name
        assert re.fullmatch(DATE.text, text(answer)), name
        assert len(answer.ids) == 8
        assert answer.ids[-1] in EOS


def test_logprobs_are_those_before_grammar_mask(model: Path) -> None:
    engine = start_engine(model)
    free = run(engine, [request("a", [65, 66, 67], logprobs=3, max_tokens=1)])["a"]
    bound = run(engine, [request("a", [65, 66, 67], logprobs=3, grammar=DATE)])["a"]
    assert free.ids[0] not in b"0123456789", "else the comparison below would show nothing"
    assert bound.logprobs[0].top == free.logprobs[0].top
    assert bound.logprobs[0].rank > 1
    assert len(bound.logprobs) == len(bound.ids)


def mixed_requests() -> list[EngineCoreRequest]:
    grammars = [None, json_grammar(PERSON), DATE, json_grammar({"type": "object"}), choice_grammar(["yes", "no"])]
    settings = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "presence_penalty": 0.5},
    ]
    generator = torch.Generator().manual_seed(5)
    return [
        request(
            str(i),
            torch.randint(32, 127, (3 + 11 * i % 60,), generator=generator).tolist(),
            seed=i,
            max_tokens=40 + i,
            grammar=grammars[i % len(grammars)],
            **settings[i % len(settings)],
        )
        for i in range(20)
    ]


def test_grammar_tokens_do_not_depend_on_other_requests(model: Path) -> None:
    def tokens(engine: EngineCore, requests: list[EngineCoreRequest]) -> dict[str, list[int]]:
        return {name: answer.ids for name, answer in run(engine, requests).items()}

    requests = mixed_requests()
    warm = start_engine(model)
    alone = {each.id: tokens(warm, [each])[each.id] for each in requests}
    assert tokens(start_engine(model), requests) == alone, "all in one batch"
    assert tokens(start_engine(model, max_num_batched_tokens=7, max_num_seqs=3), requests) == alone, "few at a time"
    small = start_engine(model, num_kv_blocks=14, max_model_len=200)
    assert tokens(small, requests) == alone, "preempted"
    assert small.engine_stats.preemptions > 2
    half = [replace(each, emitted_ids=alone[each.id][: i % 9]) for i, each in enumerate(requests)]
    half = [each for each in half if len(each.emitted_ids) < len(alone[each.id])]
    assert len(half) > 12
    rest = tokens(start_engine(model), half)
    assert {r.id: r.emitted_ids + rest[r.id] for r in half} == {r.id: alone[r.id] for r in half}, "after a crash"


def test_invalid_grammar_fails_only_own_request(model: Path) -> None:
    engine = start_engine(model)
    wrong = request("wrong", [65], grammar=Grammar("regex", "("))
    nothing = request("nothing", [65], grammar=json_grammar({"$ref": "#"}))
    off_grammar = replace(request("off_grammar", [65], grammar=DATE), emitted_ids=list(b"20x"))
    answers = run(engine, [wrong, request("free", [65], max_tokens=5), nothing, off_grammar])
    assert {name: answer.finish_reason for name, answer in answers.items()} == {
        "wrong": "error",
        "nothing": "error",
        "off_grammar": "error",
        "free": "length",
    }
    assert run(engine, [request("next", [65], grammar=DATE)])["next"].finish_reason == "stop", "slots can be used again"


LONG = "z" * (MAX_FORCED_BYTES + 10)
FORCED = [Grammar("regex", LONG), json_grammar({"const": LONG}), Grammar("regex", f"[a-f]{LONG}")]


@pytest.mark.parametrize("drafts", ["none", "grammar"])
def test_grammar_forcing_too_much_text_fails_only_own_request(model: Path, drafts: str) -> None:
    """All of the forced text would cost each output memory and time; half as much is allowed."""
    engine = start_engine(model, speculative_config=drafts)
    for index, grammar in enumerate([*FORCED, Grammar("regex", LONG[: len(LONG) // 2])]):
        engine.add_request(request(str(index), [65], max_tokens=20, grammar=grammar))
    ended = {}
    while engine.has_work:
        ended |= {output.id: output for output in engine.step() if output.finish_reason}
    assert ended.pop("3").finish_reason == "length"
    for output in ended.values():
        assert output.finish_reason == "error"
        assert f"at most {MAX_FORCED_BYTES}" in (output.error or "")


def test_model_without_tokenizer_fails_only_grammar_requests(model: Path, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", num_hidden_layers=1)  # this directory has no tokenizer
    engine = start_engine(tmp_path)
    assert run(engine, [request("a", [65], max_tokens=2)])["a"].finish_reason == "length"
    assert run(engine, [request("a", [65], grammar=DATE)])["a"].finish_reason == "error"


def test_grammar_compiler_is_loaded_once_in_thread() -> None:
    threads: list[int] = []

    def load() -> GrammarCompiler:
        threads.append(threading.get_ident())
        return GrammarCompiler(make_grammar_vocabulary(byte_level_tokenizer().tokenizer, 320, EOS))

    slots = SlotGrammars(load)
    slots.start_loading_compiler().result()
    for slot in range(2):
        slots.admit_request(NewRequestData(slot, [65], 1, SamplingParams(grammar=DATE), 0))
    mask = slots.fill_bitmask([ScheduledRequest(str(slot), slot, 0, 1, [], should_sample=True) for slot in range(2)])
    assert mask is not None
    assert mask.rows == [0, 1]
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


ENDLESS = Grammar("regex", r"(.*a.{30}|.*b.{30}|.*c.{31})z")
"""Each output meets new lexer states, without end."""


def limit_lexer_states(monkeypatch: pytest.MonkeyPatch, few: int, most: int) -> None:
    monkeypatch.setattr(grammar_module, "SMALL_LEXER_STATES", few)
    monkeypatch.setattr(grammar_module, "LARGE_LEXER_STATES", most)


def test_full_lexer_is_replaced_and_grammar_still_holds(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_lexer_states(monkeypatch, 64, 600)
    engine = start_engine(model)
    for together in (1, 1, 6, 1, 6):
        settings = {"max_tokens": 40, "temperature": 1.0, "grammar": ENDLESS}
        requests = [request(str(i), [65 + together], seed=i, **settings) for i in range(together)]
        answers = run(engine, requests)
        assert [answer.finish_reason for answer in answers.values()] == ["length"] * together
        for answer in answers.values():
            assert "\n" not in text(answer), "the dot is no line break: the grammar still holds the answer"


def test_request_needing_too_many_lexer_states_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_lexer_states(monkeypatch, 64, 100)
    engine = start_engine(model)
    engine.add_request(request("endless", [65], max_tokens=100, temperature=1.0, grammar=ENDLESS))
    engine.add_request(request("date", [65], grammar=DATE))
    ended = {}
    while engine.has_work:
        ended |= {output.id: output for output in engine.step() if output.finish_reason}
    assert (ended["date"].finish_reason, ended["endless"].finish_reason) == ("stop", "error")
    assert ended["endless"].cause == "grammar"
    assert "needs more than a lexer with 100 states" in (ended["endless"].error or "")


def test_large_lexers_are_bounded_and_freed_with_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_lexer_states(monkeypatch, 8, 1000)
    compiler = GrammarCompiler(make_grammar_vocabulary(byte_level_tokenizer().tokenizer, 320, EOS))
    slots = SlotGrammars(lambda: compiler)
    grammars = [Grammar("regex", f"(x[a-f]*a.{{10}}|x[a-f]*b.{{11}}){i}") for i in range(18)]

    def admitted(slot: int) -> str | None:
        """The cause of the output's failure, or None."""
        owner = NewRequestData(slot, [65], 1, SamplingParams(grammar=grammars[slot]), 0)
        slots.admit_request(owner)
        for token in b"xabcdabcdabcd":
            slots.fill_bitmask([ScheduledRequest(str(slot), slot, 0, 1, [], should_sample=True)])
            if (failure := slots.advance_and_get_failure(slot, owner, [token])) is not None:
                return failure.cause
        return None

    assert [admitted(slot) for slot in range(17)] == [None] * 16 + ["busy"]
    slots.release_slot(3)
    assert admitted(17) is None


def test_compiled_grammars_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of the text is no measure: this grammar of 130 bytes compiles to megabytes."""
    compiler = GrammarCompiler(make_grammar_vocabulary(byte_level_tokenizer().tokenizer, 320, EOS))
    slots = SlotGrammars(lambda: compiler)
    numbers = [[{"type": "integer", "multipleOf": 3001 + place + 2 * slot} for place in range(2)] for slot in range(7)]
    grammars = [json_grammar({"type": "array", "prefixItems": each, "minItems": 2}) for each in numbers]

    def admitted(slot: int) -> str | None:
        owner = NewRequestData(slot, [65], 1, SamplingParams(grammar=grammars[slot]), 0)
        slots.admit_request(owner)
        failure = slots.advance_and_get_failure(slot, owner, [])
        return None if failure is None else failure.cause

    monkeypatch.setattr(grammar_module, "MAX_COMPILED_BYTES", 9 << 20)
    fate = [admitted(slot) for slot in range(6)]
    assert fate[0] is None
    assert fate[-1] == "busy", "one that the caller may send again"
    for slot in range(6):
        slots.release_slot(slot)
    assert admitted(6) is None, "what only the cache has makes room"
    monkeypatch.setattr(grammar_module, "MAX_COMPILED_BYTES_PER_GRAMMAR", 1 << 20)
    with pytest.raises(InvalidRequest, match="MiB"):
        compiler.check_grammar(grammars[0])


def test_bitmask_covers_all_draft_positions_after_lexer_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask after a draft token, the token sampled there would be unconstrained."""
    limit_lexer_states(monkeypatch, 20, 1000)
    slots = SlotGrammars(lambda: GrammarCompiler(make_grammar_vocabulary(byte_level_tokenizer().tokenizer, 320, EOS)))
    slots.admit_request(NewRequestData(0, [65], 1, SamplingParams(grammar=Grammar("regex", "[0-9]{60}")), 0))
    mask = slots.fill_bitmask([ScheduledRequest("0", 0, 0, 41, [], True, list(b"1" * 40))] * 41)
    assert mask is not None
    allowed = np.unpackbits(mask.bitmask_words.view(np.uint8), axis=1, bitorder="little").nonzero()[1]
    assert allowed.tolist() == [*b"0123456789"] * 41


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json", '{"type": "nonsense"}'),
        Grammar("json", '{"type": "string", "minLength": 3, "maxLength": 2}'),
        Grammar("json", '{"not": {"type": "string"}}'),
        Grammar("json", '{"$ref": "#"}'),
        Grammar("json", "[]"),
        Grammar("json", "{"),
        Grammar("json", '{"items":' * 500 + "{}" + "}" * 500),
        Grammar("json", json.dumps({"enum": ["x" * 300_000]})),
        *FORCED,
        Grammar("regex", "("),
        Grammar("regex", "(?=a)"),
        Grammar("lark", ""),
        Grammar("lark", "start: nowhere"),
        Grammar("lark", "start: start"),
        Grammar("lark", "start: <|no_such_token|>"),
    ],
    ids=lambda grammar: grammar.text[:40],
)
def test_invalid_grammar_is_rejected(grammar: Grammar) -> None:
    compiler = GrammarCompiler(make_grammar_vocabulary(byte_level_tokenizer().tokenizer, 320, EOS))
    with pytest.raises(InvalidRequest) as raised:
        compiler.check_grammar(grammar)
    assert raised.value.message.strip()
    compiler.check_grammar(DATE)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (
            {"not": {}, "uniqueItems": True},
            'has keywords that cannot be enforced: "not", "uniqueItems"; leave them out',
        ),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "has a oneOf whose alternatives may overlap"),
        ({"$ref": "https://example.com/a"}, "refers to 'https://example.com/a', which is not fetched"),
    ],
)
@pytest.mark.parametrize("in_lark", [False, True])
def test_unsupported_schema_is_explained_without_options_of_the_library(
    schema: dict[str, Any], says: str, in_lark: bool
) -> None:
    compiler = GrammarCompiler(make_grammar_vocabulary(byte_level_tokenizer().tokenizer, 320, EOS))
    grammar = Grammar("lark", f"start: {lark_json_rule(schema)}") if in_lark else json_grammar(schema)
    with pytest.raises(InvalidRequest) as raised:
        compiler.check_grammar(grammar)
    assert raised.value.message.startswith(f"the JSON schema {says}")


@pytest.mark.parametrize("schema", [3, "x", None, [], False])
def test_json_grammar_rejects_non_schema(schema: object) -> None:
    with pytest.raises(InvalidRequest):
        json_grammar(schema)


def test_grammar_compiler_rejects_vocabulary_without_eos() -> None:
    tokenizer = byte_level_tokenizer().tokenizer
    with pytest.raises(InvalidRequest):
        GrammarCompiler(make_grammar_vocabulary(tokenizer, 320, ()))
    with pytest.raises(ModelError):
        GrammarCompiler(GrammarVocabulary("{}", 320, (1,)))


@pytest.mark.parametrize("changes", [HostLogitsProcessor(), DeviceLogitsProcessor()], ids=["host", "device"])
def test_bitmask_bans_all_other_tokens(changes: LogitsProcessor) -> None:
    """The lowest bit of a word is its first token; rows without a grammar do not change."""
    unmodified = torch.arange(3 * 100, dtype=torch.float32).reshape(3, 100)
    words = np.array([[1 << 5, 0, 1 << 3 | 1 << 6, 0], [0, -(1 << 31), -1, 0]], dtype=np.int32)
    allowed = [{5, 67, 70}, {63, *range(64, 96)}]
    banned = unmodified.clone()
    banned[2, 63:96] = -torch.inf
    for before in (None, unmodified):
        logits = unmodified.clone() if before is None else banned.clone()
        changes.apply_bitmask(logits, GrammarBitmask([0, 2], words), before)
        assert [set(logits[row].isfinite().nonzero().flatten().tolist()) for row in (0, 2)] == allowed
        assert logits[1].equal(unmodified[1])
        assert logits[2, 63] == unmodified[2, 63], "when bans leave nothing that the grammar allows, the grammar wins"
