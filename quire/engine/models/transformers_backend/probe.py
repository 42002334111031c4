"""Runs a model of transformers once on meta tensors to find its attention. Refuses, with a reason, what paged attention
cannot compute.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.common.errors import ModelError
from quire.engine.layers.attention import PagedKVSublayer
from quire.engine.layers.builders import build_sublayer
from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.sublayer import BuildContext, ForwardContext
from quire.engine.models.transformers_backend.interface import (
    AttentionCall,
    MaskFunction,
    mask_function_of,
    set_attention_function,
)
from quire.engine.models.transformers_backend.model_builder import find_body_and_name, make_stateful_model_error
from quire.kernels.backend import Operations

NO_NORM = NormSpec(0.0)
_PROBE_TOKENS = 7
_MAX_MASK_LEN = 1 << 20
"""Masks are tested up to this length. Windows are shorter, and longer masks would take much memory."""
_KNOWN_KWARGS = {"scaling", "softcap", "sliding_window", "s_aux", "sinks", "is_causal", "dropout"}
_IGNORED_KWARGS = {
    "position_ids",
    "cache_position",
    "position_embeddings",
    "use_cache",
    "past_key_values",
    "past_key_value",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "deterministic",
    "attention_mask",
    "input_ids",
    "inputs_embeds",
    "logits_to_keep",
    "layer_idx",
    "num_items_in_batch",
    "cache",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "head_mask",
    "token_type_ids",
}


@dataclass(frozen=True, slots=True)
class TransformersAttentionSpec(AttentionLayerSpec):
    value_dim: int = 0


class _TransformersAttention(PagedKVSublayer):
    def parameters(self) -> ParameterTable:
        return {}

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        raise ModelError("model: transformers' class computes it, which is not possible here")


@build_sublayer.register(TransformersAttentionSpec)
def build_transformers_attention(
    spec: TransformersAttentionSpec, build_context: BuildContext, layer: str
) -> _TransformersAttention:
    return _TransformersAttention(spec, build_context, spec.num_kv_heads)


@dataclass(slots=True)
class AttentionProbe:
    max_len: int
    attention_specs: list[TransformersAttentionSpec] = field(default_factory=list)

    def __call__(self, call: AttentionCall) -> Tensor:
        module, query, key, value, mask, kwargs = call
        location = f"its {type(module).__name__}"
        if (
            query.shape[0] != 1
            or query.shape[2] != _PROBE_TOKENS
            or key.shape[2] != _PROBE_TOKENS
            or value.shape[2] != _PROBE_TOKENS
        ):
            raise ModelError(f"{location} attends to something other than the tokens of a sequence")
        for name, value_of in kwargs.items():
            if value_of is not None and value_of is not False and name not in _KNOWN_KWARGS | _IGNORED_KWARGS:
                raise ModelError(f"{location} changes attention by {name}, which paged attention does not compute")
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
            raise ModelError(f"{location} has {query.shape[1]} heads over {key.shape[1]} of keys")
        window = self._find_window(location, module, mask, kwargs)
        sinks = kwargs.get("s_aux") if kwargs.get("s_aux") is not None else kwargs.get("sinks")
        scale = kwargs.get("scaling")
        widest = max(key.shape[3], value.shape[3])
        self.attention_specs.append(
            TransformersAttentionSpec(
                query.shape[1],
                key.shape[1],
                widest + widest % 2,
                key.shape[3] ** -0.5 if scale is None else float(scale),
                rope=None,
                norm=NO_NORM,
                window=window,
                softcap=None if kwargs.get("softcap") is None else float(kwargs["softcap"]),
                sinks=sinks is not None,
                value_dim=value.shape[3],
            )
        )
        return query.new_empty(1, _PROBE_TOKENS, query.shape[1], value.shape[3])

    def _find_window(
        self, location: str, module: nn.Module, mask: Tensor | None, kwargs: Mapping[str, Any]
    ) -> int | None:
        named_window = kwargs.get("sliding_window")
        if mask is None:
            causal = kwargs.get("is_causal")
            if not (getattr(module, "is_causal", False) if causal is None else causal):
                raise ModelError(
                    f"{location} does not attend causally: it belongs to an encoder or attends to an encoder's states"
                )
            return None if named_window is None else int(named_window)
        if (allowed := mask_function_of(mask)) is None:
            raise ModelError(f"{location} changes its mask (biases by position, or a mask of its own)")
        window = window_from_mask(allowed, self.max_len)
        if named_window is not None and window is not None and int(named_window) != window:
            raise ModelError(f"{location} says a window of {named_window} tokens, its mask has one of {window}")
        return window


def window_from_mask(allowed: MaskFunction, max_len: int) -> int | None:
    """Returns the window, which includes the token itself, or None if all earlier tokens are visible. Raises ModelError
    for any other mask.
    """
    max_len = min(max_len, _MAX_MASK_LEN)
    positions = torch.arange(max_len)

    def visible_keys(position: int) -> Tensor:
        with _ZeroMetaInputs():
            visible = allowed(0, 0, torch.full_like(positions, position), positions)
        return torch.as_tensor(visible).expand(max_len)

    mask_error = ModelError(
        "one of its masks is neither causal nor a sliding window (chunks, blocks, or bidirectional)"
    )
    try:
        window = int(visible_keys(max_len - 1).sum())
        for position in {0, 1, max_len // 3, window - 1, window, window + 1, max_len - 1}:
            expected = (positions <= position) & (positions > position - window)
            if position < max_len and not torch.equal(visible_keys(position), expected):
                raise mask_error
    except (RuntimeError, NotImplementedError, TypeError, IndexError) as error:  # the mask function reads meta tensors
        raise mask_error from error
    return None if window >= max_len else window


@torch.inference_mode()
def probe_attention(model: PreTrainedModel, max_len: int) -> list[TransformersAttentionSpec]:
    """Returns one spec for each call of attention in a forward pass, in the order of the calls. Raises ModelError for
    an unsupported model.
    """
    attention_probe, name = AttentionProbe(max_len), type(model).__name__
    if _is_recurrent(model):
        raise make_stateful_model_error(type(model))
    set_attention_function(model, attention_probe)
    ids = torch.zeros((1, _PROBE_TOKENS), dtype=torch.int64, device="meta")
    _, body = find_body_and_name(model)
    inputs = body_forward_kwargs(body, ids, torch.zeros_like(ids))
    inputs["attention_mask"] = torch.ones_like(ids)
    try:
        with _EmptyNonzero(), _assume_all_nonzero():
            body(**inputs)
    except ModelError as error:
        raise ModelError(f"model: transformers' {name}: {error}") from None
    except Exception as error:
        message_lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {message_lines[0] if message_lines else ''}"[:200]
        raise ModelError(f"model: transformers' {name} does not run as a decoder of one sequence: {reason}") from error
    if not attention_probe.attention_specs:
        raise ModelError(f"model: transformers' {name} does not attend through transformers' attention interface")
    return list(attention_probe.attention_specs)


@contextmanager
def called_modules_recorder(model: PreTrainedModel) -> Iterator[dict[str, bool]]:
    """A module's value is True if the rows of its input are the tokens at every call."""
    calls = dict[str, bool]()

    def record_call(module: nn.Module, args: Sequence[Any], output: Any, name: str) -> None:
        rows = args[0].shape[:-1] if args and isinstance(args[0], Tensor) else ()
        calls[name] = calls.get(name, True) and [size for size in rows if size != 1] == [_PROBE_TOKENS]

    hooks = [module.register_forward_hook(partial(record_call, name=name)) for name, module in model.named_modules()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


class _EmptyNonzero(TorchFunctionMode):
    """Makes nonzero find nothing in meta tensors. Attention does not depend on its result."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        x, kwargs = args[0] if args else None, kwargs or {}
        if isinstance(x, Tensor) and x.is_meta:
            if func in (torch.nonzero, Tensor.nonzero) and not kwargs.get("as_tuple"):
                return x.new_empty((0, x.ndim), dtype=torch.int64)
            if func in (torch.where, Tensor.where) and len(args) == 1 and not kwargs:
                return tuple(x.new_empty(0, dtype=torch.int64) for _ in range(x.ndim))
        return func(*args, **kwargs)


def _assume_all_nonzero() -> AbstractContextManager[object]:
    """Boolean indexing bypasses _EmptyNonzero. On meta tensors, all elements of an index count as nonzero."""
    patch: AbstractContextManager[object] = fx_config.patch(  # type: ignore[attr-defined]
        meta_nonzero_assume_all_nonzero=True
    )
    return patch


class _ZeroMetaInputs(TorchFunctionMode):
    """Replaces a mask function's other inputs by zeros: padding, images, packed sequences."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        def zeros_for_meta(each: Any) -> Any:
            return torch.zeros(each.shape, dtype=each.dtype) if isinstance(each, Tensor) and each.is_meta else each

        return func(*map(zeros_for_meta, args), **(kwargs or {}))


def body_forward_kwargs(body: nn.Module, token_ids: Tensor, positions: Tensor) -> dict[str, Any]:
    """`token_ids` is [1, T]."""
    parameters = inspect.signature(body.forward).parameters
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    inputs: dict[str, Any] = {"input_ids": token_ids}
    more = {"position_ids": positions, "use_cache": False, "cache_position": positions[0]}
    # Gemma 4 drops tokens and builds its own masks if logits_to_keep is a number.
    more["logits_to_keep"] = torch.arange(token_ids.shape[1], device=token_ids.device)
    takes_any = {"position_ids", "use_cache"} if anything else set()
    return inputs | {name: value for name, value in more.items() if name in parameters or name in takes_any}


def _is_recurrent(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    kinds = (getattr(config, "layer_types", None) or ()) or (getattr(config, "layers_block_type", None) or ())
    return any(re.search("linear|mamba|conv|recurrent|ssm|delta|kda|gla", str(kind)) for kind in kinds)


@torch.inference_mode()
def check_lm_head(model: PreTrainedModel, vocab_size: int, hidden_size: int) -> None:
    """Raises ModelError unless each hidden state gives one row of logits."""
    (_, body), name = find_body_and_name(model), type(model).__name__
    hidden_states: list[Tensor] = []
    hook = body.register_forward_hook(lambda module, args, output: hidden_states.append(output[0]))
    ids = torch.zeros((1, _PROBE_TOKENS), dtype=torch.int64, device="meta")
    try:
        inputs = body_forward_kwargs(model, ids, torch.zeros_like(ids)) | {"attention_mask": torch.ones_like(ids)}
        with _EmptyNonzero(), _assume_all_nonzero():
            logits = model(**inputs).logits
    except Exception as error:
        raise ModelError(
            f"model: transformers' {name} does not compute logits from tokens only: {error}"[:300]
        ) from error
    finally:
        hook.remove()
    if tuple(logits.shape) != (1, _PROBE_TOKENS, vocab_size):
        raise ModelError(f"model: transformers' {name} makes {list(logits.shape)} logits of {_PROBE_TOKENS} tokens")
    if not hidden_states:
        raise ModelError(
            f"model: transformers' {name} computes logits from something other than the hidden states of its body"
        )
    if tuple(hidden_states[0].shape) != (1, _PROBE_TOKENS, hidden_size):
        mismatch = f"hidden states of shape {list(hidden_states[0].shape)}, config.json has hidden_size {hidden_size}"
        raise ModelError(f"model: transformers' {name} has {mismatch}")
