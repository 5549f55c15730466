"""gligabao hands a trained model to your own code.

It fetches the model's files from where they were trained (a sidecar in front of the storage),
verifies every byte, calls a *deployer*, a function of yours, with the directory that holds them, and
keeps a record of each deployment, failures included, in SQLite or PostgreSQL.

    import gligabao

    def bucket(ctx, req):
        "Upload the model's files to the releases bucket."
        for file in req.model.files:
            upload(req.dir / file.path, f"deploy-{req.deploy_id}/{file.path}")
        return gligabao.DeployTrainedModelResult(ref=f"deploy-{req.deploy_id}")

    gligabao.serve(training=True, sidecar="http://trainer:7879",
                   trained_model_deployers={"bucket": bucket})

A deployment is one request, `POST /v1/gb/training/models/{id}/deployments`, and eight steps:

    1. look up the trained model             HTTP room, 404
    2. check the deployer and the options    deploy_model, 400
    3. record the deployment as running      deploy_model -> store
    4. fetch and verify the files            fetch_model_files -> the fetcher
    5. call the deployer                     deploy_model -> your code
    6. record how it ended                   deploy_model -> store
    7. emit the system event                 deploy_model -> your hook
    8. answer with the stored deployment     HTTP room, 200 or 502

The file reads bottom-up: a definition uses only what stands above it. Its rooms, each under a
banner of its own, are: limits; errors and types; context; wire; deployers; store; files; sidecar;
fetch; deployment; page; HTTP; server; command line.

Needs Python 3.11 or later, on Linux or macOS, and nothing but the standard library (psycopg 3 when
the database is PostgreSQL). MIT licence; a vendored copy is this one file, unchanged. Home:
https://github.com/deepblue-phoenix/gligabao
"""

from __future__ import annotations

import argparse
import base64
import collections
import contextlib
import copy
import dataclasses
import datetime
import errno
import fcntl
import functools
import hashlib
import hmac
import http
import http.client
import http.server
import io
import ipaddress
import itertools
import json
import logging
import math
import os
import queue
import re
import select
import shutil
import signal
import socket
import sqlite3
import stat
import sys
import tempfile
import threading
import time
import traceback
import unicodedata
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NoReturn, Protocol, Self, TypeVar

__version__ = "0.1.0"
__all__ = [
    "Cancelled",
    "Context",
    "DeployRequest",
    "DeployTrainedModelFunc",
    "DeployTrainedModelRequest",
    "DeployTrainedModelResult",
    "ModelFileFetcher",
    "Progress",
    "Server",
    "SidecarClient",
    "SystemEvent",
    "TrainedModel",
    "TrainedModelDeployer",
    "TrainedModelFile",
    "TrainingError",
    "deploy_model",
    "fetch_model_files",
    "main",
    "model_dir",
    "open_store",
    "resolve_deployers",
    "serve",
]

# ---- limits --------------------------------------------------------------------------------------
# Numbers that users meet and tests shorten; each is read at the moment it is used. A number that only
# one rule needs stands beside that rule.

CONNECT_TIMEOUT_S = 10  # a sidecar that is up takes a connection in milliseconds
STALL_TIMEOUT_S = 60  # storage behind a sidecar may take its time to wake up, not longer
FETCH_TIMEOUT_S = 30 * 60  # the whole fetch of one model, once it holds the directory
IDLE_TIMEOUT_S = 30  # for a request to be whole, for the next one, for an answer to be read
STOP_GRACE_S = 10  # what a stopping server leaves its running deployments
RETRY_PAUSES_S = (0.2, 0.4, 0.8, 1.6)  # between attempts that get no further: five in all
BUSY_TIMEOUT_S = 10  # waiting for a database that somebody else has locked
FINISH_TIMEOUT_S = 30  # trying to record how a deployment ended; any answer of PostgreSQL
LOOK_INTERVAL_S = 0.2  # how often a server looks for clients that left, and for deadlines
BLOCK_BYTES = 256 * 1024  # one read of a file or the network: small enough for a core's cache
SMALL_BYTES = (
    1024 * 1024
)  # files that are smaller in all are read in one thread: more would not pay

SERVER_STOPPING = "the server is stopping"
CLIENT_LEFT = "the client disconnected"

log = logging.getLogger("gligabao")
log.addHandler(logging.NullHandler())  # silent until the program configures logging

# Control characters, line ends, marks that turn the direction of writing, lone surrogates.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def _escape(text: str) -> str:
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _escape_controls(record: logging.LogRecord) -> bool:
    """Keep each record of the log on one line, and control characters out of a terminal."""
    record.msg = _escape(record.getMessage())
    record.args = ()
    return True


log.addFilter(_escape_controls)

# ---- errors and types ----------------------------------------------------------------------------
# Knows the nouns, their JSON and what can go wrong, and nobody who uses them. May use: limits.

Json = dict[str, Any]
T = TypeVar("T")


class Cancelled(Exception):
    """Raised by work when its context was cancelled; the text is the reason."""


class TrainingError(Exception):
    """A deployment, or a step of one, that cannot go on.

    `kind` says whose fault it is: `invalid` the caller's (400), `upstream` the sidecar's, the files'
    or the deployer's (502), `internal` the records' (500), `unavailable`: no sidecar (503).
    `deployment` is the stored deployment when the failure was recorded, else None.
    """

    def __init__(self, kind: str, text: str, deployment: Json | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.deployment = deployment


def _invalid(text: str) -> TrainingError:
    return TrainingError("invalid", text)


def _upstream(text: str) -> TrainingError:
    return TrainingError("upstream", text)


@dataclasses.dataclass(frozen=True)
class TrainedModelFile:
    """One file of a trained model, at `path` below its directory; `sha256` is "" where unknown."""

    path: str
    size_bytes: int
    sha256: str = ""


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A model that a training job left at `path` on the sidecar's storage."""

    id: int
    name: str
    job_id: str
    base_model: str = ""
    model_size: str = ""
    dataset: str = ""
    num_examples: int = 0
    num_train_steps: int = 0
    final_loss: float | None = None
    params: Json = dataclasses.field(default_factory=dict)
    path: str = ""
    files: tuple[TrainedModelFile, ...] = ()
    created_at: str = ""


@dataclasses.dataclass(frozen=True)
class DeployTrainedModelRequest:
    """What a deployer receives.

    `dir` is the absolute directory that holds the model's files, complete and verified, at the
    paths of `model.files`. It is shared with later deployments: read only. `deploy_id` is unique to
    this call. `options` are the request's, None if it gave none; they and `model` are copies.
    """

    deploy_id: int
    model: TrainedModel
    dir: Path
    options: Json | None


@dataclasses.dataclass(frozen=True)
class DeployTrainedModelResult:
    """What a deployer returns: what it made, in its own terms, and details as a JSON object."""

    ref: str = ""
    details: Json | None = None


@dataclasses.dataclass(frozen=True)
class DeployRequest:
    """What a caller of `deploy_model` asks for: a deployer's name and the options for it."""

    deployer: str
    options: Json | None = None


@dataclasses.dataclass(frozen=True)
class SystemEvent:
    """Something that happened: `training.model_deploy.completed` or `.failed`, and its fields."""

    type: str
    fields: Json


SystemEventHook = Callable[[SystemEvent], object]


def _encode_json(value: object) -> str:
    """Return `value` as compact JSON that every strict parser reads back.

    Raises ValueError for what JSON has no form for: NaN, cycles, keys that are no strings, other
    types, lone surrogates, more than 300 levels.
    """
    too_deep = "nested deeper than 300 levels"
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except TypeError as error:
        raise ValueError(str(error)) from None
    except UnicodeEncodeError:
        raise ValueError("a string holds a lone surrogate") from None
    except RecursionError:
        raise ValueError(too_deep) from None

    def check(node: object, levels: int) -> None:
        if isinstance(node, dict | list | tuple):
            if not levels:
                raise ValueError(too_deep)
            if isinstance(node, dict) and not all(isinstance(key, str) for key in node):
                raise ValueError("a key is not a string")
            for child in node.values() if isinstance(node, dict) else node:
                check(child, levels - 1)

    check(value, 300)
    return text


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits:.40} is too large a number")
    return number


_JSON = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def _decode_json(data: bytes) -> Any:
    """Return the value of strict JSON in UTF-8; raises ValueError that says what is wrong."""
    try:
        value = _JSON.decode(data.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ValueError("nested deeper than 300 levels") from None
    _encode_json(value)
    return value


def _cut(text: str, length: int = 10_000) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _told(tell: Callable[[], Any]) -> str:
    """Return the text that foreign code tells, as a plain str; "" where it tells none, or raises."""
    with contextlib.suppress(BaseException):  # a __str__ may do anything, even raise SystemExit
        return str.__str__(tell())
    return ""


def _text_of(error: BaseException, *attributes: str) -> str:
    """Return the first of these attributes that is a text, or the exception's text, or its class.

    The text of a LookupError is the key alone, so its class stands before it. Cut to 10,000
    characters; whatever the exception raises while it is asked is caught.
    """
    kind = type(error)  # isinstance would ask the exception

    def text() -> str:
        words = str(error)
        return f"{kind.__name__}: {words}" if words and issubclass(kind, LookupError) else words

    tells: list[Callable[[], Any]] = [functools.partial(getattr, error, a) for a in attributes]
    tells += [text, lambda: kind.__name__]
    return _cut(next(filter(None, map(_told, tells)), "an exception without words"))


def _traceback_of(error: BaseException) -> list[str]:
    """Return an exception's traceback, its causes and notes as lines, at most 60 of them.

    Our own frames, above the first one of foreign code, are left out, and so is the middle of a long
    one. Whatever the exception raises while it is formatted is caught: then its text is the line.
    """
    ours = _traceback_of.__code__.co_filename
    try:
        whole = traceback.TracebackException.from_exception(error)
        link: traceback.TracebackException | None = whole
        while link:
            while link.stack and link.stack[0].filename == ours:
                del link.stack[0]
            link = link.__cause__ or link.__context__
        lines = "".join(whole.format()).splitlines()
    except BaseException:
        lines = [_text_of(error)]
    if len(lines) > 60:
        lines[30:-29] = [f"… {len(lines) - 59} lines are left out …"]
    return [_cut(line, 1000) for line in lines]


def _file_from(entry: object) -> TrainedModelFile:
    """Make a file of an entry in a model's list, unchecked: `_check_file` finds what is wrong."""
    fields: Json = {"path": "", "size_bytes": None}
    fields |= entry if isinstance(entry, dict) else {"path": entry}
    digest = fields.get("sha256")
    return TrainedModelFile(fields["path"], fields["size_bytes"], "" if digest is None else digest)


# ---- context -------------------------------------------------------------------------------------
# Knows how work is cancelled and how it reports, and nothing of the work. May use: types.


class Context:
    """Tells a piece of work, such as a deployer's, that nobody waits for its result any more.

    A deployer looks at `cancelled`, waits with `wait` instead of sleeping, and calls
    `raise_if_cancelled` between its steps. `reason` says why. In return it says with `report` how
    far it is; `reported` is the last report, (text, fraction), or None. Safe for use from any thread.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.reported: tuple[str, float | None] | None = None
        self._outer: Context | None = None
        self.abandoned = False  # set by a server that stops: the work is recorded as failed now
        self._event = threading.Event()
        self._acts: list[Callable[[], object]] = []
        self._guard = threading.Lock()  # guards reason and _acts; held for a few instructions

    @property
    def cancelled(self) -> bool:
        """Whether the work should end."""
        return self._event.is_set()

    def cancel(self, reason: str) -> None:
        """Ask the work to end; the first reason stays."""
        with self._guard:
            if self._event.is_set():
                return
            self.reason = str(reason) or "cancelled"
            self._event.set()
            acts = list(self._acts)
        for act in acts:
            with contextlib.suppress(BaseException):  # a deployer may have overwritten its context
                act()

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep up to `timeout` seconds (None: for ever); return True as soon as it is cancelled."""
        return self._event.wait(timeout)

    def raise_if_cancelled(self) -> None:
        """Raise Cancelled with the reason, if there is one."""
        if self.cancelled:
            raise Cancelled(self.reason)

    def report(self, text: str, fraction: float | None = None) -> None:
        """Say what the work is doing, and how much of it is done, from 0 to 1; None: nobody knows.

        Shown while the deployment runs, stored nowhere. Never raises, never waits: the text is cut to
        200 characters, and a fraction that is no number from 0 to 1 counts as None.
        """
        known = None
        with contextlib.suppress(Exception):  # objects that are no numbers may raise anything here
            if fraction is not None and type(fraction) is not bool:
                known = float(fraction) if 0 <= fraction <= 1 else None
        self.reported = _cut(_told(lambda: str(text)), 200), known
        if self._outer:
            self._outer.reported = self.reported

    @contextlib.contextmanager
    def _on_cancel(self, act: Callable[[], object]) -> Iterator[None]:
        """Call `act` once the context is cancelled, if that is before this block ends.

        `act` must not raise and must not wait.
        """
        with self._guard:
            late = self._event.is_set()
            self._acts.append(act)
        try:
            if late:
                act()
            yield
        finally:
            with self._guard:
                self._acts.remove(act)

    @contextlib.contextmanager
    def _inner(self, limit_s: float | None = None) -> Iterator[Context]:
        """Yield a context that is cancelled when this one is, and after `limit_s` seconds.

        Cancelling it leaves this one alone; what is reported to it is reported to this one too.
        """
        inner = Context()
        inner._outer = self
        with contextlib.ExitStack() as held:
            if limit_s is not None:
                text = f"it took longer than {limit_s} s"
                timer = threading.Timer(limit_s, inner.cancel, [text])
                timer.daemon = True
                timer.start()
                held.callback(timer.cancel)
            held.enter_context(self._on_cancel(lambda: Context.cancel(inner, self.reason)))
            yield inner


# ---- wire ----------------------------------------------------------------------------------------
# Knows HTTP/1.1: framing, deadlines, who may come in, errors as JSON. Each server gives it a table of
# routes; of these it knows the page's alone, to which other sites may link. May use: context, types.

SEND_BYTES = 64 * 1024  # a client must take at least so much of its answer in IDLE_TIMEOUT_S
MAX_HEAD_BYTES = 64 * 1024  # no client needs more for a request's line and headers
MAX_BODY_BYTES = 1024 * 1024  # options are 64 KiB at most; a model with thousands of files fits too
_STATUS_OF_KIND = {"invalid": 400, "upstream": 502, "internal": 500, "unavailable": 503}
# Without POLLRDHUP (macOS) a client that sent its next request too is not seen to leave after that.
_LEAVING = getattr(select, "POLLRDHUP", select.POLLIN)


class _Refusal(Exception):
    """A request that is answered with an error; `close` ends the connection."""

    def __init__(
        self, status: int, text: str, headers: Mapping[str, str] = {}, *, close: bool = False
    ) -> None:
        super().__init__(text)
        self.status, self.headers, self.close = status, headers, close


def _malformed(text: str) -> _Refusal:
    return _Refusal(400, text, close=True)


class _Gone(Exception):
    """The client left in the middle of its request: there is nobody to answer."""


@dataclasses.dataclass(frozen=True)
class _Answer:
    """What is sent to the client; `part` is (file, offset, count) where the body is a file's bytes."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    part: tuple[BinaryIO, int, int] | None = None


_ENCODER = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False, default=str
)


def _json_text(value: object) -> str:
    # A row that another program wrote may hold what JSON cannot: bytes become text, infinity null.
    try:
        return _ENCODER.encode(value)
    except ValueError:
        plain = json.loads(json.dumps(value, default=str), parse_constant=lambda word: None)
        return _ENCODER.encode(plain)


def _text_answer(status: int, json_text: str, headers: Mapping[str, str] = {}) -> _Answer:
    body = json_text.encode(errors="replace")  # a lone surrogate becomes a question mark
    return _Answer(status, body, {"Content-Type": "application/json", **headers})


def _json_answer(status: int, value: object, headers: Mapping[str, str] = {}) -> _Answer:
    return _text_answer(status, _json_text(value), headers)


def _error_answer(error: Exception) -> _Answer:
    """Return the answer to what a handler raised; no other place maps errors to statuses."""
    match error:
        case _Refusal():
            return _json_answer(error.status, {"error": str(error)}, error.headers)
        case TrainingError():
            stored = {"deployment": error.deployment} if error.deployment else {}
            return _json_answer(_STATUS_OF_KIND[error.kind], {"error": str(error), **stored})
        case Cancelled():
            return _json_answer(503, {"error": str(error)})
    log.error("internal error: %r", error)
    log.debug("where it came from", exc_info=error)
    return _json_answer(500, {"error": f"internal error, {type(error).__name__}: see the log"})


def _secret(value: str | None, what: str) -> str | None:
    """Return a key or token, None for an empty one; raises ValueError for what no header carries."""
    if value and not (isinstance(value, str) and re.fullmatch("[ -~]*[!-~]", value)):
        if isinstance(value, str) and value != value.rstrip():
            raise ValueError(f"{what} ends in a blank or a line break, which must go")
        raise ValueError(f"{what} must be printable ASCII")
    return value or None


@functools.lru_cache(64)
def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hang_up(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """End a connection that another thread is reading or writing; that thread then closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(how)


def _has_left(connection: socket.socket) -> bool:
    """Say whether the client closed the connection, or its sending side; never waits."""
    try:
        poller = select.poll()
        poller.register(connection, _LEAVING)
        if not poller.poll(0):
            return False
        return _LEAVING != select.POLLIN or not connection.recv(1, socket.MSG_PEEK)
    except (ConnectionError, ValueError):  # it was reset, or is closed here
        return True
    except OSError:  # the look itself failed; there is another one soon
        return False


def _health(request: _Handler) -> _Answer:
    return _json_answer(200, {"status": "ok", "version": __version__})


Route = Callable[..., _Answer]
Routes = Sequence[tuple[str, Mapping[str, Route]]]


# The library's parser takes more than these: folded lines, a lone CR, blanks around a name, HTTP/0.9.
# A proxy in front could read another request in such bytes than we do.
_REQUEST_LINE = re.compile(rb"[!-~]+ [!-~]+ HTTP/1\.[0-9]+\r?\n")
_HEADER_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*)?\r?\n")


