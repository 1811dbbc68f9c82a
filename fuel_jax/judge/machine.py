"""What measurements hold for: device, driver, versions, and the speeds that bound them."""

from __future__ import annotations

import os
import pathlib
import platform
import subprocess
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _check, _environment
from ..numerics import product_precision
from .device_time import interleaved, jax_burst

COPIED = {"cpu": 2**24}, 2**27  # elements of float32: more than caches hold.  By platform, else
PRODUCT = {"cpu": 1024}, 8192  # rows and columns


def machine() -> dict[str, Any]:
    """Device, driver, versions, commit, date."""
    here = _check.platform_here()
    found = {"platform": here, "device": jax.devices()[0].device_kind}
    if here == "cpu":
        found |= {"processor": processor(), "cores": os.cpu_count()}
    else:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found |= {"driver": _environment.answer(query)[0]}
    return found | {
        **{"jax": jax.__version__, "fuel_jax": _environment.version("fuel-jax") or ""},
        **{"commit": commit(), "date": time.strftime("%Y-%m-%d")},
    }


def processor() -> str:
    """The name of the processor."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def commit() -> str:
    """Of the checkout that this is, or nothing."""
    here = pathlib.Path(__file__).parent
    git = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def ceilings() -> dict[str, float]:
    """What bounds every op: bytes a second of a copy, operations a second of a product by dtype."""
    here = _check.platform_here()
    count, n = (few.get(here, many) for few, many in (COPIED, PRODUCT))
    x = jnp.ones(count, jnp.float32)
    bursts = {"copy": jax_burst(lambda x: x + 1, [(x,)], 1, np.inf)[0]}
    for dtype in ("float32", "bfloat16"):
        a = jnp.ones((n, n), dtype)
        product = lambda a: jnp.matmul(a, a, precision=product_precision(a))
        bursts[dtype] = jax_burst(product, [(a,)], 1, np.inf)[0]
    took = {name: got["least_us"] * 1e-6 for name, got in interleaved(bursts, 5).items()}
    moved = 2.0 * count * x.dtype.itemsize
    done = dict.fromkeys(took, 2.0 * n**3) | {"copy": moved}
    return {name: float(f"{done[name] / s:.4g}") for name, s in took.items()}


def memory() -> float:
    """Bytes that one program may take beside its operands and results: half of what there is."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] / 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
