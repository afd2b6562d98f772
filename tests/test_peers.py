"""The peers of the side-by-side benchmark: found, built, fed and (on a GPU) run."""

import contextlib
import importlib.metadata
import shutil
import stat

import pytest
import torch
from cuda_tools import needs_cuda

from benchmarks.contender import Shape, Tensors
from benchmarks.peers import (
    EPSILON,
    FlashInferMnnvl,
    PeerError,
    TensorRtLlm,
    VllmCustom,
    build,
    trtllm,
    wheel,
)
from benchmarks.peers import flashinfer_mnnvl as mnnvl

HEADER = "flashinfer/comm/trtllm_mnnvl_allreduce.cuh"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def headers(tmp_path, monkeypatch):
    """An unpacked wheel whose headers say nothing, named by the environment variable."""
    include = tmp_path / "unpacked" / "flashinfer" / "data" / "include"
    for name in (HEADER, "flashinfer/comm/trtllm_allreduce_fusion.cuh"):
        write(include / name, "")
    write(include / "flashinfer/comm/vllm_custom_all_reduce.cuh", '#include "../utils.cuh"\n')
    write(include / "flashinfer/utils.cuh", "")
    monkeypatch.setenv(wheel.ENVIRONMENT_VARIABLE, str(tmp_path / "unpacked"))
    return include


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """An nvcc that PATH holds alone; returns how often it ran."""
    folder = tmp_path / "bin"
    script = write(
        folder / "nvcc",
        f"#!/bin/sh\necho run >> {tmp_path}/runs\n"
        'case "$*" in *compute_bad*) echo no such arch; exit 1;; esac\n'
        'for last; do :; done\necho library > "$last"\n',
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder))
    runs = tmp_path / "runs"
    return lambda: len(runs.read_text().splitlines()) if runs.exists() else 0


def test_a_missing_wheel_is_told_with_its_remedy(monkeypatch):
    monkeypatch.delenv(wheel.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PeerError, match=r"pip install flashinfer-python==0\.7\.4"):
        wheel.include_folder()


def test_a_folder_without_the_headers_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(wheel.ENVIRONMENT_VARIABLE, str(tmp_path))
    with pytest.raises(PeerError, match=str(tmp_path)):
        wheel.include_folder()


