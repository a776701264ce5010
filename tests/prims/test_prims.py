"""make_prim, and the checks that metas share."""

import pytest
import torch

import forge
from forge import prims
from forge.ir import Symbol, Tag, TensorProxy, Trace, recording
from forge.prims.core import (
    check_dim,
    check_dims,
    check_number_or_tensor,
    check_same_device,
    check_same_shape,
    check_tensor,
    like,
    make_prim,
    same,
    statically_true,
)

CPU, META = torch.device("cpu"), torch.device("meta")


def proxy(name: str, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> TensorProxy:
    return TensorProxy(name, shape, dtype, device)


def test_an_id_is_a_prims_own() -> None:
    before = prims.all_prims()
    with pytest.raises(ValueError, match="make_prim: the id 'exp2' is taken"):
        make_prim("exp2", "exp2", meta=lambda x: x)
    assert prims.all_prims() == before


def test_the_table_of_prims_is_a_copy() -> None:
    prims.all_prims().clear()
    assert prims.all_prims()["exp2"] is prims.exp2


def test_a_prim_carries_its_tags() -> None:
    assert prims.permute.tags == {Tag.VIEW} and prims.copy_.tags == {Tag.EFFECT}


def test_every_prims_id_says_that_it_is_one() -> None:
    assert all(prim.id == f"prims.{id}" and prim.is_prim for id, prim in prims.all_prims().items())


def test_check_tensor_names_op_argument_and_value() -> None:
    with pytest.raises(TypeError, match=r"prims\.f: y is 3, but must be a tensor"):
        check_tensor("prims.f", x=proxy("x", 2), y=3)


def test_check_number_or_tensor_takes_both() -> None:
    check_number_or_tensor("prims.f", a=1, b=2.5, c=True, d=1j, e=proxy("x", 2))
    with pytest.raises(TypeError, match=r"prims\.f: a is 'text', but must be a tensor or a number"):
        check_number_or_tensor("prims.f", a="text")


@pytest.mark.parametrize(("dim", "ndim", "expected"), [(0, 3, 0), (-1, 3, 2), (-3, 3, 0), (0, 0, 0), (-1, 0, 0)])
def test_dims_count_from_either_end(dim: int, ndim: int, expected: int) -> None:
    assert check_dim("f", dim, ndim) == expected


@pytest.mark.parametrize(("dim", "ndim"), [(3, 3), (-4, 3), (1, 0), (-2, 0)])
def test_a_dim_out_of_range_is_torchs_error(dim: int, ndim: int) -> None:
    bound = max(ndim, 1)
    with pytest.raises(
        IndexError, match=rf"range of \[{-bound}, {bound - 1}\], but got {dim}\); the tensor has {ndim}"
    ):
        check_dim("f", dim, ndim)


def test_a_dim_named_twice_is_an_error() -> None:
    assert check_dims("f", (0, -1), 3) == (0, 2)
    with pytest.raises(RuntimeError, match=r"f: dims \(2, -1\) name a dim twice"):
        check_dims("f", (2, -1), 3)


def test_shapes_that_differ_are_an_error_with_both_tensors() -> None:
    check_same_shape("f", proxy("a", 2), proxy("b", 2))
    with pytest.raises(ValueError, match=r"f: a: f32\[2\] cpu and b: f32\[3\] cpu must have one shape"):
        check_same_shape("f", proxy("a", 2), proxy("b", 3))


def test_a_0d_cpu_tensor_goes_with_any_device() -> None:
    on_meta, scalar = proxy("a", 2, device=META), proxy("s")
    assert check_same_device("f", on_meta, scalar) == META
    assert check_same_device("f", scalar, on_meta) == META
    assert check_same_device("f", scalar, 3) == CPU
    with pytest.raises(RuntimeError, match=r"found b: f32\[2\] meta where cpu was wanted"):
        check_same_device("f", proxy("a", 2), proxy("b", 2, device=META))
    with pytest.raises(RuntimeError, match=r"found s: f32\[\] meta where cpu was wanted"):
        check_same_device("f", proxy("a", 2), proxy("s", device=META))


def test_like_takes_what_is_not_given_from_a_tensor() -> None:
    with recording(Trace()):
        out = like(proxy("x", 2, 3, device=META), dtype=torch.bool)
        assert (out.shape, out.dtype, out.device) == ((2, 3), torch.bool, META)
        assert like(out, shape=()).shape == ()


# symbolic sizes


def _lengths(*hints: int) -> list[torch.SymInt]:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    return [env.create_symintnode(env.create_symbol(hint, ConstantSource(f"s{hint}")), hint=hint) for hint in hints]


def _guards(length: torch.SymInt) -> int:
    return len(length.node.shape_env.guards)


def test_known_asks_without_a_guard_and_same_guards_only_where_it_must() -> None:
    a, b = _lengths(5, 7)
    assert (
        statically_true(True) and not statically_true(False) and statically_true(a == a) and statically_true(a + b > a)
    )
    assert not statically_true(a == 5) and not statically_true(a == b)
    assert same(a, a)
    assert _guards(a) == 0
    assert same(a, 5)
    assert _guards(a) == 1


def test_a_prim_on_symbolic_lengths_guards_nothing() -> None:
    """A shape is computed by arithmetic: the length stays a symbol."""
    a, b = _lengths(5, 7)
    x = TensorProxy("x", (a, b), torch.float32, CPU)
    with recording(Trace()):
        assert prims.exp(x).shape == (a, b)
        assert prims.permute(x, (1, 0)).shape == (b, a)
        assert str(prims.cat([x, x], 0).shape[0].node.expr) == f"2*{a.node.expr}"
        assert prims.reshape(x, (a * b,)).ndim == 1
        assert prims.sum(x, (0,)).shape == (b,)
        assert prims.slice(x, 0, 0, a).shape[1] is b
    assert _guards(a) == 0


def test_a_symbol_knows_the_family_file_it_stands_in() -> None:
    assert prims.exp2.meta.__module__ == "forge.prims.elementwise"
    assert isinstance(forge.prims.exp2, Symbol)


@pytest.mark.parametrize("reduce", [None, "add", "sum", "mean", "prod", "amax", "amin"])
def test_the_gradient_of_a_larger_src_is_zero_where_the_index_does_not_reach(reduce):
    """torch's own backward raises here, its forward does not."""
    index = torch.tensor([[0], [2], [1]])

    def function(x: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        if reduce is None:
            return x.scatter(1, index, src)
        return x.scatter_add(1, index, src) if reduce == "add" else x.scatter_reduce(1, index, src, reduce)

    found = []
    for run, part in ((forge.jit(function), slice(None)), (function, slice(1))):
        x, src = (torch.arange(1.0, 13).reshape(3, 4).requires_grad_() for _ in range(2))
        out = run(x, src[:, part])
        out.square().sum().backward()
        found.append((out, x.grad, src.grad))
    torch.testing.assert_close(*found)


def test_a_formula_of_a_gradient_names_arguments_of_the_symbol() -> None:
    with pytest.raises(TypeError, match=r"prims\.sin has no argument 'input', only x"):
        prims.register_vjp(prims.sin, input=lambda g: g)
    with pytest.raises(TypeError, match=r"prims\.sin has no argument 'y', only x"):
        prims.register_vjp(prims.sin, x=lambda g, y: g * y)
