#!/bin/bash
#SBATCH --job-name=rolloutmq
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=B:TERM@300
# One job: the first node has the server, the producer, the trainer on its first TRAINER_GPUS GPUs, and workers on its
# other ones; every further node has a worker for each GPU. After a time limit, submit it again: the same run continues
# (`sbatch --dependency=singleton` twice queues that in advance). The folder and the environment (`python3 bootstrap.py`)
# are on a shared disk. `REDIS_URL=$(cat runs/server/url) rolloutmq status --follow`, on any node, shows the run.
set -euo pipefail
CONFIG=${CONFIG:-configs/my_run.toml}
TRAINER_GPUS=${TRAINER_GPUS:-1}
GPUS=${SLURM_GPUS_ON_NODE:-8}
PATH=$PWD/.venv/bin:$PATH
umask 077

# the server, on a port that is free on this node; its password is in files that only you can read
folder=runs/server
mkdir -p "$folder"
[ -s "$folder/password" ] || python -c 'import secrets; print(secrets.token_hex(16))' > "$folder/password"
port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
printf 'include %s\nrequirepass %s\nbind 0.0.0.0\nport %s\ndir %s\n' \
    "$PWD/docker/redis.conf" "$(cat "$folder/password")" "$port" "$PWD/$folder" > "$folder/own.conf"
printf 'redis://:%s@%s:%s/0\n' "$(cat "$folder/password")" "$(hostname -f)" "$port" > "$folder/url"
REDIS_URL=$(cat "$folder/url")
export REDIS_URL
"$(python -c 'from buffer.redis.server.embedded import valkey_binary; print(valkey_binary())')" "$folder/own.conf" &
server=$!
clients=()

# SIGTERM lets workers finish what runs, and the trainer write a checkpoint; the server ends last
stop() {
    trap - TERM EXIT
    kill -TERM "${clients[@]}" 2>/dev/null || true
    wait "${clients[@]}" || true
    kill "$server"
    wait "$server" || true
}
trap 'stop; exit 143' TERM
trap stop EXIT

train() {
    CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((TRAINER_GPUS - 1)))
    export CUDA_VISIBLE_DEVICES
    if ((TRAINER_GPUS > 1)); then
        exec torchrun --nproc-per-node="$TRAINER_GPUS" -m rolloutmq train "$CONFIG" --exit-when-stuck
    fi
    exec rolloutmq train "$CONFIG" --exit-when-stuck
}
train &
trainer=$!
clients+=("$trainer")
rolloutmq producer "$CONFIG" &
clients+=($!)
for ((gpu = TRAINER_GPUS; gpu < GPUS; gpu++)); do
    CUDA_VISIBLE_DEVICES=$gpu rolloutmq worker "$CONFIG" &
    clients+=($!)
done
if ((SLURM_NNODES > 1)); then
    # every count is given: srun would take the missing ones from this job's own (a task for each node)
    unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_CPUS_PER_TASK
    others=$((SLURM_NNODES - 1))
    srun --exact --exclude="$SLURMD_NODENAME" --nodes="$others" --ntasks=$((others * GPUS)) --ntasks-per-node="$GPUS" \
        --gpus-per-task=1 --cpus-per-task=$((SLURM_CPUS_ON_NODE / GPUS)) --mem=0 --kill-on-bad-exit=0 \
        rolloutmq worker "$CONFIG" &
    clients+=($!)
fi
wait "$trainer"
