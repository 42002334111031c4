"""What a class keeps of a sequence: it is run once on tensors that are shapes alone, and each call of its attention
says what it is. Whatever our pages do not compute is refused, in a sentence that names it."""

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

from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec, PagedPart
from quire.engine.layers.norm import NormSpec
from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.part import BuildContext, Step
from quire.engine.models.adapted.build import body_of, stateful
from quire.engine.models.adapted.interface import AttentionCall, MaskFunction, allowed_by, attend_by
from quire.kernels.backend import Operations

NO_NORM = NormSpec(0.0)
"""Norms are the class's."""
_TOKENS = 7
_LONGEST = 1 << 20
"""Positions up to which masks are tried: longer ones would take memory, and windows are shorter."""
_MEANT = {"scaling", "softcap", "sliding_window", "s_aux", "sinks", "is_causal", "dropout"}
"""What is understood of what a class passes to its attention."""
_IRRELEVANT = {
    *("position_ids", "cache_position", "position_embeddings", "use_cache", "past_key_values", "past_key_value"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "deterministic"),
    *("attention_mask", "input_ids", "inputs_embeds", "logits_to_keep", "layer_idx", "num_items_in_batch", "cache"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "head_mask", "token_type_ids"),
}
"""What may be passed on and says nothing of attention."""


@dataclass(frozen=True, slots=True)
class AdaptedAttention(AttentionSpec):
    """One call of attention by the class. Its pages and softmax are as in ours; what is around it is the class's."""

    value_dim: int = 0
    """Numbers of a head's value; the rest of `head_dim` is zeros."""

    def part(self, making: BuildContext, layer: str) -> PagedPart:
        return _OfClass(self, making, self.num_kv_heads)


class _OfClass(PagedPart):
    """What it keeps in pages; all else is the class's."""

    def parameters(self) -> ParameterTable:
        return {}

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        raise ModelError("model: transformers' class computes it, which does not go here")


@dataclass(slots=True)
class AttentionProbe:
    """Attends to nothing and notes what is asked of it."""

    longest: int
    found: list[AdaptedAttention] = field(default_factory=list)

    def __call__(self, call: AttentionCall) -> Tensor:
        module, query, key, value, mask, given = call
        where = f"its {type(module).__name__}"
        if query.shape[0] != 1 or query.shape[2] != _TOKENS or key.shape[2] != _TOKENS or value.shape[2] != _TOKENS:
            raise ModelError(f"{where} attends to other things than the tokens of a sequence")
        for name, value_of in given.items():
            if value_of is not None and value_of is not False and name not in _MEANT | _IRRELEVANT:
                raise ModelError(f"{where} changes attention by {name}, which pages do not compute")
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
            raise ModelError(f"{where} has {query.shape[1]} heads over {key.shape[1]} of keys")
        window = self._window(where, module, mask, given)
        sinks = given.get("s_aux") if given.get("s_aux") is not None else given.get("sinks")
        scale = given.get("scaling")
        widest = max(key.shape[3], value.shape[3])
        self.found.append(
            AdaptedAttention(
                query.shape[1],
                key.shape[1],
                widest + widest % 2,
                key.shape[3] ** -0.5 if scale is None else float(scale),
                rope=None,
                norm=NO_NORM,
                window=window,
                softcap=None if given.get("softcap") is None else float(given["softcap"]),
                sinks=sinks is not None,
                value_dim=value.shape[3],
            )
        )
        return query.new_empty(1, _TOKENS, query.shape[1], value.shape[3])

    def _window(self, where: str, module: nn.Module, mask: Tensor | None, given: Mapping[str, Any]) -> int | None:
        named = given.get("sliding_window")
        if mask is None:
            causal = given.get("is_causal")
            if not (getattr(module, "is_causal", False) if causal is None else causal):
                raise ModelError(f"{where} does not attend causally: it is of an encoder, or to an encoder's states")
            return None if named is None else int(named)
        if (allowed := allowed_by(mask)) is None:
            raise ModelError(f"{where} changes its mask (biases by position, or a mask of its own)")
        window = window_of(allowed, self.longest)
        if named is not None and window is not None and int(named) != window:
            raise ModelError(f"{where} names a window of {named} tokens, its mask has one of {window}")
        return window


