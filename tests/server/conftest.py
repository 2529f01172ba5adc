"""The server that most tests share: after each of them nothing may be left in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (pip install .[serve])")

from server_case import Server, serve


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    with serve(debug=True) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    yield shared_server
    shared_server.idle()
