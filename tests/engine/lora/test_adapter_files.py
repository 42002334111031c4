"""Adapter folders that cannot be served are rejected in one line that names file and field, and nothing of them is
stored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.errors import AdapterError
from quire.engine.lora.adapter_files import read_adapter_specs
from quire.engine.lora.adapter_store import AdapterStore
from quire.engine.lora.target_modules import adaptable_modules
from quire.engine.lora.weight_checks import check_finite
from tests.adapters import save_adapter
from tests.tiny_models import save_tiny_model

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(model), 8)


@pytest.fixture
def spool(model: Path, tmp_path: Path) -> AdapterStore:
    (tmp_path / "spool").mkdir()
    return AdapterStore(tmp_path / "spool", adaptable_modules(read_model_config(model)), 16)


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        fields = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(fields | changes))

    return change


def with_tensors(changes: dict[str, torch.Tensor | None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors") | changes
        changed = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(changed, folder / "adapter_model.safetensors")

    return change


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def with_type(kind: str, size: int) -> Callable[[Path], None]:
    """Add one tensor of a type of `size` bytes: the model's weight, which PEFT saves with an embedding's adapter."""

    def change(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        with_tensors({"base_model.model.lm_head.base_layer.weight": torch.zeros(size, dtype=torch.uint8)})(folder)
        file.write_bytes(file.read_bytes().replace(b'"dtype":"U8"', f'"dtype":"{kind}"'.encode().ljust(12)))

    return change


def with_shared_bytes(folder: Path) -> None:
    """The second tensor shares the first one's bytes."""
    file = folder / "adapter_model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    first = header[f"{Q}.lora_A.weight"]
    header[f"{Q.replace('q_proj', 'k_proj')}.lora_A.weight"]["data_offsets"] = first["data_offsets"]
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (without("adapter_config.json"), "there is no adapter_config.json in adapter"),
    "no weights": (without("adapter_model.safetensors"), "there is no adapter_model.safetensors in adapter"),
    "no JSON": (
        lambda folder: void((folder / "adapter_config.json").write_text("{")),
        "adapter_config.json is not JSON",
    ),
    "cut off": (
        lambda folder: os.truncate(folder / "adapter_model.safetensors", 9000),
        "adapter_model.safetensors: ",
    ),
    "kind": (with_config(peft_type="IA3"), "adapter_config.json: peft_type: only LORA is served, got 'IA3'"),
    "no rank": (with_config(r=None), "adapter_config.json: r: is missing"),
    "rank of a wrong type": (with_config(r="8"), "adapter_config.json: r: expected int"),
    "rank above the limit": (with_config(r=32), "has rank 32, --max-lora-rank is 16"),
    "another rank": (with_config(r=4), "down_proj.lora_A.weight: has shape [8, 160], this model and r need [4, 160]"),
    "DoRA": (with_config(use_dora=True), "adapter_config.json: use_dora: is not served"),
    "biases": (with_config(bias="all"), "adapter_config.json: bias: only none is served, got 'all'"),
    "whole modules": (with_config(modules_to_save=["lm_head"]), "adapter_config.json: modules_to_save: is not served"),
    "PiSSA": (
        with_config(init_lora_weights="pissa_niter_4"),
        "adapter_config.json: init_lora_weights: 'pissa_niter_4'",
    ),
    "a pattern": (with_config(alpha_pattern={"(a+)+$": 3.0}), "adapter_config.json: alpha_pattern: '(a+)+$'"),
    "alpha": (with_config(lora_alpha="much"), "adapter_config.json: lora_alpha: expected float"),
    "a scale beyond all": (with_config(lora_alpha=1e6), "adapter_config.json: lora_alpha: model.layers.0"),
    "one below": (with_config(alpha_pattern={"q_proj": -1e5}), "adapter_config.json: alpha_pattern: model.layers.0"),
    "alpha that is no number": (
        lambda folder: void(
            (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": NaN}')
        ),
        "adapter_config.json: lora_alpha: expected float",
    ),
    "a type of four bits": (with_type("F4", 8), "lm_head.base_layer.weight: is stored as F4"),
    "bytes of two tensors": (with_shared_bytes, "data_offsets: shares bytes with"),
    "wrong base": (
        with_tensors({f"{Q}.lora_A.weight": torch.zeros(8, 48)}),
        "q_proj.lora_A.weight: has shape [8, 48], this model and r need [8, 64]",
    ),
    "a layer too many": (
        with_tensors({f"{Q.replace('.0.', '.9.')}.lora_A.weight": torch.zeros(8, 64)}),
        "layers.9.self_attn.q_proj.lora_A.weight' is not a LoRA tensor of a module of this model",
    ),
    "half missing": (with_tensors({f"{Q}.lora_B.weight": None}), "model.layers.0.self_attn.q_proj: lora_B is missing"),
    "integers": (
        with_tensors({f"{Q}.lora_A.weight": torch.zeros((8, 64), dtype=torch.int8)}),
        "q_proj.lora_A.weight: is stored as I8",
    ),
    "NaN": (
        with_tensors({f"{Q}.lora_A.weight": torch.full((8, 64), torch.nan, dtype=torch.bfloat16)}),
        "adapter_model.safetensors: base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight: holds numbers that",
    ),
    "DoRA's tensors": (
        with_tensors({f"{Q}.lora_magnitude_vector": torch.zeros(64)}),
        "q_proj.lora_magnitude_vector' is not a LoRA tensor",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_adapter_with_any_non_finite_number_is_rejected(
    dtype: torch.dtype, folder: Path, spool: AdapterStore, tmp_path: Path
) -> None:
    """The largest finite numbers are accepted. Files of more than a million numbers are checked throughout."""
    values, file = torch.full((2**20 + 300,), torch.finfo(dtype).max, dtype=dtype), tmp_path / "many.safetensors"
    save_file({"many": values}, file)
    check_finite(file)
    for at in (0, 2**20 - 1, 2**20, -1):
        invalid = values.clone()
        invalid[at] = torch.nan
        save_file({"many": invalid}, file)
        with pytest.raises(AdapterError, match="many: holds numbers that are infinite or NaN"):
            check_finite(file)
    numbers = torch.full((8, 64), torch.finfo(dtype).max, dtype=dtype)
    numbers[0] = -torch.finfo(dtype).max
    for bad in (torch.inf, -torch.inf, torch.nan):
        invalid = numbers.clone()
        invalid[-1, -1] = bad
        with_tensors({f"{Q}.lora_A.weight": invalid})(folder)
        with pytest.raises(AdapterError, match="holds numbers that are infinite or NaN"):
            spool.add_adapter("x", str(folder))
    with_tensors({f"{Q}.lora_A.weight": numbers})(folder)
    assert spool.add_adapter("x", str(folder)).name == "x"


def void(_: object) -> None:
    pass


@pytest.mark.parametrize("case", BAD)
def test_invalid_adapter_is_rejected_and_not_stored(case: str, folder: Path, spool: AdapterStore) -> None:
    spoil, message = BAD[case]
    spoil(folder)
    with pytest.raises(AdapterError) as caught:
        spool.add_adapter("x", str(folder))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(folder) not in str(caught.value)
    assert list(spool.stored_adapter_digests) == []
    assert list(folder.parent.joinpath("spool").iterdir()) == []


def test_adapter_path_outside_allowed_folders_is_rejected(folder: Path, spool: AdapterStore, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="it is not a hub id"):
        spool.add_adapter("x", str(tmp_path / "nothing"))
    with pytest.raises(AdapterError, match="must be a folder or a hub id"):
        spool.add_adapter("x", "a\0b")
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    message = "there is no such folder inside the folders of --allowed-lora-paths"
    outside = [str(folder), str(allowed / ".." / "adapter"), "owner/name", str(tmp_path / "nothing")]
    (allowed / "link").symlink_to(folder)
    (allowed / "files").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (allowed / "files" / name).symlink_to(folder / name)
    for path in (*outside, str(allowed / "link"), str(allowed / "files")):
        with pytest.raises(AdapterError, match=message):
            spool.add_adapter("x", path, allowed_folders=(allowed,))
    folder.rename(allowed / "adapter")
    assert spool.add_adapter("x", str(allowed / "adapter"), allowed_folders=(allowed,)).name == "x"


def test_adapter_digest_depends_on_content(folder: Path, spool: AdapterStore) -> None:
    first = spool.add_adapter("x", str(folder))
    assert spool.add_adapter("y", str(folder)).digest == first.digest
    with_config(lora_alpha=3)(folder)
    second = spool.add_adapter("x", str(folder))
    assert second.digest != first.digest
    assert sorted(spool.stored_adapter_digests) == sorted({first.digest, second.digest})
    assert spool.reopen_stored_adapter("x", first.digest) == first  # the stored copy, though the folder has changed


def test_lora_scale_follows_alpha_rank_and_alpha_pattern(folder: Path, model: Path) -> None:
    modules = adaptable_modules(read_model_config(model))
    with_config(
        lora_alpha=24,
        use_rslora=True,
        alpha_pattern={"k_proj": 4.0, "model.layers.1.mlp.up_proj": 2.0, "layers.1.self_attn.q_pro": 5.0},
    )(folder)
    parts = read_adapter_specs(folder, modules, 16)
    root = 8**0.5
    assert parts["model.layers.0.self_attn.q_proj"].scale == pytest.approx(24 / root)
    assert parts["model.layers.2.self_attn.k_proj"].scale == pytest.approx(4 / root)
    assert parts["model.layers.1.mlp.up_proj"].scale == pytest.approx(2 / root)
    assert parts["model.layers.0.mlp.up_proj"].scale == pytest.approx(24 / root)


def test_adapter_specs_ignore_exclude_modules_and_layers_to_transform(folder: Path, model: Path) -> None:
    with_config(target_modules="all-linear", exclude_modules=["lm_head"], layers_to_transform=[0], r=8)(folder)
    assert len(read_adapter_specs(folder, adaptable_modules(read_model_config(model)), 8)) == 21


def test_lora_alpha_of_0_gives_scale_0(folder: Path, model: Path) -> None:
    """An alpha of 0 switches an adapter off (issue 58); PEFT's default of 8 is for files without lora_alpha."""
    modules = adaptable_modules(read_model_config(model))
    with_config(lora_alpha=0)(folder)
    assert {part.scale for part in read_adapter_specs(folder, modules, 16).values()} == {0.0}
    with_config(lora_alpha=8, alpha_pattern={"k_proj": 0})(folder)
    assert read_adapter_specs(folder, modules, 16)["model.layers.0.self_attn.k_proj"].scale == 0.0


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens", "model.layers.0.self_attn.q_proj"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_base_weights_in_adapter_must_equal_model_weights(
    folder: Path, model: Path, tmp_path: Path, module: str, dtype: torch.dtype
) -> None:
    """PEFT saves a whole embedding with its adapter, trained or not."""
    modules, weights = adaptable_modules(read_model_config(model)), load_file(model / "model.safetensors")
    spool = AdapterStore(tmp_path / "own", modules, 16, weights=model)
    (tmp_path / "own").mkdir()
    name, weight = f"base_model.model.{module}.base_layer.weight", weights[f"{module}.weight"].to(dtype)
    with_tensors({name: weight})(folder)
    assert spool.add_adapter("x", str(folder))
    with_tensors({name: weight + 0.1 * torch.randn(weight.shape).to(dtype)})(folder)
    with pytest.raises(AdapterError, match="differs from the model's weights"):
        spool.add_adapter("x", str(folder))
    with pytest.raises(AdapterError, match="cannot be compared"):
        AdapterStore(tmp_path / "own", modules, 16).add_adapter("x", str(folder))
