"""JaxBackend: the pure core's bits, one compiled pass, placement on devices and meshes, float64 on and off."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import numpy as np
import pytest
from jax_devices import COUNT as DEVICES
from jax_devices import require_jax, require_mesh, x64_mode
from optimizers import Tree
from tiers import later

import gradscale
from gradscale import DynamicScale, InvalidTypeError, registry
from gradscale.core import arithmetic

pytestmark = pytest.mark.jax

NAMES = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "complex64"]


@pytest.fixture
def backend() -> Any:
    require_jax()
    return registry.get("jax")


def bits(x: Any) -> Any:
    """Return an array's bytes, so that NaNs and signed zeros compare."""
    return np.asarray(x).tobytes()


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("name", ["bfloat16", *later("all", *(name for name in NAMES if name != "bfloat16"))])
def test_the_adapter_gives_the_pure_cores_bits(backend: Any, jnp: Any, name: str) -> None:
    gradscale.testing.check_backend(backend, jnp.zeros(()), dtypes=[jnp.dtype(name)])


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", ["float64", "complex128"])
def test_the_adapter_gives_the_pure_cores_bits_in_float64(jax: Any, backend: Any, name: str) -> None:
    with x64_mode(True):
        gradscale.testing.check_backend(backend, jax.numpy.zeros(()), dtypes=[jax.numpy.dtype(name)])


