"""The transformer, one rank's part of it: llama architecture, tied embedding, KV cache.

Column-parallel: query, key, value, gate, up. Row-parallel: attention output and down, whose
results are partial sums over the ranks. Embedding, LM head and norms are whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from smollm2.parallel import FusedAllReduce
from smollm2.rope import apply_rope, rope_table
from smollm2.weights import Checkpoint, ModelConfig


@dataclass(frozen=True)
class Layer:
    """One layer's weights on one of W ranks; matrices are ``[out, in]``."""

    attn_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim / W, hidden]
    attn_out: torch.Tensor  # [hidden, heads * head_dim / W]
    ffn_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * ffn / W, hidden]
    down: torch.Tensor  # [hidden, ffn / W]


@dataclass(frozen=True)
class Weights:
    """All weights of one rank."""

    embedding: torch.Tensor  # [vocab, hidden]; the LM head too
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor  # [hidden]


def load_weights(
    checkpoint: Checkpoint, rank: int, world_size: int, dtype: torch.dtype, device: torch.device
) -> Weights:
    """Dequantize and place what ``rank`` of ``world_size`` needs, and no more."""

    def place(*parts: torch.Tensor) -> torch.Tensor:
        return torch.cat(parts).to(device, dtype)

    def rows(name: str) -> torch.Tensor:
        return checkpoint.rows(name, rank, world_size)

    def columns(name: str) -> torch.Tensor:
        return checkpoint.columns(name, rank, world_size)

    def layer(prefix: str) -> Layer:
        # Matrices that read the same input stand on top of each other: one multiplication.
        qkv = [rows(f"{prefix}.attn_{name}.weight") for name in "qkv"]
        gate_up = [rows(f"{prefix}.ffn_{name}.weight") for name in ("gate", "up")]
        return Layer(
            attn_norm=place(checkpoint.whole(f"{prefix}.attn_norm.weight")),
            qkv=place(*qkv),
            attn_out=place(columns(f"{prefix}.attn_output.weight")),
            ffn_norm=place(checkpoint.whole(f"{prefix}.ffn_norm.weight")),
            gate_up=place(*gate_up),
            down=place(columns(f"{prefix}.ffn_down.weight")),
        )

    num_layers = checkpoint.config().num_layers
    return Weights(
        embedding=place(checkpoint.whole("token_embd.weight")),
        layers=tuple(layer(f"blk.{index}") for index in range(num_layers)),
        final_norm=place(checkpoint.whole("output_norm.weight")),
    )


class KVCache:
    """Keys and values of one request on one rank, ``[layers, kv_heads, max_tokens, head_dim]``.

    Allocated once. The first ``length`` tokens are valid; the model advances it step by step.
    """

    def __init__(self, shape: tuple[int, int, int, int], like: torch.Tensor) -> None:
        self.keys, self.values = like.new_empty(shape), like.new_empty(shape)
        self.length = 0

    def append(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``[kv_heads, tokens, head_dim]`` behind the valid tokens; return all so far."""
        end = self.length + keys.shape[1]
        self.keys[layer, :, self.length : end] = keys
        self.values[layer, :, self.length : end] = values
        return self.keys[layer, :, :end], self.values[layer, :, :end]


class Model:
    """One rank's model. Every rank makes the same calls with the same tokens (collective)."""

    def __init__(self, config: ModelConfig, weights: Weights, fused: FusedAllReduce) -> None:
        self.config, self.max_step_tokens = config, fused.max_num_tokens
        self._weights, self._fused = weights, fused
        self._num_kv_heads = config.num_kv_heads // fused.world_size
        self._num_heads = config.num_heads // fused.world_size
        self._rope = rope_table(config, weights.embedding.device)
        # The norm that follows layer i's feed-forward is layer i + 1's first, or the final one.
        self._next_norms = [layer.attn_norm for layer in weights.layers[1:]] + [weights.final_norm]

    def new_cache(self, max_tokens: int) -> KVCache:
        """An empty cache for one request of at most ``max_tokens``, prompt included."""
        config = self.config
        shape = (config.num_layers, self._num_kv_heads, max_tokens, config.head_dim)
        return KVCache(shape, self._weights.embedding)

    @torch.inference_mode()
    def step(self, tokens: list[int], cache: KVCache) -> torch.Tensor:
        """Run ``tokens`` (at most ``max_step_tokens``), fill the cache; logits of the last one.

        Logits ``[vocab]`` are the same on every rank bit for bit, because the allreduce is: each
        rank can pick the next token by itself, and nothing has to be broadcast.
        """
        weights, fused, device = self._weights, self._fused, self._weights.embedding.device
        residual = F.embedding(torch.tensor(tokens, device=device), weights.embedding)
        # The only norm on its own. All others come out of the fused call, two a layer.
        hidden = F.rms_norm(
            residual, residual.shape[-1:], weights.layers[0].attn_norm, self.config.norm_eps
        )
        for index, layer in enumerate(weights.layers):
            attention = self._attention(index, layer, hidden, cache)
            hidden, residual = fused(attention, residual, layer.ffn_norm)
            hidden, residual = fused(_ffn(layer, hidden), residual, self._next_norms[index])
        cache.length += len(tokens)
        return F.linear(hidden[-1], weights.embedding)

    def _attention(
        self, index: int, layer: Layer, hidden: torch.Tensor, cache: KVCache
    ) -> torch.Tensor:
        """This rank's heads; ``[tokens, hidden]``, partial until summed over the ranks."""
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        heads = F.linear(hidden, layer.qkv).unflatten(-1, (-1, self.config.head_dim))
        # [heads, tokens, head_dim]; the query and key heads are neighbours, so one rotation.
        rotated, values = heads.transpose(0, 1).split([num_heads + num_kv_heads, num_kv_heads])
        start, end = cache.length, cache.length + hidden.shape[0]
        rotated = apply_rope(rotated, self._rope[:, start:end])
        queries, keys = rotated.split([num_heads, num_kv_heads])
        keys, values = cache.append(index, keys, values)
        positions = torch.arange(end, device=hidden.device)
        mixed = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=positions[start:, None] >= positions,
            enable_gqa=True,
        )
        return F.linear(mixed.transpose(0, 1).flatten(1), layer.attn_out)


def _ffn(layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(hidden, layer.gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, layer.down)
