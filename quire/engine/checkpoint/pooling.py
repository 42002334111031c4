"""How a model makes vectors of prompts: the layout of sentence-transformers' checkpoints, and heads of classifiers.

https://sbert.net/docs/package_reference/sentence_transformer/models.html describes the modules. It does not import
torch, so the server reads it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, TypedDict, TypeVar

from msgspec import Meta

from quire.engine.checkpoint.config_reader import weight_names_of
from quire.engine.checkpoint.safetensors import read_tensor_headers
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, ModelError
from quire.engine.families import find_encoder_family
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.schema.config_objects import Text, Width
from quire.engine.families.base.schema.config_schema import MAX_LABELS
from quire.engine.folder_reader import (
    MAX_JSON_BYTES,
    convert_parsed_json,
    decode_json,
    read_bytes_if_present,
    read_json_if_present,
)
from quire.engine.types import PoolingType, Task

Activation = Literal["identity", "sigmoid", "softmax", "tanh"]
_MODES: dict[str, PoolingType] = {"lasttoken": "last", "last": "last", "mean": "mean", "cls": "cls", "none": "none"}
_FLAGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken"}
_OTHER_FLAGS = ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")
_KNOWN = ("Transformer", "Pooling", "Dense", "Normalize")
MAX_PROMPTS, MAX_PROMPT = 256, 4096
Fields = TypeVar("Fields")


class _Module(TypedDict):
    path: Text
    type: Text


class _PoolingFields(TypedDict, total=False):
    pooling_mode: Text | None
    pooling_mode_cls_token: bool | None
    pooling_mode_mean_tokens: bool | None
    pooling_mode_lasttoken: bool | None
    pooling_mode_max_tokens: bool | None
    pooling_mode_mean_sqrt_len_tokens: bool | None
    pooling_mode_weightedmean_tokens: bool | None
    include_prompt: bool | None


class _DenseFields(TypedDict):
    in_features: Width
    out_features: Width
    bias: bool
    activation_function: Text


class _SentenceFields(TypedDict, total=False):
    max_seq_length: Width | None
    do_lower_case: bool | None


class _PromptFields(TypedDict, total=False):
    prompts: Annotated[dict[Text, Annotated[str, Meta(max_length=MAX_PROMPT)]], Meta(max_length=MAX_PROMPTS)] | None
    default_prompt_name: Text | None


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear after the pooling, with weights in a folder of its own."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: Literal["identity", "tanh"]


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a prompt's hidden states become one vector: an embedding, or scores of `labels`."""

    kind: PoolingType
    size: int
    """Numbers of the vector."""
    normalize: bool = True
    dense: tuple[DenseModule, ...] = ()
    labels: tuple[str, ...] = ()
    """Of a classifier; none: the vectors are embeddings."""
    activation: Activation = "identity"
    """What makes probabilities of scores."""
    score_tokens: tuple[str, str] | None = None
    """A decoder's one score is the second token's logit less the first's: no and yes, for one."""
    max_length: int | None = None
    """The most tokens that it was trained for, if the checkpoint says so."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts to put before an input, by name."""
    default_prompt: str | None = None
    """The name of the one that is used where none is asked for."""

    @property
    def task(self) -> Task:
        return "classify" if self.labels else "embed"


