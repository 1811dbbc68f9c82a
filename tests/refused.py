"""Bad calls: each raises an error of ours, when traced, that begins with the op's name."""

import functools

import jax
import pytest

import fuel_jax


def refused(op, *args, match, error=fuel_jax.ArgumentError, **params):
    """Assert that the call is refused eagerly and in abstract evaluation, in these words.

    ``match`` is a regular expression found in the message after ``name: ``.
    """
    f = functools.partial(op, **params)
    abstract = lambda: jax.eval_shape(lambda: f(*args))
    for call in (lambda: f(*args), abstract):
        with pytest.raises(error, match=match) as caught:
            call()
        assert str(caught.value).startswith(f"{op.name}: ")
