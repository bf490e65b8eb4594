"""`serve` as a process of its own: it answers, and an interrupt ends it in good order."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

import httpx

PROGRAM = """
import sys
from zllm_jax.server import serve
from zllm_jax.testing import ScriptedEngine
serve(ScriptedEngine(), port=int(sys.argv[1]), log_level="error")
"""


def test_serve_until_interrupted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(port)], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                response = httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.ConnectError:
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < deadline, "no answer within 30 s"
                time.sleep(0.05)
        assert response.json() == {"status": "ok"}
        assert "server" not in response.headers
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        assert errors == ""
    finally:
        process.kill()
