"""What the ranks do in the tests of ranks that do something different: another order, another call, another norm.

A program is a text of calls, such as ``scale, odd: unscale_ B, step A, update``: those with ``odd:`` are made on the
odd rank alone, those with ``even:`` on the others. Each scenario takes a group, the odd rank, what it does, and the
library whose scaler is meant, as a ``Trainer`` does. It asserts what its rank is told, which does not depend on how far
the others came.
"""

import copy
import json
import pickle
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
from scenarios import PLAIN, SGD, TIMEOUT, Trainer, agreement, fresh, gradients, loss, raised, rank_and_size

import gradscale
from gradscale.scaler import agreement as agreements
from gradscale.scaler import claim as claims

# By the names of optimizers, what their gradients are when they are unscaled.
TRUE = {"A": 1.0, "B": 2.0, "C": 4.0}
ITERATION = "scale, step A, step B, update"
UNSCALED = "scale, unscale_ A, unscale_ B, step A, step B, update"


class Player(Trainer):
    """A rank that makes the calls of programs, of methods here or of the scaler, with two SGD and another optimizer."""

    def __init__(self, group, library: str, odd_rank: int = 0, **settings):
        super().__init__(group, library, 2, **settings)
        self.optimizers.append(self.optimizer(is_other=True))
        self.is_odd, self._settings = rank_and_size(group)[0] == odd_rank, settings
        self.saved: tuple[dict[str, Any], list[int]]
        self.save()

    def run(self, *programs: str):
        """Make all calls of this rank."""
        for call in ", ".join(programs).split(", "):
            who, _, rest = call.rpartition(": ")
            if who in ("", "odd" if self.is_odd else "even"):
                name, *words = rest.split()
                getattr(self if hasattr(self, name) else self.scaler, name)(*map(self._meant, words))

    def _meant(self, word: str):
        if word in TRUE:
            return self.optimizers[[*TRUE].index(word)]
        try:
            return None if word == "None" else json.loads(word)
        except ValueError:
            return word

    def scale(self, overflow=None):
        """Scale a loss, and give every optimizer its gradients; perhaps one of them overflows."""
        self.scaler.scale(loss(self.library.split()[0], 1.0))
        for optimizer, value in zip(self.optimizers, TRUE.values(), strict=True):
            self.give(optimizer, float("inf") if optimizer is overflow else value * self.scaler.get_scale())

    def spike(self):
        """Scale a loss that is a spike."""
        self.scaler.scale(loss(self.library.split()[0], 1.0), loss=100.0)

    def overflow(self, optimizer):
        """Let one rank of two overflow, whichever it is that makes the usual calls."""
        self.scale(optimizer if rank_and_size(self.group)[0] == 1 else None)

    def clip(self, optimizer, max_norm: float, over: str):
        """Unscale and clip; torch's replacement finds the group of a norm in the parameters."""
        self.scaler.unscale_(optimizer, max_norm=max_norm, **({"norm_over": over} if self.library in PLAIN else {}))

    def step_alone(self, optimizer):
        """Step without the scaler."""
        optimizer.step()

    def decline(self, optimizer):
        """Let an optimizer make no step of its own accord."""
        with mock.patch.object(optimizer, "step", return_value=gradscale.NOT_STEPPED):
            self.scaler.step(optimizer)

    def schedule(self, optimizer):
        """Step a schedule."""
        self.scaler.step_schedule(optimizer, mock.Mock())

    def gather(self, optimizer):
        """Diagnose on all ranks."""
        self.scaler.diagnose(optimizer, gather=True)

    def break_(self, optimizer):
        """Give an optimizer a gradient that is none."""
        if self.library in PLAIN:
            optimizer.grads = [1.0]
        else:
            (parameter,) = optimizer.param_groups[0]["params"]
            parameter.grad = parameter.detach().new_ones(1).expand(3)

    def renew(self, name: str):
        """Put another optimizer in the place of one."""
        self.optimizers["abc".index(name)] = self.optimizer()

    def save(self):
        """Keep a checkpoint, which holds the weights, too: what was done differently since is undone by a load."""
        self.saved = self.scaler.state_dict(), [optimizer.steps for optimizer in self.optimizers]

    def load(self, key: str = "", value=None):
        """Load it, perhaps with another value."""
        self.scaler.load_state_dict(self.saved[0] | ({key: value} if key else {}))
        for optimizer, steps in zip(self.optimizers, self.saved[1], strict=True):
            optimizer.steps = steps

    def reload(self, *changed):
        """Load what the scaler holds, perhaps with another value."""
        self.save()
        self.load(*changed)

    def copy(self):
        """Go on with a copy."""
        self.scaler = copy.deepcopy(self.scaler)

    def pickle(self):
        """Go on with a pickle, in the same group."""
        self.scaler = pickle.loads(pickle.dumps(self.scaler))
        self.join()

    def join(self):
        """Join the group again."""
        self.scaler.set_group(self.group)

    def construct(self):
        """Construct a scaler over the group."""
        Trainer(self.group, self.library, 0, **self._settings)


