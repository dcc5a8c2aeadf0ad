"""Whole decode steps at a published model's size: the same command at a toy size, through XLA."""

import json

import jax
import numpy as np
import pytest

from models import decoder, published
from models.config import ModelConfig
from skg_jax.bench import cli, steps, synthesis, synthetic

TOY = ModelConfig(
    architecture="llama", vocab_size=97, embed_dim=48, mlp_dim=64, num_layers=3, num_heads=6, num_kv_heads=2,
    head_dim=32, max_context=4096,
)  # fmt: skip


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(published._CONFIGS, "toy", TOY)


def test_logit_spread_is_found_again_from_fresh_pages():
    wanted = np.array([0.02, 0.1, 0.3, 0.6])
    for dropped, sigma in zip(wanted, synthesis.logit_spread(wanted, 0.1, count=1024), strict=True):
        found = synthesis.dropped_mass(sigma, 0.1, count=1024, sets=32, seed=5)
        assert found == pytest.approx(dropped, rel=0.3, abs=0.01)
    assert synthesis.logit_spread(np.array([0.9]), 0.1, count=1024)[0] == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"])
def test_profiles_are_there_and_ordered(name):
    found = synthesis.profile(name)
    assert found.model == name and (np.diff(found.dropped_mass) >= 0).all()
    assert 0 <= found.dropped_mass[0] and found.dropped_mass[-1] <= 1
    assert found.residual < found.bound_alone


def test_an_unknown_profile_or_model_is_refused_with_the_names_there_are(capsys):
    with pytest.raises(ValueError, match="choose one of .*smollm2"):
        synthesis.profile("gpt-2")
    assert cli.main(["decode", "--config", "gpt-2"]) == 2
    assert "llama-3.1-8b" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_refused_before_it_is_made():
    large = published.get("llama-3.1-8b")
    with pytest.raises(ValueError, match=r"llama-3.1-8b take about 64 GB to make, and this machine has 24; .*--layers"):
        synthetic.check_room("llama-3.1-8b", large, 24 * 10**9)
    synthetic.check_room("llama-3.1-8b", large, 80 * 10**9)
    synthetic.check_room("toy", TOY, None)


def test_the_synthetic_query_bias_points_along_the_keys():
    config = synthesis.synthetic_config(TOY)
    along = synthesis.directions(config, jax.random.key(1))
    spreads = np.full((3, 2), 2.0)
    params = synthesis.synthetic_params(config, spreads, along, jax.random.key(0))
    bias = np.asarray(decoder.stacked(params, "attn", "q", "bias"), np.float64).reshape(3, 2, 3, 32)
    reach = np.einsum("lkgh,lkh->lkg", bias, np.asarray(along, np.float64))
    # logits along u: size * SIGNAL a / sqrt(H), and noise of the keys: size / sqrt(H)
    np.testing.assert_allclose(reach / 32**0.5 * (synthesis.SIGNAL**2 + 1) ** 0.5, 2.0, rtol=0.02)


def test_a_schedule_forces_the_share_of_rows_that_was_asked_for():
    plan = steps.forced_schedule(4000, 8, 0.05, 2, np.random.default_rng(0))
    assert set(np.unique(plan)) == {steps.FREE, 2}
    assert (plan == 2).mean() == pytest.approx(0.05, abs=0.006)


def test_the_whole_command(toy, tmp_path):
    output = tmp_path / "out.json"
    code = cli.main([
        "decode", "--config", "toy", "--cells", "2x1280", "2x1280@640:guarded", "--steps", "48", "--dense-layers", "2",
        "--output", str(output), "--modes", "cudnn", "sparse", "guarded", "forced-fallback",
    ])  # fmt: skip
    assert code == 0
    cell, shorter = json.loads(output.read_text())["cells"]
    assert shorter["context"] == 640 and list(shorter["modes"]) == ["guarded"]
    assert shorter["modes"]["guarded"]["step_ms"]["n"] == 144 and cell["compilations_while_timed"] == 0
    modes = cell["modes"]
    assert {name: m["step_ms"]["n"] for name, m in modes.items() if "forced" not in name} == dict.fromkeys(
        ("cudnn", "sparse", "guarded"), 48
    )
    assert modes["guarded"]["broken_audits"] == 0
    assert modes["sparse"]["pages_read"] < 0.3
    assert modes["forced-fallback"]["pages_read"] == 1
    guarded = modes["guarded"]
    assert sum(guarded["rows"].values()) == 96
    assert guarded["first_step_of_a_turn_ms"]["n"] == 1 and len(guarded["each_step_us"]) == 48
    assert 0 < guarded["bound"] <= guarded["bound_alone"]
    assert 0 < guarded["audited_share"] < 0.05


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--cells", "8x"], "'8x' is no cell; write 8x65536"),
        (["--cells", "0x4096"], "a batch is at least 1"),
        (["--cells", "1x64@128"], "a context no longer than the cache"),
        (["--cells", "1x1024"], "1024 tokens leave no room for 1008 steps"),
        (["--steps", "1"], "steps must be at least 48"),
        (["--modes", "nonsense"], "there is no mode 'nonsense'"),
        (["--pages", "nan"], "pages must lie between 0 and 1"),
        (["--output", "nowhere/at/all.json"], "there is no folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(toy, capsys, words, sentence):
    assert cli.main(["decode", "--config", "toy", *words]) == 2
    told = capsys.readouterr().err
    assert sentence in told and told.count("\n") == 1


def test_the_event_that_is_counted_is_that_of_compiling():
    """Negative control of "nothing was compiled while steps were timed": a new function is."""
    seen = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: seen.append(event))
    try:
        jax.jit(lambda x: x * 3 + 1)(np.arange(7.0)).block_until_ready()
    finally:
        jax.monitoring.clear_event_listeners()
    assert synthetic.COMPILATION in seen
