"""A call like one before: started without checks, allocation or waiting, and never wrongly."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from harness import Strategy
from workspace_tools import open_workspace

import flashinfer_ar as far
from flashinfer_ar import arguments, checked_call, env, reference
from flashinfer_ar.bootstrap import in_process_ranks

TOKENS, HIDDEN = 3, 64
bf16 = torch.bfloat16


class Tensors:
    """A call's tensors, with values of their own."""

    def __init__(self, device, seed=0, tokens=TOKENS, dtype=bf16):
        generator = torch.Generator().manual_seed(seed)

        def random(*size):
            return torch.randn(*size, generator=generator).to(dtype).to(device)

        self.input, self.residual_in = random(tokens, HIDDEN), random(tokens, HIDDEN)
        self.gamma = random(HIDDEN)
        self.output, self.residual_out = random(tokens, HIDDEN), random(tokens, HIDDEN)

    def call(self, workspace, fused, /, **changes):
        given = {
            "input": self.input,
            "workspace": workspace,
            "launch_with_pdl": False,
            "output": self.output,
        }
        if not fused:
            return far.trtllm_mnnvl_allreduce(**given | changes)
        given |= {
            "residual_in": self.residual_in,
            "gamma": self.gamma,
            "residual_out": self.residual_out,
            "epsilon": 1e-5,
        }
        return far.trtllm_mnnvl_fused_allreduce_add_rmsnorm(**given | changes)

    def check(self, workspace, fused, epsilon=1e-5, weight_bias=0.0):
        """That the outputs hold what a call must give."""
        workspace.synchronize()
        if not fused:
            assert torch.equal(self.output.cpu(), reference.allreduce([self.input.cpu()]))
            return
        inputs, residual, gamma = [self.input.cpu()], self.residual_in.cpu(), self.gamma.cpu()
        output, residual_out = reference.allreduce_add_rmsnorm(
            inputs, residual, gamma, epsilon, weight_bias
        )
        assert torch.equal(self.output.cpu(), output)
        assert torch.equal(self.residual_out.cpu(), residual_out)


@pytest.fixture
def workspace(device):
    with open_workspace(in_process_ranks(1)[0], device) as workspace:
        yield workspace


@pytest.fixture
def checks(monkeypatch):
    """The calls that were checked."""
    seen = []
    for name in ("check_plain", "check_fused"):
        real = getattr(arguments, name)

        def check(*given, real=real):
            seen.append(given)
            return real(*given)

        monkeypatch.setattr(arguments, name, check)
    return seen


both = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])


@both
def test_a_repeated_call_is_checked_once(workspace, checks, fused):
    used = [Tensors(workspace.device, seed) for seed in range(3)]
    for tensors in used * 3:
        tensors.output.zero_()
        tensors.call(workspace, fused)
        tensors.check(workspace, fused)
    assert len(checks) == len(used)


@both
def test_nothing_but_the_launch_happens(workspace, monkeypatch, fused):
    tensors = Tensors(workspace.device)
    tensors.call(workspace, fused)
    tensors.output.zero_()
    workspace.synchronize()

    def forbidden(*_, **__):
        raise AssertionError("not on the path of a repeated call")

    with monkeypatch.context() as patch:
        for name in ("empty", "empty_like", "zeros", "tensor"):
            patch.setattr(torch, name, forbidden)
        patch.setattr(torch.cuda, "synchronize", forbidden)
        patch.setattr(logging.Logger, "handle", forbidden)
        patch.setattr(type(os.environ), "__getitem__", forbidden)
        for name in ("timeout_s", "max_ctas", "debug", "strategy_table"):
            patch.setattr(env, name, forbidden)
        patch.setattr(arguments, "check_workspace", forbidden)
        tensors.call(workspace, fused)
    tensors.check(workspace, fused)


