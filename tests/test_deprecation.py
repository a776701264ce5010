"""Public names that were renamed work for one version, with a warning."""

import importlib

import pytest

from forge.executors import FusionExecutor
from forge.support.deprecation import renamed_attributes


def test_an_old_name_gives_the_new_object_and_warns() -> None:
    lookup = renamed_attributes("forge", {"old": "new"}, {"new": 3}.__getitem__)
    with pytest.warns(DeprecationWarning, match=r"forge\.old is now forge\.new"):
        assert lookup("old") == 3


def test_a_name_that_never_was_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'forge' has no attribute 'other'"):
        renamed_attributes("forge", {"old": "new"}, dict.__getitem__)("other")


def test_a_hook_of_an_executor_may_be_defined_by_its_old_name() -> None:
    attribute = pytest.warns(DeprecationWarning, match=r"Old\.by_parts is now fuses_decompositions")
    with attribute, pytest.warns(DeprecationWarning, match=r"Old\.pays is now is_profitable"):

        class Old(FusionExecutor):
            by_parts = True

            def pays(self, calls):
                return not super().pays(calls)

    old = Old("old")
    assert old.fuses_decompositions
    with pytest.warns(DeprecationWarning, match=r"FusionExecutor\.pays is now is_profitable"):
        assert old.is_profitable([])


def test_a_hook_of_an_executor_may_be_called_by_its_old_name() -> None:
    class New(FusionExecutor):
        def is_profitable(self, calls):
            return True

    with pytest.warns(DeprecationWarning, match=r"New\.pays is now is_profitable"):
        assert New("new").pays([])


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("forge.hub", "Built", "BuiltLibrary"),
        ("forge.hub", "Loaded", "LoadedKernel"),
        ("forge.hub", "Resolved", "ResolvedKernel"),
        ("forge.hub", "Verified", "VerifiedKernel"),
        ("forge.hub", "cached", "cached_variants"),
        ("forge.hub", "loaded", "loaded_kernels"),
        ("forge.transforms", "heads", "fused_linear_cross_entropy"),
    ],
)
def test_a_name_of_0_1_0_still_works(module: str, old: str, new: str) -> None:
    owner = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{old} is now {module}\.{new}"):
        assert getattr(owner, old) is getattr(owner, new)
