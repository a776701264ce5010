"""Mutated and random manifests: the result is one ManifestError with places in the file, or a manifest; nothing in
between."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forge.executors.hubex.operators import Operators
from forge.hub.manifest import Checker, Manifest, ManifestError, candidates, parse_manifest
from tests.hub.manifests import VALID


def written(data: Any) -> str:
    """Return data as YAML."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(data, Dumper=dumper, sort_keys=False, default_flow_style=None)


class Few(Operators):
    """A resolver that suggests few names, so that many examples run in little time."""

    def names(self) -> list[str]:
        return ["aten::add.out", "torch.nn.functional.rms_norm", "pattern:swiglu"]


OPERATORS = Few(patterns={"swiglu": lambda x: x})
SMALL = VALID.encode()
TREE = yaml.safe_load(VALID)
EXECUTORCH = b"""\
- op: add.out
  type_alias: {T0: [Float, Half]}
  dim_order_alias: {D0: [[0, 1]]}
  kernels:
  - {arg_meta: null, kernel_name: a::b}
  - {arg_meta: {self: [T0, D0], other: [T0, D0], out: [T0, D0]}, kernel_name: a::c}
- func: x::y.out(Tensor self, *, Tensor(a!) out) -> Tensor(a!)
  variants: function
"""


class Registry:
    """A registry of manifests' kernels, filled only by a valid manifest."""

    def __init__(self) -> None:
        self.kernels: list[Any] = []

    def register(self, manifest: Manifest) -> None:
        for entry in manifest.kernels:
            signature = OPERATORS.resolve(entry.op)
            if signature is not None:
                Checker(entry, signature)(torch.empty(2, 8), torch.empty(8))
            self.kernels.append(entry)


def _find(name: str) -> Callable:
    if "nosuch" in name:
        raise ImportError(name)
    return lambda *args, **kwargs: None


def holds(text: str | bytes, finders: tuple = (None, _find)) -> None:
    """Check that a text is a whole manifest, or one error whose every problem has a place in it, with nothing
    registered."""
    registry = Registry()
    before = len(torch._C._dispatch_get_all_op_names())
    lines = (text.decode("utf-8", "replace") if isinstance(text, bytes) else text).count("\n") + 2
    for find in finders:
        try:
            manifest = parse_manifest(text, OPERATORS, file="k.yaml", find=find)
        except ManifestError as error:
            assert error.problems and not registry.kernels
            for problem in error.problems:
                assert problem.mark.file == "k.yaml" and 1 <= problem.mark.line <= max(lines, 1) + text.count(
                    "\r" if isinstance(text, str) else b"\r"
                )
                assert problem.mark.column >= 1 and problem.text and "Traceback" not in problem.text
                assert "object at 0x" not in problem.text and "Node(" not in problem.text
            continue
        assert {kernel.op for kernel in manifest.kernels} <= {op.name for op in manifest.ops}
        assert sorted(map(id, candidates(manifest.kernels))) == sorted(map(id, manifest.kernels))
        registry.register(manifest)
        assert len(registry.kernels) == len(manifest.kernels)
        registry.kernels.clear()
    assert len(torch._C._dispatch_get_all_op_names()) == before


# mutations of a valid tree


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value in a tree."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from places(tree[key])


VALUES = [
    None,
    True,
    0,
    -1,
    10**30,
    1.5,
    float("inf"),
    float("nan"),
    "",
    " ",
    "T",
    "nosuch",
    "len(x)",
    "H % 0 == 0",
    "[..., H",
    "python:nosuch:f",
    "acme::f(Tensor x -> Tensor",
    "é",
    "a\nb",
    [],
    {},
    [[]],
    [{}],
    {"a": None},
    ["input"],
    {"input": ["T", "C", "D"]},
    {"constant": {"a": [1]}},
]
KEYS = [
    "op",
    "func",
    "pattern",
    "kernels",
    "where",
    "shape",
    "args",
    "out",
    "grad",
    "__ret_0",
    "input",
    "self",
    "1",
    "x y",
]


