"""``python -m fuel_jax check``: every op on this device against float64 on the host.

Each implementation that can serve here runs on the op's own examples in every float dtype.  What it
returns is compared with the op's decomposition in float64; the error is printed in units of what
the op promises, so that 1.00 is the most it may be.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._choose import Kernel, describe
from ._examples import FLOATS, dtypes_of, filled
from ._op import Op, abstract
from .types import x64_enabled

Reference = Callable[..., Any]


@dataclass
class Row:
    """One implementation of one op: the largest error per dtype, and what went wrong."""

    op: str
    kernel: str
    errors: dict[str, float] = field(default_factory=dict)  # in units of the promise
    failures: list[str] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Whether the promise was kept in every dtype."""
        return not self.failures

    def __str__(self) -> str:
        cells = [f"{cell(self.errors.get(d)):>9}" for d in FLOATS]
        return f"{'✓' if self.kept else '✗'} {self.op:<32} {self.kernel:<10} {' '.join(cells)}"


HEADER = f"  {'op':<32} {'kernel':<10} {' '.join(f'{d:>9}' for d in FLOATS)}"


def cell(error: float | None) -> str:
    """``0.42``; ``0`` where nothing is off, ``-`` where the op does not take the dtype."""
    if not error:
        return "-" if error is None else "0"
    return f"{error:.2f}" if error < 1e4 else f"{error:.0e}"


def check(ops: Sequence[Op], dtypes: Sequence[str] = FLOATS) -> int:
    """Print the table, row by row as they are known; 1 if a promise was broken, else 0."""
    started, platform = time.perf_counter(), platform_here()
    where = f"{jax.devices()[0].device_kind} ({platform})"
    print(f"{len(ops)} ops on {where}, JAX {jax.__version__}, against float64 on {host()}.")
    print("Errors in units of the op's promise: 1.00 is the most it may be.\n")
    print(HEADER, flush=True)
    rows = []
    for i, op in enumerate(ops):
        for row in measured(op, platform, dtypes, functools.partial(say, f"[{i + 1}/{len(ops)}]")):
            say()
            print(row, flush=True)
            rows.append(row)
    broken = [row for row in rows if not row.kept]
    for row in broken:
        print(f"\n✗ {row.op}, kernel {row.kernel}:")
        print("\n".join(f"    {failure}" for failure in row.failures))
    verdict = f"{len(broken)} of {len(rows)} rows BROKEN" if broken else "every promise kept"
    print(f"\n{verdict}: {len(rows)} rows in {time.perf_counter() - started:.0f} s.")
    return 1 if broken else 0


def say(*words: str) -> None:
    """What is being done, on a terminal; nothing said wipes it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{' '.join(words)}", end="", file=sys.stderr, flush=True)


def measured(
    op: Op, platform: str, dtypes: Sequence[str], say: Callable[..., None]
) -> Iterator[Row]:
    """A row per implementation that has something to run here."""
    examples = [(example, reference(op, example)) for example in op.examples()]
    for kernel in op.kernels:
        row = Row(op.name, kernel.name)
        for dtype in (d for d in dtypes_of(op) if d in dtypes):
            say(op.name, kernel.name, dtype)
            with jax.enable_x64(dtype == "float64" or x64_enabled()):
                for example, wanted in examples:
                    run(row, op, kernel, platform, example, wanted, dtype)
        if row.errors:
            yield row


def run(
    row: Row,
    op: Op,
    kernel: Kernel,
    platform: str,
    example: dict[str, Any],
    wanted: Reference,
    dtype: str,
) -> None:
    """One example in one dtype, entered in the row; nothing where the kernel does not serve."""
    arrays, params = filled(op, every_output(op, example), dtype)
    try:
        if not serves(op, kernel, platform, arrays, params):
            return
        given = [x if x is None or isinstance(x, int) else jax.device_put(x) for x in arrays]
        got = jax.device_get(op.using(kernel.name)(*given, **params))
        error = excess(got, wanted(*arrays), op.precision.tolerance)
    except Exception as failure:  # whatever a driver or compiler may raise is a finding
        error = math.inf
        reason = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0][:200]}"
    else:
        reason = f"off by {error:.3g} promised errors"
    row.errors[dtype] = max(error, row.errors.get(dtype, 0.0))
    if not error <= 1:
        shown = ", ".join(f"{n}={describe(x)}" for n, x in zip(op.inputs, arrays, strict=False))
        shown += "".join(f", {n}={v!r}" for n, v in params.items())
        row.failures.append(f"{dtype}: {reason}\n      on {shown}")


def every_output(op: Op, example: dict[str, Any]) -> dict[str, Any]:
    """The example, asking for all the op can return."""
    return example | {p: True for p in op.params if p.startswith("return_")}


def serves(
    op: Op, kernel: Kernel, platform: str, arrays: Sequence[Any], params: dict[str, Any]
) -> bool:
    """Whether the kernel can serve this call on this platform, uninterpreted."""
    if kernel.platforms and platform not in kernel.platforms:
        return False
    bound, operands = op._bind(arrays, params)
    return kernel.refuses(*abstract(operands), **bound) is None


def reference(op: Op, example: dict[str, Any]) -> Reference:
    """The decomposition in float64 on the host, as a function of the arrays of any dtype."""
    params = {n: v for n, v in every_output(op, example).items() if n not in op.inputs}
    compiled = jax.jit(functools.partial(op.decompose, **params))

    def wanted(*arrays: Any) -> Any:
        with jax.enable_x64(True), jax.default_device(host()):
            return jax.device_get(compiled(*map(to_float64, arrays)))

    return wanted


def to_float64(x: Any) -> Any:
    """A float array in float64, anything else as it is."""
    floating = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    return np.asarray(x).astype(np.float64) if floating else x


def excess(got: Any, wanted: Any, tolerance: Callable[[Any], float]) -> float:
    """Largest error over all outputs, in units of the promise; inf where NaN or inf is misplaced.

    The promise is relative to the largest finite element wanted, and exact for integers.
    """
    worst = 0.0
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        promised = tolerance(g.dtype)
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        finite = np.isfinite(w)
        if g.shape != w.shape or not np.array_equal(g[~finite], w[~finite], equal_nan=True):
            return math.inf
        error = np.abs(g[finite] - w[finite]).max(initial=0.0)
        if not error:
            continue
        unit = promised * np.abs(w[finite]).max(initial=0.0)
        worst = max(worst, error / unit if unit and math.isfinite(error) else math.inf)
    return float(worst)


def platform_here() -> str:
    """The default device's platform, as kernels name it."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in str(device.client.platform_version).lower() else "cuda"


def host() -> Any:
    """The CPU as JAX sees it; the default device where JAX_PLATFORMS hides it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.devices()[0]
