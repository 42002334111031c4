"""Bytes, as the commands about models print them."""

from __future__ import annotations


def size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
