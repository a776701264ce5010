"""Dataclass objects among the arguments of a graph's calls. Dynamo calls the class for each; a program has only
tensors and numbers, so the call takes the fields as a dict, and constructs the object from them."""

import dataclasses
from collections.abc import Callable
from typing import Any


class Fields:
    """An object of a dataclass in a program that is being recorded."""

    def __init__(self, kind: type, values: dict[str, Any]) -> None:
        self.kind = kind
        self.values = values


def is_constructor(function: Any) -> bool:
    """Return whether a graph's call of it constructs an object of a dataclass."""
    return isinstance(function, type) and dataclasses.is_dataclass(function)


class DataclassCall:
    """A function that takes dicts for dataclass objects, and constructs the objects from them."""

    def __init__(self, function: Callable, arguments: tuple) -> None:
        self.function = function
        self.pattern = _pattern(arguments)
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _construct(self.pattern, (args, kwargs))
        return self.function(*args, **kwargs)


def plain(value: Any) -> Any:
    """Return a pytree with dicts in place of objects."""
    if isinstance(value, Fields):
        return {name: plain(each) for name, each in value.values.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([plain(each) for each in value])
    return {key: plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def _pattern(value: Any) -> Any:
    """Return the positions of objects in a pytree: (class, the patterns of its fields) for each; None for a leaf."""
    if isinstance(value, Fields):
        return value.kind, {name: _pattern(each) for name, each in value.values.items()}
    if isinstance(value, (tuple, list)):
        return [_pattern(each) for each in value]
    return {key: _pattern(each) for key, each in value.items()} if isinstance(value, dict) else None


def _construct(pattern: Any, value: Any) -> Any:
    if isinstance(pattern, tuple):
        kind, fields = pattern
        return kind(**_construct(fields, value))
    if isinstance(pattern, list):
        return type(value)([_construct(each, item) for each, item in zip(pattern, value, strict=True)])
    return {key: _construct(each, value[key]) for key, each in pattern.items()} if pattern is not None else value
