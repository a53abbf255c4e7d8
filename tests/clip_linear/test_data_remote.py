"""Shards that are not plain local files: HTTP with and without ranges, S3, pipes, the cache; broken connections."""

import contextlib
import gzip
import http.server
import io
import json
import multiprocessing
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from clip_linear.data import DataConfig, read_samples, train_loader
from clip_linear.data.cache import ShardCache
from clip_linear.data.fetch import Store
from clip_linear.data.remote import MissingShardError, Retry, download
from clip_linear.data.write import Pair, write_shards

QUICK = Retry(attempts=3, first_pause_s=0.01, timeout_s=5)


@pytest.fixture
def shards(tmp_path):
    """Three shards of five pairs; images of 1x1 with some ballast so that a connection can break in the middle."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (2, 2), (200, 10, 10)).save(buffer, "PNG")
    ballast = os.urandom(40_000)  # after the end of a PNG: decoders do not look there
    folder = tmp_path / "shards"
    write_shards((Pair(buffer.getvalue() + ballast, "png", f"n {i}") for i in range(15)), folder, 5)
    return folder


class Server:
    """Serves a folder. ``breaks`` answers are cut off after ``cut`` bytes; ``busy`` answers are 503."""

    def __init__(self, folder, ranges):
        self.folder, self.ranges = folder, ranges
        self.breaks = self.busy = 0
        self.cut = 100_000
        self.requests = []
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                owner.answer(self)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request):
        asked = request.headers.get("Range")
        self.requests.append((request.path, asked))
        path = self.folder / request.path.lstrip("/")
        if not path.is_file():
            return request.send_error(404)
        if self.busy:
            self.busy -= 1
            return request.send_error(503)
        content, first = path.read_bytes(), 0
        if asked and self.ranges:
            first = int(asked.removeprefix("bytes=").rstrip("-"))
        request.send_response(206 if first else 200)
        request.send_header("Content-Length", str(len(content) - first))
        request.end_headers()
        if self.breaks:
            self.breaks -= 1
            request.wfile.write(content[first : first + self.cut])
            # Closing with a zero linger time sends a reset instead of an orderly end.
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.connection.close()
        else:
            request.wfile.write(content[first:])
        return None


@pytest.fixture(params=[True, False], ids=["ranges", "no ranges"])
def server(request, shards):
    one = Server(shards, request.param)
    yield one
    one.server.shutdown()


@pytest.fixture
def plain_server(shards):
    """Python's own file server, which ignores Range."""
    handler = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *args: handler(*args, directory=str(shards))
    ) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


def captions(urls, faults=None):
    return [s.caption for s in read_samples(urls, faults=faults)]


ALL = [f"n {i}" for i in range(15)]


def test_http(server, shards):
    faults = []
    assert captions(server.url + "/{00000..00003}.tar", faults) == ALL
    assert [f.reason for f in faults] == ["missing_shard"] and "404" in faults[0].detail


def test_http_by_pythons_own_server(plain_server):
    assert captions(plain_server + "/{00000..00002}.tar") == ALL


def test_broken_connections_go_on_where_they_broke(server, shards):
    server.breaks = 2
    target = io.BytesIO()
    download(server.url + "/00000.tar", target, QUICK)
    assert target.getvalue() == (shards / "00000.tar").read_bytes()
    first, *later = [asked for _, asked in server.requests]
    assert first is None and len(later) == 2 and all(asked.startswith("bytes=") for asked in later)


def test_progress_resets_the_patience_and_no_progress_ends_it(server):
    server.breaks, server.cut = 5, 110_000
    if server.ranges:  # each attempt gets further: more breaks than attempts are survived
        server.cut = 40_000
        download(server.url + "/00000.tar", io.BytesIO(), QUICK)
    server.busy = 2
    server.breaks = 0
    download(server.url + "/00000.tar", io.BytesIO(), QUICK)
    server.busy = 99
    with pytest.raises(MissingShardError, match=r"3 attempts.*503"):
        download(server.url + "/00000.tar", io.BytesIO(), QUICK)
    with pytest.raises(MissingShardError, match="3 attempts"):
        download("http://127.0.0.1:9/0.tar", io.BytesIO(), QUICK)


def test_compressed_over_http(server, shards):
    (shards / "packed.tar.gz").write_bytes(gzip.compress((shards / "00001.tar").read_bytes()))
    assert captions(server.url + "/packed.tar.gz") == ALL[5:10]


def test_pipe(shards):
    assert captions(f"pipe:cat {shards}/0000{{0,2}}.tar") == ALL[:5] + ALL[10:]
    faults = []
    assert captions("pipe:exit 3", faults) == [] and faults[0].reason == "missing_shard"
    faults.clear()
    assert captions(f"pipe:head -c 150000 {shards}/00000.tar", faults) == ALL[:3]
    assert [f.reason for f in faults] == ["truncated_shard"]


def batches(urls, workers=0, **options):
    from torchvision import transforms

    config = DataConfig(train_data=urls, batch_size=4, num_samples=48, workers=workers, **options)
    found = train_loader(config, transforms.ToTensor(), tokenize)
    return [b.texts.tolist() for b in found]


def tokenize(texts):
    import torch

    return torch.tensor([[int(t.split()[1])] for t in texts])


