"""The one place that names a Pallas backend.

On GPUs Pallas lowers through Triton, which JAX calls deprecated since 0.11, or through Mosaic,
whose ``pallas_call`` has changed its meaning between versions.  A kernel says what to compute and
this says how to launch it.  When JAX drops Triton, :func:`unavailable` says so, every kernel
refuses with that sentence, and the ops go on in plain ``jax.numpy``.
"""

import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

WARP = 32  # threads
LOG2_E = 1.4426950408889634
INTERPRETED = jax.make_user_context(False)  # what :func:`launch` was told, for those below
BY_BITS = jax.make_user_context(False)  # how :func:`logistic` divides
GRID = 65535  # programs along the second and third axis of a grid, at most
LIMIT = 2**31  # elements: offsets into an array are counted in 32 bits


@functools.cache
def triton() -> Any:
    """The backend, or None.  Imported when first asked for: it takes as long as this library."""
    try:
        from jax.experimental.pallas import triton
    except ImportError:
        return None
    return triton


@functools.cache
def mosaic() -> Any:
    """The backend for Hopper, or None."""
    try:
        from jax.experimental.pallas import mosaic_gpu
    except ImportError:
        return None
    return mosaic_gpu


def not_hopper() -> str | None:
    """Why there are no warpgroups here, or None: of the mesh that is lowered for, or of this GPU.

    Programs for them do not run on the generations before and after.
    """
    kind = lowered_for()
    if mosaic() is None:
        return f"JAX {jax.__version__} has no Mosaic backend for Pallas"
    if not any(name in kind for name in ("H100", "H200", "H800", "H20", "GH200")):
        return f"it is written for Hopper GPUs, and here is {kind}"
    return None


def lowered_for() -> str:
    """The name of the GPU that a program is for: of the mesh it is lowered for, or of this one."""
    named = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return kind_of_gpu() if named is None else named.device_kind


@functools.cache
def kind_of_gpu() -> str:
    """The name of the first GPU.

    The driver's: to ask JAX would start its backends, and a program may have yet to say that it
    runs in several processes.  JAX is asked where there is a GPU and the driver does not tell.
    """
    for path in sorted(pathlib.Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text().splitlines():
            if line.startswith("Model:"):
                return line.removeprefix("Model:").strip()
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):
        return "none"
    try:
        return jax.devices("cuda")[0].device_kind
    except RuntimeError:
        return "none"


def unavailable(*arrays: Any) -> str | None:
    """Why no kernel can be launched on such arrays, or None."""
    if triton() is None:
        return f"JAX {jax.__version__} has no Triton backend for Pallas"
    for x in arrays:
        if x is not None and x.dtype == jnp.float64:
            return "float64 is left to XLA"
        if x is not None and x.size == 0:
            return "there is nothing to compute"
        if x is not None and x.size >= LIMIT:
            return "2³¹ elements and more are left to XLA"
    return None


def launch(
    kernel: Callable[..., None],
    name: str,
    *,
    out: Any,
    grid: tuple[int, ...],
    warps: int,
    interpret: bool,
    stages: int = 1,
    aliases: dict[int, int] | None = None,
) -> Callable[..., Any]:
    """``kernel`` over a grid of programs that see whole arrays and index them as they like.

    Args:
        kernel: takes references to the operands, then to the results.
        name: as profiles show it, after ``fuel_``.
        out: shape and dtype of the result, or of each of several.
        grid: number of programs along each axis.
        warps: groups of 32 threads per program.
        interpret: run it without a GPU.  Part of the trace, so it is decided by the caller.
        stages: blocks of a loop that are on their way at once; for loops around matrix products.
        aliases: the operand whose memory a result takes over; what is not written stays.
    """
    from jax.experimental import pallas

    def traced(*refs: Any) -> None:
        with INTERPRETED(interpret):
            kernel(*refs)

    return pallas.pallas_call(
        traced,
        out_shape=out,
        grid=grid,
        compiler_params=triton().CompilerParams(num_warps=warps, num_stages=stages),
        input_output_aliases=aliases or {},
        interpret=interpret,
        name=f"fuel_{name}",
    )


def warpgroups(
    kernel: Callable[..., None],
    name: str,
    *,
    out: Sequence[Any],
    grid: dict[str, int],
    groups: int,
) -> Callable[..., Any]:
    """``kernel`` over a grid of programs of some groups of 128 threads, on Hopper.

    Args:
        kernel: takes references to the operands, then to the results; None for those that are.
        name: as profiles show it, after ``fuel_``.
        out: shape and dtype of each result, or None.
        grid: number of programs along each named axis; the last one varies fastest.
        groups: of a program, along the axis ``group``.
    """

    def run(*operands: Any) -> tuple[Any, ...]:
        every = (*operands, *out)

        def traced(*refs: Any) -> None:
            rest = iter(refs)
            with INTERPRETED(True), BY_BITS(True):  # Mosaic knows the plain spellings
                kernel(*(None if x is None else next(rest) for x in every))

        traced.__name__ = f"fuel_{name}"  # Mosaic has no other place for it
        results = mosaic().kernel(
            traced,
            out_type=[x for x in out if x is not None],
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            num_threads=groups,
            thread_name="group",
            compiler_params=mosaic().CompilerParams(approx_math=True),
        )(*(x for x in operands if x is not None))
        rest = iter(results)
        return tuple(None if x is None else varying(next(rest), x) for x in out)

    return run


