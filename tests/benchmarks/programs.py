"""From a line of the tables to programs that run: ours, the plain spellings, PyTorch's.

A gradient's program returns the value as well, as a training step needs both and PyTorch's
autograd computes both.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fuel_jax.fused._gguf_blocks import FORMATS
from fuel_jax.registry import builtin

from .row import Call, Row, Spelling
from .timing import TORCH

OPS = {op.name: op for op in builtin()}
DTYPES = {"f32": "float32", "f16": "float16", "u32": "uint32", "u8": "uint8"}
HALVES = {"Q4_0": (0,), "Q8_0": (0,), "Q4K": (0, 2), "Q5K": (0, 2)}  # where a block has scales


class Program(NamedTuple):
    """Something to time."""

    run: Callable[[], Any]
    compile_s: float = 0.0  # tracing included
    temp_bytes: int = 0  # what it allocates beside its results, as XLA plans it


class Case(NamedTuple):
    """A call in one direction: the arrays, what is differentiated, the cotangents."""

    label: str
    row: Row
    specs: list[str]
    params: dict[str, Any]
    arrays: list[jax.Array]
    at: tuple[int, ...] = ()
    cotangents: Any = None

    @property
    def direction(self) -> str:
        """As a row names it."""
        return "gradient" if self.at else "forward"

    @property
    def op(self) -> Any:
        """The op of the label."""
        return OPS[self.label.split()[0]]

    def given(self, f: Spelling) -> Spelling:
        """``f`` with this call's parameters, on this call's arrays as the op wants them."""
        view = self.row.view or (lambda *arrays: arrays)
        return lambda *arrays: f(*view(*arrays), **self.params)


def array(spec: str, rng: np.random.Generator) -> jax.Array:
    """The array that ``"f32 4096 1024"`` and its like describe."""
    what, *extents = spec.split()
    shape = tuple(map(int, extents))
    kind, _, below = what.partition("<")
    if kind in FORMATS:  # random codes under small finite scales
        form = FORMATS[kind]
        blocks = rng.integers(0, 256, (shape[0] // form.weights, form.bytes), np.uint8)
        for at in HALVES[kind]:
            blocks[:, at + 1] = 0x20
        return jnp.asarray(np.frombuffer(blocks.tobytes(), np.uint32))
    dtype = DTYPES[kind.rstrip("+-")]
    if kind[0] == "u":
        return jnp.asarray(rng.integers(0, int(below or 2**32), shape).astype(dtype))
    x = rng.standard_normal(shape, np.float32)
    if kind[-1] in "+-":
        x = (0.05 + np.abs(x) / 10) * (1 if kind[-1] == "+" else -1)
    return jnp.asarray(x.astype(dtype))


def cases(label: str, row: Row, call: Call, directions: tuple[str, ...]) -> Iterator[Case]:
    """The call in each direction the op has."""
    rng = np.random.default_rng(0)
    specs, params = call
    arrays = [array(spec, rng) for spec in specs]
    forward = Case(label, row, specs, params, arrays)
    if "forward" in directions:
        yield forward
    op = forward.op
    outputs = jax.eval_shape(forward.given(op), *arrays)
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    floating = tuple(i for i, x in enumerate(arrays) if is_float(x))
    at = floating if row.at is None else row.at
    differentiable = op.wrt and at and all(map(is_float, jax.tree.leaves(outputs)))
    if "gradient" in directions and differentiable:
        wave = lambda y: jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype)
        yield forward._replace(at=at, cotangents=jax.tree.map(wave, outputs))


def pulled(f: Spelling, at: tuple[int, ...]) -> Spelling:
    """The value of ``f`` and its gradient in the operands ``at``, from a cotangent."""

    def program(arrays, cotangents):
        def of(*chosen):
            merged = dict(enumerate(arrays)) | dict(zip(at, chosen, strict=True))
            return f(*merged.values())

        value, pull = jax.vjp(of, *(arrays[i] for i in at))
        return value, pull(cotangents)

    return program


def compiled(f: Spelling, case: Case) -> Program:
    """A program of JAX for the case."""
    f = case.given(f)
    if case.at:
        f, arguments = pulled(f, case.at), (case.arrays, case.cotangents)
    else:
        arguments = tuple(case.arrays)
    start = time.perf_counter()
    program = jax.jit(f).lower(*arguments).compile()
    took = time.perf_counter() - start
    planned = program.memory_analysis().temp_size_in_bytes
    return Program(lambda: jax.block_until_ready(program(*arguments)), took, planned)


def torch_program(case: Case) -> Program | None:
    """PyTorch's, on the same data; None where it has none."""
    if not TORCH:
        return None
    from . import torch_spellings

    run = torch_spellings.program(case)
    return Program(run) if run else None
