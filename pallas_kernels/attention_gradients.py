"""The gradients of attention, from its scores made again.

query_gradients
    grid      blocks of rows × heads × sequences
    reads     the keys and values that some row of a block sees
key_gradients
    grid      blocks of keys × key heads × sequences
    reads     the queries that see some key of a block, of all heads of its group
bound by  tensor cores, three and four products of each score: every score is made twice, so that no
          two programs add to one number, and the bits are always the same

Σ p · dp over the keys of a row is Σ o · do, but the result o has been rounded, and where one weight
is nearly 1 slopes are small differences.  The slopes of a row add up to 0: what they add up to
instead is what rounding did, and the keys' gradients, which come second, are without it.  The
queries' own had to go by what was known; each row has that taken back at its largest weight.  No
other is more than half, and there it is about what rounding does to the slope itself.

Dao 2023, arXiv:2307.08691.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._attention import (
    Rows,
    Rules,
    Score,
    Sizes,
    Span,
    Tile,
    base_of,
    block,
    columns_of,
    dot,
    dot_turned,
    finite,
    length_of,
    numbers,
    put,
    put_numbers,
    scored,
    slopes_of,
)
from ._launch import cdiv, launch, like, power_of_two, program_id
from ._rows import counted


def span_of_rows(
    start: Any, keys: int, length: Any, sizes: Sizes, size: int, rules: Rules, ragged: bool
) -> Span:
    """Blocks of ``size`` rows that see some of so many keys; ``ragged``: lengths differ."""
    end, shift = start + keys, length - sizes.sq
    none, all_rows = jnp.int32(0), jnp.int32(sizes.sq)
    some, every = [none, jnp.where(start < length, all_rows, 0)], [none, all_rows]
    if rules.right is not None:
        some[0], every[0] = start - rules.right - shift, end - 1 - rules.right - shift
    if rules.left is not None:
        some[1] = jnp.minimum(some[1], end + rules.left - shift)
        every[1] = jnp.minimum(all_rows, start + rules.left - shift + 1)
    every[1] = jnp.where(end <= length, every[1], 0)
    # Rows beyond the last weigh nothing: a block that holds some is whole if all others see it.
    every[1] = jnp.where(every[1] == sizes.sq, cdiv(sizes.sq, size) * size, every[1])
    after = ragged or rules.left is not None or sizes.sk % keys != 0
    return Span.of(tuple(some), tuple(every), size, rules.right is not None, after)


def key_gradients_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    g_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    slopes: Any,
    lengths: Any,
    dk_ref: Any,
    dv_ref: Any,
    *,
    sizes: Sizes,
    tile: Tile,
    rules: Rules,
) -> None:
    """One block of keys: what all rows that see it say of its keys and values."""
    start, key_head, sequence = program_id(0) * tile.keys, program_id(1), program_id(2)
    length, _ = length_of(lengths, sequence, sizes)
    keys, shift = start + counted(tile.keys), length - sizes.sq
    k, v = (block(ref, (sequence, key_head), keys) for ref in (k_ref, v_ref))
    span = span_of_rows(start, tile.keys, length, sizes, tile.rows, rules, lengths is not None)

    def step(masked: bool, head: Any, slope: Any) -> Callable[..., Any]:
        def over(i: Any, carry: Any) -> Any:
            dk, dv = carry
            index = i * tile.rows + counted(tile.rows)
            q, g = (block(ref, (sequence, head), index) for ref in (q_ref, g_ref))
            lse = numbers(lse_ref, (sequence, head), index, jnp.inf)
            delta = numbers(delta_ref, (sequence, head), index, 0)
            at = (index + shift)[None, :]
            x = scored(dot_turned(k, q), at, keys[:, None], slope, length, rules, masked)
            p = x.weights(base_of(lse)[None, :])
            if masked:
                q, g = finite(q), jnp.where((lse == -jnp.inf)[:, None], jnp.zeros_like(g), g)
                p = jnp.where(x.seen, p, 0)
            ds = p * (dot_turned(v, g) - delta[None, :])
            ds = bent(ds if x.seen is None else jnp.where(x.seen, ds, 0), x)
            return dk + dot(ds.astype(q.dtype), q), dv + dot(p.astype(g.dtype), g)

        return over

    def of_head(i: Any, carry: Any) -> Any:
        head = key_head * sizes.group + i
        slope = slopes_of(slopes, head, keys, sizes)
        return span.over(functools.partial(step, head=head, slope=slope), carry)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    if sizes.group == 1:
        dk, dv = of_head(0, zeros)
    else:
        dk, dv = lax.fori_loop(jnp.int32(0), jnp.int32(sizes.group), of_head, zeros)
    put(dk_ref, (sequence, key_head), keys, dk * rules.scale)
    put(dv_ref, (sequence, key_head), keys, dv)


def query_gradients_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    g_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    dlse_ref: Any,
    slopes: Any,
    lengths: Any,
    dq_ref: Any,
    dslope_ref: Any,
    exact_ref: Any,
    *,
    sizes: Sizes,
    tile: Tile,
    rules: Rules,
) -> None:
    """One block of rows: what the keys they see say of them, and of the slope of distance."""
    i = cdiv(sizes.rows, tile.rows) - 1 - program_id(0)
    head, sequence = program_id(1), program_id(2)
    length, _ = length_of(lengths, sequence, sizes)
    rows = Rows.of(i, head, length, slopes, sizes, tile, rules, lengths is not None)
    q, g = (block(ref, (sequence, head), rows.number) for ref in (q_ref, g_ref))
    lse = numbers(lse_ref, (sequence, head), rows.number, jnp.inf)
    delta = numbers(delta_ref, (sequence, head), rows.number, 0)
    level, at_key = base_of(lse)[:, None], (sequence, head // sizes.group)
    numbered = power_of_two(cdiv(sizes.sk, tile.keys) * tile.keys) - 1

    def step(masked: bool) -> Callable[..., Any]:
        def over(j: Any, carry: Any) -> Any:
            dq, lost, largest, dslope, reach = carry
            keys = j * tile.keys + counted(tile.keys)
            k, v = (block(ref, at_key, keys) for ref in (k_ref, v_ref))
            at, key = rows.at[:, None], keys[None, :]
            x = scored(dot_turned(q, k), at, key, rows.slope, length, rules, masked)
            p = x.weights(level)
            ds = p * (dot_turned(g, v) - delta[:, None])
            if masked:
                ds, k = jnp.where(x.seen, ds, 0), finite(k)
            if exact_ref is not None:
                # Weights compare as integers do; the last of their bits make room for the number.
                ranked = lax.bitcast_convert_type(p, jnp.int32) & ~numbered | key
                lost, largest = lost + jnp.sum(ds, 1), jnp.maximum(largest, jnp.max(ranked, 1))
            if slopes is not None:
                far = jnp.abs(at - key).astype(jnp.float32)
                dslope, reach = dslope + jnp.sum(ds * far, 1), reach + jnp.sum(p * far, 1)
            return dq + dot(bent(ds, x).astype(k.dtype), k), lost, largest, dslope, reach

        return over

    zeros = jnp.zeros(tile.rows, jnp.float32)
    start = (None, None) if exact_ref is None else (zeros, zeros.astype(jnp.int32))
    start += (None, None) if slopes is None else (zeros, zeros)
    dq, lost, largest, dslope, reach = rows.keys.over(
        step, (jnp.zeros(q.shape, jnp.float32), *start)
    )
    if exact_ref is not None:
        if dlse_ref is not None:
            lost = lost - numbers(dlse_ref, (sequence, head), rows.number, 0)
        put_numbers(exact_ref, (sequence, head), rows.number, delta + lost)
        # One more block of keys, each of which concerns one row.
        key, mine = jnp.minimum(largest & numbered, sizes.sk - 1), counted(tile.rows)
        k = finite(columns_of(k_ref, (*at_key, key[:, None]), None))
        at, key, mine = rows.at[:, None], key[None, :], mine[:, None] == mine[None, :]
        x = scored(dot_turned(q, k), at, key, rows.slope, length, rules, True)
        ds = jnp.where(mine & x.seen, -x.weights(level) * lost[:, None], 0)
        dq = dq + dot(bent(ds, x).astype(k.dtype), k)
    put(dq_ref, (sequence, head), rows.number, dq * rules.scale)
    if slopes is not None:
        taken = 0 if exact_ref is None else jnp.where(reach == 0, 0, lost * reach)
        put_numbers(dslope_ref, (sequence, head), rows.number, taken - dslope)


def bent(ds: jax.Array, x: Score) -> jax.Array:
    """Through the cap."""
    return ds if x.bend is None else ds * x.bend


def marked_kernel(*refs: Any, kernel: Callable[..., None], results: int, **task: Any) -> None:
    """A kernel in the blocks that are marked; in the others what was there stays."""
    marks_ref, mine = refs[-1 - results], tuple(map(program_id, (2, 1, 0)))
    again = lambda: kernel(*refs[: -1 - 2 * results], *refs[-results:], **task)
    lax.cond(marks_ref[mine] > 0, again, lambda: None)


class Launch(NamedTuple):
    """What the launches of a call have in common."""

    sizes: Sizes
    rules: Rules
    interpret: bool = False

    def run(
        self,
        kernel: Callable[..., None],
        name: str,
        operands: tuple[Any, ...],
        *,
        out: tuple[Any, ...],
        tile: Tile,
        blocks: tuple[int, int],
        marks: jax.Array | None = None,
    ) -> tuple[Any, ...]:
        """A kernel on all blocks of all heads.

        Args:
            kernel: which.
            name: as profiles show it.
            operands: of the kernel.
            out: what its results are like; with ``marks``, the results themselves so far.
            tile: what a program works on.
            blocks: of a head, and heads.
            marks: of which blocks the results are replaced, ``[b, heads, blocks]``; None is all.
        """
        task = {"sizes": self.sizes, "tile": tile, "rules": self.rules}
        how: dict[str, Any] = {"warps": tile.warps, "stages": tile.stages}
        how |= {"grid": (*blocks, self.sizes.b), "interpret": self.interpret}
        if marks is None:
            return launch(functools.partial(kernel, **task), name, out=out, **how)(*operands)
        task |= {"kernel": kernel, "results": len(out)}
        place, there = sum(x is not None for x in operands), [x for x in out if x is not None]
        how |= {"aliases": {place + i: i for i in range(len(there))}}
        like_them = tuple(None if x is None else like(x) for x in out)
        run = launch(functools.partial(marked_kernel, **task), f"{name}_mend", out=like_them, **how)
        return run(*operands, *out, marks)

    def of_queries(self, operands: tuple[Any, ...], tile: Tile, **how: Any) -> tuple[Any, ...]:
        """(dq, dslopes, Σ p · dp)."""
        blocks = cdiv(self.sizes.sq, tile.rows), self.sizes.h
        if "marks" in how:
            how["marks"] = how["marks"][..., ::-1]  # the last rows come first
        name = "attention_query_gradients"
        return self.run(query_gradients_kernel, name, operands, tile=tile, blocks=blocks, **how)

    def of_keys(self, operands: tuple[Any, ...], tile: Tile, **how: Any) -> tuple[Any, ...]:
        """(dk, dv)."""
        blocks = cdiv(self.sizes.sk, tile.keys), self.sizes.hk
        name = "attention_key_gradients"
        return self.run(key_gradients_kernel, name, operands, tile=tile, blocks=blocks, **how)


def delta_of(o: jax.Array, g: jax.Array, dlse: jax.Array | None) -> jax.Array:
    """Σ p · dp over the keys of a row: the sum over columns of what they made."""
    delta = jnp.sum(o.astype(jnp.float32) * g.astype(jnp.float32), axis=-1)
    return delta if dlse is None else delta - dlse


def gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    o: jax.Array,
    lse: jax.Array,
    g: jax.Array,
    dlse: jax.Array | None,
    slopes: jax.Array | None,
    lengths: jax.Array | None,
    *,
    rules: Rules,
    of_keys: Tile,
    of_queries: Tile,
    whole: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """(dq, dk, dv, dslopes), the last ``[b, h, sq]`` in float32: what each query says of its slope.

    Args:
        q: as in :func:`attend`, like k, v, slopes, lengths, rules and interpret.
        k: the same.
        v: the same.
        o: the result.
        lse: its log-sum-exp.
        g: cotangent of the result.
        dlse: cotangent of ``lse``, or None.
        slopes: the same.
        lengths: the same.
        rules: the same.
        of_keys: what a program of the gradient of k and v works on.
        of_queries: what one of the gradient of q works on.
        whole: ``o`` and ``lse`` are of these keys; if they are of more, slopes add up to something.
        interpret: run without a GPU.
    """
    run, delta = Launch(Sizes.of(q, k), rules, interpret), delta_of(o, g, dlse)
    out = like(q), None if slopes is None else like(lse), like(lse) if whole else None
    operands = q, k, v, g, lse, delta, dlse, slopes, lengths
    dq, dslopes, exact = run.of_queries(operands, of_queries, out=out)
    operands = q, k, v, g, lse, exact if whole else delta, slopes, lengths
    dk, dv = run.of_keys(operands, of_keys, out=(like(k), like(v)))
    return dq, dk, dv, dslopes
