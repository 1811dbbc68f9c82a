"""What array annotations are to a type checker: ``Floats[Array, "*batch n"]`` is ``jax.Array``.

Never imported when run.  ``Floats = Annotated`` would be a variable to mypy, and a name that
``types.py`` itself imports so would be private to pyright.
"""

from typing import (  # noqa: F401 (types.py exports them)
    Annotated as Anything,
    Annotated as Bytes,
    Annotated as Floats,
    Annotated as Halves,
    Annotated as Indices,
    Annotated as Mask,
    Annotated as Numbers,
    Annotated as Products,
    Annotated as Single,
    Annotated as Wide,
    Annotated as Words,
)
