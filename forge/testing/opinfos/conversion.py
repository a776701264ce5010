"""OpInfos of dtype and device conversions."""

from collections.abc import Iterator

import torch

from forge.testing.opinfo import ALL, ErrorSample, OpInfo, Sample, register_opinfo, sample
from forge.testing.opinfos.elementwise import method


def _conversion_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((5,), (2, 3), (), (0, 2)):
        yield sample(info.tensor(shape, device, dtype))
    yield sample(info.tensor((3, 4), device, dtype).t())


def _conversion_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield ErrorSample(sample(torch.ones(3, device=device), 1, 2, 3), TypeError, "takes|argument")


for _name in ("float", "double", "half", "bfloat16", "int", "long", "bool", "short", "char", "byte"):
    register_opinfo(
        OpInfo(
            f"Tensor.{_name}",
            method(_name),
            _conversion_samples,
            _conversion_errors,
            dtypes=ALL,
            gradient=_name in ("float", "double", "half", "bfloat16"),
            domain=(0, 6),
            symbols=(f"torch.Tensor.{_name}",),
        )
    )


def _cpu_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield sample(info.tensor((2, 3), device, dtype))


def _to_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    x = info.tensor((2, 3), device, dtype)
    for target in (torch.float32, torch.float16, torch.int64, torch.bool):
        yield sample(x, target)
        yield sample(x, dtype=target, copy=True)
    yield sample(x, torch.float32, True, True)
    yield sample(x, "cpu", torch.float64)
    yield sample(x, torch.device("cpu"))
    yield sample(x, device, non_blocking=True)
    yield sample(x, torch.ones(2, dtype=torch.float64, device=device))
    yield sample(x, tensor=torch.ones(2, dtype=torch.bfloat16, device="cpu"))
    yield sample(x, dtype=torch.float64, device="cpu")
    image = info.tensor((2, 3, 4, 5), device, dtype)
    yield sample(image, memory_format=torch.channels_last)
    yield sample(image, torch.float64, memory_format=torch.channels_last)


def _to_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield ErrorSample(sample(torch.ones(3, device=device), "nowhere"), RuntimeError, "device")


register_opinfo(
    OpInfo(
        "Tensor.to",
        method("to"),
        _to_samples,
        _to_errors,
        dtypes=ALL,
        domain=(0, 6),
        symbols=("torch.Tensor.to",),
    )
)
register_opinfo(
    OpInfo("Tensor.cpu", method("cpu"), _cpu_samples, _conversion_errors, dtypes=ALL, symbols=("torch.Tensor.cpu",))
)


def _device_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    x = torch.arange(6, device=device)  # integers, which need no gradient: nothing comes back from the meta device
    yield sample(x, "meta")
    yield sample(x, torch.device("meta"), torch.float64)
    yield sample(x, device="meta", dtype=torch.bool, non_blocking=True)


register_opinfo(
    OpInfo("Tensor.to_device", method("to"), _device_samples, _to_errors, dtypes=(torch.int64,), gradient=False)
)


def _type_as_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for target in (torch.float32, torch.int64, torch.float64):
        yield sample(info.tensor((2, 3), device, dtype), info.tensor((2,), device, target))


def _type_as_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield ErrorSample(sample(torch.ones(3, device=device), 1.0), TypeError, "must be Tensor")


register_opinfo(
    OpInfo(
        "Tensor.type_as",
        method("type_as"),
        _type_as_samples,
        _type_as_errors,
        dtypes=ALL,
        domain=(0, 6),
        symbols=("torch.Tensor.type_as",),
    )
)


def _type_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    x = info.tensor((2, 3), device, dtype)
    yield sample(x, torch.float64)
    yield sample(x, dtype=torch.int64)
    module = "torch" if device.type == "cpu" else f"torch.{device.type}"
    yield sample(x, f"{module}.DoubleTensor")


def _type_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield ErrorSample(sample(torch.ones(3, device=device), "torch.NoTensor"), ValueError, "invalid type")


register_opinfo(
    OpInfo(
        "Tensor.type",
        method("type"),
        _type_samples,
        _type_errors,
        dtypes=ALL,
        domain=(0, 6),
        symbols=("torch.Tensor.type",),
    )
)
