"""Random diagnoses, held to a plain model of what a report says: alone, or on every rank of a group.

A life of an optimizer of any kind with gradients, weights and a state of any values, of which reports tell at each
stage of some iterations. All ranks draw the same calls, and each its own arrays.
"""

import collections
import dataclasses
import importlib
import json
import math
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from axes import require
from libraries import REALS, Library, made
from optimizers import Grouped, Parameter, Tree, Weight
from scenarios import OF_A_SCALE, rank_and_size

import gradscale
from gradscale import DynamicScale, OverflowReport, ParameterReport, StaticScale
from gradscale.core import tree
from gradscale.core.summaries import Summary

# With the smallest scale that each allows; None if nothing is ever scaled.
POLICIES = [
    (DynamicScale(init_scale=1024.0), 0.0),
    (DynamicScale(init_scale=4.0, growth_interval=1), 0.0),
    (DynamicScale(init_scale=64.0, min_scale=32.0), 32.0),
    (DynamicScale(init_scale=2.0), 0.0),
    (DynamicScale(init_scale=0.5), 0.0),
    (StaticScale(8.0), 0.0),
    (StaticScale(1.0), None),
]
BAD = (math.inf, -math.inf, math.nan)
PLAIN = (1.0, -2.0, 0.25, 3.0, -0.0)
SHAPES = ((), (2, 0), (1,), (3,), (2, 3), (4, 1, 5), (100,))


# States as optax and others keep them.
Moments = collections.namedtuple("Moments", "count mu")

# Containers of a list of arrays, and the expressions that reach one; the last are not for gradients.
CONTAINERS = [
    (list, "[{}]"),
    (lambda leaves: {f"w{k}": leaf for k, leaf in enumerate(leaves)}, "['w{}']"),
    (lambda leaves: {"a": (tuple(leaves),), "b": {}}, "['a'][0][{}]"),
    (lambda leaves: [Moments([], {"w": leaves})], "[0].mu['w'][{}]"),
    (lambda leaves: leaves[0], ""),
    (iter, "[{}]"),
]
Part = collections.namedtuple("Part", "entries broken scale iteration is_scaled lost minimum")


def numpy_dtype(name: str):
    """Return NumPy's dtype of a name."""
    return np.dtype(name if hasattr(np, name) else getattr(require("ml_dtypes"), name))


def finfo(dtype):
    """Return what NumPy or ml_dtypes knows of a real type."""
    return (np if hasattr(np, dtype.name) else require("ml_dtypes")).finfo(dtype)


def summary_of(x) -> Summary:
    """Return what a NumPy array holds."""
    kind = np.zeros((), x.dtype).real.dtype
    tiny = float(finfo(kind).smallest_normal)
    with np.errstate(invalid="ignore"):
        parts = np.abs([np.asarray(part, np.float64) for part in ((x.real, x.imag) if x.dtype.kind == "c" else (x,))])
    nan, inf = np.isnan(parts).any(0), np.isinf(parts).any(0)
    small = ((parts > 0) & (parts < tiny)).any(0) & ~nan & ~inf
    largest = float(parts[np.isfinite(parts)].max(initial=0.0))
    return Summary(x.size, *(int(flags.sum()) for flags in (inf & ~nan, nan, (parts == 0).all(0), small)), largest)


def row(name: str, x, index: int, divisor: float = 1.0, shape: tuple[int, ...] | None = None, **fields):
    """Return what is to be said of a NumPy array; None is a gradient that is missing."""
    if x is None:
        return ParameterReport(name, index=index, missing=True)
    held = summary_of(x)
    largest = min(held.largest / divisor, sys.float_info.max) if held.largest or held.inf + held.nan < x.size else None
    counted = held._asdict() | {"largest": largest, "dtype": x.dtype.name, "shape": x.shape if shape is None else shape}
    return ParameterReport(name, index=index, **counted, **fields)


def badness(one: ParameterReport):
    """Weights are before state, inf and NaN before all that is finite, then what underflows, then the largest."""
    subnormal = -one.subnormals / one.size if one.size else 0.0
    is_state = one.kind == "state"
    return is_state, -one.inf - one.nan, one.missing, subnormal, -(one.largest or 0.0), one.index, one.rank


