"""Cases for one NVIDIA H200, each with the time that memory or arithmetic allows and a goal.

The floor counts the bytes that must move once, at the 4.25 TB/s the card copies, or the bfloat16
operations at 750 TFLOP/s, its best measured product, whichever takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ..errors import UnknownName
from . import families
from .workload import Work


class Case(NamedTuple):
    """A workload in a direction, with its goal and floor in microseconds of device time."""

    name: str
    goal_us: float
    floor_us: float
    direction: str  # "forward", "gradient", "both": value and gradient, "backward": alone
    family: Any
    extents: dict[str, Any]
    tiny: dict[str, Any]  # extents that any machine can run

    def work(self, tiny: bool = False) -> Work:
        """The workload."""
        return self.family(**self.extents | (self.tiny if tiny else {}))


CASES: list[Case] = []
FORWARD, GRADIENT, BOTH, BACKWARD = "forward", "gradient", "both", "backward"


def case(name, goal, floor, direction, family, tiny, **extents):
    """Enter a case."""
    CASES.append(Case(name, goal, floor, direction, family, extents, tiny))


def attention(words, goal, floor, direction, hk=32, **options):
    """Enter a case of attention."""
    tiny = {"b": 1, "h": 4, "hk": 4 if hk == 32 else 2, "s": 64, "d": 16}
    if "window_size_left" in options:
        tiny["window_size_left"] = 16
    extents = {"b": 4, "h": 32, "hk": hk, "s": 4096, "d": 128} | options
    heads = "H32" if hk == 32 else f"H32/{hk}"
    name = f"flash_attn {words} B4 {heads} S4096 D128 bf16"
    case(name, goal, floor, direction, families.attention, tiny, **extents)


R = "[16384,8192] bf16"
ROWS, FEW_ROWS = {"r": 16384, "c": 8192}, {"r": 32, "c": 96}
for name, family, forward, back in (
    ("softmax_last_dim", families.softmax, (132, 126), (330, 316)),
    ("log_softmax_last_dim", families.log_softmax, (132, 126), None),
    ("rms_norm_last_dim", families.rms_norm, (132, 126), (200, 189)),
    ("layer_norm_last_dim", families.layer_norm, (134, 126), (204, 189)),
):
    case(f"{name} fwd {R}", *forward, FORWARD, family, FEW_ROWS, **ROWS)
    if back:
        words, way = ("fwd+bwd", BOTH) if name == "softmax_last_dim" else ("gradient", GRADIENT)
        case(f"{name} {words} {R}", *back, way, family, FEW_ROWS, **ROWS)

V = "[8192,128256] bf16"
for words, way, goal, floor in (("fwd", FORWARD, 500, 494), ("value+grad", BOTH, 1350, 989)):
    name = f"fused_softmax_cross_entropy {words} {V}"
    case(name, goal, floor, way, families.cross_entropy, {"r": 32, "v": 1000}, r=8192, v=128256)

attention("fwd", 1700, 1466, FORWARD)
attention("fwd causal", 930, 733, FORWARD, causal=True)
attention("fwd+bwd", 7300, 5131, BOTH)
attention("fwd+bwd causal", 4200, 2566, BOTH, causal=True)
attention("fwd causal", 940, 733, FORWARD, hk=8, causal=True)
attention("fwd+bwd causal", 4250, 2566, BOTH, hk=8, causal=True)
attention("fwd causal softcap", 1050, 733, FORWARD, causal=True, softcap=30.0)
attention("fwd causal window 1024", 480, 321, FORWARD, causal=True, window_size_left=1024)
attention("fwd+bwd causal window 1024", 2200, 1123, BOTH, causal=True, window_size_left=1024)
attention("fwd causal alibi", 1050, 733, FORWARD, causal=True, alibi=True)
attention("fwd+bwd causal alibi", 4800, 2566, BOTH, causal=True, alibi=True)

case(
    "paged_attn decode B64 H32/8 D128 context 4096 page 16 bf16",
    *(265, 253, FORWARD, families.decoding, {"b": 3, "h": 4, "hk": 2, "d": 16, "context": 64}),
    **{"b": 64, "h": 32, "hk": 8, "d": 128, "context": 4096, "page": 16},
)

Q, KN = "K4096 N14336", {"k": 4096, "n": 14336}
FEW_WEIGHTS = {"k": 256, "n": 48}
WEIGHTS = 8  # microseconds to read 4-bit weights
for m, nf4, awq in ((1, 14, 13), (16, 19, 17), (128, 42, 36), (2048, 335, 335)):
    floor = max(WEIGHTS, round(2 * m * 4096 * 14336 / 750e6))
    tiny = FEW_WEIGHTS | {"m": min(m, 17)}
    name = f"nf4_matmul M{m} {Q} block 64 bf16"
    case(name, nf4, floor, FORWARD, families.nf4, tiny, m=m, **KN)
    name = f"awq_matmul M{m} {Q} group 128 bf16"
    case(name, awq, floor, FORWARD, families.awq, tiny, m=m, **KN)
for quant, m, goal, floor in (
    *(("Q4_0", 1, 14, 8), ("Q8_0", 1, 20, 15), ("Q4K", 1, 15, 8), ("Q6K", 1, 18, 11)),
    ("Q4_0", 128, 160, 21),
):
    name, tiny = f"qmatmul {quant} M{m} {Q} f32", FEW_WEIGHTS | {"m": min(m, 5)}
    case(name, goal, floor, FORWARD, families.quantised, tiny, quant_type=quant, m=m, **KN)

SCAN = {"b": 8, "l": 2048, "d": 2048, "n": 16}
SHORT = {"b": 2, "l": 40, "d": 24, "n": 4}
for words, goal, floor, way, short, dtype in (
    ("fwd", 250, 129, FORWARD, "bf16", "bfloat16"),
    ("fwd", 300, 129, FORWARD, "f32", "float32"),
    ("bwd", 1300, 300, BACKWARD, "bf16", "bfloat16"),
):
    name = f"selective_scan {words} B8 L2048 D2048 N16 {short}"
    case(name, goal, floor, way, families.selective, SHORT, dtype=dtype, **SCAN)

HEADS = {"b": 8, "l": 2048, "h": 64, "p": 64, "n": 128}
for words, g, goal, floor, way in (
    ("fwd", 1, 420, 189, FORWARD),
    ("fwd", 64, 700, 190, FORWARD),
    ("bwd", 1, 2000, 500, BACKWARD),
):
    each = "G1" if g == 1 else "per head"
    name = f"ssd_chunk_scan {words} B8 L2048 H64 P64 N128 {each} bf16"
    tiny = {"b": 2, "l": 128, "h": 4, "p": 8, "n": 8, "g": min(g, 4)}
    case(name, goal, floor, way, families.ssd, tiny, g=g, **HEADS)

case(
    "causal_conv1d silu fwd B8 C4096 L2048 K4 bf16",
    *(75, 63, FORWARD, families.conv1d, {"b": 2, "c": 12, "l": 50}),
    **{"b": 8, "c": 4096, "l": 2048, "k": 4},
)
case(
    "fused_linear 8192x8192x8192 bf16",
    *(1600, 1466, FORWARD, families.linear, {"m": 24, "k": 32, "n": 40}),
    **{"m": 8192, "k": 8192, "n": 8192},
)
case(
    "conv2d N32 C256 56x56 3x3 bf16",
    *(190, 158, FORWARD, families.conv, {"n": 2, "c": 8, "s": 10}),
    **{"n": 32, "c": 256, "s": 56, "k": 3},
)


def chosen(asked: Sequence[str], cases: Sequence[Any] = CASES) -> list[Any]:
    """The cases of the names: whole ones, their beginning words, or patterns with ``*``."""
    for pattern in asked:
        if not any(fits(case.name, pattern) for case in cases):
            raise UnknownName(f"no case {pattern!r} in the suite; --list prints their names")
    return [c for c in cases if not asked or any(fits(c.name, pattern) for pattern in asked)]


def fits(name: str, pattern: str) -> bool:
    """Whether a pattern is of a name; brackets stand for themselves."""
    pattern = pattern.replace("[", "[[]")
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern} *")
