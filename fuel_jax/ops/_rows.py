"""What indexing shares."""

from typing import Any

import jax.numpy as jnp

AS_THEY_ARE = {"wrap_negative_indices": False}  # indices were placed before


def nothing(dtype: Any) -> Any:
    """What is read where there is nothing."""
    return jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 0
