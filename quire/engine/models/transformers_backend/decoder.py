from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.pytorch_utils import Conv1D

from quire.engine.checkpoint.transformers_classes import first_position_id
from quire.engine.common.errors import ModelError
from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.parameters import LoadableParameter, ParameterTable, identity
from quire.engine.layers.schemes import UnquantizedScheme
from quire.engine.layers.shard import UNSHARDED
from quire.engine.layers.sublayer import BuildContext
from quire.engine.models.decoder import Decoder, KVCache, MediaEmbeddings, has_finite_logits
from quire.engine.models.transformers_backend.attention import PagedAttentionFunction
from quire.engine.models.transformers_backend.batch_invariance import BatchInvariantOps
from quire.engine.models.transformers_backend.experts import QuireExperts
from quire.engine.models.transformers_backend.interface import set_attention_function, set_experts_function
from quire.engine.models.transformers_backend.model_builder import build_model, describe_exception, find_body_and_name
from quire.engine.models.transformers_backend.modules import (
    BatchInvariantModule,
    QuireLinear,
    find_unreplaced_matmuls,
    has_custom_matmul,
    make_quire_norm,
    meta_linear_of_conv1d,
    transpose_parameter,
)
from quire.engine.models.transformers_backend.positions import (
    CachedRotary,
    StepPositionInjector,
    has_positions_from_cache_length,
    is_rotary,
)
from quire.engine.models.transformers_backend.probe import body_forward_kwargs, build_transformers_attention
from quire.engine.models.transformers_backend.spec import ROUTERS, TransformersSpec
from quire.engine.models.transformers_backend.tensor_parallel import REPLICATED_PLAN, make_tensor_parallel_plan
from quire.engine.models.transformers_backend.weight_conversion import TensorStream, WeightConversion
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, LinearContext


