"""What a compiled program sends between devices."""

import math
import re
from collections import Counter

import jax
import numpy as np

KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
CALL = re.compile(rf"= (\(?[^=]*?\)?) ({KINDS})(?:-start)?\(")
ARRAY = re.compile(r"([a-z]+\d+|pred)\[([\d,]*)\]")
WIDTHS = {"pred": 1, "bf16": 2}


def collectives(program, *arrays):
    """Bytes of the results of each kind of collective, on one device."""
    found = Counter()
    for results, kind in CALL.findall(jax.jit(program).lower(*arrays).compile().as_text()):
        for dtype, shape in ARRAY.findall(results):
            width = WIDTHS.get(dtype) or int(re.sub(r"\D", "", dtype)) // 8
            found[kind] += width * math.prod(int(n) for n in shape.split(",") if n)
    return dict(found)


def predicted(rule, split, mesh, results):
    """Bytes of the parts that are summed over devices, by the rule."""
    leaves = [y for y in results if y is not None]
    total = 0
    for y, spec, axes in zip(
        leaves, rule.specs(rule.results, split), rule.sums(split), strict=True
    ):
        used = [a for entry in spec for a in ((entry,) if isinstance(entry, str) else entry or ())]
        if axes:
            total += y.size * y.dtype.itemsize // math.prod(mesh.shape[a] for a in used)
    return total


def largest_error(got, want):
    """Over all leaves, relative to the largest element wanted."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(
        float(np.abs(np.asarray(g) - np.asarray(w)).max() / max(1, np.abs(np.asarray(w)).max()))
        for g, w in pairs
    )
