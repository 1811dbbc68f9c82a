"""AWQ weights as most checkpoints hold them."""

import numpy as np

from ..errors import ShapeError

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a GEMM word, from the lowest, is column ORDER[i]
PADDED_TO = {32: 4, 64: 2}  # the words of zero points in a GEMV row, a multiple of this; else of 1


def mistake(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray) -> str | None:
    """What is wrong with the arrays, in a sentence."""
    for name, x, dtypes in (
        ("qweight", qweight, ("int32", "uint32")),
        ("qzeros", qzeros, ("int32", "uint32")),
        ("scales", scales, ("float16",)),
    ):
        if x.dtype.name not in dtypes or x.ndim != 2:
            return (
                f"'{name}' is {x.dtype.name}{list(x.shape)}; "
                f"it must be {' or '.join(dtypes)} and have 2 axes."
            )
    (k, words), (groups, _) = qweight.shape, qzeros.shape
    if qzeros.shape[1] != words:
        return (
            f"'qweight' has {words} words a row and 'qzeros' has {qzeros.shape[1]}; in the GEMM "
            f"layout they are [k, n / 8] and [k / group_size, n / 8]. The GEMV layout, [n, k / 8] "
            f"with zeros [n, k / group_size / 8], needs no conversion: awq_matmul takes it."
        )
    if scales.shape != (groups, 8 * words):
        return (
            f"'scales' is {list(scales.shape)}; beside 'qzeros' {list(qzeros.shape)} it must be "
            f"[{groups}, {8 * words}], one scale for each zero point."
        )
    if k % 8:
        return f"'qweight' has {k} rows; awq_matmul takes eight of them a word, a multiple of 8."
    if k % groups if groups else k:
        return f"'qweight' has {k} rows and 'qzeros' has {groups} groups; they must share them out."
    return None


def from_gemm(
    qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The last three operands of :func:`fuel_jax.awq_matmul` from AutoAWQ's GEMM layout.

    That is the layout of most AWQ checkpoints (``"version": "gemm"`` in their configuration); the
    op takes the GEMV layout.  Codes are moved, none is changed.  On the host, in NumPy: beside its
    operands and result it holds a byte for each weight.

        weight, zeros, scales = from_gemm(layer["qweight"], layer["qzeros"], layer["scales"])
        y = fuel_jax.awq_matmul(x, weight, zeros, scales, group_size=128)

    Args:
        qweight: the codes, ``[k, n / 8]`` I32 or U32; nibbles 0 to 7 of a word, from the lowest,
            are columns 0, 2, 4, 6, 1, 3, 5, 7.
        qzeros: the zero points, ``[k / group_size, n / 8]``, packed likewise.
        scales: ``[k / group_size, n]`` F16.

    Returns:
        ``weight`` ``[n, k / 8]`` U32, ``zeros`` ``[n, zeros_w]`` U32 and ``scales``
        ``[n, 8 · zeros_w]`` F16, padded with zeros to the width that AutoAWQ's GEMV kernels want.

    Raises:
        ShapeError: shapes or dtypes are not those above.

    Source: AutoAWQ ``modules/linear/gemm.py`` and ``gemv.py``.
    """
    qweight, qzeros, scales = (np.asarray(x) for x in (qweight, qzeros, scales))
    if sentence := mistake(qweight, qzeros, scales):
        raise ShapeError(f"from_gemm: {sentence}")
    groups = qzeros.shape[0]
    words = -(-groups // 8)
    multiple = PADDED_TO.get(qweight.shape[0] // max(groups, 1), 1)
    words = -(-words // multiple) * multiple
    padded = ((0, 0), (0, 8 * words - groups))
    weight, zeros = codes(qweight).T, np.pad(codes(qzeros).T, padded)
    return packed(weight), packed(zeros), np.pad(scales.T, padded)


def codes(words: np.ndarray) -> np.ndarray:
    """``[rows, n / 8]`` GEMM words as ``[rows, n]`` bytes."""
    each = np.empty((*words.shape, 8), np.uint8)
    for nibble, column in enumerate(ORDER):
        each[..., column] = words >> 4 * nibble & 15
    return each.reshape(words.shape[0], 8 * words.shape[1])


def packed(codes: np.ndarray) -> np.ndarray:
    """``[n, k]`` bytes as ``[n, k / 8]`` GEMV words, column i of each eight in nibble i."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for i in range(8):
        words |= codes[:, i::8].astype(np.uint32) << 4 * i
    return words
