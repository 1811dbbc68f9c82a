"""One multiprocessor of a Hopper GPU in NumPy: as much of it as attention's kernel asks for.

Pallas has no interpreter for tensor cores of that kind.  Groups of warps are threads here, and
barriers keep phases as the chip does: who misses one waits for ever, and that is an error.  Memory
starts as NaN, and what a product reads has to stay as it is until somebody waits for it.
"""

import contextlib
import threading
import types

import jax
import jax.experimental.pallas
import numpy as np

from pallas_kernels import (
    _hopper,
    _hopper_order,
    _launch,
    attention_hopper,
    attention_hopper_gradients,
    attention_hopper_keys,
)

from . import blocks

PATIENCE = 30  # seconds
here = threading.local()  # group, place in the grid, products under way


def whole(index):
    """An index of Python's numbers."""
    index = index if isinstance(index, tuple) else (index,)
    ranges = Span, slice, type(...)
    return tuple(i if isinstance(i, ranges) else int(i) for i in index)


class Span:
    """So many elements from one on, which may lie beyond the end."""

    def __init__(self, start, size):
        self.start, self.size = int(start), size


class Memory:
    """An array, or a part of it."""

    def __init__(self, array):
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype
        self.at = self  # x.at[i] is x[i] without reading it

    def __getitem__(self, index):
        index = whole(index)
        if index == (Ellipsis,):
            return self.array.copy()
        cut = (slice(i.start, i.start + i.size) if isinstance(i, Span) else i for i in index)
        part = self.array[tuple(cut)]
        return Memory(part) if part.ndim else part

    def __setitem__(self, index, value):
        self.array[...] = np.asarray(value)

    def transpose(self, axes):
        return Memory(self.array.transpose(axes))


class Barriers:
    """Some barriers, each of which completes a phase after so many arrivals."""

    def __init__(self, arrivals, n):
        self.arrivals, self.come, self.done = arrivals, [0] * n, [0] * n
        self.waits = {}  # of a group at a barrier, so far
        self.changed = threading.Condition()
        self.at = types.SimpleNamespace()
        self.at = self

    def __getitem__(self, i):
        return self, int(i)

    def arrive(self, i):
        with self.changed:
            self.come[i] += 1
            if self.come[i] == self.arrivals:
                self.come[i], self.done[i] = 0, self.done[i] + 1
            self.changed.notify_all()

    def wait(self, i):
        waited = self.waits.get((here.group, i), 0)
        self.waits[here.group, i] = waited + 1
        with self.changed:  # the chip keeps a phase's parity, not its number
            over = lambda: (self.done[i] - waited) % 2 == 1
            assert self.changed.wait_for(over, PATIENCE), f"group {here.group} waits for ever"


class Sums:
    """An accumulator of products."""

    def __init__(self, value):
        self.value, self.shape = value, value.shape

    def __setitem__(self, index, value):
        self.value = value

    def __getitem__(self, index):
        return load(self, wait_n=0)


def read(x):
    """In float64: the sum of a product does not depend on which operand comes first, as on chip."""
    return np.array(x.array if isinstance(x, Memory) else x, np.float64)


def multiply(into, a, b):
    """Starts; what is read must not change until it is waited for."""
    here.products.append((into, a, b, read(a), read(b)))


def load(sums, *, wait_n):
    """What is summed, when at most so many products are under way."""
    while len(here.products) > wait_n:
        into, a, b, a_then, b_then = here.products.pop(0)
        np.testing.assert_array_equal(read(a), a_then)
        np.testing.assert_array_equal(read(b), b_then)
        with np.errstate(invalid="ignore"):
            into.value = (into.value + a_then @ b_then).astype(np.float32)
    assert all(into is not sums for into, *_ in here.products), "read while it is summed up"
    return sums.value


def fetch(source, target, ready):
    target.array[...] = 0
    target.array[tuple(map(slice, source.shape))] = source.array
    ready[0].arrive(ready[1])


def store(source, target):
    target.array[...] = source.array[tuple(map(slice, target.shape))]


def made(what):
    """Memory, barriers and accumulators that are asked for."""
    return tuple(map(made, what)) if isinstance(what, tuple) else what()


