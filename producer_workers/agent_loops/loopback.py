"""Keep requests to this machine's own servers away from a proxy that the environment names."""

from __future__ import annotations

import os

_HOSTS = ("127.0.0.1", "localhost", "::1")


def keep_loopback_direct() -> None:
    """Add loopback to `no_proxy` of this process and of the programs that it starts.

    Clients of HTTP read the proxies of the environment (`HTTP_PROXY`, `ALL_PROXY`) and would send
    an agent's prompts, with the key of its session, to a proxy that cannot reach the gateway.
    """
    # some clients read one spelling, some the other, and some the first that they find
    known = [os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY")]
    hosts = [host.strip() for value in known for host in value.split(",")]
    if "*" not in hosts:
        value = ",".join(dict.fromkeys(filter(None, [*hosts, *_HOSTS])))
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = value
