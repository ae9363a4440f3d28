"""A local server for the part of the Hugging Face hub's protocol that downloads use."""

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class LocalHub:
    """Repositories by (kind, name), each with its commits, oldest first.

    Attributes:
        url:       value for HF_ENDPOINT.
        requested: paths of the fetched files, in order.
    """

    def __init__(self, directory: Path, server: ThreadingHTTPServer) -> None:
        self.directory, self.requested, self._server = directory, [], server
        self.url = f"http://127.0.0.1:{server.server_port}"
        self._commits: dict[tuple[str, str], dict[str, Path]] = {}

    def stop(self) -> None:
        """Stop answering, like a hub that cannot be reached."""
        self._server.shutdown()
        self._server.server_close()

    def push(self, kind: str, name: str, source: Path) -> str:
        """Add the files of a directory as the newest commit of a repository. Return its hash."""
        commits = self._commits.setdefault((kind, name), {})
        commit = hashlib.sha1(f"{kind}/{name}/{len(commits)}".encode()).hexdigest()
        commits[commit] = Path(shutil.copytree(source, self.directory / commit))
        return commit

    def find(self, kind: str, name: str, revision: str) -> tuple[str, Path] | None:
        commits = self._commits.get((kind, name), {})
        commit = next(reversed(commits), "") if revision == "main" else revision
        return (commit, commits[commit]) if commit in commits else None

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body."""
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        if parts[0] == "api":
            kind, name = parts[1].removesuffix("s"), "/".join(parts[2:4])
            what, revision = (parts[4:6] + ["revision", "main"])[:2] if len(parts) > 4 else ("revision", "main")
            if (kind, name) not in self._commits:
                return 404, {"X-Error-Code": "RepoNotFound"}, b""
            if (found := self.find(kind, name, revision)) is None:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            commit, root = found
            files = [file for file in sorted(root.rglob("*")) if file.is_file()]
            listed = [
                {"type": "file", "path": file.relative_to(root).as_posix(), "size": file.stat().st_size}
                | {"oid": _etag(file)}
                for file in files
            ]
            body = listed if what == "tree" else {"id": name, "sha": commit, "siblings": []}
            return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()
        kind, parts = ("dataset", parts[1:]) if parts[0] == "datasets" else ("model", parts)
        found = self.find(kind, "/".join(parts[:2]), parts[3])
        file = None if found is None else found[1].joinpath(*parts[4:])
        if found is None or file is None or not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": found[0]}, file.read_bytes()


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def serving(directory: Path) -> Iterator[LocalHub]:
    """Yield a hub that answers until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path)
            if self.command == "GET" and "ETag" in headers:
                hub.requested.append(self.path.partition("/resolve/")[2].partition("/")[2])
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub = LocalHub(directory, server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            hub.stop()
