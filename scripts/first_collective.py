"""Show that the first collective of two CPU processes fails if one of them comes 30 seconds after the other.

`--connected` runs the same collective once before. Then the first process waits for the later one. The limit is that of
gloo, which XLA uses between CPUs (seen with jax 0.10.2). It is why `specjax.parallel.connections` exists.
"""

import os
import subprocess
import sys
import time

import jax
from jax.sharding import PartitionSpec as P

LATE_S = 40

if sys.argv[-1].isdecimal():
    index = int(sys.argv[-1])
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize("localhost:12399", 2, index)
    mesh = jax.make_mesh((2,), ("x",))
    add = jax.jit(
        jax.shard_map(lambda: jax.lax.psum(jax.lax.axis_index("x"), "x"), mesh=mesh, in_specs=(), out_specs=P())
    )
    if "--connected" in sys.argv:
        add().block_until_ready()
    time.sleep(LATE_S * index)
    try:
        print("process", index, "computed", add(), flush=True)
    except jax.errors.JaxRuntimeError as error:
        print("process", index, error, flush=True)
    os._exit(0)
jobs = [subprocess.Popen([sys.executable, *sys.argv, str(index)]) for index in range(2)]
for job in jobs:
    job.wait()
