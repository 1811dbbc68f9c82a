"""Which implementation serves a call.

An op's implementations are asked in order; each platform gets the first that can and will serve.
The answer depends on shapes, dtypes and static parameters alone, and the platform is settled when
XLA lowers (``lax.platform_dependent``): abstract evaluation, export and ahead-of-time lowering for
another machine are right without a device.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
from jax import lax

from pallas_kernels._tiles import Tiles

from ._notebook import html_table
from ._tuned import Chosen, chosen
from .errors import UnsupportedKernel

Reason = Callable[..., str | None]

# Part of JAX's own cache keys: entering and leaving a pin retraces what it must, and nothing else.
PIN = jax.make_user_context(None)

# Measurements to choose by, if anybody asked for that (``fuel_jax.judge``), or None.  They have a
# ``platform``, and ``verdict(op, kernels, avals, params)`` on kernels that could serve there.
MEASURED = jax.make_user_context(None)


def never(*avals: Any, **params: Any) -> None:
    """No objection."""


@dataclass(frozen=True)
class KernelCaps:
    """What a kernel takes beyond contiguous row-major operands.  JAX never asks for either."""

    strided_input: bool = False
    requires_broadcast: bool = False


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op, with the op's own signature.

    ``refuses`` and ``declines`` get the operands as ``ShapeDtypeStruct`` (or None) and the static
    parameters.  They return None, or the reason as a sentence fragment: ``refuses`` for what the
    kernel cannot do, ``declines`` for what it could do and another does better.  A pin overrules
    ``declines`` only.  ``tiles``, of the same arguments, says how the kernel may be cut for a call;
    it then takes the setting that was chosen as ``tile``.
    """

    name: str
    run: Callable[..., Any]
    platforms: tuple[str, ...] = ()  # none named: every platform
    refuses: Reason = never
    declines: Reason = never
    caps: KernelCaps = field(default_factory=KernelCaps)
    tiles: Callable[..., Tiles] | None = None

    @functools.cached_property
    def interpretable(self) -> bool:
        """Whether it runs, interpreted, on platforms it was not written for."""
        return "interpret" in inspect.signature(self.run).parameters

    @functools.cached_property
    def revision(self) -> int:
        """Hash of the kernel's module: a measurement holds for this revision.  0 is untracked."""
        try:
            module = inspect.getmodule(inspect.unwrap(self.run))
            source = inspect.getsource(module) if module else ""
        except (OSError, TypeError):
            return 0
        return int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "little")


@dataclass(frozen=True)
class Choice:
    """What became of one implementation: the platforms it serves, or why it serves none."""

    kernel: Kernel
    serves: tuple[str, ...] = ()  # "default" stands for every platform not named before
    why_not: str | None = None
    measured: str | None = None  # what measurements say of it, where they decided
    tile: Chosen | None = None  # how it is cut, where it can be cut in several ways

    @property
    def says(self) -> str:
        """Where it serves, or why nowhere."""
        where = ", ".join("every platform left" if p == "default" else p for p in self.serves)
        where = "every platform" if self.serves == ("default",) else where
        told = [str(told) for told in (self.tile, self.measured) if told]
        serves = "; ".join([f"serves {where}", *told])
        return serves if where else str(self.why_not)

    def __str__(self) -> str:
        return f"{self.kernel.name:<10} {self.says}"


