from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Backend
from quire.kernels.probes.backend_probe import BackendProbe, is_close
from quire.kernels.probes.recurrence_probe import make_step_metadata, move_tensors
from quire.kernels.recurrent.delta_rule import DeltaRule
from quire.kernels.recurrent.recurrence import Recurrence, RecurrentStates
from quire.kernels.recurrent.state_space import StateSpace

_STEPS = (((0, 0), (150, 3)), ((150, 3), (229, 67)))
"""Tokens before and after each step, per sequence. There are whole and partial chunks of 64 tokens, empty and filled
matrices, and a short sequence, which is computed token by token, beside a long one.
"""
_STATE_TOLERANCE = 1e-3
"""Relative to the largest element. An H100's is 1e-4; without the low halves of split operands it would be 4e-3."""


@dataclass(frozen=True, slots=True)
class ChunkedRecurrenceProbe(BackendProbe):
    """Compares results and matrices with those that the device computes token by token, and with those of a second run,
    which must be the same bits. Sets `passed_chunk_trial` of the backend while it runs.
    """

    is_delta: bool
    heads: int
    groups: int
    """Of consecutive heads with the same key."""
    key_dim: int
    value_dim: int

    @classmethod
    def from_rule(
        cls, device: torch.device, dtype: torch.dtype, rule: Recurrence, value_dim: int
    ) -> ChunkedRecurrenceProbe:
        assert isinstance(rule, DeltaRule | StateSpace)
        is_delta = isinstance(rule, DeltaRule)
        groups = rule.num_key_heads if isinstance(rule, DeltaRule) else rule.num_groups
        return cls(device, dtype, is_delta, rule.num_heads, groups, rule.key_dim, value_dim)

    def find_mismatch(self, backend: Backend) -> str | None:
        before = backend.passed_chunk_trial
        try:
            backend.passed_chunk_trial = False
            expected = self._run_steps(backend)
            backend.passed_chunk_trial = True
            first, second = self._run_steps(backend), self._run_steps(backend)
        finally:
            backend.passed_chunk_trial = before
        if not all(map(torch.equal, first, second)):
            return "chunks of a recurrence give other bits in a second run"
        *outputs, states = expected
        if not _are_states_close(first[-1], states) or not all(map(is_close, first[:-1], outputs)):
            return "chunks of a recurrence differ from single tokens"
        return None

    def _run_steps(self, backend: Backend) -> list[Tensor]:
        """Float32 outputs of each step, and the matrices after the last, on the CPU."""
        rule = self._make_rule()
        matrices = torch.zeros((3, self.heads, self.key_dim, self.value_dim), device=self.device)
        drafts = torch.zeros((3, 0, rule.draft_inputs_dim), dtype=self.dtype, device=self.device)
        states, outputs = RecurrentStates(matrices, drafts), list[Tensor]()
        for number, (firsts, ends) in enumerate(_STEPS):
            metadata = move_tensors(make_step_metadata(list(firsts), ends, None, None), self.device)
            assert isinstance(metadata, AttentionMetadata)
            sizes = (rule.input_dim, self.heads * self.value_dim, rule.head_inputs_dim)
            inputs, z, beside = (self._random_tensor(len(metadata.positions), size, number) for size in sizes)
            outputs.append(backend.run_recurrence(inputs, z, beside, rule, states, metadata).cpu().float())
        return [*outputs, matrices.cpu()]

    def _make_rule(self) -> DeltaRule | StateSpace:
        rate, shift, skip = torch.linspace(0.1, 1.0, self.heads, device=self.device).expand(3, -1).contiguous()
        if self.is_delta:
            norm = torch.ones(self.value_dim, device=self.device)
            return DeltaRule(-rate, shift, norm, 1e-6, self.groups, self.key_dim)
        return StateSpace(-rate, shift, skip, None, 1e-6, self.groups, self.key_dim, self.value_dim)

    def _random_tensor(self, rows: int, columns: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn((rows, columns), generator=generator) / 2).to(self.device, self.dtype)


def _are_states_close(got: Tensor, expected: Tensor) -> bool:
    """False for NaN."""
    return bool(((got - expected).abs() <= _STATE_TOLERANCE * expected.abs().max()).all())
