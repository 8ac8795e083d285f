"""[gateway]: where agents reach a worker."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from buffer.config.attached import AttachedSection
from buffer.config.section import YEAR_S
from buffer.errors import ConfigError
from producer_workers.config.call_limit import LimitSection
from producer_workers.config.producing import ProducingConfig
from producer_workers.http_client import is_loopback


class GatewaySection(AttachedSection):
    """[gateway]: the address at which a worker serves agents, one port for all of its sessions."""

    host: str = Field("127.0.0.1", min_length=1)
    """address to listen on; 0.0.0.0: every address of the machine"""
    port: int = Field(0, ge=0, le=65535)
    """port to listen on; 0: any free one"""
    ports: int = Field(1, ge=1, le=1024)
    """a worker takes the first free one of this many ports, from `port` on: as many as workers run
    on one machine
    """
    public_url: str | None = Field(None, pattern=r"^https?://[^\s?#]+$")
    """URL that agents are given, in which {hostname} and {port} are replaced by those of the
    worker; default: host and port
    """
    tls_cert: Path | None = None
    """PEM file with the certificate and those of its issuers; default: no TLS"""
    tls_key: Path | None = None
    """PEM file with the key of the certificate, without a password"""

    key_file: Path | None = None
    """private file with the key that opens live sessions, the same for all gateways of a run;
    `rolloutmq gateway` makes it if it is missing
    """
    limit: LimitSection | None = None
    """quota of the agents that workers start, and so of their sandboxes, for all workers together:
    { requests_per_minute, at_once }; default: none
    """
    session_ttl_s: float = Field(3600.0, gt=0, le=YEAR_S)
    """seconds, without waits for a quota, in which all live sessions of a group must get their
    rewards; later, the group is dropped
    """

    def problems(self) -> Iterator[str]:
        if (self.tls_cert is None) != (self.tls_key is None):
            yield "TLS needs both tls_cert and tls_key"
        if self.port + self.ports > 65536:
            yield f"port = {self.port} and ports = {self.ports} go beyond port 65535"
        example = f'set public_url, for example "{self.scheme}://{{hostname}}:{{port}}"'
        if self.public_url is None:
            if self.host in ("0.0.0.0", "::"):
                yield f"agents cannot be given the address {self.host}: {example}"
            return
        if "{" in self.public_url.replace("{hostname}", "").replace("{port}", ""):
            yield "public_url may contain {hostname} and {port}, and no other {"
        if "{port}" not in self.public_url and (self.port == 0 or self.ports > 1):
            yield (
                "public_url without {port} is for one fixed port: set port, and leave out ports; "
                f"or {example}"
            )
        if self.tls_cert and self.public_url.startswith("http:"):
            yield "public_url must begin with https:// because of tls_cert"

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"

    def rules(self, config: Any) -> Iterator[str]:
        workers = config.launch.workers
        if self.port and self.ports < workers:
            yield (
                f"[launch] workers = {workers} need as many [gateway] ports: "
                f"set ports = {workers} or more, or port = 0"
            )

    def warnings(self) -> Iterator[str]:
        """Yield a warning about requests that others could read."""
        is_encrypted = self.tls_cert or (self.public_url or "").startswith("https:")
        if not is_encrypted and not is_loopback(self.host):
            yield (
                f"[gateway] host = {self.host} without TLS: the network between agents and workers "
                "can read their keys and prompts; set tls_cert and tls_key"
            )

    def check(self) -> None:
        self.tls_context()

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the context of a server; None without TLS. Raises ConfigError."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # a key with a password is refused, instead of asked for at a terminal
            context.load_cert_chain(self.tls_cert, self.tls_key, password="")
        except OSError as error:
            raise ConfigError(
                f"[gateway] cannot serve TLS with {self.tls_cert} and {self.tls_key}: {error}",
                hint="give readable PEM files of one certificate and its key, without a password",
            ) from error
        return context

    def url(self, port: int, hostname: str) -> str:
        """Return the root of the URLs of a worker on a machine that has `hostname`."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        given = self.public_url or f"{self.scheme}://{shown}:{port}"
        url = given.replace("{hostname}", hostname).replace("{port}", str(port))
        return url.rstrip("/").removesuffix("/v1")


_DEFAULT = GatewaySection()


def section_of(config: ProducingConfig) -> GatewaySection:
    """Return [gateway] of a config, the same object each time."""
    section: GatewaySection = config.attached.get("gateway", _DEFAULT)
    return section
