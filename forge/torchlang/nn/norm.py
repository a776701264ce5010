"""The normalizations of torch.nn.functional."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from forge import clang, prims
from forge.ir import Dim, Symbol, TensorProxy, check, get_grad, put_grad, register_grad
from forge.ir.memory import Memory
from forge.prims.core import check_dim, same, same_shape, statically_true, torch_check
from forge.torch_internals.functions import torch_weight_norm
from forge.torchlang.core import check_tensor, torchsymbol, write
from forge.torchlang.limits import clamp_min
from forge.torchlang.linalg import check_one_dtype
from forge.torchlang.shape import row_major

# (x - mean) / sqrt(variance + eps)


def _standardize(
    x: TensorProxy, dims: tuple[int, ...], eps: float
) -> tuple[TensorProxy, TensorProxy, TensorProxy, TensorProxy]:
    """Return ((x - mean) * rstd, mean, variance, rstd) over `dims`, which are kept with length 1. No gradient flows
    from the last three.

    Dtypes: floating point; half precision becomes float32.
    """
    prims.check_dtype("standardize", x, prims.REAL)
    x = clang.convert(x, clang.wider(x.dtype))
    mean = clang.mean(x, dims, True)
    distance = x - mean
    variance = clang.mean(distance * distance, dims, True)
    rstd = clang.rsqrt(variance + eps)
    return distance * rstd, mean, variance, rstd


standardize = Symbol("standardize", "torchlang.standardize", body=_standardize)


@register_grad(standardize)
def _standardize_grad(x: TensorProxy, dims: tuple[int, ...], eps: float) -> tuple:
    out, mean, variance, rstd = standardize(x, dims, eps)
    g = get_grad(out)
    centered = g - clang.mean(g, dims, True) - out * clang.mean(g * out, dims, True)
    put_grad(x, centered * rstd)
    return out, mean, variance, rstd


def scale_and_shift(
    x: TensorProxy, weight: TensorProxy | None, bias: TensorProxy | None, dtype: torch.dtype
) -> TensorProxy:
    """Return x * weight + bias, for those that are given, in `dtype`."""
    if weight is not None:
        x = x * weight
    if bias is not None:
        x = x + bias
    return clang.convert(x, dtype)


def per_channel(value: TensorProxy | None, ndim: int) -> TensorProxy | None:
    """Return one value per channel, (C,), as (1, C, 1, …)."""
    if value is None:
        return None
    return prims.broadcast_in_dim(value, (1, value.shape[0], *[1] * (ndim - 2)), (1,))


# layer and root mean square


def check_normalized(op: str, input: TensorProxy, shape: Sequence[Dim], **parameters: TensorProxy | None) -> None:
    """Raise RuntimeError unless the input's last dims, and the parameters, have `shape`."""
    torch_check(
        len(shape) > 0, lambda: f"{op}: Expected normalized_shape to be at least 1-dimensional, but got {list(shape)}"
    )
    torch_check(
        input.ndim >= len(shape) and all(map(same, input.shape[input.ndim - len(shape) :], shape)),
        lambda: (
            f"{op}: Given normalized_shape={list(shape)}, expected input with shape [*, {list(shape)}], but got {input}"
        ),
    )
    for name, value in parameters.items():
        torch_check(
            value is None or same_shape(value.shape, shape),
            lambda name=name, value=value: (
                f"{op}: Expected {name} to be of same shape as normalized_shape {list(shape)}, but got {value}"
            ),
        )


def _last_dims(x: TensorProxy, count: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - count, x.ndim))


@torchsymbol(F.layer_norm)
def layer_norm(
    input: TensorProxy,
    normalized_shape: Sequence[Dim],
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    eps: float = 1e-5,
) -> TensorProxy:
    """Return (input - mean) / sqrt(variance + eps) * weight + bias over the last dims, which have
    `normalized_shape`."""
    check_normalized("layer_norm", input, normalized_shape, weight=weight, bias=bias)
    out = standardize(input, _last_dims(input, len(normalized_shape)), eps)[0]
    return scale_and_shift(out, weight, bias, input.dtype)


