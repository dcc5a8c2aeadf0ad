"""The audit mass kernel: interpreted against float64, lowered for sm_90, its checksum on emulated lanes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.kv import integrity, sketch
from skg_jax.pallas import audit_mass as module
from skg_jax.pallas import smem
from skg_jax.pallas.audit_mass import AuditMassConfig, audit_mass, logit_error
from skg_jax.pallas.shapes import AUDIT_MASS_SHAPES
from tests.pallas import emulated
from tests.pallas import mass_cases as cases
from tests.pallas.decode_cases import races_found

SMALL = AuditMassConfig(blocks=2, stages=2)
PADDING = (1, 4, 5, 6, 7)


@functools.cache
def compiled(page_size: int, config: AuditMassConfig = SMALL):
    return jax.jit(functools.partial(audit_mass, page_size=page_size, config=config, interpret=True))


@pytest.mark.parametrize(
    ("page", "sizes", "units", "dtype"),
    [
        (16, (2, 2, 8, 2, 5, 64), 21, jnp.bfloat16),
        (32, (1, 3, 6, 2, 4, 64), 9, jnp.float16),  # three heads: a group is padded to a tile
        (64, (3, 1, 8, 1, 3, 128), 9, jnp.bfloat16),
    ],
)
@pytest.mark.parametrize("norm", [1.0, 25.0])
def test_masses_are_those_of_float64_and_checksums_those_of_the_cache(page, sizes, units, dtype, norm):
    case = cases.make(sizes, units, page, dtype, norm, PADDING)
    found = compiled(page)(case.q, case.k, *case.units)
    mass, reach = cases.exact(case, page)
    error = np.abs(np.asarray(found.log_mass)[case.valid] - mass)
    assert (error <= logit_error(sizes[-1]) * reach + 1e-5).all()
    keys, _ = cases.keys_and_queries(case, page)
    np.testing.assert_array_equal(np.asarray(found.checksum)[case.valid], integrity.checksum(jnp.asarray(keys)))
    assert cases.padding_is_blank(found, case) and not races_found()


def test_a_changed_key_changes_the_checksum_of_its_unit_alone():
    case = cases.make((2, 2, 8, 2, 5, 64), 21, 16)
    layer, _, head, block, part = (np.asarray(i) for i in case.units)
    at = (layer[3], block[3], head[3], 16 * part[3] + 7, 33)
    swapped = case.k.at[at].set(case.k[at] + 1)
    before, after = (compiled(16)(case.q, k, *case.units) for k in (case.k, swapped))
    same_slab = (layer == layer[3]) & (head == head[3]) & (block == block[3]) & (part == part[3])
    np.testing.assert_array_equal((np.asarray(before.checksum) != np.asarray(after.checksum))[:, 0], same_slab)


def test_nothing_but_padding_gives_zeros():
    case = cases.make((2, 2, 8, 2, 5, 64), 21, 16, padding=tuple(range(21)))
    assert cases.padding_is_blank(compiled(16)(case.q, case.k, *case.units), case)


def test_masses_alone_are_the_same_masses():
    case, alone = cases.make((2, 2, 8, 2, 5, 64), 21, 16), AuditMassConfig(blocks=2, stages=2, checksums=False)
    both, masses = (compiled(16, config)(case.q, case.k, *case.units) for config in (SMALL, alone))
    np.testing.assert_array_equal(masses.log_mass, both.log_mass)
    assert not np.asarray(masses.checksum).any() and not races_found()


@pytest.mark.parametrize("dim", [64, 128])
def test_the_bound_stays_inside_the_slack_of_the_audit(dim):
    norms = jnp.ones(1), jnp.ones((1, dim)) / dim**0.5
    slack = sketch.rounding_slack(norms[1], norms[0])  # of |q| / sqrt(H) = 1
    assert logit_error(dim) <= slack[0] * (1 - 1e-6)


def test_float32_sums_need_a_slack_that_grows_with_the_norms():
    """The control: a fixed slack is exceeded by large keys, so the bound has to scale."""
    case = cases.make((1, 1, 8, 1, 4, 128), 16, 64, norm=300.0)
    found = compiled(64)(case.q, case.k, *case.units)
    mass, reach = cases.exact(case, 64)
    error = np.abs(np.asarray(found.log_mass) - mass)
    assert error.max() > 1e-3 and (error <= logit_error(128) * reach + 1e-5).all()


# --- lowering --------------------------------------------------------------------------------------------------------


def lower(shape, dtype=jnp.bfloat16, config=None, key_dtype=None) -> str:
    s, struct = shape, jax.ShapeDtypeStruct
    q = struct((s.layers, s.batch, s.heads, s.head_dim), dtype)
    k = struct((s.layers, s.blocks, s.kv_heads, 64, s.head_dim), key_dtype or dtype)
    units = [struct((s.units,), jnp.int32)] * 5
    run = jax.jit(functools.partial(audit_mass, page_size=s.page_size, config=config, interpret=False))
    return run.trace(q, k, *units).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", AUDIT_MASS_SHAPES)
def test_every_named_shape_lowers_for_hopper_in_one_launch(name):
    assert lower(AUDIT_MASS_SHAPES[name]).count("mosaic_gpu_v2") == 1


SHAPE = AUDIT_MASS_SHAPES["llama-8b-b1-128k-page16"]


def changed(**fields):
    return type(SHAPE)(**{**vars(SHAPE), **fields})


@pytest.mark.parametrize(
    ("shape", "kinds", "sentence"),
    [
        (changed(head_dim=96), {}, "a head size of 64 or 128, not 96"),
        (changed(heads=128), {}, "at most 8 query heads per KV head, not 16"),
        (changed(page_size=8), {}, r"pages of \(16, 32, 64\) tokens, not 8"),
        (SHAPE, {"dtype": jnp.float32}, "both bfloat16 or both float16, not float32, float32"),
        (SHAPE, {"dtype": jnp.float16, "key_dtype": jnp.bfloat16}, "not float16, bfloat16"),
        (SHAPE, {"config": AuditMassConfig(stages=8)}, None),
        (changed(page_size=64), {"config": AuditMassConfig(blocks=7, stages=2), "dtype": jnp.float16}, None),
    ],
)
def test_what_the_kernel_cannot_do_is_said(shape, kinds, sentence):
    if sentence is None:
        lower(shape, **kinds)
        return
    with pytest.raises(NotImplementedError, match=sentence):
        lower(shape, **kinds)


def test_fields_are_checked():
    with pytest.raises(ValueError, match="blocks=0: a launch needs at least one block."):
        AuditMassConfig(blocks=0)
    with pytest.raises(ValueError, match="stages=9: a ring has 2 to 8 stages."):
        AuditMassConfig(stages=9)
    for page in (16, 32, 64):  # no ring that is allowed is too large
        assert sum(AuditMassConfig(stages=8).shared_memory(page, 128, jnp.bfloat16).values()) < smem.LIMIT


# --- the checksum, run for every lane of a warpgroup ------------------------------------------------------------------


def swizzled(keys: np.ndarray) -> np.ndarray:
    """[64, H] as TMA stores it: 8 rows of 64 channels are a KiB, 16-byte chunk i of row r in place i ^ r."""
    tiles = keys.reshape(8, 8, -1, 8, 8).transpose(0, 2, 1, 3, 4)  # row group, column, row, chunk, element
    row, place = np.arange(8)[:, None], np.arange(8)
    return np.ascontiguousarray(tiles[:, :, row, place ^ row])


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("warpgroup", [0, 1])
def test_lanes_sum_the_bits_of_a_swizzled_tile(monkeypatch, dim, warpgroup):
    block = emulated.install(monkeypatch, (module,), 128)
    block.lane = block.lane + 128 * warpgroup  # the warpgroup that checks is not the first of its block
    keys = np.random.default_rng(dim).normal(size=(64, dim)).astype(np.float16)
    sums = block.memory(np.zeros(4, np.int32))
    module._checksum_of_lanes(None, block.memory(swizzled(keys).view(np.int16)), sums, dim=dim)
    np.testing.assert_array_equal(sums.array.view(np.uint32), integrity.checksum(jnp.asarray(keys)))