def agreeing(group, library: str):
    """Return a call of a GroupAgreement."""
    policy = gradscale.DynamicScale()
    agree, state = agreement(group, policy), policy.init(loss(library))
    return lambda: agree(gradscale.unscale(gradients(library), state)[1], state)


def held(name: str, odd: object, others: object) -> tuple[str, ...]:
    """Return what every rank is told of what the odd rank holds, and the others."""
    return f"{name}: ", f"{odd} on rank {{odd_rank}}", f"{others} on rank {{another}}"


def calls(odd: str) -> tuple[str, ...]:
    """Return what is said of a call that meets a step."""
    return held("the call itself", odd, "unscale_() or step()")


def said_of(told: Sequence[str], odd_rank: int, group) -> list[str]:
    """Return what the ranks of a group are told of their odd one."""
    rank, size = rank_and_size(group)
    return [*(text.format(odd_rank=odd_rank, another=int(odd_rank == 0)) for text in told), f"rank {rank} of {size}"]


STEPS = "steps made in the iterations before"
REORDERED = (
    *held("optimizer", 1, 0),
    "(numbered in the order in which the scaler has met them, so some rank has them in another order)",
)
# The odd rank gets its own error, at once.
REFUSED = ("rank {odd_rank} cannot unscale its gradients",)
# It waits for no answer before it loads.
UNREAD = (*REORDERED, "optimizer")
ELSEWHERE = ("agreement without a scaler", "step of another scaler")
ROUND, LONGER = 0.1, 0.1 * (1 + 2**-40)  # one float32, and two float64
DIFFERENCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "swapped steps": ("scale, odd: step B, step A, even: step B, update", REORDERED),
    "swapped unscaling": (
        "scale, odd: unscale_ B, unscale_ A, even: unscale_ B, odd: step B, step A, even: step B, update",
        REORDERED,
    ),
    "one more": ("odd: step C, even: step A", held("optimizer", 2, 0)),
    "step left out": ("unscale_ A, even: step A, update", held(STEPS, 2, 3)),
    "step of another scaler": ("odd: step_other", ("scaler of the group: ", "numbered in the order of their constr")),
    "unread": (f"odd: unscale_ B, even: {ITERATION.replace(', ', ', even: ')}", UNREAD),
    "step declined": (
        "odd: decline A, even: step A, update",
        (*held(STEPS, 2, 3), "or its optimizer alone has refused one"),
    ),
    "diagnosis alone": ("odd: gather A", calls("diagnose(gather=True)")),
    "diagnosis of another": ("odd: gather B, even: gather A", REORDERED),
    "agreement without a scaler": ("odd: agree", calls("a GroupAgreement")),
    "step refused": ("odd: break_ A, step A", REFUSED),
    "another scale": ("step A, update, even: reload, odd: reload scale 32768.0", held("scale", 32768.0, 65536.0)),
    "another tracker": ("step A, update, even: reload, odd: reload _growth_tracker 5", held("growth_tracker", 5, 2)),
    "another policy": ("odd: set_growth_interval 7", ("settings: ", "growth_interval=7", "growth_interval=2000")),
    "update left out": ("step A, even: update, scale, step B", held("iteration", 2, 3)),
    # Of gradscale's own scaler alone: torch's replacement has no such number in its state.
    "resumed while a step is under way": ("even: save, step A, odd: save, load", held(STEPS, 3, 2)),
    "resumed after a refusal": ("odd: decline A, even: step A, update, reload", held(STEPS, 2, 3)),
    # Of gradscale's own scaler alone: torch's replacement finds the group of a norm in the parameters.
    "norm of group": ("odd: clip A 2.0 group, even: clip A 1.0 group, step A", held("max_norm", 2.0, 1.0)),
    "norm in its last digit": (
        f"odd: clip A {LONGER} rank, even: clip A {ROUND} rank, step A",
        held("max_norm", LONGER, ROUND),
    ),
    # Which its optimizer would average in its step.
    "norm of other gradients": (
        "odd: fill 131072.0, even: fill 65536.0, clip A 1.0 rank, step A",
        ("norm of the gradients: ", *held("", 3.46, 1.73)[1:], "average them"),
    ),
    "norm left out": ("even: clip A 1.0 rank, step A", held("max_norm", None, 1.0)),
    "norm over the group alone": (
        "odd: clip A 1.0 group, even: clip A 1.0 rank, step A",
        calls("unscale_(max_norm=), for the norm over the group"),
    ),
    "norm of what is refused": ("odd: break_ A, clip A 1.0 group, step A", REFUSED),
}
"""What differs in the second iteration of two optimizers, and what the ranks are told."""


