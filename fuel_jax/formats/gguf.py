"""GGUF files, llama.cpp's: metadata, and tensors as they lie in the file.

    file = gguf.read("model.gguf")
    file.metadata["general.architecture"]           "llama"
    w = file.tensors["blk.0.ffn_up.weight"]         w.kind "Q4_K", w.shape (n, k)
    y = qmatmul(x, w.words(), **w.layout)           the packed weight, straight from the file
    file.unreadable                                 {name: why}, kinds that no op here takes

The file is mapped, not read: arrays are views of it, read-only, and cost memory as they are used.
Nothing it says is believed.  Every length, count, dimension and offset is compared with the bytes
that are there before anything is allocated; what is kept of the header is at most a small multiple
of its size.  (A file that shrinks while it is mapped ends the process, as any mapped file does.)

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

import itertools
import math
import mmap
import os
import stat
import struct
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, FileError, UnknownName
from ..fused._gguf_blocks import FORMATS
from ._missing import missing

MAGIC, VERSIONS = b"GGUF", (2, 3)

# Of headers.  A tokenizer of 262,144 tokens has 780,000 strings and 20 MB, a large model a thousand
# tensors; within these bounds any header is read, or refused, in a second.
HEADER, PAIRS, TENSORS, STRINGS, DEPTH = 2**27, 2**15, 2**15, 2**20, 4
ALIGNMENTS = tuple(2**i for i in range(3, 17))  # 32 is the rule; the format wants multiples of 8

NUMBERS = {  # type of a value -> its dtype
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4"},
    **{7: "?", 10: "<u8", 11: "<i8", 12: "<f8"},
}
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")

# ggml's number of a kind of tensor -> name, weights and bytes of a block.
KINDS: dict[int, tuple[str, int, int]] = {
    **{0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8)},
    **{24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8)},
    **{2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24)},
    **{8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110)},
    **{12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210)},
    # Known by their size alone.
    **{15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74)},
    **{18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18)},
    **{21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136)},
    **{29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66)},
    **{39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18)},
}
DTYPES: dict[str, Any] = {
    **{"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "F64": np.float64},
    **{"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64},
}


class Tensor(NamedTuple):
    """A tensor in a file: where it lies, and its contents when asked."""

    name: str
    kind: str  # as ggml names it: F32, BF16, Q4_K
    shape: tuple[int, ...]  # rows first: the reverse of the file's order
    start: int  # bytes from the beginning of the file
    size: int  # bytes
    data: mmap.mmap

    @property
    def packed(self) -> bool:
        """Whether ``qmatmul`` takes it."""
        return self.kind in FORMATS

    @property
    def layout(self) -> dict[str, Any]:
        """The parameters of ``qmatmul`` for it: ``quant_type``, ``k`` and ``n``."""
        k = self.shape[-1] if self.shape else 1
        return {"quant_type": self.kind, "k": k, "n": math.prod(self.shape[:-1])}

    def bytes(self) -> NDArray[np.uint8]:
        """Its bytes, a view of the file."""
        return np.frombuffer(self.data, np.uint8, self.size, self.start)

    def words(self) -> NDArray[np.uint32]:
        """A packed weight as ``qmatmul`` takes it; a view where its bytes are whole words.

        Raises:
            ArgumentError: it is not packed in a format that ``qmatmul`` takes.
        """
        if not self.packed:
            instead = "Call array()." if self.kind in DTYPES else "No op here takes it."
            raise ArgumentError(
                f"words: tensor {self.name!r} is {self.kind}; it must be one of "
                f"{', '.join(kind for kind, *_ in KINDS.values() if kind in FORMATS)}. {instead}"
            )
        loose = self.bytes()
        padded = np.pad(loose, (0, -loose.size % 4)) if loose.size % 4 else loose
        return padded.view("<u4").astype(np.uint32, copy=False)

    def array(self) -> NDArray[Any]:
        """An unpacked tensor, a view of the file.

        Raises:
            ArgumentError: it is packed.
        """
        if self.kind not in DTYPES:
            instead = "Call words()." if self.packed else "No op here takes it."
            raise ArgumentError(
                f"array: tensor {self.name!r} is {self.kind}; it must be one of "
                f"{', '.join(DTYPES)}. {instead}"
            )
        little = np.dtype(DTYPES[self.kind]).newbyteorder("<")
        return self.bytes().view(little).astype(DTYPES[self.kind], copy=False).reshape(self.shape)


class Tensors(dict[str, Tensor]):
    """Tensors by name; an error that names what is there instead of one that is not."""

    def __missing__(self, name: str) -> NoReturn:
        raise UnknownName(f"gguf: {missing('tensor', name, list(self))}")


class File(NamedTuple):
    """What a file holds."""

    path: Path
    version: int
    metadata: dict[str, Any]  # int, float, bool, str; arrays: NumPy, or lists of str or of arrays
    tensors: Tensors

    @property
    def unreadable(self) -> dict[str, str]:
        """The tensors no op here takes, and why.  Their bytes can be had."""
        takes = lambda t: t.packed or t.kind in DTYPES
        why = "packed as {}, which no op here takes"
        return {name: why.format(t.kind) for name, t in self.tensors.items() if not takes(t)}


def read(path: str | os.PathLike[str]) -> File:
    """Map a GGUF file and read its header.

    Args:
        path: of an ordinary file.

    Returns:
        A :class:`File`: metadata, and tensors that are views of the file.

    Raises:
        FileError: it is no GGUF file of version 2 or 3, is cut short, or says of itself what cannot
            be; the message names the file, the byte, what is there and what was wanted.
        OSError: it cannot be opened.
    """
    with open(path, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise FileError(f"{path}: not an ordinary file, and only those can be mapped.")
        if about.st_size < 24:
            raise FileError(
                f"{path}: {about.st_size} bytes; the header of a GGUF file alone has 24. "
                f"The file is cut short, or of another kind."
            )
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return Reading(Path(path), data).file()


class Reading:
    """A header being read: the place, and how much more it may hold."""

    path: Path
    data: mmap.mmap
    at: int
    end: int
    strings: int
    arrays: int

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0
        self.end = min(len(data), HEADER)
        self.strings = self.arrays = 0

    def fail(self, said: str, at: int | None = None) -> NoReturn:
        """An error at a byte; the place reached, if no other is given."""
        raise FileError(f"{self.path}, byte {self.at if at is None else at}: {said}")

    # -- parts: each checks that it is there ---------------------------------------------------

    def take(self, size: int, what: str) -> int:
        """Where the next ``size`` bytes begin."""
        if size > self.end - self.at:
            if size <= len(self.data) - self.at:
                self.fail(f"{what} reaches beyond {HEADER} bytes; no header is that long.")
            self.fail(
                f"{what} takes {size} bytes and {len(self.data) - self.at} are left. "
                f"The file is cut short or damaged."
            )
        start, self.at = self.at, self.at + size
        return start

    def number(self, form: str, what: str) -> Any:
        """A number, ``form`` as for ``struct``."""
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form), what))[0]

    def count(self, form: str, what: str, least: int, most: int) -> int:
        """A number of things that take ``least`` bytes each, ``most`` of them at most."""
        start = self.at
        n = self.number(form, what)
        left = len(self.data) - self.at
        if n * least > left:
            self.fail(
                f"{what} is {n}; that takes {n * least} bytes at least and {left} are left. "
                f"The file is cut short or damaged.",
                start,
            )
        if n > most:
            self.fail(f"{what} is {n}; it must be at most {most}, more than any model has.", start)
        return n

    def string(self, what: str) -> str:
        """A string, its length before it."""
        start = self.at
        size = self.count("<Q", f"the length of {what}", 1, HEADER)
        first = self.take(size, what)
        try:
            return self.data[first : self.at].decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error.reason} at byte {error.start} of it.", start)

    def texts(self, what: str, count: int) -> list[str]:
        """Strings one after the other: as ``string``, without its calls, for tokenizers' sake."""
        data, at, end, length, found = self.data, self.at, self.end, LENGTH.unpack_from, []
        for _ in range(count):
            first = at + 8
            if first > end or (last := first + length(data, at)[0]) > end:
                break
            try:
                found.append(data[first:last].decode())
            except UnicodeDecodeError:
                break
            at = last
        self.at = at
        if len(found) < count:
            self.string(what)  # raises
        return found

    # -- metadata ------------------------------------------------------------------------------

    def value(self, what: str, kind: int, depth: int = 0) -> Any:
        """A value of a type."""
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self.array(what, depth + 1)
        if kind not in NUMBERS:
            self.fail(f"the type of {what} is {kind}; it must be from 0 to 12.", self.at - 4)
        return self.numbers(what, kind, 1)[0].item()

    def numbers(self, what: str, kind: int, count: int) -> NDArray[Any]:
        """Numbers side by side, a view of the file."""
        dtype = np.dtype(NUMBERS[kind])
        start = self.take(count * dtype.itemsize, what)
        if NUMBERS[kind] == "?":
            loose = np.frombuffer(self.data, np.uint8, count, start)
            if (loose > 1).any():
                at = int((loose > 1).argmax())
                self.fail(f"{what} is {loose[at]}; a truth value is 0 or 1.", start + at)
            return loose.view(bool)
        numbers = np.frombuffer(self.data, dtype, count, start)
        return numbers.astype(dtype.newbyteorder("="), copy=False)

    def array(self, what: str, depth: int) -> Any:
        """An array: of numbers as NumPy's, of strings or arrays as a list."""
        if depth > DEPTH:
            self.fail(f"{what} is an array {depth} deep; {DEPTH} is the most that is read.")
        kind, elements = self.number("<I", f"the type of {what}"), f"the elements of {what}"
        if kind in NUMBERS:
            size = np.dtype(NUMBERS[kind]).itemsize
            count = self.count("<Q", f"the number of {elements}", size, HEADER)
            return self.numbers(elements, kind, count)
        if kind == STRING:
            count = self.count("<Q", f"the number of {elements}", 8, STRINGS - self.strings)
            self.strings += count
            return self.texts(elements, count)
        if kind != ARRAY:
            self.fail(f"the type of {elements} is {kind}; it must be from 0 to 12.", self.at - 4)
        count = self.count("<Q", f"the number of {elements}", 12, PAIRS - self.arrays)
        self.arrays += count
        return [self.array(elements, depth + 1) for _ in range(count)]

    def pairs(self, count: int) -> dict[str, Any]:
        """Keys and values."""
        metadata: dict[str, Any] = {}
        for i in range(count):
            start = self.at
            key = self.string(f"key {i} of {count}")
            if key in metadata:
                self.fail(f"key {key!r} is there twice; which one counts?", start)
            what = f"the value of {key!r}"
            metadata[key] = self.value(what, self.number("<I", f"the type of {what}"))
        return metadata

    # -- tensors -------------------------------------------------------------------------------

    def tensor(self, i: int, count: int) -> tuple[int, Tensor]:
        """One tensor's name, shape, kind and place, from the start of the tensors' data.

        And where in the header it says so.
        """
        start = self.at
        name = self.string(f"the name of tensor {i} of {count}")
        what = f"tensor {name!r}"
        axes = self.number("<I", f"the number of axes of {what}")
        if axes > 4:
            self.fail(f"{what} has {axes} axes; it must have at most 4.", self.at - 4)
        at = self.take(8 * axes, f"the shape of {what}")
        shape = struct.unpack_from(f"<{axes}Q", self.data, at)[::-1]
        number = self.number("<I", f"the kind of {what}")
        offset = self.number("<Q", f"the offset of {what}")
        if number not in KINDS:
            self.fail(
                f"{what} is of kind {number}; known are {min(KINDS)} to {max(KINDS)}, but for "
                f"those withdrawn. Without its size the rest cannot be checked.",
                self.at - 12,
            )
        kind, weights, size = KINDS[number]
        # Python's integers: the product does not wrap.  Zeros count as ones, for NumPy's sake.
        if math.prod(max(n, 1) for n in shape) * size >= 2**62:
            self.fail(f"{what} has shape {list(shape)}; no machine holds so many.", at)
        if weights > 1 and (not shape or shape[-1] % weights):
            row = shape[-1] if shape else 1
            self.fail(f"{what} has rows of {row}; {kind} packs {weights} weights together.", at)
        total = math.prod(shape) // weights * size
        return start, Tensor(name, kind, shape, offset, total, self.data)

    def alignment(self, metadata: dict[str, Any]) -> int:
        """What offsets are multiples of."""
        value = metadata.get("general.alignment", 32)
        if type(value) is not int or value not in ALIGNMENTS:
            arrived = value if type(value) is int else f"of type {type(value).__name__}"
            self.fail(
                f"'general.alignment' is {arrived}; it must be a power of two from "
                f"{ALIGNMENTS[0]} to {ALIGNMENTS[-1]}."
            )
        return value

    def placed(self, found: list[tuple[int, Tensor]], alignment: int) -> Tensors:
        """The tensors with places in the file, each within it and apart from the others."""
        origin, tensors = -(-self.at // alignment) * alignment, Tensors()
        for at, t in found:
            what = f"tensor {t.name!r}"
            if t.name in tensors:
                self.fail(f"{what} is there twice; which one counts?", at)
            if t.start % alignment:
                self.fail(f"{what} has offset {t.start}, no multiple of {alignment}.", at)
            start = origin + t.start
            if start + t.size > len(self.data):
                self.fail(
                    f"{what} would be the {t.size} bytes from byte {start} on, and the file has "
                    f"{len(self.data)}. It is cut short or damaged.",
                    at,
                )
            tensors[t.name] = t._replace(start=start)
        by_place = sorted((t for t in tensors.values() if t.size), key=lambda t: t.start)
        for before, after in itertools.pairwise(by_place):
            if before.start + before.size > after.start:
                self.fail(
                    f"tensors {before.name!r} and {after.name!r} overlap: {before.size} bytes from "
                    f"{before.start} on, {after.size} from {after.start} on.",
                    after.start,
                )
        return tensors

    # -- all of it -----------------------------------------------------------------------------

    def file(self) -> File:
        """The file, from its first byte."""
        magic = self.data[self.take(4, "the magic") : self.at]
        if magic != MAGIC:
            self.fail(f"begins with {magic!r}; a GGUF file begins with {MAGIC!r}.", 0)
        version = self.number("<I", "the version")
        if version not in VERSIONS:
            (other,) = struct.unpack(">I", struct.pack("<I", version))
            why = " It is big-endian; convert it." if other in VERSIONS else ""
            self.fail(f"GGUF version {version}; it must be 2 or 3.{why}", 4)
        # A tensor takes 24 bytes at least: two lengths, a kind, an offset.  A pair takes 13.
        tensors = self.count("<Q", "the number of tensors", 24, TENSORS)
        metadata = self.pairs(self.count("<Q", "the number of keys", 13, PAIRS))
        found = [self.tensor(i, tensors) for i in range(tensors)]
        placed = self.placed(found, self.alignment(metadata))
        return File(self.path, version, metadata, placed)
