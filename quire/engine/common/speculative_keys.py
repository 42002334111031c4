"""Ignored keys of vLLM's speculative_config. This module does not import pydantic, because that takes longer than a
short command.
"""

from __future__ import annotations

import json

UNSUPPORTED_DRAFT_METHODS = (
    "dflash",
    "dspark",
    "mlp_speculator",
    "p-eagle",
    "gemma4_mtp_assistant",
    "extract_hidden_states",
)
"""vLLM's methods that Quire lacks. Draft methods do not change answers, so the model is served without drafts."""
IGNORED_VLLM_KEYS = {
    "attention_backend",
    "moe_backend",
    "enforce_eager",
    "max_model_len",
    "quantization",
    "revision",
    "code_revision",
    "draft_tensor_parallel_size",
    "draft_sample_method",
    "rejection_sample_method",
    "draft_load_config",
    "disable_by_batch_size",
    "disable_logprobs",
    "disable_padded_drafter_batch",
    "parallel_drafting",
    "speculative_token_tree",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
    "use_heterogeneous_vocab",
    "kv_cache_dtype",
    "prompt_lookup_max",
    "synthetic_acceptance_rates",
    "use_local_argmax_reduction",
    "tensor_parallel_size",
}
"""Keys that affect only the speed of drafting."""


def ignored_speculative_keys_reason(value: object) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ""
    if not isinstance(value, dict):
        return ""
    if value.get("method") in UNSUPPORTED_DRAFT_METHODS:
        return f"there is no draft method {value['method']} here; drafts never change an answer"
    names = sorted(value.keys() & IGNORED_VLLM_KEYS)
    return f"{', '.join(names)}: drafts are made with the served model's settings" if names else ""
