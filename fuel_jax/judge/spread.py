"""Work that is spread over devices by ``fuel_jax.parallel``, timed beside the op on one device."""

from __future__ import annotations

import functools
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .. import (
    _check,
    flash_attn,
    fused_linear,
    fused_softmax_cross_entropy,
    nf4_matmul,
    parallel,
)
from .collectives import sent
from .device_time import interleaved, one_after_another
from .workload import Spec, directed, filled

AXIS = "devices"
SENDING = re.compile(r"nccl|p2p|all_?reduce_kernel|collective|permute", re.IGNORECASE)
WATCHED = 3  # launches that the profiler sees
JOINED = 24  # launches of short work that one program makes


class Scaling(NamedTuple):
    """The op on one device, and on a part; and how its operands and results are split."""

    name: str
    alone: Callable[..., Any]
    part: Callable[..., Any]
    operands: tuple[P, ...]
    result: P
    extents: Callable[..., tuple[Spec, ...]]
    sizes: dict[str, int]
    tiny: dict[str, int]
    wrt: tuple[int, ...] = ()  # with a gradient, which is timed along with the value
    zigzag: bool = False  # the third axis of all arrays is in zigzag order
    short: bool = False  # a launch takes less than the host needs for one
    plain: bool = False  # the part is the whole under ``jax.jit``, rather than ``shard_map``


CASES: list[Scaling] = []
HEADS, COLUMNS, ROWS = P(None, None, AXIS), P(None, AXIS), P(AXIS)


def attention_extents(h: int, hk: int, s: int, d: int) -> tuple[Spec, ...]:
    """Queries, keys, values of one sequence."""
    return Spec((1, h, s, d)), Spec((1, hk, s, d)), Spec((1, hk, s, d))


for words, wrt in (("fwd", ()), ("fwd+bwd", (0, 1, 2))):
    CASES.append(
        Scaling(
            f"ring_attention {words} causal H32/8 S65536 D128 bf16",
            functools.partial(flash_attn, causal=True),
            functools.partial(parallel.ring_attention, axis=AXIS, causal=True),
            *((HEADS,) * 3, HEADS, attention_extents),
            {"h": 32, "hk": 8, "s": 65536, "d": 128},
            {"h": 4, "hk": 2, "s": 64, "d": 16},
            *(wrt, True),
        )
    )

for words, f, specs in (
    ("vocabulary", functools.partial(parallel.cross_entropy, axis=AXIS), (COLUMNS, P())),
    ("rows", fused_softmax_cross_entropy, (ROWS, ROWS)),
):
    CASES.append(
        Scaling(
            f"cross_entropy by {words} value+grad [8192,128256] bf16",
            *(fused_softmax_cross_entropy, f, specs, P()),
            lambda r, v: (Spec((r, v)), Spec((r,), "int32", f"below {v}")),
            *({"r": 8192, "v": 128256}, {"r": 16, "v": 256}, (0,)),
            plain=words == "rows",
        )
    )


def product_extents(m: int, k: int, n: int) -> tuple[Spec, ...]:
    """Activations, weights, a bias."""
    return Spec((m, k)), Spec((k, n)), Spec((n,))


for words, f, specs, result, k, n in (
    ("columns", fused_linear, (P(), COLUMNS, ROWS), COLUMNS, 8192, 28672),
    (
        *("rows", functools.partial(parallel.row_linear, axis=AXIS)),
        *((COLUMNS, ROWS, P()), P(), 28672, 8192),
    ),
):
    for way, wrt in (("fwd", ()), ("fwd+bwd", (0, 1, 2))):
        CASES.append(
            Scaling(
                f"linear by {words} {way} M8192 K{k} N{n} bf16",
                *(fused_linear, f, specs, result, product_extents),
                *({"m": 8192, "k": k, "n": n}, {"m": 16, "k": 32, "n": 32}, wrt),
            )
        )


