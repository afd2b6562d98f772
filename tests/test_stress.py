"""Long runs of random calls: any shape after any other, ranks at different speeds, all checked.

``FLASHINFER_AR_STRESS_CALLS`` sets the number of calls (20,000 for a long run).
"""

from __future__ import annotations

import os
import random
import shutil
import time
from dataclasses import dataclass

import pytest
import torch
from harness import DTYPES, Strategy, check, random_call, stream_of_rank
from workspace_tools import is_armed, open_workspace

import flashinfer_ar as far
from flashinfer_ar import reference
from flashinfer_ar.jit import cache

SEED = 2026
NUM_CALLS = int(os.environ.get("FLASHINFER_AR_STRESS_CALLS", "4000"))
BATCH = 50  # calls in flight before all ranks stop and look
TOKENS = (1, 2, 3, 8, 64, 128, 129, 1024)
WEIGHTS = (8, 8, 8, 8, 4, 4, 4, 1)
HIDDEN = 64
NUM_PATTERNS = 7  # so that what calls n - 1 and n - 2 left behind would show in call n
STRATEGIES = (Strategy.ONESHOT, Strategy.TWOSHOT, Strategy.AUTO)


@dataclass(frozen=True)
class Step:
    """One call, the same on every rank, and how long each rank dawdles before it."""

    number: int
    num_tokens: int
    dtype: torch.dtype
    fused: bool
    strategy: Strategy
    launch_with_pdl: bool
    delays_s: tuple[float, ...]

    @property
    def pattern(self):
        return self.number % NUM_PATTERNS


def random_steps(world_size):
    chance = random.Random(SEED)

    def delay_s():
        return chance.random() * 2e-3 if chance.random() < 0.1 else 0.0

    for number in range(NUM_CALLS):
        yield Step(
            number,
            chance.choices(TOKENS, WEIGHTS)[0],
            chance.choice(DTYPES),
            chance.random() < 0.5,
            chance.choice(STRATEGIES),
            chance.random() < 0.5,
            tuple(delay_s() for _ in range(world_size)),
        )


def in_batches(steps):
    steps = list(steps)
    return [steps[first : first + BATCH] for first in range(0, len(steps), BATCH)]


def contribution(rank, pattern, dtype):
    """Small whole numbers that tell call, rank and token apart, and whose sums are exact."""
    token = torch.arange(max(TOKENS))[:, None]
    place = torch.arange(HIDDEN)
    return ((31 * pattern + 11 * rank + 7 * token + 3 * place) % 61 - 30).to(dtype)


class Patterns:
    """Inputs and right results of every pattern, for the most tokens.

    A call of fewer tokens takes the first rows of both: a row does not depend on the others.
    """

    def __init__(self, world_size):
        generator = torch.Generator().manual_seed(SEED)
        self.inputs, self.expected = {}, {}
        for dtype in DTYPES:
            residual = torch.randn(max(TOKENS), HIDDEN, generator=generator).to(dtype)
            gamma = torch.randn(HIDDEN, generator=generator).to(dtype)
            for pattern in range(NUM_PATTERNS):
                inputs = [contribution(rank, pattern, dtype) for rank in range(world_size)]
                total = reference.allreduce(inputs)
                fused = reference.allreduce_add_rmsnorm(inputs, residual, gamma, 1e-5)
                self.inputs[dtype, pattern] = (inputs, residual, gamma)
                self.expected[dtype, pattern] = {False: (total,), True: fused}

    def on_device(self, rank, device):
        """What rank ``rank`` passes to its calls."""
        return {
            key: (inputs[rank].to(device), residual.to(device), gamma.to(device))
            for key, (inputs, residual, gamma) in self.inputs.items()
        }


def launch(step, tensors, outputs, workspace):
    num_tokens = step.num_tokens
    inputs, residual, gamma = tensors[step.dtype, step.pattern]
    first, second = outputs
    if not step.fused:
        far.trtllm_mnnvl_allreduce(
            inputs[:num_tokens], workspace, step.launch_with_pdl, first, step.strategy
        )
        return (first,)
    return far.trtllm_mnnvl_fused_allreduce_add_rmsnorm(
        inputs[:num_tokens],
        residual[:num_tokens],
        gamma,
        workspace,
        1e-5,
        first,
        second,
        step.launch_with_pdl,
        step.strategy,
    )


