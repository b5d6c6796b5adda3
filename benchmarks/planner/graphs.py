"""Shapes of graphs that papers on placement use, as modules of torch with the layer sizes of the models' own papers.

Inception-V3, ResNet-50 and NASNet branch and join; GNMT is a grid of cells over layers and time; BERT is nearly a
chain; T5 has two; a U-Net has long skips; WaveNet has a skip from every layer; a RandWire stage is a random graph; a
layer of experts is many alike branches. Used by: Baechi (Inception-V3, GNMT, Transformer), Placeto (Inception-V3, NMT,
NASNet), GDP (RNN, WaveNet, Inception, AmoebaNet, Transformer), Moirai (Swin, GPT, AlphaFold), PESTO (NASNet, RNN,
Transformer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv(channels: int, out: int, size: int | tuple[int, int], stride: int = 1, *, same: bool = True) -> nn.Module:
    """Convolution, batch norm, ReLU."""
    sizes = (size, size) if isinstance(size, int) else size
    padding = (sizes[0] // 2, sizes[1] // 2) if same else (0, 0)
    return nn.Sequential(
        nn.Conv2d(channels, out, sizes, stride, padding, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=False)
    )


class Branches(nn.Module):
    """Every branch on the same input, joined along channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return torch.cat([branch(x_BCHW) for branch in self.branches], 1)


def _inception_a(c: int, pool: int) -> nn.Module:
    return Branches(
        conv(c, 64, 1),
        nn.Sequential(conv(c, 48, 1), conv(48, 64, 5)),
        nn.Sequential(conv(c, 64, 1), conv(64, 96, 3), conv(96, 96, 3)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(c, pool, 1)),
    )


def _inception_c(c: int, w: int) -> nn.Module:
    double = [conv(c, w, 1), conv(w, w, (7, 1)), conv(w, w, (1, 7)), conv(w, w, (7, 1)), conv(w, 192, (1, 7))]
    return Branches(
        conv(c, 192, 1),
        nn.Sequential(conv(c, w, 1), conv(w, w, (1, 7)), conv(w, 192, (7, 1))),
        nn.Sequential(*double),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(c, 192, 1)),
    )


def _inception_e(c: int) -> nn.Module:
    return Branches(
        conv(c, 320, 1),
        nn.Sequential(conv(c, 384, 1), Branches(conv(384, 384, (1, 3)), conv(384, 384, (3, 1)))),
        nn.Sequential(conv(c, 448, 1), conv(448, 384, 3), Branches(conv(384, 384, (1, 3)), conv(384, 384, (3, 1)))),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(c, 192, 1)),
    )


def inception_v3() -> nn.Module:
    """Szegedy et al. 2016, arXiv 1512.00567, table 1, without the auxiliary head."""
    b = Branches(
        conv(288, 384, 3, 2, same=False),
        nn.Sequential(conv(288, 64, 1), conv(64, 96, 3), conv(96, 96, 3, 2, same=False)),
        nn.MaxPool2d(3, 2),
    )
    d = Branches(
        nn.Sequential(conv(768, 192, 1), conv(192, 320, 3, 2, same=False)),
        nn.Sequential(
            conv(768, 192, 1), conv(192, 192, (1, 7)), conv(192, 192, (7, 1)), conv(192, 192, 3, 2, same=False)
        ),
        nn.MaxPool2d(3, 2),
    )
    stem = [conv(3, 32, 3, 2, same=False), conv(32, 32, 3, same=False), conv(32, 64, 3), nn.MaxPool2d(3, 2)]
    stem += [conv(64, 80, 1), conv(80, 192, 3, same=False), nn.MaxPool2d(3, 2)]
    body = [_inception_a(192, 32), _inception_a(256, 64), _inception_a(288, 64), b]
    body += [_inception_c(768, 128), _inception_c(768, 160), _inception_c(768, 160), _inception_c(768, 192), d]
    body += [_inception_e(1280), _inception_e(2048)]
    return nn.Sequential(*stem, *body, _classifier(2048))


