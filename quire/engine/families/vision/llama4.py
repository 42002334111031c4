"""Llama 4 (Meta, 2025): text only."""

from quire.engine.families.base.vision.multimodal_family import MultimodalFamily

LLAMA4_WITH_IMAGES = MultimodalFamily(model_types=("llama4",), text_model_type="llama4_text", read_vision_spec=None)
