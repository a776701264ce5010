"""The requests that forge makes to the Hub, each with a clear error and a time limit."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forge.hub import compat
from forge.hub.errors import HubError, MalformedError, NotFoundError, Place, UnreachableError
from forge.hub.files import unsafe_path

T = TypeVar("T")
PROBE_SECONDS = 3.0
REMEMBER_SECONDS = 60.0


@dataclass(frozen=True)
class ListedFile:
    """A file of a commit as the Hub lists it. pin: "sha256:…" of a large file, "git:…" (its blob id) of another."""

    size: int
    pin: str


_refs: dict[tuple[str, str], dict[str, str]] = {}
_unreachable: dict[str, tuple[float, str]] = {}


def forget() -> None:
    """Forget the branches of repositories and whether the Hub is reachable, so that both are requested again."""
    _refs.clear()
    _unreachable.clear()


def refs(repository: str) -> dict[str, str]:
    """Return the commit of each branch and tag, requested once per process.

    Every use of the Hub begins with this request. It has its own time limit because the client has none: an unreachable
    Hub is detected here, and not contacted again for a minute.
    """
    api = compat.hub_api()
    key = (api.endpoint, repository)
    if key not in _refs:
        _refs[key] = _ask(repository, lambda: _get_refs(api, repository), api.endpoint)
    return _refs[key]


def _get_refs(api: Any, repository: str) -> dict[str, str]:
    utils, token = compat.library("huggingface_hub.utils"), compat.library("huggingface_hub").get_token()
    response = utils.get_session().get(
        f"{api.endpoint}/api/kernels/{repository}/refs",
        headers={"authorization": f"Bearer {token}"} if token else {},
        timeout=PROBE_SECONDS,
    )
    utils.hf_raise_for_status(response)
    values = response.json()
    return {each["name"]: each["targetCommit"] for kind in ("tags", "branches") for each in values.get(kind, [])}


def files(repository: str, commit: str) -> dict[str, ListedFile]:
    """List build/ of a commit. Raises MalformedError for a path that leaves it."""
    api = compat.hub_api()

    def ask() -> dict[str, ListedFile]:
        entries = api.list_repo_tree(repository, repo_type="kernel", revision=commit, recursive=True)
        return {
            each.path: ListedFile(each.size, f"sha256:{each.lfs.sha256}" if each.lfs else f"git:{each.blob_id}")
            for each in entries
            if hasattr(each, "blob_id")
        }

    listing = _ask(repository, ask, api.endpoint)
    for path in listing:
        if reason := unsafe_path(path):
            raise MalformedError(f"{Place(repository, commit)}: the path {path!r} in its listing {reason}")
    return {path: each for path, each in listing.items() if path.startswith("build/")}


def is_trusted(publisher: str) -> bool:
    """Return whether the Hub marks an organization as a trusted publisher of kernels; users are never trusted
    publishers."""
    api = compat.hub_api()
    try:
        overview = _ask(publisher, lambda: api.get_organization_overview(publisher), api.endpoint)
    except NotFoundError:
        return False
    return bool(getattr(overview, "trustedKernelPublisher", False))


def download(repository: str, commit: str, variant: str, cache: Path) -> None:
    """Fetch a variant into the cache, with huggingface_hub's own progress bars."""
    api = compat.hub_api()
    _ask(
        repository,
        lambda: api.snapshot_download(
            repository,
            repo_type="kernel",
            revision=commit,
            allow_patterns=f"build/{variant}/*",
            ignore_patterns=["*.pyc", "**/__pycache__/**"],
            cache_dir=cache,
        ),
        api.endpoint,
    )


def _ask(what: str, question: Callable[[], T], endpoint: str) -> T:
    """Return the answer. Raises NotFoundError, MalformedError, or UnreachableError; the latter is cached for a minute,
    so its message does not name the request."""
    errors = compat.library("huggingface_hub.errors")
    until, reason = _unreachable.get(endpoint, (0.0, ""))
    if time.monotonic() < until:
        raise UnreachableError(f"{endpoint} did not answer a moment ago: {reason}")
    try:
        return question()
    except errors.OfflineModeIsEnabled as error:
        raise UnreachableError(f"{endpoint} is not asked: offline (HF_HUB_OFFLINE is set)") from error
    except errors.LocalEntryNotFoundError as error:  # an EntryNotFoundError that means: no answer
        raise UnreachableError(f"{endpoint} does not give it: {_first_line(error)}") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise NotFoundError(f"{what}: {_first_line(error)}") from error
    except compat.transport_errors() as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status == 404:
            raise NotFoundError(f"{what}: {endpoint} does not have it") from error
        if status is None:
            _unreachable[endpoint] = (time.monotonic() + REMEMBER_SECONDS, _first_line(error))
        raise UnreachableError(f"{endpoint} does not give it: {_first_line(error)}") from error
    except OSError as error:
        raise HubError(f"{what}: cannot be written to the cache: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedError(f"{what}: the answer of {endpoint} cannot be read: {error!r}") from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
