"""The shells: every optimizer and dtype, groups, schedules, closures, what comes and goes, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fp8compile import optim
from fp8compile.optim import compiled_step
from fp8compile.optim.plan import MASTERS
from tests.support.optim_bounds import U, adam_off_by
from tests.support.optim_models import WIDE, batches, parameters_of, small_model, train

EVERY = [
    ("AdamW", {}),
    ("Adam", {}),
    ("Lion", {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("LAMB", {}),
    ("RMSprop", {"lr": 1e-3, "momentum": 0.9}),
    ("Muon", {}),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def build(name: str, model: nn.Module, **options: Any) -> optim.EncodedOptimizer:
    parameters = [p for p in model.parameters() if name != "Muon" or p.dim() == 2]
    return getattr(optim, name)(parameters, **{"compiled": False, **options})  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "options"), EVERY, ids=lambda v: v if isinstance(v, str) else "")
def test_saved_and_loaded_it_goes_on_as_if_nothing_had_happened(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """torchao's smoke test: train, save, load into a new optimizer, train both on: equal parameters, bit for bit."""
    data = batches(6, dtype)
    model = small_model(dtype)
    optimizer = build(name, model, **options)
    losses = train(model, optimizer, data[:3])
    assert torch.tensor(losses).isfinite().all()
    other = copy.deepcopy(model)
    resumed = build(name, other, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(model, optimizer, data[3:]) == train(other, resumed, data[3:])
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_sixteen_bit_parameters_train(dtype: torch.dtype, master: str) -> None:
    data = batches(40, dtype)
    model = small_model(dtype)
    losses = train(model, build("AdamW", model, lr=1e-3, master=master), data)
    twin = small_model()
    exact = train(twin, torch.optim.AdamW(twin.parameters(), lr=1e-3), [(x.float(), y.float()) for x, y in data])
    assert sum(losses[-10:]) == pytest.approx(sum(exact[-10:]), rel=0.02)  # the 16-bit forward itself is 2**-8 off


@pytest.mark.parametrize(
    "state_format", ["e4m3_expanded", "dynamic_tree", "int8_companded", ("dynamic_tree", "e4m3_expanded")]
)
def test_the_loss_follows_torchs(state_format: Any) -> None:
    """FlashOptim's bar: the normalised squared distance of the loss trajectories is below 1e-4."""
    data = batches(100)
    ours, theirs = small_model(), small_model()
    losses = torch.tensor(train(ours, build("AdamW", ours, lr=1e-3, state_format=state_format), data))
    exact = torch.tensor(train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-3), data))
    assert (losses - exact).square().sum() / exact.square().sum() < 1e-4


def test_groups_have_their_own_options() -> None:
    model = small_model()
    first, *rest = model.parameters()
    optimizer = optim.AdamW(
        [{"params": [first], "lr": 0.0, "weight_decay": 0.0}, {"params": rest, "state_format": "fp32"}],
        lr=1e-3,
        compiled=False,
    )
    before = parameters_of(model)
    train(model, optimizer, batches(2))
    assert torch.equal(first, before[0]) and not torch.equal(rest[0], before[1])
    assert optimizer.report().parameters[0].states[0].format == "e4m3_expanded"
    assert optimizer.report().parameters[2].states[0].format == "fp32"


def test_one_compilation_for_a_thousand_steps_of_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_step, "COMPILED", {})
    torch.manual_seed(0)
    w = [nn.Parameter(torch.randn(64, WIDE)) for _ in range(2)]
    optimizer = optim.AdamW([{"params": w[:1]}, {"params": w[1:], "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.999))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-3, 1e-3], total_steps=1001)  # cycles betas too
    for step in range(1000):
        for i, p in enumerate(w):
            p.grad = torch.randn_like(p) if (step + i) % 5 else None  # parameters come and go
        optimizer.step()
        schedule.step()
    assert len(compiled_step.COMPILED) == 2, "torch's step is another where there is no weight decay"
    assert all(p.isfinite().all() for p in w)
    assert optimizer.state[w[0]]["step"] == 800


def test_a_rate_in_a_tensor_is_read_at_every_step() -> None:
    p, lr = nn.Parameter(torch.zeros(8)), torch.tensor(1.0)
    optimizer = optim.SGD([p], lr=lr, compiled=False)
    for rate in (1.0, 0.5):
        lr.fill_(rate)
        p.grad = torch.ones(8)
        optimizer.step()
    assert torch.equal(p, torch.full((8,), -1.5))


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.5)], ids=str)  # 1 - 0.999**t loses ten bits, 1 - 0.5**t none
def test_compiled_is_eager(betas: tuple[float, float]) -> None:
    """The same operations, contracted and ordered otherwise, by other libraries. Each step starts from the same parameters
    and states and takes the same gradients: in a gradient that is computed anew an ulp is as large as what cancels."""
    generator, lr = torch.Generator().manual_seed(0), 1e-3
    models = [small_model() for _ in range(2)]
    pair = [
        build("AdamW", model, lr=lr, betas=betas, state_format="fp32", compiled=compiled)
        for model, compiled in zip(models, (True, False), strict=True)
    ]
    for step in range(1, 5):
        before = parameters_of(models[0])
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            decades = 10.0 ** torch.linspace(-6, 2, len(a))
            a.grad = torch.randn(a.shape, generator=generator) * decades.view(-1, *[1] * (a.dim() - 1))
            b.grad = a.grad.clone()
        for optimizer in pair:
            optimizer.step()
        for old, a, b in zip(before, *(model.parameters() for model in models), strict=True):
            bound = 2 * 3 * U * old.abs() + lr * adam_off_by(
                step, betas
            )  # p (1 - lr wd) + ...: 3 roundings of p each
            assert bool(((a - b).abs() <= bound).all()), ((a - b).abs() / bound).max()
            _synchronize(pair, a, b)


