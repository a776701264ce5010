"""A Hub on this machine's loopback, for tests and demos: it answers what huggingface_hub asks for kernels.

    with Hub(trusted={"acme"}) as hub:
        hub.publish_folder("acme/norms-cpu", "examples/kernels/norms-cpu")
        ...  # with HF_ENDPOINT=hub.url, set before huggingface_hub was imported

Only the folder build/ of a repository is served, which is all that is fetched of a kernel.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


def oid(content: bytes) -> str:
    """Return git's id of a blob."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repository:
    """A published kernel repository. listed: path → size, of files that are listed but have no content."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    listed: dict[str, int] = field(default_factory=dict)


@dataclass
class Hub:
    """Repositories by name, served while the `with` block runs, or between start() and stop().

    trusted: publishers whom the Hub calls trusted. requests: "METHOD path" of each, with their user agents in agents.
    status: answers every request where it is not None.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    trusted: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)
    status: int | None = None
    url: str = ""
    _server: ThreadingHTTPServer | None = None

    def publish(self, name: str, files: Mapping[str, bytes | str], branch: str = "v1") -> str:
        """Put a commit on a branch; files are those below build/."""
        repository = self.repositories.setdefault(name, Repository())
        contents = {f"build/{path}": data.encode() if isinstance(data, str) else data for path, data in files.items()}
        seed = json.dumps([name, len(repository.commits), sorted((path, oid(data)) for path, data in contents.items())])
        commit = hashlib.sha1(seed.encode()).hexdigest()
        repository.commits[commit] = contents
        repository.branches[branch] = commit
        return commit

    def publish_folder(self, name: str, folder: str | os.PathLike[str], branch: str = "v1") -> str:
        """Publish the content of a repository's build/ on a branch, but for hidden files and bytecode."""
        build = Path(folder) / "build"
        paths = [path.relative_to(build) for path in sorted(build.rglob("*")) if path.is_file()]
        visible = [path for path in paths if not path.name.startswith(".") and "__pycache__" not in path.parts]
        return self.publish(name, {path.as_posix(): (build / path).read_bytes() for path in visible}, branch)

    def __enter__(self) -> "Hub":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> "Hub":
        """Serve at `url`, an address of the loopback that is free."""
        server = self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True).start()
        return self

    def stop(self) -> None:
        """End serving, if it has not ended."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path = self.path.split("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        self.hub.agents.append(self.headers.get("user-agent", ""))
        if self.hub.status is not None:
            return self._answer(self.hub.status, b"{}")
        for pattern, method in _ROUTES:
            if match := re.fullmatch(pattern, path):
                return method(self, *(unquote(each or "") for each in match.groups()))
        return self._answer(404, b"{}")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def _missing(self, code: str) -> None:
        self._answer(404, b"{}", X_Error_Code=code)

    def overview(self, name: str) -> None:
        if name not in {repository.split("/")[0] for repository in self.hub.repositories}:
            return self._answer(404, b"{}")
        return self._json({"name": name, "trustedKernelPublisher": name in self.hub.trusted})

    def refs(self, name: str) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._missing("RepoNotFound")
        branches = [
            {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": commit}
            for branch, commit in repository.branches.items()
        ]
        return self._json({"branches": branches, "tags": [], "converts": []})

    def _commit(self, name: str, revision: str) -> tuple[Repository, str] | None:
        repository = self.hub.repositories.get(name)
        commit = repository and repository.branches.get(revision.removeprefix("refs/heads/"), revision)
        if repository is None or commit not in repository.commits:
            self._missing("RepoNotFound" if repository is None else "RevisionNotFound")
            return None
        return repository, commit

    def tree(self, name: str, revision: str, *_: str) -> None:
        if (entry := self._commit(name, revision)) is None:
            return None
        repository, commit = entry
        files = repository.commits[commit]
        folders = {"/".join(path.split("/")[:end]) for path in files for end in range(1, path.count("/") + 1)}
        entries = [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders)]
        entries += [
            {"type": "file", "path": path, "size": len(data), "oid": oid(data), **_lfs(path, data)}
            for path, data in files.items()
        ]
        entries += [{"type": "file", "path": path, "size": n, "oid": "0" * 40} for path, n in repository.listed.items()]
        return self._json(entries)

    def revision(self, name: str, revision: str) -> None:
        if (entry := self._commit(name, revision)) is not None:
            self._json({"id": name, "sha": entry[1], "siblings": []})

    def resolve(self, name: str, revision: str, path: str) -> None:
        if (entry := self._commit(name, revision)) is None:
            return None
        data = entry[0].commits[entry[1]].get(path)
        if data is None:
            return self._missing("EntryNotFound")
        etag = hashlib.sha256(data).hexdigest() if _lfs(path, data) else oid(data)
        return self._answer(200, data, ETag=f'"{etag}"', X_Repo_Commit=entry[1])


def _lfs(path: str, data: bytes) -> dict[str, object]:
    """Return the pointer of a native module: those lie in large-file storage on the Hub, which knows their sha256."""
    if not path.endswith(".so"):
        return {}
    return {"lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}}


_ROUTES = (
    (r"/api/organizations/([^/]+)/overview", _Handler.overview),
    (r"/api/kernels/([^/]+/[^/]+)/refs", _Handler.refs),
    (r"/api/kernels/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", _Handler.tree),
    (r"/api/kernels/([^/]+/[^/]+)/revision/([^/]+)", _Handler.revision),
    (r"/kernels/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", _Handler.resolve),
)