def dawdle(step, rank, device):
    """On a GPU the stream waits too, half as long, so that not only launches are spread out."""
    delay_s = step.delays_s[rank]
    if delay_s == 0.0:
        return
    if device.type == "cuda":
        torch.cuda._sleep(int(delay_s * 1e9))  # cycles, of which there are one to two a nanosecond
    time.sleep(delay_s)


def make_outputs(batch, device):
    """Filled with NaN, so that what is not written shows."""
    return [
        [
            torch.full((step.num_tokens, HIDDEN), float("nan"), dtype=step.dtype, device=device)
            for _ in range(2)
        ]
        for step in batch
    ]


def require_right(batch, outputs, patterns, rank):
    for step, got in zip(batch, outputs, strict=True):
        due = patterns.expected[step.dtype, step.pattern][step.fused]
        for have, rows in zip(got, due, strict=True):
            right = torch.equal(reference.bits(have.cpu()), reference.bits(rows[: step.num_tokens]))
            assert right, f"rank {rank}, seed {SEED}, {step}"


def run_random_calls(comm, device):
    """On one rank, all of them, each result checked."""
    rank, world_size = comm.Get_rank(), comm.Get_size()
    patterns = Patterns(world_size)
    size_bytes = (world_size + 1) * max(TOKENS) * HIDDEN * 4 + world_size * 1024
    with (
        stream_of_rank(device),
        open_workspace(comm, device, buffer_size_in_bytes=size_bytes) as workspace,
    ):
        tensors = patterns.on_device(rank, device)
        if device.type == "cuda":
            torch.cuda._sleep(1)  # so that it is loaded
        for batch in in_batches(random_steps(world_size)):
            outputs = make_outputs(batch, device)
            workspace.synchronize()
            comm.barrier()  # on a GPU nothing may wait for the device between launches
            written = []
            for step, output in zip(batch, outputs, strict=True):
                dawdle(step, rank, device)
                written.append(launch(step, tensors, output, workspace))
            workspace.synchronize()
            comm.barrier()
            require_right(batch, written, patterns, rank)
        comm.barrier()
        assert is_armed(workspace)
        comm.barrier()


def test_random_calls(device):
    far.run_ranks(3, lambda comm: run_random_calls(comm, device))


# A rank that holds still where the protocol is most exposed: some of its slots are full, none is
# read. Its peers are through with the call by then, and their next data must go elsewhere.
PAUSES = {
    "oneshot.cuh": ("turn.advance();",),
    "twoshot.cuh": ("turn.advance();", "epilogue.open();"),
}
PAUSE = """
    if (turn.rank() == 1 && t.cta() == 0 && t.thread() == 0) {
      for (const uint64_t start = t.nanoseconds(); t.nanoseconds() - start < 3000000;) {}
    }
"""


@pytest.fixture
def pausing_headers(tmp_path, monkeypatch):
    copy = tmp_path / "include"
    shutil.copytree(cache.include_dir(), copy)
    for header, places in PAUSES.items():
        path = copy / "flashinfer_ar" / header
        for place in places:
            assert path.read_text().count(place) == 1
            path.write_text(path.read_text().replace(place, place + PAUSE))
    monkeypatch.setattr(cache, "include_dir", lambda: copy)
    return copy / "flashinfer_ar"


@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=lambda strategy: strategy.name)
def test_one_rank_pauses_between_publish_and_rearm(strategy, device, pausing_headers):
    calls = [
        random_call(3, num_tokens, HIDDEN, torch.bfloat16, seed=i, strategy=strategy)
        for i, num_tokens in enumerate((1, 8, 8, 2, 8, 8, 1, 8, 40, 8, 8, 8))
    ]
    check(3, calls, device)
