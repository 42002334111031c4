"""Reads how a model computes vectors, from sentence-transformers' modules
(https://sbert.net/docs/package_reference/sentence_transformer/models.html) and classifier heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, TypedDict, TypeVar

from msgspec import Meta

from quire.engine.checkpoint.config_reader import find_weight_names
from quire.engine.checkpoint.quantization import explain_unsupported_quantization
from quire.engine.checkpoint.tensor_headers import read_tensor_headers
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, ModelError
from quire.engine.common.folder_reader import (
    MAX_JSON_BYTES,
    convert_parsed_json,
    decode_json,
    read_bytes_if_present,
    read_json_if_present,
)
from quire.engine.common.request_params import PoolingType, Task
from quire.engine.families import find_encoder_family
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.schema.config_objects import ShortText, Width
from quire.engine.families.base.schema.config_schema import MAX_LABELS

ClassifierActivation = Literal["identity", "sigmoid", "softmax", "tanh"]
_POOLING_TYPES: dict[str, PoolingType] = {
    "lasttoken": "last",
    "last": "last",
    "mean": "mean",
    "cls": "cls",
    "none": "none",
}
_MODE_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
}
_UNSUPPORTED_MODE_FLAGS = (
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
)
_SUPPORTED_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
MAX_PROMPTS, MAX_PROMPT_CHARS = 256, 4096
Fields = TypeVar("Fields")


class _SentenceModule(TypedDict):
    path: ShortText
    type: ShortText


class _PoolingFields(TypedDict, total=False):
    pooling_mode: ShortText | None
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
    activation_function: ShortText


class _SentenceBertFields(TypedDict, total=False):
    max_seq_length: Width | None
    do_lower_case: bool | None


class _PromptFields(TypedDict, total=False):
    prompts: (
        Annotated[dict[ShortText, Annotated[str, Meta(max_length=MAX_PROMPT_CHARS)]], Meta(max_length=MAX_PROMPTS)]
        | None
    )
    default_prompt_name: ShortText | None


@dataclass(frozen=True, slots=True)
class DenseModule:
    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: Literal["identity", "tanh"]


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    pooling_type: PoolingType
    vector_size: int
    normalize: bool = True
    dense_modules: tuple[DenseModule, ...] = ()
    labels: tuple[str, ...] = ()
    """Empty for embedding models."""
    activation: ClassifierActivation = "identity"
    classifier_tokens: tuple[str, str] | None = None
    """A decoder's score is the second token's logit minus the first's."""
    max_seq_length: int | None = None
    """Longest text in training, in tokens; None if unknown."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None

    @property
    def task(self) -> Task:
        return "classify" if self.labels else "embed"


def read_pooling_config(
    path: Path, config: ModelConfig, pooling_type: str = "auto", classifier_tokens: Sequence[str] = ()
) -> PoolingConfig:
    """`pooling_type` overrides the files unless it is "auto". By default decoders pool the last token, encoders the
    mean of all. Raises ModelError naming file and field.
    """
    is_encoder = find_encoder_family(config.model_type) is not None
    if is_encoder:
        quantization = config.raw.get("quantization_config") or {}
        if (reason := explain_unsupported_quantization(quantization, is_encoder=True)) is not None:
            raise ModelError(f"model: {reason}")
    if classifier_tokens:
        if is_encoder or is_classifier(config) or len(classifier_tokens) != 2:
            wrong = "takes two tokens, and a decoder with an output head"
            raise ConfigError(f"classifier_from_token: {wrong}", param="classifier_from_token")
        tokens = (classifier_tokens[0], classifier_tokens[1])
        return PoolingConfig("last", 1, False, (), (tokens[1],), "sigmoid", tokens)
    if is_classifier(config):
        labels = classifier_labels(config)
        model_pooling = PoolingConfig(
            _classifier_pooling_type(config), len(labels), False, (), labels, _classifier_activation(config, labels)
        )
    else:
        model_pooling = _read_embedding_pooling(path, config, is_encoder)
    if pooling_type == "none" and model_pooling.labels:
        raise ConfigError(
            "pooling_type: none is only for embeddings, and this model scores texts", param="pooling_type"
        )
    chosen_type = model_pooling.pooling_type if pooling_type == "auto" else _POOLING_TYPES[pooling_type]
    settings = _read_json_fields(path, "sentence_bert_config.json", _SentenceBertFields)
    prompts = _read_json_fields(path, "config_sentence_transformers.json", _PromptFields)
    if settings.get("do_lower_case"):
        raise ModelError("model: sentence_bert_config.json: do_lower_case is not supported; its tokenizer must do it")
    prompt_texts, default_name = prompts.get("prompts") or {}, prompts.get("default_prompt_name")
    if default_name is not None and default_name not in prompt_texts:
        raise ModelError("model: config_sentence_transformers.json: default_prompt_name: is not one of its prompts")
    return PoolingConfig(
        pooling_type=chosen_type,
        vector_size=model_pooling.vector_size,
        normalize=model_pooling.normalize,
        dense_modules=model_pooling.dense_modules,
        labels=model_pooling.labels,
        activation=model_pooling.activation,
        max_seq_length=settings.get("max_seq_length"),
        prompts=prompt_texts,
        default_prompt_name=default_name,
    )


def embedding_size(config: ModelConfig) -> int:
    family = find_encoder_family(config.model_type)
    return config.hidden_size if family is None or family.embedding_size is None else family.embedding_size(config)


def is_classifier(config: ModelConfig) -> bool:
    return any(name.endswith("ForSequenceClassification") for name in config.raw.get("architectures") or ())


def can_generate(path: Path, config: ModelConfig, *, is_dummy: bool) -> bool:
    """False for encoders and classifiers. `is_dummy` skips the search for a head in the weights."""
    if find_encoder_family(config.model_type) is not None or is_classifier(config):
        return False
    if config.tie_embeddings or is_dummy:
        return True
    names = read_tensor_headers(path) if path.is_dir() else {}  # the loader checks GGUF files
    weight_names = find_weight_names(config.model_type)
    return not names or any(
        weight_names.modules_from_checkpoint(name.rpartition(".")[0]) == ("lm_head",) for name in names
    )


def choose_tasks(path: Path, config: ModelConfig, pooling: PoolingConfig, settings: EngineConfig) -> tuple[Task, ...]:
    """A generative model embeds only if files or settings define pooling, because otherwise its hidden states mean
    little (any two texts score 0.99). Raises ConfigError for an impossible setting of runner.
    """
    has_head, runner = can_generate(path, config, is_dummy=settings.load_format == "dummy"), settings.runner
    if runner == "generate" and not has_head:
        raise ConfigError(f"runner: a {config.model_type} without an output head cannot generate", param="runner")
    is_pooling_specified = settings.pooling_type != "auto" or pooling.task != "embed" or bool(_read_modules(path))
    if has_head and (runner == "generate" or (runner == "auto" and not is_pooling_specified)):
        return ("generate",)
    return ("generate", pooling.task) if has_head and runner == "auto" else (pooling.task,)


def read_pooling_and_tasks(
    path: Path, config: ModelConfig, settings: EngineConfig
) -> tuple[PoolingConfig, tuple[Task, ...]]:
    """Raises ConfigError."""
    if config.transformers_config is not None:
        return PoolingConfig("last", config.hidden_size), ("generate",)
    pooling = read_pooling_config(path, config, settings.pooling_type, settings.classifier_from_token)
    tasks = choose_tasks(path, config, pooling, settings)
    has_drafter = settings.speculative_config is not None and settings.speculative_config.method != "none"
    if has_drafter and "generate" not in tasks:
        wrong = "speculative_config: this model generates no text with these settings, so nothing can be drafted"
        raise ConfigError(wrong, param="speculative_config")
    return pooling, tasks


def classifier_labels(config: ModelConfig) -> tuple[str, ...]:
    """In the order of the classifier's scores. Raises ModelError."""
    label_by_index = config.raw.get("id2label") or {}
    count = len(label_by_index) or config.raw.get("num_labels") or 2
    if not 1 <= count <= MAX_LABELS:
        raise ModelError(f"model: config.json: id2label: {count} labels, at most {MAX_LABELS} are served")
    return tuple(label_by_index.get(str(index), f"LABEL_{index}") for index in range(count))