class _Headers(http.client.HTTPMessage):
    """The headers of a request, of which the parser would otherwise read a multipart body as a part."""

    def get_content_type(self) -> str:
        """Tell the parser that every body is plain text."""
        return "text/plain"


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection: reads requests, checks their framing and who asks, answers by the route."""

    protocol_version = "HTTP/1.1"
    MessageClass = _Headers
    disable_nagle_algorithm = (
        True  # with it a file would wait until the client has acknowledged its header
    )
    server: _HTTPServer
    rfile: io.BufferedReader

    def handle_one_request(self) -> None:
        """Read one request and answer it; it must be whole in time after its first byte."""
        self.close_connection = True
        try:
            self.server.set_deadline(self.connection, IDLE_TIMEOUT_S)
            if not self.rfile.peek(1):
                return
            self.server.set_deadline(self.connection, IDLE_TIMEOUT_S)
            self._answer_request()
        except (OSError, _Gone) as error:
            log.debug("%s left: %s", self.client_address[0], error)
            self.close_connection = True

    def handle_expect_100(self) -> bool:
        """Leave the interim answer to `read_json`, when it is known that the body is wanted."""
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Raise what the parser refuses, always as 400."""
        raise _malformed(message or http.HTTPStatus(code).phrase)

    def _answer_request(self) -> None:
        begun = time.monotonic()
        self.command = path = self.query = ""
        self.body_left = 0
        try:
            self._read_head()
            path, _, self.query = self.requestline.split(" ")[1].partition("?")
            self.body_left = self._body_length()
            if not self.body_left:
                self.server.set_deadline(self.connection, math.inf)
            self._check_caller(path)
            answer = self._route(path)
        except _Gone:
            raise
        except Exception as error:  # the border of a request: whatever happened, it is answered
            self.close_connection |= isinstance(error, _Refusal) and error.close
            answer = _error_answer(error)
        unread = bool(self.body_left)
        self.close_connection |= self.server.stopping or (unread and self._expects_100())
        self._send(answer)
        took_ms = (time.monotonic() - begun) * 1000
        log.debug("%s %s %d in %d ms", self.command, path, answer.status, took_ms)
        if self.close_connection:
            self._close_politely()
        elif unread:  # what is left of the body must not be taken for the next request
            self.server.set_deadline(self.connection, IDLE_TIMEOUT_S)
            self.rfile.read(self.body_left)

    def _read_head(self) -> None:
        """Read the request's line and headers, check each, and let the library parse them."""
        lines: list[bytes] = []
        left = MAX_HEAD_BYTES
        while not lines or lines[-1] not in (b"\r\n", b"\n"):
            line = self.rfile.readline(left + 1)
            left -= len(line)
            if left < 0:
                raise _malformed(f"the request's head is longer than {MAX_HEAD_BYTES} bytes")
            if not line.endswith(b"\n"):
                raise _Gone("the request ended early")
            if not lines and line == b"\r\n":
                continue  # some clients send it after a body
            if not lines:
                if not _REQUEST_LINE.fullmatch(line):
                    raise _malformed("the request line must be a method, a target and HTTP/1.1")
                self.command = line.split(b" ")[0].decode()  # a HEAD that is refused has no body
            elif not _HEADER_LINE.fullmatch(line):
                raise _malformed(f"header {len(lines)} of the request is no line like Name: value")
            lines.append(line)
        self.raw_requestline = lines[0]
        body, self.rfile = self.rfile, io.BytesIO(b"".join(lines[1:]))  # type: ignore[assignment]
        try:
            self.parse_request()
        finally:
            self.rfile = body

    def _body_length(self) -> int:
        """Check the framing of the request; return the length of its body."""
        headers = self.headers
        hosts = len(headers.get_all("Host", []))
        if hosts > 1 or (not hosts and self.request_version != "HTTP/1.0"):
            raise _malformed(f"a request needs one Host header, this one has {hosts}")
        lengths = headers.get_all("Content-Length", [])
        if encodings := headers.get_all("Transfer-Encoding", []):
            if lengths or [coding.lower() for coding in encodings] != ["chunked"]:
                raise _malformed("the body's length is unclear: send one Content-Length")
            raise _Refusal(411, "a chunked body is not taken: send a Content-Length", close=True)
        if not lengths:
            return 0
        if len(lengths) > 1 or not re.fullmatch("[0-9]{1,4000}", lengths[0]):
            raise _malformed("Content-Length must be one number in plain digits")
        if (length := int(lengths[0])) > MAX_BODY_BYTES:
            raise _malformed(f"the body is longer than the {MAX_BODY_BYTES} bytes that are taken")
        return length

    def _check_caller(self, path: str) -> None:
        """Refuse who may not come in: any web page can send requests to this machine."""
        if self.server.key:
            given = self.headers.get("Authorization", "").encode("latin-1", "replace")
            wanted = f"Bearer {self.server.key}".encode()
            if path.startswith(self.server.guarded) and not hmac.compare_digest(given, wanted):
                text = "this needs the key, as Authorization: Bearer <key>"
                raise _Refusal(401, text, {"WWW-Authenticate": "Bearer"})
            return
        host = self.headers.get("Host", "")
        name = re.fullmatch(r"(\[::1\]|[^:\[\]]+)(:[0-9]*)?", host)
        if not name or not _is_loopback(name[1].strip("[]")):
            text = "without a key only requests to localhost, 127.0.0.0/8 or [::1] are answered"
            raise _Refusal(403, text)
        if path in ("/", "/admin") and self.command == "GET":
            if self.headers.get("Sec-Fetch-Mode") == "navigate":
                return  # a link on another site may lead here
        origins = {*self.headers.get_all("Origin", [])} - {f"http://{host}"}
        sites = {*self.headers.get_all("Sec-Fetch-Site", [])} - {"same-origin", "none"}
        if origins or sites:
            raise _Refusal(403, "a page of another site sent this request")

    def _route(self, path: str) -> _Answer:
        method = "GET" if self.command == "HEAD" else self.command
        for pattern, methods in self.server.routes:
            if found := pattern.fullmatch(path):
                if method in methods:
                    return methods[method](self, *found.groups())
                allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
                raise _Refusal(405, f"{path[:200]} takes {allowed}", {"Allow": allowed})
        raise _Refusal(404, f"there is nothing at {path[:200]}")

    def _expects_100(self) -> bool:
        expected = self.headers.get("Expect", "").lower()
        return expected == "100-continue" and self.request_version != "HTTP/1.0"

    def read_json(self) -> Any:
        """Read the body, once, and return the value of its JSON; raises _Refusal (400)."""
        try:
            if self.body_left and self._expects_100():
                self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            data = self.rfile.read(self.body_left)
        except OSError as error:
            raise _Gone(str(error)) from None
        if len(data) < self.body_left:
            raise _Gone("the body ended early")
        self.body_left = 0
        self.server.set_deadline(self.connection, math.inf)
        try:
            return _decode_json(data)
        except ValueError as error:
            raise _Refusal(400, f"the body is no valid JSON: {error}") from None

    def parameter(self, name: str) -> str | None:
        """Return the last value of a parameter of the query, None where it is absent."""
        pairs = urllib.parse.parse_qsl(self.query, keep_blank_values=True, errors="replace")
        return dict(pairs).get(name)

    def watched(self) -> contextlib.AbstractContextManager[Context]:
        """Return a block, however long, whose context ends when the client leaves or the server stops."""
        self.server.set_deadline(self.connection, math.inf)
        return self.server.watch(self.connection)

    def _send(self, answer: _Answer) -> None:
        """Write the answer, a small one in one write; the kernel copies the bytes of a file.

        A write that gets nowhere ends at the connection's deadline, as a read does. The socket has no
        time-out of its own, since Python would then poll before each call.
        """
        length = answer.part[2] if answer.part else len(answer.body)
        lines = [
            f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}",
            f"Date: {self.date_time_string()}",
            "X-Content-Type-Options: nosniff",
            "Cache-Control: no-store",
            *(f"{name}: {value}" for name, value in answer.headers.items()),
        ]
        if answer.status != 204:
            lines.append(f"Content-Length: {length}")
        if self.close_connection:
            lines.append("Connection: close")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        data = memoryview(head if self.command == "HEAD" else head + answer.body)
        with answer.part[0] if answer.part else contextlib.nullcontext():
            for at in range(0, len(data), SEND_BYTES):
                self.server.set_deadline(self.connection, IDLE_TIMEOUT_S)
                self.connection.sendall(data[at : at + SEND_BYTES])
            if answer.part and self.command != "HEAD":
                self._send_part(*answer.part)

    def _send_part(self, file: BinaryIO, offset: int, count: int) -> None:
        while count:
            self.server.set_deadline(self.connection, IDLE_TIMEOUT_S)
            to, size = self.connection.fileno(), min(count, SEND_BYTES)
            if not (sent := os.sendfile(to, file.fileno(), offset, size)):
                self.close_connection = True  # the file shrank, so the rest will never come
                return
            offset, count = offset + sent, count - sent

    def _close_politely(self) -> None:
        """Let the client read its answer: to close with bytes of it unread resets the connection."""
        _hang_up(self.connection, socket.SHUT_WR)
        self.server.set_deadline(self.connection, 1)
        left = MAX_BODY_BYTES
        while left > 0 and (data := self.rfile.read1(65536)):
            left -= len(data)


class _HTTPServer(http.server.ThreadingHTTPServer):
    """An HTTP server on one address, with a table of routes and a rule of who may come in.

    With `key`, every path below `guarded` needs it. Without, only this machine is served. Raises
    ValueError for an address that needs a key, OSError for one that cannot be had. The thread that
    accepts connections also looks after them: deadlines, and clients that leave.
    """

    request_queue_size = 1024  # a storm of clients waits in the backlog instead of being refused

    def __init__(self, host: str, port: int, routes: Routes, key: str | None, guarded: str) -> None:
        self.routes = [(re.compile(pattern), methods) for pattern, methods in routes]
        self.key, self.guarded = key, guarded
        self.closing = self.stopping = False  # no connection, and then no request is taken any more
        self._deadlines: dict[socket.socket, float] = {}
        self._watched: dict[socket.socket, Context] = {}
        # Guards the two dicts and stopping; held for a few instructions.
        self._guard = threading.Condition()
        self._looked = 0.0
        kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
        try:
            found = socket.getaddrinfo(host or None, port, type=kind, flags=flags)
            self.address_family, *_, address = found[0]
            if not key and not _is_loopback(str(address[0])):
                raise ValueError(f"{host!r} is no loopback address: to serve others needs a key")
            super().__init__(address[:2], _Handler)  # type: ignore[arg-type]
        except OSError as error:
            raise OSError(error.errno, error.strerror, f"{host}:{port}") from None
        # The URL has the address, since without a key a request to another name is refused.
        bound = str(address[0])
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound, bound)
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{self.server_port}"
        try:
            threading.Thread(target=self._serve, daemon=True).start()
        except RuntimeError:  # no thread can be had
            self.server_close()
            raise

    def _serve(self) -> None:
        """Accept connections until the stop, whatever fails in between, or nobody would be answered."""
        while not self.closing:
            try:
                self.serve_forever(LOOK_INTERVAL_S)
            except BaseException as error:
                log.error("accepting connections failed, and goes on: %r", error)
                time.sleep(LOOK_INTERVAL_S)

    def server_bind(self) -> None:
        """Bind without the reverse look-up of the base class, which may take seconds."""
        super(http.server.HTTPServer, self).server_bind()
        self.server_port = int(self.server_address[1])

    def get_request(self) -> Any:
        """Accept a connection; pause where that fails, as it does while no descriptor is free."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(LOOK_INTERVAL_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take note of a new connection, then serve it in a thread of its own."""
        request.settimeout(None)  # a deployer may have set a default for all sockets
        self.set_deadline(request, IDLE_TIMEOUT_S)
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        """Forget a connection that is over."""
        super().close_request(request)
        with self._guard:
            self._deadlines.pop(request, None)
            self._guard.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say in one line what ended a connection."""
        log.debug("connection from %s ended: %r", client_address[0], sys.exc_info()[1])

    def set_deadline(self, connection: socket.socket, seconds: float) -> None:
        """End the connection unless another deadline is set within this time."""
        with self._guard:
            self._deadlines[connection] = time.monotonic() + seconds

    @contextlib.contextmanager
    def watch(self, connection: socket.socket) -> Iterator[Context]:
        """Yield a context that is cancelled when the client leaves or the server stops."""
        ctx = Context()
        with self._guard:
            self._watched[connection] = ctx
            if self.stopping:
                ctx.cancel(SERVER_STOPPING)
        try:
            yield ctx
        finally:
            with self._guard:
                del self._watched[connection]
                self._guard.notify_all()

    def service_actions(self) -> None:
        """Look after the connections; the accepting thread calls this between clients."""
        now = time.monotonic()
        if now - self._looked < LOOK_INTERVAL_S:
            return
        self._looked = now
        with self._guard:
            late = [waits for waits, deadline in self._deadlines.items() if now > deadline]
            watched = list(self._watched.items())
        for connection in late:
            _hang_up(connection)
        for connection, ctx in watched:
            if _has_left(connection):
                ctx.cancel(CLIENT_LEFT)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take no new request, let the running ones end within STOP_GRACE_S, then give them up."""
        self.closing = True
        self.shutdown()
        _hang_up(self.socket)  # also where a process that a deployer forked has it open
        self.server_close()
        with self._guard:
            self.stopping = True
            for connection in self._deadlines:
                _hang_up(connection, socket.SHUT_RD)  # nothing more is asked; answers still go out
            contexts = list(self._watched.values())
        for ctx in contexts:
            ctx.cancel(SERVER_STOPPING)
        with self._guard:
            self._guard.wait_for(lambda: not self._deadlines, STOP_GRACE_S)
            given_up = {*self._watched}
            for connection in given_up:
                self._watched[connection].abandoned = True
            for connection in self._deadlines.keys() - given_up:
                _hang_up(connection)  # its client does not read the answer
            # Those given up are being recorded, which takes long while the database is in trouble.
            limit_s = 2 * STOP_GRACE_S + BUSY_TIMEOUT_S
            self._guard.wait_for(lambda: given_up.isdisjoint(self._deadlines), limit_s)


# ---- deployers -----------------------------------------------------------------------------------
# Knows the naming rules of deployers, and nothing of what they do. May use: context, types.

DeployTrainedModelFunc = Callable[
    [Context, DeployTrainedModelRequest], DeployTrainedModelResult | None
]


@dataclasses.dataclass(frozen=True)
class TrainedModelDeployer:
    """A deployer: its name in requests and records, the function, and a line for the page."""

    name: str
    deploy: DeployTrainedModelFunc
    description: str = ""


Registry = Iterable[TrainedModelDeployer] | Mapping[str, DeployTrainedModelFunc]


def resolve_deployers(registry: Registry | None) -> list[TrainedModelDeployer]:
    """Return the registered deployers, sorted by name.

    In a mapping of name to function the description is the first line of the function's docstring.
    Raises ValueError("invalid trained model deployer: …") for more than 20, a name that is not 1 to
    64 ASCII letters, digits, `_`, `-` and `.` starting with a letter or digit, a name given twice,
    and a deployer without a function.
    """

    def invalid(text: str) -> ValueError:
        return ValueError(f"invalid trained model deployer: {text}")

    if isinstance(registry, Mapping):
        registry = [
            TrainedModelDeployer(name, deploy, str(deploy.__doc__ or "").strip().partition("\n")[0])
            for name, deploy in registry.items()
        ]
    if not isinstance(registry, Iterable | None):
        raise invalid(f"expected a mapping or a list of them, got {type(registry).__name__}")
    deployers: list[TrainedModelDeployer] = list(registry or ())  # type: ignore[arg-type]
    if len(deployers) > 20:
        raise invalid(f"{len(deployers)} are registered, at most 20 can be")
    names = set()
    for deployer in deployers:
        if not isinstance(deployer, TrainedModelDeployer):
            raise invalid(f"expected a TrainedModelDeployer, got {type(deployer).__name__}")
        form = "[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
        if not isinstance(deployer.name, str) or not re.fullmatch(form, deployer.name):
            rule = "1 to 64 letters, digits, '_', '-' and '.', starting with a letter or digit"
            raise invalid(f"the name {deployer.name!r:.80} is not {rule}")
        if deployer.name in names:
            raise invalid(f"two have the name {deployer.name}")
        if not callable(deployer.deploy):
            kind = type(deployer.deploy).__name__
            raise invalid(f"{deployer.name} has no function to call, but a {kind}")
        names.add(deployer.name)
    return sorted(deployers, key=lambda deployer: deployer.name)


# ---- store ---------------------------------------------------------------------------------------
# Knows SQL, drivers and rows, and not what a record means. May use: types.

_MODEL_COLUMNS = (
    "id, name, job_id, base_model, model_size, dataset, num_examples, num_train_steps, final_loss,"
    " params, path, files, created_at"
)
_DEPLOYMENT_COLUMNS = (
    "id, trained_model_id, deployer, options, status, dir, ref, details, error, duration_ms,"
    " created_at, completed_at"
)
_MODEL_KEYS, _DEPLOYMENT_KEYS = _MODEL_COLUMNS.split(", "), _DEPLOYMENT_COLUMNS.split(", ")
# PostgreSQL stores no NUL, and neither database a lone surrogate.
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def _storable(text: str) -> str:
    return _UNSTORABLE.sub("\ufffd", text)


def _column(value: object) -> object:
    """Return what is stored for a value: the JSON of an object or a list, a text made storable."""
    if isinstance(value, dict | list):
        return _encode_json(value)
    return _storable(value) if isinstance(value, str) else value


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def _rfc3339(time: object) -> object:
    """Return a time as it is shown; PostgreSQL's own text, like 2026-01-02 03:04:05+00, needs it."""
    text = str(time)
    return text[:-3].replace(" ", "T") + "Z" if text.endswith("+00") else time


def _stored(text: object, kind: type[Any]) -> Any:
    """Return the value of a column that holds JSON text of this kind, such as dict.

    What other programs wrote there may be anything else: it is read as an empty one.
    """
    if text == "{}":
        return {}
    try:
        stripped = str.strip(text)  # type: ignore[arg-type]
        value, end = _JSON.raw_decode(stripped)
        if len(stripped) > 600:  # else it cannot be nested deeper than 300 levels
            _encode_json(value)
    except (ValueError, TypeError, RecursionError):
        return kind()
    return value if end == len(stripped) and isinstance(value, kind) else kind()


def _model_from(row: Sequence[Any]) -> TrainedModel:
    fields = dict(zip(_MODEL_KEYS, row, strict=True))
    loss = fields["final_loss"]
    return TrainedModel(
        **fields
        | {
            "final_loss": loss if isinstance(loss, int | float) and math.isfinite(loss) else None,
            "params": _stored(fields["params"], dict),
            "files": tuple(_file_from(entry) for entry in _stored(fields["files"], list)),
            "created_at": _rfc3339(fields["created_at"]),
        }
    )


def _deployment_from(row: Sequence[Any]) -> Json:
    fields = dict(zip(_DEPLOYMENT_KEYS, row, strict=True))
    fields["options"] = _stored(fields["options"], dict)
    fields["details"] = _stored(fields["details"], dict)
    for name in ("created_at", "completed_at"):
        fields[name] = _rfc3339(fields[name])
    return fields


