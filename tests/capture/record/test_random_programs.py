"""Random training steps, eager and compiled, leave the same behind bit for bit or are refused by name.

``FOUND`` are the programs with which random ones failed once, reduced to their lines.
"""

from __future__ import annotations

import pytest
from program_runs import compare
from random_programs import PRELUDE

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
    "the mean of nothing": ("s.w = nn.Parameter(torch.ones(0, 4))", "F.mse_loss(s.w, s.w.detach() * 2).backward()"),
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


# Eager works through the lists one by one, which the functional form does not.
REFUSED = {
    "one tensor twice in a list": ("s.buf = torch.ones(2)", "torch._foreach_mul_([s.buf, s.buf], 0.5)"),
    "lists that read what they wrote": (
        "s.a, s.b = torch.ones(2), torch.ones(2)",
        "torch._foreach_add_([s.a, s.b], [s.b, s.a])",
    ),
    "an argument that changes its shape": ("s.buf = torch.ones(2)", "x.t_()"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_hold_is_refused_and_changes_nothing(name: str) -> None:
    assert compare(program(*REFUSED[name]), mode="bitwise") == "refused: UncapturableMutation"
