"""What a compiled program sends between devices, and how far two results are apart."""

import jax
import numpy as np

from fuel_jax.judge.collectives import (
    collectives as collectives,
    predicted as predicted,
    sent as sent,
)


def largest_error(got, want):
    """Over all leaves, relative to the largest element wanted."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(
        float(np.abs(np.asarray(g) - np.asarray(w)).max() / max(1, np.abs(np.asarray(w)).max()))
        for g, w in pairs
    )
