"""Write the heads of `heads/`, which predict further tokens (MTP), and what a layer of transformers computes with them.

    python tests/goldens/make_head_goldens.py    # needs torch and transformers 5

The heads belong to the models of the folders beside this file. transformers has no heads: each is made here of a layer
with full attention, two norms and a matrix, as Qwen publishes them. Per head a file of tensors and golden.npz with
    token_ids  int64 [tokens]
    hidden     float32 [tokens, hidden], the model's normed rows
    logits     float32 [tokens - 1, vocab], of the entries of all tokens but the first
    drafts     int64 [drafts], the likeliest tokens after the model's own next one
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from make_goldens import load_folder, randomize
from safetensors.torch import save_file
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

GOLDENS = Path(__file__).parent
LAYERS = {
    "qwen3_5": (dense.Qwen3_5DecoderLayer, dense.Qwen3_5RMSNorm),
    "qwen3_5_moe": (moe.Qwen3_5MoeDecoderLayer, moe.Qwen3_5MoeRMSNorm),
    "qwen3_next": (qwen3_next.Qwen3NextDecoderLayer, qwen3_next.Qwen3NextRMSNorm),
}
TOKENS = 40
DRAFTS = 4


class Head(torch.nn.Module):
    """The head of `model`."""

    def __init__(self, model: torch.nn.Module, family: str) -> None:
        super().__init__()
        layer, norm = LAYERS[family]
        self.config = config = model.config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = norm(size, eps=eps)
        self.pre_fc_norm_hidden = norm(size, eps=eps)
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.layers = torch.nn.ModuleList([layer(config, config.layer_types.index("full_attention"))])
        self.norm = norm(size, eps=eps)

    def forward(self, model: torch.nn.Module, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the normed rows of the entries of `token_ids`, whose tokens before have the states `hidden`."""
        embedded = self.pre_fc_norm_embedding(model.model.embed_tokens(token_ids))
        x = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(hidden)], dim=-1))[None]
        positions = torch.arange(len(token_ids))[None]
        mask = torch.full((len(token_ids), len(token_ids)), float("-inf")).triu(1)[None, None]
        x = self.layers[0](x, position_embeddings=model.model.rotary_emb(x, positions), attention_mask=mask)
        return self.norm(x[0])


def main() -> None:
    for index, family in enumerate(LAYERS):
        torch.manual_seed(index)
        model = load_folder(GOLDENS / family).eval()
        head = Head(model, family).eval()
        randomize(head, norm_mean=0.0)
        head.to(torch.bfloat16).float()
        token_ids = torch.randint(0, model.config.vocab_size, (TOKENS,))
        with torch.no_grad():
            hidden = model.model(input_ids=token_ids[None]).last_hidden_state[0]
            logits = model.lm_head(head(model, token_ids[1:], hidden[:-1]))
            drafts = likeliest(model, head, token_ids, hidden)
        folder = GOLDENS / "heads" / family
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"mtp.{name}": values.to(torch.bfloat16) for name, values in head.state_dict().items()}
        save_file(tensors, folder / "head.safetensors", {"format": "pt"})
        np.savez_compressed(
            folder / "golden.npz", token_ids=token_ids, hidden=hidden.numpy(), logits=logits.numpy(), drafts=drafts
        )


def likeliest(model: torch.nn.Module, head: Head, token_ids: torch.Tensor, hidden: torch.Tensor) -> list[int]:
    """Return the drafts after the likeliest next token of the model."""
    entries = [*token_ids[1:].tolist(), int(model.lm_head(hidden[-1]).argmax())]
    states, drafts = hidden, []
    for _ in range(DRAFTS):
        last = head(model, torch.tensor(entries), states)[-1]
        drafts.append(int(model.lm_head(last).argmax()))
        entries.append(drafts[-1])
        states = torch.cat([states, last[None]])
    return drafts


if __name__ == "__main__":
    main()
