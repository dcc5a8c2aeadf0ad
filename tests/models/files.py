"""Writes the tiny models of tests/golden/tiny.py in the formats that the loaders read."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from tests.golden import tiny


def write_hf(folder: Path, name: str, *, config: dict[str, Any] | None = None, tensors: dict | None = None) -> Path:
    """A Hugging Face folder with one file of weights; `config` replaces attributes, `tensors` the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny.CONFIGS[name] | (config or {})))
    save_file(tiny.weights(name) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, name: str, extra: dict[str, dict[str, np.ndarray]] | None = None) -> Path:
    """The same in two shards with an index; `extra` adds tensors to a shard that the index places elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny.CONFIGS[name]))
    weights = tiny.weights(name)
    home = {tensor: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, tensor in enumerate(weights)}
    for file in sorted(set(home.values())):
        held = {tensor: value for tensor, value in weights.items() if home[tensor] == file}
        save_file(held | (extra or {}).get(file, {}), folder / file)
    index = {"metadata": {"total_size": sum(value.nbytes for value in weights.values())}, "weight_map": home}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(tensor: str) -> str:
    stem, kind = tensor.rsplit(".", 1)
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{kind}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"


def interleave(weights: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp's converter stores q and k: one row of each half in turn."""
    out = np.empty_like(weights)
    size = weights.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weights[head * size + i]
            out[head * size + 2 * i + 1] = weights[head * size + size // 2 + i]
    return out


def llama3_divisors(config: dict[str, Any]) -> np.ndarray:
    """What the converter stores in `rope_freqs.weight`, band by band."""
    scaling, H = config["rope_scaling"], config["head_dim"]
    low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    divisors = []
    for i in range(H // 2):
        wavelength = 2 * np.pi * config["rope_theta"] ** (2 * i / H)
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(scaling["factor"])
        else:
            smooth = (low / wavelength - 1) / (low / high - 1)
            divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(divisors, np.float32)


def gguf_tensors(name: str) -> dict[str, np.ndarray]:
    """The tiny model's weights under GGUF names, permuted as the converter does for Llama."""
    config, tensors = tiny.CONFIGS[name], {}
    for tensor, value in tiny.weights(name).items():
        if name == "llama" and ("q_proj" in tensor or "k_proj" in tensor):
            value = interleave(value, config["num_attention_heads" if "q_proj" in tensor else "num_key_value_heads"])
        tensors[gguf_name(tensor)] = value
    if name == "llama":
        tensors["rope_freqs.weight"] = llama3_divisors(config)
    return tensors


def gguf_metadata(name: str) -> dict[str, Any]:
    """`{arch}.*` keys; `attention.key_length` only where it does not follow from the other sizes."""
    config = tiny.CONFIGS[name]
    values = {
        "context_length": config["max_position_embeddings"],
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    if "head_dim" in config:
        values |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    return values


def write_gguf(
    path: Path,
    name: str,
    *,
    architecture: str | None = None,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF file; `metadata` adds or replaces `{arch}.*` keys (None removes one)."""
    writer = gguf.GGUFWriter(path, architecture or name)
    for key, value in (gguf_metadata(name) | (metadata or {})).items():
        if value is not None:
            add_value(writer, f"{architecture or name}.{key}", value)
    for tensor, value in (gguf_tensors(name) if tensors is None else tensors).items():
        writer.add_tensor(tensor, value)
    return finish(writer, path)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
