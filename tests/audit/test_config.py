"""Options that make no sense are refused by name."""

import dataclasses

import pytest

from skg_jax.audit import AuditConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 48),
        ("rate", 0.0),
        ("rate", 1.01),
        ("rounds", ()),
        ("rounds", (2, 1)),
        ("rounds", (1, 0)),
        ("uniform_share", 0.0),
        ("uniform_share", 1.5),
        ("output_floor", 0.0),
        ("output_floor", float("nan")),
        ("sink_pages", -1),
        ("recent_pages", 0),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        AuditConfig(**{field: value})


def test_configs_are_values():
    assert AuditConfig(rate=0.02) == AuditConfig(rate=0.02) and hash(AuditConfig()) == hash(AuditConfig())
    assert AuditConfig(page_size=64).parts == 1 and AuditConfig(page_size=16).parts == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(AuditConfig(), "rate", 0.5)  # noqa: B010
