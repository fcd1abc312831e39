"""How exact gradients in 16 bits are where keys, or values, share an offset, beside cuDNN and FlashAttention, on the GPU at hand:

    python benchmarks/offsets.py

Errors are norms of the difference from float64 over those of naive attention in bfloat16, which computes scores and softmax in
float32.  An offset is a vector, the same for all keys, or values, of a head, of so many standard deviations.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch.func import jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_bridge import scaled_dot_product_attention

CASES = [  # offsets of keys and of values, scale
    (0, 0, None), (4, 0, None), (16, 0, None), (0, 4, None), (1, 2, None), (16, 4, None), (4, 2, 0.1), (4, 2, 1.0),
]  # fmt: skip
RESULTS = ("dQ", "dK", "dV", "tangent of dQ", "of dK", "of dV")


def naive(q, k, v, *, is_causal, scale):
    wide = torch.promote_types(q.dtype, torch.float32)
    s = scale * (q.to(wide) @ k.to(wide).mT)
    if is_causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    return s.softmax(-1).to(v.dtype) @ v


def by(backend):
    def attention(*x, **arguments):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*x, **arguments)

    return attention


CONTENDERS = {
    "torch_bridge": (scaled_dot_product_attention, True),
    "cuDNN": (by(SDPBackend.CUDNN_ATTENTION), False),
    "FlashAttention-2": (by(SDPBackend.FLASH_ATTENTION), False),
}


def gradients(attention, x, tx, d_o, t_d_o, second, **arguments):
    """Those of q, k, v, and their tangents, if `second`."""

    def first(q, k, v, d_o):
        return vjp(lambda *x: attention(*x, **arguments), q, k, v)[1](d_o)

    if second:
        return sum(jvp(first, (*x, d_o), (*tx, t_d_o)), ())
    leaves = [a.detach().requires_grad_() for a in x]
    return torch.autograd.grad(attention(*leaves, **arguments), leaves, d_o)


def errors(attention, arrays, exact, second, **arguments):
    got = gradients(attention, *arrays, second, **arguments)
    return [((a.double() - e).norm() / e.norm()).item() for a, e in zip(got, exact, strict=False)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (1, options.heads, options.length, options.head_dim)
    draw = lambda *n: torch.randn(*(n or shape), device=device)
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, {shape}, bfloat16; {', '.join(RESULTS)}")
    for of_keys, of_values, scale in CASES:
        scale = scale or options.head_dim**-0.5
        for is_causal in (False, True):
            torch.manual_seed(1)
            shared = [size * draw(1, options.heads, 1, options.head_dim) for size in (0, of_keys, of_values)]
            x = tuple((draw() + a).bfloat16() for a in shared)
            tx = tuple((draw() + a / 4 * (i == 1)).bfloat16() for i, a in enumerate(shared))
            arrays = x, tx, draw().bfloat16(), draw().bfloat16()
            arguments = dict(is_causal=is_causal, scale=scale)
            wide = [tuple(a.double() for a in group) for group in arrays[:2]] + [a.double() for a in arrays[2:]]
            exact = gradients(naive, *wide, True, **arguments)
            rough = errors(naive, arrays, exact, True, **arguments)
            print(f"keys {of_keys}, values {of_values}, scale {scale:.3f}{', causal' * is_causal}")
            for who, (attention, second) in CONTENDERS.items():
                if device == "cuda" or who == "torch_bridge":
                    off = errors(attention, arrays, exact, second, **arguments)
                    print(f"    {who:18}", *(f"{e / n:7.2f}" for e, n in zip(off, rough, strict=False)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
