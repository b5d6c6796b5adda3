"""A decoder of parts: norms, attention (grouped or latent), MLPs of three kinds, and experts to which tokens go.

Queries, keys and values come from one product, and so do gate and value of an MLP.

This is how training frameworks lay the architectures out; ``lading.models.llama`` has a product for each.

Shapes: B batch, T tokens, D width, N query heads, K key-value heads, H head width, F hidden width, V vocabulary,
E experts, A experts of a token, G hidden width of an expert, S = B * T, R = S * A rows sent to experts.
Source: Shoeybi et al. 2019 (Megatron-LM); Jiang et al. 2024 (Mixtral); DeepSeek-AI 2024 (DeepSeek-V2: latent attention,
shared experts; V3: sigmoid router); Parmar et al. 2024 (Nemotron-4: squared ReLU); MosaicML 2023 (MPT: no biases).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from lading.errors import ConfigError
from lading.models.common import check_tokens, init_normal
from lading.models.llama import LlamaConfig, RMSNorm, Rope
from lading.models.loss import next_byte_loss
from tools.models.mamba import Mamba, MambaConfig

#: What a block may have, in this order.
PARTS = ("attention", "mamba", "mlp", "experts")
MLPS = ("swiglu", "gelu", "relu2")


@dataclass(frozen=True, kw_only=True)
class PartsConfig(LlamaConfig):
    """Sizes and parts of a decoder.

    Attributes:
        norm: "rms" or "layer".
        mlp: "swiglu", "gelu" or "relu2" (squared ReLU, no gate).
        bias: Whether linear layers have one.
        norm_bias: Whether layer norms have one.
        rotary: Positions are rotary; otherwise attention knows none (ALiBi inside a fused kernel costs nothing more).
        parts: Parts of each block, among ``PARTS``.
        mamba: Sizes of a state-space layer.
        num_experts, num_active, expert_dim: Experts, how many a token uses, and their hidden width.
        ahead: Tokens beyond the next that are predicted, each by a block of its own (DeepSeek-V3).
        experts_dim: Width that tokens are brought to before they go to experts (Nemotron-3); 0 means ``dim``.
        shared_dim: Hidden width of an MLP that every token of a block with experts uses; 0 means none.
        dense_layers: First blocks that have an MLP in the place of experts.
        sigmoid_router: Scores by sigmoid (DeepSeek-V3), else by softmax over the chosen.
        query_rank, latent_rank: Ranks of latent attention's queries (0: none) and keys and values; 0 means plain heads.
        nope_size, rope_size, value_size: Width of the parts of a head in latent attention.
    Raises:
        ConfigError: a part is not known.
    """

    norm: str = "rms"
    mlp: str = "swiglu"
    bias: bool = False
    norm_bias: bool = False
    rotary: bool = True
    parts: tuple[str, ...] = ("attention", "mlp")
    mamba: MambaConfig | None = None
    num_experts: int = 0
    num_active: int = 0
    expert_dim: int = 0
    ahead: int = 0
    experts_dim: int = 0
    shared_dim: int = 0
    dense_layers: int = 0
    sigmoid_router: bool = False
    query_rank: int = 0
    latent_rank: int = 0
    nope_size: int = 0
    rope_size: int = 0
    value_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mlp not in MLPS:
            raise ConfigError(f"expected an mlp among {', '.join(MLPS)}, got {self.mlp!r}")
        if not self.parts or set(self.parts) - set(PARTS) or ("mamba" in self.parts and self.mamba is None):
            raise ConfigError(f"expected parts among {', '.join(PARTS)} (mamba with its sizes), got {self.parts}")
        if "experts" in self.parts and not 0 < self.num_active <= self.num_experts:
            raise ConfigError(f"expected 1 to {self.num_experts} active experts, got {self.num_active}")


def _norm(config: PartsConfig, dim: int) -> nn.Module:
    if config.norm == "rms":
        return RMSNorm(dim, config.norm_eps)
    return nn.LayerNorm(dim, bias=config.norm_bias)


class PartsMLP(nn.Module):
    """An MLP whose gate, if it has one, is in one product with what it gates. Shapes: x_...D -> y_...D."""

    def __init__(self, config: PartsConfig, hidden: int) -> None:
        super().__init__()
        self.kind = config.mlp
        self.up = nn.Linear(config.dim, hidden * (2 if self.kind == "swiglu" else 1), bias=config.bias)
        self.down = nn.Linear(hidden, config.dim, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the MLP over the last dim: x_...D -> y_...D."""
        return self.down(activated(self.up(x), self.kind))


