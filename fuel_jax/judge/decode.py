"""The suite ``decode``: a step of decoding with weights in halves and in four bits."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import flash_attn, nf4_matmul, qmatmul, rope, write_slice_doff
from ..types import Array
from . import h200, llama
from .device_time import Burst, interleaved, kernels
from .llama import HALF, Config, Params
from .profile import Suite, run
from .suite import reason
from .train_step import shares
from .workload import Spec, filled

LLAMA = Config(128_256, 4096, 32, 32, 8, 14_336, batch=1, length=1024)
TINY = {"vocabulary": 64, "width": 256, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 256}
TINY |= {"length": 16}
OURS = "NF4"
FORMS = ("bfloat16", OURS, "Q4K")


class Case(NamedTuple):
    """A model, and how many sequences it continues."""

    name: str
    config: Config


CASES = [Case(f"llama 8B B{b} context 1024", LLAMA._replace(batch=b)) for b in (1, 16)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A weight ``[k, n]`` in four bits, for ``x @ w``."""

    operands: tuple[Any, ...]
    k: int = dataclasses.field(metadata={"static": True})
    n: int = dataclasses.field(metadata={"static": True})

    def __rmatmul__(self, x: Any) -> Any:
        if len(self.operands) == 2:
            return nf4_matmul(x, *self.operands, block_size=64)
        return qmatmul(x, *self.operands, quant_type="Q4K", k=self.k, n=self.n)


