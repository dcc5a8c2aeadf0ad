"""Checksums notice every single change and the regular ones; the scrub says where."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.kv import cache as kv
from skg_jax.kv import integrity
from skg_jax.kv.cache import PagedKVCache
from skg_jax.types import BLOCK

L, P, K, H = 2, 5, 2, 10
OPEN, STALE = 3, 4  # blocks of the pool that are not sealed any more, or not yet

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]

checksum = jax.jit(integrity.checksum)


@functools.cache
def sealed(dtype=jnp.float32) -> PagedKVCache:
    """Random blocks with their checksums, two of them without a claim to match."""
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(L, P, K, BLOCK, H)), dtype) for _ in range(2))
    version, written = np.zeros(P, np.int32), np.zeros(P, np.int32)
    version[OPEN], written[STALE] = kv.NEVER, 1
    cache = kv.init(L, K, H, 1, P * BLOCK, dtype)
    return cache._replace(
        k=k, v=v, k_sum=checksum(k), v_sum=checksum(v), sealed=jnp.asarray(version), written=jnp.asarray(written)
    )


def altered(cache: PagedKVCache, name: str, at: tuple[int, int, int], change) -> PagedKVCache:
    """The cache after `change` of the raw bits [64, H] of one layer, block and head, behind its back."""
    pool = np.array(getattr(cache, name))
    pool[at] = change(pool[at].view(f"u{pool.itemsize}")).view(pool.dtype)
    return cache._replace(**{name: jnp.asarray(pool)})


def flip(bit: int, channel: int = 7):
    def change(bits):
        bits[37, channel] ^= bits.dtype.type(1 << bit)
        return bits

    return change


def swap_tokens(bits):
    bits[[2, 11]] = bits[[11, 2]]
    return bits


def swap_far_tokens(bits):
    bits[[0, 63]] = bits[[63, 0]]
    return bits


def swap_channels(bits):
    """Channels 2i and 2i + 1 of every token: the halves of a word where elements have 2 bytes."""
    return bits.reshape(BLOCK, -1, 2)[..., ::-1].reshape(bits.shape).copy()


def negate_token(bits):
    bits[5] ^= bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return bits


def another_value(bits):
    bits[63, 0] = bits[0, 0]
    return bits


def reverse_tokens(bits):
    return bits[::-1].copy()


CHANGES = [swap_tokens, swap_far_tokens, swap_channels, negate_token, another_value, np.zeros_like, reverse_tokens]


def murmur(h: int) -> int:
    """fmix32 of MurmurHash3, in Python's integers."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ h >> shift) * factor % 2**32
    return h


def by_hand(block: np.ndarray) -> list[int]:
    """Checksums of one head's block [64, H] from the bytes of each quarter, read as little-endian words."""
    words = (np.frombuffer(block[at : at + 16].tobytes(), "<u4").tolist() for at in range(0, BLOCK, 16))
    return [sum(murmur((w + i * 0x9E3779B9) % 2**32) for i, w in enumerate(quarter)) % 2**32 for quarter in words]


def test_the_oracle_mixes_as_published():
    """MurmurHash3_x86_32 of nothing is the finaliser of its seed."""
    assert [murmur(seed) for seed in (0, 1, 0xFFFFFFFF)] == [0, 0x514E28B7, 0x81F16F39]


@pytest.mark.parametrize("dtype", DTYPES)
def test_checksums_are_those_of_the_bytes(dtype):
    keys = sealed(dtype).k
    expected = [by_hand(block) for block in np.asarray(keys).reshape(-1, BLOCK, H)]
    np.testing.assert_array_equal(checksum(keys), np.reshape(expected, (L, P, K, 4)))


