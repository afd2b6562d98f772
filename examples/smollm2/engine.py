"""A request through the model: chunked prefill, then greedy decode, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from smollm2.model import Model


@dataclass(frozen=True)
class Request:
    """What to generate; the same on every rank."""

    prompt: list[int]
    max_new_tokens: int
    stop_token: int


class Engine:
    """Runs requests on one rank's model, in step with the engines of all other ranks."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def generate(self, request: Request) -> Iterator[int]:
        """Yield the new tokens as they come, without the stop token.

        Collective: each rank must consume it to the end. Raises ValueError, before any step, when
        the prompt is empty or prompt and answer do not fit the model's context.
        """
        max_tokens = self._check(request)
        cache = self._model.new_cache(max_tokens)
        size = self._model.max_step_tokens
        for start in range(0, len(request.prompt), size):
            logits = self._model.step(request.prompt[start : start + size], cache)
        for remaining in reversed(range(request.max_new_tokens)):
            token = int(torch.argmax(logits))
            if token == request.stop_token:
                return
            yield token
            if remaining:  # nothing would read the logits behind the last token
                logits = self._model.step([token], cache)

    def _check(self, request: Request) -> int:
        if not request.prompt:
            raise ValueError("request.prompt: no tokens; allowed is one or more")
        max_tokens = len(request.prompt) + request.max_new_tokens
        context_length = self._model.config.context_length
        if max_tokens > context_length:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones: "
                f"allowed are {context_length} together"
            )
        return max_tokens