def read_pooling(path: Path, config: ModelConfig, kind: str = "auto", score_tokens: Sequence[str] = ()) -> Pooling:
    """What the model's files say; `kind` overrides how they pool, unless it is "auto". `score_tokens`: see Pooling;
    with them a decoder scores texts instead of embedding them.

    Files that say nothing mean: of a decoder its last token, of an encoder the mean, scaled to length 1. Raises
    ModelError, naming file and field.
    """
    encoder = find_encoder_family(config.model_type) is not None
    if encoder and config.raw.get("quantization_config"):
        raise ModelError("model: quantized weights of an encoder are not served")
    if score_tokens:
        if encoder or is_classifier(config) or len(score_tokens) != 2:
            wrong = "takes two tokens, and a decoder with an output head"
            raise ConfigError(f"classifier_from_token: {wrong}", param="classifier_from_token")
        tokens = (score_tokens[0], score_tokens[1])
        return Pooling("last", 1, False, (), (tokens[1],), "sigmoid", tokens)
    if is_classifier(config):
        labels = label_names(config)
        found = Pooling(
            _classifier_kind(config), len(labels), False, (), labels, _classifier_activation(config, labels)
        )
    else:
        found = _embedding(path, config, encoder)
    if kind == "none" and found.labels:
        raise ConfigError("pooling_type: none is about embeddings, and this model scores texts", param="pooling_type")
    chosen = found.kind if kind == "auto" else _MODES[kind]
    settings = _read(path, "sentence_bert_config.json", _SentenceFields)
    prompts = _read(path, "config_sentence_transformers.json", _PromptFields)
    if settings.get("do_lower_case"):
        raise ModelError("model: sentence_bert_config.json: do_lower_case is not supported; its tokenizer must do it")
    named, default = prompts.get("prompts") or {}, prompts.get("default_prompt_name")
    if default is not None and default not in named:
        raise ModelError("model: config_sentence_transformers.json: default_prompt_name: is not one of its prompts")
    return Pooling(
        kind=chosen,
        size=found.size,
        normalize=found.normalize,
        dense=found.dense,
        labels=found.labels,
        activation=found.activation,
        max_length=settings.get("max_seq_length"),
        prompts=named,
        default_prompt=default,
    )


def vector_size(config: ModelConfig) -> int:
    """Numbers of the vectors of a model with a linear behind its pooling."""
    family = find_encoder_family(config.model_type)
    return config.hidden_size if family is None or family.vector_size is None else family.vector_size(config)


def is_classifier(config: ModelConfig) -> bool:
    return any(name.endswith("ForSequenceClassification") for name in config.raw.get("architectures") or ())


def generates(path: Path, config: ModelConfig, *, dummy: bool) -> bool:
    """Whether the model has an output head. Embedding models often leave it out. `dummy`: no weights are read."""
    if find_encoder_family(config.model_type) is not None or is_classifier(config):
        return False
    if config.tie_embeddings or dummy:
        return True
    names = read_tensor_headers(path) if path.is_dir() else {}  # what is in a GGUF file, its loader says
    weight_names = weight_names_of(config.model_type)
    return not names or any(weight_names.own_modules(name.rpartition(".")[0]) == ("lm_head",) for name in names)


def tasks_of(path: Path, config: ModelConfig, pooling: Pooling, settings: EngineConfig) -> tuple[Task, ...]:
    """What requests may ask of the model. One that makes text makes vectors too where its files or the settings say
    how: hidden states of others mean little (any two texts score 0.99). Raises ConfigError for a runner that it cannot
    be."""
    able, runner = generates(path, config, dummy=settings.load_format == "dummy"), settings.runner
    if runner == "generate" and not able:
        raise ConfigError(f"runner: a {config.model_type} without an output head cannot generate", param="runner")
    told = settings.pooling_type != "auto" or pooling.task != "embed" or bool(_modules(path))
    if able and (runner == "generate" or (runner == "auto" and not told)):
        return ("generate",)
    return ("generate", pooling.task) if able and runner == "auto" else (pooling.task,)


def read_tasks(path: Path, config: ModelConfig, settings: EngineConfig) -> tuple[Pooling, tuple[Task, ...]]:
    """How the model makes vectors, and what requests may ask of it. Raises ConfigError."""
    if config.given is not None:
        return Pooling("last", config.hidden_size), ("generate",)
    pooling = read_pooling(path, config, settings.pooling_type, settings.classifier_from_token)
    tasks = tasks_of(path, config, pooling, settings)
    guesses = settings.speculative_config is not None and settings.speculative_config.method != "none"
    if guesses and "generate" not in tasks:
        wrong = "speculative_config: this model, served so, makes no text to guess"
        raise ConfigError(wrong, param="speculative_config")
    return pooling, tasks


def label_names(config: ModelConfig) -> tuple[str, ...]:
    """The labels of a classifier in the order of its scores."""
    named = config.raw.get("id2label") or {}
    count = len(named) or config.raw.get("num_labels") or 2
    if not 1 <= count <= MAX_LABELS:
        raise ModelError(f"model: config.json: id2label: {count} labels, at most {MAX_LABELS} are served")
    return tuple(named.get(str(index), f"LABEL_{index}") for index in range(count))


