"""The server that the tests of a module share: after each of them nothing may be left in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (pip install .[serve])")

from server_case import Server, serve


# Not for the session: after the tests of other folders, some of which fork, its thread was seen not to end.
@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with serve(debug=True) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    yield shared_server
    shared_server.idle()
