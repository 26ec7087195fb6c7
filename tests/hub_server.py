"""A server on the loopback address that answers as the Hugging Face hub does."""

import hashlib
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


@contextmanager
def hub_server(name: str, revisions: Path):
    """Serve `revisions` (one folder for each branch) as the model `name`.

    Yields:
        The endpoint, and the list of files that were downloaded, as "branch/file".
    """
    downloaded: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_HEAD(self):
            self.do_GET(body=False)

        def do_GET(self, body: bool = True):
            path = self.path.split("?")[0]
            if path == f"/api/models/{name}/refs":
                branches = [_branch(folder.name) for folder in sorted(revisions.iterdir())]
                return self._json({"branches": branches, "tags": [], "converts": []}, body)
            if path.startswith(f"/api/models/{name}/revision/"):
                folder = self._folder(path.rsplit("/", 1)[1])
                return (
                    self._missing("RevisionNotFound")
                    if folder is None
                    else self._json(_info(name, folder), body)
                )
            if path == f"/api/models/{name}":
                folder = self._folder("main")
                return (
                    self._missing("RevisionNotFound")
                    if folder is None
                    else self._json(_info(name, folder), body)
                )
            if path.startswith(f"/{name}/resolve/"):
                commit, file = path.removeprefix(f"/{name}/resolve/").split("/", 1)
                folder = self._folder(commit)
                if folder is not None and (folder / file).is_file():
                    return self._file(folder, file, body)
                return self._missing("EntryNotFound")
            if path.startswith(f"/api/models/{name}/tree/"):
                folder = self._folder(path.split("/tree/", 1)[1].split("/")[0])
                return self._json([_entry(file) for file in sorted(folder.iterdir())], body)
            return self._missing("RepoNotFound")

        def _folder(self, name_or_commit: str) -> Path | None:
            for folder in revisions.iterdir():
                if name_or_commit in (folder.name, _commit(folder.name)):
                    return folder
            return None

        def _json(self, value, body: bool):
            self._send(200, json.dumps(value).encode(), body, {"Content-Type": "application/json"})

        def _missing(self, code: str):
            self._send(404, b"{}", True, {"X-Error-Code": code})

        def _file(self, folder: Path, file: str, body: bool):
            content = (folder / file).read_bytes()
            if body:
                downloaded.append(f"{folder.name}/{file}")
            headers = {
                "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Repo-Commit": _commit(folder.name),
            }
            self._send(200, content, body, headers)

        def _send(self, status: int, content: bytes, body: bool, headers: dict[str, str]):
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", downloaded
    finally:
        server.shutdown()
        server.server_close()


def _commit(branch: str) -> str:
    return hashlib.sha1(branch.encode()).hexdigest()


def _branch(branch: str) -> dict:
    return {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": _commit(branch)}


def _entry(file: Path) -> dict:
    content = file.read_bytes()
    entry = {
        "type": "file",
        "path": file.name,
        "size": len(content),
        "oid": hashlib.sha1(content).hexdigest(),
    }
    if file.suffix in (".safetensors", ".bin"):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


def _info(name: str, folder: Path) -> dict:
    siblings = []
    for file in sorted(folder.iterdir()):
        entry = _entry(file)
        sibling = {"rfilename": file.name, "size": entry["size"], "blobId": entry["oid"]}
        if "lfs" in entry:
            sibling["lfs"] = {"sha256": entry["lfs"]["oid"], "size": entry["size"], "pointerSize": 130}
        siblings.append(sibling)
    return {
        "id": name,
        "modelId": name,
        "sha": _commit(folder.name),
        "siblings": siblings,
        "tags": [],
        "private": False,
    }