def test_arrays_and_traced_values_are_served_by_the_adapter(jax: Any, backend: Any) -> None:
    seen = []

    def look(x: Any) -> Any:
        seen.append(registry.backend_for(x))
        return x

    for transform in (lambda f: f, jax.jit, jax.vmap, jax.grad):
        transform(look)(jax.numpy.ones((3,)) if transform is jax.vmap else 1.0 * jax.numpy.ones(()))
    assert seen == [backend] * 4
    assert registry.get("jaxlib") is backend


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20, (16 << 20) + 3])
@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_a_bad_value_is_found_wherever_it_is(jax: Any, jnp: Any, size: int, value: str) -> None:
    state = DynamicScale().init(jnp.zeros(()))
    judge = jax.jit(lambda x: gradscale.unscale([x], state)[1])
    clean = np.ones(size, dtype=np.float32)
    assert int(judge(clean)) == 0
    for position in {0, size // 3, size // 2, size - 1}:
        bad = clean.copy()
        bad[position] = float(value)
        assert int(judge(bad)) == 1, position


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_a_bad_value_on_each_device_of_a_mesh_is_found(jax: Any, explicit: bool, value: str) -> None:
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    over = jax.make_mesh((DEVICES,), ("data",), axis_types=(kind,))
    sharding = jax.sharding.NamedSharding(over, jax.sharding.PartitionSpec("data"))
    size = 1 << 20
    for bad_device in range(DEVICES):
        values = np.ones(size * DEVICES, dtype=np.float32)
        values[bad_device * size + 5] = float(value)
        spread = jax.device_put(values, sharding)
        clean = jax.device_put(np.ones(DEVICES, dtype=np.float32), sharding)
        state = DynamicScale().init(spread)
        for unscale in (gradscale.unscale, jax.jit(gradscale.unscale)):
            unscaled, nonfinite = unscale([spread, clean], state)
            assert int(nonfinite) == 1
            assert unscaled[0].sharding.is_equivalent_to(sharding, 1)
            assert bits(unscaled[0]) == bits(values / np.float32(65536.0))


def test_a_state_is_made_where_it_can_meet_the_array(jax: Any, jnp: Any) -> None:
    over = require_mesh("data")
    spread = jax.device_put(jnp.ones(DEVICES), jax.sharding.NamedSharding(over, jax.sharding.PartitionSpec("data")))
    last = jax.device_put(jnp.ones(3), jax.devices()[-1])
    free = DynamicScale().init(jnp.ones(()))
    assert not any(field.committed for field in free)
    for like in (spread, last):
        state = DynamicScale().init(like)
        assert all(field.committed and field.devices() == like.devices() for field in state)
        assert all(field.is_fully_replicated for field in state)
        # Nothing is refused for being elsewhere: states, gradients and counts of any placement.
        for grads in ([spread], [last], [jnp.ones(2)], [spread, last, jnp.ones(2)]):
            for used in (free, state):
                unscaled, nonfinite = gradscale.unscale(grads, used)
                scaled = gradscale.scale(grads, used)
                selected = gradscale.select(nonfinite == 0, unscaled, grads)
                # What is on no chosen device goes where the state is.
                expected = [(grad if grad.committed else used.scale).devices() for grad in grads]
                for arrays in (unscaled, scaled):
                    assert [array.devices() for array in arrays] == expected
                for grad, array in zip(grads, selected, strict=True):
                    assert array.devices() == grad.devices() or not grad.committed
                new = DynamicScale().update(used, nonfinite=nonfinite)
                assert int(gradscale.unscale(grads, new)[1]) == 0


def test_gradients_on_several_devices_are_counted_together(jax: Any, jnp: Any) -> None:
    grads = [jax.device_put(jnp.asarray([1.0, float("nan")]), device) for device in jax.devices()]
    for like in (jnp.zeros(()), grads[2]):
        state = DynamicScale(init_scale=2.0).init(like)
        _, nonfinite = gradscale.unscale([*grads, jnp.ones(2)], state)
        assert int(nonfinite) == DEVICES


def test_unscale_is_compiled_once_for_each_set_of_shapes(jnp: Any) -> None:
    from gradscale_jax import arrays

    state = DynamicScale().init(jnp.zeros(()))
    shapes = [(3,), (5, 7)]
    gradscale.unscale([jnp.ones(shape) for shape in shapes], state)
    before = arrays._compiled._cache_size()
    for scale in (2.0, 4.0, 8.0):
        gradscale.unscale([jnp.ones(shape) for shape in shapes], DynamicScale(init_scale=scale).init(jnp.zeros(())))
    assert arrays._compiled._cache_size() == before


LARGE = [2.0**125, 2.0**126, 2.0**127, 1e38, 3.3e38, 9e37]


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("scale", [2.0**-126, 1e-37, 3.0, 2.0**16, *LARGE])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("how", ["eager", "jit", "closed-over"])
def test_no_scale_makes_gradients_vanish(jax: Any, jnp: Any, scale: float, count: int, how: str) -> None:
    state = gradscale.StaticScale(scale).init(jnp.zeros(()))
    stored = float(state.scale)
    # Numbers that are normal before and after the division.
    values = np.asarray([1.0, -1.5, 1.25, 1.9], dtype=np.float64) * min(stored, 2.0**126)
    for dtype in (np.float32, np.complex64):
        grads = [jnp.asarray(values.astype(dtype)) for _ in range(count)]
        run = {
            "eager": lambda grads: gradscale.unscale(grads, state),
            "jit": lambda grads: jax.jit(gradscale.unscale)(grads, state),
            "closed-over": jax.jit(lambda grads: gradscale.unscale(grads, state)),
        }[how]
        unscaled, nonfinite = run(grads)
        assert int(nonfinite) == 0
        for got, grad in zip(unscaled, grads, strict=True):
            expected = np.asarray(grad).real.astype(np.float64) / stored
            np.testing.assert_allclose(np.asarray(got).real, expected, rtol=2e-7)
            if np.frexp(stored)[0] == 0.5:
                assert np.asarray(got).real.tolist() == expected.tolist()


@pytest.mark.tier("ranks")
def test_a_scaler_keeps_no_arrays_of_iterations_that_are_over(jax: Any, jnp: Any) -> None:
    class Optimizer:
        grads: Any = None

        def step(self) -> None: ...

    scaler, optimizer = gradscale.GradScaler(policy=gradscale.StaticScale(2.0)), Optimizer()
    counts = []
    for _ in range(16):
        optimizer.grads = [scaler.scale(jnp.ones(2))]
        scaler.step(optimizer)
        scaler.update()
        gc.collect()
        counts.append(len(jax.live_arrays()))
    assert max(counts[8:]) <= max(counts[:8])


def test_a_scaler_outside_jit_follows_every_change_of_the_scale(jax: Any, jnp: Any) -> None:
    scaler = gradscale.GradScaler(init_scale=1024.0)

    class Optimizer:
        grads: Any = None
        seen: Any = None

        def step(self) -> None:
            self.seen = self.grads.tolist()

    optimizer, w = Optimizer(), jnp.ones(2)
    gradient = jax.grad(lambda w, x: scaler.scale(jnp.sum(w * x)))
    compiled = jax.jit(gradient)
    for x in (1.0, np.inf, 1.0, 1.0):
        optimizer.seen = None
        optimizer.grads = gradient(w, x)
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.seen == ([1.0, 1.0] if np.isfinite(x) else None)
        # Compiled, the scale of this moment would stay.
        with pytest.raises(InvalidTypeError, match=r"scale\(\) was called in a function that jax traces"):
            compiled(w, x)


def test_nothing_is_read_or_donated(jax: Any, jnp: Any) -> None:
    state = DynamicScale().init(jnp.zeros(()))
    grads = [jnp.ones(4), jnp.ones(4, dtype=jnp.float16)]
    policy = DynamicScale(hysteresis=2)
    with jax.transfer_guard_device_to_host("disallow"):
        scaled = gradscale.scale(grads, state)
        unscaled, nonfinite = gradscale.unscale(scaled, state, out=scaled)
        policy.update(state, nonfinite=nonfinite)
        gradscale.select(nonfinite == 0, unscaled, grads)
    for array in (*grads, *scaled, *state):
        assert not array.is_deleted()
    assert bits(unscaled[0]) == bits(grads[0])


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("promotion", ["standard", "strict"])
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_dtypes_are_the_same_under_every_promotion_and_precision(jnp: Any, jax: Any, promotion: str, x64: bool) -> None:
    with x64_mode(x64), jax.numpy_dtype_promotion(promotion), jax.numpy_rank_promotion("raise"):
        policy = DynamicScale(growth_factor=1.5, backoff_factor=0.3, hysteresis=2, tolerance=None, max_scale=2.0**20)
        state = policy.init(jnp.zeros((), dtype=jnp.float16))
        assert [str(field.dtype) for field in state] == ["float32", "int32", "int32", "int32"]
        assert not any(field.weak_type for field in state)
        for half in (jnp.float16, jnp.bfloat16):
            loss = gradscale.scale(jnp.ones((), dtype=half), state)
            grads, nonfinite = gradscale.unscale([jnp.ones(3, dtype=half)], state)
            assert (loss.dtype, grads[0].dtype, nonfinite.dtype) == (jnp.float32, half, jnp.int32)
        for run in (policy.update, jax.jit(policy.update)):
            new = run(state, nonfinite=nonfinite)
            assert [str(field.dtype) for field in new] == ["float32", "int32", "int32", "int32"]
            assert not any(field.weak_type for field in new)


def test_a_state_of_one_precision_goes_on_in_the_other(jnp: Any) -> None:
    policy = DynamicScale(init_scale=3.0, growth_interval=1, growth_factor=2.0)
    fingerprints = []
    for modes in ((False, True), (True, False), (True, True), (False, False)):
        with x64_mode(modes[0]):
            state = policy.update(policy.init(jnp.zeros(())), nonfinite=jnp.zeros((), dtype=jnp.int32))
        with x64_mode(modes[1]):
            grads, nonfinite = gradscale.unscale([jnp.asarray([1.0, 7.0], dtype=jnp.float32)], state)
            state = policy.update(state, nonfinite=nonfinite)
            fingerprints.append((bits(grads[0]), bits(arithmetic.fingerprint(state))))
    # 1/3 and 1/6 are rounded once either way.
    assert len(set(fingerprints)) == 1
    sixth = np.float32(1 / 6)
    assert np.frombuffer(fingerprints[0][0], np.float32).tolist() == [sixth, np.float32(7.0) * sixth]


def test_float64_is_used_for_factors_exactly_while_it_is_switched_on(jnp: Any) -> None:
    # float32(1.1) differs from 1.1, and the products from each other.
    policy = DynamicScale(init_scale=7.0, growth_factor=1.1, growth_interval=1)
    scales = {}
    for x64 in (False, True, False, True):
        with x64_mode(x64):
            state = policy.update(policy.init(jnp.zeros(())), nonfinite=jnp.zeros((), dtype=jnp.int32))
            scales.setdefault(x64, set()).add(float(state.scale))
    assert scales[True] == {float(np.float32(np.float64(7.0) * 1.1))}
    assert scales[False] == {float(np.float32(7.0) * np.float32(1.1))}


def test_a_traced_verdict_cannot_be_read(jax: Any, jnp: Any, backend: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"outside jit, or use gradscale_jax\.value_and_grad"):
        jax.jit(backend.read)(jnp.zeros(3, dtype=jnp.int32))


def test_integers_and_float0_pass_through(gradscale_jax: Any, jax: Any, jnp: Any) -> None:
    state = DynamicScale(init_scale=2.0).init(jnp.zeros(()))
    none = np.zeros((3,), dtype=jax.dtypes.float0)
    tree = {"count": jnp.asarray([3]), "none": none, "weights": jnp.asarray([4.0]), "nothing": None}
    for function in (gradscale.unscale, gradscale_jax.unscale):
        unscaled, nonfinite = function(tree, state)
        assert int(nonfinite) == 0
        assert unscaled["none"] is none
        assert unscaled["count"].tolist() == [3]
        assert unscaled["weights"].tolist() == [2.0]
        assert unscaled["nothing"] is None
    scaler, optimizer = gradscale.GradScaler(init_scale=2.0), Tree([none, jnp.asarray([4.0])])
    scaler.scale(jnp.ones(()))
    scaler.step(optimizer)
    assert (optimizer.grads[0] is none, optimizer.grads[1].tolist()) == (True, [2.0])


def test_the_adapter_is_pickled_by_what_it_is(backend: Any) -> None:
    assert type(pickle.loads(pickle.dumps(backend))) is type(backend)