def packed_extents(m: int, k: int, n: int) -> tuple[Spec, ...]:
    """Activations, codes of 4 bits, scales of blocks of 64."""
    scales = Spec((n, k // 64), "float32", "positive")
    return Spec((m, k)), Spec((n, k // 2), "uint8"), scales


def packed_rows(x: Any, codes: Any, scales: Any) -> Any:
    """On whole blocks of k; the sum of what devices find."""
    return lax.psum(nf4_matmul(x, codes, scales, block_size=64), AXIS)


for m in (16, 2048):
    for words, f, specs, result, k, n in (
        (
            *("columns", functools.partial(nf4_matmul, block_size=64)),
            *((P(), ROWS, ROWS), COLUMNS, 8192, 28672),
        ),
        ("rows", packed_rows, (COLUMNS,) * 3, P(), 28672, 8192),
    ):
        CASES.append(
            Scaling(
                f"nf4 by {words} M{m} K{k} N{n} bf16",
                functools.partial(nf4_matmul, block_size=64),
                *(f, specs, result, packed_extents, {"m": m, "k": k, "n": n}),
                {"m": 8, "k": 256, "n": 32},
                short=m == 16,
            )
        )


class Program(NamedTuple):
    """Something to time, what it computes, and how much memory it takes."""

    burst: Callable[[int], float]
    first: Callable[[], Any]
    bytes: int  # of operands, results, and what is between
    sent: dict[str, int]


def program(f: Callable[..., Any], sets: Sequence[Any], join: int) -> Program:
    """``f`` of operands and cotangents, compiled; joined where it is short."""
    groups = [tuple(sets)] if join > 1 else [(operands,) for operands in sets]
    made = jax.jit(one_after_another(f)).lower(groups[0]).compile()
    needs = made.memory_analysis()
    size = 0
    if needs is not None:
        size = needs.argument_size_in_bytes + needs.output_size_in_bytes + needs.temp_size_in_bytes

    def burst(n: int) -> float:
        start, results = time.perf_counter(), None
        for i in range(max(1, n // join)):
            results = made(groups[i % len(groups)])
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / max(1, n // join) / join

    return Program(burst, lambda: made(groups[0])[0], size, sent(made.as_text() or ""))


def measured(case: Scaling, mesh: Mesh, tiny: bool) -> dict[str, Any]:
    """A case's row."""
    join = JOINED if case.short and not tiny else 1
    specs = case.extents(**(case.tiny if tiny else case.sizes))
    first, count = mesh.devices.flat[0], mesh.size
    order = lambda x: parallel.zigzag(x, count, 2) if case.zigzag else x
    laid = lambda spec: NamedSharding(mesh, spec)

    def placed(x: Any, spec: P) -> Any:
        return jax.device_put(order(x), laid(spec))

    def drawn(key: Any) -> tuple[list[Any], Any]:
        draw = jax.jit(lambda key, spec: filled(spec, key), static_argnums=1)
        operands = [draw(jax.random.fold_in(key, i), spec) for i, spec in enumerate(specs)]
        y = jax.eval_shape(case.alone, *operands)
        normal = jax.jit(lambda key: jax.random.normal(key, y.shape, y.dtype))
        ct = jnp.ones(y.shape, y.dtype) if not y.shape else normal(jax.random.fold_in(key, 99))
        return operands, ct if case.wrt else None

    with jax.default_device(first):
        sets = [drawn(jax.random.key(i)) for i in range(join)]
    way = "both" if case.wrt else "forward"
    spread = [
        (
            [placed(x, spec) for x, spec in zip(operands, case.operands, strict=True)],
            None if ct is None else placed(ct, case.result),
        )
        for operands, ct in sets
    ]
    part = case.part
    if not case.plain:
        part = jax.shard_map(part, mesh=mesh, in_specs=case.operands, out_specs=case.result)
    one = program(directed(case.alone, way, case.wrt), sets, join)
    wanted = one.first()
    every = program(directed(part, way, case.wrt), spread, join)
    back = lambda x: parallel.unzigzag(x, count, 2) if case.zigzag else x
    apart = jax.jit(lambda got, want: distance(back(got), want))
    pairs = zip(jax.tree.leaves(every.first()), jax.tree.leaves(wanted), strict=True)
    error = max(float(apart(jax.device_put(got, first), want)) for got, want in pairs)
    del wanted
    bursts = {"one": one.burst, "all": every.burst}
    times = interleaved(bursts, rounds=1, seconds=0) if tiny else interleaved(bursts, least=join)
    sending, hidden, busy = watched(every.burst, join * WATCHED)
    row = {"kernel": kernel(case, specs), "one_us": times["one"]["us"], **times["all"]}
    row |= {"efficiency": times["one"]["us"] / times["all"]["us"] / count}
    row |= {"sending_us": sending, "hidden": hidden, "busy_us": busy, "error": error}
    return row | {"one_bytes": one.bytes, "bytes": every.bytes, "sent": every.sent, "joined": join}


def distance(got: Any, want: Any) -> Any:
    """Relative, in the Euclidean norm."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    size = jnp.sqrt(jnp.sum(jnp.square(want)))
    return jnp.sqrt(jnp.sum(jnp.square(got - want))) / jnp.where(size == 0, 1, size)


def kernel(case: Scaling, specs: Sequence[Spec]) -> str:
    """Which implementation of the op serves on one device."""
    from .._pages import server

    op: Any = getattr(case.alone, "func", case.alone)
    params = getattr(case.alone, "keywords", {})
    given = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs]
    serves = server(op.explain(*given, **params).forward, _check.platform_here())
    return serves.kernel.name if serves else ""


# -- what a profiler sees ------------------------------------------------------------------------

Intervals = list[tuple[float, float]]


def watched(burst: Any, launches: int) -> tuple[float | None, float | None, float | None]:
    """Microseconds of a launch that a device sends, the share of it hidden, and those of work.

    Hidden is what goes on while a kernel computes on the same device.  Waiting for a slower device
    counts as sending.  The mean over devices; None where no profiler sees any.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            burst(launches)
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        seen = [halves(plane) for plane in planes if plane.name.startswith("/device:GPU")]
    seen = [pair for pair in seen if pair[1]]
    if not seen:
        return None, None, None
    sending = [length(s) for s, _ in seen]
    hidden = [length(common(s, c)) for s, c in seen]
    busy = statistics.fmean(length(c) for _, c in seen)
    share = sum(hidden) / sum(sending) if sum(sending) else None
    per = 1e-3 / launches
    return statistics.fmean(sending) * per, share, busy * per


def halves(plane: Any) -> tuple[Intervals, Intervals]:
    """When a device sends, and when it computes, in nanoseconds."""
    sends, computes = [], []
    for line in plane.lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                kept = sends if SENDING.search(event.name) else computes
                kept.append((event.start_ns, event.start_ns + event.duration_ns))
    return union(sends), union(computes)


def union(intervals: Intervals) -> Intervals:
    """Apart from each other, in order."""
    found: Intervals = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def common(a: Intervals, b: Intervals) -> Intervals:
    """What is in both; each is apart and in order."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        found += [(start, end)] * (start < end)
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Intervals) -> float:
    """Of all."""
    return float(np.sum([end - start for start, end in intervals]))
