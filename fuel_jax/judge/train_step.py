"""The suite ``train-step``: a step of training a decoder, written in several ways.

Tokens a second by the clock, the ways taking turns on one state; the memory that the compiled
step takes beside weights and Adam's averages; the first loss, from the same weights; and where the
device's time goes.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .. import fuse
from .._check import platform_here
from . import h200, llama
from .device_time import interleaved, kernels
from .llama import Config
from .profile import Suite, run

TINY = {"vocabulary": 96, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48}
TINY |= {"batch": 2, "length": 24}
ROUNDS, LEAST = 3, 2  # steps in a round
SHOWN = 8  # kernels
OURS = "ops"


class Case(NamedTuple):
    """A model and a batch."""

    name: str
    config: Config


NAME = "llama 1.1B B4 S4096 bf16"
CASES = [
    Case(f"{NAME} V32000", Config()),
    Case(f"{NAME} V128256", Config(vocabulary=128_256)),
]

CUDNN = llama.plain("cudnn")
DENSE = llama.plain("xla")
FORMS: dict[str, tuple[llama.Written, bool]] = {  # and whether it goes through fuse
    "cuDNN": (CUDNN, False),
    OURS: (llama.OPS, False),
    "ops, cuDNN attention": (llama.OPS._replace(attend=CUDNN.attend), False),
    "cuDNN, fused": (CUDNN, True),
    "dense, fused": (DENSE, True),
    "dense": (DENSE, False),
}


class Program(NamedTuple):
    """A compiled step and what is known before it is timed."""

    step: Any
    temporary: int  # bytes
    loss: float


class Training:
    """One state that the programs hand on to each other: each may overwrite it."""

    def __init__(self, config: Config):
        self.start = jax.jit(functools.partial(llama.start, config))
        key = jax.random.key(1)
        self.tokens = jax.random.randint(key, (config.batch, config.length), 0, config.vocabulary)
        self.state: Any = None

    def compiled(self, f: Callable[..., Any]) -> Program:
        """A step down a loss, and what it says of the first weights."""
        self.state = None  # only one at a time
        self.state = self.start(jax.random.key(0))
        step = jax.jit(functools.partial(llama.step, f), donate_argnums=0)
        program = step.lower(self.state, self.tokens).compile()
        self.state, loss = program(self.state, self.tokens)
        needs = program.memory_analysis()
        return Program(program, needs.temp_size_in_bytes if needs else 0, float(loss))

    def burst(self, program: Program, n: int) -> float:
        """Seconds of each of n steps."""
        since, loss = time.perf_counter(), None
        for _ in range(n):
            self.state, loss = program.step(self.state, self.tokens)
        jax.block_until_ready((self.state, loss))
        return (time.perf_counter() - since) / n


def chosen(asked: Sequence[str]) -> list[Case]:
    """The cases of the names, their beginning words, or patterns with ``*``; all for none."""
    return h200.chosen(asked, CASES)


def profile(cases: Sequence[Case], rows: str | None = None, tiny: bool = False) -> int:
    """Run the cases, printing as they are known; 1 if ours failed in one of them, else 0."""
    said = "tokens a second, and memory beside weights and Adam's averages"
    return run(Suite("train-step", said, measured, lines), cases, rows, tiny)


def measured(case: Case, tiny: bool, forms: dict[str, Any] = FORMS) -> dict[str, Any]:
    """A case's row."""
    config = case.config._replace(**TINY) if tiny else case.config
    training, programs, failed = Training(config), {}, {}
    for name, (written, fused) in forms.items():
        if written.attend is CUDNN.attend and platform_here() != "cuda":
            continue  # nobody else has it
        f = functools.partial(llama.loss, config, written)
        try:
            programs[name] = training.compiled(fuse(f) if fused else f)
        except Exception as error:  # whatever a compiler or a driver may raise is a finding
            failed[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    bursts = {n: functools.partial(training.burst, p) for n, p in programs.items()}
    times = interleaved(bursts, 1 if tiny else ROUNDS, 0, LEAST)
    for name, program in programs.items():
        times[name]["temporary_bytes"] = program.temporary
        times[name]["loss"] = program.loss
        times[name]["kernels_us"] = shares(kernels(bursts[name], 1))
    row = {"case": case.name, "tokens": config.tokens, **times.pop(OURS, {}), "peers": times}
    return row | ({"failed": failed} if failed else {})


def shares(took: dict[str, float]) -> dict[str, int]:
    """Microseconds by what a kernel does, as far as its name tells; the most first."""
    kinds: dict[str, float] = {}
    for name, us in took.items():
        word = kind(name)
        kinds[word] = kinds.get(word, 0) + us
    ordered = sorted(kinds.items(), key=lambda item: -item[1])
    rest = sum(us for _, us in ordered[SHOWN:])
    return {name: round(us) for name, us in [*ordered[:SHOWN], *([("rest", rest)] * bool(rest))]}


def kind(name: str) -> str:
    """Of a kernel: products, attention, copies, or its own name without numbers."""
    if re.search(r"gemm|nvjet|xmma|cutlass_80|cublas", name) and "fprop" not in name:
        return "products"
    if re.search(r"sdpa|fmha|flash|fprop|bprop|cudnn", name):
        return "cuDNN attention"
    return re.sub(r"[_.]*\d+", "", name).strip("_") or name


def lines(row: dict[str, Any]) -> list[str]:
    """What is printed of a row."""
    shown = []
    for name, got in (({OURS: row} if "us" in row else {}) | row["peers"]).items():
        least, rate, most = (row["tokens"] / got[k] * 1e6 for k in ("most_us", "us", "least_us"))
        gib = got["temporary_bytes"] / 2**30
        shown.append(
            f"  {name:<22}{rate:>8,.0f} tokens/s ({least:,.0f}–{most:,.0f}); {gib:.2f} GiB; "
            f"first loss {got['loss']:.4f}"
        )
        if total := sum(got["kernels_us"].values()):
            parts = (f"{kind} {us / total:.0%}" for kind, us in got["kernels_us"].items())
            shown.append(f"    {total / 1e3:.0f} ms in kernels: {', '.join(parts)}")
    return shown + [f"  {name:<22} {why}" for name, why in row.get("failed", {}).items()]
