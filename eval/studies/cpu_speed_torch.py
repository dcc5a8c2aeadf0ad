# pyright: reportMissingImports=false
"""The peer of `cpu_speed`: dense decoding by transformers, float32, sdpa, from the same GGUF file. Prints JSON.

Runs under an interpreter with torch, transformers and gguf; nothing of this project is imported. Three ways are timed,
so that the peer is judged by its best: `generate` with its default cache, `generate` with a static cache, and a bare
loop around `forward`.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    for name in ("prompt-tokens", "generation-tokens", "trials", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args()


class Clock:
    """A streamer that only looks at the time; `generate` shows it the prompt, then every token."""

    def __init__(self):
        self.times = []

    def put(self, value) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def by_generate(model, ids, count: int, **options) -> list[float]:
    """Times of every token."""
    clock = Clock()
    model.generate(
        ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=count, do_sample=False, streamer=clock, **options
    )
    return clock.times[1:]


def by_loop(model, ids, count: int) -> list[float]:
    """Times of every token, without the bookkeeping of `generate`."""
    times, cache = [], None
    for _ in range(count):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        times.append(time.perf_counter())
    return times


def timed(way, model, ids, count: int) -> dict[str, float]:
    began = time.perf_counter()
    times = way(model, ids, count)
    if len(times) != count:
        raise RuntimeError(f"{len(times)} tokens came instead of {count}")
    return {"ttft_s": times[0] - began, "decode_tok_s": (count - 1) / (times[-1] - times[0])}


def main() -> None:
    args = arguments()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    from pydoc_data.topics import topics

    import torch
    import transformers

    torch.set_num_threads(args.threads)
    load = {"gguf_file": args.gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.gguf.parent, **load)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.gguf.parent, **load, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None  # run on
    model.generation_config.pad_token_id = 0
    ids = tokenizer("\n".join(topics[name] for name in sorted(topics)), return_tensors="pt").input_ids
    ids = ids[:, : args.prompt_tokens]
    ways = {
        "generate": by_generate,
        "generate, static cache": lambda *call: by_generate(*call, cache_implementation="static"),
        "loop": by_loop,
    }
    trials = {name: [] for name in ways}
    with torch.inference_mode():
        for trial in range(-1, args.trials):  # the first one warms up
            for name, way in ways.items():
                found = timed(way, model, ids, args.generation_tokens)
                if trial >= 0:
                    trials[name].append(found)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["transformers"] = transformers.__version__
    settings = {"threads": torch.get_num_threads(), "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY")}
    print(json.dumps({"versions": versions, **settings, "trials": trials}))


if __name__ == "__main__":
    main()
