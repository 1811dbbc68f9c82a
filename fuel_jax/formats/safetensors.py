"""Checkpoints in safetensors: AutoAWQ's and bitsandbytes' packed weights as our products take them.

    tensors = safetensors.read("folder or model.safetensors")
    operands, params = safetensors.nf4(tensors, "model.layers.0.mlp.up_proj")
    y = nf4_matmul(x, *operands, **params)

The ``safetensors`` package reads the files and checks lengths, offsets, overlaps and sizes before
anything is allocated.  Checked here: what NumPy cannot hold, and whether tensors fit each other.
Of two tensors of one name in a file the package gives the last one.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ..errors import FileError, ShapeError, UnknownName
from ..fused.nf4_matmul import LEVELS
from ._missing import missing
from .awq import from_gemm

# NumPy has no BF16 and no F8; JAX has taught it those.
KNOWN = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
STATE = "quant_state.bitsandbytes__"  # a JSON text, as bytes

Packed = tuple[tuple[NDArray[Any], ...], dict[str, int]]  # operands after the activations, params


class Tensors(Mapping[str, NDArray[Any]]):
    """Tensors of one or more files by name, each read when asked for."""

    def __init__(self, path: Path, files: Mapping[str, Any]):
        self.path = path
        self._file_of = files  # name -> open file

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._file_of:
            raise UnknownName(f"safetensors: {missing('tensor', name, list(self))}")
        file = self._file_of[name]
        about = file.get_slice(name)
        kind, shape = about.get_dtype(), about.get_shape()
        if kind not in KNOWN:
            self.fail(name, f"is {kind}; it must be one of {', '.join(KNOWN)}.")
        # Zeros count as ones, for NumPy's sake: it refuses what is empty and yet too large.
        if len(shape) > 8 or math.prod(max(n, 1) for n in shape) >= 2**59:
            self.fail(name, f"has shape {shape}; no model has such a tensor.")
        return file.get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def fail(self, name: str, said: str) -> NoReturn:
        """An error about a tensor."""
        raise FileError(f"{self.path}: {name!r} {said}")


def read(path: str | os.PathLike[str]) -> Tensors:
    """Open a checkpoint.

    Args:
        path: a ``.safetensors`` file; or a folder with ``model.safetensors``, or with
            ``model.safetensors.index.json`` and the files it names.

    Returns:
        The tensors by name, read when they are asked for.

    Raises:
        FileError: a file is damaged, or the index names what is not there.
        OSError: a file cannot be opened.
        ImportError: without ``safetensors``: ``pip install 'fuel-jax[formats]'``.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "read: checkpoints are read by the safetensors package, which is not installed. "
            "pip install 'fuel-jax[formats]'"
        ) from error
    path, found = Path(path), {}
    for part in parts(path) if path.is_dir() else [path]:
        try:
            file = safe_open(part, framework="np")
        except SafetensorError as error:
            raise FileError(f"{part}: {error}. The file is damaged, or of another kind.") from None
        for name in file.keys():  # noqa: SIM118  it is no mapping
            if name in found:
                raise FileError(f"{part}: {name!r} is in another file of {path}, too.")
            found[name] = file
    return Tensors(path, found)