def window_of(allowed: MaskFunction, longest: int) -> int | None:
    """Tokens that a token sees by this mask, itself included; None: all. Raises ModelError for any other mask."""
    longest = min(longest, _LONGEST)
    every = torch.arange(longest)

    def seen(position: int) -> Tensor:
        with _TextAlone():
            found = allowed(0, 0, torch.full_like(every, position), every)
        return torch.as_tensor(found).expand(longest)

    wrong = ModelError("a mask of it is neither causal nor a window (chunks, blocks, or both directions)")
    try:
        window = int(seen(longest - 1).sum())
        for position in {0, 1, longest // 3, window - 1, window, window + 1, longest - 1}:
            wanted = (every <= position) & (every > position - window)
            if position < longest and not torch.equal(seen(position), wanted):
                raise wrong
    except (RuntimeError, NotImplementedError, TypeError, IndexError) as error:  # it reads what has no numbers yet
        raise wrong from error
    return None if window >= longest else window


@torch.inference_mode()
def probe(model: PreTrainedModel, longest: int) -> list[AdaptedAttention]:
    """By call of attention, in their order, what it is. Raises ModelError for what pages do not compute; `longest`:
    tokens of contexts."""
    noting, name = AttentionProbe(longest), type(model).__name__
    if _recurrent(model):
        raise stateful(type(model))
    attend_by(model, noting)
    ids = torch.zeros((1, _TOKENS), dtype=torch.int64, device="meta")
    _, body = body_of(model)
    inputs = inputs_of(body, ids, torch.zeros_like(ids))
    inputs["attention_mask"] = torch.ones_like(ids)
    try:
        with _NothingFound(), _all_indexed():
            body(**inputs)
    except ModelError as error:
        raise ModelError(f"model: transformers' {name}: {error}") from None
    except Exception as error:
        said = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {said[0] if said else ''}"[:200]
        raise ModelError(f"model: transformers' {name} does not run as a decoder of one sequence: {reason}") from error
    if not noting.found:
        raise ModelError(f"model: transformers' {name} does not attend through transformers' attention interface")
    return list(noting.found)


@contextmanager
def called(model: PreTrainedModel) -> Iterator[dict[str, bool]]:
    """The names of the modules that are called in its context; of each whether its rows are always the tokens."""
    found = dict[str, bool]()

    def note(module: nn.Module, given: Sequence[Any], made: Any, name: str) -> None:
        rows = given[0].shape[:-1] if given and isinstance(given[0], Tensor) else ()
        found[name] = found.get(name, True) and [size for size in rows if size != 1] == [_TOKENS]

    hooks = [module.register_forward_hook(partial(note, name=name)) for name, module in model.named_modules()]
    yield found
    for hook in hooks:
        hook.remove()


class _NothingFound(TorchFunctionMode):
    """In its context a class that looks for what is not zero, as for the experts that tokens chose, finds nothing: what
    it then computes of it is none of attention's."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        x, kwargs = args[0] if args else None, kwargs or {}
        if isinstance(x, Tensor) and x.is_meta:
            if func in (torch.nonzero, Tensor.nonzero) and not kwargs.get("as_tuple"):
                return x.new_empty((0, x.ndim), dtype=torch.int64)
            if func in (torch.where, Tensor.where) and len(args) == 1 and not kwargs:
                return tuple(x.new_empty(0, dtype=torch.int64) for _ in range(x.ndim))
        return func(*args, **kwargs)


def _all_indexed() -> AbstractContextManager[object]:
    """In its context a mask as an index, which is no function's, finds all."""
    found: AbstractContextManager[object] = fx_config.patch(  # type: ignore[attr-defined]
        meta_nonzero_assume_all_nonzero=True
    )
    return found


class _TextAlone(TorchFunctionMode):
    """In its context what a mask reads beside positions is zero: of padding, of images, of other sequences there is
    none."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        def known(each: Any) -> Any:
            return torch.zeros(each.shape, dtype=each.dtype) if isinstance(each, Tensor) and each.is_meta else each

        return func(*map(known, args), **(kwargs or {}))


def inputs_of(body: nn.Module, ids: Tensor, positions: Tensor) -> dict[str, Any]:
    """What a body's forward takes for these tokens, [1, T]."""
    parameters = inspect.signature(body.forward).parameters
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    inputs: dict[str, Any] = {"input_ids": ids}
    more = {"position_ids": positions, "use_cache": False, "cache_position": positions[0]}
    # Gemma 4 leaves out tokens, and masks of its own for the others, where a number says which are wanted.
    more["logits_to_keep"] = torch.arange(ids.shape[1], device=ids.device)
    takes_any = {"position_ids", "use_cache"} if anything else set()
    return inputs | {name: value for name, value in more.items() if name in parameters or name in takes_any}


def _recurrent(model: PreTrainedModel) -> bool:
    """Whether a config.json's layer_types name layers that keep no keys and values."""
    config = model.config.get_text_config()
    kinds = (getattr(config, "layer_types", None) or ()) or (getattr(config, "layers_block_type", None) or ())
    return any(re.search("linear|mamba|conv|recurrent|ssm|delta|kda|gla", str(kind)) for kind in kinds)


@torch.inference_mode()
def check_head(model: PreTrainedModel, vocab_size: int, hidden_size: int) -> None:
    """Raise ModelError where the class makes other things than one row of logits for each hidden state."""
    (_, body), name = body_of(model), type(model).__name__
    found: list[Tensor] = []
    hook = body.register_forward_hook(lambda module, given, made: found.append(made[0]))
    ids = torch.zeros((1, _TOKENS), dtype=torch.int64, device="meta")
    try:
        inputs = inputs_of(model, ids, torch.zeros_like(ids)) | {"attention_mask": torch.ones_like(ids)}
        with _NothingFound(), _all_indexed():
            logits = model(**inputs).logits
    except Exception as error:
        raise ModelError(f"model: transformers' {name} does not make logits of tokens alone: {error}"[:300]) from error
    finally:
        hook.remove()
    if tuple(logits.shape) != (1, _TOKENS, vocab_size):
        raise ModelError(f"model: transformers' {name} makes {list(logits.shape)} logits of {_TOKENS} tokens")
    if not found:
        raise ModelError(f"model: transformers' {name} makes logits of other things than its body's hidden states")
    if tuple(found[0].shape) != (1, _TOKENS, hidden_size):
        wrong = f"hidden states of shape {list(found[0].shape)}, config.json has hidden_size {hidden_size}"
        raise ModelError(f"model: transformers' {name} has {wrong}")
