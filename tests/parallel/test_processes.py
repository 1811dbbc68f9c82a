"""Processes by ``jax.distributed``: one device's results and losses; one dies, others go on."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from . import steps

PATIENCE = 120  # seconds until a process counts as hanging, on a busy machine
DEVICES, DIES_AT = 8, 2


def started(count, checkpoints, *dies_at):
    """All processes; ``dies_at`` is for the last."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    root = pathlib.Path(__file__).parents[2]
    flags = f"--xla_force_host_platform_device_count={DEVICES // count}"  # the last one counts
    env = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {flags}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "notebooks")]),
    }
    command = [sys.executable, steps.__file__]
    return [
        subprocess.Popen(
            [*command, str(i), str(count), port, str(checkpoints), *dies_at[: i == count - 1]],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]


def ended(processes):
    """The losses each printed, by step, and what it said; none is left behind.

    All have judged the ops before.
    """
    try:
        told = [p.communicate(timeout=PATIENCE) for p in processes]
    finally:
        for p in processes:
            p.kill()
    lines = [[line.split() for line in out.splitlines()] for out, _ in told]
    for words, (_, err) in zip(lines, told, strict=True):
        assert [w[1] for w in words if w[:1] == ["judged"]] == [op.name for op in steps.JUDGED], err
    losses = [{int(w[1]): float(w[2]) for w in its if w[:1] == ["loss"]} for its in lines]
    return list(zip(losses, (err for _, err in told), strict=True))


def from_step(first, curve):
    """The curve from that step on, which is counted from 1."""
    return pytest.approx({i: x for i, x in enumerate(curve, 1) if i >= first}, rel=1e-5)


def test_four_of_which_one_dies_and_two_go_on(tmp_path, curve):
    """The others end with an error that says so, in time; the last whole state is gone on from."""
    pytest.importorskip("orbax.checkpoint")
    processes = started(4, tmp_path, str(DIES_AT))
    begun = time.monotonic()
    *others, (last, _) = ended(processes)
    assert time.monotonic() - begun < PATIENCE
    assert processes[-1].returncode == 17
    for process, (losses, err) in zip(processes, others, strict=False):
        assert process.returncode not in (0, 17)
        assert any(word in err for word in ("unhealthy", "Connection", "heartbeat", "peer")), err
        assert max(losses) <= DIES_AT
    want = {i: x for i, x in enumerate(curve, 1) if i <= DIES_AT}
    assert last == pytest.approx(want, rel=1e-5)

    processes = started(2, tmp_path)
    for losses, err in ended(processes):
        assert losses == from_step(DIES_AT, curve), err
    assert [p.returncode for p in processes] == [0, 0]