def full(shape, dtype, **_):
    return lambda: Memory(np.full(shape, np.nan, dtype))


def run_scoped(run, *what, collective_axes=None):
    if collective_axes is None:
        return run(*map(made, what))
    with here.program["lock"]:
        shared = here.program.setdefault("shared", made(what))
    return run(*shared)


def run_state(run):
    def final(sums):
        run(sums)
        return jax.tree.map(lambda x: x[...], sums)

    return final


class ACC:
    """Its two uses: allocated, and with a value."""

    def __new__(cls, shape, dtype):
        return lambda: Sums(np.zeros(shape, np.float32))

    @staticmethod
    def init(value):
        return Sums(value)


GPU = types.SimpleNamespace(
    SMEM=full,
    ACC=ACC,
    Barrier=lambda *, num_arrivals, num_barriers: lambda: Barriers(num_arrivals, num_barriers),
    TilingTransform=lambda tile: None,
    SwizzleTransform=lambda width: None,
    Layout=types.SimpleNamespace(WGMMA=types.SimpleNamespace(reduce=lambda axis: None)),
    layout_cast=lambda x, layout: x,
    load=lambda x, layout, optimized=True: x[...],
    broadcasted_iota=lambda dtype, shape, axis, layout: np.indices(shape, dtype)[axis],
    barrier_wait=lambda barrier: barrier[0].wait(barrier[1]),
    barrier_arrive=lambda barrier: barrier[0].arrive(barrier[1]),
    copy_gmem_to_smem=fetch,
    copy_smem_to_gmem=store,
    wgmma=multiply,
    wgmma_accumulator_load=load,
    set_max_registers=lambda n, action: None,
    commit_smem=lambda: None,
    wait_smem_to_gmem=lambda n, wait_read_only=False: None,
)


def warpgroups(kernel, name, *, out, grid, groups):
    """Every program of the grid, one after another; its groups at once."""

    def run(*operands):
        memory = lambda x, of: None if x is None else Memory(of(x))
        given = [memory(x, np.asarray) for x in operands]
        results = [memory(x, lambda x: np.full(x.shape, np.nan, x.dtype)) for x in out]
        for place in np.ndindex(*grid.values()):
            program, failed = {"lock": threading.Lock()}, []

            def work(group, place=place, program=program, failed=failed):
                here.group, here.products, here.program = group, [], program
                here.place = dict(zip(grid, place, strict=True)) | {"group": group}
                try:
                    with (
                        np.errstate(all="ignore"),
                        _launch.INTERPRETED(True),
                        _launch.BY_BITS(True),
                    ):
                        kernel(*given, *results)
                except BaseException as error:  # of a thread: it would be lost
                    failed.append(error)

            threads = [threading.Thread(target=work, args=(i,)) for i in range(groups)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if failed:
                raise failed[0]
        return tuple(None if x is None else x.array for x in results)

    return run


LAX = types.SimpleNamespace(
    **vars(blocks.LAX),
    axis_index=lambda name: np.int32(here.place[name]),
    rem=lambda a, b: np.int32(int(a) % int(b)),  # of what is not negative
    broadcast_in_dim=lambda x, shape, along: np.broadcast_to(
        np.expand_dims(x, 1 - along[0]), shape
    ),
    optimization_barrier=lambda xs: xs,
)
NAMES = {"jnp": np, "lax": LAX, "mosaic": lambda: GPU, "warpgroups": warpgroups}
NAMES |= {"dynamic_slice": Span, "like": blocks.like}


@contextlib.contextmanager
def simulated(monkeypatch):
    """Attention's kernels for Hopper run here, and those for blocks which mend their results."""
    with monkeypatch.context() as m, blocks.simulated(m):
        kernels = attention_hopper, attention_hopper_gradients, attention_hopper_keys
        for module in (_hopper, _hopper_order, *kernels):
            for name in NAMES.keys() & vars(module).keys():
                m.setattr(module, name, NAMES[name])
        m.setattr(jax.experimental.pallas, "run_scoped", run_scoped)
        m.setattr(jax.experimental.pallas, "run_state", run_state)
        yield
