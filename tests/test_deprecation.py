"""Public names that were renamed work for one version, with a warning."""

import importlib

import pytest

from forge import prims
from forge.executors import FusionExecutor
from forge.hub import Policy
from forge.ir.symbol import BoundSymbol, Tag
from forge.ir.trace import Trace
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


def test_an_executor_may_set_and_read_a_hook_by_its_old_name() -> None:
    class Old(FusionExecutor):
        def __init__(self, name):
            super().__init__(name)
            self.by_parts = True

    with pytest.warns(DeprecationWarning, match=r"FusionExecutor\.by_parts is now fuses_decompositions"):
        old = Old("old")
    assert old.fuses_decompositions
    assert not FusionExecutor.fuses_decompositions
    with pytest.warns(DeprecationWarning, match=r"FusionExecutor\.by_parts is now fuses_decompositions"):
        assert old.by_parts
    with pytest.warns(DeprecationWarning, match=r"FusionExecutor\.checks is now checks_regions"):
        assert not Old.checks


def test_a_hook_set_by_its_new_name_is_read_by_the_old_one() -> None:
    executor = FusionExecutor("any")
    executor.checks_regions = True
    with pytest.warns(DeprecationWarning, match=r"FusionExecutor\.checks is now checks_regions"):
        assert executor.checks


@pytest.mark.parametrize(
    ("old", "new"), [("ATOMIC", "OPAQUE_TO_PASSES"), ("SINGLE", "NO_FUSE"), ("MAY_WRITE", "DONATES")]
)
def test_a_tag_has_its_old_name(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"Tag\.{old} is now {new}"):
        assert getattr(Tag, old) is Tag[new]
    assert old not in Tag.__members__


def test_a_call_may_be_asked_for_a_tag() -> None:
    call = BoundSymbol(prims.exp, (), {}, None, tags=frozenset({Tag.NO_GRAD}))
    with pytest.warns(DeprecationWarning, match=r"BoundSymbol\.has_tag\(tag\) is now tag in .*all_tags"):
        assert call.has_tag(Tag.NO_GRAD)
    with pytest.warns(DeprecationWarning, match="has_tag"):
        assert not call.has_tag(Tag.RANDOM)


def test_tags_may_be_set_by_the_old_name() -> None:
    trace = Trace()
    with pytest.warns(DeprecationWarning, match=r"Trace\.tagged is now set_tags"), trace.tagged([Tag.NO_GRAD]):
        assert trace.tags == {Tag.NO_GRAD}
    assert not trace.tags


def test_a_policy_adds_imports_by_the_old_name() -> None:
    with pytest.warns(DeprecationWarning, match=r"Policy\.allowing is now with_imports"):
        assert Policy().allowing(["einops"]).imports == ("einops",)


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
