"""What the tests of the command share."""

import pytest

STAND_IN = """
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if os.environ.get("STAND_IN_FAILS"):
    sys.exit("cannot find the model")

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        waits = os.environ.get("STAND_IN_WAITS", "")
        self.send_response(503 if waits else 200)
        self.end_headers()
        self.wfile.write(waits.encode())

    def log_message(self, *args):
        pass

HTTPServer((os.environ["VERTUMNUS_HTTP_HOST"], int(os.environ["VERTUMNUS_HTTP_PORT"])), Handler).serve_forever()
"""


@pytest.fixture
def stand_in() -> str:
    """The source of a small HTTP server that stands in for a service: every GET is answered with 200, or with 503 and
    the reason that STAND_IN_WAITS gives."""
    return STAND_IN
