"""Agent loops that play environments of other packages through the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from buffer.imports import require
from producer_workers.datasets.verifiers_tasks import REQUIREMENT
from producer_workers.gateway.loop import GatewayAgentLoop


class VerifiersAgentLoop(GatewayAgentLoop):
    """Plays tasks of an environment of verifiers, which a data set of this kind names."""

    def __init__(
        self,
        *,
        environment: str,
        environment_options: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        require("verifiers.v1", REQUIREMENT)
        options = {"environment": environment, "options": dict(environment_options or {})}
        play = "producer_workers.environments.verifiers:play"
        super().__init__(agent=play, agent_options=options, **given)
