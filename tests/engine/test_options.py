"""Options refuse what cannot be served, each with a sentence; budgets as people write them."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from skg_jax.engine.options import Options, RequestError, budget
from skg_jax.guard import GuardConfig, default_tiers

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "field, values, sentence",
    [
        ("max_tokens", [0, -1], "max_tokens must be at least 1, not {}."),
        ("pages", [0.0, -0.1, NAN, INF], "pages must be a positive number, not {}."),
        ("pages", [1.5], "pages counts whole pages from 1 up, not {}."),
        ("page_size", [0, 17, 128], "page_size must be one of (16, 32, 64), not {}."),
        ("dense_below", [-1], "dense_below must be at least 0 tokens (0: never), not {}."),
        ("temperature", [-0.1, NAN, INF], "temperature must be at least 0, not {}."),
        ("top_k", [-1], "top_k must be at least 0 (0: off), not {}."),
        ("top_p", [0.0, -0.5, 1.1, NAN], "top_p must be in (0, 1], not {}."),
        ("min_p", [-0.1, 1.5, NAN], "min_p must be in [0, 1], not {}."),
        ("seed", [-1, 2**32], "seed must be in [0, 2**32), not {}."),
    ],
)
def test_a_field_out_of_range_is_named_with_its_value(field, values, sentence):
    for value in values:
        with pytest.raises(RequestError) as caught:
            Options(**{field: value})
        assert str(caught.value) == sentence.format(value)


def test_other_refusals():
    with pytest.raises(RequestError, match="a stop string must not be empty"):
        Options(stop=("a", ""))
    with pytest.raises(RequestError, match="with topp, pages is the mass to keep and below 1, not 2"):
        Options(selector="topp", pages=2.0)
    with pytest.raises(ValueError, match="unknown selector 'best'; choose one of .*topk"):
        Options(selector="best")


def test_the_edges_are_allowed():
    Options(max_tokens=1, temperature=0.0, top_p=1.0, min_p=0.0, seed=2**32 - 1, pages=1.0, dense_below=0)
    Options(min_p=1.0, seed=0, dense_below=2**40, pages=0.999, selector="topp")


@pytest.mark.parametrize(
    "text, value", [("0.1", 0.1), ("10%", 0.1), (" 2.5% ", 0.025), ("64", 64.0), ("1", 1.0), ("1%", 0.01), ("0", 0.0)]
)
def test_a_budget_is_a_share_or_a_count(text, value):
    assert budget(text) == value


@pytest.mark.parametrize("text", ["100%", "250%"])
def test_all_pages_are_no_budget(text):
    with pytest.raises(RequestError, match=f"a page budget of {text} is dense attention"):
        budget(text)


@pytest.mark.parametrize("text", ["", "%", "ten", "10%%", "1/3"])
def test_what_is_no_number_is_no_budget(text):
    with pytest.raises(RequestError, match="is no page budget; write 0.1 or 10% for a share, 64 for a count"):
        budget(text)


@pytest.mark.parametrize("pages, tiers", [(0.1, (0.25,)), (0.5, ()), (0.4, ()), (64.0, (160.0,)), (1.0, (3.0,))])
def test_the_default_tier_fits_every_first_budget(pages, tiers):
    assert default_tiers(pages) == tiers == GuardConfig().after(pages).tiers
    GuardConfig().policy(0.2, pages, [7])  # raises where it does not fit


@pytest.mark.parametrize("pages", [0.0, -0.5, INF, NAN])
def test_what_is_no_budget_has_no_tier(pages):
    assert default_tiers(pages) == ()


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("max_tokens", 2.5, "max_tokens must be a whole number, not 2.5"),
        ("max_tokens", "3", "max_tokens must be a whole number, not '3'"),
        ("max_tokens", True, "max_tokens must be a whole number, not True"),
        ("temperature", "hot", "temperature must be a number, not 'hot'"),
        ("seed", 1.0, "seed must be a whole number or None, not 1.0"),
        ("guard", {}, "guard must be a GuardConfig, not {}"),
    ],
)
def test_values_of_another_kind_are_refused(field, value, sentence):
    options = object.__new__(Options)  # jaxtyping, which checks under test alone, would speak first
    for other in dataclasses.fields(Options):
        default = other.default
        object.__setattr__(options, other.name, value if other.name == field else default)
    with pytest.raises(RequestError, match=re.escape(sentence)):
        options.__post_init__()
