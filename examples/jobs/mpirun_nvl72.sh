#!/usr/bin/env bash
# flashinfer_ar across the hosts of one GB200 NVL72 rack, started by Open MPI over ssh.
# NOT RUN ON SUCH A MACHINE. docs/running.md says what has to be there.
#
#   examples/jobs/mpirun_nvl72.sh HOSTFILE [NETWORK]
#
# HOSTFILE has one line a host, at least three, all in one NVLink clique: "node01 slots=4".
# NETWORK is the hosts' Ethernet, for the ranks' set-up: 10.0.0.0/16 or an interface such as eth0.
set -euo pipefail

hostfile=$(realpath -- "${1:?usage: mpirun_nvl72.sh HOSTFILE [NETWORK]}")
network=${2:-}
# Repository and .venv are at the same path on every host.
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
export PATH="$PWD/.venv/bin:$PATH"

# TCP alone: MPI carries a few kilobytes while a workspace is made, and nothing afterwards.
mpi=(--hostfile "$hostfile" --bind-to none --mca pml ob1 --mca btl "tcp,self")
for name in PATH "${!FLASHINFER_AR_@}"; do
  mpi+=(-x "$name")
done
if [[ -n $network ]]; then
  mpi+=(--mca btl_tcp_if_include "$network")
fi

# 1. What the machines can do, compared between all ranks: four a host, one a GPU.
mpirun "${mpi[@]}" --map-by ppr:4:node flashinfer-ar doctor

# 2. Three ranks on three hosts, so that every store to a peer crosses hosts. (The model has 9
#    attention heads and 3 key/value heads, so it takes 3 ranks and no more.) "-m mpi4py" ends the
#    whole job when one rank fails.
mpirun "${mpi[@]}" -np 3 --map-by ppr:1:node python -m mpi4py examples/serve_smollm2.py
