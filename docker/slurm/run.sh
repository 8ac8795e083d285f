#!/bin/bash
#SBATCH --job-name=rolloutmq
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=B:TERM@300
# One job: the first node holds server, producer and trainer, the others a worker per GPU. Submit it again after a
# time limit: the same run goes on. The folder and the environment (`python3 bootstrap.py`) are on a shared disk.
set -euo pipefail
CONFIG=${CONFIG:-configs/my_run.toml}
PATH=$PWD/.venv/bin:$PATH
head=$(hostname -f)
folder=runs/server; mkdir -p "$folder"
[ -s "$folder/password" ] || (umask 077; openssl rand -hex 16 > "$folder/password")
export REDIS_URL="redis://:$(cat "$folder/password")@$head:6379/0"

# the password is read from a file, so that it is on no command line
(umask 077; printf 'include %s\nrequirepass %s\nbind 0.0.0.0\ndir %s\n' \
    "$PWD/docker/redis.conf" "$(cat "$folder/password")" "$PWD/$folder" > "$folder/own.conf")
"$(python -c 'from buffer.server.embedded import valkey_binary; print(valkey_binary())')" "$folder/own.conf" &
server=$!
trap 'kill $(jobs -p | grep -v "^$server$") 2>/dev/null; wait $trainer; kill $server; wait' TERM EXIT

rolloutmq producer "$CONFIG" &
srun --exact --exclude="$head" --nodes=$((SLURM_NNODES - 1)) --ntasks-per-node=8 --gpus-per-task=1 \
    rolloutmq worker "$CONFIG" &
CUDA_VISIBLE_DEVICES=0 rolloutmq train "$CONFIG" &
trainer=$!
wait $trainer