def _classifier_pooling_type(config: ModelConfig) -> PoolingType:
    if (family := find_encoder_family(config.model_type)) is None:
        return "last"
    return "mean" if family.reads_classifier_pooling and config.raw.get("classifier_pooling") == "mean" else "cls"


def _classifier_activation(config: ModelConfig, labels: tuple[str, ...]) -> ClassifierActivation:
    """As in sentence-transformers' CrossEncoder and vLLM."""
    sentence_transformers_name = (config.raw.get("sentence_transformers") or {}).get("activation_fn")
    name = (sentence_transformers_name or config.raw.get("sbert_ce_default_activation_function") or "").rpartition(".")[
        2
    ]
    if name:
        if name not in ("Identity", "Sigmoid"):
            raise ModelError(f"model: config.json: activation_fn: {name} is not supported (Identity, Sigmoid)")
        return "identity" if name == "Identity" else "sigmoid"
    problem = config.raw.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if len(labels) == 1 or problem == "multi_label_classification" else "softmax"


def _read_embedding_pooling(path: Path, config: ModelConfig, is_encoder: bool) -> PoolingConfig:
    modules = _read_modules(path)
    family = find_encoder_family(config.model_type)
    if not modules and family is not None and family.embedding_size is not None:
        return PoolingConfig("last", embedding_size(config))
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if not modules:
        return PoolingConfig("mean" if is_encoder else "last", config.hidden_size)
    if unknown := [kind for kind in kinds if kind not in _SUPPORTED_MODULES]:
        raise ModelError(
            f"model: modules.json: {unknown[0]} is not supported (served are {', '.join(_SUPPORTED_MODULES)})"
        )
    if kinds[:2] != ["Transformer", "Pooling"] or "Normalize" in kinds[:-1] or "Pooling" in kinds[2:]:
        raise ModelError(f"model: modules.json: {' > '.join(kinds)} is not supported")
    dense = tuple(
        _read_dense_module(path, module["path"]) for module, kind in zip(modules, kinds, strict=True) if kind == "Dense"
    )
    size = config.hidden_size
    for each in dense:
        if each.in_features != size:
            raise ModelError(
                f"model: {each.folder}/config.json: in_features: {size} numbers arrive, not {each.in_features}"
            )
        size = each.out_features
    return PoolingConfig(_read_pooling_type(path, modules[1]["path"]), size, "Normalize" in kinds, dense)


