"""The first rank's decoder and adapters: what they are asked for, the other ranks are told first."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from torch import Tensor

from quire.engine.config import NODE_SECRET, EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.executor import AdapterLoader
from quire.engine.models.decoder import Decoder, KVCache
from quire.engine.nodes.greeting import own_secret
from quire.engine.types import Adapter
from quire.engine.worker.loading.samples import sampled
from quire.engine.worker.ranks.mesh import KEY, connect_all, open_door
from quire.engine.worker.ranks.messages import (
    Embed,
    Logits,
    Meet,
    Reached,
    UseAdapter,
    adapters_of,
    array,
    forward,
)
from quire.engine.worker.ranks.processes import Ranks
from quire.engine.worker.ranks.remote import Gathering
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend, LinearContext
from quire.kernels.collective import Collective
from quire.kernels.sockets import SocketCollective


class TensorRanks(Ranks):
    """The processes that compute every layer together with this one."""

    setting, called = "tensor_parallel_size", "ranks"
    group: Collective

    def __init__(
        self, config: EngineConfig, backend: Backend, row_bytes: int, on_end: Callable[[int], None] | None = None
    ) -> None:
        """`row_bytes`: of the longest row that they put side by side. Raises ConfigError."""
        count = config.tensor_parallel_size
        try:
            memory = backend.ranks_memory(count, row_bytes)
        except ValueError as error:
            raise ConfigError(f"{self.setting}: {error}", param=self.setting) from error
        self.group = backend.collective(memory, 0, count)
        super().__init__(config, [[memory]] * (count - 1), on_end)

    def _let_go(self) -> None:
        self.group.close()


class MachineRanks(TensorRanks):
    """The same on several machines, which sum over TCP."""

    _met: Collective | None = None

    def __init__(self, config: EngineConfig, local: EngineConfig, on_end: Callable[[int], None] | None = None) -> None:
        """Waits until all machines have joined. `local`: `config` with this machine's own paths. Raises ConfigError."""
        self._port = config.master_port
        gathering = Gathering(config)
        remote = gathering.wait()
        try:
            key = secrets.token_bytes(KEY)
            own: list[list[int]] = [[] for _ in range(config.ranks_here - 1)]
            Ranks.__init__(self, local, own, on_end, remote, key)
        except BaseException:
            for each in remote:
                each.kill()
            raise
        try:
            self.group = self._met = self._meet(gathering.host, key, local)
        except BaseException:
            self.close()
            raise

    def _meet(self, host: str, key: bytes, local: EngineConfig) -> Collective:
        door, weights = open_door(host), sampled(local)
        places = [(host, door.getsockname()[1])]
        for answer in self._answer_each():  # whatever ends a start ends it before the others wait for it
            assert isinstance(answer, Reached)
            if answer.weights != weights:
                raise ConfigError(
                    f"model: the machine at {answer.host} has other weights than machine 0", param="model"
                )
            places.append((answer.host, answer.port))
        self.send(Meet(places))
        with self.watched():
            seconds = local.engine_step_timeout
            return SocketCollective(0, connect_all(door, 0, places, key, seconds, self._ended.is_set))

    @property
    def note(self) -> str:
        open_door = "" if own_secret() else f"; {NODE_SECRET} is not set: whoever reaches port {self._port} can join"
        return f"{super().note}{open_door}"

    def _let_go(self) -> None:
        if self._met is not None:
            self._met.close()


class LeadingDecoder(Decoder):
    """Call `lead` before use."""

    _ranks: Ranks
    _last: Tensor | None = None
    """What the last forward pass gave, which the other ranks have too."""

    def lead(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def forward_tapped(
        self,
        token_ids: Tensor,
        metadata: AttentionMetadata,
        kv_cache: KVCache,
        rows: Tensor,
        taps: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:
        self._ranks.send(forward(token_ids, metadata, rows, tuple(taps)))
        with self._ranks.watched():
            hidden, tapped = super().forward_tapped(token_ids, metadata, kv_cache, rows, taps)
        self._last = hidden
        return hidden, tapped

    def embed(self, token_ids: Tensor) -> Tensor:
        self._ranks.send(Embed(array(token_ids)))
        with self._ranks.watched():
            return super().embed(token_ids)

    def logits(self, hidden: Tensor, context: LinearContext = NO_ADAPTERS) -> Tensor:
        self._ranks.send(Logits(None if hidden is self._last else array(hidden), adapters_of(context)))
        with self._ranks.watched():
            return super().logits(hidden, context)


class LeadingAdapters:
    """An AdapterLoader: each rank loads its part of an adapter by itself."""

    def __init__(self, own: AdapterLoader, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks

    def load(self, slot: int, adapter: Adapter) -> None:
        self._ranks.send_adapter(slot, adapter)
        self._own.load(slot, adapter)

    def loaded(self) -> list[tuple[int, str | None]]:
        found = self._own.loaded()
        for slot, failure in found:
            self._ranks.send(UseAdapter(slot, failed=failure is not None))
        return found

    def wait(self, seconds: float) -> None:
        self._own.wait(seconds)
