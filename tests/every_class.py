"""Serves a small random model of every causal language model in transformers and compares it with transformers in
float64.

`python -m tests.every_class` writes quire/engine/checkpoint/transformers_classes/class_support.toml, which Quire reads,
and docs/reference/models-table.md. `python -m tests.every_class NAME ...` tests some models and prints the results.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.engine.checkpoint.config_reader import has_quire_family
from quire.engine.checkpoint.transformers_classes import first_position_id
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import QuireError
from quire.engine.common.folder_reader import read_json_if_present
from quire.engine.engine_core import EngineCore
from tests.engine.harness import Answer, request, run
from tests.float64_rule import exact_rules
from tests.tiny_classes import KINDS, save_tiny_class
from tests.tiny_models import VOCAB
from tests.tree import ROOT

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # its import takes a second

TRIED = ROOT / "quire" / "engine" / "checkpoint" / "transformers_classes" / "class_support.toml"
TABLE = ROOT / "docs" / "reference" / "models-table.md"
_LENGTHS = (1, 7, 33, 50, 90)
_ANSWER = 6
_TOLERANCE = 5e-5
"""Difference of logprobs, multiplied by the standard deviation of the logits if that is above 1."""
_STATE = "it keeps a state other than keys and values (a recurrence or a convolution)"
_INTERFACE = "it does not attend through transformers' attention interface"


_SECTION = "../guides/models.md#transformers-backend"


class Wrong(AssertionError):
    """The model is served, but its numbers differ from transformers'."""


@dataclass(frozen=True)
class Outcome:
    kind: str
    by: str
    """quire, transformers, or "" if the model is not served."""
    reason: str = ""
    """Why the model is not served."""
    apart: bool = True
    """True if a request has the same bits alone and in a batch."""

    @property
    def made_by(self) -> str:
        return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.kind])


def tried(kind: str, path: Path) -> Outcome:
    """Outcome of a small model of a model_type, written to `path`. Raises Wrong."""
    try:
        made_by = save_tiny_class(path, kind)
    except Exception as error:  # classes raise any exception for what they do not support
        if MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]]._is_stateful:
            return Outcome(kind, "", _STATE)
        return Outcome(kind, "", f"no small model of it could be made to try it ({type(error).__name__})")
    given = read_json_if_present(path / "config.json") or {}
    by = "quire" if has_quire_family(given) else "transformers"
    try:
        engine = EngineCore(EngineConfig(model=str(path), model_impl=by, num_kv_blocks=96, max_num_batched_tokens=40))
    except QuireError as error:
        return Outcome(kind, "", _short(str(error)))
    answers = _answers(engine)
    reference = made_by.from_pretrained(
        path, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
    )
    with exact_rules(made_by):
        for prompt, answer in zip(_prompts(), answers["together"], strict=True):
            _compare(kind, prompt, answer, reference.eval(), first_position_id(given))
    apart = answers["together"] == answers["alone"] == answers["again"]
    if engine.info.deterministic and not apart:
        raise Wrong(f"{kind}: its engine says that it is deterministic, and a request's bits depend on others")
    return Outcome(kind, by, "", engine.info.deterministic)


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in _LENGTHS]


def _answers(engine: EngineCore) -> dict[str, list[Answer]]:
    """Answers to all prompts together in chunks, to each alone without cache, and to all with cached prefixes."""
    asked = {"max_tokens": _ANSWER, "logprobs": 3, "prompt_logprobs": 2}

    def ask(salt: str, which: Iterable[int], **params: object) -> list[Answer]:
        prompts = _prompts()
        found = run(engine, [request(str(i), prompts[i], salt=salt, **asked | params) for i in which])
        return list(found.values())

    every = range(len(_LENGTHS))
    together = ask("", every)
    alone = [answer for i in every for answer in ask("alone", [i])]
    cached = ask("", every, prompt_logprobs=None)
    assert any(answer.cached_tokens for answer in cached)
    again = [
        Answer(b.ids, b.logprobs, a.prompt_logprobs, b.finish_reason, a.cached_tokens)
        for a, b in zip(together, cached, strict=True)
    ]
    return {"together": together, "alone": alone, "again": again}


@torch.inference_mode()
def _compare(kind: str, prompt: list[int], answer: Answer, reference: PreTrainedModel, first: int) -> None:
    """Compare logprobs of the prompt's tokens, of the answer's tokens, and of the most likely alternatives."""
    ids = torch.tensor([prompt + answer.ids[:-1]])
    positions = {"position_ids": torch.arange(ids.shape[1])[None] + first} if first else {}
    logits = reference(input_ids=ids, use_cache=False, **positions).logits[0].double()
    rows, tolerance = logits.log_softmax(-1), _TOLERANCE * max(1.0, logits.std(-1).mean().item())
    assert answer.prompt_logprobs is not None
    found = answer.prompt_logprobs[1:] + answer.logprobs
    for row, logprob in zip(rows, found, strict=True):
        assert logprob is not None
        pairs = [(logprob.token_id, logprob.logprob), *logprob.top]
        worst = max(abs(row[token].item() - value) for token, value in pairs)
        if not worst < tolerance:
            raise Wrong(f"{kind}: a log probability differs by {worst:.1e}, more than {tolerance:.1e}")
    for row, token in zip(rows[len(prompt) - 1 :], answer.ids, strict=True):
        if row.max() - row[token] > tolerance:
            raise Wrong(f"{kind}: it picks another token than the likeliest")


