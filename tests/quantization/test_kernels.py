"""Kernels of a repository claim linear layers with quantized weights."""

import warnings
from pathlib import Path

import torch
from torch import nn

import forge
from forge.executors.hubex import Verifier, kernel_executor
from forge.hub import HubNotice
from forge.quantize import Int4WeightOnly, Int8WeightOnly, Quantization
from tests.hub.repositories import Repository

INT8 = """
def f(x, weight, scale, bias):
    product = F.linear(x, weight.to(x.dtype)) * scale
    return product if bias is None else product + bias
"""
INT4 = """
def f(x, weight, scale, zero, bias):
    elements = torch.stack([weight & 15, weight >> 4], -1).view(weight.shape[0], scale.shape[1], -1)
    values = (elements - zero[..., None]) * scale[..., None]
    return F.linear(x, values.flatten(1), bias)
"""


def claimed_by(made: Repository, transform: Quantization) -> dict[str, str]:
    """Return the executor of each call of a small model, after comparing its results."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
    by = kernel_executor([made.folder], verify=Verifier(60))
    jitted = forge.jit(model, transforms=[transform], executors=[by, "inductor", "torch"], cache=False)
    plain = forge.jit(model, transforms=[transform], executors=["torch"], cache=False)
    for rows in (1, 9):
        x = torch.randn(rows, 64)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", HubNotice)
            torch.testing.assert_close(jitted(x), plain(x))
    return {row.operation: row.executor for row in forge.explain(jitted).rows}


def test_a_kernel_claims_linear_int8(tmp_path: Path) -> None:
    names = {
        "op": "torch.ops.forge.linear_int8",
        "arg_meta": "{input: T, weight: int8, scale: float32}",
        "shape": '{input: "[..., K]", weight: "[N, K]", scale: "[N]"}',
        "args": "{x: input, weight: weight, scale: scale, bias: bias}",
    }
    found = claimed_by(Repository(tmp_path, "int8", INT8, **names), Int8WeightOnly())
    assert found["torch.ops.forge.linear_int8"] == "acme.int8"


def test_a_kernel_claims_linear_int4(tmp_path: Path) -> None:
    names = {
        "op": "forge::linear_int4",
        "arg_meta": "{input: T, weight: uint8, scale: float32, zero_point: float32}",
        "shape": '{input: "[..., K]", weight: "[N, B]", scale: "[N, G]", zero_point: "[N, G]"}',
        "where": '["K == 2 * B", "K % G == 0"]',
        "args": "{x: input, weight: weight, scale: scale, zero: zero_point, bias: bias}",
    }
    found = claimed_by(Repository(tmp_path, "int4", INT4, **names), Int4WeightOnly(16))
    assert found["torch.ops.forge.linear_int4"] == "acme.int4"
