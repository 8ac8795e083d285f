"""A service by HTTP that answers JSON as a test wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import orjson


@contextmanager
def http_service(answer: Callable[[str, Any], tuple[int, bytes]]) -> Iterator[str]:
    """Serve `answer(path, question)`, a status and a body, at the URL; status 0 is no answer."""
    closing = Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, body = answer(self.path, question)
            if not status:
                closing.wait()
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        request_queue_size = 1024

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        closing.set()
        server.shutdown()
        thread.join()
