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
from ..types import Array
from . import h200, llama
from .device_time import Burst, interleaved, kernels
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
MIXED = llama.OPS._replace(attend=CUDNN.attend)
KEEPING: Callable[..., Any] = functools.partial(llama.stacked, policy=llama.keeps_attention)
FORMS: dict[str, tuple[llama.Written, bool]] = {  # and whether it goes through fuse
    "cuDNN": (CUDNN, False),
    OURS: (llama.OPS, False),
    "ops, cuDNN attention": (MIXED, False),
    "ops, cuDNN attention kept": (MIXED._replace(stack=KEEPING), False),
    "ops, cuDNN attention, half gradients": (MIXED._replace(stack=llama.halves_stacked), False),
    "cuDNN, attention kept": (CUDNN._replace(stack=KEEPING), False),
    "cuDNN, half gradients": (CUDNN._replace(stack=llama.halves_stacked), False),
    "cuDNN, fused": (CUDNN, True),
    "dense, fused": (DENSE, True),
    "dense": (DENSE, False),
}
TORCH = "torch.compile"
WAYS = (*FORMS, TORCH)


class Program(NamedTuple):
    """A step, and what is known before it is timed."""

    burst: Burst
    temporary: int  # bytes
    loss: float  # of the first weights


class Training:
    """One state that the programs hand on to each other: each may overwrite it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.start: Callable[..., llama.State] = jax.jit(functools.partial(llama.start, config))
        key = jax.random.key(1)
        shape = (config.batch, config.length)
        self.tokens: Array = jax.random.randint(key, shape, 0, config.vocabulary)
        self.state: Any = None

    def restart(self) -> llama.State:
        """The first weights; never two states at a time."""
        self.state = None
        self.state = self.start(jax.random.key(0))
        return self.state

    def compiled(self, written: llama.Written, fused: bool) -> Program | None:
        """A way in JAX; None where the device has it not."""
        if written.attend is CUDNN.attend and platform_here() != "cuda":
            return None
        f = functools.partial(llama.loss, self.config, written)
        step = jax.jit(functools.partial(llama.step, fuse(f) if fused else f), donate_argnums=0)
        program = step.lower(self.restart(), self.tokens).compile()
        self.state, loss = program(self.state, self.tokens)
        needs = program.memory_analysis()

        def burst(n: int) -> float:
            since, loss = time.perf_counter(), None
            for _ in range(n):
                self.state, loss = program(self.state, self.tokens)
            jax.block_until_ready((self.state, loss))
            return (time.perf_counter() - since) / n

        return Program(burst, needs.temp_size_in_bytes if needs else 0, float(loss))

    def in_torch(self) -> Program | None:
        """PyTorch's; None where it is not installed."""
        try:
            from . import llama_torch
        except ImportError:
            return None
        training = llama_torch.Training(self.config, self.restart()[0], self.tokens)
        loss = float(training.step())
        return Program(training.burst, training.temporary(), loss)


def chosen(asked: Sequence[str]) -> list[Case]:
    """The cases of the names, their beginning words, or patterns with ``*``; all for none."""
    return h200.chosen(asked, CASES)


def profile(cases: Sequence[Case], rows: str | None = None, tiny: bool = False) -> int:
    """Run the cases, printing as they are known; 1 if ours failed in one of them, else 0."""
    said = "tokens a second, and memory beside weights and Adam's averages"
    return run(Suite("train-step", said, measured, lines), cases, rows, tiny)


def measured(case: Case, tiny: bool, ways: Sequence[str] = ()) -> dict[str, Any]:
    """A case's row; all ways, where none is named."""
    config = case.config._replace(**TINY) if tiny else case.config
    training = Training(config)
    programs: dict[str, Program] = {}
    failed: dict[str, str] = {}
    for name in ways or WAYS:
        try:
            program = training.in_torch() if name == TORCH else training.compiled(*FORMS[name])
        except Exception as error:  # whatever a compiler or a driver may raise is a finding
            failed[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            continue
        programs |= {name: program} if program else {}
    bursts = {name: program.burst for name, program in programs.items()}
    times = interleaved(bursts, 1 if tiny else ROUNDS, 0, LEAST)
    found: dict[str, dict[str, Any]] = {}
    for name, program in programs.items():
        found[name] = times[name] | {"temporary_bytes": program.temporary, "loss": program.loss}
        found[name]["kernels_us"] = shares(kernels(program.burst, 1))
    row = {"case": case.name, "tokens": config.tokens, **found.pop(OURS, {}), "peers": found}
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
    """Of a kernel: attention, products, or its own name without numbers."""
    if re.search(r"sdpa|fmha|flash|fprop|bprop|cudnn", name):
        return "cuDNN attention"
    if re.search(r"gemm|nvjet|xmma|cutlass|cublas", name):
        return "products"
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    plain = name.partition("<")[0]  # what a template is of says nothing here
    return re.sub(r"[_.]*\d+", "", plain).strip("_") or plain


def lines(row: dict[str, Any]) -> list[str]:
    """What is printed of a row."""
    shown = []
    for name, got in (({OURS: row} if "us" in row else {}) | row["peers"]).items():
        least, rate, most = (row["tokens"] / got[k] * 1e6 for k in ("most_us", "us", "least_us"))
        gib = got["temporary_bytes"] / 2**30
        shown.append(
            f"  {name:<38}{rate:>8,.0f} tokens/s ({least:,.0f}–{most:,.0f}); {gib:.2f} GiB; "
            f"first loss {got['loss']:.4f}"
        )
        if total := sum(got["kernels_us"].values()):
            parts = (f"{kind} {us / total:.0%}" for kind, us in got["kernels_us"].items())
            shown.append(f"    {total / 1e3:.0f} ms in kernels: {', '.join(parts)}")
    return shown + [f"  {name:<38} {why}" for name, why in row.get("failed", {}).items()]
