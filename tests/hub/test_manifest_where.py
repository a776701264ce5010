"""The expressions of `where`: their meaning, their reasons on failure, and their grammar's limits."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from forge.hub.manifest.where import InvalidExpression, parse_where


def reason(text: str, **env: Any) -> str | None:
    return parse_where(text).reason(env)


def symbol(hint: int) -> torch.SymInt:
    """Return an unknown length."""
    env = ShapeEnv()
    source = ConstantSource("s")
    return env.create_symintnode(
        env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC), hint=hint, source=source
    )


X = torch.empty(2, 3)

HOLD = [
    ("H % 8 == 0", {"H": 64}),
    ("eps is not None", {"eps": 1e-6}),
    ("2 <= width <= 4", {"width": 3}),
    ("approximate in ('none', 'tanh')", {"approximate": "tanh"}),
    ("not causal", {"causal": False}),
    ("causal is False", {"causal": False}),
    ("normalized_shape == [H]", {"normalized_shape": (8,), "H": 8}),
    ("normalized_shape[-1] == H", {"normalized_shape": [4, 8], "H": 8}),
    ("x.ndim == 2 and x.shape[1] == 3 and x.numel == 6", {"x": X}),
    ("x.dtype == float32 or x.dtype == torch.half", {"x": X}),
    ("x.dtype in (float32, float16)", {"x": X}),
    ("bias is None", {"bias": None}),
    ("x is not None", {"x": X}),
    ("-1 == k - 2 * 3 // 2 + 1", {"k": 1}),
    ("n / 2 > 1.5", {"n": 4}),
    ("dim not in [0, 1]", {"dim": -1}),
    ("D <= 256 and heads % kv == 0", {"D": 128, "heads": 8, "kv": 2}),
]

FAIL = [
    ("H % 8 == 0", {"H": 100}, "H = 100 is not a multiple of 8"),
    ("heads % kv == 0", {"heads": 5, "kv": 2}, "heads = 5 is not a multiple of kv = 2"),
    ("x.shape[-1] % 4 == 0", {"x": X}, "x.shape[-1] = 3 is not a multiple of 4"),
    ("not H % 8 == 0", {"H": 64}, "H = 64 is a multiple of 8"),
    ("eps is not None", {"eps": None}, "eps is None"),
    ("bias is None", {"bias": X}, "bias is not None"),
    ("bias is None", {"bias": 3}, "bias = 3 is not None"),
    ("D <= 256", {"D": 300}, "D = 300 is greater than 256"),
    ("256 >= D", {"D": 300}, "D = 300 is greater than 256"),
    ("D < 256", {"D": 256}, "D = 256 is at least 256"),
    ("2 <= width <= 4", {"width": 1}, "width = 1 is less than 2"),
    ("2 <= width <= 4", {"width": 5}, "width = 5 is greater than 4"),
    ("n == m", {"n": 2, "m": 3}, "n = 2 is not m = 3"),
    ("n != 3", {"n": 3}, "n = 3 is 3"),
    ("causal", {"causal": False}, "causal is False"),
    ("not causal", {"causal": True}, "causal is True"),
    ("not (causal or n > 2)", {"causal": False, "n": 3}, "n = 3 is greater than 2"),
    ("causal or n > 2", {"causal": False, "n": 1}, "causal is False and n = 1 is at most 2"),
    ("D <= 256 and D % 8 == 0", {"D": 12}, "D = 12 is not a multiple of 8"),
    ("approximate in ('none', 'tanh')", {"approximate": "erf"}, "approximate = 'erf' is not in ('none', 'tanh')"),
    ("x.dtype == float16", {"x": X}, "x.dtype = float32 is not float16"),
    ("normalized_shape == [H]", {"normalized_shape": (4, 8), "H": 8}, "normalized_shape = (4, 8) is not (8,)"),
    ("H % 8", {"H": 64}, "H % 8 = 0 is false"),
]

UNDECIDED = [
    ("eps > 0", {"eps": None}, "where 'eps > 0': eps = None cannot be compared with 0"),
    ("H % n == 0", {"H": 8, "n": 0}, "where 'H % n == 0': integer modulo by zero in H % n"),
    ("H % n == 0", {"H": 8, "n": "a"}, "where 'H % n == 0': n = 'a' is no number"),
    ("bias.ndim == 1", {"bias": None}, "where 'bias.ndim == 1': bias is None"),
    ("bias.ndim == 1", {"bias": 2}, "where 'bias.ndim == 1': bias is no tensor"),
    ("x.shape[5] == 1", {"x": X}, "where 'x.shape[5] == 1': x.shape = (2, 3) has no item 5"),
    ("n[0] == 1", {"n": 1}, "where 'n[0] == 1': n = 1 has no items"),
    ("K == 1", {}, "where 'K == 1': K has no value here"),
    ("x", {"x": X}, "where 'x': a tensor's value is not known before the program runs"),
    ("n in 3", {"n": 1}, "where 'n in 3': n = 1 cannot be compared with 3"),
    ("word * 1000000000 == word", {"word": "a"}, "where 'word * 1000000000 == word': word = 'a' is no number"),
]


@pytest.mark.parametrize(("text", "env"), HOLD, ids=lambda value: value if isinstance(value, str) else "")
def test_it_holds(text: str, env: dict) -> None:
    assert reason(text, **env) is None


@pytest.mark.parametrize(("text", "env", "words"), [*FAIL, *UNDECIDED])
def test_it_fails_in_words(text: str, env: dict, words: str) -> None:
    found = reason(text, **env)
    assert found.replace("division or modulo by zero", "modulo by zero") in (words, words.replace("division or ", ""))


def test_a_symbolic_length_is_decided_only_where_it_is_known() -> None:
    """No guard is put on it."""
    length = symbol(64)
    env = length.node.shape_env
    assert reason("H % 8 == 0", H=length * 8) is None
    assert reason("H == K", H=length, K=length) is None
    assert reason("H > 0 and H != 0", H=length * 4) is None
    assert "is not known before the program runs" in reason("H % 8 == 0", H=length)
    assert "is not known before the program runs" in reason("H in (64, 128)", H=length)
    assert "is not known before the program runs" in reason("shape == [64]", shape=(length,))
    assert env.guards == []


NOT_ALLOWED = [
    "len(x)",
    "x.__class__",
    "x.shape.__len__",
    "().__class__.__bases__",
    "__import__('os')",
    "lambda: 1",
    "[x for x in y]",
    "{1: 2}",
    "{1, 2}",
    "f'{x}'",
    "x if y else z",
    "(y := 1)",
    "x[0:1]",
    "x[y]",
    "x[True]",
    "x ** 2",
    "x << 2",
    "x @ y",
    "~x",
    "+x",
    "*x",
    "1j == 1",
    "b'a' == x",
    "... is None",
    "x is 1",
    "x is y",
    "await x",
    "torch.load",
    "x = 1",
    "import os",
    "",
    "1" * 201,
    "x" + "\0",
]


@pytest.mark.parametrize("text", NOT_ALLOWED)
def test_what_is_outside_of_the_grammar_is_refused(text: str) -> None:
    with pytest.raises(InvalidExpression, match=r"^where: "):
        parse_where(text)


def test_a_refusal_names_the_part() -> None:
    with pytest.raises(InvalidExpression, match=r"^where: 'len\(x\)' is not an allowed expression"):
        parse_where("H % 8 == 0 and len(x) > 2")


PARTS = ["H", "x", "x.ndim", "x.shape[0]", "8", "0", "None", "True", "'a'", "(1, 2)", "1.5", "len(x)", "y.z"]
GLUE = [
    " and ",
    " or ",
    " % ",
    " == ",
    " != ",
    " < ",
    " in ",
    " is ",
    " is not ",
    " + ",
    " // ",
    " / ",
    " not in ",
    "(",
]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PARTS), st.sampled_from(GLUE)), max_size=6), st.sampled_from(PARTS))
def test_any_expression_is_refused_or_gives_a_reason(parts: list, last: str) -> None:
    """No other exception is raised, whatever the values are."""
    try:
        where = parse_where("".join(a + b for a, b in parts) + last)
    except InvalidExpression:
        return
    for env in ({"H": 8, "x": X}, {"H": None, "x": None}, {"H": "a", "x": (1,)}, {}):
        assert where.reason(env) is None or isinstance(where.reason(env), str)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_refused_or_read(text: str) -> None:
    try:
        parse_where(text).reason({"x": X})
    except InvalidExpression as error:
        assert str(error).startswith("where: ")
