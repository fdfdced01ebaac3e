"""Recurrent networks over packed sequences: eager's bits for all lengths, in a graph or two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint

import weft
from both_ways import assert_equal, detached
from weft.errors import CannotCapture, StepFailed

WIDTH, HIDDEN, CLASSES, BATCH, LONGEST, CALLS = 5, 6, 3, 4, 7, 20
Options = dict[str, Any]


class Tagger(nn.Module):
    """Words to tags, over packed sequences."""

    def __init__(self, kind: str, first: bool = True, is_sorted: bool = False, **options: Any) -> None:
        super().__init__()
        self.first, self.is_sorted = first, is_sorted
        self.words = nn.Linear(WIDTH, WIDTH)
        self.core = getattr(nn, kind)(WIDTH, HIDDEN, batch_first=first, **options)
        width = (options.get("proj_size") or HIDDEN) * (2 if options.get("bidirectional") else 1)
        self.tags = nn.Linear(width, CLASSES)

    def pack(self, x: torch.Tensor, lengths: Any) -> rnn.PackedSequence:
        return rnn.pack_padded_sequence(self.words(x), lengths, batch_first=self.first, enforce_sorted=self.is_sorted)

    def forward(self, x: torch.Tensor, lengths: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out, last = self.core(self.pack(x, lengths))
        padded, found = rnn.pad_packed_sequence(out, batch_first=self.first)
        state = last[0] if isinstance(last, tuple) else last
        return self.tags(padded), found, state


def lengths_of(at: int, batch: int = BATCH, is_sorted: bool = False) -> torch.Tensor:
    """Other lengths at every call; those of call 3 are all 1, those of call 5 as long as can be."""
    generator = torch.Generator().manual_seed(at)
    found = torch.randint(1, LONGEST + 1, (batch,), generator=generator)
    found = {3: torch.ones_like(found), 5: torch.full_like(found, LONGEST)}.get(at, found)
    return found.sort(descending=True).values if is_sorted else found


def words(at: int, batch: int = BATCH, first: bool = True) -> torch.Tensor:
    sizes = (batch, LONGEST, WIDTH) if first else (LONGEST, batch, WIDTH)
    return torch.randn(sizes, generator=torch.Generator().manual_seed(100 + at))


def both(
    make: Callable[[], tuple[Callable[..., Any], list[Any]]],
    call: Callable[[int], tuple[Any, ...]],
    captures: int = 2,
    calls: int = CALLS,
    **options: Any,
) -> Any:
    """Run the step as it is and compiled, with the arguments ``call(at)``: the same results, state and draws."""
    found = []
    for wrap in (lambda step: step, lambda step: weft.compile(step, **options)):
        torch.manual_seed(0)
        step, state = make()
        step = wrap(step)
        results = [detached(step(*call(at))) for at in range(calls)]
        grads = [[p.grad for p in each.parameters()] if isinstance(each, nn.Module) else [] for each in state]
        values = [list(each.parameters()) if isinstance(each, nn.Module) else each for each in state]
        found.append([results, detached(values), detached(grads), torch.get_rng_state()])
    assert_equal(found[1], found[0])
    assert len(step.captures) <= captures, step.captures
    return step


def trained(model: nn.Module, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def tagging(kind: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        model = Tagger(kind, **options)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(x: torch.Tensor, lengths: Any) -> Any:
            scores, found, state = model(x, lengths)
            loss = scores.logsumexp(-1).mean() + state.square().mean()
            return trained(model, loss, optimizer), scores.detach(), found, state.detach()

        return step, [model]

    return make


ALL = {
    "one_layer": {},
    "two_layers_both_ways": {"num_layers": 2, "bidirectional": True},
    "dropout": {"num_layers": 2, "bidirectional": True, "dropout": 0.5},
    "no_bias": {"bias": False, "num_layers": 2},
    "time_first": {"first": False},
}


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_networks_of_all_kinds_are_captured_once_for_all_lengths(kind: str, name: str, is_sorted: bool) -> None:
    options = ALL[name]
    first = options.get("first", True)
    call = lambda at: (words(at, first=first), lengths_of(at, is_sorted=is_sorted))
    both(tagging(kind, is_sorted=is_sorted, **options), call, calls=8)


def test_projections_and_other_activations() -> None:
    call = lambda at: (words(at), lengths_of(at))
    both(tagging("LSTM", proj_size=3, num_layers=2, dropout=0.3), call)
    both(tagging("RNN", nonlinearity="relu"), call)


def test_lengths_in_lists_and_in_batches() -> None:
    both(tagging("LSTM"), lambda at: (words(at), lengths_of(at).tolist()), captures=3)

    def make() -> Any:
        step, state = tagging("GRU")()
        return lambda batch: step(batch["x"], batch["lengths"]), state

    both(make, lambda at: ({"x": words(at), "lengths": lengths_of(at)},))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_batches_of_other_sizes(kind: str) -> None:
    call = lambda at: (words(at, 2 + at % 5), lengths_of(at, 2 + at % 5))
    both(tagging(kind), call)


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_packed_sequences_among_the_arguments(kind: str, is_sorted: bool) -> None:
    def make() -> Any:
        core = getattr(nn, kind)(WIDTH, HIDDEN, num_layers=2)
        optimizer = torch.optim.SGD(core.parameters(), lr=0.1)

        def step(packed: rnn.PackedSequence) -> Any:
            out, _ = core(packed)
            padded, found = rnn.pad_packed_sequence(out)
            return trained(core, padded.square().mean(), optimizer), found, out.data.detach()

        return step, [core]

    def call(at: int) -> Any:
        lengths = lengths_of(at, is_sorted=is_sorted).clamp(min=2)  # one of one step would be another form
        return (rnn.pack_padded_sequence(words(at), lengths, batch_first=True, enforce_sorted=is_sorted),)

    both(make, call, captures=3)


def test_states_given_to_the_network_get_gradients() -> None:
    def make() -> Any:
        model = Tagger("LSTM")
        h, c = (nn.Parameter(torch.randn(1, 1, HIDDEN)) for _ in range(2))
        optimizer = torch.optim.SGD([*model.parameters(), h, c], lr=0.1)

        def step(x: torch.Tensor, lengths: torch.Tensor) -> Any:
            start = tuple(each.expand(-1, len(x), -1).contiguous() for each in (h, c))
            out, (last, cell) = model.core(model.pack(x, lengths), start)
            loss = trained(model, out.data.sin().sum() + (last * cell).sum(), optimizer)
            return loss, last.detach(), h.grad, c.grad

        return step, [model, [h, c]]

    both(make, lambda at: (words(at), lengths_of(at)))


# ---- sums of gradients: eager adds one contribution of each step after the other


def used_twice(model: Tagger, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    one = model.core(model.pack(x, lengths))[0].data
    two = model.core(model.pack(x.flip(0), lengths))[0].data
    return one.sin().sum() * two.cos().sum()


def with_penalty(model: Tagger, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    out = model.core(model.pack(x, lengths))[0].data
    return out.sin().sum() + 0.3 * sum(p.square().sum() for p in model.parameters())


def penalty_first(model: Tagger, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    penalty = sum(p.square().sum() for p in model.parameters())
    return 0.3 * penalty + model.core(model.pack(x, lengths))[0].data.sin().sum()


def with_residual(model: Tagger, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    packed = model.pack(x, lengths)
    out = model.core(packed)[0].data
    return (out[:, :WIDTH] * packed.data).sum() + rnn.pad_packed_sequence(packed)[0].sin().sum()


def computed_weights(model: Tagger, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    data, batch_sizes, *_ = model.pack(x, lengths)
    weights = [p * p.sigmoid() for p in model.core.parameters()]
    start = (torch.zeros(4, len(x), HIDDEN),) * 2
    one, two = (torch.lstm(each, batch_sizes, start, weights, True, 2, 0.0, True, True) for each in (data, data.exp()))
    return one[0].sin().sum() + (two[0] * two[1].sum()).sum() + weights[1].sum()


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(
    "loss_of", [used_twice, with_penalty, penalty_first, with_residual, computed_weights], ids=lambda f: f.__name__
)
def test_weights_and_inputs_with_several_uses(loss_of: Callable[..., torch.Tensor], twice: bool) -> None:
    def make() -> Any:
        model = Tagger("LSTM", num_layers=2, bidirectional=True)

        def step(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model, x, lengths)
            loss.backward(retain_graph=twice)
            if twice:
                loss.backward()
            return loss.detach()

        return step, [model]

    both(make, lambda at: (words(at), lengths_of(at)), calls=6)


def test_a_weight_of_both_directions() -> None:
    def make() -> Any:
        model = Tagger("GRU", bidirectional=True)
        model.core.weight_hh_l0_reverse = model.core.weight_hh_l0

        def step(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            loss = model(x, lengths)[0].sin().sum()
            loss.backward()
            return loss.detach()

        return step, [model]

    both(make, lambda at: (words(at), lengths_of(at)), calls=6)


def test_gradients_asked_for_by_name_have_the_layout_of_eager() -> None:
    def make() -> Any:
        model = Tagger("LSTM")

        def step(x: torch.Tensor, lengths: torch.Tensor) -> Any:
            loss = with_penalty(model, x, lengths) + used_twice(model, x, lengths)
            return torch.autograd.grad(loss, list(model.core.parameters()))

        return step, [model]

    both(make, lambda at: (words(at), lengths_of(at)), calls=6)


# ---- what may go on around the network


def test_hooks_see_gradients_of_eager() -> None:
    def make() -> Any:
        model = Tagger("LSTM")
        model.core.weight_hh_l0.register_hook(lambda gradient: gradient * 2)
        model.core.register_forward_hook(lambda module, args, out: (out[0]._replace(data=out[0].data * 2), out[1]))
        seen = torch.zeros(())

        def step(x: torch.Tensor, lengths: torch.Tensor) -> Any:
            out, _ = model.core(model.pack(x, lengths))
            out.data.register_hook(lambda gradient: seen.add_(gradient.abs().sum()) * 0 + gradient.clamp(max=0.5))
            loss = out.data.exp().sum()
            loss.backward()
            return loss.detach()

        return step, [model, [seen]]

    both(make, lambda at: (words(at), lengths_of(at)), calls=6)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("options", [{"bidirectional": True}, {"bias": False}, {"proj_size": 3}])
def test_hooks_of_weights_run_in_the_order_of_eager(kind: str, options: Options) -> None:
    if "proj_size" in options and kind != "LSTM":
        pytest.skip("only an LSTM has projections")

    def make() -> Any:
        model = Tagger(kind, num_layers=2, **options)
        for weight in model.parameters():
            weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))

        def step(x: torch.Tensor, lengths: torch.Tensor) -> Any:
            loss = model(x, lengths)[0].square().sum()
            loss.backward()
            return loss.detach()

        return step, [model]

    both(make, lambda at: (words(at), torch.tensor([2 + at, 1, 1, 2])), calls=4)
    step = weft.compile(make()[0])
    step(words(0), torch.tensor([3, 1, 1, 2]))
    if (
        kind == "LSTM" and "proj_size" not in options
    ):  # of sequences of one length eager runs the hooks in another order
        with pytest.raises(StepFailed, match="several weights of an LSTM have hooks"):
            step(words(0), torch.tensor([2, 2, 2, 2]))


def test_branches_between_forward_and_backward() -> None:
    def make() -> Any:
        model = Tagger("LSTM", num_layers=2, dropout=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, lengths: torch.Tensor) -> Any:
            loss = model(x, lengths)[0].sum()
            if loss > 0:
                loss = loss * 2
            return trained(model, loss, optimizer)

        return step, [model]

    both(make, lambda at: (words(at), lengths_of(at)), captures=3)


def test_branches_between_two_networks_over_the_same_lengths() -> None:
    def make() -> Any:
        model = Tagger("LSTM")

        def step(x: torch.Tensor, lengths: torch.Tensor) -> Any:
            one = model.core(model.pack(x, lengths))[0].data
            if one.sum() > 0:
                one = one * 2
            two = model.core(model.pack(x, lengths))[0].data
            loss = (one * two.sin()).sum()
            loss.backward()
            return loss.detach()

        return step, [model]

    both(make, lambda at: (words(at), lengths_of(at)), captures=4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_the_network_again_with_the_same_draws(reentrant: bool) -> None:
    def make() -> Any:
        model = Tagger("LSTM", num_layers=2, dropout=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, lengths: torch.Tensor) -> Any:
            run = lambda x: model(x, lengths)[0]
            scores = checkpoint(run, x.requires_grad_(), use_reentrant=reentrant)
            return trained(model, scores.sin().sum(), optimizer)

        return step, [model]

    both(make, lambda at: (words(at), lengths_of(at)), calls=6)


def test_evaluation_and_frozen_networks() -> None:
    def make() -> Any:
        model = Tagger("GRU", num_layers=2, dropout=0.5).eval()
        model.core.requires_grad_(False)
        optimizer = torch.optim.SGD([*model.words.parameters(), *model.tags.parameters()], lr=0.1)

        def step(x: torch.Tensor, lengths: torch.Tensor) -> Any:
            with torch.no_grad():
                before = model(x, lengths)[0]
            return trained(model, model(x, lengths)[0].square().sum(), optimizer), before

        return step, [model]

    both(make, lambda at: (words(at), lengths_of(at)))


def test_padding_to_a_length_with_a_value_and_a_loss_over_what_is_no_padding() -> None:
    def make() -> Any:
        model = Tagger("LSTM")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> Any:
            out, _ = model.core(model.pack(x, lengths))
            padded, found = rnn.pad_packed_sequence(out, True, -7.0, total_length=x.shape[1])
            mask = torch.arange(x.shape[1])[None] < found[:, None]
            labels = labels.masked_fill(~mask, -100)
            loss = F.cross_entropy(model.tags(padded).flatten(0, 1), labels.flatten(), ignore_index=-100)
            return trained(model, loss, optimizer), padded.detach()

        return step, [model]

    both(make, lambda at: (words(at), lengths_of(at), torch.randint(0, CLASSES, (BATCH, LONGEST))))


def test_labels_packed_in_the_same_order() -> None:
    def make() -> Any:
        model = Tagger("LSTM")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> Any:
            out, _ = model.core(model.pack(x, lengths))
            labels = rnn.pack_padded_sequence(labels, lengths, batch_first=True, enforce_sorted=False).data
            loss = F.cross_entropy(model.tags(out.data), labels)
            accuracy = (model.tags(out.data).argmax(-1) == labels).float().mean()
            return trained(model, loss, optimizer), accuracy

        return step, [model]

    both(make, lambda at: (words(at), lengths_of(at), torch.randint(0, CLASSES, (BATCH, LONGEST))))


def test_sequences_that_the_user_keeps_stay_what_they_were() -> None:
    def make() -> Any:
        model = Tagger("LSTM")
        kept: dict[str, Any] = {}
        old: list[Any] = []

        def step(x: torch.Tensor, lengths: torch.Tensor) -> Any:
            out, last = model.core(model.pack(x, lengths))
            out.data.square().sum().backward()
            kept["data"] = out.data.detach()
            return rnn.PackedSequence(out.data.detach(), *out[1:]), last[0].detach()

        def around(x: torch.Tensor, lengths: torch.Tensor) -> Any:
            old.append(step_of[0](x, lengths))
            return kept["data"], [each for each, _ in old], [rnn.pad_packed_sequence(each)[0] for each, _ in old]

        step_of = [step]
        around.step_of, around.step = step_of, step  # type: ignore[attr-defined]
        return around, [model]

    found = []
    for wrap in (lambda step: step, weft.compile):
        torch.manual_seed(0)
        around, _ = make()
        around.step_of[0] = wrap(around.step)
        found.append([detached(around(words(at), lengths_of(at))) for at in range(5)])
    assert_equal(found[1], found[0])


# ---- what eager refuses


def changes_packed_data(model: Tagger, x: torch.Tensor, lengths: torch.Tensor) -> None:
    packed = model.pack(x, lengths)
    out, _ = model.core(packed)
    packed.data.add_(1)
    out.data.sum().backward()


def changes_weights(model: Tagger, x: torch.Tensor, lengths: torch.Tensor) -> None:
    out, _ = model.core(model.pack(x, lengths))
    with torch.no_grad():
        model.core.weight_hh_l0.mul_(2)
    out.data.sum().backward()


def backward_twice(model: Tagger, x: torch.Tensor, lengths: torch.Tensor) -> None:
    loss = model(x, lengths)[0].sum()
    loss.backward()
    loss.backward()


@pytest.mark.parametrize("wrong", [changes_packed_data, changes_weights, backward_twice], ids=lambda f: f.__name__)
def test_mistakes_are_mistakes_in_a_capture_too(wrong: Callable[..., None]) -> None:
    for wrap in (lambda step: step, weft.compile):
        model = Tagger("LSTM")
        with pytest.raises((RuntimeError, CannotCapture), match=r"inplace operation|second time|backward\(\)"):
            wrap(lambda x, lengths, model=model: wrong(model, x, lengths))(words(0), lengths_of(4))


def test_an_empty_sequence_is_refused_by_torch_in_every_call() -> None:
    step = weft.compile(tagging("LSTM")()[0])
    for at in range(3):
        step(words(at), lengths_of(at))
    with pytest.raises(Exception, match="has to be greater than 0"):
        step(words(0), torch.tensor([2, 0, 1, 1]))
    step(words(0), lengths_of(0))


@pytest.mark.parametrize("around", ["autocast", "create_graph"])
def test_what_cannot_be_captured_is_named(around: str) -> None:
    model = Tagger("LSTM")

    def step(x: torch.Tensor, lengths: torch.Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=around == "autocast"):
            loss = model(x, lengths)[0].sum()
        torch.autograd.grad(loss, list(model.parameters()), create_graph=around == "create_graph")

    with pytest.raises(CannotCapture, match=rf"test_packed_sequences\.py(.|\n)*{around}"):
        weft.compile(step)(words(0), lengths_of(0))


def test_a_packed_sequence_as_argument_is_captured_three_times() -> None:
    """Rows, steps and sequences vary together: one capture for all, and one where the longest sequence is 1."""

    def make() -> tuple[Callable[..., Any], list[Any]]:
        model = nn.LSTM(WIDTH, HIDDEN)

        def step(packed: rnn.PackedSequence) -> torch.Tensor:
            out, _ = model(packed)
            loss = out.data.square().mean() + rnn.pad_packed_sequence(out)[0].sum()
            loss.backward()
            return loss.detach()

        return step, [model]

    def packed(at: int) -> tuple[rnn.PackedSequence]:
        lengths = lengths_of(at, 2 + at % 3)
        entries = [torch.randn(int(n), WIDTH, generator=torch.Generator().manual_seed(at)) for n in lengths]
        return (rnn.pack_sequence(entries, enforce_sorted=False),)

    both(make, packed, captures=3)
