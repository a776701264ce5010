"""Arguments of a program as a command line writes them: x=float32[4,8], ids=int64[2,16]<1000, dim=-1."""

import ast
import re
from collections.abc import Sequence
from typing import Any

import torch
import typer

from forge.ir.proxies import short_dtype
from forge.support.dtypes import DTYPES, find_dtype

SYNTAX = "[NAME=]DTYPE[LENGTH,...] such as x=float32[4,8], int64[2,16]<1000 or float32[], or a literal such as dim=-1"
BELOW = 10  # the default bound of random integers
_NAMED = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<value>.+)", re.DOTALL)
_TENSOR = re.compile(r"(?P<dtype>[A-Za-z]\w*)\[(?P<shape>[^\]]*)\](?:<(?P<below>.*))?")
_SHORT = {short_dtype(each): each for each in DTYPES.values()}  # as a printed trace has them


def parse_inputs(texts: Sequence[str], device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments: floats from a normal distribution, integers from 0 on.

    Raises typer.BadParameter, naming the input, for what is not SYNTAX.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text in texts:
        match = _NAMED.fullmatch(text.strip())
        if match is None:
            raise _wrong(text, "is empty")
        value = _value(match["value"].strip(), text, device)
        if match["name"] is None:
            if kwargs:
                raise _wrong(text, "is positional, but stands behind a named one")
            args.append(value)
        elif match["name"] in kwargs:
            raise _wrong(text, "is the second of that name")
        else:
            kwargs[match["name"]] = value
    return tuple(args), kwargs


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return the values by name: literals of Python, or strings.

    Raises typer.BadParameter for what is not NAME=VALUE."""
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE, such as num_hidden_layers=2", param_hint="--set")
        try:
            settings[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[name] = value
    return settings


def parse_dtype(text: str) -> torch.dtype:
    """Return the dtype of a name, long or short (float32, f32). Raises typer.BadParameter for others, and integers'."""
    dtype = _dtype(text)
    if dtype is None or not dtype.is_floating_point:
        raise typer.BadParameter(f"{text!r} is no floating-point dtype, such as bfloat16", param_hint="--dtype")
    return dtype


def parse_device(text: str) -> torch.device:
    """Return a device that is here. Raises typer.BadParameter for what is none, ValueError for one that is not here."""
    try:
        device = torch.device(text)
    except RuntimeError:
        raise typer.BadParameter(f"{text!r} is no device of torch, such as cuda:0", param_hint="--device") from None
    try:
        torch.empty(0, device=device)
    except Exception as error:
        raise ValueError(f"--device {text} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _dtype(name: str) -> torch.dtype | None:
    return _SHORT.get(name) or find_dtype(name)


def _value(value: str, text: str, device: torch.device) -> Any:
    match = _TENSOR.fullmatch(value)
    if match is not None:
        return _tensor(match, text, device)
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        raise _wrong(text, "is neither a tensor nor a literal") from None


def _tensor(match: re.Match[str], text: str, device: torch.device) -> torch.Tensor:
    dtype = _dtype(match["dtype"])
    if dtype is None:
        raise _wrong(text, f"has no dtype of torch, but {match['dtype']!r}")
    lengths = [each.strip() for each in match["shape"].split(",")] if match["shape"].strip() else []
    if not all(length.isdecimal() for length in lengths):
        raise _wrong(text, f"has no list of lengths, but {match['shape']!r}")
    whole = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    below = match["below"]
    if below is not None and not (whole and below.isdecimal() and int(below) > 0):
        raise _wrong(text, "has something else behind < than a positive number, or no dtype of integers")
    try:
        return random_tensor([int(length) for length in lengths], dtype, device, int(below or BELOW))
    except RuntimeError as error:
        raise _wrong(text, f"cannot be made: {str(error).splitlines()[0]}") from error


def random_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device, below: int = BELOW) -> torch.Tensor:
    """Return normally distributed numbers, integers from 0 to `below`, or booleans; the same ones on each device."""
    if dtype is torch.bool:
        values = torch.randint(2, shape)
    elif dtype.is_floating_point or dtype.is_complex:
        values = torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    else:
        values = torch.randint(below, shape)
    return values.to(device, dtype)


def _wrong(text: str, reason: str) -> typer.BadParameter:
    return typer.BadParameter(f"{text!r} {reason}; wanted is {SYNTAX}", param_hint="--input")
