"""Programs of blocks in NumPy: what Triton gives a kernel, as much as attention's ask for.

Nothing is compiled, so a few hundred choices of options take seconds.  And memory minds its ends
here, where Pallas' interpreter moves what lies beyond them inside: who reads or writes outside of
an array fails, and so do two programs that write to one place.  What nobody wrote is NaN.
"""

import contextlib
import itertools
import types

import numpy as np

from pallas_kernels import _attention, _launch, _rows, attention, attention_gradients

here = types.SimpleNamespace(place=(0, 0, 0))  # in the grid


class Memory:
    """An array that programs see."""

    def __init__(self, array, written=None):
        self.array, self.written = array, written
        self.shape, self.dtype = array.shape, array.dtype
        self.at = self

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if all(np.ndim(i) == 0 for i in index) and len(index) == len(self.shape):
            return load(Place(self, index))
        return Place(self, index)

    def __setitem__(self, index, value):
        store(Place(self, index if isinstance(index, tuple) else (index,)), value)


class Place:
    """Some elements of an array."""

    def __init__(self, memory, index):
        self.memory, self.index = memory, np.broadcast_arrays(*index)

    def inside(self, mask):
        """The index, 0 where masked; nothing else may lie outside."""
        mask = np.broadcast_to(True if mask is None else mask, self.index[0].shape)
        for i, end in zip(self.index, self.memory.shape, strict=True):
            assert np.all((i[mask] >= 0) & (i[mask] < end)), f"{i[mask]} of {end}"
        return tuple(np.where(mask, i, 0) for i in self.index), mask


def load(place, mask=None, other=None):
    """What lies there, and ``other``, or anything, where masked."""
    index, mask = place.inside(mask)
    array = place.memory.array
    if mask.all():
        return array[index]
    anything = np.nan if array.dtype.kind not in "iu" else 2**30
    other = np.asarray(anything if other is None else other, array.dtype)
    return np.where(mask, array[index], other) if array.size else np.full(mask.shape, other)


def store(place, value, mask=None):
    """Once."""
    index, mask = place.inside(mask)
    index = tuple(i[mask] for i in index)
    assert not place.memory.written[index].any(), "written twice"
    place.memory.written[index] = True
    place.memory.array[index] = np.broadcast_to(value, mask.shape)[mask]


def like(x, shape=None, dtype=None):
    """A result that nobody wrote yet."""
    shape, dtype = x.shape if shape is None else shape, np.dtype(dtype or x.dtype)
    return np.full(shape, -(2**30) if dtype.kind == "i" else np.nan, dtype)


def launch(kernel, name, *, out, grid, aliases=None, **how):
    """Every program of the grid, one after another."""

    def run(*operands):
        given = [None if x is None else Memory(np.asarray(x)) for x in operands]
        outs = out if isinstance(out, tuple) else (out,)
        present = [x for x in given if x is not None]
        for place, i in (aliases or {}).items():
            at = [j for j, x in enumerate(outs) if x is not None][i]
            outs = (*outs[:at], present[place].array.copy(), *outs[at + 1 :])
        results = [None if x is None else Memory(x, np.zeros(x.shape, bool)) for x in outs]
        for here.place in itertools.product(*map(range, grid)):
            kernel(*given, *results)
        arrays = tuple(None if x is None else x.array for x in results)
        return arrays if isinstance(out, tuple) else arrays[0]

    return run


def dot_general(a, b, over, precision, preferred_element_type):
    """Of matrices, summed in float32."""
    a, b = (x.astype(np.float32) for x in (a, b))
    return a @ (b if over[0][1] == (0,) else b.T)


def fori_loop(low, high, body, carry):
    for i in range(int(low), int(high)):
        carry = body(np.int32(i), carry)
    return carry


LAX = types.SimpleNamespace(
    cond=lambda yes, then, otherwise: then() if yes else otherwise(),
    fori_loop=fori_loop,
    div=lambda a, b: np.int32(int(a) // int(b)),  # of what is not negative
    dot_general=dot_general,
    bitcast_convert_type=lambda x, dtype: np.ascontiguousarray(x).view(dtype),
    DotAlgorithmPreset=types.SimpleNamespace(TF32_TF32_F32_X3=None),
)
TRITON = types.SimpleNamespace(load=load, store=store)
NAMES = {"jnp": np, "lax": LAX, "triton": lambda: TRITON, "launch": launch, "like": like}
NAMES |= {"program_id": lambda axis: np.int32(here.place[axis])}


@contextlib.contextmanager
def simulated(monkeypatch):
    """Attention's kernels for blocks run here."""
    with monkeypatch.context() as m, np.errstate(all="ignore"), _launch.INTERPRETED(True):
        for module in (_attention, _launch, _rows, attention, attention_gradients):
            for name in NAMES.keys() & vars(module).keys():
                m.setattr(module, name, NAMES[name])
        yield
