# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What the commands show: progress on stderr, rows as a table and as a plot."""

from __future__ import annotations

import importlib.util
import math
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jax_deconv._bench.peers import ROLES
from jax_deconv._bench.timing import geometric_mean
from jax_deconv.explain import number, table

#: What a table and a plot call a way of `peers`, and the ways whose best it is.
PEERS = {"jax.lax": ("lax",), "lax's best form": ("adj",), "PyTorch": ("torch_last", "torch_first")}


def track(items: Iterable, total: int, title: str) -> Iterator:
    """The items, while a bar shows how many have been taken: tqdm's, where it is installed."""
    if importlib.util.find_spec("tqdm"):
        from tqdm import tqdm

        yield from tqdm(items, title, total, file=sys.stderr)
        return
    for done, item in enumerate(items, 1):
        yield item
        print(f"\r{title}: {done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def best(row: dict, ways: Sequence[str], role: str) -> float | None:
    """The least time of these ways; None where none was timed."""
    return min((time for way in ways if (time := row["times"].get(f"{way}/{role}"))), default=None)


def times_table(rows: Sequence[dict]) -> str:
    """Microseconds of every layer and role."""
    peers = {name: ways for name, ways in PEERS.items()
             if any(best(row, ways, role) for row in rows for role in ROLES)}
    cells = [("layer", "type", "role", "floor", "ours", *peers)]
    for row in rows:
        cells += [(row["id"], row["dtype"], words, number(row["floor_us"]), number(best(row, ["ours"], role)),
                   *(number(best(row, ways, role)) for ways in peers.values())) for role, words in ROLES.items()]
    return table(cells)


def summary(rows: Sequence[dict]) -> dict[str, float]:
    """Geometric means of a peer's time over ours, and of ours over the floor."""
    means = {}
    for role, words in ROLES.items():
        ours = [best(row, ["ours"], role) for row in rows]
        for name, ways in PEERS.items():
            theirs = [best(row, ways, role) for row in rows]
            means[f"{words}: {name} / ours"] = geometric_mean(t / o for t, o in zip(theirs, ours) if t and o)
        means[f"{words}: ours / floor"] = geometric_mean(
            o / row["floor_us"] for row, o in zip(rows, ours) if o and row["floor_us"])
    return {name: mean for name, mean in means.items() if mean}


def plot(rows: Sequence[dict], path: pathlib.Path, title: str, roles: Mapping[str, str] = ROLES) -> str:
    """Draws each time over the floor, or over ours where there is no floor, and says where.

    `roles`: what is timed, by the name that times have, in words.
    """
    if not importlib.util.find_spec("matplotlib"):
        return "no plot: that needs matplotlib (pip install 'jax-deconv[cli]')"
    from matplotlib.figure import Figure

    floors = any(row["floor_us"] for row in rows)
    ways = {"jax_deconv": ("ours",), **PEERS}
    figure = Figure(figsize=(max(7, 2 + 0.35 * len(rows)), 10), layout="constrained")
    panels, lines = figure.subplots(len(roles), 1, sharex=True), {}
    for panel, (role, words) in zip(panels, roles.items()):
        for (name, group), look in zip(ways.items(), ("oC0", "xC1", "+C2", "sC3")):
            heights = [(best(row, group, role) or math.nan) /
                       ((row["floor_us"] if floors else best(row, ["ours"], role)) or math.nan) for row in rows]
            if not all(map(math.isnan, heights)):
                (lines[name],) = panel.plot(heights, look, fillstyle="none" if name == "PyTorch" else "full")
        panel.set(yscale="log", ylabel=f"{words}\ntime / {'floor' if floors else 'ours'}")
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_title(title)
    figure.legend(lines.values(), lines, loc="outside upper center", ncols=len(lines))
    types = len({row["dtype"] for row in rows}) > 1
    names = [f"{row['id']} {row['dtype']}" if types else row["id"] for row in rows]
    panels[-1].set_xticks(range(len(rows)), names, rotation=70, ha="right", fontsize=8)
    figure.savefig(path, dpi=110)
    return str(path)
