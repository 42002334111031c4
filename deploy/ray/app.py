"""Quire on Ray Serve: `serve run deploy/ray/serve.yaml` from the repository's root; docs/deploy/ray.md says more."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from deploy.ray.gateway import Gateway
from deploy.ray.journal import Journal
from deploy.ray.replica import Replica
from deploy.ray.resources import replica_resources
from deploy.ray.routing import PrefixRouter
from quire.engine.common.errors import ConfigError
from quire.engine.settings.settings_reader import load_settings
from quire.server.config import ServerConfig

REFUSED = {
    "ssl_certfile": "http_options of Serve's configuration has it",
    "host": "http_options of Serve's configuration has it",
    "port": "http_options of Serve's configuration has it",
    "uds": "http_options of Serve's configuration has it",
}
"""Settings that replicas cannot have, and why."""
IMAGES = {"host", "port"}
"""Variables of Quire's images, ignored here."""


def build(args: dict[str, Any]) -> Application:
    """The application: a gateway and its replicas. `args` are Quire's settings as in a TOML file, and `config`, a file
    or preset. QUIRE_* variables count where Serve builds it.

    Raises ConfigError.
    """
    settings = {name: value for name, value in args.items() if name != "config"}
    config = load_settings(ServerConfig, settings, args.get("config"), origin="argument {key}")
    for name, why in REFUSED.items():
        if name in args or (name not in IMAGES and getattr(config, name)):
            raise ConfigError(f"{name}: is not for replicas on Ray Serve: {why}")
    if config.nnodes > 1:
        raise ConfigError("nnodes: is not for replicas on Ray Serve: each is on one machine")
    replica = serve.deployment(Replica).options(
        name="Replica",
        max_ongoing_requests=2 * config.max_num_seqs,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        graceful_shutdown_timeout_s=config.shutdown_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        **replica_resources(config, ray.cluster_resources().get("GPU", 0.0)),
    )
    gateway = serve.deployment(Gateway).options(
        name="Gateway", max_ongoing_requests=4096, graceful_shutdown_timeout_s=config.shutdown_timeout
    )
    journal = None if config.data_dir is None else _journal(config)
    replicas = replica.bind(config.model_copy(update={"allowed_origins": []}), journal)
    application: Application = gateway.bind(config, replicas)
    return application


def _journal(config: ServerConfig) -> Application:
    """The deployment that has data_dir; replicas call it while they end, too."""
    journal = serve.deployment(Journal).options(
        name="Journal",
        num_replicas=1,
        max_ongoing_requests=16_384,
        graceful_shutdown_timeout_s=config.shutdown_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": 0.1},
        logging_config={"enable_access_log": False},
    )
    application: Application = journal.bind(config)
    return application
