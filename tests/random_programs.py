"""Random training steps as Python source text, drawn from a table of constructs.

A :class:`Plan` is a list of small numbers, drawn from a seed. :func:`write` turns it into the text of a program that a
reader can run and paste into an issue: ``make()`` builds the state ``s`` and the step, ``call(k)`` the arguments of
call k, ``between(k, s, out)`` what happens outside of the step after it.

The text is written line by line. Each line runs at once, eagerly and on a state of its own, so that the values which
the next line may use are known with their dtypes and sizes; a line that fails is left out. A construct is one row of
one of the tables below: text with holes. ``<x>`` is a float tensor, ``<i>`` an integer one (see ``_KINDS``); any other
hole is an entry of ``CHOICES``.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

PRELUDE = """\
import collections
import contextlib
import functools
import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class State:
    pass


Pair = collections.namedtuple("Pair", ["first", "second"])
"""

# ---- the state of a program: attributes of `s`. Those that the program does not mention are left out of its text.

NETS = [
    "nn.Linear(4, 4)",
    "nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))",
    "nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.LayerNorm(4))",
    "nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.GELU())",
    "nn.Sequential(nn.RMSNorm(4), nn.SiLU(), nn.Linear(4, 4).to(torch.bfloat16).float())",
    "nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))",
    "nn.ModuleList([nn.Linear(4, 4), nn.GroupNorm(2, 4)]).extend([nn.Tanh()])[0]",
    "nn.Sequential(*[nn.Linear(4, 4)] * 2)",
]
OPTIMIZERS = [
    "torch.optim.SGD(<params>, lr=0.1)",
    "torch.optim.SGD(<params>, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "torch.optim.SGD(<params>, lr=0.1, momentum=0.9, dampening=0.1, foreach=<flag>)",
    "torch.optim.Adam(<params>, lr=0.01, foreach=<flag>)",
    "torch.optim.Adam(<params>, lr=0.01, amsgrad=True, maximize=<flag>)",
    "torch.optim.AdamW(<params>, lr=0.01)",
    "torch.optim.AdamW(<params>, lr=0.01, fused=True)",
    "torch.optim.SGD(<params>, lr=0.01, momentum=0.5, fused=True)",
    "torch.optim.AdamW(<params>, lr=torch.tensor(0.01), foreach=False)",
    "torch.optim.RMSprop(<params>, lr=0.01, momentum=0.5, centered=<flag>)",
    "torch.optim.Adagrad(<params>, lr=0.1, lr_decay=0.1, foreach=<flag>)",
    "torch.optim.NAdam(<params>, lr=0.01)",
    "torch.optim.Adamax(<params>, lr=0.01)",
    "torch.optim.Rprop(<params>, lr=0.01)",
    "torch.optim.Adadelta(<params>)",
    "torch.optim.RAdam(<params>, lr=0.01)",
    "torch.optim.ASGD(<params>, lr=0.01)",
]
STATE = {
    "net": "<net>",
    "w": "nn.Parameter(torch.randn(3, 4))",
    "v": "nn.Parameter(torch.randn(4))",
    "table": "nn.Embedding(5, 4, padding_idx=<padding>)",
    "opt": "<optimizer>",
    "sched": "torch.optim.lr_scheduler.StepLR(s.opt, 1, 0.5)",
    "buf": "torch.randn(3, 4)",
    "wide": "torch.randn(4, 6).t()",
    "ints": "torch.tensor([2, 0, 1])",
    "half": "torch.randn(4).bfloat16()",
    "double": "torch.randn(3, 1).double()",
    "scalar": "torch.tensor(1.5)",
    "odd": "torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0])",
    "empty": "torch.zeros(0, 4)",
    "leaf": "torch.randn(3, 4, requires_grad=True)",
    "generator": "torch.Generator().manual_seed(3)",
    "np_rng": "np.random.default_rng(3)",
    "rng": "random.Random(3)",
    "scale": "0.5",
    "count": "0",
    "flag": "True",
    "name": "'a'",
    "memo": "{'old': torch.ones(2)}",
    "log": "[]",
    "queue": "collections.deque([torch.zeros(4), torch.ones(4)], maxlen=2)",
    "history": "[torch.zeros(()), None]",
    "nested": "{'a': [torch.ones(3, 4), (torch.zeros(4), 2)], 'b': None}",
}

# Run once, after the state was made.
SETUP = [
    "s.w.register_hook(lambda g: g * 2)",
    "s.w.register_hook(lambda g: s.memo.__setitem__('g', g.detach().clone()))",
    "s.w.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))",
    "s.net.register_forward_hook(lambda m, a, out: out * 0.5)",
    "s.net.register_forward_pre_hook(lambda m, a: (a[0] + 1,))",
    "s.net.register_full_backward_hook(lambda m, gi, go: tuple(g * 2 if g is not None else None for g in gi))",
    "s.opt.register_step_pre_hook(lambda *a: s.scalar.add_(1))",
    "next(s.net.parameters()).requires_grad_(False)",
    "s.v.register_hook(lambda g: g.clamp(-1, 1))",
    "s.net.eval()",
    "s.w.grad = torch.ones(3, 4)",
    "s.buf = s.wide[:3]",
    "s.alias = s.buf.view(-1)[::2]",
    "s.net.extra = s.w",
    "s.net.register_buffer('seen', torch.zeros(()))",
]

# How a step is called: positional and keyword arguments of call k, n = number of rows.
ARGUMENTS = [
    "(torch.randn(n, 4), {'ids': torch.arange(n) % 5}), {}",
    "(torch.randn(n, 4), {'ids': torch.arange(n) % 5, 'more': [torch.ones(n, 1), (torch.rand(4),)]}), {'scale': 0.25}",
    "(torch.randn(n, 4), {'ids': torch.arange(n) % 5}), {'flag': k != 1}",
    "(torch.randn(n, 4, requires_grad=True), {'ids': torch.arange(n) % 5}), {'scale': 0.5, 'flag': True}",
    "(torch.randn(4, n).t(), {'ids': torch.randint(5, (n, 2))[:, 1]}), {}",
]
ROWS = [[3, 3], [3, 5], [3, 3, 3], [3, 5, 3], [4, 2, 6, 2], [2, 3, 4, 5], [1, 3, 1], [3, 0, 2], [2, 2, 1]]
BETWEEN = [
    "pass",
    "s.sched.step()",
    "s.opt.zero_grad(set_to_none=<flag>)",
    "s.count += 1",
    "s.flag = not s.flag",
    "s.scale += 0.25",
    "s.net.train(not s.net.training)",
    "s.opt.param_groups[0]['lr'] *= 0.5",
    "s.w.data.mul_(0.5)",
    "s.w.grad = None",
    "s.buf = s.buf.clone()",
    "s.buf.add_(1)",
    "s.v.requires_grad_(k % 2 == 0)",
    "s.memo.clear()",
    "s.opt.load_state_dict(s.opt.state_dict())",
    "s.net.load_state_dict({k: v * 0.5 for k, v in s.net.state_dict().items()})",
    "torch.rand(1), random.random(), np.random.rand()",
    "s.w.data = torch.ones(3, 4) * k",
    "s.name += 'b'",
    "s.history[1] = out",
    "s.nested['b'] = torch.ones(k + 1)",
]

# What a hole may be filled with: entries with two spaces between them.
_CHOICES = {
    "flag": "False  True",
    "params": (
        "[*s.net.parameters(), s.w, s.v]  "
        "[{'params': s.net.parameters()}, {'params': [s.w, s.v], 'lr': 0.05, 'weight_decay': 0.1}]  "
        "[s.w, s.v]  [*s.net.parameters(), *s.table.parameters(), s.w]"
    ),
    "padding": "None  1",
    "num": "2  0.5  -1.5  0.0  -0.0  1e-3  math.inf  math.nan  True  3",
    "small": "1  0  2  -1  3  -2",
    "dim": "0  -1  1  -2",
    "dtype": "torch.float32  torch.float64  torch.bfloat16  torch.int64  torch.bool",
    "float_dtype": "torch.float32  torch.bfloat16  torch.float64",
    "unary": (
        "abs  exp  tanh  sin  cos  neg  relu  sigmoid  sqrt  rsqrt  log1p  floor  round  sign  square  "
        "reciprocal  erf  expm1  trunc  frac  isnan  isinf  signbit  logical_not  sinh  atan  asin  logit  "
        "exp2  deg2rad  nan_to_num  positive"
    ),
    "functional": (
        "gelu  silu  softplus  elu  leaky_relu  hardtanh  hardswish  mish  selu  logsigmoid  softsign  "
        "tanhshrink  relu6  celu"
    ),
    "binary": (
        "add  sub  mul  div  maximum  minimum  atan2  fmod  remainder  pow  hypot  copysign  fmax  fmin  "
        "logaddexp  eq  lt  ge  ne  floor_divide  true_divide  nextafter  xlogy  logical_and  logical_or  "
        "heaviside"
    ),
    "operator": "+  *  -  /  //  %  **  <  ==  !=  >=",
    "bitwise": "&  |  ^",
    "inplace": "add_  mul_  sub_  div_  copy_  pow_  clamp_min_  fmod_  eq_  logical_and_  atan2_",
    "inplace_unary": (
        "neg_  exp_  tanh_  zero_  abs_  relu_  sigmoid_  square_  round_  floor_  t_  squeeze_  detach_  "
        "nan_to_num_  sign_"
    ),
    "reduction": "sum  mean  amax  amin  std  var  norm  argmax  argmin  all  any  nansum  logsumexp  median",
    "along": "sum  mean  amax  amin  softmax  log_softmax  cumsum  argmax  logsumexp  all  any  std  argsort",
    "fill_draw": "uniform_()  normal_()  bernoulli_(0.5)  random_(5)  exponential_()  cauchy_()",
    "reduce": "'sum'  'amax'  'mean'  'prod'",
    "slices": (
        "[1:]  [::2]  [:-1]  [..., 1:3]  [-1]  [0]  [None]  [:, 0]  [..., -1]  [1:1]  [:, ::3]  [-2:, None]  "
        "[...]  [:2, 1]  [0, 1]"
    ),
    "view": (
        ".t()  .transpose(0, -1)  .view(-1)  .reshape(-1, 2)  .unsqueeze(0)  .squeeze()  .flatten()  "
        ".unfold(-1, 2, 1)  .expand(2, *<v>.shape)  .diagonal()  .detach()  .as_strided((2, 2), (1, 2))  "
        ".contiguous()  .movedim(0, -1)  .swapaxes(0, -1)  .narrow(0, 0, 1)  .unbind(0)[-1]  "
        ".split(2, -1)[-1]  .chunk(2)[0]  .permute(*range(<v>.dim())[::-1])  .view_as(<v>)  .select(-1, 0)  "
        ".view(torch.int32)  .T  .mT  .unflatten(-1, (2, -1))  .data  .ravel()  .alias_()  .clone()"
    ),
    "python": (
        "s.scale  s.count  len(s.queue)  len(s.memo)  scale  <t>.shape[0]  <t>.numel()  <t>.dim()  "
        "<t>.size(-1)  int(flag)  len(s.name)  x.shape[0] // 2  x.shape[0] + 1  max(x.shape)  math.sqrt(4)  "
        "<t>.element_size()  <t>.stride(0)  len(<t>)  s.opt.param_groups[0]['lr']  <t>.shape[0] / 3  "
        "min(<t>.shape[0], 4)"
    ),
    "item": (
        "<x>.sum().item()  <i>.max().item()  float(<x>.mean())  int(<i>.sum())  <x>.flatten()[0].item()  "
        "s.scalar.item()  bool((<x> < math.inf).all())  <i>.tolist()[0]  (<t> != 0).sum().item()"
    ),
    "grad_mode": "torch.no_grad()  torch.enable_grad()  torch.set_grad_enabled(s.flag)",
    "condition": (
        "s.flag  flag  x.shape[0] > 2  s.count % 2 == 0  s.net.training  s.scale < 0.75  <t>.requires_grad  "
        "s.w.grad is not None  <t>.dim() == 2  isinstance(batch, dict)  len(s.name) < 3  'g' not in s.memo  "
        "<t>.is_contiguous()  <t>.numel()  s.nested['b'] is None"
    ),
    "loss": (
        "<r>.float().pow(2).mean()  <r>.float().sum()  (<r>.float() * scale).sum()  <r>.float().abs().mean()  "
        "F.mse_loss(<r>.float(), torch.zeros_like(<r>).float())  <r>.float().sigmoid().sum() / <r>.shape[0]  "
        "<r>.float().logsumexp(-1).sum()"
    ),
}
CHOICES: dict[str, list[str]] = {
    "net": NETS,
    "optimizer": OPTIMIZERS,
    **{name: entries.split("  ") for name, entries in _CHOICES.items()},
}

# What binds a name to a new value, each with its weight.
VALUES: dict[str, tuple[str, int]] = {
    "unary": ("torch.<unary>(<t>)", 4),
    "functional": ("F.<functional>(<x>)", 2),
    "binary": ("torch.<binary>(<x>, <y>)", 4),
    "mixed": ("torch.<binary>(<t>, <u>)", 2),
    "operator": ("<x> <operator> <y>", 4),
    "with number": ("<t> <operator> <num>", 4),
    "number first": ("<num> <operator> <x>", 2),
    "with Python value": ("<x> * <s>", 3),
    "Python arithmetic": ("<s> * 2 + 1", 2),
    "bits": ("<b> <bitwise> <c>", 1),
    "not": ("~<b>", 1),
    "reduce all": ("<x>.<reduction>()", 3),
    "reduce dim": ("<x>.<along>(<dim>)", 4),
    "keepdim": ("<x>.sum(<dim>, keepdim=True, dtype=<float_dtype>)", 1),
    "sort": ("<x>.sort(<dim>)[<flag>]", 1),
    "topk": ("<x>.topk(1, <dim>)[<flag>]", 1),
    "max of dim": ("<x>.max(<dim>).values", 1),
    "matmul": ("<x> @ <y>", 4),
    "matmul transposed": ("<x> @ <y>.mT", 3),
    "einsum": ("torch.einsum('...i,ji->...j', <x>, <y>)", 1),
    "bmm": ("torch.bmm(<x>[None], <y>[None])", 1),
    "addmm": ("torch.addmm(<v1>, <x>, <y>, beta=<num>)", 1),
    "linear": ("F.linear(<x>, s.w, None)", 2),
    "net": ("s.net(<x>)", 6),
    "table": ("s.table(<i> % 5)", 3),
    "layer norm": ("F.layer_norm(<x>, <x>.shape[-1:])", 2),
    "rms norm": ("F.rms_norm(<x>, <x>.shape[-1:], eps=1e-5)", 1),
    "normalize": ("F.normalize(<x>, dim=<dim>)", 1),
    "attention": ("F.scaled_dot_product_attention(<x>[None], <x>[None], <x>[None], is_causal=<flag>)", 1),
    "cross entropy": ("F.cross_entropy(<x>, <i> % 2)", 1),
    "one hot": ("F.one_hot(<i> % 5, 5)", 1),
    "view": ("<v><view>", 10),
    "slice": ("<v><slices>", 6),
    "cast": ("<t>.to(<dtype>)", 4),
    "index": ("<x>[<i> % <x>.shape[0]]", 2),
    "index column": ("<x>[:, <i> % <x>.shape[1]]", 1),
    "index pair": ("<x>[<i> % <x>.shape[0], 0]", 1),
    "mask": ("<x>[<x> > 0]", 1),
    "where": ("torch.where(<b>, <x>, <num>)", 2),
    "where tensors": ("torch.where(<x> > 0, <x>, <y>)", 2),
    "masked fill": ("<x>.masked_fill(<b>, <num>)", 2),
    "gather": ("<x>.gather(0, (<x> > 0).long() % max(<x>.shape[0], 1))", 1),
    "index select": ("<x>.index_select(0, <i> % <x>.shape[0])", 1),
    "scatter": ("<x>.scatter(0, torch.zeros_like(<x>, dtype=torch.int64), <num>)", 1),
    "index add": ("<x>.index_add(0, <i> % <x>.shape[0], <y>, alpha=<num>)", 1),
    "cat": ("torch.cat([<x>, <y>], <dim>)", 3),
    "stack": ("torch.stack([<x>, <x> * <num>], <dim>)", 2),
    "pad": ("F.pad(<x>, (<small>, 1), value=<num>)", 1),
    "roll": ("<v>.roll(<small>, 0)", 1),
    "flip": ("<v>.flip(0)", 1),
    "repeat": ("<v>.repeat(2, *[1] * (<v>.dim() - 1))", 1),
    "tril": ("<x>.tril(<small>)", 1),
    "clamp": ("<x>.clamp(<num>, <num>)", 1),
    "lerp": ("torch.lerp(<x>, <y>, <num>)", 1),
    "addcmul": ("torch.addcmul(<x>, <x>, <y>, value=<num>)", 1),
    "full": ("torch.full((<t>.shape[0], 4), <num>)", 2),
    "full of item": ("torch.full((2,), <s>)", 1),
    "arange": ("torch.arange(<t>.shape[0])", 2),
    "zeros like": ("torch.zeros_like(<t>)", 2),
    "new ones": ("<t>.new_ones(<t>.shape)", 1),
    "tensor": ("torch.tensor([<num>, <num>, 1.0, 2.0])", 2),
    "tensor of value": ("torch.tensor(<s>)", 1),
    "out": ("torch.add(<x>, <y>, out=torch.zeros_like(<x>))", 1),
    "dropout": ("F.dropout(<x>, 0.5, training=s.net.training)", 3),
    "rand": ("torch.rand(<t>.shape[0], 4)", 2),
    "randn of generator": ("torch.randn(3, 4, generator=s.generator)", 1),
    "randperm": ("torch.randperm(<t>.shape[0])", 1),
    "randint": ("torch.randint(5, (<t>.shape[0],))", 1),
    "rand like": ("torch.rand_like(<x>)", 1),
    "bernoulli": ("torch.bernoulli(<x>.sigmoid())", 1),
    "multinomial": ("torch.multinomial(torch.ones(4), 2)", 1),
    "item": ("<item>", 4),
    "Python value": ("<python>", 4),
    "sized by value": ("torch.zeros(abs(int(<s>)) % 4 + 1)", 1),
    "sliced by value": ("<v>[: int(<s>)]", 1),
    "conditional": ("<x> if <condition> else <y>", 1),
    "of state": ("s.nested['a'][1][0] + s.nested['a'][0]", 1),
    "of queue": ("s.queue[<flag>]", 1),
    "of memo": ("sum(s.memo.values(), 0.0)", 1),
    "comprehension": ("sum(t.sum() for t in [<x>, <y>])", 1),
    "lambda": ("(lambda a, b=<y>: a * b)(<x>)", 1),
    "partial": ("functools.partial(torch.mul, <x>)(<y>)", 1),
    "closure": ("helper(<x>, k=<num>)", 2),
    "checkpoint": ("checkpoint(lambda a: torch.tanh(a @ s.w.mT), <x>, use_reentrant=False)", 2),
    "checkpointed net": ("checkpoint(s.net, <x>, use_reentrant=<flag>)", 1),
    "grad": ("torch.autograd.grad((<r> * <r>).sum(), <r>)[0]", 2),
    "double backward": ("torch.autograd.grad(<r>.tanh().sum(), <r>, create_graph=True)[0]", 2),
    "grads of parameters": ("torch.autograd.grad(<loss>, [s.w], allow_unused=True)[0]", 1),
    "vmap": ("torch.func.vmap(torch.sin)(<x>)", 1),
    "func grad": ("torch.func.grad(lambda a: a.sin().sum())(<x>)", 1),
    "functional call": ("torch.func.functional_call(s.net, {}, (<x>,))", 1),
    "own function": ("Scaled.apply(<x>)", 1),
    "parameter's grad": ("(s.w if s.w.grad is None else s.w.grad) * 1", 1),
    "norm of grads": ("torch.nn.utils.clip_grad_norm_([s.w, s.v], 1.0)", 1),
    "requires grad": ("<x>.detach().requires_grad_()", 2),
    "nested in": ("batch['ids'] + 1", 1),
    "Python random": ("random.random()", 1),
    "Random object": ("s.rng.uniform(0, 1)", 1),
    "numpy random": ("float(np.random.rand())", 1),
    "numpy Generator": ("float(s.np_rng.random())", 1),
    "maximum of Python": ("max(<s>, 2)", 1),
    "to list": ("[<x>, <y>][int(s.flag)]", 1),
    "bincount": ("torch.bincount(<i> % 5, minlength=5)", 1),
    "unique": ("torch.unique(<i>)", 1),
    "nonzero": ("<b>.nonzero()", 1),
    "cdist": ("torch.cdist(<x>, <y>)", 1),
    "conv": ("F.conv1d(<x>[None], s.w[None])", 1),
    "pool": ("F.max_pool1d(<x>[None], 2)", 1),
    "interpolate": ("F.interpolate(<x>[None], scale_factor=2)", 1),
    "outer": ("torch.outer(<x>.flatten()[:3], <y>.flatten()[:2])", 1),
    "searchsorted": ("torch.searchsorted(s.v.detach().sort().values, <x>.detach())", 1),
    "straight through": ("<x> + (<x>.round() - <x>).detach()", 1),
    "bool to float": ("<b>.float().mean()", 1),
    "complex": ("torch.fft.rfft(<x>).abs()", 1),
}

# What changes something, each with its weight.
STATEMENTS: dict[str, tuple[str, int]] = {
    "in place": ("<v>.<inplace>(<u>)", 6),
    "in place number": ("<v>.<inplace>(<num>)", 4),
    "in place Python value": ("<v>.add_(<s>)", 2),
    "in place unary": ("<v>.<inplace_unary>()", 4),
    "augmented": ("<name> += <num>", 2),
    "assign slice": ("<v><slices> = <num>", 3),
    "assign slice of tensor": ("<v><slices> = <t>", 2),
    "in place of slice": ("<v><slices>.<inplace>(<num>)", 3),
    "in place of view": ("<v><view>.<inplace>(<num>)", 3),
    "index put": ("<v>[<i> % <v>.shape[0]] = <num>", 2),
    "mask put": ("<v>[<v> > 0] = <num>", 2),
    "index add_": ("<v>.index_add_(0, <i> % <v>.shape[0], <v>[<i> % <v>.shape[0]] * 1)", 1),
    "index put accumulate": ("<v>.index_put_((<i> % <v>.shape[0],), <v>[0].clone(), accumulate=<flag>)", 1),
    "masked fill_": ("<v>.masked_fill_(<b>, <num>)", 2),
    "scatter_": ("<v>.scatter_(0, torch.zeros_like(<v>, dtype=torch.int64), <num>)", 1),
    "scatter reduce": (
        "<v>.scatter_reduce_(0, torch.zeros_like(<v>, dtype=torch.int64), <v> * 2, <reduce>, include_self=<flag>)",
        1,
    ),
    "out given": ("torch.mul(<x>, <num>, out=<v>)", 1),
    "fill draw": ("<v>.<fill_draw>", 2),
    "fill draw of generator": ("<v>.normal_(generator=s.generator)", 1),
    "foreach": ("torch._foreach_mul_([<v>, s.buf], <num>)", 1),
    "rebind": ("<name> = <x> * <num>", 2),
    "swap": ("<name>, <name2> = <name2>, <name>", 1),
    "delete": ("del <name>", 1),
    "state buffer": ("s.buf = <x>.detach()", 2),
    "state in place": ("s.buf.mul_(0.9).add_(s.w.detach(), alpha=0.1)", 2),
    "state scalar": ("s.scalar.add_(<num>)", 2),
    "memo": ("s.memo['new'] = <x>.detach()", 2),
    "nested state": ("s.nested['a'][1] = (<x>.detach(), 2)", 1),
    "history": ("s.history[0] = <x>.detach().sum()", 1),
    "queue": ("s.queue.append(<x>.detach().sum())", 1),
    "log": ("s.log.append(<x>.detach())", 1),
    "counter": ("s.count += 1", 1),
    "flag": ("s.flag = not s.flag", 1),
    "name": ("s.name = 'c'", 1),
    "pop": ("s.memo.pop('old', None)", 1),
    "backward": ("<loss>.backward()", 6),
    "backward retained": ("<loss>.backward(retain_graph=True)", 2),
    "backward of inputs": ("<loss>.backward(inputs=[s.w])", 1),
    "hook": ("<r>.register_hook(lambda g: g * 3)", 2),
    "hook on state": ("<r>.register_hook(lambda g: s.memo.__setitem__('seen', g.detach() + 0))", 1),
    "retain grad": ("<r>.retain_grad()", 1),
    "optimizer step": ("s.opt.step()", 5),
    "zero grad": ("s.opt.zero_grad(set_to_none=<flag>)", 4),
    "set grad none": ("s.w.grad = None", 1),
    "assign grad": ("s.w.grad = torch.ones_like(s.w)", 1),
    "scale grad": ("[p.grad.mul_(0.5) for p in (s.w, s.v) if p.grad is not None]", 1),
    "clip value": ("torch.nn.utils.clip_grad_value_([s.w, s.v], 0.5)", 1),
    "clip norm": ("torch.nn.utils.clip_grad_norm_(s.net.parameters(), 0.5)", 1),
    "data": ("s.w.data.mul_(0.9)", 1),
    "data assigned": ("s.v.data = s.v.data * 2", 1),
    "copy to parameter": ("s.w.detach().copy_(<x>)", 1),
    "update by hand": ("s.v.data -= 0.1", 1),
    "argument in place": ("x.detach().mul_(0.5)", 1),
    "argument's entry": ("batch['ids'].add_(1)", 1),
    "manual seed": ("torch.manual_seed(5)", 1),
    "generator seed": ("s.generator.manual_seed(4)", 1),
    "requires grad_": ("s.v.requires_grad_(s.v.requires_grad)", 1),
    "train": ("s.net.train()", 1),
    "lr": ("s.opt.param_groups[0]['lr'] = 0.05", 1),
    "scheduler": ("s.sched.step()", 1),
    "assertion": ("assert <t>.shape[0] >= 0", 1),
    "shuffle": ("random.shuffle([1, 2, 3])", 1),
}

# Headers of blocks. Names bound under `if` are not used after it.
BLOCKS: dict[str, tuple[str, int]] = {
    "grad mode": ("with <grad_mode>:", 3),
    "autocast": ("with torch.autocast('cpu', dtype=torch.bfloat16, enabled=<flag>):", 2),
    "if": ("if <condition>:", 4),
    "for": ("for _ in range(2):", 2),
    "for size": ("for _ in range(min(x.shape[0], 3)):", 1),
    "for rows": ("for row in <x>.unbind(0)[:2]:", 1),
    "for count": ("for _ in range(s.count % 2 + 1):", 1),
    "try": ("with contextlib.suppress(ZeroDivisionError):", 1),
    "fork": ("with torch.random.fork_rng(devices=[]):", 1),
    "saved on CPU": ("with torch.autograd.graph.save_on_cpu():", 1),
    "names of parameters": ("for name, p in s.net.named_parameters():", 1),
}

RETURNS = [
    "<t>",
    "{'loss': <t>, 'more': [<t2>, {'k': 3}]}",
    "(<t>, [<t2>, None], 'text')",
    "Pair(<t>, <t2>)",
    "<t>, <s>",
    "<t>, <t>",
    "None",
    "[<t>, <v>, s.buf]",
    "<x>.sum().item()",
    "<t>, x.shape",
    "<v>.detach()[:1], <t2>",
]

HELPER = """\
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * 2

    @staticmethod
    def backward(ctx, g):
        (a,) = ctx.saved_tensors
        return g * 2 + a.detach() * 0