class _BodyOutput(BaseModelOutputWithPast):
    """A body's output, whose other fields are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _BodyStub(nn.Module):
    hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _BodyOutput(last_hidden_state=self.hidden)


class TransformersDecoder(Decoder):
    """Load its weights through `parameters()`, then call `process_weights_after_loading` before use."""

    reduces_results = True
    """False while one rank computes alone. The rank's results are then meaningless."""

    def build_modules(self, build_context: BuildContext) -> None:
        """Builds all layers, because check_transformers_settings excludes pipeline stages."""
        spec, backend = self.spec, build_context.backend
        assert isinstance(spec, TransformersSpec)
        self._spec = spec
        self._first_position = first_position_id(spec.config_fields)
        self._module_context = build_context
        attention, self.transformers_class = spec.rank_attention_specs(build_context.shard), spec.transformers_class
        self._layers = [[build_transformers_attention(each, build_context, "")] for each in attention]
        self._linear_context = NO_ADAPTERS
        self._model = model = build_model(spec.config_fields, build_context.dtype)
        self._tensor_parallel_plan = (
            REPLICATED_PLAN
            if build_context.shard.world_size == 1
            else make_tensor_parallel_plan(model, build_context.shard.world_size)
        )
        self._conversion = WeightConversion(model)
        self._paged_attention = PagedAttentionFunction(backend, attention, self.groups, self.report_progress)
        # GPUs do not need this, because they compute every element alike.
        on_cpu = build_context.device.type == "cpu"
        self._batch_invariant_ops: AbstractContextManager[object] = (
            BatchInvariantOps(backend) if on_cpu else nullcontext()
        )
        self._table = self._replace_modules_and_list_parameters()
        set_attention_function(model, self._paged_attention)
        (name, self._body), self._body_stub = find_body_and_name(model), _BodyStub()
        _set_module(model, name, self._body_stub)

    @property
    def kernel_backend_identity(self) -> str:
        return (
            f"{super().kernel_backend_identity}, {self.transformers_class} of transformers {transformers.__version__}"
        )

    def parameters(self) -> ParameterTable:
        return dict(self._table)

    def convert_weights(self, stream: Iterable[tuple[str, Tensor]]) -> TensorStream:
        """If the checkpoint has buffers, sets them instead of yielding them."""
        for name, tensor in self._conversion.convert_weights(stream):
            own = name.rpartition(".")[2]
            if (module := self._buffer_modules.get(name)) is not None:
                setattr(module, own, tensor.to(device=self.device, dtype=getattr(module, own).dtype))
            else:
                yield name, tensor

    def forward_with_aux(
        self,
        token_ids: Tensor,
        metadata: AttentionMetadata,
        kv_cache: KVCache,
        rows: Tensor,
        aux_layers: Sequence[int],
        features: MediaEmbeddings | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        assert not aux_layers
        assert features is None
        self._paged_attention.bind_step(metadata, kv_cache)
        self._linear_context = metadata.linear_context
        positions = metadata.positions[None]
        positions = positions + self._first_position if self._first_position else positions
        with self._batch_invariant_ops:
            output = self._body(**body_forward_kwargs(self._body, token_ids.long()[None], positions))
        self._paged_attention.finish_step()
        return output[0][0][rows], []

    def compute_logits(self, hidden: Tensor, context: LinearContext = NO_ADAPTERS) -> Tensor:
        self.report_progress()
        self._body_stub.hidden, self._linear_context = hidden[None], context
        with self._batch_invariant_ops:  # with inputs_embeds, nothing looks up ids
            logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        self._body_stub.hidden = None
        return logits.float()

    def greedy_tokens_and_finite_flags(
        self, hidden: Tensor, context: LinearContext = NO_ADAPTERS
    ) -> tuple[Tensor, Tensor]:
        logits = self.compute_logits(hidden, context)
        best, group = self.argmax(logits), self.shard.group
        return best if group is None else group.broadcast(best), has_finite_logits(hidden, logits)

    def _replace_modules_and_list_parameters(self) -> ParameterTable:
        model, table = self._model, ParameterTable()
        head, replaced = model.get_output_embeddings(), dict[int, nn.Module]()
        positions, context = self.max_model_len, self._spec.rope_context or self.max_model_len
        for name, module in list(model.named_modules(remove_duplicate=False)):
            if id(module) in replaced:
                _set_module(model, name, replaced[id(module)])
            elif type(module) is nn.Linear and name in self._spec.called_modules:
                linear, parameters = self._make_linear_and_parameters(name, module, wide=module is head)
                self._merge_parameters(table, parameters)
                _set_module(model, name, replaced.setdefault(id(module), linear))
            elif (norm := make_quire_norm(name, module, self._module_context)) is not None:
                self._merge_parameters(table, norm.weights.parameters())
                _set_module(model, name, replaced.setdefault(id(module), norm))
            elif type(module) is Conv1D and name in self._spec.called_modules:
                linear, parameters = self._make_linear_and_parameters(
                    name, meta_linear_of_conv1d(module), wide=module is head
                )
                self._merge_parameters(
                    table, {each: transpose_parameter(parameter) for each, parameter in parameters.items()}
                )
                _set_module(model, name, replaced.setdefault(id(module), linear))
            elif QuireExperts.is_experts_module(module):
                shard_args = (
                    (self.shard, self._all_reduce)
                    if name in self._tensor_parallel_plan.expert_modules
                    else (UNSHARDED, None)
                )
                experts = QuireExperts(module, name, self._module_context.scheme, self.dtype, *shard_args)
                self._merge_parameters(table, experts.take_parameters_from_module())
                set_experts_function(module, experts)
        self._make_buffers()
        self._merge_parameters(table, self._remaining_parameters())
        self.unreplaced_matmuls = find_unreplaced_matmuls(model, self._spec.called_modules)
        self._buffer_modules = {name: model.get_submodule(name.rpartition(".")[0]) for name, _ in model.named_buffers()}
        for name, module in list(model.named_modules()):
            if is_rotary(module):
                _set_module(model, name, CachedRotary(module, positions, context))
            elif has_custom_matmul(module):
                _set_module(model, name, BatchInvariantModule(module, self._module_context.backend))
            elif has_positions_from_cache_length(module):
                _set_module(model, name, StepPositionInjector(module, lambda: self._paged_attention.positions))
        return table

    def _merge_parameters(self, table: ParameterTable, parameters: ParameterTable) -> None:
        """A tied tensor is loaded into all parameters that share it."""
        for name, parameter in parameters.items():
            canonical_name = self._conversion.first_name_of_tied_parameter(name)
            table[canonical_name] = (
                table[canonical_name].combine_weight_loaders(parameter) if canonical_name in table else parameter
            )

    def _make_linear_and_parameters(
        self, name: str, module: nn.Linear, *, wide: bool
    ) -> tuple[QuireLinear, ParameterTable]:
        outs, scheme = {name: module.out_features}, self._module_context.scheme
        weight_spec = scheme.linear_tensor_specs(name, module.in_features, module.out_features, bias=False).get(
            "weight"
        )
        if name.endswith(ROUTERS) and weight_spec is not None and weight_spec.dtype == self.dtype:
            scheme = UnquantizedScheme(
                self._module_context.backend, self.dtype
            )  # routers are never quantized, as their choices would change
        adapters = self.adapters if name in (self._spec.lora_target_sizes or ()) else None
        cut = self._tensor_parallel_plan.linear_slice(name, module, self.shard)
        fused = FusedLinear(
            scheme,
            module.in_features,
            outs,
            bias=module.bias is not None,
            wide=wide,
            adapters=adapters,
            cuts={name: cut},
        )
        reduce = None if cut.input_range is None else self._all_reduce
        return QuireLinear(
            fused, module, self.dtype, self.device, lambda: self._linear_context, cut, reduce
        ), fused.parameters()

    def _slice_per_head_parameter(self, numbers: Tensor) -> Tensor:
        span = self.shard.rank_span(len(numbers))
        return numbers[span.start : span.stop]

    def _all_reduce(self, x: Tensor) -> Tensor:
        return self.shard.all_reduce(x) if self.reduces_results else x

    def _make_buffers(self) -> None:
        """Raises ModelError if the class does not initialize a buffer."""
        makers = {name: each for name, each in self._model.named_modules() if isinstance(each, PreTrainedModel)}
        for path, module in self._model.named_modules():
            missing = [(name, each) for name, each in module.named_buffers(recurse=False) if each.is_meta]
            for name, buffer in missing:
                setattr(module, name, torch.zeros_like(buffer, device=self.device))
            if missing:
                nearest = max((name for name in makers if f"{path}.".startswith(f"{name}." if name else "")), key=len)
                try:
                    makers[nearest]._init_weights(module)
                except Exception as error:
                    what = f"transformers' {type(self._model).__name__} does not make {path}.{missing[0][0]}"
                    raise ModelError(f"model: {what}: {describe_exception(error)}") from error

    def _remaining_parameters(self) -> ParameterTable:
        table: ParameterTable = {}
        for name, module in self._model.named_modules():
            for own, each in module.named_parameters(recurse=False):
                full = f"{name}.{own}" if name else own
                cut = (
                    self._slice_per_head_parameter
                    if full in self._tensor_parallel_plan.per_head_parameters
                    else identity
                )
                self._merge_parameters(
                    table,
                    {full: LoadableParameter(tuple(each.shape), each.dtype, partial(_set_parameter, module, own), cut)},
                )
        return table


def _set_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    setattr(module, name, nn.Parameter(tensor, requires_grad=False))


def _set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent) if parent else model, own, module)
