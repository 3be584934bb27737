"""Graphs folded to be drawn: a node for each call, views gone, no long edge; the expanded drawing has everything."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

import fp8compile
from fp8compile import Recipe
from fp8compile.fx.dot import to_dot
from fp8compile.fx.folding import FAR, folded
from fp8compile.fx.listing import GraphPart, Line
from fp8compile.fx.snapshot import Snapshot
from tests.support.dumped import Gated


def last(**fields: object) -> Snapshot:
    recipe = Recipe(**{"saved.min_numel": 0}, **fields)  # type: ignore[arg-type]
    return fp8compile.explain(Gated(), (torch.randn(128, 64),), recipe=recipe).graphs[0].steps[-1].after


def test_an_encode_and_a_decode_are_a_node_each() -> None:
    snapshot = last(saved="int8")
    forward, backward = map(folded, snapshot.parts)
    [encode] = [line for line in forward.lines if line.spliced]
    [decode] = [line for line in backward.lines if line.spliced]
    assert re.fullmatch(r"encode INT8 per 64, \d+ nodes \(returned\)", encode.op), encode.op
    assert re.fullmatch(r"decode INT8 per 64, \d+ nodes", decode.op), decode.op
    assert encode.value == "int8[128, 64], bf16[128, 1]" and encode.reads == ("tanh",)
    inside = int(re.findall(r"\d+ nodes", encode.op)[0].split()[0])
    assert inside == sum(line.spliced != "" for line in snapshot.parts[0].lines) > 5
    assert "encode INT8 per 64" in snapshot.to_dot() and "INT8 per" not in snapshot.to_dot(expand=True)
    assert snapshot.to_dot(expand=True).count("fillcolor") == sum(len(part.lines) for part in snapshot.parts)


@pytest.mark.parametrize(("linear", "label"), [("tensorwise", "E4M3 per tensor"), ("rowwise", "E4M3 per 64")])
def test_an_operand_of_a_linear_names_its_format_and_scales(linear: str, label: str) -> None:
    assert f"encode {label}" in last(linears=linear, saved="off", **{"linears.emulate": True}).to_dot()


def test_what_reads_a_view_reads_what_it_looks_at() -> None:
    for part in last().parts:
        lines = {line.name: line for line in part.lines}
        kept = folded(part).lines
        assert not [line.name for line in kept if line.is_view or line.kind == "output"]
        names = {line.name for line in kept}
        assert all(set(line.reads) <= names and line.name not in line.reads for line in kept)
        matmuls = [line for line in kept if line.kind == "matmul"]
        assert matmuls and {p.name for p in matmuls} == {n for n, line in lines.items() if line.kind == "matmul"}


def line(name: str, *reads: str, kind: str = "other", spliced: str = "") -> Line:
    return Line(name, kind, "op", "f32[2]", "", "", reads, spliced)


def test_a_far_reader_names_what_it_reads_and_an_input_stands_beside_its_reader() -> None:
    chain = [line("a0")] + [line(f"a{i}", f"a{i - 1}") for i in range(1, FAR + 2)]
    part = folded(GraphPart("", (line("x", kind="input"), *chain, line("b", f"a{FAR + 1}", "a0", "x", "a1"))))
    assert [each.name for each in part.lines[-2:]] == ["x", "b"]
    assert part.lines[-1].reads == (f"a{FAR + 1}", "x") and part.lines[-1].comment == "reads a0, a1, far above"


def test_two_calls_of_one_name_stay_two() -> None:
    first = [line("c"), line("e", "x", "c"), line("f", "e")]
    lines = [line("x", kind="input"), line("y", "x")]
    lines += [Line(**{**vars(each), "spliced": "encode(x)"}) for each in first]
    lines += [line("g", "y", spliced="encode(y)"), line("h", "g", spliced="encode(y)"), line("z", "f", "h")]
    kept = {each.name: each.reads for each in folded(GraphPart("", tuple(lines))).lines}
    assert kept == {"x": (), "y": ("x",), "f": ("x",), "h": ("y",), "z": ("f", "h")}


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
def test_dot_draws_what_is_folded(tmp_path: Path) -> None:
    """As many nodes, and edges to each, as a folded Llama of 12 layers has in its backward."""
    lines = [line("n0"), line("n1", "n0")]
    lines += [
        line(f"n{i}", f"n{i - 1}", *(f"n{i - d}" for d in (7, 300) if i % 3 == 0 and i > d)) for i in range(2, 2200)
    ]
    (tmp_path / "x.dot").write_text(to_dot([folded(GraphPart("", tuple(lines)))]))
    start = time.perf_counter()
    subprocess.run(["dot", "-Tsvg", "-o", tmp_path / "x.svg", tmp_path / "x.dot"], check=True, timeout=60)
    assert time.perf_counter() - start < 60 and (tmp_path / "x.svg").read_text().count('<g id="node') == 2200
