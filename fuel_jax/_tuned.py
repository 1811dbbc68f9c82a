"""Tables of tiles: for calls of a kernel, the setting that was measured to be the best.

    {"version": "1.0",
     "machine": {"platform": "cuda", "device": "NVIDIA H200", "jax": …, "date": …},
     "rows": [
        {"op": "flash_attn", "kernel": "triton", "dtype": "bfloat16",
         "extents": {"heads": 128, "queries": 4096, "keys": 4096, "width": 128},
         "tile": {"tile": {"rows": 128, "keys": 64, "warps": 4, "stages": 2}, "parts": 1},
         "us": 2166, "date": "2026-11-29", …}, …]}

A row answers for the calls whose extents count up to the same powers of two; of two rows the later
one.  Of the kernel's settings for the call, the first is taken that has what the tile says, so a
row may leave out what it does not care for; if none has, the first by rule.  The tables that
are shipped (``pallas_kernels/tuned``) answer on the device they are named after; another is in
force where it is asked for (``fuel_jax.judge.tuned``), instead of those.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels._launch import lowered_for
from pallas_kernels._tiles import Tiles, bucket

from ._json_file import named, number, opened, text

WHAT, ROWS = "table of tiles", "rows"
MAJOR, MINOR = 1, 0
SHIPPED = pathlib.Path(pallas_kernels.__file__).parent / "tuned"

# Part of JAX's own cache keys, as a pin is.  None: the table of this device, if one is shipped.
TUNED = jax.make_user_context(None)


class Key(NamedTuple):
    """What a row is found by."""

    op: str
    kernel: str
    dtype: str
    extents: str

    @classmethod
    def of(cls, op: str, kernel: str, dtype: str, extents: dict[str, Any]) -> Key:
        """Extents that count up to the same powers of two are alike."""
        counted = {name: bucket(extent) for name, extent in extents.items()}
        return cls(op, kernel, dtype, json.dumps(counted, sort_keys=True))


@dataclass(frozen=True)
class Row:
    """The best setting of a kernel for some calls."""

    op: str
    kernel: str
    dtype: str
    extents: dict[str, int | str]
    tile: dict[str, Any]
    us: float | None = None  # None: it was found to be the best, and the time not written down
    date: str = ""

    @property
    def key(self) -> Key:
        """What it is found by."""
        return Key.of(self.op, self.kernel, self.dtype, self.extents)

    @classmethod
    def read(cls, given: Any) -> Row | None:
        """A row of a file, or None where it says something this version does not understand."""
        try:
            op, kernel, dtype = (named(given[n]) for n in ("op", "kernel", "dtype"))
            extents = {named(n): extent(v) for n, v in given["extents"].items()}
            us = None if given.get("us") is None else number(given["us"])
            date = text(given.get("date", ""))
            return cls(op, kernel, dtype, extents, settings(given["tile"]), us, date)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None


def extent(value: Any) -> int | str:
    """A number of elements, or a word."""
    if isinstance(value, str):
        return named(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
        raise ValueError
    return value


def settings(given: Any) -> dict[str, Any]:
    """Whole numbers by name, switches, or such settings."""
    return {named(n): settings(v) if isinstance(v, dict) else whole(v) for n, v in given.items()}


def whole(value: Any) -> int:
    """A whole number, or a switch."""
    if not isinstance(value, int):
        raise ValueError
    return value


@dataclass(frozen=True)
class Table:
    """Rows as kernels are cut by them.  Equal ones are one in JAX's caches."""

    digest: str
    platform: str
    device: str
    name: str = field(compare=False)
    rows: dict[Key, Row] = field(compare=False, repr=False)

    @classmethod
    def of(cls, machine: dict[str, Any], rows: Iterable[Row], name: str = "the table") -> Table:
        """What a table says now."""
        found = {row.key: row for row in rows}
        said = json.dumps([machine, [vars(row) for row in found.values()]], sort_keys=True)
        digest = hashlib.sha256(said.encode()).hexdigest()
        platform, device = (text(str(machine.get(n, ""))) for n in ("platform", "device"))
        return cls(digest, platform, device, name, found)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Table:
        """The table of a file.

        Raises:
            FileError: it is none, is damaged, or comes from a newer major version.
            OSError: it cannot be opened.
        """
        document = opened(path, WHAT, MAJOR, ROWS)
        rows = (row for raw in document[ROWS] if (row := Row.read(raw)))
        return cls.of(document["machine"], rows, os.path.basename(path))


@functools.cache
def shipped(device: str) -> Table | None:
    """The table that comes with the library for a device."""
    path = SHIPPED / f"{re.sub(r'[^a-z0-9]+', '_', device.lower()).strip('_')}.json"
    return Table.load(path) if path.is_file() else None


def in_force(platforms: Sequence[str]) -> Table | None:
    """The table for a kernel of some platforms; none named is every one."""
    table = TUNED.value
    if table is None:
        return shipped(lowered_for()) if "cuda" in platforms else None
    return table if not platforms or table.platform in platforms else None


class Chosen(NamedTuple):
    """The setting that a kernel gets for a call, and why that."""

    tile: Any
    why: str

    def __str__(self) -> str:
        return f"{shown(plain(self.tile))} ({self.why})"


def chosen(
    op: str,
    kernel: str,
    platforms: Sequence[str],
    tiles: Callable[..., Tiles],
    avals: Sequence[Any],
    params: dict[str, Any],
) -> Chosen:
    """The setting of the table, if the kernel has it for the call; else the first."""
    extents, (first, *others) = tiles(*avals, **params)
    table = in_force(platforms)
    row = table.rows.get(Key.of(op, kernel, dtype_of(avals), extents)) if table else None
    if table is None or row is None:
        return Chosen(first, "heuristic")
    for tile in (first, *others):
        if has(plain(tile), row.tile):
            on = f" on {row.date}" if row.date else ""
            return Chosen(tile, f"{'set' if row.us is None else 'tuned'}{on} for {table.device}")
    says = f"heuristic: {shown(row.tile)} of {table.name} is not among the settings for this call"
    return Chosen(first, says)


def has(tile: dict[str, Any], said: dict[str, Any]) -> bool:
    """Whether a setting is what a row says, as far as it says anything."""
    inner = lambda name, value: isinstance(value, dict) and isinstance(tile[name], dict)
    return all(
        name in tile and (has(tile[name], value) if inner(name, value) else tile[name] == value)
        for name, value in said.items()
    )


def dtype_of(avals: Sequence[Any]) -> str:
    """Of the first operand that holds floats, else of the first."""
    names = [x.dtype for x in avals if x is not None]
    floats = (d for d in names if jnp.issubdtype(d, jnp.floating))
    return next(floats, names[0]).name


def plain(tile: Any) -> dict[str, Any]:
    """A setting as JSON has it."""
    return {
        name: plain(value) if isinstance(value, tuple) else value
        for name, value in tile._asdict().items()
    }


def shown(tile: dict[str, Any]) -> str:
    """``128 rows, 64 keys, 4 warps, 2 stages``."""

    def one(name: str, value: Any) -> str:
        if isinstance(value, bool):
            return name if value else f"not {name}"
        if isinstance(value, dict):
            return f"{name} ({shown(value)})"
        return f"{value} {name.removesuffix('s') if value == 1 else name}"

    return ", ".join(one(name, value) for name, value in tile.items())
