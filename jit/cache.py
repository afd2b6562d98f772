"""Content-addressed cache of compiled kernels, safe among processes and on network file systems.

An entry is a folder ``<name>-<key>`` with the binary, its source, the command, the compiler's log
and ``SHA256SUMS``. It is built in a private folder beside its place and appears by one atomic
rename of that folder, so nobody can see half an entry. Which process wins a race does not matter:
the key covers all that goes into a binary, so every contender's is right; the lock only saves work.
Nothing is synced to the disk, which would take longer than some builds: an entry that a power loss
tore does not match its checksum and is built again.
(Renaming whole folders: after DeepGEMM's ``csrc/jit/compiler.hpp``.)
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import hashlib
import io
import itertools
import os
import re
import shlex
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flashinfer_ar.errors import JitError
from flashinfer_ar.jit.roots import home_root, require_trusted, temporary_root

LOG_NAME = "compile.log"
COMMAND_NAME = "command.txt"
_SUMS_NAME = "SHA256SUMS"
# By machine: no other one may clean up, since the code that it removed could be in use here.
_STAGE_PREFIX = f".build-{os.uname().nodename}-"

_LOCK_WAIT_S = 60.0
_WINNER_WAIT_S = 5.0
_STALE_STAGE_S = 24 * 3600.0
_POLL_S = 0.02
_LOG_LINES_SHOWN = 100

# What a rename answers when another process published first. ESTALE: a network file system lost
# track of the folder; ENOENT: it repeated a rename whose first answer was lost.
_LOST_RACE = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ESTALE, errno.ENOENT})

_fallbacks = itertools.count()  # next() is atomic: one thread of the process gets 0, and warns


@dataclass(frozen=True)
class BuildInput:
    """Everything that decides what a binary is, besides the headers.

    ``name`` is for readers; ``command`` is the compiler and its flags, ``compiler`` its identity,
    version included. Raises ``ValueError`` for a name that is not safe as a part of a file name.
    """

    name: str
    source: str
    file_name: str
    binary_name: str
    command: tuple[str, ...]
    compiler: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]{1,128}", self.name, re.ASCII):
            raise ValueError(f"name={self.name!r}: allowed are 1 to 128 of A-Z a-z 0-9 _ . -")

    def command_line(self) -> tuple[str, ...]:
        """The whole command, for the folder of the source."""
        return (*self.command, f"-I{include_dir()}", self.file_name, "-o", self.binary_name)


_State = enum.Enum("_State", ("ABSENT", "DAMAGED", "WHOLE"))


def include_dir() -> Path:
    """The folder of the device headers, the only include path of a build."""
    return Path(__file__).parent.parent / "include"


def cached_binary(build_input: BuildInput, compile_in: Callable[[Path], None]) -> Path:
    """The path of the binary of ``build_input``, compiled now unless the cache has it.

    ``compile_in(folder)`` finds the source in ``folder``, leaves ``binary_name`` and the log
    (``LOG_NAME``) there and raises :class:`JitError` if the compiler refuses. The caller gets that
    as a ``JitError`` with command, log and the path of the kept source. A cache that cannot be used
    (read-only, full, another user's) costs one warning per process and moves builds to a private
    temporary folder; ``JitError`` if there is none. Load the binary at once: what this process
    could not publish is cleaned up a day later.
    """
    key = _key(build_input)
    try:
        return _find_or_build(home_root(), key, build_input, compile_in)
    except OSError as error:
        if next(_fallbacks) == 0:
            message = f"kernel cache not usable ({error}); kernels go to a temporary folder"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    try:
        return _find_or_build(temporary_root(), key, build_input, compile_in)
    except OSError as error:
        raise JitError(f"no folder to build {build_input.name} in: {error}") from error


def find(build_input: BuildInput) -> Path | None:
    """The path of the binary of ``build_input`` if the user's cache has it, else ``None``.

    Compiles, writes and warns nothing: what is wrong with a cache, :func:`cached_binary` says.
    """
    try:
        binary = _place(home_root(), _key(build_input), build_input)
        return binary if _is_whole(binary) else None
    except OSError:
        return None


def header_digest() -> str:
    """SHA-256 of the names and contents of all headers.

    Read at every call and by content: an installed header may be new and carry an old time.
    """
    root = str(include_dir())
    headers = sorted(_files(root))
    names = (header[len(root) :].encode() for header in headers)
    return _digest(itertools.chain(names, map(_contents, headers)))


# These two are most of what a warm start does, and would take twice as long with pathlib.


def _contents(file: str) -> bytes:
    with io.FileIO(file) as opened:
        return opened.readall()


def _files(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            elif entry.is_file():
                yield entry.path


def _key(build_input: BuildInput) -> str:
    parts = (
        header_digest(),
        build_input.source,
        build_input.file_name,
        build_input.binary_name,
        "\0".join(build_input.command),
        build_input.compiler,
    )
    return _digest(part.encode(errors="surrogateescape") for part in parts)[:32]


def _digest(parts: Iterable[bytes]) -> str:
    """SHA-256 of ``parts`` with their lengths, so that no byte can move from one to the next."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _find_or_build(
    root: Path, key: str, build_input: BuildInput, compile_in: Callable[[Path], None]
) -> Path:
    binary = _place(root, key, build_input)
    if _is_whole(binary):
        return binary
    with _single_flight(root / f".lock-{key[:2]}"):
        if _is_whole(binary):
            return binary
        if _state(binary) is _State.DAMAGED:
            _move_aside(binary.parent)
        stage = _build(binary.parent, build_input, compile_in)
        if _key(build_input) != key:  # a header changed under the compiler: keep it to ourselves
            return stage / binary.name
        return _publish(stage, binary)


