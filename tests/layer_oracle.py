"""The truth for the layer: float64, dense masks, one formula a line; shares nothing with dsa_ops.nn.

B sequences, L tokens, H heads. `p` is a state dict in float64, `c` a DSAConfig, bounds are [B, L] lists of ids.
"""

import torch


def rms_norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def layer_norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def turn(x, positions, theta, interleaved):
    """Rotation by complex multiplication: x [B, L, ..., R], positions [B, L]."""
    half = x.shape[-1] // 2
    angle = positions[..., None].double() * theta ** (-torch.arange(half).double() / half)
    angle = angle.reshape(*angle.shape[:2], *[1] * (x.dim() - 3), half)
    real, imag = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = torch.complex(real, imag) * torch.polar(torch.ones_like(angle), angle)
    if interleaved:
        return torch.view_as_real(turned).flatten(-2)
    return torch.cat((turned.real, turned.imag), -1)


def causal(batch, length):
    return torch.ones(length, length).tril().bool().expand(batch, length, length)


def bounded(starts, ends, keys):
    """visible [B, L, S] of bounds [B, L]."""
    ids = torch.arange(keys)
    return (ids >= starts[..., None]) & (ids < ends[..., None])


def projections(p, c, x, positions):
    """q [B, L, H, nope + rope], k likewise, v [B, L, H, v], and the low-rank query."""
    B, L, _ = x.shape
    resid = rms_norm(x @ p["q_a_proj.weight"].T, p["q_a_layernorm.weight"], c.norm_eps)
    q = (resid @ p["q_b_proj.weight"].T).view(B, L, c.num_heads, -1)
    latent, k_rope = (x @ p["kv_a_proj_with_mqa.weight"].T).split((c.kv_lora_rank, c.qk_rope_head_dim), -1)
    latent = rms_norm(latent, p["kv_a_layernorm.weight"], c.norm_eps)
    kv = (latent @ p["kv_b_proj.weight"].T).view(B, L, c.num_heads, -1)
    k_nope, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), -1)
    q_nope, q_rope = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), -1)
    if c.rope:
        q_rope = turn(q_rope, positions, c.rope_theta, c.rope_interleaved)
        k_rope = turn(k_rope, positions, c.rope_theta, c.rope_interleaved)
    k_rope = k_rope[:, :, None].expand(B, L, c.num_heads, c.qk_rope_head_dim)
    return torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1), v, resid


def probabilities(p, c, q, k, keep):
    """[B, H, L, S] softmax over the kept keys, the sink in the denominator; and without the sink."""
    logits = torch.einsum("blhd,bshd->bhls", q, k) * c.scale
    weights = torch.where(keep[:, None], logits.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    plain = weights / torch.where(total > 0, total, 1.0)
    if c.sink:
        total = total + p["sinks"].exp()[:, None, None]
    return weights / torch.where(total > 0, total, 1.0), plain


def attention(p, c, x, positions, keep):
    """Output [B, L, hidden] and head-mean probabilities [B, L, S] with keys limited to keep [B, L, S]."""
    q, k, v, _ = projections(p, c, x, positions)
    weights, plain = probabilities(p, c, q, k, keep)
    heads = torch.einsum("bhls,bshv->blhv", weights, v)
    return heads.flatten(-2) @ p["o_proj.weight"].T, plain.mean(1)


def index_scores(p, c, x, positions):
    """[B, L, S] scores of all keys, gradients to the indexer alone."""
    x = x.detach()
    resid = projections(p, c, x, positions)[3].detach()
    B, L, _ = x.shape
    q = (resid @ p["indexer.wq_b.weight"].T).view(B, L, c.index_n_heads, -1)
    k = x @ p["indexer.wk.weight"].T
    k = layer_norm(k, p["indexer.k_norm.weight"], p["indexer.k_norm.bias"], c.index_norm_eps)
    R = c.qk_rope_head_dim
    if c.rope:

        def part(y):
            if c.index_rope_first:
                return torch.cat((turn(y[..., :R], positions, c.rope_theta, c.index_rope_interleaved), y[..., R:]), -1)
            turned = turn(y[..., y.shape[-1] - R :], positions, c.rope_theta, c.index_rope_interleaved)
            return torch.cat((y[..., : y.shape[-1] - R], turned), -1)

        q, k = part(q), part(k)
    products = torch.einsum("blhd,bsd->blhs", q, k)
    if c.index_relu:
        products = products.relu()
    weights = x @ p["indexer.weights_proj.weight"].T * c.index_n_heads**-0.5 * c.index_head_dim**-0.5
    return torch.einsum("blhs,blh->bls", products, weights)


def best(scores, visible, topk):
    """keep [B, L, S]: the topk best visible keys of each row, of equal ones (0 is frequent) the first."""
    masked = torch.where(visible, scores, -torch.inf)
    top = masked.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    return torch.zeros_like(visible).scatter(-1, top, True) & visible


def kl(target, scores, keep):
    """[B, L] divergence of softmax(scores) from target over the kept keys; 0 where there are none."""
    target = torch.where(keep, target, 0.0).detach()
    total = target.sum(-1, keepdim=True)
    target = target / torch.where(total > 0, total, 1.0)
    log_p = torch.where(keep, scores, -1e300).log_softmax(-1)
    log_t = torch.where(target > 0, target, 1.0).log()
    return torch.where(keep, target * (log_t - log_p), 0.0).sum(-1)
