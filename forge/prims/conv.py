"""The prims of convolutions."""

from forge.ir import Dim, TensorProxy, get_grad, needs_grad, put_grad, register_grad
from forge.prims.core import check_same_device, like, primitive, same, same_shape, statically_true, torch_check
from forge.prims.elementwise import zeros_like

Lengths = tuple[Dim, ...]


def _check_convolution(
    x: TensorProxy, weight: TensorProxy, bias: TensorProxy | None, lists: dict[str, Lengths]
) -> None:
    op = "prims.convolution"
    torch_check(
        weight.ndim >= 3 and x.ndim == weight.ndim,
        lambda: (
            f"{op}: x is {x} and weight is {weight}, but both must have one rank of at least 3: (batch, channels, …)"
        ),
    )
    for tensor in (weight, bias):
        torch_check(
            tensor is None or tensor.dtype == x.dtype,
            lambda tensor=tensor: f"{op}: x is {x} and a parameter is {tensor}, but all must have one dtype",
        )
    check_same_device(op, x, weight, bias)
    for name, values in lists.items():
        torch_check(
            len(values) == x.ndim - 2,
            lambda name=name, values=values: f"{op}: {name} is {values}, but must have {x.ndim - 2} elements for {x}",
        )
    for name in ("stride", "dilation"):
        torch_check(
            all(not statically_true(value <= 0) for value in lists[name]),
            lambda name=name: (
                f"{op}: {name} is {lists[name]}, but must be positive (non-positive {name} is not supported)"
            ),
        )


@primitive()
def convolution(
    x: TensorProxy,
    weight: TensorProxy,
    bias: TensorProxy | None,
    stride: Lengths,
    padding: Lengths,
    dilation: Lengths,
    transposed: bool,
    output_padding: Lengths,
    groups: int,
) -> TensorProxy:
    """Return the convolution (cross-correlation) of a batch with a weight, or its transpose.

    Shapes: x (N, C, *lengths); weight (C_out, C // groups, *kernel), transposed (C, C_out // groups, *kernel);
    bias (C_out,); the lists have one number for each of x's lengths; out (N, C_out, *lengths), or (N, 0, *lengths) if C
    is 0.
    Dtypes: the same for all. Source: aten.convolution, with a batch dim.
    """
    lists = {"stride": stride, "padding": padding, "dilation": dilation, "output_padding": output_padding}
    _check_convolution(x, weight, bias, lists)
    channels = weight.shape[0] if transposed else weight.shape[1] * groups
    torch_check(
        same(x.shape[1], channels),
        lambda: (
            f"prims.convolution: Given groups={groups}, weight is {weight} and expects input to have {channels} "
            f"channels, but x is {x}"
        ),
    )
    out_channels = weight.shape[1] * groups if transposed else weight.shape[0]
    torch_check(
        statically_true(weight.shape[0] % groups == 0) or same(weight.shape[0] % groups, 0),
        lambda: f"prims.convolution: weight is {weight}, whose first length must be divisible by groups={groups}",
    )
    torch_check(
        bias is None or same_shape(bias.shape, (out_channels,)),
        lambda: f"prims.convolution: bias is {bias}, but must be of shape [{out_channels}]",
    )
    if not transposed and statically_true(x.shape[1] == 0):  # torch's empty convolution
        out_channels = 0
    sizes = [convolved_length(x, weight, i, lists, transposed=transposed) for i in range(x.ndim - 2)]
    return like(x, shape=(x.shape[0], out_channels, *sizes))


def convolved_length(
    x: TensorProxy, weight: TensorProxy, i: int, lists: dict[str, Lengths], *, transposed: bool
) -> Dim:
    """Return the length of out's spatial dim i."""
    size, kernel = x.shape[i + 2], weight.shape[i + 2]
    stride, padding, dilation, extra = [values[i] for values in lists.values()]
    reach = dilation * (kernel - 1) + 1
    if transposed:
        out = (size - 1) * stride - 2 * padding + reach + extra
        torch_check(
            not statically_true(out <= 0),
            lambda: (
                f"prims.convolution: Given input size per channel: {x}, the calculated output size is {out}, "
                "which is too small"
            ),
        )
        return out
    torch_check(
        not statically_true(size + 2 * padding < reach),
        lambda: (
            f"prims.convolution: Calculated padded input size per channel: {size + 2 * padding}. Kernel size: "
            f"{reach}. Kernel size can't be greater than actual input size: x is {x}, weight is {weight}"
        ),
    )
    return (size + 2 * padding - reach) // stride + 1


@primitive()
def convolution_backward(
    g: TensorProxy,
    x: TensorProxy,
    weight: TensorProxy,
    bias_sizes: Lengths | None,
    stride: Lengths,
    padding: Lengths,
    dilation: Lengths,
    transposed: bool,
    output_padding: Lengths,
    groups: int,
    output_mask: tuple[bool, bool, bool],
) -> tuple[TensorProxy | None, TensorProxy | None, TensorProxy | None]:
    """Return the gradients of x, weight and bias, None if `output_mask` is False. Source:
    aten.convolution_backward."""
    return (
        like(x) if output_mask[0] else None,
        like(weight) if output_mask[1] else None,
        like(weight, shape=bias_sizes) if output_mask[2] else None,
    )


@register_grad(convolution_backward)
def _convolution_backward_grad(
    g: TensorProxy, x: TensorProxy, weight: TensorProxy, bias_sizes: Lengths | None, *how: object
) -> tuple[TensorProxy | None, TensorProxy | None, TensorProxy | None]:
    """Differentiate the gradients, which are linear in g; those of x and weight are linear in the other."""
    for each in (x, weight):
        put_grad(each, None)  # unless the other's gradient is among the results
    options = how[:-1]
    out = convolution_backward(g, x, weight, bias_sizes, *how)
    of_x, of_weight, of_bias = [None if gradient is None else get_grad(gradient) for gradient in out]
    if needs_grad(g):
        if of_x is not None or of_bias is not None:
            along = zeros_like(x) if of_x is None else of_x
            put_grad(g, convolution(along, weight, of_bias, *options))
        if of_weight is not None:
            put_grad(g, convolution(x, of_weight, None, *options))
    if needs_grad(x) and of_weight is not None:
        put_grad(x, convolution_backward(g, x, of_weight, None, *options, (True, False, False))[0])
    if needs_grad(weight) and of_x is not None:
        put_grad(weight, convolution_backward(g, of_x, weight, None, *options, (False, True, False))[1])
    return out


@register_grad(convolution)
def _convolution_grad(x: TensorProxy, weight: TensorProxy, bias: TensorProxy | None, *how: object) -> TensorProxy:
    out = convolution(x, weight, bias, *how)
    mask = (needs_grad(x), needs_grad(weight), needs_grad(bias))
    bias_sizes = None if bias is None else bias.shape
    gradients = convolution_backward(get_grad(out), x, weight, bias_sizes, *how, mask)
    for argument, gradient in zip((x, weight, bias), gradients, strict=True):
        put_grad(argument, gradient)
    return out