def activated(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Apply the function between the products of an MLP, x_...F; "swiglu" halves the last dim."""
    if kind == "swiglu":
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value
    return F.gelu(x) if kind == "gelu" else F.relu(x).square()


class FusedAttention(nn.Module):
    """Causal grouped-query attention, one product for queries, keys and values. Shapes: x_BTD -> y_BTD."""

    def __init__(self, config: PartsConfig) -> None:
        super().__init__()
        self.config = config
        self.widths = [n * config.head_dim for n in (config.num_heads, config.kv_heads, config.kv_heads)]
        self.qkv = nn.Linear(config.dim, sum(self.widths), bias=config.bias)
        self.out = nn.Linear(self.widths[0], config.dim, bias=config.bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x_BTD: torch.Tensor, rope: nn.Module) -> torch.Tensor:
        """Attend to this token and those before: x_BTD -> y_BTD."""
        width = self.config.head_dim
        parts = self.qkv(x_BTD).split(self.widths, dim=-1)
        q_BNTH, k_BKTH, v_BKTH = (part.unflatten(2, (-1, width)).transpose(1, 2) for part in parts)
        q_BNTH, k_BKTH = rope(self.q_norm(q_BNTH)), rope(self.k_norm(k_BKTH))
        grouped = self.config.kv_heads != self.config.num_heads
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=grouped)
        return self.out(y_BNTH.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Causal attention whose keys and values come from a latent vector of low rank. Shapes: x_BTD -> y_BTD."""

    def __init__(self, config: PartsConfig) -> None:
        super().__init__()
        self.config = config
        heads, qk = config.num_heads, config.nope_size + config.rope_size
        if config.query_rank:
            self.q_down = nn.Linear(config.dim, config.query_rank, bias=False)
            self.q_norm = RMSNorm(config.query_rank, config.norm_eps)
        self.q_up = nn.Linear(config.query_rank or config.dim, heads * qk, bias=False)
        self.kv_down = nn.Linear(config.dim, config.latent_rank + config.rope_size, bias=False)
        self.kv_norm = RMSNorm(config.latent_rank, config.norm_eps)
        self.kv_up = nn.Linear(config.latent_rank, heads * (config.nope_size + config.value_size), bias=False)
        self.out = nn.Linear(heads * config.value_size, config.dim, bias=False)

    def forward(self, x_BTD: torch.Tensor, rope: nn.Module) -> torch.Tensor:
        """Attend to this token and those before: x_BTD -> y_BTD."""
        config, heads = self.config, self.config.num_heads
        latent = self.q_norm(self.q_down(x_BTD)) if config.query_rank else x_BTD
        q_BNTH = self.q_up(latent).unflatten(2, (heads, -1)).transpose(1, 2)
        q_nope, q_rope = q_BNTH.split([config.nope_size, config.rope_size], dim=-1)
        low, k_rope = self.kv_down(x_BTD).split([config.latent_rank, config.rope_size], dim=-1)
        kv_BNTH = self.kv_up(self.kv_norm(low)).unflatten(2, (heads, -1)).transpose(1, 2)
        k_nope, v_BNTH = kv_BNTH.split([config.nope_size, config.value_size], dim=-1)
        k_rope = rope(k_rope[:, None]).expand(-1, heads, -1, -1)
        q_BNTH, k_BNTH = torch.cat((q_nope, rope(q_rope)), dim=-1), torch.cat((k_nope, k_rope), dim=-1)
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
        return self.out(y_BNTH.transpose(1, 2).flatten(2))


class DispatchedExperts(nn.Module):
    """Experts that see only the tokens the router sends them, all in two grouped products. Shapes: x_BTD -> y_BTD.

    Rows are sorted by expert, so the tokens of one lie together; weights multiply inside, where rows are narrow.
    """

    def __init__(self, config: PartsConfig) -> None:
        super().__init__()
        self.config = config
        experts, width = config.num_experts, config.expert_dim * (2 if config.mlp == "swiglu" else 1)
        dim = config.experts_dim or config.dim
        self.router = nn.Linear(config.dim, experts, bias=False)
        self.into = nn.Linear(config.dim, dim, bias=False) if config.experts_dim else nn.Identity()
        self.back = nn.Linear(dim, config.dim, bias=False) if config.experts_dim else nn.Identity()
        self.up_EDG = nn.Parameter(torch.empty(experts, dim, width))
        self.down_EGD = nn.Parameter(torch.empty(experts, config.expert_dim, dim))
        self.shared = PartsMLP(config, config.shared_dim) if config.shared_dim else None

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Route, dispatch, compute and add up: x_BTD -> y_BTD."""
        x_SD = x_BTD.flatten(0, 1)
        sent_SD = self.into(x_SD)
        weights_SA, chosen_SA = self.route(x_SD)
        chosen_R = chosen_SA.flatten()
        order_R = chosen_R.argsort(stable=True)
        none_E = chosen_R.new_zeros(self.config.num_experts)
        ends_E = none_E.scatter_add(0, chosen_R, torch.ones_like(chosen_R)).cumsum(0).to(torch.int32)
        tokens_R = order_R // self.config.num_active
        hidden_RG = activated(F.grouped_mm(sent_SD[tokens_R], self.up_EDG, offs=ends_E), self.config.mlp)
        hidden_RG = hidden_RG * weights_SA.flatten()[order_R].to(hidden_RG.dtype)[:, None]
        y_RD = F.grouped_mm(hidden_RG, self.down_EGD, offs=ends_E)
        y_SD = self.back(torch.zeros_like(sent_SD).index_add(0, tokens_R, y_RD))
        if self.shared is not None:
            y_SD = y_SD + self.shared(x_SD)
        return y_SD.unflatten(0, x_BTD.shape[:2])

    def route(self, x_SD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights in float32 and numbers of each token's experts: x_SD -> weights_SA, chosen_SA."""
        logits_SE = self.router(x_SD).float()
        if not self.config.sigmoid_router:
            top_SA, chosen_SA = logits_SE.topk(self.config.num_active, dim=-1)
            return top_SA.softmax(dim=-1), chosen_SA
        top_SA, chosen_SA = logits_SE.sigmoid().topk(self.config.num_active, dim=-1)
        return top_SA / top_SA.sum(dim=-1, keepdim=True), chosen_SA


class PartsBlock(nn.Module):
    """The parts of a block, each normalised before and added to the stream after."""

    def __init__(self, config: PartsConfig, parts: tuple[str, ...]) -> None:
        super().__init__()
        self.parts = parts
        if "attention" in parts:
            self.attn_norm = _norm(config, config.dim)
            self.attn = LatentAttention(config) if config.latent_rank else FusedAttention(config)
        if "mamba" in parts:
            assert config.mamba is not None  # as the configuration checks
            self.mamba_norm = _norm(config, config.dim)
            self.mamba = Mamba(config.mamba)
        if "mlp" in parts:
            self.mlp_norm = _norm(config, config.dim)
            self.mlp = PartsMLP(config, config.mlp_dim)
        if "experts" in parts:
            self.experts_norm = _norm(config, config.dim)
            self.experts = DispatchedExperts(config)

    def forward(self, x_BTD: torch.Tensor, rope: nn.Module) -> torch.Tensor:
        """Apply the block's parts in turn: x_BTD -> x_BTD."""
        if "attention" in self.parts:
            x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), rope)
        if "mamba" in self.parts:
            x_BTD = x_BTD + self.mamba(self.mamba_norm(x_BTD))
        if "mlp" in self.parts:
            x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        if "experts" in self.parts:
            x_BTD = x_BTD + self.experts(self.experts_norm(x_BTD))
        return x_BTD


