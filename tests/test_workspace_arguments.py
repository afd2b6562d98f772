"""Wrong arguments of a workspace: named, before anything is allocated or exchanged."""

from __future__ import annotations

import pytest
import torch

import flashinfer_ar as far

bf16 = torch.bfloat16

SIZES = {"max_num_tokens": 3, "hidden_dim": 64, "dtype": bf16}


@pytest.mark.parametrize(
    ("changes", "exception", "message"),
    [
        ({"mapping": far.Mapping(73, 0, tp_size=73)}, ValueError, "tp_size=73: allowed is 1 to 72"),
        ({"max_num_tokens": 0}, ValueError, "max_num_tokens=0: allowed is a whole number from 1"),
        ({"max_num_tokens": 1.5}, ValueError, "max_num_tokens=1.5"),
        ({"hidden_dim": -64}, ValueError, "hidden_dim=-64"),
        ({"hidden_dim": "64"}, ValueError, "hidden_dim='64'"),
        ({"hidden_dim": 60}, ValueError, "hidden_dim=60: allowed is a multiple of 16 bytes"),
        ({"dtype": torch.float64}, ValueError, "dtype=torch.float64: allowed is float32"),
        ({"dtype": "bfloat16"}, ValueError, "dtype=bfloat16"),
        ({"dtype": None}, ValueError, "max_num_tokens, hidden_dim.* all three"),
        ({"hidden_dim": None}, ValueError, "max_num_tokens, hidden_dim.* all three"),
        ({"buffer_size_in_bytes": 0}, ValueError, "buffer_size_in_bytes=0"),
        ({"buffer_size_in_bytes": 1 << 37}, ValueError, "a generation of 137438953472 bytes"),
        ({"max_num_tokens": 1 << 40}, ValueError, "a generation of .* bytes: allowed is less"),
        ({"device": "meta"}, ValueError, "device=meta: allowed is a CPU or CUDA device"),
        ({"unknown": 1}, TypeError, "unexpected keyword argument 'unknown'"),
    ],
)
def test_wrong_workspace_argument(changes, exception, message):
    arguments = {"mapping": far.Mapping(), "device": "cpu"} | SIZES | changes
    with pytest.raises(exception, match=message):
        far.MNNVLAllReduceFusionWorkspace(**arguments)


@pytest.mark.parametrize("world_size", [0, -1, None])
def test_wrong_world_size(world_size):
    with pytest.raises(ValueError, match=f"world_size={world_size}"):
        far.Mapping(world_size, 0)


@pytest.mark.parametrize("mapping", [None, 2])
def test_a_mapping_of_another_type(mapping):
    with pytest.raises(TypeError, match="mapping: "):
        far.MNNVLAllReduceFusionWorkspace(mapping, 3, 64, bf16, device="cpu")


def test_the_cpu_may_have_a_number():
    workspace = far.MNNVLAllReduceFusionWorkspace(far.Mapping(), 3, 64, bf16, device="cpu:0")
    with workspace:
        row = torch.ones(1, 64, dtype=bf16)
        assert torch.equal(far.trtllm_mnnvl_allreduce(row, workspace, False), row)


def test_size_question_about_another_dtype():
    workspace = far.MNNVLAllReduceFusionWorkspace(far.Mapping(), 3, 64, bf16, device="cpu")
    with workspace, pytest.raises(ValueError, match="dtype"):
        workspace.is_buffer_size_sufficient(1, 1, 64, torch.float64)
