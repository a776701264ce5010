"""The prims of recurrent layers: one layer in one direction, over a whole sequence."""

from forge.ir import Dim, TensorProxy, get_grad, put_grad, register_grad
from forge.prims.core import check_same_device, check_tensor, like, primitive, same_shape, statically_true, torch_check

KINDS = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}  # the ratio of the weights' rows to the state's length

Optional = TensorProxy | None
Tensors = tuple[Optional, ...]
LayerInputs = tuple[TensorProxy, TensorProxy, Optional, TensorProxy, TensorProxy, Optional, Optional, Optional]


@primitive()
def recurrent_layer(
    kind: str, reverse: bool, inputs: LayerInputs
) -> tuple[TensorProxy, TensorProxy, TensorProxy | None]:
    """Return (the layer's outputs at each step, its state after the last step), with steps in order or in reverse.

    kind: a key of KINDS. inputs: (x, h, c, w_ih, w_hh, b_ih, b_hh, w_hr), c for an LSTM only; None for no bias or
    projection.
    Shapes: x (steps, N, features), h (N, P), c (N, H), w_ih (k * H, features), w_hh (k * H, P), biases (k * H,), w_hr
    (P, H); out ((steps, N, P), (N, P), (N, H) or None).
    Source: torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu.
    """
    op = f"prims.recurrent_layer: {kind}"
    x, h, c, w_ih, w_hh, b_ih, b_hh, w_hr = inputs
    check_tensor(op, x=x, h=h, w_ih=w_ih, w_hh=w_hh)
    check_same_device(op, *(each for each in inputs if each is not None))
    for name, value, rank in (("x", x, 3), ("h", h, 2), ("w_ih", w_ih, 2), ("w_hh", w_hh, 2)):
        torch_check(
            value.ndim == rank,
            lambda name=name, value=value, rank=rank: f"{op}: {name} is {value}, but must have {rank} dims",
        )
    torch_check(
        not statically_true(x.shape[0] == 0), lambda: f"{op}: Expected sequence length to be larger than 0 in RNN"
    )
    torch_check(
        all(each is None or each is c or each.dtype == x.dtype for each in inputs)
        and (x.dtype.is_floating_point or x.dtype.is_complex),
        lambda: f"{op}: all tensors must have one floating point or complex dtype, but they are {inputs}",
    )
    hidden = w_hh.shape[0] // KINDS[kind]
    expected: dict[str, tuple[TensorProxy | None, tuple[Dim, ...]]] = {
        "w_ih": (w_ih, (KINDS[kind] * hidden, x.shape[2])),
        "w_hh": (w_hh, (KINDS[kind] * hidden, h.shape[1])),
        "h": (h, (x.shape[1], hidden if w_hr is None else w_hr.shape[0])),
        "c": (c, (x.shape[1], hidden)),
        "b_ih": (b_ih, (KINDS[kind] * hidden,)),
        "b_hh": (b_hh, (KINDS[kind] * hidden,)),
    }
    for name, (tensor, shape) in expected.items():
        torch_check(
            tensor is None or same_shape(tensor.shape, shape),
            lambda name=name, tensor=tensor, shape=shape: (
                f"{op}: mat1 and mat2 shapes cannot be multiplied: {name} is {tensor}, but for {x} must be {shape}"
            ),
        )
    return like(x, shape=(*x.shape[:2], h.shape[1])), like(h), None if c is None else like(c, dtype=x.dtype)


def input_count(order: int) -> int:
    """Return the number of inputs of recurrent_layer's gradient of this order (0: the layer itself): those of the lower
    order, and the gradients of its results."""
    counts = [8, 11]
    while len(counts) <= order:
        counts.append(counts[-1] + counts[-2])
    return counts[order]


@primitive()
def recurrent_gradient(order: int, kind: str, reverse: bool, inputs: Tensors) -> Tensors:
    """Return the gradients of a recurrent layer's inputs; for a higher `order`, those of its gradient's inputs.

    inputs: those of the gradient of the lower order (or of the layer), and the gradients of its results.
    """
    return tuple(each if each is None else like(each) for each in inputs[: input_count(order - 1)])


def _put_gradients(order: int, kind: str, reverse: bool, inputs: Tensors, results: Tensors) -> None:
    incoming = tuple(each if each is None else get_grad(each) for each in results)
    for argument, gradient in zip(inputs, recurrent_gradient(order, kind, reverse, (*inputs, *incoming)), strict=True):
        put_grad(argument, gradient)


@register_grad(recurrent_layer)
def _recurrent_layer_grad(kind: str, reverse: bool, inputs: Tensors) -> Tensors:
    results = recurrent_layer(kind, reverse, inputs)
    _put_gradients(1, kind, reverse, inputs, results)
    return results


@register_grad(recurrent_gradient)
def _recurrent_gradient_grad(order: int, kind: str, reverse: bool, inputs: Tensors) -> Tensors:
    results = recurrent_gradient(order, kind, reverse, inputs)
    _put_gradients(order + 1, kind, reverse, inputs, results)
    return results
