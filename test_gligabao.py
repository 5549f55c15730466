"""The tests of gligabao, in the order of its rooms, on real sockets, files, databases and a real browser.

    pip install '.[test]' && python -m pytest

PostgreSQL is a throwaway cluster where its programs are found, or the server that
GLIGABAO_TEST_POSTGRES names; with GLIGABAO_TEST_REQUIRE=1 nothing is skipped for want of it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import errno
import fcntl
import functools
import gc
import hashlib
import http.client
import inspect
import itertools
import json
import logging
import os
import platform
import py_compile
import random
import re
import resource
import select
import selectors
import shlex
import shutil
import signal
import socket
import sqlite3
import stat
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import gligabao
from gligabao import (
    Context,
    DeployRequest,
    DeployTrainedModelResult,
    TrainedModel,
    TrainedModelFile,
    TrainingError,
)

HERE = Path(__file__).parent
MODULE = HERE / "gligabao.py"
API = "/v1/gb/training"
REQUIRED = os.environ.get("GLIGABAO_TEST_REQUIRE") == "1"
DEPLOYMENT_KEYS = "id trained_model_id deployer options status dir ref details error duration_ms created_at completed_at".split()

# ---- what the tests stand on ---------------------------------------------------------------------


def payload(size: int, seed: object = 0) -> bytes:
    """Bytes that differ everywhere and between seeds."""
    blocks = (hashlib.sha256(f"{seed}/{n}".encode()).digest() for n in range(size // 32 + 1))
    return b"".join(blocks)[:size]


def listed(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [
        {"path": path, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for path, data in files.items()
    ]


def model_of(files: dict[str, bytes], job_id: str = "job-1") -> TrainedModel:
    recorded = tuple(TrainedModelFile(**entry) for entry in listed(files))
    return TrainedModel(1, "a model", job_id, path=f"trained/{job_id}", files=recorded)


def until(what: Callable[[], Any], timeout: float = 10) -> Any:
    """Wait for something that happens elsewhere; return its value."""
    end = time.monotonic() + timeout
    while not (value := what()):
        assert time.monotonic() < end, f"{inspect.getsource(what).strip()} did not come true"
        threading.Event().wait(0.01)
    return value


def on_disk(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


class Answer:
    """One answer, its body read as strict JSON."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        assert self.headers["Content-Type"] == "application/json", self.body
        return json.loads(self.body.decode(), parse_constant=pytest.fail)

    @property
    def error(self) -> str:
        text = self.json["error"]
        assert isinstance(text, str)
        assert text
        return text


def request(
    url: str, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> Answer:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    with contextlib.closing(connection):
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())


@pytest.fixture(scope="session", autouse=True)
def hasty() -> None:
    """Let servers look more often, and so stop sooner; those in processes of their own do not."""
    gligabao.LOOK_INTERVAL_S = 0.02