def mutate(tree: Any, pick: random.Random) -> None:
    """Delete, rename, replace, duplicate or move something."""
    container, key = pick.choice(list(places(tree)))
    kind = pick.randrange(5)
    if kind == 0:
        del container[key]
    elif kind == 1:
        container[key] = copy.deepcopy(pick.choice(VALUES))
    elif kind == 2 and isinstance(container, dict):
        name = pick.choice([*KEYS, key[:-1], key + key[-1:], key.upper()])
        container[name] = container.pop(key)
    elif kind == 3 and isinstance(container, list):
        container.insert(pick.randrange(len(container) + 1), copy.deepcopy(container[key]))
    else:
        _, other = pick.choice(list(places(TREE)))
        source, source_key = pick.choice(list(places(TREE)))
        container[key] = copy.deepcopy(source[source_key])
        if isinstance(container, dict) and isinstance(other, str):
            container.setdefault(other, pick.choice(VALUES))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_a_mutated_manifest_is_whole_or_one_error(seed: int, count: int) -> None:
    pick = random.Random(seed)
    tree = copy.deepcopy(TREE)
    for _ in range(count):
        if tree:
            mutate(tree, pick)
    holds(written(tree))


def test_each_value_deleted_or_replaced_is_whole_or_one_error() -> None:
    """Each value of the valid manifest is tried once, without random choices."""
    for index in range(len(list(places(TREE)))):
        for value in ("delete", None, 1, []):
            tree = copy.deepcopy(TREE)
            container, key = list(places(tree))[index]
            if value == "delete":
                del container[key]
            else:
                container[key] = value
            holds(written(tree), finders=(None,))


# mutations of the text


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([SMALL, EXECUTORCH]),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 30), st.binary(max_size=6)), min_size=1, max_size=4),
)
@example(SMALL, [(0, 0, b"\x00")])
@example(SMALL, [(100, 0, b"\xff\xfe")])
@example(SMALL, [(0, 0, b"%YAML 9.9\n---\n")])
@example(SMALL, [(0, 0, b"&a ")])
@example(SMALL, [(0, 0, b"? ")])
@example(EXECUTORCH, [(0, 2000, b"- {")])
def test_damaged_text_is_whole_or_one_error(text: bytes, cuts: list) -> None:
    for start, length, new in cuts:
        start = start % (len(text) + 1)
        text = text[:start] + new + text[start + length :]
    holds(text)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_lines_that_are_dropped_doubled_or_swapped_are_whole_or_one_error(seed: int) -> None:
    pick = random.Random(seed)
    lines = VALID.splitlines(keepends=True)
    for _ in range(pick.randrange(1, 4)):
        here, there = pick.randrange(len(lines)), pick.randrange(len(lines))
        pick.choice(
            [
                lambda here=here: lines.pop(here),
                lambda here=here, there=there: lines.insert(there, lines[here]),
                lambda here=here: lines.__setitem__(here, " " * pick.randrange(1, 5) + lines[here]),
            ]
        )()
    holds("".join(lines))


# random data

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.sampled_from(VALUES[9:19])
)
NAMES = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["forge_kernels", "library", "name", "ops", "op", "kernels", "kernel_name", "arg_meta", "build", "cpp"]
    ),
)
DATA = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(DATA)
def test_random_data_is_whole_or_one_error(data: Any) -> None:
    holds(written(data))


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=60), st.binary(max_size=60), st.text("[]{}:,-?&*!|>'\"%@` \n\tab1#", max_size=60)))
def test_random_text_is_whole_or_one_error(text: str | bytes) -> None:
    holds(text)


@settings(max_examples=200, deadline=None)
@given(st.text("acme::f(Tensor x, int?[]=1.5*!)-> .out\"'{}", max_size=60))
def test_random_schemas_are_whole_or_one_error(text: str) -> None:
    holds(written({"forge_kernels": 1, "library": {"name": "a"}, "ops": [{"func": text, "kernels": []}]}))