def _synchronize(pair: list[optim.EncodedOptimizer], a: nn.Parameter, b: nn.Parameter) -> None:
    """Parameter and states of the first optimizer become those of the second."""
    with torch.no_grad():
        a.copy_(b)
        for name, value in pair[0].state[a].items():
            value.copy_(pair[1].state[b][name])


def test_the_step_function_is_the_step() -> None:
    model = small_model()
    optimizer = build("AdamW", model)
    train(model, optimizer, batches(2))
    p = next(model.parameters())
    plan, tensors = optimizer.step_function(p)
    before = {name: t.clone() for name, t in tensors.items()}
    new = plan(tensors)
    assert all(torch.equal(t.float(), before[name].float()) for name, t in tensors.items()), "it changes nothing"
    optimizer.step()
    assert torch.equal(p, new["param"])
    for name, value in optimizer.state[p].items():
        if name != "step":
            assert torch.equal(value.float(), new[name].float())


def test_gradients_can_be_released() -> None:
    data, models = batches(3), [small_model() for _ in range(2)]
    optimizers = [build("AdamW", m, lr=1e-3) for m in models]
    handle = optimizers[0].release_gradients(models[0])
    for x, y in data:
        (models[0](x) - y).square().mean().backward()
        assert all(p.grad is None for p in models[0].parameters())
    train(models[1], optimizers[1], data)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)
    handle.remove()
    models[0](data[0][0]).sum().backward()
    assert all(p.grad is not None for p in models[0].parameters())
    with pytest.raises(ValueError, match="the model that it was built for"):
        optimizers[0].release_gradients(models[1])


def test_an_outlier_changes_its_own_group_only() -> None:
    states = []
    for outlier in (False, True):
        p = nn.Parameter(torch.zeros(64, WIDE))
        p.grad = torch.randn(64, WIDE, generator=torch.Generator().manual_seed(0))
        if outlier:
            p.grad[3, 5] = 1e6
        optimizer = optim.AdamW([p], compiled=False)
        optimizer.step()
        states.append({name: value.view(torch.uint8) for name, value in optimizer.state[p].items() if name != "step"})
    for name, value in states[0].items():
        differs = (value != states[1][name]).reshape(64, -1).any(1)
        assert differs[3] and not differs[[i for i in range(64) if i != 3]].any(), name


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_does_not_vanish(bad: float) -> None:
    p = nn.Parameter(torch.zeros(64, WIDE))
    optimizer = optim.AdamW([p], compiled=False)
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.grad[7, 1] = bad
    optimizer.step()
    moments = optimizer.export_fp32_state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        assert moments[name][7].isnan().all() and moments[name][[0, 1, 2, 3, 4, 5, 6, 8]].isfinite().all()
    assert p[7, 1].isnan() and p[6].isfinite().all()


def test_closures_clipping_and_zero_sized() -> None:
    model = small_model()
    model.register_parameter("none", nn.Parameter(torch.empty(0, 128)))
    model.register_parameter("scalar", nn.Parameter(torch.tensor(2.0)))
    optimizer = build("AdamW", model, lr=1e-2)
    [(x, y)] = batches(1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean() + model.scalar.square() + model.none.sum()  # type: ignore[operator, union-attr]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss  # type: ignore[no-any-return]

    first = float(optimizer.step(closure))  # type: ignore[arg-type]
    assert float(optimizer.step(closure)) < first  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.AdamW([p], state_format="fp8"), "no state format 'fp8'"),
        (
            lambda p: optim.AdamW([p], state_format=("linear4", "linear4")),
            "does not fit a state that may be negative",
        ),
        (lambda p: optim.AdamW([p], state_format=3), "or a pair of them"),
        (lambda p: optim.AdamW([p], master="bf16"), "one of 'none', 'split', 'fp32'"),
        (lambda p: optim.AdamW([p], lr=-1.0), "lr=-1.0: a number is needed, at least 0"),
        (lambda p: optim.AdamW([p], betas=(1.0, 0.9)), "below 1"),
        (lambda p: optim.AdamW([p], differentiable=True), "codes have no gradient"),
        (lambda p: optim.SGD([p], nesterov=True), "Nesterov"),
        (lambda p: optim.Muon([nn.Parameter(torch.zeros(4))]), r"shape \(4,\) belongs into AdamW"),
        (lambda p: optim.AdamW([nn.Parameter(torch.zeros(4, dtype=torch.float64))]), "is float64: parameters of"),
        (lambda p: optim.AdamW([nn.Parameter(torch.zeros(4, dtype=torch.complex64))]), "is complex64"),
        (lambda p: optim.AdamW([p], overrides={"*": "fp7"}), "no state format 'fp7'"),
    ],
)
def test_bad_options_are_refused_at_once(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(nn.Parameter(torch.zeros(4, 4)))


def test_a_group_that_is_refused_is_not_added() -> None:
    optimizer = optim.AdamW([nn.Parameter(torch.zeros(4))])
    with pytest.raises(ValueError, match="float64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4, dtype=torch.float64))]})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused_before_anything_moves() -> None:
    table, dense = nn.Embedding(10, 4, sparse=True), nn.Parameter(torch.ones(4))
    optimizer = optim.AdamW([("dense", dense), ("table", table.weight)], compiled=False)
    (table(torch.tensor([1])).sum() + dense.sum()).backward()
    with pytest.raises(RuntimeError, match=r"table has a sparse gradient.*sparse=False"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(4)) and not optimizer.state
