"""vLLM's module of this name."""

from quire.engine.lora.offline import LoRARequest

__all__ = ["LoRARequest"]
