"""agree: one verdict over named axes, inside compiled functions; ranks that hold other states."""

from __future__ import annotations

import math

import numpy as np
import pytest
from axes_jax import COUNT, P, assert_one_reduction, gradscale_jax, jax, jnp, mesh, on_mesh

from gradscale import (
    CallOrderError,
    DynamicScale,
    InvalidTypeError,
    SkipSpikes,
    StaticScale,
)

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

POLICY = DynamicScale()


def on_devices(function, *arrays, names: tuple[str, ...] = ("data",), shape=(COUNT,)):
    """Run a function on every device of a mesh, on rows of arrays, and return what each device returned."""
    mapped = jax.shard_map(
        lambda *rows: jax.tree.map(lambda x: x[None], function(*(jax.tree.map(lambda x: x[0], row) for row in rows))),
        mesh=mesh(*names, shape=shape),
        in_specs=P(names),
        out_specs=P(names),
        check_vma=False,
    )
    return jax.jit(mapped)(*arrays)


def agree(count=0, **options):
    count = jnp.int32(count) if isinstance(count, int) else count
    return gradscale_jax.agree(count, POLICY.init(jnp.zeros(())), POLICY, **options)


@pytest.mark.parametrize("axis_name", [("data", "model"), ("model", "data")])
def test_the_verdict_is_of_all_ranks_of_several_axes_and_exact(axis_name: tuple[str, str]):
    for seed in range(3):
        counts = np.random.default_rng(seed).integers(0, 2**31 - 1, size=(COUNT, 1), dtype=np.int32)

        def judge(count):
            return agree(count[0], axis_name=axis_name).nonfinite

        found = on_devices(judge, counts, names=("data", "model"), shape=(2, 2))
        assert (found.dtype, found.tolist()) == (np.int32, [counts.max()] * COUNT)


RUN = gradscale_jax.value_and_grad(lambda w: w.sum(), POLICY, axis_name=("data", "model"))
UNBOUND = (CallOrderError, r"'data'.* is not bound here .* jax\.shard_map")
REFUSED = [
    *(
        (
            lambda names=names: agree(axis_name=names),
            InvalidTypeError,
            "must be the name of a mapped axis",
        )
        for names in ((), ["data", []], {})
    ),
    # A mean over ranks, such as by lax.pmean, would be cut to 0.
    *(
        (lambda count=count: agree(count), InvalidTypeError, "nonfinite must be a 0-d int32 array, such as unscale ")
        for count in (np.float32(0.25), jnp.zeros(2, jnp.int32), jnp.asarray(True), np.int64(0))
    ),
    *(
        (
            lambda spike=spike: agree(spike=spike),
            InvalidTypeError,
            r"spike must be a 0-d bool, .*: .* jnp\.any\(spike\)",
        )
        for spike in (np.zeros(2, bool), jnp.zeros((1, 1), bool), [True], "yes")
    ),
    (lambda: agree(axis_name="data"), *UNBOUND),
    (jax.jit(lambda: agree(axis_name="data")), *UNBOUND),
    (lambda: jax.jit(RUN)(POLICY.init(jnp.zeros(())), jnp.ones(2)), *UNBOUND),
    (
        lambda: on_devices(lambda _: agree(axis_name="other"), np.zeros((COUNT, 1))),
        CallOrderError,
        "'other' is not bound here",
    ),
]


@pytest.mark.tier("quick")
@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_names_no_axis_and_what_is_no_count_and_no_spike_is_refused(call, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()
    for one in (True, np.True_, np.asarray(True), jnp.asarray(True)):
        assert bool(agree(spike=one).spike)


@pytest.mark.tier("quick")
def test_a_verdict_says_in_words_what_happened():
    state = POLICY.init(jnp.zeros(()))._replace(scale=jnp.float32(2.0**24))
    traced = []

    def verdict(nonfinite, spike):
        made = gradscale_jax.agree(nonfinite, state, POLICY, spike=spike)
        traced.append(str(made))
        return made

    for given, words in (
        ((0, False), "taken, scale 16777216"),
        ((2, False), "skipped, gradient arrays that are not finite: 2, scale 16777216"),
        ((2, True), "skipped, gradient arrays that are not finite: 2, scale 16777216"),
        ((0, True), "skipped, a spike, scale 16777216"),
    ):
        for made in (verdict(jnp.int32(given[0]), given[1]), jax.jit(verdict)(*given)):
            assert str(made) == repr(made) == repr(jax.device_get(made)) == f"Verdict({words})"
        assert str(jax.tree.map(lambda x: x.dtype, made)) == (
            "Verdict(nonfinite=dtype('int32'), desynced=dtype('bool'), spike=dtype('bool'))"
        )
    assert any("Tracer" in text for text in traced)

    def held(scale):
        return gradscale_jax.agree(jnp.int32(0), state._replace(scale=scale), POLICY, "ranks")

    several = jax.vmap(held, axis_name="ranks")(jnp.asarray([2.0, 4.0]))
    assert str(several).startswith("Verdict(nonfinite=Array([0, 0], dtype=int32), desynced=Array([ True,  True]")
    one = str(jax.tree.map(lambda x: x[0], several))
    assert one == "Verdict(skipped, ranks hold different states; scale from 2.0 to 4.0)"


def squares_over_the_mesh(policy, **options):
    return gradscale_jax.value_and_grad(lambda w: (w * w).sum(), policy, axis_name="data", **options)


@pytest.mark.tier("quick")
@pytest.mark.parametrize("options", [{}, {"skip": SkipSpikes(), "give_up_after": 20}], ids=["", "guarded"])
def test_agreement_is_one_reduction_of_84_bytes(options):
    run = squares_over_the_mesh(POLICY, **options)
    # Parameters of one's own, so that shard_map has nothing to sum.
    mapped = jax.shard_map(
        lambda state, w: run(state, w).verdict.nonfinite, mesh=mesh("data"), in_specs=(P(), P("data")), out_specs=P()
    )
    assert_one_reduction(mapped, run.init(jnp.ones(())), jnp.ones(COUNT))


@pytest.mark.parametrize("is_spread", [False, True], ids=["anywhere", "over the mesh"])
@pytest.mark.parametrize("policy", [POLICY, StaticScale(4.0)], ids=["dynamic", "static"])
def test_a_state_that_is_closed_over_serves(policy, is_spread: bool):
    state = policy.init(on_mesh(jnp.zeros(COUNT), "data") if is_spread else jnp.zeros(()))

    def step(w):
        return squares_over_the_mesh(policy)(state, w).verdict.nonfinite

    mapped = jax.jit(jax.shard_map(step, mesh=mesh("data"), in_specs=P("data"), out_specs=P()))
    assert int(mapped(jnp.ones(COUNT))) == 0
    assert int(mapped(jnp.ones(COUNT).at[2].set(math.nan))) == 1