@torchsymbol(torch.layer_norm)
def torch_layer_norm(
    input: TensorProxy,
    normalized_shape: Sequence[Dim],
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> TensorProxy:
    """Return F.layer_norm, ignoring the additional argument as torch does."""
    return layer_norm(input, normalized_shape, weight, bias, eps)


@torchsymbol(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: TensorProxy, normalized_shape: Sequence[Dim], weight: TensorProxy | None = None, eps: float | None = None
) -> TensorProxy:
    """Return input / sqrt(mean of squares + eps) * weight over the last dims, which have `normalized_shape`.

    eps is by default the machine epsilon of the compute dtype.
    """
    check_normalized("rms_norm", input, normalized_shape, weight=weight)
    wide, rstd = _root_mean_square(input, len(normalized_shape), eps)
    return scale_and_shift(wide * rstd, weight, None, input.dtype)


def _root_mean_square(input: TensorProxy, count: int, eps: float | None) -> tuple[TensorProxy, TensorProxy]:
    """Return the input in the compute dtype, and 1 / sqrt(mean of squares + eps); torch's result is row-major."""
    if input.strides is not None and not row_major(input):
        input = prims.contiguous(input)
    wide = clang.convert(input, clang.wider(input.dtype))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    return wide, clang.rsqrt(clang.mean(wide * wide, _last_dims(input, count), True) + eps)


@register_grad(rms_norm)
def rms_norm_grad(
    input: TensorProxy, normalized_shape: Sequence[Dim], weight: TensorProxy | None = None, eps: float | None = None
) -> TensorProxy:
    """Save the input and one number per row."""
    count = len(normalized_shape)
    wide, rstd = _root_mean_square(input, count, eps)
    out = scale_and_shift(wide * rstd, weight, None, input.dtype)
    g = clang.convert(get_grad(out), wide.dtype)
    rstd = clang.conj(rstd)
    x = clang.conj(clang.convert(input, wide.dtype)) * rstd
    put_grad(weight, g * x)
    g = g if weight is None else g * clang.conj(weight)
    put_grad(input, (g - x * clang.mean(g * x, _last_dims(input, count), True)) * rstd)
    return out


# groups


@torchsymbol(F.group_norm)
def group_norm(
    input: TensorProxy,
    num_groups: int,
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    eps: float = 1e-5,
) -> TensorProxy:
    """Standardize the channels in groups; multiply each channel by its weight and add its bias.

    Shapes: input (N, C, *), weight and bias (C,).
    """
    _check_groups(input, num_groups, weight=weight, bias=bias)
    grouped = clang.reshape(
        input, (input.shape[0], num_groups, math.prod((input.shape[1] // num_groups, *input.shape[2:])))
    )
    out = clang.reshape(standardize(grouped, (2,), eps)[0], input.shape)
    return scale_and_shift(out, per_channel(weight, input.ndim), per_channel(bias, input.ndim), input.dtype)


def _check_groups(input: TensorProxy, num_groups: int, **parameters: TensorProxy | None) -> None:
    torch_check(
        input.ndim >= 2, lambda: f"group_norm: Expected at least 2 dimensions for input tensor but received {input}"
    )
    torch_check(num_groups > 0, lambda: f"group_norm: num_groups is {num_groups}, but must be positive")
    torch_check(
        same(input.shape[1] % num_groups, 0),
        lambda: (
            f"group_norm: Expected number of channels in input to be divisible by num_groups, but got {input} "
            f"and num_groups={num_groups}"
        ),
    )
    for name, value in parameters.items():
        torch_check(
            value is None or same_shape(value.shape, (input.shape[1],)),
            lambda name=name, value=value: (
                f"group_norm: Expected {name} to be a vector of size equal to the number "
                f"of channels in input, but got {value} and {input}"
            ),
        )


@torchsymbol(torch.group_norm)
def torch_group_norm(
    input: TensorProxy,
    num_groups: int,
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> TensorProxy:
    """Return F.group_norm, ignoring the additional argument as torch does."""
    return group_norm(input, num_groups, weight, bias, eps)


# batches


def _batch_norm_train(
    input: TensorProxy,
    running_mean: TensorProxy | None,
    running_var: TensorProxy | None,
    weight: TensorProxy | None,
    bias: TensorProxy | None,
    momentum: float,
    eps: float,
) -> tuple[TensorProxy, TensorProxy | None, TensorProxy | None]:
    """Return (out, new running mean, new running variance) of batch_norm in training; nothing is written."""
    dims = (0, *range(2, input.ndim))
    out, mean, variance, _ = standardize(input, dims, eps)
    out = scale_and_shift(out, per_channel(weight, input.ndim), per_channel(bias, input.ndim), input.dtype)
    count = clang.count(input, dims)
    unbiased = variance * (count / (count - 1)) if isinstance(count, int) and count > 1 else variance
    if not isinstance(count, int):
        unbiased = variance * count / (count - 1)
    return out, blend(running_mean, mean, momentum), blend(running_var, unbiased, momentum)


def blend(running: TensorProxy | None, new: TensorProxy, momentum: float) -> TensorProxy | None:
    """Return the moving average of a running statistic and a new one, in its dtype and without a gradient."""
    if running is None:
        return None
    new = prims.detach(clang.reshape(new, running.shape))
    return clang.convert(running * (1 - momentum) + new * momentum, running.dtype)


batch_norm_train = Symbol("batch_norm_train", "torchlang.batch_norm_train", body=_batch_norm_train)


def _of_empty(input: TensorProxy, weight: TensorProxy | None, bias: TensorProxy | None) -> TensorProxy:
    """Return batch_norm of no elements as in torch: connected with the parameters by their first element."""
    scale, shift = [value if value is None else clang.select(value, 0, 0) for value in (weight, bias)]
    out = scale_and_shift(input, scale, shift, input.dtype)
    return prims.clone(input) if out is input else out


def _train(
    input: TensorProxy,
    running_mean: TensorProxy | None,
    running_var: TensorProxy | None,
    weight: TensorProxy | None,
    bias: TensorProxy | None,
    momentum: float,
    eps: float,
) -> tuple[TensorProxy, TensorProxy | None, TensorProxy | None]:
    """Return batch_norm_train; without elements, the statistics are unchanged."""
    if statically_true(input.numel() == 0):
        return _of_empty(input, weight, bias), running_mean, running_var
    return batch_norm_train(input, running_mean, running_var, weight, bias, momentum, eps)


def check_channels(op: str, input: TensorProxy, **values: TensorProxy | None) -> None:
    """Raise RuntimeError unless each value has one number per channel of the input."""
    check_tensor(op, input=input)
    torch_check(input.ndim >= 2, lambda: f"{op}: input is {input}, but must have at least 2 dims: (N, C, …)")
    for name, value in values.items():
        torch_check(
            value is None or same_shape(value.shape, (input.shape[1],)),
            lambda name=name, value=value: (
                f"{op}: {name} should contain {input.shape[1]} elements, "
                f"one for each channel of {input}, but is {value}"
            ),
        )


def _check_dtypes(input: TensorProxy, **values: TensorProxy | None) -> None:
    """Raise RuntimeError for dtypes that torch's CPU kernels do not mix."""
    mixed = {torch.float32} if input.dtype in (torch.float16, torch.bfloat16) else set()
    for name, value in values.items():
        torch_check(
            value is None or input.device.type != "cpu" or value.dtype in {input.dtype, *mixed},
            lambda name=name, value=value: f"batch_norm: {name} must have the dtype of input {input}, but is {value}",
        )


def _handle_batch_norm(symbol: Symbol, args: tuple, kwargs: dict, memory: Memory) -> TensorProxy:
    arguments = symbol.bind(args, kwargs)
    if not arguments["training"]:
        return symbol(*memory.read_all(args), **memory.read_all(kwargs))
    values = memory.read_all(arguments)
    input = values["input"]
    statistics = {name: values[name] for name in ("running_mean", "running_var")}
    _check_dtypes(input, weight=values["weight"], bias=values["bias"], **statistics)
    check_channels("batch_norm", input, weight=values["weight"], bias=values["bias"], **statistics)
    _check_count("Expected more than 1 value per channel when training", input, (0, *range(2, input.ndim)))
    parameters = {key: values[key] for key in ("weight", "bias", "momentum", "eps")}
    out, *new = _train(input, **statistics, **parameters)
    _write_statistics(arguments, new, memory, "batch_norm")
    return out


def _write_statistics(arguments: dict[str, Any], new: Sequence[TensorProxy | None], memory: Memory, op: str) -> None:
    for name, value in zip(("running_mean", "running_var"), new, strict=True):
        if value is not None and value is not memory.read(arguments[name]):
            write(arguments[name], value, memory, op)


def _check_count(message: str, input: TensorProxy, dims: tuple[int, ...]) -> None:
    count = clang.count(input, dims)
    check(not statically_true(count == 1), lambda: f"{message}, got input {input}", ValueError)


@torchsymbol(F.batch_norm, handler=_handle_batch_norm)
def batch_norm(
    input: TensorProxy,
    running_mean: TensorProxy | None,
    running_var: TensorProxy | None,
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> TensorProxy:
    """Standardize channels by the running statistics; in training, by the batch's, which update the running ones.

    Shapes: input (N, C, *), all else (C,).
    Raises: ValueError if a channel has only one value in training; RuntimeError without statistics in evaluation.
    """
    check_channels("batch_norm", input, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    _check_dtypes(input, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    if running_mean is None or running_var is None:
        raise RuntimeError("batch_norm: Expected running_mean and running_var to be defined when training=False")
    prims.check_dtype("batch_norm", input, prims.REAL)
    if statically_true(input.numel() == 0):
        return _of_empty(input, weight, bias)
    wide = clang.convert(input, clang.wider(input.dtype))
    rstd = clang.rsqrt(clang.convert(running_var, wide.dtype) + eps)
    out = (wide - per_channel(running_mean, input.ndim)) * per_channel(rstd, input.ndim)
    return scale_and_shift(out, per_channel(weight, input.ndim), per_channel(bias, input.ndim), input.dtype)


@torchsymbol(torch.batch_norm, handler=_handle_batch_norm)
def torch_batch_norm(
    input: TensorProxy,
    weight: TensorProxy | None,
    bias: TensorProxy | None,
    running_mean: TensorProxy | None,
    running_var: TensorProxy | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> TensorProxy:
    """Return F.batch_norm, with the parameters in another order."""
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


# instances


def _one_batch(input: TensorProxy) -> TensorProxy:
    """Reshape (N, C, *) to (1, N * C, *)."""
    return clang.reshape(input, (1, input.shape[0] * input.shape[1], *input.shape[2:]))


def _for_each_instance(value: TensorProxy | None, count: Dim) -> TensorProxy | None:
    """Repeat (C,) to (N * C,)."""
    if value is None:
        return None
    return clang.reshape(clang.expand_to(value, (count, value.shape[0])), (count * value.shape[0],))


def _handle_instance_norm(symbol: Symbol, args: tuple, kwargs: dict, memory: Memory) -> TensorProxy:
    arguments = symbol.bind(args, kwargs)
    values = memory.read_all(arguments)
    names = ("running_mean", "running_var")
    if not arguments["use_input_stats"] or all(arguments[name] is None for name in names):
        return symbol(*memory.read_all(args), **memory.read_all(kwargs))
    input, count = values["input"], values["input"].shape[0]
    _check_instances(**{key: values[key] for key in ("input", *names, "weight", "bias")})
    of_each = {key: _for_each_instance(values[key], count) for key in (*names, "weight", "bias")}
    out, *new = _train(_one_batch(input), **of_each, momentum=values["momentum"], eps=values["eps"])
    means = [clang.mean(clang.reshape(each, (count, input.shape[1])), 0) for each in new]
    _write_statistics(arguments, means, memory, "instance_norm")
    return clang.reshape(out, input.shape)


def _check_instances(input: TensorProxy, **values: TensorProxy | None) -> None:
    check_channels("instance_norm", input, **values)
    _check_count("Expected more than 1 spatial element when training", input, tuple(range(2, input.ndim)))


@torchsymbol(F.instance_norm, handler=_handle_instance_norm)
def instance_norm(
    input: TensorProxy,
    running_mean: TensorProxy | None = None,
    running_var: TensorProxy | None = None,
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> TensorProxy:
    """Standardize each channel of each instance by its own statistics; without use_input_stats, by the running
    statistics.

    Shapes: input (N, C, *), all else (C,).
    """
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    _check_instances(input, weight=weight, bias=bias)
    scale, shift = [_for_each_instance(value, input.shape[0]) for value in (weight, bias)]
    out = _train(_one_batch(input), None, None, scale, shift, momentum, eps)[0]
    return clang.reshape(out, input.shape)


@torchsymbol(torch.instance_norm, handler=_handle_instance_norm)
def torch_instance_norm(
    input: TensorProxy,
    weight: TensorProxy | None,
    bias: TensorProxy | None,
    running_mean: TensorProxy | None,
    running_var: TensorProxy | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> TensorProxy:
    """Return F.instance_norm, with the parameters in another order."""
    return instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


# others


@torchsymbol(F.normalize)
def normalize(input: TensorProxy, p: float = 2.0, dim: int | Sequence[int] = 1, eps: float = 1e-12) -> TensorProxy:
    """Return input divided by its p-norm along `dim`, which is clamped to at least eps."""
    dims = clang.canonical_dims("normalize", dim, input.ndim)
    norm = clang.vector_norm(input, p, dims, True)
    return input / clamp_min(norm, eps)


@torchsymbol(F.local_response_norm)
def local_response_norm(
    input: TensorProxy, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> TensorProxy:
    """Return input / (k + alpha * the mean of the squares of `size` neighbouring channels) ** beta."""
    check(
        input.ndim >= 3,
        lambda: f"local_response_norm: Expected 3D or higher dimensionality input, but got {input}",
        ValueError,
    )
    if statically_true(input.numel() == 0):
        return input
    squares = clang.reshape(input * input, (input.shape[0], 1, input.shape[1], -1))
    padded = prims.pad(squares, ((0, 0), (0, 0), (size // 2, (size - 1) // 2), (0, 0)), 0)
    means = prims.avg_pool(padded, (size, 1), (1, 1), (0, 0), False, True, None)
    return input / (clang.reshape(means, input.shape) * alpha + k) ** beta


@torchsymbol(torch_weight_norm)
def weight_norm(v: TensorProxy, g: TensorProxy, dim: int = 0) -> TensorProxy:
    """Return v * g / |v|, where the norm is over every dim but `dim` (all for -1)."""
    if dim in (0, v.ndim - 1) and torch.float16 not in (v.dtype, g.dtype):  # torch has a specialized kernel for these
        prims.check_dtype("_weight_norm", v, prims.REAL)
        check_one_dtype("_weight_norm", v=v, g=g)
    dtype = v.dtype
    v, g = _in_the_kernels_dtype(v, g, dim)
    return clang.convert(v * (g / _weight_length(v, g, dim)[0]), dtype)


def _in_the_kernels_dtype(v: TensorProxy, g: TensorProxy, dim: int) -> tuple[TensorProxy, TensorProxy]:
    """Return both in the dtypes in which torch computes: its kernel for the first or last dim uses float32
    throughout."""
    return (clang.widen(v), clang.widen(g)) if dim in (0, v.ndim - 1) else (v, g)


def _weight_length(v: TensorProxy, g: TensorProxy, dim: int) -> tuple[TensorProxy, tuple[int, ...]]:
    """Return |v|, and the reduced dims."""
    outer = () if dim == -1 else (check_dim("_weight_norm", dim, v.ndim),)
    dims = tuple(i for i in range(v.ndim) if i not in outer)
    return clang.vector_norm(v, 2, dims, dim != -1), dims


@register_grad(weight_norm)
def _weight_norm_grad(v: TensorProxy, g: TensorProxy, dim: int = 0) -> TensorProxy:
    x, size = _in_the_kernels_dtype(v, g, dim)
    length, dims = _weight_length(x, size, dim)
    scale = size / length
    out = clang.convert(x * scale, v.dtype)
    gradient = clang.convert(get_grad(out), x.dtype)
    along = clang.sum(gradient * clang.conj(x), dims, True)
    scale = clang.conj(scale)
    put_grad(g, clang.reshape(along, length.shape) / length if dim == -1 else along / length)
    put_grad(v, scale * gradient - x * (clang.real(scale * along) / (length * length)))
    return out
