from __future__ import annotations

import pytest

from benchmarks.fan_out import LATENCY_S, Spread


@pytest.mark.parametrize("receivers", [1, 2, 9, 125])
def test_times_are_those_of_the_busiest_network_card(receivers: int) -> None:
    gigabytes, gbit_s = 6.4, 80.0
    once_s, chunk_s = 0.64, 0.0064
    flat = Spread(receivers, receivers).seconds(gigabytes, gbit_s)
    assert flat == pytest.approx(receivers * once_s + LATENCY_S)
    chain = Spread(receivers, 1).seconds(gigabytes, gbit_s)
    assert chain == pytest.approx(once_s + (receivers - 1) * chunk_s + receivers * LATENCY_S)
    tree = Spread(receivers, 2).seconds(gigabytes, gbit_s)
    assert min(2, receivers) * once_s < tree <= 2 * once_s + 7 * (2 * chunk_s + LATENCY_S)
