"""10. An object store on loopback (s3s over a folder of the same disk): save, load, reshard."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.client
import logging
import subprocess
from collections.abc import Iterator
from urllib.parse import urlsplit

import ranks
import torch
import torch.distributed.checkpoint as dcp
from harness import MIB, Bench, Row, in_threads, remove, take_turns, timed, view
from programs import Missing, program

import reshard.torch as rt

BUCKET, KEY, SECRET, REGION = "bucket", "key", "secret", "us-east-1"


class Server:
    """The server in a process of its own."""

    def __init__(self, bench: Bench) -> None:
        self._folder = bench.place("objects")
        remove(self._folder)
        (self._folder / BUCKET).mkdir(parents=True)
        tool = program("s3_server", bench.build)
        self._process = subprocess.Popen(
            [tool, self._folder, KEY, SECRET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.endpoint = self._process.stdout.readline().strip()
        if not self.endpoint.startswith("http://"):
            self.close()
            raise Missing("the S3 server did not start")

    def close(self) -> None:
        # It ends when its input does.
        self._process.stdin.close()
        self._process.wait(10)
        remove(self._folder)

    def empty(self) -> None:
        """Removes everything, behind the server's back."""
        bucket = self._folder / BUCKET
        for entry in list(bucket.iterdir()):
            remove(entry)

    @property
    def options(self) -> dict[str, object]:
        return {"endpoint": self.endpoint, "region": REGION, "aws_access_key_id": KEY, "aws_secret_access_key": SECRET}

    def request(
        self, connection: http.client.HTTPConnection, method: str, name: str, body: memoryview | None, into: memoryview | None
    ) -> None:
        """One signed request on a connection that stays open; the answer's body goes into the buffer."""
        path = f"/{BUCKET}/{name}"
        connection.request(method, path, body=body, headers=signed(method, path, urlsplit(self.endpoint).netloc))
        answer = connection.getresponse()
        done = 0
        while into is not None and done < len(into):
            count = answer.readinto(into[done:])
            if not count:
                break
            done += count
        rest = answer.read()
        if answer.status >= 300 or (into is not None and done < len(into)):
            raise RuntimeError(f"{method} {path}: {answer.status} {rest[:200]!r}")


def signed(method: str, path: str, host: str) -> dict[str, str]:
    """AWS signature version 4 of a request whose payload is not signed."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": host, "x-amz-content-sha256": "UNSIGNED-PAYLOAD", "x-amz-date": now}
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    request = f"{method}\n{path}\n\n{lines}\n{names}\nUNSIGNED-PAYLOAD"
    scope = f"{now[:8]}/{REGION}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = b"AWS4" + SECRET.encode()
    for part in (now[:8], REGION, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.new(key, text.encode(), "sha256").hexdigest()
    credential = f"AWS4-HMAC-SHA256 Credential={KEY}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**headers, "authorization": credential}


def raw(server: Server, method: str, views: list[memoryview]) -> float:
    """One object for each buffer, on two connections."""

    def work(number: int) -> None:
        address = urlsplit(server.endpoint)
        connection = http.client.HTTPConnection(address.hostname, address.port)
        for index in range(number, len(views), 2):
            body, into = (views[index], None) if method == "PUT" else (None, views[index])
            server.request(connection, method, f"raw-{index}", body, into)
        connection.close()

    return timed(lambda: in_threads(work))


def fsspec_sides(server: Server):
    """PyTorch's writer and reader over s3fs, where it is installed."""
    try:
        import s3fs  # noqa: F401
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
    except ImportError as error:
        return None, f"PyTorch not run: {error}"
    logging.getLogger("s3fs").setLevel(logging.ERROR)
    options = {"key": KEY, "secret": SECRET, "client_kwargs": {"endpoint_url": server.endpoint, "region_name": REGION}}

    def save(state, place):
        dcp.save(state, storage_writer=FsspecWriter(place, **options), no_dist=True)

    def load(state, place):
        dcp.load(state, storage_reader=FsspecReader(place, **options), no_dist=True)

    try:
        probe = {"x": torch.ones(4)}
        save(probe, f"s3://{BUCKET}/probe")
        load(probe, f"s3://{BUCKET}/probe")
    except Exception as error:
        return None, f"PyTorch over s3fs fails here: {type(error).__name__}: {str(error)[:120]}"
    return (save, load), ""