def _classifier(channels: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class Bottleneck(nn.Module):
    """A residual block of ResNet-50."""

    def __init__(self, c: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(c, width, 1), conv(width, width, 3, stride), conv(width, 4 * width, 1))
        self.skip = conv(c, 4 * width, 1, stride) if stride > 1 or c != 4 * width else nn.Identity()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.body(x_BCHW) + self.skip(x_BCHW)


def resnet50() -> nn.Module:
    """He et al. 2016, arXiv 1512.03385, table 1."""
    layers: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    c = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for place in range(count):
            layers.append(Bottleneck(c, width, stride if place == 0 else 1))
            c = 4 * width
    return nn.Sequential(*layers, _classifier(c))


def _separable(c: int, size: int, stride: int = 1) -> nn.Module:
    def one(step: int) -> list[nn.Module]:
        depth = nn.Conv2d(c, c, size, step, size // 2, groups=c, bias=False)
        return [nn.ReLU(), depth, nn.Conv2d(c, c, 1, bias=False), nn.BatchNorm2d(c)]

    return nn.Sequential(*one(stride), *one(1))


class NasCell(nn.Module):
    """A normal (or, with stride 2, reduction) cell of NASNet-A: five sums of two branches, of the two inputs."""

    _NORMAL = ((3, 1, 0, 1), (5, 0, 3, 0), (-3, 1, 0, 0), (-3, 0, -3, 0), (5, 0, 3, 0))

    def __init__(self, before: int, c: int, out: int, stride: int = 1, halve: int = 1) -> None:
        super().__init__()
        self.old = nn.Sequential(nn.ReLU(), nn.Conv2d(before, out, 1, halve, bias=False), nn.BatchNorm2d(out))
        self.new = nn.Sequential(nn.ReLU(), nn.Conv2d(c, out, 1, bias=False), nn.BatchNorm2d(out))
        self.pairs = nn.ModuleList()
        sizes = (
            ((5, 7), (-3, 7), (-3, 5), (-3, 3), (3, -3)) if stride > 1 else ((3, 0), (3, 5), (-3, 0), (-3, -3), (5, 3))
        )
        for pair in sizes:
            self.pairs.append(nn.ModuleList([self._branch(out, size, stride) for size in pair]))

    @staticmethod
    def _branch(c: int, size: int, stride: int) -> nn.Module:
        if size > 0:
            return _separable(c, size, stride)
        return nn.AvgPool2d(-size, stride, 1) if size else nn.Identity()

    def forward(self, old: Tensor, new: Tensor) -> Tensor:
        h, g = self.new(new), self.old(old)
        sources = ((h, h), (g, h), (h, g), (g, g), (g, g))
        parts = [left(a) + right(b) for (left, right), (a, b) in zip(self.pairs, sources, strict=True)]
        return torch.cat(parts, 1)


class NasNet(nn.Module):
    """NASNet-A (Zoph et al. 2018, arXiv 1707.07012, figure 4) with 4 cells a stage and 44 filters: NASNet-A Mobile."""

    def __init__(self, filters: int = 44, cells: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32))
        self.cells = nn.ModuleList()
        before, c, halve = 32, 32, 1
        for stage in range(3):
            width = filters * 2**stage
            for place in range(cells + 1):
                stride = 2 if place == 0 else 1
                self.cells.append(NasCell(before, c, width, stride, halve))
                before, c, halve = c, 5 * width, stride
        self.head = _classifier(c)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        old = new = self.stem(x_BCHW)
        for cell in self.cells:
            old, new = new, cell(old, new)
        return self.head(F.relu(new))


class Gnmt(nn.Module):
    """Wu et al. 2016, arXiv 1609.08144: LSTM encoder and decoder over time, attention from the first decoder layer."""

    def __init__(self, layers: int = 8, width: int = 1024, words: int = 32_000) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.encoder = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.decoder = nn.ModuleList(nn.LSTMCell(2 * width, width) for _ in range(layers))
        self.query = nn.Linear(width, width)
        self.head = nn.Linear(width, words)

    def forward(self, source_BT: Tensor, target_BT: Tensor) -> Tensor:
        zero = torch.zeros(source_BT.shape[0], self.query.in_features, device=source_BT.device)
        words = self.source(source_BT).unbind(1)
        rows = list(words)
        for cell in self.encoder:
            rows = self._over_time(cell, rows, zero)
        memory_BTH = torch.stack(rows, 1)
        states = [(zero, zero)] * len(self.decoder)
        context, outputs = zero, []
        for x in self.target(target_BT).unbind(1):
            row = x
            for place, cell in enumerate(self.decoder):
                states[place] = cell(torch.cat([row, context], 1), states[place])
                out = states[place][0]
                if place == 0:
                    scores = torch.bmm(memory_BTH, self.query(out).unsqueeze(2)).softmax(1)
                    context = (memory_BTH * scores).sum(1)
                row = out + row if place > 1 else out
            outputs.append(row)
        return self.head(torch.stack(outputs, 1))

    @staticmethod
    def _over_time(cell: nn.Module, rows: list[Tensor], zero: Tensor) -> list[Tensor]:
        state, found = (zero, zero), []
        for row in rows:
            state = cell(row, state)
            found.append(state[0])
        return found


class WaveNet(nn.Module):
    """van den Oord et al. 2016, arXiv 1609.03499: three stacks of ten dilated layers, a skip from each to the end."""

    def __init__(self, channels: int = 128, skips: int = 256, stacks: int = 3, layers: int = 10) -> None:
        super().__init__()
        self.first = nn.Conv1d(256, channels, 1)
        dilations = [2**n for _ in range(stacks) for n in range(layers)]
        self.gates = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 2, dilation=d) for d in dilations)
        self.next = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in dilations)
        self.skips = nn.ModuleList(nn.Conv1d(channels, skips, 1) for _ in dilations)
        self.dilations = dilations
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(skips, skips, 1), nn.ReLU(), nn.Conv1d(skips, 256, 1))

    def forward(self, x_BCT: Tensor) -> Tensor:
        x, skipped = self.first(x_BCT), []
        for gate, onward, skip, dilation in zip(self.gates, self.next, self.skips, self.dilations, strict=True):
            a, b = gate(F.pad(x, (dilation, 0))).chunk(2, 1)
            z = torch.tanh(a) * torch.sigmoid(b)
            skipped.append(skip(z))
            x = x + onward(z)
        return self.last(torch.stack(skipped).sum(0))


