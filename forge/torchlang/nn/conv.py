"""The convolutions of torch.nn.functional."""

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from forge import clang, prims
from forge.ir import Dim, Symbol, TensorProxy
from forge.prims.core import statically_true, torch_check
from forge.torchlang.aliases import Lengths
from forge.torchlang.core import torchsymbol


@overload
def per_dim(op: str, name: str, value: Lengths, count: int) -> tuple[Dim, ...]: ...
@overload
def per_dim(op: str, name: str, value: Lengths | None, count: int) -> tuple[Dim | None, ...]: ...
def per_dim(op: str, name: str, value: Lengths | None, count: int) -> tuple[Dim | None, ...]:
    """Return an option, given as one number or one per dim, as one per dim. Raises RuntimeError for other counts."""
    values: tuple[Dim | None, ...] = tuple(value) if isinstance(value, Sequence) else (value,)
    torch_check(
        len(values) in (1, count),
        lambda: (
            f"{op}: {name} is {value}, but expected {name} to be a single integer value or a list of {count} values"
        ),
    )
    return values * count if len(values) == 1 else values


def _with_batch(op: str, input: TensorProxy, count: int) -> TensorProxy:
    """Return the input with a batch dim."""
    torch_check(
        input.ndim in (count + 1, count + 2),
        lambda: f"{op}: Expected {count + 1}D (unbatched) or {count + 2}D (batched) input, but got {input}",
    )
    return clang.unsqueeze(input, 0) if input.ndim == count + 1 else input


def _convolve(
    op: str, input: TensorProxy, weight: TensorProxy, bias: TensorProxy | None, lists: dict[str, Lengths], groups: int
) -> TensorProxy:
    """Return a convolution of `input` with or without a batch dim; transposed if `lists` has an output_padding."""
    count = int(op.rstrip("d")[-1])
    torch_check(groups > 0, lambda: f"{op}: groups is {groups}, but must be positive")
    torch_check(weight.ndim == count + 2, lambda: f"{op}: weight is {weight}, but must have {count + 2} dims")
    x = _with_batch(op, input, count)
    values = {name: per_dim(op, name, value, count) for name, value in lists.items()}
    transposed = "output_padding" in values
    extra = values.get("output_padding", (0,) * count)
    how = (values["stride"], values["padding"], values["dilation"], transposed, extra, groups)
    out = (_convolve_parts if x.dtype.is_complex else prims.convolution)(x, weight, bias, *how)
    return out if x is input else clang.reshape(out, out.shape[1:])


def _convolve_parts(x: TensorProxy, weight: TensorProxy, bias: TensorProxy | None, *how: Any) -> TensorProxy:
    """Return a complex convolution by three real ones: (a + bi)(c + di) = ac - bd + ((a + b)(c + d) - ac - bd)i."""
    torch_check(
        weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype),
        lambda: f"conv: x is {x}, weight is {weight} and bias is {bias}, but all must have one dtype",
    )
    a, b, c, d = prims.real(x), prims.imag(x), prims.real(weight), prims.imag(weight)
    ac, bd = prims.convolution(a, c, None, *how), prims.convolution(b, d, None, *how)
    both = prims.convolution(a + b, c + d, None, *how)
    out = (ac - bd) + (both - ac - bd) * 1j
    return out if bias is None else out + clang.reshape(bias, (bias.shape[0], *[1] * (x.ndim - 2)))


def _pad_like(
    op: str, input: TensorProxy, weight: TensorProxy, padding: Lengths | str, stride: Lengths, dilation: Lengths
) -> tuple[TensorProxy, Lengths]:
    """Return the input and the numeric padding for "same" or "valid".

    If "same" needs one more on the right than on the left, the input itself is padded by the difference, as in torch.
    """
    if not isinstance(padding, str):
        return input, padding
    torch_check(
        padding in ("same", "valid"), lambda: f"{op}: Invalid padding string: {padding!r}; it must be 'same' or 'valid'"
    )
    if padding == "valid":
        return input, 0
    count = weight.ndim - 2
    torch_check(
        all(statically_true(value == 1) for value in per_dim(op, "stride", stride, count)),
        lambda: f"{op}: padding='same' is not supported for strided convolutions, but stride is {stride}",
    )
    totals = [d * (k - 1) for d, k in zip(per_dim(op, "dilation", dilation, count), weight.shape[2:], strict=True)]
    odd = [(0, total - 2 * (total // 2)) for total in totals]
    if any(not statically_true(after == 0) for _, after in odd):
        input = prims.pad(input, ((0, 0),) * (input.ndim - count) + tuple(odd), 0)
    return input, tuple(total // 2 for total in totals)


def _convolution_of(function: Callable) -> Symbol:
    """Return the symbol of torch.conv1d, conv2d or conv3d."""
    op = function.__name__

    def body(
        input: TensorProxy,
        weight: TensorProxy,
        bias: TensorProxy | None = None,
        stride: Lengths = 1,
        padding: Lengths | str = 0,
        dilation: Lengths = 1,
        groups: int = 1,
    ) -> TensorProxy:
        """Return the convolution of the input with the weight, plus the bias.

        Shapes: input (N, C, *lengths) or (C, *lengths), weight (C_out, C // groups, *kernel), bias (C_out,).
        Raises: RuntimeError if channels, ranks or dtypes do not match or the kernel is larger than the input.
        """
        input, padding = _pad_like(op, input, weight, padding, stride, dilation)
        lists = {"stride": stride, "padding": padding, "dilation": dilation}
        return _convolve(op, input, weight, bias, lists, groups)

    return torchsymbol(function)(body)


def _transposed_of(function: Callable) -> Symbol:
    """Return the symbol of torch.conv_transpose1d, conv_transpose2d or conv_transpose3d."""
    op = function.__name__

    def body(
        input: TensorProxy,
        weight: TensorProxy,
        bias: TensorProxy | None = None,
        stride: Lengths = 1,
        padding: Lengths = 0,
        output_padding: Lengths = 0,
        groups: int = 1,
        dilation: Lengths = 1,
    ) -> TensorProxy:
        """Return the transpose of a convolution: the gradient with respect to its input.

        Shapes: input (N, C, *lengths) or (C, *lengths), weight (C, C_out // groups, *kernel), bias (C_out,).
        """
        lists = {"stride": stride, "padding": padding, "dilation": dilation, "output_padding": output_padding}
        return _convolve(op, input, weight, bias, lists, groups)

    return torchsymbol(function)(body)


conv1d = _convolution_of(torch.conv1d)
conv2d = _convolution_of(torch.conv2d)
conv3d = _convolution_of(torch.conv3d)
conv_transpose1d = _transposed_of(torch.conv_transpose1d)
conv_transpose2d = _transposed_of(torch.conv_transpose2d)
conv_transpose3d = _transposed_of(torch.conv_transpose3d)


@torchsymbol(torch.convolution)
def convolution(
    input: TensorProxy,
    weight: TensorProxy,
    bias: TensorProxy | None,
    stride: Sequence[Dim],
    padding: Sequence[Dim],
    dilation: Sequence[Dim],
    transposed: bool,
    output_padding: Sequence[Dim],
    groups: int,
) -> TensorProxy:
    """Return the general convolution, of any rank, transposed or not."""
    prims.check_dtype("convolution", input, prims.REAL)
    lists: dict[str, Lengths] = {"stride": stride, "padding": padding, "dilation": dilation}
    if transposed:
        lists["output_padding"] = output_padding
    return _convolve(f"conv{weight.ndim - 2}d", input, weight, bias, lists, groups)
