"""OpInfos of dtype and device conversions."""

from functools import partial

import torch

from forge.testing.opinfo import ALL
from forge.testing.table import DEVICE, Value, ints, op, sample, shared_value, t, unary, wrong

_op = partial(op, dtypes=ALL, domain=(0, 6))
_UNARY = unary((5,), (2, 3), (), (0, 2))
_ARITY = [wrong(t(3), 1, 2, 3, error=TypeError, match="takes|argument")]
_op("Tensor.float Tensor.double Tensor.half Tensor.bfloat16", _UNARY, _ARITY)
_op("Tensor.int Tensor.long Tensor.bool Tensor.short Tensor.char Tensor.byte", _UNARY, _ARITY, gradient=False)
_X, _IMAGE = shared_value(t(2, 3)), shared_value(t(2, 3, 4, 5))
_NOWHERE = [wrong(t(3), "nowhere", match="device")]
_op(
    "Tensor.to",
    *(
        sample(_X, *args, **kwargs)
        for target in (torch.float32, torch.float16, torch.int64, torch.bool)
        for args, kwargs in (((target,), {}), ((), {"dtype": target, "copy": True}))
    ),
    sample(_X, torch.float32, True, True),
    sample(_X, "cpu", torch.float64),
    sample(_X, torch.device("cpu")),
    sample(_X, DEVICE, non_blocking=True),
    sample(_X, t(2, dtype=torch.float64)),
    sample(_X, tensor=torch.ones(2, dtype=torch.bfloat16, device="cpu")),
    sample(_X, dtype=torch.float64, device="cpu"),
    sample(_IMAGE, memory_format=torch.channels_last),
    sample(_IMAGE, torch.float64, memory_format=torch.channels_last),
    _NOWHERE,
)
op("Tensor.cpu", sample(t(2, 3)), _ARITY, dtypes=ALL)
_SIX = ints(*range(6))  # integers, which need no gradient: nothing comes back from the meta device
op(
    "Tensor.to_device",
    sample(_SIX, "meta"),
    sample(_SIX, torch.device("meta"), torch.float64),
    sample(_SIX, device="meta", dtype=torch.bool, non_blocking=True),
    _NOWHERE,
    op=lambda x, *args, **kwargs: x.to(*args, **kwargs),
    symbols=(),
    dtypes=(torch.int64,),
    gradient=False,
)
_op(
    "Tensor.type_as",
    [sample(t(2, 3), t(2, dtype=target)) for target in (torch.float32, torch.int64, torch.float64)],
    wrong(t(3), 1.0, error=TypeError, match="must be Tensor"),
)
_DOUBLE = Value(lambda target: f"torch.{'' if target.device.type == 'cpu' else f'{target.device.type}.'}DoubleTensor")
_op(
    "Tensor.type",
    [sample(_X, torch.float64), sample(_X, dtype=torch.int64), sample(_X, _DOUBLE)],
    wrong(t(3), "torch.NoTensor", error=ValueError, match="invalid type"),
)
