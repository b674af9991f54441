"""torch tensors of every kind through the adapter: dtypes, layouts, views, complex values, and autograd's graph."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any, get_type_hints

import pytest
from axes import is_torch_2_6, require_program
from axes_torch import GradScaler, torch
from commands import python
from small_torch import KERNEL, Small, without_kernel
from tiers import later

import gradscale
from gradscale import DynamicScale, StaticScale
from gradscale.core.summaries import Summary
from gradscale.testing import check_backend

pytestmark = pytest.mark.torch


REALS = ("float16", "bfloat16", "float32", "float64")


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("missing", [(), REALS], ids=["", "without-kernels"])
def test_the_adapter_conforms_to_the_pure_core(monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]):
    if missing:
        monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", without_kernel(*missing))
    names = missing or [*REALS, "complex64", "complex128"]
    check_backend(gradscale.registry.get("torch"), torch.zeros(1), dtypes=[getattr(torch, name) for name in names])


def state_of(scale: float):
    return DynamicScale(init_scale=scale).init(torch.zeros(()))


def in_place(grads: list[Any], scale: float = 8.0) -> int:
    """Unscale gradients in place through the adapter, and return the count."""
    state = state_of(scale)
    got, nonfinite = gradscale.registry.backend_for(state.scale).unscale(grads, state, out=grads)
    assert all(new is old for new, old in zip(got, grads, strict=True))
    return int(nonfinite)


MEMORY = torch.arange(6.0) * 4.0
SHIFTED = [MEMORY[:4], MEMORY[2:]]
# Of two storages.
NUMPYS = [torch.from_numpy(one.numpy()) for one in SHIFTED]
SHARED: dict[str, tuple[list[Any], list[Any]]] = {
    "exchanged": ([MEMORY[:3], MEMORY[3:]], [MEMORY[3:], MEMORY[:3]]),
    "shifted": ([MEMORY[:4]], [MEMORY[1:5]]),
    "of-NumPy": (NUMPYS, NUMPYS),
    "at-one-end": ([MEMORY[:5:2], MEMORY[4:]],) * 2,
    "of-two-sizes": ([MEMORY[::2], MEMORY.view(torch.float16)[1:5]],) * 2,
    "of-another-dtype": ([one.double() for one in SHIFTED], SHIFTED),
}


@pytest.mark.parametrize("name", SHARED)
def test_memory_that_would_be_divided_twice_is_refused_and_columns_of_one_tensor_are_not(name: str):
    before, (grads, out) = MEMORY.tolist(), SHARED[name]
    with pytest.raises(gradscale.SharedMemoryError, match="divided twice: pass one of them, or a copy of it"):
        gradscale.unscale(grads, state_of(4.0), out=out)
    with pytest.raises(gradscale.SharedMemoryError, match=r"gradient 1, shape \(2, 3\).*overlaps itself.*clone"):
        in_place([torch.ones(2), MEMORY.as_strided((2, 3), (1, 1))])
    assert MEMORY.tolist() == before
    matrix = MEMORY.reshape(3, 2).clone()
    columns, state = list(matrix.T), state_of(4.0)
    # Whatever the user's default device is.
    with torch.device("meta"):
        gradscale.unscale(columns, state, out=columns)
    assert matrix.flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_leaf_of_autograds_graph_is_overwritten_and_stays_one():
    leaf = torch.tensor([8.0], requires_grad=True)
    assert in_place([leaf]) == 0
    assert (leaf.item(), leaf.grad_fn, leaf.requires_grad) == (1.0, None, True)


# Where a device has no kernel for a dtype.


@pytest.mark.parametrize(
    "scale", [2.0**-20, 0.75, 1.0, 1e30, *later("ranks", 2.0**29, 0.5, *map(float, torch.logspace(-6, 38, 40)))]
)
def test_every_bfloat16_is_divided_and_judged_without_a_kernel_as_it_is_with_one(
    monkeypatch: pytest.MonkeyPatch, scale: float
):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    found = []
    for kernel in (KERNEL, without_kernel("bfloat16")):
        monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", kernel)
        grads = every.clone()
        some = [one.repeat(2) for one in (*grads[0x7F70:0x7F90], *grads[0xFF70:0xFF90], *grads[::1111])]
        assert in_place([grads], scale) == 1
        assert grads.isnan().sum() == 2 * 127
        # A NaN stays one, of whatever bits.
        divided = grads.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf).view(torch.int16).tolist()
        found.append((divided, [in_place([torch.ones(3, dtype=torch.bfloat16), one], scale) for one in some]))
    assert found[0] == found[1]
    assert set(found[0][1]) == {0, 1}


@pytest.mark.parametrize("dtype", REALS)
def test_a_scale_of_1_leaves_gradients_without_a_kernel_as_they_are(monkeypatch: pytest.MonkeyPatch, dtype: str):
    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", without_kernel(dtype))
    run = Small(GradScaler("cpu", policy=StaticScale(1.0), allow_fp16_grads=True), dtypes=[dtype], size=6)
    nan = torch.tensor([-math.nan, 0.0, -0.0, math.inf, 1.0, -1e-7], dtype=getattr(torch, dtype))
    words = getattr(torch, f"int{8 * nan.itemsize}")
    # The payload of a NaN.
    nan.view(words)[0] += 5
    before = nan.view(words).tolist()
    run.put(nan)
    version = nan._version
    run.step(explicit=True)
    assert run.report.skipped
    assert (nan.view(words).tolist(), nan._version) == (before, version)


@pytest.mark.tier("ranks")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_quotient_that_is_stored_as_infinite_is_found_by_compiled_code():
    require_program("c++")
    if is_torch_2_6():
        pytest.skip("torch 2.6: its compiler fails in array-api-compat, which asks for modules that are not imported")
    state = DynamicScale(init_scale=2.0**-10).init(torch.zeros(()))
    compiled = torch.compile(lambda grads, state: gradscale.unscale(grads, state))
    for bad in ({}, {"float16": 1000.0}, {"float16": -1000.0}, {"bfloat16": 3e38}, {"bfloat16": -3e38}):
        given = [torch.tensor([1.0, bad.get(name, 1.0)], dtype=getattr(torch, name)) for name in REALS[:2]]
        made, nonfinite = compiled(given, state)
        assert [one.isinf().any().item() for one in made] == [name in bad for name in REALS[:2]]
        assert nonfinite == len(bad)


RULE = gradscale.SkipSpikes(window=4, min_values=2)
FACTORS = {"growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 1}
OTHERS = [DynamicScale(tolerance=0.3), DynamicScale(init_scale=4.0, max_scale=6.0), StaticScale(4.0)]
POLICIES = [DynamicScale(init_scale=4.0, hysteresis=2, **FACTORS), *later("ranks", *OTHERS)]


def pure_step(policy: gradscale.Policy, state: gradscale.ScaleState, x: Any):
    """Do what a training step does with the pure functions."""
    scaled = gradscale.scale({"grads": [x, x.half(), None], "loss": (x.sum().bfloat16(), 3)}, state)
    grads, nonfinite = gradscale.unscale(scaled["grads"], state)
    spikes = RULE.init(x)
    spikes = RULE.learn(spikes, grads[0].sum(), skipped=RULE.judge(spikes, grads[0].sum()))
    kept = gradscale.select(nonfinite == 0, {"grads": grads[:2]}, {"grads": [x, x.half()]})
    return scaled, kept, nonfinite, spikes, policy.update(state, nonfinite=nonfinite)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_the_pure_functions_are_one_graph_and_give_what_they_give_without_a_compiler(policy: gradscale.Policy):
    if is_torch_2_6():
        pytest.skip("torch 2.6: its compiler fails in array-api-compat, which asks for modules that are not imported")
    torch._dynamo.reset()
    compiled = torch.compile(pure_step, fullgraph=True, backend="eager")
    state = policy.init(torch.zeros(()))
    for value in (1.0, math.inf, 2.0):
        x = torch.tensor([2.0, value])
        got, expected = compiled(policy, state, x), pure_step(policy, state, x)
        assert str(got) == str(expected)
        state = got[-1]
    torch._dynamo.reset()


_OTHER_KINDS = """
import torch
import gradscale
state = gradscale.DynamicScale(init_scale=4.0).init(like=torch.zeros(()))
gradscale.unscale([torch.ones(1)], state)
compiled = torch.compile(lambda grads: gradscale.unscale(grads, state), fullgraph=True, backend="eager")
print(*compiled([torch.ones(1, dtype=torch.bfloat16), torch.ones(1)])[0])
"""


def test_a_dtype_may_first_be_seen_by_the_compiler():
    if is_torch_2_6():
        pytest.skip("torch 2.6: its compiler fails in array-api-compat, which asks for modules that are not imported")
    # In a process of its own, since kinds of arrays are looked at once.
    completed = python("-c", _OTHER_KINDS)
    assert completed.stdout == "tensor([0.2500], dtype=torch.bfloat16) tensor([0.2500])\n", completed.stderr


def test_a_state_is_a_pytree_of_torch_and_says_its_arrays_to_type_checkers_alone():
    state = state_of(8.0)
    leaves, structure = torch.utils._pytree.tree_flatten(state)
    assert leaves == [8.0, 0, 0, 0]
    assert torch.utils._pytree.tree_unflatten(leaves, structure) == state == pickle.loads(pickle.dumps(state))
    assert type(copy.deepcopy(state)._replace(scale=leaves[0])) is type(state) is gradscale.ScaleState
    assert gradscale.ScaleState.__bases__ == (tuple,)
    assert gradscale.ScaleState[torch.Tensor](*state) == state
    assert [*get_type_hints(gradscale.ScaleState)] == [*state._fields]


def test_dtensors_are_refused_by_the_functional_core_with_what_to_do():
    class Sharded(torch.Tensor):
        device_mesh = "a mesh"

    with pytest.raises(gradscale.InvalidTypeError, match=r"gradscale_torch\.GradScaler"):
        in_place([torch.ones(2).as_subclass(Sharded)])


# What is counted.


def summaries(*tensors):
    return gradscale.registry.backend_for(tensors[0]).read_summaries(tensors)[0]


def test_several_blocks_any_strides_subnormals_that_torch_takes_for_0_and_8_bits_are_counted():
    for name in ("float16", "bfloat16", "float32", "float64", "complex64"):
        x = torch.ones((3, 50_000), dtype=getattr(torch, name))
        x[0, 0], x[1, 5], x[2, -1], x[2, :9] = math.nan, math.inf, -7, 0
        for given in (x, x.T, x.flip(1), x.T.contiguous().T, x.conj()):
            assert summaries(given) == [Summary(150_000, 1, 1, 9, 0, 7.0)]
    x = torch.tensor([2.0**-140, 0.0, -(2.0**-149), 1.0])
    assert torch.set_flush_denormal(True)
    try:
        assert summaries(x) == [Summary(4, 0, 0, 1, 2, 1.0)]
    finally:
        torch.set_flush_denormal(False)
    x = torch.tensor([0.0, 2.0**-9, 1.0, math.nan]).to(torch.float8_e4m3fn)
    assert summaries(x, torch.ones(2)) == [Summary(4, 0, 1, 1, 1, 1.0), Summary(2, 0, 0, 0, 0, 1.0)]


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_sparse_gradients_are_unscaled_into_another_dtype(layout: str):
    given = getattr(torch.diag(torch.tensor([4.0, math.inf], dtype=torch.float16)), layout)()
    (found,), count = gradscale.unscale([given], state_of(4.0), dtype=torch.float32)
    assert (found.dtype, found.to_dense().tolist(), int(count)) == (torch.float32, [[1.0, 0.0], [0.0, math.inf]], 1)
    assert given.to_dense().tolist() == [[4.0, 0.0], [0.0, math.inf]]
