"""What the ranks do in the tests of ranks that do something different: another order, another call, another norm.

Each scenario takes a group, the odd rank, what it does differently, and the library whose scaler is meant: "numpy" or
"torch". It asserts what its rank is told, which does not depend on how far the others came.
"""

import copy
import pickle
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
from group_scenarios import fresh
from scenarios import PLAIN, SGD, TIMEOUT, Trainer, agreement, gradients, loss, raised, rank_and_size

import gradscale
from gradscale.scaler import agreement as agreements
from gradscale.scaler import claim as claims

CALLS = {
    "step": "unscale_() or step()",
    "norm": "unscale_(max_norm=), for the norm over the group",
    "diagnosis": "diagnose(gather=True)",
    "agreement": "a GroupAgreement",
}


def held(name: str, odd: object, others: object) -> tuple[str, ...]:
    """Return what every rank is told of what the odd rank holds, and the others."""
    return f"{name}: ", f"{odd} on rank {{odd_rank}}", f"{others} on rank {{another}}"


def calls(odd: str, others: str) -> tuple[str, ...]:
    """Return what is said of two calls that meet."""
    return held("the call itself", CALLS[odd], CALLS[others])


def refuse(trainer: Trainer):
    """Give the first optimizer a gradient that is none."""
    optimizer = trainer.optimizers[0]
    if trainer.library not in PLAIN:
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = parameter.detach().new_ones(1).expand(3)
    else:
        optimizer.grads = [1.0]


def leave_out(trainer: Trainer, is_odd: bool):
    """Unscale, and step on the others."""
    trainer.scaler.unscale_(trainer.optimizers[0])
    if not is_odd:
        trainer.scaler.step(trainer.optimizers[0])
    trainer.scaler.update()


def declined(trainer: Trainer, is_odd: bool):
    """Let the odd rank's optimizer make no step of its own accord."""
    optimizer = trainer.optimizers[0]
    if is_odd:
        optimizer.step = lambda: gradscale.NOT_STEPPED
    returned = trainer.scaler.step(optimizer)
    vars(optimizer).pop("step", None)
    assert (returned is gradscale.NOT_STEPPED, trainer.scaler.last_step(optimizer).skipped) == (is_odd, is_odd)
    trainer.scaler.update()


def step_refused(trainer: Trainer, is_odd: bool):
    """Step what cannot be unscaled on the odd rank."""
    if is_odd:
        refuse(trainer)
    trainer.scaler.step(trainer.optimizers[0])


def clipped(odd: tuple[Any, str] | None, others: tuple[Any, str], refuses: bool = False) -> Callable[..., None]:
    """Return what clips to a norm, to another one on the odd rank or to none, and over the rank or the group."""

    def clip(trainer: Trainer, is_odd: bool):
        if is_odd and refuses:
            refuse(trainer)
        asked = odd if is_odd else others
        settings = {} if asked is None else {"max_norm": asked[0], "norm_over": asked[1]}
        trainer.scaler.unscale_(trainer.optimizers[0], **settings)
        trainer.scaler.step(trainer.optimizers[0])

    return clip


def averaged_later(trainer: Trainer, is_odd: bool):
    """Clip each rank's own gradients, which its optimizer would average in its step."""
    trainer.fill(2.0 * 65536.0 if is_odd else 65536.0)
    trainer.scaler.unscale_(trainer.optimizers[0], max_norm=1.0, norm_over="rank")
    trainer.scaler.step(trainer.optimizers[0])


def agreed(trainer: Trainer, is_odd: bool):
    """Agree without a scaler on the odd rank."""
    agree = agreeing(trainer.group, trainer.library.split()[0])
    if is_odd:
        agree()


def diagnosed(trainer: Trainer, is_odd: bool):
    """Diagnose on the odd rank."""
    if is_odd:
        trainer.scaler.diagnose(trainer.optimizers[0], gather=True)


def loaded(**values) -> Callable[..., None]:
    """Return what resumes from another checkpoint on the odd rank."""

    def load(trainer: Trainer, is_odd: bool):
        trainer.scaler.step(trainer.optimizers[0])
        trainer.scaler.update()
        saved = trainer.scaler.state_dict()
        trainer.scaler.load_state_dict(saved | (values if is_odd else {}))

    return load


def reset(trainer: Trainer, is_odd: bool):
    """Have another growth interval on the odd rank."""
    if is_odd:
        trainer.scaler.set_growth_interval(7)