class App:
    """A server and what a client does with it."""

    def __init__(
        self, server: gligabao.Server, root: Path, events: list[gligabao.SystemEvent]
    ) -> None:
        self.url, self.root, self.events = server.url, root, events
        self.port = urlsplit(self.url).port or 0

    def __call__(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return request(self.url, method, API + path, body, names)

    def record(self, files: dict[str, bytes], job_id: str = "job-1", **fields: object) -> int:
        answer = self("POST", "/models", {"job_id": job_id, "files": listed(files), **fields})
        assert answer.status == 201, answer.body
        return int(answer.json["id"])

    def deploy(self, model: int, deployer: str = "ok", options: object = None) -> Answer:
        return self(
            "POST", f"/models/{model}/deployments", {"deployer": deployer, "options": options}
        )

    def history(self, model: int) -> list[dict[str, Any]]:
        return list(self("GET", f"/models/{model}/deployments").json["deployments"])

    def newest(self, model: int) -> dict[str, Any]:
        return (self.history(model) or [{}])[0]

    def progress(self, model: int) -> dict[str, int]:
        return dict(self.newest(model).get("progress", {}))

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def start_deploy(
        self, model: int, deployer: str = "ok", options: object = None
    ) -> socket.socket:
        """Send a request for a deployment, and leave it unanswered."""
        body = json.dumps({"deployer": deployer, "options": options}).encode()
        connection = self.connect()
        head = f"POST {API}/models/{model}/deployments HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection

    def failed(self, model: int, answer: Answer) -> dict[str, Any]:
        """Check the four things that every recorded failure leaves; return the stored deployment."""
        assert answer.status == 502, answer.body
        deployment = answer.json["deployment"]
        assert answer.error == deployment["error"]
        assert [deployment[key] for key in ("status", "ref", "details")] == ["failed", "", {}]
        assert deployment in self.history(model)
        event = next(one for one in self.events if one.fields["deploy_id"] == deployment["id"])
        assert (event.type, event.fields["error"]) == ("training.model_deploy.failed", answer.error)
        assert not list(self.root.rglob(".fetch-*"))
        return dict(deployment)


def ok(ctx: Context, req: gligabao.DeployTrainedModelRequest) -> DeployTrainedModelResult:
    """Does nothing, and says so.

    This line is no description."""
    return DeployTrainedModelResult(f"ok-{req.deploy_id}", {"files": len(req.model.files)})


def broken(ctx: Context, req: gligabao.DeployTrainedModelRequest) -> None:
    raise RuntimeError("the bucket is on fire")


def echo(ctx: Context, req: gligabao.DeployTrainedModelRequest) -> DeployTrainedModelResult:
    model = dataclasses.asdict(req.model)
    return DeployTrainedModelResult(
        "echo", {"options": req.options, "model": model, "id": req.deploy_id}
    )


def patient(ctx: Context, req: gligabao.DeployTrainedModelRequest) -> None:
    ctx.wait(30)
    ctx.raise_if_cancelled()


DEPLOYERS: dict[str, Any] = {"ok": ok, "broken": broken, "echo": echo, "patient": patient}


class Sidecar:
    """A sidecar of raw sockets: serves `files`, and misbehaves by `script`, one entry a request of a file."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], bytes] = {}
        self.script: dict[str, list[Callable[[socket.socket, bytes, int], None]]] = {}
        self.asked: list[str] = []
        self.heads: list[str] = []
        self.sent = 0
        self.release = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self._accept, daemon=True)
        self.thread.start()

    def add(self, files: dict[str, bytes], job_id: str = "job-1") -> None:
        self.files |= {(f"trained/{job_id}", path): data for path, data in files.items()}

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(20)
            head = b""
            while b"\r\n\r\n" not in head:
                if not (more := connection.recv(4096)):
                    return
                head += more
            text = head.decode("latin-1")
            query = parse_qs(urlsplit(text.split()[1]).query)
            file = query["file"][0]
            self.asked.append(file)
            self.heads.append(text)
            ranged = re.search(r"Range: bytes=(\d+)-", text)
            data = self.files.get((query["model_path"][0], file), b"")
            script = self.script.get(file)
            act = script.pop(0) if script else good
            act(connection, data, int(ranged[1]) if ranged else 0)

    def close(self) -> None:
        self.release.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(5)


def head(status: int, *lines: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} X", "Connection: close", *lines, "", ""]).encode()


def good(connection: socket.socket, data: bytes, start: int) -> None:
    if start:
        lines = (
            f"Content-Length: {len(data) - start}",
            f"Content-Range: bytes {start}-{len(data) - 1}/{len(data)}",
        )
        connection.sendall(head(206, *lines) + data[start:])
    else:
        connection.sendall(head(200, f"Content-Length: {len(data)}") + data)


def says(reply: bytes) -> Callable[[socket.socket, bytes, int], None]:
    return lambda connection, data, start: connection.sendall(reply)


def whole(
    data: bytes, status: int = 200, *lines: str
) -> Callable[[socket.socket, bytes, int], None]:
    return says(head(status, f"Content-Length: {len(data)}", *lines) + data)


def cut(count: int) -> Callable[[socket.socket, bytes, int], None]:
    """Announce everything that is asked for, send `count` bytes of it, and close."""

    def act(connection: socket.socket, data: bytes, start: int) -> None:
        status = 206 if start else 200
        lines = [f"Content-Length: {len(data) - start}"]
        if start:
            lines.append(f"Content-Range: bytes {start}-{len(data) - 1}/{len(data)}")
        connection.sendall(head(status, *lines) + data[start : start + count])

    return act


@pytest.fixture
def sidecar() -> Iterator[Sidecar]:
    made = Sidecar()
    yield made
    made.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    with contextlib.ExitStack() as held:
        yield held.enter_context(Cluster.found())


class Cluster:
    """A throwaway PostgreSQL cluster on loopback."""

    @staticmethod
    @contextlib.contextmanager
    def found() -> Iterator[Cluster]:
        programs = next(
            (
                path
                for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
                if (path / "initdb").exists()
            ),
            Path(shutil.which("initdb") or "/nowhere/initdb").parent,
        )
        if not (programs / "initdb").exists():
            if REQUIRED:
                pytest.fail("initdb is missing, and GLIGABAO_TEST_REQUIRE is set")
            pytest.skip("PostgreSQL's initdb is not on this machine")
        with tempfile.TemporaryDirectory(prefix="gligabao-pg-", ignore_cleanup_errors=True) as home:
            cluster = Cluster(programs, Path(home))
            try:
                yield cluster
            finally:
                cluster.control("stop", "-m", "immediate")

    def __init__(self, programs: Path, home: Path) -> None:
        self.programs, self.home = programs, home
        self.account: dict[str, Any] = {}
        if os.getuid() == 0:  # PostgreSQL refuses to run as root
            shutil.chown(home, "postgres", "postgres")
            self.account = {"user": "postgres", "group": "postgres", "extra_groups": []}
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        words = "-A trust -U postgres --no-sync -E UTF8 --locale=C".split()
        self.run("initdb", "-D", home / "data", *words)
        self.control("start")

    def run(self, program: str, *words: object) -> None:
        done = subprocess.run(
            [self.programs / program, *map(str, words)],
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            **self.account,
        )
        assert done.returncode == 0, done.stdout.decode()

    def control(self, action: str, *words: str) -> None:
        flags = f"-p {self.port} -k {self.home} -c listen_addresses=127.0.0.1 -c fsync=off -c timezone=Asia/Kolkata"
        where = ("-D", self.home / "data", "-l", self.home / "log")
        self.run("pg_ctl", *where, "-w", "-o", flags, *words, action)

    def url(self, name: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}"


numbers = iter(range(1, 1_000_000))


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the records of a test are kept: each test that uses this runs on both databases."""
    if request.param == "sqlite":
        return str(tmp_path / "gligabao.db")
    import psycopg

    if server := os.environ.get("GLIGABAO_TEST_POSTGRES"):
        make, base = server, server.rpartition("/")[0]
    else:
        cluster = request.getfixturevalue("postgres")
        make, base = cluster.url(), cluster.url("")[:-1]
    name = f"gligabao_test_{os.getpid()}_{next(numbers)}"
    with psycopg.connect(make, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]
    return f"{base}/{name}"


@contextlib.contextmanager
def direct(database: str) -> Iterator[Callable[..., list[Any]]]:
    """A way into the database past gligabao."""
    if "://" in database:
        import psycopg

        with psycopg.connect(database, autocommit=True) as connection:

            def run(sql: str, *values: object) -> list[Any]:
                cursor = connection.execute(sql.replace("?", "%s"), values)  # type: ignore[call-overload]
                return cursor.fetchall() if cursor.description else []

            yield run
    else:
        with contextlib.closing(
            sqlite3.connect(database, timeout=10, isolation_level=None)
        ) as lite:
            yield lambda sql, *values: lite.execute(sql, values).fetchall()


def plant(database: str, job_id: str, files: object, **columns: object) -> int:
    """Write a model straight into the table, whatever the API thinks of it."""
    row = {"name": job_id, "job_id": job_id, "params": "{}", "path": f"trained/{job_id}"}
    row |= {
        "files": files if isinstance(files, str | None) else json.dumps(files),
        "created_at": "2026-01-02T03:04:05Z",
    }
    row |= columns  # type: ignore[arg-type]
    with direct(database) as sql:
        marks = ", ".join("?" * len(row))
        sql(f"INSERT INTO gb_trained_models ({', '.join(row)}) VALUES ({marks})", *row.values())
        return int(sql("SELECT max(id) FROM gb_trained_models")[0][0])


@contextlib.contextmanager
def served(home: Path, sidecar: Sidecar, /, **options: Any) -> Iterator[App]:
    """Run a server with the test's sidecar, deployers and an event hook that keeps what it gets."""
    events: list[gligabao.SystemEvent] = []
    usual = {
        "port": 0,
        "training": True,
        "database": str(home / "gligabao.db"),
        "sidecar": sidecar.url,
        "trained_model_deploy_dir": home / "trained_models",
        "trained_model_deployers": DEPLOYERS,
        "system_event": events.append,
    }
    options = usual | options
    with gligabao.Server(**options) as server:
        yield App(server, Path(options["trained_model_deploy_dir"]), events)


@pytest.fixture
def serve(tmp_path: Path, sidecar: Sidecar) -> Iterator[Callable[..., App]]:
    """Start servers that run until the test ends."""
    with contextlib.ExitStack() as held:
        yield lambda **options: held.enter_context(served(tmp_path, sidecar, **options))


@pytest.fixture
def app(serve: Callable[..., App], database: str) -> App:
    """A server, on each of the databases."""
    return serve(database=database)


@pytest.fixture
def lite(serve: Callable[..., App]) -> App:
    """A server on SQLite, for what no database has a part in."""
    return serve()


def run(*words: object, cwd: Path, env: dict[str, str] | None = None, code: int | None = 0) -> Any:
    """Run the module as a program of its own; return what it printed."""
    done = subprocess.run(
        [sys.executable, str(MODULE), *map(str, words)],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert code is None or done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


THREE = {
    "adapter_config.json": b'{"r": 8}',
    "adapter_model.safetensors": payload(3000),
    "tokenizer/vocab.txt": payload(500, 1),
}

# ---- the module ----------------------------------------------------------------------------------


def test_module_reads_bottom_up_without_later_names() -> None:
    tree = ast.parse(MODULE.read_text())
    defined = {
        node.name: node.lineno
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    notes = {
        id(name)
        for node in ast.walk(tree)
        for note in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if note
        for name in ast.walk(note)
    }
    later = [
        f"line {name.lineno} uses {name.id}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and id(name) not in notes
        if defined.get(name.id, 0) > (node.end_lineno or 0)
    ]
    assert later == []


def test_cards_of_the_rooms_tell_what_each_uses() -> None:
    source = MODULE.read_text()
    rooms = re.findall(r"^# ---- (?:errors and )?(.+?) -+\n((?:# .*\n)+)", source, re.MULTILINE)
    listed = " ".join(source.split("banner of its own, are: ")[1].split(".")[0].split())
    assert [name for name, _ in rooms] == listed.replace("errors and ", "").split("; ")
    starts = [source[: source.index(card)].count("\n") for _, card in rooms]
    tree = ast.parse(source)

    def room(node: ast.stmt) -> str:
        return str(
            [name for (name, _), at in zip(rooms, starts, strict=True) if at < node.lineno][-1]
        )

    nodes = [node for node in tree.body if node.lineno > starts[0]]
    defined = {
        name.id if isinstance(name, ast.Name) else name: room(node)
        for node in nodes
        for name in [getattr(node, "name", None), *getattr(node, "targets", [])]
        if name
    }
    for name, card in rooms:
        known = re.search(r"May use:\s+(.*?)\.", card.replace("\n# ", " "))
        uses = {
            defined[word.id]
            for node in nodes
            if room(node) == name
            for word in ast.walk(node)
            if isinstance(word, ast.Name) and word.id in defined
        } - {name, "limits"}
        if known and "all above" not in known[1]:
            assert uses == {*known[1].split(", ")} - {"limits", "nothing"}, name


def test_public_names_are_documented_and_listed() -> None:
    public = {
        name
        for name, value in vars(gligabao).items()
        if getattr(value, "__module__", "") == "gligabao"
        and not name.startswith("_")
        and callable(value)
    }
    assert public - {"audit_model", "record_model"} <= {*gligabao.__all__}
    named = [
        getattr(gligabao, name) for name in gligabao.__all__ if name != "DeployTrainedModelFunc"
    ]
    assert [value for value in named if not value.__doc__] == []


def test_module_copied_alone_imports_quietly_and_only_the_standard_library(tmp_path: Path) -> None:
    shutil.copy(MODULE, tmp_path)
    code = (  # of the standard library is also what lies beside it, such as a helper without a name
        "import os, sys, threading; before = {*sys.modules}; sys.path.insert(0, '.'); import gligabao;"
        "files = {name: getattr(sys.modules[name], '__file__', None) for name in {*sys.modules} - before};"
        "own = {name for name, file in files.items() if file and os.path.dirname(file) == os.path.dirname(os.__file__)};"
        "new = {name.split('.')[0] for name in {*files} - own} - {*sys.stdlib_module_names};"
        "print(sorted(new), threading.active_count())"
    )
    done = subprocess.run(
        [sys.executable, "-IBc", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("['gligabao'] 1\n", "")


# ---- errors and types ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "Infinity",
        "1e400",
        '"\\ud800"',
        "\ufeff1",
        "[" * 301 + "]" * 301,
        "[" * 20_000,
        "9" * 5000,
        "{} {}",
        "",
    ],
    ids=str,
)
def test_json_in_is_strict(text: str) -> None:
    with pytest.raises(ValueError, match="."):
        gligabao._decode_json(text.encode())


def test_json_in_takes_300_levels_and_keeps_the_kinds_of_numbers() -> None:
    deep = "[" * 300 + "]" * 300
    assert json.dumps(gligabao._decode_json(deep.encode())) == deep
    assert str(
        gligabao._decode_json(b'[1.0, 1, 12345678901234567890123, -0.0, {"a": 1, "a": 2}]')
    ) == ("[1.0, 1, 12345678901234567890123, -0.0, {'a': 2}]")


def test_json_in_that_is_not_utf8_says_where() -> None:
    with pytest.raises(ValueError, match="not UTF-8 at byte 1"):
        gligabao._decode_json(b'"\x97"')


# ---- context -------------------------------------------------------------------------------------


def test_context_keeps_the_first_reason_and_calls_its_acts_once() -> None:
    ctx, calls = Context(), []
    with ctx._on_cancel(lambda: calls.append("act")):
        assert not ctx.wait(0)
        ctx.cancel("first")
        ctx.cancel("second")
    with ctx._on_cancel(lambda: calls.append("late")):
        pass
    assert (ctx.cancelled, ctx.reason, ctx.wait(), calls) == (True, "first", True, ["act", "late"])
    with pytest.raises(gligabao.Cancelled, match="first"):
        ctx.raise_if_cancelled()


def test_inner_context_ends_with_the_outer_one_and_at_its_limit() -> None:
    ctx = Context()
    with ctx._inner(0.01) as inner:
        assert inner.wait(10)
    assert not ctx.cancelled
    with ctx._inner() as inner:
        ctx.cancel("over")
        assert inner.reason == "over"


REPORTS = {
    "words": (("uploading", 0.25), ("uploading", 0.25)),
    "no fraction": (("uploading",), ("uploading", None)),
    "whole numbers": (("done", 1), ("done", 1.0)),
    "more than all": (("x", 1.01), ("x", None)),
    "less than nothing": (("x", -1), ("x", None)),
    "no number": (("x", float("nan")), ("x", None)),
    "text": (("x", "0.5"), ("x", None)),
    "a boolean": (("x", True), ("x", None)),
    "a long text": (("x" * 201, 0), ("x" * 199 + "…", 0.0)),
    "no text": ((5, None), ("5", None)),
}


@pytest.mark.parametrize(("given", "kept"), REPORTS.values(), ids=REPORTS)
def test_report_is_kept_as_far_as_it_makes_sense(given: Any, kept: Any) -> None:
    outer = Context()
    assert outer.reported is None
    with outer._inner() as inner:
        inner.report("first", 0.1)
        inner.report(*given)
    assert inner.reported == outer.reported == kept


def test_report_never_fails() -> None:
    class Odd:
        def __str__(self) -> str:
            raise SystemExit("no text")

        def __le__(self, other: object) -> bool:
            raise ValueError("no number")

        __ge__ = __le__

    ctx = Context()
    ctx.report(Odd(), Odd())  # type: ignore[arg-type]
    assert ctx.reported == ("", None)


# ---- wire ----------------------------------------------------------------------------------------


def raw(app: App, data: bytes, count: int = 1) -> list[Answer]:
    """Send bytes as they are; return up to `count` answers."""
    answers: list[Answer] = []
    with app.connect() as connection, connection.makefile("rb") as file:
        connection.sendall(data)
        while len(answers) < count and (line := file.readline()):
            headers = http.client.parse_headers(file)
            body = file.read(int(headers["Content-Length"]))
            answers.append(Answer(int(line.split()[1]), headers, body))
    return answers


FRAMING = {
    "no Host": b"GET /health HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    "no header line": b"GET /health HTTP/1.1\r\nHost: localhost\r\nnonsense\r\nContent-Length: 5\r\n\r\n",
    "a folded line": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n",
    "a blank before the colon": b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length : 5\r\n\r\n",
    "a lone CR": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\rContent-Length: 5\r\n\r\n",
    "a NUL": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n",
    "a name that is no token": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX@: a\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n",
    "HTTP/9.9": b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "another kind of blank": b"GET /health\xa0 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a control in the target": b"GET /health\x1f HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "three words too many": b"GET /health HTTP/1.1 x y z\r\nHost: localhost\r\n\r\n",
    "a long line": b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a long header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
    "101 headers": b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: x\r\n" * 100 + b"\r\n",
    **{
        f"Transfer-Encoding {value!r}": f"POST {API}/models HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: {value}\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode()
        for value in (
            "",
            "xchunked",
            "\r\nTransfer-Encoding: chunked",
            "chunked\r\nContent-Length: 12",
        )
    },
    **{
        f"Content-Length {value}": f"POST {API}/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: {value}\r\n\r\n{{}}".encode()
        for value in (
            *"-1 +2 0x2 2_0 1048577".split(),
            "2, 2",
            "",
            "9" * 30,
            "2\r\nContent-Length: 2",
        )
    },
}


@pytest.mark.parametrize("data", FRAMING.values(), ids=FRAMING)
def test_bad_framing_is_400_and_the_end_of_the_connection(lite: App, data: bytes) -> None:
    (answer,) = raw(lite, data + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 2)
    assert (answer.status, answer.headers["Connection"]) == (400, "close")
    assert answer.error


@pytest.mark.parametrize(
    "kind",
    [
        "multipart/form-data",
        "message/rfc822",
        "multipart/x; boundary*=idna''%ff",
        "text/plain",
        "x",
    ],
)
def test_type_of_a_body_does_not_matter(lite: App, kind: str) -> None:
    body = {"job_id": "job-1", "files": listed({"a": b"1"})}
    assert lite("POST", "/models", body, Content_Type=kind).status == 201


def test_refused_head_request_has_no_body(lite: App) -> None:
    with lite.connect() as connection, connection.makefile("rb") as file:
        connection.sendall(b"HEAD /health HTTP/1.1\r\nno header\r\n\r\n")
        assert file.read().endswith(b"\r\nConnection: close\r\n\r\n")


def test_empty_line_after_a_body_is_no_request(lite: App) -> None:
    data = f"GET {API}/deployers HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{{}}\r\n"
    answers = raw(lite, data.encode() + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 2)
    assert [answer.status for answer in answers] == [200, 200]


def test_chunked_body_is_411_and_the_end_of_the_connection(lite: App) -> None:
    head = f"POST {API}/models HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n"
    (answer,) = raw(lite, head.encode(), 2)
    assert (answer.status, answer.headers["Connection"]) == (411, "close")


def test_unread_body_does_not_become_the_next_request(lite: App) -> None:
    hidden = b"GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"
    first = f"POST {API}/models/99/deployments HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(hidden)}\r\n\r\n"
    second = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answers = raw(lite, first.encode() + hidden + second, 3)
    assert [answer.status for answer in answers] == [404, 200]


def test_expect_100_is_answered_before_the_body_only_where_the_body_is_wanted(lite: App) -> None:
    head = (
        "POST {} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    )
    with lite.connect() as connection:
        connection.sendall(head.format(f"{API}/models").encode())
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"{}")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")
    (answer,) = raw(lite, head.format(f"{API}/models/99/deployments").encode(), 2)
    assert (answer.status, answer.headers["Connection"]) == (404, "close")


def test_head_is_get_without_a_body_and_the_connection_goes_on(lite: App) -> None:
    line = b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with lite.connect() as connection:
        connection.sendall(line + line)
        data = b""
        while data.count(b"\r\n\r\n") < 2:
            data += connection.recv(4096)
    body = request(lite.url, "GET", "/health").body
    assert data.count(f"Content-Length: {len(body)}".encode()) == 2
    assert data.endswith(b"\r\n\r\n")


def test_silent_half_and_slow_requests_are_dropped(
    lite: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gligabao, "IDLE_TIMEOUT_S", 0.5)
    for begun in (
        b"",
        b"GET /health HTTP/1.1\r\nHo",
        b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nab",
    ):
        with lite.connect() as connection:
            connection.sendall(begun)
            with contextlib.suppress(OSError):
                while connection.recv(4096):
                    pass
    with lite.connect() as connection, pytest.raises(OSError, match="."):
        for byte in b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 50:
            connection.sendall(bytes([byte]))
            threading.Event().wait(0.05)


def test_client_that_trickles_after_its_last_answer_is_dropped(lite: App) -> None:
    with lite.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        begun = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - begun < 10:
                connection.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - begun < 8


def test_audit_with_an_unread_body_outlasts_the_deadline_of_requests(
    lite: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 1_500_000_000  # sparse, but hashed for longer than the deadline
    entry = {"path": "a", "size_bytes": size, "sha256": "0" * 64}
    model = lite("POST", "/models", {"job_id": "job-1", "files": [entry]}).json["id"]
    (lite.root / "job-1").mkdir(parents=True)
    with open(lite.root / "job-1" / "a", "wb") as file:
        file.truncate(size)
    monkeypatch.setattr(gligabao, "IDLE_TIMEOUT_S", 0.3)
    audit = lite("GET", f"/models/{model}/audit", {"a": 1}).json
    assert audit["files"][0]["state"] == "wrong sha256"


def test_pipelined_requests_are_answered_in_order(lite: App) -> None:
    lines = [
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        for path in ("/health", "/nope", "/admin")
    ]
    assert [answer.status for answer in raw(lite, b"".join(lines), 3)] == [200, 404, 200]


ELSEWHERE = {
    "a rebound name": {"Host": "evil.example"},
    "a name that begins well": {"Host": "127.0.0.1.evil.example"},
    "another address": {"Host": "192.168.0.1"},
    "another origin": {"Origin": "http://evil.example"},
    "no origin of its own": {"Origin": "null"},
    "another port": {"Origin": "http://localhost:1"},
    "a cross-site fetch": {"Sec-Fetch-Site": "cross-site"},
    "a same-site fetch": {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
}


@pytest.mark.parametrize("headers", ELSEWHERE.values(), ids=ELSEWHERE)
def test_without_a_key_what_comes_from_elsewhere_is_403(lite: App, headers: dict[str, str]) -> None:
    for method, path in (("GET", "/health"), ("POST", f"{API}/models"), ("GET", "/nope")):
        assert request(lite.url, method, path, headers=headers).status == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.9.9.9:80", "[::1]", "[::1]:7878"]
)
def test_without_a_key_this_machine_may_come_in(lite: App, host: str) -> None:
    headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    assert request(lite.url, "GET", "/health", headers=headers).status == 200


def test_without_a_key_a_link_on_another_site_opens_the_page_and_nothing_else(lite: App) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    statuses = [
        request(lite.url, "GET", path, headers=headers).status
        for path in ("/", "/admin", "/health", f"{API}/models")
    ]
    assert statuses == [302, 200, 403, 403]


def test_with_a_key_the_api_needs_it_and_nothing_else_is_looked_at(
    serve: Callable[..., App],
) -> None:
    app = serve(api_key="correct horse")
    for value in (
        None,
        "Bearer wrong",
        "correct horse",
        "Bearer",
        "Basic correct horse",
        "Bearer correct horse ",
        "Bearer \xff",
    ):
        headers = {"Authorization": value} if value else {}
        answer = app("GET", "/models", **headers)
        assert answer.status == 401
        assert "correct" not in answer.error
        assert app("GET", "/nope", **headers).status == 401
    elsewhere = {"Host": "models.example", "Origin": "https://models.example"}
    assert app("GET", "/models", Authorization="Bearer correct horse", **elsewhere).status == 200
    assert request(app.url, "GET", "/admin", headers=elsewhere).status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
def test_without_a_key_only_loopback_is_bound(host: str, tmp_path: Path) -> None:
    server = gligabao.Server(host=host, port=0, database=str(tmp_path / "x.db"))
    with pytest.raises(ValueError, match="needs a key"), server:
        pass


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "localhost"])
def test_url_of_a_server_is_one_that_it_answers_to(host: str, serve: Callable[..., App]) -> None:
    assert request(serve(host=host).url, "GET", "/health").status == 200


def test_burst_of_200_connections_is_answered(lite: App) -> None:
    barrier = threading.Barrier(200)

    def ask(_: int) -> int:
        barrier.wait()
        return request(lite.url, "GET", f"{API}/deployers").status

    with ThreadPoolExecutor(200) as pool:
        assert {*pool.map(ask, range(200))} == {200}


def test_server_whose_poll_fails_goes_on_accepting(
    lite: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> Any:
        monkeypatch.undo()
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(selectors._PollLikeSelector, "select", fails)  # type: ignore[attr-defined]
    until(lambda: "accepting connections failed" in caplog.text)
    assert request(lite.url, "GET", "/health").status == 200


def test_client_is_not_taken_for_gone_because_a_look_at_it_fails(
    lite: App, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        looks = 0

        def register(self, *_: object) -> None:
            Failing.looks += 1
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    sidecar.add({"a": b"1"})
    model = lite.record({"a": b"1"})
    with lite.start_deploy(model, "patient"):
        until(lambda: lite.progress(model).get("files_done"))
        monkeypatch.setattr(select, "poll", Failing)
        until(lambda: Failing.looks > 2)
        monkeypatch.undo()
        assert lite.newest(model)["status"] == "running"


def test_log_escapes_control_characters(
    serve: Callable[..., App], sidecar: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    def paints(ctx: Context, req: gligabao.DeployTrainedModelRequest) -> None:
        raise RuntimeError("\x1b[2J\n")

    sidecar.add({"a": b"1"})
    app = serve(trained_model_deployers={"paints": paints})
    app.deploy(app.record({"a": b"1"}), "paints")
    assert [message for message in caplog.messages if "\\x1b[2J\\n" in message]
    assert "\x1b" not in "".join(caplog.messages)


# ---- deployers -----------------------------------------------------------------------------------

INVALID = {
    "21": [gligabao.TrainedModelDeployer(f"d{n}", ok) for n in range(21)],
    **{
        repr(name): [gligabao.TrainedModelDeployer(name, ok)]  # type: ignore[arg-type]
        for name in ("", "x" * 65, "a b", ".a", "-a", "_a", "a/b", "a\n", "ü", "a\u0661", 5)
    },
    "twice": [gligabao.TrainedModelDeployer("a", ok), gligabao.TrainedModelDeployer("a", ok)],
    "no function": [gligabao.TrainedModelDeployer("a", None)],  # type: ignore[arg-type]
    "no deployer": ["a"],
}


@pytest.mark.parametrize("registry", INVALID.values(), ids=INVALID)
def test_invalid_deployer_is_refused_before_anything_is_made(registry: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^invalid trained model deployer: "):
        gligabao.Server(database=str(tmp_path / "made" / "x.db"), trained_model_deployers=registry)
    assert not (tmp_path / "made").exists()


def test_deployers_are_sorted_and_described_by_the_first_line() -> None:
    names = ["x" * 64, "0", "a_b-c.D", "A", *(f"d{n}" for n in range(16))]
    assert [
        deployer.name for deployer in gligabao.resolve_deployers(dict.fromkeys(names, ok))
    ] == sorted(names)
    assert gligabao.resolve_deployers({"ok": ok})[0].description == "Does nothing, and says so."
    assert (
        gligabao.resolve_deployers(iter([gligabao.TrainedModelDeployer("a", ok, "text")]))[
            0
        ].description
        == "text"
    )
    assert gligabao.resolve_deployers(None) == []


# ---- store ---------------------------------------------------------------------------------------


@pytest.fixture
def store(database: str) -> Iterator[Any]:
    with contextlib.closing(gligabao.open_store(database)) as opened:
        yield opened


def test_tables_have_the_columns_and_the_index(store: Any, database: str) -> None:
    plant(database, "job-1", [])
    deploy_id = store.record_trained_model_deployment(1, "ok", {"a": 1.0})
    assert list(store.get_trained_model_deployment(deploy_id)) == DEPLOYMENT_KEYS
    with direct(database) as sql:
        if "://" in database:
            query = (
                "SELECT indexdef FROM pg_indexes WHERE tablename = 'gb_trained_model_deployments'"
            )
            assert any("(trained_model_id, id" in row[0] for row in sql(query))
        else:
            newest = "SELECT * FROM gb_trained_model_deployments WHERE trained_model_id = 1 ORDER BY id DESC"
            plan = str(sql(f"EXPLAIN QUERY PLAN {newest}"))
            assert "USING INDEX gb_trained_model_deployments_newest" in plan
            assert "TEMP B-TREE" not in plan
            assert sql("PRAGMA journal_mode") == [("wal",)]


def test_deployment_is_stored_running_and_then_as_it_ended(store: Any, database: str) -> None:
    plant(database, "job-1", [])
    first, second = (store.record_trained_model_deployment(1, "ok", {"x": 1.0}) for _ in range(2))
    running = store.get_trained_model_deployment(first)
    assert running | {"created_at": ""} == dict(
        zip(
            DEPLOYMENT_KEYS,
            [first, 1, "ok", {"x": 1.0}, "running", "", "", {}, "", 0, "", None],
            strict=True,
        )
    )
    ended = store.finish_trained_model_deployment(first, "failed", "/d", "r", {"k": [1]}, "why", 5)
    assert ended == store.get_trained_model_deployment(first)
    assert [*ended.values()][4:10] == ["failed", "/d", "r", {"k": [1]}, "why", 5]
    assert ended["completed_at"] >= ended["created_at"] == running["created_at"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", ended["created_at"])
    assert [row["id"] for row in store.list_trained_model_deployments(1)] == [second, first]
    assert [row["id"] for row in store.list_trained_model_deployments(1, limit=1)] == [second]
    assert store.get_trained_model_deployment(999) is None
    assert store.get_trained_model_deployment(2**70) is None
    assert store.list_trained_model_deployments(2**70) == []
    assert store.finish_trained_model_deployment(999, "failed", "", "", {}, "", 0) is None


def test_options_and_details_that_are_none_are_stored_as_empty_objects(
    store: Any, database: str
) -> None:
    plant(database, "job-1", [])
    deploy_id = store.record_trained_model_deployment(1, "ok", None)
    ended = store.finish_trained_model_deployment(deploy_id, "completed", "/d", "r", None, "", 1)
    assert (ended["options"], ended["details"]) == ({}, {})


def test_text_no_database_holds_is_replaced_not_lost(store: Any, database: str) -> None:
    plant(database, "job-1", [])
    deploy_id = store.record_trained_model_deployment(1, "ok", {})
    ended = store.finish_trained_model_deployment(
        deploy_id, "failed", "", "a\0b", {"k\0": "\0"}, "x\ud800y", 1
    )
    assert [*ended.values()][6:9] == ["a\ufffdb", {"k\0": "\0"}, "x\ufffdy"]


def test_ids_are_never_used_again(app: App, sidecar: Sidecar) -> None:
    sidecar.add(THREE)
    first = app.record(THREE)
    deployed = app.deploy(first).json["id"]
    assert app("DELETE", f"/models/{first}").status == 204
    second = app.record(THREE)
    assert second > first
    assert app.deploy(second).json["id"] > deployed


def test_deleting_a_model_deletes_its_deployments_only(
    app: App, sidecar: Sidecar, database: str
) -> None:
    models = [app.record({"a": b"1"}, job) for job in ("job-1", "job-2", "job-3")]
    for job, model in zip(("job-1", "job-2", "job-3"), models, strict=True):
        sidecar.add({"a": b"1"}, job)
        assert app.deploy(model).status == 200
    assert app("DELETE", f"/models/{models[0]}").status == 204
    assert app("GET", f"/models/{models[0]}/deployments").status == 404
    with direct(database) as sql:
        if "://" not in database:
            sql("PRAGMA foreign_keys = ON")
        sql("DELETE FROM gb_trained_models WHERE id = ?", models[1])
        assert sql("SELECT trained_model_id FROM gb_trained_model_deployments") == [(models[2],)]
    assert (app.root / "job-1" / "a").exists()


def test_existing_tables_are_left_as_they_are(database: str) -> None:
    gligabao.open_store(database).close()
    with direct(database) as sql:
        sql("ALTER TABLE gb_trained_models ADD COLUMN extra TEXT DEFAULT 'mine'")
    with contextlib.closing(gligabao.open_store(database)) as store:
        assert plant(database, "job-1", []) == store.list_trained_models()[0].id
    with direct(database) as sql:
        assert sql("SELECT extra FROM gb_trained_models") == [("mine",)]


DAMAGED: dict[str, tuple[dict[str, Any], Any, Any]] = {
    **{
        f"params {text!r:.20}": ({"params": text}, {}, None)
        for text in (
            "{broken",
            "[]",
            "5",
            "",
            "null",
            '{"a": NaN}',
            '{"a": 1e999}',
            None,
            '{"a":' * 301 + "1" + "}" * 301,
        )
    },
    **{
        f"loss {loss}": ({"final_loss": loss}, {}, None)
        for loss in (float("nan"), float("inf"), -float("inf"))
    },
    "texts": ({"name": "", "base_model": None, "dataset": None, "path": None}, {}, None),
}


@pytest.mark.parametrize(("columns", "params", "loss"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_row_of_a_model_is_shown_and_deploys(
    app: App, sidecar: Sidecar, database: str, columns: dict[str, Any], params: Any, loss: Any
) -> None:
    sidecar.add({"a": b"1"})
    model = plant(database, "job-1", listed({"a": b"1"}), **columns)
    shown = app("GET", "/models").json["models"][0]
    assert (shown["params"], shown["final_loss"]) == (params, loss)
    assert app.deploy(model, "echo").json["details"]["model"]["params"] == params


@pytest.mark.parametrize("files", [None, "", "null", "{broken", "5", '{"path": "a"}', "[]"])
def test_model_without_recorded_files_fails_by_that_name(
    app: App, database: str, files: str | None
) -> None:
    model = plant(database, "job-1", files)
    assert (
        app.failed(model, app.deploy(model))["error"] == "the trained model has no recorded files"
    )
    assert app("GET", f"/models/{model}/audit").json["complete"] is False


@pytest.mark.parametrize(
    "bad",
    [
        5,
        None,
        {},
        {"path": 5, "size_bytes": 1},
        {"path": "a", "size_bytes": "1"},
        {"path": "\ud800"},
        [1, 2],
        {"path": {"a": 1}, "size_bytes": 1},
    ],
)
def test_bad_entry_of_recorded_files_fails_without_a_request(
    app: App, sidecar: Sidecar, database: str, bad: Any
) -> None:
    model = plant(database, "job-1", [*listed({"good": b"1"}), bad])
    assert app.failed(model, app.deploy(model))["error"]
    assert sidecar.asked == []
    assert app("GET", f"/models/{model}/audit").json["files"][1]["state"] == "missing"
    assert app("GET", f"/models/{model}").status == 200


def test_sqlite_needs_no_more_descriptors_once_it_is_open(tmp_path: Path) -> None:
    code = f"""
import os, resource, sys
sys.path.insert(0, {str(HERE)!r})
import gligabao, test_gligabao as t
store = gligabao.open_store(sys.argv[1])
t.plant(sys.argv[1], "job-1", [])
count = max(map(int, os.listdir("/dev/fd"))) + 1
held = [os.dup(0) for _ in range(count - len(os.listdir("/dev/fd")) + 1)]
resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))
print([model.job_id for model in store.list_trained_models()])
"""
    words = [sys.executable, "-Bc", code, str(tmp_path / "x.db")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert done.stdout == "['job-1']\n", done.stderr


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
def test_sqlite_is_opened_anew_after_an_error_it_does_not_recover_from(
    lite: App, sidecar: Sidecar
) -> None:
    first = lite.record({"a": b"1"})
    with open(os.devnull) as nowhere:  # in the place of its log, which others would be able to read
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}") == f"{lite.root.parent}/gligabao.db-wal":
                    os.dup2(nowhere.fileno(), int(number))
    second = {"job_id": "job-2", "files": listed({"a": b"1"})}
    failed = lite("POST", "/models", second)
    assert (failed.status, "disk I/O error" in failed.error) == (500, True)
    assert lite("POST", "/models", second).status == 201
    assert [model["job_id"] for model in lite("GET", "/models").json["models"]] == [
        "job-2",
        "job-1",
    ]
    sidecar.add({"a": b"1"})
    assert lite.deploy(first).status == 200


def test_sqlite_without_shared_memory_fails_with_the_ways_out(tmp_path: Path) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000));"
        f"sys.path.insert(0, {str(HERE)!r}); import gligabao; sys.exit(gligabao.main(sys.argv[1:]))"
    )
    words = [sys.executable, "-Bc", code, *("serve", "--port", "0", "--database", "x.db")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    for part in ("x.db", "file system", "shared memory", "local disk", "PostgreSQL"):
        assert part in done.stderr


def test_sqlite_keeps_what_is_recorded_through_a_loss_of_power(tmp_path: Path) -> None:
    with contextlib.closing(gligabao.open_store(str(tmp_path / "x.db"))) as store:
        store.record_trained_model(dict.fromkeys(gligabao._MODEL_KEYS, "x"))
        writer = store._connections[True]  # type: ignore[attr-defined]
        assert writer.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_sqlite_reader_does_not_wait_for_a_writer_and_a_writer_waits(
    lite: App, sidecar: Sidecar, tmp_path: Path
) -> None:
    sidecar.add({"a": b"1"})
    model = lite.record({"a": b"1"})
    other = sqlite3.connect(tmp_path / "gligabao.db", isolation_level=None, check_same_thread=False)
    with contextlib.closing(other), ThreadPoolExecutor(1) as pool:
        other.execute("BEGIN IMMEDIATE")
        answer = pool.submit(lite.deploy, model)
        assert lite("GET", "/models").status == 200
        assert not answer.done()
        other.execute("COMMIT")
        assert answer.result(10).status == 200


def test_sqlite_locked_for_too_long_is_500_and_the_server_goes_on(
    serve: Callable[..., App], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gligabao, "BUSY_TIMEOUT_S", 0.2)
    app = serve()
    model = app.record({"a": b"1"})
    with contextlib.closing(
        sqlite3.connect(tmp_path / "gligabao.db", isolation_level=None)
    ) as other:
        other.execute("BEGIN IMMEDIATE")
        answer = app.deploy(model)
        assert (answer.status, "locked" in answer.error) == (500, True)
        other.execute("COMMIT")
    assert app.history(model) == []


def test_two_servers_start_on_one_empty_database_at_once(database: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        for store in pool.map(gligabao.open_store, [database] * 4):
            assert store.list_trained_models() == []
            store.close()


@pytest.mark.parametrize("rest", ["u:p@" + "a" * 60 + "@h/d", "u:p:q@h:x/d", "h:/a@b", "[::1"])
def test_malformed_database_url_is_refused_at_once(rest: str) -> None:
    with pytest.raises(ValueError, match="malformed"):
        gligabao.open_store(f"postgresql://{rest}")


def test_unknown_kind_of_database_is_refused_without_its_password() -> None:
    with pytest.raises(ValueError, match="no known kind") as caught:
        gligabao.open_store("mysql://u:s3cret@host/x")
    assert "s3cret" not in str(caught.value)


# ---- files ---------------------------------------------------------------------------------------

BAD_PATHS = [
    *r"/etc/x .. ../x a/../x a/.. a..b ./a a/./b a//b a/ . a\b \\host\x .fetch-a sub/.fetch-1/x".split(),
    *("", "a\0b", "a\nb", "a\x7fb", "a\x9fb", "x" * 256, "模" * 86, "/".join(["y" * 60] * 34)),
    *(5, None, "\ud800"),
]
GOOD_PATHS = [
    *"%2e%2e/x CON a. ~/x C:x -rf lock Config config".split(),
    *("a b.bin", "a ", "x" * 255, "模" * 85),
]


@pytest.mark.parametrize("path", BAD_PATHS, ids=repr)
def test_unsafe_path_is_refused(path: Any) -> None:
    with pytest.raises(ValueError, match="the path"):
        gligabao._check_path(path)


@pytest.mark.parametrize(
    "job_id", [*r". .. a/b a..b a\b /a -rf .x _x ü".split(), "", " ", "a b", "a\n", "x" * 129, None]
)
def test_unusable_job_id_is_400_and_not_recorded(
    lite: App, sidecar: Sidecar, tmp_path: Path, job_id: Any
) -> None:
    assert lite("POST", "/models", {"job_id": job_id, "files": listed({"a": b"1"})}).status == 400
    if job_id is not None:
        model = plant(str(tmp_path / "gligabao.db"), job_id, listed({"a": b"1"}))
        assert lite.deploy(model).status == 400
        assert lite("GET", f"/models/{model}/audit").status == 400
        assert lite.history(model) == []
    assert sidecar.asked == []


def test_odd_but_safe_names_are_deployed_byte_for_byte(lite: App, sidecar: Sidecar) -> None:
    files = {path: payload(50, path) for path in GOOD_PATHS}
    sidecar.add(files)
    model = lite.record(files)
    assert lite.deploy(model).status == 200
    assert lite.deploy(model).status == 200
    assert sorted(sidecar.asked) == sorted(files)
    assert on_disk(lite.root / "job-1") == files


# ---- sidecar -------------------------------------------------------------------------------------

FINAL = {
    "too short": (whole(payload(999)), "expected 1000 bytes, got 999 announced"),
    "too long": (whole(payload(1001)), "expected 1000 bytes, got 1001 announced"),
    "a length that is none": (
        says(head(200, "Content-Length: abc")),
        "expected 1000 bytes, got abc announced",
    ),
    "two lengths": (
        says(head(200, "Content-Length: 1000", "Content-Length: 5")),
        "expected 1000 bytes, got 5 announced",
    ),
    "endless": (says(head(200) + payload(1000) * 50), "expected 1000 bytes, got more"),
    "one byte more": (says(head(200) + payload(1001)), "expected 1000 bytes, got more"),
    "other bytes": (whole(payload(1000, 9)), "expected sha256"),
    "not found": (whole(b"", 404), "expected status 200, got 404"),
    "no content": (says(head(204)), "expected status 200, got 204"),
    "a part": (whole(payload(1000), 206), "expected status 200, got 206"),
    "a redirect": (
        says(head(302, "Location: http://127.0.0.1:1/", "Content-Length: 0")),
        "expected status 200, got 302",
    ),
    "gzip": (whole(payload(1000), 200, "Content-Encoding: gzip"), "no Content-Encoding, got gzip"),
    "coded in transfer": (
        says(head(200, "Transfer-Encoding: gzip") + payload(1000)),
        "expected no Transfer-Encoding, got gzip",
    ),
    "a coding with a blank": (
        says(head(200, "Transfer-Encoding: chunked ") + b"3e8\r\n" + payload(1000)),
        "expected no Transfer-Encoding, got chunked",
    ),
    "an HTML page": (whole(b"<html>log in</html>"), "got 19 announced"),
}


@pytest.mark.parametrize(("act", "text"), FINAL.values(), ids=FINAL)
def test_wrong_answer_of_the_sidecar_fails_once_and_by_name(
    lite: App, sidecar: Sidecar, act: Any, text: str
) -> None:
    files = {"weights.bin": payload(1000)}
    sidecar.add(files)
    sidecar.script["weights.bin"] = [act]
    model = lite.record(files)
    deployment = lite.failed(model, lite.deploy(model))
    assert deployment["error"].startswith("weights.bin: ")
    assert text in deployment["error"]
    assert (deployment["dir"], on_disk(lite.root / "job-1")) == ("", {})
    assert len(sidecar.asked) == 1
    assert lite.deploy(model).status == 200


DROPPED = {
    "no byte": says(b""),
    "garbage": says(b"\x16\x03\x01 hello\r\n\r\n"),
    "no status": says(b"HTTP/1.1 abc\r\n\r\n"),
    "a header too long": says(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n"),
    "150 headers": says(head(200, *["X: x"] * 150)),
    "503": whole(b"", 503),
    "a bad chunk": says(head(200, "Transfer-Encoding: chunked") + b"zz\r\n"),
    "cut chunks": says(head(200, "Transfer-Encoding: chunked") + b"200\r\n" + payload(1000)[:50]),
    "an early end": says(head(200) + payload(1000)[:50]),
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gligabao, "RETRY_PAUSES_S", (0.0, 0.01, 0.01, 0.01))


@pytest.mark.parametrize("act", DROPPED.values(), ids=DROPPED)
def test_failure_below_http_is_tried_five_times_and_then_named(
    lite: App, sidecar: Sidecar, quick: None, act: Any
) -> None:
    files = {"weights.bin": payload(1000)}
    sidecar.add(files)
    sidecar.script["weights.bin"] = [act] * 5
    model = lite.record(files)
    assert lite.failed(model, lite.deploy(model))["error"].startswith("weights.bin: ")
    assert len(sidecar.asked) == 5
    sidecar.script["weights.bin"] = [act] * 4
    assert lite.deploy(model).status == 200
    assert on_disk(lite.root / "job-1") == files


def test_unreachable_sidecar_fails_by_name(serve: Callable[..., App], quick: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    app = serve(sidecar=url)
    model = app.record({"a": b"1"})
    assert (
        app.failed(model, app.deploy(model))["error"]
        == f"a: no answer from {url[7:]}: Connection refused, in 5 attempts"
    )


def test_dropped_download_is_resumed_and_no_byte_is_asked_for_twice(
    lite: App, sidecar: Sidecar, quick: None
) -> None:
    files = {"weights.bin": payload(10_000)}
    sidecar.add(files)
    sidecar.script["weights.bin"] = [cut(700)] * 14
    model = lite.record(files)
    assert lite.deploy(model).status == 200
    starts = [
        int(found[1]) if (found := re.search(r"bytes=(\d+)-", text)) else 0
        for text in sidecar.heads
    ]
    assert starts == [*range(0, 10_000, 700)]
    assert on_disk(lite.root / "job-1") == files


@pytest.mark.parametrize(
    "second",
    [
        whole(payload(1000)),
        says(
            head(206, "Content-Length: 400", "Content-Range: bytes 600-999/1000")
            + payload(1000)[600:]
        ),
        says(head(416, "Content-Length: 0")),
    ],
    ids=["ignores the range", "answers from elsewhere", "says 416"],
)
def test_file_starts_again_where_it_cannot_be_resumed(
    lite: App, sidecar: Sidecar, quick: None, second: Any
) -> None:
    files = {"weights.bin": payload(1000)}
    sidecar.add(files)
    sidecar.script["weights.bin"] = [cut(500), second]
    model = lite.record(files)
    assert lite.deploy(model).status == 200
    assert on_disk(lite.root / "job-1") == files


def test_stalled_download_keeps_its_bytes(
    lite: App, sidecar: Sidecar, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gligabao, "STALL_TIMEOUT_S", 0.3)

    def stall(connection: socket.socket, data: bytes, start: int) -> None:
        cut(100)(connection, data, start)
        sidecar.release.wait(10)

    files = {"weights.bin": payload(1000)}
    sidecar.add(files)
    sidecar.script["weights.bin"] = [stall, stall]
    model = lite.record(files)
    assert lite.deploy(model).status == 200
    assert [re.findall(r"bytes=(\d+)-", text) for text in sidecar.heads] == [[], ["100"], ["200"]]


def test_without_a_length_a_stall_after_the_last_byte_is_the_end(
    lite: App, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gligabao, "STALL_TIMEOUT_S", 0.3)

    def stall(connection: socket.socket, data: bytes, start: int) -> None:
        connection.sendall(head(200) + data)
        sidecar.release.wait(10)

    files = {"weights.bin": payload(1000), "empty": b""}
    sidecar.add(files)
    sidecar.script = {
        "weights.bin": [stall],
        "empty": [says(head(200, "Transfer-Encoding: chunked") + b"0\r\n\r\n")],
    }
    assert lite.deploy(lite.record(files)).status == 200
    assert on_disk(lite.root / "job-1") == files


def test_token_goes_to_the_sidecar_and_nowhere_else(
    serve: Callable[..., App], sidecar: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "gligabao")
    app = serve(sidecar_token="s3cret-tok", api_key="k3y-of-api")
    sidecar.add({"a": b"1"})
    sidecar.script["a"] = [whole(b"", 403)]
    key = {"Authorization": "Bearer k3y-of-api"}
    model = app("POST", "/models", {"job_id": "job-1", "files": listed({"a": b"1"})}, **key).json[
        "id"
    ]
    answers = [
        app("POST", f"/models/{model}/deployments", {"deployer": "ok"}, **key) for _ in range(2)
    ]
    assert [answer.status for answer in answers] == [502, 200]
    assert all("Authorization: Bearer s3cret-tok" in text for text in sidecar.heads)
    assert all("\r\nAccept-Encoding: identity\r\n" in text for text in sidecar.heads)
    seen = caplog.text + str(app.events) + str([answer.body for answer in answers])
    assert "s3cret" not in seen
    assert "k3y" not in seen


ECHOED = {
    "a coding": head(200, "Content-Encoding: Bearer s3cret-tok"),
    "a length": head(200, "Content-Length: Bearer s3cret-tok"),
    "a status line": b"HTTP/1.1 Bearer s3cret-tok\r\n\r\n",
    "the words of a refusal": head(403) + b'{"error": "Bearer s3cret-tok"}',
    "where a text is cut": head(200, f"Content-Length: {'x' * 955}Bearer s3cret-tok"),
}


@pytest.mark.parametrize("reply", ECHOED.values(), ids=ECHOED)
def test_token_that_a_sidecar_echoes_gets_into_no_error(
    serve: Callable[..., App], sidecar: Sidecar, quick: None, reply: bytes
) -> None:
    app = serve(sidecar_token="s3cret-tok")
    sidecar.add({"a": b"1"})
    sidecar.script["a"] = [says(reply)] * 5
    model = app.record({"a": b"1"})
    error = app.failed(model, app.deploy(model))["error"]
    assert "Bearer …" in error
    assert "s3c" not in error


REFUSALS = {
    "a 403": (whole(b'{"error": "weights are frozen"}', 403), "got 403: weights are frozen"),
    "a 503": (whole(b'{"error": "weights are frozen"}', 503), "got 503: weights are frozen"),
    "chunked": (
        says(head(403, "Transfer-Encoding: chunked") + b'10\r\n{"error": "no!"}\r\n0\r\n\r\n'),
        "got 403: no!",
    ),
    "without a length": (says(head(403) + b'{"error": "no!"}'), "got 403: no!"),
    "without an end": (
        lambda connection, data, start: (
            connection.sendall(head(403) + b'{"error": "no!"}'),
            connection.recv(1),
        ),
        "got 403: no!",
    ),
    "without a body": (whole(b"", 403), "got 403"),
    "HTML": (whole(b"<html>no</html>", 403), "got 403"),
    "another type": (whole(b'{"error": 5}', 403), "got 403"),
    "a list": (whole(b"[1]", 403), "got 403"),
    "deep nesting": (whole(b"[" * 50_000, 403), "got 403"),
    "too long": (whole(b'{"error": "%s"}' % (b"x" * 66_000), 403), "got 403"),
}


@pytest.mark.parametrize(("act", "text"), REFUSALS.values(), ids=REFUSALS)
def test_sidecar_that_refuses_is_quoted(
    lite: App, sidecar: Sidecar, quick: None, monkeypatch: pytest.MonkeyPatch, act: Any, text: str
) -> None:
    monkeypatch.setattr(gligabao, "CONNECT_TIMEOUT_S", 0.3)
    sidecar.script["a"] = [act] * 5
    model = lite.record({"a": b"1"})
    failed = lite.failed(model, lite.deploy(model))
    assert failed["error"].removesuffix(", in 5 attempts") == f"a: expected status 200, {text}"
    assert failed["duration_ms"] < 15_000


def test_token_that_a_sidecar_lists_gets_into_no_error(
    serve: Callable[..., App], httpserver: Any
) -> None:
    entry = {"path": f"{'.' * 72}/s3cret-tok", "size_bytes": 1}
    httpserver.expect_request("/models/files").respond_with_json({"files": [entry]})
    app = serve(sidecar=httpserver.url_for("/"), sidecar_token="s3cret-tok")
    answer = app("POST", "/models", {"job_id": "job-1"})
    assert (answer.status, "s3c" in answer.error, "./…" in answer.error) == (502, False, True)


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("a\nb", "printable"),
        ("ü", "printable"),
        ("s3c\n", "ends in a blank or a line break"),
        ("s3c ", "ends in a blank or a line break"),
    ],
)
def test_token_that_no_header_carries_is_refused(token: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        gligabao.SidecarClient("http://127.0.0.1:1", token)
    assert "s3c" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "0x7f000001", "0.0.0.0", "localhost"])
def test_loopback_sidecar_is_not_reached_through_a_proxy(
    serve: Callable[..., App], sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    app = serve(sidecar=sidecar.url.replace("127.0.0.1", host))
    sidecar.add({"a": b"1"})
    assert app.deploy(app.record({"a": b"1"})).status == 200


def test_malformed_proxy_of_the_environment_is_not_repeated(
    serve: Callable[..., App], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http:/user:s3cret@proxy.example:1")
    app = serve(sidecar="http://sidecar.example")
    model = app.record({"a": b"1"})
    assert app.failed(model, app.deploy(model))["error"].endswith("proxy has a malformed URL")


def test_other_sidecar_is_reached_through_the_environments_proxy(
    serve: Callable[..., App], sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", sidecar.url)
    monkeypatch.delenv("no_proxy", raising=False)
    app = serve(sidecar="http://sidecar.example:1/prefix/")
    sidecar.add({"a": b"1"})
    assert app.deploy(app.record({"a": b"1"})).status == 200
    assert sidecar.heads[0].startswith(
        "GET http://sidecar.example:1/prefix/models/file?model_path=trained/job-1&file=a "
    )


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "ftp://h/",
        "http://u:s3cret@h/",
        "http://h/?t=s3cret",
        "http://h/#s3cret",
        "http://h:99999",
        "http://h/a b",
    ],
)
def test_bad_sidecar_url_is_refused_without_repeating_secrets(url: str) -> None:
    with pytest.raises(ValueError, match="URL") as caught:
        gligabao.Server(sidecar=url)
    assert "s3cret" not in str(caught.value)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A directory for the embedded sidecar, with things in it that must not be served."""
    root = tmp_path / "models"
    for path, data in {
        "job-1/a.bin": payload(5000),
        "job-1/sub/b c%2e.bin": b"b",
        "job-1/empty": b"",
        "job-2/x": b"x",
    }.items():
        file = root / "trained" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    (root / "secret.txt").write_text("outside every model")
    (root / "trained/job-3/sub").mkdir(parents=True)
    (root / "trained/job-3/link").symlink_to(root / "secret.txt")
    (root / "trained/job-3/linked").symlink_to(root)
    os.mkfifo(root / "trained/job-3/sub/fifo")
    (root / "trained/job-link").symlink_to(root)
    (root / "trained/.hidden").mkdir()
    (root / "trained/job-1/.fetch-1").write_text("temporary")
    (root / "trained/no-model").write_text("a file")
    return root


@pytest.fixture
def directory(models: Path) -> Iterator[str]:
    server = gligabao._HTTPServer(
        "127.0.0.1", 0, gligabao._SidecarDirectory(str(models)).routes(), None, ""
    )
    yield server.url
    server.stop()


def test_embedded_sidecar_lists_models_and_files(directory: str) -> None:
    assert request(directory, "GET", "/health").json["status"] == "ok"
    assert request(directory, "GET", "/models").json == {
        "models": [{"model_path": f"trained/job-{n}"} for n in (1, 2, 3)]
    }
    files = request(directory, "GET", "/models/files?model_path=trained/job-1").json["files"]
    assert files == listed({"a.bin": payload(5000), "empty": b"", "sub/b c%2e.bin": b"b"})


@pytest.mark.parametrize(
    ("model", "file"),
    [
        *(("trained/job-1", file) for file in ("../job-2/x", "../../secret.txt", "/etc/passwd")),
        *(("trained/job-3", file) for file in ("link", "linked/secret.txt", "sub/fifo")),
        *(
            ("trained/job-1", file)
            for file in ("", *"sub/../a.bin ./a.bin sub nope a.bin%00 .fetch-1 sub%5Cb".split())
        ),
        *(
            (model, "a.bin")
            for model in (
                "",
                *"trained/job-link trained/.. trained/job-1/ trained / trained//job-1".split(),
            )
        ),
        *(
            (model, "secret.txt")
            for model in ("trained/job-link", "trained/../", "..", "trained/job-1/..")
        ),
    ],
)
def test_embedded_sidecar_serves_nothing_else(directory: str, model: str, file: str) -> None:
    assert request(directory, "GET", f"/models/file?model_path={model}&file={file}").status == 404
    if model not in ("trained/job-1", "trained/job-3"):
        assert request(directory, "GET", f"/models/files?model_path={model}").status == 404


def test_embedded_sidecar_serves_ranges(directory: str) -> None:
    path, data = "/models/file?model_path=trained/job-1&file=a.bin", payload(5000)
    for start in (0, 1, 4999):
        answer = request(directory, "GET", path, headers={"Range": f"bytes={start}-"})
        assert (answer.status, answer.body) == (206, data[start:])
        assert answer.headers["Content-Range"] == f"bytes {start}-4999/5000"
    assert request(directory, "GET", path, headers={"Range": "bytes=5000-"}).status == 416
    for odd in ("bytes=-5", "bytes=1-2,4-5", "lines=1-", "bytes=5-1"):
        assert request(directory, "GET", path, headers={"Range": odd}).body == data
    assert request(directory, "HEAD", path).headers["Content-Length"] == "5000"


def test_model_with_a_link_or_without_a_file_is_refused_not_recorded_without_it(
    serve: Callable[..., App], models: Path
) -> None:
    (models / "trained/job-4/sub").mkdir(parents=True)
    (models / "trained/job-4/.fetch-1").touch()
    app = serve(sidecar=str(models))

    def refused(job_id: str) -> str:
        answer = app("POST", "/models", {"job_id": job_id})
        assert answer.status == 502
        return answer.error.partition("got 422: ")[2]

    first = refused("job-3")
    assert first.startswith("'link' is a symbolic link, not a regular file")
    assert "cp -rL" in first
    for name in ("link", "linked"):
        (models / "trained/job-3" / name).unlink()
    assert refused("job-3").startswith("'sub/fifo' is a pipe")
    assert refused("job-4") == "the model at 'trained/job-4' has no file"
    assert app("GET", "/models").json == {"models": []}


def test_embedded_sidecar_lists_what_nests_deeply(directory: str, models: Path) -> None:
    top, depth = f"{models}/trained/job-2/", 1000  # more than calls nest, those of a clean-up too
    for count in range(depth):
        os.mkdir(top + "d/" * (count + 1))
    Path(top + "d/" * depth + "f").touch()
    answer = request(directory, "GET", "/models/files?model_path=trained/job-2")
    os.unlink(top + "d/" * depth + "f")
    for count in range(depth, 0, -1):
        os.rmdir(top + "d/" * count)
    assert [file["path"] for file in answer.json["files"]] == ["d/" * depth + "f", "x"]


@pytest.mark.parametrize("name", [b"vocab..txt", b"w\xe9ights.bin"], ids=["dots", "no UTF-8"])
def test_model_with_a_name_that_is_never_deployed_is_not_recorded_without_it(
    serve: Callable[..., App], models: Path, name: bytes
) -> None:
    Path(os.fsdecode(os.fsencode(models / "trained/job-1") + b"/" + name)).touch()
    answer = serve(sidecar=str(models))("POST", "/models", {"job_id": "job-1"})
    assert (answer.status, name[-5:].decode() in answer.error) == (502, True)


def test_embedded_sidecar_without_descriptors_says_500_and_not_404(
    directory: str, models: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.closing(http.client.HTTPConnection(urlsplit(directory).netloc)) as connection:
        connection.request("GET", "/health")
        connection.getresponse().read()
        gaps = [os.dup(0) for _ in range(100)]  # every number below the last is taken
        resource.setrlimit(resource.RLIMIT_NOFILE, (gaps[-1] + 1, limits[1]))
        try:
            statuses = []
            for path in (
                "",
                "/files?model_path=trained/job-1",
                "/file?model_path=trained/job-1&file=a.bin",
            ):
                connection.request("GET", f"/models{path}")
                answer = connection.getresponse()
                statuses.append(answer.status)
                answer.read()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for descriptor in gaps:
                os.close(descriptor)
    assert statuses == [500, 500, 500]


def test_walk_through_a_model_ends_when_it_is_cancelled(models: Path) -> None:
    ctx = Context()
    ctx.cancel("enough")
    with pytest.raises(gligabao.Cancelled, match="enough"):
        list(gligabao._walk(ctx, models, ["trained", "job-1"]))


def test_file_that_is_read_slowly_is_not_cut(
    directory: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (models / "trained/job-2/x").write_bytes(bytes(8_000_000))
    monkeypatch.setattr(gligabao, "IDLE_TIMEOUT_S", 0.5)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.connect(("127.0.0.1", urlsplit(directory).port))
        line = "GET /models/file?model_path=trained/job-2&file=x HTTP/1.1"
        connection.sendall(f"{line}\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        size = 0
        while data := connection.recv(65536):
            size += len(data)
            time.sleep(0.02)
    assert size > 8_000_000


def test_embedded_sidecar_wants_its_token_everywhere(models: Path) -> None:
    server = gligabao._HTTPServer(
        "127.0.0.1", 0, gligabao._SidecarDirectory(str(models)).routes(), "tok", ""
    )
    with contextlib.closing(contextlib.ExitStack()) as held:
        held.callback(server.stop)
        for path in ("/health", "/models", "/models/files?model_path=trained/job-1", "/nope", "x"):
            assert request(server.url, "GET", path).status == 401
            assert (
                request(server.url, "GET", path, headers={"Authorization": "Bearer tok2"}).status
                == 401
            )
        client = gligabao.SidecarClient(server.url, "tok")
        assert [file.path for file in client.list_model_files(Context(), "trained/job-2")] == ["x"]


# ---- fetch ---------------------------------------------------------------------------------------


class Disguised(Exception):
    @property
    def __class__(self) -> Any:
        raise SystemExit("no class")

    @__class__.setter
    def __class__(self, value: object) -> None: ...


class LooksLikeOurs(Exception):
    kind = "upstream"

    @property
    def strerror(self) -> str:
        raise SystemExit("no text")


class Shelf:
    """A fetcher of the simplest kind: it only writes."""

    def __init__(self, files: dict[str, bytes], failure: BaseException | None = None) -> None:
        self.files, self.failure, self.asked = files, failure, []  # type: ignore[var-annotated]

    def download_model_file(self, ctx: Context, model_path: str, file: str, w: Any) -> None:
        self.asked.append((model_path, file))
        if self.failure:
            raise self.failure
        for start in range(0, len(self.files[file]), 100):
            w.write(self.files[file][start : start + 100])


def fetch(home: Path, fetcher: Any, files: dict[str, bytes], **more: Any) -> None:
    """Fetch a model of these files into the directory `job-1` of `home`."""
    ctx = more.pop("ctx", None) or Context()
    gligabao.fetch_model_files(ctx, fetcher, model_of(files), home / "job-1", **more)


def test_fetch_brings_every_file_once_and_then_keeps_them(tmp_path: Path) -> None:
    model, shelf = model_of(THREE), Shelf(THREE)
    target = gligabao.model_dir(tmp_path / "root", model)
    for expected in ("0 kept, 3 fetched, 0 repaired", "3 kept, 0 fetched, 0 repaired"):
        progress = gligabao.Progress()
        gligabao.fetch_model_files(Context(), shelf, model, target, progress=progress)
        assert str(progress) == expected
        total = sum(map(len, THREE.values()))
        assert progress.figures() == {
            "files_done": 3,
            "files_total": 3,
            "bytes_done": total,
            "bytes_total": total,
            "report": None,
        }
    assert sorted(shelf.asked) == [("trained/job-1", path) for path in sorted(THREE)]
    assert on_disk(tmp_path / "root" / "job-1") == THREE


@pytest.mark.parametrize(
    "failure",
    [
        *(KeyError("x"), SystemExit(3), RuntimeError(), LooksLikeOurs("x")),
        gligabao.TrainingError("invalid", "no"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_whatever_a_fetcher_raises_is_upstream(tmp_path: Path, failure: BaseException) -> None:
    model = model_of({"a": b"1"})
    with pytest.raises(gligabao.TrainingError, match="^a: .") as caught:
        gligabao.fetch_model_files(
            Context(), Shelf({}, failure), model, gligabao.model_dir(tmp_path, model)
        )
    assert caught.value.kind == "upstream"
    assert on_disk(tmp_path / "job-1") == {}


def test_exception_of_a_fetcher_that_hides_its_class_is_upstream(tmp_path: Path) -> None:
    with pytest.raises(gligabao.TrainingError, match="^a: x"):
        fetch(tmp_path, Shelf({}, Disguised("x")), {"a": b"1"})


def test_cancelled_that_a_fetcher_raises_of_its_own_stays_one(tmp_path: Path) -> None:
    with pytest.raises(gligabao.Cancelled, match="mine"):
        gligabao.fetch_model_files(
            *(Context(), Shelf({}, gligabao.Cancelled("mine"))),
            *(model_of({"a": b"1"}), tmp_path / "job-1"),
        )
    assert on_disk(tmp_path / "job-1") == {}


def test_fetcher_that_returns_when_it_is_cancelled_ends_in_cancelled(tmp_path: Path) -> None:
    class Obedient:
        def download_model_file(self, ctx: Context, model_path: str, file: str, w: Any) -> None:
            outer.cancel("enough")
            ctx.wait()

    outer = Context()
    with pytest.raises(gligabao.Cancelled, match="enough"):
        fetch(tmp_path, Obedient(), {"a": b"1"}, ctx=outer)


@pytest.mark.parametrize("data", [7, "text", None])
def test_what_is_no_bytes_is_not_written(tmp_path: Path, data: Any) -> None:
    class Odd:
        def download_model_file(self, ctx: Context, model_path: str, file: str, w: Any) -> None:
            w.write(data)

    model = TrainedModel(1, "n", "job-1", files=(TrainedModelFile("a", 7),))
    with pytest.raises(gligabao.TrainingError, match="^a: memoryview"):
        gligabao.fetch_model_files(Context(), Odd(), model, tmp_path / "job-1")


def test_write_that_failed_half_way_may_be_tried_again(tmp_path: Path) -> None:
    code = f"""
import resource, sys
sys.path.insert(0, {str(HERE)!r})
import gligabao, test_gligabao as t

class Stubborn:
    def download_model_file(self, ctx, model_path, file, w):
        while w.received < w.size:
            try:
                w.write(data[w.received : w.received + 300_000])
            except OSError as error:
                print(error.strerror)
                resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))

data = t.payload(1_000_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, -1))
gligabao.fetch_model_files(gligabao.Context(), Stubborn(), t.model_of({{"a": data}}), sys.argv[1])
"""
    words = [sys.executable, "-Bc", code, str(tmp_path / "job-1")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "File too large\n"), done.stderr
    assert on_disk(tmp_path / "job-1") == {"a": payload(1_000_000)}


def test_threads_of_a_fetcher_write_one_after_the_other(tmp_path: Path) -> None:
    class GivenUp:
        """Goes on by itself while a thread that it gave up still writes."""

        def download_model_file(self, ctx: Context, model_path: str, file: str, w: Any) -> None:
            def late() -> None:
                with contextlib.suppress(Exception):
                    w.write(bytes(size))

            thread = threading.Thread(target=late)
            thread.start()
            while not w.received and not any(
                path.stat().st_size for path in tmp_path.rglob(".fetch-*")
            ):
                pass
            w.restart()
            w.write(good)
            thread.join()

    size = 16_000_000
    good = payload(size)
    model = model_of({"a": good})
    gligabao.fetch_model_files(Context(), GivenUp(), model, tmp_path / "job-1")
    assert on_disk(tmp_path / "job-1") == {"a": good}


@pytest.mark.parametrize("name", ["a", "b"], ids=["kept", "being fetched"])
def test_file_that_others_change_during_a_fetch_is_not_handed_over(
    tmp_path: Path, name: str
) -> None:
    class Meanwhile(Shelf):
        def download_model_file(self, ctx: Context, model_path: str, file: str, w: Any) -> None:
            super().download_model_file(ctx, model_path, file, w)
            (victim,) = (target / "a",) if name == "a" else target.glob(".fetch-*")
            victim.unlink()
            victim.write_bytes(b"2")

    target = tmp_path / "job-1"
    target.mkdir()
    (target / "a").write_bytes(b"1")
    model, shelf = model_of({"a": b"1", "b": b"1"}), Meanwhile({"b": b"1"})
    progress = gligabao.Progress()
    with pytest.raises(gligabao.TrainingError, match=f"^{name}: changed while"):
        gligabao.fetch_model_files(Context(), shelf, model, target, progress=progress)
    assert not progress.complete
    assert not (target / "b").exists() or name == "a"
    gligabao.fetch_model_files(Context(), Shelf({"a": b"1", "b": b"1"}), model, target)
    assert on_disk(target) == {"a": b"1", "b": b"1"}


def test_time_or_inode_that_is_set_late_is_no_change(tmp_path: Path) -> None:
    class Late(Shelf):
        """Touches every file, and gives the one being fetched another inode, as some mounts do."""

        def download_model_file(self, ctx: Context, model_path: str, file: str, w: Any) -> None:
            super().download_model_file(ctx, model_path, file, w)
            for path in filter(Path.is_file, target.rglob("*")):
                if path.name.startswith(".fetch-"):
                    data = path.read_bytes()
                    path.unlink()
                    path.write_bytes(data)
                os.utime(path, (1, 1))

    target = tmp_path / "job-1"
    files = {"a": b"1", "b": b"2"}
    gligabao.fetch_model_files(Context(), Shelf(files), model_of({"a": b"1"}), target)
    progress = gligabao.Progress()
    gligabao.fetch_model_files(Context(), Late(files), model_of(files), target, progress=progress)
    assert str(progress) == "1 kept, 1 fetched, 0 repaired"
    assert on_disk(target) == files


def test_lock_that_cannot_be_had_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    files = len(os.listdir("/dev/fd"))
    with pytest.raises(gligabao.TrainingError, match="No locks available"):
        fetch(tmp_path, Shelf({"a": b"1"}), {"a": b"1"})
    assert len(os.listdir("/dev/fd")) == files


@pytest.mark.parametrize("there", [{"a": b"1"}, {}], ids=["a file to read", "a file to fetch"])
def test_descriptor_is_closed_where_the_next_call_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: dict[str, bytes]
) -> None:
    def fails(descriptor: int) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "job-1").mkdir()
    for name, data in there.items():
        (tmp_path / "job-1" / name).write_bytes(data)
    before = os.listdir("/dev/fd")
    with monkeypatch.context() as patched, pytest.raises(gligabao.TrainingError) as caught:
        patched.setattr(os, "fstat", fails)
        fetch(tmp_path, Shelf({"a": b"1"}), {"a": b"1"})
    assert str(caught.value) == "a: Input/output error"
    assert os.listdir("/dev/fd") == before


def test_largest_files_are_fetched_first(tmp_path: Path) -> None:
    class Counting(Shelf):
        def download_model_file(self, ctx: Context, model_path: str, file: str, w: Any) -> None:
            begun.append(w.size)
            if len(begun) <= 8:
                barrier.wait(20)  # eight at once
            super().download_model_file(ctx, model_path, file, w)

    begun: list[int] = []
    barrier = threading.Barrier(8)
    files = {f"{size}": bytes(size) for size in (5, 1, 9, 12, 3, 7, 10, 2, 8, 11, 4, 6)}
    fetch(tmp_path, Counting(files), files)
    assert {*begun[:8]} == {*range(5, 13)}


def test_failed_file_ends_the_others_of_its_deployment(tmp_path: Path) -> None:
    class Half(Shelf):
        def download_model_file(self, ctx: Context, model_path: str, file: str, w: Any) -> None:
            both.wait(20)
            if file == "a":
                raise OSError("a is gone")
            reasons.append(ctx.wait(20) and ctx.reason)
            ctx.raise_if_cancelled()

    both, reasons = threading.Barrier(2), []  # type: ignore[var-annotated]
    files = {"a": b"1", "b": b"2"}
    with pytest.raises(gligabao.TrainingError, match="a is gone"):
        fetch(tmp_path, Half(files), files)
    assert reasons == ["another file failed"]


@pytest.mark.parametrize("data", [b"12345", b"1234567", b"123x56"], ids=["short", "long", "other"])
def test_fetcher_that_writes_other_bytes_than_recorded_fails(tmp_path: Path, data: bytes) -> None:
    model = model_of({"a": b"123456"})
    with pytest.raises(gligabao.TrainingError, match="^a: expected"):
        gligabao.fetch_model_files(
            Context(), Shelf({"a": data}), model, gligabao.model_dir(tmp_path, model)
        )
    assert on_disk(tmp_path / "job-1") == {}


def test_short_file_without_a_digest_fails(tmp_path: Path) -> None:
    model = TrainedModel(1, "n", "job-1", files=(TrainedModelFile("a", 6),))
    with pytest.raises(gligabao.TrainingError, match=r"^a: expected 6 bytes, got 5"):
        gligabao.fetch_model_files(
            Context(), Shelf({"a": b"12345"}), model, gligabao.model_dir(tmp_path, model)
        )


def test_complete_model_deploys_while_somebody_holds_its_lock(lite: App, sidecar: Sidecar) -> None:
    sidecar.add({"a": b"12"})
    model = lite.record({"a": b"12"})
    assert lite.deploy(model).status == 200
    with open(lite.root / ".job-1.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert lite.deploy(model).status == 200


def test_only_missing_and_damaged_files_are_fetched_again(
    app: App, sidecar: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gligabao")
    sidecar.add(THREE)
    model = app.record(THREE)
    assert app.deploy(model).status == 200
    folder = app.root / "job-1"
    kept = (folder / "adapter_config.json").stat()
    flipped = bytearray(THREE["adapter_model.safetensors"])
    flipped[1] ^= 1
    times = (folder / "adapter_model.safetensors").stat()
    (folder / "adapter_model.safetensors").write_bytes(flipped)
    os.utime(folder / "adapter_model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    (folder / "tokenizer/vocab.txt").unlink()
    sidecar.asked.clear()
    assert app.deploy(model).status == 200
    assert sorted(sidecar.asked) == ["adapter_model.safetensors", "tokenizer/vocab.txt"]
    assert on_disk(folder) == THREE
    after = (folder / "adapter_config.json").stat()  # a reader may move its time of access
    assert (after.st_ino, after.st_ctime_ns) == (kept.st_ino, kept.st_ctime_ns)
    assert "1 kept, 1 fetched, 1 repaired" in caplog.text


def test_damaged_file_is_not_deployed_while_the_sidecar_is_down(
    app: App, sidecar: Sidecar, quick: None
) -> None:
    sidecar.add({"a": payload(100)})
    model = app.record({"a": payload(100)})
    (app.root / "job-1").mkdir(parents=True)
    (app.root / "job-1" / "a").write_bytes(payload(100, 9))
    sidecar.script["a"] = [says(b"")] * 5
    app.failed(model, app.deploy(model))


def test_file_without_a_digest_is_checked_by_size_alone(lite: App, sidecar: Sidecar) -> None:
    for job, size, status in (("job-1", 5, 200), ("job-2", 6, 502)):
        sidecar.add({"a": b"x" * size}, job)
        files = [{"path": "a", "size_bytes": 5, "sha256": None}]
        model = lite("POST", "/models", {"job_id": job, "files": files}).json["id"]
        assert lite.deploy(model).status == status


def test_twenty_deployments_at_once_fetch_each_file_once(app: App, sidecar: Sidecar) -> None:
    files = {f"f{n}.bin": payload(20_000, n) for n in range(4)} | {"big.bin": payload(2_000_000)}
    sidecar.add(files)
    model = app.record(files)
    with ThreadPoolExecutor(20) as pool:
        answers = [*pool.map(lambda _: app.deploy(model), range(20))]
    assert [answer.status for answer in answers] == [200] * 20
    assert len({answer.json["id"] for answer in answers}) == 20 == len(app.history(model))
    assert sorted(sidecar.asked) == sorted(files)


def test_waiting_deployment_fetches_for_itself_when_the_first_one_fails(
    app: App, sidecar: Sidecar
) -> None:
    sidecar.add({"a": b"12"})
    sidecar.script["a"] = [whole(b"xx")]
    model = app.record({"a": b"12"})
    with ThreadPoolExecutor(4) as pool:
        statuses = sorted(
            answer.status for answer in pool.map(lambda _: app.deploy(model), range(4))
        )
    assert statuses == [200, 200, 200, 502]
    assert sidecar.asked == ["a", "a"]


def test_stuck_fetch_blocks_no_other_model(lite: App, sidecar: Sidecar) -> None:
    sidecar.add({"a": b"12"}, "stuck")
    sidecar.add({"a": b"12"}, "free")
    sidecar.script["a"] = [lambda connection, data, start: sidecar.release.wait(20) and None]
    with lite.start_deploy(lite.record({"a": b"12"}, "stuck")):
        until(lambda: sidecar.asked)
        assert lite.deploy(lite.record({"a": b"12"}, "free")).status == 200


def test_lock_is_held_across_processes(lite: App, sidecar: Sidecar) -> None:
    sidecar.add({"a": b"12"})
    model = lite.record({"a": b"12"})
    lite.root.mkdir()
    with open(lite.root / ".job-1.lock", "w") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = pool.submit(lite.deploy, model)
        until(lambda: lite.history(model))
        assert sidecar.asked == []
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert answer.result(10).status == 200


def test_lock_of_a_failed_fetch_is_free_though_a_forked_child_has_it_open(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys, time
sys.path.insert(0, {str(HERE)!r})
import gligabao, test_gligabao as t

class Forking:
    def download_model_file(self, ctx, model_path, file, w):
        self.child = os.fork()
        if not self.child:
            time.sleep(60)
            os._exit(0)
        raise OSError(5, "half way")

model, target, forking = t.model_of({{"a": b"1"}}), {str(tmp_path / "job-1")!r}, Forking()
try:
    gligabao.fetch_model_files(gligabao.Context(), forking, model, target)
except gligabao.TrainingError as error:
    print(error)
gligabao.fetch_model_files(gligabao.Context(), t.Shelf({{"a": b"1"}}), model, target)
os.kill(forking.child, signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-Bc", code], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (0, "a: half way\n"), done.stderr


def test_links_and_fifos_in_the_place_of_files_are_replaced_not_followed(
    lite: App, sidecar: Sidecar, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(THREE["adapter_config.json"])
    folder = lite.root / "job-1"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "adapter_config.json").symlink_to(outside)
    os.mkfifo(folder / "tokenizer/vocab.txt")
    sidecar.add(THREE)
    model = lite.record(THREE)
    states = [file["state"] for file in lite("GET", f"/models/{model}/audit").json["files"]]
    assert states == ["missing"] * 3
    assert lite.deploy(model).status == 200
    assert all(
        stat.S_ISREG(path.lstat().st_mode)
        for path in (folder / "adapter_config.json", folder / "tokenizer/vocab.txt")
    )
    assert outside.read_bytes() == THREE["adapter_config.json"]


IN_THE_WAY: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "a directory as a file": (
        "adapter_config.json",
        lambda folder, other: (folder / "adapter_config.json").mkdir(parents=True),
    ),
    "a file as a directory": (
        "tokenizer/vocab.txt",
        lambda folder, other: (folder.mkdir(), (folder / "tokenizer").touch())[0],
    ),
    "a link as a directory": (
        "tokenizer/vocab.txt",
        lambda folder, other: (folder.mkdir(), (folder / "tokenizer").symlink_to(other))[0],
    ),
    "a link as the job's": ("adapter_config.json", lambda folder, other: folder.symlink_to(other)),
}


@pytest.mark.parametrize(("name", "make"), IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_what_is_in_the_way_fails_by_name_and_stays(
    lite: App, sidecar: Sidecar, tmp_path: Path, name: str, make: Callable[[Path, Path], None]
) -> None:
    lite.root.mkdir()
    other = tmp_path / "other"
    other.mkdir()
    make(lite.root / "job-1", other)
    sidecar.add(THREE)
    model = lite.record(THREE)
    assert lite.failed(model, lite.deploy(model))["error"].startswith(f"{name}: ")
    assert (sidecar.asked, on_disk(other)) == ([], {})
    assert lite("GET", f"/models/{model}/audit").json["complete"] is False


def test_leftovers_of_a_dead_fetch_are_removed_and_nothing_else(
    lite: App, sidecar: Sidecar
) -> None:
    files = {"sub/deep/x": b"x", "a": b"a"}
    sidecar.add(files)
    model = lite.record(files)
    for wanted in (files, {}):
        folder = lite.root / "job-1"
        (folder / "sub/deep").mkdir(parents=True, exist_ok=True)
        for path in (".fetch-dead", "sub/.fetch-dead", "sub/deep/.fetch-dead", "sub/mine.txt"):
            (folder / path).write_text("x")
        sidecar.asked.clear()
        assert lite.deploy(model).status == 200
        assert sorted(sidecar.asked) == sorted(wanted)
        assert on_disk(folder) == files | {"sub/mine.txt": b"x"}


@pytest.mark.parametrize("leftovers", [[], [".fetch-1"]], ids=["clean", "with a leftover"])
def test_complete_directory_deploys_where_nothing_can_be_written(
    tmp_path: Path, leftovers: list[str]
) -> None:
    model, target = model_of(THREE), tmp_path / "root" / "job-1"
    gligabao.fetch_model_files(Context(), Shelf(THREE), model, target)
    for name in leftovers:
        (target / name).touch()
    (tmp_path / "root" / ".job-1.lock").unlink()
    code = (
        f"import sys; sys.path[:0] = [{str(HERE)!r}, {str(tmp_path)!r}]; import os, gligabao, test_gligabao as t;"
        f"from pathlib import Path; os.getuid() or os.setuid(65534);"
        f"gligabao.fetch_model_files(gligabao.Context(), None, t.model_of(t.THREE), Path({str(target)!r}))"
    )
    for path in (target / "tokenizer", target, tmp_path / "root"):
        path.chmod(0o555)
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(path.stat().st_mode | 0o055)
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True)
    tmp_path.joinpath("root").chmod(0o755)
    assert done.returncode == 0, done.stderr


def test_fetched_files_have_the_permissions_of_new_files(lite: App, sidecar: Sidecar) -> None:
    sidecar.add({"a": b"1"})
    previous = os.umask(0o027)
    try:
        assert lite.deploy(lite.record({"a": b"1"})).status == 200
    finally:
        os.umask(previous)
    assert stat.S_IMODE((lite.root / "job-1" / "a").stat().st_mode) == 0o640


def test_lock_can_be_opened_by_others_of_the_group(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        fetch(tmp_path, Shelf({"a": b"1"}), {"a": b"1"})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / ".job-1.lock").stat().st_mode) == 0o664


def test_model_larger_than_the_disk_fails_before_the_first_byte(
    lite: App, sidecar: Sidecar, tmp_path: Path
) -> None:
    model = plant(
        str(tmp_path / "gligabao.db"), "job-1", [{"path": "a", "size_bytes": 1 << 60, "sha256": ""}]
    )
    assert "bytes are to be fetched" in lite.failed(model, lite.deploy(model))["error"]
    assert sidecar.asked == []
    audit = lite("GET", f"/models/{model}/audit").json
    assert (audit["bytes_to_fetch"], audit["fits"]) == (1 << 60, False)


def test_empty_blocks_and_a_buffer_used_again_do_not_matter(tmp_path: Path) -> None:
    class Reusing:
        def download_model_file(self, ctx: Context, model_path: str, file: str, w: Any) -> None:
            buffer = bytearray(b"hel")
            w.write(memoryview(buffer))
            w.write(b"")
            buffer[:] = b"xlo"
            w.write(memoryview(buffer)[1:])

    target = gligabao.model_dir(tmp_path, model_of({"a": b"hello"}))
    gligabao.fetch_model_files(Context(), Reusing(), model_of({"a": b"hello"}), target)
    assert on_disk(target) == {"a": b"hello"}


def test_disk_that_takes_no_more_fails_by_name_and_keeps_what_was_fetched(tmp_path: Path) -> None:
    code = (
        f"import sys, resource; sys.path.insert(0, {str(HERE)!r}); import gligabao, test_gligabao as t\n"
        f"files = {{'a': b'1' * 1000, 'b': t.payload(3_000_000)}}; model = t.model_of(files)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
        f"gligabao.fetch_model_files(gligabao.Context(), t.Shelf(files), model, {str(tmp_path / 'r' / 'job-1')!r})\n"
    )
    done = subprocess.run([sys.executable, "-Bc", code], capture_output=True, text=True, timeout=30)
    assert "TrainingError: b: File too large" in done.stderr
    assert on_disk(tmp_path / "r" / "job-1").keys() <= {"a"}


def test_fetch_has_a_limit_that_begins_with_the_lock(
    lite: App, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gligabao, "FETCH_TIMEOUT_S", 0.3)
    sidecar.add({"a": b"12"})
    sidecar.script["a"] = [lambda connection, data, start: sidecar.release.wait(20) and None]
    model = lite.record({"a": b"12"})
    assert "took longer than 0.3 s" in lite.failed(model, lite.deploy(model))["error"]
    assert lite.deploy(model).status == 200


# ---- deployment ----------------------------------------------------------------------------------


def test_flow_completes_and_the_answer_is_the_record(app: App, sidecar: Sidecar) -> None:
    sidecar.add(THREE)
    fields = {
        "name": "Support ü 模型",
        "num_examples": 1200,
        "final_loss": 0.125,
        "params": {"lr": 1e-4},
    }
    model = app.record(THREE, **fields)
    options = {"s": "ü😀\u2028", "n": None, "i": 12345678901234567890123, "": {"": [1.0, -0.0]}}
    answer = app.deploy(model, "echo", options)
    assert answer.status == 200
    deployment = answer.json
    assert list(deployment) == DEPLOYMENT_KEYS
    assert [deployment] == app.history(model)
    assert [deployment[key] for key in ("status", "ref", "error")] == ["completed", "echo", ""]
    assert deployment["dir"] == str(app.root / "job-1")
    seen = deployment["details"]
    assert str(seen["options"]) == str(options) == str(deployment["options"])
    assert seen["id"] == deployment["id"]
    assert seen["model"] == app("GET", f"/models/{model}").json
    assert {key: seen["model"][key] for key in fields} == fields
    (event,) = app.events
    told = {"model_id": model, "deploy_id": 1, "deployer": "echo"}
    told["duration_ms"] = deployment["duration_ms"]
    assert event == gligabao.SystemEvent("training.model_deploy.completed", told)


def test_deployers_error_is_502_and_recorded(app: App, sidecar: Sidecar) -> None:
    sidecar.add(THREE)
    model = app.record(THREE)
    deployment = app.failed(model, app.deploy(model, "broken"))
    assert deployment["error"] == "the bucket is on fire"
    assert deployment["dir"] == str(app.root / "job-1")


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"null", b"[]", b'"x"', b"{} x", b'{"deployer":"\x97"}'),
        *("\ufeff{}".encode(), '{"a":1}'.encode("utf-16"), {}),
        *({"deployer": name} for name in (None, 5, "nobody", "OK", ["ok"])),
        *(
            {"deployer": "ok", "options": options}
            for options in ([], "x", 0, True, False, "", {"a": "x" * 65536})
        ),
        b'{"deployer":"ok","options":{"a":NaN}}',
    ],
    ids=lambda body: str(body)[:40],
)
def test_bad_request_for_a_deployment_is_400_and_not_recorded(
    lite: App, sidecar: Sidecar, body: object
) -> None:
    model = lite.record({"a": b"1"})
    assert lite("POST", f"/models/{model}/deployments", body).error
    assert lite("POST", f"/models/{model}/deployments", body).status == 400
    assert (lite.history(model), lite.events, sidecar.asked) == ([], [], [])


def test_refusals_come_in_the_order_of_the_contract(
    serve: Callable[..., App], tmp_path: Path
) -> None:
    app = serve(sidecar=None)
    model = app.record({"a": b"1"})
    evil = plant(str(tmp_path / "gligabao.db"), "../evil", listed({"a": b"1"}))
    statuses = {
        "unknown model, bad body": app("POST", "/models/99/deployments", b"{").status,
        "bad job, unknown deployer": app.deploy(evil, "nobody").status,
        "bad job, no sidecar": app.deploy(evil).status,
        "unknown deployer, no sidecar": app.deploy(model, "nobody").status,
        "no sidecar": app.deploy(model).status,
    }
    assert [*statuses.values()] == [404, 400, 400, 400, 503]
    assert app.history(model) == []


def test_unknown_deployer_is_told_the_registered_names(
    serve: Callable[..., App], lite: App, tmp_path: Path
) -> None:
    model = lite.record({"a": b"1"})
    assert "broken, echo, ok, patient" in lite.deploy(model, "nobody").error
    none = serve(trained_model_deployers=None, database=str(tmp_path / "other.db"))
    assert "none is registered" in none.deploy(none.record({"a": b"1"})).error
    assert none("GET", "/deployers").json == {"deployers": []}


def test_options_are_measured_as_compact_json_in_utf8(lite: App, sidecar: Sidecar) -> None:
    sidecar.add({"a": b"1"})
    model = lite.record({"a": b"1"})
    room = 65536 - len('{"a":""}')
    euros = "\\u20ac" * (room // 3)
    for text, status in (
        ("x" * room, 200),
        ("x" * (room + 1), 400),
        (euros, 200),
        ("€" * (room // 3) + "xxx", 400),
    ):
        body = f'{{"deployer": "ok", "options"   :   {{"a": "{text}"}}}}'
        assert lite("POST", f"/models/{model}/deployments", body.encode()).status == status


def test_absent_options_are_none_to_the_hook_and_an_empty_object_in_the_record(
    app: App, sidecar: Sidecar
) -> None:
    sidecar.add({"a": b"1"})
    model = app.record({"a": b"1"})
    for body, seen in (
        (b'{"deployer":"echo"}', None),
        (b'{"deployer":"echo","options":null,"x":1}', None),
        (b'{"deployer":"echo","options":{}}', {}),
    ):
        deployment = app("POST", f"/models/{model}/deployments", body).json
        assert (deployment["details"]["options"], deployment["options"]) == (seen, {})


def deployed(tmp_path: Path, deploy: Any, options: Any = None, **more: Any) -> dict[str, Any]:
    """Deploy from Python with one deployer; return the stored deployment, failed ones too."""
    model = model_of(more.pop("files", {"a": b"1"}))
    fetcher = more.pop("fetcher", Shelf({"a": b"1"}))
    database = str(tmp_path / "x.db")
    with contextlib.closing(gligabao.open_store(database)) as store:
        if not store.list_trained_models():
            plant(database, "job-1", listed({"a": b"1"}))
        deployers = gligabao.resolve_deployers({"it": deploy})
        try:
            return gligabao.deploy_model(
                *(
                    more.pop("ctx", None) or Context(),
                    store,
                    fetcher,
                    deployers,
                    tmp_path / "root",
                    model,
                ),
                DeployRequest("it", options),
                **more,
            )
        except gligabao.TrainingError as error:
            assert error.kind == "upstream"
            assert error.deployment == store.list_trained_model_deployments(1)[0]
            return error.deployment or {}


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")


class Nameless(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise SystemExit("no name")


class Ineffable(Unspeakable, metaclass=Nameless):
    pass


class Noted(Exception):
    @property
    def __notes__(self) -> Any:
        raise SystemExit("no notes")


class OddText(str):
    __slots__ = ()
    __len__ = __format__ = __eq__ = __hash__ = None  # type: ignore[assignment]


RAISED = {
    "an exception": (ValueError("on fire"), "on fire"),
    "without text": (ValueError(), "ValueError"),
    "SystemExit": (SystemExit(), "SystemExit"),
    "SystemExit with text": (SystemExit("stop it"), "stop it"),
    "KeyboardInterrupt": (KeyboardInterrupt(), "KeyboardInterrupt"),
    "GeneratorExit": (GeneratorExit(), "GeneratorExit"),
    "StopIteration": (StopIteration(), "StopIteration"),
    "Cancelled": (gligabao.Cancelled("made up"), "made up"),
    "one that has no words": (Unspeakable(), "Unspeakable"),
    "one that has not even a name": (Ineffable(), "an exception without words"),
    "NUL": (RuntimeError("a\0b"), "a\ufffdb"),
    "a key": (KeyError("bucket"), "KeyError: 'bucket'"),
    "an index": (IndexError("list index out of range"), "IndexError: list index out of range"),
    "a key without text": (KeyError(), "KeyError"),
}


@pytest.mark.parametrize(("error", "text"), RAISED.values(), ids=RAISED)
def test_whatever_a_deployer_raises_is_recorded(
    tmp_path: Path, error: BaseException, text: str
) -> None:
    def deploy(ctx: Context, req: Any) -> None:
        raise error

    assert deployed(tmp_path, deploy)["error"] == text


def logged(caplog: pytest.LogCaptureFixture, deploy_id: int = 1) -> list[str]:
    """Return the lines of the traceback that was logged of a deployment."""
    mark = f"deployment {deploy_id} | "
    lines = [record for record in caplog.records if record.getMessage().startswith(mark)]
    assert {record.levelno for record in lines} <= {logging.WARNING}
    return [line.getMessage().removeprefix(mark) for line in lines]


def test_traceback_of_a_deployer_is_logged_from_its_own_first_frame(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def settings(name: str) -> None:
        raise KeyError(name)

    def upload() -> None:
        try:
            settings("bucket")
        except KeyError as error:
            error.add_note("look at the settings")
            raise RuntimeError("no upload") from error

    def deploy(ctx: Context, req: Any) -> None:
        upload()

    assert deployed(tmp_path, deploy)["error"] == "no upload"
    lines = logged(caplog)
    frames = [line.rpartition(" in ")[2] for line in lines if line.startswith("  File ")]
    assert [frame.rpartition(".")[2] for frame in frames] == [
        *("upload", "settings"),
        *("deploy", "upload"),
    ]
    for part in ("KeyError: 'bucket'", "look at the settings", '    settings("bucket")'):
        assert part in lines
    assert lines[-1] == "RuntimeError: no upload"
    assert "gligabao.py" not in "".join(lines).replace(Path(__file__).name, "")


@pytest.mark.parametrize(
    ("deploy", "last"),
    [
        (lambda ctx: None, "TypeError: <lambda>() takes 1 positional argument but 2 were given"),
        (
            lambda ctx, req: 5,
            "TypeError: the deployer returned a result of type int,"
            " not DeployTrainedModelResult or None",
        ),
        (
            lambda ctx, req: DeployTrainedModelResult(details=Hostile(a=1)),
            "ValueError: the deployer returned details that are no JSON: ",
        ),
    ],
    ids=["a wrong signature", "a refused result", "details that raise"],
)
def test_what_is_wrong_with_a_deployer_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, deploy: Any, last: str
) -> None:
    assert deployed(tmp_path, deploy)["status"] == "failed"
    assert last in logged(caplog)[-1]
    assert f'File "{MODULE}"' not in "".join(logged(caplog))


@pytest.mark.parametrize("kind", [gligabao.Cancelled, functools.partial(TrainingError, "upstream")])
def test_what_is_ours_is_logged_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    def deploy(ctx: Context, req: Any) -> None:
        raise kind("enough")

    assert deployed(tmp_path, deploy)["error"] == "enough"
    assert logged(caplog) == []


def deep(levels: int) -> None:
    """Raise from deep below, over two lines in turn, since Python tells a repeated one once."""
    if not levels:
        raise OSError(errno.ENOSPC, "No space left on device")
    if levels % 2:
        deep(levels - 1)
    deep(levels - 1)


ODD_TRACEBACKS = {
    "forged lines": (RuntimeError("x\nINFO deployment 9 completed\r\u2028\x1b[2J"), "[2J"),
    "no words": (Unspeakable(), "Unspeakable: <exception str() failed>"),
    "not even a name": (Ineffable(), "<exception str() failed>"),
    "odd notes": (Noted("x"), "x"),
    "a long line": (RuntimeError("x" * 5000), "x…"),
    "many lines": (RuntimeError("\n" * 5000 + "end"), "end"),
}


@pytest.mark.parametrize(("error", "last"), ODD_TRACEBACKS.values(), ids=ODD_TRACEBACKS)
def test_no_exception_forges_or_floods_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: BaseException, last: str
) -> None:
    def deploy(ctx: Context, req: Any) -> None:
        raise error

    assert deployed(tmp_path, deploy)["status"] == "failed"
    lines = logged(caplog)
    assert lines[-1].endswith(last)
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 1000
    assert not [m for m in caplog.messages if m.startswith("INFO") or "\x1b" in m or "\n" in m]


def test_long_traceback_is_cut_in_the_middle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def deploy(ctx: Context, req: Any) -> None:
        deep(200)

    deployed(tmp_path, deploy)
    lines = logged(caplog)
    assert len(lines) == 60
    assert lines[1].endswith("deploy")
    assert re.fullmatch(r"… \d+ lines are left out …", lines[30])
    assert lines[-1] == "OSError: [Errno 28] No space left on device"


def test_traceback_of_a_fetcher_and_of_the_hook_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def hook(event: gligabao.SystemEvent) -> None:
        assert event.fields["deployer"] == "nobody", "the hook's own"

    deployed(tmp_path, ok, system_event=hook)
    assert logged(caplog)[1].endswith(" in hook")
    assert "AssertionError: the hook's own" in "".join(logged(caplog))
    shelf = Shelf({}, LookupError("no such shelf"))
    assert deployed(tmp_path, ok, fetcher=shelf, files={"b": b"2"})["status"] == "failed"
    first, *_, last = logged(caplog, 2)
    assert (first, last) == ("Traceback (most recent call last):", "LookupError: no such shelf")
    assert logged(caplog, 2)[1].endswith(" in download_model_file")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    text: str

    def __str__(self) -> str:
        return self.text


def test_result_whose_parts_raise_is_recorded_though_the_client_left(tmp_path: Path) -> None:
    class Trap(DeployTrainedModelResult):
        @property
        def ref(self) -> str:  # type: ignore[override]
            raise Disguised("x")

    def deploy(ctx: Context, req: Any) -> DeployTrainedModelResult:
        outer.cancel("gone")
        return Trap.__new__(Trap)

    outer = Context()
    assert deployed(tmp_path, deploy, ctx=outer)["error"] == "gone: x"


def test_failed_deployer_leaves_nothing_open_until_a_collection(tmp_path: Path) -> None:
    class Held:
        pass

    def deploy(ctx: Context, req: Any) -> None:
        held = Held()
        kept.append(weakref.ref(held))
        raise RuntimeError("x")

    kept: list[weakref.ref[Held]] = []
    gc.disable()
    try:
        deployed(tmp_path, deploy)
        assert kept[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [Disguised, Frozen])
def test_exception_of_an_odd_class_is_recorded(
    tmp_path: Path, kind: Callable[[str], BaseException]
) -> None:
    def deploy(ctx: Context, req: Any) -> None:
        raise kind("x")

    assert deployed(tmp_path, deploy)["error"] == "x"


def test_ref_of_an_odd_class_of_text_is_recorded_as_text(tmp_path: Path) -> None:
    stored = deployed(tmp_path, lambda ctx, req: DeployTrainedModelResult(OddText("odd")))
    assert stored["ref"] == "odd"


@pytest.mark.parametrize("reason", ["", 5])
def test_deployer_that_cancels_itself_has_failed(tmp_path: Path, reason: Any) -> None:
    def deploy(ctx: Context, req: Any) -> None:
        ctx.cancel(reason)
        ctx.raise_if_cancelled()

    assert deployed(tmp_path, deploy)["error"] == str(reason or "cancelled")


@pytest.mark.parametrize("options", [{}, {"an act": "that exits"}], ids=str)
def test_context_that_a_deployer_breaks_is_its_own(
    serve: Callable[..., App], sidecar: Sidecar, options: dict[str, str]
) -> None:
    def breaks(ctx: Any, req: gligabao.DeployTrainedModelRequest) -> None:
        if req.options:
            with ctx._on_cancel(sys.exit):
                ctx.wait(20)
        ctx.cancel("by itself")
        ctx.reason = ctx.cancel = ctx._event = None
        sidecar.release.wait(20)
        raise Disguised("x")

    app = serve(trained_model_deployers=DEPLOYERS | {"breaks": breaks})
    sidecar.add({"a": b"1"})
    model = app.record({"a": b"1"})
    with app.start_deploy(model, "breaks", options):
        until(lambda: app.progress(model).get("files_done"))
    with app.start_deploy(model, "patient"):
        until(lambda: len(app.history(model)) == 2)
    until(lambda: app.newest(model)["error"] == "the client disconnected")
    sidecar.release.set()
    until(lambda: app.history(model)[1]["error"] == "the client disconnected: x")


def test_deployment_that_gets_no_thread_is_recorded(tmp_path: Path) -> None:
    size = threading.stack_size(1 << 46)  # more than there can be
    try:
        assert "thread" in deployed(tmp_path, ok)["error"]
    finally:
        threading.stack_size(size)


def test_default_timeout_that_a_deployer_sets_is_not_the_servers(lite: App) -> None:
    socket.setdefaulttimeout(0.1)
    try:
        with lite.connect() as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
            time.sleep(0.5)
            connection.sendall(b"\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
    finally:
        socket.setdefaulttimeout(None)


def test_long_error_is_cut_with_a_mark(tmp_path: Path) -> None:
    def deploy(ctx: Context, req: Any) -> None:
        raise RuntimeError("x" * 5_000_000)

    assert deployed(tmp_path, deploy)["error"] == "x" * 9_999 + "…"


def cycle() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


class Hostile(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("no items for you")

    __iter__ = keys = values = items


BAD_DETAILS = {
    "NaN": {"a": [float("nan")]},
    "infinity": {"a": -float("inf")},
    "a number as key": {1: "a"},
    "None as key": {"a": [{None: 1}]},
    "a cycle": cycle(),
    "301 levels": nested(301),
    "100,000 levels": nested(100_000),
    "bytes": {"b": b"x"},
    "a set": {"s": {1}},
    "an object": {"o": object()},
    "a lone surrogate": {"s": "\ud800"},
    "a huge number": {"n": 10**5000},
    "a hostile dict": Hostile(a=1),
    "a list": ["x"],
    "a text": "x",
    "zero": 0,
}


@pytest.mark.parametrize("details", BAD_DETAILS.values(), ids=BAD_DETAILS)
def test_details_that_are_no_json_object_fail_by_that_name(tmp_path: Path, details: Any) -> None:
    failed = deployed(tmp_path, lambda ctx, req: DeployTrainedModelResult("ref", details))
    assert "details" in failed["error"]
    assert failed["status"] == "failed"


def test_good_details_are_kept_as_they_were_returned(tmp_path: Path) -> None:
    details = {
        "b": 1,
        "a": {"x": (1.0, None, True, "ü")},
        "big": 12345678901234567890123,
        "": 0,
        "deep": nested(299),
    }
    stored = deployed(tmp_path, lambda ctx, req: DeployTrainedModelResult("ref", details))
    assert json.dumps(stored["details"]) == json.dumps(details)
    assert deployed(tmp_path, lambda ctx, req: None)["details"] == {}


async def coroutine(ctx: Context, req: Any) -> None:
    pass


@pytest.mark.parametrize(
    "deploy",
    [
        coroutine,
        lambda ctx, req: ("ref", {}),
        lambda ctx, req: {"ref": "x"},
        lambda ctx, req: True,
        lambda ctx, req: DeployTrainedModelResult,
        lambda ctx, req: DeployTrainedModelResult(5),  # type: ignore[arg-type]
        lambda ctx, req: DeployTrainedModelResult(None),  # type: ignore[arg-type]
        lambda ctx: None,
    ],
)
def test_wrong_result_fails_by_its_name(tmp_path: Path, deploy: Any) -> None:
    assert re.search("returned|argument", deployed(tmp_path, deploy)["error"])


def test_what_a_deployer_changes_reaches_nobody_else(
    app: App, sidecar: Sidecar, serve: Callable[..., App], database: str
) -> None:
    kept: list[dict[str, Any]] = []

    def change(ctx: Context, req: gligabao.DeployTrainedModelRequest) -> DeployTrainedModelResult:
        assert req.options is not None
        assert req.options.pop("nested") == {"a": 1}
        req.model.params["evil"] = True
        kept.append({"live": [1]})
        return DeployTrainedModelResult("changed", kept[-1])

    other = serve(database=database, trained_model_deployers={"change": change})
    sidecar.add({"a": b"1"})
    model = other.record({"a": b"1"}, params={"lr": 1})
    for _ in range(2):
        deployment = other.deploy(model, "change", {"nested": {"a": 1}}).json
        kept[-1]["live"].append(2)
        assert deployment["options"] == {"nested": {"a": 1}}
        assert other.history(model)[0]["details"] == {"live": [1]}
    assert other("GET", f"/models/{model}").json["params"] == {"lr": 1}


def test_model_of_a_script_is_not_changed_by_its_deployer(tmp_path: Path) -> None:
    def change(ctx: Context, req: gligabao.DeployTrainedModelRequest) -> None:
        req.model.params["evil"] = True
        vars(req.model.files[0])["path"] = "evil"
        assert req.options is not None
        req.options["list"].append("evil")

    options, database = {"list": [1]}, str(tmp_path / "x.db")
    model = dataclasses.replace(model_of({"a": b"1"}), params={"lr": 1})
    with contextlib.closing(gligabao.open_store(database)) as store:
        plant(database, "job-1", "[]")
        deployers = gligabao.resolve_deployers({"it": change})
        gligabao.deploy_model(
            *(Context(), store, Shelf({"a": b"1"}), deployers, tmp_path, model),
            DeployRequest("it", options),
        )
    assert (model.params, model.files[0].path) == ({"lr": 1}, "a")
    assert options == {"list": [1]}


def test_file_changed_by_a_deployer_is_warned_of_and_repaired(
    serve: Callable[..., App], sidecar: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    def vandal(ctx: Context, req: gligabao.DeployTrainedModelRequest) -> None:
        (req.dir / "adapter_config.json").write_bytes(b"{'r': 9}")

    app = serve(trained_model_deployers={"vandal": vandal, "ok": ok})
    sidecar.add(THREE)
    model = app.record(THREE)
    assert app.deploy(model, "vandal").status == 200
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    assert "adapter_config.json changed" in warned[0]
    assert app.deploy(model).status == 200
    assert on_disk(app.root / "job-1") == THREE


def test_time_that_a_deployer_sets_is_no_change_but_a_byte_is(
    serve: Callable[..., App], sidecar: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    def touch(ctx: Context, req: gligabao.DeployTrainedModelRequest) -> None:
        for file in req.model.files:
            os.utime(req.dir / file.path)

    def spoil(ctx: Context, req: gligabao.DeployTrainedModelRequest) -> None:
        path = req.dir / "adapter_config.json"
        before = path.stat()
        path.write_bytes(b'{"r": 9}')
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + (req.options or {})["ns"]))

    app = serve(trained_model_deployers={"touch": touch, "spoil": spoil, "ok": ok})
    caplog.set_level(logging.INFO, "gligabao")
    sidecar.add(THREE)
    model = app.record(THREE)
    for deployer, ns, expected in (
        ("touch", 0, "0 kept, 3 fetched"),
        ("touch", 0, "3 kept, 0 fetched, 0 repaired"),
        ("spoil", 1, "3 kept"),  # another time: seen at once
        ("spoil", 0, "2 kept, 0 fetched, 1 repaired"),  # the same size and time: seen by the next
        ("ok", 0, "2 kept, 0 fetched, 1 repaired"),
    ):
        caplog.clear()
        assert app.deploy(model, deployer, {"ns": ns}).status == 200
        assert expected in caplog.text
        assert ("adapter_config.json changed" in caplog.text) == (ns == 1)
    assert on_disk(app.root / "job-1") == THREE


def test_file_that_cannot_be_read_again_costs_no_result(tmp_path: Path) -> None:
    def deploy(ctx: Context, req: gligabao.DeployTrainedModelRequest) -> DeployTrainedModelResult:
        os.utime(req.dir / "a")
        outer.cancel(gligabao.SERVER_STOPPING)
        return DeployTrainedModelResult("made-it")

    outer = Context()
    assert deployed(tmp_path, deploy, ctx=outer)["ref"] == "made-it"


def test_deployer_and_hook_may_call_the_api(serve: Callable[..., App], sidecar: Sidecar) -> None:
    made: list[App] = []

    def reenter(ctx: Context, req: gligabao.DeployTrainedModelRequest) -> DeployTrainedModelResult:
        inner = made[0].deploy(req.model.id, "ok")
        return DeployTrainedModelResult(
            "in", {"inner": inner.status, "own": made[0].history(req.model.id)[1]["status"]}
        )

    events: list[int] = []
    hook = lambda event: events.append(len(made[0].history(event.fields["model_id"])))  # noqa: E731
    made.append(serve(trained_model_deployers={"reenter": reenter, "ok": ok}, system_event=hook))
    sidecar.add(THREE)
    answer = made[0].deploy(made[0].record(THREE), "reenter")
    assert answer.json["details"] == {"inner": 200, "own": "running"}
    assert events == [2, 2]


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), SystemExit(3), KeyboardInterrupt(), Ineffable()],
    ids=["ValueError", "SystemExit", "KeyboardInterrupt", "no name"],
)
def test_broken_hook_changes_nothing_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def hook(event: gligabao.SystemEvent) -> None:
        event.fields.clear()
        raise error

    assert deployed(tmp_path, ok, system_event=hook)["status"] == "completed"
    assert "hook raised" in caplog.text


def test_model_deleted_meanwhile_is_500_with_an_event_that_names_the_ref(
    serve: Callable[..., App], sidecar: Sidecar, database: str
) -> None:
    made: list[App] = []

    def delete(ctx: Context, req: gligabao.DeployTrainedModelRequest) -> DeployTrainedModelResult:
        assert made[0]("DELETE", f"/models/{req.model.id}").status == 204
        return DeployTrainedModelResult("made-it")

    made.append(serve(database=database, trained_model_deployers={"delete": delete}))
    sidecar.add({"a": b"1"})
    answer = made[0].deploy(made[0].record({"a": b"1"}), "delete")
    assert answer.status == 500
    (event,) = made[0].events
    assert event.type == "training.model_deploy.failed"
    for text in (answer.error, event.fields["error"]):
        assert "deleted meanwhile" in text
        assert "made-it" in text


def test_end_that_cannot_be_recorded_is_500_and_the_row_stays_running(
    serve: Callable[..., App], sidecar: Sidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gligabao, "FINISH_TIMEOUT_S", 0.1)
    database = str(tmp_path / "gligabao.db")

    def lock(ctx: Context, req: gligabao.DeployTrainedModelRequest) -> DeployTrainedModelResult:
        with direct(database) as sql:
            sql(
                "CREATE TRIGGER no BEFORE UPDATE ON gb_trained_model_deployments BEGIN SELECT RAISE(ABORT, 'disk full'); END"
            )
        return DeployTrainedModelResult("made-it")

    app = serve(trained_model_deployers={"lock": lock})
    sidecar.add({"a": b"1"})
    model = app.record({"a": b"1"})
    answer = app.deploy(model, "lock")
    assert answer.status == 500
    assert "disk full" in answer.error
    assert "made-it" in answer.error
    assert app.events[0].fields["error"] == answer.error
    assert app.history(model)[0]["status"] == "running"


def test_progress_of_a_running_deployment_is_listed(app: App, sidecar: Sidecar) -> None:
    files = {"a.bin": payload(1000), "b.bin": payload(4_000_000, 1)}
    sidecar.add(files)
    going = threading.Event()

    def portions(connection: socket.socket, data: bytes, start: int) -> None:
        connection.sendall(head(200, f"Content-Length: {len(data)}") + data[:3_500_000])
        going.wait(20)
        connection.sendall(data[3_500_000:])

    sidecar.script["b.bin"] = [portions]
    model = app.record(files)
    with app.start_deploy(model, "patient"):
        until(lambda: app.progress(model).get("bytes_done", 0) > 2_500_000)
        progress = until(lambda: (seen := app.progress(model))["files_done"] == 1 and seen)
        assert (progress["files_total"], progress["bytes_total"]) == (2, 4_001_000)
        assert progress["bytes_done"] <= 3_501_000
        assert app.history(model)[0]["dir"] == ""
        going.set()
        until(lambda: app.progress(model).get("bytes_done") == 4_001_000)
    until(lambda: "progress" not in app.history(model)[0])


def test_report_of_a_running_deployment_is_listed(serve: Serve, sidecar: Sidecar) -> None:
    told, go = threading.Event(), threading.Event()

    def tells(ctx: Context, req: object) -> None:
        told.wait(20)
        ctx.report("half\ud800 way", 0.5)
        go.wait(20)

    app = serve(trained_model_deployers={"tells": tells})
    sidecar.add({"a": b"1"})
    model = app.record({"a": b"1"})
    with app.start_deploy(model, "tells") as connection:
        assert until(lambda: app.progress(model))["report"] is None
        told.set()
        report = until(lambda: app.progress(model)["report"])
        assert report == {"text": "half? way", "fraction": 0.5}
        go.set()
        connection.recv(1)
    assert "progress" not in app.history(model)[0]


def test_infinity_in_a_damaged_row_is_shown_as_null(
    lite: App, sidecar: Sidecar, tmp_path: Path
) -> None:
    sidecar.add({"a": b"1"})
    model = lite.record({"a": b"1"})
    assert lite.deploy(model).status == 200
    with direct(str(tmp_path / "gligabao.db")) as sql:
        sql("UPDATE gb_trained_model_deployments SET duration_ms = 9e999")
        sql("UPDATE gb_trained_models SET num_examples = -9e999")
    assert lite.newest(model)["duration_ms"] is None
    assert lite("GET", "/models").json["models"][0]["num_examples"] is None


def test_interrupted_script_leaves_a_record_and_goes_on_being_interrupted(tmp_path: Path) -> None:
    def deploy(ctx: Context, req: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        ctx.wait(20)
        ctx.raise_if_cancelled()

    with pytest.raises(KeyboardInterrupt):
        deployed(tmp_path, deploy)
    with contextlib.closing(gligabao.open_store(str(tmp_path / "x.db"))) as store:
        assert store.list_trained_model_deployments(1)[0]["error"] == "interrupted"


def test_deploy_model_refuses_before_it_records(tmp_path: Path) -> None:
    with contextlib.closing(gligabao.open_store(str(tmp_path / "x.db"))) as store:
        plant(str(tmp_path / "x.db"), "job-1", [])
        deployers = gligabao.resolve_deployers({"ok": ok})

        def kind(model: TrainedModel, deployer: str, options: Any = None) -> str:
            with pytest.raises(gligabao.TrainingError) as caught:
                gligabao.deploy_model(
                    Context(),
                    store,
                    None,
                    deployers,
                    tmp_path,
                    model,
                    DeployRequest(deployer, options),
                )
            assert caught.value.deployment is None
            return caught.value.kind

        good = model_of({"a": b"1"})
        kinds = [
            kind(good, "nobody"),
            kind(good, "ok", [1]),
            kind(TrainedModel(1, "n", "../x"), "ok"),
            kind(good, "ok"),
        ]
        assert kinds == ["invalid", "invalid", "invalid", "unavailable"]
        assert store.list_trained_model_deployments(1) == []


# ---- HTTP ----------------------------------------------------------------------------------------


def test_plain_routes(lite: App) -> None:
    home = request(lite.url, "GET", "/")
    assert (home.status, home.headers["Location"]) == (302, "admin")
    assert request(lite.url, "GET", "/health").json == {
        "status": "ok",
        "version": gligabao.__version__,
    }
    page = request(lite.url, "GET", "/admin")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    for answer in (
        home,
        page,
        request(lite.url, "GET", "/nope"),
        request(lite.url, "PUT", "/health"),
    ):
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    policy = {*page.headers["Content-Security-Policy"].split("; ")}
    assert {
        "default-src 'none'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    } <= policy
    assert "unsafe" not in str(policy)


@pytest.mark.parametrize(
    "path",
    [
        "/nope",
        "/v1",
        API,
        f"{API}/models/",
        f"{API}/models/1/",
        f"{API}/models/1/nope",
        "/admin/x",
        "//health",
        "/%68ealth",
    ],
)
def test_unknown_route_is_404_in_json(lite: App, path: str) -> None:
    (answer,) = raw(lite, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert (answer.status, bool(answer.error)) == (404, True)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", f"{API}/models", {"GET", "HEAD", "POST"}),
        ("POST", f"{API}/deployers", {"GET", "HEAD"}),
        ("OPTIONS", "/health", {"GET", "HEAD"}),
        ("PATCH", f"{API}/models/1", {"GET", "HEAD", "DELETE"}),
        ("get", f"{API}/models/1/audit", {"GET", "HEAD"}),
        ("FOO", f"{API}/models/1/deployments", {"GET", "HEAD", "POST"}),
    ],
)
def test_other_method_is_405_with_allow(lite: App, method: str, path: str, allow: set[str]) -> None:
    answer = request(lite.url, method, path)
    assert (answer.status, {*answer.headers["Allow"].split(", ")}) == (405, allow)
    assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize(
    "id",
    [
        *"9223372036854775807 9223372036854775808 0 -1 +1 01 1_0 1%0A %D9%A1 1.0 1e0 0x1 x".split(),
        "9" * 5000,
    ],
)
def test_odd_id_is_an_unknown_model(lite: App, id: str) -> None:
    lite.record({"a": b"1"})
    for method, path in zip(
        ("GET", "DELETE", "GET", "POST"), ("", "", "/audit", "/deployments"), strict=True
    ):
        assert lite(method, f"/models/{id}{path}").status == 404
    assert lite("GET", f"/models/{id}/deployments").status == 404


def test_limit_counts_from_the_newest(app: App, sidecar: Sidecar, database: str) -> None:
    model = app.record({"a": b"1"})
    with direct(database) as sql:
        for _ in range(520):
            sql(
                "INSERT INTO gb_trained_model_deployments (trained_model_id, deployer, options, status, created_at)"
                " VALUES (?, 'x', '{}', 'failed', '2026-01-02T03:04:05Z')",
                model,
            )
    plant(database, "job-2", [])
    path = f"/models/{model}/deployments"
    for query, count in (
        ("", 100),
        ("?limit=1", 1),
        ("?limit=501", 500),
        ("?limit=002", 2),
        (f"?limit={'9' * 5000}", 500),
        ("?LIMIT=1", 100),
        ("?limit=3&limit=2", 2),
        ("?x=%ff", 100),
    ):
        rows = app("GET", path + query).json["deployments"]
        assert [row["id"] for row in rows] == [*range(520, 520 - count, -1)]
    with direct(database) as sql:
        if "://" not in database:  # where nothing holds others to the reference
            sql("UPDATE gb_trained_model_deployments SET trained_model_id = ? WHERE id = 1", 77)
            assert app("GET", "/models/77/deployments").status == 404
            sql("UPDATE gb_trained_model_deployments SET trained_model_id = ? WHERE id = 1", model)
    for bad in ("0", "-1", "+1", "abc", "", "1.5", "1e2", "%D9%A5", "1_0", "%201", "00"):
        assert app("GET", f"{path}?limit={bad}").status == 400
        assert app("GET", f"/models?limit={bad}").status == 400
        assert app("GET", f"/models/99/deployments?limit={bad}").status == 404
    assert len(app("GET", "/models?limit=1").json["models"]) == 1


def test_json_of_short_rows_is_kept_and_follows_the_row(
    lite: App, sidecar: Sidecar, tmp_path: Path
) -> None:
    sidecar.add({"a": b"1"})
    model = lite.record({"a": b"1"})
    lite.deploy(model, options={"a": "x" * 5000})
    gligabao._kept_text.cache_clear()
    assert len(lite.history(model)[0]["options"]["a"]) == 5000
    assert gligabao._kept_text.cache_info().currsize == 0
    lite.deploy(model)
    assert lite.history(model) == lite.history(model)
    assert gligabao._kept_text.cache_info().hits == 1
    with direct(str(tmp_path / "gligabao.db")) as sql:
        sql("UPDATE gb_trained_model_deployments SET error = 'by others'")
    assert [row["error"] for row in lite.history(model)] == ["by others"] * 2


def test_models_are_recorded_listed_and_got(app: App) -> None:
    model = app(
        "POST", "/models", {"job_id": "job-1", "files": listed({"a": b"1"}), "unknown": 1}
    ).json
    assert model | {"created_at": ""} == {
        "id": 1,
        "name": "job-1",
        "job_id": "job-1",
        "base_model": "",
        "model_size": "",
        "dataset": "",
        "num_examples": 0,
        "num_train_steps": 0,
        "final_loss": None,
        "params": {},
        "path": "trained/job-1",
        "files": listed({"a": b"1"}),
        "created_at": "",
    }
    assert model["created_at"].endswith("Z")
    again = app("POST", "/models", {"job_id": "job-1", "files": listed({"a": b"1"})})
    assert (again.status, "already" in again.error, again.json["model"]) == (409, True, model)
    second = app(
        "POST",
        "/models",
        {"job_id": "job-2", "files": listed({"a": b"1"}), "path": "", "final_loss": 1},
    ).json
    assert app("GET", "/models").json == {"models": [second, model]}
    for query, expected in (
        ("job_id=job-1", [model]),
        ("limit=1&job_id=job-1", [model]),
        ("job_id=nope", []),
        ("job_id=", []),
        ("job_id=%00%ff", []),
    ):
        assert app("GET", f"/models?{query}").json == {"models": expected}
    assert app("GET", "/models?limit=0&job_id=job-1").status == 400
    assert app("GET", f"/models/{model['id']}").json == model


REFUSED = [
    *({}, [], None, "x", {"job_id": 5}),
    *(
        {"files": files}
        for files in ({}, "x", [5], [{}], [None], [], [{"path": "a"}], [{"size_bytes": 1}])
    ),
    *({"files": [{"path": "a", "size_bytes": size}]} for size in ("1", -1, 1.5, True, 2**63, None)),
    *(
        {"files": [{"path": path, "size_bytes": 1}]}
        for path in ("../x", "/x", "a\\b", ".fetch-1", 5)
    ),
    *(
        {"files": [{"path": "a", "size_bytes": 1, "sha256": digest}]}
        for digest in ("x", 0, False, [], "0" * 63, "g" * 64, f"sha256:{'0' * 64}", "\u0660" * 64)
    ),
    *(
        {"files": [{"path": path, "size_bytes": 1} for path in paths]}
        for paths in (("a", "a"), ("a", "a/b"), ("x/a/b", "x/a"))
    ),
    *({"path": path} for path in ("../x", "/x", "trained/a..b", 5)),
    *({"name": 5}, {"name": None}, {"base_model": []}, {"params": []}, {"params": None}),
    *({"num_examples": value} for value in ("1", 1.5, True, 2**63, 10**400, None)),
    *({"final_loss": value} for value in ("x", True, 10**400)),
]


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: str(body)[:50])
def test_model_that_could_never_be_deployed_is_400(lite: App, body: Any) -> None:
    if isinstance(body, dict) and body:
        body = {"job_id": "j", "files": listed({"a": b"1"}), **body}
    answer = lite("POST", "/models", body)
    assert (answer.status, bool(answer.error)) == (400, True)
    assert lite("GET", "/models").json == {"models": []}


def test_model_without_files_is_listed_by_the_sidecar(
    serve: Callable[..., App], models: Path, tmp_path: Path
) -> None:
    app = serve(sidecar=str(models))
    model = app("POST", "/models", {"job_id": "job-1"})
    assert model.status == 201
    assert [file["path"] for file in model.json["files"]] == ["a.bin", "empty", "sub/b c%2e.bin"]
    assert app.deploy(model.json["id"]).status == 200
    missing = app("POST", "/models", {"job_id": "nobody"})
    text = "got 404: no model at 'trained/nobody': nobody: No such file or directory"
    assert (missing.status, text in missing.error) == (502, True)
    lonely = serve(sidecar=None, database=str(tmp_path / "lonely.db"))
    assert lonely("POST", "/models", {"job_id": "job-1"}).status == 503


@pytest.mark.parametrize(
    "body",
    [
        b'{"nope": 1}',
        b'{"files": "x"}',
        b"[]",
        b"{",
        b'{"files": []}',
        b'{"files": [{"path": "../x", "size_bytes": 1}]}',
        b'{"files": [5]}',
    ],
)
def test_sidecars_list_that_is_nonsense_is_502(
    serve: Callable[..., App], httpserver: Any, body: bytes
) -> None:
    httpserver.expect_request(
        "/models/files", query_string="model_path=trained/job-1"
    ).respond_with_data(body)
    app = serve(sidecar=httpserver.url_for("/"))
    answer = app("POST", "/models", {"job_id": "job-1"})
    assert (answer.status, bool(answer.error)) == (502, True)
    httpserver.check_assertions()


def test_list_of_files_has_the_limit_of_a_fetch(
    serve: Callable[..., App], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gligabao, "FETCH_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        app = serve(sidecar=f"http://127.0.0.1:{silent.getsockname()[1]}")
        answer = app("POST", "/models", {"job_id": "job-1"})
    assert (answer.status, "took longer than 0.3 s" in answer.error) == (502, True)


def test_audit_reads_the_disk_and_fetches_nothing(app: App, sidecar: Sidecar) -> None:
    files = {
        name: payload(100, name)
        for name in ("ok.bin", "missing.bin", "size.bin", "sha.bin", "sub/ok.bin")
    }
    sidecar.add(files)
    model = app.record(files)
    cold = app("GET", f"/models/{model}/audit").json
    assert list(cold) == ["dir", "complete", "files", "bytes_to_fetch", "bytes_free", "fits"]
    assert ({file["state"] for file in cold["files"]}, cold["bytes_to_fetch"], cold["fits"]) == (
        {"missing"},
        500,
        True,
    )
    assert not app.root.exists()
    assert app.deploy(model).status == 200
    warm = app("GET", f"/models/{model}/audit").json
    assert (warm["dir"], warm["complete"], warm["bytes_to_fetch"]) == (
        str(app.root / "job-1"),
        True,
        0,
    )
    sidecar.asked.clear()
    (app.root / "job-1/missing.bin").unlink()
    (app.root / "job-1/size.bin").write_bytes(b"x")
    (app.root / "job-1/sha.bin").write_bytes(b"x" * 100)
    audit = app("GET", f"/models/{model}/audit").json
    assert [file["state"] for file in audit["files"]] == [
        "ok",
        "missing",
        "wrong size",
        "wrong sha256",
        "ok",
    ]
    assert (audit["complete"], audit["bytes_to_fetch"], sidecar.asked) == (False, 300, [])


def test_training_off_has_no_training_route(serve: Callable[..., App]) -> None:
    app = serve(training=False)
    for method, path in (
        ("GET", "/models"),
        ("POST", "/models"),
        ("GET", "/models/1"),
        ("GET", "/deployers"),
    ):
        assert app(method, path).status == 404
    assert request(app.url, "GET", "/health").status == 200
    assert b'data-training="off"' in request(app.url, "GET", "/admin").body


def test_large_answer_that_is_read_slowly_is_not_cut(
    lite: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plant(
        str(tmp_path / "gligabao.db"), "job-1", "[]", params=json.dumps({"a": "x" * 8_000_000})
    )
    monkeypatch.setattr(gligabao, "IDLE_TIMEOUT_S", 1)
    with lite.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.sendall(
            f"GET {API}/models/{model} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        size = 0
        while data := connection.recv(100_000):
            size += len(data)
            time.sleep(0.02)
    assert size > 8_000_000


def test_answer_that_is_not_read_is_given_up(
    lite: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = json.dumps({"a": "x" * 30_000_000})
    model = plant(str(tmp_path / "gligabao.db"), "job-1", "[]", params=params)
    monkeypatch.setattr(gligabao, "IDLE_TIMEOUT_S", 0.5)
    threads = threading.active_count()
    with lite.connect() as connection:
        line = f"GET {API}/models/{model} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        connection.sendall(line.encode())
        until(lambda: threading.active_count() > threads)
        until(lambda: threading.active_count() <= threads)


def test_client_that_is_gone_when_it_is_answered_changes_nothing(
    lite: App, sidecar: Sidecar
) -> None:
    sidecar.add(THREE)
    model = lite.record(THREE)
    assert lite.deploy(model).status == 200
    threads = threading.active_count()
    for _ in range(50):
        with lite.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.sendall(
                f"GET {API}/models/{model}/deployments HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            )
    until(lambda: threading.active_count() <= threads)
    assert lite.history(model)[0]["status"] == "completed"


# ---- server --------------------------------------------------------------------------------------

STEPS = ["waits for the lock", "fetches", "deploys"]


def start_in(
    step: str, app: App, sidecar: Sidecar, held: contextlib.ExitStack
) -> tuple[int, socket.socket]:
    """Start a deployment, and return when it is in that step."""
    sidecar.add({"a": payload(1000)})
    model = app.record({"a": payload(1000)})
    if step == "waits for the lock":
        app.root.mkdir(exist_ok=True)
        lock = held.enter_context((app.root / ".job-1.lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
    elif step == "fetches":

        def stall(connection: socket.socket, data: bytes, start: int) -> None:
            cut(100)(connection, data, start)
            sidecar.release.wait(20)

        sidecar.script["a"] = [stall]
    connection = held.enter_context(app.start_deploy(model, "patient"))
    until(lambda: app.history(model))
    if step == "fetches":
        until(lambda: app.progress(model).get("bytes_done") == 100)
    if step == "deploys":
        until(lambda: app.progress(model).get("bytes_done") == 1000)
    return model, connection


@pytest.mark.parametrize("how", ["closes", "closes its sending side", "pipelines and closes"])
@pytest.mark.parametrize("step", STEPS)
def test_client_that_leaves_cancels_its_deployment(
    app: App, sidecar: Sidecar, step: str, how: str
) -> None:
    with contextlib.ExitStack() as held:
        model, connection = start_in(step, app, sidecar, held)
        begun = time.monotonic()
        if how == "pipelines and closes":
            if sys.platform != "linux":
                pytest.skip("only Linux tells of a client that leaves behind unread bytes")
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            time.sleep(0.5)  # it must not count as having left
            assert app.history(model)[0]["status"] == "running"
        if how == "closes its sending side":
            connection.shutdown(socket.SHUT_WR)
        else:
            connection.close()
        ended = until(lambda: (row := app.newest(model))["status"] == "failed" and row)
        assert ended["error"] == "the client disconnected"
        assert time.monotonic() - begun < 5
    until(lambda: [event.fields["error"] for event in app.events] == [ended["error"]])
    assert not list(app.root.rglob(".fetch-*"))
    assert app.deploy(model).status == 200


def test_what_was_made_for_a_client_that_left_is_named(
    serve: Callable[..., App], sidecar: Sidecar, database: str
) -> None:
    def deaf(ctx: Context, req: gligabao.DeployTrainedModelRequest) -> DeployTrainedModelResult:
        assert ctx.wait(20)
        if req.options == {"raise": True}:
            raise OSError("half way")
        return DeployTrainedModelResult("made-it")

    app = serve(database=database, trained_model_deployers={"deaf": deaf})
    sidecar.add({"a": b"1"})
    model = app.record({"a": b"1"})
    for options, text in (
        ({}, "the client disconnected; the deployer returned ref made-it"),
        ({"raise": True}, "the client disconnected: half way"),
    ):
        with app.start_deploy(model, "deaf", options):
            until(lambda: app.progress(model).get("files_done"))
        row = until(lambda: (row := app.newest(model))["status"] == "failed" and row)
        assert (row["error"], row["ref"]) == (text, "")


def test_others_who_wait_for_the_same_model_go_on(app: App, sidecar: Sidecar) -> None:
    with contextlib.ExitStack() as held, ThreadPoolExecutor(1) as pool:
        model, connection = start_in("fetches", app, sidecar, held)
        other = pool.submit(app.deploy, model)
        until(lambda: len(app.history(model)) == 2)
        connection.close()
        assert other.result(20).status == 200


@pytest.mark.parametrize("step", STEPS)
def test_server_that_stops_records_every_running_deployment(
    sidecar: Sidecar, database: str, tmp_path: Path, step: str
) -> None:
    with contextlib.ExitStack() as held:
        with served(tmp_path, sidecar, database=database) as app:
            model, connection = start_in(step, app, sidecar, held)
            begun = time.monotonic()
        assert time.monotonic() - begun < 8
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 502
        assert json.loads(response.read())["error"] == "the server is stopping"
        response.close()
    with contextlib.closing(gligabao.open_store(database)) as store:
        (row,) = store.list_trained_model_deployments(model)
    assert (row["status"], row["error"]) == ("failed", "the server is stopping")
    assert [event.fields["error"] for event in app.events] == ["the server is stopping"]
    assert not list(app.root.rglob(".fetch-*"))


def test_stop_takes_a_result_in_time_and_drops_a_deaf_deployers(
    sidecar: Sidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gligabao, "STOP_GRACE_S", 1)
    late = threading.Event()

    def quick(ctx: Context, req: Any) -> DeployTrainedModelResult:
        assert ctx.wait(20)
        late.wait(0.3)  # some work that is left to do
        return DeployTrainedModelResult("in time")

    def deaf(ctx: Context, req: Any) -> DeployTrainedModelResult:
        late.wait(20)
        return DeployTrainedModelResult("too late")

    deployers = {"quick": quick, "deaf": deaf}
    sidecar.add({"a": b"1"})
    with contextlib.ExitStack() as held:
        with served(tmp_path, sidecar, trained_model_deployers=deployers) as app:
            model = app.record({"a": b"1"})
            for deployer in deployers:
                held.enter_context(app.start_deploy(model, deployer))
                until(lambda: app.progress(model).get("files_done"))
        late.set()
    with contextlib.closing(gligabao.open_store(str(tmp_path / "gligabao.db"))) as store:
        deaf_row, quick_row = store.list_trained_model_deployments(model)
    assert (quick_row["status"], quick_row["ref"]) == ("completed", "in time")
    assert (deaf_row["status"], deaf_row["error"]) == ("failed", "the server is stopping")
    assert len(app.events) == 2


def test_leaving_the_block_frees_the_port_and_leaves_no_thread(tmp_path: Path) -> None:
    threads = {*threading.enumerate()}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for _ in range(3):
        with (
            gligabao.Server(port=port, database=str(tmp_path / "x.db"), training=True) as server,
            socket.create_connection(("127.0.0.1", port)),
        ):
            assert request(server.url, "GET", "/health").status == 200
    assert {*threading.enumerate()} <= threads


def test_damaged_database_whose_error_is_no_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with contextlib.closing(sqlite3.connect(path)) as damaged:
        damaged.execute("CREATE TABLE wobble (a)")
        damaged.commit()
    content = path.read_bytes().replace(b"wobble", b"\xff" * 6)
    path.write_bytes(content.replace(b"TABLE", b"TABLX"))
    open_before = len(os.listdir("/dev/fd"))
    with pytest.raises(sqlite3.DatabaseError, match="x.db: "):
        gligabao.open_store(path)
    assert len(os.listdir("/dev/fd")) == open_before


def test_failed_start_leaves_nothing_open(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gligabao")
    threads = {*threading.enumerate()}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = gligabao.Server(
            port=taken.getsockname()[1], database=str(tmp_path / "x.db"), sidecar=str(models)
        )
        with pytest.raises(OSError, match="in use"), server:
            pass
    assert {*threading.enumerate()} <= threads
    (tmp_path / "file").write_text("no database at all" * 100)
    with (
        pytest.raises(sqlite3.DatabaseError, match="file is not a database"),
        gligabao.Server(port=0, database=str(tmp_path / "file")),
    ):
        pass
    odd: Any = Unspeakable()
    deployers = [gligabao.TrainedModelDeployer("a", ok, odd)]
    with (
        pytest.raises(SystemExit),
        gligabao.Server(port=0, database=str(tmp_path / "y.db"), trained_model_deployers=deployers),
    ):
        pass
    assert {*threading.enumerate()} <= threads


def test_server_entered_twice_leaves_nothing_open(tmp_path: Path) -> None:
    threads = {*threading.enumerate()}
    server = gligabao.Server(port=0, database=str(tmp_path / "x.db"))
    with server, server:
        pass
    assert {*threading.enumerate()} <= threads


def test_serve_ends_with_its_event_outside_the_main_thread(tmp_path: Path) -> None:
    stop = threading.Event()
    thread = threading.Thread(
        target=gligabao.serve, kwargs={"port": 0, "database": str(tmp_path / "x.db"), "stop": stop}
    )
    thread.start()
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "bad",
    [
        {"api_key": "ü"},
        {"api_key": "a\nb"},
        {"sidecar_token": "\x7f"},
        {"sidecar": "nowhere"},
        {"port": 70000},
    ],
)
def test_bad_option_is_a_value_error(bad: dict[str, Any], tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="must be|does not exist|is no number"),
        gligabao.Server(**{"port": 0, "database": str(tmp_path / "x.db")} | bad),
    ):
        pass


# ---- command line --------------------------------------------------------------------------------


def test_demo_once_prints_a_completed_deployment_and_nothing_else(tmp_path: Path) -> None:
    shutil.copy(MODULE, tmp_path)
    done = subprocess.run(
        [sys.executable, "-I", "gligabao.py", "demo", "--once"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    deployment = json.loads(done.stdout)
    assert (done.returncode, done.stderr, deployment["status"]) == (0, "", "completed")
    assert not Path(deployment["dir"]).exists()
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == [
        "gligabao.py"
    ]


def test_demo_adapter_is_a_valid_safetensors_file(tmp_path: Path) -> None:
    files = gligabao._make_adapter(tmp_path / "made")
    assert files == [
        entry
        for path in files
        for entry in listed({path["path"]: (tmp_path / "made" / path["path"]).read_bytes()})
    ]
    data = (tmp_path / "made" / "adapter_model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8 : 8 + size])
    assert size % 8 == 0
    assert max(tensor["data_offsets"][1] for tensor in tensors.values()) == len(data) - 8 - size


@contextlib.contextmanager
def started(
    *words: object, cwd: Path, env: dict[str, str] | None = None
) -> Iterator[tuple[Any, str]]:
    """Run a command that serves; yield the process and the address that it says."""
    log = cwd / "log.txt"
    with open(log, "w") as out:
        process = subprocess.Popen(
            [sys.executable, "-u", str(MODULE), *map(str, words)],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", **(env or {})},
        )
    try:
        found = until(
            lambda: re.search(r"http://[\d.]+:\d+", log.read_text()) or process.poll() is not None,
            20,
        )
        assert found is not True, log.read_text()
        yield process, found[0]
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_says_where_things_are_and_ends_with_0(tmp_path: Path, number: int) -> None:
    with started("serve", "--training", "--port", 0, "--database", "d/x.db", cwd=tmp_path) as (
        process,
        url,
    ):
        assert request(url, "GET", f"{API}/deployers").json == {"deployers": []}
        process.send_signal(number)
        assert process.wait(12) == 0
    text = (tmp_path / "log.txt").read_text()
    assert f"{url}/admin" in text
    assert str(tmp_path / "d" / "trained_models") in text
    assert (tmp_path / "d" / "x.db").exists()
    assert "Traceback" not in text


def test_demo_serves_its_page_and_a_deployment(tmp_path: Path) -> None:
    with started("demo", "--port", 0, cwd=tmp_path) as (process, url):
        answer = request(url, "POST", f"{API}/models/1/deployments", {"deployer": "release"})
        assert answer.status == 200
        release = Path(answer.json["ref"])
        assert (release.parent / "current").resolve() == release.resolve()
        assert on_disk(release) == on_disk(Path(answer.json["dir"]))
        process.terminate()
        assert process.wait(12) == 0
    assert not release.exists()


def test_sidecar_command_serves_a_directory_with_its_token(
    tmp_path: Path, models: Path, serve: Callable[..., App]
) -> None:
    with started(
        "sidecar", models, "--port", 0, cwd=tmp_path, env={"GLIGABAO_SIDECAR_TOKEN": "tok-1"}
    ) as (_, url):
        app = serve(sidecar=url, sidecar_token="tok-1")
        model = app("POST", "/models", {"job_id": "job-1"}).json["id"]
        assert app.deploy(model).status == 200
        wrong = serve(sidecar=url, sidecar_token="tok-2", database=str(tmp_path / "other.db"))
        assert "got 401" in wrong("POST", "/models", {"job_id": "job-2"}).error


def test_deploy_command_prints_the_stored_deployment(
    serve: Callable[..., App], sidecar: Sidecar, tmp_path: Path
) -> None:
    app = serve(api_key="k3y")
    key = {"Authorization": "Bearer k3y"}
    sidecar.add({"a": b"1"})
    app("POST", "/models", {"job_id": "job-1", "files": listed({"a": b"1"})}, **key)
    env = {"GLIGABAO_API_KEY": "k3y", "http_proxy": "http://127.0.0.1:9"}
    where = ("--url", f"{app.url}/")
    done = run(
        "deploy",
        1,
        "echo",
        "--options",
        '{"n": 1.0, "big": 9007199254740993}',
        *where,
        cwd=tmp_path,
        env=env,
    )
    rows = app("GET", "/models/1/deployments", **key).json["deployments"]
    assert [json.loads(done.stdout)] == rows
    assert str(rows[0]["details"]["options"]) == "{'n': 1.0, 'big': 9007199254740993}"
    deep = ("--options", '{"a":' * 299 + "1" + "}" * 299)
    run("deploy", 1, "broken", *deep, *where, cwd=tmp_path, env=env, code=1).stdout.index(
        '"failed"'
    )
    failed = run("deploy", 1, "broken", *where, cwd=tmp_path, env=env, code=1)
    assert json.loads(failed.stdout)["error"] == "the bucket is on fire"
    for words, more in (
        ((99, "ok"), env),
        ((1, "nobody"), env),
        ((1, "ok"), {"GLIGABAO_API_KEY": "wr0ng"}),
    ):
        refused = run("deploy", *words, *where, cwd=tmp_path, env=more, code=1)
        assert (refused.stdout, len(refused.stderr.splitlines())) == ("", 1)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, '{"id": 1, "status": "completed"}'),
        (200, '{"id": NaN, "status": "completed"}'),
        (200, '{"id": 1}'),
        (200, '{"id": 1, "status": ["completed"]}'),
        (200, "[]"),
        (502, '{"deployment": null}'),
        (502, '{"deployment": ["id"], "error": "\\u001b[2J"}'),
        (502, "<html>"),
    ],
)
def test_deploy_command_prints_nothing_but_a_stored_deployment(
    httpserver: Any, tmp_path: Path, status: int, body: str
) -> None:
    httpserver.expect_request(f"{API}/models/1/deployments").respond_with_data(body, status)
    done = run("deploy", 1, "ok", "--url", httpserver.url_for("/"), cwd=tmp_path, code=1)
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 1)
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--version >/dev/full", 0),
        ("serve --bad 2>/dev/full", 2),
        ("serve --sidecar nowhere 2>/dev/full", 1),
        ("demo --once >/dev/full", 1),
        ("demo --once 2>/dev/full", 0),
        ("demo --once 2>&-", 0),
        ("demo --once >&- 2>&-", 0),
    ],
)
def test_exit_code_does_not_depend_on_who_reads(words: str, code: int, tmp_path: Path) -> None:
    line = f"exec {shlex.quote(sys.executable)} -B {shlex.quote(str(MODULE))} {words}"
    env = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env=env, capture_output=True, timeout=60
    )
    assert done.returncode == code, done.stderr


def test_key_that_is_echoed_is_not_told_at_the_terminal(httpserver: Any, tmp_path: Path) -> None:
    answer = {"error": "no Bearer k3y-of-mine here"}
    httpserver.expect_request(f"{API}/models/1/deployments").respond_with_json(answer, 401)
    words = ("deploy", 1, "ok", "--url", httpserver.url_for("/"))
    done = run(*words, cwd=tmp_path, env={"GLIGABAO_API_KEY": "k3y-of-mine"}, code=1)
    assert "no Bearer" in done.stderr
    assert "k3y" not in done.stderr


def test_closed_standard_streams_are_no_sockets(tmp_path: Path) -> None:
    code = "import gligabao, os; held = gligabao._standard_streams(); held.__enter__(); "
    code += "print(*map(os.readlink, map('/dev/fd/{}'.format, range(3))), file=open('seen', 'w'))"
    line = f"exec {shlex.quote(sys.executable)} -B -c {shlex.quote(code)} <&- >&- 2>&-"
    env = {"PYTHONPATH": str(MODULE.parent)}
    subprocess.run(["sh", "-c", line], cwd=tmp_path, env=env, check=True, timeout=60)
    assert tmp_path.joinpath("seen").read_text().split() == ["/dev/null"] * 3


def test_deploy_command_that_finds_nobody_says_so_in_a_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    done = run("deploy", 1, "ok", "--url", url, cwd=tmp_path, code=1)
    assert "Connection refused" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def pseudo_terminal() -> tuple[int, int]:
    """The two ends of a terminal; a bare chroot has none to give."""
    try:
        return os.openpty()
    except OSError:
        if REQUIRED:
            raise
        pytest.skip("this machine gives no pseudo-terminal")


def test_whole_job_is_done_from_a_terminal(
    serve: Serve, sidecar: Sidecar, tmp_path: Path, models: Path
) -> None:
    app = serve(sidecar=str(models))

    def ask(*words: object, code: int = 0) -> Any:
        return run(*words, "--url", app.url, cwd=tmp_path, code=code)

    nothing = ask("models")
    assert (nothing.stdout, "no models" in nothing.stderr) == ("", True)
    assert ask("audit", "job-1", code=1).stdout == ""
    facts = '{"base_model": "llama", "final_loss": 0.5, "job_id": "other"}'
    model = json.loads(ask("record", "job-1", "--facts", facts).stdout)
    assert (model["job_id"], model["base_model"], len(model["files"])) == ("job-1", "llama", 3)
    again = ask("record", "job-1")
    assert (json.loads(again.stdout), "recorded already" in again.stderr) == (model, True)
    assert "no model at 'trained/nobody'" in ask("record", "nobody", code=1).stderr
    incomplete = ask("audit", "job-1", code=1).stdout
    assert "missing" in incomplete
    assert "5 kB to fetch into" in incomplete
    assert json.loads(ask("deploy", "job-1", "ok").stdout)["ref"] == "ok-1"
    assert json.loads(ask("deploy", "1", "broken", code=1).stdout)["status"] == "failed"
    assert "Every file is in" in ask("audit", "job:job-1").stdout
    head, newest, oldest = ask("history", "job-1").stdout.splitlines()
    assert head.split() == ["ID", "Status", "Deployer", "Duration", "Started", "Outcome"]
    assert newest.split()[:3] == ["2", "failed", "broken"]
    assert newest.endswith("the bucket is on fire")
    assert oldest.endswith("ok-1")
    assert len(ask("history", "1", "--limit", 1).stdout.splitlines()) == 2
    assert "1  job-1  job-1  llama       3 files, 5 kB  20" in ask("models").stdout
    assert "ok       Does nothing, and says so." in ask("deployers").stdout
    for words, path in (
        (["models"], "/models"),
        (["deployers"], "/deployers"),
        (["history", "job-1"], "/models/1/deployments"),
        (["audit", "job-1"], "/models/1/audit"),
    ):
        seen, now = json.loads(ask(*words, "--json").stdout), app("GET", path).json
        assert seen | {"bytes_free": 0} == now | {"bytes_free": 0}


def test_digits_are_the_id_of_a_model_and_job_names_a_job(lite: App, tmp_path: Path) -> None:
    for job in ("12", "odd"):
        lite.record({"a": b"1"}, job)
    for words, code, said in (
        (["history", "12"], 1, "there is no trained model 12"),
        (["history", "007"], 1, "there is no trained model 007"),
        (["history", "job:12"], 0, "no deployments"),
        (["history", "odd"], 0, "no deployments"),
        (["deploy", "odd?x=1&y", "ok"], 1, "no model is recorded for the job 'odd?x=1&y'"),
    ):
        done = run(*words, "--url", lite.url, cwd=tmp_path, code=code)
        assert said in done.stderr


CLIENT_WORDS = {
    "record": ["record", "job-1"],
    "models": ["models"],
    "deployers": ["deployers"],
    "history": ["history", "1"],
    "audit": ["audit", "1"],
    "deploy": ["deploy", "1", "ok"],
}


@pytest.mark.parametrize("command", CLIENT_WORDS)
def test_command_says_in_a_line_what_went_wrong(
    httpserver: Any, serve: Serve, tmp_path: Path, command: str
) -> None:
    def fails(url: str, *parts: str, **env: str) -> None:
        done = run(*CLIENT_WORDS[command], "--url", url, cwd=tmp_path, env=env, code=1)
        assert (done.stdout, len(done.stderr.splitlines())) == ("", 1)
        for part in parts:
            assert part in done.stderr

    assert {*CLIENT_WORDS} == {*gligabao._CLIENTS}
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    fails(f"http://{nobody}", f"no answer from {nobody}", "Connection refused")
    app = serve(api_key="k3y-of-mine")
    fails(app.url, "needs the key", "GLIGABAO_API_KEY")
    fails(app.url, "line break", GLIGABAO_API_KEY="k3y-of-mine\n")
    for status, body, parts in (
        (504, "<html>", ("504", "a proxy in between may have ended the wait")),
        (200, "<html>", ("200", "no JSON of a gligabao server")),
        (200, "{}", ("no JSON of a gligabao server",)),
        (200, '{"models": [5], "files": 5, "deployers": [{}], "status": 1}', ("gligabao server",)),
        (403, '{"error": "\u001b[2J no"}', ("no",)),
    ):
        httpserver.clear()
        httpserver.expect_request(re.compile(".*")).respond_with_data(body, status)
        if (command, status) != ("record", 200) or body == "<html>":
            fails(httpserver.url_for("/prefix"), *parts)
    if command == "deploy":
        httpserver.clear()
        httpserver.expect_request(re.compile(".*")).respond_with_data("<html>", 504)
        fails(httpserver.url_for("/"), "`history 1` says what became of the deployment")


TABLE = [
    {"ID": 7, "Name": "模型", "Outcome": "a\x1b[2J\nb\u202e"},
    {"ID": 10, "Name": "e\u0301", "Outcome": "long " * 30},
    {"ID": "", "Name": None, "Outcome": 0},
]


def test_table_is_as_wide_as_its_content(capsys: pytest.CaptureFixture[str]) -> None:
    gligabao._print_table(TABLE)
    assert capsys.readouterr().out.splitlines() == [
        "ID  Name  Outcome",
        r" 7  模型  a\x1b[2J\nb\u202e",
        "10  e\u0301     " + "long " * 29 + "long",
        " –  –     0",
    ]


def test_table_is_no_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    gligabao._print_table([*TABLE, {"ID": 1, "Name": "模型模型", "Outcome": "模" * 99}])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "10  e\u0301         long long long …"
    assert lines[4] == " 1  模型模型  模模模模模模模…"
    assert max(map(gligabao._width, lines)) <= 30


@pytest.mark.parametrize(
    ("make", "given", "shown"),
    [
        *((gligabao._bytes, given, shown) for given, shown in ((0, "0 B"), (999, "999 B"))),
        *(
            (gligabao._bytes, given, shown)
            for given, shown in ((3508, "3.5 kB"), (999_960, "1 MB"))
        ),
        *(
            (gligabao._bytes, given, shown)
            for given, shown in ((10**9, "1 GB"), (10**16, "10000 TB"))
        ),
        *(
            (gligabao._duration, given, shown)
            for given, shown in ((12, "12 ms"), (41_873, "41.9 s"))
        ),
        *((gligabao._duration, given, shown) for given, shown in ((60_000, "1 min 0 s"),)),
        *((gligabao._duration, given, shown) for given, shown in ((3_725_000, "1 h 2 min"),)),
        (gligabao._time, "infinity", "infinity"),
    ],
)
def test_figures_are_shown_as_on_the_page(make: Any, given: Any, shown: str) -> None:
    assert make(given) == shown


def test_reader_that_has_seen_enough_is_no_failure(lite: App, tmp_path: Path) -> None:
    lite.record({f"{'x' * 90}{number}": b"1" for number in range(3000)})
    line = f"{shlex.quote(sys.executable)} -B {shlex.quote(str(MODULE))} models --json --url {lite.url}"
    words = ["bash", "-c", f"{line} | head -1; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


def test_deploy_command_shows_progress_on_a_terminal_and_leaves_when_interrupted(
    lite: App, sidecar: Sidecar
) -> None:
    sidecar.add({"a": b"1"})
    model = lite.record({"a": b"1"})
    screen, terminal = pseudo_terminal()
    process = subprocess.Popen(
        [sys.executable, str(MODULE), "deploy", str(model), "patient", "--url", lite.url],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=terminal,
    )
    os.close(terminal)
    with os.fdopen(screen, "rb", 0) as shown:
        text = b""
        while b"the deployer is working" not in text:
            text += shown.read(1000)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=10)[0] == b""
    assert process.returncode == 130
    until(lambda: lite.history(model)[0]["error"] == "the client disconnected")


def test_deploy_command_shows_what_a_deployer_reports(serve: Serve, sidecar: Sidecar) -> None:
    steps, step = ["uploading \x1b[2J", "registering"], threading.Semaphore(0)

    def tells(ctx: Context, req: object) -> None:
        for text, fraction in zip(steps, (0.31, None), strict=True):
            ctx.report(text, fraction)
            step.acquire(timeout=20)

    app = serve(trained_model_deployers={"tells": tells})
    sidecar.add({"a": b"1"})
    model = app.record({"a": b"1"})
    screen, terminal = pseudo_terminal()
    process = subprocess.Popen(
        [sys.executable, str(MODULE), "deploy", str(model), "tells", "--url", app.url],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
    )
    os.close(terminal)
    with os.fdopen(screen, "rb", 0) as shown:
        text = b""
        for expected in (rb"31% uploading \x1b[2J", b"\rregistering\x1b[K"):
            while expected not in text:
                text += shown.read(1000)
            step.release()
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["nope"],
        [],
        ["serve", "--nope"],
        ["serve", "--port", "x"],
        ["serve", "--port", "70000"],
        ["serve", "--port", "-1"],
        ["sidecar"],
        ["demo", "x"],
        ["deploy", "1"],
        ["deploy", "1", "ok", "--options", "{x"],
        ["deploy", "1", "ok", "--options", "[]"],
        ["deploy", "1", "ok", "--url", "ftp://x"],
        ["record"],
        ["record", "job-1", "--facts", "[]"],
        ["models", "--limit", "0"],
        ["history", "1", "--limit", "x"],
        ["audit"],
    ],
    ids=" ".join,
)
def test_bad_usage_exits_2(words: list[str], tmp_path: Path) -> None:
    assert run(*words, cwd=tmp_path, code=2).stderr


@pytest.mark.parametrize(
    "command", [[], *([name] for name in ("serve", "sidecar", "demo", *gligabao._CLIENTS))], ids=str
)
def test_help_and_version_are_everywhere(command: list[str], tmp_path: Path) -> None:
    assert run(*command, "--version", cwd=tmp_path).stdout == f"gligabao {gligabao.__version__}\n"
    env = {"PYTHONIOENCODING": "ascii"}  # as a terminal that knows no more
    help = run(*command, "--help", cwd=tmp_path, env=env).stdout
    assert help.startswith("usage")
    assert len(help.splitlines()) <= 24  # a screen


FAILED_STARTS = {
    "bad sidecar URL": ["serve", "--sidecar", "http://"],
    "sidecar of another kind": ["serve", "--sidecar", "ftp://127.0.0.1/"],
    "no such directory": ["serve", "--sidecar", "nowhere"],
    "no database": ["serve", "--database", "file"],
    "database below a file": ["serve", "--database", "file/x.db"],
    "not loopback": ["serve", "--host", "0.0.0.0"],
    "bad host": ["serve", "--host", "256.1.1.1"],
    "another database": ["serve", "--database", "mysql://u:s3cret@127.0.0.1/x"],
    "no PostgreSQL there": ["serve", "--database", "postgresql://u:s3cret@127.0.0.1:1/x"],
    "malformed PostgreSQL URL": ["serve", "--database", "postgresql://u:s3cret@[bad/x"],
    "password that is bare": ["serve", "--database", "postgresql://u:p@s3cret@127.0.0.1:1/x"],
    "password with a slash": ["serve", "--database", "postgresql://u:p/s3cret@127.0.0.1:1/x"],
    "sidecar without a directory": ["sidecar", "nowhere"],
    "sidecar not loopback": ["sidecar", ".", "--host", "0.0.0.0"],
}


@pytest.mark.parametrize("words", FAILED_STARTS.values(), ids=FAILED_STARTS)
def test_failed_start_exits_1_with_one_line(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no database at all" * 100)
    done = run(*words, "--port", 0, cwd=tmp_path, code=1)
    assert len(done.stderr.splitlines()) == 1
    assert "s3cret" not in done.stderr + done.stdout


@contextlib.contextmanager
def own_server(
    sidecar: Sidecar, tmp_path: Path
) -> Iterator[tuple[Any, str, Callable[..., Answer]]]:
    """Run a server of its own process; yield it, its address, and how to deploy the model it has."""
    sidecar.add({"a": b"1"})
    made = process(tmp_path / "one", str(tmp_path / "x.db"), sidecar, tmp_path / "r")
    with made as (server, url):
        request(url, "POST", f"{API}/models", {"job_id": "job-1", "files": listed({"a": b"1"})})
        path = f"{API}/models/1/deployments"
        yield server, url, lambda deployer: request(url, "POST", path, {"deployer": deployer})


def test_process_that_a_deployer_leaves_holds_neither_the_process_nor_the_port(
    sidecar: Sidecar, tmp_path: Path
) -> None:
    with own_server(sidecar, tmp_path) as (server, url, deploy):
        children = [deploy(deployer).json["ref"] for deployer in ("child", "orphan")]
        server.terminate()
        assert server.wait(12) == 0
        with socket.create_server(("127.0.0.1", urlsplit(url).port or 0)):
            os.kill(int(children[1]), signal.SIGKILL)


def test_log_that_a_deployer_closes_is_no_reason_to_fail(sidecar: Sidecar, tmp_path: Path) -> None:
    with own_server(sidecar, tmp_path) as (server, _, deploy):
        for deployer in ("quiet", "mine"):
            assert deploy(deployer).status == 200
        server.terminate()
        assert server.wait(12) == 0


@pytest.mark.parametrize("deployer", ["leave", "pool"])
def test_thread_that_a_deployer_leaves_does_not_hold_the_process(
    sidecar: Sidecar, tmp_path: Path, deployer: str
) -> None:
    with own_server(sidecar, tmp_path) as (server, _, deploy):
        assert deploy(deployer).status == 200
        server.terminate()
        assert server.wait(12) == 0


def test_demo_has_options_of_its_own(tmp_path: Path) -> None:
    code = "main(['demo', '--once'], api_key='k3y', stop=threading.Event(), trained_model_deploy_dir='mine', host='0.0.0.0')"
    words = [sys.executable, "-Bc", f"import threading; from gligabao import main; exit({code})"]
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, timeout=60)
    assert (done.returncode, os.listdir(tmp_path)) == (0, []), done.stderr


def test_main_takes_deployers_and_a_flag_wins(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import gligabao\n"
        "sys.exit(gligabao.main(port=1, database='mine.db', trained_model_deployers={'mine': lambda ctx, req: None}))\n"
    )
    log = tmp_path / "log.txt"
    with open(log, "w") as out:
        process = subprocess.Popen(
            [sys.executable, "mine.py", "serve", "--training", "--port", "0"],
            cwd=tmp_path,
            stdout=out,
            stderr=out,
        )
    try:
        url = until(lambda: re.search(r"http://[\d.]+:\d+", log.read_text()))[0]
        assert [
            deployer["name"]
            for deployer in request(url, "GET", f"{API}/deployers").json["deployers"]
        ] == ["mine"]
        assert (tmp_path / "mine.db").exists()
        process.terminate()
        assert process.wait(12) == 0
    finally:
        process.kill()
        process.wait()


# ---- page ----------------------------------------------------------------------------------------

Serve = Callable[..., App]
Element = dict[str, str]  # what WebDriver calls an element
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004"}
FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync --lang=en-US
    --disable-background-networking --disable-component-update --disable-dev-shm-usage"""
# Finds what a person sees, in the open dialog where there is one; a name is a label or the first line.
FIND = r"""
const [role, name, inside] = arguments, by = e => document.getElementById(e.getAttribute("aria-labelledby"));
const tags = {link: "a", region: "section", listitem: "li", status: "[role=status]", dialog: "dialog[open]",
    textbox: "input, textarea", progressbar: "progress"};
const named = e => e.ariaLabel ?? by(e)?.innerText ?? e.labels?.[0]?.innerText ?? e.innerText.split("\n")[0];
const where = inside ?? document.querySelector(role === "dialog" ? "html" : "dialog[open]") ?? document;
return [...where.querySelectorAll(tags[role] ?? role)].find(
    e => e.checkVisibility() && (name === null || named(e).trim() === name))"""
OPEN_DETAILS = "for (const details of document.querySelectorAll('details')) details.open = true"


class Browser:
    """Chromium, through the W3C WebDriver protocol."""

    def __init__(self, driver: str, home: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.session, self.expected = "", ""  # the latter: a pattern of what the console may say
        self.process = subprocess.Popen(
            [driver, f"--port={self.port}", "--silent"],
            env=os.environ | {"HOME": home, "TMPDIR": home, "TZ": "Asia/Kolkata"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            until(self._listens)
            wanted = {
                "goog:chromeOptions": {"args": [*FLAGS.split(), f"--user-data-dir={home}/data"]},
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }
            made = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self.session = f"/session/{made['sessionId']}"
            self.go("about:blank")
        except BaseException:
            self.close()
            raise

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def close(self) -> None:
        if self.session:
            self.call("DELETE", "")
        self.process.terminate()
        self.process.wait(10)

    def call(self, method: str, path: str, body: object = None) -> Any:
        answer = request(f"http://127.0.0.1:{self.port}", method, self.session + path, body)
        value = json.loads(answer.body)["value"]
        assert answer.status == 200, value["message"]
        return value

    def go(self, url: str) -> None:
        self.call("POST", "/url", {"url": url})

    def reload(self) -> None:
        self.call("POST", "/refresh", {})

    def run(self, script: str, *args: object) -> Any:
        return self.call("POST", "/execute/sync", {"script": script, "args": args})

    def devtools(self, command: str, **params: object) -> None:
        self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What was logged since the last call."""
        return list(self.call("POST", "/se/log", {"type": kind}))

    def requests(self) -> list[str]:
        """The addresses that were asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def has(self, role: str, name: str | None = None, inside: Element | None = None) -> Any:
        return self.run(FIND, role, name, inside)

    def find(self, role: str, name: str | None = None, inside: Element | None = None) -> Element:
        return dict(self._wait(lambda: self.has(role, name, inside), (role, name)))

    def text(self, part: Element | None = None) -> str:
        return str(self.run("return (arguments[0] ?? document.body).innerText", part))

    def see(self, *words: str, part: Element | None = None) -> None:
        """Wait until all of these show."""
        self._wait(lambda: all(word in self.text(part) for word in words), words)

    def _wait(self, what: Callable[[], Any], said: object) -> Any:
        try:
            return until(what)
        except AssertionError:
            raise AssertionError(f"{said} did not show in: {self.text()}") from None

    def on(self, element: Element, action: str, body: object = None) -> None:
        (id,) = element.values()
        self.call("POST", f"/element/{id}/{action}", body or {})

    def click(self, role: str, name: str, inside: Element | None = None) -> None:
        self.on(self.find(role, name, inside), "click")

    def write(self, name: str, text: str) -> None:
        """Type into the field of this name instead of what it holds."""
        field = self.find("textbox", name)
        self.on(field, "clear")
        self.on(field, "value", {"text": text})

    def keys(self, *names: str) -> None:
        strokes = [(kind, KEYS.get(name, name)) for name in names for kind in ("keyDown", "keyUp")]
        actions = [{"type": kind, "value": key} for kind, key in strokes]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "k", "actions": actions}]})

    def double_click(self, element: Element) -> None:
        at = {"type": "pointerMove", "x": 0, "y": 0, "origin": element}
        down, up = ({"type": kind, "button": 0} for kind in ("pointerDown", "pointerUp"))
        pause = {"type": "pause", "duration": 200}  # long enough for an answer to the first click
        mouse = {"type": "pointer", "id": "m", "actions": [at, down, up, pause, down, up]}
        self.call("POST", "/actions", {"actions": [mouse]})

    def focused(self) -> tuple[str, str]:
        """The role and the name that an assistive technology is told."""
        (id,) = self.call("GET", "/element/active").values()
        role = self.call("GET", f"/element/{id}/computedrole")
        return role, self.call("GET", f"/element/{id}/computedlabel")

    def table(self, name: str) -> list[dict[str, str]]:
        """What the rows show, by column."""
        read = (
            "return [...arguments[0].rows].map(row => [...row.cells].map(cell => cell.innerText))"
        )
        heads, *rows = self.run(read, self.find("table", name))
        return [dict(zip(heads, row, strict=True)) for row in rows]

    def terms(self, region: str) -> dict[str, str]:
        read = "return [...arguments[0].querySelectorAll('dl:not(table dl) > dt')].map(e => [e.innerText, e.nextSibling.innerText])"
        return dict(self.run(read, self.find("region", region)))

    def press(self, deployer: str) -> Element:
        """Press the deployer's button in the open dialog; return where its outcome shows."""
        entry = self.find("listitem", deployer)
        self.click("button", "Deploy", entry)
        return dict(self.run("return arguments[0].querySelector('[role=status]')", entry))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    driver = shutil.which("chromedriver", path=f"/usr/bin{os.pathsep}{os.environ['PATH']}")
    if not (driver and shutil.which("chromium")):
        if REQUIRED:
            pytest.fail("chromium or chromedriver is missing, and GLIGABAO_TEST_REQUIRE is set")
        pytest.skip("chromium and chromedriver are not on this machine")
    with (
        tempfile.TemporaryDirectory(prefix="gligabao-web-", ignore_cleanup_errors=True) as home,
        contextlib.closing(Browser(driver, home)) as made,
    ):
        yield made


@pytest.fixture
def page(browser: Browser, serve: Serve) -> Iterator[Browser]:  # left before the servers stop
    """A browser without a past, whose console stays clean and which asks only the test's server."""
    browser.expected = "$^"
    browser.requests()
    yield browser
    origin = browser.run("const {origin} = location; sessionStorage.clear(); return origin")
    browser.go("about:blank")
    browser.devtools("Emulation.clearDeviceMetricsOverride")
    browser.devtools("Emulation.setEmulatedMedia", features=[])
    console = [
        line["message"] for line in browser.log("browser") if line["level"] in "WARNING SEVERE"
    ]
    assert not [line for line in console if not re.search(browser.expected, line)]
    assert {url[: len(origin) + 1] for url in browser.requests()} <= {f"{origin}/", "about:blank"}


class Held:
    """Works until it is released."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def __call__(self, ctx: Context, req: object) -> DeployTrainedModelResult:
        while not self.release.wait(0.01):
            ctx.raise_if_cancelled()
        return DeployTrainedModelResult("released")


def show(page: Browser, app: App, sidecar: Sidecar, **fields: Any) -> int:
    """Record a model that can be deployed, and choose it on the page."""
    sidecar.add(THREE)
    model = app.record(THREE, **fields)
    page.go(f"{app.url}/admin#model={model}")
    page.see("None yet.", part=page.find("region", "Deployments"))
    return model


def test_page_lists_the_newest_first_in_human_units(
    page: Browser, lite: App, tmp_path: Path
) -> None:
    sizes = [{"path": "a", "size_bytes": 1_200_000_000}, {"path": "b", "size_bytes": 34_567_890}]
    plant(str(tmp_path / "gligabao.db"), "older", [])
    plant(str(tmp_path / "gligabao.db"), "newer", sizes, name="the newer", base_model="minilm")
    page.go(f"{lite.url}/admin")
    assert page.text(page.find("h1")) == "Training"
    newer, older = page.table("Trained models")
    recorded = newer.pop("Recorded").replace("\u202f", " ")
    assert recorded == "Jan 2, 2026, 8:34 AM"  # in Kolkata, where the reader is
    assert [*newer.values()] == ["the newer", "2", "newer", "minilm", "–", "2 files, 1.2 GB"]
    assert (older["Name"], older["Files"]) == ("older", "0 files, 0 B")
    assert page.run("return document.querySelector('time').title") == "2026-01-02T03:04:05Z"


def test_page_without_models_shows_the_command_to_record(
    page: Browser, serve: Serve, tmp_path: Path
) -> None:
    (tmp_path / "models/trained/job-1").mkdir(parents=True)
    (tmp_path / "models/trained/job-1/a").write_bytes(b"1")
    app = serve(sidecar=str(tmp_path / "models"))
    page.go(f"{app.url}/admin")
    *curl, body, url = shlex.split(page.text(page.find("pre")))
    assert (curl, url) == (["curl", "-d"], f"{app.url}{API}/models")
    assert app("POST", "/models", body.replace("JOB_ID", "job-1").encode()).status == 201
    page.reload()
    assert [row["Name"] for row in page.table("Trained models")] == ["job-1"]


def test_page_without_training_says_so_and_asks_for_nothing(page: Browser, serve: Serve) -> None:
    app = serve(training=False)
    page.go(f"{app.url}/admin")
    page.see("Training is off", "--training")
    assert not [url for url in page.requests() if "/v1/" in url]


def test_page_calls_a_model_named_with_blanks_by_its_job(page: Browser, lite: App) -> None:
    page.go(f"{lite.url}/admin#model={lite.record(THREE, name='  ')}")
    page.see("trained/job-1", part=page.find("region", "Model actions"))
    assert page.find("h2", "job-1") and page.find("link", "job-1")
    for act in ("Deploy", "Delete"):
        page.click("button", act)
        assert page.find("dialog", f"{act} job-1")
        page.keys("Escape")


@pytest.mark.parametrize("how", ["a click in its row", "Enter on its name"])
def test_page_chooses_a_model_and_again_after_a_reload(page: Browser, lite: App, how: str) -> None:
    for job in ("job-1", "job-2", "job-3"):
        lite.record(THREE, job)
    page.go(f"{lite.url}/admin")
    link = page.find("link", "job-2")
    if how == "Enter on its name":
        page.run("arguments[0].focus()", link)
        page.keys("Enter")
    else:
        page.on(page.run("return arguments[0].closest('tr').lastChild", link), "click")
    current = "return [...document.querySelectorAll('[aria-current=true]')].map(e => e.innerText)"
    for _ in range(2):
        page.see("job-2", "trained/job-2", part=page.find("region", "Model actions"))
        assert (page.run(current), page.run("return location.hash")) == (["job-2"], "#model=2")
        page.reload()


def test_page_shows_facts_files_and_a_dash_for_none(
    page: Browser, lite: App, sidecar: Sidecar
) -> None:
    show(page, lite, sidecar, num_examples=1200, params={"n": 9007199254740993, "lr": 1.0})
    facts = page.terms("Model actions")
    assert (facts["Examples"], facts["Job"], facts["Path"]) == ("1,200", "job-1", "trained/job-1")
    assert {facts[name] for name in ("Base model", "Model size", "Dataset", "Final loss")} == {"–"}
    assert json.dumps(json.loads(facts["Parameters"])) == '{"n": 9007199254740993, "lr": 1.0}'
    files = [(*row["File"].split(), row["Size"]) for row in page.table("Files")]
    sizes = ("8 B", "3 kB", "500 B")
    assert files == [
        (f["path"], f["sha256"], size) for f, size in zip(listed(THREE), sizes, strict=True)
    ]
    assert page.terms("Deployers")["ok"] == "Does nothing, and says so."


def test_page_shows_outcomes_in_their_own_entry(page: Browser, lite: App, sidecar: Sidecar) -> None:
    page.expected = " 502 "
    other = lite.record(THREE, "job-2")
    show(page, lite, sidecar)
    page.click("button", "Deploy")
    page.see(*DEPLOYERS, "Does nothing, and says so.", part=page.find("dialog", "Deploy job-1"))
    good, bad = page.press("ok"), page.press("broken")
    page.see("completed", "ok-1", " ms", part=good)
    page.see("failed", "the bucket is on fire", part=bad)
    page.click("button", "Close")
    page.see("ok-1", "the bucket is on fire", part=page.find("region", "Deployments"))
    assert [row["Status"] for row in page.table("Deployments")] == ["failed", "completed"]
    page.go(f"{lite.url}/admin#model={other}")
    page.see("None yet.")
    page.click("button", "Deploy")
    assert "ok-1" not in page.text(page.find("dialog", "Deploy job-2"))


def test_page_takes_presses_while_it_runs_for_one(
    page: Browser, serve: Serve, sidecar: Sidecar
) -> None:
    held = Held()
    app = serve(trained_model_deployers={"held": held, "ok": ok})
    model = show(page, app, sidecar)
    page.click("button", "Deploy")
    page.see("ok-1", part=page.press("ok"))  # from here on the button stays in its place
    page.double_click(page.find("button", "Deploy", page.find("listitem", "ok")))
    page.see("ok-2")
    status = page.press("held")
    page.see("running", part=status)
    page.press("held")
    page.keys("Enter")
    assert page.focused() == ("button", "Deploy")
    assert page.run("return document.activeElement.ariaDisabled") == "true"
    page.see("ok-4", part=page.press("ok"))
    held.release.set()
    page.see("completed", "released", part=status)
    assert [row["deployer"] for row in app.history(model)] == ["ok", "held", "ok", "ok"]


def test_page_sends_options_as_typed(page: Browser, lite: App, sidecar: Sidecar) -> None:
    model = show(page, lite, sidecar)
    page.click("button", "Deploy")
    page.see("completed", part=page.press("echo"))
    typed = '{"one": 1.0, "big": 9007199254740993}'
    page.write("Options (JSON)", f" {typed} ")
    page.see("ok-2", part=page.press("ok"))
    with_options, without = lite.history(model)
    assert json.dumps(with_options["options"]) == typed
    assert without["details"]["options"] is None


def test_page_reports_bad_options_and_sends_none(
    page: Browser, lite: App, sidecar: Sidecar
) -> None:
    model = show(page, lite, sidecar)
    page.click("button", "Deploy")
    report = """
        const field = document.activeElement, ids = field.getAttribute("aria-describedby").split(" ");
        return field.ariaInvalid + ": " + ids.map(id => document.getElementById(id).innerText).join(" ")"""
    for typed in ("{", "[1]", "null", '"{}"'):
        page.write("Options (JSON)", typed)
        page.press("ok")
        assert page.focused() == ("textbox", "Options (JSON)")
        assert page.run(report).startswith("true: This is no JSON object")
    page.write("Options (JSON)", "{}")
    assert page.run(report).startswith("null: ")
    page.see("ok-1", part=page.press("ok"))
    assert len(lite.history(model)) == 1


@pytest.mark.parametrize("how", ["Escape", "Close"])
def test_page_keeps_what_runs_when_closed(
    page: Browser, serve: Serve, sidecar: Sidecar, how: str
) -> None:
    warns = "return !dispatchEvent(new Event('beforeunload', {cancelable: true}))"
    held = Held()
    show(page, serve(trained_model_deployers={"held": held}), sidecar)
    page.click("button", "Deploy")
    page.press("held")
    if how == "Escape":
        page.keys("Escape")
    else:
        page.click("button", "Close")
    assert page.focused() == ("button", "Deploy")
    assert not page.has("dialog")
    deployments = page.find("region", "Deployments")
    page.see("the deployer is working", part=deployments)
    assert page.run(warns)
    held.release.set()
    page.see("completed", "released", part=deployments)
    assert not page.run(warns)


def test_page_follows_the_bytes_then_the_deployer(
    page: Browser, serve: Serve, sidecar: Sidecar
) -> None:
    arrive, held, files = threading.Event(), Held(), {"a": payload(1000), "b": payload(3000)}
    position = "return arguments[0].position"

    def halting(connection: socket.socket, data: bytes, start: int) -> None:
        connection.sendall(head(200, f"Content-Length: {len(data)}") + data[:1500])
        assert arrive.wait(20)
        connection.sendall(data[1500:])

    sidecar.add(files)
    sidecar.script["b"] = [halting]
    app = serve(trained_model_deployers={"held": held})
    model = app.record(files)
    with app.start_deploy(model, "held"):
        until(lambda: app.newest(model).get("status") == "running")
        until(lambda: app.newest(model).get("status") == "running")
        page.go(f"{app.url}/admin#model={model}")
        page.see("running", "2.5 kB of 4 kB, 1 of 2 files")
        assert " left" not in page.text()  # nothing arrives
        assert page.run(position, page.find("progressbar")) == 0.625
        arrive.set()
        page.see("4 kB in 2 files: the deployer is working")
        assert page.run(position, page.find("progressbar")) == 1
        held.release.set()
        page.see("completed", "released")


def test_page_tells_the_speed_and_the_time_left_of_a_fetch(
    page: Browser, serve: Serve, sidecar: Sidecar
) -> None:
    step, size = threading.Semaphore(0), 4_000_000

    def halting(connection: socket.socket, data: bytes, start: int) -> None:
        connection.sendall(head(200, f"Content-Length: {size}"))
        for at in range(0, size, 1_000_000):
            connection.sendall(data[at : at + 1_000_000])
            step.acquire(timeout=20)

    files = {"a": payload(size)}
    sidecar.add(files)
    sidecar.script["a"] = [halting]
    app = serve()
    model = app.record(files)
    with app.start_deploy(model, "ok"):
        until(lambda: app.progress(model).get("bytes_done") == 1_000_000)
        page.go(f"{app.url}/admin#model={model}")
        page.see("1 MB of 4 MB, 0 of 1 file")
        assert "/s" not in page.text()
        step.release()
        page.see("2 MB of 4 MB, 0 of 1 file, ", "kB/s, ", " s left")
        for _ in range(3):
            step.release()
        page.see("completed")


def test_page_shows_ten_reports_of_a_deployer(
    page: Browser, serve: Serve, sidecar: Sidecar
) -> None:
    step = threading.Semaphore(0)

    def tells(ctx: Context, req: object) -> None:
        for number in range(10):
            ctx.report(f"shard {number} <b>of</b> 10", None if number == 5 else number / 10)
            step.acquire(timeout=20)

    app = serve(trained_model_deployers={"tells": tells})
    model = show(page, app, sidecar)
    with app.start_deploy(model, "tells"):
        until(lambda: app.newest(model).get("status") == "running")
        page.reload()
        for number in range(10):
            page.see("running", f"shard {number} <b>of</b> 10")
            position = page.run("return arguments[0].position", page.find("progressbar"))
            assert position == (-1 if number == 5 else number / 10)
            step.release()
        page.see("completed")


def test_page_says_since_when_without_progress(page: Browser, lite: App, tmp_path: Path) -> None:
    model = lite.record(THREE)
    with contextlib.closing(gligabao.open_store(str(tmp_path / "gligabao.db"))) as store:
        store.record_trained_model_deployment(model, "elsewhere", {})
    page.go(f"{lite.url}/admin#model={model}")
    page.see("running", "elsewhere", "since ", part=page.find("region", "Deployments"))
    seen = "const bar = arguments[0]; return [bar.position, bar.parentNode.querySelector('time').title]"
    assert page.run(seen, page.find("progressbar")) == [-1, lite.newest(model)["created_at"]]


def test_page_audits_each_file_and_what_would_be_fetched(page: Browser, lite: App) -> None:
    files = {"changed": b"12345", "fine": b"123", "gone": payload(2000), "short": payload(1000)}
    model = lite.record(files)
    (lite.root / "job-1").mkdir(parents=True)
    for name, data in {"changed": b"54321", "fine": b"123", "short": b"1"}.items():
        (lite.root / "job-1" / name).write_bytes(data)
    huge = {"job_id": "huge", "files": [{"path": "a", "size_bytes": 2**62}]}
    lite("POST", "/models", huge)
    page.go(f"{lite.url}/admin#model={model}")
    page.click("button", "Audit")
    page.see("3 kB to fetch", ": they fit", part=page.find("region", "Files"))
    states = [row["On disk"] for row in page.table("Files")]
    assert states == ["wrong sha256", "ok", "missing", "wrong size"]
    page.click("link", "huge")
    page.see("4,611.7 PB")
    page.click("button", "Audit")
    page.see("they do not fit", part=page.find("region", "Files"))


def test_page_is_busy_while_it_audits_and_drops_a_late_answer(
    page: Browser, lite: App, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, audits, audit_model = threading.Event(), [], gligabao.audit_model

    def slow(ctx: Context, root: Path, model: TrainedModel) -> dict[str, Any]:
        audits.append(model.job_id)
        assert answer.wait(10)
        return audit_model(ctx, root, model)

    monkeypatch.setattr(gligabao, "audit_model", slow)
    lite.record(THREE, "job-2")
    show(page, lite, sidecar)
    files = page.find("region", "Files")
    page.click("button", "Audit")
    page.click("button", "Audit")
    assert page.run("return arguments[0].ariaBusy", files) == "true"
    page.click("link", "job-2")
    page.see("trained/job-2")
    until(lambda: audits == ["job-1"])
    answer.set()
    got = "return performance.getEntriesByType('resource').some(e => e.name.endsWith('/audit'))"
    until(lambda: page.run(got))
    assert "to fetch" not in page.text(files)
    page.click("button", "Audit")
    page.see("3.5 kB to fetch", part=files)
    assert page.run("return arguments[0].ariaBusy", files) is None
    assert audits == ["job-1", "job-2"]


def test_page_deletes_after_saying_what_goes_and_stays(
    page: Browser, lite: App, sidecar: Sidecar
) -> None:
    model = show(page, lite, sidecar)
    assert lite.deploy(model).status == 200
    page.click("button", "Delete")
    page.see("The model goes", "history", "files stay", part=page.find("dialog", "Delete job-1"))
    page.click("button", "Cancel")
    assert page.focused() == ("button", "Delete")
    assert lite("GET", f"/models/{model}").status == 200
    page.click("button", "Delete")
    page.click("button", "Delete", page.find("dialog"))
    page.see("No trained model is recorded yet")
    assert not page.has("region", "Model actions")
    assert lite("GET", f"/models/{model}").status == 404
    assert on_disk(lite.root / "job-1") == THREE


def test_page_without_deployers_disables_deploy(
    page: Browser, serve: Serve, sidecar: Sidecar
) -> None:
    show(page, serve(trained_model_deployers={}), sidecar)
    page.see("No deployer is registered", part=page.find("region", "Deployers"))
    assert page.run("return arguments[0].disabled", page.find("button", "Deploy"))


def passing(tmp_path: Path, sidecar: Sidecar, **options: Any) -> gligabao.Server:
    """A server that the test stops and starts again."""
    database = str(tmp_path / "gligabao.db")
    return gligabao.Server(
        database=database,
        training=True,
        sidecar=sidecar.url,
        trained_model_deployers=DEPLOYERS,
        **options,
    )


def test_page_keeps_the_key_for_the_tab_only(
    page: Browser, tmp_path: Path, sidecar: Sidecar
) -> None:
    def enter(key: str) -> None:
        page.write("API key", key)
        page.keys("Enter")

    kept = (
        "return [...Object.values(sessionStorage), ...Object.values(localStorage), document.cookie]"
    )
    page.expected = " 401 |ERR_CONNECTION_REFUSED"
    with passing(tmp_path, sidecar, port=0, api_key="s3cret") as server:
        plant(str(tmp_path / "gligabao.db"), "job-1", listed(THREE))
        page.go(f"{server.url}/admin")
        enter("wrong")
        page.see("refused")
        enter("s3cret")
        page.find("link", "job-1")
        assert (page.run(kept), page.run("return sessionStorage.length")) == (["s3cret", ""], 1)
        page.reload()
        page.click("link", "job-1")
        page.find("region", "Model actions")
    with passing(tmp_path, sidecar, port=urlsplit(server.url).port, api_key="an0ther"):
        page.click("button", "Audit")
        page.see("refused")
        enter("an0ther")
        page.click("button", "Forget key")
        page.find("textbox", "API key")
        assert "an0ther" not in page.run(kept)


def test_page_outlives_a_server_that_comes_back(
    page: Browser, tmp_path: Path, sidecar: Sidecar
) -> None:
    page.expected = "ERR_CONNECTION_REFUSED"
    sidecar.add(THREE)
    with passing(tmp_path, sidecar, port=0) as server:
        model = plant(str(tmp_path / "gligabao.db"), "job-1", listed(THREE))
        page.go(f"{server.url}/admin#model={model}")
        page.click("button", "Deploy")
    lost = page.press("ok")
    page.see("connection to the server was lost", "may still have run; see Deployments", part=lost)
    page.see("The server cannot be reached")
    with passing(tmp_path, sidecar, port=urlsplit(server.url).port):
        until(lambda: "cannot be reached" not in page.text())
        page.see("completed", "ok-1", part=page.press("ok"))


def test_page_shows_why_nothing_was_deployed(page: Browser, serve: Serve) -> None:
    page.expected = " 503 "
    app = serve(sidecar=None)
    model = app.record(THREE)
    page.go(f"{app.url}/admin#model={model}")
    page.click("button", "Deploy")
    page.see(app.deploy(model).error, part=page.press("ok"))
    assert page.focused() == ("button", "Deploy")
    assert page.run("return document.activeElement.ariaDisabled") is None


def test_page_shows_in_words_what_a_proxy_answers(
    page: Browser, lite: App, httpserver: Any
) -> None:
    page.expected = " 504 "
    lite.record(THREE)
    for path in ("/admin", f"{API}/models", f"{API}/deployers", f"{API}/models/1/deployments"):
        answer = request(lite.url, "GET", path)
        served = httpserver.expect_request(path, method="GET")
        served.respond_with_data(answer.body, content_type=answer.headers["Content-Type"])
    late = httpserver.expect_request(f"{API}/models/1/deployments", method="POST")
    late.respond_with_data("<h1>Gateway Time-out</h1>", 504)
    page.go(httpserver.url_for("/admin#model=1"))
    page.click("button", "Deploy")
    page.see("504", "no JSON", "may still have run; see Deployments", part=page.press("ok"))


def test_page_shows_a_hostile_model_literally(page: Browser, serve: Serve, tmp_path: Path) -> None:
    evil = (
        "</td></table></script><img src='http://127.0.0.1:9/' onerror='ran=1'><script>ran=1</script>"
        "<style>*{color:red}</style><a href='javascript:ran=1'>{training}&lt;${1}"
    )
    app = serve(trained_model_deployers=[gligabao.TrainedModelDeployer("ok", ok, evil)])
    database = str(tmp_path / "gligabao.db")
    texts = dict.fromkeys(("name", "base_model", "model_size", "dataset", "path"), evil)
    files = [{"path": evil, "size_bytes": 1, "sha256": evil}]
    model = plant(database, f"job{evil}", files, params=json.dumps({evil: evil}), **texts)
    with contextlib.closing(gligabao.open_store(database)) as store:
        for status, ref, error in (("completed", evil, ""), ("failed", "", evil)):
            id = store.record_trained_model_deployment(model, evil, {evil: evil})
            store.finish_trained_model_deployment(id, status, evil, ref, {evil: evil}, error, 1)
    page.expected = " 400 "
    page.go(f"{app.url}/admin#model={model}")
    page.see("failed", "completed")
    page.run(OPEN_DETAILS)
    (row,) = page.table("Trained models")
    assert {row[column] for column in ("Name", "Base model", "Model size")} == {evil}
    facts = page.terms("Model actions")
    assert {facts[name] for name in ("Base model", "Model size", "Dataset", "Path")} == {evil}
    assert (row["Job"], facts["Job"]) == (f"job{evil}", f"job{evil}")
    assert json.loads(facts["Parameters"]) == {evil: evil}
    assert page.table("Files")[0]["File"].split("\n") == [evil, evil]
    assert page.terms("Deployers") == {"ok": evil}
    for row in page.table("Deployments"):
        assert (row["Deployer"], row["Outcome"].split("\n")[0]) == (
            evil,
            evil,
        )  # the ref, the error
        assert row["Outcome"].count(json.dumps(evil)) == 4  # in details and options
    page.click("button", "Audit")
    page.see(f"job{evil}"[:20], part=page.find("status"))
    page.click("button", "Delete")
    page.click("button", "Cancel", page.find("dialog", f"Delete {evil}"))
    page.click("button", "Deploy")
    assert evil in page.text(page.find("dialog", f"Deploy {evil}"))
    page.see(f"job{evil}"[:20], part=page.press("ok"))
    assert page.run("return [typeof ran, document.images.length]") == ["undefined", 0]


PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": False}
EXACT = '{"temperature":1.0,"seed":9007199254740993,"nested":{"list":[100.0,"x"]}}'


def test_page_deploys_again_with_every_number_as_stored(
    page: Browser, serve: Serve, sidecar: Sidecar
) -> None:
    page.devtools("Emulation.setDeviceMetricsOverride", **PHONE)
    app = serve(trained_model_deployers=DEPLOYERS)
    model = show(page, app, sidecar, name="mine")
    path = f"/models/{model}/deployments"
    assert app("POST", path, f'{{"deployer": "ok", "options": {EXACT}}}'.encode()).status == 200
    assert app.deploy(model, "echo").status == 200
    page.reload()
    page.see("ok-1", "echo", part=page.find("region", "Deployments"))
    for row, deployer, typed in (("1", "ok", EXACT), ("2", "echo", "")):
        button = page.run(
            "return document.querySelector(`#deployments tr[data-key='${arguments[0]}'] button`)",
            row,
        )
        page.run("arguments[0].focus()", button)
        page.keys("Enter")  # by the keyboard alone from here on
        entry = page.find("listitem", deployer, page.find("dialog", "Deploy mine"))
        assert page.run("return arguments[0].value", page.find("textbox")) == typed
        assert page.focused() == ("button", "Deploy")
        assert page.run("return arguments[0].contains(document.activeElement)", entry)
        page.keys("Enter")
        page.see("completed", part=entry)
        page.keys("Escape")
        assert page.focused() == ("button", "Deploy again")
    answer = app("GET", path).body.decode()
    assert answer.count(f'"options":{EXACT}') == 2
    assert len(app.history(model)) == 4


def test_page_deploys_again_only_what_has_ended_and_without_its_deployer_too(
    page: Browser, serve: Serve, sidecar: Sidecar, tmp_path: Path
) -> None:
    held = Held()
    app = serve(trained_model_deployers={"held": held})
    model = show(page, app, sidecar)
    with contextlib.closing(gligabao.open_store(str(tmp_path / "gligabao.db"))) as store:
        gone = store.record_trained_model_deployment(model, "gone", {"a": 1})
        store.finish_trained_model_deployment(gone, "failed", "", "", None, "no", 1)
    with app.start_deploy(model, "held"):
        until(lambda: app.newest(model)["status"] == "running")
        page.reload()
        page.see("running", "gone")
        assert page.run("return document.querySelectorAll('#deployments button').length") == 1
        page.click("button", "Deploy again")
        assert page.find("dialog", "Deploy job-1")
        assert page.run("return arguments[0].value", page.find("textbox")) == '{"a":1}'
        assert page.focused() == ("heading", "Deploy job-1")
        held.release.set()


@pytest.mark.parametrize(
    ("ref", "is_link"),
    [
        ("https://example.org/m/1?a=1&b=<2>", True),
        ("HTTP://example.org", True),
        ("javascript:alert(1)", False),
        ("data:text/html,<b>", False),
        ("//example.org/x", False),
        ("see https://example.org", False),
        ("https://example.org and more", False),
        ("file:///etc/passwd", False),
    ],
)
def test_page_links_what_is_a_url_of_the_web_and_nothing_else(
    page: Browser, serve: Serve, sidecar: Sidecar, ref: str, is_link: bool
) -> None:
    app = serve(trained_model_deployers={"it": lambda ctx, req: DeployTrainedModelResult(ref)})
    show(page, app, sidecar)
    page.click("button", "Deploy")
    page.see("completed", ref, part=page.press("it"))
    page.keys("Escape")
    page.see(ref, part=page.find("region", "Deployments"))
    found = page.run(
        "return [...document.querySelectorAll('#deployments a, #choices a')]"
        ".map(a => [a.getAttribute('href'), a.target, a.rel])"
    )
    assert found == [[ref, "_blank", "noreferrer"]] * (3 if is_link else 0)


def test_page_filters_500_models_as_one_types(page: Browser, lite: App, tmp_path: Path) -> None:
    page.devtools("Emulation.setDeviceMetricsOverride", **PHONE)
    page.devtools(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    with direct(str(tmp_path / "gligabao.db")) as sql:
        sql(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 500) INSERT"
            " INTO gb_trained_models (name, job_id, base_model, params, files, created_at) SELECT"
            " 'Adapter ' || i, 'job-' || i, iif(i = 7, 'Llama', ''), '{}', '[]', '' FROM n"
        )
    page.go(f"{lite.url}/admin#model=3")
    page.see("Adapter 3", part=page.find("region", "Model actions"))
    shown = "return [...document.querySelectorAll('#models tbody tr')].filter(e => e.checkVisibility()).length"
    page.run("arguments[0].focus()", page.find("textbox", "Filter models"))
    begun = time.monotonic()
    for typed, count in (("LLAMA", 1), ("job-49", 11), ("adapter 2", 111), ("no such", 0)):
        page.keys(*typed)
        page.see(f"{count} of 500 models")
        assert page.run(shown) == count
        assert page.find("region", "Model actions")
        escape = "arguments[0].dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))"
        page.run(escape, page.find("textbox"))  # not every browser empties the field by itself
        assert page.run(shown) == 500
    assert time.monotonic() - begun < 20
    page.keys(*"llama")
    page.run("dispatchEvent(new Event('focus'))")  # as when a window is looked at again
    page.see("1 of 500 models")
    assert page.run(shown) == 1
    assert page.focused()[0] == "searchbox"


def test_page_has_no_filter_for_a_few_models(page: Browser, lite: App) -> None:
    for number in range(19):
        lite.record(THREE, f"job-{number}")
    page.go(f"{lite.url}/admin")
    page.see("job-18")
    assert not page.has("textbox", "Filter models")
    lite.record(THREE, "job-19")
    page.reload()
    page.find("textbox", "Filter models")


def test_page_deploys_by_the_keyboard_alone(page: Browser, serve: Serve, sidecar: Sidecar) -> None:
    def tab_to(role: str, name: str) -> None:
        for _ in range(20):
            page.keys("Tab")
            if page.focused() == (role, name):
                ring = page.run("return getComputedStyle(document.activeElement).outlineStyle")
                assert ring == "solid"
                return
        pytest.fail(f"Tab does not reach the {role} {name}")

    sidecar.add(THREE)
    app = serve(trained_model_deployers={"ok": ok})
    model = app.record(THREE, name="mine")
    page.go(f"{app.url}/admin")
    page.find("link", "mine")
    tab_to("link", "mine")
    page.keys("Enter")
    page.find("region", "Model actions")
    tab_to("button", "Deploy")
    page.keys("Enter")
    page.find("dialog", "Deploy mine")
    tab_to("textbox", "Options (JSON)")
    page.keys(*'{"by":"hand"}')
    tab_to("button", "Deploy")
    page.keys("Enter")
    page.see("completed", "ok-1", part=page.find("dialog"))
    page.keys("Escape")
    assert page.focused() == ("button", "Deploy")
    page.see("ok-1", part=page.find("region", "Deployments"))
    assert app.newest(model)["options"] == {"by": "hand"}


def test_page_fits_a_phone_without_sideways_scroll(
    page: Browser, serve: Serve, sidecar: Sidecar
) -> None:
    def endless(ctx: Context, req: object) -> None:
        raise RuntimeError("no" * 2000)

    too_wide = """
        const scrolls = e => e === document.documentElement || /auto|scroll/.test(getComputedStyle(e).overflowX);
        const over = e => e.scrollWidth > e.clientWidth || e.getBoundingClientRect().right > 390;
        const wide = e => e.checkVisibility() && scrolls(e) && over(e);
        return [...document.querySelectorAll("*")].filter(wide).map(e => e.outerHTML.slice(0, 80))"""
    page.expected = " 502 "
    page.devtools("Emulation.setDeviceMetricsOverride", **PHONE)
    app = serve(
        trained_model_deployers=[gligabao.TrainedModelDeployer("d" * 64, endless, "x" * 500)]
    )
    files = {"f" * 200: b"1"}
    sidecar.add(files)
    texts = dict.fromkeys(("name", "base_model", "model_size", "dataset"), "n" * 400)
    model = app.record(files, params={"p" * 200: "q" * 200}, **texts)
    assert app.deploy(model, "d" * 64, {"o" * 200: 1}).status == 502
    page.go(f"{app.url}/admin#model={model}")
    page.see("no" * 2000)
    page.click("button", "Audit")
    page.see("Every file is in")
    page.run(OPEN_DETAILS)
    assert page.run(too_wide) == []
    page.click("button", "Delete")
    assert page.run(too_wide) == []
    page.click("button", "Cancel")
    page.click("button", "Deploy")
    page.see("no" * 2000, part=page.press("d" * 64))
    assert page.run(too_wide) == []


def test_page_keeps_focus_and_text_when_it_refreshes(
    page: Browser, serve: Serve, sidecar: Sidecar
) -> None:
    state = """
        const {activeElement: at} = document, details = document.querySelector("details");
        return [at.localName, at.value ?? "", at.selectionStart ?? -1, `${getSelection()}`, details.open]"""
    reads = "return performance.getEntriesByType('resource').filter(e => /deployments$/.test(e.name)).length"

    def refreshed() -> list[Any]:
        before = page.run(reads)
        until(lambda: page.run(reads) >= before + 2)  # the first of them may have begun before
        return list(page.run(state))

    held = Held()
    app = serve(trained_model_deployers={"held": held, "ok": ok})
    sidecar.add(THREE)
    model = app.record(THREE)
    assert app.deploy(model).status == 200
    with app.start_deploy(model, "held"):
        until(lambda: app.newest(model).get("status") == "running")
        until(lambda: app.newest(model).get("status") == "running")
        page.go(f"{app.url}/admin#model={model}")
        page.see("working", "ok-1")
        page.run("document.querySelector('summary').focus()")
        page.keys("Enter")
        page.run("getSelection().selectAllChildren(document.querySelector('td .long'))")
        assert refreshed() == ["summary", "", -1, "ok-1", True]
        page.click("button", "Deploy")
        page.write("Options (JSON)", "half a t")
        page.run("document.activeElement.setSelectionRange(4, 6)")
        assert refreshed() == ["textarea", "half a t", 4, " a", True]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_follows_the_colour_scheme(page: Browser, lite: App, scheme: str) -> None:
    chosen = [{"name": "prefers-color-scheme", "value": scheme}]
    page.devtools("Emulation.setEmulatedMedia", features=chosen)
    page.go(f"{lite.url}/admin")
    page.see("No trained model")
    for part in (page.find("body"), page.find("region", "Trained models")):
        colours = """
            let back = arguments[0], {color} = getComputedStyle(back), under;
            while (/, 0\\)$/.test(under = getComputedStyle(back).backgroundColor)) back = back.parentElement;
            return [color, under]"""
        text, back = (max(map(int, re.findall(r"\d+", rgb))) for rgb in page.run(colours, part))
        assert (text > 200 and back < 60) if scheme == "dark" else (text < 60 and back > 200)


def test_page_shows_500_models_and_100_deployments_the_newest(
    page: Browser, lite: App, tmp_path: Path
) -> None:
    model = lite.record(THREE)
    count = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) INSERT INTO"
    )
    with direct(str(tmp_path / "gligabao.db")) as sql:
        sql(
            f"{count} gb_trained_models (name, job_id, params, files, created_at)"
            " SELECT 'm', 'm' || i, '{}', '[]', '2026-01-02T03:04:05Z' FROM n",
            500,
        )
        sql(
            f"{count} gb_trained_model_deployments (trained_model_id, deployer, options, status, error, created_at)"
            " SELECT ?, 'ok', '{}', 'failed', 'error ' || i, '2026-01-02T03:04:05Z' FROM n",
            *(120, model),
        )
    page.go(f"{lite.url}/admin#model={model}")
    rows = page.table("Deployments")
    assert [int(row["ID"]) for row in rows] == [*range(120, 20, -1)]
    assert rows[-1]["Outcome"].startswith("error 21\n")
    assert [int(row["ID"]) for row in page.table("Trained models")] == [*range(501, 1, -1)]


# ---- several servers, and faults at random moments -----------------------------------------------

ROUNDS = int(os.environ.get("GLIGABAO_TEST_ROUNDS", "15"))  # 100 once in a while
OWN = (
    "import multiprocessing, os, sys, threading, time; sys.path.insert(0, {!r}); import gligabao\n"
    "from concurrent.futures import ThreadPoolExecutor\n"
    "def mine(ctx, req): return gligabao.DeployTrainedModelResult(str(req.deploy_id))\n"
    "def slow(ctx, req): ctx.wait(1); ctx.raise_if_cancelled()\n"
    "def leave(ctx, req): threading.Thread(target=time.sleep, args=(60,), daemon=False).start()\n"
    "def pool(ctx, req): ThreadPoolExecutor().submit(time.sleep, 60)\n"
    "def quiet(ctx, req): sys.stderr.close()\n"
    "def child(ctx, req):\n"
    "    multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,), daemon=True).start()\n"
    "def orphan(ctx, req):\n"
    "    made = os.fork() or time.sleep(60) or os._exit(0)\n"
    "    return gligabao.DeployTrainedModelResult(str(made))\n"
    "own = {{f.__name__: f for f in (mine, slow, leave, pool, quiet, child, orphan)}}\n"
    "sys.exit(gligabao.main(trained_model_deployers=own))\n"
)


@contextlib.contextmanager
def process(home: Path, database: str, sidecar: Sidecar, root: Path) -> Iterator[tuple[Any, str]]:
    """Run a server of its own process; yield it and its address."""
    home.mkdir(exist_ok=True)
    (home / "own.py").write_text(OWN.format(str(HERE)))
    words = ["serve", "--training", "--port", "0", "--database", database, "--sidecar", sidecar.url]
    with open(home / "log.txt", "w") as out:
        words = [sys.executable, "own.py", *words, "--trained-model-deploy-dir", str(root)]
        server = subprocess.Popen(words, cwd=home, stdout=out, stderr=out)
    try:
        yield (
            server,
            until(lambda: re.search(r"http://[\d.]+:\d+", (home / "log.txt").read_text()), 20)[0],
        )
    finally:
        server.kill()
        server.wait(10)


def test_two_processes_on_one_database_and_one_directory_fetch_each_file_once(
    database: str, sidecar: Sidecar, tmp_path: Path
) -> None:
    root = tmp_path / "shared"
    with (
        process(tmp_path / "one", database, sidecar, root) as (_, one),
        process(tmp_path / "two", database, sidecar, root) as (_, two),
        ThreadPoolExecutor(6) as pool,
    ):
        for number in range(ROUNDS):
            job = f"job-{number}"
            files = {f"f{n}.bin": payload(30_000, (number, n)) for n in range(3)}
            sidecar.add(files, job)
            sidecar.asked.clear()
            model = request(
                one, "POST", f"{API}/models", {"job_id": job, "files": listed(files)}
            ).json["id"]
            path = f"{API}/models/{model}/deployments"
            asked = [
                pool.submit(request, url, "POST", path, {"deployer": "mine"})
                for url in (one, two) * 3
            ]
            assert [answer.result(30).status for answer in asked] == [200] * 6
            assert sorted(sidecar.asked) == sorted(files)
            rows = request(one, "GET", path).json["deployments"]
            assert rows == request(two, "GET", path).json["deployments"]
            assert len({row["id"] for row in rows}) == 6


def test_stopped_server_touches_only_its_own_rows(
    database: str, sidecar: Sidecar, tmp_path: Path
) -> None:
    sidecar.add({"a": b"1"})
    with (
        process(tmp_path / "one", database, sidecar, tmp_path / "r") as (first, one),
        process(tmp_path / "two", database, sidecar, tmp_path / "r") as (_, two),
        ThreadPoolExecutor(2) as pool,
    ):
        request(one, "POST", f"{API}/models", {"job_id": "job-1", "files": listed({"a": b"1"})})
        path = f"{API}/models/1/deployments"
        stopped, other = (
            pool.submit(request, url, "POST", path, {"deployer": "slow"}) for url in (one, two)
        )
        until(lambda: len(request(two, "GET", path).json["deployments"]) == 2)
        first.terminate()
        assert stopped.result(20).error == "the server is stopping"
        assert other.result(20).status == 200
        assert first.wait(12) == 0


def test_server_stopped_at_a_random_moment_leaves_no_row_running(
    sidecar: Sidecar, tmp_path: Path
) -> None:
    files = {"a.bin": payload(1000), "b.bin": payload(3_000_000)}
    sidecar.add(files)
    database = str(tmp_path / "x.db")
    chance = random.Random(3)
    for number in range(max(5, ROUNDS // 5)):
        shutil.rmtree(tmp_path / "r", ignore_errors=True)
        with (
            process(tmp_path / "one", database, sidecar, tmp_path / "r") as (server, url),
            ThreadPoolExecutor(3) as pool,
        ):
            if number == 0:
                request(url, "POST", f"{API}/models", {"job_id": "job-1", "files": listed(files)})
            for _ in range(3):
                pool.submit(
                    request, url, "POST", f"{API}/models/1/deployments", {"deployer": "slow"}
                )
            time.sleep(chance.random() * 0.4)  # the random moment itself
            server.terminate()
            assert server.wait(12) == 0
    with contextlib.closing(gligabao.open_store(database)) as store:
        rows = store.list_trained_model_deployments(1, 500)
    assert {row["status"] for row in rows} <= {"failed", "completed"}
    assert {row["error"] for row in rows} <= {"", "the server is stopping"}


def test_killed_at_a_random_moment_nothing_is_half_done(sidecar: Sidecar, tmp_path: Path) -> None:
    files = {"a.bin": payload(1000), "b.bin": payload(2_000_000), "sub/c.bin": payload(1_000_000)}
    sidecar.add(files)
    database, root = str(tmp_path / "x.db"), tmp_path / "r"
    chance = random.Random(4)

    def slow(connection: socket.socket, data: bytes, start: int) -> None:
        connection.sendall(head(200, f"Content-Length: {len(data)}"))
        for at in range(0, len(data), len(data) // 20):
            connection.sendall(data[at : at + len(data) // 20])
            sidecar.release.wait(0.003)

    path = f"{API}/models/1/deployments"
    for number in range(ROUNDS):
        shutil.rmtree(root, ignore_errors=True)
        with (
            process(tmp_path / "one", database, sidecar, root) as (server, url),
            ThreadPoolExecutor(1) as pool,
        ):
            if number == 0:
                request(url, "POST", f"{API}/models", {"job_id": "job-1", "files": listed(files)})
            sidecar.script = {"b.bin": [slow], "sub/c.bin": [slow]}
            pool.submit(request, url, "POST", path, {"deployer": "mine"})
            time.sleep(chance.random() * 0.12)  # the random moment itself
            server.kill()
        sidecar.script.clear()
        real = {
            name: data for name, data in on_disk(root / "job-1").items() if ".fetch-" not in name
        }
        assert real.items() <= files.items()
        with process(tmp_path / "two", database, sidecar, root) as (_, url):
            assert request(url, "POST", path, {"deployer": "mine"}).status == 200
            assert on_disk(root / "job-1") == files
            statuses = [row["status"] for row in request(url, "GET", path).json["deployments"]]
            assert {*statuses} <= {"completed", "running"}


# ---- hostile requests ----------------------------------------------------------------------------

HOSTILE = int(os.environ.get("GLIGABAO_TEST_HOSTILE", "2000"))  # 100000 once in a while
MODELS = b"/v1/gb/training/models"
ONE_OF_LENGTHS = (
    b"0 5 -1 +5 5_0 \xd9\xa5 1048577 5,5 999999999999999999999999999999999999999".split()
)
PIECES: dict[str, list[bytes]] = {
    "method": [*b"GET POST DELETE HEAD PUT OPTIONS get FOO \x00".split(), b"", b"G E T"],
    "path": [
        *b"/ /admin /health //health * http://localhost/health /%2e%2e/etc/passwd /../x".split(),
        *(MODELS + tail for tail in b"/ ?limit=2 ?limit=x ?limit= ?%ff=%00 ?before=1".split()),
        *(MODELS + b"/" + id for id in b"1 0 -1 01 %31 1;x \xd9\xa1".split()),
        *(
            MODELS + b"/1/" + end
            for end in b"deployments audit audit/ deployments?limit=501".split()
        ),
        *b"/v1/gb/training/deployers /\x1b[2J /\xff\xfe /#x /?".split(),
        *(MODELS, MODELS + b"/" + b"9" * 30, b"/a b", b"/" + b"x" * 70_000),
    ],
    "version": [
        *([b"HTTP/1.1"] * 8 + [b""]),
        *b"HTTP/1.0 HTTP/0.9 HTTP/2 HTTP/1.1.1 http/1.1 HTTP/1.999999999999".split(),
    ],
    "header": [
        *(b"Content-Length: " + length for length in (*ONE_OF_LENGTHS, b"", b"5, 5")),
        *(b"Transfer-Encoding: " + coding for coding in (b"gzip, chunked", b"")),
        *(b"Transfer-Encoding: " + coding for coding in b"chunked xchunked identity".split()),
        *(b"Host: evil.example", b"Host:", b"Host : localhost", b"Origin: null", b"X" * 66_000),
        *(b"Sec-Fetch-Site: cross-site", b"Expect: 100-continue", b"Expect: x", b" folded"),
        *(b"Connection: close", b"Connection: keep-alive", b"no colon", b": x", b"From x"),
        *(b"Authorization: Bearer x", b"Range: bytes=5-", b"X: \x00\x1b\r"),
        b"Content-Type: text/plain; charset=utf-16",
    ],
    "body": [
        *b"{} { [] null \xff \xef\xbb\xbf{} NaN".split(),
        *(b"", b'{"a":' * 400 + b"1" + b"}" * 400, b"9" * 5000, b"x" * 100_000),
        *b"""{"deployer":"ok"} {"deployer":"broken","options":{}} {"deployer":["ok"]}
            {"deployer":"ok","options":{"a":1e400}} {"job_id":"x","files":[]} {"job_id":"../x"}
            {"job_id":"\\ud800"} {"job_id":1}
            {"job_id":"job-1","files":[{"path":"a","size_bytes":1}]}""".split(),
        b"GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
}


def hostile_request(chance: random.Random) -> bytes:
    """Make a request of which some part is likely to be wrong."""

    def one(kind: str) -> bytes:
        return chance.choice(PIECES[kind])

    headers = [b"Host: localhost"] * (chance.random() < 0.9)
    headers += [one("header") for _ in range(chance.choice([0, 0, 0, 1, 1, 2, 3]))]
    body = one("body")
    if chance.random() < 0.7:
        headers.append(b"Content-Length: %d" % len(body))
    end = chance.choice([b"\r\n"] * 9 + [b"\n"])
    data = end.join([b" ".join([one("method"), one("path"), one("version")]), *headers, b"", body])
    return data[: chance.randrange(len(data))] if chance.random() < 0.1 else data


def test_hostile_requests_get_a_documented_answer_or_a_closed_connection(
    lite: App, sidecar: Sidecar
) -> None:
    sidecar.add({"a": b"1"})
    lite.deploy(lite.record({"a": b"1"}))
    threads, files = threading.active_count(), len(os.listdir("/dev/fd"))
    documented = {*(200, 201, 204, 302, 400, 401, 403, 404, 405, 409, 411, 502, 503), 100}

    def attack(seed: int) -> None:
        chance = random.Random(seed)
        data = b"".join(hostile_request(chance) for _ in range(chance.choice([1, 1, 2])))
        answer = b""
        with lite.connect() as connection, contextlib.suppress(ConnectionError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(65536):
                answer += more
        statuses = {int(found) for found in re.findall(rb"HTTP/1.1 (\d+) ", answer)}
        assert statuses <= documented, (seed, data[:500], answer[:500])
        assert b"<html" not in answer.replace(b'<html lang="en">', b"")

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(attack, range(HOSTILE)):
            pass
    until(lambda: threading.active_count() <= threads and len(os.listdir("/dev/fd")) <= files, 20)
    assert lite("GET", "/models").status == 200


# ---- PostgreSQL alone ----------------------------------------------------------------------------


@pytest.fixture
def shaky(
    postgres: Cluster, serve: Callable[..., App]
) -> Iterator[tuple[Cluster, Callable[..., App]]]:
    """A cluster that the test may stop, and servers on it; it runs again afterwards."""
    yield postgres, lambda **options: serve(database=postgres.url(), **options)
    with contextlib.suppress(AssertionError):
        postgres.control("start")
    with direct(postgres.url()) as sql:
        sql("DROP TABLE IF EXISTS gb_trained_model_deployments, gb_trained_models")


@pytest.mark.parametrize("moment", ["before", "recording", "fetching", "deploying", "finishing"])
def test_postgres_restarted_in_the_middle_neither_loses_nor_doubles_a_record(
    shaky: Any, sidecar: Sidecar, moment: str
) -> None:
    cluster, start = shaky
    gate = threading.Event()

    def deploy(ctx: Context, req: Any) -> DeployTrainedModelResult:
        if moment == "deploying":
            gate.wait(20)
        elif moment == "finishing":
            cluster.control("stop", "-m", "fast")
            timer = threading.Timer(1, cluster.control, ["start"])
            timer.start()
        return DeployTrainedModelResult("made")

    app = start(trained_model_deployers={"it": deploy})
    if moment == "fetching":

        def wait(connection: socket.socket, data: bytes, start: int) -> None:
            gate.wait(20)
            good(connection, data, start)

        sidecar.script["a"] = [wait]
    sidecar.add({"a": b"1"})
    model = app.record({"a": b"1"})
    if moment == "before":
        cluster.control("restart", "-m", "fast")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(app.deploy, model, "it")
        if moment in ("fetching", "deploying"):
            until(lambda: app.history(model))
        if moment in ("recording", "fetching", "deploying"):
            cluster.control("restart", "-m", "fast")
        gate.set()
        status = answer.result(30).status
    rows = until(
        lambda: (answer := app("GET", f"/models/{model}/deployments")).status == 200 and answer
    )
    ends = [(row["status"], row["ref"]) for row in rows.json["deployments"]]
    assert (status, ends) in [(200, [("completed", "made")])] + [(500, [])] * (
        moment == "recording"
    )


def test_postgres_outage_is_a_prompt_500_and_then_it_works(shaky: Any, sidecar: Sidecar) -> None:
    cluster, start = shaky
    app = start()
    sidecar.add({"a": b"1"})
    model = app.record({"a": b"1"})
    cluster.control("stop", "-m", "fast")
    for method, path in (("GET", "/models"), ("POST", f"/models/{model}/deployments")):
        begun = time.monotonic()
        answer = app(method, path, {"deployer": "ok"} if method == "POST" else None)
        assert (answer.status, bool(answer.error)) == (500, True)
        assert time.monotonic() - begun < 5
    assert request(app.url, "GET", "/health").status == 200
    cluster.control("start")
    assert app.deploy(model).status == 200


def test_postgres_that_does_not_answer_is_not_waited_for_without_end(
    shaky: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    cluster, start = shaky
    app = start()
    model = app.record({"a": b"1"})
    monkeypatch.setattr(gligabao, "FINISH_TIMEOUT_S", 0.3)
    with psycopg.connect(cluster.url()) as other:
        other.execute("LOCK TABLE gb_trained_models")
        for _ in range(9):  # more than there are connections
            answer = app("GET", f"/models/{model}")
            assert (answer.status, "did not answer" in answer.error) == (500, True)
    assert app("GET", f"/models/{model}").status == 200


def test_postgres_sees_no_transaction_and_few_sessions_while_a_deployer_works(
    shaky: Any, sidecar: Sidecar
) -> None:
    cluster, start = shaky
    app = start()
    sidecar.add({"a": b"1"})
    model = app.record({"a": b"1"})
    with contextlib.ExitStack() as held, direct(cluster.url()) as sql:
        for _ in range(12):
            held.enter_context(app.start_deploy(model, "patient"))
        until(lambda: sum("progress" in row for row in app.history(model)) == 12)
        with ThreadPoolExecutor(20) as pool:
            assert all(len(rows) == 12 for rows in pool.map(app.history, [model] * 60))
        states = sql(
            "SELECT state FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        assert {state for (state,) in states} == {"idle"}
        assert len(states) <= 8
    until(lambda: all(row["status"] == "failed" for row in app.history(model)))


def test_postgres_columns_have_the_types_of_the_contract(shaky: Any) -> None:
    cluster, start = shaky
    start()
    with direct(cluster.url()) as sql:
        kinds = {
            (table, name): kind
            for table, name, kind in sql(
                "SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_name LIKE ?",
                "gb_%",
            )
        }
    times = {key for key in kinds if key[1].endswith("_at")}
    whole = {
        key
        for key in kinds
        if key[1] in ("id", "trained_model_id", "duration_ms", "num_examples", "num_train_steps")
    }
    assert {kinds.pop(key) for key in times} == {"timestamp with time zone"}
    assert {kinds.pop(key) for key in whole} == {"bigint"}
    assert kinds.pop(("gb_trained_models", "final_loss")) == "double precision"
    assert {*kinds.values()} == {"text"}


def test_postgres_times_beyond_the_calendar_are_shown(shaky: Any) -> None:
    cluster, start = shaky
    app = start()
    app.record({"a": b"1"})
    with direct(cluster.url()) as sql:
        sql("UPDATE gb_trained_models SET created_at = 'infinity'")
    assert app("GET", "/models").json["models"][0]["created_at"] == "infinity"


def test_postgres_speaks_utf8_whatever_the_environment_says(
    shaky: Any, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "SQL_ASCII")
    app = shaky[1]()
    sidecar.add({"a": b"1"})
    model = app.record({"a": b"1"}, name="日本")
    assert app("GET", f"/models/{model}").json["name"] == "日本"
    assert app.deploy(model).status == 200


def test_postgres_of_another_encoding_is_refused(postgres: Cluster) -> None:
    with direct(postgres.url()) as sql:
        sql("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
    with pytest.raises(ValueError, match="must be one in UTF8, this one is in LATIN1"):
        gligabao.open_store(postgres.url("latin"))


def test_postgres_role_that_owns_no_table_can_serve(shaky: Any) -> None:
    cluster, _ = shaky
    gligabao.open_store(cluster.url()).close()
    with direct(cluster.url()) as sql:
        sql("DROP ROLE IF EXISTS app")
        sql("CREATE ROLE app LOGIN")
        sql("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO app")
    with contextlib.closing(
        gligabao.open_store(cluster.url().replace("postgres@", "app@"))
    ) as store:
        assert store.list_trained_models() == []
    with direct(cluster.url()) as sql:
        sql("DROP OWNED BY app")


def test_postgres_reads_json_columns_that_others_made(shaky: Any, sidecar: Sidecar) -> None:
    cluster, start = shaky
    gligabao.open_store(cluster.url()).close()
    with direct(cluster.url()) as sql:
        for column in ("options", "details"):
            table = "gb_trained_model_deployments"
            sql(f"ALTER TABLE {table} ALTER {column} DROP DEFAULT")
            sql(f"ALTER TABLE {table} ALTER {column} TYPE jsonb USING {column}::jsonb")
            sql(f"ALTER TABLE {table} ALTER {column} SET DEFAULT '{{}}'")
    app = start()
    sidecar.add({"a": b"1"})
    model = app.record({"a": b"1"})
    assert app.deploy(model, options={"a": 1}).json["options"] == {"a": 1}
    assert app.newest(model)["details"] == {"files": 1}


def test_postgres_without_psycopg_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['psycopg'] = None; sys.argv[0] = 'gligabao'; import gligabao; sys.exit(gligabao.main())"
    words = [
        sys.executable,
        "-Bc",
        code,
        "serve",
        "--port",
        "0",
        "--database",
        "postgresql://u:s3cret@h/x",
    ]
    done = subprocess.run(words, cwd=HERE, capture_output=True, text=True, timeout=30)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "pip install 'psycopg[binary]'" in done.stderr
    assert "s3cret" not in done.stderr


# ---- README --------------------------------------------------------------------------------------

README = (HERE / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def block(text: str) -> str:
    """The README's only Python block that holds this text."""
    (found,) = (code for code in PYTHON_BLOCKS if text in code)
    return found


def recipe(text: str, name: str, **changed: Any) -> Any:
    """The deployer of a recipe, some of its constants changed."""
    names: dict[str, Any] = {}
    exec(compile(block(text), "README.md", "exec"), names)
    names.update(changed)
    return names[name]


def deploy_request(home: Path, deploy_id: int = 7) -> gligabao.DeployTrainedModelRequest:
    target = gligabao.model_dir(home / "root", model_of(THREE))
    gligabao.fetch_model_files(Context(), Shelf(THREE), model_of(THREE), target)
    return gligabao.DeployTrainedModelRequest(deploy_id, model_of(THREE), target, None)


def test_readmes_script_deploys_with_its_own_deployer_and_its_test_passes(tmp_path: Path) -> None:
    (tmp_path / "deploy.py").write_text(block("gligabao.main("))
    (tmp_path / "test_mine.py").write_text(block("def test_folder"))
    shutil.copy(MODULE, tmp_path)
    gligabao._make_adapter(tmp_path / "DIR" / "trained" / "my-job")
    log = tmp_path / "log.txt"
    words = [sys.executable, "deploy.py", "serve", "--training", "--sidecar", "DIR", "--port", "0"]
    with open(log, "w") as out:
        server = subprocess.Popen(words, cwd=tmp_path, stdout=out, stderr=out)
    try:
        url = until(lambda: re.search(r"http://[\d.]+:\d+", log.read_text()))[0]
        record = recipe("def record(", "record", SERVER=url)
        model = record("my-job", base_model="MiniLM", final_loss=0.42)
        assert (model["final_loss"], model) == (0.42, record("my-job"))
        with pytest.raises(RuntimeError, match="no model at 'trained/nobody'"):
            record("nobody")
        (lines,) = re.findall(r"```sh\n(python deploy.py record.*?)```", README, re.DOTALL)
        lines = re.sub("python (.*)", rf"{sys.executable} \1 --url {url}", f"set -e\n{lines}")
        done = subprocess.run(["sh", "-c", lines], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, "already" in done.stderr) == (0, True), done.stderr
        assert "Every file is in" in done.stdout
        assert len(on_disk(tmp_path / "releases" / "deploy-1")) == 4
        failing = lines.replace(" folder ", " nobody ")
        done = subprocess.run(["sh", "-c", failing], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, "Every file" in done.stdout) == (1, False)
    finally:
        server.terminate()
        server.wait(12)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=60).returncode == 0


def test_readmes_example_of_a_report_says_how_far_it_is(tmp_path: Path) -> None:
    ctx, seen = Context(), []
    bucket = recipe(
        "ctx.report", "bucket", upload=lambda *_: seen.append(ctx.reported), gligabao=gligabao
    )
    req = deploy_request(tmp_path)
    assert bucket(ctx, req).ref == "models/deploy-7"
    assert [text for text, _ in seen] == [f"uploading {file.path}" for file in req.model.files]
    assert [fraction for _, fraction in seen] == [0, 8 / 3508, 3008 / 3508]
    assert ctx.reported == ("registering", None)


def test_recipe_of_a_release_folder_switches_its_link_and_cleans_up(tmp_path: Path) -> None:
    releases = tmp_path / "releases"
    release = recipe("def release", "release", RELEASES=releases)
    for number in (7, 8):
        made = Path(release(Context(), deploy_request(tmp_path, number)).ref)
        assert on_disk(made) == THREE
        assert (releases / "current").resolve() == made.resolve()
    ctx = Context()
    ctx.cancel("enough")
    with pytest.raises(gligabao.Cancelled):
        release(ctx, deploy_request(tmp_path, 9))
    assert sorted(path.name for path in releases.iterdir()) == ["current", "deploy-7", "deploy-8"]


def test_recipe_of_vllm_loads_and_unloads_by_its_own_name(tmp_path: Path, httpserver: Any) -> None:
    said: list[tuple[str, Any]] = []

    def answer(request: Any) -> Any:
        from werkzeug import Response

        said.append((request.path, request.get_json()))
        return Response("Success: LoRA adapter 'job-1-7' added successfully.")

    httpserver.expect_request(
        re.compile("/v1/(un)?load_lora_adapter"), method="POST"
    ).respond_with_handler(answer)
    vllm = recipe("def vllm", "vllm", VLLM=httpserver.url_for("").rstrip("/"))
    req = deploy_request(tmp_path)
    assert vllm(Context(), req).ref == "job-1-7"
    ctx = Context()
    ctx.cancel("enough")
    with pytest.raises(gligabao.Cancelled):
        vllm(ctx, req)
    load = ("/v1/load_lora_adapter", {"lora_name": "job-1-7", "lora_path": str(req.dir)})
    assert said == [load, load, ("/v1/unload_lora_adapter", {"lora_name": "job-1-7"})]
    refused = recipe("def vllm", "vllm", VLLM=httpserver.url_for("/nope"))
    with pytest.raises(RuntimeError, match="vLLM answered 500"):
        refused(Context(), req)


class Cloud:
    """Stands for boto3 and for a hub: keeps what is asked of it, and fails where it is told to."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.asked = failing, []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        def act(*words: Any, **more: Any) -> Any:
            self.asked.append((name, more.get("Key") or more.get("branch") or words[-1:]))
            if name in self.failing:
                raise OSError(f"{name} failed")
            return self

        return act


RECIPES = {
    "bucket": ("boto3.client", "upload_file", "delete_object"),
    "hub": ("HfApi()", "create_commit", "delete_branch"),
}


@pytest.mark.parametrize(("name", "parts"), RECIPES.items(), ids=RECIPES)
def test_recipe_that_cannot_clean_up_tells_the_cause_and_notes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, parts: tuple[str, str, str]
) -> None:
    text, does, undoes = parts
    req = deploy_request(tmp_path)
    for failing, notes in (((does,), []), ((does, undoes), [f"{undoes} failed"])):
        cloud = Cloud(*failing)
        for module in ("boto3", "huggingface_hub"):
            monkeypatch.setitem(sys.modules, module, cloud)  # type: ignore[arg-type]
        deploy = recipe(text, name, HfApi=lambda: cloud)  # noqa: B023
        with pytest.raises(OSError, match=f"^{does} failed") as caught:
            deploy(Context(), req)
        told = getattr(caught.value, "__notes__", [])
        assert [note.rpartition(": ")[2] for note in told] == notes
        assert undoes in [asked for asked, _ in cloud.asked]
    cloud.failing = ()
    assert "deploy-7" in deploy(Context(), req).ref
    assert name == "hub" or cloud.asked[-1][0] == "close"


def test_readmes_blocks_compile() -> None:
    for code in PYTHON_BLOCKS:
        compile(code, "README.md", "exec")


def test_readme_names_every_option_flag_route_status_and_variable(tmp_path: Path) -> None:
    source = MODULE.read_text()
    options = {
        *inspect.signature(gligabao.Server).parameters,
        *inspect.signature(gligabao.serve).parameters,
    } - {"options"}
    commands = ("serve", "sidecar", "demo", *gligabao._CLIENTS)
    help = "".join(run(command, "--help", cwd=tmp_path).stdout for command in commands)
    flags = {*re.findall(r"--[a-z-]+", help)}
    api: Any = gligabao._API.__new__(gligabao._API)
    routes = {
        f"{method} {pattern.replace('([^/]+)', '{id}')}"
        for pattern, methods in api.routes(training=True)
        for method in methods
    }
    variables = {*re.findall("GLIGABAO_[A-Z_]+", source)}
    statuses = {
        *map(str, gligabao._STATUS_OF_KIND.values()),
        *re.findall(r"(?:_Refusal|_answer|malformed)\(.*?\b([245]\d\d)\b", source),
    }
    for words in (options, flags, routes, variables, statuses - {"416"}):
        assert [word for word in sorted(words) if f"{word}" not in README] == []


# What an operator pastes.


def tool(name: str) -> str:
    """The path of a program that not every machine has."""
    if found := shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin"):
        return found
    if REQUIRED:
        pytest.fail(f"{name} is missing, and GLIGABAO_TEST_REQUIRE is set")
    pytest.skip(f"{name} is not on this machine")


def pasted(kind: str, text: str = "") -> str:
    """The README's only block of this kind that holds this text."""
    blocks = re.findall(rf"```{kind}\n(.*?)```", README, re.DOTALL)
    (found,) = (block for block in blocks if text in block)
    return str(found)


def test_readmes_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    unit = tmp_path / "gligabao.service"
    for path in ("/usr/bin/python3", "/opt/gligabao/deploy.py"):
        assert path in pasted("ini")
    unit.write_text(pasted("ini").replace("/usr/bin/python3", sys.executable))
    words = [tool("systemd-analyze"), "verify", "--man=no", "--generators=no", str(unit)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    said = [line for line in done.stderr.splitlines() if unit.name in line]
    assert (done.returncode, said) == (0, []), done.stderr


def test_readmes_service_survives_a_stop_and_a_new_key(tmp_path: Path) -> None:
    source = block("gligabao.main(").replace("shutil.copytree", "ctx.wait(30)\n    shutil.copytree")
    (tmp_path / "deploy.py").write_text(source)
    shutil.copy(MODULE, tmp_path)
    gligabao._make_adapter(tmp_path / "models" / "trained" / "my-job")
    (line,) = re.findall("ExecStart=(.*)", pasted("ini"))
    words = line.replace("/usr/bin/python3", sys.executable).replace("/opt/gligabao/", "")
    words = words.replace("http://trainer:7879", "models").split()
    (name,) = re.findall(r"echo \"(\w+)=", pasted("sh", "systemctl"))

    @contextlib.contextmanager
    def service(key: str) -> Iterator[Callable[..., Any]]:
        """Start and stop it as systemd does."""
        log = tmp_path / f"{key}.txt"
        with open(log, "w") as out:
            process = subprocess.Popen(
                [*words, "--port", "0"], cwd=tmp_path, stderr=out, env=os.environ | {name: key}
            )
        try:
            url = until(lambda: re.search(r"http://[\d.]+:\d+", log.read_text()))[0]
            bearer = {"Authorization": f"Bearer {key}"}
            yield lambda method, path, body=None: request(url, method, API + path, body, bearer)
        finally:
            process.terminate()
            assert process.wait(20) == 0

    path, body = "/models/1/deployments", {"deployer": "folder"}
    with ThreadPoolExecutor(1) as pool:
        with service("first") as ask:
            assert ask("POST", "/models", {"job_id": "my-job"}).status == 201
            answer = pool.submit(ask, "POST", path, body)
            until(lambda: ask("GET", path).json["deployments"])
        assert answer.result(20).status in (200, 502)
    with service("second") as ask:
        (row,) = ask("GET", path).json["deployments"]
        assert row["status"] in ("completed", "failed")


@pytest.fixture
def nginx() -> str:
    return tool("nginx")


@pytest.mark.parametrize("key", [None, "k3y"], ids=["without a key", "with a key"])
def test_readmes_nginx_block_serves_the_page_and_the_api_below_its_prefix(
    nginx: str, page: Browser, serve: Serve, sidecar: Sidecar, tmp_path: Path, key: str | None
) -> None:
    app = serve(api_key=key)
    sidecar.add(THREE)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    location = pasted("nginx").replace("http://127.0.0.1:7878", app.url)
    assert int(re.findall(r"proxy_read_timeout (\d+)h;", location)[0]) >= 24
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in kinds)
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/nginx.log; events {{}} http {{"
        f"access_log off; {paths} server {{ listen 127.0.0.1:{port};\n{location} }} }}"
    )
    words = [nginx, "-c", tmp_path / "nginx.conf", "-e", tmp_path / "nginx.log"]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        url, env = f"http://127.0.0.1:{port}/gligabao", {"GLIGABAO_API_KEY": key or ""}
        home = request(url, "GET", "/gligabao/")
        assert (home.status, home.headers["Location"]) == (302, "admin")
        headers = {"Authorization": f"Bearer {key}"}
        body = {"job_id": "job-1", "files": listed(THREE)}
        assert request(url, "POST", f"/gligabao{API}/models", body, headers).status == 201
        done = run("deploy", "job-1", "ok", "--url", url, cwd=tmp_path, env=env)
        assert json.loads(done.stdout)["ref"] == "ok-1"
        page.expected = " 401 "
        page.go(f"{url}/#model=1")
        if key:
            page.write("API key", key)
            page.keys("Enter")
        page.see("ok-1", part=page.find("region", "Deployments"))
        page.click("button", "Deploy")
        page.see("completed", "ok-2", part=page.press("ok"))
        running = f"/gligabao{API}/models/1/deployments"
        with socket.create_connection(("127.0.0.1", port)) as client:
            text = json.dumps({"deployer": "patient"})
            head = f"POST {running} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {key}\r\n"
            client.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
            until(lambda: "running" in request(url, "GET", running, None, headers).body.decode())
        left = b"the client disconnected"
        until(lambda: left in request(url, "GET", running, None, headers).body)
    finally:
        page.requests()
        page.go(f"{app.url}/admin")  # else the page would miss its server
        process.terminate()
        process.wait(10)


def test_readmes_container_runs_a_command_that_exists() -> None:
    lines = dict(line.split(" ", 1) for line in pasted("dockerfile").splitlines())
    python, script, *words = json.loads(lines["CMD"])
    assert (python, script) == ("python", "/app/deploy.py")
    assert gligabao._parser().parse_args(words).host == "0.0.0.0"
    assert {script.rpartition("/")[2], MODULE.name} <= {*lines["COPY"].split()}


def test_readmes_backup_is_whole_while_the_database_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sidecar: Sidecar, serve: Serve
) -> None:
    monkeypatch.chdir(tmp_path)
    app = serve(database="build/gligabao.db")
    sidecar.add({"a": b"1"})
    model = app.record({"a": b"1"})
    with app.start_deploy(model, "patient"):
        until(lambda: app.newest(model))
        exec(block("database.backup(copy)"), {})
    with contextlib.closing(gligabao.open_store("backup.db")) as store:
        (row,) = store.list_trained_model_deployments(model)
    assert row["status"] == "running"


def test_readmes_counters_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[object, ...]] = []

    class Metric:
        """Stands for those of prometheus_client."""

        def __init__(self, name: str, text: str, labels: list[str]) -> None:
            self.name = name

        def labels(self, *values: str) -> Metric:
            seen.append((self.name, *values))
            return self

        def inc(self) -> None:
            seen.append(("inc",))

        def observe(self, seconds: float) -> None:
            assert 0 <= seconds < 60

    module = argparse.Namespace(Counter=Metric, Histogram=Metric)
    monkeypatch.setitem(sys.modules, "prometheus_client", module)  # type: ignore[arg-type]
    assert deployed(tmp_path, broken, system_event=recipe("prometheus_client.Counter", "count"))
    assert seen == [
        ("gligabao_deployments", "it", "failed"),
        ("inc",),
        ("gligabao_deployment_seconds", "it"),
    ]


def test_readmes_shell_lines_are_shell() -> None:
    for lines in re.findall(r"```sh\n(.*?)```", README, re.DOTALL):
        assert subprocess.run(["sh", "-n"], input=lines.encode()).returncode == 0


def test_readmes_promises_are_kept_by_tests_that_exist() -> None:
    named = re.findall(r"`(test_\w+)`", README)
    assert len(named) > 10
    assert [name for name in named if name not in globals()] == []


# ---- the benchmark -------------------------------------------------------------------------------
# `python test_gligabao.py bench [ROW ...]`: gligabao and its rivals in turn, round after round, each in
# processes of its own, on loopback and with warm caches: what is compared is the work, not the disk.

MIB = 1 << 20
ONE = {"model.safetensors": 1024 * MIB}
SHARDS = {f"model-{n:05}-of-00016.safetensors": 64 * MIB for n in range(1, 17)}
SMALL = {"tokenizer.json": 2 * MIB} | {f"{n}.json": n * 1024 for n in range(1, 6)}
ADAPTER = {"adapter_model.safetensors": 160 * MIB} | SMALL
DEPLOYMENTS = f"{API}/models/1/deployments"
DEPLOY = {"deployer": "nothing"}
Load = tuple[float, float, float]  # answers a second; median and 99th of the latencies in ms
Ways = dict[str, Callable[[], float]]  # each does the same in another way, and returns the seconds
# A fetch as any program makes it; it waits for a line, so that the start of Python is not measured.
FETCH = """
import json, pathlib, sys, gligabao
url, dir, files = json.loads(sys.argv[1])
files = tuple(gligabao.TrainedModelFile(**file) for file in files)
model = gligabao.TrainedModel(1, "bench", "bench", files=files)
fetcher = gligabao.SidecarClient(url)
print("ready", flush=True)
sys.stdin.readline()
gligabao.fetch_model_files(gligabao.Context(), fetcher, model, pathlib.Path(dir))
print("done", flush=True)
"""
SERVE = "import gligabao; gligabao.main(trained_model_deployers={'nothing': lambda ctx, req: None})"
NGINX = """
daemon off; master_process off; pid nginx.pid; error_log stderr; events { }
http {
  access_log off; sendfile on; client_body_temp_path t1; proxy_temp_path t2; fastcgi_temp_path t3;
  uwsgi_temp_path t4; scgi_temp_path t5;
  server {
    listen 127.0.0.1:%d; root %s; location = /health { return 200; }
    location = /models/file { try_files /$arg_model_path/$arg_file =404; }
  }
}
"""
PLANT = """
WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < ?)
INSERT INTO gb_trained_model_deployments (trained_model_id, deployer, options, status, dir, ref, details,
    duration_ms, created_at, completed_at)
SELECT ?, 'cluster', '{"replicas":2,"region":"eu-west-1"}', 'completed', '/srv/models/job-1', 'deploy-' || n,
    '{"url":"https://models.example/' || n || '","revision":' || n || '}', 812,
    '2026-01-02T03:04:05.678901Z', '2026-01-02T03:04:06.490123Z' FROM numbers
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def asking(path: str, body: object = None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    method, host = "GET" if body is None else "POST", "Host: localhost"
    return (
        f"{method} {path} HTTP/1.1\r\n{host}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    )


def exchanges(port: int, request: bytes) -> Iterator[float]:
    """Send a request again and again over one connection; yield the seconds that each answer took."""
    address = "127.0.0.1", port
    with socket.create_connection(address, 120) as link, link.makefile("rb") as reader:
        while True:
            begun, length = time.perf_counter(), 0
            link.sendall(request)
            status = reader.readline()
            while (line := reader.readline()).strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line[15:])
            body = reader.read(length)
            if b" 20" not in status:
                raise ConnectionError(f"the answer was {status[:80]!r} {body[:200]!r}")
            yield time.perf_counter() - begun


def load(port: int, request: bytes, clients: int, seconds: float) -> Load:
    """Ask from so many threads, each with a connection that it keeps."""
    end = time.perf_counter() + seconds

    def ask(_: object) -> list[float]:
        answers = exchanges(port, request)
        return list(itertools.takewhile(lambda _: time.perf_counter() < end, answers))

    with ThreadPoolExecutor(clients) as pool:
        taken = sorted(1000 * each for client in pool.map(ask, range(clients)) for each in client)
    return len(taken) / seconds, statistics.median(taken), taken[len(taken) * 99 // 100]


def load_by_wrk(port: int, clients: int, seconds: int) -> Load:
    """Do the same with wrk, which leaves more of the processor to the server."""
    command = ["wrk", "-t1", f"-c{clients}", f"-d{seconds}", "--latency"]
    command.append(f"http://127.0.0.1:{port}{DEPLOYMENTS}")
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    latency = re.findall(r"(?:50|99)% +([\d.]+)(us|ms|s)\n", text)
    if len(latency) != 2 or "Non-2xx" in text or "Socket errors" in text:
        raise ConnectionError(f"wrk says {text}")
    median, worst = (
        float(number) * {"us": 0.001, "ms": 1, "s": 1000}[unit] for number, unit in latency
    )
    return float(text.partition("Requests/sec:")[2].split()[0]), median, worst


def resident(pid: int, field: str = "VmRSS") -> float:
    """Return the MiB of memory that a process holds, or the most that it held (VmHWM, on Linux only)."""
    with contextlib.suppress(FileNotFoundError):
        text = Path(f"/proc/{pid}/status").read_text()
        return int(text.partition(f"{field}:")[2].split()[0]) / 1024
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(pid)])) / 1024


class Bench:
    """One run: where its files lie, what serves them, and what was found."""

    def __init__(self, home: Path, records: Path, quick: bool) -> None:
        self.home, self.records, self.quick = home, records, quick
        self.fetched = home / "fetched" / "bench"
        self.sidecar, self.row = "", "start"
        self.lines: list[tuple[str, ...]] = []
        self.held = contextlib.ExitStack()  # ends what the row started
        self.begun = time.monotonic()

    def say(self, text: str) -> None:
        """Show what is going on, in a line that is overwritten on a terminal."""
        start, end = ("\r", "\x1b[K") if sys.stderr.isatty() else ("", "\n")
        line = f"{start}{time.monotonic() - self.begun:4.0f} s  {self.row}: {text}{end}"
        print(line, end="", file=sys.stderr, flush=True)

    def report(self, what: str, values: Sequence[float], unit: str, ratio: float = 1) -> None:
        """Add a line to the table: the median of the values, and their range."""
        median, least, most = (
            f"{value:,.{0 if value >= 100 else 1}f}"
            for value in (statistics.median(values), min(values), max(values))
        )
        spread = f"{least} to {most} ({len(values)})" if len(values) > 1 else ""
        shown = "" if ratio == 1 else f"{ratio:.2f}"
        self.lines.append((self.row, what, f"{median} {unit}", spread, shown))

    def report_loads(self, what: str, loads: Sequence[Load]) -> None:
        rates, medians, worst = zip(*loads, strict=True)
        self.report(what, rates, "/s")
        self.report("  latency, median", medians, "ms")
        self.report("  latency, 99th", worst, "ms")

    def compare(self, ways: Ways, size: int = 0, rounds: int = 5, clean: bool = False) -> None:
        """Take each way in turn, round after round; report MiB/s of `size` bytes, or milliseconds."""
        taken: dict[str, list[float]] = {name: [] for name in ways}
        rounds = 2 if self.quick else rounds
        for n, (name, way) in itertools.product(range(1, rounds + 1), ways.items()):
            if sum(taken[name]) > 8:
                continue  # a slow rival must not take the other rows' time
            self.say(f"round {n} of {rounds}, {name}")
            if clean:
                self.empty()
            taken[name].append(way())
        ours = statistics.median(next(iter(taken.values())))
        for name, seconds in taken.items():
            values = [size / MIB / each if size else each * 1000 for each in seconds]
            self.report(name, values, "MiB/s" if size else "ms", statistics.median(seconds) / ours)

    def child(self, *command: object, **options: Any) -> subprocess.Popen[str]:
        """Start a process that ends with the row."""
        words = [str(word) for word in command]
        log = self.held.enter_context((self.records / "log").open("a"))
        process = subprocess.Popen(words, cwd=HERE, text=True, stderr=log, **options)
        self.held.callback(process.wait)
        self.held.callback(process.kill)
        return process

    def answering(self, port: int, *command: object) -> tuple[subprocess.Popen[str], float]:
        """Start a server; return its process, and the seconds to its first answer."""
        begun = time.perf_counter()
        process = self.child(*command, stdout=subprocess.DEVNULL)
        while process.poll() is None and time.perf_counter() < begun + 20:
            with contextlib.suppress(ConnectionRefusedError):
                next(exchanges(port, asking("/health")))
                return process, time.perf_counter() - begun
            time.sleep(0.001)
        raise ConnectionError(f"no answer: {(self.records / 'log').read_text()[-500:]}")

    def server(self, *counts: int, folder: Path | None = None) -> tuple[int, int]:
        """Start gligabao with models that were deployed so many times; return its port and pid."""
        database, port = self.records / f"{self.row}.db", free_port()
        files = [{"path": path, "size_bytes": size} for path, size in ADAPTER.items()]
        with contextlib.closing(gligabao.open_store(str(database))) as store:
            for count in counts:
                body = {"job_id": f"job-{count}", "files": files}
                gligabao.record_model(gligabao.Context(), store, None, body)
        with contextlib.closing(sqlite3.connect(database)) as connection, connection:
            connection.executemany(PLANT, [(count, id) for id, count in enumerate(counts, 1)])
        command = [sys.executable, "-c", SERVE, "serve", "--training", "--port", port]
        command += ["--database", database, "--sidecar", self.sidecar]
        command += ["--trained-model-deploy-dir", folder or self.fetched.parent]
        return port, self.answering(port, *command)[0].pid

    def model(self, sizes: Mapping[str, int], job: str = "bench") -> list[dict[str, Any]]:
        """Put a model of random bytes where the sidecar serves it; return the list of its files."""
        self.say("making random files")
        files, folder = [], self.home / "trained" / job
        folder.mkdir(parents=True)
        for path, size in sizes.items():
            left = size = size // 16 if self.quick else size
            digest = hashlib.sha256()
            with (folder / path).open("wb") as file:
                while left:
                    data = os.urandom(min(left, 4 * MIB))
                    digest.update(data)
                    left -= file.write(data)
            files.append({"path": path, "size_bytes": size, "sha256": digest.hexdigest()})
        return files

    def empty(self) -> None:
        """Remove what was fetched."""
        shutil.rmtree(self.fetched, ignore_errors=True)
        self.fetched.mkdir(parents=True)

    def fetch(self, files: Sequence[object], url: str = "") -> float:
        """Fetch and verify files with gligabao; return the seconds from the word to go to the end."""
        given = json.dumps([url or self.sidecar, str(self.fetched), files])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with self.child(sys.executable, "-c", FETCH, given, **pipes) as process:
            assert process.stdin and process.stdout
            process.stdout.readline()
            begun = time.perf_counter()
            process.stdin.write("\n")
            process.stdin.flush()
            done, seconds = process.stdout.readline(), time.perf_counter() - begun
        if not done:
            raise RuntimeError(f"the fetch failed: {(self.records / 'log').read_text()[-500:]}")
        return seconds

    def run(self, *commands: Sequence[str]) -> float:
        """Run rivals, one after the other, where the fetched files are; return the seconds."""
        begun = time.perf_counter()
        for command in commands:
            subprocess.run(command, cwd=self.fetched, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begun


def files_row(b: Bench, sizes: Mapping[str, int], *, fetch: bool) -> None:
    files = b.model(sizes)
    b.empty()
    sums = b.home / "sums"
    sums.write_text("".join(f"{file['sha256']}  {file['path']}\n" for file in files))
    hashing = {"sha256sum": ["-c", str(sums)], "openssl": ["dgst", "-sha256", *sizes]}
    found = {name: [name, *words] for name, words in hashing.items() if shutil.which(name)}
    ours = functools.partial(b.fetch, files)
    ways: Ways = {"gligabao": ours}
    if not fetch:
        ours()
        ways |= {name: functools.partial(b.run, command) for name, command in found.items()}
    elif shutil.which("curl"):
        base = f"{b.sidecar}/models/file?model_path=trained/bench&file="
        curl = ["curl", "-sf", *(word for path in sizes for word in ("-o", path, base + path))]
        ways["curl, not verified"] = functools.partial(b.run, curl)
        for name, command in found.items():
            ways[f"curl, then {name}"] = functools.partial(b.run, curl, command)
    b.compare(ways, sum(file["size_bytes"] for file in files), clean=fetch)


def throttled(b: Bench) -> None:
    sidecar, rate, block = Sidecar(), 20 * MIB, MIB // 4
    b.held.callback(sidecar.close)
    content = {f"{n}": os.urandom((2 if b.quick else 20) * MIB) for n in range(8)}
    sidecar.add(content, "bench")

    def slow(connection: socket.socket, data: bytes, start: int) -> None:
        connection.sendall(head(200, f"Content-Length: {len(data)}"))
        begun = time.monotonic()
        for at in range(0, len(data), block):
            time.sleep(max(0, begun + at / rate - time.monotonic()))
            connection.sendall(data[at : at + block])

    sidecar.script = {path: [slow] * 100 for path in content}
    files = listed(content)
    ways: Ways = {
        "gligabao, eight files": lambda: b.fetch(files, sidecar.url),
        "one at a time": lambda: sum(b.fetch([file], sidecar.url) for file in files),
    }
    b.compare(ways, sum(map(len, content.values())), rounds=3, clean=True)


def requests(b: Bench) -> None:
    port, _ = b.server(20)
    seconds = 1 if b.quick else 2
    found: dict[int, list[Load]] = {1: [], 16: [], 64: []}
    for n, clients in itertools.product(range(1, 4), found):
        b.say(f"round {n} of 3, {clients} connections")
        if shutil.which("wrk"):
            found[clients].append(load_by_wrk(port, clients, seconds))
        else:
            found[clients].append(load(port, asking(DEPLOYMENTS), clients, seconds))
    for clients, loads in found.items():
        b.report_loads(f"{clients} connections", loads)


def storm(b: Bench) -> None:
    port, _ = b.server(20)
    rounds, start = 2 if b.quick else 20, threading.Barrier(200)
    slowest, failures = [], 0

    def ask(_: object) -> float:
        start.wait()
        begun = time.perf_counter()
        with contextlib.suppress(OSError):
            next(exchanges(port, asking(DEPLOYMENTS)))
            return 1000 * (time.perf_counter() - begun)
        return 0

    with ThreadPoolExecutor(200) as pool:
        for n in range(1, rounds + 1):
            b.say(f"round {n} of {rounds}")
            taken = list(pool.map(ask, range(200)))
            failures += taken.count(0)
            slowest.append(max(taken))
    b.report("200 at once, the slowest", slowest, "ms")
    b.report("failures", [failures], f"of {200 * rounds}")


def small(b: Bench) -> None:
    port, _ = b.server()
    files = b.model({f"{n}.json": 1024 for n in range(3)})
    next(exchanges(port, asking(f"{API}/models", {"job_id": "bench", "files": files})))
    request = asking(DEPLOYMENTS, DEPLOY)
    next(exchanges(port, request))
    for clients in (1, 16):
        b.say(f"{clients} clients")
        b.report_loads(f"{clients} at once", [load(port, request, clients, 1 if b.quick else 3)])


def million(b: Bench) -> None:
    counts = 10_000 if b.quick else 1_000_000, 1_000
    b.say("planting the deployments")
    port, _ = b.server(*counts)

    def newest(model: int) -> float:
        answers = exchanges(port, asking(f"{API}/models/{model}/deployments"))
        return statistics.median(itertools.islice(answers, 100))

    names = [f"newest 100 of {count:,}" for count in counts]
    b.compare({name: functools.partial(newest, id) for id, name in enumerate(names, 1)})


def start(b: Bench) -> None:
    installed = shutil.copy(HERE / "gligabao.py", b.records / "gligabao.py")
    py_compile.compile(
        str(installed)
    )  # as pip does; what is run as a file is compiled at every start
    code = f"import sys; sys.path.insert(0, {str(b.records)!r}); import gligabao; gligabao.main()"
    python, idle = sys.executable, dict[str, list[float]]()

    def serve(name: str, *words: str) -> float:
        port, database = free_port(), b.records / "db"
        options = "serve", "--training", "--port", port, "--database", database
        process, seconds = b.answering(port, python, *words, *options)
        idle.setdefault(name, []).append(resident(process.pid))
        process.kill()
        process.wait()
        return seconds

    names = {"gligabao, installed": ("-c", code), "python gligabao.py": ("gligabao.py",)}
    ways: Ways = {name: functools.partial(serve, name, *words) for name, words in names.items()}
    b.empty()
    b.compare(ways | {"python -c pass": lambda: b.run([python, "-c", "pass"])}, rounds=10)
    for name, values in idle.items():
        b.report(f"  resident, {name}", values, "MiB")


def memory(b: Bench) -> None:
    size = (256 if b.quick else 4096) * MIB
    roomy = [path for path in (b.home, b.records) if shutil.disk_usage(path).free > size + 64 * MIB]
    if not roomy:
        raise OSError(f"there is no room for {size // MIB} MiB")
    port, pid = b.server(folder=roomy[0] / "fetched")
    small = b.model({"a": 1024})
    b.say("hashing zeros")
    zeros, digest = bytes(MIB), hashlib.sha256()
    for _ in range(size // MIB):
        digest.update(zeros)
    source = b.home / "trained" / "large" / "zeros"
    source.parent.mkdir()
    source.touch()
    os.truncate(source, size)  # takes no space
    large = [{"path": "zeros", "size_bytes": size, "sha256": digest.hexdigest()}]
    for job, files in (("large", large), ("bench", small)):
        next(exchanges(port, asking(f"{API}/models", {"job_id": job, "files": files})))
    b.say(f"fetching {size // MIB} MiB")
    next(exchanges(port, asking(DEPLOYMENTS, DEPLOY)))
    shutil.rmtree(roomy[0] / "fetched")
    b.report(f"after a fetch of {size // MIB} MiB", [resident(pid)], "MiB")
    b.report("  at its peak", [resident(pid, "VmHWM")], "MiB")
    b.say("1,000 deployments")
    deployments = exchanges(port, asking(f"{API}/models/2/deployments", DEPLOY))
    for _ in itertools.islice(deployments, 1000):
        pass
    b.report("after 1,000 deployments", [resident(pid)], "MiB")


ROWS: dict[str, Callable[[Bench], None]] = {
    "fetch-1g": functools.partial(files_row, sizes=ONE, fetch=True),
    "adapter": functools.partial(files_row, sizes=ADAPTER, fetch=True),
    "shards": functools.partial(files_row, sizes=SHARDS, fetch=True),
    "throttled": throttled,
    "verify-1g": functools.partial(files_row, sizes=ONE, fetch=False),
    "verify-shards": functools.partial(files_row, sizes=SHARDS, fetch=False),
    **{row.__name__: row for row in (requests, storm, small, million, start, memory)},
}


def file_server(b: Bench) -> str:
    """Start what serves the files; say what it is."""
    port, config = free_port(), b.records / "nginx.conf"
    b.sidecar = f"http://127.0.0.1:{port}"
    if shutil.which("nginx"):
        config.write_text(NGINX % (port, b.home))
        b.answering(port, "nginx", "-p", b.records, "-c", config)
        return "nginx, one process"
    b.answering(port, sys.executable, "gligabao.py", "sidecar", b.home, "--port", port)
    return "gligabao's own sidecar, which leaves less of the processor than nginx"


def machine() -> str:
    """Say what the figures depend on."""
    processor = platform.processor()
    with contextlib.suppress(OSError, IndexError):
        processor = re.findall("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())[0]
    cores = f"{os.cpu_count()} cores (load {os.getloadavg()[0]:.1f} at the start)"
    return f"{processor}, {cores}, Python {platform.python_version()}, {platform.platform()}."


def bench(argv: list[str]) -> int:
    shm = Path("/dev/shm")
    home = shm if shm.is_dir() and shutil.disk_usage(shm).free > 3 * 1024 * MIB else None
    parser = argparse.ArgumentParser("test_gligabao.py bench", description="Measure gligabao.")
    parser.add_argument("rows", metavar="ROW", nargs="*", help="what to measure (every row)")
    parser.add_argument("--list", action="store_true", help="name the rows, and end")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: to try it")
    parser.add_argument("--dir", default=home, help="where files lie (%(default)s)")
    options = parser.parse_args(argv)
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"there is no row {', '.join(sorted(unknown))}, only {', '.join(ROWS)}")
    if options.list:
        print(*ROWS, sep="\n")
        return 0
    rivals = "curl", "sha256sum", "openssl", "wrk", "nginx"
    os.environ["PATH"] = os.environ.get("PATH", os.defpath) + ":/usr/sbin"  # nginx, on Debian
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end what was started
    facts, failed = [machine()], False
    with (
        tempfile.TemporaryDirectory(prefix="gligabao-bench-", dir=options.dir) as files,
        tempfile.TemporaryDirectory(prefix="gligabao-bench-") as records,
        contextlib.ExitStack() as held,
    ):
        b = Bench(Path(files), Path(records), options.quick)
        b.held = held
        facts.append(f"Files lie in {files}, served by {file_server(b)}; the records in {records}.")
        client = "wrk" if shutil.which("wrk") else "Python, which takes more of the processor"
        facts.append(f"Lists are asked for by {client}; a fetch begins when Python has started.")
        if missing := [program for program in rivals if not shutil.which(program)]:
            facts.append(f"Not found: {', '.join(missing)}.")
        for b.row in options.rows or ROWS:
            with contextlib.ExitStack() as b.held:
                try:
                    ROWS[b.row](b)
                except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                    b.lines.append((b.row, f"failed: {error}", "", "", ""))
                    failed = True
            for folder in (b.home / "trained", b.home / "fetched", b.records / "fetched"):
                shutil.rmtree(folder, ignore_errors=True)
        b.say("the end")
    print(*facts, sep="\n", end="\n\n")
    table = [("row", "what", "median", "range (rounds)", "x"), *b.lines]
    for above, (row, what, median, spread, ratio) in zip([("",), *table], table, strict=False):
        shown = "" if row == above[0] else row
        print(f"{shown:14}{what:32}{median:>14}  {spread:>22}  {ratio:>6}".rstrip())
    print("\nx: how many times as fast the first line of the row is, by the medians.")
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:2] != ["bench"]:
        sys.exit("python test_gligabao.py bench measures; python -m pytest tests")
    sys.exit(bench(sys.argv[2:]))
