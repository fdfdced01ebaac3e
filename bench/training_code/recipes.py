"""Recipes: recommenders, speech, detection, graphs, densities, several tasks, compression, curricula."""

from __future__ import annotations

import collections
import copy
import math
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from coverage_case import Trained
from torch import nn

from .pieces import adamw, convnet, features, images, mlp, piece, tokens, trained


@piece("matrix factorization", "bpr", "two towers", "wide and deep", "session gru", "sampled softmax")
def recommender(kind: str) -> Trained:
    users, items = nn.Embedding(32, 8), nn.Embedding(32, 8)
    bias, deep, gru = nn.Embedding(32, 1), mlp(16, 16, 1), nn.GRU(8, 8, batch_first=True)
    optimizer = adamw(users, items, bias, deep, gru)

    def train_step(ids: torch.Tensor) -> float:
        user, item = ids[:, 0], ids[:, 1]
        if kind == "matrix factorization":
            score = (users(user) * items(item)).sum(-1) + bias(item).squeeze(-1)
            loss = F.mse_loss(score, (ids[:, 2] % 5).float())
        elif kind == "bpr":
            negative = torch.randint(0, 32, item.shape)
            while (clash := negative == item).any():
                negative[clash] = torch.randint(0, 32, (int(clash.sum()),))
            gap = (users(user) * (items(item) - items(negative))).sum(-1)
            loss = -F.logsigmoid(gap).mean()
        elif kind == "two towers":
            scores = F.normalize(users(user), dim=-1) @ F.normalize(items(item), dim=-1).T / 0.1
            same = item[:, None] == item[None]
            same.fill_diagonal_(False)
            loss = F.cross_entropy(scores.masked_fill(same, -1e9), torch.arange(len(ids)))
        elif kind == "wide and deep":
            crossed = (user * 7 + item) % 32
            logit = bias(crossed).squeeze(-1) + deep(torch.cat([users(user), items(item)], -1)).squeeze(-1)
            loss = F.binary_cross_entropy_with_logits(logit, (ids[:, 2] % 2).float())
        elif kind == "session gru":
            hidden, _ = gru(items(ids[:, :-1]))
            loss = F.cross_entropy((hidden @ items.weight.T).flatten(0, 1), ids[:, 1:].flatten())
        else:
            sampled = torch.multinomial(torch.ones(32), 10)
            logits = users(user) @ items(torch.cat([item, sampled])).T
            loss = F.cross_entropy(logits, torch.arange(len(user)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return trained(train_step, tokens(), users, items, bias, deep)


@piece("transducer", "attention with scheduled sampling", "teacher forcing", "specaugment", "lengths", "wav2vec masks")
def speech(kind: str) -> Trained:
    encoder, embed, cell = nn.GRU(8, 16, batch_first=True), nn.Embedding(6, 16), nn.GRUCell(16, 16)
    head = nn.Linear(16, 6)
    optimizer = adamw(encoder, embed, cell, head)
    steps = {"done": 0}

    def transducer(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        frames, labels = logits.shape[1], target.shape[1]
        logp = logits.log_softmax(-1)
        rows = [torch.zeros(len(logits))]
        for u in range(1, labels + 1):
            rows.append(rows[-1] + logp[:, 0, u - 1].gather(1, target[:, u - 1 : u]).squeeze(1))
        for t in range(1, frames):
            new = [rows[0] + logp[:, t - 1, 0, 0]]
            for u in range(1, labels + 1):
                emit = new[-1] + logp[:, t, u - 1].gather(1, target[:, u - 1 : u]).squeeze(1)
                new.append(torch.logaddexp(rows[u] + logp[:, t - 1, u, 0], emit))
            rows = new
        return -(rows[-1] + logp[:, -1, -1, 0]).mean()

    def train_step(batch: Any) -> float:
        x = batch[0].view(4, -1, 8).repeat(1, 3, 1)
        target = batch[1].view(4, -1)[:, :2] + 1
        steps["done"] += 1
        if kind == "specaugment":
            start = random.randint(0, 3)
            x = x.clone()
            x[:, start : start + 2] = 0
            x[:, :, np.random.randint(0, 8)] = 0
        if kind == "wav2vec masks":
            x = torch.where(torch.rand(x.shape[:2]).lt(0.3)[..., None], torch.zeros(()), x)
        out, hidden = encoder(x)
        if kind == "transducer":
            joint = torch.tanh(out[:, :, None] + torch.cat([embed(target * 0), embed(target)], 1)[:, None, :3])
            loss = transducer(head(joint), target)
        elif kind == "lengths":
            lengths = batch[1].view(4, -1).sum(1).clamp(1, x.shape[1])
            mask = torch.arange(x.shape[1])[None] < lengths[:, None]
            loss = (head(out).logsumexp(-1) * mask).sum() / mask.sum()
        else:
            state, token, losses = hidden[0], torch.zeros(4, dtype=torch.long), []
            ratio = max(0.0, 1 - steps["done"] / 4)
            for at in range(2):
                state = cell(embed(token), state)
                logits = head(state)
                losses.append(F.cross_entropy(logits, target[:, at]))
                teach = kind == "teacher forcing" or random.random() < ratio
                token = target[:, at] if teach else logits.argmax(-1)
            loss = sum(losses) / len(losses)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return trained(train_step, features(), encoder, embed, cell, head)


@piece("anchors", "variable targets", "matching", "center points", "ohem", "nms inside")
def detection(kind: str) -> Trained:
    backbone, boxes, scores = convnet(16), nn.Linear(16, 6 * 4), nn.Linear(16, 6 * 3)
    optimizer = adamw(backbone, boxes, scores)

    def area(box: torch.Tensor) -> torch.Tensor:
        return (box[..., 2:] - box[..., :2]).clamp(min=0).prod(-1)

    def iou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        corner, other = torch.max(a[:, None, :2], b[None, :, :2]), torch.min(a[:, None, 2:], b[None, :, 2:])
        inter = (other - corner).clamp(min=0).prod(-1)
        return inter / (area(a)[:, None] + area(b)[None] - inter + 1e-6)

    def targets_of(label: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        found = []
        for each in label.tolist():
            corner = torch.arange(each + 1, dtype=torch.float32)[:, None].repeat(1, 2) / 8
            found.append({"boxes": torch.cat([corner, corner + 0.25], 1), "labels": torch.arange(each + 1) % 2})
        return found

    def train_step(batch: Any) -> Any:
        hidden = backbone(batch[0]).relu()
        corner = boxes(hidden).view(-1, 6, 4).sigmoid()
        predicted = torch.cat([corner[..., :2], corner[..., :2] + corner[..., 2:]], -1)
        logits = scores(hidden).view(-1, 6, 3)
        total, positives = torch.zeros(()), 0
        for box, logit, target in zip(predicted, logits, targets_of(batch[1]), strict=True):
            overlap = iou(box, target["boxes"])
            best, which = overlap.max(1)
            wanted = torch.full((6,), 2)
            if kind == "matching":
                cost = -overlap.detach() - logit.detach().softmax(-1)[:, target["labels"]]
                rows = torch.arange(len(target["boxes"]))
                taken = cost.argmin(0)
                wanted[taken] = target["labels"][rows]
                total = total + F.l1_loss(box[taken], target["boxes"])
            else:
                hit = best > 0.05
                wanted[hit] = target["labels"][which[hit]]
                if kind == "variable targets" and hit.sum():
                    total = total + F.smooth_l1_loss(box[hit], target["boxes"][which[hit]])
                elif kind == "anchors":
                    total = total + (F.l1_loss(box, target["boxes"][which], reduction="none").sum(-1) * hit).sum()
                positives += hit.sum().item()
            each = F.cross_entropy(logit, wanted, reduction="none")
            if kind == "ohem":
                each = each.topk(3).values
            total = total + each.mean()
        if kind == "nms inside":
            order = logits[0].softmax(-1)[:, 0].argsort(descending=True)
            keep = torch.ones(6, dtype=torch.bool)
            overlap = iou(predicted[0], predicted[0])
            for at in range(6):
                keep &= ~((overlap[order[at]] > 0.7) & (torch.arange(6) > at) & keep[order[at]])
            total = total + predicted[0][keep].sum() * 0.01
        if kind == "center points":
            heat = torch.zeros(len(hidden), 6).scatter_(1, batch[1][:, None], 1.0)
            p = logits[..., 0].sigmoid().clamp(1e-4, 1 - 1e-4)
            total = total - (
                heat * p.log() * (1 - p) ** 2 + (1 - heat) * (1 - p).log() * p**2
            ).sum() / heat.sum().clamp(1)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        return total.item(), positives

    return trained(train_step, images(), backbone, boxes, scores)


@piece("scatter mean", "attention by segments", "edge dropout", "link prediction", "sampled neighbours", "pooling")
def graphs(kind: str) -> Trained:
    first, second, head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
    attention = nn.Linear(32, 1)
    optimizer = adamw(first, second, head, attention)
    draw = torch.Generator().manual_seed(5)
    edges = torch.randint(0, 8, (2, 20), generator=draw)

    def gather(h: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
        source, to = edge
        if kind == "attention by segments":
            score = F.leaky_relu(attention(torch.cat([h[source], h[to]], -1))).squeeze(-1)
            top = torch.full((8,), -torch.inf).scatter_reduce(0, to, score, "amax")
            weight = (score - top[to]).exp()
            weight = weight / torch.zeros(8).index_add(0, to, weight)[to]
            return torch.zeros_like(h).index_add(0, to, weight[:, None] * h[source])
        count = torch.bincount(to, minlength=8).clamp(min=1)
        return torch.zeros_like(h).index_add_(0, to, h[source]) / count[:, None]

    def train_step(batch: Any) -> float:
        edge = edges
        if kind == "edge dropout":
            edge = edge[:, torch.rand(edge.shape[1]) > 0.3]
        elif kind == "sampled neighbours":
            edge = edge[:, torch.randperm(edge.shape[1])[:10]]
        h = second(gather(first(batch[0]).relu(), edge)).relu()
        if kind == "link prediction":
            wrong = torch.randint(0, 8, edge.shape)
            score = lambda pair: (h[pair[0]] * h[pair[1]]).sum(-1)
            loss = -F.logsigmoid(score(edge)).mean() - F.logsigmoid(-score(wrong)).mean()
        elif kind == "pooling":
            top = h.norm(dim=-1).topk(4).indices
            loss = F.cross_entropy(head(h[top].mean(0, keepdim=True)), batch[1][:1])
        else:
            loss = F.cross_entropy(head(h), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return trained(train_step, features(), first, second, head)


@piece("coupling", "planar", "beta annealed", "vq ema", "vq restarts", "iwae", "score matching", "flow matching")
def densities(kind: str) -> Trained:
    encoder, decoder = mlp(8, 16, 8), mlp(8, 16, 8)
    scale, shift = mlp(4, 16, 4), mlp(4, 16, 4)
    book, counts = torch.randn(6, 8, generator=torch.Generator().manual_seed(6)), torch.ones(6)
    optimizer = adamw(encoder, decoder, scale, shift)
    state = {"step": 0, "beta": 0.0}

    def train_step(batch: Any) -> Any:
        x = batch[0]
        state["step"] += 1
        if kind == "coupling":
            left, right = x.chunk(2, -1)
            log_scale = scale(left).tanh()
            z = torch.cat([left, right * log_scale.exp() + shift(left)], -1)
            loss = (0.5 * z.pow(2) + 0.5 * math.log(2 * math.pi)).sum(-1).mean() - log_scale.sum(-1).mean()
        elif kind == "planar":
            w, u = encoder[0].weight[0], decoder[0].weight[0]
            u = u + (F.softplus(w @ u) - 1 - w @ u) * w / w.square().sum()
            inner = x @ w + 0.1
            z = x + u * inner.tanh()[:, None]
            loss = 0.5 * z.square().sum(-1).mean() - (1 + (1 - inner.tanh() ** 2) * (w @ u)).abs().log().mean()
        elif kind in ("vq ema", "vq restarts"):
            z = encoder(x)
            code = torch.cdist(z, book).argmin(1)
            with torch.no_grad():
                hot = F.one_hot(code, 6).float()
                counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                book.mul_(0.9).add_(hot.T @ z, alpha=0.1)
                book.div_(counts.clamp(min=0.1)[:, None])
                if kind == "vq restarts" and (dead := counts < 0.5).any():
                    book[dead] = z[torch.randint(0, len(z), (int(dead.sum()),))]
            quantized = z + (book[code] - z).detach()
            loss = F.mse_loss(decoder(quantized), x) + 0.25 * F.mse_loss(z, book[code])
        elif kind == "score matching":
            sigma = torch.exp(torch.empty(len(x), 1).uniform_(-2, 1))
            noise = torch.randn_like(x)
            loss = (decoder(x + sigma * noise) * sigma + noise).square().sum(-1).mean()
        elif kind == "flow matching":
            time, start = torch.rand(len(x), 1), torch.randn_like(x)
            loss = F.mse_loss(decoder(start + time * (x - start)) * time, x - start)
        else:
            mean, log_var = encoder(x).chunk(2, -1)
            samples = 5 if kind == "iwae" else 1
            z = mean + torch.randn(samples, *mean.shape) * (log_var / 2).exp()
            error = -(decoder(torch.cat([z, z], -1)) - x).square().sum(-1)
            if kind == "iwae":
                log_q = torch.distributions.Normal(mean, (log_var / 2).exp()).log_prob(z).sum(-1)
                log_p = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1)
                loss = -(torch.logsumexp(error + log_p - log_q, 0) - math.log(samples)).mean()
            else:
                state["beta"] = min(1.0, state["step"] / 10)
                kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(-1)
                loss = (state["beta"] * kl - error[0]).mean()
        optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        return loss.item()

    return trained(train_step, features(), encoder, decoder, scale, shift, also=lambda: [book, counts, state])


@piece("maml", "first order", "reptile", "prototypes", "pcgrad", "gradnorm", "uncertainty weights", "sam")
def many_tasks(kind: str) -> Trained:
    model, heads = mlp(8, 16, 16), nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])
    log_sigma = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*model.parameters(), *heads.parameters(), log_sigma], lr=0.05)
    first: list[float] = []

    def losses(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        hidden = model(x)
        return [F.cross_entropy(head(hidden), (y + at) % 4) for at, head in enumerate(heads)]

    def train_step(batch: Any) -> Any:
        x, y = batch
        optimizer.zero_grad()
        if kind in ("maml", "first order"):
            names = dict(model.named_parameters())
            total = torch.zeros(())
            for head in heads:
                run = lambda weights, part, head=head: head(torch.func.functional_call(model, weights, (part,)))
                inner = F.cross_entropy(run(names, x[:4]), y[:4])
                slopes = torch.autograd.grad(inner, list(names.values()), create_graph=kind == "maml")
                fast = {name: p - 0.1 * slope for (name, p), slope in zip(names.items(), slopes, strict=True)}
                total = total + F.cross_entropy(run(fast, x[4:]), y[4:])
            total.backward()
        elif kind == "reptile":
            before = copy.deepcopy(model.state_dict())
            for _ in range(2):
                total = losses(x, y)[0]
                total.backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
                model.zero_grad()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(before[name] + 0.5 * (p - before[name]))
        elif kind == "prototypes":
            hidden = model(x)
            centers = torch.stack([hidden[:4][y[:4] == c].sum(0) / (y[:4] == c).sum().clamp(1) for c in range(4)])
            total = F.cross_entropy(-torch.cdist(hidden[4:], centers).square(), y[4:])
            total.backward()
        elif kind == "pcgrad":
            shared, found = list(model.parameters()), []
            both = losses(x, y)
            for each in both:
                slopes = torch.autograd.grad(each, shared, retain_graph=True)
                found.append(torch.cat([slope.flatten() for slope in slopes]))
            merged = [each.clone() for each in found]
            order = list(range(2))
            for at in range(2):
                for other in order:
                    if other != at and (dot := torch.dot(merged[at], found[other])) < 0:
                        merged[at] -= dot / found[other].norm() ** 2 * found[other]
            torch.nn.utils.vector_to_parameters(parameters_to_vector(shared) - 0.05 * sum(merged), shared)
            total = sum(both)
        elif kind == "gradnorm":
            both = torch.stack(losses(x, y))
            if not first:
                first.extend(both.tolist())
            ratio = (both.detach() / torch.tensor(first)).div_((both.detach() / torch.tensor(first)).mean())
            norms = torch.stack([torch.autograd.grad(e, model[-1].weight, retain_graph=True)[0].norm() for e in both])
            total = (both * (ratio * norms.mean().detach() / norms.detach())).sum()
            total.backward()
        elif kind == "sam":
            total = sum(losses(x, y))
            total.backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = {}
            with torch.no_grad():
                for p in model.parameters():
                    moves[p] = p.grad * (0.05 / (norm + 1e-12))
                    p.add_(moves[p])
            optimizer.zero_grad()
            sum(losses(x, y)).backward()
            with torch.no_grad():
                for p, move in moves.items():
                    p.sub_(move)
        else:
            total = sum(each * (-2 * s).exp() + s for each, s in zip(losses(x, y), log_sigma, strict=True))
            total.backward()
        optimizer.step()
        return total.item()

    return trained(train_step, features(), model, heads, also=lambda: [log_sigma, first])


def parameters_to_vector(parameters: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


@piece(
    "fake quantization",
    "learned step",
    "magnitude pruning",
    "gradual pruning",
    "lora",
    "feature distillation",
    "ternary",
)
def compression(kind: str) -> Trained:
    model, teacher = mlp(8, 16, 4), mlp(8, 16, 4)
    step_size = nn.Parameter(torch.tensor(0.1))
    down, up = nn.Parameter(torch.randn(2, 8) * 0.1), nn.Parameter(torch.zeros(16, 2))
    masks = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    optimizer = adamw(model)
    optimizer.add_param_group({"params": [step_size, down, up], "weight_decay": 0.0})
    state = {"step": 0, "observed": 0.0}

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
            return slope

    def forward(x: torch.Tensor) -> torch.Tensor:
        if kind == "fake quantization":
            state["observed"] = max(state["observed"], x.detach().abs().max().item())
            scale = state["observed"] / 127
            x = torch.fake_quantize_per_tensor_affine(x, 0.02, 0, -128, 127) * min(scale * 50, 1.0)
        elif kind == "learned step":
            x = Rounded.apply((x / step_size).clamp(-8, 7)) * step_size
        elif kind == "ternary":
            weight = model[0].weight
            level = weight.abs().mean()
            weight = weight + (weight.sign() * (weight.abs() > 0.7 * level) * level - weight).detach()
            return model[1:](F.linear(x, weight, model[0].bias))
        elif kind == "lora":
            return model[1:](model[0](x) + x @ down.T @ up.T)
        return model(x)

    def train_step(batch: Any) -> float:
        x, y = batch
        state["step"] += 1
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(x), y)
        if kind == "feature distillation":
            with torch.no_grad():
                wanted = teacher[:2](x)
            loss = loss + F.mse_loss(model[:2](x), wanted)
        loss.backward()
        optimizer.step()
        if kind == "gradual pruning" or (kind == "magnitude pruning" and state["step"] == 2):
            share = 0.5 * (1 - (1 - min(state["step"], 10) / 10) ** 3) if kind == "gradual pruning" else 0.3
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if p.dim() > 1:
                        count = max(int(share * p.numel()), 1)
                        limit = p.abs().flatten().kthvalue(count).values
                        masks[name] = (p.abs() > limit).float()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.mul_(masks[name])
        return loss.item()

    return trained(train_step, features(), model, also=lambda: [step_size, down, up, state])


@piece(
    *("easy first", "self paced", "early stopping", "noise on gradients", "moving average", "best so far", "spikes"),
    *("mixup by half", "label smoothing ramp", "loss window", "confusion", "warm restarts on loss", "median of losses"),
)
def curricula(kind: str) -> Trained:
    model = mlp(8, 16, 4)
    average = copy.deepcopy(model)
    optimizer = adamw(model)
    recent: collections.deque[float] = collections.deque(maxlen=100)
    history: list[float] = []
    confusion = np.zeros((4, 4), dtype=np.int64)
    state: dict[str, Any] = {"step": 0, "best": np.inf, "patience": 0, "stop": False, "level": 1.0, "weights": None}

    def train_step(batch: Any) -> Any:
        x, y = batch
        state["step"] += 1
        if state["stop"]:
            return None
        if kind == "mixup by half" and np.random.rand() < 0.5:
            share = np.random.beta(0.2, 0.2)
            order = torch.randperm(len(x))
            logits = model(share * x + (1 - share) * x[order])
            loss = share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])
        else:
            logits = model(x)
            smoothing = min(0.1, 0.01 * state["step"]) if kind == "label smoothing ramp" else 0.0
            each = F.cross_entropy(logits, y, reduction="none", label_smoothing=smoothing)
            if kind == "easy first":
                each = each.sort().values[: min(len(each), 2 + state["step"])]
            elif kind == "self paced":
                each = each * (each.detach() < state["level"])
                state["level"] *= 1.1
            loss = each.mean()
        optimizer.zero_grad()
        loss.backward()
        if kind == "noise on gradients":
            scale = math.sqrt(0.01 / (1 + state["step"]) ** 0.55)
            for p in model.parameters():
                p.grad += torch.randn_like(p) * scale
        value = loss.item()
        if kind == "spikes" and len(recent) > 2 and value > 3 * np.mean(recent):
            optimizer.zero_grad()
            return "skipped"
        optimizer.step()
        recent.append(value)
        history.append(value)
        if kind == "early stopping":
            if value < state["best"] - 1e-3:
                state["best"], state["patience"] = value, 0
            else:
                state["patience"] += 1
            state["stop"] = state["patience"] > 3
        elif kind == "best so far":
            state["best"] = np.minimum(state["best"], np.float32(value))
        elif kind == "moving average":
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
            return {"loss": sum(recent) / len(recent), "best": min(history)}
        elif kind == "loss window":
            return np.mean(history[-10:]), np.std(recent), len(history)
        elif kind == "median of losses":
            return np.median(history), max(history[-5:])
        elif kind == "warm restarts on loss":
            if len(history) > 4 and history[-1] > history[-4]:
                for group in optimizer.param_groups:
                    group["lr"] = 1e-2
            else:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.9
        elif kind == "confusion":
            np.add.at(confusion, (y.numpy(), logits.argmax(1).numpy()), 1)
            return confusion.trace() / confusion.sum()
        return value

    return trained(train_step, features(), model, average, also=lambda: [list(recent), history, confusion.tolist()])
