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
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass

HTTPServer((os.environ["VERTUMNUS_HTTP_HOST"], int(os.environ["VERTUMNUS_HTTP_PORT"])), Handler).serve_forever()
"""


@pytest.fixture
def stand_in() -> str:
    """The source of a small HTTP server that stands in for a service: every GET is answered with 200."""
    return STAND_IN
