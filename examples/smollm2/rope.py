"""Rotary position embedding, in the element order of GGUF files.

A head's vector is d/2 two-dimensional points, point i turned by ``position * base^(-2i/d)``.
Hugging Face keeps point i in elements (i, i + d/2). llama.cpp keeps it in the neighbours
(2i, 2i + 1), and its converter permutes the rows of the query and key weights to match. The two
are equal in effect, for a dot product does not ask for the order, as long as weights and rotation
agree: with the file's weights as they are, neighbours are rotated.
"""

from __future__ import annotations

import torch

from smollm2.weights import ModelConfig


def rope_table(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """Cosines and sines of all positions, float32, ``[2, context_length, head_dim / 2]``."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    positions = torch.arange(config.context_length, dtype=torch.float64)
    angles = torch.outer(positions, config.rope_base**-exponents)
    return torch.stack((angles.cos(), angles.sin())).to(device, torch.float32)


def apply_rope(heads: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate ``heads [num_heads, tokens, head_dim]`` by ``table [2, tokens, head_dim / 2]``."""
    x, y = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table
    return torch.stack((x * cos - y * sin, x * sin + y * cos), dim=-1).flatten(-2).to(heads.dtype)
