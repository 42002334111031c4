"""Runs inside a tree for facts that need its modules. Reads a JSON list from stdin, writes a JSON object to stdout.

python inside.py specs|tokens|plans
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import io
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SPEC_READERS = (
    ("quire.engine.checkpoint.model_resolver:read_model_config", "quire.engine.models:decoder_spec"),
    ("quire.engine.checkpoint.files:read_model_config", "quire.engine.models:decoder_spec"),
)
"""Where a tree reads a folder's config and makes its spec of it, the newest first: MODULE:FUNCTION of both. A commit
that moves them adds a row."""
PROMPTS = ([5, 9, 40, 77, 12], [7] * 3, [100, 33, 210, 8, 9, 10, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75])
MAX_TOKENS = 12


def _function(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def spec(folder: str) -> str:
    for reader, maker in SPEC_READERS:
        try:
            read, make = _function(reader), _function(maker)
        except (ImportError, AttributeError):
            continue
        config = read(Path(folder))
        made = make(config)
        return "\n".join([*lines(made), *parameters(made), *stored_names(config.model_type)])
    raise SystemExit(f"golden: no pair of SPEC_READERS is in this tree: {SPEC_READERS}")


def parameters(made: Any) -> list[str]:
    """What the layers of a spec take of a checkpoint: a tensor and its shape a line."""
    if not hasattr(made, "parameter_shapes"):
        return []
    return [f"parameter {name}: {list(shape)}" for name, shape in sorted(made.parameter_shapes().items())]


def stored_names(model_type: str) -> list[str]:
    """What the family's checkpoints, and its GGUF files, call tensors, and how they lay them out."""
    try:
        family = _function("quire.engine.families:find_family")(model_type)
    except (ImportError, AttributeError):
        return []
    return [] if family is None else [*lines(family.weight_names), *lines(family.gguf)]


def lines(value: Any, indent: str = "") -> list[str]:
    """A spec as text, a field a line, without identities and functions' addresses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        text = [f"{indent}{type(value).__name__}"]
        for field in dataclasses.fields(value):
            inner = lines(getattr(value, field.name), indent + "  ")
            text += [f"{indent}  {field.name}: {inner[0].strip()}", *inner[1:]]
        return text
    if isinstance(value, enum.Enum):
        return [f"{indent}{value}"]
    if isinstance(value, dict):
        text = [f"{indent}{{"]
        for key, each in value.items():
            inner = lines(each, indent + "  ")
            text += [f"{indent}  {key!r}: {inner[0].strip()}", *inner[1:]]
        return [*text, f"{indent}}}"]
    if isinstance(value, (list, tuple)):
        return [f"{indent}[", *(line for each in value for line in lines(each, indent + "  ")), f"{indent}]"]
    if callable(value):
        return [f"{indent}function {getattr(value, '__name__', type(value).__name__)}"]
    return [f"{indent}{value!r}"]


def tokens(folder: str) -> str:
    """Greedy tokens of three prompts with the log probability of each; of an encoder, the prompts' vectors."""
    quire = importlib.import_module("quire")
    model = quire.LLM(folder, dtype="float32", max_model_len=128, threads=1)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    if Path(folder).name.startswith("encoder-"):
        vectors = [answer.outputs.embedding for answer in model.embed(prompts, use_tqdm=False)]
        return "\n\n".join("\n".join(map(repr, vector)) for vector in vectors)
    params = quire.SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    texts = []
    for answer in model.generate(prompts, params, use_tqdm=False):
        (output,) = answer.outputs
        steps = zip(output.token_ids, output.logprobs, strict=True)
        texts.append("\n".join(f"{token} {scores[token].logprob!r}" for token, scores in steps))
    return "\n\n".join(texts)


def plan(arguments: list[str]) -> str:
    """What `quire plan ARGUMENTS` prints, and its exit status."""
    printed = io.StringIO()
    sys.argv = ["quire", "plan", *arguments]
    status: Any = 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            runpy.run_module("quire", run_name="__main__")
        except SystemExit as end:
            status = end.code
    return f"{printed.getvalue()}\nexit status {status}"


def main() -> None:
    captures: dict[str, Callable[[Any], str]] = {"specs": spec, "tokens": tokens, "plans": plan}
    capture = captures[sys.argv[1]]
    results: dict[str, str] = {}
    with contextlib.redirect_stdout(sys.stderr):
        for name, argument in json.load(sys.stdin):
            try:
                results[name] = capture(argument)
            except Exception as error:
                results[name] = f"{type(error).__name__}: {error}"
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