@pytest.mark.parametrize("version", ["0.7.3", None])
def test_an_installed_package_must_have_the_known_version(tmp_path, monkeypatch, version):
    def found(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    write(tmp_path / "flashinfer" / "__init__.py", "raise RuntimeError('imported')")
    write(tmp_path / "flashinfer" / "data" / "include" / HEADER, "")
    monkeypatch.delenv(wheel.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("importlib.metadata.version", found)
    with pytest.raises(PeerError, match=version or "unknown"):
        wheel.include_folder()
    monkeypatch.setattr("importlib.metadata.version", lambda name: wheel.VERSION)
    assert (wheel.include_folder() / HEADER).is_file()


def test_each_peer_is_built_once(headers, nvcc, tmp_path):
    first = build.libraries(cache=tmp_path / "cache")
    assert sorted(first) == sorted(build.PEERS)
    assert nvcc() == len(build.PEERS)
    assert build.libraries(cache=tmp_path / "cache") == first
    assert nvcc() == len(build.PEERS)
    assert {path.read_text() for path in first.values()} == {"library\n"}
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(
        path.name for path in first.values()
    )


def test_a_failed_build_shows_command_and_log_and_leaves_nothing(headers, nvcc, tmp_path):
    with pytest.raises(PeerError, match=r"(?s)nvcc .*-gencode=arch=compute_bad.*no such arch"):
        build.libraries(["vllm"], arch="bad", cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_without_nvcc_a_build_says_so(headers, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PeerError, match="nvcc"):
        build.libraries(["vllm"], cache=tmp_path / "cache")


def test_cache_key_follows_what_is_included_and_no_path(headers, tmp_path):
    source = write(tmp_path / "shim" / "a.cu", f'#include "a.cuh"\n#  include <{HEADER}>\n')
    write(source.with_name("a.cuh"), "")
    write(headers / HEADER, '#include "../utils.cuh"\n#include "../absent.cuh"\n')
    key = build.cache_key(source, ["-O3"], headers)

    write(headers / "flashinfer" / "other.cuh", "not included")
    assert build.cache_key(source, ["-O3"], headers) == key
    moved = shutil.copytree(tmp_path / "shim", tmp_path / "elsewhere")
    include = shutil.copytree(headers, tmp_path / "moved")
    assert build.cache_key(moved / "a.cu", ["-O3"], include) == key

    assert build.cache_key(source, ["-O2"], headers) != key
    for changed in (source.with_name("a.cuh"), headers / "flashinfer" / "utils.cuh", source):
        before = build.cache_key(source, ["-O3"], headers)
        changed.write_text(changed.read_text() + "// changed\n")
        assert build.cache_key(source, ["-O3"], headers) != before


class Generation:
    """A generation of rank 0's memory as the feeder leaves it; addresses are offsets of values."""

    def __init__(self, shape, num_bytes):
        self.shape = shape
        tokens, hidden = shape.num_tokens, shape.hidden
        # Every value says which rank's, token's and column's it is; the sums belong to rank W.
        count = (shape.world_size + 1) * tokens * hidden
        self.values = torch.arange(1, count + 1).reshape(-1, tokens, hidden)
        self.words = torch.zeros(num_bytes // 2, dtype=torch.int64)
        self.stored = 0

    @property
    def inputs(self):
        return [rank * self.shape.message_bytes for rank in range(self.shape.world_size)]

    @property
    def total(self):
        return self.shape.world_size * self.shape.message_bytes

    def apply(self, copies):
        source = self.values.reshape(-1)
        for copy in copies:
            for part in (copy.source, copy.source_pitch, copy.offset, copy.pitch, copy.row_bytes):
                assert part % 16 == 0
            for row in range(copy.rows):
                start = (copy.source + row * copy.source_pitch) // 2
                place = (copy.offset + row * copy.pitch) // 2
                width = copy.row_bytes // 2
                assert place + width <= len(self.words)
                assert start + width <= len(source)
                assert not self.words[place : place + width].any(), "stored twice"
                self.words[place : place + width] = source[start : start + width]
                self.stored += width


SIZES = [(w, t) for w in (2, 4, 8) for t in (1, 3, 8, 13)]


def shape_of(world_size, num_tokens, two_shot=False):
    return Shape(world_size, 16, num_tokens, fused=False, two_shot=two_shot)


@pytest.mark.parametrize(("world_size", "num_tokens"), SIZES)
def test_mnnvl_one_shot_feed_is_every_peers_input(world_size, num_tokens):
    shape = shape_of(world_size, num_tokens)
    num_bytes = mnnvl.generation_bytes_used(shape)
    generation = Generation(shape, num_bytes)
    generation.apply(mnnvl.feed_copies(shape, generation.inputs, generation.total, num_bytes))
    slots = generation.words.reshape(num_tokens, world_size, shape.hidden)
    assert not slots[:, 0].any()  # rank 0 stores its own
    for rank in range(1, world_size):
        assert torch.equal(slots[:, rank], generation.values[rank])


@pytest.mark.parametrize("spare_bytes", [0, 64])
@pytest.mark.parametrize(("world_size", "num_tokens"), SIZES)
def test_mnnvl_two_shot_feed_is_rank_0s_shares_and_the_others_sums(
    world_size, num_tokens, spare_bytes
):
    shape = shape_of(world_size, num_tokens, two_shot=True)
    num_bytes = mnnvl.generation_bytes_used(shape) + spare_bytes
    generation = Generation(shape, num_bytes)
    generation.apply(mnnvl.feed_copies(shape, generation.inputs, generation.total, num_bytes))
    half = num_bytes // 4  # values
    expected = 0
    for token in range(num_tokens):
        owner, turn = token % world_size, token // world_size
        if owner == 0:
            start = turn * world_size * shape.hidden
            slots = generation.words[start : start + world_size * shape.hidden]
            slots = slots.reshape(world_size, shape.hidden)
            assert not slots[0].any()
            assert torch.equal(slots[1:], generation.values[1:world_size, token])
            expected += (world_size - 1) * shape.hidden
        else:
            start = half + token * shape.hidden
            row = generation.words[start : start + shape.hidden]
            assert torch.equal(row, generation.values[world_size, token])
            expected += shape.hidden
    assert generation.stored == expected


@pytest.mark.parametrize(("world_size", "num_tokens"), SIZES)
def test_trtllm_one_shot_feed_is_every_peers_input(world_size, num_tokens):
    shape = shape_of(world_size, num_tokens)
    generation = Generation(shape, world_size * shape.message_bytes)
    generation.apply(trtllm.feed_copies(shape, generation.inputs))
    slots = generation.words.reshape(world_size, num_tokens, shape.hidden)
    assert not slots[0].any()
    assert torch.equal(slots[1:], generation.values[1:world_size])


@pytest.fixture(scope="module")
def libraries():
    """The real ones; built in half a minute where the cache lacks them."""
    try:
        return build.libraries()
    except PeerError as error:
        pytest.skip(str(error).splitlines()[0])


def call_of(world_size, num_tokens, hidden, fused):
    """Every rank's tensors, and what output must be (float64)."""
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*sizes):
        values = torch.randn(*sizes, generator=generator).bfloat16()
        return torch.where(values == 0, 0.0, values)  # no -0.0

    inputs = random(world_size, num_tokens, hidden)
    residual, gamma = random(num_tokens, hidden), random(hidden)
    expected = inputs.double().sum(0)
    if fused:
        expected += residual
        mean = expected.square().mean(-1, keepdim=True)
        expected = expected * (mean + EPSILON).rsqrt() * gamma.double()
    tensors = []
    for rank in range(world_size):
        own = [inputs[rank].cuda(), torch.empty(num_tokens, hidden).bfloat16().cuda()]
        if fused:
            own += [residual.cuda(), torch.empty_like(own[1]), gamma.cuda()]
        tensors.append(Tensors(*own))
    return tensors, expected


def error_of(output, expected):
    return float((output.double().cpu() - expected).norm() / expected.norm())


@needs_cuda
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("two_shot", [False, True], ids=["one-shot", "two-shot"])
@pytest.mark.parametrize("peer", [TensorRtLlm, VllmCustom])
def test_a_peer_sums_over_virtual_ranks(libraries, peer, two_shot, fused):
    library = libraries["trtllm" if peer is TensorRtLlm else "vllm"]
    shape = Shape(2, 2048, 8, fused=fused, two_shot=two_shot)
    with contextlib.closing(peer(library, 2, max_tokens=16, hidden=2048)) as contender:
        if fused and peer is VllmCustom:
            assert contender.refusal(shape)
            return
        assert contender.refusal(shape) is None
        assert contender.room(shape).holds(2)
        tensors, expected = call_of(2, 8, 2048, fused)
        if peer is VllmCustom:
            contender.register([own.input.data_ptr() for own in tensors])
        streams = [torch.cuda.Stream() for _ in tensors]
        torch.cuda.synchronize()
        for _ in range(4):  # more than there are generations
            for rank, (own, stream) in enumerate(zip(tensors, streams, strict=True)):
                contender.launch(shape, rank, own, stream.cuda_stream)
        torch.cuda.synchronize()
        for own in tensors:
            assert error_of(own.output, expected) < contender.tolerance


def store(feed):
    """Does on the host what the feeder does on the device."""
    from cuda.bindings import runtime

    word = torch.empty(1, dtype=torch.int32)
    kind = runtime.cudaMemcpyKind
    runtime.cudaMemcpy(word.data_ptr(), feed.generation_word, 4, kind.cudaMemcpyDeviceToHost)
    generation = (int(word) >> feed.shift) % feed.num_generations
    start = feed.base + generation * feed.generation_bytes
    for copy in feed.copies:
        (error,) = runtime.cudaMemcpy2D(
            start + copy.offset,
            copy.pitch,
            copy.source,
            copy.source_pitch,
            copy.row_bytes,
            copy.rows,
            kind.cudaMemcpyDeviceToDevice,
        )
        assert error == runtime.cudaError_t.cudaSuccess
    torch.cuda.synchronize()


@needs_cuda
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize(
    ("peer", "two_shots"),
    [(FlashInferMnnvl, [False, True, True, False]), (TensorRtLlm, [False] * 4)],
)
def test_a_peer_sums_what_it_is_fed(libraries, peer, two_shots, fused):
    library = libraries["trtllm" if peer is TensorRtLlm else "flashinfer_mnnvl"]
    contender = peer(library, 4, max_tokens=16, hidden=2048, harness="feeder")
    with contextlib.closing(contender):
        for num_tokens in (13, 5):
            tensors, expected = call_of(4, num_tokens, 2048, fused)
            inputs = [own.input for own in tensors]
            total = torch.stack(inputs).float().sum(0).bfloat16()
            for two_shot in two_shots:
                shape = Shape(4, 2048, num_tokens, fused=fused, two_shot=two_shot)
                assert contender.refusal(shape) is None
                tensors[0].output.zero_()
                addresses = [tensor.data_ptr() for tensor in inputs]
                store(contender.feed(shape, addresses, total.data_ptr()))
                contender.launch(shape, 0, tensors[0], torch.cuda.current_stream().cuda_stream)
                torch.cuda.synchronize()
                assert error_of(tensors[0].output, expected) < contender.tolerance