def left_open(trainer: Trainer, is_odd: bool):
    """Leave an update out on the odd rank, which steps its next optimizer."""
    trainer.scaler.step(trainer.optimizers[0])
    if not is_odd:
        trainer.scaler.update()
    trainer.refill()
    trainer.scaler.step(trainer.optimizers[1])


ORDER = "(numbered in the order in which the scaler has met them, so some rank has them in another order)"
REORDERED = (*held("optimizer", 1, 0), ORDER)
# The odd rank gets its own error, at once.
REFUSED = ("rank {odd_rank} cannot unscale its gradients",)
# It waits for no answer before it loads.
UNREAD = (*REORDERED, "optimizer")
ELSEWHERE = ("agreement without a scaler", "step of another scaler")
ROUND = 0.1  # one float32, and two float64 with the next number
DIFFERENCES: dict[str, tuple[Callable[[Trainer, bool], object], tuple[str, ...]]] = {
    "swapped steps": (lambda trainer, is_odd: trainer.iterate((1, 0) if is_odd else (0, 1)), REORDERED),
    "swapped unscaling": (lambda trainer, is_odd: trainer.iterate((1, 0) if is_odd else (0, 1), True), REORDERED),
    "one more": (
        lambda trainer, is_odd: trainer.scaler.step(trainer.optimizer() if is_odd else trainer.optimizers[0]),
        held("optimizer", 2, 0),
    ),
    "step left out": (leave_out, held("steps made in the iterations before", 2, 3)),
    "step of another scaler": (
        lambda trainer, is_odd: is_odd and trainer.other.iterate(),
        ("scaler of the group: ", "numbered in the order of their construction"),
    ),
    "unread": (
        lambda trainer, is_odd: trainer.scaler.unscale_(trainer.optimizers[1]) if is_odd else trainer.iterate(),
        UNREAD,
    ),
    "step declined": (
        declined,
        (*held("steps made in the iterations before", 2, 3), "or its optimizer alone has refused one"),
    ),
    "diagnosis alone": (diagnosed, calls("diagnosis", "step")),
    "diagnosis of another": (
        lambda trainer, is_odd: trainer.scaler.diagnose(trainer.optimizers[is_odd], gather=True),
        REORDERED,
    ),
    "agreement without a scaler": (agreed, calls("agreement", "step")),
    "step refused": (step_refused, REFUSED),
    "another scale": (loaded(scale=32768.0), held("scale", 32768.0, 65536.0)),
    "another tracker": (loaded(_growth_tracker=5), held("growth_tracker", 5, 2)),
    "another policy": (reset, ("settings: ", "growth_interval=7", "growth_interval=2000")),
    "update left out": (left_open, held("iteration", 2, 3)),
    # Of gradscale's own scaler alone: torch's replacement finds the group of a norm in the parameters.
    "norm of rank": (clipped((2.0, "rank"), (1.0, "rank")), held("max_norm", 2.0, 1.0)),
    "norm of group": (clipped((2.0, "group"), (1.0, "group")), held("max_norm", 2.0, 1.0)),
    "norm in its last digit": (
        clipped((ROUND * (1 + 2**-40), "rank"), (ROUND, "rank")),
        held("max_norm", ROUND * (1 + 2**-40), ROUND),
    ),
    "norm of other gradients": (averaged_later, ("norm of the gradients: ", *held("", 3.46, 1.73)[1:], "average them")),
    "norm left out": (clipped(None, (1.0, "rank")), held("max_norm", None, 1.0)),
    "norm over the group alone": (clipped((1.0, "group"), (1.0, "rank")), calls("norm", "step")),
    "norm of what is refused": (clipped((1.0, "group"), (1.0, "group"), refuses=True), REFUSED),
}
"""What differs in the second iteration of two optimizers, and what the ranks are told."""


def agreeing(group, library: str):
    """Return a call of a GroupAgreement."""
    policy = gradscale.DynamicScale()
    agree, state = agreement(group, policy), policy.init(loss(library))
    return lambda: agree(gradscale.unscale(gradients(library), state)[1], state)


KEYS: tuple[Callable[[list[str]], Sequence[str]], ...] = (
    lambda names: names,
    lambda names: [name for name in names if name not in ("counts", "steps")],
    # torch's have no counts.
    lambda names: names[:5],
)
"""What a checkpoint may hold."""


