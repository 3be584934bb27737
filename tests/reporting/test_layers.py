from __future__ import annotations

from fp8compile.reporting.layers import LayerRow, collapsed


def _paths(*modules: str) -> list[tuple[str, int]]:
    return [(row.module, row.times) for row in collapsed(LayerRow(module, ()) for module in modules)]


def test_layers_that_are_alike_are_one_row() -> None:
    assert _paths("layers.0.mlp", "layers.1.mlp", "layers.2.mlp") == [("layers.0-2.mlp", 3)]
    assert _paths("layers.0.mlp", "layers.0.attn", "layers.1.mlp") == [("layers.0-1.mlp", 2), ("layers.0.attn", 1)]
    assert _paths("h.0", "h.1", "h.3", "h.7", "h.8") == [("h.0-1,3,7-8", 5)]
    assert _paths("lm_head", "lm_head", "") == [("lm_head", 2), ("", 1)]


def test_paths_with_two_numbers_have_two_ranges() -> None:
    assert _paths(*(f"layers.{i}.experts.{j}.w1" for i in range(3) for j in range(4))) == [
        ("layers.0-2.experts.0-3.w1", 12)
    ]


def test_ranges_never_claim_a_path_that_was_not_given() -> None:
    rows = _paths("layers.0.experts.1.w", "layers.1.experts.0.w")
    assert rows == [("layers.0.experts.1.w", 1), ("layers.1.experts.0.w", 1)]
    resnet = ("layer1.0.conv1", "layer1.1.conv1", "layer2.0.conv1", "layer2.1.conv1")
    assert _paths(*resnet) == [("layer1.0-1.conv1", 2), ("layer2.0-1.conv1", 2)], "layer1 is a name, not a number"


def test_other_cells_keep_rows_apart_and_sums_add_up() -> None:
    rows = collapsed(
        [
            LayerRow("a.0", ("int8",), (4, 2), 3),
            LayerRow("a.1", ("e4m3",), (4, 2)),
            LayerRow("a.2", ("int8",), (4, 1), 2),
        ]
    )
    assert rows == [LayerRow("a.0,2", ("int8",), (8, 3), 5), LayerRow("a.1", ("e4m3",), (4, 2), 1)]