def reshard_rank(rank: int, size: int, place: str, options: dict[str, object], count: int, rounds: int):
    """Columns of matrices that one process saved whole, on ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (size,))
    width = 1024 // size
    state = {
        f"layers.{i:03}.weight": DTensor.from_local(torch.zeros(height_of(place), width), mesh, [Shard(1)]) for i in range(count)
    }
    reports = []
    seconds = take_turns(
        rounds, {"ours": lambda: ranks.together(lambda: reports.append(rt.load(state, place, storage_options=options)))}
    )
    return seconds, reports[-1].bytes_read, reports[-1].bytes_wanted


def height_of(place: str) -> int:
    return int(place.rsplit("-", 1)[1])


def rows(bench: Bench) -> Iterator[Row]:
    try:
        server = Server(bench)
    except Missing as missing:
        for name in ("save", "load", "reshard"):
            yield Row(f"objects/{name}", f"{name} on an object store", skipped=str(missing))
        return
    try:
        yield from with_server(bench, server)
    finally:
        server.close()


def with_server(bench: Bench, server: Server) -> Iterator[Row]:
    count, each = (4, MIB) if bench.quick else (32, 16 * MIB)
    height = each // 4096
    what = f"{count} × {each // MIB} MiB"
    state = {f"layers.{i:03}.weight": torch.full((height, 1024), float(i + 1)) for i in range(count)}
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    views, into = [view(tensor) for tensor in state.values()], [view(tensor) for tensor in target.values()]
    theirs, note = fsspec_sides(server)
    place = f"s3://{BUCKET}/ours-{height}"
    rounds = min(bench.rounds, 3)
    options = server.options

    def emptied(work) -> float:
        server.empty()
        return timed(work)

    sides = {
        "limit": lambda: (server.empty(), raw(server, "PUT", views))[1],
        "ours": lambda: emptied(lambda: rt.save(state, place, storage_options=options)),
    }
    if theirs:
        sides["torch"] = lambda: emptied(lambda: theirs[0](state, f"s3://{BUCKET}/torch"))
    seconds = take_turns(rounds, sides)
    total = count * each
    common = {"bytes": total, "note": note, "beside": "PyTorch over s3fs"}
    yield Row(
        "objects/save",
        f"save {what} to s3://",
        seconds["ours"],
        seconds.get("torch", []),
        seconds["limit"],
        limit_name="raw PUT, 2 connections",
        **common,
    )

    server.empty()
    rt.save(state, place, storage_options=options)
    raw(server, "PUT", views)
    if theirs:
        theirs[0](state, f"s3://{BUCKET}/torch")
    sides = {
        "limit": lambda: raw(server, "GET", into),
        "ours": lambda: timed(lambda: rt.load(target, place, storage_options=options)),
    }
    if theirs:
        sides["torch"] = lambda: timed(lambda: theirs[1](target, f"s3://{BUCKET}/torch"))
    seconds = take_turns(rounds, sides)
    if not all(torch.equal(target[key], state[key]) for key in state):
        raise AssertionError("what was loaded is not what was saved")
    yield Row(
        "objects/load",
        f"load {what} from s3://",
        seconds["ours"],
        seconds.get("torch", []),
        seconds["limit"],
        limit_name="raw GET, 2 connections",
        **common,
    )

    results = ranks.run(2, reshard_rank, place, options, count, rounds)
    slowest = ranks.slowest([result[0] for result in results])
    read, wanted = sum(result[1] for result in results), sum(result[2] for result in results)
    yield Row(
        "objects/reshard",
        f"load {what} from s3://, columns on 2 ranks",
        slowest["ours"],
        limit=seconds["limit"],
        limit_name="raw GET, 2 connections",
        bytes=total,
        note=f"read {read / wanted:.2f} × what is wanted: neighbouring columns are fetched in one request",
    )
