"""A shared store stops, engines that wait for it follow: the black box knows the order."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from stores import StoreFleet, wait_recorded, watch

from hangwatch.capture.reading import explain, read_bundle


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[StoreFleet]:
    folder = tmp_path / "ray"
    folder.mkdir()
    with StoreFleet(folder, servers=8) as running:
        running.wait_ready()
        yield running


def contents(bundle: str, name: str) -> bytes:
    with tarfile.open(bundle) as archive:
        (member,) = (m for m in archive.getmembers() if m.name.endswith(name))
        found = archive.extractfile(member)
        assert found is not None
        return found.read()


@pytest.mark.slow
def test_a_store_that_stops_is_found_before_the_engines_that_wait_for_it(
    fleet: StoreFleet, tmp_path: Path
):
    with watch(fleet, tmp_path) as hangwatch:
        wait_recorded(fleet, tmp_path, 9.0)
        stopped_at = fleet.stop_store()
        bundle = hangwatch.wait("bundle", seconds=120)["bundle"]
        assert 0 == hangwatch.end()

    stops = json.loads(contents(bundle, "blackbox/stops.json"))
    store = next(stop for stop in stops if stop["pid"] == fleet.store)
    changed = {stop["pid"] for stop in stops if stop["change"] == "quiet"}
    told = explain(read_bundle(Path(bundle)))
    (first,) = (f for f in told.findings if f.rule == "first-to-stop")

    assert ("store", "quiet") == (store["role"], store["change"])
    assert {fleet.store, *fleet.engines} <= changed
    assert abs((datetime.fromisoformat(store["latest"]) - stopped_at).total_seconds()) < 1.0
    assert first.sentence.startswith(f"Store {fleet.store}, which they share, fell quiet ")
    assert fleet.store == first.culprit.pid
    assert "blackbox/stops.json" == first.citations[0].path
    assert f'"pid": {fleet.store}' in first.citations[0].text
    assert len(contents(bundle, "blackbox/counters.csv")) < 4 << 20
