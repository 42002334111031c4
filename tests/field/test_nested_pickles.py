"""Nested pickles are read in linear time. A user saw: a `.bin` file of nested lists delayed the start by the square of
its size (issue 56, item 6). Quadratic or endless reading would exceed the test's timeout.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest

from quire.engine.checkpoint.pickled import read_pickled_tensor_headers
from quire.engine.common.errors import ModelError

DEPTH = 200_000
TWICE = b")" + b"q\x00h\x00h\x00\x86" * 60
"""Nested pairs: printed or hashed, 2^60 of them."""
PICKLES = {
    "marks": b"(" * DEPTH + b"t" * DEPTH + b".",
    "marks and lists": (b"](" * DEPTH) + b"e" * DEPTH + b".",
    "marks and values": b"(K\x01" * DEPTH + b"t" * DEPTH + b".",
    "marks that stay": b"(" * DEPTH + b"}(K\x01K\x01u" * 10 + b".",
    "tuples in one another": b")" + b"\x85" * DEPTH + b".",
    "a name of pairs": b"}" + TWICE + b"K\x01s.",
    "a deep name": b"})" + b"\x85" * DEPTH + b"K\x01s.",
    "a call of pairs": TWICE + b")R.",
    "an import of pairs": TWICE + b"h\x00\x93.",
    "a storage of pairs": b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + TWICE + b"tQ.",
    "a tensor of pairs": b"}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n(" + TWICE + b"h\x00h\x00tRs.",
    "no value above its mark": b"K\x01(\x85.",
    "a mark too few": b"K\x01t.",
    "nothing": b".",
}


def archive(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02" + content)
    return path


@pytest.mark.few(5)
@pytest.mark.parametrize("name", PICKLES)
def test_malformed_nested_pickle_is_rejected_in_linear_time(tmp_path: Path, name: str) -> None:
    path = archive(tmp_path / "pytorch_model.bin", PICKLES[name])
    with pytest.raises(ModelError, match="cannot be read"):
        read_pickled_tensor_headers(path)


def test_pickle_without_tensors_is_rejected(tmp_path: Path) -> None:
    path = archive(tmp_path / "pytorch_model.bin", pickle.dumps({"a": [1, (2, 3)]}, 2)[2:])
    with pytest.raises(ModelError, match="tensors by name"):
        read_pickled_tensor_headers(path)
