"""Ops over many devices, where it takes more than each device computing its part.

Under ``jax.jit`` arrays may be split as an op's rule allows (``docs/parallel.md``), and nothing
here is needed.  What is here is called inside ``jax.shard_map``, on parts, with the name of the
mesh axis that splits them; :func:`sharded` does that for an op alone.  Gradients are right where
``shard_map`` checks what varies over the mesh, as it does unless told not to.
"""

from .attention import ring_attention as ring_attention, unzigzag as unzigzag, zigzag as zigzag
from .mapping import sharded as sharded
from .products import row_linear as row_linear
from .scans import selective_scan as selective_scan, ssd_chunk_scan as ssd_chunk_scan
from .vocabulary import cross_entropy as cross_entropy
