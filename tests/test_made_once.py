"""A folder from `made_once` equals one that is made anew."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.made_once import made_once


def test_made_once_reuses_folder_of_equal_keys_and_restores_rng_state(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(path: Path) -> None:
        made.append(path)
        path.mkdir()
        torch.manual_seed(7)
        (path / "weights").write_text(str(torch.rand(1).item()))

    paths = [made_once(tmp_path / name, make, {"family": "llama"}) for name in ("a", "b")]
    state = torch.get_rng_state()
    (paths[0] / "weights").write_text("changed by a test")
    torch.manual_seed(8)
    third = made_once(tmp_path / "c", make, {"family": "llama"})
    assert (third / "weights").read_text() == (paths[1] / "weights").read_text()
    assert torch.equal(torch.get_rng_state(), state)
    made_once(tmp_path / "d", make, {"family": "gemma"})
    assert len(made) == 2