def differ(group, odd_rank: int, what: str, keys: int | None, library: str):
    """Do something differently on one rank; each is told of it by a ScaleDesyncError that names it, and can go on.

    It goes on from a checkpoint, of which there may be the first ``keys`` alone: torch's have five.
    """
    program, told = DIFFERENCES[what]
    player = Player(group, library, odd_rank)
    # Made on every rank, as scalers over a group are to be.
    vars(player).update(step_other=Trainer(group, library).iterate, agree=agreeing(group, library.split()[0]))
    player.run(ITERATION)
    saved = player.scaler.state_dict()
    player.run("scale")
    is_odd, train = player.is_odd, lambda: player.run(program, ITERATION)
    if is_odd and told is REFUSED:
        raised((gradscale.InvalidTypeError, gradscale.InvalidValueError), train)
    elif is_odd and told is UNREAD:
        player.run(program)
    else:
        error = raised(gradscale.ScaleDesyncError, train, *said_of(told, odd_rank, group))
        if not is_odd or what not in ELSEWHERE:
            # And again, until there is another state; a copy may be made.
            for call in (player.scaler.update, lambda: player.scaler.update(8.0)):
                assert str(raised(gradscale.ScaleDesyncError, call)) == str(error)
            assert len(player.scaler.diagnose(player.optimizers[0]).entries) == 1
            pickle.dumps(player.scaler)
    # A checkpoint on every rank mends it, whatever each has counted since, with an optimizer that is new.
    player.scaler.load_state_dict(dict([*saved.items()][:keys]))
    # Now a load leaves the optimizers their numbers; of torch's keys none is the iteration's.
    again = "odd: reload" if library == "numpy" else "get_scale"
    player.run("renew c, scale, step B, step A, step C, update", again, "scale, step A, step C, step B, update", again)


# Legal programs.


def legal(group, odd_rank: int, library: str):
    """Do what ranks may do differently, and much that they must do alike."""
    player, other = Player(group, library, odd_rank), Player(group, library)
    # Of a diagnosis that is not gathered nobody is asked, and nothing is sent.
    player.run(ITERATION, "odd: diagnose B, odd: copy", UNSCALED)
    # Only the order of starts matters.
    player.run("scale, unscale_ A, unscale_ B, odd: step B, step A, even: step B, update")
    player.run("odd: reload, gather B" if library == "numpy" else "gather B")
    # One that was never met, and is gone after its iteration.
    player.run("scale, step A, step C, step B, update, renew c, scale, step C, step A, update")
    other.run("scale, step A, update")
    player.run(ITERATION)
    other.run("scale, step A, update")
    saved = player.scaler.state_dict()
    assert (float(saved["scale"]), int(saved["_growth_tracker"])) == (65536.0, 6)


