"""FP32 islands: code that overflows, healthy models with islands off, by policy and proven ("auto"), and compile time.

snippets   SQNR against float64 (dB) of eager FP16, FP16 under autocast, and compiled with islands "auto"
forms      the same compiled with islands "auto" in four forms (2-D or batched, function or module), each with gradients and
           without; of gradients, the worst SQNR too. Run node by node, every value rounded to its dtype
models     the demo's Llama, BERT and a ViT (benchmarks/studies/loss_scaling_tasks.py) in FP16 and BF16: nodes widened, bytes
           that are saved for backward beyond those with islands off, and the loss after some steps
compile    seconds to compile forward and backward of the Llama in FP16, fresh processes without caches, arms in turn

python benchmarks/studies/bench_islands.py [--parts snippets,forms,models,compile] [--steps 60] [--runs 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8compile.numerics.metrics import sqnr

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a script's own folder is all that is there

import fp8compile
from benchmarks.harness.environment import environment
from benchmarks.studies.loss_scaling_runs import Learner
from benchmarks.studies.loss_scaling_tasks import TRAININGS
from benchmarks.studies.overflowing import (
    CASES,
    SNIPPETS,
    Cameras,
    Case,
    Function,
    LinearAttention,
    in_float64,
    trained_once,
)
from fp8compile.extras.demo import compiling
from fp8compile.extras.demo.model import rate_schedule

MODES = ("off", "policy", "auto")
PARTS = ("snippets", "forms", "models", "compile")
MODELS = ("llama", "bert", "vit")
DTYPES = (torch.float16, torch.bfloat16)
LOSS_SCALE = 2.0**10
COMPILE = "import benchmarks.studies.bench_islands as b; b.compile_once({mode!r})"


def snippets() -> list[dict[str, Any]]:
    """A row a snippet; a result that is not finite is NaN dB."""
    cases = {name: (case.what, Function(case.fn), case.make) for name, case in SNIPPETS.items()}
    cases["linear attention"] = ("1 / inf = 0", LinearAttention(), LinearAttention.inputs)
    cases["cameras"] = ("entries to 5000", Cameras(), Cameras.inputs)
    rows = []
    for name, (what, model, make) in cases.items():
        torch.manual_seed(0)
        args = make()
        reference = model(*in_float64(args))
        fits = reference.abs() <= 65504
        torch._dynamo.reset()
        ours = torch.compile(model, backend="fp8compile")
        with torch.autocast("cpu", torch.float16):
            mixed = model(*args)
        results = {"eager": model(*args), "autocast": mixed, "ours": ours(*(_leaf(a) for a in args))}
        rows.append(
            {"name": name, "what": what} | {arm: sqnr(reference[fits], y[fits]) for arm, y in results.items()}
        )
        print(
            "{name:18s} {what:20s} eager {eager:7.1f}  autocast {autocast:7.1f}  ours {ours:7.1f} dB".format(
                **rows[-1]
            )
        )
    return [{key: _strict(value) for key, value in row.items()} for row in rows]


def forms() -> list[dict[str, Any]]:
    """A row a case; of each form the SQNR with gradients, without, and of the worst gradient."""
    rows = []
    for name, case in CASES.items():
        row: dict[str, Any] = {"name": name, "what": case.what}
        for shape in ("2-D", "batched"):
            for kind in ("function", "module"):
                row[f"{shape} {kind}"] = _form(case, shape == "batched", kind == "module")
        rows.append(row)
        found = [each for form in row.values() if isinstance(form, dict) for each in form.items()]
        worst = {key: min(v for k, v in found if k == key) for key in dict(found)}
        print(f"{name:18s}", "  ".join(f"{key} {value:7.1f}" for key, value in worst.items()), "dB", flush=True)
    strict = {"name": str, "what": str}
    return [
        {key: v if key in strict else {k: _strict(x) for k, x in v.items()} for key, v in row.items()} for row in rows
    ]


def _form(case: Case, batched: bool, module: bool) -> dict[str, float]:
    """SQNR against float64 of a case in one form."""
    torch.manual_seed(0)
    args = case.inputs(batched)
    torch._dynamo.reset()
    options = {"debug.codegen": "eager"}
    fn = torch.compile(Function(case.fn) if module else case.fn, backend="fp8compile", options=options)
    expected, expected_gradients = trained_once(case.fn, in_float64(args))
    result, gradients = trained_once(fn, args)
    with torch.no_grad():
        inferred = fn(*args)
    pairs = zip(expected_gradients, gradients, strict=True)
    return {
        "with gradients": _db(expected, result),
        "without": _db(expected, inferred),
        "gradients": min(_db(e, g) for e, g in pairs),
    }


def _db(reference: Tensor, result: Tensor) -> float:
    """SQNR where the reference fits FP16, errors of half its smallest number not counted; -inf where it is not finite."""
    fits = reference.abs() <= 65504
    reference, result = reference[fits].double(), result[fits].double()
    found = sqnr(reference, torch.where((reference - result).abs() <= 2.0**-25, reference, result))
    return -math.inf if math.isnan(found) else found


def _strict(value: Any) -> Any:
    """JSON knows neither NaN nor inf."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "exact" if value > 0 else "not finite"


