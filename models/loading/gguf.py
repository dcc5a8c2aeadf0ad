"""GGUF files (llama.cpp): weights are dequantised once, while loading."""

from pathlib import Path

import gguf
import numpy as np

from models.config import ModelConfig
from models.decoder import Params
from models.errors import ModelError
from models.loading import table
from models.loading.gguf_reader import open_reader

NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attn_norm": "blk.{i}.attn_norm.weight",
    "mlp_norm": "blk.{i}.ffn_norm.weight",
    "q": "blk.{i}.attn_q.weight",
    "k": "blk.{i}.attn_k.weight",
    "v": "blk.{i}.attn_v.weight",
    "o": "blk.{i}.attn_output.weight",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
}

IGNORED = {"rope_freqs.weight"}  # read with the configuration


class GGUFSource:
    """Dequantised tensors, with the rows of q and k in half-split order."""

    def __init__(self, path: Path, reader: gguf.GGUFReader, config: ModelConfig):
        self.path = str(path)
        self.config = config
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        # ggml counts axes from the innermost
        self.shapes = {name: tuple(int(n) for n in tensor.shape[::-1]) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        try:
            weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path} stores {name} as {tensor.tensor_type.name}, which is not readable."
            ) from error
        if self.config.architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            return half_split(weights, self.config.head_dim)
        return weights


def half_split(weights: np.ndarray, head_dim: int) -> np.ndarray:
    """Undoes the order in which llama.cpp stores Llama's q and k: channels 0, H/2, 1, H/2+1, ... of each head."""
    pairs = weights.reshape(-1, head_dim // 2, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def load(path: Path, dtype, progress: table.Progress | None = None) -> tuple[ModelConfig, Params]:
    """(config, params) of one GGUF file; raises `ModelError`."""
    reader = open_reader(path)
    config = ModelConfig.from_gguf(reader)
    source = GGUFSource(path, reader, config)
    slots = table.slots(config, NAMES)
    return config, table.fill(source, config, slots, dtype=dtype, ignored=IGNORED, progress=progress)
