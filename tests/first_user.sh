#!/usr/bin/env bash
# What a first user types, from an empty folder: `tests/first_user.sh PYTHON PACKAGE FOLDER`, for `make test-release`.
# PACKAGE, a wheel or an sdist, is installed into a fresh environment in FOLDER, without torch.
set -euo pipefail
python=$1 package=$(realpath "$2")
rm -rf "$3" && mkdir -p "$3/empty" && cd "$3"
unset PYTHONPATH REDIS_URL
"$python" -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check "$package"
export PATH=$PWD/venv/bin:$PATH
cd empty

fails_with() {  # a part of the message, then the command: it must fail, and say so
    local part=$1 said
    shift
    if said=$("$@" 2>&1); then echo "did not fail: $*"; return 1; fi
    grep -qF "$part" <<<"$said" || { echo "$*: $said"; return 1; }
}

set -x
rolloutmq --version
rolloutmq --help
rolloutmq simulate --workers 2 --median 200 --steps 3
for template in math code tools agent; do
    rolloutmq init $template --template $template --gpus 0
done
cd math
fails_with "pip install" rolloutmq check config.toml    # the small model needs torch
cd ..
fails_with "no server found" rolloutmq status
rolloutmq runs

# the test of each template
pip install --quiet --disable-pip-version-check "$package[testing]" pytest
for template in math code tools agent; do
    (cd $template && python -m pytest -q -c /dev/null --rootdir .)  # not the settings of this repository
done

# a real server, a run, and a trainer that takes a batch from it
python - <<'P'
import importlib.util
from pathlib import Path
from buffer.ids import new_nonce
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.server.embedded import EmbeddedServer
from buffer.wire.rollout import FIRST_WEIGHTS
from rolloutmq import RolloutConsumer, Run, Store

with EmbeddedServer(Path("server")) as server:
    store = Store(server.url)
    run = Run.create(store, "w", new_nonce(), RunLimits(tasks={"math": TaskLimits()}), FIRST_WEIGHTS, "/w")
    consumer = RolloutConsumer(run)
    consumer.open()
    assert not consumer.take_batch(1, {"math": 0}).groups
    consumer.close()
    store.close()
assert importlib.util.find_spec("torch") is None
P