"""

_STATE_TENSORS = ["s.w", "s.v", "s.buf", "s.wide", "s.ints", "s.half", "s.double", "s.scalar", "s.odd", "s.empty"]
_STATE_TENSORS += ["s.leaf", "batch['ids']", "x"]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 1e6


# What a hole may be filled with. The values that are named last come first.
_KINDS: dict[str, Callable[[Any], bool]] = {
    "t": lambda v: isinstance(v, torch.Tensor),
    "x": _is_float,
    "i": lambda v: isinstance(v, torch.Tensor) and v.dtype is torch.int64 and v.dim() == 1,
    "b": lambda v: isinstance(v, torch.Tensor) and v.dtype is torch.bool,
    "r": lambda v: _is_float(v) and v.requires_grad,
    "v": lambda v: isinstance(v, torch.Tensor) and v.dim() > 0,
    "s": _is_number,
}
_ALIASES = {"y": "x", "u": "t", "c": "b", "t2": "t", "v1": "x"}
_HOLE = re.compile(r"<(\w+)>")

TABLES = {"value": VALUES, "statement": STATEMENTS, "block": BLOCKS}
_WEIGHTED = [
    (table, name)
    for table, rows in TABLES.items()
    for name, (_, weight) in rows.items()
    for _ in range(weight * (1 if table == "block" else 2))
]
_MOST_ELEMENTS = 600


@dataclass(frozen=True)
class Instruction:
    """One line to be: a construct, and numbers that choose what fills its holes."""

    table: str
    name: str
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """The numbers that decide a program.

    Attributes:
        state: choices within the expressions of ``STATE``.
        setup, between: rows of ``SETUP`` and ``BETWEEN`` with numbers for their holes.
        calls: row of ``ARGUMENTS`` and of ``ROWS``.
        body: the lines of the step.
        ending: whether the usual backward, step and zero_grad follow, and numbers for the row of ``RETURNS``.
    """

    state: tuple[int, ...]
    setup: tuple[tuple[int, int], ...]
    between: tuple[tuple[int, int], ...]
    calls: tuple[int, int]
    body: tuple[Instruction, ...]
    ending: tuple[int, ...]


def draw_plan(seed: str, most_lines: int = 12, rows: int = len(ROWS)) -> Plan:
    """The plan of one program, the same for the same seed.

    Args:
        most_lines: in the step.
        rows: its calls have one of the first so many of ``ROWS``.
    """
    rng = random.Random(seed)
    numbers = lambda: tuple(rng.randrange(16) for _ in range(5))
    pairs = lambda table: tuple((rng.randrange(len(table)), rng.randrange(16)) for _ in range(rng.randrange(3)))
    return Plan(
        state=tuple(rng.randrange(32) for _ in range(4)),
        setup=pairs(SETUP),
        between=pairs(BETWEEN),
        calls=(rng.randrange(len(ARGUMENTS)), rng.randrange(rows)),
        body=tuple(Instruction(*rng.choice(_WEIGHTED), numbers()) for _ in range(rng.randint(1, most_lines))),
        ending=numbers(),
    )


def write(plan: Plan) -> str:
    """The program's text. The same plan gives the same text."""
    return _Writer(plan).text


