"""The deployment with --data-dir: one actor, which Serve replaces when it ends. It computes nothing."""

from __future__ import annotations

from typing import cast

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.util import list_named_actors

from deploy.ray.link import Call, JournalLink
from deploy.ray.members import Members
from quire.engine.common.errors import Overloaded
from quire.server.config import ServerConfig
from quire.server.observe import log_setup
from quire.server.store.sweeper import SECONDS_PER_DAY


class Journal(Members):
    async def __init__(self, config: ServerConfig) -> None:  # type: ignore[misc]
        """Raises what open_data_dir raises, also while the previous actor runs; Serve then retries."""
        log_setup.set_up_logging(config)
        assert config.data_dir is not None
        retention = config.response_retention_days * SECONDS_PER_DAY
        super().__init__(config.data_dir, int(config.max_stored_size * 2**30), living, retention)

    async def __del__(self) -> None:
        await self.close()


def living() -> set[str]:
    """Ids of all running replicas: the last part of their actors' names."""
    return {str(name).rpartition("#")[2] for name in list_named_actors()}


def journal_link(journal: DeploymentHandle) -> JournalLink:
    """For this process's replica."""
    return JournalLink(serve.get_replica_context().replica_id.unique_id, calling(journal))


def calling(journal: DeploymentHandle) -> Call:
    async def call(method: str, *given: object) -> object:
        try:
            return cast(object, await getattr(journal, method).remote(*given))
        except (RayActorError, ReplicaUnavailableError, DeploymentUnavailableError):
            raise Overloaded("The process that has data_dir ended. Please try again") from None

    return call
