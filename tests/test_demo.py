"""The demo at a small size: both models agree, decoding agrees with training, one compilation."""

import functools
import sys

import demo  # pyproject puts notebooks/ on the path
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_transformer as model
import tiny_transformer_plain as plain
import training

TEXT = training.python_documentation()
SMALL = model.Config(len(TEXT.characters), width=32, layers=1, hidden=48, context=12)


def weights(seed=0):
    return model.init(SMALL, jax.random.key(seed))


def test_the_text_is_there_and_its_end_is_held_out():
    assert len(TEXT.train) > 400_000
    assert 0.04 < len(TEXT.held_out) / len(TEXT.train) < 0.06
    decoded = "".join(TEXT.characters[i] for i in TEXT.train[:50])
    assert TEXT.encode(decoded) == TEXT.train[:50].tolist()
    assert "statement" in "".join(TEXT.characters[i] for i in TEXT.train[:200])


def test_both_models_have_the_same_loss_and_gradient():
    tokens = jnp.asarray(TEXT.train[: 3 * 13].reshape(3, 13))
    both = [
        jax.jit(jax.value_and_grad(functools.partial(m.loss, SMALL)))(weights(), tokens)
        for m in (model, plain)
    ]
    (loss, gradient), (plain_loss, plain_gradient) = both
    assert loss == pytest.approx(float(plain_loss), rel=1e-6)
    for ours, theirs in zip(*map(jax.tree.leaves, (gradient, plain_gradient)), strict=True):
        scale = float(jnp.max(jnp.abs(theirs))) or 1.0
        np.testing.assert_allclose(ours / scale, theirs / scale, atol=2e-6)


def test_two_steps_of_training_side_by_side(monkeypatch):
    monkeypatch.setattr(training, "SEQUENCE", SMALL.context)
    steps = list(training.train(SMALL, weights(), TEXT, steps=2, seed=0))
    assert len(steps) == 2
    for step in steps:
        assert step.losses[0] == pytest.approx(step.losses[1], rel=1e-6)
        assert min(step.seconds) > 0
    assert steps[0].losses[0] != steps[1].losses[0]


def test_training_lowers_the_loss():
    tokens = TEXT.train[: 4 * 13].reshape(4, 13)
    state, losses = training.start(weights()), []
    loss = functools.partial(model.loss, SMALL)
    for _ in range(80):
        state, value = training.train_step(loss, 80, state, tokens)
        losses.append(float(value))
    assert losses[-1] < losses[0] - 1


def test_every_seed_has_its_own_batches():
    first, again, other = (next(training.batches(TEXT.train, seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_writing_compiles_once_and_agrees_with_the_whole_pass():
    writer = demo.Writer(SMALL, weights(), seed=0)
    prompt = TEXT.encode("The ")
    written = list(writer.write(prompt))
    assert written[:4] == prompt
    assert len(written) == SMALL.context
    assert writer.compilations == 1
    assert writer.error() < 1e-5


def test_decoding_does_not_look_ahead():
    """Logits of a position depend on no later token."""
    cache, seen = model.empty_cache(SMALL), []
    tokens = jnp.asarray(TEXT.train[: SMALL.context])
    step = jax.jit(functools.partial(model.decode, SMALL))
    for position in range(4):
        logits, cache = step(weights(), cache, tokens[position][None], jnp.int32(position))
        seen.append(logits[0])
    other = tokens.at[4:].set(0)
    whole = model.logits(SMALL, weights(), other[None])[0]
    np.testing.assert_allclose(jnp.stack(seen), whole[:4], atol=1e-5)


def test_the_whole_of_it(tmp_path, capsys):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    demo.main(["--steps", "2", "--out", str(tmp_path / "curves.png")])
    said = capsys.readouterr().out
    assert "compilations: 1" in said
    assert "ratio" in said
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", ""], "a prompt is 1 to 127 characters"),
        (["--prompt", "日本"], "each of them in the text"),
        (["--prompt", "a" * 128], "1 to 127"),
        (["--steps", "0"], "at least one step"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(SystemExit, match=r"fuel-jax\[report\]"):
        demo.require_report_packages()