@pytest.mark.parametrize("workers", [0, 2])
def test_training_order_does_not_depend_on_where_the_shards_lie(server, shards, workers):
    server.breaks = 1
    assert batches(server.url + "/{00000..00002}.tar", workers) == batches(str(shards), workers)


def test_the_next_shard_is_fetched_ahead(server):
    store = Store(retry=QUICK)
    store.prefetch(server.url + "/00001.tar")
    deadline = time.monotonic() + 20
    while not server.requests and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [path for path, _ in server.requests] == ["/00001.tar"]
    assert len(store.open(server.url + "/00001.tar").file.read()) > 100_000
    assert len(server.requests) == 1
    store.prefetch(server.url + "/none.tar")
    with pytest.raises(MissingShardError):
        store.open(server.url + "/none.tar")


def test_the_cache_is_read_instead_of_the_server(server, shards, tmp_path):
    options = {"shard_cache": str(tmp_path / "cache")}
    first = batches(server.url + "/{00000..00002}.tar", **options)
    assert len(server.requests) == 3
    assert batches(server.url + "/{00000..00002}.tar", **options) == first and len(server.requests) == 3


def test_the_cache_keeps_its_limit_and_open_files_stay_readable(tmp_path):
    cache = ShardCache(tmp_path, 2500)
    (tmp_path / ".old.tar.x.tmp").write_bytes(b"left by a kill")
    os.utime(tmp_path / ".old.tar.x.tmp", (0, 0))
    first = cache.open("a", lambda f: f.write(b"a" * 1000))
    for name in ("b", "c", "d"):
        with cache.open(name, lambda f, name=name: f.write(name.encode() * 1000)) as file:
            assert file.read() == name.encode() * 1000
    assert first.read() == b"a" * 1000
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 2500 and not list(tmp_path.glob(".*tmp"))
    with pytest.raises(RuntimeError), cache.open("e", fail):
        pass
    assert not list(tmp_path.glob(".*tmp"))


def fail(_):
    raise RuntimeError("the server went away")


def use_cache(folder, log, start):
    start.wait()

    def fill(target):
        with open(log, "a") as f:
            f.write("x")
        time.sleep(0.2)  # long enough for the others to come
        target.write(b"a" * 1000)

    with ShardCache(folder, 10_000).open("a", fill) as file:
        assert len(file.read()) == 1000


def test_processes_that_share_a_cache_fetch_once(tmp_path):
    context = multiprocessing.get_context("fork")
    start = context.Event()
    users = [context.Process(target=use_cache, args=(tmp_path / "c", tmp_path / "log", start)) for _ in range(4)]
    for user in users:
        user.start()
    start.set()
    for user in users:
        user.join(30)
    assert [u.exitcode for u in users] == [0] * 4 and (tmp_path / "log").read_text() == "x"


class BreakingProxy:
    """Passes TCP on to a port; resets the first connections on which it has passed on many bytes."""

    def __init__(self, port, breaks, cut):
        self.port, self.breaks, self.cut = port, breaks, cut
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.own_port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.port))
                threading.Thread(target=self.pump, args=(client, server), daemon=True).start()
                threading.Thread(target=self.pump, args=(server, client, True), daemon=True).start()

    def pump(self, source, target, may_break=False):
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(16384):
                passed += len(data)
                if may_break and self.breaks and passed > self.cut:
                    self.breaks -= 1
                    target.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    break
                target.sendall(data)
        source.close()
        target.close()


@pytest.fixture
def s3(tmp_path, shards):
    """A real S3 server process, with the shards in a bucket, behind a proxy that resets connections."""
    pytest.importorskip("moto", reason="needs moto[server] and s3fs; run: pip install -e .[dev]")
    pytest.importorskip("s3fs", reason="needs moto[server] and s3fs; run: pip install -e .[dev]")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}/moto-api/", process)
            keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
            env = {**os.environ, **keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
            upload = (
                "import s3fs, sys; f = s3fs.S3FileSystem(); f.mkdir('bucket'); f.put(sys.argv[1:], 'bucket/train/')"
            )
            files = [str(p) for p in sorted(shards.glob("*.tar"))]
            subprocess.run([sys.executable, "-c", upload, *files], env=env, check=True, timeout=120)
            proxy = BreakingProxy(port, 3, 120_000)
            yield {**env, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.own_port}"}, proxy
        finally:
            process.terminate()


def wait_for(url, process):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=5).close()
            return
        time.sleep(0.1)
    raise RuntimeError("the S3 server did not start")


@pytest.mark.slow
def test_s3_with_resets(s3, shards):
    env, proxy = s3
    code = """
import json, sys
sys.path.insert(0, sys.argv[1])
from test_data_remote import batches, captions
faults = []
print(json.dumps({
    "captions": captions(["s3://bucket/train/*.tar", "s3://bucket/train/none.tar"], faults),
    "faults": [f.reason for f in faults],
    "batches": batches("s3://bucket/train/{00000..00002}.tar", workers=2),
}))
"""
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", code, here], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["captions"] == ALL and found["faults"] == ["missing_shard"]
    assert found["batches"] == batches(str(shards), workers=2)
    assert proxy.breaks == 0  # all three resets happened
    assert Counter(n for batch in found["batches"] for (n,) in batch).keys() == set(range(15))
