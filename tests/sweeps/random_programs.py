"""Random training programs: 5 to 30 operations with parameters, poles, comparisons, indexing and in-place updates.

A program is a list of lines, each of which makes a value of values before it:

    v7 = torch.log(v3.abs() + 0.01)
    v8 = v7 / v7.abs().amax(-1, keepdim=True)

It is made line by line and run meanwhile, in float64: a line whose value is not finite, vanishes or explodes is drawn again,
so that eager is finite by construction. The loss is the mean of the squares of some values about fixed ones: the squares
of what a norm gives have no gradient.

The generator is a ``random.Random`` and not a hypothesis strategy: one integer then names a program in every process and on
every machine (the sweep runs 1,000 in several), no database is kept, and shrinking, which compiles at every step, needs to
know the language: a line goes, and its readers read its first operand (``shrunk``).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.reference import sqnr_db
from tests.sweeps.random_lines import FACTORS, HARSH, NEAR, SCALES, TEMPLATES


@dataclass(frozen=True)
class Line:
    """``name = text`` with the names of its operands put in, and perhaps a statement that changes something behind it."""

    name: str
    text: str
    operands: tuple[str, ...]

    @property
    def source(self) -> str:
        text = self.text
        for i, operand in enumerate(self.operands):
            text = text.replace(f"<{i}>", operand)
        return f"{self.name} = {text}"


@dataclass(frozen=True)
class Program:
    """``python`` shows it. Inputs x0 and x1 have gradients, ``data`` has none; ``state`` is a buffer."""

    seed: int
    rows: int
    columns: int
    dtype: torch.dtype
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]

    @property
    def python(self) -> str:
        parameters = ", ".join(self.parameters)
        body = "\n".join(f"    {line.source}" for line in self.lines)
        return (
            f"# seed {self.seed}: {len(self.lines)} lines, [{self.rows}, {self.columns}] {self.dtype}\n"
            f"def program(x0, x1, data, order, state{', ' + parameters if parameters else ''}):\n{body}\n"
            f"    probe = torch.linspace(-1, 1, {self.columns}, dtype=x0.dtype)\n"
            f"    return {' + '.join(f'({o} + probe).square().mean()' for o in self.outputs)}\n"
        )

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name: w<i> a square matrix, g<i> a row."""
        words = {w for line in self.lines for w in _words(line.source)}
        named = sorted(w for w in words if w[0] in "wg" and w[1:].isdigit())
        return {n: (self.columns,) * (2 if n[0] == "w" else 1) for n in named}

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return any("dropout" in line.text for line in self.lines)


