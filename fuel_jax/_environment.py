"""``python -m fuel_jax env``: what to paste into an issue.  Never raises, whatever is broken.

Devices are asked for in another process: a driver may raise, abort or hang there.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence

PACKAGES = ("jax", "jaxlib", "numpy", "ml_dtypes", "jaxtyping")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu")
OPTIONAL = ("rich", "matplotlib", "gguf", "safetensors", "chex", "torch")
VARIABLES = ("JAX_", "XLA_", "CUDA_VISIBLE", "NVIDIA_VISIBLE", "HIP_VISIBLE", "TPU_", "FUEL_JAX_")
PATIENCE = (
    120  # seconds for a device to answer; a first contact with eight GPUs takes half a minute
)

ASK_JAX = """
import jax
for device in jax.devices():
    print(device.platform, device.id, device.device_kind, device.client.platform_version, sep="  ")
print("config:", *(f"{n}={getattr(jax.config, n)}" for n in (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion",
    "jax_compilation_cache_dir")))
"""


def environment() -> None:
    """Print versions, devices and settings."""
    for title, facts in SECTIONS.items():
        try:
            lines = facts()
        except Exception as error:  # a report with a hole is better than none
            lines = [f"unknown: {type(error).__name__}: {error}"]
        print(title, *(f"  {line}" for line in lines), sep="\n", flush=True)


def machine() -> list[str]:
    """The library, interpreter, system, processor."""
    return [
        f"fuel_jax {version('fuel-jax') or '(not installed)'} in {pathlib.Path(__file__).parent}",
        f"Python {platform.python_version()} ({sys.executable})",
        f"{platform.platform()}, {platform.machine()}, {os.cpu_count()} CPUs",
    ]


def packages() -> list[str]:
    """What the library is built on, what it can use, what it found."""
    needed = [f"{name} {version(name) or 'MISSING'}" for name in PACKAGES]
    found = [f"{name} {v}" for name in PLUGINS + OPTIONAL if (v := version(name))]
    absent = [name for name in OPTIONAL if not version(name)]
    return [", ".join(needed), ", ".join(found), f"not installed: {', '.join(absent) or 'none'}"]


def version(package: str) -> str | None:
    """Of an installed distribution; importing nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> list[str]:
    """What JAX says of its devices and settings, or how it failed."""
    return answer([sys.executable, "-c", ASK_JAX])


def nvidia() -> list[str]:
    """What the driver says, without JAX."""
    query = "--query-gpu=name,driver_version,memory.total,compute_cap"
    return answer(["nvidia-smi", query, "--format=csv,noheader"])


def answer(command: Sequence[str]) -> list[str]:
    """Lines a command printed; if it failed, how, and the end of what it said."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PATIENCE
        )
    except FileNotFoundError:
        return [f"no {command[0]} here"]
    except subprocess.TimeoutExpired:
        return [f"no answer within {PATIENCE} s"]
    if done.returncode == 0:
        return done.stdout.splitlines() or ["nothing"]
    how = f"exit {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
    return [f"failed: {how}", *done.stderr.splitlines()[-3:]]


def variables() -> list[str]:
    """Environment variables that change what JAX does."""
    return [f"{n}={v}" for n, v in sorted(os.environ.items()) if n.startswith(VARIABLES)] or [
        "none that matters"
    ]


SECTIONS: dict[str, Callable[[], list[str]]] = {
    "machine": machine,
    "packages": packages,
    "devices, as JAX sees them": devices,
    "NVIDIA driver": nvidia,
    "environment variables": variables,
}
