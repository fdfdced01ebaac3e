"""Losses: those of torch, those of papers, and what people do with numbers and masks on the way to one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from coverage_case import CALLS, Trained
from torch import distributions, nn

from .pieces import adamw, features, mlp, piece, trained

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ONE_HOT = lambda y: F.one_hot(y, 4).float()

TORCH_LOSSES: list[tuple[str, Loss]] = [
    ("cross entropy", F.cross_entropy),
    ("cross entropy smoothed", nn.CrossEntropyLoss(label_smoothing=0.1)),
    ("cross entropy weighted", nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))),
    ("cross entropy ignored", lambda z, y: F.cross_entropy(z, torch.where(y == 1, -100, y), ignore_index=-100)),
    ("cross entropy soft", lambda z, y: F.cross_entropy(z, ONE_HOT(y))),
    ("nll", lambda z, y: F.nll_loss(F.log_softmax(z, -1), y)),
    ("bce with logits", lambda z, y: F.binary_cross_entropy_with_logits(z, ONE_HOT(y), pos_weight=torch.ones(4) * 2)),
    ("bce", lambda z, y: F.binary_cross_entropy(torch.sigmoid(z), ONE_HOT(y))),
    ("mse", lambda z, y: F.mse_loss(z, ONE_HOT(y))),
    ("l1", lambda z, y: F.l1_loss(z, ONE_HOT(y))),
    ("huber", lambda z, y: F.huber_loss(z, ONE_HOT(y))),
    ("smooth l1", lambda z, y: F.smooth_l1_loss(z, ONE_HOT(y), beta=0.5)),
    ("kl", lambda z, y: F.kl_div(F.log_softmax(z, -1), torch.softmax(ONE_HOT(y), -1), reduction="batchmean")),
    ("gaussian nll", lambda z, y: F.gaussian_nll_loss(z, ONE_HOT(y), F.softplus(z) + 0.1)),
    ("poisson nll", lambda z, y: F.poisson_nll_loss(z, ONE_HOT(y))),
    ("multi margin", F.multi_margin_loss),
    ("multilabel margin", lambda z, y: F.multilabel_soft_margin_loss(z, ONE_HOT(y))),
    ("hinge embedding", lambda z, y: F.hinge_embedding_loss(z, ONE_HOT(y) * 2 - 1)),
    ("margin ranking", lambda z, y: F.margin_ranking_loss(z[:, 0], z[:, 1], y.float().sign())),
    ("cosine embedding", lambda z, y: F.cosine_embedding_loss(z, ONE_HOT(y), torch.ones(len(y)))),
    ("triplet", lambda z, y: F.triplet_margin_loss(z, ONE_HOT(y), z.roll(1, 0))),
]


def focal(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    ce = F.cross_entropy(z, y, reduction="none")
    return ((1 - torch.exp(-ce)) ** 2 * ce).mean()


def dice(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    probabilities, target = z.softmax(-1).flatten(), ONE_HOT(y).flatten()
    return 1 - (2 * (probabilities * target).sum() + 1) / (probabilities.sum() + target.sum() + 1)


def info_nce(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = F.normalize(z, dim=-1), F.normalize(z + 0.1 * ONE_HOT(y), dim=-1)
    similarity = a @ b.t() / 0.07
    return (
        F.cross_entropy(similarity, torch.arange(len(z))) + F.cross_entropy(similarity.t(), torch.arange(len(z)))
    ) / 2


def supervised_contrastive(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = F.normalize(z, dim=-1)
    mask = (y[:, None] == y[None, :]).float()
    others = 1 - torch.eye(len(y))
    mask = mask * others
    logits = z @ z.t() / 0.1
    logits = logits - logits.max(dim=1, keepdim=True).values.detach()
    log_prob = logits - torch.log((torch.exp(logits) * others).sum(1, keepdim=True))
    return -((mask * log_prob).sum(1) / mask.sum(1).clamp(min=1)).mean()


def hard_examples(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(z, y, reduction="none")
    return torch.topk(loss, k=max(1, int(0.5 * loss.numel())))[0].mean()


def barlow_twins(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = (z - z.mean(0)) / z.std(0), (z * 1.1 + ONE_HOT(y)).sub(z.mean(0)) / z.std(0)
    c = (a.T @ b) / len(z)
    on_diagonal = torch.diagonal(c).add_(-1).pow_(2).sum()
    n = c.shape[0]
    off_diagonal = c.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten().pow_(2).sum()
    return on_diagonal + 0.005 * off_diagonal


def vicreg(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, other = z, z + 0.1 * ONE_HOT(y)
    std = torch.sqrt(x.var(dim=0) + 1e-4)
    covariance = ((x - x.mean(0)).T @ (x - x.mean(0))) / (len(x) - 1)
    off = covariance.pow(2).sum() - covariance.diagonal().pow(2).sum()
    return 25 * F.mse_loss(x, other) + 25 * F.relu(1 - std).mean() + off / z.shape[1]


def masked_mean(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = y > 0
    return F.cross_entropy(z[mask], y[mask], reduction="sum") / mask.sum().clamp(min=1)


def mean_over_valid(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    valid = (y != 1).nonzero(as_tuple=True)[0]
    return F.cross_entropy(z.index_select(0, valid), y.index_select(0, valid))


def skip_if_none_valid(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = y > 0
    if mask.sum() == 0:
        return z.sum() * 0.0
    return F.cross_entropy(z[mask], y[mask])


def asserted_finite(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(z, y)
    assert torch.isfinite(loss), "loss is not finite"
    return loss


def raised_for_nan(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(z, y)
    if torch.isnan(loss).any():
        raise RuntimeError(f"nan in the loss of labels {y.tolist()}")
    return loss


def labels_checked(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if y.max() >= z.shape[-1]:
        raise ValueError(f"label values must be below {z.shape[-1]}")
    return F.cross_entropy(z, y)


def clamped_by_value(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(z, y)
    return loss if loss.item() < 1e4 else loss * 0


PAPER_LOSSES: list[Loss] = [
    *(focal, dice, info_nce, supervised_contrastive, hard_examples, barlow_twins, vicreg, masked_mean, mean_over_valid),
    *(skip_if_none_valid, asserted_finite, raised_for_nan, labels_checked, clamped_by_value),
]


def _classifier(loss_of: Loss) -> Trained:
    model = mlp(8, 16, 4)
    optimizer = adamw(model)

    def train_step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return trained(train_step, features(), model)


@piece(*TORCH_LOSSES)
def of_torch(variant: tuple[str, Loss]) -> Trained:
    return _classifier(variant[1])


@piece(*PAPER_LOSSES)
def of_papers(loss: Loss) -> Trained:
    return _classifier(loss)


@piece("ctc", "ctc tensor lengths", "ctc zero infinity")
def ctc(kind: str) -> Trained:
    model = nn.Linear(8, 12)
    optimizer = adamw(model)
    draw = torch.Generator().manual_seed(5)
    batches = [
        (torch.randn(10, 2, 8, generator=draw), torch.randint(1, 12, (2, 4), generator=draw)) for _ in range(CALLS)
    ]
    loss_of = nn.CTCLoss(zero_infinity=kind == "ctc zero infinity")

    def train_step(batch: Any) -> torch.Tensor:
        log_probs = model(batch[0]).log_softmax(-1)
        lengths: Any = ((10, 10), (4, 4))
        if kind == "ctc tensor lengths":
            lengths = (torch.full((2,), 10), torch.full((2,), 4))
        loss = loss_of(log_probs, batch[1], *lengths)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trained(train_step, batches, model)


@piece("normal", "categorical", "bernoulli", "beta", "mixture", "multivariate", "gumbel", "relaxed", "transformed")
def through_distributions(kind: str) -> Trained:
    """``torch.distributions`` with its default validation of arguments."""
    model = mlp(8, 16, 8)
    optimizer = adamw(model)

    def loss_of(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = z.chunk(2, -1)
        if kind == "normal":
            found = distributions.Normal(a, F.softplus(b) + 1e-3)
            return -found.log_prob(found.rsample()).mean() - found.entropy().mean()
        if kind == "categorical":
            policy = distributions.Categorical(logits=a)
            return -(policy.log_prob(policy.sample()) * y).mean() - 0.01 * policy.entropy().mean()
        if kind == "bernoulli":
            return -distributions.Bernoulli(logits=a).log_prob((y > 1).float()[:, None].expand_as(a)).mean()
        if kind == "beta":
            return -distributions.Beta(F.softplus(a) + 1, F.softplus(b) + 1).log_prob(torch.full_like(a, 0.3)).mean()
        if kind == "mixture":
            mix = distributions.Categorical(logits=a)
            parts = distributions.Normal(b, torch.ones_like(b))
            return -distributions.MixtureSameFamily(mix, parts).log_prob(y.float()).mean()
        if kind == "multivariate":
            found = distributions.MultivariateNormal(a, torch.eye(4) * 0.5)
            return -found.log_prob(ONE_HOT(y)).mean()
        if kind == "gumbel":
            return (F.gumbel_softmax(a, tau=0.5, hard=True) * b).mean()
        if kind == "relaxed":
            return distributions.RelaxedOneHotCategorical(torch.tensor(0.5), logits=a).rsample().mul(b).mean()
        squashed = distributions.TransformedDistribution(
            distributions.Normal(a, torch.ones_like(a)), [distributions.TanhTransform(cache_size=1)]
        )
        return squashed.log_prob(squashed.rsample()).mean()

    def train_step(batch: Any) -> torch.Tensor:
        loss = loss_of(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return trained(train_step, features(), model)


@piece(
    "kl of normals", "elbo", "mmd", "sinkhorn", "total variation", "spectral", "orthogonal", "l1 penalty", "jacobian"
)
def terms(kind: str) -> Trained:
    model = mlp(8, 16, 8)
    optimizer = adamw(model)

    def term(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        a, b = z.chunk(2, -1)
        if kind == "kl of normals":
            p, q = distributions.Normal(a, b.exp()), distributions.Normal(torch.zeros_like(a), torch.ones_like(a))
            return distributions.kl_divergence(p, q).sum(-1).mean()
        if kind == "elbo":
            return (
                -0.5 * torch.mean(1 + b - a.pow(2) - b.exp())
                + (torch.randn_like(a) * (0.5 * b).exp() + a).square().mean()
            )
        if kind == "mmd":
            kernel = lambda one, other: torch.exp(-torch.cdist(one, other).pow(2)).mean()
            return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)
        if kind == "sinkhorn":
            cost = torch.cdist(a, b)
            u = torch.zeros(len(a))
            for _ in range(3):
                v = -torch.logsumexp(u[:, None] - cost, 0)
                u = -torch.logsumexp(v[None] - cost, 1)
            return (torch.exp(u[:, None] + v[None] - cost) * cost).sum()
        if kind == "total variation":
            return (z[:, 1:] - z[:, :-1]).abs().mean() + (z[1:] - z[:-1]).abs().mean()
        if kind == "spectral":
            return torch.linalg.matrix_norm(model[0].weight, 2) + torch.linalg.svdvals(model[2].weight).sum()
        if kind == "orthogonal":
            weight = model[0].weight
            return (weight.t() @ weight - torch.eye(weight.shape[1])).norm()
        if kind == "l1 penalty":
            return z.pow(2).mean() + 1e-3 * sum(p.abs().sum() for p in model.parameters())
        x = x.clone().requires_grad_()
        grad = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)[0]
        return grad.pow(2).mean()

    def train_step(batch: Any) -> torch.Tensor:
        loss = term(batch[0], model(batch[0]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return trained(train_step, features(), model)