class RandWire(nn.Module):
    """Xie et al. 2019, arXiv 1904.01569: stages whose wiring is a Watts-Strogatz graph WS(4, 0.75) of 32 nodes."""

    def __init__(self, channels: int = 78, nodes: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, channels // 2, 3, 2), conv(channels // 2, channels, 3, 2))
        self.stages = nn.ModuleList()
        self.wires: list[list[list[int]]] = []
        for stage in range(3):
            width = channels * 2**stage
            own = nn.ModuleList()
            wires = _watts_strogatz(nodes, 4, 0.75, Random(stage))
            for into in wires:
                first = not into
                c = (width if stage == 0 else width // 2) if first else width
                own.append(self._node(c, width, 2 if first else 1))
            self.stages.append(own)
            self.wires.append(wires)
        self.head = _classifier(channels * 4)

    @staticmethod
    def _node(c: int, out: int, stride: int) -> nn.Module:
        depth = nn.Conv2d(c, c, 3, stride, 1, groups=c, bias=False)
        return nn.Sequential(nn.ReLU(), depth, nn.Conv2d(c, out, 1, bias=False), nn.BatchNorm2d(out))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x = self.stem(x_BCHW)
        for stage, wires in zip(self.stages, self.wires, strict=True):
            outs: list[Tensor] = []
            for node, into in zip(stage, wires, strict=True):  # pyright: ignore[reportArgumentType]
                outs.append(node(torch.stack([outs[i] for i in into]).mean(0) if into else x))
            used = {i for into in wires for i in into}
            x = torch.stack([out for i, out in enumerate(outs) if i not in used]).mean(0)
        return self.head(x)


def _watts_strogatz(nodes: int, near: int, rewired: float, random: Random) -> list[list[int]]:
    """For each node those before it that it takes from: a ring of ``near`` neighbors, rewired at random."""
    pairs: set[tuple[int, int]] = set()
    for step in range(1, near // 2 + 1):
        for a in range(nodes):
            b = (a + step) % nodes
            if random.random() < rewired:
                free = [c for c in range(nodes) if c != a and (min(a, c), max(a, c)) not in pairs]
                b = random.choice(free)
            pairs.add((min(a, b), max(a, b)))
    return [sorted(a for a, b in pairs if b == node) for node in range(nodes)]


class Experts(nn.Module):
    """Blocks of experts that choose their tokens (Zhou et al. 2022, arXiv 2202.09368), so that shapes are fixed."""

    def __init__(self, width: int = 1024, hidden: int = 4096, experts: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(layers))
        self.experts = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(experts)
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, x_TH: Tensor) -> Tensor:
        for gate, experts in zip(self.gates, self.experts, strict=True):
            shares_TE = gate(x_TH).softmax(1)
            total = x_TH
            for number, expert in enumerate(experts):  # pyright: ignore[reportArgumentType]
                share, rows = shares_TE[:, number].topk(2 * x_TH.shape[0] // len(self.experts[0]))
                total = total.index_add(0, rows, expert(x_TH[rows]) * share.unsqueeze(1))
            x_TH = total
        return self.head(x_TH)


@dataclass(frozen=True)
class Shape:
    """A model and its batch.

    Attributes:
        loss: ``loss(model, batch)``.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Tensor]


def _classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _images(count: int, side: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"x": torch.zeros(count, 3, side, side), "y": torch.zeros(count, dtype=torch.int64)}


def _translate(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["source"], batch["target"]).flatten(0, 1), batch["next"].flatten())


def _hear(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _denoise(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"], batch["t"]).sample, batch["y"])


def _own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def _tokens(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def _swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    return SwinForImageClassification(SwinConfig(drop_path_rate=0.0, num_labels=1000))


def _unet() -> nn.Module:
    from diffusers import UNet2DModel  # pyright: ignore[reportPrivateImportUsage]

    down = ("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "DownBlock2D")
    up = ("UpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D")
    widths = (128, 256, 384, 512)
    return UNet2DModel(sample_size=64, block_out_channels=widths, down_block_types=down, up_block_types=up)


SHAPES = (
    Shape("inception-v3", inception_v3, _images(64, 299), _classify),
    Shape("resnet-50", resnet50, _images(64, 224), _classify),
    Shape("nasnet-a", NasNet, _images(64, 224), _classify),
    Shape(
        "gnmt", Gnmt,
        lambda: {"source": _tokens(128, 16), "target": _tokens(128, 16), "next": _tokens(128, 16)}, _translate,
    ),
    Shape(
        "bert-base", _bert,
        lambda: {"input_ids": _tokens(32, 128), "labels": _tokens(32, 128)}, _own_loss,
    ),
    Shape(
        "t5-base", _t5,
        lambda: {"input_ids": _tokens(16, 128), "labels": _tokens(16, 128)}, _own_loss,
    ),
    Shape(
        "swin-tiny", _swin,
        lambda: {"pixel_values": torch.zeros(32, 3, 224, 224), "labels": _tokens(32)}, _own_loss,
    ),
    Shape(
        "unet", _unet,
        lambda: {"x": torch.zeros(8, 3, 64, 64), "t": _tokens(8), "y": torch.zeros(8, 3, 64, 64)}, _denoise,
    ),
    Shape(
        "wavenet", WaveNet,
        lambda: {"x": torch.zeros(4, 256, 8000), "y": _tokens(4, 8000)}, _hear,
    ),
    Shape("randwire", RandWire, _images(64, 224), _classify),
    Shape("experts", Experts, lambda: {"x": torch.zeros(4096, 1024), "y": _tokens(4096)}, _classify),
)  # fmt: skip
