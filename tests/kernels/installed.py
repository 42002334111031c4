"""Puts fake attention libraries where Python imports the real ones from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

PAGED = (2, 13)
"""The first PyTorch whose varlen attention takes block tables."""


def install_flash(monkeypatch: pytest.MonkeyPatch, library: object | None) -> None:
    """flash-attn 2; None means that it is not installed."""
    if library is not None:  # transformers looks for it when it is first imported
        monkeypatch.setattr(library, "__spec__", ModuleSpec("flash_attn", loader=None), raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", library)  # type: ignore[arg-type]


def install_flash3(monkeypatch: pytest.MonkeyPatch, library: object) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", library)  # type: ignore[arg-type]


def install_flash4(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")  # the backend sets it if it is unset
    library: Any = SimpleNamespace(flash_attn_varlen_func=function)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", library)


def install_varlen(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    """PyTorch's varlen attention, of a PyTorch that has it with block tables."""
    library: Any = SimpleNamespace(varlen_attn=function)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", library)
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < PAGED:
        monkeypatch.setattr(torch, "__version__", ".".join(map(str, (*PAGED, 0))))
