"""The kernels that each policy allows."""

import contextlib
from pathlib import Path

import pytest

from forge import hub
from forge.hub import client
from forge.testing.hub_server import Hub
from tests.hub.kernels import kernel


def test_by_default_a_publisher_must_be_trusted_by_the_hub(server: Hub) -> None:
    server.publish("stranger/rms", kernel())
    with pytest.raises(
        hub.RefusedError, match="stranger/rms@v1: 'stranger' is not among the trusted publishers; allow"
    ):
        hub.resolve("stranger/rms", version=1)
    assert not any("/tree/" in request or "/resolve/" in request for request in server.requests)


@pytest.mark.parametrize(
    "policy",
    [
        hub.Policy(repositories=("stranger/rms",)),
        hub.Policy(publishers=("stranger",)),
        hub.Policy(trust="any"),
        hub.Policy(repositories=["stranger/rms"], hub_publishers=False),
    ],
)
def test_the_user_may_name_repositories_and_publishers(server: Hub, policy: hub.Policy) -> None:
    server.publish("stranger/rms", kernel())
    assert hub.load(hub.resolve("stranger/rms", version=1, policy=policy)).double(1) == 2
    assert not any("organizations" in request for request in server.requests)


def test_the_hubs_word_on_publishers_can_be_left_out(server: Hub) -> None:
    server.publish("acme/rms", kernel())
    hub.resolve("acme/rms", version=1)
    with pytest.raises(hub.RefusedError, match="'acme' is not among the trusted publishers"):
        hub.resolve("acme/rms", version=1, policy=hub.Policy(hub_publishers=False, publishers=("other",)))


def test_locked_takes_nothing_without_a_lock(server: Hub) -> None:
    server.publish("acme/rms", kernel())
    with pytest.raises(hub.RefusedError, match='trust="locked" takes what a lock file holds, and no lock was given'):
        hub.resolve("acme/rms", version=1, policy=hub.Policy(trust="locked"))


def test_the_hub_is_asked_about_a_publisher_once_a_commit(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.publish("acme/rms", kernel())
    for _ in range(2):
        hub.resolve("acme/rms", version=1)
        client.forget()
    assert sum("organizations" in request for request in server.requests) == 1


def test_offline_an_unknown_publisher_is_refused_and_not_let_in(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kernels` allows it with a warning."""
    server.publish("stranger/rms", kernel())
    hub.resolve("stranger/rms", version=1, policy=hub.Policy(trust="any"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    client.forget()
    with pytest.raises(hub.RefusedError, match=r"nobody says whether 'stranger' is trusted: .*offline"):
        hub.resolve("stranger/rms", version=1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"trust": "anyone"}, ValueError, r"Policy: trust='anyone' is not in .*; did you mean 'any'\?"),
        ({"signatures": "on"}, ValueError, "Policy: signatures='on' is not in"),
        ({"publishers": "acme"}, TypeError, "Policy: publishers='acme' is one string, but must be a tuple of strings"),
    ],
)
def test_a_policy_that_means_nothing_is_an_error(options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        hub.Policy(**options)


WHO = {
    "a publisher that the Hub trusts": ("acme/rms", {}),
    "a repository that the user names": ("stranger/rms", {"repositories": ("stranger/rms",)}),
    "a publisher that the user names": ("stranger/rms", {"publishers": ("stranger",)}),
    "a stranger": ("stranger/rms", {"publishers": ("strange",), "repositories": ("stranger/other",)}),
}


@pytest.mark.parametrize("signatures", ["off", "warn", "enforce"])
@pytest.mark.parametrize("is_locked", [False, True], ids=["", "locked"])
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("trust", ["locked", "publisher", "any"])
@pytest.mark.one_in(3)
def test_what_is_trusted_goes_with_who_gives_it_a_lock_and_its_signature(
    server: Hub, tmp_path: Path, trust: str, who: str, is_locked: bool, signatures: str
) -> None:
    name, allowed = WHO[who]
    server.publish(name, kernel())
    lock = None
    if is_locked:
        lock = hub.lock_kernels([f"{name}@v1"], tmp_path / "lock", policy=hub.Policy(trust="any"))
        client.forget()
    policy = hub.Policy(trust=trust, signatures=signatures, **allowed)
    if not (is_locked or trust == "any" or (trust == "publisher" and who != "a stranger")):
        with pytest.raises(hub.RefusedError, match="no lock was given" if trust == "locked" else "is not among"):
            hub.resolve(name, version=1, lock=lock, policy=policy)
        assert not any("/resolve/" in request for request in server.requests), "a file was fetched"
        return
    resolved = hub.resolve(name, version=1, lock=lock, policy=policy)
    if signatures == "enforce":
        with pytest.raises(hub.IntegrityError, match="is not signed by a trusted publisher"):
            hub.load(resolved)
        assert hub.loaded_kernels() == ()
        return
    with pytest.warns(hub.HubNotice, match="is not signed") if signatures == "warn" else contextlib.nullcontext():
        assert hub.load(resolved).double(1) == 2


def test_a_lock_does_not_let_in_what_it_does_not_hold(server: Hub, tmp_path: Path) -> None:
    for name in ("acme/rms", "acme/other"):
        server.publish(name, kernel())
    lock = hub.lock_kernels(["acme/rms@v1"], tmp_path / "lock")
    for trust in ("locked", "publisher", "any"):
        with pytest.raises(hub.NotFoundError, match="acme/other@v1: is not in"):
            hub.resolve("acme/other", version=1, lock=lock, policy=hub.Policy(trust=trust))
