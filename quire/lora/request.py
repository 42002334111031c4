"""vLLM's module of this name."""

from quire.engine.lora.local_adapters import LoRARequest

__all__ = ["LoRARequest"]
