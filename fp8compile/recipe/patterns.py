"""Patterns on module paths, as recipes and watchers take them."""

from __future__ import annotations

import fnmatch

# Where Hugging Face, timm and torchtitan keep the output head, in the model itself or in a wrapper around it.
OUTPUT_HEAD_PATTERNS = (
    *("lm_head", "*.lm_head", "embed_out", "*.embed_out", "output_projection", "*.output_projection", "output"),
    *("head", "*.head", "fc", "classifier", "*.classifier", "score", "*.score"),
    *("cls.predictions.decoder", "*.cls.predictions.decoder", "cls.seq_relationship", "qa_outputs", "*.qa_outputs"),
)


def in_module(path: str, pattern: str) -> bool:
    """Whether ``pattern`` matches the module at ``path`` or one that holds it.

    "layers.0" is layers.0 and all under it; "layers.0.*" is all under it; "*.mlp" is every mlp and all under it.
    ``*`` matches dots too. "" stands for what the model does itself, outside all of its modules.
    """
    parts = path.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))