def differ(group, odd_rank: int, what: str, keys: int, library: str):
    """Do something differently on one rank; each is told of it by a ScaleDesyncError that names it, and can go on."""
    rank, size = rank_and_size(group)
    is_odd = rank == odd_rank
    difference, told = DIFFERENCES[what]
    said = [text.format(odd_rank=odd_rank, another=int(odd_rank == 0)) for text in told]
    trainer = Trainer(group, library)
    # Made on every rank, as scalers over a group are to be.
    trainer.other = Trainer(group, library)
    trainer.iterate()
    saved = trainer.scaler.state_dict()
    trainer.refill()

    def train():
        difference(trainer, is_odd)
        trainer.iterate()

    if is_odd and told is REFUSED:
        raised((gradscale.InvalidTypeError, gradscale.InvalidValueError), train)
    elif is_odd and told is UNREAD:
        difference(trainer, is_odd)
    else:
        error = raised(gradscale.ScaleDesyncError, train, *said, f"rank {rank} of {size}")
        if not is_odd or what not in ELSEWHERE:
            # And again, until there is another state; a copy may be made.
            for call in (trainer.scaler.update, lambda: trainer.scaler.update(8.0)):
                assert str(raised(gradscale.ScaleDesyncError, call)) == str(error)
            assert len(trainer.scaler.diagnose(trainer.optimizers[0]).entries) == 1
            pickle.dumps(trainer.scaler)
    # A checkpoint on every rank mends it, whatever each has counted since, with an optimizer that is new.
    trainer.scaler.load_state_dict({name: saved[name] for name in KEYS[keys]([*saved])})
    trainer.optimizers = [*trainer.optimizers[:2], trainer.optimizer()]
    for order in ((1, 0, 2), (0, 2, 1)):
        trainer.iterate(order)
        if is_odd and library == "numpy":
            # Now a load leaves the optimizers their numbers; of torch's keys none is the iteration's.
            trainer.scaler.load_state_dict(trainer.scaler.state_dict())


def swapped_scalers(group, odd_rank: int, library: str):
    """Use two scalers over one group, in another order on the odd rank from the first iteration on."""
    rank, size = rank_and_size(group)
    trainers = [Trainer(group, library, 1) for _ in range(2)]
    ordered = trainers[::-1] if rank == odd_rank else trainers
    call = lambda: [one.iterate((0,)) for one in ordered]  # noqa: E731
    said = "numbered in the order of their construction", f"rank {rank} of {size}"
    error = raised(gradscale.ScaleDesyncError, call, *said)
    # The group of a world has had the scalers of the cases before.
    found = dict(re.findall(r"(\d+) on rank (\d+(?:, \d+)*)", str(error).partition("scaler of the group: ")[2]))
    least, most = sorted(map(int, found))
    assert (most, found[str(most)]) == (least + 1, str(odd_rank)), error


# Legal programs.


def legal(group, odd_rank: int, library: str):
    """Do what ranks may do differently, and much that they must do alike."""
    rank, _ = rank_and_size(group)
    is_odd = rank == odd_rank
    trainer = Trainer(group, library, 0)
    # Made in another order, and stepped in one.
    first, second = trainer.optimizer(), trainer.optimizer()
    trainer.optimizers = [second, first] if is_odd else [first, second]
    trainer.iterate()
    if is_odd:
        # Nobody is asked, and nothing is sent.
        trainer.scaler.diagnose(trainer.optimizers[1])
        trainer.scaler = copy.deepcopy(trainer.scaler)
        pickle.dumps(trainer.scaler)
    trainer.iterate(unscales=True)
    if is_odd and library == "numpy":
        trainer.scaler.load_state_dict(trainer.scaler.state_dict())
    trainer.scaler.diagnose(trainer.optimizers[1], gather=True)
    # One that was never met, and is gone after its iteration.
    trainer.optimizers.append(trainer.optimizer())
    trainer.iterate((0, 2, 1))
    trainer.optimizers[2] = trainer.optimizer()
    trainer.iterate((2, 0))
    other = Trainer(group, library, 1)
    other.iterate((0,))
    trainer.iterate()
    other.iterate((0,))
    saved = trainer.scaler.state_dict()
    assert (float(saved["scale"]), int(saved["_growth_tracker"])) == (65536.0, 5)


