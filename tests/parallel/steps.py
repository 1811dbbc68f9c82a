"""One process of several: ops judged by their rules, a small transformer trained a few steps.

``python steps.py PROCESS COUNT PORT CHECKPOINTS [DIES_AT]``: data, model and sequence are split
over the devices of all processes, and so is each op.  The process that is told to die does so in
that step, when its loss is printed and its state is not yet written.
"""

import os
import pathlib
import sys

import jax
import many_devices
import tiny_transformer as model
import training

from fuel_jax import conv2d, flash_attn, fused_linear
from tests.parallel import test_rules

JUDGED = (conv2d, flash_attn, fused_linear)
STEPS, MESH = 3, "data=2,model=2,sequence=2"
TEXT = training.python_documentation()
SMALL = model.Config(len(TEXT.characters), width=16, layers=1, hidden=24, context=8)
SHORT = {"SEQUENCE": SMALL.context, "BATCH": 4}  # of the module ``training``


def main():
    import orbax.checkpoint as orbax  # of the extra 'libraries'; the tests read the sizes above

    vars(training).update(SHORT)
    process, count, port = map(int, sys.argv[1:4])
    checkpoints, *dies_at = sys.argv[4:]
    q = jax.ShapeDtypeStruct((1, 2, 64, 64), "bfloat16")
    jax.eval_shape(flash_attn, q, q, q)  # before JAX's backends: must not start them
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        num_processes=count,
        process_id=process,
        heartbeat_timeout_seconds=10,
    )
    for op in JUDGED:
        test_rules.judge([op])
        print(f"judged {op.name}", flush=True)
    mesh = many_devices.make_mesh(MESH)
    # A device's share of a copy that several have is cut out by a program for every shape.
    whole = orbax.type_handlers.ArrayHandler(use_replica_parallel=False)
    orbax.type_handlers.register_type_handler(jax.Array, whole, override=True)
    steps = many_devices.train(SMALL, mesh, TEXT, STEPS, checkpoint=pathlib.Path(checkpoints))
    for step, value in steps:
        print(f"loss {step} {value:.7f}", flush=True)
        if [str(step)] == dies_at:
            os._exit(17)


if __name__ == "__main__":
    main()
