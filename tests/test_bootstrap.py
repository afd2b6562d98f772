"""Groups of ranks: one behaviour on all adapters, deadlines, lost peers, votes."""

import subprocess
import sys
import threading
import time

import pytest
from bootstrap_worker import ROOT, exchanges, results

from flashinfer_ar.bootstrap import (
    CommBackend,
    MPIBackend,
    TorchDistBackend,
    agree,
    agree_on_value,
    agreed_step,
    default,
    default_comm_backend,
    host_identity,
    run_ranks,
)
from flashinfer_ar.errors import BootstrapError, SymmetricMemoryError


def check_exchanges(found):
    everyone = [{"rank": rank, "filler": "x" * 1000 * rank} for rank in range(3)]
    assert [result["allgather"] for result in found] == [everyone] * 3
    assert [result["bcast"] for result in found] == ["from 2"] * 3
    assert [result["place"] for result in found] == [[0, 3], [1, 3], [2, 3]]
    assert [result["half"] for result in found] == [[1, [2, 0], 0], [0, [1], 1], [0, [2, 0], 0]]
    assert [result["again"] for result in found] == [[2, 0], [1], [2, 0]]
    assert [result["whole"] for result in found] == [[2, 1, 0]] * 3


def test_exchanges_in_process():
    check_exchanges(run_ranks(3, exchanges))


@pytest.mark.parametrize(
    ("launcher", "adapter"), [("mpi", "MPIBackend"), ("torch", "TorchDistBackend")]
)
def test_exchanges_between_processes(launcher, adapter):
    found = results(launcher, "exchanges")
    check_exchanges(found)
    assert {result["adapter"] for result in found} == {adapter}


def test_mpi_collective_has_a_deadline():
    for rank, result in enumerate(results("mpi", "late_peer")):
        first, second = result["errors"]
        assert first == second
        assert f"MPI allgather: rank {rank} of 3 waited 0.5 s" in first
        assert result["seconds"][0] >= 0.5
        assert result["seconds"][1] < 0.5  # a lost group is not waited for again


def test_torch_reports_a_lost_peer():
    for rank, result in enumerate(results("torch", "lost_peer")[:2]):
        assert f"torch.distributed allgather: rank {rank} of 3" in result["error"]


def test_torch_group_of_others_is_refused():
    refusals = [f"group: rank {rank} of the job is not a member of it" for rank in (1, 2)]
    assert [result["size"] for result in results("torch", "outsider")] == [1, *refusals]


def test_processes_without_a_group_get_no_workspace_of_one():
    for result in results("torch", "no_group"):
        assert "world_size=3" in result["error"]
        assert "0 (not initialised)" in result["error"]
        assert "MPI.COMM_WORLD has size 1" in result["error"]


def test_default_of_one_rank_needs_no_launcher():
    comm = default_comm_backend(1)
    assert (comm.Get_rank(), comm.allgather("a"), comm.bcast("b", 0)) == (0, ["a"], "b")


def test_default_prefers_torch_of_the_right_size(monkeypatch):
    monkeypatch.setattr(default, "TorchDistBackend", lambda: "torch")
    monkeypatch.setattr(default, "MPIBackend", lambda: FakeMPI(4))
    sizes = iter([4, 2, 2, 2])
    monkeypatch.setattr(default, "torch_world_size", lambda: next(sizes))
    assert default_comm_backend(4) == "torch"
    assert isinstance(default_comm_backend(4), FakeMPI)
    with pytest.raises(BootstrapError, match=r"group has size 2; MPI\.COMM_WORLD has size 4"):
        default_comm_backend(3)


class FakeMPI:
    def __init__(self, size):
        self.size = size

    def Get_size(self):
        return self.size


def test_mpi4py_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(BootstrapError, match="needs the package mpi4py"):
        MPIBackend()
    with pytest.raises(BootstrapError, match=r"0 .not initialised.; MPI needs the package mpi4py"):
        default_comm_backend(2)


def test_import_takes_no_mpi4py():
    code = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "import flashinfer_ar.bootstrap, flashinfer_ar.memory"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_torch_without_a_group_is_named():
    with pytest.raises(BootstrapError, match="init_process_group"):
        TorchDistBackend()


