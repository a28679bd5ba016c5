"""The protocol's own clients, in Python and TypeScript: they append, read, tail, and resume through a restart."""

import json
import subprocess
import threading

import pytest

from strandline.serve.http.limits import HttpLimits
from tests.serve.http.client import JSON, served
from tests.servers import HOME

pytestmark = pytest.mark.matrix

LIMITS = HttpLimits(long_poll_seconds=2)


@pytest.fixture(params=["file", "wal"])
def root(request, tmp_path):
    return f"{request.param}://{tmp_path}/streams"


def url(http, name):
    return f"http://127.0.0.1:{http.port}/v1/stream/{name}"


def test_the_python_client_resumes_where_it_was_when_the_server_comes_back(root):
    durable_streams = pytest.importorskip("durable_streams")
    create, connect = durable_streams.DurableStream.create, durable_streams.DurableStream.connect
    with served(root, limits=LIMITS) as http, create(url(http, "orders"), content_type="application/json") as stream:
        for number in range(5):
            stream.append({"id": number})
        with stream.stream(offset="-1", live=False) as found:
            assert found.read_json() == [{"id": number} for number in range(5)]
            offset = found.offset
    with served(root, limits=LIMITS) as http, connect(url(http, "orders")) as stream:
        writer = threading.Thread(target=lambda: [http.post("orders", b'{"id": %d}' % n, headers=JSON) for n in (5, 6)])
        writer.start()
        seen = []
        with stream.stream(offset=offset, live="long-poll") as found:
            for item in found.iter_json():
                seen.append(item["id"])
                if len(seen) == 2:
                    break
        writer.join()
        assert seen == [5, 6]


_APPENDS = """
import { DurableStream, IdempotentProducer } from "@durable-streams/client"
const [url, epoch, first, count] = [process.env.URL_, +process.env.EPOCH, +process.env.FIRST, +process.env.COUNT]
const stream = await DurableStream.create({ url, contentType: "application/json" })
const failures = []
const onError = (error) => failures.push(String(error))
const producer = new IdempotentProducer(stream, "node", { epoch, lingerMs: 0, onError })
for (let number = first; number < first + count; number++) {
  producer.append(JSON.stringify({ id: number }))
  if (number % 7 === 0) await producer.flush()
}
await producer.flush()
const found = await stream.stream({ offset: "-1", live: false })
console.log(JSON.stringify({ failures, ids: (await found.json()).map((item) => item.id), offset: found.offset }))
process.exit(0)
"""

_TAILS = """
import { stream } from "@durable-streams/client"
const found = await stream({ url: process.env.URL_, offset: process.env.OFFSET, live: process.env.LIVE })
const ids = []
found.subscribeJson((batch) => {
  ids.push(...batch.items.map((item) => item.id))
  if (ids.length >= +process.env.COUNT) { console.log(JSON.stringify(ids)); process.exit(0) }
})
console.error("ready")
"""


def run_in_node(script, **environment):
    program = HOME / "bin/streams-client"
    if not program.exists():
        pytest.skip("no server: the TypeScript client of Durable Streams (make services)")
    variables = {"PATH": "/usr/bin:/bin", **{name.upper(): str(value) for name, value in environment.items()}}
    return subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables), script


def result_of(started):
    process, script = started
    out, _ = process.communicate(script, timeout=300)
    return json.loads(out)


@pytest.mark.parametrize("live", ["long-poll", "sse"])
def test_the_typescript_client_resumes_where_it_was_when_the_server_comes_back(root, live):
    with served(root, limits=LIMITS) as http:
        found = result_of(run_in_node(_APPENDS, url_=url(http, "orders"), epoch=0, first=0, count=30))
        assert found["failures"] == []
        assert found["ids"] == list(range(30))
    with served(root, limits=LIMITS) as http:
        tails = run_in_node(_TAILS, url_=url(http, "orders"), offset=found["offset"], live=live, count=10)
        process, script = tails
        process.stdin.write(script)
        process.stdin.close()
        process.stdin = None
        more = result_of(run_in_node(_APPENDS, url_=url(http, "orders"), epoch=1, first=30, count=10))
        assert more["ids"] == list(range(40))
        assert json.loads(process.communicate(timeout=300)[0]) == list(range(30, 40))
