"""A row's model as a family of blocks with sizes: decided by its structure, never by its name alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from lading.errors import ConfigError
from lading.ir.request import Architecture

_HYBRID = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_OF = r"(?:_rank|_head_dim|_dim)?[ =:]*"
_MLA = {
    "qr": rf"\bq_lora{_OF}(\d+)",
    "kr": rf"kv_lora{_OF}(\d+)",
    "dn": rf"qk_nope{_OF}(\d+)",
    "dr": rf"qk_rope{_OF}(\d+)",
}
_LATENT = re.compile(r"\bmla\b|latent attention|kv_lora", re.IGNORECASE)
#: Latent attention of DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437), taken where its sizes are not told; models
#: narrower than this have no low rank of queries, as DeepSeek-V2-Lite and Moonlight.
_DEEPSEEK = {"kr": 512, "dn": 128, "dr": 64, "dv": 128}
_LOW_RANK_QUERIES, _QUERY_RANK = 5120, 1536
#: Words of attention's form that are read, or that change nothing here.
_ATTENTION_WORDS = re.compile(
    r"\b(?:gqa|mqa|mha|mla|multi-head|multi-query|grouped-query|grouped|query|latent|attention|causal|full|self|standard|"
    r"dense|flash|flash-?attention(?:-?\d)?|fa\d?|sdpa|cudnn|te|eager|unfused|fused|naive|math|vanilla|softmax|torch|pytorch|hopper|cutedsl|rope|rotary|alibi|learned|"
    r"absolute|positions?|bias|sinks?|no|with|and|of|heads?|kv|q|v|qk|norm|alternating|sliding|window(?:ed|s)?|swa|local|"
    r"global|every|other|layers?|tokens?|size|ratio|bi-?directional|non-?causal|encoder|masks?|only|without|xformers|"
    r"triton|products?|dropout|(?:left|right|un)?[- ]?padd(?:ed|ing)|batch(?:es|ed)?|an?|"
    r"attn_implementation|transformers'?|"
    r"default|memory[-_ ]efficient|beta|cudnn(?:_flash)?(?:_te)?|parts|einsum|masked_fill|bmm|matmul|"
    r"scaled_dot_product_attention|paddle|"
    r"[qkv]{1,2}_?(?:lora|nope|rope)?(?:_rank|_head_dim|_dim)?\d*|x|is|in)\b",
    re.IGNORECASE,
)
#: Ways to write FlashAttention and its number.
_FLASH = re.compile(r"\bflash[-_ ]?att(?:entio)?n(?:[-_ ]?v?\d(?:\.\d+)*)?|\bfa-?[1234]\b", re.IGNORECASE)
#: Words of attention without a causal mask: every token sees all.
_SEES_ALL = re.compile(
    r"bi-?directional|non-?causal|\b(?:no|not|without)(?: an?)? causal|\bencoder\b(?!-)|\bencoder-only\b|"
    r"\b\w*bert\w*\b|masked[- ](?:language|lm)|\bmlm\b|vision transformer|\bvi-?t\b",
    re.IGNORECASE,
)
_NO_SOFTMAX = re.compile(
    r"linear attention|lightning|retention|retnet|rwkv|deltanet|hyena|sparse attention|\bdsa\b|\bnsa\b|block-sparse",
    re.IGNORECASE,
)
_WINDOW = re.compile(
    r"(?:sliding[-_ ]?window|\bswa|windowed|local(?: attention)?|window)(?: attention)?(?: size)?(?: of)?[ (=:]*(\d+)",
    re.IGNORECASE,
)
#: Words for tasks of encoders whose head is not the vocabulary; its columns (start and end of an answer, two classes).
_NO_WORDS = re.compile(
    r"question[- ]answering|\bsquad\b|\bno (?:vocabulary|lm|mlm|language[- ]model) head\b|"
    r"(?:sequence|text|token|sentence) classification|\bglue\b|\bmrpc\b|\bmnli\b",
    re.IGNORECASE,
)
_ANSWERS = 2
#: Taken where a source gives no vocabulary: GPT-2's, padded as Megatron does.
_VOCABULARY = 51200
#: Taken where a diffusion transformer attends to text of untold length or width: T5's, as Wan and NeMo use it.
_TEXT_TOKENS = 512
_TEXT_WIDTH = 4096
#: Values of a token of latents where they are not told: a patch of 2 x 2 of 16 channels, and labels of ImageNet.
_PATCH = 64
_LABELS = 1000


def architecture_of(model: Mapping[str, Any], notes: str, pad_vocabulary_to: int) -> tuple[Architecture, list[str]]:
    """Find the architecture of a row's model, and what was taken for granted.

    Args:
        model: Fields of the row about its model.
        notes: Notes of the row, in which dropout, ALiBi and the like are told.
        pad_vocabulary_to: The vocabulary is rounded up to a multiple of this, down where it is negative.

    Raises:
        ConfigError: a size that the structure needs is missing or does not go with the others.
    """
    assumed: list[str] = []
    model = _completed(model, notes, assumed)
    for name in ("layers", "hidden", "heads", "seq_len"):
        if not model.get(name):
            raise ConfigError(f"model.{name}: expected a number above 0, got {model.get(name)}")
    symbols = _attention(model, assumed) | _vocabulary(model, pad_vocabulary_to, assumed)
    text = f"{model.get('note', '')} {model.get('attention', '')} {model.get('arch', '')} {notes}"
    symbols["f"] = int(model.get("ffn_hidden") or _default_ffn(model, assumed))
    if model.get("experts"):
        symbols |= _experts(model)
    if model.get("experts") and "attention sinks" in text:
        symbols["biased"] = 1
        assumed.append(
            "attention sinks as in GPT-OSS: its experts have biases and clamped gates, the sinks cost nothing"
        )
    if "mamba_heads" in model or "mamba" in text.lower():
        symbols |= _state_space(model)
    if _SEES_ALL.search(f"{model.get('kind', '')} {model.get('attention', '')}"):
        symbols["whole"] = 1
        if told := _NO_WORDS.search(notes):
            symbols["v"] = _ANSWERS
            assumed.append(f"a head of {_ANSWERS} columns, and no table of words: {told[0]!r}")
    if window := _window(model, notes):
        symbols["window"] = window
    if _is_diffusion(model):
        symbols |= _diffusion(model, text, assumed)
    architecture = Architecture(
        family=_family(model, text),
        symbols=symbols,
        blocks=_blocks(model, text),
        tied=bool(model.get("tied_embeddings", False)),
        predict_ahead=int(model.get("mtp_layers") or 0),
        parameters=float(model.get("params_b") or 0) * 1e9,
    )
    if "mtp_layers" in model and not model["mtp_layers"] and "mtp" in text.lower():
        assumed.append("no multi-token prediction, as the row's mtp_layers says")
    return architecture, assumed


#: Widths of MLPs that nobody states are multiples of this.
_WIDTH = 256


def _completed(model: Mapping[str, Any], notes: str, assumed: list[str]) -> dict[str, Any]:
    """Fields of a model, with those that its words or its number of parameters tell where they are not stated."""
    fields = dict(model)
    text = f"{model.get('note', '')} {model.get('attention', '')} {model.get('arch', '')} {notes}".lower()
    told = re.search(r"(\d+) (?:kv|key[-/ ]value) heads|kv_?heads ?= ?(\d+)|\bgqa-(\d+)\b", text)
    if "kv_heads" not in fields and told:
        fields["kv_heads"] = int(next(filter(None, told.groups())))
        assumed.append(f"{fields['kv_heads']} heads of keys and values: {told[0]!r}")
    if fields.get("experts"):
        if "topk" not in fields and (
            told := re.search(r"top-?_?k? ?=? ?(\d+)\b|(\d+) (?:active|activated) experts", text)
        ):
            fields["topk"] = int(told[1] or told[2])
            assumed.append(f"{fields['topk']} experts for each token: {told[0]!r}")
        width = int(fields.get("moe_ffn_hidden") or fields.get("ffn_hidden") or 0)
        told = re.search(r"(?:(\d+)|one|an?|(two)) (?:always[- ]on )?shared experts?", text)
        if "shared_expert_ffn" not in fields and told:
            fields["shared_expert_ffn"] = width * (int(told[1]) if told[1] else 2 if told[2] else 1)
            assumed.append(f"shared experts {fields['shared_expert_ffn']} wide: {told[0]!r}")
    elif not _is_diffusion(model) and all(fields.get(name) for name in ("layers", "hidden", "heads")):
        _complete_mlp(fields, text, assumed)
    return fields


def _complete_mlp(fields: dict[str, Any], text: str, assumed: list[str]) -> None:
    """Set whether an MLP is gated, and its width, where a row leaves them open: what is nearest to its parameters."""
    hidden, wide = int(fields["hidden"]), fields.get("ffn_hidden")
    heads = int(fields["heads"])
    head_dim = int(fields.get("head_dim") or hidden // heads)
    attention = 2 * hidden * head_dim * (heads + int(fields.get("kv_heads") or heads))
    tables = (1 if fields.get("tied_embeddings") else 2) * int(fields.get("vocab") or _VOCABULARY) * hidden
    each = (float(fields.get("params_b") or 0) * 1e9 - tables) / int(fields["layers"]) - attention
    if "gated_mlp" not in fields:
        named = re.search(r"swi?glu|geglu|gated", text)
        grouped = int(fields.get("kv_heads") or heads) != heads
        near = each > 0 and wide and abs(each - 3 * hidden * int(wide)) < abs(each - 2 * hidden * int(wide))
        fields["gated_mlp"] = bool(named or near or (grouped and "relu" not in text and not (each > 0 and wide)))
        why = named[0] if named else "nearest to its parameters" if each > 0 and wide else "as its heads tell"
        assumed.append(f"an MLP that is {'' if fields['gated_mlp'] else 'not '}gated: {why}")
    if not wide and fields["gated_mlp"]:
        width = each / (3 * hidden) if each > 0 else 8 * hidden / 3
        fields["ffn_hidden"] = max(_WIDTH, round(width / _WIDTH) * _WIDTH)
        assumed.append(f"an MLP {fields['ffn_hidden']} wide: {'by its parameters' if each > 0 else '8/3 of the width'}")


def unread_of_model(model: Mapping[str, Any]) -> list[str]:
    """Words of a row's model that no rule reads.

    Raises:
        ConfigError: attention, or the model as a whole, has a form that no table has.
    """
    attention, kind = str(model.get("attention", "")), str(model.get("kind", "")).lower()
    if found := _NO_SOFTMAX.search(attention):
        raise ConfigError(f"model.attention: expected softmax attention, got {attention!r}: no table has {found[0]!r}")
    arch = str(model.get("arch", ""))
    if found := _NO_SOFTMAX.search(f"{arch} {kind}"):
        raise ConfigError(f"model.arch: expected blocks with softmax attention, got {arch or kind!r}: no such table")
    if re.search(r"encoder-decoder|seq2seq|\bt5\b|enc-dec", kind):
        raise ConfigError(f"model.kind: expected a decoder, a mixture of experts or a DiT, got {kind!r}: no such table")
    left = re.sub(
        r"[\d.=:,;/()'+-]+",
        " ",
        _ATTENTION_WORDS.sub(" ", re.sub(r"\([^)]*\d[^)]*\)", " ", _FLASH.sub("flash", attention))),
    )
    unread = [f"model.attention: {' '.join(left.split())!r} in {attention!r}"] if left.strip() else []
    if kind and not re.search(
        rf"dense|moe|expert|dit|diffusion|hybrid|mamba|ssm|decoder|gpt|llama|causal|{_SEES_ALL.pattern}", kind
    ):
        unread.append(f"model.kind {kind!r}: simulated as a causal decoder of these sizes")
    if re.search(r"\b(?:gqa|mqa|grouped|multi-query)", attention, re.IGNORECASE) and not model.get("kv_heads"):
        unread.append(f"model.attention {attention!r}, but model.kv_heads is not stated: as many as heads")
    return unread


def _window(model: Mapping[str, Any], notes: str) -> int:
    """Tokens that windowed attention sees; 0 where there is none."""
    if model.get("window"):
        return int(model["window"])
    form = f"{model.get('note', '')} {model.get('attention', '')} {model.get('arch', '')}"
    found = _WINDOW.search(form) or re.search(r"sliding[- ]window *\(?(\d+)", notes)
    return int(found[1]) if found else 0


def _family(model: Mapping[str, Any], text: str) -> str:
    lowered = text.lower()
    if "mamba_heads" in model or "mamba" in lowered:
        return "mamba2"
    if _is_diffusion(model):
        return "wan" if _is_cross(model, text) else "dit"
    if _LATENT.search(str(model.get("attention", ""))) or "kv_lora" in lowered:
        return "mla-moe"
    if model.get("experts"):
        return "moe"
    if model.get("gated_mlp", False):
        return "llama"
    if model.get("kv_heads", model["heads"]) != model["heads"] or "squared relu" in lowered:
        return "nemotron"
    return "gpt"


def _is_diffusion(model: Mapping[str, Any]) -> bool:
    return bool(re.search(r"\bdit\b|diffusion", str(model.get("kind", "")).lower()))


def _is_cross(model: Mapping[str, Any], text: str) -> bool:
    """Whether blocks attend to text: told, or as their parameters are nearer to such blocks' than to adaLN's alone."""
    if re.search(r"cross[- ]attention|\bwan\b|wan ?2", f"{text} {model.get('name', '')}".lower()):
        return True
    width, mlp = float(model["hidden"]), float(model.get("ffn_hidden") or 4 * model["hidden"])
    each = float(model.get("params_b") or 0) * 1e9 / float(model["layers"])
    with_text, without = 8 * width**2 + 2 * width * mlp, 10 * width**2 + 2 * width * mlp
    return each > 0 and abs(each - with_text) < abs(each - without)


def _attention(model: Mapping[str, Any], assumed: list[str]) -> dict[str, int]:
    hidden, heads = int(model["hidden"]), int(model["heads"])
    kv_heads = int(model.get("kv_heads") or heads)
    sizes = {"h": hidden, "n": heads, "k": kv_heads, "d": int(model.get("head_dim") or hidden // heads)}
    text = str(model.get("attention", ""))
    if "kv_lora" not in text and _LATENT.search(text):
        sizes |= {**_DEEPSEEK, "qr": _QUERY_RANK if hidden >= _LOW_RANK_QUERIES else 0}
        assumed.append("latent attention of DeepSeek's sizes (ranks 1536 and 512, heads of 128 + 64): none are told")
        return sizes
    if "kv_lora" not in text:
        if "head_dim" not in model and hidden % heads:
            raise ConfigError(f"model: expected hidden a multiple of heads, or a head_dim, got {hidden} and {heads}")
        return sizes
    for name, pattern in _MLA.items():
        match = re.search(pattern, text.replace("no q_lora", ""))
        if match is None and name != "qr":
            raise ConfigError(f"model.attention: expected {name} (such as qk_nope128) for MLA, got {text!r}")
        sizes[name] = int(match[1]) if match else 0
    value = re.search(r"\bv(?:_head)?(?:_dim)?[ =:]*(\d+)", text)
    sizes["dv"] = int(value[1]) if value else sizes["dn"]
    return sizes


def _vocabulary(model: Mapping[str, Any], pad_to: int, assumed: list[str]) -> dict[str, int]:
    if _is_diffusion(model):
        return {}
    vocabulary = int(model.get("vocab") or 0)
    if not vocabulary:
        assumed.append(f"a vocabulary of {_VOCABULARY}")
        return {"v": _VOCABULARY}
    padded = -(-vocabulary // pad_to) * pad_to
    if padded != vocabulary:
        way = "cut" if pad_to < 0 else "padded"
        assumed.append(f"the vocabulary of {vocabulary} {way} to {padded}, a multiple of {abs(pad_to)}")
    return {"v": padded}


def _default_ffn(model: Mapping[str, Any], assumed: list[str]) -> int:
    width = int(model.get("moe_ffn_hidden") or 4 * int(model["hidden"]))
    assumed.append(f"an MLP {width} wide")
    return width


def _experts(model: Mapping[str, Any]) -> dict[str, int]:
    experts, active = int(model["experts"]), int(model.get("topk") or 0)
    if not 0 < active <= experts:
        raise ConfigError(f"model.topk: expected 1 to {experts} experts for each token, got {active}")
    sizes = {"e": experts, "a": active, "g": int(model.get("moe_ffn_hidden") or model.get("ffn_hidden") or 0)}
    if not sizes["g"]:
        raise ConfigError("model.moe_ffn_hidden: expected the width of an expert, got none")
    sizes["fs"] = int(model.get("shared_expert_ffn") or 0)
    if model.get("moe_latent_size"):
        sizes["latent"] = int(model["moe_latent_size"])
    return sizes


def _state_space(model: Mapping[str, Any]) -> dict[str, int]:
    names = {"mh": "mamba_heads", "md": "mamba_head_dim", "ms": "mamba_state", "mg": "mamba_groups"}
    missing = [field for field in names.values() if not model.get(field)]
    if missing:
        raise ConfigError(f"model: expected {', '.join(missing)} for state-space blocks, got none")
    return {symbol: int(model[field]) for symbol, field in names.items()}


def _diffusion(model: Mapping[str, Any], text: str, assumed: list[str]) -> dict[str, int]:
    """Sizes of a diffusion transformer: values of a patch, and what blocks are told, text or a label."""
    assumed.append(f"{_PATCH} values in a token")
    if not _is_cross(model, text):
        return {"p": _PATCH, "v": _LABELS}
    width = re.search(r"cross[- ]attention emb(?:edding)?s? *(\d+)", text)
    sizes = {"t": int(model.get("text_len") or _TEXT_TOKENS), "c": int(width[1]) if width else _TEXT_WIDTH, "p": _PATCH}
    if "text_len" not in model:
        assumed.append(f"text of {sizes['t']} tokens")
    if width is None:
        assumed.append(f"text features {sizes['c']} wide")
    return sizes


def _blocks(model: Mapping[str, Any], text: str) -> tuple[tuple[str, int], ...]:
    layers = int(model["layers"])
    if pattern := re.search(r"pattern ([M*E-]{4,})", text):
        kinds = [_HYBRID[c] for c in pattern[1]]
        if len(kinds) != layers:
            raise ConfigError(f"model.arch: expected a pattern of {layers} layers, got {len(kinds)}")
        return _runs(kinds)
    if not model.get("experts"):
        return _runs(_by_window(model, layers)) if _window(model, "") else (("block", layers),)
    moe = ["window"] if _window(model, "") else ["moe"]
    if moe == ["window"] and re.search(_ALTERNATING, text.lower()):
        moe = ["window", "full"]
    if (each := _experts_each(text.lower())) > 1:
        moe = ["dense"] * (each - 1) + moe
    dense = int(model.get("first_dense_layers") or 0)
    if dense > layers:
        raise ConfigError(f"model.first_dense_layers: expected at most {layers}, got {dense}")
    return _runs(["dense"] * dense + [moe[i % len(moe)] for i in range(layers - dense)])


#: Words for windows of attention in every other block; of experts in one of so many (options of frameworks too).
_ALTERNATING = (
    r"alternating *sliding|(?:sliding|window|local)[^,;|]{0,30}every (?:other|second|2nd) (?:layer|block)|"
    r"every (?:other|second|2nd) (?:layer|block)[^,;|]{0,20}(?:sliding|window|local)"
)
_EVERY_OTHER = r"(?:every other|alternate|every second|every 2nd) (?:transformer )?(?:layer|block)"
_EXPERTS_EACH = r"\b(?:moe[-_ ](?:layer[-_ ])?freq(?:uency)?|interleave_moe_layer_step|decoder_sparse_step)[ =:]*(\d+)"


def _experts_each(words: str) -> int:
    """Number of blocks of which one has experts."""
    if told := re.search(_EXPERTS_EACH, words):
        return int(told[1])
    return 2 if re.search(_EVERY_OTHER, re.sub(_ALTERNATING, " ", words)) else 1


def _by_window(model: Mapping[str, Any], layers: int) -> list[str]:
    """Kind of each block where attention is windowed: all, every other one, or so many for each that is not."""
    text = f"{model.get('note', '')} {model.get('attention', '')} {model.get('arch', '')}"
    many = r"(\d+) ?: ?1\b|(\d+) (?:local|windowed|sliding)\w* (?:layers )?(?:for|per|to) (?:each|every|one)"
    if ratio := re.search(many, text):
        each = int(next(filter(None, ratio.groups())))
    elif re.search(r"alternat|every other|interleav", text, re.IGNORECASE):
        each = 1
    else:
        return ["window"] * layers
    return ["full" if i % (each + 1) == each else "window" for i in range(layers)]


def _runs(kinds: Iterable[str]) -> tuple[tuple[str, int], ...]:
    return tuple((kind, len(list(group))) for kind, group in groupby(kinds))
