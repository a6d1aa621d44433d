"""`penstock list`: the models, devices, clusters, schedules and profiles that Penstock knows by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.console import JsonFlag, VerboseFlag, format_bytes, format_count, format_usd, out, print_json, say, table
from penstock.errors import InputError, near_misses

if TYPE_CHECKING:
    from penstock.clusters import Device

__all__ = ["list_"]

Row = dict[str, Any]


@dataclass(frozen=True)
class _Catalogue:
    """One kind of things with names."""

    noun: str
    rows: Callable[[], Iterator[Row]]
    """Each with its `name` first; what `--json` prints."""
    shown: Callable[[Row], Row]
    """The same row as text for people."""
    more: tuple[str, ...]
    """Columns that a narrow terminal may leave out."""
    hint: str
    """How a name is used, and what there is beside the names."""


def list_(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="models, devices, clusters, schedules or profiles.")],
    word: Annotated[str, typer.Argument(metavar="[WORD]", help="Only those with this in their name or family.")] = "",
    verbose: VerboseFlag = False,
    json: JsonFlag = False,
) -> None:
    """List what can be named: models, devices, clusters to rent, schedules, and profiles that come with Penstock.

    Example: penstock list models llama
    """
    if what not in _CATALOGUES:
        raise InputError(f"there is no list of '{what}'. {near_misses(what, _CATALOGUES)}")
    catalogue = _CATALOGUES[what]
    rows = list(catalogue.rows())
    found = [row for row in rows if word.lower() in f"{row['name']} {row.get('family', '')} {row.get('device', '')}".lower()]
    if not found:
        raise InputError(f"no {catalogue.noun} has '{word}' in its name. {near_misses(word, [row['name'] for row in rows])}")
    if json:
        print_json({what: found})
        return
    shown = [catalogue.shown(row) for row in found]
    out().print(table("", list(shown[0]), (list(row.values()) for row in shown), more=catalogue.more, verbose=verbose))
    say(catalogue.hint)


def _models() -> Iterator[Row]:
    from penstock.models.catalog import model_names, resolve_model

    for name, family in model_names().items():
        model = resolve_model(name)
        yield {
            "name": name, "family": family, "parameters": model.num_parameters, "num_ops": model.num_ops, "seq_length": model.seq_length,
            "dec_length": model.dec_length, "dtype": model.dtype,
        }  # fmt: skip


def _shown_model(row: Row) -> Row:
    lengths = " + ".join(f"{length:,}" for length in (row["seq_length"], row["dec_length"]) if length)
    return {
        "name": row["name"], "family": row["family"], "parameters": format_count(row["parameters"]), "ops": row["num_ops"],
        "tokens of a sample": lengths or "images", "precision": row["dtype"],
    }  # fmt: skip


def _devices() -> Iterator[Row]:
    from penstock.clusters.devices import DEVICES

    for device in DEVICES.values():
        yield {
            "name": device.name, "memory_bytes": device.memory_bytes, "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
            **{f"{dtype}_flops_per_s": _rate(device, dtype) for dtype in ("bf16", "fp16", "fp32")}, "intra": device.intra.kind,
            "source": device.source,
        }  # fmt: skip


def _rate(device: Device, dtype: str) -> float | None:
    return getattr(device, f"{dtype}_flops_per_s")  # type: ignore[no-any-return]


def _shown_device(row: Row) -> Row:
    rates = {f"{dtype} Tflop/s": _tera(row[f"{dtype}_flops_per_s"]) for dtype in ("bf16", "fp16", "fp32")}
    bandwidth = f"{row['memory_bandwidth_bytes_per_s'] / 1e9:,.0f} GB/s"
    return {
        "name": row["name"], "memory": format_bytes(row["memory_bytes"]), "bandwidth": bandwidth, **rates, "link": row["intra"],
        "source": row["source"],
    }  # fmt: skip


def _tera(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e12:,.4g}"


def _clusters() -> Iterator[Row]:
    from penstock.clusters.instances import INSTANCES

    for node in INSTANCES.values():
        yield {
            "name": node.name, "device": node.device.name, "num_devices": node.num_devices, "intra": node.intra.kind,
            "network_bytes_per_s": node.inter.bandwidth_bytes_per_s, "price_usd_per_h": node.price_usd_per_h,
            "price_date": node.price_date, "price_source": node.price_source,
        }  # fmt: skip


def _shown_cluster(row: Row) -> Row:
    return {
        "name": row["name"], "devices": f"{row['num_devices']} × {row['device']}", "link": row["intra"],
        "network": f"{row['network_bytes_per_s'] * 8 / 1e9:,.0f} Gbit/s", "an hour": format_usd(row["price_usd_per_h"]),
        "as of": row["price_date"], "source": row["price_source"],
    }  # fmt: skip


def _schedules() -> Iterator[Row]:
    from penstock.schedules.rules import SCHEDULES

    for rules in SCHEDULES.values():
        yield {"name": rules.name, "searched": rules.searched, "about": rules.about}


def _profiles() -> Iterator[Row]:
    from penstock.costs.profile import read_profile
    from penstock.costs.sources import shipped_profiles

    for name, path in shipped_profiles().items():
        for device, measured in read_profile(path).devices.items():
            ops, dtypes = ({getattr(key, part) for key in measured.series} for part in ("op", "dtype"))
            yield {"name": name, "device": device, "num_ops": len(ops), "dtypes": sorted(dtypes), "about": measured.about}


def _shown_profile(row: Row) -> Row:
    return {"name": row["name"], "device": row["device"], "kinds of ops": row["num_ops"], "precisions": ", ".join(row["dtypes"])}


_CATALOGUES = {
    "models": _Catalogue("model", _models, _shown_model, ("precision",),
                         "Use one as --model NAME. A YAML file of other sizes, hf:PATH/config.json and your own module (`penstock import`) "
                         "work too: docs/reference/model.md."),
    "devices": _Catalogue("device", _devices, _shown_device, ("source",),
                          "Use them as --cluster 4xNAME: nodes of eight. Others are described in a file: docs/reference/cluster.md."),
    "clusters": _Catalogue("instance", _clusters, _shown_cluster, ("as of", "source"),
                           "Use them as --cluster 2xNAME, or 2xNAME+1xOTHER; `local` is this machine, and a file describes anything else: "
                           "docs/reference/cluster.md."),
    "schedules": _Catalogue("schedule", _schedules, lambda row: {**row, "searched": "yes" if row["searched"] else "no"}, (),
                            "`penstock search` chooses among those searched (--schedules); any plan may name any: docs/schedules.md."),
    "profiles": _Catalogue("profile", _profiles, _shown_profile, (),
                           "Use one as --costs profile:NAME. `penstock profile` measures your own model and device."),
}  # fmt: skip
