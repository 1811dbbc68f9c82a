"""Two processes of two devices: the losses of one; if one dies, the other does not hang."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import pytest

from . import steps

PATIENCE = 120  # seconds until a process counts as hanging, on a busy machine


def started(*dies_after):
    """Both processes; ``dies_after`` is for the second."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    root = str(pathlib.Path(__file__).parents[2])
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": root}
    command = [sys.executable, steps.__file__]
    return [
        subprocess.Popen(
            [*command, str(i), "2", port, *(dies_after if i else ())],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]


def ended(processes):
    """What each printed and said; none is left behind."""
    try:
        return [p.communicate(timeout=PATIENCE) for p in processes]
    finally:
        for p in processes:
            p.kill()


def test_losses_are_those_of_one_process():
    types = (jax.sharding.AxisType.Auto,) * 2
    alone = jax.make_mesh((1, 1), ("data", "model"), axis_types=types, devices=jax.devices()[:1])
    want = [float(x) for x in steps.losses(alone)]
    processes = started()
    for out, err in ended(processes):
        got = [float(line.split()[1]) for line in out.splitlines() if line.startswith("loss")]
        assert got == pytest.approx(want, rel=1e-5), err
    assert [p.returncode for p in processes] == [0, 0]


def test_one_that_dies_ends_the_other():
    """With an error that says so, within a bounded time."""
    processes = started("1")
    begun = time.monotonic()
    (out, err), _ = ended(processes)
    assert time.monotonic() - begun < PATIENCE
    assert processes[1].returncode == 17
    assert processes[0].returncode != 0
    assert out.count("loss") < steps.STEPS
    assert any(word in err for word in ("unhealthy", "Connection", "heartbeat", "peer"))
