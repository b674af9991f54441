"""value_and_grad: values, gradients and states under jit, grad, vmap, scan, checkpoint and shard_map; bad input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from jax_devices import COUNT as DEVICES
from jax_devices import require_mesh

from gradscale import (
    CallOrderError,
    DynamicScale,
    InvalidTypeError,
    InvalidValueError,
    ScaleUnderflowError,
    StaticScale,
)

pytestmark = pytest.mark.jax

# Each field away from its default, with trackers that move.
POLICIES = [
    pytest.param(DynamicScale(), id="default"),
    pytest.param(DynamicScale(init_scale=2.0**10, growth_factor=4.0, backoff_factor=0.25, growth_interval=2), id="all"),
    pytest.param(DynamicScale(growth_interval=3, growth_after="interval_plus_one"), id="plus-one"),
    pytest.param(DynamicScale(growth_interval=3, growth_after="first_interval_plus_one"), id="first-plus-one"),
    pytest.param(DynamicScale(hysteresis=3, growth_interval=2, hysteresis_refill=("growth",)), id="hysteresis"),
    pytest.param(DynamicScale(tolerance=0.4, growth_interval=4), id="tolerance"),
    pytest.param(DynamicScale(init_scale=8.0, min_scale=4.0, max_scale=16.0, growth_interval=1), id="bounds"),
    pytest.param(DynamicScale(init_scale=8.0, min_scale=4.0, at_min="hold"), id="hold"),
    pytest.param(DynamicScale(init_scale=8.0, min_scale=4.0, at_min="raise"), id="raise"),
    pytest.param(StaticScale(128.0), id="static"),
]
# 1 is an overflow.
SEQUENCE = (0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0)


def loss_function(jnp: Any) -> Any:
    """Return a loss whose gradient is 2 * w * x, and nan where x is inf."""

    def loss(parameters: Any, x: Any) -> Any:
        return jnp.sum(jnp.square(parameters["w"]) * x)

    return loss


def fields(state: Any) -> list[float]:
    return [float(field) for field in state]


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("policy", POLICIES)
def test_eager_jit_and_scan_follow_the_policy_to_the_bit(jnp: Any, jax: Any, gradscale_jax: Any, policy: Any) -> None:
    parameters = {"w": jnp.asarray([1.5, -2.0, 3.0])}
    run = gradscale_jax.value_and_grad(loss_function(jnp), policy)
    inputs = jnp.where(jnp.asarray(SEQUENCE)[:, None] == 1, jnp.inf, jnp.ones((1, 3)))
    expected, state = [], policy.init(np.zeros(()))
    for overflow in SEQUENCE:
        state = policy.update(state, nonfinite=np.asarray(overflow, dtype=np.int32))
        expected.append(fields(state))

    followed = {}
    for name, step in (("eager", run), ("jit", jax.jit(run))):
        state, seen = policy.init(jnp.zeros(())), []
        for overflow, x in zip(SEQUENCE, inputs, strict=True):
            scaled = step(state, parameters, x)
            state = scaled.state
            seen.append(fields(state))
            assert bool(scaled.verdict.finite) is not bool(overflow)
            if not overflow:
                assert scaled.grads["w"].tolist() == [3.0, -4.0, 6.0]
                assert float(scaled.value) == 15.25
        followed[name] = seen

    def body(state: Any, x: Any) -> Any:
        scaled = run(state, parameters, x)
        return scaled.state, (scaled.state, scaled.verdict.finite)

    _, (states, finite) = jax.lax.scan(body, policy.init(jnp.zeros(())), inputs)
    followed["scan"] = [fields(one) for one in zip(*states, strict=True)]
    assert finite.tolist() == [overflow == 0 for overflow in SEQUENCE]
    assert followed == {"eager": expected, "jit": expected, "scan": expected}


def test_vmap_gives_each_model_a_scale_of_its_own(jnp: Any, jax: Any, gradscale_jax: Any) -> None:
    policy = DynamicScale(growth_interval=1)
    run = gradscale_jax.value_and_grad(loss_function(jnp), policy)
    states = jax.tree.map(lambda *xs: jnp.stack(xs), *(policy.init(jnp.zeros(())) for _ in range(3)))
    parameters = {"w": jnp.asarray([[1.0], [2.0], [3.0]])}
    scaled = jax.jit(jax.vmap(run))(states, parameters, jnp.asarray([[1.0], [math.inf], [1.0]]))
    assert scaled.verdict.finite.tolist() == [True, False, True]
    assert scaled.state.scale.tolist() == [2.0**17, 2.0**15, 2.0**17]
    assert scaled.grads["w"].tolist()[::2] == [[2.0], [6.0]]


def test_several_arguments_auxiliary_data_and_keywords(jnp: Any, jax: Any, gradscale_jax: Any) -> None:
    def loss(a: Any, b: Any, *, factor: Any) -> Any:
        return factor * jnp.sum(a * b), {"seen": b + 1}

    policy = DynamicScale()
    run = jax.jit(gradscale_jax.value_and_grad(loss, policy, argnums=(0, 1), has_aux=True))
    value, grads, verdict, _ = run(policy.init(jnp.zeros(())), jnp.asarray([2.0]), jnp.asarray([3.0]), factor=5.0)
    assert (float(value[0]), value[1]["seen"].tolist()) == (30.0, [4.0])
    assert [grad.tolist() for grad in grads] == [[15.0], [10.0]]
    assert int(verdict.nonfinite) == 0


def test_a_float16_loss_does_not_overflow_at_the_first_step(jnp: Any, jax: Any, gradscale_jax: Any) -> None:
    policy = DynamicScale(growth_interval=1)
    parameters = {"w": jnp.asarray([0.5], dtype=jnp.float16)}
    run = jax.jit(gradscale_jax.value_and_grad(loss_function(jnp), policy))
    state = policy.init(jnp.zeros(()))
    for _ in range(3):
        scaled = run(state, parameters, jnp.asarray([0.25], dtype=jnp.float16))
        state = scaled.state
        assert bool(scaled.verdict.finite)
        assert scaled.value.dtype == jnp.float16
        assert float(scaled.value) == 0.0625
        assert scaled.grads["w"].tolist() == [0.25]
        # The largest power of two that float16 holds, and no growth beyond it.
        assert float(state.scale) == 32768.0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_loss_with_the_range_of_float32_is_scaled_in_full(jnp: Any, gradscale_jax: Any, dtype: str) -> None:
    policy = DynamicScale(init_scale=2.0**100)
    parameters = {"w": jnp.asarray([0.5], dtype=dtype)}
    scaled = gradscale_jax.value_and_grad(loss_function(jnp), policy)(
        policy.init(jnp.zeros(())), parameters, jnp.asarray([0.25], dtype=dtype)
    )
    assert float(scaled.state.scale) == 2.0**100
    assert scaled.grads["w"].tolist() == [0.25]


def test_float16_gradients_that_would_vanish_do_not(jnp: Any, jax: Any, gradscale_jax: Any) -> None:
    policy = DynamicScale()

    def loss(w: Any) -> Any:
        return (w.astype(jnp.float32) * 1e-9).sum()

    w = jnp.ones(2, dtype=jnp.float16)
    assert jax.grad(loss)(w).tolist() == [0.0, 0.0]
    scaled = gradscale_jax.value_and_grad(loss, policy, dtype=jnp.float32)(policy.init(jnp.zeros(())), w)
    assert scaled.grads.dtype == jnp.float32
    np.testing.assert_allclose(scaled.grads, 1e-9, rtol=1e-3)


def test_gradients_accumulate_over_microbatches_at_one_scale(jnp: Any, jax: Any, gradscale_jax: Any) -> None:
    policy = DynamicScale(growth_interval=1)
    run = gradscale_jax.value_and_grad(loss_function(jnp), policy)
    parameters = {"w": jnp.asarray([1.0, 2.0])}

    @jax.jit
    def accumulate(state: Any, batches: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            scaled = run(state, parameters, x)
            grads, nonfinite = total
            return (jax.tree.map(jnp.add, grads, scaled.grads), nonfinite + scaled.verdict.nonfinite), scaled.value

        start = (jax.tree.map(jnp.zeros_like, parameters), jnp.zeros((), dtype=jnp.int32))
        (grads, nonfinite), _ = jax.lax.scan(body, start, batches)
        return grads, nonfinite, policy.update(state, nonfinite=nonfinite)

    state = policy.init(jnp.zeros(()))
    grads, nonfinite, clean = accumulate(state, jnp.ones((4, 2)))
    assert (grads["w"].tolist(), int(nonfinite), float(clean.scale)) == ([8.0, 16.0], 0, 2.0**17)
    for bad in range(4):
        _, nonfinite, backed_off = accumulate(state, jnp.ones((4, 2)).at[bad, 0].set(jnp.nan))
        assert (int(nonfinite), float(backed_off.scale)) == (1, 2.0**15)


def test_accumulation_inside_the_loss_and_checkpointing(jnp: Any, jax: Any, gradscale_jax: Any) -> None:
    policy = DynamicScale()
    inner = loss_function(jnp)

    def loss(parameters: Any, batches: Any) -> Any:
        body = jax.checkpoint(lambda total, x: (total + inner(parameters, x), None))
        return jax.lax.scan(body, jnp.zeros(()), batches)[0]

    parameters = {"w": jnp.asarray([1.0, 2.0])}
    for fun in (loss, jax.checkpoint(loss)):
        scaled = jax.jit(gradscale_jax.value_and_grad(fun, policy))(
            policy.init(jnp.zeros(())), parameters, jnp.ones((4, 2))
        )
        assert scaled.grads["w"].tolist() == [8.0, 16.0]
        assert float(scaled.value) == 20.0


def test_integer_parameters_are_refused_or_passed_by(jnp: Any, jax: Any, gradscale_jax: Any) -> None:
    policy = DynamicScale()
    parameters = {"w": jnp.asarray([2.0]), "n": jnp.asarray([3])}

    def loss(parameters: Any) -> Any:
        return jnp.sum(parameters["w"] * parameters["n"])

    state = policy.init(jnp.zeros(()))
    with pytest.raises(TypeError, match="int32"):
        gradscale_jax.value_and_grad(loss, policy)(state, parameters)
    scaled = gradscale_jax.value_and_grad(loss, policy, allow_int=True)(state, parameters)
    assert scaled.grads["w"].tolist() == [3.0]
    assert scaled.grads["n"].dtype == jax.dtypes.float0
    assert bool(scaled.verdict.finite)


def test_any_pytree_that_jax_knows_can_be_differentiated(jnp: Any, jax: Any, gradscale_jax: Any) -> None:
    @jax.tree_util.register_pytree_node_class
    class Layer:
        def __init__(self, w: Any, name: str) -> None:
            self.w, self.name = w, name

        def tree_flatten(self) -> Any:
            return (self.w,), self.name

        @classmethod
        def tree_unflatten(cls, name: str, children: Any) -> Any:
            return cls(*children, name)

    policy = DynamicScale()
    layer = Layer(jnp.asarray([2.0]), "first")
    scaled = jax.jit(gradscale_jax.value_and_grad(lambda layer: jnp.sum(layer.w**2), policy))(
        policy.init(jnp.zeros(())), layer
    )
    assert (scaled.grads.name, scaled.grads.w.tolist()) == ("first", [4.0])
    chosen = gradscale_jax.select(scaled.verdict.finite, scaled.grads, layer)
    assert chosen.w.tolist() == [4.0]
    with pytest.raises(InvalidValueError, match="one structure"):
        gradscale_jax.select(scaled.verdict.finite, scaled.grads, Layer(jnp.zeros(1), "second"))


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_all_devices_of_an_axis_skip_together(jax: Any, gradscale_jax: Any, check_vma: bool, value: float) -> None:
    jnp, spec = jax.numpy, jax.sharding.PartitionSpec
    policy = DynamicScale()

    def local_loss(parameters: Any, x: Any) -> Any:
        return jax.lax.pmean(loss_function(jnp)(parameters, x), "data")

    def mean(grads: Any) -> Any:
        # With varying manual axes shard_map itself sums the gradients of what is replicated; without, each device has
        # the gradient of its own batch.
        return grads if check_vma else jax.lax.pmean(grads, "data")

    def step(state: Any, parameters: Any, x: Any) -> Any:
        run = gradscale_jax.value_and_grad(local_loss, policy, axis_name="data", reduce=mean)
        scaled = run(state, parameters, x)
        updated = jax.tree.map(lambda w, g: w - 0.5 * g, parameters, scaled.grads)
        return scaled, gradscale_jax.select(scaled.verdict.finite, updated, parameters)

    specs = {"in_specs": (spec(), spec(), spec("data")), "out_specs": spec()}
    mapped = jax.jit(jax.shard_map(step, mesh=require_mesh("data"), check_vma=check_vma, **specs))
    parameters = {"w": jnp.asarray([1.0])}
    clean = np.ones((DEVICES, 1), dtype=np.float32)
    scaled, new = mapped(policy.init(jnp.zeros(())), parameters, clean)
    assert bool(scaled.verdict.finite)
    assert [shard.data.tolist() for shard in new["w"].addressable_shards] == [[0.0]] * DEVICES
    for bad_device in range(DEVICES):
        batch = clean.copy()
        batch[bad_device] = value
        scaled, new = mapped(policy.init(jnp.zeros(())), parameters, batch)
        for array, expected in ((scaled.verdict.nonfinite, 1), (scaled.state.scale, 2.0**15), (new["w"], 1.0)):
            assert [shard.data.item() for shard in array.addressable_shards] == [expected] * DEVICES
        assert not bool(scaled.verdict.desynced)


@pytest.mark.parametrize(
    ("fun", "error", "message"),
    [
        pytest.param(lambda w: w, InvalidValueError, r"one of shape \(2,\): take its mean or sum", id="vector"),
        pytest.param(lambda w: (w.sum(), 1), InvalidTypeError, "say has_aux=True", id="pair"),
        pytest.param(lambda w: "text", InvalidTypeError, "scalar loss, got 'text'", id="text"),  # noqa: ARG005
        pytest.param(lambda w: None, InvalidTypeError, "got None", id="none"),  # noqa: ARG005
        pytest.param(lambda w: w.sum() > 0, InvalidTypeError, "real floating loss, got bool", id="bool"),
        pytest.param(lambda w: w.sum() + 1j, InvalidTypeError, "got complex64", id="complex"),
        pytest.param(lambda w: w.sum().astype(int), InvalidTypeError, "got int32", id="integer"),
    ],
)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_a_loss_that_is_none_is_refused(
    jax: Any, gradscale_jax: Any, fun: Any, error: type[Exception], message: str, jitted: bool
) -> None:
    policy = DynamicScale()
    run = gradscale_jax.value_and_grad(fun, policy)
    with pytest.raises(error, match=message):
        (jax.jit(run) if jitted else run)(policy.init(jax.numpy.zeros(())), jax.numpy.ones(2))


def test_a_pair_that_is_none_is_refused(jax: Any, gradscale_jax: Any) -> None:
    run = gradscale_jax.value_and_grad(lambda w: w.sum(), DynamicScale(), has_aux=True)
    with pytest.raises(InvalidTypeError, match=r"a pair \(loss, aux\)"):
        run(DynamicScale().init(jax.numpy.zeros(())), jax.numpy.ones(2))


def test_a_state_in_the_wrong_place_is_refused(jax: Any, gradscale_jax: Any) -> None:
    run = gradscale_jax.value_and_grad(lambda w: w.sum(), DynamicScale())
    with pytest.raises(InvalidTypeError, match="state must be a ScaleState"):
        run(jax.numpy.ones(2), DynamicScale().init(jax.numpy.zeros(())))


@pytest.mark.parametrize("axis_name", ["data", ("data", "model")])
def test_an_axis_that_is_not_there_is_refused(jax: Any, gradscale_jax: Any, axis_name: Any) -> None:
    policy = DynamicScale()
    run = gradscale_jax.value_and_grad(lambda w: w.sum(), policy, axis_name=axis_name)
    with pytest.raises(CallOrderError, match=r"is not bound here .* jax\.shard_map"):
        jax.jit(run)(policy.init(jax.numpy.zeros(())), jax.numpy.ones(2))


def test_a_verdict_is_no_python_bool(jax: Any, gradscale_jax: Any) -> None:
    policy = DynamicScale()
    run = gradscale_jax.value_and_grad(lambda w: w.sum(), policy)
    state, w = policy.init(jax.numpy.zeros(())), jax.numpy.ones(2)

    def branch(state: Any, w: Any) -> Any:
        scaled = run(state, w)
        return w if scaled.verdict else -w

    for function in (branch, jax.jit(branch)):
        with pytest.raises(
            InvalidTypeError, match=r"inside jit use gradscale_jax\.select\(verdict\.finite, new, old\)"
        ):
            function(state, w)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda state, w: w if run(state, w).verdict.finite else -w)(state, w)
    assert bool(run(state, w).verdict.finite)


def test_a_minimum_that_must_be_raised_is_raised_on_the_host(jnp: Any, jax: Any, gradscale_jax: Any) -> None:
    policy = DynamicScale(init_scale=2.0, min_scale=1.0, at_min="raise")
    run = jax.jit(gradscale_jax.value_and_grad(loss_function(jnp), policy))
    state, found = policy.init(jnp.zeros(())), []
    for x in (math.nan, 1.0, math.nan, 1.0):
        scaled = run(state, {"w": jnp.ones(1)}, jnp.asarray([x]))
        state = scaled.state
        found.append(bool(scaled.verdict.at_min_scale))
        if found[-1]:
            with pytest.raises(ScaleUnderflowError, match=r"although the scale has fallen to the minimum of Dynamic"):
                scaled.verdict.check(policy)
        else:
            scaled.verdict.check(policy)
    assert found == [False, False, True, False]
