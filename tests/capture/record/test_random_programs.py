"""Random training steps, eager and compiled, leave the same behind bit for bit or are refused by name.

``FOUND`` are the programs with which random ones failed once, reduced to their lines.
"""

from __future__ import annotations

import pytest
from program_runs import compare
from program_search import outcomes
from random_programs import PRELUDE


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_equal_eager_or_are_refused(seed: int) -> None:
    """``make programs`` runs larger ones, with seeds that no test has drawn."""
    counts = {"equal": 0, "refused": 0}
    for mode, source, outcome in outcomes(seed, programs=40, most_lines=4, rows=2):
        assert outcome.startswith(("equal", "refused", "eager fails")), f"{mode}: {outcome}\n{source}"
        counts[outcome.partition(":")[0]] = counts.get(outcome.partition(":")[0], 0) + 1
    assert counts["equal"] > 10 * counts["refused"]


# The state and the lines of the step.
FOUND = {
    "a detached parameter": ("s.w = nn.Parameter(torch.ones(2))", "return s.w.detach(), s.w.data"),
    "a detached buffer that the step stores": ("s.buf = torch.ones(2)", "s.copy = s.buf.detach()"),
    "one tensor stored and returned": ("s.memo = {}", "s.memo['new'] = x * 2", "return s.memo['new'], x"),
    "the argument of this call, returned": ("s.leaf = 1", "return batch['leaf'], batch['leaf'].sum()"),
    "the size of a tensor": ("s.buf = torch.ones(2, 3)", "return x.shape, x.shape.numel(), s.buf.shape"),
    "a size as an argument": ("s.leaf = 1", "return x.new_zeros(batch['size'].numel()), batch['size']"),
    "a tuple of tensors in state": (
        "s.pair = (torch.zeros(2, 4), (torch.ones(2, 4), 3))",
        "h, (c, n) = s.pair",
        "s.pair = (h + x[:2], (c * 2 + h, n))",
        "return c + h",
    ),
    "copy_ of a number": ("s.buf = torch.ones(2)", "s.buf.copy_(0.5)", "x.add_(s.buf.sum()).copy_(2)"),
    "eq_ makes numbers": ("s.ints = torch.arange(3)", "s.ints.eq_(1.0)", "x.logical_and_(x)"),
    "pow_ with a number": ("s.buf = torch.ones(2)", "x[:, 1].pow_(2)", "s.buf.pow_(3)"),
    "index_put_ of a copy of what it writes": (
        "s.ints = torch.tensor([2, 0, 1])",
        "s.ints.index_put_((s.ints % 3,), s.ints[0].clone())",
    ),
    "sums of a number from data and constants": (
        "s.leaf = 1",
        "a = x.sum().item()",
        "return a + 0.1 + 0.2, (a + 1e16) - 1e16, a * 3 / 3, a / 3 + a / 3 + a / 3, x * (a + 0.1 + 0.2)",
    ),
    "floats that are infinite, nan and minus zero": (
        "s.odd = torch.tensor([math.inf, math.nan, -0.0, 3.7])",
        "i, n, z, f = s.odd.tolist()",
        "a = i * 0, i - i, n * 0, z * 1, z + 0.0, -z, 0 * z, i * 0.0, z + z, f * f - f * f, z / f, 1 - n",
        "b = f // 0.1, -f // 0.1, 7 // f, f % 0.3, -f % 0.3, (-f) ** 3, f ** 2, f ** -1, 2.5 ** f, f ** 0.5",
        "return a, b, round(f, 1), round(f), abs(-f), math.ceil(-f), f.is_integer(), torch.sym_max(i, f), f + True",
    ),
    "integers that become floats": (
        "s.ints = torch.tensor([2, -7, 1, 2**62, 3])",
        "a, b, c, d, e = s.ints.tolist()",
        "f = a / 3, a / b, b / e * 3, d / 7, round(b / 2), b / e + b / e + b / e, 0.1 * a + 0.2 * a, d + 0.5, d * 1.0",
        "g = b // e, b % e, b // -e, b % -e, d * 4, d * d + 1, a ** 2, b ** 3, b - b, a * 2.5 // 1, b // 2.0, b % 2.5",
        "return f, g, round(b, -1), a ** -1, -7.5 // a, a << 2, a & 3, d + 1 - 1",
    ),
    "floats computed from a size": (
        "s.leaf = 1",
        "n = x.shape[0]",
        "x[: int(n * 0.7)].add_(n / 3 + 0.1 + 0.2)",
        "return x * (n / 3 * 3), torch.ones(math.ceil(n / 2)), x.new_zeros(round(n * 0.3) + 1), n * 0.1 // 0.1",
    ),
    "floats computed from a learning rate": (
        "s.opt = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)",
        "a = s.opt.param_groups[0]['lr'] + 0.1 + 0.2",
        "return a, x * a, x * (2 if a * 3 > 1.0 else 3)",
    ),
    "a vector times a matrix after a branch": (
        "s.buf = torch.ones(4)",
        "if bool((s.buf < 2).all()):",
        "    return s.buf @ x.mT",
    ),
    "the size of an argument after a branch that follows its update": (
        "s.half = torch.tensor([1.0, -1.0, 2.0]).bfloat16()",
        "v = s.half[s.half > 0]",
        "x.add_(0.5)",
        "w = F.dropout(v, 0.5, training=True)",
        "return v, x.shape, x.new_ones(x.shape[0])",
    ),
    "a generator that is seeded": (
        "s.generator = torch.Generator()",
        "s.generator.manual_seed(x.shape[0])",
        "return torch.randn(3, generator=s.generator), s.generator.initial_seed()",
    ),
    "a generator that is rewound": (
        "s.generator = torch.Generator().manual_seed(3)",
        "state = s.generator.get_state()",
        "s.first = torch.rand(2, generator=s.generator)",
        "s.generator.set_state(state)",
        "return x.normal_(generator=s.generator), isinstance(s.generator, torch.Generator), s.generator.device",
    ),
    "views of what is updated": (
        "s.w = nn.Parameter(torch.ones(4))",
        "s.part = s.w.detach()[1:]",
        "s.w.data.mul_(2)",
        "return s.w.detach()[:1], s.w[1:1], s.part",
    ),
    "an argument that begins to require grad": (
        "s.w = nn.Parameter(torch.ones(4))",
        "x.requires_grad_()",
        "(x * s.w).square().sum().backward()",
        "return x + x.grad.sign()",
    ),
    "flags of parameters that the step sets": (
        "s.w = nn.Parameter(torch.ones(4))",
        "s.w.requires_grad_(not s.w.requires_grad)",
        "return s.w.requires_grad, s.w * 2",
    ),
    "the gradient of a tensor that the step made": (
        "s.leaf = 1",
        "s.made = x.clone().requires_grad_()",
        "s.made.abs().mean().backward()",
        "return s.made",
    ),
    "operands of a dynamic size that broadcast": (
        "s.v = torch.randn(4)",
        "a = torch.addcmul(x, x, s.v), torch.addcdiv(x, x, s.v), torch.lerp(s.v, x, 0.5), torch.lerp(x, s.v, x)",
        "x.addcmul_(x, s.v, value=0.5).addcdiv_(s.v, x).lerp_(s.v, 0.5).lerp_(s.v, s.v)",
        "return a",
    ),
    "the mean of nothing": ("s.w = nn.Parameter(torch.ones(0, 4))", "F.mse_loss(s.w, s.w.detach() * 2).backward()"),
    "a result that out= resizes": (
        "s.wide = torch.randn(4, 6).t()",
        "v = (s.wide * 2).exp()",
        "torch.mul(torch.ones(0, 4), 2, out=v)",
        "return v, s.wide.sum()",
    ),
    "whether a number from data is nan": ("s.leaf = 1", "a = x.sum().item()", "return x * (2 if a == a else 3)"),
    "whether a square from data is nan": ("s.leaf = 1", "a = x.sum().item()", "return x * (2 if a * a >= 0 else 3)"),
}


