"""Views: random rules on random trees against the same done with NumPy on whole arrays. What is read is sharded on both sides, by any
mesh and by random boxes; rules that can be reversed give the original bits again.

`RESHARD_CAMPAIGN=1` makes it thousands of cases, `RESHARD_SEED` begins elsewhere.
"""

import os
import random
import shutil

import numpy as np
import pytest
import torch

import reshard
import reshard.torch as rt

CASES = 4000 if os.environ.get("RESHARD_CAMPAIGN") else 40
SEED = int(os.environ.get("RESHARD_SEED", "1"))
#: Element types, and wider ones that hold their values.
WIDER = {"float16": "float32", "float32": "float64", "uint8": "int32", "int16": "int64"}


class Plan:
    """Random steps: as they are written, and as functions of the arrays of one layer, by part, expert and new index."""

    def __init__(self, rng, reversible):
        self.rng = rng
        #: Whether all steps are to be such as can be undone.
        self.only_reversible = reversible
        self.dtype = rng.choice([*WIDER])
        self.parts = rng.choice([1, 1, 2, 3])
        self.experts = rng.choice([0, 0, 1, 2, 3])
        ndim = rng.randint(1, 3)
        # Parameters of one element, too: their shapes do not tell moments from counters.
        single = rng.random() < 0.25
        shape = tuple(1 if single else rng.choice([1, 2, 3, 4, 6, 8]) for _ in range(ndim))
        self.shapes = dict.fromkeys(range(self.parts), shape)
        if self.parts > 1 and rng.random() < 0.7:
            dim = rng.randrange(ndim)
            for part in range(self.parts):
                self.shapes[part] = (*shape[:dim], shape[dim] * rng.randint(1, 3), *shape[dim + 1 :])
        self.first_shapes = dict(self.shapes)
        self.has_expert, self.has_unstacked, self.was_split = self.experts > 0, False, False
        self.reversible = True
        self.now = self.dtype
        self.steps, self.functions = [], []
        for _ in range(rng.randint(0, 6)):
            self.add()
        self.now_parts = len(self.shapes)

    def add(self):
        kinds = [
            "transpose",
            "permute",
            "unflatten",
            "flatten",
            "reshape",
            "slice",
            "pad",
            "truncate",
            "cast",
            "unstack",
            "split",
        ]
        kinds += ["stack", "concat"] * 3
        kind = self.rng.choice(kinds)
        getattr(self, f"_{kind}")()

    def each(self, step, function, parts=None):
        """A step that changes tensors one by one, some of them or all."""
        chosen = list(self.shapes) if parts is None else parts
        if parts is not None:
            step["of"] = parts
        self.steps.append(step)
        self.functions.append(lambda arrays: {at: function(a) if at[0] in chosen else a for at, a in arrays.items()})
        for part in chosen:
            self.shapes[part] = function(np.zeros(self.shapes[part], self.now)).shape

    def chosen(self):
        """Some of the tensors that are alike, or all where all are; and their shape."""
        part = self.rng.choice(list(self.shapes))
        alike = [other for other, shape in self.shapes.items() if shape == self.shapes[part]]
        if len(alike) == len(self.shapes) and self.rng.random() < 0.6:
            return None, self.shapes[part]
        return self.rng.sample(alike, self.rng.randint(1, len(alike))), self.shapes[part]

    def dim(self, ndim):
        """A dimension as it is written, and from 0."""
        dim = self.rng.randrange(ndim)
        return (dim - ndim if self.rng.random() < 0.3 else dim), dim

    def _transpose(self):
        parts, shape = self.chosen()
        if not shape:
            return
        (a, i), (b, j) = self.dim(len(shape)), self.dim(len(shape))
        self.each({"transpose": [a, b]}, lambda array: np.swapaxes(array, i, j), parts)

    def _permute(self):
        parts, shape = self.chosen()
        order = self.rng.sample(range(len(shape)), len(shape))
        written = [dim - len(shape) if self.rng.random() < 0.2 else dim for dim in order]
        self.each({"permute": written}, lambda array: np.transpose(array, order), parts)

    def says(self):
        """Whether a step says how tensors were, so that it can be undone."""
        return self.only_reversible or self.rng.random() < 0.8

    def factors(self, size):
        """Sizes whose product this is."""
        first = self.rng.choice([n for n in range(1, size + 1) if size % n == 0] or [size])
        return [first, size // first if first else 0]

    def _unflatten(self):
        parts, shape = self.chosen()
        if not shape or len(shape) > 4:
            return
        written, dim = self.dim(len(shape))
        sizes = self.factors(shape[dim])
        if written < 0:
            if self.only_reversible:
                written = dim
            else:
                self.reversible = False
        shown = list(sizes)
        if self.rng.random() < 0.5:
            shown[self.rng.randrange(2)] = -1
        new = (*shape[:dim], *sizes, *shape[dim + 1 :])
        self.each({"unflatten": written, "sizes": shown}, lambda array: array.reshape(new), parts)

    def _flatten(self):
        parts, shape = self.chosen()
        if len(shape) < 2:
            return
        start = self.rng.randrange(len(shape) - 1)
        end = self.rng.randrange(start + 1, len(shape))
        joined = shape[start : end + 1]
        step = {"flatten": [start, end]}
        if self.says():
            step["sizes"] = list(joined)
        else:
            self.reversible = False
        new = (*shape[:start], int(np.prod(joined)), *shape[end + 1 :])
        self.each(step, lambda array: array.reshape(new), parts)

    def _reshape(self):
        parts, shape = self.chosen()
        elements = int(np.prod(shape))
        new = self.factors(elements)
        if self.rng.random() < 0.5:
            new = [*self.factors(new[0]), new[1]]
        step = {"reshape": [*new[:-1], -1] if self.rng.random() < 0.5 else new}
        if self.says():
            step["from"] = list(shape)
        else:
            self.reversible = False
        self.each(step, lambda array: array.reshape(new), parts)

    def _slice(self):
        parts, shape = self.chosen()
        if not shape or self.only_reversible or self.rng.random() < 0.6:
            return
        written, dim = self.dim(len(shape))
        start = self.rng.randrange(shape[dim])
        stop = self.rng.randint(start + 1, shape[dim])
        self.reversible = False
        index = (slice(None),) * dim + (slice(start, stop),)
        self.each({"slice": written, "start": start, "stop": stop}, lambda array: array[index], parts)

    def _truncate(self):
        parts, shape = self.chosen()
        if not shape or self.only_reversible or self.rng.random() < 0.6:
            return
        written, dim = self.dim(len(shape))
        size = self.rng.randint(1, shape[dim])
        self.reversible = False
        index = (slice(None),) * dim + (slice(0, size),)
        self.each({"truncate": written, "size": size}, lambda array: array[index], parts)

    def _pad(self):
        parts, shape = self.chosen()
        if not shape:
            return
        written, dim = self.dim(len(shape))
        size, value = shape[dim] + self.rng.randint(0, 3), self.rng.choice([0, 1, 7])
        step = {"pad": written, "size": size, "value": float(value)}
        if self.says():
            step["from"] = shape[dim]
        else:
            self.reversible = False
        widths = [(0, size - shape[dim] if d == dim else 0) for d in range(len(shape))]
        self.each(step, lambda array: np.pad(array, widths, constant_values=array.dtype.type(value)), parts)

    def _cast(self):
        # Of all, as what is joined has one type.
        if self.now not in WIDER:
            return
        old, new = self.now, WIDER[self.now]
        step = {"cast": new}
        if self.says():
            step["from"] = old
        else:
            self.reversible = False
        self.each(step, lambda array: array.astype(new))
        self.now = new

    def _stack(self):
        if not self.has_expert or len({len(shape) for shape in self.shapes.values()}) > 1:
            return
        ndim = len(self.shapes[0]) + 1
        written, dim = self.dim(ndim)
        self.steps.append({"stack": "e", "dim": written} if self.rng.random() < 0.8 or dim else {"stack": "e"})
        if "dim" not in self.steps[-1]:
            dim = 0

        def function(arrays):
            keys = sorted({(part, unstacked) for part, _, unstacked in arrays}, key=str)
            count = self.experts
            return {(p, None, u): np.stack([arrays[p, e, u] for e in range(count)], axis=dim) for p, u in keys}

        self.functions.append(function)
        self.shapes = {part: (*shape[:dim], self.experts, *shape[dim:]) for part, shape in self.shapes.items()}
        self.has_expert = False

    def _unstack(self):
        sizes = set(self.shapes.values())
        if self.has_unstacked or len({len(shape) for shape in sizes}) > 1 or not min(map(len, sizes)):
            return
        written, dim = self.dim(len(self.shapes[0]))
        if len({shape[dim] for shape in sizes}) > 1:
            return
        count = self.shapes[0][dim]
        self.steps.append({"unstack": "u", "dim": written})
        self.functions.append(
            lambda arrays: {(p, e, u): a.take(u, axis=dim) for (p, e, _), a in arrays.items() for u in range(count)}
        )
        self.shapes = {part: shape[:dim] + shape[dim + 1 :] for part, shape in self.shapes.items()}
        self.has_unstacked = True

    def _concat(self):
        if self.was_split or len(self.shapes) < 2:
            return
        shapes = list(self.shapes.values())
        if len({len(shape) for shape in shapes}) > 1 or not shapes[0]:
            return
        fits = [d for d in range(len(shapes[0])) if len({s[:d] + s[d + 1 :] for s in shapes}) == 1]
        if not fits:
            return
        dim = self.rng.choice(fits)
        sizes = [shape[dim] for shape in shapes]
        groups = self.rng.choice([n for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes)])
        step = {"concat": dim, **({"groups": groups} if groups > 1 else {})}
        match self.rng.randrange(4):
            case 0 if not self.only_reversible:
                self.reversible = False
            case 1:
                step["sizes"] = sizes
            case _:
                step["ratio"] = [size // int(np.gcd.reduce(sizes)) for size in sizes]
        self.steps.append(step)

        def function(arrays):
            made = {}
            for e, u in {(e, u): None for _, e, u in arrays}:
                own = [np.split(arrays[part, e, u], groups, axis=dim) for part in range(len(sizes))]
                made[0, e, u] = np.concatenate([part[group] for group in range(groups) for part in own], axis=dim)
            return made

        self.functions.append(function)
        self.shapes = {0: (*shapes[0][:dim], sum(sizes), *shapes[0][dim + 1 :])}

    def _split(self):
        if self.was_split or len(self.shapes) > 1 or not self.shapes[0]:
            return
        shape, count = self.shapes[0], self.rng.randint(2, 3)
        dim = self.rng.randrange(len(shape))
        groups = self.rng.choice([n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0])
        length = shape[dim] // groups
        if length < count:
            return
        cuts = sorted(self.rng.sample(range(1, length), count - 1))
        own = [b - a for a, b in zip([0, *cuts], [*cuts, length])]
        if length % count == 0 and self.rng.random() < 0.3:
            own = [length // count] * count
        sizes = [size * groups for size in own]
        step = {"split": dim, **({"groups": groups} if groups > 1 else {})}
        if len(set(own)) > 1 or self.rng.random() < 0.5:
            step |= {"sizes": sizes} if self.rng.random() < 0.5 else {"ratio": own}
        self.steps.append(step)
        starts = np.cumsum([0, *own])

        def function(arrays):
            made = {}
            for (_, e, u), array in arrays.items():
                pieces = np.split(array, groups, axis=dim)
                for part in range(count):
                    at = (slice(None),) * dim + (slice(starts[part], starts[part + 1]),)
                    made[part, e, u] = np.concatenate([piece[at] for piece in pieces], axis=dim)
            return made

        self.functions.append(function)
        self.shapes = {part: (*shape[:dim], size, *shape[dim + 1 :]) for part, size in enumerate(sizes)}
        self.was_split = True

    def rule(self, offset):
        expert = ".{e}" if self.experts else ""
        old = [f"l.{{i:int}}.p{part}{expert}" for part in self.first_shapes]
        new = (".{e}" if self.has_expert else "") + (".{u}" if self.has_unstacked else "")
        layer = f"{{i+{offset}}}" if offset else "{i}"
        to = [f"b.{layer}.q{part}{new}" for part in self.shapes]
        short = lambda names: names[0] if len(names) == 1 else names
        return {"name": "random", "from": short(old), "to": short(to), "steps": self.steps}

    def name(self, layer, part, expert, unstacked):
        return ".".join(str(word) for word in ("b", layer, f"q{part}", expert, unstacked) if word is not None)


def case(seed):
    """A tree, its rules, and what they make of it. Every second one can be reversed, the others cannot."""
    rng = random.Random(seed)
    plan = Plan(rng, reversible=seed % 2 == 0)
    numbers = np.random.default_rng(seed)
    offset = rng.choice([0, 0, 5])
    tree, expected = {}, {}
    slots = [("optim.state.", ".exp_avg", None), ("optim.state.", ".momentum_buffer", None), ("ema.", "", None)]
    # One number for each parameter, which is the same for all and stays what it is.
    slots += [("optim.state.", ".step", rng.choice([(), (1,)]))]
    families = rng.sample(slots, rng.randint(0, 4))
    # An optimizer's state may be in a checkpoint of its own.
    if rng.random() < 0.6 or not any(of is None for *_, of in families):
        families.insert(0, ("model.", "", None))
    layers = rng.randint(1, 2)
    for before, after, own in families:
        number = numbers.integers(0, 100, own).astype("float32") if own is not None else None
        for layer in range(layers):
            arrays = {}
            for part, shape in plan.first_shapes.items():
                for expert in range(plan.experts) if plan.experts else [None]:
                    array = numbers.integers(0, 100, shape).astype(plan.dtype)
                    arrays[part, expert, None] = array
                    word = "" if expert is None else f".{expert}"
                    tree[f"{before}l.{layer}.p{part}{word}{after}"] = array if number is None else number
            for function in plan.functions:
                arrays = function(arrays)
            for (part, expert, unstacked), array in arrays.items():
                made = array if number is None else number
                expected[f"{before}{plan.name(layer + offset, part, expert, unstacked)}{after}"] = made
    rules = [plan.rule(offset)]
    tree["model.same"] = expected["model.same"] = numbers.integers(0, 9, (3,)).astype(plan.dtype)
    if not plan.only_reversible and (plan.reversible or rng.random() < 0.3):
        tree["model.junk.a"] = np.ones(2, plan.dtype)
        rules.append({"drop": "junk.{x}"})
        plan.reversible = False
    if rng.random() < 0.3:
        tree["model.old.a.b"] = expected["model.new.a.b"] = numbers.integers(0, 9, (2, 2)).astype(plan.dtype)
        rules.append({"from": "old.{x...}", "to": "new.{x}"})
    return rng, tree, rules, expected, plan.reversible


def boxes(rng, shape):
    """A tensor cut into boxes, some of them left out."""
    cut = [((0,) * len(shape), tuple(shape))]
    for _ in range(rng.randint(0, 3)):
        offsets, sizes = cut.pop(rng.randrange(len(cut)))
        dims = [dim for dim, size in enumerate(sizes) if size > 1]
        if not dims:
            cut.append((offsets, sizes))
            continue
        dim = rng.choice(dims)
        at = rng.randint(1, sizes[dim] - 1)
        second = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        cut.append((offsets, (*sizes[:dim], at, *sizes[dim + 1 :])))
        cut.append((second, (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])))
    return rng.sample(cut, rng.randint(1, len(cut)))


def part_of(array, offsets, sizes):
    return array[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))]


