"""Text to tokens and back, from nothing but the model file's own metadata."""

from __future__ import annotations

from collections.abc import Callable

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from smollm2.weights import Checkpoint

# The value of `tokenizer.ggml.token_type` for tokens that stand for no text, such as <|im_end|>.
CONTROL = 3


class ChatTokenizer:
    """Byte-level BPE with the file's vocabulary, merges, special tokens and chat template."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises ValueError when the file names a tokenizer of another kind."""
        kind = (
            checkpoint.metadata("tokenizer.ggml.model"),
            checkpoint.metadata("tokenizer.ggml.pre"),
        )
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"tokenizer {kind}: this example knows ('gpt2', 'smollm') only")
        self._tokenizer = _byte_level_bpe(checkpoint)
        # The template is a program that came with the file, hence the sandbox.
        self._template = ImmutableSandboxedEnvironment().from_string(
            checkpoint.metadata("tokenizer.chat_template")
        )

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``; special tokens written out in it are recognised."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_chat(self, user_message: str) -> list[int]:
        """The prompt that asks the assistant to answer ``user_message``."""
        messages = [{"role": "user", "content": user_message}]
        return self.encode(self._template.render(messages=messages, add_generation_prompt=True))

    def decode(self, tokens: list[int]) -> str:
        """The text of ``tokens``, special tokens left out."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def text_stream(self) -> Callable[[int], str]:
        """A function from each new token to the text that it completes, often none.

        A character whose bytes span several tokens appears once it is whole.
        """
        stream = DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self._tokenizer, token) or ""


def _byte_level_bpe(checkpoint: Checkpoint) -> Tokenizer:
    tokens = checkpoint.metadata("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in checkpoint.metadata("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    # What the pre-tokenizer name "smollm" stands for: each digit alone, then GPT-2's split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = checkpoint.metadata("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    )
    return tokenizer