class Model(nn.Module):
    """A program with its parameters and its buffer; ``checkpointed``: as one region that the backward computes again."""

    def __init__(self, program: Program, dtype: torch.dtype, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        for name, shape in program.parameters.items():  # each by its name: a shrunk program keeps its values
            generator = torch.Generator().manual_seed(program.seed * 1000 + int(name[1:]) * 2 + (name[0] == "w"))
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            scaled = value / math.sqrt(program.columns) if len(shape) == 2 else 1 + 0.2 * value
            self.register_parameter(name, nn.Parameter(scaled.to(program.dtype).to(dtype)))
        generator = torch.Generator().manual_seed(program.seed)
        state = torch.randn(program.columns, generator=generator, dtype=torch.float64)
        self.register_buffer("state", (state * 0.5).to(program.dtype).to(dtype))
        namespace: dict[str, Callable[..., Tensor]] = {}
        exec(program.python, {"torch": torch, "F": F}, namespace)
        self.names, self.program = tuple(program.parameters), namespace["program"]

    def forward(self, x0: Tensor, x1: Tensor, data: Tensor, order: Tensor) -> Tensor:
        given = (x0, x1, data, order, self.state, *(getattr(self, name) for name in self.names))
        return checkpoint(self.program, *given, use_reentrant=False) if self.checkpointed else self.program(*given)


def arguments(program: Program, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Inputs of the program's own dtype, in ``dtype``; the same numbers at every call."""
    generator = torch.Generator().manual_seed(program.seed + 1)
    shape = (program.rows, program.columns)
    x0, x1, data = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    order = torch.stack([torch.randperm(program.columns, generator=generator) for _ in range(program.rows)])
    x0, x1, data = (x.to(program.dtype).to(dtype) for x in (x0, x1, data))
    return x0.requires_grad_(), x1.requires_grad_(), data, order


def gradients(
    program: Program,
    compile_it: Callable[[nn.Module], Callable[..., Tensor]] | None,
    dtype: torch.dtype,
    checkpointed: bool = False,
) -> dict[str, Tensor]:
    """The gradients of the loss by every parameter and input that it depends on."""
    model, args = Model(program, dtype, checkpointed), arguments(program, dtype)
    torch.manual_seed(program.seed)
    run = compile_it(model) if compile_it else model
    run(*args).backward()  # type: ignore[no-untyped-call]
    named = {**dict(model.named_parameters()), "x0": args[0], "x1": args[1]}
    return {name: p.grad for name, p in named.items() if p.grad is not None}


# ------------------------------------------------------------------------------------------------------- making one


def program_of(seed: int, dtype: torch.dtype = torch.float32, least_db: float = 40.0, longest: int = 30) -> Program:
    """The program of that seed: the first drawn whose gradients eager computes in ``dtype`` at ``least_db`` of float64's."""
    draw = random.Random(seed)
    while True:
        found = _drawn(draw, seed, dtype, longest)
        if found is not None and is_well_conditioned(found, least_db):
            return found


def is_well_conditioned(program: Program, least_db: float) -> bool:
    """Whether eager runs it and is right in the program's own dtype."""
    try:
        exact, own = (gradients(program, None, dtype) for dtype in (torch.float64, program.dtype))
    except (RuntimeError, ValueError, IndexError):
        return False  # an in-place update of what autograd needs, a shape that does not fit: eager raises
    if not exact or not all(bool(g.isfinite().all()) and float(g.norm()) > 1e-12 for g in exact.values()):
        return False
    return all(sqnr_db(exact[name], own[name]) >= least_db for name in exact)


def _drawn(draw: random.Random, seed: int, dtype: torch.dtype, longest: int) -> Program | None:
    program = Program(seed, draw.choice((32, 48, 64)), draw.choice((40, 64, 96, 128, 200)), dtype, (), ("x0",))
    wanted, failures = draw.randint(5, longest), 0
    while len(program.lines) < wanted and failures < 40:
        line = _line(draw, program)
        longer = replace(program, lines=(*program.lines, line), outputs=(line.name,))
        if _is_sane(longer):
            program = longer
        else:
            failures += 1
    program = _without_dead_lines(replace(program, outputs=tuple(_unread(program)[-5:])))
    return program if len(program.lines) >= 5 else None


def _unread(program: Program) -> list[str]:
    read = {o for line in program.lines for o in line.operands}
    return [line.name for line in program.lines if line.name not in read]


def _line(draw: random.Random, program: Program) -> Line:
    weights = [weight for weight, _ in TEMPLATES.values()]
    kind = draw.choices(list(TEMPLATES), weights)[0] if program.lines else "weighted"
    gentle = program.seed % 2 == 1
    text = draw.choice([t for t in TEMPLATES[kind][1] if not (gentle and any(word in t for word in HARSH))])
    name, known = f"v{len(program.lines)}", ["x0", "x1", *(line.name for line in program.lines)]
    operands = [_operand(draw, known, _unread(program)) for _ in range(1 + ("{1}" in text))]
    new = len(program.parameters)
    fresh = new < 3 or draw.random() < 0.5
    filled = text.format(
        *(f"<{i}>" for i in range(len(operands))),
        e=draw.choice(NEAR),
        s=draw.choice(SCALES),
        f=draw.choice(FACTORS),
        w=f"w{new if fresh else draw.randrange(new)}",
        g=f"g{new if fresh else draw.randrange(new)}",
        t=name,
    )
    return Line(name, filled, tuple(operands))


def _operand(draw: random.Random, known: list[str], unread: list[str]) -> str:
    """A value that nothing reads yet, a new one, or any."""
    kind = draw.random()
    return draw.choice(unread if unread and kind < 0.4 else known[-3:] if kind < 0.8 else known)


def _is_sane(program: Program) -> bool:
    """Whether the last line gives a value of the right rank that neither vanishes nor explodes."""
    model = Model(replace(program, outputs=("x0",)), torch.float64)
    source = program.python.replace(" + probe).square().mean()", ")").replace("def program", "def last")
    namespace: dict[str, Callable[..., Tensor]] = {}
    exec(source, {"torch": torch, "F": F}, namespace)
    args = arguments(program, torch.float64)
    try:
        with torch.no_grad():
            value = namespace["last"](*args[:4], model.state, *(getattr(model, name) for name in model.names))
    except (RuntimeError, ValueError, IndexError):
        return False
    if value.dim() != 2 or not bool(value.isfinite().all()):
        return False
    return float(value.square().mean().sqrt()) > 1e-3 and float(value.abs().max()) < 300


# ---------------------------------------------------------------------------------------------------------- shrinking


def shrunk(program: Program, still_fails: Callable[[Program], bool], tries: int = 200) -> Program:
    """A smaller program that fails as well: one output, and no line that can go."""
    for candidate in (replace(program, outputs=(o,)) for o in program.outputs):
        if len(program.outputs) > 1 and still_fails(_without_dead_lines(candidate)):
            program = _without_dead_lines(candidate)
            break
    while tries > 0:
        for candidate in _smaller(program):
            tries -= 1
            if still_fails(candidate):
                program = candidate
                break
            if tries <= 0:
                break
        else:
            return program
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """With a line less, later ones first: its readers read one of its operands instead."""
    for i in reversed(range(len(program.lines))):
        gone = program.lines[i]
        for instead in dict.fromkeys(gone.operands):
            renamed = {gone.name: instead}
            lines = tuple(
                replace(line, operands=tuple(renamed.get(o, o) for o in line.operands))
                for line in program.lines
                if line is not gone
            )
            outputs = tuple(renamed.get(o, o) for o in program.outputs)
            yield _without_dead_lines(replace(program, lines=lines, outputs=outputs))


def _without_dead_lines(program: Program) -> Program:
    wanted, lines = set(program.outputs), []
    for line in reversed(program.lines):
        if line.name in wanted or "state" in line.text or "data" in line.text:
            wanted.update(line.operands)
            lines.append(line)
    return replace(program, lines=tuple(reversed(lines)))


def _words(text: str) -> list[str]:
    return "".join(c if c.isalnum() or c == "_" else " " for c in text).split()
