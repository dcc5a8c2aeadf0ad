"""A loaded model that serves requests: checks, shape buckets, compiled programs. `load` makes one."""

from __future__ import annotations

import dataclasses
import secrets
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models import decoder, published, registry
from skg_jax import chat, tokenizer
from skg_jax.decode import Program, Requests, Rows, compiled, decode_loop, empty_log, prefill
from skg_jax.decode.state import NO_TOKEN
from skg_jax.engine.options import Options, RequestError
from skg_jax.engine.run import Run
from skg_jax.guard import head_weights, operating_point
from skg_jax.guard.crossover import crossover
from skg_jax.guard.policy import init as guard_init
from skg_jax.kv import cache as kv
from skg_jax.sampling import SamplingParams
from skg_jax.selectors import get
from skg_jax.tokenizer import Tokenizer

UNKNOWN_MODEL_TAU = 0.25  # where no operating point was measured; said so by the command line
_STOP_SLOTS = 4  # end-token ids are padded to a multiple, so that models share programs

type Progress = Callable[[str, int, int], None]


class Job(NamedTuple):
    """A checked batch of requests."""

    prompts: list[tuple[int, ...]]
    limits: list[int]  # tokens to generate at most
    options: Options
    program: Program
    requests: Requests
    seed: int
    tau: float
    dense_below: int  # tokens; 0: never
    uncovered: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]


class Shape(NamedTuple):
    """What a program is compiled for, beside `Program`."""

    batch: int
    tokens: int
    stops: int
    tiers: int


