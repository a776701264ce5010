"""The double of nvFuser's library refuses the same calls as the library, and returns the same dtypes."""

import nvfuser_double
import pytest
import torch
from nvfuser_double import DataType, FusionDefinition
from nvfuser_double.operators import OPERATORS
from nvfuser_double.signatures import SIGNATURES


def tensor(fusion, dtype=DataType.Float, shape=(2, 3)):
    order = list(range(len(shape)))[::-1]
    return fusion.define_tensor(shape=list(shape), contiguity=[True] * len(shape), dtype=dtype, stride_order=order)


@pytest.mark.parametrize(
    "call",
    [
        lambda ops, x: ops.exp(),
        lambda ops, x: ops.exp(x, x),
        lambda ops, x: ops.exp(1j, out=x),
        lambda ops, x: ops.sum(x, dims=1.0),
        lambda ops, x: ops.sum(x, [0], keep=True),
        lambda ops, x: ops.add(arg0=x, arg1=x),
        lambda ops, x: ops.cast(x, torch.float32),
        lambda ops, x: ops.permute(x, 0),
        lambda ops, x: ops.broadcast(x, [0, 1]),
        lambda ops, x: ops.reshape(x, [2.0, 3]),
    ],
)
def test_calls_that_no_overload_takes_are_type_errors(call):
    with FusionDefinition() as fusion:
        x = tensor(fusion)
        with pytest.raises(TypeError, match="incompatible function arguments"):
            call(fusion.ops, x)


def test_an_operator_that_the_library_does_not_have_is_an_attribute_error():
    with FusionDefinition() as fusion, pytest.raises(AttributeError, match="gelu"):
        fusion.ops.gelu(tensor(fusion))


def test_every_operator_of_the_double_is_one_of_the_library():
    assert OPERATORS.keys() <= SIGNATURES.keys()


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda ops, x: ops.add(x, x), DataType.Float),
        (lambda ops, x: ops.pow(x, 2.0), DataType.Float),
        (lambda ops, x: ops.exp(x), DataType.Float),
        (lambda ops, x: ops.neg(x), DataType.Half),
        (lambda ops, x: ops.max(x, [0]), DataType.Half),
        (lambda ops, x: ops.where(ops.gt(x, 0.0), x, x), DataType.Half),
        (lambda ops, x: ops.gt(x, 0.0), DataType.Bool),
        (lambda ops, x: ops.truediv(ops.cast(x, DataType.Int), 2), DataType.Float),
    ],
)
def test_dtypes_of_half_are_the_librarys(call, dtype):
    with FusionDefinition() as fusion:
        assert call(fusion.ops, tensor(fusion, DataType.Half)).dtype() is dtype


def test_a_tensor_that_is_not_as_declared_is_refused():
    with FusionDefinition() as fusion:
        fusion.add_output(fusion.ops.exp(tensor(fusion)))
    for given in (torch.zeros(3, 2), torch.zeros(2, 3).double(), torch.zeros(3, 2).t()):
        with pytest.raises(RuntimeError, match="was given"):
            fusion.execute([given])


def test_descriptors_follow_the_strides():
    describe = nvfuser_double.compute_tensor_descriptor
    assert describe([2, 3], [3, 1]) == ([True, True], [1, 0])
    assert describe([2, 3], [1, 2]) == ([True, True], [0, 1])
    assert describe([2, 3], [8, 1]) == ([False, True], [1, 0])
    assert describe([2, 1, 3], [3, 3, 1]) == ([True, None, True], [2, 1, 0])
