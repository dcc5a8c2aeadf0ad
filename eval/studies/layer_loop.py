"""The layer loop without attention at the size of a published model: one scan over stacked weights, or unrolled layers.

    python -m eval.studies.layer_loop --output layer_loop.json

Needs a GPU that holds the model (random bfloat16 weights). Each form runs as a loop of steps within one dispatch, as
decoding does; the attention is left out, so what is timed are the products and what surrounds them.
"""

import argparse
import functools
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from models import decoder, layers, published
from skg_jax.bench.weights import random_params

STEPS = 16  # of one dispatch


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The layer loop without attention.")
    parser.add_argument("--config", default="llama-3.1-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--forms", nargs="+", default=["scan", "unrolled", "padded"])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def attend(layer, q, k, v, carry):
    """No attention: a value that depends on all three, so that no product is left out."""
    del layer
    return q + jnp.repeat(k + v, q.shape[2] // k.shape[2], axis=2), carry, None


@functools.partial(jax.jit, static_argnames="config")
def steps(params, config, tokens):
    """STEPS decode steps of a batch in one program."""

    def step(i, tokens):
        position = jnp.broadcast_to(i, tokens.shape)[:, None]
        x, _, _ = decoder.hidden_states(params, config, tokens[:, None], position, attend, ())
        return jnp.argmax(decoder.unembed(params, config, x[:, 0]), axis=-1).astype(jnp.int32)

    return jax.lax.fori_loop(0, STEPS, step, tokens)


def measure(params, config, batch: int, trials: int) -> dict:
    """Compile time, temporaries and milliseconds a step of one form."""
    tokens = jnp.arange(batch, dtype=jnp.int32)
    began = time.perf_counter()
    compiled = steps.lower(params, config, tokens).compile()
    compile_s = time.perf_counter() - began
    times = []
    for _ in range(trials + 2):
        began = time.perf_counter()
        np.asarray(compiled(params, tokens))
        times.append((time.perf_counter() - began) / STEPS * 1e3)
    times = times[2:]
    return {
        "batch": batch,
        "compile_s": compile_s,
        "temporaries_bytes": getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0),
        "step_ms": {"median": statistics.median(times), "min": min(times), "max": max(times), "n": trials},
    }


def main() -> None:
    args = arguments()
    config = published.get(args.config)
    params = random_params(config, jax.random.key(0))
    embedding = params["embed"]["embedding"].nbytes  # looked up, not read
    found = {"weights_bytes": sum(x.nbytes for x in jax.tree.leaves(params)) - embedding, "forms": {}}
    for form in args.forms:
        if form != "scan" and isinstance(params["layers"], dict):
            params = decoder.unstack(params)
        layers.LEAST_ROWS = 8 if form == "padded" else 1
        jax.clear_caches()
        found["forms"][form] = [measure(params, config, batch, args.trials) for batch in args.batches]
        for row in found["forms"][form]:
            rate = found["weights_bytes"] / row["step_ms"]["median"] / 1e9
            print(
                f"{form:<9} B={row['batch']:<3} {row['step_ms']['median']:7.3f} ms a step  {rate:.2f} TB/s of weights  "
                f"compile {row['compile_s']:.1f} s  temporaries {row['temporaries_bytes'] / 1e6:.0f} MB",
                flush=True,
            )
    if args.output:
        facts = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "steps_per_dispatch": STEPS}
        args.output.write_text(json.dumps(facts | {"config": args.config} | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