class _Store:
    """The records of trained models and their deployments, the same on both databases.

    Every method is one statement, its own transaction, safe from any thread, and raises
    TrainingError("internal") when the database does not take it. A stored deployment is a dict with
    the columns as keys, in their order; its times are text in RFC 3339, UTC.
    """

    _types: ClassVar[Mapping[str, str]]  # what the kinds of columns are called here
    _errors: tuple[type[Exception], ...]  # what the driver raises

    def _execute(self, sql: str, values: Sequence[object]) -> list[Any]:
        """Run one statement; return the rows that it reads, or that it wrote and RETURNs."""
        raise NotImplementedError

    def _rows(self, sql: str, *values: object) -> list[Any]:
        try:
            return self._execute(sql, [_column(value) for value in values])
        except self._errors as error:
            text = " ".join(str(error).split())
            raise TrainingError("internal", f"the database does not take it: {text}") from error

    def close(self) -> None:
        """Close the database; nothing is used afterwards."""
        raise NotImplementedError

    def _tables(self) -> dict[str, str]:
        """Return the statements that make the tables and the index where they are missing, by name."""
        models = """CREATE TABLE IF NOT EXISTS gb_trained_models (
            id {key}, name TEXT NOT NULL, job_id TEXT NOT NULL UNIQUE, base_model TEXT,
            model_size TEXT, dataset TEXT, num_examples {whole}, num_train_steps {whole},
            final_loss {real}, params TEXT, path TEXT, files TEXT, created_at {time} NOT NULL)"""
        deployments = """CREATE TABLE IF NOT EXISTS gb_trained_model_deployments (
            id {key}, deployer TEXT NOT NULL, options TEXT NOT NULL, status TEXT NOT NULL,
            dir TEXT NOT NULL DEFAULT '', ref TEXT NOT NULL DEFAULT '',
            details TEXT NOT NULL DEFAULT '{{}}', error TEXT NOT NULL DEFAULT '',
            duration_ms {whole} NOT NULL DEFAULT 0, created_at {time} NOT NULL, completed_at {time},
            trained_model_id {whole} NOT NULL
                REFERENCES gb_trained_models (id) ON DELETE CASCADE)"""
        newest = """CREATE INDEX IF NOT EXISTS gb_trained_model_deployments_newest
            ON gb_trained_model_deployments (trained_model_id, id)"""
        statements = {
            "gb_trained_models": models,
            "gb_trained_model_deployments": deployments,
            "gb_trained_model_deployments_newest": newest,
        }
        return {name: sql.format(**self._types) for name, sql in statements.items()}

    def record_trained_model(self, fields: Json) -> TrainedModel | None:
        """Store a model with these columns; return it, or None when its job is recorded already."""
        rows = self._rows(
            "INSERT INTO gb_trained_models (name, job_id, base_model, model_size, dataset,"
            " num_examples, num_train_steps, final_loss, params, path, files, created_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
            f" ON CONFLICT (job_id) DO NOTHING RETURNING {_MODEL_COLUMNS}",
            *(fields[name] for name in _MODEL_KEYS[1:-1]),
            _now(),
        )
        return _model_from(rows[0]) if rows else None

    def get_trained_model(self, id: int) -> TrainedModel | None:
        """Return the model, or None when there is none with this id."""
        rows = self._rows(f"SELECT {_MODEL_COLUMNS} FROM gb_trained_models WHERE id = ?", id)
        return _model_from(rows[0]) if rows else None

    def list_trained_models(
        self, limit: int = 100, job_id: str | None = None
    ) -> list[TrainedModel]:
        """Return the newest models first, at most `limit`; with a job's id only that job's."""
        which, values = ("", []) if job_id is None else (" WHERE job_id = ?", [job_id])
        sql = f"SELECT {_MODEL_COLUMNS} FROM gb_trained_models{which} ORDER BY id DESC LIMIT ?"
        return [_model_from(row) for row in self._rows(sql, *values, limit)]

    def delete_trained_model(self, id: int) -> bool:
        """Delete the model and its deployments; return whether there was one."""
        return bool(self._rows("DELETE FROM gb_trained_models WHERE id = ? RETURNING id", id))

    def record_trained_model_deployment(
        self, model_id: int, deployer: str, options: Json | None
    ) -> int:
        """Store a new deployment as running; return its id."""
        sql = (
            "INSERT INTO gb_trained_model_deployments (trained_model_id, deployer, options, status,"
            " created_at) VALUES (?, ?, ?, 'running', ?) RETURNING id"
        )
        return int(self._rows(sql, model_id, deployer, options or {}, _now())[0][0])

    def finish_trained_model_deployment(
        self,
        id: int,
        status: str,
        dir: str,
        ref: str,
        details: Json | None,
        error: str,
        duration_ms: int,
    ) -> Json | None:
        """Store how a deployment ended; return it, or None when it is gone. May be tried again."""
        sql = (
            "UPDATE gb_trained_model_deployments SET status = ?, dir = ?, ref = ?, details = ?,"
            " error = ?, duration_ms = ?, completed_at = ? WHERE id = ?"
            f" RETURNING {_DEPLOYMENT_COLUMNS}"
        )
        values = (status, dir, ref, details or {}, error, duration_ms, _now())
        rows = self._rows(sql, *values, id)
        return _deployment_from(rows[0]) if rows else None

    def get_trained_model_deployment(self, id: int) -> Json | None:
        """Return the deployment, or None when there is none with this id."""
        sql = f"SELECT {_DEPLOYMENT_COLUMNS} FROM gb_trained_model_deployments WHERE id = ?"
        rows = self._rows(sql, id)
        return _deployment_from(rows[0]) if rows else None

    def list_trained_model_deployments(self, model_id: int, limit: int = 100) -> list[Json]:
        """Return the model's newest deployments first, at most `limit`."""
        return [_deployment_from(row) for row in self.deployment_rows(model_id, limit)]

    def deployment_rows(self, model_id: int, limit: int) -> list[tuple[Any, ...]]:
        """Return the same as rows; `_deployment_from` makes a deployment of each."""
        sql = (
            f"SELECT {_DEPLOYMENT_COLUMNS} FROM gb_trained_model_deployments"
            " WHERE trained_model_id = ? AND EXISTS (SELECT 1 FROM gb_trained_models WHERE id = ?)"
            " ORDER BY id DESC LIMIT ?"
        )
        return self._rows(sql, model_id, model_id, limit)


class _SQLite(_Store):
    """The records in one file, made when missing; a reader never waits for a writer."""

    _errors = (sqlite3.Error, OverflowError, UnicodeError)  # an error's text may not be UTF-8
    _types: ClassVar = {
        "key": "INTEGER PRIMARY KEY AUTOINCREMENT",
        "whole": "INTEGER",
        "real": "REAL",
        "time": "TEXT",
    }

    def __init__(self, path: Path) -> None:
        # Each lock guards its connection for one statement: threads that step SQLite side by side
        # fight for the interpreter's lock, and writers starve each other in its busy waiting.
        self._locks = {True: threading.Lock(), False: threading.Lock()}
        self._connections: dict[bool, sqlite3.Connection] = {}
        self._path, self._usable = path, False
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._open()
            self._switch_to_wal()
            writer = self._connections[True]
            writer.execute("BEGIN IMMEDIATE")
            for statement in self._tables().values():
                writer.execute(statement)
            writer.execute("COMMIT")
            # The reader opens the log's files now, while there are free descriptors.
            self._connections[False].execute("SELECT id FROM gb_trained_models LIMIT 1").fetchone()
        except self._errors as error:
            self.close()
            why, name = str(error), getattr(error, "sqlite_errorname", "")
            if re.match("SQLITE_(IOERR_SHM|IOERR.*LOCK|PROTOCOL)", name):
                why = "its file system lacks what SQLite's log needs, shared memory and locks, as most"
                why += " network file systems do: use a file on a local disk, or PostgreSQL"
            raise sqlite3.DatabaseError(f"the database {path}: {why}") from error

    def _open(self) -> None:
        """Open both connections anew: they share their locks, which only closing both sets free."""
        with self._locks[True], self._locks[False]:
            if self._usable:  # another thread was first
                return
            for connection in self._connections.values():
                connection.close()
            for write in (True, False):
                connection = self._connections[write] = sqlite3.connect(
                    self._path,
                    timeout=BUSY_TIMEOUT_S,
                    isolation_level=None,
                    check_same_thread=False,
                )
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute("PRAGMA foreign_keys = ON")
            self._usable = True

    def _switch_to_wal(self) -> None:
        """Switch to a write-ahead log; try again where SQLite does not wait for others that open it."""
        end = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                self._connections[True].execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def _execute(self, sql: str, values: Sequence[object]) -> list[Any]:
        write = not sql.startswith("SELECT")
        lock = self._locks[write]
        if not self._usable:
            self._open()
        if not lock.acquire(timeout=BUSY_TIMEOUT_S):
            raise sqlite3.OperationalError(f"it was locked for {BUSY_TIMEOUT_S} s")
        try:
            connection = self._connections[write]
            return connection.execute(sql, values).fetchall()
        except OverflowError:  # beyond 64 bits: no row has such a number
            if write:
                raise
            return []
        except sqlite3.OperationalError as error:
            if re.match("SQLITE_(IOERR|PROTOCOL)", getattr(error, "sqlite_errorname", "")):
                self._usable = False  # it never recovers from these by itself
            if "decode" not in str(error):
                raise
            # A row that others wrote is not UTF-8: this connection reads such text from now on.
            connection.text_factory = functools.partial(str, encoding="utf-8", errors="replace")
            return connection.execute(sql, values).fetchall()
        finally:
            lock.release()

    def close(self) -> None:
        """Close both connections."""
        with self._locks[True], self._locks[False]:  # closing under a statement would crash
            for connection in self._connections.values():
                connection.close()
            self._usable = True  # so that a late statement opens nothing: it fails


def _bounded_connection(psycopg: Any) -> Any:
    """Return a class of connections that wait no longer than FINISH_TIMEOUT_S for an answer.

    libpq waits without end, even for the answer to a query that it could not send.
    """

    class Bounded(psycopg.Connection):  # type: ignore[misc]
        def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
            end = time.monotonic() + FINISH_TIMEOUT_S

            def bounded() -> Any:
                try:
                    ready = yield next(gen)
                    while time.monotonic() < end:
                        ready = yield gen.send(ready)
                except StopIteration as done:
                    return done.value
                self.close()
                raise TimeoutError(f"it did not answer for {FINISH_TIMEOUT_S} s")

            return super().wait(bounded(), *args, **options)

    return Bounded


class _PostgreSQL(_Store):
    """The records in a PostgreSQL database, over at most 8 connections, held for a statement each.

    Each statement is a transaction of its own, so none stays open while a deployer works.
    """

    _types: ClassVar = {
        "key": "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY",
        "whole": "BIGINT",
        "real": "DOUBLE PRECISION",
        "time": "TIMESTAMPTZ",
    }

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            text = f"PostgreSQL needs psycopg ({error}): pip install 'psycopg[binary]'"
            raise ImportError(text) from None
        try:
            psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            raise ValueError("the database's URL is malformed") from None  # it may hold a password

        # All is read as text: infinity and years BC are no datetime, and a table that others made may
        # have columns of type JSON.
        plain = psycopg.types.string.TextLoader
        self._loaders = dict.fromkeys(("timestamptz", "json", "jsonb"), plain)
        self._errors = (psycopg.Error, OSError)
        # No statement is prepared, since a pooler in between would not know it the next time.
        settings: Json = {
            "prepare_threshold": None,
            "connect_timeout": 4,
            "client_encoding": "UTF8",
        }
        connect = _bounded_connection(psycopg).connect
        self._connect = functools.partial(connect, url, autocommit=True, **settings)
        self._idle: queue.LifoQueue[psycopg.Connection[Any] | None] = queue.LifoQueue()
        for _ in range(8):
            self._idle.put(None)
        try:
            with self._connection() as connection, connection.transaction():
                encoding = connection.info.parameter_status("server_encoding")
                if encoding not in ("UTF8", "SQL_ASCII"):
                    raise ValueError(f"the database must be one in UTF8, this one is in {encoding}")
                connection.execute("SELECT pg_advisory_xact_lock(7349874591868649335)")
                for name, statement in self._tables().items():
                    # To create IF NOT EXISTS needs the right to create, even where the table exists.
                    if connection.execute("SELECT to_regclass(%s)", [name]).fetchone() == (None,):
                        connection.execute(statement)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Any]:
        """Yield a connection for one statement; one that died while idle is replaced before."""
        try:
            connection = self._idle.get(timeout=BUSY_TIMEOUT_S)
        except queue.Empty:
            raise TimeoutError(f"it was busy for {BUSY_TIMEOUT_S} s") from None
        try:
            if connection is not None:
                poller = select.poll()
                poller.register(connection.fileno(), select.POLLIN)
                if poller.poll(0):  # nothing was asked, so this is the end of the connection
                    connection.close()
                    connection = None
            if connection is None:
                with contextlib.ExitStack() as held:
                    fresh = held.enter_context(contextlib.closing(self._connect()))
                    fresh.execute("SET timezone = 'UTC'; SET datestyle = 'ISO'")
                    for name, loader in self._loaders.items():
                        fresh.adapters.register_loader(name, loader)
                    held.pop_all()
                    connection = fresh
            yield connection
        finally:
            self._idle.put(None if connection is None or connection.closed else connection)

    def _execute(self, sql: str, values: Sequence[object]) -> list[Any]:
        with self._connection() as connection:
            return list(connection.execute(sql.replace("?", "%s"), values).fetchall())

    def close(self) -> None:
        """Close the connections."""
        with contextlib.suppress(queue.Empty):
            while True:
                if connection := self._idle.get_nowait():
                    connection.close()


def open_store(database: str | os.PathLike[str]) -> _Store:
    """Open the records in an SQLite file or at a postgresql:// URL; make what tables are missing.

    Raises ValueError for a URL of another kind and a PostgreSQL database that is not in UTF-8,
    ImportError where psycopg is missing, OSError and the driver's error when the database cannot be
    opened; nothing stays open then.
    """
    database = os.fspath(database)
    scheme, separator, rest = database.partition("://")
    if not separator:
        return _SQLite(Path(os.path.abspath(database)))
    if scheme != "postgresql":
        raise ValueError("the database is of no known kind: give a path or a postgresql:// URL")
    # Of a password with an unescaped @, / or : a part would be taken for a host, and told in an error.
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    user, _, hosts = authority.rpartition("@")
    path = rest.removeprefix(authority).partition("?")[0]
    host = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:[0-9]*)?")
    if "@" in user + path or not all(host.fullmatch(one) for one in hosts.split(",")):
        raise ValueError("the database's URL is malformed: escape what is special in its password")
    return _PostgreSQL(database)


# ---- files ---------------------------------------------------------------------------------------
# Knows safe names, how to reach a file below no link, and digests. May use: context, types.

_JOB_ID = re.compile("[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
# How files are opened: a link is not followed, a FIFO not waited for.
_IN_PLACE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def _is_job_id(text: object) -> bool:
    """Say whether a job's id is usable as the name of a directory."""
    return isinstance(text, str) and bool(_JOB_ID.fullmatch(text)) and ".." not in text


def _check_path(path: object) -> str:
    """Return a path that stays below its directory and can be a file's; raises ValueError.

    Guards against absolute paths, parents, Windows' separators, names that terminals or logs would
    act on, names of temporary files, and what file systems do not hold.
    """
    if not isinstance(path, str):
        raise ValueError(f"the path {path!r} is not text")
    parts = path.split("/")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        raise ValueError(f"the path {path!r} holds a lone surrogate") from None
    for bad, why in (
        (".." in path, "holds .."),
        ("\\" in path, "holds a backslash"),
        (re.search("[\x00-\x1f\x7f-\x9f]", path), "holds a control character"),
        ({"", "."} & {*parts}, "is absolute, or has an empty part or a '.'"),
        ("/.fetch-" in f"/{path}", "is that of a temporary file"),
        (max(sizes) > 255 or sum(sizes) + len(sizes) > 2049, "is longer than file systems take"),
    ):
        if bad:
            raise ValueError(f"the path {path!r} {why}")
    return path


def _check_file(file: TrainedModelFile) -> None:
    """Raise ValueError, naming the file, unless it can be fetched as recorded."""
    path = _check_path(file.path)
    if type(file.size_bytes) is not int or not 0 <= file.size_bytes < 1 << 63:
        raise ValueError(f"{path}: the size {file.size_bytes!r} is not a whole number of bytes")
    digest = "" if file.sha256 is None else file.sha256
    if not isinstance(digest, str) or not re.fullmatch("([0-9A-Fa-f]{64})?", digest):
        raise ValueError(f"{path}: the sha256 {file.sha256!r} is not 64 hexadecimal digits")


def _check_files(files: Sequence[TrainedModelFile]) -> None:
    """Raise ValueError unless every file can be fetched, and all of them into one directory."""
    paths = set()
    for file in files:
        _check_file(file)
        if file.path in paths:
            raise ValueError(f"{file.path}: the path is listed twice")
        paths.add(file.path)
    for path in paths:
        above = path
        while above := above.rpartition("/")[0]:
            if above in paths:
                raise ValueError(f"{above}: the path is both a file and a directory, of {path}")


@contextlib.contextmanager
def _directory(root: Path, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
    """Yield a descriptor of the directory at `parts` below `root`, none of which may be a link.

    Raises OSError where a part is missing (unless `create`), or is a link or no directory.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(root, flags)
    try:
        for part in parts:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
            try:
                inner = os.open(part, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                text = "a link or a file is in the place of a directory"
                raise NotADirectoryError(errno.ENOTDIR, text, part) from None
            descriptor, outer = inner, descriptor
            os.close(outer)
        yield descriptor
    finally:
        os.close(descriptor)


def _open_in(directory: int, name: str, mode: str) -> io.FileIO:
    """Open a file of a directory; it owns its descriptor from the first moment. Raises OSError."""
    opened = functools.partial(os.open, mode=0o666, dir_fd=directory)
    return io.FileIO(name, mode, opener=lambda name, flags: opened(name, flags | _IN_PLACE))


def _open_regular(name: str, directory: int) -> io.FileIO:
    """Open a file for reading; a link or a device counts as missing. Raises OSError."""
    with contextlib.ExitStack() as held:
        try:
            file = held.enter_context(_open_in(directory, name, "r"))
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                raise
        else:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                held.pop_all()
                return file
    raise FileNotFoundError(errno.ENOENT, "not a regular file", name)


def _raise_if_passing(error: Exception) -> None:
    """Raise an error again that says nothing of the file, such as that no descriptor is free."""
    if getattr(error, "errno", 0) in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO):
        raise error


def _walk(ctx: Context, root: Path, parts: Sequence[str]) -> list[str]:
    """Return the paths of the files below a directory, temporary files apart, in order.

    Raises ValueError that names the first link, pipe or device that is there; OSError where there is
    no such directory, or one below it cannot be read; Cancelled.
    """
    paths, others = [], []
    unread: list[list[str]] = [[]]  # a list, since directories may nest deeper than calls can
    while unread:
        folders = unread.pop()
        with _directory(root, [*parts, *folders]) as directory:
            for name in os.listdir(directory):
                ctx.raise_if_cancelled()
                if name.startswith(".fetch-"):
                    continue
                mode = os.lstat(name, dir_fd=directory).st_mode
                path = "/".join([*folders, name])
                if stat.S_ISDIR(mode):
                    unread.append([*folders, name])
                elif stat.S_ISREG(mode):
                    paths.append(path)
                else:
                    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe"}
                    others.append(f"{path!r} is {kinds.get(stat.S_IFMT(mode), 'a device')}")
    if others:
        raise ValueError(min(others))
    return sorted(paths)


def _digest(ctx: Context, file: io.FileIO) -> str:
    """Return the sha256 of the rest of a file, in hexadecimal; raises Cancelled."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    while count := file.readinto(buffer):
        ctx.raise_if_cancelled()
        digest.update(buffer[:count])
    return digest.hexdigest()


# ---- sidecar -------------------------------------------------------------------------------------
# Knows the URLs of a sidecar, from both sides. May use: wire, files, context, types.


class _Failed(Exception):
    """An attempt that failed; after a failure below HTTP or a 5xx it is worth trying `again`."""

    def __init__(self, text: str, *, again: bool = False) -> None:
        super().__init__(text)
        self.again = again


def _connect(ctx: Context, connection: socket.socket, address: Any) -> None:
    """Connect within CONNECT_TIMEOUT_S; raises OSError, Cancelled."""
    connection.setblocking(False)
    code = connection.connect_ex(address)
    poller = select.poll()
    poller.register(connection, select.POLLOUT)
    end = time.monotonic() + CONNECT_TIMEOUT_S
    while code == errno.EINPROGRESS:
        ctx.raise_if_cancelled()
        if time.monotonic() > end:
            raise TimeoutError(errno.ETIMEDOUT, f"no connection in {CONNECT_TIMEOUT_S} s")
        if poller.poll(100):
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _dial(
    ctx: Context,
    held: contextlib.ExitStack,
    address: tuple[str, int],
    timeout: float,
    source: object = None,
) -> socket.socket:
    """Connect; until `held` is closed, cancelling the context ends each wait for the socket."""
    failure: OSError | None = None
    for family, kind, protocol, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        with contextlib.ExitStack() as opened:
            try:
                connection = opened.enter_context(socket.socket(family, kind, protocol))
                _connect(ctx, connection, where)
            except OSError as error:
                failure = error
                continue
            connection.settimeout(timeout)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # A duplicate to hang up by, since TLS takes over the socket, and its reader closes it.
            twin = held.enter_context(connection.dup())
            held.enter_context(ctx._on_cancel(functools.partial(_hang_up, twin)))
            opened.pop_all()
            return connection
    raise failure or OSError(f"{address[0]} has no address")


class _Dialler(urllib.request.AbstractHTTPHandler):
    """Opens http and https URLs over connections that a context can end."""

    def __init__(self, ctx: Context, held: contextlib.ExitStack) -> None:
        super().__init__()
        self._dial = functools.partial(_dial, ctx, held)

    def _connection(self, host: str, *, kind: Any, **options: Any) -> http.client.HTTPConnection:
        connection: Any = kind(host, **options)
        connection._create_connection = self._dial
        return connection  # type: ignore[no-any-return]

    def http_open(self, request: urllib.request.Request) -> Any:
        """Open a plain URL."""
        kind = http.client.HTTPConnection
        return self.do_open(self._connection, request, kind=kind)  # type: ignore[arg-type]

    def https_open(self, request: urllib.request.Request) -> Any:
        """Open a URL over TLS, the certificate checked."""
        kind = http.client.HTTPSConnection
        return self.do_open(self._connection, request, kind=kind)  # type: ignore[arg-type]

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None)  # urllib wraps the one that says more
    return _text_of(reason if isinstance(reason, Exception) else error, "strerror")


def _is_here(host: str) -> bool:
    """Say whether this host is this machine, however it is written: 127.1, localhost., 0.0.0.0."""
    host = host.rstrip(".")
    with contextlib.suppress(OSError, UnicodeError):
        host = str(socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)[0][4][0])
    return _is_loopback(host.removeprefix("::ffff:")) or host in ("0.0.0.0", "::")


