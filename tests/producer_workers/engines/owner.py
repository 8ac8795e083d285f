"""A process that owns an engine, for tests that kill it. Prints one JSON line, then sleeps.

usage: python -m tests.producer_workers.engines.owner FIRST_FOLDER SECOND_FOLDER
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import orjson
import psutil

from buffer.wire.rollout import PolicyVersion
from buffer.wire.sampling import SampleParams
from producer_workers.config.engine import VllmConfig
from producer_workers.engines import build_engine


async def main(first: Path, second: Path) -> None:
    config = VllmConfig(
        max_model_len=512, max_num_seqs=8, kv_cache_memory_bytes=32 << 20, omp_threads=1
    )
    engine = build_engine(config, first, PolicyVersion("main", 0))
    await engine.start()
    await engine.load_weights(second, PolicyVersion("main", 1))
    prompt = np.array([40, 41, 42], dtype=np.int32)
    made = await engine.generate("one", prompt, SampleParams(max_tokens=50, min_tokens=50, seed=1))
    report = {
        "token_ids": made.token_ids.tolist(),
        "logprobs": made.logprobs.tolist(),
        "children": [child.pid for child in psutil.Process().children(recursive=True)],
    }
    sys.stdout.buffer.write(orjson.dumps(report) + b"\n")
    sys.stdout.flush()
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