def _leaf(a: Tensor) -> Tensor:
    return a.clone().requires_grad_() if a.is_floating_point() else a


def models(steps: int) -> list[dict[str, Any]]:
    """A row for each model, dtype and mode."""
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        for dtype in DTYPES:
            for mode in MODES:
                row = {"model": name, "dtype": str(dtype)[6:], "mode": mode, **_model(name, dtype, mode, steps)}
                off = next(r for r in (*rows, row) if (r["model"], r["dtype"]) == (name, row["dtype"]))
                row["bytes_added"] = row["saved_bytes"] - off["saved_bytes"]
                row["gap_percent"] = 100 * (row["loss"] / off["loss"] - 1)
                rows.append(row)
                print(
                    f"{name:6s} {row['dtype']:9s} {mode:7s} {row['islands']:3d} islands, {row['nodes']:4d} of {row['of']} "
                    f"nodes, {row['bytes_added']:+9d} bytes, loss {row['loss']:.4f} ({row['gap_percent']:+.3f} %)",
                    flush=True,
                )
    return rows


def _model(name: str, dtype: torch.dtype, mode: str, steps: int) -> dict[str, Any]:

    training = TRAININGS[name]
    torch._dynamo.reset()
    compiling.forget_compiled()
    learner = Learner(training.model(0)).to(dtype)
    model = torch.compile(learner, backend="fp8compile", options={"fp32": mode})
    optimizer = training.optimizer(learner, state_format="fp32", master="none", lr=training.rate)
    rate, losses = rate_schedule(steps), []
    for step, (inputs, target) in enumerate(training.batches(0, steps)):
        for group in optimizer.param_groups:
            group["lr"] = training.rate * rate(step)
        inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        loss, _ = model(inputs, target)
        optimizer.zero_grad()
        (loss * LOSS_SCALE).backward()
        for parameter in learner.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(LOSS_SCALE)
        optimizer.step()
        losses.append(float(loss.detach()))
    report = fp8compile.report(model)
    return {
        "islands": len(report.islands),
        "nodes": sum(i.nodes for i in report.islands),
        "of": computing_nodes(learner, dtype, name),
        "saved_bytes": report.saved_bytes,
        "loss": statistics.fmean(losses[-10:]),
    }


def computing_nodes(learner: Learner, dtype: torch.dtype, name: str) -> int:
    """How many nodes of the joint graph compute: no views, casts or copies."""
    training = TRAININGS[name]
    inputs, target = next(iter(training.batches(0, 1)))
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    report = fp8compile.explain(learner, (inputs, target), recipe="off", loss=lambda out: out[0])
    counts = report.graphs[0].steps[0].before.counts if report.graphs[0].steps else {}
    return sum(n for op, n in counts.items() if op not in ("input", "output") and not _is_layout(op))


def _is_layout(op: str) -> bool:
    names = (
        "view",
        "permute",
        "expand",
        "slice",
        "select",
        "squeeze",
        "convert_element",
        "clone",
        "getitem",
        "alias",
    )
    return any(each in op for each in names)


def compile_once(mode: str) -> None:
    """In a process of its own: the seconds to compile the Llama's forward and backward, on the last line."""
    training = TRAININGS["llama"]
    learner = Learner(training.model(0)).half()
    inputs, target = next(iter(training.batches(0, 1)))
    model = torch.compile(learner, backend="fp8compile", options={"fp32": mode, "fp32.observe": False})
    began = time.perf_counter()
    model(inputs, target)[0].backward()
    print(time.perf_counter() - began)


def compile_times(runs: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {mode: [] for mode in ("off", "auto")}
    for _ in range(runs):
        for mode, found in seconds.items():
            with tempfile.TemporaryDirectory() as cache:
                env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(sys.path)}
                command = [sys.executable, "-W", "ignore", "-c", COMPILE.format(mode=mode)]
                ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            found.append(float(ran.stdout.splitlines()[-1]))
            print(f"islands {mode}: compiled in {found[-1]:.1f} s", flush=True)
    medians = {mode: statistics.median(found) for mode, found in seconds.items()}
    return {"seconds": seconds, "ratio": medians["auto"] / medians["off"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    wanted = args.parts.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"no part {sorted(unknown)[0]!r}; known: {', '.join(PARTS)}")
    results: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    make = {
        "snippets": snippets,
        "forms": forms,
        "models": lambda: models(args.steps),
        "compile": lambda: compile_times(args.runs),
    }
    for part in wanted:
        results |= {part: make[part](), **environment()}
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
