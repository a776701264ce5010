"""A Triton kernel has one name and is compiled once, in whichever regions it occurs."""

import gc
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import forge
from forge.executors.inductorex import compile_wait, lower
from forge.torch_internals.inductor import async_compile, shared_kernels
from forge.torch_internals.inductor.codecache import LambdaFuture
from forge.torch_internals.inductor.codegen import V
from forge.torch_internals.inductor.shared_kernels import SharedKernel, name_by_text, share_kernels


class Kernel:
    """A compiled kernel."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the texts of the kernels that Inductor's processes have compiled. One of them fails to compile."""
    texts: list[str] = []

    def compile(text: str) -> Kernel:
        texts.append(text)
        if text == "wrong":
            raise RuntimeError("ptxas failed")
        return Kernel()

    def triton(compiling: object, name: str, text: str, device: str) -> LambdaFuture:
        return LambdaFuture(lambda: compile(text))

    shared_kernels.forget()
    monkeypatch.setattr(share_kernels, "original", triton)
    return texts


def ask(text: str) -> SharedKernel | Kernel:
    return share_kernels.replacement(None, "triton_poi_fused_0", text)


def names_in_a_module(monkeypatch: pytest.MonkeyPatch, *texts: str) -> list[str]:
    """Return the names that a module gives its kernels, which Inductor would number."""
    numbers = iter(range(9))

    def define(scheduling: object, text: str, nodes: list) -> str:
        return f"triton_poi_fused_{V.graph.wrapper_code.next_kernel_suffix()}"

    class Wrapper:
        def next_kernel_suffix(self) -> str:
            return str(next(numbers))

    wrapper = Wrapper()
    monkeypatch.setattr(name_by_text, "original", define)
    with V.set_graph_handler(SimpleNamespace(wrapper_code=wrapper)):
        names = [name_by_text.replacement(None, text, []) for text in texts]
    assert wrapper.next_kernel_suffix() == "0"  # other names are numbered
    return names


def test_a_kernel_has_one_name_in_all_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, other), (again,) = (names_in_a_module(monkeypatch, *texts) for texts in (("a", "b"), ("b",)))
    assert again == other != first
    assert first.startswith("triton_poi_fused_")
    assert first.isidentifier()


def test_a_kernel_of_two_modules_is_compiled_once(compiled: list[str]) -> None:
    one, other, third = ask("a"), ask("a"), ask("b")
    assert one is other is not third
    assert one.result() is other.result() is not third.result()
    assert compiled == ["a", "b"]


def test_a_kernel_that_a_module_has_is_given_to_the_next(compiled: list[str]) -> None:
    kernel = ask("a").result()
    assert ask("a") is kernel
    del kernel
    gc.collect()
    ask("a").result()  # it is no longer referenced
    assert compiled == ["a", "a"]


def test_a_kernel_that_cannot_be_compiled_is_an_error_of_each_module(compiled: list[str]) -> None:
    futures = [ask("wrong"), ask("wrong")]
    for each in futures:
        with pytest.raises(RuntimeError, match="ptxas failed"):
            each.result()


def test_what_is_not_the_same_is_compiled_again(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    one = ask("a")
    monkeypatch.setattr(shared_kernels, "cache_dir", lambda: "/another")
    assert ask("a") is not one
    stored = "{'store_cubin': True}"
    assert ask(stored) is not ask(stored)


def test_a_kernel_that_was_compiled_here_is_shared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shared_kernels.forget()
    monkeypatch.setattr(share_kernels, "original", lambda *args: Kernel())  # the processes are not started yet
    kernel = ask("a")
    assert isinstance(kernel, Kernel)
    assert ask("a") is kernel


def test_regions_are_compiled_with_both() -> None:
    with compile_wait.defer_waits():
        assert vars(async_compile.AsyncCompile)["triton"] is share_kernels.replacement
    assert vars(async_compile.AsyncCompile)["triton"] is share_kernels.own
    assert lower.shared_kernels.name_by_text.applies


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels of Triton need a GPU")
def test_regions_of_a_program_share_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, list[object]] = {}
    original: Callable = share_kernels.original

    def triton(compiling: object, name: str, text: str, *rest: object) -> object:
        kernel = original(compiling, name, text, *rest)
        made.setdefault(text, []).append(kernel)
        return kernel

    monkeypatch.setattr(share_kernels, "original", triton)

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = (x.sin() + 1) @ y  # the second region has one more kernel
        return (first.sin() + 1) @ y + (first.sum(0).exp() + 1).sum()

    given = [torch.randn(512, 512, device="cuda") for _ in range(2)]
    torch.testing.assert_close(forge.jit(program, cache=False)(*given), program(*given), rtol=1e-3, atol=1e-2)
    assert len(made) > 1
    assert all(each is kernels[0] for kernels in made.values() for each in kernels)  # one task of Inductor's processes
