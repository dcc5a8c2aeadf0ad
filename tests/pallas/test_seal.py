"""The seal kernel: interpreted on hard blocks against float64 and its XLA twin, wrong metadata, its lowering."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.kv import cache as kv
from skg_jax.kv import sketch
from skg_jax.kv.sealing import seal_xla
from skg_jax.pallas import seal_unit as lanes
from skg_jax.pallas import smem
from skg_jax.pallas.seal import Metadata, as_swizzled, seal, shared_memory
from skg_jax.pallas.seal_unit import UnitShape
from skg_jax.pallas.shapes import SEAL_SHAPES
from skg_jax.pallas.warp import ArrayWarp
from tests.kv.oracle import f64
from tests.pallas import seal_cases as cases
from tests.pallas.decode_cases import races_found

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compiles twice as fast
FULL = np.array([True, True, False, True, True, False])
CASES = {"bf16": (128, jnp.bfloat16, 4), "f16": (64, jnp.float16, 4)}  # head dim, dtype, heads


@functools.cache
def case_of(name: str) -> cases.Case:
    """Every hard block is one of 32 units; one block is open, and one is out of range."""
    dim, dtype, heads = CASES[name]
    case = cases.make(dim, dtype, heads, len(FULL), FULL)
    return case._replace(blocks=case.blocks.at[5].set(case.k.shape[1]), full=case.full.at[5].set(True))


@functools.cache
def found_by(what: str, name: str):
    run = {"kernel": seal, "twin": seal_xla}[what]
    found = jax.block_until_ready(jax.jit(run, compiler_options=FAST)(*case_of(name)))
    return found[0], found[1], what == "kernel" and races_found()


@pytest.mark.parametrize("what", ["kernel", "twin"])
@pytest.mark.parametrize("name", CASES)
def test_metadata_of_hard_blocks_bound_what_they_describe(name, what):
    case = case_of(name)
    found, fits, races = found_by(what, name)
    assert not races
    metadata, keys, values = cases.units(case, found)
    assert len(keys) >= len(cases.blocks_of_keys(8))
    assert cases.faults(metadata, keys, values) == set()
    inside = np.isin(np.asarray(case.blocks), case.sealed) & np.asarray(case.full)
    np.testing.assert_array_equal(np.asarray(fits)[:, inside].reshape(-1), cases.fitting(keys))
    assert not np.asarray(fits)[:, ~inside].any()


@pytest.mark.parametrize("name", CASES)
def test_other_blocks_keep_every_bit(name):
    assert cases.rest_is_untouched(case_of(name), found_by("kernel", name)[0])


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_stores_what_its_twin_does_but_for_rounding(name):
    case = case_of(name)
    ours, twins = (cases.units(case, found_by(what, name)[0])[0] for what in ("kernel", "twin"))
    for field in ("low", "step", "k_sum", "v_sum"):
        np.testing.assert_array_equal(getattr(ours, field), getattr(twins, field), err_msg=field)
    codes = [(x.codes[..., None] >> 4 * np.arange(8, dtype=np.uint32) & 15).astype(int) for x in (ours, twins)]
    assert np.abs(codes[0] - codes[1]).max() <= 1 and (codes[0] != codes[1]).mean() < 1e-3  # ties
    size = np.linalg.norm(f64(ours.step), axis=-1)[:, None]
    assert (
        np.abs(f64(ours.residual) - f64(twins.residual)) <= 2.0**-9 * f64(twins.residual) + 2e-6 * size + 1e-7
    ).all()
    for field in ("key_norm", "value_norm"):
        np.testing.assert_allclose(getattr(ours, field), getattr(twins, field), rtol=1e-6, atol=1e-16, err_msg=field)
    np.testing.assert_allclose(ours.norms[:, 1:], twins.norms[:, 1:], rtol=1e-6)


WRONG = {
    "residual": lambda m: m._replace(residual=m.residual / 2),
    "loose residual": lambda m: m._replace(residual=m.residual * np.float16(1.01)),
    "low": lambda m: m._replace(low=np.nextafter(m.low, np.float16(np.inf))),
    "step": lambda m: m._replace(step=np.nextafter(m.step, np.float16(-np.inf))),
    "codes": lambda m: m._replace(codes=m.codes ^ 1),
    "rho": lambda m: m._replace(norms=m.norms * np.float32(0.9999)),
    "norm": lambda m: m._replace(norms=m.norms * np.float32(0.9999)),
    "key norm": lambda m: m._replace(key_norm=m.key_norm * np.float32(0.9999)),
    "value norm": lambda m: m._replace(value_norm=m.value_norm * np.float32(0.9999)),
    "key sums": lambda m: m._replace(k_sum=m.k_sum[:, ::-1]),
    "value sums": lambda m: m._replace(v_sum=m.v_sum + np.uint32(1)),
    "codes of what does not fit": lambda m: m._replace(codes=m.codes | 1),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_metadata_are_seen(fault):
    """Negative controls of the checks above."""
    metadata, keys, values = cases.units(case_of("f16"), found_by("kernel", "f16")[0])
    with np.errstate(over="ignore"):
        assert fault in cases.faults(WRONG[fault](metadata), keys, values)


# --- lane code ------------------------------------------------------------------------------------------------------


def sealed_by_lanes(k: np.ndarray, v: np.ndarray, shape: UnitShape):
    """Units [n, 64, H]."""

    def one(k, v):
        memory = {"k": as_swizzled(k), "v": as_swizzled(v)}
        memory |= {name: jnp.zeros(words, jnp.uint32) for name, words in (shape.scratch | shape.results).items()}
        lanes.seal_unit(ArrayWarp(memory), jnp.arange(4, dtype=jnp.uint32)[:, None], shape)
        return [memory[name] for name in shape.results if name != "fits"]

    like = jax.eval_shape(lambda: sketch.empty((), shape.head_dim))
    kinds = [x.dtype for x in like] + [np.float32] * 2 + [np.uint32] * 2
    found = jax.jit(jax.vmap(one), compiler_options=FAST)(jnp.asarray(k), jnp.asarray(v))
    fields: Any = [np.asarray(x).view(kind) for x, kind in zip(found, kinds, strict=True)]
    codes, *_, key_norm, value_norm = fields[:7]
    norms = {"key_norm": key_norm[:, 0], "value_norm": value_norm[:, 0]}
    return Metadata(*fields)._replace(codes=codes.reshape(len(k), 64, -1), **norms)


def test_bounds_without_the_allowances_for_rounding_are_violated(monkeypatch):
    """Sums of squares rounded down, and squares too small for float32."""
    rng = np.random.default_rng(2)
    keys = rng.uniform(900, 1000, (40, 64, 64)).astype(jnp.bfloat16)
    values = (rng.normal(size=keys.shape) * 1e-22).astype(jnp.bfloat16)
    shape = UnitShape(head_dim=64, kind="bf16")
    assert cases.faults(sealed_by_lanes(keys, values, shape), keys, values) == set()
    monkeypatch.setattr(lanes, "_UP", 1.0)
    monkeypatch.setattr(lanes, "_LOST", 0.0)
    assert cases.faults(sealed_by_lanes(keys, values, shape), keys, values) >= {"key norm", "value norm"}


# --- the cache ------------------------------------------------------------------------------------------------------


def test_a_cache_is_sealed_alike_by_kernel_and_twin():
    """A block with a key too large in one layer and head is never sealed."""
    rng = np.random.default_rng(0)
    cache = kv.init(2, 2, 64, 1, 4 * 64, jnp.bfloat16)
    draw = lambda: jnp.asarray(rng.normal(size=cache.k.shape), jnp.bfloat16)
    k = draw().at[1, 2, 1, 5, 7].set(1e6)
    cache = cache._replace(k=k, v=draw(), written=jnp.array([3, 4, 5, 6], jnp.int32))
    blocks, full = jnp.array([2, 0, 3], jnp.int32), jnp.array([True, True, False])
    run = jax.jit(kv.seal, static_argnames="implementation", compiler_options=FAST)
    ours, twins = (run(cache, blocks, full, implementation=name) for name in ("mosaic_gpu", "xla"))
    np.testing.assert_array_equal(ours.sealed, [3, kv.NEVER, kv.NEVER, kv.NEVER])
    for name in ("sealed", "written", "k", "v", "k_sum", "v_sum"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(twins, name), err_msg=name)
    assert not np.asarray(ours.sketch.codes[:, 2])[1, 1].any() and np.asarray(ours.sketch.codes[:, 0]).any()


# --- shapes ---------------------------------------------------------------------------------------------------------


def arguments(layers: int, heads: int, dim: int, blocks: int, dtype=jnp.bfloat16, pool: int = 128):
    """Arrays that are never made."""
    cache = jax.eval_shape(lambda: kv.init(layers, heads, dim, 1, pool * 64, dtype))
    array = jax.ShapeDtypeStruct
    where = array((blocks,), jnp.int32), array((blocks,), jnp.bool)
    return cache.k, cache.v, jax.eval_shape(kv.metadata, cache), *where


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", SEAL_SHAPES)
def test_named_shapes_lower_in_place(name, dtype):
    s = SEAL_SHAPES[name]
    call = jax.jit(functools.partial(seal, interpret=False), donate_argnums=2)
    traced = call.trace(*arguments(s.layers, s.kv_heads, s.head_dim, s.blocks, dtype))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("output_operand_alias<") == len(Metadata._fields) and "seal_blocks" in text


@pytest.mark.parametrize(
    ("dim", "dtype", "sentence"),
    [(64, jnp.float32, "bfloat16 or float16, not float32"), (96, jnp.bfloat16, "head dim of 64 or 128, not 96")],
)
def test_what_the_kernel_cannot_do_is_said(dim, dtype, sentence):
    with pytest.raises(NotImplementedError, match=sentence):
        jax.eval_shape(seal, *arguments(1, 2, dim, 3, dtype))


def test_six_thread_blocks_share_a_multiprocessor():
    reserved, of_multiprocessor = 1024, 228 * 1024
    items = shared_memory(UnitShape(head_dim=128, kind="bf16"))
    assert items == {"keys": 16384, "values": 16384, "scratch": 4096, "barriers": smem.BARRIER}
    assert 6 * (sum(items.values()) + reserved) <= of_multiprocessor
