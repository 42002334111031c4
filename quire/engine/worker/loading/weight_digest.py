from __future__ import annotations

import hashlib

from quire.engine.checkpoint.model_resolver import resolve_weights
from quire.engine.checkpoint.tensor_headers import find_weight_files
from quire.engine.common.config import EngineConfig
from quire.engine.common.folder_reader import open_required
from quire.engine.gguf.model_files import read_gguf_header

_NUM_SAMPLES, _SAMPLE_BYTES = 16, 4096


def compute_weight_digest(config: EngineConfig) -> str:
    """Return a hash of each file's size and 16 pieces of 4 KiB, or "" for dummy weights. Changes to a few tensors may
    go unnoticed. Raises ModelError.
    """
    if config.load_format == "dummy":
        return ""
    path = resolve_weights(config)
    files = (
        find_weight_files(path)
        if path.is_dir()
        else sorted({each.file for each in read_gguf_header(path).tensors.values()})
    )
    digest = hashlib.sha256()
    for file in files:
        with open_required(file) as opened:
            size = opened.seek(0, 2)
            digest.update(size.to_bytes(8, "little"))
            for number in range(_NUM_SAMPLES):
                opened.seek(max(size - _SAMPLE_BYTES, 0) * number // (_NUM_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()
