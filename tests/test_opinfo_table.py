"""The rows from which OpInfos are made."""

import operator

import pytest
import torch
from support import samples

from forge.testing import OpInfo, table
from forge.testing.table import DTYPE, Where, calls, errors, floats, ints, sample, shared_value, t, unary, values, wrong

CPU = torch.device("cpu")


def _made(*rows: table.Row, dtype: torch.dtype = torch.float32) -> list:
    """Return the samples made from rows."""
    info = OpInfo("rows", torch.add, calls(*rows))
    return list(info.samples(info, CPU, dtype))


def test_a_tensor_is_drawn_for_every_place_in_a_row() -> None:
    x = t(3)
    first, second = _made(sample(x, x), sample(x))
    assert len({id(each) for each in (*first.args, *second.args)}) == 3


def test_a_shared_tensor_is_one_for_all_rows() -> None:
    x = shared_value(t(3))
    first, second = _made(sample(x, x.clone()), sample(x))
    assert first.args[0] is second.args[0]
    assert torch.equal(*first.args)
    assert first.args[0] is not first.args[1]


def test_methods_indices_and_arithmetic_are_those_of_the_tensor() -> None:
    ones = values([[1, 1, 1], [1, 1, 1]])
    (call,) = _made(sample(ones.t(), ones[0], (ones + 1) * 2 / 4, ones.to(torch.int64), ints(1, 2).to(DTYPE)))
    assert [tuple(each.shape) for each in call.args] == [(3, 2), (3,), (2, 3), (2, 3), (2,)]
    assert call.args[2].unique().item() == 1
    assert [each.dtype for each in call.args[3:]] == [torch.int64, torch.float32]


def test_rows_with_a_condition_are_of_some_dtypes_alone() -> None:
    rows = (sample(t(2)), floats(sample(t(3))), Where(lambda dtype: dtype == torch.bool, [sample(t(4))]))
    lengths = {
        dtype: [len(each.args[0]) for each in _made(*rows, dtype=dtype)] for dtype in (torch.float64, torch.bool)
    }
    assert lengths == {torch.float64: [2, 3], torch.bool: [2, 4]}


def test_an_argument_that_is_no_tensor_stays_as_it_is() -> None:
    (call,) = _made(sample([t(2), None], (..., slice(1)), size=torch.Size([2])))
    assert call.args[0][1] is None
    assert (call.args[1], call.kwargs) == ((..., slice(1)), {"size": torch.Size([2])})


def test_an_error_is_of_a_call_in_float32() -> None:
    (error,) = errors(wrong(t(3), 5, error=IndexError, match="range"))(OpInfo("rows", torch.sum, calls()), CPU)
    assert error.sample.args[0].dtype == torch.float32
    assert (error.error, error.match, error.stricter) == (IndexError, "range", "")


def test_rows_of_one_tensor_have_a_transposed_one() -> None:
    assert [each.args[0].is_contiguous() for each in _made(*unary((2, 3), ()))] == [True, True, False]


def test_a_sample_that_eager_refuses_is_named() -> None:
    info = OpInfo("careless", torch.sum, calls(sample(t(2)), sample(t(2, 3), dim=[5])))
    wanted = r"OpInfo 'careless': eager refuses the sample \(f32\[2, 3\], dim=\[5\]\): IndexError\('Dimension out of"
    with pytest.raises(pytest.fail.Exception, match=wanted):
        list(samples(info, "cpu", torch.float32))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("exp", torch.exp),
        ("linalg.qr.without_gradient", torch.linalg.qr),
        ("nn.functional.batch_norm.train", torch.nn.functional.batch_norm),
        ("aten.gelu_backward", torch.ops.aten.gelu_backward.default),
        ("operator.lt", operator.lt),
    ],
)
def test_a_name_means_the_function_that_it_begins_with(name: str, function: object) -> None:
    assert table.function_of(name) is function


def test_a_name_that_means_no_function_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"OpInfo 'exq': torch has no function of this name; give op="):
        table.op("exq", sample(t(3)))


def test_arguments_are_detached_by_position_and_by_name() -> None:
    x, y, z = (torch.ones(2, requires_grad=True) for _ in range(3))
    flags = table.detach_args(-1, "z")(lambda x, y, z: [each.requires_grad for each in (x, y, z)])
    assert flags(x, y, z=z) == [True, False, False]
