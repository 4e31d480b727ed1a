"""Random programs on logits: with ``fused_head`` they report the same, or raise an announced error."""

import pytest
import torch

from dllm_kernels import fused_head
from tests.support.fused_grammar import reports, write
from tests.support.fused_programs import SAYS_NOTHING, FailedError, Program, Spec, check, mended, undefined

# Programs that once reported something else, or raised: see tests/support/fused_programs.py for the names in them.
FOUND = {
    "values that a checkpointed function is the first to need": """
z = lg(model(x))
p, n = z.softmax(-1), F.cross_entropy(z.movedim(-1, 1), x)
checkpoint(lambda q: q.cumsum(-1).pow(2).sum() * n.exp(), p, use_reentrant=False).backward()""",
    "the retained gradient of logits that change": """
z = lg(model(x))
z.retain_grad()
z.mul_(2)
(z.pow(2).sum() + Checked.apply(z).sum()).backward()
see(z.grad)""",
    "a hook of the node of known values": """
z = lg(model(x))[1:]
z.tolist()
z.grad_fn.register_prehook(lambda g: (g[0] * 2,))
(Checked.apply(z).sum() + z.cumsum(-1).pow(2).sum()).backward()""",
    "losses without rows, of one row and of numbers out of range": """
z, y = lg(model(x)).flatten(0, 1), ids((10,))
see(F.cross_entropy(z[:0], y[:0], weight=wts((V,)).to(z.dtype)).isnan())
see((F.cross_entropy(z.half(), y, reduction='none') / (y % 2)).nan_to_num().mean())
s = sum(F.binary_cross_entropy_with_logits(t, torch.ones(t.shape).to(z.dtype)) for t in (z[:1], z[1]))
s = s + z[:0].max(-1).values.sum()
(s + z[:0].log_softmax(-1).gather(-1, y[:0, None]).sum() + z[:0].log_softmax(-1).sum()).backward()""",
    "targets of a subclass": """
class Labels(torch.Tensor): pass
z, y = lg(model(x)), x.as_subclass(Labels)
s = F.cross_entropy(z.movedim(-1, 1), y)
see([type(t).__name__ for t in (s, s * 2, z.logsumexp(-1) * y, z.as_subclass(Labels))])
s.as_subclass(torch.Tensor).backward()""",
    "Functions and hooks of what was computed from logits that changed later": """
z = lg(model(x))
a, b, c, d = z.exp(), z.softmax(-1), z.sigmoid(), z - z.exp().sum(-1, keepdim=True).log()
s = Checked.apply(a).sum() + c.relu().sum()
hook(b, 'b')
d.grad_fn.register_prehook(lambda g: None)
z *= 2
s = s + b.pow(2).sum() + Checked.apply(c).sum() + d.sum()
for _ in range(2):
    (s + z.pow(2).sum()).backward(retain_graph=True)""",
    "a hook of the node of logits whose copy a Function marks as dirty": """
z = lg(model(x)) * 0.7
a = Dirty.apply(z * 1)
z.grad_fn.register_hook(lambda a, b: see(b[0]))
a.pow(2).sum().backward()""",
    "views of inference tensors": """
with torch.inference_mode():
    z = head(hid)
see([t.is_inference() for t in (z[..., :, :], z[:, 1:], z.view(-1), z.detach(), z * 2, z.float())])""",
    "a checkpoint that needs values between fused uses": """
def body(q):
    a, b, c = q.logsumexp(-1).exp(), (q * q).sum(-1), q.gather(-1, x[..., None])[..., 0].exp()
    return (a + b + c + q.softmax(-1).sort(-1).values[..., 0] + q.log_softmax(-1)[..., 2]).sum()
z = lg(model(x))
s = checkpoint(body, z, use_reentrant=False) + checkpoint(lambda h: body(head(h)), hid, use_reentrant=False)
for _ in range(2):
    s.backward(retain_graph=True)""",
    "a checkpoint of what was computed from logits that changed later": """
z = lg(model(x))
h = torch.where(torch.arange(V) != 3, z, -5e5)
s = checkpoint(lambda q: F.nll_loss(q.log_softmax(-1).movedim(-1, 1), x), h, use_reentrant=False)
z[:, 1:][..., 3] = -9
s.backward()""",
    "set_": """
z = lg(model(x)).expand(2, B, L, V)
with torch.no_grad():
    z.set_(z.clone())
(z.sum() * 0.3).backward()""",
    "a detached tensor that is scaled in place": """
teacher.requires_grad_(True)
z = lg(teacher(x)).detach()
z *= 0.5
see(z.requires_grad)
(z * base.mix.bias[0]).sum().backward()""",
    "sums of a scalar": """
n = head(hid[0, 0]).log_softmax(-1).gather(-1, ids((1,))).squeeze(-1)
(n.sum(-1) + n.mean(0)).backward()""",
    "an item of a view under no_grad": """
z = lg(model(x))
with torch.no_grad():
    z[:, 1:][..., 3] = -9
see(z)
z.logsumexp(-1).sum().backward()""",
    "a row under no_grad": """
z = lg(model(x))
with torch.no_grad():
    z[0, 0] = z[0, 1].detach()
F.cross_entropy(z.movedim(-1, 1), ids((2, 5))).backward()""",
    "a copied view under no_grad": """
z = lg(model(x))
with torch.no_grad():
    z[::2].copy_(fixed(z[::2].shape)); z.split(1)[0].add_(0.5); z.T.mul_(2); F.relu(z.view_as(z), inplace=True)
(z.sum() * 0.3).backward()""",
    "unbind, then a change of the base": """
z = lg(model(x))
row = z.unbind(1)[0]
z[:, 1:][..., 3] = -9
z.logsumexp(-1).sum().backward()""",
    "split, then a change of the base": """
z = lg(model(x))
part = z.split(2, dim=1)[0]
z.masked_fill_(mask((2, 5))[..., None], 0)
see(z)""",
    "a change of unbind under no_grad": """
z = lg(model(x))
row = z.unbind(0)[0]
with torch.no_grad():
    torch.add(row, 1, out=row); nn.ReLU(inplace=True)(row)
see(z)""",
    "a view of a view, then a Function of the base": """
z = lg(model(x[:1]))
v = z[..., :3]
v[:, 0] *= 2
y, _ = PartlyConstant.apply(z)
(y.sum() * 0.3).backward()""",
    "a view, then a Function that writes into the base": """
z = lg(model(x))
z.narrow(-1, 0, 1).mul_(0.3)
GradInLogits.apply(z, ids((2, 5), 0)).backward()""",
    "a dirty Function of a view, then a Function of the base": """
z = lg(model(x))
a = Dirty.apply(z.reshape(-1, V))
b, _ = PartlyConstant.apply(z)
n = torch.gather(F.log_softmax(b, dim=-1), -1, ids((2, 5), 3).unsqueeze(-1)).squeeze(-1)
(n.sum() * 0.3).backward()""",
    "functions of torch.func that refer to logits": """
z, w = lg(model(x)), fixed((2, 2, 5))
nll = F.cross_entropy(z.movedim(-1, 1), ids((2, 5)), reduction='none')
see(torch.func.grad(lambda w: (z.detach()[:, 1:] * w).pow(2).sum())(fixed((B, L - 1, V))))
a = torch.vmap(lambda w: (nll * w).sum())(w)
b = torch.vmap(lambda y: z.log_softmax(-1).gather(-1, y[..., None]).mean())(torch.stack([x, ids((2, 5))]))
see(torch.func.hessian(lambda r: r.logsumexp(-1))(z[0, 0].detach()))
(a + b).sum().backward()""",
    "another dtype of the memory": """
z = lg(model(x)).double()
see(z.view(torch.int64).shape)
see(z.detach().as_strided((2, V), (V, 1), V).storage_offset())""",
    "a retained gradient between changes in place": """
z = lg(model(x))
z *= 0.5
z.retain_grad()
z += 0.5
(z.logsumexp(-1) ** 2).sum().backward()
see(z.grad)""",
    "values in a checkpoint after save_on_cpu": """
z = lg(model(x))
with torch.autograd.graph.save_on_cpu():
    v = z.view(-1, V)
n = torch.lerp(v, v * 2, 0.3)
checkpoint(lambda q: q.log_softmax(-1).gather(-1, ids((2, 5))[..., None]).sum(), z, use_reentrant=False).backward()""",
    "a second gradient of a reduced loss": """
s = F.cross_entropy(lg(model(x)).movedim(-1, 1), ids((2, 5)))
s.backward(torch.tensor(2.0), retain_graph=True)
see(torch.autograd.grad(s, base.body.weight, create_graph=True)[0])""",
    "dirty Functions of views that are not kept": """
z = lg(model(x))
Dirty.apply(z[:, 1:][0])
Dirty.apply(z.view(-1, V)[2:])
(z.logsumexp(-1).sum() + z[:, 0].pow(2).sum()).backward()""",
    "a hook of a node, then a fused use and a second derivative": """
z = lg(model(x))
z.grad_fn.register_hook(lambda a, b: see(b[0]))
torch.autograd.grad(z.sum() * 0.3, base.body.weight, create_graph=True)[0].pow(2).sum().backward()""",
    "a change of torch.Tensor of logits, then a Function": """
z = lg(model(x))
a = torch.Tensor(z)
a[mask((2, 5, 11))] = 0.5
checkpoint(lambda q: F.cross_entropy(q.reshape(-1, V), ids((10,))), a, use_reentrant=True).backward()""",
    "a loss that is changed, then a Function": """
s = F.cross_entropy(lg(model(x)).reshape(-1, V), ids((10,)))
s *= 2
s.mul_(3)
Alias.apply(s).backward()""",
    "a dirty Function of a loss": """
s = F.cross_entropy(lg(model(x)).reshape(-1, V), ids((10,)))
b = s.exp()
Dirty.apply(s)
s.mul_(2)
with torch.no_grad():
    see(s)
(s + b + Alias.apply(s)).backward()""",
    "logits that are detached after a use": """
z = lg(model(x))
a = (z * 2).tanh() * 0.5
z.detach_()
Setup.apply(a, fixed((2, 5, 11))).sum().backward()""",
    "a hook of what broadcast_tensors returns": """
z = lg(model(x))
hook(torch.broadcast_tensors(z, z)[0], 'h')
(z.exp().sum() * 0.3).backward()""",
    "backward hooks of a module whose logits are known": """
model.register_forward_hook(lambda m, i, o: see(lg(o).detach()))
model.register_full_backward_hook(lambda m, i, o: see(o[0]))
z = lg(model(x))
see(z.grad_fn is None)
(z.exp().sum() + z.logsumexp(-1).sum()).backward()""",
    "a dirty Function of a view, then a hook of the base": """
z = lg(model(x))
Dirty.apply(z[:, 1:])
hook(z, 'z', 0.5)
(z.sum() * 0.3).backward()""",
    "a dirty Function, then its input": """
z = lg(model(x))
a = Dirty.apply(z)
n = F.cross_entropy(z.flatten(0, -2), ids((10,), 2), reduction='none')
(n.sum() * 0.3).backward()""",
    "a hook on the result of a dirty Function": """
z = lg(model(x))
a = Dirty.apply(z)
a.register_hook(lambda g: torch.zeros_like(g))
GradInForward.apply(z, ids((2, 5), 0)).backward()""",
    "a dirty Function of one of several outputs": """
z = lg(model(x))
a, b = Several.apply(z)
c = (a / 1.7).tanh() * 1.7 / 2
d = Dirty.apply(a)
(c.sum() * 0.3).backward()""",
    "a checkpoint of logits that are materialised later": """
z = lg(model(x))
s = checkpoint(lambda q: q.logsumexp(-1).mean(), z, use_reentrant=False)
y = z * 0.5 + z
s.backward()""",
    "a reentrant checkpoint of the head": """
z = checkpoint(head, hid, use_reentrant=True)
n = F.cross_entropy(z.movedim(-1, 1), ids((2, 5), 1), reduction='none')
(n.sum() * 0.3).backward()""",
    "a parameter of logits": """
z = lg(model(x))
p = nn.Parameter(z)
see(p)
p.logsumexp(-1).sum().backward()
see(p.grad)""",
    "a parameter of detached logits, then a change": """
z = lg(model(x))
y = z / 2
p = nn.Parameter(z.detach())
y[mask((2, 5, 11))] = 0.5
z.data[..., 1] = -5
see(p)""",
    "a hook on what is the tensor itself": """
z = head(base.hidden(x)[mask((B, L))])
y = z.flatten(0, -2)
torch.autograd.graph.register_multi_grad_hook((y,), lambda g: see(g), mode='any')
(z.sum() * 1.3).backward()""",
    "identity": """
z = lg(model(x))
see([z.contiguous() is z, z.float() is z, z.cpu() is z, z.type_as(z) is z, z.to('cpu') is z, z.flatten(2) is z])
n = F.cross_entropy(z.movedim(-1, 1), ids((2, 5)), reduction='none')
see([n.float() is n, n.contiguous() is n, n.flatten(1) is n, n.flatten(0, -2) is n])""",
    "a hook before a node": """
z = lg(model(x))
y = z[None]
n = (-F.log_softmax(y, dim=-1) * fixed((1, 2, 5, 11))).sum(-1)
y.grad_fn.register_prehook(lambda b: see(b[0]))
(n.sum() * 0.3).backward()""",
    "a hook after a node": """
z = lg(model(x))
y = z.to(torch.float64)
y.grad_fn.register_hook(lambda a, b: see(b[0]))
(y.sum() * 0.3).backward()""",
    "the second order of a head that was frozen at its call": """
head.requires_grad_(False); z = lg(model(x)); head.requires_grad_(True)
g = torch.autograd.grad(z.sum() * 0.3, base.body.weight, create_graph=True)[0]
g.pow(2).sum().backward()""",
    "a change of the tensor as torch.Tensor": """
z = lg(model(x))
torch.Tensor(z).clamp_(-1, 1)
(z.sum() * 0.3).backward()""",
    "a change of the tensor as a base class": """
z = lg(model(x))
torch.clamp_(z.as_subclass(torch.Tensor), -1, 1)
(z.sum() * 0.3).backward()""",
    "NLLs as a base class": """
z = lg(model(x))
n = torch.gather(z.log_softmax(-1), -1, ids((2, 5), 0).unsqueeze(-1)).squeeze(-1)
(n.as_subclass(torch.Tensor).sum() * 0.3).backward()""",
    "a copied leaf": """
z = lg(model(x))
y = copy.deepcopy(z.detach().requires_grad_())
y.logsumexp(-1).sum().backward()
see(y.grad)""",
    "a change of a contiguous copy of NLLs": """
z = lg(model(x))
n = F.cross_entropy(z.flatten(0, -2), ids((10,), 2), reduction='none').view((2, 5))[:, 1:]
n.contiguous().exp_()
(n.sum() * 0.3).backward()""",
    "a view, then detach_ of the base": """
z = lg(model(x))
v = z.view_as(z)
z.detach_()
v.logsumexp(-1).sum().backward()""",
    "data replaced after a Function": """
z = lg(model(x))
a = Once.apply(z, 0.3)
z.data = z.data * 2
(F.cross_entropy(a.transpose(1, -1), ids((2, 5), 1), reduction='none').sum() * 0.3).backward()""",
    "log-probabilities of transposed logits": """
z = lg(model(x))
y = torch.swapaxes(z, 0, 1).log_softmax(dim=-1) ** 2
n = F.cross_entropy(y.view(-1, V), ids((10,), 0), reduction='none')
n.sum().backward()""",
    "torch._foreach_mul_ of the tensor itself": """
z = lg(model(x))
y = z.contiguous()
torch._foreach_mul_([z], 2.0)
(y.sum() * 0.3).backward()""",
    "a changed tensor, then a Function that writes into it": """
z = lg(model(x[:1]))
torch._foreach_mul_([z], 2.0)
y = torch.asarray(z)
torch.autograd.backward([GradInLogits.apply(y, ids((1, 5), 1)), y.sum() * 0.3])""",
    "a dirty Function of a transposed view": """
z = lg(model(x))
a = Dirty.apply(z.transpose(-2, -3))
(z.sum() * 0.3).backward()""",
    "one of several outputs, changed after its loss": """
z = lg(model(x))
a, b = Several.apply(z)
s = F.cross_entropy(a.movedim(-1, 1), ids((2, 5), 1))
a *= 0.7
s.backward()""",
    "a reentrant checkpoint of a copy, then a change": """
z = lg(model(x))
y = z.roll(shifts=1, dims=0)
s = checkpoint(lambda q: q.softmax(-1).pow(2).sum(), y, use_reentrant=True)
z.addcmul_(z.detach(), z.detach())
s.backward()""",
    "a view of a changed base, then a Function of the base": """
z = lg(model(x))
z += fixed((2, 5, 11))
z.flatten(0, -2).div_(2)
(Checked.apply(z).sum() * 0.15).backward()""",
    "a dirty Function of the base of a view": """
z = head(torch.tanh(hid))
v = z.transpose(0, 1)
a = Dirty.apply(z)
(v.sum() * 0.15).backward()""",
    "a changed view, then a reentrant checkpoint": """
z = checkpoint(head, hid, use_reentrant=False)
z[..., :3].masked_fill_(z[..., :3] > 0.5, -3.0)
checkpoint(lambda q: q.logsumexp(-1).mean(), z, use_reentrant=True).backward()""",
    "torch._foreach_mul_ of a view, then a Function": """
v = head(hid).mT.mT
torch._foreach_mul_([v], 2.0)
(LogProb.apply(v, ids((2, 5), 3)).sum() * 0.075).backward()""",
    "a change of the base of torch.Tensor": """
z = head(base.hidden(x))
a = torch.Tensor(z)
z[:, 1:][..., 1:].fill_(-2.0)
(a.sum() * 0.9).backward()""",
    "a hook on several after a change": """
z = lg(model(x))
z += fixed((2, 5, 11))
torch.autograd.graph.register_multi_grad_hook([z], lambda gs: see(gs[0]))
(z.sum() * 0.3).backward()""",
    "saved copies of a head that is changed": """
with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
    z = lg(model(x[:1]))
y = z * -0.5
with torch.no_grad():
    head.weight.mul_(1.1)
F.cross_entropy(y.flatten(0, 1), ids((5,))).backward()""",
    "a gradient for logits that do not matter": """
z = lg(model(x))
s = GradInForward.apply(3 * torch.tanh(z / 3) * 0, ids((2, 5), 1))
see(torch.autograd.grad(s, z)[0])""",
    "views under no_grad require a gradient": """
z = lg(model(x))
with torch.no_grad():
    v = z[..., 0, :]
see((v.requires_grad, v.is_leaf))
v.logsumexp(-1).sum().backward()""",
    "a dirty Function of NLLs in inference mode": """
z = lg(model(x))
n = F.cross_entropy(z.reshape(-1, V), ids((2, 5), 2).view(-1), reduction='none')
with torch.inference_mode():
    a = Dirty.apply(n)""",
    "a parameter of logits with values": """
z = lg(model(x))
y = torch.nan_to_num(z)
p = nn.Parameter(z)
p.logsumexp(-1).sum().backward()
see(p.grad)""",
    "an aliasing Function of a changed tensor": """
z = lg(model(x))
z.sigmoid_()
a = Alias.apply(z)
b = Same.apply(z)
(z.sum() * 0.3).backward()""",
    "an aliasing Function, then its input": """
z = lg(model(x))
a = Alias.apply(z)
(z.log_softmax(-1) * fixed((2, 5, 11)) + a).sum().backward()""",
    "copies of aliases": """
z = lg(model(x))
see(torch.tensor(torch.ops.aten.alias(z)))
see(torch.Tensor(z[None]))
see(z[:, :-1].as_subclass(torch.Tensor))""",
    "a Function of a view under no_grad": """
z = lg(model(x))
n = torch.vmap(lambda r: r.logsumexp(-1))(z)
with torch.no_grad():
    v = z.unflatten(0, (1, -1))
(Once.apply(v, 0.3).sum() * 0.15).backward()""",
    "a hook in a backward of second order": """
z = head(base.hidden(x).flatten(0, 1))
y = torch.concat([z, z])
hook(y, 'y', 2.0)
g = torch.autograd.grad(y.sum() * 0.3, base.body.weight, create_graph=True)[0]
g.pow(2).sum().backward()""",
    "a hook on a view that is changed": """
z = lg(model(x))
v = z[:, ::2]
v.register_hook(lambda g: None)
v.scatter_(-1, torch.zeros((2, 3, 1), dtype=torch.long), 1.5)
(z.sum() * 0.3).backward()""",
    "a change of a view under no_grad that requires a gradient": """
z = lg(model(x))
with torch.no_grad():
    z.flatten(0, -2).add_(0.5)
F.nll_loss(F.log_softmax(z, -1).flatten(0, -2), ids((10,), 0)).backward()""",
    "a checkpoint of rows that are materialised later": """
z = lg(model(x)).index_select(0, torch.tensor([0, 1]))
s = checkpoint(lambda q: q.logsumexp(-1).mean(), z, use_reentrant=False)
(s + z.sum() * 0.3).backward()""",
    "a change of a view of a checkpointed head in inference mode": """
z = checkpoint(lambda q: head(torch.tanh(q)), hid, use_reentrant=True)
with torch.inference_mode():
    a = Dirty.apply(z)
    v = z.squeeze(0)
see((v.is_inference(), v.requires_grad))""",
    "the second order of a head that was frozen after its call": """
z = head(base.hidden(x).flatten(0, 1))
head.requires_grad_(False)
see(torch.autograd.grad(z.exp().sum(), base.body.weight, create_graph=True)[0])""",
    "a view of logits whose copy was changed": """
z = lg(model(x))
v = z.view(-1, V)
v.detach().mul_(2)
v[..., :3].mul_(0.5)
((z + 0).sum() * 0.3 + v.sum()).backward()""",
    "a change of contiguous rows": """
z = lg(model(x))
z.view(-1, V).contiguous().neg_()
(z.sum() * 0.3).backward()""",
    "a hook that is removed": """
z = 1.7 * torch.tanh(lg(model(x)) / 1.7)
with torch.no_grad():
    torch.ops.aten.mul_(z, 0.5)
hook(z, 'z').remove()
with hook(z, 'z', 3.0):
    pass
(Several.apply(z)[1].sum() * 0.3).backward()""",
    "the gradient of rows whose values are from those of all": """
z = lg(model(x))
v = z[:, 1:]
see(torch.autograd.grad((v.softmax(-1) ** 2).sum(), [v, head.weight]))
see(torch.autograd.grad(z[:, :2].exp().sum(), v, allow_unused=True))""",
    "a checkpoint, then a change of a copy": """
z = head(base.hidden(x))
s = checkpoint(lambda q: F.cross_entropy(q.reshape(-1, V), ids((10,))), z, use_reentrant=False)
y = torch.roll(z, 1, 0)
y.masked_fill_(y > 0.5, -3.0)
(s * 3.0).backward()""",
    "a hook on logits that were scaled in place": """
z = head(torch.tanh(hid)).div(0.5)
z.mul_(1.3)
y = torch.gather(z, 0, torch.zeros((2, 5, 11), dtype=torch.long))
hook(z, 'z', 0.5)
(y.sum() * 0.3).backward()""",
    "a hook after a checkpoint": """
z = head(hid)
s = checkpoint(lambda q: q.log_softmax(-1).gather(-1, ids((2, 5), 2)[..., None]).sum(), z, use_reentrant=False)
z.register_hook(lambda g: None)
s.backward()""",
    "detach_ of logits with a view": """
z = head(hid)
v = z.unsqueeze(0)
z.detach_()
z[..., 3] = -9
v.sum().backward()""",
    "a node of a view that is changed": """
z = lg(model(x))
v = z[:, ::2]
see(v.grad_fn is None)
v.scatter_(-1, torch.zeros((2, 3, 1), dtype=torch.long), 1.5)
(z.sum() * 0.3).backward()""",
    "logits beside detached ones": """
z = head(hid)
n = F.cross_entropy(z.movedim(-1, 1), ids((2, 5)), reduction='none')
with torch.no_grad():
    lse, constant = z.logsumexp(-1, keepdim=True), n * 2
a = (z - lse).gather(-1, ids((2, 5))[..., None]).sum() + (n + constant).sum()
b = torch.where(mask((2, 5)), n, constant).sum() + torch.cat([z, z.detach()]).logsumexp(-1).sum()
c = (z - z.detach()).logsumexp(-1).sum() + (z.detach() + 0.5 * z).logsumexp(-1).sum()
(a + b + c).backward()""",
    "a change of a view of NLLs beside a pending statistic": """
z = head(hid)
lse = z.logsumexp(-1)
n = F.cross_entropy(z.view(-1, V), ids((10,)), reduction='none')
v = n.view(2, 5)
v[mask((2, 5))] = 0
(n.sum() + v.exp().sum() + lse.mean()).backward()""",
    "products that are no entropy": """
z = head(hid)
p, log = z.softmax(-1), z.log_softmax(-1)
a = ((z / 2).softmax(-1) * log).sum(-1) + (z.detach().softmax(-1) * log).sum(-1) + (p.detach() * log).sum(-1)
b = (log.exp() * log.float()).sum(-1) + (log.exp() * log.roll(1, 1)).sum(-1) + (log.softmax(-1) * log).sum(-1)
c = (log[:, :2].exp() * log[:, 1:3]).sum(-1)
(a.sum() + b.sum() + c.sum()).backward()""",
    "torch._foreach_mul_, then a Function": """
z = lg(model(x))
torch._foreach_mul_([z], 2.0)
(Sums.apply(z, z) / 2).backward()""",
}  # fmt: skip
# Programs with another value or an error: docs/any-loop.md has these limits.
OPEN = {"a change of the base of torch.Tensor"}
FINE = "told", *SAYS_NOTHING  # "told": an announced error