def program(state: str, *lines: str) -> str:
    """The text of a program with these lines."""
    body = "".join(f"        {line}\n" for line in lines)
    return (
        f"{PRELUDE}\n\nROWS = [3, 3, 2]\n\n\ndef make():\n    s = State()\n    {state}\n\n"
        f"    def step(x, batch):\n{body}\n    return s, step\n\n\n"
        "def call(k):\n    batch = {'leaf': torch.ones(2, requires_grad=True), 'size': torch.Size([2, 3])}\n"
        "    return (torch.randn(ROWS[k], 4), batch), {}\n\n\n"
        "def between(k, s, out):\n    pass\n"
    )


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("mode", ["bitwise", "default"])
def test_found_programs_equal_eager(name: str, mode: str) -> None:
    assert compare(program(*FOUND[name]), mode=mode) == "captured"


def test_a_generator_made_in_a_step_is_refused() -> None:
    steps = program("s.leaf = 1", "return torch.randn(3, generator=torch.Generator().manual_seed(5))")
    assert compare(steps, mode="bitwise").startswith("refused: UncapturableDraw:")


def test_a_state_tensor_that_begins_to_require_grad_is_refused() -> None:
    steps = program("s.v = torch.ones(2)", "s.v.requires_grad_()")
    assert compare(steps, mode="bitwise").startswith("refused: PythonStateChanged:")


# Eager works through the lists one by one, which the functional form does not.
REFUSED = {
    "one tensor twice in a list": ("s.buf = torch.ones(2)", "torch._foreach_mul_([s.buf, s.buf], 0.5)"),
    "lists that read what they wrote": (
        "s.a, s.b = torch.ones(2), torch.ones(2)",
        "torch._foreach_add_([s.a, s.b], [s.b, s.a])",
    ),
    "a state tensor that out= resizes": ("s.buf = torch.ones(3, 4)", "torch.mul(x[0], 2, out=s.buf)", "return s.buf"),
    "an argument that out= resizes": ("s.buf = torch.ones(4)", "torch.mul(s.buf, 2, out=x)"),
    "an argument that changes its shape": ("s.buf = torch.ones(2)", "x.t_()"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_hold_is_refused_and_changes_nothing(name: str) -> None:
    assert compare(program(*REFUSED[name]), mode="bitwise").startswith("refused: UncapturableMutation:")
