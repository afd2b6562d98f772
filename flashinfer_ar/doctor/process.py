"""Everything that one process can find out by itself."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from flashinfer_ar.bootstrap import HostIdentity, host_identity
from flashinfer_ar.doctor import builds, gpus, handles, host, launchers, nvml
from flashinfer_ar.doctor.finding import Finding, Status, demoted
from flashinfer_ar.jit.nvrtc import SUPPORTED_TARGETS
from flashinfer_ar.memory.topology import FabricPlace


@dataclass(frozen=True)
class GpuExamination:
    """What was found about driver and GPUs."""

    findings: tuple[Finding, ...]
    has_gpus: bool  # in the machine, visible to CUDA or not
    uuids: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    handle_kinds: str = "none"
    fabrics: frozenset[FabricPlace | None] = frozenset()  # None: one that joins no hosts


@dataclass(frozen=True)
class Examination:
    """One process's findings, and what it tells its peers about itself."""

    findings: tuple[Finding, ...]
    gpus: GpuExamination
    host: HostIdentity | None  # None: it cannot be read
    variables: Mapping[str, str]

    def seen(self, topic: str) -> str:
        """What was seen of one topic."""
        return "; ".join(each.seen for each in self.findings if each.topic == topic)


def examine(launch: launchers.Launch | None) -> Examination:
    """Look at everything; where there is a launcher, try handles on the rank's own GPU alone."""
    with ThreadPoolExecutor() as pool:  # these two wait for processes of their own
        compiler, mpi = pool.submit(builds.host_compiler), pool.submit(launchers.mpi)
        gpu = _examine_gpus(launch)
        cpu = [compiler.result(), host.shared_memory()]
        both = [builds.cache_folder(), host.environment()]
        hints = [host.memlock(), host.ptrace(), *mpi.result(), launchers.torch_distributed()]
    return Examination(
        findings=tuple(_with_verdicts(gpu, cpu, both, hints)),
        gpus=gpu,
        host=_host(),
        variables=host.variables(),
    )


def _with_verdicts(
    gpu: GpuExamination,
    cpu: Sequence[Finding],
    both: Sequence[Finding],
    hints: Sequence[Finding],
) -> list[Finding]:
    """All findings, the verdicts last; failures of what the machine is not for are warnings."""
    cpu_verdict = [_verdict("CPU tensors", [*cpu, *both])]
    cuda, cuda_verdict = gpu.findings, [_verdict("CUDA tensors", [*gpu.findings, *both])]
    if gpu.has_gpus:
        return [*cuda, *demoted(cpu), *both, *hints, *demoted(cpu_verdict), *cuda_verdict]
    return [*demoted(cuda), *cpu, *both, *hints, *cpu_verdict, *demoted(cuda_verdict)]


def _verdict(topic: str, findings: Sequence[Finding]) -> Finding:
    failed = ", ".join(each.topic for each in findings if each.status is Status.FAILURE)
    if not failed:
        return Finding(topic, Status.OK, "nothing is missing", f"allreduce of {topic} can run here")
    meaning = f"allreduce of {topic} cannot run here"
    return Finding(topic, Status.FAILURE, f"not usable: {failed}", meaning, "see there")


def _host() -> HostIdentity | None:
    with contextlib.suppress(OSError):
        return host_identity()
    return None


# ---- GPUs ---------------------------------------------------------------------------------------


def _examine_gpus(launch: launchers.Launch | None) -> GpuExamination:
    driver, findings = gpus.examine_driver()
    visible = () if driver is None else driver.gpus
    has_gpus = bool(visible or nvml.gpus_on_pci())
    targets = gpus.targets(visible)
    cuda_version = None if driver is None else driver.cuda_version
    findings.append(builds.pytorch(has_gpus))
    findings.append(builds.nvrtc_compiler(targets or SUPPORTED_TARGETS, cuda_version))
    if driver is None or not visible:
        if importlib.util.find_spec("pynvml") is None:
            findings.append(handles.no_nvml("the package nvidia-ml-py is missing"))
        return GpuExamination(tuple(findings), has_gpus)
    answers = handles.try_handles(driver, _own(visible, launch))
    about_fabric, fabrics = _fabric(visible)
    findings += [gpus.examine_p2p(driver), handles.posix_fd(answers)]
    findings += [handles.fabric(visible, answers), about_fabric, handles.multicast(visible)]
    return GpuExamination(
        findings=tuple(findings),
        has_gpus=has_gpus,
        uuids=tuple(gpu.uuid for gpu in visible),
        targets=tuple(targets),
        handle_kinds=answers.kinds,
        fabrics=fabrics,
    )


def _own(visible: Sequence[gpus.Gpu], launch: launchers.Launch | None) -> Sequence[gpus.Gpu]:
    """Ranks would else hold contexts on all the GPUs of their peers too."""
    return visible if launch is None else [visible[launch.local_rank % len(visible)]]


def _fabric(visible: Sequence[gpus.Gpu]) -> tuple[Finding, frozenset[FabricPlace | None]]:
    try:
        states = handles.fabric_states(visible)
    except nvml.NvmlMissing as error:
        return handles.no_nvml(str(error)), frozenset([None])
    return handles.nvlink_fabric(states), frozenset(state.place for state in states.values())
