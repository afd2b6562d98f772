"""What the calls of the fake driver stand on: objects, injected failures, the log, the balance."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cuda.bindings import driver

GRANULARITY = 1 << 21
MULTICAST_GRANULARITY = {0: 1 << 21, 1: 1 << 23}  # minimum, recommended
_MAP_FIXED, _MAP_ANONYMOUS = 0x10, 0x20

Code = driver.CUresult
Attribute = driver.CUdevice_attribute
_Types = driver.CUmemAllocationHandleType
FD = _Types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
FABRIC = _Types.CU_MEM_HANDLE_TYPE_FABRIC

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Refused(Exception):
    def __init__(self, code: Code) -> None:
        self.code = code


@dataclass
class Failure:
    """``code`` for the ``nth`` and the next calls that ``when`` picks; ``times=None``: for ever."""

    code: Code
    nth: int
    times: int | None
    when: Callable[..., bool]
    seen: int = 0

    def hits(self, arguments: tuple) -> bool:
        if not self.when(*arguments):
            return False
        self.seen += 1
        past = self.seen - self.nth
        return past >= 0 and (self.times is None or past < self.times)


@dataclass
class Held:
    """What a generic handle stands for: memory, or a multicast object."""

    path: Path  # its name says host and kind; an imported object has it too
    fd: int
    size: int
    handle_type: int
    owned: bool
    num_devices: int = 0  # of a multicast object
    bound: set[int] = field(default_factory=set)  # its offsets that this rank's memory is bound to


def driver_call(even_if_it_fails: bool = False) -> Callable:
    """Log the call and answer as the driver does. A release is done also if it answers an error."""

    def decorate(body: Callable) -> Callable:
        @functools.wraps(body)
        def answer(self: FakeMachine, *arguments: object) -> tuple:
            code = self._injected(body.__name__, arguments)
            if code != Code.CUDA_SUCCESS and not even_if_it_fails:
                return code, None
            try:
                result = body(self, *arguments)
            except Refused as refused:
                return refused.code, None
            return (code, result) if result is not None else (code,)

        return answer

    return decorate


class FakeMachine:
    """The state of the rank on ``device`` of ``host``; its calls are ``FakeDriver``'s.

    ``cluster`` names its NVLink fabric; ``None``: it has none, and answers NOT_PERMITTED to a
    fabric allocation while its attribute promises support, as an H200 in a container does.
    """

    def __init__(
        self, world: Path, host: str = "a", device: int = 0, cluster: str | None = "rack"
    ) -> None:
        self.world = world
        self.host = host
        self.device = device
        self.cluster = cluster
        self.context = f"context of device {device}"
        self.attributes = {
            Attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: 1,
            Attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: 1,
            Attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: 0,
        }
        self.log: list[tuple] = []
        self.misuses: list[str] = []
        self._failures: dict[str, list[Failure]] = {}
        self._contexts: list[object] = []
        # Handles of two ranks never look alike, so a mixed-up one is found.
        self._numbers = itertools.count(secrets.randbits(32) << 16)
        self._objects: dict[int, Held] = {}
        self._reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}  # bytes at an address
        self.is_own: dict[int, bool] = {}  # whether that is memory of this rank's device

    def __getattr__(self, name: str) -> object:
        """Structs and enums; a call that nobody faked must not reach a real GPU."""
        if not name.startswith("CU"):
            raise AttributeError(f"the fake driver has no {name}")
        return getattr(driver, name)

    # ---- For tests --------------------------------------------------------------------------

    def fail(
        self,
        call: str,
        code: Code,
        *,
        nth: int = 1,
        times: int | None = 1,
        when: Callable[..., bool] = lambda *arguments: True,
    ) -> None:
        """Answer ``code`` to the ``nth`` such call (from 1) and ``times - 1`` more of them."""
        self._failures.setdefault(call, []).append(Failure(code, nth, times, when))

    def refuse(self, handle_type: int, code: Code) -> None:
        """Answer ``code`` to every allocation of one handle type."""
        self.fail(
            "cuMemCreate",
            code,
            times=None,
            when=lambda size, properties, flags: properties.requestedHandleTypes == handle_type,
        )

    def heal(self) -> None:
        """Forget all the failures."""
        self._failures.clear()

    def calls(self, name: str) -> list[tuple]:
        """The arguments of all calls of that name."""
        return [arguments for call, *arguments in self.log if call == name]

    def open_fds(self) -> list[str]:
        """What of the machine room this process has open, through whichever rank."""
        folder, targets = Path("/proc/self/fd"), []
        for name in os.listdir(folder):
            try:
                targets.append(str((folder / name).readlink()))
            except OSError:  # the descriptor of this very listing, or another thread's
                continue
        return [target for target in targets if target.startswith(str(self.world))]

    def check_balanced(self) -> None:
        """Assert that nothing was misused and that all was given back."""
        assert self.misuses == []
        left = {
            "contexts": self._contexts,
            "handles": self._objects,
            "addresses": self._reserved,
            "mappings": self.mapped,
        }
        assert not any(left.values()), {name: held for name, held in left.items() if held}

    # ---- Inside -----------------------------------------------------------------------------

    def _injected(self, call: str, arguments: tuple) -> Code:
        self.log.append((call, *arguments))
        hits = [each.code for each in self._failures.get(call, ()) if each.hits(arguments)]
        return hits[0] if hits else Code.CUDA_SUCCESS

    def _require(self, condition: bool, misuse: str) -> None:
        if not condition:
            self.misuses.append(f"{self.log[-1][0]}: {misuse}")
            raise Refused(Code.CUDA_ERROR_INVALID_VALUE)

    def _require_context(self) -> None:
        current = any(thread == threading.get_ident() for thread, _ in self._contexts)
        self._require(current, "no context is current")

    def _require_device(self, device: int) -> None:
        self._require(int(device) == self.device, f"device {device} of another rank")

    def _require_multicast(self) -> None:
        if not self.attributes[Attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED]:
            raise Refused(Code.CUDA_ERROR_NOT_SUPPORTED)

    def _object(self, handle: object) -> Held:
        self._require(int(handle) in self._objects, "a handle that is not this rank's to use")
        return self._objects[int(handle)]

    def _multicast(self, handle: object) -> Held:
        held = self._object(handle)
        self._require(held.num_devices > 0, "a handle of memory, not of a multicast object")
        return held

    def _create(self, kind: str, size: int, handle_type: int, suffix: str = "") -> object:
        name = f"{kind}-{self.host}-{handle_type}-{secrets.token_hex(8)}{suffix}"
        path = self.world / name
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        os.truncate(path, size)
        return self._open(path, owned=True)

    def _open(self, path: Path, owned: bool = False) -> object:
        try:
            fd = os.open(path, os.O_RDWR)
        except FileNotFoundError:  # its owner has released it
            raise Refused(Code.CUDA_ERROR_INVALID_HANDLE) from None
        return self._hold(path, fd, owned)

    def _hold(self, path: Path, fd: int, owned: bool) -> object:
        kind, _, handle_type, _, *devices = path.name.split("-")
        size = os.fstat(fd).st_size
        number = next(self._numbers)
        num_devices = int(devices[0]) if kind == "multicast" else 0
        self._objects[number] = Held(path, fd, size, int(handle_type), owned, num_devices)
        return driver.CUmemGenericAllocationHandle(number)

    def _import_fd(self, shared: int) -> object:
        path = Path(f"/proc/self/fd/{shared}").readlink()
        path = path.with_name(path.name.removesuffix(" (deleted)"))
        self._require(path.parent == self.world, f"descriptor of {path}")
        _, host, handle_type, *_ = path.name.split("-")
        self._require(host == self.host, f"descriptor of host {host} on host {self.host}")
        self._require(bool(int(handle_type) & FD), "descriptor of a fabric allocation")
        return self._hold(path, os.dup(shared), owned=False)

    def _added(self, held: Held) -> list[str]:
        prefix = self._place_file(held, "").name
        return [each.name.removeprefix(prefix) for each in self.world.glob(f"{prefix}*")]

    def _place_file(self, held: Held, place: str) -> Path:
        """A file a device that was added, for ranks in any thread and process to see."""
        return self.world / f"added-to-{held.path.name}-{place}"


def reserve(size: int, alignment: int) -> int:
    """New addresses that nobody may touch."""
    base = _mmap(None, size + alignment, mmap.MAP_PRIVATE | _MAP_ANONYMOUS, -1, 0)
    aligned = -(-base // alignment) * alignment
    for start, length in ((base, aligned - base), (aligned + size, base + alignment - aligned)):
        if length:
            forget(start, length)
    return aligned


def map_nothing(base: int, size: int) -> None:
    """Keep the addresses, so that nobody else gets them, with nothing behind."""
    _mmap(base, size, mmap.MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_FIXED, -1, 0)


def map_file(base: int, size: int, fd: int, offset: int) -> None:
    """Nobody may touch it before :func:`allow`."""
    _mmap(base, size, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)


def allow(base: int, size: int) -> None:
    _libc.mprotect(base, size, mmap.PROT_READ | mmap.PROT_WRITE)


def forget(base: int, size: int) -> None:
    _libc.munmap(base, size)


def _mmap(base: int | None, size: int, flags: int, fd: int, offset: int) -> int:
    mapped = _libc.mmap(base, size, 0, flags, fd, offset)
    if mapped == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return int(mapped)