def joined(parts, limit: int = sys.maxsize) -> tuple[OverflowReport, list[str]]:
    """Return the report of all ranks, of each of which so many entries are listed, and what its explanation says."""
    told = sorted(parts.items())
    first = max([part for _, part in told if part.entries] or [told[0][1]], key=lambda part: part.iteration)
    kept: list[ParameterReport] = []
    left = collections.Counter()
    for rank, part in told:
        for rows in (part.entries, part.broken or ()):
            worst = sorted((dataclasses.replace(one, rank=rank) for one in rows), key=badness)
            kept += worst[:limit]
            left.update((one.kind == "gradient", is_bad(one)) for one in worst[limit:])
    kept.sort(key=badness)
    entries = tuple(one for one in kept if one.kind == "gradient")
    is_searched = any(part.broken is not None for part in parts.values())
    broken = tuple(one for one in kept if one.kind != "gradient") if is_searched else None
    lost = [part.lost for part in parts.values() if part.lost is not None]
    total = sum(lost) if lost else None
    is_scaled = any(part.is_scaled for part in parts.values())
    cause, words = cause_of(entries, first, total, broken, is_scaled=is_scaled)
    told_of = entries, first.scale, first.iteration, cause, ""
    return OverflowReport(*told_of, left[True, True], left[True, False], total, broken, left[False, True]), words


def is_bad(one: ParameterReport) -> bool:
    """Tell whether an array holds inf or NaN."""
    return one.inf + one.nan > 0


def cause_of(entries, part: Part, lost: int | None, broken, *, is_scaled: bool) -> tuple[str, list[str]]:
    """Return what is to blame, and what the explanation says of it."""
    is_plain = part.minimum is None
    if broken:
        kind = broken[0].kind
        ranks = sorted({"/".join(map(str, one.rank)) for one in broken if one.kind == kind})
        where = f"on rank {', '.join(ranks[:8])}{' and others' if ranks[8:] else ''}, " if ranks != [""] else ""
        words = [f"{where}the most in {broken[0].place!r}", *["a lower scale will not help"] * (not is_plain)]
        return ("weights" if kind == "weight" else "optimizer state"), words
    if lost:
        return "model", ["The loss is" if is_plain else "The unscaled loss is not finite, whatever the scale"]
    if all(one.missing for one in entries):
        return "no gradients", ["None of the parameters has a gradient"]
    worst = entries[0]
    if is_bad(worst):
        where = (worst.name or "The gradient") + (f" on rank {'/'.join(map(str, worst.rank))}" if worst.rank else "")
        if is_plain:
            values = " and ".join(["inf"] * (worst.inf > 0) + ["NaN"] * (worst.nan > 0))
            searched = ["the weights and the state that were searched are finite"] * (broken is not None)
            return "model", [f"{where} holds {values}", *searched]
        at = f"{where} overflows at scale {part.scale:g}"
        if part.scale <= 1.0:
            return "model", [f"{at}, which amplifies nothing"]
        if part.scale <= part.minimum:
            return "model", [f"{where} overflows at the policy's minimum, {part.scale:g}"]
        return "scale", [at + ("" if lost is None else ", and the unscaled loss is finite")]
    size, zeros, small = (sum(getattr(one, name) for one in entries) for name in ("size", "zeros", "subnormals"))
    # A tenth of what is not zero, or 99 % zeros.
    is_small = small > 0 and 10 * small >= size - zeros
    if not is_small and not (size and 100 * zeros >= 99 * size):
        return "none", ["All gradients are finite."]
    raised = "raise the scale" if is_scaled or not is_small else "once they are unscaled: keep float32 gradients"
    shares = f"{100 * zeros / size:.3g} % of all values are zero and {100 * small / size:.3g} % subnormal"
    return "underflow", [shares, "use a GradScaler" if is_plain else raised]