def resumed(group, odd_rank: int, library: str):
    """Load one checkpoint on every rank, though the odd rank has scaled before, and then scale on one rank alone."""
    player = Player(group, library, odd_rank, init_scale=65536.0)
    scaler, (first, *_) = player.scaler, player.optimizers
    saved = gradscale.GradScaler(init_scale=1024.0, growth_interval=2).state_dict() | {"_growth_tracker": 1}
    player.saved = saved, [0, 0, 0]
    # Nobody has scaled since.
    player.run("load, fill 0.0, step A, update")
    assert (player.steps, scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (1, 1024.0, 1)
    player.fill(1.0)
    for call in (scaler.unscale_, scaler.step):
        raised(gradscale.CallOrderError, lambda call=call: call(first), "never been called on any rank since a")
    # As in a pipeline, of which one stage has a loss.
    player.run("load, odd: scale, fill 1024.0, step A, update", ITERATION)
    assert (player.steps, scaler.get_scale()) == (3, 2048.0)
    # A loss that nobody uses. Then all are in the middle of an iteration, and have stepped other optimizers.
    player.run("odd: scale, load", ITERATION, "scale, step A, odd: step B, even: unscale_ B, load")
    player.run("scale, step B, step A, update")
    return scaler.state_dict()


def pipelined(group, odd_rank: int, library: str):
    """Scale on the odd rank alone, which has no gradients of the first optimizer, at first and after a load.

    Nor do the others have losses that a rule for spikes could judge.
    """
    rank, size = rank_and_size(group)
    player = Player(group, library, odd_rank, init_scale=8.0, skip=gradscale.SkipSpikes(of="loss", above=9.0))
    scaler, (first, second, _) = player.scaler, player.optimizers
    for reason in ("stepped", "overflow", "spike", "stepped"):
        overflows = reason == "overflow" and rank == (odd_rank + 1) % size
        player.fill(float("inf") if overflows else scaler.get_scale())
        if player.is_odd:
            scaler.scale(loss(library.split()[0], 50.0 if reason == "spike" else 1.0))
            player.give(first, None)
        player.run("step A, step B, update")
        assert [scaler.last_step(one).reason for one in (first, second)] == [reason] * 2
        player.run("reload")
    # A NaN does not hide that nobody has scaled, though a loop that has scaled before may multiply by itself.
    other = Trainer(group, library, 1, init_scale=8.0)
    other.scaler.load_state_dict(scaler.state_dict())
    other.fill(float("nan") if player.is_odd else 1.0)
    raised(gradscale.CallOrderError, lambda: other.scaler.step(other.optimizers[0]), "never been called on any rank")
    return scaler.get_scale(), scaler.counts()


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
    player = Player(fresh(group), library, odd_rank)
    player.run("scale, step A, step B, step C, odd: update 4.0, even: update 8.0, scale")
    # Nobody tells a rank that has ended what it waits for.
    with mock.patch.object(agreements, "_PATIENCE", 1.0):
        told = held("scale", 4.0, 8.0) if program in ANSWERED else ("what this rank holds is call=",)
        train = lambda: player.run(PROGRAMS[program] if player.is_odd else "step A, step B, step C")  # noqa: E731
        raised(gradscale.ScaleDesyncError, train, *said_of(told, odd_rank, group))


ANSWERED = {
    "step": "step A, step B",
    "one more": "unscale_ A, unscale_ B, step A, step B",
    "two more": "unscale_ A, unscale_ B, unscale_ C, step A",
    "another first": "unscale_ A, unscale_ B, step B",
}
"""What one rank calls, while the others step all optimizers, and meets what the others tell when it has read theirs."""
PROGRAMS = ANSWERED | {"norm": "unscale_ A, clip B 1.0 group", "diagnosis": "unscale_ A, gather B"}
"""And what it calls so that it waits for another answer first."""
