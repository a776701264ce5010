"""Public names that were renamed work for one version, with a warning."""

import pytest

from forge.support.deprecation import renamed_attributes


def test_an_old_name_gives_the_new_object_and_warns() -> None:
    lookup = renamed_attributes("forge", {"old": "new"}, {"new": 3}.__getitem__)
    with pytest.warns(DeprecationWarning, match=r"forge\.old is now forge\.new"):
        assert lookup("old") == 3


def test_a_name_that_never_was_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'forge' has no attribute 'other'"):
        renamed_attributes("forge", {"old": "new"}, dict.__getitem__)("other")