@contextlib.contextmanager
def _open_url(
    ctx: Context, request: urllib.request.Request, timeout: float | None
) -> Iterator[http.client.HTTPResponse]:
    """Yield the answer to a request, whatever its status; no redirect is followed.

    `timeout` bounds each wait for bytes. The environment's proxies are used, but not for this
    machine's own addresses. Raises _Failed when there is no answer in HTTP, Cancelled.
    """
    server = urllib.parse.urlsplit(request.full_url)
    with contextlib.ExitStack() as held:
        opener = urllib.request.OpenerDirector()
        opener.add_handler(_Dialler(ctx, held))
        if not _is_here(server.hostname or ""):
            opener.add_handler(urllib.request.ProxyHandler())
        try:
            response = opener.open(request, timeout=timeout)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            ctx.raise_if_cancelled()
            text = f"no answer from {server.netloc}: {_why(error)}"
            raise _Failed(text, again=True) from error
        except ValueError:  # it is about the proxy's URL, and its text would tell the password
            text = f"no answer from {server.netloc}: the environment's proxy has a malformed URL"
            raise _Failed(text) from None
        with response:
            yield response


def _refused(ctx: Context, response: http.client.HTTPResponse, wanted: int) -> str:
    """Return which status was expected and which came, and the words of a {"error": "<text>"}."""
    said = ""
    with (
        contextlib.suppress(OSError, http.client.HTTPException, ValueError, TypeError, KeyError),
        socket.fromfd(response.fileno(), socket.AF_INET, socket.SOCK_STREAM) as twin,
        ctx._inner(CONNECT_TIMEOUT_S) as inner,  # an answer without a length may never end
        inner._on_cancel(lambda: _hang_up(twin)),
    ):
        said = ": " + _decode_json(response.read(64 * 1024))["error"]
    return f"expected status {wanted}, got {response.status}{said}"


def _check_url(url: str, what: str) -> str:
    """Return an http(s) URL without slashes at its end; raises ValueError that does not repeat it."""
    try:
        parts = urllib.parse.urlsplit(url)
        port_is_good = parts.port != 0
    except ValueError:
        parts, port_is_good = urllib.parse.urlsplit(""), False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_good:
        raise ValueError(f"{what} is no URL like http://host:port")
    if "@" in parts.netloc or "?" in url or "#" in url:
        raise ValueError(f"{what} must have no user, query or fragment")
    if not re.fullmatch("[!-~]+", url):
        raise ValueError(f"{what} must be printable ASCII without blanks")
    return url.rstrip("/")


class SidecarClient:
    """Fetches models' files from the sidecar at `url`; `token` is sent to nobody else.

    Raises ValueError for a URL that is not http(s), or that has a user, a query or a fragment, and
    for a token that no header carries.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self._base = _check_url(url, "the sidecar's URL")
        self._token = _secret(token, "the sidecar's token")
        self._headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}

    @contextlib.contextmanager
    def _get(
        self, ctx: Context, route: str, query: Json, timeout: float, start: int = 0
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield the answer of the sidecar, from the byte `start` on if it likes; raises _Failed."""
        words = urllib.parse.urlencode(query, safe="/", quote_via=urllib.parse.quote)
        request = urllib.request.Request(f"{self._base}{route}?{words}", headers=self._headers)
        if start:
            request.add_header("Range", f"bytes={start}-")
        with _open_url(ctx, request, timeout) as response:
            if 500 <= response.status < 600:
                raise _Failed(_refused(ctx, response, 200), again=True)
            yield response

    def _retry(
        self, ctx: Context, what: str, reached: Callable[[], int], attempt: Callable[[], T]
    ) -> T:
        """Return what `attempt` returns, trying again while it gets further than before.

        Raises TrainingError("upstream") for a failure that is final, and once five attempts in a row
        ended at the same byte or before it (one more than there are RETRY_PAUSES_S); Cancelled.
        """
        best, failures = -1, 0
        while True:
            try:
                return attempt()
            except _Failed as failed:
                ctx.raise_if_cancelled()
                if reached() > best:
                    best, failures = reached(), 0
                failures += 1
                # A sidecar may echo the token. It is replaced before the text is cut, which could leave
                # a part of it.
                told = str(failed).replace(self._token or "\0", "…")
                text = f"{what}: {told:.1000}"
                if not failed.again:
                    raise _upstream(text) from None
                if failures > len(RETRY_PAUSES_S):
                    raise _upstream(f"{text}, in {failures} attempts") from None
            log.debug("%s, trying again", text)
            ctx.wait(RETRY_PAUSES_S[failures - 1])
            ctx.raise_if_cancelled()

    def download_model_file(self, ctx: Context, model_path: str, file: str, w: Any) -> None:
        """Write the bytes of one file of a model to `w`.

        A connection that drops, stalls or says 5xx is tried again from the byte it reached, until
        five attempts in a row got no further. Raises TrainingError("upstream") that names the file,
        what was expected and what came; Cancelled.
        """
        query = {"model_path": model_path, "file": file}
        self._retry(ctx, file, lambda: w.received, lambda: self._receive(ctx, query, w))

    def _receive(self, ctx: Context, query: Json, w: Any) -> None:
        """Make one attempt: ask for what is missing and write it to `w`."""
        start = w.received
        with self._get(ctx, "/models/file", query, STALL_TIMEOUT_S, start) as response:
            status, headers = response.status, response.headers
            offset = headers.get("Content-Range", "")
            if status == 416 or (status == 206 and not offset.startswith(f"bytes {start}-")):
                if start:
                    w.restart()
                    text = f"expected the bytes from {start} on, got status {status} {offset}"
                    raise _Failed(text, again=True)
            if start and status == 200:
                w.restart()
            elif status != (206 if start else 200):
                raise _Failed(_refused(ctx, response, 206 if start else 200))
            for name, known in (("Content", ("identity", "")), ("Transfer", ("chunked",))):
                for coding in headers.get_all(f"{name}-Encoding", []):
                    if (
                        coding.lower() not in known
                    ):  # http.client takes "chunked " for another coding
                        raise _Failed(f"expected no {name}-Encoding, got {coding}")
            missing = w.size - w.received
            for length in headers.get_all("Content-Length", []):
                if length.strip() != str(missing):
                    raise _Failed(f"expected {missing} bytes, got {length} announced")
            self._copy(ctx, response, w)

    def _copy(self, ctx: Context, response: http.client.HTTPResponse, w: Any) -> None:
        """Write the body to `w`. What the writer raises is final, what the connection does is not."""
        why = ""
        while True:
            try:
                data = response.read1(BLOCK_BYTES)
            except (OSError, http.client.HTTPException, ValueError) as error:
                data, why = b"", f": {_why(error)}"
            if not data:
                break
            w.write(data)
        ctx.raise_if_cancelled()
        # Without a length only the end of the connection, or a stall, says that this was all.
        if w.received < w.size:
            raise _Failed(f"expected {w.size} bytes, got {w.received}{why}", again=True)

    def list_model_files(self, ctx: Context, model_path: str) -> list[TrainedModelFile]:
        """Return the files of a model; the sidecar may take as long as a fetch, to hash them.

        Raises TrainingError("upstream") for an answer that is no such list; Cancelled.
        """
        with ctx._inner(FETCH_TIMEOUT_S) as inner:
            try:
                listed = functools.partial(self._list, inner, model_path)
                return self._retry(inner, model_path, lambda: 0, listed)
            except Cancelled as cancelled:
                ctx.raise_if_cancelled()
                raise _upstream(f"{model_path}: no list of files: {cancelled}") from None

    def _list(self, ctx: Context, model_path: str) -> list[TrainedModelFile]:
        query = {"model_path": model_path}
        with self._get(ctx, "/models/files", query, FETCH_TIMEOUT_S) as response:
            if response.status != 200:
                raise _Failed(_refused(ctx, response, 200))
            try:
                data = response.read(16 * MAX_BODY_BYTES)  # a list of some 100,000 files
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise _Failed(f"no whole list of files: {_why(error)}", again=True) from error
            ctx.raise_if_cancelled()
            if response.length:
                raise _Failed(f"{response.length} bytes of the list are missing", again=True)
        try:
            files = [_file_from(entry) for entry in _decode_json(data)["files"]]
            _check_files(files)
        except (ValueError, TypeError, KeyError) as error:
            text = f"expected a list of files, got something else: {_text_of(error)}"
            raise _Failed(text) from None
        if not files:
            raise _Failed("expected a list of files, got an empty one")
        return files


class _SidecarDirectory:
    """The sidecar's own side: serves the directories `trained/<job id>/` in `root`, and no more."""

    def __init__(self, root: str) -> None:
        if not os.path.isdir(root):
            raise ValueError(f"the sidecar's directory {root} does not exist")
        self._root = Path(os.path.abspath(root))

    def routes(self) -> Routes:
        """Return what it answers to."""
        return (
            ("/health", {"GET": _health}),
            ("/models", {"GET": self.models}),
            ("/models/files", {"GET": self.files}),
            ("/models/file", {"GET": self.file}),
        )

    def models(self, request: _Handler) -> _Answer:
        """Answer with the models there are."""
        names = []
        try:
            with _directory(self._root, ["trained"]) as directory, os.scandir(directory) as entries:
                names = sorted(
                    entry.name
                    for entry in entries
                    if _is_job_id(entry.name) and entry.is_dir(follow_symlinks=False)
                )
        except OSError as error:
            _raise_if_passing(error)
        return _json_answer(200, {"models": [{"model_path": f"trained/{name}"} for name in names]})

    def _model(self, request: _Handler) -> list[str]:
        path = request.parameter("model_path") or ""
        parts = path.split("/")
        if len(parts) != 2 or parts[0] != "trained" or not _is_job_id(parts[1]):
            raise _Refusal(404, f"no model at {path[:200]!r}")
        return parts

    def files(self, request: _Handler) -> _Answer:
        """Answer with the files of a model, their sizes and digests.

        A model that holds anything else, or nothing, is refused (422), not listed without it.
        """
        parts = self._model(request)
        listed = []
        try:
            with request.watched() as ctx:
                for path in _walk(ctx, self._root, parts):
                    *folders, name = path.split("/")
                    with (
                        _directory(self._root, [*parts, *folders]) as directory,
                        _open_regular(name, directory) as file,
                    ):
                        # A name that is not UTF-8 gets backslashes, and is refused when it is recorded.
                        path = os.fsencode(path).decode(errors="backslashreplace")
                        size = os.fstat(file.fileno()).st_size
                        listed.append(TrainedModelFile(path, size, _digest(ctx, file)))
        except ValueError as error:
            way_out = "serve a copy with links resolved (cp -rL), or record the model with files"
            raise _Refusal(422, f"{error!s:.500}, not a regular file: {way_out}") from None
        except OSError as error:
            _raise_if_passing(error)
            text = f"no model at {'/'.join(parts)!r}: {error.filename}: {_why(error)}"
            raise _Refusal(404, text) from None
        if not listed:
            raise _Refusal(422, f"the model at {'/'.join(parts)!r} has no file")
        return _json_answer(200, {"files": [vars(file) for file in listed]})

    def file(self, request: _Handler) -> _Answer:
        """Answer with a file's bytes, from the offset of a `Range: bytes=N-` on."""
        path = request.parameter("file")
        try:
            *folders, name = _check_path(path).split("/")
            with _directory(self._root, [*self._model(request), *folders]) as directory:
                file = _open_regular(name, directory)
        except (OSError, ValueError) as error:
            _raise_if_passing(error)
            raise _Refusal(404, f"no file {path!r:.200} in that model") from None
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        start = re.fullmatch("bytes=([0-9]{1,4000})-", request.headers.get("Range", ""))
        with contextlib.ExitStack() as held:
            held.enter_context(file)
            size, offset = os.fstat(file.fileno()).st_size, int(start[1]) if start else 0
            if start and offset >= size:
                beyond = {"Content-Range": f"bytes */{size}"}
                raise _Refusal(416, f"{path} has {size} bytes", beyond)
            held.pop_all()
        if start:
            headers["Content-Range"] = f"bytes {offset}-{size - 1}/{size}"
        return _Answer(206 if start else 200, b"", headers, (file, offset, size - offset))


# ---- fetch ---------------------------------------------------------------------------------------
# Knows a model's directory: digests, temporary names, the lock. Knows no URL: the fetcher is an
# argument. May use: files, context, types.


class ModelFileFetcher(Protocol):
    """Where the files of models come from; called from up to 8 threads at once."""

    def download_model_file(self, ctx: Context, model_path: str, file: str, w: Any) -> None:
        """Write the bytes of one file to `w`, from `w.received` on.

        `w.write(data)` raises when more than `w.size` bytes come; `w.restart()` forgets what was
        received. Whatever this raises fails the deployment. Must end soon after a cancellation.
        """


class _HashBehind:
    """A sha256 that a second thread computes, up to 4 blocks behind the thread that writes."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._blocks: queue.Queue[bytes | None] = queue.Queue(4)
        self.update = self._blocks.put
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (block := self._blocks.get()) is not None:
            self._hash.update(block)

    def hexdigest(self) -> str:
        """Wait for the thread to end; return the digest."""
        self._blocks.put(None)
        self._thread.join()
        return self._hash.hexdigest()


class _Incoming:
    """One file of a model: its record, its state on the disk, and how far its download is.

    It is the `w` of a fetcher. Any thread may read its figures.
    """

    def __init__(self, dir: Path, file: TrainedModelFile) -> None:
        self.dir = dir
        self.path, self.size, self.sha256 = file.path, file.size_bytes, (file.sha256 or "").lower()
        *self.folders, self.name = file.path.split("/")
        self.received = 0
        self.state = ""  # after a look at the disk: ok, missing, wrong size, wrong sha256
        self.outcome = ""  # once it is right: kept, fetched, repaired
        # Its size, time and inode when it was found right.
        self.stamp: tuple[int, int, int] | None = None
        self._file: io.FileIO | None = None
        self._new_hash: Callable[[], Any] = hashlib.sha256
        self._hash: Any = None
        # Guards _file, _hash and received; held for one write. A fetcher may write from several
        # threads, and a thread that it has given up may write late.
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def directory(self, *, create: bool = False) -> Iterator[int]:
        """Yield a descriptor of the directory that holds the file; raises OSError that names it."""
        parts = [self.dir.name, *self.folders]
        with contextlib.ExitStack() as held:
            try:
                directory = _directory(self.dir.parent, parts, create=create)
                descriptor = held.enter_context(directory)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self.path) from None
            yield descriptor

    def write(self, data: bytes) -> None:
        """Append bytes; raises TrainingError for more than recorded, OSError for the disk's."""
        # What is not bytes is copied, since the caller may use its buffer again.
        block = data if isinstance(data, bytes) else bytes(memoryview(data))
        with self._guard:
            if self._file is None:
                raise ValueError(f"{self.path}: written to outside its download")
            rest, end = memoryview(block), self.received + len(block)
            if end > self.size:
                raise _upstream(f"{self.path}: expected {self.size} bytes, got more")
            while rest:  # by its offset, so that a write that failed half-way can be tried again
                rest = rest[os.pwrite(self._file.fileno(), rest, end - len(rest)) :]
            self._hash.update(block)
            self.received = end

    def restart(self) -> None:
        """Forget what was received; the bytes on the disk will be written over."""
        with self._guard:
            if self._file is None:
                raise ValueError(f"{self.path}: restarted outside its download")
            fresh = self._new_hash()
            self._hash.hexdigest()
            self._hash, self.received = fresh, 0

    @contextlib.contextmanager
    def download(self, file: io.FileIO, *, alone: bool) -> Iterator[None]:
        """Take the bytes in this block; raises TrainingError for others than are recorded."""
        self._new_hash = _HashBehind if alone else hashlib.sha256
        self._hash = self._new_hash()
        self._file, self.received = file, 0
        try:
            yield
        finally:
            with self._guard:
                self._file = None
                digest = self._hash.hexdigest()
        if self.received != self.size:
            raise _upstream(f"{self.path}: expected {self.size} bytes, got {self.received}")
        if self.sha256 and digest != self.sha256:
            raise _upstream(f"{self.path}: expected sha256 {self.sha256}, got {digest}")


class Progress:
    """How far one deployment is; read from any thread while it runs. `ctx` knows the reports."""

    def __init__(self, ctx: Context | None = None) -> None:
        self.files: Sequence[_Incoming] = ()
        self._ctx = ctx or Context()

    def figures(self) -> Json:
        """Return how many files and bytes are there, kept ones included, and will be; the report."""
        report = self._ctx.reported
        return {
            "files_done": sum(file.outcome != "" for file in self.files),
            "files_total": len(self.files),
            "bytes_done": sum(file.received for file in self.files),
            "bytes_total": sum(file.size for file in self.files),
            "report": report and dict(zip(("text", "fraction"), report, strict=True)),
        }

    @property
    def complete(self) -> bool:
        """Whether every file is there and right."""
        return bool(self.files) and all(file.outcome for file in self.files)

    def __str__(self) -> str:
        """Say how many files were right, missing and wrong: 3 kept, 0 fetched, 1 repaired."""
        counts = collections.Counter(file.outcome for file in self.files)
        return ", ".join(f"{counts[word]} {word}" for word in ("kept", "fetched", "repaired"))


def _stamp(file: os.stat_result) -> tuple[int, int, int]:
    return file.st_size, file.st_mtime_ns, file.st_ino


def _compare(ctx: Context, file: _Incoming, name: str, directory: int) -> str:
    """Compare what lies under `name` with the record of a file: ok, wrong size or wrong sha256.

    What was found right before is not hashed again while its stamp is the same. A stamp that differs
    decides nothing: network file systems set times and inodes late. Raises OSError, Cancelled.
    """
    with _open_regular(name, directory) as opened:
        stamp = _stamp(os.fstat(opened.fileno()))
        if stamp[0] != file.size:
            return "wrong size"
        if file.sha256 and stamp != file.stamp and _digest(ctx, opened) != file.sha256:
            return "wrong sha256"
    file.stamp = stamp
    return "ok"


def _look(ctx: Context, file: _Incoming) -> None:
    """Compare a file on the disk with its record, and note its state.

    Raises OSError where something is in the way that is never replaced, Cancelled.
    """
    ctx.raise_if_cancelled()
    file.received, file.outcome, file.state = 0, "", "missing"
    try:
        with file.directory() as directory:
            file.state = _compare(ctx, file, file.name, directory)
        if file.state == "ok":
            file.received, file.outcome = file.size, "kept"
    except FileNotFoundError:
        pass
    except PermissionError:
        file.state = "wrong sha256"  # it cannot be read, so it is fetched again
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.path) from None


def _each(
    ctx: Context,
    files: Sequence[_Incoming],
    work: Callable[[Context, _Incoming], None],
    *,
    small_bytes: int = 0,
) -> None:
    """Call `work` for every file, up to 8 at once, the largest first; a failure ends the others.

    A single file, and files of no more than `small_bytes` in all, are worked on in this thread.
    """
    if len(files) <= 1 or sum(file.size for file in files) <= small_bytes:
        for file in files:
            work(ctx, file)
        return
    with ctx._inner() as inner, ThreadPoolExecutor(8) as pool:
        try:
            largest_first = sorted(files, key=lambda file: file.size, reverse=True)
            for task in as_completed([pool.submit(work, inner, file) for file in largest_first]):
                task.result()
        except BaseException:
            inner.cancel("another file failed")
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextlib.contextmanager
def _locked(ctx: Context, dir: Path) -> Iterator[None]:
    """Hold the lock that guards the files of `dir`, across threads and processes, for one fetch.

    The lock's file, beside the directory, is never removed, since others may have it open and wait.
    They wait by short pauses, since nothing could end a blocking flock.
    """
    name, flags = f".{dir.name}.lock", os.O_RDWR | os.O_CREAT | _IN_PLACE
    descriptor = os.open(dir.parent / name, flags, 0o666)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                ctx.wait(0.02)
                ctx.raise_if_cancelled()
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also where a forked child still has it open
    finally:
        os.close(descriptor)


def _changed(ctx: Context, files: Sequence[_Incoming]) -> list[_Incoming]:
    """Return the files that are not as recorded any more; raises Cancelled.

    Only those are read again whose stamp is not what it was when they were found right.
    """
    changed: list[_Incoming] = []

    def look_again(ctx: Context, file: _Incoming) -> None:
        with contextlib.suppress(OSError), file.directory() as directory:
            if _compare(ctx, file, file.name, directory) == "ok":
                return
        changed.append(file)

    _each(ctx, files, look_again, small_bytes=SMALL_BYTES)
    return changed