def check(results, ranks: Sequence[tuple[int, ...]] = ((),), listed: int = 4096):
    """Assert of what ranks have told, by their ranks in each group, that each report is the model's."""
    for looks in zip(*results, strict=True):
        parts = {rank: part for rank, (_, _, part) in zip(ranks, looks, strict=True)}
        is_gathered = "gathered" in looks[0][0] and ranks != ((),)
        of_all = joined(parts, max(8, listed // len(ranks))) if is_gathered else None
        for rank, (story, report, part) in zip(ranks, looks, strict=True):
            expected, words = of_all or joined({(): part})
            assert dataclasses.replace(report, explanation="") == expected, (report, expected, rank, story)
            assert [word for word in words if word not in report.explanation] == [], (report, rank, story)
            # What scales nothing does not speak of a scale.
            assert part.minimum is not None or not OF_A_SCALE.search(str(report)), (report, rank, story)
            json.dumps(report.to_dict(), allow_nan=False)


def into(arrays: Library, x):
    """Return a NumPy array in a library, every bit of it: some conversions of theirs take subnormals for 0."""
    if not arrays.name.startswith("torch"):
        return arrays.xp.asarray(x.copy())
    import torch

    if x.dtype.name == "bfloat16":
        return torch.tensor(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def back(arrays: Library, x):
    """Return the values of a library's array in NumPy, every bit of them."""
    if isinstance(x, np.ndarray | np.generic) or arrays.name.startswith("jax"):
        return np.array(x)
    if not arrays.name.startswith("torch"):
        return arrays.to_numpy(x)
    x = x.detach().resolve_neg()
    is_half = x.dtype == arrays.xp.bfloat16
    return x.view(arrays.xp.int16).numpy().view(numpy_dtype("bfloat16")) if is_half else x.numpy()


def draw(chance: random.Random, kind: str, shape: tuple[int, ...], is_bad: bool = False):
    """Return an array of NumPy: of plain, tiny and huge values, or of any bits, inf and NaN among them if it is bad."""
    dtype = numpy_dtype(kind)
    part = np.zeros((), dtype).real.dtype
    info = finfo(part)
    size = math.prod(shape) * (dtype.itemsize // part.itemsize)
    tiny, normal = float(info.smallest_subnormal), float(info.smallest_normal)
    usual = (PLAIN, PLAIN, (0.0,), (0.0, tiny), (3.0 * tiny, 1.0), (*PLAIN, -float(info.max), -normal, tiny))
    values = chance.choices(chance.choice(usual), k=size)
    if size >= 100:
        zeros, small = chance.choice([(99, 0), (98, 0), (0, 10), (0, 9), (90, 1), (80, 1)])
        values[:100] = [0.0] * zeros + [tiny] * small + [1.0] * (100 - zeros - small)
    x = np.array(values, np.float64).astype(part)
    if is_bad and chance.random() < 0.3:
        x = np.frombuffer(chance.randbytes(x.nbytes), part).copy()
    for position in chance.sample(range(size), min(size, chance.randint(1, 3))) if is_bad else ():
        x[position] = chance.choice(BAD)
    return x.view(dtype).reshape(shape)


def diagnosed(group, seed: int, library: Library | str, many: int = 1, place: tuple[int, int] | None = None):
    """Live, alone or on one rank of a group; what was told at each look, where, and the part that this rank has in it.

    All ranks make the same calls, and hold as many times the drawn arrays as ``many`` says. ``place`` is rank and size.
    """
    library = made(library) if isinstance(library, str) else library
    place = place or ((0, 1) if group is None else rank_and_size(group))
    return _Life(group, seed, library, many, *place).live()


class _Life:
    def __init__(self, group, seed: int, arrays: Library, many: int, rank: int, size: int):
        self.group, self.arrays, self.many, self.seed = group, arrays, many, seed
        self.rank, self.size = rank, size
        # What all ranks draw alike, and what this one draws.
        self.common, self.own = random.Random(f"{seed}"), random.Random(f"{seed} {self.rank}")
        policy, self.minimum = self.common.choice(POLICIES)
        self.watches, self.is_idle = self.common.random() < 0.5, self.common.random() < 0.1
        self.is_enabled = group is not None or self.common.random() < 0.9
        self.kind = self.common.choice(["tree", "groups", "held"] if arrays.writes else ["tree", "groups"])
        options: dict[str, Any] = {"policy": policy, "diagnose": "on_overflow" if self.watches else None}
        options |= {"enabled": self.is_enabled} if group is None else {"group": group, "timeout": 60.0}
        home, device = gradscale, ()
        if self.kind == "held" and arrays.name == "torch":
            home, device = importlib.import_module("gradscale_torch"), ("cpu",)
            options["allow_fp16_grads"] = True
        elif arrays.name == "numpy" and group is not None:
            options["backend"] = "numpy"
        self.scaler = (home.GradScaler if group is None else home.ShardedGradScaler)(*device, **options)
        self.minimum = self.minimum if self.is_enabled else None
        self.is_fused = self.is_scaled = False
        # Whether each rank searches weights that are broken.
        self.is_broken = seed % 5 == 0
        self.told: list[tuple[str, OverflowReport, Part]] = []
        self.number, self.streak, self.last = 1, 0, None
        self.make_optimizer()

    def make_optimizer(self):
        kinds = [*self.arrays.reals, *([] if self.arrays.is_slow else ["complex64", "complex128"])]
        count = self.own.choice([1, 1, 2, 4, *[0] * (self.rank > 0 and self.arrays.name == "numpy")])
        is_torchs = self.kind == "held" and self.arrays.name == "torch"
        if is_torchs:
            name = self.common.choice(["SGD", "SGD-fused", "Adam", "AdamW-fused", "Adagrad"])
            self.is_fused = name.endswith("fused")
            kinds = ["float32"] if self.is_fused else ["float16", "bfloat16", "float32", "float64"]
        self.specs = [(self.own.choice(kinds), self.own.choice(SHAPES)) for _ in range(count)] * self.many
        self.parameters: Sequence[Any] = ()
        if self.kind == "tree":
            self.make, path = self.own.choice(CONTAINERS[:4])
            self.optimizer, self.located = Tree(), [path.format(k) for k in range(len(self.specs))]
            return
        self.located = [f"layer.{k}" for k in range(len(self.specs))]
        if is_torchs:
            from small_torch import optimizer_of, torch

            self.parameters = [torch.nn.Parameter(into(self.arrays, draw(self.own, *spec))) for spec in self.specs]
            options = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}}.get(name, {})
            self.optimizer = optimizer_of(name, zip(self.located, self.parameters, strict=True), lr=0.125, **options)
            return
        is_held, cut = self.kind == "held", self.own.randrange(len(self.specs) + 1)
        self.parameters = [draw(self.own, *spec).view(Weight) if is_held else Parameter() for spec in self.specs]
        self.optimizer = Grouped()
        self.optimizer.param_groups = [{"params": self.parameters[:cut]}, {"params": self.parameters[cut:]}]
        # Only the second group has names.
        self.located[:cut] = [f"param_groups[0]['params'][{k}]" for k in range(cut)]
        # Names of other parameters are not theirs.
        self.optimizer.param_groups[1]["param_names"] = [*self.located[cut:], *["more"] * (not is_held)]
        if not is_held:
            self.located[cut:] = [f"param_groups[1]['params'][{k}]" for k in range(len(self.specs) - cut)]
            return
        slots = [{"m": x, "step": np.int32(0), "L": [None, x.copy()]} for x in map(np.array, self.parameters)]
        self.optimizer.state = dict(zip(self.parameters, slots, strict=True))
        self.optimizer.state |= {"all": draw(self.own, "float32", (3,)), object(): [np.float32(1.0)]}

    def array(self, *spec):
        """Return an array of the library, perhaps not in the order of its memory."""
        x = draw(self.own, *spec)
        if self.arrays.writes and x.ndim == 2 and self.own.random() < 0.5:
            return into(self.arrays, np.ascontiguousarray(x.T)).T
        return into(self.arrays, x)

    def leaves(self):
        return tree.flatten(self.optimizer.grads)[0] if self.kind == "tree" else [one.grad for one in self.parameters]

    def held(self):
        """Return the identity and the bits of each gradient."""
        return [(id(x), back(self.arrays, x).tobytes() if is_floating(x) else x) for x in self.leaves()]

    def give(self, is_bad: bool):
        """Give the optimizer gradients, of which the first one of rank 0 is always there."""
        count = len(self.specs) // self.many
        worst = self.own.choice(range(count)) if is_bad and count else -1
        found = [self.array(*spec, k % count == worst) for k, spec in enumerate(self.specs)]
        first = not self.is_idle and (self.rank == 0 or self.arrays.name != "numpy")
        found = [x if (first and k == 0) or self.own.random() > 0.15 else None for k, x in enumerate(found)]
        if self.is_idle and self.kind != "held":
            others = [None, None, 4, self.arrays.asarray([3], "int32")]
            found = [self.own.choice([*others, x]) for x in found]
        if self.kind == "tree":
            self.optimizer.grads = self.make(found)
        for parameter, gradient in zip(self.parameters, found, strict=True) if self.parameters else ():
            parameter.grad = gradient

    def draw_names(self):
        """Return names to be given, and those that the report has then."""
        if self.own.random() < 0.4:
            return None, self.located
        names = [f"weight.{k}" for k in range(len(self.specs))]
        pairs = [("frozen", Parameter()), *zip(names, self.parameters, strict=False)]
        self.own.shuffle(pairs)
        given = [names, *([pairs, iter(pairs), dict(pairs)] if self.parameters else [])]
        return self.own.choice(given), names

    def draw_loss(self):
        """Return a loss to be given, and how many of its arrays and numbers are not finite; None for no loss."""
        bad = self.own.choice(BAD)
        numbers = self.arrays.asarray([1.0, bad], "float64")
        nested = {"a": [bad, 3, np.float64(bad)], "b": (None, numbers, self.arrays.asarray(3, "int32"))}
        losses = [(bad, 1), (complex(0.0, bad), 1), (1 + 2j, 0), (10**400, 0), (numbers, 1), (nested, 3)]
        if self.kind == "held" and self.arrays.name == "torch":
            losses += [([numbers, self.arrays.xp.empty(1, device="meta")], 1)]
        return self.own.choice([*losses, *[(None, None)] * 12])

    def draw_held(self, containers):
        """Return a container of arrays and other things, and the arrays with the expressions that reach them."""
        make, path = self.own.choice(containers)
        things = [None, 3, math.nan, "inf", object(), Moments, np.array(["inf"]), np.zeros(0), np.int32(3)]
        leaves: list[Any] = []
        for _ in range(self.own.randint(1, 4)):
            spec = self.own.choice(REALS), self.own.choice(SHAPES), self.own.random() < 0.25
            leaves.append(self.own.choice([self.array(*spec), draw(self.own, *spec), self.own.choice(things)]))
        leaves[0] = self.array("float32", (3,), self.own.random() < 0.25 or self.is_broken)
        if self.arrays.name == "torch":
            # Lazily negated.
            leaves[0] = self.arrays.xp.complex(leaves[0], -leaves[0]).conj().imag
        leaves = leaves * self.many if path else leaves[:1]
        return make(leaves), [(path.format(k), leaf) for k, leaf in enumerate(leaves) if is_floating(leaf)]

    def damage(self):
        """Break a weight, or an array of the optimizer's state, as one bad step may."""
        held = [*self.parameters, *(x for *_, x in self.rows_of_state(self.located) if x.shape)]
        if held := [x for x in held if math.prod(x.shape)]:
            x = self.own.choice(held)
            (x if isinstance(x, np.ndarray) else x.detach()).reshape(-1)[-1] = self.own.choice(BAD)

    def rows_of_state(self, names: Sequence[str]):
        """Return the arrays in the optimizer's mapping with their names and keys."""
        called = {id(parameter): name for parameter, name in zip(self.parameters, names, strict=True)}
        for owner, held in self.optimizer.state.items():
            name = called.get(id(owner), owner if isinstance(owner, str) else type(owner).__name__)
            for key, value in held.items() if isinstance(held, dict) else [("", held)]:
                parts = {key: value} if not isinstance(value, list) else {f"{key}[{k}]": x for k, x in enumerate(value)}
                yield from ((name, path, one) for path, one in parts.items() if is_floating(one))

    def draw_search(self, names: Sequence[str]):
        """Return what is to be searched, and the reports of what is broken; None if nothing is."""
        given: dict[str, Any] = {}
        weights = list(zip(names, self.parameters, strict=True)) if self.kind == "held" else []
        state: list[tuple[str, str, Any]] = []
        if self.own.random() < 0.4 or self.is_broken:
            given["params"], found = self.draw_held(CONTAINERS)
            renamed = dict(zip(self.located, names, strict=True))
            weights = [(renamed.get(path, path) or "params", leaf) for path, leaf in found]
        if self.own.random() < 0.4:
            given["state"], found = self.draw_held(CONTAINERS[:-1])
            state = [("state", path, leaf) for path, leaf in found]
        elif self.kind == "held" and self.own.random() < 0.6:
            given["state"] = self.own.choice([True, self.optimizer.state])
            state = list(self.rows_of_state(names))
        elif self.own.random() < 0.5:
            given["state"] = self.own.choice([None, False])
        is_searched = given.get("params") is not None or not any(given.get("state") is no for no in (None, False))
        return given, self.broken(weights, state) if is_searched else None

    def broken(self, weights, state):
        """Return the reports of those arrays that are broken."""
        found = [(name, one, {"kind": "weight"}) for name, one in weights]
        found += [(name, one, {"kind": "state", "key": key}) for name, key, one in state]
        rows = [row(name, back(self.arrays, x), k, **kind) for k, (name, x, kind) in enumerate(found)]
        return [one for one in rows if one.inf + one.nan]

    def part(self, names: Sequence[str], lost: int | None, broken) -> Part:
        # Before anything is scaled or judged the gradients are those of the last step.
        scale, number = (self.scale, self.number) if self.is_begun or self.last is None else self.last
        entries = [
            row(name, None if x is None else back(self.arrays, x), k, scale if self.is_scaled else 1.0)
            for k, (name, x) in enumerate(zip(names, self.leaves(), strict=True))
            if x is None or is_floating(x)
        ]
        return Part(entries, broken, scale, number, self.is_scaled, lost, self.minimum)

    def look(self, stage: str):
        """Diagnose, perhaps, and assert that nothing has changed."""
        if self.common.random() < 0.4:
            return
        gather = self.common.random() < 0.6
        (given, names), (loss, lost) = self.draw_names(), self.draw_loss()
        search, broken = self.draw_search(names)
        lost = self.lost if loss is None and self.is_begun else lost
        state = self.common.random() < 0.3 and (self.scaler.state_dict(), self.scaler.history)
        before = self.held()
        if self.own.random() < 0.2:
            self.scaler.diagnose(Tree([self.arrays.asarray([1.0])]))
        report = self.scaler.diagnose(self.optimizer, given, loss=loss, gather=gather, **search)
        story = f"seed {self.seed}, {self.arrays.name}, {self.kind}, {stage} {self.number}, {'gathered' * gather}"
        assert self.held() == before, story
        assert not state or (self.scaler.state_dict(), self.scaler.history) == state, story
        self.told.append((story, report, self.part(names, lost, broken)))

    def live(self):
        """Make a few iterations."""
        for _ in range(1 if self.is_idle or not self.is_enabled else self.common.choice([1, 2, 5])):
            self.iterate(self.common.random() < 0.6)
        return self.told

    def iterate(self, is_bad: bool):
        bad_rank, scaling_rank = self.common.randrange(self.size), self.common.randrange(self.size)
        if self.kind == "held" and self.own.random() < 0.2:
            self.damage()
        self.scale = self.scaler.get_scale()
        self.is_begun = False
        self.lost: int | None = None
        # A rank may leave it to the others to scale, as a pipeline does.
        is_needed = self.rank == scaling_rank or self.arrays.name != "numpy"
        must = is_needed if self.group is not None else not self.is_idle
        for _ in range(self.own.randint(1, 2)) if must or self.own.random() < 0.7 else ():
            value = self.own.choice([1.0, 1.0, 1.0, math.nan, math.inf])
            outputs = self.arrays.asarray(value), self.arrays.asarray([2.0]), self.arrays.asarray(3, "int32")
            self.scaler.scale(self.own.choice([outputs, outputs[0]]))
            self.is_begun = self.is_scaled = self.is_enabled
            if self.watches and self.is_enabled:
                self.lost = (self.lost or 0) + (not math.isfinite(value))
        self.give(is_bad and self.rank == bad_rank)
        self.look("scaled")
        if self.is_idle:
            return
        if is_explicit := self.common.random() < 0.5:
            self.scaler.unscale_(self.optimizer)
            self.is_begun, self.is_scaled = self.is_enabled, False
            self.look("unscaled")
        self.scaler.step(self.optimizer)
        # Perhaps before anybody has read the verdict.
        unread = self.scaler.diagnose(self.optimizer) if self.common.random() < 0.3 else None
        report = self.scaler.last_step(self.optimizer)
        self.is_begun = self.is_enabled
        # An optimizer that unscales by itself does so where it steps.
        self.is_scaled = self.is_fused and not is_explicit and report.skipped and self.minimum is not None
        self.streak = self.streak + 1 if report.reason == "overflow" else 0
        assert (report.overflow is not None) == (self.watches and report.reason == "overflow")
        if report.overflow is not None:
            weights, state = zip(self.located, self.parameters, strict=False), []
            if is_searched := self.streak >= 3 and self.kind == "held":
                state = self.rows_of_state(self.located)
            broken = self.broken(weights, state) if is_searched else None
            part = self.part(self.located, self.lost, broken)
            self.told.append((f"seed {self.seed}, automatic, gathered", report.overflow, part))
        if unread is not None:
            self.told.append((f"seed {self.seed}, unread", unread, self.part(self.located, self.lost, None)))
        self.look("stepped")
        self.scaler.update()
        if self.is_enabled:
            self.last, self.is_begun = (self.scale, self.number), False
            self.number += 1
        self.look("updated")


def is_floating(x) -> bool:
    """Tell whether a thing is an array of real or complex numbers."""
    return hasattr(x, "dtype") and any(kind in str(x.dtype) for kind in ("float", "complex"))