def check(seed, folder):
    rng, tree, rules, expected, reversible = case(seed)
    view = reshard.View(rules)
    flat = folder / "flat"
    rt.save({key: torch.from_numpy(array.copy()) for key, array in tree.items()}, flat)
    source = folder / "source"
    mesh = rng.choice(["1", "2", "3", "dp=2,tp=2", "a=3,b=2"])
    dims = mesh.count("=") or 1
    placements = {
        key: ",".join(rng.choice(["R", *(f"S({dim})" for dim in range(array.ndim))]) for _ in range(dims))
        for key, array in tree.items()
    }
    reshard.relayout(flat, source, mesh=mesh, rules=[f"{key}={how}" for key, how in placements.items()], sync=False)
    with reshard.open(source, view=view) as checkpoint:
        assert set(checkpoint) == set(expected)
        for key, array in expected.items():
            found = checkpoint[key]
            assert (found.shape, found.dtype) == (array.shape, str(array.dtype)), key
            np.testing.assert_array_equal(found[...], array, err_msg=key)
            ((offsets, sizes), *_) = boxes(rng, array.shape)
            index = tuple(slice(o, o + s) for o, s in zip(offsets, sizes))
            np.testing.assert_array_equal(found[index], array[index], err_msg=key)
    # As ranks load: each some boxes of each tensor.
    wanted = {key: boxes(rng, array.shape) for key, array in expected.items()}
    memory = {key: [torch.full(sizes, 55).to(like(key, expected)) for _, sizes in cut] for key, cut in wanted.items()}
    state = {
        key: rt.ShardView(
            like(key, expected), expected[key].shape, [(cut[0], into) for cut, into in zip(wanted[key], memory[key])]
        )
        for key in expected
    }
    rt.load(state, source, view=view, verify=rng.choice(["never", "whole", "always"]))
    for key, cut in wanted.items():
        for (offsets, sizes), found in zip(cut, memory[key]):
            np.testing.assert_array_equal(found.numpy(), part_of(expected[key], offsets, sizes), err_msg=key)
    assert reshard.verify(source, view=view).sound
    made = folder / "made"
    reshard.convert(source, made, to="dcp", ranks=rng.randint(1, 3), view=view, sync=False)
    with reshard.open(made) as checkpoint:
        for key, array in expected.items():
            np.testing.assert_array_equal(checkpoint[key][...], array, err_msg=key)
    assert reshard.digest(made) == reshard.digest(source, view=view)
    if reversible:
        back = view.reversed()
        for path, views in [(made, [back]), (source, [view, back])]:
            with reshard.open(path, view=views) as checkpoint:
                assert set(checkpoint) == set(tree)
                for key, array in tree.items():
                    found = checkpoint[key]
                    assert (found.shape, found.dtype) == (array.shape, str(array.dtype)), key
                    np.testing.assert_array_equal(found[...], array, err_msg=key)
    else:
        with pytest.raises(reshard.InvalidInput, match="cannot be reversed: .* (say|from the end|brings back)|brings back"):
            view.reversed()
    assert reshard.diff(source, made, view=view).equal
    return reversible


def like(key, expected):
    return torch.from_numpy(np.zeros(0, expected[key].dtype)).dtype


@pytest.mark.parametrize("part", range(4))
def test_rules_do_what_numpy_does_to_whole_arrays_and_their_reverse_undoes_it(tmp_path, part):
    """Where steps have no reverse, the view has none, and says so."""
    seeds = range(SEED + part * CASES // 4, SEED + (part + 1) * CASES // 4)
    reversible = []
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            if check(seed, folder):
                reversible.append(seed)
        except Exception as error:
            raise AssertionError(f"case {seed}: {case(seed)[2]}") from error
        shutil.rmtree(folder)
    assert reversible == [seed for seed in seeds if seed % 2 == 0]
