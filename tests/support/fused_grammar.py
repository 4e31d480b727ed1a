"""Grammar of random programs on the logits of an LM head; see ``fused_programs``.

A table has one option per line or between two ``||``. ``$x`` is a tensor, ``$s`` its shape, ``$lead`` that without the
last dimension, ``$y`` ids and ``$m`` a mask of it, ``$i`` a leading dimension and ``$last`` its last index, ``$k`` a
small integer. :func:`write` runs every statement as it writes it, on the plain model, so that it knows what there is.

``python -m tests.support.fused_grammar --kind wild --seeds 0 1000 --shrink`` runs many and prints minimal programs.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from string import Template

import torch

from tests.support.fused_programs import SAYS_NOTHING, Program, Spec, V, World, bounds, check, lines_of, mended, shrunk


def table(text):
    return [option.strip() for line in text.strip().split("\n") for option in line.split(" || ")]


MOVES = table("""
$x.view(-1, V) || $x.reshape(-1, $x.size(-1)) || $x.flatten(0, -2) || $x[:, 1:] || $x[:, :-1] || $x[..., :, :] || $x[0]
$x[-1] || $x[..., 0, :] || $x[:, -1] || $x[$m] || $x[:, ::2] || $x[None] || $x[:, None] || $x.unsqueeze($i)
$x.squeeze() || $x.squeeze(0) || $x.expand(2, *$x.shape) || $x.transpose(0, 1) || $x.transpose(-2, -3)
$x.permute(*reversed(range($x.dim() - 1)), -1) || $x.contiguous() || $x.narrow($i, 0, $last) || $x.select($i, $last)
$x.split(2, dim=$i)[0] || $x.chunk(2, $i)[-1] || $x.unbind($i)[0] || list($x)[0] || torch.stack(list($x))
torch.stack([$x, $x], $i) || torch.cat([$x[:, :1], $x[:, :-1]], dim=1) || torch.cat([$x, $x], $i)
torch.cat(tensors=[$x, $x], dim=$i) || torch.cat(($x[:, 1:], $x[:, :1]), dim=1) || torch.stack(tensors=($x, $x), dim=0)
torch.concat([$x, $x]) || $x.index_select($i, torch.tensor([0, $last])) || $x[torch.tensor([0, -1])]
torch.index_select(input=$x, dim=$i, index=torch.tensor([0])) || $x[:, torch.tensor([0, 0])] || torch.roll($x, 1, $i)
$x.roll(shifts=1, dims=$i)
""")
OTHER_MOVES = table("""
$x.flip($i) || $x.repeat(2, *[1] * ($x.dim() - 1)) || $x.repeat_interleave(2, $i) || torch.movedim($x, 0, -2)
torch.swapaxes($x, 0, -2) || $x.view_as($x) || $x.reshape_as($x) || $x.unflatten(0, (1, -1))
torch.where($m[..., None], $x, $x * 0.5) || torch.where(condition=$m.unsqueeze(-1), input=$x, other=$x.roll(1, 0))
torch.masked_select($x, $m[..., None]).view(-1, V) || torch.gather($x, 0, torch.zeros($s, dtype=torch.long))
$x.mT.mT || $x.transpose(-1, -2).transpose(-1, -2) || torch.tensor_split($x, 2)[0] || $x.clone() || $x + 0
$x.detach() || torch.vstack([$x, $x]) || $x.unfold(0, 1, 1).squeeze(-1) || $x.diagonal(0, 0, 1).mT
$x.as_strided($x.size(), $x.stride()) || torch.nn.utils.rnn.pad_sequence([$x[0], $x[0, 1:]], batch_first=True)
torch.vmap(lambda r: r * 2)($x) || pytree.tree_map(lambda t: t * 2, {'a': $x})['a']
pytree.tree_map_only(torch.Tensor, lambda t: t[:1], [$x])[0] || torch.broadcast_tensors($x, $x)[0]
torch.index_put($x, (torch.tensor([0]),), torch.zeros(1).to($x.dtype)) || torch.atleast_3d($x)
torch.ravel($x).view($x.shape) || F.pad($x, (0, 0, 0, 1)) || F.dropout($x, 0.5, False) || nn.Identity()($x)
$x.squeeze(($i,)) || torch.ops.aten.slice($x, 0, 0, 1) || torch.ops.aten.view($x, [-1, V]) || doubled($x)
""")
CASTS = table("""
$x.float() || $x.double() || $x.to(torch.float32) || $x.type_as(hid) || $x.to(hid) || $x.to(dtype=torch.float64)
$x.to($x.device) || $x.to(torch.float32, copy=True) || $x.type(torch.float32) || $x / 0.7 || $x * 1.3 || 2 * $x
$x.div(0.5) || torch.mul($x, 1.0) || torch.div($x, other=0.7) || $x / torch.tensor(1.3) || $x * torch.tensor(0.7)
$x * -0.5 || -$x || $x.neg() || $x / fixed((B, 1, 1)).abs() || 1.7 * torch.tanh($x / 1.7) || torch.tanh($x / 30) * 30
$x.masked_fill(torch.arange(V) == 3, -1e4) || torch.where(torch.arange(V) != 3, $x, -5e5) || $x + 0.5 * $x
$x - $x.logsumexp(-1, keepdim=True) || $x - torch.logsumexp($x, -1)[..., None] || guided($x, 1.5) || guided($x, 0)
$x - 2 * $x.roll(1, 0) || torch.sub($x, $x, alpha=3) || torch.rsub($x, $x * 2) || 0.0 * $x || $x.mul(-1.5)
$x - $x.max(-1, keepdim=True).values.detach() || $x + 0.5 || $x - wts($lead)[..., None] || 8 * torch.sigmoid($x / 2)
$x + 0.3 * fixed((V,)).to($x.dtype) || $x.masked_fill(mask((V,), 1), -1e9) || $x - $x.exp().sum(-1, keepdim=True).log()
$x.div(2.0).tanh().mul(2.0) || torch.tanh($x * 1.25) * 0.8 || ($x / 2).tanh() * 2 / 1.3 || $x * wts($lead)[..., None]
""")
OTHER_CASTS = table("""
$x * base.mix.bias[0] || $x + base.mix.bias[1] || $x - $x.max(-1, keepdim=True).values || $x.clamp(-1, 1)
$x - $x.logsumexp(-1, keepdim=True) || $x + fixed($s) || $x.masked_fill(mask((V,), 1), -9.0)
torch.log_softmax($x, -1)
$x.log_softmax(dim=-1) || F.log_softmax($x, dim=-1, dtype=torch.float32) || $x.softmax(-1) || torch.nan_to_num($x)
$x.relu() || $x * 0 || $x ** 2 || $x @ fixed((V, V)).to($x.dtype) || $x.exp() || F.gelu($x) || $x % 3
torch.lerp($x, $x * 2, 0.3) || $x.addcmul($x, $x, value=0.1) || $x.cumsum(-1) || torch.add($x, $x, alpha=2)
torch.rsub($x, 1) || torch.logit(torch.sigmoid($x)) || ($x > 0).to($x.dtype) || torch.ops.aten.mul($x, 2.0)
""")
ROWS = table("""
F.cross_entropy($x.reshape(-1, V), $y.view(-1), reduction='none') || $x.logsumexp(-1)
F.cross_entropy($x.movedim(-1, 1), $y, reduction='none') || F.cross_entropy($x.transpose(1, -1), $y, reduction='none')
F.cross_entropy($x.flatten(0, -2), $y.flatten(), reduction='none').view($lead)
F.cross_entropy($x.movedim(-1, 1), $y.masked_fill($m, -100), reduction='none')
nn.CrossEntropyLoss(reduction='none')($x.movedim(-1, 1), $y)
F.cross_entropy(input=$x.permute(0, 2, 1), target=$y, ignore_index=3, reduction='none')
F.log_softmax($x, dim=-1).gather(-1, $y.unsqueeze(-1)).squeeze(-1) || $x.gather(-1, $y[..., None])[..., 0]
-$x.log_softmax(-1).gather(dim=-1, index=$y[..., None])[..., 0]
torch.gather(torch.log_softmax($x.float(), -1), -1, $y.unsqueeze(-1)).squeeze(-1)
-torch.gather(input=nn.LogSoftmax(-1)($x), dim=2, index=$y.unsqueeze(-1)).squeeze(2)
F.nll_loss(F.log_softmax($x, -1).flatten(0, -2), $y.flatten(), reduction='none')
F.nll_loss($x.log_softmax(-1).movedim(-1, 1), $y, reduction='none') || torch.logsumexp($x, dim=-1)
F.cross_entropy($x[..., :V - 2].movedim(-1, 1), $y.clamp(max=V - 3), reduction='none') || $x[..., 1:7].logsumexp(-1)
$x.narrow(-1, 2, 5).logsumexp(-1) || $x[..., 2:].log_softmax(-1).gather(-1, $y[..., None] % 5).squeeze(-1)
subs($x, $y, '$c').gather(-1, $y[..., None]).squeeze(-1) || -subs($x * 1, $y, '$c').gather(-1, $y[..., None])[..., 0]
-($x.softmax(-1) * $x.log_softmax(-1)).sum(-1) || (F.log_softmax($x, -1) * F.softmax($x, dim=-1)).sum(dim=-1)
-($x.log_softmax(-1).exp() * $x.log_softmax(-1)).sum(-1) || -$x.logsumexp(-1) || $x.logsumexp(-1) * 0.5 / 2
$x.sum(-1) || $x.mean(-1) || $x.masked_fill(torch.arange(V) == 3, -1e4).logsumexp(-1)
$x.softmax(-1).max(-1).values || $x.max(-1)[0] || torch.max($x.softmax(-1), dim=-1)[0].detach() || $x.amax(-1)
$x.topk(2).values.diff(dim=-1)[..., 0] || $x.softmax(-1).topk(2, -1)[0].sum(-1) || $x.exp().sum(-1).log()
-($x.softmax(-1) * $x.softmax(-1).log()).sum(-1) || torch.special.entr($x.softmax(-1)).sum(-1)
$x.log_softmax(-1).mean(-1) || $x.exp().sum(-1)
F.cross_entropy($x.movedim(-1, 1), $y, label_smoothing=0.1, reduction='none')
$x.gather(-1, $y[..., None]).squeeze(-1) - $x.logsumexp(-1) || torch.logsumexp(input=$x, dim=(-1,))
""")
OTHER_ROWS = table("""
F.log_softmax($x, -1).gather(-1, $y[..., None]).exp().squeeze(-1)
$x.softmax(-1).gather(-1, $y[..., None]).squeeze(-1)
$x.log_softmax(-1)[..., 2] || F.cross_entropy($x.movedim(-1, 1), $y, label_smoothing=0.1, reduction='none')
F.cross_entropy($x.movedim(-1, 1), $y, weight=wts((V,)).to($x.dtype) + 0.1, reduction='none')
F.cross_entropy($x, fixed($s).softmax(-1).to($x.dtype), reduction='none') || (-$x.log_softmax(-1) * fixed($s)).sum(-1)
torch.distributions.Categorical(logits=$x).log_prob($y) || torch.distributions.Categorical(logits=$x).entropy()
-($x.softmax(-1) * $x.log_softmax(-1)).sum(-1) || $x.max(-1).values || $x.max(dim=-1)[0] || $x[..., 4] || $x.mean(-1)
$x.topk(3).values.sum(-1) || $x.pow(2).sum(-1) || ($x.softmax(-1) @ base.body.weight.to($x.dtype)).sum(-1)
F.kl_div($x.log_softmax(-1), fixed($s).softmax(-1), reduction='none').sum(-1) || dllm.token_nll($x, $y).nll
dllm.row_stats($x, $y, entropy=True).entropy || dllm.row_stats($x, $y).log_probs || $x.norm(dim=-1)
torch.vmap(lambda r: r.logsumexp(-1))($x) || torch.stack([r.logsumexp(-1) for r in $x])
torch.vmap(lambda r, i: r.log_softmax(-1)[i])($x.flatten(0, -2), $y.flatten())
torch.stack([F.log_softmax(r, -1)[0] for r in $x.reshape(-1, V)])
torch.einsum('...v,...v->...', $x.log_softmax(-1), $x.softmax(-1))
$x.log_softmax(-1).take_along_dim($y[..., None], -1).squeeze(-1)
""")
OF_ROWS = table("""
$x * wts($s, $k) || wts($s, $k) * $x || $x * mask($s, $k) || $x * mask($s, $k).float() || $x / (wts($s, $k) + 0.5)
$x[mask($s, $k)] || $x / 3 || $x * 0.3 || -$x || $x.view(-1) || $x.reshape($s) || $x[:, 1:] || $x[..., :2] || $x[0]
$x.flatten() || $x.unsqueeze(-1) || $x.squeeze(-1) || $x * fixed((len($x),)).abs().view(-1, 1)
""")
OTHER_OF_ROWS = table("""
$x + 1 || $x * $x || torch.exp(-$x) || $x.clamp(min=0.5) || $x - $x.detach() || torch.exp($x - $x.detach())
$x.masked_fill(mask($s, $k), 0) || torch.where(mask($s, $k), $x, 0.0) || $x.sum(-1) || $x.sum(0) || $x.mean(dim=-1)
torch.where(condition=mask($s, $k), input=$x, other=torch.zeros_like($x)) || $x.sum(dim=-1, keepdim=True)
$x.cumsum(-1) || $x.float() || $x.double() || $x.detach() || $x.clone() || $x.transpose(0, -1) || $x.contiguous()
torch.stack([$x, $x * 2]) || torch.cat([$x, $x]) || torch.cat(tensors=($x, $x), dim=0) || $x.split(1)[0]
$x.unbind(0)[0] || $x * base.mix.bias[0] || $x * $x.detach() || $x.mul(wts($s, $k))
torch.mul(input=wts($s), other=$x)
$x.div(2.0) || torch.div($x, wts($s) + 1) || $x * (mask($s) / 0.7) || torch.where(mask($s), $x / 0.3, $x) || $x.pow(2)
torch.nan_to_num($x) || $x.sort(-1).values || $x.expand(2, *$x.shape) || torch.min($x, $x * 0.9) || F.relu($x)
$x.index_select(0, torch.tensor([0])) || $x.abs() || torch.vmap(lambda r: r * 2)($x) || $x.roll(1, 0) || $x.flip(0)
torch.where(mask($s, $k), wts($s), $x) || torch.where(mask($s), $x, $x * 0.5) || $x.masked_fill(mask($s, $k), 1.5)
torch.nan_to_num($x * wts($s, $k)) || $x + wts($s, $k) * $x || $x - wts($s) || 1 - $x || torch.add($x, $x, alpha=-0.5)
torch.dot($x.flatten(), wts(($x.numel(),)).to($x.dtype)) || $x.sum(0, keepdim=True) || $x.mean((0, -1)) || $x.mT
torch.einsum('...,...->...', $x, wts($s).to($x.dtype)) || torch.einsum('ab,b->a', $x, wts(($last + 1,)).to($x.dtype))
torch.einsum('ab,ab->ba', $x, wts($s).to($x.dtype)) || $x @ wts(($x.shape[-1],)).to($x.dtype) || $x.ravel()
pytree.tree_map(torch.neg, ($x,))[0] || $x.new_tensor(2) * $x || $x @ wts(($last + 1, 3)).to($x.dtype) || doubled($x)
""")
OF_TWO = table("""
$x + $o * 0.5 || $x * $o || $x - $o || torch.stack([$x, $o.to($x.dtype)]) || torch.where($x.detach() > 0, $x, $o)
torch.lerp($x, $o.to($x.dtype), 0.3) || torch.exp((-($x - $o).abs()).clamp(max=2)) || torch.maximum($x, $o)
torch.cat([$x, $o]) || ($x + $o) / 2
""")
SUMS = table("""
$x.sum() || $x.mean() || ($x * wts($s, $k)).sum() / 7 || $x.sum() / 2.5 || torch.sum($x) || torch.mean($x)
$x.sum(dim=tuple(range($x.dim()))) || $x.pow(2).mean() || $x.sum(-1).mean() || $x[mask($s, $k)].mean()
($x * mask($s, $k)).sum() / mask($s, $k).sum() || (wts($s) * $x).mean() || $x.max() || $x.float().sum()
$x.logsumexp(tuple(range($x.dim()))) || $x.mean(dtype=torch.float64) || torch.stack([v.sum() for v in $x]).sum()
torch.exp(-$x).mean()
""")
LOSSES = table("""
F.cross_entropy($x.reshape(-1, V), $y.view(-1)) || F.cross_entropy($x.movedim(-1, 1), $y)
F.cross_entropy($x.flatten(0, -2), $y.flatten().masked_fill($m.flatten(), -100), reduction='sum')
nn.CrossEntropyLoss(ignore_index=2)($x.view(-1, V), $y.view(-1)) || F.cross_entropy($x[$m], $y[$m])
F.nll_loss(F.log_softmax($x, -1).flatten(0, -2), $y.flatten()) || F.cross_entropy($x[$m], $y[$m], reduction='sum') / 7
nn.NLLLoss()($x.log_softmax(-1).flatten(0, -2), $y.flatten()) || dllm.weighted_nll($x, $y, wts($lead)).loss
dllm.MDLMCrossEntropyLoss()($x, $y, $m, torch.full($lead, 0.6), $m | True).total_loss
""")
OTHER_LOSSES = table("""
F.cross_entropy($x.reshape(-1, V), $y.view(-1), label_smoothing=0.1) || F.mse_loss($x, $o.to($x.dtype))
F.kl_div($x.log_softmax(-1), fixed($s).softmax(-1).to($x.dtype), reduction='batchmean')
F.kl_div($x.log_softmax(-1), $o.detach().to($x.dtype).log_softmax(-1), log_target=True, reduction='sum')
dllm.divergence($x, $o, $m, kind='kl').loss || F.cross_entropy($x.reshape(-1, V), $o.detach().argmax(-1).flatten())
""")
LOOKS = table("""
$x || $x.detach() || $x.argmax(-1) || $x.shape || $x.requires_grad || $x.dtype || $x.is_leaf || $x.stride() || len($x)
$x.is_contiguous() || $x.tolist() || float($x.sum()) || $x.flatten()[0].item() || torch.tensor([$x.flatten()[0]])
f'{$x.flatten()[0]:.3f}' || $x.detach().numpy().sum() || isinstance($x, torch.Tensor) || bool(($x > 0).any())
torch.equal($x, $x.clone()) || $x.max().item() || $x.grad_fn is None || torch.is_tensor($x) || torch.zeros_like($x)
$x.new_zeros(3) || torch.numel($x) || $x.dim() || torch.allclose($x, $x * 1.0) || str($x.shape)
torch.full_like($x, 2.0) || $x.untyped_storage().nbytes() || torch.isfinite($x).all() || $x.size(-1) || $x.is_cuda
$x.data_ptr() == $x.view(-1).data_ptr() || $x.is_floating_point() || torch.tensor($x.tolist()) || $x is $x || $x.nbytes
$x in {$x: 1} || $x.contiguous() is $x || $x.float() is $x || $x.to('cpu') is $x || $x.flatten(0, -2) is $x
$x.is_inference() || $x.retains_grad || $x.device.type || torch.as_tensor($x) || torch.sum($x, dtype=torch.float64)
$x.detach().cpu() || torch.result_type($x, 1.0) || $x.element_size() || torch.unique($x.detach().sign()) || $x.data
pytree.tree_map(lambda t: t.sum(), {'a': [$x]})['a'][0] || len(pytree.tree_leaves([$x, {'b': $x}])) || $x.T.shape
$x if $x.sum() > 0 else $x * 2 || torch.nn.utils.parameters_to_vector([$x]) || type($x.requires_grad) || $x.is_sparse
$x.layout || $x.names || $x.itemsize || torch.broadcast_to($x, (2, *$x.shape)) || $x.detach().__array__()
""")
CALLS = table("""
lg(model(x)) || lg(model(x)) || lg(model(x)) || lg(model(x)) || lg(model(x)) || lg(model(x)) || lg(model(x[:1]))
lg(teacher(x)) || lg(teacher(x)).detach() || head(hid) || head(torch.tanh(hid)) || head(base.hidden(x))
head(base.hidden(x)[:, 1:]) || head(base.hidden(x).flatten(0, 1)) || head(hid[0]) || head(base.hidden(x)[mask((B, L))])
F.linear(base.hidden(x), head.weight)
""")
WILD_CALLS = table("""
checkpoint(head, hid, use_reentrant=False) || checkpoint(head, hid, use_reentrant=True)
checkpoint(lambda q: head(torch.tanh(q)), hid, use_reentrant=False) || checkpoint(model, x, use_reentrant=False)
checkpoint(lambda q: head(torch.tanh(q)), hid, use_reentrant=True) || torch.vmap(head)(hid)
lg(nn.DataParallel(model)(x))
lg(torch.func.functional_call(model, {k: v * 1.1 for k, v in model.named_parameters()}, (x,)))
torch.func.grad(lambda h: head(h).logsumexp(-1).sum())(hid) || torch.func.vjp(head, hid)[0]
in_thread(lambda: lg(model(x)))
torch.func.jvp(lambda h: head(h), (hid,), (torch.ones_like(hid),))[1]
""")
AROUND_CALLS = table("""
$c || $c || $c || with torch.no_grad(): $c || with torch.inference_mode(): $c || with torch.set_grad_enabled(False): $c
head.requires_grad_(False); $c; head.requires_grad_(True) || model.requires_grad_(False); $c; model.requires_grad_(True)
teacher.requires_grad_(False); $c; teacher.requires_grad_(True) || with torch.autograd.graph.save_on_cpu(): $c
with torch.no_grad(), torch.enable_grad(): $c || with torch.autocast('cpu', torch.bfloat16): $c
with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t): $c
""")
VIEWS = table("""
$x || $x || $x || $x[:, 1:] || $x[0] || $x[..., :3] || $x.view(-1) || $x[:, 1:][..., 1:] || $x.transpose(0, -1)
$x.detach() || $x[::2] || $x.unsqueeze(0) || $x.flatten(0, -2) || $x.T || $x.data || $x.view_as($x) || $x.clone()
$x.expand_as($x) || $x.unbind(0)[0] || $x.split(1)[0] || $x.contiguous() || $x.reshape(-1) || $x.chunk(2, -1)[0]
list($x)[-1] || $x.squeeze(0) || $x.narrow(-1, 0, 1) || $x.diagonal() || torch.ops.aten.alias($x) || $x.detach()[0]
""")
CHANGES = table("""
$x[..., 3] = -torch.inf || $x[..., 3] += -1e4 || $x[:, :, 2] -= 1e5 || $x.masked_fill_(torch.arange(V) == 3, -1e4)
$v.mul_(1.3) || $v.add_(0.5) || $v.zero_() || $v.fill_(-2.0) || $v.neg_() || $v.clamp_(-1, 1) || $v.tanh_()
$v.div_(2)
$v.sub_(1.0) || $v.copy_(fixed($v.shape)) || $v[..., 3] = -9 || $v[..., 0] = $v[..., 1] || $v[:, 0] *= 2 || $v.exp_()
$x[mask($s)] = 0.5 || $x[0] = 1 || $x[:, 1:][..., 3] = -9 || $x[..., 3:5] -= 4 || $x *= 0.7 || $x += fixed($s)
$x /= 2
$x -= $x.detach().mean() || $v.masked_fill_($v > 0.5, -3.0) || $x.masked_fill_(mask($s), -9) || $v.sigmoid_()
$x.masked_fill_($m[..., None], 0) || $x.index_fill_(-1, torch.tensor([0]), -4) || $x[0, 0] = $x[0, 1].detach()
$x.index_put_((torch.tensor([0]),), torch.tensor(2.0).to($x.dtype)) || $x.add_($x) || $x.mul_(wts($s))
$x.index_put_((mask($s),), torch.tensor(0.3).to($x.dtype), accumulate=True)
$x.scatter_(-1, torch.zeros($lead + (1,), dtype=torch.long), 1.5) || $x.lerp_(fixed($s).to($x.dtype), 0.5)
$x.index_add_(0, torch.tensor([0]), $x[:1].detach() * 2) || $x.addcmul_($x.detach(), $x.detach())
$x.scatter_add_(-1, torch.zeros($lead + (1,), dtype=torch.long), torch.ones($lead + (1,)).to($x.dtype))
$v.normal_(generator=torch.Generator().manual_seed(1)) || torch.add($x, 1, out=$x) || F.relu($v, inplace=True)
nn.ReLU(inplace=True)($x) || torch.clamp_($x, -1, 1) || $v.data.mul_(2) || $x.data[..., 1] = -5 || $x.data = $x.data * 2
$x.detach().mul_(2) || $x.detach_() || $x.requires_grad_() || torch._foreach_mul_([$x], 2.0) || $x.set_($x.clone())
torch.nn.init.zeros_($v) || $x.cumsum_(-1) || $x.renorm_(2, 0, 1.0) || $x.data.fill_(1) || torch.ops.aten.mul_($x, 0.5)
torch.ops.aten.fill_($v, 0.5) || $x.random_(generator=torch.Generator().manual_seed(0)) || $x.apply_(lambda e: e * 2)
""")
METADATA = table("""
$x.unsqueeze_(0) || $x.squeeze_() || $x.transpose_(0, -1) || $x.t_() || $x.swapaxes_(0, 1) || $x.swapdims_(0, -1)
$x.squeeze_(0) || $x.resize_as_($x)
""")
HOOKS = table("""
hook($x, '$h') || hook($x, '$h', 2.0) || hook($x, '$h', 0.5) || $x.retain_grad() || $h = hook($x, '$h'); $h.remove()
$x.register_hook(lambda g: None) || $x.register_hook(lambda g: g.clamp(-1, 1)) || hook($x[:1], '$h')
model.register_forward_hook(lambda m, i, o: see(lg(o).detach()))
model.register_forward_hook(lambda m, i, o: lg(o) * 2)
model.register_full_backward_hook(lambda m, i, o: see(o[0])) || $h = $x.view(-1); $h.retain_grad()
base.mix.register_full_backward_hook(lambda m, i, o: see(o[0])) || $x.register_hook(lambda g: torch.zeros_like(g))
model.register_full_backward_pre_hook(lambda m, o: see(o[0])) || $x.grad_fn.register_hook(lambda a, b: see(b[0]))
$x.grad_fn.register_prehook(lambda b: see(b[0])) || hook(base.body.weight, '$h') || $x.register_hook(lambda g: see(g))
model.register_full_backward_hook(lambda m, i, o: None) || hid.register_post_accumulate_grad_hook(lambda p: see(p.grad))
torch.autograd.graph.register_multi_grad_hook([$x], lambda gs: see(gs[0]))
torch.autograd.graph.register_multi_grad_hook(($x,), lambda g: see(g), mode='any')
""")
FUNCTIONS = table("""
$a = Saving.apply($x) || $a = Dirty.apply($x) || $a = Once.apply($x, 0.3) || $a, $b = Several.apply($x)
$a, $b = PartlyConstant.apply($x) || $a = Alias.apply($x) || $a = Same.apply($x) || $a = Setup.apply($x, fixed($s))
$a = Setup.apply($x, base.mix.bias[0]) || $a = Setup.apply($x, $x) || $a = Setup.apply($x, torch.tensor(2.0))
$t = Sums.apply($x, $o) || $a = Checked.apply($x) || $t = GradInForward.apply($x, $y) || $t = GradInLogits.apply($x, $y)
$a = LogProb.apply($x, $y) || $a = Dirty.apply($x[:, 1:]) || $a = doubled($x)
""")
MODES = table("""
with torch.no_grad(): || with torch.inference_mode(): || with torch.enable_grad():
with torch.set_grad_enabled(False):
with torch.autocast('cpu', torch.bfloat16): || with torch.autograd.set_detect_anomaly(True): || with torch.no_grad():
with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t): || with torch.autograd.graph.save_on_cpu():
with torch.autograd.graph.allow_mutation_on_saved_tensors(): || with torch.random.fork_rng():
with torch.device('cpu'):
with torch.autograd.set_multithreading_enabled(False): || with torch.autograd.forward_ad.dual_level():
""")
COPIES = table("""
copy.copy($x) || copy.deepcopy($x.detach()) || copy.deepcopy($x) || pickle.loads(pickle.dumps($x))
$x.detach().clone()
pickle.loads(pickle.dumps($x.detach())) || $x.clone().detach() || $x.data || $x.data.clone() || torch.clone($x)
$x.detach().requires_grad_() || nn.Parameter($x.detach()) || nn.Parameter($x) || torch.asarray($x)
torch.as_tensor($x)
$x.to($x.dtype, copy=True) || torch.tensor($x.tolist()) || torch.from_numpy($x.detach().numpy()) || torch.Tensor($x)
torch.empty_like($x).copy_($x) || $x.new_empty($x.shape).copy_($x) || torch.tensor($x) || $x.cpu() || $x.positive()
torch.utils.dlpack.from_dlpack($x.detach()) || torch.ops.aten.alias($x) || torch.empty(0).to($x).set_($x.detach())
$x.as_subclass(torch.Tensor) || $x.share_memory_() || torch.ops.aten.clone($x) || $x.__deepcopy__({})
(lambda f: (torch.save($x, f), f.seek(0), torch.load(f))[2])(io.BytesIO())
""")
OF_MODELS = table("""
with torch.no_grad(): [p.mul_(0.9).add_(q, alpha=0.1) for p, q in zip(teacher.parameters(), model.parameters())]
model.eval() || model.train() || opt.zero_grad() || teacher.requires_grad_(False) || teacher.requires_grad_(True)
head.requires_grad_(False) || head.requires_grad_(True) || leave() || opt.step(); opt.zero_grad()
for p, q in zip(teacher.parameters(), model.parameters()): p.data.mul_(0.9).add_(q.data, alpha=0.1)
model.merge_adapter() if hasattr(model, 'merge_adapter') else None || other = copy.deepcopy(model); see(lg(other(x)))
nn.utils.clip_grad_norm_(model.parameters(), 0.5) || with torch.no_grad(): head.weight.mul_(1.1)
with torch.no_grad(): model.mix.weight.mul_(1.1)
""")
BACKWARDS = table("""
$t.backward(retain_graph=True) || $t.backward() || $t.backward(); opt.step(); opt.zero_grad() || see($t.item())
see($t)
see(torch.autograd.grad($t, [base.body.weight, hid], retain_graph=True, allow_unused=True)[0]) || see($x.grad)
see(torch.autograd.grad($t, $x, retain_graph=True)[0]) || torch.autograd.backward([$t], retain_graph=True)
see(torch.autograd.grad($t, $x, retain_graph=True, allow_unused=True)[0])
$a = torch.autograd.grad($t, $x, create_graph=True)[0] || $x.backward(fixed($s).to($x.dtype), retain_graph=True)
$a = torch.autograd.grad($t, base.body.weight, create_graph=True)[0].pow(2).sum() || in_thread(lambda: $t.backward())
$t.backward(torch.tensor(2.0).to($t.dtype), retain_graph=True)
see(torch.autograd.grad($x, hid, fixed($s).to($x.dtype))[0])
$t.backward(inputs=[base.body.weight], retain_graph=True)
($t * 64).backward(); [p.grad.div_(64) for p in opt.parameters]
""")
CHECKPOINTS = table("""
checkpoint(lambda q: q.tanh().sum(), $x, use_reentrant=$r) || checkpoint(lambda q: (q * q).sum(), $x, use_reentrant=$r)
checkpoint(lambda q: F.cross_entropy(q.reshape(-1, V), $y.view(-1)), $x, use_reentrant=$r)
checkpoint(lambda q: q.log_softmax(-1).gather(-1, $y[..., None]).sum(), $x, use_reentrant=$r)
checkpoint(lambda q: q.logsumexp(-1).mean(), $x, use_reentrant=$r)
checkpoint(lambda h: head(h).logsumexp(-1).sum(), hid, use_reentrant=$r)
checkpoint(lambda h: F.cross_entropy(head(h).view(-1, V), ids((B * L,))), hid, use_reentrant=$r)
checkpoint(lambda h: head(h).softmax(-1).pow(2).sum(), hid, use_reentrant=$r)
""")


# What autograd does not check: a recomputation with other weights, a changed tensor that was saved.
UNCHECKED = (
    (r"checkpoint\(", r"weight\.mul_|\.step\(|\.data\.mul_|merge_adapter|alpha=0.1"),
    (r"dllm\.", r"\.data\b|detach\(\).*_\("),
    (r"", r"\bn\d+.*\.data\b"),
    (r"logsumexp", r"GradInLogits"),
)


class Writer:
    """Draw a program; statements are run as they are written."""

    def __init__(self, seed, kind, simple=False):
        self.rng, self.wild = random.Random(f"{kind}{seed}"), kind == "wild"
        self.narrow = self.rng.random() < 0.5  # mostly operations that are fused
        heads = "trained", "frozen", "bias", "tied", "lora", "copy", "normed"
        rare = [0, 0, 0] if simple else [1, 0.4, 0.4]
        forms = ("cap", 0.15), ("scale", 0.1), ("float", 0.15), ("object", 0.1)
        self.spec = Spec(
            seed=seed,
            head=self.rng.choices(heads, [6, 3, 3, 2, *rare])[0],
            form="+".join(form for form, p in forms if self.chance(p)),
            dtype=self.rng.choices(["float32", "float64", "bfloat16"], [8, 1.5, 1.5])[0],
            teacher=self.of(["frozen", "trained", "frozen"]),
            fuse_teacher=self.chance(0.7),
            on_logits="warn" if self.chance(0.15) else "allow",
        )
        self.env, self.count = World(self.spec, False).names, 0
        self.body, self.terms, self.made = [], [], []

    def chance(self, p):
        return self.rng.random() < p

    def of(self, options, more=(), share=None):
        """Choose one of ``options``, or of ``more``, which is rare in a narrow program."""
        share = share or (0.95 if self.narrow else 0.5)
        return self.rng.choice(options if not more or self.chance(share) else more)

    def new(self, letter="a"):
        self.count += 1
        return f"{letter}{self.count}"

    def tensors(self, test):
        """Return the names of tensors for which a test is true; views that torch forbids to read raise in it."""
        found = []
        for name in self.made:
            with contextlib.suppress(RuntimeError):
                if isinstance(self.env.get(name), torch.Tensor) and test(self.env[name]):
                    found.append(name)
        return found

    def pick(self, test=lambda t: True, recent=0.5):
        found = self.tensors(lambda t: t.is_floating_point() and t.numel() > 0 and test(t))
        if not found:
            return None
        return found[-1] if self.chance(recent) else self.rng.choice(found)

    def logits(self):
        return self.pick(lambda t: t.dim() > 0 and t.shape[-1] == V)

    def rows(self):
        return self.pick(lambda t: t.dim() > 0 and t.numel() > 1 and t.shape[-1] != V)

    def filled(self, option, x, **more):
        """Return an option with its names filled in for the tensor ``x``."""
        t = self.env[x]
        lead = tuple(t.shape[:-1])
        i, k = self.rng.randrange(max(t.dim() - 1, 1)), self.rng.randrange(4)
        values = {"x": x, "s": tuple(t.shape), "lead": lead, "i": i, "k": k, "r": self.chance(0.5)}
        values["c"] = self.rng.choice(["add", "set", "fill"])
        values |= {"y": f"ids({lead}, {k})", "m": f"mask({lead}, {k})", "last": t.shape[i] - 1 if t.dim() else 0}
        values |= {"o": self.pick(lambda u: u.shape == t.shape, 0.2)}
        values |= {"h": self.new("h"), "a": self.new(), "b": self.new(), "t": self.new("s")}
        return Template(option).substitute(values | more)

    def add(self, statement):
        """Run and append a statement; False if it raised."""
        text = "\n".join(lines_of([statement]))
        if any(re.search(late, text) and re.search(early, str(self.body)) for early, late in UNCHECKED):
            return False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(text, "<writing>", "exec"), self.env)
        except Exception:
            return False
        self.body.append(statement)
        found = [name for name in dict.fromkeys(re.findall(r"\b[a-z]\d+\b", text)) if name in self.env]
        self.made += [name for name in found if name not in self.made]
        self.terms += [name for name in found if name[0] == "s" and name not in self.terms]
        return True

    # Statements, None if there is no tensor for one.

    def call(self):
        a = self.new("z")
        if not self.wild:
            call = f"{a} = {self.of(CALLS)}"
            around = ["$c"] * 12 + ["with torch.autocast('cpu', torch.bfloat16): $c", "with torch.no_grad(): $c"]
            return parsed(Template(self.of(around)).substitute(c=call))
        call = f"{a} = {self.of(CALLS if self.chance(0.8) else WILD_CALLS)}"
        return parsed(Template(self.of(AROUND_CALLS) if self.chance(0.5) else "$c").substitute(c=call))

    def some(self, letter, x, option):
        return None if x is None else f"{self.new(letter)} = {self.filled(option, x)}"

    def move(self):
        return self.some("z", self.logits(), self.of(MOVES, OTHER_MOVES))

    def cast(self):
        return self.some("z", self.logits(), self.of(CASTS, OTHER_CASTS))

    def to_rows(self):
        return self.some("n", self.logits(), self.of(ROWS, OTHER_ROWS))

    def of_rows(self):
        return self.some("n", self.rows(), self.of(OF_ROWS, OTHER_OF_ROWS, 0.7 if self.narrow else 0.3))

    def of_two(self):
        return self.some("n", self.pick(), self.of(OF_TWO))

    def term(self):
        if self.chance(0.4):
            return self.some("s", self.logits(), self.of(LOSSES, OTHER_LOSSES))
        return self.some("s", self.rows() if self.chance(0.8) else self.pick(), self.of(SUMS))

    def look(self):
        x = self.pick()
        return x and f"see({self.filled(self.of(LOOKS), x)})"

    def change(self):
        x = self.logits() if self.chance(0.6) else self.pick()
        if x is None:
            return None
        option = METADATA if self.chance(0.02) else CHANGES
        view, change = self.filled(self.of(VIEWS), x), self.of(option)
        if self.chance(0.2):
            v = self.new("v")
            return f"{v} = {view}\n{self.filled(change, x, v=v)}"
        change = self.filled(change, x, v=view)
        return ("with torch.no_grad():", [change]) if self.chance(0.25) else change

    def hook(self):
        x = self.pick(lambda t: not (t._is_view() and t._version))  # torch crashes on some of these
        return x and self.filled(self.of(HOOKS), x)

    def function(self):
        x = self.logits() if self.chance(0.7) else self.pick()
        return x and self.filled(self.of(FUNCTIONS), x)

    def mode(self):
        inner = self.of([self.move, self.cast, self.to_rows, self.of_rows, self.look, self.change, self.function])()
        return inner and (self.of(MODES), [inner])

    def copy(self):
        return self.some("a", self.pick(), self.of(COPIES))

    def forget(self):
        x = self.pick(recent=0.1)
        return x and f"del {x}"

    def later(self):
        x = self.pick()
        terms = self.tensors(lambda t: t.dim() == 0 and t.requires_grad)
        if x is None or not terms or self.chance(0.4):
            return parsed(self.of(OF_MODELS))
        return self.filled(self.of(BACKWARDS), x, t=self.rng.choice(terms))

    def checkpoint(self):
        return self.some("s", self.logits() if self.chance(0.9) else self.pick(), self.of(CHECKPOINTS))

    def steps(self, count):
        weights = {self.call: 1.2, self.move: 4, self.cast: 2.5, self.to_rows: 4, self.of_rows: 4, self.of_two: 1}
        weights |= {self.term: 2.5, self.look: 0.5}
        if self.wild:
            weights |= {self.change: 4, self.hook: 1.5, self.function: 2.5, self.mode: 2, self.copy: 1.5}
            weights |= {self.later: 1.5, self.checkpoint: 0.6, self.forget: 0.3}
        done = tries = 0
        while done < count and tries < 4 * count:
            tries += 1
            statement = self.rng.choices(list(weights), list(weights.values()))[0]()
            if statement is not None:
                done += self.add(statement)

    def finish(self):
        """Sum the terms and call backward."""
        grown = self.tensors(lambda t: t.is_floating_point() and t.requires_grad and not t.is_leaf)
        terms = [t for t in self.terms if t in grown and self.env[t].numel() == 1]
        lost = [n for n in grown if n not in terms]
        if lost and (self.chance(0.5) or not terms):
            a = self.new("s")
            if self.add(f"{a} = {self.rng.choice(lost)}.sum() * 0.3"):
                terms.append(a)
        if not terms:
            return
        self.rng.shuffle(terms)
        del terms[4:]
        loss = " + ".join(f"{t} * {self.of([1, 0.5, 2.0])}" if self.chance(0.4) else t for t in terms)
        trained = "[p for p in model.parameters() if p.requires_grad]"
        ways = {
            f"loss = {loss}\n(loss{self.of(['', ' / 2', ' * 3.0'])}).backward()": 8,
            "\n".join(f"{t}.backward(retain_graph=True)" for t in terms): 1,
            f"torch.autograd.backward([{', '.join(terms)}])": 1,
        }
        if self.wild:
            second = (
                f"g = torch.autograd.grad({loss}, base.body.weight, create_graph=True)[0]\ng.pow(2).sum().backward()"
            )
            ways |= {
                f"loss = {loss}\nloss.backward(retain_graph=True)\nloss.backward()": 1,
                f"for g in torch.autograd.grad({loss}, {trained}, allow_unused=True): see(g)": 1,
                second: 0.7,
            }
        for line in self.rng.choices(list(ways), list(ways.values()))[0].split("\n"):
            self.add(line)
        for _ in range(self.of([0, 1, 1, 2])):
            statement = self.look()
            if statement:
                self.add(statement)
        if self.chance(0.3):
            self.add("opt.step(); opt.zero_grad()")
        if self.wild and self.chance(0.5) and (x := self.pick()):
            self.add(f"see({x}.grad)")


def parsed(text):
    """Return ``with ...: statement`` as a block."""
    if not text.startswith("with "):
        return text
    header, inner = text.split(": ", 1) if "lambda" not in text else re.match(r"(with .*\)): (.*)", text).groups()
    return f"{header}:", [inner]


def write(seed, kind, simple=False):
    """Return a program of a seed, ``kind`` "tame" or "wild"; ``simple``: no model that imports something."""
    w = Writer(seed, kind, simple)
    for _ in range(w.of([1, 1, 2])):
        w.add(w.call())
    w.steps(w.rng.randrange(3, 14))
    w.finish()
    return Program(w.spec, w.body)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="wild", choices=["tame", "wild"])
    parser.add_argument("--seeds", type=int, nargs=2, default=[0, 100])
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--told", action="store_true", help="also print programs with errors that the docs announce")
    parser.add_argument("--program", help="check the program of this file, whose first line may be # Spec(...)")
    parser.add_argument("--inside", choices=["plain", "both"], help="run in this process, which a crash of torch ends")
    args = parser.parse_args(argv)
    if args.program:
        source = Path(args.program).read_text()
        spec = re.match(r"# (Spec\(.*\))", source)
        print(check(Program(eval(spec[1]) if spec else Spec(), [source])))
    elif args.inside:
        run_many(range(*args.seeds), args)
    else:
        for line in reports(range(*args.seeds), args.kind, ["--shrink"] * args.shrink + ["--told"] * args.told):
            print(line, end="", flush=True)


def reports(seeds, kind, options=()):
    """Yield the report of programs, line by line; they run in another process, because torch crashes on some."""
    while seeds:
        command = [sys.executable, "-m", "tests.support.fused_grammar", "--kind", kind, *options]
        span = [str(seeds.start), str(seeds.stop)]
        done = subprocess.Popen([*command, "--inside", "both", "--seeds", *span], stdout=subprocess.PIPE, text=True)
        for line in done.stdout:
            if line.startswith("@"):
                seeds = range(int(line[1:]) + 1, seeds.stop)
            else:
                yield line
        if done.wait() == 0:
            break
        at = seeds.start - 1
        plain = subprocess.run(
            [*command, "--inside", "plain", "--seeds", str(at), str(at + 1)], stdout=subprocess.DEVNULL
        )
        yield (
            f"## crash of the plain program {at}\n" if plain.returncode else f"== crash seed {at}: {done.returncode}\n"
        )


def run_many(seeds, args):
    counts = Counter()
    for seed in seeds:
        print(f"@{seed}", flush=True)
        compare = check if args.inside == "both" else lambda program: bounds(program) and None
        program, verdict = mended(write(seed, args.kind), compare)
        counts[verdict[0] if verdict else "same" if program.materialized else "same, nothing materialized"] += 1
        if verdict is None or verdict[0].startswith(SAYS_NOTHING) or (verdict[0].startswith("told") and not args.told):
            continue
        if args.shrink:
            program, verdict = shrunk(program, verdict)
        print(f"== {verdict[0]} seed {seed}: {verdict[1][:300]}\n{program}\n", flush=True)
    print(f"## {args.kind} {seeds}: {dict(counts)}", flush=True)


if __name__ == "__main__":
    main()
