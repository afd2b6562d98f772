"""Host time of an eager call with its outputs given, beside a bare launch of the same kernel.

One rank, so every kernel ends by itself; ``NUM_CALLS`` calls are enqueued in a row without waiting,
fewer than the driver queues. The bare launch is ``cuLaunchKernelEx`` through the same binding with
everything prepared. All are timed in turns in one process.

    python -m benchmarks.launch_cost --rounds 200
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from cuda.bindings import driver

import flashinfer_ar as far
from flashinfer_ar.bootstrap import in_process_ranks
from flashinfer_ar.calls import PreparedCall
from flashinfer_ar.timing import percentiles

DEVICE = torch.device("cuda", 0)
NUM_CALLS, NUM_WARMUP_ROUNDS = 200, 20
NUM_TOKENS, HIDDEN = 1, 7168
EPSILON = 1e-5


def bare(call: PreparedCall) -> Callable[[], object]:
    """The launch that a call ends with, alone."""
    launch: Any = call.launch
    config, function, arguments = launch.configs[1], launch.function, launch.arguments
    enqueue = driver.cuLaunchKernelEx
    return lambda: enqueue(config, function, arguments, 0)


def variants(workspace: far.MNNVLAllReduceFusionWorkspace) -> dict[str, Callable[[], object]]:
    """What is timed, by name: calls, and the bare launches of their kernels."""

    def ones(*size: int) -> torch.Tensor:
        return torch.ones(*size, dtype=torch.bfloat16, device=DEVICE)

    row, output, residual, residual_out = (ones(NUM_TOKENS, HIDDEN) for _ in range(4))
    gamma = ones(HIDDEN)

    def plain() -> object:
        return far.trtllm_mnnvl_allreduce(row, workspace, True, output)

    def fused() -> object:
        return far.trtllm_mnnvl_fused_allreduce_add_rmsnorm(
            row, residual, gamma, workspace, EPSILON, output, residual_out, True
        )

    plain(), fused()
    assert workspace.last_plain is not None and workspace.last_fused is not None
    return {
        "plain": plain,
        "plain, bare launch": bare(workspace.last_plain.prepared),
        "fused": fused,
        "fused, bare launch": bare(workspace.last_fused.prepared),
    }


def measure(calls: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, list[float]]:
    """Microseconds of host time a call, for each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(NUM_WARMUP_ROUNDS + num_rounds):
        for name in list(calls) if number % 2 else list(reversed(calls)):
            call = calls[name]
            start = time.perf_counter()
            for _ in range(NUM_CALLS):
                call()
            took = time.perf_counter() - start
            torch.cuda.synchronize()
            if number >= NUM_WARMUP_ROUNDS:
                times[name].append(took * 1e6 / NUM_CALLS)
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 1
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        far.MNNVLAllReduceFusionWorkspace(
            far.Mapping(1, 0, tp_size=1),
            NUM_TOKENS,
            HIDDEN,
            torch.bfloat16,
            comm_backend=in_process_ranks(1)[0],
            device=DEVICE,
        ) as workspace,
    ):
        times = measure(variants(workspace), chosen.rounds)
    shown = {name: percentiles(rounds) for name, rounds in times.items()}
    print(f"{torch.cuda.get_device_name(DEVICE)}; {chosen.rounds} rounds of {NUM_CALLS} calls")
    for name, (median, p5, p95) in shown.items():
        print(f"{name:20} {median:6.2f} us  ({p5:.2f} to {p95:.2f})")
    for name in ("plain", "fused"):
        print(f"{name}: {shown[name][0] / shown[name + ', bare launch'][0]:.2f} x the bare launch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
