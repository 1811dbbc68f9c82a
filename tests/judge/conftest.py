"""What tests of suites share."""

import jax
import pytest

import fuel_jax
from fuel_jax.types import Floats


@pytest.fixture
def as_users_run_it():
    """The suite is stricter than the settings a measurement is for."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def doubling():
    """An op without kernels."""

    def twice(x: Floats[jax.Array, "*shape"]):
        return 2 * x

    return fuel_jax.Op(twice, precision=fuel_jax.Precision(2e-6))
