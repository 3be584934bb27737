"""The demo's training (``fp8compile.extras.demo``) with any optimizer: same initial weights, batches, clipping and rates.

rate, betas, weight decay    as in ``fp8compile.extras.demo.model``: 1e-3 (size "cpu"), (0.9, 0.99), 0.1
products                     FP32, so that nothing but the optimizer differs, or BF16 under autocast; parameters FP32 or BF16
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from fp8compile.extras.demo.data import Corpus, load_corpus, train_batches
from fp8compile.extras.demo.loop import Task, evaluate, train_step
from fp8compile.extras.demo.model import Size, build_model, rate_schedule
from fp8compile.extras.demo.precision import Precision
from fp8compile.extras.demo.results import Run

CPU = torch.device("cpu")
Make = Callable[[nn.Module, dict[str, Any]], torch.optim.Optimizer]
Watch = Callable[[int, torch.optim.Optimizer, nn.Module], None]


@dataclass
class Demo:
    """What every run shares.

    Attributes:
        compiled: whether Inductor compiles the model; the optimizer has a switch of its own.
        evaluate_at: steps after which the validation loss is taken, beside the last.
        products: dtype of matmuls; bfloat16: under autocast.
        build: what makes the model, of a size, from a seed, on a device.
    """

    size: Size
    steps: int
    compiled: bool = True
    evaluate_at: tuple[int, ...] = ()
    products: torch.dtype = torch.float32
    corpus: Corpus = field(default_factory=load_corpus)
    build: Callable[[Size, int, torch.device], nn.Module] = build_model

    def settings(self) -> dict[str, Any]:
        """The optimizer's, as the demo has them."""
        return {"lr": self.size.rate, "betas": (0.9, 0.99), "weight_decay": 0.1}

    def run(
        self,
        make: Make,
        seed: int,
        dtype: torch.dtype = torch.float32,
        watch: Watch | None = None,
        compile_model: Callable[[nn.Module], Any] = torch.compile,
    ) -> Run:
        """Train from ``seed`` with the optimizer that ``make(model, settings)`` returns."""
        torch._dynamo.reset()
        model = self.build(self.size, seed, CPU).to(dtype)
        optimizer = make(model, self.settings())
        schedule = LambdaLR(optimizer, rate_schedule(self.steps))
        step_model = compile_model(model) if self.compiled else model
        task = Task(self.size, Precision(self.products, "as asked", {}), self.corpus, CPU, self.steps)
        run, validation = Run("", seed), task.validation()
        for tokens in train_batches(self.corpus.train, self.size.batch, self.size.length, seed, self.steps):
            start = time.perf_counter()
            run.losses.append(train_step(model, step_model, tokens, optimizer, task))
            run.step_seconds.append(time.perf_counter() - start)
            schedule.step()
            if len(run.losses) in (*self.evaluate_at, self.steps):
                evaluate(run, model, validation, task)
            if watch is not None:
                watch(len(run.losses), optimizer, model)
        run.status = "done"
        return run

    def about(self) -> dict[str, Any]:
        """The task in numbers, for JSON."""
        size = self.size
        shape = {"hidden": size.hidden, "intermediate": size.intermediate, "layers": size.layers, "heads": size.heads}
        batch = {"windows": size.batch, "bytes_per_window": size.length}
        settings = self.settings() | {"clip_norm": 1.0, "schedule": "warm-up, cosine to a tenth", "steps": self.steps}
        model = {"size": size.name, **shape, "codegen": "inductor" if self.compiled else "eager"}
        model["products"] = str(self.products).removeprefix("torch.")
        return {"model": model, "batch": batch, "training": settings, "text_sha256": self.corpus.sha256}