def _classifier_kind(config: ModelConfig) -> PoolingType:
    if (family := find_encoder_family(config.model_type)) is None:
        return "last"
    return "mean" if family.reads_classifier_pooling and config.raw.get("classifier_pooling") == "mean" else "cls"


def _classifier_activation(config: ModelConfig, labels: tuple[str, ...]) -> Activation:
    """As sentence-transformers' CrossEncoder and vLLM choose it."""
    written = (config.raw.get("sentence_transformers") or {}).get("activation_fn")
    name = (written or config.raw.get("sbert_ce_default_activation_function") or "").rpartition(".")[2]
    if name:
        if name not in ("Identity", "Sigmoid"):
            raise ModelError(f"model: config.json: activation_fn: {name} is not supported (Identity, Sigmoid)")
        return "identity" if name == "Identity" else "sigmoid"
    problem = config.raw.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if len(labels) == 1 or problem == "multi_label_classification" else "softmax"


def _embedding(path: Path, config: ModelConfig, encoder: bool) -> Pooling:
    """What modules.json and the folders that it names say."""
    modules = _modules(path)
    family = find_encoder_family(config.model_type)
    if not modules and family is not None and family.vector_size is not None:
        return Pooling("last", vector_size(config))
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if not modules:
        return Pooling("mean" if encoder else "last", config.hidden_size)
    if unknown := [kind for kind in kinds if kind not in _KNOWN]:
        raise ModelError(f"model: modules.json: {unknown[0]} is not supported (served are {', '.join(_KNOWN)})")
    if kinds[:2] != ["Transformer", "Pooling"] or "Normalize" in kinds[:-1] or "Pooling" in kinds[2:]:
        raise ModelError(f"model: modules.json: {' > '.join(kinds)} is not supported")
    dense = tuple(_dense(path, module["path"]) for module, kind in zip(modules, kinds, strict=True) if kind == "Dense")
    size = config.hidden_size
    for each in dense:
        if each.in_features != size:
            raise ModelError(
                f"model: {each.folder}/config.json: in_features: {size} numbers come, not {each.in_features}"
            )
        size = each.out_features
    return Pooling(_mode(path, modules[1]["path"]), size, "Normalize" in kinds, dense)


def _modules(path: Path) -> list[_Module]:
    if not path.is_dir():  # a GGUF file has no such module
        return []
    content = read_bytes_if_present(path / "modules.json", MAX_JSON_BYTES)
    if content is None:
        return []
    modules = decode_json(content, list[_Module], "modules.json")
    for module in modules:
        folder = PurePosixPath(module["path"])
        if folder.is_absolute() or ".." in folder.parts or not module["path"].isprintable():
            raise ModelError(f"model: modules.json: path: {module['path'][:100]!r} is not in the model's folder")
    return modules


def _mode(path: Path, folder: str) -> PoolingType:
    file = f"{folder}/config.json"
    fields = _read(path, file, _PoolingFields)
    if fields.get("include_prompt") is False:
        raise ModelError(f"model: {file}: include_prompt: false is not supported: prompts are pooled with their text")
    named = [mode for flag, mode in _FLAGS.items() if fields.get(flag)]
    named += [flag.removeprefix("pooling_mode_") for flag in _OTHER_FLAGS if fields.get(flag)]
    named = named or [fields.get("pooling_mode") or "mean"]
    if len(named) > 1 or named[0] not in _MODES:
        raise ModelError(f"model: {file}: pooling by {' and '.join(named)} is not supported (mean, cls, lasttoken)")
    return _MODES[named[0]]


def _dense(path: Path, folder: str) -> DenseModule:
    file = f"{folder}/config.json"
    content = read_json_if_present(path / file)
    if content is None:
        raise ModelError(f"model: there is no {file}")
    fields = convert_parsed_json(content, _DenseFields, file)
    name = fields["activation_function"].rpartition(".")[2]
    if name not in ("Identity", "Tanh"):
        raise ModelError(f"model: {file}: activation_function: {name} is not supported (Identity, Tanh)")
    activation: Literal["identity", "tanh"] = "tanh" if name == "Tanh" else "identity"
    return DenseModule(folder, fields["in_features"], fields["out_features"], fields["bias"], activation)


def _read(path: Path, file: str, kind: type[Fields]) -> Fields:
    content = read_json_if_present(path / file) if path.is_dir() else None
    return convert_parsed_json(content or {}, kind, file)
