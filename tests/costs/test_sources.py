"""Opening sources of costs by their text, and putting a profile's measured links into a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.clusters import resolve_cluster
from penstock.costs.collectives import group_of
from penstock.costs.profile import DeviceProfile, LinkPoint, Profile
from penstock.costs.profiled import Profiled
from penstock.costs.roofline import Roofline
from penstock.costs.sources import open_costs, shipped_profiles
from penstock.errors import InputError


def test_the_usual_source_is_the_roofline() -> None:
    assert isinstance(open_costs(), Roofline) and isinstance(open_costs(" roofline "), Roofline)


def test_a_profile_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    Profile({"cpu": DeviceProfile({})}).write(path)
    source = open_costs(f"profile:{path}")
    assert isinstance(source, Profiled) and source.name == f"profile:{path}"


def test_every_shipped_profile_opens() -> None:
    assert "h200-141gb" in shipped_profiles()
    for name in shipped_profiles():
        assert open_costs(f"profile:{name}").name == f"profile:{name}"


def test_a_file_comes_before_a_shipped_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Profile({"cpu": DeviceProfile({})}).write("h200-141gb")
    source = open_costs("profile:h200-141gb")
    assert isinstance(source, Profiled) and list(source.devices) == ["cpu"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rofline", "costs 'rofline' is not known. Did you mean 'roofline'"),
        ("", "costs '' is not known"),
        ("roofline:x", "expected roofline"),
        ("profile:", "expected profile:FILE"),
        ("profile", "expected profile:FILE"),
        ("profile:\0", "expected profile:FILE"),
        ("profile:h200", "profile 'h200' does not exist.*Did you mean 'h200-141gb'"),
        ("profile:" + "x" * 5000, "does not exist"),
        ("aceso:folder", "takes aceso:DIR and fasop:DIR, `penstock batch` dynapipe:DIR/NAME; here use roofline or profile:FILE"),
        ("dynapipe", "tables of another planner"),
        ("asceso:x", "Did you mean 'aceso'"),
    ],
)
def test_wrong_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_costs(text)


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="is not a profile"):
        open_costs(f"profile:{path}")


def test_measured_links_replace_the_catalogues() -> None:
    """Points made by the formulas themselves are found again: 2 GB/s and 5 µs inside, 0.5 GB/s and 50 µs between nodes."""
    points = []
    for nodes, bandwidth, latency in ((1, 2e9, 5e-6), (2, 0.5e9, 50e-6)):
        for size in (1e3, 1e5, 1e7):
            points.append(LinkPoint("transfer", 2, nodes, size, latency + size / bandwidth))
            points.append(LinkPoint("all_reduce", 4, nodes, size, 4 * latency + 1.5 * size / bandwidth))
    source = Profiled(Profile({"cpu": DeviceProfile({}, links=points)}))
    found = source.links_of(resolve_cluster("16xcpu"))
    inside, between = found.link(0, 1), found.link(0, 8)
    assert inside.bandwidth_bytes_per_s == pytest.approx(2e9) and inside.latency_s == pytest.approx(5e-6)
    assert between.bandwidth_bytes_per_s == pytest.approx(0.5e9) and between.latency_s == pytest.approx(50e-6)
    assert group_of(found, range(2)).time_s("all_reduce", 1e6) == pytest.approx(10e-6 + 1e6 / 2e9)


def test_without_measured_links_the_cluster_stays() -> None:
    cluster = resolve_cluster("2xh200-141gb")
    assert open_costs("profile:h200-141gb").links_of(cluster) is cluster
    assert Roofline(in_company=False).links_of(cluster) is cluster
