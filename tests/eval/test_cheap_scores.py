"""Page scores from a part of the sketch: bounds against float64 masses of the keys, and what breaks them."""

from __future__ import annotations

import functools
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.studies import cheap_scores as cheap
from eval.studies.scan_less_step import _truth
from eval.studies.scan_less_variants import FULL, VARIANTS, Variant, prediction
from eval.studies.shadow import head_truth
from skg_jax.kv import cache as kv
from skg_jax.kv import sketch
from skg_jax.kv.scoring import layer_scores
from skg_jax.types import BLOCK
from tests.kv import oracle
from tests.kv.oracle import f64

LAYERS, KV_HEADS, GROUP, DIM, BATCH, BLOCKS, PAGE = 2, 3, 2, 24, 2, 5, 16
LENGTH = jnp.array([4 * BLOCK + 7, 2 * BLOCK])
HOWS = get_args(cheap.Move.__value__)

bit_scores = jax.jit(cheap.bit_scores, static_argnames=("page", "bits"))
moved = jax.jit(cheap.moved, static_argnames="how")


class Case(NamedTuple):
    cache: kv.PagedKVCache
    before: jax.Array  # [L, B, N, H]
    now: jax.Array
    known: np.ndarray  # [B, M]


@functools.cache
def case() -> Case:
    """Keys with an offset and a spread of their own in every channel; blocks that are not full hold NaN."""
    rng = np.random.default_rng(0)
    cache = kv.init(LAYERS, KV_HEADS, DIM, BATCH, BLOCKS * BLOCK)
    blocks, full = cache.page_table.ravel(), (jnp.arange(BLOCKS) < LENGTH[:, None] // BLOCK).ravel()
    shape = len(blocks), KV_HEADS, BLOCK, DIM
    for layer in range(LAYERS):
        channel = lambda: rng.normal(size=(1, KV_HEADS, 1, DIM))
        keys = rng.normal(size=shape) * np.exp(channel()) + 3 * channel()
        keys = jnp.where(full[:, None, None, None], jnp.asarray(keys, jnp.float32), jnp.nan)
        cache = kv.write_blocks(cache, jnp.int32(layer), blocks, keys, keys, jnp.full(len(blocks), BLOCK))
    cache = kv.seal(cache._replace(written=cache.written + 1), blocks, full)
    before, other = rng.normal(size=(2, LAYERS, BATCH, KV_HEADS * GROUP, DIM)).astype(np.float32)
    known = np.asarray(full).reshape(BATCH, BLOCKS).repeat(BLOCK // PAGE, axis=1)
    return Case(cache, jnp.asarray(before), jnp.asarray(before + 0.5 * other), known)


def exact(q) -> np.ndarray:
    """[L, B, K, G, M] float64."""
    cache = case().cache
    keys = f64(cache.k)[:, np.asarray(cache.page_table)].swapaxes(2, 3)
    grouped = f64(q).reshape(LAYERS, BATCH, KV_HEADS, GROUP, DIM)
    return oracle.log_mass(oracle.logits(grouped, keys.reshape(*keys.shape[:3], -1, DIM)), PAGE)


def outside(scores, q) -> np.ndarray:
    """Of the pages with a score; the others must say that nothing is known."""
    use = np.broadcast_to(case().known[None, :, None, None], scores.lower.shape)
    assert np.isneginf(np.asarray(scores.lower)[~use]).all() and np.isposinf(np.asarray(scores.upper)[~use]).all()
    inside = (f64(scores.lower) <= exact(q)) & (exact(q) <= f64(scores.upper))
    return ~inside[use]


def width(scores) -> np.ndarray:
    use = np.broadcast_to(case().known[None, :, None, None], scores.lower.shape)
    return (f64(scores.upper) - f64(scores.lower))[use]


def scan(q):
    return cheap.full_scores(q, case().cache, LENGTH, PAGE)


@pytest.mark.parametrize("bits", range(5))
def test_bounds_of_leading_bits_hold(bits):
    found = bit_scores(case().now, case().cache, LENGTH, PAGE, bits)
    assert not outside(found, case().now).any()
    assert outside(cheap.shrunk(found, 0.01), case().now).mean() > 0.1


def test_every_bit_brings_the_bounds_closer_and_four_are_the_sketch():
    """With the group's bounds, or closer ones: half a step in every channel limits them too."""
    of_bits = [bit_scores(case().now, case().cache, LENGTH, PAGE, bits) for bits in range(5)]
    widths = [np.median(width(x)) for x in of_bits]
    assert widths == sorted(widths, reverse=True)
    group = layer_scores(case().now[1], case().cache, jnp.int32(1), LENGTH, PAGE, "group", "xla")
    np.testing.assert_allclose(of_bits[4].estimate[1], group.estimate, rtol=1e-5, atol=1e-4)
    assert (of_bits[4].lower[1] >= group.lower - 1e-3).all() and (of_bits[4].upper[1] <= group.upper + 1e-3).all()


@pytest.mark.parametrize("how", HOWS)
def test_bounds_of_moved_scores_hold(how):
    found = moved(scan(case().before), case().before, case().now, case().cache, how)
    assert not outside(found, case().now).any()


@pytest.mark.parametrize("how", HOWS)
def test_scores_that_did_not_move_are_caught(how):
    """Negative control: the old bounds for the new query; and the new ones are wider by what the move asks for."""
    old = scan(case().before)
    assert outside(old, case().now).mean() > 0.1
    assert (width(moved(old, case().before, case().now, case().cache, how)) > 0).all()
    same = moved(old, case().now, case().now, case().cache, how)
    np.testing.assert_allclose(same.estimate, old.estimate, atol=1e-5)
    assert (width(same) <= width(old) + 0.01).all()


def test_boxes_bound_a_move_at_least_as_well_as_a_ball():
    ball, box = (moved(scan(case().before), case().before, case().now, case().cache, how) for how in ("ball", "box"))
    assert (width(box) <= width(ball) + 1e-3).all()


@pytest.mark.parametrize(("share", "blocks"), [(0.0, (0, 0)), (0.5, (3, 1)), (1.0, (5, 2))])
def test_refinement_takes_whole_blocks_of_the_largest_rank(share, blocks):
    coarse = bit_scores(case().now, case().cache, LENGTH, PAGE, 0)
    fine = scan(case().now)
    found = cheap.refined(coarse, fine, fine.estimate, share, LENGTH, PAGE)
    known = case().known[None, :, None, None]
    taken = np.asarray((found.upper == fine.upper) & (found.upper != coarse.upper))
    by_block = taken.reshape(*taken.shape[:-1], BLOCKS, -1)
    assert (by_block.all(-1) == by_block.any(-1)).all() and not (taken & ~known).any()
    for row, most in enumerate(blocks):  # a block without a record may rank among them, last
        count = by_block[:, row].all(-1).sum(-1)
        assert (count == min(most, int(LENGTH[row]) // BLOCK)).all()


def test_a_scan_has_the_bytes_of_the_record():
    for dim, group in ((64, 3), (128, 4)):
        record = sum(x.nbytes for x in sketch.empty((), dim))
        assert record == 36 * dim + 144
        assert Variant("", bits=0, refine=1.0).share(0, dim, group) * record == pytest.approx(record)
        assert Variant("", bits=4).share(0, dim, group) * record == record - 128  # no norm for each token
        assert Variant("", 2, "ball").mean_share(dim, group) * record == pytest.approx(
            (record + 48 * group + 2 * dim + 4) / 2
        )


def test_names_of_variants_differ_and_the_full_scan_predicts_what_was_measured():
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    assert prediction(VARIANTS[0])["speedup"] == 1 and VARIANTS[0].name == FULL


class Evidence(NamedTuple):
    log_lower: np.ndarray
    log_upper: np.ndarray
    unread: np.ndarray


def test_truth_of_a_step_is_that_of_its_heads():
    rng = np.random.default_rng(1)
    layers, kv_heads, group, pages, dim = 2, 2, 3, 5, 4
    k = rng.normal(size=(layers, kv_heads, pages * PAGE - 3, dim))
    q = rng.normal(size=(layers, kv_heads, group, dim))
    logits = np.einsum("lkgh,lkth->lkgt", q, k) / np.sqrt(dim)
    mass = np.log(np.add.reduceat(np.exp(logits), np.arange(0, k.shape[2], PAGE), axis=-1))
    read = rng.random((layers, kv_heads, pages)) < 0.4
    read[..., -1] = True
    lower, upper = mass - rng.random(mass.shape), mass + 0.3 - rng.random(mass.shape) * 0.4
    padded = lambda x: np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 2)])[:, None]
    omega = rng.dirichlet(np.ones(layers * kv_heads * group)).reshape(layers, -1)
    found = _truth(mass, Evidence(padded(lower), padded(upper), padded(~read)), omega)
    total = np.zeros(4)
    for layer, head, member in np.ndindex(layers, kv_heads, group):
        at = layer, head, member
        bounds = lower[at], upper[at]
        delta, x, _, wrong, units = head_truth(q[at], k[layer, head], k[layer, head], read[layer, head], bounds, PAGE)
        weight = omega[layer, head * group + member]
        total += np.array([weight * delta, weight * x, wrong, units])
    got = [found[name] for name in ("delta", "residual", "violations", "units")]
    np.testing.assert_allclose(got, total, rtol=1e-10)
    assert 0 < found["violations"] < found["units"]
