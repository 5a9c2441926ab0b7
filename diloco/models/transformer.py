"""A decoder-only transformer in one file: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

Shapes in comments: B sequences, T tokens of one sequence, D model width, H query heads, K key/value heads,
E = D / H width of one head, F width of the SwiGLU layer, V vocabulary.

Parameter names tell the layer: `embed.weight`, `blocks.<i>.…`, `norm.weight`, `head.weight` (untied only).
There are no buffers: whatever is not a parameter is computed from shapes, so a model built on the meta device
needs no care, and the parameters are all there is to exchange.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diloco.config.contract import ModelSection

NORM_EPS = 1e-5
INIT_STD = 0.02
WRITE_RESIDUAL = ("attn.out.weight", "ffn.down.weight", "experts.down", "shared.down.weight")
"""Endings of the names of the matrices that write to the residual stream."""


def rotary_table(length: int, width: int, theta: float, device: torch.device, first: int = 0) -> tuple[Tensor, Tensor]:
    """Rotary embedding at each position from `first` on: cosines and signed sines, fp32 (length, 1, width).

    The angles are position / theta^(2 i / width) for i < width / 2, used twice ("RoFormer", arXiv 2104.09864,
    equation 15). Made anew in each forward pass: that takes 60 us, and a cache would have to know lengths, devices
    and inference mode.
    """
    exponents = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    positions = torch.arange(first, first + length, device=device, dtype=torch.float32)
    angles = positions[:, None, None] * (1.0 / theta**exponents)  # `outer` would be bf16 under autocast
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of attention heads: turn x (B, T, heads, E), fp32, by the angles of the positions.

    Component i turns together with component i + E / 2, as in Hugging Face's Llama.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries (B, H, T, E), keys and values (B, K, T, E) of consecutive tokens -> (B, H, T, E)."""


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The transformer's causal attention, over whole sequences; `diloco.island.context` does it over pieces."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Attention(nn.Module):
    """Causal self-attention; H / K query heads share one key/value head (arXiv 2305.13245)."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.heads = section.heads
        self.kv_heads = section.kv_heads or section.heads
        self.head_dim = section.dim // section.heads
        # Three matrices and not one: tensor parallelism gives each rank the same heads of all three.
        self.q = nn.Linear(section.dim, self.heads * self.head_dim, bias=False)
        self.k = nn.Linear(section.dim, self.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(section.dim, self.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(section.dim, section.dim, bias=False)
        # QK-norm keeps the attention logits bounded (arXiv 2302.05442, section 2).
        self.q_norm = nn.RMSNorm(self.head_dim, NORM_EPS) if section.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, NORM_EPS) if section.qk_norm else nn.Identity()
        self.attend: Attend = attend

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # (B, T, H or K, E), of which a rank under tensor parallelism has some heads.
        q, k, v = (matrix(x).unflatten(-1, (-1, self.head_dim)) for matrix in (self.q, self.k, self.v))
        # Norm and rotation in fp32 also under autocast: bf16 keeps only 8 bits of an angle.
        q = rotate(self.q_norm(q.float()), cos, sin).to(v.dtype)
        k = rotate(self.k_norm(k.float()), cos, sin).to(v.dtype)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, H or K, T, E)
        mixed = self.attend(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class SwiGLU(nn.Module):
    """A gated feed-forward layer: down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        width = section.ffn_width
        self.gate = nn.Linear(section.dim, width, bias=False)
        self.up = nn.Linear(section.dim, width, bias=False)
        self.down = nn.Linear(width, section.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


FeedForward = Callable[[ModelSection], nn.Module]
"""Makes a block's second half, (B, T, D) -> (B, T, D): `SwiGLU`, or `diloco.models.moe.MixtureOfExperts`."""


class Block(nn.Module):
    """A transformer's block: attention, then a feed-forward layer, each with a norm before it and a residual around
    it."""

    def __init__(self, section: ModelSection, feed_forward: FeedForward = SwiGLU) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(section.dim, NORM_EPS)
        self.attn = Attention(section)
        self.ffn_norm = nn.RMSNorm(section.dim, NORM_EPS)
        self.ffn = feed_forward(section)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The model's loss: mean cross-entropy (nats, fp32 scalar) of logits (B, T, V) for next tokens, int64 (B, T)."""
    # fp32 also under autocast: a sum over the vocabulary in bf16 would be good to 2 digits.
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


class Transformer(nn.Module):
    """The model: tokens int64 (B, T) -> logits (B, T, V). Any T; initialised from torch's global random state.

    A `part` of it takes and gives hidden states (B, T, D) where others come before and after it.
    """

    def __init__(self, section: ModelSection, vocab_size: int, feed_forward: FeedForward = SwiGLU) -> None:
        super().__init__()
        self.vocab_size, self.width = vocab_size, section.dim
        self.head_dim = section.dim // section.heads
        self.rope_theta = section.rope_theta
        self.piece = 0
        """Which piece of the sequences it is called with, counted in pieces of that length."""
        self.hidden_pieces = 1
        """Into how many pieces hidden states are cut along T between blocks, beside those of `piece`."""
        self.embed: nn.Embedding | None = nn.Embedding(vocab_size, section.dim)
        self.blocks = nn.ModuleList(Block(section, feed_forward) for _ in range(section.layers))
        self.norm: nn.RMSNorm | None = nn.RMSNorm(section.dim, NORM_EPS)
        self.head = None if section.tied else nn.Linear(section.dim, vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the transformer: normal with deviation 0.02, or 0.02 / sqrt(2 layers) in matrices that write to
        the residual stream.

        As in GPT-2: the stream's variance then does not grow with depth.
        """
        residual_std = INIT_STD / math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim < 2:
                nn.init.ones_(parameter)
            else:
                writes_residual = name.endswith(WRITE_RESIDUAL)
                nn.init.normal_(parameter, std=residual_std if writes_residual else INIT_STD)

    def part(self, layers: range) -> Transformer:
        """A copy of the transformer with these blocks only, embedding before the first, norm and head after the last.

        Parameters keep their names. Where the head is the embedding, the last part has that as well.
        """
        part = copy.deepcopy(self)
        ends = layers.stop == len(self.blocks)
        for layer in range(len(self.blocks)):
            if layer not in layers:
                delattr(part.blocks, str(layer))  # `del part.blocks[layer]` would number the others anew
        if layers.start > 0 and not (ends and self.head is None):
            part.embed = None
        if not ends:
            part.norm = part.head = None
        return part

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.is_floating_point()  # of the part before: (B, T, D)
        length = x.shape[1] * (self.hidden_pieces if hidden else 1)
        cos, sin = rotary_table(length, self.head_dim, self.rope_theta, x.device, self.piece * length)
        if not hidden:
            assert self.embed is not None
            x = self.embed(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        if self.norm is None:
            return x
        head = self.head or self.embed
        assert head is not None
        return F.linear(self.norm(x), head.weight)