def wrong_calls(tensors):
    """Changes of a right call that must each be refused: the argument it names, and what it is."""
    other = Tensors(tensors.input.device, tokens=TOKENS + 1)
    wide = tensors.input.float()
    strided = tensors.input.new_zeros(TOKENS, 2 * HIDDEN)[:, ::2]
    flat = tensors.input.new_zeros(2 * TOKENS * HIDDEN)
    misaligned = flat[1 : TOKENS * HIDDEN + 1].view(TOKENS, HIDDEN)
    below, above = (flat[i : i + TOKENS * HIDDEN].view(TOKENS, HIDDEN) for i in (0, HIDDEN))
    plain = {
        "output-shape": ("output", {"output": other.output}),
        "output-dtype": ("output", {"output": wide}),
        "output-strided": ("output", {"output": strided}),
        "output-misaligned": ("output", {"output": misaligned}),
        "output-number": ("output", {"output": 3}),
        "overlap": ("output", {"input": below, "output": above}),
        "input-strided": ("input", {"input": strided}),
        "input-none": ("input", {"input": None}),
        "pdl-number": ("launch_with_pdl", {"launch_with_pdl": 0}),
        "strategy-number": ("strategy", {"strategy": 99}),
        "workspace-none": ("workspace", {"workspace": None}),
    }
    fused = {
        "gamma-shape": ("gamma", {"gamma": tensors.gamma[:8]}),
        "gamma-dtype": ("gamma", {"gamma": tensors.gamma.float()}),
        "gamma-is-output": ("output", {"gamma": tensors.output[0]}),
        "one-output": ("residual_out", {"residual_out": tensors.output}),
        "residual-shape": ("residual_in", {"residual_in": other.residual_in}),
        "epsilon-flag": ("epsilon", {"epsilon": True}),
        "epsilon-nan": ("epsilon", {"epsilon": float("nan")}),
        "epsilon-tensor": ("epsilon", {"epsilon": torch.tensor([1e-5, 1e-5])}),
        "bias-flag": ("weight_bias", {"weight_bias": False}),
        "bias-infinite": ("weight_bias", {"weight_bias": float("inf")}),
    }
    return {"plain": plain, "fused": plain | fused}


def test_a_wrong_call_like_one_that_passed_is_refused(workspace, checks):
    for kind, cases in wrong_calls(Tensors(workspace.device)).items():
        for name in cases:
            tensors = Tensors(workspace.device)
            argument, changes = wrong_calls(tensors)[kind][name]
            tensors.call(workspace, kind == "fused")
            with pytest.raises((TypeError, ValueError), match=f"^{argument}: "):
                tensors.call(workspace, kind == "fused", **changes)
                pytest.fail(f"{name} was not refused")
            tensors.output.zero_()
            tensors.call(workspace, kind == "fused")
            tensors.check(workspace, kind == "fused")


def test_a_closed_workspace_is_refused(device):
    for fused in (False, True):
        with open_workspace(in_process_ranks(1)[0], device) as workspace:
            tensors = Tensors(device)
            tensors.call(workspace, fused)
        with pytest.raises(ValueError, match="closed"):
            tensors.call(workspace, fused)


def test_other_numbers_take_effect(workspace):
    tensors = Tensors(workspace.device)
    for numbers in ((1e-5, 0.0), (0.5, 0.0), (0.5, 1.0), (1e-5, 0.0), (1, 1)):
        for _ in range(2):
            tensors.call(workspace, True, epsilon=numbers[0], weight_bias=numbers[1])
            tensors.check(workspace, True, *numbers)
    for _ in range(2):
        tensors.call(workspace, True, epsilon=None)
        tensors.check(workspace, True, torch.finfo(bf16).eps)


def test_other_shapes_and_strategies_in_turn(workspace):
    used = [Tensors(workspace.device, tokens=tokens) for tokens in (1, 5, 2)]
    used.append(Tensors(workspace.device, dtype=torch.float32))
    for fused in (True, False) * 2:
        for strategy in Strategy:
            for tensors in used:
                tensors.output.zero_()
                tensors.call(workspace, fused, strategy=strategy)
                tensors.check(workspace, fused)


@both
def test_in_place(workspace, checks, fused):
    tensors = Tensors(workspace.device)
    tensors.output = tensors.input
    before = tensors.input.clone()
    for _ in range(3):
        tensors.input.copy_(before)
        tensors.call(workspace, fused)
        expected = Tensors(workspace.device)
        expected.call(workspace, fused)
        workspace.synchronize()
        assert torch.equal(tensors.output, expected.output)
    assert len([given for given in checks if given[0] is tensors.input]) == 1


def test_places_are_bounded(workspace, monkeypatch):
    monkeypatch.setattr(checked_call, "_MAX_PLACES", 8)
    used = [Tensors(workspace.device, seed) for seed in range(20)]
    for tensors in used * 2:
        tensors.output.zero_()
        tensors.call(workspace, False)
        tensors.check(workspace, False)
        assert len(workspace.last_plain._places) <= 8


@both
def test_without_torchs_guards(workspace, checks, monkeypatch, fused):
    monkeypatch.setattr(checked_call, "_torch_guards_hold", lambda: False)
    test_a_repeated_call_is_checked_once(workspace, checks, fused)
    test_a_wrong_call_like_one_that_passed_is_refused(workspace, checks)


def test_debug_mode_checks_every_call(device, checks, monkeypatch):
    monkeypatch.setenv("FLASHINFER_AR_DEBUG", "1")
    with open_workspace(in_process_ranks(1)[0], device) as workspace:
        for fused in (False, True):
            tensors = Tensors(device)
            for _ in range(3):
                tensors.call(workspace, fused)
    assert len(checks) == 6
