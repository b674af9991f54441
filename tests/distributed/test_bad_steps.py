"""Options of spikes that differ on one rank, and guards of torch's optimizers; lives.py has what steps are skipped."""

import itertools
import math

import pytest
from axes import is_torch_2_6
from scenarios import Trainer, loss, raised, rank_and_size
from worlds import agree

import gradscale

RULE = gradscale.SkipSpikes(window=8, min_values=4, of="loss")


OPTIONS = {
    "window=9": {"skip": gradscale.SkipSpikes(window=9)},
    "diagnose='on_overflow'": {"diagnose": "on_overflow"},
    "give_up_after=9": {"give_up_after": 9},
}


def another_option(group, odd_rank: int, said: str) -> str:
    """Give a scaler on one rank another option."""
    rank, _ = rank_and_size(group)
    trainer = Trainer(group, "numpy", 1, **{"skip": RULE} | (OPTIONS[said] if rank == odd_rank else {}))
    error = raised(gradscale.ScaleDesyncError, lambda: trainer.iterate((0,)), said)
    return str(error).partition("settings: ")[2]


def guarded(group, bad_rank: int, bad: str, fused: bool):
    """Give one rank a bad batch: the weights are to the bit those of a run without it, and the guard can be resumed."""
    import torch

    import gradscale_torch

    rank, _ = rank_and_size(group)
    # All ranks of torch.distributed, if it is that of this world.
    given = None if isinstance(group, torch.distributed.ProcessGroup) else group
    average, expected = torch.zeros(3), torch.zeros(3)
    guard = gradscale_torch.StepGuard(group=given, timeout=60.0, skip=RULE, hold=average)
    weights = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer, plain = (torch.optim.AdamW([weight], lr=0.1, fused=fused) for weight in weights)
    reason = {"nan": "overflow", "inf": "overflow", "loss": "spike", "norm": "overflow", "spread": "overflow"}.get(
        bad, bad
    )
    for number in range(12):
        is_bad = number == 7
        is_bad_here = is_bad and rank == bad_rank
        value = loss(
            "torch", {"spike": 50.0, "loss": math.nan, "spread": math.nan}.get(bad, 1.0) if is_bad_here else 1.0
        )
        inputs = {"loss": value, "batch": number}
        if number % 2 == 0:
            # As a scaler is called.
            del inputs["loss"]
            guard.scale(value)
        if bad == "norm":
            inputs["norm"] = torch.tensor(math.inf if is_bad_here else 1.0)
        for weight in weights:
            weight.grad = weight.detach() * (0.1 * (number % 5 + rank + 1))
        if is_bad and (bad == "spread" or (is_bad_here and bad in ("nan", "inf"))):
            # An average spreads a loss of NaN to all ranks.
            weights[0].grad = weights[0].detach() * (math.nan if bad == "spread" else float(bad))
        for each in (average, expected)[: 1 if is_bad else 2]:
            each += math.nan if is_bad else number
        if is_bad_here and bad == "refused":
            guard.refuse(optimizer)
        guard.step(optimizer, **inputs)
        if number % 2 == 0:
            guard.update()
        if not is_bad:
            plain.step()
        report = guard.last_step(optimizer)
        assert (report.iteration, report.batch) == (number + 1, number)
        assert report.by_loss == (is_bad and bad in ("spike", "loss", "spread"))
        assert str(report.loss) == str(value.item())
        assert (report.reason, report.by) == ((reason, bad_rank) if is_bad else ("stepped", None))
        assert torch.equal(*(weight.detach().view(torch.int16) for weight in weights))
        assert torch.equal(average, expected)
        # Of each rank the own one.
        guard.load_state_dict(guard.state_dict())
    assert guard.counts() == {"taken": 11, "overflow": 0, "spike": 0, "refused": 0} | {reason: 1}
    return guard.counts()


def test_another_option_on_one_rank_is_named_on_all(world):
    agree(world, another_option, [(rank, said) for rank in range(world.size) for said in OPTIONS])


@pytest.mark.torch
@pytest.mark.tier("ranks")
def test_a_guarded_run_is_to_the_bit_the_run_without_the_bad_batch_of_any_rank(world):
    bad = ["nan", "inf", "spike", "refused", "loss", "norm", "spread"]
    agree(world, guarded, itertools.product(range(world.size), bad, [False, True]))


def replicas(group, bad_rank: int, of: str):
    """Train a replica in float16's manner, as DDP does: a spike of one rank's loss skips on all."""
    import torch

    import gradscale_torch

    rank, _ = rank_and_size(group)
    rule = gradscale.SkipSpikes(window=8, min_values=4, of=of.split())  # type: ignore[arg-type]
    scaler = gradscale_torch.GradScaler("cpu", init_scale=8.0, skip=rule, max_norm=9.0)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    reasons = []
    for number in range(8):
        scaler.scale(loss("torch", 50.0 if rank == bad_rank and number == 6 else 1.0))
        weight.grad = torch.full((3,), 8.0 * (number % 3 + 1))
        scaler.step(optimizer)
        scaler.update()
        reasons.append(scaler.last_step(optimizer)[3])
    assert reasons[6] == ("spike" if "loss" in of else "stepped")
    return reasons, weight.tolist(), scaler.state_dict()["scale"]


