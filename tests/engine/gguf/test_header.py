"""GGUF headers: what the reference package writes is read, and any broken header is rejected in one line."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quire.engine.checkpoint.model_resolver import read_model_config, resolve_model
from quire.engine.checkpoint.tensor_headers import read_checkpoint_size
from quire.engine.common.errors import ModelError
from quire.engine.gguf.header import read_header
from quire.engine.gguf.model_files import read_gguf_header
from quire.engine.text.tokenizer import Tokenizer
from tests.gguf_models import gguf, write_gguf
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(save_tiny_model(folder / "tiny", "llama", num_hidden_layers=1), folder / "model.gguf")


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def header(*parts: bytes, tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


def tensor_info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def test_gguf_header_equals_reference_reader(model: Path) -> None:
    reference, gguf_header = gguf.GGUFReader(str(model)), read_header(model)
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            assert gguf_header.metadata[key] == field.contents(), key
    assert len(gguf_header.tensors) == len(reference.tensors)
    data = model.read_bytes()
    for tensor in reference.tensors:
        stored = gguf_header.tensors[tensor.name]
        assert stored.type.name == tensor.tensor_type.name
        assert stored.shape == tuple(reversed(tensor.shape.tolist()))
        assert data[stored.offset : stored.offset + stored.nbytes] == np.ascontiguousarray(tensor.data).tobytes()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cut off"),
        (b"GGUF", "cut off"),
        (b"GGML" + bytes(40), "no GGUF file"),
        (header(version=1), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (header(tensors=2**62), "tensors"),
        (header(keys=2**62), "keys"),
        (header(keys=1), "cut off"),
        (header(struct.pack("<Q", 2**62), keys=1), "a key"),
        (header(struct.pack("<Q", 2**15), keys=1), "cut off"),
        (header(string("a"), struct.pack("<I", 13), keys=1), "a: has values of type 13"),
        (header(string("a"), struct.pack("<IIQ", 9, 9, 1), keys=1), "nested"),
        (header(string("a"), struct.pack("<IIQ", 9, 8, 2**24), keys=1), "cut off"),
        (header(string("a"), struct.pack("<IIQ", 9, 4, 2**40), keys=1), "a: has 1099511627776 items"),
        (header(string("a"), struct.pack("<IQ", 8, 2**63), keys=1), "a: has 9223372036854775808 bytes"),
        (header(string("a"), struct.pack("<IQ", 8, 1), b"\xff", keys=1), "UTF-8"),
        (header(*[string("a") + struct.pack("<II", 4, 1)] * 2, keys=2), "a: appears twice"),
        (header(string("general.alignment"), struct.pack("<II", 4, 3), keys=1), "power of two"),
        (header(string("a\nb"), struct.pack("<II", 4, 1), keys=1), "cannot be printed"),
        (header(tensor_info("a\nb", (1,), 0, 0), tensors=1), "cannot be printed"),
        (header(tensor_info("t", (1,) * 5, 0, 0), tensors=1), "t: has 5 dimensions"),
        (header(tensor_info("t", (2**62, 2**62), 0, 0), tensors=1), "t: has the shape"),
        (header(tensor_info("t", (0, 4), 0, 0), tensors=1), "t: has the shape"),
        (header(tensor_info("t", (16,), 2, 0), bytes(100), tensors=1), "Q4_0"),
        (header(tensor_info("t", (256,), 41, 0), bytes(100), tensors=1), "t: has the type Q1_0"),
        (header(tensor_info("t", (256,), 99, 0), bytes(100), tensors=1), "t: has the type 99"),
        (header(tensor_info("t", (64,), 0, 0), bytes(100), tensors=1), "t: is outside"),
        (header(tensor_info("t", (1,), 0, 2**63), bytes(100), tensors=1), "t: is outside"),
        (header(tensor_info("t", (1,), 0, 7), bytes(100), tensors=1), "t: its offset 7"),
        (header(*[tensor_info("t", (1,), 0, 0)] * 2, bytes(100), tensors=2), "t: appears twice"),
    ],
)
def test_broken_gguf_header_error_says_what_is_wrong(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=says) as caught:
        read_header(tmp_path / "x.gguf")
    assert str(caught.value).startswith("model: x.gguf")
    assert "\n" not in str(caught.value)


def read_everything(path: Path) -> None:
    """Read all of a header that a start reads."""
    read_model_config(path)
    read_checkpoint_size(path)
    Tokenizer.from_pretrained(path)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1000, 3000, 3001, 3002])
def test_fuzzed_gguf_header_neither_crashes_nor_fills_memory(count: int, model: Path, tmp_path: Path) -> None:
    """Bytes, lengths and ends of a real header are changed at random: it is read, or rejected in one line."""
    generator, whole = random.Random(count), bytearray(model.read_bytes())
    length = read_header(model).tensors["token_embd.weight"].offset
    file, refused = tmp_path / "fuzzed.gguf", 0
    errors: list[str] = []
    read_everything(model)
    for _ in range(count):
        content = bytearray(whole)
        for _ in range(generator.choice((1, 1, 2, 8))):
            at = generator.randrange(length if generator.random() < 0.7 else 200)
            size = generator.choice((1, 4, 8))
            value = generator.choice((generator.randrange(256), 0, 255, 2**31, 2**32 - 1, 2**62, 2**64 - 1))
            content[at : at + size] = (value % 256**size).to_bytes(size, "little")
        if generator.random() < 0.1:
            del content[generator.randrange(len(content)) :]
        file.write_bytes(content)
        tracemalloc.start()
        try:
            read_everything(file)
        except ModelError as error:
            refused += 1
            errors.append(str(error))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 40 * len(whole)
    assert all("\n" not in each and len(each) < 1000 for each in errors)
    assert refused > count // 4


def parts(model: Path, folder: Path, change: Callable[[object, int], None] = lambda *_: None) -> list[Path]:
    """Write the file in three parts, as llama.cpp's gguf-split does."""
    reader = gguf.GGUFReader(str(model))
    folder.mkdir()
    files = [folder / f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for number, file in enumerate(files):
        writer = gguf.GGUFWriter(str(file), "llama")
        if number == 0:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    sub = field.types[1] if len(field.types) > 1 else None
                    writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::3]:
            writer.add_tensor(tensor.name, np.ascontiguousarray(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return files


def test_split_gguf_reads_as_one_model(model: Path, tmp_path: Path) -> None:
    files = parts(model, tmp_path / "parts")
    assert resolve_model(str(tmp_path / "parts")) == files[0]
    whole, split = read_gguf_header(model), read_gguf_header(files[0])
    assert split.tensors.keys() == whole.tensors.keys()
    for name, tensor in split.tensors.items():
        other = whole.tensors[name]
        content = tensor.file.read_bytes()[tensor.offset :][: tensor.nbytes]
        assert content == other.file.read_bytes()[other.offset :][: other.nbytes]
    with pytest.raises(ModelError, match="later part"):
        read_gguf_header(files[1])
    os.replace(files[2], files[1])
    with pytest.raises(ModelError, match=r"split\.no"):
        read_gguf_header(files[0])
    files[1].unlink()
    with pytest.raises(ModelError, match="there is no m-00002-of-00003"):
        read_gguf_header(files[0])


def test_folder_with_several_gguf_files_is_rejected(model: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).symlink_to(model)
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("general.architecture", "rwkv6", "general.architecture: 'rwkv6' is not served"),
        ("general.architecture", "qwen3moe", "qwen3moe.expert_count"),
        ("llama.rope.dimension_count", 4, "llama.rope.dimension_count"),
        ("llama.rope.scaling.type", "longrope", "llama.rope.scaling.type: 'longrope'"),
        ("llama.embedding_length", 2**31, "hidden_size"),
        ("llama.block_count", 0, "num_hidden_layers"),
        ("llama.attention.head_count", [4, 2], "llama.attention.head_count"),
        ("llama.attention.head_count", "four", "llama.attention.head_count"),
        ("llama.rope.freq_base", float("nan"), "llama.rope.freq_base"),
    ],
)
def test_unsupported_gguf_metadata_is_named_in_error(
    key: str, value: object, says: str, model: Path, tmp_path: Path
) -> None:
    reader = gguf.GGUFReader(str(model))
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), str(value) if key == "general.architecture" else "llama")
    kinds = {int: gguf.GGUFValueType.UINT32, str: gguf.GGUFValueType.STRING, float: gguf.GGUFValueType.FLOAT32}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in (key, "general.architecture"):
            sub = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub)
    if key != "general.architecture":
        kind = gguf.GGUFValueType.ARRAY if isinstance(value, list) else kinds[type(value)]
        writer.add_key_value(key, value, kind, sub_type=kinds[int] if isinstance(value, list) else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.ascontiguousarray(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError) as caught:
        read_model_config(tmp_path / "x.gguf")
    assert says in str(caught.value)