def test_bcast_root_is_of_the_group():
    def wrong_root(comm: CommBackend):
        half = comm.Split(comm.Get_rank() // 2, 0)
        return half.bcast(comm.Get_rank(), 2)

    with pytest.raises(ValueError, match="root=2: allowed is 0 to 1"):
        run_ranks(4, wrong_root)


def test_rounds_do_not_mix():
    rounds = run_ranks(4, lambda comm: [comm.allgather(i) for i in range(200)])
    assert rounds == [[[i] * 4 for i in range(200)]] * 4


def test_barrier_waits_for_the_last():
    arrived = []

    def arrive(comm):
        time.sleep(0.05 * comm.Get_rank())
        arrived.append(comm.Get_rank())
        comm.barrier()
        return len(arrived)

    assert run_ranks(3, arrive) == [3, 3, 3]


def test_in_process_deadline_names_the_missing():
    def one_stays_away(comm):
        if comm.Get_rank() != 1:
            comm.barrier()

    with pytest.raises(BootstrapError, match=r"waited 0.2 s for ranks \[1\]"):
        run_ranks(3, one_stays_away, timeout_s=0.2)


def test_in_process_deadline_is_the_environment_s(monkeypatch):
    monkeypatch.setenv("FLASHINFER_AR_TIMEOUT_S", "0.1")
    with pytest.raises(BootstrapError, match=r"waited 0.1 s"):
        run_ranks(2, lambda comm: comm.barrier() if comm.Get_rank() else None)


@pytest.mark.parametrize("in_split", [False, True])
def test_a_failing_rank_ends_its_peers_waits(in_split):
    seen = {}

    def fail_on_two(comm):
        group = comm.Split(comm.Get_rank() // 2, 0) if in_split else comm
        if comm.Get_rank() == 2:
            raise KeyError("boom")
        if comm.Get_rank() < 2 and in_split:
            return
        try:
            group.barrier()
        except BootstrapError as error:
            seen[comm.Get_rank()] = str(error)
            raise

    started = time.monotonic()
    with pytest.raises(KeyError, match="boom"):
        run_ranks(4, fail_on_two)
    assert time.monotonic() - started < 5
    peers = [3] if in_split else [0, 1, 3]
    assert seen == dict.fromkeys(peers, "rank 2 failed: KeyError: 'boom'")


def test_run_ranks_does_not_wait_for_a_stuck_thread():
    release = threading.Event()

    def stuck(comm):
        if comm.Get_rank() == 0:
            raise KeyError("boom")
        release.wait(30)

    started = time.monotonic()
    with pytest.raises(KeyError):
        run_ranks(2, stuck, timeout_s=0.2)
    release.set()
    assert time.monotonic() - started < 5


def test_groups_outlive_their_run():
    comms = run_ranks(2, lambda comm: comm)
    assert run_ranks(2, lambda comm: comms[comm.Get_rank()].allgather(1)) == [[1, 1]] * 2


def test_a_world_of_none_is_refused():
    with pytest.raises(ValueError, match="world_size=0"):
        run_ranks(0, lambda comm: None)


def outcomes(world_size, fn):
    """What each rank raised."""

    def rank_outcome(comm):
        try:
            fn(comm)
        except Exception as error:
            return error

    return run_ranks(world_size, rank_outcome, timeout_s=0.5)


@pytest.mark.parametrize("failing", [[0], [1], [2], [0, 2], [0, 1, 2]])
def test_a_failed_step_raises_alike_everywhere(failing):
    def step(comm):
        with agreed_step(comm, "open the door"):
            if comm.Get_rank() in failing:
                raise OSError(13, f"locked {comm.Get_rank()}")

    errors = outcomes(3, step)
    assert {type(error) for error in errors} == {SymmetricMemoryError}
    assert len({str(error) for error in errors}) == 1
    host = host_identity().hostname
    assert f"open the door failed on {len(failing)} of 3 ranks: rank" in str(errors[0])
    for rank in failing:
        expected = f"rank {rank} on host {host}: PermissionError: [Errno 13] locked {rank}"
        assert expected in str(errors[0])
        assert isinstance(errors[rank].__cause__, PermissionError)
    assert all(errors[rank].__cause__ is None for rank in {0, 1, 2} - set(failing))


def test_a_step_that_works_raises_nowhere():
    def step(comm):
        with agreed_step(comm, "open the door"):
            value = comm.Get_rank()
        return agree(comm, "go in") or value

    assert run_ranks(3, step) == [0, 1, 2]


def test_only_the_first_failures_are_listed():
    errors = outcomes(7, lambda comm: agree(comm, "jump", ValueError(str(comm.Get_rank()))))
    assert "jump failed on 7 of 7 ranks" in str(errors[6])
    assert "ValueError: 3; and 3 more" in str(errors[6])
    assert "ValueError: 4" not in str(errors[6])


def test_ranks_at_different_steps_are_told():
    errors = outcomes(2, lambda comm: agree(comm, "ab"[comm.Get_rank()]))
    expected = "ranks disagree on the step: 'a' on ranks 0; 'b' on ranks 1"
    assert [str(error) for error in errors] == [expected] * 2


def test_a_vote_that_fails_names_the_step_and_keeps_the_cause():
    def step(comm):
        if comm.Get_rank() == 0:
            agree(comm, "open the door", KeyError("boom"))

    (error, _) = outcomes(2, step)
    assert isinstance(error, BootstrapError)
    assert str(error).startswith("open the door: in-process allgather: rank 0 of 2 waited")
    assert isinstance(error.__cause__, KeyError)


def test_values_must_be_equal():
    errors = outcomes(3, lambda comm: agree_on_value(comm, "size", comm.Get_rank() // 2))
    expected = "ranks disagree on size: 0 on ranks 0; 1; 1 on ranks 2"
    assert [str(error) for error in errors] == [expected] * 3
    assert outcomes(3, lambda comm: agree_on_value(comm, "size", 5)) == [None] * 3