@pytest.mark.torch
@pytest.mark.tier("ranks")
def test_replicas_that_judge_losses_skip_together_without_a_group(gloo):
    agree(gloo, replicas, itertools.product(range(gloo.size), ["loss", "loss norm", "norm"]))


def lone_loss(group, rank_of_loss: int):
    """Give a scaler without a group the loss of its step, which would skip on one rank alone."""
    import torch

    import gradscale_torch

    scaler, weight = gradscale_torch.GradScaler("cpu", init_scale=8.0), torch.nn.Parameter(torch.ones(3))
    optimizer, value = torch.optim.SGD([weight], lr=0.5), loss("torch", 1.0)
    weight.grad = scaler.scale(value) * torch.ones(3)
    said = "step(loss=) of GradScaler would skip on this rank alone", "group=torch.distributed.group.WORLD"
    raised(gradscale.InvalidValueError, lambda: scaler.step(optimizer, loss=value), *said)
    assert weight.tolist() == [1.0] * 3
    scaler.set_group(torch.distributed.group.WORLD)
    weight.grad = scaler.scale(value) * torch.ones(3)
    scaler.step(optimizer, loss=value * (math.nan if rank_and_size(group)[0] == rank_of_loss else 1.0))
    scaler.update()
    return scaler.last_step(optimizer)[:5], weight.tolist()


@pytest.mark.torch
@pytest.mark.tier("ranks")
def test_the_loss_of_a_step_needs_a_group_in_a_world_of_several_ranks(gloo):
    agree(gloo, lone_loss, [(rank,) for rank in range(gloo.size)])


def split_loss(group, by: str, said: str):
    """Give a guard a loss or a norm of which one rank has the element, and the others nothing."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    import gradscale_torch

    mesh = init_device_mesh("cpu", (rank_and_size(group)[1],))
    guard, weight = gradscale_torch.StepGuard(skip=RULE, timeout=60.0), torch.nn.Parameter(torch.ones(3))
    optimizer, reasons = torch.optim.SGD([weight], lr=0.5), []
    for value in (1.0, 1.0, 1.0, 1.0, math.nan if by in ("keeps", "norm") else 50.0, 1.0):
        loss = distribute_tensor(torch.tensor([value]), mesh, [Shard(0)])
        weight.grad = torch.ones(3)
        if by in ("scale", "keeps"):
            getattr(guard, by)(loss)
        guard.step(optimizer, **({"loss": 1.0, by: loss} if by in ("loss", "norm") else {}))
        reasons.append(guard.last_step(optimizer).reason)
    assert reasons == ["stepped"] * 4 + [said, "stepped"]


@pytest.mark.torch
@pytest.mark.tier("ranks")
def test_a_loss_or_a_norm_that_one_rank_has_is_judged_on_all(gloo):
    cases = [("scale", "spike"), ("loss", "spike"), ("keeps", "refused"), ("norm", "overflow")]
    agree(gloo, split_loss, cases)


def normed(group, bad_rank: int, kind: str):
    """Give one rank a bad batch, and its replica or shard BatchNorm: the whole model is as without that batch."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import gradscale_torch

    rank, _ = rank_and_size(group)

    def trained(bad: float | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
        if kind == "fsdp":
            wrapped = fully_shard(model)
        else:
            wrapped = DistributedDataParallel(model, broadcast_buffers=kind == "broadcast")
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
        guard = gradscale_torch.StepGuard(skip=RULE, hold=wrapped, timeout=60.0)
        generator = torch.Generator().manual_seed(rank)
        for number in range(8):
            x = torch.randn(8, 4, generator=generator)
            if number == 6 and bad is None:
                continue
            loss = wrapped(x * bad if number == 6 and rank == bad_rank else x).square().mean()
            loss = loss * (1e4 if number == 6 and rank == bad_rank else 1.0)
            loss.backward()
            guard.step(optimizer, loss=loss)
            assert guard.last_step(optimizer).skipped == (number == 6)
            optimizer.zero_grad()
        state = {name: getattr(x, "to_local", lambda x=x: x)() for name, x in model.state_dict().items()}
        return {name: x.clone() for name, x in state.items()}

    expected = trained(None)
    for bad in (math.nan, math.inf, 1e4):
        held = trained(bad)
        assert held.keys() == expected.keys()
        assert all(torch.equal(held[name], expected[name]) for name in expected), bad


@pytest.mark.torch
@pytest.mark.tier("ranks")
def test_the_buffers_of_replicas_and_shards_are_held(gloo):
    methods = ["broadcast", "own"] if is_torch_2_6() else ["broadcast", "own", "fsdp"]
    agree(gloo, normed, itertools.product(range(gloo.size), methods))
