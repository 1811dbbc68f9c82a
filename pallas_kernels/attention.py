"""Attention in one pass over the keys: the scores never reach memory.

attend
    grid      blocks of rows × heads × (sequences × parts of the keys)
    reads     the keys and values that some row of a block sees
mend
    grid      as attend, several blocks of rows each, of which those are read that are spoiled
bound by  tensor cores, two products of each score; with few rows, memory

Dao 2023, arXiv:2307.08691.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._attention import (
    LEAST_WIDTH,
    Rows,
    Rules,
    Score,
    Sizes,
    Span,
    Tile,
    base_of,
    block,
    dot,
    dot_turned,
    is_finite,
    length_of,
    level_of,
    numbers,
    put,
    put_numbers,
    read,
    scored,
    weigh_seen,
)
from ._launch import cdiv, exp2, launch, like, power_of_two, program_id
from ._rows import counted

LN_2 = 0.6931471805599453
LOOKED_AT = 8  # blocks of rows, by a program of mend: nearly always there is nothing to do


class Task(NamedTuple):
    """What a program of the forward pass works on."""

    at: tuple[Any, ...]  # its place among the results
    number: Any  # of its block of rows
    rows: Rows
    span: Span
    met: Callable[[Any, bool], tuple[Score, jax.Array]]  # scores and values of a block of keys
    valid: Any  # None: nothing else is possible

    @classmethod
    def of(
        cls,
        i: Any,
        at: tuple[Any, ...],
        operands: Sequence[Any],
        *,
        sizes: Sizes,
        tile: Tile,
        rules: Rules,
        parts: int,
    ) -> Task:
        """Block ``i`` of the rows of a head, which is ``at`` a :func:`place`."""
        q_ref, k_ref, v_ref, slopes, lengths, table = operands
        sequence, head, part = at[-2], at[-1], at[0]
        key_head = head if sizes.packed else head // sizes.group
        length, valid = length_of(lengths, sequence, sizes)
        rows = Rows.of(i, head, length, slopes, sizes, tile, rules, lengths is not None)
        q = block(q_ref, (sequence, head), rows.number)

        def met(j: Any, masked: bool) -> tuple[Score, jax.Array]:
            keys = j * tile.keys + counted(tile.keys)
            end = length if masked else None
            k, v = (read(ref, sequence, key_head, keys, end, table) for ref in (k_ref, v_ref))
            at, key = rows.at[:, None], keys[None, :]
            return scored(dot_turned(q, k), at, key, rows.slope, length, rules, masked), v

        span = rows.keys if parts == 1 else rows.keys.part(part, parts)
        return cls(at, i, rows, span, met, valid)


def place(parts: int) -> tuple[Any, ...]:
    """Of this program among the results: part if there are several, sequence, head."""
    part, at = program_id(2) % parts, (program_id(2) // parts, program_id(1))
    return at if parts == 1 else (part, *at)


def attend_kernel(*refs: Any, width: int, leaks: bool, **task: Any) -> None:
    """One block of rows against the keys they see: a running maximum, sum and weighted sum."""
    *operands, o_ref, lse_ref, spoiled_ref = refs
    blocks = cdiv(task["sizes"].rows, task["tile"].rows)
    i = blocks - 1 - program_id(0)  # under causality the last do most
    its = Task.of(i, place(task["parts"]), operands, **task)

    def step(masked: bool) -> Callable[..., Any]:
        def over(j: Any, carry: Any) -> Any:
            m, total, o = carry
            x, v = its.met(j, masked)
            top = jnp.maximum(m, jnp.max(x.s, axis=1) * x.unit + x.shift)
            p, keep = x.weights(level_of(top)[:, None]), exp2(m - level_of(top))
            o = o * keep[:, None] + dot(p.astype(v.dtype), v)
            return top, total * keep + jnp.sum(p, axis=1), o

        return over

    rows = task["tile"].rows
    none = jnp.full(rows, -jnp.inf, jnp.float32)
    start = none, jnp.zeros(rows, jnp.float32), jnp.zeros((rows, width), jnp.float32)
    m, total, o = its.span.over(step, start)
    divisor = jnp.where(total == 0, 1, total)
    o, lse = o * (1 / divisor)[:, None], m * LN_2 + jnp.log(divisor)
    if leaks:
        # To mend it in this kernel would take registers from the loop: it took four times as long.
        spoiled = jnp.max(jnp.max(jnp.where(is_finite(o), 0, 1), axis=1), axis=0)
        spoiled_ref[(*its.at, its.number)] = spoiled
    if its.valid is not None:
        o, lse = jnp.where(its.valid, o, jnp.nan), jnp.where(its.valid, lse, jnp.nan)
    put(o_ref, its.at, its.rows.number, o)
    put_numbers(lse_ref, its.at, its.rows.number, lse)


def mend_kernel(*refs: Any, width: int, **task: Any) -> None:
    """Where something came out as NaN or infinite: again, and no hidden value touches a row."""
    *operands, _, lse_ref, spoiled_ref, o_ref = refs
    rows, at, first = task["tile"].rows, place(task["parts"]), program_id(0) * LOOKED_AT
    last = jnp.minimum(first + LOOKED_AT, cdiv(task["sizes"].rows, rows))

    def again(i: Any) -> None:
        its = Task.of(i, at, operands, **task)
        level = base_of(numbers(lse_ref, its.at, its.rows.number, jnp.inf))[:, None]

        def over(j: Any, carry: Any) -> Any:
            o, total = carry
            x, v = its.met(j, True)
            p = x.weights(level)
            return o + weigh_seen(p, v, x.seen), total + jnp.sum(p, axis=1)

        start = jnp.zeros((rows, width), jnp.float32), jnp.zeros(rows, jnp.float32)
        # They add up to 1, but for what rounding the log-sum-exp of huge scores did.
        o, total = lax.fori_loop(its.span.first, its.span.last, over, start)
        o = o * (1 / jnp.where(total == 0, 1, total))[:, None]
        put(o_ref, its.at, its.rows.number, o)

    def look(i: Any, _: None) -> None:
        lax.cond(spoiled_ref[(*at, i)] > 0, functools.partial(again, i), lambda: None)

    lax.fori_loop(first, last, look, None)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slopes: jax.Array | None,
    lengths: jax.Array | None,
    *,
    rules: Rules,
    tile: Tile,
    table: jax.Array | None = None,
    parts: int = 1,
    packed: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Result ``[b, h, sq, dv]`` like ``q``, and log-sum-exp ``[b, h, sq]`` in float32.

    Args:
        q: ``[b, h, sq, d]``, float16 or bfloat16, like k and v.
        k: ``[b, hk, sk, d]``; query head i reads key head i // (h / hk).
        v: ``[b, hk, sk, dv]``.
        slopes: of distance, ``[h]``, or None.
        lengths: keys in use, int32 ``[b]``; None is all.  A negative one gives NaN.
        rules: what a row sees.
        tile: what a program works on.
        table: pages of each sequence in order, int32 ``[b, m]``, all of them pages that are there;
            k and v are then ``[pages, size, hk, ...]``, and the keys of a sequence its pages'.
        parts: programs that share the keys of a block of rows.
        packed: one block of rows takes queries of all heads of a group.
        interpret: run without a GPU.
    """
    sizes = Sizes.of(q, k, packed)
    if table is not None:
        sizes = sizes._replace(hk=k.shape[2], sk=table.shape[1] * k.shape[1])
    lead = () if parts == 1 else (parts,)
    of_rows = (*lead, sizes.b, sizes.heads, sizes.rows)
    n = cdiv(sizes.rows, tile.rows)
    leaks = rules.left is not None or rules.right is not None
    results = (
        like(q, (*of_rows, v.shape[-1]), q.dtype if parts == 1 else jnp.float32),
        like(q, of_rows, jnp.float32),
        like(q, (*of_rows[:-1], n), jnp.int32) if leaks else None,
    )
    task = {"sizes": sizes, "tile": tile, "rules": rules, "parts": parts, "width": width_of(v)}
    how = {"grid": (n, sizes.heads, sizes.b * parts), "warps": tile.warps}
    how |= {"stages": tile.stages, "interpret": interpret}
    operands = (sizes.by_rows(q), k, v, slopes, lengths, table)
    run = functools.partial(attend_kernel, **task, leaks=leaks)
    o, lse, spoiled = launch(run, "attention", out=results, **how)(*operands)
    if leaks:
        o = mended(operands, o, lse, spoiled, task=task, how=how)
    if parts > 1:
        o, lse = combined(o, lse)
    return o.reshape(*q.shape[:3], -1).astype(q.dtype), lse.reshape(q.shape[:3])


def width_of(v: jax.Array) -> int:
    """Columns of the block of a result."""
    return power_of_two(max(v.shape[-1], LEAST_WIDTH))


def mended(
    operands: Sequence[Any],
    o: jax.Array,
    lse: jax.Array,
    spoiled: jax.Array,
    *,
    task: dict[str, Any],
    how: dict[str, Any],
) -> jax.Array:
    """``o`` without what hidden values did to it: blocks of rows that are ``spoiled`` anew."""
    blocks, *others = how["grid"]
    how = how | {"grid": (cdiv(blocks, LOOKED_AT), *others)}
    aliases = {sum(x is not None for x in operands): 0}
    run = functools.partial(mend_kernel, **task)
    return launch(run, "attention_mend", out=like(o), aliases=aliases, **how)(
        *operands, o, lse, spoiled
    )


def combined(o: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The results of parts of the keys, ``[parts, ...]``, as one."""
    top = jnp.max(lse, axis=0)
    share = jnp.exp(lse - jnp.where(jnp.isneginf(top), 0, top))
    total = jnp.sum(share, axis=0)
    divisor = jnp.where(total == 0, 1, total)
    return jnp.sum(o * (share / divisor)[..., None], axis=0), top + jnp.log(divisor)
