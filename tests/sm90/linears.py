"""The case under test, a Llama layer, and the recipes it is lowered with."""

from __future__ import annotations

from fp8compile.recipe.recipe import Recipe

BATCH, SEQ, HIDDEN, FFN, HEADS = 2, 256, 512, 1376, 8
UNIT = BATCH * SEQ * HIDDEN * 2  # bytes of one activation in BF16
PLAIN, STORAGE, DEFAULT, LINEAR_ONLY, E4M3, ROWWISE = (
    *("inductor", "storage_only", "default", "linear_only"),
    *("linears.formats=e4m3", "linears=rowwise"),
)
RECIPES = {
    STORAGE: Recipe(linears="off"),
    DEFAULT: Recipe(linears="tensorwise"),
    LINEAR_ONLY: Recipe(linears="tensorwise", saved="off"),
    E4M3: Recipe(linears={"mode": "tensorwise", "formats": "e4m3"}),
    ROWWISE: Recipe(linears="rowwise"),
}
TENSORWISE = (DEFAULT, LINEAR_ONLY, E4M3)
FP8 = (*TENSORWISE, ROWWISE)
IN_CI = (LINEAR_ONLY,)
