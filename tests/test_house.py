"""Rules of the house: who imports whom, what importing costs, what a pin does."""

import ast
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import fuel_jax
import pallas_kernels

ROOT = pathlib.Path(fuel_jax.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
KERNEL_FILES = sorted(pathlib.Path(pallas_kernels.__file__).parent.rglob("*.py"))
name = lambda path: str(path.relative_to(ROOT.parent))


def imported(path):
    """Dotted names a module imports; relative ones from the package root."""
    package = list(path.relative_to(ROOT.parent).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])])


@pytest.mark.parametrize("path", FILES + KERNEL_FILES, ids=name)
def test_only_public_jax(path):
    assert "jax._src" not in path.read_text()


@pytest.mark.parametrize("path", KERNEL_FILES, ids=name)
def test_kernels_know_nothing_of_ops(path):
    assert not [m for m in imported(path) if m.startswith("fuel_jax")]


@pytest.mark.parametrize("path", [p for p in FILES if p.parent == ROOT], ids=name)
def test_mechanism_imports_no_op(path):
    if path.name in ("__init__.py", "__main__.py"):
        pytest.skip("names everything, being the surface")
    assert not [m for m in imported(path) if m.startswith(("fuel_jax.ops", "fuel_jax.fused"))]


@pytest.mark.parametrize("path", [p for p in FILES if p.parent != ROOT / "judge"], ids=name)
def test_nothing_below_measures(path):
    if path.name == "__main__.py":
        pytest.skip("runs it, when asked to")
    assert not [m for m in imported(path) if m.startswith("fuel_jax.judge")]


@pytest.mark.parametrize("path", FILES + KERNEL_FILES, ids=name)
def test_a_file_is_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= 420
    assert path.stem not in ("utils", "common", "base", "helpers")


IMPORT = """
import sys
import fuel_jax
heavy = {"matplotlib", "rich", "gguf", "safetensors", "torch", "fuel_jax.judge"}
heavy = (heavy | {"jax.experimental.pallas"}) & set(sys.modules)
assert not heavy, heavy
from jax._src import xla_bridge
assert not xla_bridge._backends, "a device was opened"
"""


def test_importing_is_silent_and_opens_no_device():
    command = [sys.executable, *"-W error -c".split(), IMPORT]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert (run.stdout, run.stderr) == ("", "")


def test_a_pin_is_part_of_the_cache_key_of_the_program_around_it():
    traces = []
    op = fuel_jax.register_fused("twin", lambda x: x + 1)
    op.kernel("other")(lambda x: x + 1)

    @jax.jit
    def model(x):
        traces.append(op.explain(x).forward[0].why_not)
        return op(x)

    try:
        for _ in range(2):
            model(jnp.ones((2, 8), "float32"))
            with fuel_jax.using("xla"):
                model(jnp.ones((2, 8), "float32"))
        assert traces == [None, "xla is pinned"]
    finally:
        fuel_jax.unregister_fused("twin")


@pytest.mark.parametrize(("pin", "want"), [("xla", 2.0), ("negated", -2.0), (None, -2.0)])
def test_a_gradient_keeps_the_pin_of_its_forward(pin, want):
    backward = fuel_jax.FusedOp(
        lambda upstream: 2 * upstream, family="Backward", precision=fuel_jax.Precision(0)
    )
    backward.kernel("negated")(lambda upstream: -2 * upstream)
    op = fuel_jax.register_fused("doubled", lambda x: 2 * x, backward=backward)
    op.kernel("negated")(lambda x: 2 * x)
    try:
        y, pull = jax.vjp(op.using(pin) if pin else op, jnp.ones(()))
        with fuel_jax.using("xla"):  # too late to matter
            assert pull(y / 2)[0] == want
    finally:
        fuel_jax.unregister_fused("doubled")
