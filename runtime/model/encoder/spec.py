"""The description of an encoder: a transformer whose rows are pooled to one vector, or to scores, per text.

Every `EncoderSpec` can be run: the readers of this package refuse all other values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..spec import DecoderSpec, Rope

ANSWER = "answer"  # the tensor of a projection that no file has: one row, made from the rows of `AnswerRows`
Pooling = Literal["mean", "first", "last"]
MlpActivation = Literal["gelu", "gelu_tanh", "relu", "silu"]  # gelu: with erf; gelu_tanh: its approximation
Activation = Literal["none", "tanh", "gelu", "gelu_tanh", "relu"]  # activation after pooling
ScoreActivation = Literal["sigmoid", "identity"]
MessageFormat = Literal[
    "auto", "flat", "structured"
]  # contents are texts, or lists of parts; auto: the form that the template needs


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderNames:
    """The names of a checkpoint's tensors, without `.weight` and `.bias`; a layer's names follow `layer`.

    `qkv` and `up` have one name where the checkpoint stores these matrices stacked in one tensor.
    """

    words: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    layer: str = "encoder.layer.{}."  # {}: the number of the layer
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    o: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: tuple[str, ...] = ("intermediate.dense",)  # one tensor; with a gate: gate, then up
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    final_norm: str = "final_norm"
    distances: str = "encoder.relative_attention_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class BertSpec:
    """A bidirectional transformer, as BERT and its successors. RMS norms are only possible with `pre_norms`."""

    family: str  # model_type: "bert", …
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_position_embeddings: int  # tokens of the longest text
    activation: MlpActivation
    gated: bool = False  # the MLP is down(activation(gate(x)) * up(x)), not down(activation(up(x)))
    up_first: bool = False  # a tensor with gate and up has up above
    num_positions: int = 0  # rows of the table of learned positions; 0: none
    first_position: int = 0  # the row of a text's first token
    num_types: int = 0  # rows of the table of token types; 0: none
    num_distances: int = 0  # rows of the table of scores' biases, by the distance of key and query; 0: no bias
    ropes: tuple[Rope | None, ...]  # one per layer; None: heads are not rotated
    windows: tuple[int, ...]  # one per layer: largest distance of a token that another one attends to; 0: no limit
    norm_kind: Literal["layer", "rms"] = "layer"
    pre_norms: bool = False  # norms before attention and MLP and at the end, instead of after the residual additions
    qkv_bias: bool = True
    o_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
    norm_bias: bool = True
    names: EncoderNames = EncoderNames()
    # tensor -> type, for tensors in blocks of integers; the type does not affect shapes
    quantized: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A linear layer after pooling: y = norm(activation(x @ weight.T + bias))."""

    tensor: str  # tensor's name, without `.weight` and `.bias`
    in_features: int
    out_features: int
    bias: bool = True
    activation: Activation = "none"
    norm: str | None = None  # the name of a layer norm; None: no norm
    norm_bias: bool = False
    norm_eps: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRows:
    """A score by a decoder: the logit of the token for true, less the logit of the token for false if there is one."""

    matrix: str  # the tensor with a row for each token
    true: int  # token ids
    false: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """A model that makes one vector of each text, or scores it."""

    body: BertSpec | DecoderSpec  # a decoder attends without pages
    causal: bool = True  # True: a decoder; False: rows also attend to later rows, and windows are as in `BertSpec`
    pooling: Pooling
    projections: tuple[Projection, ...] = ()
    normalize: bool = False  # vectors have length 1
    num_labels: int = 0  # scores of a text; 0: the result is a vector
    score_activation: ScoreActivation = "identity"  # function from a label's value to a score
    labels: tuple[str, ...] = ()  # names of a classifier's labels; (): it has none
    is_multi_label: bool = False  # a text may have any number of labels
    max_model_len: int  # tokens of the longest text
    lower_case: bool = False  # texts are lower-cased before they are tokenized
    messages: MessageFormat | None = None  # format of a pair for the chat template; None: the tokenizer joins pairs
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    # The token that is skipped at the end of a text, even repeatedly; None: the last token is pooled.
    pad_token_id: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)  # name -> text that goes before an input
    default_prompt: str | None = None  # name of the prompt for inputs without a prompt
    matryoshka: tuple[int, ...] = ()  # smaller numbers of dimensions that the model was trained for; (): not known
    tensor_prefix: str = ""  # prefix of the body's names in a checkpoint with a head
    files: Mapping[str, str] = field(default_factory=dict)  # folder of a projection's own file -> prefix of its tensors
    answer: AnswerRows | None = None  # source of the projection `ANSWER`

    @property
    def family(self) -> str:
        return self.body.family

    @property
    def hidden_size(self) -> int:
        return self.body.hidden_size

    @property
    def dimensions(self) -> int:
        """Columns of the result: elements of a vector, or labels."""
        return self.projections[-1].out_features if self.projections else self.hidden_size


CANNOT_POOL = (
    "a decoder that makes vectors must have no attention sinks, no soft cap of scores, no norm over all heads "
    "together, no LayerNorm of heads, no norm of heads after their rotation, no scales of queries, no gates of heads, "
    "no latent attention, no layers that differ in their heads and no layers with states"
)


def cannot_pool(spec: DecoderSpec) -> bool:
    """Return whether a decoder has parts that attention without pages does not compute."""
    in_heads = (spec.sinks, spec.attention_softcap, spec.qk_norm_rows, spec.gated_heads, spec.query_scales)
    other_heads = (spec.qk_norm and spec.qk_norm_kind != "rms", spec.kv_heads, spec.latent)
    return any((*in_heads, *other_heads, spec.convolutions, spec.delta, spec.mamba))