class AheadBlock(nn.Module):
    """A block that joins the stream with the embedding of a later token. Shapes: x_BTD, tokens_BT -> y_BTD."""

    def __init__(self, config: PartsConfig, tokens: nn.Embedding, distance: int) -> None:
        super().__init__()
        self.distance = distance
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.tokens.weight = tokens.weight
        self.x_norm, self.token_norm = _norm(config, config.dim), _norm(config, config.dim)
        self.join = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.block = PartsBlock(config, config.parts)

    def forward(self, x_BTD: torch.Tensor, tokens_BT: torch.Tensor, rope: nn.Module) -> torch.Tensor:
        """Make the stream from which one token further is predicted: x_BTD, tokens_BT -> y_BTD."""
        later_BTD = self.tokens(tokens_BT.roll(-self.distance, 1))
        both = torch.cat((self.x_norm(x_BTD), self.token_norm(later_BTD)), dim=-1)
        return self.block(self.join(both), rope)


class PartsDecoder(nn.Module):
    """Decoder of ``layers`` between an embedding and a head.

    Raises:
        ConfigError: on a batch longer than ``max_seq_len``.
    Shapes: tokens_BT (int64) -> logits_BTV, or a tuple of them, one for each token ahead.
    """

    Config = PartsConfig
    loss = staticmethod(next_byte_loss)

    def __init__(self, config: PartsConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.rope = Rope(config, config.rope_size or None) if config.rotary else nn.Identity()
        dense = tuple("mlp" if part == "experts" else part for part in config.parts)
        self.layers = nn.ModuleList(
            PartsBlock(config, dense if layer < config.dense_layers else config.parts)
            for layer in range(config.num_layers)
        )
        self.ahead = nn.ModuleList(AheadBlock(config, self.tokens, 1 + i) for i in range(config.ahead))
        self.norm = _norm(config, config.dim)
        self.ahead_norms = nn.ModuleList(_norm(config, config.dim) for _ in range(config.ahead))
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        init_normal(self, config.num_layers, residual=("out.weight", "down.weight", "down_EGD"))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Compute logits of the next token, and of those further ahead: tokens_BT -> logits_BTV, or a tuple of them."""
        check_tokens(tokens_BT, self.config.max_seq_len)
        x_BTD = self.tokens(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, self.rope)
        streams = [x_BTD]
        for ahead in self.ahead:
            streams.append(ahead(streams[-1], tokens_BT, self.rope))
        norms = (self.norm, *self.ahead_norms)
        logits = tuple(self.head(norm(x)) for norm, x in zip(norms, streams, strict=True))
        return logits if self.config.ahead else logits[0]