def _place(root: Path, key: str, build_input: BuildInput) -> Path:
    return root / f"{build_input.name}-{key}" / build_input.binary_name


def _state(binary: Path) -> _State:
    try:
        require_trusted(binary.parent)
    except NotADirectoryError:
        return _State.DAMAGED
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return _State.ABSENT
        raise
    try:
        whole = binary.with_name(_SUMS_NAME).read_bytes() == _sums(binary)
    except OSError as error:  # a stale handle says nothing about the entry
        return _State.ABSENT if error.errno == errno.ESTALE else _State.DAMAGED
    return _State.WHOLE if whole else _State.DAMAGED


def _is_whole(binary: Path) -> bool:
    return _state(binary) is _State.WHOLE


def _sums(binary: Path) -> bytes:
    """The content of ``SHA256SUMS``, in the format that ``sha256sum --check`` reads."""
    return f"{hashlib.sha256(binary.read_bytes()).hexdigest()}  {binary.name}\n".encode()


@contextlib.contextmanager
def _single_flight(lock_path: Path) -> Iterator[None]:
    """Let one process compile while others wait, as far as the file system can lock.

    All keys share 256 locks, which so need no removal: two keys of one lock only wait.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(lock_path, flags, 0o600)
            stack.callback(os.close, lock)
            _poll(lambda: _try_lock(lock), _LOCK_WAIT_S)
        yield


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _poll(done: Callable[[], bool], wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while not (reached := done()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return reached


def _move_aside(folder: Path) -> None:
    aside = Path(tempfile.mkdtemp(prefix=_STAGE_PREFIX, dir=folder.parent))
    with contextlib.suppress(FileNotFoundError):
        folder.rename(aside / folder.name)
    shutil.rmtree(aside, ignore_errors=True)


def _build(folder: Path, build_input: BuildInput, compile_in: Callable[[Path], None]) -> Path:
    """Build the entry ``folder`` in a private folder beside it, and return that one."""
    _remove_stale_stages(folder.parent)
    stage = Path(tempfile.mkdtemp(prefix=f"{_STAGE_PREFIX}{folder.name}-", dir=folder.parent))
    try:
        (stage / build_input.file_name).write_bytes(build_input.source.encode())
        command = shlex.join(build_input.command_line()) + "\n"
        (stage / COMMAND_NAME).write_bytes(os.fsencode(command))
        compile_in(stage)
        _seal(stage / build_input.binary_name)
    except JitError as error:
        kept = _keep_failed(stage, folder)
        raise JitError(_failure_text(error, kept, build_input)) from error
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    return stage


def _remove_stale_stages(root: Path) -> None:
    """Remove what killed builds left behind."""
    for stage in root.glob(f"{_STAGE_PREFIX}*"):
        with contextlib.suppress(OSError):
            if stage.lstat().st_mtime < time.time() - _STALE_STAGE_S:
                shutil.rmtree(stage)


def _seal(binary: Path) -> None:
    """Write the checksum, and keep the entry from other users whatever the umask."""
    if not binary.is_file():
        raise JitError(f"the compiler left no {binary.name}")
    binary.with_name(_SUMS_NAME).write_bytes(_sums(binary))
    for path in binary.parent.iterdir():
        path.chmod(0o600)


def _publish(stage: Path, binary: Path) -> Path:
    """Give ``stage`` its final name; else use the entry of who was faster, else stay private."""
    try:
        stage.rename(binary.parent)
    except OSError as error:
        if error.errno in _LOST_RACE and _poll(lambda: _is_whole(binary), _WINNER_WAIT_S):
            shutil.rmtree(stage, ignore_errors=True)
            return binary
        if not stage.exists():
            raise
        return stage / binary.name
    return binary


def _keep_failed(stage: Path, folder: Path) -> Path:
    """Keep the newest failure of an entry, and no more than that one."""
    kept = folder.with_name(f"failed-{folder.name}")
    shutil.rmtree(kept, ignore_errors=True)
    try:
        return stage.rename(kept)
    except OSError:  # another process that failed alike was faster
        return stage


def _failure_text(error: JitError, kept: Path, build_input: BuildInput) -> str:
    log = kept / LOG_NAME
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return (
        f"building {build_input.name} failed: {error}\n"
        f"compiler: {build_input.compiler}\n"
        f"command:  {shlex.join(build_input.command_line())}\n"
        f"source:   {kept / build_input.file_name}\n"
        f"log:      {log}, its last {_LOG_LINES_SHOWN} lines at most:\n"
    ) + "\n".join(lines[-_LOG_LINES_SHOWN:])