class Engine:
    """Serves one model. Compiled programs are kept by shape: a second request of the same bucket compiles nothing."""

    def __init__(self, model: registry.Model, tokens: Tokenizer, progress: Progress | None = None):
        self.model, self.tokenizer = model, tokens
        self.dtype = jnp.dtype(model.params["embed"]["embedding"].dtype)
        self.report_progress: Progress = progress or (lambda *_: None)
        self._compiled: dict[Any, Any] = {}
        self._weights: dict[str, Any] = {}

    def generate(self, prompt: str | Sequence[str], options: Options | None = None, **fields) -> Any:
        """Generate for one prompt (a Result) or several in one batch (a list of Results).

        Args:
          prompt: text; with a chat template it becomes a user message unless `raw`.
          options: or its fields by name.

        Raises:
          RequestError, ValueError: one sentence, before anything is computed.
        """
        single = isinstance(prompt, str)
        run = self.start([prompt] if single else prompt, options or Options(**fields))
        for _ in run:
            pass
        return run.results()[0] if single else run.results()

    def start(self, prompts: Sequence[str | Sequence[int]], options: Options) -> Run:
        """Check the requests and return a Run to iterate over; prompts given as token ids are taken as they are."""
        return Run(self, self._job(prompts, options))

    def encode(self, prompt: str, options: Options) -> list[int]:
        """Token ids of a prompt, through the chat template unless raw or the model has none."""
        if options.raw or self.tokenizer.chat_template is None:
            return self.tokenizer.encode(prompt)
        system = [{"role": "system", "content": options.system}] if options.system is not None else []
        text = chat.render(self.tokenizer, [*system, {"role": "user", "content": prompt}])
        return self.tokenizer.encode(text, add_special=False)

    def shape(self, job: Job) -> Shape:
        """Smallest bucket that holds the batch: 1, 1.5 or 2 times a power of two of prefill chunks."""
        need = max(len(p) + n for p, n in zip(job.prompts, job.limits, strict=True))
        chunks = -(-need // job.program.prefill_chunk)
        size = next(s for n in range(32) for s in (2**n, 3 * 2**n // 2) if s >= chunks)
        widths = job.requests.stop.shape[1], job.requests.policy.budgets.shape[1]
        return Shape(len(job.prompts), size * job.program.prefill_chunk, *widths)

    def new_cache(self, job: Job, shape: Shape) -> kv.PagedKVCache:
        config = self.model.config
        return kv.init(config.num_layers, config.num_kv_heads, config.head_dim, shape.batch, shape.tokens, self.dtype)

    def programs(self, job: Job, shape: Shape) -> tuple[Any, Any, float]:
        """Compiled prefill and decode loop, and the seconds spent on compiling now."""
        key = (job.program, shape)
        began = time.perf_counter()
        if key not in self._compiled:
            cache = jax.eval_shape(lambda: self.new_cache(job, shape))
            number, row = jax.ShapeDtypeStruct((), jnp.int32), jnp.zeros(shape.batch, jnp.int32)
            rows = Rows(row, row, row, row, row > 0, guard_init(shape.batch))
            tokens = jax.ShapeDtypeStruct((1, job.program.prefill_chunk), jnp.int32)
            params, requests = self.model.params, job.requests
            self.report_progress("compile", 0, 2)
            chunk = (tokens, number, number, number)
            first = compiled(prefill.lower(params, cache, requests, *chunk, program=job.program))
            self.report_progress("compile", 1, 2)
            log = empty_log(job.program.attempts_per_dispatch, shape.batch)
            loop = compiled(decode_loop.lower(params, cache, requests, rows, log, program=job.program))
            self.report_progress("compile", 2, 2)
            self._compiled[key] = first, loop
        return *self._compiled[key], time.perf_counter() - began

    def _job(self, prompts: Sequence[str | Sequence[int]], options: Options) -> Job:
        if not prompts:
            raise RequestError("there is no prompt; give at least one.")
        encoded = [tuple(self.encode(p, options) if isinstance(p, str) else p) for p in prompts]
        for ids in encoded:
            self._check(ids)
        for p in prompts:
            if isinstance(p, str) and not p.strip():
                raise RequestError("the prompt is empty; give some text.")
        context = self.model.config.max_context
        limits = [min(options.max_tokens, context - len(ids)) for ids in encoded]
        seed = secrets.randbits(32) if options.seed is None else options.seed
        known = self._known_tau(options)
        tau = options.guard.tau or known or UNKNOWN_MODEL_TAU
        dense_below = self._dense_below(options, len(encoded))
        return Job(
            prompts=encoded,
            limits=limits,
            options=options,
            program=self._program(options),
            requests=self._requests(encoded, limits, options, seed, tau, dense_below),
            seed=seed,
            tau=tau,
            dense_below=dense_below,
            uncovered=self._uncovered(options),
            notes=tuple(self._notes(options, limits, known)),
        )

    def _known_tau(self, options: Options) -> float | None:
        """The model's operating point, which holds for the selector and page size that it was measured with."""
        if (options.selector, options.page_size) != (Options.selector, Options.page_size):
            return None
        return operating_point(self.model.name, options.guard, float(options.pages))

    def _dense_below(self, options: Options, batch: int) -> int:
        """What was asked for, or what was measured with the default selector; 0 without a guard."""
        if options.attention != "guarded":
            return 0
        if options.dense_below is not None:
            return options.dense_below
        name = published.name_of(self.model.config)
        if name is None or options.selector != Options.selector:
            return 0
        return crossover(jax.devices()[0].device_kind, name, batch, float(options.pages), options.page_size)

    def _notes(self, options: Options, limits: list[int], known: float | None):
        if min(limits) < options.max_tokens:
            context = self.model.config.max_context
            yield (
                f"max_tokens is cut from {options.max_tokens} to {min(limits)}: "
                f"prompt and answer share the {context} tokens that {self.model.name} holds."
            )
        if options.attention == "guarded" and options.guard.tau is None and known is None:
            yield (
                f"no operating point is known for {self.model.name} with these settings, so tau is "
                f"{UNKNOWN_MODEL_TAU:g}, which may be too strict or too loose; choose it yourself."
            )

    def _check(self, ids: tuple[int, ...]) -> None:
        context = self.model.config.max_context
        if not ids:
            raise RequestError("the prompt is empty; give some text.")
        if len(ids) >= context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but {self.model.name} holds {context - 1} at most; shorten it."
            )

    def _program(self, options: Options) -> Program:
        return Program(
            model=self.model.config,
            mode=options.attention,
            selector=get(options.selector),
            audit=options.guard.audit(options.page_size),
            greedy=options.greedy,
        )

    def _requests(self, prompts, limits, options: Options, seed: int, tau: float, dense_below: int) -> Requests:
        ends = [] if options.ignore_end else sorted(self.tokenizer.eos_ids)
        guarded = options.attention == "guarded"  # without a guard no tier is ever reached
        guard = options.guard if guarded else dataclasses.replace(options.guard, tiers=())
        width = max(-(-len(ends) // _STOP_SLOTS), 1) * _STOP_SLOTS
        rows = len(prompts)
        fill = lambda value, dtype: jnp.full(rows, value, dtype)
        return Requests(
            key=_keys(prompts, seed),
            last=jnp.asarray([len(p) + n - 1 for p, n in zip(prompts, limits, strict=True)], jnp.int32),
            stop=jnp.asarray([ends + [NO_TOKEN - 1] * (width - len(ends))] * rows, jnp.int32),
            sampling=SamplingParams(
                fill(options.temperature, jnp.float32), fill(options.top_k, jnp.int32),
                fill(options.top_p, jnp.float32), fill(options.min_p, jnp.float32),
            ),
            policy=guard.policy(tau, float(options.pages), [max(n - 1, 1) for n in limits], dense_below),
            weights=self._head_weights(options)[0],
        )  # fmt: skip

    def _head_weights(self, options: Options):
        name = options.guard.weights
        if name not in self._weights:
            self._weights[name] = head_weights(options.guard, decoder.stacked(self.model.params, "attn", "o", "kernel"))
        return self._weights[name]

    def _uncovered(self, options: Options) -> tuple[tuple[int, int], ...]:
        return self._head_weights(options)[1] if options.attention == "guarded" else ()


def load(
    model: str | Path = registry.DEFAULT, dtype: str | None = None, tokenizer_path: str | Path | None = None,
    progress: Progress | None = None,
) -> Engine:  # fmt: skip
    """Load a built-in model by name, a GGUF file, a Hugging Face folder or an orbax directory.

    Args:
      dtype: of weights and cache; None: bfloat16 on an accelerator, float32 on a CPU.
      progress: called with (stage, done, total); stages are load, compile and prefill.

    Raises:
      ModelError: one sentence, when it is missing, damaged or of an unknown kind.
    """
    name = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    watch = (lambda done, total: progress("load", done, total)) if progress else None
    loaded = registry.load(model, jnp.dtype(name), watch)
    tokens = tokenizer.load(tokenizer_path or loaded.path)
    return Engine(loaded._replace(params=decoder.unstack(loaded.params)), tokens, progress)


def _keys(prompts: Sequence[tuple[int, ...]], seed: int) -> jax.Array:
    """One key per request, from the seed and the prompt: independent of its place in the batch."""
    base = jax.random.key(seed)
    digests = [zlib.crc32(np.asarray(p, np.int64).tobytes()) for p in prompts]
    return jax.vmap(lambda d: jax.random.fold_in(base, d))(jnp.asarray(digests, jnp.uint32))
