"""Agent loops that play environments of other packages through the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from buffer.imports import require
from producer_workers.datasets.verifiers_tasks import REQUIREMENT
from producer_workers.gateway.loop import GatewayAgentLoop


def verifiers_loop(
    *, environment: str, environment_options: Mapping[str, Any] | None = None, **gateway: Any
) -> GatewayAgentLoop:
    """Return the loop that plays tasks of an environment of verifiers. Raises ConfigError.

    `environment`, `environment_options`: those of a data set of kind "verifiers", which gives them.
    """
    require("verifiers.v1", REQUIREMENT)
    options = {"environment": environment, "options": dict(environment_options or {})}
    return GatewayAgentLoop(
        agent="producer_workers.environments.verifiers:play", agent_options=options, **gateway
    )