LIMIT = pytest.mark.xfail(strict=True, reason="a limit of deferred logits")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[LIMIT] if name in OPEN else []) for name in FOUND])
def test_programs_that_once_failed(name):
    try:
        verdict = check(Program(Spec(), [FOUND[name].strip("\n")]))
    except FailedError as error:
        pytest.skip(f"the plain program raises in this version of torch: {error}")
    assert verdict is None or verdict[0].startswith(FINE), verdict


def test_programs_that_torch_does_not_define_are_no_reference():
    written = "z = lg(model(x)).tanh()\ns = z.exp().sum()\n"
    hooked = "z = lg(model(x))[:, 1:]\nhook(z, 'h')\n"
    for source, reason in [
        (written + "z.data.zero_()\ns.backward()", "overwritten memory"),
        (written + "z.zero_()", None),
        (hooked + "z.mul_(2)\nz.sum().backward()", "hook of a view"),
        (hooked + "z.sum().backward()", None),
    ]:
        assert undefined(Program(Spec(), [source])) == reason


def test_a_frozen_weight_may_change_before_the_backward_of_its_values():
    pytest.importorskip("peft")
    source = """
base.body.requires_grad_(False)
z = torch.gather(lg(model(x)), 0, torch.zeros((2, 5, 11), dtype=torch.long))
with torch.no_grad():
    head.weight.mul_(1.1)
(z.sum() * 0.3).backward()"""
    assert check(Program(Spec(head="lora"), [source.strip()])) is None


