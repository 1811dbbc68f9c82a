"""What one device makes of the short training that many devices are held to."""

import jax
import many_devices
import pytest
import training

from . import steps


@pytest.fixture(scope="session")
def curve():
    """The loss of each step."""
    with jax.numpy_dtype_promotion("standard"), pytest.MonkeyPatch.context() as short:
        for name, value in steps.SHORT.items():
            short.setattr(training, name, value)
        return list(many_devices.on_one_device(steps.SMALL, steps.TEXT, steps.STEPS))
