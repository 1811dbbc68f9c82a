"""Cases of the suite ``sweep``: ops over grids of extents, in each direction and dtype."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import families, h200
from .families import Family
from .h200 import BOTH, FORWARD, GRADIENT
from .workload import Work

Extents = dict[str, Any]
MOST = 2**30  # elements of an operand


class Case(NamedTuple):
    """An op in a direction and a dtype, over a grid of extents."""

    name: str
    direction: str
    family: Family
    down: Sequence[Extents]
    across: Sequence[Extents]
    tiny: tuple[Sequence[Extents], Sequence[Extents]]  # a grid that any machine can run

    def shapes(self, tiny: bool = False) -> list[Shape]:
        """Those of the grid that a device can hold."""
        grid = self.tiny if tiny else (self.down, self.across)
        made = (Shape(self, *at, self.family(**at[0] | at[1])) for at in itertools.product(*grid))
        size = lambda work: max(math.prod(spec.shape) for spec in work.specs)
        return [shape for shape in made if size(shape.work) <= MOST]


class Shape(NamedTuple):
    """A place in a grid."""

    case: Case
    down: Extents
    across: Extents
    work: Work


WORDS = {FORWARD: "forward", GRADIENT: "gradient", BOTH: "value+gradient"}
SHORT = {"bfloat16": "bf16", "float32": "f32"}


def along(name: str, *values: int) -> list[Extents]:
    """An axis of a grid."""
    return [{name: value} for value in values]


def cases(
    name: str,
    family: Family,
    *,
    directions: Sequence[str],
    dtypes: Sequence[str],
    down: Sequence[Extents],
    across: Sequence[Extents],
    tiny: tuple[Sequence[Extents], Sequence[Extents]],
    **fixed: Any,
) -> list[Case]:
    """An op in every direction and dtype."""
    found = []
    for direction, dtype in itertools.product(directions, dtypes):
        given = functools.partial(family, dtype=dtype, **fixed)
        said = f"{name} {WORDS[direction]} {SHORT[dtype]}"
        found.append(Case(said, direction, given, down, across, tiny))
    return found


CASES: list[Case] = []
FLOATS, HALVES = ("bfloat16", "float32"), ("bfloat16",)
ROWS, COLUMNS = (1, 16, 334, 4096, 65536), (64, 1000, 8192, 50257, 262144)
MATRICES: Any = {"dtypes": FLOATS, "down": along("r", *ROWS), "across": along("c", *COLUMNS)}
MATRICES |= {"tiny": (along("r", 5), along("c", 8, 300))}
for name, family, directions in (
    # Softmax's gradient reads its result: alone it would have to be made for that.
    ("softmax_last_dim", families.softmax, (FORWARD, BOTH)),
    ("log_softmax_last_dim", families.log_softmax, (FORWARD, GRADIENT)),
    ("rms_norm_last_dim", families.rms_norm, (FORWARD, GRADIENT)),
    ("layer_norm_last_dim", families.layer_norm, (FORWARD, GRADIENT)),
    ("cumsum", families.running_sum, (FORWARD,)),
    ("argmax_dim", families.largest, (FORWARD,)),
):
    CASES += cases(name, family, directions=directions, **MATRICES)
CASES += cases(
    "fused_softmax_cross_entropy",
    families.cross_entropy,
    directions=(FORWARD, BOTH),
    dtypes=FLOATS,
    down=along("r", *ROWS),
    across=along("v", *COLUMNS),
    tiny=(along("r", 16), along("v", 8, 300)),
)

WEIGHTS = [{"k": 4096, "n": 14336}, {"k": 2048, "n": 2048}]
ACTIVATIONS = along("m", 1, 4, 16, 64, 128, 256, 2048)
PRODUCTS: Any = {"directions": (FORWARD, GRADIENT), "down": ACTIVATIONS, "across": WEIGHTS}
PRODUCTS |= {"tiny": (along("m", 1, 5), [{"k": 256, "n": 48}])}
CASES += cases("nf4_matmul", families.nf4, dtypes=HALVES, **PRODUCTS)
CASES += cases("awq_matmul", families.awq, dtypes=HALVES, **PRODUCTS)
for quant in ("Q4_0", "Q8_0", "Q4K", "Q6K"):
    family = functools.partial(families.quantised, quant_type=quant)
    CASES += cases(f"qmatmul {quant}", family, dtypes=("float32",), **PRODUCTS)

CASES += cases(
    "selective_scan",
    families.selective,
    directions=(FORWARD, GRADIENT),
    dtypes=FLOATS,
    down=along("b", 1, 8),
    across=along("l", 1, 64, 2048),
    tiny=([{"b": 2, "d": 24, "n": 4}], along("l", 1, 40)),
    **{"d": 2048, "n": 16},
)
CASES += cases(
    "ssd_chunk_scan",
    families.ssd,
    directions=(FORWARD, GRADIENT),
    dtypes=HALVES,
    down=along("b", 1, 8),
    across=along("l", 64, 512, 2048),
    tiny=([{"b": 2, "h": 4, "p": 8, "n": 8}], along("l", 64, 128)),
    **{"h": 64, "p": 64, "n": 128, "g": 1},
)
CASES += cases(
    "causal_conv1d",
    families.conv1d,
    directions=(FORWARD,),
    dtypes=FLOATS,
    down=along("c", 64, 1024, 4096),
    across=along("l", 1, 64, 1024, 8192),
    tiny=(along("c", 12), along("l", 1, 50)),
    **{"b": 8, "k": 4},
)


def chosen(asked: Sequence[str]) -> list[Case]:
    """The cases of the names, their beginning words, or patterns with ``*``; all for none."""
    return h200.chosen(asked, CASES)