def test_the_even_channel_is_the_low_half():
    one = np.zeros((16, H), np.uint16)
    one[0, :2] = 0x3C00, 0x4000
    expected = murmur(0x40003C00) + sum(murmur(i * 0x9E3779B9 % 2**32) for i in range(1, 8 * H))
    assert int(checksum(jnp.asarray(one.view(np.float16)))[0]) == expected % 2**32


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_intact_cache_scrubs_clean(dtype):
    assert integrity.scrub(sealed(dtype)) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["k", "v"])
def test_any_flipped_bit_is_found_and_located(dtype, name):
    cache = sealed(dtype)
    for bit, channel in itertools.product(range(8 * cache.k.dtype.itemsize), (6, 7)):  # both halves of a word
        found = integrity.scrub(altered(cache, name, (1, 2, 1), flip(bit, channel)))
        assert found == [integrity.Mismatch(1, 2, {"k": "keys", "v": "values"}[name])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_tokens_are_found(dtype, change):
    assert integrity.scrub(altered(sealed(dtype), "k", (0, 1, 0), change)) == [integrity.Mismatch(0, 1, "keys")]


def test_blocks_that_are_open_or_stale_are_not_judged():
    cache = sealed()
    for block in (OPEN, STALE):
        cache = altered(cache, "k", (0, block, 0), negate_token)
    assert integrity.scrub(cache) == []


def test_several_faults_are_all_listed_and_read_as_sentences():
    cache = altered(altered(sealed(), "v", (0, 2, 0), swap_tokens), "k", (1, 0, 1), flip(3))
    assert [str(bad) for bad in integrity.scrub(cache)] == [
        "the keys of block 0 in layer 1 do not match their checksum",
        "the values of block 2 in layer 0 do not match their checksum",
    ]


def test_a_quarter_has_a_sum_of_its_own():
    before, after = (np.asarray(checksum(x)) for x in (sealed().k, altered(sealed(), "k", (0, 1, 0), flip(0)).k))
    changed = np.argwhere(before != after)
    np.testing.assert_array_equal(changed, [[0, 1, 0, 37 // 16]])


# --- regular changes, of which a linear hash misses many ----------------------------------------------------------


def plain(x) -> np.ndarray:
    """Every word times its own odd constant, summed: what the checksum must not be."""
    words = np.asarray(x).reshape(len(x), -1).view(np.uint32).astype(np.uint64)
    odd = (np.arange(1, words.shape[1] + 1) * 0x9E3779B9 & 0xFFFFFFFF) | 1
    return (words * odd.astype(np.uint64)).sum(1) & 0xFFFFFFFF


REGULAR = {
    "negated token": lambda x: x.at[:, 3].multiply(-1),
    "odd channels negated": lambda x: x.at[:, 3, 1::2].multiply(-1),
    "negated": lambda x: -x,
    "doubled": lambda x: 2 * x,
    "tokens swapped": lambda x: x.at[:, jnp.array([2, 9])].set(x[:, jnp.array([9, 2])]),
    "neighbours swapped": lambda x: x.reshape(-1, 16, 8, 2)[..., ::-1].reshape(x.shape),
    "halves swapped": lambda x: jnp.roll(x, x.shape[-1] // 2, axis=-1),
    "moved by a token": lambda x: jnp.roll(x, 1, axis=1),
    "reversed": lambda x: x[:, ::-1],
}


@pytest.mark.parametrize(
    ("dtype", "control"),
    [
        (jnp.float32, {"negated token", "odd channels negated"}),
        (jnp.bfloat16, {"odd channels negated"}),
        (jnp.float16, {"odd channels negated"}),
    ],
)
def test_regular_changes_of_many_pages_are_all_noticed(dtype, control):
    pages = jnp.asarray(np.random.default_rng(1).normal(size=(4000, 16, 16)), dtype)
    before, missed = checksum(pages), set()
    for name, change in REGULAR.items():
        assert (np.asarray(checksum(change(pages))) != np.asarray(before)).all(), name
        missed |= {name} if (plain(change(pages)) == plain(pages)).any() else set()
    assert missed >= control
