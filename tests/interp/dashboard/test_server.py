"""The server's guard, and the command's refusals."""

import subprocess
import sys
import time

import pytest

from interp.dashboard.app import make_app
from interp.dashboard.cli import main
from interp.dashboard.desk import Desk
from interp.dashboard.server import check_host, guard, is_loopback, serve_on, url
from interp.errors import DetectionError

PORT = 8123


@pytest.fixture(scope="module")
def client(wired_run):
    server = make_app(Desk([str(wired_run)])).server
    guard(server, "127.0.0.1", PORT)
    return server.test_client()


def get(client, path="/", host=f"127.0.0.1:{PORT}", **headers):
    return client.get(path, headers={"Host": host, **headers})


@pytest.mark.parametrize(
    "host", [f"127.0.0.1:{PORT}", f"localhost:{PORT}", f"LOCALHOST:{PORT}", f"[::1]:{PORT}"]
)
def test_own_hosts_are_served(client, host):
    answer = get(client, host=host)
    assert answer.status_code == 200 and b"react-entry-point" in answer.data


@pytest.mark.parametrize(
    "host",
    ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:80", f"127.0.0.1.evil.example:{PORT}",
     f"evil@127.0.0.1:{PORT}", f"192.168.0.7:{PORT}", "[", "127.0.0.1:x", ""],
)  # fmt: skip
def test_foreign_hosts_are_refused(client, host):
    for path in ("/", "/_dash-layout", "/assets/dashboard.js"):
        answer = get(client, path, host=host)
        assert answer.status_code == 403, (host, path)
        assert answer.text.startswith("403: Host ") and answer.text.count("\n") == 1


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", f"https://127.0.0.1:{PORT}", "http://127.0.0.1:1"]
)
def test_foreign_origins_are_refused(client, origin):
    headers = {"Host": f"127.0.0.1:{PORT}", "Origin": origin}
    answer = client.post("/_dash-update-component", json={}, headers=headers)
    assert answer.status_code == 403 and f"Origin {origin!r} is not this page" in answer.text


def test_own_origin_is_served(client):
    answer = get(client, "/_dash-layout", Origin=f"http://127.0.0.1:{PORT}")
    assert answer.status_code == 200 and answer.json["props"]["id"] == "page"


@pytest.mark.parametrize(
    "path",
    ["/assets/../cli.py", "/assets/%2e%2e/cli.py", "/assets/..%2f..%2fcli.py", "/assets//etc/passwd",
     "/_dash-component-suites/dash/../../../../etc/passwd", "/_dash-component-suites/os/path.py",
     "/step_00000000/config.json", "/etc/passwd"],
)  # fmt: skip
def test_no_file_but_the_assets(client, path):
    answer = get(client, path)
    body = answer.get_data()
    assert b"root:" not in body and b"argparse" not in body and b"d_model" not in body
    # Unknown paths give the page itself, whose links are all its own; others an error.
    assert b"react-entry-point" in body or answer.status_code >= 400, (path, answer.status_code)


def test_headers_keep_everything_here(client):
    headers = get(client).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe-eval" not in policy
    assert "http" not in policy and "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    html = get(client).text
    assert "http://" not in html and "https://" not in html and "/assets/dashboard.js" in html


def test_what_a_page_asks_for_is_checked(client):
    body = {
        "output": "prompt-status.children...prompt-status.className",
        "outputs": [{"id": "prompt-status", "property": name} for name in ("children", "className")],
        "inputs": [
            {"id": "a-selection", "property": "data",
             "value": {"run": 7, "step": 0, "layer": 0, "reading": "pattern", "units": "head", "head": 0,
                       "values": "scored"}},
            {"id": "b-selection", "property": "data", "value": None},
            {"id": "prompt", "property": "data", "value": {}},
        ],
        "changedPropIds": ["prompt.data"],
    }  # fmt: skip
    body["output"] = f"..{body['output']}.."
    answer = client.post("/_dash-update-component", json=body, headers={"Host": f"127.0.0.1:{PORT}"})
    assert answer.status_code == 200, answer.text
    assert "model 7; open are 0..0" in answer.text


@pytest.mark.parametrize(
    "host, own",
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("me.lan", False)],
)  # fmt: skip
def test_loopback(host, own):
    assert is_loopback(host) is own
    if own:
        check_host(host, allow_remote=False)
    else:
        with pytest.raises(DetectionError, match="--allow-remote"):
            check_host(host, allow_remote=False)
        check_host(host, allow_remote=True)


def test_remote_hosts_are_addresses_or_the_name_given(wired_run):
    server = make_app(Desk([str(wired_run)])).server
    guard(server, "0.0.0.0", PORT)
    client = server.test_client()
    assert get(client, host=f"192.168.0.7:{PORT}").status_code == 200
    assert get(client, host=f"evil.example:{PORT}").status_code == 403


def test_free_port_and_a_port_in_use(wired_run):
    app = make_app(Desk([str(wired_run)]))
    server = serve_on(app.server, "127.0.0.1", 0)
    try:
        assert server.port > 0 and url("0.0.0.0", server.port) == f"http://127.0.0.1:{server.port}/"
        with pytest.raises(DetectionError, match=f"port {server.port}: .*in use; --port 0 takes a free"):
            serve_on(make_app(Desk([str(wired_run)])).server, "127.0.0.1", server.port)
    finally:
        server.server_close()


def test_bad_paths_and_hosts_are_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for argv, message in [
        ([str(tmp_path / "nothing")], "does not exist"),
        ([str(tmp_path / "empty")], "is empty"),
        ([str(tmp_path), "--host", "0.0.0.0"], "--allow-remote"),
    ]:
        assert main(argv) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith("attention-dashboard: error: ")
        assert message in err, err


@pytest.mark.parametrize("argv", [[], ["x", "--port", "70000"], ["x", "--port", "-1"], ["a", "b", "c"]])
def test_wrong_usage(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and "usage:" in capsys.readouterr().err


def test_help_imports_nothing_heavy():
    code = (
        "import sys, interp.dashboard.cli as c\n"
        "try: c.main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'dash', 'plotly', 'flask'} & set(sys.modules), 'heavy'"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--allow-remote" in done.stdout and time.perf_counter() - started < 5


def test_serves_and_prints_its_address(wired_run):
    command = [sys.executable, "-m", "interp.dashboard.cli", str(wired_run), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("attention-dashboard: http://127.0.0.1:"), line
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