def parts(folder: Path) -> list[Path]:
    """The files of a checkpoint: those its index names, or the one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    names = json_object(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise FileError(f"{index}: 'weight_map' must be an object of file names.")
    for name in names.values():
        if Path(name).name != name or not (folder / name).is_file():
            raise FileError(f"{index}: names {name!r}; it must be a file in {folder}.")
    return [folder / name for name in sorted(set(names.values()))]


def json_object(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object, or an error."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: is no JSON: {str(error)[:100]}.") from None
    if not isinstance(value, dict):
        raise FileError(f"{where}: is a JSON {type(value).__name__}; it must be an object.")
    return value


# -- packed weights ----------------------------------------------------------------------------


def is_awq(tensors: Mapping[str, Any], name: str) -> bool:
    """Whether a layer's weight is AutoAWQ's."""
    return f"{name}.qweight" in tensors


def awq(tensors: Tensors, name: str) -> Packed:
    """A layer in AutoAWQ's GEMM layout: what ``awq_matmul`` takes after the activations.

    Args:
        tensors: the checkpoint.
        name: of the layer; its tensors are ``name.qweight``, ``name.qzeros``, ``name.scales``.

    Returns:
        ``(weight, zeros, scales)`` and ``{"group_size": …}``.

    Raises:
        FileError: they do not fit each other.
        UnknownName: one is not there.
    """
    qweight, qzeros, scales = (tensors[f"{name}.{x}"] for x in ("qweight", "qzeros", "scales"))
    try:
        operands = from_gemm(qweight, qzeros, scales)
    except ShapeError as error:
        tensors.fail(name, f"is no layer in AutoAWQ's GEMM layout: {error}")
    if not qweight.size:
        tensors.fail(name, f"has qweight {list(qweight.shape)}; it must not be empty.")
    return operands, {"group_size": qweight.shape[0] // qzeros.shape[0]}


def is_nf4(tensors: Mapping[str, Any], name: str) -> bool:
    """Whether a layer's weight is bitsandbytes', in 4 bits."""
    return f"{name}.weight.quant_map" in tensors


def nf4(tensors: Tensors, name: str) -> Packed:
    """A layer as bitsandbytes saves it: what ``nf4_matmul`` takes after the activations.

    Scales that are packed themselves ("nested", "double quantisation") are unpacked in float32, as
    bitsandbytes does it:  absmax = map[code] · nested_absmax[block] + offset.

    Args:
        tensors: the checkpoint.
        name: of the layer; its tensors are ``name.weight`` and others that begin so.

    Returns:
        ``(w_packed, absmax)`` and ``{"block_size": …}``.

    Raises:
        FileError: they do not fit each other, are of another type (fp4), or blocks do not fill a
            row.
        UnknownName: one is not there.
    """
    of = lambda part: tensors[f"{name}.weight.{part}"]
    state = next((x for x in tensors if x.startswith(f"{name}.weight.{STATE}")), None)
    if state is None or not state.endswith("nf4"):
        arrived = "no quant_state" if state is None else f"is {state.rpartition('__')[2]}"
        tensors.fail(name, f"{arrived}; it must be nf4.")
    about = json_object(tensors[state].tobytes(), f"{tensors.path}: {state!r}")
    shape, block = about.get("shape"), about.get("blocksize")
    sizes = [*shape, block] if isinstance(shape, list) and len(shape) == 2 else []
    if not sizes or not all(type(n) is int and 0 < n < 2**31 for n in sizes):
        tensors.fail(name, f"has shape {shape!r} and blocksize {block!r}; not [n, k] and a number.")
    n, k, block = sizes
    loose = tensors[f"{name}.weight"].reshape(-1).view(np.uint8)  # whatever it was stored as
    if n * k != 2 * loose.size or k % block or k % 2:
        tensors.fail(
            name,
            f"has {loose.size} bytes for {n} x {k} weights in blocks of {block}; two weights share "
            f"a byte, and blocks must fill a row.",
        )
    if not np.array_equal(of("quant_map"), LEVELS):
        tensors.fail(name, "has levels of its own (quant_map); they must be those of NF4.")
    absmax = of("absmax").reshape(-1)
    if absmax.size != n * k // block:
        tensors.fail(name, f"has {absmax.size} scales; its weights need {n * k // block}.")
    if absmax.dtype == np.uint8:
        absmax = unpacked(tensors, name, absmax, about)
    scales = absmax.astype(np.float32, copy=False).reshape(n, k // block)
    return (loose.reshape(n, k // 2), scales), {"block_size": block}


def unpacked(
    tensors: Tensors, name: str, codes: NDArray[np.uint8], about: Mapping[str, Any]
) -> NDArray[np.float32]:
    """Scales of scales of codes."""
    of = lambda part: tensors[f"{name}.weight.nested_{part}"].astype(np.float32).reshape(-1)
    levels, absmax = of("quant_map"), of("absmax")
    block, offset = about.get("nested_blocksize"), about.get("nested_offset")
    if type(block) is not int or block < 1 or type(offset) is not float or not abs(offset) < 2**100:
        tensors.fail(name, f"has nested_blocksize {block!r} and nested_offset {offset!r}.")
    if levels.size != 256 or absmax.size != -(-codes.size // block):
        tensors.fail(
            name,
            f"has {levels.size} nested levels and {absmax.size} nested scales; {codes.size} scales "
            f"in blocks of {block} need 256 and {-(-codes.size // block)}.",
        )
    each = np.repeat(absmax, block)[: codes.size] if block < codes.size else absmax
    return levels[codes] * each + np.float32(offset)


def dense(tensors: Tensors, name: str) -> NDArray[Any]:
    """A tensor that is not packed: of floats.

    Raises:
        FileError: it is of another type.
        UnknownName: it is not there.
    """
    x = tensors[name]
    if not jnp.issubdtype(x.dtype, jnp.floating):
        tensors.fail(name, f"is {x.dtype}; it must be of floats.")
    return x
