"""Log probabilities of given tokens by a forward pass alone. On a CPU they equal, bit for bit, the `prompt_logprobs` or
`logprobs` of a server or `LLM`, in any batch. So a trainer's importance weights start at exactly 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import InvalidRequest
from quire.engine.offline.llm import LLM
from quire.engine.offline.options import EngineOptions, make_engine_config, with_config_docs

if TYPE_CHECKING:
    from quire.engine.engine_core import Logprobs, NamedTensors

TokenIds = Sequence[int] | Sequence[Sequence[int]]


class Forward:
    """A model's weights and forward pass."""

    @with_config_docs
    def __init__(
        self, model: str | Path | None = None, *, tensors: NamedTensors | None = None, **options: Unpack[EngineOptions]
    ) -> None:
        """`model`: see LLM. `tensors` replace the weights in the model's files: all tensors by checkpoint name, such as
        a PyTorch model's `state_dict().items()`. Raises ConfigError and ModelError.

        Options:
        """
        from quire.engine.engine_core import ForwardPass

        config = make_engine_config(model, options)
        check_single_process(config)
        self._forward_pass = ForwardPass.load_from_config(config, tensors)

    def logprobs(self, token_ids: Sequence[int], *, full_vocabulary: bool = False) -> Logprobs:
        """Return the natural logarithm of each token's probability given the tokens before it: float32 [n - 1] for n
        tokens. With `full_vocabulary`, return it for every token of the vocabulary: [n - 1, vocabulary]. Raises
        InvalidRequest.
        """
        return self._forward_pass.compute_logprobs(token_ids, full_vocabulary=full_vocabulary)


def score(
    model: LLM | Forward | str | Path, token_ids: TokenIds, *, full_vocabulary: bool = False
) -> Logprobs | list[Logprobs]:
    """Compute `logprobs` of one or several sequences. A folder, .gguf file or hub id is loaded as a Forward. Raises
    errors of `Forward` and `logprobs`.
    """
    scorer = model if isinstance(model, LLM | Forward) else Forward(model)
    if len(token_ids) and isinstance(token_ids[0], Iterable):
        many: list[Sequence[int]] = list(token_ids)  # type: ignore[arg-type]
        return [scorer.logprobs(each, full_vocabulary=full_vocabulary) for each in many]
    return scorer.logprobs(token_ids, full_vocabulary=full_vocabulary)  # type: ignore[arg-type]


def check_single_process(config: EngineConfig) -> None:
    """Raise InvalidRequest if several processes compute the model."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if getattr(config, name) > 1:
            raise InvalidRequest(f"{name}: a forward pass is computed only by this process", param=name)
