"""Compares the ranks of a launch, and makes one report of theirs."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from flashinfer_ar import env
from flashinfer_ar.bootstrap import CommBackend, HostIdentity, MPIBackend, TorchDistBackend
from flashinfer_ar.doctor import host
from flashinfer_ar.doctor.finding import Entry, Finding, Report, Status, by_value, grouped, spans
from flashinfer_ar.doctor.launchers import Launch
from flashinfer_ar.doctor.process import Examination
from flashinfer_ar.errors import BootstrapError

_TIMEOUT = "FLASHINFER_AR_TIMEOUT_S"


@dataclass(frozen=True)
class Comparison:
    """Something that ranks should have alike, and what it means if they do not."""

    name: str
    of: Callable[[Examination], str]
    status: Status
    meaning: str
    remedy: str


def _seen(topic: str) -> Callable[[Examination], str]:
    return lambda examination: examination.seen(topic)


_COMPARED = (
    Comparison(
        "GPU architecture",
        lambda examination: ", ".join(examination.gpus.targets) or "no GPU",
        Status.FAILURE,
        "ranks of one workspace have to have one architecture",
        "start ranks on GPUs of one kind",
    ),
    Comparison(
        "handle kinds",
        lambda examination: examination.gpus.handle_kinds,
        Status.WARNING,
        "ranks take the first kind that works on all of them",
        "see the ranks' handles above",
    ),
    Comparison(
        "NVIDIA driver",
        _seen("NVIDIA driver"),
        Status.WARNING,
        "handles between different drivers may be refused",
        "install one driver on all hosts",
    ),
    Comparison(
        "PyTorch",
        _seen("PyTorch"),
        Status.WARNING,
        "ranks run different environments",
        "start all ranks in one environment",
    ),
    Comparison(
        "NVRTC",
        _seen("NVRTC"),
        Status.WARNING,
        "ranks run kernels of different compilers",
        "start all ranks in one environment",
    ),
    Comparison(
        "kernel cache",
        lambda examination: examination.seen("kernel cache").partition(": ")[0],
        Status.WARNING,
        "each kernel is compiled once a folder",
        "name one folder in FLASHINFER_AR_CACHE_DIR",
    ),
)


# ---- Meeting ------------------------------------------------------------------------------------


def gather(launch: Launch, own: Examination) -> list[Examination]:
    """All ranks' examinations, in rank order; collective.

    Raises ``BootstrapError`` if the ranks do not meet within ``FLASHINFER_AR_TIMEOUT_S``.
    """
    with _usable_timeout(), _group(launch) as comm:
        if comm.Get_size() != launch.num_ranks:
            raise BootstrapError(
                f"{launch.launcher} started {launch.num_ranks} ranks and MPI sees "
                f"{comm.Get_size()}: mpi4py loaded the MPI library of another launcher"
            )
        return comm.allgather(own)


@contextlib.contextmanager
def _usable_timeout() -> Iterator[None]:
    """A wrong value is a finding already: wait for the default time then."""
    saved = os.environ.get(_TIMEOUT)
    try:
        env.timeout_s()
    except ValueError:
        del os.environ[_TIMEOUT]
    try:
        yield
    finally:
        if saved is not None:
            os.environ[_TIMEOUT] = saved


@contextlib.contextmanager
def _group(launch: Launch) -> Iterator[CommBackend]:
    if launch.launcher != "torchrun":
        yield MPIBackend()
        return
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=env.timeout_s())
    try:
        dist.init_process_group("gloo", timeout=timeout)
    except (AttributeError, RuntimeError, ValueError) as error:  # no gloo; a lost peer; variables
        raise BootstrapError(f"torch.distributed: {error}") from error
    try:
        yield TorchDistBackend()
    finally:
        dist.destroy_process_group()


# ---- Comparing ----------------------------------------------------------------------------------


def report(examinations: Sequence[Examination]) -> Report:
    """The findings of all ranks, equal ones once, and the differences between the ranks."""
    entries = _merged(examinations)
    if len(examinations) > 1:
        everybody = tuple(range(len(examinations)))
        entries += [Entry(finding, everybody) for finding in _differences(examinations)]
    return Report(len(examinations), tuple(entries))


def alone(own: Examination, launch: Launch, error: BootstrapError) -> Report:
    """The report of a rank that did not meet its peers."""
    meaning = "a workspace of these ranks cannot be made"
    remedy = "look at the other ranks' output, at mpi4py and at the network between the hosts"
    finding = Finding("ranks", Status.FAILURE, str(error), meaning, remedy)
    entries = [Entry(each, (launch.rank,)) for each in (*own.findings, finding)]
    return Report(launch.num_ranks, tuple(entries))


def _merged(examinations: Sequence[Examination]) -> list[Entry]:
    """In the order of the topics. What differs in ``seen`` alone is shown as its first rank has it.

    Free memory and the like differ between any two machines; what matters is compared by name.
    """
    first: dict[Finding, Finding] = {}
    ranks: dict[Finding, list[int]] = {}
    topics: dict[str, None] = {}
    for rank, examination in enumerate(examinations):
        for finding in examination.findings:
            alike = replace(finding, seen="") if finding.status is Status.OK else finding
            first.setdefault(alike, finding)
            ranks.setdefault(alike, []).append(rank)
            topics.setdefault(finding.topic)
    order = list(topics)
    merged = [Entry(finding, tuple(ranks[alike])) for alike, finding in first.items()]
    return sorted(merged, key=lambda entry: (order.index(entry.finding.topic), entry.ranks))


def _differences(examinations: Sequence[Examination]) -> list[Finding]:
    findings = [_hosts(examinations), *_devices(examinations)]
    differing = [
        finding
        for comparison in (*_COMPARED, *_variables(examinations))
        if (finding := _difference(comparison, examinations)) is not None
    ]
    if not differing:
        alike = ", ".join(each.name for each in _COMPARED)
        seen, meaning = f"alike in {alike} and environment", "they fit into one workspace"
        differing = [Finding("ranks", Status.OK, seen, meaning)]
    return findings + differing


def _difference(comparison: Comparison, examinations: Sequence[Examination]) -> Finding | None:
    values = {rank: comparison.of(own) for rank, own in enumerate(examinations)}
    if len(set(values.values())) == 1:
        return None
    seen = f"{comparison.name}: {grouped('rank', values)}"
    return Finding("ranks differ", comparison.status, seen, comparison.meaning, comparison.remedy)


def _variables(examinations: Sequence[Examination]) -> list[Comparison]:
    names = sorted({name for each in examinations for name in each.variables})
    return [_variable(name) for name in names]


def _variable(name: str) -> Comparison:
    def value(examination: Examination) -> str:
        return examination.variables.get(name, "unset")

    status, meaning = Status.WARNING, "the ranks are not set up alike"
    if name in (_TIMEOUT, "FLASHINFER_AR_MAX_CTAS"):
        status, meaning = Status.FAILURE, "a workspace refuses ranks that disagree on it"
    elif name in host.MULTICAST_SWITCHES:
        meaning = "no rank uses multicast where one of them turns it off"
    remedy = f"give it one value on all ranks (mpirun -x {name})"
    return Comparison(name, value, status, meaning, remedy)


def _hosts(examinations: Sequence[Examination]) -> Finding:
    hosts = {rank: own.host for rank, own in enumerate(examinations)}
    groups = by_value(hosts)
    seen = "; ".join(
        f"host {_hostname(identity)}: rank {spans(ranks)}" for identity, ranks in groups.items()
    )
    if len(groups) == 1:
        return Finding("hosts", Status.OK, seen, "all ranks share one machine and its /dev/shm")
    fabrics = frozenset().union(*(own.gpus.fabrics or {None} for own in examinations))
    if len(fabrics) == 1 and None not in fabrics:
        return Finding("hosts", Status.OK, seen, "one NVLink domain joins them")
    meaning = "no NVLink domain joins them (or they do not share /dev/shm): workspaces are refused"
    remedy = "use one host, or hosts whose GPUs have one fabric cluster and clique"
    return Finding("hosts", Status.FAILURE, seen, meaning, remedy)


def _devices(examinations: Sequence[Examination]) -> list[Finding]:
    """Hosts with fewer GPUs than ranks."""
    findings, hosts = [], {rank: own.host for rank, own in enumerate(examinations)}
    for identity, ranks in by_value(hosts).items():
        gpus = {uuid for rank in ranks for uuid in examinations[rank].gpus.uuids}
        if not 0 < len(gpus) < len(ranks):
            continue
        seen = f"host {_hostname(identity)}: {len(ranks)} ranks, {len(gpus)} GPUs"
        meaning = "ranks without a GPU of their own are refused, or take turns if that is allowed"
        remedy = "start one rank a GPU, or for tests set FLASHINFER_AR_ALLOW_SHARED_DEVICE=1"
        status = Status.WARNING if env.allow_shared_device() else Status.FAILURE
        findings.append(Finding("GPU for each rank", status, seen, meaning, remedy))
    return findings


def _hostname(identity: HostIdentity | None) -> str:
    return "unknown" if identity is None else identity.hostname
