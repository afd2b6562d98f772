"""Serve SmolLM2-135M-Instruct tensor-parallel; README.md beside this file says more.

    mpirun -np 3 python examples/serve_smollm2.py --prompt "Why is the sky blue?"
    torchrun --nproc-per-node 3 examples/serve_smollm2.py
    python examples/serve_smollm2.py --virtual-ranks 3

Prints the answer as it comes and then one line of facts. Exit status: 0; 1 when the ranks did
not produce the tokens that one rank alone produces; 2 for a request that cannot be served.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from smollm2.engine import Engine, Request
from smollm2.launch import launched_group, pick_device, run_virtual_ranks
from smollm2.model import Model, load_weights
from smollm2.parallel import FusedAllReduce
from smollm2.tokenizer import ChatTokenizer
from smollm2.weights import Checkpoint, find_model_file

import flashinfer_ar as far

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# The largest step: a longer prompt is prefilled in chunks of this many tokens.
MAX_STEP_TOKENS = 64


@dataclass(frozen=True)
class Served:
    """One finished request, as seen by one rank."""

    request: Request
    tokens_by_rank: list[list[int]]
    num_allreduces: int
    us_per_allreduce: float


def main(arguments: list[str] | None = None) -> int:
    """Run this process's rank, or all virtual ranks; return the exit status."""
    options = parse(arguments)
    try:
        return run(options, Checkpoint(find_model_file()), pick_device(options.device))
    except (ValueError, FileNotFoundError) as error:
        print(f"serve_smollm2: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace, checkpoint: Checkpoint, device: torch.device) -> int:
    """Answer on all ranks together; on rank 0, repeat it alone, compare and report."""
    dtype = DTYPES[options.dtype]

    def answer(comm: far.CommBackend) -> Served:
        checkpoint.config().check_world_size(comm.Get_size())
        request, show = None, ignore
        if comm.Get_rank() == 0:
            tokenizer = ChatTokenizer(checkpoint)
            request = chat_request(tokenizer, checkpoint, options)
            show = printer(tokenizer)
        # Only rank 0 deals with text. The other ranks need the prompt's tokens, nothing else.
        return serve(comm, checkpoint, dtype, device, comm.bcast(request, 0), show)

    if options.virtual_ranks:
        served = run_virtual_ranks(options.virtual_ranks, device, answer)[0]
    else:
        with launched_group(options.backend) as comm:
            served = answer(comm)
            if comm.Get_rank() != 0:
                return 0

    def answer_alone(comm: far.CommBackend) -> list[int]:
        alone = serve(comm, checkpoint, dtype, device, served.request, ignore)
        return alone.tokens_by_rank[0]

    return report(served, run_virtual_ranks(1, device, answer_alone)[0])


def serve(
    comm: far.CommBackend,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    request: Request,
    show: Callable[[int], None],
) -> Served:
    """Load this rank's model, run one request through it, release everything (collective)."""
    if device.type == "cpu":
        torch.set_num_threads(1)  # ranks share this machine's cores: see README.md
    config = checkpoint.config()
    weights = load_weights(checkpoint, comm.Get_rank(), comm.Get_size(), dtype, device)
    fused = FusedAllReduce(
        comm,
        max_num_tokens=MAX_STEP_TOKENS,
        hidden_dim=config.hidden_dim,
        dtype=dtype,
        device=device,
        epsilon=config.norm_eps,
    )
    tokens = []
    for token in Engine(Model(config, weights, fused)).generate(request):
        tokens.append(token)
        show(token)
    served = Served(request, comm.allgather(tokens), fused.num_calls, fused.median_us())
    fused.close()
    return served


def chat_request(
    tokenizer: ChatTokenizer, checkpoint: Checkpoint, options: argparse.Namespace
) -> Request:
    """The request that asks the assistant to answer ``--prompt``."""
    return Request(
        prompt=tokenizer.encode_chat(options.prompt),
        max_new_tokens=options.max_new_tokens,
        stop_token=checkpoint.metadata("tokenizer.ggml.eos_token_id"),
    )


def printer(tokenizer: ChatTokenizer) -> Callable[[int], None]:
    """Print the text of each token as soon as it is known."""
    text_of = tokenizer.text_stream()
    return lambda token: print(text_of(token), end="", flush=True)


def ignore(token: int) -> None:
    """Show nothing."""


def report(served: Served, alone: list[int]) -> int:
    """Print the line of facts; return the exit status, 1 if any rank differs from one rank alone.

    Equality is not built in: three partial sums round otherwise than one long sum, and a wrong
    shard or a torn exchange changes tokens at once.
    """
    ranks = served.tokens_by_rank
    identical = all(tokens == alone for tokens in ranks)
    print(
        f"\nranks: {len(ranks)}  tokens: {len(ranks[0])}  allreduces: {served.num_allreduces}  "
        f"us/allreduce: {served.us_per_allreduce:.1f}  "
        f"identical to one rank: {'yes' if identical else 'no'}",
        flush=True,
    )
    return 0 if identical else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; exits with status 2 and a usage message when it is wrong."""
    parser = argparse.ArgumentParser(
        description="Serve SmolLM2-135M-Instruct tensor-parallel over 1 or 3 ranks."
    )
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--backend",
        choices=("auto", "mpi", "torch"),
        default="auto",
        help="how this process was launched (default: torch under torchrun, else mpi)",
    )
    parser.add_argument(
        "--virtual-ranks",
        type=positive,
        metavar="W",
        help="run W ranks as threads of this process instead",
    )
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A whole number from 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is a whole number from 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