@dataclass(frozen=True)
class Explanation:
    """Which implementation runs forward and backward, and why the others do not."""

    op: str
    forward: list[Choice]
    backward: list[Choice] | str
    devices: Sequence[str] = ()  # what becomes of operands that are split over devices

    def __str__(self) -> str:
        back = [self.backward] if isinstance(self.backward, str) else map(str, self.backward)
        lines = [f"forward   {c}" for c in self.forward] + [f"backward  {c}" for c in back]
        lines += [f"devices   {says}" for says in self.devices]
        return "\n".join([self.op, *(f"  {line}" for line in lines)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        back = [self.backward] if isinstance(self.backward, str) else self.backward
        told = [("forward", choice) for choice in self.forward]
        told += [("backward", choice) for choice in back]
        rows = [
            (way, "", c) if isinstance(c, str) else (way, c.kernel.name, c.says) for way, c in told
        ]
        rows += [("devices", "", says) for says in self.devices]
        return html_table(self.op, rows)


class Verdict(NamedTuple):
    """The implementation that measurements prefer, and what they say of each they know."""

    best: str
    says: dict[str, str]


def decide(
    op: str,
    kernels: Sequence[Kernel],
    pin: str | None,
    avals: Sequence[Any],
    params: dict[str, Any],
) -> list[Choice]:
    """One choice per implementation, in order of preference.

    A pin binds an op that has an implementation of that name, and measurements tell nothing then.
    """
    pinned = any(kernel.name == pin for kernel in kernels)
    choices = by_rule(kernels, pin if pinned else None, avals, params)
    report = MEASURED.value
    if report is not None and not pinned:
        choices = by_report(report, op, choices, avals, params)
    return [tiled(op, choice, avals, params) for choice in choices]


def tiled(op: str, choice: Choice, avals: Sequence[Any], params: dict[str, Any]) -> Choice:
    """The choice with how its kernel is cut, if it serves and can be cut in several ways."""
    kernel = choice.kernel
    if kernel.tiles is None or not choice.serves:
        return choice
    asked = op, kernel.name, kernel.platforms, kernel.tiles
    return replace(choice, tile=chosen(*asked, avals, params))


def by_rule(
    kernels: Sequence[Kernel], pin: str | None, avals: Sequence[Any], params: dict[str, Any]
) -> list[Choice]:
    """What the kernels themselves say."""
    choices: list[Choice] = []
    taken: set[str] = set()
    for kernel in kernels:
        if pin is not None and kernel.name != pin:
            why_not = f"{pin} is pinned"
        elif not (why_not := kernel.refuses(*avals, **params)) and pin is None:
            why_not = kernel.declines(*avals, **params)
        serves: tuple[str, ...] = ()
        if why_not is None and "default" not in taken:
            serves = tuple(p for p in kernel.platforms or ("default",) if p not in taken)
            taken.update(serves)
        if not serves:
            why_not = why_not or "would serve, but comes later"
        choices.append(Choice(kernel, serves, why_not))
    return choices


def by_report(
    report: Any, op: str, choices: list[Choice], avals: Sequence[Any], params: dict[str, Any]
) -> list[Choice]:
    """The choices on the platform of a report, where it knows the one that would serve.

    Measurements overrule ``declines``, as a pin does, and never ``refuses``.
    """
    here, own = report.platform, server(choices, report.platform)
    able = [
        choice.kernel
        for choice in choices
        if here in (choice.kernel.platforms or (here,))
        and (choice.serves or not choice.kernel.refuses(*avals, **params))
    ]
    verdict: Verdict | None = report.verdict(op, able, avals, params)
    if verdict is None or own is None or own.kernel.name not in verdict.says:
        return choices
    changed = []
    for choice in choices:
        serves, says = choice.serves, verdict.says.get(choice.kernel.name)
        if choice.kernel.name == verdict.best:
            if choice is not own:
                serves = (here, *serves)
            choice = replace(choice, serves=serves, why_not=None, measured=says)
        elif says and verdict.best != own.kernel.name:
            serves = tuple(p for p in serves if p != here)
            choice = replace(choice, serves=serves, why_not=says, measured=f"not {here}: {says}")
        elif says:
            choice = replace(choice, why_not=says)
        changed.append(choice)
    return changed


def server(choices: Sequence[Choice], here: str) -> Choice | None:
    """The choice that serves this platform."""
    by_name = (c for c in choices if here in c.serves)
    by_default = (c for c in choices if "default" in c.serves)
    return next(itertools.chain(by_name, by_default), None)


def choose(
    op: str,
    kernels: Sequence[Kernel],
    pin: str | None,
    avals: Sequence[Any],
    params: dict[str, Any],
    over_devices: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """The implementation to run, as one function of the arrays.

    All are wrapped by ``over_devices``, which is told of the body that it is one.
    """
    branches: dict[str, Callable[..., Any]] = {}
    for choice in decide(op, kernels, pin, avals, params):
        cut = {"tile": choice.tile.tile} if choice.tile else {}
        kernel, run = choice.kernel, functools.partial(choice.kernel.run, **params, **cut)
        split: Callable[..., Any] = lambda run: run
        if over_devices is not None:
            interpreted = kernel.name == pin and kernel.platforms and kernel.interpretable
            plain = kernel is kernels[-1]
            split = functools.partial(over_devices, plain=plain, interpreted=bool(interpreted))
        branches |= {platform: split(run) for platform in choice.serves}
        if kernel.name == pin and not choice.serves:
            given = ", ".join(map(describe, avals))
            raise UnsupportedKernel(
                f"{op}: kernel {pin!r} cannot serve {given}: {choice.why_not}. "
                f"Without the pin another one serves; {op}.explain(...) says which."
            )
        if kernel.name == pin and kernel.platforms and kernel.interpretable:
            branches["default"] = split(functools.partial(run, interpret=True))
    if tuple(branches) == ("default",):
        return branches["default"]
    return functools.partial(lax.platform_dependent, **branches)


def abstract(arrays: Sequence[Any]) -> list[Any]:
    """Shapes and dtypes only: what choices may depend on."""
    return [None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


def describe(x: Any) -> str:
    """``float32[2,8]`` for arrays, ``repr`` for the rest."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return repr(x)
    return f"{x.dtype.name}[{','.join(map(str, x.shape))}]"