def _bytes_free(dir: Path) -> int:
    """Return the free space of the disk that holds a directory, or would hold it."""
    place = next(place for place in (dir, *dir.parents) if os.path.exists(place))
    return shutil.disk_usage(place).free


def _leftovers(dir: Path, files: Sequence[_Incoming], *, remove: bool) -> bool:
    """Say whether a dead fetch left temporary files; whoever lets them be removed holds the lock."""
    found = False
    places = {(*file.folders[:n],) for file in files for n in range(len(file.folders) + 1)}
    for folders in places:
        with contextlib.suppress(OSError), _directory(dir.parent, [dir.name, *folders]) as place:
            for name in os.listdir(place):
                regular = stat.S_ISREG(os.lstat(name, dir_fd=place).st_mode)
                if name.startswith(".fetch-") and regular:
                    found = True
                    if remove:
                        os.unlink(name, dir_fd=place)
    return found


def _download(
    fetcher: ModelFileFetcher, model_path: str, alone: bool, ctx: Context, file: _Incoming
) -> None:
    """Fetch one file under a temporary name; it gets its own once it is complete and verified."""
    temporary = f".fetch-{os.urandom(8).hex()}"
    with file.directory(create=True) as directory:
        try:
            with _open_in(directory, temporary, "x+") as opened:
                inode = os.fstat(opened.fileno()).st_ino
                with file.download(opened, alone=alone):
                    fetcher.download_model_file(ctx, model_path, file.path, file)
            ctx.raise_if_cancelled()
            file.stamp = _stamp(os.stat(temporary, dir_fd=directory, follow_symlinks=False))
            if (file.stamp[0], file.stamp[2]) != (file.size, inode):
                file.stamp = None
                if _compare(ctx, file, temporary, directory) != "ok":
                    raise _upstream(f"{file.path}: changed while it was fetched")
            os.replace(temporary, file.name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException as error:  # the border to a fetcher, which is foreign code
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            if issubclass(type(error), Cancelled):  # isinstance would ask the exception
                raise
            ctx.raise_if_cancelled()
            if type(error) is TrainingError and error.kind == "upstream":
                raise
            raise _upstream(f"{file.path}: {_text_of(error, 'strerror')}") from error
    file.outcome = "fetched" if file.state == "missing" else "repaired"


def _fetch_locked(
    ctx: Context, fetcher: ModelFileFetcher, model_path: str, dir: Path, files: Sequence[_Incoming]
) -> None:
    """Look again, now that nobody else fetches into `dir`, and fetch what is missing or wrong."""
    _leftovers(dir, files, remove=True)
    with ctx._inner(FETCH_TIMEOUT_S) as inner:
        try:
            _each(inner, files, _look, small_bytes=SMALL_BYTES)
            wanted = [file for file in files if file.state != "ok"]
            missing, free = sum(file.size for file in wanted), _bytes_free(dir)
            if missing > free:
                raise _upstream(f"{dir}: {missing} bytes are to be fetched, {free} are free")
            alone = len(wanted) == 1
            _each(inner, wanted, functools.partial(_download, fetcher, model_path, alone))
        except Cancelled as cancelled:
            ctx.raise_if_cancelled()
            if not inner.cancelled:  # the fetcher raised it without having been asked to end
                raise
            raise _upstream(f"the files were not fetched: {cancelled}") from None


def fetch_model_files(
    ctx: Context,
    fetcher: ModelFileFetcher,
    model: TrainedModel,
    dir: Path,
    *,
    progress: Progress | None = None,
) -> None:
    """Bring the files of a model into `dir`, its own directory as `model_dir` gives it.

    On return every file of `model.files` is there, complete, with the recorded size and sha256.
    What was right already is kept and not asked for; what is missing or wrong is fetched, up to 8
    files at once. Other fetches into `dir`, in whatever process, wait their turn. After a failure
    the real names hold complete files or what they held before, and no temporary file is left.
    `progress` can be read meanwhile. Raises TrainingError("upstream") that names the file, what was
    expected and what came; Cancelled, within a second, when `ctx` is cancelled.
    """
    dir, progress = Path(dir), progress or Progress()
    try:
        model_path = _check_path(model.path or f"trained/{model.job_id}")
        _check_files(model.files)
    except ValueError as error:
        raise _upstream(f"{error!s:.500}") from None
    if not model.files:
        raise _upstream("the trained model has no recorded files")
    progress.files = files = [_Incoming(dir, file) for file in model.files]
    try:
        # Reading needs no lock, since a real name never holds half a file. So a complete model deploys
        # where nothing can be written, and waits for nobody.
        _each(ctx, files, _look, small_bytes=SMALL_BYTES)
        if not progress.complete or _leftovers(dir, files, remove=False):
            dir.parent.mkdir(parents=True, exist_ok=True)
            with _locked(ctx, dir):
                _fetch_locked(ctx, fetcher, model_path, dir, files)
    except OSError as error:
        if not progress.complete:
            raise _upstream(f"{error.filename or dir}: {error.strerror or error}") from None
    if changed := _changed(ctx, files):  # others did, or two names are one file here
        for file in changed:
            file.outcome = ""
        raise _upstream(f"{changed[0].path}: changed while other files were fetched or read")


# ---- deployment ----------------------------------------------------------------------------------
# Knows the order of the steps, and what is recorded when. Knows no route and no status of HTTP.
# May use: fetch, sidecar, files, store, deployers, context, types.

_WHOLE = range(-(1 << 63), 1 << 63)  # what both databases hold


def _check_job_id(job_id: object) -> None:
    if not _is_job_id(job_id):
        raise _invalid(
            f"the job id {job_id!r:.200} is unusable as a directory name: 1 to 128 letters, digits,"
            " '_', '-' and '.', starting with a letter or digit, without '..'"
        )


def model_dir(root: str | os.PathLike[str], model: TrainedModel) -> Path:
    """Return the absolute directory of a model below the deployment directory: one a job.

    Raises TrainingError("invalid") for a job id that is unusable as the name of a directory.
    """
    _check_job_id(model.job_id)
    return Path(os.path.abspath(root)) / model.job_id


def record_model(
    ctx: Context, store: _Store, sidecar: SidecarClient | None, body: object
) -> TrainedModel | None:
    """Record the trained model that a JSON object describes; None if its job is recorded already.

    Without a list of files the sidecar is asked for it. Raises TrainingError: "invalid" for what is
    not of the right form or could never be deployed, "unavailable" with no sidecar to ask,
    "upstream" when it fails; Cancelled.
    """
    if not isinstance(body, dict):
        raise _invalid("the body must be a JSON object")

    def field(name: str, default: Any, kind: type | tuple[type, ...], what: str) -> Any:
        value = body.get(name, default)
        if (
            not isinstance(value, kind)
            or isinstance(value, bool)
            or (isinstance(value, int) and value not in _WHOLE)
        ):
            raise _invalid(f"{name} must be {what}, not {_encode_json(value):.80}")
        return value

    text, whole = "a string", "a whole number of 64 bits"
    job_id = field("job_id", None, str, text)
    _check_job_id(job_id)
    loss = field("final_loss", None, (int, float, type(None)), "a number of 64 bits or null")
    fields: Json = {
        "job_id": job_id,
        "name": field("name", job_id, str, text),
        **{name: field(name, "", str, text) for name in ("base_model", "model_size", "dataset")},
        **{name: field(name, 0, int, whole) for name in ("num_examples", "num_train_steps")},
        "final_loss": loss if loss is None else float(loss),
        "params": field("params", {}, dict, "an object"),
        "path": field("path", "", str, text) or f"trained/{job_id}",
    }
    listed = field("files", None, (list, type(None)), "a list of objects")
    if listed == []:
        raise _invalid("a model without files can never be deployed")
    files = [_file_from(entry) for entry in listed or ()]
    try:
        _check_path(fields["path"])
        _check_files(files)
    except ValueError as error:
        raise _invalid(f"{error!s:.500}") from None
    if not files:
        if sidecar is None:
            text = "no sidecar is configured that could list the model's files: send them as files"
            raise TrainingError("unavailable", text)
        files = sidecar.list_model_files(ctx, fields["path"])
    return store.record_trained_model(fields | {"files": [vars(file) for file in files]})


def audit_model(ctx: Context, root: str | os.PathLike[str], model: TrainedModel) -> Json:
    """Compare the disk with the record of a model; nothing is fetched.

    Raises TrainingError("invalid") for an unusable job id; Cancelled.
    """
    dir = model_dir(root, model)

    def look(ctx: Context, file: _Incoming) -> None:
        try:
            _look(ctx, file)
        except OSError as error:  # whatever is in the way, the file is missing
            _raise_if_passing(error)

    good: dict[int, _Incoming] = {}
    for number, file in enumerate(model.files):
        with contextlib.suppress(ValueError):
            _check_file(file)
            good[number] = _Incoming(dir, file)
    _each(ctx, [*good.values()], look, small_bytes=SMALL_BYTES)
    states = [good[n].state if n in good else "missing" for n in range(len(model.files))]
    files = [
        {"path": file.path, "size_bytes": file.size_bytes, "state": state}
        for file, state in zip(model.files, states, strict=True)
    ]
    missing = sum(file.size for file in good.values() if file.state != "ok")
    free = _bytes_free(dir)
    complete = bool(files) and all(file["state"] == "ok" for file in files)
    return {
        "dir": str(dir),
        "complete": complete,
        "files": files,
        "bytes_to_fetch": missing,
        "bytes_free": free,
        "fits": missing <= free,
    }


def _find_deployer(deployers: Sequence[TrainedModelDeployer], name: object) -> TrainedModelDeployer:
    for deployer in deployers:
        if deployer.name == name:
            return deployer
    names = ", ".join(deployer.name for deployer in deployers)
    known = f"registered are: {names}" if names else "none is registered"
    raise _invalid(f"deployer must be the name of a registered deployer; {known}")


def _check_options(options: object) -> str:
    """Return the options as JSON; raises TrainingError("invalid") for no object, or a large one."""
    if not isinstance(options, dict | None):
        raise _invalid(f"options must be a JSON object, not {type(options).__name__}")
    try:
        text = _encode_json(options)
    except ValueError as error:
        raise _invalid(f"options must be a JSON object: {error}") from None
    if (size := len(text.encode())) > 64 * 1024:
        raise _invalid(f"options have {size} bytes as compact JSON, at most 65536 are taken")
    return text


def _plain_result(result: Any) -> tuple[str, Json]:
    """Return the ref and a copy of the details of what a deployer returned.

    Raises TypeError and ValueError that say which is wrong.
    """
    if result is None:
        return "", {}
    if hasattr(result, "cr_await"):
        result.close()  # a coroutine nobody awaits would warn

    def expect(what: str, value: object, kind: type, or_none: str = "") -> None:
        if not issubclass(type(value), kind):
            got, wanted = type(value).__name__, kind.__name__ + or_none
            raise TypeError(f"the deployer returned {what} of type {got}, not {wanted}")

    expect("a result", result, DeployTrainedModelResult, " or None")
    ref, details = result.ref, result.details
    expect("a ref", ref, str)
    ref = str.__str__(ref)  # a plain one
    if details is None:
        return ref, {}
    expect("details", details, dict, " or None")
    try:
        return ref, json.loads(_encode_json(details))
    except Exception as error:  # foreign objects may raise anything while they are encoded
        text = f"the deployer returned details that are no JSON: {_text_of(error)}"
        raise ValueError(text) from error


def _log_traceback(deploy_id: int, error: BaseException) -> None:
    """Log where foreign code raised this, a record each line; our own errors say enough in words."""
    if not issubclass(type(error), Cancelled | TrainingError):
        for line in _traceback_of(error):
            log.warning("deployment %d | %s", deploy_id, line)


def _call(
    deployer: TrainedModelDeployer, ctx: Context, req: DeployTrainedModelRequest
) -> tuple[str, Json]:
    """Call the deployer, with a context of its own; return its ref and a copy of its details.

    Raises Cancelled or TrainingError("upstream") with the text of what it raises, or of what is wrong
    with its result, which is logged. Nothing that is the deployer's leaves this function.
    """
    with ctx._inner() as own:
        try:
            return _plain_result(deployer.deploy(own, req))
        except BaseException as error:  # the border to foreign code, which may raise SystemExit
            _log_traceback(req.deploy_id, error)
            ours = Cancelled if issubclass(type(error), Cancelled) else _upstream
            raise ours(_text_of(error)) from None


def _warn_of_changes(ctx: Context, deploy_id: int, files: Sequence[_Incoming]) -> None:
    """Log which files, that a deployer may only read, are not as recorded any more."""
    try:
        for file in _changed(ctx, files):
            text = "deployment %d: %s changed while the deployer ran; the next one repairs it"
            log.warning(text, deploy_id, file.path)
    except Exception as error:  # nothing here may take the place of what the deployer returned
        log.warning("deployment %d: its files are not looked at again: %s", deploy_id, error)


def _fetch_and_call(
    ctx: Context,
    fetcher: ModelFileFetcher,
    deployer: TrainedModelDeployer,
    req: DeployTrainedModelRequest,
    progress: Progress,
) -> tuple[str, Json]:
    """Do steps 4 and 5 of a deployment; return the deployer's ref and details."""
    deploy_id = req.deploy_id
    log.info("deployment %d started: model %d, deployer %s", deploy_id, req.model.id, deployer.name)
    # 4. fetch the files
    try:
        fetch_model_files(ctx, fetcher, req.model, req.dir, progress=progress)
    except TrainingError as error:
        if error.__cause__ and type(fetcher) is not SidecarClient:
            _log_traceback(deploy_id, error.__cause__)
        raise
    ctx.raise_if_cancelled()
    # 5. call the deployer
    try:
        return _call(deployer, ctx, req)
    finally:
        _warn_of_changes(ctx, deploy_id, progress.files)


class _Interrupted(Cancelled):
    """The outcome of a deployment for which a script waited until Ctrl-C interrupted it."""


def _abandonable(ctx: Context, work: Callable[[], T]) -> T | BaseException:
    """Run `work` in a thread of its own; return what it returns or raises.

    Nothing can end a deployer that ignores its context. So that its deployment is recorded when the
    server stops, this stops waiting then and returns Cancelled; what comes later is dropped.
    """
    outcome: list[T | BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:  # whatever it is, it is recorded
            # Its frames would keep open what the deployer had open, until the next collection.
            error.__cause__ = error.__context__ = None
            outcome.append(error.with_traceback(None))

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
        while thread.is_alive() and not ctx.abandoned:
            thread.join(LOOK_INTERVAL_S)
    except KeyboardInterrupt:  # a script deploys from its main thread
        ctx.cancel("interrupted")
        return _Interrupted(ctx.reason)
    except RuntimeError as error:  # no thread can be had
        return error
    return outcome[0] if outcome else Cancelled(ctx.reason)


def _judge(ctx: Context, outcome: tuple[str, Json] | BaseException) -> tuple[str, Json, str]:
    """Return the ref, the details and the error that are recorded for what the deployer did."""
    if not isinstance(outcome, BaseException):
        ref, details = outcome
        if not ctx.cancelled or ctx.reason == SERVER_STOPPING:  # it came within the grace
            return ref, details, ""
        return "", {}, _cut(f"{ctx.reason}; the deployer returned ref {ref}")
    error = _text_of(outcome)
    if ctx.cancelled:
        error = ctx.reason if isinstance(outcome, Cancelled) else f"{ctx.reason}: {error}"
    return "", {}, _cut(error)


def _finish(ctx: Context, store: _Store, deploy_id: int, *values: Any) -> Json:
    """Record how a deployment ended, trying again for a while; raises TrainingError("internal")."""
    begun = time.monotonic()
    while True:
        try:
            stored = store.finish_trained_model_deployment(deploy_id, *values)
            break
        except TrainingError as error:
            stopping = ctx.abandoned or ctx.reason == SERVER_STOPPING
            if time.monotonic() - begun > (STOP_GRACE_S if stopping else FINISH_TIMEOUT_S):
                raise
            log.warning("deployment %d is not recorded yet: %s", deploy_id, error)
            time.sleep(0.5)
    if stored is None:
        raise TrainingError("internal", "its model was deleted meanwhile")
    return stored


def _copy_of(model: TrainedModel) -> TrainedModel:
    """Return a copy for a deployer: what it changes in it reaches nobody else."""
    files = tuple(dataclasses.replace(file) for file in model.files)
    return dataclasses.replace(model, params=copy.deepcopy(model.params), files=files)


def _announce(
    system_event: SystemEventHook | None, status: str, event: Json, progress: Progress, ref: str
) -> None:
    """Log how a deployment ended, and call the hook; whatever that does changes nothing."""
    level, end, deploy_id = logging.INFO, f"ref {ref}", event["deploy_id"]
    if "error" in event:
        level, end = logging.WARNING, event["error"]
    text = "deployment {deploy_id} %s in {duration_ms} ms: model {model_id}, deployer {deployer}"
    log.log(level, f"{text.format(**event)}, %s, %.1000s", status, progress, end)
    try:
        if system_event is not None:
            system_event(SystemEvent(f"training.model_deploy.{status}", event))
    except BaseException as error:  # the border to foreign code
        log.error("the system event hook raised: %s", _text_of(error))
        _log_traceback(deploy_id, error)


def deploy_model(
    ctx: Context,
    store: _Store,
    fetcher: ModelFileFetcher | None,
    deployers: Sequence[TrainedModelDeployer],
    root: str | os.PathLike[str],
    model: TrainedModel,
    request: DeployRequest,
    *,
    system_event: SystemEventHook | None = None,
    running: MutableMapping[int, Progress] | None = None,
) -> Json:
    """Deploy a trained model, steps 2 to 7, and return the stored deployment, completed.

    `deployers` are those of `resolve_deployers`, `root` is the deployment directory, `running` holds
    the progress of each deployment while it is at work. Raises TrainingError: "invalid" or
    "unavailable" before anything is recorded; "upstream" when the fetch or the deployer failed, with
    the stored failure as `.deployment`; "internal" when the start or the end was not recorded.
    """
    begun = time.monotonic()
    # 2. find the deployer by name, check the options
    deployer = _find_deployer(deployers, request.deployer)
    options = _check_options(request.options)
    dir = model_dir(root, model)
    if fetcher is None:
        raise TrainingError("unavailable", "there is no active sidecar to fetch the files from")
    own = _copy_of(model)
    # 3. record the deployment
    deploy_id = store.record_trained_model_deployment(model.id, deployer.name, request.options)
    running = {} if running is None else running
    running[deploy_id] = progress = Progress(ctx)
    req = DeployTrainedModelRequest(deploy_id, own, dir, json.loads(options))
    # 4. fetch the files, and 5. call the deployer: see _fetch_and_call
    outcome = _abandonable(ctx, lambda: _fetch_and_call(ctx, fetcher, deployer, req, progress))
    ref, details, error = _judge(ctx, outcome)
    # 6. update the record
    status = "failed" if error else "completed"
    fetched = str(dir) if progress.complete else ""
    duration_ms = round((time.monotonic() - begun) * 1000)
    stored = None
    try:
        stored = _finish(ctx, store, deploy_id, status, fetched, ref, details, error, duration_ms)
        error = stored["error"]
    except TrainingError as failure:
        made = error or f"the deployer returned ref {ref}"
        error = _cut(_storable(f"deployment {deploy_id} is not recorded: {failure}; {made}"))
        status = "failed"
    finally:
        del running[deploy_id]
    # 7. emit the system event
    event: Json = {"model_id": model.id, "deploy_id": deploy_id, "deployer": deployer.name}
    event |= {"duration_ms": duration_ms} | ({"error": error} if error else {})
    _announce(system_event, status, event, progress, ref)
    if isinstance(outcome, _Interrupted):
        raise KeyboardInterrupt
    if error or stored is None:
        raise TrainingError("upstream" if stored else "internal", error, stored)
    return stored


# ---- page ----------------------------------------------------------------------------------------
# Knows the browser and the API: one static string, in which the server sets two attributes. Every
# text becomes a text node. May use: nothing.

PAGE = r"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Training · gligabao</title>
<style>
:root {
  color-scheme: light dark;
  --page: light-dark(#f5f6f8, #121418); --card: light-dark(#fff, #1b1e24); --line: light-dark(#dfe2e8, #31353e);
  --field: light-dark(#8a909c, #6d7380); --text: light-dark(#1b1e24, #e9ebef); --muted: light-dark(#5a616d, #a3a9b5);
  --accent: light-dark(#2a55c9, #9db8ff); --on-accent: light-dark(#fff, #101828);
  --chosen: light-dark(#edf2ff, #222c45);
  --good: light-dark(#14633a, #86dba9); --good-tint: light-dark(#e0f3e8, #16352a);
  --bad: light-dark(#a61f2b, #ffa3a3); --bad-tint: light-dark(#fce7e8, #43202a);
  --warn: light-dark(#754700, #f2c778); --warn-tint: light-dark(#fdeed3, #3b2d14);
  font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
}
* { box-sizing: border-box; }
[hidden], p:empty { display: none !important; }
body { max-width: 74rem; margin: 0 auto; padding: 2rem 1.5rem 4rem; overflow-wrap: anywhere; }
header { display: flex; align-items: baseline; gap: 1rem; margin-bottom: 1.25rem; }
h1 { margin: 0; font-size: 1.9rem; line-height: 1.25; letter-spacing: -.02em; }
h2 { margin: 0; font-size: 1.25rem; line-height: 1.35; }
h3 { margin: 0 0 .5rem; font-size: 1rem; }
p { margin: 0 0 .75rem; max-width: 68ch; }
pre, code, textarea { margin: 0; font: .8rem/1.6 ui-monospace, monospace; white-space: pre-wrap; }
.card, dialog { padding: 1.5rem; background: var(--card); border: 1px solid var(--line); border-radius: .75rem; }
.card { margin-bottom: 1.5rem; }
.card > h2 { margin-bottom: .75rem; }
.muted { color: var(--muted); }
.bad { color: var(--bad); }
.long { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 5; overflow: hidden; }
.bar { display: flex; flex-wrap: wrap; justify-content: space-between; align-items: start; gap: .75rem 1.5rem; }
.buttons { display: flex; gap: .5rem; }
.filter { display: flex; flex-wrap: wrap; align-items: baseline; gap: .25rem .75rem; margin-bottom: .5rem; }
.filter input { width: 18rem; }
#deployments details { display: inline-block; max-width: 100%; margin: .35rem 1rem 0 0; vertical-align: top; }
.again { margin-top: .25rem; padding: .1rem .6rem; font-size: .87rem; }
.banner { position: sticky; top: 0; z-index: 2; }
.banner p, .command { max-width: none; padding: .6rem 1rem; border-radius: .45rem; }
.banner p { color: var(--bad); background: var(--bad-tint); }
.command { background: var(--page); }

button, input, textarea { color: inherit; background: none; border: 1px solid var(--field); border-radius: .45rem; }
button { padding: .35rem .9rem; font: inherit; font-weight: 500; white-space: nowrap; cursor: pointer; }
button:hover { border-color: currentColor; }
button.primary:enabled { color: var(--on-accent); background: var(--accent); border-color: var(--accent); }
button.bad { color: var(--bad); }
button:disabled, [aria-disabled] { color: var(--muted); background: none; border-color: var(--line); cursor: default; }
input, textarea { display: block; width: 100%; margin: .25rem 0 .5rem; padding: .5rem .65rem; }
input { max-width: 28rem; }
[aria-invalid] { border-color: var(--bad); }
label, a { font-weight: 600; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
[tabindex="-1"] { outline: none; }

table, dl { font-size: .93rem; font-variant-numeric: tabular-nums; }
table { width: 100%; border-collapse: collapse; }
th, td { padding: .5rem 1.25rem .5rem 0; border-bottom: 1px solid var(--line); text-align: start; vertical-align: top; }
th { font-weight: 500; }
thead th { color: var(--muted); font-size: .87rem; white-space: nowrap; }
tr > :last-child { padding-right: 0; }
tbody tr:last-child > * { border-bottom: 0; }
[data-column=ID], [data-column=Size], [data-column=Files], [data-column=Duration] { text-align: end; }
[data-column=ID] { width: 1%; }
[data-column=Job] { width: 10%; }
[data-column=ID], [data-column=Size], [data-column=Files], time, [data-state] { white-space: nowrap; }
[data-state] { padding: .1rem .5rem; border-radius: .4rem; font-size: .85rem; font-weight: 600; }
[data-state] { color: var(--warn); background: var(--warn-tint); }
[data-state=completed], [data-state=ok] { color: var(--good); background: var(--good-tint); }
[data-state=failed] { color: var(--bad); background: var(--bad-tint); }
[data-state=running] { color: var(--accent); background: var(--chosen); }

#models { max-height: max(20rem, 45vh); margin: 0 -1.5rem -.75rem; overflow: auto; }
#models thead th { position: sticky; top: 0; background: var(--card); box-shadow: inset 0 -1px var(--line); }
#models tr > :first-child { padding-left: 1.5rem; }
#models tr > :last-child { padding-right: 1.5rem; }
#models tbody tr { cursor: pointer; }
#models tbody tr:hover, #models tr:has([aria-current]) { background: var(--chosen); }
#model-name { scroll-margin-bottom: 55vh; }
.columns { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 2fr); gap: 1.5rem 3rem; margin: 1.5rem 0; }
dl { display: grid; grid-template-columns: fit-content(40%) minmax(0, 1fr); gap: .3rem 1rem; margin: 0; }
dt { color: var(--muted); }
dd { margin: 0; max-width: 80ch; }
#deployers dt { color: inherit; font-weight: 600; }
summary { width: fit-content; color: var(--muted); font-size: .87rem; cursor: pointer; }
progress { display: block; width: 100%; max-width: 24rem; margin: .35rem 0; accent-color: var(--accent); }

dialog { width: min(42rem, 100vw - 2rem); max-height: calc(100dvh - 2rem); color: inherit; }
dialog::backdrop { background: rgb(10 12 16 / .6); }
dialog .bar { flex-wrap: nowrap; }
dialog > .bar { margin-bottom: 1rem; }
ul { margin: 0; padding: 0; list-style: none; }
li { padding: .9rem 0; border-top: 1px solid var(--line); }
li h3 { margin: 0; }
li [role=status]:not(:empty) { margin-top: .6rem; }

@media (max-width: 45rem) {
  body { padding: 1.25rem 1rem 3rem; }
  .card, dialog { padding: 1rem; }
  .columns { grid-template-columns: minmax(0, 1fr); }
  #models { max-height: 60vh; margin: 0 -1rem; }
  table, tbody, tr { display: block; }
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  tbody tr { padding: .75rem 0; border-bottom: 1px solid var(--line); }
  tbody tr:last-child { border-bottom: 0; }
  #models tbody tr { padding: .75rem 1rem; }
  tbody tr > [data-column] { display: block; width: auto; padding: .1rem 0 !important; border: 0; text-align: start; }
  tbody tr > :is(td, [data-column=ID]) { display: grid; grid-template-columns: 6rem minmax(0, 1fr); }
  tbody tr > :is(td, [data-column=ID])::before { content: attr(data-column); color: var(--muted); font-weight: 400; }
}
</style>
</head>
<body data-training="{training}" data-version="{version}">
<header>
  <h1>Training</h1>
  <span id="version" class="muted"></span>
  <button id="forget" hidden>Forget key</button>
</header>
<div class="banner" role="alert">
  <p id="lost" hidden>The server cannot be reached, so what you see may be out of date. Trying again every second.</p>
  <p id="problem"></p>
</div>
<main>
  <p id="loading" class="muted">Loading …</p>
  <section id="off" class="card" hidden>
    <h2>Training is off</h2>
    <p>Trained models are recorded and deployed only by a server that was started in training mode:</p>
    <pre class="command">python gligabao.py serve --training</pre>
  </section>
  <form id="key-form" class="card" hidden>
    <h2>This server asks for a key</h2>
    <p>The one it was started with, in <code>GLIGABAO_API_KEY</code>. It is kept until this tab is closed.</p>
    <label for="key">API key</label>
    <input id="key" type="password" autocomplete="current-password" required pattern="[ -~]+" aria-describedby="refused"
      title="Printable ASCII characters">
    <p id="refused" class="bad" role="alert"></p>
    <button class="primary">Continue</button>
  </form>
  <div id="view" hidden>
    <section class="card" aria-labelledby="models-title">
      <h2 id="models-title" tabindex="-1">Trained models</h2>
      <div id="filter-bar" class="filter" hidden>
        <label for="filter">Filter models</label>
        <input id="filter" type="search" autocomplete="off" spellcheck="false">
        <span id="filtered" class="muted" role="status"></span>
      </div>
      <div id="models"></div>
      <div id="no-models" hidden>
        <p>No trained model is recorded yet. This command records the one whose files the sidecar has in
          <code>trained/JOB_ID</code>:</p>
        <pre id="command" class="command"></pre>
      </div>
    </section>
    <section id="model" class="card" aria-label="Model actions" hidden>
      <div class="bar">
        <h2 id="model-name"></h2>
        <div class="buttons">
          <button id="audit">Audit</button>
          <button id="deploy" class="primary">Deploy</button>
          <button id="delete" class="bad">Delete</button>
        </div>
      </div>
      <div class="columns">
        <div><h3>Facts</h3><dl id="facts"></dl></div>
        <section id="files-region" aria-labelledby="files-title">
          <h3 id="files-title">Files</h3>
          <p id="audit-note" role="status"></p>
          <div id="files"></div>
        </section>
      </div>
      <section aria-labelledby="deployments-title">
        <h3 id="deployments-title">Deployments</h3>
        <div id="deployments"></div>
      </section>
    </section>
    <section class="card" aria-labelledby="deployers-title">
      <h2 id="deployers-title">Deployers</h2>
      <p id="no-deployers" hidden>No deployer is registered, so nothing can be deployed. A deployer is Python code,
        given to <code>gligabao.serve</code> as one of its <code>trained_model_deployers</code>.</p>
      <dl id="deployers"></dl>
    </section>
  </div>
</main>
<dialog id="deploy-dialog" aria-labelledby="deploy-title">
  <div class="bar"><h2 id="deploy-title" tabindex="-1" autofocus></h2><button data-close>Close</button></div>
  <label for="options">Options (JSON)</label>
  <textarea id="options" rows="2" spellcheck="false" aria-describedby="bad-options hint"></textarea>
  <p id="bad-options" class="bad"></p>
  <p id="hint" class="muted">A JSON object for the deployer, sent as typed; may be left empty.</p>
  <ul id="choices"></ul>
</dialog>
<dialog id="delete-dialog" aria-labelledby="delete-title">
  <div class="bar"><h2 id="delete-title"></h2></div>
  <p>The model goes, and with it the history of its deployments.
    Its files stay, on the sidecar and on the server's disk.</p>
  <p id="delete-error" class="bad" role="alert"></p>
  <div class="buttons">
    <button id="delete-now" class="bad">Delete</button>
    <button data-close autofocus>Cancel</button>
  </div>
</dialog>
<script>
"use strict";
const $ = id => document.getElementById(id);
let key = sessionStorage.getItem("gligabao-key") ?? "";
let models = [], deployers = [];
let chosen, model, deployments;  // the id in the address, as text; its model and history as soon as they are known
let choices = new Map();         // the dialog's entry of each deployer, by name
let underway = 0;                // deployments that this page waits for
let looks = 0;                   // counts the looks at a history: only the latest is shown
let again = false;               // the last look went wrong in a way that may pass
let paces = new Map();           // the last looks at each fetch, [seconds, bytes], by the deployment's id

// ---- Elements: every text becomes a text node ----

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value != null) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Gives `parent` this content, keeping each node that can stay: then focus, selection and opened details stay too. */
function patch(parent, ...content) {
  const wanted = [...h("div", {}, ...content).childNodes];
  wanted.forEach((node, at) => {
    const rest = [...parent.childNodes].slice(at);
    const old = rest.find(({nodeName, dataset}) => nodeName === node.nodeName && dataset?.key === node.dataset?.key);
    if (!old) return parent.insertBefore(node, rest[0] ?? null);
    while (parent.childNodes[at] !== old) parent.childNodes[at].remove();
    if (old.nodeValue !== node.nodeValue) old.nodeValue = node.nodeValue;
    if (node instanceof Text) return;
    for (const {name, value} of node.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    for (const name of old.getAttributeNames()) {
      if (name !== "open" && !node.hasAttribute(name)) old.removeAttribute(name);
    }
    patch(old, ...node.childNodes);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

/** A table from [key, {column: content}] rows, or these words without any; on a phone each cell shows its column. */
function table(name, rows, otherwise = "") {
  if (!rows.length) return h("p", {class: "muted"}, otherwise);
  const heads = Object.keys(rows[0][1]).map(column => h("th", {scope: "col", "data-column": column}, column));
  const cell = ([column, content], at) =>
    h(at ? "td" : "th", {scope: at ? null : "row", "data-column": column}, h("div", {}, ...[content].flat()));
  return h("table", {"aria-label": name}, h("thead", {}, h("tr", {}, ...heads)),
    h("tbody", {}, ...rows.map(([key, fields]) => h("tr", {"data-key": key}, ...Object.entries(fields).map(cell)))));
}

const pairs = fields => fields.flatMap(([name, content]) => [h("dt", {}, name), h("dd", {}, content)]);
const label = state => h("span", {"data-state": state}, state);
/** A text of which only the first lines show; the whole is shown elsewhere. */
const long = (text, tone = "") => h("div", {class: `long ${tone}`}, text);
/** What a deployment made: a link where it is a URL of the web and of nothing else. */
const link = ref => /^https?:\/\/\S+$/i.test(ref) ? h("a", {href: ref, target: "_blank", rel: "noreferrer"}, ref) : fact(ref);

// ---- Values ----

const NUMBER = new Intl.NumberFormat(undefined, {maximumFractionDigits: 1});
const TIME = new Intl.DateTimeFormat(undefined, {dateStyle: "medium", timeStyle: "short"});

/** Keeps a number that JavaScript would write otherwise (9007199254740993, 1.0) as it came, where the browser can. */
function exact(name, value, context) {
  const changed = typeof value === "number" && context?.source && context.source !== String(value);
  return changed ? JSON.rawJSON(context.source) : value;
}

const plain = value => value?.rawJSON ?? String(value ?? "");
const titleOf = ({name, job_id}) => plain(name).trim() || job_id;
const fact = value => plain(value) || "–";
const count = value => NUMBER.format(plain(value));
const fileCount = number => `${count(number)} file${number === 1 ? "" : "s"}`;
const json = value => Object.keys(value).length ? h("pre", {}, JSON.stringify(value, null, 2)) : "–";

function bytes(value) {
  let size = Number(plain(value)), power = 0;
  for (; size >= 999.95 && power < 5; power++) size /= 1000;
  return `${NUMBER.format(size)} ${["B", "kB", "MB", "GB", "TB", "PB"][power]}`;
}

function duration(ms) {
  if (ms < 1000) return `${ms} ms`;
  if (ms < 60_000) return `${NUMBER.format(ms / 1000)} s`;
  const minutes = Math.floor(ms / 60_000), hours = Math.floor(minutes / 60);
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${Math.floor(ms / 1000) % 60} s`;
}

function time(iso) {
  const date = new Date(iso ?? NaN);
  return isNaN(date) ? fact(iso) : h("time", {datetime: iso, title: iso}, TIME.format(date));
}

// ---- The server ----

/** The API's answer, or an Error in words: `lost` without answer, `unclear` without a proper one, else its `status`. */
async function ask(method, path, body) {
  const used = key, headers = used ? {Authorization: `Bearer ${used}`} : {};
  let response, answer;
  try {
    response = await fetch(`v1/gb/training/${path}`, {method, headers, body});
    answer = await response.text();
  } catch {
    $("lost").hidden = false;
    throw Object.assign(new Error("The connection to the server was lost."), {lost: true, unclear: true});
  }
  $("lost").hidden = true;
  const {ok, status} = response;
  if (status === 401 && used === key) lock();
  try {
    answer = answer && JSON.parse(answer, exact);
  } catch {
    throw Object.assign(new Error(`The answer, with status ${status}, is no JSON.`), {unclear: true});
  }
  if (ok) return answer;
  const text = answer?.error || `The server answered with status ${status}.`;
  throw Object.assign(new Error(text), {status, deployment: answer?.deployment});
}

/** Takes a look at the server, and says in the banner what is wrong. No dialog is pulled away when its model goes. */
async function attempt(look) {
  const looking = look(), id = chosen;
  try {
    await looking;
    again = false;
    $("problem").textContent = "";
  } catch (error) {
    again = !(error.status < 500);
    $("problem").textContent = error.lost || error.status === 401 ? "" : error.message;
    if (error.status === 404 && !document.querySelector("dialog[open]")) drop(id);
  }
}

async function load() {
  [{models}, {deployers}] = await Promise.all([ask("GET", "models?limit=500"), ask("GET", "deployers")]);
  showPart("view");
  $("forget").hidden = !key;
  showModels();
  $("no-deployers").hidden = deployers.length > 0;
  $("deploy").disabled = !deployers.length;
  patch($("deployers"), ...pairs(deployers.map(({name, description}) => [name, fact(description)])));
  await choose();
}

/** Shows the model that the address names, if it names one. */
async function choose() {
  const id = location.hash.match(/^#model=(\d+)$/)?.[1];
  if (id !== chosen) {
    chosen = id;
    showModel();
    showModels();
  }
  const found = models.find(listed => plain(listed.id) === id) ?? (id && await ask("GET", `models/${id}`));
  if (id !== chosen || !id) return;
  if (!model) showModel(found);
  await follow();
}

/** Reads the history of the chosen model. */
async function follow() {
  const look = ++looks, id = chosen;
  const answer = await ask("GET", `models/${id}/deployments`);
  if (look !== looks || id !== chosen) return;
  ({deployments} = answer);
  showDeployments();
}

/** Looks once a second while something runs or is wrong; never two looks at once, however slow they are. */
async function tick() {
  if (!document.hidden && $("key-form").hidden) {
    if (again || !$("lost").hidden) await attempt(load);
    else if (model && (underway || deployments?.some(({status}) => status === "running"))) await attempt(follow);
  }
  setTimeout(tick, 1000);
}

// ---- The key ----

const keepKey = value => sessionStorage.setItem("gligabao-key", key = value);

function lock() {
  $("refused").textContent = key && "The server refused this key.";
  keepKey("");
  closeDialogs();
  showPart("key-form");
  $("key").focus();
}

// ---- The view ----

function showPart(id) {
  for (const part of document.querySelector("main").children) part.hidden = part.id !== id;
}

function showModels() {
  const url = new URL("v1/gb/training/models", document.baseURI);
  const authorization = key && `-H "Authorization: Bearer $GLIGABAO_API_KEY" `;
  $("command").textContent = `curl ${authorization}-d '{"job_id": "JOB_ID"}' ${url}`;
  $("no-models").hidden = models.length > 0;
  $("models").hidden = !models.length;
  patch($("models"), table("Trained models", models.map(modelRow)));
  if ($("filter-bar").hidden = models.length < 20) $("filter").value = "";
  filter();
}

/** Shows the rows of whose name, job or base model the typed text is a part; the chosen model stays chosen. */
function filter() {
  const part = $("filter").value.toLowerCase();
  const found = models.filter(model => [titleOf(model), model.job_id, model.base_model].some(
    text => plain(text).toLowerCase().includes(part)));
  const ids = new Set(found.map(({id}) => plain(id)));
  for (const row of $("models").querySelectorAll("tbody tr")) row.hidden = !ids.has(row.dataset.key);
  $("filtered").textContent = part && `${count(found.length)} of ${count(models.length)} models`;
}

function modelRow({id, name, job_id, base_model, model_size, files, created_at}) {
  id = plain(id);
  const total = files.reduce((sum, {size_bytes}) => sum + Number(plain(size_bytes)), 0);
  return [id, {
    Name: h("a", {href: `#model=${id}`, "aria-current": id === chosen ? "true" : null}, titleOf({name, job_id})),
    ID: id,
    Job: fact(job_id),
    "Base model": fact(base_model),
    "Model size": fact(model_size),
    Files: `${fileCount(files.length)}, ${bytes(total)}`,
    Recorded: time(created_at),
  }];
}

/** Shows this model instead of the one before, of whose answers, dialogs and options nothing stays; or none. */
function showModel(found) {
  model = found;
  deployments = undefined;
  choices = new Map();
  paces = new Map();
  closeDialogs();
  $("audit").ariaDisabled = $("files-region").ariaBusy = null;
  $("options").value = "";
  clearBadOptions();
  $("model").hidden = !model;
  if (!model) return;
  $("model-name").textContent = titleOf(model);
  patch($("facts"), ...pairs([
    ["ID", plain(model.id)], ["Job", fact(model.job_id)], ["Base model", fact(model.base_model)],
    ["Model size", fact(model.model_size)], ["Dataset", fact(model.dataset)], ["Examples", count(model.num_examples)],
    ["Steps", count(model.num_train_steps)], ["Final loss", fact(model.final_loss)], ["Parameters", json(model.params)],
    ["Path", fact(model.path)], ["Recorded", time(model.created_at)],
  ]));
  showFiles("");
  patch($("deployments"), h("p", {class: "muted"}, "Loading …"));
}

/** Takes a model that is gone off the page. */
function drop(gone) {
  models = models.filter(({id}) => plain(id) !== gone);
  if (gone === chosen) {
    history.replaceState(null, "", location.pathname + location.search);
    chosen = undefined;
    showModel();
  }
  showModels();
}

function showFiles(note, audited = []) {
  $("audit-note").textContent = note;
  const states = new Map(audited.map(({path, state}) => [path, label(state)]));
  patch($("files"), table("Files", model.files.map(({path, size_bytes, sha256}) => [path, {
    File: [path, h("div", {}, h("code", {class: "muted"}, sha256 || "no sha256 recorded"))],
    Size: bytes(size_bytes),
    "On disk": states.get(path) ?? "–",
  }]), "None are recorded."));
}

function showDeployments() {
  patch($("deployments"), table("Deployments", deployments.map(deployment => [plain(deployment.id), {
    ID: plain(deployment.id),
    Status: label(deployment.status),
    Deployer: deployment.deployer,
    Outcome: deployment.status === "running" ? progress(deployment) : outcome(deployment),
    Duration: deployment.status === "running" ? "–" : duration(deployment.duration_ms),
    Started: time(deployment.created_at),
  }]), "None yet."));
}

function outcome({id, ref, error, options, details, dir, completed_at}) {
  const more = pairs([
    ["Ref", link(ref)], ["Details", json(details)], ["Error", fact(error)], ["Options", json(options)],
    ["Directory", fact(dir)], ["Ended", time(completed_at)],
  ]);
  const short = error ? long(error, "bad") : long(link(ref));
  const repeat = h("button", {class: "again", "data-again": plain(id)}, "Deploy again");
  return [short, h("details", {}, h("summary", {}, "More"), h("dl", {}, ...more)), repeat];
}

/** The speed of a fetch and the time left, as the last looks at it tell; "" before the second. */
function pace(id, done, total) {
  const looks = [...paces.get(id) ?? [], [performance.now() / 1000, done]].slice(-10);
  paces.set(id, looks);
  const [since, before] = looks[0], speed = (done - before) / (looks.at(-1)[0] - since);
  return speed > 0 ? `, ${bytes(speed)}/s, ${duration(Math.ceil((total - done) / speed) * 1000)} left` : "";
}

function progress({id, progress, created_at}) {
  const name = `Progress of deployment ${plain(id)}`;
  if (!progress) return [h("progress", {"aria-label": name}), "since ", time(created_at)];
  const {bytes_done, bytes_total, files_done, files_total, report} = progress;
  if (report) {
    const fraction = report.fraction && plain(report.fraction);
    return [h("progress", {"aria-label": name, value: fraction}), plain(report.text) || "the deployer is working"];
  }
  const words = files_done === files_total
    ? `${bytes(bytes_total)} in ${fileCount(files_total)}: the deployer is working`
    : `${bytes(bytes_done)} of ${bytes(bytes_total)}, ${count(files_done)} of ${fileCount(files_total)}`
      + pace(plain(id), Number(plain(bytes_done)), Number(plain(bytes_total)));
  return [h("progress", {"aria-label": name, value: bytes_done, max: bytes_total || 1}), words];
}

// ---- Actions ----

/** Calls `act` at a press of the button, unless it still works. A double click is one press, so is a key held down. */
function onPress(button, act) {
  button.addEventListener("keydown", event => event.repeat && event.key === "Enter" && event.preventDefault());
  button.addEventListener("click", async ({detail}) => {
    if (detail > 1 || button.ariaDisabled) return;
    button.ariaDisabled = "true";
    button.focus();  // Safari does not; a closing dialog gives the focus back to what had it
    await act();
    button.ariaDisabled = null;
  });
}

async function audit() {
  const id = chosen;
  const show = (...shown) => id === chosen && showFiles(...shown);
  $("files-region").ariaBusy = "true";
  show("Reading the server's disk …");
  try {
    const {dir, complete, files, bytes_to_fetch, bytes_free, fits} = await ask("GET", `models/${id}/audit`);
    const room = `${bytes(bytes_free)} free there: they ${fits ? "fit" : "do not fit"}`;
    const missing = `${bytes(bytes_to_fetch)} to fetch into ${dir}, ${room}.`;
    show(complete ? `Every file is in ${dir}, as recorded.` : missing, files);
  } catch (error) {
    show(error.lost ? "" : error.message);
  }
  $("files-region").ariaBusy = null;
}

/** Opens the dialog; with the options of an earlier deployment typed in, and at its deployer, to deploy again. */
function openDeploy(earlier) {
  $("deploy-title").textContent = `Deploy ${titleOf(model)}`;
  for (const deployer of deployers) if (!choices.has(deployer.name)) choices.set(deployer.name, newChoice(deployer));
  $("choices").replaceChildren(...deployers.map(({name}) => choices.get(name)));
  $("deploy-dialog").showModal();
  if (!earlier) return;
  const {options, deployer} = earlier, given = Object.keys(options).length;
  $("options").value = given ? JSON.stringify(options) : "";
  clearBadOptions();
  (choices.get(deployer)?.querySelector("button") ?? $("deploy-title")).focus({focusVisible: true});
}

function newChoice({name, description}) {
  const title = h("h3", {id: `choice-${name}`}, name);
  const button = h("button", {"aria-describedby": title.id}, "Deploy");
  const status = h("div", {role: "status"});
  onPress(button, () => deploy(name, status));
  const bar = h("div", {class: "bar"}, h("div", {}, title, long(description, "muted")), button);
  return h("li", {}, bar, status);
}

async function deploy(deployer, status) {
  const id = chosen, options = typedOptions();
  if (options === undefined) return;
  patch(status, label("running"));
  underway++;
  try {
    const body = `{"deployer":${JSON.stringify(deployer)}${options && `,"options":${options}`}}`;
    patch(status, ...result(await ask("POST", `models/${id}/deployments`, body)));
  } catch (error) {
    const doubt = error.unclear ? " The deployment may still have run; see Deployments." : "";
    patch(status, ...error.deployment ? result(error.deployment) : [long(error.message + doubt, "bad")]);
  }
  underway--;
  if (id === chosen) attempt(follow);
}

const result = ({status, ref, error, duration_ms}) =>
  [label(status), " ", h("span", {class: "muted"}, duration(duration_ms)), error ? long(error, "bad") : long(ref && link(ref))];

/** The options as typed, "" for none; undefined when they are no JSON object, which is then said at the field. */
function typedOptions() {
  const text = $("options").value.trim();
  let reason = "it is something else.";
  try {
    if (!text || JSON.parse(text) && text.startsWith("{")) return text;
  } catch (error) {
    reason = error.message;
  }
  $("bad-options").textContent = `This is no JSON object: ${reason}`;
  $("options").ariaInvalid = "true";
  $("options").focus();
}

function clearBadOptions() {
  $("options").ariaInvalid = null;
  $("bad-options").textContent = "";
}

function openDelete() {
  $("delete-title").textContent = `Delete ${titleOf(model)}`;
  $("delete-error").textContent = "";
  $("delete-dialog").showModal();
}

async function remove() {
  const id = chosen;
  try {
    await ask("DELETE", `models/${id}`);
    drop(id);
    $("models-title").focus();
  } catch (error) {
    $("delete-error").textContent = error.message;
  }
}

function closeDialogs() {
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
}

onPress($("audit"), audit);
onPress($("deploy"), openDeploy);
onPress($("delete"), openDelete);
onPress($("delete-now"), remove);
for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", closeDialogs);
$("forget").addEventListener("click", () => {
  keepKey("");
  location.reload();
});
$("key-form").addEventListener("submit", event => {
  event.preventDefault();
  keepKey($("key").value);
  $("key").value = $("refused").textContent = "";
  attempt(load);
});
$("options").addEventListener("input", clearBadOptions);
$("filter").addEventListener("input", filter);
$("filter").addEventListener("keydown", ({key}) => {
  if (key !== "Escape") return;
  $("filter").value = "";
  filter();
});
$("deployments").addEventListener("click", ({target}) => {
  const id = target.dataset.again;
  if (id) openDeploy(deployments.find(made => plain(made.id) === id));
});
$("models").addEventListener("click", ({target}) => {
  const row = target.closest("tbody tr");
  if (row && !target.closest("a")) location.hash = `model=${row.dataset.key}`;
});
addEventListener("beforeunload", event => underway && event.preventDefault());

$("version").textContent = `gligabao ${document.body.dataset.version}`;
if (document.body.dataset.training === "on") {
  addEventListener("hashchange", () => {
    attempt(choose);
    $("model-name").scrollIntoView({block: "nearest"});
  });
  addEventListener("focus", () => $("key-form").hidden && attempt(load));
  attempt(load).then(tick);
} else {
  showPart("off");
}
</script>
</body>
</html>
"""

# ---- HTTP ----------------------------------------------------------------------------------------
# Knows routes and their forms in JSON. May use: page, deployment, fetch, sidecar, store, deployers,
# wire, types.


def _csp_hash(tag: str) -> str:
    """Return the directive of a Content-Security-Policy that allows the page's own element."""
    element = PAGE.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    digest = base64.b64encode(hashlib.sha256(element.encode()).digest()).decode()
    return f"{tag}-src 'sha256-{digest}'"


@functools.lru_cache(500)  # as many as one answer may have
def _kept_text(row: tuple[Any, ...]) -> str:
    return _json_text(_deployment_from(row))


def _deployment_text(row: tuple[Any, ...]) -> str:
    """Return a row as JSON. That of short rows is kept, since a page asks for them each second."""
    _, _, _, options, _, dir, ref, details, error, *_ = row
    short = len(f"{options}{dir}{ref}{details}{error}") < 2000
    return (_kept_text if short else _kept_text.__wrapped__)(row)


def _model_json(model: TrainedModel) -> Json:
    return {**vars(model), "files": [vars(file) for file in model.files]}


@dataclasses.dataclass
class _API:
    """What the server answers, from its store, its sidecar and its deployers."""

    store: _Store
    sidecar: SidecarClient | None
    deployers: Sequence[TrainedModelDeployer]
    root: Path
    system_event: SystemEventHook | None
    # The deployments at work here, by id. A single operation on a dict needs no lock.
    running: dict[int, Progress] = dataclasses.field(default_factory=dict)

    def routes(self, *, training: bool) -> Routes:
        """Return the table of routes; those of training only where it is on."""
        headers = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": "default-src 'none'; connect-src 'self'; base-uri 'none';"
            " form-action 'none'; frame-ancestors 'none'; img-src data:;"
            f" {_csp_hash('style')}; {_csp_hash('script')}",
        }
        page = PAGE.replace("{training}", "on" if training else "off", 1)
        body = page.replace("{version}", __version__, 1).encode()
        public: Routes = (
            ("/", {"GET": lambda request: _Answer(302, b"", {"Location": "admin"})}),
            ("/admin", {"GET": lambda request: _Answer(200, body, headers)}),
            ("/health", {"GET": _health}),
        )
        base, model = "/v1/gb/training", "/v1/gb/training/models/([^/]+)"
        if not training:
            return public
        return (
            *public,
            (f"{base}/models", {"GET": self.list_models, "POST": self.record_model}),
            (model, {"GET": self.get_model, "DELETE": self.delete_model}),
            (f"{model}/audit", {"GET": self.audit}),
            (f"{model}/deployments", {"GET": self.list_deployments, "POST": self.deploy}),
            (f"{base}/deployers", {"GET": self.list_deployers}),
        )

    def _number(self, id: str) -> int:
        if not re.fullmatch("[1-9][0-9]{0,18}", id) or int(id) not in _WHOLE:
            raise _Refusal(404, f"there is no trained model {id[:80]}")
        return int(id)

    def _model(self, id: str) -> TrainedModel:
        model = self.store.get_trained_model(self._number(id))
        if model is None:
            raise _Refusal(404, f"there is no trained model {id}")
        return model

    def _limit(self, request: _Handler) -> int:
        limit = request.parameter("limit")
        if limit is None:
            return 100
        digits = limit.lstrip("0")
        if not re.fullmatch("[0-9]+", digits):
            raise _Refusal(400, f"limit must be a whole number from 1, not {limit!r:.80}")
        return min(int(digits[:4]), 500)

    def list_models(self, request: _Handler) -> _Answer:
        """Answer with the newest models, or with that of one job."""
        limit, job_id = self._limit(request), request.parameter("job_id")
        models = self.store.list_trained_models(limit, job_id)
        return _json_answer(200, {"models": [_model_json(model) for model in models]})

    def record_model(self, request: _Handler) -> _Answer:
        """Record a trained model."""
        body = request.read_json()
        with request.watched() as ctx:
            model = record_model(ctx, self.store, self.sidecar, body)
        if model is None:
            told: Json = {"error": f"the job {body['job_id']} is recorded already"}
            for stored in self.store.list_trained_models(1, body["job_id"]):
                told["model"] = _model_json(stored)
            return _json_answer(409, told)
        return _json_answer(201, _model_json(model))

    def get_model(self, request: _Handler, id: str) -> _Answer:
        """Answer with one model."""
        return _json_answer(200, _model_json(self._model(id)))

    def delete_model(self, request: _Handler, id: str) -> _Answer:
        """Delete a model and its deployments; its files stay."""
        if not self.store.delete_trained_model(self._model(id).id):
            raise _Refusal(404, f"there is no trained model {id}")
        return _Answer(204)

    def audit(self, request: _Handler, id: str) -> _Answer:
        """Answer with the state of a model's files on the disk."""
        model = self._model(id)
        with request.watched() as ctx:
            return _json_answer(200, audit_model(ctx, self.root, model))

    def list_deployments(self, request: _Handler, id: str) -> _Answer:
        """Answer with the model's newest deployments; those at work here with their progress."""
        try:
            limit = self._limit(request)
        except _Refusal:
            self._model(id)  # an unknown model is told first
            raise
        rows, texts = self.store.deployment_rows(self._number(id), limit), []
        if not rows:
            self._model(id)
        for row in rows:
            text = _deployment_text(row)
            deploy_id, _, _, _, status, *_ = row
            if status == "running" and (progress := self.running.get(deploy_id)):
                text = f'{text[:-1]},"progress":{_json_text(progress.figures())}}}'
            texts.append(text)
        return _text_answer(200, f'{{"deployments":[{",".join(texts)}]}}')

    def deploy(self, request: _Handler, id: str) -> _Answer:
        """Deploy a model, and answer when that has ended."""
        model = self._model(id)  # 1. look up the trained model
        body = request.read_json()
        if not isinstance(body, dict):
            text = 'the body must be a JSON object like {"deployer": "<name>", "options": {…}}'
            raise _Refusal(400, text)
        with request.watched() as ctx:
            deployment = deploy_model(
                *(ctx, self.store, self.sidecar, self.deployers, self.root, model),
                DeployRequest(body.get("deployer"), body.get("options")),  # type: ignore[arg-type]
                system_event=self.system_event,
                running=self.running,
            )
        return _json_answer(200, deployment)  # 8. answer; a failure's is made by _error_answer

    def list_deployers(self, request: _Handler) -> _Answer:
        """Answer with the registered deployers."""
        listed = [{"name": one.name, "description": one.description} for one in self.deployers]
        return _json_answer(200, {"deployers": listed})


# ---- server --------------------------------------------------------------------------------------
# Knows options, starting, wiring and stopping; signals for `serve`, no argv. May use: all above.


class Server:
    """The server, which serves at `url`, in background threads, while a `with` block lasts.

    Raises ValueError or TypeError for bad options, OSError for the address and the disk, the driver's
    error for the database, and then nothing stays open. Leaving the block cancels what runs, waits for it up
    to STOP_GRACE_S, and leaves every deployment of this server recorded. The options are `serve`'s.
    """

    url: str

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 7878,
        database: str | os.PathLike[str] = "build/gligabao.db",
        training: bool = False,
        sidecar: str | os.PathLike[str] | None = None,
        sidecar_token: str | None = None,
        trained_model_deploy_dir: str | os.PathLike[str] | None = None,
        api_key: str | None = None,
        trained_model_deployers: Registry | None = None,
        system_event: SystemEventHook | None = None,
    ) -> None:
        self._deployers = resolve_deployers(trained_model_deployers)
        if type(port) is not int or not 0 <= port <= 65535:
            raise ValueError(f"the port {port} is no number from 0 (any free port) to 65535")
        self._host, self._port, self._training = host, port, training
        self._database, self._sidecar = os.fspath(database), os.fspath(sidecar or "")
        self._token = _secret(sidecar_token, "the sidecar's token")
        self._key, self._system_event = _secret(api_key, "the API key"), system_event
        self._is_url = "://" in self._database
        beside = Path("build" if self._is_url else Path(database).parent, "trained_models")
        self._root = Path(os.path.abspath(trained_model_deploy_dir or beside))
        if "://" in self._sidecar:
            _check_url(self._sidecar, "the sidecar's URL")
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as held:
            sidecar = self._open_sidecar(held)
            store = held.enter_context(contextlib.closing(open_store(self._database)))
            api = _API(store, sidecar, self._deployers, self._root, self._system_event)
            routes = api.routes(training=self._training)
            http_server = _HTTPServer(self._host, self._port, routes, self._key, "/v1/")
            self.url = held.enter_context(http_server).url
            self._log_start()
            self._held.push(held.pop_all())
        return self

    def _log_start(self) -> None:
        training = "on" if self._training else "off, see --training"
        log.info("the page is %s/admin, training is %s", self.url, training)
        records = "PostgreSQL" if self._is_url else os.path.abspath(self._database)
        log.info("records go to %s, files to %s", records, self._root)
        for deployer in self._deployers:
            log.info("deployer %s: %s", deployer.name, deployer.description or "no description")
        if not self._deployers:
            log.info("no deployer is registered: deployments are refused")

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _open_sidecar(self, held: contextlib.ExitStack) -> SidecarClient | None:
        """Return the client of the sidecar, one of our own where a directory was given."""
        if not self._sidecar:
            return None
        if "://" in self._sidecar:
            return SidecarClient(self._sidecar, self._token)
        routes, token = _SidecarDirectory(self._sidecar).routes(), os.urandom(16).hex()
        own = held.enter_context(_HTTPServer("127.0.0.1", 0, routes, token, ""))
        return SidecarClient(own.url, token)


@contextlib.contextmanager
def _until_stopped(stop: threading.Event | None = None) -> Iterator[Callable[[], None]]:
    """Yield a function that waits until SIGINT or SIGTERM has come, or `stop` is set.

    Until the block ends, further signals change nothing.
    """
    stop = stop or threading.Event()
    caught: list[int] = []  # to set the event in a handler could wait for a lock its waiter holds
    handlers: dict[int, Any] = {}
    own = os.getpid()

    def catch(number: int, _: object) -> None:
        if os.getpid() == own:
            caught.append(number)
        else:  # this is a process that a deployer forked, and is asked to end
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    if threading.current_thread() is threading.main_thread():
        for which in (signal.SIGINT, signal.SIGTERM):
            handlers[which] = signal.signal(which, catch)

    def wait() -> None:
        while not caught and not stop.wait(LOOK_INTERVAL_S):
            pass
        log.info(SERVER_STOPPING)

    try:
        yield wait
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def serve(*, stop: threading.Event | None = None, **options: Any) -> None:
    """Serve until SIGINT, SIGTERM or `stop`; then stop as `Server` does.

    Options: `host`, `port` (0: any free one), `database` (a path or a postgresql:// URL),
    `training`, `sidecar` (a URL, or a directory to serve), `sidecar_token`,
    `trained_model_deploy_dir`, `api_key`, `trained_model_deployers` (an iterable of
    TrainedModelDeployer, or a mapping of name to function) and `system_event` (called with each
    SystemEvent). Outside the main thread no signal handler is installed. Raises what `Server` does.
    """
    with _until_stopped(stop) as wait, Server(**options):
        wait()


# ---- command line --------------------------------------------------------------------------------
# Knows argv, the environment, the terminal and exit codes. May use: server and all above.


def _number(text: str, least: int = 0, most: int = 65535) -> int:
    if not re.fullmatch("[0-9]{1,18}", text) or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no number from {least} to {most}")
    return int(text)


def _server_url(text: str) -> str:
    try:
        return _check_url(text, "the server's URL")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _object(text: str) -> str:
    try:
        if isinstance(_decode_json(os.fsencode(text)), dict):
            return text
        raise ValueError("it is another value")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no JSON object: {error}") from None


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--version", action="version", version=f"gligabao {__version__}")
    parser = argparse.ArgumentParser(
        prog="gligabao",
        parents=[common],
        description="Hand trained models to your own code: fetch, verify, deploy, record.",
        epilog="Deployers are code: register them with gligabao.main(trained_model_deployers=...).",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str, epilog: str = "") -> Callable[..., object]:
        words: Json = {"help": help, "description": help, "epilog": epilog}
        made = commands.add_parser(name, parents=[common], **words)
        # A flag that is absent leaves no value, so that an option of `main` keeps its own.
        return functools.partial(made.add_argument, default=argparse.SUPPRESS)

    environment = "Keys come from the environment: GLIGABAO_API_KEY, GLIGABAO_SIDECAR_TOKEN."
    add = command("serve", "Serve the API and the page.", environment)
    add("--host", help="address to serve on; others than loopback need a key (127.0.0.1)")
    add("--port", type=_number, help="port to serve on, 0 for any free one (7878)")
    add("--database", help="SQLite file or postgresql:// URL (build/gligabao.db)")
    add("--training", action="store_true", help="switch the training API on")
    add("--sidecar", help="URL of a sidecar, or a directory with trained/<job id>/ in it")
    add("--trained-model-deploy-dir", metavar="DIR", help="for fetched files (beside the database)")
    environment = "The token that requests need comes from GLIGABAO_SIDECAR_TOKEN."
    add = command("sidecar", "Serve a directory of models as a sidecar.", environment)
    add("directory", metavar="DIR", help="directory with trained/<job id>/ in it")
    add("--host", help="address to serve on; others than loopback need a token (127.0.0.1)")
    add("--port", type=_number, help="port to serve on, 0 for any free one (7879)")

    def client(name: str, help: str, *words: str, codes: str = "") -> Callable[..., object]:
        add = command(name, help, f"{codes}The key comes from the environment: GLIGABAO_API_KEY.")
        if "model" in words:
            add("model", metavar="MODEL", help="its id, or its job: my-job, or job:123 for digits")
        if "limit" in words:
            limit = functools.partial(_number, least=1, most=500)
            add("--limit", type=limit, metavar="N", help="how many of the newest, to 500 (100)")
        if "json" in words:
            add("--json", action="store_true", help="print the server's answer instead of a table")
        add("--url", type=_server_url, help="where the server is (http://127.0.0.1:7878)")
        return add

    add = client("record", "Record the trained model of a job; print it as JSON.")
    add("job_id", metavar="JOB_ID", help="its files are those that the sidecar has of this job")
    add("--facts", metavar="JSON", type=_object, help="JSON object of base_model, final_loss, ...")
    client("models", "List the trained models, the newest first.", "limit", "json")
    client("deployers", "List the deployers that the server has.", "json")
    text = "Ask a server for a deployment, wait for it, print it as JSON."
    codes = "Exits 0 when it completed, 1 when it failed. "
    add = client("deploy", text, "model", codes=codes)
    add("deployer", metavar="DEPLOYER", help="name of a registered deployer")
    add("--options", metavar="JSON", type=_object, help="JSON object for the deployer")
    client("history", "List a model's deployments, the newest first.", "model", "limit", "json")
    codes = "Exits 0 when all are right, 1 when not. "
    client("audit", "Check a model's files on the server's disk.", "model", "json", codes=codes)
    add = command("demo", "Deploy a small model here, in a temporary directory that is removed.")
    add("--once", action="store_true", help="deploy once, print the record, and end")
    add("--port", type=_number, help="port to serve on (7878, or any free one)")
    return parser


def _run_sidecar(options: Json) -> int:
    token = _secret(os.environ.get("GLIGABAO_SIDECAR_TOKEN"), "GLIGABAO_SIDECAR_TOKEN")
    routes = _SidecarDirectory(options["directory"]).routes()
    host, port = options.get("host", "127.0.0.1"), options.get("port", 7879)
    with _until_stopped() as wait, _HTTPServer(host, port, routes, token, "") as server:
        who = "who has the token" if token else "this machine"
        log.info("the sidecar serves %s at %s to %s", options["directory"], server.url, who)
        wait()
    return 0


def _make_adapter(directory: Path) -> list[Json]:
    """Write a small valid LoRA adapter, as PEFT would save one; return the list of its files."""
    rank, width, tensors, size = 4, 32, {}, 0
    for side, shape in (("A", [rank, width]), ("B", [width, rank])):
        for target in ("query", "value"):
            name = f"base_model.model.encoder.layer.0.attention.self.{target}.lora_{side}.weight"
            end = size + 4 * rank * width
            tensors[name] = {"dtype": "F32", "shape": shape, "data_offsets": [size, end]}
            size = end
    header = json.dumps(tensors).encode()
    header += b" " * (-len(header) % 8)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    config["base_model_name_or_path"] = "sentence-transformers/all-MiniLM-L6-v2"
    config["target_modules"] = ["query", "value"]
    words = {"type": "WordLevel", "vocab": {"[UNK]": 0, "hello": 1}, "unk_token": "[UNK]"}
    contents = {
        "adapter_model.safetensors": len(header).to_bytes(8, "little") + header + bytes(size),
        "adapter_config.json": json.dumps(config, indent=2).encode(),
        "tokenizer.json": json.dumps({"version": "1.0", "model": words}, indent=2).encode(),
        "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast"}',
    }
    directory.mkdir(parents=True)
    for path, content in contents.items():
        directory.joinpath(path).write_bytes(content)
    return [
        {"path": path, "size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for path, content in contents.items()
    ]


def _release_deployer(releases: Path) -> DeployTrainedModelFunc:
    def release(ctx: Context, req: DeployTrainedModelRequest) -> DeployTrainedModelResult:
        """Copy the files to a release folder of their own, and switch the link `current` to it."""
        target = releases / f"deploy-{req.deploy_id}"
        shutil.copytree(req.dir, target)
        link = releases / f".current-{req.deploy_id}"
        link.symlink_to(target.name)
        link.replace(releases / "current")
        return DeployTrainedModelResult(ref=str(target), details={"files": len(req.model.files)})

    return release


def _bytes(count: object) -> str:
    if not isinstance(count, int | float):  # a row that another program wrote may hold anything
        return ""
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while count >= 999.95 and (larger := next(units, "")):
        count, unit = count / 1000, larger
    return f"{count:.1f}".removesuffix(".0") + f" {unit}"


def _duration(ms: int) -> str:
    if ms < 60_000:
        return f"{ms} ms" if ms < 1000 else f"{ms / 1000:.1f}".removesuffix(".0") + " s"
    minutes, hours = ms // 60_000, ms // 3_600_000
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {ms // 1000 % 60} s"


def _time(text: str) -> str:
    with contextlib.suppress(
        ValueError, OverflowError
    ):  # a row that another program wrote may hold no time
        text = f"{datetime.datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M}"
    return text


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes, as far as Unicode's tables tell."""
    flat = sum(unicodedata.category(letter) in ("Mn", "Me", "Cf") for letter in text)
    return len(text) - flat + sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)


def _fit(text: str, width: int, right: bool = False) -> str:
    """Return a text that takes just this width: cut, and marked so, or filled up on one side."""
    if _width(text) > width:
        ends = itertools.accumulate(map(_width, text))
        text = "".join(letter for letter, end in zip(text, ends, strict=True) if end < width) + "…"
    blanks = " " * (width - _width(text))
    return blanks + text if right else text + blanks


def _say(text: str) -> None:
    """Print a text, as far as the terminal's encoding has it; a reader that has left is no failure."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with contextlib.suppress(BrokenPipeError):
        print(text.encode(encoding, "replace").decode(encoding), flush=True)


def _print_table(rows: Sequence[Mapping[str, object]]) -> None:
    """Print rows of the same columns, each as wide as its content, all no wider than the terminal."""
    lines = [[*rows[0]]]
    texts = [["" if cell is None else str(cell) for cell in row.values()] for row in rows]
    lines += [[_escape(text) or "–" for text in row] for row in texts]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - 2 * (len(widths) - 1)
        while sum(widths) > room and max(widths) > 5:
            widths[widths.index(max(widths))] -= 1
    right = [name in ("ID", "Size", "Duration") for name in lines[0]]
    for line in lines:
        _say("  ".join(map(_fit, line, widths, right)).rstrip())


def _ask(
    options: Json, method: str, path: str, body: str | None = None, *, also: int = 0, hint: str = ""
) -> Json:
    """Return the JSON object that the server at --url answers with, with status 200, 201 or `also`.

    Raises ValueError with the words of the server's error; or, where no gligabao server answered, with
    what came instead, and `hint`, which says where to look.
    """
    server = options.get("url", "http://127.0.0.1:7878")
    key = _secret(os.environ.get("GLIGABAO_API_KEY"), "GLIGABAO_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    sent = None if body is None else body.encode(errors="surrogateescape")
    request = urllib.request.Request(f"{server}/v1/gb/training{path}", sent, headers, method=method)
    try:
        with _open_url(Context(), request, None) as response:
            status, data = response.status, response.read()
    except (_Failed, OSError, http.client.HTTPException) as error:
        raise ValueError(f"{server}: {_text_of(error)}{hint}") from error
    try:
        answer = _JSON.decode(data.decode())
        if status in (200, 201, also):
            return {**answer}
        words = str.__str__(answer["error"])
    except (ValueError, TypeError, KeyError, RecursionError):
        text = f"{server} answered status {status} and no JSON of a gligabao server"
        if status in (502, 503, 504):
            text += f": a proxy in between may have ended the wait{hint}"
        raise ValueError(text) from None
    raise ValueError(words + "; it is read from GLIGABAO_API_KEY" * (status == 401))


def _model_id(options: Json) -> str:
    """Return the id of the model that a person names by its id or its job, as job:123 if need be."""
    name = options["model"]
    if re.fullmatch("[0-9]+", name):
        return str(name)
    job_id = name.removeprefix("job:")
    query = urllib.parse.urlencode({"job_id": job_id}, errors="surrogateescape")
    for model in _ask(options, "GET", f"/models?{query}")["models"]:
        if model["job_id"] == job_id:
            return str(model["id"])
    raise ValueError(f"no model is recorded for the job {job_id!r}")


def _list(options: Json, path: str, key: str, row: Callable[[Json], Json]) -> Json:
    """Print what the server lists, as a table or as JSON; return the answer."""
    answer = _ask(options, "GET", path)
    if options.get("json"):
        _say(json.dumps(answer, indent=2))
    elif answer[key]:
        _print_table([row(entry) for entry in answer[key]])
    else:
        print(f"gligabao: there are no {key}", file=sys.stderr)
    return answer


def _words(progress: Json | None) -> str:
    """Say how far a running deployment is, as its server tells."""
    if not progress:  # another server is at work
        return ""
    if report := progress["report"]:
        share = "" if report["fraction"] is None else f"{report['fraction']:.0%} "
        return share + (report["text"] or "the deployer is working")
    done, total = progress["files_done"], progress["files_total"]
    if done == total > 0:
        return "the deployer is working"
    size = f"{_bytes(progress['bytes_done'])} of {_bytes(progress['bytes_total'])}"
    return f"{size}, {done} of {total} files"


def _run_record(options: Json) -> int:
    body = json.loads(options.get("facts", "{}")) | {"job_id": options["job_id"]}
    answer = _ask(options, "POST", "/models", json.dumps(body), also=409)
    if "error" in answer:
        print(f"gligabao: {_escape(str(answer['error']))}; it stays as it is", file=sys.stderr)
    _say(json.dumps(answer.get("model", answer), indent=2))
    return 0


def _run_models(options: Json) -> int:
    def row(model: Json) -> Json:
        sizes = [file["size_bytes"] for file in model["files"]]
        size_bytes = sum(size for size in sizes if isinstance(size, int))
        return {
            "ID": model["id"],
            "Name": model["name"],
            "Job": model["job_id"],
            "Base model": model["base_model"],
            "Files": f"{len(sizes)} file{'s' * (len(sizes) != 1)}, {_bytes(size_bytes)}",
            "Recorded": _time(model["created_at"]),
        }

    _list(options, f"/models?limit={options.get('limit', 100)}", "models", row)
    return 0


def _run_deployers(options: Json) -> int:
    def row(deployer: Json) -> Json:
        return {"Name": deployer["name"], "Description": deployer["description"]}

    _list(options, "/deployers", "deployers", row)
    return 0


def _run_history(options: Json) -> int:
    def row(made: Json) -> Json:
        running = made["status"] == "running"
        return {
            "ID": made["id"],
            "Status": made["status"],
            "Deployer": made["deployer"],
            "Duration": "" if running else _duration(made["duration_ms"] or 0),
            "Started": _time(made["created_at"]),
            "Outcome": made["error"] or made["ref"] or _words(made.get("progress")),
        }

    path = f"/models/{_model_id(options)}/deployments?limit={options.get('limit', 100)}"
    _list(options, path, "deployments", row)
    return 0


def _run_audit(options: Json) -> int:
    def row(file: Json) -> Json:
        return {"File": file["path"], "Size": _bytes(file["size_bytes"]), "On disk": file["state"]}

    found = _list(options, f"/models/{_model_id(options)}/audit", "files", row)
    missing, free = _bytes(found["bytes_to_fetch"]), _bytes(found["bytes_free"])
    text = f"Every file is in {found['dir']}, as recorded."
    if not found["complete"]:
        fit = "fit" if found["fits"] else "do not fit"
        text = f"{missing} to fetch into {found['dir']}, {free} free there: they {fit}."
    if not options.get("json"):
        _say(_escape(text))
    return 0 if found["complete"] else 1


def _follow(ctx: Context, options: Json, path: str) -> None:
    """Show once a second how far the newest running deployment by this deployer is."""
    while not ctx.wait(1):
        text, width = "waiting", 80
        with contextlib.suppress(Exception):  # what is shown is only to look at; the answer decides
            rows = _ask(options, "GET", path)["deployments"]
            key = "running", options["deployer"]
            found = (row for row in rows if (row["status"], row["deployer"]) == key)
            text = _words(next(found)["progress"])
            width = os.get_terminal_size(sys.stderr.fileno()).columns or width
        text = _fit(_escape(text), width - 1).rstrip()
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)
    print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _run_deploy(options: Json) -> int:
    path = f"/models/{_model_id(options)}/deployments"
    # The options go as they were typed, so that every number arrives as it was written.
    name, given = _encode_json(options["deployer"]), options.get("options", "null")
    following = Context()
    follower = threading.Thread(target=_follow, args=(following, options, path), daemon=True)
    if sys.stderr.isatty():
        follower.start()
    try:
        hint = f"; `history {options['model']}` says what became of the deployment"
        body = f'{{"deployer": {name}, "options": {given}}}'
        answer = _ask(options, "POST", path, body, also=502, hint=hint)
    finally:
        following.cancel("answered")
        if follower.ident:
            follower.join(1)
    deployment = answer.get("deployment") or answer
    if "status" not in deployment:
        raise ValueError(answer["error"])
    completed = {"completed": True, "failed": False}[deployment["status"]]
    _say(json.dumps(deployment, indent=2))
    return 0 if completed else 1


_CLIENTS = {
    run.__name__.removeprefix("_run_"): run
    for run in (_run_record, _run_models, _run_deployers, _run_deploy, _run_history, _run_audit)
}


def _run_demo(options: Json, stop: threading.Event | None) -> int:
    with (
        _until_stopped(stop) as wait,
        tempfile.TemporaryDirectory(prefix="gligabao-demo-", ignore_cleanup_errors=True) as made,
    ):
        home, once = Path(made), options.pop("once", False)
        home.joinpath("releases").mkdir()
        options |= {
            "training": True,
            "sidecar": str(home / "models"),
            "database": str(home / "gligabao.db"),
            "trained_model_deployers": {"release": _release_deployer(home / "releases")},
        }
        files = _make_adapter(home / "models" / "trained" / "demo-lora")
        with contextlib.closing(open_store(options["database"])) as store:
            body = {"job_id": "demo-lora", "name": "demo adapter", "files": files}
            record_model(Context(), store, None, body)
        if options.setdefault("port", 0 if once else 7878) == 7878:
            try:
                socket.create_server(("127.0.0.1", 7878)).close()
            except OSError:  # somebody else has it
                options["port"] = 0
        with Server(**options) as server:
            if once:
                return _run_deploy({"url": server.url, "model": "1", "deployer": "release"})
            url = f"{server.url}/v1/gb/training/models/1/deployments"
            print(f"Open {server.url}/admin and deploy the model there, or run")
            print(f'\n    curl {url} -d \'{{"deployer": "release"}}\'\n')
            print(f"Releases go to {home / 'releases'}. Ctrl-C stops, and removes all of it.")
            sys.stdout.flush()
            wait()
    return 0


@contextlib.contextmanager
def _standard_streams() -> Iterator[None]:
    """Keep a command from failing because a standard stream is closed, full or has no reader."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # else the next file opened gets its number and its bytes
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # at which the interpreter would exit with 120
                with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), stream.fileno())


def _run(argv: Sequence[str] | None, options: Json) -> int:
    given = vars(_parser().parse_args(argv))
    command = given.pop("command")
    quiet = command == "demo" and given.get("once")
    logging.raiseExceptions = False  # a log that cannot be written is no reason to fail
    logging.basicConfig(
        level=logging.WARNING if quiet else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    keys = {
        "api_key": os.environ.get("GLIGABAO_API_KEY"),
        "sidecar_token": os.environ.get("GLIGABAO_SIDECAR_TOKEN"),
    }
    try:
        match command:
            case "serve":
                before = {*threading.enumerate()}
                serve(**keys | options | given)
                left = {*threading.enumerate()} - before
                for thread in left:
                    thread.join(LOOK_INTERVAL_S)
                if any(thread.is_alive() for thread in left):
                    os._exit(0)  # a thread that a deployer left running would hold the process
                return 0
            case "sidecar":
                return _run_sidecar(given)
            case command if command in _CLIENTS:
                try:
                    return _CLIENTS[command](given)
                except (AttributeError, KeyError, TypeError):
                    raise ValueError(
                        "the server's answer is no JSON of a gligabao server"
                    ) from None
            case _:
                return _run_demo(given, options.get("stop"))
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the border to the person at the terminal: one line, whatever it is
        text = " ".join(_text_of(error).split())
        for secret in filter(None, keys.values()):  # an odd server may have echoed it
            text = text.replace(secret, "…")
        print(f"gligabao: {_UNPRINTABLE.sub('?', text)}", file=sys.stderr)
        return 1


def main(argv: Sequence[str] | None = None, **options: Any) -> int:
    """Run the command line, `argv` or the process's, with options of `serve`, such as your deployers.

    A flag wins over an option. Returns the exit code: 0, 1 when a deployment or a start failed, which
    is said in one line, 130 for an interrupted `deploy`; exits with 2 on bad usage. Configures
    logging unless the program has.
    """
    with _standard_streams():
        return _run(argv, options)


if __name__ == "__main__":
    sys.exit(main())