def weight(form: str, k: int, n: int, key: Any) -> Any:
    """Random values; in four bits random codes."""
    specs = {
        "bfloat16": (Spec((k, n)),),
        "NF4": (Spec((n, k // 2), "uint8"), Spec((n, k // 64), "float32", "positive")),
        "Q4K": (Spec((n * k,), "uint32", "Q4K"),),
    }[form]
    made = [filled(spec, jax.random.fold_in(key, i)) for i, spec in enumerate(specs)]
    return made[0] * HALF(k**-0.5) if form == "bfloat16" else Packed(tuple(made), k, n)


def init(config: Config, form: str, key: Any) -> Params:
    """Layers one by one, as a decoder has them; the embedding stays halves."""
    d, f, v = config.width, config.hidden, config.vocabulary
    kv = config.kv_heads * config.head_width
    extents = {"q": (d, d), "k": (d, kv), "v": (d, kv), "out": (d, d)}
    extents |= {"gate": (d, f), "up": (d, f), "down": (f, d)}
    make = jax.jit(weight, static_argnums=(0, 1, 2))
    keys = iter(jax.random.split(key, 7 * config.layers + 2))
    ones = {name: jnp.ones(d, jnp.float32) for name in ("attention_norm", "norm")}
    return {
        "embedding": make("bfloat16", v, d, next(keys)),
        "layers": [
            ones | {name: make(form, *kn, next(keys)) for name, kn in extents.items()}
            for _ in range(config.layers)
        ],
        "norm": ones["norm"],
        "head": make(form, d, v, next(keys)),
    }


def step(config: Config, params: Params, cache: Any, tokens: Any, at: Any) -> Any:
    """The next token of each sequence ``[B]``, the most probable, and the cache with this one."""
    tables = [lax.dynamic_slice_in_dim(t, at, 1) for t in llama.tables(config)]
    cos, sin = (jnp.concatenate([t, t], -1) for t in tables)
    turned = lambda x: rope(x.astype(jnp.float32), cos, sin).astype(x.dtype)
    x = params["embedding"][tokens][:, None]
    extended = []
    for p, (keys, values) in zip(params["layers"], cache, strict=True):

        def attend(q, k, v, keys=keys, values=values):
            q, k, v = (y.swapaxes(1, 2) for y in (q, k, v))
            keys = write_slice_doff(keys, turned(k), at, axis=2)
            values = write_slice_doff(values, v, at, axis=2)
            extended.append((keys, values))
            y = flash_attn(turned(q), keys, values, k_len=at + 1, causal=True)
            return y.swapaxes(1, 2)

        x = llama.layer(config, llama.norm, attend, p, x)
    scores = (llama.norm(x, params["norm"]) @ params["head"])[:, 0]
    return jnp.argmax(scores, -1).astype(jnp.int32), extended


def chosen(asked: Sequence[str]) -> list[Case]:
    """The cases of the names, their beginning words, or patterns with ``*``; all for none."""
    return h200.chosen(asked, CASES)


def profile(cases: Sequence[Case], rows: str | None = None, tiny: bool = False) -> int:
    """Run the cases, printing as they are known; 1 if ours failed in one of them, else 0."""
    return run(
        Suite("decode", "tokens a second at the end of the context", measured, lines),
        cases,
        rows,
        tiny,
    )


class Decoding:
    """One cache that the forms hand on to each other: each writes into its memory."""

    def __init__(self, config: Config) -> None:
        self.config = config
        shape = (config.batch, config.kv_heads, config.length, config.head_width)
        self.cache: Any = [
            (jnp.ones(shape, HALF), jnp.ones(shape, HALF)) for _ in range(config.layers)
        ]
        self.tokens: Array = jnp.zeros(config.batch, jnp.int32)
        self.at: Array = jnp.int32(config.length - 1)

    def lowered(self, params: Params) -> Any:
        """A step with these weights, to be compiled."""
        step_ = jax.jit(functools.partial(step, self.config), donate_argnums=1)
        return step_.lower(params, self.cache, self.tokens, self.at)

    def burst(self, program: Any, params: Params) -> Burst:
        """Steps with these weights."""

        def burst(n: int) -> float:
            since = time.perf_counter()
            for _ in range(n):
                self.tokens, self.cache = program(params, self.cache, self.tokens, self.at)
            jax.block_until_ready((self.tokens, self.cache))
            return (time.perf_counter() - since) / n

        return burst


def measured(case: Case, tiny: bool) -> dict[str, Any]:
    """A case's row."""
    config = case.config._replace(**TINY) if tiny else case.config
    decoding = Decoding(config)
    weights: dict[str, Params] = {}
    bursts: dict[str, Burst] = {}
    known: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    waiting: dict[str, Any] = {}
    # A step is hundreds of kernels: all forms are compiled at once.
    with concurrent.futures.ThreadPoolExecutor(len(FORMS)) as pool:
        for form in FORMS:
            try:
                weights[form] = init(config, form, jax.random.key(0))
                waiting[form] = pool.submit(timed, decoding.lowered(weights[form]))
            except Exception as failure:  # whatever a compiler or a driver may raise is a finding
                failed[form] = reason(failure)
        for form, compiling in waiting.items():
            try:
                program, seconds = compiling.result()
            except Exception as failure:
                failed[form] = reason(failure)
                continue
            needs = program.memory_analysis()
            known[form] = {
                "compile_s": round(seconds, 1),
                "weight_bytes": sum(x.nbytes for x in jax.tree.leaves(weights[form])),
                "temporary_bytes": needs.temp_size_in_bytes if needs else 0,
            }
            bursts[form] = decoding.burst(program, weights[form])
    times: dict[str, dict[str, Any]] = {
        form: got | known[form] | {"kernels_us": shares(kernels(bursts[form], 4))}
        for form, got in interleaved(bursts, *((1, 0) if tiny else (5, 0.1))).items()
    }
    row = {"case": case.name, "tokens": config.batch, **times.pop(OURS, {}), "peers": times}
    return row | ({"failed": failed} if failed else {})


def timed(lowered: Any) -> tuple[Any, float]:
    """The program, and the seconds that compiling took."""
    since = time.perf_counter()
    return lowered.compile(), time.perf_counter() - since


def lines(row: dict[str, Any]) -> list[str]:
    """What is printed of a row."""
    shown = []
    for name, got in (({OURS: row} if "us" in row else {}) | row["peers"]).items():
        rate, total = row["tokens"] / got["us"] * 1e6, sum(got["kernels_us"].values())
        shown.append(
            f"  {name:<10}{rate:>8,.0f} tokens/s; {got['us']:,.0f} µs a step, {total:,} in "
            f"kernels; {got['weight_bytes'] / 2**30:.2f} GiB of weights, "
            f"{got['temporary_bytes'] / 2**20:.0f} MiB of temporaries; compiled in "
            f"{got['compile_s']:.0f} s"
        )
        parts = (f"{kind} {us / total:.0%}" for kind, us in got["kernels_us"].items())
        shown += [f"    {', '.join(parts)}"] * bool(total)
    return shown + [f"  {name:<10} {why}" for name, why in row.get("failed", {}).items()]
