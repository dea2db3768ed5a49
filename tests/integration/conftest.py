"""What several of these tests look at and leave as it is."""

import pytest
from running import wait_for

from hangwatch.lab.launch import Server


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("lab")) as running:
        wait_for(lambda: running.log.read_text().count("Avg thr") > 1, "two beats")
        yield running