@functools.cache
def _imported() -> dict[str, Any]:
    """The names that a program imports and defines at its top."""
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(PRELUDE + HELPER, namespace)
    return namespace


class _Writer:
    """Writes one program, running each line as it goes."""

    def __init__(self, plan: Plan) -> None:
        self.namespace: dict[str, Any] = dict(_imported())
        self.locals: list[str] = []
        self.count = 0
        self.lines: list[str] = []
        exec("def helper(a, *, k=2):\n    return a * k + s.scale", self.namespace)
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            self._write(plan)

    def _write(self, plan: Plan) -> None:
        state = self._state(plan)
        setup = [line for row, number in plan.setup if (line := self._run(SETUP[row], [number]))]
        rows, arguments = ROWS[plan.calls[1]], ARGUMENTS[plan.calls[0]]
        self.namespace.update(n=rows[0], k=0)
        (x, batch), options = eval(arguments, self.namespace)
        self.namespace.update({"x": x, "batch": batch, "scale": 0.5, "flag": True, **options})
        with contextlib.ExitStack() as blocks:
            self._body(plan.body, blocks)
        returned = self._ending(plan.ending)
        self.namespace["out"] = None
        between = [line for row, number in plan.between if (line := self._run(BETWEEN[row], [number]))]
        step = "\n".join("        " + line for line in [*self.lines, f"return {returned}"])
        rest = "\n".join([*setup, *between, step])
        helper = "    def helper(a, *, k=2):\n        return a * k + s.scale\n\n" if "helper(" in rest else ""
        uses = set(re.findall(r"\bs\.(\w+)", rest + helper + arguments))
        uses |= {"net", "w", "v"} & set(re.findall(r"\bs\.(\w+)", state["opt"])) if uses & {"opt", "sched"} else set()
        uses |= {"table"} if "s.table" in state["opt"] and uses & {"opt", "sched"} else set()
        uses |= {"opt"} if "sched" in uses else set()
        made = "".join(f"    s.{name} = {text}\n" for name, text in state.items() if name in uses)
        self.text = (
            f"{PRELUDE}\n\n{HELPER if 'Scaled' in rest else ''}ROWS = {rows}\n\n\n"
            f"def make():\n    s = State()\n{made}{''.join(f'    {line}' + chr(10) for line in setup)}\n{helper}"
            f"    def step(x, batch, scale=0.5, *, flag=True):\n{step}\n\n    return s, step\n\n\n"
            f"def call(k):\n    n = ROWS[k]\n    return {arguments}\n\n\n"
            f"def between(k, s, out):\n{''.join(f'    {line}' + chr(10) for line in between) or '    pass' + chr(10)}"
        )

    def _state(self, plan: Plan) -> dict[str, str]:
        numbers = list(plan.state)
        exec("s = State()", self.namespace)
        made = {}
        for name, text in STATE.items():
            filled = self._fill(text, numbers)
            exec(f"s.{name} = {filled}", self.namespace)
            made[name] = filled
        return made

    def _body(self, body: tuple[Instruction, ...], blocks: contextlib.ExitStack) -> None:
        depth = 0
        ends: list[tuple[int, list[str] | None]] = []
        for at, instruction in enumerate(body):
            while ends and at >= ends[-1][0]:
                depth = self._close(ends, depth, blocks)
            text = TABLES[instruction.table][instruction.name][0]
            indent = "    " * depth
            if instruction.table == "block":
                header = self._open(self._fill(text, list(instruction.numbers)), blocks)
                if header is not None:
                    self.lines.append(indent + header)
                    kept = None if header.startswith("with ") else list(self.locals)
                    ends.append((at + 2 + instruction.numbers[-1] % 3, kept))
                    depth += 1
                continue
            if instruction.table == "value":
                text = f"v{self.count} = {text}"
            line = self._run(text, list(instruction.numbers))
            if line is not None:
                self.lines.append(indent + line)
        while ends:
            depth = self._close(ends, depth, blocks)

    def _open(self, header: str | None, blocks: contextlib.ExitStack) -> str | None:
        """Enter a block where the lines are tried; None where its header cannot be run."""
        try:
            if header is None:
                return None
            if header.startswith("with "):
                blocks.enter_context(eval(header[5:-1], self.namespace))
                return header
            if header.startswith("for "):
                name, values = re.fullmatch(r"for (.*) in (.*):", header).groups()  # type: ignore[union-attr]
                exec(f"{name} = next(iter({values}))", self.namespace)
                self.locals += [n for n in name.split(", ") if n in ("row", "p")]
            else:
                eval(header[3:-1], self.namespace)
        except Exception:  # noqa: BLE001 - any error means that the line is left out
            return None
        return header

    def _close(self, ends: list[tuple[int, list[str] | None]], depth: int, blocks: contextlib.ExitStack) -> int:
        _, names = ends.pop()
        if names is None:
            contexts = blocks.pop_all()._exit_callbacks  # only the innermost one is left now
            *outer, (_, leave) = contexts
            leave(None, None, None)
            blocks._exit_callbacks.extend(outer)
        else:
            self.locals = names
        if self.lines[-1].rstrip().endswith(":"):
            self.lines.append("    " * depth + "pass")
        return depth - 1

    def _run(self, text: str, numbers: list[int]) -> str | None:
        """Fill the holes and run the line; None where that fails."""
        line = self._fill(text, numbers)
        if line is None:
            return None
        try:
            exec(line, self.namespace)
            if text.startswith("v") and text.split(" ")[0] == f"v{self.count}":
                value = self.namespace[f"v{self.count}"]
                if not _is_small(value):
                    return None
                self.locals.append(f"v{self.count}")
                self.count += 1
            elif line.startswith("del "):
                self.locals.remove(line[4:])
        except Exception:  # noqa: BLE001
            return None
        return line

    def _ending(self, numbers: tuple[int, ...]) -> str:
        if numbers[0] % 4:
            self.lines += [
                line
                for text in ("<loss>.backward()", "s.opt.step()", "s.opt.zero_grad()")[: 1 + numbers[0] % 3]
                if (line := self._run(text, list(numbers[1:])))
            ]
        for row in (numbers[1] + numbers[4], 0):
            returned = self._fill(RETURNS[row % len(RETURNS)], list(numbers[2:]))
            with contextlib.suppress(Exception):
                eval(returned or "missing", self.namespace)
                return returned or "None"
        return "None"

    def _fill(self, text: str, numbers: list[int]) -> str | None:
        """The text with its holes filled; equal holes alike. None where nothing fits."""
        filled: dict[str, str] = {}
        while (hole := _HOLE.search(text)) is not None:
            name = hole.group(1)
            if name not in filled:
                number = numbers.pop(0) if numbers else 0
                choices = CHOICES.get(name) or self._candidates(name)
                if not choices:
                    return None
                filled[name] = choices[number % len(choices)]
            text = text[: hole.start()] + filled[name] + text[hole.end() :]
        return text

    def _candidates(self, kind: str) -> list[str]:
        if kind in ("name", "name2"):
            return self.locals[::-1]
        fits = _KINDS[_ALIASES.get(kind, kind)]
        names = [*self.locals[::-1], *(_STATE_TENSORS if kind != "s" else ["s.scale", "scale", "s.count"])]
        found = []
        for name in names:
            with contextlib.suppress(Exception):
                if fits(eval(name, self.namespace)):
                    found.append(name)
        return found


def _is_small(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() <= _MOST_ELEMENTS and value.dim() < 6
    return isinstance(value, (int, float, bool, tuple, list))
