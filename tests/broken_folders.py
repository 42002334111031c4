"""Model folders with one defect each. A start must fail with one line that names file and field."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.common.config import DEMO_MODEL

Change = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Broken:
    name: str
    change: Change
    """Breaks a copy of a valid folder."""
    says: tuple[str, ...]
    """Words that the error must contain."""

    def make(self, folder: Path) -> Path:
        copy_demo(folder)
        self.change(folder)
        return folder


def copy_demo(folder: Path) -> Path:
    """Copy the embedded model; its weights are a link, to save space."""
    folder.mkdir(parents=True)
    for file in Path(DEMO_MODEL).glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    (folder / "model.safetensors").symlink_to(Path(DEMO_MODEL) / "model.safetensors")
    return folder


def set_field(file: str, key: str, value: Any) -> Change:
    """Put `value` into an object of the file; a text that begins with @ is JSON source."""

    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        source = value[1:] if isinstance(value, str) and value.startswith("@") else json.dumps(value)
        text = json.dumps(content | {key: "@@"}).replace('"@@"', source)
        (folder / file).write_text(text)

    return change


def update(file: str, **values: Any) -> Change:
    return lambda folder: (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))


def write(file: str, content: str | bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def replace_by(file: str, make: Callable[[Path], object]) -> Change:
    def change(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return change


def weights(header: Any, data: bytes = b"", length: int | None = None) -> Change:
    def change(folder: Path) -> None:
        source = header if isinstance(header, bytes) else json.dumps(header).encode()
        content = struct.pack("<Q", len(source) if length is None else length) + source + data
        write("model.safetensors", content)(folder)

    return change


def edit_header(edit: Callable[[dict[str, Any]], object]) -> Change:
    """Change the header of the real weights."""

    def change(folder: Path) -> None:
        whole = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8 : 8 + length])
        edit(header)
        weights(header, whole[8 + length :])(folder)

    return change


def tokenizer_part(**parts: Any) -> Change:
    return update("tokenizer.json", **parts)


def split_by(pattern: str) -> Change:
    part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return tokenizer_part(pre_tokenizer=part)


def index(weight_map: Any) -> Change:
    return lambda folder: write("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))(folder)


CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
NESTED = "@" + "[" * 100_000 + "]" * 100_000
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
WRONG_NUMBERS: dict[str, Any] = {
    **{"text": "many", "list": [1], "object": {"a": 1}, "negative": -1, "zero": 0, "fraction": 2.5, "true": True},
    **{"nan": "@NaN", "infinity": "@Infinity", "billion": 10**9, "huge": 10**30, "digits": "@" + "9" * 5000},
    "nested": NESTED,
}
NOT_EVERYWHERE = {"zero": ("rms_norm_eps",), "billion": ("rope_theta",), "true": (), "fraction": ("rope_theta",)}
"""Values that are valid in some fields."""
FLOATS = ("rms_norm_eps", "rope_theta")
TEXTS = ("model_type", "hidden_act", "torch_dtype", "dtype")
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "is_encoder_decoder")
OTHERS: dict[str, Any] = {
    "rope_parameters": [1],
    "rope_scaling": "linear",
    "architectures": [5],
    "layer_types": ["full_attention", 7],
    "sliding_window": -5,
    "max_window_layers": "all",
    "no_rope_layers": [1, None],
    "no_rope_layer_interval": 0,
    "query_pre_attn_scalar": 0,
    "attn_logit_softcapping": -1,
    "final_logit_softcapping": "30",
    "sliding_window_pattern": "LX",
    "rope_local_base_freq": "@NaN",
    "eos_token_id": ["2"],
    "quantization_config": "awq",
}


def _config_fields() -> list[Broken]:
    found = []
    for field in (*SIZES, *OPTIONAL_SIZES, *FLOATS):
        for kind, value in WRONG_NUMBERS.items():
            if field in NOT_EVERYWHERE.get(kind, ()) or (kind == "fraction" and field in FLOATS):
                continue
            says = (CONFIG,) if kind in ("nested", "digits") else (CONFIG, field)
            found.append(Broken(f"{field}-{kind}", set_field(CONFIG, field, value), says))
    found += [Broken(f"{field}-null", set_field(CONFIG, field, None), (CONFIG, field)) for field in SIZES]
    for field in TEXTS:
        found += [Broken(f"{field}-{value}", set_field(CONFIG, field, value), (CONFIG, field)) for value in (5, ["a"])]
    found += [Broken(f"{field}-text", set_field(CONFIG, field, "yes"), (CONFIG, field)) for field in FLAGS]
    found += [Broken(field, set_field(CONFIG, field, value), (CONFIG, field)) for field, value in OTHERS.items()]
    return found


def _ropes() -> list[Broken]:
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "no-factor": ({"rope_type": "linear"}, "factor"),
        "factor-0": ({"rope_type": "linear", "factor": 0}, "factor"),
        "theta-text": ({"rope_theta": "big"}, "rope_theta"),
        "theta-0": ({"rope_theta": 0}, "rope_theta"),
        "type-number": ({"rope_type": 5}, "rope_type"),
        "type-unknown": ({"rope_type": "spiral"}, "rope_type"),
        "llama3-lacks": ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        "llama3-turned": (
            {
                **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 0.5},
                "original_max_position_embeddings": 64,
            },
            "high_freq_factor",
        ),
    }
    return [
        Broken(f"rope-{name}", set_field(CONFIG, "rope_parameters", value), (field,))
        for name, (value, field) in wrong.items()
    ]


def _shapes() -> list[Broken]:
    return [
        Broken("heads-undivided", update(CONFIG, num_key_value_heads=3), (CONFIG, "num_key_value_heads")),
        Broken("head-odd", update(CONFIG, head_dim=63), (CONFIG, "head_dim")),
        Broken("head-none", update(CONFIG, head_dim=None, num_attention_heads=512, num_key_value_heads=512), ("head",)),
        Broken("layer-types-short", update(CONFIG, layer_types=["full_attention"]), (CONFIG, "layer_types")),
        Broken("layer-types-unknown", update(CONFIG, layer_types=["mamba"] * 6), (CONFIG, "layer_types", "mamba")),
        Broken("other-layers", update(CONFIG, num_hidden_layers=7), ("weights lack model.layers.6",)),
        Broken("all-layers", update(CONFIG, num_hidden_layers=4096), ("weights lack model.layers.",)),
        Broken("other-width", update(CONFIG, intermediate_size=641), ("mlp", "shape")),
        Broken("family-unknown", update(CONFIG, model_type="elephant"), ("model_type", "elephant")),
        Broken("act-unknown", update(CONFIG, hidden_act="swish7"), ("hidden_act", "swish7")),
        Broken("dtype-unknown", update(CONFIG, torch_dtype="int3"), ("dtype", "int3")),
        Broken("quantized", update(CONFIG, quantization_config={"quant_method": "aqlm"}), ("quant_method", "aqlm")),
        Broken("text-config", update(CONFIG, model_type="gemma3", text_config=5), (CONFIG, "text_config")),
    ]


def _files() -> list[Broken]:
    names = (CONFIG, GENERATION, TOKENIZER, "tokenizer.json", "model.safetensors", "model.safetensors.index.json")
    found = []
    for name in (*names, "special_tokens_map.json", "chat_template.json", "chat_template.jinja"):
        found.append(Broken(f"fifo-{name}", replace_by(name, os.mkfifo), (name, "regular")))
        found.append(Broken(f"directory-{name}", replace_by(name, os.mkdir), (name,)))
        found.append(Broken(f"dangling-{name}", replace_by(name, lambda path: path.symlink_to("gone")), (name, "link")))
        found.append(Broken(f"device-{name}", replace_by(name, lambda path: path.symlink_to("/dev/zero")), (name,)))
        if name != "special_tokens_map.json":  # some models have an empty file
            found.append(Broken(f"empty-{name}", write(name, b""), (name,)))
        if name.endswith(".json"):
            found.append(Broken(f"list-{name}", write(name, "[]"), (name,)))
            found.append(Broken(f"cut-{name}", write(name, '{"a": "b'), (name,)))
            found.append(Broken(f"nested-{name}", write(name, '{"a":' * 100_000), (name,)))
            found.append(Broken(f"latin-{name}", write(name, '{"é": 1}'.encode("latin-1")), (name,)))
            found.append(Broken(f"large-{name}", replace_by(name, lambda path: _sparse(path, 2**40)), (name, "larger")))
    found = [broken for broken in found if broken.name != "fifo-"]
    return [
        *found,
        Broken("none", _remove(CONFIG), (CONFIG,)),
        Broken("no-weights", _remove("model.safetensors"), ("lacks model",)),
    ]


def _sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def _remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def _generation() -> list[Broken]:
    wrong: dict[str, list[Any]] = {
        "temperature": ["warm", -1, "@NaN", "@Infinity", 1e9, [0.7], True],
        "top_p": ["x", 0, 2, {}],
        "top_k": ["x", -5, 2.5, 10**30],
        "min_p": ["x", -0.1, 1.5],
        "repetition_penalty": ["x", 0, -1],
        "typical_p": [0, 1.1],
        "dry_allowed_length": [0, 1.5],
        "do_sample": ["no", 0],
        "eos_token_id": ["2", [2, "0"], {"a": 1}, 10**30, 1.5],
    }
    return [
        Broken(f"generation-{field}-{place}", set_field(GENERATION, field, value), (GENERATION, field))
        for field, values in wrong.items()
        for place, value in enumerate(values)
    ]


def _safetensors() -> list[Broken]:
    name, tensor = "model.safetensors", "model.norm.weight"
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}

    def cut(folder: Path) -> None:
        write(name, (folder / name).read_bytes()[:-1000])(folder)

    def edit(**values: Any) -> Change:
        return edit_header(lambda header: header[tensor].update(values))

    def share(header: dict[str, Any]) -> None:
        begin, end = header[tensor]["data_offsets"]
        step = 4 if begin == 0 else -4
        header[tensor]["data_offsets"] = [begin + step, end + step]

    return [
        Broken("weights-cut", cut, (name, "cut off")),
        Broken("weights-seven-bytes", write(name, b"1234567"), (name,)),
        Broken("weights-header-long", weights({"a": entry}, bytes(16), length=2**63), (name, "header")),
        Broken("weights-header-longer-than-file", weights({"a": entry}, bytes(16), length=10**6), (name, "header")),
        Broken("weights-header-short", weights({"a": entry}, bytes(16), length=5), (name,)),
        Broken("weights-header-list", weights([1, 2]), (name,)),
        Broken("weights-header-nested", weights(b"[" * 10**6), (name,)),
        Broken("weights-header-not-utf8", weights(b'{"\xff": 1}'), (name,)),
        Broken("weights-entry-number", edit_header(lambda header: header.update({tensor: 5})), (name, tensor)),
        Broken("weights-no-dtype", edit_header(lambda header: header[tensor].pop("dtype")), (name, tensor, "dtype")),
        Broken("weights-offsets-text", edit(data_offsets="all"), (name, tensor, "data_offsets")),
        Broken("weights-offsets-outside", edit(data_offsets=[2**40, 2**40 + 512]), (name, tensor, "data_offsets")),
        Broken("weights-offsets-backwards", edit(data_offsets=[512, 0]), (name, tensor, "data_offsets")),
        Broken("weights-offsets-shared", edit_header(share), (name, "data_offsets", "shares bytes")),
        Broken("weights-offsets-negative", edit(data_offsets=[-512, 0]), (name, tensor, "data_offsets")),
        Broken("weights-shape-text", edit(shape=["256"]), (name, tensor, "shape")),
        Broken("weights-shape-huge", edit(shape=[2**61, 2**61]), (name, tensor)),
        Broken("weights-shape-other", edit(shape=[255]), (name, tensor)),
        Broken("weights-shape-transposed", edit(shape=[1, 256]), (tensor, "shape")),
        Broken("weights-dtype-other", edit(dtype="F64"), (name, tensor)),
        Broken("weights-dtype-unknown", edit(dtype="F7"), (name,)),
        Broken("weights-dtype-integer", edit(dtype="I16"), (tensor, "int16")),
        Broken("weights-not-ours", weights({"a": entry}, bytes(16)), ("weights lack",)),
        Broken("weights-none", weights({}), ("weights lack",)),
    ]


def _index() -> list[Broken]:
    name = "model.safetensors.index.json"
    outside = ("../model.safetensors", "/etc/passwd", "a/../../b", "..", "x\0y", "a\nb")
    return [
        *(Broken(f"index-{place}", index({"a": value}), (name, "weight_map")) for place, value in enumerate(outside)),
        Broken("index-list", index(["model.safetensors"]), (name, "weight_map")),
        Broken("index-number", index({"a": 5}), (name, "weight_map")),
        Broken("index-null", index(None), (name, "weight_map")),
        Broken("index-empty", index({}), (name, "weight_map")),
        Broken("index-no-map", write(name, "{}"), (name, "weight_map")),
        Broken("index-missing-shard", index({"a": "x.safetensors"}), ("lacks x.safetensors",)),
    ]


def _tokenizers() -> list[Broken]:
    explosive = ("(a+)+$", "(a|aa)+$", "([a-z]+\\s?)*1", "(x+x+)+y", "a*a*a*a*a*b")
    name = "tokenizer.json"
    return [
        *(Broken(f"split-{place}", split_by(each), (name, "pattern")) for place, each in enumerate(explosive)),
        Broken("split-invalid", split_by("(a"), ("tokenizer",)),
        Broken("split-normalizer", tokenizer_part(normalizer=_replace("(a+)+$")), (name, "pattern")),
        Broken("tokenizer-object", write(name, "{}"), ("tokenizer",)),
        Broken("tokenizer-model", tokenizer_part(model=5), ("tokenizer",)),
        Broken("tokenizer-vocab", tokenizer_part(model={"type": "BPE", "vocab": [1], "merges": []}), ("tokenizer",)),
        Broken("tokenizer-id", tokenizer_part(model=_bpe({"a": -1})), ("tokenizer",)),
        Broken("tokenizer-far-id", tokenizer_part(model=_bpe({"a": 0, "b": 2**32 - 2})), (name, "id")),
        Broken("tokenizer-merges", tokenizer_part(model=_bpe({"a": 0}) | {"merges": [["x", "y"]]}), ("tokenizer",)),
        Broken("tokenizer-decoder", tokenizer_part(decoder={"type": "Nothing"}), ("tokenizer",)),
        Broken("tokenizer-added", tokenizer_part(added_tokens=[{"id": "x"}]), ("tokenizer",)),
        *(
            Broken(f"tokenizer-config-{field}-{place}", set_field(TOKENIZER, field, value), (TOKENIZER, field))
            for field, values in {
                "bos_token": [5, ["<s>"], {"text": "<s>"}],
                "eos_token": [True],
                "added_tokens_decoder": [[1], {"x": {"content": "a"}}, {"1": "a"}, {"1": {"content": 5}}, {"1": {}}],
                "chat_template": [5, {"a": "b"}, [5], [{"name": "default"}]],
            }.items()
            for place, value in enumerate(values)
        ),
    ]


def _replace(pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": " "}


def _bpe(vocab: dict[str, int]) -> dict[str, Any]:
    return {"type": "BPE", "vocab": vocab, "merges": []}


def _second_look() -> list[Broken]:
    """Folders of a second attack, made after the first one's faults were fixed."""
    index_name, name, norm = "model.safetensors.index.json", "model.safetensors", "model.norm.weight"
    config = (Path(DEMO_MODEL) / CONFIG).read_bytes()
    named = {f"t{i}": f"s{i}.safetensors" for i in range(100_000)}
    empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    growing = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa" * 5000}
    special = "additional_chat_templates"
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

    def inside(file: str, make: Callable[[Path], object]) -> Change:
        def change(folder: Path) -> None:
            (folder / special).mkdir()
            make(folder / special / file)

        return change

    def without_tokenizer(*changes: Change) -> Change:
        return lambda folder: [change(folder) for change in (_remove("tokenizer.json"), *changes)]

    def to_fifo(folder: Path) -> None:
        index({"a": "fifo.safetensors"})(folder)
        os.mkfifo(folder / "fifo.safetensors")

    return [
        Broken("config-bom", write(CONFIG, b"\xef\xbb\xbf" + config), (CONFIG, "BOM")),
        Broken("config-utf16", write(CONFIG, config.decode().encode("utf-16")), (CONFIG, "UTF-8")),
        Broken("config-loop", replace_by(CONFIG, lambda path: path.symlink_to(CONFIG)), (CONFIG, "links")),
        Broken("eos-many", set_field(CONFIG, "eos_token_id", [2] * 10_000), (CONFIG, "eos_token_id")),
        Broken("index-many", index(named), (index_name, "100000 files")),
        Broken("index-long", index({"a": "x" * 5000}), (index_name, "weight_map")),
        Broken("index-fifo", to_fifo, ("fifo.safetensors", "regular")),
        Broken("index-folder", index({"a": "."}), ("regular",)),
        Broken(
            "weights-dimensions", edit_header(lambda it: it[norm].update(shape=[1] * 100_000)), (name, norm, "shape")
        ),
        Broken("weights-many", weights(dict.fromkeys(map(str, range(200_000)), empty)), (name, "200000 tensors")),
        Broken("weights-long-name", weights({"x" * 10**6: 5}), (name, "expected object")),
        Broken("weights-long-names", weights({"x" * 10**6: empty}), ("weights lack",)),
        Broken("tokenizer-word-level", tokenizer_part(model=_words()), ("tokenizer.json", "UNK")),
        Broken(
            "tokenizer-prepends", tokenizer_part(normalizer={"type": "Prepend", "prepend": "x" * 10**7}), ("longer",)
        ),
        Broken("tokenizer-grows", tokenizer_part(normalizer=_sequence([growing] * 6)), ("longer",)),
        Broken("tokenizer-none", without_tokenizer(), ("tokenizer.json",)),
        Broken("tokenizer-model-fifo", without_tokenizer(replace_by("tokenizer.model", os.mkfifo)), ("regular",)),
        Broken("more-templates-fifo", inside("a.jinja", os.mkfifo), ("a.jinja", "regular")),
        Broken("more-templates-folder", inside("a.jinja", os.mkdir), ("a.jinja", "regular")),
        Broken("more-templates-endless", inside("tool_use.jinja", lambda it: it.write_text(endless)), ("tool_use",)),
    ]


def _words() -> dict[str, Any]:
    return {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "zz"}


def _sequence(normalizers: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": normalizers}


def _templates() -> list[Broken]:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    doubling = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    wrong = {
        "cut": "{% for x in messages",
        "endless": endless,
        "doubling": doubling,
        "repeated": "{{ 'x' * 10 ** 11 }}",
        "formatted": "{{ '%9999999999d' % 1 }}",
        "deep": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "unknown-tag": "{% include_everything %}",
        "long": "x{{ y }}" * 10**6,
    }
    return [
        *(
            Broken(f"template-{name}", set_field(TOKENIZER, "chat_template", text), ("template",))
            for name, text in wrong.items()
        ),
        Broken("template-file-endless", write("chat_template.jinja", endless), ("template",)),
        Broken("template-file-latin", write("chat_template.jinja", b"\xe9"), ("chat_template.jinja", "UTF-8")),
        Broken("template-json", write("chat_template.json", '{"chat_template": 5}'), ("chat_template.json",)),
    ]


ALL = [
    *_config_fields(),
    *_ropes(),
    *_shapes(),
    *_files(),
    *_generation(),
    *_safetensors(),
    *_index(),
    *_tokenizers(),
    *_templates(),
    *_second_look(),
]
