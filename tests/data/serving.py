"""A mirror on this machine that can be told to misbehave."""

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


@contextmanager
def mirror(files: dict[str, bytes], misbehave: Answer | None = None) -> Iterator[SimpleNamespace]:
    """Serves `files`; `misbehave(handler)` replaces the answer where it is set."""
    served = SimpleNamespace(files=files, misbehave=misbehave, asked=[], url="")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rsplit("/", 1)[-1]
            served.asked.append(name)
            if served.misbehave:
                served.misbehave(self)
            elif name in served.files:
                send(self, served.files[name])
            else:
                self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}/data/"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def send(handler: http.server.BaseHTTPRequestHandler, body: bytes, claimed: int | None = None) -> None:
    """The body, after a Content-Length that may claim more than is sent."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(claimed or len(body)))
    handler.end_headers()
    # A client that gives up resets the connection.
    with suppress(ConnectionError):
        handler.wfile.write(body)
