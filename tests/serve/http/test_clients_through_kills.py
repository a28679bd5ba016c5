"""The protocol's own clients while the server's process is killed: nothing is lost, doubled or out of order."""

import json
import threading

import httpx
import pytest

from strandline.storage.env import SYSTEM
from tests.cli.conftest import run, start
from tests.serve.http.test_clients import result_of, run_in_node
from tests.serve.test_processes import address, file_of, is_ready, until
from tests.servers import free_port

__all__ = ["run", "start"]

pytestmark = pytest.mark.matrix

COUNT = 120
LIVES = 3

_APPENDS = """
import { DurableStream, IdempotentProducer } from "@durable-streams/client"
const [url, count] = [process.env.URL_, +process.env.COUNT]
const pause = () => new Promise((resolve) => setTimeout(resolve, 25))
let [number, epoch, failures] = [0, 0, 0]
while (number < count) { // the client gives up what it could not send: a new epoch goes on behind what is there
  let failed = false
  try {
    const stream = await DurableStream.create({ url, contentType: "application/json" })
    const found = await stream.stream({ offset: "-1", live: false })
    number = (await found.json()).length
    const producer = new IdempotentProducer(stream, "node", { epoch, lingerMs: 0, onError: () => { failed = true } })
    for (; number < count && !failed; number++) {
      producer.append(JSON.stringify({ id: number }))
      await producer.flush()
      await pause()
    }
  } catch { failed = true }
  if (failed) { [number, epoch, failures] = [0, epoch + 1, failures + 1]; await pause() }
}
console.log(JSON.stringify(failures))
process.exit(0)
"""

_TAILS = """
import { stream } from "@durable-streams/client"
const found = await stream({ url: process.env.URL_, offset: "-1", live: "long-poll" })
const ids = []
found.subscribeJson((batch) => {
  ids.push(...batch.items.map((item) => item.id))
  if (ids.length >= +process.env.COUNT) { console.log(JSON.stringify(ids)); process.exit(0) }
})
"""


@pytest.mark.parametrize("kind", ["file", "wal"])
def test_clients_append_and_tail_through_kills_of_the_server(start, kind, tmp_path, monkeypatch):
    durable_streams = pytest.importorskip("durable_streams")
    monkeypatch.chdir(tmp_path)
    port = free_port()
    file = file_of(tmp_path, f'[streams]\nroot = "{kind}://{tmp_path}/streams"\n', port)
    url = f"http://127.0.0.1:{port}/v1/stream/orders"

    def begin():
        process = start("serve", file)
        served = address(process)
        until(lambda: is_ready(served))
        return process

    server = begin()
    httpx.put(url, headers={"Content-Type": "application/json"}).raise_for_status()
    seen = []

    def follow():
        """The Python client: it goes on behind what it has seen when its connection breaks."""
        offset = "-1"
        while len(seen) < COUNT:
            try:
                with durable_streams.stream(url, offset=offset, live=False) as found:
                    seen.extend(item["id"] for item in found.read_json())
                    offset = found.offset
            except (httpx.HTTPError, durable_streams.DurableStreamError):
                pass
            SYSTEM.clock.sleep(0.02)

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    tails, tailing = run_in_node(_TAILS, url_=url, count=COUNT)
    tails.stdin.write(tailing)
    tails.stdin.close()
    tails.stdin = None
    appends = run_in_node(_APPENDS, url_=url, count=COUNT)
    result = []
    writer = threading.Thread(target=lambda: result.append(result_of(appends)), daemon=True)
    writer.start()
    for life in range(1, LIVES):
        until(lambda life=life: len(seen) >= life * COUNT // LIVES)
        server.kill()
        server.wait()
        server = begin()
    for thread in (writer, reader):
        thread.join(120)
        assert not thread.is_alive()
    assert result[0] > 0, "the kills were noticed"
    assert seen == list(range(COUNT))
    assert json.loads(tails.communicate(timeout=120)[0]) == list(range(COUNT))
    assert httpx.get(url, params={"offset": "-1"}).json() == [{"id": number} for number in range(COUNT)]
