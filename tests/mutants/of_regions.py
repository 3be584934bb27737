"""Faults in what checkpointed regions keep."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

REGIONS = (
    Mutant(
        "checkpointed: a product of codes is of no region",
        "fp8compile/encoding/products.py",
        "    stand_in(product, node)\n",
        "",
        ("tests/fx/test_checkpointed.py",),
    ),
    Mutant(
        "checkpointed: what is read outside joins a region",
        "fp8compile/fx/checkpointed.py",
        "if not regions or OUTSIDE in regions or",
        "if not regions or",
        ("tests/fx/test_checkpointed.py",),
    ),
    Mutant(
        "checkpointed: what the backward alone reads stays outside",
        "fp8compile/fx/checkpointed.py",
        "        if not read_in[node]:",
        "        if False:",
        ("tests/fx/test_checkpointed.py",),
    ),
    Mutant(
        "recomputed: constants that are alike are taken for two",
        "fp8compile/analysis/recomputed.py",
        "(own is early or _are_one_constant(own, early))",
        "own is early",
        ("tests/analysis/test_recomputed.py",),
    ),
    Mutant(
        "recomputed: what is made of nothing is taken for a constant",
        "fp8compile/analysis/recomputed.py",
        "a.target in CONSTANTS and _is_same",
        "_is_same",
        ("tests/analysis/test_recomputed.py",),
    ),
    Mutant(
        "residual sums: what has seen the value itself may be added",
        "fp8compile/analysis/sensitivity/residual.py",
        "        if node is self.used or node not in self.dependent:\n            return False",
        "        if node is self.used or node not in self.dependent:\n            return True",
        ("tests/passes/test_save_statistics.py",),
    ),
    Mutant(
        "residual sums: a norm without a matmul is enough",
        "fp8compile/analysis/sensitivity/residual.py",
        "self._passes(f, mixed=True)",
        "self._passes(f, mixed=False)",
        ("tests/passes/test_save_statistics.py",),
    ),
    Mutant(
        "residual sums: the stream may be scaled",
        "fp8compile/analysis/sensitivity/residual.py",
        "        return itself(node) is self.used or self.is_of(node)",
        "        return True",
        ("tests/passes/test_save_statistics.py",),
    ),
    Mutant(
        "recompute_kept: what is made from a mask keeps the mask",
        "passes/recompute_kept.py",
        "_chain(edge.forward, set(), split)",
        "None",
        ("tests/passes/test_recompute_kept_less.py",),
    ),
    Mutant(
        "recompute_kept: a cast that rounds is undone",
        "passes/recompute_kept.py",
        "before in SIXTEEN_BIT and after is torch.float32",
        "True",
        ("tests/passes/test_recompute_kept_less.py",),
    ),
    Mutant(
        "recompute_kept: anything is small",
        "passes/recompute_kept.py",
        'most = nbytes(edge.forward.meta["val"]) // SMALL',
        'most = nbytes(edge.forward.meta["val"])',
        ("tests/passes/test_recompute_kept_less.py",),
    ),
    Mutant(
        "bits: the last word is not counted",
        "fp8compile/numerics/bits.py",
        "return -(-math.prod(shape) // WORD)",
        "return math.prod(shape) // WORD",
        ("tests/numerics/test_bits.py",),
    ),
    Mutant(
        "bits: places from the other end",
        "fp8compile/numerics/bits.py",
        ">> _places(codes)",
        ">> (WORD - 1 - _places(codes))",
        ("tests/numerics/test_bits.py",),
    ),
    Mutant(
        "masks: the caller's are packed too",
        "fp8compile/fx/regions.py",
        "not kept_by_region(made) and not split.caller_owns(storage_root(made))",
        "not kept_by_region(made)",
        ("tests/passes/test_encode_saved_masks.py",),
    ),
    Mutant(
        "masks: in another order than that of memory",
        "fp8compile/encoding/stored.py",
        "found = self.codec.decode(parts[0], stored_as)",
        "found = self.codec.decode(parts[0], sorted(stored_as))",
        ("tests/passes/test_encode_saved_masks.py",),
    ),
    Mutant(
        "save_softmax: logits that something else reads",
        "passes/save_softmax.py",
        "return all(node.users and node in same for",
        "return True or all(node.users and node in same for",
        ("tests/passes/test_save_softmax.py",),
    ),
    Mutant(
        "save_softmax: what stays exact itself",
        "passes/save_softmax.py",
        "        if instead in still:\n",
        "        if False:\n",
        ("tests/passes/test_save_softmax.py",),
    ),
    Mutant(
        "saved: codes of channels-last values have four dimensions",
        "fp8compile/encoding/stored.py",
        "order is not None and codes.dim() == 4 and static",
        "order is None and codes.dim() == 4 and static",
        ("tests/sm90/test_regions_sm90.py",),
    ),
)
