"""In-place operations of every kind: the graph is functional, what the user sees is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from both_ways import assert_equal, batches, both_ways, mlp, sgd, training
from weft.errors import UncapturableMutation


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_writes_through_views_of_activations() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        z = y.clone()
        z[1:3].mul_(2)
        z[:, 0] += 1
        z.t()[3] = 0
        z.view(2, 16)[0].add_(1)
        z.unsqueeze_(0)
        z.squeeze_(0)
        z.diagonal().zero_()
        w = torch.zeros(4, 8)
        w[::2] = z[::2]
        w[:, :4].add_(w[:, 4:])
        w.transpose(0, 1).mul_(3.0)
        v = torch.arange(12.0).view(3, 4)
        first, second, _ = v.unbind(0)
        first.add_(second)
        v.split(2, 1)[1].neg_()
        v.chunk(2)[0].clamp_(max=3)
        return (z * w).mean() + v.sum()

    both_ways(training(forward), batches())


def test_a_tensor_may_be_transposed_in_place() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x) * 2
        y.transpose_(0, 1)
        y.add_(torch.arange(4.0))
        y.t_()
        return y.square().mean()

    both_ways(training(forward), batches())


def test_writes_by_masks_and_indices() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x).clone()
        y[x > 1] = 0.5
        y[torch.tensor([0, 2])] += 1
        y.masked_fill_(x < -1, 2.0)
        y.index_add_(0, torch.tensor([1, 1]), x[:2])
        y.scatter_(1, torch.zeros(4, 1, dtype=torch.long), 3.0)
        return y.square().mean()

    both_ways(training(forward), batches())


def test_a_write_through_one_view_is_read_through_another() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x).clone()
        rows, flat = y[1:], y.view(-1)
        flat[8:16].fill_(1.0)
        seen = rows[0].sum()
        rows[0].zero_()
        return seen + flat.square().mean()

    both_ways(training(forward), batches())


def test_assigning_data_of_parameters() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()
        optimizer = sgd(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = _loss(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for p in model.parameters():
                p.data = p.data * 0.5
            return loss

        return step, [model]

    both_ways(make, batches())


def test_writing_through_data_and_grad() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()
        optimizer = sgd(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = _loss(model, x)
            loss.backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.data.clamp_(-0.01, 0.01)
            optimizer.step()
            optimizer.zero_grad()
            for p in model.parameters():
                p.data.mul_(0.5)
                p.data[0] = 0
            return loss

        return step, [model]

    both_ways(make, batches())


def test_gradients_replaced_by_the_step() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()
        optimizer = sgd(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = _loss(model, x)
            loss.backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad = p.grad.sign()
            optimizer.step()
            return loss

        return step, [model]

    both_ways(make, batches(), captures=2)


def test_a_slice_of_a_parameter_is_written() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()

        def step(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                model[0].weight[:2].mul_(0.5)
                model[0].weight[:, 1] = x[0]
                model[0].bias.view(2, 4)[1].add_(1)
            return _loss(model, x)

        return step, [model]

    both_ways(make, batches())


def test_in_place_addition_of_a_wider_dtype_rounds_at_the_end() -> None:
    def make() -> tuple[Any, list[Any]]:
        narrow = torch.zeros(8, dtype=torch.bfloat16)
        count = torch.zeros((), dtype=torch.long)

        def step(x: torch.Tensor) -> torch.Tensor:
            narrow.add_(x.mean(0))
            narrow[:4] += x[0, :4].double()
            count.add_(torch.tensor(2, dtype=torch.int32))
            return narrow * count

        return step, [narrow, count]

    both_ways(make, batches())


def test_the_argument_itself_is_changed() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()

        def step(x: torch.Tensor, mask: dict[str, torch.Tensor]) -> torch.Tensor:
            x.mul_(2)
            mask["m"][0] = False
            return (model(x) * mask["m"].unsqueeze(1)).sum()

        return step, [model]

    # both_ways compares the arguments after the calls too.
    calls = [(x, {"m": torch.ones(4, dtype=torch.bool)}) for (x,) in batches()]
    both_ways(make, calls)


def test_the_users_tensor_is_changed_not_a_copy() -> None:
    @weft.compile
    def step(x: torch.Tensor) -> None:
        x.add_(1)

    for _ in range(2):
        x = torch.zeros(3)
        view = x.view(3)
        step(x)
        assert view.tolist() == [1, 1, 1]


def test_two_tensors_with_the_same_memory_are_one_input() -> None:
    def make() -> tuple[Any, list[Any]]:
        whole = torch.arange(8.0)
        part = whole[2:6]

        def step(x: torch.Tensor) -> torch.Tensor:
            whole.mul_(2)
            part.add_(x[0, :4])
            return whole.sum() + part.prod()

        return step, [whole, part]

    both_ways(make, batches())


def test_a_slice_used_before_its_base_is_a_view_of_it() -> None:
    def make() -> tuple[Any, list[Any]]:
        whole = torch.arange(8.0)
        part = whole[2:6]

        def step(x: torch.Tensor) -> torch.Tensor:
            part.add_(x[0, :4])
            whole.mul_(2)
            return whole.sum() + part.prod()

        return step, [whole, part]

    both_ways(make, batches())


def test_halves_that_overlap_are_refused_with_the_line() -> None:
    memory = torch.zeros(8)
    first, second = memory[:5], memory[3:]

    def step() -> None:
        first.add_(1)
        second.add_(1)

    with pytest.raises(UncapturableMutation, match=rf"test_mutation\.py:{step.__code__.co_firstlineno + 2}"):
        weft.compile(step)()
    assert memory.tolist() == [0] * 8


def test_tensors_that_overlap_are_read() -> None:
    def make() -> tuple[Any, list[Any]]:
        ids = torch.randint(0, 8, (4, 9))
        inputs, labels = ids[:, :-1], ids[:, 1:]
        even, odd = torch.zeros(4, 8).chunk(2, 1)  # share a span, and no element
        embedding = nn.Embedding(8, 8)
        opt = sgd(embedding.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            logits = embedding(inputs) + x.mean()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
            opt.step()
            opt.zero_grad()
            even.add_(1)
            return loss + odd.add_(x[:, :4]).sum()

        return step, [embedding, opt, even, odd]

    both_ways(make, batches())


def test_arguments_that_overlap_are_read_and_not_written() -> None:
    def reading(first: torch.Tensor, second: torch.Tensor) -> Any:
        return first.sin(), second.sum() * 2

    def writing(first: torch.Tensor, second: torch.Tensor) -> Any:
        kept = second.clone()
        first.mul_(2)
        return kept + second.sum()

    memory = torch.arange(8.0)
    ours = weft.compile(reading)
    for _ in range(2):
        assert_equal(ours(memory[:5], memory[3:]), reading(memory[:5], memory[3:]))
    with pytest.raises(UncapturableMutation, match=rf"test_mutation\.py:{writing.__code__.co_firstlineno + 2}"):
        weft.compile(writing)(memory[:5], memory[3:])
    assert memory.tolist() == list(range(8))


def test_arguments_that_are_parts_of_others_are_written() -> None:
    def step(part: torch.Tensor, whole: torch.Tensor) -> Any:
        before = part.clone()
        whole.mul_(2)
        part.add_(whole.sum())
        return before, part + 1, whole + 1

    found = []
    for called in (step, weft.compile(step)):
        memory = torch.arange(8.0)
        results = []
        # Two of these share a storage and have the same sizes, and lie apart or at another distance.
        for part, whole in ((0, 0), (1, 0), (1, 0), (4, 0), (5, 0), (0, 4)):
            results += [called(memory[part : part + 3], memory[whole : whole + 4]), memory.clone()]
            memory.div_(64)
        results.append(called(torch.ones(3), torch.ones(4)))
        found.append(results)
    assert_equal(found[1], found[0])


def test_writes_through_as_strided_windows() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x).clone()
        y.as_strided((4, 4), (8, 1), 2).mul_(0.5)
        windows = y.view(-1).unfold(0, 4, 2)
        return windows.square().mean()

    both_ways(training(forward), batches())


def test_a_parameter_is_written_through_as_strided() -> None:
    def make() -> tuple[Any, list[Any]]:
        model = mlp()

        def step(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                model[0].weight.as_strided((2, 2), (8, 1), 9).add_(1)
            return _loss(model, x)

        return step, [model]

    both_ways(make, batches())


def test_buffers_may_be_swapped() -> None:
    def make() -> tuple[Any, list[Any]]:
        old, new = torch.zeros(8), torch.ones(8)

        def step(x: torch.Tensor) -> torch.Tensor:
            old.copy_(new)
            new.copy_(x.mean(0))
            return (new - old).norm()

        return step, [old, new]

    both_ways(make, batches())


def test_out_arguments_are_written() -> None:
    def make() -> tuple[Any, list[Any]]:
        out = torch.zeros(4, 8)

        def step(x: torch.Tensor) -> torch.Tensor:
            torch.mul(x, 2, out=out)
            return out.sum()

        return step, [out]

    both_ways(make, batches())


def test_a_tensor_made_from_numbers_starts_anew_at_each_call() -> None:
    """In-place operations on ``torch.tensor(0.0)`` must not change what the next call starts from."""
    kept: dict[str, torch.Tensor] = {"sum": torch.zeros(())}

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        total, row, seen = torch.tensor(0.0), torch.tensor([1.0, 2.0]), torch.tensor([3.0])
        for value in x:
            total += value
        row.view(2, 1)[0].mul_(total)
        kept["sum"] = torch.tensor(1.0)
        kept["sum"] += total
        return [total, row, seen, torch.tensor([[4.0]]).view(1), seen * 2]

    compiled = weft.compile(step)
    for _ in range(3):
        x = torch.arange(4.0)
        expected, expected_sum = step(x), kept["sum"].clone()
        found = compiled(x)
        assert [value.tolist() for value in found] == [value.tolist() for value in expected]
        assert torch.equal(kept["sum"], expected_sum)
        for value in [*found, kept["sum"]]:  # the caller may write to what it got
            value.add_(100)


def test_each_item_reads_the_value_that_the_tensor_has_then() -> None:
    """``.item()`` and the length of ``nonzero`` after an in-place write are new numbers, however the write is made."""
    count, mask = torch.tensor(3.0), torch.ones(4)

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for _ in range(2):
            count.add_(1)
            found.append(x * count.item())
        mask[0] = 0
        inner = x.sum()
        found.append(x * inner.item())
        inner.data.add_(1)
        found.append(x * inner.item() * mask.nonzero().sum())
        mask[1] = 0
        found.append(mask.nonzero())
        return found

    x = torch.arange(3.0)
    compiled = weft.compile(step)
    for _ in range(2):
        count.fill_(3)
        mask.fill_(1)
        expected = step(x)
        count.fill_(3)
        mask.fill_(1)
        for ours, eager in zip(compiled(x), expected, strict=True):
            assert torch.equal(ours, eager)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_second_optimizer_step_that_makes_more_state_keeps_what_the_first_one_made(foreach: bool) -> None:
    def run(compiled: bool) -> list[torch.Tensor]:
        w, v = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([w, v], lr=0.1, momentum=0.9, dampening=0.1, foreach=foreach)

        def step() -> None:
            w.grad = torch.ones_like(w)
            optimizer.step()
            (v * 0.5).sum().backward()
            optimizer.step()

        called = weft.compile(step) if compiled else step
        for _ in range(4):
            called()
        return [w.detach(), v.detach(), *(optimizer.state[p]["momentum_buffer"] for p in (w, v))]

    assert all(map(torch.equal, run(False), run(True)))


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.Adam,
        torch.optim.AdamW,
        lambda p: torch.optim.AdamW(p, foreach=False),
        torch.optim.NAdam,
        torch.optim.Adamax,
    ],
)
def test_two_optimizer_steps_in_one_step_use_two_step_counts(kind: Any) -> None:
    """The bias corrections of the second ``optimizer.step()`` are those of its own step count."""

    def make() -> tuple[Any, list[Any]]:
        model = mlp()
        optimizer = kind(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                _loss(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()
            return _loss(model, x)

        return step, [model, optimizer]

    both_ways(make, batches())


def test_views_made_with_keywords_are_those_of_a_tensor_that_begins_inside_its_memory() -> None:
    def make() -> tuple[Any, torch.Tensor]:
        base = torch.arange(12.0)
        inside = base[3:9]

        def step(x: torch.Tensor) -> Any:
            part = torch.ops.aten.slice.Tensor(self=inside, dim=0, start=1, end=3)
            one = torch.ops.aten.select.int(self=inside, dim=0, index=2)
            inside.add_(x)
            part.mul_(2)
            return part * 1, one * 1, inside * 1

        return step, base

    (step, base), (eager, own) = make(), make()
    compiled = weft.compile(step)
    for _ in range(3):
        assert_equal(compiled(torch.ones(())), eager(torch.ones(())))
        assert_equal(base, own)


def test_data_of_an_argument_is_refused_with_remedies_that_work() -> None:
    def step(x: Tensor) -> Tensor:
        x.data = x * 2
        return x

    def copied(x: Tensor) -> Tensor:
        x.copy_(x * 2)
        return x

    def cloned(x: Tensor) -> Tensor:
        x = x.clone()
        x.data = x * 2
        return x

    with pytest.raises(UncapturableMutation, match="of an argument at"):
        weft.compile(step)(torch.ones(3))
    for remedy in (copied, cloned):
        mine, eager = torch.ones(3), torch.ones(3)
        assert torch.equal(weft.compile(remedy)(mine), remedy(eager))
        assert torch.equal(mine, eager)


@pytest.mark.parametrize("make", [torch.nn.Parameter, torch.Tensor.clone])
@pytest.mark.parametrize("view", [slice(None), slice(1, None)])
@pytest.mark.parametrize("order", ["=", "w=", "=a", "w=a", "wa=a", "w=w", "w=w=a", "s", "wsa", "aw=s"])
def test_tensors_that_share_the_replaced_memory_keep_it(order: str, view: slice, make: Callable[..., Any]) -> None:
    def made() -> tuple[Callable[..., Any], list[Any]]:
        tensor = make(torch.zeros(4))
        alias, unknown = tensor.data[view], tensor.detach()

        def step(x: torch.Tensor) -> torch.Tensor:
            for action in order:
                if action == "w":
                    tensor.data.add_(x)
                elif action == "a":
                    alias.mul_(2).add_(1)
                else:
                    tensor.data = tensor.data * 2 if action == "=" else x * 3
            return tensor.sum() + alias.sum()

        return step, [[tensor, alias, unknown]]

    both_ways(made, [(torch.arange(4.0) + number,) for number in range(4)], captures=None)