def varying(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """``x`` as it varies over mesh axes under ``shard_map``, which Mosaic forgets."""
    axes = like.manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(axes), to="varying") if axes else x


def dynamic_slice(start: Any, size: int) -> Any:
    """An index: so many elements from one on."""
    from jax.experimental import pallas

    return pallas.ds(start, size)


def program_id(axis: int) -> jax.Array:
    """Which program of the grid this is, along an axis."""
    from jax.experimental import pallas

    return pallas.program_id(axis)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least one that is at least n: what blocks of Triton's have to be."""
    return 1 << max(n - 1, 0).bit_length()


def like(x: Any, shape: Sequence[int] | None = None, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """A result that varies over the mesh axes ``x`` varies over under ``shard_map``."""
    # JAX has no type of a shape that varies.
    varies = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return jax.ShapeDtypeStruct(
        tuple(x.shape if shape is None else shape),
        x.dtype if dtype is None else dtype,
        manual_axis_type=varies.manual_axis_type,
    )


def read(ref: Any, at: tuple[Any, ...], mask: Any = None, other: float | None = None) -> jax.Array:
    """The block at some indices, in float32; ``other`` where the mask is not set."""
    return triton().load(ref.at[at], mask=mask, other=other).astype(jnp.float32)


def write(ref: Any, at: tuple[Any, ...], value: jax.Array, mask: Any = None) -> None:
    """The block, rounded to the dtype of what it is written to."""
    triton().store(ref.at[at], value.astype(ref.dtype), mask=mask)


def special(name: str, x: jax.Array, otherwise: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """One of the chip's own functions of a float32; ``otherwise`` where there is no chip."""
    if INTERPRETED.value:
        return otherwise(x)
    (y,) = triton().elementwise_inline_asm(
        f"{name}.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return y


def exp2(x: jax.Array) -> jax.Array:
    """2ˣ in float32, right to 2 units in the last place; 0 below 2⁻¹²⁶."""
    return special("ex2", x, jnp.exp2)


def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x in float32, right to 1 unit in the last place; 0 where that is below 2⁻¹²⁶."""
    return special("rcp", x, lambda x: 1 / x)


def logistic(x: jax.Array) -> jax.Array:
    """1 / (1 + 2⁻ˣ) in float32, right to 4 units in the last place.

    Mosaic has nothing but a division for it: five instructions, and one of the unit for
    exponentials, which has a quarter of the others' rate.  ``BY_BITS`` it is eight of the others.
    """
    if not BY_BITS.value:
        return reciprocal(1 + exp2(-x))
    y = 1 + exp2(jnp.minimum(-x, 100.0))
    # Bits are nearly a logarithm, which is that of the inverse but for the sign: off by 5 %, after
    # Newton's step 0.3 %, after one of third order less than is rounded.
    bits = 0x7EF30000 - lax.bitcast_convert_type(y, jnp.int32)
    z = lax.bitcast_convert_type(bits, jnp.float32)
    z = z * (2 - y * z)
    off = 1 - y * z
    return z + z * (off + off * off)


def fma(a: jax.Array, b: jax.Array | float, c: jax.Array | float) -> jax.Array:
    """a · b + c, rounded once; XLA's Triton does not put the two together."""
    b, c = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), a.shape) for x in (b, c))
    if INTERPRETED.value:
        return a * b + c
    (y,) = triton().elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[a, b, c],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(a.shape, jnp.float32)],
    )
    return y


def exp(x: jax.Array) -> jax.Array:
    """eˣ in float32 by the chip's 2ˣ, right to 2 units in the last place; 0 below 2⁻¹²⁶.

    XLA's Triton calls a routine that minds subnormal results: measured on an H200, the log-sum-exp
    of rows takes 1.25 times as long with it, a softmax 1.03 times.
    """
    return special("ex2", x * LOG2_E, jnp.exp2)


def unpacked(words: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The two halves in each of some words of 32 bits, the lower one first, in float32."""
    halves = words.astype(jnp.int16), (words >> 16).astype(jnp.int16)
    low, high = (lax.bitcast_convert_type(x, dtype).astype(jnp.float32) for x in halves)
    return low, high


def packed(low: jax.Array, high: jax.Array, dtype: Any) -> jax.Array:
    """Words of 32 bits of pairs of float32, rounded to halves.

    One instruction.  Alone each takes one of the unit for exponentials, which has a quarter of the
    others' rate.
    """
    if INTERPRETED.value:
        bits = lambda x: lax.bitcast_convert_type(x.astype(dtype), jnp.uint16).astype(jnp.int32)
        return bits(low) | bits(high) << 16
    name = {"bfloat16": "bf16x2", "float16": "f16x2"}[jnp.dtype(dtype).name]
    (words,) = triton().elementwise_inline_asm(
        f"cvt.rn.{name}.f32 $0, $2, $1;",
        args=[low, high],
        constraints="=r,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(low.shape, jnp.int32)],
    )
    return words
