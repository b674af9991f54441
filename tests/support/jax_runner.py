"""Runs as one of several processes of jax.distributed: agreement inside a compiled step, over a mesh of all of them."""

import math
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import gradscale
import gradscale_jax

POLICY = gradscale.DynamicScale(init_scale=1024.0, growth_interval=100)


def everywhere(sharding: NamedSharding, values) -> jax.Array:
    """Return an array of the whole mesh from what this process holds."""
    return jax.make_array_from_process_local_data(sharding, np.asarray(values))


def main():
    """Assert what this process sees, wherever the bad value is, and of one that has drifted."""
    rank, size, port = (int(argument) for argument in sys.argv[1:])
    jax.distributed.initialize(f"localhost:{port}", num_processes=size, process_id=rank)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    held, shared = PartitionSpec(), PartitionSpec("data")
    whole, split = NamedSharding(mesh, held), NamedSharding(mesh, shared)

    def step(state, w):
        # Parameters that each device has for itself: only the agreement tells of an overflow elsewhere.
        scaled = gradscale_jax.value_and_grad(lambda w: (w * w).sum(), POLICY, axis_name="data")(state, w)
        new = gradscale_jax.select(scaled.verdict.finite, w - 0.25 * scaled.grads, w)
        return scaled.verdict, scaled.state, new

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(held, shared), out_specs=(held, held, shared)))
    # The same with whole arrays, where the compiler itself finds out what to send.
    automatic = jax.jit(gradscale_jax.value_and_grad(lambda w: (w * w).sum(), POLICY))

    def run(scale: float, mine: float):
        numbers = (np.float32(scale), *[np.int32(0)] * 3)
        state = gradscale.ScaleState(*(everywhere(whole, number) for number in numbers))
        w = everywhere(split, np.full(1, mine, np.float32))
        verdict, new_state, new = mapped(state, w)
        found = (int(verdict.nonfinite), float(new_state.scale), float(new.addressable_shards[0].data[0]))
        said = ""
        try:
            verdict.check(POLICY)
        except gradscale.ScaleDesyncError as error:
            said = str(error)
        assert ("scale from 512.0 to 1024.0" in said) is bool(verdict.desynced)
        return found[1:] if said else (*found, int(automatic(state, w).verdict.nonfinite))

    # 2 - 0.25 * (2 * 2): the gradient of each process's own parameter.
    assert run(1024.0, 2.0) == (0, 1024.0, 1.0, 0)
    for bad in range(size):
        for value in (math.inf, math.nan):
            nonfinite, scale, kept, automatically = run(1024.0, value if rank == bad else 2.0)
            assert (nonfinite, scale, automatically) == (1, 512.0, 1)
            assert (kept == 2.0) is (rank != bad)
        mine = 512.0 if rank == bad else 1024.0
        assert run(mine, 2.0) == (mine, 2.0)


main()