def test_a_head_that_is_changed_before_the_backward_of_its_values_raises():
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 11))
    with fused_head(model, head=model[1], on_logits="allow"):
        y = model(torch.ones(2, 6)).cumsum(-1)
    with torch.no_grad():
        model[1].weight.mul_(1.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_hooks_of_logits_and_of_a_slice_see_gradients():
    source = """
z = lg(model(x))
s = z[:, 1:]
hook(s, 'slice')
hook(z, 'all')
(s.logsumexp(-1).sum() + z.sum()).backward()"""
    assert check(Program(Spec(), [source])) is None


@LIMIT
def test_hooks_see_the_whole_gradient():
    source = """
with torch.autocast('cpu', torch.bfloat16):
    z = lg(model(x))
a = z.cpu()
s = GradInForward.apply(a, ids((2, 5), 1))
hook(a, 'a', 0.5)
torch.autograd.backward([a.sum() * 0.3, s])"""
    assert check(Program(Spec(form="float"), [source.strip()])) is None


@pytest.mark.parametrize(("kind", "limit"), [("tame", 0), ("wild", 3)])
def test_random_programs(kind, limit):
    """``limit``: number of programs with one of the limits above."""
    verdicts = [mended(write(seed, kind, simple=True)) for seed in range(120)]
    failed = [f"{verdict}\n{program}" for program, verdict in verdicts if verdict and not verdict[0].startswith(FINE)]
    assert len(failed) <= limit, "\n\n".join(failed)
    assert sum(verdict is None for _, verdict in verdicts) > 100


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "wrong", "raised"), [("tame", 0, 0), ("wild", 5, 12)])
def test_many_random_programs(kind, wrong, raised):
    report = "".join(reports(range(1000, 1800), kind))
    assert report.count("== wrong") <= wrong, report
    assert report.count("== ") - report.count("== wrong") <= raised, report
    assert f"## {kind}" in report