def _short(error: str) -> str:
    """The reason without details of the small model."""
    if "keeps a state" in error:
        return _STATE
    if "attention interface" in error:
        return _INTERFACE
    found = re.search(r"changes attention by (\w+)", error)
    if found is not None:
        return f"its attention takes {found[1]}, which paged attention does not compute"
    if "changes its mask" in error:
        return "its attention changes the mask (biases by position, or a mask of its own)"
    if "neither causal nor a sliding window" in error:
        return "one of its masks is neither causal nor a sliding window (chunks, blocks, or bidirectional)"
    if "meta" in error or "data-dependent" in error or "data-independent" in error:
        return "what it computes depends on numbers, which it is probed without"
    return re.sub(r"^model: (config.json: |transformers' \w+ )?", "", error).split(":")[0][:120]


def outcome(kind: str) -> Outcome:
    """The outcome of a model_type in a temporary folder; a model with wrong numbers counts as not served."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return tried(kind, Path(folder))
        except Wrong:
            return Outcome(kind, "", "its numbers are others than transformers' own")
        except Exception as error:
            return Outcome(kind, "", f"it fails in a step ({type(error).__name__})")


def recorded() -> dict[str, Outcome]:
    """Content of class_support.toml by model_type."""
    content = tomllib.loads(TRIED.read_text(encoding="utf-8"))
    by = dict.fromkeys(content["served"], "transformers") | dict.fromkeys(content["by_files"], "quire")
    reasons = {kind: reason for reason, kinds in content["not_served"].items() for kind in kinds}
    mixed = {*content["batch_dependent"]}
    return {kind: Outcome(kind, by.get(kind, ""), reasons.get(kind, ""), kind not in mixed) for kind in [*by, *reasons]}


def as_toml(outcomes: Sequence[Outcome]) -> str:
    """Text of class_support.toml."""
    reasons = defaultdict[str, list[str]](list)
    for each in outcomes:
        if not each.by:
            reasons[each.reason].append(each.kind)
    lines = [
        "# By model_type, what came of each causal language model of transformers.",
        "# Written by `python -m tests.every_class`; tests/engine/models/test_every_class.py tries it again.",
        f'transformers = "{transformers.__version__}"',
        f"served = {_listed(each.kind for each in outcomes if each.by == 'transformers')}",
        f"by_files = {_listed(each.kind for each in outcomes if each.by == 'quire')}",
        f"batch_dependent = {_listed(each.kind for each in outcomes if each.by and not each.apart)}",
        "",
        "[not_served]",
        *(f'"{reason}" = {_listed(kinds)}' for reason, kinds in sorted(reasons.items())),
    ]
    return "\n".join(lines) + "\n"


def _listed(kinds: Iterable[str]) -> str:
    return json.dumps(list(kinds))


def as_table(outcomes: Sequence[Outcome]) -> str:
    """Text of docs/reference/models-table.md."""
    ours, theirs = (sum(each.by == by for each in outcomes) for by in ("quire", "transformers"))
    said = (
        f"Quire serves {ours + theirs} of the {len(outcomes)} causal classes of transformers "
        f"{transformers.__version__}: {ours} by its own files, {theirs} by [transformers' class]({_SECTION}) on "
        "Quire's KV blocks. Each was tested with a small random model: log probabilities equal transformers' in "
        "float64 to 5e-5 (times the deviation of the logits if that is above 1), in ragged batches, with chunked "
        "prompts and cached prefixes. `same bits` means that a request has the same bits alone, in any batch and "
        "after a cached prefix. `python -m tests.every_class` writes this table, and `make test-all` checks it."
    )
    lines = [
        "# Every causal language model of transformers",
        "",
        *textwrap.wrap(said, 118, break_long_words=False, break_on_hyphens=False),
        "",
        "| `model_type` | class | served by | same bits, or why not |",
        "|---|---|---|---|",
    ]
    for each in outcomes:
        why = each.reason or ("same bits" if each.apart else "batch-dependent")
        by = {"quire": "Quire", "transformers": "transformers' class", "": "-"}[each.by]
        lines.append(f"| `{each.kind}` | {each.made_by} | {by} | {why} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    torch.set_num_threads(1)
    asked = sys.argv[1:]
    outcomes = []
    for kind in asked or KINDS:
        outcomes.append(found := outcome(kind))
        print(f"{kind}: {found.by or found.reason}{'' if found.apart else ', batch-dependent'}", flush=True)
    if not asked:
        TRIED.write_text(as_toml(outcomes), encoding="utf-8")
        TABLE.write_text(as_table(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