def _read_modules(path: Path) -> list[_SentenceModule]:
    if not path.is_dir():  # GGUF files have no modules
        return []
    content = read_bytes_if_present(path / "modules.json", MAX_JSON_BYTES)
    if content is None:
        return []
    modules = decode_json(content, list[_SentenceModule], "modules.json")
    for module in modules:
        folder = PurePosixPath(module["path"])
        if folder.is_absolute() or ".." in folder.parts or not module["path"].isprintable():
            raise ModelError(f"model: modules.json: path: {module['path'][:100]!r} is not in the model's folder")
    return modules


def _read_pooling_type(path: Path, folder: str) -> PoolingType:
    file = f"{folder}/config.json"
    fields = _read_json_fields(path, file, _PoolingFields)
    if fields.get("include_prompt") is False:
        raise ModelError(f"model: {file}: include_prompt: false is not supported: the tokens of prompts are pooled too")
    modes = [mode for flag, mode in _MODE_FLAGS.items() if fields.get(flag)]
    modes += [flag.removeprefix("pooling_mode_") for flag in _UNSUPPORTED_MODE_FLAGS if fields.get(flag)]
    modes = modes or [fields.get("pooling_mode") or "mean"]
    if len(modes) > 1 or modes[0] not in _POOLING_TYPES:
        raise ModelError(f"model: {file}: pooling by {' and '.join(modes)} is not supported (mean, cls, lasttoken)")
    return _POOLING_TYPES[modes[0]]


def _read_dense_module(path: Path, folder: str) -> DenseModule:
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


def _read_json_fields(path: Path, file: str, fields_class: type[Fields]) -> Fields:
    content = read_json_if_present(path / file) if path.is_dir() else None
    return convert_parsed_json(content or {}, fields_class, file)
