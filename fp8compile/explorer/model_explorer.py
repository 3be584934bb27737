"""The graphs in the JSON of Google's Model Explorer (https://github.com/google-ai-edge/model-explorer).

One collection, ``{"label", "graphs": [{"id", "nodes"}]}``; a node has ``id``, ``label``, a ``namespace`` of nested layers,
``attrs`` as pairs of ``key`` and ``value``, and ``incomingEdges`` (its graph_builder.py). A forward and a backward are one
graph with the top layers "forward" and "backward"; what is saved goes from one to the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from fp8compile.explorer.content import PageContent, PageGraph
from fp8compile.explorer.homes import Home, homes_of
from fp8compile.fx.listing import GraphPart, Line


def model_explorer_json(content: PageContent) -> str:
    """The graphs after the last pass.

    Raises:
        ValueError: no graph of the report has its passes: it was not made by ``fp8compile.explain``.
    """
    graphs = [_graph(f"graph {at}", graph, content) for at, graph in enumerate(content.graphs) if graph.steps]
    if not graphs:
        raise ValueError(
            "this report has no graphs to draw: fp8compile.explain(model, args) keeps them; report(compiled) does not, "
            "since compiled code may come from a cache"
        )
    return json.dumps({"label": content.title, "graphs": graphs}, ensure_ascii=False)


def _graph(name: str, graph: PageGraph, content: PageContent) -> dict[str, Any]:
    parts = graph.steps[-1].after.parts
    saved = {k.backward: k.forward for k in graph.picture.kept} if graph.picture else {}
    reasons = {row.node: table.name for table in content.tables for row in table.rows if row.node}
    nodes = [node for at, part in enumerate(parts) for node in _nodes(at, part, saved, reasons)]
    return {"id": name, "nodes": nodes}


def _nodes(
    at: int, part: GraphPart, saved: Mapping[str, str], reasons: Mapping[str, str]
) -> Iterable[dict[str, Any]]:
    homes = homes_of(part)
    for line in part.lines:
        edges = [_edge(f"{at}/{name}", place) for place, name in enumerate(line.reads)]
        if line.kind == "input" and part.title == "backward" and line.name in saved:
            edges.append(_edge(f"0/{saved[line.name]}", 0))
        yield {
            "id": f"{at}/{line.name}",
            "label": line.op,
            "namespace": _namespace(part.title, homes[line.name]),
            "attrs": [{"key": key, "value": value} for key, value in _facts(line, reasons).items() if value],
            "incomingEdges": edges,
            "outputsMetadata": [{"id": "0", "attrs": [{"key": "tensor_shape", "value": line.value}]}],
        }


def _facts(line: Line, reasons: Mapping[str, str]) -> dict[str, str]:
    return {
        "name": line.name,
        "bytes": f"{line.nbytes:,}" if line.nbytes else "",
        "source": line.source,
        "fp8compile": line.spliced,
        "told of in": reasons.get(line.name, ""),
    }


def _namespace(title: str, home: Home) -> str:
    return "/".join(part for part in (title, *home.module.split("."), home.group.replace("/", " ")) if part)


def _edge(source: str, place: int) -> dict[str, str]:
    return {"sourceNodeId": source, "sourceNodeOutputId": "0", "targetNodeInputId": str(place)}