def resumed(group, odd_rank: int, library: str):
    """Load one checkpoint on every rank, though the odd rank has scaled before, and then scale on one rank alone."""
    rank, _ = rank_and_size(group)
    is_odd = rank == odd_rank
    trainer = Trainer(group, library, init_scale=65536.0)
    scaler, optimizers = trainer.scaler, trainer.optimizers
    saved = gradscale.GradScaler(init_scale=1024.0, growth_interval=2).state_dict() | {"_growth_tracker": 1}
    scaler.load_state_dict(saved)
    # Nobody has scaled since.
    trainer.fill(0.0)
    scaler.step(optimizers[0])
    scaler.update()
    assert (trainer.steps, scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (1, 1024.0, 1)
    trainer.fill(1.0)
    for call in (scaler.unscale_, scaler.step):
        raised(gradscale.CallOrderError, lambda call=call: call(optimizers[0]), "never been called on any rank since a")
    scaler.load_state_dict(saved)
    # As in a pipeline, of which one stage has a loss.
    if is_odd:
        scaler.scale(loss(library.split()[0]))
    trainer.fill(1024.0)
    scaler.step(optimizers[0])
    scaler.update()
    trainer.iterate()
    assert (trainer.steps, scaler.get_scale()) == (4, 2048.0)
    # A loss that nobody uses.
    if is_odd:
        scaler.scale(loss(library.split()[0]))
    scaler.load_state_dict(saved)
    trainer.iterate()
    # All are in the middle of an iteration, and have stepped other optimizers.
    trainer.refill()
    scaler.step(optimizers[0])
    if is_odd:
        scaler.step(optimizers[1])
    else:
        scaler.unscale_(optimizers[1])
    scaler.load_state_dict(saved)
    trainer.iterate((1, 0))
    return scaler.state_dict()


def pipelined(group, odd_rank: int, library: str):
    """Scale on the odd rank alone, which has no gradients of the first optimizer, at first and after a load.

    Nor do the others have losses that a rule for spikes could judge.
    """
    rank, size = rank_and_size(group)
    trainer = Trainer(group, library, init_scale=8.0, skip=gradscale.SkipSpikes(of="loss", above=9.0))
    scaler, (first, second) = trainer.scaler, trainer.optimizers
    for reason in ("stepped", "overflow", "spike", "stepped"):
        overflows = reason == "overflow" and rank == (odd_rank + 1) % size
        trainer.fill(float("inf") if overflows else scaler.get_scale())
        if rank == odd_rank:
            scaler.scale(loss(library.split()[0], 50.0 if reason == "spike" else 1.0))
            if library == "numpy":
                first.grads = [None]
            else:
                first.param_groups[0]["params"][0].grad = None
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        assert [scaler.last_step(one).reason for one in trainer.optimizers] == [reason] * 2
        scaler.load_state_dict(scaler.state_dict())
    # A NaN does not hide that nobody has scaled, though a loop that has scaled before may multiply by itself.
    other = Trainer(group, library, 1, init_scale=8.0)
    other.scaler.load_state_dict(scaler.state_dict())
    other.fill(float("nan") if rank == odd_rank else 1.0)
    raised(gradscale.CallOrderError, lambda: other.scaler.step(other.optimizers[0]), "never been called on any rank")
    return scaler.get_scale(), scaler.counts()


def saved_apart(group, odd_rank: int, what: str, library: str):
    """Resume each rank from a state of its own, where the odd rank has made another number of steps."""
    rank, _ = rank_and_size(group)
    # Of torch's scaler in its own keys.
    trainer = Trainer(group, library, **({} if library == "torch" else {"policy": gradscale.StaticScale(8.0)}))
    scaler, optimizer, is_odd = trainer.scaler, trainer.optimizers[0], rank == odd_rank
    trainer.iterate()
    trainer.refill()
    saved = scaler.state_dict()
    is_refused = what == "an optimizer refuses"
    if is_refused and is_odd:
        optimizer.step = lambda: gradscale.NOT_STEPPED
    scaler.step(optimizer)
    if is_refused:
        scaler.update()
    if is_refused or is_odd:
        saved = scaler.state_dict()
    scaler.load_state_dict(saved)
    told = held("steps made in the iterations before", *((2, 3) if is_refused else (3, 2)))
    if library == "torch":
        told = held("iteration", 2, 1)
    said = [text.format(odd_rank=odd_rank, another=int(odd_rank == 0)) for text in told]
    raised(gradscale.ScaleDesyncError, trainer.iterate, *said)


def closure_without_scale(group, odd_rank: int, evaluation: int):
    """Step with a closure that calls ``scale`` on the odd rank alone, and in one evaluation nowhere; all are told."""

    class Evaluating(SGD):
        def step(self, closure=None):
            return [closure() for _ in range(3)]

    rank, _ = rank_and_size(group)
    scaler = gradscale.ShardedGradScaler(group=group, timeout=TIMEOUT, init_scale=4.0)
    optimizer, evaluations = Evaluating(None), []

    def closure():
        evaluations.append(1)
        # As in a pipeline, of which one stage has a loss.
        if rank == odd_rank and len(evaluations) != evaluation:
            scaler.scale(loss("numpy"))
        optimizer.grads = [np.full(3, 4.0, np.float32)]

    call = lambda: scaler.step(optimizer, closure)  # noqa: E731
    raised(gradscale.CallOrderError, call, "the closure of step() has not called scale() on any rank")
    assert len(evaluations) == evaluation


# What needs groups of its own.


def other_version(group, odd_rank: int, version: str, kind: str):
    """Run another version on the odd rank; all are told, now and again, until they have a group of one version."""
    rank, size = rank_and_size(group)
    own = gradscale.__version__
    given = [fresh(group), fresh(group)] if kind == "list" else fresh(group)
    again = gradscale.ScaleDesyncError
    if kind == "agreement":
        call, again = agreeing(given, "numpy"), gradscale.BackendError
    else:
        trainer = Trainer(given, "numpy" if kind == "list" else kind, 1)
        call = lambda: trainer.iterate((0,))  # noqa: E731
    said = f"two builds of version {own}" if version.startswith(own) else f"versions from {min(own, version)} to "
    with mock.patch.object(claims, "__version__", version if rank == odd_rank else own):
        raised(gradscale.ScaleDesyncError, call, said, f"rank {rank} of {size}")
        raised(again, call)
    if kind != "agreement":
        trainer.scaler.set_group(fresh(group))
        call()


def interleaved(group, odd_rank: int, program: str, library: str):
    """Make the calls of a program on the odd rank while ranks hold two scales; each says so, and no process ends."""
    rank, size = rank_and_size(group)
    is_odd = rank == odd_rank
    trainer = Trainer(fresh(group), library, 3)
    trainer.iterate((0, 1, 2))
    trainer.scaler.update(4.0 if is_odd else 8.0)
    trainer.refill()
    steps = tuple(f"step {number}" for number in range(3))

    def train():
        for call in PROGRAMS[program] if is_odd else steps:
            name, number = call.split()
            optimizer = trainer.optimizers[int(number)]
            if name == "norm":
                trainer.scaler.unscale_(optimizer, max_norm=1.0, norm_over="group")
            elif name == "diagnose":
                trainer.scaler.diagnose(optimizer, gather=True)
            else:
                getattr(trainer.scaler, name)(optimizer)

    # Nobody tells a rank that has ended what it waits for.
    with mock.patch.object(agreements, "_PATIENCE", 1.0):
        told = held("scale", 4.0, 8.0) if program in ANSWERED else ("what this rank holds is call=",)
        said = [text.format(odd_rank=odd_rank, another=int(odd_rank == 0)) for text in told]
        raised(gradscale.ScaleDesyncError, train, *said, f"rank {rank} of {size}")


ANSWERED = {
    "step": ("step 0", "step 1"),
    "one more": ("unscale_ 0", "unscale_ 1", "step 0", "step 1"),
    "two more": ("unscale_ 0", "unscale_ 1", "unscale_ 2", "step 0"),
    "another first": ("unscale_ 0", "unscale_ 1", "step 1"),
}
"""What one rank calls, while the others step all optimizers, and meets what the others tell when it has read theirs."""
PROGRAMS = ANSWERED | {
    "norm": ("unscale_ 0", "norm 1"),
    "diagnosis": ("unscale_ 0", "diagnose 1"),
}
"""And what it calls so that it waits for another answer first."""


def grid_in_another_order(groups: list[Any], is_odd: bool, is_told: bool, library: str, settings):
    """Agree over the rows and columns of a grid, in another order on the odd rank."""
    trainer = Trainer(groups[::-1] if is_odd else groups, library, 1, **settings)
    if is_told:
        raised(gradscale.ScaleDesyncError, lambda: trainer.iterate((0,)), "position of the group in the list")
    else:
        trainer.iterate((0,))
